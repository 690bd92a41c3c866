// The elementwise pass of forward, going along memory, for planes whose size is
// not a multiple of a vector's: inference and synchronised training in NCHW at
// 14x14 and 7x7. A vector may begin in one plane and end in the next, which
// belongs to another channel.

#ifndef JAX_BNAR_CUDA_DEVICE_NORMALISE_FLAT_CUH_
#define JAX_BNAR_CUDA_DEVICE_NORMALISE_FLAT_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/curves.cuh"
#include "cuda/device/intrinsics.cuh"
#include "cuda/device/normalise.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"
#include "native/numerics.h"

namespace jax_bnar {
namespace cuda {

// A block's share of a group. It may begin and end in the middle of a plane.
struct FlatRange {
  __device__ __forceinline__ explicit FlatRange(const FlatTiling& tiling) {
    const Shape& shape = tiling.shape;
    group = Quotient(blockIdx.x, tiling.blocks_per_group);
    const int64_t begin = (blockIdx.x - group * tiling.blocks_per_group) *
                          tiling.elements_per_block;
    const int64_t left = shape.group_size() - begin;
    elements = static_cast<int>(
        left < tiling.elements_per_block ? left : tiling.elements_per_block);
    base = group * shape.group_size() + begin;
    first_plane = Quotient(begin, shape.inner);
    before = static_cast<int>(begin - first_plane * shape.inner);
    planes = (before + elements - 1) / static_cast<int>(shape.inner) + 1;
  }

  int64_t group;
  int64_t base;         // The first element, counted in the array.
  int64_t first_plane;  // Counted in the group.
  int before;           // Elements of that plane that other blocks have.
  int elements;
  int planes;
};

// The constants of the planes that a block meets, in shared memory, whose size
// PlanFlat of host/plan.cc computes. All threads of the block construct it, and
// need a barrier before they use it.
template <typename A>
class FlatConstants {
 public:
  __device__ __forceinline__ FlatConstants(const ForwardParameters& p,
                                           const FlatTiling& tiling,
                                           const FlatRange& range)
      : means_(reinterpret_cast<A*>(DynamicShared())),
        multipliers_(means_ + range.planes),
        biases_(multipliers_ + range.planes) {
    const int64_t channels = tiling.shape.channels;
    for (int i = static_cast<int>(threadIdx.x); i < range.planes;
         i += kThreads) {
      const int64_t plane = range.first_plane + i;
      const int64_t channel = plane - Quotient(plane, channels) * channels;
      const ForwardConstants<A> constants = ForwardConstantsOf(
          p.affine, channels, range.group, channel,
          ElementOr<A>(p.given_mean, channels, range.group, channel, A{0}),
          ElementOr<A>(p.given_var, channels, range.group, channel, A{0}));
      means_[i] = constants.mean;
      multipliers_[i] = constants.multiplier;
      biases_[i] = constants.bias;
    }
  }

  // Planes are counted from the block's first one.
  __device__ __forceinline__ ForwardConstants<A> Of(int plane) const {
    return {means_[plane], multipliers_[plane], biases_[plane]};
  }

 private:
  A* means_;
  A* multipliers_;
  A* biases_;
};

// Loads the first `count` elements one by one.
template <typename T>
__device__ __forceinline__ Values<Accumulator<T>, kWidth> LoadSingly(
    const T* address, int count) {
  Values<Accumulator<T>, kWidth> values{};
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (i < count) {
      values[i] = LoadVector<Reuse::kNever, 1>(address + i).Get()[0];
    }
  }
  return values;
}

template <typename T>
__device__ __forceinline__ void StoreSingly(
    T* address, int count, const Values<Accumulator<T>, kWidth>& values) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (i < count) {
      Vector<T, 1> single;
      single.Set({{values[i]}});
      StoreVector<Reuse::kNever>(address + i, single);
    }
  }
}

// kCurve says whether there is another activation than ReLU.
template <typename T, bool kCurve>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    NormaliseFlatKernel(const __grid_constant__ ForwardParameters p,
                        const __grid_constant__ FlatTiling tiling) {
  using A = Accumulator<T>;
  constexpr int kBatch =
      kFlatBytes / (kThreads * kWidth * static_cast<int>(sizeof(T)));
  const FlatRange range(tiling);
  const T* x = static_cast<const T*>(p.buffers.x) + range.base;
  const T* z = static_cast<const T*>(p.buffers.z);
  const bool residual = z != nullptr;
  if (residual) z += range.base;
  T* y = static_cast<T*>(p.buffers.y) + range.base;

  // These loads are in flight while the constants are computed. The results
  // later take the place of xs.
  Vector<T, kWidth> xs[kBatch]{}, zs[kBatch]{};
#pragma unroll
  for (int k = 0; k < kBatch; ++k) {
    const int at = (k * kThreads + static_cast<int>(threadIdx.x)) * kWidth;
    if (at + kWidth <= range.elements) {
      xs[k] = LoadVector<Reuse::kNever, kWidth>(x + at);
      if (residual) zs[k] = LoadVector<Reuse::kNever, kWidth>(z + at);
    }
  }

  const FlatConstants<A> constants(p, tiling, range);
  __syncthreads();

  const int inner = static_cast<int>(tiling.shape.inner);
  uint8_t* mask = p.buffers.mask;
  if (mask != nullptr) {
    mask += range.group * tiling.shape.mask_bytes_per_group() +
            (range.base - range.group * tiling.shape.group_size()) / 8;
  }
#pragma unroll
  for (int k = 0; k < kBatch; ++k) {
    const int at = (k * kThreads + static_cast<int>(threadIdx.x)) * kWidth;
    const int left = range.elements - at;
    if (left <= 0) continue;
    if (left < kWidth) {  // The end of a group cannot be read as a vector.
      xs[k].Set(LoadSingly(x + at, left));
      if (residual) zs[k].Set(LoadSingly(z + at, left));
    }
    const int plane = (range.before + at) / inner;
    const int in_plane = range.before + at - plane * inner;
    // The block's last plane has no successor.
    const int next = plane + 1 < range.planes ? plane + 1 : plane;
    const ForwardConstants<A> here = constants.Of(plane);
    const ForwardConstants<A> there = constants.Of(next);
    Values<A, kWidth> values = xs[k].Get();
    const Values<A, kWidth> zs_values = zs[k].Get();
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const bool is_here = in_plane + i < inner;
      values[i] = NormaliseElement(values[i], is_here ? here.mean : there.mean,
                                   is_here ? here.multiplier : there.multiplier,
                                   is_here ? here.bias : there.bias);
      if (residual) values[i] = Add(values[i], zs_values[i]);
    }
    uint32_t bits = 0;
    if constexpr (kCurve) {
      const Curve<T, kWidth> curve(p.buffers.activation);
      xs[k].Set(curve.Value(values));
      if (mask != nullptr) bits = curve.OpenBits(xs[k].Get());
    } else {
      xs[k].Set(values);
      if (p.buffers.activation.is_relu()) xs[k].Relu();
      bits = xs[k].PositiveBits();
    }
    if (left < kWidth) {
      StoreSingly(y + at, left, xs[k].Get());
      bits &= (1u << left) - 1u;
    } else {
      StoreVector<Reuse::kNever>(y + at, xs[k]);
    }
    if (mask != nullptr) mask[at / 8] = static_cast<uint8_t>(bits);
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_NORMALISE_FLAT_CUH_
