// The passes of y = relu(batch_norm(x1) + batch_norm(x2)).

#include "cpu/huge_pages.h"
#include "cpu/pass_tasks.h"
#include "cpu/passes.h"

namespace jax_bnar::cpu {
namespace {

Both<const void*> VectorsAt(const Both<const char*>& columns, int64_t bytes) {
  return {columns[0] + bytes, columns[1] + bytes};
}

DualNormaliseArgs NormaliseArgsAt(const Context& context,
                                  const DualNormaliseBuffers& buffers,
                                  const DualNormaliseColumns& columns,
                                  bool stream, const Position& at) {
  const int64_t bytes = at.element * context.item_size;
  const int64_t vector_bytes = at.column * context.accumulator_size;
  DualNormaliseArgs args;
  args.x = {Offset(buffers.x[0], bytes), Offset(buffers.x[1], bytes)};
  args.y = Offset(buffers.y, bytes);
  args.mask = buffers.mask == nullptr ? nullptr
                                      : buffers.mask + MaskByteAt(context, at);
  args.mean = VectorsAt(columns.mean, vector_bytes);
  args.a = VectorsAt(columns.a, vector_bytes);
  args.bias = columns.bias + vector_bytes;
  args.stream = stream;
  return args;
}

}  // namespace

Phase DualNormalisePass(const Context& context,
                        const DualNormaliseBuffers& buffers,
                        const DualNormaliseColumns& columns) {
  AdviseHugePages(buffers.y, context.array_bytes);
  const bool stream = MayStream(context, buffers.y);
  const auto args_at = [=, &context](int64_t group, int64_t in_group,
                                     int64_t column, bool may_stream) {
    return NormaliseArgsAt(context, buffers, columns, may_stream && stream,
                           PositionOf(context, group, in_group, column));
  };
  return ElementwisePhase(
      context,
      [=, &context](int64_t group, const RowsTile& tile, int64_t in_group,
                    bool whole) {
        context.kernels->rows_dual_normalise(
            tile, args_at(group, in_group, 0, whole));
      },
      [=, &context](int64_t group, int64_t count, int64_t in_group,
                    int64_t column) {
        const DualNormaliseArgs target =
            args_at(group, in_group, column, false);
        Padded x1(context.item_size, count), x2(context.item_size, count),
            y(context.item_size, count), mask(1, (count + 7) / 8);
        DualNormaliseArgs args = target;
        args.x = {x1.In(target.x[0]), x2.In(target.x[1])};
        args.y = y.Out();
        if (target.mask != nullptr) args.mask = mask.OutMask();
        context.kernels->rows_dual_normalise(kOneVector, args);
        y.CopyOut(target.y);
        if (target.mask != nullptr) mask.CopyOutBits(target.mask, count);
      },
      [=, &context](int64_t group, const Plane& plane, int64_t in_group,
                    int64_t channel) {
        context.kernels->plane_dual_normalise(
            plane, args_at(group, in_group, channel, true));
      });
}

Phase DualReducePass(const Context& context, const DualGradientBuffers& buffers,
                     const DualReduceColumns& columns, Partials* partials) {
  const auto args_at = [=, &context](const ReductionTask& task,
                                     int64_t in_group, int64_t column) {
    const Position at = PositionOf(context, task.group, in_group, column);
    const int64_t bytes = at.element * context.item_size;
    const int64_t vector_bytes = at.column * context.accumulator_size;
    const auto sum = [&](int64_t which) {
      return partials->sum(which, task.group, task.partial) + column;
    };
    DualReduceArgs args;
    args.dy = Offset(buffers.dy, bytes);
    args.x = {Offset(buffers.x[0], bytes), Offset(buffers.x[1], bytes)};
    args.saved = SavedAt(context, buffers.gate, buffers.saved, at);
    args.mean = VectorsAt(columns.mean, vector_bytes);
    args.a = VectorsAt(columns.a, vector_bytes);
    args.bias = columns.bias + vector_bytes;
    args.sum_e = sum(0);
    args.sum_e_centred = {sum(1), sum(2)};
    args.gate = buffers.gate;
    return args;
  };
  return ReductionPhase(
      context,
      [=, &context](const ReductionTask& task, const RowsTile& tile,
                    int64_t in_group, int64_t column) {
        context.kernels->rows_dual_reduce(tile,
                                          args_at(task, in_group, column));
      },
      [=, &context](const ReductionTask& task, int64_t count, int64_t in_group,
                    int64_t column) {
        DualReduceArgs args = args_at(task, in_group, column);
        Padded dy(context.item_size, count), x1(context.item_size, count),
            x2(context.item_size, count);
        Padded saved = PaddedSaved(context, buffers.gate, count);
        args.dy = dy.In(args.dy);
        args.x = {x1.In(args.x[0]), x2.In(args.x[1])};
        args.saved = saved.In(args.saved);
        context.kernels->rows_dual_reduce(kOneVector, args);
      },
      [=, &context](const ReductionTask& task, const Plane& plane,
                    int64_t in_group, int64_t n, int64_t channel) {
        DualReduceArgs args = args_at(task, in_group, channel);
        double* const totals[] = {args.sum_e, args.sum_e_centred[0],
                                  args.sum_e_centred[1]};
        double sums[3];
        args.sum_e = &sums[0];
        args.sum_e_centred = {&sums[1], &sums[2]};
        context.kernels->plane_dual_reduce(plane, args);
        const bool first = n == task.rows.begin;
        for (int s = 0; s < 3; ++s) {
          *totals[s] = (first ? 0.0 : *totals[s]) + sums[s];
        }
      });
}

Phase DualApplyPass(const Context& context, const DualGradientBuffers& buffers,
                    const DualApplyColumns& columns, const Both<void*>& dx) {
  for (void* each : dx) AdviseHugePages(each, context.array_bytes);
  const bool stream = MayStream(context, dx[0]) && MayStream(context, dx[1]);
  const auto args_at = [=, &context](int64_t group, int64_t in_group,
                                     int64_t column, bool may_stream) {
    const Position at = PositionOf(context, group, in_group, column);
    const int64_t bytes = at.element * context.item_size;
    const int64_t vector_bytes = at.column * context.accumulator_size;
    DualApplyArgs args;
    args.dy = Offset(buffers.dy, bytes);
    args.x = {Offset(buffers.x[0], bytes), Offset(buffers.x[1], bytes)};
    args.saved = SavedAt(context, buffers.gate, buffers.saved, at);
    args.dx = {Offset(dx[0], bytes), Offset(dx[1], bytes)};
    args.mean = VectorsAt(columns.mean, vector_bytes);
    args.a = VectorsAt(columns.a, vector_bytes);
    args.b = VectorsAt(columns.b, vector_bytes);
    args.k = VectorsAt(columns.k, vector_bytes);
    args.bias = columns.bias + vector_bytes;
    args.gate = buffers.gate;
    args.stream = may_stream && stream;
    return args;
  };
  return ElementwisePhase(
      context,
      [=, &context](int64_t group, const RowsTile& tile, int64_t in_group,
                    bool whole) {
        context.kernels->rows_dual_apply(tile,
                                         args_at(group, in_group, 0, whole));
      },
      [=, &context](int64_t group, int64_t count, int64_t in_group,
                    int64_t column) {
        const DualApplyArgs target = args_at(group, in_group, column, false);
        Padded dy(context.item_size, count), x1(context.item_size, count),
            x2(context.item_size, count), out1(context.item_size, count),
            out2(context.item_size, count);
        Padded saved = PaddedSaved(context, buffers.gate, count);
        DualApplyArgs args = target;
        args.dy = dy.In(target.dy);
        args.x = {x1.In(target.x[0]), x2.In(target.x[1])};
        args.saved = saved.In(target.saved);
        args.dx = {out1.Out(), out2.Out()};
        context.kernels->rows_dual_apply(kOneVector, args);
        out1.CopyOut(target.dx[0]);
        out2.CopyOut(target.dx[1]);
      },
      [=, &context](int64_t group, const Plane& plane, int64_t in_group,
                    int64_t channel) {
        context.kernels->plane_dual_apply(
            plane, args_at(group, in_group, channel, true));
      });
}

}  // namespace jax_bnar::cpu
