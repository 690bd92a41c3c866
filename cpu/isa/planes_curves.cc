// The kernels of planes with other activations than ReLU.

#include <algorithm>
#include <cstdint>

#include "cpu/isa/elements.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"
#include "cpu/isa/strips.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// Elements [begin, begin + size) of the tile, in a plane that ends before
// `end`.
struct PlaneStrip {
  int64_t begin;
  int64_t size;
  int64_t end;
};

// Calls strip(PlaneStrip) for all of a plane that begins at `first`.
template <typename F>
BNAR_INLINE void ForEachStrip(int64_t first, int64_t size, F strip) {
  for (int64_t begin = 0; begin < size; begin += kStrip) {
    strip(PlaneStrip{first + begin, std::min(kStrip, size - begin),
                     first + size});
  }
}

// Calls vector(at, i) for each vector of a strip, where `at` is the index of
// its first element in the tile, and i in the strip's buffer. The last vector
// of a plane may begin earlier than where the one before it ends.
template <typename A, typename F>
BNAR_INLINE void ForEachVectorOf(const PlaneStrip& strip, F vector) {
  const int64_t last = strip.end - kVecLanes<A>;
  for (int64_t i = 0; i < strip.size; i += kVecLanes<A>) {
    vector(std::min(strip.begin + i, last), i);
  }
}

// The size of a strip's buffer that a function takes.
template <typename A>
int64_t WholeVectors(const PlaneStrip& strip) {
  return (strip.size + kVecLanes<A> - 1) / kVecLanes<A> * kVecLanes<A>;
}

// Writes the values before the activation to u.
template <typename T, int N, typename Args, typename F,
          typename A = Accumulator<T>>
BNAR_INLINE void Preactivations(int64_t plane, const PlaneStrip& strip,
                                const Args& args, const void* residual, F as,
                                A* u) {
  const Pointers<const T, N> x(args.x);
  const T* z = static_cast<const T*>(residual);
  const auto vectors =
      InputColumns<A, N>(args).template OfPlane<Gate::kX>(plane);
  ForEachVectorOf<A>(strip, [&](int64_t at, int64_t i) BNAR_LAMBDA {
    Vec<A> value = vectors.Normalised(vectors.Centred(
        [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); }));
    if (kHasEveryForm<N> && z != nullptr) value = value + Load(z + at);
    StoreLanes(u + i, as(value));
  });
}

// Writes the derivatives of the activation to `derivatives`.
template <typename T, int N, typename Args, typename A = Accumulator<T>>
void Derivatives(int64_t plane, const PlaneStrip& strip, int64_t mask_bit,
                 const Args& args, A* derivatives) {
  const Activation activation = args.activation;
  switch (args.gate) {
    case Gate::kNone:
      return;  // has no activation
    case Gate::kX:
    case Gate::kZ:
      Preactivations<T, N>(
          plane, strip, args, args.saved,
          [&](const Vec<A>& u)
              BNAR_LAMBDA { return AsSaved<T>(activation, u); },
          derivatives);
      break;
    case Gate::kY: {
      const T* y = static_cast<const T*>(args.saved);
      ForEachVectorOf<A>(strip, [&](int64_t at, int64_t i) BNAR_LAMBDA {
        StoreLanes(derivatives + i, Load(y + at));
      });
      break;
    }
    case Gate::kMask: {
      const uint8_t* mask = static_cast<const uint8_t*>(args.saved);
      ForEachVectorOf<A>(strip, [&](int64_t at, int64_t i) BNAR_LAMBDA {
        const uint32_t bits = ReadBits(mask, mask_bit + at, kVecLanes<A>);
        StoreLanes(derivatives + i, OfBits<A>(bits));
      });
      break;
    }
  }
  Differentiate<Precision<T>>(activation, derivatives, WholeVectors<A>(strip));
}

}  // namespace

template <typename T, int N>
void PlanesNormaliseCurve(const PlanesTile& tile,
                          const NormaliseArgs<N>& args) {
  using A = Accumulator<T>;
  const Activation activation = args.activation;
  const bool non_temporal = args.non_temporal;
  T* y = static_cast<T*>(args.y);
  uint8_t* mask = args.mask;
  const int64_t mask_bit = tile.mask_bit;
  alignas(64) A values[kStrip];
  ForEachPlane(tile, [&](int64_t p, int64_t first) BNAR_LAMBDA {
    ForEachStrip(first, tile.size, [&](const PlaneStrip& strip) BNAR_LAMBDA {
      Preactivations<T, N>(
          p, strip, args, args.z, [](const Vec<A>& u) BNAR_LAMBDA { return u; },
          values);
      Activate<Precision<T>>(activation, values, WholeVectors<A>(strip));
      ForEachVectorOf<A>(strip, [&](int64_t at, int64_t i) BNAR_LAMBDA {
        const auto stored = Round<T>(Load(values + i));
        StoreResult(non_temporal, y + at, stored);
        if (mask != nullptr) StoreLanes(values + i, Widen<T>(stored));
      });
      if (mask == nullptr) return;
      Differentiate<Precision<T>>(activation, values, WholeVectors<A>(strip));
      ForEachVectorOf<A>(strip, [&](int64_t at, int64_t i) BNAR_LAMBDA {
        WriteBits(mask, mask_bit + at, kVecLanes<A>,
                  BitsOf(Load(values + i), activation.negative_slope));
      });
    });
  });
  if (non_temporal) NonTemporalFence();
}

