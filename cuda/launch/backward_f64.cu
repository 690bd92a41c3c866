#include "cuda/launch/backward_kernels.cuh"

namespace jax_bnar {
namespace cuda {

template BackwardKernels BackwardKernelsOf<double>(Layout, int, Gate, bool,
                                                   bool);

}  // namespace cuda
}  // namespace jax_bnar
