// Forward pass of causal attention at head sizes 64 and 128 on Hopper's own instructions (wgmma, TMA), which also
// leaves the FP8 forms of its output. Formulas: attention_builtin.cuh.
//
// A team is some warpgroups with 64 queries each, one below the other in a head, which go over blocks of 64 keys from 0
// to the diagonal. Teams fetch their items from an atomic counter: the tiles of a head side by side (its k and v stay
// in L2), the longest first.
//
//   threads    the warpgroups of one or two teams, and a warp per team of which one thread loads
//   products   S = q k^T of key block n is issued before o += P v of block n - 1, so that the exponentials of n, which
//              need S only, run beside a product (FlashAttention-3, Shah et al. 2024, arXiv 2407.08608, section 3.2).
//              Warpgroups are kept together by nothing but the tiles that they share: what one waits for, others hide
//   maximum    is looked for in the first block of a row only; see WgmmaForwardRows
//   registers  decide the shape: o, S and P of 64 x 64 leave room for 4 warpgroups at head size 64, and for 3 at 128
//   shared     tiles of 64 rows x 128 bytes with TMA's 128-byte swizzle, at head size 128 two panels; per team a ring
//              of k and v, and two of q, so that the next item's tiles arrive while this one ends
//   edges      TMA writes zeros beyond T and never crosses into the next row of the batch; queries there are computed
//              like others (warpgroups with nothing else skip them) and not stored
#ifndef ATTENTION_BUILTIN_WGMMA_FORWARD_CUH
#define ATTENTION_BUILTIN_WGMMA_FORWARD_CUH

#include "gpu.cuh"

// The shape of the kernel: head size, warpgroups of a team, teams in a block of threads, steps in the rings of k and v.
template <int HS_, int GROUPS_, int TEAMS_, int STAGES_> struct WgmmaForward {
    static constexpr int HS = HS_, GROUPS = GROUPS_, TEAMS = TEAMS_, STAGES = STAGES_, KEYS = 64, ROWS = 64 * GROUPS;
    static constexpr int COMPUTE_GROUPS = GROUPS * TEAMS, COMPUTE_THREADS = 128 * COMPUTE_GROUPS;
    static constexpr int THREADS = COMPUTE_THREADS + 128;
    // registers of a thread: when it starts, of those that load, and what that leaves for those that compute
    static constexpr int START_REGISTERS = 65536 / THREADS / 8 * 8, LOAD_REGISTERS = 32;
    static constexpr int COMPUTE_REGISTERS =
        (START_REGISTERS * (COMPUTE_GROUPS + 1) - LOAD_REGISTERS) / COMPUTE_GROUPS / 8 * 8;
    static constexpr int PANELS = HS / WGMMA_PANEL, PANEL_BYTES = 64 * WGMMA_PANEL * 2; // 64 queries or keys
    static constexpr int TILE_BYTES = PANELS * PANEL_BYTES;
    // shared memory of a team, from a 1024-byte boundary on: q [2][GROUPS], k and v [STAGES][2]
    static constexpr int AT_Q = 0, AT_KV = AT_Q + 2 * GROUPS * TILE_BYTES, TEAM_BYTES = AT_KV + STAGES * 2 * TILE_BYTES;
    // behind all that, of each team, its mbarriers, its items [2], and the largest output so far
    static constexpr int Q_FULL = 0, Q_EMPTY = Q_FULL + 16, ITEM = Q_EMPTY + 16, KV_FULL = ITEM + 32;
    static constexpr int KV_EMPTY = KV_FULL + 8 * STAGES, AMAX = KV_EMPTY + 8 * STAGES, BARRIER_BYTES = 256;
    // behind those of all teams: an operand of ones
    static constexpr int AT_ONES = TEAMS * (TEAM_BYTES + BARRIER_BYTES), ONES_BYTES = 256;
    static constexpr int SHARED_BYTES = AT_ONES + ONES_BYTES + 1024; // 1024: to reach the boundary
    static_assert(AMAX + 4 <= BARRIER_BYTES && SHARED_BYTES <= 232448, "a block of Hopper has 227 KB");
};
// What was measured to be the fastest: dev/README.md.
typedef WgmmaForward<64, 2, 2, 4> WgmmaForward64;
typedef WgmmaForward<128, 3, 1, 4> WgmmaForward128;

