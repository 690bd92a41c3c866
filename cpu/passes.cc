#include "cpu/passes.h"

#include <cstring>

#include "cpu/cache.h"
#include "cpu/dispatch.h"
#include "cpu/half.h"

namespace jax_bnar {
namespace {

constexpr int64_t kLanes = 16;

int64_t ItemSize(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

const char* Offset(const void* p, int64_t bytes) {
  return p == nullptr ? nullptr : static_cast<const char*>(p) + bytes;
}

char* Offset(void* p, int64_t bytes) {
  return p == nullptr ? nullptr : static_cast<char*>(p) + bytes;
}

// Where a task's elements lie: `element` counts from the array's first one,
// `bit` from the group's, `column` from the group's first column.
struct Position {
  int64_t group;
  int64_t element;
  int64_t bit;
  int64_t column;
};

Position PositionOf(const Context& context, int64_t group, int64_t in_group,
                    int64_t column) {
  return {group, group * context.plan.shape.group_size() + in_group, in_group,
          group * context.plan.columns + column};
}

// Evidence at a position; a mask is addressed by bytes.
const void* EvidenceAt(const Context& context, const GradientBuffers& buffers,
                       const Position& at) {
  switch (buffers.gate) {
    case Gate::kNone:
    case Gate::kX:
      return nullptr;
    case Gate::kY:
      return Offset(buffers.evidence, at.element * context.item_size);
    case Gate::kMask:
      return Offset(buffers.evidence,
                    at.group * context.mask_bytes_per_group() + at.bit / 8);
  }
  return nullptr;
}

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

ReduceArgs ReduceArgsAt(const Context& context, const GradientBuffers& buffers,
                        const ReduceColumns& columns, void* dz, bool stream,
                        double* sum_e, double* sum_e_centred,
                        const Position& at) {
  const int64_t bytes = at.element * context.item_size;
  const int64_t vector_bytes = at.column * context.accumulator_size;
  ReduceArgs args;
  args.dy = Offset(buffers.dy, bytes);
  args.x = Offset(buffers.x, bytes);
  args.evidence = EvidenceAt(context, buffers, at);
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
  args.evidence = EvidenceAt(context, buffers, at);
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

// Sixteen elements of scratch that stand for fewer, at the end of an array:
// kernels take whole vectors.
class Padded {
 public:
  Padded(int64_t item_size, int64_t count)
      : bytes_(static_cast<size_t>(item_size * count)) {}

  const void* In(const void* source) {
    if (source == nullptr) return nullptr;
    std::memset(data_, 0, sizeof(data_));
    std::memcpy(data_, source, bytes_);
    return data_;
  }
  void* Out() { return data_; }
  void CopyOut(void* target) const { std::memcpy(target, data_, bytes_); }

 private:
  size_t bytes_;
  alignas(64) char data_[kLanes * sizeof(double)];
};

// The tail of a group is one row shorter than the others: whole vectors in
// place, then one padded vector. Calls whole(tile) and padded(count, column).
template <typename Whole, typename PaddedCall>
void RunTail(const Plan& plan, Whole whole, PaddedCall padded) {
  const int64_t vectors = plan.tail / kLanes * kLanes;
  const int64_t rest = plan.tail - vectors;
  if (vectors > 0) whole(RowsTile{1, vectors, plan.columns});
  if (rest > 0) padded(rest, vectors);
}

constexpr RowsTile kOneVector{1, kLanes, kLanes};

// Element of the group at which row r of the plan's matrix begins.
int64_t RowStart(const Plan& plan, int64_t row) { return row * plan.columns; }

// One task of a reduction: a chunk of rows by a slab of columns.
struct ReductionTask {
  int64_t group;
  bool is_tail;
  int64_t partial;
  Range rows;
  Range columns;
};

ReductionTask ReductionTaskAt(const Plan& plan, int64_t task) {
  const int64_t per_group = plan.reduction_tasks_per_group();
  ReductionTask t{};
  t.group = task / per_group;
  const int64_t in_group = task % per_group;
  t.is_tail = in_group == plan.num_chunks * plan.num_slabs;
  if (t.is_tail) {
    t.partial = plan.num_chunks;
    return t;
  }
  t.partial = in_group / plan.num_slabs;
  t.rows = plan.ChunkRows(t.partial);
  t.columns = plan.SlabColumns(in_group % plan.num_slabs);
  return t;
}

// Output may bypass the caches where it will not be found there again, and
// where every vector is aligned.
bool MayStream(const Context& context, const void* output) {
  const Shape& shape = context.plan.shape;
  const int64_t vector_bytes = kLanes * context.item_size;
  const bool aligned =
      reinterpret_cast<uintptr_t>(output) % vector_bytes == 0 &&
      (shape.groups == 1 || shape.group_size() % kLanes == 0) &&
      (context.plan.layout == Plan::Layout::kRows || shape.inner % kLanes == 0);
  return aligned && shape.groups * shape.group_size() * context.item_size >=
                        kStreamingBytes;
}

// Calls on_plane(channel, element of the group) for each plane of a block.
template <typename OnPlane>
void ForEachPlane(const Plan& plan, const Range& planes, OnPlane on_plane) {
  for (int64_t p = planes.begin; p < planes.end; ++p) {
    on_plane(p % plan.shape.channels, p * plan.shape.inner);
  }
}

}  // namespace

double ElementAsDouble(DType dtype, const void* array, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return HalfToFloat(static_cast<const uint16_t*>(array)[index]);
    case DType::kBFloat16:
      return BitsToFloat(
          static_cast<uint32_t>(static_cast<const uint16_t*>(array)[index])
          << 16);
    case DType::kFloat32:
      return static_cast<const float*>(array)[index];
    default:
      return static_cast<const double*>(array)[index];
  }
}

Context::Context(const Problem& problem)
    : dtype(problem.dtype),
      item_size(ItemSize(problem.dtype)),
      accumulator_size(problem.dtype == DType::kFloat64 ? 8 : 4),
      plan(MakePlan(problem.shape, item_size)),
      kernels(&KernelsFor(problem.dtype)) {}

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
            kernels.rows_statistics(tile, x_at(start), origin_at(0), sum, m2);
          },
          [&](int64_t count, int64_t column) {
            Padded padded(context.item_size, count);
            kernels.rows_statistics(kOneVector, padded.In(x_at(start + column)),
                                    origin_at(column), sum + column,
                                    m2 + column);
          });
      return;
    }
    if (plan.layout == Plan::Layout::kRows) {
      kernels.rows_statistics(
          RowsTile{task.rows.size(), task.columns.size(), plan.columns},
          x_at(RowStart(plan, task.rows.begin) + task.columns.begin),
          origin_at(task.columns.begin), sum + task.columns.begin,
          m2 + task.columns.begin);
      return;
    }
    const double size = static_cast<double>(plan.shape.inner);
    for (int64_t n = task.rows.begin; n < task.rows.end; ++n) {
      const double before = static_cast<double>(n - task.rows.begin) * size;
      for (int64_t c = task.columns.begin; c < task.columns.end; ++c) {
        double plane_sum, plane_m2;
        kernels.plane_statistics(
            Plane{plan.shape.inner, 0},
            x_at((n * plan.shape.channels + c) * plan.shape.inner),
            origin_at(c), &plane_sum, &plane_m2);
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
    if (plan.layout == Plan::Layout::kRows) {
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
            Padded evidence = buffers.gate == Gate::kMask
                                  ? Padded(1, (count + 7) / 8)
                                  : Padded(context.item_size, count);
            ReduceArgs args = target;
            args.dy = dy.In(target.dy);
            args.x = x.In(target.x);
            args.evidence = evidence.In(target.evidence);
            args.stream = false;
            if (target.dz != nullptr) args.dz = e_dz.Out();
            kernels.rows_reduce(kOneVector, args);
            if (target.dz != nullptr) e_dz.CopyOut(target.dz);
          });
      return;
    }
    if (plan.layout == Plan::Layout::kRows) {
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
            Padded evidence = buffers.gate == Gate::kMask
                                  ? Padded(1, (count + 7) / 8)
                                  : Padded(context.item_size, count);
            ApplyArgs args = target;
            args.e = e.In(target.e);
            args.x = x.In(target.x);
            args.evidence = evidence.In(target.evidence);
            args.dx = out.Out();
            args.stream = false;
            kernels.rows_apply(kOneVector, args);
            out.CopyOut(target.dx);
          });
      return;
    }
    const Range range = plan.Block(block);
    if (plan.layout == Plan::Layout::kRows) {
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

}  // namespace jax_bnar
