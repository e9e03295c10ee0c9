"""Guards: every closed form at its limit and beside it, every known fault inside and outside of its conditions."""

from __future__ import annotations

import dataclasses

import pytest

from smartattn import guards
from smartattn.denylist import FAULTS
from smartattn.environment import Environment
from smartattn.layout import Layout
from smartattn.signature import Signature

PLAIN = Layout("bhsd")
H200 = Environment(1, "cuda", "NVIDIA H200", "sm90", 132, "2.11.0+cu130", "abc", "13.0", 91900)
A100 = dataclasses.replace(H200, device_name="NVIDIA A100", capability="sm80", num_multiprocessors=108)
B200 = dataclasses.replace(H200, device_name="NVIDIA B200", capability="sm100", num_multiprocessors=148)
PROCESSOR = Environment(1, "cpu", "processor", "avx2", 0, "2.13.0+cpu", "abc", "", 0)
CPU = Environment(1, "cpu", "a processor", "avx512", 0, "2.13.0+cpu", "abc", "", 0)
NEWER = dataclasses.replace(H200, torch="2.14.1")


def make(**changes: object) -> Signature:
    """Return a plain inference signature with some fields changed."""
    plain = Signature("infer", "cuda", "bfloat16", (2,), 8, 8, 128, 128, 64, 64, (PLAIN, PLAIN, PLAIN))
    if "grads" in changes:
        changes.setdefault("pass_name", "train")
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]  # field names of the tests below


BOOL = {"mask": "bool", "mask_axes": "b1ls", "mask_dtype": "bool", "mask_layout": PLAIN}
FLOAT32 = BOOL | {"mask": "additive", "mask_dtype": "float32"}
ADDITIVE = BOOL | {"mask": "additive", "mask_dtype": "bfloat16"}
UNALIGNED = (Layout("bhsd", has_aligned_start=False), PLAIN, PLAIN)
ODD_ROWS = (Layout("bhsd~", has_aligned_rows=False), PLAIN, PLAIN)
EXPANDED = (PLAIN, Layout("bhsd", expanded="h"), Layout("bhsd", expanded="h"))


def test_a_plain_call_has_no_reasons() -> None:
    """Nothing speaks against ordinary attention, in either pass, anywhere."""
    for environment in (H200, A100, B200, NEWER):
        for name in ("stock", "cudnn", "flash", "efficient", "eager", "math"):
            for signature in (make(), make(grads="qkv"), make(mask="causal", grads="qkv")):
                assert guards.reasons(name, signature, environment) == ()


@pytest.mark.parametrize(
    ("name", "field", "wraps"),
    [
        ("flash", "batch", True),
        ("flash", "Hq", False),
        ("flash_masked", "Hq", False),
        ("cudnn", "batch", True),
        ("cudnn", "Hq", False),
        ("efficient", "Hq", False),
    ],
)
def test_launch_grids_end_at_65535(name: str, field: str, *, wraps: bool) -> None:
    """65534 and 65535 batches or heads are launched, 65536 are not."""
    for size, is_refused in ((65534, False), (65535, False), (65536, True)):
        changes = {field: (size,)} if wraps else {"Hq": size, "H": size}
        assert bool(guards.reasons(name, make(**changes), H200)) == is_refused


def test_efficient_splits_batches_itself() -> None:
    """More than 65535 batches are no limit of Efficient."""
    assert guards.reasons("efficient", make(batch=(65536,)), H200) == ()


@pytest.mark.parametrize(("L", "is_refused"), [(65535, False), (65536, False), (65537, True)])
def test_mask_offsets_of_efficient_end_at_2_to_the_32(L: int, *, is_refused: bool) -> None:
    """A mask of L x 65536 elements is read right up to L of 65536."""
    assert bool(guards.reasons("efficient", make(L=L, S=65536, **BOOL), H200)) == is_refused


def test_mask_rows_count_with_their_padding() -> None:
    """65529 keys are stored as 65536, so 65537 such rows pass the limit although L x S does not."""
    assert guards.reasons("efficient", make(L=65537, S=65529, **BOOL), H200)
    assert 65537 * 65529 < guards.MAX_INDEX_32


