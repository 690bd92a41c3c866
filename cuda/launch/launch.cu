#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <string>

#include "cuda/host/workspace.h"
#include "cuda/launch/kernels.cuh"
#include "cuda/launch/launch.cuh"

namespace jax_bnar {
namespace cuda {
namespace {

// 2^64 divided by the golden ratio, an odd number: its multiples are far apart,
// and 2^64 of them are different.
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

struct KnownDevices {
  std::mutex mutex;
  std::map<int, Device> by_id;
};

KnownDevices& GetKnownDevices() {
  static auto* devices = new KnownDevices;
  return *devices;
}

// Whether the code that runs on the current device has the instructions for
// clusters. A build for 8.0 alone has PTX that the driver compiles for a newer
// device too, and in which a block finds its own sums instead of another's.
// What the driver knows of one kernel is true of all, which are compiled for
// the same architectures.
bool IsCompiledForClusters() {
  const ForwardKernels kernels =
      ForwardKernelsOf<float>(Layout::kChannelsLast, kWidth, /*residual=*/false,
                              {ActivationKind::kNone}, /*mask=*/false);
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(
      &attributes, reinterpret_cast<const void*>(kernels.whole));
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && attributes.ptxVersion >= 90;
}

// Only the choice of plans depends on such an attribute, so it is no reason to
// fail if the driver does not report it.
int AttributeOr(int otherwise, cudaDeviceAttr attribute, int id) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, id) == cudaSuccess) {
    return value;
  }
  cudaGetLastError();
  return otherwise;
}

}  // namespace

cudaError_t QueryDevice(Device* device) {
  int id = 0;
  cudaError_t error = cudaGetDevice(&id);
  const auto get = [&](cudaDeviceAttr attribute) {
    int value = 0;
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&value, attribute, id);
    }
    return value;
  };
  device->multiprocessors = get(cudaDevAttrMultiProcessorCount);
  device->shared_bytes_per_multiprocessor =
      get(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  device->shared_bytes_per_block = get(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device->reserved_shared_bytes_per_block =
      get(cudaDevAttrReservedSharedMemoryPerBlock);
  device->l2_bytes = get(cudaDevAttrL2CacheSize);
  device->cooperative = get(cudaDevAttrCooperativeLaunch) != 0;
  device->clusters = get(cudaDevAttrClusterLaunch) != 0;
  if (error != cudaSuccess) return error;
  device->clusters = device->clusters && IsCompiledForClusters();
  // The nominal bandwidth: data come at both edges of the clock.
  device->memory_bytes_per_microsecond =
      2e-3 * AttributeOr(0, cudaDevAttrMemoryClockRate, id) *
      AttributeOr(0, cudaDevAttrGlobalMemoryBusWidth, id) / 8;
  device->single_to_double_ratio =
      AttributeOr(2, cudaDevAttrSingleToDoublePrecisionPerfRatio, id);
  KnownDevices& known = GetKnownDevices();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.by_id[id] = *device;
  return cudaSuccess;
}

cudaError_t DescribeDevice(Device* device) {
  int id = 0;
  const cudaError_t error = cudaGetDevice(&id);
  if (error != cudaSuccess) return error;
  KnownDevices& known = GetKnownDevices();
  {
    const std::lock_guard<std::mutex> lock(known.mutex);
    const auto found = known.by_id.find(id);
    if (found != known.by_id.end()) {
      *device = found->second;
      return cudaSuccess;
    }
  }
  return QueryDevice(device);
}

bool Aligned(std::initializer_list<const void*> buffers) {
  for (const void* buffer : buffers) {
    if (reinterpret_cast<uintptr_t>(buffer) % sizeof(uint4) != 0) return false;
  }
  return true;
}

cudaError_t PrepareKernels() {
  Device device;
  cudaError_t error = QueryDevice(&device);
  if (error == cudaSuccess) error = PrepareForwardKernels();
  return error == cudaSuccess ? PrepareBackwardKernels() : error;
}

uint64_t NewTag() {
  // Another process, whose tags this one may find in memory, began in another
  // nanosecond, and launches fewer kernels than nanoseconds pass.
  // (std::random_device would need a newer glibc than wheels may.)
  static std::atomic<uint64_t> next{
      static_cast<uint64_t>(
          std::chrono::system_clock::now().time_since_epoch().count()) *
      kGolden};
  // splitmix64, which gives each number a result of its own, and so at most one
  // the result 0.
  for (;;) {
    uint64_t tag = next.fetch_add(kGolden, std::memory_order_relaxed);
    tag = (tag ^ tag >> 30) * 0xbf58476d1ce4e5b9u;
    tag = (tag ^ tag >> 27) * 0x94d049bb133111ebu;
    tag ^= tag >> 31;
    if (tag != 0) return tag;
  }
}

Workspace PlaceWorkspace(const Launch& launch, const Tiling& tiling) {
  const WorkspaceLayout layout = LayWorkspace(tiling);
  char* base = static_cast<char*>(launch.workspace);
  return {launch.tag,
          reinterpret_cast<Sums*>(base + layout.totals),
          reinterpret_cast<uint64_t*>(base + layout.flags),
          reinterpret_cast<Sums*>(base + layout.partials),
          reinterpret_cast<Mailbox*>(base + layout.partial_mailboxes),
          reinterpret_cast<Mailbox*>(base + layout.total_mailboxes)};
}

cudaError_t ZeroWorkspace(Launch& launch, const Tiling& tiling) {
  const cudaError_t error = cudaMemsetAsync(
      launch.workspace, 0, static_cast<size_t>(LayWorkspace(tiling).bytes),
      launch.stream);
  if (error != cudaSuccess) {
    cudaGetLastError();  // so that a later launch does not report it
    launch.failure = "zeroing the workspace";
  }
  return error;
}

cudaError_t Explain(Launch& launch, Kernel name, const Plan& plan,
                    cudaError_t error) {
  // The error is cleared, so that a later launch does not report it.
  cudaGetLastError();
  launch.failure = std::string(NameOf(name)) + " with a grid of " +
                   std::to_string(plan.grid) + " blocks of " +
                   std::to_string(kThreads) + " threads, " +
                   std::to_string(plan.shared_bytes) +
                   " bytes of shared memory";
  if (plan.cluster > 1) {
    launch.failure += ", clusters of " + std::to_string(plan.cluster);
  }
  if (plan.block_reduction == BlockReduction::kBarrier) {
    launch.failure += ", cooperative";
  }
  return error;
}

cudaError_t PrepareKernel(const void* kernel) {
  Device device;
  const cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(device.shared_bytes_per_block));
}

