// Sums over the threads of a block and over the blocks of a team. They are
// computed in double and in an order that depends only on the tiling, so that
// the result is the same in every run, whichever multiprocessors the blocks run
// on. Only counters are updated atomically.

#ifndef JAX_BNAR_CUDA_DEVICE_TEAM_SUMS_CUH_
#define JAX_BNAR_CUDA_DEVICE_TEAM_SUMS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// In a team of more blocks than this, each block merges some of the columns for
// all blocks, instead of all columns for itself. This takes a second barrier,
// but reads the partial sums `team` times less often.
constexpr int kMergeAlone = 32;

__device__ __forceinline__ void Add(Sums* to, const Sums& from) {
  to->first += from.first;
  to->second += from.second;
}

__device__ __forceinline__ Sums ExchangeLanes(const Sums& sums, int distance) {
  return {__shfl_xor_sync(0xffffffffu, sums.first, distance),
          __shfl_xor_sync(0xffffffffu, sums.second, distance)};
}

// Adds the sums of those lanes of a warp that have the same columns and stores
// them. Lanes that are `distance` apart are added first, then those half as far
// apart, and so on down to row_vectors. Of the elements that two lanes share,
// each lane sends one half and adds the other half, which needs half as many
// shuffles. element(j) returns the sums of element first + j.
template <int kCount, typename F>
__device__ __forceinline__ void AddLanes(int row_vectors, int distance,
                                         int lane, int first, Sums* scratch,
                                         F element) {
  if (distance < row_vectors) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) scratch[first + j] = element(j);
    return;
  }
  if constexpr (kCount > 1) {
    constexpr int kHalf = kCount / 2;
    const bool upper = (lane & distance) != 0;
    Sums halves[kHalf];
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      const Sums low = element(j), high = element(j + kHalf);
      const Sums sent{upper ? low.first : high.first,
                      upper ? low.second : high.second};
      halves[j] = {upper ? high.first : low.first,
                   upper ? high.second : low.second};
      Add(&halves[j], ExchangeLanes(sent, distance));
    }
    AddLanes<kHalf>(row_vectors, distance / 2, lane,
                    first + (upper ? kHalf : 0), scratch,
                    [&](int j) { return halves[j]; });
  } else {
    Sums sums = element(0);
    bool stores = true;
    for (; distance >= row_vectors; distance /= 2) {
      Add(&sums, ExchangeLanes(sums, distance));
      stores = stores && (lane & distance) == 0;
    }
    if (stores) scratch[first] = sums;
  }
}

// Adds what the threads hold to shared.block. element(i) returns the sums of
// this thread's element i. All threads of the block call it.
template <int kElements, typename SlabOf, typename F>
__device__ __forceinline__ void AddToBlock(const Tiling& tiling,
                                           const SharedMemory& shared,
                                           const SlabOf& slab, F element) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  Sums* scratch = shared.scratch + thread / 32 * kMaxColumns;
  if constexpr (SlabOf::kPlanes) {
    AddLanes<1>(/*row_vectors=*/1, 16, lane, 0, scratch, [&](int) {
      Sums sums = element(0);
#pragma unroll
      for (int i = 1; i < kElements; ++i) Add(&sums, element(i));
      return sums;
    });
  } else {
    AddLanes<kElements>(tiling.row_vectors, 16, lane, slab.FirstConstant(),
                        scratch, element);
  }
  __syncthreads();
  if (thread < tiling.columns) {
    Sums sums = shared.block[thread];
    for (int w = 0; w < kWarps; ++w) {
      Add(&sums, shared.scratch[w * kMaxColumns + thread]);
    }
    shared.block[thread] = sums;
  }
  __syncthreads();
}

__device__ __forceinline__ Sums LoadSums(const Sums* address) {
  // Another multiprocessor wrote this, so it must not come from this one's L1.
  const double2 sums = __ldcg(reinterpret_cast<const double2*>(address));
  return {sums.x, sums.y};
}

// Sets shared.total[column] to the sum of `count` rows of partial sums, whose
// order depends only on the tiling. kBatch rows are read at a time. All threads
// of the block call it.
template <int kBatch, typename F>
__device__ __forceinline__ void AddRows(const Tiling& tiling,
                                        const SharedMemory& shared, int count,
                                        F row_column) {
  const int thread = static_cast<int>(threadIdx.x);
  const int columns = tiling.columns;
  int parts = kThreads / columns;
  if (parts > kWarps) parts = kWarps;  // This is what scratch has room for.
  const int part = thread / columns;
  const int column = thread - part * columns;
  if (part < parts) {
    Sums sums{0, 0};
    int row = part;
    for (; kBatch > 1 && row + (kBatch - 1) * parts < count;
         row += kBatch * parts) {
      Sums batch[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        batch[k] = row_column(row + k * parts, column);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) Add(&sums, batch[k]);
    }
    for (; row < count; row += parts) Add(&sums, row_column(row, column));
    shared.scratch[part * kMaxColumns + column] = sums;
  }
  __syncthreads();
  if (thread < columns) {
    Sums sums = shared.scratch[thread];
    for (int p = 1; p < parts; ++p) {
      Add(&sums, shared.scratch[p * kMaxColumns + thread]);
    }
    shared.total[thread] = sums;
  }
  __syncthreads();
}