def test_masks_without_a_query_axis_have_no_such_limit() -> None:
    """A key-padding mask holds S elements only."""
    assert guards.reasons("efficient", make(L=70000, S=70000, **(BOOL | {"mask_axes": "b11s"})), H200) == ()


@pytest.mark.parametrize(("L", "is_refused"), [(65535, False), (65536, False), (65537, True)])
def test_dropout_offsets_of_efficient_end_at_2_to_the_32(L: int, *, is_refused: bool) -> None:
    """The same product bounds where dropout's numbers are drawn."""
    assert bool(guards.reasons("efficient", make(L=L, S=65536, dropout="other"), H200)) == is_refused


@pytest.mark.parametrize(("N", "is_refused"), [(4095, False), (4096, False), (4097, True)])
@pytest.mark.parametrize(("L", "E"), [(128 * 64, 8), (128 * 64 - 127, 32)])
def test_flash_backward_buffers_end_at_2_to_the_31(N: int, L: int, E: int, *, is_refused: bool) -> None:
    """N x Hq x L rounded up to 128 x E raised to 32 stays within 2^31, in training only."""
    sizes = {"batch": (N,), "Hq": 2, "H": 2, "L": L, "E": E, "Ev": E}
    assert bool(guards.reasons("flash", make(grads="qkv", **sizes), H200)) == is_refused
    assert guards.reasons("flash", make(**sizes), H200) == ()


CASES = [
    ("cudnn_fills_bool_masks_with_a_finite_value", "stock", H200, BOOL, ADDITIVE),
    ("cudnn_misreads_float32_masks", "stock", H200, FLOAT32, ADDITIVE),
    ("efficient_raises_over_float32_masks", "stock", A100, FLOAT32, ADDITIVE),
    ("cudnn_misreads_unaligned_memory", "stock", H200, {"layouts": UNALIGNED}, {}),
    ("cudnn_misreads_unaligned_memory", "stock", H200, {"layouts": ODD_ROWS}, {}),
    (
        "cudnn_misreads_unaligned_memory",
        "stock",
        H200,
        ADDITIVE | {"mask_layout": Layout("bhls", has_aligned_start=False)},
        ADDITIVE,
    ),
    ("flash_reads_unaligned_memory", "stock", A100, {"layouts": UNALIGNED}, {"layouts": UNALIGNED, "E": 60, "Ev": 60}),
    (
        "efficient_reads_unaligned_starts",
        "stock",
        H200,
        {"layouts": UNALIGNED, "dtype": "float32"},
        {"dtype": "float32"},
    ),
    (
        "efficient_raises_over_unaligned_rows",
        "stock",
        H200,
        {"layouts": ODD_ROWS, "dtype": "float32"},
        {"dtype": "float32"},
    ),
    (
        "efficient_raises_over_masks_of_one_key_column",
        "stock",
        A100,
        BOOL | {"mask_axes": "l1"},
        BOOL | {"mask_axes": "l1", "S": 1},
    ),
    (
        "efficient_forgets_mask_only_gradients",
        "stock",
        H200,
        ADDITIVE | {"grads": "m", "pass_name": "train"},
        ADDITIVE | {"grads": "qm", "pass_name": "train"},
    ),
    (
        "efficient_misreads_expanded_keys",
        "efficient",
        H200,
        BOOL | {"layouts": EXPANDED, "S": 129},
        BOOL | {"layouts": EXPANDED, "S": 130},
    ),
    ("efficient_misreads_expanded_keys", "efficient", H200, BOOL | {"layouts": EXPANDED, "S": 33}, BOOL | {"S": 33}),
    (
        "cudnn_backward_is_nan_at_key_lengths_64_modulo_128",
        "cudnn",
        H200,
        {"S": 704, "grads": "qkv"},
        {"S": 640, "grads": "qkv"},
    ),
    (
        "cudnn_backward_is_nan_at_key_lengths_64_modulo_128",
        "stock",
        H200,
        {"S": 192, "grads": "k"},
        {"L": 192, "S": 192, "grads": "qkv", "mask": "causal"},
    ),
    ("cudnn_backward_is_nan_at_one_query", "cudnn", H200, {"L": 1, "grads": "qkv"}, {"L": 1}),
    ("cudnn_decode_is_wrong_with_few_key_heads", "cudnn", B200, {"L": 1, "H": 4, "gqa": "enabled"}, {"L": 1}),
    ("fused_operators_need_a_positive_scale", "stock", H200, {"scale": "non_positive"}, {}),
    (
        "flash_for_cpu_misreads_float32_masks",
        "stock",
        CPU,
        FLOAT32 | {"device_type": "cpu", "dtype": "float64"},
        FLOAT32 | {"device_type": "cpu", "dtype": "float32"},
    ),
    (
        "flash_for_cpu_needs_a_positive_scale",
        "stock",
        CPU,
        {"device_type": "cpu", "scale": "non_positive", "mask": "causal"},
        {"device_type": "cpu", "scale": "non_positive"},
    ),
    (
        "flash_for_cpu_misreads_float32_masks",
        "stock",
        PROCESSOR,
        FLOAT32 | {"device_type": "cpu", "dtype": "float64"},
        FLOAT32 | {"device_type": "cpu", "dtype": "float32"},
    ),
    (
        "flash_for_cpu_needs_a_positive_scale",
        "stock",
        PROCESSOR,
        {"device_type": "cpu", "scale": "non_positive", "mask": "causal"},
        {"device_type": "cpu", "scale": "non_positive"},
    ),
    (
        "flash_for_cpu_gradients_of_rows_of_nothing_but_large_negative_values",
        "stock",
        PROCESSOR,
        FLOAT32 | {"device_type": "cpu", "dtype": "float32", "pass_name": "train", "grads": "qkv"},
        FLOAT32 | {"device_type": "cpu", "dtype": "float32"},
    ),
]


