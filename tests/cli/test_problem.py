"""What may stand for a signature on a command line, and what is said of anything else."""

from __future__ import annotations

import pytest

import smartattn
from smartattn import cache
from smartattn.cli.problem import read_problem
from smartattn.errors import UnknownNameError
from smartattn.selector import selector
from tests.test_exchange import HERE, THERE, problem, record


def test_text_workload_and_shapes():
    """A signature's text, a workload's name, and shapes mean what they say."""
    text = (
        "sdpa train cpu float32 N2 Hq4 H2 L16 S24 E8 Ev12 layout=bhsd mask=causal scale=positive gqa=enabled grads=qkv"
    )
    assert str(read_problem(text)) == text
    shapes = {"query": "2x4x16x8", "key": "2x2x24x8", "value": "2x2x24x12", "mask": "causal"}
    assert str(read_problem(None, device="cpu", dtype="float32", pass_name="train", **shapes)) == text
    assert read_problem("bert/encoder-512", device="cuda").dtype == "bfloat16"
    assert read_problem("bert/encoder-512", device="cpu").dtype == "float32"
    assert read_problem(None, device="cpu", query="1x2x3x4").S == 3


def test_the_start_of_an_id():
    """The first digits of a record's id mean its signature; the same problem elsewhere does not make it ambiguous."""
    for environment in (HERE, THERE):
        selector.memory.store.publish(environment, record(8))
    assert read_problem(problem(8).digest[:6]) == problem(8)
    with pytest.raises(UnknownNameError, match="no record's id begins with 'ffff'"):
        read_problem("ffff")
    assert len(cache.records()) == 2
    assert smartattn.stats().tunings == 0


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("bert/encoder-51", {}, "Did you mean 'bert/encoder-512'"),
        ("spda infer cpu float32", {}, "makes sense up to ''; then comes 'spda', expected 'sdpa'. Did you mean sdpa"),
        ("sdpa infer cpu flaot32 N1", {}, "up to 'sdpa infer cpu'; then comes 'flaot32'"),
        (None, {}, "give a signature text"),
        (None, {"query": "1x2x3"}, "--query is '1x2x3'; it must be four sizes"),
        (None, {"query": "1x3x4x8", "key": "1x2x4x8"}, "do not fit"),
        (None, {"query": "1x2x4x8", "mask": "casual"}, "Did you mean 'causal'"),
        (None, {"query": "1x2x4x8", "layout": "bhs"}, "Did you mean 'bhsd'"),
        ("bert/encoder-512", {"device": "gpu"}, "device is 'gpu'"),
        ("bert/encoder-512", {"pass_name": "inference"}, "Did you mean 'infer'"),
    ],
)
def test_wrong_words_are_told(text: str | None, words: dict[str, str], hint: str):
    """The place where a text stops making sense, and the nearest names."""
    with pytest.raises(UnknownNameError) as caught:
        read_problem(text, **words)
    assert hint in str(caught.value)
