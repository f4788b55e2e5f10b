"""Prepares a CUDA source written for nvcc or NVRTC for the host's C++ compiler.

Most of CUDA's language is emulated by macros and headers (kernels_cu/common/emulator). The rest is
rewritten here, with line numbers preserved: `extern __shared__` arrays, inline PTX, launches, and
host functions, which are removed. Device variables, and kernels that are not templates, are
registered after their definitions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from cukit.emulator.inline_ptx import translate_asm
from cukit.emulator.tokens import (
    Token,
    blank_out,
    closing,
    closing_angle,
    following,
    join,
    split,
    tokenize,
)

_DEVICE = frozenset({"__device__", "__global__", "constexpr", "consteval", "__constant__"})
_NO_LIST = frozenset(
    {"__launch_bounds__", "__attribute__", "__cluster_dims__", "__maxnreg__", "__align__",
     "alignas", "decltype", "noexcept", "__declspec", "__block_size__"}
)  # fmt: skip
_CLASS = frozenset({"struct", "class", "union", "enum"})
_DEFINE = re.compile(r"\s*#\s*define\s+(\w+)(\([^)]*\))?((?:\\\r?\n|.)*)", re.DOTALL)


@dataclass(frozen=True)
class KernelSource:
    """A `__global__` function as written in the source.

    name: qualified by its namespaces. parameters: the text between the parentheses.
    """

    name: str
    parameters: str
    template: bool
    line: int

    def __str__(self) -> str:
        parameters = " ".join(self.parameters.split())
        return f"{self.name}{'<...>' if self.template else ''}({parameters})"


@dataclass
class Rewritten:
    """text: for the host's compiler. kernels and variables: those that the text defines.

    cooperative: whether the text uses the grid as a group (`grid.sync()`).
    """

    text: str
    kernels: list[KernelSource] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    cooperative: bool = False


def device_macros(texts: Iterable[str]) -> set[str]:
    """Macros that expand to `__device__`, `__global__` and the like, in any of the sources."""
    bodies: dict[str, set[str]] = {}  # of all definitions, active or not
    for text in texts:
        for token in tokenize(text):
            if token.kind == "directive" and (match := _DEFINE.match(token.text)):
                bodies.setdefault(match[1], set()).update(re.findall(r"\w+", match[3]))
    marks = set(_DEVICE)
    while True:
        more = {name for name, words in bodies.items() if words & marks} - marks
        if not more:
            return marks
        marks |= more


def rewrite(text: str, marks: set[str], keep_host: bool = False) -> Rewritten:
    """Rewrites one source file.

    marks: words that make a function a device function (`device_macros`).
    keep_host: treat functions without such a word as device functions, as NVRTC's `-default-device`
    does.
    """
    result = Rewritten("")
    tokens = tokenize(text)
    result.cooperative = any(token.text in ("this_grid", "grid_group") for token in tokens)
    _Declarations(tokens, marks, keep_host, result).walk()
    _rewrite_statements(tokens)
    result.text = join(tokens)
    return result


# Declarations ------------------------------------------------------------------------------------


class _Declarations:
    """Traverses namespaces; registers kernels and variables, and removes host functions."""

    def __init__(
        self, tokens: list[Token], marks: set[str], keep_host: bool, result: Rewritten
    ) -> None:
        self.tokens = tokens
        self.marks = marks
        self.keep_host = keep_host
        self.result = result
        self.scopes: list[str] = []

    def walk(self) -> None:
        i = 0
        while (i := following(self.tokens, i)) < len(self.tokens):
            end = self._scope(i)
            if end is None:
                end = self._declaration(i)
            if end is None:
                return  # unbalanced, probably by conditional directives: keep the rest
            i = end

    def _scope(self, i: int) -> int | None:
        """The index after the `{` or `}` of a namespace or an `extern "C"` block, or None."""
        tokens = self.tokens
        text = tokens[i].text
        if text == "}":
            if self.scopes:
                self.scopes.pop()
            return i + 1
        if text == "inline":
            i = following(tokens, i + 1)
            text = tokens[i].text if i < len(tokens) else ""
        if text == "extern":
            i = following(tokens, i + 1)
            if i >= len(tokens) or tokens[i].kind != "text":
                return None
            i = following(tokens, i + 1)
            if i < len(tokens) and tokens[i].text == "{":
                self.scopes.append("")
                return i + 1
            return None
        if text != "namespace":
            return None
        name = ""
        i = following(tokens, i + 1)
        while i < len(tokens) and tokens[i].text not in ("{", ";", "="):
            name += tokens[i].text if not tokens[i].blank else ""
            i += 1
        if i < len(tokens) and tokens[i].text == "{":
            self.scopes.append(name)
            return i + 1
        return None

    def _declaration(self, start: int) -> int | None:
        """The index after one declaration; None if its end is not found."""
        tokens = self.tokens
        i = start
        listed: int | None = None  # index of the function's parameter list
        assigned = is_class = in_initialisers = False
        last = ""  # previous token
        words: list[str] = []
        while i < len(tokens):
            token = tokens[i]
            if token.blank or token.kind == "directive":
                i += 1
                continue
            text = token.text
            if text == ";":
                self._statement(start, i, listed)
                return i + 1
            if text == "template":
                words.append(text)
                angle = following(tokens, i + 1)
                if angle < len(tokens) and tokens[angle].text == "<":
                    end = closing_angle(tokens, angle)
                    if end is None:
                        return None
                    i, last = end + 1, ">"
                    continue
            elif text in ("(", "["):
                end = closing(tokens, i)
                if end is None:
                    return None
                if text == "(" and last not in _NO_LIST and not assigned and listed is None:
                    listed = i
                    is_class = False  # `struct Point make(...)` is a function
                words += [each.text for each in tokens[i:end] if each.text in self.marks]
                i, last = end + 1, ")"
                continue
            elif text == "{":
                end = closing(tokens, i)
                if end is None:
                    return None
                if listed is not None and not assigned and not is_class:
                    if in_initialisers and (tokens[i - 1].kind == "word" or last == ">"):
                        i, last = end + 1, "}"
                        continue
                    self._function(start, listed, end, words)
                    return end + 1
                i, last = end + 1, "}"
                continue
            elif text == "}":
                return i  # the end of the enclosing scope
            elif text == "=":
                assigned = last != "operator"
            elif text == ":" and listed is not None:
                in_initialisers = True
            elif text in _CLASS and listed is None:
                is_class = True
            if token.kind == "word":
                words.append(text)
            last = text
            i += 1
        return len(tokens)

    def _function(self, start: int, listed: int, end: int, words: list[str]) -> None:
        tokens = self.tokens
        if not self.keep_host and not self.marks & set(words):
            blank_out(tokens[start : end + 1])
            return
        if "__global__" not in words:
            return
        name = self._name_before(listed)
        close = closing(tokens, listed)
        if name is None or close is None:
            return
        template = "template" in words
        parameters = join(token for token in tokens[listed + 1 : close] if token.kind != "comment")
        kernel = KernelSource(self._qualified(name), parameters, template, tokens[start].line)
        repeated = any(other.name == kernel.name for other in self.result.kernels)
        self.result.kernels.append(kernel)
        if not template and not repeated:
            tokens[end].text += f" CUKIT_EMULATOR_KERNEL({name}, {kernel.name})"

    def _statement(self, start: int, end: int, listed: int | None) -> None:
        """Registers the device variables of a declaration that ends with a semicolon."""
        tokens = self.tokens[start:end]
        words = {token.text for token in tokens if token.kind == "word"}
        if listed is not None or not words & (self.marks - {"constexpr", "consteval"}):
            return
        if words & {"extern", "__shared__", "template", "using", "typedef", "friend", *_CLASS}:
            return
        if "__constant__" in words:
            for token in tokens:  # the macro __constant__ adds `static`
                token.text = "" if token.text == "static" else token.text
        added = ""
        for part in split(tokens, ","):
            name = _declarator(part)
            if name:
                self.result.variables.append(self._qualified(name))
                added += f" CUKIT_EMULATOR_VARIABLE({name}, {self._qualified(name)})"
        self.tokens[end].text += added

    def _name_before(self, index: int) -> str | None:
        index -= 1
        while index >= 0 and self.tokens[index].blank:
            index -= 1
        return self.tokens[index].text if self.tokens[index].kind == "word" else None

    def _qualified(self, name: str) -> str:
        return "::".join([*filter(None, self.scopes), name])


def _declarator(tokens: list[Token]) -> str | None:
    """The name that a declarator declares: the last word before its bounds or initialiser."""
    name, depth = None, 0
    for token in tokens:
        if token.text in ("(", "<"):
            depth += 1
        elif token.text in (")", ">"):
            depth -= 1
        elif token.text in ("[", "=", "{"):
            break
        elif token.kind == "word" and depth == 0:
            name = token.text
    return name


# Statements --------------------------------------------------------------------------------------


def _rewrite_statements(tokens: list[Token]) -> None:
    depth = 0
    for i, token in enumerate(tokens):
        if token.kind == "directive":
            if re.match(r"\s*#\s*define\b", token.text):
                _rewrite_macro(token)
        elif token.text == "{":
            depth += 1
        elif token.text == "}":
            depth -= 1
        elif token.text == "extern":
            _dynamic_shared(tokens, i, in_function=depth > 0)
        elif token.text == "__shared__":
            _aligned_shared(tokens, i)
            _plain_shared(tokens, i)
        elif token.text == "<<<":
            _launch(tokens, i)
        elif token.text in ("asm", "__asm__", "__asm"):
            _inline_assembly(tokens, i)
        elif token.text == "__noinline__" and not _inside_attribute(tokens, i):
            token.text = "__attribute__((noinline))"


def _rewrite_macro(directive: Token) -> None:
    match = _DEFINE.match(directive.text)
    if match is None:
        return
    body = tokenize(match[3].replace("\\\n", " \\\n"), directive.line)
    _rewrite_statements(body)
    directive.text = directive.text[: match.start(3)] + join(body)


def _dynamic_shared(tokens: list[Token], start: int, in_function: bool) -> None:
    """Makes `extern __shared__ float tile[][32];` a pointer to dynamic shared memory."""
    end = start
    while end < len(tokens) and tokens[end].text not in (";", "{", "("):
        end += 1
        if end < len(tokens) and tokens[end].text in ("__align__", "alignas", "__attribute__"):
            close = closing(tokens, following(tokens, end + 1))
            if close is None:
                return
            end = close + 1
    declaration = tokens[start:end]
    if end >= len(tokens) or tokens[end].text != ";":
        return
    if not any(token.text == "__shared__" for token in declaration):
        return
    kept: list[Token] = []
    i = start + 1
    while i < end:
        if tokens[i].text in ("__align__", "alignas", "__attribute__"):
            i = (closing(tokens, following(tokens, i + 1)) or i) + 1
            continue
        if tokens[i].text != "__shared__" and not tokens[i].blank:
            kept.append(tokens[i])
        i += 1
    bracket = next((k for k, token in enumerate(kept) if token.text == "["), len(kept))
    name = kept[bracket - 1].text
    element = " ".join(token.text for token in kept[: bracket - 1]).replace(" :: ", "::")
    memory = "::cukit::emulator::dynamic_shared_memory()"
    if bracket == len(kept):
        pointer, value = f"{element}& {name}", f"*reinterpret_cast<{element}*>({memory})"
    else:
        first = closing(kept, bracket)
        rest = join(kept[(first or bracket) + 1 :])
        pointer = f"{element} (*{name}){rest}" if rest else f"{element}* {name}"
        value = f"reinterpret_cast<{element} (*){rest}>({memory})" if rest else (
            f"reinterpret_cast<{element}*>({memory})"
        )  # fmt: skip
    line = tokens[end].line
    blank_out(tokens[start : end + 1])
    if in_function:
        tokens[start].text = f"{pointer} = {value};" + tokens[start].text
    else:
        tokens[start].text = f"\n#define {name} ({value})\n#line {line}\n"
        for token in tokens[start + 1 : end + 1]:
            token.text = ""


def _aligned_shared(tokens: list[Token], index: int) -> None:
    """Replaces `alignas` with an attribute, which g++ accepts anywhere among the specifiers."""
    after = following(tokens, index + 1)
    if after < len(tokens) and tokens[after].text == "alignas":
        close = closing(tokens, following(tokens, after + 1))
        if close is not None:
            tokens[after].text = "__attribute__((aligned"
            tokens[close].text = ")))"


def _plain_shared(tokens: list[Token], index: int) -> None:
    """Removes `static` next to `__shared__`, because the macro __shared__ adds it."""
    for i in range(max(0, index - 4), min(index + 5, len(tokens))):
        between = tokens[min(i, index) + 1 : max(i, index)]
        if tokens[i].text == "static" and all(token.kind != "punctuation" for token in between):
            tokens[i].text = ""


def _launch(tokens: list[Token], index: int) -> None:
    """Makes a launch, in remaining host code or in a kernel, an error: it is not emulated."""
    start = index
    while start > 0 and not (
        tokens[start - 1].text in (";", "{", "}", ")") or tokens[start - 1].kind == "directive"
    ):
        start -= 1
    end = index
    while end < len(tokens) and tokens[end].text != ";":
        end += 1
    blank_out(tokens[start:end])
    if start < len(tokens):
        tokens[start].text += '::cukit::emulator::not_emulated("a launch from within a program")'


def _inline_assembly(tokens: list[Token], index: int) -> None:
    start = following(tokens, index + 1)
    while start < len(tokens) and tokens[start].text in (
        "volatile", "__volatile__", "__volatile", "inline"
    ):  # fmt: skip
        start = following(tokens, start + 1)
    if start >= len(tokens) or tokens[start].text != "(":
        return
    end = closing(tokens, start)
    if end is None:
        return
    code = translate_asm(tokens[start + 1 : end])
    lines = sum(token.text.count("\n") for token in tokens[index : end + 1])
    continued = any("\\\n" in token.text for token in tokens[index : end + 1])
    for token in tokens[index : end + 1]:
        token.text = ""
    tokens[index].text = code + ("\\\n" if continued else "\n") * lines


def _inside_attribute(tokens: list[Token], index: int) -> bool:
    before = [token.text for token in tokens[max(0, index - 8) : index] if not token.blank]
    return before[-2:] == ["(", "("]
