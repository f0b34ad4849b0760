// Softmax cross-entropy and its gradient, one read and one write of the logits: in BF16 in place, or in FP8 row-major,
// and from there transposed. No FP32 logits, no stored probabilities.
//
// A block walks over rows. The row it is at lies in shared memory, every thread has its own vectors of it and goes over
// them twice: for maximum and sum, then for the gradient. As soon as a vector has been read for the last time, its
// thread sends for the same vector of the block's next row, so the memory is never idle while a block computes.
// NOTE: the transposed form is made by a second kernel, 5 bytes per logit in all. Blocks and warps that made it beside
// the rows, band by band, 4 bytes if L2 keeps a band, took longer: 1,280 and 1,290 to 1,440 us instead of 1,200.
#ifndef CLASSIFIER_CUH
#define CLASSIFIER_CUH

#include "gpu.cuh"

#define CLASSIFIER_THREADS 512 // of a block, at most; two blocks per multiprocessor
#define CLASSIFIER_BATCH 4     // vectors that go into the sum together
#define LOG2_E 1.44269504089f
#define LN_2 0.69314718056f
#define SOFTMAX_NOTHING -3.0e38f // maximum of no logits; finite, so that Inf - Inf does not happen before the first
#define TRANSPOSE_SIZE 128       // rows and columns of a tile
#define TRANSPOSE_LOG2_WORDS 5   // 128 rows / 4
#define TRANSPOSE_THREADS 256

typedef struct {
    bf16* logits;    // (rows, Vp); BF16: also the gradient
    uint8_t* data;   // (rows, Vp) FP8
    ScaleSlot* slot; // FP8
    float* losses;
    const int* targets;
    float dloss;
    int with_gradient;
    int cached; // vectors of a row that are kept in shared memory, the first ones
    int rows, V, Vp;
} Classifier;

// ---------------------------------------------------------------------------------------------------------------------
// maximum and sum of a row

// Running maximum, in units of log2, and sum of 2^(x log2(e) - maximum) of what was seen so far.
typedef struct {
    float maximum, sum;
} Softmax;

// The same bits for (b, a): no product of the sum is fused.
__device__ static inline Softmax softmax_join(Softmax a, Softmax b) {
    float maximum = fmaxf(a.maximum, b.maximum);
    float sum_a = __fmul_rn(a.sum, exp2_approx(a.maximum - maximum));
    float sum_b = __fmul_rn(b.sum, exp2_approx(b.maximum - maximum));
    return Softmax{maximum, __fadd_rn(sum_a, sum_b)};
}

// Of the warp, the same bits in every lane.
__device__ static inline Softmax softmax_of_warp(Softmax state) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        Softmax other = {__shfl_xor_sync(0xFFFFFFFFu, state.maximum, distance),
                         __shfl_xor_sync(0xFFFFFFFFu, state.sum, distance)};
        state = softmax_join(state, other);
    }
    return state;
}

// Takes in 8 * N logits. A NaN among them makes the sum NaN (the maximum drops it).
template <int N> __device__ static inline Softmax softmax_add(Softmax state, const uint4 raw[N]) {
    __nv_bfloat162 pairs[4 * N];
    memcpy(pairs, raw, sizeof(pairs));
#pragma unroll
    for (int i = 1; i < 4 * N; i++) {
        pairs[0] = __hmax2(pairs[0], pairs[i]);
    }
    float largest = fmaxf(__low2float(pairs[0]), __high2float(pairs[0]));
    float maximum = fmaxf(state.maximum, largest * LOG2_E);
    float sum = state.sum * exp2_approx(state.maximum - maximum);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float v[8];
        unpack8(v, raw[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = exp2_approx(fmaf(v[j], LOG2_E, -maximum));
        }
        sum += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    }
    return Softmax{maximum, sum};
}

