// The tile scheduler of paged attention: every thread block gets an equal share of all tiles of
// keys.
//
// A problem is one request, one tile of the request's query rows and one key head. Blocks form
// teams of TEAM: block r of a team processes heads r, r + TEAM, ..., so that a team reads
// neighbouring heads of the same keys, which are contiguous in memory, at about the same time.
//
// A team's problems are ordered request by request, TEAM heads at once; each problem has at least
// one tile, so that its output is written. Team i takes tiles i * share .. (i + 1) * share - 1 of
// the concatenated problems, in pieces that end at problem boundaries. The load is balanced for any
// lengths, and nothing is planned on the host, so that a captured graph can be replayed with other
// lengths. For requests of equal length shares may be rounded so that fewer problems are split.
//
// With UNIT_TILES > 0 (batch-invariant) a problem is split after every UNIT_TILES of its own tiles
// instead, and these units are divided among the teams: the result of a request does not depend on
// the rest of the batch.
//
// With RecentTile > 0 the last keys of a request are in its own ring buffer, unquantised, and the
// earlier keys in the cache. Tiles of cached keys come first, then tiles of RecentTile recent keys.
//
// With PackedRows > 0 each request has its own number of queries, in tiles of PackedRows rows; a
// request without queries has no problems.
//
// Parameters: a kernel's struct with batch, seq_q, max_keys, problems (of a request; of a tile of
// rows with PackedRows) and settings; with RecentTile recent_rows, with PackedRows group too.
// Lengths: seq_lens, SplitLengths with RecentTile, PackedLengths with PackedRows.
#pragma once

#include "common/platform.cuh"
#include "common/scores/score_options.cuh"

namespace cukit {

// The number of keys of each request, and the number of these that are in the cache.
struct SplitLengths {
  const int* seq_lens;
  const int* packed_lens;

  CUKIT_DEVICE int operator[](int b) const { return seq_lens[b]; }
};

// The same with packed queries: request b has rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of q.
// Requests with more than max_queries queries are skipped.
struct PackedLengths : SplitLengths {
  const int* cu_seqlens_q;
  int max_queries;
};

// The queries of a request.
template <int PackedRows>
struct RequestQueries {
  int first_query, count;

  template <typename Lengths, typename Parameters>
  CUKIT_DEVICE RequestQueries(int b, const Lengths& lengths, const Parameters& params)
      : first_query(0), count(0) {
    if (b >= params.batch) return;
    first_query = lengths.cu_seqlens_q[b];
    count = max(0, lengths.cu_seqlens_q[b + 1] - first_query);
    if (count > lengths.max_queries) count = 0;
  }
  template <typename Parameters>
  CUKIT_DEVICE int seq_q(const Parameters&) const {
    return count;
  }
  // Problems of the request that a thread block processes.
  template <typename Parameters>
  CUKIT_DEVICE int problems(const Parameters& params) const {
    return params.problems / TEAM * ((count * params.group + PackedRows - 1) / PackedRows);
  }
};

template <>
struct RequestQueries<0> {
  template <typename Lengths, typename Parameters>
  CUKIT_DEVICE RequestQueries(int, const Lengths&, const Parameters&) {}
  template <typename Parameters>
  CUKIT_DEVICE int seq_q(const Parameters& params) const {
    return params.seq_q;
  }
  template <typename Parameters>
  CUKIT_DEVICE int problems(const Parameters& params) const {
    return params.problems / TEAM;
  }
};

// A request's tiles of keys, and its units.
template <int Tile, int UnitTiles, int RecentTile = 0, int PackedRows = 0>
struct Request : RequestQueries<PackedRows> {
  using Queries = RequestQueries<PackedRows>;
  int seq_kv, first_tile, tiles, units;
  int cached;  // keys in the cache

  template <typename Lengths, typename Parameters>
  CUKIT_DEVICE Request(int b, const Lengths& lengths, const Parameters& params)
      : Queries(b, lengths, params) {
    const int seq_q = Queries::seq_q(params);
    seq_kv = b < params.batch ? min(lengths[b], params.max_keys) : 0;
    if constexpr (RecentTile > 0) {
      cached = b < params.batch ? max(0, min(lengths.packed_lens[b], seq_kv)) : 0;
      cached = min(cached, params.max_keys - params.recent_rows);
      seq_kv = min(seq_kv, cached + params.recent_rows);
    } else {
      cached = seq_kv;
    }
    const int causal_offset = seq_kv - seq_q;
    if constexpr (RecentTile > 0) {
      const Span first = visible_keys(0, causal_offset, seq_kv, params.settings);
      const Span last = visible_keys(seq_q - 1, causal_offset, seq_kv, params.settings);
      first_tile = WINDOW ? tile_of(max(0, first.begin)) : 0;
      tiles = max(1, (last.end > 0 ? tile_of(last.end - 1) + 1 : 0) - first_tile);
    } else {
      const TileRange range =
          key_tiles<Tile>(0, seq_q, causal_offset, seq_kv, params.settings);
      first_tile = range.begin;
      tiles = max(1, range.end - range.begin);
    }
    units = b < params.batch ? UnitTiles ? (tiles + UnitTiles - 1) / UnitTiles : tiles : 0;
    if (PackedRows && seq_q == 0) units = 0;
  }

