// Causal attention alone: our kernels and cuDNN's (with and without its deterministic backward), forward and forward +
// backward, at the attention shapes of d12, d48 and GPT-3; and the backward pass alone that leaves dqkv in both FP8
// forms with its bias gradient. Two whole heads of every shape are checked against FP64 on the host, two backward runs
// against each other bit for bit, and the FP8 codes against those that quantize_backward makes of the BF16 form.
//
//     bench-attention [--attention builtin|auto|cudnn]     default: all, cuDNN if it is found
//
// TFLOP/s count useful work only: half of the (T, T) square, 2 products forward and 5 backward.
#include "../lib/attention.cuh"
#include "../lib/matmul.cuh"   // device_free releases its plans
#include "../lib/quantize.cuh" // attention's passes call it where their kernels write BF16 only

enum { REPEATS = 15, SEED_QKV = 1, SEED_DOUT = 2 };

typedef struct {
    int B, T, NH, HS;
    int timed; // 0: checked only
} Shape;

typedef struct {
    bf16* qkv;  // (B*T, 3C)
    bf16* out;  // (B*T, C)
    bf16* dout; // (B*T, C)
    bf16* dqkv; // (B*T, 3C)
    float* lse; // (B, NH, T)
    E4m3Tensor fp8; // out in all forms, scale trusted
    e5m2* codes[2][2]; // dqkv in FP8, row-major and transposed, of attention_backward and of quantize_backward
    float* dbias;      // (3C)
    ScaleSlot* slot;   // of dqkv
} Tensors;

// ---------------------------------------------------------------------------------------------------------------------
// inputs: element i of a tensor is a function of i

// About normal, standard deviation 1: the sum of the four bytes of a hash (splitmix64, Steele et al. 2014).
HOST_DEVICE static inline float input_value(int seed, size_t i) {
    uint64_t z = (uint64_t)i + (uint64_t)seed * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    int sum = (int)(z & 255) + (int)((z >> 8) & 255) + (int)((z >> 16) & 255) + (int)((z >> 24) & 255);
    return (float)(sum - 510) * (1.0f / 147.8f);
}

__global__ void fill_kernel(bf16* x, size_t n, int seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) {
        x[i] = __float2bfloat16_rn(input_value(seed, i));
    }
}

static size_t num_out(Shape s) { return (size_t)s.B * s.T * s.NH * s.HS; }
static size_t num_lse(Shape s) { return (size_t)s.B * s.NH * s.T; }

static Tensors tensors_create(Device* dev, Shape s) {
    Tensors t;
    t.qkv = (bf16*)device_malloc(dev, 3 * num_out(s) * sizeof(bf16));
    t.out = (bf16*)device_malloc(dev, num_out(s) * sizeof(bf16));
    t.dout = (bf16*)device_malloc(dev, num_out(s) * sizeof(bf16));
    t.dqkv = (bf16*)device_malloc(dev, 3 * num_out(s) * sizeof(bf16));
    t.lse = (float*)device_malloc(dev, num_lse(s) * sizeof(float));
    E4m3Tensor fp8 = {t.out, (e4m3*)device_malloc(dev, num_out(s)), (e4m3*)device_malloc(dev, num_out(s)),
                      (ScaleSlot*)device_malloc(dev, sizeof(ScaleSlot)), ScaleRecipe{}, 0, 1};
    for (int i = 0; i < 4; i++) {
        t.codes[i / 2][i % 2] = (e5m2*)device_malloc(dev, 3 * num_out(s));
    }
    t.dbias = (float*)device_malloc(dev, 3 * (size_t)s.NH * s.HS * sizeof(float));
    device_zero(dev, t.dbias, 3 * (size_t)s.NH * s.HS * sizeof(float));
    t.slot = (ScaleSlot*)device_malloc(dev, sizeof(ScaleSlot));
    ScaleSlot slots[2] = {};
    slots[0].scale = 100.0f;
    slots[1].scale = 1024.0f;
    device_copy_in(dev, fp8.slot, &slots[0], sizeof(ScaleSlot));
    device_copy_in(dev, t.slot, &slots[1], sizeof(ScaleSlot));
    device_sync(dev);
    t.fp8 = fp8;
    fill_kernel<<<2048, 256, 0, dev->stream>>>(t.qkv, 3 * num_out(s), SEED_QKV);
    fill_kernel<<<2048, 256, 0, dev->stream>>>(t.dout, num_out(s), SEED_DOUT);
    cuda_check(cudaGetLastError());
    return t;
}

