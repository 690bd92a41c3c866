// The forward operations of any number of inputs. Two passes of one input may
// be one kernel; those of two inputs are always two.

#include "cuda/host/known_plans.h"
#include "cuda/launch/kernels.cuh"
#include "cuda/launch/launch.cuh"

namespace jax_bnar {
namespace cuda {
namespace {

// Two inputs have no residual.
template <int N>
auto KernelsOf(DType dtype, Layout layout, int width, bool residual,
               Activation activation, bool mask) {
  return WithElement(dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (N == 1) {
      return ForwardKernelsOf<T>(layout, width, residual, activation, mask);
    } else {
      return DualForwardKernelsOf<T>(layout, width, activation, mask);
    }
  });
}

// What is known of a call, and what its kernels are told.
template <int N>
struct ForwardCall {
  ForwardCall(const Problem& problem, const NormaliseBuffers<N>& buffers,
              const PerInput<AffineOperands, N>& affine)
      : problem(problem),
        buffers(buffers),
        aligned(AreAligned(buffers.x) && Aligned({buffers.z, buffers.y})),
        width(WidthOf(problem, aligned)),
        kernels(KernelsOf<N>(problem.dtype, LayoutOf(problem.shape), width,
                             buffers.z != nullptr, buffers.activation,
                             buffers.mask != nullptr)) {
    for (int i = 0; i < N; ++i) {
      parameters[i].buffers = {buffers.x[i],
                               N == 1 ? buffers.z : buffers.x[N - 1], buffers.y,
                               buffers.mask, buffers.activation};
      parameters[i].affine = affine[i];
    }
  }

  cudaError_t Whole(Launch& launch, const Device& device,
                    bool* launched) const {
    static_assert(N == 1, "two inputs have no such kernel");
    const Plan plan =
        KnownPlan(problem, width,
                  ForwardTraffic(problem.dtype, buffers.z != nullptr,
                                 buffers.mask != nullptr),
                  device, launch.settings);
    const cudaError_t error =
        LaunchWhole(launch, Kernel::kForward, kernels.whole, plan, device,
                    parameters[0], launched);
    if (error != cudaSuccess || !*launched) return error;
    return PackMask(launch);
  }

  cudaError_t Statistics(Launch& launch, const Device& device) const {
    return LaunchPass(launch,
                      N == 1 ? Kernel::kStatistics : Kernel::kDualStatistics,
                      kernels.statistics,
                      PlanStatistics(problem, width, device, N), parameters);
  }

  cudaError_t Normalise(Launch& launch, const Device& device,
                        const PerInput<VectorOperand, N>& mean,
                        const PerInput<VectorOperand, N>& var) {
    for (int i = 0; i < N; ++i) {
      parameters[i].given_mean = mean[i];
      parameters[i].given_var = var[i];
    }
    if constexpr (N == 1) {
      if (IsFlat(problem, aligned)) {
        const FlatTiling tiling = CutFlat(problem);
        return LaunchPlanned(launch, Kernel::kNormaliseFlat, kernels.flat,
                             PlanFlat(tiling), parameters[0], tiling);
      }
    }
    const cudaError_t error =
        LaunchPass(launch, N == 1 ? Kernel::kNormalise : Kernel::kDualNormalise,
                   kernels.normalise,
                   PlanElementwise(problem, width, device, N), parameters);
    if (error != cudaSuccess) return error;
    return PackMask(launch);
  }

  // Packs the bits that kernels of single elements cannot write, and the bits
  // of y where there is no ReLU, which only tests ask for.
  cudaError_t PackMask(Launch& launch) const {
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
    const ForwardKernels single =
        KernelsOf<1>(problem.dtype, LayoutOf(problem.shape), width,
                     /*residual=*/false, buffers.activation, /*mask=*/true);
    return LaunchPlanned(launch, Kernel::kPackMask, single.pack_mask, plan,
                         static_cast<const void*>(buffers.y), buffers.mask,
                         problem, buffers.activation);
  }

  const Problem& problem;
  const NormaliseBuffers<N>& buffers;
  const bool aligned;
  const int width;
  const decltype(KernelsOf<N>({}, {}, 0, false, {}, false)) kernels;
  PerInput<ForwardParameters, N> parameters{};
};

}  // namespace

cudaError_t PrepareForwardKernels() {
  return ForEachKernelSet([](DType dtype, Layout layout, int width) {
    cudaError_t error = cudaSuccess;
    for (const bool mask : {false, true}) {
      for (const bool residual : {false, true}) {
        for (const ActivationKind kind :
             {ActivationKind::kNone, ActivationKind::kRelu,
              ActivationKind::kSilu}) {
          const ForwardKernels kernels =
              KernelsOf<1>(dtype, layout, width, residual, {kind}, mask);
          if (error != cudaSuccess) return error;
          error = PrepareEach(kernels.statistics, kernels.normalise,
                              kernels.flat, kernels.pack_mask);
          if (error == cudaSuccess) error = PrepareWhole(kernels.whole);
        }
      }
      for (const ActivationKind kind :
           {ActivationKind::kNone, ActivationKind::kRelu,
            ActivationKind::kSilu}) {
        const DualForwardKernels kernels = KernelsOf<2>(
            dtype, layout, width, /*residual=*/false, {kind}, mask);
        if (error != cudaSuccess) return error;
        error = PrepareEach(kernels.statistics, kernels.normalise);
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
  NormaliseBuffers<1> buffers{};
  buffers.x[0] = x;
  ForwardCall<1> call(problem, buffers, {});
  call.parameters[0].mean = mean;
  call.parameters[0].var = var;
  return call.Statistics(launch, device);
}

template <int N>
cudaError_t Normalise(Launch& launch, const Problem& problem,
                      const NormaliseBuffers<N>& buffers,
                      const PerInput<AffineOperands, N>& affine,
                      const PerInput<VectorOperand, N>& mean,
                      const PerInput<VectorOperand, N>& var) {
  Device device;
  const cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  return ForwardCall<N>(problem, buffers, affine)
      .Normalise(launch, device, mean, var);
}

template <int N>
cudaError_t Forward(Launch& launch, const Problem& problem,
                    const NormaliseBuffers<N>& buffers,
                    const PerInput<AffineOperands, N>& affine,
                    const PerInput<void*, N>& mean,
                    const PerInput<void*, N>& var) {
  Device device;
  cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  ForwardCall<N> call(problem, buffers, affine);
  for (int i = 0; i < N; ++i) {
    call.parameters[i].mean = mean[i];
    call.parameters[i].var = var[i];
  }
  if constexpr (N == 1) {
    bool launched = false;
    error = call.Whole(launch, device, &launched);
    if (error != cudaSuccess || launched) return error;
  }
  error = call.Statistics(launch, device);
  if (error != cudaSuccess) return error;
  const auto given = [&](const PerInput<void*, N>& vectors) {
    return PerInputOf<N>(
        [&](int i) { return VectorOperand{vectors[i], problem.shape.groups}; });
  };
  return call.Normalise(launch, device, given(mean), given(var));
}

#define BNAR_INSTANTIATE(N, ...) \
  BNAR_DECLARE_FORWARD(template, cudaError_t, Launch&, N);
BNAR_FOR_EACH_INPUT_COUNT(BNAR_INSTANTIATE)
#undef BNAR_INSTANTIATE

}  // namespace cuda
}  // namespace jax_bnar
