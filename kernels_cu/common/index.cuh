// Integer types by name, for macros.
//
// Kernels that index the vectors of a whole tensor are specialised by -DINDEX=uint32|uint64: 32
// bits where they suffice, since a 64-bit division takes about a hundred instructions. Kernels that
// read ids take -DID=int32|int64.
#pragma once

#include "common/platform.cuh"

namespace cukit {

using int32 = int;
using int64 = long long;
using uint32 = unsigned int;
using uint64 = unsigned long long;

#ifdef INDEX
using index_t = INDEX;
#endif
#ifdef ID
using id_t = ID;
#endif

}  // namespace cukit
