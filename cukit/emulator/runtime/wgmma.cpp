// wgmma: a warp's quarter of a warpgroup's product, from shared memory described by 64 bits.
#include "engines.h"
#include "matrix.h"

namespace cukit::emulator {

namespace {

constexpr unsigned kWgmma = 50000;
constexpr unsigned kDepthBytes = 32;
constexpr unsigned kCoreRows = 8;

// A matrix descriptor: addresses and distances in bytes.
struct Descriptor {
  std::uint32_t start;
  std::uint32_t leading;
  std::uint32_t stride;
  unsigned chunks;  // 16-byte chunks of the swizzle's width; 1 without one
};

Descriptor decode(const Fiber& fiber, std::uint64_t bits) {
  if (bits >> 49 & 7) not_emulated("wgmma: a matrix descriptor with a base offset");
  constexpr unsigned kChunks[] = {1, 8, 4, 2};
  static_cast<void>(fiber);
  return {static_cast<std::uint32_t>(bits & 0x3fff) << 4,
          static_cast<std::uint32_t>(bits >> 16 & 0x3fff) << 4,
          static_cast<std::uint32_t>(bits >> 32 & 0x3fff) << 4, kChunks[bits >> 62]};
}

// The shared address of the 16 bytes that hold element `k` of row (or column) `i`. K-major: 16 bytes
// along k. MN-major: 16 bytes along i.
std::uint32_t chunk_address(const Descriptor& matrix, unsigned i, unsigned k, unsigned itemsize,
                            bool mn_major) {
  const unsigned per_chunk = 16 / itemsize;
  std::uint32_t at = matrix.start;
  if (!mn_major) {
    const unsigned chunk = k / per_chunk;
    at += i / kCoreRows * matrix.stride + i % kCoreRows * 16 * matrix.chunks;
    at += matrix.chunks == 1 ? chunk * matrix.leading : chunk * 16;
  } else if (matrix.chunks == 1) {
    at += i / per_chunk * matrix.stride + k % kCoreRows * 16 + k / kCoreRows * matrix.leading;
  } else {
    const unsigned width = per_chunk * matrix.chunks;
    at += i / width * matrix.leading + i % width / per_chunk * 16;
    at += k % kCoreRows * 16 * matrix.chunks + k / kCoreRows * matrix.stride;
  }
  if (matrix.chunks > 1) at ^= (at >> 7 & (matrix.chunks - 1)) << 4;
  return at;
}

// Reads rows first .. first + count - 1, `k` deep, into store(row, k, value).
template <typename Store>
void read_matrix(const Fiber& fiber, const Descriptor& matrix, unsigned first, unsigned count,
                 unsigned k, Number type, bool mn_major, const Store& store) {
  const unsigned itemsize = bytes_of(type);
  const unsigned per_chunk = 16 / itemsize;
  for (unsigned i = 0; i < count; i += mn_major ? per_chunk : 1) {
    for (unsigned depth = 0; depth < k; depth += mn_major ? 1 : per_chunk) {
      const std::uint32_t at = chunk_address(matrix, first + i, depth, itemsize, mn_major);
      const unsigned char* chunk = place_of(fiber, at, 16).pointer;
      for (unsigned e = 0; e < per_chunk; ++e) {
        store(mn_major ? i + e : i, mn_major ? depth : depth + e, element(chunk, e, type));
      }
    }
  }
}

void check_matrix(const Fiber& fiber, const Actor& actor, const Descriptor& matrix, unsigned first,
                  unsigned count, unsigned k, Number type, bool mn_major) {
  const unsigned itemsize = bytes_of(type);
  const unsigned per_chunk = 16 / itemsize;
  for (unsigned i = 0; i < count; i += mn_major ? per_chunk : 1) {
    for (unsigned depth = 0; depth < k; depth += mn_major ? 1 : per_chunk) {
      const Place place = place_of(
          fiber, chunk_address(matrix, first + i, depth, itemsize, mn_major), 16);
      check_shared(actor, *place.block, place.pointer, 16, Access::Read, matrix.chunks);
    }
  }
}

// One warp's part, with what it needs of its lanes copied.
struct WarpProduct {
  Product product;
  const Fiber* fiber;     // lane 0, for addresses
  unsigned first_row;     // of operand a
  unsigned a[kLanes][4];  // where it comes from registers
  float* d[kLanes];

  unsigned depth() const { return kDepthBytes / bytes_of(product.b_type); }

