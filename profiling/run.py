"""Runs benchmark cases and merges the measurements into a results file.

    python -m profiling.run                                  # every case
    python -m profiling.run --family layers --only rms_norm  # one op
    python -m profiling.run --missing --out results.json     # cases without a result in that file
    python -m profiling.run --small                          # tiny sizes, with or without a GPU
    python -m profiling.run --list

Requires only NumPy and, except with --small, CuPy and a GPU; missing peers are skipped with a
reason. Every implementation is checked against the case's reference before and after timing. Exit
code: 0; 1 if cukit's implementation of a case failed or was wrong; 2 for invalid arguments.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import pkgutil
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path

import profiling.cases
from cukit.analyzer.benchmark import KernelBenchmark, Sampling
from cukit.analyzer.results import OURS, Record, ResultsFile, case_key, read
from cukit.analyzer.timing import GpuTimer, HostTimer
from cukit.errors import ConfigError, CukitError
from profiling.case import Call, Case, PeerMissing, Workload
from profiling.data import array_module
from profiling.environment import describe

# Pause before the samples of each implementation. Tensor cores reach the power limit of the GPU and
# need the longer pause.
HOT_PAUSE_S = 0.15
COOL_PAUSE_S = 0.05

QUICK = Sampling(rounds=1, budget_ms=1.0, min_samples=2, pause_s=0.0)
"""Enough to check that cases run, too little to measure them."""

RESULTS = Path(__file__).parent / "results"


def families() -> list[str]:
    """Names of all modules of `profiling.cases`."""
    return sorted(module.name for module in pkgutil.iter_modules(profiling.cases.__path__))


def load_cases(
    family: str | None = None, ops: Sequence[str] = (), *, small: bool = False
) -> list[Case]:
    """Return the cases of one family or of all, restricted to `ops` if given."""
    found: list[Case] = []
    for name in families() if family is None else [family]:
        found += importlib.import_module(f"profiling.cases.{name}").cases(small=small)
    return [case for case in found if not ops or case.op in ops]


class Runner:
    """Runs one case at a time on this machine.

    peers: whether to time peers, or which: names of libraries ("torch") or of implementations
    ("torch-compile"). quick: only check that the cases run.
    """

    def __init__(self, *, peers: bool | Collection[str] = True, quick: bool = False) -> None:
        self.on_gpu = array_module().__name__ == "cupy"
        self._benchmark = KernelBenchmark(
            warmup_iters=0,
            sampling=QUICK if quick else Sampling(),
            environment=describe(GpuTimer() if self.on_gpu else HostTimer()),
        )
        self._peers = peers
        self.environment = self._benchmark.environment
        self.failures: list[str] = []
        self._skipped: set[tuple[str, str]] = set()

    def run(self, case: Case) -> list[Record]:
        """Build, check and time a case. Failures are added to `failures`, not raised."""
        try:
            return self._run(case)
        except Exception:
            traceback.print_exc()
            self._fail(case, "could not be built")
            return []
        finally:
            self._release()

    def _run(self, case: Case) -> list[Record]:
        workload = case.build()
        records = self._benchmark.compare(
            case.key(),
            self._impls(case, workload),
            workload.expected,
            flops=case.flops,
            bytes=case.bytes,
            tolerance=workload.tolerance,
            measure_memory=case.measure_memory,
            clock=case.clock,
            pause_s=HOT_PAUSE_S if case.flops else COOL_PAUSE_S,
            on_failure=lambda name, error: self._broken(case, name, error),
            views=workload.views,
        )
        for record in records:
            if record["impl"] == OURS and not record["correct"]:
                self._fail(case, f"wrong by {record['error']}, allowed {workload.tolerance:.0e}")
        return records

    def _impls(self, case: Case, workload: Workload) -> dict[str, Call]:
        """Build every implementation that can run on this machine; report the others."""
        impls: dict[str, Call] = {}
        for name, factory in workload.impls.items():
            if name != OURS and not self._wanted(name):
                continue
            try:
                impls[name] = factory()
            except PeerMissing as reason:
                self._skip(name, str(reason))
            except Exception as error:
                self._broken(case, name, error)
        return impls

    def _wanted(self, impl: str) -> bool:
        """True if `impl` or its library is selected: "torch" selects "torch-compile"."""
        if isinstance(self._peers, bool):
            return self._peers
        return impl in self._peers or impl.partition("-")[0] in self._peers

    def _skip(self, name: str, reason: str) -> None:
        """Print the reason for skipping an implementation, once per reason."""
        if (name, reason) not in self._skipped:
            self._skipped.add((name, reason))
            print(f"    {name}: skipped, {reason}", flush=True)

    def _broken(self, case: Case, name: str, error: Exception) -> None:
        """Report an exception: a failure for cukit, a line in the log for a peer."""
        if name == OURS:
            traceback.print_exception(error)
            self._fail(case, f"raised {type(error).__name__}")
        else:
            reason = str(error).strip().partition("\n")[0][:200]
            print(f"    {name}: failed, {type(error).__name__}: {reason}", flush=True)

    def _fail(self, case: Case, what: str) -> None:
        line = f"{case.family}/{case.op} {case.name} {case.dtype}: {what}"
        self.failures.append(line)
        print(f"    FAILED {line}", flush=True)

    def _release(self) -> None:
        """Free the memory of a case before the next one is built."""
        gc.collect()
        if not self.on_gpu:
            return
        array_module().get_default_memory_pool().free_all_blocks()
        if (torch := sys.modules.get("torch")) is not None:
            torch.cuda.empty_cache()


def show(record: Record) -> str:
    """Format a record as one line of the log."""
    rate = f"{record['tflops']:7.1f} TFLOP/s" if record["tflops"] else ""
    if not rate and record["gbps"]:
        rate = f"{record['gbps']:7.1f} GB/s"
    floor = record["floor_us"]
    share = f"{100 * floor / record['median_us']:4.0f}% of floor" if floor else ""
    peak = record.get("peak_bytes")
    memory = f"{peak / 2**20:9.1f} MiB" if peak is not None else ""
    verdict = "" if record["correct"] else f"  WRONG: error {record['error']}"
    line = (
        f"    {record['impl']:<16}{record['median_us']:>11.2f} us  ±{record['iqr_us']:<8.2f}"
        f"{rate:<18}{share:<15}{memory}{verdict}"
    )
    return line.rstrip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m profiling.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--family", choices=families(), help="run only the cases of this family")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="OP",
        help="run only this op; may be repeated",
    )
    parser.add_argument("--out", type=Path, help="results file to merge into (default: none)")
    parser.add_argument(
        "--missing", action="store_true", help="run only cases without a result in --out"
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, few samples")
    parser.add_argument(
        "--peers", metavar="NAMES", help="run only these peers, comma-separated: torch,liger"
    )
    parser.add_argument("--no-peers", action="store_true", help="time only cukit")
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a CukitError is printed as one line."""
    try:
        return bench(arguments)
    except CukitError as error:
        print(error, file=sys.stderr)
        return 2


