#include "cuda/launch/dual_kernels.cuh"

namespace jax_bnar {
namespace cuda {

template DualForwardKernels DualForwardKernelsOf<double>(Layout, int,
                                                         Activation, bool);
template DualBackwardKernels DualBackwardKernelsOf<double>(Layout, int, Gate,
                                                           bool);

}  // namespace cuda
}  // namespace jax_bnar
