// A list of tokens in shared memory: those above a threshold, in no particular order.
#pragma once

#include "common/platform.cuh"
#include "sampling/row.cuh"
#include "sampling/weight.cuh"

namespace cukit {

static_assert(ATOM * VEC <= 32, "a bit for each logit of a lane");

class List {
 public:
  // cursor: a zero in shared memory.
  CUKIT_DEVICE List(uint64* entries, unsigned* cursor, unsigned capacity)
      : entries_(entries), cursor_(cursor), capacity_(capacity) {}

  // The number of appended tokens, which may exceed the capacity.
  CUKIT_DEVICE unsigned size() const { return *cursor_; }
  CUKIT_DEVICE uint64 operator[](unsigned i) const { return entries_[i]; }
  CUKIT_DEVICE void clear() const {
    if (threadIdx.x == 0) *cursor_ = 0;
  }

  // Appends this lane's tokens of an atom with logits of at least `limit`. Few tokens reach it, so
  // a rolled loop reloads them one by one: unrolled code would take more time to fetch.
  CUKIT_DEVICE void append(const Row& row, const Row::Atom& vectors, int first, float limit) const {
    const unsigned reaching = within(row, vectors, first, limit, infinity());
    if (reaching == 0) return;
    store<1>(row, first, reaching, atomicAdd(cursor_, static_cast<unsigned>(__popc(reaching))));
  }

  // The same for many tokens, with logits also below `upper`: one atomic operation per warp, and
  // four loads in flight. All lanes of the warp must call it.
  CUKIT_DEVICE void append_many(const Row& row, const Row::Atom& vectors, int first, float limit,
                                float upper) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const unsigned reaching = within(row, vectors, first, limit, upper);
    const auto count = static_cast<unsigned>(__popc(reaching));
    unsigned upto = count;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const unsigned other = __shfl_up_sync(kFullMask, upto, distance);
      if (lane >= distance) upto += other;
    }
    unsigned begin = lane == kWarpSize - 1 ? atomicAdd(cursor_, upto) : 0;
    begin = __shfl_sync(kFullMask, begin, kWarpSize - 1);
    store<4>(row, first, reaching, begin + upto - count);
  }

 private:
  // A bit for each of this lane's logits of an atom that is at least `limit` and below `upper`.
  CUKIT_DEVICE static unsigned within(const Row& row, const Row::Atom& vectors, int first, float limit,
                                      float upper) {
    unsigned reaching = 0;
#pragma unroll
    for (int u = 0; u < ATOM; ++u) {
      float x[VEC];
      row.values_of(x, vectors, u, first);
#pragma unroll
      for (int j = 0; j < VEC; ++j) reaching |= x[j] >= limit && x[j] < upper ? 1u << (u * VEC + j) : 0u;
    }
    return reaching;
  }

  // Stores the tokens of the set bits of `reaching` from entry `at` on. together: loads in flight.
  template <int together>
  CUKIT_DEVICE void store(const Row& row, int first, unsigned reaching, unsigned at) const {
#pragma unroll 1
    while (reaching != 0) {
      int tokens[together];
      float x[together];
#pragma unroll
      for (int q = 0; q < together; ++q) {
        const int bit = __ffs(static_cast<int>(reaching)) - 1;
        reaching &= reaching - 1;
        tokens[q] = bit < 0 ? -1 : row.column_of(first, bit / VEC) + bit % VEC;
        x[q] = bit < 0 ? 0.0f : row.at(tokens[q]);
      }
#pragma unroll
      for (int q = 0; q < together; ++q) {
        if (tokens[q] >= 0 && at < capacity_) entries_[at] = rank_of(x[q], tokens[q]);
        ++at;
      }
    }
  }

  uint64* entries_;
  unsigned* cursor_;
  unsigned capacity_;
};

// The outcome of a pass over a row.
struct Streamed {
  unsigned own;    // smallest key of this thread's logits
  unsigned least;  // of the row: the key of its largest logit
  unsigned count;  // listed tokens
  bool failed;     // the list overflowed
};

}  // namespace cukit
