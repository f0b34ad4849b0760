// Delayed scaling, every case of the design: what an amax of 0, NaN, Inf, tiny or huge does, warm-up and falling back
// into it, the ring, both algorithms, margin, headroom, and the slots that are not delayed.
#include "unit.h"

#include <math.h>
#include <stddef.h>

#include "../../lib/scaling.h"

static const ScaleRecipe plain = {16, AMAX_MAX, 0, 1.0f};

static ScaleSlot fresh(float fp8_max, SlotPolicy policy) {
    ScaleSlot slot;
    memset(&slot, 0xFF, sizeof(slot)); // init must set everything
    scale_slot_init(&slot, fp8_max, policy);
    return slot;
}

// A slot that has finished warming up on amaxes of `amax`.
static ScaleSlot warm(float fp8_max, float amax, ScaleRecipe recipe) {
    ScaleSlot slot = fresh(fp8_max, SLOT_DELAYED);
    for (int i = 0; i < AMAX_WARMUP; i++) {
        scale_slot_step(&slot, amax, recipe);
    }
    return slot;
}

// Bit for bit, without the bytes of padding behind the ring.
static int same_slot(const ScaleSlot* a, const ScaleSlot* b) {
    return memcmp(a, b, offsetof(ScaleSlot, history) + sizeof(a->history)) == 0;
}

static void expect_scale(const ScaleSlot* slot, float want, const char* what) {
    expect(slot->scale == want, "%s: scale %a, want %a", what, (double)slot->scale, (double)want);
}

static void test_init(void) {
    ScaleSlot slot = fresh(E4M3_MAX, SLOT_DELAYED);
    expect(slot.scale == 1.0f && slot.descale == 1.0f, "scale %g, descale %g", (double)slot.scale,
           (double)slot.descale);
    expect(slot.amax == 0.0f && slot.jit_amax == 0.0f, "amax %g, jit_amax %g", (double)slot.amax,
           (double)slot.jit_amax);
    expect(slot.count == 0 && slot.head == 0 && slot.warmup == AMAX_WARMUP, "count, head or warmup");
    for (int i = 0; i < AMAX_HISTORY_MAX; i++) {
        expect(slot.history[i] == 0.0f, "history[%d] = %g", i, (double)slot.history[i]);
    }
    expect(scale_slot_ring_amax(&slot, plain) == 0.0f, "an empty ring has amax 0");
    expect(scale_slot_is_warming(&slot), "a fresh delayed slot must measure first");
}

// max(|x|) of any mix; NaN beats Inf beats every number, whatever the order and the signs.
static void test_amax_raised(void) {
    float nan = bits_float(0xFFC00001u);
    expect(amax_raised(1.0f, -2.0f) == 2.0f && amax_raised(2.0f, -1.0f) == 2.0f, "absolute values");
    expect(amax_raised(0.0f, -0.0f) == 0.0f && !signbit(amax_raised(0.0f, -0.0f)), "zero has no sign");
    expect(amax_raised(0.0f, 0x1p-149f) == 0x1p-149f, "subnormals count");
    expect(isinf(amax_raised(3e38f, -INFINITY)), "-Inf counts as Inf");
    expect(isnan(amax_raised(1.0f, nan)) && isnan(amax_raised(nan, 1.0f)), "NaN stays");
    expect(isnan(amax_raised(amax_raised(INFINITY, nan), INFINITY)), "NaN beats Inf");
    expect(isnan(amax_raised(bits_float(0x7FC00000u), 1e30f)), "NaN is not replaced by a number");
}

static void test_is_finite_bits(void) {
    expect(is_finite_bits(0.0f) && is_finite_bits(-3e38f) && is_finite_bits(0x1p-149f), "numbers are finite");
    expect(!is_finite_bits(INFINITY) && !is_finite_bits(-INFINITY) && !is_finite_bits(bits_float(0x7F800001u)),
           "Inf and NaN are not");
}

