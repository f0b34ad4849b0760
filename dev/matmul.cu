// The linear layers alone: forward, dgrad and wgrad of the four linears of a block and of the LM head, BF16 and FP8, at
// the sizes of d12, d48 and gpt3:c4096. Every product is checked on sampled elements against FP64 on the host.
//
//     bench-matmul [--model d12|d48|c4096] [--autotune FILE]
//
// The columns: microseconds, TFLOP/s and share of the dense peak of the format, FP8 over BF16, and the distance from
// FP64 of both, diff = 1 - 2<x,y> / (|x|^2 + |y|^2). The chip is power-limited: compare within one run only.
#include "../lib/attention.cuh" // device_create picks an attention
#include "../lib/quantize.cuh"  // which may need it
#include "../lib/matmul.cuh"
#include "../lib/roofline.h"

enum { REPEATS = 15, SAMPLES = 48, SEED_X = 1, SEED_W = 2, SEED_DY = 3 };
#define SCALE_E4M3 64.0f   // values stay below 3.5: 3.5 * 64 < 448
#define SCALE_E5M2 8192.0f // 3.5 * 8192 < 57344
#define DW_START 3.0f      // what dw holds before: the product must be added to it

// ---------------------------------------------------------------------------------------------------------------------
// inputs: element i of a tensor is a function of i, so that the host knows any element without a copy

// About normal, standard deviation 1: the sum of the four bytes of a hash (splitmix64, Steele et al. 2014).
HOST_DEVICE static inline float input_value(int seed, size_t i) {
    uint64_t z = (uint64_t)i + (uint64_t)seed * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    int sum = (int)(z & 255) + (int)((z >> 8) & 255) + (int)((z >> 16) & 255) + (int)((z >> 24) & 255);
    return (float)(sum - 510) * (1.0f / 147.8f);
}

// The value that the product sees, after the rounding to its storage format.
static double stored_value(int fp8, int seed, size_t i) {
    float v = input_value(seed, i);
    if (!fp8) { return bf16_round(v); }
    if (seed == SEED_DY) { return float_from_e5m2(e5m2_from_float(v * SCALE_E5M2)) / SCALE_E5M2; }
    return float_from_e4m3(e4m3_from_float(v * SCALE_E4M3)) / SCALE_E4M3;
}

__global__ void fill_bf16_kernel(bf16* x, size_t n, int seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) {
        x[i] = __float2bfloat16_rn(input_value(seed, i));
    }
}

// data (rows, cols) and transposed (cols, rows)
__global__ void fill_fp8_kernel(uint8_t* data, uint8_t* transposed, int rows, int cols, int seed) {
    size_t n = (size_t)rows * cols;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) {
        float v = input_value(seed, i);
        uint8_t code = seed == SEED_DY ? e5m2_from_float(v * SCALE_E5M2) : e4m3_from_float(v * SCALE_E4M3);
        data[i] = code;
        transposed[i % cols * rows + i / cols] = code;
    }
}

__global__ void fill_float_kernel(float* x, size_t n, float value) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) {
        x[i] = value;
    }
}

// One linear with all its tensors, in one precision. Outputs: y (rows, OC), dx (rows, C), dw (OC, C).
typedef struct {
    int fp8, rows, C, OC;
    E4m3Tensor x, w;
    E5m2Tensor dy;
    bf16* y;
    bf16* dx;
    float* dw;
    ScaleSlot* slots; // (2) for E4M3 and E5M2
} Linear;