static void tensors_free(Device* dev, Tensors* t) {
    void* all[] = {t->qkv,         t->out,         t->dout,        t->dqkv,  t->lse,  t->fp8.data,       t->codes[0][0],
                   t->codes[0][1], t->codes[1][0], t->codes[1][1], t->dbias, t->slot, t->fp8.transposed, t->fp8.slot};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        device_release(dev, all[i]);
    }
}

// NaN into every output, so that an element nobody writes is found.
static void poison(Device* dev, const Tensors* t, Shape s) {
    cuda_check(cudaMemsetAsync(t->out, 0xFF, num_out(s) * sizeof(bf16), dev->stream));
    cuda_check(cudaMemsetAsync(t->dqkv, 0xFF, 3 * num_out(s) * sizeof(bf16), dev->stream));
    cuda_check(cudaMemsetAsync(t->lse, 0xFF, num_lse(s) * sizeof(float), dev->stream));
}

static void forward(Device* dev, const Tensors* t, Shape s, int with_fp8) {
    E4m3Tensor wide = {t->out, NULL, NULL, NULL, ScaleRecipe{}, 0, 0};
    attention_forward(dev, with_fp8 ? t->fp8 : wide, t->lse, t->qkv, s.B, s.T, s.NH, s.HS);
}

static void backward(Device* dev, const Tensors* t, Shape s) {
    E5m2Tensor dqkv = {t->dqkv, NULL, NULL, NULL, {}, 0, 0};
    attention_backward(dev, dqkv, NULL, t->dout, t->out, t->lse, t->qkv, s.B, s.T, s.NH, s.HS);
}

static E5m2Tensor dqkv_codes(const Tensors* t, int which) {
    ScaleRecipe recipe = {1, AMAX_MAX, 0, 1.0f};
    E5m2Tensor dqkv = {t->dqkv, t->codes[which][0], t->codes[which][1], t->slot, recipe, 0, 1};
    return dqkv;
}

static void backward_fp8(Device* dev, const Tensors* t, Shape s) {
    attention_backward(dev, dqkv_codes(t, 0), t->dbias, t->dout, t->out, t->lse, t->qkv, s.B, s.T, s.NH, s.HS);
}

// ---------------------------------------------------------------------------------------------------------------------
// checking against FP64

// One head in FP64: q, k, v, dout given, the rest computed. All (T, HS) but lse (T).
typedef struct {
    double *q, *k, *v, *dout, *out, *lse, *dq, *dk, *dv;
} Head;

// out = softmax(q k^T / sqrt(HS), causal) v and its gradients; p and ds are (T, T) scratch.
static void head_model(Head h, double* p, double* ds, int T, int HS) {
    double factor = 1.0 / sqrt((double)HS);
#pragma omp parallel for schedule(dynamic, 8)
    for (int i = 0; i < T; i++) { // row i: probabilities, output, gradient of the scores, dq
        double *pi = p + (size_t)i * T, *di = ds + (size_t)i * T, largest = -INFINITY, sum = 0.0, delta = 0.0;
        for (int j = 0; j <= i; j++) {
            double s = 0.0, dp = 0.0;
            for (int c = 0; c < HS; c++) {
                s += h.q[(size_t)i * HS + c] * h.k[(size_t)j * HS + c];
                dp += h.dout[(size_t)i * HS + c] * h.v[(size_t)j * HS + c];
            }
            pi[j] = s * factor;
            di[j] = dp;
            largest = fmax(largest, pi[j]);
        }
        for (int j = 0; j <= i; j++) {
            pi[j] = exp(pi[j] - largest);
            sum += pi[j];
        }
        h.lse[i] = largest + log(sum);
        for (int j = 0; j <= i; j++) {
            pi[j] /= sum;
            delta += pi[j] * di[j];
        }
        for (int c = 0; c < HS; c++) {
            h.out[(size_t)i * HS + c] = h.dq[(size_t)i * HS + c] = 0.0;
        }
        for (int j = 0; j <= i; j++) {
            di[j] = pi[j] * (di[j] - delta) * factor;
            for (int c = 0; c < HS; c++) {
                h.out[(size_t)i * HS + c] += pi[j] * h.v[(size_t)j * HS + c];
                h.dq[(size_t)i * HS + c] += di[j] * h.k[(size_t)j * HS + c];
            }
        }
    }
#pragma omp parallel for schedule(dynamic, 8)
    for (int j = 0; j < T; j++) { // column j: dk and dv
        for (int c = 0; c < HS; c++) {
            h.dk[(size_t)j * HS + c] = h.dv[(size_t)j * HS + c] = 0.0;
        }
        for (int i = j; i < T; i++) {
            double pij = p[(size_t)i * T + j], dij = ds[(size_t)i * T + j];
            for (int c = 0; c < HS; c++) {
                h.dk[(size_t)j * HS + c] += dij * h.q[(size_t)i * HS + c];
                h.dv[(size_t)j * HS + c] += pij * h.dout[(size_t)i * HS + c];
            }
        }
    }
}

