// The planner of the CUDA kernels for Python. It is host code, so that the
// module of the CPU kernels has it as well, and a machine without a GPU can
// predict what another one would do (`python -m benchmarks.gpu.model`).

#ifndef JAX_BNAR_PYTHON_MODULE_CUDA_PLANNER_H_
#define JAX_BNAR_PYTHON_MODULE_CUDA_PLANNER_H_

#include <nanobind/nanobind.h>

namespace jax_bnar {

// Adds the planner's functions, whose names begin with cuda_, to a module;
// jax_bnar/_native.pyi lists them.
void AddCudaPlanner(nanobind::module_& m);

}  // namespace jax_bnar

#endif  // JAX_BNAR_PYTHON_MODULE_CUDA_PLANNER_H_
