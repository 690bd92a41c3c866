// What the kernels of planes share. A plane is a contiguous run of elements of
// one channel, at least sixteen of them.

#ifndef JAX_BNAR_CPU_ISA_PLANES_H_
#define JAX_BNAR_CPU_ISA_PLANES_H_

#include <cstring>

#include "cpu/isa/elements.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/simd_memory.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

// The number of elements that are summed in the accumulation type before the
// sum is added to one in double.
constexpr int64_t kSegment = 2048;

// Adds up all lanes.
template <typename A, int kCount>
BNAR_INLINE double LaneSum(const Vec<A> (&vectors)[kCount]) {
  double sum = 0;
  for (const Vec<A>& v : vectors) {
    A lanes[kVecLanes<A>];
    StoreLanes(lanes, v);
    for (const A lane : lanes) sum += lane;
  }
  return sum;
}

// Keeps the first n lanes; the others become 0.
template <typename A>
BNAR_INLINE Vec<A> FirstLanes(const Vec<A>& v, int n) {
  return WhereBits((1u << n) - 1u, v);
}

// Calls full(i) for the whole vector that begins at each i, and partial(i, n)
// for the n elements that remain, if any.
template <typename T, typename Full, typename Partial>
BNAR_INLINE void ForEachVector(int64_t size, Full full, Partial partial) {
  constexpr int kStep = kVecLanes<Accumulator<T>>;
  int64_t i = 0;
  for (; i + kStep <= size; i += kStep) full(i);
  if (i < size) partial(i, static_cast<int>(size - i));
}

// Two sums of one register each hide the latency of an addition. A Vec of more
// registers does so by itself.
template <typename A>
constexpr int kSums = Part<A>::kCount > 1 ? 1 : 2;

// The same for a pass that sums: calls full(i, p), where p is one of kSums in
// turn. It is a constant, because the compiler keeps an array that is indexed
// by a variable in memory.
template <typename T, typename Full, typename Partial>
BNAR_INLINE void ForEachSummand(int64_t size, Full full, Partial partial) {
  using A = Accumulator<T>;
  int64_t i = 0;
  if constexpr (kSums<A> == 2) {
    constexpr int64_t kStep = 2 * kVecLanes<A>;
    for (; i + kStep <= size; i += kStep) {
      full(i, Constant<0>());
      full(i + kVecLanes<A>, Constant<1>());
    }
  }
  for (; i + kVecLanes<A> <= size; i += kVecLanes<A>) full(i, Constant<0>());
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

// Planes are written in order, so a byte's low bits are there before its high
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

// --- the gate of backward ----------------------------------------------------

// Returns e as Gated does, for a mask whose bits start anywhere in a byte.
template <Gate kGate, typename T, typename F, typename A = Accumulator<T>>
BNAR_INLINE Vec<A> PlaneGated(const T* dy, const void* saved, int64_t i,
                              int64_t mask_bit, F normalised) {
  if constexpr (kGate == Gate::kMask) {
    const uint8_t* mask = static_cast<const uint8_t*>(saved);
    return WhereBits(ReadBits(mask, mask_bit + i, kVecLanes<A>), Load(dy + i));
  } else {
    return Gated<kGate>(dy, saved, i, normalised).e;
  }
}

// The same for the last n elements. The lanes from n on are 0, so that they add
// nothing to a sum.
template <Gate kGate, typename T, typename F, typename A = Accumulator<T>>
BNAR_INLINE Vec<A> PlaneGatedPartial(const T* dy, const void* saved, int64_t i,
                                     int64_t mask_bit, F normalised, int n) {
  const Vec<A> e = LoadPartial(dy + i, n);
  if constexpr (kGate == Gate::kY) {
    const T* y = static_cast<const T*>(saved);
    return WherePositive(LoadPartial(y + i, n), e);
  } else if constexpr (kGate == Gate::kMask) {
    const uint8_t* mask = static_cast<const uint8_t*>(saved);
    return WhereBits(ReadBits(mask, mask_bit + i, n), e);
  } else if constexpr (kGate == Gate::kX) {
    return WhereRoundsPositive<T>(normalised(), e);
  } else {
    return e;
  }
}

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_PLANES_H_