def bench(arguments: Sequence[str] | None = None) -> int:
    """Run the cases selected by `arguments` and return the exit code.

    Raises:
        CukitError: invalid arguments.
    """
    options = _parser().parse_args(arguments)
    cases = load_cases(options.family, options.only, small=options.small)
    if not cases:
        named = ", ".join(name[:60] for name in options.only)
        raise ConfigError(f"no case of {named}; --list prints all cases")
    if options.missing:
        cases = _without_result(cases, options.out)
    if options.list:
        for case in cases:
            print(f"{case.family:<12}{case.op:<28}{case.name:<32}{case.dtype}")
        return 0
    if array_module().__name__ != "cupy" and not options.small:
        raise ConfigError("no GPU found: run `cukit doctor` for the reason; --small needs no GPU")
    peers = options.peers.split(",") if options.peers else True
    runner = Runner(peers=False if options.no_peers else peers, quick=options.small)
    # Cases of a family may come from several modules.
    known = () if options.only else load_cases(small=options.small)
    return run_cases(cases, runner, out=options.out, known=known)


def _without_result(cases: Sequence[Case], out: Path | None) -> list[Case]:
    """Return the cases without a record of cukit in a results file."""
    if out is None:
        raise ConfigError("--missing needs --out, the results file that is completed")
    measured = {case_key(record) for record in read(out)["records"] if record["impl"] == OURS}
    return [case for case in cases if case.key() not in measured]


def run_cases(
    cases: list[Case], runner: Runner, *, out: Path | None = None, known: Sequence[Case] = ()
) -> int:
    """Run `cases`, print their records, and write each to `out` as it completes.

    known: all existing cases. Records in `out` of other cases, in the families just run, are
    deleted. By default nothing is deleted.
    """
    begin = time.monotonic()
    results = ResultsFile(out, runner.environment) if out else None
    print(runner.environment, flush=True)
    for case in cases:
        print(f"{case.family}/{case.op} {case.name} {case.dtype}", flush=True)
        started = time.monotonic()
        records = runner.run(case)
        for record in records:
            print(show(record), flush=True)
        print(f"    ({time.monotonic() - started:.1f} s)", flush=True)
        if results:
            results.replace(case.key(), records)
    if results and known:
        for family in {case.family for case in cases}:
            results.keep_only(family, [case.key() for case in known])
    seconds = time.monotonic() - begin
    print(f"{len(cases)} cases in {seconds:.0f} s, {len(runner.failures)} failed")
    for failure in runner.failures:
        print(f"    {failure}")
    return 1 if runner.failures else 0


if __name__ == "__main__":
    sys.exit(main())
