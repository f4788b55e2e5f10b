// Replaces CUB's block and warp primitives.
//
// An independent implementation of CUB's contract: where CUB guarantees a result only in thread 0,
// only thread 0 has it, and temporary storage needs a barrier before reuse.
#pragma once

#include "common/emulator/language.h"

#include <algorithm>
#include <functional>

namespace cub {

struct Sum {
  template <typename T>
  T operator()(const T& a, const T& b) const { return a + b; }
};
struct Max {
  template <typename T>
  T operator()(const T& a, const T& b) const { return a < b ? b : a; }
};
struct Min {
  template <typename T>
  T operator()(const T& a, const T& b) const { return b < a ? b : a; }
};
template <typename K, typename V>
struct KeyValuePair {
  K key;
  V value;
};
struct ArgMax {
  template <typename K, typename V>
  KeyValuePair<K, V> operator()(const KeyValuePair<K, V>& a, const KeyValuePair<K, V>& b) const {
    return b.value > a.value || (a.value == b.value && b.key < a.key) ? b : a;
  }
};
struct ArgMin {
  template <typename K, typename V>
  KeyValuePair<K, V> operator()(const KeyValuePair<K, V>& a, const KeyValuePair<K, V>& b) const {
    return b.value < a.value || (a.value == b.value && b.key < a.key) ? b : a;
  }
};

enum BlockReduceAlgorithm { BLOCK_REDUCE_RAKING, BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY, BLOCK_REDUCE_WARP_REDUCTIONS };
enum BlockScanAlgorithm { BLOCK_SCAN_RAKING, BLOCK_SCAN_RAKING_MEMOIZE, BLOCK_SCAN_WARP_SCANS };
enum BlockLoadAlgorithm {
  BLOCK_LOAD_DIRECT, BLOCK_LOAD_STRIPED, BLOCK_LOAD_VECTORIZE, BLOCK_LOAD_TRANSPOSE, BLOCK_LOAD_WARP_TRANSPOSE
};
enum BlockStoreAlgorithm {
  BLOCK_STORE_DIRECT, BLOCK_STORE_STRIPED, BLOCK_STORE_VECTORIZE, BLOCK_STORE_TRANSPOSE, BLOCK_STORE_WARP_TRANSPOSE
};

inline int LaneId() { return static_cast<int>(CUKIT_OF_SELF(lane)); }

namespace detail {

inline int thread() { return static_cast<int>(::cukit::emulator::ptx::thread_number()); }

// Shared memory for objects that need no constructor.
template <typename T, int Count>
struct Storage {
  alignas(T) unsigned char bytes[sizeof(T) * Count];
  T* data() { return reinterpret_cast<T*>(bytes); }
};

// Storage of a primitive for callers that pass none.
template <typename Of>
inline typename Of::TempStorage& private_storage() {
  __shared__ typename Of::TempStorage storage;
  return storage;
}

template <typename T>
inline T shuffled(T value, int lane, unsigned mask) {
  static_assert(sizeof(T) % 4 == 0 || sizeof(T) <= 2, "values of whole words are shuffled");
  if constexpr (sizeof(T) <= 8 && (sizeof(T) & (sizeof(T) - 1)) == 0) {
    return __shfl_sync(mask, value, lane);
  } else {
    unsigned words[sizeof(T) / 4];
    memcpy(words, &value, sizeof(T));
    for (unsigned& word : words) word = __shfl_sync(mask, word, lane);
    T result;
    memcpy(&result, words, sizeof(T));
    return result;
  }
}

}  // namespace detail

template <typename T, int X, BlockReduceAlgorithm = BLOCK_REDUCE_WARP_REDUCTIONS, int Y = 1, int Z = 1>
class BlockReduce {
  static constexpr int kThreads = X * Y * Z;

 public:
  using TempStorage = detail::Storage<T, kThreads>;
  BlockReduce() : storage_(detail::private_storage<BlockReduce>()) {}
  explicit BlockReduce(TempStorage& storage) : storage_(storage) {}

