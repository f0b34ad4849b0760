// What several ranks send each other, made and taken apart: gradients in E4M3 with a descale per block, in BF16 or
// FP32; slices of parameters; slices of FP8 weights and the transposes of whole ones. Pieces, slices, buckets and
// chunks are those of shards.h, and chunk_block, which says where a block of a chunk lies, is the very function of the
// CPU floor.
//
// The unit of work is a block of GRAD_BLOCK = 256 elements of a chunk in one warp: a lane has elements 4 lane .. 4 lane
// + 3 and 128 more, so that every access of a warp is contiguous, 512 bytes of FP32 (16 per lane) or 128 of codes.
#ifndef GRAD_REDUCE_CUH
#define GRAD_REDUCE_CUH

#include "gpu.cuh"
#include "grad_mu.h"

#define EXCHANGE_THREADS 256
#define EXCHANGE_WARPS (EXCHANGE_THREADS / 32)
#define EXCHANGE_VECTORS (GRAD_BLOCK / 128) // of 4 elements, that a lane has
#define SUM_RANKS 4                         // ranks whose codes are on the way at once

static_assert(GRAD_BLOCK == 256, "a warp has 32 lanes of 8 elements");

// Elements of vector k of the calling lane: the first one's place in the block.
__device__ static inline int block_element(int k) {
    return 128 * k + 4 * (int)(threadIdx.x % 32);
}

// Which block of a chunk the calling warp has; grid.x covers the chunk.
__device__ static inline size_t warp_block(void) {
    return blockIdx.x * (size_t)EXCHANGE_WARPS + threadIdx.x / 32;
}

// The lane's elements of a block, 0 where there are none.
__device__ static inline void block_load(float4 v[EXCHANGE_VECTORS], const float* grads, ChunkBlock from) {
#pragma unroll
    for (int k = 0; k < EXCHANGE_VECTORS; k++) {
        int i = block_element(k); // counts are multiples of 4: a vector is in or out
        v[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < from.count) { v[k] = *(const float4*)(grads + from.offset + i); }
    }
}

// The lane's elements of a block, as far as they exist. __stwb, since from an assignment under a condition the compiler
// makes four stores of 4 bytes.
__device__ static inline void block_store(float* grads, const float4 v[EXCHANGE_VECTORS], ChunkBlock to) {
#pragma unroll
    for (int k = 0; k < EXCHANGE_VECTORS; k++) {
        int i = block_element(k);
        if (i < to.count) { __stwb((float4*)(grads + to.offset + i), v[k]); }
    }
}

// Four codes -> four floats, exact; codes of NaN become NaN.
__device__ static inline float4 unpack4_e4m3(uint32_t codes) {
    uint32_t low, high; // two FP16 values each, which hold every E4M3 value
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"((uint16_t)(codes & 0xFFFFu)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"((uint16_t)(codes >> 16)));
    float4 v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v.x) : "h"((uint16_t)(low & 0xFFFFu)));
    asm("cvt.f32.f16 %0, %1;" : "=f"(v.y) : "h"((uint16_t)(low >> 16)));
    asm("cvt.f32.f16 %0, %1;" : "=f"(v.z) : "h"((uint16_t)(high & 0xFFFFu)));
    asm("cvt.f32.f16 %0, %1;" : "=f"(v.w) : "h"((uint16_t)(high >> 16)));
    return v;
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// send (num_ranks, grad_wire_bytes) = the bucket's gradients in E4M3, a descale per block of 256; see grad_quantize
//   bytes    4 read + 1.016 written per element: 154 MB for a layer of d48 (30.7e6), 36 us at 4.3 TB/s; memory-bound
//   numerics amax, scale = 448 / amax and descale = amax / 448 (IEEE divisions), one rounding of x * scale
//   threads  grid (blocks of a chunk / 8, ranks), a warp per block; grads aligned to 16 bytes, send to 128
//   bits     deterministic
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    grad_quantize_kernel(uint8_t* send, const float* grads, const __grid_constant__ Bucket bucket) {
    kernel_begin();
    size_t block = warp_block(), rank = blockIdx.y;
    if (block >= bucket.chunk / GRAD_BLOCK) { return; }
    float4 v[EXCHANGE_VECTORS];
    block_load(v, grads, chunk_block(&bucket, block, (int)rank));
    float amax = 0.0f;
#pragma unroll
    for (int k = 0; k < EXCHANGE_VECTORS; k++) {
        amax = amax_nan(amax_nan(amax_nan(amax_nan(amax, v[k].x), v[k].y), v[k].z), v[k].w);
    }
    amax = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(amax))); // on bits: NaN is the largest
    GradBlockScale s = grad_block_scale(amax);
    uint8_t* chunk = send + rank * grad_wire_bytes(bucket.chunk);
    uint8_t* codes = chunk + block * GRAD_BLOCK;
