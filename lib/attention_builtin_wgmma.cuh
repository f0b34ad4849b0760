// Backward pass of causal attention at head sizes 64 and 128 on Hopper's own instructions (wgmma, TMA): 5 products, and
// the same bits on every run. Formulas: attention_builtin.cuh; P is recomputed from lse as in FlashAttention-2,
// algorithm 2.
//
// One work item is a block of 128 keys of one head. It goes over the blocks of queries (128 at head size 64, 64 at 128)
// from its own, which is the diagonal, to the last, and keeps dk and dv in registers. Its share of dq is a product per
// step, which has to be summed over items. The sum is made in FP32 memory by the TMA unit, in a fixed order, which
// makes it deterministic:
//
//   dq of a query block gets the shares of key blocks j, j - 1, ..., 0, j the one on the diagonal: the first is stored,
//   the others are added. A counter per query block says how many are in; the share of key block j waits for its turn.
//   Key block 0 does not add its share: it reads the sum, adds its own in registers, scales, and writes dq, finished.
//
// Items of one head that start together never meet at a query block: each is a step behind its neighbour, which is the
// order wanted. But a share takes more than a step until its counter says so (2 to 3 us), so items of one head are
// handed out some time apart: all last key blocks of 32 heads (T 1024), then the blocks before them, ... It is an
// atomic counter that hands out, so an item waits only for items that were handed out before it: no deadlock, wherever
// blocks run. The sums of `ring` heads are kept, 16 MB or so, which stay in L2: a head's first share waits until the
// head that had the place before has left it.
//
//   threads    384: 2 warpgroups that compute (64 keys each), 1 that feeds them: one thread loads, two add dq
//   products   S^T = k q^T and dP^T = v dout^T leave P^T and dS^T in registers as A operands: dv += P^T dout,
//              dk += dS^T q. For dq = dS k a warpgroup takes half of the queries (head size 128: half of the
//              channels) and needs the other's dS: it goes through shared memory
//   pipeline   S of the next step and dq of the last one are computed behind dv and dk of this step, so a warpgroup
//              waits for nothing that was not started a while ago, and the two may be half a step apart
//   shared     tiles of rows x 128 bytes with TMA's 128-byte swizzle, head size 128 in two panels of 64 channels; two
//              stages of k, of (q, dout, lse, delta) and of dS, of v at head size 64 two, at 128 one: the next item's
//              tiles arrive while this one ends
//   latencies  a scheduler has two warps that compute, so what a warp waits for counts more than how much it does: lse
//              is fetched before S is waited for, and fences, which wait for what was stored, stand behind products
//   output     E5M2 row-major and transposed with the slot's scale, or BF16, and column sums per 64 rows
//   edges      TMA writes zeros beyond T and never crosses into the next row of the batch; lse is +inf there, so P = 0
#ifndef ATTENTION_BUILTIN_WGMMA_CUH
#define ATTENTION_BUILTIN_WGMMA_CUH

#include <cuda.h>
#include <cudaTypedefs.h>

#include "gpu.cuh"

constexpr int WGMMA_ROWS = 128;        // keys per block
constexpr int WGMMA_PANEL = 64;        // channels in the 128 bytes of a swizzled row
constexpr int WGMMA_PANEL_BYTES = 128; // of one row
constexpr int WGMMA_TOGETHER = 256;    // items of the heads that are worked on together, about two per block
constexpr int WGMMA_COMPUTE_THREADS = 256, WGMMA_THREADS = 384;

// Sizes that depend on the head size. A warpgroup's registers hold S and dP (64 keys x queries) and dk and dv (64 keys
// x channels): twice the channels, half the queries.
__host__ __device__ constexpr int wgmma_queries(int HS) {
    return HS == 64 ? 128 : 64;
} // per block
__host__ __device__ constexpr int wgmma_ratio(int HS) {
    return WGMMA_ROWS / wgmma_queries(HS);
} // query per key block
__host__ __device__ constexpr int wgmma_v_stages(int HS) {
    return HS == 64 ? 2 : 1;
}
__host__ __device__ constexpr int wgmma_kv_bytes(int HS) {
    return WGMMA_ROWS * HS * 2;
} // k or v
__host__ __device__ constexpr int wgmma_q_bytes(int HS) {
    return wgmma_queries(HS) * HS * 2;
} // q or dout
__host__ __device__ constexpr int wgmma_ds_bytes(int HS) {
    return wgmma_queries(HS) * WGMMA_ROWS * 2;
}
__host__ __device__ constexpr int wgmma_dq_floats(int HS) {
    return wgmma_queries(HS) * HS;
} // of one block
constexpr int WGMMA_HALF_DQ_BYTES = 64 * 64 * 4; // a warpgroup's share
__host__ __device__ constexpr int wgmma_stats_floats(int HS) {
    return 2 * wgmma_queries(HS);
} // lse, delta

// Shared memory, which begins at a multiple of 1024 bytes: k, v, (q, dout), dS, dq, (lse, delta), barriers.
__host__ __device__ constexpr int wgmma_at_v(int HS) {
    return 2 * wgmma_kv_bytes(HS);
}
__host__ __device__ constexpr int wgmma_at_q(int HS) {
    return (2 + wgmma_v_stages(HS)) * wgmma_kv_bytes(HS);
}
__host__ __device__ constexpr int wgmma_at_ds(int HS) {
    return wgmma_at_q(HS) + 4 * wgmma_q_bytes(HS);
}
__host__ __device__ constexpr int wgmma_at_dq(int HS) {
    return wgmma_at_ds(HS) + 2 * wgmma_ds_bytes(HS);
}
__host__ __device__ constexpr int wgmma_at_stats(int HS) {
    return wgmma_at_dq(HS) + 2 * WGMMA_HALF_DQ_BYTES;
}
__host__ __device__ constexpr int wgmma_at_barriers(int HS) {
    return wgmma_at_stats(HS) + 2 * wgmma_stats_floats(HS) * 4;
}
__host__ __device__ constexpr int wgmma_shared_bytes(int HS) {
    return wgmma_at_barriers(HS) + 256;
}

// Byte offsets of the mbarriers, two of each, of the items and of the scale, from wgmma_at_barriers.
enum {
    WGMMA_K_FULL = 0, // by stage
    WGMMA_K_EMPTY = 16,
    WGMMA_V_FULL = 32,
    WGMMA_V_EMPTY = 48,
    WGMMA_Q_FULL = 64,
    WGMMA_Q_EMPTY = 80,
    WGMMA_DS_FULL = 96,
    WGMMA_DS_EMPTY = 112,
    WGMMA_DQ_FULL = 128,  // of even and of odd steps
    WGMMA_DQ_EMPTY = 144, // one
    WGMMA_ITEM = 160,     // [4] WgmmaItem: of the last round, which still adds dq, this and the next; 4 for % 4
    WGMMA_SCALE = 224,    // float
};

// ---------------------------------------------------------------------------------------------------------------------
// primitives

static __device__ __forceinline__ void wgmma_barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
static __device__ __forceinline__ void wgmma_barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and has the phase wait for `bytes` that TMA will bring.
static __device__ __forceinline__ void wgmma_barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of this parity is over; the phase before the first has parity 1 and is over.
static __device__ __forceinline__ void wgmma_barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// A box of rows x 64 channels of a (B, T, heads, HS) tensor to shared memory.
static __device__ __forceinline__ void wgmma_load_panel(uint32_t to, const CUtensorMap* map, int channel, int head,
                                                        int t, int b, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
                 "l"(map), "r"(channel), "r"(head), "r"(t), "r"(b), "r"(barrier)
                 : "memory");
}
static __device__ __forceinline__ void wgmma_load_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// What ordinary instructions of this thread wrote (or read) comes before what TMA and wgmma do after.
static __device__ __forceinline__ void wgmma_proxy_fence() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

