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

// The constants of the model, in microseconds unless stated otherwise. They
// were fitted to what the kernels took on an H200 in bfloat16: 12 sites of
// ResNet-50 at batch 256, 64 and 32, forward and backward, with 3 to 14 plans
// each (benchmarks/results/gpu-plans-h200.json,
// benchmarks/gpu/model/choices.py). `make gpu` measures what it can of them on
// its own (benchmarks/gpu/micro).
struct CostModel {
  // The share of the nominal bandwidth that a copy reaches: 4.1 of 4.8 TB/s.
  double copy_share = 0.855;
  // The share of a copy's rate that these kernels reach while they load into
  // registers, with two blocks on a multiprocessor. What is missing falls as
  // more is in flight, in inverse proportion, as in any queue: copies to shared
  // memory have 40 to 190 KB of it. Stores go beside them: a pass has the rate
  // that its copies give.
  double kernel_share = 0.86;
  // The rate at which memory serves rows of one line, 128 bytes, that lie
  // apart, as a share of that of wider ones. Reading is as fast; what is slow
  // is writing less than 256 bytes at a time.
  double line_share = 0.925;
  // The same for rows of half a line; rows of half the size have this share of
  // that share.
  double narrow_share = 0.62;
  // How long a load from memory takes under load. By Little's law, a device
  // needs this much of its bandwidth in flight.
  double memory_latency = 0.6;
  // The bytes that one block has in flight where it reads vectors: 64 a thread
  // (kInFlight in device/tiles.cuh).
  double bytes_in_flight_per_block = kBytesAtOnce * kThreads;
  // The share of L2 whose contents survive until they are read again. What is
  // never read again (y, z, dx) passes through L2 as well. Lines have 128
  // bytes, so that rows of 64 bytes fill a half of each.
  double share_of_l2 = 0.3;
  // A round in which the blocks of a team wait for each other's sums, from the
  // last load to the first store, apart from what each column adds to it, and
  // each further turn of the blocks that add columns (AddTeamByMessages).
  double barrier = 5.5;
  double barrier_of_column = 0.027;
  double barrier_of_turn = 0.5;
  // The part of it in which the two blocks of a multiprocessor add their sums
  // in double, where double has half the rate of float. Where it has a 64th, as
  // on devices for graphics, this takes 32 times as long.
  double double_sums = 0.5;
  // What the slowest block of a team needs more than the others, as a share of
  // what all of them have done since they last waited: the team waits for it in
  // each round. (Some multiprocessors share their way to L2 with more
  // neighbours, or are farther from the half of it that has the data.)
  double skew = 0.012;
  // What a multiprocessor issues, of four that it could.
  double instructions_per_cycle = 2;
  // The same round in a cluster, with two barriers and loads from the shared
  // memory of other blocks instead of the messages.
  double cluster = 3.8;
  // The start and end of a kernel, of a cooperative one, and the time in which
  // a last block adds up the sums of all others, which have ended.
  double kernel = 2;
  double cooperative_kernel = 3;
  double last_block = 11;
};

// A constant on which the choice of plans depends and that may be anywhere in a
// range, because it was measured on one device.
struct UncertainConstant {
  double CostModel::* constant;
  double least;
  double most;
};
constexpr UncertainConstant kUncertain[] = {{&CostModel::line_share, 0.9, 0.95},
                                            {&CostModel::barrier, 4.5, 6.5},
                                            {&CostModel::skew, 0.01, 0.03}};

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
  double waiting;
  double launching;

  double total() const { return streaming + waiting + launching; }
};

// The cost of both passes: of the kernel that does both, or of the two kernels.
Cost CostOf(const Plan& plan, const Problem& problem, int width,
            const Traffic& traffic, const Device& device,
            const CostModel& model = CostModel());

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_COST_H_
