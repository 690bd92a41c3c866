#include <cstring>

#include "cpu/pass_tasks.h"
#include "cpu/passes.h"
#include "native/numerics.h"

namespace jax_bnar::cpu {
namespace {

NormaliseArgs NormaliseArgsAt(const Context& context,
                              const NormaliseBuffers& buffers,
                              const NormaliseColumns& columns, bool stream,
                              const Position& at) {
  const int64_t bytes = at.element * context.item_size;
  const int64_t vector_bytes = at.column * context.accumulator_size;
  NormaliseArgs args;
  args.x = Offset(buffers.x, bytes);
  args.z = Offset(buffers.z, bytes);
  args.y = Offset(buffers.y, bytes);
  args.mask = buffers.mask == nullptr
                  ? nullptr
                  : buffers.mask + at.group * context.mask_bytes_per_group() +
                        at.bit / 8;
  args.mean = columns.mean + vector_bytes;
  args.a = columns.a + vector_bytes;
  args.b = columns.b + vector_bytes;
  args.relu = buffers.relu;
  args.stream = stream;
  return args;
}

}  // namespace

Phase StatisticsPass(const Context& context, const void* x, const char* origin,
                     Partials* partials) {
  const Plan& plan = context.plan;
  const auto run = [=, &context, &plan](int64_t index) {
    const TileKernels& kernels = *context.kernels;
    const ReductionTask task = ReductionTaskAt(plan, index);
    double* sum = partials->first(task.group, task.partial);
    double* m2 = partials->second(task.group, task.partial);
    const auto x_at = [&](int64_t in_group) {
      return Offset(x, PositionOf(context, task.group, in_group, 0).element *
                           context.item_size);
    };
    const auto origin_at = [&](int64_t column) {
      return origin + PositionOf(context, task.group, 0, column).column *
                          context.accumulator_size;
    };
    if (task.is_tail) {
      const int64_t start = RowStart(plan, plan.rows);
      RunTail(
          plan,
          [&](const RowsTile& tile) {
            kernels.rows_statistics(tile, {x_at(start), origin_at(0), sum, m2});
          },
          [&](int64_t count, int64_t column) {
            Padded padded(context.item_size, count);
            kernels.rows_statistics(
                kOneVector, {padded.In(x_at(start + column)), origin_at(column),
                             sum + column, m2 + column});
          });
      return;
    }
    if (plan.layout == Plan::Layout::kChannelsLast) {
      kernels.rows_statistics(
          RowsTile{task.rows.size(), task.columns.size(), plan.columns},
          {x_at(RowStart(plan, task.rows.begin) + task.columns.begin),
           origin_at(task.columns.begin), sum + task.columns.begin,
           m2 + task.columns.begin});
      return;
    }
    const double size = static_cast<double>(plan.shape.inner);
    for (int64_t n = task.rows.begin; n < task.rows.end; ++n) {
      const double before = static_cast<double>(n - task.rows.begin) * size;
      for (int64_t c = task.columns.begin; c < task.columns.end; ++c) {
        double plane_sum, plane_m2;
        kernels.plane_statistics(
            Plane{plan.shape.inner, 0},
            {x_at((n * plan.shape.channels + c) * plan.shape.inner),
             origin_at(c), &plane_sum, &plane_m2});
        MergeStatistics(before, size, plane_sum, plane_m2, &sum[c], &m2[c]);
      }
    }
  };
  return {plan.shape.groups * plan.reduction_tasks_per_group(), run,
          /*last_first=*/false};
}

Phase NormalisePass(const Context& context, const NormaliseBuffers& buffers,
                    const NormaliseColumns& columns) {
  const Plan& plan = context.plan;
  const bool stream = MayStream(context, buffers.y);
  const int64_t per_group = plan.elementwise_tasks_per_group();
  const int64_t num_tasks = plan.shape.groups * per_group;
  const auto run = [=, &context, &plan](int64_t index) {
    const TileKernels& kernels = *context.kernels;
    const int64_t group = index / per_group;
    const int64_t block = index % per_group;
    const auto args_at = [&](int64_t in_group, int64_t column) {
      return NormaliseArgsAt(context, buffers, columns, stream,
                             PositionOf(context, group, in_group, column));
    };
    if (block == plan.num_blocks) {
      const int64_t start = RowStart(plan, plan.rows);
      RunTail(
          plan,
          [&](const RowsTile& tile) {
            NormaliseArgs args = args_at(start, 0);
            args.stream = false;
            kernels.rows_normalise(tile, args);
          },
          [&](int64_t count, int64_t column) {
            const NormaliseArgs target = args_at(start + column, column);
            Padded x(context.item_size, count), z(context.item_size, count),
                y(context.item_size, count);
            uint16_t bits = 0;
            NormaliseArgs args = target;
            args.x = x.In(target.x);
            args.z = z.In(target.z);
            args.y = y.Out();
            args.stream = false;
            if (target.mask != nullptr) {
              args.mask = reinterpret_cast<uint8_t*>(&bits);
            }
            kernels.rows_normalise(kOneVector, args);
            y.CopyOut(target.y);
            if (target.mask != nullptr) {
              bits = static_cast<uint16_t>(bits & ((1u << count) - 1u));
              std::memcpy(target.mask, &bits,
                          static_cast<size_t>((count + 7) / 8));
            }
          });
      return;
    }
    const Range range = plan.Block(block);
    if (plan.layout == Plan::Layout::kChannelsLast) {
      kernels.rows_normalise(RowsTile{range.size(), plan.columns, plan.columns},
                             args_at(RowStart(plan, range.begin), 0));
      return;
    }
    ForEachPlane(plan, range, [&](int64_t channel, int64_t in_group) {
      kernels.plane_normalise(Plane{plan.shape.inner, in_group % 8},
                              args_at(in_group, channel));
    });
  };
  // Last blocks first: the reduction before left them in the cache.
  return {num_tasks, run, /*last_first=*/true};
}

}  // namespace jax_bnar::cpu
