// The learning rate of each step, as llm.c computes it (llmc/schedulers.h), in FP32.
//
//     cosine    warm-up, then half a cosine from peak to final
//     linear    warm-up, then a straight line from peak to final
//     constant  peak from the first step on (no warm-up: llm.c has none here either)
//     wsd       warm-up, then peak until 80% of all steps, then peak to final along 1 - sqrt
//               (Hägele et al., "Scaling laws and compute-optimal training beyond fixed training durations",
//               arXiv:2405.18392)
// with  warm-up = peak * (step + 1) / warmup_steps  while step < warmup_steps,  final = peak * final_fraction.
#ifndef SCHEDULE_H
#define SCHEDULE_H

#include "config.h"

// Learning rate of `step` (counted from 0) of a run of `num_steps` steps.
static inline float schedule_learning_rate(const TrainConfig* train, int num_steps, int step) {
    float peak = train->learning_rate, final = peak * train->final_lr_fraction;
    int warmup = train->warmup_steps;
    if (train->lr_schedule == SCHEDULE_CONSTANT) {
        return peak;
    }
    if (step < warmup) {
        // llm.c divides before it multiplies in wsd only, and the last bit shows it
        return train->lr_schedule == SCHEDULE_WSD ? peak * ((float)(step + 1) / (float)warmup)
                                                  : peak * (float)(step + 1) / (float)warmup;
    }
    int start = train->lr_schedule == SCHEDULE_WSD ? (int)(0.8f * (float)num_steps) : warmup; // of the decay
    if (step < start) {
        return peak;
    }
    // steps past the end (a run that is all warm-up, or was resumed with fewer steps) stay at the end of the decay
    float ratio = step < num_steps ? (float)(step - start) / (float)(num_steps - start) : 1.0f;
    switch (train->lr_schedule) {
    case SCHEDULE_COSINE: {
        float angle = (float)(3.14159265358979323846 * (double)ratio);
        return final + 0.5f * (1.0f + cosf(angle)) * (peak - final);
    }
    case SCHEDULE_LINEAR: return peak - ratio * (peak - final);
    case SCHEDULE_WSD: return final + (1.0f - sqrtf(ratio)) * (peak - final);
    }
    check(0, "schedule_learning_rate: unknown schedule %d", train->lr_schedule);
    return 0.0f;
}

#endif
