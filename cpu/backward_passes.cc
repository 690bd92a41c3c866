#include "cpu/fresh_memory.h"
#include "cpu/huge_pages.h"
#include "cpu/pass_tasks.h"
#include "cpu/passes.h"

namespace jax_bnar::cpu {
namespace {

template <int N>
ReduceArgs<N> ReduceArgsAt(const Context& context,
                           const GradientBuffers<N>& buffers,
                           const ReduceColumns<N>& columns, void* dz,
                           bool non_temporal, const Position& at) {
  const int64_t out_bytes = at.element * context.out_item_size;
  const int64_t vector_bytes = at.column * context.accumulator_size;
  ReduceArgs<N> args;
  args.dy = Offset(buffers.dy, out_bytes);
  args.x = Offset(buffers.x, at.element * context.item_size);
  args.saved = SavedAt(context, buffers.gate, buffers.saved, at);
  args.dz = Offset(dz, out_bytes);
  args.mean = Offset(columns.mean, vector_bytes);
  args.a = Offset(columns.a, vector_bytes);
  args.bias = Offset(columns.bias, vector_bytes);
  args.gate = buffers.gate;
  args.activation = buffers.activation;
  args.non_temporal = non_temporal;
  args.fits_cache = context.fits_cache;
  return args;
}

// Points the sums of `args` at sum(0), and at sum(1 + input) of each input.
template <int N, typename F>
void SetSums(ReduceArgs<N>* args, F sum) {
  args->sum_e = sum(0);
  args->sum_e_centred =
      PerInputOf<N>([&](int input) { return sum(1 + input); });
}

template <int N>
ApplyArgs<N> ApplyArgsAt(const Context& context,
                         const GradientBuffers<N>& buffers,
                         const ApplyColumns<N>& columns,
                         const PerInput<void*, N>& dx, bool non_temporal,
                         const Position& at) {
  const int64_t bytes = at.element * context.item_size;
  const int64_t vector_bytes = at.column * context.accumulator_size;
  ApplyArgs<N> args;
  args.e = Offset(buffers.dy, at.element * context.out_item_size);
  args.x = Offset(buffers.x, bytes);
  args.saved = SavedAt(context, buffers.gate, buffers.saved, at);
  args.dx = Offset(dx, bytes);
  args.mean = Offset(columns.mean, vector_bytes);
  args.a = Offset(columns.a, vector_bytes);
  args.b = Offset(columns.b, vector_bytes);
  args.k = Offset(columns.k, vector_bytes);
  args.bias = Offset(columns.bias, vector_bytes);
  args.gate = buffers.gate;
  args.activation = buffers.activation;
  args.non_temporal = non_temporal;
  args.fits_cache = context.fits_cache;
  return args;
}

}  // namespace

template <int N>
Phase ReducePass(const Context& context, const GradientBuffers<N>& buffers,
                 const ReduceColumns<N>& columns, void* e, Partials* partials) {
  AdviseHugePages(e, context.out_array_bytes);
  const bool non_temporal =
      e != nullptr && MayBypassCaches(context, context.out_item_size, e);
  const InputKernels<N>& kernels = context.kernels->of_inputs<N>();
  const auto args_at = [=, &context](const ReductionTask& task,
                                     int64_t in_group, int64_t column) {
    ReduceArgs<N> args = ReduceArgsAt(
        context, buffers, columns, e, non_temporal && !task.is_tail,
        PositionOf(context, task.group, in_group, column));
    SetSums(&args, [&](int sum) {
      return partials->sum(sum, task.group, task.partial) + column;
    });
    return args;
  };
  return ReductionPhase(
      context,
      [=, &kernels](const ReductionTask& task, const RowsTile& tile,
                    int64_t in_group, int64_t column) {
        kernels.rows_reduce(tile, args_at(task, in_group, column));
      },
      [=, &context, &kernels](const ReductionTask& task, int64_t count,
                              int64_t in_group, int64_t column) {
        const ReduceArgs<N> target = args_at(task, in_group, column);
        PaddedInputs<N> x(context.item_size, count);
        Padded dy(context.out_item_size, count),
            e_dz(context.out_item_size, count);
        Padded saved = PaddedSaved(context, buffers.gate, count);
        ReduceArgs<N> args = target;
        args.dy = dy.In(target.dy);
        args.x = x.In(target.x);
        args.saved = saved.In(target.saved);
        if (target.dz != nullptr) args.dz = e_dz.Out();
        kernels.rows_reduce(kOneVector, args);
        if (target.dz != nullptr) e_dz.CopyOut(target.dz);
      },
      [=, &kernels](const ReductionTask& task, const PlanesTile& tile,
                    int64_t in_group, int64_t n, int64_t channel) {
        ReduceArgs<N> args = args_at(task, in_group, channel);
        const ReduceArgs<N> total = args;
        double sums[1 + N][kMostPlanes];
        SetSums(&args, [&](int sum) { return sums[sum]; });
        kernels.planes_reduce(tile, args);
        const bool first = n == task.rows.begin;
        const auto add = [&, first](double* to, const double* of_planes) {
          for (int64_t p = 0; p < tile.planes; ++p) {
            to[p] = (first ? 0.0 : to[p]) + of_planes[p];
          }
        };
        add(total.sum_e, sums[0]);
        for (int input = 0; input < N; ++input) {
          add(total.sum_e_centred[input], sums[1 + input]);
        }
      });
}

template <int N>
Phase ApplyPass(const Context& context, const GradientBuffers<N>& buffers,
                const ApplyColumns<N>& columns, const PerInput<void*, N>& dx) {
  bool non_temporal = true;
  for (void* each : dx) {
    AdviseHugePages(each, context.array_bytes);
    // The zeros of fresh pages are in the caches, from which streaming stores
    // must first remove them. With one result that costs as much as it gains,
    // with two it costs more: on Zen 3, backward of SiLU (32 images of
    // 56x56x256 in bfloat16) took 58 to 80 ms, and takes 35 to 59 so. Small
    // results stay in the caches anyway, and cost no system call.
    non_temporal = non_temporal &&
                   MayBypassCaches(context, context.item_size, each) &&
                   (N == 1 || !IsFresh(Offset(each, context.array_bytes / 2)));
  }
  const InputKernels<N>& kernels = context.kernels->of_inputs<N>();
  const auto args_at = [=, &context](int64_t group, int64_t in_group,
                                     int64_t column, bool may_bypass) {
    return ApplyArgsAt(context, buffers, columns, dx,
                       may_bypass && non_temporal,
                       PositionOf(context, group, in_group, column));
  };
  return ElementwisePhase(
      context,
      [=, &kernels](int64_t group, const RowsTile& tile, int64_t in_group,
                    int64_t column, bool whole) {
        kernels.rows_apply(tile, args_at(group, in_group, column, whole));
      },
      [=, &context, &kernels](int64_t group, int64_t count, int64_t in_group,
                              int64_t column) {
        const ApplyArgs<N> target = args_at(group, in_group, column, false);
        PaddedInputs<N> x(context.item_size, count),
            out(context.item_size, count);
        Padded e(context.out_item_size, count);
        Padded saved = PaddedSaved(context, buffers.gate, count);
        ApplyArgs<N> args = target;
        args.e = e.In(target.e);
        args.x = x.In(target.x);
        args.saved = saved.In(target.saved);
        args.dx = out.Out();
        kernels.rows_apply(kOneVector, args);
        out.CopyOut(target.dx);
      },
      [=, &kernels](int64_t group, const PlanesTile& tile, int64_t in_group,
                    int64_t channel) {
        kernels.planes_apply(tile, args_at(group, in_group, channel, true));
      });
}

#define BNAR_INSTANTIATE(N, ...)                                     \
  template Phase ReducePass(                                         \
      const Context& context, const GradientBuffers<N>& buffers,     \
      const ReduceColumns<N>& columns, void* e, Partials* partials); \
  template Phase ApplyPass(                                          \
      const Context& context, const GradientBuffers<N>& buffers,     \
      const ApplyColumns<N>& columns, const PerInput<void*, N>& dx);
BNAR_FOR_EACH_INPUT_COUNT(BNAR_INSTANTIATE)
#undef BNAR_INSTANTIATE

}  // namespace jax_bnar::cpu
