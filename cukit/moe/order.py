"""Expert order: each choice of a token gets a row, and each expert's rows are contiguous."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from cukit.core.arrays import (
    Array,
    adopt,
    check_array,
    empty,
    int32,
    runs_kernel,
)
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import MAX_INT32, check_integer
from cukit.errors import ArrayShapeError, ConfigError
from cukit.reference import moe as reference
from cukit.reference.moe import ExpertOrder
from cukit.registry import register

_PARAMETERS = parameter_structs("moe/parameters.cuh")["RoutingParameters"]
MAX_EXPERTS = 1024
_MAX_TABLE = 8192
"""Maximum counters per thread block, one for each warp and expert: 32 KiB of shared memory."""
_FEWEST_BINS = 32
_MAX_THREADS = 1024
_SMALLEST_CHUNK = 8
"""Minimum tokens per block: with fewer, summing the chunks' counts takes longer than counting."""
_COUNT_WORD = np.dtype(np.uint64)
_MAX_COUNT = 2**14 - 1
"""Maximum choices of one expert in a chunk: the sum of four counts must fit in 16 bits."""


def expert_order(experts: Array, num_experts: int, *, capacity: int | None = None) -> ExpertOrder:
    """Sorts choices stably by expert: the row of each choice, and the first row of each expert.

    Without a capacity the experts' rows are contiguous: `rows = expert_offsets[expert] + rank`,
    where the rank of a choice is the number of earlier choices of the same expert. With a capacity
    every expert has a block of `capacity` rows: `rows = expert * capacity + rank`, and choices of
    rank `capacity` or above are dropped.

    Args:
        experts: int32 [num_tokens, top_k], C-contiguous; top_k up to 16383 on the GPU. Ids outside
            [0, num_experts) get no row.
        num_experts: 1 to 1024 on the GPU.
        capacity: rows of each expert, or None for as many rows as choices.

    Returns:
        `ExpertOrder(rows, expert_counts, expert_offsets)`, int32 [num_tokens, top_k],
        [num_experts] and [num_experts + 1]. `rows` is -1 where a choice has no row; counts and
        offsets include dropped choices.

    Raises:
        ArrayError: dtype, shape or layout of an argument.
        ConfigError: `num_experts` or `capacity` out of range.

    Runs on CuPy's current stream, without synchronisation; deterministic.

    >>> import numpy as np, cukit as ck
    >>> order = ck.expert_order(np.array([[2, 0], [2, 1]], np.int32), 3)
    >>> order.rows, order.expert_offsets
    (array([[2, 0],
           [3, 1]], dtype=int32), array([0, 1, 2, 4], dtype=int32))
    """
    (experts,) = adopt("expert_order", experts)
    check_expert_count("expert_order", num_experts)
    num_experts = int(num_experts)
    capacity = check_capacity("expert_order", capacity, num_experts)
    if not runs_kernel("expert_order", experts):
        _check(experts)
        return reference.expert_order(experts, num_experts, capacity=capacity)
    count, place, chunks = _prepare(experts, num_experts, capacity)
    order = ExpertOrder(
        empty(experts, experts.shape),
        empty(experts, (num_experts,)),
        empty(experts, (num_experts + 1,)),
    )
    counts = empty_counts(experts, chunks, num_experts)
    count(experts, counts)
    place(experts, counts, NULL, *order, NULL, NULL)
    return order


@dataclass(frozen=True)
class OrderConfig:
    """The launch configuration of one call: one thread block for each chunk of `chunk` tokens.

    bins: experts in the tables: num_experts rounded up to a power of two, at least 32.
    """

    bins: int
    threads: int
    chunk: int
    num_chunks: int

    def count_spec(self) -> KernelSpec:
        """The kernel that counts the choices of each chunk."""
        return KernelSpec("moe/count_experts.cu", "count_experts", self.defines(), self.threads)

    def place_spec(self, losses: bool = False, polls: bool = False) -> KernelSpec:
        """The kernel that assigns rows to choices; with `losses` it also computes the losses.

        polls: whether the preceding kernel is a router, which writes the choices.
        """
        defines = (*self.defines(), ("LOSSES", losses), ("POLLS", polls))
        return KernelSpec("moe/order_experts.cu", "order_experts", defines, self.threads)

    def defines(self) -> tuple[tuple[str, int], ...]:
        """The macros of kernels_cu/moe/expert_order.cuh."""
        return ("BINS", self.bins), ("THREADS", self.threads)


