"""Records: what comes back from a stored form, and everything that does not."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartattn.buckets import bucket_of
from smartattn.environment import SCHEMA, Provenance
from smartattn.record import (
    Failed,
    Invalid,
    Record,
    Rejected,
    Timed,
    outcome_from_dict,
    outcome_to_dict,
    record_from_dict,
)
from smartattn.signature_text import parse_signature

SIGNATURE = parse_signature("sdpa infer cpu float32 N2 Hq4 H4 L300 S300 E64 Ev64 layout=bhsd mask=none scale=positive")
PROVENANCE = Provenance(date="2026-01-02T03:04:05+00:00", driver="", threads=4, host="here", smartattn="0.1.0")
OUTCOMES = {
    "stock": Timed(26.1, 20.5, 0.4, n=25, error=0.0039, version="1", plan_ms=52.0, peak_bytes=4096, resolved="flash"),
    "math": Timed(device_us=90.0, host_us=30.0, spread_us=1.0, n=9, error=0.5, version="1"),
    "eager": Invalid("row 3 differs by 2.5", "1"),
    "flash": Failed("RuntimeError: no", "2"),
    "flash_for_cpu": Rejected(("too long", "wrong dtype")),
}
RECORD = Record(SIGNATURE, OUTCOMES, PROVENANCE)
HUGE = 10**400


def changed(*path: str, to: object) -> dict[str, Any]:
    """Return the stored form of RECORD with one value replaced; ``...`` removes it."""
    data = copy.deepcopy(RECORD.to_dict())
    inner = data
    for name in path[:-1]:
        inner = inner[name]
    if to is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return data


@pytest.mark.parametrize("bucket", [None, bucket_of(SIGNATURE)], ids=["exact", "bucket"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_record_comes_back_from_json(bucket, dynamic):
    """Through JSON and back a record is equal, in the order that breaks ties, under the same digest."""
    record = Record(SIGNATURE, OUTCOMES, PROVENANCE, bucket=bucket, dynamic=dynamic)
    again = record_from_dict(json.loads(json.dumps(record.to_dict())))
    assert again == record
    assert list(again.outcomes) == list(OUTCOMES)
    assert again.digest == record.digest == (SIGNATURE if bucket is None else bucket).digest


def test_exact_and_bucket_records_have_different_digests():
    """A bucket's record never takes the file of the exact record that it was measured at."""
    assert RECORD.digest != Record(SIGNATURE, {}, PROVENANCE, bucket=bucket_of(SIGNATURE)).digest


positive = st.floats(min_value=0, max_value=1e300, allow_nan=False)


@given(positive, positive, positive, st.integers(0, 10**6), st.integers(0, 2**62))
def test_stored_times_keep_four_digits(device_us, host_us, spread_us, n, peak_bytes):
    """Storing rounds times to four digits, keeps counts exact, and storing again changes nothing."""
    outcome = Timed(device_us, host_us, spread_us, n=n, error=0.0, version="v", peak_bytes=peak_bytes)
    again = outcome_from_dict(json.loads(json.dumps(outcome_to_dict(outcome))))
    assert isinstance(again, Timed)
    assert math.isclose(again.device_us, device_us, rel_tol=5.1e-4, abs_tol=1e-300)
    assert (again.n, again.peak_bytes) == (n, peak_bytes)
    assert outcome_to_dict(again) == outcome_to_dict(outcome)


def test_a_record_of_many_routes_stays_small():
    """Twenty measured routes and twenty rejected ones fit into 8 KiB of JSON."""
    outcomes: dict[str, Any] = {f"fold_gqa+backend{i}": OUTCOMES["stock"] for i in range(20)}
    outcomes |= {
        f"pad_head_dim+backend{i}": Rejected(("needs a GPU of sm80 or newer; this is a CPU",)) for i in range(20)
    }
    assert len(json.dumps(Record(SIGNATURE, outcomes, PROVENANCE).to_dict())) < 8192


def test_outcomes_cannot_be_changed():
    """A record's outcomes are a read-only copy of what it was given."""
    given_outcomes = dict(OUTCOMES)
    record = Record(SIGNATURE, given_outcomes, PROVENANCE)
    given_outcomes.clear()
    assert record.outcomes == OUTCOMES
    with pytest.raises(TypeError):
        record.outcomes["math"] = OUTCOMES["eager"]  # type: ignore[index]  # what the test is about


