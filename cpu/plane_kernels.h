// Kernels of planes: contiguous runs of one channel, of any length from sixteen
// on. Compiled once for each instruction set (see simd.h).

#ifndef JAX_BNAR_CPU_PLANE_KERNELS_H_
#define JAX_BNAR_CPU_PLANE_KERNELS_H_

#include <algorithm>

#include "cpu/rows_kernels.h"
#include "native/numerics.h"

namespace jax_bnar {
namespace BNAR_ISA {

// Elements between two hand-overs from float to double sums.
constexpr int64_t kSegment = 2048;

template <typename A>
BNAR_INLINE double LaneSum(const Vec<A>& v) {
  A lanes[kLanes];
  std::memcpy(lanes, &v, sizeof(lanes));
  double sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
}

// Keeps the first n lanes, the others become 0.
template <typename A>
BNAR_INLINE Vec<A> FirstLanes(const Vec<A>& v, int n) {
  return WhereBits((1u << n) - 1u, v);
}

// Calls full(i) for each whole vector and partial(i, n) for what remains.
template <typename Full, typename Partial>
BNAR_INLINE void ForEachVector(int64_t size, Full full, Partial partial) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) full(i);
  if (i < size) partial(i, static_cast<int>(size - i));
}

// --- bits that start anywhere in a byte --------------------------------------

BNAR_INLINE uint32_t ReadBits(const uint8_t* mask, int64_t bit, int n) {
  const uint8_t* p = mask + bit / 8;
  const int offset = static_cast<int>(bit % 8);
  uint32_t value = 0;
  for (int byte = 0; byte * 8 < offset + n; ++byte) {
    value |= static_cast<uint32_t>(p[byte]) << (8 * byte);
  }
  return value >> offset;
}

// Planes are written in order: a byte's low bits are there before its high
// ones.
BNAR_INLINE void WriteBits(uint8_t* mask, int64_t bit, int n, uint32_t bits) {
  uint8_t* p = mask + bit / 8;
  const int offset = static_cast<int>(bit % 8);
  const uint32_t kept = offset ? p[0] & ((1u << offset) - 1u) : 0u;
  const uint32_t value = kept | (bits << offset);
  for (int byte = 0; byte * 8 < offset + n; ++byte) {
    p[byte] = static_cast<uint8_t>(value >> (8 * byte));
  }
}

// --- statistics --------------------------------------------------------------

// An element near the mean: see ShiftOfColumns. The middle one of five such,
// each from five places, for the few cache lines that are waited for.
template <typename T>
BNAR_INLINE Accumulator<T> ShiftOfPlane(const T* x, int64_t size) {
  const auto sample = [&](int i) {
    return Load(x + SampleAt(i, size - kLanes + 1));
  };
  Accumulator<T> lanes[kLanes], spread[kSamples];
  StoreLanes(lanes,
             Median(sample(0), sample(1), sample(2), sample(3), sample(4)));
  for (int i = 0; i < kSamples; ++i) spread[i] = lanes[3 * i];
  return FiniteMedian(spread);
}

template <typename T>
void PlaneStatistics(const Plane& plane, const void* x_pointer,
                     const void* origin, double* sum, double* m2) {
  using A = Accumulator<T>;
  const A shift_scalar =
      ShiftOfPlane(static_cast<const T*>(x_pointer), plane.size);
  const Vec<A> shift = Broadcast<A>(shift_scalar);
  double total = 0, total_squares = 0;
  for (int64_t begin = 0; begin < plane.size; begin += kSegment) {
    const T* x = static_cast<const T*>(x_pointer) + begin;
    const int64_t size = std::min(kSegment, plane.size - begin);
    // Two pairs of sums hide the latency of an addition.
    Vec<A> s1[2] = {Zero<A>(), Zero<A>()};
    Vec<A> s2[2] = {Zero<A>(), Zero<A>()};
    ForEachVector(
        size,
        [&](int64_t i) {
          const Vec<A> d = Load(x + i) - shift;
          const int p = (i / kLanes) & 1;
          s1[p] = s1[p] + d;
          s2[p] = s2[p] + d * d;
        },
        [&](int64_t i, int n) {
          const Vec<A> d = FirstLanes(LoadPartial(x + i, n) - shift, n);
          s1[0] = s1[0] + d;
          s2[0] = s2[0] + d * d;
        });
    total += LaneSum(s1[0]) + LaneSum(s1[1]);
    total_squares += LaneSum(s2[0]) + LaneSum(s2[1]);
  }
  const double n = static_cast<double>(plane.size);
  *sum =
      n * (static_cast<double>(shift_scalar) - *static_cast<const A*>(origin)) +
      total;
  *m2 = SquaredDeviations(total, total_squares, n);
}

