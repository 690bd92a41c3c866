#include "cuda/host/cost.h"

#include <algorithm>

#include "cuda/host/tiling.h"

namespace jax_bnar {
namespace cuda {
namespace {

// Blocks that are on the device at once.
int64_t BlocksAtOnce(const Plan& plan, const Device& device) {
  const bool two =
      kBlocksPerMultiprocessor *
          (plan.shared_bytes + device.reserved_shared_bytes_per_block) <=
      device.shared_bytes_per_multiprocessor;
  const int64_t blocks =
      device.multiprocessors * int64_t{two ? kBlocksPerMultiprocessor : 1};
  return plan.cluster > 1
             ? std::max<int64_t>(1, blocks / plan.cluster) * plan.cluster
             : blocks;
}

// The mean over multiprocessors of what their blocks have under way, as a share
// of what memory needs. Blocks spread before a multiprocessor gets a second
// one.
double InFlight(double blocks, const Device& device, const CostModel& model) {
  const double one =
      std::min(1.0, model.bytes_in_flight_per_block / model.bytes_in_flight);
  const double two = std::min(
      1.0, 2 * model.bytes_in_flight_per_block / model.bytes_in_flight);
  const double all = device.multiprocessors;
  const double twice = std::clamp(blocks - all, 0.0, all);
  const double once = std::min(blocks, all) - twice;
  return (once * one + twice * two) / all;
}

}  // namespace

Cost CostOf(const Plan& plan, const Problem& problem, int width,
            int arrays_kept, const Device& device, const CostModel& model) {
  const Tiling& t = plan.tiling;
  const double array =
      static_cast<double>(problem.shape.groups * problem.shape.group_size() *
                          ItemSize(problem.dtype));
  const double in_l2 = model.share_of_l2 * static_cast<double>(device.l2_bytes);
  const bool two_kernels = plan.strategy == Strategy::kTwoKernels;
  Cost cost{};
  cost.rounds = two_kernels ? 1 : CeilDivide(t.num_slabs, t.num_teams);

  // What no block keeps waits in L2 until the second pass, for all teams at
  // once.
  double waits = arrays_kept * array;
  if (!two_kernels) {
    const int64_t left =
        std::max<int64_t>(0, TilesPerBlock(t) - t.shared_tiles);
    waits = static_cast<double>(left * t.team) * t.num_teams * kThreads *
            width * ItemSize(problem.dtype) * arrays_kept;
  }
  cost.bytes_again =
      std::min(static_cast<double>(cost.rounds) * std::max(0.0, waits - in_l2),
               arrays_kept * array);
  cost.bytes = (arrays_kept + 1) * array + cost.bytes_again;

  // A wave of blocks that is not full counts as if it were as long as the
  // others.
  const double waves =
      static_cast<double>(CeilDivide(plan.grid, BlocksAtOnce(plan, device)));
  cost.in_flight =
      InFlight(static_cast<double>(plan.grid) / waves, device, model);
  cost.streaming = cost.bytes / (model.bytes_per_microsecond *
                                 device.multiprocessors * cost.in_flight);
  cost.launching = model.kernel;
  if (two_kernels) {
    cost.launching = 2 * model.kernel + model.zeroing;
    cost.waiting = model.last_block;
  } else if (plan.block_reduction == BlockReduction::kBarrier) {
    cost.launching += model.zeroing;
    cost.waiting = static_cast<double>(cost.rounds) * model.barrier;
  } else if (plan.block_reduction == BlockReduction::kCluster) {
    cost.waiting = waves * model.cluster;
  }
  return cost;
}

}  // namespace cuda
}  // namespace jax_bnar
