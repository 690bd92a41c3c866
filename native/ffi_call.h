// Reads the operands and results of one custom call and checks each of them. A
// wrong buffer becomes an ffi::Error that names it, never a crash.

#ifndef JAX_BNAR_NATIVE_FFI_CALL_H_
#define JAX_BNAR_NATIVE_FFI_CALL_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "native/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_bnar {

// The array whose dtype others have: dx has that of x, and z, dy, dz and what
// is saved but a mask have that of y.
enum class Like { kX, kY };

class FfiCall {
 public:
  // `x` is the position of the operand x, which determines the shape and the
  // dtype, and `name` is what errors call it. If `has_groups` (`has_inner`) is
  // false, arrays lack the dimension G (S), which is then 1.
  FfiCall(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets, size_t x,
          bool has_groups, bool has_inner, const char* name = "x");

  const Problem& problem() const { return problem_; }

  // Lets y, and what is like it, be F32 where x is F16 or BF16. Whether it is
  // follows from the first result, y, or from the first operand, dy. Without
  // these calls y has the dtype of x.
  void AllowFloat32Y();
  void AllowFloat32Dy();

  // These functions read the operands and results in order. After the first
  // error they return null and report nothing more, so one check at the end is
  // enough.
  const void* Array(Like like, const char* name);
  const void* ArrayIf(bool present, Like like, const char* name);
  // A mask, whose dimensions say what Problem::mask_channels is: (G, bytes) or
  // (G, N, C / mask_channels, mask_channels / 8). The caller lays the latter
  // out in the order of the bits.
  const void* Mask(const char* name);
  VectorOperand Vector(const char* name);
  VectorOperand VectorIf(bool present, const char* name);

  // A flat array with as many elements as x; _call_kernel in
  // jax_bnar/_kernels/kernel_call.py says why it is flat.
  void* ArrayResult(Like like, const char* name);
  void* ArrayResultIf(bool present, Like like, const char* name);
  uint8_t* MaskResultIf(bool present, const char* name);
  // One value for each group and channel.
  void* VectorResult(const char* name);

  // Scratch memory that the caller never reads: uint8, of `bytes` or more.
  void* Workspace(int64_t bytes);

  // Parse the attribute "none", "x", "y", "z" or "mask", and read the operand
  // that this gate needs. Only calls with a residual may have gate "z".
  Gate ParseGate(std::string_view gate, bool may_be_z);
  const void* Saved(Gate gate);
  Activation ParseActivation(std::string_view activation,
                             double negative_slope);
  // These note an error. With outputs of another dtype than x, the activation
  // must be ReLU or none.
  void RequireReluUnlessLikeX(Activation activation);
  // With a mask, the derivative of the activation must follow from a bit.
  void RequireMaskable(Activation activation);
  // The derivative of the activation must follow from what the gate reads.
  void RequireGateOf(Activation activation, Gate gate);
  double CheckEpsilon(double epsilon);

  // Makes it an error if a mask is not in the order of the elements.
  void RequireMaskInOrder();

  // Whether there has been an error. If so, problem() may be meaningless.
  bool failed() const { return !error_.empty(); }

  // Returns the first error, or an error if operands or results are left over.
  xla::ffi::Error Finish();

 private:
  struct View {
    void* data;
    xla::ffi::DataType dtype;
    std::vector<int64_t> dimensions;
  };
  struct Memory {
    const char* begin;
    const char* end;
  };

  static Memory MemoryOf(const xla::ffi::AnyBuffer& buffer);
  void ReadProblem(size_t x, const std::string& name);
  void RequireOwnResults();
  void AllowFloat32(const char* name, const xla::ffi::AnyBuffer& buffer);
  View NextOperand(const char* name);
  View NextResult(const char* name);
  void* Check(const char* name, const View& view, xla::ffi::DataType dtype,
              const std::vector<int64_t>& dimensions);
  void Fail(std::string message);

  xla::ffi::DataType TypeOf(Like like) const;
  std::vector<int64_t> ArrayDimensions() const;
  // Those of a mask like `view`, if it may be one.
  std::vector<int64_t> MaskDimensions(const View& view);
  xla::ffi::DataType AccumulatorType() const;

  xla::ffi::RemainingArgs args_;
  xla::ffi::RemainingRets rets_;
  bool has_groups_;
  bool has_inner_;
  size_t next_operand_ = 0;
  size_t next_result_ = 0;
  std::vector<Memory> operands_;  // Of those that have been read.
  std::vector<Memory> results_;
  Problem problem_{};
  xla::ffi::DataType dtype_{};      // of x
  xla::ffi::DataType out_dtype_{};  // of y
  std::string error_;
};

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_FFI_CALL_H_
