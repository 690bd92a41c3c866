// The kernels of planes with other activations than ReLU.

#include <algorithm>

#include "cpu/isa/elements.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"
#include "cpu/isa/strips.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// Calls strip(begin, size) for all of a plane.
template <typename F>
BNAR_INLINE void ForEachStrip(int64_t plane_size, F strip) {
  for (int64_t begin = 0; begin < plane_size; begin += kStrip) {
    strip(begin, std::min(kStrip, plane_size - begin));
  }
}

// A whole vector.
template <typename T>
using Whole = Constant<kVecLanes<Accumulator<T>>>;

// Calls element(i, n) for each vector of a strip, where n is Whole<T>, and for
// the n elements that remain, if any. The lanes after these are those of
// elements that are 0.
template <typename T, typename F>
BNAR_INLINE void ForEachVectorOf(int64_t size, F element) {
  ForEachVector<T>(
      size, [&](int64_t i) BNAR_LAMBDA { element(i, Whole<T>()); },
      [&](int64_t i, int n) BNAR_LAMBDA { element(i, n); });
}

template <typename T>
BNAR_INLINE Vec<Accumulator<T>> LoadFirst(const T* p, Whole<T>) {
  return Load(p);
}
template <typename T>
BNAR_INLINE Vec<Accumulator<T>> LoadFirst(const T* p, int n) {
  return LoadPartial(p, n);
}

template <typename T>
BNAR_INLINE void StoreFirst(bool stream, T* p, const Stored<T>& stored,
                            Whole<T>) {
  StoreResult(stream, p, stored);
}
template <typename T>
BNAR_INLINE void StoreFirst(bool, T* p, const Stored<T>& stored, int n) {
  StorePartial(p, stored, n);
}

// The size of a strip's buffer that a function takes.
template <typename A>
int64_t WholeVectors(int64_t size) {
  return (size + kVecLanes<A> - 1) / kVecLanes<A> * kVecLanes<A>;
}

// Writes the values before the activation to u.
template <typename T, int N, typename Args, typename F,
          typename A = Accumulator<T>>
BNAR_INLINE void Preactivations(int64_t begin, int64_t size, const Args& args,
                                const void* residual, F as, A* u) {
  const Pointers<const T, N> x(args.x);
  const T* z = static_cast<const T*>(residual);
  const auto vectors = InputColumns<A, N>(args).template OfPlane<Gate::kX>();
  ForEachVectorOf<T>(size, [&](int64_t i, auto n) BNAR_LAMBDA {
    const int64_t at = begin + i;
    Vec<A> value = vectors.Normalised(vectors.Centred(
        [&](auto input) BNAR_LAMBDA { return LoadFirst(x[input] + at, n); }));
    if (kHasEveryForm<N> && z != nullptr) value = value + LoadFirst(z + at, n);
    StoreLanes(u + i, as(value));
  });
}

// Writes the derivatives of the activation to `derivatives`.
template <typename T, int N, typename Args, typename A = Accumulator<T>>
void Derivatives(const Plane& plane, int64_t begin, int64_t size,
                 const Args& args, A* derivatives) {
  const Activation activation = args.activation;
  switch (args.gate) {
    case Gate::kNone:
      std::fill(derivatives, derivatives + WholeVectors<A>(size), A{1});
      return;
    case Gate::kX:
    case Gate::kZ:
      Preactivations<T, N>(
          begin, size, args, args.saved,
          [&](const Vec<A>& u)
              BNAR_LAMBDA { return AsSaved<T>(activation, u); },
          derivatives);
      break;
    case Gate::kY: {
      const T* y = static_cast<const T*>(args.saved) + begin;
      ForEachVectorOf<T>(size, [&](int64_t i, auto n) BNAR_LAMBDA {
        StoreLanes(derivatives + i, LoadFirst(y + i, n));
      });
      break;
    }
    case Gate::kMask: {
      const uint8_t* mask = static_cast<const uint8_t*>(args.saved);
      const int64_t bit = plane.mask_bit + begin;
      ForEachVectorOf<T>(size, [&](int64_t i, auto n) BNAR_LAMBDA {
        StoreLanes(derivatives + i, OfBits<A>(ReadBits(mask, bit + i, n)));
      });
      break;
    }
  }
  Differentiate<Precision<T>>(activation, derivatives, WholeVectors<A>(size));
}

}  // namespace

