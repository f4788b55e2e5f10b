"""A report as one self-contained HTML file, with inline styles, script and figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cukit.analyzer.report import svg
from cukit.analyzer.report.layout import Detail, Facts, Index, Section, Shares
from cukit.errors import MissingDependencyError

INSTALL = "pip install 'cukit[report]'"


def render(title: str, footer: str, sections: Sequence[Section]) -> str:
    """The page. Raises MissingDependencyError without Jinja2."""
    template = _environment().get_template("report.html")
    anchors = [f"{number}-{slug(section.title)}" for number, section in enumerate(sections, 1)]
    page: str = template.render(
        title=title, footer=footer, sections=list(zip(anchors, sections, strict=True))
    )
    return page.lstrip()


def packed(index: Index) -> dict[str, Any]:
    """An index in the form that report.js reads; values and details that rows share occur once."""
    values: list[dict[str, int]] = [{} for _ in index.facets]
    details: dict[Detail, int] = {}
    rows = [
        [
            [
                found.setdefault(v, len(found))
                for found, v in zip(values, entry.facets, strict=True)
            ],
            list(entry.flags),
            [details.setdefault(detail, len(details)) for detail in entry.details],
        ]
        for entry in index.entries
    ]
    return {
        "noun": index.noun,
        "facets": [
            {"name": name, "values": list(found)}
            for name, found in zip(index.facets, values, strict=True)
        ],
        "flags": index.flags,
        "details": [_packed_detail(detail) for detail in details],
        "rows": rows,
    }


def _packed_detail(detail: Detail) -> dict[str, Any]:
    if isinstance(detail, Facts):
        return {"title": detail.title, "header": detail.header, "rows": detail.rows}
    if isinstance(detail, Shares):
        return {"title": detail.title, "shares": detail.parts}
    return {
        "title": detail.title,
        "note": detail.note,
        "first": detail.first,
        "step": detail.step,
        "percents": detail.percents,
        "marked": detail.marked,
    }


def slug(title: str) -> str:
    """An anchor for `title`: its letters and digits."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _environment() -> Any:
    try:
        import jinja2
        from markupsafe import Markup, escape
    except ModuleNotFoundError:
        raise MissingDependencyError(f"an HTML report needs Jinja2: {INSTALL}") from None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cukit.analyzer.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["drawn"] = lambda draw, wide=svg.WIDE: Markup(svg.responsive(draw, wide))
    environment.globals["HALF"] = svg.HALF
    environment.globals["packed"] = packed
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters["kind"] = lambda block: type(block).__name__
    # Lets long names wrap after an underscore.
    environment.filters["breakable"] = lambda text: escape(text).replace("_", Markup("_<wbr>"))
    environment.filters["shares"] = lambda shares: ",".join(
        f"{class_}:{100 * share:.1f}" for class_, share in shares
    )
    # Figures come from this package, which escapes its input.
    environment.filters["drawing"] = Markup
    return environment
