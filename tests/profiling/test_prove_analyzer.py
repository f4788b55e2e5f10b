"""The tolerances of the analyzer proof, which needs a GPU; its raw kernel compiles."""

from __future__ import annotations

from typing import Any

import pytest

from cukit.analyzer.static import KernelSource, inspect
from cukit.core.device import cupy_module
from profiling.proof_subjects import BUSY
from profiling.prove_analyzer import exceeded_tolerances


def found(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "times": [
            {"kernel": "a", "cupti_difference": 0.01, "ncu_difference": -0.02},
            {"kernel": "b", "do_bench_difference": 0.06, "do_bench_doubt": 0.07},
        ],
        "copy": {"slower_by": -0.03},
        "verdicts": {"same": ["SAME", "UNCERTAIN"], "slower": ["SLOWER"]},
        "counters": [{"kernel": "c", "difference": 0.04}],
    }
    return good | changes


def test_results_within_the_tolerances_pass() -> None:
    assert exceeded_tolerances(found()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"times": [{"kernel": "a", "cupti_difference": 0.04, "cupti_doubt": 0.05}]},
            "a: +4.0% from cupti",
        ),
        (
            {"times": [{"kernel": "a", "ncu_difference": -0.06, "ncu_doubt": 0.05}]},
            "a: -6.0% from ncu",
        ),
        ({"copy": {"slower_by": 0.03}}, "copy: 3.0% slower than cudaMemcpy"),
        ({"verdicts": {"same": ["FASTER"], "slower": ["SLOWER"]}}, "the same kernel"),
        ({"verdicts": {"same": ["SAME"], "slower": ["UNCERTAIN"]}}, "a slowdown of 5%"),
        ({"counters": [{"kernel": "c", "difference": 0.06}]}, "c: DRAM bytes +6.0%"),
    ],
)
def test_exceeded_tolerances_are_named(changes: dict[str, Any], message: str) -> None:
    (missed,) = exceeded_tolerances(found(**changes))
    assert missed.startswith(message)


@pytest.mark.skipif(cupy_module() is None, reason="compiling needs NVRTC")
def test_the_raw_kernel_compiles() -> None:
    assert inspect(KernelSource("busy", BUSY), "sm_90").info.spill_store_bytes == 0
