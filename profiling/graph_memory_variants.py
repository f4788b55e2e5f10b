"""Times variants of the plans of `cukit.graph_memory` in interleaved runs.

    python -m profiling.graph_memory_variants [parts]

First times each launch of a retrieval separately; with `parts`, times nothing else.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from typing import Any

from cukit.analyzer.benchmark import KernelBenchmark, Sampling
from cukit.core.arrays import empty
from cukit.graph_memory import diffusion, retrieve
from cukit.graph_memory.diffusion import DiffuseConfig
from profiling.cases.graph_memory import DTYPE, _graph
from profiling.data import normal


def compare(name: str, impls: dict[str, Any]) -> None:
    """Print the median of each variant."""
    sampling = Sampling(rounds=2, budget_ms=40.0, min_samples=5, max_samples=20, pause_s=0.1)
    benchmark = KernelBenchmark(warmup_iters=1, sampling=sampling)
    expected = next(iter(impls.values()))
    for record in benchmark.compare(("graph_memory", name, "", DTYPE), impls, expected):
        print(f"{name:24} {record['impl']:28} {record['median_us']:9.1f} us", flush=True)


def diffusion_impls() -> dict[str, Any]:
    """Return a diffusion for each slice width (8 columns per lane) and slices per launch."""
    memory = normal((65536, 256), DTYPE)
    transition = _graph(memory, 65536, 32)
    impls = {}
    for lanes, slices in ((8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (32, 1)):

        def plan(*_: Any, lanes: int = lanes, slices: int = slices) -> DiffuseConfig:
            return DiffuseConfig(DTYPE, 8, lanes, slices)

        call = partial(diffusion.graph_diffusion, memory, transition)
        impls[f"{lanes} lanes, {slices} slices"] = _planned(diffusion, "plan_diffusion", plan, call)
    return impls


def retrieval_impls(num_queries: int) -> dict[str, Any]:
    """Return retrievals with the default plan and with other numbers of stages, rows or blocks."""
    queries, memory = normal((num_queries, 128), DTYPE), normal((1_000_000, 128), DTYPE)
    plain = retrieve.plan_maxima
    impls = {}
    for label, changes in (
        ("plan", {}),
        ("3 stages", {"stages": 3}),
        ("2 stages", {"stages": 2}),
        ("64 rows", {"rows": 64, "row_warps": 2}),
        ("half the blocks", {"blocks": 66}),
    ):

        def plan(*args: Any, changes: dict[str, Any] = changes) -> Any:
            return dataclasses.replace(plain(*args), **changes)

        call = partial(retrieve.retrieve_top_k, queries, memory, 64)
        impls[label] = _planned(retrieve, "plan_maxima", plan, lambda call=call: call().scores)
    return impls


def print_launches(num_queries: int, k: int = 64) -> None:
    """Time each step of a retrieval separately. All steps return the same array, since `compare`
    compares results."""
    queries, memory = normal((num_queries, 128), DTYPE), normal((1_000_000, 128), DTYPE)
    ((_, launches),) = retrieve._prepare(queries, memory, k)
    maxima = empty(queries, (num_queries, launches.groups), "float32")
    keys = empty(queries, (num_queries, launches.parts, k), "uint64")
    merged = [keys]
    for _, parts in launches.merges:
        merged.append(empty(queries, (num_queries, parts, k), "uint64"))
    rescored = empty(queries, (num_queries, k, retrieve.GROUP), "uint64")
    scores, indices = (empty(queries, (num_queries, k), dtype) for dtype in ("float32", "int32"))

    def maximise() -> Any:
        launches.maxima(queries, memory, maxima)
        return maxima

    def select() -> Any:
        launches.select(maxima, None, keys, None, None)
        return maxima

    def merge() -> Any:
        for (launch, _), before, after in zip(
            launches.merges, merged[:-1], merged[1:], strict=True
        ):
            launch(None, before, after, None, None)
        return maxima

    def rescore() -> Any:
        launches.rescore(queries, memory, merged[-1], rescored)
        return maxima

    def last() -> Any:
        launches.last(None, rescored, None, scores, indices)
        return maxima

    impls = {"maxima": maximise, "select": select, "merge": merge, "rescore": rescore, "last": last}
    if not launches.merges:
        del impls["merge"]
    for impl in impls.values():
        impl()
    compare(f"parts, {num_queries}", impls)


def _planned(module: Any, name: str, plan: Any, call: Any) -> Any:
    """Return `call` with another plan, and with its own launch cache, since the keys of the
    module's cache do not include the plan."""
    cache: dict[str, Any] = {}

    def planned() -> Any:
        prepare, own = module._prepare, cache.get("prepare")
        if own is None:
            kept = getattr(module, name)
            setattr(module, name, plan)
            try:
                own = cache["prepare"] = module.launch_plan(prepare.__wrapped__)
                module._prepare = own
                return call()
            finally:
                module._prepare = prepare
                setattr(module, name, kept)
        module._prepare = own
        try:
            return call()
        finally:
            module._prepare = prepare

    return planned


if __name__ == "__main__":
    print_launches(256)
    print_launches(1)
    if "parts" not in sys.argv[1:]:
        compare("graph_diffusion", diffusion_impls())
        compare("retrieve_top_k, 256", retrieval_impls(256))
        compare("retrieve_top_k, 1", retrieval_impls(1))
