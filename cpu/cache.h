// Constants that follow from the memory hierarchy.

#ifndef JAX_BNAR_CPU_CACHE_H_
#define JAX_BNAR_CPU_CACHE_H_

#include <algorithm>
#include <cstdint>

namespace jax_bnar::cpu {

// Outputs bypass the caches if the arrays of a training step exceed this size,
// which is three quarters of the L3 cache that a core sees on Zen 4. A plain
// store reads each line before it writes it, so streaming is up to 40 % faster
// if the line is not in the cache. If the line is there, and stays there for
// whoever reads the output next, a plain store is faster by as much. The size
// is a constant because glibc's _SC_LEVEL3_CACHE_SIZE is that of a whole socket
// (320 MB where a core sees 32). The native tests set it lower.
#ifndef BNAR_CACHE_MIB
#define BNAR_CACHE_MIB 24
#endif
constexpr int64_t kCacheBytes = int64_t{BNAR_CACHE_MIB} << 20;

// The bytes of such a step: x and dx of each input, of `bytes` each, and y and
// dy, and with a residual also z and dz, of `out_bytes` each.
constexpr int64_t BytesOfStep(int inputs, bool residual, int64_t bytes,
                              int64_t out_bytes) {
  return 2 * inputs * bytes + (residual ? 4 : 2) * out_bytes;
}

// Bytes of x for each thread. To wake one takes tens of microseconds on a
// virtual machine, more than it gains with less work than this (Xeon, two
// cores: at 64 KiB two threads take up to twice as long as one, and at 400 KiB
// as long, or with SiLU three quarters of it). The native tests set it lower.
#ifndef BNAR_KIB_PER_THREAD
#define BNAR_KIB_PER_THREAD 192
#endif
constexpr int64_t kBytesPerThread = int64_t{BNAR_KIB_PER_THREAD} << 10;

// How many threads may share the work on an x of so many bytes.
constexpr int64_t ThreadsFor(int64_t bytes) {
  return std::max<int64_t>(1, bytes / kBytesPerThread);
}

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_CACHE_H_