  template <typename Operation>
  T Reduce(T input, Operation operation, int valid = kThreads) {
    T* values = storage_.data();
    const int me = detail::thread();
    if (me < valid) values[me] = input;
    __syncthreads();
    if (me == 0) {
      for (int i = 1; i < valid; ++i) input = operation(input, values[i]);
    }
    return input;
  }
  template <int Items, typename Operation>
  T Reduce(T (&inputs)[Items], Operation operation) {
    T sum = inputs[0];
    for (int i = 1; i < Items; ++i) sum = operation(sum, inputs[i]);
    return Reduce(sum, operation);
  }
  T Sum(T input, int valid = kThreads) { return Reduce(input, cub::Sum(), valid); }
  template <int Items>
  T Sum(T (&inputs)[Items]) { return Reduce(inputs, cub::Sum()); }

 private:
  TempStorage& storage_;
};

template <typename T, int X, BlockScanAlgorithm = BLOCK_SCAN_RAKING, int Y = 1, int Z = 1>
class BlockScan {
  static constexpr int kThreads = X * Y * Z;

 public:
  using TempStorage = detail::Storage<T, kThreads + 1>;
  BlockScan() : storage_(detail::private_storage<BlockScan>()) {}
  explicit BlockScan(TempStorage& storage) : storage_(storage) {}

  template <typename Operation>
  void InclusiveScan(T input, T& output, Operation operation, T& aggregate) {
    run(input, operation);
    output = storage_.data()[detail::thread()];
    aggregate = storage_.data()[kThreads - 1];
  }
  template <typename Operation>
  void InclusiveScan(T input, T& output, Operation operation) {
    T aggregate;
    InclusiveScan(input, output, operation, aggregate);
  }
  template <typename Operation>
  void ExclusiveScan(T input, T& output, T initial, Operation operation, T& aggregate) {
    run(input, operation);
    const int me = detail::thread();
    output = me == 0 ? initial : operation(initial, storage_.data()[me - 1]);
    aggregate = storage_.data()[kThreads - 1];
  }
  template <typename Operation>
  void ExclusiveScan(T input, T& output, T initial, Operation operation) {
    T aggregate;
    ExclusiveScan(input, output, initial, operation, aggregate);
  }
  void InclusiveSum(T input, T& output) { InclusiveScan(input, output, Sum()); }
  void InclusiveSum(T input, T& output, T& aggregate) { InclusiveScan(input, output, Sum(), aggregate); }
  void ExclusiveSum(T input, T& output) { ExclusiveScan(input, output, T(0), Sum()); }
  void ExclusiveSum(T input, T& output, T& aggregate) {
    ExclusiveScan(input, output, T(0), Sum(), aggregate);
  }
  template <int Items>
  void InclusiveSum(T (&input)[Items], T (&output)[Items]) { scan_items(input, output, true); }
  template <int Items>
  void ExclusiveSum(T (&input)[Items], T (&output)[Items]) { scan_items(input, output, false); }
  template <int Items>
  void ExclusiveSum(T (&input)[Items], T (&output)[Items], T& aggregate) {
    scan_items(input, output, false);
    aggregate = storage_.data()[kThreads - 1];
  }
  // The callback of the first warp returns the prefix that is added to all results.
  template <typename Callback>
  void ExclusiveSum(T input, T& output, Callback& callback) {
    ExclusiveSum(input, output);
    const T aggregate = storage_.data()[kThreads - 1];
    if (detail::thread() < 32) {
      const T prefix = callback(aggregate);
      if (detail::thread() == 0) storage_.data()[kThreads] = prefix;
    }
    __syncthreads();
    output = output + storage_.data()[kThreads];
  }

 private:
  template <typename Operation>
  void run(T input, Operation operation) {
    T* values = storage_.data();
    values[detail::thread()] = input;
    __syncthreads();
    if (detail::thread() == 0) {
      for (int i = 1; i < kThreads; ++i) values[i] = operation(values[i - 1], values[i]);
    }
    __syncthreads();
  }
  template <int Items>
  void scan_items(T (&input)[Items], T (&output)[Items], bool inclusive) {
    T sum = input[0], before;
    for (int i = 1; i < Items; ++i) sum = sum + input[i];
    ExclusiveSum(sum, before);
    for (int i = 0; i < Items; ++i) {
      const T value = input[i];
      output[i] = inclusive ? before + value : before;
      before = before + value;
    }
  }
  TempStorage& storage_;
};

template <typename T, int Threads = 32>
class WarpReduce {
 public:
  struct TempStorage {};
  explicit WarpReduce(TempStorage&) {}

