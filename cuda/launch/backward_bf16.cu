#include "cuda/launch/backward_kernels.cuh"

namespace jax_bnar {
namespace cuda {

template BackwardKernels BackwardKernelsOf<__nv_bfloat16>(Layout, int, Gate,
                                                          bool, bool);

}  // namespace cuda
}  // namespace jax_bnar
