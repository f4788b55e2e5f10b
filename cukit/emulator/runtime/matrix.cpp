// ldmatrix, stmatrix, movmatrix and mma.sync.
#include "matrix.h"

#include "engines.h"

namespace cukit::emulator {

namespace {

enum Kind : unsigned { kLoadMatrix = 200, kStoreMatrix = 300, kMoveMatrix = 399, kMma = 400 };

struct MatrixMove {
  unsigned* registers;
  std::uint32_t shared;
};

// The 16 bytes of a matrix row, whose address `lane` has given.
unsigned char* row_of(Block& block, const Warp& warp, unsigned lane, Access access) {
  const Fiber& fiber = block.lane(warp, lane);
  const auto* move = static_cast<const MatrixMove*>(fiber.operands);
  const Place place = place_of(fiber, move->shared, 16);
  if (move->shared % 16 != 0) {
    fault(format("misaligned: a matrix row needs 16-byte alignment, the address is byte %u of "
                 "shared memory\n  ", move->shared) + name_of(fiber) + " " + where(fiber.call));
  }
  if (checked()) check_shared(thread_actor(fiber), *place.block, place.pointer, 16, access);
  return place.pointer;
}

// Register j of all lanes holds matrix j: lane l has elements 2 (l % 4) and + 1 of row l / 4, or,
// transposed, of column l / 4.
template <bool Load>
void complete_move(Block& block, Warp& warp, unsigned kind, unsigned) {
  const unsigned count = kind % 100 / 2;
  const bool transposed = kind % 2 != 0;
  for (unsigned j = 0; j < count; ++j) {
    unsigned char* rows[8];
    for (unsigned i = 0; i < 8; ++i) {
      rows[i] = row_of(block, warp, 8 * j + i, Load ? Access::Read : Access::Write);
    }
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      const auto* move = static_cast<const MatrixMove*>(block.lane(warp, lane).operands);
      auto* halves = reinterpret_cast<unsigned char*>(&move->registers[j]);
      for (unsigned i = 0; i < 2; ++i) {
        const unsigned row = transposed ? lane % 4 * 2 + i : lane / 4;
        const unsigned column = transposed ? lane / 4 : lane % 4 * 2 + i;
        unsigned char* const in_shared = rows[row] + 2 * column;
        if constexpr (Load) {
          std::memcpy(halves + 2 * i, in_shared, 2);
        } else {
          std::memcpy(in_shared, halves + 2 * i, 2);
        }
      }
    }
  }
}

// Lane 4 r + c provides elements 2 c and 2 c + 1 of row r and receives those of column r.
void complete_transposition(Block& block, Warp& warp, unsigned, unsigned) {
  std::uint32_t columns[8][4] = {};
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const auto pair = static_cast<std::uint32_t>(block.lane(warp, lane).value);
    const unsigned row = lane / 4;
    for (unsigned i = 0; i < 2; ++i) {
      columns[lane % 4 * 2 + i][row / 2] |= (pair >> (16 * i) & 0xffffu) << (row % 2 * 16);
    }
  }
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    block.lane(warp, lane).value = columns[lane / 4][lane % 4];
  }
}

struct MmaOperands {
  void* d;
  const unsigned* a;
  const unsigned* b;
};

void complete_mma(Block& block, Warp& warp, unsigned kind, unsigned) {
  const unsigned code = kind - kMma;
  const auto a_type = static_cast<Number>(code / 512);
  const auto b_type = static_cast<Number>(code / 64 % 8);
  const unsigned k = code % 64;
  const unsigned per_register = 4 / bytes_of(b_type);
  Operands operands;
  void* d[kLanes];
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const auto* mine = static_cast<const MmaOperands*>(block.lane(warp, lane).operands);
    unpack_a(operands, lane, mine->a, a_type, k);
    for (unsigned r = 0; r < k / (4 * per_register); ++r) {
      const auto* bytes = reinterpret_cast<const unsigned char*>(&mine->b[r]);
      for (unsigned i = 0; i < per_register; ++i) {
        operands.b[(lane % 4 + 4 * r) * per_register + i][lane / 4] = element(bytes, i, b_type);
      }
    }
    d[lane] = mine->d;
  }
  if (is_integer(a_type)) {
    multiply_tile(operands, k, 0, reinterpret_cast<std::int32_t* const*>(d));
  } else {
    multiply_tile(operands, k, 0, reinterpret_cast<float* const*>(d));
  }
}

}  // namespace

void ldmatrix(unsigned* registers, unsigned count, bool transposed, std::uint32_t shared) {
  CUKIT_ENTER(me);
  const MatrixMove move{registers, shared};
  me.operands = &move;
  use_registers(me, registers, count * sizeof(unsigned), Access::Write);
  meet_warp(kLoadMatrix + 2 * count + transposed, "ldmatrix", complete_move<true>);
}

void stmatrix(const unsigned* registers, unsigned count, bool transposed, std::uint32_t shared) {
  CUKIT_ENTER(me);
  require(me, kSinceHopper, "stmatrix");
  const MatrixMove move{const_cast<unsigned*>(registers), shared};
  me.operands = &move;
  use_registers(me, registers, count * sizeof(unsigned), Access::Read);
  meet_warp(kStoreMatrix + 2 * count + transposed, "stmatrix", complete_move<false>);
}

unsigned movmatrix(unsigned pair) {
  CUKIT_ENTER(me);
  me.value = pair;
  meet_warp(kMoveMatrix, "movmatrix", complete_transposition);
  return static_cast<unsigned>(me.value);
}

void mma(Number a_type, Number b_type, unsigned k, void* d, const unsigned* a, const unsigned* b) {
  CUKIT_ENTER(me);
  if (a_type == Number::E4M3 || a_type == Number::E5M2) require(me, kSinceAda, "mma.sync of float8");
  const MmaOperands operands{d, a, b};
  me.operands = &operands;
  const unsigned registers = k * bytes_of(b_type) / 16;  // of operand b; a has twice as many rows
  use_registers(me, a, 2 * registers * sizeof(unsigned), Access::Read);
  use_registers(me, b, registers * sizeof(unsigned), Access::Read);
  use_registers(me, d, 4 * sizeof(float), Access::Write);
  const unsigned kind =
      kMma + static_cast<unsigned>(a_type) * 512 + static_cast<unsigned>(b_type) * 64 + k;
  meet_warp(kind, "mma.sync", complete_mma);
}

}  // namespace cukit::emulator
