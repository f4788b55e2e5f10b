// Adjacent float16 elements are written by different blocks.
//
// launch: grid=2, block=32
// options: global_races=True
// arg: np.zeros(64, np.float16)
// result: np.tile([0, 1], 32)
#include <cuda_fp16.h>

extern "C" __global__ void halves_of_a_word(__half* out) {
  out[2 * threadIdx.x + blockIdx.x] = __float2half(blockIdx.x);
}
