"""The whole report: its inputs, the page, and the contents of each output format."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cukit.analyzer.report import Report, generate_report, html
from cukit.analyzer.report.documents import KEYS, read_documents
from cukit.analyzer.report.layout import Facts, Table
from cukit.analyzer.report.terminal import TEXT_WIDTH
from cukit.errors import ConfigError, DataError, MissingDependencyError
from tests.analyzer.report import samples
from tests.analyzer.report.pages import SVG, Page, all_text, drawings, extents


@pytest.fixture(scope="module")
def report() -> Report:
    return generate_report(samples.every_kind(), title=f"All of it {samples.HOSTILE}")


@pytest.fixture(scope="module")
def page(report: Report) -> Page:
    return Page(report.to_html())


def test_every_kind_has_its_section(report: Report) -> None:
    titles = [section.title for section in report.sections]
    assert titles == ["Analysis", "Benchmarks", "Kernels", "Distillation", "Memory"]


def test_sections_of_one_kind_are_numbered() -> None:
    report = generate_report([samples.kernels(), samples.benchmarks(), samples.kernels()])
    titles = [section.title for section in report.sections]
    assert titles == ["Kernels 1", "Benchmarks", "Kernels 2"]


def test_empty_columns_are_omitted() -> None:
    markup = generate_report([samples.traced()]).to_html()
    assert "warm" in markup
    assert "95% interval" not in markup


def test_the_page_makes_no_external_requests(page: Page) -> None:
    addresses = [address for address in page.addresses if not address.startswith("#")]
    assert addresses == ["data:,"]
    without_namespace = page.markup.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", without_namespace)
    assert "default-src 'none'" in page.markup


def test_names_are_escaped(page: Page) -> None:
    assert samples.HOSTILE not in page.markup
    assert page.tags.count("script") == 3, "one of the page, and the indices of two tables"
    assert page.markup.startswith("<!doctype html>")
    assert "&lt;script&gt;" in page.markup
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", page.markup)


def test_every_drawing_is_valid_and_named(page: Page) -> None:
    found = drawings(page.markup)
    assert len(found) == 31
    for drawing in found:
        assert drawing.tag == f"{SVG}svg"
        assert drawing.attrib["aria-label"]
        _, _, width, height = map(float, drawing.attrib["viewBox"].split())
        for mark in [*drawing.iter(f"{SVG}rect"), *drawing.iter(f"{SVG}circle")]:
            x, y = (float(mark.get(name) or mark.get(f"c{name}") or 0) for name in "xy")
            assert 0 <= x <= width
            assert 0 <= y <= height
            assert x + float(mark.get("width", 0)) <= width
        for left, right in extents(drawing):
            assert left >= -1
            assert right <= width + 1


def test_times_in_the_page_equal_those_of_the_json(page: Page) -> None:
    values = page.numbers("8192x4096 bfloat16")
    assert values == pytest.approx([40.25, 44.5, 44.5 / 40.25, 0.795, 3300], abs=1e-3)
    for record in samples.benchmarks()["records"]:
        if record["correct"]:
            rows = page.rows(record["op"], f"{record['case']} {record['dtype']}")
            assert record["median_us"] in [value for row in rows for _, value in row]


def test_every_time_is_shown_with_its_spread(page: Page) -> None:
    (row,) = page.rows("rms_norm", "8192x4096 bfloat16", "cukit")
    assert [text for text, _ in row[3:]] == [
        "40.2 µs", "0.100 µs", "39.5 to 41.0 µs (noisy)", "80", "3.30 TB/s", "1.0e-05",
        "1.00 MiB", "0.02 J", "50.0", "correct",
    ]  # fmt: skip
    (wrong,) = page.rows("rms_norm", "8192x4096 bfloat16", "Liger")
    assert wrong[-1][0] == "wrong"


def test_cases_can_be_filtered_by_comparison(report: Report) -> None:
    (table,) = [
        block
        for block in report.sections[1].blocks
        if isinstance(block, Table) and block.index is not None
    ]
    assert table.index is not None
    assert table.index.anchor == "cases-2"
    entries = zip(table.rows, table.index.entries, strict=True)
    flags = {row[0].text: entry.flags for row, entry in entries}
    assert flags == {
        "8192x4096 bfloat16": ("faster", "wrong", "noisy"),
        "16384x8192 bfloat16": ("faster",),
        "d128 causal bfloat16": ("slower",),
        "enqueue bfloat16": ("alone",),
    }
    (implementations,) = table.index.entries[0].details
    assert isinstance(implementations, Facts)
    assert [row[0] for row in implementations.rows] == ["Liger", "cukit", "torch.compile"]
    assert [row[-1] for row in implementations.rows] == ["wrong", "correct", "correct"]


def test_bars_are_as_long_as_their_values(page: Page) -> None:
    (drawing,) = [
        d
        for d in drawings(page.markup)
        if d.attrib["aria-label"].startswith("flash_attention: TFLOP/s") and d.get("width") == "960"
    ]
    widths = [float(rect.attrib["width"]) for rect in drawing.iter(f"{SVG}rect")]
    assert widths == pytest.approx(
        [widths[0] * rate / 401.4 for rate in (401.4, 366.4, 669.8)], rel=1e-3
    )
    assert "1,370 µs" in all_text(drawing)


def test_kernels_are_listed_with_their_resources(page: Page) -> None:
    spilling = page.numbers("rms_norm sm_90a DTYPE=float32")
    assert spilling == [512, 128, 24, 64, 0.25, 500, 0.5]
    labels = [d.attrib["aria-label"] for d in drawings(page.markup)]
    assert "Theoretical occupancy of the variants" in labels


def test_an_analysis_lists_its_values_and_missing_fields(page: Page) -> None:
    (overview, *_) = page.rows("my_kernel")
    assert [value for _, value in overview if value is not None] == [
        42.125, 30.5, 3560.8, 284.9, 0.834, 64, 24, 0.5, 0.47,
    ]  # fmt: skip
    assert page.numbers("my_kernel", "load") == [128, 4]
    assert page.numbers("my_kernel", "atomic") == [2]
    assert page.rows("cold", "it failed")
    assert page.rows("counters.l2_hit_fraction", "ncu was not used")
    assert page.rows("energy", "0.0123 ± 0.0004 J per call, 81.3 calls per J (1.5 s at 410 W)")


def test_the_access_probe_is_drawn_and_listed(page: Page) -> None:
    (wide, _) = [d for d in drawings(page.markup) if "strided loads" in d.attrib["aria-label"]]
    assert len(list(wide.iter(f"{SVG}path"))) == 2
    assert page.numbers("16", "32") == [16, 32, 125.0, 1 / 32, 1 / 16]


def test_a_traced_script_shows_the_time_of_each_kernel() -> None:
    markup = generate_report([samples.traced()]).to_html()
    (wide, _) = [d for d in drawings(markup) if "Time of the script" in d.attrib["aria-label"]]
    assert {"20.0 µs, 57.1%", "15.0 µs, 42.9%"} <= set(all_text(wide))
    tiles = re.findall(r"<dt>(.*?)</dt><dd class=\"\">(.*?)</dd>", markup)
    assert ("kernel launches", "3") in tiles
    # Of 50 us, the first two launches, which overlap, take 25 us and the last takes 5 us.
    assert ("of the time a kernel was running", "60%") in tiles


def test_a_distillation_shows_its_curves_and_shares(page: Page) -> None:
    run = samples.distillation()
    assert page.numbers("student, distilled")[:3] == [9835392, 1.2309, 0.4356]
    whole = sum(entry["milliseconds"] for entry in run["milliseconds_per_step_by_op"])
    assert page.numbers("matmul") == pytest.approx([168, 10.02836, 10.02836 / whole])
    (wide, narrow) = [
        d for d in drawings(page.markup) if d.attrib["aria-label"] == "Loss in training"
    ]
    for drawing in (wide, narrow):
        curves = [path.attrib["d"] for path in drawing.iter(f"{SVG}path")]
        assert [curve.count("L") for curve in curves] == [39, 39, 39]


def test_a_pool_is_drawn_with_the_owners_of_its_blocks(page: Page) -> None:
    tiles = dict(re.findall(r"<dt>(.*?)</dt><dd class=\"\">(.*?)</dd>", page.markup))
    assert tiles["live"] == "3.00 MiB"
    assert tiles["held"] == "6.00 MiB"
    assert tiles["peak live"] == "5.00 MiB"
    assert tiles["largest free block"] == "1.00 MiB"
    assert tiles["fragmentation: free memory outside the largest free block"] == "50%"
    (pool_map,) = [
        d for d in drawings(page.markup) if d.attrib["aria-label"].startswith("Memory of")
    ]
    assert "fragmentation 50%" in " ".join(all_text(pool_map))
    (over_time,) = [d for d in drawings(page.markup) if "over time" in d.attrib["aria-label"]]
    assert "8 events in 6e-05 s" in all_text(over_time)
    assert page.numbers(f"{samples.HOSTILE}:9 load") == [2 << 20, 1]
    assert page.numbers(f"{samples.HOSTILE}:7 load") == [1 << 20, 1]
    assert page.numbers("peak live bytes") == [5 << 20]
    assert page.numbers("fragmentation") == [0.5]


def test_a_pool_snapshot_becomes_a_section(tmp_path: Path) -> None:
    """The snapshot of a pool in use is written to a file, from which a report is made."""
    from cukit.memory import HostProvider, MemoryPool, MemoryPoolConfig
    from cukit.memory.history import History
    from cukit.memory.snapshot import write_snapshot

    pool = MemoryPool(MemoryPoolConfig(call_site_depth=2), HostProvider())
    with History(pool) as history:
        addresses = [pool.allocate(1 << 20) for _ in range(12)]
        for address in addresses[::3]:
            pool.free(address)
        write_snapshot(tmp_path / "pool.json", pool, history)
        peak = max(sample.live for sample in history.timeline())
    assert peak == 12 << 20
    report = generate_report([tmp_path / "pool.json"])
    page = Page(report.to_html())
    tiles = dict(re.findall(r"<dt>(.*?)</dt><dd class=\"\">(.*?)</dd>", page.markup))
    assert tiles["live"] == "8.00 MiB"
    assert tiles["peak live"] == "12.0 MiB"
    assert "test_report.py" in report.to_text()


def test_json_reproduces_the_report(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path / "all.json")
    content = json.loads((tmp_path / "all.json").read_text())
    assert content["schema"] == "cukit report"
    assert content["version"] == 1
    again = generate_report([tmp_path / "all.json"], title=report.title)
    assert again.to_html() == report.to_html()
    assert again.to_dict() == report.to_dict()


def test_the_terminal_shows_the_tables(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path / "report.txt")
    text = (tmp_path / "report.txt").read_text()
    for words in ("40.2 µs", "1,370 µs", "848,871", "DTYPE=float32", "42.1 µs", samples.HOSTILE):
        assert words in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= TEXT_WIDTH


@pytest.mark.parametrize("kind", sorted(KEYS))
def test_damaged_files_are_reported(kind: str, tmp_path: Path) -> None:
    whole = samples.documents()[kind]
    (tmp_path / "damaged.json").write_text(json.dumps({**whole, KEYS[kind][-1]: [3], "models": 1}))
    if kind == "distillation":
        (tmp_path / "damaged.json").write_text(json.dumps({**whole, "models": {"teacher": {}}}))
    with pytest.raises(DataError, match=r"damaged\.json"):
        _ = generate_report([tmp_path / "damaged.json"]).sections


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "not a kind of results"),
        ('{"records": []}', "not a kind of results"),
        ('{"schema": "cukit report", "version": 99, "documents": []}', "report version 99"),
        ('{"schema": "cukit report", "version": 1, "documents": [{}]}', "damaged report"),
    ],
)
def test_values_that_are_not_results_are_rejected(
    content: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "strange.json"
    path.write_text(content)
    with pytest.raises(DataError, match=rf"strange\.json: {complaint}"):
        read_documents([path])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json: no such file"):
        read_documents([tmp_path / "absent.json"])


def test_empty_results_make_a_report() -> None:
    nothing = {"environment": {}, "records": []}
    page = Page(generate_report([nothing, {"kernels": [], "errors": []}]).to_html())
    assert "0 cases" in page.markup
    assert drawings(page.markup) == []


@pytest.mark.parametrize("pool", ["its own", "null", "absent"])
def test_a_distillation_section_includes_its_pool(pool: str) -> None:
    run = samples.distillation()
    if pool == "null":
        run["pool"] = None
    elif pool == "absent":
        del run["pool"]
    (section,) = generate_report([run]).sections
    tables = {block.title: block for block in section.blocks if isinstance(block, Table)}
    assert ("The memory pool" in tables) == (pool == "its own")
    if pool == "its own":
        cells = {row[0].text: row[1].text for row in tables["The memory pool"].rows}
        assert cells["peak live"] == "9.00 GiB"
        assert cells["allocations"] == "412,345"
        assert cells["hits of an exact-size free list"] == "99.7%"
        assert cells["fragmentation at the end"] == "25%"


def test_a_distillation_without_a_history_has_no_loss_chart() -> None:
    run = samples.distillation()
    for facts in run["models"].values():
        facts["history"] = []
    assert "Loss in training" not in generate_report([run]).to_html()


def test_an_unknown_output_format_is_rejected_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"report\.pdf"):
        generate_report([tmp_path / "absent.json"], [tmp_path / "report.pdf"])


def test_without_jinja_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(MissingDependencyError, match=re.escape(html.INSTALL)):
        generate_report([samples.kernels()]).to_html()
