// Backward pass of causal attention at head size 64 on Hopper's own instructions (wgmma, TMA): 5 products, and the same
// bits on every run. Formulas: attention_builtin.cuh; P is recomputed from lse as in FlashAttention-2, algorithm 2.
//
// One work item is a block of 128 keys of one head. It goes over the blocks of 128 queries from its own, which is the
// diagonal, to the last, and keeps dk and dv in registers. Its share of dq is a 128 x 64 product per step, which has to
// be summed over items. The sum is made in FP32 memory by the TMA unit, in a fixed order, which makes it deterministic:
//
//   dq of query block i gets the shares of key blocks i, i - 1, ..., 0: the first is stored, the others are added. A
//   counter per query block says how many are in; the share of key block j waits until it is i - j.
//
// Item (head, j) comes to query block i in its step i - j, so items of one head that start together never meet at a
// block: each is one step behind its neighbour, which is the order wanted. Items are handed out by an atomic counter,
// higher j first, so an item waits only for items that were handed out before it: no deadlock, wherever blocks run. dq
// is then scaled and rounded to BF16 once, by a kernel of its own (its FP32 sum is 4 B T C bytes).
//
//   threads    384: 2 warpgroups that compute (64 keys each), 1 that feeds them: one thread loads, one adds dq
//   products   S^T = k q^T and dP^T = v dout^T (64 x 128 per warpgroup) leave P^T and dS^T in registers as A operands:
//              dv += P^T dout, dk += dS^T q. For dq = dS k a warpgroup takes 64 queries and needs the other's dS: it
//              goes through shared memory
//   shared     tiles of 128 rows x 128 bytes with TMA's 128-byte swizzle; two stages of (q, dout, lse, delta), two of
//              (k, v), so that the next item's tiles arrive while this one ends
//   edges      TMA writes zeros beyond T and never crosses into the next row of the batch; lse is +inf there, so P = 0
#ifndef ATTENTION_BUILTIN_WGMMA_CUH
#define ATTENTION_BUILTIN_WGMMA_CUH

#include <cuda.h>
#include <cudaTypedefs.h>

#include "gpu.cuh"

constexpr int WGMMA_ROWS = 128;                             // queries or keys per block
constexpr int WGMMA_HS = 64;                                // head size
constexpr int WGMMA_PANEL = 64;                             // channels of a row of a tile in shared memory
constexpr int WGMMA_TILE_BYTES = WGMMA_ROWS * WGMMA_HS * 2; // 16 KB of BF16
constexpr int WGMMA_DQ_FLOATS = WGMMA_ROWS * WGMMA_HS;      // of one block of dq
constexpr int WGMMA_STATS_FLOATS = 2 * WGMMA_ROWS;          // lse, delta of one block
constexpr int WGMMA_COMPUTE_THREADS = 256, WGMMA_THREADS = 384;

// Shared memory, from a 1024-byte boundary on.
constexpr int WGMMA_AT_KV = 0;                                    // 2 x (k, v)
constexpr int WGMMA_AT_Q = WGMMA_AT_KV + 4 * WGMMA_TILE_BYTES;    // 2 x (q, dout)
constexpr int WGMMA_AT_DS = WGMMA_AT_Q + 4 * WGMMA_TILE_BYTES;    // dS^T: 2 panels of 64 queries, 128 keys each
constexpr int WGMMA_AT_DQ = WGMMA_AT_DS + 2 * WGMMA_TILE_BYTES;   // dq FP32
constexpr int WGMMA_AT_STATS = WGMMA_AT_DQ + WGMMA_DQ_FLOATS * 4; // 2 x (lse, delta)
constexpr int WGMMA_AT_ROWS = WGMMA_AT_STATS + 2 * WGMMA_STATS_FLOATS * 4; // 8 warps x 16 rows on their way out
constexpr int WGMMA_AT_BARRIERS = WGMMA_AT_ROWS + WGMMA_ROWS * attention_row_bytes(WGMMA_HS);
constexpr int WGMMA_SHARED_BYTES = WGMMA_AT_BARRIERS + 128 + 1024; // 1024: to reach the boundary

