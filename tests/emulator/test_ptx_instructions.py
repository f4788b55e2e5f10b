"""Inline PTX gives the results of the PTX ISA. Modifiers without a translation end the launch."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import numpy as np
import pytest

from cukit.emulator.check import source_of
from cukit.emulator.inline_ptx import translate_asm
from cukit.emulator.program import Program, as_argument
from cukit.emulator.settings import Settings
from cukit.emulator.tokens import tokenize

pytestmark = pytest.mark.emulator

Array = np.ndarray[Any, Any]
Operand = tuple[str, int]
"""The constraint of an operand, and its bits."""
Row = tuple[str, Operand, tuple[Operand, ...]]
"""An instruction, its result, and its operands from %1 on."""


def r(bits: int) -> Operand:
    return "r", bits & 0xFFFFFFFF


def h(bits: int) -> Operand:
    return "h", bits


def x(bits: int) -> Operand:
    """A 64-bit integer."""
    return "l", bits


def f(value: float) -> Operand:
    return "f", int(np.float32(value).view(np.uint32))


def d(value: float) -> Operand:
    return "d", int(np.float64(value).view(np.uint64))


NAN = float("nan")
NAN_F = ("f", 0x7FFFFFFF)

RESULTS: list[Row] = [
    # Saturation.
    ("add.sat.s32 %0, %1, %2;", r(0x7FFFFFFF), (r(0x7FFFFFFF), r(1))),
    ("sub.sat.s32 %0, %1, %2;", r(0x80000000), (r(0x80000000), r(1))),
    ("add.sat.f32 %0, %1, %2;", f(1), (f(1), f(1))),
    ("sub.rn.sat.f32 %0, %1, %2;", f(0), (f(1), f(2))),
    ("mul.sat.f32 %0, %1, %2;", f(0), (f(NAN), f(2))),
    ("fma.rn.sat.f32 %0, %1, %2, %1;", f(1), (f(1), f(1))),
    ("add.sat.f16x2 %0, %1, %2;", r(0x3C003800), (r(0x3C003400), r(0x3C003400))),
    ("cvt.sat.f32.f32 %0, %1;", f(1), (f(2),)),
    ("cvt.rn.sat.f32.s32 %0, %1;", f(1), (r(5),)),
    # Minimum and maximum.
    ("max.f32 %0, %1, %2;", f(1), (f(NAN), f(1))),
    ("max.NaN.f32 %0, %1, %2;", NAN_F, (f(NAN), f(1))),
    ("min.NaN.f32 %0, %1, %2;", f(-1), (f(-1), f(1))),
    ("min.f32 %0, %1, %2;", f(-0.0), (f(0), f(-0.0))),
    ("max.f32 %0, %1, %2;", f(0), (f(-0.0), f(0))),
    ("min.f16 %0, %1, %2;", h(0xBC00), (h(0x3C00), h(0xBC00))),
    ("max.NaN.f16x2 %0, %1, %2;", r(0x7FFF4000), (r(0x7E003C00), r(0x40004000))),
    ("max.f16x2 %0, %1, %2;", r(0x40004000), (r(0x7E003C00), r(0x40004000))),
    ("min.NaN.bf16 %0, %1, %2;", h(0x7FFF), (h(0x3F80), h(0x7FC0))),
    ("min.relu.s32 %0, %1, %2;", r(0), (r(-5), r(3))),
    ("max.relu.s32 %0, %1, %2;", r(3), (r(-5), r(3))),
    # Negative results become 0.
    (
        "fma.rn.relu.f16x2 %0, %1, %2, %3;",
        r(0x40000000),
        (r(0x3C003C00), r(0x3C00BC00), r(0x3C000000)),
    ),
    ("fma.rn.relu.bf16 %0, %1, %2, %3;", h(0x7FFF), (h(0x7FC0), h(0x3F80), h(0))),
    ("cvt.rn.relu.f16x2.f32 %0, %1, %2;", r(0x3C000000), (f(1), f(-1))),
    ("cvt.rn.relu.bf16x2.f32 %0, %1, %2;", r(0x00003F80), (f(-1), f(1))),
    ("cvt.rn.relu.f16.f32 %0, %1;", h(0), (f(-3),)),
    # One rounding.
    (
        "mad.rn.f32 %0, %1, %2, %3;",
        f(2.0**-46),
        (f(1 + 2.0**-23), f(1 + 2.0**-23), f(-1 - 2.0**-22)),
    ),
    ("fma.rn.f16 %0, %1, %2, %3;", h(0x0010), (h(0x3C01), h(0x3C01), h(0xBC02))),
    ("fma.rn.f16x2 %0, %1, %2, %3;", r(0x00100010), (r(0x3C013C01), r(0x3C013C01), r(0xBC02BC02))),
    # The product is halfway between two results: the addend decides.
    ("fma.rn.bf16 %0, %1, %2, %3;", h(0x3FC1), (h(0x3F81), h(0x3FC0), h(0x8D80))),
    ("fma.rn.bf16x2 %0, %1, %2, %3;", r(0x3FC23FC1), (r(0x3F813F81), r(0x3FC03FC0), r(0x0D808D80))),
    ("fma.rn.bf16 %0, %1, %2, %3;", h(0x7F80), (h(0x7F7F), h(0x4000), h(0x3F80))),
    (
        "{.reg .f32 t; mul.rn.f32 t, %1, %1; add.rn.f32 %0, t, %2;}",
        f(0),
        (f(1 + 2.0**-12), f(-1 - 2.0**-11)),
    ),
    ("cvt.rn.f16.f64 %0, %1;", h(0x3C01), (d(1 + 2.0**-11 + 2.0**-40),)),
    ("cvt.rn.bf16.f64 %0, %1;", h(0x3F81), (d(1 + 2.0**-8 + 2.0**-40),)),
    # Other integer and sign operations.
    ("mul24.hi.u32 %0, %1, %2;", r(0xFFFFFE00), (r(0x00FFFFFF), r(0x12FFFFFF))),
    ("mul24.hi.s32 %0, %1, %2;", r(-2 * 3 * 2**24 >> 16), (r(-(2**13)), r(3 * 2**12))),
    ("mul24.lo.u32 %0, %1, %2;", r(0x00FFFFFF * 3), (r(0xFFFFFFFF), r(3))),
    ("bfind.shiftamt.u32 %0, %1;", r(31), (r(1),)),
    ("bfind.shiftamt.u32 %0, %1;", r(-1), (r(0),)),
    ("bfind.s32 %0, %1;", r(2), (r(-5),)),
    ("bfind.shiftamt.s32 %0, %1;", r(29), (r(-5),)),
    ("bfind.s64 %0, %1;", r(-1), (x(2**64 - 1),)),
    ("abs.f32 %0, %1;", f(0), (f(-0.0),)),
    ("abs.f16x2 %0, %1;", r(0x00003C00), (r(0x8000BC00),)),
    ("abs.bf16 %0, %1;", h(0x3F80), (h(0xBF80),)),
    ("abs.s32 %0, %1;", r(7), (r(-7),)),
    ("neg.f16x2 %0, %1;", r(0x8000BC00), (r(0x00003C00),)),
    # NaN as an integer.
    ("cvt.rzi.s32.f32 %0, %1;", r(0), (f(NAN),)),
    ("cvt.rzi.s32.f64 %0, %1;", r(0x80000000), (d(NAN),)),
    ("cvt.rni.s64.f32 %0, %1;", x(1 << 63), (f(NAN),)),
    ("cvt.rna.tf32.f32 %0, %1;", r(0x7FFFFFFF), (("f", 0x7FFFFFFF),)),
    ("cvt.rna.tf32.f32 %0, %1;", r(0x3F802000), (("f", 0x3F801000),)),
]

ORDERED = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge,
}  # fmt: skip
COMBINED = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
PAIRS = ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (NAN, 1.0), (1.0, NAN), (NAN, NAN))


def expected_comparison(name: str, a: float, b: float) -> bool:
    has_nan = bool(np.isnan(a) or np.isnan(b))
    if name in ("num", "nan"):
        return has_nan == (name == "nan")
    if has_nan:
        return name.endswith("u")
    return bool(ORDERED[name.removesuffix("u")](a, b))


def comparison(instruction: str) -> str:
    return f"{{.reg .pred p; {instruction} p, %1, %2; selp.u32 %0, 1, 0, p;}}"


def combined_comparison(name: str, equal: bool, third: bool, negated: bool) -> Row:
    """A setp of two predicates, p and q, with a third operand; the result is p + 2 q."""
    text = (
        "{.reg .pred p, q, c; .reg .u32 u; setp.ne.u32 c, %3, 0; "
        f"setp.eq.{name}.u32 p|q, %1, %2, {'!' * negated}c; "
        "selp.u32 %0, 1, 0, p; selp.u32 u, 2, 0, q; or.b32 %0, %0, u;}"
    )
    combine, other = COMBINED[name], third != negated
    expected = combine(equal, other) + 2 * combine(not equal, other)
    return text, r(expected), (r(1), r(1 if equal else 2), r(third))


RESULTS += [
    (comparison(f"setp.{name}.f32"), r(expected_comparison(name, a, b)), (f(a), f(b)))
    for name in (*ORDERED, *(f"{name}u" for name in ORDERED), "num", "nan")
    for a, b in PAIRS
]
RESULTS += [
    (comparison("setp.ne.f16"), r(0), (h(0x7E00), h(0x3C00))),
    (comparison("setp.neu.f16"), r(1), (h(0x7E00), h(0x3C00))),
    (comparison("setp.ltu.f64"), r(1), (d(NAN), d(1))),
    (comparison("setp.lo.u32"), r(1), (r(1), r(-1))),
    (comparison("setp.hs.u32"), r(0), (r(1), r(-1))),
]
RESULTS += [
    combined_comparison(name, *flags)
    for name in COMBINED
    for flags in itertools.product((False, True), repeat=3)
]
RESULTS += [
    (
        "{.reg .pred p, q; setp.ne.u32 p, %1, %1; setp.eq.u32 _|q, %1, %2; selp.u32 %0, 1, 0, q;}",
        r(1),
        (r(1), r(2)),
    ),
    # The first result has the register of the third operand.
    (
        "{.reg .pred p, q; setp.eq.u32 p, %1, %1; setp.eq.and.u32 p|q, %1, %2, p; "
        "selp.u32 %0, 1, 0, q;}",
        r(1),
        (r(1), r(2)),
    ),
]

AS_TYPE = {
    "r": "static_cast<unsigned>({})", "h": "static_cast<unsigned short>({})", "l": "{}",
    "f": "__uint_as_float(static_cast<unsigned>({}))", "d": "__longlong_as_double({})",
}  # fmt: skip
AS_BITS = AS_TYPE | {"f": "__float_as_uint({})", "d": "__double_as_longlong({})"}
TYPE = {
    "r": "unsigned", "h": "unsigned short", "l": "unsigned long long", "f": "float", "d": "double"
}  # fmt: skip
OPERANDS = 3


def results_source() -> str:
    """A kernel with one `asm` for each row of RESULTS."""
    lines = []
    for i, (text, (result, _), operands) in enumerate(RESULTS):
        given = ", ".join(
            f'"{kind}"({AS_TYPE[kind].format(f"in[{OPERANDS * i + k}]")})'
            for k, (kind, _) in enumerate(operands)
        )
        bits = AS_BITS[result].format("to")
        lines.append(
            f'  {{ {TYPE[result]} to; asm volatile("{text}" : "=&{result}"(to) : {given}); '
            f"out[{i}] = {bits}; }}"
        )
    parameters = "const unsigned long long* in, unsigned long long* out"
    return f'extern "C" __global__ void results({parameters}) {{\n' + "\n".join(lines) + "\n}\n"


def result_operands() -> Array:
    given = np.zeros((len(RESULTS), OPERANDS), np.uint64)
    for row, (_, _, operands) in zip(given, RESULTS, strict=True):
        row[: len(operands)] = [bits for _, bits in operands]
    return given


MEMORY = r"""
extern "C" __global__ void copies(const int4* in, int4* out) {
  __shared__ int4 tile[4];
  for (int i = 0; i < 4; ++i) tile[i] = make_int4(9, 9, 9, 9);
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  asm volatile("{.reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0; "
               "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, policy;"
               "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0+16], [%1], 16, 8, policy;}"
               :: "r"(at), "l"(in) : "memory");
  asm volatile("{.reg .pred ignored; setp.eq.u32 ignored, %2, 1; "
               "cp.async.ca.shared.global [%0+32], [%1], 16, ignored; "
               "cp.async.ca.shared.global [%0+48], [%1], 16, !ignored;}"
               :: "r"(at), "l"(in), "r"(in->x) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  for (int i = 0; i < 4; ++i) out[i] = tile[i];
}

extern "C" __global__ void hints(const int* in, int* out) {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  int v, old;
  asm volatile("ld.global.L2::cache_hint.s32 %0, [%1], %2;" : "=r"(v) : "l"(in), "l"(policy));
  asm volatile("st.global.L2::cache_hint.s32 [%0], %1, %2;"
               :: "l"(out), "r"(v), "l"(policy) : "memory");
  asm volatile("atom.global.add.L2::cache_hint.s32 %0, [%1], %2, %3;"
               : "=r"(old) : "l"(out), "r"(10), "l"(policy) : "memory");
  asm volatile("red.global.add.L2::cache_hint.s32 [%0], %1, %2;"
               :: "l"(out), "r"(100), "l"(policy) : "memory");
  asm volatile("atom.global.exch.L2::cache_hint.b32 %0, [%1], %2, %3;"
               : "=r"(v) : "l"(out + 1), "r"(old), "l"(policy) : "memory");
}
"""


@functools.cache
def program(settings: Settings) -> Program:
    return Program(source_of(MEMORY + results_source()), settings, [])


def run(name: str, *args: Array, checked: bool = True) -> None:
    settings = Settings(checked=checked)
    compiled = program(settings)
    kernel = compiled.kernel(name, (1,))
    given = [as_argument(v, size) for v, size in zip(args, kernel.parameter_bytes, strict=True)]
    kernel.launch((1,), tuple(given), settings, compiled.variables())


@pytest.mark.parametrize("checked", [True, False])
def test_results(checked: bool) -> None:
    out = np.zeros(len(RESULTS), np.uint64)
    run("results", result_operands(), out, checked=checked)
    wrong = [
        f"{text}  {[hex(bits) for _, bits in operands]}: {int(got):#x}, expected {want:#x}"
        for got, (text, (_, want), operands) in zip(out, RESULTS, strict=True)
        if int(got) != want
    ]
    assert not wrong, "\n".join(wrong)


def test_cp_async_with_a_cache_policy_or_a_predicate() -> None:
    out = np.zeros(16, np.int32)
    run("copies", np.array([1, 2, 3, 4], np.int32), out)
    assert out.reshape(4, 4).tolist() == [[1, 2, 3, 4], [1, 2, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4]]


def test_a_cache_policy_is_not_an_operand_of_loads_stores_and_atomics() -> None:
    out = np.zeros(2, np.int32)
    run("hints", np.array([5], np.int32), out)
    assert out.tolist() == [115, 5]


@pytest.mark.parametrize(
    "text",
    [
        "add.rz.f32 %0, %0, %0;",
        "mul.rp.f64 %0, %0, %0;",
        "fma.rm.f32 %0, %0, %0, %0;",
        "div.rz.f32 %0, %0, %0;",
        "add.cc.u32 %0, %0, %0;",
        "mad.hi.sat.s32 %0, %0, %0, %0;",
        "add.f32.f16 %0, %0, %0;",
        "fma.rn.oob.f16 %0, %0, %0, %0;",
        "min.xorsign.abs.f32 %0, %0, %0;",
        "cvt.rz.f32.f64 %0, %0;",
        "cvt.rz.f16x2.f32 %0, %0, %0;",
        "cvt.rn.satfinite.f16.f32 %0, %0;",
        "cvt.rn.tf32.f32 %0, %0;",
        "cvt.rna.satfinite.tf32.f32 %0, %0;",
        "cvt.rn.f16x2.e4m3x2 %0, %0;",
        "lop3.or.b32 %0|p, %0, %0, %0, 1, p;",
        "setp.eq.f16x2 p|q, %0, %0;",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %0, [%0];",
        "vote.ballot.b32 %0, p;",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%0, %0}, [%0];",
        "mma.sync.aligned.m16n8k16.row.col.satfinite.s32.s8.s8.s32 {%0}, {%0}, {%0}, {%0};",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f16 {%0}, {%0}, {%0}, {%0};",
        "fence.proxy.alias;",
        "mbarrier.arrive.noComplete.shared.b64 %0, [%0], 1;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%0], 16, [%0], %0;",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        " [%0], [%0], 16, [%0];",
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%0], [%0], 16, %0;",
        "cp.async.mbarrier.arrive.shared.b64 [%0];",
    ],
)
def test_modifiers_without_translation_are_refused(text: str) -> None:
    code = translate_asm(tokenize(f'"{{.reg .pred p, q; {text}}}" : "+r"(a)'))
    assert f"inline PTX: {text.partition(' ')[0].rstrip(';')}" in code
