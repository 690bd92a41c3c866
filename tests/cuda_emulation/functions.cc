// The attributes of kernels, which are kept for each function as CUDA does, and
// occupancy.

#include <map>
#include <mutex>

#include "device.h"

namespace cuda_emulation {
namespace {

struct Functions {
  std::mutex mutex;
  std::map<const void*, FunctionAttributes> attributes;
};

Functions& GetFunctions() {
  static Functions functions;
  return functions;
}

constexpr FunctionAttributes kInitial = {-1, cudaSharedmemCarveoutDefault,
                                         false};

}  // namespace

FunctionAttributes GetFunctionAttributes(const void* function) {
  Functions& functions = GetFunctions();
  std::lock_guard<std::mutex> lock(functions.mutex);
  const auto found = functions.attributes.find(function);
  return found == functions.attributes.end() ? kInitial : found->second;
}

int MaxDynamicSharedSize(const Device& device, const void* function) {
  const int set = GetFunctionAttributes(function).max_dynamic_shared_size;
  return set < 0 ? device.shared_memory_per_block : set;
}

}  // namespace cuda_emulation

using cuda_emulation::Device;
using cuda_emulation::Return;
using cuda_emulation::ReturnError;

cudaError_t cudaFuncSetAttribute(const void* function,
                                 cudaFuncAttribute attribute, int value) {
  const Device device = cuda_emulation::GetDevice();
  if (!device.present) return Return(cudaErrorNoDevice);
  if (function == nullptr) return Return(cudaErrorInvalidDeviceFunction);
  cuda_emulation::Functions& functions = cuda_emulation::GetFunctions();
  std::lock_guard<std::mutex> lock(functions.mutex);
  auto& attributes =
      functions.attributes.emplace(function, cuda_emulation::kInitial)
          .first->second;
  switch (attribute) {
    case cudaFuncAttributeMaxDynamicSharedMemorySize:
      if (value < 0 || value > device.shared_memory_per_block_optin) {
        return ReturnError(cudaErrorInvalidValue,
                           "%d bytes of dynamic shared memory: the device "
                           "allows %d",
                           value, device.shared_memory_per_block_optin);
      }
      attributes.max_dynamic_shared_size = value;
      return cudaSuccess;
    case cudaFuncAttributePreferredSharedMemoryCarveout:
      if (value < -1 || value > 100) return Return(cudaErrorInvalidValue);
      attributes.carveout = value;
      return cudaSuccess;
    case cudaFuncAttributeNonPortableClusterSizeAllowed:
      attributes.non_portable_cluster_size = value != 0;
      return cudaSuccess;
  }
  return Return(cudaErrorInvalidValue);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes,
                                  const void* function) {
  const Device device = cuda_emulation::GetDevice();
  if (!device.present) return Return(cudaErrorNoDevice);
  if (function == nullptr) return Return(cudaErrorInvalidDeviceFunction);
  if (attributes == nullptr) return Return(cudaErrorInvalidValue);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = device.registers_per_thread;
  attributes->binaryVersion =
      10 * device.compute_capability_major + device.compute_capability_minor;
  attributes->ptxVersion =
      device.ptx_version > 0 ? device.ptx_version : attributes->binaryVersion;
  attributes->maxDynamicSharedSizeBytes =
      cuda_emulation::MaxDynamicSharedSize(device, function);
  attributes->preferredShmemCarveout =
      cuda_emulation::GetFunctionAttributes(function).carveout;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, const void* function, int block_size,
    std::size_t shared_size) {
  const Device device = cuda_emulation::GetDevice();
  if (!device.present) return Return(cudaErrorNoDevice);
  if (function == nullptr) return Return(cudaErrorInvalidDeviceFunction);
  if (blocks == nullptr || block_size <= 0) {
    return Return(cudaErrorInvalidValue);
  }
  *blocks = 0;
  if (block_size > 1024 ||
      shared_size >
          static_cast<std::size_t>(
              cuda_emulation::MaxDynamicSharedSize(device, function))) {
    return cudaSuccess;  // Such a block cannot be launched.
  }
  *blocks = cuda_emulation::BlocksPerSm(
      device, static_cast<unsigned>(block_size), shared_size);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function,
                                           const cudaLaunchConfig_t* config) {
  if (clusters == nullptr || config == nullptr) {
    return Return(cudaErrorInvalidValue);
  }
  const Device device = cuda_emulation::GetDevice();
  if (!device.cluster_launch) return Return(cudaErrorNotSupported);
  unsigned size = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      const auto& dim = config->attrs[i].val.clusterDim;
      size = dim.x * dim.y * dim.z;
    }
  }
  const dim3& block = config->blockDim;
  int per_sm = 0;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &per_sm, function, static_cast<int>(block.x * block.y * block.z),
      config->dynamicSmemBytes);
  if (error != cudaSuccess) return error;
  const bool non_portable =
      cuda_emulation::GetFunctionAttributes(function).non_portable_cluster_size;
  if (size == 0 ||
      size > static_cast<unsigned>(non_portable
                                       ? device.max_cluster_size
                                       : device.max_portable_cluster_size)) {
    return Return(cudaErrorInvalidClusterSize);
  }
  *clusters = per_sm * device.sm_count / static_cast<int>(size);
  return cudaSuccess;
}
