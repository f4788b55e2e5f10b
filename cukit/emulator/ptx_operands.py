"""Operands of PTX instructions as C++ expressions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

P = "::cukit::emulator::ptx::"
E = "::cukit::emulator::"

TYPES = {
    "s8": "std::int8_t", "u8": "std::uint8_t", "b8": "std::uint8_t",
    "s16": "std::int16_t", "u16": "std::uint16_t", "b16": "std::uint16_t",
    "s32": "std::int32_t", "u32": "std::uint32_t", "b32": "std::uint32_t",
    "s64": "std::int64_t", "u64": "std::uint64_t", "b64": "std::uint64_t",
    "f16": "__half", "f16x2": "__half2", "bf16": "__nv_bfloat16", "bf16x2": "__nv_bfloat162",
    "f32": "float", "f64": "double", "pred": "bool", "b128": "unsigned __int128",
}  # fmt: skip
_SPECIAL = {
    "laneid": "CUKIT_OF_SELF(lane)",
    "warpid": f"({P}thread_number() / 32)",
    "nwarpid": f"(({P}block_threads() + 31) / 32)",
    "smid": "0u", "nsmid": "1u", "gridid": "0ull", "dynamic_smem_size": "0u",
    "clock": "static_cast<std::uint32_t>(clock64())", "clock64": "clock64()",
    "clock_hi": "static_cast<std::uint32_t>(clock64() >> 32)",
    "globaltimer": "clock64()", "globaltimer_lo": "static_cast<std::uint32_t>(clock64())",
    "lanemask_eq": "(1u << CUKIT_OF_SELF(lane))",
    "lanemask_lt": "((1u << CUKIT_OF_SELF(lane)) - 1)",
    "lanemask_le": "((2u << CUKIT_OF_SELF(lane)) - 1)",
    "lanemask_gt": "(~0u << CUKIT_OF_SELF(lane) << 1)",
    "lanemask_ge": "(~0u << CUKIT_OF_SELF(lane))",
    "cluster_ctarank": "CUKIT_OF_SELF(cluster_rank)",
    "cluster_nctarank": "CUKIT_OF_SELF(cluster_blocks)",
}  # fmt: skip
_SPECIAL |= {
    f"{name}.{axis}": f"{variable}.{axis}"
    for name, variable in (("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"),
                           ("nctaid", "gridDim"))
    for axis in "xyz"
}  # fmt: skip


class UntranslatedError(Exception):
    """Raised for an instruction, or a form of one, that has no translation."""


@dataclass
class Statement:
    """The state of translating one `asm` statement."""

    names: dict[str, str] = field(default_factory=dict)
    """Operands (`%0`, `%[x]`) and declared registers, as C++ variables."""
    declarations: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


def label_of(name: str, statement: Statement) -> str:
    """The C++ label for a PTX label, which is declared in the statement."""
    label = "label_" + re.sub(r"\W", "_", name)
    if label not in statement.labels:
        statement.labels.append(label)
    return label


def split_operands(text: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def value_of(statement: Statement, text: str) -> str:
    """A C++ expression for a register, a special register or a number."""
    text = text.strip()
    if text in statement.names:
        return statement.names[text]
    if text.startswith("!"):
        return f"!{value_of(statement, text[1:])}"
    if text.startswith("-") and text[1:] in statement.names:
        return f"-{value_of(statement, text[1:])}"
    if text.startswith(("\0", "%")) and text[1:] in _SPECIAL:
        return _SPECIAL[text[1:]]
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return f"{E}bit_cast<float>(0x{text[2:]}u)"
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return f"{E}bit_cast<double>(0x{text[2:]}ull)"
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        return f"{text.rstrip('U')}ll" if len(text) > 9 and text[:2] != "0x" else text.rstrip("U")
    if re.fullmatch(r"-?\d*\.\d+([eE][+-]?\d+)?|-?\d+\.", text):
        return text
    raise UntranslatedError(f"operand {text}")


def elements_of(statement: Statement, text: str) -> list[str]:
    """The elements of a vector operand, or the operand itself."""
    text = text.strip()
    return [value_of(statement, each) for each in split_operands(text.strip("{}"))]


def address_of(statement: Statement, text: str) -> str:
    """The address in brackets, as an integer expression."""
    inside = text.strip().strip("[]").strip()
    base, sign, offset = re.fullmatch(r"([^+-]+)(?:([+-])(.*))?", inside).groups()  # type: ignore[union-attr]
    number = f"{P}get<std::uint64_t>({value_of(statement, base)})"
    return f"({number} {sign} ({value_of(statement, offset)}))" if offset else number


def pointer_to(statement: Statement, text: str, kind: str, parts: Sequence[str], count: int) -> str:
    """A pointer to `count` elements, in the state space that the instruction names."""
    where = "shared" if any(p.startswith("shared") for p in parts) else "generic"
    address = address_of(statement, text)
    return f"{P}{where}_pointer<{kind}>({address}, {count})"
