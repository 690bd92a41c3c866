// Loads and stores with cache hints. They are plain accesses that check
// alignment, which the device requires and x86 does not.

#ifndef CUDA_EMULATION_MEMORY_H_
#define CUDA_EMULATION_MEMORY_H_

#include <cstdint>
#include <type_traits>

#include "cuda_emulation.h"

namespace cuda_emulation {

template <typename T>
void CheckAligned(const T* pointer) {
  static_assert(sizeof(T) <= 16 && std::is_trivially_copyable_v<T>,
                "the device loads and stores up to 16 bytes at a time");
  if (reinterpret_cast<std::uintptr_t>(pointer) % sizeof(T) != 0) {
    Fail("misaligned access of %d bytes at %p", static_cast<int>(sizeof(T)),
         static_cast<const void*>(pointer));
  }
}

template <typename T>
T Load(const T* pointer) {
  CheckAligned(pointer);
  return *pointer;
}

// Only the pointer determines the type of the value, as in CUDA's overloads.
template <typename T>
struct Identity {
  using type = T;
};

template <typename T>
void Store(T* pointer, T value) {
  CheckAligned(pointer);
  *pointer = value;
}

}  // namespace cuda_emulation

#define CUDA_EMULATION_LOAD(name)         \
  template <typename T>                   \
  inline T name(const T* pointer) {       \
    return cuda_emulation::Load(pointer); \
  }
CUDA_EMULATION_LOAD(__ldg)
CUDA_EMULATION_LOAD(__ldca)
CUDA_EMULATION_LOAD(__ldcs)
CUDA_EMULATION_LOAD(__ldcg)
CUDA_EMULATION_LOAD(__ldcv)
CUDA_EMULATION_LOAD(__ldlu)
#undef CUDA_EMULATION_LOAD

#define CUDA_EMULATION_STORE(name)                                     \
  template <typename T>                                                \
  inline void name(T* pointer,                                         \
                   typename cuda_emulation::Identity<T>::type value) { \
    cuda_emulation::Store<T>(pointer, value);                          \
  }
CUDA_EMULATION_STORE(__stwb)
CUDA_EMULATION_STORE(__stcs)
CUDA_EMULATION_STORE(__stcg)
CUDA_EMULATION_STORE(__stwt)
#undef CUDA_EMULATION_STORE

#endif  // CUDA_EMULATION_MEMORY_H_
