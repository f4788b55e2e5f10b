// Loads keys and values of flash_attention_sm90 from the blocks of a paged cache. The producer
// thread requests tiles; other warps of its warpgroup (fetchers) look up the blocks, wait for the
// stage and load the tile, in boxes of PAGE_ROWS rows of a block by TMA or, with PAGE_ROWS 0, row
// by row by cp.async.
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

  // The fetcher waits until the consumers have released the stage's previous tile. At most
  // kFetchers requests are in flight, and no three consecutive ones are all of keys or all of
  // values, so the tile before the previous one has already been released: the parity of the phase
  // that the fetcher waits for is not ambiguous.
  CUKIT_DEVICE void request(const KeyState& stage, const QueryWork& work, int tile,
                            bool of_keys) const {
    const int seq_kv = work.sequence.seq_kv;
    const int causal_offset = seq_kv - work.sequence.seq_q;
    const int first_visible =
        cukit::visible_keys(work.first_row, causal_offset, seq_kv, settings).begin;
    send({stage, work.b, work.head, max(0, first_visible), seq_kv, tile, of_keys});
  }

  // Sends each fetcher warp a request that ends it.
  CUKIT_DEVICE void end() const {
    for (int warp = 0; warp < kFetchers; ++warp) send({{}, 0, 0, 0, 0, -1, false});
  }

 private:
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
  int b, tile, first_key;  // the sequence, tile and first visible key that the box belongs to
  int block, row;          // of the cache; block -1: no key of the box is visible

  CUKIT_DEVICE Box() : b(-1), tile(0), first_key(0), block(-1), row(0) {}

  CUKIT_DEVICE Box(const FetchRequest& request, int tile, const Blocks& blocks)
      : b(request.b), tile(tile), first_key(request.first_key), block(-1) {
    const int lane = threadIdx.x % cukit::kWarpSize;
    const int key = tile * TILE_N + lane * PAGE_ROWS;
    const int entry = key / blocks.size;
    row = key - entry * blocks.size;
    if (lane < kBoxes && tile >= 0 && key < request.end && key + PAGE_ROWS > request.first_key) {
      block = blocks.table[entry];
    }
  }
};

// Loads a tile, one box per lane. A box without a visible key has block -1, outside the tensor, so
// that TMA fills it with zeros. `next`: the lane's box, looked up by the previous call, since tiles
// are requested in descending order; replaced by the box of the next lower tile. `acquire` waits
// for the stage and returns the barrier at which the copies complete.
template <typename Tile, typename Acquire>
CUKIT_DEVICE void fetch(const FetchRequest& request, const Cache& cache, const Blocks& blocks,
                        int head, unsigned char* stages, Box& next, const Acquire& acquire) {
  if (next.b != request.b || next.tile != request.tile || next.first_key != request.first_key) {
    next = Box(request, request.tile, blocks);
  }
  cukit::Mbarrier* const full = acquire(Tile::kBytes);
  const int lane = threadIdx.x % cukit::kWarpSize;
  if (lane < kBoxes) {
    unsigned char* const to =
        stages + request.stage.index * Tile::kBytes + lane * (PAGE_ROWS * Tile::kRowBytes);
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) {
      cukit::tma_load_4d(to + part * Tile::kPartBytes, cache.map, full, part * Tile::kPartColumns,
                         head, next.row, next.block);
    }
  }
  next = Box(request, request.tile - 1, blocks);
}
#else
struct Box {};

// Loads a tile row by row. Rows outside the visible keys become zeros.
template <typename Tile, typename Acquire>
CUKIT_DEVICE void fetch(const FetchRequest& request, const Cache& cache, const Blocks& blocks,
                        int head, unsigned char* stages, Box&, const Acquire& acquire) {
  constexpr int kChunks = Tile::kParts * Tile::kRowBytes / 16;  // of a row
  constexpr int kColumns = 16 / static_cast<int>(sizeof(T));    // of a chunk
  const int lane = threadIdx.x % cukit::kWarpSize;
  const unsigned to = cukit::shared_address(stages + request.stage.index * Tile::kBytes);
  cukit::Mbarrier* const full = acquire(0);
#pragma unroll 1
  for (int first = 0; first < TILE_N; first += cukit::kWarpSize) {
    // Each lane looks up the address of one row, which several lanes then copy.
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
  if (lane == 0) cukit::mbarrier_arrive(full);
}
#endif

// Called by each of the last kFetchers warps of the producer warpgroup.
CUKIT_DEVICE void run(Pipelines& pipelines, const Tiles& tiles, const Cache& k, const Cache& v,
                      const int* block_table, const cukit::PagedKeys& keys, int gqa_group) {
  Box next;
  // Fetcher i takes every kFetchers-th request, which is always in stage i of the requests.
  RequestState state;
  state.index = cukit::warp_uniform(threadIdx.x / cukit::kWarpSize) -
                (cukit::kWarpgroupWarps - kFetchers);
  const bool first_lane = threadIdx.x % cukit::kWarpSize == 0;
  for (;; state.phase ^= 1) {
    pipelines.requests.wait(state);
    __syncwarp();
    const FetchRequest& request = pipelines.request[state.index];
    if (request.tile < 0) return;
    const KeyState stage = request.stage;
    const Blocks blocks{block_table + static_cast<long long>(request.b) * keys.table_row,
                        keys.block_size};
    const int head = request.head / gqa_group;
    if (request.of_keys) {
      fetch<KeyTile>(request, k, blocks, head, tiles.k, next, [&](int bytes) {
        pipelines.k.acquire(stage);
        if (bytes > 0 && first_lane) pipelines.k.expect(stage, bytes);
        __syncwarp();
        return &pipelines.k.full.stage[stage.index];
      });
    } else {
      fetch<ValueTile>(request, v, blocks, head, tiles.v, next, [&](int bytes) {
        pipelines.v.acquire(stage);
#if ZERO_FILLED
        if (first_lane) {
          pipelines.rows[stage.index] = min(TILE_N, request.end - request.tile * TILE_N);
#if WINDOW
          pipelines.masked_rows[stage.index] = request.first_key - request.tile * TILE_N;
#endif
          pipelines.loaded.expect(stage, bytes);
        }
        __syncwarp();
        return &pipelines.loaded.stage[stage.index];
#else
        return &pipelines.v.full.stage[stage.index];
#endif
      });
    }
    __syncwarp();  // all lanes have read the request before one of them releases it
    pipelines.requests.release(state);
  }
}

}  // namespace fetcher

}  // namespace

#endif
