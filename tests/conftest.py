"""Fixtures that every test file shares."""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import cukit
from cukit.core.device import gpu_available

pytest_plugins = ("tests.guard",)

os.environ.setdefault("CUKIT_QUIET", "1")  # hundreds of first compiles would drown the report


MOST_EMULATED = 1 << 16
"""Elements of the largest shape that a test parameter may have in the emulator."""


def pytest_report_header() -> str:
    """Says once why hundreds of tests may be skipped."""
    return "gpu: " + ("tests run on it" if gpu_available() else "none here, its tests are skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("cukit").addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="run the files, and the tests of each file, in an order of this number's",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU the tests marked `gpu` are skipped, unless CUKIT_REQUIRE_GPU forbids it."""
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
    """File by file, for the sake of what the tests of a file share, in another order."""
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
        pytest.param("emulator", marks=pytest.mark.emulator),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What runs a test's ops: on "cpu" the reference, on "emulator" and "gpu" the kernel."""
    if request.param != "emulator":
        yield request.param
        return
    shape = getattr(request.node, "callspec", None)
    sizes = [value for value in (shape.params.values() if shape else ()) if _is_shape(value)]
    if any(math.prod(size) > MOST_EMULATED for size in sizes):
        pytest.skip(f"more than {MOST_EMULATED} elements: for the GPU")
    assert request.config.cache is not None
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(request.config.cache.mkdir("cukit-kernels")))
    with cukit.backend("emulator"):
        yield "emulator"


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(extent, int) for extent in value)


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(20240607)


@pytest.fixture
def kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache of the test's own."""
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
