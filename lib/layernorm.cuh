// Residual add + LayerNorm (Ba et al. 2016) that writes FP8 in both layouts, and its backward pass, each in one pass
// over memory.
//
// Both need whole-row sums before they can write anything, and tiles of several rows to write the transposed FP8 form.
// A block walks down the rows of its strip in steps; a step is 4 rows per row lane, all columns.
//
//   inside a block   thread = one patch of a step: 4 rows x 8 columns. It has the same 8 columns in every step, so
//                    weights and column sums stay in its registers. A row lane is whole warps; threads beyond C idle.
//   staging          each thread copies the vectors of steps to come to its own slots of shared memory (cp.async: bytes
//                    in flight without registers) and reads them back itself: no barrier, no conflicts, and the
//                    memory is not idle while the block computes.
//   row sums         4 rows at once by warp shuffles, then one barrier per step, then every warp adds the parts of all
//                    warps of the row for itself.
//   transposed       patches gather in a tile of R rows, which is written when it is full.
//   wide rows        a cluster of blocks shares the columns and reads the others' parts over the cluster.
#ifndef LAYERNORM_CUH
#define LAYERNORM_CUH

#include <limits.h>

#include "gpu.cuh"

#define LAYERNORM_EPSILON 1e-5f
#define LAYERNORM_VECTORS (2 * PATCH_ROWS) // staged per thread and step: 4 rows of two tensors
#define LAYERNORM_WARPS 14                 // of a block, unless one row takes more
#define LAYERNORM_MAX_THREADS 512
#define LAYERNORM_MAX_WARPS (LAYERNORM_MAX_THREADS / 32)
#define LAYERNORM_MAX_SHARED (224 * 1024) // bytes of a block, of the 227 KB it can have
#define LAYERNORM_MAX_C 12288

// How a tensor of C columns is cut.
typedef struct {
    int blocks;     // of a cluster: they share the columns
    int groups;     // 8-column groups per block; the last block may have fewer
    int row_warps;  // warps of a row lane: ceil(groups / 32)
    int row_lanes;  // patches of a step, one below the other: a power of two, at most 4
    int log2_words; // R = 4 rows of a word << log2_words
    int log2_steps; // of a tile: R / (4 row_lanes)
    int stages;     // steps staged, 1 or 2: copied that far ahead
    int threads;    // 32 * row_warps * row_lanes
    int tiles;      // is there a tile in shared memory?
} LayerNormShape;

// Bytes of shared memory: the staged vectors and the FP8 tile.
__host__ __device__ static inline size_t layernorm_shared_bytes(LayerNormShape shape) {
    size_t staged = (size_t)shape.stages * LAYERNORM_VECTORS * shape.threads * sizeof(uint4);
    return staged + (shape.tiles ? (size_t)shape.groups * PATCH_COLS * sizeof(uint32_t) << shape.log2_words : 0);
}

// Up to 14 warps, which have a multiprocessor to themselves or share it with another block's; 16 warps were slower.
// Tiles of 128 rows, whole lines of the transposed form, or 64 or 32 where there is no room or where shorter ones give
// the multiprocessors more even shares. `stages` are wanted, where the second costs no height of the tile.
static inline LayerNormShape layernorm_shape(const Device* dev, int rows, int C, int tiles, int stages) {
    check(C <= LAYERNORM_MAX_C, "layernorm: C = %d, want at most %d", C, LAYERNORM_MAX_C);
    LayerNormShape shape;
    int groups = (int)ceil_div((size_t)C, PATCH_COLS), log2_lanes = 0, least = INT_MAX;
    shape.blocks = groups <= 512 ? 1 : groups <= 1024 ? 2 : 4;
    shape.groups = (int)ceil_div((size_t)groups, (size_t)shape.blocks);
    shape.row_warps = (int)ceil_div((size_t)shape.groups, 32);
    while (log2_lanes < 2 && 2 * shape.row_warps << log2_lanes <= LAYERNORM_WARPS) {
        log2_lanes++;
    }
    shape.row_lanes = 1 << log2_lanes;
    shape.threads = 32 * shape.row_warps * shape.row_lanes;
    shape.tiles = tiles;
    shape.stages = 1;
    int best = 3; // without tiles it only says which rows a strip has
    for (shape.log2_words = tiles ? 5 : 3; shape.log2_words >= 3; shape.log2_words--) {
        size_t count = ceil_div((size_t)rows, (size_t)PATCH_ROWS << shape.log2_words);
        int share = (int)ceil_div(count, (size_t)dev->properties.multiProcessorCount) << shape.log2_words; // largest
        if (layernorm_shared_bytes(shape) <= LAYERNORM_MAX_SHARED && share < least) {
            best = shape.log2_words;
            least = share;
        }
    }
    shape.log2_words = best;
    shape.log2_steps = best - log2_lanes;
    shape.stages = stages;
    if (layernorm_shared_bytes(shape) > LAYERNORM_MAX_SHARED) { shape.stages = 1; }
    return shape;
}

