"""The tables of the analyzer proof agree with the results and with the document."""

from __future__ import annotations

import json

from profiling.proof_tables import DOCUMENT, PROOF, counters, summary, times, update


def test_the_document_is_up_to_date() -> None:
    text = DOCUMENT.read_text()
    assert text.count("<!-- proof:") == 3
    assert update(text, json.loads(PROOF.read_text())) == text, "run `make tables`"


def test_a_clock_without_readings_leaves_its_cells_empty() -> None:
    overhead = {"us": 1.0, "uncertainty_us": 0.25}
    found = {
        "zeros": {"events": overhead, "cupti": None, "ncu": None, "do_bench": overhead},
        "times": [
            {
                "kernel": "busy",
                "analyzer_us": 3.0,
                "cupti_us": 3.1,
                "cupti_difference": -0.0323,
                "do_bench_us": 4.0,
                "do_bench_difference": 0.0,
            }
        ],
    }
    busy, subtracted = times(found).splitlines()[2:]
    assert busy == "| busy | 3.00 µs | 3.10 µs (-3.2%) |  | 3.00 µs (+0.0%) |"
    assert subtracted == "| *subtracted* | 1.00 ± 0.25 µs |  |  | 1.00 ± 0.25 µs |"


def test_occupancies_and_bytes() -> None:
    row = {
        "kernel": "copy",
        "theoretical_occupancy": 1.0,
        "limited_by": "threads",
        "achieved_occupancy": 0.72,
        "declared_bytes": 4e9,
        "dram_bytes": 3.98e9,
        "difference": -0.005,
    }
    table = counters({"counters": [row]})
    assert "| `copy` | 100% (threads) | 72% | 4.000 GB | 3.980 GB | -0.5% |" in table


def test_exceeded_tolerances_are_listed() -> None:
    found = {
        "gpu": "a GPU",
        "copy": {"kernel": 4321.2, "memcpy": 4276.1},
        "verdicts": {"same": ["SAME", "UNCERTAIN", "SAME"], "slower": ["SLOWER"]},
        "missed": ["copy: too slow"],
    }
    said = summary(found)
    assert "kernel 4321 GB/s, cudaMemcpy 4276" in said
    assert "2 SAME, 1 UNCERTAIN" in said
    assert "Outside the tolerance: copy: too slow." in said
