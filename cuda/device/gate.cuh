// Where the gradient passes the ReLU.

#ifndef JAX_BNAR_CUDA_DEVICE_GATE_CUH_
#define JAX_BNAR_CUDA_DEVICE_GATE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/slab.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// Of both passes of backward, in shared memory.
enum BackwardConstant {
  kGateMean,
  kGateMultiplier,
  kGateBias,
  kCentredMultiplier,
  kConstantTerm
};

// y, or bits of the mask; nothing with the other gates.
template <typename T, int kElements>
struct Saved {
  Vector<T, kElements> y;
  uint32_t bits;
};

template <typename T, int kElements>
class Gating {
 public:
  using A = Accumulator<T>;

  __device__ __forceinline__ Gating(const Tiling& tiling,
                                    const GradientBuffers& buffers, Gate gate,
                                    const SharedMemory& shared,
                                    const Slab<kElements>& slab)
      : gate_(gate),
        slab_(slab),
        constants_(shared.Constant<A>(kGateMean) + slab.FirstConstant()) {
    if (gate_ == Gate::kMask) {
      mask_ = static_cast<const uint8_t*>(buffers.saved) +
              slab.group() * tiling.shape.mask_bytes_per_group();
    } else {
      y_ = static_cast<const T*>(buffers.saved);
    }
  }

  __device__ __forceinline__ Constants<A, kElements> Mean() const {
    return LoadConstants<kElements>(constants_);
  }

  template <Reuse kReuse>
  __device__ __forceinline__ void Load(int64_t offset,
                                       Saved<T, kElements>* saved) const {
    if (gate_ == Gate::kY) {
      saved->y = LoadVector<kReuse, kElements>(y_ + offset);
    } else if (gate_ == Gate::kMask) {
      const int64_t bit = slab_.Bit(offset);
      // A vector of eight is a byte.
      saved->bits = static_cast<uint32_t>(mask_[bit / 8]) >> (bit % 8);
    }
  }

  // dy becomes e.
  __device__ __forceinline__ void Apply(const Vector<T, kElements>& x,
                                        const Saved<T, kElements>& saved,
                                        Vector<T, kElements>* dy) const {
    if (gate_ == Gate::kNone) return;
    if (gate_ == Gate::kX) {
      const auto mean = Mean();
      const auto multiplier =
          LoadConstants<kElements>(NextConstant(constants_, kGateMultiplier));
      const auto bias =
          LoadConstants<kElements>(NextConstant(constants_, kGateBias));
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        // As Normaliser computes y.
        const A y =
            MultiplyAdd(Subtract(x.Get(i), mean[i]), multiplier[i], bias[i]);
        if (!(Rounded<T>(y) > 0)) dy->Set(i, A{0});
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const bool open =
          gate_ == Gate::kY ? saved.y.Get(i) > 0 : (saved.bits >> i & 1u) != 0;
      if (!open) dy->Set(i, A{0});
    }
  }

 private:
  Gate gate_;
  const Slab<kElements>& slab_;
  union {
    const T* y_;
    const uint8_t* mask_;
  };
  const A* constants_;
};

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_GATE_CUH_