// Where a thread stands.
typedef struct {
    int active;       // 0: beyond the columns; computes on zeros and writes nothing
    int group;        // in the block
    int lane;         // row lane
    int warp;         // in the row lane
    int column;       // first of its 8 columns, in the tensor
    int first_column; // of the block
    int num_groups;   // that this block really has
} LayerNormPlace;

__device__ static inline LayerNormPlace layernorm_place(LayerNormShape shape, int C) {
    LayerNormPlace place;
    int warp = (int)threadIdx.x / 32;
    place.first_column = (int)cluster_rank() * shape.groups * PATCH_COLS;
    place.num_groups = max(0, min(shape.groups, (C - place.first_column) / PATCH_COLS));
    place.lane = warp / shape.row_warps;
    place.warp = warp - place.lane * shape.row_warps;
    place.group = place.warp * 32 + (int)threadIdx.x % 32;
    place.column = place.first_column + place.group * PATCH_COLS;
    place.active = place.group < place.num_groups;
    return place;
}

// Steps of this strip: its tiles are blockIdx.y, blockIdx.y + gridDim.y, ...
__device__ static inline int layernorm_steps(LayerNormShape shape, int rows) {
    int R = PATCH_ROWS << shape.log2_words, tiles = (rows + R - 1) / R;
    return (tiles - (int)blockIdx.y + (int)gridDim.y - 1) / (int)gridDim.y << shape.log2_steps;
}

// 4-row word of the tile that a thread's patch of a step is.
__device__ static inline int layernorm_word(LayerNormShape shape, LayerNormPlace place, int step) {
    return (step & ((1 << shape.log2_steps) - 1)) * shape.row_lanes + place.lane;
}

// First row of the step's tile.
__device__ static inline int layernorm_first_row(LayerNormShape shape, int step) {
    return ((int)blockIdx.y + (step >> shape.log2_steps) * (int)gridDim.y) * (PATCH_ROWS << shape.log2_words);
}

// A thread's slots of a step: vector v of it at v * 32.
__device__ static inline uint4* layernorm_slots(uint4* shared_memory, LayerNormShape shape, int step) {
    int warp = (int)threadIdx.x / 32, stage = step & (shape.stages - 1);
    return shared_memory + (warp * shape.stages + stage) * (LAYERNORM_VECTORS * 32) + threadIdx.x % 32;
}

// The slots of threads beyond the columns stay 0.
__device__ static inline void layernorm_clear_slots(uint4* shared_memory, LayerNormShape shape) {
    for (int step = 0; step < shape.stages; step++) {
        uint4* slots = layernorm_slots(shared_memory, shape, step);
#pragma unroll
        for (int v = 0; v < LAYERNORM_VECTORS; v++) {
            slots[v * 32] = make_uint4(0, 0, 0, 0);
        }
    }
}

// Bring 4 rows of a thread's columns to its slots, the first at `from`; only `count` of them exist, the others are 0.
__device__ static inline void layernorm_stage(uint4* slots, const bf16* from, int count, int C) {
    if (count >= PATCH_ROWS) {
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++, from += C) {
            cp_async(&slots[r * 32], from);
        }
    } else {
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++, from += C) {
            if (r < count) {
                cp_async(&slots[r * 32], from);
            } else {
                slots[r * 32] = make_uint4(0, 0, 0, 0);
            }
        }
    }
}

