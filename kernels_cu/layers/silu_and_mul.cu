// SwiGLU: out = silu(gate) * up, with silu(z) = z / (1 + exp(-z)); gate and up are the first and
// the second half of each row of x.
//
// Paper: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
// Mapping and macros: common/gated.cuh. No shared memory. Minimum architecture: sm_80.
// Computes in float; deterministic. Reference: cukit/reference/activations.py.
#include "common/platform.cuh"
#include "common/activation.cuh"
#include "common/gated.cuh"
#include "common/types.cuh"

using T = cukit::element_t;

extern "C" __global__ void __launch_bounds__(THREADS) silu_and_mul(
    const T* __restrict__ x,  // [rows, 2 * cols]
    T* __restrict__ out,      // [rows, cols]
    long long num_vecs,       // rows * cols / VEC
    int vecs_per_row) {       // cols / VEC
  cukit::gated_forward<cukit::Silu<T>>(x, out, num_vecs, vecs_per_row);
}
