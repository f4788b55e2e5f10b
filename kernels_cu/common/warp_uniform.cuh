// What all lanes of a warp know alike.
#pragma once

#include "common/platform.cuh"

namespace cukit {

// `value`, which every lane holds: now the compiler knows that too. Loops that it bounds are then
// loops of the warp, and what they count can live in uniform registers, as descriptors have to.
CUKIT_DEVICE int warp_uniform(int value) { return __shfl_sync(kFullMask, value, 0); }

}  // namespace cukit
