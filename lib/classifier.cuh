// Softmax cross-entropy and its gradient: in BF16 in place, one read and one write of the logits; in FP8 row-major and
// transposed, one read of the logits from memory and one from L2. No FP32 logits, no stored probabilities.
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

// Softmax state of a row of 8 * num_vectors logits, the same in every thread. The whole block calls (at most
// CLASSIFIER_THREADS, whole warps). cache: shared memory that keeps the row, each thread's own share; or NULL.
template <int BATCH>
__device__ static inline Softmax softmax_of_row(const uint4* row, uint4* cache, int num_vectors, int V) {
    __shared__ Softmax warp_softmax[CLASSIFIER_THREADS / 32];
    int threads = blockDim.x;
    Softmax state = {-3.0e38f, 0.0f}; // finite, so that Inf - Inf never happens before the first logit
    for (int first = threadIdx.x; first < num_vectors; first += BATCH * threads) {
        uint4 raw[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            int i = first + k * threads;
            if (i < num_vectors) { raw[k] = row[i]; }
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            int i = first + k * threads;
            if (i < num_vectors) {
                if (cache != NULL) { cache[i] = raw[k]; }
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
    return state;
}

__device__ static inline float softmax_loss(Softmax state, float target_logit) {
    return logf(state.sum) + (state.maximum * LN_2 - target_logit);
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
    uint4* row = (uint4*)(logits + (size_t)blockIdx.x * Vp);
    int num_vectors = Vp / BF16_OF_VECTOR, threads = blockDim.x;
    int target = targets[blockIdx.x];
    float target_logit = __bfloat162float(logits[(size_t)blockIdx.x * Vp + target]);

    Softmax state = softmax_of_row<CLASSIFIER_BATCH>(row, cached ? shared_memory : NULL, num_vectors, V);
    if (threadIdx.x == 0) { losses[blockIdx.x] = softmax_loss(state, target_logit); }
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

// The FP8 gradient works on bands of 64 rows: first one block per row makes the losses of a band, then one block per
// tile of 64 x 128 logits its gradient, so that both copies leave in whole sectors.
#define BAND_ROWS 64
#define BAND_LOG2_WORDS 4 // 64 rows / 4
#define BAND_COLS 128
#define BAND_THREADS 256 // 16 x 16 patches of 4 x 8
#define BAND_LAG 4       // bands whose losses are on their way while the oldest band's tiles are made
#define BAND_BLOCKS 4    // per multiprocessor
#define BAND_BATCH 4     // CLASSIFIER_BATCH of the losses

typedef struct {
    uint8_t* data;       // (rows, Vp) or NULL
    uint8_t* transposed; // (Vp, rows) or NULL
    ScaleSlot* slot;
    float* losses;
    const bf16* logits;
    const int* targets;
    float2* rows_softmax; // (rows) maximum as in Softmax; factor: 2^(x log2(e) - maximum) -> scaled gradient
    int* tickets; // [0]: blocks that started; [1 + band]: rows of the band whose loss is there. All zero at the launch
    float dloss;
    int rows, V, Vp;
} ClassifierFp8;

// Loss of one row, and the news that it is there.
__device__ static inline void classifier_fp8_loss(const ClassifierFp8& a, int row) {
    const bf16* logits = a.logits + (size_t)row * a.Vp;
    Softmax state = softmax_of_row<BAND_BATCH>((const uint4*)logits, NULL, a.Vp / BF16_OF_VECTOR, a.V);
    if (threadIdx.x == 0) {
        a.losses[row] = softmax_loss(state, __bfloat162float(logits[a.targets[row]]));
        a.rows_softmax[row] = make_float2(state.maximum, a.dloss * a.slot->scale / state.sum);
        __threadfence();
        atomicAdd(&a.tickets[1 + row / BAND_ROWS], 1);
    }
}

// Both forms of the gradient of one tile.
__device__ static inline void classifier_fp8_tile(const ClassifierFp8& a, int band, int tile_column) {
    __shared__ uint4 tile[BAND_COLS * BAND_ROWS / sizeof(uint4)];
    __shared__ float2 softmax[BAND_ROWS];
    __shared__ int target[BAND_ROWS];
    int first_row = band * BAND_ROWS, first_column = tile_column * BAND_COLS;
    int group = threadIdx.x % (BAND_COLS / PATCH_COLS), word = threadIdx.x / (BAND_COLS / PATCH_COLS);
    int row = first_row + word * PATCH_ROWS, column = first_column + group * PATCH_COLS;
    int inside = row < a.rows && column < a.Vp; // rows is a multiple of 16, Vp of 8: a patch is in or out
    uint4 raw[PATCH_ROWS] = {};
#pragma unroll
    for (int r = 0; r < PATCH_ROWS; r++) {
        if (inside) { raw[r] = __ldcs((const uint4*)(a.logits + (size_t)(row + r) * a.Vp + column)); }
    }
    int mine = first_row + threadIdx.x;
    if (threadIdx.x < BAND_ROWS && mine < a.rows) {
        int wanted = min(BAND_ROWS, a.rows - first_row), there;
        target[threadIdx.x] = a.targets[mine];
        do { // blocks that make it have started: their tickets are lower
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(&a.tickets[1 + band]) : "memory");
        } while (there < wanted);
        softmax[threadIdx.x] = __ldcg(&a.rows_softmax[mine]);
    }
    __syncthreads();
    float one = a.dloss * a.slot->scale;
    Fp8Patch patch = {};
#pragma unroll
    for (int r = 0; r < PATCH_ROWS; r++) {
        int line = word * PATCH_ROWS + r, hot = target[line] - column;
        float2 state = softmax[line];
        float v[8];
        unpack8(v, raw[r]);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = exp2_approx(fmaf(v[j], LOG2_E, -state.x)) * state.y;
        }
        if (hot >= 0 && hot < 8) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (j == hot) { v[j] -= one; }
            }
        }
        if (column + 8 > a.V) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[j] = column + j < a.V ? v[j] : 0.0f;
            }
        }
        patch.left[r] = fp8_pack<e5m2>(v[0], v[1], v[2], v[3]);
        patch.right[r] = fp8_pack<e5m2>(v[4], v[5], v[6], v[7]);
        if (inside && a.data != NULL) {
            __stcs((uint2*)(a.data + (size_t)(row + r) * a.Vp + column), make_uint2(patch.left[r], patch.right[r]));
        }
    }
    if (a.transposed == NULL) { return; }
    patch_to_tile((uint32_t*)tile, BAND_LOG2_WORDS, group * PATCH_COLS, word, &patch);
    __syncthreads();
    for (int i = threadIdx.x; i < BAND_COLS * BAND_ROWS / 16; i += BAND_THREADS) {
        int chunk = i % (BAND_ROWS / 16), c = i / (BAND_ROWS / 16), to = first_row + chunk * 16;
        if (to < a.rows && first_column + c < a.Vp) {
            __stcs((uint4*)(a.transposed + (size_t)(first_column + c) * a.rows + to),
                   tile_chunk((const uint32_t*)tile, BAND_LOG2_WORDS, c, chunk));
        }
    }
}

