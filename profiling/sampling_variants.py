"""Compares cluster and block sizes of `sample` with its plan and with FlashInfer:

    python -m profiling.sampling_variants

A variant `CxT` has C blocks of T threads per row. FlashInfer runs if it is installed; it uses other
random numbers (a star marks different tokens). Results are printed only; conclusions are in
profiling/notes.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from cukit.analyzer.benchmark import KernelBenchmark
from cukit.errors import CukitError
from cukit.sampling import sample
from cukit.sampling._plan import SampleConfig, _capacity, plan_sample
from profiling.case import Call, PeerMissing
from profiling.cases.sampling import PLAIN, SPREAD, TOP_K_TOP_P, TOP_P, flashinfer_impls
from profiling.data import array_module, normal

VOCAB_SIZE = 128256
BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)
STREAMED = ((1, 512), (1, 1024))
SPREAD_OUT = ((4, 512), (8, 512), (8, 1024))
OPTIONS: dict[str, dict[str, Any]] = {
    "top-k 50, top-p 0.9": TOP_K_TOP_P,
    "top-p 0.9": TOP_P,
    "plain": PLAIN,
    "top-k 50, top-p 0.9, 5 log-probabilities": {**TOP_K_TOP_P, "logprobs": 5},
    "top-p 0.9, log-probability": {**TOP_P, "logprobs": 0},
    "greedy": {"temperature": 0},
    "top-k 1000": {"top_k": 1000},
}


def main(
    batches: tuple[int, ...] = BATCHES,
    vocab_size: int = VOCAB_SIZE,
    only: tuple[str, ...] = tuple(OPTIONS),
) -> None:
    """Print a line per shape and set of options, with the microseconds of each variant."""
    benchmark = KernelBenchmark(warmup_iters=1, benchmark_iters=10)
    for spread in (SPREAD, 1.0):
        for batch in batches:
            logits = normal((batch, vocab_size), "float32", spread)
            for name, options in OPTIONS.items():
                if name not in only or (spread != SPREAD and options != TOP_P):
                    continue
                _time(benchmark, f"{batch}x{vocab_size} spread {spread:g}", name, logits, options)


def _time(
    benchmark: KernelBenchmark, shape: str, name: str, logits: Any, options: dict[str, Any]
) -> None:
    seed = array_module().arange(len(logits), dtype=np.int64)
    ours = partial(_tokens, logits, seed, options)
    impls: dict[str, Call] = {"plan": ours}
    splits: tuple[tuple[int, int], ...] = STREAMED if options in (TOP_P, TOP_K_TOP_P, PLAIN) else ()
    if options == TOP_P and len(logits) <= 32:
        splits += SPREAD_OUT
    for cluster, threads in splits:
        try:
            impls[f"{cluster}x{threads}"] = with_blocks(ours, cluster, threads)
        except CukitError as error:
            print(f"{cluster}x{threads}: {error}", file=sys.stderr)
    if "log" not in name:
        try:
            impls |= {impl: make() for impl, make in flashinfer_impls(logits, options).items()}
        except PeerMissing as error:
            print(error, file=sys.stderr)
    failures: list[str] = []
    records = benchmark.compare(
        ("sampling", "sample", f"{shape} {name}", "float32"),
        impls,
        ours,
        bytes=logits.nbytes,
        tolerance=np.inf,
        on_failure=lambda impl, error: failures.append(f"{impl}: {error}"),
    )
    times = "  ".join(
        f"{record['impl']} {record['median_us']:.1f}{'' if record['error'] == 0 else '*'}"
        for record in records
    )
    print(f"{shape}, {name}: {times}  (floor {records[0]['floor_us']}) {' '.join(failures)}")


def _tokens(logits: Any, seed: Any, options: dict[str, Any]) -> Any:
    return sample(logits, seed=seed, **options).tokens


def with_blocks(ours: Call, cluster: int, threads: int) -> Call:
    """Return a call of `sample` with `cluster` blocks of `threads` threads per row."""
    module: Any = importlib.import_module("cukit.sampling.sample")

    def plan(num_rows: int, vocab_size: int, dtype: str, vec: int, device: Any, **kind: Any) -> Any:
        config = plan_sample(num_rows, vocab_size, dtype, vec, device, **kind)
        return resplit(config, vocab_size, device, cluster, threads)

    logits, _, options = ours.args  # type: ignore[attr-defined]
    drawing = module.RequestOptions("sample", {**options, "seed": 0})
    with mock.patch.object(module, "plan_sample", plan):
        module._prepare.forget()
        prepared = module._prepare(logits, None, module.draws_of(drawing, logits.shape[1]))
        module._prepare.forget()

    def call() -> Any:
        with mock.patch.object(module, "_prepare", return_value=prepared):
            return ours()

    return call


def resplit(
    config: SampleConfig, vocab_size: int, device: Any, cluster: int, threads: int
) -> SampleConfig:
    """Return the plan with another split of a row: one block reads the row from global memory, the
    blocks of a cluster keep it in shared memory."""
    atoms = -(-vocab_size // (config.atom * 32 * config.vec))
    config = replace(
        config,
        threads=threads,
        cluster=cluster,
        resident=cluster > 1,
        atoms=-(-atoms // cluster),
        capacity=0,
    )
    if cluster > 1 or config.draws != "Any":
        return config
    return replace(config, capacity=_capacity(config, vocab_size, device))


if __name__ == "__main__":
    main()
