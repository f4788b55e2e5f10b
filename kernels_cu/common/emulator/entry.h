// A kernel as the runtime sees it: what its parameters measure, and a call that unpacks them.
#pragma once

#include <cstddef>
#include <tuple>
#include <utility>

namespace cukit::emulator {

struct Entry {
  void (*run)(void** arguments);
  const unsigned* parameter_bytes;
  unsigned num_parameters;
};

template <auto Kernel>
struct EntryOf;

template <typename... Parameters, void (*Kernel)(Parameters...)>
struct EntryOf<Kernel> {
  static constexpr unsigned kBytes[] = {static_cast<unsigned>(sizeof(Parameters))..., 0};

  // The argument list is the runtime's, no memory of the kernel.
  template <std::size_t... I>
  __attribute__((no_sanitize("thread", "undefined"))) static void unpack(void** arguments, std::index_sequence<I...>) {
    Kernel(*static_cast<Parameters*>(arguments[I])...);
  }
  static void run(void** arguments) { unpack(arguments, std::index_sequence_for<Parameters...>{}); }
  static constexpr Entry value() { return {run, kBytes, sizeof...(Parameters)}; }
};

}  // namespace cukit::emulator

#define CUKIT_EMULATOR_ENTRY(kernel)                       \
  extern "C" const ::cukit::emulator::Entry cukit_entry = \
      ::cukit::emulator::EntryOf<&kernel>::value();