// losses as classifier_kernel; data (rows, Vp), transposed (Vp, rows) E5M2 = sat((softmax - onehot) * dloss * scale)
//   bytes    2 read + 2 written per logit, and 2 read from L2: as classifier_kernel
//   numerics FP32 as classifier_kernel; one rounding, to E5M2
//   threads  256. Tickets give blocks their work in order: losses of the first BAND_LAG bands, then by turns losses of
//            one more band and tiles of the oldest. A tile waits only for blocks with lower tickets, hardly ever long,
//            and finds its logits in L2. rows a multiple of 16, Vp of 16
//   bits     deterministic: integer counters only say when
__global__ void __launch_bounds__(BAND_THREADS, BAND_BLOCKS)
    classifier_fp8_kernel(ClassifierFp8 a, int num_bands, int num_tiles) {
    __shared__ int shared_ticket;
    if (threadIdx.x == 0) { shared_ticket = atomicAdd(&a.tickets[0], 1); }
    __syncthreads();
    int lag = min(BAND_LAG, num_bands), both = BAND_ROWS + num_tiles;
    int turn = shared_ticket - lag * BAND_ROWS, end = turn - (num_bands - lag) * both;
    int row = -1, band = 0, tile = 0;
    if (turn < 0) {
        row = shared_ticket;
    } else if (end >= 0) { // all losses are given out
        band = num_bands - lag + end / num_tiles;
        tile = end % num_tiles;
    } else {
        band = turn / both;
        tile = turn % both - BAND_ROWS;
        if (tile < 0) { row = (band + lag) * BAND_ROWS + tile + BAND_ROWS; }
    }
    if (row < 0) {
        classifier_fp8_tile(a, band, tile);
    } else if (row < a.rows) {
        classifier_fp8_loss(a, row);
    }
    if (shared_ticket == 0 && threadIdx.x == 0) { a.slot->descale = 1.0f / a.slot->scale; }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel launchers

static inline void classifier_fp8(Device* dev, E5m2Tensor dlogits, float* losses, const bf16* logits,
                                  const int* targets, float dloss, int rows, int V, int Vp) {
    check_forms("classifier", forms_of_e5m2(dlogits), dlogits.slot, 1, rows, Vp);
    check(dlogits.wide == NULL, "classifier: dlogits in FP8 and BF16, want one of them");
    int num_bands = (int)ceil_div((size_t)rows, BAND_ROWS), num_tiles = (int)ceil_div((size_t)Vp, BAND_COLS);
    size_t num_tickets = 1 + (size_t)num_bands;
    float* scratch = workspace_floats(dev, "classifier", 2 * (size_t)rows + num_tickets);
    float2* rows_softmax = (float2*)scratch;
    int* tickets = (int*)(scratch + 2 * (size_t)rows);
    cuda_check(cudaMemsetAsync(tickets, 0, num_tickets * sizeof(int), dev->stream));
    ClassifierFp8 args = {(uint8_t*)dlogits.data, (uint8_t*)dlogits.transposed, dlogits.slot, losses, logits, targets,
                          rows_softmax, tickets, dloss, rows, V, Vp};
    int blocks = num_bands * (BAND_ROWS + num_tiles);
    classifier_fp8_kernel<<<blocks, BAND_THREADS, 0, dev->stream>>>(args, num_bands, num_tiles);
    cuda_check(cudaGetLastError());
}

void classifier(Device* dev, E5m2Tensor dlogits, float* losses, bf16* logits, const int* targets, float dloss,
                int with_gradient, int rows, int V, int Vp) {
    cost_classifier(dev, with_gradient, rows, Vp);
    check(rows > 0 && V > 0 && V <= Vp && Vp % BF16_OF_VECTOR == 0,
          "classifier: (rows, V, Vp) = (%d, %d, %d), want rows > 0, 0 < V <= Vp, Vp a multiple of %d", rows, V, Vp,
          BF16_OF_VECTOR);
    check((uintptr_t)logits % 16 == 0, "classifier: logits are not aligned to 16 bytes");
    if (with_gradient && (dlogits.data != NULL || dlogits.transposed != NULL)) {
        classifier_fp8(dev, dlogits, losses, logits, targets, dloss, rows, V, Vp);
        return;
    }
    check(!with_gradient || dlogits.wide == logits,
          "classifier: dlogits in BF16 replace the logits, found another place");
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