  // Only the first lane of each logical warp returns the result.
  template <typename Operation>
  T Reduce(T input, Operation operation, int valid = Threads) {
    const int lane = LaneId(), first = lane / Threads * Threads;
    const unsigned mask = (Threads == 32 ? ~0u : (1u << Threads) - 1) << first;
    T result = detail::shuffled(input, first, mask);
    for (int i = 1; i < valid; ++i) result = operation(result, detail::shuffled(input, first + i, mask));
    return lane == first ? result : input;
  }
  T Sum(T input, int valid = Threads) { return Reduce(input, cub::Sum(), valid); }
};

template <typename T, int Threads = 32>
class WarpScan {
 public:
  struct TempStorage {};
  explicit WarpScan(TempStorage&) {}

  template <typename Operation>
  void InclusiveScan(T input, T& output, Operation operation, T& aggregate) {
    const int lane = LaneId(), first = lane / Threads * Threads;
    const unsigned mask = (Threads == 32 ? ~0u : (1u << Threads) - 1) << first;
    T sum = detail::shuffled(input, first, mask);
    T mine = sum;
    for (int i = 1; i < Threads; ++i) {
      sum = operation(sum, detail::shuffled(input, first + i, mask));
      if (first + i <= lane) mine = sum;
    }
    output = mine;
    aggregate = sum;
  }
  template <typename Operation>
  void InclusiveScan(T input, T& output, Operation operation) {
    T aggregate;
    InclusiveScan(input, output, operation, aggregate);
  }
  void InclusiveSum(T input, T& output) { InclusiveScan(input, output, Sum()); }
  void InclusiveSum(T input, T& output, T& aggregate) { InclusiveScan(input, output, Sum(), aggregate); }
  void ExclusiveSum(T input, T& output) {
    T inclusive;
    InclusiveSum(input, inclusive);
    output = inclusive - input;
  }
  void ExclusiveSum(T input, T& output, T& aggregate) {
    T inclusive;
    InclusiveSum(input, inclusive, aggregate);
    output = inclusive - input;
  }
};

// The index of a thread's item i. Blocked: thread t has items t * Items .. t * Items + Items - 1.
// Striped: items t, t + Threads, ...
namespace detail {
template <int Threads, int Items>
inline int item(bool striped, int i) {
  return striped ? i * Threads + thread() : thread() * Items + i;
}
}  // namespace detail

template <typename T, int X, int Items, BlockLoadAlgorithm Algorithm = BLOCK_LOAD_DIRECT, int Y = 1, int Z = 1>
class BlockLoad {
  static constexpr bool kStriped = Algorithm == BLOCK_LOAD_STRIPED;

 public:
  struct TempStorage {};
  BlockLoad() = default;
  explicit BlockLoad(TempStorage&) {}
  template <typename Iterator>
  void Load(Iterator from, T (&items)[Items]) {
    for (int i = 0; i < Items; ++i) items[i] = from[detail::item<X * Y * Z, Items>(kStriped, i)];
  }
  template <typename Iterator>
  void Load(Iterator from, T (&items)[Items], int valid) {
    for (int i = 0; i < Items; ++i) {
      const int at = detail::item<X * Y * Z, Items>(kStriped, i);
      if (at < valid) items[i] = from[at];
    }
  }
  template <typename Iterator>
  void Load(Iterator from, T (&items)[Items], int valid, T otherwise) {
    for (T& each : items) each = otherwise;
    Load(from, items, valid);
  }
};

template <typename T, int X, int Items, BlockStoreAlgorithm Algorithm = BLOCK_STORE_DIRECT, int Y = 1, int Z = 1>
class BlockStore {
  static constexpr bool kStriped = Algorithm == BLOCK_STORE_STRIPED;

 public:
  struct TempStorage {};
  BlockStore() = default;
  explicit BlockStore(TempStorage&) {}
  template <typename Iterator>
  void Store(Iterator to, T (&items)[Items], int valid = X * Y * Z * Items) {
    for (int i = 0; i < Items; ++i) {
      const int at = detail::item<X * Y * Z, Items>(kStriped, i);
      if (at < valid) to[at] = items[i];
    }
  }
};

template <typename T, int X, int Items, bool = false, int Y = 1, int Z = 1>
class BlockExchange {
 public:
  using TempStorage = detail::Storage<T, X * Y * Z * Items>;
  explicit BlockExchange(TempStorage& storage) : storage_(storage) {}
  void StripedToBlocked(T (&items)[Items]) { move(items, items, true); }
  void BlockedToStriped(T (&items)[Items]) { move(items, items, false); }
  void StripedToBlocked(const T (&from)[Items], T (&to)[Items]) { move(from, to, true); }
  void BlockedToStriped(const T (&from)[Items], T (&to)[Items]) { move(from, to, false); }

