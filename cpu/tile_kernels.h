// The inner loops. There is a table of them for each instruction set and each
// pair of dtypes of a Problem. Where these differ, only one input has kernels,
// and no activation but ReLU.
//
// A "rows" tile is a matrix whose columns each belong to one channel (see
// Plan); its width is a multiple of 16, which the plan arranges. A "plane" is a
// contiguous run of elements of one channel (NCHW); a tile has several, because
// a call takes as long as some thirty elements do. Sums are returned in double,
// so that partial results merge without loss.

#ifndef JAX_BNAR_CPU_TILE_KERNELS_H_
#define JAX_BNAR_CPU_TILE_KERNELS_H_

#include <cstdint>

#include "native/problem.h"

namespace jax_bnar::cpu {

// Elements that a kernel works on at once, with any instruction set and dtype.
constexpr int kLanes = 16;

struct RowsTile {
  int64_t rows;
  int64_t width;   // columns, a multiple of 16
  int64_t stride;  // elements from one row to the next, a multiple of 16
};

// In the structs below, x, z, y, dy, dz, dx and saved point at the tile's first
// element (for a bit mask, at the byte that holds its bit). Vectors are in the
// accumulation dtype and point at the tile's first column.

struct StatisticsArgs {
  const void* x;
  const void* origin;
  double* sum;  // of (x - origin); overwritten
  double* m2;   // sum((x - mean)^2); overwritten
  // Whether all arrays of a training step fit in the cache together.
  bool fits_cache;
};

// y = act(sum_i (x_i - mean_i) * a_i + bias + z), where `bias` is the sum of
// the biases of all inputs.
template <int N>
struct NormaliseArgs {
  PerInput<const void*, N> x;
  const void* z;  // null without a residual
  void* y;
  uint8_t* mask;  // null if no mask is wanted
  PerInput<const void*, N> mean;
  PerInput<const void*, N> a;
  const void* bias;
  Activation activation;
  bool non_temporal;  // y bypasses the caches
  // Whether all arrays of a training step fit in the cache together.
  bool fits_cache;
};

// With kX the gate is sum_i (x_i - mean_i) * a_i + bias > 0, rounded to the
// dtype of y. With another activation than ReLU, e is dy times its derivative,
// and with kZ, `saved` is added to that sum.
template <int N>
struct ReduceArgs {
  const void* dy;
  PerInput<const void*, N> x;
  const void* saved;
  void* dz;  // where e is stored, if it is: dz, or dx of the first input
  PerInput<const void*, N> mean;
  PerInput<const void*, N> a;          // with kX and kZ
  const void* bias;                    // with kX and kZ
  double* sum_e;                       // overwritten
  PerInput<double*, N> sum_e_centred;  // overwritten
  Gate gate;
  Activation activation;
  bool non_temporal;  // dz bypasses the caches
  // Whether all arrays of a training step fit in the cache together.
  bool fits_cache;
};

// dx_i = a_i * e + b_i * (x_i - mean_i) + k_i, with the gate of ReduceArgs.
template <int N>
struct ApplyArgs {
  const void* e;  // dy with a gate, and with kNone perhaps dx[0] itself
  PerInput<const void*, N> x;
  const void* saved;
  PerInput<void*, N> dx;
  PerInput<const void*, N> mean;
  PerInput<const void*, N> a;
  PerInput<const void*, N> b;
  PerInput<const void*, N> k;
  const void* bias;  // with kX and kZ
  Gate gate;
  Activation activation;
  bool non_temporal;  // the dx_i bypass the caches
  // Whether all arrays of a training step fit in the cache together.
  bool fits_cache;
};

// Planes of consecutive channels, one behind the other in memory. Vectors have
// one value for each, which belongs to all of its elements, and its mask bits
// may start anywhere in a byte.
struct PlanesTile {
  int64_t planes;
  int64_t size;      // of each plane; at least 16, which the plan ensures
  int64_t mask_bit;  // of the first element, counted from the mask pointer
};

struct StatisticsKernels {
  void (*rows_statistics)(const RowsTile&, const StatisticsArgs&);
  void (*planes_statistics)(const PlanesTile&, const StatisticsArgs&);
};

template <int N>
struct InputKernels {
  void (*rows_normalise)(const RowsTile&, const NormaliseArgs<N>&);
  void (*rows_reduce)(const RowsTile&, const ReduceArgs<N>&);
  void (*rows_apply)(const RowsTile&, const ApplyArgs<N>&);
  void (*planes_normalise)(const PlanesTile&, const NormaliseArgs<N>&);
  void (*planes_reduce)(const PlanesTile&, const ReduceArgs<N>&);
  void (*planes_apply)(const PlanesTile&, const ApplyArgs<N>&);
};

#define BNAR_AND_INPUT_KERNELS(N, ...) , InputKernels<N>
struct TileKernels
    : StatisticsKernels BNAR_FOR_EACH_INPUT_COUNT(BNAR_AND_INPUT_KERNELS) {
  template <int N>
  const InputKernels<N>& of_inputs() const {
    return *this;
  }
};
#undef BNAR_AND_INPUT_KERNELS

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_TILE_KERNELS_H_
