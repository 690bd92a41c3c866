"""One mistake each in the CUDA kernels, for `tests/kernels/test_cuda_mutations.py`."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    header: str
    right: str
    wrong: str
    kernels: str  # with the element, the source that is compiled with the broken header
    strategy: str
    shapes: str = "few"
    element: str = "bf16"


MUTATIONS = {
    "a message that is taken before it comes": Mutation(
        # Forward's blocks come so close behind each other here that all messages are there in time.
        "team_sums.cuh", "    if (arrived) break;\n", "    break;\n", "backward", "on_chip"
    ),
    "a message of which only one half has come": Mutation(
        "team_sums.cuh", "first[k].tag == tag && second[k].tag == tag", "first[k].tag == tag",
        "backward", "on_chip",
    ),
    "a message that is left to the next launch": Mutation(
        "team_sums.cuh", "      StoreMessage(&boxes[k * distance].second, {0, 0});\n", "",
        "forward", "on_chip",
    ),
    "flags that are left to the next launch": Mutation(
        "team_sums.cuh", "    StoreFlag(flags + other, 0);\n", "", "backward", "two_kernels"
    ),
    "a flag that any memory may hold": Mutation(
        "team_sums.cuh", "LoadFlag(flags + other) != workspace.tag",
        "LoadFlag(flags + other) == 0", "forward", "two_kernels",
    ),
    "a scale that nobody loads while the team waits": Mutation(
        "team_sums.cuh", "  meanwhile();\n\n", "", "forward", "on_chip"
    ),
    "var and scale of the slab before": Mutation(
        "team_sums.cuh",
        "    ArriveAtCluster();\n    meanwhile();\n",
        "    ArriveAtCluster();\n",
        "backward",
        "cluster",
        "all",
    ),
    "no barrier of the block": Mutation(
        "team_sums.cuh",
        "return element(begin + j); });\n  __syncthreads();\n",
        "return element(begin + j); });\n",
        "forward",
        "two_kernels",
    ),
    "columns of which only one part is added": Mutation(
        "team_sums.cuh", "begin < kElements; begin += kCount)", "begin < kCount; begin += kCount)",
        "forward", "cluster", "all",
    ),
    "the first part of the columns for all": Mutation(
        "team_sums.cuh", "return element(begin + j);", "return element(j);",
        "backward", "cluster", "all",
    ),
    "parts of the columns in each other's place": Mutation(
        "team_sums.cuh", "thread / kCount, begin + thread % kCount)",
        "thread / kCount, thread % kCount)", "forward", "cluster", "all",
    ),
    "more columns than the scratch memory has": Mutation(
        "team_sums.cuh", "tiling.row_vectors * kElements <= kScratchColumns)",
        "tiling.row_vectors * kElements <= 2 * kScratchColumns)", "backward", "cluster", "all",
    ),
    "a part that is added before the last one was read": Mutation(
        "team_sums.cuh", "    *to = sums;\n  }\n  __syncthreads();\n", "    *to = sums;\n  }\n",
        "forward", "cluster", "all",
    ),
    "columns that no thread of the team adds": Mutation(
        "team_sums.cuh",
        "first += adder.step) {\n    const int column = first + adder.offset;\n    Sums",
        "first += columns) {\n    const int column = first + adder.offset;\n    Sums",
        "forward", "on_chip", "all",
    ),
    "columns that two threads of the team add": Mutation(
        "team_sums.cuh", "(kThreads >> log_parts) * team};", "(kThreads >> log_parts)};",
        "forward", "on_chip", "all",
    ),
    "a column of which the sums of other warps are not there yet": Mutation(
        "team_sums.cuh", "shared.scratch[thread / 32] = sums;\n      __syncthreads();\n",
        "shared.scratch[thread / 32] = sums;\n", "forward", "on_chip", "all",
    ),
    "a block alone that does not wait for its own threads": Mutation(
        "team_sums.cuh", "    meanwhile();\n    __syncthreads();\n    return;\n",
        "    meanwhile();\n    return;\n", "forward", "cluster", "all",
    ),
    "no barrier of the cluster": Mutation(
        "team_sums.cuh",
        "    meanwhile();\n    WaitForCluster();\n",
        "    meanwhile();\n",
        "forward",
        "cluster",
        "all",
    ),
    "a wait for a cluster at which the block has not arrived": Mutation(
        "team_sums.cuh",
        "    ArriveAtCluster();\n    meanwhile();\n",
        "    meanwhile();\n",
        "forward",
        "cluster",
        "all",
    ),
    "two arrivals at one barrier of the cluster": Mutation(
        "team_sums.cuh",
        "    ArriveAtCluster();\n    meanwhile();\n",
        "    ArriveAtCluster();\n    ArriveAtCluster();\n    meanwhile();\n",
        "backward",
        "cluster",
        "all",
    ),
    "blocks leave a cluster that still reads, or write over what it reads": Mutation(
        "team_sums.cuh",
        "        [] {\n          ArriveAtCluster();\n          WaitForCluster();\n        });",
        "        [] {});",
        "backward",
        "cluster",
        "all",
    ),
    "constants used before they are there": Mutation(
        "gradient_apply.cuh", "  }\n  __syncthreads();\n}\n", "  }\n}\n", "backward", "two_kernels"
    ),
    "one row too many": Mutation(
        "slab.cuh", "last_row < tiling.rows ?", "last_row <= tiling.rows ?",
        "forward", "two_kernels",
    ),
    "one row too few": Mutation(
        "slab.cuh", "last_row < tiling.rows ?", "last_row + 1 < tiling.rows ?",
        "backward", "on_chip",
    ),
    "one vector too many of a channel": Mutation(
        "slab.cuh",
        "threadIdx.x < tiling.vectors ? tiles_", "threadIdx.x <= tiling.vectors ? tiles_",
        "forward", "on_chip", "all",
    ),
    "a block that leaves out its last tile": Mutation(
        "slab.cuh", "rank < tiling.longer_blocks ?", "rank + 1 < tiling.longer_blocks ?",
        "backward", "on_chip",
    ),
    "the last tile of a slab in the first block": Mutation(
        "slab.cuh", "(tiles_ - 1) * tiling.team + rank;", "(tiles_ - 1) * tiling.team;",
        "forward", "two_kernels",
    ),
    "a tile that two blocks have in part": Mutation(
        "slab.cuh", "static_cast<int64_t>(rank_) * TileRows() + RowInTile();",
        "static_cast<int64_t>(rank_) * (TileRows() - 1) + RowInTile();", "backward", "two_kernels",
    ),
    "planes of which all blocks have the same tiles": Mutation(
        "slab.cuh", "first_vector_ = static_cast<int64_t>(rank) * kThreads + threadIdx.x;",
        "first_vector_ = threadIdx.x;", "backward", "on_chip", "all",
    ),
    "a block that goes back as if its tiles of a plane were neighbours": Mutation(
        "slab.cuh", "static_cast<int64_t>(tile) * tiling.team * kThreads;",
        "static_cast<int64_t>(tile) * kThreads;", "forward", "on_chip", "all",
    ),
    "the last items of a loop are not used": Mutation(
        "tiles.cuh", "if (k < count) use(", "if (k + 1 < count) use(", "forward", "two_kernels"
    ),
    "a loop uses an item before it is loaded": Mutation(
        "tiles.cuh", "if (k + kDepth < count) load(&ring[k]);", "", "backward", "two_kernels"
    ),
    "the last items of a loop in stages are not used": Mutation(
        "tile_stream.cuh", "if (skip <= k && k < end) use(",
        "if (skip <= k && k + 1 < end) use(", "forward", "on_chip", "stream",
    ),
    "a loop in stages uses an item before it is loaded": Mutation(
        "tile_stream.cuh", "if (skip <= next && next < end) load(&ring[k % kDepth]);", "",
        "forward", "on_chip", "stream",
    ),
    "tiles that are read again in the wrong place": Mutation(
        "normalise.cuh", "const int last = shared_end + count - 1;",
        "const int last = slab.tiles() - 1;", "forward", "on_chip", "all",
    ),
    "a wait that leaves the stage that is used": Mutation(
        "tile_stream.cuh", "WaitForAllCopiesBut(slots / kStageTiles - 1)",
        "WaitForAllCopiesBut(slots / kStageTiles)", "forward", "on_chip", "stream",
    ),
    "a wait of backward that leaves the stage that is used": Mutation(
        "tile_stream.cuh", "WaitForAllCopiesBut(slots / kStageTiles - 1)",
        "WaitForAllCopiesBut(slots / kStageTiles)", "backward", "on_chip", "stream",
    ),
    "a wait of the second pass that leaves the stage that is used": Mutation(
        "tile_stream.cuh", "WaitForStage(stream_.shared_tiles())",
        "WaitForStage(stream_.shared_tiles() + kStageTiles)", "forward", "on_chip", "stream",
    ),
    "no wait for tiles that are read again": Mutation(
        "tile_stream.cuh", "if constexpr (kCopied)", "if constexpr (!kCopied)",
        "backward", "on_chip", "stream",
    ),
    "a wait that leaves one group too many": Mutation(
        "../host/parameters.h", "groups < kMostGroupsLeft ? groups ",
        "groups < kMostGroupsLeft ? groups + 1 ", "forward", "on_chip", "stream",
    ),
    "a stage that is filled before it has been used": Mutation(
        "tile_stream.cuh", "left_ > stream_.shared_tiles(), slot,",
        "left_ > stream_.shared_tiles(), ring.Next(slot, kStageTiles),",
        "backward", "on_chip", "stream",
    ),
    "a stage that is filled before its last tile has been used": Mutation(
        "tile_stream.cuh", "        if ((k + 1) % kStageTiles == 0) after();\n",
        "        if ((k + 2) % kStageTiles == 0) after();\n", "forward", "on_chip", "stream",
    ),
    "a stage that is never filled again": Mutation(
        "tile_stream.cuh",
        "if ((k + 1) % kStageTiles == 0 && k + 1 - kStageTiles < end) after();", "",
        "backward", "on_chip", "stream",
    ),
    "a tile that is not copied": Mutation(
        "tile_stream.cuh", "(k < left && !soon,", "(k + 1 < left && !soon,",
        "forward", "on_chip", "stream",
    ),
    "a tile that does not exist": Mutation(
        "tile_stream.cuh", "(k < left && !soon,", "(0 < left && !soon,",
        "backward", "on_chip", "stream",
    ),
    "a tile that is not read again": Mutation(
        "tile_stream.cuh",
        "arrays_, left_, /*again=*/false,", "arrays_, left_ - 1, /*again=*/false,",
        "forward", "on_chip", "stream",
    ),
    "tiles that are read again in the reverse order": Mutation(
        "tile_stream.cuh", "slot += kStep * Ring::kSlotWords;", "slot += Ring::kSlotWords;",
        "backward", "on_chip", "stream",
    ),
    "a tile that stays as if it were read again": Mutation(
        "tile_stream.cuh", "max(SlotsOf(left_ + ring.slots() - stream_.shared_tiles()), 0)",
        "max(SlotsOf(left_ + ring.slots() - stream_.shared_tiles() + 1), 0)",
        "backward", "on_chip", "stream",
    ),
    "a stage that stays without the tiles that it lacks": Mutation(
        "tile_stream.cuh", "max(SlotsOf(left_ + ring.slots() - stream_.shared_tiles()), 0)",
        "max(left_ + ring.slots() - stream_.shared_tiles(), 0)", "forward", "on_chip", "stream",
    ),
    "the wrong tile is read again": Mutation(
        "tile_stream.cuh", "max(left_ - 1, 0)", "max(left_ - 2, 0)", "backward", "on_chip", "stream"
    ),
    "a stage of the second pass that begins one slot too early": Mutation(
        "tile_stream.cuh", "slot_ = ring.Before(slot_ + Ring::kSlotWords);",
        "slot_ = ring.Before(slot_);", "backward", "on_chip", "stream",
    ),
    "the second pass begins with the wrong tile": Mutation(
        "tile_stream.cuh", "slot_(stream.ring_.Before(stream.slot_, empty_ + 1))",
        "slot_(stream.ring_.Before(stream.slot_, empty_))", "forward", "on_chip", "stream",
    ),
    "the second pass begins with an empty slot": Mutation(
        "tile_stream.cuh", "slot_(stream.ring_.Before(stream.slot_, empty_ + 1))",
        "slot_(stream.ring_.Before(stream.slot_))", "backward", "on_chip", "stream",
    ),
    "a second pass that takes its first stage for a whole one": Mutation(
        "tile_stream.cuh", "          empty_);\n      empty_ = 0;\n",
        "          0);\n      empty_ = 0;\n", "forward", "on_chip", "stream",
    ),
    "empty slots where the gate begins": Mutation(
        "tile_stream.cuh", "      empty_ = 0;\n", "", "backward", "on_chip", "stream"
    ),
    "a slab that begins in an empty slot": Mutation(
        "tile_stream.cuh", "stream_.slot_ = ring.Next(slot, EmptySlots(count));",
        "stream_.slot_ = slot;", "backward", "on_chip", "stream",
    ),
    "a ring that goes on one slot too late": Mutation(
        "tile_ring.cuh", "return slot < end ? slot : slot - end;",
        "return slot < end ? slot : slot - end + kSlotWords;", "backward", "on_chip", "stream",
    ),
    "a ring that ends one slot too early": Mutation(
        "tile_ring.cuh", "return slot >= 0 ? slot : slot + slots() * kSlotWords;",
        "return slot >= 0 ? slot : slot + (slots() - 1) * kSlotWords;",
        "forward", "on_chip", "stream",
    ),
    "the first tiles of a slab in the wrong slots": Mutation(
        "tile_stream.cuh", "      int slot = slot_;\n", "      int slot = ring_.At(0);\n",
        "forward", "on_chip", "stream",
    ),
    "the slots of the stage before": Mutation(
        "tile_stream.cuh", "            slot = ring.Next(slot, kStageTiles);\n", "",
        "forward", "on_chip", "stream",
    ),
    "a stage without a tile that counts no copies": Mutation(
        "tile_stream.cuh", "    CloseCopies();\n", "    if (left > 0) CloseCopies();\n",
        "forward", "on_chip", "stream",
    ),
    "a stage that stays and counts no copies": Mutation(
        "tile_stream.cuh", "wait, CloseCopies);", "wait, [] {});", "backward", "on_chip", "stream"
    ),
    "a run of slots that goes on behind the ring": Mutation(
        "tile_ring.cuh", "slots() - *slot / kSlotWords);", "slots() + 1 - *slot / kSlotWords);",
        "forward", "on_chip", "stream",
    ),
    "a run of slots that goes on before the ring": Mutation(
        "tile_ring.cuh", "*slot / kSlotWords + 1);", "*slot / kSlotWords + 2);",
        "backward", "on_chip", "stream",
    ),
    "dy that is kept in the place of e": Mutation(
        "gradient_sums.cuh", "decltype(reuse)::value == Reuse::kNever",
        "decltype(reuse)::value == Reuse::kSoon", "backward", "on_chip", "stream",
    ),
    "dy that is read again in the place of dz": Mutation(
        "gradient_apply.cuh", "const void* dy = Form::kStoreDz ? p.dz : p.buffers.dy;",
        "const void* dy = p.buffers.dy;", "backward", "on_chip", "stream",
    ),
    "a tile that is read again without its gate": Mutation(
        "gradient_apply.cuh", "const int kept = min(count, pass.kept());",
        "const int kept = min(count, pass.kept() + 1);", "backward", "on_chip", "stream",
    ),
    "a tile left out where sums are added": Mutation(
        "tiles.cuh", "    begin = end;\n", "    begin = end + 1;\n", "forward", "on_chip", "many"
    ),
    "a plane that a cursor does not leave": Mutation(
        "slab.cuh", "in_plane_ >= vectors ", "in_plane_ > vectors ",
        "forward", "two_kernels", "all",
    ),
    "two bits of the mask in each other's place": Mutation(
        "vector.cuh", "0x08040201u", "0x08040102u", "forward", "two_kernels"
    ),
    "a bit of the mask that two elements read": Mutation(
        "vector.cuh", "parts[1] &= RepeatSigns<0xbbaa>(low)",
        "parts[1] &= RepeatSigns<0xaaaa>(low)", "backward", "two_kernels",
    ),
    "bytes of a mask that have the first words alone": Mutation(
        "vector.cuh", "const int at = word < step_ ? 0 : 4;", "const int at = 0;",
        "forward", "two_kernels", element="f32",
    ),
    "bits of a mask that are those of another word": Mutation(
        "vector.cuh", "From(from + step_ / 2, byte)", "From(from, byte)",
        "backward", "two_kernels", element="f32",
    ),
    "a mask in which half of the channels lie in the place of others": Mutation(
        "../host/parameters.h", "channel >> tiling.log_mask_channels;",
        "channel >> (tiling.log_mask_channels + 1);", "backward", "on_chip",
    ),
    "a run of channels of the mask that begins one row too late": Mutation(
        "../host/parameters.h", "before * (tiling.rows - 1) + row", "before * tiling.rows + row",
        "backward", "cluster",
    ),
    "the mask of the first group for all": Mutation(
        "slab.cuh", "Byte* group = mask + group_ * shape.mask_bytes_per_group();",
        "Byte* group = mask;", "forward", "two_kernels",
    ),
    "the next tile of a mask one byte too far": Mutation(
        "mask_cursor.cuh", "byte_ += kStep * tiling_.mask_tile_stride;",
        "byte_ += kStep * (tiling_.mask_tile_stride + 1);", "dual", "two_kernels",
    ),
    "single elements that read the mask as if it were in their order": Mutation(
        "mask_cursor.cuh", "bit_ += kStep * tiling_.mask_tile_stride;",
        "bit_ += kStep * tiling_.tile_stride;", "backward", "two_kernels",
    ),
    "a mask that is packed in the order of the elements": Mutation(
        "pack_mask.cuh", "if (bytes == 0) return byte * 8;", "return byte * 8;",
        "forward", "two_kernels",
    ),
    "half of a warp's sums left out": Mutation(
        "team_sums.cuh", "      Add(&halves[j], ExchangeLanes(sent, distance));\n", "",
        "forward", "cluster",
    ),
    "statistics of the first input for both": Mutation(
        "dual_forward.cuh", "index % 2 == 0 ? first : second;", "first;", "dual", "two_kernels"
    ),
    "one of two biases left out": Mutation(
        "dual_shared_memory.cuh",
        "    Constant<A>(which)[column] += second.Constant<A>(which)[column];\n", "",
        "dual", "two_kernels",
    ),
    "sums of the second input in the place of the first one's constants": Mutation(
        "dual_shared_memory.cuh", "(sums) + kSharedBytesPerInput);", "(sums) + kSumsBytes);",
        "dual", "two_kernels",
    ),
    "the bias of two inputs used before it is there": Mutation(
        "dual_backward.cuh",
        "shared.AddConstants<A>(kGateBias, column);\n  __syncthreads();\n",
        "shared.AddConstants<A>(kGateBias, column);\n",
        "dual", "two_kernels",
    ),
    "a gate that does not see the second input": Mutation(
        "dual_backward.cuh", "normaliser.Rounded(item->x, item->x2)",
        "normaliser.Rounded(item->x, item->x)", "dual", "two_kernels",
    ),
    "partial sums of two inputs in one place": Mutation(
        "dual_backward.cuh",
        "StorePartials(p.tiling, shared, p.workspace, 2 * index, rank)",
        "StorePartials(p.tiling, shared, p.workspace, 2 * index + 1, rank)",
        "dual", "two_kernels",
    ),
    "sums of the second input around the mean of the first": Mutation(
        "dual_backward.cuh", "(shared.second, kGateMean, slab)", "(shared, kGateMean, slab)",
        "dual", "two_kernels",
    ),
    "the gradient of the second input with constants of the first": Mutation(
        "dual_backward.cuh", "(*applier2).Of(item.e, item.x2)", "(*applier1).Of(item.e, item.x2)",
        "dual", "two_kernels",
    ),
    "an activation that does not see the second input": Mutation(
        "dual_backward.cuh", "normaliser.Unrounded(item->x, item->x2)",
        "normaliser.Unrounded(item->x, item->x)", "dual", "two_kernels",
    ),
    "an activation of two inputs as if there were none": Mutation(
        "forms.cuh",
        "if (activation.is_curve()) return f(ForwardForm<true, false, false, true>{});", "",
        "dual", "two_kernels",
    ),
    "two inputs without an activation as if there were a ReLU": Mutation(
        "forms.cuh", "if (!activation.is_relu()) return f(ForwardForm<true, false, false>{});", "",
        "dual", "two_kernels",
    ),
    "one element too many of a plane": Mutation(
        "normalise_flat.cuh",
        "in_plane + i < inner",
        "in_plane + i <= inner",
        "forward",
        "two_kernels", "all",
    ),
    "a residual that the derivative of SiLU does not see": Mutation(
        "gate.cuh", "if constexpr (kGate == Gate::kZ) z = item->saved.z;", "",
        "backward", "on_chip",
    ),
    "the gradient of SiLU without its second term": Mutation(
        "curves.cuh", "return of.s * (u * of.rest + 1) * dy;", "return of.s * dy;",
        "backward", "two_kernels",
    ),
    "an ELU whose gradient is that of a leaky ReLU": Mutation(
        "curves.cuh", "u > 0 ? dy : ExpOfNegated<T>(-u) * dy", "u > 0 ? dy : A(0.5) * dy",
        "backward", "on_chip",
    ),
    "a GELU without its cube": Mutation(
        "curves.cuh", "const A w = u * (u * u * kThird + kFirst);", "const A w = u * kFirst;",
        "forward", "cluster",
    ),
    "an exact GELU that knows one sign": Mutation(
        "curves.cuh", "return u > 0 ? 1 - beyond : beyond;", "return beyond;",
        "forward", "on_chip",
    ),
    "a function of which two elements are left out": Mutation(
        "curves.cuh", "turn < kElements / kOfTurn", "turn < kElements / kOfTurn - Chosen::kIsLong",
        "backward", "two_kernels",
    ),
    "a Mish that knows one sign": Mutation(
        "curves.cuh", "numerator(u > 0 ? 2 * m + 1 : m * (m + 2))", "numerator(2 * m + 1)",
        "backward", "two_kernels",
    ),
    "a leaky ReLU whose gradient does not leak": Mutation(
        "curves.cuh", "IsOpen(u) ? dy : dy * negative_slope", "IsOpen(u) ? dy : A{0}",
        "backward", "cluster",
    ),
    "a mask of ReLU6 as if it were ReLU": Mutation(
        "curves.cuh", "return u > 0 && u < 6;", "return u > 0;", "forward", "two_kernels"
    ),
    "an activation that is left out": Mutation(
        "normalise.cuh", "y.Set(curve_.Value(normaliser_.Unrounded(x, z)));",
        "y.Set(normaliser_.Unrounded(x, z));", "forward", "on_chip",
    ),
    "planes that no activation sees": Mutation(
        "normalise_flat.cuh", "xs[k].Set(curve.Value(values));", "xs[k].Set(values);",
        "forward", "two_kernels", "all",
    ),
}  # fmt: skip
