// Residual add + LayerNorm (Ba et al. 2016) that writes FP8 in both layouts, and its backward pass, each in one pass
// over memory.
//
// Both need whole-row sums before they can write anything, and tall tiles to write the transposed FP8 form in 16-byte
// pieces or longer. So a tile of R rows x all C columns must stay on chip between the sums and the writes. A cluster of
// up to 8 blocks shares it: each block holds R rows of its share of the columns in shared memory, sums its part of
// every row, and reads the other blocks' parts over the cluster. Any C fits, and nothing is read twice.
//
//   inside a block   thread = (row lane, group): a group is 8 columns, a row lane LAYERNORM_PATCHES patches of 4 rows.
//   staging          each thread copies its own vectors to its own slots of shared memory (cp.async: bytes in flight
//                    without registers) and reads them back itself, so staging needs no barrier and has no conflicts.
#ifndef LAYERNORM_CUH
#define LAYERNORM_CUH

#include "gpu.cuh"

#define LAYERNORM_EPSILON 1e-5f
#define LAYERNORM_PATCHES 2 // patches per thread
#define LAYERNORM_VECTORS (LAYERNORM_PATCHES * PATCH_ROWS)
#define LAYERNORM_MAX_ROWS 64 // per block
#define LAYERNORM_MAX_THREADS 384
#define LAYERNORM_MAX_C 12288

// How a tensor of C columns is cut: R = row_lanes * LAYERNORM_VECTORS rows per block.
typedef struct {
    int blocks;     // of a cluster: they share the columns
    int groups;     // 8-column groups per block; the last block may have fewer
    int row_lanes;  // threads over the rows
    int log2_words; // R = 4 rows of a word << log2_words
    int threads;    // row_lanes * groups, whole warps
} LayerNormShape;

// Bytes of shared memory: two staged tensors, and the FP8 tile (first the row sums, of the same size).
__host__ __device__ static inline size_t layernorm_shared_bytes(LayerNormShape shape) {
    size_t staged = 2 * (size_t)LAYERNORM_VECTORS * shape.threads * sizeof(uint4);
    return staged + (size_t)shape.row_lanes * LAYERNORM_VECTORS * shape.groups * PATCH_COLS;
}

// The tallest tile with the fewest blocks of which three, or two, or one, fit on a multiprocessor.
static inline LayerNormShape layernorm_shape(int C) {
    const size_t budget[3] = {75 * 1024, 112 * 1024, 224 * 1024}; // for R = 64, 32, 16; 227 KB per multiprocessor
    LayerNormShape shape;
    for (int tall = 0; tall < 3; tall++) {
        shape.log2_words = 4 - tall;
        shape.row_lanes = (LAYERNORM_MAX_ROWS >> tall) / LAYERNORM_VECTORS;
        for (shape.blocks = 1; shape.blocks <= 8; shape.blocks *= 2) {
            shape.groups = (int)ceil_div((size_t)C / PATCH_COLS, (size_t)shape.blocks);
            shape.threads = (int)ceil_div((size_t)shape.groups * shape.row_lanes, 32) * 32;
            if (layernorm_shared_bytes(shape) <= budget[tall] && shape.threads <= LAYERNORM_MAX_THREADS) {
                return shape;
            }
        }
    }
    check(0, "layernorm: C = %d, want at most %d", C, LAYERNORM_MAX_C);
    return shape;
}

// Where a thread stands.
typedef struct {
    int active;       // 0: the thread only helps with sums and stores
    int group;        // in the block
    int lane;         // row lane
    int column;       // first of its 8 columns, in the tensor
    int first_column; // of the block
    int num_groups;   // that this block really has
} LayerNormPlace;

__device__ static inline LayerNormPlace layernorm_place(LayerNormShape shape, int C) {
    LayerNormPlace place;
    int rank = (int)cluster_rank(), thread = (int)threadIdx.x;
    place.first_column = rank * shape.groups * PATCH_COLS;
    place.num_groups = max(0, min(shape.groups, (C - place.first_column) / PATCH_COLS));
    place.lane = thread / shape.groups;
    place.group = thread - place.lane * shape.groups;
    place.column = place.first_column + place.group * PATCH_COLS;
    place.active = place.lane < shape.row_lanes && place.group < place.num_groups;
    return place;
}