// What the loading threads share: the next item, and how many of them have seen the last one. Both are 0 between
// launches: the last thread puts them back. Launches must follow each other on one stream.
static __device__ int wgmma_forward_next, wgmma_forward_done;

// ---------------------------------------------------------------------------------------------------------------------
// primitives

// d (64, HS) += a (64, 16) . b, a from registers, b (16, HS) row-major in shared memory
static __device__ __forceinline__ void wgmma_forward_add(float (&d)[32], const uint32_t* a, uint64_t b) {
    wgmma_64x64_registers(d, a, b);
}
static __device__ __forceinline__ void wgmma_forward_add(float (&d)[64], const uint32_t* a, uint64_t b) {
    wgmma_64x128_registers(d, a, b, 1);
}

// d (64, 8) += a (64, 16) . ones (16, 8), a from registers: the row sums of a, in every column
static __device__ __forceinline__ void wgmma_forward_add_rows(float (&d)[4], const uint32_t* a, uint64_t ones) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, "
                 "0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(ones));
}
// Two groups of 8 x 8 elements side by side, without a swizzle: all that is read are the 256 bytes at `address`.
static __device__ __forceinline__ uint64_t wgmma_forward_ones(uint32_t address) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)8 << 16 | (uint64_t)8 << 32;
}

// The lower half of a descriptor, to which multiples of 16 bytes can be added; see wgmma_operand_panels. Kept as 32
// bits, a product's address is one addition.
static __device__ __forceinline__ uint32_t wgmma_forward_low(uint32_t address, int panel_bytes) {
    return (uint32_t)wgmma_operand_panels(address, panel_bytes);
}
static __device__ __forceinline__ uint64_t wgmma_forward_operand(uint32_t low) {
    return (uint64_t)(64 | 1 << 30) << 32 | low;
}

static __device__ __forceinline__ float wgmma_forward_log2(float x) { // error 2^-22, absolute near 1, else relative
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel

// s (64, KEYS) = q k^T of one block of keys
template <typename F>
static __device__ __forceinline__ void wgmma_forward_scores(float (&s)[F::KEYS / 2], uint32_t q, uint32_t k) {
    wgmma_64x64_start(s, wgmma_forward_operand(q), wgmma_forward_operand(k));
#pragma unroll
    for (int c = 1; c < F::HS / 16; c++) {
        wgmma_64x64(s, wgmma_forward_operand(q + c / 4 * (F::PANEL_BYTES / 16) + c % 4 * 2),
                    wgmma_forward_operand(k + c / 4 * (F::PANEL_BYTES / 16) + c % 4 * 2));
    }
}

// o (64, HS) += P v of one block of keys; weight += row sums of P as it is rounded
template <typename F>
static __device__ __forceinline__ void wgmma_forward_output(float (&o)[F::HS / 2], float (&weight)[4],
                                                            const uint32_t (&p)[F::KEYS / 4], uint32_t v,
                                                            uint64_t ones) {
#pragma unroll
    for (int c = 0; c < F::KEYS / 16; c++) {
        wgmma_forward_add(o, p + 4 * c, wgmma_forward_operand(v + c * 128));
        wgmma_forward_add_rows(weight, p + 4 * c, ones);
    }
}

// s = -inf where the key is beyond the query. `limit` = query - key of this lane's first element.
template <int N> static __device__ __forceinline__ void wgmma_forward_mask(float (&s)[N], int limit) {
    asm volatile("" ::: "memory"); // keeps the caller's `if` a branch
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i / 4 * 8 + i % 2 - i % 4 / 2 * 8 > limit) { s[i] = -INFINITY; }
    }
}

// The layout of accumulators is that of A operands.
template <int N> static __device__ __forceinline__ void wgmma_forward_pack(uint32_t (&p)[N / 2], const float (&s)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        p[i] = attention_pack(s[2 * i], s[2 * i + 1]);
    }
}

