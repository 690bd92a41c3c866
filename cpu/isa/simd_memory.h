// Loads and stores of vectors. This header is compiled once for each
// instruction set (see simd.h).

#ifndef JAX_BNAR_CPU_ISA_SIMD_MEMORY_H_
#define JAX_BNAR_CPU_ISA_SIMD_MEMORY_H_

#include "cpu/isa/convert.h"
#include "cpu/isa/simd.h"

namespace jax_bnar::cpu::BNAR_ISA {

// Vectors are read, written and copied one part at a time. GCC 12 copies all
// parts of a Vec or Stored at once in pieces of 16 bytes, through the stack,
// and a load of a part then waits until the pieces are in the cache.

template <typename V, typename T>
BNAR_INLINE V LoadPart(const T* p) {
  V part;
  std::memcpy(&part, static_cast<const void*>(p), sizeof(part));
  return part;
}

template <typename A>
BNAR_INLINE void StoreLanes(A* p, const Vec<A>& v) {
  using P = Part<A>;
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    std::memcpy(p + i * P::kLanesPerPart, &v.part[i], sizeof(v.part[i]));
  }
}

template <typename T>
BNAR_INLINE Stored<T> LoadStored(const T* p) {
  Stored<T> r;
  BNAR_UNROLL
  for (int i = 0; i < Stored<T>::kCount; ++i) {
    r.part[i] =
        LoadPart<typename Stored<T>::Part>(p + i * Stored<T>::kLanesPerPart);
  }
  return r;
}

template <typename T>
BNAR_INLINE Vec<Accumulator<T>> Load(const T* p) {
  return Widen<T>(LoadStored(p));
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Each half of a register is filled from memory, which is cheaper than to load
// all at once and to take it apart.
BNAR_INLINE Vec<float> Load(const BFloat16* p) {
  using P = Part<float>;
  // Byte i of the result is byte index[i] of the same half, or 0.
  const __m256i index = _mm256_setr_epi8(
      -1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
      -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  Vec<float> r;
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    const auto half = LoadPart<__m128i>(p + i * P::kLanesPerPart);
    r.part[i] = BitCast<P::Float>(
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(half), index));
  }
  return r;
}

BNAR_INLINE Vec<float> Load(const Float16* p) {
  using P = Part<float>;
  Vec<float> r;
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    const auto half = LoadPart<__m128i>(p + i * P::kLanesPerPart);
    r.part[i] = BitCast<P::Float>(_mm256_cvtph_ps(half));
  }
  return r;
}
#endif

template <typename T>
BNAR_INLINE void Store(T* p, const Stored<T>& stored) {
  BNAR_UNROLL
  for (int i = 0; i < Stored<T>::kCount; ++i) {
    std::memcpy(static_cast<void*>(p + i * Stored<T>::kLanesPerPart),
                &stored.part[i], sizeof(stored.part[i]));
  }
}

// Returns `stored` where gate > 0 and 0 elsewhere, also where gate is NaN.
// Sixteen-bit floats need no conversion: the bits of positive ones, as
// integers, are those from 1 to the bits of Inf.
template <typename T>
BNAR_INLINE Stored<T> WhereStoredPositive(const Stored<T>& gate,
                                          const Stored<T>& stored) {
  Stored<T> r;
  BNAR_UNROLL
  for (int i = 0; i < Stored<T>::kCount; ++i) {
    const auto zero = decltype(+stored.part[i]){};
    if constexpr (std::is_same_v<T, BFloat16>) {
      r.part[i] =
          gate.part[i] - uint16_t{1} < uint16_t{0x7f80} ? stored.part[i] : zero;
    } else if constexpr (std::is_same_v<T, Float16>) {
      r.part[i] =
          gate.part[i] - uint16_t{1} < uint16_t{0x7c00} ? stored.part[i] : zero;
    } else {
      r.part[i] = gate.part[i] > zero ? stored.part[i] : zero;
    }
  }
  return r;
}

// Stores past the caches. p is aligned to the size of a part.
template <typename T>
BNAR_INLINE void StoreNonTemporal(T* p, const Stored<T>& stored) {
#if defined(__x86_64__)
  constexpr int kBytes = sizeof(stored.part[0]);
  BNAR_UNROLL
  for (int i = 0; i < Stored<T>::kCount; ++i) {
    char* target = reinterpret_cast<char*>(p) + i * kBytes;
#if defined(__AVX512F__)
    if constexpr (kBytes == 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target),
                          BitCast<__m512i>(stored.part[i]));
    }
#endif
#if defined(__AVX2__)
    if constexpr (kBytes == 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target),
                          BitCast<__m256i>(stored.part[i]));
    }
#endif
    if constexpr (kBytes == 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target),
                       BitCast<__m128i>(stored.part[i]));
    }
  }
#else
  Store(p, stored);
#endif
}

// Orders non-temporal stores before the hand-over to another thread.
BNAR_INLINE void NonTemporalFence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_SIMD_MEMORY_H_