static void test_scale_from_amax(void) {
    expect(scale_from_amax(2.0f, 7.0f, E4M3_MAX, plain) == 224.0f, "448 / 2");
    expect(scale_from_amax(2.0f, 7.0f, E5M2_MAX, plain) == 28672.0f, "57344 / 2");
    ScaleRecipe margin = plain, headroom = plain, both = plain;
    margin.margin = 3;
    headroom.headroom = 4.0f;
    both.margin = 1;
    both.headroom = 2.0f;
    expect(scale_from_amax(2.0f, 7.0f, E4M3_MAX, margin) == 28.0f, "margin 3 leaves 2^3 of room");
    expect(scale_from_amax(2.0f, 7.0f, E4M3_MAX, headroom) == 56.0f, "headroom 4 leaves 4 of room");
    expect(scale_from_amax(2.0f, 7.0f, E4M3_MAX, both) == 56.0f, "margin and headroom multiply");
    margin.margin = -1;
    expect(scale_from_amax(2.0f, 7.0f, E4M3_MAX, margin) == 448.0f, "a negative margin uses more than the maximum");
}

static void test_amax_that_says_nothing(void) {
    float says_nothing[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, bits_float(0xFFC00000u)};
    for (int i = 0; i < 6; i++) {
        float scale = scale_from_amax(says_nothing[i], 7.0f, E4M3_MAX, plain);
        expect(scale == 7.0f, "amax %g: scale %g, want the previous one", (double)says_nothing[i], (double)scale);
    }
}

// Scale and descale are normal numbers for every amax that exists.
static void test_tiny_and_huge_amax(void) {
    float amaxes[] = {0x1p-149f, 0x1p-140f, 0x1p-126f, 0x1p-100f, 1.0f, 0x1p100f, 0x1p127f, 3.4028235e38f};
    for (int i = 0; i < 8; i++) {
        for (int e5m2 = 0; e5m2 < 2; e5m2++) {
            for (int m = -8; m <= 8; m += 8) {
                ScaleRecipe recipe = plain;
                recipe.margin = m;
                float scale = scale_from_amax(amaxes[i], 7.0f, e5m2 ? E5M2_MAX : E4M3_MAX, recipe);
                float descale = 1.0f / scale;
                expect(isnormal(scale) && isnormal(descale), "amax %g, margin %d: scale %g, descale %g",
                       (double)amaxes[i], m, (double)scale, (double)descale);
            }
        }
    }
    expect(scale_from_amax(0x1p-149f, 7.0f, E4M3_MAX, plain) == 0x1p126f, "tiny is clamped");
    ScaleRecipe deep = plain;
    deep.margin = 20;
    expect(scale_from_amax(3.4028235e38f, 7.0f, E4M3_MAX, deep) == 0x1p-126f, "huge is clamped");
}

// The scale puts the largest value on the format's maximum: nothing saturates, no binade is wasted.
static void test_scaled_maximum_fits(void) {
    for (int i = 0; i < 2000; i++) {
        float amax = ldexpf(1.0f + (float)i / 2000.0f, i % 60 - 30);
        float scaled = amax * scale_from_amax(amax, 1.0f, E4M3_MAX, plain);
        expect(scaled > 447.99f && scaled < 448.01f, "amax %a lands on %g", (double)amax, (double)scaled);
        expect(e4m3_from_float(scaled) == 0x7E, "amax %a becomes code %02x", (double)amax, e4m3_from_float(scaled));
    }
}

static void test_step_finite(void) {
    ScaleSlot slot = fresh(E4M3_MAX, SLOT_DELAYED);
    slot.amax = 3.0f;
    slot.descale = 0.25f;
    scale_slot_step(&slot, 2.0f, plain);
    expect_scale(&slot, 224.0f, "one amax");
    expect(slot.count == 1 && slot.head == 1 && slot.history[0] == 2.0f, "the amax is in the ring");
    expect(slot.amax == 0.0f, "the amax is cleared for the next step");
    expect(slot.warmup == AMAX_WARMUP - 1, "warm-up counts down: %d", slot.warmup);
    expect(slot.descale == 0.25f, "descale belongs to bytes already written: %g", (double)slot.descale);
}

