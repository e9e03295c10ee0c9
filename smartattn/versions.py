"""Everything that differs between PyTorch versions or builds, and every private name of PyTorch that is read.

Nothing else in the package may ask for a version or touch ``torch._C``.
"""

from __future__ import annotations

import functools
import gc
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._device import DeviceContext as DeviceContext  # noqa: PLC0414 - for the modules above

TORCH = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:3])
OLDEST_TORCH = (2, 11, 0)

sdpa: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
"""PyTorch's own function as it was when smartattn was imported; anything else found in its place is foreign."""

len_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
len_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
functorch_level: Callable[[], Any] = torch._C._functorch.maybe_current_level
is_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
is_jit_tracing: Callable[[], bool] = torch._C._is_tracing
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Id of the running backward pass of this thread, -1 outside of one."""

flash_enabled: Callable[[], bool] = torch._C._get_flash_sdp_enabled
efficient_enabled: Callable[[], bool] = torch._C._get_mem_efficient_sdp_enabled
cudnn_enabled: Callable[[], bool] = torch._C._get_cudnn_sdp_enabled
math_enabled: Callable[[], bool] = torch._C._get_math_sdp_enabled
reduced_math_enabled: Callable[[], bool] = torch._C._get_math_sdp_allow_fp16_bf16_reduction

fused_choice: Callable[..., int] = torch._fused_sdp_choice
"""Which backend PyTorch would run for these arguments: a value of ``SDPBackend``."""

flash_for_cpu: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch._scaled_dot_product_flash_attention_for_cpu
safe_softmax: Callable[..., torch.Tensor] = torch._safe_softmax
"""Softmax that gives 0 for a row that is -inf throughout."""
math_attention: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch._scaled_dot_product_attention_math
flash_attention: Callable[..., tuple[Any, ...]] = torch._scaled_dot_product_flash_attention
flash_forward: Callable[..., tuple[Any, ...]] = torch.ops.aten._flash_attention_forward.default
"""The operator below, on (N, L, Hq, E) or packed (tokens, Hq, E) inputs, with windows and cumulative lengths."""

efficient_attention: Callable[..., tuple[Any, ...]] = torch._scaled_dot_product_efficient_attention
cudnn_attention: Callable[..., tuple[Any, ...]] = torch._scaled_dot_product_cudnn_attention

can_use_flash: Callable[..., bool] = torch.backends.cuda.can_use_flash_attention
can_use_efficient: Callable[..., bool] = torch.backends.cuda.can_use_efficient_attention
can_use_cudnn: Callable[..., bool] = torch.backends.cuda.can_use_cudnn_attention
SDPAParams: Callable[..., Any] = torch.backends.cuda.SDPAParams
"""Arguments of one call as the ``can_use_*`` functions take them; holds references to the tensors."""

delay_stream: Callable[[int], None] = torch.cuda._sleep
"""Keep the current CUDA stream busy for a number of clock cycles."""

EFFICIENT_TAKES_GROUPS = TORCH >= (2, 14)
"""Whether the Efficient operator reads grouped keys. Source: template names in the 2.13 and 2.14.1 libraries."""

CUDNN_IS_LAST = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") == "1"
"""Whether PyTorch was told not to try cuDNN first."""

MAX_GRID = 65535
"""Largest second and third dimension of a CUDA launch grid. Source: CUDA C++ programming guide, technical limits."""

RETURNS_ZEROS_FOR_EMPTY = TORCH >= (2, 12)


@functools.cache
def parse(version: str) -> tuple[int, ...]:
    """Return the numbers of a version text such as ``2.11.0+cu130``, without its local part."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def is_capturing(device_type: str) -> bool:
    """Return whether the current stream is being captured into a graph."""
    # The name exists in CPU builds but raises there.
    return device_type == "cuda" and torch.cuda.is_current_stream_capturing()


def active_flash_implementation() -> str:
    """Return the name of the flash implementation that PyTorch would run (``FA2`` unless another was activated)."""
    try:
        from torch.nn.attention import current_flash_attention_impl  # noqa: PLC0415 - newer than the oldest torch
    except ImportError:
        return "FA2"
    return str(current_flash_attention_impl() or "FA2")


def function_modes() -> list[Any]:
    """Return the active ``TorchFunctionMode`` objects, innermost last."""
    return [torch._C._get_function_stack_at(i) for i in range(len_function_modes())]


def disabled_backends() -> str:
    """Return the letters of the SDPA backends that the process switched off: f, e, c, m."""
    switches = (("f", flash_enabled), ("e", efficient_enabled), ("c", cudnn_enabled), ("m", math_enabled))
    return "".join(letter for letter, is_enabled in switches if not is_enabled())


def deterministic_mode() -> str:
    """Return ``off``, ``warn`` or ``strict``."""
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "strict"


def autocast_dtype_name(device_type: str) -> str:
    """Return the dtype that autocast casts to on this device, empty when autocast is off there."""
    if not is_any_autocast() or not torch.is_autocast_enabled(device_type):
        return ""
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


def float32_precision(device_type: str) -> str:
    """Return the float32 matmul precision switch of this device type, empty at full precision.

    The per-backend getters are read because ``torch.get_float32_matmul_precision`` raises once a program has mixed
    PyTorch's older and newer ways of setting it (torch 2.9 and later).
    """
    backend = "cuda" if device_type == "cuda" else "mkldnn"
    name = str(torch._C._get_fp32_precision_getter(backend, "matmul"))
    return "" if name in ("none", "ieee") else name


