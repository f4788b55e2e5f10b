// The heap of kernels: malloc, free, new and delete in device code. As on the GPU, it
// persists across launches.
#include <cstdlib>
#include <map>
#include <mutex>

#include "block.h"

namespace cukit::emulator {

namespace {

std::mutex heap_mutex;
std::map<std::uintptr_t, std::size_t> heap;  // bytes of each allocation, by address

void* allocate(std::size_t bytes) {
  void* const memory = std::malloc(bytes);
  if (cukit_emulator_thread == nullptr || memory == nullptr) return memory;
  const std::lock_guard<std::mutex> lock(heap_mutex);
  heap[reinterpret_cast<std::uintptr_t>(memory)] = bytes;
  return memory;
}

void release(void* memory, const void* call) {
  if (cukit_emulator_thread != nullptr && memory != nullptr) {
    std::unique_lock<std::mutex> lock(heap_mutex);
    if (heap.erase(reinterpret_cast<std::uintptr_t>(memory)) == 0) {
      lock.unlock();
      Fiber& me = current();
      me.call = call;
      fault("invalid free: the pointer is not from malloc, or has already been freed\n  " +
            name_of(me) + " " + where(call));
    }
  }
  std::free(memory);
}

}  // namespace

bool in_heap(std::uintptr_t address, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(heap_mutex);
  auto found = heap.upper_bound(address);
  if (found == heap.begin()) return false;
  --found;
  return address + bytes <= found->first + found->second;
}

extern "C" void* __wrap_malloc(std::size_t bytes) { return allocate(bytes); }
extern "C" void __wrap_free(void* memory) { release(memory, __builtin_return_address(0)); }
// operator new, new[], delete and delete[].
extern "C" void* __wrap__Znwm(std::size_t bytes) { return allocate(bytes); }
extern "C" void* __wrap__Znam(std::size_t bytes) { return allocate(bytes); }
extern "C" void __wrap__ZdlPv(void* memory) { release(memory, __builtin_return_address(0)); }
extern "C" void __wrap__ZdaPv(void* memory) { release(memory, __builtin_return_address(0)); }
extern "C" void __wrap__ZdlPvm(void* memory, std::size_t) {
  release(memory, __builtin_return_address(0));
}
extern "C" void __wrap__ZdaPvm(void* memory, std::size_t) {
  release(memory, __builtin_return_address(0));
}

}  // namespace cukit::emulator
