#include "cuda/launch/forward_kernels.cuh"

namespace jax_bnar {
namespace cuda {

template ForwardKernels ForwardKernelsOf<__nv_bfloat16>(Layout, int, bool,
                                                        Activation, bool);

}  // namespace cuda
}  // namespace jax_bnar