static void test_step_zero(void) {
    ScaleSlot slot = warm(E4M3_MAX, 2.0f, plain), before = slot;
    slot.amax = 1.0f;
    scale_slot_step(&slot, 0.0f, plain);
    before.amax = 0.0f;
    expect(same_slot(&slot, &before), "an amax of 0 changes nothing but clears amax");
    slot = fresh(E4M3_MAX, SLOT_DELAYED);
    scale_slot_step(&slot, 0.0f, plain);
    expect(slot.warmup == AMAX_WARMUP && slot.count == 0 && slot.scale == 1.0f, "an amax of 0 is no warm-up step");
}

static void test_step_not_finite(void) {
    float bad[] = {INFINITY, NAN, bits_float(0xFFFFFFFFu)};
    for (int i = 0; i < 3; i++) {
        ScaleSlot slot = warm(E5M2_MAX, 4.0f, plain), before = slot;
        expect(!scale_slot_is_warming(&slot), "warmed up");
        slot.amax = bad[i];
        scale_slot_step(&slot, bad[i], plain);
        expect(slot.warmup == AMAX_WARMUP && scale_slot_is_warming(&slot), "back to warm-up: %d", slot.warmup);
        expect_scale(&slot, before.scale, "kept");
        expect(slot.count == before.count && slot.head == before.head, "the ring does not roll");
        expect(memcmp(slot.history, before.history, sizeof(slot.history)) == 0, "nothing enters the ring");
        expect(slot.amax == 0.0f, "cleared: %g", (double)slot.amax);
        for (int k = 0; k < AMAX_WARMUP; k++) {
            expect(scale_slot_is_warming(&slot), "still warming after %d good steps", k);
            scale_slot_step(&slot, 4.0f, plain);
        }
        expect(!scale_slot_is_warming(&slot), "%d good steps heal it", AMAX_WARMUP);
    }
}

static void test_warmup_counts_16(void) {
    ScaleSlot slot = fresh(E4M3_MAX, SLOT_DELAYED);
    for (int i = 0; i < AMAX_WARMUP; i++) {
        expect(scale_slot_is_warming(&slot) && slot.warmup == AMAX_WARMUP - i, "step %d: warmup %d", i, slot.warmup);
        scale_slot_step(&slot, 1.0f, plain);
    }
    for (int i = 0; i < 3; i++) {
        expect(!scale_slot_is_warming(&slot) && slot.warmup == 0, "done after %d: %d", AMAX_WARMUP, slot.warmup);
        scale_slot_step(&slot, 1.0f, plain);
    }
}

static void test_ring_wraps(void) {
    ScaleRecipe recipe = plain;
    recipe.history = 3;
    float amaxes[] = {8.0f, 1.0f, 2.0f, 4.0f, 1.0f, 1.0f, 0.5f};
    float largest_of_3[] = {8.0f, 8.0f, 8.0f, 4.0f, 4.0f, 4.0f, 1.0f};
    ScaleSlot slot = fresh(E4M3_MAX, SLOT_DELAYED);
    for (int i = 0; i < 7; i++) {
        scale_slot_step(&slot, amaxes[i], recipe);
        expect(scale_slot_ring_amax(&slot, recipe) == largest_of_3[i], "step %d: ring %g, want %g", i,
               (double)scale_slot_ring_amax(&slot, recipe), (double)largest_of_3[i]);
        expect_scale(&slot, 448.0f / largest_of_3[i], "maximum of the last 3");
        expect(slot.count == (i < 3 ? i + 1 : 3) && slot.head == (i + 1) % 3, "count %d, head %d", slot.count,
               slot.head);
    }
    expect(slot.history[3] == 0.0f, "the ring keeps to its length");
}

