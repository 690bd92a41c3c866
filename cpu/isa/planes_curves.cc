// The kernels of planes with other activations than ReLU.

#include <algorithm>
#include <cstdint>

#include "cpu/isa/elements.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"
#include "cpu/isa/strip_passes.h"
#include "cpu/isa/strips.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// The constants of a plane, whatever the column is. They are made in place and
// never copied: GCC 12 copies vectors of two registers through the stack.
template <typename Vectors>
struct OfWholePlane {
  Vectors vectors;

  BNAR_INLINE const Vectors& operator()(int64_t) const { return vectors; }
};

// Elements [begin, begin + count) of a tile, in a plane that ends before `end`.
// The last vector of a plane may begin earlier than where the one before it
// ends.
struct PlaneStrip {
  int64_t plane;
  int64_t begin;
  int64_t count;
  int64_t end;
  int64_t mask_bit;  // of the tile

  template <typename A>
  int64_t Size() const {
    return (count + kVecLanes<A> - 1) / kVecLanes<A> * kVecLanes<A>;
  }

  template <typename A, typename F>
  BNAR_INLINE void ForEachVector(F element) const {
    const int64_t last = end - kVecLanes<A>;
    for (int64_t i = 0; i < count; i += kVecLanes<A>) {
      element(std::min(begin + i, last), plane, i);
    }
  }

  template <Gate kGate, typename A, int N>
  BNAR_INLINE auto Inputs(const InputColumns<A, N>& of_inputs) const {
    return OfWholePlane<InputVectors<A, N>>{
        of_inputs.template OfPlane<kGate>(plane)};
  }

  template <typename A, int N>
  BNAR_INLINE auto Gradients(const GradientColumns<A, N>& of_inputs) const {
    return OfWholePlane<GradientVectors<A, N>>{of_inputs.OfPlane(plane)};
  }

  template <typename A>
  BNAR_INLINE uint32_t ReadMask(const uint8_t* mask, int64_t at) const {
    return ReadBits(mask, mask_bit + at, kVecLanes<A>);
  }

  template <typename A>
  BNAR_INLINE void WriteMask(uint8_t* mask, int64_t at, uint32_t bits) const {
    WriteBits(mask, mask_bit + at, kVecLanes<A>, bits);
  }
};

// Calls strip(PlaneStrip) for all of a plane that begins at `first`.
template <typename F>
BNAR_INLINE void ForEachStrip(PlanesTile tile, int64_t plane, int64_t first,
                              F strip) {
  for (int64_t begin = 0; begin < tile.size; begin += kStrip) {
    strip(PlaneStrip{plane, first + begin, std::min(kStrip, tile.size - begin),
                     first + tile.size, tile.mask_bit});
  }
}

}  // namespace

template <typename T, int N>
void PlanesNormaliseCurve(const PlanesTile& tile,
                          const NormaliseArgs<N>& args) {
  alignas(64) Accumulator<T> values[kStrip];
  ForEachPlane(tile, [&](int64_t p, int64_t first) BNAR_LAMBDA {
    ForEachStrip(tile, p, first, [&](const PlaneStrip& strip) BNAR_LAMBDA {
      NormaliseStrip<T, N>(strip, args, values);
    });
  });
  if (args.non_temporal) NonTemporalFence();
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
    ForEachStrip(tile, p, first, [&](const PlaneStrip& strip) BNAR_LAMBDA {
      Derivatives<T, N>(strip, args, derivatives);
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
      for (; i + kVecLanes<A> <= strip.count; i += kVecLanes<A>) {
        add(strip.begin + i, i, [](const Vec<A>& v) BNAR_LAMBDA { return v; });
      }
      if (i < strip.count) {
        const int fresh = static_cast<int>(strip.count - i);
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
  alignas(64) Accumulator<T> derivatives[kStrip];
  ForEachPlane(tile, [&](int64_t p, int64_t first) BNAR_LAMBDA {
    ForEachStrip(tile, p, first, [&](const PlaneStrip& strip) BNAR_LAMBDA {
      ApplyStrip<T, N>(strip, args, derivatives);
    });
  });
  if (args.non_temporal) NonTemporalFence();
}

BNAR_INSTANTIATE_CURVE(PlanesNormaliseCurve, PlanesTile, NormaliseArgs)
BNAR_INSTANTIATE_CURVE(PlanesReduceCurve, PlanesTile, ReduceArgs)
BNAR_INSTANTIATE_CURVE(PlanesApplyCurve, PlanesTile, ApplyArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
