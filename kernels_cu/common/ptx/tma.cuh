// cp.async.bulk: TMA copies of bytes and of boxes of a tensor (sm_90).
//
// One thread issues a copy. A copy to shared memory completes at an mbarrier, which must expect its
// bytes; a copy to global memory belongs to the thread's bulk group. Coordinates are in elements,
// innermost axis first; the innermost one, times the element size, must be a multiple of 16 bytes.
// Elements outside the tensor read as zero and are not written.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/shared_address.cuh"

namespace cukit {

// The result of cukit.core.tensor_map.encode_tensor_map: `const __grid_constant__ TensorMap map`.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// fence.proxy.async: makes writes to shared memory by this thread, or by threads synchronised with
// it, visible to TMA and wgmma.
CUKIT_DEVICE void fence_proxy_async() {
#ifdef CUKIT_EMULATE
  emulator::fence_proxy_async();
#else
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}

// prefetch.tensormap
CUKIT_DEVICE void prefetch_tensor_map(const TensorMap* map) {
#ifndef CUKIT_EMULATE
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
#endif
}

// cp.async.bulk.tensor.2d to shared memory: a box of the map's shape, with the map's swizzle.
// `shared` is 128-byte aligned, 1024 with a swizzle of 128 bytes.
CUKIT_DEVICE void tma_load_2d(void* shared, const TensorMap* map, Mbarrier* barrier, int x, int y) {
#ifdef CUKIT_EMULATE
  const int position[] = {x, y};
  emulator::tensor_load(shared_address(shared), map, position, 2, shared_address(barrier), 0);
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];\n" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
      : "memory");
#endif
}

// The same, multicast to every block of the cluster whose bit is set in `blocks`, at the
// corresponding address; completes at the corresponding mbarrier of each of these blocks.
CUKIT_DEVICE void tma_load_2d_multicast(void* shared, const TensorMap* map, Mbarrier* barrier,
                                        int x, int y, unsigned short blocks) {
#ifdef CUKIT_EMULATE
  const int position[] = {x, y};
  emulator::tensor_load(shared_address(shared), map, position, 2, shared_address(barrier), blocks);
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;\n" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(blocks)
      : "memory");
#endif
}

// cp.async.bulk.tensor.3d to shared memory, as tma_load_2d.
CUKIT_DEVICE void tma_load_3d(void* shared, const TensorMap* map, Mbarrier* barrier, int x, int y,
                              int z) {
#ifdef CUKIT_EMULATE
  const int position[] = {x, y, z};
  emulator::tensor_load(shared_address(shared), map, position, 3, shared_address(barrier), 0);
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];\n" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
#endif
}

// tma_load_3d, multicast as in tma_load_2d_multicast.
CUKIT_DEVICE void tma_load_3d_multicast(void* shared, const TensorMap* map, Mbarrier* barrier,
                                        int x, int y, int z, unsigned short blocks) {
#ifdef CUKIT_EMULATE
  const int position[] = {x, y, z};
  emulator::tensor_load(shared_address(shared), map, position, 3, shared_address(barrier), blocks);
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;\n" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
#endif
}

// cp.async.bulk.prefetch.tensor.3d: prefetches a box to L2. A hint; completion is not reported.
CUKIT_DEVICE void tma_prefetch_3d(const TensorMap* map, int x, int y, int z) {
#ifndef CUKIT_EMULATE
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];\n" ::"l"(map), "r"(x),
               "r"(y), "r"(z)
               : "memory");
#endif
}

// cp.async.bulk.tensor.4d to shared memory, as tma_load_2d.
CUKIT_DEVICE void tma_load_4d(void* shared, const TensorMap* map, Mbarrier* barrier, int x, int y,
                              int z, int w) {
#ifdef CUKIT_EMULATE
  const int position[] = {x, y, z, w};
  emulator::tensor_load(shared_address(shared), map, position, 4, shared_address(barrier), 0);
#else
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
#endif
}

