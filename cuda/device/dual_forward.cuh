// y = act((x1 - mean1) * a1 + (x2 - mean2) * a2 + bias), where bias is the sum
// of both biases. The statistics of x1 and x2 are computed by
// DualStatisticsKernel or given. Parameters of x1 come first; its buffers are
// those of the call, with x2 in the place of z.

#ifndef JAX_BNAR_CUDA_DEVICE_DUAL_FORWARD_CUH_
#define JAX_BNAR_CUDA_DEVICE_DUAL_FORWARD_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/dual_shared_memory.cuh"
#include "cuda/device/forms.cuh"
#include "cuda/device/forward.cuh"
#include "cuda/device/normalise.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/slab.cuh"
#include "cuda/device/statistics.cuh"
#include "cuda/device/team_sums.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"
#include "native/numerics.h"

namespace jax_bnar {
namespace cuda {

// Computes y from the constants that the thread has in registers. Forward and
// the gate of backward both call it, because the same operations give the same
// sign. With kAgain it is for one vector.
template <typename T, int kElements, bool kRelu, bool kAgain = false>
class DualNormaliser {
 public:
  using A = Accumulator<T>;
  using V = Vector<T, kElements>;

  template <typename SlabOf>
  __device__ __forceinline__ DualNormaliser(const DualSharedMemory& shared,
                                            const SlabOf& slab) {
    const SharedMemory& second = shared.second;
    mean1_ = LoadConstants<A, kElements, kAgain>(shared, kMean, slab);
    mean2_ = LoadConstants<A, kElements, kAgain>(second, kMean, slab);
    multiplier1_ =
        LoadConstants<A, kElements, kAgain>(shared, kMultiplier, slab);
    multiplier2_ =
        LoadConstants<A, kElements, kAgain>(second, kMultiplier, slab);
    bias_ = LoadConstants<A, kElements, kAgain>(shared, kBias, slab);
  }

  // What comes before the activation, not rounded.
  __device__ __forceinline__ Values<A, kElements> Unrounded(const V& x1,
                                                            const V& x2) const {
    Values<A, kElements> values = x1.Get();
    const Values<A, kElements> others = x2.Get();
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      values[i] = NormaliseElement(
          others[i], mean2_[i], multiplier2_[i],
          NormaliseElement(values[i], mean1_[i], multiplier1_[i], bias_[i]));
    }
    return values;
  }

  // The same, rounded.
  __device__ __forceinline__ V Rounded(const V& x1, const V& x2) const {
    V y;
    y.Set(Unrounded(x1, x2));
    return y;
  }

  // y, of which another activation than ReLU is not computed here.
  __device__ __forceinline__ V Of(const V& x1, const V& x2) const {
    V y = Rounded(x1, x2);
    if constexpr (kRelu) y.Relu();
    return y;
  }

 private:
  Values<A, kElements> mean1_;
  Values<A, kElements> mean2_;
  Values<A, kElements> multiplier1_;
  Values<A, kElements> multiplier2_;
  Values<A, kElements> bias_;
};

// A team takes the slabs of x1 and x2 in turn, so that the ends of both are
// what L2 holds afterwards.
template <typename T, Layout kLayout, int kElements>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    DualStatisticsKernel(const __grid_constant__ ForwardParameters first,
                         const __grid_constant__ ForwardParameters second) {
  const Tiling& tiling = first.tiling;
  const SharedMemory shared;
  const BlockPosition position(tiling, /*last_first=*/false);
  for (int64_t index = position.team; index < tiling.num_slabs;
       index += tiling.num_teams) {
    const ForwardParameters& p = index % 2 == 0 ? first : second;
    const Slab<T, kLayout, kElements> slab(tiling, index / 2, position.rank);
    SumStatistics<T, kElements, /*kKeep=*/false>(
        tiling, shared, slab, static_cast<const T*>(p.buffers.x));
    if (AddTeamInLast(tiling, shared, first.workspace, first.block_reduction,
                      index, position.rank)) {
      FinishStatistics<T>(p, shared, slab, /*store=*/true,
                          /*constants=*/false);
    }
  }
}

// `Form` is a ForwardForm with a residual, x2, or AnyForm.
template <typename T, Layout kLayout, int kElements, typename Form>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    DualNormaliseKernel(const __grid_constant__ ForwardParameters first,
                        const __grid_constant__ ForwardParameters second) {
  using A = Accumulator<T>;
  const Tiling& tiling = first.tiling;
  const DualSharedMemory shared;
  ForEachSlab<T, kLayout, kElements, /*kInputs=*/2>(
      tiling, /*last_first=*/true, [&](const auto& slab, int64_t, int) {
        const int column = static_cast<int>(threadIdx.x);
        __syncthreads();  // The constants of the previous slab are in use.
        if (slab.HasColumn(column)) {
          SetGivenConstants<A>(first, shared, slab, column);
          SetGivenConstants<A>(second, shared.second, slab, column);
          shared.AddConstants<A>(kBias, column);
        }
        __syncthreads();
        const auto normalise = [&](auto form) {
          using F = decltype(form);
          NormaliseTilesBy<T, kElements, /*kKeep=*/false, F,
                           DualNormaliser<T, kElements, F::kRelu>>(
              first, shared, slab);
        };
        if constexpr (std::is_same_v<Form, AnyForm>) {
          // Several threads with single elements share a byte of the mask, so
          // PackMask writes it afterwards.
          WithDualForwardForm(first.buffers.activation, /*mask=*/false,
                              normalise);
        } else {
          normalise(Form{});
        }
      });
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_DUAL_FORWARD_CUH_
