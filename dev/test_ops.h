// Every op of floor.h, one call at a time: a floor under test ("subject") against the CPU floor ("reference").
//
//   nvcc build   subject = the GPU: bit-exact where an op only rounds, derived thresholds elsewhere
//   g++ build    subject = the CPU floor on 2 threads, reference = on 1: bit-exact everywhere
//
// Each call is made on poisoned outputs between guard zones, and twice on the subject: the bits must repeat. Products
// and attention are judged on both floors by FP64 loops over the exact decoded operands.
//
// Thresholds. One FP32 operation is off by at most 2^-24 of its result. FP32_CHAIN = 2^-19 covers the longest
// elementwise chain here: some 16 operations and a transcendental function that is a few ulps off. A BF16 result then
// falls on the other side of a rounding boundary with probability 2 * 2^-19 / 2^-8 = 2^-10 (a spacing is at least 2^-8
// of the value), an FP8 code less often: FLIP_SHARE = 2^-8 leaves room for values that come out of a cancellation.
// Elements near zero are off by FP32_CHAIN of the largest terms, not of themselves: hence `absolute`. A sum of n FP32
// terms is off by about sqrt(n) 2^-24 of the sum of their magnitudes (errors walk at random).
#ifndef TEST_OPS_H
#define TEST_OPS_H

#include "compare.h"

#include "../lib/token_index.h"

