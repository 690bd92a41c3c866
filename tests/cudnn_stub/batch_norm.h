// Batch normalisation, the addition of z and the ReLU, in plain loops and in
// double.

#ifndef JAX_BNAR_TESTS_CUDNN_STUB_BATCH_NORM_H_
#define JAX_BNAR_TESTS_CUDNN_STUB_BATCH_NORM_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cudnn_types.h"

constexpr uint64_t kFilled = 0x626e61722066756c;

// What forward leaves for backward. It is followed by one byte per element,
// which says whether the ReLU passed it.
struct ReserveSpace {
  uint64_t filled;
  double epsilon;

  uint8_t* gates() { return reinterpret_cast<uint8_t*>(this + 1); }
};

inline size_t ForwardWorkspaceBytes(const cudnnTensorStruct& x) {
  return 2 * sizeof(double) * static_cast<size_t>(x.c);
}

inline size_t BackwardWorkspaceBytes(const cudnnTensorStruct& x) {
  return 3 * sizeof(double) * static_cast<size_t>(x.c);
}

inline size_t ReserveSpaceBytes(const cudnnTensorStruct& x) {
  return sizeof(ReserveSpace) + static_cast<size_t>(x.elements());
}

struct Vectors {
  const float* scale;
  const float* bias;
  float* mean;
  float* inverse_std;
};

template <typename T>
void Forward(const cudnnTensorStruct& shape, bool relu, const T* x, const T* z,
             T* y, const Vectors& vectors, double factor, float* running_mean,
             float* running_var, double* workspace, ReserveSpace* reserve) {
  const int channels = shape.c;
  const double count = static_cast<double>(shape.rows());
  double* mean = workspace;
  double* var = workspace + channels;
  std::memset(workspace, 0, ForwardWorkspaceBytes(shape));
  for (int64_t i = 0; i < shape.elements(); ++i) {
    mean[i % channels] += static_cast<double>(x[i]) / count;
  }
  for (int64_t i = 0; i < shape.elements(); ++i) {
    const double centred = static_cast<double>(x[i]) - mean[i % channels];
    var[i % channels] += centred * centred / count;
  }
  for (int c = 0; c < channels; ++c) {
    vectors.mean[c] = static_cast<float>(mean[c]);
    vectors.inverse_std[c] =
        static_cast<float>(1 / std::sqrt(var[c] + reserve->epsilon));
    running_mean[c] =
        static_cast<float>((1 - factor) * running_mean[c] + factor * mean[c]);
    running_var[c] = static_cast<float>((1 - factor) * running_var[c] +
                                        factor * var[c] * count / (count - 1));
  }
  for (int64_t i = 0; i < shape.elements(); ++i) {
    const int64_t c = i % channels;
    double result = (static_cast<double>(x[i]) - mean[c]) *
                        vectors.inverse_std[c] * vectors.scale[c] +
                    vectors.bias[c];
    if (z != nullptr) result += static_cast<double>(z[i]);
    y[i] = static_cast<T>(relu ? std::fmax(result, 0.0) : result);
    reserve->gates()[i] = !relu || y[i] > T{0};
  }
}

template <typename T>
void Backward(const cudnnTensorStruct& shape, const T* x, const T* dy, T* dz,
              T* dx, const Vectors& vectors, float* dscale, float* dbias,
              double* workspace, ReserveSpace* reserve) {
  const int channels = shape.c;
  const double count = static_cast<double>(shape.rows());
  double* sum = workspace;
  double* product = workspace + channels;
  double* factor = workspace + 2 * channels;
  std::memset(workspace, 0, BackwardWorkspaceBytes(shape));
  const auto gated = [&](int64_t i) {
    return reserve->gates()[i] ? static_cast<double>(dy[i]) : 0.0;
  };
  const auto normalised = [&](int64_t i) {
    const int64_t c = i % channels;
    return (static_cast<double>(x[i]) - vectors.mean[c]) *
           vectors.inverse_std[c];
  };
  for (int64_t i = 0; i < shape.elements(); ++i) {
    sum[i % channels] += gated(i);
    product[i % channels] += gated(i) * normalised(i);
  }
  for (int c = 0; c < channels; ++c) {
    dbias[c] = static_cast<float>(sum[c]);
    dscale[c] = static_cast<float>(product[c]);
    factor[c] = static_cast<double>(vectors.scale[c]) * vectors.inverse_std[c];
  }
  for (int64_t i = 0; i < shape.elements(); ++i) {
    const int64_t c = i % channels;
    const double centred =
        gated(i) - sum[c] / count - normalised(i) * product[c] / count;
    dx[i] = static_cast<T>(factor[c] * centred);
    if (dz != nullptr) dz[i] = static_cast<T>(gated(i));
  }
}

template <typename T>
bool IsResultOf(const ReserveSpace& reserve, const void* y, int64_t elements) {
  const uint8_t* gates = reinterpret_cast<const uint8_t*>(&reserve + 1);
  for (int64_t i = 0; i < elements; ++i) {
    if ((static_cast<const T*>(y)[i] > T{0}) != (gates[i] != 0)) return false;
  }
  return true;
}

#endif  // JAX_BNAR_TESTS_CUDNN_STUB_BATCH_NORM_H_
