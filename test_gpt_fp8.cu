// Tests of train_gpt_fp8: every op, and the whole model. It includes the program, so it tests the very lines that
// train.
//
//     make test_gpt_fp8_cpu && ./test_gpt_fp8_cpu     g++: the CPU floor; what CI runs
//     make test_gpt_fp8 && ./test_gpt_fp8             nvcc: both floors in one binary, the GPU against the CPU floor
//     ./test_gpt_fp8 ops_matmul                       only tests whose name contains the text
//     mpirun -np 2 ./test_gpt_fp8_cpu ranks_          the tests on several ranks (dev/test_ranks.h)
//
// Without a usable GPU the tests of the nvcc build that need one are skipped, with the reason. The same goes for tests
// against the outside truth when its files are absent ($SHARED_DATA, default ../shared/data).

// Everything that the program includes and that is no floor comes first, at global scope: the CPU floor is included
// inside a namespace, where the guards of these headers then keep them out.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#include <ctype.h>
#include <errno.h>
#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <math.h>
#include <mpi.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "lib/check.h"
#include "lib/fp8.h"
#include "lib/scaling.h"
#include "lib/rng.h"
#include "lib/config.h"
#include "lib/agree.h"
#include "lib/tensors.h"
#include "lib/shards.h"
#include "lib/grad_mu.h"
#include "lib/memory.h"
#include "lib/dataloader.h"
#include "lib/token_index.h"
#include "lib/tokenizer.h"
#include "lib/sampler.h"
#include "lib/schedule.h"
#include "lib/checkpoint.h"
#include "lib/roofline.h"
#include "lib/micro_batch.h"
#include "lib/profile.h"
#include "lib/logger.h"
#include "lib/run_state.h"
#include "lib/snapshot.h"
#include "lib/state_ranges.h"
#include "lib/snapshot_writer.h"
#include "lib/llmc_state.h"
#include "lib/resume.h"
#include "lib/agree.h"
#include "lib/stop.h"
#include "lib/ranks.h"

#include "dev/compare.h"
#include "dev/test_ops.h"

// main's own functions are not called here
#pragma GCC diagnostic ignored "-Wunused-function"
#ifdef __CUDACC__
#pragma nv_diag_suppress 177
#endif

#define TESTING
#ifndef CPU_FLOOR
#define CPU_FLOOR
#endif
namespace cpu {
#include "train_gpt_fp8.cu"
#include "dev/probe.h"
} // namespace cpu
#undef CPU_FLOOR

#ifdef __CUDACC__
#include "train_gpt_fp8.cu"
#include "lib/grad_reduce.cuh"
#include "dev/probe.h"
#endif

// ---------------------------------------------------------------------------------------------------------------------
// the floors

static const Floor* const cpu_floor = &cpu::probe_floor;

// The GPU floor, or NULL and why not.
static const Floor* gpu_floor(const char** why) {
#ifdef __CUDACC__
    static char reason[512];
    *why = reason;
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        snprintf(reason, sizeof(reason), "no usable GPU: %s",
                 status != cudaSuccess ? cudaGetErrorString(status) : "none found");
        return NULL;
    }
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess || properties.major != 9) {
        snprintf(reason, sizeof(reason), "no usable GPU: %s has compute capability %d.%d, want 9.0 (Hopper)",
                 properties.name, properties.major, properties.minor);
        return NULL;
    }
    return &probe_floor;
#else
    *why = "this binary has the CPU floor only (make test_gpt_fp8 has both)";
    return NULL;
#endif
}

// What the tests run on; set once in main, since unit.h's tests take no arguments.
static const Floor* gpu;
static const char* gpu_missing;
// Sessions of small models run on one thread: on a busy machine threads that wait for each other cost more than they
// bring. Big ones get all.
enum { CPU_THREADS = 1 };

// ---------------------------------------------------------------------------------------------------------------------
// how far a whole model may be off: rounding errors counted through its depth
//
// Everything is relative to the size of the tensor that the error is in, in root mean square, so independent errors add
// in squares. One rounding to m bits of mantissa is off by 2^-m / sqrt(12) of the binade's start; for normally
// distributed values (tensors here nearly are) of whatever scale, summed over binades [2^k, 2^(k+1)) with their
// probabilities P_k,
//     u(m) = 2^-m sqrt(sum P_k 4^k / 12) = 0.213 * 2^-m        BF16 1.7e-3, E4M3 2.7e-2, E5M2 5.3e-2
// A product over K with independent errors in its terms is off by as much as one term, whatever K: a linear layer with
// quantised input and weight by sqrt(2) u(3).
//
// Forward. The residual stream passes 2L sub-blocks (attention, MLP); each adds a branch, taken to be as large as the
// embedding was. S is the stream's energy, E its error's energy, both in units of the embedding's energy:
//     S_0 = 1, E_0 = u(7)^2;     S_j = S_{j-1} + 1,     E_j = E_{j-1} + E_{j-1}/S_{j-1} + own + u(7)^2 S_j
// i.e. what was there, the same passed through the branch, the branch's own roundings, and the store of the sum. own
// has two linears in a row in FP8, 4 u(3)^2; and in BF16 7 roundings u(7)^2 (LayerNorm, linear, attention or GELU,
// linear, both weights after the first update, one spare for P inside attention).
//     forward error in front of sub-block j:  f_j^2 = E_j / S_j;  of the logits: f_2L^2 + 2 u(7)^2, FP8 head + 2 u(3)^2
//
// Backward. The gradient stream starts with the logits' error and passes the sub-blocks downwards in the same way; own
// has two dgrads in FP8, 2 (u(3)^2 + u(2)^2), or 6 roundings in BF16, and twice the forward error of that place
// (through the LayerNorm's, GELU's and softmax's derivatives). A weight gradient adds its own operands: u(2)^2 (dy),
// u(3)^2 + f_j^2 (x), and one more dgrad for the first linear of a sub-block. An FP8 head starts the stream with one
// dgrad more, and the token embedding's gradient, which comes from there, adds u(2)^2 + u(3)^2 + f_2L^2.
//
// It is an estimate of the worst case (branches as large as the stream), not a fit; `tight` in the tests says that no
// more than 4x lies between it and the worst measured tensor.

enum { MAX_SUB_BLOCKS = 64 };

// FP32: sums of up to 50,304 terms through some ten ops, each off by about 2^-24 sqrt(256) within its blocks of 256:
// 1e-6 times the square root of that many ops, and a factor of 3.
static const double FP32_LIMIT = 1e-5;

typedef struct {
    int L;
    double logits; // of the centred logits
    double forward[MAX_SUB_BLOCKS + 1];
    double layer[MAX_SUB_BLOCKS / 2]; // any gradient of a tensor of that layer
    double bottom;                    // gradient of embeddings
    double head;                      // of the token embedding, whose larger part is the LM head's
    double top;                       // gradient of the final LayerNorm
} ErrorModel;

static double format_error(int mantissa_bits) {
    return ldexp(0.213, -mantissa_bits); // 0.2119 to 0.2128, by the position of the deviation in its binade
}

static int has_fp8_head(const char* flags) {
    return strstr(flags, "--fp8-lm-head 1") != NULL;
}

static ErrorModel error_model(int L, Precision precision, int fp8_head) {
    ErrorModel e = {};
    e.L = L;
    if (precision == PRECISION_FP32) {
        e.logits = e.bottom = e.head = e.top = FP32_LIMIT;
        for (int l = 0; l < L; l++) {
            e.layer[l] = FP32_LIMIT;
        }
        return e;
    }
    double u7 = pow(format_error(7), 2), fp8 = precision == PRECISION_FP8;
    double u3 = fp8 * pow(format_error(3), 2), u2 = fp8 * pow(format_error(2), 2);
    double S = 1.0, E = u7;
    e.forward[0] = E / S;
    for (int j = 1; j <= 2 * L; j++) {
        double passed = E / S;
        S += 1.0;
        E += passed + 4.0 * u3 + 7.0 * u7 + u7 * S;
        e.forward[j] = E / S;
    }
    double head3 = fp8_head * u3, head2 = fp8_head * u2;
    double logits = e.forward[2 * L] + 2.0 * u7 + 2.0 * head3;
    S = 1.0, E = logits + 2.0 * u7 + head3 + head2;
    e.top = sqrt(E + e.forward[2 * L]);
    for (int j = 2 * L - 1; j >= 0; j--) { // from the last sub-block down; forward[j] is in front of it
        double dgrad = u3 + u2, x = u3 + u7 + e.forward[j + 1];
        double here = E / S + dgrad + u2 + x + 2.0 * u7;
        e.layer[j / 2] = fmax(e.layer[j / 2], sqrt(here));
        double passed = E / S;
        S += 1.0;
        E += passed + 2.0 * dgrad + 6.0 * u7 + 2.0 * e.forward[j] + u7 * S;
    }
    e.bottom = sqrt(E / S + u7);
    e.head = fmax(e.bottom, fp8_head * sqrt(logits + e.forward[2 * L] + 2.0 * u7 + head3 + head2));
    e.logits = sqrt(logits);
    return e;
}