// Waits for the step whose copies are the oldest.
__device__ static inline void layernorm_wait(LayerNormShape shape) {
    if (shape.stages == 1) {
        cp_async_wait_group<0>();
    } else {
        cp_async_wait_group<1>();
    }
}

// Sums over the warp of 4 values at once: lane l gets that of v[l / 8], in a fixed order, the same bits in all 8 lanes.
__device__ static inline float layernorm_warp_sum4(const float v[4]) {
    int upper = threadIdx.x & 16;
    float a = upper ? v[2] : v[0], b = upper ? v[3] : v[1];
    a += __shfl_xor_sync(0xFFFFFFFFu, upper ? v[0] : v[2], 16);
    b += __shfl_xor_sync(0xFFFFFFFFu, upper ? v[1] : v[3], 16);
    upper = threadIdx.x & 8;
    float sum = (upper ? b : a) + __shfl_xor_sync(0xFFFFFFFFu, upper ? a : b, 8);
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    }
    return sum;
}

// Sum over 8 neighbouring lanes.
__device__ static inline float layernorm_sum8(float x) {
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
    }
    return x;
}

// Value of row r of the patch, where lane l has that of row l / 8.
__device__ static inline float layernorm_of_row(float x, int r) {
    return __shfl_sync(0xFFFFFFFFu, x, r * 8);
}

// Parts of the row sums: two numbers per warp and row, for even and odd steps.
typedef float2 LayerNormParts[LAYERNORM_MAX_WARPS][PATCH_ROWS];

// After this, the parts of the step can be read. Parts of a step are written again two steps later, when everyone has
// passed the barrier between: one barrier per step is enough.
template <int CLUSTER> __device__ static inline void layernorm_barrier(void) {
    if (CLUSTER) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
}

// Part i of a row: those of block 0's warps first.
template <int CLUSTER>
__device__ static inline float2 layernorm_part(LayerNormParts parts, LayerNormShape shape, LayerNormPlace place, int i,
                                               int row) {
    int rank = CLUSTER ? i / shape.row_warps : 0;
    const float2* part = &parts[place.lane * shape.row_warps + i - rank * shape.row_warps][row];
    return CLUSTER ? cluster_load(part, (uint32_t)rank) : *part;
}

// How many columns it is of.
template <int CLUSTER> __device__ static inline float layernorm_part_columns(LayerNormShape shape, int i, int C) {
    int rank = CLUSTER ? i / shape.row_warps : 0, group = (i - rank * shape.row_warps) * 32;
    int count = min(min(32, shape.groups - group), C / PATCH_COLS - rank * shape.groups - group);
    return (float)(max(0, count) * PATCH_COLS);
}

// store_transposed of this block's tile; a thread has the same rows of every column it comes to.
__device__ static inline void layernorm_store_tile(uint8_t* transposed, const uint32_t* tile, LayerNormShape shape,
                                                   LayerNormPlace place, int first_row, int rows) {
    int log2_chunks = shape.log2_words - 2, stride = shape.threads >> log2_chunks;
    int chunk = (int)threadIdx.x & ((1 << log2_chunks) - 1), row = first_row + chunk * 16;
    int column = (int)threadIdx.x >> log2_chunks;
    uint8_t* to = transposed + (size_t)(place.first_column + column) * rows + row;
    if (row >= rows) { return; }
#pragma unroll 2
    for (; column < place.num_groups * PATCH_COLS; column += stride, to += (size_t)stride * rows) {
        *(uint4*)to = tile_chunk(tile, shape.log2_words, column, chunk);
    }
}

