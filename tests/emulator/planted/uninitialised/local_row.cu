// A local array is read before anything has been stored in it.
//
// launch: block=32
// arg: np.array([3], np.int32)
// arg: np.zeros(32, np.float32)
// result: np.full(32, 1.0)
// report: uninitialised variable: `row` is used before it has a value
extern "C" __global__ void local_row(const int* index, float* out) {
#if BROKEN
  float row[8];
#else
  float row[8] = {1, 1, 1, 1, 1, 1, 1, 1};
#endif
  out[threadIdx.x] = row[*index];  // <- reported
}
