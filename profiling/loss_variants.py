"""Times variants of the divergence kernels, and the matrix products of the fused losses:

    python -m profiling.loss_variants rows
    python -m profiling.loss_variants products
    python -m profiling.loss_variants heads
    python -m profiling.loss_variants options

rows: a variant `THREADS,CLUSTER,CACHED` gives the threads per block, the blocks per row and the
vectors of each tensor that a thread keeps in shared memory. products: each product of a chunk of
tokens, by cuBLAS and by `linear`. heads: complete losses, by tokens per chunk. options: losses on
logits, with and without options. Results are only printed; conclusions are in
profiling/notes/losses.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from cukit.analyzer.benchmark import KernelBenchmark, Sampling
from cukit.commands.compile import Variant, build
from cukit.core.device import current_device
from cukit.distill import (
    cross_entropy,
    distillation_loss,
    kl_divergence,
    linear_distillation_loss,
    sampled_distillation_loss,
    teacher_top_k,
    topk_distillation_loss,
)
from cukit.distill.losses import _divergence_rows
from cukit.gemm import explain_matmul
from cukit.gemm.dispatch._matmul_candidates import MatmulOptions
from cukit.gemm.dispatch._matmul_decision import prepare
from profiling.case import Call, Case, Workload
from profiling.cases.distill import DIVERGENCES, DTYPE, TEMPERATURE, divergence_case, kl_case
from profiling.data import array_module, integers, normal
from profiling.run import Runner, run_cases, show

SPLITS = {
    32768: ((384, 2, 6), (512, 1, 8), (128, 4, 8)),
    256000: ((256, 8, 9), (512, 8, 6)),
}
"""(threads, cluster, cached) by vocabulary."""

COMPARED = {32768: ("reverse_kl", "skewed_forward_kl", "total_variation"), 256000: ()}
"""Divergences that are also timed with torch.compile: compiling each takes seconds."""

DISTANCES = (0.4, 0.05)
"""Standard deviations of student - teacher, in addition to independent logits."""

HEADS = ((4096, 2304, 256000), (8192, 4096, 128256), (4096, 2048, 32768))
CHUNKS = (1024, 2048, 4096)


def rows(names: Sequence[str] = ()) -> list[Case]:
    """Return cases of divergences (default: all) of 4096 rows of logits, with every split; then the
    Jensen-Shannon divergence of a student close to its teacher, by the plan."""
    found = names or DIVERGENCES
    cases = [_with_splits(4096, size, name) for size in SPLITS for name in found]
    near = [divergence_case(4096, 32768, "jsd", distance=each) for each in DISTANCES]
    return [*cases, *map(_alone, near)]


def _alone(case: Case) -> Case:
    """Return the case without peers."""

    def build() -> Workload:
        workload = case.build()
        return replace(workload, impls={"cukit": workload.impls["cukit"]})

    return replace(case, build=build)


def options() -> None:
    """Print the times of losses on logits, with and without options."""
    benchmark = _benchmark()
    for tokens, vocab_size in ((4096, 32768), (4096, 256000)):
        student, teacher = (normal((tokens, vocab_size), DTYPE) for _ in range(2))
        xp = array_module()
        targets = integers(0, vocab_size, (tokens,))
        weights = xp.ones((tokens,), "float32")
        kinds: dict[str, dict[str, Any]] = {
            "plain": {},
            "token_weights": {"token_weights": weights},
            "vocab_size": {"vocab_size": vocab_size - 64},
            "logit_scale": {"logit_scale": 0.5},
            "softcap": {"softcap": 30.0},
        }
        impls = {}
        for name, given in kinds.items():
            both = given if name != "softcap" else {**given, "teacher_softcap": 30.0}
            calls = {
                "cross_entropy": partial(cross_entropy, student, targets, **given),
                "forward_kl": partial(kl_divergence, student, teacher, temperature=2.0, **both),
            }
            for op, call in calls.items():
                impls[f"{op} {name}"] = partial(_first, partial(call, return_grad=True))
        log_probs, ids = teacher_top_k(teacher, 64)
        for tail in ("bucket", "renormalise"):
            call = partial(topk_distillation_loss, student, log_probs, ids, tail=tail)
            impls[tail] = partial(_first, partial(call, return_grad=True))
        call = partial(sampled_distillation_loss, student, ids)
        impls["sampled"] = partial(_first, partial(call, return_grad=True))
        records = benchmark.compare(
            ("distill", "options", f"{tokens}x{vocab_size}", DTYPE),
            impls,
            lambda: array_module().zeros((), "float32"),
            tolerance=float("inf"),
        )
        print(f"{tokens}x{vocab_size}")
        for record in records:
            print(f"    {record['impl']:<30}{record['median_us']:9.1f} us", flush=True)


def _first(call: Call) -> Any:
    return call()[0]


def _with_splits(tokens: int, vocab_size: int, divergence: str) -> Case:
    case = (
        kl_case(tokens, vocab_size)
        if divergence == "forward_kl"
        else divergence_case(tokens, vocab_size, divergence)
    )

    def build() -> Workload:
        workload = case.build()
        impls = dict(workload.impls)
        del impls["torch-eager"]
        if divergence not in COMPARED[vocab_size]:
            del impls["torch-compile"]
        for split in SPLITS[vocab_size]:
            impls["{},{},{}".format(*split)] = partial(_split_impl, workload.impls["cukit"], split)
        return Workload(impls, workload.expected, workload.tolerance)

    return replace(case, build=build)


def compile_splits(names: Sequence[str] = ()) -> None:
    """Compile the kernels of all splits in parallel, into the kernel cache."""
    device = current_device()
    specs = {
        _divergence_rows.plan_divergence(
            size, DTYPE, 2, "int32", 8, name, True, False, False, device,
            threads=threads, cluster=cluster, cached=cached,
        ).spec()
        for name in names or DIVERGENCES
        for size in SPLITS
        for threads, cluster, cached in SPLITS[size]
    }  # fmt: skip
    build([Variant(spec, device) for spec in specs])


def _split_impl(ours: Callable[[], Call], split: tuple[int, int, int]) -> Call:
    """Return a call of cukit with the given split instead of the plan's."""
    module: Any = sys.modules[distillation_loss.__module__]
    threads, cluster, cached = split
    plan = partial(
        _divergence_rows.plan_divergence, threads=threads, cluster=cluster, cached=cached
    )
    original, run = module._prepare, ours()
    launches: list[Any] = []

    def prepared(*args: Any) -> Any:
        if not launches:
            with mock.patch.object(_divergence_rows, "plan_divergence", plan):
                launches.append(original.__wrapped__(*args))
        return launches[0]

    def call() -> Any:
        with mock.patch.object(module, "_prepare", prepared):
            return run()

    return call