// Subtract every row's mean: softmax does not see it, and a large common part would hide errors.
static void centre_rows(float* x, size_t rows, size_t cols) {
    for (size_t r = 0; r < rows; r++) {
        double mean = 0.0;
        for (size_t c = 0; c < cols; c++) {
            mean += (double)x[r * cols + c] / (double)cols;
        }
        for (size_t c = 0; c < cols; c++) {
            x[r * cols + c] -= (float)mean;
        }
    }
}

static double root_mean_square(const float* x, size_t n) {
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) {
        sum += (double)x[i] * (double)x[i];
    }
    return sqrt(sum / (double)n);
}

// Every gradient tensor of every layer within `factor` times the error model. Returns the largest share of its
// threshold that any of them takes: 1 is the limit.
static double expect_gradients(const char* what, const float* got, const float* want, const ParameterTable* table,
                               const ErrorModel* e, double factor) {
    double worst = 0.0;
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &table->tensor[t];
        for (int l = 0; l < spec->layers; l++) {
            size_t at = spec->offset + (size_t)l * spec->n;
            double threshold = factor * (t == TENSOR_WTE                        ? e->head
                                         : t == TENSOR_WPE                      ? e->bottom
                                         : t == TENSOR_LNFW || t == TENSOR_LNFB ? e->top
                                                                                : e->layer[l]);
            double distance = relative_distance(got + at, want + at, spec->n);
            expect(distance <= threshold, "%s: gradient of %s, layer %d is %.3g off, want %.3g", what, spec->name, l,
                   distance, threshold);
            worst = fmax(worst, distance / threshold);
        }
        size_t n = (size_t)spec->layers * spec->n;
        double distance = relative_distance(got + spec->offset, want + spec->offset, n), threshold = 0.0;
        for (int l = 0; l < e->L; l++) {
            threshold = fmax(threshold, e->layer[l]);
        }
        threshold = factor * fmax(threshold, fmax(e->head, e->top));
        expect(distance <= threshold, "%s: gradient of %s is %.3g off, want %.3g", what, spec->name, distance,
               threshold);
    }
    return worst;
}

// ---------------------------------------------------------------------------------------------------------------------
// the outside truth: d2_reference.bin, computed in FP64 by PyTorch from an llm.c checkpoint

enum { TRUTH_MAX_STEPS = 64 };

typedef struct {
    int B, T, num_rows, num_steps;
    GptConfig config;
    ParameterTable table;
    float* weights; // (num_parameters) of the checkpoint
    int* tokens;    // (BT + 1)
    int* rows;      // (num_rows) whose logits are known
    float* logits;  // (num_rows, V)
    float* losses;  // (BT)
    float* grads;   // (num_parameters)
    double mean_loss, grad_norm;
    double step_loss[TRUTH_MAX_STEPS], step_norm[TRUTH_MAX_STEPS];
} Truth;

static const char* shared_data(void) {
    const char* folder = getenv("SHARED_DATA");
    return folder != NULL ? folder : "../shared/data";
}

// 0 and a skipped test when a file is absent.
static int truth_load(Truth* truth, Arena* arena) {
    char path[512], model_path[512], reason[1100];
    snprintf(path, sizeof(path), "%s/reference/d2_reference.bin", shared_data());
    snprintf(model_path, sizeof(model_path), "%s/llmc/d2_model_00000500.bin", shared_data());
    if (access(path, R_OK) != 0 || access(model_path, R_OK) != 0) {
        snprintf(reason, sizeof(reason), "'%s' or '%s' is absent (set SHARED_DATA)", path, model_path);
        unit_skip(reason);
        return 0;
    }
    memset(truth, 0, sizeof(*truth));
    int h[256];
    FILE* f = fopen_or_die(path, "rb");
    fread_or_die(h, sizeof(h), f, path);
    check(h[0] == 20261121 && h[1] == 1 && h[11] <= TRUTH_MAX_STEPS, "'%s' is no reference file", path);
    truth->B = h[2], truth->T = h[3], truth->num_rows = h[10], truth->num_steps = h[11];
    GptConfig config = {h[9], h[4], h[5], h[6], h[7], h[8]};
    truth->config = config;
    truth->table = parameter_table(config);
    size_t BT = (size_t)truth->B * truth->T, V = (size_t)h[4], N = truth->table.num_parameters, rows = (size_t)h[10];
    truth->tokens = (int*)arena_bytes(arena, (BT + 1) * 4);
    truth->rows = (int*)arena_bytes(arena, rows * 4);
    truth->logits = arena_floats(arena, rows * V);
    truth->losses = arena_floats(arena, BT);
    truth->grads = arena_floats(arena, N);
    fread_or_die(truth->tokens, (BT + 1) * 4, f, path);
    fread_or_die(truth->rows, rows * 4, f, path);
    fread_or_die(truth->logits, rows * V * 4, f, path);
    fread_or_die(truth->losses, BT * 4, f, path);
    fread_or_die(&truth->mean_loss, 8, f, path);
    fread_or_die(&truth->grad_norm, 8, f, path);
    fread_or_die(truth->grads, N * 4, f, path);
    fread_or_die(truth->step_loss, (size_t)truth->num_steps * 8, f, path);
    fread_or_die(truth->step_norm, (size_t)truth->num_steps * 8, f, path);
    fclose_or_die(f, path);
    // the weights by hand: 1024 bytes of header, then BF16 in the order of the parameter table
    uint16_t* bits = (uint16_t*)arena_bytes(arena, N * 2);
    f = fopen_or_die(model_path, "rb");
    fseek_or_die(f, 1024, model_path);
    fread_or_die(bits, N * 2, f, model_path);
    fclose_or_die(f, model_path);
    truth->weights = arena_floats(arena, N);
    for (size_t i = 0; i < N; i++) {
        truth->weights[i] = bits_float((uint32_t)bits[i] << 16);
    }
    return 1;
}

// Thresholds of the training steps, from the same error model. An error of the logits of e * sigma (sigma: their
// deviation within a row) moves a token's loss by as much (rms), plus half its square (curvature of the softmax);
// errors of BT tokens are independent, so the mean moves by 1/sqrt(BT) of that: 3 deviations are allowed. The norm:
// independent errors add e^2 / 2, their part along the gradient averages out over tokens.
typedef struct {
    double token_loss, mean_loss, norm;
} StepThresholds;

static double largest_gradient_error(const ErrorModel* e) {
    double g = fmax(e->head, e->top);
    for (int l = 0; l < e->L; l++) {
        g = fmax(g, e->layer[l]);
    }
    return g;
}

static StepThresholds step_thresholds(const ErrorModel* e, double sigma, double BT) {
    double z = e->logits * sigma, g = largest_gradient_error(e);
    StepThresholds t = {z + 0.5 * z * z, 3.0 * z / sqrt(BT) + 0.5 * z * z, 3.0 * g / sqrt(BT) + 0.5 * g * g};
    return t;
}

// What k updates of at most lr per weight can move the loss by, only because the copies that the passes read have steps
// of their own size s (to first order: sum of gradient times rounding error).
//   stochastic rounding, and E4M3 (masters start anywhere between its values): unbiased, a weight that has moved by d
//   crosses one step of s with probability d/s: variance at most min(k lr s, s^2/4); 3 deviations
//   BF16 to nearest: all masters start on BF16 values and hide the same share of their first moves until they cross
//   half a step; moves in later steps hide others. At most one update's worth: sum |g| min(lr, s/2)
static double copies_threshold(const Truth* truth, int k, Precision precision, int to_nearest) {
    double variance = 0.0, bias = 0.0, lr = 1e-4;
    for (int i = 0; i < NUM_TENSORS && precision != PRECISION_FP32 && k > 0; i++) {
        const TensorSpec* spec = &truth->table.tensor[i];
        int e4m3 = precision == PRECISION_FP8 && spec->is_linear;
        for (size_t at = spec->offset; at < spec->offset + spec->layers * spec->n; at++) {
            double g = fabs((double)truth->grads[at]), s = bf16_ulp((double)truth->weights[at]) * (e4m3 ? 16.0 : 1.0);
            if (to_nearest && !e4m3) {
                bias += g * fmin(lr, 0.5 * s);
            } else {
                variance += g * g * fmin(k * lr * s, 0.25 * s * s);
            }
        }
    }
    return 3.0 * sqrt(variance) + bias;
}

