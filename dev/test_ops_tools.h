// What the tests of the ops share: the two floors, rules of comparison, calls on poisoned outputs, FP8 outputs, column
// sums.
//
// Thresholds. One FP32 operation is off by at most 2^-24 of its result. FP32_CHAIN = 2^-19 covers the longest
// elementwise chain here: some 16 operations and a transcendental function that is a few ulps off. A BF16 result then
// falls on the other side of a rounding boundary with probability 2 * 2^-19 / 2^-8 = 2^-10 (a spacing is at least 2^-8
// of the value), an FP8 code less often: FLIP_SHARE = 2^-8 leaves room for values that come out of a cancellation.
// Elements near zero are off by FP32_CHAIN of the largest terms, not of themselves: hence `absolute`. A sum of n FP32
// terms is off by about sqrt(n) 2^-24 of the sum of their magnitudes (errors walk at random).
#ifndef TEST_OPS_TOOLS_H
#define TEST_OPS_TOOLS_H

#include "compare.h"

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

} // namespace ops

#endif