MALFORMED = {
    "no object": [RECORD.to_dict()],
    "text": "record",
    "nothing": None,
    "empty": {},
    "no schema": changed("schema", to=...),
    "older schema": changed("schema", to=SCHEMA - 1),
    "newer schema": changed("schema", to=SCHEMA + 1),
    "schema as text": changed("schema", to=str(SCHEMA)),
    "schema as bool": changed("schema", to=True),
    "schema as list": changed("schema", to=[SCHEMA]),
    "unknown field": changed("later", to=1),
    "no signature": changed("signature", to=...),
    "signature of another type": changed("signature", to=["sdpa"]),
    "signature that ends early": changed("signature", to="sdpa infer cpu"),
    "signature with a size of 0": changed("signature", to=str(SIGNATURE).replace("L300", "L0")),
    "signature with a lone surrogate": changed("signature", to="\ud800"),
    "no outcomes": changed("outcomes", to=...),
    "outcomes as list": changed("outcomes", to=[]),
    "dynamic as text": changed("dynamic", to="yes"),
    "bucket of other lengths": changed("bucket", to={"N": [1, 2], "L": [1, 2], "S": [1, 2]}),
    "bucket as text": changed("bucket", to="all"),
    "bucket beyond every length": {**changed("signature", to=str(SIGNATURE).replace("L300", f"L{HUGE}")), "bucket": {}},
    "outcome as text": changed("outcomes", "math", to="fast"),
    "outcome of no kind": changed("outcomes", "math", "is", to=...),
    "outcome of an unknown kind": changed("outcomes", "math", "is", to="guessed"),
    "outcome kind as list": changed("outcomes", "math", "is", to=["timed"]),
    "outcome with an unknown field": changed("outcomes", "math", "num_warps", to=4),
    "outcome without its time": changed("outcomes", "math", "device_us", to=...),
    "outcome without its version": changed("outcomes", "eager", "version", to=...),
    "time as text": changed("outcomes", "math", "device_us", to="1.0"),
    "time as bool": changed("outcomes", "math", "device_us", to=True),
    "time of NaN": changed("outcomes", "math", "device_us", to=math.nan),
    "time without end": changed("outcomes", "math", "device_us", to=math.inf),
    "negative time": changed("outcomes", "math", "device_us", to=-1.0),
    "time beyond floats": changed("outcomes", "math", "device_us", to=HUGE),
    "count as float": changed("outcomes", "math", "n", to=1.5),
    "count as bool": changed("outcomes", "math", "n", to=True),
    "negative count": changed("outcomes", "math", "n", to=-1),
    "reason as list": changed("outcomes", "flash", "reason", to=["no"]),
    "reasons as text": changed("outcomes", "flash_for_cpu", "reasons", to="no"),
    "reasons of numbers": changed("outcomes", "flash_for_cpu", "reasons", to=[1]),
    "no provenance": changed("provenance", to=...),
    "provenance as text": changed("provenance", to="here"),
    "provenance without host": changed("provenance", "host", to=...),
    "provenance with an unknown field": changed("provenance", "later", to=1),
    "threads as bool": changed("provenance", "threads", to=True),
    "noisy as number": changed("provenance", "noisy", to=0),
}


def test_the_form_that_the_cases_change_is_good():
    """The stored form that every malformed case starts from is read."""
    assert record_from_dict(RECORD.to_dict()) == RECORD


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_forms_are_refused(data):
    """Every form that differs from a record's in one point raises ``ValueError`` and nothing else."""
    with pytest.raises(ValueError):
        record_from_dict(data)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PATHS = [
    *((name,) for name in RECORD.to_dict()),
    *(("outcomes", name) for name in OUTCOMES),
    *(("outcomes", "stock", name) for name in RECORD.to_dict()["outcomes"]["stock"]),
    *(("provenance", name) for name in PROVENANCE.to_dict()),
]


@given(st.sampled_from(PATHS), plain)
def test_any_value_anywhere_is_read_or_refused(path, value):
    """Whatever stands in a field, the reader returns a record or raises ``ValueError``."""
    try:
        record = record_from_dict(changed(*path, to=value))
    except ValueError:
        return
    assert record_from_dict(record.to_dict()).signature == SIGNATURE


@pytest.mark.parametrize("name", ["n", "peak_bytes"])
def test_numbers_beyond_any_machine_are_refused(name: str):
    """A count that no arithmetic here can hold is damage."""
    data = {"is": "timed", "device_us": 1.0, "host_us": 1.0, "spread_us": 0.0, "n": 1, "error": 0.1, "version": "v"}
    with pytest.raises(ValueError, match=name):
        outcome_from_dict({**data, name: 10**400})
