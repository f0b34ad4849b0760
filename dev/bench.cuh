// The harness of the memory-bound benchmarks: inputs that the host knows without a copy, poisoned outputs, checks of
// sampled rows at the very sizes that are timed, cold-cache timing, and one line per op and size:
//
//     op, size, microseconds, GB/s, share of what a device copy reaches in the same run
//
// A benchmark includes the production .cuh first, then this file. The bytes it reports are those an op has to move,
// each input once and each output once: an op that moves more looks slow, as it should.
#ifndef BENCH_CUH
#define BENCH_CUH

#include <math.h>
#include <stdarg.h>

#include "../lib/gpu.cuh"

// device_create asks for an attention and device_free releases matmul's plans: a benchmark of neither has neither.
#ifndef ATTENTION_CUH
void attention_select(Device* dev, AttentionKind wanted) {
    (void)dev, (void)wanted;
}
void attention_release(Device* dev) {
    (void)dev;
}
#endif
#ifndef MATMUL_CUH
void matmul_release(Device* dev) {
    (void)dev;
}
#endif

#define BENCH_REPEATS 21
#define BENCH_FLUSH_BYTES ((size_t)512 << 20) // several times the L2 cache
#define BENCH_SAMPLED_ROWS 6

typedef struct {
    Device* dev;
    float4* flush;     // BENCH_FLUSH_BYTES
    float* flush_sink; // keeps the flushing reads alive
    double copy_gbps;  // device copy of this run, bytes read + bytes written
    int checks, failures;
} Bench;

// The sizes of every benchmark: rows x C of d12 (B = 64), d48 (B = 16), gpt3:c4096 (B = 4, T = 2048), and an odd one.
typedef struct {
    const char* name;
    int rows, C;
} BenchSize;

static const BenchSize bench_sizes[] = {
    {"d12", 65536, 768}, {"d48", 16384, 1600}, {"c4096", 8192, 4096}, {"odd", 5072, 1232}};
#define BENCH_NUM_SIZES ((int)(sizeof(bench_sizes) / sizeof(bench_sizes[0])))

// ---------------------------------------------------------------------------------------------------------------------
// inputs: element i of a tensor is a function of i and a seed, on host and device

// About normal, standard deviation 1: the sum of the four low bytes of a hash (splitmix64, Steele et al. 2014).
HOST_DEVICE static inline float bench_value(int seed, size_t i) {
    uint64_t z = (uint64_t)i + (uint64_t)seed * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    int sum = (int)(z & 255) + (int)((z >> 8) & 255) + (int)((z >> 16) & 255) + (int)((z >> 24) & 255);
    return (float)(sum - 510) * (1.0f / 147.8f);
}

HOST_DEVICE static inline float bench_bf16_value(int seed, size_t i) {
    return bf16_round(bench_value(seed, i));
}

__global__ void bench_fill_bf16_kernel(bf16* x, size_t n, int seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) {
        x[i] = __float2bfloat16_rn(bench_value(seed, i));
    }
}

__global__ void bench_fill_float_kernel(float* x, size_t n, int seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) {
        x[i] = bench_value(seed, i);
    }
}

static inline bf16* bench_bf16(Bench* b, size_t n, int seed) {
    bf16* x = (bf16*)device_malloc(b->dev, n * sizeof(bf16));
    bench_fill_bf16_kernel<<<2048, 256, 0, b->dev->stream>>>(x, n, seed);
    cuda_check(cudaGetLastError());
    return x;
}

static inline float* bench_float(Bench* b, size_t n, int seed) {
    float* x = (float*)device_malloc(b->dev, n * sizeof(float));
    bench_fill_float_kernel<<<2048, 256, 0, b->dev->stream>>>(x, n, seed);
    cuda_check(cudaGetLastError());
    return x;
}

// Every byte 0xFF: a NaN in BF16, FP32 and both FP8 formats.
static inline void bench_poison(Bench* b, void* p, size_t bytes) {
    cuda_check(cudaMemsetAsync(p, 0xFF, bytes, b->dev->stream));
}

