// Whether memory was written before.

#ifndef JAX_BNAR_CPU_FRESH_MEMORY_H_
#define JAX_BNAR_CPU_FRESH_MEMORY_H_

namespace jax_bnar::cpu {

// Whether the page of an address is not in memory yet, so that the operating
// system zeroes it when it is first touched. False where it does not say.
bool IsFresh(const void* address);

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_FRESH_MEMORY_H_