@pytest.mark.parametrize(("fault", "name", "environment", "inside", "outside"), CASES)
def test_known_faults_apply_to_their_conditions_only(
    fault: str, name: str, environment: Environment, inside: dict[str, object], outside: dict[str, object]
) -> None:
    """A call that meets the fault is refused with its text and reference; its neighbour is not refused for it."""
    (row,) = (row for row in FAULTS if row.name == fault)
    found = guards.reasons(name, make(**inside), environment)
    assert any(row.text in text and row.reference in text for text in found)
    assert not any(row.text in text for text in guards.reasons(name, make(**outside), environment))


def test_every_fault_is_tried() -> None:
    """The table of cases names every row of the deny-list, and every row names its reference."""
    assert {case[0] for case in CASES} == {row.name for row in FAULTS}
    assert all(row.reference and row.text and row.paths for row in FAULTS)


def test_fixed_versions_are_free_of_their_faults() -> None:
    """A row with a fixed version does not speak against that version."""
    assert guards.reasons("stock", make(**BOOL), dataclasses.replace(H200, torch="2.12.0")) == ()
    assert guards.reasons("stock", make(**FLOAT32), NEWER) == ()


def test_other_devices_are_not_guarded() -> None:
    """CPU signatures and backends without fused CUDA operators get no reasons."""
    assert guards.reasons("flash", make(device_type="cpu", batch=(70000,)), H200) == ()
    assert guards.reasons("math", make(batch=(70000,)), H200) == ()
    assert guards.reasons("some_plugin", make(batch=(70000,)), H200) == ()


def test_stock_names_what_it_resolves_to() -> None:
    """On an A100 flash comes first and masks go to Efficient, so cuDNN's faults do not speak against stock there."""
    assert guards.reasons("stock", make(**BOOL), A100) == ()
    (text,) = guards.reasons("stock", make(**BOOL), H200)
    assert text.startswith("PyTorch would run cudnn, which gives rows that see no key garbage")
