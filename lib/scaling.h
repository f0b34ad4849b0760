// Delayed scaling: one ScaleSlot per FP8 tensor, and the only place where a scale is ever decided.
//
// A slot's life in one optimizer step:
//   write    kernels quantise q = sat(x * scale), raise `amax` to max |x| (before scaling) and write
//            descale = 1/scale with the bytes. While the slot warms up, the producing op first runs once only to
//            measure: `jit_amax`.
//   step     once, after the last micro-step and after `amax` was max-reduced over the ranks (scale_slot_step):
//              amax == 0       nothing was seen: keep the scale, do not roll the ring
//              amax finite     into the ring; scale = fp8_max * 2^-margin / (headroom * a), a = max or newest of
//                              the ring
//              amax Inf, NaN   not into the ring; keep the scale; back to warm-up
// Formula: Transformer Engine's delayed scaling recipe. Cadence (once per optimizer step) and just-in-time warm-up with
// self-healing: FP8-LM (Peng et al. 2023, section 2.1) as implemented in MS-AMP.
// `scale` multiplies into FP8, `descale` multiplies out of it. Every function runs unchanged on host and device.
#ifndef SCALING_H
#define SCALING_H

#include "fp8.h"

#define AMAX_HISTORY_MAX 1024 // longest ring (--amax-history)
#define AMAX_WARMUP 16        // a slot trusts its stored scale after this many finite amaxes in a row

typedef enum { AMAX_MAX = 0, AMAX_MOST_RECENT = 1 } AmaxAlgo;

// How scales follow amaxes; the same for every slot of a run.
typedef struct {
    int history;    // ring length, 1..AMAX_HISTORY_MAX
    AmaxAlgo algo;  // which entry of the ring sets the scale
    int margin;     // binades left unused below the format's maximum
    float headroom; // growth between two steps that must not saturate; 1 = none
} ScaleRecipe;

typedef enum {
    SLOT_DELAYED = 0,      // activations and gradients: scale from the ring; just in time while warming up
    SLOT_JUST_IN_TIME = 1, // --recipe current: always measured first
    SLOT_WEIGHT = 2,       // weights: quantised right after the step that measured them, so never delayed
    SLOT_UNUSED = 3,       // belongs to a linear that is kept in BF16
    SLOT_STATIC = 4        // a bound of the tensor is known beforehand, and with it the scale: nothing ever changes it
} SlotPolicy;

// NOTE: descale comes first and the struct is 16-byte aligned because cuBLASLt 13 refuses an FP8 product ("not
// supported", at the launch and not in the heuristic) whose scale pointers are not.
typedef struct __attribute__((aligned(16))) {
    float descale;  // belongs to the bytes in memory: x = q * descale. Written by whoever wrote them
    float scale;    // what the next quantise multiplies by: q = sat(x * scale)
    float amax;     // max |x| of this step so far, before scaling; kernels raise it
    float jit_amax; // max |x| found by a measuring pass
    float fp8_max;  // 448 (E4M3) or 57344 (E5M2)
    int policy;     // SlotPolicy
    int warmup;     // finite amaxes still to be seen before the stored scale is trusted
    int count;      // filled entries of the ring
    int head;       // where the next entry goes
    float history[AMAX_HISTORY_MAX]; // amaxes of past steps, a ring
} ScaleSlot;

// max(amax, |x|) that keeps NaN: as unsigned integers, |x| orders 0 < finite < Inf < NaN. fmaxf would drop the NaN.
HOST_DEVICE static inline float amax_raised(float amax, float x) {
    uint32_t a = float_bits(amax), b = float_bits(x) & 0x7FFFFFFFu;
    return bits_float(a > b ? a : b);
}

HOST_DEVICE static inline int is_finite_bits(float x) { return (float_bits(x) & 0x7F800000u) != 0x7F800000u; }

// fp8_max * 2^-margin / (headroom * amax), clamped so that the scale and its inverse are normal FP32 numbers.
// amax == 0, NaN or Inf says nothing about the next tensor: keep `previous`.
HOST_DEVICE static inline float scale_from_amax(float amax, float previous, float fp8_max, ScaleRecipe recipe) {
    if (!(amax > 0.0f) || !is_finite_bits(amax)) { return previous; } // the ! also catches NaN
    float target = ldexpf(fp8_max, -recipe.margin) / recipe.headroom;
    float scale = target / amax; // may overflow to Inf for a tiny amax: clamped below
    scale = fminf(scale, 0x1p126f);
    return fmaxf(scale, 0x1p-126f);
}

// A slot that has seen nothing: scale 1, empty ring, in warm-up.
HOST_DEVICE static inline void scale_slot_init(ScaleSlot* slot, float fp8_max, SlotPolicy policy) {
    slot->scale = slot->descale = 1.0f;
    slot->amax = slot->jit_amax = 0.0f;
    slot->fp8_max = fp8_max;
    slot->policy = policy;
    slot->warmup = AMAX_WARMUP;
    slot->count = slot->head = 0;
    for (int i = 0; i < AMAX_HISTORY_MAX; i++) {
        slot->history[i] = 0.0f;
    }
}

