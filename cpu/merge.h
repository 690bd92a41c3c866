// Merges the partial sums of chunks and columns, in a fixed order, into sums of
// channels.

#ifndef JAX_BNAR_CPU_MERGE_H_
#define JAX_BNAR_CPU_MERGE_H_

#include <algorithm>
#include <array>

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

// Sums of the channels of a block.
template <int kSums>
using BlockSums = std::array<BlockOf<double>, kSums>;

// The sum and m2 of each channel of the block. Overwrites the group's first
// partials of these channels.
inline void MergeStatisticsOfChannels(const Plan& plan, Partials* partials,
                                      int64_t group, const Range& channels,
                                      BlockSums<2>* merged) {
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
  if (runs.is_one_column()) {
    std::copy(sum + channels.begin, sum + channels.end, (*merged)[0].begin());
    std::copy(m2 + channels.begin, m2 + channels.end, (*merged)[1].begin());
    return;
  }
  for (int64_t c = channels.begin; c < channels.end; ++c) {
    double channel_sum = 0, channel_m2 = 0, count = 0;
    ForEachColumn(plan, runs, c, [&](int64_t j) {
      const double n = per_row * static_cast<double>(plan.rows) +
                       (j < plan.tail ? 1.0 : 0.0);
      MergeStatistics(count, n, sum[j], m2[j], &channel_sum, &channel_m2);
      count += n;
    });
    (*merged)[0][c - channels.begin] = channel_sum;
    (*merged)[1][c - channels.begin] = channel_m2;
  }
}

// kSums plain sums of each channel of the block. Overwrites the group's first
// partials of these channels.
template <int kSums>
void MergeSumsOfChannels(const Plan& plan, Partials* partials, int64_t group,
                         const Range& channels, BlockSums<kSums>* merged) {
  const ColumnRuns runs(plan);
  ForEachFurtherPartial(plan, runs, channels, [&](const PartialColumns& at) {
    for (int s = 0; s < kSums; ++s) {
      double* total = partials->sum(s, group, 0);
      const double* partial = partials->sum(s, group, at.partial);
      for (int64_t j = at.begin; j < at.end; ++j) total[j] += partial[j];
    }
  });
  for (int s = 0; s < kSums; ++s) {
    const double* total = partials->sum(s, group, 0);
    double* result = (*merged)[s].data();
    if (runs.is_one_column()) {
      std::copy(total + channels.begin, total + channels.end, result);
      continue;
    }
    for (int64_t c = channels.begin; c < channels.end; ++c) {
      double sum = 0;
      ForEachColumn(plan, runs, c, [&](int64_t j) { sum += total[j]; });
      result[c - channels.begin] = sum;
    }
  }
}

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_MERGE_H_