// The same where both sides are this block's shared memory; the other one also waits for stores to global memory.
static __device__ __forceinline__ void wgmma_shared_proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The same before TMA touches global memory that was acquired.
static __device__ __forceinline__ void wgmma_global_proxy_fence() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
// All 128 threads of a warpgroup. 0 is __syncthreads.
static __device__ __forceinline__ void wgmma_group_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

static __device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// After a wait: the compiler may not have read these registers before it.
template <int N> static __device__ __forceinline__ void wgmma_touch(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

template <int N> static __device__ __forceinline__ void wgmma_touch(uint32_t (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+r"(a[i])::"memory");
    }
}

// Descriptor of an operand in shared memory: 128-byte swizzle, groups of 8 rows 1024 bytes apart. With k along the
// rows' 128 bytes a step of 16 k is 32 bytes further; with k across rows ("transposed") it is 16 rows, 2048 bytes,
// further.
static __device__ __forceinline__ uint64_t wgmma_operand(uint32_t address) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)64 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

// The same for rows of 128 elements across k: the second 64 are in the next panel, panel_bytes further.
static __device__ __forceinline__ uint64_t wgmma_operand_panels(uint32_t address, int panel_bytes) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(panel_bytes / 16) << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}

#define WGMMA_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_F16(d, i) WGMMA_F4(d, i), WGMMA_F4(d, i + 4), WGMMA_F4(d, i + 8), WGMMA_F4(d, i + 12)
#define WGMMA_REGISTERS_32                                                                                             \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "  \
    "%24, %25, %26, %27, %28, %29, %30, %31}"
