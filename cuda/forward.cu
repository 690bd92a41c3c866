#include <type_traits>

#include "cuda/forward.cuh"
#include "cuda/kernels.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack_mask.cuh"
#include "cuda/prepare.h"

namespace jax_bnar {
namespace gpu {
namespace {

template <typename T, int kElements>
ForwardKernels KernelsOfElement() {
  ForwardKernels kernels{};
  kernels.statistics = StatisticsKernel<T, kElements>;
  kernels.normalise = NormaliseKernel<T, kElements>;
  kernels.pack_mask = PackMaskKernel<T>;
  if constexpr (!std::is_same_v<T, double>) {
    kernels.streaming = ForwardKernel<T, kElements, 0>;
    kernels.holding =
        ForwardKernel<T, kElements, ForwardHeld(sizeof(T), kElements)>;
  }
  return kernels;
}

ForwardKernels KernelsOf(DType dtype, int width) {
  return WithElement(dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>) {
      if (width == kWidth) return KernelsOfElement<T, kWidth>();
    }
    return KernelsOfElement<T, 1>();
  });
}

// The bits that single elements cannot write.
cudaError_t PackMask(Launch& launch, const Problem& problem,
                     const NormaliseBuffers& buffers, int width,
                     const ForwardKernels& kernels) {
  if (buffers.mask == nullptr || width == kWidth) return cudaSuccess;
  const Shape& shape = problem.shape;
  const int64_t bytes_per_group = shape.mask_bytes_per_group();
  const int64_t blocks =
      (shape.groups * bytes_per_group + kThreads - 1) / kThreads;
  Plan plan{};
  plan.grid = blocks < (1 << 20) ? blocks : 1 << 20;
  return LaunchPlanned(launch, "PackMask", kernels.pack_mask, plan,
                       static_cast<const void*>(buffers.y), buffers.mask,
                       shape.groups, shape.group_size(), bytes_per_group);
}

cudaError_t NormaliseAlone(Launch& launch, const Problem& problem, int width,
                           const Device& device, const ForwardKernels& kernels,
                           ForwardParameters parameters) {
  const Plan plan = PlanElementwise(problem, width, device, launch.settings);
  parameters.tiling = plan.tiling;
  const cudaError_t error =
      LaunchPlanned(launch, "Normalise", kernels.normalise, plan, parameters);
  if (error != cudaSuccess) return error;
  return PackMask(launch, problem, parameters.buffers, width, kernels);
}

cudaError_t StatisticsAlone(Launch& launch, const Problem& problem, int width,
                            const Device& device, const ForwardKernels& kernels,
                            ForwardParameters parameters) {
  const Plan plan = PlanReduction(problem, width, device, launch.settings);
  parameters.tiling = plan.tiling;
  parameters.exchange = plan.exchange;
  parameters.workspace = PlaceWorkspace(launch, plan.tiling);
  const cudaError_t error = ResetCounters(launch, plan);
  if (error != cudaSuccess) return error;
  return LaunchPlanned(launch, "Statistics", kernels.statistics, plan,
                       parameters);
}

}  // namespace

cudaError_t PrepareForwardKernels() {
  cudaError_t error = cudaSuccess;
  ForEachKernelSet([&](DType dtype, int width) {
    const ForwardKernels kernels = KernelsOf(dtype, width);
    const void* all[] = {reinterpret_cast<const void*>(kernels.holding),
                         reinterpret_cast<const void*>(kernels.streaming),
                         reinterpret_cast<const void*>(kernels.statistics),
                         reinterpret_cast<const void*>(kernels.normalise),
                         reinterpret_cast<const void*>(kernels.pack_mask)};
    for (const void* kernel : all) {
      if (error == cudaSuccess && kernel != nullptr) {
        error = PrepareKernel(kernel);
      }
    }
  });
  return error;
}

cudaError_t Statistics(Launch& launch, const Problem& problem, const void* x,
                       void* mean, void* var) {
  Device device;
  const cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  const int width = WidthOf(problem, Aligned({x}));
  ForwardParameters parameters{};
  parameters.buffers.x = x;
  parameters.mean = mean;
  parameters.var = var;
  return StatisticsAlone(launch, problem, width, device,
                         KernelsOf(problem.dtype, width), parameters);
}

cudaError_t NormaliseWith(Launch& launch, const Problem& problem,
                          const NormaliseBuffers& buffers,
                          const AffineOperands& affine,
                          const VectorOperand& mean, const VectorOperand& var) {
  Device device;
  const cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  const int width =
      WidthOf(problem, Aligned({buffers.x, buffers.z, buffers.y}));
  ForwardParameters parameters{};
  parameters.buffers = buffers;
  parameters.affine = affine;
  parameters.given_mean = mean;
  parameters.given_var = var;
  return NormaliseAlone(launch, problem, width, device,
                        KernelsOf(problem.dtype, width), parameters);
}

cudaError_t Forward(Launch& launch, const Problem& problem,
                    const NormaliseBuffers& buffers,
                    const AffineOperands& affine, void* mean, void* var) {
  Device device;
  cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  const int width =
      WidthOf(problem, Aligned({buffers.x, buffers.z, buffers.y}));
  const ForwardKernels kernels = KernelsOf(problem.dtype, width);
  ForwardParameters parameters{};
  parameters.buffers = buffers;
  parameters.affine = affine;
  parameters.mean = mean;
  parameters.var = var;

  const Plan plan =
      MakePlan(problem, width, ForwardPass(ItemSize(problem.dtype), width),
               device, launch.settings);
  if (plan.strategy != Strategy::kTwoKernels) {
    const bool holding = plan.strategy != Strategy::kL2;
    const auto kernel = holding ? kernels.holding : kernels.streaming;
    bool fits = false;
    error = FitsDevice(reinterpret_cast<const void*>(kernel), plan, device,
                       launch.settings, &fits);
    if (error != cudaSuccess) {
      return Explain(launch, "Forward", plan, error);
    }
    if (fits) {
      parameters.tiling = plan.tiling;
      parameters.exchange = plan.exchange;
      parameters.workspace = PlaceWorkspace(launch, plan.tiling);
      error = ResetCounters(launch, plan);
      if (error != cudaSuccess) return error;
      error = LaunchPlanned(launch, "Forward", kernel, plan, parameters);
      if (error != cudaSuccess) return error;
      return PackMask(launch, problem, buffers, width, kernels);
    }
  }
  error = StatisticsAlone(launch, problem, width, device, kernels, parameters);
  if (error != cudaSuccess) return error;
  const int64_t groups = problem.shape.groups;
  parameters.given_mean = {mean, groups};
  parameters.given_var = {var, groups};
  return NormaliseAlone(launch, problem, width, device, kernels, parameters);
}

}  // namespace gpu
}  // namespace jax_bnar
