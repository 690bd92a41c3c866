// Chooses the instruction set at run time.

#ifndef JAX_BNAR_CPU_DISPATCH_H_
#define JAX_BNAR_CPU_DISPATCH_H_

#include <string>

#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu {

// The table of kernels of the best instruction set that this processor runs,
// for a Problem's dtype and out_dtype. For tests, the environment variable
// JAX_BNAR_CPU_ISA asks for a lesser one ("avx512bf16", "avx512", "avx2" or
// "baseline"; on aarch64 "neonbf16" or "baseline"); it is read once. Throws
// std::invalid_argument if its value is none of these, or one that this
// processor does not run.
const TileKernels& KernelsFor(DType dtype, DType out_dtype);

// The name of the instruction set that KernelsFor chooses, or of the best one
// if KernelsFor throws.
const char* IsaName();

// A sentence that says what is wrong with JAX_BNAR_CPU_ISA, or an empty string.
const std::string& WrongIsa();

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_DISPATCH_H_