// The whole comparison on one floor.
static void truth_case(const Floor* floor, const char* flags_of_run, Precision precision) {
    Arena arena = {};
    Truth truth;
    if (!truth_load(&truth, &arena)) {
        arena_free(&arena);
        return;
    }
    const GptConfig* c = &truth.config;
    size_t BT = (size_t)truth.B * truth.T, V = (size_t)c->vocab_size, N = truth.table.num_parameters;
    size_t n = (size_t)truth.num_rows * V;
    char flags[512];
    snprintf(flags, sizeof(flags),
             "%s --num-layers %d --channels %d --num-heads %d --vocab-size %d --max-seq-len %d --batch-size %d "
             "--seq-len %d --beta1 0.9 --beta2 0.95 --eps 1e-8 --weight-decay 0.1 --grad-clip 1",
             flags_of_run, c->num_layers, c->channels, c->num_heads, c->vocab_size, c->max_seq_len, truth.B, truth.T);
    void* session = floor->open(flags, truth.weights, truth.tokens, (int)BT + 1, 0);
    float *all = arena_floats(&arena, BT * V), *logits = arena_floats(&arena, n);
    float *losses = arena_floats(&arena, BT), *grads = arena_floats(&arena, N);
    floor->forward(session, all, losses);
    for (int r = 0; r < truth.num_rows; r++) {
        memcpy(logits + r * V, all + (size_t)truth.rows[r] * V, V * sizeof(float));
    }
    ErrorModel e = error_model(c->num_layers, precision, has_fp8_head(flags_of_run));
    double uncentred = relative_distance(logits, truth.logits, n);
    expect(uncentred <= e.logits, "logits are %.3g off, want %.3g", uncentred, e.logits);
    centre_rows(logits, (size_t)truth.num_rows, V);
    centre_rows(truth.logits, (size_t)truth.num_rows, V);
    double sigma = root_mean_square(truth.logits, n), distance = relative_distance(logits, truth.logits, n);
    expect(distance <= e.logits, "centred logits are %.3g off, want %.3g", distance, e.logits);
    StepThresholds allowed = step_thresholds(&e, sigma, (double)BT);
    int to_nearest = strstr(flags_of_run, "nearest") != NULL;
    if (precision == PRECISION_FP32) {
        allowed.token_loss = allowed.mean_loss = FP32_LIMIT * truth.mean_loss;
        allowed.norm = FP32_LIMIT;
    }
    double squares = 0.0;
    for (size_t i = 0; i < BT; i++) {
        squares += pow((double)losses[i] - (double)truth.losses[i], 2) / (double)BT;
    }
    expect(sqrt(squares) <= allowed.token_loss, "losses are %.3g off (rms), want %.3g", sqrt(squares),
           allowed.token_loss);
    double worst = 0.0, worst_loss = 0.0;
    for (int k = 0; k < truth.num_steps; k++) {
        HostStep step = floor->step(session, 1e-4f);
        double copies = copies_threshold(&truth, k, precision, to_nearest),
               lag = 0.0; // hidden updates: one step behind
        if (k > 0 && to_nearest) { lag = fabs(truth.step_norm[k - 1] / truth.step_norm[k] - 1.0); }
        double off = fabs((double)step.loss - truth.step_loss[k]),
               norm = fabs((double)step.grad_norm / truth.step_norm[k] - 1.0);
        expect(step.skipped == 0, "step %d was skipped", k);
        expect(off <= allowed.mean_loss + copies, "step %d: loss %.6f, want %.6f +- %.3g", k, (double)step.loss,
               truth.step_loss[k], allowed.mean_loss + copies);
        expect(norm <= allowed.norm + lag, "step %d: norm %.6f, want %.6f +- %.3g relative", k, (double)step.grad_norm,
               truth.step_norm[k], allowed.norm + lag);
        worst_loss = fmax(worst_loss, off / (allowed.mean_loss + copies));
        if (k == 0) {
            floor->grads(session, grads);
            worst = expect_gradients("step 0", grads, truth.grads, &truth.table, &e, 1.0);
        }
    }
    expect(fabs(truth.mean_loss - truth.step_loss[0]) < 1e-9, "the reference file disagrees with itself");
    floor->close(session);
    printf("    %s %s: centred logits %.2g of %.2g allowed, gradients %.0f%%, ten steps' losses %.0f%% of the allowed "
           "error\n",
           floor->name, flags_of_run, distance, e.logits, 100.0 * worst, 100.0 * worst_loss);
    expect(precision == PRECISION_FP32 || worst > 0.25,
           "the thresholds are loose: nothing takes more than %.2f of its own", worst);
    arena_free(&arena);
}

static void truth_fp32_cpu(void) {
    truth_case(cpu_floor, "--precision fp32", PRECISION_FP32);
}
static void truth_bf16_cpu(void) {
    truth_case(cpu_floor, "--precision bf16", PRECISION_BF16);
}
static void truth_bf16_nearest_cpu(void) {
    truth_case(cpu_floor, "--precision bf16 --param-rounding nearest", PRECISION_BF16);
}
static void truth_fp8_cpu(void) {
    truth_case(cpu_floor, "--precision fp8", PRECISION_FP8);
}
static void truth_fp8_head_cpu(void) {
    truth_case(cpu_floor, "--precision fp8 --fp8-lm-head 1", PRECISION_FP8);
}

// Does the GPU floor have cuDNN's attention?
static int has_cudnn(void) {
    void* device = gpu->device_open(0, 0); // ATTENTION_AUTO
    int found = strncmp(gpu->attention_name(device), "cudnn", 5) == 0;
    gpu->device_close(device);
    return found;
}

static void truth_on_gpu(const char* flags, Precision precision) {
    if (gpu == NULL) {
        unit_skip(gpu_missing);
    } else if (strstr(flags, "cudnn") != NULL && !has_cudnn()) {
        unit_skip("no cuDNN attention");
    } else {
        truth_case(gpu, flags, precision);
    }
}
static void truth_bf16_gpu(void) {
    truth_on_gpu("--attention builtin --precision bf16", PRECISION_BF16);
}
static void truth_fp8_gpu(void) {
    truth_on_gpu("--attention builtin --precision fp8", PRECISION_FP8);
}
static void truth_fp8_head_gpu(void) {
    truth_on_gpu("--attention builtin --precision fp8 --fp8-lm-head 1", PRECISION_FP8);
}
static void truth_bf16_cudnn_gpu(void) {
    truth_on_gpu("--attention cudnn --precision bf16", PRECISION_BF16);
}
static void truth_fp8_cudnn_gpu(void) {
    truth_on_gpu("--attention cudnn --precision fp8", PRECISION_FP8);
}
static void truth_bf16_auto_gpu(void) {
    truth_on_gpu("--attention auto --precision bf16", PRECISION_BF16); // perhaps cuDNN forward, ours backward
}

// ---------------------------------------------------------------------------------------------------------------------
// small random models, with branches as large as the stream, so that every room of the model matters

typedef struct {
    const char* shape; // flags of the model and the batch
    GptConfig config;
    int B, T;
} SmallModel;

static const SmallModel small_models[] = {
    {"--attention builtin --num-layers 2 --channels 128 --num-heads 2 --vocab-size 300 --max-seq-len 64 --batch-size 4 "
     "--seq-len 64",
     {64, 300, 384, 2, 2, 128},
     4,
     64},
    {"--attention builtin --num-layers 3 --channels 96 --num-heads 2 --vocab-size 257 --max-seq-len 100 --batch-size 2 "
     "--seq-len 80",
     {100, 257, 384, 3, 2, 96},
     2,
     80},
};

// Weights in llm.c's order: linears of deviation 1/sqrt(inputs), position embeddings 1, token embeddings such that the
// logits' deviation is 1.5, LayerNorms around 1, biases 0.1. Rounded to BF16 like a checkpoint's.
static float* random_weights(Arena* arena, const GptConfig* config, uint64_t seed) {
    ParameterTable table = parameter_table(*config);
    float* w = arena_floats(arena, table.num_parameters);
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &table.tensor[t];
        double deviation = spec->is_linear   ? 1.0 / sqrt((double)spec->cols)
                           : t == TENSOR_WPE ? 1.0
                           : t == TENSOR_WTE ? 1.5 / sqrt((double)spec->cols)
                                             : 0.1;
        double mean = spec->init == INIT_ONE ? 1.0 : 0.0;
        for (size_t i = 0; i < spec->layers * spec->n; i++) {
            int padding = t == TENSOR_WTE && i >= (size_t)config->vocab_size * spec->cols;
            w[spec->offset + i] =
                padding ? 0.0f : bf16_round((float)(mean + deviation * rng_normal(seed, (uint64_t)t, i)));
        }
    }
    return w;
}

// What one session leaves behind.
typedef struct {
    float *logits, *losses; // of the first batch with the initial weights
    float* grads;           // of the first step
    HostStep step[64];
    float *master, *m, *v; // at the end
    ScaleSlot* slots;
    int num_slots;
} Trace;

enum { SMALL_STEPS = 10 };

