"""The text of a signature read back, saying where it stops making sense.

``str(signature)`` writes the text; see ``signature`` for its form.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable
from typing import Any

from smartattn.errors import UnknownNameError
from smartattn.layout import parse_layout
from smartattn.signature import DTYPES, FIELD_CHOICES, OPTIONAL_FIELDS, SIZES, Signature

_SIZE = re.compile(r"[1-9][0-9]{0,14}")
_USUAL = re.compile(
    rf"sdpa (infer|train) ([a-z]+) ({'|'.join(DTYPES)}) N(-|{_SIZE.pattern}(?:x{_SIZE.pattern})*) "
    + " ".join(rf"{name}({_SIZE.pattern})" for name in SIZES)
    + " (.+)"
)
"""A signature's text as ``str`` writes it."""


def _fail(index: int, words: list[str], expected: str, allowed: Iterable[str] = ()) -> UnknownNameError:
    read = " ".join(words[:index])
    given = words[index] if index < len(words) else "the end"
    nearest = difflib.get_close_matches(given, allowed, n=3, cutoff=0.5)
    hint = f". Did you mean {' or '.join(nearest)}?" if nearest else ""
    return UnknownNameError(
        f"signature text makes sense up to {read!r}; then comes {given!r}, expected {expected}{hint}"
    )


def parse_signature(text: str) -> Signature:
    """Return the signature whose ``str`` is ``text``.

    Raises:
        UnknownNameError: names the first word that makes no sense and what was expected there.
    """
    found = _USUAL.fullmatch(text)
    if found is not None:
        # The form that ``str`` gives, in one step and with the fields behind the sizes from memory: 10,000 records are
        # listed within a second. Whatever is wrong is told by the way below.
        pass_name, device_type, dtype, batch_text, *numbers, rest = found.groups()
        fields = _usual_fields(rest)
        Hq, H, L, S, E, Ev = map(int, numbers)
        if fields is not None and Hq % H == 0:
            batch = () if batch_text == "-" else tuple(map(int, batch_text.split("x")))
            return Signature(pass_name, device_type, dtype, batch, Hq, H, L, S, E, Ev, **fields)
    return _parse_words(text.split())


@functools.lru_cache(maxsize=2048)
def _usual_fields(text: str) -> dict[str, Any] | None:
    """Return the fields after the sizes; ``None`` where they are not right. The dict is shared: only read it."""
    try:
        fields = _parse_fields(text.split(), start=0)
    except UnknownNameError:
        return None
    return fields if "layouts" in fields else None


def _parse_words(words: list[str]) -> Signature:
    heads: list[tuple[str, tuple[str, ...]]] = [
        ("'sdpa'", ("sdpa",)),
        ("'infer' or 'train'", ("infer", "train")),
        ("a device type such as 'cpu' or 'cuda'", ()),
        (f"a dtype: {', '.join(DTYPES)}", tuple(DTYPES)),
    ]
    for index, (expected, allowed) in enumerate(heads):
        if index >= len(words) or (allowed and words[index] not in allowed) or not words[index].isalnum():
            raise _fail(index, words, expected, allowed)
    sizes: dict[str, Any] = {}
    batch: tuple[int, ...] = ()
    for index, name in enumerate(("N", *SIZES), start=len(heads)):
        word = words[index] if index < len(words) else ""
        number = word.removeprefix(name)
        parts = () if name == "N" and number == "-" else tuple(number.split("x"))
        is_readable = word.startswith(name) and all(_SIZE.fullmatch(part) for part in parts)
        if not is_readable or (name != "N" and len(parts) != 1):
            raise _fail(index, words, f"{name} followed by its size, such as '{name}8'")
        if name == "N":
            batch = tuple(map(int, parts))
        else:
            sizes[name] = int(number)
    if sizes["Hq"] % sizes["H"]:
        raise _fail(len(heads) + 2, words, f"H followed by a divisor of {sizes['Hq']}")
    fields = _parse_fields(words, start=len(heads) + 1 + len(SIZES))
    if "layouts" not in fields:
        raise _fail(len(words), words, "'layout=...'")
    return Signature(
        pass_name=words[1],
        device_type=words[2],
        dtype=words[3],
        batch=batch,
        **sizes,
        **fields,
    )


def _parse_fields(words: list[str], start: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for index in range(start, len(words)):
        name, equals, value = words[index].partition("=")
        try:
            if not equals or value not in FIELD_CHOICES.get(name, (value or None,)):
                raise ValueError
            if ("layouts" if name == "layout" else name) in fields:
                raise ValueError
            if name == "layout":
                parsed = [parse_layout(part) for part in value.split(",")]
                if len(parsed) not in (1, 3):
                    raise ValueError
                fields["layouts"] = tuple(parsed * (3 // len(parsed)))
            elif name == "mask_layout":
                fields[name] = parse_layout(value)
            elif name == "reduced":
                fields[name] = value == "on"
            elif name in ("mask", "scale", *OPTIONAL_FIELDS):
                fields[name] = value
            else:
                raise ValueError
        except ValueError:
            if name in FIELD_CHOICES and name not in fields:
                allowed = [f"{name}={each}" for each in FIELD_CHOICES[name]]
                expected = f"{name}= one of: {', '.join(FIELD_CHOICES[name])}"
            else:
                allowed = [
                    f"{each}={value}" for each in ("layout", "mask", "scale", *OPTIONAL_FIELDS) if each not in fields
                ]
                expected = f"name=value, each name once, of: {', '.join(('layout', 'mask', 'scale', *OPTIONAL_FIELDS))}"
            raise _fail(index, words, expected, allowed) from None
    return fields
