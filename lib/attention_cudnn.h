// Causal attention by cuDNN, behind plain C functions: only attention_cudnn.cpp sees NVIDIA's C++ headers.
//
// The program does not link cuDNN: cudnn_attention_open looks for libcudnn.so.9 at run time, so one binary runs with
// and without it. A binary built without cudnn-frontend's headers (ENABLE_CUDNN not defined) has the stand-ins at the
// end.
#ifndef ATTENTION_CUDNN_H
#define ATTENTION_CUDNN_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdio.h>

#include "check.h"

typedef struct CudnnAttention CudnnAttention;

// qkv (B, T, 3, NH, HS), out (B, T, NH, HS), lse (B, NH, T), as in floor.h.
typedef struct {
    int B, T, NH, HS;
} CudnnAttentionShape;

typedef struct {
    void* dqkv;       // (B, T, 3, NH, HS) BF16, out
    const void* dout; // (B, T, NH, HS) BF16
    const void* out;  // (B, T, NH, HS) BF16
    const float* lse; // (B, NH, T)
    const void* qkv;  // (B, T, 3, NH, HS) BF16
} CudnnAttentionGradients;

#ifdef ENABLE_CUDNN

// Find libcudnn.so.9 in $CUDNN_LIBRARY_PATH (a folder), else where the loader looks (LD_LIBRARY_PATH, system), and make
// a handle on the current CUDA device. NULL when that fails: then `reason` says why.
CudnnAttention* cudnn_attention_open(char* reason, size_t reason_bytes);
void cudnn_attention_close(CudnnAttention* cudnn);
const char* cudnn_attention_version(const CudnnAttention* cudnn); // of the library that was found: "9.19.0"

// Is the backward pass to give the same bits every time? Default 1. Forgets the plans made so far.
// NOTE: cuDNN's deterministic backward on Hopper keeps a (T, T) matrix per head in its workspace.
void cudnn_attention_set_deterministic(CudnnAttention* cudnn, int deterministic);

// Make the plans of a shape's two passes (once; kept). Returns 1 and the workspace that they need, or 0 when cuDNN
// cannot do it: then `reason` says why.
int cudnn_attention_plan(CudnnAttention* cudnn, CudnnAttentionShape shape, size_t* workspace_bytes, char* reason,
                         size_t reason_bytes);

// What the forward pass alone needs, of a shape that was planned.
size_t cudnn_attention_forward_bytes(CudnnAttention* cudnn, CudnnAttentionShape shape);

// out and lse, or dqkv, of a shape that was planned; `workspace` has at least the bytes of the pass. Asynchronous.
void cudnn_attention_forward(CudnnAttention* cudnn, cudaStream_t stream, void* workspace, void* out, float* lse,
                             const void* qkv, CudnnAttentionShape shape);
void cudnn_attention_backward(CudnnAttention* cudnn, cudaStream_t stream, void* workspace,
                              CudnnAttentionGradients tensors, CudnnAttentionShape shape);

#else // built without cuDNN: it cannot be opened, so nothing below the first function is ever reached

static inline CudnnAttention* cudnn_attention_open(char* reason, size_t reason_bytes) {
    snprintf(reason, reason_bytes, "this program was built without cudnn-frontend's headers");
    return NULL;
}

static inline void cudnn_attention_close(CudnnAttention* cudnn) { (void)cudnn; }

static inline const char* cudnn_attention_version(const CudnnAttention* cudnn) {
    (void)cudnn;
    return "none";
}

static inline void cudnn_attention_set_deterministic(CudnnAttention* cudnn, int deterministic) {
    (void)cudnn;
    (void)deterministic;
}

static inline int cudnn_attention_plan(CudnnAttention* cudnn, CudnnAttentionShape shape, size_t* workspace_bytes,
                                       char* reason, size_t reason_bytes) {
    (void)cudnn;
    (void)shape;
    *workspace_bytes = 0;
    snprintf(reason, reason_bytes, "built without cuDNN");
    return 0;
}

static inline size_t cudnn_attention_forward_bytes(CudnnAttention* cudnn, CudnnAttentionShape shape) {
    (void)cudnn, (void)shape;
    return 0;
}

static inline void cudnn_attention_forward(CudnnAttention* cudnn, cudaStream_t stream, void* workspace, void* out,
                                           float* lse, const void* qkv, CudnnAttentionShape shape) {
    (void)cudnn, (void)stream, (void)workspace, (void)out, (void)lse, (void)qkv, (void)shape;
    check(0, "cudnn_attention_forward: built without cuDNN");
}

static inline void cudnn_attention_backward(CudnnAttention* cudnn, cudaStream_t stream, void* workspace,
                                            CudnnAttentionGradients tensors, CudnnAttentionShape shape) {
    (void)cudnn, (void)stream, (void)workspace, (void)tensors, (void)shape;
    check(0, "cudnn_attention_backward: built without cuDNN");
}

#endif

#endif
