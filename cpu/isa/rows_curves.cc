// The kernels of rows tiles with other activations than ReLU.

#include <algorithm>
#include <cstring>

#include "cpu/isa/elements.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/rows.h"
#include "cpu/isa/strip_passes.h"
#include "cpu/isa/strips.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// Some rows of a tile, or of some columns of it. Element (r, c) of the strip is
// element r * columns + c of its buffer.
struct RowsStrip {
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t columns;
  int64_t stride;  // of the tile

  // The number of rows that fill a strip.
  static int64_t RowsOf(int64_t columns) {
    return std::max<int64_t>(1, kStrip / columns);
  }

  template <typename A>
  int64_t Size() const {
    return rows * columns;
  }

  template <typename A, typename F>
  BNAR_INLINE void ForEachVector(F element) const {
    // Otherwise Clang compiles a second loop for strips without elements.
    if (rows <= 0 || columns <= 0) __builtin_unreachable();
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t index = (row + r) * stride + column;
      for (int64_t c = 0; c < columns; c += kVecLanes<A>) {
        element(index + c, column + c, r * columns + c);
      }
    }
  }

  template <Gate kGate, typename A, int N>
  BNAR_INLINE auto Inputs(const InputColumns<A, N>& of_inputs) const {
    return [=](int64_t at)
               BNAR_LAMBDA { return of_inputs.template At<kGate>(at); };
  }

  template <typename A, int N>
  BNAR_INLINE auto Gradients(const GradientColumns<A, N>& of_inputs) const {
    return [=](int64_t at) BNAR_LAMBDA { return of_inputs.At(at); };
  }

  template <typename A>
  BNAR_INLINE uint32_t ReadMask(const uint8_t* mask, int64_t at) const {
    MaskBits<A> bits;
    std::memcpy(&bits, mask + at / 8, sizeof(bits));
    return bits;
  }

  template <typename A>
  BNAR_INLINE void WriteMask(uint8_t* mask, int64_t at,
                             uint32_t all_bits) const {
    const auto bits = static_cast<MaskBits<A>>(all_bits);
    std::memcpy(mask + at / 8, &bits, sizeof(bits));
  }
};

// Calls strip(RowsStrip) for all of a tile, row by row.
template <typename F>
BNAR_INLINE void ForEachStrip(RowsTile tile, F strip) {
  const int64_t columns = std::min(kStrip, tile.width);
  const int64_t rows = RowsStrip::RowsOf(columns);
  for (int64_t r = 0; r < tile.rows; r += rows) {
    for (int64_t c = 0; c < tile.width; c += columns) {
      strip(RowsStrip{r, std::min(rows, tile.rows - r), c,
                      std::min(columns, tile.width - c), tile.stride});
    }
  }
}

}  // namespace

template <typename T, int N>
void RowsNormaliseCurve(const RowsTile& tile, const NormaliseArgs<N>& args) {
  alignas(64) Accumulator<T> values[kStrip];
  ForEachStrip(tile, [&](const RowsStrip& strip) BNAR_LAMBDA {
    NormaliseStrip<T, N>(strip, args, values);
  });
  if (args.non_temporal) NonTemporalFence();
}

template <typename T, int N>
void RowsReduceCurve(const RowsTile& tile, const ReduceArgs<N>& args) {
  using A = Accumulator<T>;
  const bool non_temporal = args.non_temporal;
  const T* dy = static_cast<const T*>(args.dy);
  const Pointers<const T, N> x(args.x);
  T* dz = static_cast<T*>(args.dz);
  const InputColumns<A, N> columns(args);
  alignas(64) A sums[kSumColumns], centred_sums[N][kSumColumns];
  const Vec<A> stopping = StoppingDerivative<A>(args.activation);
  alignas(64) A derivatives[kStrip];
  static_assert(kSumColumns <= kStrip, "a row of a block is a strip");
  ForEachBlock<1>(tile, [&](const Block& block, auto) BNAR_LAMBDA {
    std::fill(sums, sums + block.columns, A{0});
    ForEachInput<N>([&](auto input) BNAR_LAMBDA {
      std::fill(centred_sums[input], centred_sums[input] + block.columns, A{0});
    });
    const int64_t end = block.begin + block.count;
    const int64_t rows = RowsStrip::RowsOf(block.columns);
    for (int64_t r = block.begin; r < end; r += rows) {
      const RowsStrip strip{r, std::min(rows, end - r), block.column,
                            block.columns, tile.stride};
      Derivatives<T, N>(strip, args, derivatives);
      strip.template ForEachVector<A>([&](int64_t at, int64_t column,
                                          int64_t i) BNAR_LAMBDA {
        const int64_t c = column - block.column;
        const auto centred = columns.template At<Gate::kNone>(column).Centred(
            [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); });
        const Vec<A> e =
            Differentiated(Load(derivatives + i), Load(dy + at), stopping);
        StoreLanes(sums + c, Load(sums + c) + e);
        ForEachInput<N>([&](auto input) BNAR_LAMBDA {
          A* sum = centred_sums[input] + c;
          StoreLanes(sum, Load(sum) + e * centred[input]);
        });
        if (dz != nullptr) StoreResult(non_temporal, dz + at, Round<T>(e));
      });
    }
    HandOver(block, sums, args.sum_e);
    ForEachInput<N>([&](auto input) BNAR_LAMBDA {
      HandOver<A>(block, centred_sums[input], args.sum_e_centred[input]);
    });
  });
  if (non_temporal) NonTemporalFence();
}

template <typename T, int N>
void RowsApplyCurve(const RowsTile& tile, const ApplyArgs<N>& args) {
  alignas(64) Accumulator<T> derivatives[kStrip];
  ForEachStrip(tile, [&](const RowsStrip& strip) BNAR_LAMBDA {
    ApplyStrip<T, N>(strip, args, derivatives);
  });
  if (args.non_temporal) NonTemporalFence();
}

BNAR_INSTANTIATE_CURVE(RowsNormaliseCurve, RowsTile, NormaliseArgs)
BNAR_INSTANTIATE_CURVE(RowsReduceCurve, RowsTile, ReduceArgs)
BNAR_INSTANTIATE_CURVE(RowsApplyCurve, RowsTile, ApplyArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
