// The part of cuDNN that benchmarks/gpu/cudnn.py calls, implemented on the host
// (batch_norm.h). It rejects arguments that cuDNN would reject or misread.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "batch_norm.h"
#include "cudnn_types.h"

namespace {

int live_objects = 0;
const char* last_error = "";

cudnnStatus_t Refuse(cudnnStatus_t status, const char* why) {
  last_error = why;
  return status;
}

cudnnStatus_t BadParam(const char* why) {
  return Refuse(CUDNN_STATUS_BAD_PARAM, why);
}

template <typename T>
cudnnStatus_t Create(T** object) {
  if (object == nullptr) return BadParam("no place for the object");
  *object = new T();
  ++live_objects;
  return CUDNN_STATUS_SUCCESS;
}

template <typename T>
cudnnStatus_t Destroy(T* object) {
  if (object == nullptr) return BadParam("no object to destroy");
  delete object;
  --live_objects;
  return CUDNN_STATUS_SUCCESS;
}

bool Same(const cudnnTensorStruct& a, const cudnnTensorStruct& b) {
  return a.is_set == b.is_set && a.format == b.format && a.dtype == b.dtype &&
         a.n == b.n && a.c == b.c && a.h == b.h && a.w == b.w;
}

// `others` are the tensors besides x that the operation always has.
cudnnStatus_t CheckDescriptors(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops,
    cudnnTensorDescriptor_t x, cudnnActivationDescriptor_t activation,
    std::initializer_list<cudnnTensorDescriptor_t> others = {}) {
  if (handle == nullptr) return BadParam("no handle");
  if (mode != CUDNN_BATCHNORM_SPATIAL_PERSISTENT) {
    return BadParam("the mode is not SPATIAL_PERSISTENT");
  }
  if (x == nullptr || !x->is_set) return BadParam("x is not described");
  if (x->format != CUDNN_TENSOR_NHWC) return BadParam("x is not NHWC");
  for (const cudnnTensorStruct* other : others) {
    if (other == nullptr || !Same(*other, *x)) {
      return BadParam("a tensor is not described as x is");
    }
  }
  if (ops != CUDNN_BATCHNORM_OPS_BN &&
      (activation == nullptr || !activation->is_set ||
       activation->mode != CUDNN_ACTIVATION_RELU ||
       activation->nan != CUDNN_NOT_PROPAGATE_NAN)) {
    return BadParam("the activation is not a ReLU that drops NaN");
  }
  if (x->dtype != CUDNN_DATA_FLOAT && x->dtype != CUDNN_DATA_HALF) {
    return Refuse(CUDNN_STATUS_NOT_SUPPORTED,
                  "the stub supports only float and half");
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t CheckVector(cudnnTensorDescriptor_t vector,
                          cudnnTensorDescriptor_t x) {
  if (vector == nullptr || !vector->is_set ||
      vector->dtype != CUDNN_DATA_FLOAT || vector->n != 1 ||
      vector->c != x->c || vector->h != 1 || vector->w != 1) {
    return BadParam("the vectors are not described as derived from x");
  }
  return CUDNN_STATUS_SUCCESS;
}

// z and dz must be present if and only if the operation adds z.
cudnnStatus_t CheckAddend(cudnnBatchNormOps_t ops, cudnnTensorDescriptor_t x,
                          cudnnTensorDescriptor_t addend) {
  const bool adds = ops == CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION;
  if (adds != (addend != nullptr) || (adds && !Same(*addend, *x))) {
    return BadParam("z or dz is missing, superfluous, or unlike x");
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t CheckPointers(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (pointer == nullptr) return BadParam("a pointer is null");
  }
  return CUDNN_STATUS_SUCCESS;
}

bool HoldsFloat(const void* pointer, float value) {
  return pointer != nullptr && *static_cast<const float*>(pointer) == value;
}

cudnnStatus_t CheckSpaces(size_t workspace, size_t workspace_needed,
                          size_t reserve, size_t reserve_needed) {
  if (workspace < workspace_needed) return BadParam("workspace is too small");
  if (reserve < reserve_needed) return BadParam("reserve space is too small");
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace

#define STUB_RETURN_UNLESS_SUCCESS(expression)         \
  do {                                                 \
    const cudnnStatus_t status = (expression);         \
    if (status != CUDNN_STATUS_SUCCESS) return status; \
  } while (false)

extern "C" {

// For tests only: the number of objects that were created and not destroyed.
int cudnnStubLiveObjects(void) { return live_objects; }

size_t cudnnGetVersion(void) { return 90000; }

const char* cudnnGetErrorString(cudnnStatus_t status) {
  switch (status) {
    case CUDNN_STATUS_SUCCESS:
      return "CUDNN_STATUS_SUCCESS";
    case CUDNN_STATUS_BAD_PARAM:
      return "CUDNN_STATUS_BAD_PARAM";
    case CUDNN_STATUS_NOT_SUPPORTED:
      return "CUDNN_STATUS_NOT_SUPPORTED";
    default:
      return "a status that the stub does not return";
  }
}

void cudnnGetLastErrorString(char* message, size_t max_size) {
  if (max_size == 0) return;
  std::strncpy(message, last_error, max_size - 1);
  message[max_size - 1] = '\0';
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) { return Create(handle); }

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return Destroy(handle); }

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t streamId) {
  if (handle == nullptr) return BadParam("no handle");
  if (streamId != nullptr) return BadParam("the host has no streams");
  handle->stream = streamId;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* tensorDesc) {
  return Create(tensorDesc);
}

cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t tensorDesc) {
  return Destroy(tensorDesc);
}

cudnnStatus_t cudnnSetTensor4dDescriptor(cudnnTensorDescriptor_t tensorDesc,
                                         cudnnTensorFormat_t format,
                                         cudnnDataType_t dataType, int n, int c,
                                         int h, int w) {
  if (tensorDesc == nullptr) return BadParam("no descriptor");
  if (n < 1 || c < 1 || h < 1 || w < 1) return BadParam("a tensor is empty");
  *tensorDesc = {true, format, dataType, n, c, h, w};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDeriveBNTensorDescriptor(
    cudnnTensorDescriptor_t derivedBnDesc, const cudnnTensorDescriptor_t xDesc,
    cudnnBatchNormMode_t mode) {
  if (derivedBnDesc == nullptr || xDesc == nullptr || !xDesc->is_set ||
      mode != CUDNN_BATCHNORM_SPATIAL_PERSISTENT) {
    return BadParam("nothing to derive from");
  }
  *derivedBnDesc = {true, xDesc->format, CUDNN_DATA_FLOAT, 1, xDesc->c, 1, 1};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreateActivationDescriptor(
    cudnnActivationDescriptor_t* activationDesc) {
  return Create(activationDesc);
}

cudnnStatus_t cudnnDestroyActivationDescriptor(
    cudnnActivationDescriptor_t activationDesc) {
  return Destroy(activationDesc);
}

cudnnStatus_t cudnnSetActivationDescriptor(
    cudnnActivationDescriptor_t activationDesc, cudnnActivationMode_t mode,
    cudnnNanPropagation_t reluNanOpt, double /*coef*/) {
  if (activationDesc == nullptr) return BadParam("no descriptor");
  *activationDesc = {true, mode, reluNanOpt};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t bnOps,
    const cudnnTensorDescriptor_t xDesc, const cudnnTensorDescriptor_t zDesc,
    const cudnnTensorDescriptor_t yDesc,
    const cudnnTensorDescriptor_t bnScaleBiasMeanVarDesc,
    const cudnnActivationDescriptor_t activationDesc, size_t* sizeInBytes) {
  STUB_RETURN_UNLESS_SUCCESS(
      CheckDescriptors(handle, mode, bnOps, xDesc, activationDesc, {yDesc}));
  STUB_RETURN_UNLESS_SUCCESS(CheckVector(bnScaleBiasMeanVarDesc, xDesc));
  STUB_RETURN_UNLESS_SUCCESS(CheckAddend(bnOps, xDesc, zDesc));
  STUB_RETURN_UNLESS_SUCCESS(CheckPointers({sizeInBytes}));
  *sizeInBytes = ForwardWorkspaceBytes(*xDesc);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t bnOps,
    const cudnnTensorDescriptor_t xDesc, const cudnnTensorDescriptor_t yDesc,
    const cudnnTensorDescriptor_t dyDesc, const cudnnTensorDescriptor_t dzDesc,
    const cudnnTensorDescriptor_t dxDesc,
    const cudnnTensorDescriptor_t dBnScaleBiasDesc,
    const cudnnActivationDescriptor_t activationDesc, size_t* sizeInBytes) {
  STUB_RETURN_UNLESS_SUCCESS(CheckDescriptors(
      handle, mode, bnOps, xDesc, activationDesc, {dyDesc, dxDesc}));
  if (bnOps != CUDNN_BATCHNORM_OPS_BN &&
      (yDesc == nullptr || !Same(*yDesc, *xDesc))) {
    return BadParam("y is not described as x is");
  }
  STUB_RETURN_UNLESS_SUCCESS(CheckVector(dBnScaleBiasDesc, xDesc));
  STUB_RETURN_UNLESS_SUCCESS(CheckAddend(bnOps, xDesc, dzDesc));
  STUB_RETURN_UNLESS_SUCCESS(CheckPointers({sizeInBytes}));
  *sizeInBytes = BackwardWorkspaceBytes(*xDesc);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t bnOps,
    const cudnnActivationDescriptor_t activationDesc,
    const cudnnTensorDescriptor_t xDesc, size_t* sizeInBytes) {
  STUB_RETURN_UNLESS_SUCCESS(
      CheckDescriptors(handle, mode, bnOps, xDesc, activationDesc));
  STUB_RETURN_UNLESS_SUCCESS(CheckPointers({sizeInBytes}));
  *sizeInBytes = ReserveSpaceBytes(*xDesc);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBatchNormalizationForwardTrainingEx(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t bnOps,
    const void* alpha, const void* beta, const cudnnTensorDescriptor_t xDesc,
    const void* xData, const cudnnTensorDescriptor_t zDesc, const void* zData,
    const cudnnTensorDescriptor_t yDesc, void* yData,
    const cudnnTensorDescriptor_t bnScaleBiasMeanVarDesc, const void* bnScale,
    const void* bnBias, double exponentialAverageFactor,
    void* resultRunningMean, void* resultRunningVariance, double epsilon,
    void* resultSaveMean, void* resultSaveInvVariance,
    cudnnActivationDescriptor_t activationDesc, void* workspace,
    size_t workSpaceSizeInBytes, void* reserveSpace,
    size_t reserveSpaceSizeInBytes) {
  size_t workspace_needed = 0;
  STUB_RETURN_UNLESS_SUCCESS(
      cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
          handle, mode, bnOps, xDesc, zDesc, yDesc, bnScaleBiasMeanVarDesc,
          activationDesc, &workspace_needed));
  STUB_RETURN_UNLESS_SUCCESS(CheckPointers(
      {xData, yData, bnScale, bnBias, resultRunningMean, resultRunningVariance,
       resultSaveMean, resultSaveInvVariance, workspace, reserveSpace}));
  if ((zData != nullptr) != (zDesc != nullptr)) {
    return BadParam("z is missing or superfluous");
  }
  if (!HoldsFloat(alpha, 1) || !HoldsFloat(beta, 0)) {
    return BadParam("alpha is not 1, or beta is not 0");
  }
  STUB_RETURN_UNLESS_SUCCESS(CheckSpaces(workSpaceSizeInBytes, workspace_needed,
                                         reserveSpaceSizeInBytes,
                                         ReserveSpaceBytes(*xDesc)));
  auto* reserve = static_cast<ReserveSpace*>(reserveSpace);
  *reserve = {kFilled, epsilon};
  const auto forward = [&](auto zero) {
    using T = decltype(zero);
    Forward(
        *xDesc, bnOps != CUDNN_BATCHNORM_OPS_BN, static_cast<const T*>(xData),
        static_cast<const T*>(zData), static_cast<T*>(yData),
        {static_cast<const float*>(bnScale), static_cast<const float*>(bnBias),
         static_cast<float*>(resultSaveMean),
         static_cast<float*>(resultSaveInvVariance)},
        exponentialAverageFactor, static_cast<float*>(resultRunningMean),
        static_cast<float*>(resultRunningVariance),
        static_cast<double*>(workspace), reserve);
  };
  xDesc->dtype == CUDNN_DATA_HALF ? forward(_Float16{}) : forward(float{});
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBatchNormalizationBackwardEx(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t bnOps,
    const void* alphaDataDiff, const void* betaDataDiff,
    const void* alphaParamDiff, const void* betaParamDiff,
    const cudnnTensorDescriptor_t xDesc, const void* xData,
    const cudnnTensorDescriptor_t yDesc, const void* yData,
    const cudnnTensorDescriptor_t dyDesc, const void* dyData,
    const cudnnTensorDescriptor_t dzDesc, void* dzData,
    const cudnnTensorDescriptor_t dxDesc, void* dxData,
    const cudnnTensorDescriptor_t dBnScaleBiasDesc, const void* bnScaleData,
    const void* bnBiasData, void* dBnScaleData, void* dBnBiasData,
    double epsilon, const void* savedMean, const void* savedInvVariance,
    cudnnActivationDescriptor_t activationDesc, void* workSpace,
    size_t workSpaceSizeInBytes, void* reserveSpace,
    size_t reserveSpaceSizeInBytes) {
  size_t workspace_needed = 0;
  STUB_RETURN_UNLESS_SUCCESS(cudnnGetBatchNormalizationBackwardExWorkspaceSize(
      handle, mode, bnOps, xDesc, yDesc, dyDesc, dzDesc, dxDesc,
      dBnScaleBiasDesc, activationDesc, &workspace_needed));
  STUB_RETURN_UNLESS_SUCCESS(CheckPointers(
      {xData, dyData, dxData, bnScaleData, bnBiasData, dBnScaleData,
       dBnBiasData, savedMean, savedInvVariance, workSpace, reserveSpace}));
  if ((dzData != nullptr) != (dzDesc != nullptr) ||
      (yData != nullptr) != (yDesc != nullptr)) {
    return BadParam("y or dz is missing or superfluous");
  }
  if (!HoldsFloat(alphaDataDiff, 1) || !HoldsFloat(betaDataDiff, 0) ||
      !HoldsFloat(alphaParamDiff, 1) || !HoldsFloat(betaParamDiff, 0)) {
    return BadParam("alpha is not 1, or beta is not 0");
  }
  STUB_RETURN_UNLESS_SUCCESS(CheckSpaces(workSpaceSizeInBytes, workspace_needed,
                                         reserveSpaceSizeInBytes,
                                         ReserveSpaceBytes(*xDesc)));
  auto* reserve = static_cast<ReserveSpace*>(reserveSpace);
  if (reserve->filled != kFilled || reserve->epsilon != epsilon) {
    return BadParam("the reserve space is not that of a forward");
  }
  // Clear the marker, so that memory that is freed and allocated again does not
  // look as if a forward call had filled it.
  reserve->filled = 0;
  const auto backward = [&](auto zero) {
    using T = decltype(zero);
    if (yData != nullptr &&
        !IsResultOf<T>(*reserve, yData, xDesc->elements())) {
      return BadParam("y is not the result of the forward");
    }
    // The gradients do not depend on the bias. Backward only reads the
    // statistics, although Vectors has non-const pointers to them.
    Backward(
        *xDesc, static_cast<const T*>(xData), static_cast<const T*>(dyData),
        static_cast<T*>(dzData), static_cast<T*>(dxData),
        {static_cast<const float*>(bnScaleData),
         static_cast<const float*>(bnBiasData),
         const_cast<float*>(static_cast<const float*>(savedMean)),
         const_cast<float*>(static_cast<const float*>(savedInvVariance))},
        static_cast<float*>(dBnScaleData), static_cast<float*>(dBnBiasData),
        static_cast<double*>(workSpace), reserve);
    return CUDNN_STATUS_SUCCESS;
  };
  return xDesc->dtype == CUDNN_DATA_HALF ? backward(_Float16{})
                                         : backward(float{});
}

}  // extern "C"
