"""All ops by name: function, reference and kernel variants."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cukit.core.any_library import on_any_library
from cukit.core.compiler import KernelSpec
from cukit.core.device import Device
from cukit.core.support import ANY_KERNEL, Support, declare_support
from cukit.errors import ConfigError


@dataclass(frozen=True)
class Op:
    """One registered op.

    name: e.g. `"rms_norm_backward"`.
    family: the package that defines it: layers, attention, gemm, distill, ...; "user" for ops of
        :func:`register_kernel`.
    function: the public function. Dispatches on the device of its arrays.
    reference: array code with the same semantics; fallback and test oracle. Takes arrays of any
        library that follows the array API standard.
    specs: representative kernel variants for a device, compiled by `cukit compile` and CI. Empty
        for ops without kernels of their own.
    support: the architectures that have a kernel.
    writes: arguments that every call changes in place. Others are `out`, gradients to which a call
        adds, and the arguments of `inplace=True`.
    """

    name: str
    family: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    specs: Callable[[Device], list[KernelSpec]]
    support: Support = ANY_KERNEL
    writes: frozenset[str] = frozenset()

    def supports(self, device: Device) -> bool:
        """True if the op has a kernel for `device`."""
        return self.support.reason_against(device) is None

    @property
    def has_kernel(self) -> bool:
        """Whether the op has kernels of its own. False for ops that call a vendor library and for
        user-defined ops."""
        return self.specs is not no_kernel


FAMILIES = (
    "quantization", "layers", "attention", "gemm", "moe", "sampling", "sequence", "graph_memory",
    "distill", "memory",
)  # fmt: skip

_OPS: dict[str, Op] = {}


def no_kernel(device: Device) -> list[KernelSpec]:
    """`specs` of an op without its own kernels."""
    return []


def register(
    *,
    name: str,
    family: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    specs: Callable[[Device], list[KernelSpec]] = no_kernel,
    support: Support = ANY_KERNEL,
    writes: Iterable[str] = (),
) -> None:
    """Registers an op; called when the op's module is imported.

    Raises ConfigError if the name is taken.
    """
    if name in _OPS:
        raise ConfigError(f"register: the op {name!r} exists already")
    known = on_any_library(reference)
    _OPS[name] = Op(name, family, function, known, specs, support, frozenset(writes))
    declare_support(name, support)


def register_kernel(
    name: str, function: Callable[..., Any], *, reference: Callable[..., Any] | None = None
) -> None:
    """Registers a user-defined op, which :func:`get_kernel` then returns by name.

    name: an unused name; ConfigError if it is taken.
    function: the callable, which dispatches on the device of its arguments.
    reference: array code for `get_kernel(name, platform="cpu")`; default: `function`.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"register_kernel: name must be a string, got {name!r}")
    if not callable(function):
        raise ConfigError(f"register_kernel: function must be callable, got {function!r}")
    _load_families()
    register(name=name, family="user", function=function, reference=reference or function)


def get_kernel(name: str, platform: str | None = None) -> Callable[..., Any]:
    """The op called `name`.

    platform: None for the op, which dispatches on its arrays; `"gpu"` for the op if a GPU is
        present, else UnsupportedDeviceError; `"cpu"` for the reference.
    Raises ConfigError for an unknown platform or name; the message lists similar names.
    """
    op = get_op(name)
    if platform is not None and not isinstance(platform, str):
        raise ConfigError(f"get_kernel: platform must be None, 'cpu' or 'gpu', got {platform!r}")
    if platform is None:
        return op.function
    if platform == "cpu":
        return op.reference
    if platform == "gpu":
        from cukit.core.device import current_device

        current_device()
        return op.function
    raise ConfigError(f"get_kernel: platform must be None, 'cpu' or 'gpu', got {platform!r}")


def get_op(name: str) -> Op:
    """The registry entry of `name`. Raises ConfigError, with similar names, if there is none."""
    _load_families()
    if not isinstance(name, str):
        raise ConfigError(f"get_kernel: name must be a string, got {name!r}")
    try:
        return _OPS[name]
    except KeyError:
        import difflib

        close = difflib.get_close_matches(name, _OPS, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else "; `cukit list` lists all"
        raise ConfigError(f"no op named {name!r}{hint}") from None


def ops() -> Iterator[Op]:
    """All ops, by family and name."""
    _load_families()
    yield from sorted(_OPS.values(), key=lambda op: (op.family, op.name))


def _load_families() -> None:
    for family in FAMILIES:
        importlib.import_module(f"cukit.{family}")
