// y = act((x - mean) * a + b + z). ForwardKernel computes mean and var in the
// same launch, StatisticsKernel computes only them, and NormaliseKernel is
// given them.

#ifndef JAX_BNAR_CUDA_DEVICE_FORWARD_CUH_
#define JAX_BNAR_CUDA_DEVICE_FORWARD_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/normalise.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/slab.cuh"
#include "cuda/device/statistics.cuh"
#include "cuda/device/team_sums.cuh"
#include "cuda/device/tile_stream.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"
#include "native/numerics.h"

namespace jax_bnar {
namespace cuda {

// Computes mean and variance from the team's sums. If `store`, writes them to
// memory; if `constants`, completes the constants of the elementwise pass, for
// which LoadAffine has been called. All threads of the block call it.
template <typename T, typename SlabOf>
__device__ __forceinline__ void FinishStatistics(const ForwardParameters& p,
                                                 const SharedMemory& shared,
                                                 const SlabOf& slab, bool store,
                                                 bool constants) {
  using A = Accumulator<T>;
  const Tiling& tiling = p.tiling;
  const int column = static_cast<int>(threadIdx.x);
  if (slab.HasColumn(column)) {
    const int64_t channel = slab.channel(column);
    const Shape& shape = tiling.shape;
    const double count = static_cast<double>(shape.count());
    const A origin = shared.Constant<A>(kOrigin)[column];
    const Sums sums = shared.sums[column];
    const A mean = MeanOf(origin, sums.first, count);
    const A var =
        VarianceOf<A>(SquaredDeviations(sums.first, sums.second, count), count);
    if (store) {
      const int64_t i = slab.group() * shape.channels + channel;
      static_cast<A*>(p.mean)[i] = mean;
      static_cast<A*>(p.var)[i] = var;
    }
    if (constants) {
      SetForwardConstants(p, shared, column, mean, var);
    }
  }
  __syncthreads();
}

template <typename T, Layout kLayout, int kElements, typename Form>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    ForwardKernel(const __grid_constant__ ForwardParameters p) {
  using SlabOf = Slab<T, kLayout, kElements>;
  const SharedMemory shared;
  const BlockPosition position(p.tiling, /*last_first=*/false);
  TileStream<T, kLayout, kElements, kForwardArrays> stream(
      p.tiling, shared, {{p.buffers.x}, {true}});
  for (int64_t index = position.team; index < p.tiling.num_slabs;
       index += p.tiling.num_teams) {
    const SlabOf slab(p.tiling, index, position.rank);
    stream.Start(slab);
    SumStatistics<T, kElements, /*kKeep=*/true>(
        p.tiling, shared, slab, static_cast<const T*>(p.buffers.x), &stream);
    PrefetchMailboxes(p.tiling, p.workspace, p.block_reduction, index,
                      position.rank);
    AddTeam(p.tiling, shared, p.workspace, p.block_reduction, index,
            position.rank, [&] {
              LoadAffine<Accumulator<T>>(p, shared, slab, ColumnMeanwhile());
            });
    const SlabOf again = slab.Again();
    FinishStatistics<T>(p, shared, again, /*store=*/position.rank == 0,
                        /*constants=*/true);
    NormaliseTiles<T, kElements, /*kKeep=*/true, Form>(p, shared, again,
                                                       &stream);
  }
}

template <typename T, Layout kLayout, int kElements>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    StatisticsKernel(const __grid_constant__ ForwardParameters p) {
  const SharedMemory shared;
  ForEachSlab<T, kLayout, kElements>(
      p.tiling, /*last_first=*/false,
      [&](const auto& slab, int64_t index, int rank) {
        SumStatistics<T, kElements, /*kKeep=*/false>(
            p.tiling, shared, slab, static_cast<const T*>(p.buffers.x));
        if (AddTeamInLast(p.tiling, shared, p.workspace, p.block_reduction,
                          index, rank)) {
          FinishStatistics<T>(p, shared, slab, /*store=*/true,
                              /*constants=*/false);
        }
      });
}

// Sets the constants of one column from given statistics.
template <typename A, typename SlabOf>
__device__ __forceinline__ void SetGivenConstants(const ForwardParameters& p,
                                                  const SharedMemory& shared,
                                                  const SlabOf& slab,
                                                  int column) {
  const int64_t channels = p.tiling.shape.channels;
  const int64_t channel = slab.channel(column);
  LoadAffine<A>(p, shared, slab, column);
  SetForwardConstants(
      p, shared, column,
      ElementOr<A>(p.given_mean, channels, slab.group(), channel, A{0}),
      ElementOr<A>(p.given_var, channels, slab.group(), channel, A{0}));
}

template <typename T, Layout kLayout, int kElements, typename Form>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    NormaliseKernel(const __grid_constant__ ForwardParameters p) {
  using A = Accumulator<T>;
  const SharedMemory shared;
  ForEachSlab<T, kLayout, kElements>(
      p.tiling, /*last_first=*/true, [&](const auto& slab, int64_t, int) {
        const int column = static_cast<int>(threadIdx.x);
        __syncthreads();  // The constants of the previous slab are in use.
        if (slab.HasColumn(column)) {
          SetGivenConstants<A>(p, shared, slab, column);
        }
        __syncthreads();
        NormaliseTiles<T, kElements, /*kKeep=*/false, Form>(p, shared, slab);
      });
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_FORWARD_CUH_
