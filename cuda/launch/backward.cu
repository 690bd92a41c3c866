// The backward operations of any number of inputs. Two passes of one input may
// be one kernel; those of two inputs are always two.

#include "cuda/host/known_plans.h"
#include "cuda/launch/kernels.cuh"
#include "cuda/launch/launch.cuh"

namespace jax_bnar {
namespace cuda {
namespace {

// Two inputs have no dz.
template <int N>
auto KernelsOf(DType dtype, Layout layout, int width, Gate gate, bool store_dz,
               bool curve) {
  return WithElement(dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (N == 1) {
      return BackwardKernelsOf<T>(layout, width, gate, store_dz, curve);
    } else {
      return DualBackwardKernelsOf<T>(layout, width, gate, curve);
    }
  });
}

// What is known of a call, and what its kernels are told.
template <int N>
struct BackwardCall {
  BackwardCall(const Problem& problem, const GradientBuffers<N>& buffers,
               const PerInput<void*, N>& dx, void* dz)
      : problem(problem),
        buffers(buffers),
        dz(dz),
        // Without a gate, dy is e, and no activation matters any more.
        curve(buffers.gate != Gate::kNone && buffers.activation.is_curve()),
        width(WidthOf(problem,
                      HasVectors(N, buffers.gate, dz != nullptr, curve) &&
                          AreAligned(buffers.x) && AreAligned(dx) &&
                          Aligned({buffers.dy, dz, SavedArray()}))),
        kernels(KernelsOf<N>(problem.dtype, LayoutOf(problem.shape), width,
                             buffers.gate, dz != nullptr, curve)) {
    for (int i = 0; i < N; ++i) {
      parameters[i].buffers = {buffers.dy, buffers.x[i], buffers.saved,
                               buffers.gate, buffers.activation};
      parameters[i].dz = dz;
      parameters[i].dx = dx[i];
    }
  }

  const void* SavedArray() const {
    return buffers.gate == Gate::kMask ? nullptr : buffers.saved;
  }

  // Where the sums go. All inputs store the sum of e, which is the same.
  void SetSums(void* sum_e, const PerInput<void*, N>& sum_e_centred) {
    for (int i = 0; i < N; ++i) {
      parameters[i].first = sum_e;
      parameters[i].second = sum_e_centred[i];
    }
  }

  cudaError_t Whole(Launch& launch, const Device& device,
                    bool* launched) const {
    static_assert(N == 1, "two inputs have no such kernel");
    const Plan plan =
        KnownPlan(problem, width,
                  BackwardTraffic(problem.dtype, buffers.gate, dz != nullptr),
                  device, launch.settings);
    return LaunchWhole(launch, Kernel::kBackward, kernels.whole, plan, device,
                       parameters[0], launched);
  }

  // `whole` says of a kernel that it is half of a whole backward pass.
  cudaError_t Reduce(Launch& launch, const Device& device, bool whole) const {
    return LaunchPass(
        launch, N == 1 ? Kernel::kBackwardReduce : Kernel::kDualBackwardReduce,
        kernels.reduce, PlanReduction(problem, width, device, whole, N),
        parameters, whole);
  }

  // Where the sums have written dz, it is read as the dy of a call without a
  // gate.
  cudaError_t Apply(Launch& launch, const Device& device, bool whole) const {
    PerInput<BackwardParameters, N> applied = parameters;
    auto kernel = kernels.apply;
    if (dz != nullptr) {
      applied[0].buffers.dy = dz;
      applied[0].buffers.gate = Gate::kNone;
      applied[0].dz = nullptr;
      kernel = KernelsOf<N>(problem.dtype, LayoutOf(problem.shape), width,
                            Gate::kNone, /*store_dz=*/false, /*curve=*/false)
                   .apply;
    }
    return LaunchPass(
        launch, N == 1 ? Kernel::kBackwardApply : Kernel::kDualBackwardApply,
        kernel, PlanElementwise(problem, width, device, N), applied, whole);
  }

