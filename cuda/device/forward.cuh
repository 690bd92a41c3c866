// y = act((x - mean) * a + b + z), with mean and var computed in the same
// launch (ForwardKernel), alone (StatisticsKernel), or given (NormaliseKernel).

#ifndef JAX_BNAR_CUDA_DEVICE_FORWARD_CUH_
#define JAX_BNAR_CUDA_DEVICE_FORWARD_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/normalise.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/slab.cuh"
#include "cuda/device/statistics.cuh"
#include "cuda/device/team_sums.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"
#include "cuda/host/plan.h"
#include "native/numerics.h"

namespace jax_bnar {
namespace cuda {

// Mean and variance from the team's sums: stored by the first block, and made
// the constants of the elementwise pass. All threads of the block call it.
template <typename T, int kElements>
__device__ __forceinline__ void FinishStatistics(const ForwardParameters& p,
                                                 const SharedMemory& shared,
                                                 const Slab<kElements>& slab,
                                                 bool store, bool constants) {
  using A = Accumulator<T>;
  const Tiling& tiling = p.tiling;
  const int column = static_cast<int>(threadIdx.x);
  if (slab.HasConstant(column)) {
    const int64_t channel = slab.channel(column);
    const Shape& shape = tiling.shape;
    const double count = static_cast<double>(shape.count());
    const A origin = shared.Constant<A>(kOrigin)[tiling.planes ? 0 : column];
    const Sums sums = shared.total[tiling.planes ? 0 : column];
    const A mean = MeanOf(origin, sums.first, count);
    const A var =
        VarianceOf<A>(SquaredDeviations(sums.first, sums.second, count), count);
    if (store && slab.HasColumn(column)) {
      const int64_t i = slab.group() * shape.channels + channel;
      static_cast<A*>(p.mean)[i] = mean;
      static_cast<A*>(p.var)[i] = var;
    }
    if (constants) {
      SetForwardConstants(p, shared, column, slab.group(), channel, mean, var);
    }
  }
  __syncthreads();
}

template <typename T, int kElements, int kHeld>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    ForwardKernel(const __grid_constant__ ForwardParameters p) {
  constexpr int kBatch = kBatchOf<T, kElements, 4>;
  const SharedMemory shared;
  const BlockPosition position(p.tiling, /*last_first=*/false);
  for (int64_t index = position.team; index < p.tiling.num_slabs;
       index += p.tiling.num_teams) {
    const Slab<kElements> slab(p.tiling, index, position.rank);
    Held<T, kElements, kHeld> held{};
    SumStatistics<T, kElements, kHeld>(
        p.tiling, shared, slab, static_cast<const T*>(p.buffers.x), held);
    // On their way while the team adds its sums. The first tiles are those in
    // registers; the batch after them loads its own.
    Vector<T, kElements> early[kBatch]{};
    LoadResidual<T, kElements, (kHeld > 0 ? kHeld : kBatch)>(
        slab, static_cast<const T*>(p.buffers.z), 0, early);
    AddTeam(p.tiling, shared, p.workspace, p.block_reduction, index,
            position.rank);
    FinishStatistics<T>(p, shared, slab, /*store=*/position.rank == 0,
                        /*constants=*/true);
    NormaliseTiles<T, kElements, kHeld, kBatch>(p, shared, slab, held, early);
  }
}

template <typename T, int kElements>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    StatisticsKernel(const __grid_constant__ ForwardParameters p) {
  const SharedMemory shared;
  const BlockPosition position(p.tiling, /*last_first=*/false);
  for (int64_t index = position.team; index < p.tiling.num_slabs;
       index += p.tiling.num_teams) {
    const Slab<kElements> slab(p.tiling, index, position.rank);
    Held<T, kElements, 0> held{};
    SumStatistics<T, kElements, 0>(p.tiling, shared, slab,
                                   static_cast<const T*>(p.buffers.x), held);
    if (AddTeamInLast(p.tiling, shared, p.workspace, p.block_reduction, index,
                      position.rank)) {
      FinishStatistics<T>(p, shared, slab, /*store=*/true,
                          /*constants=*/false);
    }
  }
}

template <typename T, int kElements>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    NormaliseKernel(const __grid_constant__ ForwardParameters p) {
  using A = Accumulator<T>;
  constexpr int kBatch = kBatchOf<T, kElements, 4>;
  const SharedMemory shared;
  const BlockPosition position(p.tiling, /*last_first=*/true);
  for (int64_t index = position.team; index < p.tiling.num_slabs;
       index += p.tiling.num_teams) {
    const Slab<kElements> slab(p.tiling, index, position.rank);
    Vector<T, kElements> early[kBatch]{};
    LoadResidual<T, kElements, kBatch>(slab, static_cast<const T*>(p.buffers.z),
                                       0, early);
    const int column = static_cast<int>(threadIdx.x);
    __syncthreads();  // the constants of the slab before are still in use
    if (slab.HasConstant(column)) {
      const int64_t channel = slab.channel(column);
      const int64_t channels = p.tiling.shape.channels;
      SetForwardConstants(
          p, shared, column, slab.group(), channel,
          ElementOr<A>(p.given_mean, channels, slab.group(), channel, A{0}),
          ElementOr<A>(p.given_var, channels, slab.group(), channel, A{0}));
    }
    __syncthreads();
    const Held<T, kElements, 0> held{};
    NormaliseTiles<T, kElements, 0, kBatch>(p, shared, slab, held, early);
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_FORWARD_CUH_
