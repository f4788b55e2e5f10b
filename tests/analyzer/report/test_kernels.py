"""The section on compiled kernels: a searchable table, and tiles that link to it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cukit.analyzer.report import generate_report
from cukit.analyzer.report.html import packed
from cukit.analyzer.report.layout import (
    Facts,
    FigureGrid,
    Index,
    SampledCurve,
    Section,
    Shares,
    Table,
    Tiles,
)
from cukit.analyzer.report.section_kernels import kernel_section
from cukit.analyzer.report.terminal import FEW_ROWS
from cukit.errors import DataError
from tests.analyzer.report import samples


def table_of(section: Section) -> tuple[Table, Index]:
    (table,) = [b for b in section.blocks if isinstance(b, Table) and b.index is not None]
    assert table.index is not None
    return table, table.index


def many(count: int) -> dict[str, Any]:
    lean, fat = samples.kernels()["kernels"]
    kernels = [
        {
            **(fat if number % 3 else lean),
            "kernel": f"kernel_{number % 10}",
            "registers": 24 + number,
        }
        for number in range(count)
    ]
    return {"kernels": kernels, "errors": []}


def test_figures_come_first_and_tiles_link_to_rows() -> None:
    section = kernel_section(samples.kernels(), "variants-7")
    kinds = [type(block).__name__ for block in section.blocks]
    assert kinds == ["Tiles", "Collapsible", "FigureGrid", "Table", "Table"]
    tiles = section.blocks[0]
    assert isinstance(tiles, Tiles)
    links = {tile.label: tile.leads_to for tile in tiles.tiles}
    assert links["variants that spill registers"] == "#variants-7?flag=spills"
    markup = generate_report([samples.benchmarks(), samples.kernels()]).to_html()
    assert 'href="#variants-2?flag=spills"' in markup
    assert 'id="variants-2"' in markup


def test_a_tile_without_rows_has_no_link() -> None:
    lean, _ = samples.kernels()["kernels"]
    section = kernel_section({"kernels": [lean], "errors": []})
    assert isinstance(section.blocks[0], Tiles)
    spills = section.blocks[0].tiles[2]
    assert (spills.value, spills.leads_to) == ("0", "")


def test_rows_have_their_op_faults_and_details() -> None:
    _, index = table_of(kernel_section(samples.kernels()))
    lean, fat = index.entries
    # Records of older versions have no op: the kernel's name is used instead.
    assert lean.facets == ("rms_norm", "layers", "rms_norm", "sm_90a", "threads")
    assert fat.facets == ("rms_norm_backward", "layers", "rms_norm", "sm_90a", "registers")
    assert lean.flags == ()
    assert fat.flags == ("spills", "advice")
    titles = [detail.title for detail in fat.details]
    assert titles == [
        "Advice", "Instructions in the code", "Memory accesses in the code",
        "Occupancy over threads per block", "Compiled from",
    ]  # fmt: skip
    advice, mix, accesses, curve, origin = fat.details
    assert isinstance(advice, Facts)
    assert {"8 bytes stored and 16 loaded per thread at 128 registers"} <= {
        r[2] for r in advice.rows
    }
    assert isinstance(mix, Shares)
    assert [(name, count) for _, name, count in mix.parts] == [
        ("floating point", 300), ("integer and moves", 192), ("global memory", 8),
    ]  # fmt: skip
    assert isinstance(accesses, Facts)
    assert ("load, 16 bytes", "3") in accesses.rows
    assert ("atomic", "2") in accesses.rows
    assert isinstance(curve, SampledCurve)
    assert curve.percents[(512 - curve.first) // curve.step] == 25
    assert isinstance(origin, Facts)
    assert ("DTYPE", "float32") in origin.rows


def test_older_records_have_no_figures_of_instructions() -> None:
    lean, _ = samples.kernels()["kernels"]
    section = kernel_section({"kernels": [lean], "errors": []})
    (grid,) = [block for block in section.blocks if isinstance(block, FigureGrid)]
    assert [figure.title for figure in grid.figures] == ["Theoretical occupancy of the variants"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("instruction_mix", {"source": "decoded", "instructions": 0, "by_class": {"control": 1}}),
        ("instruction_mix", {"instructions": "many"}),
        ("memory_access", {"widths": [{"operation": "load", "bits": 7, "instructions": 1}]}),
        ("defines", ["DTYPE"]),
        ("occupancy", None),
    ],
)
def test_damaged_records_are_named(field: str, value: Any) -> None:
    content = samples.kernels()
    content["kernels"][1][field] = value
    report = generate_report([content])
    for write in (report.to_html, report.to_text):
        with pytest.raises(DataError, match="damaged kernels"):
            write()


def test_a_spill_count_given_as_text_is_shown() -> None:
    content = samples.kernels()
    content["kernels"][1]["spill_store_bytes"] = "8"
    _, index = table_of(kernel_section(content))
    assert index.entries[1].flags == ("spills", "advice")


def test_an_index_is_packed_without_repetition() -> None:
    _, index = table_of(kernel_section(many(300)))
    found = packed(index)
    assert len(found["rows"]) == 300
    assert len(found["facets"][0]["values"]) == len({entry.facets[0] for entry in index.entries})
    assert len(found["details"]) < sum(len(entry.details) for entry in index.entries) / 2
    for row, entry in zip(found["rows"], index.entries, strict=True):
        values, flags, details = row
        names = [found["facets"][n]["values"][v] for n, v in enumerate(values)]
        assert tuple(names) == entry.facets
        assert tuple(flags) == entry.flags
        titles = [found["details"][number]["title"] for number in details]
        assert titles == [detail.title for detail in entry.details]


@pytest.mark.parametrize("count", [FEW_ROWS, FEW_ROWS + 1, 1000])
def test_many_rows_are_grouped_in_a_terminal(count: int) -> None:
    text = generate_report([many(count)]).to_text()
    assert len(text.splitlines()) < 2 * FEW_ROWS
    assert ("DTYPE=float32" in text) == (count <= FEW_ROWS)
    if count > FEW_ROWS:
        (line,) = re.findall(r"^rms_norm_backward .*$", text, re.M)
        assert f"{count - len(range(0, count, 3))}  512" in re.sub(r" {2,}", "  ", line)
        assert "24 B" in line
