// Our own causal flash attention on tensor cores, forward and backward. Never stores (T, T); any T, HS 16 to 128.
//
//   S = q k^T / sqrt(HS), masked to kv <= q;   P = softmax(S);   out = P v;   lse = log(sum(exp(S)))
//
// After FlashAttention-2 (Dao 2023, arXiv 2307.08691): section 3.1.1 / algorithm 1 (forward: one block of queries per
// CTA, online softmax, normalise once at the end, keep only the logsumexp), section 3.1.2 / algorithm 2 (backward: P is
// recomputed from the logsumexp, delta = rowsum(dout * out)), section 3.3 (warps split rows, never the reduction).
//
// Forward and backward at head sizes 64 and 128 are in attention_builtin_wgmma_forward.cuh and
// attention_builtin_wgmma.cuh. Here are three kernels for the rest: forward; dq; dkv. Algorithm 2 does the backward
// pass in one kernel of 5 products and adds dq up with float atomics, which would give other bits on every run. Here dq
// has a kernel of its own (3 products: S, dP, dq) and dkv another (4 products: S, dP, dv, dk): 7/5 of the tensor work,
// but no atomics, no FP32 copy of dq in memory (its read-modify-write would be 64 KB per pair of 128-row blocks), no
// order between CTAs to wait for.
//
// How a warp works, in all three kernels: it owns 16 M rows of one side (queries in forward and dq, keys in dkv; M = 2
// up to HS 64) and streams the other side past them. Scores come out of mma.m16n8k16 as accumulators, rows = owned; the
// accumulator layout of two neighbouring 8-column tiles IS the A-operand layout of the next product, so P and dS go
// from product to product in registers and never through shared memory. Only B operands are read in the loop: 32 rows
// per warp halve that traffic (128 bytes per mma; at 16 rows shared memory would limit, at 0.5 mma/clock/SM).
//
//   shared memory   rows of HS + 8 elements: an odd number of 16-byte chunks, so that the 8 rows of an ldmatrix lie in
//                   different bank groups. A pad, not an XOR swizzle: every address is one register + a constant
//   pipeline        64 streamed rows per stage, 2 stages, cp.async; one barrier per stage
//   order           the blocks of one head are neighbours in the grid (its k and v stay in L2), heaviest first
//   masking         blocks above the diagonal are never loaded; a warp skips its own masked sub-blocks; only sub-blocks
//                   that touch the diagonal are masked element by element. Rows >= T are loaded as zeros, never stored
//   deterministic   yes: every sum has one owner and a fixed order
#ifndef ATTENTION_BUILTIN_CUH
#define ATTENTION_BUILTIN_CUH

#include <math.h>

#include "gpu.cuh"

constexpr int ATTENTION_THREADS = 128; // 4 warps
constexpr int ATTENTION_STAGE = 64;    // streamed rows per pipeline stage
constexpr float ATTENTION_LOG2E = 1.4426950408889634f;

// ---------------------------------------------------------------------------------------------------------------------
// primitives: one instruction each

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8 and gets, of each matrix,
// elements (l / 4, 2 * (l % 4) + {0, 1}).
static __device__ __forceinline__ void attention_ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same, every matrix transposed.
static __device__ __forceinline__ void attention_ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// d (16, 8) FP32 += a (16, 16) BF16 . b (16, 8) BF16. With g = lane / 4, t = lane % 4 a lane holds
//   a: rows g, g + 8, g, g + 8 at columns 2t, 2t, 2t + 8, 2t + 8 (and + 1);   b: k = 2t, 2t + 8 (and + 1), column g
//   d: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
static __device__ __forceinline__ void attention_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes to shared memory without passing registers; zeros when not valid (then `from` is not read, and may be any
// address: clamping it would cost an address computation per row).
static __device__ __forceinline__ void attention_copy_async(uint32_t to, const bf16* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// Waits for all copies of this thread; a barrier then makes everybody's visible.
static __device__ __forceinline__ void attention_copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 2^x, relative error 2^-22; exp2(-inf) = 0
static __device__ __forceinline__ float attention_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Which warp; through a shuffle, so that the compiler knows it to be the same in all lanes.
static __device__ __forceinline__ int attention_warp() { return __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); }

// blockIdx.x, read anew each time: what is derived from it can be derived again instead of being kept.
static __device__ __forceinline__ int attention_block_index() {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

static __device__ __forceinline__ uint32_t attention_shared_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// ---------------------------------------------------------------------------------------------------------------------
// tiles

__host__ __device__ constexpr int attention_row_bytes(int HS) { return (HS + 8) * 2; }

// M of the backward kernels: m16 tiles per warp. dk and dv alone take HS * M registers of a lane. With N = 8 / M tiles
// of 8 columns per step a warp has 8 independent mma in flight either way, about the latency of one.
__host__ __device__ constexpr int attention_backward_m(int HS) { return HS <= 64 ? 2 : 1; }

// What this CTA works on: the blocks of a head are neighbours.
typedef struct {
    int block, head, b, h; // head = b * NH + h
} AttentionPlace;

// NOTE: called again for the epilogue on purpose. Kept through the main loop, these are the values that get spilled.
static __device__ __forceinline__ AttentionPlace attention_place(int num_blocks, int NH) {
    AttentionPlace at;
    int index = attention_block_index();
    at.head = index / num_blocks;
    at.block = index % num_blocks;
    at.b = at.head / NH;
    at.h = at.head % NH;
    return at;
}

// One 32-bit operand register of two values; the first is the lower half.
static __device__ __forceinline__ uint32_t attention_pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}

// Sum of products of 2 x 2 BF16.
static __device__ __forceinline__ float attention_dot2(uint32_t x, uint32_t y) {
    float high = __uint_as_float(x & 0xffff0000u) * __uint_as_float(y & 0xffff0000u);
    return fmaf(__uint_as_float(x << 16), __uint_as_float(y << 16), high);
}

// Over the 4 lanes that share a row of an accumulator.
static __device__ __forceinline__ float attention_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

static __device__ __forceinline__ float attention_quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// This lane's ldmatrix address for a 16 x 16 operand in a tile: A from row-major rows, or (transposed) B from rows = k.
template <int HS> static __device__ __forceinline__ uint32_t attention_lane_a(uint32_t tile, int lane) {
    return tile + (lane & 15) * attention_row_bytes(HS) + (lane >> 4) * 16;
}

// The same for B where a row of the tile is a column of B (k contiguous).
template <int HS> static __device__ __forceinline__ uint32_t attention_lane_b(uint32_t tile, int lane) {
    return tile + ((lane & 7) + (lane >> 4) * 8) * attention_row_bytes(HS) + ((lane >> 3) & 1) * 16;
}

// Start copying rows [first, first + ROWS) of x (T, HS; rows `stride` elements apart) into a tile; zeros beyond T.
template <int HS, int ROWS>
static __device__ __forceinline__ void attention_load_tile(uint32_t tile, const bf16* x, int stride, int first, int T) {
    constexpr int threads_per_row = HS == 16 ? 2 : HS == 32 ? 4 : HS <= 64 ? 8 : 16; // 16-byte chunks, some idle
    constexpr int rows_per_step = ATTENTION_THREADS / threads_per_row;
    const int row = threadIdx.x / threads_per_row, chunk = threadIdx.x % threads_per_row;
    const uint32_t to = tile + row * attention_row_bytes(HS) + chunk * 16;
    const bf16* from = x + (size_t)(first + row) * stride + chunk * 8;
    if (chunk < HS / 8) {
#pragma unroll
        for (int i = 0; i < ROWS; i += rows_per_step) {
            attention_copy_async(to + i * attention_row_bytes(HS), from + i * stride, first + row + i < T);
        }
    }
}

// acc (16 M, 8 N) += a (16 M, 16) . b^T, b = 16 columns of 8 N rows of a tile
template <int HS, int M, int N>
static __device__ __forceinline__ void attention_mma_rows(float (&acc)[M][N][4], const uint32_t (&a)[M][4],
                                                          uint32_t b) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t f[4];
        attention_ldmatrix(f, b + n * 8 * attention_row_bytes(HS));
#pragma unroll
        for (int m = 0; m < M; m++) {
            attention_mma(acc[m][n], a[m], f[0], f[1]);
            attention_mma(acc[m][n + 1], a[m], f[2], f[3]);
        }
    }
}