// The largest of the two rows that the 4 lanes of a quad share.
template <int N>
static __device__ __forceinline__ void wgmma_forward_row_max(float (&largest)[2], const float (&s)[N]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float x = fmaxf(s[2 * r], s[2 * r + 1]), y = fmaxf(s[4 + 2 * r], s[5 + 2 * r]);
#pragma unroll
        for (int i = 8; i < N; i += 8) {
            x = fmaxf(x, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
            y = fmaxf(y, fmaxf(s[i + 4 + 2 * r], s[i + 5 + 2 * r]));
        }
        largest[r] = attention_quad_max(fmaxf(x, y));
    }
}

// Softmax of a row is kept as a sum of P = 2^(s scale_log2 - reference), and o in the same unit. The reference is a
// whole number, at first the largest exponent of block 0, and moved when a lane's sum of P over a later block is above
// 2^8: P is as exact there as below 1. So P may be made without the maximum of its block, which would cost a fifth of
// all instructions and a wait for the neighbours; FP32 holds what grows by less than 2^100, and what grows by more is
// made again.
// The largest P of a row is then no power of two, and is rounded to BF16 like all others. So o is divided by the sum of
// the P that it was made of, the rounded ones (tensor cores add them up: products with a column of ones): a row that
// looks at one key has exactly that key's v. lse needs the sum of P as it is.
typedef struct {
    float reference[2], sum[2]; // of the lane's two rows; the sums are of the lane's own columns
    float shrink[2];            // what o has to be multiplied by after a move
} WgmmaForwardRows;

// s raw scores -> P, around their largest: exact for any scores.
template <int N>
static __device__ __forceinline__ void wgmma_forward_softmax(float (&s)[N], WgmmaForwardRows* rows, float scale_log2) {
    float largest[2];
    wgmma_forward_row_max(largest, s);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float moved = fmaxf(rows->reference[r], rintf(largest[r] * scale_log2));
        rows->shrink[r] = attention_exp2(rows->reference[r] - moved);
        rows->reference[r] = moved;
        rows->sum[r] *= rows->shrink[r];
    }
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const int r = i / 2 % 2;
        s[i] = attention_exp2(fmaf(s[i], scale_log2, -rows->reference[r]));
        s[i + 1] = attention_exp2(fmaf(s[i + 1], scale_log2, -rows->reference[r]));
        rows->sum[r] += s[i] + s[i + 1];
    }
}

typedef enum { WGMMA_ROWS_STAY, WGMMA_ROWS_MOVE, WGMMA_ROWS_LOST } WgmmaForwardChange;

// s raw scores -> P, around the reference that there is. MOVE: rows have grown, P and the reference are moved by a
// power of two. LOST: by so much that P may be infinite; then s is lost and nothing is added yet.
template <int N>
static __device__ __forceinline__ WgmmaForwardChange wgmma_forward_softmax_quick(float (&s)[N], WgmmaForwardRows* rows,
                                                                                 float scale_log2) {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const int r = i / 2 % 2;
        s[i] = attention_exp2(fmaf(s[i], scale_log2, -rows->reference[r]));
        s[i + 1] = attention_exp2(fmaf(s[i + 1], scale_log2, -rows->reference[r]));
        sum[r] += s[i] + s[i + 1];
    }
    if (__all_sync(0xffffffffu, sum[0] <= 256.0f && sum[1] <= 256.0f)) { // NaN is not
        rows->sum[0] += sum[0];
        rows->sum[1] += sum[1];
        return WGMMA_ROWS_STAY;
    }
    float largest[2];
    wgmma_forward_row_max(largest, s);
    if (__any_sync(0xffffffffu, fmaxf(largest[0], largest[1]) > 0x1p100f)) { return WGMMA_ROWS_LOST; }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int exponent = max(__float_as_int(largest[r]) >> 23, 127); // biased
        rows->shrink[r] = __int_as_float((254 - exponent) << 23);
        rows->reference[r] += (float)(exponent - 127);
        rows->sum[r] = (rows->sum[r] + sum[r]) * rows->shrink[r];
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        s[i] *= rows->shrink[i / 2 % 2];
    }
    return WGMMA_ROWS_MOVE;
}