#define WGMMA_REGISTERS_64                                                                                             \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "  \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "   \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// d (64, 128) (+)= a (64, 16) . b^T, b (128, 16); both k-contiguous in shared memory
static __device__ __forceinline__ void wgmma_64x128(float (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " WGMMA_REGISTERS_64
                 ", %64, %65, p, 1, 1, 0, 0;\n}"
                 : WGMMA_F16(d, 0), WGMMA_F16(d, 16), WGMMA_F16(d, 32), WGMMA_F16(d, 48)
                 : "l"(a), "l"(b), "r"(add));
}
#define WGMMA_O4(d, i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define WGMMA_O16(d, i) WGMMA_O4(d, i), WGMMA_O4(d, i + 4), WGMMA_O4(d, i + 8), WGMMA_O4(d, i + 12)
// The same, d = and not +=; what d held before is dead, so its registers may have been anything.
static __device__ __forceinline__ void wgmma_64x128_start(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " WGMMA_REGISTERS_64
                 ", %64, %65, p, 1, 1, 0, 0;\n}"
                 : WGMMA_O16(d, 0), WGMMA_O16(d, 16), WGMMA_O16(d, 32), WGMMA_O16(d, 48)
                 : "l"(a), "l"(b));
}
// d (64, 64) (+)= a (64, 16) . b^T, b (64, 16); both k-contiguous in shared memory
static __device__ __forceinline__ void wgmma_64x64(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGISTERS_32
                 ", %32, %33, 1, 1, 1, 0, 0;\n"
                 : WGMMA_F16(d, 0), WGMMA_F16(d, 16)
                 : "l"(a), "l"(b));
}
static __device__ __forceinline__ void wgmma_64x64_start(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGISTERS_32
                 ", %32, %33, p, 1, 1, 0, 0;\n}"
                 : WGMMA_O16(d, 0), WGMMA_O16(d, 16)
                 : "l"(a), "l"(b));
}
// d (64, 128) (+)= a (64, 16) . b, a from registers, b (16, 128) row-major in shared memory, see wgmma_operand_panels
static __device__ __forceinline__ void wgmma_64x128_registers(float (&d)[64], const uint32_t* a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " WGMMA_REGISTERS_64
                 ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
                 : WGMMA_F16(d, 0), WGMMA_F16(d, 16), WGMMA_F16(d, 32), WGMMA_F16(d, 48)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
// d (64, 64) (+)= a (64, 16) . b, a from registers, b (16, 64) row-major in shared memory
static __device__ __forceinline__ void wgmma_64x64_registers(float (&d)[32], const uint32_t* a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGISTERS_32
                 ", {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
                 : WGMMA_F16(d, 0), WGMMA_F16(d, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
// d (64, 64) = a^T . b, a (16, 64) and b (16, 64) row-major in shared memory
static __device__ __forceinline__ void wgmma_64x64_transposed_start(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGISTERS_32
                 ", %32, %33, p, 1, 1, 1, 1;\n}"
                 : WGMMA_O16(d, 0), WGMMA_O16(d, 16)
                 : "l"(a), "l"(b));
}
// d (64, 64) += a (64, 16) . b, a from registers, b (16, 64) row-major in shared memory
static __device__ __forceinline__ void wgmma_64x64_registers(float (&d)[32], const uint32_t* a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGISTERS_32
                 ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
                 : WGMMA_F16(d, 0), WGMMA_F16(d, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// d (64, 64) (+)= a^T . b, a (16, 64) and b (16, 64) row-major in shared memory
static __device__ __forceinline__ void wgmma_64x64_transposed(float (&d)[32], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGISTERS_32
                 ", %32, %33, p, 1, 1, 1, 1;\n}"
                 : WGMMA_F16(d, 0), WGMMA_F16(d, 16)
                 : "l"(a), "l"(b), "r"(add));
}

// Four 8x8 matrices of 16-bit elements from registers to shared memory: the inverse of attention_ldmatrix.
static __device__ __forceinline__ void wgmma_stmatrix(uint32_t address, const uint32_t* r) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
// As above, every matrix transposed.
static __device__ __forceinline__ void wgmma_stmatrix_transposed(uint32_t address, const uint32_t* r) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// 16 bytes, or 4, of shared memory.
static __device__ __forceinline__ uint4 wgmma_load_shared(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}
static __device__ __forceinline__ float wgmma_load_shared_float(uint32_t address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
static __device__ __forceinline__ void wgmma_store_shared(uint32_t address, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

static __device__ __forceinline__ int wgmma_load_acquire(const int* p) {
    int x;
    asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
static __device__ __forceinline__ void wgmma_store_release(int* p, int x) {
    asm volatile("st.release.gpu.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

// ---------------------------------------------------------------------------------------------------------------------
// products of the backward pass; d, a, b as in the instructions above

// Scores: d (64 keys, queries) = rows (64, HS) . columns (queries, HS)^T, from k and q or from v and dout.
static __device__ __forceinline__ void wgmma_scores(float (&d)[64], uint64_t rows, uint64_t columns) { // head size 64
    wgmma_64x128_start(d, rows, columns);
#pragma unroll
    for (int c = 1; c < 4; c++) {
        wgmma_64x128(d, rows + c * 2, columns + c * 2, 1);
    }
}
static __device__ __forceinline__ void wgmma_scores(float (&d)[32], uint64_t rows, uint64_t columns) { // 128: 2 panels
    wgmma_64x64_start(d, rows, columns);
#pragma unroll
    for (int c = 1; c < 8; c++) {
        wgmma_64x64(d, rows + c / 4 * (WGMMA_ROWS * WGMMA_PANEL_BYTES / 16) + c % 4 * 2,
                    columns + c / 4 * (64 * WGMMA_PANEL_BYTES / 16) + c % 4 * 2);
    }
}
// dk or dv: d (64 keys, HS) (+)= a (64, queries) . b (queries, HS), a from registers
static __device__ __forceinline__ void wgmma_add_gradient(float (&d)[32], const uint32_t (&a)[32], uint64_t b,
                                                          int add) {
    wgmma_64x64_registers(d, a, b, add);
#pragma unroll
    for (int c = 1; c < 8; c++) {
        wgmma_64x64_registers(d, a + 4 * c, b + c * 128);
    }
}
static __device__ __forceinline__ void wgmma_add_gradient(float (&d)[64], const uint32_t (&a)[16], uint64_t b,
                                                          int add) {
    wgmma_64x128_registers(d, a, b, add);
#pragma unroll
    for (int c = 1; c < 4; c++) {
        wgmma_64x128_registers(d, a + 4 * c, b + c * 128, 1);
    }
}
// dq: d (64, 64) = ds^T (64, 128 keys) . k (128 keys, 64), ds and k with keys as rows
static __device__ __forceinline__ void wgmma_dq(float (&d)[32], uint64_t ds, uint64_t k) {
    wgmma_64x64_transposed_start(d, ds, k);
#pragma unroll
    for (int c = 1; c < 8; c++) {
        wgmma_64x64_transposed(d, ds + c * 128, k + c * 128, 1);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels

// What the backward kernel works on, beside the tensor maps.
typedef struct {
    FormsOut dqkv;      // (B*T, 3C): data and transposed, or one of them; or wide
    float* partials;    // (2 B num_blocks, 3C) sums of dqkv's columns over 64 rows of one batch row
    float* dq;          // (ring, num_query_blocks, 2, 64 x 64 in the order of the registers) FP32, not scaled
    int* counters;      // (B NH, num_query_blocks) shares in each block of dq; next item
    const float* stats; // (B NH, num_query_blocks, 2, queries) lse, delta
    int B, T, NH, num_blocks, cols; // cols = 3C
    int ring, heads;                // heads whose dq is kept; heads that are worked on together
} WgmmaBackward;

// One of the kernel's work items: key block j of head h of batch row b. j < 0: there is none any more.
typedef struct {
    int j, b, h, head; // head = b * NH + h
} WgmmaItem;

// Items in the order in which they are handed out: of some heads the last key block, then of the same heads the block
// before it, ... So an item begins some time after the one of its head whose sums it waits for.
static __device__ __forceinline__ WgmmaItem wgmma_item(int index, const WgmmaBackward& x) {
    WgmmaItem item;
    const int past = index >= x.B * x.NH * x.num_blocks;
    index = past ? 0 : index;
    const int first = index / (x.heads * x.num_blocks) * x.heads, rest = index - first * x.num_blocks,
              heads = min(x.heads, x.B * x.NH - first);
    item.head = first + rest % heads;
    item.j = past ? -1 : x.num_blocks - 1 - rest / heads;
    item.b = item.head / x.NH;
    item.h = item.head % x.NH;
    return item;
}

static __host__ __device__ inline size_t wgmma_num_counters(int B, int NH, int num_query_blocks) {
    return (size_t)B * NH * num_query_blocks;
}

// stats (B NH, num_query_blocks, 2, queries) FP32: lse * log2(e), +inf beyond T; delta = rowsum(dout * out), 0 beyond
// T. counters (wgmma_num_counters + 1) int = 0.
//   bytes    4 B T C read, 8 B NH T written: 201 MB at B,NH,T,HS = 64,12,1024,64, 48 us at 4.2 TB/s; memory-bound
//   threads  256, of which HS / 8 have 8 channels of a row each: 64 rows of a head in a block, all loads before the
//            first use; blocks of the same rows of all heads are neighbours
//   bits     deterministic
template <int HS>
__global__ void __launch_bounds__(256)
    wgmma_delta_kernel(float* stats, int* counters, const bf16* dout, const bf16* out, const float* lse, int B, int T,
                       int NH, int num_query_blocks) {
    kernel_begin();
    constexpr int QUERIES = wgmma_queries(HS), THREADS = HS / 8, ROWS = 256 / THREADS, PASSES = 64 / ROWS;
    const int num_groups = num_query_blocks * (QUERIES / 64), h = blockIdx.x % NH, group = blockIdx.x / NH % num_groups,
              b = blockIdx.x / NH / num_groups, part = threadIdx.x % THREADS;
    const int64_t thread = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (thread <= (int64_t)wgmma_num_counters(B, NH, num_query_blocks)) { counters[thread] = 0; }
    uint4 x[PASSES] = {}, y[PASSES] = {};
    float row_lse[PASSES] = {};
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int t = group * 64 + i * ROWS + threadIdx.x / THREADS;
        if (t < T) {
            const size_t at = (((size_t)b * T + t) * NH + h) * HS + part * 8;
            x[i] = load_vector(out + at);
            y[i] = load_vector(dout + at);
            row_lse[i] = lse[((size_t)b * NH + h) * T + t];
        }
    }
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int t = group * 64 + i * ROWS + threadIdx.x / THREADS;
        float sum = (attention_dot2(x[i].x, y[i].x) + attention_dot2(x[i].y, y[i].y)) +
                    (attention_dot2(x[i].z, y[i].z) + attention_dot2(x[i].w, y[i].w));
#pragma unroll
        for (int distance = 1; distance < THREADS; distance *= 2) {
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
        }
        if (part == 0) {
            float* to = stats + (((size_t)b * NH + h) * num_query_blocks + t / QUERIES) * 2 * QUERIES + t % QUERIES;
            to[0] = t < T ? row_lse[i] * ATTENTION_LOG2E : INFINITY;
            to[QUERIES] = sum;
        }
    }
}

// threadIdx.x, read anew each time: what is derived from it is derived again instead of being kept.
static __device__ __forceinline__ uint32_t wgmma_thread() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// The item of a round, which has begun.
static __device__ __forceinline__ WgmmaItem wgmma_read_item(uint32_t barriers, uint32_t round) {
    WgmmaItem item;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(item.j), "=r"(item.b), "=r"(item.h), "=r"(item.head)
                 : "r"(barriers + WGMMA_ITEM + round % 4 * (uint32_t)sizeof(WgmmaItem))
                 : "memory");
    return item;
}

// The block's next item, when its k is there.
static __device__ __forceinline__ WgmmaItem wgmma_next_item(uint32_t barriers, uint32_t round) {
    wgmma_barrier_wait(barriers + WGMMA_K_FULL + round % 2 * 8, round / 2 % 2);
    return wgmma_read_item(barriers, round);
}

// The thread that loads: hands out items, and keeps the stages of k, v and of q, dout, lse, delta full.
template <int HS>
static __device__ __forceinline__ void wgmma_load_loop(uint32_t shared, const CUtensorMap* kv_map,
                                                       const CUtensorMap* q_map, const CUtensorMap* dout_map,
                                                       const WgmmaBackward& x) {
    constexpr int QUERIES = wgmma_queries(HS), R = wgmma_ratio(HS), STAGES = wgmma_v_stages(HS), PANELS = HS / 64;
    constexpr int KV_BYTES = wgmma_kv_bytes(HS), Q_BYTES = wgmma_q_bytes(HS), STATS_BYTES = wgmma_stats_floats(HS) * 4;
    const uint32_t barriers = shared + wgmma_at_barriers(HS);
    const int num_query_blocks = x.num_blocks * R;
    int* const next_item = x.counters + wgmma_num_counters(x.B, x.NH, num_query_blocks);
    uint32_t step = 0;
#pragma unroll 1
    for (uint32_t round = 0;; round++) {
        const WgmmaItem item = wgmma_item(atomicAdd(next_item, 1), x);
        const uint32_t v = round % STAGES;
        const uint32_t k_full = barriers + WGMMA_K_FULL + round % 2 * 8, v_full = barriers + WGMMA_V_FULL + v * 8,
                       k_tile = shared + round % 2 * KV_BYTES, v_tile = shared + wgmma_at_v(HS) + v * KV_BYTES;
        wgmma_barrier_wait(barriers + WGMMA_K_EMPTY + round % 2 * 8, (round / 2 + 1) % 2);
        asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(barriers + WGMMA_ITEM +
                                                                      round % 4 * (uint32_t)sizeof(WgmmaItem)),
                     "r"(item.j), "r"(item.b), "r"(item.h), "r"(item.head)
                     : "memory");
        if (item.j < 0) {
            wgmma_barrier_arrive(k_full);
            break;
        }
        wgmma_barrier_expect(k_full, KV_BYTES);
        for (int p = 0; p < PANELS; p++) {
            wgmma_load_panel(k_tile + p * (KV_BYTES / PANELS), kv_map, p * 64, x.NH + item.h, item.j * WGMMA_ROWS,
                             item.b, k_full);
        }
#pragma unroll 1 // few registers
        for (int i = item.j * R; i < num_query_blocks; i++, step++) {
            const uint32_t slot = step % 2;
            const uint32_t full = barriers + WGMMA_Q_FULL + slot * 8,
                           q_tile = shared + wgmma_at_q(HS) + slot * 2 * Q_BYTES;
            wgmma_barrier_wait(barriers + WGMMA_Q_EMPTY + slot * 8, (step / 2 + 1) % 2);
            wgmma_barrier_expect(full, 2 * Q_BYTES + STATS_BYTES);
            for (int p = 0; p < PANELS; p++) {
                const uint32_t to = q_tile + p * (Q_BYTES / PANELS);
                wgmma_load_panel(to, q_map, p * 64, item.h, i * QUERIES, item.b, full);
                wgmma_load_panel(to + Q_BYTES, dout_map, p * 64, item.h, i * QUERIES, item.b, full);
            }
            wgmma_load_bytes(shared + wgmma_at_stats(HS) + slot * STATS_BYTES,
                             x.stats + ((size_t)item.head * num_query_blocks + i) * (STATS_BYTES / 4), STATS_BYTES,
                             full);
            if (i == item.j * R) { // v after the first q: S of an item begins while the item before still holds v
                wgmma_barrier_wait(barriers + WGMMA_V_EMPTY + v * 8, (round / STAGES + 1) % 2);
                wgmma_barrier_expect(v_full, KV_BYTES);
                for (int p = 0; p < PANELS; p++) {
                    wgmma_load_panel(v_tile + p * (KV_BYTES / PANELS), kv_map, p * 64, 2 * x.NH + item.h,
                                     item.j * WGMMA_ROWS, item.b, v_full);
                }
            }
        }
    }
}

// A thread that adds dq: that of every other step, when its turn has come; for key block 0 it fetches the sum of the
// step after. Two threads, because a share is on its way for about as long as a step takes, until it may be announced.
template <int HS>
static __device__ __forceinline__ void wgmma_dq_loop(uint32_t shared, uint32_t parity, const WgmmaBackward& x) {
    constexpr int R = wgmma_ratio(HS), BYTES = wgmma_dq_floats(HS) * 4;
    const uint32_t barriers = shared + wgmma_at_barriers(HS), from = shared + wgmma_at_dq(HS),
                   full = barriers + WGMMA_DQ_FULL + parity * 8, empty = barriers + WGMMA_DQ_EMPTY;
    const int num_query_blocks = x.num_blocks * R;
    uint32_t step = 0;
#pragma unroll 1
    for (uint32_t round = 0;; round++) {
        const WgmmaItem item = wgmma_next_item(barriers, round);
        const int j = item.j;
        if (j < 0) { break; }
        wgmma_barrier_arrive(barriers + WGMMA_K_EMPTY + round % 2 * 8); // the item is read
        int* in = x.counters + (size_t)item.head * num_query_blocks + j * R;
        float* to = x.dq + ((size_t)(item.head % x.ring) * num_query_blocks + j * R) * wgmma_dq_floats(HS);
#pragma unroll 1
        for (int i = j * R; i < num_query_blocks; i++, step++, in++, to += wgmma_dq_floats(HS)) {
            if (step % 2 != parity) { continue; }
            if (j > 0) {
                const int first = i / R == j; // its place is free when another head's last share is in
                if (!first || item.head >= x.ring) {
                    const int* turn = first ? in - (size_t)x.ring * num_query_blocks : in;
                    const int shares = first ? i / R + 1 : i / R - j;
                    while (wgmma_load_acquire(turn) < shares) {}
                    wgmma_global_proxy_fence();
                }
                wgmma_barrier_wait(full, step / 2 % 2);
                if (first) {
                    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                                 "r"(BYTES)
                                 : "memory");
                } else {
                    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                                 "r"(from), "r"(BYTES)
                                 : "memory");
                }
                asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
                wgmma_barrier_arrive(empty);
                // when it is complete it is visible to this thread, and by the release to who acquires the counter
                asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
                wgmma_store_release(in, i / R - j + 1);
            } else {
                const int fetch = i + 1 < num_query_blocks && i + 1 >= R;
                if (fetch) {
                    while (wgmma_load_acquire(in + 1) < (i + 1) / R) {}
                    wgmma_global_proxy_fence();
                }
                wgmma_barrier_wait(full, step / 2 % 2); // the warpgroups have taken the sum of this block
                if (fetch) {
                    wgmma_barrier_expect(empty, BYTES);
                    wgmma_load_bytes(from, to + wgmma_dq_floats(HS), BYTES, empty);
                } else {
                    wgmma_barrier_arrive(empty);
                }
                wgmma_store_release(in, i / R + 1);
            }
        }
    }
}

// Where a tile of 64 x 64 goes.
typedef struct {
    uint32_t scratch; // 8 KB of shared memory that is the warpgroup's own
    uint32_t scale;   // where in shared memory the slot's scale is
    int b, t, column; // batch row, first row in it, first column
} WgmmaTile;

// A 64 x 64 tile of a product, d * factor, rounded to BF16, two columns in a word: of the warp's 16 rows, low has row
// lane / 4 and high row lane / 4 + 8; word n has columns 8 n + 2 (lane % 4) and + 1.
static __device__ __forceinline__ void wgmma_round(uint32_t (&low)[8], uint32_t (&high)[8], const float* d,
                                                   float factor) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        low[n] = attention_pack(d[4 * n] * factor, d[4 * n + 1] * factor);
        high[n] = attention_pack(d[4 * n + 2] * factor, d[4 * n + 3] * factor);
    }
}

// Of two values of which lanes that differ in bit `d` of `lane` keep one each (the lower one a, the higher one
// b): the sum over the two lanes.
static __device__ __forceinline__ float wgmma_sum_half(float a, float b, uint32_t lane, uint32_t d) {
    const uint32_t high = lane & d;
    const float kept = high ? b : a, given = high ? a : b;
    return kept + __shfl_xor_sync(0xFFFFFFFFu, given, d);
}

// max(a, |b|) of two BF16 each; keeps NaN, which is 0x7FFF: as an upper half still above infinity for atomicMax.
static __device__ __forceinline__ uint32_t wgmma_amax2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("{\n.reg .b32 absolute;\nabs.bf16x2 absolute, %2;\nmax.NaN.bf16x2 %0, %1, absolute;\n}"
        : "=r"(result)
        : "r"(a), "r"(b));
    return result;
}

// 16 bytes to global memory if the condition holds; otherwise `to` may be any address.
static __device__ __forceinline__ void wgmma_store_if(void* to, uint4 v, int condition) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(condition)
                 : "memory");
}