def products() -> None:
    """Print the time of each product of a chunk, by kernel; `*` marks the kernel matmul chooses."""
    benchmark = _benchmark()
    print(benchmark.environment, flush=True)
    for tokens, hidden, vocab_size in HEADS:
        weight = normal((vocab_size, hidden), DTYPE, scale=0.02)
        for chunk in (size for size in CHUNKS if size <= tokens):
            h = normal((chunk, hidden), DTYPE)
            z = normal((chunk, vocab_size), DTYPE, scale=1e-3)
            xp = array_module()
            grad_weight = xp.zeros(weight.shape, DTYPE)
            plain = {"transpose_a": False, "transpose_b": False, "accumulate": False}
            of_weight = {"transpose_a": True, "transpose_b": False}
            flops = 2.0 * chunk * hidden * vocab_size
            for name, a, b, out, flags in (
                ("logits", h, weight, xp.empty_like(z), {**plain, "transpose_b": True}),
                ("grad_hidden", z, weight, xp.empty_like(h), plain),
                ("grad_weight", z, h, grad_weight, {**of_weight, "accumulate": False}),
                ("grad_weight +=", z, h, grad_weight, {**of_weight, "accumulate": True}),
            ):
                _product(benchmark, f"{chunk} of {hidden}x{vocab_size} {name}", a, b, out, flags,
                         flops)  # fmt: skip


def _product(
    benchmark: KernelBenchmark,
    name: str,
    a: Any,
    b: Any,
    out: Any,
    flags: dict[str, Any],
    flops: float,
) -> None:
    options = MatmulOptions(**flags, out_dtype=None)
    plan = explain_matmul(a, b, out=out, **flags)
    impls = {}
    for each in plan.estimates:
        if each.reason is None and each.kernel in ("cublas", "linear"):
            run = prepare(each, a, b, out, options)
            chosen = "*" if each.kernel == plan.kernel else ""
            impls[each.kernel + chosen] = partial(_run, run, a, b, out)
    records = benchmark.compare(
        ("distill", "products", name, DTYPE), impls, lambda: out[:1] * 0, flops=flops,
        tolerance=float("inf"),
    )  # fmt: skip
    print("  ".join(f"{r['impl']} {r['median_us']:.0f} us {r['tflops']:.0f} TF" for r in records),
          name, flush=True)  # fmt: skip


def _run(run: Any, a: Any, b: Any, out: Any) -> Any:
    run(a, b, out)
    return out[:1] * 0


def heads() -> None:
    """Print time and memory of linear_distillation_loss, by divergence and chunk size."""
    benchmark = _benchmark()
    for tokens, hidden, vocab_size in HEADS:
        student = normal((tokens, hidden), DTYPE), normal((vocab_size, hidden), DTYPE, scale=0.02)
        teacher = normal((tokens, hidden), DTYPE), normal((vocab_size, hidden), DTYPE, scale=0.02)
        impls = {}
        for divergence in ("forward_kl", "jsd"):
            for chunk in CHUNKS if divergence == "forward_kl" else CHUNKS[1:2]:
                call = partial(
                    linear_distillation_loss, *student, *teacher, chunk_tokens=chunk,
                    divergence=divergence, temperature=TEMPERATURE,
                )  # fmt: skip
                impls[f"{divergence} {chunk}"] = partial(_loss_of, call)
        records = benchmark.compare(
            ("distill", "heads", f"{tokens}x{hidden}x{vocab_size}", DTYPE),
            impls,
            lambda: array_module().zeros((), "float32"),
            flops=8.0 * tokens * hidden * vocab_size,
            tolerance=float("inf"),
            measure_memory=True,
        )
        print(f"{tokens}x{hidden}x{vocab_size}")
        for record in records:
            print(show(record), flush=True)


def _loss_of(call: Call) -> Any:
    return call().loss


def _benchmark() -> KernelBenchmark:
    sampling = Sampling(rounds=2, budget_ms=40.0, min_samples=5, max_samples=12, pause_s=0.1)
    return KernelBenchmark(warmup_iters=1, sampling=sampling)


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    what, *names = arguments or ("rows",)
    if what == "rows":
        compile_splits(names)
        return run_cases(rows(names), Runner())
    commands = {"products": products, "heads": heads, "options": options}
    if what not in commands:
        raise SystemExit(f"unknown command {what!r}; known: rows, {', '.join(commands)}")
    commands[what]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
