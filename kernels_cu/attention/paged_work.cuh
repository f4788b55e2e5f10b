// What a thread block of paged attention works on: an equal share of all tiles of keys.
//
// A problem is one request, one tile of its query rows and one key head. Blocks come in teams of TEAM:
// the block of number r in its team works on heads r, r + TEAM, ..., so that a team reads neighbouring
// heads of the same keys at about the same time, which lie side by side in memory.
//
// For a team all problems lie one behind the other, request by request, TEAM heads at once; each has
// at least one tile, so that its output is written. Team i takes tiles i * share .. (i + 1) * share - 1
// of all of them, in pieces that end where a problem does. So blocks are equally busy whatever the
// lengths, and nothing is planned on the host: a captured graph replays with other lengths.
//
// With UNIT_TILES > 0 (batch-invariant) a problem is cut after every UNIT_TILES of its own tiles
// instead, and teams share units: the sums of a request do not depend on what else is in the batch.
#pragma once

#include "attention/parameters.cuh"
#include "common/platform.cuh"
#include "common/scores/score_options.cuh"

namespace cukit {

// A request's tiles of keys, and its units.
template <int Tile, int UnitTiles>
struct Request {
  int seq_kv, first_tile, tiles, units;

  CUKIT_DEVICE Request(int b, const int* seq_lens, const PagedParameters& params) {
    seq_kv = b < params.batch ? min(seq_lens[b], params.most_keys) : 0;
    const TileRange range =
        key_tiles<Tile>(0, params.seq_q, seq_kv - params.seq_q, seq_kv, params.settings);
    first_tile = range.begin;
    tiles = max(1, range.end - range.begin);
    units = b < params.batch ? UnitTiles ? (tiles + UnitTiles - 1) / UnitTiles : tiles : 0;
  }
};

CUKIT_DEVICE int inclusive_scan(int value) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int before = __shfl_up_sync(kFullMask, value, offset);
    if (lane >= offset) value += before;
  }
  return value;
}

// A place among the units of all problems. Without UnitTiles a unit is a tile.
template <int Tile, int UnitTiles>
struct Place {
  using Request_ = Request<Tile, UnitTiles>;

  int b, problem;  // problem: of the request, among those of a block
  int unit;        // of the problem
  Request_ request;

  // The units of a whole batch; every lane gets them.
  CUKIT_DEVICE static int count(const int* seq_lens, const PagedParameters& params) {
    int total = 0;
    for (int b = threadIdx.x % kWarpSize; b < params.batch; b += kWarpSize) {
      total += Request_(b, seq_lens, params).units;
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      total += __shfl_xor_sync(kFullMask, total, offset);
    }
    return total * (params.problems / TEAM);
  }

  // Where unit number `index` of the batch lies.
  CUKIT_DEVICE static Place find(int index, const int* seq_lens, const PagedParameters& params) {
    const int lane = threadIdx.x % kWarpSize;
    int before = 0;
    for (int first = 0;; first += kWarpSize) {
      const int own = Request_(first + lane, seq_lens, params).units * (params.problems / TEAM);
      const int scan = inclusive_scan(own);
      const unsigned behind = __ballot_sync(kFullMask, before + scan > index);
      if (behind != 0) {
        const int found = __ffs(behind) - 1;
        const int begin = before + __shfl_sync(kFullMask, scan - own, found);
        const int b = first + found;
        const Request_ request(b, seq_lens, params);
        const int inside = index - begin;
        return {b, inside / request.units, inside % request.units, request};
      }
      before += __shfl_sync(kFullMask, scan, kWarpSize - 1);
    }
  }

  // The first unit of the next problem.
  CUKIT_DEVICE void next_problem(const int* seq_lens, const PagedParameters& params) {
    unit = 0;
    if (++problem == params.problems / TEAM) {
      problem = 0;
      ++b;
      request = Request_(b, seq_lens, params);
    }
  }
};

}  // namespace cukit
