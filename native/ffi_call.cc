#include "native/ffi_call.h"

#include <cmath>
#include <sstream>
#include <utility>

namespace jax_bnar {
namespace {

namespace ffi = xla::ffi;

std::string Describe(ffi::DataType dtype,
                     const std::vector<int64_t>& dimensions) {
  std::ostringstream out;
  out << dtype << '[';
  for (size_t i = 0; i < dimensions.size(); ++i) {
    out << (i ? "," : "") << dimensions[i];
  }
  out << ']';
  return out.str();
}

std::vector<int64_t> DimensionsOf(const ffi::AnyBuffer& buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().end()};
}

}  // namespace

FfiCall::FfiCall(ffi::RemainingArgs args, ffi::RemainingRets rets, size_t x,
                 bool has_groups, bool has_inner, const char* name)
    : args_(args), rets_(rets), has_groups_(has_groups), has_inner_(has_inner) {
  operands_.reserve(args_.size());
  results_.reserve(rets_.size());
  ReadProblem(x, name);
}

void FfiCall::ReadProblem(size_t x, const std::string& name) {
  const auto buffer = args_.get<ffi::AnyBuffer>(x);
  if (!buffer.has_value()) return Fail("operand " + name + " is missing");
  const std::vector<int64_t> d = DimensionsOf(*buffer);
  dtype_ = buffer->element_type();
  switch (dtype_) {
    case ffi::F16:
      problem_.dtype = DType::kFloat16;
      break;
    case ffi::BF16:
      problem_.dtype = DType::kBFloat16;
      break;
    case ffi::F32:
      problem_.dtype = DType::kFloat32;
      break;
    case ffi::F64:
      problem_.dtype = DType::kFloat64;
      break;
    default:
      return Fail(name + " must be F16, BF16, F32 or F64, got " +
                  Describe(dtype_, d));
  }
  out_dtype_ = dtype_;
  problem_.out_dtype = problem_.dtype;
  const std::string expected = std::string(has_groups_ ? "(G, " : "(") +
                               "N, C" + (has_inner_ ? ", S)" : ")");
  if (d.size() != 2u + has_groups_ + has_inner_) {
    return Fail(name + " must have the dimensions " + expected + ", got " +
                Describe(dtype_, d));
  }
  for (const int64_t size : d) {
    if (size < 1)
      return Fail(name + " must not be empty, got " + Describe(dtype_, d));
  }
  const size_t n = has_groups_ ? 1 : 0;
  problem_.shape =
      Shape{has_groups_ ? d[0] : 1, d[n], d[n + 1], has_inner_ ? d[n + 2] : 1};
}

void FfiCall::AllowFloat32Y() {
  auto y = rets_.get<ffi::AnyBuffer>(0);
  if (y.has_value()) AllowFloat32("y", **y);
}

void FfiCall::AllowFloat32Dy() {
  const auto dy = args_.get<ffi::AnyBuffer>(0);
  if (dy.has_value()) AllowFloat32("dy", *dy);
}

void FfiCall::AllowFloat32(const char* name, const ffi::AnyBuffer& buffer) {
  const ffi::DataType dtype = buffer.element_type();
  if ((dtype_ != ffi::F16 && dtype_ != ffi::BF16) || dtype == dtype_) return;
  if (dtype != ffi::F32) {
    std::ostringstream expected;
    expected << name << " must be " << dtype_ << ", as x is, or F32, got ";
    return Fail(expected.str() + Describe(dtype, DimensionsOf(buffer)));
  }
  out_dtype_ = dtype;
  problem_.out_dtype = DType::kFloat32;
}

const void* FfiCall::Array(Like like, const char* name) {
  return Check(name, NextOperand(name), TypeOf(like), ArrayDimensions());
}

const void* FfiCall::ArrayIf(bool present, Like like, const char* name) {
  return present ? Array(like, name) : nullptr;
}

const void* FfiCall::Mask(const char* name) {
  const View view = NextOperand(name);
  return Check(name, view, ffi::U8, MaskDimensions(view));
}

VectorOperand FfiCall::Vector(const char* name) {
  const View view = NextOperand(name);
  const Shape& shape = problem_.shape;
  const bool shared = !view.dimensions.empty() && view.dimensions.front() == 1;
  const int64_t groups = shared ? 1 : shape.groups;
  return {Check(name, view, AccumulatorType(), {groups, shape.channels}),
          groups};
}

VectorOperand FfiCall::VectorIf(bool present, const char* name) {
  return present ? Vector(name) : VectorOperand{};
}

void* FfiCall::ArrayResult(Like like, const char* name) {
  return Check(name, NextResult(name), TypeOf(like), {problem_.shape.size()});
}

