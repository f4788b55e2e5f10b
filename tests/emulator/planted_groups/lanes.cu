// Warp-wide instructions, which all lanes must execute. One block of 32 threads.
#include "common/platform.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/movmatrix.cuh"
#include "common/ptx/shared_address.cuh"
#include "common/ptx/stmatrix.cuh"

// `instruction`: 0 ldmatrix | 1 stmatrix | 2 mma.sync | 3 movmatrix, twice.
// `bug`: 0 all lanes execute it | 1 the upper half exits | 2 the upper half waits at __syncwarp.
// out = x, [4, 32]: register, lane.
extern "C" __global__ void planted_lanes(const unsigned* x, int instruction, int bug,
                                         unsigned* out) {
  __shared__ uint4 rows[32];
  const int lane = threadIdx.x;
  unsigned r[4];
  for (int i = 0; i < 4; ++i) r[i] = x[i * 32 + lane];
  // Four 8 x 8 matrices: register i of lane 4 r + c is word c of row r of matrix i.
  for (int i = 0; i < 4; ++i) {
    reinterpret_cast<unsigned*>(rows)[i * 32 + lane] = r[i];
  }
  __syncwarp();
  if (lane >= 16 && bug == 1) return;
  if (lane < 16 || bug != 2) {
    const unsigned address = cukit::shared_address(&rows[lane]);
    if (instruction == 0) {
      cukit::ldmatrix_x4(r, address);
    } else if (instruction == 1) {
      cukit::stmatrix_x4(address, r);
    } else if (instruction == 2) {
      const unsigned zeros[4] = {};
      cukit::mma_16x8x16<__half>(reinterpret_cast<float(&)[4]>(r), zeros, 0, 0);
    } else {
      for (unsigned& each : r) each = cukit::transpose_8x8(cukit::transpose_8x8(each));
    }
  }
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    out[i * 32 + lane] = instruction == 1 ? reinterpret_cast<unsigned*>(rows)[i * 32 + lane] : r[i];
  }
}
