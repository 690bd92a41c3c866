#include "cpu/operations.h"

#include <utility>

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
// many, which is worth it only if they fit in the cache together with x.
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
    NormaliseVectors<A> vectors(context.plan);
    Phase finish = ForEachChannelBlock(
        problem.shape, [&](int64_t group, const Range& block) {
          MergeSumsOfChannels<2>(
              context.plan, &partials, group, block,
              [&](int64_t c, const double* sums) {
                const int64_t i = group * problem.shape.channels + c;
                static_cast<A*>(sum_e)[i] = static_cast<A>(sums[0]);
                static_cast<A*>(sum_e_centred)[i] = static_cast<A>(sums[1]);
              });
        });
    RunPhases(pool, context,
              {PrepareVectors(problem.shape, operands.affine, operands.mean,
                              operands.var, &vectors),
               ReducePass(context, buffers, vectors.columns(), dz, &partials),
               std::move(finish)});
  });
}

void BackwardApply(ThreadPool& pool, const Problem& problem,
                   const GradientBuffers& buffers,
                   const ApplyOperands& operands, void* dx) {
  // If e is dz, there was a residual. With gate kNone e may be dz, so a
  // residual is assumed.
  const Context context(problem, buffers.gate == Gate::kNone);
  WithAccumulator(problem.dtype, [&](auto zero) {
    using A = decltype(zero);
    NormaliseVectors<A> vectors(context.plan);
    ColumnVector<A> b(context.plan), k(context.plan);
    const NormaliseColumns columns = vectors.columns();
    RunPhases(
        pool, context,
        {Joined(PrepareVectors(problem.shape, operands.affine, operands.mean,
                               operands.var, &vectors),
                SpreadPhase<A>(problem.shape,
                               {{operands.b, &b}, {operands.k, &k}})),
         ApplyPass(context, buffers,
                   {columns.mean, columns.a, b.data(), k.data(), columns.bias},
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
          MergeSumsOfChannels<2>(
              plan, &partials, group, block,
              [&](int64_t c, const double* sums) {
                const auto at = [&](const VectorOperand& v, A otherwise) {
                  return ElementOr<A>(v, channels, group, c, otherwise);
                };
                const auto channel = BackwardChannelOf<A>(
                    at(operands.var, 0), at(operands.scale, 1),
                    at(operands.dmean, 0), at(operands.dvar, 0),
                    operands.epsilon, sums[0], sums[1], count);
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
         ReducePass(context, buffers, columns, dz, &partials),
         std::move(coefficients),
         ApplyPass(context, apply_buffers,
                   {columns.mean, columns.a, b.data(), k.data(), columns.bias},
                   dx)});
  });
}

}  // namespace jax_bnar::cpu
