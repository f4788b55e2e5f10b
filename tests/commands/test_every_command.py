"""Every command, interrupted, killed, with invalid files, and run twice concurrently in one
folder. Each must end in time, with a result or with a one-line error and exit code 2 or 130, and
leave no process behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from cukit.cli import app
from cukit.core.interrupts import INTERRUPTED
from tests.commands.tiny_run import TINY_RUN

ROOT = Path(__file__).parents[2]
H200 = ROOT / "profiling" / "results" / "h200.json"
KERNEL = ROOT / "kernels_cu" / "layers" / "rms_norm.cu"
PUBLIC = ROOT / "tests" / "emulator" / "public_style" / "reductions.cu"

LONG_RUN = (*TINY_RUN, "--teacher-steps", "1000000")

WORKING: Mapping[str, tuple[str, ...]] = {
    "doctor": ("doctor",),
    "list": ("list",),
    "compile": ("compile", "--arch", "sm_90a", "--op", "flash_attention"),
    "bench": ("bench", "--small", "--family", "attention"),
    "check": (
        "check",
        str(PUBLIC),
        "--entry",
        "count_even",
        "--arg",
        "int32:32",
        "--arg",
        "uint32:1",
        "--arg",
        "int32=32",
    ),
    "analyze": ("analyze", str(KERNEL), "--arch", "sm_90"),
    "compare": ("compare", str(H200), str(H200)),
    "report": ("report", "--arch", "sm_90a", "--op", "flash_attention", "-o", "page.html"),
    "replay": ("replay", "random-100000-4", "--pools", "cukit"),
    "distill": ("distill", "--text", str(ROOT / "docs"), "-o", "run", *LONG_RUN),
    "generate": ("generate", "{model}", "--tokens", "1000000", "--device", "cpu"),
}
"""A command line of each command; where possible, one that runs for several seconds."""

SLOW = pytest.mark.slow

MAX_EXIT_S = 2.0
"""Seconds allowed from Ctrl-C to exit: the target is one second, but the machine may be busy."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    launch(folder, ("distill", "--text", str(ROOT / "docs"), "-o", "run", *TINY_RUN)).communicate()
    return folder / "run" / "student.safetensors"


