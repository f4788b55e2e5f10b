// Queries of a block of the indexer's kernels, and their rows in the scratch arrays.
//
// The queries of each sequence are divided into tiles of TILE_M. A launch processes a chunk:
// chunk_tiles tiles, from `first_tile` on. The scratch arrays have a row of scratch_row keys for
// each query of the chunk.
// Macros: TILE_M; those of score_options.cuh.
#pragma once

#include "attention/parameters.cuh"
#include "common/platform.cuh"
#include "common/scores/score_options.cuh"

namespace cukit {

// The factor by which derivatives are stored, so that float16 represents small ones.
constexpr float kGradientUnit = 64.0f;

CUKIT_DEVICE int tiles_of_sequence(const IndexerParameters& params) {
  return (params.seq_q + TILE_M - 1) / TILE_M;
}

struct IndexerWork {
  int b, first_row;       // the tile's sequence, and the tile's first query in it
  Sequence sequence;
  int rows_left;          // 0 or less: the tile is empty
  long long scratch;      // the tile's first row in the scratch arrays

  // `tile`: index within the launch.
  CUKIT_DEVICE IndexerWork(int tile, int first_tile, const IndexerParameters& params,
                           const int* cu_seqlens_q, const int* cu_seqlens_kv) {
    const int q_tiles = tiles_of_sequence(params);
    const long long work = static_cast<long long>(first_tile) + tile;
    scratch = static_cast<long long>(tile) * TILE_M;
    b = static_cast<int>(work / q_tiles);
    first_row = static_cast<int>(work % q_tiles) * TILE_M;
    sequence = {};
    rows_left = 0;
    if (b >= params.batch) return;
    sequence = sequence_of(b, cu_seqlens_q, cu_seqlens_kv, params.seq_q, params.seq_kv);
    rows_left = sequence.seq_q - first_row;
  }

  CUKIT_DEVICE int causal_offset() const { return sequence.seq_kv - sequence.seq_q; }

  // The tiles of `Tile` keys visible to the tile's queries (rows_left > 0).
  template <int Tile>
  CUKIT_DEVICE TileRange keys(const ScoreSettings& settings) const {
    return key_tiles<Tile>(first_row, min(TILE_M, rows_left), causal_offset(), sequence.seq_kv,
                           settings);
  }
};

}  // namespace cukit