static inline void* bench_poisoned(Bench* b, size_t bytes) {
    void* p = device_malloc(b->dev, bytes);
    bench_poison(b, p, bytes);
    return p;
}

// ---------------------------------------------------------------------------------------------------------------------
// checks

// Counts a check; prints the first failures.
__attribute__((format(printf, 3, 4))) static inline void bench_expect(Bench* b, int condition, const char* format,
                                                                      ...) {
    b->checks++;
    if (condition) { return; }
    if (b->failures++ < 20) {
        va_list args;
        va_start(args, format);
        printf("FAILED ");
        vprintf(format, args);
        printf("\n");
        va_end(args);
    }
}

static inline int bench_sampled_row(int sample, int rows) { // first, last, others in between
    return sample == 0 ? 0 : sample == 1 ? rows - 1 : (int)((size_t)sample * 2654435761u % (size_t)rows);
}

// `count` elements of `size` bytes at a distance of `stride` bytes, to the host.
static inline void bench_copy_strided(Bench* b, void* to, const void* from, size_t size, size_t stride, size_t count) {
    cuda_check(cudaMemcpy2DAsync(to, size, from, stride, size, count, cudaMemcpyDeviceToHost, b->dev->stream));
    device_sync(b->dev);
}

// A floating-point result: off by at most `relative` of itself plus `absolute`. NaN fails.
static inline void bench_expect_near(Bench* b, const char* what, size_t at, double got, double want, double relative,
                                     double absolute) {
    bench_expect(b, fabs(got - want) <= relative * fabs(want) + absolute, "%s: element %zu is %.9g, want %.9g", what,
                 at, got, want);
}

// A producer's output in every form, with its slot.
typedef struct {
    bf16* wide;          // (rows, cols), NULL: not made
    uint8_t* data;       // (rows, cols), NULL: not made
    uint8_t* transposed; // (cols, rows)
    ScaleSlot* slot;     // device
    float scale;
    int is_e5m2;
    int rows, cols;
} BenchForms;

static inline BenchForms bench_forms_create(Bench* b, int rows, int cols, int is_e5m2, int wide, int fp8) {
    size_t n = (size_t)rows * cols;
    BenchForms f = {NULL, NULL, NULL, NULL, 0.0f, is_e5m2, rows, cols};
    if (wide) { f.wide = (bf16*)bench_poisoned(b, n * sizeof(bf16)); }
    if (fp8) {
        f.data = (uint8_t*)bench_poisoned(b, n);
        f.transposed = (uint8_t*)bench_poisoned(b, n);
        f.scale = is_e5m2 ? 3000.0f : 40.0f;
        ScaleSlot slot;
        scale_slot_init(&slot, is_e5m2 ? E5M2_MAX : E4M3_MAX, SLOT_DELAYED);
        slot.scale = f.scale;
        f.slot = (ScaleSlot*)device_malloc(b->dev, sizeof(ScaleSlot));
        device_copy_in(b->dev, f.slot, &slot, sizeof(slot));
        device_sync(b->dev);
    }
    return f;
}

static inline void bench_forms_free(Bench* b, BenchForms f) {
    void* pointers[] = {f.wide, f.data, f.transposed, f.slot};
    for (int i = 0; i < 4; i++) {
        if (pointers[i] != NULL) { device_release(b->dev, pointers[i]); }
    }
}

static inline ScaleRecipe bench_recipe(void) {
    return ScaleRecipe{AMAX_HISTORY_MAX, AMAX_MAX, 0, 1.0f};
}

static inline E4m3Tensor bench_e4m3(BenchForms f) {
    return E4m3Tensor{f.wide, (e4m3*)f.data, (e4m3*)f.transposed, f.slot, bench_recipe(), 0, 1};
}

static inline E5m2Tensor bench_e5m2(BenchForms f) {
    return E5m2Tensor{f.wide, (e5m2*)f.data, (e5m2*)f.transposed, f.slot, bench_recipe(), 0, 1};
}