// Row inside the block of a thread's vector i: patch i / 4, row i % 4 of it.
__device__ static inline int layernorm_row(LayerNormShape shape, LayerNormPlace place, int i) {
    int word = (i / PATCH_ROWS) * shape.row_lanes + place.lane;
    return word * PATCH_ROWS + i % PATCH_ROWS;
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// sum = BF16(in + (branch + bias)) if there is a branch, else x = in.  y = (x - mean) * rstd * weight + bias
// y (rows, C) in every form; stats (rows) FP32; in, branch, sum (rows, C) BF16; weight, bias (C) BF16
//   bytes    4 read + 4 written per element in FP8 with a branch: 403 MB at (65536, 768), 94 us at 4.3 TB/s
//   numerics FP32 inside. Variance: sums of squares around the mean of 8 values, then of the block, then of the row
//            (Chan et al. 1979), so nothing cancels. FP8 is rounded from the FP32 y; amax is of y BEFORE scaling
//   threads  grid (blocks of a cluster, row tiles); see LayerNormShape. rows: any; multiples of 16 for FP8
//   bits     deterministic: all sums in fixed order
__global__ void __launch_bounds__(LAYERNORM_MAX_THREADS)
    layernorm_forward_kernel(FormsOut y, LayerNormStats stats, ResidualAdd add, const bf16* weight, const bf16* bias,
                             int rows, int C, LayerNormShape shape) {
    extern __shared__ uint4 shared_memory[];
    __shared__ float2 block_sums[LAYERNORM_MAX_ROWS]; // mean and sum of squares around it, of this block's columns
    __shared__ float2 row_stats[LAYERNORM_MAX_ROWS];  // mean, rstd
    const LayerNormPlace place = layernorm_place(shape, C);
    const int R = PATCH_ROWS << shape.log2_words, first_row = blockIdx.y * R, threads = blockDim.x;
    uint4* staged_x = shared_memory + threadIdx.x; // vector i at i * threads
    uint4* staged_branch = staged_x + LAYERNORM_VECTORS * threads;
    float2* parts = (float2*)(shared_memory + 2 * LAYERNORM_VECTORS * threads); // (R, groups)
    uint32_t* tile = (uint32_t*)parts;                                          // later, in the same place

    // load
    if (place.active) {
#pragma unroll
        for (int i = 0; i < LAYERNORM_VECTORS; i++) {
            int row = first_row + layernorm_row(shape, place, i);
            size_t at = (size_t)row * C + place.column;
            if (row < rows) {
                cp_async(&staged_x[i * threads], add.in + at);
                if (add.branch != NULL) { cp_async(&staged_branch[i * threads], add.branch + at); }
            } else {
                staged_x[i * threads] = staged_branch[i * threads] = make_uint4(0, 0, 0, 0);
            }
        }
    }

    // residual sum, and each vector's mean and squares
    if (place.active) {
        float branch_bias[8] = {};
        if (add.branch != NULL) { unpack8(branch_bias, load_vector(add.bias + place.column)); }
        cp_async_wait();
#pragma unroll 4
        for (int i = 0; i < LAYERNORM_VECTORS; i++) {
            int local_row = layernorm_row(shape, place, i);
            float v[8];
            unpack8(v, staged_x[i * threads]);
            if (add.branch != NULL) {
                float branch[8];
                unpack8(branch, staged_branch[i * threads]);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[j] += branch[j] + branch_bias[j];
                }
                uint4 sum = pack8(v);
                unpack8(v, sum); // the LayerNorm reads the sum as stored
                staged_x[i * threads] = sum;
            }
            float total = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
            float mean = total * (1.0f / PATCH_COLS), squares = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                squares += (v[j] - mean) * (v[j] - mean);
            }
            parts[local_row * shape.groups + place.group] = make_float2(mean, squares);
        }
    }
    __syncthreads();

    // this block's part of each row: one warp per row
    for (int row = threadIdx.x / 32; row < R; row += threads / 32) {
        float total = 0.0f, squares = 0.0f;
        for (int g = threadIdx.x % 32; g < place.num_groups; g += 32) {
            total += parts[row * shape.groups + g].x;
        }
        float mean = warp_sum(total) / (float)max(1, place.num_groups);
        for (int g = threadIdx.x % 32; g < place.num_groups; g += 32) {
            float2 part = parts[row * shape.groups + g];
            squares += part.y + (float)PATCH_COLS * (part.x - mean) * (part.x - mean);
        }
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) { block_sums[row] = make_float2(mean, squares); }
    }

    // the whole row: every block adds the parts of all blocks in the same order
    cluster_arrive();
    cluster_wait();
    for (int local_row = threadIdx.x; local_row < R; local_row += threads) {
        float n = 0.0f, mean = 0.0f, squares = 0.0f;
        for (int rank = 0; rank < shape.blocks; rank++) {
            float count = (float)max(0, min(shape.groups * PATCH_COLS, C - rank * shape.groups * PATCH_COLS));
            float2 part = cluster_load(&block_sums[local_row], rank);
            if (count > 0.0f) {
                float delta = part.x - mean;
                mean += delta * (count / (n + count));
                squares += part.y + delta * delta * (n * count / (n + count));
                n += count;
            }
        }
        float rstd = 1.0f / sqrtf(squares / (float)C + LAYERNORM_EPSILON);
        row_stats[local_row] = make_float2(mean, rstd);
        int row = first_row + local_row;
        if (place.first_column == 0 && row < rows && !y.measuring) {
            stats.mean[row] = mean;
            stats.rstd[row] = rstd;
        }
    }
    cluster_arrive(); // this thread reads no other block's memory any more
    __syncthreads();

    // normalise and write
    float scale = y.slot != NULL ? y.slot->scale : 1.0f;
    float amax = 0.0f;
    if (place.active) {
        float w[8], b[8];
        unpack8(w, load_vector(weight + place.column));
        unpack8(b, load_vector(bias + place.column));
#pragma unroll 1
        for (int p = 0; p < LAYERNORM_PATCHES; p++) {
            Fp8Patch patch = {};
#pragma unroll
            for (int r = 0; r < PATCH_ROWS; r++) {
                int i = p * PATCH_ROWS + r, local_row = layernorm_row(shape, place, i), row = first_row + local_row;
                float2 stat = row_stats[local_row];
                uint4 raw = staged_x[i * threads];
                float v[8];
                unpack8(v, raw);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[j] = (v[j] - stat.x) * stat.y * w[j] + b[j];
                }
                // NOTE: the sum is stored here, not where it is made: the cluster barrier would wait for the stores
                if (row < rows && add.branch != NULL && !y.measuring) {
                    store_vector(add.sum + (size_t)row * C + place.column, raw);
                }
                if (row < rows) { emit_row<e4m3>(y, &patch, r, v, scale, (size_t)row * C + place.column, &amax); }
            }
            if (y.transposed != NULL) {
                patch_to_tile(tile, shape.log2_words, place.group * PATCH_COLS, p * shape.row_lanes + place.lane,
                              &patch);
            }
        }
    }
    if (y.transposed != NULL) {
        __syncthreads();
        store_transposed(y.transposed, tile, shape.log2_words, place.num_groups * PATCH_COLS, place.first_column,
                         first_row, rows);
    }
    if (y.amax != NULL) { raise_amax(y.amax, amax); }
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) { write_descale(y, scale); }
    cluster_wait(); // others may still read block_sums: a block's shared memory ends with it
}