// A warp's own 16 rows of s = q k^T once more, by mma.sync: wgmma needs the whole warpgroup.
template <typename F>
static __device__ __forceinline__ void wgmma_forward_scores_again(float (&s)[F::KEYS / 2], uint32_t q_rows,
                                                                  uint32_t k_tile, int lane) {
    const int q_row = lane & 15, k_row = (lane & 7) + (lane >> 4) * 8;
#pragma unroll 1
    for (int c = 0; c < F::HS / 16; c++) {
        uint32_t a[4];
        attention_ldmatrix(a, q_rows + c / 4 * F::PANEL_BYTES + q_row * 128 +
                                  (((c % 4 * 2 + (lane >> 4)) ^ (q_row & 7)) << 4));
#pragma unroll
        for (int n = 0; n < F::KEYS / 16; n++) {
            uint32_t b[4];
            attention_ldmatrix(b, k_tile + c / 4 * F::PANEL_BYTES + n * 2048 + k_row * 128 +
                                      (((c % 4 * 2 + ((lane >> 3) & 1)) ^ (k_row & 7)) << 4));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float d[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    d[i] = c == 0 ? 0.0f : s[8 * n + 4 * half + i];
                }
                attention_mma(d, a, b[2 * half], b[2 * half + 1]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[8 * n + 4 * half + i] = d[i];
                }
            }
        }
    }
}

// What a team works on: the 64 GROUPS queries from block * ROWS on of head h of batch row b; block -1: nothing is left.
// In shared memory.
typedef struct {
    int block, b, h, unused;
} WgmmaForwardItem;

// The thread that loads for a team: hands out items, and keeps q, k and v coming.
template <typename F>
static __device__ __forceinline__ void wgmma_forward_load_loop(uint32_t shared, uint32_t barriers,
                                                               const CUtensorMap* map, int num_items, int num_blocks,
                                                               int T, int NH) {
    uint32_t step = 0;
    for (uint32_t round = 0;; round++) {
        const int index = atomicAdd(&wgmma_forward_next, 1), slot = (int)(round % 2);
        const int head = index / num_blocks, b = head / NH, h = head % NH;
        const int block = index < num_items ? num_blocks - 1 - index % num_blocks : -1;
        const uint32_t q_full = barriers + F::Q_FULL + slot * 8;
        wgmma_barrier_wait(barriers + F::Q_EMPTY + slot * 8, (round / 2 + 1) % 2);
        asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, 0};" ::"r"(barriers + F::ITEM + slot * 16), "r"(block),
                     "r"(b), "r"(h)
                     : "memory");
        if (block < 0) {
            wgmma_barrier_arrive(q_full);
            break;
        }
        const uint32_t q_tile = shared + F::AT_Q + slot * F::GROUPS * F::TILE_BYTES;
        wgmma_barrier_expect(q_full, F::GROUPS * F::TILE_BYTES);
#pragma unroll
        for (int i = 0; i < F::GROUPS * F::PANELS; i++) {
            wgmma_load_panel(q_tile + i * F::PANEL_BYTES, map, i % F::PANELS * WGMMA_PANEL, h,
                             block * F::ROWS + i / F::PANELS * 64, b, q_full);
        }
        const int steps = (min(T, (block + 1) * F::ROWS) + F::KEYS - 1) / F::KEYS;
#pragma unroll 1
        for (int n = 0; n < steps; n++, step++) {
            const uint32_t at = step % F::STAGES, full = barriers + F::KV_FULL + at * 8,
                           tiles = shared + F::AT_KV + at * 2 * F::TILE_BYTES;
            wgmma_barrier_wait(barriers + F::KV_EMPTY + at * 8, (step / F::STAGES + 1) % 2);
            wgmma_barrier_expect(full, 2 * F::TILE_BYTES);
#pragma unroll
            for (int i = 0; i < 2 * F::PANELS; i++) { // k, then v
                wgmma_load_panel(tiles + i * F::PANEL_BYTES, map, i % F::PANELS * WGMMA_PANEL,
                                 (1 + i / F::PANELS) * NH + h, n * F::KEYS, b, full);
            }
        }
    }
    // every team has its last item: the next launch begins at 0
    __threadfence();
    if (atomicAdd(&wgmma_forward_done, 1) == (int)gridDim.x * F::TEAMS - 1) {
        wgmma_forward_next = 0;
        wgmma_forward_done = 0;
    }
}

