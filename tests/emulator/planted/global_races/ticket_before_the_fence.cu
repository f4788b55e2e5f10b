// The fence comes after the ticket is taken, too late to publish the block's part.
//
// launch: grid=8, block=32
// options: global_races=True
// arg: np.zeros(8, np.float32)
// arg: np.zeros(1, np.int32)
// arg: np.zeros(1, np.float32)
// result: [28]
// report: race: read of 4 bytes at byte \d+ of argument 0
extern "C" __global__ void ticket_before_the_fence(float* parts, int* tickets, float* out) {
  if (threadIdx.x != 0) return;
  parts[blockIdx.x] = blockIdx.x;  // <- reported
#if !BROKEN
  __threadfence();
#endif
  const int ticket = atomicAdd(tickets, 1);
  __threadfence();
  if (ticket == gridDim.x - 1) {
    float sum = 0.0f;
    for (int b = 0; b < gridDim.x; ++b) sum += parts[b];  // <- reported
    out[0] = sum;
  }
}
