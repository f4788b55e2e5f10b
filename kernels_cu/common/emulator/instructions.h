// The instructions of common/ptx/ on the CPU. Layouts are those of the PTX ISA.
#pragma once

#include <cstdint>

#include "common/emulator/thread.h"

namespace cukit::emulator {

// Matrices ----------------------------------------------------------------------------------------

enum class Number : unsigned { F16, BF16, TF32, E4M3, E5M2, S8, U8 };

// ldmatrix and stmatrix of `count` (1, 2, 4) 8x8 matrices of 16-bit elements.
void ldmatrix(unsigned* registers, unsigned count, bool transposed, std::uint32_t shared);
void stmatrix(const unsigned* registers, unsigned count, bool transposed, std::uint32_t shared);

// movmatrix: an 8x8 matrix of 16-bit elements, transposed.
unsigned movmatrix(unsigned pair);

// mma.sync m16n8k<k>: d += a * b. `d` points to four floats, or four ints for S8 and U8.
void mma(Number a_type, Number b_type, unsigned k, void* d, const unsigned* a, const unsigned* b);

// wgmma.mma_async m64n<n> with 32 bytes along k: d = a * b, or d += a * b.
struct Product {
  Number a_type;
  Number b_type;
  unsigned n;
  void* d;                    // n / 2 floats, or ints
  const unsigned* registers;  // four, or null where `a` is in shared memory
  std::uint64_t a;            // matrix descriptors
  std::uint64_t b;
  bool a_transposed;          // MN-major in shared memory
  bool b_transposed;
  bool accumulate;
};
void wgmma(const Product& product);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(unsigned pending);

// Copies ------------------------------------------------------------------------------------------

// cp.async: stores `bytes` (4, 8, 16) bytes at `shared`: `present` bytes from `global`, then zeros.
void cp_async(std::uint32_t shared, const void* global, unsigned bytes, unsigned present);
void cp_async_commit();
void cp_async_wait(unsigned pending);

void mbarrier_init(std::uint32_t barrier, unsigned arrivals);
void fence_mbarrier_init();
// Announces `bytes` and arrives. The barrier may be in any block of the cluster.
void mbarrier_arrive(std::uint32_t barrier, unsigned bytes);
// Arrives, not ordered after the thread's earlier accesses.
void mbarrier_arrive_relaxed(std::uint32_t barrier);
void mbarrier_wait(std::uint32_t barrier, unsigned parity);

// cp.async.bulk, and cp.async.bulk.tensor with a map encoded by the emulator. tensor_load
// multicasts to the blocks in the mask `blocks`, at the corresponding addresses; 0 means this block
// alone.
void bulk_load(std::uint32_t shared, const void* global, unsigned bytes, std::uint32_t barrier);
void bulk_store(void* global, std::uint32_t shared, unsigned bytes);
void bulk_add(float* global, std::uint32_t shared, unsigned bytes);
void tensor_load(std::uint32_t shared, const void* map, const int* position, unsigned axes,
                 std::uint32_t barrier, unsigned blocks);
void tensor_store(const void* map, std::uint32_t shared, const int* position, unsigned axes,
                  bool add);
void bulk_commit();
void bulk_wait(unsigned pending);

void fence_proxy_async();

// Clusters ----------------------------------------------------------------------------------------

// st.shared::cluster of 4 bytes.
void store_remote(std::uint32_t address, std::uint32_t value);
// atom.shared::cluster.add.u32: returns the old value.
std::uint32_t fetch_add_remote(std::uint32_t address, std::uint32_t value);
// st.async of 16 bytes; completes at the mbarrier that corresponds to `barrier` in the block of
// `address`.
void store_async(std::uint32_t address, const void* value, std::uint32_t barrier);

}  // namespace cukit::emulator
