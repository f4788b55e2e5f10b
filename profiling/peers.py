"""Peer implementations, run in this process on the same memory.

Arrays are exchanged through DLPack. torch and CuPy both use the legacy default stream, so the same
pair of events times either. torch is imported only when a peer needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from profiling.case import Call, PeerMissing


@lru_cache(maxsize=1)
def torch() -> ModuleType:
    """Import torch; `PeerMissing` without torch or without a GPU."""
    try:
        module = importlib.import_module("torch")
    except ImportError as error:
        raise PeerMissing(f"torch: {error}") from None
    if not module.cuda.is_available():
        raise PeerMissing("torch found no GPU")
    return module


@lru_cache(maxsize=1)
def _compiling_torch() -> ModuleType:
    module = torch()
    # One specialised graph per shape, the best case for torch.compile.
    module._dynamo.config.recompile_limit = 256
    # A backward that is timed repeatedly must keep its saved tensors.
    module._functorch.config.donated_buffer = False
    return module


def optional(name: str) -> ModuleType:
    """Import a peer's module, e.g. `optional("liger_kernel.ops.rope")`, or raise `PeerMissing`."""
    torch()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PeerMissing(f"{name}: {error}") from None


def to_torch(array: Any) -> Any:
    """Return a tensor that shares the memory of a CuPy array."""
    return torch().from_dlpack(array)


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile(function)`, with static shapes."""
    result: Callable[..., Any] = _compiling_torch().compile(function, dynamic=False)
    return result


def forward(function: Callable[..., Any], *arrays: Any, compiled: bool = False) -> Call:
    """Return a call of `function(*tensors)` without autograd, eager or compiled."""
    run = compile_function(function) if compiled else function
    tensors = [to_torch(array) for array in arrays]
    no_grad = torch().no_grad

    def call() -> Any:
        with no_grad():
            return run(*tensors)

    return call


def backward(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    grad_out: Any,
    *constants: Any,
    compiled: bool = False,
) -> Call:
    """Return a call of the backward pass only: the gradients of `inputs` for `grad_out`.

    The forward, `function(*inputs, *constants)`, runs once here. `grad_out` is an array, or a
    sequence of arrays if the function returns several outputs.
    """
    run = compile_function(function) if compiled else function
    leaves = [to_torch(array).detach().requires_grad_() for array in inputs]
    outputs = run(*leaves, *(to_torch(array) for array in constants))
    if isinstance(grad_out, (list, tuple)):
        grads: Any = tuple(to_torch(grad) for grad in grad_out)
    else:
        grads = to_torch(grad_out)
    grad = torch().autograd.grad

    def call() -> Any:
        return grad(outputs, leaves, grads, retain_graph=True)

    return call