// Byte offsets of the mbarriers and of the item numbers after WGMMA_AT_BARRIERS.
enum {
    WGMMA_KV_FULL = 0,   // [2]
    WGMMA_KV_EMPTY = 16, // [2]
    WGMMA_Q_FULL = 32,   // [2]
    WGMMA_Q_EMPTY = 48,  // [2]
    WGMMA_DS_FULL = 64,
    WGMMA_DS_EMPTY = 72,
    WGMMA_DQ_FULL = 80,
    WGMMA_DQ_EMPTY = 88,
    WGMMA_ITEM = 96, // [2] int
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
// The same where a row is one panel.
static __device__ __forceinline__ void wgmma_load_tile(uint32_t to, const CUtensorMap* map, int head, int t, int b,
                                                       uint32_t barrier) {
    wgmma_load_panel(to, map, 0, head, t, b, barrier);
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
// d (64, 64) (+)= a (64, 16) . b^T, b (64, 16); both k-contiguous in shared memory
static __device__ __forceinline__ void wgmma_64x64(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGISTERS_32
                 ", %32, %33, 1, 1, 1, 0, 0;\n"
                 : WGMMA_F16(d, 0), WGMMA_F16(d, 16)
                 : "l"(a), "l"(b));
}
// The same, d = and not +=; what d held before is dead, so its registers may have been anything.
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

// 16 bytes of shared memory.
static __device__ __forceinline__ uint4 wgmma_load_shared(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels

// One of the kernel's work items: block j of head; which = b, h.
typedef struct {
    int head, j, b, h;
} WgmmaItem;

static __device__ __forceinline__ WgmmaItem wgmma_item(int index, int num_blocks, int NH) {
    WgmmaItem item;
    item.head = index / num_blocks;
    item.j = num_blocks - 1 - index % num_blocks;
    item.b = item.head / NH;
    item.h = item.head % NH;
    return item;
}

// stats (B NH, num_blocks, 2, 128) FP32: lse * log2(e), +inf beyond T; delta = rowsum(dout * out), 0 beyond T.
// counters (B NH num_blocks + 1) int = 0: the shares in each query block of dq, and the next item.
//   bytes    4 B T C read, 8 B NH T written;  8 threads per row of 64; deterministic
__global__ void __launch_bounds__(256) wgmma_delta_kernel(float* stats, int* counters, const bf16* dout,
                                                          const bf16* out, const float* lse, int B, int T, int NH) {
    const int num_blocks = (T + WGMMA_ROWS - 1) / WGMMA_ROWS;
    const int64_t rows = (int64_t)B * num_blocks * WGMMA_ROWS * NH;
    const int64_t thread = blockIdx.x * (int64_t)256 + threadIdx.x, row = thread / 8;
    const int part = threadIdx.x % 8;
    if (thread <= (int64_t)B * NH * num_blocks) { counters[thread] = 0; }
    if (row >= rows) { return; } // whole groups of 8
    const int h = row % NH, t = row / NH % (num_blocks * WGMMA_ROWS), b = row / NH / (num_blocks * WGMMA_ROWS);
    float sum = 0.0f;
    if (t < T) {
        size_t at = (((size_t)b * T + t) * NH + h) * WGMMA_HS + part * 8;
        uint4 x = *(const uint4*)(out + at), y = *(const uint4*)(dout + at);
        sum = (attention_dot2(x.x, y.x) + attention_dot2(x.y, y.y)) +
              (attention_dot2(x.z, y.z) + attention_dot2(x.w, y.w));
    }
    const uint32_t group = 0xFFu << (threadIdx.x % 32 / 8 * 8);
    sum += __shfl_xor_sync(group, sum, 1);
    sum += __shfl_xor_sync(group, sum, 2);
    sum += __shfl_xor_sync(group, sum, 4);
    if (part == 0) {
        const size_t head = (size_t)b * NH + h;
        float* to = stats + (head * num_blocks + t / WGMMA_ROWS) * WGMMA_STATS_FLOATS + t % WGMMA_ROWS;
        to[0] = t < T ? lse[head * T + t] * ATTENTION_LOG2E : INFINITY;
        to[WGMMA_ROWS] = sum;
    }
}

// The thread that loads: hands out items, and keeps the stages of k, v and of q, dout, lse, delta full.
static __device__ __forceinline__ void wgmma_load_loop(uint32_t shared, const CUtensorMap* qkv_map,
                                                       const CUtensorMap* dout_map, const float* stats, int* next_item,
                                                       int num_items, int num_blocks, int NH) {
    const uint32_t barriers = shared + WGMMA_AT_BARRIERS;
    int step = 0;
    for (int round = 0;; round++) {
        const int kv = round % 2, index = atomicAdd(next_item, 1);
        const uint32_t kv_full = barriers + WGMMA_KV_FULL + kv * 8,
                       k_tile = shared + WGMMA_AT_KV + kv * 2 * WGMMA_TILE_BYTES;
        wgmma_barrier_wait(barriers + WGMMA_KV_EMPTY + kv * 8, (round / 2 + 1) % 2);
        asm volatile("st.shared.s32 [%0], %1;" ::"r"(barriers + WGMMA_ITEM + kv * 4), "r"(index) : "memory");
        if (index >= num_items) {
            wgmma_barrier_arrive(kv_full);
            break;
        }
        const WgmmaItem item = wgmma_item(index, num_blocks, NH);
        wgmma_barrier_expect(kv_full, 2 * WGMMA_TILE_BYTES);
        wgmma_load_tile(k_tile, qkv_map, NH + item.h, item.j * WGMMA_ROWS, item.b, kv_full);
        wgmma_load_tile(k_tile + WGMMA_TILE_BYTES, qkv_map, 2 * NH + item.h, item.j * WGMMA_ROWS, item.b, kv_full);
        for (int i = item.j; i < num_blocks; i++, step++) {
            const int slot = step % 2;
            const uint32_t full = barriers + WGMMA_Q_FULL + slot * 8,
                           q_tile = shared + WGMMA_AT_Q + slot * 2 * WGMMA_TILE_BYTES;
            wgmma_barrier_wait(barriers + WGMMA_Q_EMPTY + slot * 8, (step / 2 + 1) % 2);
            wgmma_barrier_expect(full, 2 * WGMMA_TILE_BYTES + WGMMA_STATS_FLOATS * 4);
            wgmma_load_tile(q_tile, qkv_map, item.h, i * WGMMA_ROWS, item.b, full);
            wgmma_load_tile(q_tile + WGMMA_TILE_BYTES, dout_map, item.h, i * WGMMA_ROWS, item.b, full);
            wgmma_load_bytes(shared + WGMMA_AT_STATS + slot * WGMMA_STATS_FLOATS * 4,
                             stats + ((size_t)item.head * num_blocks + i) * WGMMA_STATS_FLOATS, WGMMA_STATS_FLOATS * 4,
                             full);
        }
    }
}

// The thread that adds dq: each share when its turn has come.
static __device__ __forceinline__ void wgmma_dq_loop(uint32_t shared, float* dq, int* shares, int num_items,
                                                     int num_blocks, int NH) {
    const uint32_t barriers = shared + WGMMA_AT_BARRIERS, from = shared + WGMMA_AT_DQ;
    int step = 0;
    for (int round = 0;; round++) {
        const int kv = round % 2;
        int index;
        wgmma_barrier_wait(barriers + WGMMA_KV_FULL + kv * 8, round / 2 % 2);
        asm volatile("ld.shared.s32 %0, [%1];" : "=r"(index) : "r"(barriers + WGMMA_ITEM + kv * 4) : "memory");
        if (index >= num_items) { break; }
        wgmma_barrier_arrive(barriers + WGMMA_KV_EMPTY + kv * 8); // the item number is read
        const WgmmaItem item = wgmma_item(index, num_blocks, NH);
        for (int i = item.j; i < num_blocks; i++, step++) {
            const size_t block = (size_t)item.head * num_blocks + i;
            float* to = dq + block * WGMMA_DQ_FLOATS;
            wgmma_barrier_wait(barriers + WGMMA_DQ_FULL, step % 2);
            if (i == item.j) {
                asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                             "r"(WGMMA_DQ_FLOATS * 4)
                             : "memory");
            } else {
                int in;
                do {
                    asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(in) : "l"(shares + block) : "memory");
                } while (in < i - item.j);
                wgmma_proxy_fence();
                asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                             "r"(from), "r"(WGMMA_DQ_FLOATS * 4)
                             : "memory");
            }
            asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
            wgmma_barrier_arrive(barriers + WGMMA_DQ_EMPTY);
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            wgmma_proxy_fence();
            asm volatile("st.release.gpu.s32 [%0], %1;" ::"l"(shares + block), "r"(i - item.j + 1) : "memory");
        }
    }
}

