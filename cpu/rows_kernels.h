// Kernels of tiles whose columns are channels. Compiled once for each
// instruction set (see simd.h).

#ifndef JAX_BNAR_CPU_ROWS_KERNELS_H_
#define JAX_BNAR_CPU_ROWS_KERNELS_H_

#include <algorithm>

#include "cpu/simd.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar {
namespace BNAR_ISA {

// Rows between two hand-overs from float to double sums. Around a shift taken
// from the block itself the cancellation costs at most a factor of this many
// rows, whatever the data; the sums of a block live in registers.
constexpr int64_t kBlockRows = 32;
// Vectors of 16 columns that a strip keeps in registers.
constexpr int kStrip = 4;
// Rows of a strip in the elementwise passes: enough to reuse the constants, few
// enough to keep the number of memory streams low.
constexpr int64_t kElementwiseRows = 8;

// Calls strip(column, number of vectors as integral_constant) from left to
// right over a row.
template <typename F>
BNAR_INLINE void ForEachStrip(int64_t width, F strip) {
  int64_t c = 0;
  for (; c + kStrip * kLanes <= width; c += kStrip * kLanes) {
    strip(c, std::integral_constant<int, kStrip>());
  }
  for (; c < width; c += kLanes) {
    strip(c, std::integral_constant<int, 1>());
  }
}

// --- statistics --------------------------------------------------------------

template <typename T, int kVecs>
BNAR_INLINE void StatisticsStrip(const T* x, int64_t rows, int64_t stride,
                                 int64_t rows_before, double* sum, double* m2) {
  using A = Accumulator<T>;
  Vec<A> shift[kVecs], s1[kVecs], s2[kVecs];
  BNAR_UNROLL
  for (int v = 0; v < kVecs; ++v) {
    // An Inf as shift would make the mean NaN.
    shift[v] = WhereFinite(Load(x + v * kLanes));
    s1[v] = s2[v] = Zero<A>();
  }
  for (int64_t r = 0; r < rows; ++r) {
    BNAR_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const Vec<A> d = Load(x + r * stride + v * kLanes) - shift[v];
      s1[v] = s1[v] + d;
      s2[v] = s2[v] + d * d;
    }
  }
  alignas(64) A shift_lanes[kVecs * kLanes];
  alignas(64) A s1_lanes[kVecs * kLanes];
  alignas(64) A s2_lanes[kVecs * kLanes];
  std::memcpy(shift_lanes, shift, sizeof(shift));
  std::memcpy(s1_lanes, s1, sizeof(s1));
  std::memcpy(s2_lanes, s2, sizeof(s2));
  const double n = static_cast<double>(rows);
  const double m = static_cast<double>(rows_before);
  const double reciprocal = 1.0 / n;
  if (rows_before == 0) {
    for (int i = 0; i < kVecs * kLanes; ++i) {
      const double s = s1_lanes[i];
      sum[i] = n * shift_lanes[i] + s;
      m2[i] = s2_lanes[i] - s * s * reciprocal;
    }
    return;
  }
  // MergeStatistics, written out so that the compiler vectorises it.
  const double n_over_m = n / m;
  const double weight = m / (n * (m + n));
  for (int i = 0; i < kVecs * kLanes; ++i) {
    const double s = s1_lanes[i];
    const double block_sum = n * shift_lanes[i] + s;
    const double t = sum[i] * n_over_m - block_sum;
    m2[i] += (s2_lanes[i] - s * s * reciprocal) + t * t * weight;
    sum[i] += block_sum;
  }
}

template <typename T>
void RowsStatistics(const RowsTile& tile, const void* x_pointer, double* sum,
                    double* m2) {
  const T* x = static_cast<const T*>(x_pointer);
  for (int64_t r = 0; r < tile.rows; r += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, tile.rows - r);
    const T* block = x + r * tile.stride;
    ForEachStrip(tile.width, [&](int64_t c, auto vecs) {
      StatisticsStrip<T, decltype(vecs)::value>(block + c, rows, tile.stride, r,
                                                sum + c, m2 + c);
    });
  }
}

