// The operations of y = relu(batch_norm(x1) + batch_norm(x2)). Forward is a
// kernel for the statistics of both inputs and one for y; backward is a kernel
// for the sums of both and one for both gradients.

#include "cuda/host/dual_plan.h"
#include "cuda/host/tiling.h"
#include "cuda/launch/kernels.cuh"
#include "cuda/launch/launch.cuh"

namespace jax_bnar {
namespace cuda {
namespace {

DualForwardKernels ForwardKernelsFor(DType dtype, Layout layout, int width,
                                     bool mask) {
  return WithElement(dtype, [&](auto zero) {
    return DualForwardKernelsOf<decltype(zero)>(layout, width, mask);
  });
}

DualBackwardKernels BackwardKernelsFor(DType dtype, Layout layout, int width,
                                       Gate gate) {
  return WithElement(dtype, [&](auto zero) {
    return DualBackwardKernelsOf<decltype(zero)>(layout, width, gate);
  });
}

// Launches a kernel of one pass with the parameters of both inputs. The kernel
// iterates over the tiling of the first; functions that it shares with the
// kernels for one input read that of the second, too.
template <typename Parameters, typename... Parameter, typename... Arguments>
cudaError_t LaunchBoth(Launch& launch, Kernel name,
                       void (*kernel)(Parameters, Parameters, Parameter...),
                       const Plan& plan, Parameters first, Parameters second,
                       const Arguments&... arguments) {
  first.tiling = second.tiling = plan.tiling;
  first.block_reduction = second.block_reduction = plan.block_reduction;
  // A call without sums has no workspace.
  if (launch.workspace != nullptr) {
    first.workspace = second.workspace = PlaceWorkspace(launch, plan.tiling);
  }
  if (launch.settings.zero_workspace &&
      plan.block_reduction == BlockReduction::kLastBlock) {
    const cudaError_t error = ZeroWorkspace(launch, plan.tiling);
    if (error != cudaSuccess) return error;
  }
  return LaunchPlanned(launch, name, kernel, plan, first, second, arguments...);
}

// The parameters of x1 and of x2 in forward, and what is known of the call.
struct ForwardCall {
  ForwardCall(const Problem& problem, const NormaliseBuffers<2>& buffers,
              const PerInput<AffineOperands, 2>& affine)
      : problem(problem),
        width(
            WidthOf(problem, Aligned({buffers.x[0], buffers.x[1], buffers.y}))),
        kernels(ForwardKernelsFor(problem.dtype, LayoutOf(problem.shape), width,
                                  buffers.mask != nullptr)) {
    first.buffers = {buffers.x[0],
                     buffers.x[1],
                     buffers.y,
                     buffers.mask,
                     {ActivationKind::kRelu}};
    second.buffers.x = buffers.x[1];
    first.affine = affine[0];
    second.affine = affine[1];
  }

  cudaError_t Normalise(Launch& launch, const Device& device,
                        const PerInput<VectorOperand, 2>& mean,
                        const PerInput<VectorOperand, 2>& var) {
    first.given_mean = mean[0];
    first.given_var = var[0];
    second.given_mean = mean[1];
    second.given_var = var[1];
    const Plan plan =
        PlanDualElementwise(problem, width, device, launch.settings);
    const cudaError_t error = LaunchBoth(
        launch, Kernel::kDualNormalise, kernels.normalise, plan, first, second);
    if (error != cudaSuccess) return error;
    return PackMask(launch, problem, first.buffers, width);
  }

  const Problem& problem;
  const int width;
  const DualForwardKernels kernels;
  ForwardParameters first{};
  ForwardParameters second{};
};

// The same in backward.
struct BackwardCall {
  BackwardCall(const Problem& problem, const GradientBuffers<2>& buffers,
               const PerInput<void*, 2>& dx)
      : problem(problem),
        width(WidthOf(problem, Aligned({buffers.dy, buffers.x[0], buffers.x[1],
                                        buffers.gate == Gate::kY ? buffers.saved
                                                                 : nullptr,
                                        dx[0], dx[1]}))),
        kernels(BackwardKernelsFor(problem.dtype, LayoutOf(problem.shape),
                                   width, buffers.gate)) {
    first.buffers = {buffers.dy, buffers.x[0], buffers.saved, buffers.gate,
                     buffers.activation};
    second.buffers.x = buffers.x[1];
    first.dx = dx[0];
    second.dx = dx[1];
  }

  cudaError_t Reduce(Launch& launch, const Device& device, bool whole) const {
    return LaunchBoth(
        launch, Kernel::kDualBackwardReduce, kernels.reduce,
        PlanDualReduction(problem, width, device, launch.settings), first,
        second, whole);
  }

  cudaError_t Apply(Launch& launch, const Device& device, bool whole) const {
    return LaunchBoth(
        launch, Kernel::kDualBackwardApply, kernels.apply,
        PlanDualElementwise(problem, width, device, launch.settings), first,
        second, whole);
  }

