"""Times `sample` with clusters and blocks of other sizes, beside its plan and FlashInfer:

    python -m profiling.sampling_variants

An arm `CxT` has C blocks of T threads a row. FlashInfer runs where it is installed; it draws other
tokens from the same distribution, so its tokens are only counted among those that may be drawn.
Nothing is written; outcomes go into profiling/notes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from cukit.analyzer.benchmark import KernelBenchmark
from cukit.errors import CukitError
from cukit.sampling import sample as module_function
from cukit.sampling.plan import SampleConfig, plan_sample
from profiling import peers
from profiling.case import Call, PeerMissing
from profiling.cases.sampling import PLAIN, SPREAD, TOP_K_TOP_P, TOP_P
from profiling.data import array_module, normal

VOCAB_SIZE = 128256
BATCHES = (1, 64, 256)
SPLITS = ((4, 1024), (8, 512), (8, 1024))
OPTIONS: dict[str, dict[str, Any]] = {
    "top-k 50, top-p 0.9": TOP_K_TOP_P,
    "top-p 0.9": TOP_P,
    "plain": PLAIN,
    "top-k 50, top-p 0.9, 5 log-probabilities": {**TOP_K_TOP_P, "logprobs": 5},
    "top-p 0.9, log-probability": {**TOP_P, "logprobs": 0},
    "greedy": {"temperature": 0},
    "top-k 1000": {"top_k": 1000},
}


def main(batches: tuple[int, ...] = BATCHES, vocab_size: int = VOCAB_SIZE) -> None:
    """Prints a line for each shape and set of options: microseconds of each arm."""
    benchmark = KernelBenchmark(warmup_iters=1, benchmark_iters=10)
    for spread in (SPREAD, 1.0):
        for batch in batches:
            logits = normal((batch, vocab_size), "float32", spread)
            for name, options in OPTIONS.items():
                if spread != SPREAD and options != TOP_P:
                    continue
                _time(benchmark, f"{batch}x{vocab_size} spread {spread:g}", name, logits, options)


def _time(
    benchmark: KernelBenchmark, shape: str, name: str, logits: Any, options: dict[str, Any]
) -> None:
    seed = array_module().arange(len(logits), dtype=np.int64)
    ours = partial(_tokens, logits, seed, options)
    arms: dict[str, Call] = {"plan": ours}
    if name in ("top-k 50, top-p 0.9", "top-p 0.9"):
        for split in SPLITS:
            try:
                arms["{}x{}".format(*split)] = _with_split(ours, split)
            except CukitError as error:
                print(f"{split}: {error}", file=sys.stderr)
    if "log" not in name:
        try:
            arms |= _flashinfer(logits, options)
        except PeerMissing as error:
            print(error, file=sys.stderr)
    failures: list[str] = []
    records = benchmark.compare(
        ("sampling", "sample", f"{shape} {name}", "float32"),
        arms,
        ours,
        bytes=logits.nbytes,
        tolerance=np.inf,
        on_failure=lambda arm, error: failures.append(f"{arm}: {error}"),
    )
    times = "  ".join(
        f"{record['impl']} {record['median_us']:.1f}{'' if record['error'] == 0 else '*'}"
        for record in records
    )
    print(f"{shape}, {name}: {times}  (floor {records[0]['floor_us']}) {' '.join(failures)}")


def _tokens(logits: Any, seed: Any, options: dict[str, Any]) -> Any:
    return module_function(logits, seed=seed, **options).tokens


def _with_split(ours: Call, split: tuple[int, int]) -> Call:
    """Our own call with a plan of its own."""
    import importlib

    module: Any = importlib.import_module("cukit.sampling.sample")

    def plan(num_rows: int, vocab_size: int, dtype: str, vec: int, device: Any, **kind: Any) -> Any:
        config = plan_sample(num_rows, vocab_size, dtype, vec, device, **kind)
        return resplit(config, vocab_size, device.shared_bytes_per_block, *split)

    with mock.patch.object(module, "plan_sample", plan):
        module._prepare.forget()
        prepared: dict[Any, Any] = {}
        original = module._prepare
        logits, *_ = ours.args  # type: ignore[attr-defined]
        prepared["plan"] = original(logits, None)
        module._prepare.forget()

    def call() -> Any:
        with mock.patch.object(module, "_prepare", return_value=prepared["plan"]):
            return ours()

    return call


def resplit(
    config: SampleConfig, vocab_size: int, shared_bytes: int, cluster: int, threads: int
) -> SampleConfig:
    """A plan with other blocks."""
    iterations = -(-vocab_size // (cluster * threads * config.vec))
    other = replace(config, cluster=cluster, threads=threads, iterations=iterations, resident=True)
    return other if other.shared_bytes <= shared_bytes else replace(other, resident=False)


def _flashinfer(logits: Any, options: dict[str, Any]) -> dict[str, Call]:
    """FlashInfer's ways to do the same, the softmax included."""
    torch, theirs = peers.torch(), peers.optional("flashinfer.sampling")
    x = peers.to_torch(logits)
    softmax: Callable[..., Any] = getattr(theirs, "softmax", lambda z: torch.softmax(z, dim=-1))
    if "top_k" in options and "top_p" in options:
        k, p = options["top_k"], options["top_p"]
        return {
            "flashinfer-top-k-first": lambda: theirs.top_k_top_p_sampling_from_logits(x, k, p),
            "flashinfer-joint": lambda: theirs.top_k_top_p_sampling_from_logits(
                x, k, p, filter_apply_order="joint"
            ),
        }
    if "top_k" in options:
        k = options["top_k"]
        return {"flashinfer": lambda: theirs.top_k_sampling_from_probs(softmax(x), k)}
    if "top_p" in options:
        p = options["top_p"]
        return {"flashinfer": lambda: theirs.top_p_sampling_from_probs(softmax(x), p)}
    return {"flashinfer": lambda: theirs.sampling_from_logits(x)} if not options else {}


if __name__ == "__main__":
    main()