// A rounded tile to dqkv, as FP8 or as BF16; its column sums to the partials; returns the raised amax (of two BF16).
// Called by the 128 threads of a warpgroup; each has done before what it does with the scratch. Rows beyond T are zeros
// and not stored. FP8 codes are made of the rounded values: the bits that quantize_backward makes of the BF16 form.
//   scratch  2 KB for the 16 rows of a warp. Row-major forms go through them in the warp alone. The transposed form and
//            the column sums go from warp to warp: rows r and r + 8 of a column are the two bytes of a 16-bit element,
//            so that a transposing stmatrix gathers 16 rows in 16 bytes, as 0 8 1 9 ...
//   order    the loads of one form are under the sums, and no branch splits the work on a tile
template <int FP8>
static __device__ __forceinline__ uint32_t wgmma_emit(const WgmmaBackward& x, WgmmaTile tile, const uint32_t (&low)[8],
                                                      const uint32_t (&high)[8], int group, uint32_t amax) {
    const uint32_t thread = wgmma_thread() % 128, lane = thread % 32, warp = thread / 32,
                   mine = tile.scratch + warp * 2048;
    const int rows_left = x.T - tile.t;
    const uint32_t rows = (uint32_t)x.B * x.T, cols = x.cols;
    const FormsOut& y = x.dqkv;
    const size_t first_row = (size_t)tile.b * x.T + tile.t;
    float sums[8];           // of columns: over the two rows, then over all of the warp
    wgmma_group_sync(group); // nobody reads what the scratch held before
    if (FP8) {
        // 4 codes of a lane in a word: row lane / 4 columns 8 n + 2 (lane % 4) and + 1, row + 8 the same columns
        uint32_t codes[8];
        const float scale = wgmma_load_shared_float(tile.scale);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float v[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t l = low[n + 4 * i], h = high[n + 4 * i];
                v[i][0] = __uint_as_float(l << 16);
                v[i][1] = __uint_as_float(l & 0xFFFF0000u);
                v[i][2] = __uint_as_float(h << 16);
                v[i][3] = __uint_as_float(h & 0xFFFF0000u);
                amax = wgmma_amax2(wgmma_amax2(amax, l), h);
                codes[n + 4 * i] = fp8_pack<e5m2>(v[i][0] * scale, v[i][1] * scale, v[i][2] * scale, v[i][3] * scale);
            }
            sums[2 * n] = wgmma_sum_half(v[0][0] + v[0][2], v[1][0] + v[1][2], lane, 16);
            sums[2 * n + 1] = wgmma_sum_half(v[0][1] + v[0][3], v[1][1] + v[1][3], lane, 16);
        }
        // 16 rows of 64 bytes: of 16 columns a lane's word has 2 and the 2 that are 8 further
        const uint32_t to = mine + (lane & 7) * 64 + (((lane >> 3) ^ (lane >> 1 & 3)) << 4);
        uint32_t words[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                words[n] = __byte_perm(codes[2 * n], codes[2 * n + 1], half ? 0x7632 : 0x5410);
            }
            wgmma_stmatrix(to + half * 512, words);
        }
        // 64 columns of 16 bytes
