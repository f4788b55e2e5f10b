// Copies many byte ranges in one launch: the moves of a defragmentation, or blocks of a KV cache.
//
//   for each move i:  base[destination_i .. + size_i) = base[source_i .. + size_i)
//
// Mapping: the concatenated moves form one sequence of bytes, divided into tiles of
//   THREADS * VECS * 16 bytes, one tile per block, whatever the sizes of the moves. A warp copies a
//   contiguous part of the tile, 512 bytes per step, and finds its first move by a 32-way search.
// ORDERED: destinations may overlap sources if all moves slide down: sources and destinations
//   ascend, and every destination is below its source. A byte is then overwritten only by the tile
//   that reads it or by a later one, so one pass suffices: blocks take tiles in order, by an atomic
//   ticket; each block reads its whole tile into registers, sets the tile's flag in `has_read`,
//   waits for the flags of all earlier tiles that read from its destination, and writes. Forward
//   progress: blocks with lower tickets are already running, and read without waiting.
// PLANNED: an earlier kernel on the stream has written the moves and their number (plan_slots.cu).
//   Each block copies every gridDim.x-th tile.
// Shared memory: 4 bytes, static. Macros: THREADS multiple of 32, 32..1024; VECS 16-byte vectors
//   per thread; ORDERED 0|1; PLANNED 0|1, not with ORDERED.
// Addresses and sizes are multiples of 16. Minimum architecture: sm_80. Deterministic.
// Reference: cukit/reference/memory.py.
#include "common/platform.cuh"
#include "common/ptx/store_global.cuh"

namespace {

constexpr int kVectorBytes = 16;
constexpr int kStepBytes = cukit::kWarpSize * kVectorBytes;
constexpr int kWarpBytes = VECS * kStepBytes;
constexpr int kTileBytes = THREADS / cukit::kWarpSize * kWarpBytes;

struct Move {  // int64 [3] on the host
  long long destination, source;
  long long first;  // bytes of all moves before this one
};

// Index of the last of moves[0 .. count) whose `key` is at most `value`, or 0. Warp-collective.
CUKIT_DEVICE int find_move(const Move* moves, int count, long long Move::*key, long long value) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  int low = 0;
  while (count > 1) {
    const int step = (count + cukit::kWarpSize - 1) / cukit::kWarpSize;
    const int probe = lane * step;
    const bool below = probe < count && moves[low + probe].*key <= value;
    const unsigned lanes = __ballot_sync(cukit::kFullMask, below);
    const int last = lanes == 0 ? 0 : 31 - __clz(lanes);
    low += last * step;
    count = min(step, count - last * step);
  }
  return low;
}

// Number of bytes to copy whose source address is below `address`. Warp-collective.
CUKIT_DEVICE long long bytes_below(const Move* moves, int num_moves, long long address) {
  const Move* move = moves + find_move(moves, num_moves, &Move::source, address);
  return min(move[1].first, move->first + max(0ll, address - move->source));
}

// The tiles before `tile` that read from [begin, end).
struct Readers {
  int first, end;
};
CUKIT_DEVICE Readers find_readers(const Move* moves, int num_moves, long long begin, long long end,
                                  int tile) {
  const long long first_byte = bytes_below(moves, num_moves, begin);
  const long long end_byte = bytes_below(moves, num_moves, end);
  return {static_cast<int>(first_byte / kTileBytes),
          min(tile, static_cast<int>((end_byte + kTileBytes - 1) / kTileBytes))};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) batched_copy(
    unsigned char* base,             // base of all addresses; may be null
    const Move* __restrict__ moves,  // [num_moves + 1]; `first` of the last one is the total size
    int* progress_or_count,          // ORDERED: [1 + tiles] zeros: next ticket, flag per tile.
                                     // PLANNED: [1]: number of moves. Otherwise unused
    int num_moves) {                 // ignored with PLANNED
  __shared__ int ticket;
  int* next_ticket = progress_or_count;        // ORDERED
  int* has_read = progress_or_count + 1;       // ORDERED: flag per tile
  const int* num_planned = progress_or_count;  // PLANNED: number of moves
  int tile = blockIdx.x;
  if constexpr (ORDERED) {
    if (threadIdx.x == 0) ticket = atomicAdd(next_ticket, 1);
    __syncthreads();
    tile = ticket;
  }
  if constexpr (PLANNED) num_moves = *num_planned;
  const long long total = moves[num_moves].first;
  const int warp = threadIdx.x / cukit::kWarpSize;
  const int lane = threadIdx.x % cukit::kWarpSize;
  do {
    const long long tile_begin = static_cast<long long>(tile) * kTileBytes;
    if (PLANNED && tile_begin >= total) return;
    const long long begin = tile_begin + static_cast<long long>(warp) * kWarpBytes;
    const long long position = begin + lane * kVectorBytes;
    const int first_move = find_move(moves, num_moves, &Move::first, begin);

    uint4 words[VECS];
    const Move* move = moves + first_move;
#pragma unroll
    for (int i = 0; i < VECS; ++i) {
      const long long byte = position + i * kStepBytes;
      if (byte >= total) continue;
      while (move[1].first <= byte) ++move;
      words[i] = *reinterpret_cast<const uint4*>(base + move->source + (byte - move->first));
    }
    if constexpr (ORDERED) {
      Readers readers;
      if (warp == 0) {
        const Move* first = moves + first_move;
        const long long last_byte = min(total, tile_begin + kTileBytes) - kVectorBytes;
        const Move* last = moves + find_move(moves, num_moves, &Move::first, last_byte);
        readers = find_readers(moves, num_moves, first->destination + tile_begin - first->first,
                               last->destination + last_byte - last->first + kVectorBytes, tile);
      }
      __syncthreads();  // all warps have read their parts of the tile
      if (threadIdx.x == 0) {
        __threadfence();
        atomicExch(has_read + tile, 1);
      }
      if (warp == 0) {
        for (int other = readers.first + lane; other < readers.end; other += cukit::kWarpSize) {
          while (atomicAdd(has_read + other, 0) == 0) __nanosleep(20);
        }
        __threadfence();
      }
      __syncthreads();  // earlier tiles have read the destination
    }
    move = moves + first_move;
#pragma unroll
    for (int i = 0; i < VECS; ++i) {
      const long long byte = position + i * kStepBytes;
      if (byte >= total) continue;
      while (move[1].first <= byte) ++move;
      unsigned char* to = base + move->destination + (byte - move->first);
      cukit::store_global_16(reinterpret_cast<uint4*>(to), words[i]);
    }
    tile += gridDim.x;
  } while (PLANNED);
}