 private:
  void move(const T (&from)[Items], T (&to)[Items], bool striped) {
    for (int i = 0; i < Items; ++i) storage_.data()[detail::item<X * Y * Z, Items>(striped, i)] = from[i];
    __syncthreads();
    for (int i = 0; i < Items; ++i) to[i] = storage_.data()[detail::item<X * Y * Z, Items>(!striped, i)];
  }
  TempStorage& storage_;
};

template <typename K, int X, int Items, typename V = void, int = 4, bool = true, BlockScanAlgorithm = BLOCK_SCAN_RAKING>
class BlockRadixSort {
  static constexpr bool kPairs = !::std::is_void_v<V>;
  using Value = ::std::conditional_t<kPairs, V, char>;
  static constexpr int kCount = X * Items;

 public:
  struct TempStorage {
    detail::Storage<K, kCount> keys;
    detail::Storage<Value, kCount> values;
    int order[kCount];
  };
  explicit BlockRadixSort(TempStorage& storage) : storage_(storage) {}
  void Sort(K (&keys)[Items]) { sort(keys, nullptr, false, false); }
  void SortDescending(K (&keys)[Items]) { sort(keys, nullptr, true, false); }
  void SortBlockedToStriped(K (&keys)[Items]) { sort(keys, nullptr, false, true); }
  template <typename W>
  void Sort(K (&keys)[Items], W (&values)[Items]) { sort(keys, values, false, false); }
  template <typename W>
  void SortDescending(K (&keys)[Items], W (&values)[Items]) { sort(keys, values, true, false); }

 private:
  void sort(K (&keys)[Items], Value* values, bool descending, bool striped) {
    K* all = storage_.keys.data();
    for (int i = 0; i < Items; ++i) {
      const int at = detail::item<X, Items>(false, i);
      all[at] = keys[i];
      if (values != nullptr) storage_.values.data()[at] = values[i];
      storage_.order[at] = at;
    }
    __syncthreads();
    if (detail::thread() == 0) {
      // Stable, in place: equal keys keep their order.
      ::std::sort(storage_.order, storage_.order + kCount, [&](int a, int b) {
        if (descending ? all[b] < all[a] : all[a] < all[b]) return true;
        return !(descending ? all[a] < all[b] : all[b] < all[a]) && a < b;
      });
    }
    __syncthreads();
    for (int i = 0; i < Items; ++i) {
      const int from = storage_.order[detail::item<X, Items>(striped, i)];
      keys[i] = all[from];
      if (values != nullptr) values[i] = storage_.values.data()[from];
    }
  }
  TempStorage& storage_;
};

template <typename T, int X, int Items, int Bins>
class BlockHistogram {
 public:
  struct TempStorage {};
  explicit BlockHistogram(TempStorage&) {}
  template <typename Counter>
  void InitHistogram(Counter (&histogram)[Bins]) {
    for (int i = detail::thread(); i < Bins; i += X) histogram[i] = 0;
  }
  template <typename Counter>
  void Composite(T (&items)[Items], Counter (&histogram)[Bins]) {
    for (const T& item : items) atomicAdd(&histogram[static_cast<int>(item)], Counter(1));
  }
  template <typename Counter>
  void Histogram(T (&items)[Items], Counter (&histogram)[Bins]) {
    InitHistogram(histogram);
    __syncthreads();
    Composite(items, histogram);
  }
};

template <int Threads, typename T, int Items, typename Iterator>
inline void LoadDirectStriped(int thread, Iterator from, T (&items)[Items]) {
  for (int i = 0; i < Items; ++i) items[i] = from[thread + i * Threads];
}
template <int Threads, typename T, int Items, typename Iterator>
inline void StoreDirectStriped(int thread, Iterator to, T (&items)[Items]) {
  for (int i = 0; i < Items; ++i) to[thread + i * Threads] = items[i];
}
template <typename T>
inline T ThreadLoad(const T* from) { return *from; }

}  // namespace cub
