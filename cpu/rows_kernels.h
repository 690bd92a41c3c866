// Kernels of tiles whose columns are channels. Compiled once for each
// instruction set (see simd.h).
//
// All walk along memory, row by row: the sums of a column live in the L1 cache,
// not in registers. Strips of many rows would keep them in registers, and two
// neighbouring rows side by side would halve the loads of sums; both defeat the
// prefetchers, and took 4 and 2 times as long. What they follow is two rows
// side by side that are half a tile apart: two streams along memory. Where the
// constants of a column are loaded, they serve both.

#ifndef JAX_BNAR_CPU_ROWS_KERNELS_H_
#define JAX_BNAR_CPU_ROWS_KERNELS_H_

#include <algorithm>
#include <type_traits>

#include "cpu/samples.h"
#include "cpu/simd_memory.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar {
namespace BNAR_ISA {

// Rows between two hand-overs from float to double sums.
constexpr int64_t kBlockRows = 32;
// Columns whose sums are kept in the L1 cache at once.
constexpr int64_t kSumColumns = 1024;
// Fewer rows are one stream.
constexpr int64_t kMinRowsOfStreams = 8;

// Rows [begin, begin + count) of each stream, and columns [column, column +
// columns). Streams are `distance` rows apart; `before` is the number of rows
// in the blocks before.
struct Block {
  int64_t begin;
  int64_t count;
  int64_t distance;
  int64_t before;
  int64_t column;
  int64_t columns;
};

// Calls block(Block, the number of its streams, as a type).
template <int kStreams, typename F>
BNAR_INLINE void ForEachBlock(const RowsTile& tile, F block) {
  const auto rows = [&](int64_t begin, int64_t count, int64_t distance,
                        int64_t before, auto streams) {
    for (int64_t c = 0; c < tile.width; c += kSumColumns) {
      block(Block{begin, count, distance, before, c,
                  std::min(kSumColumns, tile.width - c)},
            streams);
    }
  };
  int64_t done = 0;
  if (kStreams > 1 && tile.rows >= kMinRowsOfStreams) {
    const int64_t length = tile.rows / kStreams;
    for (int64_t r = 0; r < length; r += kBlockRows / kStreams) {
      rows(r, std::min(length - r, kBlockRows / kStreams), length, kStreams * r,
           std::integral_constant<int, kStreams>());
    }
    done = kStreams * length;
  }
  for (; done < tile.rows; done += kBlockRows) {
    const int64_t count = std::min(tile.rows - done, kBlockRows);
    rows(done, count, 0, done, std::integral_constant<int, 1>());
  }
}

// Stores hold up a load from an address that is a multiple of this away.
constexpr int64_t kAliasBytes = 4096;

// Calls element(index, distance to that of the second stream, column, the
// number of streams, as a type) for each sixteen columns of each row of an
// elementwise pass over T. Where results bypass the caches it is one stream:
// two took a quarter longer with 16 bits an element, which write half a line at
// a time, and as long with more. The tile is a copy, which no store can change.
template <typename T, bool kStream, typename F>
BNAR_INLINE void ForEachElement(RowsTile tile, F element) {
  const auto rows = [&](int64_t begin, int64_t end, int64_t distance,
                        auto streams) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < tile.width; c += kLanes) {
        element(r * tile.stride + c, distance * tile.stride, c, streams);
      }
    }
  };
  int64_t done = 0;
  if constexpr (!kStream) {
    const auto aliases = [&](int64_t distance) {
      return distance * tile.stride * sizeof(T) % kAliasBytes == 0;
    };
    int64_t half = tile.rows / 2;
    if (aliases(half)) --half;
    if (half > 0 && !aliases(half)) {
      rows(0, half, half, std::integral_constant<int, 2>());
      done = 2 * half;
    }
  }
  rows(done, tile.rows, 0, std::integral_constant<int, 1>());
}

// --- statistics --------------------------------------------------------------