void* FfiCall::ArrayResultIf(bool present, Like like, const char* name) {
  return present ? ArrayResult(like, name) : nullptr;
}

uint8_t* FfiCall::MaskResultIf(bool present, const char* name) {
  if (!present) return nullptr;
  const View view = NextResult(name);
  return static_cast<uint8_t*>(
      Check(name, view, ffi::U8, MaskDimensions(view)));
}

void* FfiCall::VectorResult(const char* name) {
  return Check(name, NextResult(name), AccumulatorType(),
               {problem_.shape.groups, problem_.shape.channels});
}

void* FfiCall::Workspace(int64_t bytes) {
  const View view = NextResult("workspace");
  if (failed()) return nullptr;
  if (view.dtype != ffi::U8 || view.dimensions.size() != 1 ||
      view.dimensions[0] < bytes) {
    Fail("workspace must be " + Describe(ffi::U8, {bytes}) + " or more, got " +
         Describe(view.dtype, view.dimensions));
    return nullptr;
  }
  return view.data;
}

Gate FfiCall::ParseGate(std::string_view gate, bool may_be_z) {
  if (gate == "y") return Gate::kY;
  if (gate == "mask") return Gate::kMask;
  if (gate == "x") return Gate::kX;
  if (gate == "z" && may_be_z) return Gate::kZ;
  if (gate != "none") {
    Fail("attribute gate must be 'none', 'x', 'y'" +
         std::string(may_be_z ? ", 'z'" : "") + " or 'mask', got '" +
         std::string(gate) + "'");
  }
  return Gate::kNone;
}

const void* FfiCall::Saved(Gate gate) {
  switch (gate) {
    case Gate::kY:
    case Gate::kZ:
      return Array(Like::kY, "saved");
    case Gate::kMask:
      return Mask("saved");
    case Gate::kNone:
    case Gate::kX:
      break;
  }
  return nullptr;
}

Activation FfiCall::ParseActivation(std::string_view activation,
                                    double negative_slope) {
  if (!(negative_slope >= 0 && negative_slope < 1)) {
    Fail("attribute negative_slope must be at least 0 and below 1, got " +
         std::to_string(negative_slope));
  }
  const auto of = [&](ActivationKind kind) {
    // A slope of -0 becomes 0: the gate of y would lose the sign of u.
    return Activation{kind, negative_slope + 0.0};
  };
  if (activation == "relu") return of(ActivationKind::kRelu);
  if (activation == "relu6") return of(ActivationKind::kRelu6);
  if (activation == "leaky_relu") return of(ActivationKind::kLeakyRelu);
  if (activation == "silu") return of(ActivationKind::kSilu);
  if (activation == "hard_silu") return of(ActivationKind::kHardSilu);
  if (activation == "elu") return of(ActivationKind::kElu);
  if (activation == "gelu") return of(ActivationKind::kGelu);
  if (activation == "exact_gelu") return of(ActivationKind::kExactGelu);
  if (activation == "mish") return of(ActivationKind::kMish);
  if (activation != "none") {
    Fail(
        "attribute activation must be 'none', 'relu', 'relu6', 'leaky_relu',"
        " 'silu', 'hard_silu', 'elu', 'gelu', 'exact_gelu' or 'mish', got '" +
        std::string(activation) + "'");
  }
  return of(ActivationKind::kNone);
}

void FfiCall::RequireReluUnlessLikeX(Activation activation) {
  if (activation.is_curve() && out_dtype_ != dtype_) {
    std::ostringstream message;
    message << "y and dy must be " << dtype_ << ", as x is, with other"
            << " activations than ReLU, got " << out_dtype_;
    Fail(message.str());
  }
}

void FfiCall::RequireMaskable(Activation activation) {
  if (activation.kind == ActivationKind::kNone) {
    Fail("attribute save_mask must be false without an activation");
  } else if (!activation.is_piecewise_linear()) {
    Fail(
        "attribute save_mask must be false with this activation, whose"
        " derivative does not follow from a bit");
  }
}

void FfiCall::RequireGateOf(Activation activation, Gate gate) {
  if (activation.kind == ActivationKind::kNone && gate != Gate::kNone) {
    Fail("attribute gate must be 'none' without an activation");
    return;
  }
  if (gate == Gate::kZ && activation.is_piecewise_linear()) {
    Fail(
        "attribute gate must not be 'z' with this activation, whose derivative"
        " follows from y");
  }
  if ((gate == Gate::kY || gate == Gate::kMask) &&
      !activation.is_piecewise_linear()) {
    Fail(
        "attribute gate must be 'none', 'x' or 'z' with this activation,"
        " whose derivative does not follow from y");
  }
}

