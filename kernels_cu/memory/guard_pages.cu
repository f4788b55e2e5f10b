// Checks that pages still hold a fill pattern, and refills them with another one.
//
//   for each page p, for each of its bytes i:
//     damage if  before_p != 0  and  address_p + i outside [begin_p, end_p)
//            and page[i] != pattern(before_p)[i]
//     page[i] = pattern(after_p)[i]  if  after_p != 0
//
// Mapping: block (x, y) processes chunk y of page x; each thread takes every THREADS-th 16-byte
//   vector of the chunk. Vectors wholly inside [begin, end) are not read.
// Shared memory: none. Macros: THREADS per block; PAGE_BYTES per page; CHUNK_BYTES per block, a
//   divisor of PAGE_BYTES and a multiple of 16 * THREADS. Pages are 16-byte aligned.
//   Minimum architecture: sm_70. Deterministic.
// Reference: guard_pages in cukit/reference/memory.py.
#include "common/platform.cuh"

namespace {

constexpr int kVectorBytes = 16;
constexpr int kWordBytes = 4;

struct Page {  // int64 [5] on the host
  long long address;        // relative to `base`
  long long begin, end;     // bytes that may have been written legally, relative to `base`
  long long before, after;  // patterns; 0: none
};

// Word number `word` of a page. A pattern below 2^32 repeats one word; for any other pattern, each
// word is a hash of its index and of the pattern's high half.
CUKIT_DEVICE unsigned pattern_word(long long pattern, unsigned word) {
  const unsigned seed = static_cast<unsigned>(static_cast<unsigned long long>(pattern) >> 32);
  if (seed == 0) return static_cast<unsigned>(pattern);
  unsigned hash = word ^ seed;
  hash = (hash ^ (hash >> 16)) * 0x7feb352du;
  hash = (hash ^ (hash >> 15)) * 0x846ca68bu;
  return hash ^ (hash >> 16);
}

CUKIT_DEVICE uint4 pattern_vector(long long pattern, int offset) {
  const unsigned word = offset / kWordBytes;
  return make_uint4(pattern_word(pattern, word), pattern_word(pattern, word + 1),
                    pattern_word(pattern, word + 2), pattern_word(pattern, word + 3));
}

// Bit mask of the bytes in which `found` differs from `wanted`.
CUKIT_DEVICE unsigned changed_bytes(uint4 found, uint4 wanted) {
  const unsigned words[4] = {found.x ^ wanted.x, found.y ^ wanted.y, found.z ^ wanted.z,
                             found.w ^ wanted.w};
  unsigned changed = 0;
#pragma unroll
  for (int i = 0; i < kVectorBytes; ++i) {
    const bool differs = (words[i / kWordBytes] >> (8 * (i % kWordBytes)) & 0xff) != 0;
    changed |= static_cast<unsigned>(differs) << i;
  }
  return changed;
}

// Bit mask of the bytes of a vector that are in [begin, end), which is relative to the vector.
CUKIT_DEVICE unsigned bytes_between(long long begin, long long end) {
  const int first = static_cast<int>(min(max(begin, 0ll), static_cast<long long>(kVectorBytes)));
  const int last = static_cast<int>(min(max(end, 0ll), static_cast<long long>(kVectorBytes)));
  return last > first ? ((1u << last) - 1) & ~((1u << first) - 1) : 0u;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) guard_pages(
    unsigned char* base,              // base of all addresses; may be null
    const Page* __restrict__ pages,   // [gridDim.x]
    int* damage) {  // [gridDim.x, 3] zeros: number of changed bytes, PAGE_BYTES - offset of the
                    // first, offset of the last + 1
  const Page page = pages[blockIdx.x];
  unsigned char* start = base + page.address;
  int* found = damage + 3 * static_cast<long long>(blockIdx.x);
  for (int i = threadIdx.x * kVectorBytes; i < CHUNK_BYTES; i += THREADS * kVectorBytes) {
    const int offset = blockIdx.y * CHUNK_BYTES + i;
    uint4* vector = reinterpret_cast<uint4*>(start + offset);
    const long long place = page.address + offset;
    const unsigned owned = bytes_between(page.begin - place, page.end - place);
    if (page.before != 0 && owned != 0xffffu) {
      const unsigned changed =
          changed_bytes(*vector, pattern_vector(page.before, offset)) & ~owned;
      if (changed != 0) {
        atomicAdd(found, __popc(changed));
        atomicMax(found + 1, PAGE_BYTES - (offset + __ffs(changed) - 1));
        atomicMax(found + 2, offset + 32 - __clz(changed));
      }
    }
    if (page.after != 0) *vector = pattern_vector(page.after, offset);
  }
}
