#include "python_module/cuda_planner.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/host/cost.h"
#include "cuda/host/plan.h"
#include "cuda/host/tiling.h"

namespace nb = nanobind;

namespace jax_bnar {
namespace {

using Numbers = std::map<std::string, double>;

// The members of a struct by the names that Python uses.
constexpr std::pair<const char*, double cuda::CostModel::*> kCostModel[] = {
    {"copy_share", &cuda::CostModel::copy_share},
    {"kernel_share", &cuda::CostModel::kernel_share},
    {"line_share", &cuda::CostModel::line_share},
    {"narrow_share", &cuda::CostModel::narrow_share},
    {"memory_latency", &cuda::CostModel::memory_latency},
    {"bytes_in_flight_per_block", &cuda::CostModel::bytes_in_flight_per_block},
    {"share_of_l2", &cuda::CostModel::share_of_l2},
    {"barrier", &cuda::CostModel::barrier},
    {"barrier_of_column", &cuda::CostModel::barrier_of_column},
    {"barrier_of_turn", &cuda::CostModel::barrier_of_turn},
    {"double_sums", &cuda::CostModel::double_sums},
    {"skew", &cuda::CostModel::skew},
    {"instructions_per_cycle", &cuda::CostModel::instructions_per_cycle},
    {"cluster", &cuda::CostModel::cluster},
    {"kernel", &cuda::CostModel::kernel},
    {"cooperative_kernel", &cuda::CostModel::cooperative_kernel},
    {"last_block", &cuda::CostModel::last_block}};
constexpr std::pair<const char*, double cuda::Traffic::*> kTraffic[] = {
    {"first", &cuda::Traffic::first},
    {"second", &cuda::Traffic::second},
    {"again", &cuda::Traffic::again},
    {"mask_read", &cuda::Traffic::mask_read},
    {"mask_written", &cuda::Traffic::mask_written}};

template <typename Struct, size_t kSize>
Numbers ToNumbers(
    const Struct& from,
    const std::pair<const char*, double Struct::*> (&members)[kSize]) {
  Numbers numbers;
  for (const auto& [name, member] : members) numbers[name] = from.*member;
  return numbers;
}

template <typename Struct, size_t kSize>
void Assign(const Numbers& numbers,
            const std::pair<const char*, double Struct::*> (&members)[kSize],
            Struct* to) {
  // Clang before 16 does not let a lambda capture a structured binding.
  for (const auto& number : numbers) {
    const std::string& name = number.first;
    const auto* member =
        std::find_if(std::begin(members), std::end(members),
                     [&](const auto& pair) { return name == pair.first; });
    if (member == std::end(members)) {
      throw nb::key_error(name.c_str());
    }
    to->*(member->second) = number.second;
  }
}

template <typename T, size_t kSize>
T Find(const std::string& name,
       const std::pair<const char*, T> (&values)[kSize]) {
  for (const auto& [key, value] : values) {
    if (name == key) return value;
  }
  throw nb::value_error(("unknown name: " + name).c_str());
}

DType DTypeOf(const std::string& name) {
  return Find<DType>(name, {{"float16", DType::kFloat16},
                            {"bfloat16", DType::kBFloat16},
                            {"float32", DType::kFloat32},
                            {"float64", DType::kFloat64}});
}

Gate GateOf(const std::string& name) {
  return Find<Gate>(name, {{"none", Gate::kNone},
                           {"x", Gate::kX},
                           {"y", Gate::kY},
                           {"mask", Gate::kMask}});
}

Numbers TrafficOf(const cuda::Traffic& traffic) {
  Numbers numbers = ToNumbers(traffic, kTraffic);
  numbers["arrays_kept"] = traffic.arrays_kept;
  return numbers;
}

// Removes a required entry, and returns its value.
double Pop(const char* name, Numbers* numbers) {
  const auto found = numbers->find(name);
  if (found == numbers->end()) throw nb::key_error(name);
  const double value = found->second;
  numbers->erase(found);
  return value;
}

cuda::Traffic TrafficFrom(Numbers numbers) {
  cuda::Traffic traffic = static_cast<int>(Pop("arrays_kept", &numbers));
  Assign(numbers, kTraffic, &traffic);
  return traffic;
}

cuda::CostModel CostModelFrom(const Numbers& numbers) {
  cuda::CostModel model;
  Assign(numbers, kCostModel, &model);
  return model;
}

cuda::Device DeviceFrom(Numbers numbers) {
  const auto pop = [&](const char* name) { return Pop(name, &numbers); };
  const auto whole = [&](const char* name) {
    return static_cast<int64_t>(pop(name));
  };
  cuda::Device device{};
  device.multiprocessors = static_cast<int>(whole("multiprocessors"));
  device.shared_bytes_per_multiprocessor =
      whole("shared_bytes_per_multiprocessor");
  device.shared_bytes_per_block = whole("shared_bytes_per_block");
  device.reserved_shared_bytes_per_block =
      whole("reserved_shared_bytes_per_block");
  device.l2_bytes = whole("l2_bytes");
  device.cooperative = pop("cooperative") != 0;
  device.clusters = pop("clusters") != 0;
  device.memory_bytes_per_microsecond = pop("memory_bytes_per_microsecond");
  device.single_to_double_ratio = pop("single_to_double_ratio");
  return device;
}

nb::dict ToDict(const cuda::Plan& plan, const cuda::Cost& cost, int width) {
  const cuda::Tiling& t = plan.tiling;
  nb::dict dict;
  dict["strategy"] = cuda::NameOf(plan.strategy);
  dict["width"] = width;
  dict["slab_channels"] = t.columns;
  dict["slabs"] = t.num_slabs;
  dict["team"] = t.team;
  dict["teams"] = t.num_teams;
  dict["grid"] = plan.grid;
  dict["cluster"] = plan.cluster;
  dict["shared_bytes"] = plan.shared_bytes;
  dict["tiles"] = t.tiles_per_block;
  dict["tiles_kept"] = t.shared_tiles;
  dict["bytes"] = cost.bytes;
  dict["bytes_again"] = cost.bytes_again;
  dict["bytes_of_sectors"] = cost.bytes_of_sectors;
  dict["bytes_in_flight"] = cost.bytes_in_flight;
  dict["busy"] = cost.busy;
  dict["rounds"] = cost.rounds;
  dict["streaming_us"] = cost.streaming;
  dict["waiting_us"] = cost.waiting;
  dict["launching_us"] = cost.launching;
  return dict;
}

nb::dict PlanOf(
    const std::tuple<int64_t, int64_t, int64_t, int64_t>& canonical_shape,
    const std::string& dtype, const Numbers& traffic, const Numbers& device,
    const Numbers& cost_model, const std::vector<Numbers>& planned_for,
    const std::string& strategy, int slab_channels, int teams, int sm_margin) {
  const auto& [groups, rows, channels, inner] = canonical_shape;
  if (std::min({groups, rows, channels, inner}) < 1) {
    throw nb::value_error("every size must be at least 1");
  }
  Problem problem{{groups, rows, channels, inner}, DTypeOf(dtype)};
  problem.mask_channels = cuda::MaskChannels(problem.shape);
  const cuda::Traffic moved = TrafficFrom(traffic);
  const cuda::Device on = DeviceFrom(device);
  const cuda::CostModel model = CostModelFrom(cost_model);
  std::vector<cuda::CostModel> models;
  for (const Numbers& one : planned_for) models.push_back(CostModelFrom(one));
  if (models.empty()) throw nb::value_error("planned_for must not be empty");
  cuda::Settings settings;
  settings.slab_channels = slab_channels;
  settings.teams = teams;
  settings.sm_margin = sm_margin;
  if (!cuda::FindStrategy(strategy, &settings.strategy)) {
    throw nb::value_error(("unknown strategy: " + strategy).c_str());
  }
  const int width = cuda::WidthOf(problem, /*aligned=*/true);
  const cuda::Plan plan =
      cuda::MakePlan(problem, width, moved, on, settings, models);
  return ToDict(plan, cuda::CostOf(plan, problem, width, moved, on, model),
                width);
}

}  // namespace

void AddCudaPlanner(nb::module_& m) {
  m.def(
      "cuda_cost_model",
      [] { return ToNumbers(cuda::CostModel(), kCostModel); },
      "The constants of cuda/host/cost.h, by name.");
  m.def(
      "cuda_planned_models",
      [] {
        std::vector<Numbers> models;
        for (const cuda::CostModel& model : cuda::PlannedModels()) {
          models.push_back(ToNumbers(model, kCostModel));
        }
        return models;
      },
      "The cost models for which the kernels are planned.");
  m.def(
      "cuda_cost_ranges",
      [] {
        std::map<std::string, std::tuple<double, double>> ranges;
        for (const cuda::UncertainConstant& one : cuda::kUncertain) {
          for (const auto& [name, member] : kCostModel) {
            if (member == one.constant) ranges[name] = {one.least, one.most};
          }
        }
        return ranges;
      },
      "The ranges of the uncertain constants of the cost model, by name.");
  m.def(
      "cuda_forward_traffic",
      [](const std::string& dtype, bool has_z, bool has_mask, int inputs) {
        return TrafficOf(
            cuda::ForwardTraffic(DTypeOf(dtype), has_z, has_mask, inputs));
      },
      nb::arg("dtype"), nb::arg("has_z"), nb::arg("has_mask"),
      nb::arg("inputs") = 1, "What forward moves, in arrays of x's size.");
  m.def(
      "cuda_backward_traffic",
      [](const std::string& dtype, const std::string& gate, bool has_dz,
         int inputs) {
        return TrafficOf(cuda::BackwardTraffic(DTypeOf(dtype), GateOf(gate),
                                               has_dz, inputs));
      },
      nb::arg("dtype"), nb::arg("gate"), nb::arg("has_dz"),
      nb::arg("inputs") = 1, "What backward moves, in arrays of x's size.");
  m.def("cuda_plan", &PlanOf, nb::arg("canonical_shape"), nb::arg("dtype"),
        nb::arg("traffic"), nb::arg("device"), nb::arg("cost_model"),
        nb::arg("planned_for"), nb::arg("strategy") = "auto",
        nb::arg("slab_channels") = 0, nb::arg("teams") = 0,
        nb::arg("sm_margin") = 0,
        "The plan that loses least on a device with these attributes if one of "
        "the cost models planned_for is right, and what it costs if cost_model "
        "is. A strategy that the device lacks gives way, as on the device.");
}

}  // namespace jax_bnar
