// What the environment asks of the CUDA kernels. It is read at every call, in
// one walk, so that a test can go through all strategies in one process.

#ifndef JAX_BNAR_CUDA_HOST_SETTINGS_H_
#define JAX_BNAR_CUDA_HOST_SETTINGS_H_

#include <string>

#include "cuda/host/plan.h"

namespace jax_bnar {
namespace cuda {

// As JAX_BNAR_CUDA_STRATEGY spells it.
const char* NameOf(Strategy strategy);

// JAX_BNAR_CUDA_STRATEGY: "auto", "on_chip", "cluster" or "two_kernels";
// where the device cannot do what is asked, the default for the shape.
// JAX_BNAR_CUDA_SM_MARGIN: multiprocessors to leave to other work.
// JAX_BNAR_CUDA_SLAB_CHANNELS: 8, 16, 32 or 64 neighbouring channels (NHWC) of
// which a slab consists, in place of as many as fit on chip.
// Any other JAX_BNAR_CUDA_... is a mistake.
// Returns what is wrong with them, or an empty string.
std::string ReadSettings(Settings* settings);

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_SETTINGS_H_