#pragma unroll
        for (int n = 0; n < 8; n += 4) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                words[i] = __byte_perm(codes[n + i], 0, 0x3120);
            }
            wgmma_stmatrix_transposed(mine + 1024 + n * 128 + ((lane ^ 2 * warp) << 4), words);
        }
    } else {
        // 16 rows of 128 bytes, 16-byte chunks swizzled as TMA does
        const uint32_t to = mine + (lane & 15) * 128;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            const uint32_t matrices[4] = {low[n], high[n], low[n + 1], high[n + 1]};
            wgmma_stmatrix(to + (((n + (lane >> 4)) ^ (lane & 7)) << 4), matrices);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float v[2][2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t l = low[n + 4 * i], h = high[n + 4 * i];
                v[i][0] = __uint_as_float(l << 16) + __uint_as_float(h << 16);
                v[i][1] = __uint_as_float(l & 0xFFFF0000u) + __uint_as_float(h & 0xFFFF0000u);
            }
            sums[2 * n] = wgmma_sum_half(v[0][0], v[1][0], lane, 16);
            sums[2 * n + 1] = wgmma_sum_half(v[0][1], v[1][1], lane, 16);
        }
    }
    __syncwarp();
    constexpr int LOADS = FP8 ? 2 : 4; // row-major, 16 bytes each
    uint4 raw[LOADS];
#pragma unroll
    for (int n = 0; n < LOADS; n++) {
        const uint32_t row = FP8 ? 8 * n + lane / 4 : 4 * n + lane / 8;
        raw[n] = wgmma_load_shared(
            mine + (FP8 ? row * 64 + ((lane ^ (row >> 1)) & 3) * 16 : row * 128 + ((lane ^ row) & 7) * 16));
    }
    // column sums of the warp: a lane ends with columns 8 n + 2 (lane % 4) and + 1, n = bits 4, 3, 2 of its number
#pragma unroll
    for (int n = 0; n < 4; n++) {
        sums[n] = wgmma_sum_half(sums[n], sums[n + 4], lane, 8);
    }
    sums[0] = wgmma_sum_half(sums[0], sums[2], lane, 4);
    sums[1] = wgmma_sum_half(sums[1], sums[3], lane, 4);
    const uint32_t eight = (lane >> 4) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
    __syncwarp(); // the rows are read
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(mine + (8 * eight + 2 * (lane % 4)) * 4), "f"(sums[0]),
                 "f"(sums[1])
                 : "memory");
    if constexpr (FP8) {
        uint8_t* const out =
            y.data + first_row * cols + tile.column + (size_t)(warp * 16 + lane / 4) * cols + lane % 4 * 16;
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            const uint4 w = raw[n];
            wgmma_store_if(out + (size_t)(8 * n) * cols,
                           make_uint4(__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410),
                                      __byte_perm(w.x, w.y, 0x7632), __byte_perm(w.z, w.w, 0x7632)),
                           (int)(warp * 16 + 8 * n + lane / 4) < rows_left && y.data != NULL);
        }
    } else {
        bf16* const out =
            y.wide + first_row * cols + tile.column + (size_t)(warp * 16 + lane / 8) * cols + lane % 8 * 8;
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            wgmma_store_if(out + (size_t)(4 * n) * cols, raw[n],
                           (int)(warp * 16 + 4 * n + lane / 8) < rows_left);
        }
    }
    wgmma_group_sync(group);
    if (FP8) {
        const uint32_t part = lane % 4, column = thread / 4;
        uint8_t* const out = y.transposed + (size_t)tile.column * rows + first_row + (size_t)column * rows + part * 16;
        const uint32_t from = tile.scratch + part * 2048 + 1024 + ((column ^ 2 * part) << 4);
        const uint4 pair[2] = {wgmma_load_shared(from), wgmma_load_shared(from + 512)};
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint4 w = pair[n];
            wgmma_store_if(out + (size_t)(32 * n) * rows,
                           make_uint4(__byte_perm(w.x, w.y, 0x6420), __byte_perm(w.z, w.w, 0x6420),
                                      __byte_perm(w.x, w.y, 0x7531), __byte_perm(w.z, w.w, 0x7531)),
                           (int)part * 16 < rows_left && y.transposed != NULL);
        }
    }
    if (thread < 64) {
        float sum[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[i] = wgmma_load_shared_float(tile.scratch + i * 2048 + thread * 4);
        }
        x.partials[((size_t)tile.b * 2 * x.num_blocks + tile.t / 64) * cols + tile.column + thread] =
            (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    return amax;
}

// One warpgroup's dq of query block i and of key block j, the item of `round`: from the registers to the thread that
// adds it, or, for key block 0, to memory. Called in the order of the steps; then wgmma_finish_dq. Returns the raised
// amax.
template <int HS, int FP8>
static __device__ __forceinline__ uint32_t wgmma_put_dq(uint32_t shared, const WgmmaBackward& x, uint32_t round, int j,
                                                        int i, const float (&dq)[32], uint32_t step, int group,
                                                        uint32_t amax) {
    constexpr int QUERIES = wgmma_queries(HS), R = wgmma_ratio(HS);
    const uint32_t barriers = shared + wgmma_at_barriers(HS),
                   half = shared + wgmma_at_dq(HS) + group * WGMMA_HALF_DQ_BYTES,
                   mine = half + wgmma_thread() % 128 * 16;
    wgmma_barrier_wait(barriers + WGMMA_DQ_EMPTY, (step + 1) % 2);
    if (j > 0) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            wgmma_store_shared(mine + n * 2048, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
        }
    } else {
        const float factor = 1.0f / sqrtf((float)HS);
        const WgmmaItem item = wgmma_read_item(barriers, round);
        uint32_t low[8], high[8];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const uint4 sum = i < R ? make_uint4(0, 0, 0, 0) : wgmma_load_shared(mine + n * 2048);
            low[n] = attention_pack((__uint_as_float(sum.x) + dq[4 * n]) * factor,
                                    (__uint_as_float(sum.y) + dq[4 * n + 1]) * factor);
            high[n] = attention_pack((__uint_as_float(sum.z) + dq[4 * n + 2]) * factor,
                                     (__uint_as_float(sum.w) + dq[4 * n + 3]) * factor);
        }
        WgmmaTile tile;
        tile.scratch = half;
        tile.scale = barriers + WGMMA_SCALE;
        tile.b = item.b;
        tile.t = i * QUERIES + (HS == 64 ? 64 * group : 0);
        tile.column = item.h * HS + (HS == 64 ? 0 : 64 * group);
        amax = wgmma_emit<FP8>(x, tile, low, high, group, amax);
    }
    return amax;
}

