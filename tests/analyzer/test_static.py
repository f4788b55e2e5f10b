"""Facts of compiled kernels, compared with ptxas' log and with kernels of known access widths."""

from __future__ import annotations

import re

import pytest

from cukit.analyzer.devices import analysis_device
from cukit.analyzer.static import KernelSource, inspect, kernel_source
from cukit.core.compiler import nvrtc_version
from cukit.errors import CompileError, ConfigError

cupy = pytest.importorskip("cupy", reason="compiling needs NVRTC")

# The decoder has one table for all architectures. NVRTC 13 no longer compiles for Volta.
ARCHES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
if nvrtc_version() < (13, 0):
    ARCHES = ("sm_70", *ARCHES)
SINCE_AMPERE = ARCHES[ARCHES.index("sm_80") :]

WIDTHS = r"""
extern "C" __global__ void __launch_bounds__(192) widths(
    const unsigned char* a, const unsigned short* b, const float* c, const float2* d,
    const float4* e, unsigned char* o8, unsigned short* o16, float* o32, float2* o64,
    float4* o128) {
  __shared__ float tile[192];
  const int i = blockIdx.x * 192 + threadIdx.x;
  tile[threadIdx.x] = c[i];
  __syncthreads();
  o8[i] = a[i] + 1;
  o16[i] = b[i] + 1;
  o32[i] = tile[threadIdx.x ^ 1];
  const float2 y = d[i];
  o64[i] = make_float2(y.y, y.x);
  const float4 z = e[i];
  o128[i] = make_float4(z.w, z.z, z.y, z.x);
  atomicAdd(o32 + i, 1.0f);
}
"""

# More live values than the 64 registers per thread in a block of 1024 threads.
SPILLING = r"""
extern "C" __global__ void __launch_bounds__(1024) spilling(float* x, int n) {
  float v[128];
  #pragma unroll
  for (int i = 0; i < 128; ++i) v[i] = x[i * n];
  for (int r = 0; r < n; ++r) {
    #pragma unroll
    for (int i = 0; i < 128; ++i) v[i] = v[i] * v[(i + 57) % 128] + x[r];
  }
  #pragma unroll
  for (int i = 0; i < 128; ++i) x[i * n] = v[i];
}
"""

TEMPLATE = "template <typename T> __global__ void scale(T* x, T by) { x[threadIdx.x] *= by; }"


@pytest.mark.parametrize("arch", ARCHES)
def test_access_widths_equal_those_of_the_source(arch: str) -> None:
    kernel = cupy.RawKernel(WIDTHS, "widths")
    found = inspect(kernel, arch).launch(analysis_device(arch), (100, 1, 1), (192, 1, 1), 0)
    access = found.memory_access
    assert access is not None
    counted = {(w.operation, w.bits): w.instructions for w in access.widths}
    for operation in ("load", "store"):
        for bits in (8, 16, 32, 64, 128):
            assert counted.pop((operation, bits)) == 1, (operation, bits)
    assert counted == {("shared load", 32): 1, ("shared store", 32): 1}
    assert (access.atomics, access.bulk_copies) == (1, 0)
    resources = found.resources
    assert resources is not None
    assert resources.static_shared_bytes == 192 * 4, (
        "without the shared memory that the driver reserves"
    )
    assert resources.max_threads_per_block == 192
    assert (resources.local_bytes, resources.spill_store_bytes) == (0, 0)


@pytest.mark.parametrize("arch", ARCHES)
def test_instruction_counts_equal_those_of_the_source(arch: str) -> None:
    kernel = cupy.RawKernel(WIDTHS, "widths")
    mix = inspect(kernel, arch).launch(analysis_device(arch), None, (192, 1, 1), 0).instruction_mix
    assert mix is not None
    assert mix.by_class["global memory"] == 5 + 5 + 1, "loads, stores and the atomic"
    assert mix.by_class["shared memory"] == 2
    assert sum(mix.by_class.values()) == mix.instructions
    # One opcode has two meanings: integer additions must not count as floating point. The
    # compiler may load constants with HFMA2, which counts as floating point.
    assert mix.by_class.get("floating point", 0) <= 2
    assert not {"tensor core", "local memory", "other"} & set(mix.by_class)


@pytest.mark.parametrize("arch", SINCE_AMPERE)
def test_arithmetic_instructions_are_classified(arch: str) -> None:
    code = r"""
extern "C" __global__ void f(float* x, double* y, const unsigned* a) {
  float c[4] = {};
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]));
  asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(c[1]));
  asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(c[2]) : "f"(c[0]), "f"(c[3]));
  double d;
  asm volatile("fma.rn.f64 %0, %1, %1, %1;" : "=d"(d) : "d"(y[0]));
  x[0] = c[0] + c[1] + c[2];
  y[1] = d;
}"""
    mix = (
        inspect(KernelSource("f", code), arch)
        .launch(analysis_device(arch), None, (32, 1, 1), 0)
        .instruction_mix
    )
    assert mix is not None
    assert mix.by_class["tensor core"] == 1
    assert mix.by_class["special and conversion"] == 1
    assert mix.by_class["floating point"] == 1 + 1 + 2
    assert "other" not in mix.by_class


