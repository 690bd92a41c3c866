// Tests that a plan divides every shape so that each element belongs to one
// task, and no two tasks write to the same byte of a mask.

#include "cpu/plan.h"

#include <cstdint>
#include <string>
#include <vector>

#include "tests/native/check.h"

namespace jax_bnar {
namespace testing {

using cpu::MakePlan;
using cpu::Plan;
using cpu::Range;
namespace {

constexpr int64_t kLanes = 16;

// How often each element of a group is covered, and which task writes its byte
// of the mask.
class Coverage {
 public:
  explicit Coverage(int64_t group_size)
      : times_(static_cast<size_t>(group_size)),
        owner_(static_cast<size_t>((group_size + 7) / 8), -1) {}

  void Add(int64_t begin, int64_t end, int64_t task) {
    BNAR_CHECK(0 <= begin && begin <= end &&
                   end <= static_cast<int64_t>(times_.size()),
               "a task leaves the array");
    for (int64_t i = begin; i < end; ++i) {
      ++times_[static_cast<size_t>(i)];
      int64_t& owner = owner_[static_cast<size_t>(i / 8)];
      if (owner == -1) owner = task;
      shared_ |= owner != task;
    }
  }

  bool Complete() const {
    for (const int times : times_) {
      if (times != 1) return false;
    }
    return true;
  }
  bool SharedMaskBytes() const { return shared_; }

