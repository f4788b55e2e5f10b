// Replaces cuRAND's device functions: the generators XORWOW and Philox4x32-10, with the library's
// sequences for the same seed, subsequence and offset.
#pragma once

#include "common/emulator/language.h"

struct curandStateXORWOW {
  unsigned d, v[5];
  int boxmuller_flag;
  float boxmuller_extra;
  double boxmuller_extra_double;
};
using curandStateXORWOW_t = curandStateXORWOW;
using curandState_t = curandStateXORWOW;
using curandState = curandStateXORWOW;

struct curandStatePhilox4_32_10 {
  uint4 ctr, output;
  uint2 key;
  unsigned STATE;
  int boxmuller_flag;
  float boxmuller_extra;
  double boxmuller_extra_double;
};
using curandStatePhilox4_32_10_t = curandStatePhilox4_32_10;

// XORWOW: Marsaglia's xorshift of 160 bits, and a Weyl sequence -----------------------------------

inline unsigned curand(curandStateXORWOW* state) {
  unsigned* v = state->v;
  const unsigned t = v[0] ^ (v[0] >> 2);
  v[0] = v[1], v[1] = v[2], v[2] = v[3], v[3] = v[4];
  v[4] = (v[4] ^ (v[4] << 4)) ^ (t ^ (t << 1));
  state->d += 362437;
  return v[4] + state->d;
}
inline void skipahead(unsigned long long offset, curandStateXORWOW* state) {
  ::cukit::emulator::skip_xorwow(state->v, offset, 0);
  state->d += 362437 * static_cast<unsigned>(offset);
}
// Subsequences are 2^67 numbers apart, a multiple of the Weyl sequence's period, so that the state
// of the Weyl sequence does not change.
inline void skipahead_sequence(unsigned long long number, curandStateXORWOW* state) {
  ::cukit::emulator::skip_xorwow(state->v, number, 67);
}
inline void curand_init(unsigned long long seed, unsigned long long subsequence,
                        unsigned long long offset, curandStateXORWOW* state) {
  const unsigned low = 1099087573u * (static_cast<unsigned>(seed) ^ 0xaad26b49u);
  const unsigned high = 2591861531u * (static_cast<unsigned>(seed >> 32) ^ 0xf7dcefddu);
  state->d = 6615241u + high + low;
  state->v[0] = 123456789u + low;
  state->v[1] = 362436069u ^ low;
  state->v[2] = 521288629u + high;
  state->v[3] = 88675123u ^ high;
  state->v[4] = 5783321u + low;
  skipahead_sequence(subsequence, state);
  skipahead(offset, state);
  state->boxmuller_flag = 0;
  state->boxmuller_extra = 0;
  state->boxmuller_extra_double = 0;
}

// Philox: ten rounds of a block cipher over a counter ---------------------------------------------

namespace cukit::emulator {

inline uint4 philox(uint4 counter, uint2 key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t x = std::uint64_t{0xD2511F53u} * counter.x;
    const std::uint64_t z = std::uint64_t{0xCD9E8D57u} * counter.z;
    counter = {static_cast<unsigned>(z >> 32) ^ counter.y ^ key.x, static_cast<unsigned>(z),
               static_cast<unsigned>(x >> 32) ^ counter.w ^ key.y, static_cast<unsigned>(x)};
    key.x += 0x9E3779B9u;
    key.y += 0xBB67AE85u;
  }
  return counter;
}
inline void advance_philox(curandStatePhilox4_32_10* state, std::uint64_t by) {
  const unsigned __int128 low = (static_cast<unsigned __int128>(state->ctr.y) << 32 | state->ctr.x) + by;
  state->ctr.x = static_cast<unsigned>(low);
  state->ctr.y = static_cast<unsigned>(low >> 32);
  if (low >> 64 != 0 && ++state->ctr.z == 0) ++state->ctr.w;
}

}  // namespace cukit::emulator