@pytest.mark.parametrize("arch", ARCHES)
def test_spills_are_counted(arch: str) -> None:
    kernel = inspect(KernelSource("spilling", SPILLING), arch)
    resources = kernel.resources()
    assert resources.spill_store_bytes
    assert resources.spill_load_bytes
    assert resources.local_bytes >= 4 * (128 - 64)
    assert resources.registers <= 64
    launch = kernel.launch(analysis_device(arch), None, (1024, 1, 1), 0)
    assert launch.memory_access is not None
    counted = {w.operation: w.instructions for w in launch.memory_access.widths}
    assert launch.instruction_mix is not None
    spilled = counted["local load"] + counted["local store"]
    assert launch.instruction_mix.by_class["local memory"] >= spilled > 0
    assert launch.waves is None, "without a grid"


@pytest.mark.parametrize("arch", SINCE_AMPERE)
def test_widths_of_asynchronous_copies_are_counted(arch: str) -> None:
    code = r"""
extern "C" __global__ void f(const char* p, unsigned a) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(a), "l"(p));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(a + 64), "l"(p + 64));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(a + 128), "l"(p + 128));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(a + 256), "l"(p + 256));
}"""
    launch = inspect(KernelSource("f", code), arch).launch(
        analysis_device(arch), None, (32, 1, 1), 0
    )
    assert launch.memory_access is not None
    counted = {(w.operation, w.bits): w.instructions for w in launch.memory_access.widths}
    assert counted == {("async copy", 32): 1, ("async copy", 64): 1, ("async copy", 128): 2}


def test_asynchronous_and_bulk_copies_are_counted() -> None:
    code = r"""
extern "C" __global__ void copies(const char* from, void* map, char* to) {
  __shared__ alignas(128) char tile[2048];
  const unsigned at = __cvta_generic_to_shared(tile);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at + 64), "l"(from));
  asm volatile("cp.async.wait_all;");
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%1, {%2, %3}], [%0];" ::"r"(at), "l"(map), "r"(0), "r"(0) : "memory");
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%1], [%0], 16;" ::"r"(at), "l"(to) : "memory");
}"""  # noqa: E501
    device = analysis_device("sm_90")
    launch = inspect(KernelSource("copies", code), "sm_90a").launch(device, None, (32, 1, 1), 0)
    assert launch.memory_access is not None
    counted = {(w.operation, w.bits) for w in launch.memory_access.widths}
    assert {("async copy", 128), ("async copy", 32)} <= counted
    assert launch.memory_access.bulk_copies == 2


def test_a_template_is_found_by_its_expression() -> None:
    module = cupy.RawModule(code=TEMPLATE, name_expressions=("scale<float>", "scale<double>"))
    kernel = inspect(module, "sm_80", "scale<double>")
    assert kernel.info.parameter_bytes == (8, 8)
    with pytest.raises(ConfigError, match="which function"):
        inspect(module, "sm_80")


def test_a_cubin_is_read_without_spill_information() -> None:
    from cukit.core.compiler import KernelSpec, compile_kernel

    spec = KernelSpec("analyzer/spin.cu", "spin", (), 1)
    compiled = compile_kernel(spec, "sm_90a")
    kernel = inspect(compiled.path, "sm_90", "spin")
    assert kernel.info.registers == compiled.info.registers
    assert kernel.resources().spill_store_bytes is None


def test_options_of_the_kernel_apply() -> None:
    code = 'extern "C" __global__ void f(float* x, NUMBER y) { x[0] = y; }'
    kernel = cupy.RawKernel(code, "f", options=("-DNUMBER=double", "-arch=sm_75"))
    assert inspect(kernel, "sm_90").info.parameter_bytes == (8, 8)


def test_a_kernel_that_does_not_compile_quotes_its_line() -> None:
    broken = cupy.RawKernel('extern "C" __global__ void f(float* x) {\n  x[0] = y;\n}', "f")
    with pytest.raises(CompileError, match=r'(?s)f does not compile.*f\.cu\(2\).*"y" is undefined'):
        inspect(broken, "sm_80")


def test_a_missing_entry_is_named() -> None:
    with pytest.raises(CompileError, match=r"no extern \"C\" entry 'g'.*'widths'"):
        inspect(KernelSource("g", WIDTHS), "sm_80")


def test_values_that_are_not_kernels_are_rejected() -> None:
    with pytest.raises(ConfigError, match="expected a RawKernel"):
        kernel_source(42)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_resources_of_our_kernels_match_ptxas(arch: str) -> None:
    """Compared with the compiler's log, which is stored next to the cubin."""
    from cukit.core.compiler import compile_kernel
    from cukit.registry import get_op

    specs = get_op("cross_entropy").specs(analysis_device(arch))
    for spec in specs[:2]:
        compiled = compile_kernel(spec, arch)
        log = compiled.log
        words = log.partition(f"Function properties for {spec.entry}\n")[2]
        shared = re.search(r"(\d+) bytes smem", words)
        resources = inspect(compiled.path, arch, spec.entry).resources()
        assert f"Used {resources.registers} registers" in words
        assert resources.static_shared_bytes == (int(shared[1]) if shared else 0)
        assert f"{resources.local_bytes} bytes stack frame" in words