// Takes in the first `count` of 8 logits.
__device__ static inline Softmax softmax_add_some(Softmax state, uint4 raw, int count) {
    uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) { // 0xFF80 is -Inf in BF16
        if (count <= 2 * i) { words[i] = 0xFF80FF80u; }
        if (count == 2 * i + 1) { words[i] = (words[i] & 0xFFFFu) | 0xFF800000u; }
    }
    raw = make_uint4(words[0], words[1], words[2], words[3]);
    return softmax_add<1>(state, &raw);
}

// Vector i of the row at hand.
__device__ static inline uint4 classifier_vector(const Classifier& a, const uint4* slots, const uint4* row, int i) {
    return i < a.cached ? slots[i] : row[i];
}

// Softmax state of a row, from the vectors of this thread.
__device__ static inline Softmax softmax_of_thread(const Classifier& a, const uint4* slots, const uint4* row) {
    Softmax state = {SOFTMAX_NOTHING, 0.0f};
    int whole = a.V / BF16_OF_VECTOR, i = threadIdx.x;
    for (; i + (CLASSIFIER_BATCH - 1) * (int)blockDim.x < whole; i += CLASSIFIER_BATCH * (int)blockDim.x) {
        uint4 raw[CLASSIFIER_BATCH];
#pragma unroll
        for (int k = 0; k < CLASSIFIER_BATCH; k++) {
            raw[k] = classifier_vector(a, slots, row, i + k * (int)blockDim.x);
        }
        state = softmax_add<CLASSIFIER_BATCH>(state, raw);
    }
    for (; i <= whole; i += (int)blockDim.x) {
        int count = min(BF16_OF_VECTOR, a.V - i * BF16_OF_VECTOR);
        if (count > 0) { state = softmax_add_some(state, classifier_vector(a, slots, row, i), count); }
    }
    return state;
}

