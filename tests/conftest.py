"""Shared fixtures and options."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import cukit
from cukit.core.device import gpu_available
from tests.devices import EMULATOR, GPU

pytest_plugins = ("tests.guard", "tests.gpu_lock", "tests.quick_run")

os.environ.setdefault("CUKIT_QUIET", "1")  # hundreds of compiles would clutter the report


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled kernels in pytest's cache folder, also for programs that tests start, and
    restore Python's handler of SIGINT if SIGINT is ignored."""
    # A shell without job control starts background commands with SIGINT ignored. The programs that
    # tests start and interrupt would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "cache"):  # unless `-p no:cacheprovider`
        os.environ.setdefault("CUKIT_CACHE_DIR", str(config.cache.mkdir("cukit-kernels")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collect tests without garbage collections, which take a third of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collections, which then traverse fewer objects."""
    gc.freeze()
    gc.enable()


def pytest_report_header() -> str:
    """Report once why GPU tests are skipped."""
    return "gpu: " + ("tests run on it" if gpu_available() else "none found, GPU tests are skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("cukit").addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="shuffle files, and tests within each file, with this seed",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the tests if requested. Without a GPU, skip tests marked `gpu`, or fail if
    CUKIT_REQUIRE_GPU is set."""
    if config.option.shuffle is not None:
        items[:] = shuffled(items, config.option.shuffle)
    if gpu_available():
        return
    if os.environ.get("CUKIT_REQUIRE_GPU"):
        raise pytest.UsageError("CUKIT_REQUIRE_GPU is set, but no GPU was found")
    skip = pytest.mark.skip(reason="no GPU on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def shuffled(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Shuffle files, and the tests within each file, which share fixtures."""
    files: defaultdict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    order, generator = list(files.values()), random.Random(seed)
    generator.shuffle(order)
    for each in order:
        generator.shuffle(each)
    return [item for each in order for item in each]


@pytest.fixture(
    params=[
        "cpu",
        EMULATOR,
        GPU,
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of a test: "cpu" runs the reference, "emulator" and "gpu" the kernel."""
    if request.param != "emulator":
        yield request.param
        return
    with cukit.backend("emulator"):
        yield "emulator"


@pytest.fixture
def rng() -> np.random.Generator:
    """A random generator with a fixed seed."""
    return np.random.default_rng(20240607)


@pytest.fixture
def kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate, empty kernel cache."""
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
