"""Fixtures that every test file shares."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cukit.core.device import gpu_available

os.environ.setdefault("CUKIT_QUIET", "1")  # hundreds of first compiles would drown the report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU the tests marked `gpu` are skipped, unless CUKIT_REQUIRE_GPU forbids it."""
    if gpu_available():
        return
    if os.environ.get("CUKIT_REQUIRE_GPU"):
        raise pytest.UsageError("CUKIT_REQUIRE_GPU is set, but no GPU was found")
    skip = pytest.mark.skip(reason="no GPU on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the arrays of a test live: "cpu" runs the reference, "gpu" the kernel."""
    return str(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(20240607)


@pytest.fixture
def kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache of the test's own."""
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