// One row of all forms against want (cols). The FP32 result may be off by 2^-19 of its terms (bounded by `terms`), so a
// BF16 value or an FP8 code may fall on the other side of a rounding boundary: one step, and few of them (2^-8).
static inline void bench_check_row(Bench* b, const char* op, const BenchForms* f, int row, const double* want,
                                   double terms) {
    size_t cols = (size_t)f->cols, flips = 0;
    if (f->wide != NULL) {
        float* got = (float*)malloc_or_die(cols * sizeof(float));
        bf16_to_host(b->dev, got, f->wide + (size_t)row * cols, cols);
        for (size_t c = 0; c < cols; c++) { // a BF16 step is at most 2^-7 of the value
            bench_expect_near(b, op, (size_t)row * cols + c, got[c], bf16_round((float)want[c]), 0x1p-7,
                              0x1p-19 * terms);
        }
        free(got);
    }
    if (f->data != NULL) {
        uint8_t* bytes = (uint8_t*)malloc_or_die(2 * cols);
        device_copy_out(b->dev, bytes, f->data + (size_t)row * cols, cols);
        bench_copy_strided(b, bytes + cols, f->transposed + row, 1, (size_t)f->rows, cols);
        for (size_t c = 0; c < cols; c++) {
            float scaled = (float)want[c] * f->scale;
            int code = f->is_e5m2 ? e5m2_from_float(scaled) : e4m3_from_float(scaled);
            int distance = abs((bytes[c] & 127) - (code & 127));
            int same_sign = ((bytes[c] ^ code) & 128) == 0 || (bytes[c] & 127) + (code & 127) <= 1;
            bench_expect(b, distance <= 1 && same_sign, "%s: code (%d, %zu) is 0x%02X, want 0x%02X", op, row, c,
                         bytes[c], code);
            bench_expect(b, bytes[c] == bytes[cols + c], "%s: code (%d, %zu) is 0x%02X, transposed 0x%02X", op, row, c,
                         bytes[c], bytes[cols + c]);
            flips += distance != 0;
        }
        bench_expect(b, flips <= 2 + cols / 256, "%s: %zu of %zu codes of row %d are off by one", op, flips, cols, row);
        free(bytes);
    }
}

// transposed against data everywhere, on the device.
__global__ void bench_transposed_kernel(unsigned long long* mismatches, const uint8_t* data, const uint8_t* transposed,
                                        int rows, int cols) {
    size_t n = (size_t)rows * cols;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) {
        if (data[i] != transposed[i % cols * rows + i / cols]) { atomicAdd(mismatches, 1ull); }
    }
}

// After the sampled rows: the other layout everywhere, and what the slot says.
static inline void bench_check_forms(Bench* b, const char* op, const BenchForms* f) {
    if (f->data == NULL) { return; }
    unsigned long long mismatches = 0;
    unsigned long long* counter = (unsigned long long*)device_malloc(b->dev, sizeof(*counter));
    device_zero(b->dev, counter, sizeof(*counter));
    bench_transposed_kernel<<<4096, 256, 0, b->dev->stream>>>(counter, f->data, f->transposed, f->rows, f->cols);
    cuda_check(cudaGetLastError());
    device_copy_out(b->dev, &mismatches, counter, sizeof(mismatches));
    device_release(b->dev, counter);
    ScaleSlot slot;
    device_copy_out(b->dev, &slot, f->slot, sizeof(slot));
    bench_expect(b, mismatches == 0, "%s: %llu codes differ between the two layouts", op, mismatches);
    bench_expect(b, slot.descale == 1.0f / f->scale, "%s: descale %g, want %g", op, slot.descale, 1.0f / f->scale);
}

// The slot's amax after a recorded pass.
static inline void bench_check_amax(Bench* b, const char* op, const BenchForms* f, double at_least, double at_most) {
    ScaleSlot slot;
    device_copy_out(b->dev, &slot, f->slot, sizeof(slot));
    bench_expect(b, slot.amax >= at_least * (1 - 0x1p-19) && slot.amax <= at_most, "%s: amax %g, want %g..%g", op,
                 slot.amax, at_least, at_most);
}

// ---------------------------------------------------------------------------------------------------------------------
// timing

__global__ void bench_flush_kernel(float* sink, const float4* from, size_t n) {
    float sum = 0.0f;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) {
        float4 v = from[i];
        sum += v.x + v.y + v.z + v.w;
    }
    if (sum == 1.2345e30f) { *sink = sum; } // never, but the compiler cannot know
}