// A step's patch into the tile; after the tile's last step, the tile into the transposed form. The whole block calls;
// the next patches come after a barrier.
__device__ static inline void layernorm_put_patch(uint8_t* transposed, uint32_t* tile, LayerNormShape shape,
                                                  LayerNormPlace place, const Fp8Patch* patch, int word, int step,
                                                  int first_row, int rows) {
    if (place.active) { patch_to_tile(tile, shape.log2_words, place.group * PATCH_COLS, word, patch); }
    if (((step + 1) & ((1 << shape.log2_steps) - 1)) == 0) {
        __syncthreads();
        layernorm_store_tile(transposed, tile, shape, place, first_row, rows);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// sum = BF16(in + (branch + bias)) if there is a branch, else x = in.  y = (x - mean) * rstd * weight + bias
// y (rows, C) in every form; stats (rows) FP32; in, branch, sum (rows, C) BF16; weight, bias (C) BF16
//   bytes    4 read + 4 written per element in FP8 with a branch: 403 MB at (65536, 768), 94 us at 4.3 TB/s
//   numerics FP32 inside. Variance: sums of squares around the mean of 8 values, then of the warp, then of the row
//            (Chan et al. 1979), so nothing cancels. FP8 is rounded from the FP32 y; amax is of y BEFORE scaling
//   threads  grid (blocks of a cluster, strips); see LayerNormShape. rows: any; multiples of 16 for FP8
//   bits     deterministic: all sums in fixed order
template <int FP8, int CLUSTER>
__global__ void __maxnreg__(96)
    layernorm_forward_kernel(FormsOut y, LayerNormStats stats, ResidualAdd add, const bf16* weight, const bf16* bias,
                             int rows, int C, LayerNormShape shape) {
    kernel_begin();
    extern __shared__ uint4 shared_memory[];
    __shared__ LayerNormParts parts[2]; // mean and sum of squares around it, of a warp's columns
    const LayerNormPlace place = layernorm_place(shape, C);
    const int steps = layernorm_steps(shape, rows), sub = threadIdx.x % 8, sub_row = threadIdx.x % 32 / 8;
    const int num_parts = shape.blocks * shape.row_warps;
    const int writes_sum = add.branch != NULL && !y.measuring;
    uint32_t* tile = (uint32_t*)(shared_memory + shape.stages * LAYERNORM_VECTORS * shape.threads);
    float scale = FP8 ? y.slot->scale : 1.0f, amax = 0.0f;
    uint4 raw_branch_bias = make_uint4(0, 0, 0, 0), raw_weight = raw_branch_bias, raw_bias = raw_branch_bias;
    if (place.active) {
        if (add.branch != NULL) { raw_branch_bias = load_vector(add.bias + place.column); }
        raw_weight = load_vector(weight + place.column);
        raw_bias = load_vector(bias + place.column);
    } else {
        layernorm_clear_slots(shared_memory, shape);
    }
    const float per_group = 1.0f / (float)min(32, max(1, place.num_groups - place.warp * 32)),
                per_column = 1.0f / (float)C;
    const float own_columns = sub < num_parts ? layernorm_part_columns<CLUSTER>(shape, sub, C) : 0.0f;

    auto stage = [&](int step) {
        if (step < steps && place.active) {
            uint4* slots = layernorm_slots(shared_memory, shape, step);
            int row = layernorm_first_row(shape, step) + layernorm_word(shape, place, step) * PATCH_ROWS;
            size_t at = (size_t)row * C + place.column;
            layernorm_stage(slots, add.in + at, rows - row, C);
            if (add.branch != NULL) { layernorm_stage(slots + PATCH_ROWS * 32, add.branch + at, rows - row, C); }
        }
        cp_async_commit();
    };
    for (int step = 0; step < shape.stages; step++) {
        stage(step);
    }

    for (int step = 0; step < steps; step++) {
        const int first_row = layernorm_first_row(shape, step), word = layernorm_word(shape, place, step);
        const int row = first_row + word * PATCH_ROWS, count = place.active ? rows - row : 0;
        const uint4* slots = layernorm_slots(shared_memory, shape, step);
        layernorm_wait(shape);

        // residual sum, and each vector's mean and squares around it
        uint4 x[PATCH_ROWS];
        float means[PATCH_ROWS], squares[PATCH_ROWS];
        {
            float branch_bias[8];
            unpack8(branch_bias, raw_branch_bias);
#pragma unroll
            for (int r = 0; r < PATCH_ROWS; r++) {
                float v[8];
                x[r] = slots[r * 32];
                unpack8(v, x[r]);
                if (add.branch != NULL) {
                    float branch[8];
                    unpack8(branch, slots[(PATCH_ROWS + r) * 32]);
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        v[j] += branch[j] + branch_bias[j];
                    }
                    x[r] = pack8(v);
                    unpack8(v, x[r]); // the LayerNorm reads the sum as stored
                }
                float total = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
                means[r] = total * (1.0f / PATCH_COLS);
                squares[r] = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    squares[r] += (v[j] - means[r]) * (v[j] - means[r]);
                }
            }
        }
        stage(step + shape.stages);

        // of the warp, of the row
        float mean = layernorm_warp_sum4(means) * per_group; // threads beyond the columns have 0
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++) {
            float delta = means[r] - layernorm_of_row(mean, r);
            if (place.active) { squares[r] += (float)PATCH_COLS * delta * delta; }
        }
        float square = layernorm_warp_sum4(squares);
        if (sub == 0) { parts[step & 1][threadIdx.x / 32][sub_row] = make_float2(mean, square); }
        layernorm_barrier<CLUSTER>();
        float2 own =
            sub < num_parts ? layernorm_part<CLUSTER>(parts[step & 1], shape, place, sub, sub_row) : make_float2(0, 0);
        mean = own.x * own_columns;
#pragma unroll 1
        for (int i = sub + 8; i < num_parts; i += 8) {
            mean += layernorm_part<CLUSTER>(parts[step & 1], shape, place, i, sub_row).x *
                    layernorm_part_columns<CLUSTER>(shape, i, C);
        }
        mean = layernorm_sum8(mean) * per_column;
        square = own.y + (own.x - mean) * (own.x - mean) * own_columns;
#pragma unroll 1
        for (int i = sub + 8; i < num_parts; i += 8) {
            float2 part = layernorm_part<CLUSTER>(parts[step & 1], shape, place, i, sub_row);
            float delta = part.x - mean;
            square += part.y + delta * delta * layernorm_part_columns<CLUSTER>(shape, i, C);
        }
        float rstd = rsqrtf(layernorm_sum8(square) * per_column + LAYERNORM_EPSILON);
        if (place.column == sub_row * 64 && sub == 0 && row + sub_row < rows && !y.measuring) { // lanes 0, 8, 16, 24
            stats.mean[row + sub_row] = mean;
            stats.rstd[row + sub_row] = rstd;
        }

        // normalise and write
        Fp8Patch patch = {};
        {
            float w[8], b[8];
            unpack8(w, raw_weight);
            unpack8(b, raw_bias);
            size_t at = (size_t)row * C + place.column;
#pragma unroll
            for (int r = 0; r < PATCH_ROWS; r++, at += C) {
                float row_mean = layernorm_of_row(mean, r), row_rstd = layernorm_of_row(rstd, r), v[8];
                unpack8(v, x[r]);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[j] = (v[j] - row_mean) * row_rstd * w[j] + b[j];
                }
                if (writes_sum && r < count) { store_vector(add.sum + at, x[r]); }
                emit_row<e4m3, FP8 ? FORMS_FP8 : FORMS_WIDE>(y, &patch, r, v, scale, at, r < count, &amax);
            }
        }
        if (FP8 && y.transposed != NULL) {
            layernorm_put_patch(y.transposed, tile, shape, place, &patch, word, step, first_row, rows);
        }
    }
    if (y.amax != NULL) { raise_amax(y.amax, amax); }
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) { write_descale(y, scale); }
    layernorm_barrier<CLUSTER>(); // others may still read parts: a block's shared memory ends with it
}

