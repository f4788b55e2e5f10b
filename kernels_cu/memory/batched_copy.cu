// Copies many runs of bytes in one launch: what a defragmentation moves, or blocks of a cache.
//
//   for each move i:  base[destination_i .. + size_i) = base[source_i .. + size_i)
//
// Mapping: the moves, one behind the other, are one stream of bytes, cut into tiles of
//   THREADS * VECS * 16 bytes, a block each, whatever the sizes of the moves. A warp copies a
//   contiguous piece of the tile, 512 bytes a step; it finds its first move among all by a search
//   with 32 probes a step.
// ORDERED: destinations may overlap sources, if all moves go down: sources and destinations ascend
//   and every destination lies below its source. Then a byte is only ever overwritten by a tile of
//   the same or a later place in the stream than the one that reads it, and this order makes one
//   pass safe: blocks take tiles by a ticket, in the order in which they start; read the whole tile
//   into registers; say so in `progress`; wait until every tile whose source they are about to
//   overwrite has said so; write. Forward progress: whoever holds a lower ticket runs already, and
//   reads without waiting for anybody.
// Shared memory: 4 bytes, static. Macros: THREADS multiple of 32, 32..1024; VECS 16-byte vectors a
//   thread; ORDERED 0|1. Addresses and sizes are multiples of 16. Minimum architecture: sm_80.
// Deterministic. Reference: cukit/reference/memory.py.
#include "common/platform.cuh"
#include "common/ptx/store_global.cuh"

namespace {

constexpr int kVectorBytes = 16;
constexpr int kStepBytes = cukit::kWarpSize * kVectorBytes;
constexpr int kWarpBytes = VECS * kStepBytes;
constexpr int kTileBytes = THREADS / cukit::kWarpSize * kWarpBytes;

struct Move {  // int64 [3] on the host
  long long destination, source;
  long long first;  // bytes of all moves before it
};

// The last of moves[0 .. count) whose `key` is at most `value`, or 0. All lanes of a warp together.
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

// How many bytes of the stream have sources below `address`. All lanes of a warp together.
CUKIT_DEVICE long long bytes_below(const Move* moves, int num_moves, long long address) {
  const Move* move = moves + find_move(moves, num_moves, &Move::source, address);
  return min(move[1].first, move->first + max(0ll, address - move->source));
}

// Returns once every tile before `tile` that reads from [begin, end) has done so.
CUKIT_DEVICE void wait_for_readers(const Move* moves, int num_moves, long long begin, long long end,
                                   int* has_read, int tile) {
  const long long first_byte = bytes_below(moves, num_moves, begin);
  const long long end_byte = bytes_below(moves, num_moves, end);
  const int end_tile = min(tile, static_cast<int>((end_byte + kTileBytes - 1) / kTileBytes));
  for (int other = static_cast<int>(first_byte / kTileBytes) + threadIdx.x % cukit::kWarpSize;
       other < end_tile; other += cukit::kWarpSize) {
    while (atomicAdd(has_read + other, 0) == 0) __nanosleep(50);
  }
  __threadfence();
  __syncwarp();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) batched_copy(
    unsigned char* base,              // what addresses are relative to; may be null
    const Move* __restrict__ moves,   // [num_moves + 1], the last one says how many bytes there are
    int* progress,                    // [1 + tiles] zeros, ORDERED only: tickets; which tiles have read
    int num_moves) {
  __shared__ int ticket;
  int tile = blockIdx.x;
  if constexpr (ORDERED) {
    if (threadIdx.x == 0) ticket = atomicAdd(progress, 1);
    __syncthreads();
    tile = ticket;
  }
  const long long total = moves[num_moves].first;
  const long long begin = static_cast<long long>(tile) * kTileBytes +
                          static_cast<long long>(threadIdx.x / cukit::kWarpSize) * kWarpBytes;
  const long long position = begin + threadIdx.x % cukit::kWarpSize * kVectorBytes;
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
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicExch(progress + 1 + tile, 1);
    if (begin < total) {
      const Move first = moves[first_move];
      const long long last_byte = min(total, begin + kWarpBytes) - kVectorBytes;
      const Move last = moves[find_move(moves, num_moves, &Move::first, last_byte)];
      wait_for_readers(moves, num_moves, first.destination + begin - first.first,
                       last.destination + last_byte - last.first + kVectorBytes, progress + 1, tile);
    }
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
}
