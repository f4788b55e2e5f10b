"""Inline PTX as C++: the instructions that public kernels use most, one `asm` statement at a time.

The statement's operands become local variables, the registers that it declares too, its labels
local labels; each instruction becomes a call of kernels_cu/common/emulator/inline_ptx.h. One that
has no translation stops the launch that reaches it, with its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cukit.emulator.tokens import Token, closing, join, split

_P = "::cukit::emulator::ptx::"
_E = "::cukit::emulator::"

_REGISTERS = {
    "r": "std::uint32_t", "l": "std::uint64_t", "f": "float", "d": "double",
    "h": "std::uint16_t", "q": "unsigned __int128", "n": "auto", "C": "auto",
}  # fmt: skip
_TYPES = {
    "s8": "std::int8_t", "u8": "std::uint8_t", "b8": "std::uint8_t",
    "s16": "std::int16_t", "u16": "std::uint16_t", "b16": "std::uint16_t",
    "s32": "std::int32_t", "u32": "std::uint32_t", "b32": "std::uint32_t",
    "s64": "std::int64_t", "u64": "std::uint64_t", "b64": "std::uint64_t",
    "f16": "__half", "f16x2": "__half2", "bf16": "__nv_bfloat16", "bf16x2": "__nv_bfloat162",
    "f32": "float", "f64": "double", "pred": "bool", "b128": "unsigned __int128",
}  # fmt: skip
_WIDE = {"s16": "std::int32_t", "u16": "std::uint32_t", "s32": "std::int64_t",
         "u32": "std::uint64_t"}  # fmt: skip
_SPECIAL = {
    "laneid": f"{_E}self().lane",
    "warpid": f"({_P}thread_number() / 32)",
    "nwarpid": f"(({_P}block_threads() + 31) / 32)",
    "smid": "0u", "nsmid": "1u", "gridid": "0ull", "dynamic_smem_size": "0u",
    "clock": "static_cast<std::uint32_t>(clock64())", "clock64": "clock64()",
    "clock_hi": "static_cast<std::uint32_t>(clock64() >> 32)",
    "globaltimer": "clock64()", "globaltimer_lo": "static_cast<std::uint32_t>(clock64())",
    "lanemask_eq": f"(1u << {_E}self().lane)",
    "lanemask_lt": f"((1u << {_E}self().lane) - 1)",
    "lanemask_le": f"((2u << {_E}self().lane) - 1)",
    "lanemask_gt": f"(~0u << {_E}self().lane << 1)",
    "lanemask_ge": f"(~0u << {_E}self().lane)",
    "cluster_ctarank": f"{_E}self().cluster_rank",
    "cluster_nctarank": f"{_E}self().cluster_blocks",
}  # fmt: skip
_SPECIAL |= {
    f"{name}.{axis}": f"{variable}.{axis}"
    for name, variable in (("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"),
                           ("nctaid", "gridDim"))
    for axis in "xyz"
}  # fmt: skip
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
            "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
            "equ": "==", "neu": "!=", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}  # fmt: skip
_BINARY = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^", "div": "/", "rem": "%"}
_MATH = {"sqrt": "sqrt", "ex2": "exp2", "lg2": "log2", "sin": "sin", "cos": "cos", "tanh": "tanh"}
_ATOMICS = {"add": "atomicAdd", "min": "atomicMin", "max": "atomicMax", "and": "atomicAnd",
            "or": "atomicOr", "xor": "atomicXor", "exch": "atomicExch", "cas": "atomicCAS",
            "inc": "atomicInc", "dec": "atomicDec"}  # fmt: skip
_SHUFFLES = {"up": "ShuffleUp", "down": "ShuffleDown", "bfly": "ShuffleXor", "idx": "Shuffle"}
_NUMBERS = {"f16": "F16", "bf16": "BF16", "tf32": "TF32", "e4m3": "E4M3", "e5m2": "E5M2",
            "s8": "S8", "u8": "U8"}  # fmt: skip

_NOTHING = re.compile(
    r"prefetch|prefetchu|applypriority|discard|griddepcontrol|setmaxnreg|pragma|createpolicy"
)


class _Untranslated(Exception):
    """An instruction, or a form of one, that has no translation."""


@dataclass
class _Statement:
    """What is known of one `asm` while its instructions are translated."""

    names: dict[str, str] = field(default_factory=dict)
    """Operands (`%0`, `%[x]`) and declared registers, as C++ variables."""
    declarations: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


def translate_asm(tokens: Sequence[Token]) -> str:
    """C++ for what stands between the parentheses of an `asm`."""
    statement = _Statement()
    parts = _colon_parts(tokens)
    template = _text_of(parts[0])
    if template is None:
        return _refusal("asm that a macro puts together")
    before: list[str] = []
    after: list[str] = []
    operands = [*_operands(parts, 1), *_operands(parts, 2)]
    for index, (name, constraint, expression) in enumerate(operands):
        variable = f"cukit_{index}"
        statement.names[f"%{index}"] = variable
        if name:
            statement.names[f"%[{name}]"] = variable
        kind = _REGISTERS.get(constraint.strip("=+&"), None)
        if kind is None:
            return _refusal(f"asm with the constraint {constraint}")
        if "=" in constraint:
            before.append(f"{kind} {variable}{{}};")
        elif kind == "auto":
            before.append(f"const auto {variable} = {expression};")
        else:
            before.append(f"{kind} {variable} = {_P}get<{kind}>({expression});")
        if "=" in constraint or "+" in constraint:
            after.append(f"{_P}put({expression}, {variable});")
    try:
        code = [_instruction(statement, text) for text in _instructions(template, statement)]
    except _Untranslated as error:
        return _refusal(str(error))
    labels = f"__label__ {', '.join(statement.labels)}; " if statement.labels else ""
    body = " ".join([*before, *statement.declarations, *code, *after])
    return f"do {{ {labels}{body} }} while (0)"


def _refusal(what: str) -> str:
    text = what.replace("\\", "\\\\").replace('"', '\\"')
    return f'{_E}not_emulated("inline PTX: {text}")'


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
    """The string that adjacent literals make; None where there is anything else."""
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
    """Symbolic name, constraint and expression of each operand of one part."""
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


def _instructions(template: str, statement: _Statement) -> list[str]:
    """The single instructions; declarations are noted on the way."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", template, flags=re.DOTALL).replace("%%", "\0")
    found = []
    for piece in text.split(";"):
        piece = " ".join(piece.split()).strip()
        while piece:
            label = re.match(r"([A-Za-z_$%][\w$%=]*) ?:(?!:)", piece)
            if piece[0] in "{}":
                piece = piece[1:].strip()
            elif label:
                found.append(f"{_label(label[1], statement)}:")
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


