"""What one benchmark is: a `Case`, and the `Workload` it builds on the machine at hand.

How to add a case
-----------------
Cases of a family live in `profiling/cases/<family>.py`; the module has one function,
`cases(small=False) -> list[Case]`. `small=True` asks for sizes that NumPy finishes in well under
a second: the test-suite runs those without a GPU, and `--small` runs them anywhere, so that a
mistake in a case shows before a GPU is held.

    from functools import partial

    from cukit.layers import rms_norm
    from cukit.reference import layers as reference
    from profiling import peers
    from profiling.case import Case, Workload
    from profiling.data import normal

    def torch_rms_norm():
        functional = peers.torch().nn.functional               # PeerMissing where there is none
        return lambda x, weight: functional.rms_norm(x, x.shape[-1:], weight, 1e-6)

    def rms_norm_case(tokens: int, hidden: int, dtype: str) -> Case:
        def build() -> Workload:
            x, weight = normal((tokens, hidden), dtype), normal((hidden,), dtype)

            return Workload(
                arms={
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

Rules: nothing touches the GPU or imports a peer before `build` (or an arm's factory) is called;
an arm's factory returns a function without arguments that does the whole timed work and returns
its outputs (an array, a tensor, or a tuple of them; `None` entries are skipped); peers that are
not installed raise `PeerMissing` in their factory and are skipped with that reason; `bytes` counts
every input read once and every output written once; a peer must do the same work as the op.
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


class PeerMissing(Exception):  # noqa: N818 - a reason to skip an arm, not an error
    """The library of an arm is not installed here, or cannot do this case. Says which and why."""


@dataclass(frozen=True)
class Workload:
    """Inputs made once, and every way to do the work on them."""

    arms: Mapping[str, Callable[[], Call]]
    """Name of the implementation -> factory of the function to time. "cukit" is ours."""

    expected: Call
    """Computes what every arm must return, in float32 or better."""

    tolerance: float = 1e-2
    """Largest ||out - expected|| / ||expected|| of any output that counts as correct."""

    views: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Name of an implementation -> what of its outputs is compared, where it is not the outputs
    themselves: tokens drawn with other random numbers, say."""


@dataclass(frozen=True)
class Case:
    """One row of a results table: an operation on one shape and dtype."""

    family: str
    op: str
    name: str
    """The shape, in the op's own words: "8192x4096", "d64 16x32x1024 causal"."""
    dtype: str
    build: Callable[[], Workload]
    flops: float = 0.0
    """Floating-point operations of the tensor cores that the work needs; 0 for memory-bound ops."""
    bytes: float = 0.0
    """Fewest bytes through device memory: inputs read once, outputs written once."""
    measure_memory: bool = False
    """Record the peak of memory allocated during one call (on top of the inputs)."""
    clock: Literal["device", "host"] = "device"
    """What is timed: the work on the device, or what one call costs the host that enqueues it."""

    def key(self) -> CaseKey:
        """What names this case among all."""
        return (self.family, self.op, self.name, self.dtype)