// Returns the sum of one column over the blocks of the team. It is valid in
// thread 0. All threads of the block call it.
__device__ __forceinline__ Sums AddColumn(const Tiling& tiling,
                                          const SharedMemory& shared,
                                          const Sums* partials, int column) {
  const int thread = static_cast<int>(threadIdx.x);
  Sums sums{0, 0};
  for (int rank = thread; rank < tiling.team; rank += kThreads) {
    Add(&sums, LoadSums(partials + rank * tiling.columns + column));
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    Add(&sums, ExchangeLanes(sums, distance));
  }
  if (thread % 32 == 0) shared.scratch[thread / 32] = sums;
  __syncthreads();
  if (thread == 0) {
    for (int w = 1; w < kWarps; ++w) Add(&sums, shared.scratch[w]);
  }
  __syncthreads();
  return sums;
}

// Waits for the other blocks of the team. All of them are on the device,
// because the launch is cooperative; otherwise the wait would never end.
__device__ __forceinline__ void TeamBarrier(uint32_t* counter,
                                            uint32_t arrivals) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1u);
    while (LoadAcquire(counter) < arrivals) __nanosleep(32);
  }
  __syncthreads();
}

// Stores this block's sums where all blocks of the team can read them, and
// returns the partial sums of the whole team.
__device__ __forceinline__ Sums* StorePartials(const Tiling& tiling,
                                               const SharedMemory& shared,
                                               const Workspace& workspace,
                                               int64_t slab, int rank) {
  const int thread = static_cast<int>(threadIdx.x);
  const int columns = tiling.columns;
  Sums* partials = workspace.partials + slab * tiling.team * columns;
  if (thread < columns)
    partials[rank * columns + thread] = shared.block[thread];
  return partials;
}

// Sets shared.total to the sums of the team's blocks, of which kBatch are read
// at a time. All threads of the block call it.
template <int kBatch>
__device__ __forceinline__ void AddPartials(const Tiling& tiling,
                                            const SharedMemory& shared,
                                            const Sums* partials) {
  AddRows<kBatch>(tiling, shared, tiling.team, [&](int row, int column) {
    return LoadSums(partials + row * tiling.columns + column);
  });
}

// Sets shared.total for a team that consists of this block alone.
__device__ __forceinline__ void KeepBlockSums(const Tiling& tiling,
                                              const SharedMemory& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < tiling.columns) shared.total[thread] = shared.block[thread];
  __syncthreads();
}

// Sets shared.total to the sums of the whole team, in each of its blocks.
// block_reduction is kSingleBlock, kCluster or kBarrier. All threads of the
// block call it, and shared.block must be complete.
__device__ __forceinline__ void AddTeam(const Tiling& tiling,
                                        const SharedMemory& shared,
                                        const Workspace& workspace,
                                        BlockReduction block_reduction,
                                        int64_t slab, int rank) {
  if (block_reduction == BlockReduction::kSingleBlock) {
    KeepBlockSums(tiling, shared);
    return;
  }
  if (block_reduction == BlockReduction::kCluster) {
    ClusterBarrier();
    AddRows<1>(tiling, shared, tiling.team, [&](int row, int column) {
      return LoadFromBlock(shared.block + column, static_cast<uint32_t>(row));
    });
    // No block may leave, or reuse shared.block, while others read it.
    ClusterBarrier();
    return;
  }
  Sums* partials = StorePartials(tiling, shared, workspace, slab, rank);
  uint32_t* counter = workspace.counters + slab;
  const uint32_t team = static_cast<uint32_t>(tiling.team);
  TeamBarrier(counter, team);
  if (tiling.team <= kMergeAlone) {
    AddPartials<1>(tiling, shared, partials);
    return;
  }
  const int thread = static_cast<int>(threadIdx.x);
  const int columns = tiling.columns;
  Sums* totals = workspace.totals + slab * columns;
  for (int column = rank; column < columns; column += tiling.team) {
    const Sums sums = AddColumn(tiling, shared, partials, column);
    if (thread == 0) totals[column] = sums;
  }
  TeamBarrier(counter, 2 * team);
  if (thread < columns) shared.total[thread] = LoadSums(totals + thread);
  __syncthreads();
}

// Does the same without waiting. block_reduction is kSingleBlock or kLastBlock.
// Returns true in the block that arrives last, which alone has the sums. All
// threads of the block call it.
__device__ __forceinline__ bool AddTeamInLast(const Tiling& tiling,
                                              const SharedMemory& shared,
                                              const Workspace& workspace,
                                              BlockReduction block_reduction,
                                              int64_t slab, int rank) {
  if (block_reduction == BlockReduction::kSingleBlock) {
    KeepBlockSums(tiling, shared);
    return true;
  }
  Sums* partials = StorePartials(tiling, shared, workspace, slab, rank);
  __syncthreads();
  uint32_t before = 0;
  const bool first = threadIdx.x == 0;
  if (first) {
    __threadfence();
    before = atomicAdd(workspace.counters + slab, 1u);
    __threadfence();
  }
  const bool is_last =
      __syncthreads_or(before + 1 == static_cast<uint32_t>(tiling.team) &&
                       first) != 0;
  // One block reads what hundreds of blocks wrote, and each read takes most of
  // a microsecond.
  if (is_last) AddPartials<8>(tiling, shared, partials);
  return is_last;
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_TEAM_SUMS_CUH_
