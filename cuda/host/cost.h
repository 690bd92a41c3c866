// What a plan is expected to take, in the terms that decide between plans: the
// bytes that memory moves, how many of them the blocks request at once, where
// blocks wait, and what is launched. Plain host code, no CUDA.
//
// This is also the model of `python -m benchmarks.gpu.model`.

#ifndef JAX_BNAR_CUDA_HOST_COST_H_
#define JAX_BNAR_CUDA_HOST_COST_H_

#include <cstdint>
#include <vector>

#include "cuda/host/plan.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// The constants of the model, in microseconds unless stated otherwise. None of
// them has been measured with these kernels: they come from the data sheets and
// published copy rates of an H200, and from reviews of the kernels and of their
// machine code. `make gpu` measures what it can of them (benchmarks/gpu/micro).
// Replace a constant by its measurement as soon as there is one; planner and
// model follow.
struct CostModel {
  // The share of the nominal bandwidth that a copy reaches: 4.3 of 4.9 TB/s on
  // an H200.
  double copy_share = 0.875;
  // The share of a copy's rate that these kernels reach while they load into
  // registers, with two blocks on a multiprocessor. What is missing falls as
  // more is in flight, in inverse proportion, as in any queue: copies to shared
  // memory have 48 to 160 KB of it, of which 0.95 to 0.98 follow. Stores go
  // beside them: a pass has the rate that its copies give. (On an H200, the
  // best streaming kernels that others have published reach 0.97.)
  double kernel_share = 0.92;
  // The rate at which memory serves rows of 64 bytes that lie apart, half a
  // line, as a share of that of whole lines; rows of half the size have this
  // share of that share. A page of memory is opened for less, and how much this
  // costs is unknown.
  double narrow_share = 0.95;
  // How long a load from memory takes under load. By Little's law, a device
  // needs this much of its bandwidth in flight.
  double memory_latency = 0.75;
  // The bytes that one block has in flight where it reads vectors: 64 a thread
  // (kInFlight in device/tiles.cuh).
  double bytes_in_flight_per_block = kBytesAtOnce * kThreads;
  // The share of L2 whose contents survive until they are read again. What is
  // never read again (y, z, dx) passes through L2 as well. Lines have 128
  // bytes, so that rows of 64 bytes fill a half of each.
  double share_of_l2 = 0.5;
  // A round in which the blocks of a team wait for each other's sums, from the
  // last load to the first store: 1.5 until a block has its own sums, twice
  // 0.75 until a message that one block writes to L2 has been read by another,
  // and 0.25 for the constants of the elementwise pass. (Scale and bias, or
  // var, come from memory while the first message is under way.)
  double barrier = 3.25;
  // The part of it in which the two blocks of a multiprocessor add their sums
  // in double, where double has half the rate of float. Where it has a 64th, as
  // on devices for graphics, this takes 32 times as long.
  double double_sums = 0.5;
  // What the slowest block of a team needs more than the others for the first
  // pass, as a share of that pass: the team waits for it in each round. (Some
  // multiprocessors share their way to L2 with more neighbours, or are farther
  // from the half of it that has the data.)
  double skew = 0.03;
  // The share of it during which memory idles if two teams, or more, have the
  // device: the others read or write meanwhile. Clusters count as teams.
  double idle_with_two_teams = 0.75;
  double idle_with_more_teams = 0.62;
  // Where tiles are copied, memory serves what other teams have under way while
  // one waits, and the next slab's tiles. At the start and at the end of the
  // launch, there is nothing to serve (`idle_with_two_teams`, once), and this
  // share remains of every other wait. Both are about what a simulation of two
  // blocks gave, which share a memory that serves requests in their order.
  double idle_if_covered = 0.1;
  // What a multiprocessor issues, of four that it could.
  double instructions_per_cycle = 2;
  // What the instructions of the first pass would take for a 16-bit type at one
  // in a cycle, as a share of what memory takes: 40 for 16 bytes. So much of
  // that pass remains if tiles of the slab have come while the blocks waited.
  // Wider elements have fewer instructions for the same bytes.
  double issue_share = 1.25;
  // The same round in a cluster: 1 for two barriers and for reading the shared
  // memory of other blocks, instead of the two messages.
  double cluster = 2.75;
  // The start and end of a kernel, of a cooperative one, and the time in which
  // a last block adds up the sums of all others, which have ended.
  double kernel = 1.5;
  double cooperative_kernel = 3;
  double last_block = 4;
};

// A constant on which the choice of plans depends and that may be anywhere in a
// range.
struct UncertainConstant {
  double CostModel::* constant;
  double least;
  double most;
};
constexpr UncertainConstant kUncertain[] = {
    {&CostModel::narrow_share, 0.8, 1},
    {&CostModel::barrier, 1.5, 5},
    {&CostModel::instructions_per_cycle, 1.5, 2.5}};

// The models for which the planner plans: the constants as they stand, which
// come first, and all combinations of the ends of their ranges.
const std::vector<CostModel>& PlannedModels();

struct Cost {
  double bytes;             // that memory moves
  double bytes_again;       // those of them that are read for the second time
  double bytes_of_sectors;  // those of them that nobody asked for
  double bytes_in_flight;   // of a multiprocessor, on average
  double in_flight;         // while loading, as a share of what memory needs
  double busy;              // the share of multiprocessors that have a block
  int64_t rounds;           // the slabs that a team takes one after the other
  double streaming;         // microseconds
  double ahead;             // of them, those in which blocks wait
  double waiting;
  double launching;

  double total() const { return streaming + waiting + launching; }
};

// The rate at which these kernels stream if two blocks on each multiprocessor
// load into registers, in bytes a microsecond.
double StreamingRate(const Device& device, const CostModel& model);

// The cost of both passes: of the kernel that does both, or of the two kernels.
Cost CostOf(const Plan& plan, const Problem& problem, int width,
            const Traffic& traffic, const Device& device,
            const CostModel& model = CostModel());

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_COST_H_
