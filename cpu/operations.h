// The operations of native/operations.h on the CPU, run by a pool of threads.

#ifndef JAX_BNAR_CPU_OPERATIONS_H_
#define JAX_BNAR_CPU_OPERATIONS_H_

#include "cpu/executor.h"
#include "native/operations.h"

namespace jax_bnar::cpu {

BNAR_DECLARE_STATISTICS(void, ThreadPool&);
BNAR_DECLARE_OPERATIONS(template <int N>, void, ThreadPool&, N);

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_OPERATIONS_H_