// With n = (x - mean) rstd and g = weight dy:  dx = dresidual + rstd (g - mean(g) - n mean(g n)), in every form of dx
// partials (3, gridDim.y, C) FP32 = column sums of dy n, dy and dx (as stored in BF16) over this block's rows, or NULL
// dy, x, dresidual (rows, C) BF16, dresidual may be dx.wide; stats (rows) FP32; weight (C) BF16
//   bytes    6 read + 4 written per element in FP8: 503 MB at (65536, 768), 117 us at 4.3 TB/s; memory-bound
//   numerics FP32 inside; FP8 is rounded from the FP32 dx; amax is of dx BEFORE scaling
//   threads  grid (blocks of a cluster, strips): a strip walks down the rows; rows: any; multiples of 16 for FP8
//   bits     deterministic: all sums in fixed order
//   dresidual is not staged: its lines are brought into L2 while the sums are made, which costs neither registers nor
//   shared memory.
__global__ void __maxnreg__(96) // three blocks of 224 threads on a multiprocessor
    layernorm_backward_kernel(LayerNormBackward args, FormsOut dx, float* partials, LayerNormShape shape) {
    extern __shared__ uint4 shared_memory[];
    __shared__ float2 block_sums[LAYERNORM_MAX_ROWS]; // sums of g and g n over this block's columns
    __shared__ float2 row_means[LAYERNORM_MAX_ROWS];  // their means over the row
    __shared__ float2 row_stats[LAYERNORM_MAX_ROWS];  // mean, rstd of x
    const int rows = args.rows, C = args.C;
    const LayerNormPlace place = layernorm_place(shape, C);
    const int R = PATCH_ROWS << shape.log2_words, threads = blockDim.x;
    uint4* staged_dy = shared_memory + threadIdx.x; // vector i at i * threads
    uint4* staged_x = staged_dy + LAYERNORM_VECTORS * threads;
    float2* parts = (float2*)(shared_memory + 2 * LAYERNORM_VECTORS * threads); // (R, groups)
    uint32_t* tile = (uint32_t*)parts;                                          // later, in the same place
    float scale = dx.slot != NULL ? dx.slot->scale : 1.0f;
    uint4 raw_weight = make_uint4(0, 0, 0, 0);
    if (place.active) { raw_weight = load_vector(args.weight + place.column); }
    float dweight[8] = {}, dbias[8] = {}, dbranch_bias[8] = {};
    float amax = 0.0f;

    for (int first_row = blockIdx.y * R; first_row < rows; first_row += gridDim.y * R) {
        // load
        if (place.active) {
#pragma unroll
            for (int i = 0; i < LAYERNORM_VECTORS; i++) {
                int row = first_row + layernorm_row(shape, place, i);
                size_t at = (size_t)row * C + place.column;
                if (row < rows) {
                    cp_async(&staged_dy[i * threads], args.dy + at);
                    cp_async(&staged_x[i * threads], args.x + at);
                } else {
                    staged_dy[i * threads] = staged_x[i * threads] = make_uint4(0, 0, 0, 0);
                }
            }
            if (args.dresidual != NULL) {
#pragma unroll 2
                for (int i = 0; i < LAYERNORM_VECTORS; i++) {
                    int row = first_row + layernorm_row(shape, place, i);
                    if (row < rows) { prefetch_l2(args.dresidual + (size_t)row * C + place.column); }
                }
            }
        }
        for (int local_row = threadIdx.x; local_row < R; local_row += threads) {
            int row = first_row + local_row;
            row_stats[local_row] =
                row < rows ? make_float2(args.stats.mean[row], args.stats.rstd[row]) : make_float2(0.0f, 0.0f);
        }
        cp_async_wait();
        __syncthreads();

        // sums of each vector, and the columns' sums that need no row sum
        if (place.active) {
            float w[8];
            unpack8(w, raw_weight);
#pragma unroll 2
            for (int i = 0; i < LAYERNORM_VECTORS; i++) {
                int local_row = layernorm_row(shape, place, i);
                float2 stat = row_stats[local_row];
                float dy[8], x[8], sum_g = 0.0f, sum_gn = 0.0f;
                unpack8(dy, staged_dy[i * threads]);
                unpack8(x, staged_x[i * threads]);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    float n = (x[j] - stat.x) * stat.y, g = w[j] * dy[j];
                    sum_g += g;
                    sum_gn += g * n;
                    dbias[j] += dy[j];
                    dweight[j] += dy[j] * n;
                }
                parts[local_row * shape.groups + place.group] = make_float2(sum_g, sum_gn);
            }
        }
        __syncthreads();

        // this block's part of each row: one warp per row
        for (int row = threadIdx.x / 32; row < R; row += threads / 32) {
            float sum_g = 0.0f, sum_gn = 0.0f;
            for (int g = threadIdx.x % 32; g < place.num_groups; g += 32) {
                float2 part = parts[row * shape.groups + g];
                sum_g += part.x;
                sum_gn += part.y;
            }
            sum_g = warp_sum(sum_g);
            sum_gn = warp_sum(sum_gn);
            if (threadIdx.x % 32 == 0) { block_sums[row] = make_float2(sum_g, sum_gn); }
        }

        // the whole row
        cluster_arrive();
        cluster_wait();
        for (int local_row = threadIdx.x; local_row < R; local_row += threads) {
            float sum_g = 0.0f, sum_gn = 0.0f;
            for (int rank = 0; rank < shape.blocks; rank++) {
                float2 part = cluster_load(&block_sums[local_row], rank);
                sum_g += part.x;
                sum_gn += part.y;
            }
            row_means[local_row] = make_float2(sum_g / (float)C, sum_gn / (float)C);
        }
        cluster_arrive(); // this thread reads no other block's memory any more; waited for at the end of the loop
        __syncthreads();

        // gradient
        if (place.active) {
            float w[8];
            unpack8(w, raw_weight);
#pragma unroll 1
            for (int p = 0; p < LAYERNORM_PATCHES; p++) {
                uint4 raw_dresidual[PATCH_ROWS] = {};
                if (args.dresidual != NULL) {
#pragma unroll
                    for (int r = 0; r < PATCH_ROWS; r++) {
                        int row = first_row + layernorm_row(shape, place, p * PATCH_ROWS + r);
                        if (row < rows) {
                            raw_dresidual[r] = load_vector(args.dresidual + (size_t)row * C + place.column);
                        }
                    }
                }
                Fp8Patch patch = {};
#pragma unroll
                for (int r = 0; r < PATCH_ROWS; r++) {
                    int i = p * PATCH_ROWS + r, local_row = layernorm_row(shape, place, i), row = first_row + local_row;
                    float2 stat = row_stats[local_row], mean = row_means[local_row];
                    float dy[8], x[8], v[8], stored[8];
                    unpack8(dy, staged_dy[i * threads]);
                    unpack8(x, staged_x[i * threads]);
                    unpack8(v, raw_dresidual[r]);
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        float n = (x[j] - stat.x) * stat.y;
                        v[j] += stat.y * (w[j] * dy[j] - mean.x - n * mean.y);
                    }
                    unpack8(stored, pack8(v));
#pragma unroll
                    for (int j = 0; j < 8; j++) { // rows beyond the end are 0 here
                        dbranch_bias[j] += stored[j];
                    }
                    if (row < rows) { emit_row<e5m2>(dx, &patch, r, v, scale, (size_t)row * C + place.column, &amax); }
                }
                if (dx.transposed != NULL) {
                    patch_to_tile(tile, shape.log2_words, place.group * PATCH_COLS, p * shape.row_lanes + place.lane,
                                  &patch);
                }
            }
        }
        if (dx.transposed != NULL) {
            __syncthreads();
            store_transposed(dx.transposed, tile, shape.log2_words, place.num_groups * PATCH_COLS, place.first_column,
                             first_row, rows);
        }
        __syncthreads(); // tile and row_stats are read: the next rows may come
        cluster_wait();  // and block_sums
    }

    if (partials != NULL) {
        float* to = partials + (size_t)blockIdx.y * C + place.first_column;
        size_t next = (size_t)gridDim.y * C;
        int columns = place.num_groups * PATCH_COLS;
        block_column_sums(to, (float*)parts, dweight, place.active, place.lane, place.group, shape.row_lanes,
                          shape.groups, columns);
        block_column_sums(to + next, (float*)parts, dbias, place.active, place.lane, place.group, shape.row_lanes,
                          shape.groups, columns);
        block_column_sums(to + 2 * next, (float*)parts, dbranch_bias, place.active, place.lane, place.group,
                          shape.row_lanes, shape.groups, columns);
    }
    if (dx.amax != NULL) { raise_amax(dx.amax, amax); }
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) { write_descale(dx, scale); }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel launchers

