// The kernels of the microbenchmark (benchmarks/gpu/micro) on the emulated
// device: what they read, copy and add is right, whatever it takes.

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/gpu/micro/kernels.cuh"
#include "cuda/host/parameters.h"
#include "cuda/host/tiling.h"
#include "cuda/host/workspace.h"
#include "tests/cuda_emulation/testing.h"

namespace jax_bnar {
namespace testing {
namespace {

using cuda::kThreads;
using micro::Pieces;

// Every 32 bits of an array differ from all others.
std::vector<uint32_t> Numbers(size_t count) {
  std::vector<uint32_t> numbers(count);
  for (size_t i = 0; i < count; ++i) {
    numbers[i] = static_cast<uint32_t>(i) * 2654435761u + 1;
  }
  return numbers;
}

template <int kDepth, bool kStore>
void TestPieces(const Pieces& p, int begin, int end, unsigned blocks,
                bool backwards) {
  context = std::to_string(p.rows) + " rows of " + std::to_string(p.stride) +
            " bytes in pieces of " + std::to_string(p.piece);
  const auto words = static_cast<size_t>(p.rows * p.stride / 4);
  // Aligned as the device's memory is.
  alignas(16) static uint32_t from[1 << 16], to[1 << 16];
  BNAR_CHECK(words <= 1 << 16, "too large");
  const std::vector<uint32_t> numbers = Numbers(words);
  std::copy(numbers.begin(), numbers.end(), from);
  std::fill(to, to + words, 0u);
  std::vector<uint32_t> read(size_t{blocks} * kThreads);
  std::vector<uint64_t> ends(blocks, 1);
  const cudaError_t error =
      Launch({blocks, kThreads, 0}, micro::GoThroughPieces<kDepth, kStore>,
             reinterpret_cast<const unsigned char*>(from),
             reinterpret_cast<unsigned char*>(to), p, begin, end, backwards,
             read.data(), ends.data());
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  uint32_t bits = 0, expected = 0;
  for (const uint32_t one : read) bits ^= one;
  bool copied = true;
  for (size_t i = 0; i < words; ++i) {
    const auto byte = static_cast<int64_t>(4 * i) % p.stride;
    const bool touched = begin * p.piece <= byte && byte < end * p.piece;
    if (touched) expected ^= numbers[i];
    copied = copied && to[i] == (kStore && touched ? numbers[i] : 0u);
  }
  BNAR_CHECK(bits == expected, "each piece is read once");
  BNAR_CHECK(copied, "and copied to its place");
  for (const uint64_t one : ends) BNAR_CHECK(one != 1, "each block ends");
}

void TestPieces() {
  for (const bool backwards : {false, true}) {
    TestPieces<4, true>({64, 512, 64}, 0, 8, 3, backwards);
    TestPieces<1, false>({97, 128, 128}, 0, 1, 5, backwards);
    // Some blocks have no rows.
    TestPieces<4, true>({70, 2048, 256}, 3, 5, 7, backwards);
    TestPieces<8, false>({200, 128, 64}, 1, 2, 2, backwards);
  }
}

// Every block sends its rank: the same boxes in each launch, as in a graph. Of
// five blocks, 8 threads add a column, so that all of them add 160 at once.
void TestMessages(int columns, bool prefetch) {
  context = std::to_string(columns) + " columns, " +
            (prefetch ? "messages that are prefetched" : "messages");
  constexpr int kTeam = 5, kRounds = 3;
  cuda::Tiling tiling =
      cuda::CutSlabs({1, 1 << 20, columns * kRounds, 1}, cuda::kWidth, columns);
  cuda::SetTeam(kTeam, &tiling);
  tiling.num_teams = 1;
  BNAR_CHECK(tiling.columns == columns && tiling.num_slabs == kRounds,
             "a slab for each round");
  const cuda::WorkspaceLayout layout = cuda::LayWorkspace(tiling);
  unsigned char* memory = nullptr;
  BNAR_CHECK(
      cudaMalloc(&memory, static_cast<size_t>(layout.bytes)) == cudaSuccess,
      "memory");
  cuda::Workspace workspace{};
  workspace.tag = 77;
  workspace.partial_mailboxes =
      reinterpret_cast<cuda::Mailbox*>(memory + layout.partial_mailboxes);
  workspace.total_mailboxes =
      reinterpret_cast<cuda::Mailbox*>(memory + layout.total_mailboxes);
  for (int launch = 0; launch < 2; ++launch) {
    std::vector<cuda::Sums> totals(cuda::kMaxColumns, {0, 0});
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    const cudaLaunchConfig_t config = {
        dim3(kTeam, 1, 1),
        dim3(kThreads, 1, 1),
        static_cast<size_t>(cuda::SharedBytes(0, 0)),
        nullptr,
        &attribute,
        1};
    const cudaError_t error =
        cudaLaunchKernelEx(&config, micro::SendMessages, tiling, workspace,
                           kRounds, prefetch, totals.data());
    BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
    for (int column = 0; column < tiling.columns; ++column) {
      const cuda::Sums& sums = totals[static_cast<size_t>(column)];
      BNAR_CHECK(sums.first == 0 + 1 + 2 + 3 + 4 &&
                     sums.second == kTeam * (kRounds - 1 + column),
                 "the last round's sums");
    }
  }
  BNAR_CHECK(cudaFree(memory) == cudaSuccess, "memory");
}

void TestWithoutMessages() {
  context = "without messages";
  const cudaError_t error =
      Launch({2, kThreads, static_cast<size_t>(cuda::SharedBytes(0, 0))},
             micro::SendNothing, 3, true);
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar::testing;
  TestPieces();
  for (const int columns : {8, 64, 256}) {
    TestMessages(columns, false);
    TestMessages(columns, true);
  }
  TestWithoutMessages();
  return Finish();
}
