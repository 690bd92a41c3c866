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
  WorkspaceLayout layout{};
  layout.counter_bytes = t.num_slabs * static_cast<int64_t>(sizeof(uint32_t));
  layout.totals = Align(layout.counter_bytes);
  const int64_t columns = t.num_slabs * t.columns;
  layout.partials =
      Align(layout.totals + columns * static_cast<int64_t>(sizeof(Sums)));
  layout.bytes =
      layout.partials + columns * t.team * static_cast<int64_t>(sizeof(Sums));
  return layout;
}

int64_t WorkspaceBytes(const Shape& shape) {
  int64_t bytes = 0;
  // Misaligned buffers, which are not known yet, are read element by element.
  for (const bool aligned : {false, true}) {
    const int width = WidthOf({shape, DType::kFloat16}, aligned);
    for (int columns = kWidth; columns <= kMaxColumns; columns *= 2) {
      Tiling t = CutSlabs(shape, width, columns);
      // A cluster may count more blocks than it has tiles.
      t.team = static_cast<int32_t>(std::max<int64_t>(
          kMaxCluster, std::min(TilesOfSlab(t), LargestTeam(t))));
      bytes = std::max(bytes, LayWorkspace(t).bytes);
    }
  }
  return bytes;
}

WorkspaceBound BoundOfWorkspace() {
  const int64_t sums = sizeof(Sums);
  // A column has its totals, the partial sums of a cluster's blocks and, as a
  // slab has at least one column, at most one counter. Larger teams share
  // kPartialColumns. The channels of a group fill all slabs but the last.
  const int64_t per_column =
      sums * (1 + kMaxCluster) + static_cast<int64_t>(sizeof(uint32_t));
  return {sums * kPartialColumns + 2 * kAlignment, kMaxColumns * per_column,
          per_column};
}

}  // namespace cuda
}  // namespace jax_bnar
