"""Text from untrusted files reaches terminals and pages only as plain text."""

from __future__ import annotations

import io
import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from cukit.analyzer.report import generate_report
from cukit.analyzer.report.numbers import all_printable, printable
from cukit.cli import run
from cukit.commands._console import PrintableConsole
from cukit.errors import DataError
from tests.analyzer.report import samples
from tests.analyzer.report.pages import Page

HOSTILE = (
    "\x1b[2J\x1b]0;title\x07\x9b31m\x00\r\u202e[red][/][bold"
    "</script></style>--><img src=x onerror=alert(1)>\"'&{{7*7}}{%"
)
"""Escape codes, a right-to-left override, and markup of rich, HTML, SVG and Jinja."""

Capture = pytest.CaptureFixture[str]


def is_plain(text: str) -> bool:
    """True for text without control characters and invisible formatting characters."""
    return all(unicodedata.category(c) not in ("Cc", "Cf", "Cs") or c in "\n\t" for c in text)


def names_of_texts(content: Any, name: str = "") -> Iterator[str]:
    """Names of all text fields, at any depth."""
    if isinstance(content, str):
        yield name
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from names_of_texts(value, key)
    elif isinstance(content, list):
        for value in content:
            yield from names_of_texts(value, name)


def poisoned(content: Any, field: str, name: str = "") -> Any:
    """A copy with hostile text appended to every text field called `field`."""
    if isinstance(content, str):
        return content + HOSTILE if name == field else content
    if isinstance(content, dict):
        return {key: poisoned(value, field, key) for key, value in content.items()}
    if isinstance(content, list):
        return [poisoned(value, field, name) for value in content]
    return content


ENUMERATED = ("arch", "state")
"""Text fields with a fixed set of values; any other value is an error."""


@pytest.mark.parametrize("kind", sorted(samples.documents()))
def test_no_text_of_a_file_becomes_markup_or_an_escape_code(kind: str) -> None:
    content = samples.documents()[kind]
    clean = Page(generate_report([content]).to_html())
    shown = 0
    for field in dict.fromkeys(names_of_texts(content)):
        report = generate_report([poisoned(content, field)])
        if field in ENUMERATED and kind != "analysis":
            with pytest.raises(DataError):
                report.to_html()
            continue
        page, text = report.to_html(), report.to_text()
        assert is_plain(page), field
        assert is_plain(text), field
        found = Page(page)
        assert "img" not in found.tags, field
        assert "onerror" not in found.attributes, field
        assert found.tags.count("script") == clean.tags.count("script"), field
        shown += "onerror" in page
    assert shown, "no hostile text is in the page"


def test_keys_are_escaped_like_values() -> None:
    kernels = samples.kernels()
    kernels["kernels"][1]["defines"] = {HOSTILE: HOSTILE}
    kernels["kernels"][1]["instruction_mix"]["by_class"][HOSTILE] = 1
    report = generate_report([kernels], title=HOSTILE)
    assert is_plain(report.to_html())
    assert is_plain(report.to_text())
    assert "img" not in Page(report.to_html()).tags


def test_the_index_of_a_table_cannot_end_its_script() -> None:
    kernels = samples.kernels()
    kernels["kernels"][1]["op"] = HOSTILE
    markup = generate_report([kernels]).to_html()
    _, _, rest = markup.partition('<script type="application/json"')
    packed = rest[rest.index(">") + 1 : rest.index("</script>")]
    index = json.loads(packed)
    assert printable(HOSTILE) in index["facets"][0]["values"]
    assert "<" not in packed


@pytest.mark.parametrize("command", ["report", "compare"])
def test_commands_print_no_escape_codes(command: str, tmp_path: Path, capsys: Capture) -> None:
    content = samples.benchmarks()
    for field in ("op", "case", "dtype", "gpu", "driver"):
        content = poisoned(content, field)
    path = tmp_path / f"results{HOSTILE.replace('/', '').replace(chr(0), '')}.json"
    path.write_text(json.dumps(content))
    assert run([command, *[str(path)] * (2 if command == "compare" else 1)]) == 0
    captured = capsys.readouterr()
    assert "onerror" in captured.out
    assert is_plain(captured.out + captured.err)


def test_paths_in_errors_are_printable(tmp_path: Path, capsys: Capture) -> None:
    for command in ("report", "compare", "replay", "analyze"):
        path = str(tmp_path / "\x1b[2Jno\udcff.json")
        assert run([command, path, path] if command == "compare" else [command, path]) == 2
        error = capsys.readouterr().err
        assert "no" in error
        assert is_plain(error)


def test_a_terminal_gets_style_codes_only() -> None:
    console = PrintableConsole(file=io.StringIO(), force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(Text(HOSTILE, style="red"))
        console.print("\x1b]0;title\x07", markup=False)
    written = captured.get()
    assert "\x1b[31m" in written
    assert "\x1b[2J" not in written
    assert "\x1b]" not in written
    assert "\x07" not in written


def test_printable_text_is_unchanged() -> None:
    text = "µs, → 90%\n\ttab, “quotes”, 漢字"
    assert printable(text) == text
    assert all_printable({"a\x1b": ["b\x00", 1, None, True]}) == {
        "a\ufffd": ["b\ufffd", 1, None, True]
    }