// --- normalise ---------------------------------------------------------------

template <typename T, bool kRelu, bool kResidual, bool kMask, bool kStream>
struct Normalise {
  using A = Accumulator<T>;

  static BNAR_INLINE Stored<T> Element(const Vec<A>& x, const T* z,
                                       const Vec<A>& mean, const Vec<A>& a,
                                       const Vec<A>& b) {
    Vec<A> y = (x - mean) * a + b;
    if constexpr (kResidual) y = y + Load(z);
    if constexpr (kRelu) y = Relu(y);
    return Round<T>(y);
  }

  static void Rows(const RowsTile& tile, const NormaliseArgs& args) {
    const T* x = static_cast<const T*>(args.x);
    const T* z = static_cast<const T*>(args.z);
    T* y = static_cast<T*>(args.y);
    const A* mean = static_cast<const A*>(args.mean);
    const A* a = static_cast<const A*>(args.a);
    const A* b = static_cast<const A*>(args.b);
    for (int64_t r0 = 0; r0 < tile.rows; r0 += kElementwiseRows) {
      const int64_t r1 = std::min(tile.rows, r0 + kElementwiseRows);
      ForEachStrip(tile.width, [&](int64_t c, auto vecs) {
        constexpr int kVecs = decltype(vecs)::value;
        Vec<A> strip_mean[kVecs], strip_a[kVecs], strip_b[kVecs];
        BNAR_UNROLL
        for (int v = 0; v < kVecs; ++v) {
          strip_mean[v] = Load(mean + c + v * kLanes);
          strip_a[v] = Load(a + c + v * kLanes);
          strip_b[v] = Load(b + c + v * kLanes);
        }
        for (int64_t r = r0; r < r1; ++r) {
          BNAR_UNROLL
          for (int v = 0; v < kVecs; ++v) {
            const int64_t i = r * tile.stride + c + v * kLanes;
            const Stored<T> stored =
                Element(Load(x + i), kResidual ? z + i : nullptr, strip_mean[v],
                        strip_a[v], strip_b[v]);
            if constexpr (kStream) {
              StoreStreaming(y + i, stored);
            } else {
              Store(y + i, stored);
            }
            if constexpr (kMask) {
              const uint16_t bits =
                  static_cast<uint16_t>(PositiveBits(Widen<T>(stored)));
              std::memcpy(args.mask + i / 8, &bits, sizeof(bits));
            }
          }
        }
      });
    }
    if constexpr (kStream) StreamingFence();
  }
};

// --- backward ----------------------------------------------------------------

// e: dy where the gate is open, else 0, for sixteen elements.
template <Gate kGate, typename T>
BNAR_INLINE Vec<Accumulator<T>> Gated(const T* dy, const void* evidence,
                                      int64_t i) {
  const Vec<Accumulator<T>> e = Load(dy + i);
  if constexpr (kGate == Gate::kY) {
    return WherePositive(Load(static_cast<const T*>(evidence) + i), e);
  } else if constexpr (kGate == Gate::kMask) {
    uint16_t bits;
    std::memcpy(&bits, static_cast<const uint8_t*>(evidence) + i / 8,
                sizeof(bits));
    return WhereBits(bits, e);
  } else {
    return e;
  }
}

template <typename T, Gate kGate, bool kResidual>
struct Reduce {
  using A = Accumulator<T>;

