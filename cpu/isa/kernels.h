// The kernels of one instruction set (BNAR_ISA). Each has a source file of its
// own, which instantiates it for each dtype and number of inputs; those of
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

// Expand to EXPAND(T, further arguments) for each dtype, or each one of 16
// bits. An instruction set that differs from another in what it does with
// bfloat16 alone (CMakeLists.txt) has no kernels of other dtypes: dispatch.cc
// takes those of the other set, which are the same.
#ifdef BNAR_ISA_OF_BFLOAT16
#define BNAR_FOR_EACH_DTYPE(EXPAND, ...) EXPAND(BFloat16, __VA_ARGS__)
#define BNAR_FOR_EACH_NARROW_DTYPE BNAR_FOR_EACH_DTYPE
#else
#define BNAR_FOR_EACH_NARROW_DTYPE(EXPAND, ...) \
  EXPAND(Float16, __VA_ARGS__) EXPAND(BFloat16, __VA_ARGS__)
#define BNAR_FOR_EACH_DTYPE(EXPAND, ...)          \
  BNAR_FOR_EACH_NARROW_DTYPE(EXPAND, __VA_ARGS__) \
  EXPAND(float, __VA_ARGS__) EXPAND(double, __VA_ARGS__)
#endif

#define BNAR_INSTANTIATE_FOR(T, kernel, Tile, Args) \
  template void kernel<T>(const Tile&, const Args&);
#define BNAR_INSTANTIATE(kernel, Tile, Args) \
  BNAR_FOR_EACH_DTYPE(BNAR_INSTANTIATE_FOR, kernel, Tile, Args)

#define BNAR_INSTANTIATE_CURVE_FOR(T, N, kernel, Tile, Args) \
  template void kernel<T, N>(const Tile&, const Args<N>&);
#define BNAR_INSTANTIATE_CURVE_FOR_INPUTS(N, ...) \
  BNAR_FOR_EACH_DTYPE(BNAR_INSTANTIATE_CURVE_FOR, N, __VA_ARGS__)
#define BNAR_INSTANTIATE_CURVE(kernel, Tile, Args)                           \
  BNAR_FOR_EACH_INPUT_COUNT(BNAR_INSTANTIATE_CURVE_FOR_INPUTS, kernel, Tile, \
                            Args)

#define BNAR_INSTANTIATE_SAME(T, N, kernel, Tile, Args) \
  template void kernel<T, T, N>(const Tile&, const Args<N>&);
#define BNAR_INSTANTIATE_SAME_FOR_INPUTS(N, ...) \
  BNAR_FOR_EACH_DTYPE(BNAR_INSTANTIATE_SAME, N, __VA_ARGS__)
#define BNAR_INSTANTIATE_WIDENING(T, kernel, Tile, Args) \
  template void kernel<T, float, 1>(const Tile&, const Args<1>&);

// Only one input has outputs of another dtype (kHasEveryForm).
#define BNAR_INSTANTIATE_ALL(kernel, Tile, Args)                            \
  BNAR_FOR_EACH_INPUT_COUNT(BNAR_INSTANTIATE_SAME_FOR_INPUTS, kernel, Tile, \
                            Args)                                           \
  BNAR_FOR_EACH_NARROW_DTYPE(BNAR_INSTANTIATE_WIDENING, kernel, Tile, Args)

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_KERNELS_H_