#pragma unroll
    for (int k = 0; k < EXCHANGE_VECTORS; k++) {
        uint32_t word = fp8_pack<e4m3>(v[k].x * s.scale, v[k].y * s.scale, v[k].z * s.scale, v[k].w * s.scale);
        *(uint32_t*)(codes + block_element(k)) = s.has_codes ? word : 0u;
    }
    int lane = threadIdx.x % 32;
    if (lane == 0) { ((float*)(chunk + bucket.chunk))[block] = s.descale; }
    if (block == 0) { // the zeros behind the descales: fewer than 32 words
        size_t word = grad_payload_bytes(bucket.chunk) / 4 + lane;
        if (word < grad_wire_bytes(bucket.chunk) / 4) { ((uint32_t*)chunk)[word] = 0u; }
    }
}

// own slices of grads = sum over ranks of code * descale, in rank order; see grad_sum
//   bytes    1.016 read per element and rank + 4 written: 62 MB for a layer of d48 on 4 ranks (7.7e6 each), 14 us at
//            4.3 TB/s; memory-bound
//   numerics FP32, one rounding (fma) per rank
//   threads  grid (blocks of a chunk / 8), a warp per block; received aligned to 128 bytes, grads to 16
//   bits     deterministic: the order is that of the ranks
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    grad_sum_kernel(float* grads, const uint8_t* received, const __grid_constant__ Bucket bucket, int num_ranks,
                    int rank) {
    kernel_begin();
    size_t block = warp_block();
    if (block >= bucket.chunk / GRAD_BLOCK) { return; }
    ChunkBlock to = chunk_block(&bucket, block, rank);
    size_t bytes = grad_wire_bytes(bucket.chunk);
    const uint8_t* codes = received + block * GRAD_BLOCK;
    const uint8_t* descales = received + bucket.chunk + block * sizeof(float);
    float4 sum[EXCHANGE_VECTORS] = {};
    for (int first = 0; first < num_ranks; first += SUM_RANKS) {
        uint32_t words[SUM_RANKS][EXCHANGE_VECTORS];
        float descale[SUM_RANKS];
#pragma unroll
        for (int r = 0; r < SUM_RANKS; r++) { // NOTE: no branch here, or the loads wait for each other
            size_t chunk = (size_t)min(first + r, num_ranks - 1) * bytes;
            descale[r] = *(const float*)(descales + chunk);
#pragma unroll
            for (int k = 0; k < EXCHANGE_VECTORS; k++) {
                words[r][k] = *(const uint32_t*)(codes + chunk + block_element(k));
            }
        }
#pragma unroll
        for (int r = 0; r < SUM_RANKS; r++) {
            if (first + r >= num_ranks) { continue; }
#pragma unroll
            for (int k = 0; k < EXCHANGE_VECTORS; k++) {
                float4 v = unpack4_e4m3(words[r][k]);
                sum[k].x = __fmaf_rn(v.x, descale[r], sum[k].x);
                sum[k].y = __fmaf_rn(v.y, descale[r], sum[k].y);
                sum[k].z = __fmaf_rn(v.z, descale[r], sum[k].z);
                sum[k].w = __fmaf_rn(v.w, descale[r], sum[k].w);
            }
        }
    }
    block_store(grads, sum, to);
}