// cp.async.bulk.tensor.2d from shared memory, which fence_proxy_async has made visible.
CUKIT_DEVICE void tma_store_2d(const TensorMap* map, const void* shared, int x, int y) {
#ifdef CUKIT_EMULATE
  const int position[] = {x, y};
  emulator::tensor_store(map, shared_address(shared), position, 2, false);
#else
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n" ::"l"(
                   map),
               "r"(shared_address(shared)), "r"(x), "r"(y)
               : "memory");
#endif
}

// cp.async.bulk.tensor.3d from shared memory, as tma_store_2d.
CUKIT_DEVICE void tma_store_3d(const TensorMap* map, const void* shared, int x, int y, int z) {
#ifdef CUKIT_EMULATE
  const int position[] = {x, y, z};
  emulator::tensor_store(map, shared_address(shared), position, 3, false);
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\n" ::"l"(map),
      "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z)
      : "memory");
#endif
}

// cp.reduce.async.bulk.tensor.2d.add: adds the box to the tensor, each element atomically.
CUKIT_DEVICE void tma_add_2d(const TensorMap* map, const void* shared, int x, int y) {
#ifdef CUKIT_EMULATE
  const int position[] = {x, y};
  emulator::tensor_store(map, shared_address(shared), position, 2, true);
#else
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];\n" ::"l"(
          map),
      "r"(shared_address(shared)), "r"(x), "r"(y)
      : "memory");
#endif
}

// cp.async.bulk to shared memory: addresses and `bytes` are multiples of 16.
CUKIT_DEVICE void bulk_load(void* shared, const void* global, unsigned bytes, Mbarrier* barrier) {
#ifdef CUKIT_EMULATE
  emulator::bulk_load(shared_address(shared), global, bytes, shared_address(barrier));
#else
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

// The same with an L2 eviction priority (common/ptx/cache_policy.cuh).
CUKIT_DEVICE void bulk_load_policy(void* shared, const void* global, unsigned bytes,
                                   Mbarrier* barrier, unsigned long long policy) {
#ifdef CUKIT_EMULATE
  emulator::bulk_load(shared_address(shared), global, bytes, shared_address(barrier));
#else
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;\n" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

// cp.async.bulk from shared memory: addresses and `bytes` are multiples of 16.
CUKIT_DEVICE void bulk_store(void* global, const void* shared, unsigned bytes) {
#ifdef CUKIT_EMULATE
  emulator::bulk_store(global, shared_address(shared), bytes);
#else
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
#endif
}

// cp.reduce.async.bulk.add.f32: adds `bytes` / 4 floats in shared memory to floats in global
// memory, each atomically, in no fixed order.
CUKIT_DEVICE void bulk_add(float* global, const void* shared, unsigned bytes) {
#ifdef CUKIT_EMULATE
  emulator::bulk_add(global, shared_address(shared), bytes);
#else
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(global),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
#endif
}

// cp.async.bulk.commit_group: commits this thread's copies from shared memory since the last
// commit as a group.
CUKIT_DEVICE void bulk_commit() {
#ifdef CUKIT_EMULATE
  emulator::bulk_commit();
#else
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
#endif
}

// cp.async.bulk.wait_group: waits until all but the last `Pending` groups have completed.
template <int Pending>
CUKIT_DEVICE void bulk_wait() {
#ifdef CUKIT_EMULATE
  emulator::bulk_wait(Pending);
#else
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(Pending) : "memory");
#endif
}

// fence.proxy.async.global: orders ordinary accesses to global memory by this thread, or by threads
// synchronised with it, with respect to the accesses of the copies that this thread issues.
CUKIT_DEVICE void fence_proxy_async_global() {
#ifndef CUKIT_EMULATE
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
#endif
}

// cp.async.bulk.wait_group.read: waits until all but the last `Pending` groups have read shared
// memory, which may then be overwritten. Required before the block exits.
template <int Pending>
CUKIT_DEVICE void bulk_wait_read() {
#ifdef CUKIT_EMULATE
  emulator::bulk_wait(Pending);
#else
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(Pending) : "memory");
#endif
}

}  // namespace cukit
