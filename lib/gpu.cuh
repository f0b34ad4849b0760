// The ground of the GPU floor: the Device (one GPU, one stream, one cuBLASLt handle, one workspace), error checks,
// device memory, and the small device functions that several ops share: 16-byte vectors, FP8 conversion, the transposed
// FP8 tile, amax, sums in fixed order. Ops lean on this file and on nothing else.
//
// Contents: errors | Device | launches | vectors | FP8 | producers and their amax | transposed tiles | column sums |
// clusters
#ifndef GPU_CUH
#define GPU_CUH

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "check.h"
#include "floor.h"
#include "op_cost.h"
#include "roofline.h"

// ---------------------------------------------------------------------------------------------------------------------
// errors

// Every CUDA and cuBLASLt call is wrapped; a launch that does not go through launch is followed by
// cuda_check(cudaGetLastError()).
#define cuda_check(call)                                                                                               \
    do {                                                                                                               \
        cudaError_t cuda_status_ = (call);                                                                             \
        check(cuda_status_ == cudaSuccess, "CUDA: %s (%s) in %s", cudaGetErrorString(cuda_status_),                    \
              cudaGetErrorName(cuda_status_), #call);                                                                  \
    } while (0)

#define cublas_check(call)                                                                                             \
    do {                                                                                                               \
        cublasStatus_t cublas_status_ = (call);                                                                        \
        check(cublas_status_ == CUBLAS_STATUS_SUCCESS, "cuBLASLt: %s in %s", cublasLtGetStatusString(cublas_status_),  \
              #call);                                                                                                  \
    } while (0)

static inline size_t ceil_div(size_t n, size_t by) {
    return (n + by - 1) / by;
}

// ---------------------------------------------------------------------------------------------------------------------
// Device

struct Device {
    int index;                 // CUDA ordinal
    cudaDeviceProp properties; // name, multiProcessorCount, ...
    cudaStream_t stream;       // every op runs here
    cublasLtHandle_t cublaslt;
    void* workspace; // scratch of the op that is running; see device_set_workspace
    size_t workspace_bytes;
    int early_launch; // 1: kernels are launched early, see launch. 0 for comparisons
    struct MatmulPlan* matmul_plans; // cache of matmul.cuh, one per shape
    AttentionKind attention;      // see attention_select
    struct CudnnAttention* cudnn; // of attention_cudnn.cpp, NULL when builtin
    char attention_name[64];
    Profile* profile;    // NULL: not profiling
    cudaEvent_t* events; // (num_events) made when they are first needed and kept: event i is mark i of the step
    int* event_ops;      // (num_events) the op that begins at the event, -1: nobody's
    int num_events, num_marks;
};

// Defined in attention.cuh and matmul.cuh: what those ops keep in the Device.
void attention_select(Device* dev, AttentionKind wanted); // sets attention, cudnn, attention_name
void attention_release(Device* dev);
void matmul_release(Device* dev);

// Open GPU `options.index`: it must exist, work, and be Hopper (compute capability 9.0: the FP8 tensor cores, clusters
// and wgmma that the kernels are compiled for).
Device* device_create(DeviceOptions options) {
    check(!options.fp32, "--precision fp32 is the yardstick of the CPU build: found the GPU build, want `make cpu`");
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    check(status == cudaSuccess && count > 0,
          "no usable GPU: found %s, need a Hopper GPU (compute capability 9.0: H100, H200, H800, GH200); on this "
          "machine build the CPU floor: make cpu",
          status == cudaSuccess ? "none" : cudaGetErrorString(status));
    // a launcher may show every rank its own GPU only (CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-task)
    int index = count == 1 ? 0 : options.index;
    check(index >= 0 && index < count,
          "no GPU for local rank %d: found %d on this host, need one per rank (or: make cpu)", options.index, count);
    Device* dev = (Device*)calloc_or_die(1, sizeof(Device));
    dev->index = index;
    cuda_check(cudaGetDeviceProperties(&dev->properties, dev->index));
    check(dev->properties.major == 9 && dev->properties.minor == 0,
          "unsuitable GPU %d: found %s with compute capability %d.%d, need Hopper (9.0: H100, H200, H800, GH200); on "
          "this machine build the CPU floor: make cpu",
          dev->index, dev->properties.name, dev->properties.major, dev->properties.minor);
    cuda_check(cudaSetDevice(dev->index));
    cuda_check(cudaStreamCreateWithFlags(&dev->stream, cudaStreamNonBlocking));
    dev->early_launch = 1;
    cublas_check(cublasLtCreate(&dev->cublaslt));
    attention_select(dev, options.attention);
    return dev;
}

void device_free(Device* dev) {
    cuda_check(cudaStreamSynchronize(dev->stream));
    attention_release(dev);
    matmul_release(dev);
    cublas_check(cublasLtDestroy(dev->cublaslt));
    for (int i = 0; i < dev->num_events; i++) {
        cuda_check(cudaEventDestroy(dev->events[i]));
    }
    free(dev->events);
    free(dev->event_ops);
    cuda_check(cudaStreamDestroy(dev->stream));
    free(dev);
}

const char* device_name(const Device* dev) {
    return dev->properties.name;
}
// The GPU's UUID, also that of a part of one (MIG).
void device_identity(const Device* dev, char* text, size_t size) {
    const unsigned char* uuid = (const unsigned char*)dev->properties.uuid.bytes;
    for (size_t i = 0; i < 16 && 2 * i + 3 <= size; i++) {
        snprintf(text + 2 * i, 3, "%02x", uuid[i]);
    }
}
const char* device_attention_name(const Device* dev) {
    return dev->attention_name;
}

// The chip's peaks: from the table of data sheets, or estimated from what the driver reports.
static inline Chip device_chip(const Device* dev) {
    int sm_khz = 0, memory_khz = 0, bus_bits = 0;
    cuda_check(cudaDeviceGetAttribute(&sm_khz, cudaDevAttrClockRate, dev->index));
    cuda_check(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, dev->index));
    cuda_check(cudaDeviceGetAttribute(&bus_bits, cudaDevAttrGlobalMemoryBusWidth, dev->index));
    double bytes_per_s = 2.0 * memory_khz * 1e3 * bus_bits / 8; // two transfers a clock
    return chip_from_device(dev->properties.name, dev->properties.multiProcessorCount, sm_khz / 1e6, bytes_per_s);
}

// For choices that must be the same in every run: nothing is measured here anyway.
static inline Chip device_nominal_chip(const Device* dev) {
    return device_chip(dev);
}

void device_memory(const Device* dev, size_t* free_bytes, size_t* total_bytes) {
    (void)dev;
    cuda_check(cudaMemGetInfo(free_bytes, total_bytes));
}

void* device_malloc(Device* dev, size_t bytes) {
    void* p = NULL;
    cudaError_t status = cudaMalloc(&p, bytes ? bytes : 1);
    if (status != cudaSuccess) {
        size_t free_bytes = 0, total_bytes = 0;
        (void)cudaGetLastError(); // an allocation that failed leaves the device usable: clear it, then ask
        device_memory(dev, &free_bytes, &total_bytes);
        check(0, "GPU %d (%s): cannot allocate %zu MiB: %zu of %zu MiB are free (%s)", dev->index, dev->properties.name,
              bytes >> 20, free_bytes >> 20, total_bytes >> 20, cudaGetErrorString(status));
    }
    return p; // cudaMalloc aligns to 256 bytes
}

void device_release(Device* dev, void* p) {
    (void)dev;
    cuda_check(cudaFree(p));
}

void* pinned_malloc(Device* dev, size_t bytes) {
    (void)dev;
    void* p = NULL;
    cudaError_t status = cudaMallocHost(&p, bytes ? bytes : 1);
    check(status == cudaSuccess, "cannot allocate %zu bytes of pinned host memory (%s)", bytes,
          cudaGetErrorString(status));
    return p;
}

void pinned_release(Device* dev, void* p) {
    (void)dev;
    cuda_check(cudaFreeHost(p));
}

void device_zero(Device* dev, void* p, size_t bytes) {
    cost_zero(dev, bytes);
    cuda_check(cudaMemsetAsync(p, 0, bytes, dev->stream));
}

void device_copy_in(Device* dev, void* to_device, const void* from_host, size_t bytes) {
    cost_copy_in(dev);
    cuda_check(cudaMemcpyAsync(to_device, from_host, bytes, cudaMemcpyHostToDevice, dev->stream));
}

void device_sync(Device* dev) {
    cuda_check(cudaStreamSynchronize(dev->stream));
}

void device_copy_out(Device* dev, void* to_host, const void* from_device, size_t bytes) {
    double start = dev->profile != NULL ? seconds_now() : 0.0;
    cost_copy_out(dev);
    // into memory that is not pinned it already waits here
    cuda_check(cudaMemcpyAsync(to_host, from_device, bytes, cudaMemcpyDeviceToHost, dev->stream));
    cost_nobody(dev);
    device_sync(dev);
    if (dev->profile != NULL) { dev->profile->wait_s += seconds_now() - start; }
}

void device_profile_begin(Device* dev, Profile* profile) {
    dev->profile = profile;
    dev->num_marks = 0;
}

Profile* device_profile(const Device* dev) {
    return dev->profile;
}

void device_profile_mark(Device* dev, int op) {
    if (dev->num_marks == dev->num_events) {
        int more = dev->num_events > 0 ? 2 * dev->num_events : 1024;
        dev->events = (cudaEvent_t*)realloc(dev->events, (size_t)more * sizeof(cudaEvent_t));
        dev->event_ops = (int*)realloc(dev->event_ops, (size_t)more * sizeof(int));
        check(dev->events != NULL && dev->event_ops != NULL, "out of host memory: wanted room for %d events", more);
        for (; dev->num_events < more; dev->num_events++) {
            cuda_check(cudaEventCreate(&dev->events[dev->num_events]));
        }
    }
    cuda_check(cudaEventRecord(dev->events[dev->num_marks], dev->stream));
    dev->event_ops[dev->num_marks++] = op;
}

void device_profile_end(Device* dev) {
    device_profile_mark(dev, -1);
    cuda_check(cudaStreamSynchronize(dev->stream));
    for (int i = 0; i + 1 < dev->num_marks; i++) {
        if (dev->event_ops[i] < 0) { continue; }
        float ms;
        cuda_check(cudaEventElapsedTime(&ms, dev->events[i], dev->events[i + 1]));
        dev->profile->ops[dev->event_ops[i]].seconds += 1e-3 * ms;
    }
    dev->profile = NULL;
}

void device_set_workspace(Device* dev, void* p, size_t bytes) {
    dev->workspace = p;
    dev->workspace_bytes = bytes;
}

void bf16_to_host(Device* dev, float* to, const bf16* from, size_t n) {
    uint16_t* bits = (uint16_t*)malloc_or_die(n * sizeof(uint16_t));
    device_copy_out(dev, bits, from, n * sizeof(uint16_t));
    for (size_t i = 0; i < n; i++) {
        to[i] = bits_float((uint32_t)bits[i] << 16);
    }
    free(bits);
}

void bf16_from_host(Device* dev, bf16* to, const float* from, size_t n) {
    uint16_t* bits = (uint16_t*)malloc_or_die(n * sizeof(uint16_t));
    for (size_t i = 0; i < n; i++) {
        bits[i] = (uint16_t)(float_bits(bf16_round(from[i])) >> 16);
    }
    device_copy_in(dev, to, bits, n * sizeof(uint16_t));
    device_sync(dev);
    free(bits);
}

// ---------------------------------------------------------------------------------------------------------------------
// launches: early (programmatic dependent launch). A kernel's blocks are placed as soon as the kernel before it has
// none left to place (or, if that does not say so, has ended), and wait in kernel_begin until it has ended and what it
// wrote can be read. Saved is the way from the end of a kernel to the first instruction of the next, 1 to 2 us.

// NOTE: the first line of every kernel that is launched early (scripts/check_wall.sh looks): what stands before it runs
// beside kernels that were queued earlier. All of them wait before they end, so the end of one is the end of all before
// it: a kernel without this line would break that for those behind it. In an ordinary launch it does nothing.
__device__ static inline void kernel_begin(void) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;"); // the next kernel's blocks are welcome: they wait, too
}