static Trace trace_of(Arena* arena, const Floor* floor, const SmallModel* s, const char* more_flags, int num_steps,
                      int num_threads) {
    ParameterTable table = parameter_table(s->config);
    size_t BT = (size_t)s->B * s->T, V = (size_t)s->config.vocab_size, N = table.num_parameters;
    int num_tokens = (int)BT * 7 + 1; // seven windows: the loader wraps within ten steps
    float* weights = random_weights(arena, &s->config, 1);
    int* tokens = random_ints(arena, (size_t)num_tokens, s->config.vocab_size, 77);
    char flags[768];
    snprintf(flags, sizeof(flags), "%s --weight-decay 0.1 %s", s->shape, more_flags);
    Trace t = {};
    t.logits = arena_floats(arena, BT * V);
    t.losses = arena_floats(arena, BT);
    t.grads = arena_floats(arena, N);
    t.master = arena_floats(arena, N);
    t.m = arena_floats(arena, N);
    t.v = arena_floats(arena, N);
    void* session = floor->open(flags, weights, tokens, num_tokens, num_threads);
    floor->forward(session, t.logits, t.losses);
    for (int k = 0; k < num_steps; k++) {
        t.step[k] = floor->step(session, 1e-3f);
        if (k == 0) { floor->grads(session, t.grads); }
    }
    floor->weights(session, t.master, t.m, t.v);
    t.num_slots = floor->slots(session, NULL);
    t.slots = (ScaleSlot*)arena_bytes(arena, (size_t)t.num_slots * sizeof(ScaleSlot));
    floor->slots(session, t.slots);
    floor->close(session);
    return t;
}

static void expect_same_traces(const char* what, const Trace* a, const Trace* b, const SmallModel* s, int num_steps) {
    ParameterTable table = parameter_table(s->config);
    size_t BT = (size_t)s->B * s->T, V = (size_t)s->config.vocab_size, bytes = table.num_parameters * sizeof(float);
    expect(memcmp(a->logits, b->logits, BT * V * sizeof(float)) == 0, "%s: logits differ", what);
    expect(memcmp(a->losses, b->losses, BT * sizeof(float)) == 0, "%s: losses differ", what);
    expect(memcmp(a->grads, b->grads, bytes) == 0, "%s: gradients differ", what);
    expect(memcmp(a->step, b->step, (size_t)num_steps * sizeof(HostStep)) == 0, "%s: steps differ", what);
    expect(memcmp(a->master, b->master, bytes) == 0, "%s: weights differ", what);
    expect(memcmp(a->m, b->m, bytes) == 0 && memcmp(a->v, b->v, bytes) == 0, "%s: moments differ", what);
    expect(a->num_slots == b->num_slots && same_slots(a->slots, b->slots, a->num_slots), "%s: scale slots differ",
           what);
}

// The variants of a run that change which tensors are quantised, and how.
typedef struct {
    const char* flags;
    Precision precision;
    int first_fp8_layer, last_fp8_layer; // of the 2-layer model: layers in between have slots in use
} Variant;

static const Variant variants[] = {
    {"--precision bf16", PRECISION_BF16, 0, -1},
    {"--precision fp8", PRECISION_FP8, 0, 1},
    {"--precision fp8 --recipe current", PRECISION_FP8, 0, 1},
    {"--precision fp8 --bf16-layers 1,0", PRECISION_FP8, 1, 1},
    {"--precision fp8 --bf16-ops qkv,fcproj", PRECISION_FP8, 0, 1},
    {"--precision fp8 --bf16-ops proj,fc", PRECISION_FP8, 0, 1},
    {"--precision fp8 --fp8-lm-head 1", PRECISION_FP8, 0, 1},
    {"--precision fp8 --fp8-lm-head 1 --bf16-layers 2,0", PRECISION_FP8, 2, 1}, // the head alone
};
enum { NUM_VARIANTS = 8 };

// A run against FP32 on the CPU floor: within the error model. Returns the share of the limit that is used.
static double expect_near_fp32(const char* what, const Trace* got, const Trace* truth, const SmallModel* s,
                               Precision precision, double factor) {
    ParameterTable table = parameter_table(s->config);
    size_t BT = (size_t)s->B * s->T, V = (size_t)s->config.vocab_size;
    ErrorModel e = error_model(s->config.num_layers, precision, has_fp8_head(what));
    double logits = relative_distance(got->logits, truth->logits, BT * V), z = factor * e.logits * 1.5;
    expect(logits <= factor * e.logits, "%s: logits are %.3g off, want %.3g", what, logits, factor * e.logits);
    double off = fabs((double)got->step[0].loss - (double)truth->step[0].loss),
           allowed = 3.0 * z / sqrt((double)BT) + 0.5 * z * z;
    expect(off <= allowed, "%s: loss %.6f, want %.6f +- %.3g", what, (double)got->step[0].loss,
           (double)truth->step[0].loss, allowed);
    return expect_gradients(what, got->grads, truth->grads, &table, &e, factor);
}

// Where ten updates lead. Adam moves every weight by about lr in the direction of its gradient's sign; a gradient that
// is off by e (relative, independent) has the wrong sign in a share e/pi of the elements, each of which is then off by
// twice its move: sqrt(4 e / pi) of the movement. Returns the share of that.
static double expect_near_weights(const char* what, const Trace* got, const Trace* want, const float* start,
                                  const SmallModel* s, Precision precision, double factor) {
    size_t N = parameter_table(s->config).num_parameters;
    ErrorModel e = error_model(s->config.num_layers, precision, has_fp8_head(what));
    double allowed = sqrt(4.0 * factor * largest_gradient_error(&e) / 3.14159265), off = 0.0, moved = 0.0;
    for (size_t i = 0; i < N; i++) {
        off += pow((double)got->master[i] - (double)want->master[i], 2);
        moved += pow((double)want->master[i] - (double)start[i], 2);
    }
    double distance = sqrt(off / moved);
    expect(distance <= allowed, "%s: the weights are %.3g of their movement off, want %.3g", what, distance, allowed);
    return distance / allowed;
}

static void variants_near_fp32_cpu(void) {
    for (int i = 0; i < 2; i++) {
        Arena arena = {};
        const SmallModel* s = &small_models[i];
        float* start = random_weights(&arena, &s->config, 1);
        Trace truth = trace_of(&arena, cpu_floor, s, "--precision fp32", SMALL_STEPS, CPU_THREADS);
        for (int k = 0; k < NUM_VARIANTS; k++) {
            Trace t = trace_of(&arena, cpu_floor, s, variants[k].flags, SMALL_STEPS, CPU_THREADS);
            double worst = expect_near_fp32(variants[k].flags, &t, &truth, s, variants[k].precision, 1.0);
            double weights = expect_near_weights(variants[k].flags, &t, &truth, start, s, variants[k].precision, 1.0);
            expect(k > 1 || (worst > 0.25 && weights > 0.1),
                   "%s: the thresholds are loose: gradients %.2f, weights %.2f", variants[k].flags, worst, weights);
            if (i == 0) {
                printf("    %s: gradients %.0f%%, weights after %d steps %.0f%% of the allowed error\n",
                       variants[k].flags, 100.0 * worst, SMALL_STEPS, 100.0 * weights);
            }
        }
        arena_free(&arena);
    }
}

// What a variant keeps in BF16 has slots that are never used, and the others count their warm-up.
static void variants_slots_cpu(void) {
    Arena arena = {};
    for (int k = 0; k < NUM_VARIANTS; k++) {
        Trace t = trace_of(&arena, cpu_floor, &small_models[0], variants[k].flags, 3, CPU_THREADS);
        int current = strstr(variants[k].flags, "current") != NULL, warming = 0;
        for (int i = 0; i < t.num_slots; i++) {
            int layer = i / 12, linear = i / 3 % 4, is_weight = i % 3 == 1, is_head = i >= 24;
            int is_static = is_head && i % 3 == 2;
            int wide = is_head ? 0 :
                layer < variants[k].first_fp8_layer || layer > variants[k].last_fp8_layer ||
                (strstr(variants[k].flags, "qkv,fcproj") != NULL && (linear == 0 || linear == 3)) ||
                (strstr(variants[k].flags, "proj,fc ") != NULL) ||
                (strcmp(variants[k].flags, "--precision fp8 --bf16-ops proj,fc") == 0 && (linear == 1 || linear == 2));
            SlotPolicy want = is_static   ? SLOT_STATIC
                              : wide      ? SLOT_UNUSED
                              : is_weight ? SLOT_WEIGHT
                              : current   ? SLOT_JUST_IN_TIME
                                          : SLOT_DELAYED;
            const ScaleSlot* slot = &t.slots[i];
            expect(slot->policy == want, "%s: slot %d has policy %d, want %d", variants[k].flags, i, slot->policy,
                   (int)want);
            int counted = wide || is_weight || is_static ? 0 : 3;
            expect(slot->count == counted, "%s: slot %d holds %d amaxes, want %d", variants[k].flags, i, slot->count,
                   counted);
            expect(slot->warmup == AMAX_WARMUP - counted, "%s: slot %d warms up for %d", variants[k].flags, i,
                   slot->warmup);
            expect(wide || (slot->scale > 0.0f && slot->scale != 1.0f), "%s: slot %d never got a scale",
                   variants[k].flags, i);
            warming += !wide && !is_weight && !is_static;
            // 4 x 64 tokens, one micro-step
            expect(!is_static || slot->scale == 0x1p15f * 256.0f, "scale of dlogits is %g", (double)slot->scale);
        }
        expect(t.num_slots == 24 + 3 * has_fp8_head(variants[k].flags), "%s: %d slots", variants[k].flags, t.num_slots);
        expect(t.step[2].slots_warming == warming, "%s: %d slots warming, want %d", variants[k].flags,
               t.step[2].slots_warming, warming);
    }
    arena_free(&arena);
}