// Says that the buffer has the share of `step`, or is not read any more. Not at the end of wgmma_put_dq, since the
// fence waits until what was stored has arrived.
static __device__ __forceinline__ void wgmma_finish_dq(uint32_t barriers, uint32_t step) {
    wgmma_shared_proxy_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) { wgmma_barrier_arrive(barriers + WGMMA_DQ_FULL + step % 2 * 8); }
}

// lse of the columns that elements [FIRST, LAST) of s are in.
template <int FIRST, int LAST, int N>
static __device__ __forceinline__ void wgmma_prefetch(float2 (&lse)[N], const float* from) {
#pragma unroll
    for (int n = FIRST / 4; n < LAST / 4; n++) {
        lse[n] = *(const float2*)(from + 8 * n);
    }
}

// Elements [FIRST, LAST) of s: e = P^T = exp(S^T / sqrt(HS) - lse), and rounded to BF16 in p. N floats in e.
template <int FIRST, int LAST, int N>
static __device__ __forceinline__ void wgmma_probabilities(float (&e)[N], uint32_t (&p)[N / 2],
                                                           const float2 (&lse)[N / 4], float scale_log2) {
#pragma unroll
    for (int n = FIRST / 4; n < LAST / 4; n++) {
        const float2 pair = lse[n];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            e[4 * n + i] = attention_exp2(fmaf(e[4 * n + i], scale_log2, i % 2 ? -pair.y : -pair.x));
        }
        p[2 * n] = attention_pack(e[4 * n], e[4 * n + 1]);
        p[2 * n + 1] = attention_pack(e[4 * n + 2], e[4 * n + 3]);
    }
}

// The same elements of dS^T = P^T (dP^T - delta), rounded to BF16.
template <int FIRST, int LAST, int N>
static __device__ __forceinline__ void wgmma_score_gradients(uint32_t (&ds)[N / 2], const float (&e)[N],
                                                             const float (&dp)[N], const float* delta) {
#pragma unroll
    for (int n = FIRST / 4; n < LAST / 4; n++) {
        const float2 pair = *(const float2*)(delta + 8 * n);
        ds[2 * n] = attention_pack(e[4 * n] * (dp[4 * n] - pair.x), e[4 * n + 1] * (dp[4 * n + 1] - pair.y));
        ds[2 * n + 1] =
            attention_pack(e[4 * n + 2] * (dp[4 * n + 2] - pair.x), e[4 * n + 3] * (dp[4 * n + 3] - pair.y));
    }
}