// The middle one of five rows of the tile, in each column: near the mean, so
// that few digits of the squares cancel, wherever a few outliers lie. Far from
// the mean (k standard deviations) the shift would cost a factor of 1 + k^2.
template <typename T>
BNAR_INLINE Vec<Accumulator<T>> ShiftOfColumns(const RowsTile& tile,
                                               const T* x) {
  const auto sample = [&](int i) {
    return Load(x + SampleAt(i, tile.rows) * tile.stride);
  };
  // An Inf would make the mean NaN.
  return WhereFinite(
      Median(sample(0), sample(1), sample(2), sample(3), sample(4)));
}

// At most kSumColumns columns.
template <typename T>
BNAR_INLINE void StripStatistics(const RowsTile& tile, const T* first,
                                 const Accumulator<T>* origin, double* sum,
                                 double* m2) {
  using A = Accumulator<T>;
  const int64_t stride = tile.stride;
  alignas(64) A shift[kSumColumns], s1[kSumColumns], s2[kSumColumns];
  for (int64_t c = 0; c < tile.width; c += kLanes) {
    StoreLanes(shift + c, ShiftOfColumns(tile, first + c));
  }
  // Sums and squares around the shift.
  ForEachBlock<2>(tile, [&](const Block& block, auto streams) {
    constexpr int kStreams = decltype(streams)::value;
    const int64_t distance = block.distance * stride;
    std::fill(s1, s1 + tile.width, A{0});
    std::fill(s2, s2 + tile.width, A{0});
    for (int64_t r = block.begin; r < block.begin + block.count; ++r) {
      const T* row = first + r * stride;
      for (int64_t c = 0; c < tile.width; c += kLanes) {
        const Vec<A> around = Load(shift + c);
        Vec<A> sum_of_rows = Load(s1 + c), squares = Load(s2 + c);
        BNAR_UNROLL
        for (int k = 0; k < kStreams; ++k) {
          const Vec<A> d = Load(row + k * distance + c) - around;
          sum_of_rows = sum_of_rows + d;
          squares = squares + d * d;
        }
        StoreLanes(s1 + c, sum_of_rows);
        StoreLanes(s2 + c, squares);
      }
    }
    if (block.before == 0) {
      for (int64_t c = 0; c < tile.width; ++c) {
        sum[c] = s1[c];
        m2[c] = s2[c];
      }
    } else {
      for (int64_t c = 0; c < tile.width; ++c) {
        sum[c] += s1[c];
        m2[c] += s2[c];
      }
    }
  });
  const double n = static_cast<double>(tile.rows);
  const double reciprocal = 1.0 / n;
  for (int64_t c = 0; c < tile.width; ++c) {
    const double s = sum[c];
    sum[c] = n * (static_cast<double>(shift[c]) - origin[c]) + s;
    m2[c] -= s * s * reciprocal;
  }
}

template <typename T>
void RowsStatistics(const RowsTile& tile, const void* x, const void* origin,
                    double* sum, double* m2) {
  for (int64_t c = 0; c < tile.width; c += kSumColumns) {
    StripStatistics(
        RowsTile{tile.rows, std::min(kSumColumns, tile.width - c), tile.stride},
        static_cast<const T*>(x) + c,
        static_cast<const Accumulator<T>*>(origin) + c, sum + c, m2 + c);
  }
}

// --- normalise ---------------------------------------------------------------

template <typename T, bool kStream>
BNAR_INLINE void StoreResult(T* p, const Stored<T>& stored) {
  if constexpr (kStream) {
    StoreStreaming(p, stored);
  } else {
    Store(p, stored);
  }
}

template <typename T, bool kRelu, bool kResidual, bool kMask, bool kStream>
struct Normalise {
  using A = Accumulator<T>;

  // y before it is rounded.
  static BNAR_INLINE Vec<A> Element(const Vec<A>& x, const T* z,
                                    const Vec<A>& mean, const Vec<A>& a,
                                    const Vec<A>& b) {
    Vec<A> y = (x - mean) * a + b;
    if constexpr (kResidual) y = y + Load(z);
    if constexpr (kRelu) y = Relu(y);
    return y;
  }

