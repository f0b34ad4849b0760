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

// What a rank owns, in one table, since the layers of a tensor are cut alike: its slice of layer l of tensor t begins
// at grads + first[t] + l * n[t].
typedef struct {
    size_t first[NUM_TENSORS];    // element of layer 0's slice in the flat arrays
    size_t n[NUM_TENSORS];        // elements of a layer
    uint32_t count[NUM_TENSORS];  // elements of the slice, a multiple of 16
    uint32_t blocks[NUM_TENSORS]; // of GRAD_BLOCK elements, the last may be shorter: of the slice
    uint32_t end[NUM_TENSORS];    // blocks of all layers of the tensors up to this one
} OwnedSlices;

// partials (NORM_BLOCKS) FP64 = sums of squares of the slices, each thread block over its stride of GRAD_BLOCKs
//   bytes    4 read per element: 1.56 GB for d48 on 4 ranks, 0.36 ms at 4.3 TB/s; memory-bound
//   numerics as global_norm_kernel: FP32 squares, 16 FP32 sums per lane and pass, FP64 above
//   threads  a warp per block of 256 elements, 4 of each half per lane, two blocks on the way; grads aligned to 16
//   bytes
__global__ void __launch_bounds__(NORM_THREADS)
    norm_of_slices_kernel(double* partials, const float* grads, const __grid_constant__ OwnedSlices own) {
    kernel_begin();
    const uint32_t stride = NORM_BLOCKS * (NORM_THREADS / 32), num_blocks = own.end[NUM_TENSORS - 1];
    uint32_t lane = threadIdx.x % 32;
    double total = 0.0;
    for (uint32_t first = threadIdx.x / 32 * NORM_BLOCKS + blockIdx.x; first < num_blocks; first += 2 * stride) {
        float4 v[2][2] = {};
#pragma unroll
        for (uint32_t turn = 0; turn < 2; turn++) {
            uint32_t block = first + turn * stride;
            if (block >= num_blocks) { continue; }
            int t = 0;
            while (block >= own.end[t]) {
                t++;
            }
            block -= t > 0 ? own.end[t - 1] : 0;
            uint32_t layer = block / own.blocks[t], at = block % own.blocks[t] * GRAD_BLOCK + 4 * lane;
            const float* slice = grads + own.first[t] + layer * own.n[t];
#pragma unroll
            for (uint32_t k = 0; k < 2; k++) { // counts are multiples of 4: a vector is in or out
                uint32_t i = at + k * (GRAD_BLOCK / 2);
                if (i < own.count[t]) { v[turn][k] = *(const float4*)(slice + i); }
            }
        }
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 x = v[i / 2][i % 2];
            sum += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
        }
        total += sum;
    }
    total = block_sum(total);
    if (threadIdx.x == 0) { partials[blockIdx.x] = total; }
}

// *part = sum of partials, and the loss of the state.   one block of NORM_BLOCKS threads
__global__ void __launch_bounds__(NORM_BLOCKS)
    norm_of_slices_finish_kernel(RankNorm* part, const StepState* state, const double* partials) {
    kernel_begin();
    double sum = block_sum(partials[threadIdx.x]);
    if (threadIdx.x == 0) {
        RankNorm own = {sum, state->loss, 0.0f};
        *part = own;
    }
}

// Loss and squares of parts (num_ranks), in rank order; norm, skip.   one thread
__global__ void norm_of_ranks_kernel(StepState* state, const RankNorm* parts, int num_ranks) {
    kernel_begin();
    double loss = 0.0, squares = 0.0;
#pragma unroll 8
    for (int r = 0; r < num_ranks; r++) {
        loss += (double)parts[r].loss;
        squares += parts[r].squares;
    }
    float norm = (float)sqrt(squares), mean = (float)loss;
    state->loss = mean;
    state->grad_norm = norm;
    state->skip = !is_finite_bits(norm) || !is_finite_bits(mean);
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

static inline OwnedSlices owned_slices(const Shards* shards, int rank) {
    OwnedSlices own = {};
    size_t end = 0;
    for (int t = 0; t < NUM_TENSORS; t++) {
        const Piece* piece = shards_piece(shards, t, 0);
        int is_outside = shards_bucket(shards, t, 0) == &shards->bucket[shards->num_layers]; // of the layers
        SliceRange range = piece_owned(piece, rank);
        size_t count = range.end - range.begin, blocks = ceil_div(count, GRAD_BLOCK);
        end += blocks * (is_outside ? 1 : (size_t)shards->num_layers);
        check(count <= UINT32_MAX - GRAD_BLOCK && end <= UINT32_MAX / 2,
              "norm_of_slices: a slice of %zu elements, %zu blocks", count, end);
        own.first[t] = piece->offset + range.begin;
        own.n[t] = piece->n;
        own.count[t] = (uint32_t)count;
        own.blocks[t] = (uint32_t)blocks;
        own.end[t] = (uint32_t)end;
    }
    return own;
}

void norm_of_slices(Device* dev, RankNorm* part, const StepState* state, const float* grads, const Shards* shards,
                    int rank) {
    cost_norm_of_slices(dev, shards);
    check(rank >= 0 && rank < shards->num_ranks, "norm_of_slices: rank %d of %d, want 0 <= rank < ranks", rank,
          shards->num_ranks);
    check((uintptr_t)grads % 16 == 0, "norm_of_slices: gradients are not aligned to 16 bytes");
    double* partials = (double*)workspace_floats(dev, "norm_of_slices", 2 * NORM_BLOCKS);
    launch(dev, norm_of_slices_kernel, NORM_BLOCKS, NORM_THREADS, 0, partials, grads, owned_slices(shards, rank));
    launch(dev, norm_of_slices_finish_kernel, 1, NORM_BLOCKS, 0, part, state, partials);
}

void norm_of_ranks(Device* dev, StepState* state, const RankNorm* parts, int num_ranks) {
    cost_norm_of_ranks(dev, num_ranks);
    check(num_ranks >= 1, "norm_of_ranks: %d ranks, want 1 or more", num_ranks);
    launch(dev, norm_of_ranks_kernel, 1, 1, 0, state, parts, num_ranks);
}

#endif
