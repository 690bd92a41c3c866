// The types of cuDNN that the stub needs, and what its objects hold.
//
// The types are declared here because cuDNN need not be installed. If cudnn.h
// is included first, the compiler checks the stub's prototypes against it.

#ifndef JAX_BNAR_TESTS_CUDNN_STUB_CUDNN_TYPES_H_
#define JAX_BNAR_TESTS_CUDNN_STUB_CUDNN_TYPES_H_

#include <cstdint>

#ifndef CUDNN_H_

typedef struct CUstream_st* cudaStream_t;
typedef struct cudnnContext* cudnnHandle_t;
typedef struct cudnnTensorStruct* cudnnTensorDescriptor_t;
typedef struct cudnnActivationStruct* cudnnActivationDescriptor_t;

typedef enum {
  CUDNN_STATUS_SUCCESS = 0,
  CUDNN_STATUS_BAD_PARAM = 2000,
  CUDNN_STATUS_NOT_SUPPORTED = 3000,
} cudnnStatus_t;

typedef enum {
  CUDNN_DATA_FLOAT = 0,
  CUDNN_DATA_HALF = 2,
  CUDNN_DATA_BFLOAT16 = 9,
} cudnnDataType_t;

typedef enum { CUDNN_TENSOR_NHWC = 1 } cudnnTensorFormat_t;
typedef enum { CUDNN_NOT_PROPAGATE_NAN = 0 } cudnnNanPropagation_t;
typedef enum { CUDNN_ACTIVATION_RELU = 1 } cudnnActivationMode_t;
typedef enum { CUDNN_BATCHNORM_SPATIAL_PERSISTENT = 2 } cudnnBatchNormMode_t;

typedef enum {
  CUDNN_BATCHNORM_OPS_BN = 0,
  CUDNN_BATCHNORM_OPS_BN_ACTIVATION = 1,
  CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION = 2,
} cudnnBatchNormOps_t;

#endif  // CUDNN_H_

struct cudnnContext {
  cudaStream_t stream;
};

struct cudnnTensorStruct {
  bool is_set;
  cudnnTensorFormat_t format;
  cudnnDataType_t dtype;
  int n, c, h, w;

  int64_t rows() const { return int64_t{n} * h * w; }
  int64_t elements() const { return rows() * c; }
};

struct cudnnActivationStruct {
  bool is_set;
  cudnnActivationMode_t mode;
  cudnnNanPropagation_t nan;
};

#endif  // JAX_BNAR_TESTS_CUDNN_STUB_CUDNN_TYPES_H_
