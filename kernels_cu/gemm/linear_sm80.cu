// Dense matrix products with an epilogue, on mma.sync: one block per tile
// (gemm/dense_tile_sm80.cuh, which documents the macros).
//
// Minimum architecture: sm_80. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/gemm.py.
#include "gemm/dense_tile_sm80.cuh"

#include "common/platform.cuh"
#include "gemm/parameters.cuh"

using cukit::T;

extern "C" __global__ void __launch_bounds__(THREADS) linear_sm80(
    const T* __restrict__ a,     // [m, k]; MN-major: [k, m]
    const T* __restrict__ b,     // [n, k]; MN-major: [k, n]
    const T* __restrict__ up,    // like b; only with PARTS 2
    const T* __restrict__ bias,  // [n], or null
    T* __restrict__ out,         // [m, n]
    T* __restrict__ kept,        // [m, PARTS * n]; only with KEEPS
    const cukit::DenseParameters p) {
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  cukit::compute_tile({a, b, up, bias, out, kept, p.m, p.n, p.k}, static_cast<int>(blockIdx.x),
                      stages);
}
