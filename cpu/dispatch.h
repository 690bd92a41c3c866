// Choice of the instruction set at run time.

#ifndef JAX_BNAR_CPU_DISPATCH_H_
#define JAX_BNAR_CPU_DISPATCH_H_

#include <string>

#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu {

// The best table of kernels that this processor runs. The environment variable
// JAX_BNAR_CPU_ISA ("avx512bf16", "avx512", "avx2", "baseline") asks for a
// lesser one, for tests; it is read once. Throws std::invalid_argument where
// its value is none of these, or one that this processor does not run.
const TileKernels& KernelsFor(DType dtype);

// The name of the instruction set that KernelsFor chose; of the best one where
// it throws.
const char* IsaName();

// What is wrong with JAX_BNAR_CPU_ISA, a sentence, or an empty string.
const std::string& WrongIsa();

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_DISPATCH_H_
