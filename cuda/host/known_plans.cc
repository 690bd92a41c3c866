#include "cuda/host/known_plans.h"

#include <map>
#include <mutex>
#include <tuple>

namespace jax_bnar {
namespace cuda {
namespace {

// Everything that MakePlan looks at. (Whether the workspace is zeroed changes
// no plan.)
auto KeyOf(const Problem& problem, int width, const Traffic& traffic,
           const Device& device, const Settings& settings) {
  const Shape& shape = problem.shape;
  return std::make_tuple(
      shape.groups, shape.rows, shape.channels, shape.inner, problem.dtype,
      problem.mask_channels, width, traffic.arrays_kept, traffic.first,
      traffic.second, traffic.again, traffic.mask_read, traffic.mask_written,
      device.multiprocessors, device.shared_bytes_per_multiprocessor,
      device.shared_bytes_per_block, device.reserved_shared_bytes_per_block,
      device.l2_bytes, device.cooperative, device.clusters,
      device.memory_bytes_per_microsecond, device.single_to_double_ratio,
      settings.strategy, settings.sm_margin, settings.slab_channels,
      settings.teams);
}

using Key = decltype(KeyOf({}, 0, 0, {}, {}));

struct Plans {
  std::mutex mutex;
  std::map<Key, Plan> by_key;
};

Plans& GetPlans() {
  static auto* plans = new Plans;
  return *plans;
}

}  // namespace

Plan KnownPlan(const Problem& problem, int width, const Traffic& traffic,
               const Device& device, const Settings& settings) {
  const Key key = KeyOf(problem, width, traffic, device, settings);
  Plans& plans = GetPlans();
  const std::lock_guard<std::mutex> lock(plans.mutex);
  const auto found = plans.by_key.find(key);
  if (found != plans.by_key.end()) return found->second;
  const Plan plan = MakePlan(problem, width, traffic, device, settings);
  plans.by_key.emplace(key, plan);
  return plan;
}

}  // namespace cuda
}  // namespace jax_bnar
