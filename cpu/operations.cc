#include "cpu/operations.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "cpu/cache.h"
#include "cpu/channel_phases.h"
#include "cpu/columns.h"
#include "cpu/merge.h"
#include "cpu/passes.h"
#include "native/numerics.h"

namespace jax_bnar::cpu {
namespace {

// Whether the last pass reads dy and forms the gated dy again, although the
// reduction has written it to dz; the bits are the same. A dz that bypassed the
// caches is in memory, while the end of what the reduction read is still in the
// cache. dy and a mask have hardly more bytes than dz. dy and y have twice as
// many, which is worth it only if they fit in the cache together with every x.
template <int N>
bool ReadsDyAgain(const Context& context, const GradientBuffers<N>& buffers) {
  // The dz of other activations than ReLU is rounded.
  if (buffers.activation.is_curve()) return false;
  return !context.fits_cache &&
         (buffers.gate == Gate::kMask ||
          2 * context.out_array_bytes + N * context.array_bytes <= kCacheBytes);
}

// Whether the reduction leaves e = act'(u) * dy where dx will be, although
// there is no dz, and the last pass reads it from there. That takes less time
// than computing a curve again. Where the derivative is piecewise constant, u
// takes one multiplication and addition of the x that the last pass reads
// anyway, so with one input it is computed again, as in 16 bits, where that
// costs hardly more than to write e. With several inputs e is written for every
// activation but ReLU; in 16 bits it is rounded, as a dz is.
template <int N>
bool LeavesEInDx(const Context& context, const GradientBuffers<N>& buffers,
                 const void* dz) {
  if (dz != nullptr) return false;
  if (N > 1) return buffers.activation.is_curve();
  return !buffers.activation.is_piecewise_linear() &&
         context.item_size == context.accumulator_size;
}

// The affine operands of one of the two halves of backward.
template <typename Operands>
AffineOperands AffineOf(const Operands& operands) {
  return operands.affine;
}

}  // namespace

void Statistics(ThreadPool& pool, const Problem& problem, const void* x,
                void* mean, void* var) {
  const Context context(problem, /*inputs=*/1, /*residual=*/false);
  Partials partials(context.plan);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    ColumnVector<A> origins(context.plan);
    RunPhases(pool, context,
              {FindOrigins(context, x, &origins),
               StatisticsPass(context, x, origins.data(), &partials),
               FinishStatistics<A>(context.plan, &origins, &partials, mean, var,
                                   [](int64_t, const Range&, const BlockOf<A>&,
                                      const BlockOf<A>&) {})});
  });
}

template <int N>
void Normalise(ThreadPool& pool, const Problem& problem,
               const NormaliseBuffers<N>& buffers,
               const PerInput<AffineOperands, N>& affine,
               const PerInput<VectorOperand, N>& mean,
               const PerInput<VectorOperand, N>& var) {
  const Context context(problem, N, buffers.z != nullptr);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    NormaliseVectors<A, N> vectors(context.plan);
    RunPhases(pool, context,
              {PrepareVectors<A, N>(problem.shape, affine, mean, var, &vectors),
               NormalisePass<N>(context, buffers, vectors.columns())});
  });
}

template <int N>
void Forward(ThreadPool& pool, const Problem& problem,
             const NormaliseBuffers<N>& buffers,
             const PerInput<AffineOperands, N>& affine,
             const PerInput<void*, N>& mean, const PerInput<void*, N>& var) {
  const Context context(problem, N, buffers.z != nullptr);
  const Plan& plan = context.plan;
  auto partials = PerInputOf<N>([&](int) { return Partials(plan); });
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    NormaliseVectors<A, N> vectors(plan);
    const int64_t channels = problem.shape.channels;
    auto origins = NewColumnVectors<A, N>(plan);
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
          [&, channels, input](int64_t group, const Range& block,
                               const BlockOf<A>& means,
                               const BlockOf<A>& vars) {
            vectors.SetBlock(affine, channels, input, group, block, means,
                             vars);
          });
    };
    RunPhases(pool, context,
              {InTurn<N>(PerInputOf<N>(find)), InTurn<N>(PerInputOf<N>(sum)),
               InTurn<N>(PerInputOf<N>(finish)),
               NormalisePass<N>(context, buffers, vectors.columns())});
  });
}