template <typename T, int N>
void PlaneNormaliseCurve(const Plane& plane, const NormaliseArgs<N>& args) {
  using A = Accumulator<T>;
  const Activation activation = args.activation;
  const bool stream = args.stream;
  T* y = static_cast<T*>(args.y);
  uint8_t* mask = args.mask;
  alignas(64) A values[kStrip];
  ForEachStrip(plane.size, [&](int64_t begin, int64_t size) BNAR_LAMBDA {
    Preactivations<T, N>(
        begin, size, args, args.z,
        [](const Vec<A>& u) BNAR_LAMBDA { return u; }, values);
    Activate<Precision<T>>(activation, values, WholeVectors<A>(size));
    ForEachVectorOf<T>(size, [&](int64_t i, auto n) BNAR_LAMBDA {
      const auto stored = Round<T>(Load(values + i));
      StoreFirst(stream, y + begin + i, stored, n);
      if (mask != nullptr) StoreLanes(values + i, Widen<T>(stored));
    });
    if (mask == nullptr) return;
    Differentiate<Precision<T>>(activation, values, WholeVectors<A>(size));
    const int64_t bit = plane.mask_bit + begin;
    ForEachVectorOf<T>(size, [&](int64_t i, auto n) BNAR_LAMBDA {
      const uint32_t bits = BitsOf(Load(values + i), activation.negative_slope);
      WriteBits(mask, bit + i, n, bits & ((1u << n) - 1u));
    });
  });
  if (stream) StreamingFence();
}

template <typename T, int N>
void PlaneReduceCurve(const Plane& plane, const ReduceArgs<N>& args) {
  using A = Accumulator<T>;
  const bool stream = args.stream;
  const T* dy = static_cast<const T*>(args.dy);
  const Pointers<const T, N> x(args.x);
  T* dz = static_cast<T*>(args.dz);
  const auto vectors = InputColumns<A, N>(args).template OfPlane<Gate::kNone>();
  const Vec<A> stopping = StoppingDerivative<A>(args.activation);
  alignas(64) A derivatives[kStrip];
  double sum_e = 0, sum_e_centred[N] = {};
  ForEachStrip(plane.size, [&](int64_t begin, int64_t size) BNAR_LAMBDA {
    Derivatives<T, N>(plane, begin, size, args, derivatives);
    Vec<A> sum[1] = {}, centred_sums[N][1] = {};
    ForEachVectorOf<T>(size, [&](int64_t i, auto n) BNAR_LAMBDA {
      const int64_t at = begin + i;
      const Vec<A> e = Differentiated(Load(derivatives + i),
                                      LoadFirst(dy + at, n), stopping);
      sum[0] = sum[0] + e;
      const auto centred = vectors.Centred(
          [&](auto input) BNAR_LAMBDA { return LoadFirst(x[input] + at, n); });
      ForEachInput<N>([&](auto input) BNAR_LAMBDA {
        Vec<A>& centred_sum = centred_sums[input][0];
        centred_sum = centred_sum + e * centred[input];
      });
      if (dz != nullptr) StoreFirst(stream, dz + at, Round<T>(e), n);
    });
    sum_e += LaneSum(sum);
    ForEachInput<N>([&](auto input) BNAR_LAMBDA {
      sum_e_centred[input] += LaneSum(centred_sums[input]);
    });
  });
  if (stream) StreamingFence();
  *args.sum_e = sum_e;
  ForEachInput<N>([&](auto input) BNAR_LAMBDA {
    *args.sum_e_centred[input] = sum_e_centred[input];
  });
}

template <typename T, int N>
void PlaneApplyCurve(const Plane& plane, const ApplyArgs<N>& args) {
  using A = Accumulator<T>;
  const bool stream = args.stream;
  const T* dy = static_cast<const T*>(args.e);
  const Pointers<const T, N> x(args.x);
  const Pointers<T, N> dx(args.dx);
  const auto vectors = InputColumns<A, N>(args).template OfPlane<Gate::kNone>();
  const auto gradient = GradientColumns<A, N>(args).OfPlane();
  const Vec<A> stopping = StoppingDerivative<A>(args.activation);
  alignas(64) A derivatives[kStrip];
  ForEachStrip(plane.size, [&](int64_t begin, int64_t size) BNAR_LAMBDA {
    Derivatives<T, N>(plane, begin, size, args, derivatives);
    ForEachVectorOf<T>(size, [&](int64_t i, auto n) BNAR_LAMBDA {
      const int64_t at = begin + i;
      const auto centred = vectors.Centred(
          [&](auto input) BNAR_LAMBDA { return LoadFirst(x[input] + at, n); });
      const Vec<A> e = Differentiated(Load(derivatives + i),
                                      LoadFirst(dy + at, n), stopping);
      ForEachInput<N>([&](auto input) BNAR_LAMBDA {
        StoreFirst(stream, dx[input] + at,
                   GradientElements<T>(gradient, input, e, centred), n);
      });
    });
  });
  if (stream) StreamingFence();
}

BNAR_INSTANTIATE_CURVE(PlaneNormaliseCurve, Plane, NormaliseArgs)
BNAR_INSTANTIATE_CURVE(PlaneReduceCurve, Plane, ReduceArgs)
BNAR_INSTANTIATE_CURVE(PlaneApplyCurve, Plane, ApplyArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