// What both launches share; `attribute` must outlive the configuration.
static inline cudaLaunchConfig_t layernorm_config(Device* dev, cudaLaunchAttribute* attribute, const void* kernel,
                                                  LayerNormShape shape, int row_tiles) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)shape.blocks, (unsigned)row_tiles);
    config.blockDim = dim3((unsigned)shape.threads);
    config.dynamicSmemBytes = layernorm_shared_bytes(shape);
    config.stream = dev->stream;
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim.x = (unsigned)shape.blocks;
    attribute->val.clusterDim.y = 1;
    attribute->val.clusterDim.z = 1;
    config.attrs = attribute;
    config.numAttrs = 1;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)config.dynamicSmemBytes));
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    return config;
}

static inline void layernorm_forward_launch(Device* dev, FormsOut y, LayerNormStats stats, ResidualAdd add,
                                            const bf16* weight, const bf16* bias, int rows, int C) {
    LayerNormShape shape = layernorm_shape(C);
    int row_tiles = (int)ceil_div((size_t)rows, (size_t)PATCH_ROWS << shape.log2_words);
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config =
        layernorm_config(dev, &attribute, (const void*)layernorm_forward_kernel, shape, row_tiles);
    cuda_check(cudaLaunchKernelEx(&config, layernorm_forward_kernel, y, stats, add, weight, bias, rows, C, shape));
}

