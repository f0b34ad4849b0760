// The end of a step: gradient norm, AdamW, parameters from master weights, scale update, loss sum.
//
//     bench-adamw
#include "../lib/adamw.cuh"
#include "../lib/grad_norm.cuh"
#include "../lib/scale_update.cuh"

#include "bench.cuh"

enum { SEED_MASTER = 1, SEED_M, SEED_V, SEED_GRAD, NUM_SLOTS = 576 };
#define SMALLEST_V 0.01f

typedef struct {
    ParamState p;
    AdamW adamw;
    StepState* state;
    size_t num_grads;
    ScaleSlot* slots;
    float* amaxes;
} Args;

static void run_norm(Device* dev, const void* args_) {
    const Args* a = (const Args*)args_;
    global_norm(dev, a->state, a->p.grad, a->num_grads);
}

static void run_update(Device* dev, const void* args_) {
    const Args* a = (const Args*)args_;
    adamw_update(dev, a->p, a->adamw, a->state);
}

static void run_params(Device* dev, const void* args_) {
    params_from_master(dev, ((const Args*)args_)->p, ((const Args*)args_)->adamw);
}

static void run_scales(Device* dev, const void* args_) {
    const Args* a = (const Args*)args_;
    scale_slots_gather(dev, a->amaxes, a->slots, NUM_SLOTS);
    scale_slots_step(dev, a->slots, a->amaxes, NUM_SLOTS, bench_recipe(), a->state);
}

static void run_loss(Device* dev, const void* args_) {
    const Args* a = (const Args*)args_;
    loss_add(dev, a->state, a->p.grad, 0.0f, 65536);
}

// First moments are anything; second moments are positive, and not so small that a step leaves FP32's digits.
__global__ void second_moment_kernel(float* x, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) {
        x[i] = x[i] * x[i] + SMALLEST_V;
    }
}

static void check_update(Bench* b, const Args* a, double norm) {
    size_t n = a->p.layers * a->p.n;
    AdamW w = a->adamw;
    double factor = norm > w.grad_clip ? w.grad_clip / norm : 1.0;
    for (int s = 0; s < 4096; s++) {
        size_t i = s == 0 ? 0 : s == 1 ? n - 1 : (size_t)s * 2654435761u % n;
        double g = bench_value(SEED_GRAD, i) * factor, v0 = bench_value(SEED_V, i),
               master = bench_value(SEED_MASTER, i);
        double m = (double)w.beta1 * bench_value(SEED_M, i) + (1.0 - (double)w.beta1) * g;
        double v = (double)w.beta2 * (v0 * v0 + SMALLEST_V) + (1.0 - (double)w.beta2) * g * g;
        double m_hat = m / (1.0 - pow(w.beta1, w.t)), v_hat = v / (1.0 - pow(w.beta2, w.t));
        master -= w.lr * (m_hat / (sqrt(v_hat) + w.eps) + w.weight_decay * master);
        float got;
        device_copy_out(b->dev, &got, a->p.master + i, sizeof(got));
        bench_expect_near(b, "adamw_update master", i, got, master, 0x1p-20,
                          0x1p-18 * w.lr * (1.0 + fabs(m_hat) / (sqrt(v_hat) + w.eps)));
        if (a->p.param != NULL) {
            float param;
            bf16_to_host(b->dev, &param, a->p.param + i, 1);
            float want = bf16_round_stochastic(got, philox(w.seed, (uint64_t)w.t, i / 4).word[i % 4]);
            bench_expect_near(b, "adamw_update param", i, param, want, 0.0, 0.0);
        }
    }
}

