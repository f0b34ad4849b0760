// Causal attention: which of the two implementations does a shape. The kernels are in attention_builtin.cuh (ours) and
// behind attention_cudnn.h (NVIDIA's, found at run time or not).
//
//   --attention builtin   our kernels, always
//   --attention cudnn     cuDNN; an error when it is missing, or for a shape that it cannot do
//   --attention auto      per pass and head size what is faster (dev/README.md has the times). Ours are both passes at
//                         head sizes 64 and 128, which leave FP8 forms themselves, and need no (T, T) matrix per head.
//                         Else cuDNN where it is found and can do the shape
//
// Both read qkv, keep the same lse, and give the same bits on every run.
#ifndef ATTENTION_CUH
#define ATTENTION_CUH

#include "attention_builtin.cuh"
#include "attention_cudnn.h"
#include "gpu.cuh"

// dev->attention and dev->cudnn after this:
//   ATTENTION_BUILTIN, NULL   our kernels
//   ATTENTION_CUDNN, handle   cuDNN only
//   ATTENTION_AUTO, handle    cuDNN, with our kernels for the shapes that it refuses and for what they do faster
void attention_select(Device* dev, AttentionKind kind) {
    char reason[512] = "";
    dev->attention = ATTENTION_BUILTIN;
    dev->cudnn = NULL;
    snprintf(dev->attention_name, sizeof(dev->attention_name), "builtin");
    if (kind == ATTENTION_BUILTIN) { return; }
    dev->cudnn = cudnn_attention_open(reason, sizeof(reason));
    check(dev->cudnn != NULL || kind == ATTENTION_AUTO, "--attention cudnn: %s; --attention builtin needs no cuDNN",
          reason);
    if (dev->cudnn == NULL) { return; }
    dev->attention = kind;
    snprintf(dev->attention_name, sizeof(dev->attention_name), "cudnn %s%s", cudnn_attention_version(dev->cudnn),
             kind == ATTENTION_AUTO ? " and builtin" : "");
}

// Called by device_free.
void attention_release(Device* dev) {
    cudnn_attention_close(dev->cudnn);
    dev->cudnn = NULL;
    dev->attention = ATTENTION_BUILTIN;
}

static inline void attention_check_shape(const char* who, int B, int T, int NH, int HS) {
    check(B > 0 && T > 0 && NH > 0 && HS > 0 && HS % 16 == 0 && HS <= 128,
          "%s: B, T, NH, HS = %d, %d, %d, %d, want HS a multiple of 16 and at most 128", who, B, T, NH, HS);
}

// Are both passes ours although cuDNN does the shape? Where ours were measured to be faster: dev/README.md.
static inline int attention_is_ours(const Device* dev, int HS) {
    return dev->attention == ATTENTION_AUTO && wgmma_does(HS);
}

// Does cuDNN do this shape? Then `workspace_bytes` is what it needs. The first refusal under AUTO goes into the name.
// Making a plan takes cuDNN a moment; it is made once per shape, so plan before capturing a graph.
static inline int attention_uses_cudnn(Device* dev, int B, int T, int NH, int HS, size_t* workspace_bytes) {
    if (dev->cudnn == NULL) { return 0; }
    char reason[512] = "";
    CudnnAttentionShape shape = {B, T, NH, HS};
    if (cudnn_attention_plan(dev->cudnn, shape, workspace_bytes, reason, sizeof(reason))) { return 1; }
    check(dev->attention == ATTENTION_AUTO, "--attention cudnn: B, T, NH, HS = %d, %d, %d, %d: %s", B, T, NH, HS,
          reason);
    if (strstr(dev->attention_name, "builtin for") == NULL) {
        size_t length = strlen(dev->attention_name);
        snprintf(dev->attention_name + length, sizeof(dev->attention_name) - length, ", builtin for T %d, head %d", T,
                 HS);
    }
    return 0;
}

// Bytes of workspace for both passes of a shape. With cuDNN this also makes its plans, which takes a moment.
size_t attention_workspace_bytes(Device* dev, int B, int T, int NH, int HS) {
    size_t bytes = 0, quantize = reduction_workspace_bytes(dev, 3 * NH * HS);
    attention_check_shape("attention_workspace_bytes", B, T, NH, HS);
    size_t ours = builtin_attention_workspace_bytes(B, T, NH, HS);
    int cudnn = !attention_is_ours(dev, HS) && attention_uses_cudnn(dev, B, T, NH, HS, &bytes);
    if (!cudnn && ours > bytes) { bytes = ours; }
    return quantize > bytes ? quantize : bytes;
}

