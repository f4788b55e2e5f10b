"""Writes the measured tables into Markdown: `python -m profiling.tables` (`make tables`).

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`. NAME is one of

- a family: all of its cases;
- "page" followed by a key of PAGES: a link to the figure of the page's ops, and a table with one
  row per op: its largest case, and the speedup over all cases;
- "highlights": the ops of HIGHLIGHTS, with speedups over all cases;
- "summary": one row per op, its largest case;
- "verdict": counts of cases faster and slower than the fastest peer, and the speedup;
- "picture": a link to the figure that profiling.figures draws of the ops of HIGHLIGHTS;
- "environment": one sentence that names the machine and its software.

Nothing between these markers is typed by hand; a test compares the files with the results.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cukit.analyzer.report.benchmarks import (
    EQUAL,
    BenchmarkResults,
    Case,
    impl_title,
    largest_cases,
)
from cukit.analyzer.results import Record, read
from profiling.run import RESULTS

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = RESULTS / "h200.json"
DOCUMENTS = (
    "README.md",
    "docs/attention.md",
    "docs/benchmarks.md",
    "docs/distillation.md",
    "docs/gemm.md",
    "docs/graph_memory.md",
    "docs/index.md",
    "docs/kv_cache.md",
    "docs/layers.md",
    "docs/moe.md",
    "docs/quantization.md",
    "docs/sampling.md",
    "docs/sequence.md",
    "docs/sparse.md",
)

MARKS = re.compile(r"(<!-- table:(\w+(?: \w+)*) -->\n).*?(<!-- /table -->)", re.DOTALL)

NOT_MEASURED = "*Not measured yet.*\n"

HIGHLIGHTS = {
    "flash_attention": "attention, forward",
    "flash_attention_backward": "attention, backward",
    "paged_attention": "attention over a paged KV cache",
    "cascade_attention": "decoding with shared prompts",
    "linear": "linear layer",
    "quantized_linear": "linear layer, int4 or int8 weights",
    "matmul_int8": "int8 matrix product",
    "bsr_matmul": "block-sparse matrix product",
    "moe_ffn": "mixture of experts",
    "gated_scan": "Mamba-2, gated linear attention",
    "distillation_loss": "distillation loss",
    "attention_kl": "attention distillation loss",
    "sample": "top-k, top-p and min-p sampling",
}
"""The ops of the README's table, with what each computes."""

LIBRARIES = {
    "torch-eager": "PyTorch",
    "torch-cudnn": "cuDNN",
    "torch-dense": "cuBLAS, dense",
    "flashinfer-flat": "FlashInfer, no cascade",
    "flashinfer": "FlashInfer",
    "fla": "flash-linear-attention",
}
"""Names of peers in the README's table, where they differ from those in other tables."""

PAGES = {
    "attention": (
        "flash_attention", "flash_attention_backward", "paged_attention", "cascade_attention",
        "merge_attention_states", "mla_attention", "block_sparse_attention",
    ),
    "distillation": (
        "cross_entropy", "cross_entropy_backward", "kl_divergence", "kl_divergence_backward",
        "distillation_loss", "topk_distillation_loss", "sampled_distillation_loss",
        "linear_cross_entropy", "linear_kl_divergence", "linear_distillation_loss",
        "linear_topk_distillation_loss", "linear_sampled_distillation_loss", "attention_kl",
        "attention_kl_backward", "indexer_kl", "indexer_kl_backward", "adamw", "global_norm",
        "ema_update",
    ),
    "gemm": (
        "matmul", "matmul_tma", "linear", "linear_backward", "gated_linear",
        "gated_linear_backward", "quantized_linear", "matmul_int8", "matmul_fp8", "gemv",
        "tree_matmul",
    ),
    "graph_memory": (
        "retrieve_top_k", "graph_diffusion", "graph_diffusion_backward", "memory_read",
        "memory_read_backward", "memory_write", "memory_write_backward",
    ),
    "kv_cache": (
        "paged_attention", "cascade_attention", "merge_attention_states", "append_kv", "pack_kv",
    ),
    "layers": (
        "rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward", "rope", "linear_rope",
        "rope_backward", "gelu", "gelu_backward", "silu_and_mul", "silu_and_mul_backward",
        "gelu_and_mul", "gelu_and_mul_backward", "embedding", "embedding_backward",
    ),
    "moe": (
        "topk_router", "topk_router_backward", "expert_order", "moe_permute",
        "moe_permute_backward", "moe_unpermute", "moe_unpermute_backward", "moe_ffn",
        "moe_ffn_backward", "grouped_gemm", "grouped_gemm_backward", "grouped_gated_linear",
        "grouped_gemm_fp8", "layer_bank", "layer_bank_backward", "depth_router",
        "depth_router_backward", "depth_gather", "depth_combine", "depth_combine_backward",
        "adaptive_depth", "adaptive_depth_backward",
    ),
    "quantization": ("encode", "decode", "quantize", "dequantize"),
    "sampling": ("sample", "speculative_verify"),
    "sequence": (
        "gated_scan", "gated_scan_backward", "gated_scan_step", "causal_conv",
        "causal_conv_backward", "causal_conv_step", "meta_attention", "meta_attention_backward",
        "meta_attention_step", "parallel_scan", "parallel_sort", "strided_reduction", "histogram",
    ),
    "sparse": ("bsr_matmul",),
}  # fmt: skip
"""The ops of each documentation page that have bench cases."""

