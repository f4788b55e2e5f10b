"""Times steps of a Llama-style student distilled in torch, with cukit's and torch's modules.

    python -m profiling.torch_student                    # 110 M parameters, 65536 tokens
    python -m profiling.torch_student --only torch cukit # some implementations
    python -m profiling.torch_student --tiny             # a smoke test on the CPU

All implementations have the same student, data, optimizer (AdamW, fused) and loss: the forward KL
divergence from a teacher's head on fixed random hidden states. Each has its own process, so that
they compile at the same time and a failure affects only one. Steps are timed in interleaved rounds,
one process at a time, after the last implementation is ready; an implementation that is ready
earlier is also timed while the others compile, but these times are not part of the result.

A step with few tokens (`--batch 8 --seq 1024`) is host-bound. Replacing RoPE alone is not measured,
because inductor fuses torch's RoPE with adjacent ops.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass(frozen=True)
class Implementation:
    """How a student computes a step.

    loss: a function of profiling/student_step.py. swaps: kinds of `ckt.optimize`, empty for
    torch's modules. compiled: whether layers are compiled, one by one, which avoids an attention
    mask. gated_gradient: whether the gradient of the gated layers may be one kernel.
    """

    title: str
    loss: str
    swaps: tuple[str, ...] = ()
    compiled: bool = True
    gated_gradient: bool = True


_SEPARATE = ("attention", "norm", "mlp", "residual")
_ALL = ("projection", *_SEPARATE)

IMPLEMENTATIONS = {
    "torch": Implementation("SDPA, Liger KL (without Liger: logits)", "liger_kl"),
    "cukit": Implementation("all modules", "cukit_loss", _ALL),
    "cukit-separate-rope": Implementation(
        "q, k, v and rope by torch", "cukit_loss", _SEPARATE
    ),
    "cukit-separate-gradient": Implementation(
        "two kernels for the MLP's gradient", "cukit_loss", _ALL, gated_gradient=False
    ),
    "cukit-attention": Implementation("attention only", "cukit_loss", ("attention",)),
    "cukit-eager": Implementation("all modules, eager", "cukit_loss", _ALL, compiled=False),
    "torch-logits": Implementation("SDPA, logits in memory", "torch_loss"),
    "torch-jsd": Implementation("SDPA, Liger JSD", "liger_jsd"),
}  # fmt: skip
"""The most important first."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a student and of its batches."""

    batch: int
    seq: int
    steps: int
    hidden: int = 768
    intermediate: int = 2048
    layers: int = 12
    heads: int = 12
    vocab: int = 32000
    device: str = "cuda"


@dataclass(frozen=True)
class Round:
    """Mean seconds per step, peak bytes above those before the steps, the losses of all steps."""

    seconds: float
    peak: int
    losses: tuple[float, ...]


@dataclass
class Run:
    """The process of an implementation, and its results so far."""

    name: str
    connection: Connection
    locks: tuple[Any, ...]  # must exist until the process, while it starts, opens them by name
    rounds: list[Round] = field(default_factory=list)

    def time_round(self) -> Round | None:
        """Time one round; if the process has failed, print its error and return None."""
        try:
            self.connection.send("round")
            found: Any = self.connection.recv()
        except (EOFError, OSError):
            found = "its process ended"
        if isinstance(found, str):
            say(f"{self.name}: failed: {found}")
            return None
        measured: Round = found
        return measured

    @property
    def median(self) -> float:
        """Median of the rounds' seconds per step."""
        return statistics.median(each.seconds for each in self.rounds)


def serve(
    name: str, sizes: Sizes, connection: Connection, locks: tuple[Any, ...], threads: int
) -> None:
    """Run an implementation in its process. Sends "ready", then a Round for each "round" message;
    after an exception, its text."""
    may_compile, kernels = locks
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    os.environ.setdefault("CUKIT_QUIET", "1")
    try:
        with may_compile:
            from profiling.student_step import Student

            student = Student(IMPLEMENTATIONS[name], sizes, kernels)
            student.warm_up()
        connection.send("ready")
        while connection.recv() == "round":
            connection.send(student.time_round())
    except EOFError:  # the parent has ended
        return
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        connection.send(f"{type(error).__name__}: {words}")