// With n = (x - mean) rstd and g = weight dy:  dx = dresidual + rstd (g - mean(g) - n mean(g n)), in every form of dx
// partials (3, gridDim.y, C) FP32 = column sums of dy n, dy and dx (as stored in BF16) over this strip's rows, or NULL
// dy, x, dresidual (rows, C) BF16, dresidual may be dx.wide; stats (rows) FP32; weight (C) BF16
//   bytes    6 read + 4 written per element in FP8: 503 MB at (65536, 768), 117 us at 4.3 TB/s; memory-bound
//   numerics FP32 inside; FP8 is rounded from the FP32 dx; amax is of dx BEFORE scaling
//   threads  grid (blocks of a cluster, strips); see LayerNormShape. rows: any; multiples of 16 for FP8
//   bits     deterministic: all sums in fixed order
//   dresidual is not staged: its lines are brought into L2 a step ahead, which costs neither registers nor shared
//   memory, and read while the row sums are made.
template <int FP8, int CLUSTER>
__global__ void __maxnreg__(128)
    layernorm_backward_kernel(LayerNormBackward args, FormsOut dx, float* partials, LayerNormShape shape) {
    kernel_begin();
    extern __shared__ uint4 shared_memory[];
    __shared__ LayerNormParts parts[2]; // sums of g and g n over a warp's columns
    const int rows = args.rows, C = args.C;
    const LayerNormPlace place = layernorm_place(shape, C);
    const int steps = layernorm_steps(shape, rows), sub = threadIdx.x % 8, sub_row = threadIdx.x % 32 / 8;
    const int num_parts = shape.blocks * shape.row_warps;
    const float per_column = 1.0f / (float)C;
    uint32_t* tile = (uint32_t*)(shared_memory + shape.stages * LAYERNORM_VECTORS * shape.threads);
    float scale = FP8 ? dx.slot->scale : 1.0f, amax = 0.0f;
    uint4 raw_weight = make_uint4(0, 0, 0, 0);
    if (place.active) {
        raw_weight = load_vector(args.weight + place.column);
    } else {
        layernorm_clear_slots(shared_memory, shape);
    }
    float dweight[8] = {}, dbias[8] = {}, dbranch_bias[8] = {};
    float next_mean = 0.0f, next_rstd = 0.0f; // of x, of the step to come: lane l has row l / 8

    auto stage = [&](int step) {
        if (step < steps && place.active) {
            uint4* slots = layernorm_slots(shared_memory, shape, step);
            int row = layernorm_first_row(shape, step) + layernorm_word(shape, place, step) * PATCH_ROWS;
            size_t at = (size_t)row * C + place.column;
            layernorm_stage(slots, args.dy + at, rows - row, C);
            layernorm_stage(slots + PATCH_ROWS * 32, args.x + at, rows - row, C);
            if (args.dresidual != NULL) {
#pragma unroll
                for (int r = 0; r < PATCH_ROWS; r++, at += C) {
                    if (r < rows - row) { prefetch_l2(args.dresidual + at); }
                }
            }
        }
        cp_async_commit();
    };
    auto load_stats = [&](int step) {
        int row = layernorm_first_row(shape, step) + layernorm_word(shape, place, step) * PATCH_ROWS + sub_row;
        int valid = step < steps && row < rows;
        next_mean = valid ? args.stats.mean[row] : 0.0f;
        next_rstd = valid ? args.stats.rstd[row] : 0.0f;
    };
    for (int step = 0; step < shape.stages; step++) {
        stage(step);
    }
    load_stats(0);

    for (int step = 0; step < steps; step++) {
        const int first_row = layernorm_first_row(shape, step), word = layernorm_word(shape, place, step);
        const int row = first_row + word * PATCH_ROWS, count = place.active ? rows - row : 0;
        const uint4* slots = layernorm_slots(shared_memory, shape, step);
        const float stat_mean = next_mean, stat_rstd = next_rstd;
        size_t at = (size_t)row * C + place.column;
        load_stats(step + 1);
        uint4 raw_dresidual[PATCH_ROWS] = {}, raw_dy[PATCH_ROWS], raw_x[PATCH_ROWS];
        if (args.dresidual != NULL) {
#pragma unroll
            for (int r = 0; r < PATCH_ROWS; r++) {
                if (r < count) { raw_dresidual[r] = load_vector(args.dresidual + at + (size_t)r * C); }
            }
        }
        layernorm_wait(shape);

        // sums of each vector, and the columns' sums that need no row sum
        float w[8], sums_g[PATCH_ROWS], sums_gn[PATCH_ROWS];
        unpack8(w, raw_weight);
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++) {
            float mean = layernorm_of_row(stat_mean, r), rstd = layernorm_of_row(stat_rstd, r);
            float dy[8], x[8];
            raw_dy[r] = slots[r * 32];
            raw_x[r] = slots[(PATCH_ROWS + r) * 32];
            unpack8(dy, raw_dy[r]);
            unpack8(x, raw_x[r]);
            sums_g[r] = sums_gn[r] = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float n = (x[j] - mean) * rstd, g = w[j] * dy[j];
                sums_g[r] += g;
                sums_gn[r] += g * n;
                dbias[j] += dy[j];
                dweight[j] += dy[j] * n;
            }
        }
        stage(step + shape.stages);

        // of the warp, of the row
        float sum_g = layernorm_warp_sum4(sums_g), sum_gn = layernorm_warp_sum4(sums_gn);
        if (sub == 0) { parts[step & 1][threadIdx.x / 32][sub_row] = make_float2(sum_g, sum_gn); }
        layernorm_barrier<CLUSTER>();
        sum_g = sum_gn = 0.0f;
        if (sub < num_parts) {
            float2 part = layernorm_part<CLUSTER>(parts[step & 1], shape, place, sub, sub_row);
            sum_g = part.x;
            sum_gn = part.y;
        }
