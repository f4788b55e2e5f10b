// The compiler's guard variables of __shared__ objects with constructors.
#include <dlfcn.h>
#include <elf.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "block.h"

namespace cukit::emulator {

namespace {

using Extents = std::vector<std::pair<std::size_t, std::size_t>>;  // first byte, one past the last

// The extents of guard variables in a library's symbol table: _ZGV and the object's name.
Extents read_guards(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  Extents found;
  Elf64_Ehdr header;
  if (bytes.size() < sizeof header) return found;
  std::memcpy(&header, bytes.data(), sizeof header);
  const auto section_at = [&](std::size_t i) {
    Elf64_Shdr section;
    std::memcpy(&section, bytes.data() + header.e_shoff + i * sizeof section, sizeof section);
    return section;
  };
  for (std::size_t i = 0; i < header.e_shnum; ++i) {
    const Elf64_Shdr table = section_at(i);
    if (table.sh_type != SHT_SYMTAB) continue;
    const char* const names = bytes.data() + section_at(table.sh_link).sh_offset;
    for (std::size_t at = 0; at < table.sh_size; at += sizeof(Elf64_Sym)) {
      Elf64_Sym symbol;
      std::memcpy(&symbol, bytes.data() + table.sh_offset + at, sizeof symbol);
      if (ELF64_ST_TYPE(symbol.st_info) != STT_TLS) continue;
      if (std::strncmp(names + symbol.st_name, "_ZGV", 4) != 0) continue;
      found.emplace_back(symbol.st_value, symbol.st_value + symbol.st_size);
    }
  }
  return found;
}

}  // namespace

bool is_guard(const Module& module, std::size_t byte) {
  static std::mutex mutex;
  static std::map<std::uintptr_t, Extents> known;  // by module
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(module.base);
  if (found == known.end()) {
    Dl_info library;
    const bool named = dladdr(reinterpret_cast<void*>(module.base), &library) != 0;
    found = known.emplace(module.base, named ? read_guards(library.dli_fname) : Extents{}).first;
  }
  for (const auto& [low, high] : found->second) {
    if (byte >= low && byte < high) return true;
  }
  return false;
}

}  // namespace cukit::emulator