def start(names: list[str], sizes: Sizes, jobs: int) -> list[Run]:
    """Start a process per implementation; at most `jobs` of them compile at a time."""
    context = multiprocessing.get_context("spawn")
    locks = context.Semaphore(jobs), context.Lock()
    threads = max(1, min(16, os.cpu_count() or 1) // min(jobs, len(names)))
    runs = []
    for name in names:
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(name, sizes, theirs, locks, threads)).start()
        theirs.close()
        runs.append(Run(name, ours, locks))
    return runs


def wait_until_ready(runs: list[Run]) -> list[Run]:
    """Wait until every process is ready or has failed; return the ready runs in their order."""
    start = time.perf_counter()
    pending = {run.connection: run for run in runs}
    ready: list[Run] = []
    while pending:
        for connection in wait(list(pending)):
            run = pending.pop(connection)  # type: ignore[call-overload]
            try:
                found = run.connection.recv()
            except (EOFError, OSError):
                found = "its process ended"
            after = f"after {time.perf_counter() - start:.1f} s"
            if found == "ready":
                say(f"{run.name}: ready {after}")
                ready.append(run)
            else:
                say(f"{run.name}: failed {after}: {found}")
        if pending:
            ready = time_early(ready)
    return [run for run in runs if run in ready]


def time_early(runs: list[Run]) -> list[Run]:
    """Time and print a round of each run while others compile; return the runs that succeeded."""
    rounds = [(run, run.time_round()) for run in runs]
    times = [f"{run.name} {1e3 * each.seconds:.1f} ms" for run, each in rounds if each]
    if times:
        say(f"while others compile: {', '.join(times)}")
    return [run for run, each in rounds if each]


def best_of_torch(runs: list[Run]) -> float | None:
    """The least median of torch's implementations."""
    return min((run.median for run in runs if run.name.startswith("torch")), default=None)


def time_rounds(runs: list[Run], rounds: int) -> list[Run]:
    """Time all runs in turn, print the medians so far, and return the runs that succeeded."""
    for number in range(1, rounds + 1):
        for run in list(runs):
            found = run.time_round()
            if found is None:
                runs = [each for each in runs if each is not run]
                continue
            run.rounds.append(found)
            done = [each for each in runs if each.rounds]
            best = best_of_torch(done)
            of_best = f", {run.median / best:.3f} of torch's best" if best else ""
            say(
                f"round {number}: {run.name} {1e3 * found.seconds:.2f} ms "
                f"(median {1e3 * run.median:.2f}{of_best})"
            )
    return runs


def summary(runs: list[Run], tokens: int) -> str:
    """Format the results as a line per implementation."""
    best = best_of_torch(runs)
    common = min(len(run.rounds[-1].losses) for run in runs)
    lines = []
    for run in runs:
        times = [1e3 * each.seconds for each in run.rounds]
        of_best = f"{run.median / best:.3f} of torch's best, " if best else ""
        losses = run.rounds[-1].losses[:common]
        lines.append(
            f"{run.name:24} {1e3 * run.median:8.2f} ms ({of_best}{min(times):.2f}.."
            f"{max(times):.2f}), {tokens / run.median / 1e3:.0f} k tokens/s, peak "
            f"{max(each.peak for each in run.rounds) / 2**30:.2f} GiB, "
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, {IMPLEMENTATIONS[run.name].title}"
        )
    return "\n".join(lines)


def say(line: str) -> None:
    """Print a line and flush it, for output into a pipe."""
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> list[Run]:
    """Time the selected implementations and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a smoke test on the CPU")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="timed steps per round")
    parser.add_argument(
        "--only", nargs="+", choices=IMPLEMENTATIONS, metavar="NAME",
        help=f"implementations to time, of {', '.join(IMPLEMENTATIONS)}",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=4, help="implementations that compile at a time"
    )
    options = parser.parse_args(arguments)
    sizes = Sizes(options.batch, options.seq, options.steps)
    if options.tiny:
        sizes = Sizes(2, 16, options.steps, 64, 128, 2, 4, 97, "cpu")
    started = start(list(options.only or IMPLEMENTATIONS), sizes, options.jobs)
    try:
        runs = time_rounds(wait_until_ready(started), options.rounds)
        if runs:
            say(summary(runs, sizes.batch * sizes.seq))
    finally:
        for run in started:
            run.connection.close()  # ends its process
    return runs


if __name__ == "__main__":
    main()
