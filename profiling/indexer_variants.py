"""Times tilings of `indexer_kl` and its backward against the planned tiling:

    python -m profiling.indexer_variants [--quick]

A variant `M-N-KEYS-QUERIES-BLOCKS[-wgmma]` has tiles of M queries and N keys in the sweep over all
scores, tiles of KEYS and QUERIES in the key-gradient kernel, and BLOCKS thread blocks of the sweep
per SM.
Results are only printed; conclusions are in profiling/notes/attention_distillation.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from cukit.attention.divergence import _indexer_plan
from cukit.attention.divergence._indexer_plan import IndexerTiling
from profiling.case import Call, Case, Workload
from profiling.cases.indexer_kl import Shape, backward_case, forward_case
from profiling.run import Runner, run_cases

TILINGS = (
    IndexerTiling(128, 64, 128, 64, 64),
    IndexerTiling(128, 64, 128, 64, 64, 2, wgmma=True),
)

SHAPES = (Shape(1, 4096, 32, 8, 128, 16, 128),)


def _with_tilings(case: Case) -> Case:
    def build() -> Workload:
        workload = case.build()
        ours = workload.impls["cukit"]
        impls: dict[str, Callable[[], Call]] = {
            name: impl for name, impl in workload.impls.items() if name != "torch-compile"
        }
        for tiling in TILINGS:
            name = "-".join(
                map(str, (tiling.tile_m, tiling.tile_n, tiling.key_tile, tiling.tile_q))
            )
            name += f"-{tiling.blocks_per_sm}{'-wgmma' if tiling.wgmma else ''}"
            impls[name] = partial(_impl, ours, tiling)
        return Workload(impls, workload.expected, workload.tolerance)

    return replace(case, build=build)


def _impl(ours: Callable[[], Call], tiling: IndexerTiling) -> Call:
    """Return a call of cukit with launches for `tiling`, which bypass the launch cache."""
    from cukit.attention import indexer_kl, indexer_kl_backward

    modules = [sys.modules[each.__module__] for each in (indexer_kl, indexer_kl_backward)]
    call = ours()
    original: Any = modules[0].prepare_indexer  # type: ignore[attr-defined]
    launches: dict[bool, Any] = {}

    def prepare(op: str, *args: Any) -> Any:
        backward = op.endswith("backward")
        if backward not in launches:
            with mock.patch.dict(_indexer_plan.WARPGROUP_INDEXER_TILINGS, {128: tiling}):
                launches[backward] = original.__wrapped__(op, *args)
        return launches[backward]

    def run() -> Any:
        kept = [module.prepare_indexer for module in modules]  # type: ignore[attr-defined]
        for module in modules:
            module.prepare_indexer = prepare  # type: ignore[attr-defined]
        try:
            return call()
        finally:
            for module, before in zip(modules, kept, strict=True):
                module.prepare_indexer = before  # type: ignore[attr-defined]

    return run


def main() -> int:
    """Run the comparison."""
    cases = [
        _with_tilings(make(shape)) for shape in SHAPES for make in (forward_case, backward_case)
    ]
    return run_cases(cases, Runner(quick="--quick" in sys.argv))


if __name__ == "__main__":
    sys.exit(main())