// Bring this thread's vectors of a row to shared memory, as far as they have slots there.
__device__ static inline void classifier_stage(const Classifier& a, uint4* slots, int row) {
    const uint4* from = (const uint4*)(a.logits + (size_t)row * a.Vp);
    for (int i = threadIdx.x; row < a.rows && i < a.cached; i += (int)blockDim.x) {
        cp_async(&slots[i], from + i);
    }
    cp_async_commit();
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// losses (rows) FP32 = log(sum exp(logits)) - logits[target];  with_gradient: (softmax - onehot) * dloss, as BF16 in
// place of the logits, or as data (rows, Vp) E5M2 = sat(it * scale)
// logits (rows, Vp) BF16, first V columns count, the gradient of the others is 0; targets (rows) int32 in [0, V)
//   bytes    2 read + 2 written per logit, in FP8 1 written: 1648 MB at (8192, 50304) in BF16, 383 us at 4.3 TB/s;
//            memory-bound. Of rows beyond 112 KB only the beginning is kept, the rest is read twice
//   numerics FP32; maximum and sum in one pass (online softmax, Milakov & Gimelshein 2018); ex2.approx: 2 ulp; the
//            gradient is rounded once, to BF16 or E5M2
//   threads  as many blocks as run at once, or one per row. Vp a multiple of 8, V anything
//   bits     deterministic
template <int FP8> __global__ void __launch_bounds__(CLASSIFIER_THREADS, 2) classifier_kernel(Classifier a) {
    kernel_begin();
    extern __shared__ uint4 slots[];
    __shared__ Softmax parts[2][CLASSIFIER_THREADS / 32]; // of even and odd rows: one barrier per row is enough
    const int num_vectors = a.Vp / BF16_OF_VECTOR, warps = (int)blockDim.x / 32, lane = threadIdx.x % 32;
    float one = FP8 ? a.dloss * a.slot->scale : a.dloss;
    classifier_stage(a, slots, (int)blockIdx.x);
    for (int row = (int)blockIdx.x, turn = 0; row < a.rows; row += (int)gridDim.x, turn ^= 1) {
        uint4* logits = (uint4*)(a.logits + (size_t)row * a.Vp);
        int target = a.targets[row], next = row + (int)gridDim.x;
        cp_async_wait();

        // maximum and sum
        Softmax state = softmax_of_warp(softmax_of_thread(a, slots, logits));
        if (lane == 0) { parts[turn][threadIdx.x / 32] = state; }
        __syncthreads();
        state = softmax_of_warp(lane < warps ? parts[turn][lane] : Softmax{SOFTMAX_NOTHING, 0.0f});

        // loss, by the thread that has the target
        int at = target / BF16_OF_VECTOR;
        if (at % (int)blockDim.x == (int)threadIdx.x) {
            const bf16* logit = (const bf16*)(at < a.cached ? &slots[at] : &logits[at]) + target % BF16_OF_VECTOR;
            a.losses[row] = logf(state.sum) + (state.maximum * LN_2 - __bfloat162float(*logit));
        }
        if (!a.with_gradient) {
            classifier_stage(a, slots, next);
            continue;
        }

        // gradient
        float factor = one / state.sum;
        const uint4* from = (const uint4*)(a.logits + (size_t)next * a.Vp);
#pragma unroll 2
        for (int i = threadIdx.x; i < num_vectors; i += (int)blockDim.x) {
            int column = i * BF16_OF_VECTOR, hot = target - column;
            float v[8];
            unpack8(v, classifier_vector(a, slots, logits, i));
            if (i < a.cached && next < a.rows) { cp_async(&slots[i], from + i); }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[j] = exp2_approx(fmaf(v[j], LOG2_E, -state.maximum)) * factor;
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
            if (FP8) {
                uint2 codes =
                    make_uint2(fp8_pack<e5m2>(v[0], v[1], v[2], v[3]), fp8_pack<e5m2>(v[4], v[5], v[6], v[7]));
                *(uint2*)(a.data + (size_t)row * a.Vp + column) = codes;
            } else {
                logits[i] = pack8(v);
            }
        }
    }
    if (FP8 && threadIdx.x == 0 && blockIdx.x == 0) { a.slot->descale = 1.0f / a.slot->scale; }
}

// transposed (cols, rows) = data (rows, cols), bytes.   rows, cols multiples of 16
//   bytes    1 read + 1 written per code: 1648 MB at (16384, 50304), 383 us at 4.3 TB/s; memory-bound
//   threads  256, two patches of 4 x 8 side by side each, tiles of 128 x 128: whole lines on both sides
__global__ void __launch_bounds__(TRANSPOSE_THREADS)
    transpose_codes_kernel(uint8_t* transposed, const uint8_t* data, int rows, int cols) {
    kernel_begin();
    __shared__ uint4 tile[TRANSPOSE_SIZE * TRANSPOSE_SIZE / sizeof(uint4)];
    int first_row = blockIdx.y * TRANSPOSE_SIZE, first_column = blockIdx.x * TRANSPOSE_SIZE;
    int column = threadIdx.x % 8 * 16, word = threadIdx.x / 8, row = first_row + word * PATCH_ROWS;
    uint4 raw[PATCH_ROWS] = {};
#pragma unroll
    for (int r = 0; r < PATCH_ROWS; r++) {
        if (row < rows && first_column + column < cols) {
            raw[r] = *(const uint4*)(data + (size_t)(row + r) * cols + first_column + column);
        }
    }
    Fp8Patch patch[2];
#pragma unroll
    for (int r = 0; r < PATCH_ROWS; r++) {
        patch[0].left[r] = raw[r].x;
        patch[0].right[r] = raw[r].y;
        patch[1].left[r] = raw[r].z;
        patch[1].right[r] = raw[r].w;
    }
    patch_to_tile((uint32_t*)tile, TRANSPOSE_LOG2_WORDS, column, word, &patch[0]);
    patch_to_tile((uint32_t*)tile, TRANSPOSE_LOG2_WORDS, column + PATCH_COLS, word, &patch[1]);
    __syncthreads();
    const int chunks = TRANSPOSE_SIZE / 16;
#pragma unroll
    for (int i = 0; i < TRANSPOSE_SIZE * chunks / TRANSPOSE_THREADS; i++) {
        int at = threadIdx.x + i * TRANSPOSE_THREADS, chunk = at % chunks, c = at / chunks;
        int to_row = first_row + chunk * 16, to_column = first_column + c;
        if (to_row < rows && to_column < cols) {
            *(uint4*)(transposed + (size_t)to_column * rows + to_row) =
                tile_chunk((const uint32_t*)tile, TRANSPOSE_LOG2_WORDS, c, chunk);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel launchers

static inline void classifier_launch(Device* dev, void (*kernel)(Classifier), Classifier args) {
    int num_vectors = args.Vp / BF16_OF_VECTOR, threads = (int)ceil_div((size_t)num_vectors, 32) * 32, at_once = 0;
    threads = threads < CLASSIFIER_THREADS ? threads : CLASSIFIER_THREADS;
    cudaFuncAttributes attributes;
    cuda_check(cudaFuncGetAttributes(&attributes, kernel));
    // half a multiprocessor's, less what every block has besides
    size_t room = dev->properties.sharedMemPerMultiprocessor / 2 - dev->properties.reservedSharedMemPerBlock -
                  attributes.sharedSizeBytes;
    int room_vectors = (int)(room / sizeof(uint4));
    args.cached = num_vectors < room_vectors ? num_vectors : room_vectors;
    size_t shared_bytes = (size_t)args.cached * sizeof(uint4);
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes));
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, kernel, threads, shared_bytes));
    int blocks = at_once * dev->properties.multiProcessorCount;
    check(blocks > 0, "classifier: %zu bytes of shared memory per block do not fit", shared_bytes);
    blocks = blocks < args.rows ? blocks : args.rows;
    launch(dev, kernel, (unsigned)blocks, (unsigned)threads, shared_bytes, args);
}