static void same_bits_twice_cpu(void) {
    Arena arena = {};
    for (int k = 0; k < NUM_VARIANTS; k++) {
        const SmallModel* s = &small_models[k % 2];
        Trace a = trace_of(&arena, cpu_floor, s, variants[k].flags, SMALL_STEPS, 1);
        Trace b = trace_of(&arena, cpu_floor, s, variants[k].flags, SMALL_STEPS, 1);
        Trace c = trace_of(&arena, cpu_floor, s, variants[k].flags, SMALL_STEPS, 2);
        expect_same_traces("two runs", &a, &b, s, SMALL_STEPS);
        expect_same_traces("one thread and two", &a, &c, s, SMALL_STEPS);
        expect((double)a.step[SMALL_STEPS - 1].loss < (double)a.step[0].loss - 0.05,
               "%s: the loss went from %g to %g in %d steps", variants[k].flags, (double)a.step[0].loss,
               (double)a.step[SMALL_STEPS - 1].loss, SMALL_STEPS);
    }
    arena_free(&arena);
}

// ---------------------------------------------------------------------------------------------------------------------
// GPU against CPU floor
//
// Both round in the same places, but add in different orders, so now and then a value falls on the other side of a
// rounding boundary, and everything behind it differs. With depth that ends where two independent roundings of one
// truth are: sqrt(2) times the error model, the limit used here. Near the input it is far less, which the op tests
// check.

static void gpu_variants_near_cpu(const char* accumulation, int num_variants) {
    for (int i = 0; i < 2; i++) {
        Arena arena = {};
        const SmallModel* s = &small_models[i];
        float* start = random_weights(&arena, &s->config, 1);
        for (int k = 0; k < num_variants; k++) {
            char flags[256];
            snprintf(flags, sizeof(flags), "%s%s%s", variants[k].flags, accumulation[0] ? " --total-batch-tokens " : "",
                     accumulation[0] ? (i == 0 ? "768" : "480") : "");
            Trace want = trace_of(&arena, cpu_floor, s, flags, SMALL_STEPS, 0);
            Trace got = trace_of(&arena, gpu, s, flags, SMALL_STEPS, 0);
            Trace again = trace_of(&arena, gpu, s, flags, SMALL_STEPS, 0);
            expect_same_traces(flags, &got, &again, s, SMALL_STEPS);
            double worst = expect_near_fp32(flags, &got, &want, s, variants[k].precision, sqrt(2.0));
            printf("    GPU, %s: gradients up to %.0f%% of their limit, losses after %d steps %.6f, CPU floor %.6f\n",
                   flags, 100.0 * worst, SMALL_STEPS, (double)got.step[SMALL_STEPS - 1].loss,
                   (double)want.step[SMALL_STEPS - 1].loss);
            ErrorModel e = error_model(s->config.num_layers, variants[k].precision, has_fp8_head(flags));
            // what hides in BF16 copies hides on both floors; what is left is noise of the updates: g relative to the
            // drop
            double g = sqrt(2.0) * fmax(e.bottom, e.layer[0]), z = sqrt(2.0) * e.logits * 1.5, BT = (double)s->B * s->T;
            for (int step = 0; step < SMALL_STEPS; step++) {
                double drop = fabs((double)want.step[0].loss - (double)want.step[step].loss);
                double allowed = 3.0 * z / sqrt(BT) + 0.5 * z * z + g * drop;
                double off = fabs((double)got.step[step].loss - (double)want.step[step].loss);
                expect(off <= allowed, "%s: step %d: loss %.6f, the CPU floor has %.6f +- %.3g", flags, step,
                       (double)got.step[step].loss, (double)want.step[step].loss, allowed);
                double norm = fabs((double)got.step[step].grad_norm / (double)want.step[step].grad_norm - 1.0);
                double moved = fabs((double)want.step[step].grad_norm / (double)want.step[0].grad_norm - 1.0);
                expect(norm <= 3.0 * g / sqrt(BT) + 0.5 * g * g + g * moved,
                       "%s: step %d: norm %.6f, the CPU floor has %.6f", flags, step, (double)got.step[step].grad_norm,
                       (double)want.step[step].grad_norm);
                expect(got.step[step].slots_warming == want.step[step].slots_warming, "%s: step %d: slots warming",
                       flags, step);
            }
            expect_near_weights(flags, &got, &want, start, s, variants[k].precision, sqrt(2.0));
        }
        arena_free(&arena);
    }
}

static void gpu_one_micro_step(void) {
    if (gpu == NULL) {
        unit_skip(gpu_missing);
    } else {
        gpu_variants_near_cpu("", NUM_VARIANTS);
    }
}

static void gpu_three_micro_steps(void) {
    if (gpu == NULL) {
        unit_skip(gpu_missing);
    } else {
        gpu_variants_near_cpu("3", 2);
    }
}

// Other accumulation: 14 bits in a sum of 128 to 384 terms are still far more than E4M3's 4. And chosen algorithms:
// near the CPU floor, the same bits from the file as from the choice, and a file that cannot be written ends nothing.
static void gpu_matmul_settings(void) {
    if (gpu == NULL) {
        unit_skip(gpu_missing);
        return;
    }
    Arena arena = {};
    const SmallModel* s = &small_models[0];
    char cache[256], flags[4][512];
    const char* folder = getenv("TMPDIR");
    snprintf(cache, sizeof(cache), "%s/test_gpt_fp8_matmul_%d.txt", folder != NULL ? folder : "/tmp", (int)getpid());
    const char* base = "--precision fp8 --fp8-lm-head 1";
    snprintf(flags[0], sizeof(flags[0]), "%s --autotune on --autotune-cache %s", base, cache);
    snprintf(flags[1], sizeof(flags[1]), "%s --autotune on --autotune-cache /dev/full/matmul.txt", base);
    snprintf(flags[2], sizeof(flags[2]), "%s --fast-accum forward,dgrad,wgrad", base);
    snprintf(flags[3], sizeof(flags[3]), "%s --fast-accum none", base);
    unlink(cache);
    Trace want = trace_of(&arena, cpu_floor, s, base, SMALL_STEPS, 0);
    for (int i = 0; i < 4; i++) {
        Trace got = trace_of(&arena, gpu, s, flags[i], SMALL_STEPS, 0);
        expect_near_fp32(flags[i], &got, &want, s, PRECISION_FP8, sqrt(2.0));
        if (i == 0) {
            expect(access(cache, R_OK) == 0, "'%s' was not written", cache);
            Trace again = trace_of(&arena, gpu, s, flags[i], SMALL_STEPS, 0);
            expect_same_traces("algorithms from the file", &got, &again, s, SMALL_STEPS);
        }
    }
    unlink(cache);
    snprintf(cache + strlen(cache), 8, ".lock");
    unlink(cache);
    arena_free(&arena);
}

// ---------------------------------------------------------------------------------------------------------------------
// behaviours; on the CPU floor, and on the GPU where there is one

// Gradients against finite differences of the loss, FP32: per tensor along its own gradient (the steepest way, so that
// the difference is far above FP32's noise), and for single parameters that have a large gradient.
static double mean_loss_of(void* session, const float* weights, float* losses, size_t BT) {
    cpu_floor->set_weights(session, weights);
    cpu_floor->forward(session, NULL, losses);
    double sum = 0.0;
    for (size_t i = 0; i < BT; i++) {
        sum += (double)losses[i] / (double)BT;
    }
    return sum;
}

