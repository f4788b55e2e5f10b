// cp.async.bulk.tensor: boxes of a tensor of up to five axes, in the tiled mode.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "block.h"
#include "engines.h"
#include "numbers.h"
#include "run.h"

namespace cukit::emulator {

namespace {

constexpr unsigned kMaxAxes = 5;
constexpr std::uint64_t kMagic = 0x63756B6974746D61ull;

// The layout packed by cukit/emulator/tensor_map.py; axes run from the innermost outwards.
struct __attribute__((packed)) TensorMap {
  std::uint64_t magic;
  std::uint64_t address;
  std::uint64_t low, high;  // of the array that the map was made from
  std::uint32_t extent[kMaxAxes];
  std::int64_t stride[kMaxAxes];  // bytes
  std::uint16_t box[kMaxAxes];
  std::uint8_t axes;
  std::uint8_t itemsize;
  std::uint8_t swizzle_chunks;  // width of the swizzle in 16-byte chunks: 0 (none), 2, 4 or 8
  std::uint8_t kind;            // 0 integer, 1 float, 2 other (bfloat16)
  std::uint8_t writeable;
};
static_assert(sizeof(TensorMap) <= 128, "a CUtensorMap has 128 bytes");

TensorMap read_map(const Fiber& me, const void* pointer, unsigned axes) {
  TensorMap map;
  std::memcpy(&map, pointer, sizeof map);
  if (map.magic != kMagic) {
    fault("cp.async.bulk.tensor: the argument is not a tensor map of the emulator; make it within "
          "cukit.backend(\"emulator\")\n  " + name_of(me) + " " + where(me.call));
  }
  if (map.axes != axes) {
    fault(format("cp.async.bulk.tensor: %u coordinates for a tensor map of %u axes\n  ", axes,
                 map.axes) +
          name_of(me) + " " + where(me.call));
  }
  return map;
}

unsigned box_bytes(const TensorMap& map) {
  unsigned bytes = map.itemsize;
  for (unsigned axis = 0; axis < map.axes; ++axis) bytes *= map.box[axis];
  return bytes;
}

void check_target(const Fiber& me, const TensorMap& map, std::uint32_t shared) {
  // The same for every swizzle, since the pattern is a function of the address alone.
  const std::uint32_t alignment = 128;
  if (shared % alignment != 0) {
    fault(format("misaligned: cp.async.bulk.tensor needs a shared address that is a multiple of %u "
                 "bytes, got %u (swizzle of %u bytes)\n  ", alignment, shared,
                 map.swizzle_chunks * 16) +
          name_of(me) + " " + where(me.call));
  }
}

// The address of a byte after swizzling: 16-byte chunks within a row are permuted by the row's bits
// of the shared address.
std::uint32_t swizzled(const TensorMap& map, std::uint32_t address) {
  if (map.swizzle_chunks == 0) return address;
  return address ^ ((address >> 7 & (map.swizzle_chunks - 1u)) << 4);
}

// Visits the rows of the box: visit(offset in the box, pointer, or null if the row is outside the
// tensor, first element inside, number of elements inside).
template <typename Visit>
void for_rows(const TensorMap& map, const int* position, const Visit& visit) {
  const unsigned row_bytes = map.box[0] * map.itemsize;
  unsigned rows = 1;
  for (unsigned axis = 1; axis < map.axes; ++axis) rows *= map.box[axis];
  for (unsigned row = 0; row < rows; ++row) {
    std::int64_t offset = 0;
    bool inside = true;
    unsigned rest = row;
    for (unsigned axis = 1; axis < map.axes; ++axis) {
      const std::int64_t at = position[axis] + static_cast<std::int64_t>(rest % map.box[axis]);
      rest /= map.box[axis];
      inside = inside && at >= 0 && at < static_cast<std::int64_t>(map.extent[axis]);
      offset += at * map.stride[axis];
    }
    const std::int64_t first = std::max<std::int64_t>(0, -static_cast<std::int64_t>(position[0]));
    const std::int64_t end = std::min<std::int64_t>(
        map.box[0], static_cast<std::int64_t>(map.extent[0]) - position[0]);
    auto* pointer = reinterpret_cast<unsigned char*>(map.address + offset +
                                                     static_cast<std::int64_t>(position[0]) * map.itemsize);
    const bool any = inside && end > first;
    visit(row * row_bytes, any ? pointer : nullptr, static_cast<unsigned>(any ? first : 0),
          static_cast<unsigned>(any ? end - first : 0));
  }
}

// Ends the launch if the box reaches memory outside the array: in one of its rows, or at the map's
// base address, which the hardware accesses when a box is entirely outside the tensor (measured on
// an H200 for loads, and assumed for stores). The base of a map that begins before its array is
// outside the array.
void check_box(const Fiber& me, const TensorMap& map, const int* position) {
  const long long into_row = static_cast<long long>(position[0]) * map.itemsize;
  if (into_row % 16 != 0) {
    fault(format("misaligned: cp.async.bulk.tensor of a box that begins %lld bytes into the rows "
                 "of its tensor: the distance must be a multiple of 16\n  ",
                 into_row) +
          name_of(me) + " " + where(me.call));
  }
  bool any = false;
  for_rows(map, position, [&](unsigned, const unsigned char* row, unsigned first, unsigned count) {
    if (count == 0) return;
    any = true;
    const auto low = reinterpret_cast<std::uintptr_t>(row) + first * map.itemsize;
    if (low >= map.low && low + count * map.itemsize <= map.high) return;
    const bool before = low < map.low;
    fault(format("out of bounds: cp.async.bulk.tensor of a box with a row that begins %llu bytes %s "
                 "the array of its map\n  ",
                 static_cast<unsigned long long>(before ? map.low - low : low - map.low),
                 before ? "before" : "after the start of") +
          name_of(me) + " " + where(me.call));
  });
  if (any || (map.address >= map.low && map.address < map.high)) return;
  std::string place, extents;
  for (unsigned axis = 0; axis < map.axes; ++axis) {
    place += format(axis == 0 ? "%d" : ", %d", position[axis]);
    extents += format(axis == 0 ? "%u" : ", %u", map.extent[axis]);
  }
  fault("out of bounds: cp.async.bulk.tensor of a box wholly outside the tensor touches the map's base "
        "address, " +
        format("%lld bytes before the array of the map: skip such boxes\n  ",
               static_cast<long long>(map.low - map.address)) +
        name_of(me) + " " + where(me.call) + "\n  the box begins at (" + place +
        ") in a tensor of (" + extents + "), innermost axis first");
}

// Checks the box's rows in global memory for races, as accesses of the thread that starts the copy:
// the copy may execute from then on.
void look_for_races(Fiber& me, const TensorMap& map, const int* position, Access access) {
  const ClusterRunner& cluster = *me.block->cluster;
  if (cluster.launch->checked == 0 || cluster.launch->global_races == 0) return;
  for_rows(map, position, [&](unsigned, const unsigned char* row, unsigned first, unsigned count) {
    if (count == 0) return;
    cluster.run->global.check(thread_actor(me), row + first * map.itemsize, count * map.itemsize, access);
  });
}

// Calls move(shared pointer, offset in the row, bytes) for each 16-byte chunk of a row of the box.
template <typename Move>
void for_chunks(const TensorMap& map, std::uint32_t shared, unsigned char* base, unsigned at,
                unsigned bytes, const Move& move) {
  for (unsigned done = 0; done < bytes;) {
    const unsigned chunk = std::min(16 - (at + done) % 16, bytes - done);
    const std::uint32_t address = shared + at + done;
    move(base + (swizzled(map, address) - shared), done, chunk);
    done += chunk;
  }
}

std::mutex reduction_mutex;  // different blocks may add to one tensor

template <typename T>
void add_as(unsigned char* to, const unsigned char* from, unsigned bytes) {
  for (unsigned i = 0; i < bytes; i += sizeof(T)) {
    T sum, part;
    std::memcpy(&sum, to + i, sizeof(T));
    std::memcpy(&part, from + i, sizeof(T));
    sum = static_cast<T>(sum + part);
    std::memcpy(to + i, &sum, sizeof(T));
  }
}

void add_elements(const TensorMap& map, unsigned char* to, const unsigned char* from,
                  unsigned bytes) {
  if (map.kind == 1 && map.itemsize == 4) return add_as<float>(to, from, bytes);
  if (map.kind == 1 && map.itemsize == 2) return add_as<__half>(to, from, bytes);
  if (map.kind == 2 && map.itemsize == 2) return add_as<__nv_bfloat16>(to, from, bytes);
  if (map.kind == 0 && map.itemsize == 4) return add_as<std::uint32_t>(to, from, bytes);
  not_emulated("cp.reduce.async.bulk.tensor.add of this element type");
}

}  // namespace

std::vector<MappedArray> arrays_of_maps(const Launch& launch) {
  std::vector<MappedArray> found;
  for (unsigned i = 0; i < launch.entry->num_parameters; ++i) {
    const auto* const bytes = static_cast<const unsigned char*>(launch.arguments[i]);
    for (std::size_t at = 0; at + sizeof(TensorMap) <= launch.entry->parameter_bytes[i]; at += 8) {
      TensorMap map;
      std::memcpy(&map, bytes + at, sizeof map);
      if (map.magic == kMagic) found.push_back({map.low, map.high, i, map.itemsize, map.writeable != 0});
    }
  }
  return found;
}

void tensor_load(std::uint32_t shared, const void* map_pointer, const int* position, unsigned axes,
                 std::uint32_t barrier, unsigned blocks) {
  CUKIT_ENTER(me);
  require(me, kSinceHopper, "cp.async.bulk.tensor");
  const TensorMap map = read_map(me, map_pointer, axes);
  const unsigned bytes = box_bytes(map);
  const std::uint32_t local = local_address(shared);
  check_target(me, map, local);
  if (checked()) check_box(me, map, position);
  struct Position {
    int at[kMaxAxes];
  } copied{};
  std::copy_n(position, axes, copied.at);
  look_for_races(me, map, position, Access::Read);
  for_targets(me, blocks, [&](Block& target) {
    unsigned char* const to = place_in(me, target, shared, bytes);
    const unsigned swizzle = std::max<unsigned>(1, map.swizzle_chunks);
    start_inbound_copy(me, target, barrier, to, bytes, swizzle, [=] {
      for_rows(map, copied.at, [&](unsigned at, const unsigned char* row, unsigned first,
                                   unsigned count) {
        const unsigned low = first * map.itemsize;
        const unsigned high = low + count * map.itemsize;
        for_chunks(map, local, to, at, map.box[0] * map.itemsize,
                   [&](unsigned char* place, unsigned done, unsigned chunk) {
          // Elements outside the tensor are zero.
          std::memset(place, 0, chunk);
          const unsigned from = std::max(done, low);
          const unsigned end = std::min(done + chunk, high);
          if (from < end) std::memcpy(place + (from - done), row + from, end - from);
        });
      });
    });
  });
}

void tensor_store(const void* map_pointer, std::uint32_t shared, const int* position, unsigned axes,
                  bool add) {
  CUKIT_ENTER(me);
  require(me, kSinceHopper, "cp.async.bulk.tensor");
  const TensorMap map = read_map(me, map_pointer, axes);
  const unsigned bytes = box_bytes(map);
  check_target(me, map, shared);
  if (!map.writeable) {
    fault("write to a read-only array: cp.async.bulk.tensor\n  " + name_of(me) + " " + where(me.call));
  }
  if (checked()) check_box(me, map, position);
  const Place place = place_of(me, shared, bytes);
  struct Position {
    int at[kMaxAxes];
  } copied{};
  std::copy_n(position, axes, copied.at);
  look_for_races(me, map, position, add ? Access::Atomic : Access::Write);
  start_outbound_copy(me, place, bytes, [=, from = place.pointer] {
    std::unique_lock<std::mutex> lock(reduction_mutex, std::defer_lock);
    if (add) lock.lock();
    for_rows(map, copied.at, [&](unsigned at, unsigned char* row, unsigned first, unsigned count) {
      const unsigned low = first * map.itemsize;
      const unsigned high = low + count * map.itemsize;
      for_chunks(map, shared, from, at, map.box[0] * map.itemsize,
                 [&](const unsigned char* source, unsigned done, unsigned chunk) {
        const unsigned begin = std::max(done, low);
        const unsigned end = std::min(done + chunk, high);
        if (begin >= end) return;
        if (add) {
          add_elements(map, row + begin, source + (begin - done), end - begin);
        } else {
          std::memcpy(row + begin, source + (begin - done), end - begin);
        }
      });
    });
  });
}

}  // namespace cukit::emulator
