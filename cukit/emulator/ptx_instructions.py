"""Translates PTX instructions to C++, mostly calls to kernels_cu/common/emulator/inline_ptx.h."""

from __future__ import annotations

import re
from collections.abc import Callable

from cukit.emulator.ptx_operands import (
    TYPES,
    E,
    P,
    Statement,
    UntranslatedError,
    address_of,
    elements_of,
    label_of,
    pointer_to,
    split_operands,
    value_of,
)

_WIDE = {"s16": "std::int32_t", "u16": "std::uint32_t", "s32": "std::int64_t",
         "u32": "std::uint64_t"}  # fmt: skip
_COMPARE = {name: name for name in ("eq", "ne", "lt", "le", "gt", "ge", "num", "nan")}
_COMPARE |= {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_UNORDERED = {f"{name}u": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
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
"""Instructions that have no effect in the emulator."""

_FLOATS = ("float", "double")
_HALVES = ("__half", "__half2", "__nv_bfloat16", "__nv_bfloat162")

_APPROXIMATE = "approx full ftz"
"""No effect: the emulator does not approximate, and flushes all subnormals (docs/emulator.md)."""
_CONVERSIONS = "rn rni rzi rmi rpi sat relu ftz"
_SPACES = "global shared shared::cta shared::cluster"
_SCOPES = "cta cluster gpu sys"
_PREFETCH = "L2::64B L2::128B L2::256B"
_CACHE = f"L2::cache_hint {_PREFETCH} L1::no_allocate " + " ".join(
    f"{level}::evict_{priority}"
    for level in ("L1", "L2")
    for priority in ("normal", "unchanged", "first", "last")
)
_MODIFIERS: dict[str, str] = {
    "add sub": f"rn sat {_APPROXIMATE}",
    "mul": f"rn sat lo hi wide {_APPROXIMATE}",
    "fma mad": f"rn sat relu lo hi wide {_APPROXIMATE}",
    "mul24": "lo hi",
    "div rcp sqrt": f"rn {_APPROXIMATE}",
    "ex2 lg2 sin cos tanh rsqrt abs neg": _APPROXIMATE,
    "min max": f"NaN relu {_APPROXIMATE}",
    "bfind": "shiftamt",
    "shf": "l r clamp wrap",
    "dp4a": "s32 u32",
    "cvt": f"{_CONVERSIONS} rna tf32 {' '.join(TYPES)}",
    "setp": f"and or xor ftz {' '.join(_COMPARE)} {' '.join(_UNORDERED)}",
    "cvta": f"to local const {_SPACES}",
    "bra": "uni",
    "ld": f"weak relaxed acquire volatile mmio {_SCOPES} {_SPACES} local const nc ca cg cs lu "
          f"cv v2 v4 v8 {_CACHE}",
    "ldu": "global v2 v4",
    "st": f"weak relaxed release volatile mmio {_SCOPES} {_SPACES} local wb cg cs wt "
          f"v2 v4 v8 {_CACHE}",
    "atom red": f"relaxed acquire release acq_rel {_SCOPES} {_SPACES} {' '.join(_ATOMICS)} noftz "
                "v2 v4 v8 L2::cache_hint",
    "bar barrier": "sync arrive wait warp cta cluster aligned release relaxed acquire",
    "fence": f"sc acq_rel acquire release {_SCOPES} {_SPACES} mbarrier_init proxy async generic "
             "tensormap::generic",
    "membar": "cta gl sys",
    "shfl": f"sync {' '.join(_SHUFFLES)}",
    "vote": "sync any all ballot",
    "redux": "sync add min max and or xor",
    "match": "any sync",
    "elect": "sync",
    "cp": f"async bulk ca cg {_SPACES} L2::cache_hint {_PREFETCH} commit_group wait_group wait_all "
          "read bulk_group mbarrier::complete_tx::bytes",
    "mbarrier": f"init inval arrive expect_tx try_wait test_wait parity release acquire relaxed "
                f"{_SCOPES} {_SPACES}",
    "ldmatrix stmatrix movmatrix": "sync aligned m8n8 x1 x2 x4 trans shared shared::cta",
    "mma": f"sync aligned m16n8k4 m16n8k8 m16n8k16 m16n8k32 row col f32 s32 {' '.join(_NUMBERS)}",
    "mapa": "shared::cluster",
}  # fmt: skip
"""The modifiers of each instruction that are translated, or do not change its result."""

_LEGAL = {name: set(text.split()) for names, text in _MODIFIERS.items() for name in names.split()}


def instruction(statement: Statement, text: str) -> str:
    """C++ for one instruction or label. Raises UntranslatedError if there is no translation."""
    if text.endswith(":"):
        return f"{text};"
    guard = re.match(r"@(!?)([^ ]+) (.*)", text)
    if guard:
        condition = f"{guard[1]}{value_of(statement, guard[2])}"
        return f"if ({condition}) {{ {instruction(statement, guard[3])} }}"
    opcode, _, rest = text.partition(" ")
    parts = opcode.split(".")
    if _NOTHING.fullmatch(parts[0]):
        return ""
    unknown = _unknown_modifier(parts)
    if unknown:
        raise UntranslatedError(f"{opcode} (modifier .{unknown})")
    operands = split_operands(rest)
    if "L2::cache_hint" in parts:
        operands.pop()  # the cache policy
    translated = _translate(statement, parts, operands)
    if translated is None:
        raise UntranslatedError(opcode)
    return translated


def _unknown_modifier(parts: list[str]) -> str | None:
    """The first modifier that is not listed for the instruction."""
    typed = parts[-1] in TYPES
    legal = _LEGAL.get(parts[0], set())
    return next((part for part in parts[1 : -1 if typed else None] if part not in legal), None)


def _translate(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    name, last = parts[0], parts[-1]
    if name == "bra":
        return f"goto {label_of(operands[0], statement)};"
    special = _INSTRUCTIONS.get(name)
    if special is not None:
        return special(statement, parts, operands)
    kind = TYPES.get(last)
    if kind is None:
        return None
    value = [value_of(statement, each) for each in operands]
    get = [f"{P}get<{kind}>({each})" for each in value]
    result: str | None = None
    if name in _BINARY and len(value) == 3:
        result = f"{get[1]} {_BINARY[name]} {get[2]}"
    elif name in ("min", "max") and len(value) == 3:
        larger, pass_nan = str(name == "max").lower(), str("NaN" in parts).lower()
        result = f"{P}extreme<{larger}, {pass_nan}>({get[1]}, {get[2]})"
    elif name in ("mul", "mad", "fma", "mul24"):
        result = _product(parts, value, get, kind)
    elif name in ("not", "cnot"):
        result = f"!{get[1]}" if kind == "bool" or name == "cnot" else f"~{get[1]}"
    elif name == "neg":
        result = f"-{get[1]}"
    elif name == "abs":
        result = f"{P}absolute({get[1]})"
    elif name in ("shl", "shr"):
        result = f"{P}shift_{'left' if name == 'shl' else 'right'}({get[1]}, {value[2]})"
    elif name == "rcp":
        result = f"{kind}(1) / {get[1]}"
    elif name == "rsqrt":
        result = f"{kind}(1) / {kind}(sqrt({get[1]}))"
    elif name in _MATH and kind in _FLOATS:
        result = f"{kind}({_MATH[name]}({get[1]}))"
    elif name == "copysign":
        result = f"{kind}(copysign({get[2]}, {get[1]}))"
    elif name in ("brev", "clz", "popc"):
        result = f"{P}{name}({get[1]})"
    elif name == "bfind":
        result = f"{P}bfind({get[1]}, {str('shiftamt' in parts).lower()})"
    elif name in ("bfe", "bfi"):
        result = f"{P}{name}({', '.join(get[1 : len(get) - 2])}, {value[-2]}, {value[-1]})"
    elif name == "selp":
        result = f"{value[3]} ? {get[1]} : {get[2]}"
    elif name == "prmt" and len(parts) == 2:
        result = f"{E}permute_bytes({', '.join(get[1:])})"
    elif name == "lop3":
        result = f"{P}lop3({', '.join(get[1:4])}, {value[4]})"
    elif name == "shf":
        result = f"{P}funnel_{parts[1]}({', '.join(get[1:4])}, {str('clamp' in parts).lower()})"
    elif name == "dp4a":
        result = f"{P}dp4a<{TYPES[parts[1]]}, {TYPES[parts[2]]}>({', '.join(value[1:])})"
    elif name == "sad":
        result = f"{P}absolute_difference({get[1]}, {get[2]}) + {get[3]}"
    if result is not None:
        result = _adjusted(parts, get, kind, result)
    return None if result is None else f"{P}put({value[0]}, {result});"


def _adjusted(parts: list[str], get: list[str], kind: str, result: str) -> str | None:
    """The result with the modifiers .rn, .sat and .relu."""
    name = parts[0]
    if "rn" in parts and kind in _FLOATS:
        result = f"{P}rounded<{kind}>({result})"
    if "relu" in parts:
        result = f"{P}relu<{kind}>({result})"
    if "sat" not in parts:
        return result
    if kind == "std::int32_t" and name in ("add", "sub"):
        return f"{P}saturate<{kind}>(std::int64_t({get[1]}) {_BINARY[name]} {get[2]})"
    return f"{P}saturate<{kind}>({result})" if kind in ("float", *_HALVES) else None


def _product(parts: list[str], value: list[str], get: list[str], kind: str) -> str | None:
    name, last = parts[0], parts[-1]
    added = f" + {get[3]}" if name in ("mad", "fma") else ""
    if "wide" in parts:
        wide = _WIDE[last]
        added = f" + {P}get<{wide}>({value[3]})" if added else ""
        return f"{wide}({get[1]}) * {wide}({get[2]}){added}"
    if name == "mul24":
        high = str("hi" in parts).lower()
        return f"{P}product_of_24_bits<{high}>({get[1]}, {get[2]})"
    if "hi" in parts:
        return f"{P}high_product({get[1]}, {get[2]}){added}"
    if name in ("fma", "mad") and kind in (*_FLOATS, *_HALVES):
        return f"{P}fused({', '.join(get[1:4])})"
    return f"{get[1]} * {get[2]}{added}"


def _mov(statement: Statement, parts: list[str], operands: list[str]) -> str:
    to, value = operands
    if to.startswith("{"):
        return f"{P}unpack({value_of(statement, value)}, {', '.join(elements_of(statement, to))});"
    if value.startswith("{"):
        return f"{P}pack({value_of(statement, to)}, {', '.join(elements_of(statement, value))});"
    return f"{P}put({value_of(statement, to)}, {value_of(statement, value)});"


def _cvta(statement: Statement, parts: list[str], operands: list[str]) -> str:
    to, value = (value_of(statement, each) for each in operands)
    if any(part.startswith("shared") for part in parts):
        conversion = "to_shared" if "to" in parts else "from_shared"
        return f"{P}put({to}, {P}{conversion}({value}));"
    return f"{P}put({to}, {value});"


def _cvt(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    values = [value_of(statement, each) for each in operands]
    to, source = TYPES.get(parts[-2]), TYPES.get(parts[-1])
    modifiers = set(parts[1:-2])
    if parts[-2] == "tf32":
        if modifiers != {"rna"}:
            return None
        return f"{P}put({values[0]}, {P}to_tf32({P}get<float>({values[1]})));"
    if to is None or source is None or modifiers - set(_CONVERSIONS.split()):
        return None
    if len(values) == 3:  # two numbers packed into one register, the first in the upper half
        half = {"__half2": "__half", "__nv_bfloat162": "__nv_bfloat16"}.get(to)
        if half is None or source != "float" or modifiers - {"rn", "relu", "ftz"}:
            return None
        relu = str("relu" in modifiers).lower()
        pair = f"{P}get<float>({values[2]}), {P}get<float>({values[1]})"
        return f"{P}put({values[0]}, {P}convert_two<{half}, {relu}>({pair}));"
    if "2" in (to[-1], source[-1]):
        return None
    rounding = next((p for p in parts if p in ("rni", "rzi", "rmi", "rpi")), "none")
    saturate = str("sat" in modifiers).lower()
    code = f"{P}convert<{to}, {P}Round::{rounding}, {saturate}>({P}get<{source}>({values[1]}))"
    if "relu" in modifiers:
        code = f"{P}relu({code})"
    return f"{P}put({values[0]}, {code});"


def _setp(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    kind = TYPES.get(parts[-1])
    name = next((p for p in parts[1:-1] if p in _COMPARE or p in _UNORDERED), None)
    if kind is None or name is None or kind in ("__half2", "__nv_bfloat162"):
        return None
    unordered = str(name in _UNORDERED).lower()
    left, right = (f"{P}get<{kind}>({value_of(statement, each)})" for each in operands[1:3])
    operation = f"{P}Compare::{_COMPARE.get(name) or _UNORDERED[name]}"
    found = f"{P}compare<{operation}, {unordered}>({left}, {right})"
    results = ["found", "!found"]
    combine = next((p for p in parts if p in ("and", "or", "xor")), None)
    if combine:
        other = value_of(statement, operands[3])
        found += f", other = {other}"
        results = [f"{result} {_BINARY[combine]} other" for result in results]
    puts = (
        f"{value_of(statement, to)} = {result};"
        for to, result in zip(operands[0].split("|"), results, strict=False)
        if to.strip() != "_"
    )
    return f"{{ const bool found = {found}; {' '.join(puts)} }}"


_STRONG = ("relaxed", "volatile", "mmio")
"""Qualifiers of accesses that the memory model orders (PTX ISA, memory consistency model)."""


def _load(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    kind = TYPES.get(parts[-1])
    if kind is None:
        return None
    to = elements_of(statement, operands[0])
    ordered = str(bool({*_STRONG, "acquire"} & set(parts))).lower()
    pointer = pointer_to(statement, operands[1], kind, parts, len(to))
    return f"{P}load<{ordered}>({pointer}, {', '.join(to)});"


def _store(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    kind = TYPES.get(parts[-1])
    if kind is None:
        return None
    values = elements_of(statement, operands[1])
    ordered = str(bool({*_STRONG, "release"} & set(parts))).lower()
    pointer = pointer_to(statement, operands[0], kind, parts, len(values))
    fence = "__threadfence(); " if "release" in parts else ""
    return f"{fence}{P}store<{ordered}>({pointer}, {', '.join(values)});"


def _atomic(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    kind = TYPES.get(parts[-1])
    call = next((_ATOMICS[part] for part in parts[1:] if part in _ATOMICS), None)
    if kind is None or call is None:
        return None
    returns = parts[0] == "atom"
    to = operands[0] if returns else None
    address, *rest = operands[1:] if returns else operands
    values = elements_of(statement, rest[0])
    pointer = pointer_to(statement, address, kind, parts, len(values))
    fence = "__threadfence(); " if {"release", "acq_rel"} & set(parts) else ""
    if len(values) > 1:
        if returns:
            return None
        each = (f"{call}(at + {i}, {P}get<{kind}>({v}));" for i, v in enumerate(values))
        return f"{fence}{{ auto* at = {pointer}; {' '.join(each)} }}"
    arguments = [f"{P}get<{kind}>({value_of(statement, each)})" for each in rest]
    code = f"{call}({pointer}, {', '.join(arguments)})"
    code = f"{P}put({value_of(statement, to)}, {code});" if to and to != "_" else f"{code};"
    return fence + code + (" __threadfence();" if {"acquire", "acq_rel"} & set(parts) else "")


def _barrier(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    values = [value_of(statement, each) for each in operands]
    if "warp" in parts:
        return f"__syncwarp({values[0]});"
    if "cluster" in parts:
        return f"{E}cluster_{'arrive' if 'arrive' in parts else 'wait'}();"
    threads = values[1] if len(values) > 1 else "0"
    if "sync" in parts:
        if values == ["0"]:
            return "__syncthreads();"
        return f"{E}sync_named({values[0]}, {threads});"
    if "arrive" in parts:
        return f"{E}arrive_named({values[0]}, {threads});"
    return None


def _fence(statement: Statement, parts: list[str], operands: list[str]) -> str:
    if "proxy" in parts:
        return "" if "tensormap::generic" in parts else f"{E}fence_proxy_async();"
    if "mbarrier_init" in parts:
        return f"{E}fence_mbarrier_init();"
    return "__threadfence_block();" if "cta" in parts else "__threadfence();"


def _shuffle(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    mode = next((part for part in parts if part in _SHUFFLES), None)
    if mode is None or "sync" not in parts:
        return None
    to, _, predicate = operands[0].partition("|")
    value, argument, clamp, mask = (value_of(statement, each) for each in operands[1:])
    code = (
        f"{P}put({value_of(statement, to)}, {P}shuffle({E}WarpOp::{_SHUFFLES[mode]}, {mask}, "
        f"{P}get<std::uint32_t>({value}), {argument}, {clamp}));"
    )
    if predicate and predicate != "_":
        inside = f"{P}shuffle_inside({E}WarpOp::{_SHUFFLES[mode]}, {argument}, {clamp})"
        code += f" {value_of(statement, predicate)} = {inside};"
    return code


def _vote(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    if "sync" not in parts:
        return None
    to, predicate, mask = (value_of(statement, each) for each in operands)
    call = next((f"__{p}_sync" for p in parts if p in ("any", "all", "ballot")), None)
    return f"{P}put({to}, {call}({mask}, {predicate}));" if call else None


def _redux(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    kind = TYPES[parts[-1]]
    if kind == "float":
        return None
    to, value, mask = (value_of(statement, each) for each in operands)
    return f"{P}put({to}, __reduce_{parts[2]}_sync({mask}, {P}get<{kind}>({value})));"


def _match(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    if "any" not in parts:
        return None
    to, value, mask = (value_of(statement, each) for each in operands)
    return f"{P}put({to}, __match_any_sync({mask}, {P}get<{TYPES[parts[-1]]}>({value})));"


def _elect(statement: Statement, parts: list[str], operands: list[str]) -> str:
    to, _, predicate = operands[0].partition("|")
    mask = value_of(statement, operands[1])
    code = f"{value_of(statement, predicate)} = {P}elected({mask});"
    if to.strip() != "_":
        code += f" {P}put({value_of(statement, to)}, __ffs({mask}) - 1);"
    return code


def _shared_number(statement: Statement, operand: str) -> str:
    return f"static_cast<std::uint32_t>({address_of(statement, operand)})"


def _copy(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    """cp.async, and cp.async.bulk without tensor maps."""
    if "commit_group" in parts:
        return f"{E}{'bulk' if 'bulk' in parts else 'cp_async'}_commit();"
    if "wait_group" in parts:
        pending = value_of(statement, operands[0])
        return f"{E}{'bulk' if 'bulk' in parts else 'cp_async'}_wait({pending});"
    if "wait_all" in parts:
        return f"{E}cp_async_commit(); {E}cp_async_wait(0);"
    if "bulk" in parts:
        bytes_ = value_of(statement, operands[2])
        if parts[3].startswith("shared"):
            if parts[4] != "global":
                return None
            source = f"reinterpret_cast<const void*>({address_of(statement, operands[1])})"
            return (
                f"{E}bulk_load({_shared_number(statement, operands[0])}, {source}, {bytes_}, "
                f"{_shared_number(statement, operands[3])});"
            )
        target = f"reinterpret_cast<void*>({address_of(statement, operands[0])})"
        return f"{E}bulk_store({target}, {_shared_number(statement, operands[1])}, {bytes_});"
    size = value_of(statement, operands[2])
    present = size
    if len(operands) > 3:
        present = f"{P}bytes_present({size}, {value_of(statement, operands[3])})"
    source = f"reinterpret_cast<const void*>({address_of(statement, operands[1])})"
    return f"{E}cp_async({_shared_number(statement, operands[0])}, {source}, {size}, {present});"


def _mbarrier(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    if "inval" in parts:
        return ""
    if "init" in parts:
        barrier, count = _shared_number(statement, operands[0]), value_of(statement, operands[1])
        return f"{E}mbarrier_init({barrier}, {count});"
    if "arrive" in parts:
        at = next(i for i, operand in enumerate(operands) if operand.startswith("["))
        barrier = _shared_number(statement, operands[at])
        more = [value_of(statement, each) for each in operands[at + 1 :]]
        if "expect_tx" in parts:
            return f"{E}mbarrier_arrive({barrier}, {more[0]});"
        return None if more and more[0] != "1" else f"{E}mbarrier_arrive({barrier}, 0);"
    if {"try_wait", "test_wait"} & set(parts) and "parity" in parts:
        predicate, barrier = value_of(statement, operands[0]), operands[1]
        parity = value_of(statement, operands[2])
        wait = f"{E}mbarrier_wait({_shared_number(statement, barrier)}, {parity});"
        return f"{wait} {predicate} = true;"
    return None


def _matrix(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    """ldmatrix, stmatrix and movmatrix of 8x8 matrices of 16-bit elements."""
    name, transposed = parts[0], str("trans" in parts).lower()
    if name == "movmatrix":
        to, value = (value_of(statement, each) for each in operands)
        return f"{P}put({to}, {E}movmatrix({value}));"
    vector, address = operands if name == "ldmatrix" else operands[::-1]
    registers = elements_of(statement, vector)
    count, at = len(registers), _shared_number(statement, address)
    if name == "ldmatrix":
        puts = " ".join(f"{P}put({r}, matrix[{i}]);" for i, r in enumerate(registers))
        return (
            f"{{ unsigned matrix[{count}]; {E}ldmatrix(matrix, {count}, {transposed}, {at}); "
            f"{puts} }}"
        )
    values = ", ".join(f"{P}get<std::uint32_t>({r})" for r in registers)
    return (
        f"{{ const unsigned matrix[] = {{{values}}}; "
        f"{E}stmatrix(matrix, {count}, {transposed}, {at}); }}"
    )


def _mma(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    shape = re.fullmatch(r"m16n8k(\d+)", next((p for p in parts if p.startswith("m16")), ""))
    if shape is None or len(parts) != 10:
        return None
    result, a_type, b_type, c_type = parts[-4:]
    numbers = _NUMBERS.get(a_type), _NUMBERS.get(b_type)
    if None in numbers or result not in ("f32", "f16", "s32") or result != c_type:
        return None
    d, a, b, c = (elements_of(statement, each) for each in operands)
    values = [", ".join(f"{P}get<std::uint32_t>({r})" for r in each) for each in (a, b, c)]
    puts = " ".join(f"{P}put({r}, d[{i}]);" for i, r in enumerate(d))
    call = "mma_half" if result == "f16" else "mma"
    return (
        f"{{ const unsigned a[] = {{{values[0]}}}, b[] = {{{values[1]}}}; "
        f"unsigned d[] = {{{values[2]}}}; {P}{call}({E}Number::{numbers[0]}, "
        f"{E}Number::{numbers[1]}, {shape[1]}, d, a, b); {puts} }}"
    )


def _mapa(statement: Statement, parts: list[str], operands: list[str]) -> str | None:
    if parts[-1] != "u32":
        return None
    to, address, rank = (value_of(statement, each) for each in operands)
    return f"{P}put({to}, {E}map_to_rank({address}, {rank}));"


def _simple(code: str) -> Callable[[Statement, list[str], list[str]], str]:
    return lambda statement, parts, operands: code.format(
        *(value_of(statement, each) for each in operands)
    )


_INSTRUCTIONS: dict[str, Callable[[Statement, list[str], list[str]], str | None]] = {
    "mov": _mov, "cvta": _cvta, "cvt": _cvt, "setp": _setp,
    "ld": _load, "ldu": _load, "st": _store, "atom": _atomic, "red": _atomic,
    "bar": _barrier, "barrier": _barrier, "fence": _fence, "membar": _fence,
    "shfl": _shuffle, "vote": _vote, "redux": _redux, "match": _match, "elect": _elect,
    "cp": _copy, "mbarrier": _mbarrier, "mma": _mma, "mapa": _mapa,
    "ldmatrix": _matrix, "stmatrix": _matrix, "movmatrix": _matrix,
    "activemask": _simple(P + "put({0}, __activemask());"),
    "nanosleep": _simple("__nanosleep({0});"),
    "trap": _simple("__trap();"), "brkpt": _simple(""), "exit": _simple(P + "leave();"),
}  # fmt: skip
