// Replaces the C library's header, for <cassert> too: a failed assertion ends the launch, not the
// process. Without an include guard, since NDEBUG may change between two includes.
#include "common/emulator/thread.h"

#undef assert
#ifdef NDEBUG
#define assert(condition) static_cast<void>(0)
#else
#define assert(condition)         \
  (static_cast<bool>(condition) ? \
       static_cast<void>(0) : ::cukit::emulator::trap("assert(" #condition ")"))
#endif
