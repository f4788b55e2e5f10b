// A wild pointer, compiled without checks of accesses: the write raises SIGSEGV.
//
// launch: block=64
// options: checked=False
// arg: np.full(64, 0x5f0000000000, np.uint64)
// arg: np.zeros(64, np.float32)
// result: np.full(64, 1.0)
// report: wild pointer: access at global memory address 0x5f0000000000, far from
extern "C" __global__ void wild_pointer_unchecked(const unsigned long long* table, float* out) {
  float* to = BROKEN ? reinterpret_cast<float*>(table[threadIdx.x]) : out + threadIdx.x;
  *to = 1.0f;  // <- reported
}
