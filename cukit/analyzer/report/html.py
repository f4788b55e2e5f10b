"""A report as one HTML file: style, script and drawings inside, nothing fetched from anywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cukit.analyzer.report import svg
from cukit.analyzer.report.layout import Section
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


def slug(title: str) -> str:
    """Letters and digits of `title`, for an anchor."""
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
    environment.globals["drawn"] = lambda draw: Markup(svg.responsive(draw))
    environment.globals["colour"] = svg.colour
    environment.filters["kind"] = lambda block: type(block).__name__
    # Long names break after an underscore rather than anywhere.
    environment.filters["breakable"] = lambda text: escape(text).replace("_", Markup("_<wbr>"))
    # Drawings come from our own code, which escapes what it was given.
    environment.filters["drawing"] = Markup
    return environment
