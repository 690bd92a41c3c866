#include "cuda/host/known_plans.h"
#include "cuda/launch/kernels.cuh"
#include "cuda/launch/launch.cuh"

namespace jax_bnar {
namespace cuda {
namespace {

ForwardKernels KernelsOf(DType dtype, Layout layout, int width, bool residual,
                         Activation activation, bool mask) {
  return WithElement(dtype, [&](auto zero) {
    return ForwardKernelsOf<decltype(zero)>(layout, width, residual, activation,
                                            mask);
  });
}

ForwardKernels KernelsOf(const Problem& problem, int width,
                         const ForwardBuffers& buffers) {
  return KernelsOf(problem.dtype, LayoutOf(problem.shape), width,
                   buffers.z != nullptr, buffers.activation,
                   buffers.mask != nullptr);
}

cudaError_t NormaliseAlone(Launch& launch, const Problem& problem, int width,
                           const Device& device, const ForwardKernels& kernels,
                           const ForwardParameters& given) {
  const ForwardBuffers& buffers = given.buffers;
  if (IsFlat(problem, Aligned({buffers.x, buffers.z, buffers.y}))) {
    const FlatTiling tiling = CutFlat(problem);
    return LaunchPlanned(launch, Kernel::kNormaliseFlat, kernels.flat,
                         PlanFlat(tiling), given, tiling);
  }
  ForwardParameters parameters = given;
  const Plan plan = PlanElementwise(problem, width, device, launch.settings);
  parameters.tiling = plan.tiling;
  const cudaError_t error = LaunchPlanned(launch, Kernel::kNormalise,
                                          kernels.normalise, plan, parameters);
  if (error != cudaSuccess) return error;
  return PackMask(launch, problem, buffers, width);
}

cudaError_t StatisticsAlone(Launch& launch, const Problem& problem, int width,
                            const Device& device, const ForwardKernels& kernels,
                            const ForwardParameters& parameters) {
  const Plan plan = PlanReduction(problem, width, device, launch.settings);
  return LaunchSums(launch, Kernel::kStatistics, kernels.statistics, plan,
                    parameters);
}

}  // namespace

cudaError_t PackMask(Launch& launch, const Problem& problem,
                     const ForwardBuffers& buffers, int width) {
  if (buffers.mask == nullptr ||
      (width == kWidth && buffers.activation.is_relu())) {
    return cudaSuccess;
  }
  const int64_t bytes =
      problem.shape.groups * problem.shape.mask_bytes_per_group();
  const int64_t blocks = (bytes + kThreads - 1) / kThreads;
  Plan plan{};
  plan.strategy = Strategy::kTwoKernels;
  plan.grid = blocks < (1 << 20) ? blocks : 1 << 20;
  return LaunchPlanned(launch, Kernel::kPackMask,
                       KernelsOf(problem, width, buffers).pack_mask, plan,
                       static_cast<const void*>(buffers.y), buffers.mask,
                       problem, buffers.activation);
}

cudaError_t PrepareForwardKernels() {
  return ForEachKernelSet([](DType dtype, Layout layout, int width) {
    cudaError_t error = cudaSuccess;
    for (const bool residual : {false, true}) {
      for (const ActivationKind kind :
           {ActivationKind::kNone, ActivationKind::kRelu,
            ActivationKind::kSilu}) {
        for (const bool mask : {false, true}) {
          const ForwardKernels kernels =
              KernelsOf(dtype, layout, width, residual, {kind}, mask);
          if (error != cudaSuccess) return error;
          error = PrepareEach(kernels.statistics, kernels.normalise,
                              kernels.flat, kernels.pack_mask);
          if (error == cudaSuccess) error = PrepareWhole(kernels.whole);
        }
      }
    }
    return error;
  });
}

cudaError_t Statistics(Launch& launch, const Problem& problem, const void* x,
                       void* mean, void* var) {
  Device device;
  const cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  const int width = WidthOf(problem, Aligned({x}));
  ForwardParameters parameters{};
  parameters.buffers.x = x;
  parameters.mean = mean;
  parameters.var = var;
  return StatisticsAlone(launch, problem, width, device,
                         KernelsOf(problem, width, parameters.buffers),
                         parameters);
}

cudaError_t Normalise(Launch& launch, const Problem& problem,
                      const NormaliseBuffers<1>& given,
                      const PerInput<AffineOperands, 1>& affine,
                      const PerInput<VectorOperand, 1>& mean,
                      const PerInput<VectorOperand, 1>& var) {
  Device device;
  const cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  const ForwardBuffers buffers = BuffersOf(given);
  const int width =
      WidthOf(problem, Aligned({buffers.x, buffers.z, buffers.y}));
  ForwardParameters parameters{};
  parameters.buffers = buffers;
  parameters.affine = affine[0];
  parameters.given_mean = mean[0];
  parameters.given_var = var[0];
  return NormaliseAlone(launch, problem, width, device,
                        KernelsOf(problem, width, parameters.buffers),
                        parameters);
}

cudaError_t Forward(Launch& launch, const Problem& problem,
                    const NormaliseBuffers<1>& given,
                    const PerInput<AffineOperands, 1>& affine,
                    const PerInput<void*, 1>& mean,
                    const PerInput<void*, 1>& var) {
  Device device;
  cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  const ForwardBuffers buffers = BuffersOf(given);
  const int width =
      WidthOf(problem, Aligned({buffers.x, buffers.z, buffers.y}));
  const ForwardKernels kernels = KernelsOf(problem, width, buffers);
  ForwardParameters parameters{};
  parameters.buffers = buffers;
  parameters.affine = affine[0];
  parameters.mean = mean[0];
  parameters.var = var[0];

  const Plan plan =
      KnownPlan(problem, width,
                ForwardTraffic(problem.dtype, buffers.z != nullptr,
                               buffers.mask != nullptr),
                device, launch.settings);
  bool launched = false;
  error = LaunchWhole(launch, Kernel::kForward, kernels.whole, plan, device,
                      parameters, &launched);
  if (error != cudaSuccess) return error;
  if (launched) return PackMask(launch, problem, buffers, width);
  error = StatisticsAlone(launch, problem, width, device, kernels, parameters);
  if (error != cudaSuccess) return error;
  const int64_t groups = problem.shape.groups;
  parameters.given_mean = {mean[0], groups};
  parameters.given_var = {var[0], groups};
  return NormaliseAlone(launch, problem, width, device, kernels, parameters);
}

}  // namespace cuda
}  // namespace jax_bnar
