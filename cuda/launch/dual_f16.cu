#include "cuda/launch/dual_kernels.cuh"

namespace jax_bnar {
namespace cuda {

template DualForwardKernels DualForwardKernelsOf<__half>(Layout, int,
                                                         Activation, bool);
template DualBackwardKernels DualBackwardKernelsOf<__half>(Layout, int, Gate,
                                                           bool);

}  // namespace cuda
}  // namespace jax_bnar
