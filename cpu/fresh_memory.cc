#include "cpu/fresh_memory.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace jax_bnar::cpu {

bool IsFresh(const void* address) {
#ifdef __linux__
  static const uintptr_t size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t page = reinterpret_cast<uintptr_t>(address) / size * size;
  unsigned char resident = 1;
  return mincore(reinterpret_cast<void*>(page), 1, &resident) == 0 &&
         (resident & 1) == 0;
#else
  (void)address;
  return false;
#endif
}

}  // namespace jax_bnar::cpu
