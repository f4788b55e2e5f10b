"""Hardware counters from Nsight Compute: run as a subprocess, or imported from its files.

Reading counters needs a permission that many rented machines do not grant. Without the permission,
:func:`run_ncu` raises an error with ncu's own message.
"""

from __future__ import annotations

import csv
import io
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cukit.analyzer.schema import Counters
from cukit.errors import CukitError, DataError, MissingDependencyError

_INSTALLED = Path("/opt/nvidia")
_STALL = "smsp__average_warps_issue_stalled_"
_STALL_END = "_per_issue_active.ratio"

_PER_REQUEST = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_{}.ratio"
_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_{}.sum"
"""`ncu --set full` does not report the average; it is computed as sectors / requests."""

METRICS = {
    "achieved_occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l1_hit_fraction": "l1tex__t_sector_hit_rate.pct",
    "l2_hit_fraction": "lts__t_sector_hit_rate.pct",
    "load_sectors_per_request": _PER_REQUEST.format("ld"),
    "store_sectors_per_request": _PER_REQUEST.format("st"),
    "duration_us": "gpu__time_duration.sum",
}
STALL_METRICS = f"regex:{_STALL}.*{_STALL_END.replace('.', '[.]')}"

# Factors from ncu's units to bytes, microseconds and fractions.
_UNITS = {
    "%": 0.01,
    "byte": 1.0,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "ns": 1e-3,
    "nsecond": 1e-3,
    "us": 1.0,
    "usecond": 1.0,
    "ms": 1e3,
    "msecond": 1e3,
    "s": 1e6,
    "second": 1e6,
}

Rows = Iterator[tuple[str, dict[str, float]]]


def run_ncu(command: Sequence[str], timeout_s: float = 600.0) -> dict[str, Counters]:
    """Runs `command` under ncu and returns the counters of its kernels by mangled name.

    The clocks are not changed. Raises MissingDependencyError without ncu, and CukitError with ncu's
    own message if it may not read counters.
    """
    averages = {_PER_REQUEST.format(operation) for operation in ("ld", "st")}
    sums = [name.format(op) for name in (_SECTORS, _REQUESTS) for op in ("ld", "st")]
    metrics = [name for name in METRICS.values() if name not in averages]
    return parse_csv(_run(command, (*metrics, *sums, STALL_METRICS), timeout_s), "ncu")


def ncu_durations(command: Sequence[str], timeout_s: float = 600.0) -> list[tuple[str, float]]:
    """(mangled name, microseconds) of every kernel of `command`, in order of launch.

    The caches are not flushed. Raises the same errors as :func:`run_ncu`.
    """
    metric = METRICS["duration_us"]
    output = _run(command, (metric,), timeout_s, "--cache-control", "none")
    return [(name, found[metric]) for name, found in _launches(output, "ncu") if metric in found]


