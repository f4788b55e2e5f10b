// The cp.async loads of paged attention's keys and values.
//
// A warp copies its own keys of a tile, STAGES - 1 tiles ahead. Each lane looks up the block of one
// key a step before the block is needed (with STEP 16, two lanes look up the same key), and passes
// the addresses of the rows through shared memory to the lanes that copy them. The int4 keys of a
// step are in one block, which every lane looks up.
//
// Macros: those of paged_attention.cu.
#pragma once

#include "attention/paged_rows.cuh"
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/scores/score_options.cuh"
#include "common/tile.cuh"

namespace cukit::paged {

// Addresses of a key and its value in the cache; null if the key is masked for all rows.
struct __align__(16) KeyPlace {
  const cache_t* k;
  const cache_t* v;
};

// offset_of for non-negative indices, which needs half the instructions.
CUKIT_DEVICE long long place_of(const HeadStrides& strides, unsigned block, unsigned row,
                                unsigned head) {
  return strides.batch * block + strides.row * row + strides.head * head;
}

// Copies a warp's keys and values ahead of their use, tile by tile of a share.
class Loader {
  static constexpr bool kGrouped = CODE == 3;

 public:
  static constexpr int kPlaces = kGrouped ? RecentForm::kStep : kStep;  // keys of a warp

  // `places`: the addresses of the warp's keys, in shared memory.
  CUKIT_DEVICE Loader(const Share& share, unsigned stages, KeyPlace* places, const Arrays& arrays,
                      const PagedParameters& params)
      : share_(share), stages_(stages), places_(places), stage_(0), more_(!share.done()) {
    if (more_) {
      open_piece(arrays, params);
      look_up(arrays, params);
    }
  }

  // Issues the copies of the next tile, or none after the last; commits one group either way.
  CUKIT_DEVICE void start(const Arrays& arrays, const PagedParameters& params) {
    if (more_) {
      copy(arrays, params);
      stage_ = stage_ + 1 == STAGES ? 0 : stage_ + 1;
      if (++tile_ == piece_end_) {
        share_.advance(arrays.lengths, params);
        more_ = !share_.done();
        if (more_) open_piece(arrays, params);
      } else {
        next_keys(params);
      }
      if (more_) look_up(arrays, params);
    }
    cp_async_commit();
  }

 private:
  static_assert(kGrouped || kStep <= kWarpSize, "one lane per key");

  // The key of a step that the lane looks up. int4: the first one, for the whole step.
  CUKIT_DEVICE static int own_key() { return kGrouped ? 0 : threadIdx.x % kWarpSize % kStep; }

  // Whether this lane is the first that looks up its key.
  CUKIT_DEVICE static bool writes() {
    return kStep >= kWarpSize || threadIdx.x % kWarpSize < kStep;
  }

  CUKIT_DEVICE void open_piece(const Arrays& arrays, const PagedParameters& params) {
    const Piece piece = share_.piece();
    tile_ = piece.begin;
    piece_end_ = piece.end;
    const Rows rows(piece.place, params);
    head_kv_ = rows.head_kv;
    // Masked keys are not read: blocks outside a window may have been reassigned.
    const int causal_offset = piece.place.request.seq_kv - rows.seq_q(params);
    const int last = rows.seq_q(params) - 1;
    const int seq_kv = piece.place.request.seq_kv;
    first_key_ = max(0, visible_keys(0, causal_offset, seq_kv, params.settings).begin);
    last_key_ = visible_keys(last, causal_offset, seq_kv, params.settings).end;
    if constexpr (RECENT) ring_ = arrays.rings[piece.place.b];
    const int key = first_of_tile() + own_key();
    entry_ = key / params.block_size;
    row_ = key % params.block_size;
  }

  CUKIT_DEVICE int first_of_tile() const {
    return tile_ * kTile + threadIdx.x / kWarpSize * kStep;
  }

  // Whether the tile holds recent keys.
  CUKIT_DEVICE bool recent() const {
    return RECENT && tile_ >= share_.place.request.cached_tiles();
  }

  // Advances to the next tile, without a division.
  CUKIT_DEVICE void next_keys(const PagedParameters& params) {
    entry_ += params.tile_blocks;
    row_ += params.tile_rows;
    if (row_ >= params.block_size) {
      row_ -= params.block_size;
      ++entry_;
    }
  }

  // Looks up the block of the lane's key, a step before the copies need it; -1 if the key is
  // masked.
  CUKIT_DEVICE void look_up(const Arrays& arrays, const PagedParameters& params) {
    if (recent()) return;
    const int* table =
        arrays.block_table + static_cast<long long>(share_.place.b) * params.table_row;
    const int end = RECENT ? min(last_key_, share_.place.request.cached) : last_key_;
    const int key = first_of_tile() + own_key();
    const int keys = kGrouped ? kStep : 1;
    block_ = key + keys > first_key_ && key < end ? table[entry_] : -1;
  }

