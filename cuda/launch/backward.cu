#include "cuda/host/known_plans.h"
#include "cuda/launch/kernels.cuh"
#include "cuda/launch/launch.cuh"

namespace jax_bnar {
namespace cuda {
namespace {

BackwardKernels KernelsOf(DType dtype, Layout layout, int width, Gate gate,
                          bool store_dz, bool curve) {
  return WithElement(dtype, [&](auto zero) {
    return BackwardKernelsOf<decltype(zero)>(layout, width, gate, store_dz,
                                             curve);
  });
}

// Without a gate, dy is e, and no activation matters any more.
bool HasCurve(const BackwardBuffers& buffers) {
  return buffers.gate != Gate::kNone && buffers.activation.is_curve();
}

BackwardKernels KernelsOf(const Problem& problem, int width,
                          const BackwardBuffers& buffers, const void* dz) {
  return KernelsOf(problem.dtype, LayoutOf(problem.shape), width, buffers.gate,
                   dz != nullptr, HasCurve(buffers));
}

cudaError_t ReduceAlone(Launch& launch, const Problem& problem, int width,
                        const Device& device, const BackwardKernels& kernels,
                        const BackwardParameters& parameters, bool whole) {
  const Plan plan = PlanReduction(problem, width, device, launch.settings);
  return LaunchSums(launch, Kernel::kBackwardReduce, kernels.reduce, plan,
                    parameters, whole);
}

cudaError_t ApplyAlone(Launch& launch, const Problem& problem, int width,
                       const Device& device, const BackwardKernels& kernels,
                       BackwardParameters parameters, bool whole) {
  const Plan plan = PlanElementwise(problem, width, device, launch.settings);
  parameters.tiling = plan.tiling;
  // The sums of a ReduceKernel lie in the workspace.
  if (whole) parameters.workspace = PlaceWorkspace(launch, plan.tiling);
  return LaunchPlanned(launch, Kernel::kBackwardApply, kernels.apply, plan,
                       parameters, whole);
}

// The elements that a thread of the call's kernels reads at once.
int WidthOfCall(const Problem& problem, const BackwardBuffers& buffers,
                const void* dz, const void* dx) {
  const void* saved =  // if it is an array
      buffers.gate == Gate::kMask ? nullptr : buffers.saved;
  return WidthOf(problem,
                 HasVectors(buffers.gate, dz != nullptr, HasCurve(buffers)) &&
                     Aligned({buffers.dy, buffers.x, saved, dz, dx}));
}

}  // namespace

cudaError_t PrepareBackwardKernels() {
  return ForEachKernelSet([](DType dtype, Layout layout, int width) {
    cudaError_t error = cudaSuccess;
    const auto prepare = [&](Gate gate, bool curve) {
      for (const bool store_dz : {false, true}) {
        const BackwardKernels kernels =
            KernelsOf(dtype, layout, width, gate, store_dz, curve);
        if (error != cudaSuccess) return;
        error = PrepareEach(kernels.reduce, kernels.apply);
        if (error == cudaSuccess) error = PrepareWhole(kernels.whole);
      }
    };
    for (const Gate gate : {Gate::kNone, Gate::kY, Gate::kMask, Gate::kX}) {
      prepare(gate, /*curve=*/false);
    }
    for (const Gate gate : {Gate::kY, Gate::kMask, Gate::kX, Gate::kZ}) {
      prepare(gate, /*curve=*/true);
    }
    return error;
  });
}

cudaError_t PrepareKernels() {
  Device device;
  cudaError_t error = QueryDevice(&device);
  if (error == cudaSuccess) error = PrepareForwardKernels();
  if (error == cudaSuccess) error = PrepareBackwardKernels();
  return error == cudaSuccess ? PrepareDualKernels() : error;
}

cudaError_t BackwardReduce(Launch& launch, const Problem& problem,
                           const GradientBuffers<1>& given,
                           const PerInput<ReduceOperands, 1>& operands,
                           void* sum_e, const PerInput<void*, 1>& sum_e_centred,
                           void* dz) {
  Device device;
  const cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  const BackwardBuffers buffers = BuffersOf(given);
  const int width = WidthOfCall(problem, buffers, dz, nullptr);
  BackwardParameters parameters{};
  parameters.buffers = buffers;
  parameters.operands = OperandsOfHalf(operands[0]);
  parameters.dz = dz;
  parameters.first = sum_e;
  parameters.second = sum_e_centred[0];
  return ReduceAlone(launch, problem, width, device,
                     KernelsOf(problem, width, buffers, dz), parameters,
                     /*whole=*/false);
}

cudaError_t BackwardApply(Launch& launch, const Problem& problem,
                          const GradientBuffers<1>& given,
                          const PerInput<ApplyOperands, 1>& operands,
                          const PerInput<void*, 1>& dx) {
  Device device;
  const cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  const BackwardBuffers buffers = BuffersOf(given);
  const int width = WidthOfCall(problem, buffers, nullptr, dx[0]);
  BackwardParameters parameters{};
  parameters.buffers = buffers;
  parameters.operands = OperandsOfHalf(operands[0]);
  parameters.b = operands[0].b;
  parameters.k = operands[0].k;
  parameters.dx = dx[0];
  return ApplyAlone(launch, problem, width, device,
                    KernelsOf(problem, width, buffers, nullptr), parameters,
                    /*whole=*/false);
}

cudaError_t Backward(Launch& launch, const Problem& problem,
                     const GradientBuffers<1>& given,
                     const PerInput<BackwardOperands, 1>& operands,
                     const PerInput<void*, 1>& dx,
                     const PerInput<void*, 1>& dscale, void* dbias, void* dz) {
  Device device;
  cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  const BackwardBuffers buffers = BuffersOf(given);
  const int width = WidthOfCall(problem, buffers, dz, dx[0]);
  const BackwardKernels kernels = KernelsOf(problem, width, buffers, dz);
  BackwardParameters parameters{};
  parameters.buffers = buffers;
  parameters.operands = operands[0];
  parameters.dz = dz;
  parameters.dx = dx[0];
  parameters.first = dbias;
  parameters.second = dscale[0];

  const Plan plan =
      KnownPlan(problem, width,
                BackwardTraffic(problem.dtype, buffers.gate, dz != nullptr),
                device, launch.settings);
  bool launched = false;
  error = LaunchWhole(launch, Kernel::kBackward, kernels.whole, plan, device,
                      parameters, &launched);
  if (error != cudaSuccess || launched) return error;
  error = ReduceAlone(launch, problem, width, device, kernels, parameters,
                      /*whole=*/true);
  if (error != cudaSuccess) return error;
  return ApplyAlone(launch, problem, width, device, kernels, parameters,
                    /*whole=*/true);
}

}  // namespace cuda
}  // namespace jax_bnar
