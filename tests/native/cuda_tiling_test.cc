// Tests how arrays and masks are cut for blocks and threads.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/host/cost.h"
#include "cuda/host/parameters.h"
#include "cuda/host/plan.h"
#include "cuda/host/tiling.h"
#include "tests/native/check.h"
#include "tests/native/cuda_devices.h"

namespace jax_bnar {
namespace testing {
namespace {

using cuda::Layout;
using cuda::Plan;
using cuda::Strategy;

void TestWidth() {
  context = "width";
  const auto width = [](Shape shape, DType dtype, bool aligned) {
    return cuda::WidthOf({shape, dtype}, aligned);
  };
  BNAR_CHECK(width({1, 3, 64, 1}, DType::kFloat16, true) == 8, "");
  BNAR_CHECK(width({1, 3, 64, 1}, DType::kFloat16, false) == 1, "");
  BNAR_CHECK(width({1, 3, 65, 1}, DType::kFloat32, true) == 1, "");
  BNAR_CHECK(width({1, 3, 5, 16}, DType::kBFloat16, true) == 8, "");
  BNAR_CHECK(width({1, 3, 8, 49}, DType::kBFloat16, true) == 1, "");
  BNAR_CHECK(width({1, 3, 64, 1}, DType::kFloat64, true) == 1, "");
}

void TestFlat() {
  context = "flat";
  const auto is_flat = [](const Shape& shape, DType dtype, bool aligned) {
    return cuda::IsFlat({shape, dtype}, aligned);
  };
  BNAR_CHECK(is_flat({1, 10, 2048, 49}, DType::kFloat32, true), "7x7");
  BNAR_CHECK(!is_flat({1, 10, 2048, 49}, DType::kFloat32, false), "alignment");
  BNAR_CHECK(!is_flat({1, 10, 2048, 49}, DType::kFloat64, true), "float64");
  BNAR_CHECK(!is_flat({1, 10, 256, 3136}, DType::kFloat32, true), "56x56");
  BNAR_CHECK(!is_flat({1, 10, 256, 7}, DType::kFloat32, true), "three planes");
  BNAR_CHECK(!is_flat({1, 490, 2048, 1}, DType::kFloat32, true), "rows");
  BNAR_CHECK(is_flat({2, 4, 6, 9}, DType::kFloat32, true), "whole vectors");
  BNAR_CHECK(!is_flat({2, 2, 3, 49}, DType::kFloat32, true), "group of 294");
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const Shape& shape :
         {Shape{1, 10, 2048, 49}, Shape{3, 8, 5, 9}, Shape{1, 1, 1, 99999},
          Shape{1, int64_t{1} << 26, 2, 49}}) {
      const cuda::FlatTiling t = cuda::CutFlat({shape, dtype});
      const Plan plan = cuda::PlanFlat(t);
      BNAR_CHECK(t.elements_per_block % (cuda::kThreads * cuda::kWidth) == 0,
                 "a vector of two blocks");
      BNAR_CHECK(
          t.blocks_per_group * t.elements_per_block >= shape.group_size() &&
              (t.blocks_per_group - 1) * t.elements_per_block <
                  shape.group_size(),
          "elements");
      BNAR_CHECK(plan.grid == shape.groups * t.blocks_per_group &&
                     plan.grid <= INT32_MAX,
                 "grid");
      // The most planes, of a block that begins with the last element of one.
      const int64_t planes = (t.elements_per_block - 2) / shape.inner + 2;
      BNAR_CHECK(
          plan.shared_bytes >= planes * 12 && plan.shared_bytes <= 48 * kKiB,
          "constants");
    }
  }
}

// Slabs have rows of at most 512 bytes, because memory serves longer ones no
// faster, and the fewest columns that hold all channels if these are few.
void TestColumns() {
  context = "columns";
  BNAR_CHECK(cuda::WidestColumns(DType::kBFloat16) == 256, "512 bytes");
  BNAR_CHECK(cuda::WidestColumns(DType::kFloat32) == 128, "512 bytes");
  BNAR_CHECK(cuda::WidestColumns(DType::kFloat64) == 64, "512 bytes");
  const auto cut = [](int64_t channels, int width, int columns) {
    const cuda::Tiling t =
        cuda::CutSlabs({3, 1000, channels, 1}, width, columns);
    // Each slab that is not full is the last one of its group.
    BNAR_CHECK(t.num_slabs == 3 * cuda::CeilDivide(channels, t.columns), "");
    return t.columns;
  };
  BNAR_CHECK(cut(1024, 8, 256) == 256 && cut(1024, 8, 128) == 128, "as asked");
  BNAR_CHECK(cut(72, 8, 256) == 128, "nine vectors in a row of sixteen");
  BNAR_CHECK(cut(1024, 1, 256) == 32, "a warp reads 32 elements at once");
  BNAR_CHECK(cut(3, 1, 256) == 4, "no more than there are");
}

// The tiles of a block of a team: as many as those whose numbers are its rank,
// and further ones at distances of the team.
int64_t TilesOf(int64_t rank, int64_t team, int64_t tiles) {
  int64_t count = 0;
  for (int64_t tile = rank; tile < tiles; tile += team) ++count;
  return count;
}

void TestTeam() {
  context = "team";
  // 8 columns have 256 rows in a tile, so these are 10 tiles.
  cuda::Tiling t = cuda::CutSlabs({1, 10 * 256 - 7, 8, 1}, 8);
  BNAR_CHECK(cuda::TilesOfSlab(t) == 10, "");
  cuda::SetTeam(4, &t);
  BNAR_CHECK(t.team == 4 && t.tiles_per_block == 3 && t.longer_blocks == 2,
             "3, 3, 2 and 2 tiles");
  cuda::SetTeam(6, &t);
  BNAR_CHECK(t.team == 6 && t.tiles_per_block == 2 && t.longer_blocks == 4,
             "five blocks would take as long, but leave one idle");
  cuda::SetTeam(5, &t);
  BNAR_CHECK(t.team == 5 && t.tiles_per_block == 2 && t.longer_blocks == 5,
             "2 tiles each");
  cuda::SetTeam(264, &t);
  BNAR_CHECK(t.team == 10 && t.tiles_per_block == 1 && t.longer_blocks == 10,
             "no block without a tile");
  cuda::SetTeam(0, &t);
  BNAR_CHECK(t.team == 1 && t.tiles_per_block == 10 && t.longer_blocks == 1,
             "at least one block");
  cuda::SetWholeTeam(16, &t);
  BNAR_CHECK(t.team == 16 && t.tiles_per_block == 1 && t.longer_blocks == 10,
             "six blocks have nothing");
  for (int64_t team = 1; team <= 16; ++team) {
    cuda::SetWholeTeam(team, &t);
    for (int64_t rank = 0; rank < team; ++rank) {
      BNAR_CHECK(t.tiles_per_block - (rank < t.longer_blocks ? 0 : 1) ==
                     TilesOf(rank, team, 10),
                 std::to_string(rank) + " of " + std::to_string(team));
    }
  }
  // 2 to the power of 18 partial sums, of 2 slabs of 256 columns.
  cuda::Tiling large = cuda::CutSlabs({1, int64_t{1} << 30, 512, 1}, 8);
  cuda::SetTeam(10000, &large);
  BNAR_CHECK(large.team == 512, "no room for more messages");
}

// Checks that a thread which goes on by a tile's strides finds the vector that
// its block's next tile has at the same place.
void CheckStrides(const cuda::Tiling& t, int width) {
  const int64_t row_vectors = t.row_vectors;
  if (t.layout == Layout::kChannelsLast) {
    const int64_t next = t.team * (cuda::kThreads / row_vectors);
    const auto offset = [&](int64_t row, int64_t channel) {
      return row * t.shape.channels + channel;
    };
    for (int64_t row = 0; row + next < t.rows; ++row) {
      for (int64_t channel = 0; channel < t.shape.channels; channel += width) {
        BNAR_CHECK(
            offset(row, channel) + t.tile_stride == offset(row + next, channel),
            "row " + std::to_string(row));
        BNAR_CHECK(
            cuda::MaskBit(t, row, channel) + t.mask_tile_stride * width ==
                cuda::MaskBit(t, row + next, channel),
            "mask of row " + std::to_string(row));
      }
    }
    return;
  }
  const int64_t per_plane = t.vectors_per_plane.value;
  const int64_t next = t.team * int64_t{cuda::kThreads};
  for (int64_t vector = 0; vector + next < t.vectors; ++vector) {
    int64_t in_plane = vector % per_plane + t.tile_vectors;
    int64_t plane = vector / per_plane * t.plane_stride + t.tile_stride;
    if (in_plane >= per_plane) {
      in_plane -= per_plane;
      plane += t.plane_stride;
    }
    BNAR_CHECK(plane == (vector + next) / per_plane * t.plane_stride &&
                   in_plane == (vector + next) % per_plane,
               "vector " + std::to_string(vector));
  }
}

void TestStrides() {
  for (const int64_t team : {1, 2, 3, 7}) {
    context = "strides in a team of " + std::to_string(team);
    const auto check = [&](const Shape& shape, int width, int columns,
                           int64_t mask_channels) {
      cuda::Tiling t = cuda::CutSlabs(shape, width, columns, mask_channels);
      for (const auto set : {cuda::SetTeam, cuda::SetWholeTeam}) {
        set(team, &t);
        BNAR_CHECK(t.team == team, "");
        CheckStrides(t, width);
      }
    };
    for (const int64_t mask_channels : {0, 32, 8}) {
      check({2, 1000, 96, 1}, 8, 32, mask_channels);
      check({1, 500, 96, 1}, 8, 256, mask_channels);
    }
    check({1, 999, 33, 1}, 1, 256, 0);
    // Planes of more vectors than a tile has, and of fewer.
    check({2, 3, 2, 8 * 1000}, 8, 64, 0);
    check({1, 2000, 2, 16}, 8, 64, 0);
    check({1, 500, 3, 49}, 1, 64, 0);
  }
}

// Checks that the bits of a tile's rows of some channels, whose bits lie
// together, are a run of whole sectors. The sectors at the ends of the channels
// may be shared with others.
void CheckRun(const cuda::Tiling& t, int64_t begin, int64_t end,
              int64_t channel) {
  constexpr int64_t kBitsOfSector = 256;
  const int64_t first = cuda::MaskBit(t, begin, channel);
  const int64_t last = cuda::MaskBit(t, end - 1, channel + t.mask_channels - 1);
  BNAR_CHECK(last - first + 1 == (end - begin) * t.mask_channels,
             "the bits are not neighbours");
  BNAR_CHECK(begin == 0 || first % kBitsOfSector == 0,
             "a sector of two tiles at row " + std::to_string(begin));
  BNAR_CHECK(end == t.rows || (last + 1) % kBitsOfSector == 0,
             "a sector of two tiles at row " + std::to_string(end));
}

// At every site of ResNet-50, no sector of the mask lies in the rows of two
// tiles, and so of two blocks of a team, whatever the planner chooses. Slabs of
// fewer channels than have their bits together share sectors with each other.
void TestMaskSectors() {
  struct Site {
    int64_t size, channels;
  };
  constexpr Site kSites[] = {{112, 64},  {56, 64},  {56, 256}, {56, 128},
                             {28, 128},  {28, 512}, {28, 256}, {14, 256},
                             {14, 1024}, {14, 512}, {7, 512},  {7, 2048}};
  const auto check = [](const Problem& problem, const Plan& plan) {
    const cuda::Tiling& t = plan.tiling;
    const int64_t together = t.mask_channels;
    BNAR_CHECK(together == problem.mask_channels, "");
    BNAR_CHECK(t.columns % together == 0 || together % t.columns == 0,
               "a part of the channels whose bits lie together");
    const int64_t tile_rows = cuda::kThreads / t.row_vectors;
    for (int64_t channel = 0; channel < problem.shape.channels;
         channel += together) {
      // All tiles, or the first and the last ones of many.
      const int64_t tiles = cuda::TilesOfSlab(t);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        if (tile == 100 && tiles > 200) tile = tiles - 100;
        CheckRun(t, tile * tile_rows, std::min(t.rows, (tile + 1) * tile_rows),
                 channel);
      }
    }
  };
  for (const Named& named : kDevices) {
    for (const Site& site : kSites) {
      for (const int64_t batch : {32, 256}) {
        for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
          const Shape shape = {1, batch * site.size * site.size, site.channels,
                               1};
          const Problem problem{shape, dtype, cuda::MaskChannels(shape)};
          context = std::string("masks of ") + named.name + " " +
                    std::to_string(site.size) + " " +
                    std::to_string(site.channels) + " batch " +
                    std::to_string(batch);
          for (const Strategy strategy : kStrategies) {
            for (const cuda::Traffic& traffic :
                 {cuda::ForwardTraffic(dtype, true, true),
                  cuda::BackwardTraffic(dtype, Gate::kMask, true)}) {
              const Plan plan = cuda::MakePlan(problem, cuda::kWidth, traffic,
                                               named.device, {strategy, 0, 0});
              check(problem, plan);
              const cuda::Tiling& t = plan.tiling;
              // Slabs that are narrower are read at the same time, or the
              // model counts what they share.
              const bool shared =
                  plan.strategy != Strategy::kTwoKernels &&
                  int64_t{t.columns} * t.num_teams < t.mask_channels &&
                  t.num_slabs > t.num_teams;
              const cuda::Cost cost = cuda::CostOf(plan, problem, cuda::kWidth,
                                                   traffic, named.device);
              BNAR_CHECK((cost.bytes_of_sectors > 0) == shared,
                         "the model knows it");
            }
          }
          check(problem,
                cuda::PlanElementwise(problem, cuda::kWidth, named.device));
          for (const bool whole : {false, true}) {
            check(problem, cuda::PlanReduction(problem, cuda::kWidth,
                                               named.device, whole));
          }
        }
      }
    }
  }
  context = "channels of masks";
  BNAR_CHECK(cuda::MaskChannels({1, 9, 2048, 1}) == 128, "16 bytes of a row");
  BNAR_CHECK(cuda::MaskChannels({1, 9, 64, 1}) == 64, "no more than there are");
  BNAR_CHECK(cuda::MaskChannels({1, 9, 80, 1}) == 16, "16 divides 80");
  BNAR_CHECK(cuda::MaskChannels({1, 9, 72, 1}) == 8, "a whole byte");
  BNAR_CHECK(cuda::MaskChannels({1, 9, 65, 1}) == 0, "65 is odd");
  BNAR_CHECK(cuda::MaskChannels({1, 9, 64, 2}) == 0, "planes");
}

