#include "guesses.h"

#include "block.h"
#include "common/emulator/memory.h"
#include "run.h"

namespace cukit::emulator {

void Guesses::confirm(std::uint32_t call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  confirmed_.insert(call);
}

std::string Guesses::remaining() const {
  for (const auto& [call, report] : reports_) {
    if (confirmed_.count(call) == 0) return report;
  }
  return "";
}

bool may_guess(const Actor& actor, std::size_t bytes, Access access, Mark earlier) {
  constexpr std::size_t kMaxBytes = 8;  // bytes that atomicCAS exchanges
  const bool reported = actor.issuer->block->cluster->launch->cas_guesses != 0;
  if (actor.engine || bytes > kMaxBytes || reported) return false;
  return (access == Access::Read && is_atomic(earlier)) || (is_atomic(access) && earlier == Mark::Plain);
}

void note_guess(const void* pointer, std::uint32_t call) {
  Fiber& me = current();
  me.guess = {pointer, call, me.epoch};
}

void check_compare(const void* pointer, std::size_t bytes, Access access) {
  CUKIT_ENTER(me);
  if (!checked()) return;
  ClusterRunner& cluster = *me.block->cluster;
  Guesses& guesses = cluster.run->guesses;
  if (me.guess.pointer == pointer && me.guess.epoch == me.epoch) guesses.confirm(me.guess.call);
  // A plain read that has not raced may still race with a later atomic of another thread. Marked as
  // a strong read, it is not reported.
  const CellPlace place = cells_of(*me.block, pointer, bytes);
  if (place.cells != nullptr) {
    place.cells->visit(place.byte, bytes, [&](Cell& cell, std::size_t) {
      for (int slot = 0; slot < 2; ++slot) {
        if (cell.mark[slot] != Mark::Plain || cell.reader[slot] != me.agent || cell.read_epoch[slot] != me.epoch) {
          continue;
        }
        cell.mark[slot] = Mark::Strong;
        guesses.confirm(cell.read_call[slot]);
      }
    });
  } else if (cluster.launch->global_races != 0) {
    cluster.run->global.confirm_guesses(me, pointer, bytes);
  }
  check(thread_actor(me), pointer, bytes, access);
}

}  // namespace cukit::emulator