  const Problem& problem;
  const GradientBuffers<N>& buffers;
  void* const dz;
  const bool curve;
  const int width;
  const decltype(KernelsOf<N>({}, {}, 0, {}, false, false)) kernels;
  PerInput<BackwardParameters, N> parameters{};
};

}  // namespace

cudaError_t PrepareBackwardKernels() {
  return ForEachKernelSet([](DType dtype, Layout layout, int width) {
    cudaError_t error = cudaSuccess;
    const auto prepare = [&](Gate gate, bool curve) {
      for (const bool store_dz : {false, true}) {
        const BackwardKernels kernels =
            KernelsOf<1>(dtype, layout, width, gate, store_dz, curve);
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
    const auto prepare_dual = [&](Gate gate, bool curve) {
      const DualBackwardKernels kernels =
          KernelsOf<2>(dtype, layout, width, gate, /*store_dz=*/false, curve);
      if (error != cudaSuccess) return;
      error = PrepareEach(kernels.reduce, kernels.apply);
    };
    prepare_dual(Gate::kNone, /*curve=*/false);
    for (const Gate gate : {Gate::kY, Gate::kMask, Gate::kX}) {
      for (const bool curve : {false, true}) prepare_dual(gate, curve);
    }
    return error;
  });
}

template <int N>
cudaError_t BackwardReduce(Launch& launch, const Problem& problem,
                           const GradientBuffers<N>& buffers,
                           const PerInput<ReduceOperands, N>& operands,
                           void* sum_e, const PerInput<void*, N>& sum_e_centred,
                           void* dz) {
  Device device;
  const cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  BackwardCall<N> call(problem, buffers, {}, dz);
  for (int i = 0; i < N; ++i) {
    call.parameters[i].operands = OperandsOfHalf(operands[i]);
  }
  call.SetSums(sum_e, sum_e_centred);
  return call.Reduce(launch, device, /*whole=*/false);
}

template <int N>
cudaError_t BackwardApply(Launch& launch, const Problem& problem,
                          const GradientBuffers<N>& buffers,
                          const PerInput<ApplyOperands, N>& operands,
                          const PerInput<void*, N>& dx) {
  Device device;
  const cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  BackwardCall<N> call(problem, buffers, dx, /*dz=*/nullptr);
  for (int i = 0; i < N; ++i) {
    call.parameters[i].operands = OperandsOfHalf(operands[i]);
    call.parameters[i].b = operands[i].b;
    call.parameters[i].k = operands[i].k;
  }
  return call.Apply(launch, device, /*whole=*/false);
}

template <int N>
cudaError_t Backward(Launch& launch, const Problem& problem,
                     const GradientBuffers<N>& buffers,
                     const PerInput<BackwardOperands, N>& operands,
                     const PerInput<void*, N>& dx,
                     const PerInput<void*, N>& dscale, void* dbias, void* dz) {
  Device device;
  cudaError_t error = DescribeDevice(&device);
  if (error != cudaSuccess) return error;
  BackwardCall<N> call(problem, buffers, dx, dz);
  for (int i = 0; i < N; ++i) call.parameters[i].operands = operands[i];
  // The gradients of the biases, which are the same, are the sum of e.
  call.SetSums(dbias, dscale);
  if constexpr (N == 1) {
    bool launched = false;
    error = call.Whole(launch, device, &launched);
    if (error != cudaSuccess || launched) return error;
  }
  error = call.Reduce(launch, device, /*whole=*/true);
  if (error != cudaSuccess) return error;
  return call.Apply(launch, device, /*whole=*/true);
}

#define BNAR_INSTANTIATE(N, ...) \
  BNAR_DECLARE_BACKWARD(template, cudaError_t, Launch&, N);
BNAR_FOR_EACH_INPUT_COUNT(BNAR_INSTANTIATE)
#undef BNAR_INSTANTIATE

}  // namespace cuda
}  // namespace jax_bnar