  CUKIT_DEVICE void copy(const Arrays& arrays, const PagedParameters& params) {
    const unsigned keys = stages_ + stage_ * kStageBytes;
    if constexpr (RECENT) {
      if (recent()) {
        copy_recent(keys, arrays, params);
        return;
      }
    }
    if constexpr (kGrouped) {
      copy_group(keys, arrays, params);
      copy_group_factors(keys + 2 * kPartBytes, arrays, params);
      return;
    }
    KeyPlace place{nullptr, nullptr};
    const bool known = block_ >= 0;
    if (known) {
      place = {arrays.k + place_of(params.k, block_, row_, head_kv_),
               arrays.v + place_of(params.v, block_, row_, head_kv_)};
    }
    if (writes()) places_[own_key()] = place;
    __syncwarp();
    if (!PADDED && !VALUE_PADDED && __all_sync(kFullMask, known)) {
      copy_unpadded(keys);
    } else {
      copy_padded<CacheForm>(keys, arrays, params);
    }
    if constexpr (CODE != 0) copy_scales(keys + 2 * kPartBytes, arrays, params);
  }

  // Copies recent keys: rows of the request's ring buffer.
  CUKIT_DEVICE void copy_recent(unsigned keys, const Arrays& arrays,
                                const PagedParameters& params) {
    const auto& request = share_.place.request;
    const int own = threadIdx.x % RecentForm::kStep;
    const int key = request.cached + (tile_ - request.cached_tiles()) * kRecentTile +
                    threadIdx.x / kWarpSize * RecentForm::kStep + own;
    KeyPlace place{nullptr, nullptr};
    if (key >= first_key_ && key < last_key_ && ring_ >= 0) {
      const int row = key % params.recent_rows;
      const T* k = arrays.recent_k + place_of(params.recent_k, ring_, row, head_kv_);
      const T* v = arrays.recent_v + place_of(params.recent_v, ring_, row, head_kv_);
      place = {reinterpret_cast<const cache_t*>(k), reinterpret_cast<const cache_t*>(v)};
    }
    if (threadIdx.x % kWarpSize < RecentForm::kStep) places_[own] = place;
    __syncwarp();
    copy_padded<RecentForm>(keys, arrays, params);
  }

  static constexpr int kElements = 16 / sizeof(cache_t);  // storage elements per chunk

  // A lane's i-th copy of a step: chunk `chunk` of key `row`.
  template <typename F>
  struct Copy {
    static constexpr int kChunks = F::kTileColumns / 8;  // of a key
    static constexpr int kCopies = F::kStep * kChunks / kWarpSize;

    int row, chunk;
    unsigned to;  // in the tile

    CUKIT_DEVICE explicit Copy(int i) {
      using Tile = Swizzle<F::kTileColumns>;
      const int lane = threadIdx.x % kWarpSize;
      if constexpr (kWarpSize % kChunks == 0) {  // full rows: addresses differ by constants
        const int first = i * (kWarpSize / kChunks);
        const unsigned phase = (first >> Tile::kRowShift) & Tile::kMask;
        row = first + lane / kChunks;
        chunk = lane % kChunks;
        to = (Tile::offset(lane / kChunks, chunk) ^ (phase << 4)) + first * Tile::kPitch;
      } else {
        row = (i * kWarpSize + lane) / kChunks;
        chunk = (i * kWarpSize + lane) % kChunks;
        to = Tile::offset(row, chunk);
      }
    }
  };

  // int4: copies the rows of a step, which are contiguous in one block; zeros if all are masked.
  // Rows beyond the last key are copied too, since they are within the block. A row is half of a
  // cache line and may be next to a row of another head, which another thread block reads soon
  // after: the copy prefetches both to L2.
  CUKIT_DEVICE void copy_group(unsigned keys, const Arrays& arrays, const PagedParameters& params) {
    using Copy = Loader::Copy<CacheForm>;
    constexpr int kRowsAtOnce = kWarpSize / Copy::kChunks;
    static_assert(!kGrouped || kWarpSize % Copy::kChunks == 0, "full rows per copy");
    const Copy first(0);
    const int column = first.chunk * (128 / CacheForm::kBits);
    const bool exists = block_ >= 0;
    const bool k_valid = exists && (!PADDED || column < params.head_dim);
    const bool v_valid = exists && (!VALUE_PADDED || column < params.value_dim);
    const int block = max(block_, 0);
    const cache_t* k = arrays.k + place_of(params.k, block, row_ + first.row, head_kv_);
    const cache_t* v = arrays.v + place_of(params.v, block, row_ + first.row, head_kv_);
    k += first.chunk * kElements;
    v += first.chunk * kElements;
#pragma unroll
    for (int i = 0; i < Copy::kCopies; ++i) {
      const Copy copy(i);
      cp_async_16_prefetch_256(keys + copy.to, k_valid ? k : arrays.k, k_valid);
      cp_async_16_prefetch_256(keys + copy.to + kPartBytes, v_valid ? v : arrays.v, v_valid);
      k += kRowsAtOnce * params.k.row;
      v += kRowsAtOnce * params.v.row;
    }
  }

