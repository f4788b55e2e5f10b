// Keys and values of flash_attention_sm90 in the blocks of a cache: fetched in boxes of a block's rows by
// the producer's thread, or row by row by the other warps of its warpgroup.
//
// Macros: those of flash_attention_sm90.cu.
#pragma once

#include "attention/forward_pipelines_sm90.cuh"
#include "attention/parameters.cuh"
#include "attention/query_work.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/platform.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/shared_address.cuh"
#include "common/ptx/tma.cuh"
#include "common/scores/parameters.cuh"
#include "common/scores/score_options.cuh"
#include "common/warp_uniform.cuh"

namespace {

namespace producer {

#if PAGED
CUKIT_DEVICE PagedPlace paged_place(const QueryWork& work, const int* block_table, int group,
                                    const cukit::PagedKeys& keys,
                                    const cukit::ScoreSettings& settings) {
  const cukit::Sequence& sequence = work.sequence;
  const int past = sequence.seq_kv - sequence.seq_q;
  const int first =
      cukit::visible_keys(work.first_row, past, sequence.seq_kv, settings).begin;
  return {block_table + static_cast<long long>(work.b) * keys.table_row, max(0, first),
          sequence.seq_kv, work.head / group};
}
#endif

#if PAGED && PAGE_ROWS
// Tensor maps of a cache, [blocks, block_size, heads_kv, columns], with boxes of PAGE_ROWS rows of a
// block.
struct PagedKeyValues {
  const cukit::TensorMap* k;
  const cukit::TensorMap* v;
  const int* block_table;
  const cukit::PagedKeys& keys;
  const cukit::ScoreSettings& settings;
  int group;

  static_assert(TILE_N % PAGE_ROWS == 0 && PAGE_ROWS % 8 == 0, "whole periods of the swizzle");

  using Place = PagedPlace;

  CUKIT_DEVICE Place place(const QueryWork& work) const {
    return paged_place(work, block_table, group, keys, settings);
  }

  CUKIT_DEVICE void load_keys(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                              int tile) const {
    load<KeyTile>(to, k, full, place, tile);
  }

  CUKIT_DEVICE void load_values(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                                int tile) const {
    load<ValueTile>(to, v, full, place, tile);
  }

 private:
  static constexpr int kBoxes = TILE_N / PAGE_ROWS;
  static constexpr int kAhead = kBoxes < 8 ? kBoxes : 8;  // blocks that are looked up together
  static constexpr int kNoBlock = -1;                     // outside the tensor: reads as zeros

  template <typename Tile>
  CUKIT_DEVICE void load(unsigned char* to, const cukit::TensorMap* map, cukit::Mbarrier* full,
                         const Place& place, int tile) const {
    int key = tile * TILE_N;
    int entry = key / keys.block_size;
    int row = key - entry * keys.block_size;
#pragma unroll 1
    for (int first = 0; first < kBoxes; first += kAhead) {
      int blocks[kAhead];
      int look_up_row = row;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        blocks[i] = key < place.end && key + PAGE_ROWS > place.first_key ? place.blocks[entry]
                                                                         : kNoBlock;
        key += PAGE_ROWS;
        look_up_row += PAGE_ROWS;
        if (look_up_row == keys.block_size) {
          look_up_row = 0;
          ++entry;
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (kBoxes % kAhead != 0 && first + i >= kBoxes) break;
        unsigned char* const box = to + (first + i) * (PAGE_ROWS * Tile::kRowBytes);
#pragma unroll 1
        for (int part = 0; part < Tile::kParts; ++part) {
          cukit::tma_load_4d(box + part * Tile::kPartBytes, map, full, part * Tile::kPartColumns,
                             place.head, row, blocks[i]);
        }
        row += PAGE_ROWS;
        if (row == keys.block_size) row = 0;
      }
    }
  }
};
#endif

#if ROW_BY_ROW
// Keys and values that the other warps copy: each tile is an order to one of them.
struct OrderedKeyValues {
  Pipelines& pipelines;
  OrderState& at;
  const int* block_table;
  const cukit::PagedKeys& keys;
  const cukit::ScoreSettings& settings;
  int group;

  using Place = PagedPlace;

  CUKIT_DEVICE Place place(const QueryWork& work) const {
    return paged_place(work, block_table, group, keys, settings);
  }

  CUKIT_DEVICE void load_keys(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                              int tile) const {
    send({to, full, place, tile, true});
  }

  CUKIT_DEVICE void load_values(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                                int tile) const {
    send({to, full, place, tile, false});
  }

  // There are no more orders.
  CUKIT_DEVICE void end() const {
    for (int warp = 0; warp < kFetchers; ++warp) send({});
  }

 private:
  CUKIT_DEVICE void send(const Order& order) const {
    pipelines.orders.acquire(at);
    pipelines.order[at.index] = order;
    pipelines.orders.commit(at);
    at.advance();
  }
};
#endif

}  // namespace producer

#if ROW_BY_ROW
// The other warps of the producer's warpgroup copy tiles of keys and values, each the ones it is told to.
// What no query sees becomes zeros.
namespace fetcher {

template <typename Tile>
CUKIT_DEVICE void copy(const Order& order, const T* cache, const cukit::HeadStrides& strides,
                       int columns, int block_size) {
  constexpr int kChunks = Tile::kParts * Tile::kRowBytes / 16;  // of a row
  constexpr int kColumns = 16 / static_cast<int>(sizeof(T));    // of a chunk
  const int lane = threadIdx.x % cukit::kWarpSize;
  const unsigned to = cukit::shared_address(order.to);
#pragma unroll 1
  for (int first = 0; first < TILE_N; first += cukit::kWarpSize) {
    // A lane looks one row up, for all that copy a part of it.
    const int key = order.tile * TILE_N + first + lane;
    long long own = -1;
    if (key >= order.place.first_key && key < order.place.end) {
      const int entry = key / block_size;
      own = cukit::offset_of(strides, order.place.blocks[entry], key - entry * block_size,
                             order.place.head);
    }
#pragma unroll 4
    for (int i = 0; i < kChunks; ++i) {
      const int index = i * cukit::kWarpSize + lane;
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      const long long from = __shfl_sync(cukit::kFullMask, own, row);
      const bool valid = from >= 0 && chunk * kColumns < columns;
      if (TILE_N % cukit::kWarpSize != 0 && first + row >= TILE_N) continue;
      cukit::cp_async_16(Tile::address(to, first + row, chunk),
                         cache + (valid ? from + chunk * kColumns : 0), valid);
    }
  }
}

CUKIT_DEVICE void run(Pipelines& pipelines, const T* k, const T* v, const cukit::PagedKeys& keys,
                      int value_dim) {
  OrderState at;
  at.index = cukit::warp_uniform(threadIdx.x / cukit::kWarpSize) - 1;
  for (;; at.phase ^= 1) {
    pipelines.orders.wait(at);
    __syncwarp();
    const Order order = pipelines.order[at.index];
    __syncwarp();  // all have read it before one of them gives the place back
    pipelines.orders.release(at);
    if (order.to == nullptr) return;
    if (order.of_keys) {
      copy<KeyTile>(order, k, keys.k, keys.head_dim, keys.block_size);
    } else {
      copy<ValueTile>(order, v, keys.v, value_dim, keys.block_size);
    }
    cukit::cp_async_commit();
    cukit::cp_async_wait<0>();
    cukit::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % cukit::kWarpSize == 0) cukit::mbarrier_arrive(order.full);
  }
}

}  // namespace fetcher
#endif

}  // namespace
