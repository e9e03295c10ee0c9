"""What tuning found: one outcome per route, kept whole, also when a route was rejected, failed or was wrong.

The choice is derived from a record when it is needed (``choice``), so a new objective needs no new measuring.
A record is plain data on disk; a file can only name routes, never carry code.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from smartattn.buckets import Bucket, bucket_of
from smartattn.environment import SCHEMA, Provenance
from smartattn.signature import Signature
from smartattn.signature_text import parse_signature


@dataclass(frozen=True, slots=True)
class Timed:
    """A route that is valid and was measured.

    Attributes:
        device_us: median device time per call (forward and backward when training).
        host_us: median host time per call.
        spread_us: interquartile range of the eager cost.
        n: number of timed blocks behind the medians.
        error: largest error against the reference, as a share of what is allowed.
        version: of the backend.
        plan_ms: what a first call at a new exact shape costs beyond a steady one.
        peak_bytes: most bytes allocated beyond inputs and output during a call.
        resolved: backend that ``stock`` ran; empty elsewhere.
    """

    is_: ClassVar[str] = "timed"
    device_us: float
    host_us: float
    spread_us: float
    n: int
    error: float
    version: str
    plan_ms: float = 0.0
    peak_bytes: int = 0
    resolved: str = ""

    @property
    def cost_us(self) -> float:
        """Steady cost of an eager call: the slower of device and host."""
        return max(self.device_us, self.host_us)


@dataclass(frozen=True, slots=True)
class Invalid:
    """A route whose result differed from the reference.

    Attributes:
        reason: which probe, where and by how much.
        version: of the backend.
    """

    is_: ClassVar[str] = "invalid"
    reason: str
    version: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A route that raised.

    Attributes:
        reason: type and text of the error.
        version: of the backend.
    """

    is_: ClassVar[str] = "failed"
    reason: str
    version: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A route that was not run.

    Attributes:
        reasons: all of them.
    """

    is_: ClassVar[str] = "rejected"
    reasons: tuple[str, ...]


Outcome = Timed | Invalid | Failed | Rejected
_OUTCOMES: dict[str, type[Outcome]] = {kind.is_: kind for kind in (Timed, Invalid, Failed, Rejected)}
_LARGEST = sys.float_info.max
# Looked up once: listing 10,000 records builds some 100,000 outcomes.
_FIELD_TYPES = {kind: {item.name: str(item.type) for item in dataclasses.fields(kind)} for kind in _OUTCOMES.values()}
_PROVENANCE_TYPES = {
    item.name: {"str": str, "int": int, "bool": bool}[str(item.type)] for item in dataclasses.fields(Provenance)
}


@dataclass(frozen=True)
class Record:
    """Everything that tuning found for one signature.

    Attributes:
        signature: the exact problem that was measured.
        outcomes: route name to outcome, in the order that breaks ties.
        provenance: circumstances.
        bucket: the range of lengths that this record may answer for; ``None`` for an exact record.
        dynamic: whether it was made for lengths declared to keep changing (pre-warmed by a range).
    """

    signature: Signature
    outcomes: Mapping[str, Outcome]
    provenance: Provenance
    bucket: Bucket | None = None
    dynamic: bool = False
    schema: int = field(default=SCHEMA)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcomes", MappingProxyType(dict(self.outcomes)))

    @property
    def digest(self) -> str:
        """Name of the record's file."""
        return self.signature.digest if self.bucket is None else self.bucket.digest

    def to_dict(self) -> dict[str, Any]:
        """Return the stored form."""
        data: dict[str, Any] = {"schema": self.schema, "signature": str(self.signature)}
        if self.bucket is not None:
            data["bucket"] = {name: list(ends) for name, ends in self.bucket.ranges.items()}
        if self.dynamic:
            data["dynamic"] = True
        data["outcomes"] = {name: outcome_to_dict(outcome) for name, outcome in self.outcomes.items()}
        data["provenance"] = self.provenance.to_dict()
        return data


def outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    """Return the stored form of one outcome; fields at their default are left out."""
    data: dict[str, Any] = {"is": outcome.is_}
    for item in dataclasses.fields(outcome):
        value = getattr(outcome, item.name)
        if value != item.default:
            data[item.name] = list(value) if isinstance(value, tuple) else _rounded(value)
    return data


def _rounded(value: object) -> object:
    # Four digits are beyond what any measurement here can repeat, and keep a record under 4 KB.
    return float(f"{value:.4g}") if isinstance(value, float) else value


def outcome_from_dict(data: object) -> Outcome:
    """Return the outcome of a stored form; raise ``ValueError`` for anything else."""
    if not isinstance(data, dict) or not isinstance(data.get("is"), str) or data["is"] not in _OUTCOMES:
        raise ValueError(f"{data!r} is no outcome")
    kind = _OUTCOMES[data["is"]]
    types = _FIELD_TYPES[kind]
    values = {}
    for name, value in data.items():
        if name in types:
            values[name] = _checked(name, value, types[name])
        elif name != "is":
            _refuse_unknown("an outcome", data, types, "is")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"an outcome lacks a field: {error}") from None


def _refuse_unknown(what: str, data: Mapping[str, Any], known: Container[str], *more: str) -> None:
    # A field of a later version may change what the others mean, so it is not passed over.
    for name in data:
        if name not in known and name not in more:
            raise ValueError(f"{what} has no field {name!r}")


def _checked(name: str, value: Any, type_name: str) -> Any:
    kind = type(value)
    if type_name == "float":
        if (kind is float or kind is int) and 0 <= value <= _LARGEST:
            return float(value)
    elif type_name == "int":
        if kind is int and 0 <= value <= _LARGEST:
            return value
    elif type_name == "str":
        if kind is str:
            return value
    elif kind is list:
        for part in value:
            if type(part) is not str:
                break
        else:
            return tuple(value)
    raise ValueError(f"{name} of an outcome cannot be {value!r}")


def record_from_dict(data: object) -> Record:
    """Return the record of a stored form.

    Raises:
        ValueError: for any other data, another schema, or a bucket that its signature does not fall into. (A
            signature text that makes no sense raises ``UnknownNameError``, which is a ``ValueError``.)
    """
    if not isinstance(data, dict):
        raise ValueError("a record is an object")
    if type(data.get("schema")) is not int or data["schema"] != SCHEMA:
        raise ValueError(f"schema is {data.get('schema')!r}; this version reads {SCHEMA}")
    _refuse_unknown("a record", data, ("schema", "signature", "bucket", "dynamic", "outcomes", "provenance"))
    outcomes, text, provenance = data.get("outcomes"), data.get("signature"), data.get("provenance")
    if not isinstance(outcomes, dict) or not isinstance(text, str) or not isinstance(provenance, dict):
        raise ValueError("a record has a signature, outcomes and a provenance")
    if data.get("dynamic", True) is not True:
        raise ValueError("dynamic is true or left out")
    signature = parse_signature(text)
    bucket = None
    if data.get("bucket") is not None:
        try:
            bucket = bucket_of(signature)
        except OverflowError as error:
            raise ValueError(f"the signature's lengths are beyond every bucket: {error}") from None
        if data["bucket"] != {name: list(ends) for name, ends in bucket.ranges.items()}:
            raise ValueError("the bucket does not belong to the signature")
    return Record(
        signature=signature,
        outcomes={str(name): outcome_from_dict(value) for name, value in outcomes.items()},
        provenance=provenance_from_dict(provenance),
        bucket=bucket,
        dynamic=data.get("dynamic") is True,
    )


def provenance_from_dict(data: Mapping[str, Any]) -> Provenance:
    """Return the provenance of a stored form; raise ``ValueError`` for anything else."""
    _refuse_unknown("a provenance", data, _PROVENANCE_TYPES)
    for name, expected in _PROVENANCE_TYPES.items():
        if type(data.get(name)) is not expected:
            raise ValueError(f"{name} of a provenance cannot be {data.get(name)!r}")
    return Provenance(**data)