typedef void (*BenchRun)(Device* dev, const void* args);

static int bench_compare_floats(const void* a, const void* b) {
    float x = *(const float*)a, y = *(const float*)b;
    return (x > y) - (x < y);
}

// Median microseconds of run(dev, args) on a cold L2. Flushed by reading, so that no dirty lines are written back
// during the timed part.
static inline float bench_time(Bench* b, BenchRun run, const void* args) {
    float times[BENCH_REPEATS];
    cudaEvent_t start, stop;
    cuda_check(cudaEventCreate(&start));
    cuda_check(cudaEventCreate(&stop));
    for (int r = -3; r < BENCH_REPEATS; r++) { // three to warm up
        bench_flush_kernel<<<1024, 256, 0, b->dev->stream>>>(b->flush_sink, b->flush,
                                                             BENCH_FLUSH_BYTES / sizeof(float4));
        cuda_check(cudaGetLastError());
        cuda_check(cudaEventRecord(start, b->dev->stream));
        run(b->dev, args);
        cuda_check(cudaEventRecord(stop, b->dev->stream));
        cuda_check(cudaEventSynchronize(stop));
        float ms = 0.0f;
        cuda_check(cudaEventElapsedTime(&ms, start, stop));
        if (r >= 0) { times[r] = ms * 1e3f; }
    }
    cuda_check(cudaEventDestroy(start));
    cuda_check(cudaEventDestroy(stop));
    qsort(times, BENCH_REPEATS, sizeof(float), bench_compare_floats);
    return times[BENCH_REPEATS / 2];
}

// Time it and print its line.
static inline void bench_report(Bench* b, const char* op, const char* size, BenchRun run, const void* args,
                                double bytes) {
    float us = bench_time(b, run, args);
    double gbps = bytes / us * 1e-3;
    printf("%-28s %-22s %9.1f us %7.0f GB/s %5.1f%% of copy\n", op, size, us, gbps, 100.0 * gbps / b->copy_gbps);
    fflush(stdout);
}

static void bench_copy_run(Device* dev, const void* args) {
    char* p = (char*)args;
    cuda_check(cudaMemcpyAsync(p, p + BENCH_FLUSH_BYTES, BENCH_FLUSH_BYTES, cudaMemcpyDeviceToDevice, dev->stream));
}

// Opens GPU 0 with a workspace for `workspace_cols` columns and measures the copy that everything is compared with.
static inline Bench bench_create(int workspace_cols) {
    Bench b = {};
    b.dev = device_create(DeviceOptions{0, 0, 0, ATTENTION_AUTO});
    size_t workspace_bytes = reduction_workspace_bytes(b.dev, workspace_cols);
    device_set_workspace(b.dev, device_malloc(b.dev, workspace_bytes), workspace_bytes);
    b.flush = (float4*)bench_float(&b, BENCH_FLUSH_BYTES / sizeof(float), 99);
    b.flush_sink = (float*)device_malloc(b.dev, sizeof(float));
    void* pair = bench_float(&b, 2 * BENCH_FLUSH_BYTES / sizeof(float), 98);
    float us = bench_time(&b, bench_copy_run, pair);
    b.copy_gbps = 2.0 * (double)BENCH_FLUSH_BYTES / us * 1e-3;
    device_release(b.dev, pair);
    printf("%s, %d multiprocessors; device copy of %zu MiB: %.0f GB/s (read + written)\n", device_name(b.dev),
           b.dev->properties.multiProcessorCount, BENCH_FLUSH_BYTES >> 20, b.copy_gbps);
    fflush(stdout);
    return b;
}

// Prints the verdict; the exit status for main.
static inline int bench_finish(Bench* b) {
    device_release(b->dev, b->flush);
    device_release(b->dev, b->flush_sink);
    device_release(b->dev, b->dev->workspace);
    device_free(b->dev);
    printf("%d values checked, %d wrong\n", b->checks, b->failures);
    return b->failures ? EXIT_FAILURE : EXIT_SUCCESS;
}

#endif