static Linear linear_create(Device* dev, int fp8, int rows, int C, int OC) {
    Linear l = {};
    l.fp8 = fp8, l.rows = rows, l.C = C, l.OC = OC;
    size_t n_x = (size_t)rows * C, n_w = (size_t)OC * C, n_dy = (size_t)rows * OC;
    l.y = (bf16*)device_malloc(dev, n_dy * sizeof(bf16));
    l.dx = (bf16*)device_malloc(dev, n_x * sizeof(bf16));
    l.dw = (float*)device_malloc(dev, n_w * sizeof(float));
    if (!fp8) {
        l.x.wide = (bf16*)device_malloc(dev, n_x * sizeof(bf16));
        l.w.wide = (bf16*)device_malloc(dev, n_w * sizeof(bf16));
        l.dy.wide = (bf16*)device_malloc(dev, n_dy * sizeof(bf16));
        fill_bf16_kernel<<<2048, 256, 0, dev->stream>>>(l.x.wide, n_x, SEED_X);
        fill_bf16_kernel<<<2048, 256, 0, dev->stream>>>(l.w.wide, n_w, SEED_W);
        fill_bf16_kernel<<<2048, 256, 0, dev->stream>>>(l.dy.wide, n_dy, SEED_DY);
        cuda_check(cudaGetLastError());
        return l;
    }
    ScaleSlot slots[2];
    scale_slot_init(&slots[0], E4M3_MAX, SLOT_DELAYED);
    scale_slot_init(&slots[1], E5M2_MAX, SLOT_DELAYED);
    slots[0].descale = 1.0f / SCALE_E4M3;
    slots[1].descale = 1.0f / SCALE_E5M2;
    l.slots = (ScaleSlot*)device_malloc(dev, sizeof(slots));
    device_copy_in(dev, l.slots, slots, sizeof(slots));
    l.x.slot = l.w.slot = &l.slots[0];
    l.dy.slot = &l.slots[1];
    l.x.data = (e4m3*)device_malloc(dev, n_x);
    l.x.transposed = (e4m3*)device_malloc(dev, n_x);
    l.w.data = (e4m3*)device_malloc(dev, n_w);
    l.w.transposed = (e4m3*)device_malloc(dev, n_w);
    l.dy.data = (e5m2*)device_malloc(dev, n_dy);
    l.dy.transposed = (e5m2*)device_malloc(dev, n_dy);
    fill_fp8_kernel<<<2048, 256, 0, dev->stream>>>((uint8_t*)l.x.data, (uint8_t*)l.x.transposed, rows, C, SEED_X);
    fill_fp8_kernel<<<2048, 256, 0, dev->stream>>>((uint8_t*)l.w.data, (uint8_t*)l.w.transposed, OC, C, SEED_W);
    fill_fp8_kernel<<<2048, 256, 0, dev->stream>>>((uint8_t*)l.dy.data, (uint8_t*)l.dy.transposed, rows, OC, SEED_DY);
    cuda_check(cudaGetLastError());
    device_sync(dev); // `slots` is on this function's stack
    return l;
}

static void linear_free(Device* dev, Linear* l) {
    void* all[] = {l->x.wide,  l->x.data,  l->x.transposed,  l->w.wide, l->w.data, l->w.transposed,
                   l->dy.wide, l->dy.data, l->dy.transposed, l->y,      l->dx,     l->dw,           l->slots};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        device_release(dev, all[i]);
    }
}

static void linear_run(Device* dev, const Linear* l, MatmulRole role) {
    if (role == MATMUL_FORWARD) { matmul_forward(dev, l->y, l->x, l->w, NULL, l->rows, l->C, l->OC); }
    if (role == MATMUL_DGRAD) { matmul_dgrad(dev, l->dx, l->dy, l->w, l->rows, l->C, l->OC); }
    if (role == MATMUL_WGRAD) { matmul_wgrad(dev, l->dw, l->dy, l->x, 1, l->rows, l->C, l->OC); }
}

// ---------------------------------------------------------------------------------------------------------------------
// checking

// Operands of element (i, j) of a product, k-th factor pair.
static double factor_pair(const Linear* l, MatmulRole role, size_t i, size_t j, size_t k) {
    size_t C = (size_t)l->C, OC = (size_t)l->OC;
    if (role == MATMUL_FORWARD) { // y[i, j] = sum_k x[i, k] w[j, k]
        return stored_value(l->fp8, SEED_X, i * C + k) * stored_value(l->fp8, SEED_W, j * C + k);
    }
    if (role == MATMUL_DGRAD) { // dx[i, j] = sum_k dy[i, k] w[k, j]
        return stored_value(l->fp8, SEED_DY, i * OC + k) * stored_value(l->fp8, SEED_W, k * C + j);
    }
    return stored_value(l->fp8, SEED_DY, k * OC + i) * stored_value(l->fp8, SEED_X, k * C + j); // dw[i, j]
}

