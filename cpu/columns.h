// Maps channels to the columns of a plan. A channel owns `rows_joined * S`
// columns if channels are last, and one column if they are first.

#ifndef JAX_BNAR_CPU_COLUMNS_H_
#define JAX_BNAR_CPU_COLUMNS_H_

#include <algorithm>
#include <array>
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

// One value for each channel of a block, in their order.
template <typename A>
using BlockOf = std::array<A, kChannelBlock>;

// A block of a (G, C) or (1, C) operand, or `otherwise` if that is absent.
template <typename A>
BlockOf<A> ReadBlock(const VectorOperand& operand, int64_t channels,
                     int64_t group, const Range& block, A otherwise) {
  BlockOf<A> values;
  for (int64_t i = 0; i < block.size(); ++i) {
    values[i] =
        ElementOr<A>(operand, channels, group, block.begin + i, otherwise);
  }
  return values;
}

// Rounds `count` values to elements of an array, from `first` on.
template <typename A>
void StoreBlock(const BlockOf<double>& values, int64_t count, void* array,
                int64_t first) {
  std::transform(values.begin(), values.begin() + count,
                 static_cast<A*>(array) + first,
                 [](double value) { return static_cast<A>(value); });
}

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

  bool is_one_column() const { return count == 1 && length == 1; }
};

// One value for each group and column.
template <typename A>
class ColumnVector {
 public:
  explicit ColumnVector(const Plan& plan)
      : runs_(plan),
        columns_(plan.columns),
        values_(plan.shape.groups * plan.columns) {}

  // Sets the columns of a block of channels.
  void SetBlock(int64_t group, const Range& block, const BlockOf<A>& values) {
    const int64_t length = runs_.length;
    A* first = values_.data() + group * columns_ + block.begin * length;
    if (length == 1) {
      std::transform(values.begin(), values.begin() + block.size(), first,
                     WithQuietNan);
    } else {
      for (int64_t i = 0; i < block.size(); ++i) {
        std::fill_n(first + i * length, length, WithQuietNan(values[i]));
      }
    }
    for (int64_t r = 1; r < runs_.count; ++r) {
      std::copy_n(first, block.size() * length, first + r * runs_.stride);
    }
  }

  A Get(int64_t group, int64_t channel) const {
    return values_.data()[group * columns_ + channel * runs_.length];
  }

  const char* data() const {
    return reinterpret_cast<const char*>(values_.data());
  }

 private:
  // Every NaN becomes the quiet one, because rounding to bfloat16 could turn a
  // NaN with another payload into a number (see Round in cpu/isa/convert.h).
  static A WithQuietNan(A value) {
    return std::isnan(value) ? std::numeric_limits<A>::quiet_NaN() : value;
  }

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
