// What the passes have in common: where a task lies in memory, and how kernels
// that take whole vectors handle the ragged end of a group.

#ifndef JAX_BNAR_CPU_PASS_TASKS_H_
#define JAX_BNAR_CPU_PASS_TASKS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/cache.h"
#include "cpu/executor.h"
#include "cpu/passes.h"

namespace jax_bnar::cpu {

inline const char* Offset(const void* p, int64_t bytes) {
  return p == nullptr ? nullptr : static_cast<const char*>(p) + bytes;
}

inline char* Offset(void* p, int64_t bytes) {
  return p == nullptr ? nullptr : static_cast<char*>(p) + bytes;
}

// The same for an array, or a vector, of each input.
template <typename Pointer, int N>
PerInput<Pointer, N> Offset(const PerInput<Pointer, N>& all, int64_t bytes) {
  return PerInputOf<N>(
      [&](int input) -> Pointer { return Offset(all[input], bytes); });
}

// Where a task's elements lie: `element` counts from the first element of the
// array, `bit` from the first element of the group, and `column` from the first
// column of the first group.
struct Position {
  int64_t group;
  int64_t element;
  int64_t bit;
  int64_t column;
};

inline Position PositionOf(const Context& context, int64_t group,
                           int64_t in_group, int64_t column) {
  return {group, group * context.plan.shape.group_size() + in_group, in_group,
          group * context.plan.columns + column};
}

// Scratch memory for sixteen elements, which replaces fewer elements at the end
// of an array, because kernels take whole vectors.
class Padded {
 public:
  Padded(int64_t item_size, int64_t count)
      : bytes_(static_cast<size_t>(item_size * count)) {}

  const void* In(const void* source) {
    if (source == nullptr) return nullptr;
    std::memset(data_, 0, sizeof(data_));
    std::memcpy(data_, source, bytes_);
    return data_;
  }
  void* Out() { return data_; }
  void CopyOut(void* target) const { std::memcpy(target, data_, bytes_); }

  // The same for sixteen bits of a mask. Bits from `count` on become 0.
  uint8_t* OutMask() { return reinterpret_cast<uint8_t*>(data_); }
  void CopyOutBits(void* target, int64_t count) const {
    uint16_t bits;
    std::memcpy(&bits, data_, sizeof(bits));
    bits = static_cast<uint16_t>(bits & ((1u << count) - 1u));
    std::memcpy(target, &bits, bytes_);
  }

 private:
  size_t bytes_;
  alignas(64) char data_[kLanes * sizeof(double)];
};

// Scratch memory for the elements of each input.
template <int N>
class PaddedInputs {
 public:
  PaddedInputs(int64_t item_size, int64_t count)
      : all_(PerInputOf<N>([&](int) { return Padded(item_size, count); })) {}

  PerInput<const void*, N> In(const PerInput<const void*, N>& sources) {
    return PerInputOf<N>(
        [&](int input) { return all_[input].In(sources[input]); });
  }
  PerInput<void*, N> Out() {
    return PerInputOf<N>([&](int input) { return all_[input].Out(); });
  }
  void CopyOut(const PerInput<void*, N>& targets) const {
    for (int input = 0; input < N; ++input) {
      all_[input].CopyOut(targets[input]);
    }
  }