// --- normalise ---------------------------------------------------------------

template <typename T, bool kRelu, bool kResidual, bool kMask, bool kStream>
void PlaneNormalise(const Plane& plane, const NormaliseArgs& args) {
  using A = Accumulator<T>;
  using Kernel = Normalise<T, kRelu, kResidual, kMask, kStream>;
  const T* x = static_cast<const T*>(args.x);
  const T* z = static_cast<const T*>(args.z);
  T* y = static_cast<T*>(args.y);
  const Vec<A> mean = Broadcast(*static_cast<const A*>(args.mean));
  const Vec<A> a = Broadcast(*static_cast<const A*>(args.a));
  const Vec<A> b = Broadcast(*static_cast<const A*>(args.b));
  ForEachVector(
      plane.size,
      [&](int64_t i) {
        const Vec<A> value = Kernel::Element(
            Load(x + i), kResidual ? z + i : nullptr, mean, a, b);
        StoreResult<T, kStream>(y + i, Round<T>(value));
        if constexpr (kMask) {
          WriteBits(args.mask, plane.mask_bit + i, kLanes,
                    PositiveBits<T>(value));
        }
      },
      [&](int64_t i, int n) {
        T residual[kLanes] = {};
        if constexpr (kResidual) {
          std::memcpy(static_cast<void*>(residual), z + i, n * sizeof(T));
        }
        const Vec<A> value =
            Kernel::Element(LoadPartial(x + i, n), residual, mean, a, b);
        StorePartial(y + i, Round<T>(value), n);
        if constexpr (kMask) {
          const uint32_t bits = PositiveBits<T>(value);
          WriteBits(args.mask, plane.mask_bit + i, n, bits & ((1u << n) - 1u));
        }
      });
  if constexpr (kStream) StreamingFence();
}

// --- backward ----------------------------------------------------------------

template <Gate kGate, typename A>
BNAR_INLINE GateVectors<A> PlaneVectors(const void* mean, const void* a,
                                        const void* bias) {
  GateVectors<A> r{};
  r.mean = Broadcast(*static_cast<const A*>(mean));
  if constexpr (kGate == Gate::kX) {
    r.a = Broadcast(*static_cast<const A*>(a));
    r.bias = Broadcast(*static_cast<const A*>(bias));
  }
  return r;
}

template <Gate kGate, typename T, typename A = Accumulator<T>>
BNAR_INLINE Vec<A> PlaneGated(const T* dy, const void* saved, int64_t i,
                              int64_t mask_bit, const Vec<A>& centred,
                              const GateVectors<A>& vectors) {
  if constexpr (kGate == Gate::kMask) {
    const uint8_t* mask = static_cast<const uint8_t*>(saved);
    return WhereBits(ReadBits(mask, mask_bit + i, kLanes), Load(dy + i));
  } else {
    return Gated<kGate>(dy, saved, i, centred, vectors).e;
  }
}

// The lanes from n on are 0, so that they add nothing to a sum.
template <Gate kGate, typename T, typename A = Accumulator<T>>
BNAR_INLINE Vec<A> PlaneGatedPartial(const T* dy, const void* saved, int64_t i,
                                     int64_t mask_bit, const Vec<A>& centred,
                                     const GateVectors<A>& vectors, int n) {
  const Vec<A> e = LoadPartial(dy + i, n);
  if constexpr (kGate == Gate::kY) {
    const T* y = static_cast<const T*>(saved);
    return WherePositive(LoadPartial(y + i, n), e);
  } else if constexpr (kGate == Gate::kMask) {
    const uint8_t* mask = static_cast<const uint8_t*>(saved);
    return WhereBits(ReadBits(mask, mask_bit + i, n), e);
  } else if constexpr (kGate == Gate::kX) {
    return WhereRoundsPositive<T>(vectors.Normalised(centred), e);
  } else {
    return e;
  }
}