  // The number of tiles of cached keys, which precede the tiles of recent keys.
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

// The units of a batch.
struct Total {
  int units;              // of all problems, counted once per team
  int units_per_problem;  // if all problems have the same number; else 0

  // The units of a team's share. With equal problems it is rounded up to whole problems, or so that
  // whole shares make a problem, if that adds at most one tile, which takes about as long as
  // merging pieces.
  CUKIT_DEVICE int share(int teams) const {
    const int fair = (units + teams - 1) / teams;
    if (units_per_problem == 0) return fair;
    const int parts = units_per_problem / fair;
    const int whole = parts > 0
                          ? (units_per_problem + parts - 1) / parts
                          : (fair + units_per_problem - 1) / units_per_problem * units_per_problem;
    return whole <= fair + 1 ? whole : fair;
  }
};

// A position among the units of all problems. Without UnitTiles a unit is a tile.
template <int Tile, int UnitTiles, int RecentTile = 0, int PackedRows = 0>
struct Place {
  using RequestType = Request<Tile, UnitTiles, RecentTile, PackedRows>;

  int b, problem;  // problem: index among the block's problems of the request
  int unit;        // index in the problem
  RequestType request;

  // The units of the batch. Every lane gets the result.
  template <typename Lengths, typename Parameters>
  CUKIT_DEVICE static Total count(const Lengths& lengths, const Parameters& params) {
    int total = 0;
    int least = 0x7fffffff;
    int most = 0;
    for (int b = threadIdx.x % kWarpSize; b < params.batch; b += kWarpSize) {
      const RequestType request(b, lengths, params);
      total += PackedRows ? request.units * request.problems(params) : request.units;
      least = min(least, request.units);
      most = max(most, request.units);
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      total += __shfl_xor_sync(kFullMask, total, offset);
      least = min(least, __shfl_xor_sync(kFullMask, least, offset));
      most = max(most, __shfl_xor_sync(kFullMask, most, offset));
    }
    if (PackedRows) return {total, 0};
    return {total * (params.problems / TEAM), UnitTiles == 0 && least == most ? most : 0};
  }

  // The position of unit `index` of the batch.
  template <typename Lengths, typename Parameters>
  CUKIT_DEVICE static Place find(int index, const Lengths& lengths, const Parameters& params) {
    const int lane = threadIdx.x % kWarpSize;
    int before = 0;
    for (int first = 0;; first += kWarpSize) {
      const RequestType candidate(first + lane, lengths, params);
      const int own = candidate.units * candidate.problems(params);
      const int scan = inclusive_scan(own);
      const unsigned behind = __ballot_sync(kFullMask, before + scan > index);
      if (behind != 0) {
        const int found = __ffs(behind) - 1;
        const int begin = before + __shfl_sync(kFullMask, scan - own, found);
        const int b = first + found;
        const RequestType request(b, lengths, params);
        const int inside = index - begin;
        return {b, inside / request.units, inside % request.units, request};
      }
      before += __shfl_sync(kFullMask, scan, kWarpSize - 1);
    }
  }

  // Moves to the first unit of the next problem.
  template <typename Lengths, typename Parameters>
  CUKIT_DEVICE void next_problem(const Lengths& lengths, const Parameters& params) {
    unit = 0;
    if (++problem == request.problems(params)) {
      problem = 0;
      do {
        ++b;
        request = RequestType(b, lengths, params);
      } while (PackedRows && request.units == 0);
    }
  }
};

// Consecutive tiles of one problem that a block processes.
template <int Tile, int UnitTiles, int RecentTile = 0, int PackedRows = 0>
struct Piece {
  Place<Tile, UnitTiles, RecentTile, PackedRows> place;  // the piece's first unit
  int begin, end;                            // tiles of the request
  bool complete;                             // the piece has all tiles of the problem
};

// A block's units of the batch, iterated over piece by piece.
template <int Tile, int UnitTiles, int RecentTile = 0, int PackedRows = 0>
struct Share {
  Place<Tile, UnitTiles, RecentTile, PackedRows> place;
  int index, end;  // the units index .. end - 1 of the batch remain

  CUKIT_DEVICE bool done() const { return index >= end; }

  CUKIT_DEVICE Piece<Tile, UnitTiles, RecentTile, PackedRows> piece() const {
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
