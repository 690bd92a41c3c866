// What a plan is expected to take, in the terms that decide between plans: what
// memory moves, how much of it the blocks can ask for at once, where blocks
// wait, what is launched. Plain host code, no CUDA.

#ifndef JAX_BNAR_CUDA_HOST_COST_H_
#define JAX_BNAR_CUDA_HOST_COST_H_

#include <cstdint>

#include "cuda/host/plan.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// Of an H200, from its copy rate and from what the review of the kernels
// expects of its latencies: nothing of it was measured with these kernels. What
// is measured goes in here.
struct CostModel {
  // That memory moves for each multiprocessor: 4.3 TB/s of 132.
  double bytes_per_microsecond = 32500;
  // That must be under way on a multiprocessor for this, and that one block
  // has.
  double bytes_in_flight = 24 * 1024;
  double bytes_in_flight_per_block = 16 * 1024;
  // Of L2, that is still there when it is read again: y, z, dz and dx pass as
  // well.
  double share_of_l2 = 0.5;
  // Microseconds of a round in which blocks wait for each other's sums.
  double barrier = 3;
  double cluster = 2;
  // Of a kernel's start and end, of the zeroing of counters, and of a last
  // block that adds all sums while the others are gone.
  double kernel = 3;
  double zeroing = 1.5;
  double last_block = 4;
};

struct Cost {
  double bytes;        // that cross to and from memory
  double bytes_again;  // of these, what is read a second time
  double in_flight;    // share of what memory needs, at most 1
  int64_t rounds;      // slabs that a team takes one after the other
  double streaming;    // microseconds
  double waiting;
  double launching;

  double total() const { return streaming + waiting + launching; }
};

// Of both passes: of the kernel that does both, or of the two kernels.
Cost CostOf(const Plan& plan, const Problem& problem, int width,
            int arrays_kept, const Device& device,
            const CostModel& model = CostModel());

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_COST_H_
