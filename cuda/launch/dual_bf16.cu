#include "cuda/launch/dual_kernels.cuh"

namespace jax_bnar {
namespace cuda {

template DualForwardKernels DualForwardKernelsOf<__nv_bfloat16>(Layout, int,
                                                                Activation,
                                                                bool);
template DualBackwardKernels DualBackwardKernelsOf<__nv_bfloat16>(Layout, int,
                                                                  Gate, bool);

}  // namespace cuda
}  // namespace jax_bnar
