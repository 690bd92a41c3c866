// How the kernels of planes walk through memory, and what else they share.

#ifndef JAX_BNAR_CPU_ISA_PLANES_H_
#define JAX_BNAR_CPU_ISA_PLANES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/isa/elements.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/simd_memory.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

// The number of elements that are summed in the accumulation type before the
// sum is added to one in double.
constexpr int64_t kSegment = 2048;
// How many vectors are added up before their sum is added to that of a segment.
// The roundings of a longer sum do not cancel where its terms have few digits:
// sums of 256 squares of bfloat16 elements, one after the other, were too small
// by 17 times the largest error of one rounding.
constexpr int64_t kRun = 32;

// Adds up the lanes of a vector of doubles, half of them to the other half.
template <int kBytes>
BNAR_INLINE double LaneSum(const typename VectorOf<double, kBytes>::Type& v) {
  if constexpr (kBytes == 2 * sizeof(double)) {
    return v[0] + v[1];
  } else {
    typename VectorOf<double, kBytes / 2>::Type halves[2];
    std::memcpy(halves, &v, sizeof(v));
    return LaneSum<kBytes / 2>(halves[0] + halves[1]);
  }
}

// Adds up all lanes. They become doubles a register at a time: one at a time,
// they took twice as long as the elements of a short plane.
template <typename A, int kCount>
BNAR_INLINE double LaneSum(const Vec<A> (&vectors)[kCount]) {
  using Doubles = typename VectorOf<double, kNativeBytes>::Type;
  Doubles sum{};
  BNAR_UNROLL
  for (const Vec<A>& v : vectors) {
    BNAR_UNROLL
    for (const auto& part : v.part) {
      if constexpr (std::is_same_v<A, double>) {
        sum += part;
      } else {
        typename VectorOf<A, kNativeBytes / 2>::Type halves[2];
        std::memcpy(halves, &part, sizeof(part));
        sum += __builtin_convertvector(halves[0], Doubles);
        sum += __builtin_convertvector(halves[1], Doubles);
      }
    }
  }
  return LaneSum<kNativeBytes>(sum);
}

// Keeps the last n lanes; the others become 0.
template <typename A>
BNAR_INLINE Vec<A> LastLanes(const Vec<A>& v, int n) {
  constexpr int kLanesOfVec = kVecLanes<A>;
  return WhereBits(((1u << n) - 1u) << (kLanesOfVec - n), v);
}

// Calls plane(p, first) for each plane, where `first` is the index of its first
// element in the tile. The tile is passed by value, so that the compiler knows
// that no store can change it.
template <typename F>
BNAR_INLINE void ForEachPlane(PlanesTile tile, F plane) {
  // Otherwise Clang compiles a second loop for planes without elements.
  if (tile.size <= 0) __builtin_unreachable();
  for (int64_t p = 0; p < tile.planes; ++p) plane(p, p * tile.size);
}

// Calls vector(i) for the vector that begins at each i. If `size` is no
// multiple of a vector, the last one begins earlier than where the one before
// it ends. Loading fewer elements than a vector has took three times as long.
template <typename T, typename F>
BNAR_INLINE void ForEachVector(int64_t size, F vector) {
  constexpr int64_t kStep = kVecLanes<Accumulator<T>>;
  const int64_t last = size - kStep;
  for (int64_t i = 0;; i = std::min(i + kStep, last)) {
    vector(i);
    if (i == last) return;
  }
}

// Two sums of one register each hide the latency of an addition. A Vec of more
// registers does so by itself.
template <typename A>
constexpr int kSums = Part<A>::kCount > 1 ? 1 : 2;

// The sum of vectors, which are added up in runs.
template <typename A>
class SumOfRuns {
 public:
  // `k` is a constant below kSums.
  template <typename K>
  BNAR_INLINE void Add(K k, const Vec<A>& v) {
    run_[k] = run_[k] + v;
  }
  BNAR_INLINE void EndRun() {
    for (Vec<A>& run : run_) {
      segment_[0] = segment_[0] + run;
      run = {};
    }
  }
  // Of all lanes, after the last run.
  BNAR_INLINE double Total() const { return LaneSum(segment_); }

 private:
  Vec<A> run_[kSums<A>] = {};
  Vec<A> segment_[1] = {};
};

// ForEachVector for a pass that sums, of a segment that begins at `begin`:
// calls full(i, k), where k is one of kSums in turn, last(i, n) for a last
// vector of which only the last n lanes are new, and end_run(). Without kInRuns
// the segment is one run, for passes whose sums leave no registers for those of
// a segment. k is a constant, because the compiler keeps an array that is
// indexed by a variable in memory.
template <typename T, bool kInRuns, typename Full, typename Last,
          typename EndRun>
BNAR_INLINE void ForEachSummand(int64_t begin, int64_t size, Full full,
                                Last last, EndRun end_run) {
  using A = Accumulator<T>;
  constexpr int64_t kStep = kVecLanes<A>;
  const int64_t end = begin + size;
  int64_t i = begin;
  do {
    const int64_t end_of_run =
        kInRuns ? std::min(i + kRun * kSums<A> * kStep, end) : end;
    if constexpr (kSums<A> == 2) {
      for (; i + 2 * kStep <= end_of_run; i += 2 * kStep) {
        full(i, Constant<0>());
        full(i + kStep, Constant<1>());
      }
    }
    for (; i + kStep <= end_of_run; i += kStep) full(i, Constant<0>());
    if (i < end_of_run) {
      last(end - kStep, static_cast<int>(end - i));
      i = end;
    }
    end_run();
  } while (kInRuns && i < end);
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

// Keeps the bits before these in their first byte; those behind them come
// later, because planes are written in order.
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

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_PLANES_H_
