#include "global_shadow.h"

#include <algorithm>
#include <new>

#include "block.h"
#include "engines.h"
#include "run.h"

namespace cukit::emulator {

namespace {

// An access of a thread to an element; finds an earlier access that it races with.
struct ElementCheck {
  const Actor& actor;
  const ClusterRunner& cluster;
  Access access;
  bool same_values;  // several threads may write the same value

  bool ordered(const PastAccess& past) const {
    if (past.cluster == cluster.number) {
      return past.agent == actor.agent || past.epoch <= actor.issuer->seen->seen[past.agent];
    }
    const auto* known = epochs_of(actor.issuer->seen->foreign, past.cluster);
    return known != nullptr && past.epoch <= (*known)[past.agent];
  }
  bool clashes(const PastAccess& past, std::uint8_t bytes) const {
    return past.epoch != 0 && (past.bytes & bytes) != 0 && !ordered(past);
  }

  // Whether both are atomics, of different blocks, and one of them has block scope.
  bool out_of_scope(const PastAccess& past) const {
    if (!is_atomic(access) || !is_atomic(past.mark)) return false;
    if (access != Access::BlockAtomic && past.mark != Mark::BlockAtomic) return false;
    return past.cluster != cluster.number || past.agent / cluster.threads != actor.agent / cluster.threads;
  }

  // The earlier access that this one races with, or null.
  const PastAccess* clash(const GlobalCell& cell, std::uint8_t bytes) const {
    if (clashes(cell.write, bytes)) return &cell.write;
    for (const PastAccess& read : cell.reads) {
      if ((conflict(access, read.mark) || out_of_scope(read)) && clashes(read, bytes)) return &read;
    }
    return nullptr;
  }

  // How to order the access after the earlier one.
  const char* remedy(const PastAccess& past) const {
    if (out_of_scope(past)) return "use an atomic of device scope, without _block";
    const bool same_block = past.cluster == cluster.number &&
                            past.agent / cluster.threads == actor.agent / cluster.threads;
    return same_block ? kBlockRemedy : kGridRemedy;
  }

  void note(GlobalCell& cell, std::uint8_t bytes) const {
    const PastAccess now{static_cast<std::uint32_t>(cluster.number), actor.epoch,
                   offset_of(cluster, actor.call), static_cast<std::uint16_t>(actor.agent), bytes,
                   mark_of(access)};
    if (access == Access::Write) {
      cell.write = now;
      return;
    }
    cell.reads[slot_for(
        now.mark, [&](int slot) { return cell.reads[slot].mark; },
        [&](int slot) {
          const PastAccess& past = cell.reads[slot];
          return past.cluster == now.cluster && past.agent == now.agent && past.epoch != 0;
        },
        [&](int slot) { return cell.reads[slot].epoch == 0 || ordered(cell.reads[slot]); })] = now;
  }
};

}  // namespace

void GlobalShadow::watch(const Launch& launch, const Module& module) {
  constexpr std::uint64_t kLargest = 4;
  struct Extent {
    std::uintptr_t low, high;
    std::uint64_t granule;
  };
  std::vector<Extent> extents;
  const auto add = [&](std::uintptr_t low, std::uintptr_t high, std::uint64_t element) {
    const std::uint64_t granule = element % 4 == 0 ? kLargest : element % 2 == 0 ? 2 : 1;
    extents.push_back({low, high, granule});
  };
  for (const Range* range = launch.ranges; range != launch.ranges + launch.num_ranges; ++range) {
    if (range->writeable != 0) add(range->low, range->high, range->element_bytes);
  }
  for (const MappedArray& array : arrays_of_maps(launch)) {
    if (array.writeable) add(array.low, array.high, array.element_bytes);
  }
  if (module.data_low < module.data_high) {
    extents.push_back({module.data_low, module.data_high, kLargest});
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.low < b.low; });
  // Overlapping arrays share a region with the smaller granule.
  std::vector<Extent> joined;
  for (const Extent& extent : extents) {
    if (joined.empty() || extent.low >= joined.back().high) {
      joined.push_back(extent);
    } else {
      joined.back().high = std::max(joined.back().high, extent.high);
      joined.back().granule = std::min(joined.back().granule, extent.granule);
    }
  }
  for (const Extent& extent : joined) {
    const std::size_t count = (extent.high - extent.low + extent.granule - 1) / extent.granule;
    auto* cells = static_cast<GlobalCell*>(std::calloc(count, sizeof(GlobalCell)));
    if (cells == nullptr) throw std::bad_alloc();
    regions_.push_back({extent.low, extent.high, static_cast<unsigned>(extent.granule), {}});
    regions_.back().cells.reset(cells);
  }
}

