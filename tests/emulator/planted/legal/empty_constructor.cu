// A shared array of a class with an empty constructor.
//
// launch: block=32
// arg: np.arange(32, dtype=np.float32)
// arg: np.zeros(32, np.float32)
// result: np.arange(31, -1, -1) + 1
struct Pair {
  float value;
  int rank;
  __device__ Pair() {}
  __device__ Pair(float v, int r) : value(v), rank(r) {}
};

extern "C" __global__ void empty_constructor(const float* x, float* out) {
  __shared__ Pair pairs[32];
  const int t = threadIdx.x;
  pairs[t] = Pair(x[t], 1);
  __syncthreads();
  out[t] = pairs[31 - t].value + pairs[31 - t].rank;
}
