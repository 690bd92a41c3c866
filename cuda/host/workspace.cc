#include "cuda/host/workspace.h"

#include <algorithm>

#include "cuda/host/tiling.h"

namespace jax_bnar {
namespace cuda {
namespace {

constexpr int64_t kAlignment = 256;

int64_t Align(int64_t bytes) {
  return CeilDivide(bytes, kAlignment) * kAlignment;
}

}  // namespace

WorkspaceLayout LayWorkspace(const Tiling& t) {
  const auto bytes = [](int64_t count, size_t size) {
    return Align(count * static_cast<int64_t>(size));
  };
  const int64_t columns = t.num_slabs * t.columns;
  WorkspaceLayout layout{};
  layout.flags = bytes(columns, sizeof(Sums));
  layout.partials =
      layout.flags + bytes(t.num_slabs * t.team, sizeof(uint64_t));
  layout.partial_mailboxes = layout.flags;
  layout.total_mailboxes =
      layout.partial_mailboxes + bytes(columns * t.team, sizeof(Mailbox));
  // A block that is a team of its own has its totals alone.
  layout.bytes = t.team == 1 ? layout.flags
                             : layout.total_mailboxes +
                                   bytes(columns * t.team, sizeof(Mailbox));
  return layout;
}

int64_t WorkspaceBytes(const Shape& shape) {
  int64_t bytes = 0;
  // It is not known yet whether the buffers are aligned; if not, they are read
  // element by element.
  for (const bool aligned : {false, true}) {
    const int width = WidthOf({shape, DType::kFloat16}, aligned);
    for (int columns = kWidth; columns <= kMaxColumns; columns *= 2) {
      Tiling t = CutSlabs(shape, width, columns);
      // The blocks of a cluster, which may be more, use none of it.
      t.team = static_cast<int32_t>(std::min(TilesOfSlab(t), LargestTeam(t)));
      bytes = std::max(bytes, LayWorkspace(t).bytes);
    }
  }
  return bytes;
}

WorkspaceBound BoundOfWorkspace() {
  // A column has its totals. Teams of several blocks share kPartialColumns,
  // whose messages are more than partial sums and flags. The channels of a
  // group fill all its slabs except the last.
  const int64_t messages = 2 * sizeof(Mailbox);
  const int64_t per_column = sizeof(Sums);
  return {kPartialColumns * messages + 3 * kAlignment, kMaxColumns * per_column,
          per_column};
}

}  // namespace cuda
}  // namespace jax_bnar