// acc (16 M, HS) += a (16 M, 16) . b, b = 16 rows of a tile
template <int HS, int M>
static __device__ __forceinline__ void attention_mma_columns(float (&acc)[M][HS / 8][4], const uint32_t (&a)[M][4],
                                                             uint32_t b) {
#pragma unroll
    for (int n = 0; n < HS / 8; n += 2) {
        uint32_t f[4];
        attention_ldmatrix_transposed(f, b + n * 16);
#pragma unroll
        for (int m = 0; m < M; m++) {
            attention_mma(acc[m][n], a[m], f[0], f[1]);
            attention_mma(acc[m][n + 1], a[m], f[2], f[3]);
        }
    }
}

// Scores p (16 M, 8 N) as BF16 A operand of the 16-column slice j: the accumulator layout is the operand layout.
template <int M, int N>
static __device__ __forceinline__ void attention_pack_slice(uint32_t (&a)[M][4], const float (&p)[M][N][4], int j) {
#pragma unroll
    for (int m = 0; m < M; m++) {
        a[m][0] = attention_pack(p[m][2 * j][0], p[m][2 * j][1]);
        a[m][1] = attention_pack(p[m][2 * j][2], p[m][2 * j][3]);
        a[m][2] = attention_pack(p[m][2 * j + 1][0], p[m][2 * j + 1][1]);
        a[m][3] = attention_pack(p[m][2 * j + 1][2], p[m][2 * j + 1][3]);
    }
}

// s = -inf where the kv position is beyond the q position. SIGN 1: rows are q, columns kv; -1: the other way round.
// `limit` = q - kv of this lane's first element.
// NOTE: the empty asm keeps the caller's `if` a branch; as 32 selects it would run for every sub-block.
template <int SIGN, int M, int N>
static __device__ __forceinline__ void attention_mask(float (&s)[M][N][4], int limit) {
    asm volatile("" ::: "memory");
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int i = 0; i < N * 4; i++) {
            int row = 16 * m + i % 4 / 2 * 8, column = i / 4 * 8 + i % 2;
            if (SIGN * (column - row) > limit) {
                s[m][i / 4][i % 4] = -INFINITY;
            }
        }
    }
}

template <int M, int N> static __device__ __forceinline__ void attention_clear(float (&acc)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                acc[m][n][i] = 0.0f;
            }
        }
    }
}

// x (T, HS) rows [first, first + 16 M) below T = BF16(acc). `tile` = this warp's own 16 M rows of shared memory, which
// nobody reads any more; through them the stores become 16 bytes per lane and whole sectors.
template <int HS, int M>
static __device__ __forceinline__ void attention_store_rows(bf16* x, const float (&acc)[M][HS / 8][4], char* tile,
                                                            int stride, int first, int T) {
    constexpr int chunks = HS / 8;
    const int lane = threadIdx.x % 32;
    __syncwarp(); // the warp's last ldmatrix of these rows is behind us
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < HS / 8; n++) {
            char* p = tile + (16 * m + lane / 4) * attention_row_bytes(HS) + n * 16 + (lane % 4) * 4;
            *(uint32_t*)p = attention_pack(acc[m][n][0], acc[m][n][1]);
            *(uint32_t*)(p + 8 * attention_row_bytes(HS)) = attention_pack(acc[m][n][2], acc[m][n][3]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * M * chunks / 32; i++) {
        int row = (i * 32 + lane) / chunks, chunk = (i * 32 + lane) % chunks;
        if (first + row < T) {
            *(uint4*)(x + (size_t)(first + row) * stride + chunk * 8) =
                *(const uint4*)(tile + row * attention_row_bytes(HS) + chunk * 16);
        }
    }
}

// More than 48 KB of shared memory has to be asked for, per function, and preferred to L1, which is of no use here.
static inline void builtin_attention_allow_shared(const void* kernel, int bytes) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared));
}

#include "attention_builtin_wgmma.cuh" // uses the tiles above: the passes at head sizes 64 and 128
#include "attention_builtin_wgmma_forward.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// forward