// packed (num_ranks, chunk) = chunks of ranks first_rank + blockIdx.y; see grad_pack_bf16.   4 read + 2 (BF16) or 4
// written per element; threads as grad_quantize_kernel
template <typename T>
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    grad_pack_kernel(T* packed, const float* grads, const __grid_constant__ Bucket bucket, int first_rank) {
    kernel_begin();
    size_t block = warp_block();
    if (block >= bucket.chunk / GRAD_BLOCK) { return; }
    float4 v[EXCHANGE_VECTORS];
    block_load(v, grads, chunk_block(&bucket, block, first_rank + (int)blockIdx.y));
    T* to = packed + blockIdx.y * bucket.chunk + block * GRAD_BLOCK;
#pragma unroll
    for (int k = 0; k < EXCHANGE_VECTORS; k++) {
        if (sizeof(T) == sizeof(float)) {
            *(float4*)(to + block_element(k)) = v[k];
        } else {
            *(uint2*)(to + block_element(k)) = make_uint2(pack_bf16(v[k].x, v[k].y), pack_bf16(v[k].z, v[k].w));
        }
    }
}

// slices of ranks first_rank + blockIdx.y of grads = chunks (num_ranks, chunk); see grad_unpack_bf16.   threads as
// grad_quantize_kernel
template <typename T>
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    grad_unpack_kernel(float* grads, const T* chunks, const __grid_constant__ Bucket bucket, int first_rank) {
    kernel_begin();
    size_t block = warp_block();
    if (block >= bucket.chunk / GRAD_BLOCK) { return; }
    ChunkBlock to = chunk_block(&bucket, block, first_rank + (int)blockIdx.y);
    const T* from = chunks + blockIdx.y * bucket.chunk + block * GRAD_BLOCK; // a whole block: the chunk is padded
    float4 v[EXCHANGE_VECTORS];
#pragma unroll
    for (int k = 0; k < EXCHANGE_VECTORS; k++) {
        if (sizeof(T) == sizeof(float)) {
            v[k] = *(const float4*)(from + block_element(k));
        } else {
            uint2 raw = *(const uint2*)(from + block_element(k)); // a BF16 value is the upper half of the FP32 value
            v[k] = make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xFFFF0000u),
                               __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xFFFF0000u));
        }
    }
    block_store(grads, v, to);
}

#define AMAX_VECTORS 8 // of 4 elements, that a thread has on the way
#define AMAX_TILE (EXCHANGE_THREADS * AMAX_VECTORS * 4)

// amaxes (num_pieces), zeros before, = max |g| of each piece, +Inf where one is not finite; see grad_amax
//   bytes    4 read per element: 123 MB for a layer of d48 (30.7e6), 29 us at 4.3 TB/s; memory-bound
//   threads  256 per tile of 8192 elements of one piece, grid = the tiles of all pieces; grads aligned to 16 bytes
//   bits     deterministic: max by atomics, on bits
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    grad_amax_kernel(float* amaxes, const float* grads, const __grid_constant__ Bucket bucket) {
    kernel_begin();
    size_t tile = blockIdx.x;
    int p = 0;
    for (; tile >= (bucket.piece[p].n + AMAX_TILE - 1) / AMAX_TILE; p++) {
        tile -= (bucket.piece[p].n + AMAX_TILE - 1) / AMAX_TILE;
    }
    const float4* vectors = (const float4*)(grads + bucket.piece[p].offset);
    size_t num_vectors = bucket.piece[p].n / 4, first = tile * (AMAX_TILE / 4) + threadIdx.x;
    float4 v[AMAX_VECTORS] = {};
#pragma unroll
    for (int k = 0; k < AMAX_VECTORS; k++) {
        size_t i = first + k * EXCHANGE_THREADS;
        if (i < num_vectors) { v[k] = vectors[i]; }
    }
    float amax = 0.0f;
#pragma unroll
    for (int k = 0; k < AMAX_VECTORS; k++) {
        amax = amax_nan(amax, amax_nan(amax_nan(fabsf(v[k].x), v[k].y), amax_nan(fabsf(v[k].z), v[k].w)));
    }
    raise_amax(&amaxes[p], is_finite_bits(amax) ? amax : INFINITY);
}

// codes (num_ranks, chunk) = E4M3 with the pieces' shared scales; see grad_quantize_shared
//   bytes    4 read + 1 written per element; memory-bound
//   numerics scale by IEEE operations (grad_shared_scale), one rounding of x * scale
//   threads  as grad_quantize_kernel
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    grad_quantize_shared_kernel(uint8_t* codes, const float* grads, const __grid_constant__ Bucket bucket,
                                const float* amaxes, float mu) {
    kernel_begin();
    size_t block = warp_block();
    if (block >= bucket.chunk / GRAD_BLOCK) { return; }
    float4 v[EXCHANGE_VECTORS];
    block_load(v, grads, chunk_block(&bucket, block, (int)blockIdx.y));
    GradBlockScale s = grad_shared_scale(amaxes[chunk_piece(&bucket, block)], mu);
    uint8_t* to = codes + blockIdx.y * bucket.chunk + block * GRAD_BLOCK;
#pragma unroll
    for (int k = 0; k < EXCHANGE_VECTORS; k++) {
        uint32_t word = fp8_pack<e4m3>(v[k].x * s.scale, v[k].y * s.scale, v[k].z * s.scale, v[k].w * s.scale);
        *(uint32_t*)(to + block_element(k)) = s.has_codes ? word : 0u;
    }
}

