#include "cuda/launch/dual_kernels.cuh"

namespace jax_bnar {
namespace cuda {

template DualForwardKernels DualForwardKernelsOf<float>(Layout, int, Activation,
                                                        bool);
template DualBackwardKernels DualBackwardKernelsOf<float>(Layout, int, Gate,
                                                          bool);

}  // namespace cuda
}  // namespace jax_bnar