// dk and dv of dqkv (B, T, 3, NH, 64) BF16, and dq (B NH, num_blocks, 128 x 64 in the order of the registers) FP32,
// not scaled.
//   flops    5 products, 5 B NH T^2 HS: 258 G at B,NH,T,HS = 64,12,1024,64, 261 us at 989 TFLOP/s; blocks on
//            the diagonal are computed whole: 1 + 128 / T of that
//   bytes    16 B T NH HS, and dq: 4 B T NH HS written, and added to in L2 T / 256 times
//   numerics P from lse in FP32, rounded to BF16 for dv; dS from the unrounded P, rounded to BF16; FP32 accumulators,
//            dk and dv rounded once
//   grid     as many blocks as there are multiprocessors, or fewer
//   bits     deterministic
__global__ void __launch_bounds__(WGMMA_THREADS, 1)
    wgmma_backward_kernel(bf16* dqkv, float* dq_sum, int* counters, const __grid_constant__ CUtensorMap qkv_map,
                          const __grid_constant__ CUtensorMap dout_map, const float* stats, int B, int T, int NH) {
    extern __shared__ char wgmma_shared[];
    const uint32_t unaligned = attention_shared_address(wgmma_shared), shared = (unaligned + 1023) & ~1023u;
    char* const shared_bytes = wgmma_shared + (shared - unaligned);
    const uint32_t barriers = shared + WGMMA_AT_BARRIERS;
    const int num_blocks = (T + WGMMA_ROWS - 1) / WGMMA_ROWS, num_items = B * NH * num_blocks;
    const int warp = attention_warp(), lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            wgmma_barrier_init(barriers + WGMMA_KV_FULL + i * 8, 1);
            wgmma_barrier_init(barriers + WGMMA_KV_EMPTY + i * 8, 8 + 1);
            wgmma_barrier_init(barriers + WGMMA_Q_FULL + i * 8, 1);
            wgmma_barrier_init(barriers + WGMMA_Q_EMPTY + i * 8, 8);
        }
        wgmma_barrier_init(barriers + WGMMA_DS_FULL, 8);
        wgmma_barrier_init(barriers + WGMMA_DS_EMPTY, 8);
        wgmma_barrier_init(barriers + WGMMA_DQ_FULL, 8);
        wgmma_barrier_init(barriers + WGMMA_DQ_EMPTY, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        wgmma_proxy_fence();
    }
    __syncthreads();

    if (warp >= WGMMA_COMPUTE_THREADS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == WGMMA_COMPUTE_THREADS / 32 && lane == 0) {
            wgmma_load_loop(shared, &qkv_map, &dout_map, stats, counters + num_items, num_items, num_blocks, NH);
        }
        if (warp == WGMMA_COMPUTE_THREADS / 32 + 1 && lane == 0) {
            wgmma_dq_loop(shared, dq_sum, counters, num_items, num_blocks, NH);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const float scale = 1.0f / sqrtf((float)WGMMA_HS), scale_log2 = scale * ATTENTION_LOG2E;
        const int group = warp / 4; // this warpgroup's 64 keys, and 64 queries of dq
        const int C = NH * WGMMA_HS;
        const int stats_lane = WGMMA_AT_STATS / 4 + (lane % 4) * 2;
        const int limit = 16 * warp + lane / 4 - (lane % 4) * 2; // key - query of this lane's first element
        // this lane's address for stmatrix: lanes 0-7, 8-15 rows 0-7, 8-15 of the warp's; lanes 16.. the next chunk
        const int ds_row = 16 * warp + (lane & 15), ds_chunk = lane >> 4, ds_swizzle = lane & 7;
        const uint32_t ds_lane = shared + WGMMA_AT_DS + ds_row * 128;
        int step = 0;
        for (int round = 0;; round++) {
            const int kv = round % 2;
            int index;
            wgmma_barrier_wait(barriers + WGMMA_KV_FULL + kv * 8, round / 2 % 2);
            asm volatile("ld.shared.s32 %0, [%1];" : "=r"(index) : "r"(barriers + WGMMA_ITEM + kv * 4) : "memory");
            if (index >= num_items) { break; }
            const int j = num_blocks - 1 - index % num_blocks;
            const uint32_t k_tile = shared + WGMMA_AT_KV + kv * 2 * WGMMA_TILE_BYTES;
            const uint64_t k_rows = wgmma_operand(k_tile + group * 8192);
            const uint64_t v_rows = wgmma_operand(k_tile + WGMMA_TILE_BYTES + group * 8192);
            const uint64_t k_columns = wgmma_operand(k_tile);
            const uint64_t ds_columns = wgmma_operand(shared + WGMMA_AT_DS + group * WGMMA_TILE_BYTES);
            float dk[32], dv[32];
#pragma unroll
            for (int i = 0; i < 32; i++) {
                dk[i] = dv[i] = 0.0f;
            }
#pragma unroll 1
            for (int i = j; i < num_blocks; i++, step++) {
                const int slot = step % 2;
                const uint32_t q_tile = shared + WGMMA_AT_Q + slot * 2 * WGMMA_TILE_BYTES;
                const uint64_t q_operand = wgmma_operand(q_tile),
                               dout_operand = wgmma_operand(q_tile + WGMMA_TILE_BYTES);
                const float* column_stats = (const float*)shared_bytes + stats_lane + slot * WGMMA_STATS_FLOATS;
                uint32_t p[32], ds[32];
                {
                    // S^T = k q^T, dP^T = v dout^T
                    float s[64], dp[64];
                    wgmma_barrier_wait(barriers + WGMMA_Q_FULL + slot * 8, step / 2 % 2);
                    wgmma_fence();
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        wgmma_64x128(s, k_rows + c * 2, q_operand + c * 2, c > 0);
                    }
                    wgmma_commit();
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        wgmma_64x128(dp, v_rows + c * 2, dout_operand + c * 2, c > 0);
                    }
                    wgmma_commit();
                    wgmma_wait<1>();
                    wgmma_touch(s);
                    if (i == j) {
#pragma unroll
                        for (int n = 0; n < 64; n++) {
                            if (n / 4 * 8 + n % 2 - n % 4 / 2 * 8 < limit) { s[n] = -INFINITY; }
                        }
                    }
#pragma unroll
                    for (int n = 0; n < 16; n++) {
                        const float2 lse = *(const float2*)(column_stats + 8 * n);
                        s[4 * n] = attention_exp2(fmaf(s[4 * n], scale_log2, -lse.x));
                        s[4 * n + 1] = attention_exp2(fmaf(s[4 * n + 1], scale_log2, -lse.y));
                        s[4 * n + 2] = attention_exp2(fmaf(s[4 * n + 2], scale_log2, -lse.x));
                        s[4 * n + 3] = attention_exp2(fmaf(s[4 * n + 3], scale_log2, -lse.y));
                        p[2 * n] = attention_pack(s[4 * n], s[4 * n + 1]);
                        p[2 * n + 1] = attention_pack(s[4 * n + 2], s[4 * n + 3]);
                    }
                    // dS^T = P^T (dP^T - delta)
                    wgmma_wait<0>();
                    wgmma_touch(dp);
#pragma unroll
                    for (int n = 0; n < 16; n++) {
                        const float2 delta = *(const float2*)(column_stats + WGMMA_ROWS + 8 * n);
                        ds[2 * n] =
                            attention_pack(s[4 * n] * (dp[4 * n] - delta.x), s[4 * n + 1] * (dp[4 * n + 1] - delta.y));
                        ds[2 * n + 1] = attention_pack(s[4 * n + 2] * (dp[4 * n + 2] - delta.x),
                                                       s[4 * n + 3] * (dp[4 * n + 3] - delta.y));
                    }
                }
                // dS to shared memory, when nobody reads the last one any more
                wgmma_barrier_wait(barriers + WGMMA_DS_EMPTY, (step + 1) % 2);
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const int chunk = (2 * n + ds_chunk) % 8;
                    wgmma_stmatrix(ds_lane + n / 4 * WGMMA_TILE_BYTES + ((chunk ^ ds_swizzle) << 4), ds + 4 * n);
                }
                wgmma_proxy_fence();
                __syncwarp();
                if (lane == 0) { wgmma_barrier_arrive(barriers + WGMMA_DS_FULL); }

                // dv += P^T dout, dk += dS^T q
                wgmma_fence();
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    wgmma_64x64_registers(dv, p + 4 * c, dout_operand + c * 128);
                }
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    wgmma_64x64_registers(dk, ds + 4 * c, q_operand + c * 128);
                }
                wgmma_commit();

                // this step's share of dq = dS k
                float dq[32];
                wgmma_barrier_wait(barriers + WGMMA_DS_FULL, step % 2);
                wgmma_fence();
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    wgmma_64x64_transposed(dq, ds_columns + c * 128, k_columns + c * 128, c > 0);
                }
                wgmma_commit();
                wgmma_wait<1>();
                if (lane == 0) { wgmma_barrier_arrive(barriers + WGMMA_Q_EMPTY + slot * 8); }
                wgmma_wait<0>();
                wgmma_touch(dq);
                if (lane == 0) { wgmma_barrier_arrive(barriers + WGMMA_DS_EMPTY); }
                wgmma_barrier_wait(barriers + WGMMA_DQ_EMPTY, (step + 1) % 2);
                float4* share = (float4*)(shared_bytes + WGMMA_AT_DQ) + threadIdx.x;
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    share[n * WGMMA_COMPUTE_THREADS] =
                        make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
                }
                wgmma_proxy_fence();
                __syncwarp();
                if (lane == 0) { wgmma_barrier_arrive(barriers + WGMMA_DQ_FULL); }
            }
            wgmma_touch(dk);
            wgmma_touch(dv);
            if (lane == 0) { wgmma_barrier_arrive(barriers + WGMMA_KV_EMPTY + kv * 8); }

            // dk, dv
            const WgmmaItem item = wgmma_item(index, num_blocks, NH);
            bf16* dk_head = dqkv + (size_t)item.b * T * 3 * C + C + item.h * WGMMA_HS;
            char* own_rows = shared_bytes + WGMMA_AT_ROWS + 16 * warp * attention_row_bytes(WGMMA_HS);
            float rows[1][WGMMA_HS / 8][4];
