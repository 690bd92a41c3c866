#include <type_traits>

#include "cuda/device/backward.cuh"
#include "cuda/launch/kernels.cuh"
#include "cuda/launch/launch.cuh"

namespace jax_bnar {
namespace cuda {
namespace {

template <typename T, int kElements>
BackwardKernels KernelsOfElement() {
  BackwardKernels kernels{};
  kernels.reduce = ReduceKernel<T, kElements>;
  kernels.apply = ApplyKernel<T, kElements>;
  if constexpr (!std::is_same_v<T, double>) {
    kernels.whole = BackwardKernel<T, kElements>;
  }
  return kernels;
}

BackwardKernels KernelsOf(DType dtype, int width) {
  return WithElementAndWidth(dtype, width, [](auto zero, auto elements) {
    return KernelsOfElement<decltype(zero), decltype(elements)::value>();
  });
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
  // Where the sums are, if they come from a ReduceKernel.
  if (whole) parameters.workspace = PlaceWorkspace(launch, plan.tiling);
  return LaunchPlanned(launch, Kernel::kBackwardApply, kernels.apply, plan,
                       parameters, whole);
}

const void* Wide(const GradientBuffers& buffers) {
  return buffers.gate == Gate::kY ? buffers.saved : nullptr;
}

}  // namespace

cudaError_t PrepareBackwardKernels() {
  return ForEachKernelSet([](DType dtype, int width) {
    const BackwardKernels kernels = KernelsOf(dtype, width);
    return PrepareEach(kernels.whole, kernels.reduce, kernels.apply);
  });
}

cudaError_t PrepareKernels() {
  const cudaError_t error = PrepareForwardKernels();
  return error == cudaSuccess ? PrepareBackwardKernels() : error;
}

cudaError_t BackwardReduce(Launch& launch, const Problem& problem,
                           const GradientBuffers& buffers,
                           const ReduceOperands& operands, void* sum_e,
                           void* sum_e_centred, void* dz) {
  Device device;
  const cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  const int width =
      WidthOf(problem, Aligned({buffers.dy, buffers.x, Wide(buffers), dz}));
  BackwardParameters parameters{};
  parameters.buffers = buffers;
  parameters.operands.mean = operands.mean;
  parameters.operands.bias = operands.bias;
  parameters.a = operands.a;
  parameters.dz = dz;
  parameters.first = sum_e;
  parameters.second = sum_e_centred;
  return ReduceAlone(launch, problem, width, device,
                     KernelsOf(problem.dtype, width), parameters,
                     /*whole=*/false);
}

cudaError_t BackwardApply(Launch& launch, const Problem& problem,
                          const GradientBuffers& buffers,
                          const ApplyOperands& operands, void* dx) {
  Device device;
  const cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  const int width =
      WidthOf(problem, Aligned({buffers.dy, buffers.x, Wide(buffers), dx}));
  BackwardParameters parameters{};
  parameters.buffers = buffers;
  parameters.operands.mean = operands.mean;
  parameters.operands.bias = operands.bias;
  parameters.a = operands.a;
  parameters.b = operands.b;
  parameters.k = operands.k;
  parameters.dx = dx;
  return ApplyAlone(launch, problem, width, device,
                    KernelsOf(problem.dtype, width), parameters,
                    /*whole=*/false);
}

cudaError_t Backward(Launch& launch, const Problem& problem,
                     const GradientBuffers& buffers,
                     const BackwardOperands& operands, void* dx, void* dscale,
                     void* dbias, void* dz) {
  Device device;
  cudaError_t error = QueryDevice(&device);
  if (error != cudaSuccess) return error;
  const int width =
      WidthOf(problem, Aligned({buffers.dy, buffers.x, Wide(buffers), dx, dz}));
  const BackwardKernels kernels = KernelsOf(problem.dtype, width);
  BackwardParameters parameters{};
  parameters.buffers = buffers;
  parameters.operands = operands;
  parameters.dz = dz;
  parameters.dx = dx;
  parameters.first = dbias;
  parameters.second = dscale;

  const Plan plan =
      MakePlan(problem, width, BackwardPass(), device, launch.settings);
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