// all pieces of grads = summed codes (num_ranks, chunk) * descale; *saturated += those at +-448; see
// grad_dequantize_shared
//   bytes    1 read + 4 written per element; memory-bound
//   threads  as grad_quantize_kernel; an atomic addition per warp that has something to count
//   bits     deterministic: the atomics are on integers
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    grad_dequantize_shared_kernel(float* grads, const uint8_t* codes, const __grid_constant__ Bucket bucket,
                                  const float* amaxes, float mu, unsigned long long* saturated) {
    kernel_begin();
    size_t block = warp_block();
    if (block >= bucket.chunk / GRAD_BLOCK) { return; }
    ChunkBlock to = chunk_block(&bucket, block, (int)blockIdx.y);
    const uint8_t* from = codes + blockIdx.y * bucket.chunk + block * GRAD_BLOCK;
    uint32_t words[EXCHANGE_VECTORS];
#pragma unroll
    for (int k = 0; k < EXCHANGE_VECTORS; k++) {
        words[k] = *(const uint32_t*)(from + block_element(k));
    }
    float descale = grad_shared_scale(amaxes[chunk_piece(&bucket, block)], mu).descale;
    float4 v[EXCHANGE_VECTORS];
    unsigned count = 0;
#pragma unroll
    for (int k = 0; k < EXCHANGE_VECTORS; k++) {
        float4 x = unpack4_e4m3(words[k]);
        v[k] = make_float4(x.x * descale, x.y * descale, x.z * descale, x.w * descale);
        uint32_t at_most = __vcmpeq4(words[k] & 0x7F7F7F7Fu, 0x7E7E7E7Eu); // 0xFF where the code is +-448
        if (block_element(k) < to.count) { count += __popc(at_most) / 8; }
    }
    block_store(grads, v, to);
    count = __reduce_add_sync(0xFFFFFFFFu, count);
    if (threadIdx.x % 32 == 0 && count > 0) { atomicAdd(saturated, (unsigned long long)count); }
}

// The calling lane's 8 elements of a block of rank's chunk of the pieces; NULL where there are none. The piece is found
// by halving: its `at` is the last that is not above the block's.
__device__ static inline bf16* param_vector(const ParamPiece* pieces, int num_pieces, size_t block, int rank) {
    size_t at = block * GRAD_BLOCK;
    int low = 0, high = num_pieces;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (at >= pieces[middle].at) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const ParamPiece* piece = &pieces[low];
    size_t i = (size_t)rank * piece->slice + (at - piece->at) + BF16_OF_VECTOR * (threadIdx.x % 32);
    return i < piece->n ? piece->param + i : NULL; // n is a multiple of 16: a vector is in or out
}

// packed (chunk) = the rank's slices of all pieces, padding 0; see param_pack.   2 read + 2 written per element
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    param_pack_kernel(bf16* packed, const ParamPiece* pieces, int num_pieces, size_t num_blocks, int rank) {
    kernel_begin();
    size_t block = warp_block();
    if (block >= num_blocks) { return; }
    const bf16* from = param_vector(pieces, num_pieces, block, rank);
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (from != NULL) { raw = load_vector(from); }
    store_vector(packed + block * GRAD_BLOCK + BF16_OF_VECTOR * (threadIdx.x % 32), raw);
}

// All ranks' slices (blockIdx.y) of all pieces = gathered (num_ranks, chunk); see param_unpack
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    param_unpack_kernel(const ParamPiece* pieces, const bf16* gathered, int num_pieces, size_t num_blocks) {
    kernel_begin();
    size_t block = warp_block();
    if (block >= num_blocks) { return; }
    const bf16* from = gathered + (blockIdx.y * num_blocks + block) * GRAD_BLOCK;
    bf16* to = param_vector(pieces, num_pieces, block, (int)blockIdx.y);
    if (to != NULL) { store_vector(to, load_vector(from + BF16_OF_VECTOR * (threadIdx.x % 32))); }
}

