// Loss and gradient norm of a step, summed in fixed order, and the decision whether the step counts.
#ifndef GRAD_NORM_CUH
#define GRAD_NORM_CUH

#include "gpu.cuh"

#define NORM_BLOCKS 1024 // a constant, not a function of the GPU: the order of the sum is the same everywhere
#define NORM_THREADS 512

// Sum of x over the block, in thread 0.
__device__ static inline double block_sum(double x) {
    __shared__ double warp_sums[32];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
    }
    if (threadIdx.x % 32 == 0) { warp_sums[threadIdx.x / 32] = x; }
    __syncthreads();
    double sum = 0.0;
    if (threadIdx.x == 0) {
        for (int warp = 0; warp < (int)blockDim.x / 32; warp++) {
            sum += warp_sums[warp];
        }
    }
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// state->loss += factor * sum of losses (n) FP32.   one block: 256 KB at n = 65536; FP64 sum, fixed order
__global__ void __launch_bounds__(1024) loss_add_kernel(StepState* state, const float* losses, float factor, size_t n) {
    kernel_begin();
    double sum = 0.0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
        sum += losses[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { state->loss += (float)(factor * sum); }
}

// partials (NORM_BLOCKS) FP64 = sums of squares of grads (n) FP32, each block over its stride
//   bytes    4 read per element: 6.2 GB at 1.56e9, 1.4 ms at 4.3 TB/s; memory-bound
//   numerics FP32 squares, 16 FP32 sums per thread and pass, FP64 above; a square beyond 3.4e38 is Inf: the step is
//            skipped. grads aligned to 16 bytes, n anything
__global__ void __launch_bounds__(NORM_THREADS) global_norm_kernel(double* partials, const float* grads, size_t n) {
    kernel_begin();
    const size_t stride = (size_t)NORM_BLOCKS * NORM_THREADS;
    size_t num_vectors = n / 4, first = blockIdx.x * (size_t)NORM_THREADS + threadIdx.x;
    const float4* vectors = (const float4*)grads;
    double total = 0.0;
    for (size_t i = first; i < num_vectors; i += 4 * stride) {
        float4 v[4] = {};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (i + k * stride < num_vectors) { v[k] = vectors[i + k * stride]; }
        }
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sum += (v[k].x * v[k].x + v[k].y * v[k].y) + (v[k].z * v[k].z + v[k].w * v[k].w);
        }
        total += sum;
    }
    if (first < n % 4) {
        float x = grads[num_vectors * 4 + first];
        total += x * x;
    }
    total = block_sum(total);
    if (threadIdx.x == 0) { partials[blockIdx.x] = total; }
}

// grad_norm = sqrt(sum of partials); skip = loss or norm not finite.   one block of NORM_BLOCKS threads
__global__ void __launch_bounds__(NORM_BLOCKS) global_norm_finish_kernel(StepState* state, const double* partials) {
    kernel_begin();
    double sum = block_sum(partials[threadIdx.x]);
    if (threadIdx.x == 0) {
        float norm = (float)sqrt(sum);
        state->grad_norm = norm;
        state->skip = !is_finite_bits(norm) || !is_finite_bits(state->loss);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel launchers

void loss_add(Device* dev, StepState* state, const float* losses, float factor, size_t n) {
    cost_loss_add(dev, n);
    launch(dev, loss_add_kernel, 1, 1024, 0, state, losses, factor, n);
}

void global_norm(Device* dev, StepState* state, const float* grads, size_t n) {
    cost_global_norm(dev, n);
    check((uintptr_t)grads % 16 == 0, "global_norm: gradients are not aligned to 16 bytes");
    double* partials = (double*)workspace_floats(dev, "global_norm", 2 * NORM_BLOCKS);
    launch(dev, global_norm_kernel, NORM_BLOCKS, NORM_THREADS, 0, partials, grads, n);
    launch(dev, global_norm_finish_kernel, 1, NORM_BLOCKS, 0, state, partials);
}

#endif