// Rows [first, first + 64) of head h of batch row b, below T, in every form: o (64, HS) from the registers of a
// warpgroup. `tile`: 64 rows of shared memory that nobody reads any more. Raises the float at shared_amax.
template <typename F>
static __device__ __forceinline__ void wgmma_forward_store(const FormsOut& y, const float (&o)[F::HS / 2],
                                                           uint32_t tile, int warp, int b, int h, int first, int B,
                                                           int T, int NH, uint32_t shared_amax) {
    constexpr int HS = F::HS, CHUNKS = HS / 8; // of 8 columns, 16 bytes
    constexpr int STEP = 32 / CHUNKS;          // rows that a warp stores at once
    const int lane = threadIdx.x % 32, warp_row = warp % 4 * 16, C = NH * HS;
    // NOTE: chunk c of row r lies at c ^ g(r), g(r) = (r ^ r / 4) % 8: no bank conflicts for 8 rows in a row, nor for
    // every 4th row. g is linear: g(a ^ b) = g(a) ^ g(b), so an address is a lane's own, XOR a constant
    {
        const int row = warp_row + (lane & 15), chunk = lane >> 4;
        const uint32_t to = tile + row * HS * 2 + ((chunk ^ ((row ^ row / 4) & 7)) << 4);
#pragma unroll
        for (int c = 0; c < HS / 16; c++) {
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                r[i] = attention_pack(o[8 * c + 2 * i], o[8 * c + 2 * i + 1]);
            }
            wgmma_stmatrix(to ^ (c * 32), r);
        }
    }
    __syncwarp();
    const float scale = y.slot != NULL ? y.slot->scale : 1.0f;
    {
        const int row = warp_row + lane / CHUNKS, chunk = lane % CHUNKS;
        const uint32_t from = tile + row * HS * 2 + ((chunk ^ ((row ^ row / 4) & 7)) << 4);
        const size_t to = ((size_t)b * T + first + row) * C + h * HS + chunk * 8;
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < 16 / STEP; i++) {
            constexpr int half = 8; // the codes' place in a chunk: the half that spares rows 32 apart a bank conflict
            const uint32_t at = (from ^ (((i * STEP) ^ (i * STEP) / 4) & 7) << 4) + i * STEP * HS * 2;
            const uint4 raw = wgmma_load_shared(at);
            if (first + row + i * STEP < T) {
                store_vector(y.wide + to + (size_t)(i * STEP * C), raw);
                if (y.slot != NULL) {
                    float v[8];
                    unpack8(v, raw);
                    amax = amax8(amax, v);
                    const uint2 codes =
                        make_uint2(fp8_pack<e4m3>(v[0] * scale, v[1] * scale, v[2] * scale, v[3] * scale),
                                   fp8_pack<e4m3>(v[4] * scale, v[5] * scale, v[6] * scale, v[7] * scale));
                    if (y.data != NULL) { *(uint2*)(y.data + to + (size_t)(i * STEP * C)) = codes; }
                    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at + warp_row / 32 * half), "r"(codes.x),
                                 "r"(codes.y)
                                 : "memory");
                }
            }
        }
        if (y.amax != NULL) {
            const uint32_t bits = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(amax));
            if (lane == 0) { asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(shared_amax), "r"(bits) : "memory"); }
        }
    }
    if (y.transposed != NULL) { // patches of 4 rows x 8 columns; half a warp has a column's 64 rows
        wgmma_group_sync(warp / 4);
        const int row = lane % 16 * 4, first_chunk = warp % 4 * 2 + lane / 16;
        const size_t tokens = (size_t)B * T;
        uint8_t* to = y.transposed + (size_t)(h * HS + first_chunk * 8) * tokens + (size_t)b * T + first + row;
#pragma unroll
        for (int i = 0; i < CHUNKS / 8; i++) {
            const uint32_t from = tile + row * HS * 2 + i * 128 + row / 32 * 8;
            Fp8Patch patch;
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const uint32_t at = from + r * HS * 2 + ((first_chunk ^ (((row + r) ^ row / 4) & 7)) << 4);
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                             : "=r"(patch.left[r]), "=r"(patch.right[r])
                             : "r"(at)
                             : "memory");
            }
            uint32_t words[8];
            transpose_4x4(words, patch.left);
            transpose_4x4(words + 4, patch.right);
            if (first + row < T) { // T is a multiple of 16
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    *(uint32_t*)(to + (i * 64 + j) * tokens) = words[j];
                }
            }
        }
    }
}