Start = Callable[[Path, tuple[str, ...]], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts commands, and kills those that are still running after the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(folder: Path, arguments: tuple[str, ...]) -> subprocess.Popen[str]:
        started.append(launch(folder, arguments))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def launch(folder: Path, arguments: tuple[str, ...]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cukit", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUKIT_CACHE_DIR": str(folder / "cache")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def has_imported_numpy(process: subprocess.Popen[str]) -> bool:
    """True once the process has loaded NumPy, about a quarter of a second after its start."""
    return "_multiarray_umath" in Path(f"/proc/{process.pid}/maps").read_text()


def handles_interrupts(process: subprocess.Popen[str]) -> bool:
    """True once a command has started the thread that handles Ctrl-C."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return has_imported_numpy(process) and "\nThreads:\t1\n" not in status


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def command_line(name: str, model: Path) -> tuple[str, ...]:
    return tuple(word.format(model=model) for word in WORKING[name])


def test_every_command_is_covered() -> None:
    assert set(WORKING) == {command.name for command in app.registered_commands}


def interrupt(process: subprocess.Popen[str]) -> None:
    """Send Ctrl-C; the command must end quickly with a one-line message, or have completed."""
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    took = time.monotonic() - began
    assert "Traceback" not in errors
    assert took < MAX_EXIT_S
    if process.returncode == INTERRUPTED:
        lines = [
            line for line in errors.splitlines() if "interrupted" in line or "continue with" in line
        ]
        assert len(lines) == 1, errors
    else:  # completed, or killed while Python cleans up
        assert process.returncode in (0, -signal.SIGINT), errors


@pytest.mark.parametrize("name", WORKING)
def test_ctrl_c_while_importing_ends_the_command(
    name: str, model: Path, tmp_path: Path, start: Start
) -> None:
    process = start(tmp_path, command_line(name, model))
    wait_until(lambda: has_imported_numpy(process))
    interrupt(process)
    assert process.returncode == INTERRUPTED


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        *itertools.product(("compile", "replay", "distill"), (0.5,)),
        *(
            pytest.param(*case, marks=SLOW)
            for case in itertools.product(WORKING, (0.0, 0.3, 1.0, 3.0))
        ),
    ],
)
def test_ctrl_c_while_working_ends_the_command_and_its_workers(
    name: str, seconds: float, model: Path, tmp_path: Path, start: Start
) -> None:
    process = start(tmp_path, command_line(name, model))
    wait_until(lambda: process.poll() is not None or handles_interrupts(process))
    time.sleep(seconds)
    children = descendants(process.pid) if process.poll() is None else []
    interrupt(process)
    wait_until(lambda: not any(map(alive, children)))


@pytest.mark.parametrize("name", ["compile", "replay", pytest.param("report", marks=SLOW)])
def test_workers_exit_when_their_parent_is_killed(
    name: str, model: Path, tmp_path: Path, start: Start
) -> None:
    process = start(tmp_path, command_line(name, model))
    wait_until(lambda: len(descendants(process.pid)) > 0)
    time.sleep(1.0)  # let the workers start
    children = descendants(process.pid)
    assert children
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(alive, children)))


GARBAGE: Mapping[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)) * 20,
    "zeros": bytes(5000),
    "object": b"{}",
    "list": b"[[]]",
    "null": b"null",
    "records": b'{"environment": {}, "records": [3, {"op": "x"}]}',
    "kernels": b'{"kernels": [{}], "errors": []}',
    "numbers": b'{"environment": {}, "records": [{"median_us": 1e999, "op": Infinity}]}',
    "digits": b'{"records": ' + b"9" * 6000 + b"}",
    "nested": b"[" * 100_000,
    "truncated": b'{"environment": {"gpu": "NVIDIA H2',
    "distilled": b'{"models": {}, "milliseconds_per_step_by_op": 3, "verdict": 1, "settings": [],'
    b' "corpus": null}',
    "memory": b'{"segments": [{}], "device_traces": [[{"action": 3}]]}',
    "safetensors": (10**18).to_bytes(8, "little") + b"{}",
    "log": b"Thread,Time,Action,Pointer,Size,Stream\n1,00:00:00.000000,allocate,0x0,-5,0\n",
    "utf16": "plain text".encode("utf-16"),
}


def invalid_paths(folder: Path) -> Iterator[Path]:
    """Paths of files with invalid contents, and of a pipe, folders, devices and missing files."""
    for name, content in GARBAGE.items():
        path = folder / name
        path.write_bytes(content)
        yield path
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    yield from (folder / name for name in ("pipe", "folder", "loop", "absent", "x" * 300))
    yield from (Path("/dev/zero"), Path("/proc/self/mem"))


READERS: Mapping[str, Callable[[str], tuple[str, ...]]] = {
    "compare": lambda path: ("compare", path, path),
    "report": lambda path: ("report", path, "-q", "-o", "page.html"),
    "generate": lambda path: ("generate", path, "--device", "cpu", "--tokens", "3"),
    "replay": lambda path: ("replay", path, "--pools", "cukit"),
    "analyze": lambda path: ("analyze", path, "--arch", "sm_90"),
    "resume": lambda path: ("distill", "--resume", "-o", path),
    "text": lambda path: ("distill", "-o", "run", "--text", path, *TINY_RUN, "--seq-len", "10000"),
    "bench": lambda path: ("bench", "--list", "--only", path),
}
NUMBERS = ("nan", "inf", "-1", "0", "1e308", "9" * 40, "9" * 5000, "0x10", "1_0", "٣", "", " ")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "compile": ("--jobs", "--arch", "--op"),
    "compare": ("--tolerance",),
    "replay": ("--limit", "--seed", "--pools"),
    "distill": (
        "--temperature", "--alpha", "--lr", "--steps", "--batch", "--seq-len", "--seed",
        "--teacher-hidden", "--teacher-layers", "--head-dim", "--workers", "--device", "--dtype",
    ),
    "generate": ("--temperature", "--tokens", "--top-k", "--seed", "--device", "--prompt"),
    "check": (
        "--entry", "--grid", "--block", "--arg", "--shared", "--constant", "--include", "--define",
        "--option", "--arch", "--seed",
    ),
    "analyze": ("--grid", "--block", "--shared", "--repeat", "--arch", "--entry"),
    "bench": ("--family", "--only"),
    "list": ("--family",),
}  # fmt: skip
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "compile": ("--op", "gelu", "--arch", "sm_90a", "--jobs", "1"),
    "compare": (str(H200), str(H200)),
    "replay": ("random-10-1",),
    "distill": ("--text", "{short}", "-o", "run", *TINY_RUN),
    "generate": ("{model}", "--device", "cpu", "--tokens", "3"),
    "check": WORKING["check"][1:],
    "analyze": (str(KERNEL), "--arch", "sm_90"),
    "bench": ("--list",),
    "list": (),
}
"""Arguments before the options of OPTIONS. The text of `distill` is too short to train on, so only
options that are checked before the text give their own error."""

MANY_CALLS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from cukit.cli import run
for arguments in json.load(sys.stdin):
    errors = io.StringIO()
    with redirect_stderr(errors), redirect_stdout(io.StringIO()):
        try:
            code = run(arguments)
        except BaseException as error:
            code, text = -1, repr(error)
    print(json.dumps([code, errors.getvalue() if code >= 0 else text]), flush=True)
"""


def run_all(folder: Path, calls: list[tuple[str, ...]]) -> None:
    """Run many command lines in one process."""
    process = subprocess.run(
        [sys.executable, "-c", MANY_CALLS],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUKIT_CACHE_DIR": str(folder / "cache")},
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=250,
    )
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(results) == len(calls), f"{calls[len(results)]} ended the process: {process.stderr}"
    wrong = [
        f"{' '.join(call)[:200]}: {code} {errors[-300:]}"
        for call, (code, errors) in zip(calls, results, strict=True)
        if code not in (0, 1, 2)
        or "Traceback" in errors
        or (code == 2 and (errors.count("\n") != 1 or len(errors) > 1500))
        or (code == 2 and not errors.startswith("cukit: "))
    ]
    assert not wrong, f"{len(wrong)} of {len(calls)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "reader",
    [name if name in ("report", "replay") else pytest.param(name, marks=SLOW) for name in READERS],
)
def test_invalid_files_give_a_one_line_error(reader: str, tmp_path: Path) -> None:
    run_all(tmp_path, [READERS[reader](str(path)) for path in invalid_paths(tmp_path)])


@pytest.mark.parametrize(
    "name",
    [name if name in ("generate", "list") else pytest.param(name, marks=SLOW) for name in OPTIONS],
)
def test_unusual_values_give_a_result_or_a_one_line_error(
    name: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("short")
    before = [
        word.format(model=model, short=tmp_path / "short.txt") for word in (name, *ARGUMENTS[name])
    ]
    run_all(
        tmp_path,
        [(*before, option, value) for option in OPTIONS[name] for value in (*NUMBERS, "zzz")],
    )


@SLOW
@pytest.mark.parametrize("name", WORKING)
def test_two_processes_in_one_folder(name: str, model: Path, tmp_path: Path, start: Start) -> None:
    words = command_line(name, model)
    quick = {
        "distill": ("distill", "--text", str(ROOT / "docs"), "-o", "run", *TINY_RUN),
        "generate": ("generate", str(model), "--tokens", "50", "--device", "cpu"),
        "replay": ("replay", "random-100-1", "--pools", "cukit", "--write", "log.csv"),
        "compile": ("compile", "--arch", "sm_90a", "--op", "gelu"),
        "bench": ("bench", "--small", "--only", "gelu", "--out", "results.json"),
        "report": ("report", "--arch", "sm_90a", "--op", "gelu", "-o", "page.html"),
    }
    both = [start(tmp_path, quick.get(name, words)) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert "Traceback" not in errors
        assert process.returncode == 0 or (
            process.returncode == 2 and "another run is writing there" in errors
        ), errors
    assert any(process.returncode == 0 for process in both)
