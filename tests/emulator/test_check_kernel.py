"""check_kernel: compiling and launching programs of other projects, rewriting them, errors."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cukit
from cukit.emulator.inline_ptx import translate_asm
from cukit.emulator.rewrite import device_macros, rewrite
from cukit.emulator.tokens import join, tokenize
from cukit.errors import CompileError, ConfigError, EmulatorError, LaunchError

emulator = pytest.mark.emulator

XORWOW = Path(__file__).with_name("xorwow.txt")

SOURCE = """
__constant__ float factor;
__device__ int launches;
namespace mine {
__global__ void scale(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
  if (i == 0) launches += 1;
}
}
template <typename T> __global__ void fill(T* x, T value) { x[threadIdx.x] = value; }
"""
X = np.arange(6, dtype=np.float32)


def check(entry: str, *args: Any, block: int = 6, **options: Any) -> None:
    cukit.check_kernel(SOURCE, entry, grid=1, block=block, args=args, **options)


@emulator
def test_variables_are_set_and_returned() -> None:
    y, launches = np.zeros(6, np.float32), np.zeros(1, np.int32)
    constants = {"factor": np.float32(3), "launches": launches}
    for _ in range(2):
        check("mine::scale", X, y, 6, constants=constants)
    np.testing.assert_array_equal(y, 3 * X)
    assert launches[0] == 2, "its value is returned, and passed to the next launch"
    fresh = np.zeros(1, np.int32)
    check("mine::scale", X, y, 6, constants={"launches": fresh})
    assert fresh[0] == 1, "every call has its own variables"


DIRECTED = """
__global__ void sums(const float* x, float* y) {
  y[0] = __fadd_rd(x[0], -x[1]), y[1] = __fadd_ru(x[0], x[1]), y[2] = __fadd_rd(x[0], x[1]);
  y[3] = __fsub_rd(x[0], x[1]), y[4] = __fsub_rz(x[0], x[1]), y[5] = __fsub_ru(x[0], x[1]);
  y[6] = __fmaf_ru(x[0], 1.0f, x[1]), y[7] = __fmaf_rz(-x[0], 1.0f, x[1]);
}
"""


@emulator
def test_directed_rounding_of_sums_beyond_double_precision() -> None:
    x, y = np.array([1e30, 1e-30], np.float32), np.zeros(8, np.float32)
    cukit.check_kernel(DIRECTED, "sums", grid=1, block=1, args=(x, y))
    below, above = (np.nextafter(x[0], np.float32(to)) for to in (0, np.inf))
    assert y.tolist() == [below, above, x[0], below, below, x[0], above, -below]


INFINITE = """
__global__ void sums(const float* x, float* y) {
  y[0] = __fadd_rd(x[0], 1.0f), y[1] = __fmul_rz(-x[0], 1.0f), y[2] = __fsub_ru(-x[0], 1.0f);
  y[3] = __fmul_rz(x[1], x[1]), y[4] = __fadd_rd(x[2], 1.0f);
}
"""


@emulator
def test_directed_rounding_of_infinities_and_overflow() -> None:
    x, y = np.array([np.inf, 3e38, np.nan], np.float32), np.zeros(5, np.float32)
    cukit.check_kernel(INFINITE, "sums", grid=1, block=1, args=(x, y))
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(y, [np.inf, -np.inf, -np.inf, largest, np.nan])


PUBLISH = """
__global__ void publish(int* data, unsigned* flag, int* y) {
  if (threadIdx.x > 0) return;
  if (blockIdx.x == 0) {
    data[0] = 7;
    __threadfence();
    asm volatile("st.STORE.global.u32 [%0], 1;" :: "l"(flag) : "memory");
  } else {
    unsigned seen = 0;
    while (seen == 0) asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag));
    __threadfence();
    y[0] = data[0];
  }
}
"""


@emulator
@pytest.mark.parametrize("store", ["volatile", "relaxed.gpu", "mmio.relaxed.sys", "weak"])
def test_strong_stores_publish_earlier_writes(store: str) -> None:
    y = np.zeros(1, np.int32)
    args = (np.zeros(1, np.int32), np.zeros(1, np.uint32), y)
    expected = pytest.raises(EmulatorError, match="race") if store == "weak" else nullcontext()
    with expected:
        source = PUBLISH.replace("STORE", store)
        cukit.check_kernel(source, "publish", grid=2, block=32, args=args, global_races=True)
        assert y[0] == 7


EDGES = """
__global__ void conversions(const double* x, long long* y) {
  const float narrow = x[0];
  y[0] = __float2int_rn(narrow), y[1] = __float2ll_rz(narrow);
  y[2] = __double2int_rn(x[0]), y[3] = __double2ll_rn(x[0]), y[4] = __double2uint_rz(x[0]);
}
__global__ void bits(unsigned mask, int* y) {
  y[0] = __fns(mask, 4, 1), y[1] = __fns(mask, 4, 2), y[2] = __fns(mask, 4, -2);
  y[3] = __fns(mask, 4, 0), y[4] = __fns(mask, 5, 0), y[5] = __fns(mask, 4, 4);
}
__global__ void errors(const double* x, double* y) {
  y[0] = erfcx(x[0]), y[1] = erfcx(x[1]), y[2] = erfcx(-x[1]), y[3] = erfcinv(x[2]);
  y[4] = erfcinv(x[3]), y[5] = erfcinv(x[4]), y[6] = normcdfinv(x[2]);
}
"""


@emulator
def test_functions_at_the_edges_of_their_domains() -> None:
    """NaN as an integer: 0, or the highest bit alone if one of the types has 64 bits."""
    converted = np.zeros(5, np.int64)
    args = (np.array([np.nan]), converted)
    cukit.check_kernel(EDGES, "conversions", grid=1, block=1, args=args)
    assert converted.tolist() == [0, -(2**63), -(2**31), -(2**63), 2**31]
    positions = np.zeros(6, np.int32)
    cukit.check_kernel(EDGES, "bits", grid=1, block=1, args=(np.uint32(0b10110001), positions))
    assert positions.tolist() == [4, 5, 0, 4, 5, -1]
    x, y = np.array([24.0, 1e6, 1e-300, 0.0, 1.5]), np.zeros(7)
    cukit.check_kernel(EDGES, "errors", grid=1, block=1, args=(x, y))
    # From mpmath. The last is the quantile of the normal distribution.
    expected = [0.02348755, 5.641896e-7, np.inf, 26.20946996, np.inf, -0.47693628, -37.04709641]
    np.testing.assert_allclose(y, expected, rtol=1e-6)


@emulator
def test_template_instances_are_launched() -> None:
    x = np.zeros(6, np.float64)
    check("fill<double>", x, np.float64(2.5))
    assert (x == 2.5).all()


@emulator
@pytest.mark.parametrize(
    ("entry", "args", "options", "error", "message"),
    [
        ("mine::scal", (), {}, LaunchError, "did you mean mine::scale"),
        ("fill", (), {}, LaunchError, "name an instance, such as fill<float>"),
        ("mine::scale", (X,), {}, LaunchError, "takes 3 arguments, got 1"),
        ("mine::scale", (X, X, 1 << 40), {}, LaunchError, "does not fit a parameter of 4 bytes"),
        ("fill<Missing>", (), {}, CompileError, "Missing"),
        ("mine::scale", (), {"block": 2000}, ConfigError, "at most 1024 threads"),
        ("mine::scale", (), {"constants": {"facto": X}}, LaunchError, "known: factor, launches"),
        ("mine::scale", (), {"constants": {"factor": X}}, LaunchError, "variable of 4 bytes"),
        ("mine::scale", (), {"include": ["nowhere"]}, ConfigError, "no folder nowhere"),
        ("mine::scale", (), {"options": ["-std=c++3"]}, ConfigError, "c++3"),
    ],
)
def test_invalid_calls_are_rejected(
    entry: str, args: tuple[Any, ...], options: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error) as caught:
        check(entry, *args, **options)
    assert message in str(caught.value)


@emulator
def test_headers_are_found_beside_the_file_and_in_include_folders(tmp_path: Path) -> None:
    (tmp_path / "near.h").write_text(
        '#pragma once\n#include "far.h"\nDEVICE int one() { return ONE; }'
    )
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "far.h").write_text("#define DEVICE __device__ inline\n")
    main = tmp_path / "main.cu"
    main.write_text(
        '#include "near.h"\n#include <not_installed.h>\n#include "near.h"\n'
        "void host(not_installed::type x) { k<<<1, 2>>>(x); }\n"
        "__global__ void k(int* x) { x[threadIdx.x + 1] = one(); }\n"
    )
    x = np.zeros(4, np.int32)
    cukit.check_kernel(
        main, grid=1, block=3, args=[x], include=[tmp_path / "lib"], defines={"ONE": 7}
    )
    assert x.tolist() == [0, 7, 7, 7]
    with pytest.raises(EmulatorError, match=r"main\.cu:5"):
        cukit.check_kernel(
            main, grid=1, block=4, args=[x], include=[tmp_path / "lib"], defines={"ONE": 7}
        )


@emulator
def test_textures_and_unknown_ptx_stop_the_launch_that_reaches_them() -> None:
    source = """
    __global__ void fetch(cudaTextureObject_t t, float* x) { *x = tex2D<float>(t, 0.5f, 0.5f); }
    __global__ void unknown(float* x) { if (*x > 0) asm volatile("frobnicate.f32 %0;" : "+f"(*x)); }
    """
    x = np.zeros(1, np.float32)
    with pytest.raises(EmulatorError, match="tex2D: textures"):
        cukit.check_kernel(source, "fetch", grid=1, block=1, args=[np.uint64(0), x])
    cukit.check_kernel(source, "unknown", grid=1, block=1, args=[x])
    x[0] = 1
    with pytest.raises(EmulatorError, match=r"inline PTX: frobnicate\.f32"):
        cukit.check_kernel(source, "unknown", grid=1, block=1, args=[x])


@emulator
def test_xorwow_offsets_equal_repeated_calls() -> None:
    source = """
    #include <curand_kernel.h>
    __global__ void numbers(unsigned long long seed, size_t offset, unsigned* out, int n) {
      curandState state;
      curand_init(seed, blockIdx.x, offset, &state);
      for (int i = 0; i < n; ++i) out[blockIdx.x * n + i] = curand(&state);
    }
    """
    whole, later = np.zeros((2, 12), np.uint32), np.zeros((2, 5), np.uint32)
    seed = np.uint64(0x123456789ABCDEF)
    cukit.check_kernel(source, grid=2, block=1, args=[seed, 0, whole, 12])
    cukit.check_kernel(source, grid=2, block=1, args=[seed, 7, later, 5])
    np.testing.assert_array_equal(whole[:, 7:], later)
    assert not (whole[0] == whole[1]).any()


@emulator
def test_xorwow_matches_curand() -> None:
    """xorwow.txt contains numbers generated by cuRAND (make_xorwow.cu)."""
    source = """
    #include <curand_kernel.h>
    __global__ void numbers(const unsigned long long* starts, unsigned* bits, float* floats) {
      const int i = blockIdx.x;
      curandStateXORWOW_t state;
      curand_init(starts[3 * i], starts[3 * i + 1], starts[3 * i + 2], &state);
      for (int k = 0; k < 6; ++k) bits[6 * i + k] = curand(&state);
      floats[3 * i] = curand_uniform(&state);
      floats[3 * i + 1] = curand_normal(&state);
      floats[3 * i + 2] = curand_normal(&state);
    }
    """
    lines = [line.split() for line in XORWOW.read_text().splitlines()]
    starts = np.array([[int(word) for word in line[:3]] for line in lines], np.uint64)
    bits, floats = np.zeros((len(lines), 6), np.uint32), np.zeros((len(lines), 3), np.float32)
    cukit.check_kernel(source, grid=len(lines), block=1, args=[starts, bits, floats])
    np.testing.assert_array_equal(bits, [[int(word) for word in line[3:9]] for line in lines])
    expected = [[float(word) for word in line[9:]] for line in lines]
    np.testing.assert_allclose(floats, expected, rtol=2e-6, atol=1e-7)


# Rewriting ----------------------------------------------------------------------------------


def rewritten(text: str) -> str:
    return rewrite(text, device_macros([text])).text


@pytest.mark.parametrize(
    "text",
    [
        'a = R"x(")x" + "\\"}" + \'"\'; // }\n',
        "/* { */ #\n#define X {\\\n }\nint i = 0xFFull;",
        "<<<>>>->",
    ],
)
def test_tokens_reproduce_the_text(text: str) -> None:
    assert join(tokenize(text)) == text


def test_host_functions_are_removed_and_line_numbers_stay() -> None:
    text = """#include <vector>
