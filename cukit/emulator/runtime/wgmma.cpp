// wgmma: asynchronous matrix products of four warps, whose operands in shared memory are given by
// 64-bit descriptors.
//
// The rules for registers are those of the PTX ISA (wgmma.fence, wgmma.wait_group). From a wgmma
// until its group has been waited for, ordinary code may neither read nor write its accumulators,
// nor write the registers of its operand a. (The ISA makes reading operand a undefined, too; it is
// allowed here, as neither side changes the registers.) A fence is required between an ordinary
// access to any of them and the wgmma, between wgmmas of different shapes with the same
// accumulators, and before a warpgroup's first wgmma.
#include "engines.h"
#include "matrix.h"

namespace cukit::emulator {

namespace {

constexpr const char* kFence = "wgmma.fence";
constexpr const char* kMultiply = "wgmma.mma_async";
constexpr const char* kCommit = "wgmma.commit_group";
constexpr const char* kWait = "wgmma.wait_group";
constexpr unsigned kThreads = WarpGroup::kThreads;
constexpr unsigned kDepthBytes = 32;
constexpr unsigned kCoreRows = 8;

// A decoded matrix descriptor: addresses and strides in bytes.
struct Descriptor {
  std::uint32_t start;
  std::uint32_t leading;
  std::uint32_t stride;
  unsigned chunks;  // width of the swizzle in 16-byte chunks; 1 without one
};

Descriptor decode(std::uint64_t bits) {
  if (bits >> 49 & 7) not_emulated("wgmma: a matrix descriptor with a base offset");
  constexpr unsigned kChunks[] = {1, 8, 4, 2};
  return {static_cast<std::uint32_t>(bits & 0x3fff) << 4,
          static_cast<std::uint32_t>(bits >> 16 & 0x3fff) << 4,
          static_cast<std::uint32_t>(bits >> 32 & 0x3fff) << 4, kChunks[bits >> 62]};
}

// The shared address of the 16 bytes that hold element `k` of row (or column) `i`: 16 consecutive
// bytes along k if K-major, along i if MN-major.
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

// A warpgroup's wgmma, with copies of its threads' registers.
struct GroupProduct {
  Product product;
  const Fiber* fiber;  // the first thread, to resolve addresses
  unsigned a[kThreads][4];  // if operand a is in registers
  float* d[kThreads];

  unsigned depth() const { return kDepthBytes / bytes_of(product.b_type); }

