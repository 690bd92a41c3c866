// Maps channels to the columns of a plan. A channel owns `rows_joined * S`
// columns if channels are last, and one column if they are first.

#ifndef JAX_BNAR_CPU_COLUMNS_H_
#define JAX_BNAR_CPU_COLUMNS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/buffer.h"
#include "cpu/executor.h"
#include "cpu/plan.h"
#include "native/numerics.h"

namespace jax_bnar::cpu {

// The number of channels in a task that works on vectors only.
constexpr int64_t kChannelBlock = 256;

// The columns of one channel: `count` runs of `length` columns, whose starts
// are `stride` apart.
struct ColumnRuns {
  int64_t count;
  int64_t length;
  int64_t stride;

  explicit ColumnRuns(const Plan& plan)
      : count(plan.rows_joined),
        length(plan.layout == Plan::Layout::kChannelsLast ? plan.shape.inner
                                                          : 1),
        stride(plan.shape.channels * length) {}
};

// One value for each group and column.
template <typename A>
class ColumnVector {
 public:
  explicit ColumnVector(const Plan& plan)
      : runs_(plan),
        columns_(plan.columns),
        values_(plan.shape.groups * plan.columns) {}

  void Set(int64_t group, int64_t channel, A value) {
    // Every NaN becomes the quiet one, because rounding to bfloat16 could turn
    // a NaN with another payload into a number (see Round in
    // cpu/isa/convert.h).
    if (std::isnan(value)) value = std::numeric_limits<A>::quiet_NaN();
    for (int64_t r = 0; r < runs_.count; ++r) {
      A* run = values_.data() + group * columns_ + r * runs_.stride +
               channel * runs_.length;
      std::fill(run, run + runs_.length, value);
    }
  }

  A Get(int64_t group, int64_t channel) const {
    return values_.data()[group * columns_ + channel * runs_.length];
  }

  const char* data() const {
    return reinterpret_cast<const char*>(values_.data());
  }

 private:
  ColumnRuns runs_;
  int64_t columns_;
  Buffer<A> values_;
};

// A phase with one task, f(group, channels), for each block of channels of each
// group.
template <typename F>
Phase ForEachChannelBlock(const Shape& shape, F f) {
  const int64_t channels = shape.channels;
  const int64_t blocks = (channels + kChannelBlock - 1) / kChannelBlock;
  return {shape.groups * blocks,
          [f, blocks, channels](int64_t task) {
            const int64_t begin = task % blocks * kChannelBlock;
            f(task / blocks,
              Range{begin, std::min(channels, begin + kChannelBlock)});
          },
          /*last_first=*/false};
}

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_COLUMNS_H_