cudaError_t PrepareWholeKernel(const void* kernel) {
  if (kernel == nullptr) return cudaSuccess;
  const cudaError_t error = PrepareKernel(kernel);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel,
                              cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

cudaError_t FitsDevice(const Launch& launch, const void* kernel,
                       const Plan& plan, const Device& device, bool* fits) {
  *fits = true;
  if (plan.block_reduction == BlockReduction::kCluster) {
    const LaunchConfig config(launch, plan);
    int clusters = 0;
    // A small slice of a GPU (MIG) may have no room for clusters of this size.
    // CUDA does not say whether that is an error or no cluster.
    const cudaError_t error =
        cudaOccupancyMaxActiveClusters(&clusters, kernel, config.get());
    if (error != cudaSuccess) cudaGetLastError();
    *fits = error == cudaSuccess && clusters > 0;
    return cudaSuccess;
  }
  if (plan.block_reduction != BlockReduction::kBarrier) return cudaSuccess;
  int blocks = 0;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, kernel, kThreads, static_cast<size_t>(plan.shared_bytes));
  const int64_t multiprocessors =
      device.multiprocessors - launch.settings.sm_margin;
  *fits = plan.grid <= blocks * (multiprocessors < 1 ? 1 : multiprocessors);
  return error;
}

LaunchConfig::LaunchConfig(const Launch& launch, const Plan& plan) {
  config_.gridDim = dim3(static_cast<unsigned>(plan.grid), 1, 1);
  config_.blockDim = dim3(kThreads, 1, 1);
  config_.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
  config_.stream = launch.stream;
  config_.attrs = attributes_;
  config_.numAttrs = 0;
  if (plan.block_reduction == BlockReduction::kBarrier) {
    attributes_[0].id = cudaLaunchAttributeCooperative;
    attributes_[0].val.cooperative = 1;
    config_.numAttrs = 1;
  } else if (plan.cluster > 1) {
    attributes_[0].id = cudaLaunchAttributeClusterDimension;
    attributes_[0].val.clusterDim.x = static_cast<unsigned>(plan.cluster);
    attributes_[0].val.clusterDim.y = 1;
    attributes_[0].val.clusterDim.z = 1;
    config_.numAttrs = 1;
  }
}

}  // namespace cuda
}  // namespace jax_bnar
