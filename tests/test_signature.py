"""Signatures: every fact moves the key, no value does, and the text reads back."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from smartattn.errors import UnknownNameError
from smartattn.layout import Layout
from smartattn.signature import DTYPES, MASK_KINDS, Call, Signature, read_signature
from smartattn.signature_text import parse_signature
from tests.fakes import tensors

BASE = Signature(
    pass_name="infer", device_type="cpu", dtype="float32", batch=(2,), Hq=4, H=4, L=64, S=64, E=32, Ev=32,
    layouts=(Layout("bhsd"),) * 3,
)  # fmt: skip

OTHERS = {
    "pass_name": "train",
    "device_type": "cuda",
    "dtype": "bfloat16",
    "batch": (3,),
    "Hq": 8,
    "H": 2,
    "L": 65,
    "S": 65,
    "E": 64,
    "Ev": 64,
    "layouts": (Layout("bhsd"), Layout("bhsd"), Layout("bshd")),
    "mask": "causal",
    "scale": "non_positive",
    "gqa": "enabled",
    "grads": "q",
    "mask_axes": "11ls",
    "mask_dtype": "bool",
    "mask_layout": Layout("bhls"),
    "dropout": "other",
    "autocast": "bfloat16",
    "deterministic": "strict",
    "precision": "tf32",
    "reduced": True,
    "disabled": "c",
}
LENGTHS = ("batch", "L", "S")


def test_every_field_has_another_value_here():
    """A new field cannot be forgotten: this table must know it."""
    assert set(OTHERS) == {field.name for field in dataclasses.fields(Signature)}


@pytest.mark.parametrize("name", OTHERS)
def test_every_field_moves_text_and_digest(name: str):
    """Changing any one field changes the text, and so the name of the file."""
    moved = dataclasses.replace(BASE, **{name: OTHERS[name]})
    assert str(moved) != str(BASE)
    assert moved.digest != BASE.digest
    assert moved != BASE


@pytest.mark.parametrize("name", OTHERS)
def test_every_field_reads_back(name: str):
    """The text with that field changed parses to an equal signature."""
    moved = dataclasses.replace(BASE, **{name: OTHERS[name]})
    assert parse_signature(str(moved)) == moved


@pytest.mark.parametrize("name", OTHERS)
def test_family_forgets_lengths_alone(name: str):
    """All fields but N, L and S move the family; of those, only whether L equals S is left."""
    moved = dataclasses.replace(BASE, **{name: OTHERS[name]})
    if name in ("L", "S"):
        assert moved.family == BASE.family.removesuffix(" L=S")
    elif name in LENGTHS:
        assert moved.family == BASE.family
    else:
        assert moved.family != BASE.family


@pytest.mark.parametrize("position", range(3))
def test_each_layout_of_the_three_counts(position: int):
    """Query, key and value each move the key with their own layout, and none can stand in for another."""
    texts = set()
    for i in range(3):
        layouts = [Layout("bhsd")] * 3
        layouts[i] = Layout("bshd")
        texts.add(str(dataclasses.replace(BASE, layouts=tuple(layouts))))
    assert len(texts) == 3
    assert "bshd" in sorted(texts)[position]


def test_text_is_the_documented_one():
    """The text form is the one that stands in the documentation."""
    query, key, value = tensors(2, 32, 16, 64, H=8)
    found = read_signature(Call(query, key, value, is_causal=True, enable_gqa=True))
    assert str(found) == (
        "sdpa infer cpu float32 N2 Hq32 H8 L16 S16 E64 Ev64 layout=bhsd mask=causal scale=positive gqa=enabled"
    )


# --- What a call is reduced to -------------------------------------------------------------------------------------


def signature_of(*args: object, **kwargs: object) -> Signature:
    found = read_signature(Call(*args, **kwargs))
    assert found is not None
    return found


def test_gradients_that_are_wanted_are_named():
    """Each of query, key, value and mask shows by its letter, and nothing does without gradient mode."""
    query, key, value = tensors(1, 2, 4, 8)
    mask = torch.zeros(4, 4)
    for letter, tensor in zip("qkvm", (query, key, value, mask), strict=True):
        tensor.requires_grad_()
        found = signature_of(query, key, value, mask)
        assert (found.grads, found.pass_name) == (letter, "train")
        with torch.no_grad():
            found = signature_of(query, key, value, mask)
            assert (found.grads, found.pass_name) == ("", "infer")
        tensor.requires_grad_(requires_grad=False)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((4, 5), "ls"),
        ((1, 5), "1s"),
        ((4, 1), "l1"),
        ((2, 1, 1, 5), "b11s"),
        ((2, 3, 4, 5), "bhls"),
        ((3, 1, 1), "h11"),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_mask_shows_kind_dtype_and_broadcast(shape: tuple[int, ...], axes: str, is_causal: bool, dtype: torch.dtype):
    """The signature of a masked call says which axes the mask has and whether the triangle applies too."""
    query, key, value = tensors(2, 3, 4, 8, S=5)
    found = signature_of(query, key, value, torch.ones(shape, dtype=dtype), is_causal=is_causal)
    kind = "bool" if dtype == torch.bool else "additive"
    assert found.mask == ("causal+" + kind if is_causal else kind)
    assert found.mask in MASK_KINDS
    assert found.mask_axes == axes
    assert found.mask_dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("scale", "name"),
    [(None, "positive"), (0.5, "positive"), (100.0, "positive"), (0.0, "non_positive"), (-1.0, "non_positive")],
)
def test_scale_is_a_class(scale: float | None, name: str):
    """Only the sign of the scale counts, since speed does not depend on its value."""
    assert signature_of(*tensors(1, 2, 4, 8), scale=scale).scale == name


@pytest.mark.parametrize(
    ("dropout_p", "name"), [(0.0, "none"), (0.0625, "sixteenths"), (0.5, "sixteenths"), (0.1, "other")]
)
def test_dropout_is_a_class(dropout_p: float, name: str):
    """Of the rate only what backends distinguish counts."""
    assert signature_of(*tensors(1, 2, 4, 8), dropout_p=dropout_p).dropout == name


def test_grouped_heads_show_how_they_were_asked_for():
    """Equal heads, ``enable_gqa`` and one broadcast key head are three classes."""
    assert signature_of(*tensors(1, 4, 4, 8), enable_gqa=True).gqa == "none"
    assert signature_of(*tensors(1, 4, 4, 8, H=2), enable_gqa=True).gqa == "enabled"
    assert signature_of(*tensors(1, 4, 4, 8, H=1)).gqa == "implicit"


def test_switches_of_the_process_count(monkeypatch: pytest.MonkeyPatch):
    """Autocast, determinism and switched-off backends are part of the key while they last."""
    call = tensors(1, 2, 4, 8)
    plain = signature_of(*call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert signature_of(*call).autocast == "bfloat16"
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert signature_of(*call).deterministic == "strict"
    finally:
        torch.use_deterministic_algorithms(mode=False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert signature_of(*call).disabled == "fec"
    assert signature_of(*call) == plain


@pytest.mark.parametrize(
    ("case", "call"),
    [
        ("two dimensions", lambda: [torch.ones(4, 8)] * 3),
        ("size zero", lambda: tensors(0, 2, 4, 8)),
        ("no keys", lambda: (torch.ones(1, 2, 4, 8), torch.ones(1, 2, 0, 8), torch.ones(1, 2, 0, 8))),
        ("batch sizes that broadcast", lambda: (torch.ones(2, 2, 4, 8), torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8))),
        ("unequal key and value heads", lambda: (torch.ones(1, 4, 4, 8), torch.ones(1, 2, 4, 8), torch.ones(1, 4, 4, 8))),
        ("unequal key and value lengths", lambda: (torch.ones(1, 2, 4, 8), torch.ones(1, 2, 5, 8), torch.ones(1, 2, 6, 8))),
        ("unequal head dims", lambda: (torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 4), torch.ones(1, 2, 4, 8))),
        ("groups without enable_gqa", lambda: tensors(1, 4, 4, 8, H=2)),
        ("mixed dtypes", lambda: (torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8).half(), torch.ones(1, 2, 4, 8))),
        ("integers", lambda: [torch.ones(1, 2, 4, 8, dtype=torch.int32)] * 3),
        ("unequal ranks", lambda: (torch.ones(1, 2, 4, 8), torch.ones(2, 4, 8), torch.ones(2, 4, 8))),
    ],
)  # fmt: skip
def test_what_pytorch_answers_in_its_own_way_has_no_signature(case: str, call):
    """Irregular and wrong calls are left to PyTorch."""
    assert read_signature(Call(*call())) is None


@pytest.mark.parametrize("shape", [(5,), (), (3, 5), (4, 6), (2, 3, 4, 5, 1), (3, 3, 4, 5), (1, 1, 1, 4, 5)])
def test_a_mask_that_does_not_fit_has_no_signature(shape: tuple[int, ...]):
    """A mask that does not broadcast to the scores is PyTorch's to refuse."""
    query, key, value = tensors(2, 3, 4, 8, S=5)
    assert read_signature(Call(query, key, value, torch.ones(shape, dtype=torch.bool))) is None