// dqkv (B, T, 3, NH, HS) in its FP8 forms or in BF16, and the sums of its columns over 64 rows.
//   flops    5 products, 5 B NH T^2 HS: 258 G at B,NH,T,HS = 64,12,1024,64, 261 us at 989 TFLOP/s; blocks on
//            the diagonal are computed whole: 1 + 128 / T of that
//   bytes    10 B T NH HS read, 6 (BF16 or both E5M2 forms) written; dq's FP32 sums stay in L2
//   numerics P from lse in FP32, rounded to BF16 for dv; dS from the unrounded P, rounded to BF16; FP32 accumulators,
//            gradients rounded to BF16 once, and from there to E5M2
//   grid     as many blocks as there are multiprocessors, or fewer
//   bits     deterministic
template <int HS, int FP8>
__global__ void __launch_bounds__(WGMMA_THREADS, 1)
    wgmma_backward_kernel(const __grid_constant__ WgmmaBackward x, const __grid_constant__ CUtensorMap kv_map,
                          const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap dout_map) {
    kernel_begin();
    constexpr int QUERIES = wgmma_queries(HS), R = wgmma_ratio(HS), STAGES = wgmma_v_stages(HS);
    constexpr int KV_BYTES = wgmma_kv_bytes(HS), Q_BYTES = wgmma_q_bytes(HS), DS_BYTES = wgmma_ds_bytes(HS);
    constexpr int S = QUERIES / 2, D = HS / 2; // registers of 64 x queries, of 64 x channels
    constexpr int EARLY = S / 4;               // exponentials before dP is waited for: the others run beside other work
    extern __shared__ __align__(1024) char wgmma_shared[];
    const uint32_t shared = attention_shared_address(wgmma_shared), barriers = shared + wgmma_at_barriers(HS);
    const int num_query_blocks = x.num_blocks * R;
    const int warp = attention_warp(), lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        if (shared % 1024 != 0) { __trap(); }
        for (int i = 0; i < 2; i++) {
            wgmma_barrier_init(barriers + WGMMA_K_FULL + i * 8, 1);
            wgmma_barrier_init(barriers + WGMMA_K_EMPTY + i * 8, 8 + 2);
            wgmma_barrier_init(barriers + WGMMA_V_FULL + i * 8, 1);
            wgmma_barrier_init(barriers + WGMMA_V_EMPTY + i * 8, 8);
            wgmma_barrier_init(barriers + WGMMA_Q_FULL + i * 8, 1);
            wgmma_barrier_init(barriers + WGMMA_Q_EMPTY + i * 8, 8);
            wgmma_barrier_init(barriers + WGMMA_DS_FULL + i * 8, 8);
            wgmma_barrier_init(barriers + WGMMA_DS_EMPTY + i * 8, 8);
            wgmma_barrier_init(barriers + WGMMA_DQ_FULL + i * 8, 8);
        }
        wgmma_barrier_init(barriers + WGMMA_DQ_EMPTY, 1);
        const float scale = x.dqkv.slot != NULL ? x.dqkv.slot->scale : 1.0f; // from here it is read by every tile
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(barriers + WGMMA_SCALE), "f"(scale) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        wgmma_proxy_fence();
    }
    __syncthreads();

    if (warp >= WGMMA_COMPUTE_THREADS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        const int role = warp - WGMMA_COMPUTE_THREADS / 32;
        if (role == 0 && lane == 0) { wgmma_load_loop<HS>(shared, &kv_map, &q_map, &dout_map, x); }
        if ((role == 1 || role == 2) && lane == 0) { wgmma_dq_loop<HS>(shared, role - 1, x); }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const float scale = 1.0f / sqrtf((float)HS), scale_log2 = scale * ATTENTION_LOG2E;
        const int group = warp / 4; // this warpgroup's 64 keys, and half of dq
        const float* const stats_lane = (const float*)(wgmma_shared + wgmma_at_stats(HS)) + (lane % 4) * 2;
        const int limit = 16 * warp + lane / 4 - (lane % 4) * 2; // key - query of this lane's first element, diagonal
        // this lane's address for stmatrix: lanes 0-7, 8-15 rows 0-7, 8-15 of the warp's; lanes 16.. the next chunk
        const uint32_t ds_lane = shared + wgmma_at_ds(HS) + (16 * warp + (lane & 15)) * WGMMA_PANEL_BYTES;
        const int ds_chunk = lane >> 4, ds_swizzle = lane & 7;
        uint32_t amax = 0; // of two BF16
        float s[S], dk[D], dv[D], dq[32];
        uint32_t p[S / 2], ds[S / 2];
        float2 lse[S / 4];
        uint32_t step = 0, round = 0;
        int j = wgmma_next_item(barriers, 0).j, last_j = 0;
        const uint32_t k_rows = shared + group * 64 * WGMMA_PANEL_BYTES, q_tiles = shared + wgmma_at_q(HS);
        const uint32_t k_columns = shared + (HS == 64 ? 0 : group * WGMMA_ROWS * WGMMA_PANEL_BYTES);
        const uint32_t ds_columns = shared + wgmma_at_ds(HS) + (HS == 64 ? group * WGMMA_ROWS * WGMMA_PANEL_BYTES : 0);
        if (j >= 0) { wgmma_barrier_wait(barriers + WGMMA_Q_FULL, 0); } // else other blocks took them all
        wgmma_fence();
        wgmma_scores(s, wgmma_operand(k_rows), wgmma_operand(q_tiles));
        wgmma_commit();
#pragma unroll 1
        for (; j >= 0; round++) {
            const int first = j * R;
            int next = j;
            const uint32_t v_rows =
                shared + wgmma_at_v(HS) + round % STAGES * KV_BYTES + group * 64 * WGMMA_PANEL_BYTES;
            wgmma_barrier_wait(barriers + WGMMA_V_FULL + round % STAGES * 8, round / STAGES % 2);
#pragma unroll 1
            for (int i = first; i < num_query_blocks; i++) {
                // S of this step is on its way
                const uint32_t slot = step % 2;
                const uint32_t q_tile = q_tiles + slot * 2 * Q_BYTES;
                const float* column_stats = stats_lane + slot * wgmma_stats_floats(HS);
                {
                    // dP^T = v dout^T
                    // NOTE: S is waited for before, because ptxas loses count of what came from the loop's last round,
                    // and would serialise all products if it were waited for with dP on its way
                    float dp[S];
                    wgmma_prefetch<0, EARLY>(lse, column_stats);
                    wgmma_wait<0>();
                    wgmma_touch(s);
                    wgmma_fence();
                    wgmma_scores(dp, wgmma_operand(v_rows), wgmma_operand(q_tile + Q_BYTES));
                    wgmma_commit();
                    if (i > first && step > 1) { wgmma_finish_dq(barriers, step - 2); }
                    float e[S]; // not s itself, which is an output of wgmma again in this step
#pragma unroll
                    for (int n = 0; n < S; n++) {
                        e[n] = s[n];
                    }
                    if (i < first + R) { // the key comes after the query
                        const int seen = limit + WGMMA_ROWS * j - QUERIES * i;
#pragma unroll
                        for (int n = 0; n < S; n++) {
                            if (n / 4 * 8 + n % 2 - n % 4 / 2 * 8 < seen) { e[n] = -INFINITY; }
                        }
                    }
                    // NOTE: in two parts. The whole of e, p and dP at once is more than there are registers
                    wgmma_probabilities<0, EARLY>(e, p, lse, scale_log2);
#pragma unroll
                    for (int n = 0; n < EARLY / 2; n++) {
                        asm volatile("" ::"r"(p[n]));
                    }
                    // until nobody reads dS of two steps ago any more
                    // NOTE: here, because its branch keeps ptxas from waiting for dP before the exponentials
                    wgmma_barrier_wait(barriers + WGMMA_DS_EMPTY + slot * 8, (step / 2 + 1) % 2);
                    wgmma_wait<0>();
                    wgmma_touch(dp);
                    wgmma_score_gradients<0, EARLY>(ds, e, dp, column_stats + QUERIES);
                    wgmma_prefetch<EARLY, S>(lse, column_stats);
                    wgmma_probabilities<EARLY, S>(e, p, lse, scale_log2);
                    wgmma_score_gradients<EARLY, S>(ds, e, dp, column_stats + QUERIES);
                }
                // dS to shared memory
#pragma unroll
                for (int n = 0; n < S / 8; n++) {
                    const int chunk = (2 * n + ds_chunk) % 8;
                    wgmma_stmatrix(ds_lane + slot * DS_BYTES + n / 4 * WGMMA_ROWS * WGMMA_PANEL_BYTES +
                                       ((chunk ^ ds_swizzle) << 4),
                                   ds + 4 * n);
                }

                // dv += P^T dout, dk += dS^T q, then the last step's share of dq = dS k
                wgmma_fence();
                wgmma_add_gradient(dv, p, wgmma_operand_panels(q_tile + Q_BYTES, Q_BYTES / (HS / 64)), i > first);
                wgmma_add_gradient(dk, ds, wgmma_operand_panels(q_tile, Q_BYTES / (HS / 64)), i > first);
                wgmma_commit();
                wgmma_shared_proxy_fence(); // after the products, since it waits for what was stored
                __syncwarp();
                if (lane == 0) { wgmma_barrier_arrive(barriers + WGMMA_DS_FULL + slot * 8); }
                const uint32_t k_stage = (i > first ? round : round + 1) % 2; // of the last step, which may have been
                                                                              // the last item's
                wgmma_barrier_wait(barriers + WGMMA_DS_FULL + (slot ^ 1) * 8, ((step + 1) / 2 + 1) % 2);
                wgmma_fence();
                wgmma_dq(dq, wgmma_operand(ds_columns + (slot ^ 1) * DS_BYTES),
                         wgmma_operand(k_columns + k_stage * KV_BYTES)); // of nothing in the block's first step
                wgmma_commit();
                wgmma_wait<1>(); // S needs the registers of p and ds
                wgmma_touch(p);
                wgmma_touch(ds);
                wgmma_touch(dk);
                wgmma_touch(dv);
                if (lane == 0) { wgmma_barrier_arrive(barriers + WGMMA_Q_EMPTY + slot * 8); }

                // S of the next step, or of the next item's first
                step++;
                uint32_t k_next = k_rows + round % 2 * KV_BYTES;
                if (i + 1 == num_query_blocks) {
                    if (i ==
                        first) { // the item's only step: the next item's k comes where dq still reads the last one's
                        wgmma_wait<0>();
                        if (lane == 0 && step > 1) { wgmma_barrier_arrive(barriers + WGMMA_K_EMPTY + k_stage * 8); }
                    }
                    next = wgmma_next_item(barriers, round + 1).j;
                    k_next = k_rows + (round + 1) % 2 * KV_BYTES;
                }
                if (next >= 0) { wgmma_barrier_wait(barriers + WGMMA_Q_FULL + step % 2 * 8, step / 2 % 2); }
                wgmma_fence();
                wgmma_scores(s, wgmma_operand(k_next), wgmma_operand(q_tiles + step % 2 * 2 * Q_BYTES));
                wgmma_commit();

                // dq has ended
                wgmma_wait<1>();
                wgmma_touch(dq);
                if (step > 1) {
                    if (lane == 0) {
                        wgmma_barrier_arrive(barriers + WGMMA_DS_EMPTY + (slot ^ 1) * 8);
                        if (i == first && i + 1 < num_query_blocks) {
                            wgmma_barrier_arrive(barriers + WGMMA_K_EMPTY + k_stage * 8);
                        }
                    }
                    amax = wgmma_put_dq<HS, FP8>(shared, x, i > first ? round : round - 1, i > first ? j : last_j,
                                                 i > first ? i - 1 : num_query_blocks - 1, dq, step - 2, group, amax);
                }
            }

            // the end of the item
            if (step > 1) { wgmma_finish_dq(barriers, step - 2); }
            const WgmmaItem item = wgmma_read_item(barriers, round);
            uint32_t low[2 * HS / 64][8], high[2 * HS / 64][8]; // dk, dv
#pragma unroll
            for (int c = 0; c < HS / 64; c++) {
                wgmma_round(low[c], high[c], dk + 32 * c, scale);
                wgmma_round(low[HS / 64 + c], high[HS / 64 + c], dv + 32 * c, 1.0f);
            }
            // dk and dv leave through v's rows of this warpgroup: dP was the last to read them
            WgmmaTile tile;
            tile.scratch = v_rows;
            tile.scale = barriers + WGMMA_SCALE;
            tile.b = item.b;
            tile.t = item.j * WGMMA_ROWS + 64 * group;
#pragma unroll 1
            for (int c = 0; c < 2 * HS / 64; c++) {
                tile.column = (c < HS / 64 ? x.NH + item.h : 2 * x.NH + item.h) * HS + 64 * (c % (HS / 64));
                amax = wgmma_emit<FP8>(x, tile, low[0], high[0], group, amax);
#pragma unroll
                for (int i = 0; i < 8; i++) { // the next tile; one copy of the code, and fewer registers
#pragma unroll
                    for (int n = 1; n < 2 * HS / 64; n++) {
                        low[n - 1][i] = low[n][i];
                        high[n - 1][i] = high[n][i];
                    }
                }
            }
            wgmma_shared_proxy_fence();
            __syncwarp();
            if (lane == 0) { wgmma_barrier_arrive(barriers + WGMMA_V_EMPTY + round % STAGES * 8); }
            last_j = j;
            j = next;
        }
        if (step > 0) { // the block's last share of dq
            const uint32_t last = (step - 1) % 2, k_stage = (round + 1) % 2;
            wgmma_barrier_wait(barriers + WGMMA_DS_FULL + last * 8, (step - 1) / 2 % 2);
            wgmma_fence();
            wgmma_dq(dq, wgmma_operand(ds_columns + last * DS_BYTES), wgmma_operand(k_columns + k_stage * KV_BYTES));
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_touch(dq);
            amax = wgmma_put_dq<HS, FP8>(shared, x, round - 1, last_j, num_query_blocks - 1, dq, step - 1, group, amax);
            wgmma_finish_dq(barriers, step - 1);
        }
        wgmma_wait<0>(); // of a block without an item
        if (x.dqkv.amax != NULL) {
            const uint32_t bits = __reduce_max_sync(0xFFFFFFFFu, max(amax << 16, amax & 0xFFFF0000u));
            if (lane == 0 && bits > *(volatile uint32_t*)x.dqkv.amax) { atomicMax((uint32_t*)x.dqkv.amax, bits); }
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            write_descale(x.dqkv, x.dqkv.slot != NULL ? x.dqkv.slot->scale : 1.0f);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

// The workspace: stats, dq and partials FP32, then the counters.
typedef struct {
    int num_blocks, ring, heads; // of 128 keys per head; heads whose dq is kept; heads that are worked on together
    size_t stats_bytes, dq_bytes, partials_bytes, total_bytes;
} WgmmaWorkspace;

static inline int wgmma_does(int HS) {
    return HS == 64 || HS == 128;
}

static inline WgmmaWorkspace wgmma_workspace(int B, int T, int NH, int HS) {
    WgmmaWorkspace w;
    size_t heads = (size_t)B * NH, rows;
    w.num_blocks = (int)ceil_div((size_t)T, WGMMA_ROWS);
    rows = (size_t)w.num_blocks * WGMMA_ROWS;
    // Some 132 blocks of the grid are at work on neighbouring items, and fetch one more: 512 items, so that no head
    // waits long for its place.
    w.ring = 1 + (int)ceil_div(512, (size_t)w.num_blocks);
    w.ring = (size_t)w.ring < heads ? w.ring : (int)heads;
    w.heads = ceil_div(WGMMA_TOGETHER, (size_t)w.num_blocks);
    w.heads = w.heads < w.ring ? w.heads : w.ring;
    w.stats_bytes = heads * rows * 2 * sizeof(float);
    w.dq_bytes = (size_t)w.ring * rows * HS * sizeof(float);
    w.partials_bytes = (size_t)B * w.num_blocks * 2 * 3 * NH * HS * sizeof(float);
    w.total_bytes = w.stats_bytes + w.dq_bytes + w.partials_bytes +
                    (wgmma_num_counters(B, NH, w.num_blocks * wgmma_ratio(HS)) + 1) * sizeof(int);
    return w;
}

// TMA's view of x (B, T, heads, HS) BF16; boxes of `rows` rows x 64 channels of one head.
static inline CUtensorMap wgmma_panel_map(const bf16* x, int B, int T, int heads, int HS, int rows) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode = NULL; // from the driver: the program is not linked with it
    if (encode == NULL) {
        void* found = NULL;
        cudaDriverEntryPointQueryResult result;
        cuda_check(
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
        check(result == cudaDriverEntryPointSuccess && found != NULL,
              "the driver has no cuTensorMapEncodeTiled, want CUDA 12");
        memcpy(&encode, &found, sizeof(encode));
    }
    CUtensorMap map;
    const cuuint64_t row = (cuuint64_t)heads * HS * sizeof(bf16);
    const cuuint64_t sizes[4] = {(cuuint64_t)HS, (cuuint64_t)heads, (cuuint64_t)T, (cuuint64_t)B};
    const cuuint64_t strides[3] = {HS * sizeof(bf16), row, row * (cuuint64_t)T}; // bytes
    const cuuint32_t box[4] = {WGMMA_PANEL, 1, (cuuint32_t)rows, 1}, steps[4] = {1, 1, 1, 1};
    CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void*)x, sizes, strides, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled of (%d, %d, %d, %d): error %d", B, T, heads, HS, (int)status);
    return map;
}

template <int HS>
static inline void wgmma_backward_launch(Device* dev, FormsOut dqkv, float* dbias, const bf16* dout, const bf16* out,
                                         const float* lse, const bf16* qkv, int B, int T, int NH) {
    const WgmmaWorkspace w = wgmma_workspace(B, T, NH, HS);
    const int num_query_blocks = w.num_blocks * wgmma_ratio(HS), queries = wgmma_queries(HS);
    const size_t sms = (size_t)dev->properties.multiProcessorCount, items = (size_t)B * NH * w.num_blocks;
    char* workspace = (char*)dev->workspace;
    WgmmaBackward x;
    x.dqkv = dqkv;
    x.stats = (const float*)workspace;
    x.dq = (float*)(workspace + w.stats_bytes);
    x.partials = (float*)(workspace + w.stats_bytes + w.dq_bytes);
    x.counters = (int*)(workspace + w.stats_bytes + w.dq_bytes + w.partials_bytes);
    x.B = B, x.T = T, x.NH = NH, x.num_blocks = w.num_blocks, x.cols = 3 * NH * HS, x.ring = w.ring, x.heads = w.heads;
    const CUtensorMap kv_map = wgmma_panel_map(qkv, B, T, 3 * NH, HS, WGMMA_ROWS),
                      q_map = wgmma_panel_map(qkv, B, T, 3 * NH, HS, queries),
                      dout_map = wgmma_panel_map(dout, B, T, NH, HS, queries);
    launch(dev, wgmma_delta_kernel<HS>, (unsigned)(items * WGMMA_ROWS / 64), 256, 0, (float*)workspace, x.counters,
           dout, out, lse, B, T, NH, num_query_blocks);
    auto kernel = dqkv.slot != NULL ? wgmma_backward_kernel<HS, 1> : wgmma_backward_kernel<HS, 0>;
    cuda_check(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    wgmma_shared_bytes(HS)));
    launch(dev, kernel, (unsigned)(items < sms ? items : sms), WGMMA_THREADS, wgmma_shared_bytes(HS), x, kv_map, q_map,
           dout_map);
    if (dbias != NULL) {
        column_sums_add(dev, ColumnSums{{dbias, NULL, NULL}}, 1, x.partials, B * w.num_blocks * 2, x.cols);
    }
}

#endif