template <int N>
void BackwardReduce(ThreadPool& pool, const Problem& problem,
                    const GradientBuffers<N>& buffers,
                    const PerInput<ReduceOperands, N>& operands, void* sum_e,
                    const PerInput<void*, N>& sum_e_centred, void* dz) {
  const Context context(problem, N, dz != nullptr);
  Partials partials(context.plan, 1 + N);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    NormaliseVectors<A, N> vectors(context.plan);
    Phase finish = ForEachChannelBlock(problem.shape, [&](int64_t group,
                                                          const Range& block) {
      BlockSums<1 + N> sums;
      MergeSumsOfChannels<1 + N>(context.plan, &partials, group, block, &sums);
      const int64_t first = group * problem.shape.channels + block.begin;
      StoreBlock<A>(sums[0], block.size(), sum_e, first);
      for (int input = 0; input < N; ++input) {
        StoreBlock<A>(sums[1 + input], block.size(), sum_e_centred[input],
                      first);
      }
    });
    RunPhases(
        pool, context,
        {PrepareVectors<A, N>(problem.shape, operands, AffineOf<ReduceOperands>,
                              &vectors),
         ReducePass<N>(context, buffers, vectors.columns(), dz, &partials),
         std::move(finish)});
  });
}

template <int N>
void BackwardApply(ThreadPool& pool, const Problem& problem,
                   const GradientBuffers<N>& buffers,
                   const PerInput<ApplyOperands, N>& operands,
                   const PerInput<void*, N>& dx) {
  // If e is dz, there was a residual. With gate kNone e may be dz, so a
  // residual is assumed.
  const Context context(problem, N, buffers.gate == Gate::kNone);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    ApplyVectors<A, N> vectors(context.plan);
    std::vector<std::pair<VectorOperand, ColumnVector<A>*>> given;
    for (int input = 0; input < N; ++input) {
      given.emplace_back(operands[input].b, &vectors.b[input]);
      given.emplace_back(operands[input].k, &vectors.k[input]);
    }
    RunPhases(pool, context,
              {Joined(PrepareVectors<A, N>(problem.shape, operands,
                                           AffineOf<ApplyOperands>, &vectors),
                      SpreadPhase<A>(problem.shape, std::move(given))),
               ApplyPass<N>(context, buffers, vectors.apply_columns(), dx)});
  });
}

template <int N>
void Backward(ThreadPool& pool, const Problem& problem,
              const GradientBuffers<N>& buffers,
              const PerInput<BackwardOperands, N>& operands,
              const PerInput<void*, N>& dx, const PerInput<void*, N>& dscale,
              void* dbias, void* dz) {
  const Context context(problem, N, dz != nullptr);
  Partials partials(context.plan, 1 + N);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    const Plan& plan = context.plan;
    const int64_t channels = problem.shape.channels;
    const double count = static_cast<double>(problem.shape.count());
    ApplyVectors<A, N> vectors(plan);
    const auto affine = [](const BackwardOperands& own) {
      return AffineOperands{own.scale, own.bias, own.epsilon};
    };
    Phase coefficients = ForEachChannelBlock(
        problem.shape, [&](int64_t group, const Range& block) {
          BlockSums<1 + N> sums;
          MergeSumsOfChannels<1 + N>(plan, &partials, group, block, &sums);
          const int64_t first = group * channels + block.begin;
          StoreBlock<A>(sums[0], block.size(), dbias, first);
          for (int input = 0; input < N; ++input) {
            const BackwardOperands& own = operands[input];
            const double epsilon = own.epsilon;
            const auto read = [&](const VectorOperand& operand, A otherwise) {
              return ReadBlock(operand, channels, group, block, otherwise);
            };
            const BlockOf<A> var = read(own.var, 0), scale = read(own.scale, 1),
                             dmean = read(own.dmean, 0),
                             dvar = read(own.dvar, 0);
            BlockOf<A> b, k, own_dscale;
            for (int64_t i = 0; i < block.size(); ++i) {
              const auto channel = BackwardChannelOf<A>(
                  var[i], scale[i], dmean[i], dvar[i], epsilon, sums[0][i],
                  sums[1 + input][i], count);
              own_dscale[i] = channel.dscale;
              b[i] = channel.b;
              k[i] = channel.k;
            }
            std::copy_n(own_dscale.begin(), block.size(),
                        static_cast<A*>(dscale[input]) + first);
            vectors.b[input].SetBlock(group, block, b);
            vectors.k[input].SetBlock(group, block, k);
          }
        });
    void* e = LeavesEInDx(context, buffers, dz) ? dx[0] : dz;
    const GradientBuffers<N> apply_buffers =
        e == nullptr || ReadsDyAgain(context, buffers)
            ? buffers
            : GradientBuffers<N>{e, buffers.x, nullptr, Gate::kNone,
                                 Activation{}};
    RunPhases(
        pool, context,
        {PrepareVectors<A, N>(problem.shape, operands, affine, &vectors),
         ReducePass<N>(context, buffers, vectors.columns(), e, &partials),
         std::move(coefficients),
         ApplyPass<N>(context, apply_buffers, vectors.apply_columns(), dx)});
  });
}

#define BNAR_INSTANTIATE(N, ...) \
  BNAR_DECLARE_OPERATIONS(template, void, ThreadPool&, N);
BNAR_FOR_EACH_INPUT_COUNT(BNAR_INSTANTIATE)
#undef BNAR_INSTANTIATE

}  // namespace jax_bnar::cpu