#define SLICE_VECTORS 4 // of 4 weights, that a thread has on the way

// data (n) E4M3 = sat(master * scale); see quantize_slice
//   bytes    4 read + 1 written per weight: 13 MB for the fc weight of d48 on 4 ranks, 3 us at 4.3 TB/s; memory-bound
//   numerics those of quantize_weight_kernel: one rounding of x * scale, saturating
//   threads  256, 16 weights each, in four contiguous parts; n a multiple of 16
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    quantize_slice_kernel(uint8_t* data, ScaleSlot* slot, const float* master, size_t n) {
    kernel_begin();
    float scale = slot->scale;
    size_t first = blockIdx.x * (size_t)(EXCHANGE_THREADS * SLICE_VECTORS) + threadIdx.x;
    float4 v[SLICE_VECTORS] = {};
#pragma unroll
    for (int k = 0; k < SLICE_VECTORS; k++) {
        size_t i = first + k * EXCHANGE_THREADS;
        if (i < n / 4) { v[k] = ((const float4*)master)[i]; }
    }
#pragma unroll
    for (int k = 0; k < SLICE_VECTORS; k++) {
        size_t i = first + k * EXCHANGE_THREADS;
        if (i < n / 4) {
            ((uint32_t*)data)[i] = fp8_pack<e4m3>(v[k].x * scale, v[k].y * scale, v[k].z * scale, v[k].w * scale);
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) { slot->descale = 1.0f / scale; }
}

#define TRANSPOSE_LOG2_WORDS 5 // 128 rows / 4
#define TRANSPOSE_ROWS (PATCH_ROWS << TRANSPOSE_LOG2_WORDS)
#define TRANSPOSE_COLS 128
#define TRANSPOSE_LANES (TRANSPOSE_COLS / 16) // threads side by side: 16 columns each, two patches

// transposed (C, OC) = data (OC, C), bytes
//   bytes    1 read + 1 written per weight: 20 MB for the fc weight of d48, 4.8 us at 4.3 TB/s; memory-bound
//   threads  256, tiles of 128 x 128: 4 rows x 16 columns each on the way in, whole lines of 128 bytes out and in
//   banks    in one store of patch_to_tile a warp has 4 row words of 8 column groups; which of its two groups a lane
//            takes first depends on the lane, so that the 8 differ in their last three bits (tile_swizzle): no conflict
__global__ void __launch_bounds__(EXCHANGE_THREADS)
    transpose_weight_kernel(uint8_t* transposed, const uint8_t* data, int OC, int C) {
    kernel_begin();
    __shared__ uint4 tile[TRANSPOSE_COLS * TRANSPOSE_ROWS / sizeof(uint4)];
    int lane = threadIdx.x % TRANSPOSE_LANES, word = threadIdx.x / TRANSPOSE_LANES;
    int first_row = blockIdx.y * TRANSPOSE_ROWS, first_column = blockIdx.x * TRANSPOSE_COLS;
    int row = first_row + word * PATCH_ROWS, column = first_column + lane * 16;
    uint4 raw[PATCH_ROWS] = {};
    if (row < OC && column < C) { // multiples of 16: in or out as a whole
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++) {
            raw[r] = *(const uint4*)(data + (size_t)(row + r) * C + column);
        }
    }
    int swapped = lane / (TRANSPOSE_LANES / 2); // lanes 4..7 begin with their right patch
#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
        int right = turn ^ swapped;
        Fp8Patch patch;
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++) {
            patch.left[r] = right ? raw[r].z : raw[r].x;
            patch.right[r] = right ? raw[r].w : raw[r].y;
        }
        patch_to_tile((uint32_t*)tile, TRANSPOSE_LOG2_WORDS, lane * 16 + right * PATCH_COLS, word, &patch);
    }
    __syncthreads();
    const int chunks = TRANSPOSE_ROWS / 16;