// |got - want| / |want| over one head of a device tensor whose rows are `stride` apart.
static double head_error(Device* dev, const bf16* tensor, size_t first, size_t stride, const double* want, int T,
                         int HS) {
    float row[128];
    double difference = 0.0, norm = 0.0;
    for (int t = 0; t < T; t++) {
        bf16_to_host(dev, row, tensor + first + (size_t)t * stride, (size_t)HS);
        for (int c = 0; c < HS; c++) {
            double w = want[(size_t)t * HS + c];
            difference += (row[c] - w) * (row[c] - w);
            norm += w * w;
        }
    }
    return sqrt(difference / norm);
}

// The tensors after forward and backward, in the first and in the last head, against FP64. Returns how many are wrong.
// Threshold 2^-7: a chain of at most four roundings to BF16 (P, dS, out in delta, the store), 2^-9 each at worst; lse
// is never stored in BF16: 2^-11, FP32 sums and fast exponentials of scores up to about 10.
static int heads_check(Device* dev, const Tensors* t, Shape s, double worst[5]) {
    size_t n = (size_t)s.T * s.HS, C = (size_t)s.NH * s.HS;
    double* memory = (double*)malloc_or_die((8 * n + s.T + 2 * (size_t)s.T * s.T) * sizeof(double));
    float* lse = (float*)malloc_or_die(s.T * sizeof(float));
    Head h = {memory,         memory + n,     memory + 2 * n, memory + 3 * n, memory + 4 * n,
              memory + 8 * n, memory + 5 * n, memory + 6 * n, memory + 7 * n};
    double* square = memory + 8 * n + s.T;
    int wrong = 0;
    memset(worst, 0, 5 * sizeof(double));
    for (int which = 0; which < 2; which++) {
        size_t b = which ? s.B - 1 : 0, head = which ? s.NH - 1 : 0;
        size_t out0 = b * s.T * C + head * s.HS, qkv0 = b * s.T * 3 * C + head * s.HS;
        for (int i = 0; i < s.T; i++) {
            for (int c = 0; c < s.HS; c++) {
                size_t at = (size_t)i * s.HS + c, from = qkv0 + (size_t)i * 3 * C + c;
                h.q[at] = bf16_round(input_value(SEED_QKV, from));
                h.k[at] = bf16_round(input_value(SEED_QKV, from + C));
                h.v[at] = bf16_round(input_value(SEED_QKV, from + 2 * C));
                h.dout[at] = bf16_round(input_value(SEED_DOUT, out0 + (size_t)i * C + c));
            }
        }
        head_model(h, square, square + (size_t)s.T * s.T, s.T, s.HS);
        double errors[5] = {head_error(dev, t->out, out0, C, h.out, s.T, s.HS), 0.0,
                            head_error(dev, t->dqkv, qkv0, 3 * C, h.dq, s.T, s.HS),
                            head_error(dev, t->dqkv, qkv0 + C, 3 * C, h.dk, s.T, s.HS),
                            head_error(dev, t->dqkv, qkv0 + 2 * C, 3 * C, h.dv, s.T, s.HS)};
        device_copy_out(dev, lse, t->lse + (b * s.NH + head) * s.T, s.T * sizeof(float));
        for (int i = 0; i < s.T; i++) {
            double error = fabs(lse[i] - h.lse[i]);
            errors[1] = isnan(error) || error > errors[1] ? error : errors[1]; // keeps NaN
        }
        static const char* const names[5] = {"out", "lse", "dq", "dk", "dv"};
        for (int k = 0; k < 5; k++) {
            if (!(errors[k] <= (k == 1 ? 0x1p-11 : 0x1p-7))) {
                printf("FAILED %s of head %d of the %s batch row: off by %.2e\n", names[k], (int)head,
                       which ? "last" : "first", errors[k]);
                wrong++;
            }
            worst[k] = isnan(errors[k]) || errors[k] > worst[k] ? errors[k] : worst[k];
        }
    }
    free(lse);
    free(memory);
    return wrong;
}

