// The elementwise pass of forward.

#ifndef JAX_BNAR_CUDA_DEVICE_NORMALISE_CUH_
#define JAX_BNAR_CUDA_DEVICE_NORMALISE_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/curves.cuh"
#include "cuda/device/forms.cuh"
#include "cuda/device/intrinsics.cuh"
#include "cuda/device/mask_cursor.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/statistics.cuh"
#include "cuda/device/tile_stream.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"
#include "native/numerics.h"

namespace jax_bnar {
namespace cuda {

// The constants that turn an element of one channel into y, except for the
// activation.
template <typename A>
struct ForwardConstants {
  A mean;
  A multiplier;
  A bias;
};

template <typename A>
__device__ __forceinline__ A NormaliseElement(A x, A mean, A multiplier,
                                              A bias) {
  return MultiplyAdd(Subtract(x, mean), multiplier, bias);
}

template <typename A>
__device__ __forceinline__ ForwardConstants<A> ForwardConstantsOf(
    const AffineOperands& affine, int64_t channels, int64_t group,
    int64_t channel, A mean, A var) {
  const auto at = [&](const VectorOperand& vector, A otherwise) {
    return ElementOr<A>(vector, channels, group, channel, otherwise);
  };
  return {mean, Multiplier(at(affine.scale, A{1}), var, affine.epsilon),
          at(affine.bias, A{0})};
}

// Loads the scale of one column, to where its multiplier will be, and the bias.
template <typename A, typename SlabOf>
__device__ __forceinline__ void LoadAffine(const ForwardParameters& p,
                                           const SharedMemory& shared,
                                           const SlabOf& slab, int column) {
  const auto at = [&](const VectorOperand& vector, A otherwise) {
    return ElementOr<A>(vector, p.tiling.shape.channels, slab.group(),
                        slab.channel(column), otherwise);
  };
  if (slab.HasColumn(column)) {
    shared.Constant<A>(kMultiplier)[column] = at(p.affine.scale, A{1});
    shared.Constant<A>(kBias)[column] = at(p.affine.bias, A{0});
  }
}

// Completes the constants of one column after LoadAffine.
template <typename A>
__device__ __forceinline__ void SetForwardConstants(const ForwardParameters& p,
                                                    const SharedMemory& shared,
                                                    int column, A mean, A var) {
  A* multiplier = shared.Constant<A>(kMultiplier) + column;
  shared.Constant<A>(kMean)[column] = mean;
  *multiplier = Multiplier(*multiplier, var, p.affine.epsilon);
}

// Computes y of a vector from constants that the thread keeps in registers.
template <typename T, int kElements, bool kResidual, bool kRelu>
class Normaliser {
 public:
  using A = Accumulator<T>;
  using V = Vector<T, kElements>;

  template <typename SlabOf>
  __device__ __forceinline__ Normaliser(const SharedMemory& shared,
                                        const SlabOf& slab) {
    mean_ = LoadConstants<A, kElements>(shared, kMean, slab);
    multiplier_ = LoadConstants<A, kElements>(shared, kMultiplier, slab);
    bias_ = LoadConstants<A, kElements>(shared, kBias, slab);
  }

  // What comes before the activation, not rounded.
  __device__ __forceinline__ Values<A, kElements> Unrounded(const V& x,
                                                            const V& z) const {
    Values<A, kElements> values = x.Get();
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      values[i] =
          NormaliseElement(values[i], mean_[i], multiplier_[i], bias_[i]);
    }
    if constexpr (kResidual) {
      const Values<A, kElements> residual = z.Get();
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        values[i] = Add(values[i], residual[i]);
      }
    }
    return values;
  }

  __device__ __forceinline__ V Of(const V& x, const V& z) const {
    V y;
    y.Set(Unrounded(x, z));
    // Rounding preserves order and sign, so it does not matter which comes
    // first.
    if constexpr (kRelu) y.Relu();
    return y;
  }

 private:
  Values<A, kElements> mean_;
  Values<A, kElements> multiplier_;
  Values<A, kElements> bias_;
};

