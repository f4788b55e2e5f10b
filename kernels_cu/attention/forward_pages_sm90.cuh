// Loads keys and values of flash_attention_sm90 from the blocks of a paged cache. The producer
// thread requests tiles; other warps of its warpgroup look up the blocks and load them, in boxes of
// PAGE_ROWS rows of a block by TMA or, with PAGE_ROWS 0, row by row by cp.async.
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

#if PAGED

namespace {

namespace producer {

// Requests tiles of keys and values.
struct PagedKeyValues {
  Pipelines& pipelines;
  RequestState& state;
  const cukit::ScoreSettings& settings;

  struct Place {
    const QueryWork& work;
  };

  CUKIT_DEVICE Place place(const QueryWork& work) const { return {work}; }

  // The first key visible to a tile of queries.
  CUKIT_DEVICE int first_key(const QueryWork& work) const {
    const int seq_kv = work.sequence.seq_kv;
    const int causal_offset = seq_kv - work.sequence.seq_q;
    return max(0, cukit::visible_keys(work.first_row, causal_offset, seq_kv, settings).begin);
  }

  CUKIT_DEVICE void load_keys(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                              int tile) const {
    load(to, full, place.work, tile, true);
  }

  CUKIT_DEVICE void load_values(unsigned char* to, cukit::Mbarrier* full, const Place& place,
                                int tile) const {
    load(to, full, place.work, tile, false);
  }

  // Sends each fetcher warp a request with `to` null, which ends it.
  CUKIT_DEVICE void end() const {
    for (int warp = 0; warp < kFetchers; ++warp) send({});
  }

 private:
  CUKIT_DEVICE void load(unsigned char* to, cukit::Mbarrier* full, const QueryWork& work, int tile,
                         bool of_keys) const {
    send({to, full, work.b, work.head, first_key(work), work.sequence.seq_kv, tile, of_keys});
  }

  CUKIT_DEVICE void send(const FetchRequest& request) const {
    pipelines.requests.acquire(state);
    pipelines.request[state.index] = request;
    pipelines.requests.commit(state);
    state.advance();
  }
};

}  // namespace producer

namespace fetcher {

// One of the two caches, [blocks, block_size, heads_kv, columns].
struct Cache {
  const cukit::TensorMap* map;  // with boxes of PAGE_ROWS rows
  const T* values;              // with PAGE_ROWS 0
  const cukit::HeadStrides& strides;
  int columns;
};

// The cache blocks of a sequence.
struct Blocks {
  const int* table;  // the sequence's row of the block table
  int size;
};

#if PAGE_ROWS
constexpr int kBoxes = TILE_N / PAGE_ROWS;
static_assert(TILE_N % PAGE_ROWS == 0 && PAGE_ROWS % 8 == 0, "boxes hold complete swizzle periods");
static_assert(kBoxes <= cukit::kWarpSize, "one lane per box");

// The lane's box of a tile.
struct Box {
  int b, tile;     // the sequence and tile that the box belongs to
  int block, row;  // of the cache; block -1: no key of the box is visible

  CUKIT_DEVICE Box() : b(-1), tile(0), block(-1), row(0) {}

  CUKIT_DEVICE Box(const FetchRequest& request, int tile, const Blocks& blocks)
      : b(request.b), tile(tile), block(-1) {
    const int lane = threadIdx.x % cukit::kWarpSize;
    const int key = tile * TILE_N + lane * PAGE_ROWS;
    const int entry = key / blocks.size;
    row = key - entry * blocks.size;
    if (lane < kBoxes && tile >= 0 && key < request.end && key + PAGE_ROWS > request.first_key) {
      block = blocks.table[entry];
    }
  }
};

// A box without a visible key has block -1, outside the tensor: TMA fills it with zeros. `next`:
// the box of the tile below, looked up one request ahead: tiles are requested in descending order.
template <typename Tile>
CUKIT_DEVICE void fetch(const FetchRequest& request, const Cache& cache, const Blocks& blocks,
                        int head, Box& next) {
  if (next.b != request.b || next.tile != request.tile) next = Box(request, request.tile, blocks);
  const Box box = next;
  next = Box(request, request.tile - 1, blocks);
  const int lane = threadIdx.x % cukit::kWarpSize;
  if (lane < kBoxes) {
    unsigned char* const to = request.to + lane * (PAGE_ROWS * Tile::kRowBytes);
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) {
      cukit::tma_load_4d(to + part * Tile::kPartBytes, cache.map, request.full,
                         part * Tile::kPartColumns, head, box.row, box.block);
    }
  }
}
#else
struct Box {};

// Zero-fills rows without a visible key.
template <typename Tile>
CUKIT_DEVICE void fetch(const FetchRequest& request, const Cache& cache, const Blocks& blocks,
                        int head, Box&) {
  constexpr int kChunks = Tile::kParts * Tile::kRowBytes / 16;  // of a row
  constexpr int kColumns = 16 / static_cast<int>(sizeof(T));    // of a chunk
  const int lane = threadIdx.x % cukit::kWarpSize;
  const unsigned to = cukit::shared_address(request.to);
#pragma unroll 1
  for (int first = 0; first < TILE_N; first += cukit::kWarpSize) {
    // Each lane looks up one row for all lanes that copy parts of it.
    const int key = request.tile * TILE_N + first + lane;
    long long own = -1;
    if (key >= request.first_key && key < request.end) {
      const int entry = key / blocks.size;
      own = cukit::offset_of(cache.strides, blocks.table[entry], key - entry * blocks.size, head);
    }
#pragma unroll 2
    for (int i = 0; i < kChunks; ++i) {
      const int index = i * cukit::kWarpSize + lane;
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      const long long from = __shfl_sync(cukit::kFullMask, own, row);
      const bool valid = from >= 0 && chunk * kColumns < cache.columns;
      if (TILE_N % cukit::kWarpSize != 0 && first + row >= TILE_N) continue;
      cukit::cp_async_16(Tile::address(to, first + row, chunk),
                         cache.values + (valid ? from + chunk * kColumns : 0), valid);
    }
  }
  cukit::cp_async_commit();
  cukit::cp_async_wait<0>();
  cukit::fence_proxy_async();
  __syncwarp();
  if (lane == 0) cukit::mbarrier_arrive(request.full);
}
#endif

// One of the last kFetchers warps of the producer warpgroup.
CUKIT_DEVICE void run(Pipelines& pipelines, const Cache& k, const Cache& v, const int* block_table,
                      const cukit::PagedKeys& keys, int gqa_group) {
  Box next;
  // Warp i of the fetchers takes every kFetchers-th request: its stage stays i.
  RequestState state;
  state.index = cukit::warp_uniform(threadIdx.x / cukit::kWarpSize) -
                (cukit::kWarpgroupWarps - kFetchers);
  for (;; state.phase ^= 1) {
    pipelines.requests.wait(state);
    __syncwarp();
    const FetchRequest& request = pipelines.request[state.index];
    if (request.to == nullptr) return;
    const Blocks blocks{block_table + static_cast<long long>(request.b) * keys.table_row,
                        keys.block_size};
    if (request.of_keys) {
      fetch<KeyTile>(request, k, blocks, request.head / gqa_group, next);
    } else {
      fetch<ValueTile>(request, v, blocks, request.head / gqa_group, next);
    }
    __syncwarp();  // all lanes have read the request before one of them releases it
    pipelines.requests.release(state);
  }
}

}  // namespace fetcher

}  // namespace

#endif
