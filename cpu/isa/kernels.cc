// The table of kernels of one instruction set (BNAR_ISA).

#include "cpu/isa/kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T>
constexpr TileKernels kTable = {
    RowsStatistics<T>,  RowsNormalise<T>,     RowsReduce<T>,
    RowsApply<T>,       RowsDualNormalise<T>, RowsDualReduce<T>,
    RowsDualApply<T>,   PlaneStatistics<T>,   PlaneNormalise<T>,
    PlaneReduce<T>,     PlaneApply<T>,        PlaneDualNormalise<T>,
    PlaneDualReduce<T>, PlaneDualApply<T>};

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
