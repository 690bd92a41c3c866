// The table of kernels of one instruction set (BNAR_ISA).

#include "cpu/isa/kernels.h"

#include <type_traits>

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// The kernels of N inputs, or null pointers where there are none.
template <typename In, typename Out, int N>
constexpr InputKernels<N> KernelsOf() {
  if constexpr (std::is_same_v<In, Out> || kHasEveryForm<N>) {
    return {RowsNormalise<In, Out, N>, RowsReduce<In, Out, N>,
            RowsApply<In, Out, N>,     PlanesNormalise<In, Out, N>,
            PlanesReduce<In, Out, N>,  PlanesApply<In, Out, N>};
  } else {
    return {};
  }
}

#define BNAR_AND_INPUT_KERNELS(N, ...) , KernelsOf<In, Out, N>()
template <typename In, typename Out = In>
constexpr TileKernels kTable = {
    {RowsStatistics<In>,
     PlanesStatistics<In>} BNAR_FOR_EACH_INPUT_COUNT(BNAR_AND_INPUT_KERNELS)};
#undef BNAR_AND_INPUT_KERNELS

}  // namespace

const TileKernels& Kernels(DType dtype, DType out_dtype) {
  const bool same = out_dtype == dtype;
#ifndef BNAR_ISA_OF_BFLOAT16
  switch (dtype) {
    case DType::kFloat16:
      return same ? kTable<Float16> : kTable<Float16, float>;
    case DType::kFloat32:
      return kTable<float>;
    case DType::kFloat64:
      return kTable<double>;
    case DType::kBFloat16:
      break;
  }
#endif
  return same ? kTable<BFloat16> : kTable<BFloat16, float>;
}

}  // namespace jax_bnar::cpu::BNAR_ISA