  CUKIT_DEVICE void copy_unpadded(unsigned keys) {
    using Copy = Loader::Copy<CacheForm>;
    constexpr int kCopies = Copy::kCopies;
    constexpr int kAtOnce = kCopies % 4 == 0 ? 4 : 3;
    static_assert(kCopies % kAtOnce == 0, "places are read kAtOnce at a time");
#pragma unroll
    for (int first = 0; first < kCopies; first += kAtOnce) {
      KeyPlace from[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) from[i] = places_[Copy(first + i).row];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Copy copy(first + i);
        cp_async_16(keys + copy.to, from[i].k + copy.chunk * kElements);
        cp_async_16(keys + copy.to + kPartBytes, from[i].v + copy.chunk * kElements);
      }
    }
  }

  // Copies keys and values; masked keys and columns that do not exist become zeros.
  template <typename F>
  CUKIT_DEVICE void copy_padded(unsigned keys, const Arrays& arrays,
                               const PagedParameters& params) {
#pragma unroll 1
    for (int i = 0; i < Copy<F>::kCopies; ++i) {
      const Copy<F> copy(i);
      const int column = copy.chunk * (128 / F::kBits);
      const int at = copy.chunk * kElements;
      const KeyPlace from = places_[copy.row];
      const bool k_valid = from.k != nullptr && (!PADDED || column < params.head_dim);
      const bool v_valid = from.v != nullptr && (!VALUE_PADDED || column < params.value_dim);
      cp_async_16(keys + copy.to, k_valid ? from.k + at : arrays.k, k_valid);
      cp_async_16(keys + copy.to + kPartBytes, v_valid ? from.v + at : arrays.v, v_valid);
    }
  }

  CUKIT_DEVICE void copy_scales(unsigned to, const Arrays& arrays,
                                const PagedParameters& params) {
    if (!writes()) return;
    const scale_t* k = arrays.k_scales;
    const scale_t* v = arrays.v_scales;
    const bool known = block_ >= 0;
    if (known) {
      k += place_of(params.k_scales, block_, row_, head_kv_);
      v += place_of(params.v_scales, block_, row_, head_kv_);
    }
    cp_async_cached<4>(to + own_key() * 4, k, known);
    cp_async_cached<4>(to + (kStep + own_key()) * 4, v, known);
  }

  // int4: copies the scales and zero points of the step's keys, which are one group of one block.
  CUKIT_DEVICE void copy_group_factors(unsigned to, const Arrays& arrays,
                                       const PagedParameters& params) {
    const int lane = threadIdx.x % kWarpSize;
    const bool exists = block_ >= 0;
    const auto copy = [&](int at, const scale_t* factors, const HeadStrides& strides,
                          int group, int first, bool inside) {
      const bool valid = exists && inside;
      const long long offset = valid ? place_of(strides, block_, group, head_kv_) + first : 0;
      cp_async_16(to + 16 * at, factors + offset, valid);
    };
    constexpr int kColumnChunks = HEAD_DIM / 8;
    for (int i = lane; i < 2 * kColumnChunks; i += kWarpSize) {
      const int column = i % kColumnChunks * 8;
      const bool inside = !PADDED || column < params.head_dim;
      copy(i, i < kColumnChunks ? arrays.k_scales : arrays.k_zeros, params.k_scales, row_ / kStep,
           column, inside);
    }
    constexpr int kRowChunks = kStep / 8;
    if (lane < 2 * kRowChunks) {
      copy(2 * kColumnChunks + lane, lane < kRowChunks ? arrays.v_scales : arrays.v_zeros,
           params.v_scales, row_, lane % kRowChunks * 8, true);
    }
  }

  Share share_;
  unsigned stages_;
  KeyPlace* places_;
  int stage_;
  bool more_;
  int tile_, piece_end_, head_kv_, first_key_, last_key_;
  int ring_;  // RECENT: the request's ring buffer
  int entry_, row_, block_;  // of the lane's key: index in the block table, row in the block, block
};

}  // namespace cukit::paged
