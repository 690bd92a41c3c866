#include "cpu/operations.h"

#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/cache.h"
#include "cpu/columns.h"
#include "cpu/merge.h"
#include "cpu/passes.h"
#include "cpu/samples.h"
#include "native/numerics.h"

namespace jax_bnar::cpu {
namespace {

// f(A()) with the accumulation type of x.
template <typename F>
void WithAccumulator(DType dtype, F f) {
  dtype == DType::kFloat64 ? f(double()) : f(float());
}

void RunPhases(ThreadPool& pool, const Context& context,
               std::vector<Phase> phases) {
  Run(pool, context.array_bytes / kBytesPerThread + 1, std::move(phases));
}

template <typename A>
struct NormaliseVectors {
  explicit NormaliseVectors(const Plan& plan) : mean(plan), a(plan), b(plan) {}

  void Set(const AffineOperands& affine, int64_t channels, int64_t group,
           int64_t channel, A channel_mean, A channel_var) {
    const A scale = ElementOr<A>(affine.scale, channels, group, channel, 1);
    mean.Set(group, channel, channel_mean);
    a.Set(group, channel, Multiplier(scale, channel_var, affine.epsilon));
    b.Set(group, channel,
          ElementOr<A>(affine.bias, channels, group, channel, 0));
  }

  NormaliseColumns columns() const { return {mean.data(), a.data(), b.data()}; }

  ColumnVector<A> mean;
  ColumnVector<A> a;
  ColumnVector<A> b;
};

// Fills the vectors from given statistics. `vectors` must outlive the
// phase.
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

// Copies operands to columns.
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

// The middle one of a few elements of a channel, or 0.
double SampledOrigin(const Context& context, const void* x, int64_t group,
                     int64_t channel) {
  const Shape& shape = context.plan.shape;
  double samples[kSamples];
  for (int i = 0; i < kSamples; ++i) {
    const int64_t at = SampleAt(i, shape.count());
    const int64_t row =
        group * shape.rows + at / shape.inner;  // of (C, S) elements
    samples[i] = ElementAsDouble(
        context.dtype, x,
        (row * shape.channels + channel) * shape.inner + at % shape.inner);
  }
  return FiniteMedian(samples);
}

// An element of each channel, around which its sums are taken. Sums in double
// of narrower elements have digits to spare, and the first one will do (an Inf
// would make the mean NaN). Those of doubles have none: where the first one is
// the outlier they would lose the digits of (first - mean) / std.
template <typename A>
Phase FindOrigins(const Context& context, const void* x,
                  ColumnVector<A>* origins) {
  const Shape& shape = context.plan.shape;
  return ForEachChannelBlock(
      shape, [=, &context, &shape](int64_t group, const Range& block) {
        for (int64_t c = block.begin; c < block.end; ++c) {
          double origin;
          if constexpr (std::is_same_v<A, double>) {
            origin = SampledOrigin(context, x, group, c);
          } else {
            origin = ElementAsDouble(
                context.dtype, x, group * shape.group_size() + c * shape.inner);
          }
          origins->Set(group, c,
                       static_cast<A>(std::isfinite(origin) ? origin : 0.0));
        }
      });
}

// on_channel(group, channel, mean, var), after mean and var are stored.
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

// Where the reduction wrote dz, the last pass can read the gated dy there, or
// form it again: the same bits. A dz that went past the caches is in memory,
// while the end of what the reduction read is still in the cache. dy and a mask
// are hardly more than dz; dy and y are, and are worth it where they fit with
// x.
bool ReadsDyAgain(const Context& context, const GradientBuffers& buffers) {
  return !context.fits_cache && (buffers.gate == Gate::kMask ||
                                 3 * context.array_bytes <= kCacheBytes);
}

}  // namespace

void Statistics(ThreadPool& pool, const Problem& problem, const void* x,
                void* mean, void* var) {
  const Context context(problem, /*residual=*/false);
  Partials partials(context.plan);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    ColumnVector<A> origins(context.plan);
    RunPhases(pool, context,
              {FindOrigins(context, x, &origins),
               StatisticsPass(context, x, origins.data(), &partials),
               FinishStatistics<A>(context.plan, &origins, &partials, mean, var,
                                   [](int64_t, int64_t, A, A) {})});
  });
}

void Normalise(ThreadPool& pool, const Problem& problem,
               const NormaliseBuffers& buffers, const AffineOperands& affine,
               const VectorOperand& mean, const VectorOperand& var) {
  const Context context(problem, buffers.z != nullptr);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    NormaliseVectors<A> vectors(context.plan);
    RunPhases(pool, context,
              {PrepareVectors(problem.shape, affine, mean, var, &vectors),
               NormalisePass(context, buffers, vectors.columns())});
  });
}