def _label(name: str, statement: _Statement) -> str:
    label = "label_" + re.sub(r"\W", "_", name)
    if label not in statement.labels:
        statement.labels.append(label)
    return label


def _declare(text: str, statement: _Statement) -> None:
    match = re.match(r"\.reg ?(?:\.v[24] ?)?\.(\w+) (.*)", text)
    if match is None or match[1] not in _TYPES:
        raise _Untranslated(text)
    for name in re.split(r"[ ,]+", match[2].strip()):
        family = re.fullmatch(r"(.*)<(\d+)>", name)
        names = [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]
        for each in names:
            variable = "ptx_" + re.sub(r"\W", "_", each)
            statement.names[each] = variable
            kind = _TYPES[match[1]]
            kind = {"__half2": "std::uint32_t", "__nv_bfloat162": "std::uint32_t",
                    "__half": "std::uint16_t", "__nv_bfloat16": "std::uint16_t"}.get(kind, kind)  # fmt: skip
            statement.declarations.append(f"{kind} {variable}{{}};")


# Operands of instructions ------------------------------------------------------------------------


def _split_operands(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _value(statement: _Statement, text: str) -> str:
    """A register, a special register or a number, as a C++ expression."""
    text = text.strip()
    if text in statement.names:
        return statement.names[text]
    if text.startswith("!"):
        return f"!{_value(statement, text[1:])}"
    if text.startswith("-") and text[1:] in statement.names:
        return f"-{_value(statement, text[1:])}"
    if text.startswith(("\0", "%")) and text[1:] in _SPECIAL:
        return _SPECIAL[text[1:]]
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return f"{_E}bit_cast<float>(0x{text[2:]}u)"
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return f"{_E}bit_cast<double>(0x{text[2:]}ull)"
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        return f"{text.rstrip('U')}ll" if len(text) > 9 and text[:2] != "0x" else text.rstrip("U")
    if re.fullmatch(r"-?\d*\.\d+([eE][+-]?\d+)?|-?\d+\.", text):
        return text
    raise _Untranslated(f"operand {text}")


def _list(statement: _Statement, text: str) -> list[str]:
    """The elements of a vector operand, or the operand itself."""
    text = text.strip()
    return [_value(statement, each) for each in _split_operands(text.strip("{}"))]


def _address(statement: _Statement, text: str) -> str:
    """What stands in brackets, as a number."""
    inside = text.strip().strip("[]").strip()
    base, sign, offset = re.fullmatch(r"([^+-]+)(?:([+-])(.*))?", inside).groups()  # type: ignore[union-attr]
    number = f"{_P}get<std::uint64_t>({_value(statement, base)})"
    return f"({number} {sign} ({_value(statement, offset)}))" if offset else number


def _pointer(statement: _Statement, text: str, kind: str, parts: Sequence[str], count: int) -> str:
    """A pointer to `count` elements, in the state space that the instruction names."""
    where = "shared" if any(p.startswith("shared") for p in parts) else "generic"
    address = _address(statement, text)
    return f"{_P}{where}_pointer<{kind}>({address}, {count})"


# Instructions ------------------------------------------------------------------------------------


def _instruction(statement: _Statement, text: str) -> str:
    if text.endswith(":"):
        return f"{text};"
    guard = re.match(r"@(!?)([^ ]+) (.*)", text)
    if guard:
        condition = f"{guard[1]}{_value(statement, guard[2])}"
        return f"if ({condition}) {{ {_instruction(statement, guard[3])} }}"
    opcode, _, rest = text.partition(" ")
    parts = opcode.split(".")
    translated = _translate(statement, parts, _split_operands(rest))
    if translated is None:
        raise _Untranslated(opcode)
    return translated


def _translate(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    name, last = parts[0], parts[-1]
    if _NOTHING.fullmatch(name):
        return ""
    if name == "bra":
        return f"goto {_label(operands[0], statement)};"
    special = _INSTRUCTIONS.get(name)
    if special is not None:
        return special(statement, parts, operands)
    kind = _TYPES.get(last)
    if kind is None:
        return None
    value = [_value(statement, each) for each in operands]
    get = [f"{_P}get<{kind}>({each})" for each in value]
    result: str | None = None
    if name in _BINARY and len(value) == 3:
        result = f"{get[1]} {_BINARY[name]} {get[2]}"
    elif name in ("min", "max") and len(value) == 3:
        result = f"{_P}{name}imum({get[1]}, {get[2]})"
    elif name in ("mul", "mad", "fma", "mul24"):
        result = _product(parts, value, get, kind)
    elif name in ("not", "cnot"):
        result = f"!{get[1]}" if kind == "bool" or name == "cnot" else f"~{get[1]}"
    elif name == "neg":
        result = f"-{get[1]}"
    elif name == "abs":
        result = f"{_P}absolute({get[1]})"
    elif name in ("shl", "shr"):
        result = f"{_P}shift_{'left' if name == 'shl' else 'right'}({get[1]}, {value[2]})"
    elif name == "rcp":
        result = f"{kind}(1) / {get[1]}"
    elif name == "rsqrt":
        result = f"{kind}(1) / {kind}(sqrt({get[1]}))"
    elif name in _MATH and kind in ("float", "double"):
        result = f"{kind}({_MATH[name]}({get[1]}))"
    elif name == "copysign":
        result = f"{kind}(copysign({get[2]}, {get[1]}))"
    elif name in ("brev", "clz", "popc", "bfind"):
        result = f"{_P}{name}({get[1]})"
    elif name in ("bfe", "bfi"):
        result = f"{_P}{name}({', '.join(get[1 : len(get) - 2])}, {value[-2]}, {value[-1]})"
    elif name == "selp":
        result = f"{value[3]} ? {get[1]} : {get[2]}"
    elif name == "prmt" and len(parts) == 2:
        result = f"{_E}permute_bytes({', '.join(get[1:])})"
    elif name == "lop3":
        result = f"{_P}lop3({', '.join(get[1:4])}, {value[4]})"
    elif name == "shf":
        result = f"{_P}funnel_{parts[1]}({', '.join(get[1:4])}, {str('clamp' in parts).lower()})"
    elif name == "dp4a":
        result = f"{_P}dp4a<{_TYPES[parts[1]]}, {_TYPES[parts[2]]}>({', '.join(value[1:])})"
    elif name == "sad":
        result = f"{_P}absolute_difference({get[1]}, {get[2]}) + {get[3]}"
    return None if result is None else f"{_P}put({value[0]}, {result});"


def _product(parts: list[str], value: list[str], get: list[str], kind: str) -> str | None:
    name, last = parts[0], parts[-1]
    added = f" + {get[3]}" if name in ("mad", "fma") else ""
    if "wide" in parts:
        wide = _WIDE[last]
        added = f" + {_P}get<{wide}>({value[3]})" if added else ""
        return f"{wide}({get[1]}) * {wide}({get[2]}){added}"
    if "hi" in parts:
        return f"{_P}high_product({get[1]}, {get[2]}){added}"
    if name == "mul24":
        return f"__mul24({get[1]}, {get[2]})"
    if name == "fma" and kind in ("float", "double"):
        return f"{kind}(fma({', '.join(get[1:4])}))"
    return f"{get[1]} * {get[2]}{added}"


def _mov(statement: _Statement, parts: list[str], operands: list[str]) -> str:
    to, value = operands
    if to.startswith("{"):
        return f"{_P}unpack({_value(statement, value)}, {', '.join(_list(statement, to))});"
    if value.startswith("{"):
        return f"{_P}pack({_value(statement, to)}, {', '.join(_list(statement, value))});"
    return f"{_P}put({_value(statement, to)}, {_value(statement, value)});"


def _cvta(statement: _Statement, parts: list[str], operands: list[str]) -> str:
    to, value = (_value(statement, each) for each in operands)
    if any(part.startswith("shared") for part in parts):
        way = "to_shared" if "to" in parts else "from_shared"
        return f"{_P}put({to}, {_P}{way}({value}));"
    return f"{_P}put({to}, {value});"


def _cvt(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    to, source = _TYPES.get(parts[-2]), _TYPES.get(parts[-1])
    values = [_value(statement, each) for each in operands]
    if parts[-2] == "tf32":
        return f"{_P}put({values[0]}, {_P}to_tf32({_P}get<float>({values[1]})));"
    if to is None or source is None:
        return None
    if len(values) == 3:  # two numbers into the halves of one register, the first on top
        half = {"__half2": "__half", "__nv_bfloat162": "__nv_bfloat16"}.get(to)
        if half is None:
            return None
        packed = (
            f"{_P}convert_two<{half}>({_P}get<float>({values[2]}), {_P}get<float>({values[1]}))"
        )
        return f"{_P}put({values[0]}, {packed});"
    rounding = next((p for p in parts if p in ("rni", "rzi", "rmi", "rpi")), "rz")
    saturate = str("sat" in parts).lower()
    converted = (
        f"{_P}convert<{to}, {_P}Round::{rounding}, {saturate}>({_P}get<{source}>({values[1]}))"
    )
    return f"{_P}put({values[0]}, {converted});"


def _setp(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    kind = _TYPES.get(parts[-1])
    compare = next((_COMPARE[part] for part in parts if part in _COMPARE), None)
    if kind is None or compare is None:
        return None
    to, _, inverse = operands[0].partition("|")
    left, right = (f"{_P}get<{kind}>({_value(statement, each)})" for each in operands[1:3])
    result = f"({left} {compare} {right})"
    combine = next((p for p in parts if p in ("and", "or", "xor")), None)
    if combine and len(operands) == 4:
        result = f"({result} {_BINARY[combine]} {_value(statement, operands[3])})"
    code = f"{_value(statement, to)} = {result};"
    if inverse:
        code += f" {_value(statement, inverse)} = !{_value(statement, to)};"
    return code


def _load(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    kind = _TYPES.get(parts[-1])
    if kind is None:
        return None
    to = _list(statement, operands[0])
    ordered = str(bool({"acquire", "relaxed", "volatile"} & set(parts))).lower()
    pointer = _pointer(statement, operands[1], kind, parts, len(to))
    return f"{_P}load<{ordered}>({pointer}, {', '.join(to)});"


def _store(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    kind = _TYPES.get(parts[-1])
    if kind is None or "async" in parts:
        return None
    values = _list(statement, operands[1])
    ordered = str(bool({"release", "relaxed"} & set(parts))).lower()
    pointer = _pointer(statement, operands[0], kind, parts, len(values))
    fence = "__threadfence(); " if "release" in parts else ""
    return f"{fence}{_P}store<{ordered}>({pointer}, {', '.join(values)});"


def _atomic(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    kind = _TYPES.get(parts[-1])
    call = next((_ATOMICS[part] for part in parts[1:] if part in _ATOMICS), None)
    if kind is None or call is None or "async" in parts:
        return None
    returns = parts[0] == "atom"
    to = operands[0] if returns else None
    address, *rest = operands[1:] if returns else operands
    values = _list(statement, rest[0])
    pointer = _pointer(statement, address, kind, parts, len(values))
    fence = "__threadfence(); " if {"release", "acq_rel"} & set(parts) else ""
    if len(values) > 1:
        if returns:
            return None
        each = (f"{call}(at + {i}, {_P}get<{kind}>({v}));" for i, v in enumerate(values))
        return f"{fence}{{ auto* at = {pointer}; {' '.join(each)} }}"
    arguments = [f"{_P}get<{kind}>({_value(statement, each)})" for each in rest]
    code = f"{call}({pointer}, {', '.join(arguments)})"
    code = f"{_P}put({_value(statement, to)}, {code});" if to and to != "_" else f"{code};"
    return fence + code + (" __threadfence();" if {"acquire", "acq_rel"} & set(parts) else "")


def _barrier(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    values = [_value(statement, each) for each in operands]
    if "warp" in parts:
        return f"__syncwarp({values[0]});"
    if "cluster" in parts:
        return f"{_E}cluster_{'arrive' if 'arrive' in parts else 'wait'}();"
    threads = values[1] if len(values) > 1 else "0"
    if "sync" in parts:
        if values == ["0"]:
            return "__syncthreads();"
        return f"{_E}sync_named({values[0]}, {threads});"
    if "arrive" in parts:
        return f"{_E}arrive_named({values[0]}, {threads});"
    return None


def _fence(statement: _Statement, parts: list[str], operands: list[str]) -> str:
    if "proxy" in parts:
        return "" if "tensormap::generic" in parts else f"{_E}fence_proxy_async();"
    if "mbarrier_init" in parts:
        return f"{_E}fence_mbarrier_init();"
    return "__threadfence_block();" if "cta" in parts else "__threadfence();"


def _shuffle(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    way = next((part for part in parts if part in _SHUFFLES), None)
    if way is None or "sync" not in parts:
        return None
    to, _, predicate = operands[0].partition("|")
    value, argument, clamp, mask = (_value(statement, each) for each in operands[1:])
    code = (
        f"{_P}put({_value(statement, to)}, {_P}shuffle({_E}WarpOp::{_SHUFFLES[way]}, {mask}, "
        f"{_P}get<std::uint32_t>({value}), {argument}, {clamp}));"
    )
    if predicate and predicate != "_":
        inside = f"{_P}shuffle_inside({_E}WarpOp::{_SHUFFLES[way]}, {argument}, {clamp})"
        code += f" {_value(statement, predicate)} = {inside};"
    return code


def _vote(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    to, predicate, mask = (_value(statement, each) for each in operands)
    call = next((f"__{p}_sync" for p in parts if p in ("any", "all", "ballot")), None)
    return f"{_P}put({to}, {call}({mask}, {predicate}));" if call else None


def _redux(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    kind = _TYPES[parts[-1]]
    if kind == "float":
        return None
    to, value, mask = (_value(statement, each) for each in operands)
    return f"{_P}put({to}, __reduce_{parts[2]}_sync({mask}, {_P}get<{kind}>({value})));"


def _match(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    if "any" not in parts:
        return None
    to, value, mask = (_value(statement, each) for each in operands)
    return f"{_P}put({to}, __match_any_sync({mask}, {_P}get<{_TYPES[parts[-1]]}>({value})));"


def _elect(statement: _Statement, parts: list[str], operands: list[str]) -> str:
    to, _, predicate = operands[0].partition("|")
    mask = _value(statement, operands[1])
    code = f"{_value(statement, predicate)} = {_P}elected({mask});"
    if to.strip() != "_":
        code += f" {_P}put({_value(statement, to)}, __ffs({mask}) - 1);"
    return code


def _shared_number(statement: _Statement, operand: str) -> str:
    return f"static_cast<std::uint32_t>({_address(statement, operand)})"


def _copy(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    """cp.async, and cp.async.bulk without tensor maps."""
    if "commit_group" in parts:
        return f"{_E}{'bulk' if 'bulk' in parts else 'cp_async'}_commit();"
    if "wait_group" in parts:
        pending = _value(statement, operands[0])
        return f"{_E}{'bulk' if 'bulk' in parts else 'cp_async'}_wait({pending});"
    if "wait_all" in parts:
        return f"{_E}cp_async_commit(); {_E}cp_async_wait(0);"
    if "mbarrier" in parts or "tensor" in parts or "reduce" in parts or "prefetch" in parts:
        return None
    if "bulk" in parts:
        bytes_ = _value(statement, operands[2])
        if parts[3].startswith("shared"):
            source = f"reinterpret_cast<const void*>({_address(statement, operands[1])})"
            return (
                f"{_E}bulk_load({_shared_number(statement, operands[0])}, {source}, {bytes_}, "
                f"{_shared_number(statement, operands[3])});"
            )
        target = f"reinterpret_cast<void*>({_address(statement, operands[0])})"
        return f"{_E}bulk_store({target}, {_shared_number(statement, operands[1])}, {bytes_});"
    size = _value(statement, operands[2])
    present = _value(statement, operands[3]) if len(operands) > 3 else size
    source = f"reinterpret_cast<const void*>({_address(statement, operands[1])})"
    return f"{_E}cp_async({_shared_number(statement, operands[0])}, {source}, {size}, {present});"


def _mbarrier(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    if "inval" in parts:
        return ""
    if "init" in parts:
        barrier, count = _shared_number(statement, operands[0]), _value(statement, operands[1])
        return f"{_E}mbarrier_init({barrier}, {count});"
    if "arrive" in parts and "noComplete" not in parts:
        at = next(i for i, operand in enumerate(operands) if operand.startswith("["))
        barrier = _shared_number(statement, operands[at])
        more = [_value(statement, each) for each in operands[at + 1 :]]
        if "expect_tx" in parts:
            return f"{_E}mbarrier_arrive({barrier}, {more[0]});"
        return None if more and more[0] != "1" else f"{_E}mbarrier_arrive({barrier}, 0);"
    if {"try_wait", "test_wait"} & set(parts) and "parity" in parts:
        predicate, barrier = _value(statement, operands[0]), operands[1]
        parity = _value(statement, operands[2])
        wait = f"{_E}mbarrier_wait({_shared_number(statement, barrier)}, {parity});"
        return f"{wait} {predicate} = true;"
    return None


def _matrix(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    """ldmatrix, stmatrix and movmatrix of 8x8 matrices of 16-bit elements."""
    name, transposed = parts[0], str("trans" in parts).lower()
    if name == "movmatrix":
        to, value = (_value(statement, each) for each in operands)
        return f"{_P}put({to}, {_E}movmatrix({value}));"
    vector, address = operands if name == "ldmatrix" else operands[::-1]
    registers = _list(statement, vector)
    count, at = len(registers), _shared_number(statement, address)
    if name == "ldmatrix":
        puts = " ".join(f"{_P}put({r}, matrix[{i}]);" for i, r in enumerate(registers))
        return (
            f"{{ unsigned matrix[{count}]; {_E}ldmatrix(matrix, {count}, {transposed}, {at}); "
            f"{puts} }}"
        )
    values = ", ".join(f"{_P}get<std::uint32_t>({r})" for r in registers)
    return (
        f"{{ const unsigned matrix[] = {{{values}}}; "
        f"{_E}stmatrix(matrix, {count}, {transposed}, {at}); }}"
    )


def _mma(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    shape = re.fullmatch(r"m16n8k(\d+)", next((p for p in parts if p.startswith("m16")), ""))
    if shape is None or "sp" in parts or len(parts) < 10:
        return None
    result, a_type, b_type = (part for part in parts[-4:-1])
    numbers = _NUMBERS.get(a_type), _NUMBERS.get(b_type)
    if None in numbers or result not in ("f32", "f16", "s32"):
        return None
    d, a, b, c = (_list(statement, each) for each in operands)
    values = [", ".join(f"{_P}get<std::uint32_t>({r})" for r in each) for each in (a, b, c)]
    puts = " ".join(f"{_P}put({r}, d[{i}]);" for i, r in enumerate(d))
    call = "mma_half" if result == "f16" else "mma"
    return (
        f"{{ const unsigned a[] = {{{values[0]}}}, b[] = {{{values[1]}}}; "
        f"unsigned d[] = {{{values[2]}}}; {_P}{call}({_E}Number::{numbers[0]}, "
        f"{_E}Number::{numbers[1]}, {shape[1]}, d, a, b); {puts} }}"
    )


def _mapa(statement: _Statement, parts: list[str], operands: list[str]) -> str | None:
    if parts[-1] != "u32":
        return None
    to, address, rank = (_value(statement, each) for each in operands)
    return f"{_P}put({to}, {_E}map_to_rank({address}, {rank}));"


def _simple(code: str) -> Callable[[_Statement, list[str], list[str]], str]:
    return lambda statement, parts, operands: code.format(
        *(_value(statement, each) for each in operands)
    )


_INSTRUCTIONS: dict[str, Callable[[_Statement, list[str], list[str]], str | None]] = {
    "mov": _mov, "cvta": _cvta, "cvt": _cvt, "setp": _setp,
    "ld": _load, "ldu": _load, "st": _store, "atom": _atomic, "red": _atomic,
    "bar": _barrier, "barrier": _barrier, "fence": _fence, "membar": _fence,
    "shfl": _shuffle, "vote": _vote, "redux": _redux, "match": _match, "elect": _elect,
    "cp": _copy, "mbarrier": _mbarrier, "mma": _mma, "mapa": _mapa,
    "ldmatrix": _matrix, "stmatrix": _matrix, "movmatrix": _matrix,
    "activemask": _simple(_P + "put({0}, __activemask());"),
    "nanosleep": _simple("__nanosleep({0});"),
    "trap": _simple("__trap();"), "brkpt": _simple(""), "exit": _simple(_P + "leave();"),
}  # fmt: skip
