// The elementwise pass of forward.

#ifndef JAX_BNAR_CUDA_DEVICE_NORMALISE_CUH_
#define JAX_BNAR_CUDA_DEVICE_NORMALISE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/slab.cuh"
#include "cuda/device/statistics.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"
#include "native/numerics.h"

namespace jax_bnar {
namespace cuda {

// What turns an element of one channel into y.
template <typename A>
struct ForwardConstants {
  A mean;
  A multiplier;
  A bias;

  __device__ __forceinline__ A Apply(A x, bool residual, A z, bool relu) const {
    A value = MultiplyAdd(Subtract(x, mean), multiplier, bias);
    if (residual) value = Add(value, z);
    if (relu) value = value <= 0 ? A{0} : value;  // NaN stays
    return value;
  }
};

template <typename A>
__device__ __forceinline__ ForwardConstants<A> ForwardConstantsOf(
    const AffineOperands& affine, int64_t channels, int64_t group,
    int64_t channel, A mean, A var) {
  const A scale = ElementOr<A>(affine.scale, channels, group, channel, A{1});
  return {mean, Multiplier(scale, var, affine.epsilon),
          ElementOr<A>(affine.bias, channels, group, channel, A{0})};
}

template <typename A>
__device__ __forceinline__ void SetForwardConstants(const ForwardParameters& p,
                                                    const SharedMemory& shared,
                                                    int column, int64_t group,
                                                    int64_t channel, A mean,
                                                    A var) {
  const ForwardConstants<A> constants = ForwardConstantsOf(
      p.affine, p.tiling.shape.channels, group, channel, mean, var);
  shared.Constant<A>(kMean)[column] = constants.mean;
  shared.Constant<A>(kMultiplier)[column] = constants.multiplier;
  shared.Constant<A>(kBias)[column] = constants.bias;
}

// Residual vectors of one batch of tiles, in the order of the elementwise pass:
// last tile first.
template <typename T, int kElements, int kBatch>
__device__ __forceinline__ void LoadResidual(const Slab<kElements>& slab,
                                             const T* z, int done,
                                             Vector<T, kElements>* batch) {
  if (z == nullptr) return;
#pragma unroll
  for (int k = 0; k < kBatch; ++k) {
    const int tile = slab.tiles() - 1 - done - k;
    if (tile >= 0 && slab.Has(tile)) {
      batch[k] = LoadVector<Reuse::kNever, kElements>(z + slab.Offset(tile));
    }
  }
}

template <typename T, int kElements>
class Normaliser {
 public:
  using A = Accumulator<T>;

  __device__ __forceinline__ Normaliser(const ForwardParameters& p,
                                        const SharedMemory& shared,
                                        const Slab<kElements>& slab)
      : slab_(slab),
        y_(static_cast<T*>(p.buffers.y)),
        mask_(p.buffers.mask == nullptr
                  ? nullptr
                  : p.buffers.mask +
                        slab.group() * p.tiling.shape.mask_bytes_per_group()),
        relu_(p.buffers.relu),
        residual_(p.buffers.z != nullptr),
        constants_(shared.Constant<A>(0) + slab.FirstConstant()) {}

  __device__ __forceinline__ void Store(int tile, const Vector<T, kElements>& x,
                                        const Vector<T, kElements>& z) const {
    const auto mean = LoadConstants<kElements>(constants_);
    const auto multiplier =
        LoadConstants<kElements>(NextConstant(constants_, kMultiplier));
    const auto bias = LoadConstants<kElements>(NextConstant(constants_, kBias));
    Vector<T, kElements> y{};
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const ForwardConstants<A> constants{mean[i], multiplier[i], bias[i]};
      y.Set(i, constants.Apply(x.Get(i), residual_, z.Get(i), relu_));
      bits |= (y.Get(i) > 0 ? 1u : 0u) << i;
    }
    const int64_t offset = slab_.Offset(tile);
    StoreVector<Reuse::kNever>(y_ + offset, y);
    // Single elements share their byte: PackMask writes it then.
    if (kElements == 8 && mask_ != nullptr) {
      mask_[slab_.Bit(offset) / 8] = static_cast<uint8_t>(bits);
    }
  }

 private:
  const Slab<kElements>& slab_;
  T* y_;
  uint8_t* mask_;
  bool relu_;
  bool residual_;
  const A* constants_;
};

// The elementwise pass, last tile first: those are on chip, then in L2. `early`
// has the residual of the tiles in registers, or else of the first batch.
template <typename T, int kElements, int kHeld, int kBatch>
__device__ __forceinline__ void NormaliseTiles(
    const ForwardParameters& p, const SharedMemory& shared,
    const Slab<kElements>& slab, const Held<T, kElements, kHeld>& held,
    Vector<T, kElements>* early) {
  const Normaliser<T, kElements> normaliser(p, shared, slab);
  const T* x = static_cast<const T*>(p.buffers.x);
  const T* z = static_cast<const T*>(p.buffers.z);
  const TilePlacement placement(slab.tiles(), kHeld, p.tiling.shared_tiles);
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int done = 0; done < kHeld; done += kBatch) {
      if (done > 0) LoadResidual<T, kElements, kBatch>(slab, z, done, early);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int tile = slab.tiles() - 1 - done - k;
        const int i = kHeld - 1 - done - k;
        if (i >= 0 && tile >= 0 && slab.Has(tile)) {
          normaliser.Store(tile, held.vectors[i < 0 ? 0 : i], early[k]);
        }
      }
    }
  }
  for (int done = kHeld; done < slab.tiles(); done += kBatch) {
    Vector<T, kElements> batch[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int tile = slab.tiles() - 1 - done - k;
      if (tile < 0 || !slab.Has(tile)) continue;
      if (tile >= placement.shared_begin) {
        batch[k] =
            LoadTile<T, kElements>(shared, tile - placement.shared_begin);
      } else {
        batch[k] = LoadVector<Reuse::kNever, kElements>(x + slab.Offset(tile));
      }
    }
    if (done > 0) LoadResidual<T, kElements, kBatch>(slab, z, done, early);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int tile = slab.tiles() - 1 - done - k;
      if (tile >= 0 && slab.Has(tile)) {
        normaliser.Store(tile, batch[k], early[k]);
      }
    }
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_NORMALISE_CUH_