def _run(command: Sequence[str], metrics: Sequence[str], timeout_s: float, *options: str) -> str:
    """ncu's output: CSV of the raw page, in base units."""
    ncu = [_find_ncu(), "--clock-control", "none", "--target-processes", "all", *options]
    # Mangled names, as in CUPTI's records, so that the two can be joined.
    names = ["--print-kernel-base", "mangled"]
    csv_out = ["--csv", "--page", "raw", "--print-units", "base", *names]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"  # separate from the command's own output
        wanted = ["--metrics", ",".join(metrics), "--log-file", str(log)]
        try:
            process = subprocess.run(
                [*ncu, *csv_out, *wanted, *command],
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise CukitError(f"ncu could not be run: {error}") from None
        output = log.read_text() if log.is_file() else ""
    problems = [line for line in output.splitlines() if line.startswith("==ERROR==")]
    if problems or process.returncode != 0:
        last = (process.stderr or process.stdout or output).strip()[-300:]
        reason = problems[0].removeprefix("==ERROR== ") if problems else last
        raise CukitError(f"ncu: {reason or f'exit code {process.returncode}'}")
    return output


def read_counters(path: Path) -> dict[str, Counters]:
    """Counters from a file written by ncu: `.ncu-rep` (which needs ncu to read), or its CSV output.

    Kernels of the same name are averaged. Raises DataError for a file that is neither.
    """
    if path.suffix == ".ncu-rep":
        command = [_find_ncu(), "--import", str(path), "--csv", "--page", "raw"]
        process = subprocess.run(
            [*command, "--print-units", "base"], capture_output=True, text=True, timeout=300
        )
        if process.returncode != 0:
            raise DataError(f"{path}: {(process.stdout + process.stderr).strip()[-300:]}")
        return parse_csv(process.stdout, path.name)
    return parse_csv(path.read_text(), path.name)


def parse_csv(text: str, source: str) -> dict[str, Counters]:
    """Parses ncu's CSV of the raw page (one column per metric) or the details page (one row each).

    Lines before the header are output of the program and remarks of ncu.
    """
    samples: dict[str, list[dict[str, float]]] = {}
    for name, metrics in _launches(text, source):
        samples.setdefault(name, []).append(metrics)
    return {name: _counters(_mean(found), source) for name, found in samples.items()}


def _launches(text: str, source: str) -> Rows:
    """The kernel name and metrics of every launch, in order."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise DataError(f"{source}: it contains no table of Nsight Compute")
    table = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    return _details(table) if table and "Metric Name" in table[0] else _raw(table)


def _find_ncu() -> str:
    installed = (_INSTALLED / "nsight-compute").glob("*/ncu")
    newest = max(installed, key=lambda path: _version(path.parent.name), default=None)
    found = shutil.which("ncu") or newest
    if found is None:
        raise MissingDependencyError(
            "hardware counters need Nsight Compute (ncu), which was not found; it comes with the "
            "CUDA toolkit"
        )
    return str(found)


def _version(name: str) -> list[int]:
    return [int(part) for part in re.findall("[0-9]+", name)]


def _raw(table: Sequence[Mapping[str, str]]) -> Rows:
    """The first row holds the units; each other row is a launch."""
    if not table:
        return
    units, *launches = table
    for row in launches:
        values = {
            metric: number
            for metric, text in row.items()
            if metric and "__" in metric and (number := _number(text, units[metric])) is not None
        }
        yield row["Kernel Name"], values


def _details(table: Sequence[Mapping[str, str]]) -> Rows:
    """Each row is one metric of a launch; the rows of a launch share their ID."""
    launches: dict[tuple[str, str], dict[str, float]] = {}
    for row in table:
        values = launches.setdefault((row["ID"], row["Kernel Name"]), {})
        number = _number(row["Metric Value"], row["Metric Unit"])
        if number is not None:
            values[row["Metric Name"]] = number
    for (_, name), values in launches.items():
        yield name, values


def _number(text: str | None, unit: str | None) -> float | None:
    try:
        value = float((text or "").replace(",", "")) * _UNITS.get((unit or "").strip(), 1.0)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _mean(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in samples for name in sample)
    found = {name: [s[name] for s in samples if name in s] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}


def _counters(metrics: Mapping[str, float], source: str) -> Counters:
    stalls = {
        name.removeprefix(_STALL).removesuffix(_STALL_END): value
        for name, value in metrics.items()
        if name.startswith(_STALL) and name.endswith(_STALL_END)
    }
    fields = {field: metrics.get(metric) for field, metric in METRICS.items()}
    for operation, field in (("ld", "load"), ("st", "store")):
        sectors = metrics.get(_SECTORS.format(operation))
        requests = metrics.get(_REQUESTS.format(operation))
        if sectors is not None and requests:
            fields[f"{field}_sectors_per_request"] = sectors / requests
    return Counters(source=source, stall_reasons=stalls, raw=dict(metrics), **fields)
