"""Replays: what is measured, what counts as a failure, and pools in separate processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cukit.cli import run
from cukit.commands.replay import limit_of
from cukit.core.device import gpu_available
from cukit.errors import ConfigError
from cukit.memory.log import LogAction, LogEvent, read_log, write_log
from cukit.memory.replay.mixes import make_log
from cukit.memory.replay.pools import POOLS, ProviderMeter, make_pool
from cukit.memory.replay.processes import PoolMissing, Request, replay_apart
from cukit.memory.replay.replay import Latency, Script, replay, script_of

RECORDED = Path(__file__).parents[2] / "profiling" / "logs" / "distill.csv.gz"
PAGE = 2 << 20


class Full(Exception):  # noqa: N818 - a condition, not an error
    """The bump pool is full."""


class BumpPool:
    """Never reuses memory, so that the expected results are easy to compute by hand."""

    out_of_memory = (Full,)
    growth_ns = 0

    def __init__(self, limit: int | None = None, *, soft: bool = False) -> None:
        self.limit, self.soft = limit, soft
        self.used = 0
        self.live: dict[int, int] = {}
        self.streams: set[int] = set()

    def allocate(self, size: int, stream: int) -> int:
        if self.limit is not None and not self.soft and self.used + size > self.limit:
            raise Full(f"{size} bytes\nmore")
        self.used += size
        self.live[self.used] = size
        self.streams.add(stream)
        return self.used

    def free(self, pointer: int, stream: int) -> None:
        del self.live[pointer]

    def reserved_bytes(self) -> int:
        return self.used

    def close(self) -> None:
        assert not self.live


def log_of(*steps: tuple[str, int, int]) -> list[LogEvent]:
    """Events from (action, pointer, size)."""
    return [
        LogEvent(1, number, LogAction(action), pointer, size, 40 + pointer % 2)
        for number, (action, pointer, size) in enumerate(steps)
    ]


REUSE = log_of(
    ("allocate", 10, 100),
    ("allocate", 11, 300),
    ("free", 10, 100),
    ("allocate failure", 0, 999),
    ("allocate", 10, 200),
    ("free", 11, 300),
)


def test_a_log_becomes_a_script() -> None:
    script = script_of(REUSE)
    assert [tuple(step) for step in script.steps] == [
        (0, 100, 0),
        (1, 300, 1),
        (0, 0, 0),
        (2, 200, 0),
        (1, 0, 1),
    ]
    assert (script.num_blocks, script.num_streams, script.peak_live_bytes) == (3, 2, 500)
    assert script.tight_limit == 525 + 2 * PAGE


def test_counted_operations() -> None:
    pool = BumpPool()
    result = replay(script_of(REUSE), pool, name="bump", limit=None)
    assert result.completed
    assert result.num_steps == 5
    assert result.peak_live_bytes == 500
    assert result.peak_reserved_bytes == 600
    assert result.fragmentation == pytest.approx(1 - 500 / 600)
    assert result.overhead == pytest.approx(1.2)
    assert pool.streams == {0, 1}
    assert not pool.live, "what the log never frees is freed at the end"


def test_a_log_ends_at_its_first_failure() -> None:
    pool = BumpPool(limit=450)
    result = replay(script_of(REUSE), pool, name="bump", limit=450)
    assert not result.completed
    assert result.failure == "step 3: 200 bytes requested, 300 live (200 bytes more)"
    assert result.num_steps == 3
    assert not pool.live


def test_an_exceeded_limit_is_a_failure() -> None:
    result = replay(script_of(REUSE), BumpPool(550, soft=True), name="bump", limit=550)
    assert not result.completed
    assert result.failure == "held 600 bytes, 50 above the limit"


def test_latency() -> None:
    found = Latency.of([1000 * n for n in range(1, 102)])
    assert found == Latency(mean_us=51.0, median_us=51.0, p99_us=100.0, iqr_us=50.0, samples=101)
    assert Latency.of([]).samples == 0


def test_the_meter_counts_the_memory_of_the_pool() -> None:
    class Pages:
        page_bytes, large_pages, can_remap = PAGE, 4, True

        def create_large_pages(self, count: int) -> list[tuple[int, ...]]:
            return [(0, 1, 2, 3)] * count

        def create_pages(self, count: int) -> list[int]:
            if count > 9:
                raise Full
            return list(range(count))

        def destroy_pages(self, pages: list[int]) -> None:
            pass

    class Segments:
        page_bytes, can_remap = PAGE, False

        def reserve(self, size: int) -> int:
            return size

        def release(self, address: int, size: int) -> None:
            pass

    pages, segments = Pages(), Segments()
    meter = ProviderMeter(pages)
    taken = pages.create_pages(3)
    with pytest.raises(Full):
        pages.create_pages(10)
    assert meter.reserved_bytes() == 3 * PAGE
    pages.destroy_pages(taken[:2])
    assert meter.reserved_bytes() == PAGE
    pages.create_large_pages(2)
    assert meter.reserved_bytes() == 9 * PAGE
    meter = ProviderMeter(segments)
    segments.release(segments.reserve(4096), 4096)
    segments.reserve(512)
    assert meter.reserved_bytes() == 512


def cukit_pool(script: Script, limit: int | None) -> Any:
    return make_pool("cukit", script.num_streams, limit)


@pytest.mark.parametrize(
    "name", ["random-300-4096", "random-2000-64", "serving", "streams", "torture"]
)
def test_the_pool_of_cukit_completes_every_mix_at_a_tight_limit(name: str) -> None:
    """The limit is 5% above the peak of the live bytes, plus one page per stream."""
    script = script_of(make_log(name)[:12_000])
    pool = cukit_pool(script, script.tight_limit)
    result = replay(script, pool, name="cukit", limit=script.tight_limit)
    pool.close()
    assert result.completed, result.failure
    assert result.num_steps == len(script.steps)
    assert result.peak_reserved_bytes <= script.tight_limit


def test_the_pool_of_cukit_completes_the_recorded_training_run() -> None:
    script = script_of(read_log(RECORDED)[:12_000])
    assert script.peak_live_bytes > 8 << 30
    pool = cukit_pool(script, script.tight_limit)
    result = replay(script, pool, name="cukit", limit=script.tight_limit)
    pool.close()
    assert result.completed, result.failure


def test_a_pool_runs_in_its_own_process(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    write_log(path, make_log("random-200-4"))
    free, tight = replay_apart("cukit", [Request(str(path)), Request("random-200-4", "tight")])
    assert free.completed
    assert tight.completed
    assert free.peak_live_bytes == tight.peak_live_bytes
    assert free.limit_bytes is None
    assert tight.limit_bytes == script_of(make_log("random-200-4")).tight_limit


@pytest.mark.skipif(gpu_available(), reason="there is a GPU")
def test_errors_name_pools_that_need_a_gpu() -> None:
    with pytest.raises(PoolMissing, match="cupy needs a GPU"):
        replay_apart("cupy", [Request("torture")])


@pytest.mark.gpu
@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_replays(pool: str) -> None:
    try:
        (result,) = replay_apart(pool, [Request("torture")])
    except PoolMissing as reason:
        pytest.skip(str(reason))
    assert result.completed, result.failure
    assert result.peak_reserved_bytes >= result.peak_live_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512", 512), ("1.5KiB", 1536), ("12 GiB", 12 << 30), ("3m", 3 << 20), ("tight", "tight")],
)
def test_limits(text: str, expected: int | str) -> None:
    assert limit_of(text) == expected


@pytest.mark.parametrize("text", ["", "-3", "0", "5 pounds"])
def test_invalid_limits_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="--limit"):
        limit_of(text)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, results = tmp_path / "mix.csv.gz", tmp_path / "results.json"
    arguments = ["replay", "random-100-4", "--write", str(log), "--export", str(results)]
    assert run([*arguments, "--pools", "cukit,cupy", "--limit", "tight"]) == 0
    printed = capsys.readouterr().out
    assert "random-100-4: 100 allocations on 1 stream(s)" in printed
    assert "cukit  yes" in printed
    if not gpu_available():
        assert "cupy: not available, cupy needs a GPU" in printed
    assert read_log(log) == make_log("random-100-4")
    facts = json.loads(results.read_text())
    assert facts["num_blocks"] == 100
    assert facts["results"][0]["pool"] == "cukit"
    assert facts["results"][0]["completed"]


def test_the_command_reports_the_failing_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "torture", "--pools", "cukit", "--limit", "2MiB", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["results"][0]["failure"].startswith("step 0: ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["replay", "nowhere.csv"], "nowhere.csv"),
        (["replay", "torture", "--pools", "jemalloc"], "no pool is called 'jemalloc'"),
        (["replay", "torture", "--limit", "much"], "--limit: expected bytes"),
    ],
)
def test_invalid_arguments(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("mix", ["random-999999999999-4", "random-10-" + "9" * 5000, "randm-1-1"])
def test_an_invalid_mix_is_rejected(mix: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a mix: expected random-N-M"):
        Request(mix).script()