constexpr int attention_forward_rows = 128; // queries per CTA: 4 warps x 32

// Up to HS 64 the q operand fits in registers beside 32-column scores and 3 CTAs fit on an SM. At HS 112 and 128 the
// output alone takes 112 to 128 registers: q is read again from shared memory, shared by 64 columns.
__host__ __device__ constexpr int attention_forward_n(int HS) { return HS <= 96 ? 4 : 8; }
__host__ __device__ constexpr int attention_forward_ctas(int HS) { return HS <= 64 ? 3 : 2; }
__host__ __device__ constexpr int attention_forward_shared_bytes(int HS) {
    return (attention_forward_rows + 4 * ATTENTION_STAGE) * attention_row_bytes(HS);
}

// s (16 M, 8 N) raw scores -> exp2((s - row_max) * scale_log2). Online softmax, with one liberty: the reference
// row_max, and with it row_sum and o, is moved only when some row of the warp has grown by more than 2^8. P is then at
// most 256, as exact in BF16 as below 1, and most steps leave o alone. -inf stands for masked and for "no reference".
template <int HS, int M, int N>
static __device__ __forceinline__ void attention_softmax_step(float (&s)[M][N][4], float (&o)[M][HS / 8][4],
                                                              float (&row_max)[M][2], float (&row_sum)[M][2],
                                                              float scale_log2) {
    float block_max[M][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = fmaxf(s[m][0][2 * r], s[m][0][2 * r + 1]);
#pragma unroll
            for (int n = 1; n < N; n++) {
                x = fmaxf(x, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
            }
            block_max[m][r] = attention_quad_max(x);
            grown = grown || (block_max[m][r] - row_max[m][r]) * scale_log2 > 8.0f;
        }
    }
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float moved = fmaxf(row_max[m][r], block_max[m][r]);
                float shrink = attention_exp2((row_max[m][r] - moved) * scale_log2);
                row_max[m][r] = moved;
                row_sum[m][r] *= shrink;
#pragma unroll
                for (int n = 0; n < HS / 8; n++) {
                    o[m][n][2 * r] *= shrink;
                    o[m][n][2 * r + 1] *= shrink;
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float reference = row_max[m][r] * scale_log2;
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float p = attention_exp2(fmaf(s[m][n][2 * r + e], scale_log2, -reference));
                    s[m][n][2 * r + e] = p;
                    row_sum[m][r] += p;
                }
            }
        }
    }
}

// out (B, T, NH, HS) BF16 = softmax(q k^T / sqrt(HS), kv <= q) v;   lse (B, NH, T) FP32.   qkv (B, T, 3, NH, HS) BF16
//   flops    2 B NH T^2 HS useful: 53.7 G at B,NH,T,HS = 16,25,1024,64, 54 us at 989 TFLOP/s (wgmma's peak; mma.sync
//            reaches about 0.6 of it); sub-blocks of 32 x 32 on the diagonal add 3%
//   bytes    8 B T NH HS + 4 B NH T: 211 MB there, 44 us at 4.8 TB/s
//   numerics FP32 scores, softmax and accumulators; P rounded to BF16 for P v; row sums of the unrounded P; out rounded
//            once. lse is of the scaled scores, natural log
//   threads  128; CTA = 128 queries of one head, warp = 32. Grid: B NH ceil(T / 128), x only
//   bits     deterministic
template <int HS>
__global__ void __launch_bounds__(ATTENTION_THREADS, attention_forward_ctas(HS))
builtin_attention_forward_kernel(bf16* out, float* lse, const bf16* qkv, int T, int NH) {
    constexpr int M = 2, N = attention_forward_n(HS), K = HS / 16, ROWS = attention_forward_rows;
    constexpr int row_bytes = attention_row_bytes(HS), stage_bytes = 2 * ATTENTION_STAGE * row_bytes;
    constexpr bool q_in_registers = HS <= 96;
    const float scale = 1.0f / sqrtf((float)HS), scale_log2 = scale * ATTENTION_LOG2E;
    extern __shared__ __align__(16) char attention_shared[];

    // which block
    const int num_blocks = (T + ROWS - 1) / ROWS, C = NH * HS, stride = 3 * C;
    const AttentionPlace at = attention_place(num_blocks, NH);
    const int block = num_blocks - 1 - at.block;
    const bf16* q = qkv + (size_t)at.b * T * stride + at.h * HS;
    const bf16 *k = q + C, *v = k + C;
    const int lane = threadIdx.x % 32, warp = attention_warp();
    const int warp_row = warp * 16 * M, warp_q = block * ROWS + warp_row;

    // shared memory: q (ROWS), then per stage k (64), v (64)
    const uint32_t q_tile = attention_shared_address(attention_shared), kv_tiles = q_tile + ROWS * row_bytes;
    const uint32_t q_lane = attention_lane_a<HS>(q_tile + warp_row * row_bytes, lane);
    const uint32_t k_lane = attention_lane_b<HS>(kv_tiles, lane);
    const uint32_t v_lane = attention_lane_a<HS>(kv_tiles + ATTENTION_STAGE * row_bytes, lane);

    float o[M][HS / 8][4], row_max[M][2], row_sum[M][2];
    attention_clear(o);
#pragma unroll
    for (int m = 0; m < M; m++) {
        row_max[m][0] = row_max[m][1] = -INFINITY;
        row_sum[m][0] = row_sum[m][1] = 0.0f;
    }
    uint32_t q_operand[q_in_registers ? K : 1][M][4];

    // stages from the diagonal back to 0
    const int last = min((block + 1) * (ROWS / ATTENTION_STAGE), (T + ATTENTION_STAGE - 1) / ATTENTION_STAGE) - 1;
    attention_load_tile<HS, ROWS>(q_tile, q, stride, block * ROWS, T);
    attention_load_tile<HS, ATTENTION_STAGE>(kv_tiles, k, stride, last * ATTENTION_STAGE, T);
    attention_load_tile<HS, ATTENTION_STAGE>(kv_tiles + stage_bytes / 2, v, stride, last * ATTENTION_STAGE, T);
    for (int n = last, slot = 0; n >= 0; n--, slot ^= 1) {
        attention_copy_wait();
        __syncthreads(); // stage n is there, and nobody reads stage n + 1 any more: its slot takes n - 1
        if (n > 0) {
            uint32_t next = kv_tiles + (slot ^ 1) * stage_bytes;
            attention_load_tile<HS, ATTENTION_STAGE>(next, k, stride, (n - 1) * ATTENTION_STAGE, T);
            attention_load_tile<HS, ATTENTION_STAGE>(next + stage_bytes / 2, v, stride, (n - 1) * ATTENTION_STAGE, T);
        }
        if constexpr (q_in_registers) {
            if (n == last) {
#pragma unroll
                for (int j = 0; j < K; j++) {
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        attention_ldmatrix(q_operand[j][m], q_lane + m * 16 * row_bytes + j * 32);
                    }
                }
            }
        }
#pragma unroll 1
        for (int sub = ATTENTION_STAGE - 8 * N; sub >= 0; sub -= 8 * N) {
            const int first = n * ATTENTION_STAGE + sub;
            if (first > warp_q + 16 * M - 1 || warp_q >= T) {
                continue;
            }
            const uint32_t offset = slot * stage_bytes + sub * row_bytes;

            // s = q k^T
            float s[M][N][4];
            attention_clear(s);
#pragma unroll
            for (int j = 0; j < K; j++) {
                if constexpr (!q_in_registers) {
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        attention_ldmatrix(q_operand[0][m], q_lane + m * 16 * row_bytes + j * 32);
                    }
                }
                attention_mma_rows<HS>(s, q_operand[q_in_registers ? j : 0], k_lane + offset + j * 32);
            }
            if (first + 8 * N - 1 > warp_q) {
                attention_mask<1>(s, warp_q - first + lane / 4 - (lane % 4) * 2);
            }

            // o += softmax(s) v
            attention_softmax_step<HS>(s, o, row_max, row_sum, scale_log2);
#pragma unroll
            for (int j = 0; j < N / 2; j++) {
                uint32_t p[M][4];
                attention_pack_slice(p, s, j);
                attention_mma_columns<HS>(o, p, v_lane + offset + j * 16 * row_bytes);
            }
        }
    }

    // out = o / row sum; lse
    const AttentionPlace to = attention_place(num_blocks, NH);
    const int to_row = (num_blocks - 1 - to.block) * ROWS + warp_row;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = attention_quad_sum(row_sum[m][r]), inverse = __fdividef(1.0f, sum);
            int row = to_row + 16 * m + 8 * r + lane / 4;
            if (lane % 4 == 0 && row < T) {
                lse[(size_t)to.head * T + row] = fmaf(row_max[m][r], scale, logf(sum));
            }
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                o[m][n][2 * r] *= inverse;
                o[m][n][2 * r + 1] *= inverse;
            }
        }
    }
    char* own_rows = attention_shared + warp_row * row_bytes;
    attention_store_rows<HS, M>(out + (size_t)to.b * T * C + to.h * HS, o, own_rows, C, to_row, T);
}

