// The elementwise pass of backward.

#ifndef JAX_BNAR_CUDA_DEVICE_GRADIENT_APPLY_CUH_
#define JAX_BNAR_CUDA_DEVICE_GRADIENT_APPLY_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/gate.cuh"
#include "cuda/device/gradient_sums.cuh"
#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/slab.cuh"
#include "cuda/device/team_sums.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"
#include "native/numerics.h"

namespace jax_bnar {
namespace cuda {

// b and k, from the team's sums; `store` the gradients of scale and bias.
template <typename A, int kElements>
__device__ __forceinline__ void SetApplyConstants(const BackwardParameters& p,
                                                  const SharedMemory& shared,
                                                  const Slab<kElements>& slab,
                                                  bool store) {
  const int column = static_cast<int>(threadIdx.x);
  if (slab.HasConstant(column)) {
    const Shape& shape = p.tiling.shape;
    const int64_t channel = slab.channel(column);
    const auto at = [&](const VectorOperand& vector, A otherwise) {
      return ElementOr<A>(vector, shape.channels, slab.group(), channel,
                          otherwise);
    };
    const Sums sums = shared.total[p.tiling.planes ? 0 : column];
    const auto of = BackwardChannelOf<A>(
        at(p.operands.var, A{0}), at(p.operands.scale, A{1}),
        at(p.operands.dmean, A{0}), at(p.operands.dvar, A{0}),
        p.operands.epsilon, sums.first, sums.second,
        static_cast<double>(shape.count()));
    shared.Constant<A>(kCentredMultiplier)[column] = of.b;
    shared.Constant<A>(kConstantTerm)[column] = of.k;
    if (store && slab.HasColumn(column)) {
      const int64_t i = slab.group() * shape.channels + channel;
      static_cast<A*>(p.first)[i] = of.dbias;
      static_cast<A*>(p.second)[i] = of.dscale;
    }
  }
  __syncthreads();
}

template <typename T, int kElements>
class Applier {
 public:
  using A = Accumulator<T>;

  __device__ __forceinline__ Applier(const BackwardParameters& p,
                                     const SharedMemory& shared,
                                     const Slab<kElements>& slab)
      : slab_(slab),
        dx_(static_cast<T*>(p.dx)),
        constants_(shared.Constant<A>(kGateMean) + slab.FirstConstant()) {}

  __device__ __forceinline__ void Store(
      int tile, const GradientPair<T, kElements>& pair) const {
    const auto mean = LoadConstants<kElements>(constants_);
    const auto a =
        LoadConstants<kElements>(NextConstant(constants_, kGateMultiplier));
    const auto b =
        LoadConstants<kElements>(NextConstant(constants_, kCentredMultiplier));
    const auto k =
        LoadConstants<kElements>(NextConstant(constants_, kConstantTerm));
    Vector<T, kElements> dx{};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const A centred = Subtract(pair.x.Get(i), mean[i]);
      dx.Set(i, MultiplyAdd(a[i], pair.e.Get(i),
                            MultiplyAdd(b[i], centred, k[i])));
    }
    StoreVector<Reuse::kNever>(dx_ + slab_.Offset(tile), dx);
  }

 private:
  const Slab<kElements>& slab_;
  T* dx_;
  const A* constants_;
};

// The elementwise pass, last tile first: those are on chip, then in L2. What
// was not kept is read again: dz where the sums wrote it, else dy and what
// was saved for the gate.
template <typename T, int kElements>
__device__ __forceinline__ void ApplyTiles(const BackwardParameters& p,
                                           const SharedMemory& shared,
                                           const Slab<kElements>& slab) {
  constexpr int kBatch = kBatchOf<T, kElements, 2>;
  const Applier<T, kElements> applier(p, shared, slab);
  const TilePlacement placement(slab.tiles(), /*held=*/0,
                                p.tiling.shared_tiles);
  const bool gated = p.dz != nullptr;
  const T* dy = static_cast<const T*>(gated ? p.dz : p.buffers.dy);
  const T* x = static_cast<const T*>(p.buffers.x);
  const Gating<T, kElements> gate(
      p.tiling, p.buffers, gated ? Gate::kNone : p.buffers.gate, shared, slab);
  for (int done = 0; done < slab.tiles(); done += kBatch) {
    GradientPair<T, kElements> batch[kBatch];
    Saved<T, kElements> saved[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int tile = slab.tiles() - 1 - done - k;
      if (tile < 0 || !slab.Has(tile)) continue;
      if (tile >= placement.shared_begin) {
        batch[k] =
            LoadPair<T, kElements>(shared, tile - placement.shared_begin);
      } else {
        const int64_t offset = slab.Offset(tile);
        batch[k].e = LoadVector<Reuse::kNever, kElements>(dy + offset);
        batch[k].x = LoadVector<Reuse::kNever, kElements>(x + offset);
        gate.template Load<Reuse::kNever>(offset, &saved[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int tile = slab.tiles() - 1 - done - k;
      if (tile < 0 || !slab.Has(tile)) continue;
      if (tile < placement.shared_begin) {
        gate.Apply(batch[k].x, saved[k], &batch[k].e);
      }
      applier.Store(tile, batch[k]);
    }
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_GRADIENT_APPLY_CUH_
