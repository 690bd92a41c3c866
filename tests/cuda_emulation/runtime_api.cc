// The runtime API, except for launches and for what concerns kernels.

#include "cuda_emulation/runtime_api.h"

#include <cstdlib>
#include <cstring>

#include "device.h"
#include "shared_memory.h"

using cuda_emulation::GetDevice;
using cuda_emulation::Return;
using cuda_emulation::ReturnError;

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define CUDA_EMULATION_NAME(name) \
  case name:                      \
    return #name;
    CUDA_EMULATION_NAME(cudaSuccess)
    CUDA_EMULATION_NAME(cudaErrorInvalidValue)
    CUDA_EMULATION_NAME(cudaErrorMemoryAllocation)
    CUDA_EMULATION_NAME(cudaErrorInitializationError)
    CUDA_EMULATION_NAME(cudaErrorInvalidConfiguration)
    CUDA_EMULATION_NAME(cudaErrorInvalidDevicePointer)
    CUDA_EMULATION_NAME(cudaErrorInsufficientDriver)
    CUDA_EMULATION_NAME(cudaErrorInvalidDeviceFunction)
    CUDA_EMULATION_NAME(cudaErrorNoDevice)
    CUDA_EMULATION_NAME(cudaErrorInvalidDevice)
    CUDA_EMULATION_NAME(cudaErrorNoKernelImageForDevice)
    CUDA_EMULATION_NAME(cudaErrorUnsupportedPtxVersion)
    CUDA_EMULATION_NAME(cudaErrorIllegalAddress)
    CUDA_EMULATION_NAME(cudaErrorLaunchOutOfResources)
    CUDA_EMULATION_NAME(cudaErrorMisalignedAddress)
    CUDA_EMULATION_NAME(cudaErrorLaunchFailure)
    CUDA_EMULATION_NAME(cudaErrorCooperativeLaunchTooLarge)
    CUDA_EMULATION_NAME(cudaErrorNotPermitted)
    CUDA_EMULATION_NAME(cudaErrorNotSupported)
    CUDA_EMULATION_NAME(cudaErrorStreamCaptureUnsupported)
    CUDA_EMULATION_NAME(cudaErrorInvalidClusterSize)
    CUDA_EMULATION_NAME(cudaErrorUnknown)
#undef CUDA_EMULATION_NAME
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  // The newest message is about this error unless the error is an old one.
  const char* message = cuda_emulation::LastMessage();
  if (error != cudaSuccess && message[0] != '\0') return message;
  return cudaGetErrorName(error);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = GetDevice().present ? 1 : 0;
  return *count == 0 ? Return(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  if (!GetDevice().present) return Return(cudaErrorNoDevice);
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (!GetDevice().present) return Return(cudaErrorNoDevice);
  return device == 0 ? cudaSuccess : Return(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                   int device) {
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  const cuda_emulation::Device d = GetDevice();
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = d.shared_memory_per_block;
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = 32;
      return cudaSuccess;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = d.registers_per_sm;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = d.sm_count;
      return cudaSuccess;
    case cudaDevAttrL2CacheSize:
      *value = d.l2_cache_size;
      return cudaSuccess;
    case cudaDevAttrMemoryClockRate:
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = 0;  // The emulated memory has no bandwidth of its own.
      return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = d.max_threads_per_sm;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = d.compute_capability_major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = d.compute_capability_minor;
      return cudaSuccess;
    case cudaDevAttrSingleToDoublePrecisionPerfRatio:
      *value = 2;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = d.shared_memory_per_sm;
      return cudaSuccess;
    case cudaDevAttrCooperativeLaunch:
      *value = d.cooperative_launch ? 1 : 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = d.shared_memory_per_block_optin;
      return cudaSuccess;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = d.max_blocks_per_sm;
      return cudaSuccess;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = d.reserved_shared_memory_per_block;
      return cudaSuccess;
    case cudaDevAttrClusterLaunch:
      *value = d.cluster_launch ? 1 : 0;
      return cudaSuccess;
  }
  return ReturnError(cudaErrorInvalidValue,
                     "the emulation does not know device attribute %d",
                     static_cast<int>(attribute));
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaMalloc(void** pointer, std::size_t size) {
  *pointer = nullptr;
  if (size == 0) return cudaSuccess;
  // The memory is aligned as a device's is. AddressSanitizer still sees the
  // exact size.
  if (posix_memalign(pointer, 256, size) != 0) {
    return Return(cudaErrorMemoryAllocation);
  }
  // Uninitialised memory is NaN in all formats.
  auto* bytes = static_cast<unsigned char*>(*pointer);
  for (std::size_t i = 0; i < size; ++i) {
    bytes[i] = i % 2 == 0 ? cuda_emulation::kPoison & 0xff
                          : cuda_emulation::kPoison >> 8;
  }
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* pointer, int value, std::size_t size,
                            cudaStream_t) {
  if (size != 0) std::memset(pointer, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* pointer, int value, std::size_t size) {
  return cudaMemsetAsync(pointer, value, size);
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source,
                            std::size_t size, cudaMemcpyKind, cudaStream_t) {
  if (size != 0) std::memcpy(destination, source, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* destination, const void* source, std::size_t size,
                       cudaMemcpyKind kind) {
  return cudaMemcpyAsync(destination, source, size, kind);
}
