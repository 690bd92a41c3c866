// The inner loops. There is a table of them for each dtype and instruction set.
//
// A "rows" tile is a matrix whose columns are channels (NHWC); its width is a
// multiple of 16, which the plan arranges. A "plane" is a contiguous run of
// elements of one channel (NCHW). Sums are returned in double, so that partial
// results merge without loss.

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
};

struct NormaliseArgs {
  const void* x;
  const void* z;  // null without a residual
  void* y;
  uint8_t* mask;     // null if no mask is wanted
  const void* mean;  // y = act((x - mean) * a + bias + z)
  const void* a;
  const void* bias;
  bool relu;
  bool stream;  // y bypasses the caches
};

struct ReduceArgs {
  const void* dy;
  const void* x;
  const void* saved;
  void* dz;  // null without a residual
  const void* mean;
  const void* a;          // with kX: the gate is (x - mean) * a + bias > 0
  const void* bias;       // with kX
  double* sum_e;          // overwritten
  double* sum_e_centred;  // overwritten
  Gate gate;
  bool stream;  // dz bypasses the caches
};

struct ApplyArgs {
  const void* e;  // dy, or dz with gate kNone
  const void* x;
  const void* saved;
  void* dx;
  const void* mean;  // dx = a * e + b * (x - mean) + k
  const void* a;
  const void* b;
  const void* k;
  const void* bias;  // with kX: the gate is (x - mean) * a + bias > 0
  Gate gate;
  bool stream;  // dx bypasses the caches
};

// The same for y = relu(batch_norm(x1) + batch_norm(x2)); `bias` is the sum of
// both biases.

struct DualNormaliseArgs {
  Both<const void*> x;
  void* y;
  uint8_t* mask;  // null if no mask is wanted
  Both<const void*>
      mean;  // y = relu((x1 - mean1) * a1 + (x2 - mean2) * a2 + bias)
  Both<const void*> a;
  const void* bias;
  bool stream;
};

struct DualReduceArgs {
  const void* dy;
  Both<const void*> x;
  const void* saved;
  Both<const void*> mean;
  Both<const void*> a;  // with kX
  const void* bias;     // with kX
  double* sum_e;
  Both<double*> sum_e_centred;
  Gate gate;  // not kNone
};

struct DualApplyArgs {
  const void* dy;
  Both<const void*> x;
  const void* saved;
  Both<void*> dx;
  Both<const void*> mean;
  Both<const void*> a;
  Both<const void*> b;
  Both<const void*> k;
  const void* bias;  // with kX
  Gate gate;         // not kNone
  bool stream;
};

// Each vector of a plane is the one value of its channel, and the plane's mask
// bits may start anywhere in a byte.
struct Plane {
  int64_t size;      // at least 16, which the plan ensures
  int64_t mask_bit;  // of the first element, counted from the mask pointer
};

struct TileKernels {
  void (*rows_statistics)(const RowsTile&, const StatisticsArgs&);
  void (*rows_normalise)(const RowsTile&, const NormaliseArgs&);
  void (*rows_reduce)(const RowsTile&, const ReduceArgs&);
  void (*rows_apply)(const RowsTile&, const ApplyArgs&);
  void (*rows_dual_normalise)(const RowsTile&, const DualNormaliseArgs&);
  void (*rows_dual_reduce)(const RowsTile&, const DualReduceArgs&);
  void (*rows_dual_apply)(const RowsTile&, const DualApplyArgs&);

  void (*plane_statistics)(const Plane&, const StatisticsArgs&);
  void (*plane_normalise)(const Plane&, const NormaliseArgs&);
  void (*plane_reduce)(const Plane&, const ReduceArgs&);
  void (*plane_apply)(const Plane&, const ApplyArgs&);
  void (*plane_dual_normalise)(const Plane&, const DualNormaliseArgs&);
  void (*plane_dual_reduce)(const Plane&, const DualReduceArgs&);
  void (*plane_dual_apply)(const Plane&, const DualApplyArgs&);
};

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_TILE_KERNELS_H_