// ---------------------------------------------------------------------------------------------------------------------
// backward:  dP = dout v^T,  dS = P * (dP - delta),  dq = dS k / sqrt(HS),  dk = dS^T q / sqrt(HS),  dv = P^T dout

__host__ __device__ constexpr int attention_backward_rows(int HS) { return 64 * attention_backward_m(HS); }
__host__ __device__ constexpr int attention_dq_shared_bytes(int HS) {
    return (2 * attention_backward_rows(HS) + 4 * ATTENTION_STAGE) * attention_row_bytes(HS);
}
// the same tiles, and lse and delta of two stages
__host__ __device__ constexpr int attention_dkv_shared_bytes(int HS) {
    return attention_dq_shared_bytes(HS) + 4 * ATTENTION_STAGE * (int)sizeof(float);
}

// dq of dqkv (B, T, 3, NH, HS) BF16, and delta (B, NH, T) FP32 = rowsum(dout * out), which the dkv kernel reads.
//   flops    3 products, 3 B NH T^2 HS: 80.5 G at B,NH,T,HS = 16,25,1024,64, 81 us at 989 TFLOP/s
//   bytes    12 B T NH HS + 8 B NH T: 318 MB there, 66 us at 4.8 TB/s
//   numerics P from lse in FP32; dS rounded to BF16; FP32 accumulators, dq rounded once; delta from BF16 dout and out
//   threads  128; CTA = 64 M queries of one head, warp = 16 M. Grid: B NH ceil(T / (64 M)), x only
//   bits     deterministic
template <int HS>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
builtin_attention_dq_kernel(bf16* dqkv, float* delta, const bf16* dout, const bf16* out, const float* lse,
                            const bf16* qkv, int T, int NH) {
    constexpr int M = attention_backward_m(HS), N = 8 / M, K = HS / 16, ROWS = attention_backward_rows(HS);
    constexpr int row_bytes = attention_row_bytes(HS), stage_bytes = 2 * ATTENTION_STAGE * row_bytes;
    const float scale = 1.0f / sqrtf((float)HS), scale_log2 = scale * ATTENTION_LOG2E;
    extern __shared__ __align__(16) char attention_shared[];

    // which block
    const int num_blocks = (T + ROWS - 1) / ROWS, C = NH * HS, stride = 3 * C;
    const AttentionPlace at = attention_place(num_blocks, NH);
    const int block = num_blocks - 1 - at.block;
    const bf16* q = qkv + (size_t)at.b * T * stride + at.h * HS;
    const bf16 *k = q + C, *v = k + C;
    const size_t out_offset = (size_t)at.b * T * C + at.h * HS;
    const int lane = threadIdx.x % 32, warp = attention_warp();
    const int warp_row = warp * 16 * M, warp_q = block * ROWS + warp_row;

    // shared memory: q (ROWS), dout (ROWS), then per stage k (64), v (64)
    const uint32_t q_tile = attention_shared_address(attention_shared);
    const uint32_t dout_tile = q_tile + ROWS * row_bytes, kv_tiles = dout_tile + ROWS * row_bytes;
    const uint32_t k_lane = attention_lane_b<HS>(kv_tiles, lane);
    const uint32_t v_lane = attention_lane_b<HS>(kv_tiles + ATTENTION_STAGE * row_bytes, lane);
    const uint32_t k_lane_transposed = attention_lane_a<HS>(kv_tiles, lane);

    const int last = min((block + 1) * (ROWS / ATTENTION_STAGE), (T + ATTENTION_STAGE - 1) / ATTENTION_STAGE) - 1;
    attention_load_tile<HS, ROWS>(q_tile, q, stride, block * ROWS, T);
    attention_load_tile<HS, ROWS>(dout_tile, dout + out_offset, C, block * ROWS, T);
    attention_load_tile<HS, ATTENTION_STAGE>(kv_tiles, k, stride, last * ATTENTION_STAGE, T);
    attention_load_tile<HS, ATTENTION_STAGE>(kv_tiles + stage_bytes / 2, v, stride, last * ATTENTION_STAGE, T);

    // per row: logsumexp (+inf beyond T: P = 0) and delta, while the tiles arrive
    float row_lse[M][2], row_delta[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = warp_q + 16 * m + 8 * r + lane / 4;
            float sum = 0.0f;
            row_lse[m][r] = INFINITY;
            if (row < T) {
                row_lse[m][r] = lse[(size_t)at.head * T + row] * ATTENTION_LOG2E;
#pragma unroll
                for (int c = 0; c < HS; c += 32) {
                    int column = c + (lane % 4) * 8;
                    if (column < HS) {
                        uint4 x = *(const uint4*)(out + out_offset + (size_t)row * C + column);
                        uint4 y = *(const uint4*)(dout + out_offset + (size_t)row * C + column);
                        sum += (attention_dot2(x.x, y.x) + attention_dot2(x.y, y.y)) +
                               (attention_dot2(x.z, y.z) + attention_dot2(x.w, y.w));
                    }
                }
            }
            row_delta[m][r] = attention_quad_sum(sum);
            if (lane % 4 == 0 && row < T) {
                delta[(size_t)at.head * T + row] = row_delta[m][r];
            }
        }
    }

    float dq[M][HS / 8][4];
    attention_clear(dq);
    uint32_t q_operand[K][M][4], dout_operand[K][M][4];
    for (int n = last, slot = 0; n >= 0; n--, slot ^= 1) {
        attention_copy_wait();
        __syncthreads(); // stage n is there, and nobody reads stage n + 1 any more: its slot takes n - 1
        if (n > 0) {
            uint32_t next = kv_tiles + (slot ^ 1) * stage_bytes;
            attention_load_tile<HS, ATTENTION_STAGE>(next, k, stride, (n - 1) * ATTENTION_STAGE, T);
            attention_load_tile<HS, ATTENTION_STAGE>(next + stage_bytes / 2, v, stride, (n - 1) * ATTENTION_STAGE, T);
        }
        if (n == last) {
#pragma unroll
            for (int j = 0; j < K; j++) {
#pragma unroll
                for (int m = 0; m < M; m++) {
                    uint32_t offset = (warp_row + m * 16) * row_bytes + j * 32;
                    attention_ldmatrix(q_operand[j][m], attention_lane_a<HS>(q_tile, lane) + offset);
                    attention_ldmatrix(dout_operand[j][m], attention_lane_a<HS>(dout_tile, lane) + offset);
                }
            }
        }
#pragma unroll 1
        for (int sub = ATTENTION_STAGE - 8 * N; sub >= 0; sub -= 8 * N) {
            const int first = n * ATTENTION_STAGE + sub;
            if (first > warp_q + 16 * M - 1 || warp_q >= T) {
                continue;
            }
            const uint32_t offset = slot * stage_bytes + sub * row_bytes;

            // s = q k^T;  dp = dout v^T, while the exponentials turn s into P
            // NOTE: masked as -inf here, not as P = 0 later: what follows is one basic block, in which the compiler
            // lays the exponentials between the products (and needs 10 registers less)
            float s[M][N][4], dp[M][N][4];
            attention_clear(s);
            attention_clear(dp);
#pragma unroll
            for (int j = 0; j < K; j++) {
                attention_mma_rows<HS>(s, q_operand[j], k_lane + offset + j * 32);
            }
            if (first + 8 * N - 1 > warp_q) {
                attention_mask<1>(s, warp_q - first + lane / 4 - (lane % 4) * 2);
            }
#pragma unroll
            for (int j = 0; j < K; j++) {
                attention_mma_rows<HS>(dp, dout_operand[j], v_lane + offset + j * 32);
#pragma unroll
                for (int i = j * N / K; i < (j + 1) * N / K; i++) {
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        s[m][i][0] = attention_exp2(fmaf(s[m][i][0], scale_log2, -row_lse[m][0]));
                        s[m][i][1] = attention_exp2(fmaf(s[m][i][1], scale_log2, -row_lse[m][0]));
                        s[m][i][2] = attention_exp2(fmaf(s[m][i][2], scale_log2, -row_lse[m][1]));
                        s[m][i][3] = attention_exp2(fmaf(s[m][i][3], scale_log2, -row_lse[m][1]));
                    }
                }
            }

            // dS;  dq += dS k
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int i = 0; i < N * 4; i++) {
                    s[m][i / 4][i % 4] *= dp[m][i / 4][i % 4] - row_delta[m][i % 4 / 2];
                }
            }