#pragma unroll 1
        for (int i = sub + 8; i < num_parts; i += 8) {
            float2 part = layernorm_part<CLUSTER>(parts[step & 1], shape, place, i, sub_row);
            sum_g += part.x;
            sum_gn += part.y;
        }
        float mean_g = layernorm_sum8(sum_g) * per_column, mean_gn = layernorm_sum8(sum_gn) * per_column;

        // gradient
        Fp8Patch patch = {};
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++, at += C) {
            float mean = layernorm_of_row(stat_mean, r), rstd = layernorm_of_row(stat_rstd, r);
            float row_g = layernorm_of_row(mean_g, r), row_gn = layernorm_of_row(mean_gn, r);
            float dy[8], x[8], v[8], stored[8]; // of a row that does not exist: rstd, v are 0
            unpack8(dy, raw_dy[r]);
            unpack8(x, raw_x[r]);
            unpack8(v, raw_dresidual[r]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float n = (x[j] - mean) * rstd;
                v[j] += rstd * (w[j] * dy[j] - row_g - n * row_gn);
            }
            unpack8(stored, pack8(v));
#pragma unroll
            for (int j = 0; j < 8; j++) {
                dbranch_bias[j] += stored[j];
            }
            emit_row<e5m2, FP8 ? FORMS_FP8 : FORMS_WIDE>(dx, &patch, r, v, scale, at, r < count, &amax);
        }
        if (FP8 && dx.transposed != NULL) {
            layernorm_put_patch(dx.transposed, tile, shape, place, &patch, word, step, first_row, rows);
        }
    }

    if (partials != NULL) {
        float* to = partials + (size_t)blockIdx.y * C + place.first_column;
        float* buffer = (float*)shared_memory; // the staged vectors are all read
        size_t next = (size_t)gridDim.y * C;
        int columns = place.num_groups * PATCH_COLS;
        block_column_sums(to, buffer, dweight, place.active, place.lane, place.group, shape.row_lanes, shape.groups,
                          columns);
        block_column_sums(to + next, buffer, dbias, place.active, place.lane, place.group, shape.row_lanes,
                          shape.groups, columns);
        block_column_sums(to + 2 * next, buffer, dbranch_bias, place.active, place.lane, place.group, shape.row_lanes,
                          shape.groups, columns);
    }
    if (dx.amax != NULL) { raise_amax(dx.amax, amax); }
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) { write_descale(dx, scale); }
    layernorm_barrier<CLUSTER>(); // others may still read parts: a block's shared memory ends with it
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel launchers

