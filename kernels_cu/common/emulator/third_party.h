// Runtime calls that only third-party sources need (cukit/emulator/runtime/foreign.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

namespace cukit::emulator {

// Host address of the `bytes` bytes at a shared address. Ends the launch if they are not in shared
// memory.
void* shared_memory(std::uint32_t address, std::size_t bytes);
bool in_shared_memory(const void* pointer);
// The number of phases that an mbarrier has completed.
unsigned mbarrier_phase(std::uint32_t address);
// All 32 lanes pass `bytes` bytes and receive those of all lanes, in lane order.
void exchange_in_warp(const void* mine, void* all, std::size_t bytes, const char* name);
// The lanes that reach this call together, as far as the warp can converge.
unsigned converged_lanes();

// Advances the 160-bit state of XORWOW by number * 2^power steps.
void skip_xorwow(unsigned* v, std::uint64_t number, unsigned power);

}  // namespace cukit::emulator
