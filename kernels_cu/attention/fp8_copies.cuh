// The copying warpgroup of float8 attention: queries, keys and values into shared memory.
#pragma once

#include "attention/fp8_values.cuh"
#include "attention/query_tiles.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ring.cuh"

namespace cukit {

template <int TileM, int TileN, typename Values, int QueryStages, int Stages, bool Causal>
struct Fp8Copies {
  static constexpr int kRawStages = 2;
  static constexpr int kRowBytes = Values::kRowBytes;
  static constexpr int kParts = Values::kParts;
  static constexpr int kQueryPart = TileM * kRowBytes;
  static constexpr int kKeyPart = TileN * kRowBytes;
  static constexpr int kQueryBytes = kParts * kQueryPart;
  static constexpr int kKeyBytes = kParts * kKeyPart;
  static constexpr int kWarps = 4;
  static_assert(kQueryPart % 1024 == 0 && kKeyPart % 1024 == 0, "whole periods of the swizzle");

  struct Rings {
    Ring<QueryStages> q;
    Ring<Stages> k;
    Ring<Stages> v;
    Ring<kRawStages> raw;  // values as they come
  };

  // Where the stages lie in shared memory.
  struct Tiles {
    unsigned char* q;
    unsigned char* k;
    unsigned char* v;
    unsigned char* raw;
  };

  Rings& rings;
  const Tiles& tiles;
  const TensorMap* q;
  const TensorMap* k;
  const QueryProblem& problem;

  CUKIT_DEVICE static bool next_tile(QueryTile& work, const QueryProblem& problem, int& turn) {
    return find_work<TileM, TileN, Causal>(work, problem, turn);
  }

  template <int N>
  CUKIT_DEVICE static void wait_empty(Ring<N>& ring, const Cursor<N>& at) {
    mbarrier_wait(&ring.empty[at.stage], at.parity ^ 1);
  }

  // A tile of rows into a stage that its readers are through with.
  template <int N>
  CUKIT_DEVICE static void load(Ring<N>& ring, const Cursor<N>& at, unsigned char* tiles,
                                int part_bytes, const TensorMap* map, int row, int head, int b) {
    Mbarrier* full = &ring.full[at.stage];
    wait_empty(ring, at);
    mbarrier_arrive_expect(full, kParts * part_bytes);
    unsigned char* tile = tiles + at.stage * kParts * part_bytes;
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      tma_load_4d(tile + part * part_bytes, map, full, part * kRowBytes, head, row, b);
    }
  }

  // Values in slabs: one thread.
  CUKIT_DEVICE void run(const unsigned char* slabs) const {
    Cursor<QueryStages> q_at;
    Cursor<Stages> k_at;
    Cursor<Stages> v_at;
    QueryTile work{};
    const int all_tiles = (problem.seq_kv + TileN - 1) / TileN;
    for (int turn = 0; next_tile(work, problem, turn);) {
      const int b = work.batch_head / problem.heads_q;
      const int q_head = work.batch_head % problem.heads_q;
      const int head = q_head / problem.group;
      const int kv_head = b * (problem.heads_q / problem.group) + head;
      const unsigned char* const values =
          slabs + static_cast<long long>(kv_head) * all_tiles * Values::kBytes;
      const auto load_keys = [&](int tile) {
        load(rings.k, k_at, tiles.k, kKeyPart, k, tile * TileN, head, b);
        k_at.advance();
      };
      const auto load_values = [&](int tile) {
        Mbarrier* full = &rings.v.full[v_at.stage];
        wait_empty(rings.v, v_at);
        mbarrier_arrive_expect(full, Values::kBytes);
        bulk_load(tiles.v + v_at.stage * Values::kBytes,
                  values + static_cast<long long>(tile) * Values::kBytes, Values::kBytes, full);
        v_at.advance();
      };
      const int last = work.kv_tiles - 1;
      load_keys(last);
      load(rings.q, q_at, tiles.q, kQueryPart, q, work.first_row, q_head, b);
      q_at.advance();
#pragma unroll 1
      for (int tile = last; tile > 0; --tile) {
        load_keys(tile - 1);
        load_values(tile);
      }
      load_values(0);
    }
  }

  // Values as they come: all four warps transpose them; thread 0 asks the copy engine.
  CUKIT_DEVICE void run(const TensorMap* v) const {
    Cursor<QueryStages> q_at;
    Cursor<Stages> k_at;
    Cursor<Stages> v_at;
    Cursor<kRawStages> raw_at;
    Cursor<kRawStages> ask_at;
    QueryTile work{};
    for (int turn = 0; next_tile(work, problem, turn);) {
      const int b = work.batch_head / problem.heads_q;
      const int q_head = work.batch_head % problem.heads_q;
      const int head = q_head / problem.group;
      const int last = work.kv_tiles - 1;
      const auto ask = [&](int tile) {
        if (threadIdx.x == 0) {
          load(rings.k, k_at, tiles.k, kKeyPart, k, tile * TileN, head, b);
          if (tile == last) {
            load(rings.q, q_at, tiles.q, kQueryPart, q, work.first_row, q_head, b);
          }
          load(rings.raw, ask_at, tiles.raw, kKeyPart, v, tile * TileN, head, b);
        }
        __syncwarp();
        k_at.advance();
        ask_at.advance();
      };
      ask(last);
      q_at.advance();
#pragma unroll 1
      for (int tile = last; tile >= 0; --tile) {
        if (tile > 0) ask(tile - 1);
        wait_empty(rings.v, v_at);
        mbarrier_wait(&rings.raw.full[raw_at.stage], raw_at.parity);
        Values::prepare(tiles.raw + raw_at.stage * kKeyBytes,
                          tiles.v + v_at.stage * Values::kBytes, threadIdx.x / kWarpSize, kWarps);
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(&rings.v.full[v_at.stage]);
        release(rings.raw, raw_at);
        raw_at.advance();
        v_at.advance();
      }
    }
  }
};

}  // namespace cukit
