// Replaces CUDA's primitive asynchronous copies.
#pragma once

#include "common/emulator/language.h"

inline void __pipeline_memcpy_async(void* to, const void* from, std::size_t bytes, std::size_t zeros = 0) {
  ::cukit::emulator::cp_async(::cukit::emulator::shared_address(to), from, static_cast<unsigned>(bytes),
                              static_cast<unsigned>(bytes - zeros));
}
inline void __pipeline_commit() { ::cukit::emulator::cp_async_commit(); }
inline void __pipeline_wait_prior(std::size_t pending) {
  ::cukit::emulator::cp_async_wait(static_cast<unsigned>(pending));
}