FIGURE_TITLE = "Share of the floor reached by each op, cukit and the fastest peer"
"""Title of the figures of the results, and their alternative text in Markdown."""


def main() -> int:
    """Update every document; print the names of those that changed."""
    results = read(PUBLISHED)
    for name in DOCUMENTS:
        path = ROOT / name
        old = path.read_text()
        new = update(old, results)
        if new != old:
            path.write_text(new)
            print(f"wrote {name}")
    return 0


def update(text: str, results: dict[str, Any]) -> str:
    """Return `text` with every table generated from `results`."""
    return MARKS.sub(lambda match: match[1] + render(match[2], results) + match[3], text)


def render(name: str, results: dict[str, Any]) -> str:
    """Return the table called `name` as Markdown, newline-terminated."""
    special: dict[str, Callable[[dict[str, Any]], str]] = {
        "highlights": _highlights,
        "summary": _summary,
        "environment": _environment,
        "verdict": _verdict,
        "picture": _picture,
    }
    if not results["records"]:
        return NOT_MEASURED
    if name.startswith("page "):
        return _page(name.removeprefix("page "), results)
    return special[name](results) if name in special else _family(name, results)


def _family(name: str, results: dict[str, Any]) -> str:
    """One row per case of a family, one column per implementation."""
    measured = _measured(results)
    cases = measured.of_family(name)
    if not cases:
        return NOT_MEASURED
    impls = measured.impls_of(name)
    with_memory = any("peak_bytes" in record for case in cases for record in case.records)
    header = ["op", "case", "dtype", *map(impl_title, impls), "speedup", "of the floor"]
    rows = []
    for case in cases:
        by_impl = {record["impl"]: record for record in case.records}
        cells = [_cell(by_impl.get(impl), with_memory=with_memory) for impl in impls]
        names = [f"`{case.op}`", case.name, case.dtype]
        rows.append([*names, *cells, _speed(case), _of_floor(case)])
    return markdown(header, rows, left=3)


def _highlights(results: dict[str, Any]) -> str:
    """Speedup over the fastest peer of each case: median and range over an op's cases, and the
    library that is most often the fastest peer."""
    header = ["", "op", "median speedup", "range", "cases", "fastest peer"]
    rows = []
    for op, purpose in HIGHLIGHTS.items():
        compared = [case for case in _measured(results).cases if case.op == op and case.speed]
        if compared:
            median, lowest, highest = (f"{value:.2f}x" for value in _speedups(compared))
            span = f"{lowest} to {highest}" if len(compared) > 1 else ""
            peer = statistics.mode(
                LIBRARIES.get(case.fastest_peer["impl"], _peer(case))
                for case in compared
                if case.fastest_peer
            )
            rows.append([purpose, f"`{op}`", f"**{median}**", span, str(len(compared)), peer])
    return markdown(header, rows, left=2)


def _page(page: str, results: dict[str, Any]) -> str:
    """The figure of a page's ops; one row per op: its largest case and the speedup over all."""
    header = ["op", "largest case", "cukit", "fastest peer", "of the floor", "speedup, all cases"]
    cases = [case for case in kernel_cases(results) if case.op in PAGES[page]]
    rows = []
    for case in largest_cases(cases):
        compared = [other for other in cases if other.op == case.op and other.speed]
        speed = ""
        if compared:
            median, lowest, highest = _speedups(compared)
            speed = f"{median:.2f}x"
            if len(compared) > 1:
                speed += f" ({lowest:.2f}x to {highest:.2f}x, {len(compared)} cases)"
        rows.append([*_times(case), _of_floor(case), speed])
    if not rows:
        return NOT_MEASURED
    return f"![{FIGURE_TITLE}](benchmarks_{page}.svg)\n\n" + markdown(header, rows, left=2)


def _speedups(cases: list[Case]) -> tuple[float, float, float]:
    """Median, lowest and highest speedup of cases that have a peer."""
    speeds = [case.speed for case in cases if case.speed is not None]
    return statistics.median(speeds), min(speeds), max(speeds)


def _peer(case: Case) -> str:
    return impl_title(case.fastest_peer["impl"]) if case.fastest_peer else ""