template <typename T, int N>
void PlanesReduceCurve(const PlanesTile& tile, const ReduceArgs<N>& args) {
  using A = Accumulator<T>;
  const bool non_temporal = args.non_temporal;
  const T* dy = static_cast<const T*>(args.dy);
  const Pointers<const T, N> x(args.x);
  T* dz = static_cast<T*>(args.dz);
  const InputColumns<A, N> columns(args);
  const Vec<A> stopping = StoppingDerivative<A>(args.activation);
  alignas(64) A derivatives[kStrip];
  ForEachPlane(tile, [&](int64_t p, int64_t first) BNAR_LAMBDA {
    const auto vectors = columns.template OfPlane<Gate::kNone>(p);
    double total_e = 0, total_e_centred[N] = {};
    ForEachStrip(first, tile.size, [&](const PlaneStrip& strip) BNAR_LAMBDA {
      Derivatives<T, N>(p, strip, tile.mask_bit, args, derivatives);
      Vec<A> sum[1] = {}, centred_sums[N][1] = {};
      // Adds what keep(values) leaves of a vector.
      const auto add = [&](int64_t at, int64_t i, auto keep) BNAR_LAMBDA {
        const Vec<A> e =
            Differentiated(Load(derivatives + i), Load(dy + at), stopping);
        sum[0] = sum[0] + keep(e);
        const auto centred = vectors.Centred(
            [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); });
        ForEachInput<N>([&](auto input) BNAR_LAMBDA {
          Vec<A>& centred_sum = centred_sums[input][0];
          centred_sum = centred_sum + keep(e * centred[input]);
        });
        if (dz != nullptr) StoreResult(non_temporal, dz + at, Round<T>(e));
      };
      int64_t i = 0;
      for (; i + kVecLanes<A> <= strip.size; i += kVecLanes<A>) {
        add(strip.begin + i, i, [](const Vec<A>& v) BNAR_LAMBDA { return v; });
      }
      if (i < strip.size) {
        const int fresh = static_cast<int>(strip.size - i);
        add(strip.end - kVecLanes<A>, i,
            [&](const Vec<A>& v) BNAR_LAMBDA { return LastLanes(v, fresh); });
      }
      total_e += LaneSum(sum);
      ForEachInput<N>([&](auto input) BNAR_LAMBDA {
        total_e_centred[input] += LaneSum(centred_sums[input]);
      });
    });
    args.sum_e[p] = total_e;
    ForEachInput<N>([&](auto input) BNAR_LAMBDA {
      args.sum_e_centred[input][p] = total_e_centred[input];
    });
  });
  if (non_temporal) NonTemporalFence();
}

template <typename T, int N>
void PlanesApplyCurve(const PlanesTile& tile, const ApplyArgs<N>& args) {
  using A = Accumulator<T>;
  const bool non_temporal = args.non_temporal;
  const T* dy = static_cast<const T*>(args.e);
  const Pointers<const T, N> x(args.x);
  const Pointers<T, N> dx(args.dx);
  const InputColumns<A, N> columns(args);
  const GradientColumns<A, N> gradient_columns(args);
  const Vec<A> stopping = StoppingDerivative<A>(args.activation);
  alignas(64) A derivatives[kStrip];
  ForEachPlane(tile, [&](int64_t p, int64_t first) BNAR_LAMBDA {
    const auto vectors = columns.template OfPlane<Gate::kNone>(p);
    const auto gradient = gradient_columns.OfPlane(p);
    ForEachStrip(first, tile.size, [&](const PlaneStrip& strip) BNAR_LAMBDA {
      Derivatives<T, N>(p, strip, tile.mask_bit, args, derivatives);
      ForEachVectorOf<A>(strip, [&](int64_t at, int64_t i) BNAR_LAMBDA {
        const auto centred = vectors.Centred(
            [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); });
        const Vec<A> e =
            Differentiated(Load(derivatives + i), Load(dy + at), stopping);
        ForEachInput<N>([&](auto input) BNAR_LAMBDA {
          StoreResult(non_temporal, dx[input] + at,
                      GradientElements<T>(gradient, input, e, centred));
        });
      });
    });
  });
  if (non_temporal) NonTemporalFence();
}

BNAR_INSTANTIATE_CURVE(PlanesNormaliseCurve, PlanesTile, NormaliseArgs)
BNAR_INSTANTIATE_CURVE(PlanesReduceCurve, PlanesTile, ReduceArgs)
BNAR_INSTANTIATE_CURVE(PlanesApplyCurve, PlanesTile, ApplyArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