static void bench_one(Bench* b, const char* size, int layers, size_t n, int fp8) {
    size_t total = layers * n;
    Args a = {};
    a.p = ParamState{bench_float(b, total, SEED_MASTER),
                     bench_float(b, total, SEED_M),
                     bench_float(b, total, SEED_V),
                     bench_float(b, total, SEED_GRAD),
                     NULL,
                     NULL,
                     12,
                     layers,
                     n,
                     0};
    second_moment_kernel<<<2048, 256, 0, b->dev->stream>>>(a.p.v, total);
    cuda_check(cudaGetLastError());
    a.num_grads = total;
    ScaleSlot* slots = (ScaleSlot*)malloc_or_die(NUM_SLOTS * sizeof(ScaleSlot));
    for (int i = 0; i < NUM_SLOTS; i++) {
        scale_slot_init(&slots[i], E4M3_MAX, i % 12 == 0 ? SLOT_WEIGHT : SLOT_DELAYED);
        slots[i].count = AMAX_HISTORY_MAX; // the longest walk
        slots[i].amax = 1.0f;
    }
    a.slots = (ScaleSlot*)device_malloc(b->dev, NUM_SLOTS * sizeof(ScaleSlot));
    a.amaxes = (float*)device_malloc(b->dev, NUM_SLOTS * sizeof(float));
    device_copy_in(b->dev, a.slots, slots, NUM_SLOTS * sizeof(ScaleSlot));
    if (fp8) {
        a.p.slot = a.slots;
    } else {
        a.p.param = (bf16*)bench_poisoned(b, total * sizeof(bf16));
    }
    a.state = (StepState*)device_malloc(b->dev, sizeof(StepState));
    device_zero(b->dev, a.state, sizeof(StepState));
    a.adamw = AdamW{1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 3, 1, 42};

    StepState state;
    run_norm(b->dev, &a);
    device_copy_out(b->dev, &state, a.state, sizeof(state));
    double squares = 0.0;
    size_t step = total > ((size_t)1 << 24) ? 97 : 1; // a sample of many: the values are independent
    for (size_t i = 0; i < total; i += step) {
        squares += (double)bench_value(SEED_GRAD, i) * bench_value(SEED_GRAD, i) * (double)step;
    }
    bench_expect_near(b, "global_norm", 0, state.grad_norm, sqrt(squares), step == 1 ? 0x1p-20 : 0x1p-8, 0.0);
    bench_expect(b, state.skip == 0, "global_norm: skip %d, want 0", state.skip);
    run_update(b->dev, &a);
    check_update(b, &a, state.grad_norm);
    if (fp8) {
        device_copy_out(b->dev, slots, a.slots, NUM_SLOTS * sizeof(ScaleSlot));
        for (int layer = 0; layer < layers; layer++) {
            float amax = slots[layer * 12].amax;
            bench_expect(b, amax > 1.0f && amax < 10.0f, "adamw_update: amax of layer %d is %g, want 1..10", layer,
                         amax);
        }
    }
    bench_report(b, "global_norm", size, run_norm, &a, 4.0 * (double)total);
    bench_report(b, fp8 ? "adamw_update fp8" : "adamw_update bf16", size, run_update, &a,
                 (fp8 ? 28.0 : 30.0) * (double)total);
    bench_report(b, fp8 ? "params_from_master fp8" : "params_from_master bf16", size, run_params, &a,
                 (fp8 ? 4.0 : 6.0) * (double)total);
    if (fp8) {
        bench_report(b, "scale_slots_gather + step", "576 slots", run_scales, &a, 2.0 * NUM_SLOTS * sizeof(ScaleSlot));
        bench_report(b, "loss_add", "65536 losses", run_loss, &a, 65536 * 4.0);
    }
    free(slots);
    void* pointers[] = {a.p.master, a.p.m, a.p.v, (void*)a.p.grad, a.p.param, a.slots, a.amaxes, a.state};
    for (size_t i = 0; i < sizeof(pointers) / sizeof(pointers[0]); i++) {
        if (pointers[i] != NULL) { device_release(b->dev, pointers[i]); }
    }
}

int main(void) {
    Bench b = bench_create(1024);
    bench_one(&b, "d12 fc 12 x 2359296", 12, (size_t)3072 * 768, 1);
    bench_one(&b, "d48 fc 48 x 10240000", 48, (size_t)6400 * 1600, 1);
    bench_one(&b, "d48 fc 48 x 10240000", 48, (size_t)6400 * 1600, 0);
    bench_one(&b, "small 3 x 1236", 3, 1236, 0);
    return bench_finish(&b);
}