void classifier(Device* dev, E5m2Tensor dlogits, float* losses, bf16* logits, const int* targets, float dloss,
                int with_gradient, int rows, int V, int Vp) {
    cost_classifier(dev, with_gradient, rows, Vp);
    check(rows > 0 && V > 0 && V <= Vp && Vp % BF16_OF_VECTOR == 0,
          "classifier: (rows, V, Vp) = (%d, %d, %d), want rows > 0, 0 < V <= Vp, Vp a multiple of %d", rows, V, Vp,
          BF16_OF_VECTOR);
    check((uintptr_t)logits % 16 == 0, "classifier: logits are not aligned to 16 bytes");
    Classifier args = {};
    args.logits = logits;
    args.losses = losses;
    args.targets = targets;
    args.dloss = dloss;
    args.with_gradient = with_gradient;
    args.rows = rows;
    args.V = V;
    args.Vp = Vp;
    if (!with_gradient || (dlogits.data == NULL && dlogits.transposed == NULL)) {
        check(!with_gradient || dlogits.wide == logits,
              "classifier: dlogits in BF16 replace the logits, found another place");
        classifier_launch(dev, classifier_kernel<0>, args);
        return;
    }
    check_forms("classifier", forms_of_e5m2(dlogits), dlogits.slot, 1, rows, Vp);
    check(dlogits.wide == NULL, "classifier: dlogits in FP8 and BF16, want one of them");
    check(dlogits.data != NULL, "classifier: dlogits in FP8 without the row-major form");
    args.data = (uint8_t*)dlogits.data;
    args.slot = dlogits.slot;
    classifier_launch(dev, classifier_kernel<1>, args);
    if (dlogits.transposed == NULL) { return; }
    size_t row_tiles = ceil_div((size_t)rows, TRANSPOSE_SIZE);
    check(row_tiles <= 65535, "classifier: %d rows, want at most %d", rows, 65535 * TRANSPOSE_SIZE);
    dim3 grid((unsigned)ceil_div((size_t)Vp, TRANSPOSE_SIZE), (unsigned)row_tiles);
    launch(dev, transpose_codes_kernel, grid, TRANSPOSE_THREADS, 0, (uint8_t*)dlogits.transposed, args.data, rows,
           Vp);
}

#endif