// Does a second backward pass give the same bits?
static int backward_repeats(Device* dev, const Tensors* t, Shape s) {
    size_t bytes = 3 * num_out(s) * sizeof(bf16);
    char* first = (char*)malloc_or_die(bytes);
    char* second = (char*)malloc_or_die(bytes);
    device_copy_out(dev, first, t->dqkv, bytes);
    int same = 1;
    for (int i = 0; i < 3 && same; i++) {
        cuda_check(cudaMemsetAsync(t->dqkv, 0xFF, bytes, dev->stream));
        backward(dev, t, s);
        device_copy_out(dev, second, t->dqkv, bytes);
        same = memcmp(first, second, bytes) == 0;
    }
    free(first);
    free(second);
    return same;
}

// How many FP8 codes of dqkv differ between attention_backward and quantize_backward after it.
static size_t codes_wrong(Device* dev, const Tensors* t, Shape s) {
    size_t n = 3 * num_out(s), wrong = 0;
    if ((size_t)s.B * s.T % 16 != 0) { return 0; } // no FP8 at such a shape
    char* codes[2] = {(char*)malloc_or_die(n), (char*)malloc_or_die(n)};
    backward(dev, t, s);
    quantize_backward(dev, dqkv_codes(t, 1), NULL, s.B * s.T, 3 * s.NH * s.HS);
    for (int form = 0; form < 2; form++) {
        cuda_check(cudaMemsetAsync(t->codes[0][form], 0xFF, n, dev->stream));
    }
    backward_fp8(dev, t, s);
    for (int form = 0; form < 2; form++) {
        device_copy_out(dev, codes[0], t->codes[0][form], n);
        device_copy_out(dev, codes[1], t->codes[1][form], n);
        for (size_t i = 0; i < n; i++) {
            wrong += codes[0][i] != codes[1][i];
        }
    }
    free(codes[0]);
    free(codes[1]);
    return wrong;
}

// ---------------------------------------------------------------------------------------------------------------------
// timing

static int compare_floats(const void* a, const void* b) {
    float x = *(const float*)a, y = *(const float*)b;
    return (x > y) - (x < y);
}

typedef enum { FORWARD, FORWARD_FP8, BOTH, BACKWARD_FP8 } Passes;

// Median microseconds. The tensors are larger than the L2 cache.
static float time_passes(Device* dev, const Tensors* t, Shape s, Passes passes) {
    float us[REPEATS];
    cudaEvent_t start, stop;
    cuda_check(cudaEventCreate(&start));
    cuda_check(cudaEventCreate(&stop));
    for (int r = -2; r < REPEATS; r++) {
        float ms = 0.0f;
        cuda_check(cudaEventRecord(start, dev->stream));
        if (passes != BACKWARD_FP8) { forward(dev, t, s, passes == FORWARD_FP8); }
        if (passes == BOTH) { backward(dev, t, s); }
        if (passes == BACKWARD_FP8) { backward_fp8(dev, t, s); }
        cuda_check(cudaEventRecord(stop, dev->stream));
        cuda_check(cudaEventSynchronize(stop));
        cuda_check(cudaEventElapsedTime(&ms, start, stop));
        if (r >= 0) { us[r] = 1000.0f * ms; }
    }
    cuda_check(cudaEventDestroy(start));
    cuda_check(cudaEventDestroy(stop));
    qsort(us, REPEATS, sizeof(float), compare_floats);
    return us[REPEATS / 2];
}

// Check one shape with the attention that is selected, time it, print its line. Returns how much is wrong.
static int bench_shape(Device* dev, const char* name, Shape s, int wants_same_bits) {
    size_t bytes = attention_workspace_bytes(dev, s.B, s.T, s.NH, s.HS);
    void* workspace = device_malloc(dev, bytes);
    device_set_workspace(dev, workspace, bytes);
    Tensors t = tensors_create(dev, s);
    double errors[5];
    poison(dev, &t, s);
    forward(dev, &t, s, 0);
    backward(dev, &t, s);
    device_sync(dev);
    int wrong = heads_check(dev, &t, s, errors), same = backward_repeats(dev, &t, s);
    if (wants_same_bits && !same) {
        printf("FAILED %s: two backward passes differ\n", name);
        wrong++;
    }
    size_t codes = codes_wrong(dev, &t, s);
    if (codes > 0) {
        printf("FAILED %s: %zu FP8 codes of dqkv are not those of quantize_backward\n", name, codes);
        wrong++;
    }
    printf("%-24s %3d %3d %5d %4d | ", name, s.B, s.NH, s.T, s.HS);
    if (s.timed) {
        double product = (double)s.B * s.NH * s.T * s.T * s.HS; // 2 flops, half the square
        float f = time_passes(dev, &t, s, FORWARD), f8 = time_passes(dev, &t, s, FORWARD_FP8),
              fb = time_passes(dev, &t, s, BOTH), b8 = time_passes(dev, &t, s, BACKWARD_FP8);
        printf("%8.1f %6.0f | %8.1f | %8.1f %6.0f | %8.1f | ", f, 2.0 * product / f * 1e-6, f8, fb,
               7.0 * product / fb * 1e-6, b8);
    } else {
        printf("%8s %6s | %8s | %8s %6s | %8s | ", "", "", "", "", "", "");
    }
    printf("%8.1f | %-4s | %.1e %.1e %.1e %.1e %.1e\n", (double)bytes / (1 << 20), same ? "yes" : "no", errors[0],
           errors[1], errors[2], errors[3], errors[4]);
    tensors_free(dev, &t);
    device_release(dev, workspace);
    return wrong;
}

