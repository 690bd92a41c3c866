#include "cpu/huge_pages.h"
#include "cpu/pass_tasks.h"
#include "cpu/passes.h"

namespace jax_bnar::cpu {
namespace {

ReduceArgs ReduceArgsAt(const Context& context, const GradientBuffers& buffers,
                        const ReduceColumns& columns, void* dz, bool stream,
                        double* sum_e, double* sum_e_centred,
                        const Position& at) {
  const int64_t bytes = at.element * context.item_size;
  const int64_t vector_bytes = at.column * context.accumulator_size;
  ReduceArgs args;
  args.dy = Offset(buffers.dy, bytes);
  args.x = Offset(buffers.x, bytes);
  args.saved = SavedAt(context, buffers.gate, buffers.saved, at);
  args.dz = Offset(dz, bytes);
  args.mean = columns.mean + vector_bytes;
  args.a = columns.a + vector_bytes;
  args.bias = columns.bias + vector_bytes;
  args.sum_e = sum_e;
  args.sum_e_centred = sum_e_centred;
  args.gate = buffers.gate;
  args.stream = stream;
  return args;
}

ApplyArgs ApplyArgsAt(const Context& context, const GradientBuffers& buffers,
                      const ApplyColumns& columns, void* dx, bool stream,
                      const Position& at) {
  const int64_t bytes = at.element * context.item_size;
  const int64_t vector_bytes = at.column * context.accumulator_size;
  ApplyArgs args;
  args.e = Offset(buffers.dy, bytes);
  args.x = Offset(buffers.x, bytes);
  args.saved = SavedAt(context, buffers.gate, buffers.saved, at);
  args.dx = Offset(dx, bytes);
  args.mean = columns.mean + vector_bytes;
  args.a = columns.a + vector_bytes;
  args.b = columns.b + vector_bytes;
  args.k = columns.k + vector_bytes;
  args.bias = columns.bias + vector_bytes;
  args.gate = buffers.gate;
  args.stream = stream;
  return args;
}

}  // namespace

Phase ReducePass(const Context& context, const GradientBuffers& buffers,
                 const ReduceColumns& columns, void* dz, Partials* partials) {
  AdviseHugePages(dz, context.array_bytes);
  const bool stream = dz != nullptr && MayStream(context, dz);
  const auto args_at = [=, &context](const ReductionTask& task,
                                     int64_t in_group, int64_t column) {
    return ReduceArgsAt(context, buffers, columns, dz, stream && !task.is_tail,
                        partials->first(task.group, task.partial) + column,
                        partials->second(task.group, task.partial) + column,
                        PositionOf(context, task.group, in_group, column));
  };
  return ReductionPhase(
      context,
      [=, &context](const ReductionTask& task, const RowsTile& tile,
                    int64_t in_group, int64_t column) {
        context.kernels->rows_reduce(tile, args_at(task, in_group, column));
      },
      [=, &context](const ReductionTask& task, int64_t count, int64_t in_group,
                    int64_t column) {
        const ReduceArgs target = args_at(task, in_group, column);
        Padded dy(context.item_size, count), x(context.item_size, count),
            e_dz(context.item_size, count);
        Padded saved = PaddedSaved(context, buffers.gate, count);
        ReduceArgs args = target;
        args.dy = dy.In(target.dy);
        args.x = x.In(target.x);
        args.saved = saved.In(target.saved);
        if (target.dz != nullptr) args.dz = e_dz.Out();
        context.kernels->rows_reduce(kOneVector, args);
        if (target.dz != nullptr) e_dz.CopyOut(target.dz);
      },
      [=, &context](const ReductionTask& task, const Plane& plane,
                    int64_t in_group, int64_t n, int64_t channel) {
        ReduceArgs args = args_at(task, in_group, channel);
        const ReduceArgs total = args;
        double sum_e, sum_e_centred;
        args.sum_e = &sum_e;
        args.sum_e_centred = &sum_e_centred;
        context.kernels->plane_reduce(plane, args);
        const bool first = n == task.rows.begin;
        *total.sum_e = (first ? 0.0 : *total.sum_e) + sum_e;
        *total.sum_e_centred =
            (first ? 0.0 : *total.sum_e_centred) + sum_e_centred;
      });
}

Phase ApplyPass(const Context& context, const GradientBuffers& buffers,
                const ApplyColumns& columns, void* dx) {
  AdviseHugePages(dx, context.array_bytes);
  const bool stream = MayStream(context, dx);
  const auto args_at = [=, &context](int64_t group, int64_t in_group,
                                     int64_t column, bool may_stream) {
    return ApplyArgsAt(context, buffers, columns, dx, may_stream && stream,
                       PositionOf(context, group, in_group, column));
  };
  return ElementwisePhase(
      context,
      [=, &context](int64_t group, const RowsTile& tile, int64_t in_group,
                    bool whole) {
        context.kernels->rows_apply(tile, args_at(group, in_group, 0, whole));
      },
      [=, &context](int64_t group, int64_t count, int64_t in_group,
                    int64_t column) {
        const ApplyArgs target = args_at(group, in_group, column, false);
        Padded e(context.item_size, count), x(context.item_size, count),
            out(context.item_size, count);
        Padded saved = PaddedSaved(context, buffers.gate, count);
        ApplyArgs args = target;
        args.e = e.In(target.e);
        args.x = x.In(target.x);
        args.saved = saved.In(target.saved);
        args.dx = out.Out();
        context.kernels->rows_apply(kOneVector, args);
        out.CopyOut(target.dx);
      },
      [=, &context](int64_t group, const Plane& plane, int64_t in_group,
                    int64_t channel) {
        context.kernels->plane_apply(plane,
                                     args_at(group, in_group, channel, true));
      });
}

}  // namespace jax_bnar::cpu
