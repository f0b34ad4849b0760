// Softmax cross-entropy and its gradient in place, one read and one write of the logits. No FP32 logits, no stored
// probabilities.
#ifndef CLASSIFIER_CUH
#define CLASSIFIER_CUH

#include "gpu.cuh"

#define CLASSIFIER_THREADS 512 // at most; two blocks per multiprocessor
#define CLASSIFIER_BATCH 4     // vectors of a thread whose loads are in flight together
#define LOG2_E 1.44269504089f
#define LN_2 0.69314718056f

// Running maximum, in units of log2, and sum of 2^(x log2(e) - maximum) of what was seen so far.
typedef struct {
    float maximum, sum;
} Softmax;

__device__ static inline Softmax softmax_join(Softmax a, Softmax b) {
    float maximum = fmaxf(a.maximum, b.maximum);
    float sum = a.sum * exp2_approx(a.maximum - maximum) + b.sum * exp2_approx(b.maximum - maximum);
    return Softmax{maximum, sum};
}

// Takes in 8 logits of which those from column V on do not count. A NaN logit makes the sum NaN.
__device__ static inline Softmax softmax_add8(Softmax state, uint4 raw, int column, int V) {
    float v[8];
    unpack8(v, raw);
    if (column + 8 > V) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = column + j < V ? v[j] : __int_as_float(0xFF800000); // -Inf
        }
    }
    float largest = v[0];
#pragma unroll
    for (int j = 1; j < 8; j++) {
        largest = fmaxf(largest, v[j]);
    }
    float maximum = fmaxf(state.maximum, largest * LOG2_E);
    float sum = state.sum * exp2_approx(state.maximum - maximum);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        sum += exp2_approx(fmaf(v[j], LOG2_E, -maximum));
    }
    return Softmax{maximum, sum};
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// losses (rows) FP32 = log(sum exp(logits)) - logits[target];  with_gradient: logits = (softmax - onehot) * dloss
// logits (rows, Vp) BF16, first V columns count, the gradient of the others is 0; targets (rows) int32 in [0, V)
//   bytes    2 read + 2 written per logit: 1648 MB at (8192, 50304), 383 us at 4.3 TB/s; memory-bound
//   numerics FP32; maximum and sum in one pass (online softmax, Milakov & Gimelshein 2018); ex2.approx: 2 ulp; the
//            gradient is rounded once, to BF16
//   threads  one block per row. cached: the row stays in shared memory between the passes (98 KB at Vp = 50304), else
//            it is read again. Vp a multiple of 8, V anything
//   bits     deterministic
__global__ void __launch_bounds__(CLASSIFIER_THREADS, 2)
    classifier_kernel(bf16* logits, float* losses, const int* targets, float dloss, int with_gradient, int cached,
                      int V, int Vp) {
    extern __shared__ uint4 shared_memory[];
    __shared__ Softmax warp_softmax[CLASSIFIER_THREADS / 32];
    uint4* row = (uint4*)(logits + (size_t)blockIdx.x * Vp);
    int num_vectors = Vp / BF16_OF_VECTOR, threads = blockDim.x;
    int target = targets[blockIdx.x];
    float target_logit = __bfloat162float(logits[(size_t)blockIdx.x * Vp + target]);

    // maximum and sum
    Softmax state = {-3.0e38f, 0.0f}; // finite, so that Inf - Inf never happens before the first logit
    for (int first = threadIdx.x; first < num_vectors; first += CLASSIFIER_BATCH * threads) {
        uint4 raw[CLASSIFIER_BATCH];
#pragma unroll
        for (int k = 0; k < CLASSIFIER_BATCH; k++) {
            int i = first + k * threads;
            if (i < num_vectors) { raw[k] = row[i]; }
        }
#pragma unroll
        for (int k = 0; k < CLASSIFIER_BATCH; k++) {
            int i = first + k * threads;
            if (i < num_vectors) {
                if (cached) { shared_memory[i] = raw[k]; }
                if (i * BF16_OF_VECTOR < V) { state = softmax_add8(state, raw[k], i * BF16_OF_VECTOR, V); }
            }
        }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        Softmax other = {__shfl_xor_sync(0xFFFFFFFFu, state.maximum, distance),
                         __shfl_xor_sync(0xFFFFFFFFu, state.sum, distance)};
        state = softmax_join(state, other);
    }
    if (threadIdx.x % 32 == 0) { warp_softmax[threadIdx.x / 32] = state; }
    __syncthreads();
    state = warp_softmax[0];
    for (int warp = 1; warp < threads / 32; warp++) { // every thread, the same order
        state = softmax_join(state, warp_softmax[warp]);
    }
    if (threadIdx.x == 0) { losses[blockIdx.x] = logf(state.sum) + (state.maximum * LN_2 - target_logit); }
    if (!with_gradient) { return; }

    // gradient
    float factor = dloss / state.sum;
    for (int i = threadIdx.x; i < num_vectors; i += threads) {
        int column = i * BF16_OF_VECTOR;
        float v[8];
        unpack8(v, cached ? shared_memory[i] : row[i]); // each thread reads what it has stored itself
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = exp2_approx(fmaf(v[j], LOG2_E, -state.maximum)) * factor;
        }
        if (target >= column && target < column + 8) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (target == column + j) { v[j] -= dloss; }
            }
        }
        if (column + 8 > V) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[j] = column + j < V ? v[j] : 0.0f;
            }
        }
        row[i] = pack8(v);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel launchers

void classifier(Device* dev, bf16* logits, float* losses, const int* targets, float dloss, int with_gradient, int rows,
                int V, int Vp) {
    check(rows > 0 && V > 0 && V <= Vp && Vp % BF16_OF_VECTOR == 0,
          "classifier: (rows, V, Vp) = (%d, %d, %d), want rows > 0, 0 < V <= Vp, Vp a multiple of %d", rows, V, Vp,
          BF16_OF_VECTOR);
    check((uintptr_t)logits % 16 == 0, "classifier: logits are not aligned to 16 bytes");
    size_t row_bytes = (size_t)Vp * sizeof(bf16);
    size_t most = dev->properties.sharedMemPerBlockOptin - 1024; // the kernel's own fixed part is small
    int cached = with_gradient && row_bytes <= most;
    size_t shared_bytes = cached ? row_bytes : 0;
    int threads = (int)ceil_div((size_t)Vp / BF16_OF_VECTOR, 32) * 32;
    threads = threads < CLASSIFIER_THREADS ? threads : CLASSIFIER_THREADS;
    if (shared_bytes > 0) {
        cuda_check(
            cudaFuncSetAttribute(classifier_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes));
        cuda_check(cudaFuncSetAttribute(classifier_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    }
    classifier_kernel<<<rows, threads, shared_bytes, dev->stream>>>(logits, losses, targets, dloss, with_gradient,
                                                                    cached, V, Vp);
    cuda_check(cudaGetLastError());
}

#endif
