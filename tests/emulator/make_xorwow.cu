// Prints numbers of cuRAND's generator XORWOW, computed on the host by the functions of cuRAND's
// header. Each line: seed, subsequence, offset, six 32-bit numbers, one uniform and two normal
// numbers.
//
//   nvcc -o make_xorwow make_xorwow.cu && ./make_xorwow > xorwow.txt
#define QUALIFIERS static inline __host__ __device__
#include <curand_kernel.h>

#include <cstdio>

int main() {
  const unsigned long long seeds[] = {0, 1, 42, 0x123456789ABCDEF, ~0ull};
  const unsigned long long subsequences[] = {0, 1, 7, 1000003};
  const unsigned long long offsets[] = {0, 5, 123456789};
  for (const auto seed : seeds) {
    for (const auto subsequence : subsequences) {
      for (const auto offset : offsets) {
        curandStateXORWOW_t state;
        curand_init(seed, subsequence, offset, &state);
        std::printf("%llu %llu %llu", seed, subsequence, offset);
        for (int i = 0; i < 6; ++i) std::printf(" %u", curand(&state));
        std::printf(" %.9g", curand_uniform(&state));
        const float first = curand_normal(&state);
        std::printf(" %.9g %.9g\n", first, curand_normal(&state));
      }
    }
  }
}
