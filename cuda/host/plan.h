// Which strategy runs for which shape on which device: plain host code, no
// CUDA.
//
// A slab is read twice, for the sums and for the elementwise pass. The
// strategies differ in where it waits in between:
//   kCluster     in the shared memory of one thread block cluster, whose blocks
//                add their sums through distributed shared memory (compute
//                capability 9.0 or newer);
//   kOnChip      in the shared memory of a team of blocks, which send each
//                other their sums through L2. What does not fit is copied there
//                again, last rows first, from L2 as far as L2 still has it. The
//                kernel of apex's groupbn keeps float16 on chip in this way;
//   kTwoKernels  in memory: one kernel computes the sums, which its last block
//                adds up, and one does the elementwise pass. This is always
//                possible.
// Of the plans that the device can run, the planner takes the one that loses
// least if the constants of its model (cost.h) are other than assumed.

#ifndef JAX_BNAR_CUDA_HOST_PLAN_H_
#define JAX_BNAR_CUDA_HOST_PLAN_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "cuda/host/parameters.h"
#include "cuda/host/tiling.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// What a device reports about itself. No chip is known by name.
struct Device {
  int multiprocessors;
  int64_t shared_bytes_per_multiprocessor;
  int64_t shared_bytes_per_block;  // with opt-in
  int64_t reserved_shared_bytes_per_block;
  int64_t l2_bytes;
  bool cooperative;
  bool clusters;
  double memory_bytes_per_microsecond = 0;  // nominal; 0 if it is unknown
  // The rate of float over that of double.
  double single_to_double_ratio = 2;
};

enum class Strategy { kAuto, kOnChip, kCluster, kTwoKernels };
constexpr int kStrategies = 4;

// The names that JAX_BNAR_CUDA_STRATEGY takes.
const char* NameOf(Strategy strategy);

// Finds the strategy of that name; false if there is none.
bool FindStrategy(std::string_view name, Strategy* strategy);

struct Settings {
  Strategy strategy = Strategy::kAuto;
  int sm_margin = 0;      // multiprocessors left to other work
  int slab_channels = 0;  // a power of 2 in [8, kMaxColumns]; 0: the planner's
  int teams = 0;          // of kOnChip, at most; 0: the planner's choice
  bool zero_workspace = false;
};

// What the two passes move and keep. Arrays are counted in arrays of x's size,
// so that a bit mask is a sixteenth of one or less.
struct Traffic {
  // That the first pass reads, and that the second pass needs as well.
  int arrays_kept;
  // Further arrays that the first pass reads or writes: what backward reads for
  // the gate, and dz.
  double first;
  // That the second pass reads or writes once: y and z and the mask, or dx.
  double second;
  // That the second pass reads of a tile that was not kept.
  double again;
  // The size of a mask that either pass reads, or that the second one writes;
  // it is also counted in `first` or `second`.
  double mask_read = 0;
  double mask_written = 0;

  // Only what is the same in all forms of a kernel.
  Traffic(int arrays)  // NOLINT(google-explicit-constructor)
      : arrays_kept(arrays), first(0), second(1), again(arrays) {}
};

Traffic ForwardTraffic(DType dtype, bool has_z, bool has_mask, int inputs = 1);
Traffic BackwardTraffic(DType dtype, Gate gate, bool has_dz, int inputs = 1);

struct Plan {
  Strategy strategy;  // never kAuto
  Tiling tiling;
  BlockReduction block_reduction;
  int64_t grid;
  int cluster;  // blocks, or 0
  int64_t shared_bytes;
};

struct CostModel;

// The plan of a whole operation, forward or backward: the one that can lose
// least against the best plan, whichever of the models is right. They are
// PlannedModels() (cost.h) unless they are given.
Plan MakePlan(const Problem& problem, int width, const Traffic& traffic,
              const Device& device, const Settings& settings);
Plan MakePlan(const Problem& problem, int width, const Traffic& traffic,
              const Device& device, const Settings& settings,
              const std::vector<CostModel>& models);

// The plan of one kernel: of the sums of backward, or of an elementwise pass. A
// team goes through the slabs at the same place in all inputs at once. With
// `whole`, the sums stay in the workspace for the elementwise pass, which finds
// them there because its slabs are the same.
Plan PlanReduction(const Problem& problem, int width, const Device& device,
                   bool whole, int inputs = 1);
Plan PlanElementwise(const Problem& problem, int width, const Device& device,
                     int inputs = 1);

// The same of the statistics. A team has a slab of one input at a time.
Plan PlanStatistics(const Problem& problem, int width, const Device& device,
                    int inputs = 1);

Plan PlanFlat(const FlatTiling& tiling);

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_PLAN_H_
