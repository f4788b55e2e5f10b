// Index types of kernels that number the vectors of a whole tensor.
//
// A kernel is specialised by -DINDEX=uint32|uint64: 32 bits wherever they suffice, since a division
// of 64 bits takes about a hundred instructions.
#pragma once

#include "common/platform.cuh"

namespace cukit {

using uint32 = unsigned int;
using uint64 = unsigned long long;

#ifdef INDEX
using index_t = INDEX;
#endif

}  // namespace cukit
