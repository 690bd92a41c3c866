// The phases before and between the passes, which work on vectors of channels.
// They choose the origins that sums are taken around, turn the sums into
// results, and compute the constants of the next pass.

#ifndef JAX_BNAR_CPU_CHANNEL_PHASES_H_
#define JAX_BNAR_CPU_CHANNEL_PHASES_H_

#include <cassert>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/cache.h"
#include "cpu/columns.h"
#include "cpu/executor.h"
#include "cpu/merge.h"
#include "cpu/passes.h"
#include "cpu/samples.h"
#include "native/numerics.h"

namespace jax_bnar::cpu {

// Calls f(A()), where A is the accumulation type of x.
template <typename F>
void WithAccumulator(DType dtype, F f) {
  dtype == DType::kFloat64 ? f(double()) : f(float());
}

inline void RunPhases(ThreadPool& pool, const Context& context,
                      std::vector<Phase> phases) {
  Run(pool, context.array_bytes / kBytesPerThread + 1, std::move(phases));
}

template <typename A>
struct NormaliseVectors {
  explicit NormaliseVectors(const Plan& plan)
      : mean(plan), a(plan), bias(plan) {}

  void Set(const AffineOperands& affine, int64_t channels, int64_t group,
           int64_t channel, A channel_mean, A channel_var) {
    const A scale = ElementOr<A>(affine.scale, channels, group, channel, 1);
    mean.Set(group, channel, channel_mean);
    a.Set(group, channel, Multiplier(scale, channel_var, affine.epsilon));
    bias.Set(group, channel,
             ElementOr<A>(affine.bias, channels, group, channel, 0));
  }

  NormaliseColumns columns() const {
    return {mean.data(), a.data(), bias.data()};
  }

  ColumnVector<A> mean;
  ColumnVector<A> a;
  ColumnVector<A> bias;
};

// Fills the vectors from given statistics. `vectors` must outlive the phase.
template <typename A>
Phase PrepareVectors(const Shape& shape, const AffineOperands& affine,
                     const VectorOperand& mean, const VectorOperand& var,
                     NormaliseVectors<A>* vectors) {
  const int64_t channels = shape.channels;
  return ForEachChannelBlock(shape, [=](int64_t group, const Range& block) {
    for (int64_t c = block.begin; c < block.end; ++c) {
      vectors->Set(affine, channels, group, c,
                   ElementOr<A>(mean, channels, group, c, 0),
                   ElementOr<A>(var, channels, group, c, 0));
    }
  });
}

// Copies each operand to its columns, which must outlive the phase.
template <typename A>
Phase SpreadPhase(const Shape& shape,
                  std::vector<std::pair<VectorOperand, ColumnVector<A>*>> all) {
  const int64_t channels = shape.channels;
  return ForEachChannelBlock(shape, [all, channels](int64_t group,
                                                    const Range& block) {
    for (const auto& [operand, columns] : all) {
      for (int64_t c = block.begin; c < block.end; ++c) {
        columns->Set(group, c, ElementOr<A>(operand, channels, group, c, 0));
      }
    }
  });
}

// One phase for two that have equally many tasks, each of which may run beside
// any task of the other.
inline Phase Joined(Phase first, Phase second) {
  assert(first.num_tasks == second.num_tasks);
  const int64_t tasks = first.num_tasks;
  return {tasks,
          [first = std::move(first), second = std::move(second)](int64_t i) {
            first.run(i);
            second.run(i);
          },
          /*last_first=*/false};
}

// The median of a few elements of a channel, or 0 if it is not finite.
inline double SampledOrigin(const Context& context, const void* x,
                            int64_t group, int64_t channel) {
  const Shape& shape = context.plan.shape;
  double samples[kSamples];
  for (int i = 0; i < kSamples; ++i) {
    const int64_t at = SampleAt(i, shape.count());
    const int64_t row =
        group * shape.rows + at / shape.inner;  // a row is (C, S)
    samples[i] = ElementAsDouble(
        context.dtype, x,
        (row * shape.channels + channel) * shape.inner + at % shape.inner);
  }
  return FiniteMedian(samples);
}

// Picks an element of each channel as the origin that its sums are taken
// around, or 0 instead of an Inf or NaN, because an Inf would make the mean
// NaN. Sums in double of narrower elements have digits to spare, so the first
// element will do. Sums of doubles have none: if the first element were an
// outlier, they would lose the digits of (first - mean) / std, so the origin is
// a median.
template <typename A>
Phase FindOrigins(const Context& context, const void* x,
                  ColumnVector<A>* origins) {
  return ForEachChannelBlock(
      context.plan.shape, [=, &context](int64_t group, const Range& block) {
        for (int64_t c = block.begin; c < block.end; ++c) {
          double origin;
          if constexpr (std::is_same_v<A, double>) {
            origin = SampledOrigin(context, x, group, c);
          } else {
            const Shape& shape = context.plan.shape;
            origin = ElementAsDouble(
                context.dtype, x, group * shape.group_size() + c * shape.inner);
          }
          origins->Set(group, c,
                       static_cast<A>(std::isfinite(origin) ? origin : 0.0));
        }
      });
}

// Stores mean and var of each channel and then calls
// on_channel(group, channel, mean, var).
template <typename A, typename F>
Phase FinishStatistics(const Plan& plan, const ColumnVector<A>* origins,
                       Partials* partials, void* mean, void* var,
                       F on_channel) {
  A* means = static_cast<A*>(mean);
  A* vars = static_cast<A*>(var);
  return ForEachChannelBlock(plan.shape, [=, &plan](int64_t group,
                                                    const Range& block) {
    const double count = static_cast<double>(plan.shape.count());
    MergeStatisticsOfChannels(
        plan, partials, group, block, [&](int64_t c, double sum, double m2) {
          const int64_t i = group * plan.shape.channels + c;
          means[i] = MeanOf(origins->Get(group, c), sum, count);
          vars[i] = VarianceOf<A>(m2, count);
          on_channel(group, c, means[i], vars[i]);
        });
  });
}

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_CHANNEL_PHASES_H_
