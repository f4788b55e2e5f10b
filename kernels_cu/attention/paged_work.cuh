// The tile scheduler of paged attention: every thread block gets an equal share of all tiles of
// keys.
//
// A problem is one request, one tile of its query rows and one key head. Blocks form teams of TEAM:
// block r of a team processes heads r, r + TEAM, ..., so that a team reads neighbouring heads of
// the same keys, which are contiguous in memory, at about the same time.
//
// A team's problems are ordered request by request, TEAM heads at once; each has at least one tile,
// so that its output is written. Team i takes tiles i * share .. (i + 1) * share - 1 of their
// concatenation, in pieces that end at problem boundaries. The load is balanced for any lengths,
// and nothing is planned on the host: a captured graph replays with other lengths.
//
// With UNIT_TILES > 0 (batch-invariant) a problem is split after every UNIT_TILES of its own tiles
// instead, and teams share units: the result of a request does not depend on the rest of the batch.
//
// With RecentTile > 0 the last keys of a request are in a ring buffer of its own, unquantised, and
// those before them in the cache. Tiles of cached keys come first, then tiles of RecentTile recent
// ones.
//
// Parameters: a kernel's struct with batch, seq_q, most_keys, problems (of a request) and settings;
// with RecentTile recent_rows too. Lengths: seq_lens, or SplitLengths with RecentTile.
#pragma once

#include "common/platform.cuh"
#include "common/scores/score_options.cuh"

namespace cukit {

// Keys of each request, and how many of them are in the cache.
struct SplitLengths {
  const int* seq_lens;
  const int* packed_lens;

  CUKIT_DEVICE int operator[](int b) const { return seq_lens[b]; }
};

// With packed queries: those of request b begin at row ends[b]. Requests with one query take part.
struct PackedLengths {
  const int* seq_lens;
  const int* packed_lens;
  const int* ends;

  CUKIT_DEVICE int operator[](int b) const { return seq_lens[b]; }
};

// Whether a request takes part; kSome<Lengths>: whether some may not.
template <typename Lengths>
constexpr bool kSome = false;
template <>
constexpr bool kSome<PackedLengths> = true;
template <typename Lengths>
CUKIT_DEVICE bool takes_part(const Lengths&, int) {
  return true;
}
CUKIT_DEVICE bool takes_part(const PackedLengths& lengths, int b) {
  return lengths.ends[b + 1] - lengths.ends[b] == 1;
}

// The first row of a request's queries, in units of seq_q rows.
template <typename Lengths>
CUKIT_DEVICE int query_rows(const Lengths&, int b) {
  return b;
}
CUKIT_DEVICE int query_rows(const PackedLengths& lengths, int b) { return lengths.ends[b]; }

// A request's tiles of keys, and its units: none if it does not take part.
template <int Tile, int UnitTiles, int RecentTile = 0>
struct Request {
  int seq_kv, first_tile, tiles, units;
  int cached;  // keys in the cache

  template <typename Lengths, typename Parameters>
  CUKIT_DEVICE Request(int b, const Lengths& lengths, const Parameters& params) {
    seq_kv = b < params.batch ? min(lengths[b], params.most_keys) : 0;
    if constexpr (RecentTile > 0) {
      cached = b < params.batch ? max(0, min(lengths.packed_lens[b], seq_kv)) : 0;
      cached = min(cached, params.most_keys - params.recent_rows);
      seq_kv = min(seq_kv, cached + params.recent_rows);
    } else {
      cached = seq_kv;
    }
    const int causal_offset = seq_kv - params.seq_q;
    if constexpr (RecentTile > 0) {
      const Span first = visible_keys(0, causal_offset, seq_kv, params.settings);
      const Span last = visible_keys(params.seq_q - 1, causal_offset, seq_kv, params.settings);
      first_tile = WINDOW ? tile_of(max(0, first.begin)) : 0;
      tiles = max(1, (last.end > 0 ? tile_of(last.end - 1) + 1 : 0) - first_tile);
    } else {
      const TileRange range =
          key_tiles<Tile>(0, params.seq_q, causal_offset, seq_kv, params.settings);
      first_tile = range.begin;
      tiles = max(1, range.end - range.begin);
    }
    units = b < params.batch && takes_part(lengths, b)
                ? UnitTiles ? (tiles + UnitTiles - 1) / UnitTiles : tiles
                : 0;
  }

  // Tiles of cached keys: those of recent keys follow.
  CUKIT_DEVICE int cached_tiles() const { return (cached + Tile - 1) / Tile; }