  template <int kVecs>
  static BNAR_INLINE void Strip(const RowsTile& tile, const ReduceArgs& args,
                                int64_t r0, int64_t r1, int64_t c) {
    const T* dy = static_cast<const T*>(args.dy);
    const T* x = static_cast<const T*>(args.x);
    T* dz = static_cast<T*>(args.dz);
    Vec<A> mean[kVecs], s0[kVecs], s1[kVecs];
    BNAR_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      mean[v] = Load(static_cast<const A*>(args.mean) + c + v * kLanes);
      s0[v] = s1[v] = Zero<A>();
    }
    for (int64_t r = r0; r < r1; ++r) {
      BNAR_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const int64_t i = r * tile.stride + c + v * kLanes;
        const Vec<A> e = Gated<kGate>(dy, args.evidence, i);
        if constexpr (kResidual) Store(dz + i, Round<T>(e));
        s0[v] = s0[v] + e;
        s1[v] = s1[v] + e * (Load(x + i) - mean[v]);
      }
    }
    alignas(64) A s0_lanes[kVecs * kLanes];
    alignas(64) A s1_lanes[kVecs * kLanes];
    std::memcpy(s0_lanes, s0, sizeof(s0));
    std::memcpy(s1_lanes, s1, sizeof(s1));
    double* sum_e = args.sum_e + c;
    double* sum_e_centred = args.sum_e_centred + c;
    const bool first = r0 == 0;
    for (int j = 0; j < kVecs * kLanes; ++j) {
      sum_e[j] = (first ? 0.0 : sum_e[j]) + s0_lanes[j];
      sum_e_centred[j] = (first ? 0.0 : sum_e_centred[j]) + s1_lanes[j];
    }
  }

  static void Rows(const RowsTile& tile, const ReduceArgs& args) {
    for (int64_t r = 0; r < tile.rows; r += kBlockRows) {
      const int64_t end = std::min(tile.rows, r + kBlockRows);
      ForEachStrip(tile.width, [&](int64_t c, auto vecs) {
        Strip<decltype(vecs)::value>(tile, args, r, end, c);
      });
    }
  }
};

template <typename T, Gate kGate, bool kStream>
struct Apply {
  using A = Accumulator<T>;

  static BNAR_INLINE Stored<T> Element(const Vec<A>& e, const Vec<A>& x,
                                       const Vec<A>& mean, const Vec<A>& a,
                                       const Vec<A>& b, const Vec<A>& k) {
    return Round<T>(a * e + (b * (x - mean) + k));
  }

  static void Rows(const RowsTile& tile, const ApplyArgs& args) {
    const T* dy = static_cast<const T*>(args.e);
    const T* x = static_cast<const T*>(args.x);
    T* dx = static_cast<T*>(args.dx);
    const A* mean = static_cast<const A*>(args.mean);
    const A* a = static_cast<const A*>(args.a);
    const A* b = static_cast<const A*>(args.b);
    const A* k = static_cast<const A*>(args.k);
    // Last rows first: the reduce pass left them in the cache.
    for (int64_t r1 = tile.rows; r1 > 0; r1 -= kElementwiseRows) {
      const int64_t r0 = std::max<int64_t>(0, r1 - kElementwiseRows);
      ForEachStrip(tile.width, [&](int64_t c, auto vecs) {
        constexpr int kVecs = decltype(vecs)::value;
        Vec<A> strip_mean[kVecs], strip_a[kVecs], strip_b[kVecs],
            strip_k[kVecs];
        BNAR_UNROLL
        for (int v = 0; v < kVecs; ++v) {
          strip_mean[v] = Load(mean + c + v * kLanes);
          strip_a[v] = Load(a + c + v * kLanes);
          strip_b[v] = Load(b + c + v * kLanes);
          strip_k[v] = Load(k + c + v * kLanes);
        }
        for (int64_t r = r0; r < r1; ++r) {
          BNAR_UNROLL
          for (int v = 0; v < kVecs; ++v) {
            const int64_t i = r * tile.stride + c + v * kLanes;
            const Stored<T> stored =
                Element(Gated<kGate>(dy, args.evidence, i), Load(x + i),
                        strip_mean[v], strip_a[v], strip_b[v], strip_k[v]);
            if constexpr (kStream) {
              StoreStreaming(dx + i, stored);
            } else {
              Store(dx + i, stored);
            }
          }
        }
      });
    }
    if constexpr (kStream) StreamingFence();
  }
};

}  // namespace BNAR_ISA
}  // namespace jax_bnar

#endif  // JAX_BNAR_CPU_ROWS_KERNELS_H_
