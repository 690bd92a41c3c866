// What a program must know of a platform's kernels before it calls them: how
// large their workspaces are, and in which order they keep the bits of a mask.

#ifndef JAX_BNAR_PYTHON_MODULE_WORKSPACE_SIZES_H_
#define JAX_BNAR_PYTHON_MODULE_WORKSPACE_SIZES_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "cuda/host/tiling.h"
#include "cuda/host/workspace.h"

namespace jax_bnar {

// Adds workspace_bytes, workspace_bound and mask_channels to a module;
// jax_bnar/_native.pyi describes them. They are those of the CUDA kernels where
// has_cuda_kernels(platform). Elsewhere they are 0: the CPU kernels allocate
// their scratch memory, and write rows, and a mask in the order of the
// elements.
template <typename F>
void AddWorkspaceSizes(nanobind::module_& m, F has_cuda_kernels) {
  namespace nb = nanobind;
  m.def(
      "workspace_bytes",
      [has_cuda_kernels](const std::string& platform, int64_t groups,
                         int64_t rows, int64_t channels,
                         int64_t inner) -> int64_t {
        if (!has_cuda_kernels(platform)) return 0;
        return cuda::WorkspaceBytes({groups, rows, channels, inner});
      },
      nb::arg("platform"), nb::arg("groups"), nb::arg("rows"),
      nb::arg("channels"), nb::arg("inner"),
      "Bytes that an operation which sums needs as one more result, or 0.");
  m.def(
      "workspace_bound",
      [has_cuda_kernels](const std::string& platform)
          -> std::tuple<int64_t, int64_t, int64_t> {
        if (!has_cuda_kernels(platform)) return {0, 0, 0};
        const cuda::WorkspaceBound bound = cuda::BoundOfWorkspace();
        return {bound.bytes, bound.bytes_per_group, bound.bytes_per_channel};
      },
      nb::arg("platform"),
      "(b, g, c), where b + groups * (g + channels * c) is never below "
      "workspace_bytes; zeros where that is 0.");
  m.def(
      "mask_channels",
      [has_cuda_kernels](const std::string& platform, int64_t groups,
                         int64_t rows, int64_t channels,
                         int64_t inner) -> int64_t {
        if (!has_cuda_kernels(platform)) return 0;
        return cuda::MaskChannels({groups, rows, channels, inner});
      },
      nb::arg("platform"), nb::arg("groups"), nb::arg("rows"),
      nb::arg("channels"), nb::arg("inner"),
      "How many channels of a row have their bits together in a mask, or 0 "
      "where the bits are in the order of the elements.");
}

}  // namespace jax_bnar

#endif  // JAX_BNAR_PYTHON_MODULE_WORKSPACE_SIZES_H_