template <typename Visit>
void GlobalShadow::visit(std::uintptr_t address, std::size_t bytes, const Visit& visit) {
  auto region = std::upper_bound(
      regions_.begin(), regions_.end(), address,
      [](std::uintptr_t at, const Region& each) { return at < each.low; });
  if (region == regions_.begin() || address >= (--region)->high) return;
  const unsigned granule = region->granule;
  const std::uintptr_t first = (address - region->low) / granule;
  const std::uintptr_t last = (address - region->low + bytes - 1) / granule;
  for (std::uintptr_t i = first; i <= last; ++i) {
    const std::uintptr_t low = region->low + i * granule;
    unsigned mask = 0;
    for (unsigned b = 0; b < granule; ++b) {
      mask |= static_cast<unsigned>(low + b >= address && low + b < address + bytes) << b;
    }
    visit(region->cells[i], static_cast<std::uint8_t>(mask), low);
  }
}

void GlobalShadow::check(const Actor& actor, const void* pointer, std::size_t bytes, Access access) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const ClusterRunner& cluster = *actor.issuer->block->cluster;
  const ElementCheck element{actor, cluster, access, cluster.launch->same_value_writes != 0};
  visit(address, bytes, [&](GlobalCell& cell, std::uint8_t mask, std::uintptr_t low) {
    std::atomic_flag& lock = locks_[low / kLine % kLocks];
    while (lock.test_and_set(std::memory_order_acquire)) {
    }
    const PastAccess* const clash = element.clash(cell, mask);
    const bool write = clash == &cell.write;
    const PastAccess earlier = clash == nullptr ? PastAccess{} : *clash;
    element.note(cell, mask);
    lock.clear(std::memory_order_release);
    if (clash == nullptr) return;
    const auto report = [&] {
      return report_race(
          actor, bytes, access, describe_global(*cluster.launch, std::max(low, address)),
          write ? Mark::Plain : earlier.mark, write,
          name_of_thread(*cluster.run, earlier.cluster, earlier.agent), earlier.call,
          element.remedy(earlier));
    };
    if (!write && may_guess(actor, bytes, access, earlier.mark)) {
      const bool reads = access == Access::Read;
      const std::uint32_t load = reads ? offset_of(cluster, actor.call) : earlier.call;
      if (reads) note_guess(pointer, load);
      cluster.run->guesses.postpone(load, report);
    } else if (!(write && element.same_values &&
                 defer_judgement(actor, pointer, bytes, access, report()))) {
      fault(report());
    }
  });
}

void GlobalShadow::confirm_guesses(const Fiber& me, const void* pointer, std::size_t bytes) {
  const ClusterRunner& cluster = *me.block->cluster;
  visit(reinterpret_cast<std::uintptr_t>(pointer), bytes,
        [&](GlobalCell& cell, std::uint8_t, std::uintptr_t low) {
    std::atomic_flag& lock = locks_[low / kLine % kLocks];
    while (lock.test_and_set(std::memory_order_acquire)) {
    }
    for (PastAccess& read : cell.reads) {
      if (read.mark != Mark::Plain || read.epoch != me.epoch || read.agent != me.agent ||
          read.cluster != cluster.number) {
        continue;
      }
      read.mark = Mark::Strong;
      cluster.run->guesses.confirm(read.call);
    }
    lock.clear(std::memory_order_release);
  });
}

}  // namespace cukit::emulator
