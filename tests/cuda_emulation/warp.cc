// Shuffles, votes and barriers of warps. Each named lane leaves its value, and
// the last one to arrive computes what each of them gets.

#include <cstring>

#include "cuda_emulation/synchronization.h"
#include "scheduler.h"

namespace cuda_emulation {
namespace {

// What a shuffle returns from a lane that takes no part, which is undefined on
// a device.
constexpr std::uint64_t kUndefined = 0x0001'0001'0001'0001u * kPoison;

const char* Name(WarpOperation operation) {
  switch (operation) {
    case WarpOperation::kSync:
      return "__syncwarp";
    case WarpOperation::kShuffle:
      return "__shfl_sync";
    case WarpOperation::kShuffleUp:
      return "__shfl_up_sync";
    case WarpOperation::kShuffleDown:
      return "__shfl_down_sync";
    case WarpOperation::kShuffleXor:
      return "__shfl_xor_sync";
    case WarpOperation::kBallot:
      return "__ballot_sync";
    case WarpOperation::kAny:
      return "__any_sync";
    case WarpOperation::kAll:
      return "__all_sync";
  }
  return "?";
}

void CheckSame(const LaneOperation& a, const LaneOperation& b) {
  if (a.operation != b.operation || a.mask != b.mask) {
    Fail(
        "lanes of a warp meet in different operations: %s with mask %08x and "
        "%s with mask %08x",
        Name(a.operation), a.mask, Name(b.operation), b.mask);
  }
}

// Returns the lane that `lane` reads, which is `lane` itself where the shuffle
// would leave the segment of `width` lanes.
int Source(const LaneOperation& op, int lane) {
  const int first = lane & ~(op.width - 1);
  const int last = first + op.width - 1;
  int source = lane;
  switch (op.operation) {
    case WarpOperation::kShuffle:
      return first + (op.argument & (op.width - 1));
    case WarpOperation::kShuffleUp:
      source = lane - (op.argument & 31);
      return source < first ? lane : source;
    case WarpOperation::kShuffleDown:
      source = lane + (op.argument & 31);
      break;
    case WarpOperation::kShuffleXor:
      source = lane ^ (op.argument & 31);
      break;
    default:
      break;
  }
  return source > last ? lane : source;
}

// Completes the operation, for which all of `lanes` have arrived.
void Complete(Warp* warp, std::uint32_t lanes) {
  const LaneOperation& first = warp->lanes[__builtin_ctz(lanes)];
  std::uint32_t votes = 0;
  for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    CheckSame(first, warp->lanes[lane]);
    votes |= static_cast<std::uint32_t>(warp->lanes[lane].value & 1) << lane;
  }
  for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    LaneOperation& op = warp->lanes[lane];
    switch (op.operation) {
      case WarpOperation::kSync:
        break;
      case WarpOperation::kBallot:
        op.result = votes;
        break;
      case WarpOperation::kAny:
        op.result = votes != 0;
        break;
      case WarpOperation::kAll:
        op.result = votes == lanes;
        break;
      default: {
        const int source = Source(op, lane);
        op.result =
            lanes >> source & 1 ? warp->lanes[source].value : kUndefined;
      }
    }
  }
  warp->in_operation &= ~lanes;
  warp->ready |= lanes;
  // The lane that arrived last goes on first; next time, the order is reversed.
  warp->reversed = !warp->reversed;
}

// Returns the lanes that an operation with this mask waits for.
std::uint32_t Named(const Warp& warp, unsigned mask) {
  return mask & warp.present & ~warp.exited;
}

}  // namespace

unsigned Lane() { return current->lane; }

std::uint64_t WarpCollective(WarpOperation operation, unsigned mask,
                             std::uint64_t value, int argument, int width) {
  Thread* thread = current;
  Warp* warp = thread->warp;
  if ((mask >> thread->lane & 1) == 0) {
    Fail("lane %u calls %s with mask %08x, which does not name it",
         thread->lane, Name(operation), mask);
  }
  if (width <= 0 || width > 32 || (width & (width - 1)) != 0) {
    Fail("%s with width %d, which is no power of two up to 32", Name(operation),
         width);
  }
  LaneOperation& own = warp->lanes[thread->lane];
  own = {operation, mask, argument, width, value, 0};
  const std::uint32_t named = Named(*warp, mask);
  // A lane that waits in an operation which does not name this one may take
  // part in this one later.
  const std::uint32_t waiting = warp->in_operation & named;
  for (std::uint32_t rest = waiting; rest != 0; rest &= rest - 1) {
    const LaneOperation& other = warp->lanes[__builtin_ctz(rest)];
    if ((other.mask >> thread->lane & 1) != 0) CheckSame(other, own);
  }
  warp->in_operation |= scheduler->Suspend();
  if ((warp->in_operation & named) == named) Complete(warp, named);
  scheduler->Switch();
  return own.result;
}

void LeaveWarp(Warp* warp) {
  for (std::uint32_t rest = warp->in_operation; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if ((warp->in_operation >> lane & 1) == 0) continue;
    const std::uint32_t named = Named(*warp, warp->lanes[lane].mask);
    if ((warp->in_operation & named) == named) Complete(warp, named);
  }
}

}  // namespace cuda_emulation
