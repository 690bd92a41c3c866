// Handlers of the CUDA targets where no kernels can be loaded. XLA compiles a
// program only for targets that it knows, so they let it compile programs for
// the GPUs of other machines; to run one here is an error.

#ifndef JAX_BNAR_PYTHON_MODULE_MISSING_CUDA_H_
#define JAX_BNAR_PYTHON_MODULE_MISSING_CUDA_H_

#include <nanobind/nanobind.h>

namespace jax_bnar {

// Adds missing_cuda_kernels to a module; jax_bnar/_native.pyi describes it.
void AddMissingCuda(nanobind::module_& m);

}  // namespace jax_bnar

#endif  // JAX_BNAR_PYTHON_MODULE_MISSING_CUDA_H_
