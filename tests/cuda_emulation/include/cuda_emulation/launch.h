// The part of a launch that depends on the types of the kernel's parameters.

#ifndef CUDA_EMULATION_LAUNCH_H_
#define CUDA_EMULATION_LAUNCH_H_

#include <cstddef>
#include <tuple>
#include <utility>

#include "cuda_emulation/runtime_api.h"

namespace cuda_emulation {

// A kernel with its arguments, which one thread can run.
struct Call {
  const void* kernel;
  void (*run)(const void* bound);
  const void* bound;
};

cudaError_t Launch(const cudaLaunchConfig_t& config, const Call& call);

template <typename... Parameters>
struct BoundKernel {
  void (*kernel)(Parameters...);
  std::tuple<Parameters...> arguments;

  // Each thread has its own copy of the arguments, as on a device.
  static void Run(const void* bound) {
    const auto* self = static_cast<const BoundKernel*>(bound);
    std::apply(self->kernel, self->arguments);
  }
};

template <typename... Parameters, std::size_t... kIndices>
cudaError_t LaunchUntyped(const cudaLaunchConfig_t& config,
                          void (*kernel)(Parameters...), void** arguments,
                          std::index_sequence<kIndices...>) {
  (void)arguments;  // Unused if the kernel has no parameters.
  BoundKernel<Parameters...> bound{
      kernel, {*static_cast<Parameters*>(arguments[kIndices])...}};
  return Launch(config, {reinterpret_cast<const void*>(kernel),
                         &BoundKernel<Parameters...>::Run, &bound});
}

}  // namespace cuda_emulation

template <typename... ExpTypes, typename... ActTypes>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(ExpTypes...),
                               ActTypes&&... args) {
  cuda_emulation::BoundKernel<ExpTypes...> bound{
      kernel, {static_cast<ExpTypes>(std::forward<ActTypes>(args))...}};
  return cuda_emulation::Launch(
      *config, {reinterpret_cast<const void*>(kernel),
                &cuda_emulation::BoundKernel<ExpTypes...>::Run, &bound});
}

template <typename... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid,
                             dim3 block, void** arguments,
                             std::size_t shared_size = 0,
                             cudaStream_t stream = nullptr) {
  return cuda_emulation::LaunchUntyped(
      {grid, block, shared_size, stream, nullptr, 0}, kernel, arguments,
      std::index_sequence_for<Parameters...>());
}

template <typename... Parameters>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(Parameters...),
                                        dim3 grid, dim3 block, void** arguments,
                                        std::size_t shared_size = 0,
                                        cudaStream_t stream = nullptr) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  return cuda_emulation::LaunchUntyped(
      {grid, block, shared_size, stream, &attribute, 1}, kernel, arguments,
      std::index_sequence_for<Parameters...>());
}

#endif  // CUDA_EMULATION_LAUNCH_H_
