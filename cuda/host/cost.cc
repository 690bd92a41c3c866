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

// Where the blocks of a launch are. They spread over all multiprocessors before
// one of these gets a second block.
struct Spread {
  double once;   // the share of multiprocessors that have one block
  double twice;  // ... two blocks

  Spread(double blocks, const Device& device) {
    const double all = device.multiprocessors;
    twice = std::clamp(blocks - all, 0.0, all) / all;
    once = std::min(blocks, all) / all - twice;
  }
};

// The share of a copy's rate at which memory works if each block has
// `per_block` bytes in flight. By Little's law it needs `needed` of each
// multiprocessor.
double RateShare(const Spread& spread, double per_block, double needed,
                 const CostModel& model) {
  const double usual =
      kBlocksPerMultiprocessor * model.bytes_in_flight_per_block;
  const auto share = [&](double bytes) {
    return std::min(1.0, bytes / needed) *
           (1 - (1 - model.kernel_share) * std::min(1.0, usual / bytes));
  };
  return spread.once * share(per_block) + spread.twice * share(2 * per_block);
}

// The share of a round's waiting during which memory idles. Teams that have a
// single slab each begin at the same time, and wait at the same time.
double IdleShare(int64_t num_teams, int64_t rounds, const CostModel& model) {
  return num_teams == 1 || rounds == 1 ? 1
         : num_teams == 2              ? model.idle_with_two_teams
                                       : model.idle_with_more_teams;
}

// Teams, or clusters, that are on the device at the same time and take slabs in
// turn.
struct Teams {
  int64_t number;
  int64_t rounds;
  bool all_copied;  // Copies bring all tiles.
};

// The microseconds in which memory idles while the blocks of a team wait for
// each other, `wait` in each round. `own` is how long memory is busy with the
// next slab's tiles of a team that waits, and `slab` how long with a slab.
double IdleTime(const Teams& teams, double wait, double own, double slab,
                const CostModel& model) {
  const double least = model.idle_if_covered * wait;
  const auto rounds = static_cast<double>(teams.rounds);
  if (teams.all_copied && teams.number > 1) {
    const double others = static_cast<double>(teams.number - 1) * slab;
    return model.idle_with_two_teams * wait +
           rounds * std::max(least, wait - own - others);
  }
  const double share = IdleShare(teams.number, teams.rounds, model);
  return rounds * std::max(least, wait * share - own);
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
  const double rate = NominalRate(device) * model.copy_share;
  const double needed = rate * model.memory_latency / device.multiprocessors;
  const Spread spread(static_cast<double>(plan.grid) / waves, device);
  cost.busy = spread.once + spread.twice;

  // Copies to shared memory bring the tiles that are kept. A block has all of
  // them in flight at first, and none at last.
  const bool copies = !two_kernels && width > 1;
  const double tiles =
      static_cast<double>(std::max<int64_t>(1, TilesPerBlock(t)));
  const double tile_bytes = static_cast<double>(
      traffic.arrays_kept * kThreads * width * ItemSize(problem.dtype));
  const double copied_share = copies ? t.shared_tiles / tiles : 0;
  const double copied = copied_share * traffic.arrays_kept * array;
  const double loading = InFlightPerBlock(problem, width, model);
  const double copying = std::max(loading, t.shared_tiles * tile_bytes / 2);
  cost.streaming = copied / (rate * RateShare(spread, copying, needed, model)) +
                   (cost.bytes - copied) /
                       (rate * RateShare(spread, loading, needed, model));
  cost.in_flight = spread.once * std::min(1.0, loading / needed) +
                   spread.twice * std::min(1.0, 2 * loading / needed);
  cost.bytes_in_flight = (spread.once + 2 * spread.twice) *
                         (loading + (copying - loading) * copied / cost.bytes);
  const bool all_copied = copies && t.shared_tiles >= TilesPerBlock(t);
  const double slab = cost.streaming / static_cast<double>(t.num_slabs);
  cost.launching = model.kernel;
  if (two_kernels) {
    cost.launching = 2 * model.kernel;
    cost.waiting = model.last_block;
  } else if (plan.block_reduction == BlockReduction::kBarrier) {
    const double own =
        t.prefetch_tiles * tile_bytes * t.team / StreamingRate(device, model);
    cost.ahead = own * static_cast<double>(t.num_slabs - t.num_teams);
    cost.waiting = IdleTime({t.num_teams, cost.rounds, all_copied},
                            model.barrier, own, slab, model);
  } else if (plan.block_reduction == BlockReduction::kCluster) {
    const auto turns = static_cast<int64_t>(waves);
    cost.waiting = IdleTime({CeilDivide(t.num_teams, turns), turns, all_copied},
                            model.cluster, 0, slab, model);
  }
  return cost;
}

}  // namespace cuda
}  // namespace jax_bnar