 private:
  PerInput<Padded, N> all_;
};

// Processes columns of the tail of a group, a single row that is shorter than
// the others. Calls whole(tile, column) for its whole vectors, which are used
// in place, and padded(count, column) for what remains, which needs a padded
// vector.
template <typename Whole, typename PaddedCall>
void RunTail(const Plan& plan, const Range& columns, Whole whole,
             PaddedCall padded) {
  const int64_t vectors = columns.size() / kLanes * kLanes;
  const int64_t rest = columns.size() - vectors;
  if (vectors > 0) whole(RowsTile{1, vectors, plan.columns}, columns.begin);
  if (rest > 0) padded(rest, columns.begin + vectors);
}

constexpr RowsTile kOneVector{1, kLanes, kLanes};

// The index in the group of the element at which a row of the plan's matrix
// begins.
inline int64_t RowStart(const Plan& plan, int64_t row) {
  return row * plan.columns;
}

// One task of a reduction: a chunk of rows by a slab of columns, or a piece of
// the tail.
struct ReductionTask {
  int64_t group;
  bool is_tail;
  int64_t partial;
  Range rows;
  Range columns;
};

inline ReductionTask ReductionTaskAt(const Plan& plan, int64_t task) {
  const int64_t per_group = plan.reduction_tasks_per_group();
  ReductionTask t{};
  t.group = task / per_group;
  const int64_t in_group = task % per_group;
  const int64_t piece = in_group - plan.num_chunks * plan.num_slabs;
  t.is_tail = piece >= 0;
  if (t.is_tail) {
    t.partial = plan.num_chunks;
    t.columns = plan.TailColumns(piece);
    return t;
  }
  t.partial = in_group / plan.num_slabs;
  t.rows = plan.ChunkRows(t.partial);
  t.columns = plan.SlabColumns(in_group % plan.num_slabs);
  return t;
}

// Output may bypass the caches if it would not be found there again, and if
// every vector of its elements, which have `item_size` bytes, is aligned.
inline bool MayBypassCaches(const Context& context, int64_t item_size,
                            const void* output) {
  const Shape& shape = context.plan.shape;
  const int64_t vector_bytes = kLanes * item_size;
  const bool aligned =
      reinterpret_cast<uintptr_t>(output) % vector_bytes == 0 &&
      (shape.groups == 1 || shape.group_size() % kLanes == 0) &&
      (context.plan.layout == Plan::Layout::kChannelsLast ||
       shape.inner % kLanes == 0);
  return aligned && !context.fits_cache;
}

// The byte of a mask that holds the bit of a position. Each group begins with a
// whole byte.
inline int64_t MaskByteAt(const Context& context, const Position& at) {
  return at.group * context.mask_bytes_per_group() + at.bit / 8;
}

// Points at what was saved for the gate at a position.
inline const void* SavedAt(const Context& context, Gate gate, const void* saved,
                           const Position& at) {
  switch (gate) {
    case Gate::kNone:
    case Gate::kX:
      return nullptr;
    case Gate::kY:
    case Gate::kZ:
      return Offset(saved, at.element * context.out_item_size);
    case Gate::kMask:
      return Offset(saved, MaskByteAt(context, at));
  }
  return nullptr;
}

// Scratch memory for what SavedAt points at.
inline Padded PaddedSaved(const Context& context, Gate gate, int64_t count) {
  return gate == Gate::kMask ? Padded(1, (count + 7) / 8)
                             : Padded(context.out_item_size, count);
}

// The phase of an elementwise pass. `in_group` is the index in the group of the
// first element of a call. The phase calls
//   rows(group, tile, in_group, column, whole)   for whole vectors; if `whole`
//                                                is true, they are all aligned
//                                                if the array is
//   padded(group, count, in_group, column)       for fewer elements than a
//                                                vector
//   planes(group, tile, in_group, channel)       for planes
template <typename OnRows, typename OnPadded, typename OnPlanes>
Phase ElementwisePhase(const Context& context, OnRows rows, OnPadded padded,
                       OnPlanes planes) {
  const Plan& plan = context.plan;
  const int64_t per_group = plan.elementwise_tasks_per_group();
  const auto run = [=, &plan](int64_t index) {
    const int64_t group = index / per_group;
    const int64_t block = index % per_group;
    if (block >= plan.num_blocks) {
      const int64_t start = RowStart(plan, plan.rows);
      RunTail(
          plan, plan.TailColumns(block - plan.num_blocks),
          [&](const RowsTile& tile, int64_t column) {
            rows(group, tile, start + column, column, false);
          },
          [&](int64_t count, int64_t column) {
            padded(group, count, start + column, column);
          });
      return;
    }
    const Range range = plan.Block(block);
    if (plan.layout == Plan::Layout::kChannelsLast) {
      rows(group, RowsTile{range.size(), plan.columns, plan.columns},
           RowStart(plan, range.begin), 0, true);
      return;
    }
    for (int64_t p = range.begin; p < range.end;) {
      const int64_t channel = p % plan.shape.channels;
      const int64_t count =
          std::min(range.end - p, plan.shape.channels - channel);
      const int64_t in_group = p * plan.shape.inner;
      planes(group, PlanesTile{count, plan.shape.inner, in_group % 8}, in_group,
             channel);
      p += count;
    }
  };
  // The last blocks come first, because the reduction before left them in the
  // cache.
  return {plan.shape.groups * per_group, run, /*last_first=*/true};
}

// The number of planes of a call that sums, whose results need memory.
constexpr int64_t kMostPlanes = 64;

// The phase of a reduction. `in_group` is the index in the group of the first
// element of a call. The phase calls
//   rows(task, tile, in_group, column)         for whole vectors
//   padded(task, count, in_group, column)      for fewer elements than a vector
//   planes(task, tile, in_group, n, channel)   for at most kMostPlanes planes
template <typename OnRows, typename OnPadded, typename OnPlanes>
Phase ReductionPhase(const Context& context, OnRows rows, OnPadded padded,
                     OnPlanes planes) {
  const Plan& plan = context.plan;
  const auto run = [=, &plan](int64_t index) {
    const ReductionTask task = ReductionTaskAt(plan, index);
    if (task.is_tail) {
      const int64_t start = RowStart(plan, plan.rows);
      RunTail(
          plan, task.columns,
          [&](const RowsTile& tile, int64_t column) {
            rows(task, tile, start + column, column);
          },
          [&](int64_t count, int64_t column) {
            padded(task, count, start + column, column);
          });
      return;
    }
    if (plan.layout == Plan::Layout::kChannelsLast) {
      const int64_t column = task.columns.begin;
      rows(task, RowsTile{task.rows.size(), task.columns.size(), plan.columns},
           RowStart(plan, task.rows.begin) + column, column);
      return;
    }
    for (int64_t n = task.rows.begin; n < task.rows.end; ++n) {
      for (int64_t c = task.columns.begin; c < task.columns.end;
           c += kMostPlanes) {
        const int64_t in_group =
            (n * plan.shape.channels + c) * plan.shape.inner;
        const int64_t count = std::min(kMostPlanes, task.columns.end - c);
        planes(task, PlanesTile{count, plan.shape.inner, in_group % 8},
               in_group, n, c);
      }
    }
  };
  return {plan.shape.groups * plan.reduction_tasks_per_group(), run,
          /*last_first=*/false};
}

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_PASS_TASKS_H_
