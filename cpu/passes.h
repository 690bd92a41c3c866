// The passes over arrays, each as a phase of independent tasks. They turn a
// plan's tasks into calls of tile kernels.

#ifndef JAX_BNAR_CPU_PASSES_H_
#define JAX_BNAR_CPU_PASSES_H_

#include <cstddef>
#include <cstdint>

#include "cpu/buffer.h"
#include "cpu/context.h"
#include "cpu/executor.h"
#include "cpu/operations.h"
#include "cpu/plan.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu {

// Two double sums, or more, for each group, chunk (or tail) and column.
class Partials {
 public:
  explicit Partials(const Plan& plan, int64_t sums = 2)
      : columns_(plan.columns),
        per_group_(plan.num_partials() * plan.columns),
        per_sum_(plan.shape.groups * per_group_),
        values_(sums * per_sum_) {}

  double* sum(int64_t which, int64_t group, int64_t partial) {
    return values_.data() + which * per_sum_ + group * per_group_ +
           partial * columns_;
  }
  double* first(int64_t group, int64_t partial) {
    return sum(0, group, partial);
  }
  double* second(int64_t group, int64_t partial) {
    return sum(1, group, partial);
  }

 private:
  int64_t columns_;
  int64_t per_group_;
  int64_t per_sum_;
  Buffer<double> values_;
};

// Vectors laid out by column, so that a kernel reads them along memory:
// `columns` elements of the accumulation dtype for each group.
template <int N>
struct NormaliseColumns {
  PerInput<const void*, N> mean;
  PerInput<const void*, N> a;
  const void* bias;  // the sum of those of all inputs
};

// a and bias are read with Gate::kX and kZ only.
template <int N>
using ReduceColumns = NormaliseColumns<N>;

// bias is read with Gate::kX and kZ only.
template <int N>
struct ApplyColumns {
  PerInput<const void*, N> mean;
  PerInput<const void*, N> a;
  PerInput<const void*, N> b;
  PerInput<const void*, N> k;
  const void* bias;
};

// The context, the partials and what the columns point at must outlive the
// phases.
Phase StatisticsPass(const Context& context, const void* x, const char* origin,
                     Partials* partials);

template <int N>
Phase NormalisePass(const Context& context, const NormaliseBuffers<N>& buffers,
                    const NormaliseColumns<N>& columns);

// The partials have 1 + N sums: those of e, and of e * (x_i - mean_i). Where e
// is not null, e itself is written there: to dz, or to a dx that is computed
// from it later.
template <int N>
Phase ReducePass(const Context& context, const GradientBuffers<N>& buffers,
                 const ReduceColumns<N>& columns, void* e, Partials* partials);

template <int N>
Phase ApplyPass(const Context& context, const GradientBuffers<N>& buffers,
                const ApplyColumns<N>& columns, const PerInput<void*, N>& dx);

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_PASSES_H_
