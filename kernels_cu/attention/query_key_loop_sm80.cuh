// The loop over tiles of keys of sm_80 kernels in which a block owns a tile of queries. Each tile
// of keys has two products: Q K^T over HEAD_DIM columns, and over VALUE_DIM columns dO V^T or, with
// DISTILL, the teacher's Q K^T.
//
// A block owns TILE_M queries of one head, a warp 16 of them. It iterates over the keys and values
// in tiles of TILE_N; the next tile is copied while this one is multiplied. Shared memory, bytes: 2
// (HEAD_DIM + VALUE_DIM) (TILE_M + 2 TILE_N), dynamic:
//   Q | dO | K, two stages | V, two.
//
// Macros: DTYPE, HEAD_DIM, PADDED, VALUE_DIM, VALUE_PADDED, TILE_M = 16 * warps, TILE_N multiple of
//   16, THREADS, those of score_options.cuh. DISTILL 0|1, default 0: teacher_group query heads
//   share a head of V.
#pragma once

#include "attention/block_order.cuh"
#include "attention/parameters.cuh"
#include "common/platform.cuh"
#include "common/scores/fragment_options.cuh"
#include "common/scores/score_options.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"

#ifndef DISTILL
#define DISTILL 0
#endif

namespace cukit {

static_assert(TILE_M == THREADS / kWarpSize * 16, "16 rows per warp");

class QueryKeyLoop {
 public:
  using T = element_t;
  using Scores = float[1][TILE_N / 8][4];

  // The operands of a tile of keys, in shared memory.
  struct Tile {
    LeftMK<HEAD_DIM> q;
    RightNK<HEAD_DIM> k;
    LeftMK<VALUE_DIM> grad_out;
    RightNK<VALUE_DIM> v;
    RightKN<HEAD_DIM> keys;  // K as right operand of a product over keys
    FragmentPlace at;
    bool unmasked, crosses_last_key;  // as apply_options takes them

    // scores = Q K^T
    CUKIT_DEVICE void multiply_first(Scores& scores) const { multiply<HEAD_DIM>(scores, q, k); }
    // scores = dO V^T
    CUKIT_DEVICE void multiply_second(Scores& scores) const {
      multiply<VALUE_DIM>(scores, grad_out, v);
    }

   private:
    // Both operands are stored with Width contiguous.
    template <int Width>
    CUKIT_DEVICE static void multiply(Scores& scores, const LeftMK<Width>& rows,
                                      const RightNK<Width>& columns) {
      clear(scores);
      warp_product<T, Width / 16>(
          scores, [&](unsigned(&r)[4], int, int step) { rows(r, 0, 16 * step); },
          [&](unsigned(&r)[4], int n, int step) { columns(r, 8 * n, 16 * step); });
    }
  };

  int b, head;
  Sequence sequence;
  int first_row, rows_left;  // the block's first query, and the number of queries from there on

  CUKIT_DEVICE QueryKeyLoop(const QueryGradientParameters& params, const int* cu_seqlens_q,
                          const int* cu_seqlens_kv)
      : params_(params) {
    const int q_tiles = (params.seq_q + TILE_M - 1) / TILE_M;
    const HeadTile work =
        head_tile(blockIdx.x, params.batch * params.heads_q, q_tiles, params.raster_group_heads);
    b = work.head / params.heads_q;
    head = work.head % params.heads_q;
    sequence = sequence_of(b, cu_seqlens_q, cu_seqlens_kv, params.seq_q, params.seq_kv);
    // Causal: the last queries have the most visible keys, so they go first.
    first_row = (CAUSAL ? q_tiles - 1 - work.tile : work.tile) * TILE_M;
    rows_left = sequence.seq_q - first_row;
  }

  // The row of the block's first query in q.
  CUKIT_DEVICE int row_of_q() const { return sequence.first_q + first_row; }
  // The first row of this warp, relative to the block, and of this lane, relative to the sequence.
  CUKIT_DEVICE static int warp_row() { return static_cast<int>(threadIdx.x) / kWarpSize * 16; }
  CUKIT_DEVICE int lane_row() const {
    return first_row + warp_row() + static_cast<int>(threadIdx.x) % kWarpSize / 4;
  }

