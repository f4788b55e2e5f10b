"""Tokens of C++ and CUDA sources: enough to find declarations, not to parse expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_PARTS = (
    ("space", r"(?:[ \t\r\f\v]|\\\r?\n)+"),
    ("newline", r"\n"),
    ("comment", r"//(?:\\\r?\n|[^\n])*|/\*.*?\*/"),
    ("string", r'(?:u8|[uUL])?R"(?P<fence>[^()\\\s]*)\(.*?\)(?P=fence)"'),
    ("text", r'(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"'),
    ("character", r"'(?:\\.|[^'\\\n])+'"),
    ("word", r"[A-Za-z_$]\w*"),
    ("number", r"\.?\d(?:[eEpP][+-]|[\w.]|'\w)*"),
    ("punctuation", r"<<<|::|->|."),
)
_TOKEN = re.compile("|".join(f"(?P<{name}>{text})" for name, text in _PARTS), re.DOTALL)
_DIRECTIVE = re.compile(r"[ \t]*\#(?:\\\r?\n|/\*.*?\*/|//[^\n]*|[^\n])*", re.DOTALL)

_OPEN = {"(": ")", "[": "]", "{": "}"}


@dataclass
class Token:
    """kind: one of `_PARTS`, or "directive" for a whole line of the preprocessor.

    text may be replaced; line is the line of the first character.
    """

    kind: str
    text: str
    line: int

    @property
    def blank(self) -> bool:
        """Whether the compiler ignores it."""
        return self.kind in ("space", "newline", "comment")


def tokenize(text: str, line: int = 1) -> list[Token]:
    """Splits a source, whose first line has the number `line`. `join` restores the text."""
    tokens: list[Token] = []
    position, line_start = 0, True
    while position < len(text):
        match = _DIRECTIVE.match(text, position) if line_start else None
        kind = "directive"
        if match is None:
            match = _TOKEN.match(text, position)
            assert match is not None
            kind = next(name for name, _ in _PARTS if match[name] is not None)
            kind = {"string": "text"}.get(kind, kind)
        token = Token(kind, match[0], line)
        tokens.append(token)
        line += token.text.count("\n")
        line_start = kind == "newline" or (line_start and token.blank)
        position = match.end()
    return tokens


def join(tokens: Iterable[Token]) -> str:
    """The text of the tokens."""
    return "".join(token.text for token in tokens)


def following(tokens: Sequence[Token], index: int) -> int:
    """The first index from `index` on whose token is neither blank nor a directive, or the end."""
    while index < len(tokens) and (tokens[index].blank or tokens[index].kind == "directive"):
        index += 1
    return index


def closing(tokens: Sequence[Token], index: int) -> int | None:
    """Index of the bracket that closes the one at `index`; None if it is not closed."""
    stack: list[str] = []
    for i in range(index, len(tokens)):
        if tokens[i].kind != "punctuation":
            continue
        text = tokens[i].text
        if text in _OPEN:
            stack.append(_OPEN[text])
        elif text in _OPEN.values():
            if not stack or stack.pop() != text:
                return None
            if not stack:
                return i
    return None


def closing_angle(tokens: Sequence[Token], index: int) -> int | None:
    """Index of the `>` that closes the `<` at `index`, as in a list of template parameters."""
    depth, i = 0, index
    while i < len(tokens):
        text = tokens[i].text if tokens[i].kind == "punctuation" else ""
        if text in _OPEN:
            end = closing(tokens, i)
            if end is None:
                return None
            i = end
        elif text in (";", "}", ")"):
            return None
        elif text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return None


def blank_out(tokens: Iterable[Token]) -> None:
    """Removes tokens but keeps line numbers; conditional directives and macros stay."""
    for token in tokens:
        if token.kind == "directive" and not re.match(r"\s*#\s*(include|pragma)\b", token.text):
            continue
        token.text = "\n" * token.text.count("\n")


def split(tokens: Sequence[Token], separator: str) -> list[list[Token]]:
    """Splits at each `separator` that is not inside (), [] or {}."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.kind == "punctuation":
            depth += (token.text in _OPEN) - (token.text in _OPEN.values())
            if token.text == separator and depth == 0:
                parts.append([])
                continue
        parts[-1].append(token)
    return parts