static float *helper(std::vector<int> &v)
{
  return k<<<1, 2>>>(v), nullptr;
}
struct Shape { int n; __device__ int get() { return n; } };
Shape global{3};
template <typename T>
__device__ T keep(T x) { return x; }
constexpr int also() { return 1; }
"""
    result = rewritten(text)
    assert result.count("\n") == text.count("\n")
    assert "helper" not in result and "<<<" not in result  # noqa: PT018 - one removal
    for kept in ("Shape global{3};", "T keep(T x)", "int also()", "int get()"):
        assert kept in result
        assert text[: text.index(kept)].count("\n") == result[: result.index(kept)].count("\n")


def test_dynamic_shared_memory_becomes_a_pointer() -> None:
    inside = rewritten("__global__ void k() { extern __shared__ __align__(16) float t[][33]; }")
    assert "float (*t)[33] = reinterpret_cast<float (*)[33]>" in inside
    assert "#define t (reinterpret_cast<int*>" in rewritten("extern __shared__ int t[];")


def test_inline_ptx_becomes_calls() -> None:
    code = translate_asm(tokenize('"add.s32 %0, %1, 4;" : "=r"(sum) : "r"(x + 1)'))
    assert "put(cukit_0, ::cukit::emulator::ptx::get<std::int32_t>(cukit_1) + " in code
    assert "put((sum), cukit_0)" in code
    assert "not_emulated" in translate_asm(tokenize('"wgmma.fence.sync.aligned;"'))