 private:
  std::vector<int> times_;
  std::vector<int64_t> owner_;
  bool shared_ = false;
};

// Adds the elements in these rows and columns of the plan's matrix.
void AddTile(const Plan& plan, const Range& rows, const Range& columns,
             int64_t task, Coverage* coverage) {
  const int64_t inner =
      plan.layout == Plan::Layout::kChannelsFirst ? plan.shape.inner : 1;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    coverage->Add((r * plan.columns + columns.begin) * inner,
                  (r * plan.columns + columns.end) * inner, task);
  }
}

void AddTail(const Plan& plan, int64_t* task, Coverage* coverage) {
  const int64_t begin = plan.rows * plan.columns;
  for (int64_t piece = 0; piece < plan.num_tail_pieces; ++piece) {
    const Range columns = plan.TailColumns(piece);
    BNAR_CHECK(columns.size() > 0, "a piece of the tail is empty");
    BNAR_CHECK(columns.begin % kLanes == 0, "kernels take whole vectors");
    coverage->Add(begin + columns.begin, begin + columns.end, (*task)++);
  }
}

void CheckReductionTasks(const Plan& plan) {
  Coverage coverage(plan.shape.group_size());
  int64_t task = 0;
  for (int64_t chunk = 0; chunk < plan.num_chunks; ++chunk) {
    const Range rows = plan.ChunkRows(chunk);
    BNAR_CHECK(rows.size() > 0, "a chunk is empty");
    for (int64_t slab = 0; slab < plan.num_slabs; ++slab) {
      const Range columns = plan.SlabColumns(slab);
      BNAR_CHECK(columns.size() > 0, "a slab is empty");
      if (plan.layout == Plan::Layout::kChannelsLast) {
        BNAR_CHECK(columns.begin % kLanes == 0 && columns.size() % kLanes == 0,
                   "kernels take whole vectors");
      }
      AddTile(plan, rows, columns, task++, &coverage);
    }
  }
  AddTail(plan, &task, &coverage);
  BNAR_CHECK(task == plan.reduction_tasks_per_group(), "number of tasks");
  BNAR_CHECK(coverage.Complete(), "a reduction misses or repeats elements");
}

void CheckElementwiseTasks(const Plan& plan) {
  Coverage coverage(plan.shape.group_size());
  int64_t task = 0;
  for (; task < plan.num_blocks; ++task) {
    const Range block = plan.Block(task);
    BNAR_CHECK(block.size() > 0, "a block is empty");
    if (plan.layout == Plan::Layout::kChannelsLast) {
      AddTile(plan, block, {0, plan.columns}, task, &coverage);
    } else {
      coverage.Add(block.begin * plan.shape.inner, block.end * plan.shape.inner,
                   task);
    }
  }
  AddTail(plan, &task, &coverage);
  BNAR_CHECK(task == plan.elementwise_tasks_per_group(), "number of tasks");
  BNAR_CHECK(coverage.Complete(), "a pass misses or repeats elements");
  BNAR_CHECK(!coverage.SharedMaskBytes(), "two tasks write one byte of a mask");
}

void CheckColumns(const Shape& shape, const Plan& plan) {
  BNAR_CHECK(plan.shape.group_size() == shape.group_size() &&
                 plan.shape.groups == shape.groups &&
                 plan.shape.channels == shape.channels &&
                 plan.shape.count() == shape.count(),
             "the plan's shape is the problem's or a reshape of it");
  if (plan.layout == Plan::Layout::kChannelsFirst) {
    BNAR_CHECK(plan.columns == shape.channels && plan.rows == shape.rows &&
                   plan.tail == 0 && plan.rows_joined == 1,
               "a column is a channel, a row is an n");
    return;
  }
  const int64_t width = plan.shape.channels * plan.shape.inner;
  BNAR_CHECK(plan.columns % kLanes == 0, "kernels take whole vectors");
  const int64_t of_channels = plan.rows_joined * width;
  if (plan.rows > 0) {
    BNAR_CHECK(plan.columns == of_channels, "a row is `rows_joined` rows");
  } else {
    BNAR_CHECK(plan.tail == of_channels && plan.columns - plan.tail < kLanes,
               "a tail alone has no more columns than elements");
  }
  BNAR_CHECK(0 <= plan.tail && plan.tail < plan.columns, "tail");
  BNAR_CHECK(plan.tail % width == 0, "the tail is whole rows");
  BNAR_CHECK(plan.rows * plan.columns + plan.tail == shape.group_size(),
             "rows and tail are the group");
}

void Check(const Shape& shape) {
  for (const int64_t item_size : {2, 4, 8}) {
    context = "shape " + std::to_string(shape.groups) + " " +
              std::to_string(shape.rows) + " " +
              std::to_string(shape.channels) + " " +
              std::to_string(shape.inner) + ", item size " +
              std::to_string(item_size);
    const Plan plan = MakePlan(shape, item_size);
    CheckColumns(shape, plan);
    CheckReductionTasks(plan);
    CheckElementwiseTasks(plan);
  }
}

// Checks plans of arrays that do not fit in memory, without loops over them.
void CheckHuge(const Shape& shape) {
  context = "a huge shape";
  const Plan plan = MakePlan(shape, 2);
  CheckColumns(shape, plan);
  BNAR_CHECK(plan.ChunkRows(plan.num_chunks - 1).end == plan.rows, "chunks");
  BNAR_CHECK(plan.ChunkRows(plan.num_chunks - 1).size() > 0, "last chunk");
  BNAR_CHECK(plan.SlabColumns(plan.num_slabs - 1).end == plan.columns, "slabs");
  const int64_t end = plan.layout == Plan::Layout::kChannelsLast
                          ? plan.rows
                          : plan.planes_per_group();
  BNAR_CHECK(plan.Block(plan.num_blocks - 1).end == end, "blocks");
  BNAR_CHECK(plan.Block(plan.num_blocks - 1).size() > 0, "last block");
  BNAR_CHECK(plan.num_partials() * plan.columns < shape.group_size() / 20,
             "partial sums stay a few percent of the data");
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar::testing;
  for (const int64_t groups : {1, 3}) {
    for (const int64_t rows : {1, 2, 7, 16, 31, 130, 1000, 4099}) {
      for (const int64_t channels :
           {1, 2, 3, 7, 8, 16, 24, 65, 251, 256, 1027}) {
        for (const int64_t inner :
             {1, 2, 3, 8, 15, 16, 17, 39, 40, 49, 196, 257, 3136}) {
          if (groups * rows * channels * inner > 600'000) continue;
          Check({groups, rows, channels, inner});
        }
      }
    }
  }
  Check({1, 20000, 64, 1});
  Check({1, 3, 1, 1 << 20});
  const int64_t big = int64_t{1} << 33;
  // The tails have several pieces.
  Check({1, 7, 20011, 1});
  Check({2, 15, 20011, 1});
  Check({2, 33, 20011, 1});
  CheckHuge({1, big + 5, 3, 1});
  CheckHuge({1, big, 1024, 1});
  CheckHuge({1, 3, 5, big + 1});
  CheckHuge({1, 3, 1, big + 1});
  return Finish();
}
