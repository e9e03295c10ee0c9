"""Stand-ins for what real tests cannot control: time, backends that are slow, wrong or broken, another machine."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping

import torch

from smartattn.backends import registry
from smartattn.backends.base import Backend, Capabilities, Runner
from smartattn.backends.math import run_math
from smartattn.environment import SCHEMA, Environment
from smartattn.measurement import Sample
from smartattn.signature import Signature


class FakeClock:
    """A clock (``smartattn.clocks.Clock``) that passes only by what its fakes cost, with seeded noise.

    A ``FakeBackend`` that holds this clock advances it when it runs; any other callable costs what ``costs`` says for
    its ``__name__``, or ``default_us``.

    Attributes:
        costs: microseconds by name of callable.
        default_us: cost of a callable that neither advances the clock nor is named in ``costs``.
        noise_ratio: largest relative deviation of one sample.
        host_us: host time per call, where it differs from the device's.
        log: every sample as (name of the callable, number of calls).
    """

    def __init__(
        self,
        costs: Mapping[str, float] | None = None,
        *,
        default_us: float = 100.0,
        noise_ratio: float = 0.0,
        host_us: float | None = None,
        seed: int = 0,
    ) -> None:
        self.costs = dict(costs or {})
        self.default_us = default_us
        self.noise_ratio = noise_ratio
        self.host_us = host_us
        self.log: list[tuple[str, int]] = []
        self._now_us = 0.0
        self._random = random.Random(seed)

    def now_s(self) -> float:
        """Return the fake time."""
        return self._now_us / 1e6

    def advance(self, us: float) -> None:
        """Let time pass."""
        self._now_us += us

    def once_us(self, run: Callable[[], object]) -> float:
        """Run ``run`` once and report its cost."""
        return self.sample(run, 1).device_us

    def sample(self, run: Callable[[], object], num_calls: int) -> Sample:
        """Run ``run`` once and report its cost as the mean of ``num_calls`` calls."""
        name = getattr(run, "__name__", type(run).__name__)
        before_us = self._now_us
        run()
        cost_us = self._now_us - before_us or self.costs.get(name, self.default_us)
        self._now_us = before_us + cost_us * num_calls
        cost_us *= 1 + self.noise_ratio * self._random.uniform(-1, 1)
        self.log.append((name, num_calls))
        return Sample(device_us=cost_us, host_us=cost_us if self.host_us is None else self.host_us)


class FakeBackend(Backend):
    """A backend that computes what Math computes, at a given cost, and with a given fault.

    Attributes:
        clock: advanced by ``cost_us`` at each call, and by ``plan_ms`` at the first call of a shape.
        error: what is added to the output; NaN works too.
        raises: what a call raises instead of answering.
        reason: why it is not eligible; eligible when empty.
        calls: how often it was run.
    """

    def __init__(
        self,
        name: str = "fake",
        *,
        clock: FakeClock | None = None,
        cost_us: float = 50.0,
        plan_ms: float = 0.0,
        error: float = 0.0,
        raises: BaseException | None = None,
        reason: str = "",
        version: str = "1",
        workspace_bytes: int = 0,
        capabilities: Capabilities | None = None,
    ) -> None:
        self.name = name
        self.clock = clock
        self.cost_us = cost_us
        self.plan_ms = plan_ms
        self.error = error
        self.raises = raises
        self.reason = reason
        self.calls = 0
        self.plans_per_shape = plan_ms > 0
        self.capabilities = capabilities or Capabilities(supports_double_backward=True)
        self._version = version
        self._workspace_bytes = workspace_bytes
        self._planned: set[tuple[torch.Size, torch.Size]] = set()

    def unavailable(self) -> str:
        """Return the reason it was made with."""
        return self.reason

    def version(self) -> str:
        """Return the version it was made with."""
        return self._version

    def workspace_bytes(self, signature: Signature) -> int:
        """Return the bytes it was made with."""
        del signature
        return self._workspace_bytes

    def bind(self, signature: Signature) -> Runner:
        """Return a runner that costs fake time."""
        del signature
        return self._run

    def _run(self, query, key, value, *rest) -> torch.Tensor:
        self.calls += 1
        if self.clock is not None:
            shapes = query.shape, key.shape
            self.clock.advance(self.cost_us + (0.0 if shapes in self._planned else self.plan_ms * 1e3))
            self._planned.add(shapes)
        if self.raises is not None:
            raise self.raises
        output = run_math(query, key, value, *rest)
        return output + self.error if self.error else output


@contextlib.contextmanager
def registered(*backends: Backend) -> Iterator[None]:
    """Put backends into the table, after the built-in ones, for a while."""
    registry._plugins.extend(backends)
    try:
        yield
    finally:
        for backend in backends:
            registry._plugins.remove(backend)


def make_environment(**changes: object) -> Environment:
    """Return the environment of an imaginary CPU machine; keyword arguments replace attributes."""
    values: dict[str, object] = {
        "schema": SCHEMA,
        "device_type": "cpu",
        "device_name": "Imaginary 9000",
        "capability": "avx2",
        "num_multiprocessors": 0,
        "torch": "2.13.0+cpu",
        "git": "0" * 40,
        "accelerator": "",
        "cudnn": 0,
    }
    return Environment(**{**values, **changes})  # type: ignore[arg-type]  # a test that errs here fails at once


def tensors(
    *shape: int, dtype: torch.dtype = torch.float32, S: int | None = None, H: int | None = None, Ev: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random query, key and value; ``shape`` is the query's (N, Hq, L, E), the others as the query's if unset."""
    *batch, Hq, L, E = shape
    rest = (*batch, H or Hq, S or L)
    make = lambda *sizes: torch.randn(*sizes, dtype=dtype)  # noqa: E731 - shorter than a function, used thrice
    return make(*batch, Hq, L, E), make(*rest, E), make(*rest, Ev or E)
