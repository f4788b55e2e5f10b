// Gradient of gelu_and_mul: grad_x = (grad_out * up * gelu'(gate) | grad_out * gelu(gate)).
//
// Mapping and macros: common/gated.cuh, and ACTIVATION GeluErf|GeluTanh. No shared memory. Minimum
// architecture: sm_80. Computes in float; deterministic. Reference: cukit/reference/activations.py.
#include "common/platform.cuh"
#include "common/activation.cuh"
#include "common/gated.cuh"
#include "common/types.cuh"

using T = cukit::element_t;

extern "C" __global__ void __launch_bounds__(THREADS) gelu_and_mul_backward(
    const T* __restrict__ grad_out,  // [rows, cols]
    const T* __restrict__ x,         // [rows, 2 * cols]
    T* __restrict__ grad_x,          // [rows, 2 * cols]
    long long num_vecs,              // rows * cols / VEC
    int vecs_per_row) {              // cols / VEC
  cukit::gated_backward<cukit::activation_t<T>>(grad_out, x, grad_x, num_vecs, vecs_per_row);
}