// What both launches share; the two attributes must outlive the configuration. The grid is as many strips as run at
// once, but at most `most`.
static inline cudaLaunchConfig_t layernorm_config(Device* dev, cudaLaunchAttribute attribute[2], const void* kernel,
                                                  LayerNormShape shape, int rows, int most) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)shape.blocks, 1);
    config.blockDim = dim3((unsigned)shape.threads);
    config.dynamicSmemBytes = layernorm_shared_bytes(shape);
    config.stream = dev->stream;
    attribute[1] = launch_attribute(dev);
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim.x = (unsigned)shape.blocks;
    attribute->val.clusterDim.y = 1;
    attribute->val.clusterDim.z = 1;
    config.attrs = attribute;
    config.numAttrs = 1;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)config.dynamicSmemBytes));
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    int at_once = 0, tiles = (int)ceil_div((size_t)rows, (size_t)PATCH_ROWS << shape.log2_words);
    cuda_check(cudaOccupancyMaxActiveClusters(&at_once, kernel, &config));
    check(at_once > 0, "layernorm: %zu bytes of shared memory per block do not fit", config.dynamicSmemBytes);
    at_once = at_once < most ? at_once : most;
    config.numAttrs = 2; // with early launch, which is no matter of occupancy
    config.gridDim.y = (unsigned)(tiles < at_once ? tiles : at_once);
    return config;
}

