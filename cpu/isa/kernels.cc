// The table of kernels of one instruction set (BNAR_ISA).

#include "cpu/isa/kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T, int N>
constexpr InputKernels<N> kInputKernels = {
    RowsNormalise<T, N>,  RowsReduce<T, N>,  RowsApply<T, N>,
    PlaneNormalise<T, N>, PlaneReduce<T, N>, PlaneApply<T, N>};

#define BNAR_AND_INPUT_KERNELS(N, ...) , kInputKernels<T, N>
template <typename T>
constexpr TileKernels kTable = {
    {RowsStatistics<T>,
     PlaneStatistics<T>} BNAR_FOR_EACH_INPUT_COUNT(BNAR_AND_INPUT_KERNELS)};
#undef BNAR_AND_INPUT_KERNELS

}  // namespace

const TileKernels& Kernels(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return kTable<Float16>;
    case DType::kBFloat16:
      return kTable<BFloat16>;
    case DType::kFloat32:
      return kTable<float>;
    default:
      return kTable<double>;
  }
}

}  // namespace jax_bnar::cpu::BNAR_ISA