  void run(float* const* accumulators) const {
    Operands operands;
    const unsigned k = depth();
    read_matrix(*fiber, decode(product.b), 0, product.n, k, product.b_type, product.b_transposed,
                [&](unsigned column, unsigned i, float value) { operands.b[i][column] = value; });
    for (unsigned warp = 0; warp < WarpGroup::kWarps; ++warp) {
      const unsigned first = warp * kLanes;
      if (product.registers != nullptr) {
        for (unsigned lane = 0; lane < kLanes; ++lane) {
          unpack_a(operands, lane, a[first + lane], product.a_type, k);
        }
      } else {
        read_matrix(*fiber, decode(product.a), warp * kRows, kRows, k, product.a_type,
                    product.a_transposed,
                    [&](unsigned row, unsigned i, float value) { operands.a[row][i] = value; });
      }
      for (unsigned column = 0; column < product.n; column += 8) {
        float* tile[kLanes];
        for (unsigned lane = 0; lane < kLanes; ++lane) {
          tile[lane] = accumulators[first + lane] + column / 2;
          if (!product.accumulate) std::fill_n(tile[lane], 4, 0.0f);  // 0 as an int too
        }
        if (is_integer(product.a_type)) {
          multiply_tile(operands, k, column, reinterpret_cast<std::int32_t* const*>(tile));
        } else {
          multiply_tile(operands, k, column, tile);
        }
      }
    }
  }
};

// In the late mode accumulators are NaN until they are waited for; their values are kept in
// `hidden`.
Work defer(WarpGroup& group, const GroupProduct& product) {
  const unsigned count = product.product.n / 2;
  WarpGroup::Hidden& hidden = group.hidden[product.d[0]];
  if (hidden.products > 0 && hidden.values.size() != kThreads * static_cast<std::size_t>(count)) {
    // Earlier wgmmas of another shape use these accumulators: run them now.
    for (WarpGroup::Product& earlier : group.products) {
      if (earlier.work) earlier.work();
      earlier.work = nullptr;
    }
  }
  if (hidden.products++ == 0) {
    hidden.values.resize(kThreads * static_cast<std::size_t>(count));
    for (unsigned i = 0; i < kThreads; ++i) {
      std::copy_n(product.d[i], count, &hidden.values[i * count]);
      std::memset(product.d[i], 0xff, count * sizeof(float));
    }
  }
  return [&group, product, count] {
    WarpGroup::Hidden& kept = group.hidden[product.d[0]];
    float* accumulators[kThreads];
    for (unsigned i = 0; i < kThreads; ++i) accumulators[i] = &kept.values[i * count];
    product.run(accumulators);
    if (--kept.products > 0) return;
    for (unsigned i = 0; i < kThreads; ++i) std::copy_n(accumulators[i], count, product.d[i]);
  };
}

bool alike(const Product& x, const Product& y) {
  return x.a_type == y.a_type && x.b_type == y.b_type && x.n == y.n && x.a == y.a && x.b == y.b &&
         x.a_transposed == y.a_transposed && x.b_transposed == y.b_transposed &&
         x.accumulate == y.accumulate && (x.registers == nullptr) == (y.registers == nullptr);
}

unsigned product_engine(unsigned warp) { return kMbarrierEngines + kStoreEngines + warp; }

std::size_t place_on_stack(const Fiber& fiber, const void* pointer) {
  return static_cast<std::size_t>(static_cast<const unsigned char*>(pointer) - fiber.stack_low);
}

std::string at(const Fiber& fiber) { return "\n  " + name_of(fiber) + " " + where(fiber.call); }

// "accumulator 5", "register 2 of operand a"
std::string name_of_register(std::size_t i, bool accumulator) {
  return accumulator ? format("accumulator %zu", i) : format("register %zu of operand a", i);
}

// Where a wgmma in flight was issued, and which wait it needs.
std::string state_of(const WarpGroup& group, std::uint32_t number) {
  for (const WarpGroup::Product& product : group.products) {
    if (product.number != number) continue;
    const std::string started = "\n  the wgmma was issued " + where(product.call);
    if (product.group == group.open) {
      return started +
             "\n  no wgmma_commit has followed it: wgmma_wait waits for committed groups only";
    }
    const auto later = static_cast<unsigned>(group.open - product.group - 1);
    return started + format("\n  %u groups have been committed after its own: call wgmma_wait<%u> "
                            "or less", later, later);
  }
  return "";
}

[[noreturn]] void missing_fence(const Fiber& fiber, const std::string& why,
                                const void* last_fence) {
  fault("missing wgmma_fence: " + why + at(fiber) +
        (last_fence == nullptr ? "\n  the warpgroup has executed none"
                               : "\n  the last one was executed " + where(last_fence)));
}

// Records the registers that a wgmma of this number uses in a thread.
void take(Fiber& fiber, const WarpGroup& group, const void* pointer, std::size_t count,
          std::uint32_t number, bool accumulator) {
  const std::size_t place = place_on_stack(fiber, pointer);
  if (place >= Stack::kBytes) {
    fault(std::string("wgmma.mma_async: ") + (accumulator ? "accumulators" : "operand a") +
          " must be local variables: the compiler copies others to registers before the wgmma, and "
          "back while it runs" + at(fiber));
  }
  const std::size_t i = fiber.registers.take(place, count, number, accumulator);
  if (i == count) return;
  const std::string name = name_of_register(i, accumulator);
  if (!fiber.registers.in_flight(place + 4 * i)) {
    missing_fence(fiber, name + " was accessed by ordinary code since the last one: call it "
                         "between the access and the wgmma", group.fence_call);
  }
  fault("wgmma not waited for: " + name + " of a new wgmma is " +
        (accumulator ? "operand a" : "an accumulator") + " of one in flight" + at(fiber) +
        state_of(group, fiber.registers.product_at(place + 4 * i)));
}

// Checks and records the registers of a wgmma.
void take_registers(Block& block, unsigned number, const GroupProduct& mine,
                    WarpGroup::Product& record) {
  Fiber* const* const fibers = &block.fibers[number * kThreads];
  WarpGroup& group = block.warp_groups[number];
  if (group.fence_call == nullptr) {
    missing_fence(*fibers[0], "call it before a warpgroup's first wgmma", nullptr);
  }
  const std::size_t low = place_on_stack(*fibers[0], mine.d[0]);
  const std::size_t high = low + record.count * sizeof(float);
  const unsigned shape = mine.product.n << 8 | mine.depth();
  bool known = false;
  for (const WarpGroup::Shaped& shaped : group.shaped) {
    if (low >= shaped.high || high <= shaped.low) continue;
    if (shaped.shape != shape || shaped.low != low) {
      missing_fence(*fibers[0], format("a wgmma of m64n%uk%u uses accumulators of one of "
                                       "m64n%uk%u: call it between them", mine.product.n,
                                       mine.depth(), shaped.shape >> 8, shaped.shape & 0xff),
                    group.fence_call);
    }
    known = true;
  }
  if (!known) group.shaped.push_back({low, high, shape});
  record.number = ++block.cluster->register_events;
  record.accumulators = low;
  for (unsigned i = 0; i < kThreads; ++i) {
    const auto* product = static_cast<const Product*>(fibers[i]->operands);
    if (product->registers != nullptr) {
      take(*fibers[i], group, product->registers, 4, record.number, false);
    }
    take(*fibers[i], group, mine.d[i], record.count, record.number, true);
  }
}

void complete_multiply(Block& block, unsigned number) {
  WarpGroup& group = block.warp_groups[number];
  Fiber* const* const fibers = &block.fibers[number * kThreads];
  GroupProduct mine;
  mine.product = *static_cast<const Product*>(fibers[0]->operands);
  mine.fiber = fibers[0];
  for (unsigned i = 0; i < kThreads; ++i) {
    const auto* product = static_cast<const Product*>(fibers[i]->operands);
    if (!alike(*product, mine.product)) {
      fault("wgmma.mma_async: all threads of a warpgroup must give the same shape, types, "
            "descriptors and scale-d; those of this thread differ from the first thread's" +
            at(*fibers[i]));
    }
    mine.d[i] = static_cast<float*>(product->d);
    if (product->registers != nullptr) std::copy_n(product->registers, 4, mine.a[i]);
  }
  WarpGroup::Product record{};
  record.group = group.open;
  record.call = mine.fiber->call;
  record.count = mine.product.n / 2;
  if (checked()) {
    take_registers(block, number, mine, record);
    const Product& p = mine.product;
    for (unsigned warp = 0; warp < WarpGroup::kWarps; ++warp) {
      const Fiber& fiber = *fibers[warp * kLanes];
      const Actor actor = engine_actor(fiber, product_engine(number * WarpGroup::kWarps + warp));
      record.epochs[warp] = actor.epoch;
      if (p.registers == nullptr) {
        check_matrix(fiber, actor, decode(p.a), warp * kRows, kRows, mine.depth(), p.a_type,
                     p.a_transposed);
      }
      check_matrix(fiber, actor, decode(p.b), 0, p.n, mine.depth(), p.b_type, p.b_transposed);
    }
  }
  if (block.cluster->launch->late) {
    record.work = defer(group, mine);
  } else {
    mine.run(mine.d);
    if (!checked()) return;
  }
  group.products.push_back(std::move(record));
}

void complete_fence(Block& block, unsigned number) {
  const std::uint32_t event = ++block.cluster->register_events;
  WarpGroup& group = block.warp_groups[number];
  group.shaped.clear();
  group.fence_call = block.fibers[number * kThreads]->call;
  for (unsigned i = 0; i < kThreads; ++i) block.fibers[number * kThreads + i]->registers.fence(event);
}

void complete_commit(Block& block, unsigned number) { ++block.warp_groups[number].open; }

void complete_wait(Block& block, unsigned number) {
  WarpGroup& group = block.warp_groups[number];
  Fiber* const* const fibers = &block.fibers[number * kThreads];
  const unsigned pending = fibers[0]->argument;
  for (unsigned i = 1; i < kThreads; ++i) {
    if (fibers[i]->argument == pending) continue;
    fault(format("divergent warpgroup: wgmma.wait_group %u by one thread and %u by the first",
                 fibers[i]->argument, pending) + at(*fibers[i]));
  }
  std::size_t done = 0;
  while (done < group.products.size() && group.products[done].group + pending < group.open) {
    WarpGroup::Product& product = group.products[done++];
    if (product.work) product.work();
  }
  if (done == 0) return;
  if (checked()) {
    const WarpGroup::Product& last = group.products[done - 1];
    for (unsigned i = 0; i < kThreads; ++i) {
      const unsigned warp = i / kLanes;
      fibers[i]->registers.complete(last.number);
      order_after_engine(*fibers[i], product_engine(number * WarpGroup::kWarps + warp),
                      last.epochs[warp]);
    }
  }
  group.products.erase(group.products.begin(),
                       group.products.begin() + static_cast<std::ptrdiff_t>(done));
}

// Meets the other threads at a warpgroup-wide instruction.
void enter(const Fiber& me, const char* name, void (*complete)(Block&, unsigned)) {
  const unsigned first = me.index / kThreads * kThreads;
  const auto threads = static_cast<unsigned>(me.block->fibers.size());
  if (first + kThreads > threads) {
    fault(format("missing threads: %s is an instruction of a whole warpgroup (four warps, the "
                 "first a multiple of four), here threads %u-%u, but the block has %u threads\n  ",
                 name, first, first + kThreads - 1, threads) + name_of(me) + " " + where(me.call));
  }
  meet_warp_group(name, complete);
}

// Whether fences, commits and waits have an effect.
bool noted(const Fiber& me) {
  const Launch& launch = *me.block->cluster->launch;
  return launch.checked != 0 || launch.late != 0;
}

}  // namespace

void touched_in_flight(const Fiber& me, const void* pointer, std::size_t bytes, Access access) {
  std::size_t place = place_on_stack(me, pointer) / 4 * 4;
  while (!me.registers.in_flight(place) ||
         (access == Access::Read && !me.registers.accumulator_at(place))) {
    place += 4;
  }
  const WarpGroup& group = me.block->warp_groups[me.index / kThreads];
  const std::uint32_t number = me.registers.product_at(place);
  const bool accumulator = me.registers.accumulator_at(place);
  std::string name = accumulator ? "an accumulator" : "operand a";
  for (const WarpGroup::Product& product : group.products) {
    const std::size_t i = (place - product.accumulators) / 4;
    if (accumulator && product.number == number && i < product.count) {
      name = name_of_register(i, true);
    }
  }
  fault(format("wgmma not waited for: %s of %zu bytes of %s in flight",
               access == Access::Read ? "read" : "write", bytes, name.c_str()) + at(me) +
        state_of(group, number));
}

void exit_before_products(const Fiber& me) {
  const WarpGroup& group = me.block->warp_groups[me.index / kThreads];
  fault("wgmma not waited for: a thread exits while a wgmma of its warpgroup is in flight" +
        at(me) + state_of(group, group.products.front().number));
}

void wgmma(const Product& product) {
  CUKIT_ENTER(me);
  require(me, kOnlyHopper, "wgmma.mma_async");
  me.operands = &product;
  enter(me, kMultiply, complete_multiply);
}

void wgmma_fence() {
  CUKIT_ENTER(me);
  require(me, kOnlyHopper, "wgmma.fence");
  if (checked()) enter(me, kFence, complete_fence);
}

void wgmma_commit() {
  CUKIT_ENTER(me);
  if (noted(me)) enter(me, kCommit, complete_commit);
}

void wgmma_wait(unsigned pending) {
  CUKIT_ENTER(me);
  me.argument = pending;
  if (noted(me)) enter(me, kWait, complete_wait);
}

}  // namespace cukit::emulator
