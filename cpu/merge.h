// Merges the partial sums of chunks and columns, in a fixed order, into sums of
// channels.

#ifndef JAX_BNAR_CPU_MERGE_H_
#define JAX_BNAR_CPU_MERGE_H_

#include "cpu/columns.h"
#include "cpu/passes.h"
#include "cpu/plan.h"
#include "native/numerics.h"

namespace jax_bnar::cpu {

// Columns [begin, end) of one partial, in one of the runs of ColumnRuns.
struct PartialColumns {
  int64_t partial;
  int64_t begin;
  int64_t end;
};

// Calls merge(PartialColumns) for the columns of these channels in every
// partial after the first, in order. A tail has fewer columns than a chunk.
template <typename F>
void ForEachFurtherPartial(const Plan& plan, const ColumnRuns& runs,
                           const Range& channels, F merge) {
  for (int64_t r = 0; r < runs.count; ++r) {
    const int64_t begin = r * runs.stride + channels.begin * runs.length;
    const int64_t end = r * runs.stride + channels.end * runs.length;
    for (int64_t partial = 1; partial < plan.num_partials(); ++partial) {
      const bool is_tail = partial == plan.num_chunks;
      merge(PartialColumns{partial, begin,
                           is_tail ? std::min(end, plan.tail) : end});
    }
  }
}

// Calls add(column) for each column of a channel that exists in the plan's
// matrix.
template <typename F>
void ForEachColumn(const Plan& plan, const ColumnRuns& runs, int64_t channel,
                   F add) {
  for (int64_t r = 0; r < runs.count; ++r) {
    const int64_t begin = r * runs.stride + channel * runs.length;
    // Without a whole row, only the columns of the tail exist.
    const int64_t end = plan.num_chunks > 0
                            ? begin + runs.length
                            : std::min(begin + runs.length, plan.tail);
    for (int64_t j = begin; j < end; ++j) add(j);
  }
}

// Calls f(channel, sum, m2) for each channel of the range. Overwrites the
// group's first partials of these channels.
template <typename F>
void MergeStatisticsOfChannels(const Plan& plan, Partials* partials,
                               int64_t group, const Range& channels, F f) {
  const ColumnRuns runs(plan);
  double* sum = partials->first(group, 0);
  double* m2 = partials->second(group, 0);
  // The number of elements of one column in one row of the plan's matrix.
  const double per_row = plan.layout == Plan::Layout::kChannelsFirst
                             ? static_cast<double>(plan.shape.inner)
                             : 1.0;
  ForEachFurtherPartial(plan, runs, channels, [&](const PartialColumns& at) {
    const bool is_tail = at.partial == plan.num_chunks;
    const Range rows = plan.ChunkRows(at.partial);
    const double m =
        is_tail ? static_cast<double>(plan.rows) : per_row * rows.begin;
    const double n = is_tail ? 1.0 : per_row * rows.size();
    // This is MergeStatistics, written out so that the compiler vectorises it.
    const double n_over_m = n / m;
    const double weight = m / (n * (m + n));
    const double* partial_sum = partials->first(group, at.partial);
    const double* partial_m2 = partials->second(group, at.partial);
    for (int64_t j = at.begin; j < at.end; ++j) {
      const double t = sum[j] * n_over_m - partial_sum[j];
      m2[j] += partial_m2[j] + t * t * weight;
      sum[j] += partial_sum[j];
    }
  });
  for (int64_t c = channels.begin; c < channels.end; ++c) {
    double channel_sum = 0, channel_m2 = 0, count = 0;
    ForEachColumn(plan, runs, c, [&](int64_t j) {
      const double n = per_row * static_cast<double>(plan.rows) +
                       (j < plan.tail ? 1.0 : 0.0);
      MergeStatistics(count, n, sum[j], m2[j], &channel_sum, &channel_m2);
      count += n;
    });
    f(c, channel_sum, channel_m2);
  }
}

// Calls f(channel, sums) with kSums plain sums. Overwrites the group's first
// partials of these channels.
template <int kSums, typename F>
void MergeSumsOfChannels(const Plan& plan, Partials* partials, int64_t group,
                         const Range& channels, F f) {
  const ColumnRuns runs(plan);
  ForEachFurtherPartial(plan, runs, channels, [&](const PartialColumns& at) {
    for (int s = 0; s < kSums; ++s) {
      double* total = partials->sum(s, group, 0);
      const double* partial = partials->sum(s, group, at.partial);
      for (int64_t j = at.begin; j < at.end; ++j) total[j] += partial[j];
    }
  });
  for (int64_t c = channels.begin; c < channels.end; ++c) {
    double sums[kSums] = {};
    for (int s = 0; s < kSums; ++s) {
      const double* total = partials->sum(s, group, 0);
      ForEachColumn(plan, runs, c, [&](int64_t j) { sums[s] += total[j]; });
    }
    f(c, sums);
  }
}

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_MERGE_H_