double FfiCall::CheckEpsilon(double epsilon) {
  if (!(epsilon > 0) || !std::isfinite(epsilon)) {
    Fail("attribute epsilon must be finite and > 0, got " +
         std::to_string(epsilon));
  }
  return epsilon;
}

void FfiCall::RequireMaskInOrder() {
  if (problem_.mask_channels > 0) {
    Fail("a mask must have the dimensions (G, bytes) on this platform");
  }
}

ffi::Error FfiCall::Finish() {
  if (next_operand_ < args_.size()) {
    Fail("expected " + std::to_string(next_operand_) + " operands, got " +
         std::to_string(args_.size()));
  }
  if (next_result_ < rets_.size()) {
    Fail("expected " + std::to_string(next_result_) + " results, got " +
         std::to_string(rets_.size()));
  }
  if (!failed()) RequireOwnResults();
  if (!failed()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("jax_bnar: " + error_);
}

// The kernels read operands after they have written results, of other channels
// or of the same one. XLA gives a result memory of its own unless the call asks
// for that of an operand.
void FfiCall::RequireOwnResults() {
  for (size_t i = 0; i < results_.size(); ++i) {
    for (size_t j = 0; j < operands_.size(); ++j) {
      if (results_[i].begin < operands_[j].end &&
          operands_[j].begin < results_[i].end) {
        Fail("result " + std::to_string(i) + " must not be in the memory of" +
             " operand " + std::to_string(j) +
             "; leave it out of input_output_aliases");
      }
    }
  }
}

FfiCall::Memory FfiCall::MemoryOf(const ffi::AnyBuffer& buffer) {
  const char* begin = static_cast<const char*>(buffer.untyped_data());
  return {begin, begin + buffer.size_bytes()};
}

FfiCall::View FfiCall::NextOperand(const char* name) {
  const auto buffer = args_.get<ffi::AnyBuffer>(next_operand_++);
  if (!buffer.has_value()) {
    Fail(std::string("operand ") + name + " is missing");
    return {};
  }
  operands_.push_back(MemoryOf(*buffer));
  return {buffer->untyped_data(), buffer->element_type(),
          DimensionsOf(*buffer)};
}

FfiCall::View FfiCall::NextResult(const char* name) {
  auto result = rets_.get<ffi::AnyBuffer>(next_result_++);
  if (!result.has_value()) {
    Fail(std::string("result ") + name + " is missing");
    return {};
  }
  ffi::AnyBuffer& buffer = **result;
  results_.push_back(MemoryOf(buffer));
  return {buffer.untyped_data(), buffer.element_type(), DimensionsOf(buffer)};
}

void* FfiCall::Check(const char* name, const View& view, ffi::DataType dtype,
                     const std::vector<int64_t>& dimensions) {
  if (failed()) return nullptr;
  if (view.dtype != dtype || view.dimensions != dimensions) {
    Fail(std::string(name) + " must be " + Describe(dtype, dimensions) +
         ", got " + Describe(view.dtype, view.dimensions));
    return nullptr;
  }
  return view.data;
}

void FfiCall::Fail(std::string message) {
  if (!failed()) error_ = std::move(message);
}

ffi::DataType FfiCall::TypeOf(Like like) const {
  return like == Like::kX ? dtype_ : out_dtype_;
}

std::vector<int64_t> FfiCall::ArrayDimensions() const {
  const Shape& shape = problem_.shape;
  std::vector<int64_t> dimensions = {shape.rows, shape.channels};
  if (has_groups_) dimensions.insert(dimensions.begin(), shape.groups);
  if (has_inner_) dimensions.push_back(shape.inner);
  return dimensions;
}

std::vector<int64_t> FfiCall::MaskDimensions(const View& view) {
  const Shape& shape = problem_.shape;
  const int64_t bytes = view.dimensions.empty() ? 0 : view.dimensions.back();
  const bool is_power = bytes > 0 && (bytes & (bytes - 1)) == 0;
  if (view.dimensions.size() == 4 && is_power && shape.inner == 1 &&
      shape.channels % 8 == 0 && shape.channels / 8 % bytes == 0) {
    problem_.mask_channels = 8 * bytes;
    return {shape.groups, shape.rows, shape.channels / 8 / bytes, bytes};
  }
  return {shape.groups, shape.mask_bytes_per_group()};
}

ffi::DataType FfiCall::AccumulatorType() const {
  return dtype_ == ffi::F64 ? ffi::F64 : ffi::F32;
}

}  // namespace jax_bnar
