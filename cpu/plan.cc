#include "cpu/plan.h"

#include <algorithm>
#include <numeric>

#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu {
namespace {

// A plane has a whole vector.
constexpr int64_t kMinPlane = 16;
// Shorter planes are cheaper as columns, if there are enough rows: 16x512
// planes of 16 to 36 elements took 1.3 to 2 times as long, and 4x512 of them
// 0.7 to 0.9 times. At 49 elements, wide rows (2048 channels) take twice as
// long as planes.
constexpr int64_t kShortPlane = 40;
constexpr int64_t kManyRows = 16;
// A joined row has at least this many columns if there are enough rows. With
// sixteen columns, each row would load the sums that the row before it has just
// stored, which takes up to 1.2 times as long.
constexpr int64_t kMinColumns = 64;
// There are at most kMaxChunks chunks of rows, each of at least kMinChunkRows
// rows, and at most kFewChunks while they would be shorter than kFewChunkRows.
// So the partial sums of many rows are a few percent of the data (of 64 rows in
// 16 bits an eighth). Those of a few rows can be several times as large.
constexpr int64_t kMaxChunks = 64;
constexpr int64_t kMinChunkRows = 64;
constexpr int64_t kFewChunks = 32;
constexpr int64_t kFewChunkRows = 128;
// This many chunks keep the threads busy without cutting columns into slabs.
// Slabs mean reading short pieces of rows, which made the reduction of backward
// three times slower with two threads.
constexpr int64_t kEnoughChunks = 12;
constexpr int64_t kSlabColumns = 256;
constexpr int64_t kBlockRowsMultiple = 32;
// Bytes of x in an elementwise task.
constexpr int64_t kBlockBytes = 128 * 1024;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

Range Cut(int64_t index, int64_t step, int64_t end) {
  return {index * step, std::min(end, (index + 1) * step)};
}

void CutRows(Plan* plan, int64_t item_size) {
  const Shape& shape = plan->shape;
  const int64_t width = shape.channels * shape.inner;
  plan->rows_joined = kLanes / std::gcd(width, kLanes);
  // Join more rows if there are enough of them.
  while (plan->rows_joined * width < kMinColumns &&
         plan->rows_joined * 2 * kMinChunkRows <= shape.rows) {
    plan->rows_joined *= 2;
  }
  // Of fewer rows there is only a tail, which needs no more columns than it has
  // elements.
  plan->rows = shape.rows / plan->rows_joined;
  plan->tail = (shape.rows % plan->rows_joined) * width;
  plan->rows_joined = std::min(plan->rows_joined, shape.rows);
  plan->columns = RoundUp(plan->rows_joined * width, kLanes);
  plan->chunk_rows = RoundUp(
      std::max({kMinChunkRows, CeilDiv(plan->rows, kMaxChunks),
                std::min(CeilDiv(plan->rows, kFewChunks), kFewChunkRows)}),
      kBlockRowsMultiple);
  plan->num_chunks = CeilDiv(plan->rows, plan->chunk_rows);
  plan->block = std::max<int64_t>(1, kBlockBytes / (plan->columns * item_size));
  plan->num_blocks = CeilDiv(plan->rows, plan->block);
  plan->tail_piece = RoundUp(kBlockBytes / item_size, kLanes);
  plan->num_tail_pieces = CeilDiv(plan->tail, plan->tail_piece);
}

void CutPlanes(Plan* plan, int64_t item_size) {
  const Shape& shape = plan->shape;
  plan->rows_joined = 1;
  plan->columns = shape.channels;
  plan->rows = shape.rows;
  plan->tail = 0;
  plan->chunk_rows =
      std::max<int64_t>(CeilDiv(shape.rows, kMaxChunks),
                        std::max<int64_t>(1, kMinChunkRows / shape.inner));
  plan->num_chunks = CeilDiv(shape.rows, plan->chunk_rows);
  plan->block =
      RoundUp(std::max<int64_t>(1, kBlockBytes / (shape.inner * item_size)), 8);
  plan->num_blocks = CeilDiv(plan->planes_per_group(), plan->block);
}

}  // namespace

Range Plan::ChunkRows(int64_t chunk) const {
  return Cut(chunk, chunk_rows, rows);
}

Range Plan::SlabColumns(int64_t slab) const {
  return Cut(slab, slab_columns, columns);
}

Range Plan::Block(int64_t block_index) const {
  return Cut(block_index, block,
             layout == Layout::kChannelsLast ? rows : planes_per_group());
}

Range Plan::TailColumns(int64_t piece) const {
  return Cut(piece, tail_piece, tail);
}

Plan MakePlan(const Shape& shape, int64_t item_size) {
  Plan plan{};
  plan.shape = shape;
  if (shape.channels == 1) {
    // With one channel, the whole group is one run, which is cut like rows of
    // width 1.
    plan.shape.rows = shape.rows * shape.inner;
    plan.shape.inner = 1;
  }
  const int64_t inner = plan.shape.inner;
  if (inner < kMinPlane ||
      (inner < kShortPlane && plan.shape.rows >= kManyRows)) {
    plan.layout = Plan::Layout::kChannelsLast;
    CutRows(&plan, item_size);
  } else {
    plan.layout = Plan::Layout::kChannelsFirst;
    CutPlanes(&plan, item_size);
  }
  const bool cut_columns =
      plan.num_chunks < kEnoughChunks && plan.columns > kSlabColumns;
  plan.slab_columns = cut_columns ? kSlabColumns : plan.columns;
  if (plan.layout == Plan::Layout::kChannelsFirst &&
      plan.num_chunks < kEnoughChunks) {
    // A column is a whole plane here, so a slab has about the bytes of a block.
    plan.slab_columns = std::clamp<int64_t>(
        kBlockBytes / (plan.shape.inner * item_size), 1, plan.columns);
  }
  plan.num_slabs = CeilDiv(plan.columns, plan.slab_columns);
  return plan;
}

}  // namespace jax_bnar::cpu
