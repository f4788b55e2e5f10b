"""Variables and parameters are found by address in the debug information of a library."""

from __future__ import annotations

from pathlib import Path

import pytest

from cukit.core.kernel import KernelSpec
from cukit.emulator.builder import build_kernel, named_library
from cukit.emulator.names import Names

pytestmark = pytest.mark.emulator

SOURCE = """
#include "common/platform.cuh"
struct Pair { float first; int rest[2]; };
namespace { template <int N> struct Rows { float4 row[N]; }; }
extern "C" __global__ void places(const float* x, float* out) {
  __shared__ int tile[3][5];
  __shared__ Pair pairs[2];
  __shared__ Rows<4> rows;
  __shared__ int alone;
  // Indices that the compiler does not know: clang removes elements that are never accessed.
  const int i = threadIdx.x;
  tile[i % 3][i % 5] = 1;
  pairs[i % 2] = Pair{x[0], {i, i}};
  rows.row[i % 4] = float4{x[0], x[1], x[2], x[3]};
  alone = 2;
  __syncthreads();
  const float4 row = rows.row[i / 8];
  const Pair pair = pairs[i / 16];
  out[i] = tile[i / 16][i / 8] + pair.first + pair.rest[i / 16] + row.x + row.y + row.z + row.w;
  out[i] += alone;
}
"""


def test_every_byte_of_shared_memory_has_a_name(tmp_path: Path):
    (tmp_path / "places.cu").write_text(SOURCE)
    spec = KernelSpec(str(tmp_path / "places.cu"), "places", (), 32)
    names = Names(named_library(build_kernel(spec, "sm_90", True, False).library))
    found = {names.shared(byte) for byte in range(4096)}
    found = {text for text in found if text and "past the end" not in text}
    expected = {f"`tile[{i}][{j}]` of `__shared__ int tile[3][5]`"
                for i in range(3) for j in range(5)}  # fmt: skip
    for i in range(2):
        expected |= {
            f"`pairs[{i}].{member}` of `__shared__ Pair pairs[2]`"
            for member in ("first", "rest[0]", "rest[1]")
        }
    expected |= {
        f"`rows.row[{i}].{member}` of `__shared__ Rows<4> rows`"
        for i in range(4)
        for member in "xyzw"
    }
    assert found == expected | {"`__shared__ int alone`"}
    assert [names.parameter("places", i) for i in range(3)] == ["x", "out", ""]
