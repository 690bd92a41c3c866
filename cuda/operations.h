// The operations of native/operations.h on the GPU, in whose memory the buffers
// lie. They enqueue their kernels on the stream and return, without allocation
// or synchronisation.

#ifndef JAX_BNAR_CUDA_OPERATIONS_H_
#define JAX_BNAR_CUDA_OPERATIONS_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/host/plan.h"
#include "native/operations.h"

namespace jax_bnar {
namespace cuda {

// Returns a number that no other launch of this process has, that no other
// memory is likely to hold, and that is not 0.
uint64_t NewTag();

// Where an operation runs. After an error `failure` says which kernel failed,
// and how it was launched.
struct Launch {
  cudaStream_t stream;
  // WorkspaceBytes(shape), aligned to 256 bytes, not zeroed; with N inputs,
  // that of N times the groups. Null in operations without sums.
  void* workspace;
  Settings settings;
  std::string failure;
  // The blocks recognise by it what this launch wrote to the workspace.
  uint64_t tag = NewTag();
};

// Loads the kernels on the current device and sets their attributes. It is
// called once for each device, before the first operation there, and never
// while a stream is captured.
cudaError_t PrepareKernels();

BNAR_DECLARE_STATISTICS(cudaError_t, Launch&);
BNAR_DECLARE_OPERATIONS(template <int N>, cudaError_t, Launch&, N);

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_OPERATIONS_H_