SMARTATTN = "0.1.0"


@functools.cache
def driver_version() -> str:
    """Return the version of NVIDIA's kernel driver, empty where the system does not tell."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        pass
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii", errors="replace") as file:
            found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", file.read())
            return found[1] if found else ""
    except OSError:
        return ""


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes a new allocation on ``device`` may take: free ones and those that PyTorch holds unused."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return UNKNOWN_MEMORY_BYTES


def total_memory_bytes(device: torch.device) -> int:
    """Return the bytes of memory that ``device`` has, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return UNKNOWN_MEMORY_BYTES


UNKNOWN_MEMORY_BYTES = 4 << 30
"""Free memory assumed where the system does not tell."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out; nothing else is wrong then."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The CPU allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


_STICKY_WORDS = (
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "illegal instruction",
    "hardware stack error",
    "invalid program counter",
    "context is destroyed",
    "device kernel image is invalid",
    "uncorrectable ECC",
)


def is_sticky_error(error: BaseException) -> bool:
    """Return whether an accelerator error outlives its call: every later call would raise it again."""
    text = str(error)
    is_accelerator = isinstance(error, torch.AcceleratorError) or "CUDA error" in text or "HIP error" in text
    return is_accelerator and any(word in text for word in _STICKY_WORDS)


def release_memory(device: torch.device) -> None:
    """Hand unused cached memory back after an allocation failed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def without_torch_function() -> AbstractContextManager[None]:
    """Return a context in which function modes and tensor subclasses do not intercept PyTorch's functions."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def accepts_saved_tensors_hooks() -> bool:
    """Return whether hooks on saved tensors may be installed here; where not, none can be active either."""
    is_enabled: Callable[[], bool] = vars(torch._C._autograd)["_saved_tensors_hooks_is_enabled"]
    return is_enabled()


def has_saved_tensors_hooks() -> bool:
    """Return whether hooks on saved tensors are active, as inside a checkpoint and while it is recomputed."""
    top: Callable[[bool], object] = vars(torch._C._autograd)["_top_saved_tensors_default_hooks"]
    return top(True) is not None


is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
_get_warn_only = torch._C._get_deterministic_algorithms_warn_only


def deterministic_level() -> int:
    """Return 0 when deterministic algorithms are off, 1 with warnings only, 2 when strict."""
    return 0 if not is_deterministic() else 1 if _get_warn_only() else 2


def forward_ad_level() -> int:
    """Return the level of forward-mode differentiation, -1 outside of it."""
    return int(torch.autograd.forward_ad._current_level)


def tensor_guard(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool] | None:
    """Return a test that is true for tensors alike in all but their values; ``None`` where PyTorch lacks it.

    Alike means: type, dtype, device, sizes, strides, ``requires_grad``, and the dispatch keys that are active at the
    time (autocast, function transforms, dispatch modes). Not seen: gradient mode.
    """
    try:
        guard = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (AttributeError, TypeError, RuntimeError):
        return None
    check: Callable[..., bool] = guard.check
    return check


def run_for_real(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo run ``function`` while it traces a call of it, and take the result for a constant.

    The mark is what ``torch.compiler.assume_constant_result`` sets; that one would import Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take any attribute
    return function


def trace_hook() -> Any:
    """Return Dynamo's ``comptime``: called in traced code, it runs a function that sees the frame while tracing."""
    from torch._dynamo.comptime import comptime  # noqa: PLC0415 - only traced code comes here; Dynamo is loaded then

    return comptime


def traced_local(context: Any, name: str) -> Any:
    """Return a local of the frame being traced: a constant, a fake tensor, a symbolic number; ``None`` for others."""
    variable = context.get_local(name)
    if variable.is_python_constant():
        return variable.as_python_constant()
    return variable.as_fake() if variable.is_proxy() else None


def is_plain_fake(tensor: object) -> bool:
    """Return whether a traced tensor stands for a plain dense tensor rather than for a subclass."""
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: PLC0415 - as above

    is_plain = type(tensor) in (FakeTensor, torch.nn.Parameter)
    return is_plain and isinstance(tensor, FakeTensor) and not tensor.is_nested and tensor.layout == torch.strided


def value_of(size: int | torch.SymInt, values: Mapping[Any, int] | None) -> int | None:
    """Return a size for given values of its symbols, or its hint, without a guard; ``None`` where it has none."""
    if isinstance(size, int):
        return size
    node: Any = size.node
    if values is None:
        return int(node.hint) if node.has_hint() else None
    number = node.expr.subs(values)
    return int(number) if number.is_number else None


def symbols_in(size: int | torch.SymInt) -> frozenset[Any]:
    """Return the symbols that a size is made of, none for a plain number."""
    return frozenset() if isinstance(size, int) else frozenset(size.node.expr.free_symbols)


def is_symbol(size: int | torch.SymInt) -> bool:
    """Return whether a size is one bare symbol."""
    return not isinstance(size, int) and bool(size.node.expr.is_symbol)


def is_exporting() -> bool:
    """Return whether ``torch.export`` traces this code.

    Traced by Dynamo, PyTorch's own function of this name is true in every graph of torch 2.11.
    """
    return bool(torch.compiler._is_exporting_flag)