static void finite_differences_fp32(void) {
    Arena arena = {};
    const SmallModel* s = &small_models[1];
    ParameterTable table = parameter_table(s->config);
    size_t BT = (size_t)s->B * s->T, N = table.num_parameters;
    Trace t = trace_of(&arena, cpu_floor, s, "--precision fp32", 1, CPU_THREADS);
    float *weights = random_weights(&arena, &s->config, 1), *moved = arena_floats(&arena, N),
          *losses = arena_floats(&arena, BT);
    int num_tokens = (int)BT * 7 + 1;
    int* tokens = random_ints(&arena, (size_t)num_tokens, s->config.vocab_size, 77);
    char flags[512];
    snprintf(flags, sizeof(flags), "%s --precision fp32", s->shape);
    void* session = cpu_floor->open(flags, weights, tokens, num_tokens, CPU_THREADS);
    for (int k = 0; k < NUM_TENSORS * s->config.num_layers; k++) {
        const TensorSpec* spec = &table.tensor[k / s->config.num_layers];
        int layer = k % s->config.num_layers;
        if (layer >= spec->layers) { continue; }
        size_t first = spec->offset + (size_t)layer * spec->n, largest = first;
        double norm = 0.0;
        for (size_t i = first; i < first + spec->n; i++) {
            norm += (double)t.grads[i] * (double)t.grads[i];
            if (fabsf(t.grads[i]) > fabsf(t.grads[largest])) { largest = i; }
        }
        norm = sqrt(norm);
        expect(norm > 1e-3, "%s, layer %d has no gradient", spec->name, layer);
        for (int single = 0; single < 2; single++) {
            double slope = single ? (double)t.grads[largest] : norm, step = single ? 1e-2 : 1e-2 / fmax(1.0, norm),
                   loss[2];
            for (int side = 0; side < 2; side++) {
                double by = side ? -step : step;
                memcpy(moved, weights, N * sizeof(float));
                for (size_t i = first; i < first + spec->n; i++) {
                    double direction = single ? (i == largest) : (double)t.grads[i] / norm;
                    moved[i] = (float)((double)weights[i] + by * direction);
                }
                loss[side] = mean_loss_of(session, moved, losses, BT);
            }
            // FP32 leaves 1e-7 of noise in the loss, the third derivative some step^2 of the slope
            double measured = (loss[0] - loss[1]) / (2.0 * step), allowed = 0.01 * fabs(slope) + 2e-7 / step;
            expect(fabs(measured - slope) <= allowed,
                   "%s, layer %d, %s: the loss has slope %.6g, the gradient says %.6g", spec->name, layer,
                   single ? "one parameter" : "along the gradient", measured, slope);
        }
    }
    cpu_floor->close(session);
    arena_free(&arena);
}

// The padding rows of wte are no tokens: no gradient, and they stay zero.
static void padding_stays_zero(void) {
    Arena arena = {};
    const SmallModel* s = &small_models[0];
    Trace t = trace_of(&arena, cpu_floor, s, "--precision fp8 --fp8-lm-head 1", SMALL_STEPS, CPU_THREADS);
    size_t first = (size_t)s->config.vocab_size * s->config.channels,
           last = (size_t)s->config.padded_vocab_size * s->config.channels;
    for (size_t i = first; i < last; i++) {
        expect(t.grads[i] == 0.0f && t.master[i] == 0.0f, "padding element %zu: gradient %g, weight %g", i - first,
               (double)t.grads[i], (double)t.master[i]);
    }
    arena_free(&arena);
}

// Weight decay pulls at matrices only. One step with a strong decay and one without, from the same weights.
static void decay_on_matrices_only(void) {
    Arena arena = {};
    const SmallModel* s = &small_models[0];
    ParameterTable table = parameter_table(s->config);
    float* start = random_weights(&arena, &s->config, 1);
    Trace without = trace_of(&arena, cpu_floor, s, "--precision bf16 --weight-decay 0", 1, CPU_THREADS);
    Trace with = trace_of(&arena, cpu_floor, s, "--precision bf16 --weight-decay 10", 1, CPU_THREADS);
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &table.tensor[t];
        for (size_t i = spec->offset; i < spec->offset + spec->layers * spec->n; i++) {
            double pull = spec->rows > 1 ? 1e-3 * 10.0 * (double)start[i] : 0.0,
                   got = (double)without.master[i] - (double)with.master[i];
            expect(fabs(got - pull) <= (spec->rows > 1 ? 1e-6 : 0.0), "%s[%zu]: decay pulls by %g, want %g", spec->name,
                   i - spec->offset, got, pull);
        }
    }
    arena_free(&arena);
}

// After the warm-up the scale that quantises is the one that the ring decided a step before; the run stays close to one
// that always measures first.
static void delayed_scaling_on(const Floor* floor) {
    Arena arena = {};
    const SmallModel* s = &small_models[0];
    enum { STEPS = AMAX_WARMUP + 8 };
    Trace delayed = trace_of(&arena, floor, s, "--precision fp8 --amax-history 4 --margin 1", STEPS, CPU_THREADS);
    Trace current = trace_of(&arena, floor, s, "--precision fp8 --recipe current --margin 1", STEPS, CPU_THREADS);
    ScaleRecipe recipe = {4, AMAX_MAX, 1, 1.0f};
    for (int i = 0; i < delayed.num_slots; i++) {
        const ScaleSlot* slot = &delayed.slots[i];
        if (slot->policy != SLOT_DELAYED) { continue; }
        expect(slot->warmup == 0 && slot->count == 4, "slot %d: warmup %d, count %d", i, slot->warmup, slot->count);
        float amax = 0.0f;
        for (int k = 0; k < 4; k++) {
            amax = fmaxf(amax, slot->history[k]);
        }
        expect(slot->scale == scale_from_amax(amax, 0.0f, slot->fp8_max, recipe), "slot %d: scale %g of amax %g", i,
               (double)slot->scale, (double)amax);
        // the bytes of the last step were written with the scale of the ring as it was before that step
        float newest = scale_slot_ring_amax(slot, ScaleRecipe{4, AMAX_MOST_RECENT, 1, 1.0f});
        double used = 1.0 / (double)slot->descale, jit = (double)scale_from_amax(newest, 0.0f, slot->fp8_max, recipe);
        expect(used > 0.5 * jit && used < 2.0 * jit, "slot %d: written with scale %g, its own amax asks for %g", i,
               used, jit);
    }
    int warm = memcmp(&delayed.step[AMAX_WARMUP - 1].loss, &current.step[AMAX_WARMUP - 1].loss, sizeof(float)) == 0;
    expect(warm, "until the end of the warm-up both recipes are one");
    expect(delayed.step[AMAX_WARMUP - 1].slots_warming == 0 && current.step[STEPS - 1].slots_warming == 16,
           "slots warming: %d, %d", delayed.step[AMAX_WARMUP - 1].slots_warming, current.step[STEPS - 1].slots_warming);
    expect(memcmp(delayed.master, current.master, parameter_table(s->config).num_parameters * sizeof(float)) != 0,
           "delayed scaling never took over");
    // a scale that is off by a factor does not change the relative rounding error of FP8, only which way values round
    ErrorModel e = error_model(s->config.num_layers, PRECISION_FP8, 0);
    double z = sqrt(2.0) * e.logits * 1.5, allowed = 3.0 * z / sqrt((double)s->B * s->T) + 0.5 * z * z;
    double off = fabs((double)delayed.step[STEPS - 1].loss - (double)current.step[STEPS - 1].loss);
    expect(off <= allowed, "after %d steps the losses are %.6f and %.6f", (int)STEPS,
           (double)delayed.step[STEPS - 1].loss, (double)current.step[STEPS - 1].loss);
    arena_free(&arena);
}

static void delayed_scaling_cpu(void) {
    delayed_scaling_on(cpu_floor);
}
static void delayed_scaling_gpu(void) {
    if (gpu == NULL) {
        unit_skip(gpu_missing);
    } else {
        delayed_scaling_on(gpu);
    }
}

// One batch of 4 sequences, or 2 micro-steps of 2, or 4 of 1: the same gradient.
static void accumulation_equals_one_batch(void) {
    Arena arena = {};
    SmallModel s = small_models[0];
    ParameterTable table = parameter_table(s.config);
    const char* format =
        "--num-layers 2 --channels 128 --num-heads 2 --vocab-size 300 --max-seq-len 64 --batch-size %d --seq-len 64";
    float* weights = random_weights(&arena, &s.config, 1);
    int* tokens = random_ints(&arena, 257, s.config.vocab_size, 77);
    float* grads[3];
    HostStep step[3];
    for (int i = 0; i < 3; i++) {
        char shape[256], flags[512];
        snprintf(shape, sizeof(shape), format, 4 >> i);
        snprintf(flags, sizeof(flags), "%s --precision fp32 --total-batch-tokens 256", shape);
        void* session = cpu_floor->open(flags, weights, tokens, 257, CPU_THREADS);
        grads[i] = arena_floats(&arena, table.num_parameters);
        step[i] = cpu_floor->step(session, 1e-3f);
        cpu_floor->grads(session, grads[i]);
        cpu_floor->close(session);
        double distance = relative_distance(grads[i], grads[0], table.num_parameters);
        expect(distance < 1e-5, "%d micro-steps: the gradient is %.3g off", 1 << i, distance);
        expect(fabs((double)step[i].loss - (double)step[0].loss) < 1e-5, "%d micro-steps: loss %.7f, want %.7f", 1 << i,
               (double)step[i].loss, (double)step[0].loss);
    }
    arena_free(&arena);
}

typedef struct {
    void* session;
    float *master, *m, *v;
    ScaleSlot* slots;
    int num_slots;
    size_t N;
} Snapshot;

static Snapshot snapshot(Arena* arena, const Floor* floor, void* session, size_t N) {
    Snapshot s = {session, arena_floats(arena, N), arena_floats(arena, N), arena_floats(arena, N), NULL, 0, N};
    floor->weights(session, s.master, s.m, s.v);
    s.num_slots = floor->slots(session, NULL);
    s.slots = (ScaleSlot*)arena_bytes(arena, (size_t)s.num_slots * sizeof(ScaleSlot));
    floor->slots(session, s.slots);
    return s;
}