int main(int argc, char** argv) {
    const char* only = "";
    check(argc == 1 || (argc == 3 && strcmp(argv[1], "--attention") == 0), "want: [--attention builtin|auto|cudnn]");
    if (argc == 3) { only = argv[2]; }
    check(only[0] == 0 || strcmp(only, "builtin") == 0 || strcmp(only, "auto") == 0 || strcmp(only, "cudnn") == 0,
          "--attention %s: want builtin, auto or cudnn", only);
    DeviceOptions options = {};
    options.attention = ATTENTION_BUILTIN;
    Device* dev = device_create(options);
    const Shape shapes[] = {{2, 97, 3, 64, 0},     {1, 257, 2, 80, 0},    {2, 64, 2, 16, 0},
                            {1, 200, 1, 128, 0},   {2, 144, 3, 64, 0},    {1, 208, 2, 128, 0},
                            {64, 1024, 12, 64, 1}, {16, 1024, 25, 64, 1}, {8, 2048, 32, 128, 1}};
    int wrong = 0;
    printf("%s\n%-24s %3s %3s %5s %4s | %8s %6s | %8s | %8s %6s | %8s | %8s | %-4s | relative errors %s\n",
           device_name(dev), "", "B", "H", "T", "D", "fwd us", "TFLOP", "with FP8", "f+b us", "TFLOP", "b to FP8",
           "work MiB", "same", "(lse: absolute)");
    printf("%-24s %3s %3s %5s %4s | %8s %6s | %8s | %8s %6s | %8s | %8s | %-4s | %-7s %-7s %-7s %-7s %-7s\n", "", "",
           "", "", "", "", "/s", "us", "", "/s", "us", "", "bits", "out", "lse", "dq", "dk", "dv");
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        for (int kind = 0; kind < 4; kind++) { // builtin, auto, cuDNN deterministic, cuDNN not
            if (only[0] != 0 && strcmp(only, kind == 0 ? "builtin" : kind == 1 ? "auto" : "cudnn") != 0) { continue; }
            attention_release(dev);
            AttentionKind cudnn = only[0] && kind > 1 ? ATTENTION_CUDNN : ATTENTION_AUTO;
            attention_select(dev, kind == 0 ? ATTENTION_BUILTIN : cudnn);
            if (kind > 0 && dev->cudnn == NULL) { continue; } // not found, and not asked for by name
            if (kind == 3) { cudnn_attention_set_deterministic(dev->cudnn, 0); }
            char name[96];
            size_t bytes = 0;
            int does =
                kind == 0 || attention_uses_cudnn(dev, shapes[i].B, shapes[i].T, shapes[i].NH, shapes[i].HS, &bytes);
            if (!does) {
                printf("%-24s does not do B %d, H %d, T %d, D %d\n", device_attention_name(dev), shapes[i].B,
                       shapes[i].NH, shapes[i].T, shapes[i].HS);
                continue;
            }
            if (kind > 1) { dev->attention = ATTENTION_CUDNN; }
            const char* version = dev->cudnn != NULL ? cudnn_attention_version(dev->cudnn) : "";
            snprintf(name, sizeof(name), "%s%s%s", kind == 0 ? "builtin" : kind == 1 ? "auto" : "cudnn ",
                     kind > 1 ? version : "", kind == 3 ? " any order" : "");
            wrong += bench_shape(dev, name, shapes[i], kind != 3);
        }
    }
    printf("%d wrong\n", wrong);
    device_free(dev);
    return wrong > 0;
}
