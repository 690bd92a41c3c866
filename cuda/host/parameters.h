// What the host tells the kernels, in plain C++ types that the planner, the
// launchers and the kernels share.

#ifndef JAX_BNAR_CUDA_HOST_PARAMETERS_H_
#define JAX_BNAR_CUDA_HOST_PARAMETERS_H_

#include <cstdint>

#include "native/host_device.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

constexpr int kThreads = 256;  // in every block
constexpr int kWarps = kThreads / 32;
// The number of blocks of each kernel that fit on a multiprocessor, which is in
// its launch bounds.
constexpr int kBlocksPerMultiprocessor = 2;
// The elements that a thread reads at once on the aligned path. Elsewhere it
// reads one.
constexpr int kWidth = 8;
// The bytes that a thread loads into registers at once, or uses between two
// waits for copies (kInFlight in device/tiles.cuh).
constexpr int kBytesAtOnce = 64;
// The bytes of x that a block takes along planes whose size is not a multiple
// of a vector. Its threads have all of them in flight at once.
constexpr int kFlatBytes = 16 * 1024;
// The most columns that a slab has: as many as a block has threads, so that
// each thread has at most one of them where a block prepares its columns.
constexpr int kMaxColumns = kThreads;

// Both sums of a column: of x and of its squares, around an origin; or of e and
// of e * (x - mean).
struct Sums {
  double first;
  double second;
};

// Sizes in shared memory, which the kernels lay out (device/shared_memory.cuh)
// and the planner counts. A block adds the sums of its warps for so many
// columns at a time.
constexpr int kScratchColumns = 64;
constexpr int kScratch = kWarps * kScratchColumns;
// Vectors of constants of the elementwise pass: mean, a, b or bias, k, bias.
constexpr int kConstants = 5;

constexpr int64_t kScratchBytes = static_cast<int64_t>(sizeof(Sums)) * kScratch;
constexpr int64_t kSumsBytes = static_cast<int64_t>(sizeof(Sums)) * kMaxColumns;
constexpr int64_t kConstantsBytes =
    static_cast<int64_t>(sizeof(float)) * kConstants * kMaxColumns;

// The sums and the constants of one input, in a kernel of one pass. Those of
// float64 have twice the size, and have no kernel of both passes.
constexpr int64_t kSharedBytesPerInput = kSumsBytes + 2 * kConstantsBytes;
constexpr int64_t kSharedBytesOfPass = kScratchBytes + kSharedBytesPerInput;
// What a kernel of both passes has besides tiles.
constexpr int64_t kFixedSharedBytes =
    kScratchBytes + kSumsBytes + kConstantsBytes;

// The arrays of which a tile waits on chip between the passes: x, or e and x.
constexpr int kForwardArrays = 1;
constexpr int kBackwardArrays = 2;

// Where the channels of an array lie: last (S == 1), or before other axes.
enum class Layout { kChannelsLast, kChannelsFirst };

// The tiles of `tile_bytes` in a stage: what threads use between two waits. It
// is a power of 2 for the arrays that the kernels keep. Single elements are not
// copied, and need no stages.
BNAR_HOST_DEVICE constexpr int TilesOfStage(int width, int64_t tile_bytes) {
  constexpr int64_t kBytes = kBytesAtOnce * kThreads;
  return width == 1 || tile_bytes > kBytes
             ? 1
             : static_cast<int>(kBytes / tile_bytes);
}

// A thread waits until this many groups of its copies are left, where it might
// leave `groups` of them: all that exist where a block has half of 228 KB.
constexpr int kMostGroupsLeft = 5;
BNAR_HOST_DEVICE constexpr int GroupsLeft(int groups) {
  return groups < 0 ? 0 : groups < kMostGroupsLeft ? groups : kMostGroupsLeft;
}

inline int64_t SharedBytes(int shared_tiles, int64_t tile_bytes) {
  return kFixedSharedBytes + shared_tiles * tile_bytes;
}

// A number by which a kernel divides. With its reciprocal, the kernel needs no
// 64-bit division, which would be a call and take registers.
struct Divisor {
  int64_t value;
  double reciprocal;
};

