"""What the user means by a signature: its text, a workload's name, the start of a record's digest, or shapes."""

from __future__ import annotations

import argparse
import re

import torch

from smartattn import cache
from smartattn.errors import UnknownNameError
from smartattn.settings import check_choice
from smartattn.signature import DTYPES, Signature
from smartattn.signature_text import parse_signature
from smartattn.workloads import WORKLOADS, Workload, workload_names

MASKS = ("none", "causal", "padding", "bool", "bias")
LAYOUTS = ("bhsd", "bshd")
PASSES = ("infer", "train")
_DIGEST_START = re.compile(r"[0-9a-f]{4,32}")
HOW = "signature text, workload name (such as llama3/decode-4096), or the first digits of a record's id"


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what a workload or shapes leave open."""
    parser.add_argument("--device", metavar="TYPE", help="cpu or cuda; default: cuda if PyTorch sees a GPU")
    parser.add_argument(
        "--dtype", metavar="DTYPE", help=f"one of {', '.join(DTYPES)}; default: bfloat16, on cpu float32"
    )


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a problem by its shapes."""
    parser.add_argument(
        "--query", metavar="NxHqxLxE", help="shape of query, such as 2x16x2048x64, instead of a signature"
    )
    parser.add_argument("--key", metavar="NxHxSxE", help="shape of key; default: that of query")
    parser.add_argument("--value", metavar="NxHxSxEv", help="shape of value; default: that of key")
    parser.add_argument("--mask", default="none", metavar="MASK", help=f"one of {', '.join(MASKS)}; default: none")
    parser.add_argument("--layout", default="bhsd", metavar="LAYOUT", help="memory order: bhsd (default) or bshd")
    parser.add_argument("--pass", dest="pass_name", default="infer", metavar="PASS", help="infer (default) or train")


def device_and_dtype(device: str | None, dtype: str | None) -> tuple[str, str]:
    """Return both with their defaults filled in.

    Raises:
        UnknownNameError: for others than the product measures.
    """
    found = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_choice("device", found, ("cpu", "cuda"))
    return found, check_choice("dtype", dtype or ("float32" if found == "cpu" else "bfloat16"), tuple(DTYPES))


def read_problem(
    text: str | None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    pass_name: str | None = None,
    **shapes: str | None,
) -> Signature:
    """Return the signature that the words of a command line mean.

    Raises:
        UnknownNameError: saying where the text stops making sense and what comes near.
    """
    pass_name = check_choice("pass", "infer" if pass_name is None else pass_name, PASSES)
    if text is None:
        return _by_shapes(device, dtype, pass_name, shapes)
    if text.split()[:1] == ["sdpa"]:
        return parse_signature(text)
    found = [each for each in WORKLOADS if each.name == text]
    if found:
        return found[0].signature(pass_name, *device_and_dtype(device, dtype))
    if _DIGEST_START.fullmatch(text):
        return read_digest(text)
    if len(text.split()) > 1:
        parse_signature(text)  # raises, saying where
    raise UnknownNameError.of("signature or workload", text, workload_names())


def read_digest(start: str) -> Signature:
    """Return the signature of the one record whose digest begins so.

    Raises:
        UnknownNameError: when none does, or records of several problems do.
    """
    found = {str(e.record.signature): e.record.signature for e in cache.iterate() if e.path.name.startswith(start)}
    if len(found) == 1:
        return next(iter(found.values()))
    what = "no record's id begins" if not found else f"the ids of records of {len(found)} problems begin"
    raise UnknownNameError(f"{what} with {start!r}; smartattn cache list shows them.")


def _by_shapes(device: str | None, dtype: str | None, pass_name: str, shapes: dict[str, str | None]) -> Signature:
    if shapes.get("query") is None:
        raise UnknownNameError(f"no problem was given; give a {HOW}, or --query NxHqxLxE.")
    query = _shape("query", str(shapes["query"]))
    key = _shape("key", shapes["key"]) if shapes.get("key") else query
    value = _shape("value", shapes["value"]) if shapes.get("value") else (*key[:3], key[3])
    mask = check_choice("mask", shapes.get("mask") or "none", MASKS)
    layout = check_choice("layout", shapes.get("layout") or "bhsd", LAYOUTS)
    if not (query[0] == key[0] == value[0] and key[1:3] == value[1:3] and query[3] == key[3]) or query[1] % key[1]:
        raise UnknownNameError(
            f"query {query}, key {key} and value {value} do not fit: they are (N, Hq, L, E), (N, H, S, E) and "
            f"(N, H, S, Ev), and Hq is a multiple of H."
        )
    N, Hq, L, E = query
    workload = Workload("", "", N, Hq, key[1], L, key[2], E, value[3], mask=mask, layout=layout)
    return workload.signature(pass_name, *device_and_dtype(device, dtype))


def _shape(name: str, text: str | None) -> tuple[int, int, int, int]:
    parts = str(text).lower().split("x")
    if len(parts) != 4 or not all(part.isdecimal() and 0 < int(part) < 1 << 40 for part in parts):
        raise UnknownNameError(f"--{name} is {text!r}; it must be four sizes such as 2x16x2048x64.")
    first, second, third, fourth = map(int, parts)
    return first, second, third, fourth
