// The kernels of rows tiles with other activations than ReLU.

#include <algorithm>
#include <cstring>

#include "cpu/isa/elements.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/rows.h"
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

  // The number of rows that fill a strip.
  static int64_t RowsOf(int64_t columns) {
    return std::max<int64_t>(1, kStrip / columns);
  }
};

// Calls element(index, column, i) for each vector of a strip, where `index` is
// that of its first element in the tile, and i in the buffer.
template <typename A, typename F>
BNAR_INLINE void ForEachVectorOf(const RowsStrip& strip, int64_t stride,
                                 F element) {
  // Otherwise Clang compiles a second loop for strips without elements.
  if (strip.rows <= 0 || strip.columns <= 0) __builtin_unreachable();
  for (int64_t r = 0; r < strip.rows; ++r) {
    const int64_t index = (strip.row + r) * stride + strip.column;
    for (int64_t c = 0; c < strip.columns; c += kVecLanes<A>) {
      element(index + c, strip.column + c, r * strip.columns + c);
    }
  }
}

// Calls strip(RowsStrip) for all of a tile, row by row.
template <typename F>
BNAR_INLINE void ForEachStrip(RowsTile tile, F strip) {
  const int64_t columns = std::min(kStrip, tile.width);
  const int64_t rows = RowsStrip::RowsOf(columns);
  for (int64_t r = 0; r < tile.rows; r += rows) {
    for (int64_t c = 0; c < tile.width; c += columns) {
      strip(RowsStrip{r, std::min(rows, tile.rows - r), c,
                      std::min(columns, tile.width - c)});
    }
  }
}

// Writes the values before the activation to u.
template <typename T, int N, typename Args, typename F,
          typename A = Accumulator<T>>
BNAR_INLINE void Preactivations(const RowsStrip& strip, int64_t stride,
                                const Args& args, const void* residual, F as,
                                A* u) {
  const Pointers<const T, N> x(args.x);
  const T* z = static_cast<const T*>(residual);
  const InputColumns<A, N> columns(args);
  ForEachVectorOf<A>(
      strip, stride, [&](int64_t at, int64_t column, int64_t i) BNAR_LAMBDA {
        const auto vectors = columns.template At<Gate::kX>(column);
        Vec<A> value = vectors.Normalised(vectors.Centred(
            [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); }));
        if (kHasEveryForm<N> && z != nullptr) value = value + Load(z + at);
        StoreLanes(u + i, as(value));
      });
}

// Writes the derivatives of the activation to `derivatives`.
template <typename T, int N, typename Args, typename A = Accumulator<T>>
void Derivatives(const RowsStrip& strip, int64_t stride, const Args& args,
                 A* derivatives) {
  const Activation activation = args.activation;
  switch (args.gate) {
    case Gate::kNone:
      return;  // has no activation
    case Gate::kX:
    case Gate::kZ:
      Preactivations<T, N>(
          strip, stride, args, args.saved,
          [&](const Vec<A>& u)
              BNAR_LAMBDA { return AsSaved<T>(activation, u); },
          derivatives);
      break;
    case Gate::kY: {
      const T* y = static_cast<const T*>(args.saved);
      ForEachVectorOf<A>(strip, stride,
                         [&](int64_t at, int64_t, int64_t i) BNAR_LAMBDA {
                           StoreLanes(derivatives + i, Load(y + at));
                         });
      break;
    }
    case Gate::kMask: {
      const uint8_t* mask = static_cast<const uint8_t*>(args.saved);
      ForEachVectorOf<A>(strip, stride,
                         [&](int64_t at, int64_t, int64_t i) BNAR_LAMBDA {
                           MaskBits<A> bits;
                           std::memcpy(&bits, mask + at / 8, sizeof(bits));
                           StoreLanes(derivatives + i, OfBits<A>(bits));
                         });
      break;
    }
  }
  Differentiate<Precision<T>>(activation, derivatives,
                              strip.rows * strip.columns);
}

}  // namespace

