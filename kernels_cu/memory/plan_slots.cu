// Plans the moves of a compaction of buffers of one size, on a grid of slots of that size, so that
// the copies can start without a round trip to the host.
//
//   Pages with a wall (memory that no buffer can move to) stay in use; of the others, the fullest
//   stay in use until all buffers fit. The buffers of the remaining pages, in the order of their
//   rows, move to the free slots of the pages in use, in address order.
//
// Mapping: one block. Occupied slots and walls are bit masks in shared memory, buffers per page are
//   counters. The fullest pages are found through a histogram of these counters: all pages above a
//   threshold stay in use, and of those at the threshold the first few. `rows` and `result` are in
//   pinned host memory; each row is read once. The kernel runs rarely, so its code is not in the
//   instruction caches: only the loop that reads `rows` is unrolled, because longer code takes
//   longer to fetch.
// Shared memory: dynamic, (2 * MAX_SLOTS / 32 + MAX_PAGES + MAX_PER_PAGE + 1) * 4 bytes; static,
//   THREADS / 8 + 20 bytes. Macros: THREADS multiple of 32, 32..1024; MAX_SLOTS, MAX_PAGES,
//   MAX_PER_PAGE: maximum numbers of slots, of pages, and of slots per page; MIN_GAIN: minimum
//   number of pages to free.
// Slots and pages have sizes that are powers of two; a page has at least one slot.
// Minimum architecture: sm_80. Deterministic. Reference: cukit/memory/bookkeeping/slots.py.
#include "common/platform.cuh"
#include "common/reduce.cuh"

namespace {

using cukit::kFullMask;
using cukit::kWarpSize;

constexpr int kWarps = THREADS / kWarpSize;
constexpr int kMaxWords = MAX_SLOTS / kWarpSize;
constexpr int kBlocked = 1 << 30;  // flag in `held`: the page has a wall

struct Request {  // int64 [8] on the host
  long long begin;       // address of slot 0
  long long slot_shift;  // log2 of the bytes of a slot
  long long page_shift;  // log2 of the slots of a page
  long long num_slots;   // a multiple of the slots of a page
  long long num_buffers;
  long long num_rows;  // length of `rows`, with the empty ones
  long long num_walls;
  long long unused;
};

struct Wall {  // int64 [2] on the host
  long long address, size;
};

struct Move {  // int64 [3] on the host
  long long destination, source;
  long long first;  // bytes of all moves before this one
};

struct Target {  // int32 [2] on the host
  int row, slot;
};

struct Scratch {
  int warps[kWarps];
  int room;  // slots free of walls on pages with a wall
  int gain;  // pages with buffers that become free
  int threshold, quota;
  int misplaced;
};

// Sum of `value` over the threads before this one; `total`: over all threads. All threads must call
// it. Its barriers also order memory accesses before the call and those after it.
CUKIT_DEVICE int block_sum_before(int value, int* warps, int* total) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int before = cukit::warp_sum_before(value);
  __syncthreads();
  if (lane == kWarpSize - 1) warps[warp] = before + value;
  __syncthreads();
  const int of_warp = lane < kWarps ? warps[lane] : 0;
  const int before_warp = cukit::warp_sum_before(of_warp);
  *total = __shfl_sync(kFullMask, before_warp + of_warp, kWarpSize - 1);
  return __shfl_sync(kFullMask, before_warp, warp) + before;
}

// Mask of the bits [first, last) of word `word`.
CUKIT_DEVICE unsigned bits_between(int first, int last, int word) {
  const int low = max(first - word * kWarpSize, 0);
  const int high = min(last - word * kWarpSize, kWarpSize);
  return low < high ? kFullMask >> (kWarpSize - high + low) << low : 0;
}

// Number of bits set in [first, first + count). `count` is a power of two and divides `first`.
CUKIT_DEVICE int count_bits(const unsigned* words, int first, int count) {
  if (count < kWarpSize) {
    return __popc(words[first / kWarpSize] & bits_between(first, first + count, first / kWarpSize));
  }
  int found = 0;
#pragma unroll 1
  for (int i = 0; i < count / kWarpSize; ++i) found += __popc(words[first / kWarpSize + i]);
  return found;
}

