// The memory that XLA lends a call, through which its blocks communicate: plain
// host code, no CUDA.

#ifndef JAX_BNAR_CUDA_HOST_WORKSPACE_H_
#define JAX_BNAR_CUDA_HOST_WORKSPACE_H_

#include <cstdint>

#include "cuda/host/parameters.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// Returns how many bytes of workspace suffice for any plan on any device.
int64_t WorkspaceBytes(const Shape& shape);

// A linear function of the shape that is never below WorkspaceBytes. It serves
// sizes that are symbols while a program is exported.
struct WorkspaceBound {
  int64_t bytes;
  int64_t bytes_per_group;
  int64_t bytes_per_channel;  // of each group

  int64_t Of(const Shape& shape) const {
    return bytes + shape.groups *
                       (bytes_per_group + shape.channels * bytes_per_channel);
  }
};

WorkspaceBound BoundOfWorkspace();

// Offsets in bytes. That of the totals depends only on how slabs are cut, so
// that two kernels with teams of different sizes find the same totals. A launch
// uses either partial sums and flags or messages.
struct WorkspaceLayout {
  int64_t totals;
  int64_t flags;
  int64_t partials;
  int64_t partial_mailboxes;
  int64_t total_mailboxes;
  int64_t bytes;
};

WorkspaceLayout LayWorkspace(const Tiling& tiling);

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_WORKSPACE_H_
