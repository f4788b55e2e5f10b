"""Figures by themselves: where values land, and how numbers are written."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cukit.analyzer.report import numbers, svg
from cukit.analyzer.report.benchmarks import BenchmarkResults, largest_cases
from cukit.analyzer.report.roofline import Point, Roof, roofline
from tests.analyzer.report import samples
from tests.analyzer.report.pages import SVG

ROOFS = (
    Roof("bandwidth", 4000.0, "copy", measured=True),
    Roof("compute", 800.0, "product", measured=True),
)


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e6), st.booleans(), st.integers(1, 12))
def test_ticks_lie_on_their_scale(low: float, ratio: float, log: bool, at_most: int) -> None:
    scale = svg.Scale(low, low * ratio, 10.0, 110.0, logarithmic=log)
    ticks = scale.ticks(at_most)
    assert len(ticks) <= at_most + 1
    assert ticks == sorted(set(ticks))
    assert all(10.0 - 0.1 <= scale(tick) <= 110.0 + 0.1 for tick in ticks)


def test_a_scale_maps_its_ends() -> None:
    scale = svg.Scale(1.0, 100.0, 0.0, 50.0, logarithmic=True)
    assert [scale(value) for value in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 25.0, 50.0])


@pytest.mark.parametrize("width", [svg.WIDE, svg.NARROW])
@pytest.mark.parametrize("intensity", [1.0, 50.0, 200.0, 5000.0])
def test_a_kernel_at_the_roof_lies_on_it(intensity: float, width: float) -> None:
    attainable = min(800.0, 4.0 * intensity)
    drawing = ElementTree.fromstring(
        roofline(ROOFS, [Point(intensity, attainable, 0, "it")], title="roof", width=width)
    )
    (dot,) = drawing.iter(f"{SVG}circle")
    x, y = float(dot.attrib["cx"]), float(dot.attrib["cy"])
    distances = []
    for line in drawing.iter(f"{SVG}line"):
        if line.attrib["class"] != "roof":
            continue
        x1, y1, x2, y2 = (float(line.attrib[name]) for name in ("x1", "y1", "x2", "y2"))
        if x1 - 0.1 <= x <= x2 + 0.1:
            distances.append(abs(y1 + (x - x1) / (x2 - x1) * (y2 - y1) - y))
    assert min(distances) < 0.1


@pytest.mark.parametrize("width", [svg.WIDE, svg.NARROW])
@pytest.mark.parametrize(("measured", "datasheet"), [(64.8, 66.9), (778.0, 989.0), (100.0, 989.0)])
def test_labels_of_ceilings_do_not_lie_on_each_other(
    measured: float, datasheet: float, width: float
) -> None:
    roofs = (
        ROOFS[0],
        Roof("compute", measured, "measured", measured=True),
        Roof("compute", datasheet, "datasheet", measured=False),
    )
    drawing = ElementTree.fromstring(
        roofline(roofs, [Point(10.0, 20.0, 0, "it")], title="roof", width=width)
    )
    places = [
        float(t.attrib["y"])
        for t in drawing.iter(f"{SVG}text")
        if t.text in ("measured", "datasheet")
    ]
    assert len(places) == 2
    assert abs(places[0] - places[1]) >= 12, "a line of text is about so high"


def test_attributes_and_text_are_escaped() -> None:
    made = svg.element("text", svg.tip('a<b & "c"'), class_='x"y', text_anchor=None, x=1.0)
    parsed = ElementTree.fromstring(made)
    assert parsed.attrib == {"class": 'x"y', "x": "1"}
    assert parsed[0].text == 'a<b & "c"'


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (numbers.microseconds(3.14159), "3.14 µs"),
        (numbers.microseconds(1369.7), "1,370 µs"),
        (numbers.microseconds(20_800.0), "20.8 ms"),
        (numbers.microseconds(2_500_000.0), "2.50 s"),
        (numbers.seconds(12.34), "12.3 s"),
        (numbers.seconds(125.0), "2 min 05 s"),
        (numbers.gbps(4269.0), "4.27 TB/s"),
        (numbers.gbps(981.25), "981 GB/s"),
        (numbers.num_bytes(3 * 2**30), "3.00 GiB"),
        (numbers.num_bytes(100), "100 B"),
        (numbers.count(65_093_376), "65.1 M"),
        (numbers.digits(0.0), "0"),
        (numbers.digits(0.00041234), "0.000412"),
        (numbers.tick(2000.0), "2,000"),
        (numbers.tick(0.25), "0.25"),
        (numbers.printable("a\x1b[31m\n\tb"), "a\ufffd[31m\n\tb"),
    ],
)
def test_numbers_in_words(written: str, expected: str) -> None:
    assert written == expected


def results() -> BenchmarkResults:
    content = samples.benchmarks()
    return BenchmarkResults(content["environment"], tuple(content["records"]))


def test_a_wrong_peer_and_our_own_variants_are_no_peers() -> None:
    cases = {(case.op, case.name): case for case in results().cases}
    first = cases["rms_norm", "8192x4096"]
    assert first.fastest_peer is not None
    assert first.fastest_peer["impl"] == "torch-compile"
    assert first.speed == pytest.approx(44.5 / 40.25)
    attention = cases["flash_attention", "d128 causal"]
    assert attention.fastest_peer is not None
    assert attention.fastest_peer["impl"] == "torch-cudnn"
    assert cases["rms_norm", "enqueue"].speed is None


def test_our_wrong_result_has_no_speed() -> None:
    wrong = samples.record("cukit", 1.0, correct=False)
    found = BenchmarkResults({}, (wrong, samples.record("liger", 2.0)))
    assert found.cases[0].speed is None
    assert largest_cases(found.cases) == []


def test_the_largest_case_stands_for_an_op() -> None:
    chosen = [(case.op, case.name) for case in largest_cases(results().cases)]
    assert chosen == [("rms_norm", "16384x8192"), ("flash_attention", "d128 causal")]


def test_the_verdict_counts() -> None:
    assert results().verdict.endswith("faster in 2, within 3% in 0 and slower in 1.")
