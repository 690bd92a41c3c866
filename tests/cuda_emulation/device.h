// The outcome of the last call, for each host thread, and what is known about
// kernels.

#ifndef CUDA_EMULATION_DEVICE_H_
#define CUDA_EMULATION_DEVICE_H_

#include <cstddef>

#include "cuda_emulation.h"
#include "cuda_emulation/runtime_api.h"

namespace cuda_emulation {

// Records the error for cudaGetLastError and returns it. The message is kept if
// it is an error.
cudaError_t Return(cudaError_t error, const char* message = "");
// Does the same with a message formatted as by printf.
cudaError_t ReturnError(cudaError_t error, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
void ClearMessage();

// What cudaFuncSetAttribute has set for a function.
struct FunctionAttributes {
  int max_dynamic_shared_size;  // -1: not set
  int carveout;
  bool non_portable_cluster_size;
};
FunctionAttributes GetFunctionAttributes(const void* function);

// Returns the most dynamic shared memory that a block of this function may ask
// for.
int MaxDynamicSharedSize(const Device& device, const void* function);
// Returns how many such blocks fit on one SM.
int BlocksPerSm(const Device& device, unsigned block_size,
                std::size_t shared_size);

}  // namespace cuda_emulation

#endif  // CUDA_EMULATION_DEVICE_H_
