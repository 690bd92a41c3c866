// The kernels of one instruction set (BNAR_ISA). Each has a source file of its
// own, which instantiates it for every dtype and number of inputs.

#ifndef JAX_BNAR_CPU_ISA_KERNELS_H_
#define JAX_BNAR_CPU_ISA_KERNELS_H_

#include "cpu/half.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

template <typename T>
void RowsStatistics(const RowsTile& tile, const StatisticsArgs& args);
template <typename T, int N>
void RowsNormalise(const RowsTile& tile, const NormaliseArgs<N>& args);
template <typename T, int N>
void RowsReduce(const RowsTile& tile, const ReduceArgs<N>& args);
template <typename T, int N>
void RowsApply(const RowsTile& tile, const ApplyArgs<N>& args);

template <typename T>
void PlaneStatistics(const Plane& plane, const StatisticsArgs& args);
template <typename T, int N>
void PlaneNormalise(const Plane& plane, const NormaliseArgs<N>& args);
template <typename T, int N>
void PlaneReduce(const Plane& plane, const ReduceArgs<N>& args);
template <typename T, int N>
void PlaneApply(const Plane& plane, const ApplyArgs<N>& args);

// The same for other activations than ReLU, which have one input.
template <typename T>
void RowsNormaliseCurve(const RowsTile& tile, const NormaliseArgs<1>& args);
template <typename T>
void RowsReduceCurve(const RowsTile& tile, const ReduceArgs<1>& args);
template <typename T>
void RowsApplyCurve(const RowsTile& tile, const ApplyArgs<1>& args);
template <typename T>
void PlaneNormaliseCurve(const Plane& plane, const NormaliseArgs<1>& args);
template <typename T>
void PlaneReduceCurve(const Plane& plane, const ReduceArgs<1>& args);
template <typename T>
void PlaneApplyCurve(const Plane& plane, const ApplyArgs<1>& args);

#define BNAR_INSTANTIATE(kernel, Tile, Args)                \
  template void kernel<Float16>(const Tile&, const Args&);  \
  template void kernel<BFloat16>(const Tile&, const Args&); \
  template void kernel<float>(const Tile&, const Args&);    \
  template void kernel<double>(const Tile&, const Args&);

#define BNAR_INSTANTIATE_FOR_INPUTS(N, kernel, Tile, Args) \
  BNAR_INSTANTIATE(kernel, Tile, Args<N>)

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_KERNELS_H_
