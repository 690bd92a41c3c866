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
    return cache / 4;
  }();
  return threshold;
}

}  // namespace jax_bnar
