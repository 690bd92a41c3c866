// Reads the operands and results of one custom call and checks each: a wrong
// buffer becomes an ffi::Error that names it, never a crash.

#ifndef JAX_BNAR_NATIVE_FFI_CALL_H_
#define JAX_BNAR_NATIVE_FFI_CALL_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "native/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_bnar {

class FfiCall {
 public:
  // `x` is the position of x among the operands, and `name` what it is called;
  // it fixes shape and dtype. Without groups (inner) arrays lack the dimension
  // G (S), which is then 1.
  FfiCall(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets, size_t x,
          bool has_groups, bool has_inner, const char* name = "x");

  const Problem& problem() const { return problem_; }

  // Operands and results in order. After an error they return null and change
  // nothing, so that one check at the end is enough.
  const void* Array(const char* name);
  const void* ArrayIf(bool present, const char* name);
  const void* Mask(const char* name);
  VectorOperand Vector(const char* name);
  VectorOperand VectorIf(bool present, const char* name);

  // An array of as many elements as x, flat: see _call_kernel in
  // jax_bnar/_kernels/kernel_call.py.
  void* ArrayResult(const char* name);
  void* ArrayResultIf(bool present, const char* name);
  uint8_t* MaskResultIf(bool present, const char* name);
  // One value for each group and channel.
  void* VectorResult(const char* name);

  // Memory that the caller never looks at: `bytes` or more of uint8.
  void* Workspace(int64_t bytes);

  // "none", "x", "y" or "mask", and the operand that it asks for.
  Gate ParseGate(std::string_view gate);
  Gate ParseDualGate(std::string_view gate);  // without "none"
  const void* Saved(Gate gate);
  bool ParseRelu(std::string_view activation);
  double CheckEpsilon(double epsilon);

  // Whether something was wrong already: problem() may mean nothing then.
  bool failed() const { return !error_.empty(); }

  // The first error, or that operands or results are left over.
  xla::ffi::Error Finish();

 private:
  struct View {
    void* data;
    xla::ffi::DataType dtype;
    std::vector<int64_t> dimensions;
  };

  void ReadProblem(size_t x, const std::string& name);
  View NextOperand(const char* name);
  View NextResult(const char* name);
  void* Check(const char* name, const View& view, xla::ffi::DataType dtype,
              const std::vector<int64_t>& dimensions);
  void Fail(std::string message);

  std::vector<int64_t> ArrayDimensions() const;
  std::vector<int64_t> MaskDimensions() const;
  xla::ffi::DataType AccumulatorType() const;

  xla::ffi::RemainingArgs args_;
  xla::ffi::RemainingRets rets_;
  bool has_groups_;
  bool has_inner_;
  size_t next_operand_ = 0;
  size_t next_result_ = 0;
  Problem problem_{};
  xla::ffi::DataType dtype_{};
  std::string error_;
};

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_FFI_CALL_H_