// The product once more into poisoned outputs (dw: into DW_START), sampled elements against FP64. Returns diff; prints
// and counts elements that are off by more than they may be.
//
// What an element may be off by, worst case: the store (half an ulp: up to 2^-8 of a BF16, 2^-24 of an FP32), and per step of
// the tensor core one truncation of the accumulator. Its width, relative to the largest partial sum: FP8 keeps 14 bits
// (2^-13), over all of k with fast accumulation, else within pieces of 128 that are then added in FP32; BF16 keeps FP32
// with some bits truncated (2^-21 taken). Steps are 32 factors deep in FP8, 16 in BF16. A wrong layout is off by 1.4
// standard deviations of the result, ten times more than the largest of these.
static double linear_check(Device* dev, const Linear* l, MatmulRole role, int* failures) {
    size_t rows = (size_t)(role == MATMUL_WGRAD ? l->OC : l->rows);
    size_t cols = (size_t)(role == MATMUL_FORWARD ? l->OC : l->C);
    int K = role == MATMUL_FORWARD ? l->C : role == MATMUL_DGRAD ? l->OC : l->rows;
    void* output = role == MATMUL_FORWARD ? (void*)l->y : role == MATMUL_DGRAD ? (void*)l->dx : (void*)l->dw;
    if (role == MATMUL_WGRAD) {
        fill_float_kernel<<<2048, 256, 0, dev->stream>>>(l->dw, rows * cols, DW_START);
        cuda_check(cudaGetLastError());
    } else {
        cuda_check(cudaMemsetAsync(output, 0xFF, rows * cols * sizeof(bf16), dev->stream)); // NaN everywhere
    }
    linear_run(dev, l, role);
    double xy = 0.0, xx = 0.0, yy = 0.0;
    for (int s = 0; s < SAMPLES; s++) {
        size_t i = s == 0 ? 0 : s == 1 ? rows - 1 : (size_t)s * 2654435761u % rows; // corners, then anywhere
        size_t j = s == 0 ? 0 : s == 1 ? cols - 1 : (size_t)s * 40503u % cols;
        double sum = 0.0, piece = 0.0, largest = 0.0, largest_piece = 0.0;
        for (int k = 0; k < K; k++) {
            double term = factor_pair(l, role, i, j, (size_t)k);
            piece = k % 128 == 0 ? term : piece + term;
            sum += term;
            largest = fmax(largest, fabs(sum));
            largest_piece = fmax(largest_piece, fabs(piece));
        }
        double want = sum + (role == MATMUL_WGRAD ? DW_START : 0.0), bound;
        if (!l->fp8) {
            bound = K / 16.0 * 0x1p-21 * largest;
        } else if (role == MATMUL_FORWARD) {
            bound = K / 32.0 * 0x1p-13 * largest;
        } else {
            bound = K / 32.0 * 0x1p-13 * largest_piece + K / 128.0 * 0x1p-23 * largest;
        }
        float got = 0.0f;
        if (role == MATMUL_WGRAD) {
            device_copy_out(dev, &got, (const float*)output + i * cols + j, sizeof(got));
            bound += 0x1p-23 * fabs(want);
        } else {
            bf16_to_host(dev, &got, (const bf16*)output + i * cols + j, 1);
            bound += 0x1p-8 * fabs(want) + 0x1p-8 * bound;
        }
        if (!(fabs((double)got - want) <= bound)) { // NaN is a failure too
            printf("FAILED %s rows, C, OC = %d, %d, %d: element (%zu, %zu) is %g, want %g +- %g\n",
                   matmul_role_name({role, l->fp8, 0, 0, 0, 0, 0}), l->rows, l->C, l->OC, i, j, got, want, bound);
            *failures += 1;
        }
        xy += got * want, xx += (double)got * got, yy += want * want;
    }
    return 1.0 - 2.0 * xy / (xx + yy);
}

// ---------------------------------------------------------------------------------------------------------------------
// timing

static int compare_floats(const void* a, const void* b) {
    float x = *(const float*)a, y = *(const float*)b;
    return (x > y) - (x < y);
}

// Median microseconds of one product, with the L2 cache flushed before each.
static float linear_time(Device* dev, const Linear* l, MatmulRole role, void* flush, size_t flush_bytes) {
    float us[REPEATS];
    cudaEvent_t start, stop;
    cuda_check(cudaEventCreate(&start));
    cuda_check(cudaEventCreate(&stop));
    for (int r = -2; r < REPEATS; r++) {
        cuda_check(cudaMemsetAsync(flush, r & 255, flush_bytes, dev->stream));
        cuda_check(cudaEventRecord(start, dev->stream));
        linear_run(dev, l, role);
        cuda_check(cudaEventRecord(stop, dev->stream));
        cuda_check(cudaEventSynchronize(stop));
        float ms = 0.0f;
        cuda_check(cudaEventElapsedTime(&ms, start, stop));
        if (r >= 0) { us[r] = 1000.0f * ms; }
    }
    cuda_check(cudaEventDestroy(start));
    cuda_check(cudaEventDestroy(stop));
    qsort(us, REPEATS, sizeof(float), compare_floats);
    return us[REPEATS / 2];
}

