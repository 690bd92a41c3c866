// Atomic operations on integers. Those on floats are left out deliberately:
// their order, and hence the last bits of the sum, would differ from run to
// run.

#ifndef CUDA_EMULATION_ATOMICS_H_
#define CUDA_EMULATION_ATOMICS_H_

#include "cuda_emulation.h"

namespace cuda_emulation {

// Is called after each atomic operation, and yields, because kernels spin on
// atomics. `changed` says whether the memory now holds another value.
void AfterAtomic(bool changed);

template <typename T, typename Function>
T AtomicUpdate(T* pointer, Function function) {
  T old = __atomic_load_n(pointer, __ATOMIC_RELAXED);
  T updated;
  do {
    updated = function(old);
    // Launches of other host threads may share the memory.
  } while (!__atomic_compare_exchange_n(pointer, &old, updated, false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
  AfterAtomic(old != updated);
  return old;
}

// Wraps around as the device does. In C++, signed overflow would be undefined.
inline int WrappingAdd(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
}

}  // namespace cuda_emulation

inline int atomicAdd(int* pointer, int value) {
  return cuda_emulation::AtomicUpdate(pointer, [=](int old) {
    return cuda_emulation::WrappingAdd(old, value);
  });
}

#define CUDA_EMULATION_ATOMIC(name, type, expression)           \
  inline type name(type* pointer, type value) {                 \
    return cuda_emulation::AtomicUpdate(                        \
        pointer, [=](type old) -> type { return expression; }); \
  }
#define CUDA_EMULATION_ATOMIC_BITS(type)                                 \
  CUDA_EMULATION_ATOMIC(atomicAnd, type, old& value)                     \
  CUDA_EMULATION_ATOMIC(atomicOr, type, old | value)                     \
  CUDA_EMULATION_ATOMIC(atomicXor, type, old ^ value)                    \
  CUDA_EMULATION_ATOMIC(atomicExch, type, ((void)old, value))            \
  CUDA_EMULATION_ATOMIC(atomicMax, type, old < value ? value : old)      \
  CUDA_EMULATION_ATOMIC(atomicMin, type, value < old ? value : old)      \
  inline type atomicCAS(type* pointer, type compare, type value) {       \
    return cuda_emulation::AtomicUpdate(pointer, [=](type old) -> type { \
      return old == compare ? value : old;                               \
    });                                                                  \
  }

CUDA_EMULATION_ATOMIC_BITS(int)
CUDA_EMULATION_ATOMIC_BITS(unsigned)
CUDA_EMULATION_ATOMIC_BITS(unsigned long long)
CUDA_EMULATION_ATOMIC(atomicAdd, unsigned, old + value)
CUDA_EMULATION_ATOMIC(atomicAdd, unsigned long long, old + value)
CUDA_EMULATION_ATOMIC(atomicSub, unsigned, old - value)
CUDA_EMULATION_ATOMIC(atomicInc, unsigned, old >= value ? 0u : old + 1)
CUDA_EMULATION_ATOMIC(atomicDec, unsigned,
                      old == 0 || old > value ? value : old - 1)

#undef CUDA_EMULATION_ATOMIC
#undef CUDA_EMULATION_ATOMIC_BITS

#endif  // CUDA_EMULATION_ATOMICS_H_
