// Partial sums of chunks and columns, merged in a fixed order into sums of
// channels.

#ifndef JAX_BNAR_CPU_MERGE_H_
#define JAX_BNAR_CPU_MERGE_H_

#include "cpu/columns.h"
#include "cpu/passes.h"
#include "cpu/plan.h"

namespace jax_bnar {

// Calls f(channel, sum, m2) for each channel of the range. Overwrites the
// group's first partials of these channels.
template <typename F>
void MergeStatisticsOfChannels(const Plan& plan, Partials* partials,
                               int64_t group, const Range& channels, F f) {
  const ColumnRuns runs(plan);
  double* sum = partials->first(group, 0);
  double* m2 = partials->second(group, 0);
  // Elements of one column in one row of the plan's matrix.
  const double per_row = plan.layout == Plan::Layout::kPlanes
                             ? static_cast<double>(plan.shape.inner)
                             : 1.0;
  for (int64_t fold = 0; fold < runs.fold; ++fold) {
    const Range columns{fold * runs.stride + channels.begin * runs.length,
                        fold * runs.stride + channels.end * runs.length};
    for (int64_t partial = 1; partial < plan.num_partials(); ++partial) {
      const bool is_tail = partial == plan.num_chunks;
      const double m =
          per_row * static_cast<double>(plan.ChunkRows(partial).begin);
      const double before = is_tail ? static_cast<double>(plan.rows) : m;
      const double n =
          is_tail
              ? 1.0
              : per_row * static_cast<double>(plan.ChunkRows(partial).size());
      const int64_t end =
          is_tail ? std::min(columns.end, plan.tail) : columns.end;
      const double* partial_sum = partials->first(group, partial);
      const double* partial_m2 = partials->second(group, partial);
      for (int64_t j = columns.begin; j < end; ++j) {
        MergeStatistics(before, n, partial_sum[j], partial_m2[j], &sum[j],
                        &m2[j]);
      }
    }
  }
  for (int64_t c = channels.begin; c < channels.end; ++c) {
    double channel_sum = 0, channel_m2 = 0, count = 0;
    for (int64_t fold = 0; fold < runs.fold; ++fold) {
      const int64_t first = fold * runs.stride + c * runs.length;
      for (int64_t j = first; j < first + runs.length; ++j) {
        const double n = per_row * static_cast<double>(plan.rows) +
                         (j < plan.tail ? 1.0 : 0.0);
        if (n == 0) continue;
        MergeStatistics(count, n, sum[j], m2[j], &channel_sum, &channel_m2);
        count += n;
      }
    }
    f(c, channel_sum, channel_m2);
  }
}

// Calls f(channel, first, second) with plain sums.
template <typename F>
void MergeSumsOfChannels(const Plan& plan, Partials* partials, int64_t group,
                         const Range& channels, F f) {
  const ColumnRuns runs(plan);
  for (int64_t c = channels.begin; c < channels.end; ++c) {
    double first_sum = 0, second_sum = 0;
    for (int64_t fold = 0; fold < runs.fold; ++fold) {
      const int64_t begin = fold * runs.stride + c * runs.length;
      for (int64_t partial = 0; partial < plan.num_partials(); ++partial) {
        const bool is_tail = partial == plan.num_chunks;
        const int64_t end = is_tail ? std::min(begin + runs.length, plan.tail)
                                    : begin + runs.length;
        const double* first = partials->first(group, partial);
        const double* second = partials->second(group, partial);
        for (int64_t j = begin; j < end; ++j) {
          first_sum += first[j];
          second_sum += second[j];
        }
      }
    }
    f(c, first_sum, second_sum);
  }
}

}  // namespace jax_bnar

#endif  // JAX_BNAR_CPU_MERGE_H_