def _summary(results: dict[str, Any]) -> str:
    """One row per op: the case with the most work."""
    header = ["op", "case", "cukit", "fastest peer", "speedup", "of the floor"]
    cases = largest_cases(_measured(results).cases)
    rows = [[*_times(case), _speed(case), _of_floor(case)] for case in cases]
    return markdown(header, rows, left=2)


def _times(case: Case) -> list[str]:
    """Op, case, cukit's time, and the fastest peer's time and name."""
    ours, peer = case.ours, case.fastest_peer
    theirs = f"{_us(peer['median_us'])} {_peer(case)}" if peer else ""
    return [
        f"`{case.op}`",
        f"{case.name} {case.dtype}",
        _us(ours["median_us"]) if ours else "",
        theirs,
    ]


def _measured(results: dict[str, Any]) -> BenchmarkResults:
    return BenchmarkResults(results["environment"], tuple(results["records"]))


def kernel_cases(results: dict[str, Any]) -> list[Case]:
    """Cases that time a kernel; those of the family "host" time a launch."""
    return [case for case in _measured(results).cases if case.family != "host"]


def _verdict(results: dict[str, Any]) -> str:
    speeds = [case.speed for case in kernel_cases(results) if case.speed is not None]
    faster = sum(speed > 1 + EQUAL for speed in speeds)
    slower = sum(speed < 1 - EQUAL for speed in speeds)
    return (
        f"On an {results['environment']['gpu']}, cukit is faster than the fastest peer in {faster} "
        f"of {len(speeds)} cases, within {EQUAL:.0%} of it in {len(speeds) - faster - slower} and "
        f"slower in {slower}. The median speedup is {statistics.median(speeds):.2f}x, "
        f"the geometric mean {statistics.geometric_mean(speeds):.2f}x.\n"
    )


def _picture(results: dict[str, Any]) -> str:
    return f"![{FIGURE_TITLE}](docs/benchmarks_highlights.svg)\n"


def _environment(results: dict[str, Any]) -> str:
    found = results["environment"]
    versions = found["versions"]
    names = ("cupy-cuda12x", "cupy-cuda13x", "torch", "triton", "liger-kernel")
    software = [f"{name} {versions[name]}" for name in names if name in versions]
    ceilings, clocks = found["ceilings"], found["clocks"]
    parts = [
        f"{found['gpu']}, driver {found['driver']}, CUDA {found['cuda']}, {', '.join(software)}",
        f"measured ceilings: copy {ceilings['copy_gbps'] / 1e3:.2f} TB/s, "
        f"bf16 matrix product {ceilings['bf16_gemm_tflops']:.0f} TFLOP/s",
    ]
    if clocks.get("sm_under_load_mhz"):
        limit = clocks["sm_max_mhz"]
        parts.append(f"SM clock under load {clocks['sm_under_load_mhz']:.0f} of {limit:.0f} MHz")
    parts.append(f"commit {found['commit']}, {found['date']}")
    return "; ".join(parts) + ".\n"


def _speed(case: Case) -> str:
    """Speedup over the fastest peer; above 1, cukit is faster."""
    return "" if case.speed is None else f"{case.speed:.2f}x"


def _of_floor(case: Case) -> str:
    """The floor, a roofline bound on the time, divided by cukit's time, in percent."""
    share = case.share_of_floor(case.ours) if case.ours else None
    return "" if share is None else f"{100 * share:.0f}%"


def _cell(record: Record | None, *, with_memory: bool) -> str:
    if record is None:
        return ""
    if not record["correct"]:
        return "wrong"
    text = _us(record["median_us"])
    if record["tflops"]:
        text += f" ({record['tflops']:.0f} TF)"
    if with_memory and record.get("peak_bytes") is not None:
        text += f", {record['peak_bytes'] / 2**30:.2f} GiB"
    return text


def _us(microseconds: float) -> str:
    """Format a time in microseconds, or in milliseconds from 10 ms on."""
    if microseconds >= 10_000:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds:.0f} µs" if microseconds >= 1000 else f"{microseconds:.1f} µs"


def markdown(header: list[str], rows: list[list[str]], *, left: int) -> str:
    """Return a table whose first `left` columns are left-aligned and the others right-aligned."""
    rule = ["---" if column < left else "--:" for column in range(len(header))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *rows))


def replace_between_marks(document: Path, marks: re.Pattern[str], made: str) -> None:
    """Replace what is between `marks` (groups 1 and 2) in a document.

    Raises:
        ValueError: the document lacks the marks.
    """
    text, count = marks.subn(lambda m: m[1] + made + m[2], document.read_text(encoding="utf-8"))
    if not count:
        raise ValueError(f"{document} has no marks {marks.pattern}")
    document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