// How the canonical array is cut. A slab contains what one mean is taken over,
// for a few channels. It is a matrix whose rows are `row_vectors` vectors long.
//   channels last: row n holds `columns` neighbouring channels of row n.
//   channels first: the vectors of one channel follow each other, with
//   `row_vectors` of them in a row. All columns belong to that channel.
// A tile has kThreads vectors, of as many rows as that is. A team of blocks
// shares a slab: block `rank` has its tiles `rank`, `rank + team` and so on, so
// that the blocks go through memory side by side. Teams take slabs in turn.
//
// Each of N inputs is cut in this way, and `num_slabs` counts the slabs of all:
// slab N * i + k lies in input k, at the same place for each k.
struct Tiling {
  Shape shape;
  Layout layout;
  int32_t row_vectors;  // a power of 2, at most 32
  int32_t columns;      // channels of a slab
  int64_t rows;         // of a slab
  int64_t vectors;      // of a row of the array, or of a channel
  // The distance from a vector of a tile to that of the block's next tile, in
  // elements. If channels are first, it is also `tile_vectors` further on in
  // the plane, or in the next one.
  int64_t tile_stride;
  int64_t tile_vectors;
  // Where channels are last: how many channels of a row have their bits
  // together in a mask (all of them, if it is in the order of the elements),
  // the logarithm of this number, and the distance from the bits of a vector of
  // a tile to those of the block's next tile, in vectors.
  int64_t mask_channels;
  int32_t log_mask_channels;
  int64_t mask_tile_stride;
  Divisor vectors_per_plane;
  int64_t plane_stride;  // elements between two planes of a channel
  Divisor slabs_per_group;
  int64_t num_slabs;
  // The distance between the two words of 16 bytes that a thread has of float32
  // where channels are last, in words, a power of 2. So many neighbouring
  // threads share as many vectors: their first words lie side by side, and so
  // do their second ones, so that a warp reads and writes long pieces at once.
  // If it is 1, and where a vector is one word, each thread has a vector of its
  // own.
  int32_t word_step;
  // Blocks of lower rank than `longer_blocks` have so many tiles of a slab, and
  // the others have one less.
  int32_t tiles_per_block;
  int32_t longer_blocks;
  int32_t team;
  int32_t num_teams;
  // Tiles that a block keeps in shared memory, in whole stages.
  int32_t shared_tiles;
};

// Returns the column of element i of a thread whose vector is `vector` in its
// row, where channels are last.
BNAR_HOST_DEVICE int ColumnOf(int vector, int elements, int i, int word_step) {
  const int others = word_step - 1;
  return vector * elements - 4 * (vector & others) + i + (i & 4) * others;
}

// Returns the index in a group's mask of the bit of an element, where channels
// are last.
BNAR_HOST_DEVICE int64_t MaskBit(const Tiling& tiling, int64_t row,
                                 int64_t channel) {
  const int64_t before = channel >> tiling.log_mask_channels;
  return (before * (tiling.rows - 1) + row) * tiling.mask_channels + channel;
}

// The planes of a group as one run of memory, regardless of their borders, and
// the share of it that each block has.
struct FlatTiling {
  Shape shape;
  int64_t elements_per_block;  // a multiple of kThreads * kWidth
  int64_t blocks_per_group;
};

// How the blocks of a team add their sums.
enum class BlockReduction : int32_t {
  kSingleBlock,  // a team of one
  kCluster,      // through distributed shared memory
  kBarrier,      // through global memory, all blocks resident
  kLastBlock,    // the last block adds; the others leave
};

// A number on its way from one block to another. It carries the tag of its
// launch, and both are written and read in one access: a block that sees the
// tag has the number, without a fence.
struct alignas(16) Message {
  double value;
  uint64_t tag;
};

// The sums of a column on their way from one block to another. Each mailbox has
// one sender and one receiver, and serves once in a launch: the receiver
// empties it by a store that nothing orders before another message, so that a
// second one could be lost.
struct Mailbox {
  Message first;
  Message second;
};

// What the blocks of a launch share in memory. Nothing of it needs to be zero
// before the launch, because it is recognised by the launch's tag, and nothing
// has that tag when the launch ends, because a replayed CUDA graph launches the
// kernel with the same tag again.
struct Workspace {
  uint64_t tag;     // never 0
  Sums* totals;     // [slab][column]
  uint64_t* flags;  // [slab][rank], the tag where partial sums are there
  Sums* partials;   // [slab][rank][column]
  // [slab][column][rank], to the block that adds a column.
  Mailbox* partial_mailboxes;
  // [slab][rank][column], to each block of the team.
  Mailbox* total_mailboxes;
};

// NormaliseBuffers and GradientBuffers as kernels take them, with one x. Those
// of two inputs take the parameters of each.
struct ForwardBuffers {
  const void* x;
  const void* z;  // may be null; with two inputs the second one
  void* y;
  uint8_t* mask;
  Activation activation;
};

struct BackwardBuffers {
  const void* dy;
  const void* x;
  const void* saved;
  Gate gate;
  Activation activation;
};

struct ForwardParameters {
  Tiling tiling;
  Workspace workspace;
  BlockReduction block_reduction;
  ForwardBuffers buffers;
  AffineOperands affine;
  // (G, C): results of the whole pass and of the statistics.
  void* mean;
  void* var;
  // Operands of normalise alone.
  VectorOperand given_mean;
  VectorOperand given_var;
};

struct BackwardParameters {
  Tiling tiling;
  Workspace workspace;
  BlockReduction block_reduction;
  BackwardBuffers buffers;
  BackwardOperands operands;  // the halves are given no dmean and dvar
  // Of the last half. The whole pass computes them.
  VectorOperand b;
  VectorOperand k;
  void* dz;
  void* dx;
  // (G, C): dbias and dscale of the whole pass, sum_e and sum_e_centred of the
  // reduction.
  void* first;
  void* second;
};

// Returns ReduceOperands or ApplyOperands in the form of those of a whole pass.
template <typename Half>
BackwardOperands OperandsOfHalf(const Half& half) {
  BackwardOperands operands{};
  operands.mean = half.mean;
  operands.var = half.var;
  operands.scale = half.affine.scale;
  operands.bias = half.affine.bias;
  operands.epsilon = half.affine.epsilon;
  return operands;
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_PARAMETERS_H_
