// Tests of the end of a step: loss, norm, AdamW, scales.
#ifndef TEST_OPS_STEP_H
#define TEST_OPS_STEP_H

#include "test_ops_tools.h"

namespace ops {

static HostState* state_of(Arena* arena, float loss, float grad_norm, int skip) {
    HostState* state = (HostState*)arena_bytes(arena, sizeof(HostState));
    state->loss = loss;
    state->grad_norm = grad_norm;
    state->skip = skip;
    state->slots_warming = -5; // nobody's business here
    return state;
}

static void ops_loss_add(void) {
    if (op_test_skipped()) { return; }
    size_t counts[] = {1, 100, 4113, 65536};
    for (int i = 0; i < 4; i++) {
        Arena arena = {};
        size_t n = counts[i];
        float* losses = random_floats(&arena, n, 5, 1, 1);
        OpCall call = op_call(OP_LOSS_ADD);
        call.n = n, call.factor = 1.0f / (3.0f * (float)n);
        call.C = 4096;
        arg_add(&call, "state", ARG_STATE, ARG_INOUT, state_of(&arena, 2.5f, 3.0f, 1), 1);
        arg_add(&call, "losses", ARG_F32, ARG_IN, losses, n);
        double want = 2.5;
        for (size_t k = 0; k < n; k++) {
            want += (double)call.factor * (double)losses[k];
        }
        Rule rules[] = {rule_ignore("state")};
        OpOutcome outcome = run_case(&arena, "loss_add", &call, rules, 1);
        const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
        for (int k = 0; k < 2; k++) {
            const HostState* state = (const HostState*)arg_find(calls[k], "state")->host;
            expect(fabs((double)state->loss - want) <= sum_factor((double)n) * want, "n %zu: loss %.9g, want %.9g", n,
                   (double)state->loss, want);
            expect(state->grad_norm == 3.0f && state->skip == 1 && state->slots_warming == -5,
                   "n %zu: more than the loss moved", n);
        }
        arena_free(&arena);
    }
}

static void ops_global_norm(void) {
    if (op_test_skipped()) { return; }
    size_t counts[] = {1, 1000, 65537, 3000017};
    for (int i = 0; i < 4; i++) {
        // 0: healthy, 1: NaN gradient, 2: Inf gradient, 3: NaN loss, 4: Inf loss
        for (int damage = 0; damage < 5; damage++) {
            Arena arena = {};
            size_t n = counts[i];
            if (n > 100000 && damage > 1) { continue; }
            float* grads = random_floats(&arena, n, 0, 1e-3, 1);
            if (damage == 1) { grads[n - 1] = NAN; }
            if (damage == 2) { grads[n / 2] = -INFINITY; }
            float loss = damage == 3 ? NAN : damage == 4 ? INFINITY : 2.0f;
            OpCall call = op_call(OP_GLOBAL_NORM);
            call.n = n;
            call.C = 4096;
            arg_add(&call, "state", ARG_STATE, ARG_INOUT, state_of(&arena, loss, -1.0f, damage == 0), 1);
            arg_add(&call, "grads", ARG_F32, ARG_IN, grads, n);
            double want = 0.0;
            for (size_t k = 0; k < n; k++) {
                want += (double)grads[k] * (double)grads[k];
            }
            want = sqrt(want);
            Rule rules[] = {rule_ignore("state")};
            OpOutcome outcome = run_case(&arena, "global_norm", &call, rules, 1);
            const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
            for (int k = 0; k < 2; k++) {
                const HostState* state = (const HostState*)arg_find(calls[k], "state")->host;
                double norm = (double)state->grad_norm;
                expect(damage == 1 || damage == 2 ? !isfinite(norm) : fabs(norm - want) <= sum_factor((double)n) * want,
                       "n %zu, damage %d: norm %.9g, want %.9g", n, damage, norm, want);
                expect(state->skip == (damage != 0), "n %zu, damage %d: skip %d", n, damage, state->skip);
                expect(same_float(state->loss, loss) && state->slots_warming == -5,
                       "n %zu: more than norm and skip moved", n);
            }
            arena_free(&arena);
        }
    }
}

// kind: 0 BF16 copy, 1 FP8 (slots, one per layer), 2 both, 3 neither. At an even t the copy is rounded stochastically.
static void adamw_case(int layers, size_t n, int kind, int t, float grad_norm, int skip, int from_master) {
    Arena arena = {};
    size_t total = (size_t)layers * n, stride = 3, num_slots = stride * (size_t)layers;
    float *master = random_floats(&arena, total, 0, 0.05, 1), *m = random_floats(&arena, total, 0, 1e-3, 2);
    float *v = random_floats(&arena, total, 0, 1e-3, 3), *grad = random_floats(&arena, total, 0, 1e-2, 4);
    for (size_t i = 0; i < total; i++) {
        // moments that AdamW can reach: |m| <= 1.17 sqrt(v) for these betas (Cauchy-Schwarz), so steps stay small
        v[i] = t == 1 ? 0.0f : m[i] * m[i] + v[i] * v[i];
        if (t == 1) { m[i] = 0.0f; }
        if (i % 11 == 0) { grad[i] = 0.0f; }
    }
    ScaleSlot* slots = (ScaleSlot*)arena_bytes(&arena, num_slots * sizeof(ScaleSlot));
    for (size_t i = 0; i < num_slots; i++) {
        scale_slot_init(&slots[i], E4M3_MAX, SLOT_WEIGHT);
        slots[i].amax = i == 0 ? 100.0f : 0.0f; // only ever raised
    }
    OpCall call = op_call(from_master ? OP_PARAMS_FROM_MASTER : OP_ADAMW_UPDATE);
    call.layers = layers, call.n = n, call.slot_stride = stride, call.t = t;
    call.lr = 1e-3f, call.beta1 = 0.9f, call.beta2 = 0.95f, call.eps = 1e-8f, call.weight_decay = 0.1f,
    call.grad_clip = 1.0f;
    call.stochastic = t % 2 == 0, call.seed = 42, call.index = 48;
    arg_add(&call, "master", ARG_F32, from_master ? ARG_IN : ARG_INOUT, master, total);
    arg_add(&call, "m", ARG_F32, from_master ? ARG_IN : ARG_INOUT, m, total);
    arg_add(&call, "v", ARG_F32, from_master ? ARG_IN : ARG_INOUT, v, total);
    arg_add(&call, "grad", ARG_F32, ARG_IN, grad, total);
    float* param = random_bf16(&arena, total, 0, 1, 5); // stale
    if (kind == 0 || kind == 2) { arg_add(&call, "param", ARG_BF16, ARG_INOUT, param, total); }
    if (kind == 1 || kind == 2) { arg_add(&call, "slots", ARG_SLOTS, ARG_INOUT, slots, num_slots); }
    if (!from_master) { arg_add(&call, "state", ARG_STATE, ARG_IN, state_of(&arena, 2.0f, grad_norm, skip), 1); }
    char what[128];
    snprintf(what, sizeof(what), "layers %d, n %zu, kind %d, t %d, norm %g, skip %d, from master %d", layers, n, kind,
             t, (double)grad_norm, skip, from_master);
    // the update is lr * (a few FP32 operations, two of them powers: 1 - beta^t loses up to 20 ulps at t = 1)
    Rule rule_master = {"master", RULE_F32, 1e-3 * 16.0 * FP32_CHAIN, 0x1p-22, 0, 0, NULL};
    Rule rule_m = {"m", RULE_F32, FP32_CHAIN * 1e-2, FP32_CHAIN, 0, 0, NULL};
    Rule rule_v = {"v", RULE_F32, 0x1p-126, FP32_CHAIN, 0, 0, NULL};
    Rule rules[] = {rule_master, rule_m, rule_v, rule_ignore("param"),
                    rule_slot("slots")}; // param: judged by its own master
    for (int i = 0; (skip || from_master) && i < 5; i++) {
        rules[i].kind = RULE_EXACT;
    }
    OpOutcome outcome = run_case(&arena, what, &call, rules, 5);
    const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
    for (int k = 0; k < 2; k++) {
        const float* now = arg_floats(calls[k], "master");
        if (skip) { expect_same_bits(what, calls[k], &call); }
        for (size_t i = 0; i < total && arg_find(calls[k], "param") != NULL && !skip; i++) {
            float got = arg_floats(calls[k], "param")[i];
            size_t at = call.index + i;
            float want = bf16_round(now[i]);
            if (call.stochastic) {
                want = bf16_round_stochastic(now[i], philox(call.seed, (uint64_t)t, at / 4).word[at % 4]);
            }
            expect(got == want, "%s: param[%zu] = %a of master %a, want %a", what, i, (double)got, (double)now[i],
                   (double)want);
        }
        for (size_t s = 0; s < num_slots && arg_find(calls[k], "slots") != NULL && !skip; s++) {
            float amax = slots[s].amax;
            for (size_t i = 0; s % stride == 0 && i < n; i++) {
                amax = amax_raised(amax, now[s / stride * n + i]);
            }
            expect(arg_slot(calls[k], "slots")[s].amax == amax, "%s: slot %zu has amax %g, want %g", what, s,
                   (double)arg_slot(calls[k], "slots")[s].amax, (double)amax);
        }
        // the formula in FP64, straight from the paper
        double clip = fmin(1.0, 1.0 / (double)grad_norm);
        for (size_t i = 0; i < total && !skip && !from_master; i++) {
            double g = (double)grad[i] * clip, b1 = (double)call.beta1, b2 = (double)call.beta2;
            double mi = b1 * (double)m[i] + (1 - b1) * g, vi = b2 * (double)v[i] + (1 - b2) * g * g;
            double step = mi / (1 - pow(b1, t)) / (sqrt(vi / (1 - pow(b2, t))) + (double)call.eps);
            double want = (double)master[i] - (double)call.lr * (step + (double)call.weight_decay * (double)master[i]);
            double allowed = 1e-3 * 32.0 * FP32_CHAIN * (1.0 + fabs(step)) + 0x1p-22 * fabs(want);
            expect(fabs((double)now[i] - want) <= allowed, "%s: master[%zu] = %.9g, want %.9g", what, i, (double)now[i],
                   want);
        }
    }
    arena_free(&arena);
}

static void ops_adamw_update(void) {
    if (op_test_skipped()) { return; }
    size_t counts[] = {16, 48, 1008, 12304, 1000000}; // the model's tensors are multiples of 16
    for (int i = 0; i < (op_floors.thorough ? 5 : 4); i++) {
        for (int kind = 0; kind < 4; kind++) {
            adamw_case(1, counts[i], kind, 1, 0.5f, 0, 0);
            adamw_case(3, counts[i], kind, 10, 7.0f, 0, 0);
        }
        adamw_case(2, counts[i], 2, 10, 7.0f, 1, 0); // skip: not one bit moves
    }
}

static void ops_params_from_master(void) {
    if (op_test_skipped()) { return; }
    size_t counts[] = {16, 48, 12304, 1000000};
    for (int i = 0; i < (op_floors.thorough ? 4 : 3); i++) {
        for (int kind = 0; kind < 3; kind++) {
            adamw_case(3, counts[i], kind, 1, 1.0f, 0, 1);
            adamw_case(3, counts[i], kind, 2, 1.0f, 0, 1); // the rounding of update 2
        }
    }
}

// Slots of every policy and age, with amaxes of every kind.
static ScaleSlot* assorted_slots(Arena* arena, int n) {
    ScaleSlot* slots = (ScaleSlot*)arena_bytes(arena, (size_t)n * sizeof(ScaleSlot));
    const float amaxes[] = {1.0f, 0.0f, INFINITY, NAN, 1e-38f, 3e38f, 0.01f};
    ScaleRecipe recipe = {5, AMAX_MAX, 0, 1.0f};
    for (int i = 0; i < n; i++) {
        scale_slot_init(&slots[i], i % 3 ? E4M3_MAX : E5M2_MAX, (SlotPolicy)(i % 4));
        for (int age = 0; age < i % 23; age++) {
            scale_slot_step(&slots[i], 1.0f + (float)(age * i % 17), recipe);
        }
        slots[i].amax = amaxes[i % 7];
        slots[i].descale = 0.125f;
    }
    return slots;
}

static void ops_scale_slots(void) {
    if (op_test_skipped()) { return; }
    int counts[] = {1, 12, 301, 1200};
    for (int i = 0; i < 4; i++) {
        for (int algo = 0; algo < 2; algo++) {
            Arena arena = {};
            int n = counts[i];
            ScaleSlot* slots = assorted_slots(&arena, n);
            float* amaxes = arena_floats(&arena, (size_t)n);
            OpCall gather = op_call(OP_SCALE_SLOTS_GATHER);
            gather.num_slots = n;
            arg_add(&gather, "amaxes", ARG_F32, ARG_OUT, amaxes, (size_t)n);
            arg_add(&gather, "slots", ARG_SLOTS, ARG_IN, slots, (size_t)n);
            Rule gather_rules[] = {rule_exact("amaxes")};
            OpOutcome g = run_case(&arena, "gather", &gather, gather_rules, 1);
            OpCall step = op_call(OP_SCALE_SLOTS_STEP);
            ScaleRecipe recipe = {5, (AmaxAlgo)algo, algo, 1.0f + (float)algo};
            step.num_slots = n, step.recipe = recipe;
            for (int k = 0; k < n; k++) {
                amaxes[k] = isnan(slots[k].amax) ? INFINITY : slots[k].amax;
                expect(arg_floats(&g.subject, "amaxes")[k] == amaxes[k], "gather: amax %d = %g, want %g", k,
                       (double)arg_floats(&g.subject, "amaxes")[k], (double)amaxes[k]);
            }
            arg_add(&step, "slots", ARG_SLOTS, ARG_INOUT, slots, (size_t)n);
            arg_add(&step, "amaxes", ARG_F32, ARG_IN, amaxes, (size_t)n);
            arg_add(&step, "state", ARG_STATE, ARG_INOUT, state_of(&arena, 1.0f, 2.0f, 0), 1);
            Rule step_rules[] = {rule_exact("slots"), rule_exact("state")};
            OpOutcome s = run_case(&arena, "step", &step, step_rules, 2);
            int warming = 0;
            for (int k = 0; k < n; k++) { // the same lines of scaling.h, run here
                ScaleSlot want = slots[k];
                scale_slot_step(&want, amaxes[k], recipe);
                warming += scale_slot_is_warming(&want);
                expect(same_slots(&want, &arg_slot(&s.subject, "slots")[k], 1), "step: slot %d of %d differs", k, n);
            }
            const HostState* state = (const HostState*)arg_find(&s.subject, "state")->host;
            expect(state->slots_warming == warming, "slots_warming %d, want %d", state->slots_warming, warming);
            expect(state->loss == 1.0f && state->grad_norm == 2.0f && state->skip == 0,
                   "more than slots_warming moved");
            arena_free(&arena);
        }
    }
}

static void ops_bf16_round_trip(void) {
    if (op_test_skipped()) { return; }
    Arena arena = {};
    size_t n = 100003;
    float* values = random_floats(&arena, n, 0, 1, 1);
    const float specials[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-40f, -1e-45f, 3.4e38f, 0x1.01p0f, 0x1.03p0f};
    memcpy(values, specials, sizeof(specials));
    OpCall call = op_call(OP_BF16_ROUND_TRIP);
    arg_add(&call, "values", ARG_F32, ARG_IN, values, n);
    arg_add(&call, "stored", ARG_BF16, ARG_OUT, arena_floats(&arena, n), n);
    arg_add(&call, "returned", ARG_F32, ARG_OUT, arena_floats(&arena, n), n);
    Rule rules[] = {rule_exact("stored"), rule_exact("returned")};
    OpOutcome outcome = run_case(&arena, "bf16", &call, rules, 2);
    for (size_t i = 0; i < n; i++) {
        float stored = arg_floats(&outcome.subject, "stored")[i],
              returned = arg_floats(&outcome.subject, "returned")[i];
        expect(same_float(stored, bf16_round(values[i])), "%a became %a", (double)values[i], (double)stored);
        expect(same_float(returned, stored), "%a came back as %a", (double)stored, (double)returned);
    }
    arena_free(&arena);
}

} // namespace ops

#endif