// Does the producer have to measure before it writes?
HOST_DEVICE static inline int scale_slot_is_warming(const ScaleSlot* slot) {
    return slot->policy == SLOT_JUST_IN_TIME || (slot->policy == SLOT_DELAYED && slot->warmup > 0);
}

// After a measuring pass: a warming slot takes its scale from what was just measured; any other keeps its own.
HOST_DEVICE static inline void scale_slot_set_from_measured(ScaleSlot* slot, ScaleRecipe recipe) {
    recipe.headroom = 1.0f; // room for growth between steps: nothing grows between measuring and writing
    if (scale_slot_is_warming(slot)) {
        slot->scale = scale_from_amax(slot->jit_amax, slot->scale, slot->fp8_max, recipe);
    }
}

// The amax that sets the scale, from the ring. 0 when the ring is empty.
HOST_DEVICE static inline float scale_slot_ring_amax(const ScaleSlot* slot, ScaleRecipe recipe) {
    if (slot->count == 0) { return 0.0f; }
    if (recipe.algo == AMAX_MOST_RECENT) {
        return slot->history[(slot->head + recipe.history - 1) % recipe.history];
    }
    float a = 0.0f;
    for (int i = 0; i < slot->count; i++) {
        a = fmaxf(a, slot->history[i]);
    }
    return a;
}

// End of an optimizer step: take in this step's amax (reduced over all ranks), decide the next scale, clear the amax.
HOST_DEVICE static inline void scale_slot_step(ScaleSlot* slot, float amax, ScaleRecipe recipe) {
    slot->amax = 0.0f;
    if (slot->policy == SLOT_STATIC) { return; }
    if (slot->policy == SLOT_WEIGHT) {
        recipe.headroom = 1.0f; // the very tensor that is quantised next
        slot->scale = scale_from_amax(amax, slot->scale, slot->fp8_max, recipe);
        return;
    }
    if (amax == 0.0f || slot->policy == SLOT_UNUSED) { return; }
    if (!is_finite_bits(amax)) {
        slot->warmup = AMAX_WARMUP;
        return;
    }
    slot->history[slot->head] = amax;
    slot->head = (slot->head + 1) % recipe.history;
    slot->count = slot->count < recipe.history ? slot->count + 1 : recipe.history;
    slot->warmup = slot->warmup > 0 ? slot->warmup - 1 : 0;
    slot->scale = scale_from_amax(scale_slot_ring_amax(slot, recipe), slot->scale, slot->fp8_max, recipe);
}

static inline int scale_recipe_equal(ScaleRecipe a, ScaleRecipe b) {
    return a.history == b.history && a.algo == b.algo && a.margin == b.margin && a.headroom == b.headroom;
}

// Can a slot that a checkpoint holds, of a run with rings of `history`, be one that scale_slot_step made?
static inline int scale_slot_is_sound(const ScaleSlot* slot, int history) {
    const float values[] = {slot->scale, slot->descale, slot->fp8_max};
    int sound = slot->policy >= SLOT_DELAYED && slot->policy <= SLOT_STATIC && slot->warmup >= 0 &&
                slot->warmup <= AMAX_WARMUP && slot->count >= 0 && slot->count <= history && slot->head >= 0 &&
                slot->head < history && slot->amax == 0.0f;
    for (int i = 0; i < 3; i++) {
        sound = sound && values[i] > 0.0f && is_finite_bits(values[i]);
    }
    for (int i = 0; sound && i < slot->count; i++) {
        sound = slot->history[i] > 0.0f && is_finite_bits(slot->history[i]);
    }
    return sound;
}

// *slot, as scale_slot_init made it for the present run, takes over what `saved` knows from a run with saved_recipe. With
// the same recipe and policy it becomes `saved` to the bit. With another recipe the ring is laid out anew (its newest
// entries, oldest first) and the scale follows from it; a tensor that was not FP8 there starts in warm-up.
static inline void scale_slot_continue(ScaleSlot* slot, const ScaleSlot* saved, ScaleRecipe saved_recipe,
                                       ScaleRecipe recipe) {
    SlotPolicy policy = (SlotPolicy)slot->policy;
    int had_history = saved->policy != SLOT_UNUSED && saved->policy != SLOT_STATIC;
    if (policy == SLOT_UNUSED || policy == SLOT_STATIC || !had_history) { return; }
    ScaleSlot empty = *slot;
    *slot = *saved;
    slot->policy = policy;
    if (scale_recipe_equal(saved_recipe, recipe)) { return; }
    memcpy(slot->history, empty.history, sizeof(slot->history));
    int count = saved->count < recipe.history ? saved->count : recipe.history;
    for (int i = 0; i < count; i++) {
        int age = count - i; // in steps
        slot->history[i] = saved->history[(saved->head + saved_recipe.history - age) % saved_recipe.history];
    }
    slot->count = count;
    slot->head = count % recipe.history;
    if (policy != SLOT_WEIGHT) {
        slot->scale = scale_from_amax(scale_slot_ring_amax(slot, recipe), slot->scale, slot->fp8_max, recipe);
    }
}

#endif
