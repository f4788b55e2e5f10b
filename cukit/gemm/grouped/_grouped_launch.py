"""Launches of grouped products, for checked arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cukit.core.arrays import ACCESS_BYTES, Array, address_of
from cukit.core.device import current_device
from cukit.core.kernel import NULL, Launch, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.tensor_map import TensorMapCache, encode_sequence_map, encode_tensor_map
from cukit.gemm.dense._linear_plan import HOPPER, ITEM_BYTES, ROW_BYTES, TILE_K
from cukit.gemm.grouped._grouped_plan import (
    GroupedConfig,
    GroupedProblem,
    GroupedSm80Config,
    Layout,
    plan_grouped_sm80,
    plan_grouped_sm90,
)

_PARAMETERS = parameter_structs("gemm/parameters.cuh")
GROUPED_PARAMETERS = _PARAMETERS["GroupedParameters"]
_STRIDE_ELEMENTS = 8  # strides of a tensor map are multiples of 16 bytes


def prepare_grouped(
    problem: GroupedProblem, layout: Layout, *arrays: Array | None
) -> GroupedSm90 | GroupedSm80:
    """A launch of `problem` on the current device, for arrays like `arrays`.

    TMA needs strides that are multiples of 16 bytes; products with other extents run the sm80
    kernel on Hopper too.
    """
    extents = problem.extents
    aligned = not any(extent % _STRIDE_ELEMENTS for extent in extents) and all(
        array is None or address_of(array) % ACCESS_BYTES == 0 for array in arrays
    )
    device = current_device()
    if device.arch == HOPPER and aligned and all(extents):
        return GroupedSm90(plan_grouped_sm90(problem, device.num_sms), layout)
    return GroupedSm80(plan_grouped_sm80(problem, aligned, device.num_sms), layout)


class GroupedSm90:
    """A launch of grouped_gemm_sm90.cu; takes checked arrays."""

    __slots__ = ("_launch", "_maps", "config")

    def __init__(self, config: GroupedConfig, layout: Layout) -> None:
        product, tiling, ragged = config.product, config.tiling, config.ragged
        parameters = GROUPED_PARAMETERS.pack(
            m=0 if ragged == "m" else product.m,
            n=0 if ragged == "n" else product.n,
            steps=0 if ragged == "k" else -(-product.k // TILE_K),
            raster_group=config.raster_group,
            groups=layout.groups,
            longest=layout.longest,
            fixed_capacity=layout.fixed_capacity,
        )
        self.config = config
        self._launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))
        parts = 1 + product.gated
        box_a = _box(product.major_a, tiling.tile_m)
        box_b = _box(product.major_b, tiling.tile_n // parts)
        piece = tiling.piece_columns(parts)
        box_out = (tiling.tile_n, 64) if tiling.transposed else (64, piece)
        # Maps of a, b and the result: each holds the rows of groups or one matrix per group.
        encode_rows = partial(encode_groups, layout.longest)
        kinds: dict[str, tuple[Callable[..., Any], ...]] = {
            "m": (encode_rows, encode_matrices, encode_rows),
            "n": (encode_matrices, encode_rows, encode_rows),
            "k": (encode_rows, encode_rows, encode_matrices),
        }
        encoders = (*kinds[ragged], kinds[ragged][2])
        boxes = (box_a, box_b, box_out, box_out)
        self._maps = [
            TensorMapCache(partial(encode, box))
            for encode, box in zip(encoders, boxes, strict=True)
        ]

    def __call__(self, a: Array, b: Array, out: Array, kept: Array | None, ends: Array) -> None:
        """a, b: the operands in the caller's order; a transposed tiling swaps them here."""
        if self.config.tiling.transposed:
            a, b = b, a
        map_a, map_b, map_out, map_kept = self._maps
        encoded_out = map_out(out)
        encoded_kept = encoded_out if kept is None else map_kept(kept)
        self._launch(map_a(a), map_b(b), encoded_out, encoded_kept, ends)


class GroupedSm80:
    """A launch of grouped_gemm_sm80.cu; takes checked arrays."""

    __slots__ = ("_launch", "config")

    def __init__(self, config: GroupedSm80Config, layout: Layout) -> None:
        product, ragged = config.problem.product, config.problem.ragged
        parameters = _PARAMETERS["GroupedDenseParameters"].pack(
            m=0 if ragged == "m" else product.m,
            n=product.n,
            k=0 if ragged == "k" else product.k,
            groups=layout.groups,
            longest=layout.longest,
            fixed_capacity=layout.fixed_capacity,
        )
        self.config = config
        self._launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))

    def __call__(self, a: Array, b: Array, out: Array, kept: Array | None, ends: Array) -> None:
        self._launch(a, b, out, NULL if kept is None else kept, ends)


def _box(major: str, tile: int) -> tuple[int, int]:
    return (tile, TILE_K) if major == "K" else (TILE_K, ROW_BYTES // ITEM_BYTES)


def encode_matrices(box: tuple[int, int], array: Array) -> Any:
    """A tensor map of one matrix per group."""
    return encode_tensor_map(array, (1, *box), swizzle_bytes=box[1] * array.itemsize)


def encode_groups(longest: int, box: tuple[int, int], array: Array) -> Any:
    """A tensor map of the rows of groups: sequences of up to `longest` rows."""
    rows = array.reshape(-1, array.shape[-1])
    return encode_sequence_map(rows, longest, (1, *box), swizzle_bytes=box[1] * array.itemsize)
