// The gate of the activation, which decides what passes of the gradient.

#ifndef JAX_BNAR_CUDA_DEVICE_GATE_CUH_
#define JAX_BNAR_CUDA_DEVICE_GATE_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/curves.cuh"
#include "cuda/device/forms.cuh"
#include "cuda/device/mask_cursor.cuh"
#include "cuda/device/normalise.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// The constants of both passes of backward, which lie in shared memory.
enum BackwardConstant {
  kGateMean,
  kGateMultiplier,
  kGateBias,
  kCentredMultiplier,
  kConstantTerm
};
// Gate kX computes y from the first three, which lie where forward has them.
static_assert(int{kGateMean} == int{kMean} &&
              int{kGateMultiplier} == int{kMultiplier} &&
              int{kGateBias} == int{kBias});

// What is loaded for the gate of a vector, besides x and dy.
template <typename T, int kElements, Gate kGate>
struct Saved {};
template <typename T, int kElements>
struct Saved<T, kElements, Gate::kY> {
  Vector<T, kElements> y;
};
template <typename T, int kElements>
struct Saved<T, kElements, Gate::kMask> {
  uint32_t bits;
};
template <typename T, int kElements>
struct Saved<T, kElements, Gate::kZ> {
  Vector<T, kElements> z;
};

// What backward reads for a vector. At first e holds dy, which the gate turns
// into e.
template <typename T, int kElements, Gate kGate>
struct GradientItem {
  Vector<T, kElements> e;
  Vector<T, kElements> x;
  Saved<T, kElements, kGate> saved;
};

// The number of arrays that are read for each vector. A mask is too small to
// count, but the constants of gates kX and kZ take the registers of an array.
template <Gate kGate>
constexpr int kGradientArrays = kGate == Gate::kZ                        ? 4
                                : kGate == Gate::kY || kGate == Gate::kX ? 3
                                                                         : 2;

// The number of tiles for which a thread has loads in flight of what was saved,
// if dy and x come by copies. y takes as many registers as two arrays would,
// because the gate is computed beside it. Where channels are first, finding a
// vector takes registers. If nothing was saved for another activation than
// ReLU, more copies of its long loop gain nothing.
template <typename T, int kElements, Gate kGate, bool kCurve, typename SlabOf>
constexpr int kSavedInFlight =
    kCurve && kGate == Gate::kX                ? 1
    : kGate == Gate::kMask && !SlabOf::kPlanes ? kInFlight<T, kElements, 1>
                                               : kInFlight<T, kElements, 2>;

// How often the body of a loop with a gate is compiled.
template <Gate kGate, bool kCurve>
constexpr Copies kCopiesOfGating =
    kCurve && Recomputes(kGate) ? Copies::kFew : Copies::kMany;

// Loads a vector of each array. All loads are in flight before any of them is
// used.
template <typename T, int kElements, Gate kGate>
class GradientLoader {
 public:
  __device__ __forceinline__ GradientLoader(const void* dy,
                                            const BackwardBuffers& buffers)
      : dy_(static_cast<const T*>(dy)),
        x_(static_cast<const T*>(buffers.x)),
        saved_(buffers.saved) {}

  // Returns a cursor for Load.
  template <int kStep, typename SlabOf>
  __device__ __forceinline__ auto At(const SlabOf& slab, int tile) const {
    using Mask =
        std::conditional_t<kGate == Gate::kMask, const uint8_t*, NoMask>;
    return slab.template At<kStep>(tile, static_cast<Mask>(saved_));
  }

  // kReuseX applies to x, and kReuseE to dy and to what was saved.
  template <Reuse kReuseE, Reuse kReuseX, typename CursorOf>
  __device__ __forceinline__ void Load(
      const CursorOf& in, GradientItem<T, kElements, kGate>* item) const {
    item->e = LoadVectorAt<kReuseE, kElements>(dy_, in);
    item->x = LoadVectorAt<kReuseX, kElements>(x_, in);
    LoadSaved<kReuseE>(in, &item->saved);
  }

  // Loads only what was saved.
  template <Reuse kReuse, typename CursorOf>
  __device__ __forceinline__ void LoadSaved(
      const CursorOf& in, Saved<T, kElements, kGate>* saved) const {
    if constexpr (kGate == Gate::kY) {
      saved->y =
          LoadVectorAt<kReuse, kElements>(static_cast<const T*>(saved_), in);
    } else if constexpr (kGate == Gate::kZ) {
      saved->z =
          LoadVectorAt<kReuse, kElements>(static_cast<const T*>(saved_), in);
    } else if constexpr (kGate == Gate::kMask) {
      saved->bits = static_cast<uint32_t>(in.mask_byte()) >> in.mask_bit();
    }
  }

