"""A benchmark: a `Case`, and the `Workload` that it builds on the current machine.

The cases of a family are in one or more modules of `profiling/cases/`. Each module has a function
`cases(small=False) -> list[Case]`. With `small=True` it returns sizes that NumPy finishes in well
under a second: the tests and `--small` run them on any machine, so errors in a case are found
without a GPU. A case for `rms_norm`:

    from functools import partial

    from cukit.layers import rms_norm
    from cukit.reference import norms as reference
    from profiling import peers
    from profiling.case import Case, Workload, itemsize
    from profiling.data import normal

    def torch_rms_norm():
        functional = peers.torch().nn.functional               # PeerMissing if not installed
        return lambda x, weight: functional.rms_norm(x, x.shape[-1:], weight, 1e-6)

    def rms_norm_case(tokens: int, hidden: int, dtype: str) -> Case:
        def build() -> Workload:
            x, weight = normal((tokens, hidden), dtype), normal((hidden,), dtype)

            return Workload(
                impls={
                    "cukit": lambda: partial(rms_norm, x, weight),
                    "torch-eager": lambda: peers.forward(torch_rms_norm(), x, weight),
                    "torch-compile": lambda: peers.forward(
                        torch_rms_norm(), x, weight, compiled=True
                    ),
                },
                expected=lambda: reference.rms_norm(x, weight),
                tolerance=1e-2,
            )

        return Case("layers", "rms_norm", f"{tokens}x{hidden}", dtype, build,
                    bytes=2 * tokens * hidden * itemsize(dtype))

Rules:

- Nothing uses the GPU or imports a peer before `build` or an implementation's factory is called.
- The factory of an implementation returns a function without arguments that does all of the timed
  work and returns its outputs: an array, a tensor, or a tuple of them (`None` entries are skipped).
- The factory of a peer that is not installed raises `PeerMissing`; the peer is skipped with its
  message as the reason.
- `bytes` counts every input read once and every output written once.
- A peer does the same work as the op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cukit.analyzer.results import CaseKey

Call = Callable[[], Any]

ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "int8": 1}


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return ITEMSIZES[dtype]


class PeerMissing(Exception):  # noqa: N818 - a reason to skip a peer, not an error
    """A peer is not installed or does not support the case; the message has the reason."""


@dataclass(frozen=True)
class Workload:
    """Inputs, and all implementations of the work on them."""

    impls: Mapping[str, Callable[[], Call]]
    """Name of the implementation -> factory of the function to time. "cukit" is required."""

    expected: Call
    """Computes the expected outputs, in float32 or better."""

    tolerance: float = 1e-2
    """Largest ||out - expected|| / ||expected|| of a correct output."""

    views: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Name of an implementation -> function of its outputs. Its result, instead of the outputs, is
    compared with `expected`: for tokens drawn with other random numbers, for example."""


@dataclass(frozen=True)
class Case:
    """One row of a results table: an operation on one shape and dtype."""

    family: str
    op: str
    name: str
    """The shape: "8192x4096", "d64 16x32x1024 causal"."""
    dtype: str
    build: Callable[[], Workload]
    flops: float = 0.0
    """Floating-point operations on tensor cores; 0 for memory-bound ops."""
    bytes: float = 0.0
    """Minimum DRAM traffic: inputs read once, outputs written once."""
    measure_memory: bool = False
    """Record the peak memory allocated during one call, excluding the inputs."""
    clock: Literal["device", "host"] = "device"
    """What is timed: the work on the device, or the host time to enqueue one call."""

    def key(self) -> CaseKey:
        """The unique key of the case."""
        return (self.family, self.op, self.name, self.dtype)