// The same with another activation than ReLU, after what a normaliser computes.
template <typename T, int kElements, typename NormaliserOf>
class CurveNormaliser {
 public:
  using V = Vector<T, kElements>;

  template <typename SharedMemoryOf, typename SlabOf>
  __device__ __forceinline__ CurveNormaliser(const Activation& activation,
                                             const SharedMemoryOf& shared,
                                             const SlabOf& slab)
      : curve_(activation), normaliser_(shared, slab) {}

  __device__ __forceinline__ V Of(const V& x, const V& z) const {
    V y;
    y.Set(curve_.Value(normaliser_.Unrounded(x, z)));
    return y;
  }

 private:
  Curve<T, kElements> curve_;
  NormaliserOf normaliser_;
};

// What is loaded for a vector besides x.
template <typename T, int kElements, bool kResidual>
struct Residual {
  Vector<T, kElements> z;
};
template <typename T, int kElements>
struct Residual<T, kElements, false> {};

template <typename T, int kElements, bool kResidual>
struct ForwardItem : Residual<T, kElements, kResidual> {
  Vector<T, kElements> x;
};

// The elementwise pass, with everything fixed that a loop would otherwise have
// to test. normaliser.Of(x, z) is y of a vector. With kKeep, x of some tiles is
// in the slots of `stream`.
template <typename T, int kElements, bool kKeep, typename Form, typename SlabOf,
          typename NormaliserOf, typename Stream = NoStream>
__device__ __forceinline__ void NormaliseTilesAs(const ForwardParameters& p,
                                                 const SlabOf& slab,
                                                 const NormaliserOf& normaliser,
                                                 Stream* stream = nullptr) {
  constexpr bool kResidual = Form::kResidual;
  constexpr bool kMask = Form::kMask;
  using V = Vector<T, kElements>;
  using Item = ForwardItem<T, kElements, kResidual>;
  constexpr int kArrays = kResidual ? 2 : 1;
  constexpr int kDepth = kInFlight<T, kElements, kArrays>;
  constexpr Copies kCopies = Form::kCurve ? Copies::kFew : Copies::kMany;
  const T* x = static_cast<const T*>(p.buffers.x);
  const T* z = static_cast<const T*>(p.buffers.z);
  T* y = static_cast<T*>(p.buffers.y);
  const std::conditional_t<kMask, uint8_t*, NoMask> mask(p.buffers.mask);

  const auto load_residual = [&](auto& in, auto* item) {
    if constexpr (kResidual) {
      item->z = LoadVectorAt<Reuse::kNever, kElements>(z, in);
    }
  };
  const auto store = [&](auto& out, const V& x, const auto& item) {
    V y_vector;
    if constexpr (kResidual) {
      y_vector = normaliser.Of(x, item.z);
    } else {
      y_vector = normaliser.Of(x, V{});
    }
    StoreVectorAt<Reuse::kNever>(y, out, y_vector);
    if constexpr (kMask) {
      out.mask_byte() = static_cast<uint8_t>(
          ByteOfBits<T>(slab.WordStep(), y_vector.PositiveBits()));
    }
    out.Advance();
  };

  // Only z is loaded ahead of a tile in shared memory, which answers in a few
  // dozen cycles.
  using Ahead = Residual<T, kElements, kResidual>;
  // Where channels are first, finding a vector takes registers. Of the long
  // loop of another activation than ReLU, more copies gain nothing.
  constexpr int kArraysAhead = SlabOf::kPlanes || Form::kCurve ? 2 : 1;
  constexpr int kDepthAhead =
      Form::kCurve && !kResidual ? 1 : kInFlight<T, kElements, kArraysAhead>;
  if constexpr (kKeep && kCopiesTiles<kElements>) {
    const int count = slab.Count(0, slab.tiles());
    auto in = slab.template At<-1>(count - 1);
    auto out = slab.template At<-1>(count - 1, mask);
    const auto load = [&](Ahead* item) {
      load_residual(in, item);
      in.Advance();
    };
    const auto use = [&](const auto& tile, const Ahead& item) {
      store(out, tile.Get(0), item);
    };
    const SlabOf again = slab.Again();
    auto pass = stream->Second(again, count, {{x}});
    // The other way would spill registers: for compute capability 9.0 with
    // another activation than ReLU, for 10.0 with a mask of float32
    // (CUDA 13.5).
    constexpr bool kManySpill =
        kMask && kShortOfRegisters && sizeof(T) == sizeof(float);
    constexpr Copies kCopiesOfCopied =
        kResidual && !SlabOf::kPlanes
            ? (kManySpill ? Copies::kFew : Copies::kMany)
            : kCopies;
    if (again.tiles() <= stream->shared_tiles()) {
      pass.template ForEachKept<kDepthAhead, Ahead, kCopies>(count, load, use);
    } else {
      pass.template ForEach</*kCopied=*/true, kDepthAhead, Ahead,
                            kCopiesOfCopied>(count, load, use);
    }
    return;
  }
  const int shared_end = kKeep ? min(p.tiling.shared_tiles, slab.tiles()) : 0;
  if (shared_end < slab.tiles()) {
    const int count = slab.Count(shared_end, slab.tiles());
    const int last = shared_end + count - 1;
    auto in = slab.template At<-1>(last);
    auto out = slab.template At<-1>(last, mask);
    ForEachTile<kDepth, Item, kCopies>(
        count,
        [&](Item* item) {
          item->x = LoadVectorAt<Reuse::kNever, kElements>(x, in);
          load_residual(in, item);
          in.Advance();
        },
        [&](const Item& item) { store(out, item.x, item); });
  }
  if constexpr (kKeep) {
    const SlabOf again = slab.Again();
    auto in = again.At(0);
    auto out = again.template At<1>(0, mask);
    const auto& ring = stream->ring();
    int slot = ring.At(0);
    ForEachTile<kDepthAhead, Ahead, kCopies>(
        again.Count(0, shared_end),
        [&](Ahead* item) {
          load_residual(in, item);
          in.Advance();
        },
        [&](const Ahead& item) {
          store(out, ring.Get(slot, 0), item);
          slot = ring.Next(slot);
        });
  }
}