void layernorm_forward(Device* dev, E4m3Tensor y, LayerNormStats stats, ResidualAdd add, const bf16* weight,
                       const bf16* bias, int rows, int C) {
    cost_layernorm_forward(dev, y, add, rows, C);
    FormsOut out = forms_of_e4m3(y);
    int fp8 = y.data != NULL || y.transposed != NULL;
    check_forms("layernorm_forward", out, y.slot, fp8, rows, C);
    check(add.branch == NULL || (add.sum != NULL && add.bias != NULL),
          "layernorm_forward: a branch needs sum and bias");
    check((size_t)rows <= (size_t)65535 * 16, "layernorm_forward: %d rows, want at most %d", rows, 65535 * 16);
    if (fp8 && y.measure_first) {
        layernorm_forward_launch(dev, measure_begin(dev, out), stats, add, weight, bias, rows, C);
        measure_end(dev, out, y.recipe);
    }
    layernorm_forward_launch(dev, out, stats, add, weight, bias, rows, C);
}

static inline void layernorm_backward_launch(Device* dev, LayerNormBackward args, FormsOut dx, float* partials,
                                             LayerNormShape shape, int strips) {
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config =
        layernorm_config(dev, &attribute, (const void*)layernorm_backward_kernel, shape, strips);
    cuda_check(cudaLaunchKernelEx(&config, layernorm_backward_kernel, args, dx, partials, shape));
}