#pragma unroll
            for (int j = 0; j < N / 2; j++) {
                uint32_t ds[M][4];
                attention_pack_slice(ds, s, j);
                attention_mma_columns<HS>(dq, ds, k_lane_transposed + offset + j * 16 * row_bytes);
            }
        }
    }

#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int i = 0; i < HS / 2; i++) {
            dq[m][i / 4][i % 4] *= scale;
        }
    }
    const AttentionPlace to = attention_place(num_blocks, NH);
    bf16* dq_head = dqkv + (size_t)to.b * T * stride + to.h * HS;
    attention_store_rows<HS, M>(dq_head, dq, attention_shared + warp_row * row_bytes, stride,
                                (num_blocks - 1 - to.block) * ROWS + warp_row, T);
}

// dk and dv of dqkv (B, T, 3, NH, HS) BF16. Works on S^T and dP^T, so that a warp owns keys and sums over queries.
//   flops    4 products, 4 B NH T^2 HS: 107 G at B,NH,T,HS = 16,25,1024,64, 109 us at 989 TFLOP/s
//   bytes    12 B T NH HS + 8 B NH T: 318 MB there, 66 us at 4.8 TB/s
//   numerics P from lse in FP32, rounded to BF16 for dv; dS from the unrounded P, rounded to BF16; FP32 accumulators,
//            dk and dv rounded once
//   threads  128; CTA = 64 M keys of one head, warp = 16 M. Grid: B NH ceil(T / (64 M)), x only. Runs after dq (delta)
//   bits     deterministic
template <int HS>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
builtin_attention_dkv_kernel(bf16* dqkv, const bf16* dout, const float* lse, const float* delta, const bf16* qkv, int T,
                             int NH) {
    constexpr int M = attention_backward_m(HS), N = 8 / M, K = HS / 16, ROWS = attention_backward_rows(HS);
    constexpr int row_bytes = attention_row_bytes(HS), stage_bytes = 2 * ATTENTION_STAGE * row_bytes;
    const float scale = 1.0f / sqrtf((float)HS), scale_log2 = scale * ATTENTION_LOG2E;
    extern __shared__ __align__(16) char attention_shared[];

    // which block: block 0 sees every query, so it is the heaviest
    const int num_blocks = (T + ROWS - 1) / ROWS, C = NH * HS, stride = 3 * C;
    const AttentionPlace at = attention_place(num_blocks, NH);
    const int block = at.block;
    const bf16* q = qkv + (size_t)at.b * T * stride + at.h * HS;
    const bf16 *k = q + C, *v = k + C;
    const bf16* dout_head = dout + (size_t)at.b * T * C + at.h * HS;
    const int lane = threadIdx.x % 32, warp = attention_warp();
    const int warp_row = warp * 16 * M, warp_kv = block * ROWS + warp_row;

    // shared memory: k (ROWS), v (ROWS), per stage q (64), dout (64); then per stage lse (64), delta (64) FP32
    const uint32_t k_tile = attention_shared_address(attention_shared);
    const uint32_t v_tile = k_tile + ROWS * row_bytes, stages = v_tile + ROWS * row_bytes;
    float* stats = (float*)(attention_shared + attention_dq_shared_bytes(HS));
    const uint32_t k_lane = attention_lane_a<HS>(k_tile + warp_row * row_bytes, lane);
    const uint32_t v_lane = attention_lane_a<HS>(v_tile + warp_row * row_bytes, lane);
    const uint32_t q_lane = attention_lane_b<HS>(stages, lane);
    const uint32_t q_lane_transposed = attention_lane_a<HS>(stages, lane);
    constexpr int dout_offset = ATTENTION_STAGE * row_bytes; // from q to dout in a stage

    // this thread brings one number per stage: threads 0..63 lse (+inf beyond T: P = 0), 64..127 delta
    const float* stat = (threadIdx.x < ATTENTION_STAGE ? lse : delta) + (size_t)at.head * T;
    const float stat_factor = threadIdx.x < ATTENTION_STAGE ? ATTENTION_LOG2E : 1.0f;
    const float stat_beyond = threadIdx.x < ATTENTION_STAGE ? INFINITY : 0.0f;
    const int stat_row = threadIdx.x % ATTENTION_STAGE;

    // stages from the diagonal on to T
    const int begin = block * (ROWS / ATTENTION_STAGE), end = (T + ATTENTION_STAGE - 1) / ATTENTION_STAGE;
    attention_load_tile<HS, ROWS>(k_tile, k, stride, block * ROWS, T);
    attention_load_tile<HS, ROWS>(v_tile, v, stride, block * ROWS, T);
    attention_load_tile<HS, ATTENTION_STAGE>(stages, q, stride, begin * ATTENTION_STAGE, T);
    attention_load_tile<HS, ATTENTION_STAGE>(stages + dout_offset, dout_head, C, begin * ATTENTION_STAGE, T);
    {
        int row = begin * ATTENTION_STAGE + stat_row;
        stats[threadIdx.x] = row < T ? stat[row] * stat_factor : stat_beyond;
    }
    float dk[M][HS / 8][4], dv[M][HS / 8][4];
    attention_clear(dk);
    attention_clear(dv);
    for (int n = begin, slot = 0; n < end; n++, slot ^= 1) {
        attention_copy_wait();
        __syncthreads(); // stage n is there, and nobody reads stage n - 1 any more: its slot takes n + 1
        float next_stat = stat_beyond;
        if (n + 1 < end) {
            uint32_t next = stages + (slot ^ 1) * stage_bytes;
            attention_load_tile<HS, ATTENTION_STAGE>(next, q, stride, (n + 1) * ATTENTION_STAGE, T);
            attention_load_tile<HS, ATTENTION_STAGE>(next + dout_offset, dout_head, C, (n + 1) * ATTENTION_STAGE, T);
            int row = (n + 1) * ATTENTION_STAGE + stat_row;
            if (row < T) {
                next_stat = stat[row] * stat_factor;
            }
        }
#pragma unroll 1
        for (int sub = 0; sub < ATTENTION_STAGE; sub += 8 * N) {
            const int first = n * ATTENTION_STAGE + sub;
            if (first + 8 * N - 1 < warp_kv || first >= T) {
                continue;
            }
            const uint32_t offset = slot * stage_bytes + sub * row_bytes;
            const float* sub_stats = stats + slot * 2 * ATTENTION_STAGE + sub + (lane % 4) * 2;

            // s = k q^T;  dp = v dout^T, while the exponentials turn s into P^T; masked here for the same reason
            float s[M][N][4], dp[M][N][4];
            attention_clear(s);
            attention_clear(dp);
#pragma unroll
            for (int j = 0; j < K; j++) {
                uint32_t a[M][4];
#pragma unroll
                for (int m = 0; m < M; m++) {
                    attention_ldmatrix(a[m], k_lane + m * 16 * row_bytes + j * 32);
                }
                attention_mma_rows<HS>(s, a, q_lane + offset + j * 32);
            }
            if (first < warp_kv + 16 * M - 1) {
                attention_mask<-1>(s, first - warp_kv - lane / 4 + (lane % 4) * 2);
            }
#pragma unroll
            for (int j = 0; j < K; j++) {
                uint32_t a[M][4];
#pragma unroll
                for (int m = 0; m < M; m++) {
                    attention_ldmatrix(a[m], v_lane + m * 16 * row_bytes + j * 32);
                }
                attention_mma_rows<HS>(dp, a, q_lane + dout_offset + offset + j * 32);
#pragma unroll
                for (int i = j * N / K; i < (j + 1) * N / K; i++) {
                    float2 column_lse = *(const float2*)(sub_stats + 8 * i);
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        s[m][i][0] = attention_exp2(fmaf(s[m][i][0], scale_log2, -column_lse.x));
                        s[m][i][1] = attention_exp2(fmaf(s[m][i][1], scale_log2, -column_lse.y));
                        s[m][i][2] = attention_exp2(fmaf(s[m][i][2], scale_log2, -column_lse.x));
                        s[m][i][3] = attention_exp2(fmaf(s[m][i][3], scale_log2, -column_lse.y));
                    }
                }
            }

            // dv += P^T dout
#pragma unroll
            for (int j = 0; j < N / 2; j++) {
                uint32_t p[M][4];
                attention_pack_slice(p, s, j);
                attention_mma_columns<HS>(dv, p, q_lane_transposed + dout_offset + offset + j * 16 * row_bytes);
            }

            // dS^T;  dk += dS^T q
#pragma unroll
            for (int i = 0; i < N; i++) {
                float2 column_delta = *(const float2*)(sub_stats + ATTENTION_STAGE + 8 * i);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    s[m][i][0] *= dp[m][i][0] - column_delta.x;
                    s[m][i][1] *= dp[m][i][1] - column_delta.y;
                    s[m][i][2] *= dp[m][i][2] - column_delta.x;
                    s[m][i][3] *= dp[m][i][3] - column_delta.y;
                }
            }
#pragma unroll
            for (int j = 0; j < N / 2; j++) {
                uint32_t ds[M][4];
                attention_pack_slice(ds, s, j);
                attention_mma_columns<HS>(dk, ds, q_lane_transposed + offset + j * 16 * row_bytes);
            }
        }
        stats[(slot ^ 1) * 2 * ATTENTION_STAGE + threadIdx.x] = next_stat;
    }