  static void Rows(const RowsTile& tile, const NormaliseArgs& args) {
    const T* x = static_cast<const T*>(args.x);
    const T* z = static_cast<const T*>(args.z);
    T* y = static_cast<T*>(args.y);
    uint8_t* mask = args.mask;
    const A* means = static_cast<const A*>(args.mean);
    const A* multipliers = static_cast<const A*>(args.a);
    const A* biases = static_cast<const A*>(args.b);
    ForEachElement<T, kStream>(tile, [&](int64_t index, int64_t distance,
                                         int64_t column, auto streams) {
      const Vec<A> mean = Load(means + column);
      const Vec<A> a = Load(multipliers + column);
      const Vec<A> b = Load(biases + column);
      BNAR_UNROLL
      for (int k = 0; k < decltype(streams)::value; ++k) {
        const int64_t at = index + k * distance;
        const Vec<A> value =
            Element(Load(x + at), kResidual ? z + at : nullptr, mean, a, b);
        StoreResult<T, kStream>(y + at, Round<T>(value));
        if constexpr (kMask) {
          const uint16_t bits = static_cast<uint16_t>(PositiveBits<T>(value));
          std::memcpy(mask + at / 8, &bits, sizeof(bits));
        }
      }
    });
    if constexpr (kStream) StreamingFence();
  }
};

// --- backward ----------------------------------------------------------------

// Constants of sixteen columns, or of one plane.
template <typename A>
struct GateVectors {
  Vec<A> mean;
  Vec<A> a;     // with Gate::kX
  Vec<A> bias;  // with Gate::kX

  template <Gate kGate>
  static BNAR_INLINE GateVectors Columns(const A* mean, const A* a,
                                         const A* bias, int64_t c) {
    GateVectors r{};
    r.mean = Load(mean + c);
    if constexpr (kGate == Gate::kX) {
      r.a = Load(a + c);
      r.bias = Load(bias + c);
    }
    return r;
  }

  // The sum that Normalise forms, by the same operations: the same sign.
  BNAR_INLINE Vec<A> Normalised(const Vec<A>& centred) const {
    return centred * a + bias;
  }
};

// e, and how it is stored as dz (which loses nothing).
template <typename T>
struct GatedValue {
  Vec<Accumulator<T>> e;
  Stored<T> stored;
};

// dy where the gate is open, else 0, for sixteen elements.
template <Gate kGate, typename T, typename A = Accumulator<T>>
BNAR_INLINE GatedValue<T> Gated(const T* dy, const void* saved, int64_t i,
                                const Vec<A>& centred,
                                const GateVectors<A>& vectors) {
  GatedValue<T> r;
  if constexpr (kGate == Gate::kY) {
    const T* y = static_cast<const T*>(saved);
    r.stored = WhereStoredPositive<T>(LoadStored(y + i), LoadStored(dy + i));
    r.e = Widen<T>(r.stored);
    return r;
  }
  r.e = Load(dy + i);
  if constexpr (kGate == Gate::kMask) {
    uint16_t bits;
    std::memcpy(&bits,
                static_cast<const uint8_t*>(saved) +
                    static_cast<uint64_t>(i) / 8,  // a shift; i >= 0
                sizeof(bits));
    r.e = WhereBits(bits, r.e);
  } else if constexpr (kGate == Gate::kX) {
    r.e = WhereRoundsPositive<T>(vectors.Normalised(centred), r.e);
  }
  r.stored = Narrow<T>(r.e);
  return r;
}

// kStream is of use with a residual only.
template <typename T, Gate kGate, bool kResidual, bool kStream>
struct Reduce {
  using A = Accumulator<T>;

