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
#include "cpu/half.h"
#include "cpu/merge.h"
#include "cpu/passes.h"
#include "cpu/samples.h"
#include "native/numerics.h"

namespace jax_bnar::cpu {

inline double ElementAsDouble(DType dtype, const void* array, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return HalfToFloat(static_cast<const uint16_t*>(array)[index]);
    case DType::kBFloat16:
      return BitsToFloat(
          static_cast<uint32_t>(static_cast<const uint16_t*>(array)[index])
          << 16);
    case DType::kFloat32:
      return static_cast<const float*>(array)[index];
    default:
      return static_cast<const double*>(array)[index];
  }
}

// Calls f(A()), where A is the accumulation type of x.
template <typename F>
void WithAccumulator(DType dtype, F f) {
  dtype == DType::kFloat64 ? f(double()) : f(float());
}

inline void RunPhases(ThreadPool& pool, const Context& context,
                      std::vector<Phase> phases) {
  Run(pool, ThreadsFor(context.array_bytes), std::move(phases));
}

// A vector of columns for each input.
template <typename A, int N>
PerInput<ColumnVector<A>, N> NewColumnVectors(const Plan& plan) {
  return PerInputOf<N>([&](int) { return ColumnVector<A>(plan); });
}

template <typename A, int N>
PerInput<const void*, N> DataOf(const PerInput<ColumnVector<A>, N>& vectors) {
  return PerInputOf<N>(
      [&](int input) -> const void* { return vectors[input].data(); });
}

// The vectors that the normalisation and the gate of backward share. The biases
// of all inputs are combined into one vector, their sum.
template <typename A, int N>
struct NormaliseVectors {
  explicit NormaliseVectors(const Plan& plan)
      : mean(NewColumnVectors<A, N>(plan)),
        a(NewColumnVectors<A, N>(plan)),
        bias(plan) {}

  // Sets a block of the vectors of one input and, if it is the first, of the
  // bias too.
  void SetBlock(const PerInput<AffineOperands, N>& affine, int64_t channels,
                int input, int64_t group, const Range& block,
                const BlockOf<A>& means, const BlockOf<A>& vars) {
    const double epsilon = affine[input].epsilon;
    const auto read = [&](const VectorOperand& operand, A otherwise) {
      return ReadBlock(operand, channels, group, block, otherwise);
    };
    BlockOf<A> scaled = read(affine[input].scale, 1);
    for (int64_t i = 0; i < block.size(); ++i) {
      scaled[i] = Multiplier(scaled[i], vars[i], epsilon);
    }
    mean[input].SetBlock(group, block, means);
    a[input].SetBlock(group, block, scaled);
    if (input > 0) return;
    BlockOf<A> sum = read(affine[0].bias, 0);
    for (int other = 1; other < N; ++other) {
      const BlockOf<A> more = read(affine[other].bias, 0);
      for (int64_t i = 0; i < block.size(); ++i) sum[i] += more[i];
    }
    bias.SetBlock(group, block, sum);
  }

  NormaliseColumns<N> columns() const {
    return {DataOf<A, N>(mean), DataOf<A, N>(a), bias.data()};
  }

  PerInput<ColumnVector<A>, N> mean;
  PerInput<ColumnVector<A>, N> a;
  ColumnVector<A> bias;
};

// The vectors of the last pass of backward.
template <typename A, int N>
struct ApplyVectors : NormaliseVectors<A, N> {
  explicit ApplyVectors(const Plan& plan)
      : NormaliseVectors<A, N>(plan),
        b(NewColumnVectors<A, N>(plan)),
        k(NewColumnVectors<A, N>(plan)) {}

  ApplyColumns<N> apply_columns() const {
    const NormaliseColumns<N> shared = this->columns();
    return {shared.mean, shared.a, DataOf<A, N>(b), DataOf<A, N>(k),
            shared.bias};
  }

  PerInput<ColumnVector<A>, N> b;
  PerInput<ColumnVector<A>, N> k;
};