#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int i = 0; i < HS / 2; i++) {
            dk[m][i / 4][i % 4] *= scale;
        }
    }
    const AttentionPlace to = attention_place(num_blocks, NH);
    bf16* dk_head = dqkv + (size_t)to.b * T * stride + C + to.h * HS;
    char* own_rows = attention_shared + warp_row * row_bytes;
    attention_store_rows<HS, M>(dk_head, dk, own_rows, stride, to.block * ROWS + warp_row, T);
    attention_store_rows<HS, M>(dk_head + C, dv, own_rows + ROWS * row_bytes, stride, to.block * ROWS + warp_row, T);
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

typedef struct {
    int B, T, NH, HS;
} BuiltinAttentionShape;

// One error line for what the kernels cannot take; `who` is the public function.
static inline void builtin_attention_check_shape(const char* who, BuiltinAttentionShape x) {
    check(x.B > 0 && x.T > 0 && x.NH > 0, "%s: B, T, NH = %d, %d, %d, want at least 1", who, x.B, x.T, x.NH);
    check(x.HS > 0 && x.HS <= 128 && x.HS % 16 == 0, "%s: head size %d, want a multiple of 16, at most 128", who, x.HS);
    double blocks = (double)x.B * x.NH * ((x.T + 63) / 64);
    check(blocks <= INT32_MAX, "%s: B, NH, T = %d, %d, %d are %.0f blocks, want at most %d", who, x.B, x.NH, x.T,
          blocks, INT32_MAX);
}