// Step `n` of the ring: are its k and v there; wait until they are; give their place back.
template <typename F> static __device__ __forceinline__ int wgmma_forward_ready(uint32_t barriers, uint32_t n) {
    int ready;
    asm volatile("{\n.reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.s32 %0, 1, 0, done;\n}"
                 : "=r"(ready)
                 : "r"(barriers + F::KV_FULL + n % F::STAGES * 8), "r"(n / F::STAGES % 2)
                 : "memory");
    return ready;
}
template <typename F> static __device__ __forceinline__ void wgmma_forward_wait(uint32_t barriers, uint32_t n) {
    wgmma_barrier_wait(barriers + F::KV_FULL + n % F::STAGES * 8, n / F::STAGES % 2);
}
template <typename F> static __device__ __forceinline__ void wgmma_forward_free(uint32_t barriers, uint32_t n) {
    wgmma_barrier_arrive(barriers + F::KV_EMPTY + n % F::STAGES * 8);
}

// One team's warpgroups, each with 64 queries.
template <typename F>
static __device__ __forceinline__ void wgmma_forward_compute_loop(uint32_t shared, uint32_t barriers, uint64_t ones,
                                                                  const FormsOut& y, float* lse, int warp, int B, int T,
                                                                  int NH) {
    const float scale_log2 = ATTENTION_LOG2E / sqrtf((float)F::HS);
    const int lane = threadIdx.x % 32, group = warp / 4 % F::GROUPS;
    constexpr uint32_t TILE = F::TILE_BYTES / 16; // in the unit of a descriptor
    const uint32_t k_ring = wgmma_forward_low(shared + F::AT_KV, F::PANEL_BYTES), v_ring = k_ring + TILE;
    uint32_t step = 0; // of the ring: the k and v that come next
    for (uint32_t round = 0;; round++) {
        const uint32_t slot = round % 2;
        WgmmaForwardItem item;
        wgmma_barrier_wait(barriers + F::Q_FULL + slot * 8, round / 2 % 2);
        asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(item.block), "=r"(item.b), "=r"(item.h), "=r"(item.unused)
                     : "r"(barriers + F::ITEM + slot * 16)
                     : "memory");
        item.block = __shfl_sync(0xffffffffu, item.block, 0); // tells the compiler: the same in all lanes
        if (item.block < 0) { break; }
        const int first = item.block * F::ROWS + group * 64, first_warp = first + warp % 4 * 16;
        const uint32_t steps = (min(T, (item.block + 1) * F::ROWS) + F::KEYS - 1) / F::KEYS,
                       own_steps = first < T ? min(steps, (first + 63) / F::KEYS + 1u) : 0;
        const uint32_t q_tile = shared + F::AT_Q + (slot * F::GROUPS + group) * F::TILE_BYTES;
        const uint32_t q = wgmma_forward_low(q_tile, F::PANEL_BYTES);
        float s[F::KEYS / 2], o[F::HS / 2], weight[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        uint32_t p[F::KEYS / 4];
        WgmmaForwardRows rows = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
        for (int i = 0; i < F::HS / 2; i++) {
            o[i] = 0.0f;
        }
        if (own_steps > 0) {
            // S and P of block 0
            wgmma_forward_wait<F>(barriers, step);
            wgmma_fence();
            wgmma_forward_scores<F>(s, q, k_ring + step % F::STAGES * 2 * TILE);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_touch(s);
            if (F::KEYS - 1 > first_warp) { wgmma_forward_mask(s, first_warp + lane / 4 - lane % 4 * 2); }
            wgmma_forward_softmax(s, &rows, scale_log2);
            wgmma_forward_pack(p, s);
            const uint32_t end = step + own_steps;
            if (own_steps > 1) { wgmma_forward_wait<F>(barriers, step + 1); }
            int key = F::KEYS; // the block's first
#pragma unroll 1
            for (uint32_t n = step + 1; n < end; n++, key += F::KEYS) {
                // S of block n, then o += P v of block n - 1
                wgmma_fence();
                wgmma_forward_scores<F>(s, q, k_ring + n % F::STAGES * 2 * TILE);
                wgmma_commit();
                wgmma_forward_output<F>(o, weight, p, v_ring + (n - 1) % F::STAGES * 2 * TILE, ones);
                wgmma_commit();
                wgmma_wait<1>();
                wgmma_touch(s);
                // P of block n; the barrier of the next one answers meanwhile
                const int ready = n + 1 == end || wgmma_forward_ready<F>(barriers, n + 1);
                const bool masked = key + F::KEYS - 1 > first_warp;
                const int limit = first_warp + lane / 4 - key - lane % 4 * 2;
                if (masked) { wgmma_forward_mask(s, limit); }
                const WgmmaForwardChange change = wgmma_forward_softmax_quick(s, &rows, scale_log2);
                if (change == WGMMA_ROWS_LOST) {
                    wgmma_forward_scores_again<F>(s, q_tile + warp % 4 * 16 * WGMMA_PANEL * 2,
                                                  shared + F::AT_KV + n % F::STAGES * 2 * F::TILE_BYTES, lane);
                    if (masked) { wgmma_forward_mask(s, limit); }
                    wgmma_forward_softmax(s, &rows, scale_log2);
                }
                wgmma_touch(s);
                if (!ready) { wgmma_forward_wait<F>(barriers, n + 1); }
                wgmma_wait<0>();
                wgmma_touch(o);
                wgmma_touch(weight);
                if (lane == 0) { wgmma_forward_free<F>(barriers, n - 1); }
                if (change != WGMMA_ROWS_STAY) {
                    weight[0] *= rows.shrink[0];
                    weight[2] *= rows.shrink[1];
#pragma unroll
                    for (int i = 0; i < F::HS / 2; i++) {
                        o[i] *= rows.shrink[i / 2 % 2];
                    }
                }
                wgmma_forward_pack(p, s);
            }
            // o += P v of the last block
            wgmma_fence();
            wgmma_forward_output<F>(o, weight, p, v_ring + (end - 1) % F::STAGES * 2 * TILE, ones);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_touch(o);
            wgmma_touch(weight);
            if (lane == 0) { wgmma_forward_free<F>(barriers, end - 1); }
        }
        // blocks that only the warpgroups below need
#pragma unroll 1
        for (uint32_t n = step + own_steps; n < step + steps; n++) {
            wgmma_forward_wait<F>(barriers, n);
            __syncwarp();
            if (lane == 0) { wgmma_forward_free<F>(barriers, n); }
        }
        step += steps;

        // out = o / weight; lse
        float* head_lse = lse + ((size_t)item.b * NH + item.h) * T;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float sum = attention_quad_sum(rows.sum[r]), inverse = __fdividef(1.0f, weight[2 * r]);
            const int row = first_warp + 8 * r + lane / 4;
            if (lane % 4 == 0 && row < T) {
                head_lse[row] = (rows.reference[r] + wgmma_forward_log2(sum)) * (1.0f / ATTENTION_LOG2E);
            }
#pragma unroll
            for (int i = 0; i < F::HS / 2; i += 4) {
                o[i + 2 * r] *= inverse;
                o[i + 2 * r + 1] *= inverse;
            }
        }
        wgmma_group_sync(warp / 4); // nobody in the warpgroup reads q any more
        wgmma_forward_store<F>(y, o, q_tile, warp, item.b, item.h, first, B, T, NH, barriers + F::AMAX);
        wgmma_shared_proxy_fence(); // TMA writes q after this
        __syncwarp();
        if (lane == 0) { wgmma_barrier_arrive(barriers + F::Q_EMPTY + slot * 8); }
    }
}

