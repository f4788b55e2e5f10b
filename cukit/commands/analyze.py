"""`cukit analyze`: profiles the kernels that a script launches, or analyses one compiled kernel."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cukit.analyzer.cupti import KernelTrace
from cukit.analyzer.kernel_analyzer import KernelAnalyzer
from cukit.analyzer.machine import environment
from cukit.analyzer.ncu import run_ncu
from cukit.analyzer.report import generate_report
from cukit.analyzer.report.terminal import print_report
from cukit.analyzer.schema import AnalysisReport, KernelAnalysis
from cukit.analyzer.schema_json import to_json
from cukit.analyzer.script import Script
from cukit.analyzer.static import KernelSource
from cukit.analyzer.trace_summary import analyses_of, timeline_of, total_us
from cukit.commands._console import stdout, table
from cukit.commands.compile import devices, variants
from cukit.core.compiler import KernelSpec
from cukit.core.device import cupy_module, current_device, gpu_available
from cukit.core.files import check_file, read_text, write_text
from cukit.core.source import kernels_root
from cukit.errors import ConfigError, CukitError

_ENTRY = re.compile(r"__global__[^;{(]*?\b(\w+)\s*\(")
_BOUNDS = re.compile(r"__launch_bounds__\s*\([^)]*\)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class ScriptFailed(Exception):  # noqa: N818 - carries the user's own error
    """The script raised, and its traceback has been printed; or it exited with an error code."""


def analyze(
    target: Annotated[
        str,
        typer.Argument(
            help="FILE.py (run as a program), FILE.py:function (called without arguments), or one "
            "kernel: FILE.py:kernel, FILE.cu or FILE.cubin."
        ),
    ],
    repeat: Annotated[
        int, typer.Option(min=1, help="Profiled calls of a function, after one warm-up call.")
    ] = 1,
    counters: Annotated[
        bool, typer.Option(help="Also run it under ncu: bytes moved, achieved occupancy.")
    ] = False,
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", help="Report to write: .html, .txt, .json or .trace.json."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Analysis to write, for `cukit compare` and `cukit report`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the analysis as JSON.")] = False,
    arch: Annotated[
        str | None,
        typer.Option(
            help="One kernel: its architecture. Default: this GPU's, or sm_90 without one."
        ),
    ] = None,
    entry: Annotated[
        str | None, typer.Option(help="One kernel: its name, if the file has several.")
    ] = None,
    block: Annotated[
        int, typer.Option(min=1, max=1024, help="One kernel: threads per block.")
    ] = 256,
    grid: Annotated[
        int | None, typer.Option(min=1, max=2**31 - 1, help="One kernel: blocks in the grid.")
    ] = None,
    shared: Annotated[
        int,
        typer.Option(
            min=0, max=2**20, help="One kernel: bytes of dynamic shared memory per block."
        ),
    ] = 0,
    option: Annotated[
        list[str] | None, typer.Option(help="FILE.cu: an NVRTC option; may be repeated.")
    ] = None,
) -> None:
    """Profile the kernels that a script launches: calls, times, occupancy, advice.

    Records every kernel that runs: raw kernels, CuPy's own kernels, and those of libraries such as
    cuBLAS. A single kernel is analysed from its compiled code, which needs no GPU. Exit code 1 if
    the script raises or exits with an error code.
    """
    try:
        specs = [] if option else _own_variants(Path(target), entry, arch)
        found = None if specs else _find(target, entry, option or ())
        single = bool(specs) or _is_kernel(found)
        if single:
            here = current_device().arch if gpu_available() else "sm_90"
            analyzer = KernelAnalyzer(arch=arch or here)
            for spec in specs:
                analyzer.analyze(spec, grid)
            if not specs:
                analyzer.analyze(found, grid, block, shared_bytes=shared, name=entry)
            report = analyzer.report()
        else:
            report = _trace(target, found, repeat, counters=counters)
    except ScriptFailed:
        raise typer.Exit(1) from None
    made = generate_report([report], output or ())
    if out is not None:
        write_text(out, to_json(report))
    if as_json:
        print(to_json(report), end="")
    elif single:
        print_report(stdout(), made.title, made.sections)
    else:
        show_trace(report.analyses)


def _find(target: str, entry: str | None, options: Sequence[str]) -> Any:
    """The kernel or callable that `target` names."""
    path = Path(target)
    if path.suffix not in (".cu", ".cubin"):
        return _run(Script(target).load)
    check_file(path)
    if path.suffix == ".cubin":
        if entry is None:
            raise ConfigError("a cubin may contain several kernels: name one with --entry")
        return path
    code = read_text(path)
    # Quoted includes: from the file's folder, as with any compiler, then cukit's own headers.
    folders = (path.resolve().parent, kernels_root())
    includes = (f"-I{folder}" for folder in folders)
    return KernelSource(entry or find_entry(code, target), code, (*options, *includes))


def _own_variants(path: Path, entry: str | None, arch: str | None) -> list[KernelSpec]:
    """The variants that cukit compiles from one of its own sources; [] for any other file."""
    if path.suffix != ".cu" or not path.resolve().is_relative_to(kernels_root()):
        return []
    source = path.resolve().relative_to(kernels_root()).as_posix()
    device = devices(arch)[0]
    specs = [each.spec for each in variants([device]) if each.spec.source == source]
    found = [spec for spec in specs if entry in (None, spec.entry)]
    if not found and path.exists():
        names = ", ".join(dict.fromkeys(spec.entry for spec in specs)) or "none"
        raise ConfigError(
            f"{path}: no such kernel for {device.arch}; cukit compiles {names} from this file. "
            "With --option it is compiled like a file of your own"
        )
    return found


def _is_kernel(found: Any) -> bool:
    cupy = cupy_module()
    raw = (cupy.RawKernel, cupy.RawModule) if cupy is not None else ()
    return isinstance(found, (KernelSource, Path, *raw))


def find_entry(code: str, place: str) -> str:
    """The name of the only kernel in CUDA source. Raises ConfigError for none or several."""
    names = list(dict.fromkeys(_ENTRY.findall(_BOUNDS.sub("", _COMMENT.sub("", code)))))
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise ConfigError(f"{place}: expected one kernel, found {found}; name one with --entry")
    return str(names[0])


def _trace(target: str, call: Any, repeat: int, *, counters: bool) -> AnalysisReport:
    if not callable(call):
        raise ConfigError(f"{target} is neither a function nor a kernel but {call!r}")
    device = current_device()
    trace = KernelTrace()
    is_function = Script(target).name is not None
    if is_function:
        _run(call)  # warm-up: compiles the kernels
    with trace:
        for _ in range(repeat if is_function else 1):
            _run(call)
    if not trace.records:
        raise CukitError(f"{target} launched no kernel")
    counted = None
    if counters:
        counted = run_ncu([sys.executable, "-m", "cukit.analyzer.script", target])
    analyses = analyses_of(trace.records, device, counted)
    timeline = timeline_of(trace.records)
    return AnalysisReport(environment(device, static=False), analyses, timeline=timeline)


def _run(function: Callable[[], Any]) -> Any:
    """Calls the user's code with stdout redirected to stderr; prints the traceback if it raises."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function()
    except SystemExit as end:
        if end.code:
            if not isinstance(end.code, int):  # sys.exit("message") prints the message
                print(end.code, file=sys.stderr)
            raise ScriptFailed from None
        return None
    except CukitError:
        raise
    except Exception:
        traceback.print_exc()
        raise ScriptFailed from None


def show_trace(analyses: Sequence[KernelAnalysis]) -> None:
    """Prints the kernels of a trace, ordered by total time, and advice on the first."""
    numbers = ("calls", "total us", "share", "median us", "regs", "occupancy", "GB/s")
    result = table("kernel", *numbers, "limited by", right=numbers)
    altogether = sum(total_us(analysis) for analysis in analyses)
    for analysis in analyses:
        launch, times = analysis.launches[0], analysis.warm
        assert times is not None
        resources, resident = launch.resources, launch.occupancy
        assert resources is not None
        assert resident is not None
        work = analysis.throughput
        result.add_row(
            escape(analysis.name),
            str(times.samples),
            f"{total_us(analysis):.1f}",
            f"{total_us(analysis) / altogether:.1%}",
            f"{times.median_us:.2f}",
            str(resources.registers),
            f"{resident.fraction:.0%}",
            f"{work.gbps:.0f}" if work and work.gbps else "",
            resident.limiter,
        )
    console = stdout()
    console.print(result)
    for advice in analyses[0].advice:
        text = f"{analyses[0].name}: {advice.evidence}. {advice.suggestion} Gain: "
        console.print(text + advice.expected_gain, markup=False)
