// Checks a launch as a device's driver would, and runs it.

#include "cuda_emulation/launch.h"

#include <algorithm>

#include "device.h"
#include "scheduler.h"

namespace cuda_emulation {
namespace {

struct Attributes {
  bool cooperative = false;
  bool has_cluster = false;
  dim3 cluster = dim3(1, 1, 1);
};

bool Read(const cudaLaunchConfig_t& config, Attributes* result) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    switch (attribute.id) {
      case cudaLaunchAttributeCooperative:
        result->cooperative = attribute.val.cooperative != 0;
        break;
      case cudaLaunchAttributeClusterDimension:
        result->has_cluster = true;
        result->cluster =
            dim3(attribute.val.clusterDim.x, attribute.val.clusterDim.y,
                 attribute.val.clusterDim.z);
        break;
      case cudaLaunchAttributeIgnore:
      case cudaLaunchAttributeClusterSchedulingPolicyPreference:
      case cudaLaunchAttributeProgrammaticStreamSerialization:
      case cudaLaunchAttributePriority:
      case cudaLaunchAttributePreferredSharedMemoryCarveout:
        break;  // These change nothing that a kernel may rely on.
      default:
        return false;
    }
  }
  return true;
}

bool ValidGrid(const dim3& grid) {
  return grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= 0x7fffffff &&
         grid.y <= 65535 && grid.z <= 65535;
}

bool ValidBlock(const dim3& block) {
  return block.x > 0 && block.y > 0 && block.z > 0 && block.x <= 1024 &&
         block.y <= 1024 && block.z <= 64 &&
         block.x * block.y * block.z <= kMaxThreadsPerBlock;
}

cudaError_t CheckCluster(const Device& device, const void* kernel,
                         const dim3& grid, const dim3& cluster) {
  if (!device.cluster_launch) {
    return ReturnError(cudaErrorNotSupported,
                       "the device does not support clusters");
  }
  const int limit = GetFunctionAttributes(kernel).non_portable_cluster_size
                        ? device.max_cluster_size
                        : device.max_portable_cluster_size;
  const std::uint64_t size = std::uint64_t{cluster.x} * cluster.y * cluster.z;
  if (size == 0 || size > static_cast<std::uint64_t>(limit)) {
    return ReturnError(cudaErrorInvalidClusterSize,
                       "clusters of (%u, %u, %u) blocks: the limit is %d",
                       cluster.x, cluster.y, cluster.z, limit);
  }
  if (grid.x % cluster.x != 0 || grid.y % cluster.y != 0 ||
      grid.z % cluster.z != 0) {
    return ReturnError(cudaErrorInvalidConfiguration,
                       "a grid of (%u, %u, %u) blocks cannot be divided into "
                       "clusters of (%u, %u, %u)",
                       grid.x, grid.y, grid.z, cluster.x, cluster.y, cluster.z);
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t Launch(const cudaLaunchConfig_t& config, const Call& call) {
  const Device device = GetDevice();
  const dim3& grid = config.gridDim;
  const dim3& block = config.blockDim;
  ClearMessage();
  if (current != nullptr) {
    return ReturnError(cudaErrorNotPermitted, "a kernel launches a kernel");
  }
  if (!device.present) return ReturnError(cudaErrorNoDevice, "no device");
  if (call.kernel == nullptr) {
    return ReturnError(cudaErrorInvalidDeviceFunction, "the kernel is null");
  }
  Attributes attributes;
  if (!Read(config, &attributes)) {
    return ReturnError(cudaErrorNotSupported,
                       "a launch attribute that the emulation does not know");
  }
  if (!ValidGrid(grid) || !ValidBlock(block)) {
    return ReturnError(cudaErrorInvalidConfiguration,
                       "a grid of (%u, %u, %u) blocks of (%u, %u, %u) threads",
                       grid.x, grid.y, grid.z, block.x, block.y, block.z);
  }
  const int shared_limit = MaxDynamicSharedSize(device, call.kernel);
  if (config.dynamicSmemBytes > static_cast<std::size_t>(shared_limit)) {
    return ReturnError(
        cudaErrorInvalidValue,
        "%zu bytes of dynamic shared memory: the kernel may have %d (see "
        "cudaFuncAttributeMaxDynamicSharedMemorySize)",
        config.dynamicSmemBytes, shared_limit);
  }
  if (attributes.has_cluster) {
    const cudaError_t error =
        CheckCluster(device, call.kernel, grid, attributes.cluster);
    if (error != cudaSuccess) return error;
  }
  if (attributes.cooperative && !device.cooperative_launch) {
    return ReturnError(cudaErrorNotSupported,
                       "the device does not support cooperative launches");
  }

  const int per_sm =
      BlocksPerSm(device, block.x * block.y * block.z, config.dynamicSmemBytes);
  const dim3& cluster = attributes.cluster;
  const std::uint64_t cluster_size =
      std::uint64_t{cluster.x} * cluster.y * cluster.z;
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  const std::uint64_t clusters = blocks / cluster_size;
  const std::uint64_t capacity = static_cast<std::uint64_t>(per_sm) *
                                 static_cast<std::uint64_t>(device.sm_count) /
                                 cluster_size;
  if (capacity == 0) {
    return ReturnError(cudaErrorLaunchOutOfResources,
                       "%llu co-resident blocks do not fit on the device: each "
                       "SM has room for %d",
                       static_cast<unsigned long long>(cluster_size), per_sm);
  }
  const std::uint64_t had =
      capacity * cluster_size -
      std::min(capacity * cluster_size,
               static_cast<std::uint64_t>(device.blocks_per_sm_not_had) *
                   static_cast<std::uint64_t>(device.sm_count));
  if (attributes.cooperative && blocks > had) {
    return ReturnError(
        cudaErrorCooperativeLaunchTooLarge,
        "a cooperative launch of %llu blocks: the device has room for %llu",
        static_cast<unsigned long long>(blocks),
        static_cast<unsigned long long>(had));
  }

  const Schedule schedule = GetSchedule();
  // This is never all of them; see Schedule::plain_residency.
  const std::uint64_t plain = std::max<std::uint64_t>(
      1, std::min({static_cast<std::uint64_t>(schedule.plain_residency),
                   capacity, clusters - 1}));
  Scheduler& own = HostScheduler();
  const cudaError_t error =
      own.Run({grid, block, cluster, config.dynamicSmemBytes,
               attributes.cooperative ? clusters : plain, call, schedule});
  return Return(error, own.message());
}

}  // namespace cuda_emulation
