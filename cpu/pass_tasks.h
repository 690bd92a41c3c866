// What the passes have in common: where a task lies in memory, and how the
// ragged end of a group fits kernels that take whole vectors.

#ifndef JAX_BNAR_CPU_PASS_TASKS_H_
#define JAX_BNAR_CPU_PASS_TASKS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/cache.h"
#include "cpu/passes.h"

namespace jax_bnar::cpu {

inline const char* Offset(const void* p, int64_t bytes) {
  return p == nullptr ? nullptr : static_cast<const char*>(p) + bytes;
}

inline char* Offset(void* p, int64_t bytes) {
  return p == nullptr ? nullptr : static_cast<char*>(p) + bytes;
}

// Where a task's elements lie: `element` counts from the array's first one,
// `bit` from the group's, `column` from the group's first column.
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

// Sixteen elements of scratch that stand for fewer, at the end of an array:
// kernels take whole vectors.
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

 private:
  size_t bytes_;
  alignas(64) char data_[kLanes * sizeof(double)];
};

// The tail of a group is one row shorter than the others: whole vectors in
// place, then one padded vector. Calls whole(tile) and padded(count, column).
template <typename Whole, typename PaddedCall>
void RunTail(const Plan& plan, Whole whole, PaddedCall padded) {
  const int64_t vectors = plan.tail / kLanes * kLanes;
  const int64_t rest = plan.tail - vectors;
  if (vectors > 0) whole(RowsTile{1, vectors, plan.columns});
  if (rest > 0) padded(rest, vectors);
}

constexpr RowsTile kOneVector{1, kLanes, kLanes};

// Element of the group at which row r of the plan's matrix begins.
inline int64_t RowStart(const Plan& plan, int64_t row) {
  return row * plan.columns;
}

// One task of a reduction: a chunk of rows by a slab of columns.
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
  t.is_tail = in_group == plan.num_chunks * plan.num_slabs;
  if (t.is_tail) {
    t.partial = plan.num_chunks;
    return t;
  }
  t.partial = in_group / plan.num_slabs;
  t.rows = plan.ChunkRows(t.partial);
  t.columns = plan.SlabColumns(in_group % plan.num_slabs);
  return t;
}

// Output may bypass the caches where it will not be found there again, and
// where every vector is aligned.
inline bool MayStream(const Context& context, const void* output) {
  const Shape& shape = context.plan.shape;
  const int64_t vector_bytes = kLanes * context.item_size;
  const bool aligned =
      reinterpret_cast<uintptr_t>(output) % vector_bytes == 0 &&
      (shape.groups == 1 || shape.group_size() % kLanes == 0) &&
      (context.plan.layout == Plan::Layout::kChannelsLast ||
       shape.inner % kLanes == 0);
  return aligned && !context.fits_cache;
}

// Calls on_plane(channel, element of the group) for each plane of a block.
template <typename OnPlane>
void ForEachPlane(const Plan& plan, const Range& planes, OnPlane on_plane) {
  for (int64_t p = planes.begin; p < planes.end; ++p) {
    on_plane(p % plan.shape.channels, p * plan.shape.inner);
  }
}

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_PASS_TASKS_H_