// Fills the vectors from given statistics. `vectors` must outlive the phase.
template <typename A, int N>
Phase PrepareVectors(const Shape& shape,
                     const PerInput<AffineOperands, N>& affine,
                     const PerInput<VectorOperand, N>& mean,
                     const PerInput<VectorOperand, N>& var,
                     NormaliseVectors<A, N>* vectors) {
  const int64_t channels = shape.channels;
  return ForEachChannelBlock(shape, [=](int64_t group, const Range& block) {
    for (int input = 0; input < N; ++input) {
      vectors->SetBlock(affine, channels, input, group, block,
                        ReadBlock<A>(mean[input], channels, group, block, 0),
                        ReadBlock<A>(var[input], channels, group, block, 0));
    }
  });
}

// The same for the operands of backward, whose affine operands are
// affine(operands of an input).
template <typename A, int N, typename Operands, typename F>
Phase PrepareVectors(const Shape& shape, const PerInput<Operands, N>& operands,
                     F affine, NormaliseVectors<A, N>* vectors) {
  return PrepareVectors<A, N>(
      shape, PerInputOf<N>([&](int i) { return affine(operands[i]); }),
      PerInputOf<N>([&](int i) { return operands[i].mean; }),
      PerInputOf<N>([&](int i) { return operands[i].var; }), vectors);
}

// Copies each operand to its columns, which must outlive the phase.
template <typename A>
Phase SpreadPhase(const Shape& shape,
                  std::vector<std::pair<VectorOperand, ColumnVector<A>*>> all) {
  const int64_t channels = shape.channels;
  return ForEachChannelBlock(
      shape, [all, channels](int64_t group, const Range& block) {
        for (const auto& [operand, columns] : all) {
          columns->SetBlock(group, block,
                            ReadBlock<A>(operand, channels, group, block, 0));
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

// Interleaves phases of equal length, one of each input, so that they leave the
// end of every x in the cache.
template <int N>
Phase InTurn(const PerInput<Phase, N>& phases) {
  for (const Phase& phase : phases) {
    assert(phase.num_tasks == phases[0].num_tasks);
    (void)phase;
  }
  return {N * phases[0].num_tasks,
          [phases](int64_t i) { phases[i % N].run(i / N); },
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
        const Shape& shape = context.plan.shape;
        const int64_t first = group * shape.group_size();
        BlockOf<A> found;
        for (int64_t c = block.begin; c < block.end; ++c) {
          const double origin =
              std::is_same_v<A, double>
                  ? SampledOrigin(context, x, group, c)
                  : ElementAsDouble(context.dtype, x, first + c * shape.inner);
          found[c - block.begin] =
              static_cast<A>(std::isfinite(origin) ? origin : 0.0);
        }
        origins->SetBlock(group, block, found);
      });
}

// Stores mean and var of a block of channels and then calls
// on_block(group, block, means, vars).
template <typename A, typename F>
Phase FinishStatistics(const Plan& plan, const ColumnVector<A>* origins,
                       Partials* partials, void* mean, void* var, F on_block) {
  return ForEachChannelBlock(
      plan.shape, [=, &plan](int64_t group, const Range& block) {
        const double count = static_cast<double>(plan.shape.count());
        BlockSums<2> merged;
        MergeStatisticsOfChannels(plan, partials, group, block, &merged);
        BlockOf<A> means, vars;
        for (int64_t i = 0; i < block.size(); ++i) {
          means[i] =
              MeanOf(origins->Get(group, block.begin + i), merged[0][i], count);
          vars[i] = VarianceOf<A>(merged[1][i], count);
        }
        const int64_t first = group * plan.shape.channels + block.begin;
        std::copy_n(means.begin(), block.size(), static_cast<A*>(mean) + first);
        std::copy_n(vars.begin(), block.size(), static_cast<A*>(var) + first);
        on_block(group, block, means, vars);
      });
}

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_CHANNEL_PHASES_H_
