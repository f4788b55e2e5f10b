// A member of a structure passed by value is indexed like an array.
//
// launch: block=32
// arg: np.array([(1, 2, 3, 4)], "f4,f4,f4,f4").view("V16")
// arg: np.zeros(32, np.float32)
// result: np.arange(32) % 4 + 1
// report: out of bounds: load of 'const float' outside of the variable that the pointer points into
// report: thread \(4, 0, 0\)
struct Weights {
  float first, second, third, fourth;
};

extern "C" __global__ void argument_by_value(Weights weights, float* out) {
  const float* const from = &weights.first;
  out[threadIdx.x] = from[BROKEN ? threadIdx.x % 8 : threadIdx.x % 4];  // <- reported
}
