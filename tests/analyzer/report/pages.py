"""Parses report pages: tables, SVG drawings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from xml.etree import ElementTree

from cukit.analyzer.report import svg

SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Page(HTMLParser):
    """The tables of a page as rows of (text, sort value), and its tags and attributes."""

    markup: str
    tables: list[list[list[tuple[str, float | None]]]] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self._value: float | None = None
        self._text: str | None = None
        self.feed(self.markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)
        found = dict(attrs)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")
        ]
        if tag == "tbody":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag == "td":
            value = found.get("data-value")
            self._value, self._text = None if value is None else float(value), ""

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            assert self._text is not None
            self.tables[-1][-1].append((self._text, self._value))
            self._text = None

    def rows(self, *beginning: str) -> list[list[tuple[str, float | None]]]:
        """Rows of all tables that start with these cells."""
        return [
            row
            for table in self.tables
            for row in table
            if [text for text, _ in row[: len(beginning)]] == list(beginning)
        ]

    def numbers(self, *beginning: str) -> list[float]:
        """Sort values of the only row that starts with these cells."""
        (row,) = self.rows(*beginning)
        return [value for _, value in row if value is not None]


def drawings(markup: str) -> list[ElementTree.Element]:
    """Every SVG of a page, parsed as XML; raises if one is malformed."""
    return [ElementTree.fromstring(part) for part in re.findall(r"<svg.*?</svg>", markup, re.S)]


def all_text(drawing: ElementTree.Element) -> list[str]:
    """The text of a drawing, without tooltips."""
    return ["".join(node.itertext()) for node in drawing.iter(f"{SVG}text")]


def extents(drawing: ElementTree.Element) -> Iterator[tuple[float, float]]:
    """Start and end of each line of text, with the widths that the figures assume."""
    for node in drawing.iter(f"{SVG}text"):
        if "x" not in node.attrib:
            continue  # rotated text
        large = {"label", "title"} & set(node.get("class", "").split())
        width = svg.text_width("".join(node.itertext()), 12.5 if large else svg.TICK_SIZE)
        shift = {"end": 1.0, "middle": 0.5}.get(node.get("text-anchor", ""), 0.0)
        left = float(node.attrib["x"]) - shift * width
        yield left, left + width
