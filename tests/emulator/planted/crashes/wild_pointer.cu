// A pointer loaded from data that points far from all allocations.
//
// launch: block=64
// arg: np.full(64, 0x5f0000000000, np.uint64)
// arg: np.zeros(64, np.float32)
// result: np.full(64, 1.0)
// report: out of bounds: write of 4 bytes at global memory address 0x5f0000000000, far from
// report: thread \(0, 0, 0\)
extern "C" __global__ void wild_pointer(const unsigned long long* table, float* out) {
  float* to = BROKEN ? reinterpret_cast<float*>(table[threadIdx.x]) : out + threadIdx.x;
  *to = 1.0f;  // <- reported
}
