// dx = a * e + b * (x - mean) + k, where e is dy times the derivative of the
// activation. BackwardKernel computes the sums and the gradient in one
// launch, ReduceKernel only the sums, and ApplyKernel only the gradient.

#ifndef JAX_BNAR_CUDA_DEVICE_BACKWARD_CUH_
#define JAX_BNAR_CUDA_DEVICE_BACKWARD_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/gradient_apply.cuh"
#include "cuda/device/gradient_sums.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/slab.cuh"
#include "cuda/device/team_sums.cuh"
#include "cuda/device/tile_stream.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// Where there is a dz, the second pass reads it instead of dy.
template <typename Form>
constexpr bool kReadsDyAgain = !Form::kStoreDz;
template <>
inline constexpr bool kReadsDyAgain<AnyForm> = false;  // nothing is copied

template <typename T, Layout kLayout, int kElements, typename Form>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    BackwardKernel(const __grid_constant__ BackwardParameters p) {
  using A = Accumulator<T>;
  using SlabOf = Slab<T, kLayout, kElements>;
  const SharedMemory shared;
  const BlockPosition position(p.tiling, /*last_first=*/false);
  TileStream<T, kLayout, kElements, kBackwardArrays> stream(
      p.tiling, shared,
      {{p.buffers.dy, p.buffers.x}, {kReadsDyAgain<Form>, true}});
  for (int64_t index = position.team; index < p.tiling.num_slabs;
       index += p.tiling.num_teams) {
    const SlabOf slab(p.tiling, index, position.rank);
    stream.Start(slab);
    SetReduceConstants<A>(p, shared, slab);
    SumGradients<T, kElements, /*kKeep=*/true, Form>(p, shared, slab, &stream);
    PrefetchMailboxes(p.tiling, p.workspace, p.block_reduction, index,
                      position.rank);
    AddTeam(p.tiling, shared, p.workspace, p.block_reduction, index,
            position.rank, [&] {
              // For compute capability 9.0, ptxas of CUDA 13.0 spills where
              // this is computed anew; that of 13.4 and 13.5, and any for 8.0,
              // where it is not.
              if constexpr (kArchitecture == 900 && kCudaVersion < 1301) {
                LoadVarAndScale<A>(p, shared, slab, ColumnMeanwhile());
              } else {
                LoadVarAndScale<A>(p, shared, slab.Again(), ColumnMeanwhile());
              }
            });
    const SlabOf again = slab.Again();
    SetApplyConstants<A>(p, shared, again, /*store=*/position.rank == 0);
    ApplyTiles<T, kElements, /*kKeep=*/true, Form>(p, shared, again, &stream);
  }
}

// Stores the totals of a slab: in the workspace, for an ApplyKernel that
// follows, if `whole`; otherwise as the caller's result. All threads of the
// block that has the totals call it.
template <typename A, typename SlabOf>
__device__ __forceinline__ void StoreTotals(const BackwardParameters& p,
                                            const SharedMemory& shared,
                                            const SlabOf& slab, int64_t index,
                                            bool whole) {
  const int column = static_cast<int>(threadIdx.x);
  if (column >= p.tiling.columns) return;
  const Sums sums = shared.sums[column];
  if (whole) {
    p.workspace.totals[index * p.tiling.columns + column] = sums;
  } else if (slab.HasColumn(column)) {
    const int64_t i =
        slab.group() * p.tiling.shape.channels + slab.channel(column);
    static_cast<A*>(p.first)[i] = static_cast<A>(sums.first);
    static_cast<A*>(p.second)[i] = static_cast<A>(sums.second);
  }
}

// Sets b and k: from the totals that StoreTotals left in the workspace if
// `whole`, otherwise from the caller's. All threads of the block call it.
template <typename A, typename SlabOf>
__device__ __forceinline__ void LoadApplyConstants(const BackwardParameters& p,
                                                   const SharedMemory& shared,
                                                   const SlabOf& slab,
                                                   int64_t index, bool whole,
                                                   bool store) {
  const int column = static_cast<int>(threadIdx.x);
  if (whole) {
    if (column < p.tiling.columns) {
      shared.sums[column] =
          LoadSums(p.workspace.totals + index * p.tiling.columns + column);
    }
    LoadVarAndScale<A>(p, shared, slab, column);
    SetApplyConstants<A>(p, shared, slab, store);
    return;
  }
  if (slab.HasColumn(column)) {
    const int64_t channels = p.tiling.shape.channels;
    shared.Constant<A>(kCentredMultiplier)[column] =
        ElementOr<A>(p.b, channels, slab.group(), slab.channel(column), A{0});
    shared.Constant<A>(kConstantTerm)[column] =
        ElementOr<A>(p.k, channels, slab.group(), slab.channel(column), A{0});
  }
  __syncthreads();
}

// If `whole`, the sums are for an ApplyKernel that follows; otherwise they are
// the caller's result.
template <typename T, Layout kLayout, int kElements, typename Form>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    ReduceKernel(const __grid_constant__ BackwardParameters p, bool whole) {
  using A = Accumulator<T>;
  const SharedMemory shared;
  ForEachSlab<T, kLayout, kElements>(
      p.tiling, /*last_first=*/false,
      [&](const auto& slab, int64_t index, int rank) {
        SetReduceConstants<A>(p, shared, slab);
        SumGradients<T, kElements, /*kKeep=*/false, Form>(p, shared, slab);
        if (AddTeamInLast(p.tiling, shared, p.workspace, p.block_reduction,
                          index, rank)) {
          StoreTotals<A>(p, shared, slab, index, whole);
        }
      });
}

// If `whole`, the kernel takes the sums of a ReduceKernel; otherwise it takes
// the caller's b and k.
template <typename T, Layout kLayout, int kElements, typename Form>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    ApplyKernel(const __grid_constant__ BackwardParameters p, bool whole) {
  using A = Accumulator<T>;
  const SharedMemory shared;
  ForEachSlab<T, kLayout, kElements>(
      p.tiling, /*last_first=*/true,
      [&](const auto& slab, int64_t index, int rank) {
        SetReduceConstants<A>(p, shared, slab);
        LoadApplyConstants<A>(p, shared, slab, index, whole,
                              /*store=*/rank == 0);
        ApplyTiles<T, kElements, /*kKeep=*/false, Form>(p, shared, slab);
      });
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_BACKWARD_CUH_
