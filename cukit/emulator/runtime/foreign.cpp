// Parts of the runtime that only other projects' sources need (common/emulator/third_party.h).
#include "common/emulator/third_party.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "block.h"

namespace cukit::emulator {

void* shared_memory(std::uint32_t address, std::size_t bytes) {
  CUKIT_ENTER(me);
  if ((bytes & (bytes - 1)) == 0 && address % bytes != 0) {
    fault(format("misaligned: an access of %zu bytes needs %zu-byte alignment, the address is byte "
                 "%u of shared memory\n  ", bytes, bytes, address) +
          name_of(me) + " " + where(me.call));
  }
  return place_of(me, address, bytes).pointer;
}

bool in_shared_memory(const void* pointer) {
  return cells_of(*current().block, pointer, 1).cells != nullptr;
}

unsigned mbarrier_phase(std::uint32_t address) {
  CUKIT_ENTER(me);
  const Place place = place_of(me, address, 8);
  const auto found = place.block->mbarriers.find(local_address(address));
  return found == place.block->mbarriers.end() ? 0 : found->second.phase;
}

namespace {

constexpr unsigned kExchange = 1 << 20;

struct Exchange {
  const unsigned char* mine;
  unsigned char* all;
};

// `kind` encodes the bytes that each lane contributes, so that lanes that disagree do not match.
void complete_exchange(Block& block, Warp& warp, unsigned kind, unsigned) {
  const std::size_t bytes = kind / 2 - kExchange;
  for (unsigned to = 0; to < kLanes; ++to) {
    const auto* target = static_cast<const Exchange*>(block.lane(warp, to).operands);
    for (unsigned from = 0; from < kLanes; ++from) {
      const auto* source = static_cast<const Exchange*>(block.lane(warp, from).operands);
      std::memcpy(target->all + from * bytes, source->mine, bytes);
    }
  }
}

}  // namespace

void exchange_in_warp(const void* mine, void* all, std::size_t bytes, const char* name) {
  CUKIT_ENTER(me);
  const Exchange exchange{static_cast<const unsigned char*>(mine), static_cast<unsigned char*>(all)};
  me.operands = &exchange;
  meet_warp(2 * (kExchange + static_cast<unsigned>(bytes)), name, complete_exchange);
}

unsigned converged_lanes() {
  CUKIT_ENTER(me);
  Warp& warp = *me.warp;
  const unsigned mine = 1u << me.lane;
  const void* const call = me.call;
  // Wait until every other lane has arrived here, waits elsewhere or has exited. Only for a while,
  // since a lane that polls may be waiting for this one.
  constexpr unsigned kPatience = 64;
  me.converging = call;
  for (unsigned turn = 0; turn < kPatience; ++turn) {
    unsigned elsewhere = 0;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if ((warp.ready >> lane & 1) != 0 && me.block->lane(warp, lane).converging != call) {
        elsewhere |= 1u << lane;
      }
    }
    if (elsewhere == 0 || me.converging == nullptr) break;
    yield();
  }
  if (me.converging != nullptr) {  // no other lane has formed the group yet
    unsigned together = mine;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if ((warp.ready >> lane & 1) != 0 && me.block->lane(warp, lane).converging == call) {
        together |= 1u << lane;
      }
    }
    for (unsigned lanes = together; lanes != 0; lanes &= lanes - 1) {
      Fiber& other = me.block->lane(warp, static_cast<unsigned>(__builtin_ctz(lanes)));
      other.converging = nullptr;
      other.converged = together;
    }
  }
  return me.converged;
}

// XORWOW -------------------------------------------------------------------------------------------

namespace {

using Bits160 = std::array<std::uint32_t, 5>;

// A step of the generator as a matrix over bits; column i is the image of bit i.
struct Step {
  std::array<Bits160, 160> columns;

  Bits160 operator()(const Bits160& v) const {
    Bits160 result{};
    for (unsigned i = 0; i < 160; ++i) {
      if ((v[i / 32] >> (i % 32) & 1) == 0) continue;
      for (unsigned word = 0; word < 5; ++word) result[word] ^= columns[i][word];
    }
    return result;
  }
  Step twice() const {
    Step result;
    for (unsigned i = 0; i < 160; ++i) result.columns[i] = (*this)(columns[i]);
    return result;
  }
};

// Element i advances the generator by 2^i steps.
const std::vector<Step>& xorwow_steps() {
  static const std::vector<Step> steps = [] {
    constexpr unsigned kMaxBits = 64 + 67;
    Step one;
    for (unsigned i = 0; i < 160; ++i) {
      Bits160 v{};
      v[i / 32] = 1u << (i % 32);
      const std::uint32_t t = v[0] ^ (v[0] >> 2);
      one.columns[i] = {v[1], v[2], v[3], v[4], (v[4] ^ (v[4] << 4)) ^ (t ^ (t << 1))};
    }
    std::vector<Step> all{one};
    while (all.size() < kMaxBits) all.push_back(all.back().twice());
    return all;
  }();
  return steps;
}

}  // namespace

void skip_xorwow(unsigned* v, std::uint64_t number, unsigned power) {
  if (number == 0) return;
  Bits160 bits;
  std::copy_n(v, 5, bits.begin());
  for (unsigned i = 0; number >> i != 0; ++i) {
    if (number >> i & 1) bits = xorwow_steps()[i + power](bits);
    if (i == 63) break;
  }
  std::copy_n(bits.begin(), 5, v);
}

}  // namespace cukit::emulator