namespace ops { // names of the floors, which are included later, may be the same

static const double FP32_CHAIN = 0x1p-19, FLIP_SHARE = 0x1p-8;

// The two floors being compared. unit.h's tests take no arguments, so this is the file's one global.
typedef struct {
    const Floor *reference, *subject;
    void *reference_device, *subject_device;
    int exact;        // subject and reference are the same floor
    int thorough;     // large shapes, too
    const char* skip; // why there is no subject; NULL: there is one
} OpTestFloors;

static OpTestFloors op_floors;

// sqrt(n) random walk, with room for the operations that made the terms
static double sum_factor(double n) {
    return (16.0 + 2.0 * sqrt(n)) * 0x1p-24;
}

static Rule rule_exact(const char* name) {
    return Rule{name, RULE_EXACT, 0, 0, 0, 0, NULL};
}
static Rule rule_ignore(const char* name) {
    return Rule{name, RULE_IGNORE, 0, 0, 0, 0, NULL};
}
static Rule rule_bf16(const char* name, double largest) {
    return Rule{name, RULE_BF16, FP32_CHAIN * largest, 0, FLIP_SHARE, 0, NULL};
}
static Rule rule_codes(const char* name) {
    return Rule{name, RULE_CODES, 0, 0, FLIP_SHARE, 0, NULL};
}
static Rule rule_slot(const char* name) {
    return Rule{name, RULE_SLOT, 0, 0x1p-18, 0, 0, NULL};
}
static Rule rule_relative(const char* name, double relative) {
    return Rule{name, RULE_F32, 0, relative, 0, 0, NULL};
}
static Rule rule_sum(const char* name, double n, const double* magnitude) {
    return Rule{name, RULE_F32, 0x1p-126, 0, 0, sum_factor(n), magnitude};
}

static const Rule* rule_of(const Rule* rules, int num_rules, const char* name) {
    for (int i = 0; i < num_rules; i++) {
        if (strcmp(rules[i].name, name) == 0) { return &rules[i]; }
    }
    check(0, "test: no rule for output '%s'", name);
    return NULL;
}

// The outputs of both floors after a call.
typedef struct {
    OpCall reference, subject;
} OpOutcome;

static void expect_same_bits(const char* what, const OpCall* a, const OpCall* b) {
    for (int i = 0; i < a->num_args; i++) {
        if (a->arg[i].role == ARG_IN) { continue; }
        compare_exact(what, &a->arg[i], &b->arg[i]);
    }
}

// Run `call` on the reference, and twice on the subject; compare. Every output needs a rule.
static OpOutcome run_case(Arena* arena, const char* what, const OpCall* call, const Rule* rules, int num_rules) {
    OpOutcome outcome = {op_call_copy(arena, call), op_call_copy(arena, call)};
    OpCall again = op_call_copy(arena, call);
    op_floors.reference->op(op_floors.reference_device, &outcome.reference);
    op_floors.subject->op(op_floors.subject_device, &outcome.subject);
    op_floors.subject->op(op_floors.subject_device, &again);
    expect(outcome.reference.broken[0] == 0, "%s: the reference %s", what, outcome.reference.broken);
    expect(outcome.subject.broken[0] == 0, "%s: the %s %s", what, op_floors.subject->name, outcome.subject.broken);
    expect_no_poison(what, &outcome.reference);
    expect_no_poison(what, &outcome.subject);
    expect_same_bits(what, &again, &outcome.subject);
    for (int i = 0; i < call->num_args; i++) {
        const Arg *got = &outcome.subject.arg[i], *want = &outcome.reference.arg[i];
        if (got->role == ARG_IN) { continue; }
        const Rule* rule = rule_of(rules, num_rules, got->name);
        Rule exact = rule_exact(got->name);
        compare_arg(what, got, want, op_floors.exact ? &exact : rule);
    }
    return outcome;
}

static OpCall call_without(const OpCall* call, const char* name) {
    OpCall copy = *call;
    for (int i = 0; i < copy.num_args; i++) {
        if (strcmp(copy.arg[i].name, name) == 0) {
            memmove(&copy.arg[i], &copy.arg[i + 1], (size_t)(copy.num_args - i - 1) * sizeof(Arg));
            copy.num_args--;
        }
    }
    return copy;
}

// What holds of every FP8 tensor on every floor: the transposed copy has the same bytes; descale belongs to them; a
// scale moves only when a warming slot was measured; the amax moves only when it is recorded, and never down.
static void check_fp8_output(const char* what, const OpCall* before, const OpCall* after, size_t rows, size_t cols) {
    if (arg_find(after, "data") != NULL && arg_find(after, "transposed") != NULL) {
        const uint8_t *data = arg_codes(after, "data"), *transposed = arg_codes(after, "transposed");
        for (size_t r = 0; r < rows; r++) {
            for (size_t c = 0; c < cols; c++) {
                expect(data[r * cols + c] == transposed[c * rows + r], "%s: transposed[%zu, %zu] = %02x, data has %02x",
                       what, c, r, transposed[c * rows + r], data[r * cols + c]);
            }
        }
    }
    if (arg_find(after, "slot") == NULL || (arg_find(after, "data") == NULL && arg_find(after, "transposed") == NULL)) {
        return;
    }
    const ScaleSlot *old = arg_slot(before, "slot"), *slot = arg_slot(after, "slot");
    expect(close_to(slot->descale, 1.0f / slot->scale, 0x1p-22), "%s: scale %g, descale %g", what, (double)slot->scale,
           (double)slot->descale);
    int may_move = before->measure_first && scale_slot_is_warming(old);
    expect(may_move || slot->scale == old->scale, "%s: a trusted scale moved from %g to %g", what, (double)old->scale,
           (double)slot->scale);
    expect(before->record ? slot->amax >= old->amax || isnan(slot->amax) : slot->amax == old->amax,
           "%s: record %d, amax was %g, is %g", what, before->record, (double)old->amax, (double)slot->amax);
}

// The situations in which a producer finds its slot. The stale jit_amax must not leak into a new measurement.
typedef enum { SLOT_WARMING, SLOT_TRUSTED_MEASURED, SLOT_TRUSTED_QUIET, SLOT_CURRENT, NUM_SLOT_CASES } SlotCase;

static ScaleSlot* slot_for(Arena* arena, OpCall* call, SlotCase slot_case, float fp8_max, float trusted_scale) {
    ScaleSlot* slot = (ScaleSlot*)arena_bytes(arena, sizeof(ScaleSlot));
    scale_slot_init(slot, fp8_max, slot_case == SLOT_CURRENT ? SLOT_JUST_IN_TIME : SLOT_DELAYED);
    slot->jit_amax = 1e30f;
    slot->amax = 0x1p-20f;
    slot->descale = 12345.0f; // of bytes that are no more
    slot->history[0] = 7.0f;
    if (slot_case == SLOT_TRUSTED_MEASURED || slot_case == SLOT_TRUSTED_QUIET) {
        slot->warmup = 0;
        slot->scale = trusted_scale;
    }
    call->measure_first = slot_case != SLOT_TRUSTED_QUIET;
    call->record = slot_case == SLOT_WARMING || slot_case == SLOT_TRUSTED_MEASURED;
    call->recipe.margin = slot_case == SLOT_CURRENT ? 1 : 0;
    call->recipe.headroom = slot_case == SLOT_WARMING ? 2.0f : 1.0f; // must not matter to what is measured
    return slot;
}

// A producer in all its forms. `base` has every argument but slot; wide, data and transposed are dropped in turn (wide
// only if `wide_is_optional`). The bits of a form do not depend on which other forms are wanted. Returns the last full
// call's outcome for the test's own judgement.
static OpOutcome run_forms(Arena* arena, const char* what, OpCall base, float fp8_max, float trusted_scale,
                           int wide_is_optional, size_t rows, size_t cols, const Rule* rules, int num_rules) {
    OpOutcome full;
    memset(&full, 0, sizeof(full));
    for (int slot_case = NUM_SLOT_CASES - 1; slot_case >= 0; slot_case--) { // SLOT_WARMING last: it is returned
        OpCall call = base;
        ScaleSlot* slot = slot_for(arena, &call, (SlotCase)slot_case, fp8_max, trusted_scale);
        arg_add(&call, "slot", ARG_SLOTS, ARG_INOUT, slot, 1);
        char title[192];
        snprintf(title, sizeof(title), "%s, slot case %d", what, slot_case);
        full = run_case(arena, title, &call, rules, num_rules);
        check_fp8_output(title, &call, &full.reference, rows, cols);
        check_fp8_output(title, &call, &full.subject, rows, cols);
        for (int forms = 1; slot_case == SLOT_WARMING && forms < 7; forms++) { // 7 = all of them
            if (!(forms & 1) && !wide_is_optional) { continue; }
            OpCall part = call;
            if (!(forms & 1)) { part = call_without(&part, "wide"); }
            if (!(forms & 2)) { part = call_without(&part, "data"); }
            if (!(forms & 4)) { part = call_without(&part, "transposed"); }
            if (!(forms & 6)) { part = call_without(&part, "slot"); }
            snprintf(title, sizeof(title), "%s, forms %s%s%s", what, forms & 1 ? "wide " : "", forms & 2 ? "data " : "",
                     forms & 4 ? "transposed" : "");
            OpOutcome some = run_case(arena, title, &part, rules, num_rules);
            check_fp8_output(title, &part, &some.subject, rows, cols);
            for (int i = 0; i < some.subject.num_args; i++) {
                const Arg* got = &some.subject.arg[i];
                if (got->role == ARG_IN || got->type == ARG_SLOTS) { continue; }
                compare_exact(title, got, arg_find(&full.subject, got->name));
            }
        }
    }
    return full;
}

static void add_forms(Arena* arena, OpCall* call, size_t rows, size_t cols) {
    arg_add(call, "wide", ARG_BF16, ARG_OUT, arena_floats(arena, rows * cols), rows * cols);
    arg_add(call, "data", ARG_CODES, ARG_OUT, arena_codes(arena, rows * cols), rows * cols);
    arg_add(call, "transposed", ARG_CODES, ARG_OUT, arena_codes(arena, rows * cols), rows * cols);
}

// A skipped test says why; 1: skip.
static int op_test_skipped(void) {
    if (op_floors.skip != NULL) { unit_skip(op_floors.skip); }
    return op_floors.skip != NULL;
}

// sums[j] = |start[j]| + sum over rows of |x[row, j]|: the magnitudes behind column sums
static double* column_magnitudes(Arena* arena, const float* start, const float* x, size_t rows, size_t cols) {
    double* sums = arena_doubles(arena, cols);
    for (size_t c = 0; c < cols; c++) {
        sums[c] = fabs((double)start[c]);
    }
    for (size_t i = 0; i < rows * cols; i++) {
        sums[i % cols] += fabs((double)x[i]);
    }
    return sums;
}

// A column-sum gradient against FP64 sums over the very values that the floor itself stored.
static void expect_column_sums(const char* what, const char* name, const float* got, const float* start, const float* x,
                               size_t rows, size_t cols) {
    for (size_t c = 0; c < cols; c++) {
        double sum = (double)start[c], magnitude = fabs(sum);
        for (size_t r = 0; r < rows; r++) {
            sum += (double)x[r * cols + c];
            magnitude += fabs((double)x[r * cols + c]);
        }
        double allowed = sum_factor((double)rows) * magnitude;
        expect(fabs((double)got[c] - sum) <= allowed, "%s: %s[%zu] = %.9g, want %.9g +- %.2g", what, name, c,
               (double)got[c], sum, allowed);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// embedding

static void ops_embedding_forward(void) {
    if (op_test_skipped()) { return; }
    int shapes[][4] = {{1, 1, 16, 7}, {3, 17, 48, 300}, {2, 64, 768, 1000}, {1, 100, 1600, 50257}, {4, 1024, 64, 300}};
    for (int i = 0; i < 5; i++) { // B, T, C, V
        Arena arena = {};
        int B = shapes[i][0], T = shapes[i][1], C = shapes[i][2], V = shapes[i][3];
        if (!op_floors.thorough && (size_t)V * C > 10000000) { continue; }
        size_t rows = (size_t)B * T;
        OpCall call = op_call(OP_EMBEDDING_FORWARD);
        call.B = B, call.T = T, call.C = C;
        arg_add(&call, "out", ARG_BF16, ARG_OUT, arena_floats(&arena, rows * C), rows * C);
        arg_add(&call, "tokens", ARG_I32, ARG_IN, random_ints(&arena, rows, V, 1), rows);
        arg_add(&call, "wte", ARG_BF16, ARG_IN, random_bf16(&arena, (size_t)V * C, 0, 1, 2), (size_t)V * C);
        arg_add(&call, "wpe", ARG_BF16, ARG_IN, random_bf16(&arena, (size_t)T * C, 0, 1, 3), (size_t)T * C);
        char what[96];
        snprintf(what, sizeof(what), "B %d, T %d, C %d, V %d", B, T, C, V);
        Rule rules[] = {rule_exact("out")}; // one FP32 addition, one rounding
        run_case(&arena, what, &call, rules, 1);
        arena_free(&arena);
    }
}

static void ops_embedding_backward(void) {
    if (op_test_skipped()) { return; }
    int shapes[][4] = {{1, 1, 16, 7}, {3, 17, 48, 5}, {2, 64, 768, 300}, {1, 100, 1600, 1}, {4, 1024, 64, 300}};
    for (int i = 0; i < 5; i++) {
        Arena arena = {};
        int B = shapes[i][0], T = shapes[i][1], C = shapes[i][2], V = shapes[i][3];
        size_t rows = (size_t)B * T, wte_n = (size_t)V * C, wpe_n = (size_t)(T + 3) * C; // maxT is longer than T
        int* tokens = random_ints(&arena, rows, V, 1);
        int* index_rows = (int*)arena_bytes(&arena, rows * 4);
        int* bucket_token = (int*)arena_bytes(&arena, rows * 4);
        int* bucket_start = (int*)arena_bytes(&arena, (rows + 1) * 4);
        TokenCounter counter = token_counter_create(V);
        OpCall call = op_call(OP_EMBEDDING_BACKWARD);
        call.B = B, call.T = T, call.C = C;
        call.num_buckets = token_index_build(&counter, index_rows, bucket_token, bucket_start, tokens, (int)rows);
        token_counter_free(&counter);
        float *dwte = random_floats(&arena, wte_n, 0, 1, 2), *dwpe = random_floats(&arena, wpe_n, 0, 1, 3);
        float* dout = random_bf16(&arena, rows * C, 0, 1, 4);
        arg_add(&call, "dwte", ARG_F32, ARG_INOUT, dwte, wte_n);
        arg_add(&call, "dwpe", ARG_F32, ARG_INOUT, dwpe, wpe_n);
        arg_add(&call, "dout", ARG_BF16, ARG_IN, dout, rows * C);
        arg_add(&call, "index_rows", ARG_I32, ARG_IN, index_rows, rows);
        arg_add(&call, "bucket_token", ARG_I32, ARG_IN, bucket_token, (size_t)call.num_buckets);
        arg_add(&call, "bucket_start", ARG_I32, ARG_IN, bucket_start, (size_t)call.num_buckets + 1);
        // FP64 truth: initial value + every row's contribution
        double *truth = arena_doubles(&arena, wte_n + wpe_n), *magnitude = arena_doubles(&arena, wte_n + wpe_n);
        for (size_t k = 0; k < wte_n + wpe_n; k++) {
            truth[k] = (double)(k < wte_n ? dwte[k] : dwpe[k - wte_n]);
            magnitude[k] = fabs(truth[k]);
        }
        for (size_t k = 0; k < rows * C; k++) {
            size_t row = k / (size_t)C, c = k % (size_t)C;
            size_t at[2] = {(size_t)tokens[row] * C + c, wte_n + row % (size_t)T * C + c};
            for (int j = 0; j < 2; j++) {
                truth[at[j]] += (double)dout[k];
                magnitude[at[j]] += fabs((double)dout[k]);
            }
        }
        char what[96];
        snprintf(what, sizeof(what), "B %d, T %d, C %d, V %d", B, T, C, V);
        Rule rules[] = {rule_sum("dwte", (double)rows, magnitude), rule_sum("dwpe", B, magnitude + wte_n)};
        OpOutcome outcome = run_case(&arena, what, &call, rules, 2);
        for (size_t k = 0; k < wte_n + wpe_n; k++) {
            float got =
                k < wte_n ? arg_floats(&outcome.subject, "dwte")[k] : arg_floats(&outcome.subject, "dwpe")[k - wte_n];
            expect(fabs((double)got - truth[k]) <= sum_factor((double)rows) * magnitude[k],
                   "%s: element %zu is %.9g, want %.9g", what, k, (double)got, truth[k]);
        }
        arena_free(&arena);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// layernorm

typedef struct {
    int rows, C;
    double mean; // of the inputs: far from zero, a variance from a difference of squares would fall apart
} LayerNormShape;

// On an H200: tiles of 32 rows, of 64 at 8432 and of 128 at 16880, the last tile not full; above 4096 columns clusters
// of 2 and 4 blocks, the last one with fewer columns or not; more tiles than blocks that run at once.
static const LayerNormShape layernorm_shapes[] = {
    {16, 16, 0},   {48, 48, 0.5}, {64, 64, 16},   {208, 768, 0}, {32, 1600, 3},  {32, 2048, 0},  {48, 2064, 0.5},
    {16, 4112, 0}, {16, 8208, 0}, {16, 12288, 3}, {8432, 16, 0}, {112, 4096, 0}, {1008, 768, 0}, {43024, 16, 0},
    {16880, 32, 1}};
enum { NUM_LAYERNORM_SHAPES = 15 };
// BF16 only: columns that are no multiple of 16
static const LayerNormShape layernorm_wide_shapes[] = {
    {1, 8, 0}, {43003, 8, 0}, {37, 776, 0}, {45, 2056, 3}, {13, 8200, 0}};
enum { NUM_LAYERNORM_WIDE_SHAPES = 5 };

// With a branch: sum is written and normalised. Without (branch NULL): `in` is normalised.
static void layernorm_forward_case(LayerNormShape s, int rows, int with_branch, int with_fp8) {
    Arena arena = {};
    int C = s.C;
    size_t n = (size_t)rows * C;
    OpCall call = op_call(OP_LAYERNORM_FORWARD);
    call.rows = rows, call.C = C;
    arg_add(&call, "mean", ARG_F32, ARG_OUT, arena_floats(&arena, (size_t)rows), (size_t)rows);
    arg_add(&call, "rstd", ARG_F32, ARG_OUT, arena_floats(&arena, (size_t)rows), (size_t)rows);
    arg_add(&call, "in", ARG_BF16, ARG_IN, random_bf16(&arena, n, s.mean, 1, 1), n);
    if (with_branch) {
        arg_add(&call, "sum", ARG_BF16, ARG_OUT, arena_floats(&arena, n), n);
        arg_add(&call, "branch", ARG_BF16, ARG_IN, random_bf16(&arena, n, 0, 1, 2), n);
        arg_add(&call, "branch_bias", ARG_BF16, ARG_IN, random_bf16(&arena, (size_t)C, 0, 0.5, 3), (size_t)C);
    }
    arg_add(&call, "weight", ARG_BF16, ARG_IN, random_bf16(&arena, (size_t)C, 1, 0.5, 4), (size_t)C);
    arg_add(&call, "bias", ARG_BF16, ARG_IN, random_bf16(&arena, (size_t)C, 0, 0.5, 5), (size_t)C);
    add_forms(&arena, &call, (size_t)rows, (size_t)C);
    char what[128];
    snprintf(what, sizeof(what), "rows %d, C %d, mean %g, branch %d", rows, C, s.mean, with_branch);
    // mean: a sum of C terms of size |mean| + 1. rstd: C squares; around the mean, as it must be
    Rule mean = {"mean", RULE_F32, sum_factor(C) * (s.mean + 2.0), 0, 0, 0, NULL};
    // y: off by the mean's error, too, which is relative to the mean and not to the deviation
    double noise = 16.0 + 0.25 * s.mean * sqrt((double)C);
    Rule rules[] = {rule_exact("sum"),
                    mean,
                    rule_relative("rstd", 2.0 * sum_factor(C)),
                    rule_bf16("wide", noise),
                    rule_codes("data"),
                    rule_codes("transposed"),
                    rule_slot("slot")};
    if (with_fp8) {
        run_forms(&arena, what, call, E4M3_MAX, 300.0f, 1, (size_t)rows, (size_t)C, rules, 7);
    } else {
        OpCall wide = call_without(&call, "data");
        wide = call_without(&wide, "transposed");
        run_case(&arena, what, &wide, rules, 7);
    }
    arena_free(&arena);
}

static void ops_layernorm_forward(void) {
    if (op_test_skipped()) { return; }
    for (int i = 0; i < NUM_LAYERNORM_SHAPES; i++) {
        LayerNormShape s = layernorm_shapes[i];
        if (!op_floors.thorough && (size_t)s.rows * s.C > 200000) { continue; }
        for (int with_branch = 0; with_branch < 2; with_branch++) {
            layernorm_forward_case(s, s.rows, with_branch, 1);
            layernorm_forward_case(s, s.rows - 11, with_branch, 0); // BF16: any number of rows
        }
    }
    for (int i = 0; i < NUM_LAYERNORM_WIDE_SHAPES; i++) {
        for (int with_branch = 0; with_branch < 2; with_branch++) {
            layernorm_forward_case(layernorm_wide_shapes[i], layernorm_wide_shapes[i].rows, with_branch, 0);
        }
    }
}

static void layernorm_backward_case(LayerNormShape s, int rows, int with_residual, int with_fp8) {
    Arena arena = {};
    int C = s.C;
    size_t n = (size_t)rows * C, cols = (size_t)C;
    float* x = random_bf16(&arena, n, s.mean, 1, 1);
    float* dy = random_bf16(&arena, n, 0, 0.01, 2);
    float* weight = random_bf16(&arena, cols, 1, 0.5, 3);
    float *mean = arena_floats(&arena, (size_t)rows), *rstd = arena_floats(&arena, (size_t)rows);
    float *dweight = random_floats(&arena, cols, 0, 0.1, 4), *dbias = random_floats(&arena, cols, 0, 0.1, 5);
    float* dbranch_bias = random_floats(&arena, cols, 0, 0.1, 6);
    float* dresidual = random_bf16(&arena, n, 0, 0.01, 7);
    float* normalised_dy = arena_floats(&arena, n); // terms of dweight
    for (int r = 0; r < rows; r++) {
        double sum = 0.0, squares = 0.0;
        for (int c = 0; c < C; c++) {
            sum += (double)x[(size_t)r * C + c];
        }
        for (int c = 0; c < C; c++) {
            squares += pow((double)x[(size_t)r * C + c] - sum / C, 2.0);
        }
        mean[r] = (float)(sum / C);
        rstd[r] = (float)(1.0 / sqrt(squares / C + 1e-5));
        for (int c = 0; c < C; c++) {
            size_t k = (size_t)r * C + c;
            normalised_dy[k] = dy[k] * (x[k] - mean[r]) * rstd[r];
        }
    }
    OpCall call = op_call(OP_LAYERNORM_BACKWARD);
    call.rows = rows, call.C = C;
    arg_add(&call, "dweight", ARG_F32, ARG_INOUT, dweight, cols);
    arg_add(&call, "dbias", ARG_F32, ARG_INOUT, dbias, cols);
    arg_add(&call, "dbranch_bias", ARG_F32, ARG_INOUT, dbranch_bias, cols);
    arg_add(&call, "dy", ARG_BF16, ARG_IN, dy, n);
    arg_add(&call, "x", ARG_BF16, ARG_IN, x, n);
    arg_add(&call, "mean", ARG_F32, ARG_IN, mean, (size_t)rows);
    arg_add(&call, "rstd", ARG_F32, ARG_IN, rstd, (size_t)rows);
    arg_add(&call, "weight", ARG_BF16, ARG_IN, weight, cols);
    add_forms(&arena, &call, (size_t)rows, cols);
    if (with_residual == 1) { arg_add(&call, "dresidual", ARG_BF16, ARG_IN, dresidual, n); }
    if (with_residual == 2) { // in place: the gradient arrives in the very memory that dx is written to
        Arg* wide = arg_find(&call, "wide");
        wide->role = ARG_INOUT;
        wide->host = dresidual;
        arg_add(&call, "dresidual", ARG_BF16, ARG_IN, dresidual, n);
        arg_find(&call, "dresidual")->alias = "wide";
    }
    char what[128];
    snprintf(what, sizeof(what), "rows %d, C %d, mean %g, residual %d", rows, C, s.mean, with_residual);
    double noise = 0.01 * (16.0 + 0.25 * s.mean * sqrt((double)C));
    Rule rules[] = {rule_sum("dweight", rows, column_magnitudes(&arena, dweight, normalised_dy, (size_t)rows, cols)),
                    rule_sum("dbias", rows, column_magnitudes(&arena, dbias, dy, (size_t)rows, cols)),
                    rule_ignore("dbranch_bias"),
                    rule_bf16("wide", noise),
                    rule_codes("data"),
                    rule_codes("transposed"),
                    rule_slot("slot")};
    OpOutcome outcome;
    if (with_fp8) {
        outcome = run_forms(&arena, what, call, E5M2_MAX, 1e6f, 0, (size_t)rows, cols, rules, 7);
    } else {
        OpCall wide = call_without(&call, "data");
        wide = call_without(&wide, "transposed");
        if (with_residual == 0) { wide = call_without(&wide, "dbranch_bias"); }
        outcome = run_case(&arena, what, &wide, rules, 7);
    }
    // the bias gradient below sums dx as stored: judged by the floor's own dx
    const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
    for (int i = 0; i < 2 && arg_find(calls[i], "dbranch_bias") != NULL; i++) {
        expect_column_sums(what, "dbranch_bias", arg_floats(calls[i], "dbranch_bias"), dbranch_bias,
                           arg_floats(calls[i], "wide"), (size_t)rows, cols);
    }
    arena_free(&arena);
}

static void ops_layernorm_backward(void) {
    if (op_test_skipped()) { return; }
    for (int i = 0; i < NUM_LAYERNORM_SHAPES; i++) {
        LayerNormShape s = layernorm_shapes[i];
        if (!op_floors.thorough && (size_t)s.rows * s.C > 200000) { continue; }
        for (int with_residual = 0; with_residual < 3; with_residual++) {
            layernorm_backward_case(s, s.rows, with_residual, 1);
            layernorm_backward_case(s, s.rows - 11, with_residual, 0);
        }
    }
    for (int i = 0; i < NUM_LAYERNORM_WIDE_SHAPES; i++) {
        for (int with_residual = 0; with_residual < 3; with_residual++) {
            layernorm_backward_case(layernorm_wide_shapes[i], layernorm_wide_shapes[i].rows, with_residual, 0);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// matmul: the FP64 product of the exact operands is the judge of both floors
//
// Errors, relative to the root mean square of the outputs:
//   BF16 output    2^-9 (rms of one rounding)
//   BF16 operands  tensor cores add 16 products at a time in FP32 and truncate: 4 + K/16 times up to 2^-23
//   FP8 operands   Hopper keeps some 13 bits behind the leading one of the sum of 32 products and what was there. One
//   step
//                  truncates 33 numbers: at random, 2^-12 together, and on average towards zero by 2^-14.
//                  Fast accumulation does so for all of K, in K/32 steps. Otherwise the sum is promoted to FP32 every
//                  128 products at least: four steps, and what the pieces lose is the same share of each.
// One wrong element hides in a Frobenius norm, so each element has its own bound: its rounding plus 6 times that.

typedef enum { MATMUL_FORWARD, MATMUL_DGRAD, MATMUL_WGRAD } MatmulPass;

static double matmul_drift(MatmulPass pass, int fp8, int K) {
    double fp32 = (4.0 + K / 16.0) * 0x1p-23;
    if (!fp8) { return fp32; }
    double steps = pass == MATMUL_FORWARD ? fmax(1.0, K / 32.0) : 4.0;
    return fp32 + sqrt(steps) * 0x1p-12 + steps * 0x1p-14;
}

// c (M, N) = a (M, K) . b (N, K)^T, FP64
static void product_f64(double* c, const double* a, const double* b, size_t M, size_t N, size_t K) {
    long long rows = (long long)M;
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (long long i = 0; i < rows; i++) {
        for (size_t j = 0; j < N; j++) {
            double sum = 0.0;
            for (size_t k = 0; k < K; k++) {
                sum += a[(size_t)i * K + k] * b[j * K + k];
            }
            c[(size_t)i * N + j] = sum;
        }
    }
}

// An operand (lines, K): BF16 values, or FP8 codes under a slot. `exact` holds what the codes or values mean.
typedef struct {
    float* values;
    uint8_t *codes, *transposed; // (lines, K), (K, lines)
    ScaleSlot* slot;
    double* exact;            // (lines, K)
    double* exact_transposed; // (K, lines)
} MatmulOperand;

static MatmulOperand matmul_operand(Arena* arena, size_t lines, size_t K, int fp8, int e5m2, double deviation,
                                    uint64_t stream) {
    MatmulOperand o = {};
    o.values = random_bf16(arena, lines * K, 0, deviation, stream);
    o.exact = arena_doubles(arena, lines * K);
    o.exact_transposed = arena_doubles(arena, lines * K);
    if (fp8) {
        o.slot = (ScaleSlot*)arena_bytes(arena, sizeof(ScaleSlot));
        scale_slot_init(o.slot, e5m2 ? E5M2_MAX : E4M3_MAX, SLOT_DELAYED);
        ScaleRecipe recipe = {16, AMAX_MAX, 0, 1.0f};
        o.slot->scale = scale_from_amax((float)largest_of(o.values, lines * K), 1.0f, o.slot->fp8_max, recipe);
        o.slot->descale = 1.0f / o.slot->scale;
        o.slot->scale = 77.0f; // of the next bytes: a product must not look at it
        o.codes = arena_codes(arena, lines * K);
        o.transposed = arena_codes(arena, lines * K);
        for (size_t i = 0; i < lines * K; i++) {
            float scaled = o.values[i] / o.slot->descale;
            o.codes[i] = e5m2 ? e5m2_from_float(scaled) : e4m3_from_float(scaled);
        }
        transpose_codes(o.transposed, o.codes, lines, K);
    }
    for (size_t i = 0; i < lines * K; i++) {
        o.exact[i] = !fp8   ? (double)o.values[i]
                     : e5m2 ? (double)float_from_e5m2(o.codes[i]) * (double)o.slot->descale
                            : (double)float_from_e4m3(o.codes[i]) * (double)o.slot->descale;
        o.exact_transposed[i % K * lines + i / K] = o.exact[i];
    }
    return o;
}

// Both FP8 forms are handed over: x.transposed chooses FP8 in wgrad, w.data in forward and dgrad.
static void add_operand(OpCall* call, const MatmulOperand* o, size_t n, int fp8, const char* wide, const char* data,
                        const char* transposed, const char* slot) {
    if (fp8) {
        arg_add(call, data, ARG_CODES, ARG_IN, o->codes, n);
        arg_add(call, transposed, ARG_CODES, ARG_IN, o->transposed, n);
        arg_add(call, slot, ARG_SLOTS, ARG_IN, o->slot, 1);
    } else {
        arg_add(call, wide, ARG_BF16, ARG_IN, o->values, n);
    }
}

// Judge one floor's output (n elements) by the FP64 product.
static void judge_product(const char* what, const char* floor, const float* got, const double* truth, size_t n,
                          double drift, int is_bf16) {
    double norm = 0.0;
    for (size_t i = 0; i < n; i++) {
        norm += truth[i] * truth[i];
    }
    double rms = sqrt(norm / (double)n), distance = relative_distance_f64(got, truth, n);
    double threshold = drift + (is_bf16 ? 0x1p-9 : 0.0);
    expect(distance <= threshold, "%s: the %s is %.3g off (relative, Frobenius), want %.3g", what, floor, distance,
           threshold);
    for (size_t i = 0; i < n; i++) {
        double allowed =
            6.0 * drift * rms + (is_bf16 ? 0.5 * bf16_ulp(truth[i]) * (1.0 + 0x1p-7) : 0x1p-23 * fabs(truth[i]));
        expect(fabs((double)got[i] - truth[i]) <= allowed, "%s: the %s has element %zu = %.9g, want %.9g +- %.2g", what,
               floor, i, (double)got[i], truth[i], allowed);
    }
}

static void matmul_case(MatmulPass pass, int fp8, int rows, int C, int OC) {
    Arena arena = {};
    size_t M = (size_t)rows;
    MatmulOperand x = matmul_operand(&arena, M, (size_t)C, fp8, 0, 1.0, 1);
    MatmulOperand w = matmul_operand(&arena, (size_t)OC, (size_t)C, fp8, 0, 0.05, 2);
    MatmulOperand dy = matmul_operand(&arena, M, (size_t)OC, fp8, 1, 1e-3, 3);
    size_t n = pass == MATMUL_FORWARD ? M * OC : pass == MATMUL_DGRAD ? M * C : (size_t)OC * C;
    double* truth = arena_doubles(&arena, n);
    // forward without and with a bias, dgrad, wgrad into poisoned memory and on top of what is there
    for (int variant = 0; variant < (pass == MATMUL_DGRAD ? 1 : 2); variant++) {
        int with_bias = pass == MATMUL_FORWARD && variant, accumulate = pass == MATMUL_WGRAD && variant;
        OpCall call = op_call(pass == MATMUL_FORWARD ? OP_MATMUL_FORWARD
                              : pass == MATMUL_DGRAD ? OP_MATMUL_DGRAD
                                                     : OP_MATMUL_WGRAD);
        call.rows = rows, call.C = C, call.OC = OC, call.accumulate = accumulate;
        const char* output = pass == MATMUL_FORWARD ? "y" : pass == MATMUL_DGRAD ? "dx" : "dw";
        int K = pass == MATMUL_FORWARD ? C : pass == MATMUL_DGRAD ? OC : rows;
        float* start = random_floats(&arena, n, 0, 1e-3, 4);
        if (accumulate) {
            arg_add(&call, output, ARG_F32, ARG_INOUT, start, n);
        } else if (pass == MATMUL_WGRAD) {
            arg_add(&call, output, ARG_F32, ARG_OUT, arena_floats(&arena, n), n);
        } else {
            arg_add(&call, output, ARG_BF16, ARG_OUT, arena_floats(&arena, n), n);
        }
        if (pass != MATMUL_DGRAD) { add_operand(&call, &x, M * C, fp8, "x_wide", "x_data", "x_transposed", "x_slot"); }
        if (pass != MATMUL_FORWARD) {
            add_operand(&call, &dy, M * OC, fp8, "dy_wide", "dy_data", "dy_transposed", "dy_slot");
        }
        if (pass != MATMUL_WGRAD) {
            add_operand(&call, &w, (size_t)OC * C, fp8, "w_wide", "w_data", "w_transposed", "w_slot");
        }
        float* bias = random_bf16(&arena, (size_t)OC, 0, 1, 5);
        if (with_bias) { arg_add(&call, "bias", ARG_BF16, ARG_IN, bias, (size_t)OC); }
        if (pass == MATMUL_FORWARD) { product_f64(truth, x.exact, w.exact, M, (size_t)OC, (size_t)C); }
        if (pass == MATMUL_DGRAD) { product_f64(truth, dy.exact, w.exact_transposed, M, (size_t)C, (size_t)OC); }
        if (pass == MATMUL_WGRAD) {
            product_f64(truth, dy.exact_transposed, x.exact_transposed, (size_t)OC, (size_t)C, M);
        }
        for (size_t i = 0; i < n; i++) {
            truth[i] += accumulate ? (double)start[i] : with_bias ? (double)bias[i % (size_t)OC] : 0.0;
        }
        char what[128];
        const char* names[] = {"forward", "dgrad", "wgrad"};
        snprintf(what, sizeof(what), "%s %s, rows %d, C %d, OC %d, bias %d, accumulate %d", fp8 ? "fp8" : "bf16",
                 names[pass], rows, C, OC, with_bias, accumulate);
        Rule rules[] = {rule_ignore(output)};
        OpOutcome outcome = run_case(&arena, what, &call, rules, 1);
        double drift = matmul_drift(pass, fp8, K), cpu_drift = matmul_drift(pass, 0, K);
        judge_product(what, "CPU floor", arg_floats(&outcome.reference, output), truth, n, cpu_drift,
                      pass != MATMUL_WGRAD);
        judge_product(what, op_floors.subject->name, arg_floats(&outcome.subject, output), truth, n,
                      op_floors.exact ? cpu_drift : drift, pass != MATMUL_WGRAD);
    }
    arena_free(&arena);
}

static void matmul_cases(MatmulPass pass) {
    if (op_test_skipped()) { return; }
    // rows, C, OC, thorough only. FP8 wants multiples of 16 in all three, BF16 in C and OC
    int fp8_shapes[][4] = {{16, 16, 16, 0},     {48, 64, 176, 0},    {64, 384, 96, 0},
                           {112, 96, 288, 0},   {128, 768, 2304, 1}, {256, 3072, 768, 1},
                           {64, 1600, 4800, 1}, {512, 4096, 512, 1}, {16, 16384, 64, 1}};
    int bf16_shapes[][4] = {{1, 64, 192, 0},     {17, 48, 64, 0},     {131, 128, 384, 0},
                            {64, 16, 16, 0},     {97, 768, 2304, 1},  {127, 3072, 768, 1},
                            {61, 1600, 1600, 1}, {33, 768, 50304, 1}, {509, 4096, 512, 1}};
    for (int i = 0; i < 9; i++) {
        int *a = fp8_shapes[i], *b = bf16_shapes[i];
        if (!a[3] || op_floors.thorough) { matmul_case(pass, 1, a[0], a[1], a[2]); }
        if (!b[3] || op_floors.thorough) { matmul_case(pass, 0, b[0], b[1], b[2]); }
    }
}

static void ops_matmul_forward(void) {
    matmul_cases(MATMUL_FORWARD);
}
static void ops_matmul_dgrad(void) {
    matmul_cases(MATMUL_DGRAD);
}
static void ops_matmul_wgrad(void) {
    matmul_cases(MATMUL_WGRAD);
}

// ---------------------------------------------------------------------------------------------------------------------
// attention, judged in FP64; what its backward pass makes of dqkv besides BF16 is judged behind quantize
//
// The kernel may hold P (and dS) in BF16 between its two products, and stores its result in BF16: two roundings of rms
// 2^-9, in the backward pass on top of each other in dS and again in the product. lse is FP32: HS products of size
// |q||k| / sqrt(HS) and an exponential.

static void attention_truth(double* out, double* lse, const float* qkv, int B, int T, int NH, int HS) {
    size_t C = (size_t)NH * HS, stride = 3 * C;
    double factor = 1.0 / sqrt((double)HS);
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic)
#endif
    for (int bh = 0; bh < B * NH; bh++) {
        double* p = (double*)malloc_or_die((size_t)T * sizeof(double));
        const float* base = qkv + (size_t)(bh / NH) * T * stride + (size_t)(bh % NH) * HS;
        for (int t = 0; t < T; t++) {
            const float* q = base + (size_t)t * stride;
            double largest = -INFINITY, sum = 0.0;
            for (int s = 0; s <= t; s++) {
                double dot = 0.0;
                for (int i = 0; i < HS; i++) {
                    dot += (double)q[i] * (double)base[(size_t)s * stride + C + i];
                }
                p[s] = dot * factor;
                largest = fmax(largest, p[s]);
            }
            for (int s = 0; s <= t; s++) {
                sum += p[s] = exp(p[s] - largest);
            }
            lse[(size_t)bh * T + t] = largest + log(sum);
            for (int i = 0; i < HS; i++) {
                double o = 0.0;
                for (int s = 0; s <= t; s++) {
                    o += p[s] / sum * (double)base[(size_t)s * stride + 2 * C + i];
                }
                out[((size_t)(bh / NH) * T + t) * C + (size_t)(bh % NH) * HS + i] = o;
            }
        }
        free(p);
    }
}

// From the very out and lse that the op is given.
static void attention_backward_truth(double* dqkv, const float* dout, const float* out, const float* lse,
                                     const float* qkv, int B, int T, int NH, int HS) {
    size_t C = (size_t)NH * HS, stride = 3 * C;
    double factor = 1.0 / sqrt((double)HS);
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic)
#endif
    for (int bh = 0; bh < B * NH; bh++) {
        size_t first = (size_t)(bh / NH) * T, head = (size_t)(bh % NH) * HS;
        const float* base = qkv + first * stride + head;
        double* d = dqkv + first * stride + head;
        for (int t = 0; t < T; t++) {
            const float *o = out + (first + t) * C + head, *g = dout + (first + t) * C + head;
            double D = 0.0;
            for (int i = 0; i < HS; i++) {
                D += (double)o[i] * (double)g[i];
            }
            for (int s = 0; s <= t; s++) {
                const float *q = base + (size_t)t * stride, *k = base + (size_t)s * stride + C, *v = k + C;
                double dot = 0.0, dp = 0.0;
                for (int i = 0; i < HS; i++) {
                    dot += (double)q[i] * (double)k[i];
                    dp += (double)g[i] * (double)v[i];
                }
                double p = exp(dot * factor - (double)lse[(size_t)bh * T + t]), ds = p * (dp - D) * factor;
                for (int i = 0; i < HS; i++) {
                    d[(size_t)t * stride + i] += ds * (double)k[i];
                    d[(size_t)s * stride + C + i] += ds * (double)q[i];
                    d[(size_t)s * stride + 2 * C + i] += p * (double)g[i];
                }
            }
        }
    }
}

// Distance of one of Q, K, V's third of (BT, 3C) from the truth.
static double third_distance(const float* got, const double* truth, size_t rows, size_t C, int third) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < rows * 3 * C; i++) {
        if ((int)(i / C % 3) != third) { continue; }
        difference += ((double)got[i] - truth[i]) * ((double)got[i] - truth[i]);
        norm += truth[i] * truth[i];
    }
    return norm > 0.0 ? sqrt(difference / norm) : sqrt(difference);
}

// attention_backward to the BF16 form of dqkv, argument "wide".
static OpCall attention_backward_call(Arena* arena, float* dout, float* out, float* lse, float* qkv, int B, int T,
                                      int NH, int HS) {
    size_t rows = (size_t)B * T, C = (size_t)NH * HS;
    OpCall call = op_call(OP_ATTENTION_BACKWARD);
    call.B = B, call.T = T, call.NH = NH, call.HS = HS;
    arg_add(&call, "wide", ARG_BF16, ARG_OUT, arena_floats(arena, rows * 3 * C), rows * 3 * C);
    arg_add(&call, "dout", ARG_BF16, ARG_IN, dout, rows * C);
    arg_add(&call, "out", ARG_BF16, ARG_IN, out, rows * C);
    arg_add(&call, "lse", ARG_F32, ARG_IN, lse, (size_t)B * NH * T);
    arg_add(&call, "qkv", ARG_BF16, ARG_IN, qkv, rows * 3 * C);
    return call;
}

static void attention_case(int B, int T, int NH, int HS, double deviation) {
    Arena arena = {};
    size_t rows = (size_t)B * T, C = (size_t)NH * HS, stats = rows * NH;
    float* qkv = random_bf16(&arena, rows * 3 * C, 0, deviation, 1);
    double *out_truth = arena_doubles(&arena, rows * C), *lse_truth = arena_doubles(&arena, stats);
    attention_truth(out_truth, lse_truth, qkv, B, T, NH, HS);
    char what[128];
    snprintf(what, sizeof(what), "B %d, T %d, NH %d, HS %d, deviation %g", B, T, NH, HS, deviation);
    OpCall forward = op_call(OP_ATTENTION_FORWARD);
    forward.B = B, forward.T = T, forward.NH = NH, forward.HS = HS;
    arg_add(&forward, "wide", ARG_BF16, ARG_OUT, arena_floats(&arena, rows * C), rows * C);
    arg_add(&forward, "lse", ARG_F32, ARG_OUT, arena_floats(&arena, stats), stats);
    arg_add(&forward, "qkv", ARG_BF16, ARG_IN, qkv, rows * 3 * C);
    Rule forward_rules[] = {rule_ignore("wide"), rule_ignore("lse")};
    OpOutcome f = run_case(&arena, what, &forward, forward_rules, 2);

    float *out = arena_floats(&arena, rows * C), *lse = arena_floats(&arena, stats);
    for (size_t i = 0; i < rows * C; i++) {
        out[i] = bf16_round((float)out_truth[i]);
    }
    for (size_t i = 0; i < stats; i++) {
        lse[i] = (float)lse_truth[i];
    }
    float* dout = random_bf16(&arena, rows * C, 0, 1e-3, 2);
    double* dqkv_truth = arena_doubles(&arena, rows * 3 * C);
    attention_backward_truth(dqkv_truth, dout, out, lse, qkv, B, T, NH, HS);
    OpCall backward = attention_backward_call(&arena, dout, out, lse, qkv, B, T, NH, HS);
    Rule backward_rules[] = {rule_ignore("wide")};
    OpOutcome b = run_case(&arena, what, &backward, backward_rules, 1);

    // the largest score: how many FP32 ulps a score can be off
    double score = 0.0;
    for (size_t i = 0; i < stats; i++) {
        score = fmax(score, fabs(lse_truth[i]));
    }
    const OpCall *fs[2] = {&f.reference, &f.subject}, *bs[2] = {&b.reference, &b.subject};
    for (int i = 0; i < 2; i++) {
        const char* floor = i == 0 ? "CPU floor" : op_floors.subject->name;
        double distance = relative_distance_f64(arg_floats(fs[i], "wide"), out_truth, rows * C);
        expect(distance <= 0x1p-8, "%s: out of the %s is %.3g off, want %.3g", what, floor, distance, 0x1p-8);
        for (size_t k = 0; k < stats; k++) {
            double got = (double)arg_floats(fs[i], "lse")[k],
                   allowed = 0x1p-20 * (score + deviation * deviation * 16.0 + 4.0);
            expect(fabs(got - lse_truth[k]) <= allowed, "%s: lse[%zu] of the %s = %.9g, want %.9g +- %.2g", what, k,
                   floor, got, lse_truth[k], allowed);
        }
        // T = 1: P is 1 and dS = dP - D is what is left of equal numbers, so dq and dk say nothing but "small"
        double v_size = 0.0;
        for (size_t k = 0; k < rows * 3 * C; k++) {
            v_size = fmax(v_size, fabs(dqkv_truth[k]));
        }
        for (int third = 0; third < 3; third++) {
            const char* names[] = {"dq", "dk", "dv"};
            const float* got = arg_floats(bs[i], "wide");
            if (T == 1 && third < 2) {
                expect(largest_of(got, rows * 3 * C) <= 2.0 * v_size, "%s: %s of the %s is large", what, names[third],
                       floor);
                continue;
            }
            double d = third_distance(got, dqkv_truth, rows, C, third), allowed = third == 2 ? 0x1p-8 : 0x1p-7;
            expect(d <= allowed, "%s: %s of the %s is %.3g off, want %.3g", what, names[third], floor, d, allowed);
        }
    }
    arena_free(&arena);
}

// The subject's forward pass, then `times` its backward pass from the very out and lse that it left. With --attention
// auto these may be two libraries: they must mean the same lse. The bits repeat, whichever block is first each time.
static void attention_chain(int B, int T, int NH, int HS, int times) {
    Arena arena = {};
    size_t rows = (size_t)B * T, C = (size_t)NH * HS, stats = rows * NH;
    char what[128];
    snprintf(what, sizeof(what), "forward and %d x backward, B %d, T %d, NH %d, HS %d", times, B, T, NH, HS);
    float *qkv = random_bf16(&arena, rows * 3 * C, 0, 1.0, 3), *dout = random_bf16(&arena, rows * C, 0, 1e-3, 4);
    OpCall forward = op_call(OP_ATTENTION_FORWARD);
    forward.B = B, forward.T = T, forward.NH = NH, forward.HS = HS;
    arg_add(&forward, "wide", ARG_BF16, ARG_OUT, arena_floats(&arena, rows * C), rows * C);
    arg_add(&forward, "lse", ARG_F32, ARG_OUT, arena_floats(&arena, stats), stats);
    arg_add(&forward, "qkv", ARG_BF16, ARG_IN, qkv, rows * 3 * C);
    op_floors.subject->op(op_floors.subject_device, &forward);
    expect(forward.broken[0] == 0, "%s: the %s %s", what, op_floors.subject->name, forward.broken);
    expect_no_poison(what, &forward);

    float *out = arg_floats(&forward, "wide"), *lse = arg_floats(&forward, "lse");
    OpCall call = attention_backward_call(&arena, dout, out, lse, qkv, B, T, NH, HS);
    OpCall first = op_call_copy(&arena, &call), again = op_call_copy(&arena, &call);
    for (int i = 0; i < times; i++) {
        OpCall* backward = i == 0 ? &first : &again;
        op_floors.subject->op(op_floors.subject_device, backward);
        expect(backward->broken[0] == 0, "%s: the %s %s", what, op_floors.subject->name, backward->broken);
        expect_no_poison(what, backward);
        if (i > 0) { expect_same_bits(what, &again, &first); }
    }
    double* truth = arena_doubles(&arena, rows * 3 * C);
    attention_backward_truth(truth, dout, out, lse, qkv, B, T, NH, HS);
    for (int third = 0; third < 3; third++) {
        const char* names[] = {"dq", "dk", "dv"};
        double d = third_distance(arg_floats(&first, "wide"), truth, rows, C, third),
               allowed = third == 2 ? 0x1p-8 : 0x1p-7;
        expect(d <= allowed, "%s: %s is %.3g off, want %.3g", what, names[third], d, allowed);
    }
    arena_free(&arena);
}

// Keys that grow along the sequence: the largest score of a row grows with every block of keys, by what exponentials
// around an old maximum can still hold (growth 30: some 2^20 per 64 keys) or cannot (1000: 2^600). Forward only: P is
// one key nearly, and its gradient a difference of equal numbers.
static void attention_growth_case(int T, int HS, double growth) {
    Arena arena = {};
    int B = 2, NH = 2;
    size_t rows = (size_t)B * T, C = (size_t)NH * HS, stats = rows * NH;
    float* qkv = random_bf16(&arena, rows * 3 * C, 0, 1.0, 6);
    for (size_t i = 0; i < rows * 3 * C; i++) {
        if (i / C % 3 == 1) { qkv[i] = bf16_round((float)(qkv[i] * growth * (double)(i / (3 * C) % (size_t)T) / T)); }
    }
    double *out_truth = arena_doubles(&arena, rows * C), *lse_truth = arena_doubles(&arena, stats), score = 0.0;
    attention_truth(out_truth, lse_truth, qkv, B, T, NH, HS);
    for (size_t i = 0; i < stats; i++) {
        score = fmax(score, fabs(lse_truth[i]));
    }
    char what[96];
    snprintf(what, sizeof(what), "T %d, HS %d, growth %g", T, HS, growth);
    OpCall call = op_call(OP_ATTENTION_FORWARD);
    call.B = B, call.T = T, call.NH = NH, call.HS = HS;
    arg_add(&call, "wide", ARG_BF16, ARG_OUT, arena_floats(&arena, rows * C), rows * C);
    arg_add(&call, "lse", ARG_F32, ARG_OUT, arena_floats(&arena, stats), stats);
    arg_add(&call, "qkv", ARG_BF16, ARG_IN, qkv, rows * 3 * C);
    Rule rules[] = {rule_ignore("wide"), rule_ignore("lse")};
    OpOutcome outcome = run_case(&arena, what, &call, rules, 2);
    const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
    for (int i = 0; i < 2; i++) {
        double distance = relative_distance_f64(arg_floats(calls[i], "wide"), out_truth, rows * C);
        expect(distance <= 0x1p-8, "%s: out is %.3g off, want %.3g", what, distance, 0x1p-8);
        for (size_t k = 0; k < stats; k++) {
            double got = (double)arg_floats(calls[i], "lse")[k], allowed = 0x1p-20 * (score + 20.0);
            expect(fabs(got - lse_truth[k]) <= allowed, "%s: lse[%zu] = %.9g, want %.9g +- %.2g", what, k, got,
                   lse_truth[k], allowed);
        }
    }
    arena_free(&arena);
}

static void ops_attention(void) {
    if (op_test_skipped()) { return; }
    int lengths[] = {1, 17, 64, 100, 129}, head_sizes[] = {16, 48, 64, 80, 128};
    for (int i = 0; i < 5; i++) {
        for (int k = 0; k < 5; k++) {
            attention_case(2, lengths[i], 3, head_sizes[k], 1.0);
        }
    }
    attention_case(1, 100, 1, 64, 4.0); // sharp: most of a row on one or two keys
    // head sizes 64 and 128, whose backward pass has kernels of its own: B, T, NH at both sides of the edges of their
    // blocks of 64 and 128. 800 heads of 3 tokens: a GPU's blocks do several items each, so every barrier goes through
    // all its phases, and the heads' sums of dq through all their places
    int shapes[][3] = {{1, 1, 1},   {1, 63, 1},  {3, 65, 2},  {1, 127, 5}, {2, 128, 1},
                       {4, 200, 3}, {1, 257, 4}, {2, 384, 1}, {40, 3, 20}, {8, 130, 12}};
    for (int i = 0; i < 10; i++) {
        attention_case(shapes[i][0], shapes[i][1], shapes[i][2], 64, 1.0);
        attention_case(shapes[i][0], shapes[i][1], shapes[i][2], 128, 1.0);
    }
    attention_case(2, 300, 1, 64, 4.0);
    attention_case(2, 300, 1, 128, 4.0);
    for (int i = 0; i < 4; i++) {
        attention_growth_case(300, i / 2 ? 128 : 64, i % 2 ? 1000.0 : 30.0);
    }
    attention_chain(3, 200, 2, 64, 4);
    attention_chain(3, 200, 2, 128, 4);
    if (op_floors.thorough) {
        attention_case(2, 1024, 2, 64, 1.0);
        attention_case(1, 1024, 1, 128, 1.0);
        attention_case(1, 1000, 25, 64, 1.0);
        attention_case(16, 256, 12, 64, 1.0);
        attention_case(24, 129, 16, 64, 1.0); // 768 items of one or two steps
        attention_chain(2, 1000, 12, 64, 20); // 192 items of up to 8 steps
        attention_chain(2, 1000, 12, 128, 20);
    }
}

static void attention_backward_fp8_case(int B, int T, int NH, int HS); // behind quantize

// The other attention of the GPU floor, where it is compiled in and found.
static void ops_attention_cudnn(void) {
    if (op_test_skipped()) { return; }
    void* builtin = op_floors.subject_device;
    op_floors.subject_device = op_floors.subject->device_open(0, 0); // ATTENTION_AUTO
    const char* name = op_floors.subject->attention_name(op_floors.subject_device);
    if (strncmp(name, "cudnn", 5) != 0) {
        unit_skip("the attention found is the built-in one");
    } else {
        int shapes[][4] = {{2, 64, 3, 64}, {1, 100, 2, 64}, {2, 128, 2, 128}, {2, 1024, 2, 64}}; // B, T, NH, HS
        for (int i = 0; i < 4; i++) {
            attention_case(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 1.0);
        }
        attention_chain(3, 200, 2, 64, 4);
        attention_chain(2, 1024, 2, 64, 4);
        attention_chain(2, 300, 2, 128, 2);
        // AUTO leaves some passes to the built-in kernels: cuDNN's by name
        op_floors.subject->device_close(op_floors.subject_device);
        op_floors.subject_device = op_floors.subject->device_open(0, 2); // ATTENTION_CUDNN
        for (int i = 0; i < 4; i++) {
            attention_case(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 1.0);
        }
        attention_chain(3, 200, 2, 64, 4);
        attention_backward_fp8_case(2, 128, 2, 64); // BF16, and quantize_backward after it
    }
    op_floors.subject->device_close(op_floors.subject_device);
    op_floors.subject_device = builtin;
}

// ---------------------------------------------------------------------------------------------------------------------
// gelu

static const int gelu_shapes[][2] = {{16, 16}, {48, 64}, {64, 192}, {112, 3072}, {208, 6400}, {1008, 3072}};
enum { NUM_GELU_SHAPES = 6 };

// Arguments where an implementation in FP32 could break: far out, zero, and where tanh saturates.
static float* gelu_argument(Arena* arena, size_t n) {
    float* x = random_bf16(arena, n, 0, 2, 1);
    const float specials[] = {0.0f, -0.0f, 20.0f, -20.0f, 1e4f, -1e4f, 5.0f, -5.0f, 1e-20f, -1e-20f};
    for (size_t i = 0; i < 10 && 7 * i < n; i++) {
        x[7 * i] = bf16_round(specials[i]);
    }
    return x;
}

static void ops_gelu_forward(void) {
    if (op_test_skipped()) { return; }
    for (int i = 0; i < NUM_GELU_SHAPES; i++) {
        for (int odd = 0; odd < 2; odd++) {
            int rows = gelu_shapes[i][0] - 11 * odd, C = gelu_shapes[i][1];
            if (!op_floors.thorough && (size_t)rows * C > 400000) { continue; }
            Arena arena = {};
            size_t n = (size_t)rows * C;
            OpCall call = op_call(OP_GELU_FORWARD);
            call.rows = rows, call.C = C;
            arg_add(&call, "x", ARG_BF16, ARG_IN, gelu_argument(&arena, n), n);
            arg_add(&call, "bias", ARG_BF16, ARG_IN, random_bf16(&arena, (size_t)C, 0, 0.5, 2), (size_t)C);
            add_forms(&arena, &call, (size_t)rows, (size_t)C);
            char what[96];
            snprintf(what, sizeof(what), "rows %d, C %d", rows, C);
            Rule rules[] = {rule_bf16("wide", 8.0), rule_codes("data"), rule_codes("transposed"), rule_slot("slot")};
            if (odd) {
                OpCall wide = call_without(&call, "data");
                wide = call_without(&wide, "transposed");
                run_case(&arena, what, &wide, rules, 4);
            } else {
                run_forms(&arena, what, call, E4M3_MAX, 100.0f, 1, (size_t)rows, (size_t)C, rules, 4);
            }
            arena_free(&arena);
        }
    }
}

static void gelu_backward_case(int rows, int C, int with_fp8, int in_place) {
    Arena arena = {};
    size_t n = (size_t)rows * C, cols = (size_t)C;
    float* dy = random_bf16(&arena, n, 0, 0.01, 3);
    float* dbias = random_floats(&arena, cols, 0, 0.1, 4);
    OpCall call = op_call(OP_GELU_BACKWARD);
    call.rows = rows, call.C = C;
    arg_add(&call, "x", ARG_BF16, ARG_IN, gelu_argument(&arena, n), n);
    arg_add(&call, "bias", ARG_BF16, ARG_IN, random_bf16(&arena, cols, 0, 0.5, 2), cols);
    arg_add(&call, "dbias", ARG_F32, ARG_INOUT, dbias, cols);
    add_forms(&arena, &call, (size_t)rows, cols);
    arg_add(&call, "dy", ARG_BF16, ARG_IN, dy, n);
    if (in_place) {
        arg_find(&call, "wide")->role = ARG_INOUT;
        arg_find(&call, "wide")->host = dy;
        arg_find(&call, "dy")->alias = "wide";
    }
    char what[96];
    snprintf(what, sizeof(what), "rows %d, C %d, in place %d", rows, C, in_place);
    // |gelu'| <= 1.13, so the terms of dbias are at most 1.13 |dy|
    double* magnitude = column_magnitudes(&arena, dbias, dy, (size_t)rows, cols);
    Rule rules[] = {rule_bf16("wide", 0.05), rule_codes("data"), rule_codes("transposed"), rule_slot("slot"),
                    rule_sum("dbias", rows, magnitude)};
    if (with_fp8) {
        run_forms(&arena, what, call, E5M2_MAX, 1e6f, !in_place, (size_t)rows, cols, rules, 5);
    } else {
        OpCall wide = call_without(&call, "data");
        wide = call_without(&wide, "transposed");
        run_case(&arena, what, &wide, rules, 5);
    }
    arena_free(&arena);
}

static void ops_gelu_backward(void) {
    if (op_test_skipped()) { return; }
    for (int i = 0; i < NUM_GELU_SHAPES; i++) {
        int rows = gelu_shapes[i][0], C = gelu_shapes[i][1];
        if (!op_floors.thorough && (size_t)rows * C > 400000) { continue; }
        gelu_backward_case(rows, C, 1, 0);
        gelu_backward_case(rows, C, 1, 1);
        gelu_backward_case(rows - 11, C, 0, 0);
        gelu_backward_case(rows - 11, C, 0, 1);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// quantize: pure rounding, so the codec itself is the judge, bit for bit

static const int quantize_shapes[][2] = {{16, 16}, {48, 80}, {112, 192}, {64, 4096}, {1008, 1600}};
enum { NUM_QUANTIZE_SHAPES = 5 };

// Inputs with every kind of value that matters to the codec; `damage` 1: an infinity, 2: a NaN.
static float* quantize_argument(Arena* arena, size_t n, double deviation, int damage) {
    float* x = random_bf16(arena, n, 0, deviation, 1);
    for (size_t i = 0; i < n; i += 5) {
        x[i] = bf16_round(ldexpf(x[i], -(int)(i % 37))); // down into the subnormals and to zero
    }
    x[n / 2] = -0.0f;
    if (damage == 1) { x[n / 3] = -INFINITY; }
    if (damage == 2) { x[n / 3] = NAN; }
    return x;
}

// The codes and the slot that the contract demands, computed from the definition.
static void judge_quantized(const char* what, const OpCall* before, const OpCall* after, const float* x, size_t n,
                            int e5m2) {
    ScaleSlot want = *arg_slot(before, "slot");
    float amax = 0.0f;
    for (size_t i = 0; i < n; i++) {
        amax = amax_raised(amax, x[i]);
    }
    if (before->measure_first) {
        want.jit_amax = amax;
        scale_slot_set_from_measured(&want, before->recipe);
    }
    if (before->record) { want.amax = amax_raised(want.amax, amax); }
    const ScaleSlot* got = arg_slot(after, "slot");
    expect(same_float(got->scale, want.scale), "%s: scale %a, want %a", what, (double)got->scale, (double)want.scale);
    expect(same_float(got->amax, want.amax), "%s: amax %a, want %a", what, (double)got->amax, (double)want.amax);
    const uint8_t* codes = arg_codes(after, "data");
    for (size_t i = 0; i < n; i++) {
        float scaled = x[i] * want.scale;
        uint8_t code = e5m2 ? e5m2_from_float(scaled) : e4m3_from_float(scaled);
        expect(codes[i] == code, "%s: code %zu of %g is %02x, want %02x", what, i, (double)x[i], codes[i], code);
    }
}

static void quantize_cases(int e5m2) {
    if (op_test_skipped()) { return; }
    for (int i = 0; i < NUM_QUANTIZE_SHAPES; i++) {
        for (int damage = 0; damage < 3; damage++) {
            int rows = quantize_shapes[i][0], cols = quantize_shapes[i][1];
            if (!op_floors.thorough && (size_t)rows * cols > 100000) { continue; }
            for (int slot_case = 0; slot_case < NUM_SLOT_CASES; slot_case++) {
                Arena arena = {};
                size_t n = (size_t)rows * cols, width = (size_t)cols;
                float* x = quantize_argument(&arena, n, e5m2 ? 1e-3 : 3.0, damage);
                float* dbias = random_floats(&arena, width, 0, 0.1, 2);
                OpCall call = op_call(e5m2 ? OP_QUANTIZE_BACKWARD : OP_QUANTIZE_FORWARD);
                call.rows = rows, call.cols = cols;
                arg_add(&call, "wide", ARG_BF16, ARG_IN, x, n);
                arg_add(&call, "data", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
                arg_add(&call, "transposed", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
                if (e5m2) { arg_add(&call, "dbias", ARG_F32, ARG_INOUT, dbias, width); }
                ScaleSlot* slot = slot_for(&arena, &call, (SlotCase)slot_case, e5m2 ? E5M2_MAX : E4M3_MAX, 1000.0f);
                arg_add(&call, "slot", ARG_SLOTS, ARG_INOUT, slot, 1);
                char what[128];
                snprintf(what, sizeof(what), "rows %d, cols %d, slot case %d, damage %d", rows, cols, slot_case,
                         damage);
                Rule slot_rule = {"slot", RULE_SLOT, 0, 0x1p-23, 0, 0, NULL};
                Rule rules[] = {rule_exact("data"), rule_exact("transposed"), slot_rule, rule_ignore("dbias")};
                OpOutcome outcome = run_case(&arena, what, &call, rules, 4);
                const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
                for (int k = 0; k < 2; k++) {
                    check_fp8_output(what, &call, calls[k], (size_t)rows, width);
                    judge_quantized(what, &call, calls[k], x, n, e5m2);
                    if (e5m2 && damage == 0) {
                        expect_column_sums(what, "dbias", arg_floats(calls[k], "dbias"), dbias, x, (size_t)rows, width);
                    }
                }
                // one form only, and none (then only the bias gradient is made)
                for (int forms = 0; forms < 3; forms++) {
                    OpCall part = call;
                    if (!(forms & 1)) { part = call_without(&part, "data"); }
                    if (!(forms & 2)) { part = call_without(&part, "transposed"); }
                    if (forms == 0) { part = call_without(&part, "slot"); }
                    OpOutcome some = run_case(&arena, what, &part, rules, 4);
                    const char* name = forms == 1 ? "data" : "transposed";
                    if (forms > 0) {
                        compare_exact(what, arg_find(&some.subject, name), arg_find(&outcome.subject, name));
                    }
                }
                arena_free(&arena);
            }
        }
    }
}

static void ops_quantize_forward(void) {
    quantize_cases(0);
}
static void ops_quantize_backward(void) {
    quantize_cases(1);
}

// Attention's own FP8 forms are what quantize_forward makes of its BF16 output, to the bit: with a scale that is
// trusted (then a kernel may write them on its way) or measured, wherever tiles of 64 and 128 tokens end, at all head
// sizes.
static void attention_fp8_case(int B, int T, int NH, int HS) {
    Arena arena = {};
    size_t rows = (size_t)B * T, C = (size_t)NH * HS, n = rows * C, stats = rows * NH;
    OpCall base = op_call(OP_ATTENTION_FORWARD);
    base.B = B, base.T = T, base.NH = NH, base.HS = HS;
    add_forms(&arena, &base, rows, C);
    arg_add(&base, "lse", ARG_F32, ARG_OUT, arena_floats(&arena, stats), stats);
    arg_add(&base, "qkv", ARG_BF16, ARG_IN, random_bf16(&arena, n * 3, 0, 1.0, 5), n * 3);
    Rule rules[] = {rule_ignore("wide"), rule_ignore("data"), rule_ignore("transposed"), rule_ignore("lse"),
                    rule_ignore("slot")};
    for (int slot_case = 0; slot_case <= NUM_SLOT_CASES; slot_case++) { // the last: trusted, recorded, not measured
        OpCall call = base;
        int training = slot_case == NUM_SLOT_CASES;
        ScaleSlot* slot =
            slot_for(&arena, &call, training ? SLOT_TRUSTED_MEASURED : (SlotCase)slot_case, E4M3_MAX, 300.0f);
        if (training) { call.measure_first = 0; }
        arg_add(&call, "slot", ARG_SLOTS, ARG_INOUT, slot, 1);
        char what[128];
        snprintf(what, sizeof(what), "B %d, T %d, NH %d, HS %d, slot case %d", B, T, NH, HS, slot_case);
        OpOutcome outcome = run_case(&arena, what, &call, rules, 5);
        const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
        for (int k = 0; k < 2; k++) {
            check_fp8_output(what, &call, calls[k], rows, C);
            judge_quantized(what, &call, calls[k], arg_floats(calls[k], "wide"), n, 0);
        }
        for (int forms = 0; forms < 3; forms++) { // none, data only, transposed only
            OpCall part = call;
            if (!(forms & 1)) { part = call_without(&part, "data"); }
            if (!(forms & 2)) { part = call_without(&part, "transposed"); }
            if (forms == 0) { part = call_without(&part, "slot"); }
            OpOutcome some = run_case(&arena, what, &part, rules, 5);
            const char* names[] = {"wide", "lse", "data", "transposed"};
            for (int i = 0; i < 4; i++) {
                Arg* got = arg_find(&some.subject, names[i]);
                if (got != NULL) { compare_exact(what, got, arg_find(&outcome.subject, names[i])); }
            }
        }
    }
    arena_free(&arena);
}

static void ops_attention_fp8(void) {
    if (op_test_skipped()) { return; }
    int shapes[][4] = {{1, 16, 1, 64},  {2, 64, 3, 64},  {3, 208, 2, 64},  {2, 272, 2, 128}, {1, 144, 1, 128},
                       {16, 17, 2, 64}, {4, 100, 1, 128}, {2, 48, 2, 80}}; // B, T, NH, HS
    for (int i = 0; i < 8; i++) {
        attention_fp8_case(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
    }
    if (op_floors.thorough) {
        attention_fp8_case(3, 1040, 25, 64); // more tiles than places on the multiprocessors: several items per block
        attention_fp8_case(2, 1024, 24, 128);
    }
}

static void ops_quantize_backward_bf16_rows(void) { // a BF16 linear: any number of rows, only the bias gradient
    if (op_test_skipped()) { return; }
    int shapes[][2] = {{1, 48}, {17, 192}, {101, 2304}, {997, 64}};
    for (int i = 0; i < 4; i++) {
        Arena arena = {};
        size_t rows = (size_t)shapes[i][0], cols = (size_t)shapes[i][1];
        float *x = random_bf16(&arena, rows * cols, 0, 1, 1), *dbias = random_floats(&arena, cols, 0, 1, 2);
        OpCall call = op_call(OP_QUANTIZE_BACKWARD);
        call.rows = (int)rows, call.cols = (int)cols;
        arg_add(&call, "wide", ARG_BF16, ARG_IN, x, rows * cols);
        arg_add(&call, "dbias", ARG_F32, ARG_INOUT, dbias, cols);
        Rule rules[] = {rule_ignore("dbias")};
        OpOutcome outcome = run_case(&arena, "dbias alone", &call, rules, 1);
        expect_column_sums("CPU", "dbias", arg_floats(&outcome.reference, "dbias"), dbias, x, rows, cols);
        expect_column_sums("subject", "dbias", arg_floats(&outcome.subject, "dbias"), dbias, x, rows, cols);
        arena_free(&arena);
    }
}

// One floor's dqkv in FP8 and its bias gradient: from the BF16 form that the floor itself leaves, codes follow bit for
// bit and column sums within their rounding. `call` has the inputs and dbias.
static void attention_backward_fp8_judge(Arena* arena, const char* floor_name, const Floor* floor, void* device,
                                         const OpCall* call, size_t rows, size_t cols) {
    size_t n = rows * cols;
    const float* start = arg_floats(call, "dbias");
    OpCall wide = *call;
    arg_add(&wide, "wide", ARG_BF16, ARG_OUT, arena_floats(arena, n), n);
    wide = op_call_copy(arena, &wide);
    floor->op(device, &wide);
    expect(wide.broken[0] == 0, "%s: BF16: %s", floor_name, wide.broken);
    expect_no_poison(floor_name, &wide);
    const float* x = arg_floats(&wide, "wide");
    expect_column_sums(floor_name, "dbias", arg_floats(&wide, "dbias"), start, x, rows, cols);
    for (int slot_case = 0; slot_case < NUM_SLOT_CASES; slot_case++) {
        for (int forms = 3; forms >= 1; forms--) {
            OpCall base = *call;
            arg_add(&base, "slot", ARG_SLOTS, ARG_INOUT,
                    slot_for(arena, &base, (SlotCase)slot_case, E5M2_MAX, 20000.0f), 1);
            arg_add(&base, "wide", ARG_BF16, ARG_INOUT, arena_floats(arena, n), n); // scratch: it may stay as it is
            if (forms & 1) { arg_add(&base, "data", ARG_CODES, ARG_OUT, arena_codes(arena, n), n); }
            if (forms & 2) { arg_add(&base, "transposed", ARG_CODES, ARG_OUT, arena_codes(arena, n), n); }
            OpCall got = op_call_copy(arena, &base), again = op_call_copy(arena, &base);
            floor->op(device, &got);
            floor->op(device, &again);
            char what[192];
            snprintf(what, sizeof(what), "%s, B %d, T %d, NH %d, HS %d, slot case %d, forms %d", floor_name, call->B,
                     call->T, call->NH, call->HS, slot_case, forms);
            expect(got.broken[0] == 0, "%s: %s", what, got.broken);
            expect_no_poison(what, &got);
            expect_same_bits(what, &again, &got);
            check_fp8_output(what, &base, &got, rows, cols);
            if (forms & 1) {
                judge_quantized(what, &base, &got, x, n, 1);
            } else { // the same codes, the other way round
                OpCall turned = got;
                uint8_t* codes = arena_codes(arena, n);
                transpose_codes(codes, arg_codes(&got, "transposed"), cols, rows);
                arg_add(&turned, "data", ARG_CODES, ARG_OUT, codes, n);
                judge_quantized(what, &base, &turned, x, n, 1);
            }
            expect_column_sums(what, "dbias", arg_floats(&got, "dbias"), start, x, rows, cols);
        }
    }
}

static void attention_backward_fp8_case(int B, int T, int NH, int HS) {
    Arena arena = {};
    size_t rows = (size_t)B * T, C = (size_t)NH * HS, stats = rows * NH;
    float *qkv = random_bf16(&arena, rows * 3 * C, 0, 1.0, 5), *dout = random_bf16(&arena, rows * C, 0, 1e-3, 6);
    double *out_truth = arena_doubles(&arena, rows * C), *lse_truth = arena_doubles(&arena, stats);
    attention_truth(out_truth, lse_truth, qkv, B, T, NH, HS);
    float *out = arena_floats(&arena, rows * C), *lse = arena_floats(&arena, stats);
    for (size_t i = 0; i < rows * C; i++) {
        out[i] = bf16_round((float)out_truth[i]);
    }
    for (size_t i = 0; i < stats; i++) {
        lse[i] = (float)lse_truth[i];
    }
    OpCall call = op_call(OP_ATTENTION_BACKWARD);
    call.B = B, call.T = T, call.NH = NH, call.HS = HS;
    arg_add(&call, "dbias", ARG_F32, ARG_INOUT, random_floats(&arena, 3 * C, 0, 1e-3, 7), 3 * C);
    arg_add(&call, "dout", ARG_BF16, ARG_IN, dout, rows * C);
    arg_add(&call, "out", ARG_BF16, ARG_IN, out, rows * C);
    arg_add(&call, "lse", ARG_F32, ARG_IN, lse, stats);
    arg_add(&call, "qkv", ARG_BF16, ARG_IN, qkv, rows * 3 * C);
    attention_backward_fp8_judge(&arena, "CPU floor", op_floors.reference, op_floors.reference_device, &call, rows,
                                 3 * C);
    attention_backward_fp8_judge(&arena, op_floors.subject->name, op_floors.subject, op_floors.subject_device, &call,
                                 rows, 3 * C);
    arena_free(&arena);
}

static void ops_attention_backward_fp8(void) {
    if (op_test_skipped()) { return; }
    // B, T, NH, HS: whole blocks of 64 and 128 rows and not; T that is no multiple of 16 while B T is; a head size
    // without kernels of its own; many items of one step
    int shapes[][4] = {{1, 16, 1, 64},  {1, 64, 3, 64},  {2, 144, 2, 64}, {3, 128, 1, 64},  {1, 208, 2, 128},
                       {2, 128, 1, 128}, {2, 72, 2, 64}, {2, 32, 1, 48},  {40, 16, 20, 64}, {1, 400, 2, 64}};
    for (int i = 0; i < 10; i++) {
        attention_backward_fp8_case(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
    }
    if (op_floors.thorough) {
        attention_backward_fp8_case(2, 1024, 2, 64);
        attention_backward_fp8_case(1, 1040, 2, 128);
    }
}

static void ops_quantize_weight(void) {
    if (op_test_skipped()) { return; }
    int shapes[][2] = {{16, 16}, {48, 80}, {288, 96}, {2304, 768}, {1600, 6400}};
    for (int i = 0; i < 5; i++) {
        int OC = shapes[i][0], C = shapes[i][1];
        if (!op_floors.thorough && OC * C > 100000) { continue; }
        Arena arena = {};
        size_t n = (size_t)OC * C;
        float* master = random_floats(&arena, n, 0, 0.02, 1);
        ScaleSlot* slot = (ScaleSlot*)arena_bytes(&arena, sizeof(ScaleSlot));
        scale_slot_init(slot, E4M3_MAX, SLOT_WEIGHT);
        slot->scale = 5000.0f; // saturates some
        slot->amax = 0.25f;    // of the next update: not touched
        OpCall call = op_call(OP_QUANTIZE_WEIGHT);
        call.OC = OC, call.C = C;
        arg_add(&call, "master", ARG_F32, ARG_IN, master, n);
        arg_add(&call, "data", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
        arg_add(&call, "transposed", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
        arg_add(&call, "slot", ARG_SLOTS, ARG_INOUT, slot, 1);
        char what[96];
        snprintf(what, sizeof(what), "OC %d, C %d", OC, C);
        Rule slot_rule = {"slot", RULE_SLOT, 0, 0x1p-23, 0, 0, NULL};
        Rule rules[] = {rule_exact("data"), rule_exact("transposed"), slot_rule};
        OpOutcome outcome = run_case(&arena, what, &call, rules, 3);
        const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
        for (int k = 0; k < 2; k++) {
            check_fp8_output(what, &call, calls[k], (size_t)OC, (size_t)C);
            expect(arg_slot(calls[k], "slot")->amax == 0.25f, "%s: amax moved to %g", what,
                   (double)arg_slot(calls[k], "slot")->amax);
            for (size_t j = 0; j < n; j++) {
                uint8_t want = e4m3_from_float(master[j] * 5000.0f);
                expect(arg_codes(calls[k], "data")[j] == want, "%s: code %zu is %02x, want %02x", what, j,
                       arg_codes(calls[k], "data")[j], want);
            }
        }
        arena_free(&arena);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// classifier

// Softmax of a row of logits z, of which the first V count, in FP64.
typedef struct {
    double top, sum; // largest logit, sum of exp(z - top)
} RowSoftmax;

static RowSoftmax softmax_of_row(const float* z, int V) {
    RowSoftmax row = {-INFINITY, 0.0};
    for (int v = 0; v < V; v++) {
        row.top = fmax(row.top, (double)z[v]);
    }
    for (int v = 0; v < V; v++) {
        row.sum += exp((double)z[v] - row.top);
    }
    return row;
}

// log of the sum of exp(z)
static double softmax_lse(RowSoftmax row) {
    return row.top + log(row.sum);
}

// d loss / d z[v]: probability less onehot; 0 in the padding
static double softmax_gradient(RowSoftmax row, const float* z, int v, int target, int V) {
    return v < V ? exp((double)z[v] - row.top) / row.sum - (v == target) : 0.0;
}

static void classifier_case(int rows, int V, int Vp, int with_gradient, double deviation) {
    Arena arena = {};
    size_t n = (size_t)rows * Vp;
    float dloss = 1.0f / 1024.0f;
    float* logits = random_bf16(&arena, n, 0, deviation, 1); // the padding columns hold numbers, too: never looked at
    for (int v = 0; v < V; v += 3) {                         // an offset that exp would not survive
        logits[v] = bf16_round(logits[v] + 300.0f);
    }
    int* targets = random_ints(&arena, (size_t)rows, V, 2);
    OpCall call = op_call(OP_CLASSIFIER);
    call.rows = rows, call.V = V, call.Vp = Vp, call.factor = dloss, call.with_gradient = with_gradient;
    arg_add(&call, "logits", ARG_BF16, ARG_INOUT, logits, n);
    arg_add(&call, "losses", ARG_F32, ARG_OUT, arena_floats(&arena, (size_t)rows), (size_t)rows);
    arg_add(&call, "targets", ARG_I32, ARG_IN, targets, (size_t)rows);
    arg_add(&call, "wide", ARG_BF16, ARG_IN, logits, n);
    arg_find(&call, "wide")->alias = "logits";
    char what[128];
    snprintf(what, sizeof(what), "rows %d, V %d, Vp %d, gradient %d, deviation %g", rows, V, Vp, with_gradient,
             deviation);
    // FP32 noise of the gradient is relative to its terms p and 1, times dloss; of a loss, to the logits
    double largest = largest_of(logits, n);
    Rule losses = {"losses", RULE_F32, FP32_CHAIN * (largest + 16.0), 0, 0, 0, NULL};
    Rule gradient = {"logits", RULE_BF16, FP32_CHAIN * (double)dloss, 0, FLIP_SHARE, 0, NULL};
    Rule rules[] = {with_gradient ? gradient : rule_exact("logits"), losses};
    OpOutcome outcome = run_case(&arena, what, &call, rules, 2);
    const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
    for (int k = 0; k < 2; k++) {
        const float* got = arg_floats(calls[k], "logits");
        for (int r = 0; r < rows; r++) {
            const float* z = logits + (size_t)r * Vp;
            RowSoftmax row = softmax_of_row(z, V);
            double loss = softmax_lse(row) - (double)z[targets[r]];
            double loss_got = (double)arg_floats(calls[k], "losses")[r];
            expect(fabs(loss_got - loss) <= losses.absolute, "%s: loss %d = %.9g, want %.9g", what, r, loss_got, loss);
            for (int v = 0; v < Vp; v++) {
                double want = with_gradient ? softmax_gradient(row, z, v, targets[r], V) * (double)dloss : (double)z[v];
                double allowed = with_gradient && v < V ? bf16_ulp(want) + FP32_CHAIN * (double)dloss : 0.0;
                double value = (double)got[(size_t)r * Vp + v];
                expect(fabs(value - want) <= allowed, "%s: logits[%d, %d] became %.9g, want %.9g", what, r, v, value,
                       want);
            }
        }
    }
    arena_free(&arena);
}

// The gradient in FP8 against FP64: every code that of the exact value or its neighbour, and few of the latter. The
// scale is the program's: dloss becomes 2^15. `deviation` 3 gives probabilities from below 2^-32 (which become 0) to 1.
// A floor may find p from the log-sum-exp s, by way of 4 roundings of numbers up to s / ln 2: a relative error of p of
// up to 2^-24 * 4 / ln 2 * s; and 2 ulp of exp2 in p and in the sum, one rounding each of sum, quotient and product
// make 2^-24 * 11. Both are far below a step of E5M2 unless p - 1 cancels: there they are allowed as they are.
static void classifier_fp8_case(int rows, int V, int Vp, double deviation) {
    Arena arena = {};
    size_t n = (size_t)rows * Vp;
    float dloss = 1.0f / 1536.0f;
    float* logits = random_bf16(&arena, n, 0, deviation, 1);
    for (int v = 0; v < V; v += 3) {
        logits[v] = bf16_round(logits[v] + 300.0f);
    }
    int* targets = random_ints(&arena, (size_t)rows, V, 2);
    ScaleSlot* slot = (ScaleSlot*)arena_bytes(&arena, sizeof(ScaleSlot));
    scale_slot_init(slot, E5M2_MAX, SLOT_STATIC);
    slot->scale = 0x1p15f / dloss;
    slot->descale = 12345.0f; // of bytes that are no more
    slot->amax = 0.25f;
    OpCall call = op_call(OP_CLASSIFIER);
    call.rows = rows, call.V = V, call.Vp = Vp, call.factor = dloss, call.with_gradient = 1;
    arg_add(&call, "logits", ARG_BF16, ARG_INOUT, logits, n);
    arg_add(&call, "losses", ARG_F32, ARG_OUT, arena_floats(&arena, (size_t)rows), (size_t)rows);
    arg_add(&call, "targets", ARG_I32, ARG_IN, targets, (size_t)rows);
    arg_add(&call, "data", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
    arg_add(&call, "transposed", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
    arg_add(&call, "slot", ARG_SLOTS, ARG_INOUT, slot, 1);
    char what[128];
    snprintf(what, sizeof(what), "FP8, rows %d, V %d, Vp %d, deviation %g", rows, V, Vp, deviation);
    Rule losses = {"losses", RULE_F32, FP32_CHAIN * (largest_of(logits, n) + 16.0), 0, 0, 0, NULL};
    // both floors are judged below
    Rule rules[] = {rule_exact("logits"), losses, rule_ignore("data"), rule_ignore("transposed"), rule_slot("slot")};
    OpOutcome outcome = run_case(&arena, what, &call, rules, 5);
    const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
    for (int k = 0; k < 2; k++) {
        check_fp8_output(what, &call, calls[k], (size_t)rows, (size_t)Vp);
        expect(arg_slot(calls[k], "slot")->amax == 0.25f, "%s: the amax of a static slot moved", what);
        const uint8_t* codes = arg_codes(calls[k], "data");
        size_t flips = 0;
        for (int r = 0; r < rows; r++) {
            const float* z = logits + (size_t)r * Vp;
            RowSoftmax row = softmax_of_row(z, V);
            for (int v = 0; v < Vp; v++) {
                double want = softmax_gradient(row, z, v, targets[r], V) * 0x1p15;
                int code = codes[(size_t)r * Vp + v], exact = e5m2_from_float((float)want);
                int distance = abs((code & 127) - (exact & 127));
                int same_sign = ((code ^ exact) & 128) == 0 || (code & 127) + (exact & 127) <= 1;
                double off = fabs((double)float_from_e5m2((uint8_t)code) - want);
                double chain = 0x1p15 * 0x1p-24 * (11.0 + 4.0 * 1.4427 * fabs(softmax_lse(row)));
                if (v == targets[r] && off <= chain) { continue; }
                expect(v < V ? distance <= 1 && same_sign : code == 0, "%s: code (%d, %d) is %02x, want %02x", what, r,
                       v, code, exact);
                flips += distance != 0;
            }
        }
        expect((double)flips <= 4.0 + FLIP_SHARE * (double)n, "%s: %zu of %zu codes are off by one", what, flips, n);
    }
    OpCall part = call_without(&call, "transposed");
    OpOutcome row_major = run_case(&arena, what, &part, rules, 5);
    compare_exact(what, arg_find(&row_major.subject, "data"), arg_find(&outcome.subject, "data"));
    arena_free(&arena);
}

static void ops_classifier_fp8(void) {
    if (op_test_skipped()) { return; }
    int shapes[][3] = {{16, 1, 128},    {64, 128, 128}, {80, 257, 384},    {208, 300, 304},    {16, 5, 16},
                       {32, 100, 272},  {256, 17, 32},  {272, 17, 48},     {48, 8191, 8192},   {592, 4099, 4112},
                       {16, 55001, 55008}, {144, 50257, 50304}};
    for (int i = 0; i < (op_floors.thorough ? 12 : 9); i++) {
        classifier_fp8_case(shapes[i][0], shapes[i][1], shapes[i][2], 3.0);
    }
    classifier_fp8_case(16, 300, 384, 100.0); // certain
    classifier_fp8_case(2064, 257, 384, 1.0); // many bands, more rows than blocks
}

static void ops_classifier(void) {
    if (op_test_skipped()) { return; }
    // an H200 keeps 57600 columns of a row in shared memory; 4500 and 600 rows are more than blocks that run at once
    int shapes[][3] = {{1, 1, 128},        {7, 128, 128},     {17, 257, 384},      {64, 300, 384},    {3, 1, 8},
                       {9, 1001, 1016},    {2, 57590, 57600}, {2, 57601, 57608},   {4500, 99, 104},   {33, 8191, 8192},
                       {5, 50257, 50304},  {129, 50257, 50304}, {600, 4100, 4104}, {2, 115713, 115720}};
    for (int i = 0; i < (op_floors.thorough ? 14 : 11); i++) {
        for (int with_gradient = 0; with_gradient < 2; with_gradient++) {
            classifier_case(shapes[i][0], shapes[i][1], shapes[i][2], with_gradient, 3.0);
        }
    }
    classifier_case(16, 300, 384, 1, 100.0); // certain: p is 0 or 1 to the last bit
}

// ---------------------------------------------------------------------------------------------------------------------
// the end of a step

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
            if (call.stochastic && !from_master) {
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

// ---------------------------------------------------------------------------------------------------------------------

static const NamedTest op_tests[] = {
    {"ops_embedding_forward", ops_embedding_forward},
    {"ops_embedding_backward", ops_embedding_backward},
    {"ops_layernorm_forward", ops_layernorm_forward},
    {"ops_layernorm_backward", ops_layernorm_backward},
    {"ops_matmul_forward", ops_matmul_forward},
    {"ops_matmul_dgrad", ops_matmul_dgrad},
    {"ops_matmul_wgrad", ops_matmul_wgrad},
    {"ops_attention", ops_attention},
    {"ops_attention_cudnn", ops_attention_cudnn},
    {"ops_attention_fp8", ops_attention_fp8},
    {"ops_gelu_forward", ops_gelu_forward},
    {"ops_gelu_backward", ops_gelu_backward},
    {"ops_quantize_forward", ops_quantize_forward},
    {"ops_quantize_backward", ops_quantize_backward},
    {"ops_quantize_backward_bf16_rows", ops_quantize_backward_bf16_rows},
    {"ops_attention_backward_fp8", ops_attention_backward_fp8},
    {"ops_quantize_weight", ops_quantize_weight},
    {"ops_classifier", ops_classifier},
    {"ops_classifier_fp8", ops_classifier_fp8},
    {"ops_loss_add", ops_loss_add},
    {"ops_global_norm", ops_global_norm},
    {"ops_adamw_update", ops_adamw_update},
    {"ops_params_from_master", ops_params_from_master},
    {"ops_scale_slots", ops_scale_slots},
    {"ops_bf16_round_trip", ops_bf16_round_trip},
};
enum { NUM_OP_TESTS = sizeof(op_tests) / sizeof(op_tests[0]) };

} // namespace ops

#endif
