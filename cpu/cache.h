// What the memory hierarchy of this machine asks for.

#ifndef JAX_BNAR_CPU_CACHE_H_
#define JAX_BNAR_CPU_CACHE_H_

#include <cstdint>

namespace jax_bnar {

// Bytes from which on an output is written past the caches.
int64_t StreamingThreshold();

// Bytes of x below which a second thread costs more than it brings.
constexpr int64_t kSerialBytes = 64 * 1024;

}  // namespace jax_bnar

#endif  // JAX_BNAR_CPU_CACHE_H_
