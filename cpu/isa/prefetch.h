// Asks for what the kernels will read later.

#ifndef JAX_BNAR_CPU_ISA_PREFETCH_H_
#define JAX_BNAR_CPU_ISA_PREFETCH_H_

#include <algorithm>
#include <cstdint>

#include "cpu/isa/inputs.h"
#include "cpu/isa/simd.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

// Where a vector is one register and one cache line (elements of 4 bytes with
// AVX-512), the prefetchers of Zen 5 fall behind if there are several streams:
// backward reads two or three arrays at half to two thirds of the rate that
// AVX2 reaches with its loads of half a line. If the kernels name the lines
// themselves, it is as fast. Loads of half a line gain nothing by that in most
// shapes, and what is in the caches anyway would lose (docs/performance.md).
// With eight bytes the statistics would need more registers than there are.
template <typename A>
class Lookahead {
 public:
  // Rows are read in the same columns, so the distance is one of whole rows.
  template <typename Args>
  BNAR_INLINE Lookahead(const RowsTile& tile, const Args& args)
      : elements_(std::max<int64_t>(1, kElements / tile.stride) * tile.stride),
        wanted_(!args.fits_cache) {}
  template <typename Args>
  BNAR_INLINE Lookahead(const PlanesTile&, const Args& args)
      : elements_(kElements), wanted_(!args.fits_cache) {}

  // Prefetches the vector that lies the distance behind p.
  template <typename T>
  BNAR_INLINE void Prefetch(const T* p) const {
    if constexpr (sizeof(typename Stored<T>::Part) == kLineBytes &&
                  Stored<T>::kCount == 1) {
      if (wanted_) __builtin_prefetch(p + elements_);
    }
  }

  // The same of all arrays of forward, or of backward, for the element `at`.
  template <bool kResidual, typename In, typename Out, int N>
  BNAR_INLINE void OfForward(const Pointers<const In, N>& x, const Out* z,
                             int64_t at) const {
    ForEachInput<N>([&](auto input) BNAR_LAMBDA { Prefetch(x[input] + at); });
    if constexpr (kResidual) Prefetch(z + at);
  }
  template <Gate kGate, typename In, typename Out, int N>
  BNAR_INLINE void OfBackward(const Out* dy, const Pointers<const In, N>& x,
                              const void* saved, int64_t at) const {
    Prefetch(dy + at);
    ForEachInput<N>([&](auto input) BNAR_LAMBDA { Prefetch(x[input] + at); });
    if constexpr (kGate == Gate::kY) {
      Prefetch(static_cast<const Out*>(saved) + at);
    }
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  // 4 KiB ahead.
  static constexpr int64_t kElements = 4096 / sizeof(A);

  int64_t elements_;
  bool wanted_;
};

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_PREFETCH_H_
