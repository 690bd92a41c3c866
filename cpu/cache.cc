#include "cpu/cache.h"

#include <unistd.h>

namespace jax_bnar {

int64_t StreamingThreshold() {
  static const int64_t threshold = [] {
    constexpr int64_t kUnknownCache = int64_t{32} << 20;
    int64_t cache = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
    cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    if (cache <= 0) cache = kUnknownCache;
    // Measured on Zen 4 with 32 MB: from 2 MB on, streaming wins by up to 40 %,
    // for a plain store reads each line before it writes it.
    return cache / 16;
  }();
  return threshold;
}

}  // namespace jax_bnar
