// Which strategy for which shape on which device: plain host code, no CUDA.
//
// A slab is read twice, for the sums and for the elementwise pass. The
// strategies differ in where it waits in between:
//   kCluster     in shared memory of one thread block cluster, whose blocks add
//                their sums through distributed shared memory (compute
//                capability 9.0);
//   kOnChip      in shared memory of a team of blocks, which meet at a barrier
//                in global memory; what does not fit is read again, last rows
//                first, from L2 as far as it is there. The kernel of apex's
//                groupbn does so for float16;
//   kTwoKernels  in memory: one kernel for the sums, whose last block adds them
//                up, one for the elementwise pass. Always possible.

// Of those that the device can run, the plan is taken that should take least
// (cost.h).

#ifndef JAX_BNAR_CUDA_HOST_PLAN_H_
#define JAX_BNAR_CUDA_HOST_PLAN_H_

#include <cstdint>

#include "cuda/host/parameters.h"
#include "cuda/host/tiling.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// What the device says of itself; no chip is known by name.
struct Device {
  int multiprocessors;
  int64_t shared_bytes_per_multiprocessor;
  int64_t shared_bytes_per_block;  // with opt-in
  int64_t reserved_shared_bytes_per_block;
  int64_t l2_bytes;
  bool cooperative;
  bool clusters;
};

enum class Strategy { kAuto, kOnChip, kCluster, kTwoKernels };
constexpr int kStrategies = 4;

struct Settings {
  Strategy strategy = Strategy::kAuto;
  int sm_margin = 0;      // multiprocessors left to others
  int slab_channels = 0;  // a power of 2 in [8, kMaxColumns]; 0: what fits
};

// Arrays of which a tile waits on chip between the passes: x, or e and x.
constexpr int kForwardArrays = 1;
constexpr int kBackwardArrays = 2;

struct Plan {
  Strategy strategy;  // never kAuto
  Tiling tiling;
  BlockReduction block_reduction;
  int64_t grid;
  int cluster;  // blocks, or 0
  int64_t shared_bytes;
};

Plan MakePlan(const Problem& problem, int width, int arrays_kept,
              const Device& device, const Settings& settings);

// One kernel's plan: the sums, or the elementwise pass, alone.
Plan PlanReduction(const Problem& problem, int width, const Device& device,
                   const Settings& settings);
Plan PlanElementwise(const Problem& problem, int width, const Device& device,
                     const Settings& settings);

Plan PlanFlat(const FlatTiling& tiling);

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_PLAN_H_
