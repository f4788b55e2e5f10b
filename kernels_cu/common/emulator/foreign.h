// Calls of the runtime that only public sources need (cukit/emulator/runtime/foreign.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

namespace cukit::emulator {

// Where `bytes` bytes at a shared address lie in memory. Ends the launch if they are not shared memory.
void* shared_memory(std::uint32_t address, std::size_t bytes);
bool in_shared_memory(const void* pointer);
// How many phases an mbarrier has completed.
unsigned mbarrier_phase(std::uint32_t address);
// All 32 lanes bring `bytes` bytes and leave with those of all lanes, in their order.
void exchange_in_warp(const void* mine, void* all, std::size_t bytes, const char* name);
// The lanes that come to this call together, as far as the warp can converge.
unsigned converged_lanes();

// Moves the 160 bits of XORWOW on by number * 2^power steps.
void skip_xorwow(unsigned* v, std::uint64_t number, unsigned power);

}  // namespace cukit::emulator
