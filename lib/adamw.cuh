// AdamW with decoupled weight decay (Loshchilov & Hutter 2019) on FP32 master weights, and what the forward pass reads
// of them: the BF16 copy, or the amax from which the FP8 weight's scale is made.
#ifndef ADAMW_CUH
#define ADAMW_CUH

#include "gpu.cuh"

#define ADAMW_THREADS 256
#define ADAMW_BLOCKS 2048 // per layer, at most: each raises the amax once

// Clipped AdamW step of one weight; moments are updated in place.
typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float correction1, correction2; // 1 - beta^t
    float grad_factor;              // of clipping
} AdamWStep;

__device__ static inline float adamw_step(float weight, float* m, float* v, float grad, AdamWStep step) {
    grad *= step.grad_factor;
    *m = step.beta1 * *m + (1.0f - step.beta1) * grad;
    *v = step.beta2 * *v + (1.0f - step.beta2) * grad * grad;
    float m_hat = *m / step.correction1, v_hat = *v / step.correction2;
    return weight - step.lr * (m_hat / (sqrtf(v_hat) + step.eps) + step.weight_decay * weight);
}

// The BF16 copy of 4 weights; `group` = index / 4 of the first among all parameters. See AdamW.seed in floor.h.
__device__ static inline uint2 adamw_param(float4 w, AdamW adamw, size_t group) {
    if (adamw.stochastic) {
        Philox4 random = philox(adamw.seed, (uint64_t)adamw.t, group);
        w.x = bf16_round_stochastic(w.x, random.word[0]);
        w.y = bf16_round_stochastic(w.y, random.word[1]);
        w.z = bf16_round_stochastic(w.z, random.word[2]);
        w.w = bf16_round_stochastic(w.w, random.word[3]);
    }
    return make_uint2(pack_bf16(w.x, w.y), pack_bf16(w.z, w.w));
}

__device__ static inline float amax4(float amax, float4 w) {
    return amax_nan(amax_nan(amax_nan(amax_nan(amax, w.x), w.y), w.z), w.w);
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// master, m, v (layers, n) FP32 updated from grad (layers, n) FP32; param (layers, n) BF16 = master, if there is one;
// each layer's slot amax is raised to max |master|, if there are slots. Nothing happens when state->skip.
//   bytes    16 read + 12 (FP8) or 14 (BF16) written per weight: 44 GB at 1.56e9, 10.2 ms at 4.3 TB/s; memory-bound
//   numerics FP32; IEEE division and square root; one rounding to BF16: to nearest even, or stochastic, so that updates
//            far below a BF16 ulp (a LayerNorm weight near 1 has one of 2^-7) reach the forward pass on average
//   threads  grid (up to ADAMW_BLOCKS, layers), 4 weights per thread and turn; n a multiple of 4
//   bits     deterministic
__global__ void __launch_bounds__(ADAMW_THREADS)
    adamw_update_kernel(ParamState p, AdamW adamw, float correction1, float correction2, const StepState* state) {
    kernel_begin();
    if (state->skip) { return; }
    float norm = state->grad_norm;
    AdamWStep step = {adamw.lr,           adamw.beta1, adamw.beta2, adamw.eps,
                      adamw.weight_decay, correction1, correction2, 1.0f};
    if (adamw.grad_clip > 0.0f && norm > adamw.grad_clip) { step.grad_factor = adamw.grad_clip / norm; }
    size_t layer = blockIdx.y * (p.n / 4), stride = (size_t)gridDim.x * blockDim.x;
    float amax = 0.0f;
    for (size_t k = blockIdx.x * (size_t)blockDim.x + threadIdx.x; k < p.n / 4; k += stride) {
        size_t i = layer + k;
        float4 g = ((const float4*)p.grad)[i], w = ((float4*)p.master)[i];
        float4 m = ((float4*)p.m)[i], v = ((float4*)p.v)[i];
        w.x = adamw_step(w.x, &m.x, &v.x, g.x, step);
        w.y = adamw_step(w.y, &m.y, &v.y, g.y, step);
        w.z = adamw_step(w.z, &m.z, &v.z, g.z, step);
        w.w = adamw_step(w.w, &m.w, &v.w, g.w, step);
        ((float4*)p.master)[i] = w;
        ((float4*)p.m)[i] = m;
        ((float4*)p.v)[i] = v;
        if (p.param != NULL) { ((uint2*)p.param)[i] = adamw_param(w, adamw, p.index / 4 + i); }
        amax = amax4(amax, w);
    }
    if (p.slot != NULL) { raise_amax(&p.slot[blockIdx.y * p.slot_stride].amax, amax); }
}

// param and slot amax from the master weights; see adamw_update_kernel.   4 read + 2 written per weight
__global__ void __launch_bounds__(ADAMW_THREADS) params_from_master_kernel(ParamState p, AdamW adamw) {
    kernel_begin();
    size_t layer = blockIdx.y * (p.n / 4), stride = (size_t)gridDim.x * blockDim.x;
    float amax = 0.0f;
    for (size_t k = blockIdx.x * (size_t)blockDim.x + threadIdx.x; k < p.n / 4; k += stride) {
        float4 w = ((const float4*)p.master)[layer + k];
        if (p.param != NULL) { ((uint2*)p.param)[layer + k] = adamw_param(w, adamw, p.index / 4 + layer + k); }
        amax = amax4(amax, w);
    }
    if (p.slot != NULL) { raise_amax(&p.slot[blockIdx.y * p.slot_stride].amax, amax); }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel launchers

static inline dim3 adamw_grid(const char* name, ParamState p) {
    uintptr_t address = (uintptr_t)p.master | (uintptr_t)p.m | (uintptr_t)p.v | (uintptr_t)p.grad;
    check(p.layers > 0 && p.n > 0 && p.n % 4 == 0, "%s: (layers, n) = (%d, %zu), want both positive, n a multiple of 4",
          name, p.layers, p.n);
    check(p.index % 4 == 0, "%s: index = %zu, want a multiple of 4", name, p.index);
    check(address % 16 == 0 && (uintptr_t)p.param % 8 == 0, "%s: a tensor is not aligned to 16 bytes", name);
    size_t blocks = ceil_div(p.n / 4, ADAMW_THREADS);
    return dim3((unsigned)(blocks < ADAMW_BLOCKS ? blocks : ADAMW_BLOCKS), (unsigned)p.layers);
}

void adamw_update(Device* dev, ParamState p, AdamW adamw, const StepState* state) {
    cost_adamw_update(dev, p);
    check(adamw.t >= 1, "adamw_update: t = %d, want 1 or more", adamw.t);
    dim3 grid = adamw_grid("adamw_update", p);
    // in FP64 on the host: 1 - beta^t loses its digits in FP32 when t is small
    float correction1 = (float)(1.0 - pow((double)adamw.beta1, adamw.t));
    float correction2 = (float)(1.0 - pow((double)adamw.beta2, adamw.t));
    launch(dev, adamw_update_kernel, grid, ADAMW_THREADS, 0, p, adamw, correction1, correction2, state);
}

void params_from_master(Device* dev, ParamState p, AdamW adamw) {
    dim3 grid = adamw_grid("params_from_master", p);
    launch(dev, params_from_master_kernel, grid, ADAMW_THREADS, 0, p, adamw);
}

#endif