static inline void attention_check_workspace(Device* dev, const char* who, size_t bytes, int B, int T, int NH, int HS) {
    check(dev->workspace_bytes >= bytes, "%s: B, T, NH, HS = %d, %d, %d, %d: workspace of %zu bytes, want %zu", who, B,
          T, NH, HS, dev->workspace_bytes, bytes);
}

// out (B*T, C), lse (B, NH, T) FP32, from qkv (B*T, 3C) BF16; see floor.h. FP8 forms that the attention kernel does not
// write, and a scale that has to be measured first, are quantize_forward's.
// 2 B NH T^2 HS useful flops (half the square).
void attention_forward(Device* dev, E4m3Tensor out, float* lse, const bf16* qkv, int B, int T, int NH, int HS) {
    size_t bytes = 0;
    attention_check_shape("attention_forward", B, T, NH, HS);
    const int cudnn = !attention_is_ours(dev, HS) && attention_uses_cudnn(dev, B, T, NH, HS, &bytes);
    const int writes_fp8 = !cudnn && !out.measure_first && builtin_attention_writes_fp8(T, HS);
    E4m3Tensor written = out; // by the attention kernel
    if (!writes_fp8) { written.data = written.transposed = NULL; }
    const FormsOut forms = forms_of_e4m3(written);
    const int fp8 = written.data != NULL || written.transposed != NULL;
    cost_attention_forward(dev, written, B, T, NH, HS);
    check(out.wide != NULL, "attention_forward: no BF16 form to write");
    check_forms("attention_forward", forms, out.slot, fp8, B * T, NH * HS);
    if (cudnn) {
        CudnnAttentionShape shape = {B, T, NH, HS};
        // NOTE: not the bytes of both passes. A text sample may be longer than what the workspace was made for
        bytes = cudnn_attention_forward_bytes(dev->cudnn, shape);
        attention_check_workspace(dev, "attention_forward", bytes, B, T, NH, HS);
        cudnn_attention_forward(dev->cudnn, dev->stream, dev->workspace, out.wide, lse, qkv, shape);
    } else {
        builtin_attention_forward(dev, forms, lse, qkv, B, T, NH, HS);
    }
    if (!writes_fp8) { quantize_forward(dev, out, B * T, NH * HS); }
}

// dqkv (B*T, 3C), every element written, in FP8 if it asks for that, else BF16; dbias; from dout, out (B*T, C), lse (B,
// NH, T), qkv; see floor.h. 5 B NH T^2 HS useful flops. Our kernels for Hopper write what is asked for. The others
// write BF16 into dqkv.wide and quantize_backward reads it; so it goes where a scale has to be measured first, too.
void attention_backward(Device* dev, E5m2Tensor dqkv, float* dbias, const bf16* dout, const bf16* out, const float* lse,
                        const bf16* qkv, int B, int T, int NH, int HS) {
    size_t bytes = 0;
    int rows = B * T, cols = 3 * NH * HS, fp8 = dqkv.data != NULL || dqkv.transposed != NULL;
    FormsOut forms = forms_of_e5m2(dqkv);
    attention_check_shape("attention_backward", B, T, NH, HS);
    check_forms("attention_backward", forms, dqkv.slot, fp8, rows, cols);
    check(dqkv.wide != NULL, "attention_backward: no BF16 form of dqkv, want it at least as scratch");
    int cudnn = !attention_is_ours(dev, HS) && attention_uses_cudnn(dev, B, T, NH, HS, &bytes);
    if (!cudnn && builtin_attention_backward_emits(T, HS, fp8) && !(fp8 && dqkv.measure_first)) {
        cost_attention_backward(dev, dqkv, B, T, NH, HS);
        if (fp8) { forms.wide = NULL; }
        builtin_attention_backward(dev, forms, dbias, dout, out, lse, qkv, B, T, NH, HS);
        return;
    }
    FormsOut wide = {dqkv.wide, NULL, NULL, NULL, NULL, 0};
    E5m2Tensor unscaled = {dqkv.wide, NULL, NULL, NULL, dqkv.recipe, 0, 0};
    cost_attention_backward(dev, unscaled, B, T, NH, HS);
    if (cudnn) {
        CudnnAttentionShape shape = {B, T, NH, HS};
        CudnnAttentionGradients tensors = {dqkv.wide, dout, out, lse, qkv};
        attention_check_workspace(dev, "attention_backward", bytes, B, T, NH, HS);
        cudnn_attention_backward(dev->cudnn, dev->stream, dev->workspace, tensors, shape);
    } else {
        builtin_attention_backward(dev, wide, NULL, dout, out, lse, qkv, B, T, NH, HS);
    }
    if (fp8 || dbias != NULL) { quantize_backward(dev, dqkv, dbias, rows, cols); }
}

#endif
