"""Translates inline PTX to C++, one `asm` statement at a time, for the most common instructions.

The statement's operands and the registers that it declares become local variables, its labels local
labels; each instruction becomes C++, mostly calls to kernels_cu/common/emulator/inline_ptx.h. A
launch that reaches an instruction without a translation ends with a message that names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cukit.emulator.ptx_instructions import instruction
from cukit.emulator.ptx_operands import TYPES, E, P, Statement, UntranslatedError, label_of
from cukit.emulator.tokens import Token, closing, join, split

_REGISTERS = {
    "r": "std::uint32_t", "l": "std::uint64_t", "f": "float", "d": "double",
    "h": "std::uint16_t", "q": "unsigned __int128", "n": "auto", "C": "auto",
}  # fmt: skip


def translate_asm(tokens: Sequence[Token]) -> str:
    """C++ for the text between the parentheses of an `asm`."""
    statement = Statement()
    parts = _colon_parts(tokens)
    template = _text_of(parts[0])
    if template is None:
        return _refusal("asm whose text a macro assembles")
    before: list[str] = []
    after: list[str] = []
    operands = [*_operands(parts, 1), *_operands(parts, 2)]
    for index, (name, constraint, expression) in enumerate(operands):
        variable = f"cukit_{index}"
        statement.names[f"%{index}"] = variable
        if name:
            statement.names[f"%[{name}]"] = variable
        kind = _REGISTERS.get(constraint.strip("=+&"))
        if kind is None:
            return _refusal(f"asm with the constraint {constraint}")
        if "=" in constraint:
            before.append(f"{kind} {variable}{{}};")
        elif kind == "auto":
            before.append(f"const auto {variable} = {expression};")
        else:
            before.append(f"{kind} {variable} = {P}get<{kind}>({expression});")
        if "=" in constraint or "+" in constraint:
            after.append(f"{P}put({expression}, {variable});")
    try:
        code = [instruction(statement, text) for text in _instructions(template, statement)]
    except UntranslatedError as error:
        return _refusal(str(error))
    labels = f"__label__ {', '.join(statement.labels)}; " if statement.labels else ""
    body = " ".join([*before, *statement.declarations, *code, *after])
    return f"do {{ {labels}{body} }} while (0)"


def _refusal(what: str) -> str:
    text = what.replace("\\", "\\\\").replace('"', '\\"')
    return f'{E}not_emulated("inline PTX: {text}")'


# The parts of a statement ------------------------------------------------------------------------


def _colon_parts(tokens: Sequence[Token]) -> list[list[Token]]:
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        if depth == 0 and token.text in (":", "::"):
            parts += [[] for _ in token.text]
        else:
            parts[-1].append(token)
    return parts


def _text_of(tokens: Sequence[Token]) -> str | None:
    """The value of adjacent string literals; None if there is anything else."""
    text = ""
    for token in tokens:
        if token.blank:
            continue
        if token.kind != "text":
            return None
        quoted = re.fullmatch(r'(?:u8|[uUL])?"(.*)"', token.text, re.DOTALL)
        raw = re.fullmatch(r'R"([^(]*)\((.*)\)\1"', token.text, re.DOTALL)
        if raw:
            text += raw[2]
        elif quoted:
            text += re.sub(r"\\(.)", lambda m: {"n": "\n", "t": " "}.get(m[1], m[1]), quoted[1])
    return text


def _operands(parts: Sequence[Sequence[Token]], index: int) -> list[tuple[str, str, str]]:
    """Symbolic name, constraint and expression of each operand in one part."""
    found = []
    for tokens in split(parts[index], ",") if len(parts) > index else []:
        seen = [token for token in tokens if not token.blank]
        if not seen:
            continue
        name = ""
        if seen[0].text == "[":
            name, seen = seen[1].text, seen[3:]
        constraint = seen[0].text.strip('"')
        start = tokens.index(seen[1])
        end = closing(tokens, start) or len(tokens)
        found.append((name, constraint, join(tokens[start : end + 1])))
    return found


def _instructions(template: str, statement: Statement) -> list[str]:
    """The instructions and labels. Declarations are not returned but added to `statement`."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", template, flags=re.DOTALL).replace("%%", "\0")
    found = []
    for piece in text.split(";"):
        piece = " ".join(piece.split()).strip()
        while piece:
            label = re.match(r"([A-Za-z_$%][\w$%=]*) ?:(?!:)", piece)
            if piece[0] in "{}":
                piece = piece[1:].strip()
            elif label:
                found.append(f"{label_of(label[1], statement)}:")
                piece = piece[label.end() :].strip()
            else:
                break
        if piece.endswith("}") and piece.count("}") > piece.count("{"):
            piece = piece[:-1].strip()
        if piece.startswith(".reg"):
            _declare(piece, statement)
        elif piece:
            found.append(piece)
    return found


def _declare(text: str, statement: Statement) -> None:
    match = re.match(r"\.reg ?(?:\.v[24] ?)?\.(\w+) (.*)", text)
    if match is None or match[1] not in TYPES:
        raise UntranslatedError(text)
    for name in re.split(r"[ ,]+", match[2].strip()):
        family = re.fullmatch(r"(.*)<(\d+)>", name)
        names = [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]
        for each in names:
            variable = "ptx_" + re.sub(r"\W", "_", each)
            statement.names[each] = variable
            kind = TYPES[
                match[1].replace("bf16", "f16").replace("f16x2", "b32").replace("f16", "b16")
            ]
            statement.declarations.append(f"{kind} {variable}{{}};")
