// The 32-bit address that the shared-memory instructions take.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// cvta.to.shared: `pointer` must point into shared memory.
CUKIT_DEVICE unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

}  // namespace cukit