  // Calls visit(tile) for each tile of keys visible to the queries, then synchronises the block.
  // Requires rows_left > 0.
  template <typename Visit>
  CUKIT_DEVICE void for_each_tile(unsigned char* shared, const T* q, const T* k, const T* v,
                         const T* grad_out, int causal_offset, const Visit& visit) const {
    const unsigned q_tile = shared_address(shared);
    const unsigned grad_out_tile = q_tile + kQueryBytes;
    const unsigned k_tile = grad_out_tile + kGradOutBytes;
    const unsigned v_tile = k_tile + 2 * kKeyBytes;
    const int value_head = head / (DISTILL ? params_.teacher_group : params_.group);
    q += offset_of(params_.q, b, row_of_q(), head);
    grad_out += offset_of(params_.grad_out, b, row_of_q(), head);
    k += offset_of(params_.k, b, sequence.first_kv, head / params_.group);
    v += offset_of(params_.v, b, sequence.first_kv, value_head);

    const int seq_kv = sequence.seq_kv;
    const TileRange tiles = key_tiles<TILE_N>(first_row, min(TILE_M, rows_left), causal_offset,
                                              seq_kv, params_.settings);
    const auto copy_keys = [&](int tile, int stage) {
      const int key = tile * TILE_N;
      KeyCopy::start(k_tile + stage * kKeyBytes, k + key * params_.k.row, params_.k.row,
                     seq_kv - key, params_.head_dim);
      ValueCopy::start(v_tile + stage * kValueBytes, v + key * params_.v.row, params_.v.row,
                       seq_kv - key, params_.value_dim);
      cp_async_commit();
    };
    QueryCopy::start(q_tile, q, params_.q.row, rows_left, params_.head_dim);
    GradOutCopy::start(grad_out_tile, grad_out, params_.grad_out.row, rows_left,
                       params_.value_dim);
    if (tiles.end > tiles.begin) copy_keys(tiles.begin, 0);
    cp_async_commit();

    const LeftMK<HEAD_DIM> q_left(q_tile, warp_row(), 0);
    const LeftMK<VALUE_DIM> grad_out_left(grad_out_tile, warp_row(), 0);
    const RightNK<HEAD_DIM> k_right(k_tile, 0, 0);
    const RightNK<VALUE_DIM> v_right(v_tile, 0, 0);
    const RightKN<HEAD_DIM> k_again(k_tile, 0, 0);
    const int row = lane_row();
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      cp_async_wait<0>();
      __syncthreads();  // this tile has been copied, and no warp reads the other stage any more
      const int stage = (tile - tiles.begin) % 2;
      if (tile + 1 < tiles.end) copy_keys(tile + 1, stage ^ 1);
      const auto at_stage = [&](auto operand, int bytes) {
        operand.address += stage * bytes;
        return operand;
      };
      const int lane_column = static_cast<int>(threadIdx.x) % 4 * 2;
      visit(Tile{q_left, at_stage(k_right, kKeyBytes), grad_out_left,
                 at_stage(v_right, kValueBytes), at_stage(k_again, kKeyBytes),
                 {row, tile * TILE_N + lane_column}, tiles.unmasked(tile),
                 tile * TILE_N + TILE_N > seq_kv});
    }
    cp_async_wait<0>();
    __syncthreads();
  }

 private:
  static constexpr int kQueryBytes = TILE_M * HEAD_DIM * 2;
  static constexpr int kGradOutBytes = TILE_M * VALUE_DIM * 2;
  static constexpr int kKeyBytes = TILE_N * HEAD_DIM * 2;
  static constexpr int kValueBytes = TILE_N * VALUE_DIM * 2;

  using QueryCopy = TileCopy<TILE_M, HEAD_DIM, THREADS, PADDED>;
  using GradOutCopy = TileCopy<TILE_M, VALUE_DIM, THREADS, VALUE_PADDED>;
  using KeyCopy = TileCopy<TILE_N, HEAD_DIM, THREADS, PADDED>;
  using ValueCopy = TileCopy<TILE_N, VALUE_DIM, THREADS, VALUE_PADDED>;

  const QueryGradientParameters& params_;
};

}  // namespace cukit