#pragma unroll
            for (int i = 0; i < 32; i++) {
                rows[0][i / 4][i % 4] = dk[i] * scale;
            }
            attention_store_rows<WGMMA_HS, 1>(dk_head, rows, own_rows, 3 * C, item.j * WGMMA_ROWS + 16 * warp, T);
#pragma unroll
            for (int i = 0; i < 32; i++) {
                rows[0][i / 4][i % 4] = dv[i];
            }
            attention_store_rows<WGMMA_HS, 1>(dk_head + C, rows, own_rows, 3 * C, item.j * WGMMA_ROWS + 16 * warp, T);
        }
    }
}

// dq of dqkv (B, T, 3, NH, 64) BF16 = dq_sum / sqrt(64), from the order of the registers.
//   bytes    4 B T C read, 2 B T C written.   Grid: B NH num_blocks
__global__ void __launch_bounds__(WGMMA_COMPUTE_THREADS)
    wgmma_dq_kernel(bf16* dqkv, const float* dq_sum, int T, int NH) {
    __shared__ __align__(16) char shared[WGMMA_ROWS * attention_row_bytes(WGMMA_HS)];
    const int num_blocks = (T + WGMMA_ROWS - 1) / WGMMA_ROWS, warp = attention_warp(), C = NH * WGMMA_HS;
    const AttentionPlace at = attention_place(num_blocks, NH);
    const float4* from = (const float4*)(dq_sum + (size_t)blockIdx.x * WGMMA_DQ_FLOATS) + threadIdx.x;
    const float scale = 1.0f / sqrtf((float)WGMMA_HS);
    float rows[1][WGMMA_HS / 8][4];
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float4 x = from[n * WGMMA_COMPUTE_THREADS];
        rows[0][n][0] = x.x * scale;
        rows[0][n][1] = x.y * scale;
        rows[0][n][2] = x.z * scale;
        rows[0][n][3] = x.w * scale;
    }
    attention_store_rows<WGMMA_HS, 1>(dqkv + (size_t)at.b * T * 3 * C + at.h * WGMMA_HS, rows,
                                      shared + 16 * warp * attention_row_bytes(WGMMA_HS), 3 * C,
                                      at.block * WGMMA_ROWS + 16 * warp, T);
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

