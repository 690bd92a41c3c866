#include "cuda/host/cost.h"

#include <algorithm>

#include "cuda/host/tiling.h"

namespace jax_bnar {
namespace cuda {
namespace {

// The nominal bandwidth of an H200, divided among its multiprocessors: what is
// assumed of a device that does not report its own.
constexpr double kNominalBytesPerMicrosecond = 4917e3 / 132;

double NominalRate(const Device& device) {
  return device.memory_bytes_per_microsecond > 0
             ? device.memory_bytes_per_microsecond
             : kNominalBytesPerMicrosecond * device.multiprocessors;
}

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

// Where threads read single elements, each has at most eight of them in flight.
double InFlightPerBlock(const Problem& problem, int width,
                        const CostModel& model) {
  return width > 1 ? model.bytes_in_flight_per_block
                   : std::min<double>(
                         model.bytes_in_flight_per_block,
                         8.0 * kThreads *
                             static_cast<double>(ItemSize(problem.dtype)));
}

// Fills in how much is in flight while `blocks` blocks are on the device. They
// spread over all multiprocessors before one of these gets a second block.
void SetInFlight(double blocks, double per_block, double needed,
                 const Device& device, Cost* cost) {
  const double all = device.multiprocessors;
  const double twice = std::clamp(blocks - all, 0.0, all);
  const double once = std::min(blocks, all) - twice;
  cost->bytes_in_flight = (once + 2 * twice) * per_block / all;
  cost->in_flight = (once * std::min(1.0, per_block / needed) +
                     twice * std::min(1.0, 2 * per_block / needed)) /
                    all;
}

// What a mask costs beyond its own bytes, in arrays. Memory moves sectors of 32
// bytes. Where the teams that work at the same time have fewer channels than a
// sector of the mask, it is read once for each of them, or read and written for
// each of them.
double MaskSectors(const Tiling& t, int64_t rounds, const Traffic& traffic) {
  constexpr int64_t kBitsOfSector = 256;
  if (rounds == 1 || t.layout == Layout::kChannelsFirst) return 0;
  const int64_t of_sector = std::min(kBitsOfSector, t.mask_channels);
  const int64_t at_once = int64_t{t.columns} * t.num_teams;
  const double times = static_cast<double>(of_sector) /
                       static_cast<double>(std::min(of_sector, at_once));
  if (times <= 1) return 0;
  return (times - 1) * traffic.mask_read +
         (2 * times - 1) * traffic.mask_written;
}

// The share of a round's waiting during which memory idles. Teams that have a
// single slab each begin at the same time, and wait at the same time.
double IdleShare(int32_t num_teams, int64_t rounds, const CostModel& model) {
  return num_teams == 1 || rounds == 1 ? 1
         : num_teams == 2              ? model.idle_with_two_teams
                                       : model.idle_with_more_teams;
}

}  // namespace

double StreamingRate(const Device& device, const CostModel& model) {
  return NominalRate(device) * model.copy_share * model.kernel_share;
}

Cost CostOf(const Plan& plan, const Problem& problem, int width,
            const Traffic& traffic, const Device& device,
            const CostModel& model) {
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
  double waits = traffic.again * array;
  if (!two_kernels) {
    const int64_t left =
        std::max<int64_t>(0, TilesPerBlock(t) - TilesKept(plan));
    waits = static_cast<double>(left * t.team) * t.num_teams * kThreads *
            width * static_cast<double>(ItemSize(problem.dtype)) *
            traffic.again;
  }
  cost.bytes_again =
      std::min(static_cast<double>(cost.rounds) * std::max(0.0, waits - in_l2),
               traffic.again * array);
  cost.bytes_of_sectors =
      two_kernels ? 0 : MaskSectors(t, cost.rounds, traffic) * array;
  cost.bytes = (traffic.arrays_kept + traffic.first + traffic.second) * array +
               cost.bytes_again + cost.bytes_of_sectors;

  // A wave of blocks that is not full counts as if it were as long as the
  // others.
  const double waves =
      static_cast<double>(CeilDivide(plan.grid, BlocksAtOnce(plan, device)));
  const double needed = NominalRate(device) * model.copy_share *
                        model.memory_latency / device.multiprocessors;
  SetInFlight(static_cast<double>(plan.grid) / waves,
              InFlightPerBlock(problem, width, model), needed, device, &cost);
  cost.streaming = cost.bytes / (StreamingRate(device, model) * cost.in_flight);
  cost.launching = model.kernel;
  if (two_kernels) {
    cost.launching = 2 * model.kernel;
    cost.waiting = model.last_block;
  } else if (plan.block_reduction == BlockReduction::kBarrier) {
    cost.waiting = static_cast<double>(cost.rounds) * model.barrier *
                   IdleShare(t.num_teams, cost.rounds, model);
  } else if (plan.block_reduction == BlockReduction::kCluster) {
    cost.waiting = waves * model.cluster *
                   IdleShare(t.num_teams, static_cast<int64_t>(waves), model);
  }
  return cost;
}

}  // namespace cuda
}  // namespace jax_bnar
