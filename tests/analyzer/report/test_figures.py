"""Figures: positions of values, and formats of numbers."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cukit.analyzer.report import numbers, svg
from cukit.analyzer.report.benchmarks import BenchmarkResults, largest_cases
from cukit.analyzer.report.layout import Collapsible, Figure, Paragraph, Table
from cukit.analyzer.report.lines import Curve, line_chart
from cukit.analyzer.report.precision_roofline import roofline_blocks
from cukit.analyzer.report.roofline import Point, Roof, roofline
from cukit.analyzer.report.stacks import Part, Stack, stacked_chart
from tests.analyzer.report import samples
from tests.analyzer.report.pages import SVG, all_text, extents

ROOFS = (
    Roof("bandwidth", 4000.0, "copy", measured=True),
    Roof("compute", 800.0, "product", measured=True),
)


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e6), st.booleans(), st.integers(1, 12))
def test_ticks_are_within_their_scale(low: float, ratio: float, log: bool, at_most: int) -> None:
    scale = svg.Scale(low, low * ratio, 10.0, 110.0, logarithmic=log)
    ticks = scale.ticks(at_most)
    assert len(ticks) <= at_most + 1
    assert ticks == sorted(set(ticks))
    assert all(10.0 - 0.1 <= scale(tick) <= 110.0 + 0.1 for tick in ticks)


def test_a_logarithmic_scale_maps_decades_evenly() -> None:
    scale = svg.Scale(1.0, 100.0, 0.0, 50.0, logarithmic=True)
    assert [scale(value) for value in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 25.0, 50.0])


@pytest.mark.parametrize("width", [svg.WIDE, svg.NARROW])
@pytest.mark.parametrize("intensity", [1.0, 50.0, 200.0, 5000.0])
def test_a_kernel_at_the_roof_is_drawn_on_it(intensity: float, width: float) -> None:
    attainable = min(800.0, 4.0 * intensity)
    drawing = ElementTree.fromstring(
        roofline(ROOFS, [Point(intensity, attainable, "colour-0", "it")], title="roof", width=width)
    )
    (dot,) = drawing.iter(f"{SVG}circle")
    x, y = float(dot.attrib["cx"]), float(dot.attrib["cy"])
    distances = []
    for line in drawing.iter(f"{SVG}line"):
        if line.attrib["class"].split()[0] != "roof":
            continue
        x1, y1, x2, y2 = (float(line.attrib[name]) for name in ("x1", "y1", "x2", "y2"))
        if x1 - 0.1 <= x <= x2 + 0.1:
            distances.append(abs(y1 + (x - x1) / (x2 - x1) * (y2 - y1) - y))
    assert min(distances) < 0.1


@pytest.mark.parametrize("width", [svg.WIDE, svg.NARROW])
@pytest.mark.parametrize(("measured", "datasheet"), [(64.8, 66.9), (778.0, 989.0), (100.0, 989.0)])
def test_labels_of_ceilings_do_not_overlap(measured: float, datasheet: float, width: float) -> None:
    roofs = (
        ROOFS[0],
        Roof("compute", measured, "measured", measured=True),
        Roof("compute", datasheet, "datasheet", measured=False),
    )
    drawing = ElementTree.fromstring(
        roofline(roofs, [Point(10.0, 20.0, "colour-0", "it")], title="roof", width=width)
    )
    places = [
        float(t.attrib["y"])
        for t in drawing.iter(f"{SVG}text")
        if t.text in ("measured", "datasheet")
    ]
    assert len(places) == 2
    assert abs(places[0] - places[1]) >= 12, "approximate height of a line of text"


def test_attributes_and_text_are_escaped() -> None:
    markup = svg.element("text", svg.tip('a<b & "c"'), class_='x"y', text_anchor=None, x=1.0)
    parsed = ElementTree.fromstring(markup)
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
def test_numbers_are_formatted(written: str, expected: str) -> None:
    assert written == expected


def results() -> BenchmarkResults:
    content = samples.benchmarks()
    return BenchmarkResults(content["environment"], tuple(content["records"]))


def test_wrong_peers_and_variants_of_cukit_are_not_compared() -> None:
    cases = {(case.op, case.name): case for case in results().cases}
    first = cases["rms_norm", "8192x4096"]
    assert first.fastest_peer is not None
    assert first.fastest_peer["impl"] == "torch-compile"
    assert first.speed == pytest.approx(44.5 / 40.25)
    attention = cases["flash_attention", "d128 causal"]
    assert attention.fastest_peer is not None
    assert attention.fastest_peer["impl"] == "torch-cudnn"
    assert cases["rms_norm", "enqueue"].speed is None


def test_a_wrong_result_of_cukit_has_no_speed() -> None:
    wrong = samples.record("cukit", 1.0, correct=False)
    found = BenchmarkResults({}, (wrong, samples.record("liger", 2.0)))
    assert found.cases[0].speed is None
    assert largest_cases(found.cases) == []


def test_the_largest_case_represents_its_op() -> None:
    chosen = [(case.op, case.name) for case in largest_cases(results().cases)]
    assert chosen == [("rms_norm", "16384x8192"), ("flash_attention", "d128 causal")]


def test_the_verdict_counts_faster_and_slower_cases() -> None:
    assert results().verdict.endswith("faster in 2, within 3% in 0 and slower in 1.")


@pytest.mark.parametrize("width", [svg.WIDE, svg.HALF, svg.NARROW])
@pytest.mark.parametrize("last", [40.0, 2000.0, 100_000.0, 99_999.0])
def test_tick_labels_at_the_ends_are_not_clipped(last: float, width: float) -> None:
    curve = Curve("loss", 0, ((0.0, 3.0), (last, 0.5)))
    drawing = ElementTree.fromstring(
        line_chart([curve], title="loss", x_label="step", y_label="loss", width=width)
    )
    assert len(all_text(drawing)) > 6
    for left, right in extents(drawing):
        assert left >= 0
        assert right <= width


@pytest.mark.parametrize("width", [svg.HALF, svg.NARROW])
def test_parts_of_a_stack_are_proportional_to_their_values(width: float) -> None:
    parts = (Part("colour-0", "a", 1.0), Part("colour-1", "none", 0.0), Part("colour-2", "b", 3.0))
    drawing = ElementTree.fromstring(
        stacked_chart([Stack("gemm", "4", parts)], title="mix", width=width)
    )
    lengths = [float(part.attrib["width"]) for part in drawing.iter(f"{SVG}rect")]
    assert len(lengths) == 2
    assert lengths[1] / lengths[0] == pytest.approx(3.0, rel=0.05)
    assert {"25%", "75%"} <= set(all_text(drawing))


def precisions(*records: dict[str, object], gpu: str = "NVIDIA H200") -> BenchmarkResults:
    return BenchmarkResults({**samples.ENVIRONMENT, "gpu": gpu}, tuple(records))


def product(tflops: float, dtype: str, impl: str = "cukit", **more: object) -> dict[str, object]:
    fields = {"op": "matmul", "dtype": dtype, "tflops": tflops, "gbps": 300.0}
    return samples.record(impl, 100.0, **fields, **more)


def test_each_precision_has_its_own_roof() -> None:
    found = precisions(
        product(700.0, "bfloat16"),
        product(1300.0, "float8_e4m3"),
        product(1500.0, "int8"),
        product(1100.0, "bfloat16", case="4096 int4 x float8"),
        product(600.0, "float8_e4m3", "cukit-bfloat16"),
    )
    (figure,) = roofline_blocks(found)
    assert isinstance(figure, Figure)
    assert {name.split(":")[0]: class_ for class_, name in figure.legend} == {
        "fp8": "colour-2", "int8": "colour-3", "fp16/bf16": "colour-0",
    }  # fmt: skip
    drawing = ElementTree.fromstring(figure.draw(svg.WIDE))
    dots = [dot.attrib["class"].split()[0] for dot in drawing.iter(f"{SVG}circle")]
    assert sorted(dots) == ["colour-0", "colour-0", "colour-2", "colour-2", "colour-3"]
    # 8-bit types have only the datasheet's roof (1979); bfloat16 also has a measured one (740).
    assert {"740", "989", "1,979"} <= set(all_text(drawing))


def test_points_above_a_measured_ceiling_are_explained() -> None:
    found = precisions(
        product(777.0, "bfloat16"),
        product(700.0, "bfloat16", case="below"),
        product(1050.0, "bfloat16", case="impossible"),
        samples.record("cukit", 10.0, op="gemv", tflops=4.3, gbps=4300.0),
    )
    _, words, fold = roofline_blocks(found)
    assert isinstance(words, Paragraph)
    assert words.text.startswith("3 points are above a measured ceiling, by 41.9% at most.")
    assert isinstance(fold, Collapsible)
    (table,) = fold.blocks
    assert isinstance(table, Table)
    reasons = {row[3].value: row[-1].text for row in table.rows}
    assert "datasheet, too" in reasons[1050.0]
    assert "square matrix product" in reasons[777.0]
    assert "writes as much as it reads" in reasons[4.3]


def test_an_unknown_gpu_keeps_its_measured_roofs() -> None:
    (figure,) = roofline_blocks(precisions(product(700.0, "bfloat16"), gpu="Another GPU"))
    assert isinstance(figure, Figure)
    assert [name for _, name in figure.legend] == ["fp16/bf16: measured 740 TFLOP/s"]
    assert roofline_blocks(precisions(product(1300.0, "float8_e4m3"), gpu="Another GPU")) == []


def test_floors_use_the_peak_of_the_precision() -> None:
    (case,) = precisions(product(1300.0, "float8_e4m3", floor_us=176.0)).cases
    assert case.floor_us == pytest.approx(100 * 1300 / 1979, rel=1e-3)
    assert case.ours is not None
    assert case.share_of_floor(case.ours) == pytest.approx(0.657, abs=1e-3)
