// What the memory hierarchy asks for.

#ifndef JAX_BNAR_CPU_CACHE_H_
#define JAX_BNAR_CPU_CACHE_H_

#include <cstdint>

namespace jax_bnar::cpu {

// Outputs are written past the caches where the arrays of a training step
// exceed this: three quarters of the L3 cache that a core sees on Zen 4. A
// plain store reads each line before it writes it, so that streaming wins by up
// to 40 % where the line is not in the cache; where it is, and stays there for
// whoever reads the output next, a plain store wins by as much. A constant,
// because glibc's _SC_LEVEL3_CACHE_SIZE is that of a whole socket (320 MB where
// a core sees 32). The native tests set it lower.
#ifndef BNAR_CACHE_MIB
#define BNAR_CACHE_MIB 24
#endif
constexpr int64_t kCacheBytes = int64_t{BNAR_CACHE_MIB} << 20;

// Arrays of one shape in such a step: x, y, dy, dx; with a residual z and dz.
constexpr int64_t ArraysOfStep(bool residual) { return residual ? 6 : 4; }

// Bytes of x for each further thread: below, it costs more than it brings.
constexpr int64_t kBytesPerThread = 64 * 1024;

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_CACHE_H_