static void test_ring_of_one_and_longest(void) {
    ScaleRecipe one = plain, longest = plain;
    one.history = 1;
    longest.history = AMAX_HISTORY_MAX;
    ScaleSlot a = fresh(E4M3_MAX, SLOT_DELAYED), b = a;
    for (int i = 0; i < AMAX_HISTORY_MAX + 5; i++) {
        float amax = i == 0 ? 64.0f : i == 3 ? 32.0f : 1.0f + (float)(i % 7);
        scale_slot_step(&a, amax, one);
        scale_slot_step(&b, amax, longest);
        expect(a.scale == 448.0f / amax, "a ring of one follows every step");
        float largest = i < AMAX_HISTORY_MAX ? 64.0f : i < AMAX_HISTORY_MAX + 3 ? 32.0f : 7.0f;
        expect(b.scale == 448.0f / largest, "step %d: scale %g, want %g", i, (double)b.scale, 448.0 / (double)largest);
    }
    expect(b.count == AMAX_HISTORY_MAX && b.head == 5, "count %d, head %d", b.count, b.head);
}

static void test_most_recent(void) {
    ScaleRecipe recipe = plain;
    recipe.history = 4;
    recipe.algo = AMAX_MOST_RECENT;
    ScaleSlot slot = fresh(E4M3_MAX, SLOT_DELAYED);
    for (int i = 0; i < 11; i++) { // across the wrap, where the newest entry is the last of the array
        float amax = (float)(1 + (5 * i) % 11);
        scale_slot_step(&slot, amax, recipe);
        expect(scale_slot_ring_amax(&slot, recipe) == amax, "step %d: newest %g, want %g", i,
               (double)scale_slot_ring_amax(&slot, recipe), (double)amax);
        expect_scale(&slot, 448.0f / amax, "most recent");
    }
}

static void test_margin_and_headroom_in_a_step(void) {
    ScaleRecipe recipe = plain;
    recipe.margin = 2;
    recipe.headroom = 2.0f;
    ScaleSlot slot = fresh(E4M3_MAX, SLOT_DELAYED), weight = fresh(E4M3_MAX, SLOT_WEIGHT);
    scale_slot_step(&slot, 2.0f, recipe);
    scale_slot_step(&weight, 2.0f, recipe);
    expect_scale(&slot, 28.0f, "delayed: 448 / 4 / 2 / 2");
    expect_scale(&weight, 56.0f, "a weight cannot grow before it is written: margin, but no headroom");
}

// Weights: the scale is of the very tensor that is written next. No ring, no warm-up, never measured by its producer.
static void test_weight_slot(void) {
    ScaleSlot slot = fresh(E4M3_MAX, SLOT_WEIGHT);
    expect(!scale_slot_is_warming(&slot), "a weight never warms up");
    float amaxes[] = {8.0f, 0.5f, 2.0f};
    for (int i = 0; i < 3; i++) {
        slot.amax = amaxes[i];
        scale_slot_step(&slot, amaxes[i], plain);
        expect_scale(&slot, 448.0f / amaxes[i], "follows at once, up and down");
        expect(slot.count == 0 && slot.amax == 0.0f, "no ring, amax cleared");
    }
    float keeps[] = {0.0f, INFINITY, NAN};
    for (int i = 0; i < 3; i++) { // 0: the update was skipped
        slot.amax = keeps[i];
        scale_slot_step(&slot, keeps[i], plain);
        expect_scale(&slot, 224.0f, "kept");
        expect(!scale_slot_is_warming(&slot) && slot.amax == 0.0f, "no warm-up, amax cleared");
    }
}

// --recipe current: the same path, always measured first.
static void test_just_in_time_slot(void) {
    ScaleSlot slot = fresh(E4M3_MAX, SLOT_JUST_IN_TIME);
    for (int i = 0; i < 2 * AMAX_WARMUP; i++) {
        expect(scale_slot_is_warming(&slot), "step %d: always measured", i);
        slot.jit_amax = 1.0f + (float)i;
        scale_slot_set_from_measured(&slot, plain);
        expect_scale(&slot, 448.0f / (1.0f + (float)i), "just measured");
        scale_slot_step(&slot, 1.0f + (float)i, plain);
    }
}

