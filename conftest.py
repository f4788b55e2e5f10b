"""Tests marked `gpu` run where a GPU is, are skipped with a reason where none is, and fail there
if CUKIT_REQUIRE_GPU=1 says that there should be one."""

from __future__ import annotations

import os

import pytest

from cukit.core.device import cupy_module, gpu_available


def pytest_report_header() -> str:
    return f"cukit: {_why_no_gpu() or 'GPU tests run here'}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    reason = _why_no_gpu()
    if reason is None:
        return
    if os.environ.get("CUKIT_REQUIRE_GPU") == "1":
        pytest.fail(f"CUKIT_REQUIRE_GPU=1, but {reason}", pytrace=False)
    pytest.skip(reason)


def _why_no_gpu() -> str | None:
    """What keeps GPU tests from running here; None if nothing does."""
    if cupy_module() is None:
        return "CuPy is not installed"
    return None if gpu_available() else "CuPy finds no GPU"
