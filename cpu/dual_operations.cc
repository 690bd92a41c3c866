// The operations of y = relu(batch_norm(x1) + batch_norm(x2)).

#include <cassert>
#include <utility>

#include "cpu/channel_phases.h"
#include "cpu/columns.h"
#include "cpu/merge.h"
#include "cpu/operations.h"
#include "cpu/passes.h"
#include "native/numerics.h"

namespace jax_bnar::cpu {
namespace {

// A step has as many arrays as one with a residual: x1, x2, y, dy, dx1, dx2.
constexpr bool kLikeResidual = true;

// Interleaves two phases of equal length, so that they leave the end of x1 and
// the end of x2 in the cache.
Phase InTurn(Phase first, Phase second) {
  assert(first.num_tasks == second.num_tasks);
  const int64_t tasks = first.num_tasks + second.num_tasks;
  return {tasks,
          [first = std::move(first), second = std::move(second)](int64_t i) {
            (i % 2 == 0 ? first : second).run(i / 2);
          },
          /*last_first=*/false};
}

// The vectors that the normalisation and the gate of backward share. The two
// biases are combined into one vector, their sum.
template <typename A>
struct DualNormaliseVectors {
  explicit DualNormaliseVectors(const Plan& plan)
      : mean{ColumnVector<A>(plan), ColumnVector<A>(plan)},
        a{ColumnVector<A>(plan), ColumnVector<A>(plan)},
        bias(plan) {}

  // Sets the vectors of one input and, if it is the first, the bias too.
  void Set(const Both<AffineOperands>& affine, int64_t channels, int input,
           int64_t group, int64_t channel, A channel_mean, A channel_var) {
    const AffineOperands& own = affine[input];
    const A scale = ElementOr<A>(own.scale, channels, group, channel, 1);
    mean[input].Set(group, channel, channel_mean);
    a[input].Set(group, channel, Multiplier(scale, channel_var, own.epsilon));
    if (input == 0) {
      SetBias(affine[0].bias, affine[1].bias, channels, group, channel);
    }
  }

  void SetBias(const VectorOperand& first, const VectorOperand& second,
               int64_t channels, int64_t group, int64_t channel) {
    bias.Set(group, channel,
             ElementOr<A>(first, channels, group, channel, 0) +
                 ElementOr<A>(second, channels, group, channel, 0));
  }

  DualNormaliseColumns columns() const {
    return {{mean[0].data(), mean[1].data()},
            {a[0].data(), a[1].data()},
            bias.data()};
  }

  Both<ColumnVector<A>> mean;
  Both<ColumnVector<A>> a;
  ColumnVector<A> bias;
};

// The vectors of the last pass of backward.
template <typename A>
struct DualApplyVectors : DualNormaliseVectors<A> {
  explicit DualApplyVectors(const Plan& plan)
      : DualNormaliseVectors<A>(plan),
        b{ColumnVector<A>(plan), ColumnVector<A>(plan)},
        k{ColumnVector<A>(plan), ColumnVector<A>(plan)} {}

  DualApplyColumns apply_columns() const {
    const DualNormaliseColumns shared = this->columns();
    return {shared.mean,
            shared.a,
            {b[0].data(), b[1].data()},
            {k[0].data(), k[1].data()},
            shared.bias};
  }

  Both<ColumnVector<A>> b;
  Both<ColumnVector<A>> k;
};

// Fills the vectors from given statistics. `vectors` must outlive the phase.
template <typename A>
Phase PrepareVectors(const Shape& shape, const Both<AffineOperands>& affine,
                     const Both<VectorOperand>& mean,
                     const Both<VectorOperand>& var,
                     DualNormaliseVectors<A>* vectors) {
  const int64_t channels = shape.channels;
  return ForEachChannelBlock(shape, [=](int64_t group, const Range& block) {
    for (int input = 0; input < 2; ++input) {
      for (int64_t c = block.begin; c < block.end; ++c) {
        vectors->Set(affine, channels, input, group, c,
                     ElementOr<A>(mean[input], channels, group, c, 0),
                     ElementOr<A>(var[input], channels, group, c, 0));
      }
    }
  });
}

// The same for the operands of a half of backward.
template <typename Operands, typename A>
Phase PrepareVectors(const Shape& shape, const Both<Operands>& operands,
                     DualNormaliseVectors<A>* vectors) {
  return PrepareVectors(shape, {operands[0].affine, operands[1].affine},
                        {operands[0].mean, operands[1].mean},
                        {operands[0].var, operands[1].var}, vectors);
}

}  // namespace

void DualNormalise(ThreadPool& pool, const Problem& problem,
                   const DualNormaliseBuffers& buffers,
                   const Both<AffineOperands>& affine,
                   const Both<VectorOperand>& mean,
                   const Both<VectorOperand>& var) {
  const Context context(problem, kLikeResidual);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    DualNormaliseVectors<A> vectors(context.plan);
    RunPhases(pool, context,
              {PrepareVectors(problem.shape, affine, mean, var, &vectors),
               DualNormalisePass(context, buffers, vectors.columns())});
  });
}

