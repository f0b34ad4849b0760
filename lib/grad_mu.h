// --grad-reduce fp8-allreduce: the scale that all ranks share, and the factor mu that keeps sums from saturating.
// FP8-LM (Peng et al., "FP8-LM: Training FP8 Large Language Models", 2023), section 2.1; their released code has no mu.
//
//     amax    of a piece: max |g| over all elements and all ranks
//     scale   448 * mu / amax          a rank's code = e4m3(g * scale)
//     descale 1 / scale                the sum       = (sum of codes, rounded to E4M3 at every hop) * descale
//     mu      of the whole run, one for all pieces: halved where more than 1 in 100,000 sums has reached +-448, else
//             grown twofold in 1,000 steps
//
// No sum of R codes saturates while mu <= 1 / R; gradients of different ranks hardly add up to R times the largest, so
// mu settles higher. It costs nothing on the wire, but its price is paid below: E4M3 has 18 binades from 448 to the
// half of the smallest code, and every halving of mu pushes one more binade of small gradients into 0.
#ifndef GRAD_MU_H
#define GRAD_MU_H

#include "shards.h"

#define GRAD_MU_START 1.0
// Bounds that training does not meet. Below 1 / R nothing saturates, so mu comes to 2^-20 only on a million ranks.
// At 2^10 what saturates keeps less than a thousandth of itself: a run in which fewer than 1 in 100,000 elements is
// that far above all others is not helped by more.
#define GRAD_MU_MIN 0x1p-20
#define GRAD_MU_MAX 0x1p10
#define GRAD_MU_SHARE 1e-5                  // of saturated elements, above which mu is halved
#define GRAD_MU_GROWTH 1.000693387462580632 // 2^(1/1000)

// How a piece is written, from its amax over all ranks.
//   0              codes 0, descale 0
//   NaN or Inf     codes 0, descale NaN
//   other          scale = 448 * mu / amax, kept where it and its inverse are normal numbers; descale = 1 / scale
HOST_DEVICE static inline GradBlockScale grad_shared_scale(float amax, float mu) {
    const float least = bits_float(0x00800000u), most = bits_float(0x7E800000u); // 2^-126, 2^126
    GradBlockScale s = {0.0f, 0.0f, 0};
    if (amax == 0.0f) { return s; }
    if ((float_bits(amax) & 0x7F800000u) == 0x7F800000u) {
        s.descale = bits_float(0x7FC00000u);
        return s;
    }
    float scale = E4M3_MAX * mu / amax; // in this order: 448 / amax may be infinite
    s.scale = scale < least ? least : scale > most ? most : scale;
    s.descale = 1.0f / s.scale;
    s.has_codes = 1;
    return s;
}

// mu of the next step, from how many of the step's summed elements have saturated (grad_dequantize_shared). A step that
// was skipped since its gradients were not finite says nothing. The same numbers give the same mu on every rank.
static inline double grad_mu_next(double mu, uint64_t saturated, uint64_t elements, int is_skipped) {
    check(mu >= GRAD_MU_MIN && mu <= GRAD_MU_MAX, "grad mu is %g, want %g to %g", mu, GRAD_MU_MIN, GRAD_MU_MAX);
    check(elements > 0 && saturated <= elements, "grad mu: %llu of %llu elements are saturated",
          (unsigned long long)saturated, (unsigned long long)elements);
    if (is_skipped) { return mu; }
    double next = (double)saturated > GRAD_MU_SHARE * (double)elements ? 0.5 * mu : GRAD_MU_GROWTH * mu;
    return next < GRAD_MU_MIN ? GRAD_MU_MIN : next > GRAD_MU_MAX ? GRAD_MU_MAX : next;
}

#endif