static void test_unused_slot(void) {
    ScaleSlot slot = fresh(E4M3_MAX, SLOT_UNUSED), before = slot;
    float amaxes[] = {0.0f, 2.0f, INFINITY, NAN};
    expect(!scale_slot_is_warming(&slot), "an unused slot asks for no measuring pass");
    for (int i = 0; i < 4; i++) {
        slot.jit_amax = 2.0f;
        scale_slot_set_from_measured(&slot, plain);
        slot.jit_amax = 0.0f;
        scale_slot_step(&slot, amaxes[i], plain);
        expect(same_slot(&slot, &before), "an unused slot never changes (amax %g)", (double)amaxes[i]);
    }
}

static void test_set_from_measured(void) {
    ScaleRecipe recipe = plain;
    recipe.margin = 1;
    recipe.headroom = 2.0f;
    ScaleSlot warming = fresh(E4M3_MAX, SLOT_DELAYED), warmed = warm(E4M3_MAX, 2.0f, plain);
    ScaleSlot weight = fresh(E4M3_MAX, SLOT_WEIGHT);
    warming.jit_amax = warmed.jit_amax = weight.jit_amax = 4.0f;
    scale_slot_set_from_measured(&warming, recipe);
    scale_slot_set_from_measured(&warmed, recipe);
    scale_slot_set_from_measured(&weight, recipe);
    expect_scale(&warming, 56.0f, "a warming slot takes what was measured, with the margin, without headroom");
    expect_scale(&warmed, 224.0f, "a trusted scale stays");
    expect_scale(&weight, 1.0f, "a weight's scale comes from the step only");
    float says_nothing[] = {0.0f, INFINITY, NAN};
    for (int i = 0; i < 3; i++) {
        warming.jit_amax = says_nothing[i];
        scale_slot_set_from_measured(&warming, recipe);
        expect_scale(&warming, 56.0f, "nothing usable was measured");
    }
}

// A slot with `steps` amaxes 1, 2, 3, ... behind it.
static ScaleSlot grown(ScaleRecipe recipe, int steps) {
    ScaleSlot slot = fresh(E4M3_MAX, SLOT_DELAYED);
    for (int i = 0; i < steps; i++) {
        scale_slot_step(&slot, (float)(i + 1), recipe);
    }
    return slot;
}

// Under the same recipe a slot goes on to the bit, whatever its age.
static void test_continue_same(void) {
    ScaleRecipe recipe = plain;
    recipe.history = 7;
    for (int steps = 0; steps < 40; steps++) {
        ScaleSlot saved = grown(recipe, steps), slot = fresh(E4M3_MAX, SLOT_DELAYED);
        saved.descale = 0.25f;
        saved.jit_amax = 3.0f;
        expect(scale_slot_is_sound(&saved, recipe.history), "%d steps", steps);
        scale_slot_continue(&slot, &saved, recipe, recipe);
        expect(same_slot(&slot, &saved), "%d steps", steps);
    }
    ScaleSlot saved = grown(recipe, 20), slot = fresh(E4M3_MAX, SLOT_JUST_IN_TIME), want = saved;
    scale_slot_continue(&slot, &saved, recipe, recipe); // --recipe current from here on
    want.policy = SLOT_JUST_IN_TIME;
    expect(same_slot(&slot, &want) && scale_slot_is_warming(&slot), "another policy, the same history");
}

