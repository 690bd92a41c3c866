#include "cpu/pass_tasks.h"
#include "cpu/passes.h"

namespace jax_bnar::cpu {
namespace {

// What was saved for the gate, at a position; a mask is addressed by bytes.
const void* SavedAt(const Context& context, const GradientBuffers& buffers,
                    const Position& at) {
  switch (buffers.gate) {
    case Gate::kNone:
    case Gate::kX:
      return nullptr;
    case Gate::kY:
      return Offset(buffers.saved, at.element * context.item_size);
    case Gate::kMask:
      return Offset(buffers.saved,
                    at.group * context.mask_bytes_per_group() + at.bit / 8);
  }
  return nullptr;
}

ReduceArgs ReduceArgsAt(const Context& context, const GradientBuffers& buffers,
                        const ReduceColumns& columns, void* dz, bool stream,
                        double* sum_e, double* sum_e_centred,
                        const Position& at) {
  const int64_t bytes = at.element * context.item_size;
  const int64_t vector_bytes = at.column * context.accumulator_size;
  ReduceArgs args;
  args.dy = Offset(buffers.dy, bytes);
  args.x = Offset(buffers.x, bytes);
  args.saved = SavedAt(context, buffers, at);
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
  args.saved = SavedAt(context, buffers, at);
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
  const Plan& plan = context.plan;
  const bool stream = dz != nullptr && MayStream(context, dz);
  const auto run = [=, &context, &plan](int64_t index) {
    const TileKernels& kernels = *context.kernels;
    const ReductionTask task = ReductionTaskAt(plan, index);
    double* sum_e = partials->first(task.group, task.partial);
    double* sum_e_centred = partials->second(task.group, task.partial);
    const auto args_at = [&](int64_t in_group, int64_t column) {
      return ReduceArgsAt(context, buffers, columns, dz, stream, sum_e + column,
                          sum_e_centred + column,
                          PositionOf(context, task.group, in_group, column));
    };
    if (task.is_tail) {
      const int64_t start = RowStart(plan, plan.rows);
      RunTail(
          plan,
          [&](const RowsTile& tile) {
            ReduceArgs args = args_at(start, 0);
            args.stream = false;
            kernels.rows_reduce(tile, args);
          },
          [&](int64_t count, int64_t column) {
            const ReduceArgs target = args_at(start + column, column);
            Padded dy(context.item_size, count), x(context.item_size, count),
                e_dz(context.item_size, count);
            Padded saved = buffers.gate == Gate::kMask
                               ? Padded(1, (count + 7) / 8)
                               : Padded(context.item_size, count);
            ReduceArgs args = target;
            args.dy = dy.In(target.dy);
            args.x = x.In(target.x);
            args.saved = saved.In(target.saved);
            args.stream = false;
            if (target.dz != nullptr) args.dz = e_dz.Out();
            kernels.rows_reduce(kOneVector, args);
            if (target.dz != nullptr) e_dz.CopyOut(target.dz);
          });
      return;
    }
    if (plan.layout == Plan::Layout::kChannelsLast) {
      kernels.rows_reduce(
          RowsTile{task.rows.size(), task.columns.size(), plan.columns},
          args_at(RowStart(plan, task.rows.begin) + task.columns.begin,
                  task.columns.begin));
      return;
    }
    for (int64_t n = task.rows.begin; n < task.rows.end; ++n) {
      for (int64_t c = task.columns.begin; c < task.columns.end; ++c) {
        const int64_t in_group =
            (n * plan.shape.channels + c) * plan.shape.inner;
        ReduceArgs args = args_at(in_group, c);
        double plane_e, plane_e_centred;
        args.sum_e = &plane_e;
        args.sum_e_centred = &plane_e_centred;
        kernels.plane_reduce(Plane{plan.shape.inner, in_group % 8}, args);
        const bool first = n == task.rows.begin;
        sum_e[c] = (first ? 0.0 : sum_e[c]) + plane_e;
        sum_e_centred[c] = (first ? 0.0 : sum_e_centred[c]) + plane_e_centred;
      }
    }
  };
  return {plan.shape.groups * plan.reduction_tasks_per_group(), run,
          /*last_first=*/false};
}

Phase ApplyPass(const Context& context, const GradientBuffers& buffers,
                const ApplyColumns& columns, void* dx) {
  const Plan& plan = context.plan;
  const bool stream = MayStream(context, dx);
  const int64_t per_group = plan.elementwise_tasks_per_group();
  const int64_t num_tasks = plan.shape.groups * per_group;
  const auto run = [=, &context, &plan](int64_t index) {
    const TileKernels& kernels = *context.kernels;
    const int64_t group = index / per_group;
    const int64_t block = index % per_group;
    const auto args_at = [&](int64_t in_group, int64_t column) {
      return ApplyArgsAt(context, buffers, columns, dx, stream,
                         PositionOf(context, group, in_group, column));
    };
    if (block == plan.num_blocks) {
      const int64_t start = RowStart(plan, plan.rows);
      RunTail(
          plan,
          [&](const RowsTile& tile) {
            ApplyArgs args = args_at(start, 0);
            args.stream = false;
            kernels.rows_apply(tile, args);
          },
          [&](int64_t count, int64_t column) {
            const ApplyArgs target = args_at(start + column, column);
            Padded e(context.item_size, count), x(context.item_size, count),
                out(context.item_size, count);
            Padded saved = buffers.gate == Gate::kMask
                               ? Padded(1, (count + 7) / 8)
                               : Padded(context.item_size, count);
            ApplyArgs args = target;
            args.e = e.In(target.e);
            args.x = x.In(target.x);
            args.saved = saved.In(target.saved);
            args.dx = out.Out();
            args.stream = false;
            kernels.rows_apply(kOneVector, args);
            out.CopyOut(target.dx);
          });
      return;
    }
    const Range range = plan.Block(block);
    if (plan.layout == Plan::Layout::kChannelsLast) {
      kernels.rows_apply(RowsTile{range.size(), plan.columns, plan.columns},
                         args_at(RowStart(plan, range.begin), 0));
      return;
    }
    ForEachPlane(plan, range, [&](int64_t channel, int64_t in_group) {
      kernels.plane_apply(Plane{plan.shape.inner, in_group % 8},
                          args_at(in_group, channel));
    });
  };
  // Last blocks first: the reduction before left them in the cache.
  return {num_tasks, run, /*last_first=*/true};
}

}  // namespace jax_bnar::cpu