@pytest.mark.parametrize("changes", [{"scale": math.nan}, {"scale": math.inf}, {"dropout_p": 1.0}, {"dropout_p": -0.1}])
def test_numbers_out_of_range_have_no_signature(changes: dict[str, float]):
    """Scales that are no numbers and dropout rates outside [0, 1) are PyTorch's to answer."""
    assert read_signature(Call(*tensors(1, 2, 4, 8), **changes)) is None


# --- Properties ----------------------------------------------------------------------------------------------------

sizes = st.integers(1, 9)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Draw a regular call: ranks 3 to 5, groups, layouts, masks, dropout, scale."""
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    H, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    L, S, E, Ev = draw(sizes), draw(sizes), draw(sizes), draw(sizes)
    dtype = draw(st.sampled_from(list(DTYPES.values())))

    def tensor(heads: int, length: int, dim: int) -> torch.Tensor:
        kind = draw(st.sampled_from(["contiguous", "bshd", "gapped", "expanded"]))
        if kind == "bshd":
            return torch.zeros(*batch, length, heads, dim, dtype=dtype).transpose(-2, -3)
        if kind == "gapped":
            return torch.zeros(*batch, heads, length + 1, 3 * dim, dtype=dtype)[..., :length, dim : 2 * dim]
        if kind == "expanded":
            return torch.zeros(*batch, 1, length, dim, dtype=dtype).expand(*batch, heads, length, dim)
        return torch.zeros(*batch, heads, length, dim, dtype=dtype)

    query, key, value = tensor(H * group, L, E), tensor(H, S, E), tensor(H, S, Ev)
    mask = None
    if draw(st.booleans()):
        full = (*batch, H * group, L, S)
        kept = draw(st.integers(2, len(full)))
        shape = [draw(st.sampled_from([1, size])) for size in full[-kept:]]
        mask = torch.ones(shape, dtype=draw(st.sampled_from([torch.bool, dtype])))
    return Call(
        query,
        key,
        value,
        mask,
        dropout_p=draw(st.sampled_from([0.0, 0.1, 0.25])),
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, 0.0, -2.0])),
        enable_gqa=group > 1 or draw(st.booleans()),
    )


@given(calls())
def test_text_of_any_call_reads_back(call: Call):
    """Whatever a call looks like, its text parses to an equal signature with an equal text."""
    found = signature_of(*call)
    again = parse_signature(str(found))
    assert again == found
    assert str(again) == str(found)


@given(calls(), st.sampled_from([0.0, 1.0, -3.5, math.nan, math.inf]))
def test_values_do_not_move_the_signature(call: Call, fill: float):
    """No element of query, key, value or mask, not even NaN, changes the key."""
    before = signature_of(*call)
    for tensor in call.tensors:
        # Expanded tensors share memory between elements, so the memory is filled instead.
        base = tensor if tensor._base is None else tensor._base
        base.fill_(fill)
    assert signature_of(*call) == before


@given(calls(), st.floats(0.01, 100))
def test_the_value_of_a_positive_scale_does_not_move_the_signature(call: Call, scale: float):
    """Only the class of a scale counts."""
    assume(call.scale is None or call.scale > 0)
    assert signature_of(*call._replace(scale=scale)) == signature_of(*call)


@given(calls(), calls())
def test_equal_texts_mean_equal_signatures(one: Call, other: Call):
    """Two calls share a text exactly when they share a signature."""
    first, second = signature_of(*one), signature_of(*other)
    assert (str(first) == str(second)) == (first == second)
    assert (first.digest == second.digest) == (first == second)


# --- Reading text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "read", "given_word", "expected"),
    [
        ("", "", "the end", "'sdpa'"),
        ("spda infer", "", "spda", "'sdpa'"),
        ("sdpa inference cpu", "sdpa", "inference", "'infer' or 'train'"),
        ("sdpa infer cpu float23 N1", "sdpa infer cpu", "float23", "a dtype: float16, bfloat16, float32, float64"),
        ("sdpa infer cpu float32 2", "sdpa infer cpu float32", "2", "'N8'"),
        ("sdpa infer cpu float32 N2 Hq0", "sdpa infer cpu float32 N2", "Hq0", "'Hq8'"),
        ("sdpa infer cpu float32 N2 Hq4 H4 L8 S8 E8", "sdpa infer cpu float32 N2 Hq4 H4 L8 S8 E8", "the end", "'Ev8'"),
        (f"{BASE} size=3", str(BASE), "size=3", "each name once, of: layout, mask, scale"),
        (str(BASE).replace("H4 L64", "H3 L64"), "N2 Hq4", "H3", "a divisor of 4"),
        (str(BASE).replace("=positive", "=negative"), "mask=none", "scale=negative", "positive, non_positive"),
        (f"{BASE} mask", str(BASE), "mask", "name=value"),
        (f"{BASE} mask_layout=BHLS", str(BASE), "mask_layout=BHLS", "name=value"),
        (str(BASE).replace("layout=bhsd", "layout=bhsd,bhsd"), "E32 Ev32", "layout=bhsd,bhsd", "name=value"),
        (str(BASE).replace(" layout=bhsd", ""), "scale=positive", "the end", "'layout=...'"),
    ],
)
def test_wrong_text_shows_where_it_stopped_making_sense(text: str, read: str, given_word: str, expected: str):
    """The error quotes what was understood, the word that was not, and what should stand there."""
    with pytest.raises(UnknownNameError) as caught:
        parse_signature(text)
    message = str(caught.value)
    assert f"{read}'; then comes {given_word!r}" in message
    assert expected in message


@given(st.text(max_size=80))
def test_any_other_text_is_refused_in_one_way(text: str):
    """Random text raises ``UnknownNameError`` and nothing else."""
    with pytest.raises(UnknownNameError):
        parse_signature(text)


@given(st.data())
def test_a_damaged_text_is_refused_or_read_as_what_it_says(data: st.DataObject):
    """A text with one word replaced by another either raises or parses to a signature with that very text."""
    words = str(dataclasses.replace(BASE, mask="bool", mask_dtype="bool", mask_axes="11ls")).split()
    index = data.draw(st.integers(0, len(words) - 1))
    words[index] = data.draw(
        st.sampled_from([*words, "L٣", "L" + "9" * 5000, "mask=", "=", "reduced=off", "N1x", "Nx"])
    )
    text = " ".join(words)
    try:
        found = parse_signature(text)
    except UnknownNameError:
        return
    assert parse_signature(str(found)) == found


def test_absurd_sizes_are_refused():
    """A number of thousands of digits is an error of ours, not of Python's integer parser."""
    with pytest.raises(UnknownNameError, match="then comes"):
        parse_signature(str(BASE).replace("L64", "L" + "9" * 5000))


def test_a_text_that_repeats_a_field_is_refused():
    """A field given twice has no one meaning."""
    with pytest.raises(UnknownNameError, match="then comes 'mask=causal'"):
        parse_signature(f"{BASE} mask=causal")