inline void skipahead(unsigned long long offset, curandStatePhilox4_32_10* state) {
  const unsigned within = state->STATE + static_cast<unsigned>(offset & 3);
  ::cukit::emulator::advance_philox(state, (offset >> 2) + (within >> 2));
  state->STATE = within & 3;
  state->output = ::cukit::emulator::philox(state->ctr, state->key);
}
inline void skipahead_sequence(unsigned long long number, curandStatePhilox4_32_10* state) {
  const std::uint64_t high = (static_cast<std::uint64_t>(state->ctr.w) << 32 | state->ctr.z) + number;
  state->ctr.z = static_cast<unsigned>(high);
  state->ctr.w = static_cast<unsigned>(high >> 32);
  state->output = ::cukit::emulator::philox(state->ctr, state->key);
}
inline void curand_init(unsigned long long seed, unsigned long long subsequence,
                        unsigned long long offset, curandStatePhilox4_32_10* state) {
  state->ctr = {0, 0, 0, 0};
  state->key = {static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32)};
  state->STATE = 0;
  state->boxmuller_flag = 0;
  state->boxmuller_extra = 0;
  state->boxmuller_extra_double = 0;
  skipahead_sequence(subsequence, state);
  skipahead(offset, state);
}
inline unsigned curand(curandStatePhilox4_32_10* state) {
  const unsigned numbers[4] = {state->output.x, state->output.y, state->output.z, state->output.w};
  const unsigned result = numbers[state->STATE];
  if (++state->STATE == 4) {
    ::cukit::emulator::advance_philox(state, 1);
    state->output = ::cukit::emulator::philox(state->ctr, state->key);
    state->STATE = 0;
  }
  return result;
}
inline uint4 curand4(curandStatePhilox4_32_10* state) {
  const unsigned x = curand(state), y = curand(state), z = curand(state), w = curand(state);
  return {x, y, z, w};
}

// Distributions -----------------------------------------------------------------------------------

namespace cukit::emulator {

constexpr float kInverse = 2.3283064e-10f;  // 2^-32
inline float uniform(unsigned x) { return x * kInverse + kInverse / 2.0f; }
inline double uniform_double(unsigned x) { return x * 2.3283064365386963e-10 + 1.1641532182693481e-10; }
inline double uniform_double(unsigned x, unsigned y) {
  const unsigned long long bits = static_cast<unsigned long long>(x) ^ static_cast<unsigned long long>(y) << 21;
  return static_cast<double>(bits) * 1.1102230246251565e-16 + 5.5511151231257827e-17;
}
inline float2 normal(unsigned x, unsigned y) {
  constexpr float kAngle = kInverse * 6.2831855f;
  const float radius = sqrtf(-2.0f * logf(uniform(x)));
  const float angle = y * kAngle + kAngle / 2.0f;
  return {radius * sinf(angle), radius * cosf(angle)};
}
inline double2 normal_double(double u, double v) {
  const double radius = sqrt(-2.0 * log(u));
  return {radius * sin(6.283185307179586 * v), radius * cos(6.283185307179586 * v)};
}
template <typename State>
inline double2 two_uniform_doubles(State* state) {
  const unsigned x = curand(state), y = curand(state), z = curand(state), w = curand(state);
  return {uniform_double(x, y), uniform_double(z, w)};
}

}  // namespace cukit::emulator

template <typename State>
inline float curand_uniform(State* state) { return ::cukit::emulator::uniform(curand(state)); }
inline double curand_uniform_double(curandStateXORWOW* state) {
  const unsigned x = curand(state), y = curand(state);
  return ::cukit::emulator::uniform_double(x, y);
}
inline double curand_uniform_double(curandStatePhilox4_32_10* state) {
  return ::cukit::emulator::uniform_double(curand(state));
}
inline float4 curand_uniform4(curandStatePhilox4_32_10* state) {
  const uint4 x = curand4(state);
  using ::cukit::emulator::uniform;
  return {uniform(x.x), uniform(x.y), uniform(x.z), uniform(x.w)};
}
template <typename State>
inline float2 curand_normal2(State* state) {
  const unsigned x = curand(state), y = curand(state);
  return ::cukit::emulator::normal(x, y);
}
// The second of two numbers is stored for the next call.
template <typename State>
inline float curand_normal(State* state) {
  constexpr int kFloatWaits = 1;
  if (state->boxmuller_flag == kFloatWaits) {
    state->boxmuller_flag = 0;
    return state->boxmuller_extra;
  }
  const float2 two = curand_normal2(state);
  state->boxmuller_extra = two.y;
  state->boxmuller_flag = kFloatWaits;
  return two.x;
}
inline float4 curand_normal4(curandStatePhilox4_32_10* state) {
  const uint4 x = curand4(state);
  const float2 a = ::cukit::emulator::normal(x.x, x.y), b = ::cukit::emulator::normal(x.z, x.w);
  return {a.x, a.y, b.x, b.y};
}
template <typename State>
inline double2 curand_normal2_double(State* state) {
  const double2 u = ::cukit::emulator::two_uniform_doubles(state);
  return ::cukit::emulator::normal_double(u.x, u.y);
}
template <typename State>
inline double curand_normal_double(State* state) {
  constexpr int kDoubleWaits = 2;
  if (state->boxmuller_flag == kDoubleWaits) {
    state->boxmuller_flag = 0;
    return state->boxmuller_extra_double;
  }
  const double2 two = curand_normal2_double(state);
  state->boxmuller_extra_double = two.y;
  state->boxmuller_flag = kDoubleWaits;
  return two.x;
}
template <typename State>
inline float curand_log_normal(State* state, float mean, float deviation) {
  return expf(mean + deviation * curand_normal(state));
}