// y (B, T, NH, HS) = softmax(q k^T / sqrt(HS), kv <= q) v in every form; lse (B, NH, T) FP32. qkv (B, T, 3, NH, HS)
// BF16
//   flops    2 B NH T^2 HS useful: 103 G at B,NH,T,HS = 64,12,1024,64, 104 us at 989 TFLOP/s; blocks of 64 x 64 on the
//            diagonal are computed whole: 1 + 64 / T of that
//   others   B NH T^2 / 2 exponentials, 16 per clock and multiprocessor: at head size 64 as long as the products
//   bytes    8 B T NH HS + 4 B NH T, and 2 B T NH HS for both FP8 forms
//   numerics FP32 scores, softmax and accumulators; P rounded to BF16 for P v, which is divided by the row sums of the
//            rounded P; out rounded once, FP8 from that. lse, of the scaled scores, from the sums of the unrounded P
//   threads  128 more than those that compute; grid: a block per multiprocessor, or fewer
//   bits     deterministic
template <typename F>
__global__ void __launch_bounds__(F::THREADS, 1)
    wgmma_forward_kernel(FormsOut y, float* lse, const __grid_constant__ CUtensorMap map, int B, int T, int NH) {
    kernel_begin();
    extern __shared__ char wgmma_shared[];
    const uint32_t shared = (attention_shared_address(wgmma_shared) + 1023) & ~1023u;
    const uint32_t all_barriers = shared + F::TEAMS * F::TEAM_BYTES;
    const int warp = attention_warp();

    if (threadIdx.x < F::ONES_BYTES / 4) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + F::AT_ONES + threadIdx.x * 4), "r"(0x3F803F80)
                     : "memory");
        wgmma_proxy_fence();
    }
    if (threadIdx.x < F::TEAMS) {
        const uint32_t barriers = all_barriers + threadIdx.x * F::BARRIER_BYTES;
        for (int i = 0; i < 2; i++) {
            wgmma_barrier_init(barriers + F::Q_FULL + i * 8, 1);
            wgmma_barrier_init(barriers + F::Q_EMPTY + i * 8, 4 * F::GROUPS);
        }
        for (int i = 0; i < F::STAGES; i++) {
            wgmma_barrier_init(barriers + F::KV_FULL + i * 8, 1);
            wgmma_barrier_init(barriers + F::KV_EMPTY + i * 8, 4 * F::GROUPS);
        }
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(barriers + F::AMAX), "r"(0) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        wgmma_proxy_fence();
    }
    __syncthreads();

    if (warp >= F::COMPUTE_THREADS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(F::LOAD_REGISTERS));
        const int team = warp - F::COMPUTE_THREADS / 32, num_blocks = (T + F::ROWS - 1) / F::ROWS;
        if (team < F::TEAMS && threadIdx.x % 32 == 0) {
            wgmma_forward_load_loop<F>(shared + team * F::TEAM_BYTES, all_barriers + team * F::BARRIER_BYTES, &map,
                                       B * NH * num_blocks, num_blocks, T, NH);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(F::COMPUTE_REGISTERS));
        const int team = warp / 4 / F::GROUPS;
        wgmma_forward_compute_loop<F>(shared + team * F::TEAM_BYTES, all_barriers + team * F::BARRIER_BYTES,
                                      wgmma_forward_ones(shared + F::AT_ONES), y, lse, warp, B, T, NH);
    }
    __syncthreads();
    if (threadIdx.x < F::TEAMS && y.slot != NULL) {
        uint32_t bits;
        asm volatile("ld.shared.u32 %0, [%1];"
                     : "=r"(bits)
                     : "r"(all_barriers + threadIdx.x * F::BARRIER_BYTES + F::AMAX)
                     : "memory");
        if (y.amax != NULL && bits > *(volatile uint32_t*)y.amax) { atomicMax((uint32_t*)y.amax, bits); }
        if (blockIdx.x == 0 && threadIdx.x == 0) { write_descale(y, y.slot->scale); }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// launcher

template <typename F>
static inline void wgmma_attention_forward(Device* dev, FormsOut y, float* lse, const bf16* qkv, int B, int T, int NH) {
    const int num_items = B * NH * (int)ceil_div((size_t)T, F::ROWS);
    const int sms = dev->properties.multiProcessorCount, blocks = (num_items + F::TEAMS - 1) / F::TEAMS;
    const int grid = blocks < sms ? blocks : sms;
    const CUtensorMap map = wgmma_panel_map(qkv, B, T, 3 * NH, F::HS, 64);
    builtin_attention_allow_shared((const void*)wgmma_forward_kernel<F>, F::SHARED_BYTES);
    launch(dev, wgmma_forward_kernel<F>, grid, F::THREADS, F::SHARED_BYTES, y, lse, map, B, T, NH);
}

#endif
