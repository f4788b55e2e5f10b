"""The bars that the analyzer is held to on a GPU; and that its kernels compile."""

from __future__ import annotations

from typing import Any

import pytest

from cukit.analyzer.static import KernelSource, inspect
from cukit.core.device import cupy_module
from profiling.prove_analyzer import BUSY, judge


def found(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "times": [
            {"kernel": "a", "largest_difference": 0.01},
            {"kernel": "b", "largest_difference": None},
        ],
        "copy": {"difference": 0.001},
        "verdicts": {"same": ["SAME", "UNCERTAIN"], "slower": ["SLOWER"]},
        "counters": [{"kernel": "c", "difference": 0.04}],
    }
    return good | changes


def test_what_is_within_the_bars_passes() -> None:
    assert judge(found()) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"times": [{"kernel": "a", "largest_difference": 0.04}]}, "a: 4.0% from another clock"),
        ({"copy": {"difference": 0.03}}, "copy: 3.0% from cudaMemcpy"),
        ({"verdicts": {"same": ["FASTER"], "slower": ["SLOWER"]}}, "the same kernel"),
        ({"verdicts": {"same": ["SAME"], "slower": ["UNCERTAIN"]}}, "a slowdown of 5%"),
        ({"counters": [{"kernel": "c", "difference": 0.06}]}, "c: DRAM bytes 6.0%"),
    ],
)
def test_what_is_beyond_a_bar_is_named(changes: dict[str, Any], complaint: str) -> None:
    (missed,) = judge(found(**changes))
    assert missed.startswith(complaint)


@pytest.mark.skipif(cupy_module() is None, reason="compiling needs NVRTC")
def test_the_copy_is_as_wide_as_it_gets() -> None:
    from cukit.analyzer.sass import memory_access

    access = memory_access(inspect(KernelSource("copy", BUSY), "sm_90").code)
    assert {(w.operation, w.bits) for w in access.widths} == {("load", 128), ("store", 128)}
    assert inspect(KernelSource("busy", BUSY), "sm_90").info.spill_store_bytes == 0