void DualForward(ThreadPool& pool, const Problem& problem,
                 const DualNormaliseBuffers& buffers,
                 const Both<AffineOperands>& affine, const Both<void*>& mean,
                 const Both<void*>& var) {
  const Context context(problem, kLikeResidual);
  const Plan& plan = context.plan;
  Both<Partials> partials = {Partials(plan), Partials(plan)};
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    DualNormaliseVectors<A> vectors(plan);
    const int64_t channels = problem.shape.channels;
    Both<ColumnVector<A>> origins = {ColumnVector<A>(plan),
                                     ColumnVector<A>(plan)};
    const auto find = [&](int input) {
      return FindOrigins(context, buffers.x[input], &origins[input]);
    };
    const auto sum = [&](int input) {
      return StatisticsPass(context, buffers.x[input], origins[input].data(),
                            &partials[input]);
    };
    const auto finish = [&](int input) {
      return FinishStatistics<A>(
          plan, &origins[input], &partials[input], mean[input], var[input],
          [&, channels, input](int64_t group, int64_t c, A m, A v) {
            vectors.Set(affine, channels, input, group, c, m, v);
          });
    };
    RunPhases(pool, context,
              {InTurn(find(0), find(1)), InTurn(sum(0), sum(1)),
               InTurn(finish(0), finish(1)),
               DualNormalisePass(context, buffers, vectors.columns())});
  });
}

void DualBackwardReduce(ThreadPool& pool, const Problem& problem,
                        const DualGradientBuffers& buffers,
                        const Both<ReduceOperands>& operands, void* sum_e,
                        const Both<void*>& sum_e_centred) {
  const Context context(problem, kLikeResidual);
  Partials partials(context.plan, 3);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    DualNormaliseVectors<A> vectors(context.plan);
    const Phase finish = ForEachChannelBlock(
        problem.shape, [&](int64_t group, const Range& block) {
          MergeSumsOfChannels<3>(
              context.plan, &partials, group, block,
              [&](int64_t c, const double* sums) {
                const int64_t i = group * problem.shape.channels + c;
                static_cast<A*>(sum_e)[i] = static_cast<A>(sums[0]);
                for (int input = 0; input < 2; ++input) {
                  static_cast<A*>(sum_e_centred[input])[i] =
                      static_cast<A>(sums[1 + input]);
                }
              });
        });
    RunPhases(pool, context,
              {PrepareVectors(problem.shape, operands, &vectors),
               DualReducePass(context, buffers, vectors.columns(), &partials),
               finish});
  });
}

void DualBackwardApply(ThreadPool& pool, const Problem& problem,
                       const DualGradientBuffers& buffers,
                       const Both<ApplyOperands>& operands,
                       const Both<void*>& dx) {
  const Context context(problem, kLikeResidual);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    DualApplyVectors<A> vectors(context.plan);
    RunPhases(pool, context,
              {Joined(PrepareVectors(problem.shape, operands, &vectors),
                      SpreadPhase<A>(problem.shape,
                                     {{operands[0].b, &vectors.b[0]},
                                      {operands[1].b, &vectors.b[1]},
                                      {operands[0].k, &vectors.k[0]},
                                      {operands[1].k, &vectors.k[1]}})),
               DualApplyPass(context, buffers, vectors.apply_columns(), dx)});
  });
}

void DualBackward(ThreadPool& pool, const Problem& problem,
                  const DualGradientBuffers& buffers,
                  const Both<BackwardOperands>& operands, const Both<void*>& dx,
                  const Both<void*>& dscale, void* dbias) {
  const Context context(problem, kLikeResidual);
  Partials partials(context.plan, 3);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    const Plan& plan = context.plan;
    const int64_t channels = problem.shape.channels;
    const double count = static_cast<double>(problem.shape.count());
    DualApplyVectors<A> vectors(plan);
    const auto affine = [&](int input) {
      const BackwardOperands& own = operands[input];
      return AffineOperands{own.scale, own.bias, own.epsilon};
    };
    const Phase coefficients = ForEachChannelBlock(
        problem.shape, [&](int64_t group, const Range& block) {
          MergeSumsOfChannels<3>(
              plan, &partials, group, block,
              [&](int64_t c, const double* sums) {
                const int64_t i = group * channels + c;
                static_cast<A*>(dbias)[i] = static_cast<A>(sums[0]);
                for (int input = 0; input < 2; ++input) {
                  const BackwardOperands& own = operands[input];
                  const auto at = [&](const VectorOperand& v, A otherwise) {
                    return ElementOr<A>(v, channels, group, c, otherwise);
                  };
                  const auto channel = BackwardChannelOf<A>(
                      at(own.var, 0), at(own.scale, 1), at(own.dmean, 0),
                      at(own.dvar, 0), own.epsilon, sums[0], sums[1 + input],
                      count);
                  static_cast<A*>(dscale[input])[i] = channel.dscale;
                  vectors.b[input].Set(group, c, channel.b);
                  vectors.k[input].Set(group, c, channel.k);
                }
              });
        });
    RunPhases(pool, context,
              {PrepareVectors(problem.shape, {affine(0), affine(1)},
                              {operands[0].mean, operands[1].mean},
                              {operands[0].var, operands[1].var}, &vectors),
               DualReducePass(context, buffers, vectors.columns(), &partials),
               coefficients,
               DualApplyPass(context, buffers, vectors.apply_columns(), dx)});
  });
}

}  // namespace jax_bnar::cpu