static inline void builtin_attention_check_alignment(const char* who, const char* name, const void* p) {
    check(p != NULL && (uintptr_t)p % 16 == 0, "%s: %s is %p, want an address that is a multiple of 16", who, name, p);
}

template <int HS>
static inline void builtin_attention_forward_launch(Device* dev, bf16* out, float* lse, const bf16* qkv,
                                                    BuiltinAttentionShape x) {
    const int grid = x.B * x.NH * ((x.T + attention_forward_rows - 1) / attention_forward_rows);
    constexpr int shared_bytes = attention_forward_shared_bytes(HS);
    builtin_attention_allow_shared((const void*)builtin_attention_forward_kernel<HS>, shared_bytes);
    builtin_attention_forward_kernel<HS>
        <<<grid, ATTENTION_THREADS, shared_bytes, dev->stream>>>(out, lse, qkv, x.T, x.NH);
    cuda_check(cudaGetLastError());
}

template <int HS>
static inline void builtin_attention_backward_launch(Device* dev, bf16* dqkv, const bf16* dout, const bf16* out,
                                                     const float* lse, const bf16* qkv, BuiltinAttentionShape x) {
    const int grid = x.B * x.NH * ((x.T + attention_backward_rows(HS) - 1) / attention_backward_rows(HS));
    constexpr int dq_bytes = attention_dq_shared_bytes(HS), dkv_bytes = attention_dkv_shared_bytes(HS);
    float* delta = (float*)dev->workspace;
    builtin_attention_allow_shared((const void*)builtin_attention_dq_kernel<HS>, dq_bytes);
    builtin_attention_dq_kernel<HS>
        <<<grid, ATTENTION_THREADS, dq_bytes, dev->stream>>>(dqkv, delta, dout, out, lse, qkv, x.T, x.NH);
    cuda_check(cudaGetLastError());
    builtin_attention_allow_shared((const void*)builtin_attention_dkv_kernel<HS>, dkv_bytes);
    builtin_attention_dkv_kernel<HS>
        <<<grid, ATTENTION_THREADS, dkv_bytes, dev->stream>>>(dqkv, dout, lse, delta, qkv, x.T, x.NH);
    cuda_check(cudaGetLastError());
}

