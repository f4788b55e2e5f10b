"""Compares tilings of `paged_attention` with the planned one:

    python -m profiling.paged_variants

A variant `STEPxWARPS-BLOCKS-STAGES` has STEP keys per warp and step, WARPS warps per thread block,
BLOCKS thread blocks per SM and STAGES pipeline stages per warp. Variants use no clusters. Results
are only printed; conclusions are in profiling/notes/paged_attention.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from cukit.attention.paged import paged
from cukit.attention.paged._paged_plan import PagedConfig, plan_paged_attention
from profiling.case import Call, Case, Workload
from profiling.cases.attention_paged import GROUP_ROWS, Shape, paged_case
from profiling.run import Runner, run_cases

Tiling = tuple[int, int, int, int]

TILINGS = {
    "": ((16, 4, 2, 3), (16, 4, 3, 2), (32, 2, 2, 3), (16, 8, 1, 3)),
    "int4": ((64, 4, 2, 3), (64, 2, 3, 4), (64, 4, 1, 6), (64, 8, 1, 3), (64, 1, 8, 2)),
    "int8": ((32, 4, 3, 2), (32, 4, 2, 3), (16, 4, 3, 4), (16, 4, 4, 3), (32, 1, 8, 2)),
}
"""(step, warps, blocks_per_sm, stages) for heads of 128, by dtype of the cache; "" is bfloat16."""

TILINGS["float8_e4m3"] = TILINGS["int8"]

SHAPES = (Shape("128x2048", (2048,) * 128), Shape("1x4096", (4096,)))

OTHER_SHAPES = {
    Shape("32x8192", (8192,) * 32, head_dim=64): ((32, 8, 1, 3), (32, 4, 2, 3), (16, 4, 2, 6)),
    Shape("32x8192", (8192,) * 32, 16, 1): ((32, 4, 1, 3), (16, 4, 2, 3)),
}
"""Tilings for specific shapes, with 16-bit caches."""


def cases() -> list[Case]:
    """Return one case per shape and dtype of the cache."""
    by_dtype = [
        _with_tilings(
            replace(shape, codes=codes, block_size=GROUP_ROWS if codes == "int4" else 16), tilings
        )
        for shape in SHAPES
        for codes, tilings in TILINGS.items()
    ]
    return by_dtype + [_with_tilings(shape, tilings) for shape, tilings in OTHER_SHAPES.items()]


def tiled(config: PagedConfig, step: int, warps: int, blocks: int, stages: int) -> PagedConfig:
    """Return the plan with another tiling, on the same number of SMs."""
    num_sms = config.num_blocks // config.blocks_per_sm
    num_blocks = blocks * num_sms // config.team * config.team
    return replace(
        config, step=step, warps=warps, blocks_per_sm=blocks, stages=stages, num_blocks=num_blocks
    )


def _with_tilings(shape: Shape, tilings: tuple[Tiling, ...]) -> Case:
    case = paged_case(shape)

    def build() -> Workload:
        workload = case.build()
        ours = workload.impls["cukit"]
        impls: dict[str, Callable[[], Call]] = {"cukit": ours}
        for tiling in tilings:
            step, warps, blocks, stages = tiling
            name = f"{step}x{warps}-{blocks}-{stages}"
            impls[name] = partial(_impl, ours, tiling)
        return Workload(impls, workload.expected, workload.tolerance)

    return replace(case, build=build)


def _impl(ours: Callable[[], Call], tiling: Tiling) -> Call:
    """Return a call of cukit with another tiling, planned and prepared without their caches.

    A plan with batch=0 (unknown) uses no clusters.
    """

    def plan(*args: Any, **kwargs: Any) -> PagedConfig:
        return tiled(plan_paged_attention(*args, **kwargs | {"batch": 0}), *tiling)

    original: Any = paged._prepare

    def prepare(*args: Any) -> Any:
        prepared = original.__wrapped__(*args)

        def launch(*given: Any) -> Any:
            calls.append(partial(prepared, *given))
            return calls[-1]()

        return launch

    calls: list[Call] = []
    with (
        mock.patch.object(paged, "plan_paged_attention", plan),
        mock.patch.object(paged, "_prepare", prepare),
    ):
        ours()()
    return calls[-1]


if __name__ == "__main__":
    sys.exit(run_cases(cases(), Runner()))