@cache
def plan_expert_order(
    num_tokens: int, num_experts: int, num_sms: int, top_k: int = 1
) -> OrderConfig:
    """At most one chunk per SM, because every thread block adds up the counts of all chunks.

    There are more chunks if a chunk could have more choices of an expert than a counter can hold.
    """
    bins = max(_FEWEST_BINS, 1 << (num_experts - 1).bit_length())
    threads = min(_MAX_THREADS, _MAX_TABLE // bins * 32)
    chunk = max(_SMALLEST_CHUNK, -(-num_tokens // num_sms))
    chunk = max(1, min(chunk, _MAX_COUNT // max(1, top_k)))
    return OrderConfig(bins, threads, chunk, max(1, -(-num_tokens // chunk)))


def empty_counts(like: Array, chunks: int, num_experts: int) -> Array:
    """An uninitialised array of choice counts by chunk and expert: words of four 16-bit counts."""
    return empty(like, (chunks, -(-num_experts // 4)), _COUNT_WORD)


def check_expert_count(op: str, num_experts: int) -> None:
    """Raises ConfigError unless `num_experts` is positive and fits into int32."""
    check_integer(op, "num_experts", num_experts, least=1, most=MAX_INT32)


def check_capacity(op: str, capacity: int | None, num_experts: int) -> int | None:
    """`capacity` as an int. Raises ConfigError unless the rows of all experts fit into int32."""
    if capacity is None:
        return None
    check_integer(op, "capacity", capacity, least=1, most=MAX_INT32 // num_experts)
    return int(capacity)


def check_choices(op: str, num_choices: int) -> None:
    """Raises ArrayShapeError unless the number of choices fits into int32."""
    if num_choices > MAX_INT32:
        raise ArrayShapeError(f"{op}: at most {MAX_INT32} choices, got {num_choices}")


def check_expert_limit(op: str, num_experts: int) -> None:
    """Raises ConfigError for more experts than the kernels support."""
    if num_experts > MAX_EXPERTS:
        raise ConfigError(
            f"{op}: num_experts must be at most {MAX_EXPERTS} on the GPU, got {num_experts}"
        )


def _check(experts: Array) -> None:
    check_array("expert_order", "experts", experts, dtypes=(int32,), ndim=2)
    check_choices("expert_order", experts.size)


@launch_plan
def _prepare(experts: Array, num_experts: int, capacity: int | None) -> tuple[Launch, Launch, int]:
    _check(experts)
    check_expert_limit("expert_order", num_experts)
    if experts.shape[1] > _MAX_COUNT:
        raise ArrayShapeError(
            f"expert_order: experts must have at most {_MAX_COUNT} columns (top_k) on the GPU, "
            f"got shape {experts.shape}"
        )
    num_tokens, top_k = experts.shape
    config = plan_expert_order(num_tokens, num_experts, current_device().num_sms, top_k)
    parameters = routing_parameters(num_tokens, num_experts, top_k, config.chunk, capacity)
    grid, scalars = (config.num_chunks,), (parameters,)
    count = Launch(load_kernel(config.count_spec()), grid, scalars)
    place = Launch(load_kernel(config.place_spec()), grid, scalars, dependent=True)
    return count, place, config.num_chunks


def routing_parameters(
    num_tokens: int, num_experts: int, top_k: int, chunk: int, capacity: int | None
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """The kernels' parameters."""
    return _PARAMETERS.pack(
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        chunk=chunk,
        capacity=capacity or 0,
    )


def _specs(device: Device) -> list[KernelSpec]:
    configs = [plan_expert_order(4096, experts, device.num_sms) for experts in (32, 128, 256, 1024)]
    return [spec for config in configs for spec in (config.count_spec(), config.place_spec())]


register(
    name="expert_order",
    family="moe",
    function=expert_order,
    reference=reference.expert_order,
    specs=_specs,
)