 private:
  const T* dy_;
  const T* x_;
  const void* saved_;
};

// Turns dy into e, and returns it as it was before it was rounded. Where the
// gate recomputes y, its constants are in registers. The primary template is
// the gate of a ReLU.
template <typename T, int kElements, Gate kGate, bool kCurve>
class Gating {
 public:
  template <typename SlabOf>
  __device__ __forceinline__ Gating(const BackwardBuffers&, const SharedMemory&,
                                    const SlabOf& slab)
      : word_step_(slab.WordStep()) {}

  __device__ __forceinline__ Values<Accumulator<T>, kElements> Apply(
      GradientItem<T, kElements, kGate>* item) const {
    if constexpr (kGate == Gate::kY) item->e.KeepPositive(item->saved.y);
    if constexpr (kGate == Gate::kMask) {
      item->e.KeepBits(BitsOfByte<T>(word_step_, item->saved.bits));
    }
    return item->e.Get();
  }

 private:
  const int word_step_;
};

// The gate that computes y again, by the same operations as forward, rounding
// included.
template <typename T, int kElements>
class Gating<T, kElements, Gate::kX, /*kCurve=*/false> {
 public:
  template <typename SlabOf>
  __device__ __forceinline__ Gating(const BackwardBuffers&,
                                    const SharedMemory& shared,
                                    const SlabOf& slab)
      : normaliser_(shared, slab) {}

  __device__ __forceinline__ Values<Accumulator<T>, kElements> Apply(
      GradientItem<T, kElements, Gate::kX>* item) const {
    item->e.KeepPositive(normaliser_.Of(item->x, Vector<T, kElements>{}));
    return item->e.Get();
  }

 private:
  Normaliser<T, kElements, /*kResidual=*/false, /*kRelu=*/false> normaliser_;
};

// Other activations, whose derivative follows from what was saved.
template <typename T, int kElements, Gate kGate>
class Gating<T, kElements, kGate, /*kCurve=*/true> {
 public:
  template <typename SlabOf>
  __device__ __forceinline__ Gating(const BackwardBuffers& buffers,
                                    const SharedMemory&, const SlabOf&)
      : curve_(buffers.activation) {}

  __device__ __forceinline__ Values<Accumulator<T>, kElements> Apply(
      GradientItem<T, kElements, kGate>* item) const {
    Values<Accumulator<T>, kElements> e = item->e.Get();
    if constexpr (kGate == Gate::kY) {
      e = curve_.GradientOfOutput(item->saved.y.Get(), e);
    } else {
      // Such masks are read element by element (HasVectors in
      // launch/kernels.cuh): in a vector, the threads that share it would have
      // to exchange bits.
      static_assert(kGate == Gate::kMask && kElements == 1);
      e = curve_.GradientOfBits(item->saved.bits, e);
    }
    item->e.Set(e);
    return e;
  }

 private:
  Curve<T, kElements> curve_;
};

// Other activations, whose derivative follows from x, and from the residual.
template <typename T, int kElements, Gate kGate>
class CurveOfInputs {
 public:
  template <typename SlabOf>
  __device__ __forceinline__ CurveOfInputs(const BackwardBuffers& buffers,
                                           const SharedMemory& shared,
                                           const SlabOf& slab)
      : curve_(buffers.activation), normaliser_(shared, slab) {}

  __device__ __forceinline__ Values<Accumulator<T>, kElements> Apply(
      GradientItem<T, kElements, kGate>* item) const {
    Vector<T, kElements> z{};
    if constexpr (kGate == Gate::kZ) z = item->saved.z;
    const Values<Accumulator<T>, kElements> e =
        curve_.template GradientOfInput</*kAnyCurve=*/kGate == Gate::kX>(
            normaliser_.Unrounded(item->x, z), item->e.Get());
    item->e.Set(e);
    return e;
  }

 private:
  Curve<T, kElements> curve_;
  Normaliser<T, kElements, /*kResidual=*/kGate == Gate::kZ, /*kRelu=*/false>
      normaliser_;
};

template <typename T, int kElements>
class Gating<T, kElements, Gate::kX, /*kCurve=*/true>
    : public CurveOfInputs<T, kElements, Gate::kX> {
  using CurveOfInputs<T, kElements, Gate::kX>::CurveOfInputs;
};
template <typename T, int kElements>
class Gating<T, kElements, Gate::kZ, /*kCurve=*/true>
    : public CurveOfInputs<T, kElements, Gate::kZ> {
  using CurveOfInputs<T, kElements, Gate::kZ>::CurveOfInputs;
};

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_GATE_CUH_
