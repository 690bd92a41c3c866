// Tests how arrays and masks are cut for blocks and threads.

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/host/cost.h"
#include "cuda/host/parameters.h"
#include "cuda/host/plan.h"
#include "cuda/host/tiling.h"
#include "tests/native/check.h"
#include "tests/native/cuda_devices.h"

namespace jax_bnar {
namespace testing {
namespace {

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

// Checks that the bits of a block's rows of some channels, whose bits lie
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
             "a sector of two blocks at row " + std::to_string(begin));
  BNAR_CHECK(end == t.rows || (last + 1) % kBitsOfSector == 0,
             "a sector of two blocks at row " + std::to_string(end));
}

// At every site of ResNet-50, a block writes and reads whole sectors of the
// mask, whatever the planner chooses.
void TestMaskSectors() {
  struct Site {
    int64_t size, channels;
  };
  constexpr Site kSites[] = {{112, 64},  {56, 64},  {56, 256}, {56, 128},
                             {28, 128},  {28, 512}, {28, 256}, {14, 256},
                             {14, 1024}, {14, 512}, {7, 512},  {7, 2048}};
  const auto check = [](const Problem& problem, const Plan& plan) {
    const cuda::Tiling& t = plan.tiling;
    const int64_t channels = problem.shape.channels;
    BNAR_CHECK(t.mask_channels == problem.mask_channels &&
                   t.columns % t.mask_channels == 0,
               "two slabs share the channels whose bits lie together");
    for (int64_t channel = 0; channel < channels; channel += t.mask_channels) {
      for (int64_t rank = 0; rank < t.team; ++rank) {
        const int64_t begin = rank * t.rows_per_block;
        const int64_t end = std::min(t.rows, begin + t.rows_per_block);
        if (begin < end) CheckRun(t, begin, end, channel);
      }
    }
  };
  for (const Named& named : kDevices) {
    for (const Site& site : kSites) {
      for (const int64_t batch : {32, 256}) {
        for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
          const Shape shape = {1, batch * site.size * site.size, site.channels,
                               1};
          const Problem problem{shape, dtype,
                                cuda::MaskChannels(shape, ItemSize(dtype))};
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
              BNAR_CHECK(cuda::CostOf(plan, problem, cuda::kWidth, traffic,
                                      named.device)
                                 .bytes_of_sectors == 0,
                         "the model knows it");
            }
          }
          check(problem,
                cuda::PlanElementwise(problem, cuda::kWidth, named.device, {}));
          check(problem,
                cuda::PlanReduction(problem, cuda::kWidth, named.device, {}));
        }
      }
    }
  }
  context = "channels of masks";
  const auto channels = [](const Shape& shape, DType dtype) {
    return cuda::MaskChannels(shape, ItemSize(dtype));
  };
  BNAR_CHECK(channels({1, 9, 80, 1}, DType::kBFloat16) == 16, "16 divides 80");
  BNAR_CHECK(channels({1, 9, 80, 1}, DType::kFloat64) == 8, "a whole byte");
  BNAR_CHECK(channels({1, 9, 65, 1}, DType::kBFloat16) == 0, "65 is odd");
  BNAR_CHECK(channels({1, 9, 64, 2}, DType::kBFloat16) == 0, "planes");
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar::testing;
  TestWidth();
  TestFlat();
  TestMaskSectors();
  return Finish();
}