// Does builtin_attention_forward write the FP8 forms of its output itself? (Transposed, 16 tokens are 16 bytes.)
static inline int builtin_attention_writes_fp8(int T, int HS) { return (HS == 64 || HS == 128) && T % 16 == 0; }

// y (B, T, NH, HS), wide and what else it asks for, and lse (B, NH, T) FP32 from qkv (B, T, 3, NH, HS) BF16; see the
// kernel. FP8 forms only if builtin_attention_writes_fp8. All pointers 16-byte aligned. Asynchronous on dev->stream; no
// workspace. A shape that cannot be taken is an error line.
void builtin_attention_forward(Device* dev, FormsOut y, float* lse, const bf16* qkv, int B, int T, int NH, int HS) {
    const BuiltinAttentionShape x = {B, T, NH, HS};
    bf16* out = y.wide;
    builtin_attention_check_shape("builtin_attention_forward", x);
    builtin_attention_check_alignment("builtin_attention_forward", "out", out);
    builtin_attention_check_alignment("builtin_attention_forward", "qkv", qkv);
    check(y.slot == NULL || (builtin_attention_writes_fp8(T, HS) && !y.measuring),
          "builtin_attention_forward: FP8 output at T %d, head size %d, want a multiple of 16, and 64 or 128", T, HS);
    switch (HS) {
    case 16: builtin_attention_forward_launch<16>(dev, out, lse, qkv, x); break;
    case 32: builtin_attention_forward_launch<32>(dev, out, lse, qkv, x); break;
    case 48: builtin_attention_forward_launch<48>(dev, out, lse, qkv, x); break;
    case 64: wgmma_attention_forward<WgmmaForward64>(dev, y, lse, qkv, B, T, NH); break;
    case 80: builtin_attention_forward_launch<80>(dev, out, lse, qkv, x); break;
    case 96: builtin_attention_forward_launch<96>(dev, out, lse, qkv, x); break;
    case 112: builtin_attention_forward_launch<112>(dev, out, lse, qkv, x); break;
    default: wgmma_attention_forward<WgmmaForward128>(dev, y, lse, qkv, B, T, NH); break;
    }
}

// Bytes that builtin_attention_backward uses of dev->workspace: delta (B, NH, T) FP32; or what wgmma_workspace lists.
size_t builtin_attention_workspace_bytes(int B, int T, int NH, int HS) {
    if (wgmma_does(HS)) { return wgmma_workspace(B, T, NH, HS).total_bytes; }
    return (size_t)B * NH * T * sizeof(float);
}

// Can builtin_attention_backward write FP8 forms of dqkv, and the bias gradient? 16 rows of a transposed form must not
// cross from one batch row into the next.
static inline int builtin_attention_backward_emits(int T, int HS, int fp8) {
    return wgmma_does(HS) && (!fp8 || T % 16 == 0);
}

// dqkv (B, T, 3, NH, HS) = (not +=) gradient of qkv, from dout and out (B, T, NH, HS) BF16, lse (B, NH, T) FP32 as
// the forward pass left it, and qkv. All pointers but lse 16-byte aligned; dqkv must overlap none of the inputs.
// Asynchronous on dev->stream; needs builtin_attention_workspace_bytes of dev->workspace. What cannot be taken is an
// error line.
// Where builtin_attention_backward_emits, dqkv is FP8 forms or `wide`, and dbias (3C) FP32 += column sums of its BF16
// values unless NULL; elsewhere dqkv is `wide` alone and dbias NULL.
void builtin_attention_backward(Device* dev, FormsOut dqkv, float* dbias, const bf16* dout, const bf16* out,
                                const float* lse, const bf16* qkv, int B, int T, int NH, int HS) {
    const BuiltinAttentionShape x = {B, T, NH, HS};
    builtin_attention_check_shape("builtin_attention_backward", x);
    builtin_attention_check_alignment("builtin_attention_backward", "dout", dout);
    builtin_attention_check_alignment("builtin_attention_backward", "out", out);
    builtin_attention_check_alignment("builtin_attention_backward", "qkv", qkv);
    size_t needed = builtin_attention_workspace_bytes(B, T, NH, HS);
    check(dev->workspace_bytes >= needed,
          "builtin_attention_backward: workspace has %zu bytes, want %zu for B, T, NH, HS = %d, %d, %d, %d",
          dev->workspace_bytes, needed, B, T, NH, HS);
    check((dqkv.slot != NULL) != (dqkv.wide != NULL),
          "builtin_attention_backward: dqkv in %s, want FP8 with a slot, or BF16",
          dqkv.wide != NULL ? "FP8 and BF16" : "no form");
    check(((uintptr_t)dqkv.wide | (uintptr_t)dqkv.data | (uintptr_t)dqkv.transposed) % 16 == 0,
          "builtin_attention_backward: dqkv's forms are at %p, %p, %p, want multiples of 16", (void*)dqkv.wide,
          (void*)dqkv.data, (void*)dqkv.transposed);
    if (HS == 64) {
        wgmma_backward_launch<64>(dev, dqkv, dbias, dout, out, lse, qkv, B, T, NH);
        return;
    }
    if (HS == 128) {
        wgmma_backward_launch<128>(dev, dqkv, dbias, dout, out, lse, qkv, B, T, NH);
        return;
    }
    check(dqkv.slot == NULL && dbias == NULL, "builtin_attention_backward: no FP8 and no bias gradient at head size %d",
          HS);
    switch (HS) {
    case 16: builtin_attention_backward_launch<16>(dev, dqkv.wide, dout, out, lse, qkv, x); break;
    case 32: builtin_attention_backward_launch<32>(dev, dqkv.wide, dout, out, lse, qkv, x); break;
    case 48: builtin_attention_backward_launch<48>(dev, dqkv.wide, dout, out, lse, qkv, x); break;
    case 80: builtin_attention_backward_launch<80>(dev, dqkv.wide, dout, out, lse, qkv, x); break;
    case 96: builtin_attention_backward_launch<96>(dev, dqkv.wide, dout, out, lse, qkv, x); break;
    default: builtin_attention_backward_launch<112>(dev, dqkv.wide, dout, out, lse, qkv, x); break;
    }
}

#endif
