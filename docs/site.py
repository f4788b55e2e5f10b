"""MkDocs hook and griffe extension of the documentation site.

A line `[members]: cukit.layers` in a reference page expands to an entry for each public name of the
package. Docstrings use reStructuredText roles and doctest examples: the extension converts roles to
inline code and examples to code blocks.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]

_MEMBERS = re.compile(r"^\[members\]: ([\w.]+)$", re.MULTILINE)
_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):(`[^`]+`)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs hook, called with the source of each page."""
    return _MEMBERS.sub(lambda match: _entries(match[1]), markdown)


def _entries(package: str) -> str:
    """Return an entry for each public name, taken from the module that defines it."""
    (names,) = (
        ast.literal_eval(node.value)
        for node in _tree(package).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return "\n\n".join([f"`import {package}`", *(_entry(package, name) for name in names)])


def _entry(module: str, name: str) -> str:
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for each in node.names:
                if (each.asname or each.name) == name:
                    return _entry(node.module, each.name)
        elif name in _defined(node):
            return f"::: {module}.{name}"
    # Generated at import time from a table: the function on arrays, applied to tensors.
    return f"## {name}\n\n`cukit.{name}` on tensors, with gradients."


def _tree(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [ast.unparse(each) for each in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []


class Docstrings(griffe.Extension):
    """Converts docstrings to Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"\1", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)