template <typename T, int N>
void RowsNormaliseCurve(const RowsTile& tile, const NormaliseArgs<N>& args) {
  using A = Accumulator<T>;
  const int64_t stride = tile.stride;
  const Activation activation = args.activation;
  const bool non_temporal = args.non_temporal;
  T* y = static_cast<T*>(args.y);
  uint8_t* mask = args.mask;
  alignas(64) A values[kStrip];
  ForEachStrip(tile, [&](const RowsStrip& strip) BNAR_LAMBDA {
    const int64_t size = strip.rows * strip.columns;
    Preactivations<T, N>(
        strip, stride, args, args.z,
        [](const Vec<A>& u) BNAR_LAMBDA { return u; }, values);
    Activate<Precision<T>>(activation, values, size);
    ForEachVectorOf<A>(strip, stride,
                       [&](int64_t at, int64_t, int64_t i) BNAR_LAMBDA {
                         const auto stored = Round<T>(Load(values + i));
                         StoreResult(non_temporal, y + at, stored);
                         if (mask != nullptr) {
                           StoreLanes(values + i, Widen<T>(stored));
                         }
                       });
    if (mask == nullptr) return;
    Differentiate<Precision<T>>(activation, values, size);
    ForEachVectorOf<A>(
        strip, stride, [&](int64_t at, int64_t, int64_t i) BNAR_LAMBDA {
          const auto bits = static_cast<MaskBits<A>>(
              BitsOf(Load(values + i), activation.negative_slope));
          std::memcpy(mask + at / 8, &bits, sizeof(bits));
        });
  });
  if (non_temporal) NonTemporalFence();
}

template <typename T, int N>
void RowsReduceCurve(const RowsTile& tile, const ReduceArgs<N>& args) {
  using A = Accumulator<T>;
  const int64_t stride = tile.stride;
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
                            block.columns};
      Derivatives<T, N>(strip, stride, args, derivatives);
      ForEachVectorOf<A>(
          strip, stride,
          [&](int64_t at, int64_t column, int64_t i) BNAR_LAMBDA {
            const int64_t c = column - block.column;
            const auto centred =
                columns.template At<Gate::kNone>(column).Centred(
                    [&](auto input)
                        BNAR_LAMBDA { return Load(x[input] + at); });
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
  using A = Accumulator<T>;
  const int64_t stride = tile.stride;
  const bool non_temporal = args.non_temporal;
  const T* dy = static_cast<const T*>(args.e);
  const Pointers<const T, N> x(args.x);
  const Pointers<T, N> dx(args.dx);
  const InputColumns<A, N> columns(args);
  const GradientColumns<A, N> gradient_columns(args);
  const Vec<A> stopping = StoppingDerivative<A>(args.activation);
  alignas(64) A derivatives[kStrip];
  ForEachStrip(tile, [&](const RowsStrip& strip) BNAR_LAMBDA {
    Derivatives<T, N>(strip, stride, args, derivatives);
    ForEachVectorOf<A>(
        strip, stride, [&](int64_t at, int64_t column, int64_t i) BNAR_LAMBDA {
          const auto centred = columns.template At<Gate::kNone>(column).Centred(
              [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); });
          const Vec<A> e =
              Differentiated(Load(derivatives + i), Load(dy + at), stopping);
          ForEachInput<N>([&](auto input) BNAR_LAMBDA {
            // Loaded for one input after the other: those of two inputs, beside
            // the elements, are more than aarch64 has registers.
            const auto gradient = gradient_columns.At(column);
            StoreResult(non_temporal, dx[input] + at,
                        GradientElements<T>(gradient, input, e, centred));
          });
        });
  });
  if (non_temporal) NonTemporalFence();
}

BNAR_INSTANTIATE_CURVE(RowsNormaliseCurve, RowsTile, NormaliseArgs)
BNAR_INSTANTIATE_CURVE(RowsReduceCurve, RowsTile, ReduceArgs)
BNAR_INSTANTIATE_CURVE(RowsApplyCurve, RowsTile, ApplyArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
