// The kernels of one instruction set (BNAR_ISA). Each has a source file of its
// own, which instantiates it for every dtype and number of inputs; those of
// activations other than ReLU share one for rows and one for planes. The
// elements of x and dx are In; those of y, z, dy, dz and what is saved are Out,
// which has the same accumulation type.

#ifndef JAX_BNAR_CPU_ISA_KERNELS_H_
#define JAX_BNAR_CPU_ISA_KERNELS_H_

#include "cpu/half.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

template <typename T>
void RowsStatistics(const RowsTile& tile, const StatisticsArgs& args);
template <typename In, typename Out, int N>
void RowsNormalise(const RowsTile& tile, const NormaliseArgs<N>& args);
template <typename In, typename Out, int N>
void RowsReduce(const RowsTile& tile, const ReduceArgs<N>& args);
template <typename In, typename Out, int N>
void RowsApply(const RowsTile& tile, const ApplyArgs<N>& args);

template <typename T>
void PlanesStatistics(const PlanesTile& tile, const StatisticsArgs& args);
template <typename In, typename Out, int N>
void PlanesNormalise(const PlanesTile& tile, const NormaliseArgs<N>& args);
template <typename In, typename Out, int N>
void PlanesReduce(const PlanesTile& tile, const ReduceArgs<N>& args);
template <typename In, typename Out, int N>
void PlanesApply(const PlanesTile& tile, const ApplyArgs<N>& args);

// The same for other activations than ReLU, whose outputs have the dtype of x.
template <typename T, int N>
void RowsNormaliseCurve(const RowsTile& tile, const NormaliseArgs<N>& args);
template <typename T, int N>
void RowsReduceCurve(const RowsTile& tile, const ReduceArgs<N>& args);
template <typename T, int N>
void RowsApplyCurve(const RowsTile& tile, const ApplyArgs<N>& args);
template <typename T, int N>
void PlanesNormaliseCurve(const PlanesTile& tile, const NormaliseArgs<N>& args);
template <typename T, int N>
void PlanesReduceCurve(const PlanesTile& tile, const ReduceArgs<N>& args);
template <typename T, int N>
void PlanesApplyCurve(const PlanesTile& tile, const ApplyArgs<N>& args);

#define BNAR_INSTANTIATE(kernel, Tile, Args)                \
  template void kernel<Float16>(const Tile&, const Args&);  \
  template void kernel<BFloat16>(const Tile&, const Args&); \
  template void kernel<float>(const Tile&, const Args&);    \
  template void kernel<double>(const Tile&, const Args&);

#define BNAR_INSTANTIATE_CURVE_FOR(N, kernel, Tile, Args)         \
  template void kernel<Float16, N>(const Tile&, const Args<N>&);  \
  template void kernel<BFloat16, N>(const Tile&, const Args<N>&); \
  template void kernel<float, N>(const Tile&, const Args<N>&);    \
  template void kernel<double, N>(const Tile&, const Args<N>&);
#define BNAR_INSTANTIATE_CURVE(kernel, Tile, Args) \
  BNAR_FOR_EACH_INPUT_COUNT(BNAR_INSTANTIATE_CURVE_FOR, kernel, Tile, Args)

#define BNAR_INSTANTIATE_FOR(In, Out, N, kernel, Tile, Args) \
  template void kernel<In, Out, N>(const Tile&, const Args<N>&);

#define BNAR_INSTANTIATE_FOR_INPUTS(N, kernel, Tile, Args)        \
  BNAR_INSTANTIATE_FOR(Float16, Float16, N, kernel, Tile, Args)   \
  BNAR_INSTANTIATE_FOR(BFloat16, BFloat16, N, kernel, Tile, Args) \
  BNAR_INSTANTIATE_FOR(float, float, N, kernel, Tile, Args)       \
  BNAR_INSTANTIATE_FOR(double, double, N, kernel, Tile, Args)

// Only one input has outputs of another dtype (kHasEveryForm).
#define BNAR_INSTANTIATE_ALL(kernel, Tile, Args)                             \
  BNAR_FOR_EACH_INPUT_COUNT(BNAR_INSTANTIATE_FOR_INPUTS, kernel, Tile, Args) \
  BNAR_INSTANTIATE_FOR(Float16, float, 1, kernel, Tile, Args)                \
  BNAR_INSTANTIATE_FOR(BFloat16, float, 1, kernel, Tile, Args)

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_KERNELS_H_