// Finds the threshold in `histogram` [per_page + 1] for the `wanted` fullest pages: pages with more
// buffers than the threshold stay in use, and so do `quota` pages with exactly that many. Called by
// one warp.
CUKIT_DEVICE void find_threshold(const int* histogram, int per_page, int wanted, Scratch* scratch) {
  const int lane = threadIdx.x % kWarpSize;
  int threshold = wanted > 0 ? -1 : per_page + 1;
  int quota = 0;
  int above = 0;
#pragma unroll 1
  for (int top = per_page; top >= 0 && wanted > 0 && threshold < 0; top -= kWarpSize) {
    const int bin = top - lane;
    const int pages = bin >= 0 ? histogram[bin] : 0;
    const int before = above + cukit::warp_sum_before(pages);
    const unsigned enough = __ballot_sync(kFullMask, before + pages >= wanted);
    if (enough != 0) {
      const int finder = __ffs(enough) - 1;
      threshold = top - finder;
      quota = wanted - __shfl_sync(kFullMask, before, finder);
    }
    above = __shfl_sync(kFullMask, before + pages, kWarpSize - 1);
  }
  if (lane == 0) {
    scratch->threshold = threshold;
    scratch->quota = quota;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) plan_slots(
    const Request* __restrict__ request_of,  // [1]
    const long long* __restrict__ rows,      // [num_rows]: addresses; 0: empty
    const Wall* __restrict__ walls_of,       // [num_walls]: no buffer can move there
    Move* table,                             // [num_rows + 1], for batched_copy
    int* num_moves,                          // [1]
    int* result,                             // [1]: number of moves; -1: an address is not a slot's
    Target* targets) {                       // [num_rows]: rows that move, ascending, and their slots
  CUKIT_DYNAMIC_SHARED(unsigned, taken);     // by slot: a buffer or a wall
  __shared__ Scratch scratch;
  unsigned* walls = taken + kMaxWords;
  int* held = reinterpret_cast<int*>(walls + kMaxWords);  // buffers by page; ~buffers if they move
  int* histogram = held + MAX_PAGES;                      // pages by number of buffers

  const Request request = *request_of;
  const int slot_shift = static_cast<int>(request.slot_shift);
  const int page_shift = static_cast<int>(request.page_shift);
  const int num_rows = static_cast<int>(request.num_rows);
  const int num_slots = static_cast<int>(request.num_slots);
  const int num_words = (num_slots + kWarpSize - 1) / kWarpSize;
  const int num_pages = num_slots >> page_shift;
  const int per_page = 1 << page_shift;
  const int thread = threadIdx.x;
  const int lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;

#pragma unroll 4
  for (int row = thread; row < num_rows; row += THREADS) table[row].source = rows[row];
  const int most = max(max(num_words, num_pages), per_page + 1);
#pragma unroll 1
  for (int i = thread; i < most; i += THREADS) {
    if (i < num_words) taken[i] = walls[i] = 0;
    if (i < num_pages) held[i] = 0;
    if (i <= per_page) histogram[i] = 0;
  }
  if (thread == 0) scratch.room = scratch.gain = scratch.misplaced = 0;
  __syncthreads();

#pragma unroll 1
  for (int row = thread; row < num_rows; row += THREADS) {
    const long long address = table[row].source;
    if (address == 0) continue;
    const long long offset = address - request.begin;
    const long long slot = offset >> slot_shift;
    if ((offset & ((1ll << slot_shift) - 1)) != 0 || slot < 0 || slot >= num_slots) {
      atomicOr(&scratch.misplaced, 1);
      continue;
    }
    atomicOr(taken + slot / kWarpSize, 1u << slot % kWarpSize);
    atomicAdd(held + (slot >> page_shift), 1);
  }
#pragma unroll 1
  for (int i = warp; i < request.num_walls; i += kWarps) {
    const Wall wall = walls_of[i];
    const long long offset = wall.address - request.begin;
    const long long end = (offset + wall.size + (1ll << slot_shift) - 1) >> slot_shift;
    const int first = static_cast<int>(offset >> slot_shift);
    const int last = static_cast<int>(min(end, request.num_slots));
#pragma unroll 1
    for (int word = first / kWarpSize + lane; word * kWarpSize < last; word += kWarpSize) {
      atomicOr(walls + word, bits_between(first, last, word));
    }
  }
  __syncthreads();

#pragma unroll 1
  for (int page = thread; page < num_pages; page += THREADS) {
    const int blocked = request.num_walls ? count_bits(walls, page << page_shift, per_page) : 0;
    if (blocked != 0) {
      atomicAdd(&scratch.room, per_page - blocked);
      held[page] |= kBlocked;
    } else {
      atomicAdd(histogram + held[page], 1);
    }
  }
#pragma unroll 1
  for (int i = thread; i < num_words; i += THREADS) taken[i] |= walls[i];
  __syncthreads();
  if (warp == 0) {
    const int missing = static_cast<int>(request.num_buffers) - scratch.room;
    const int wanted = missing > 0 ? (missing + per_page - 1) >> page_shift : 0;
    find_threshold(histogram, per_page, wanted, &scratch);
  }
  __syncthreads();

  int done = 0;  // pages at the threshold so far
#pragma unroll 1
  for (int first = 0; first < num_pages; first += THREADS) {
    const int page = first + thread;
    const int buffers = page < num_pages ? held[page] : kBlocked;
    const bool tied = buffers == scratch.threshold;
    int total;
    const int rank = done + block_sum_before(tied, scratch.warps, &total);
    done += total;
    if (buffers < scratch.threshold || (tied && rank >= scratch.quota)) {
      held[page] = ~buffers;
      if (buffers > 0) atomicAdd(&scratch.gain, 1);
    }
  }
  __syncthreads();
  if (scratch.misplaced || scratch.gain < MIN_GAIN) {
    if (thread == 0) {
      table[0].first = 0;
      *num_moves = 0;
      *result = scratch.misplaced ? -1 : 0;
    }
    return;
  }

  // The free slots of the pages in use, up to num_rows of them: at least one per move.
  done = 0;
#pragma unroll 1
  for (int first = 0; first < num_words && done < num_rows; first += THREADS) {
    const int word = first + thread;
    unsigned free = 0;
    if (word < num_words) {
      free = ~taken[word] & bits_between(0, num_slots, word);
      const int begin = word * kWarpSize;
#pragma unroll 1
      for (int slot = begin; slot < min(begin + kWarpSize, num_slots);
           slot += min(per_page, kWarpSize)) {
        if (held[slot >> page_shift] < 0) free &= ~bits_between(slot, slot + per_page, word);
      }
    }
    int total;
    int number = done + block_sum_before(__popc(free), scratch.warps, &total);
    done += total;
#pragma unroll 1
    for (; free != 0 && number < num_rows; free &= free - 1, ++number) {
      const long long slot = word * kWarpSize + __ffs(free) - 1;
      table[number].destination = request.begin + (slot << slot_shift);
    }
  }
  // The buffers that move, numbered in row order. The number of row r is at most r, so the source
  // that a move overwrites has been read.
  done = 0;
#pragma unroll 1
  for (int first = 0; first < num_rows; first += THREADS) {
    const int row = first + thread;
    const long long source = row < num_rows ? table[row].source : 0;
    const long long slot = (source - request.begin) >> slot_shift;
    const bool moves = source != 0 && held[slot >> page_shift] < 0;
    int total;
    const int number = done + block_sum_before(moves, scratch.warps, &total);
    done += total;
    if (moves) {
      Move* move = table + number;
      move->source = source;
      move->first = static_cast<long long>(number) << slot_shift;
      targets[number] = {row,
                         static_cast<int>((move->destination - request.begin) >> slot_shift)};
    }
  }
  if (thread == 0) {
    table[done].first = static_cast<long long>(done) << slot_shift;
    *num_moves = done;
    *result = done;
  }
}