// The workspace: stats and dq_sum FP32, then the counters.
typedef struct {
    size_t blocks, stats_bytes, dq_bytes, total_bytes; // blocks: of 128 rows, B NH num_blocks
} WgmmaWorkspace;

static inline WgmmaWorkspace wgmma_workspace(int B, int T, int NH) {
    WgmmaWorkspace w;
    w.blocks = (size_t)B * NH * ceil_div((size_t)T, WGMMA_ROWS);
    w.stats_bytes = w.blocks * WGMMA_STATS_FLOATS * sizeof(float);
    w.dq_bytes = w.blocks * WGMMA_DQ_FLOATS * sizeof(float);
    w.total_bytes = w.stats_bytes + w.dq_bytes + (w.blocks + 1) * sizeof(int);
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

// The same at head size 64, boxes of 128 rows.
static inline CUtensorMap wgmma_tensor_map(const bf16* x, int B, int T, int heads) {
    return wgmma_panel_map(x, B, T, heads, WGMMA_HS, WGMMA_ROWS);
}

// dqkv = gradient of qkv; see builtin_attention_backward, which checks the arguments. HS 64; dev->workspace has at
// least wgmma_workspace(B, T, NH).total_bytes.
static inline void wgmma_attention_backward(Device* dev, bf16* dqkv, const bf16* dout, const bf16* out,
                                            const float* lse, const bf16* qkv, int B, int T, int NH) {
    const WgmmaWorkspace w = wgmma_workspace(B, T, NH);
    float* stats = (float*)dev->workspace;
    float* dq_sum = (float*)((char*)dev->workspace + w.stats_bytes);
    int* counters = (int*)((char*)dq_sum + w.dq_bytes);
    const int sms = dev->properties.multiProcessorCount, grid = w.blocks < (size_t)sms ? (int)w.blocks : sms;
    const CUtensorMap qkv_map = wgmma_tensor_map(qkv, B, T, 3 * NH), dout_map = wgmma_tensor_map(dout, B, T, NH);
    wgmma_delta_kernel<<<(unsigned)(w.blocks * WGMMA_ROWS * 8 / 256), 256, 0, dev->stream>>>(stats, counters, dout, out,
                                                                                             lse, B, T, NH);
    cuda_check(cudaGetLastError());
    cuda_check(cudaFuncSetAttribute((const void*)wgmma_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    WGMMA_SHARED_BYTES));
    wgmma_backward_kernel<<<grid, WGMMA_THREADS, WGMMA_SHARED_BYTES, dev->stream>>>(dqkv, dq_sum, counters, qkv_map,
                                                                                    dout_map, stats, B, T, NH);
    cuda_check(cudaGetLastError());
    wgmma_dq_kernel<<<(unsigned)w.blocks, WGMMA_COMPUTE_THREADS, 0, dev->stream>>>(dqkv, dq_sum, T, NH);
    cuda_check(cudaGetLastError());
}

#endif
