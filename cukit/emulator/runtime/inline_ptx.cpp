// What inline PTX in foreign sources needs of the runtime (common/emulator/inline_ptx.h).
#include "block.h"

namespace cukit::emulator {

void* shared_memory(std::uint32_t address, std::size_t bytes) {
  CUKIT_ENTER(me);
  if ((bytes & (bytes - 1)) == 0 && address % bytes != 0) {
    fault(format("misaligned: an access of %zu bytes at shared address %u\n  ", bytes, address) +
          name_of(me) + " " + where(me.call));
  }
  return place_of(me, address, bytes).pointer;
}

bool in_shared_memory(const void* pointer) {
  return cells_of(*current().block, pointer, 1) != nullptr;
}

}  // namespace cukit::emulator
