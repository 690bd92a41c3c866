// What the environment asks of the CUDA kernels. It is read at every call, so
// that a test can go through all strategies in one process.

#ifndef JAX_BNAR_CUDA_HOST_SETTINGS_H_
#define JAX_BNAR_CUDA_HOST_SETTINGS_H_

#include <string>

#include "cuda/host/plan.h"

namespace jax_bnar {
namespace cuda {

// Reads these variables:
//   JAX_BNAR_CUDA_STRATEGY       "auto", "on_chip", "cluster" or "two_kernels".
//                                If the device cannot do what is asked, the
//                                planner chooses for the shape.
//   JAX_BNAR_CUDA_SM_MARGIN      multiprocessors to leave to other work.
//   JAX_BNAR_CUDA_SLAB_CHANNELS  a power of 2 from 8 to 256: the neighbouring
//                                channels (NHWC) of a slab, instead of the
//                                planner's choice.
//   JAX_BNAR_CUDA_TEAMS          how many teams of blocks share the device with
//                                "on_chip", at most one for each slab, instead
//                                of the planner's choice.
//   JAX_BNAR_CUDA_ZERO_WORKSPACE 1 zeroes the workspace before each launch. The
//                                kernels do not need it, but
//                                compute-sanitizer's initcheck reports a block
//                                that looks whether another block has written
//                                yet.
// Any other JAX_BNAR_CUDA_... is a mistake. Returns what is wrong, or an empty
// string.
std::string ReadSettings(Settings* settings);

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_SETTINGS_H_
