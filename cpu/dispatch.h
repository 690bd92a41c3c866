// Choice of the instruction set at run time.

#ifndef JAX_BNAR_CPU_DISPATCH_H_
#define JAX_BNAR_CPU_DISPATCH_H_

#include "cpu/tile_kernels.h"

namespace jax_bnar {

// The best table of kernels that this processor runs. The environment variable
// JAX_BNAR_CPU_ISA ("avx512bf16", "avx512", "avx2", "baseline") asks for a
// lesser one, for tests; it is read once.
const TileKernels& KernelsFor(DType dtype);

// The name of the instruction set that KernelsFor chose.
const char* IsaName();

}  // namespace jax_bnar

#endif  // JAX_BNAR_CPU_DISPATCH_H_