static inline void layernorm_forward_launch(Device* dev, FormsOut y, LayerNormStats stats, ResidualAdd add,
                                            const bf16* weight, const bf16* bias, int rows, int C) {
    LayerNormShape shape = layernorm_shape(dev, rows, C, y.slot != NULL, 2);
    auto kernel = shape.blocks > 1 ? y.slot != NULL ? layernorm_forward_kernel<1, 1> : layernorm_forward_kernel<0, 1>
                  : y.slot != NULL ? layernorm_forward_kernel<1, 0>
                                   : layernorm_forward_kernel<0, 0>;
    cudaLaunchAttribute attribute[2];
    cudaLaunchConfig_t config = layernorm_config(dev, attribute, (const void*)kernel, shape, rows, 65535);
    cuda_check(cudaLaunchKernelEx(&config, kernel, y, stats, add, weight, bias, rows, C, shape));
}

void layernorm_forward(Device* dev, E4m3Tensor y, LayerNormStats stats, ResidualAdd add, const bf16* weight,
                       const bf16* bias, int rows, int C) {
    cost_layernorm_forward(dev, y, add, rows, C);
    FormsOut out = forms_of_e4m3(y);
    int fp8 = y.data != NULL || y.transposed != NULL;
    check_forms("layernorm_forward", out, y.slot, fp8, rows, C);
    check(add.branch == NULL || (add.sum != NULL && add.bias != NULL),
          "layernorm_forward: a branch needs sum and bias");
    if (fp8 && y.measure_first) {
        layernorm_forward_launch(dev, measure_begin(dev, out), stats, add, weight, bias, rows, C);
        measure_end(dev, out, y.recipe);
    }
    layernorm_forward_launch(dev, out, stats, add, weight, bias, rows, C);
}

// Returns the number of strips: partial sums per column.
static inline int layernorm_backward_launch(Device* dev, LayerNormBackward args, FormsOut dx, float* partials) {
    LayerNormShape shape = layernorm_shape(dev, args.rows, args.C, 1, 1); // in BF16, too: the same sums
    int most = args.C <= COLUMN_WIDE ? COLUMN_PARTIALS : COLUMN_PARTIALS_WIDE;
    auto kernel = shape.blocks > 1 ? dx.slot != NULL ? layernorm_backward_kernel<1, 1> : layernorm_backward_kernel<0, 1>
                  : dx.slot != NULL ? layernorm_backward_kernel<1, 0>
                                    : layernorm_backward_kernel<0, 0>;
    cudaLaunchAttribute attribute[2];
    cudaLaunchConfig_t config = layernorm_config(dev, attribute, (const void*)kernel, shape, args.rows, most);
    int strips = (int)config.gridDim.y;
    if (partials != NULL) { workspace_floats(dev, "layernorm_backward", (size_t)COLUMN_SUMS * strips * args.C); }
    cuda_check(cudaLaunchKernelEx(&config, kernel, args, dx, partials, shape));
    return strips;
}

void layernorm_backward(Device* dev, LayerNormBackward args) {
    cost_layernorm_backward(dev, args.dx, args.dresidual, args.rows, args.C);
    FormsOut out = forms_of_e5m2(args.dx);
    int fp8 = args.dx.data != NULL || args.dx.transposed != NULL;
    check_forms("layernorm_backward", out, args.dx.slot, fp8, args.rows, args.C);
    if (fp8 && args.dx.measure_first) {
        layernorm_backward_launch(dev, args, measure_begin(dev, out), NULL);
        measure_end(dev, out, args.dx.recipe);
    }
    float* partials = workspace_floats(dev, "layernorm_backward", 0);
    int strips = layernorm_backward_launch(dev, args, out, partials);
    ColumnSums sums = {{args.dweight, args.dbias, args.dbranch_bias}};
    column_sums_add(dev, sums, args.dbranch_bias != NULL ? 3 : 2, partials, strips, args.C);
}

#endif
