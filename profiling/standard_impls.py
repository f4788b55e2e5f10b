"""The usual implementations of a case: cukit, eager torch, torch.compile, and optionally Liger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from profiling import peers
from profiling.case import Call

TorchFunction = Callable[[ModuleType], Callable[..., Any]]
"""Takes the torch module and returns a function of tensors. Called only if torch is available."""

LigerFunction = Callable[[], Callable[..., Any]]
"""Returns a function of tensors; imports through `peers.optional("liger_kernel....")`."""


def forward_impls(
    ours: Call, torch_function: TorchFunction, *arrays: Any, liger: LigerFunction | None = None
) -> dict[str, Callable[[], Call]]:
    """Implementations that compute `torch_function(*arrays)` without autograd."""
    impls: dict[str, Callable[[], Call]] = {
        "cukit": lambda: ours,
        "torch-eager": lambda: peers.forward(torch_function(peers.torch()), *arrays),
        "torch-compile": lambda: peers.forward(
            torch_function(peers.torch()), *arrays, compiled=True
        ),
    }
    if liger is not None:
        impls["liger"] = lambda: peers.forward(liger(), *arrays)
    return impls


def backward_impls(
    ours: Call,
    torch_function: TorchFunction,
    inputs: Sequence[Any],
    grad_out: Any,
    *constants: Any,
    liger: LigerFunction | None = None,
) -> dict[str, Callable[[], Call]]:
    """Implementations of the gradient of `torch_function(*inputs, *constants)` for each input."""
    impls: dict[str, Callable[[], Call]] = {
        "cukit": lambda: ours,
        "torch-eager": lambda: peers.backward(
            torch_function(peers.torch()), inputs, grad_out, *constants
        ),
        "torch-compile": lambda: peers.backward(
            torch_function(peers.torch()), inputs, grad_out, *constants, compiled=True
        ),
    }
    if liger is not None:
        impls["liger"] = lambda: peers.backward(liger(), inputs, grad_out, *constants)
    return impls
