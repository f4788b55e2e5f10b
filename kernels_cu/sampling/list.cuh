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

  // Appends the tokens of an atom with logits of at least `limit` and below `upper`. Few are, so a rolled loop reloads them: unrolled code
  // would cost instruction fetches.
  CUKIT_DEVICE void append(const Row& row, const Row::Atom& vectors, int first, float limit,
                           float upper = infinity()) const {
    unsigned reaching = 0;
#pragma unroll
    for (int u = 0; u < ATOM; ++u) {
      float x[VEC];
      row.values_of(x, vectors, u, first);
#pragma unroll
      for (int j = 0; j < VEC; ++j) reaching |= x[j] >= limit && x[j] < upper ? 1u << (u * VEC + j) : 0u;
    }
    if (reaching == 0) return;
    unsigned at = atomicAdd(cursor_, static_cast<unsigned>(__popc(reaching)));
#pragma unroll 1
    while (reaching != 0) {
      const int bit = __ffs(static_cast<int>(reaching)) - 1;
      reaching &= reaching - 1;
      const int token = row.column_of(first, bit / VEC) + bit % VEC;
      if (at < capacity_) entries_[at] = rank_of(row.at(token), token);
      ++at;
    }
  }

 private:
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