#pragma unroll
    for (int i = 0; i < TRANSPOSE_COLS * chunks / EXCHANGE_THREADS; i++) {
        int at = threadIdx.x + i * EXCHANGE_THREADS, chunk = at % chunks, c = at / chunks;
        if (first_row + chunk * 16 < OC && first_column + c < C) {
            *(uint4*)(transposed + (size_t)(first_column + c) * OC + first_row + chunk * 16) =
                tile_chunk((const uint32_t*)tile, TRANSPOSE_LOG2_WORDS, c, chunk);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel launchers

static inline dim3 exchange_grid(const char* name, size_t chunk, int num_ranks, const void* a, const void* b) {
    check(chunk > 0 && chunk % GRAD_BLOCK == 0, "%s: a chunk of %zu elements, want a positive multiple of %d", name,
          chunk, GRAD_BLOCK);
    check(num_ranks >= 1 && num_ranks <= 65535, "%s: %d ranks, want 1 to 65535", name, num_ranks);
    check(((uintptr_t)a | (uintptr_t)b) % 16 == 0, "%s: a buffer is not aligned to 16 bytes", name);
    return dim3((unsigned)ceil_div(chunk / GRAD_BLOCK, EXCHANGE_WARPS), (unsigned)num_ranks);
}

void grad_quantize(Device* dev, uint8_t* send, const float* grads, const Bucket* bucket, int num_ranks) {
    cost_grad_exchange(dev, "grad quantize", bucket, 5.0, num_ranks);
    dim3 grid = exchange_grid("grad_quantize", bucket->chunk, num_ranks, send, grads);
    launch(dev, grad_quantize_kernel, grid, EXCHANGE_THREADS, 0, send, grads, *bucket);
}

void grad_sum(Device* dev, float* grads, const uint8_t* received, const Bucket* bucket, int num_ranks, int rank) {
    cost_grad_exchange(dev, "grad sum", bucket, 4.0 + num_ranks, 1);
    check(rank >= 0 && rank < num_ranks, "grad_sum: rank %d of %d, want 0 <= rank < ranks", rank, num_ranks);
    dim3 grid = exchange_grid("grad_sum", bucket->chunk, 1, grads, received);
    launch(dev, grad_sum_kernel, grid, EXCHANGE_THREADS, 0, grads, received, *bucket, num_ranks, rank);
}

void grad_pack_bf16(Device* dev, bf16* packed, const float* grads, const Bucket* bucket, int first_rank,
                    int num_ranks) {
    cost_grad_exchange(dev, "grad pack", bucket, 4.0 + sizeof(bf16), num_ranks);
    dim3 grid = exchange_grid("grad_pack_bf16", bucket->chunk, num_ranks, packed, grads);
    launch(dev, grad_pack_kernel<bf16>, grid, EXCHANGE_THREADS, 0, packed, grads, *bucket, first_rank);
}

void grad_pack_fp32(Device* dev, float* packed, const float* grads, const Bucket* bucket, int first_rank,
                    int num_ranks) {
    cost_grad_exchange(dev, "grad pack", bucket, 8.0, num_ranks);
    dim3 grid = exchange_grid("grad_pack_fp32", bucket->chunk, num_ranks, packed, grads);
    launch(dev, grad_pack_kernel<float>, grid, EXCHANGE_THREADS, 0, packed, grads, *bucket, first_rank);
}

void grad_unpack_bf16(Device* dev, float* grads, const bf16* chunks, const Bucket* bucket, int first_rank,
                      int num_ranks) {
    cost_grad_exchange(dev, "grad unpack", bucket, 4.0 + sizeof(bf16), num_ranks);
    dim3 grid = exchange_grid("grad_unpack_bf16", bucket->chunk, num_ranks, grads, chunks);
    launch(dev, grad_unpack_kernel<bf16>, grid, EXCHANGE_THREADS, 0, grads, chunks, *bucket, first_rank);
}

void grad_unpack_fp32(Device* dev, float* grads, const float* chunks, const Bucket* bucket, int first_rank,
                      int num_ranks) {
    cost_grad_exchange(dev, "grad unpack", bucket, 8.0, num_ranks);
    dim3 grid = exchange_grid("grad_unpack_fp32", bucket->chunk, num_ranks, grads, chunks);
    launch(dev, grad_unpack_kernel<float>, grid, EXCHANGE_THREADS, 0, grads, chunks, *bucket, first_rank);
}

void grad_amax(Device* dev, float* amaxes, const float* grads, const Bucket* bucket) {
    cost_grad_amax(dev, bucket);
    check((uintptr_t)grads % 16 == 0, "grad_amax: gradients are not aligned to 16 bytes");
    size_t tiles = 0;
    for (int p = 0; p < bucket->num_pieces; p++) {
        tiles += ceil_div(bucket->piece[p].n, AMAX_TILE);
    }
    cuda_check(cudaMemsetAsync(amaxes, 0, (size_t)bucket->num_pieces * sizeof(float), dev->stream));
    launch(dev, grad_amax_kernel, dim3((unsigned)tiles), EXCHANGE_THREADS, 0, amaxes, grads, *bucket);
}

void grad_quantize_shared(Device* dev, e4m3* codes, const float* grads, const Bucket* bucket, const float* amaxes,
                          float mu, int num_ranks) {
    cost_grad_exchange(dev, "grad quantize", bucket, 5.0, num_ranks);
    dim3 grid = exchange_grid("grad_quantize_shared", bucket->chunk, num_ranks, codes, grads);
    launch(dev, grad_quantize_shared_kernel, grid, EXCHANGE_THREADS, 0, (uint8_t*)codes, grads, *bucket, amaxes, mu);
}

void grad_dequantize_shared(Device* dev, float* grads, const e4m3* codes, const Bucket* bucket, const float* amaxes,
                            float mu, int num_ranks, unsigned long long* saturated) {
    cost_grad_exchange(dev, "grad dequantize", bucket, 5.0, num_ranks);
    dim3 grid = exchange_grid("grad_dequantize_shared", bucket->chunk, num_ranks, codes, grads);
    launch(dev, grad_dequantize_shared_kernel, grid, EXCHANGE_THREADS, 0, grads, (const uint8_t*)codes, *bucket, amaxes,
           mu, saturated);
}

void param_pack(Device* dev, bf16* packed, const ParamPiece* pieces, int num_pieces, size_t chunk, int rank) {
    cost_param_pack(dev, chunk);
    if (num_pieces == 0) { return; }
    dim3 grid = exchange_grid("param_pack", chunk, 1, packed, NULL);
    launch(dev, param_pack_kernel, grid, EXCHANGE_THREADS, 0, packed, pieces, num_pieces, chunk / GRAD_BLOCK, rank);
}

void param_unpack(Device* dev, const ParamPiece* pieces, const bf16* gathered, int num_pieces, size_t chunk,
                  int num_ranks) {
    cost_param_unpack(dev, chunk, num_ranks);
    if (num_pieces == 0) { return; }
    dim3 grid = exchange_grid("param_unpack", chunk, num_ranks, gathered, NULL);
    launch(dev, param_unpack_kernel, grid, EXCHANGE_THREADS, 0, pieces, gathered, num_pieces, chunk / GRAD_BLOCK);
}

void quantize_slice(Device* dev, e4m3* data, ScaleSlot* slot, const float* master, size_t n) {
    cost_quantize_slice(dev, n);
    check(n % 16 == 0, "quantize_slice: n = %zu, want a multiple of 16", n);
    check(((uintptr_t)data | (uintptr_t)master) % 16 == 0, "quantize_slice: a tensor is not aligned to 16 bytes");
    size_t grid = ceil_div(n / 4, EXCHANGE_THREADS * SLICE_VECTORS);
    launch(dev, quantize_slice_kernel, dim3((unsigned)(grid > 0 ? grid : 1)), EXCHANGE_THREADS, 0, (uint8_t*)data, slot,
           master, n);
}

void transpose_weight(Device* dev, e4m3* transposed, const e4m3* data, int OC, int C) {
    cost_transpose_weight(dev, OC, C);
    check(OC > 0 && C > 0 && OC % 16 == 0 && C % 16 == 0,
          "transpose_weight: (OC, C) = (%d, %d), want positive multiples of 16", OC, C);
    check(((uintptr_t)data | (uintptr_t)transposed) % 16 == 0, "transpose_weight: a tensor is not aligned to 16 bytes");
    dim3 grid((unsigned)ceil_div((size_t)C, TRANSPOSE_COLS), (unsigned)ceil_div((size_t)OC, TRANSPOSE_ROWS));
    launch(dev, transpose_weight_kernel, grid, EXCHANGE_THREADS, 0, (uint8_t*)transposed, (const uint8_t*)data, OC, C);
}

#endif