static void expect_same_state(const char* what, const Snapshot* a, const Snapshot* b) {
    size_t bytes = a->N * sizeof(float);
    expect(memcmp(a->master, b->master, bytes) == 0, "%s: weights moved", what);
    expect(memcmp(a->m, b->m, bytes) == 0 && memcmp(a->v, b->v, bytes) == 0, "%s: moments moved", what);
}

// A NaN in what the passes read: the step is skipped, not one bit of the weights or moments moves, the slots that saw
// it warm up again, and when the damage is gone the next step trains.
static void nan_is_skipped_on(const Floor* floor, const char* precision) {
    Arena arena = {};
    const SmallModel* s = &small_models[0];
    ParameterTable table = parameter_table(s->config);
    int BT = s->B * s->T, fp8 = strstr(precision, "fp8") != NULL;
    char flags[512];
    snprintf(flags, sizeof(flags), "%s --precision %s", s->shape, precision);
    int* tokens =
        random_ints(&arena, (size_t)BT + 1, s->config.vocab_size, 77); // one window: every step the same batch
    void* session = floor->open(flags, random_weights(&arena, &s->config, 1), tokens, BT + 1, CPU_THREADS);
    HostStep step = {};
    for (int k = 0; k < 18; k++) {
        step = floor->step(session, 1e-3f);
        int warming = fp8 && k < AMAX_WARMUP - 1 ? 16 : 0; // 2 layers x 4 linears x (input, gradient)
        expect(step.slots_warming == warming, "step %d: %d slots warming, want %d", k, step.slots_warming, warming);
    }
    Snapshot before = snapshot(&arena, floor, session, table.num_parameters);
    for (int bad = 0; bad < 2; bad++) {                                                      // twice in a row
        float good = floor->poke(session, TENSOR_LN1W, (size_t)s->config.channels + 5, NAN); // layer 1
        HostStep skipped = floor->step(session, 1e-3f);
        floor->poke(session, TENSOR_LN1W, (size_t)s->config.channels + 5, good);
        expect(skipped.skipped == 1 && !isfinite(skipped.loss), "a NaN step: skipped %d, loss %g", skipped.skipped,
               (double)skipped.loss);
        Snapshot after = snapshot(&arena, floor, session, table.num_parameters);
        expect_same_state("a skipped step", &before, &after);
        int warming = 0;
        for (int i = 0; i < after.num_slots; i++) {
            const ScaleSlot *a = &after.slots[i], *b = &before.slots[i];
            if (a->policy != SLOT_DELAYED) {
                expect(a->scale == b->scale, "slot %d: scale %g, was %g", i, (double)a->scale, (double)b->scale);
            } else if (i / 12 == 0 && i % 3 == 0) { // the inputs of layer 0's linears come before the damage
                expect(a->warmup == 0 && a->count == b->count + bad + 1, "slot %d was healthy: warmup %d", i,
                       a->warmup);
            } else {
                expect(a->warmup == AMAX_WARMUP && a->count == b->count, "slot %d saw NaN: warmup %d, count %d", i,
                       a->warmup, a->count);
                expect(a->scale == b->scale, "slot %d: scale %g, was %g", i, (double)a->scale, (double)b->scale);
            }
            warming += scale_slot_is_warming(a);
        }
        expect(skipped.slots_warming == warming, "%d slots warming, want %d", skipped.slots_warming, warming);
        expect(!fp8 || warming == 12, "%d slots warming, want 12: 4 inputs, 8 gradients", warming);
    }
    for (int k = 0; k < AMAX_WARMUP; k++) {
        HostStep next = floor->step(session, 1e-3f);
        expect(next.skipped == 0 && isfinite(next.loss) && next.loss < step.loss + 0.05f,
               "after the damage: skipped %d, loss %g, was %g", next.skipped, (double)next.loss, (double)step.loss);
        int healed = k == AMAX_WARMUP - 1 || !fp8;
        expect((next.slots_warming == 0) == healed, "%d steps after the damage: %d slots warming", k + 1,
               next.slots_warming);
        step = next;
    }
    floor->close(session);
    arena_free(&arena);
}

static void nan_is_skipped_fp8_cpu(void) {
    nan_is_skipped_on(cpu_floor, "fp8");
}
static void nan_is_skipped_bf16_cpu(void) {
    nan_is_skipped_on(cpu_floor, "bf16");
}
static void nan_is_skipped_fp8_gpu(void) {
    if (gpu == NULL) {
        unit_skip(gpu_missing);
    } else {
        nan_is_skipped_on(gpu, "fp8");
    }
}

// With just-in-time scales and the same batch every step, a damaged step leaves no trace at all: the run with one
// equals the run without, bit for bit.
static void nan_leaves_no_trace(void) {
    Arena arena = {};
    const SmallModel* s = &small_models[0];
    ParameterTable table = parameter_table(s->config);
    int BT = s->B * s->T;
    char flags[512];
    snprintf(flags, sizeof(flags), "%s --precision fp8 --recipe current", s->shape);
    int* tokens = random_ints(&arena, (size_t)BT + 1, s->config.vocab_size, 77);
    float* weights = random_weights(&arena, &s->config, 1);
    Snapshot end[2];
    for (int damaged = 0; damaged < 2; damaged++) {
        void* session = cpu_floor->open(flags, weights, tokens, BT + 1, CPU_THREADS);
        for (int k = 0; k < 4; k++) {
            if (damaged && k == 2) {
                float good = cpu_floor->poke(session, TENSOR_WTE, 3, NAN); // the LM head reads every row of wte
                expect(cpu_floor->step(session, 1e-3f).skipped == 1, "the damaged step was not skipped");
                cpu_floor->poke(session, TENSOR_WTE, 3, good);
            }
            expect(cpu_floor->step(session, 1e-3f).skipped == 0, "step %d was skipped", k);
        }
        end[damaged] = snapshot(&arena, cpu_floor, session, table.num_parameters);
        cpu_floor->close(session);
    }
    expect_same_state("a run with a damaged step", &end[0], &end[1]);
    arena_free(&arena);
}

// How a run is made, the second time, that must end with the bits of the first.
typedef enum {
    SECOND_VALIDATES, // between all steps
    SECOND_LAUNCHES_EARLY,
    SECOND_IS_RESUMED // twice, by sessions that begin with other weights: while scales warm up, and when they are warm
} SecondRun;

