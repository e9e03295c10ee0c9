"""Routes: names, reasons, and that rewrites wrap the backend in the right order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from smartattn.backends.base import Runner
from smartattn.errors import UnknownNameError
from smartattn.layout import Layout
from smartattn.rewrites.base import Rewrite
from smartattn.routes import Route, check_route_name, matches, parse_route, routes_for
from smartattn.signature import Signature
from tests.fakes import FakeBackend, make_environment, registered, tensors

ENVIRONMENT = make_environment()
BASE = Signature(
    pass_name="infer", device_type="cpu", dtype="float32", batch=(2,), Hq=4, H=4, L=64, S=64, E=32, Ev=32,
    layouts=(Layout("bhsd"),) * 3,
)  # fmt: skip


class Halve(Rewrite):
    """Compute with half of each head dim, and say so; not exact, since only the order of steps is tested."""

    def __init__(self, name: str, log: list[str], smallest: int = 2) -> None:
        self.name, self.log, self.smallest = name, log, smallest

    def reasons(self, signature: Signature) -> tuple[str, ...]:
        return () if signature.E >= self.smallest else (f"needs a head dim of at least {self.smallest}",)

    def transform(self, signature: Signature) -> Signature:
        return dataclasses.replace(signature, E=signature.E // 2)

    def bind(self, signature: Signature, run: Runner) -> Runner:
        half = signature.E // 2

        def halved(query: torch.Tensor, key: torch.Tensor, *rest: object) -> torch.Tensor:
            self.log.append(f"{self.name} in {query.shape[-1]}")
            output = run(query[..., :half], key[..., :half], *rest)
            self.log.append(f"{self.name} out")
            return output

        return halved

    def workspace_bytes(self, signature: Signature) -> int:
        return signature.E


class Small(FakeBackend):
    """A backend that takes head dims up to 8."""

    def extra_reasons(self, signature: Signature, environment) -> tuple[str, ...]:
        return () if signature.E <= 8 else ("takes head dims up to 8",)


def test_name_is_rewrites_then_backend():
    """A route's name reads from the inputs to the backend."""
    route = Route((Halve("one", []), Halve("two", [])), FakeBackend("flash"))
    assert route.name == "one+two+flash"
    assert Route((), FakeBackend("flash")).name == "flash"


def test_each_rewrite_sees_what_the_one_before_left():
    """The backend and every rewrite judge the problem that reaches them, and reasons say whose they are."""
    route = Route((Halve("one", []), Halve("two", [])), Small("small"))
    assert route.reasons(BASE, ENVIRONMENT) == ()
    assert route.remaining(BASE).E == 8
    wide = dataclasses.replace(BASE, E=64)
    assert route.reasons(wide, ENVIRONMENT) == ("takes head dims up to 8",)
    picky = Route((Halve("one", []), Halve("two", [], smallest=32)), Small("small"))
    assert picky.reasons(BASE, ENVIRONMENT) == ("two: needs a head dim of at least 32",)


def test_workspace_adds_up_over_the_stages():
    """Copies of each rewrite and the buffer of the backend count, each at its own stage."""
    route = Route((Halve("one", []), Halve("two", [])), FakeBackend(workspace_bytes=1000))
    assert route.workspace_bytes(BASE) == 32 + 16 + 1000


def test_bound_route_runs_outside_in():
    """The first rewrite is entered first, sees the caller's tensors, and is left last."""
    log: list[str] = []
    backend = FakeBackend()
    run: Callable[..., torch.Tensor] = Route((Halve("one", log), Halve("two", log)), backend).bind(BASE)
    run(*tensors(2, 4, 64, 32), None, 0.0, False, None, False)
    assert log == ["one in 32", "two in 16", "two out", "one out"]
    assert backend.calls == 1


def test_stock_is_the_first_route():
    """Stock stands first, so ties go to it, and no two routes share a name."""
    names = [route.name for route in routes_for(BASE)]
    assert names[0] == "stock"
    assert len(set(names)) == len(names)
    assert {"stock", "flash", "eager", "eager_inplace", "math"} <= set(names)


def test_every_route_reads_back():
    """The name of each route gives a route of the same name."""
    for route in routes_for(BASE):
        assert parse_route(route.name, "cpu").name == route.name
        assert check_route_name(route.name) == route.name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("flahs", "Did you mean 'flash'?"),
        ("no_such_rewrite+flash", "rewrite of route 'no_such_rewrite+flash' is 'no_such_rewrite'"),
        ("flash+no_such_backend", "no_such_backend'"),
        ("", "''"),
        ("+flash", "''"),
    ],
)
def test_unknown_route_names_the_part(name: str, text: str):
    """The error shows the part that does not exist and the valid or nearest names."""
    for read in (check_route_name, lambda given: parse_route(given, "cpu")):
        with pytest.raises(UnknownNameError) as caught:
            read(name)
        assert text in str(caught.value)


@pytest.mark.parametrize("given", [None, 3, ("flash",)])
def test_a_name_that_is_no_text_is_unknown(given: object):
    """Anything but text is refused like an unknown name."""
    with pytest.raises(UnknownNameError):
        check_route_name(given)


def test_a_wish_is_a_backend_or_a_whole_route():
    """A backend's name allows every route that ends in it; a route's name allows that one."""
    folded = Route((Halve("fold", []),), FakeBackend("flash"))
    plain = Route((), FakeBackend("flash"))
    assert matches(folded, "flash")
    assert matches(plain, "flash")
    assert matches(folded, "fold+flash")
    assert not matches(plain, "fold+flash")
    assert not matches(plain, "fold")


def test_a_registered_backend_is_a_route():
    """A backend in the table gets a route of its own after the built-in ones."""
    with registered(FakeBackend("mine")):
        assert routes_for(BASE)[-1].name.endswith("mine")
        assert parse_route("mine", "cpu").name == "mine"
    with pytest.raises(UnknownNameError):
        parse_route("mine", "cpu")