 private:
  CUKIT_DEVICE int tile_of(int key) const {
    return key < cached ? key / Tile : cached_tiles() + (key - cached) / max(1, RecentTile);
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

// A position among the units of all problems. Without UnitTiles a unit is a tile.
template <int Tile, int UnitTiles, int RecentTile = 0>
struct Place {
  using Request_ = Request<Tile, UnitTiles, RecentTile>;

  int b, problem;  // problem: index among the block's problems of the request
  int unit;        // of the problem
  Request_ request;

  // The number of units of the batch, in every lane.
  template <typename Lengths, typename Parameters>
  CUKIT_DEVICE static int count(const Lengths& lengths, const Parameters& params) {
    int total = 0;
    for (int b = threadIdx.x % kWarpSize; b < params.batch; b += kWarpSize) {
      total += Request_(b, lengths, params).units;
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      total += __shfl_xor_sync(kFullMask, total, offset);
    }
    return total * (params.problems / TEAM);
  }

  // The position of unit `index` of the batch.
  template <typename Lengths, typename Parameters>
  CUKIT_DEVICE static Place find(int index, const Lengths& lengths, const Parameters& params) {
    const int lane = threadIdx.x % kWarpSize;
    int before = 0;
    for (int first = 0;; first += kWarpSize) {
      const int own = Request_(first + lane, lengths, params).units * (params.problems / TEAM);
      const int scan = inclusive_scan(own);
      const unsigned behind = __ballot_sync(kFullMask, before + scan > index);
      if (behind != 0) {
        const int found = __ffs(behind) - 1;
        const int begin = before + __shfl_sync(kFullMask, scan - own, found);
        const int b = first + found;
        const Request_ request(b, lengths, params);
        const int inside = index - begin;
        return {b, inside / request.units, inside % request.units, request};
      }
      before += __shfl_sync(kFullMask, scan, kWarpSize - 1);
    }
  }

  // The first unit of the next problem, which exists.
  template <typename Lengths, typename Parameters>
  CUKIT_DEVICE void next_problem(const Lengths& lengths, const Parameters& params) {
    unit = 0;
    if (++problem == params.problems / TEAM) {
      problem = 0;
      do {
        request = Request_(++b, lengths, params);
      } while (kSome<Lengths> && request.units == 0);
    }
  }
};

// Consecutive tiles of one problem that a block processes.
template <int Tile, int UnitTiles, int RecentTile = 0>
struct Piece {
  Place<Tile, UnitTiles, RecentTile> place;  // its first unit
  int begin, end;                            // tiles of the request
  bool complete;                             // all tiles of the problem
};

// A block's units of the batch, iterated over piece by piece.
template <int Tile, int UnitTiles, int RecentTile = 0>
struct Share {
  Place<Tile, UnitTiles, RecentTile> place;
  int index, end;  // units of the batch

  CUKIT_DEVICE bool done() const { return index >= end; }

  CUKIT_DEVICE Piece<Tile, UnitTiles, RecentTile> piece() const {
    const int left = place.request.units - place.unit;
    const int units = UnitTiles ? 1 : min(left, end - index);
    const int step = UnitTiles ? UnitTiles : 1;
    const int last = place.request.first_tile + place.request.tiles;
    const int begin = place.request.first_tile + place.unit * step;
    return {place, begin, min(last, begin + units * step), units == place.request.units};
  }

  template <typename Lengths, typename Parameters>
  CUKIT_DEVICE void advance(const Lengths& lengths, const Parameters& params) {
    const int left = place.request.units - place.unit;
    const int units = UnitTiles ? 1 : min(left, end - index);
    index += units;
    place.unit += units;
    if (place.unit == place.request.units && !done()) place.next_problem(lengths, params);
  }
};

// Slots for the partial sums of a problem's pieces: two per block, since its first piece may end
// one problem and its last piece begin another. The slots of a team's TEAM blocks are adjacent.
struct PieceSlots {
  int first_team, count;
  bool begins_inside;  // the problem starts within the first team's share

  CUKIT_DEVICE PieceSlots(int first_unit, int units, int share)
      : first_team(first_unit / share),
        count((first_unit + units - 1) / share - first_team + 1),
        begins_inside(first_unit % share != 0) {}

  CUKIT_DEVICE long long slot(int piece, int member) const {
    return 2LL * ((first_team + piece) * TEAM + member) + (piece == 0 && begins_inside);
  }
};

}  // namespace cukit
