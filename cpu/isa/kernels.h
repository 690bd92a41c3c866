// The kernels of one instruction set (BNAR_ISA). Each has a source file of its
// own, which instantiates it for every dtype.

#ifndef JAX_BNAR_CPU_ISA_KERNELS_H_
#define JAX_BNAR_CPU_ISA_KERNELS_H_

#include "cpu/half.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

template <typename T>
void RowsStatistics(const RowsTile& tile, const StatisticsArgs& args);
template <typename T>
void RowsNormalise(const RowsTile& tile, const NormaliseArgs& args);
template <typename T>
void RowsReduce(const RowsTile& tile, const ReduceArgs& args);
template <typename T>
void RowsApply(const RowsTile& tile, const ApplyArgs& args);
template <typename T>
void RowsDualNormalise(const RowsTile& tile, const DualNormaliseArgs& args);
template <typename T>
void RowsDualReduce(const RowsTile& tile, const DualReduceArgs& args);
template <typename T>
void RowsDualApply(const RowsTile& tile, const DualApplyArgs& args);

template <typename T>
void PlaneStatistics(const Plane& plane, const StatisticsArgs& args);
template <typename T>
void PlaneNormalise(const Plane& plane, const NormaliseArgs& args);
template <typename T>
void PlaneReduce(const Plane& plane, const ReduceArgs& args);
template <typename T>
void PlaneApply(const Plane& plane, const ApplyArgs& args);
template <typename T>
void PlaneDualNormalise(const Plane& plane, const DualNormaliseArgs& args);
template <typename T>
void PlaneDualReduce(const Plane& plane, const DualReduceArgs& args);
template <typename T>
void PlaneDualApply(const Plane& plane, const DualApplyArgs& args);

#define BNAR_INSTANTIATE(kernel, Tile, Args)                \
  template void kernel<Float16>(const Tile&, const Args&);  \
  template void kernel<BFloat16>(const Tile&, const Args&); \
  template void kernel<float>(const Tile&, const Args&);    \
  template void kernel<double>(const Tile&, const Args&)

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_KERNELS_H_
