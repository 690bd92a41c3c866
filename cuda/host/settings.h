// What the environment asks of the CUDA kernels.

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
//   JAX_BNAR_CUDA_SM_MARGIN      how many multiprocessors "on_chip" leaves out
//                                when it counts its blocks, two for each, so
//                                that they and blocks of other work are on the
//                                device at the same time.
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

// Returns what ReadSettings returned at the first call, or at the first one
// after ForgetSettings. The environment is not read at every call, because
// another thread may change it at any time, and then the C library moves it.
// Any thread may call both.
std::string KnownSettings(Settings* settings);

// Lets a test or a benchmark go through all strategies in one process.
void ForgetSettings();

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_SETTINGS_H_