// kStream is of use with a residual only.
template <typename T, Gate kGate, bool kResidual, bool kStream>
void PlaneReduce(const Plane& plane, const ReduceArgs& args) {
  using A = Accumulator<T>;
  const T* dy = static_cast<const T*>(args.dy);
  const T* x = static_cast<const T*>(args.x);
  T* dz = static_cast<T*>(args.dz);
  const auto vectors = PlaneVectors<kGate, A>(args.mean, args.a, args.bias);
  double sum_e = 0, sum_e_centred = 0;
  for (int64_t begin = 0; begin < plane.size; begin += kSegment) {
    const int64_t size = std::min(kSegment, plane.size - begin);
    Vec<A> s0[2] = {Zero<A>(), Zero<A>()};
    Vec<A> s1[2] = {Zero<A>(), Zero<A>()};
    ForEachVector(
        size,
        [&](int64_t j) {
          const int64_t i = begin + j;
          const int p = (j / kLanes) & 1;
          const Vec<A> centred = Load(x + i) - vectors.mean;
          const Vec<A> e = PlaneGated<kGate>(dy, args.saved, i, plane.mask_bit,
                                             centred, vectors);
          s0[p] = s0[p] + e;
          s1[p] = s1[p] + e * centred;
          if constexpr (kResidual) {
            StoreResult<T, kStream>(dz + i, Narrow<T>(e));
          }
        },
        [&](int64_t j, int n) {
          const int64_t i = begin + j;
          const Vec<A> centred =
              FirstLanes(LoadPartial(x + i, n) - vectors.mean, n);
          const Vec<A> e = PlaneGatedPartial<kGate>(
              dy, args.saved, i, plane.mask_bit, centred, vectors, n);
          s0[0] = s0[0] + e;
          s1[0] = s1[0] + e * centred;
          if constexpr (kResidual) StorePartial(dz + i, Narrow<T>(e), n);
        });
    sum_e += LaneSum(s0[0]) + LaneSum(s0[1]);
    sum_e_centred += LaneSum(s1[0]) + LaneSum(s1[1]);
  }
  if constexpr (kStream) StreamingFence();
  *args.sum_e = sum_e;
  *args.sum_e_centred = sum_e_centred;
}

template <typename T, Gate kGate, bool kStream>
void PlaneApply(const Plane& plane, const ApplyArgs& args) {
  using A = Accumulator<T>;
  using Kernel = Apply<T, kGate, kStream>;
  const T* dy = static_cast<const T*>(args.e);
  const T* x = static_cast<const T*>(args.x);
  T* dx = static_cast<T*>(args.dx);
  const auto vectors = PlaneVectors<kGate, A>(args.mean, args.a, args.bias);
  const Vec<A> a = Broadcast(*static_cast<const A*>(args.a));
  const Vec<A> b = Broadcast(*static_cast<const A*>(args.b));
  const Vec<A> k = Broadcast(*static_cast<const A*>(args.k));
  ForEachVector(
      plane.size,
      [&](int64_t i) {
        const Vec<A> centred = Load(x + i) - vectors.mean;
        const Vec<A> e = PlaneGated<kGate>(dy, args.saved, i, plane.mask_bit,
                                           centred, vectors);
        StoreResult<T, kStream>(dx + i, Kernel::Element(e, centred, a, b, k));
      },
      [&](int64_t i, int n) {
        const Vec<A> centred = LoadPartial(x + i, n) - vectors.mean;
        const Vec<A> e = PlaneGatedPartial<kGate>(
            dy, args.saved, i, plane.mask_bit, centred, vectors, n);
        StorePartial(dx + i, Kernel::Element(e, centred, a, b, k), n);
      });
  if constexpr (kStream) StreamingFence();
}

}  // namespace BNAR_ISA
}  // namespace jax_bnar

#endif  // JAX_BNAR_CPU_PLANE_KERNELS_H_
