// The schedule of mla_attention_sm90.cu and mla_attention_float8_sm90.cu, which assigns the pages
// of a batch to blocks, and the partial sums of a request's pieces for mla_merge.cu.
//
// Units are pages (paged_work.cuh). A problem is a request and a tile of 64 rows, row r being head
// r % heads of query r / heads; the blocks of a team process neighbouring tiles of one request, so
// that they read each page at about the same time.
//
// Macros: DTYPE; TEAM blocks that share pages; CAUSAL of score_options.cuh.
#pragma once

#include "attention/paged_work.cuh"
#include "attention/parameters.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"

namespace cukit::mla {

using T = element_t;

constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kWidth = kLatent + kRope;
constexpr int kPage = 64;  // keys
constexpr int kRows = 64;  // of a tile

using Place = cukit::Place<kPage, 0>;
using Piece = cukit::Piece<kPage, 0>;
using Share = cukit::Share<kPage, 0>;

// Minimum pages per block: smaller pieces save less time than merging them takes.
constexpr int kMinShare = 2;

// The division of a batch among teams, computed by every warp.
struct Division {
  int total;   // units of the batch, counted once per team
  int share;   // units that a team processes
  int before;  // units of requests before `b`

  CUKIT_DEVICE Division(const int* seq_lens, const LatentParameters& params, int teams, int b = 0) {
    const int problems = params.problems / TEAM;
    int longest = 0;
    total = before = 0;
    for (int i = threadIdx.x % kWarpSize; i < params.batch; i += kWarpSize) {
      const int units = Place::RequestType(i, seq_lens, params).units;
      longest = max(longest, units);
      total += units * problems;
      if (i < b) before += units * problems;
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      longest = max(longest, __shfl_xor_sync(kFullMask, longest, offset));
      total += __shfl_xor_sync(kFullMask, total, offset);
      before += __shfl_xor_sync(kFullMask, before, offset);
    }
    share = max(kMinShare, (total + teams - 1) / teams);
    // Storing and merging pieces takes time. Shares are therefore rounded up to whole requests or,
    // if all requests have the same length and several teams each, to an equal part of a request,
    // provided that this adds at most a sixteenth.
    const int requests = params.batch * problems;
    const int parts = teams / max(1, requests);
    const bool equal = total == requests * longest;
    int whole = (requests + teams - 1) / teams * longest;
    if (parts > 1 && equal && longest % parts == 0) whole = longest / parts;
    if (16 * (whole - share) <= share) share = max(share, whole);
  }
};

// A warp's share, kept in shared memory while the warp processes a piece, to save registers.
struct ParkedShare {
  alignas(Share) unsigned char bytes[sizeof(Share)];
  unsigned parity;  // of the index of the piece

  // Called by all lanes, with the same share.
  CUKIT_DEVICE void park(const Share& share, unsigned number) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) {
      *reinterpret_cast<Share*>(bytes) = share;
      parity = number;
    }
    __syncwarp();
  }
  CUKIT_DEVICE Share share() const { return *reinterpret_cast<const Share*>(bytes); }
  // For barriers with one phase per piece.
  CUKIT_DEVICE PipelineState<1> piece_state() const { return {0, parity}; }

  // Advances to the next piece.
  CUKIT_DEVICE void advance(Share& to, const int* seq_lens, const LatentParameters& params) {
    to = share();
    to.advance(seq_lens, params);
    park(to, parity ^ 1);
  }
};

// Maximum (in log2 units) and sum of a row.
struct Statistics {
  float max, sum;
};

// Partial results of pieces. Slot s: kRows * kLatent floats of outputs, then kRows Statistics.
struct Partial {
  float* memory;

  CUKIT_DEVICE float* out(long long slot) const { return memory + slot * (kRows * (kLatent + 2)); }
  CUKIT_DEVICE Statistics* statistics(long long slot) const {
    return reinterpret_cast<Statistics*>(out(slot) + kRows * kLatent);
  }
};

// The rows of a problem.
struct Rows {
  int b, first, count;  // first: of the request's seq_q * heads_q

  CUKIT_DEVICE Rows(int request, int tile, const LatentParameters& params)
      : b(request), first(tile * kRows), count(min(kRows, params.seq_q * params.heads_q - first)) {}

  // Index of the tile's row `row` among the rows of the batch.
  CUKIT_DEVICE long long index(int row, const LatentParameters& params) const {
    return static_cast<long long>(b) * params.seq_q * params.heads_q + first + row;
  }
  CUKIT_DEVICE int query(int row, const LatentParameters& params) const {
    return (first + row) / params.heads_q;
  }
  // Index of the tile's row `row` in lse [batch, heads_q, seq_q].
  CUKIT_DEVICE long long statistic(int row, const LatentParameters& params) const {
    const int head = (first + row) % params.heads_q;
    return (static_cast<long long>(b) * params.heads_q + head) * params.seq_q + query(row, params);
  }
};

// Natural logarithm of a row's sum of exponentials.
CUKIT_DEVICE float log_sum(const Statistics& row) {
  return row.sum == 0.0f ? -infinity() : (row.max + log2f(row.sum)) * kLn2;
}

}  // namespace cukit::mla