int main(int argc, char** argv) {
    const char* only = NULL;
    const char* autotune = NULL;
    for (int i = 1; i < argc; i += 2) {
        check(i + 1 < argc && (strcmp(argv[i], "--model") == 0 || strcmp(argv[i], "--autotune") == 0),
              "found '%s', want: [--model d12|d48|c4096] [--autotune FILE]", argv[i]);
        *(strcmp(argv[i], "--model") == 0 ? &only : &autotune) = argv[i + 1];
    }
    DeviceOptions options = {};
    options.attention = ATTENTION_BUILTIN;
    Device* dev = device_create(options);
    size_t flush_bytes = (size_t)2 * dev->properties.l2CacheSize;
    void* workspace = device_malloc(dev, matmul_workspace_bytes());
    void* flush = device_malloc(dev, flush_bytes);
    device_set_workspace(dev, workspace, matmul_workspace_bytes());
    matmul_set_autotune(dev, autotune);
    Chip chip;
    char name[96];
    snprintf(name, sizeof(name), "%.95s", device_name(dev));
    check(chip_from_table(&chip, name), "no peak known for %s", name);
    const struct {
        const char* name;
        int rows, C;
    } models[] = {{"d12", 65536, 768}, {"d48", 16384, 1600}, {"c4096", 8192, 4096}};
    const char* roles[] = {"forward", "dgrad", "wgrad"};
    int done = 0, failures = 0;
    printf("%s, cuBLASLt %zu, autotune %s; BF16 peak %.0f, FP8 peak %.0f TFLOP/s\n", name, cublasLtGetVersion(),
           autotune ? autotune : "off", chip.bf16_flops * 1e-12, chip.fp8_flops * 1e-12);
    printf("%-6s %-7s %-8s %6s %6s %6s | %9s %7s %5s | %9s %7s %5s | %6s | %8s %8s\n", "model", "linear", "role",
           "rows", "C", "OC", "bf16 us", "TFLOP/s", "peak", "fp8 us", "TFLOP/s", "peak", "ratio", "diff b16",
           "diff fp8");
    for (size_t m = 0; m < sizeof(models) / sizeof(models[0]); m++) {
        int C = models[m].C, rows = models[m].rows;
        const struct {
            const char* name;
            int C, OC;
        } linears[] = {{"qkv", C, 3 * C}, {"proj", C, C}, {"fc", C, 4 * C}, {"fcproj", 4 * C, C}, {"head", C, 50304}};
        if (only != NULL && strcmp(only, models[m].name) != 0) { continue; }
        double total[2] = {0.0, 0.0};
        for (size_t k = 0; k < sizeof(linears) / sizeof(linears[0]); k++) {
            Linear l[2];
            for (int fp8 = 0; fp8 < 2; fp8++) {
                l[fp8] = linear_create(dev, fp8, rows, linears[k].C, linears[k].OC);
            }
            for (int role = 0; role < 3; role++) {
                double us[2], diff[2], flops = 2.0 * rows * linears[k].C * linears[k].OC;
                for (int fp8 = 0; fp8 < 2; fp8++) {
                    diff[fp8] = linear_check(dev, &l[fp8], (MatmulRole)role, &failures);
                    us[fp8] = linear_time(dev, &l[fp8], (MatmulRole)role, flush, flush_bytes);
                    total[fp8] += us[fp8];
                }
                printf("%-6s %-7s %-8s %6d %6d %6d | %9.1f %7.0f %4.0f%% | %9.1f %7.0f %4.0f%% | %5.2fx | %8.1e "
                       "%8.1e\n",
                       models[m].name, linears[k].name, roles[role], rows, linears[k].C, linears[k].OC, us[0],
                       flops / us[0] * 1e-6, 100.0 * flops / us[0] * 1e6 / chip.bf16_flops, us[1], flops / us[1] * 1e-6,
                       100.0 * flops / us[1] * 1e6 / chip.fp8_flops, us[0] / us[1], diff[0], diff[1]);
                done++;
            }
            linear_free(dev, &l[0]);
            linear_free(dev, &l[1]);
        }
        printf("%-6s one block and the head: BF16 %.1f us, FP8 %.1f us, %.2fx\n", models[m].name, total[0], total[1],
               total[0] / total[1]);
    }
    check(done > 0, "--model %s: want d12, d48 or c4096", only);
    device_release(dev, workspace);
    device_release(dev, flush);
    device_free(dev);
    printf("%d wrong elements\n", failures);
    return failures > 0;
}