// The threads of a row share vectors of float32, so that a warp meets long
// pieces of it, as far as the vectors of each row can be shared evenly.
void TestSharedVectors() {
  context = "shared vectors";
  const auto step = [](const Shape& shape, DType dtype, int columns,
                       bool aligned = true) {
    const Problem problem{shape, dtype};
    const int width = cuda::WidthOf(problem, aligned);
    return cuda::WordStep(problem, width,
                          cuda::CutSlabs(shape, width, columns));
  };
  BNAR_CHECK(step({1, 99, 64, 1}, DType::kFloat32, 64) == 8, "a row");
  BNAR_CHECK(step({1, 99, 256, 1}, DType::kFloat32, 128) == 16, "half a row");
  BNAR_CHECK(step({1, 99, 256, 1}, DType::kFloat32, 256) == 32, "a warp");
  BNAR_CHECK(step({1, 99, 48, 1}, DType::kFloat32, 64) == 2, "six of eight");
  BNAR_CHECK(step({1, 99, 96, 1}, DType::kFloat32, 64) == 4, "eight and four");
  BNAR_CHECK(step({1, 99, 72, 1}, DType::kFloat32, 64) == 1, "nine vectors");
  BNAR_CHECK(step({1, 99, 64, 1}, DType::kFloat32, 8) == 1, "one in a row");
  BNAR_CHECK(step({1, 99, 64, 1}, DType::kFloat32, 64, false) == 1, "singly");
  BNAR_CHECK(step({1, 99, 64, 1}, DType::kBFloat16, 64) == 1, "one word");
  BNAR_CHECK(step({1, 9, 64, 64}, DType::kFloat32, 64) == 1, "planes");

  // Each column belongs to one element of one thread. The first words of the
  // threads that share vectors lie side by side, and the second ones after
  // them.
  constexpr int kVectors = 16;
  for (const int word_step : {1, 2, 4, 8, 16}) {
    context = "words " + std::to_string(word_step) + " apart";
    std::vector<int> columns;
    for (int vector = 0; vector < kVectors; ++vector) {
      const int shared = vector / word_step * word_step;
      const int word = 2 * shared + vector % word_step;
      for (int i = 0; i < 8; ++i) {
        columns.push_back(cuda::ColumnOf(vector, 8, i, word_step));
        BNAR_CHECK(
            columns.back() == 4 * (word + (i < 4 ? 0 : word_step)) + i % 4,
            "element " + std::to_string(i) + " of vector " +
                std::to_string(vector));
      }
    }
    std::sort(columns.begin(), columns.end());
    for (int i = 0; i < 8 * kVectors; ++i) {
      BNAR_CHECK(columns[i] == i, "each once");
    }
  }
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar::testing;
  TestSharedVectors();
  TestWidth();
  TestFlat();
  TestColumns();
  TestTeam();
  TestStrides();
  TestMaskSectors();
  return Finish();
}