// The same, with NormaliserOf where there is no other activation than ReLU, and
// behind it where there is one.
template <typename T, int kElements, bool kKeep, typename Form,
          typename NormaliserOf, typename SharedMemoryOf, typename SlabOf,
          typename Stream = NoStream>
__device__ __forceinline__ void NormaliseTilesBy(const ForwardParameters& p,
                                                 const SharedMemoryOf& shared,
                                                 const SlabOf& slab,
                                                 Stream* stream = nullptr) {
  if constexpr (Form::kCurve) {
    NormaliseTilesAs<T, kElements, kKeep, Form>(
        p, slab,
        CurveNormaliser<T, kElements, NormaliserOf>(p.buffers.activation,
                                                    shared, slab),
        stream);
  } else {
    NormaliseTilesAs<T, kElements, kKeep, Form>(
        p, slab, NormaliserOf(shared, slab), stream);
  }
}

// The elementwise pass, the last tile first. Single elements begin with the
// tiles that L2 may still hold. `Form` is a ForwardForm, AnyForm or AnyCurve.
template <typename T, int kElements, bool kKeep, typename Form, typename SlabOf,
          typename Stream = NoStream>
__device__ __forceinline__ void NormaliseTiles(const ForwardParameters& p,
                                               const SharedMemory& shared,
                                               const SlabOf& slab,
                                               Stream* stream = nullptr) {
  const auto normalise = [&](auto form) {
    using F = decltype(form);
    NormaliseTilesBy<T, kElements, kKeep, F,
                     Normaliser<T, kElements, F::kResidual, F::kRelu>>(
        p, shared, slab, stream);
  };
  if constexpr (std::is_same_v<Form, AnyForm>) {
    // Several threads with single elements share a byte of the mask, so
    // PackMask writes it afterwards.
    WithForwardForm(p.buffers.z != nullptr, p.buffers.activation.is_relu(),
                    /*mask=*/false, normalise);
  } else if constexpr (std::is_same_v<Form, AnyCurve>) {
    WithForwardCurve(p.buffers.z != nullptr, normalise);
  } else {
    normalise(Form{});
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_NORMALISE_CUH_