// For launches with further attributes.
static inline cudaLaunchAttribute launch_attribute(const Device* dev) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = dev->early_launch;
    return attribute;
}

// Queue kernel(arguments...) on dev->stream.
template <typename... Parameters, typename... Arguments>
static inline void launch(Device* dev, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                          Arguments... arguments) {
    cudaLaunchAttribute attribute = launch_attribute(dev);
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = dev->stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t status = cudaLaunchKernelEx(&config, kernel, arguments...);
    if (status != cudaSuccess) { // also what a kernel before this one did wrong
        const char* name = "?";
        cudaFuncGetName(&name, (const void*)kernel);
        check(0, "CUDA: %s (%s) at the launch of %s, grid %u x %u x %u, block %u x %u x %u, %zu bytes of shared memory",
              cudaGetErrorString(status), cudaGetErrorName(status), name, grid.x, grid.y, grid.z, block.x, block.y,
              block.z, shared_bytes);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// vectors: 8 BF16 values are one 16-byte access, the widest a thread has

#define BF16_OF_VECTOR 8 // columns of every access; ops want their columns to be a multiple of it

__device__ static inline void unpack8(float v[8], uint4 raw) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) { // a BF16 value is the upper half of the FP32 value
        v[2 * i] = __uint_as_float(words[i] << 16);
        v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
}

// Two floats, rounded to nearest even, in one register; `low` at the lower address.
__device__ static inline uint32_t pack_bf16(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}

__device__ static inline uint4 pack8(const float v[8]) {
    return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

__device__ static inline uint4 load_vector(const bf16* p) {
    return *(const uint4*)p;
}
__device__ static inline void store_vector(bf16* p, uint4 raw) {
    *(uint4*)p = raw;
}

// 16 bytes from global to shared memory without passing through registers; pending until cp_async_wait.
__device__ static inline void cp_async(uint4* to_shared, const void* from) {
    uint32_t to = (uint32_t)__cvta_generic_to_shared(to_shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Waits for the calling thread's own copies; others see them after a __syncthreads.
__device__ static inline void cp_async_wait(void) {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Copies since the last commit are one group; cp_async_wait_group<N> waits for all groups of the calling thread but the
// last N.
__device__ static inline void cp_async_commit(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ static inline void cp_async_wait_group(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Start bringing the line at p into L2, for a load that comes later.
__device__ static inline void prefetch_l2(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

__device__ static inline float exp2_approx(float x) { // 2 ulp; 2^-inf = 0, 2^inf = inf, NaN stays NaN
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ static inline float warp_sum(float x) { // the same bits in every lane
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
    }
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// FP8: the hardware's cvt.rn.satfinite, bit-equal to e4m3_from_float and e5m2_from_float of fp8.h

// Four floats -> four codes, a at the lowest address.
template <typename FP8> __device__ uint32_t fp8_pack(float a, float b, float c, float d);

template <> __device__ inline uint32_t fp8_pack<e4m3>(float a, float b, float c, float d) {
    uint16_t low, high; // cvt puts its first operand into the upper byte
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (uint32_t)low | (uint32_t)high << 16;
}

template <> __device__ inline uint32_t fp8_pack<e5m2>(float a, float b, float c, float d) {
    uint16_t low, high;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (uint32_t)low | (uint32_t)high << 16;
}

// ---------------------------------------------------------------------------------------------------------------------
// producers: ops that write a (rows, cols) tensor in every form somebody needs, and its amax

// E4m3Tensor and E5m2Tensor seen alike, as kernels take them.
typedef struct {
    bf16* wide;          // (rows, cols) or NULL
    uint8_t* data;       // (rows, cols) or NULL
    uint8_t* transposed; // (cols, rows) or NULL
    ScaleSlot* slot;     // NULL when no FP8 form is written
    float* amax;         // raised to max |value|: &slot->amax, &slot->jit_amax while measuring, or NULL
    int measuring;       // 1: nothing but *amax is written
} FormsOut;

static inline FormsOut forms_of_e4m3(E4m3Tensor y) {
    FormsOut out = {y.wide, (uint8_t*)y.data, (uint8_t*)y.transposed, NULL, NULL, 0};
    if (y.data != NULL || y.transposed != NULL) {
        out.slot = y.slot;
        out.amax = y.record ? &y.slot->amax : NULL;
    }
    return out;
}

static inline FormsOut forms_of_e5m2(E5m2Tensor y) {
    FormsOut out = {y.wide, (uint8_t*)y.data, (uint8_t*)y.transposed, NULL, NULL, 0};
    if (y.data != NULL || y.transposed != NULL) {
        out.slot = y.slot;
        out.amax = y.record ? &y.slot->amax : NULL;
    }
    return out;
}

// What every producer asks of its shape. 16-byte rows; for the transposed copy also 16-byte columns.
static inline void check_forms(const char* name, FormsOut out, const void* slot, int fp8, int rows, int cols) {
    check(rows > 0 && cols > 0, "%s: (rows, cols) = (%d, %d), want both positive", name, rows, cols);
    check(!fp8 || slot != NULL, "%s: FP8 output without a scale slot", name);
    check(cols % BF16_OF_VECTOR == 0, "%s: %d columns, want a multiple of %d", name, cols, BF16_OF_VECTOR);
    check(!fp8 || (rows % 16 == 0 && cols % 16 == 0), "%s: (rows, cols) = (%d, %d), want multiples of 16 for FP8", name,
          rows, cols);
    uintptr_t address = (uintptr_t)out.wide | (uintptr_t)out.data | (uintptr_t)out.transposed;
    check(address % 16 == 0, "%s: an output is not aligned to 16 bytes", name);
}

// The same op, to be run first in order to measure: measure_begin, launch with what it returns, measure_end.
static inline FormsOut measure_begin(Device* dev, FormsOut out) {
    FormsOut measuring = {NULL, NULL, NULL, out.slot, &out.slot->jit_amax, 1};
    cuda_check(cudaMemsetAsync(measuring.amax, 0, sizeof(float), dev->stream));
    return measuring;
}

__global__ void measure_end_kernel(ScaleSlot* slot, ScaleRecipe recipe) {
    kernel_begin();
    scale_slot_set_from_measured(slot, recipe);
}

static inline void measure_end(Device* dev, FormsOut out, ScaleRecipe recipe) {
    launch(dev, measure_end_kernel, 1, 1, 0, out.slot, recipe);
}

// max(amax, |v|) that keeps NaN, as one instruction where amax_raised takes two; the NaN it makes is 0x7FFFFFFF, which
// is the largest of all bit patterns that raise_amax compares.
__device__ static inline float amax_nan(float amax, float v) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(amax), "f"(fabsf(v)));
    return result;
}

// A tree, since a chain of 8 waits for itself where there are few warps.
__device__ static inline float amax8(float amax, const float v[8]) {
    float a = amax_nan(fabsf(v[0]), v[1]), b = amax_nan(fabsf(v[2]), v[3]);
    float c = amax_nan(fabsf(v[4]), v[5]), d = amax_nan(fabsf(v[6]), v[7]);
    return amax_nan(amax, amax_nan(amax_nan(a, b), amax_nan(c, d)));
}

// *to = max(*to, amax of all threads of the block), on bits: NaN wins. The whole block calls; blocks of whole warps.
// The plain read first saves nearly all atomics: every block hits one address, and most have nothing to add.
__device__ static inline void raise_amax(float* to, float amax) {
    __shared__ uint32_t warp_amax[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
    uint32_t bits = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(amax));
    if (lane == 0) { warp_amax[warp] = bits; }
    __syncthreads();
    if (warp == 0) {
        bits = __reduce_max_sync(0xFFFFFFFFu, lane < num_warps ? warp_amax[lane] : 0u);
        if (lane == 0 && bits > *(volatile uint32_t*)to) { atomicMax((uint32_t*)to, bits); }
    }
}

// One thread of the grid, at the end of a producer: the descale belongs to the bytes just written.
__device__ static inline void write_descale(FormsOut out, float scale) {
    if (out.slot != NULL && !out.measuring) { out.slot->descale = 1.0f / scale; }
}

// ---------------------------------------------------------------------------------------------------------------------
// transposed tiles
//
// The unit of a producer's work is a patch: 4 rows x 8 columns in one thread. Its 8 columns are one 16-byte vector of
// each row; its 4 rows are one 32-bit word of each column. A block gathers its patches' column words in shared memory,
//   tile[column][row / 4]      `words` = 2^log2_words words of 4 rows per column (16 rows at least: 4 words)
// and reads back 16 rows of a column at once, for 16-byte stores into the transposed tensor.
//
// Banks. Words are stored with consecutive threads on consecutive column groups (8 columns each), so unswizzled they
// would all fall into the same bank. Five bits of the group number, g, are XORed into the word index (low bits) and the
// column index inside its group (high bits). g is a permutation of 0..31 for 32 consecutive groups of one row word
// (layernorm), distinct above its low bit for 16 groups (128-column tiles, 2 row words per warp) and above its two low
// bits for 8 (64 columns, 4 row words): all are free of conflicts, and so are the 16-byte reads.

#define PATCH_ROWS 4
#define PATCH_COLS 8

typedef struct {
    uint32_t left[PATCH_ROWS];  // codes of columns 0..3, one word per row
    uint32_t right[PATCH_ROWS]; // columns 4..7
} Fp8Patch;

__device__ static inline int tile_swizzle(int column) {
    int group = column / PATCH_COLS;
    return (group & 7) << 2 | (group >> 2 & 2) | (group >> 4 & 1);
}

// Byte transpose of 4 words: byte r of columns[c] = byte c of rows[r].
__device__ static inline void transpose_4x4(uint32_t columns[4], const uint32_t rows[4]) {
    uint32_t ab01 = __byte_perm(rows[0], rows[1], 0x5140), ab23 = __byte_perm(rows[0], rows[1], 0x7362);
    uint32_t cd01 = __byte_perm(rows[2], rows[3], 0x5140), cd23 = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0] = __byte_perm(ab01, cd01, 0x5410);
    columns[1] = __byte_perm(ab01, cd01, 0x7632);
    columns[2] = __byte_perm(ab23, cd23, 0x5410);
    columns[3] = __byte_perm(ab23, cd23, 0x7632);
}

// Put a patch whose first column is `column` (a multiple of 8) and whose rows are word `word` into the tile.
__device__ static inline void patch_to_tile(uint32_t* tile, int log2_words, int column, int word,
                                            const Fp8Patch* patch) {
    uint32_t words[PATCH_COLS];
    transpose_4x4(words, patch->left);
    transpose_4x4(words + 4, patch->right);
    int swizzle = tile_swizzle(column), mask = (1 << log2_words) - 1;
    int first = ((column ^ swizzle >> log2_words) << log2_words) + (word ^ (swizzle & mask));
#pragma unroll
    for (int j = 0; j < PATCH_COLS; j++) {
        tile[first ^ j << log2_words] = words[j];
    }
}

// 16 rows of a column: words 4 * chunk .. 4 * chunk + 3, put back into order.
__device__ static inline uint4 tile_chunk(const uint32_t* tile, int log2_words, int column, int chunk) {
    int swizzle = tile_swizzle(column), mask = (1 << log2_words) - 1;
    int word = (chunk * 4) ^ (swizzle & mask & ~3);
    uint4 raw = *(const uint4*)(tile + ((column ^ swizzle >> log2_words) << log2_words) + word);
    if (swizzle & 1) { raw = make_uint4(raw.y, raw.x, raw.w, raw.z); }
    if (swizzle & 2) { raw = make_uint4(raw.z, raw.w, raw.x, raw.y); }
    return raw;
}

// transposed[first_column + c][first_row ..] = the tile, c < num_columns; rows beyond `rows` are left out.
// The whole block calls, after a __syncthreads. rows is a multiple of 16.
__device__ static inline void store_transposed(uint8_t* transposed, const uint32_t* tile, int log2_words,
                                               int num_columns, int first_column, int first_row, int rows) {
    int log2_chunks = log2_words - 2;
    for (int i = threadIdx.x; i < num_columns << log2_chunks; i += blockDim.x) {
        int chunk = i & ((1 << log2_chunks) - 1), column = i >> log2_chunks;
        int row = first_row + chunk * 16;
        if (row < rows) {
            *(uint4*)(transposed + (size_t)(first_column + column) * rows + row) =
                tile_chunk(tile, log2_words, column, chunk);
        }
    }
}

// Which forms a kernel knows to be there when it is compiled: checks at run time cost elementwise kernels a tenth.
enum {
    FORMS_ANY,  // nothing is known
    FORMS_WIDE, // BF16 only
    FORMS_FP8,  // there is a slot
    FORMS_BOTH  // FP8 row-major and transposed, no BF16
};

static inline int forms_are_both(FormsOut out) {
    return out.data != NULL && out.transposed != NULL && out.wide == NULL;
}

// Write row r of a patch in the row-major forms, raise amax, keep the codes for the tile. `at` = element offset.
// inside 0: the row does not exist, only its codes are made.
template <typename FP8, int FORMS>
__device__ static inline void emit_row(const FormsOut& out, Fp8Patch* patch, int r, const float v[8], float scale,
                                       size_t at, int inside, float* amax) {
    if (FORMS != FORMS_BOTH && out.wide != NULL && inside) { store_vector(out.wide + at, pack8(v)); }
    if (FORMS != FORMS_WIDE && (FORMS != FORMS_ANY || out.slot != NULL)) {
        *amax = inside ? amax8(*amax, v) : *amax;
        patch->left[r] = fp8_pack<FP8>(v[0] * scale, v[1] * scale, v[2] * scale, v[3] * scale);
        patch->right[r] = fp8_pack<FP8>(v[4] * scale, v[5] * scale, v[6] * scale, v[7] * scale);
        if ((FORMS == FORMS_BOTH || out.data != NULL) && inside) {
            *(uint2*)(out.data + at) = make_uint2(patch->left[r], patch->right[r]);
        }
    }
}

// Elementwise producers (gelu, quantize) work on tiles of 64 rows x 128 columns: 16 x 16 patches, one per thread. A
// block has one tile; if columns are summed, it walks down the rows of its 128 columns in strides of gridDim.y tiles.
#define ELEMENT_LOG2_WORDS 4 // 64 rows / 4
#define ELEMENT_THREADS 256
#define ELEMENT_ROWS (PATCH_ROWS << ELEMENT_LOG2_WORDS)
#define ELEMENT_GROUPS (ELEMENT_THREADS >> ELEMENT_LOG2_WORDS)
#define ELEMENT_COLS (PATCH_COLS * ELEMENT_GROUPS)
#define ELEMENT_STRIPS 256 // at most this many blocks share a column that is summed: partial sums per column

static inline dim3 element_grid(int rows, int cols, int sums) {
    size_t strips = ceil_div((size_t)rows, ELEMENT_ROWS), most = sums ? ELEMENT_STRIPS : 65535;
    strips = strips < most ? strips : most;
    return dim3((unsigned)ceil_div((size_t)cols, ELEMENT_COLS), (unsigned)strips);
}

// Where a thread's patch lies.
typedef struct {
    int group;  // 8-column group in the tile
    int word;   // 4-row word in the tile
    int column; // first column in the tensor
} ElementPlace;

__device__ static inline ElementPlace element_place(void) {
    ElementPlace place;
    place.group = threadIdx.x % ELEMENT_GROUPS;
    place.word = threadIdx.x / ELEMENT_GROUPS;
    place.column = blockIdx.x * ELEMENT_COLS + place.group * PATCH_COLS;
    return place;
}

// Is row r of the patch that starts at `row` in the tensor? In FP8, rows are a multiple of 16: a patch is in or out.
template <int FORMS>
__device__ static inline int element_inside(ElementPlace place, int row, int r, int rows, int cols) {
    return place.column < cols && (FORMS == FORMS_ANY ? row + r : row) < rows;
}

// The thread's patch of x, 0 where there is none. NOTE: kernels call this before their loop and at its end, and have a
// loop even for one tile: elsewhere the compiler saves registers and loads each row when its turn comes, one at a time.
template <int FORMS>
__device__ static inline void element_load(uint4 raw[PATCH_ROWS], const bf16* x, ElementPlace place, int first_row,
                                           int rows, int cols) {
    int row = first_row + place.word * PATCH_ROWS;
    const bf16* from = x + (size_t)row * cols + place.column;
#pragma unroll
    for (int r = 0; r < PATCH_ROWS; r++, from += cols) {
        raw[r] = make_uint4(0, 0, 0, 0);
        if (element_inside<FORMS>(place, row, r, rows, cols)) { raw[r] = load_vector(from); }
    }
}

// The transposed form of a block's tile, through shared memory. The whole block calls; the tile may be written again
// after a __syncthreads.
__device__ static inline void element_store_transposed(const FormsOut& out, uint32_t* tile, const Fp8Patch* patch,
                                                       ElementPlace place, int first_row, int rows, int cols) {
    patch_to_tile(tile, ELEMENT_LOG2_WORDS, place.group * PATCH_COLS, place.word, patch);
    __syncthreads();
    const int chunks = ELEMENT_ROWS / 16;
#pragma unroll
    for (int i = 0; i < ELEMENT_COLS * chunks / ELEMENT_THREADS; i++) {
        int at = threadIdx.x + i * ELEMENT_THREADS, chunk = at % chunks, c = at / chunks;
        int row = first_row + chunk * 16, column = blockIdx.x * ELEMENT_COLS + c;
        if (row < rows && column < cols) {
            *(uint4*)(out.transposed + (size_t)column * rows + row) = tile_chunk(tile, ELEMENT_LOG2_WORDS, c, chunk);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// column sums in fixed order: blocks write partial sums (num_partials, cols) into the workspace, a second kernel adds
// them up into the FP32 gradient: a lane every 32nd, first to last, then the lanes

#define COLUMN_SUMS 3            // most column sums one op makes (layernorm_backward)
#define COLUMN_PARTIALS 512      // partial sums per column, at most...
#define COLUMN_PARTIALS_WIDE 256 // ...and when the op makes three and has more columns than
#define COLUMN_WIDE 4096

typedef struct {
    float* to[COLUMN_SUMS]; // (cols) FP32, += ; NULL: not wanted
} ColumnSums;

size_t reduction_workspace_bytes(Device* dev, int cols) {
    (void)dev;
    size_t narrow = (size_t)COLUMN_PARTIALS * (cols < COLUMN_WIDE ? cols : COLUMN_WIDE);
    size_t wide = (size_t)COLUMN_PARTIALS_WIDE * cols;
    size_t bytes = COLUMN_SUMS * sizeof(float) * (narrow > wide ? narrow : wide);
    return bytes > 65536 ? bytes : 65536; // global_norm's partial sums have no columns
}

// The workspace as `count` floats.
static inline float* workspace_floats(Device* dev, const char* name, size_t count) {
    check(dev->workspace_bytes >= count * sizeof(float), "%s: workspace has %zu bytes, want %zu (%s)", name,
          dev->workspace_bytes, count * sizeof(float), "reduction_workspace_bytes");
    return (float*)dev->workspace;
}

// to[c] = sum over row lanes of the threads' sums. Threads hold 8 columns each: thread (lane, group) those of `group`.
// The whole block calls; `active` threads have sums; buffer: num_lanes * num_groups * 8 floats of shared memory.
__device__ static inline void block_column_sums(float* to, float* buffer, const float sums[8], int active, int lane,
                                                int group, int num_lanes, int num_groups, int num_columns) {
    __syncthreads(); // the buffer may still be read as something else
    if (active) {
        float4* mine = (float4*)(buffer + (lane * num_groups + group) * PATCH_COLS);
        mine[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
        mine[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < num_columns; c += blockDim.x) {
        float sum = 0.0f;
        for (int l = 0; l < num_lanes; l++) {
            sum += buffer[l * num_groups * PATCH_COLS + c];
        }
        to[c] = sum;
    }
}

#define COLUMN_SUM_LANES 32

// sums.to[s][c] += sum over p of partials[s][p][c].   grid (cols / 32, sums), block (32, COLUMN_SUM_LANES)
// Latency-bound: the more loads on the way the better.
__global__ void __launch_bounds__(32 * COLUMN_SUM_LANES)
    column_sums_kernel(ColumnSums sums, const float* partials, int num_partials, int cols) {
    kernel_begin();
    __shared__ float lanes[COLUMN_SUM_LANES][32];
    int c = blockIdx.x * 32 + threadIdx.x;
    const float* from = partials + (size_t)blockIdx.y * num_partials * cols;
    float sum = 0.0f;
    if (c < cols) {
#pragma unroll 8
        for (int p = threadIdx.y; p < num_partials; p += COLUMN_SUM_LANES) {
            sum += from[(size_t)p * cols + c];
        }
    }
    lanes[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < cols) {
#pragma unroll
        for (int l = 1; l < COLUMN_SUM_LANES; l++) {
            sum += lanes[l][threadIdx.x];
        }
        float* to = blockIdx.y == 0 ? sums.to[0] : blockIdx.y == 1 ? sums.to[1] : sums.to[2];
        if (to != NULL) { to[c] += sum; }
    }
}

static inline void column_sums_add(Device* dev, ColumnSums sums, int num_sums, const float* partials, int num_partials,
                                   int cols) {
    dim3 grid((unsigned)ceil_div((size_t)cols, 32), (unsigned)num_sums);
    launch(dev, column_sums_kernel, grid, dim3(32, COLUMN_SUM_LANES), 0, sums, partials, num_partials, cols);
}

// ---------------------------------------------------------------------------------------------------------------------
// clusters: blocks that run together and read each other's shared memory. A launch without the attribute is a cluster
// of one.

__device__ static inline uint32_t cluster_rank(void) {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Every thread of every block arrives, then waits; what was written before the arrival is visible after the wait.
__device__ static inline void cluster_arrive(void) {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ static inline void cluster_wait(void) {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// *p as it stands in the shared memory of block `rank` of the cluster.
__device__ static inline float2 cluster_load(const float2* p, uint32_t rank) {
    uint32_t mine = (uint32_t)__cvta_generic_to_shared(p), theirs;
    float2 value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(theirs) : "memory");
    return value;
}

#endif
