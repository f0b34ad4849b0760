// The ground of the GPU floor: the Device (one GPU, one stream, one cuBLASLt handle, one workspace), error checks,
// device memory. Ops lean on this file and on nothing else.
#ifndef GPU_CUH
#define GPU_CUH

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "check.h"
#include "floor.h"

// Every CUDA and cuBLASLt call is wrapped; every launch is followed by cuda_check(cudaGetLastError()).
#define cuda_check(call)                                                                                    \
    do {                                                                                                    \
        cudaError_t cuda_status_ = (call);                                                                  \
        check(cuda_status_ == cudaSuccess, "CUDA: %s (%s) in %s", cudaGetErrorString(cuda_status_),         \
              cudaGetErrorName(cuda_status_), #call);                                                       \
    } while (0)

#define cublas_check(call)                                                                                  \
    do {                                                                                                    \
        cublasStatus_t cublas_status_ = (call);                                                             \
        check(cublas_status_ == CUBLAS_STATUS_SUCCESS, "cuBLASLt: %s in %s",                                \
              cublasLtGetStatusString(cublas_status_), #call);                                              \
    } while (0)

struct Device {
    int index;                    // CUDA ordinal
    cudaDeviceProp properties;    // name, multiProcessorCount, ...
    cudaStream_t stream;          // every op runs here
    cublasLtHandle_t cublaslt;
    void* workspace;              // scratch of the op that is running; see device_set_workspace
    size_t workspace_bytes;
    struct MatmulPlan* matmul_plans; // cache of matmul.cuh, one per shape
    int num_matmul_plans;
    AttentionKind attention;      // resolved at device_create: BUILTIN or CUDNN
    struct CudnnAttention* cudnn; // of attention_cudnn.cpp, NULL when builtin
    char attention_name[64];
};

#endif
