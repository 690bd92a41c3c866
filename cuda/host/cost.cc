#include "cuda/host/cost.h"

#include <algorithm>
#include <iterator>

#include "cuda/host/tiling.h"

namespace jax_bnar {
namespace cuda {
namespace {

// The nominal bandwidth of an H200, divided among its multiprocessors: what is
// assumed of a device that does not report its own.
constexpr double kNominalBytesPerMicrosecond = 4814e3 / 132;

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
  if (plan.cluster <= 1) return blocks;
  // The blocks of a cluster share one part of the device. Where the parts are
  // of unequal size, one of eight may be too small.
  return std::max<int64_t>(1, blocks * 7 / 8 / plan.cluster) * plan.cluster;
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

// The bytes of a slab that lie together in memory, at most two lines.
int64_t PieceBytes(const Problem& problem, const Tiling& t) {
  if (t.layout == Layout::kChannelsFirst || t.slabs_per_group.value == 1) {
    return 2 * kLineBytes;
  }
  return std::min(2 * kLineBytes, t.columns * ItemSize(problem.dtype));
}

// The rate at which memory serves pieces of so many bytes, as a share of that
// for two lines.
double PieceShare(int64_t piece, const CostModel& model) {
  if (piece > kLineBytes) return 1;
  if (piece == kLineBytes) return model.line_share;
  double share = 1;
  for (; piece < kLineBytes; piece *= 2) share *= model.narrow_share;
  return share;
}

// What adding in double takes more than where double has half the rate of
// float.
double SlowDoubles(const Device& device, const CostModel& model) {
  return model.double_sums *
         std::max(0.0, device.single_to_double_ratio / 2 - 1);
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

// How many tiles of a block are under way as copies, on average, in each pass.
struct CopiesUnderWay {
  double first = 0;
  double second = 0;
};

// The tiles of a block that do not stay on chip. Where they are copied, those
// that stay are the last stages, one of which may have empty slots.
int64_t TilesAgain(const Plan& plan, int width, int64_t tile_bytes) {
  const int stage = TilesOfStage(width, tile_bytes);
  return std::max<int64_t>(0, RoundUp(plan.tiling.tiles_per_block, stage) -
                                  plan.tiling.shared_tiles);
}

// In the first pass, a copy has been started as many tiles before its use as
// there are slots, or when the pass began. In the second one, what was not kept
// is copied again into slots whose tiles have been used. While slots are filled
// anew, threads wait for one stage after the other, use it, and start as many
// copies (TileStream in device/tile_stream.cuh).
CopiesUnderWay UnderWay(const Plan& plan, int64_t tile_bytes) {
  const Tiling& t = plan.tiling;
  const int64_t tiles = std::max<int64_t>(1, t.tiles_per_block);
  const auto all = static_cast<double>(tiles);
  // Copies of all tiles begin at once.
  if (t.shared_tiles >= tiles) return {all / 2, 0};
  const int stage = TilesOfStage(kWidth, tile_bytes);
  const auto most = static_cast<double>(std::min<int64_t>(
      tiles, (GroupsLeft(t.shared_tiles / stage - 1) + 1) * stage));
  const double again =
      static_cast<double>(TilesAgain(plan, kWidth, tile_bytes)) / all;
  return {most - most * most / (2 * all), again * most};
}

// How long the blocks of a team wait for each other's sums, apart from the
// slowest of them.
double BarrierTime(const Tiling& t, const CostModel& model) {
  const int32_t parts = PowerOfTwoAtLeast(t.team, kThreads);
  const int64_t at_once = int64_t{t.team} * (kThreads / parts);
  const int64_t turns = CeilDivide(t.columns, at_once);
  return model.barrier + model.barrier_of_column * t.columns +
         model.barrier_of_turn * static_cast<double>(turns - 1);
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

std::vector<CostModel> MakePlannedModels() {
  std::vector<CostModel> models = {CostModel()};
  constexpr size_t kEnds = size_t{1} << std::size(kUncertain);
  for (size_t ends = 0; ends < kEnds; ++ends) {
    CostModel model;
    for (size_t i = 0; i < std::size(kUncertain); ++i) {
      const UncertainConstant& one = kUncertain[i];
      model.*one.constant = (ends >> i & 1) != 0 ? one.most : one.least;
    }
    models.push_back(model);
  }
  return models;
}

}  // namespace

const std::vector<CostModel>& PlannedModels() {
  static const auto* models = new std::vector<CostModel>(MakePlannedModels());
  return *models;
}

Cost CostOf(const Plan& plan, const Problem& problem, int width,
            const Traffic& traffic, const Device& device,
            const CostModel& model) {
  const Tiling& t = plan.tiling;
  const double array =
      static_cast<double>(problem.shape.groups * problem.shape.group_size() *
                          ItemSize(problem.dtype));
  const int64_t piece = PieceBytes(problem, t);
  const double in_l2 =
      model.share_of_l2 * static_cast<double>(device.l2_bytes) *
      static_cast<double>(std::min(piece, kLineBytes)) / kLineBytes;
  const bool two_kernels = plan.strategy == Strategy::kTwoKernels;
  Cost cost{};
  cost.rounds = two_kernels ? 1 : CeilDivide(t.num_slabs, t.num_teams);

  const int64_t tile_bytes = TileBytes(problem, width, traffic.arrays_kept);
  // What no block keeps waits in L2 until the second pass, for all blocks that
  // run at the same time. (Blocks that are teams of their own may be more.)
  const int64_t at_once = std::min(plan.grid, BlocksAtOnce(plan, device));
  const int64_t turns =
      two_kernels ? 1 : cost.rounds * CeilDivide(plan.grid, at_once);
  double waits = traffic.again * array;
  if (!two_kernels) {
    waits = static_cast<double>(TilesAgain(plan, width, tile_bytes) * at_once *
                                TileBytes(problem, width, 1)) *
            traffic.again;
  }
  cost.bytes_again =
      std::min(static_cast<double>(turns) * std::max(0.0, waits - in_l2),
               traffic.again * array);
  cost.bytes_of_sectors =
      two_kernels ? 0 : MaskSectors(t, cost.rounds, traffic) * array;
  cost.bytes = (traffic.arrays_kept + traffic.first + traffic.second) * array +
               cost.bytes_again + cost.bytes_of_sectors;

  // A wave of blocks that is not full counts as if it were as long as the
  // others.
  const double waves =
      static_cast<double>(CeilDivide(plan.grid, BlocksAtOnce(plan, device)));
  const double copy_rate = NominalRate(device) * model.copy_share;
  const double needed =
      copy_rate * model.memory_latency / device.multiprocessors;
  const double piece_share = PieceShare(piece, model);
  const double rate = copy_rate * piece_share;
  const double blocks = static_cast<double>(plan.grid) / waves;
  const Spread spread(blocks, device);
  // In the last round there may be fewer slabs than teams.
  const int64_t last_teams =
      two_kernels ? t.num_teams : t.num_slabs - (cost.rounds - 1) * t.num_teams;
  const double last_share =
      static_cast<double>(last_teams) / static_cast<double>(t.num_slabs);
  const Spread last_spread(
      blocks * static_cast<double>(last_teams) / t.num_teams, device);
  cost.busy = spread.once + spread.twice;

  // Copies to shared memory bring the tiles, in both passes.
  const bool copies = !two_kernels && width > 1;
  const double loading = InFlightPerBlock(problem, width, model);
  const CopiesUnderWay under_way =
      copies ? UnderWay(plan, tile_bytes) : CopiesUnderWay();
  const auto in_flight = [&](double copied_tiles) {
    return std::max(loading, copied_tiles * static_cast<double>(tile_bytes));
  };
  const double first_bytes = (traffic.arrays_kept + traffic.first) * array;
  const double second_bytes = cost.bytes - first_bytes;
  const double first = in_flight(under_way.first);
  const double second = in_flight(under_way.second);
  const auto time = [&](double bytes, double in_flight) {
    return bytes / rate *
           ((1 - last_share) / RateShare(spread, in_flight, needed, model) +
            last_share / RateShare(last_spread, in_flight, needed, model));
  };
  const double first_time = time(first_bytes, first);
  const double second_time = time(second_bytes, second);
  cost.streaming = first_time + second_time;
  cost.in_flight = spread.once * std::min(1.0, loading / needed) +
                   spread.twice * std::min(1.0, 2 * loading / needed);
  cost.bytes_in_flight = (spread.once + 2 * spread.twice) *
                         (first * first_bytes + second * second_bytes) /
                         cost.bytes;
  // A team waits in each of so many rounds or turns, at the end of which its
  // slowest block is late by a share of what all have done since the last wait.
  const double doubles = SlowDoubles(device, model);
  const auto wait = [&](double barrier, int64_t rounds) {
    const auto times = static_cast<double>(rounds);
    return times * (barrier + doubles) +
           model.skew * (cost.streaming - second_time / times);
  };
  cost.launching = model.kernel;
  if (two_kernels) {
    cost.launching = 2 * model.kernel;
    cost.waiting = model.last_block + doubles;
  } else if (plan.block_reduction == BlockReduction::kBarrier) {
    cost.launching = model.cooperative_kernel;
    cost.waiting = wait(BarrierTime(t, model), cost.rounds);
  } else if (plan.block_reduction == BlockReduction::kCluster) {
    cost.waiting = wait(model.cluster, static_cast<int64_t>(waves));
  } else {
    cost.waiting = doubles * waves;
  }
  return cost;
}

}  // namespace cuda
}  // namespace jax_bnar