// Under another recipe the newest amaxes count, and the next steps are those of a slot that always had it.
static void test_continue_other_recipe(void) {
    for (int from = 1; from <= 9; from++) {
        for (int to = 1; to <= 9; to++) {
            for (int steps = 0; steps < 30; steps++) {
                ScaleRecipe old = plain, recipe = plain;
                old.history = from;
                recipe.history = to;
                recipe.algo = to % 2 ? AMAX_MAX : AMAX_MOST_RECENT;
                recipe.margin = 1; // never the same recipe
                ScaleSlot saved = grown(old, steps), slot = fresh(E4M3_MAX, SLOT_DELAYED), always = grown(recipe, steps);
                scale_slot_continue(&slot, &saved, old, recipe);
                expect(scale_slot_is_sound(&slot, to) && slot.warmup == always.warmup, "%d -> %d, %d steps", from, to, steps);
                expect(steps == 0 || slot.scale == always.scale, "%d -> %d, %d steps: scale %g, want %g", from, to, steps,
                       (double)slot.scale, (double)always.scale);
                for (int i = 0; i < to; i++) { // until nothing of the old ring is left
                    scale_slot_step(&slot, (float)(steps + i + 1), recipe);
                    scale_slot_step(&always, (float)(steps + i + 1), recipe);
                }
                expect(slot.scale == always.scale && slot.count == to, "%d -> %d, %d steps, later", from, to, steps);
            }
        }
    }
}

// What was no FP8 tensor before, or has a scale of its own, or is none now, begins anew.
static void test_continue_without_history(void) {
    ScaleSlot saved = grown(plain, 20);
    SlotPolicy none[] = {SLOT_UNUSED, SLOT_STATIC};
    for (int i = 0; i < 2; i++) {
        ScaleSlot slot = fresh(E4M3_MAX, SLOT_DELAYED), before = slot, from = fresh(E4M3_MAX, none[i]);
        from.scale = 8.0f;
        scale_slot_continue(&slot, &from, plain, plain);
        expect(same_slot(&slot, &before) && scale_slot_is_warming(&slot), "from policy %d", none[i]);
        slot = before = fresh(E4M3_MAX, none[i]);
        scale_slot_continue(&slot, &saved, plain, plain);
        expect(same_slot(&slot, &before), "to policy %d", none[i]);
    }
}

static void test_is_sound(void) {
    ScaleSlot good = grown(plain, 20);
    expect(scale_slot_is_sound(&good, plain.history), "a real one");
    for (int what = 0; what < 12; what++) {
        ScaleSlot bad = good;
        switch (what) {
        case 0: bad.policy = 5; break;
        case 1: bad.policy = -1; break;
        case 2: bad.warmup = 17; break;
        case 3: bad.count = plain.history + 1; break;
        case 4: bad.count = -1; break;
        case 5: bad.head = plain.history; break;
        case 6: bad.head = -1; break;
        case 7: bad.scale = 0.0f; break;
        case 8: bad.scale = NAN; break;
        case 9: bad.descale = INFINITY; break;
        case 10: bad.history[3] = -1.0f; break;
        case 11: bad.amax = 1.0f; break;
        }
        expect(!scale_slot_is_sound(&bad, plain.history), "case %d", what);
    }
}

int main(void) {
    unit_run(test_init);
    unit_run(test_amax_raised);
    unit_run(test_is_finite_bits);
    unit_run(test_scale_from_amax);
    unit_run(test_amax_that_says_nothing);
    unit_run(test_tiny_and_huge_amax);
    unit_run(test_scaled_maximum_fits);
    unit_run(test_step_finite);
    unit_run(test_step_zero);
    unit_run(test_step_not_finite);
    unit_run(test_warmup_counts_16);
    unit_run(test_ring_wraps);
    unit_run(test_ring_of_one_and_longest);
    unit_run(test_most_recent);
    unit_run(test_margin_and_headroom_in_a_step);
    unit_run(test_weight_slot);
    unit_run(test_just_in_time_slot);
    unit_run(test_unused_slot);
    unit_run(test_set_from_measured);
    unit_run(test_continue_same);
    unit_run(test_continue_other_recipe);
    unit_run(test_continue_without_history);
    unit_run(test_is_sound);
    return unit_report();
}