// The session goes to disk, and comes back in another one.
static void* resumed(const Floor* floor, void* session, const char* flags, const float* other_weights, const int* tokens,
                     int num_tokens) {
    char run[300];
    snprintf(run, sizeof(run), "%s/test_gpt_fp8_XXXXXX", getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp");
    check(mkdtemp(run) != NULL, "cannot make '%s': %s", run, strerror(errno));
    expect(floor->save(session, run), "%s: no checkpoint was written", flags);
    floor->close(session);
    session = floor->open(flags, other_weights, tokens, num_tokens, CPU_THREADS);
    floor->load(session, run);
    int* steps;
    for (int i = snapshot_steps(run, &steps) - 1; i >= 0; i--) {
        char folder[SNAPSHOT_PATH];
        snapshot_path(folder, sizeof(folder), run, steps[i], NULL);
        snapshot_remove_folder(folder);
    }
    free(steps);
    char latest[310];
    snprintf(latest, sizeof(latest), "%s/latest", run);
    remove(latest);
    expect(rmdir(run) == 0, "'%s' holds more than checkpoints: %s", run, strerror(errno));
    return session;
}

// Two runs on the same floor end with the same bits: through the warm-up, when scales move in every step, and after it.
static void expect_no_difference(const Floor* floor, const SmallModel* s, SecondRun difference) {
    const char* flags_of[] = {"--precision fp8 --fp8-lm-head 1", "--precision bf16",
                              "--precision fp8 --recipe current"};
    for (int i = 0; i < 3; i++) {
        Arena arena = {};
        ParameterTable table = parameter_table(s->config);
        int num_tokens = 5 * s->B * s->T + 1;
        char flags[512];
        snprintf(flags, sizeof(flags), "%s %s", s->shape, flags_of[i]);
        int* tokens = random_ints(&arena, (size_t)num_tokens, s->config.vocab_size, 77);
        float* weights = random_weights(&arena, &s->config, 1);
        Snapshot end[2];
        HostStep last[2];
        for (int second = 0; second < 2; second++) {
            void* session = floor->open(flags, weights, tokens, num_tokens, CPU_THREADS);
            if (difference == SECOND_LAUNCHES_EARLY) { floor->launch_early(session, second); }
            for (int k = 0; k < AMAX_WARMUP + 4; k++) {
                if (difference == SECOND_IS_RESUMED && second && (k == 5 || k == AMAX_WARMUP + 2)) {
                    session = resumed(floor, session, flags, random_weights(&arena, &s->config, 2), tokens, num_tokens);
                }
                if (difference == SECOND_VALIDATES && second) {
                    float loss = floor->validate(session, 2);
                    expect(isfinite(loss) && loss == floor->validate(session, 2), "%s: validation is not repeatable",
                           flags_of[i]);
                }
                last[second] = floor->step(session, 1e-3f);
            }
            end[second] = snapshot(&arena, floor, session, table.num_parameters);
            floor->close(session);
        }
        expect_same_state(flags_of[i], &end[0], &end[1]);
        expect(memcmp(&last[0], &last[1], sizeof(HostStep)) == 0, "%s: the last step differs", flags_of[i]);
        for (int k = 0; k < end[0].num_slots; k++) { // jit_amax is scratch; all that decides a scale must be equal
            ScaleSlot a = end[0].slots[k], b = end[1].slots[k];
            a.jit_amax = b.jit_amax = 0.0f;
            expect(same_slots(&a, &b, 1), "%s: slot %d differs", flags_of[i], k);
        }
        arena_free(&arena);
    }
}

// Looking at a run does not change it.
static void validation_changes_nothing_cpu(void) {
    expect_no_difference(cpu_floor, &small_models[0], SECOND_VALIDATES);
}
static void validation_changes_nothing_gpu(void) {
    if (gpu == NULL) {
        unit_skip(gpu_missing);
    } else {
        expect_no_difference(gpu, &small_models[0], SECOND_VALIDATES);
    }
}

// A run that is interrupted and continued from its checkpoint ends where one ends that never stopped.
static void resume_changes_nothing_cpu(void) { expect_no_difference(cpu_floor, &small_models[0], SECOND_IS_RESUMED); }
static void resume_changes_nothing_gpu(void) {
    if (gpu == NULL) {
        unit_skip(gpu_missing);
    } else {
        expect_no_difference(gpu, &small_models[0], SECOND_IS_RESUMED);
        expect_no_difference(gpu, &small_models[1], SECOND_IS_RESUMED);
    }
}

// Kernels that are placed before the one in front of them has ended see what they see when they are not. The products
// between are cuBLASLt's, whose kernels may be launched early, too.
static void early_launch_changes_nothing_gpu(void) {
    if (gpu == NULL) {
        unit_skip(gpu_missing);
    } else {
        expect_no_difference(gpu, &small_models[0], SECOND_LAUNCHES_EARLY);
        expect_no_difference(gpu, &small_models[1], SECOND_LAUNCHES_EARLY);
    }
}

// The validation loss is the mean of the losses that a forward pass finds, and of the step's own batch before an
// update.
static void losses_agree(void) {
    const char* flags_of[] = {"--precision fp32", "--precision bf16", "--precision fp8"};
    for (int i = 0; i < 3; i++) {
        Arena arena = {};
        const SmallModel* s = &small_models[1];
        int BT = s->B * s->T;
        char flags[512];
        snprintf(flags, sizeof(flags), "%s %s", s->shape, flags_of[i]);
        int* tokens = random_ints(&arena, (size_t)BT + 1, s->config.vocab_size, 77);
        void* session = cpu_floor->open(flags, random_weights(&arena, &s->config, 1), tokens, BT + 1, CPU_THREADS);
        float* losses = arena_floats(&arena, (size_t)BT);
        cpu_floor->forward(session, NULL, losses);
        double mean = 0.0;
        for (int k = 0; k < BT; k++) {
            mean += (double)losses[k] / BT;
        }
        double validation = (double)cpu_floor->validate(session, 1),
               step = (double)cpu_floor->step(session, 1e-3f).loss;
        expect(fabs(validation - mean) < 1e-5, "%s: validation %.7f, want %.7f", flags_of[i], validation, mean);
        expect(fabs(step - mean) < 1e-5, "%s: step %.7f, want %.7f", flags_of[i], step, mean);
        expect(mean > 3.0 && mean < 9.0, "%s: a loss of %.3f for random weights", flags_of[i], mean);
        cpu_floor->close(session);
        arena_free(&arena);
    }
}

#include "dev/test_ranks.h"

// ---------------------------------------------------------------------------------------------------------------------

static const NamedTest model_tests[] = {
    {"truth_fp32_cpu", truth_fp32_cpu},
    {"truth_bf16_cpu", truth_bf16_cpu},
    {"truth_bf16_nearest_cpu", truth_bf16_nearest_cpu},
    {"truth_fp8_cpu", truth_fp8_cpu},
    {"truth_fp8_head_cpu", truth_fp8_head_cpu},
    {"truth_bf16_gpu", truth_bf16_gpu},
    {"truth_fp8_gpu", truth_fp8_gpu},
    {"truth_fp8_head_gpu", truth_fp8_head_gpu},
    {"truth_bf16_cudnn_gpu", truth_bf16_cudnn_gpu},
    {"truth_fp8_cudnn_gpu", truth_fp8_cudnn_gpu},
    {"truth_bf16_auto_gpu", truth_bf16_auto_gpu},
    {"model_finite_differences_fp32", finite_differences_fp32},
    {"model_variants_near_fp32_cpu", variants_near_fp32_cpu},
    {"model_variants_slots_cpu", variants_slots_cpu},
    {"model_same_bits_twice_cpu", same_bits_twice_cpu},
    {"model_gpu_one_micro_step", gpu_one_micro_step},
    {"model_gpu_three_micro_steps", gpu_three_micro_steps},
    {"model_gpu_matmul_settings", gpu_matmul_settings},
    {"model_delayed_scaling_cpu", delayed_scaling_cpu},
    {"model_delayed_scaling_gpu", delayed_scaling_gpu},
    {"model_decay_on_matrices_only", decay_on_matrices_only},
    {"model_padding_stays_zero", padding_stays_zero},
    {"model_accumulation_equals_one_batch", accumulation_equals_one_batch},
    {"model_losses_agree", losses_agree},
    {"model_nan_is_skipped_fp8_cpu", nan_is_skipped_fp8_cpu},
    {"model_nan_is_skipped_bf16_cpu", nan_is_skipped_bf16_cpu},
    {"model_nan_is_skipped_fp8_gpu", nan_is_skipped_fp8_gpu},
    {"model_nan_leaves_no_trace", nan_leaves_no_trace},
    {"model_validation_changes_nothing_cpu", validation_changes_nothing_cpu},
    {"model_validation_changes_nothing_gpu", validation_changes_nothing_gpu},
    {"model_early_launch_changes_nothing_gpu", early_launch_changes_nothing_gpu},
    {"model_resume_changes_nothing_cpu", resume_changes_nothing_cpu},
    {"model_resume_changes_nothing_gpu", resume_changes_nothing_gpu},
};
enum { NUM_MODEL_TESTS = sizeof(model_tests) / sizeof(model_tests[0]) };

// All of them, in order.
static const NamedTest* test_at(int i) {
    if (i < ops::NUM_OP_TESTS) { return &ops::op_tests[i]; }
    i -= ops::NUM_OP_TESTS;
    return i < NUM_MODEL_TESTS ? &model_tests[i] : &rank_tests[i - NUM_MODEL_TESTS];
}

// Ops are tested GPU against CPU floor; in the g++ build the CPU floor on two threads against itself on one.
static void open_op_floors(void) {
#ifdef __CUDACC__
    ops::op_floors.subject = gpu;
    ops::op_floors.skip = gpu == NULL ? gpu_missing : NULL;
    ops::op_floors.thorough = getenv("TEST_QUICK") == NULL;
#else
    ops::op_floors.subject = cpu_floor;
    ops::op_floors.exact = 1;
#endif
    ops::op_floors.reference = cpu_floor;
    if (team.num_ranks > 1) { ops::op_floors.skip = "ops are tested on one rank, without mpirun"; }
    if (ops::op_floors.skip != NULL) { return; }
    ops::op_floors.reference_device = cpu_floor->device_open(ops::op_floors.exact ? 1 : 0, 1); // ATTENTION_BUILTIN
    ops::op_floors.subject_device = ops::op_floors.subject->device_open(2, 1);
}

int main(int argc, char** argv) {
    cpu::cpu_spin_briefly(argv); // may start this program again, so before anything else
    check(argc <= 2, "usage: %s [part of the names of the tests to run]", argv[0]);
    const char* filter = argc == 2 ? argv[1] : "";
    team_join(&argc, &argv);
    gpu = gpu_floor(&gpu_missing);
    open_op_floors();
    for (int i = 0; i < ops::NUM_OP_TESTS + NUM_MODEL_TESTS + NUM_RANK_TESTS; i++) {
        const NamedTest* test = test_at(i);
        if (strstr(test->name, filter) == NULL) { continue; }
#ifndef __CUDACC__
        if (strstr(test->name, "_gpu") != NULL || strstr(test->name, "_cudnn") != NULL) {
            continue;
        } // of the other binary
        if (i >= ops::NUM_OP_TESTS + NUM_MODEL_TESTS && team.num_ranks == 1 && *filter == 0) {
            continue;
        } // `make test` runs them under mpirun
#endif
        team_run(test);
    }
    if (ops::op_floors.skip == NULL) {
        ops::op_floors.subject->device_close(ops::op_floors.subject_device);
        ops::op_floors.reference->device_close(ops::op_floors.reference_device);
    }
    team_leave();
    return unit_report();
}
