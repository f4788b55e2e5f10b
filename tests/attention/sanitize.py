"""Runs every attention kernel under compute-sanitizer, on small shapes.

    python -m tests.attention.sanitize                       # all groups, all tools
    python -m tests.attention.sanitize --tool racecheck --group "backward sm90 d128"

A process for each group of kernels and each tool, a line for each with what the tool counted.
Arrays come from the driver one by one, not from a pool, so that memcheck knows their ends.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cukit.array_api import NarrowArray, float8_e4m3
from cukit.attention import block_sparse_attention, flash_attention
from tests.attention.conftest import choose_class
from tests.attention.options import OPTIONS, options_of, run
from tests.contract import random, to_device, to_host

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
LENGTHS = [(130, 200), (200, 130)]
SEQUENCES = ([70, 0, 13, 130], [70, 9, 0, 200])

Group = Callable[[], None]


def _rng() -> np.random.Generator:
    return np.random.default_rng(3)


def _attend(asked: dict[str, Any], head_dim: int, value_dim: int, lengths=(130, 200)) -> None:
    """Forward, backward, deterministic backward."""
    rng = _rng()
    q = random(rng, (1, lengths[0], 2, head_dim), "bfloat16")
    k = random(rng, (1, lengths[1], 1, head_dim), "bfloat16")
    v = random(rng, (1, lengths[1], 1, value_dim), "bfloat16")
    grad_out = random(rng, (1, lengths[0], 2, value_dim), "bfloat16")
    options = options_of(rng, asked, 1, 2, lengths, "bfloat16")
    out, _, gradients = run("gpu", q, k, v, grad_out, options)
    for array in (out, *(x for way in gradients for x in way.values())):
        assert np.isfinite(array.astype(np.float32)).all()


def plain(head_dim: int, value_dim: int | None = None) -> None:
    """With and without a causal mask, more queries and more keys."""
    for lengths in LENGTHS:
        for causal in (False, True):
            _attend({"causal": causal}, head_dim, value_dim or head_dim, lengths)


def with_options(head_dim: int, names: tuple[str, ...]) -> None:
    for name in names:
        _attend(OPTIONS[name], head_dim, head_dim)


def sequences(head_dim: int) -> None:
    """Of different lengths, none among them."""
    rng = _rng()
    ends = [np.cumsum([0, *each]).astype(np.int32) for each in SEQUENCES]
    q, grad_out = (random(rng, (int(ends[0][-1]), 2, head_dim), "bfloat16") for _ in range(2))
    k, v = (random(rng, (int(ends[1][-1]), 1, head_dim), "bfloat16") for _ in range(2))
    options = {
        "cu_seqlens_q": ends[0],
        "cu_seqlens_kv": ends[1],
        "max_seqlen_q": 130,
        "max_seqlen_kv": 200,
    }
    for causal in (False, True):
        run("gpu", q, k, v, grad_out, {"causal": causal, **options})


def whole_blocks(head_dim: int) -> None:
    rng = _rng()
    q = random(rng, (1, 200, 2, head_dim), "bfloat16")
    k = random(rng, (1, 300, 1, head_dim), "bfloat16")
    for size in (128, 64, 50):
        mask = rng.random((2, -(-200 // size), -(-300 // size))) < 0.6
        for options in ({}, {"causal": True}, {"window_size": (90, 20), "softcap": 3.0}):
            placed = to_device("gpu", q, k, k, mask)
            to_host(block_sparse_attention(*placed, block_size=size, **options))


def float8(head_dim: int) -> None:
    """Values prepared by every block for itself, and by a kernel before."""
    rng = _rng()
    for length in (130, 1200):
        arrays = [
            rng.standard_normal((1, n, heads, head_dim)).astype(ml_dtypes.float8_e4m3fn)
            for n, heads in ((length, 1), (300, 1), (300, 1))
        ]
        for causal, precise in itertools.product((False, True), (False, True)):
            placed = to_device("gpu", *(x.view(np.uint8) for x in arrays))
            narrow = (NarrowArray(x, float8_e4m3, x.shape) for x in placed)
            out = flash_attention(*narrow, causal=causal, q_descale=0.5, precise=precise)
            assert np.isfinite(to_host(out).astype(np.float32)).all()


_NAMES = tuple(OPTIONS)
GROUPS: dict[str, Group] = {}
for _class, _halves in (("sm90", 4), ("sm80", 2)):
    for _width in (64, 80, 96, 128, 192, 256):
        GROUPS[f"{_class} d{_width}"] = partial(plain, _width)
    GROUPS[f"{_class} d192/128"] = partial(plain, 192, 128)
    for _width in (64, 128, 256):
        for _part in range(_halves):
            GROUPS[f"{_class} d{_width} options {_part}"] = partial(
                with_options, _width, _NAMES[_part::_halves]
            )
        GROUPS[f"{_class} d{_width} sequences"] = partial(sequences, _width)
        GROUPS[f"{_class} d{_width} once"] = partial(
            _attend, {"causal": True}, _width, _width, (70, 135)
        )
for _width in (64, 128, 256):
    GROUPS[f"blocks d{_width}"] = partial(whole_blocks, _width)
    GROUPS[f"float8 d{_width}"] = partial(float8, _width)


def run_group(name: str) -> None:
    """In this process, without a pool."""
    import cupy

    cupy.cuda.set_allocator(None)
    with pytest.MonkeyPatch.context() as patch:
        choose_class("gpu sm80" if name.startswith("sm80") else "gpu", patch)
        GROUPS[name]()
    cupy.cuda.Device().synchronize()


def find_sanitizer() -> str:
    """The program, from PATH or from the toolkit."""
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    for folder in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        path = Path(folder or "/", "bin", "compute-sanitizer")
        if path.is_file():
            return str(path)
    sys.exit("compute-sanitizer was not found: put it on PATH or set CUDA_HOME")


def sanitize(sanitizer: str, tool: str, group: str, limit_s: float, logs: Path | None) -> bool:
    """Whether the group ran and the tool found nothing."""
    command = [sanitizer, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "1"]
    command += [sys.executable, "-m", "tests.attention.sanitize", "--run", group]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        text, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        text, status = f"stopped after {limit_s:.0f} s", 124
    seconds = time.perf_counter() - start
    if logs is not None:
        (logs / f"{tool}-{group}.log".replace(" ", "-").replace("/", "-")).write_text(text)
    summary = re.findall(r"SUMMARY: (.*)", text) or [text[-200:]]
    print(f"{tool:10} {group:22} {seconds:4.0f} s  {status:3}  {summary[-1]}", flush=True)
    return status == 0


def jobs(tools: list[str], groups: list[str]) -> Iterator[tuple[str, str]]:
    """Tool by tool: the first one's processes compile what the others find in the cache."""
    return ((tool, group) for tool in tools for group in groups)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--group", action="append", help="a group's name, or the start of one")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--limit", type=float, default=400, help="seconds for a process")
    parser.add_argument("--logs", type=Path, help="folder for what the tools print")
    parser.add_argument("--run", choices=GROUPS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        run_group(asked.run)
        return 0
    sanitizer = find_sanitizer()
    if asked.logs is not None:
        asked.logs.mkdir(parents=True, exist_ok=True)
    starts = tuple(asked.group or [""])
    chosen = list(jobs(asked.tool or list(TOOLS), [g for g in GROUPS if g.startswith(starts)]))
    with ThreadPoolExecutor(asked.jobs) as pool:
        run_one = partial(sanitize, sanitizer, limit_s=asked.limit, logs=asked.logs)
        clean = list(pool.map(lambda job: run_one(*job), chosen))
    print(f"{sum(clean)} of {len(chosen)} clean")
    return int(not all(clean))


if __name__ == "__main__":
    sys.exit(main())
