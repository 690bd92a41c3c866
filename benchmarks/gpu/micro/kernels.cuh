// What the microbenchmark measures, without what it takes to measure it: these
// kernels also run in the host emulation (tests/native/cuda_micro_test.cu).

#ifndef JAX_BNAR_BENCHMARKS_GPU_MICRO_KERNELS_CUH_
#define JAX_BNAR_BENCHMARKS_GPU_MICRO_KERNELS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/team_sums.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace micro {

// Rows of `stride` bytes, cut into pieces as NHWC is cut into slabs: piece i of
// each row belongs to slab i. Both are multiples of 16.
struct Pieces {
  int64_t rows;
  int64_t stride;
  int piece;

  int slabs() const { return static_cast<int>(stride / piece); }
  int64_t bytes_of_slab() const { return rows * piece; }
};

__device__ __forceinline__ int64_t DivideUp(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Nanoseconds of a clock that all multiprocessors share.
__device__ __forceinline__ uint64_t GlobalTime() {
#ifdef JAX_BNAR_CUDA_EMULATION
  return 0;
#else
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
#endif
}

// Goes through the slabs [begin, end), one after the other: all blocks work on
// the same slab, and each has an equal share of its rows, as in a team, in
// which it goes forwards or, as in a second pass, backwards. With kDepth loads
// of 16 bytes of each thread in flight, it reads what is there and copies it to
// the same place of `to` if kStore. `read` gets the bits that each thread has
// read, combined by exclusive or, so that nothing is left out, and `ends` the
// time at which each block was done.
template <int kDepth, bool kStore>
__global__ void __launch_bounds__(cuda::kThreads)
    GoThroughPieces(const unsigned char* from, unsigned char* to, Pieces p,
                    int begin, int end, bool backwards, uint32_t* read,
                    uint64_t* ends) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads_of_row = p.piece / static_cast<int>(sizeof(uint4));
  const int rows_of_tile = cuda::kThreads / threads_of_row;
  const int64_t tiles = DivideUp(p.rows, rows_of_tile);
  const int64_t rows_of_block = DivideUp(tiles, gridDim.x) * rows_of_tile;
  const int64_t first = blockIdx.x * rows_of_block + thread / threads_of_row;
  const int64_t last =
      min(p.rows, static_cast<int64_t>(blockIdx.x + 1) * rows_of_block);
  const int count =
      first < last ? static_cast<int>(DivideUp(last - first, rows_of_tile)) : 0;
  const int64_t step = (backwards ? -1 : 1) * rows_of_tile * p.stride;
  const int64_t start =
      backwards ? first + int64_t{count - 1} * rows_of_tile : first;
  uint32_t bits = 0;
  for (int slab = begin; slab < end; ++slab) {
    const int64_t offset =
        start * p.stride + int64_t{slab} * p.piece +
        thread % threads_of_row * static_cast<int>(sizeof(uint4));
    const unsigned char* in = from + offset;
    unsigned char* out = to + offset;
    cuda::ForEachTile<kDepth, uint4>(
        count,
        [&](uint4* item) {
          *item = __ldcg(reinterpret_cast<const uint4*>(in));
          in += step;
        },
        [&](const uint4& item) {
          bits ^= item.x ^ item.y ^ item.z ^ item.w;
          if constexpr (kStore) {
            __stcg(reinterpret_cast<uint4*>(out), item);
            out += step;
          }
        });
  }
  read[blockIdx.x * cuda::kThreads + thread] = bits;
  __syncthreads();
  if (thread == 0) ends[blockIdx.x] = GlobalTime();
}

// What the kernels do between their passes, and nothing else: all blocks are a
// team, which adds sums by messages in each round. `totals` gets those of the
// last round, as the last block has them.
__global__ void __launch_bounds__(cuda::kThreads,
                                  cuda::kBlocksPerMultiprocessor)
    SendMessages(const __grid_constant__ cuda::Tiling tiling,
                 const __grid_constant__ cuda::Workspace workspace, int rounds,
                 bool prefetch, cuda::Sums* totals) {
  const cuda::SharedMemory shared;
  const int thread = static_cast<int>(threadIdx.x);
  const int rank = static_cast<int>(blockIdx.x);
  for (int round = 0; round < rounds; ++round) {
    if (prefetch) {
      cuda::PrefetchMailboxes(tiling, workspace, cuda::BlockReduction::kBarrier,
                              round, rank);
      // Instead of a first pass, during which the boxes come.
      __nanosleep(2000);
    }
    if (thread < tiling.columns) {
      shared.sums[thread] = {static_cast<double>(rank),
                             static_cast<double>(round + thread)};
    }
    __syncthreads();
    cuda::AddTeamByMessages(tiling, shared, workspace, round, rank, [] {});
  }
  if (rank == tiling.team - 1 && thread < tiling.columns) {
    totals[thread] = shared.sums[thread];
  }
}

// The same rounds without messages, whose time is subtracted.
__global__ void __launch_bounds__(cuda::kThreads,
                                  cuda::kBlocksPerMultiprocessor)
    SendNothing(int rounds, bool prefetch) {
  const cuda::SharedMemory shared;
  for (int round = 0; round < rounds; ++round) {
    if (prefetch) __nanosleep(2000);
    __syncthreads();
  }
}

__global__ void DoNothing() {}

}  // namespace micro
}  // namespace jax_bnar

#endif  // JAX_BNAR_BENCHMARKS_GPU_MICRO_KERNELS_CUH_