  void run(float* const* sums) const {
    Operands operands;
    const unsigned k = depth();
    if (product.registers != nullptr) {
      for (unsigned lane = 0; lane < kLanes; ++lane) {
        unpack_a(operands, lane, a[lane], product.a_type, k);
      }
    } else {
      read_matrix(*fiber, decode(*fiber, product.a), first_row, kRows, k, product.a_type,
                  product.a_transposed,
                  [&](unsigned row, unsigned i, float value) { operands.a[row][i] = value; });
    }
    read_matrix(*fiber, decode(*fiber, product.b), 0, product.n, k, product.b_type,
                product.b_transposed,
                [&](unsigned column, unsigned i, float value) { operands.b[i][column] = value; });
    for (unsigned column = 0; column < product.n; column += 8) {
      float* tile[kLanes];
      for (unsigned lane = 0; lane < kLanes; ++lane) {
        tile[lane] = sums[lane] + column / 2;
        if (!product.accumulate) std::fill_n(tile[lane], 4, 0.0f);  // 0 as an int too
      }
      if (is_integer(product.a_type)) {
        multiply_tile(operands, k, column, reinterpret_cast<std::int32_t* const*>(tile));
      } else {
        multiply_tile(operands, k, column, tile);
      }
    }
  }
};

// In the late mode accumulators are NaN until somebody waits; their true values stay here.
void put_off(WarpGroup& group, const WarpProduct& product, std::uint32_t epoch) {
  const unsigned count = product.product.n / 2;
  WarpGroup::Hidden& hidden = group.hidden[product.d[0]];
  if (hidden.products++ == 0) {
    hidden.values.resize(kLanes * static_cast<std::size_t>(count));
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      std::copy_n(product.d[lane], count, &hidden.values[lane * count]);
      std::memset(product.d[lane], 0xff, count * sizeof(float));
    }
  }
  group.products.push_back({group.open, epoch, [&group, product, count] {
    WarpGroup::Hidden& kept = group.hidden[product.d[0]];
    float* sums[kLanes];
    for (unsigned lane = 0; lane < kLanes; ++lane) sums[lane] = &kept.values[lane * count];
    product.run(sums);
    if (--kept.products > 0) return;
    for (unsigned lane = 0; lane < kLanes; ++lane) std::copy_n(sums[lane], count, product.d[lane]);
  }});
}

void complete_wgmma(Block& block, Warp& warp, unsigned, unsigned) {
  const unsigned number = warp.first / kLanes;
  const Fiber& fiber = block.lane(warp, 0);
  WarpProduct mine;
  mine.product = *static_cast<const Product*>(fiber.operands);
  mine.fiber = &fiber;
  mine.first_row = number % 4 * kRows;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const auto* product = static_cast<const Product*>(block.lane(warp, lane).operands);
    mine.d[lane] = static_cast<float*>(product->d);
    if (product->registers != nullptr) std::copy_n(product->registers, 4, mine.a[lane]);
  }
  std::uint32_t epoch = 0;
  if (checked()) {
    const Actor actor = engine_actor(fiber, kMbarrierEngines + kStoreEngines + number);
    epoch = actor.epoch;
    const Product& p = mine.product;
    if (p.registers == nullptr) {
      check_matrix(fiber, actor, decode(fiber, p.a), mine.first_row, kRows, mine.depth(), p.a_type,
                   p.a_transposed);
    }
    check_matrix(fiber, actor, decode(fiber, p.b), 0, p.n, mine.depth(), p.b_type, p.b_transposed);
  }
  WarpGroup& group = block.warp_groups[number];
  if (block.cluster->launch->late) {
    put_off(group, mine, epoch);
  } else {
    mine.run(mine.d);
    if (checked()) group.products.push_back({group.open, epoch, nullptr});
  }
}

void complete_commit(Block& block, Warp& warp, unsigned, unsigned) {
  ++block.warp_groups[warp.first / kLanes].open;
}

void complete_wait(Block& block, Warp& warp, unsigned, unsigned) {
  const unsigned number = warp.first / kLanes;
  WarpGroup& group = block.warp_groups[number];
  const unsigned pending = block.lane(warp, 0).argument;
  std::size_t done = 0;
  while (done < group.products.size() && group.products[done].group + pending < group.open) {
    WarpGroup::Product& product = group.products[done++];
    if (product.work) product.work();
    if (checked()) {
      for (unsigned lane = 0; lane < kLanes; ++lane) {
        learn_of_engine(block.lane(warp, lane), kMbarrierEngines + kStoreEngines + number,
                        product.epoch);
      }
    }
  }
  group.products.erase(group.products.begin(),
                       group.products.begin() + static_cast<std::ptrdiff_t>(done));
}

}  // namespace

void wgmma(const Product& product) {
  CUKIT_ENTER(me);
  if (me.block->fibers.size() % 128 != 0) {
    fault("wgmma: the block has no whole warpgroups of 128 threads\n  " + name_of(me) + " " +
          where(me.call));
  }
  me.operands = &product;
  meet(kWgmma + product.n, ~0u, "wgmma.mma_async", complete_wgmma);
}

void wgmma_commit() {
  CUKIT_ENTER(me);
  static_cast<void>(me);
  meet(kWgmma + 1000, ~0u, "wgmma.commit_group", complete_commit);
}

void wgmma_wait(unsigned pending) {
  CUKIT_ENTER(me);
  me.argument = pending;
  meet(kWgmma + 1001, ~0u, "wgmma.wait_group", complete_wait);
}

}  // namespace cukit::emulator
