"""What the site's builder needs beside mkdocs.yml.

Reference pages name a package, `[members]: cukit.layers`, and get an entry for each of its public
names. Docstrings are written for reStructuredText and doctest: roles become code, examples blocks.
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
    """A hook of mkdocs: before a page is converted."""
    return _MEMBERS.sub(lambda match: _entries(match[1]), markdown)


def _entries(package: str) -> str:
    """An entry for each public name, from the module that defines it."""
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
    # Made from a table when the module is imported: a function of arrays, for tensors.
    return f"## {name}\n\n`cukit.{name}` on tensors, with gradients."


def _tree(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def _defined(node: ast.stmt) -> list[str]:
    """Names that a statement gives a docstring or a value of its own."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [ast.unparse(each) for each in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []


class Docstrings(griffe.Extension):
    """Called by mkdocstrings for everything that has a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of modules, classes, functions and attributes."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"\1", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)
