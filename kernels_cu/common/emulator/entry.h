// The runtime's view of a kernel: its parameter types, and a call that unpacks the arguments.
#pragma once

#include <cstddef>
#include <tuple>
#include <utility>

namespace cukit::emulator {

struct Entry {
  void (*run)(void** arguments);
  const unsigned* parameter_bytes;
  const char* const* parameter_types;  // names of functions that end in [with T = ...]
  unsigned num_parameters;
  unsigned max_threads;  // per block, of __launch_bounds__; 0 if not given
};

template <typename T>
constexpr const char* name_of_type() { return __PRETTY_FUNCTION__; }

template <auto Kernel>
struct EntryOf;

template <typename... Parameters, void (*Kernel)(Parameters...)>
struct EntryOf<Kernel> {
  static constexpr unsigned kBytes[] = {static_cast<unsigned>(sizeof(Parameters))..., 0};
  static constexpr const char* kTypes[] = {name_of_type<Parameters>()..., nullptr};

  // Not instrumented: the argument list is memory of the runtime, not of the kernel.
  template <std::size_t... I>
  __attribute__((no_sanitize("thread", "undefined"))) static void unpack(void** arguments, std::index_sequence<I...>) {
    Kernel(*static_cast<Parameters*>(arguments[I])...);
  }
  static void run(void** arguments) { unpack(arguments, std::index_sequence_for<Parameters...>{}); }
  static constexpr Entry value(unsigned max_threads = 0) {
    return {run, kBytes, kTypes, sizeof...(Parameters), max_threads};
  }
};

}  // namespace cukit::emulator

#define CUKIT_EMULATOR_ENTRY(kernel, ...)                 \
  extern "C" const ::cukit::emulator::Entry cukit_entry = \
      ::cukit::emulator::EntryOf<&kernel>::value(__VA_ARGS__);