  static void Rows(const RowsTile& tile, const ReduceArgs& args) {
    const int64_t stride = tile.stride;
    const T* dy = static_cast<const T*>(args.dy);
    const T* x = static_cast<const T*>(args.x);
    T* dz = static_cast<T*>(args.dz);
    const void* saved = args.saved;
    const A* mean = static_cast<const A*>(args.mean);
    const A* a = static_cast<const A*>(args.a);
    const A* bias = static_cast<const A*>(args.bias);
    alignas(64) A s0[kSumColumns], s1[kSumColumns];
    ForEachBlock<kResidual ? 1 : 2>(
        tile, [&](const Block& block, auto streams) {
          constexpr int kStreams = decltype(streams)::value;
          const int64_t columns = block.columns;
          std::fill(s0, s0 + columns, A{0});
          std::fill(s1, s1 + columns, A{0});
          for (int64_t r = block.begin; r < block.begin + block.count; ++r) {
            const int64_t row = r * stride + block.column;
            for (int64_t c = 0; c < columns; c += kLanes) {
              const auto vectors = GateVectors<A>::template Columns<kGate>(
                  mean, a, bias, block.column + c);
              Vec<A> sum = Load(s0 + c), sum_centred = Load(s1 + c);
              BNAR_UNROLL
              for (int k = 0; k < kStreams; ++k) {
                const int64_t at = row + k * block.distance * stride + c;
                const Vec<A> centred = Load(x + at) - vectors.mean;
                const GatedValue<T> gated =
                    Gated<kGate>(dy, saved, at, centred, vectors);
                sum = sum + gated.e;
                sum_centred = sum_centred + gated.e * centred;
                // After the load of x: arrays that lie a multiple of 4 KiB
                // apart would make that load wait for this store.
                if constexpr (kResidual) {
                  StoreResult<T, kStream>(dz + at, gated.stored);
                }
              }
              StoreLanes(s0 + c, sum);
              StoreLanes(s1 + c, sum_centred);
            }
          }
          double* sum_e = args.sum_e + block.column;
          double* sum_e_centred = args.sum_e_centred + block.column;
          const bool first = block.before == 0;
          for (int64_t c = 0; c < columns; ++c) {
            sum_e[c] = (first ? 0.0 : sum_e[c]) + s0[c];
            sum_e_centred[c] = (first ? 0.0 : sum_e_centred[c]) + s1[c];
          }
        });
    if constexpr (kStream) StreamingFence();
  }
};

template <typename T, Gate kGate, bool kStream>
struct Apply {
  using A = Accumulator<T>;

  static BNAR_INLINE Stored<T> Element(const Vec<A>& e, const Vec<A>& centred,
                                       const Vec<A>& a, const Vec<A>& b,
                                       const Vec<A>& k) {
    return Round<T>(a * e + (b * centred + k));
  }

  static void Rows(const RowsTile& tile, const ApplyArgs& args) {
    const T* dy = static_cast<const T*>(args.e);
    const T* x = static_cast<const T*>(args.x);
    T* dx = static_cast<T*>(args.dx);
    const A* mean = static_cast<const A*>(args.mean);
    const A* a = static_cast<const A*>(args.a);
    const A* b = static_cast<const A*>(args.b);
    const A* k = static_cast<const A*>(args.k);
    const A* bias = static_cast<const A*>(args.bias);
    const void* saved = args.saved;
    ForEachElement<T, kStream>(tile, [&](int64_t index, int64_t distance,
                                         int64_t column, auto streams) {
      const auto vectors =
          GateVectors<A>::template Columns<kGate>(mean, a, bias, column);
      const Vec<A> of_e = Load(a + column);
      const Vec<A> of_x = Load(b + column);
      const Vec<A> constant = Load(k + column);
      BNAR_UNROLL
      for (int i = 0; i < decltype(streams)::value; ++i) {
        const int64_t at = index + i * distance;
        const Vec<A> centred = Load(x + at) - vectors.mean;
        const Vec<A> e = Gated<kGate>(dy, saved, at, centred, vectors).e;
        StoreResult<T, kStream>(dx + at,
                                Element(e, centred, of_e, of_x, constant));
      }
    });
    if constexpr (kStream) StreamingFence();
  }
};

}  // namespace BNAR_ISA
}  // namespace jax_bnar

#endif  // JAX_BNAR_CPU_ROWS_KERNELS_H_
