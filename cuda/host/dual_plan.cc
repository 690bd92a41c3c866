#include "cuda/host/dual_plan.h"

#include "cuda/host/tiling.h"

namespace jax_bnar {
namespace cuda {
namespace {

// Counts the slabs of x2 as well. The grid stays what it was, unless the
// workspace has no room for the sums of both from so many blocks.
Plan ForBoth(Plan plan) {
  Tiling& tiling = plan.tiling;
  tiling.num_slabs *= 2;
  if (tiling.team > LargestTeam(tiling)) {
    SetTeam(tiling.team, &tiling);
    plan.grid = static_cast<int64_t>(tiling.num_teams) * tiling.team;
    if (tiling.team == 1) plan.block_reduction = BlockReduction::kSingleBlock;
  }
  plan.shared_bytes += kSecondSharedBytes;
  return plan;
}

}  // namespace

Traffic DualForwardTraffic(DType dtype, bool has_mask) {
  Traffic traffic = ForwardTraffic(dtype, /*has_z=*/false, has_mask);
  traffic.arrays_kept += 1;
  traffic.again += 1;
  return traffic;
}

Traffic DualBackwardTraffic(DType dtype, Gate gate) {
  Traffic traffic = BackwardTraffic(dtype, gate, /*has_dz=*/false);
  traffic.arrays_kept += 1;
  traffic.again += 1;
  traffic.second += 1;  // dx2
  return traffic;
}

Plan PlanDualStatistics(const Problem& problem, int width, const Device& device,
                        const Settings& settings) {
  // They are cut like one input with twice as many groups.
  Problem both = problem;
  both.shape.groups *= 2;
  Plan plan = PlanReduction(both, width, device, settings);
  plan.tiling.shape = problem.shape;
  return plan;
}

Plan PlanDualReduction(const Problem& problem, int width, const Device& device,
                       const Settings& settings) {
  return ForBoth(PlanReduction(problem, width, device, settings));
}

Plan PlanDualElementwise(const Problem& problem, int width,
                         const Device& device, const Settings& settings) {
  return ForBoth(PlanElementwise(problem, width, device, settings));
}

}  // namespace cuda
}  // namespace jax_bnar
