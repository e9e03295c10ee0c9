"""Workloads: published shapes, complete, distinct, and such that inputs exist for them."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from smartattn.inputs import synthesize
from smartattn.signature import read_signature
from smartattn.signature_text import parse_signature
from smartattn.workloads import WORKLOADS, Workload, signatures, workload_names

MODELS = (
    "bert", "vit-b16", "siglip", "whisper", "llama2", "llama3", "gemma", "phi3", "deepseek", "sd15", "sdxl", "flux",
    "swin", "t5", "alphafold",
)  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_there(model: str):
    """Each model that the list promises has at least one case."""
    assert any(name.startswith(f"{model}/") for name in workload_names())


def test_llama_has_prefill_and_decode():
    """Both phases of generation are there for Llama 2 and 3."""
    for model in ("llama2", "llama3"):
        tags = {tag for each in WORKLOADS if each.name.startswith(model) for tag in each.tags}
        assert {"prefill", "decode"} <= tags


def test_names_are_distinct_and_sources_given():
    """Each case has a name of its own and says where its sizes come from."""
    assert len(set(workload_names())) == len(WORKLOADS)
    assert all(re.match(r"[a-z0-9.-]+/[a-z0-9-]+$", each.name) for each in WORKLOADS)
    assert all(len(each.source) > 10 for each in WORKLOADS)


def test_workloads_are_frozen():
    """Nobody can change a case for everyone else."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        WORKLOADS[0].L = 1


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.name)
def test_signatures_parse_back_and_have_inputs(workload: Workload):
    """Text and inputs of each case, cut to a small batch and length, say the same problem again."""
    small = dataclasses.replace(workload, N=min(workload.N, 2), L=min(workload.L, 64), S=min(workload.S, 64))
    for pass_name in ("infer", "train") if workload.trains else ("infer",):
        whole = workload.signature(pass_name, "cpu", "float32")
        assert parse_signature(str(whole)) == whole
        signature = small.signature(pass_name, "cpu", "float32")
        with torch.set_grad_enabled(pass_name == "train"):
            assert read_signature(synthesize(signature, torch.device("cpu"))) == signature


def test_training_leaves_out_what_only_infers():
    """Decoding is no training problem."""
    found = [str(each) for each in signatures("cuda", "bfloat16", ("train",))]
    assert len(found) == sum(each.trains for each in WORKLOADS)
    assert not any(" L1 " in text for text in found)
