#include "cpu/huge_pages.h"
#include "cpu/pass_tasks.h"
#include "cpu/passes.h"
#include "native/numerics.h"

namespace jax_bnar::cpu {
namespace {

template <int N>
NormaliseArgs<N> NormaliseArgsAt(const Context& context,
                                 const NormaliseBuffers<N>& buffers,
                                 const NormaliseColumns<N>& columns,
                                 bool non_temporal, const Position& at) {
  const int64_t out_bytes = at.element * context.out_item_size;
  const int64_t vector_bytes = at.column * context.accumulator_size;
  NormaliseArgs<N> args;
  args.x = Offset(buffers.x, at.element * context.item_size);
  args.z = Offset(buffers.z, out_bytes);
  args.y = Offset(buffers.y, out_bytes);
  args.mask = buffers.mask == nullptr ? nullptr
                                      : buffers.mask + MaskByteAt(context, at);
  args.mean = Offset(columns.mean, vector_bytes);
  args.a = Offset(columns.a, vector_bytes);
  args.bias = Offset(columns.bias, vector_bytes);
  args.activation = buffers.activation;
  args.non_temporal = non_temporal;
  args.fits_cache = context.fits_cache;
  return args;
}

}  // namespace

Phase StatisticsPass(const Context& context, const void* x, const char* origin,
                     Partials* partials) {
  const auto args_at = [=, &context](const ReductionTask& task,
                                     int64_t in_group, int64_t column) {
    const Position at = PositionOf(context, task.group, in_group, column);
    return StatisticsArgs{Offset(x, at.element * context.item_size),
                          origin + at.column * context.accumulator_size,
                          partials->first(task.group, task.partial) + column,
                          partials->second(task.group, task.partial) + column,
                          context.fits_cache};
  };
  return ReductionPhase(
      context,
      [=, &context](const ReductionTask& task, const RowsTile& tile,
                    int64_t in_group, int64_t column) {
        context.kernels->rows_statistics(tile, args_at(task, in_group, column));
      },
      [=, &context](const ReductionTask& task, int64_t count, int64_t in_group,
                    int64_t column) {
        StatisticsArgs args = args_at(task, in_group, column);
        Padded padded(context.item_size, count);
        args.x = padded.In(args.x);
        context.kernels->rows_statistics(kOneVector, args);
      },
      [=, &context](const ReductionTask& task, const PlanesTile& tile,
                    int64_t in_group, int64_t n, int64_t channel) {
        StatisticsArgs args = args_at(task, in_group, channel);
        const StatisticsArgs total = args;
        double sum[kMostPlanes], m2[kMostPlanes];
        args.sum = sum;
        args.m2 = m2;
        context.kernels->planes_statistics(tile, args);
        const double size = static_cast<double>(tile.size);
        const double before = static_cast<double>(n - task.rows.begin) * size;
        for (int64_t p = 0; p < tile.planes; ++p) {
          MergeStatistics(before, size, sum[p], m2[p], total.sum + p,
                          total.m2 + p);
        }
      });
}

template <int N>
Phase NormalisePass(const Context& context, const NormaliseBuffers<N>& buffers,
                    const NormaliseColumns<N>& columns) {
  const InputKernels<N>& kernels = context.kernels->of_inputs<N>();
  AdviseHugePages(buffers.y, context.out_array_bytes);
  const bool non_temporal =
      MayBypassCaches(context, context.out_item_size, buffers.y);
  const auto args_at = [=, &context](int64_t group, int64_t in_group,
                                     int64_t column, bool may_bypass) {
    return NormaliseArgsAt(context, buffers, columns,
                           may_bypass && non_temporal,
                           PositionOf(context, group, in_group, column));
  };
  return ElementwisePhase(
      context,
      [=, &kernels](int64_t group, const RowsTile& tile, int64_t in_group,
                    int64_t column, bool whole) {
        kernels.rows_normalise(tile, args_at(group, in_group, column, whole));
      },
      [=, &context, &kernels](int64_t group, int64_t count, int64_t in_group,
                              int64_t column) {
        const NormaliseArgs<N> target = args_at(group, in_group, column, false);
        PaddedInputs<N> x(context.item_size, count);
        Padded z(context.out_item_size, count), y(context.out_item_size, count),
            mask(1, (count + 7) / 8);
        NormaliseArgs<N> args = target;
        args.x = x.In(target.x);
        args.z = z.In(target.z);
        args.y = y.Out();
        if (target.mask != nullptr) args.mask = mask.OutMask();
        kernels.rows_normalise(kOneVector, args);
        y.CopyOut(target.y);
        if (target.mask != nullptr) mask.CopyOutBits(target.mask, count);
      },
      [=, &kernels](int64_t group, const PlanesTile& tile, int64_t in_group,
                    int64_t channel) {
        kernels.planes_normalise(tile, args_at(group, in_group, channel, true));
      });
}

#define BNAR_INSTANTIATE(N, ...)                                   \
  template Phase NormalisePass(const Context& context,             \
                               const NormaliseBuffers<N>& buffers, \
                               const NormaliseColumns<N>& columns);
BNAR_FOR_EACH_INPUT_COUNT(BNAR_INSTANTIATE)
#undef BNAR_INSTANTIATE

}  // namespace jax_bnar::cpu