void Forward(ThreadPool& pool, const Problem& problem,
             const NormaliseBuffers& buffers, const AffineOperands& affine,
             void* mean, void* var) {
  const Context context(problem, buffers.z != nullptr);
  Partials partials(context.plan);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    NormaliseVectors<A> vectors(context.plan);
    const int64_t channels = problem.shape.channels;
    ColumnVector<A> origins(context.plan);
    RunPhases(
        pool, context,
        {FindOrigins(context, buffers.x, &origins),
         StatisticsPass(context, buffers.x, origins.data(), &partials),
         FinishStatistics<A>(context.plan, &origins, &partials, mean, var,
                             [&, channels](int64_t group, int64_t c, A m, A v) {
                               vectors.Set(affine, channels, group, c, m, v);
                             }),
         NormalisePass(context, buffers, vectors.columns())});
  });
}

void BackwardReduce(ThreadPool& pool, const Problem& problem,
                    const GradientBuffers& buffers,
                    const ReduceOperands& operands, void* sum_e,
                    void* sum_e_centred, void* dz) {
  const Context context(problem, dz != nullptr);
  Partials partials(context.plan);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    ColumnVector<A> mean(context.plan), a(context.plan), bias(context.plan);
    Phase finish = ForEachChannelBlock(
        problem.shape, [&](int64_t group, const Range& block) {
          MergeSumsOfChannels(
              context.plan, &partials, group, block,
              [&](int64_t c, double first, double second) {
                const int64_t i = group * problem.shape.channels + c;
                static_cast<A*>(sum_e)[i] = static_cast<A>(first);
                static_cast<A*>(sum_e_centred)[i] = static_cast<A>(second);
              });
        });
    RunPhases(pool, context,
              {SpreadPhase<A>(problem.shape, {{operands.mean, &mean},
                                              {operands.a, &a},
                                              {operands.bias, &bias}}),
               ReducePass(context, buffers,
                          {mean.data(), a.data(), bias.data()}, dz, &partials),
               std::move(finish)});
  });
}

void BackwardApply(ThreadPool& pool, const Problem& problem,
                   const GradientBuffers& buffers,
                   const ApplyOperands& operands, void* dx) {
  // Where e is dz there was a residual; so there may have been for gate kNone.
  const Context context(problem, buffers.gate == Gate::kNone);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    ColumnVector<A> mean(context.plan), a(context.plan), b(context.plan),
        k(context.plan), bias(context.plan);
    RunPhases(
        pool, context,
        {SpreadPhase<A>(problem.shape, {{operands.mean, &mean},
                                        {operands.a, &a},
                                        {operands.b, &b},
                                        {operands.k, &k},
                                        {operands.bias, &bias}}),
         ApplyPass(context, buffers,
                   {mean.data(), a.data(), b.data(), k.data(), bias.data()},
                   dx)});
  });
}

void Backward(ThreadPool& pool, const Problem& problem,
              const GradientBuffers& buffers, const BackwardOperands& operands,
              void* dx, void* dscale, void* dbias, void* dz) {
  const Context context(problem, dz != nullptr);
  Partials partials(context.plan);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    const Plan& plan = context.plan;
    const int64_t channels = problem.shape.channels;
    const double count = static_cast<double>(problem.shape.count());
    NormaliseVectors<A> vectors(plan);
    ColumnVector<A> b(plan), k(plan);
    Phase prepare = PrepareVectors(
        problem.shape, {operands.scale, operands.bias, operands.epsilon},
        operands.mean, operands.var, &vectors);
    Phase coefficients = ForEachChannelBlock(
        problem.shape, [&](int64_t group, const Range& block) {
          MergeSumsOfChannels(
              plan, &partials, group, block,
              [&](int64_t c, double sum_e, double sum_e_centred) {
                const auto at = [&](const VectorOperand& v, A otherwise) {
                  return ElementOr<A>(v, channels, group, c, otherwise);
                };
                const auto channel = BackwardChannelOf<A>(
                    at(operands.var, 0), at(operands.scale, 1),
                    at(operands.dmean, 0), at(operands.dvar, 0),
                    operands.epsilon, sum_e, sum_e_centred, count);
                const int64_t i = group * channels + c;
                static_cast<A*>(dscale)[i] = channel.dscale;
                static_cast<A*>(dbias)[i] = channel.dbias;
                b.Set(group, c, channel.b);
                k.Set(group, c, channel.k);
              });
        });
    const GradientBuffers apply_buffers =
        dz == nullptr || ReadsDyAgain(context, buffers)
            ? buffers
            : GradientBuffers{dz, buffers.x, nullptr, Gate::kNone};
    const NormaliseColumns columns = vectors.columns();
    RunPhases(
        pool, context,
        {std::move(prepare),
         ReducePass(context, buffers, {columns.mean, columns.a, columns.b}, dz,
                    &partials),
         std::move(coefficients),
         ApplyPass(context, apply_buffers,
                   {columns.mean, columns.a, b.data(), k.data(), columns.b},
                   dx)});
  });
}

}  // namespace jax_bnar::cpu