void layernorm_backward(Device* dev, LayerNormBackward args) {
    cost_layernorm_backward(dev, args.dx, args.dresidual, args.rows, args.C);
    FormsOut out = forms_of_e5m2(args.dx);
    int fp8 = args.dx.data != NULL || args.dx.transposed != NULL;
    check_forms("layernorm_backward", out, args.dx.slot, fp8, args.rows, args.C);
    LayerNormShape shape = layernorm_shape(args.C);
    int row_tiles = (int)ceil_div((size_t)args.rows, (size_t)PATCH_ROWS << shape.log2_words);
    int most = args.C <= COLUMN_WIDE ? COLUMN_PARTIALS : COLUMN_PARTIALS_WIDE;
    int strips = row_tiles < most ? row_tiles : most;
    float* partials = workspace_floats(dev, "layernorm_backward", (size_t)COLUMN_SUMS * strips * args.C);
    if (fp8 && args.dx.measure_first) {
        layernorm_backward_launch(dev, args, measure_begin(dev, out), NULL, shape, strips);
        measure_end(dev, out, args.dx.recipe);
    }
    layernorm_backward_launch(dev, args, out, partials, shape, strips);
    ColumnSums sums = {{args.dweight, args.dbias, args.dbranch_bias}};
    column_sums_add(dev, sums, args.dbranch_bias != NULL ? 3 : 2, partials, strips, args.C);
}

#endif
