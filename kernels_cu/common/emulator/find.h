// Appended to every third-party source: lookup of its kernels and variables from Python
// (cukit/emulator/program.py).
#pragma once

#include <cstring>

namespace cukit::emulator {

static const Registered* find_registered(const char* name, bool kernel) {
  for (const Registered* each = registered; each != nullptr; each = each->next) {
    if ((each->bytes == 0) == kernel && std::strcmp(each->name, name) == 0) return each;
  }
  return nullptr;
}

}  // namespace cukit::emulator

#define CUKIT_FIND(function, kernel)                                                           \
  extern "C" __attribute__((visibility("default"))) const void* function(const char* name,    \
                                                                         std::size_t* bytes) { \
    const auto* found = ::cukit::emulator::find_registered(name, kernel);                      \
    if (found == nullptr) return nullptr;                                                      \
    *bytes = found->bytes;                                                                     \
    return found->address;                                                                     \
  }
CUKIT_FIND(cukit_find_kernel, true)
CUKIT_FIND(cukit_find_variable, false)
#undef CUKIT_FIND