  const Problem& problem;
  const int width;
  const DualBackwardKernels kernels;
  BackwardParameters first{};
  BackwardParameters second{};
};

}  // namespace

cudaError_t PrepareDualKernels() {
  return ForEachKernelSet([](DType dtype, Layout layout, int width) {
    cudaError_t error = cudaSuccess;
    for (const bool mask : {false, true}) {
      const DualForwardKernels kernels =
          ForwardKernelsFor(dtype, layout, width, mask);
      if (error != cudaSuccess) return error;
      error = PrepareEach(kernels.statistics, kernels.normalise);
    }
    for (const Gate gate : {Gate::kY, Gate::kMask, Gate::kX}) {
      const DualBackwardKernels kernels =
          BackwardKernelsFor(dtype, layout, width, gate);
      if (error != cudaSuccess) return error;
      error = PrepareEach(kernels.reduce, kernels.apply);
    }
    return error;
  });
}

cudaError_t Normalise(Launch& launch, const Problem& problem,
                      const NormaliseBuffers<2>& buffers,
                      const PerInput<AffineOperands, 2>& affine,
                      const PerInput<VectorOperand, 2>& mean,
                      const PerInput<VectorOperand, 2>& var) {
  Device device;
  const cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  return ForwardCall(problem, buffers, affine)
      .Normalise(launch, device, mean, var);
}

cudaError_t Forward(Launch& launch, const Problem& problem,
                    const NormaliseBuffers<2>& buffers,
                    const PerInput<AffineOperands, 2>& affine,
                    const PerInput<void*, 2>& mean,
                    const PerInput<void*, 2>& var) {
  Device device;
  cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  ForwardCall call(problem, buffers, affine);
  call.first.mean = mean[0];
  call.first.var = var[0];
  call.second.mean = mean[1];
  call.second.var = var[1];
  error = LaunchBoth(
      launch, Kernel::kDualStatistics, call.kernels.statistics,
      PlanDualStatistics(problem, call.width, device, launch.settings),
      call.first, call.second);
  if (error != cudaSuccess) return error;
  const auto given =
      [&](const PerInput<void*, 2>& vectors) -> PerInput<VectorOperand, 2> {
    const int64_t groups = problem.shape.groups;
    return {VectorOperand{vectors[0], groups},
            VectorOperand{vectors[1], groups}};
  };
  return call.Normalise(launch, device, given(mean), given(var));
}

cudaError_t BackwardReduce(Launch& launch, const Problem& problem,
                           const GradientBuffers<2>& buffers,
                           const PerInput<ReduceOperands, 2>& operands,
                           void* sum_e, const PerInput<void*, 2>& sum_e_centred,
                           void* /*dz*/) {
  Device device;
  const cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  BackwardCall call(problem, buffers, {nullptr, nullptr});
  const auto set = [&](const ReduceOperands& own, void* centred,
                       BackwardParameters* parameters) {
    parameters->operands = OperandsOfHalf(own);
    // Both store the sum of e, which is the same.
    parameters->first = sum_e;
    parameters->second = centred;
  };
  set(operands[0], sum_e_centred[0], &call.first);
  set(operands[1], sum_e_centred[1], &call.second);
  return call.Reduce(launch, device, /*whole=*/false);
}

cudaError_t BackwardApply(Launch& launch, const Problem& problem,
                          const GradientBuffers<2>& buffers,
                          const PerInput<ApplyOperands, 2>& operands,
                          const PerInput<void*, 2>& dx) {
  Device device;
  const cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  BackwardCall call(problem, buffers, dx);
  const auto set = [](const ApplyOperands& own,
                      BackwardParameters* parameters) {
    parameters->operands = OperandsOfHalf(own);
    parameters->b = own.b;
    parameters->k = own.k;
  };
  set(operands[0], &call.first);
  set(operands[1], &call.second);
  return call.Apply(launch, device, /*whole=*/false);
}

cudaError_t Backward(Launch& launch, const Problem& problem,
                     const GradientBuffers<2>& buffers,
                     const PerInput<BackwardOperands, 2>& operands,
                     const PerInput<void*, 2>& dx,
                     const PerInput<void*, 2>& dscale, void* dbias,
                     void* /*dz*/) {
  Device device;
  cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  BackwardCall call(problem, buffers, dx);
  call.first.operands = operands[0];
  call.second.operands = operands[1];
  // Both store the gradient of the biases, which is the same.
  call.first.first = call.second.first = dbias;
  call.first.second = dscale[0];
  call.second.second = dscale[1];
  error = call.Reduce(launch, device, /*whole=*/true);
  if (error != cudaSuccess) return error;
  return call.Apply(launch, device, /*whole=*/true);
}

}  // namespace cuda
}  // namespace jax_bnar
