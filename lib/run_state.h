// What a training checkpoint remembers of a run beside weights, moments and FP8 slots: where it stands, and under which
// settings. Two sections of common.bin (snapshot.h):
//
//     run      one RunState
//     config   the settings as text, config_to_text
//
// Everything random in a run is a function of the seed and a counter (rng.h), so numbers are all that has to be kept.
#ifndef RUN_STATE_H
#define RUN_STATE_H

#include "check.h"

#include <assert.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>

#include "checkpoint.h"
#include "config.h"
#include "dataloader.h"
#include "grad_mu.h"
#include "logger.h"
#include "scaling.h"

enum { RUN_STATE_VERSION = 2 };

// Fixed-width members only, no padding: these bytes are the file. Version 1 ended with the detectors.
typedef struct {
    int64_t version;
    int64_t step;        // steps done; the next one has this number
    int64_t num_updates; // updates applied, AdamW's t: skipped steps are not among them
    int64_t tokens;      // trained on so far
    int64_t seed, stochastic; // of the run (0 before the first update); are BF16 parameters rounded by it, t = num_updates
    // the model
    int64_t max_seq_len, vocab_size, padded_vocab_size, num_layers, num_heads, channels, num_parameters;
    // who computed: shard_%05d.bin of every rank, tokens of a window of the data
    int64_t num_ranks, window_tokens;
    // the data: where the loader stood behind the last batch that was trained on, and in which files
    int64_t data_epoch, data_shard, data_window, data_fingerprint;
    // FP8 slots of every rank
    int64_t num_slots, slot_bytes, amax_history, amax_algo, margin;
    double headroom;
    // the loop
    int64_t skips_in_a_row; // steps without an update that were not finite
    OutlierDetector loss_outliers, norm_outliers;
    double grad_mu; // the automatic factor of --grad-reduce fp8-allreduce; 1 when it is not used
} RunState;

enum { RUN_STATE_1_BYTES = offsetof(RunState, grad_mu) }; // of version 1
static_assert(sizeof(RunState) == RUN_STATE_1_BYTES + sizeof(double), "written as it lies in memory: no padding");

// Bring a state that was read as `bytes`, with zeros behind them, to this version; run_state_check looks at the rest.
static inline void run_state_upgrade(RunState* state, size_t bytes) {
    if (state->version == 1 && bytes == RUN_STATE_1_BYTES) {
        state->version = RUN_STATE_VERSION;
        state->grad_mu = 1.0;
    }
}

// The model's shape into `state`.
static inline void run_state_set_shape(RunState* state, const GptConfig* gpt) {
    state->max_seq_len = gpt->max_seq_len;
    state->vocab_size = gpt->vocab_size;
    state->padded_vocab_size = gpt->padded_vocab_size;
    state->num_layers = gpt->num_layers;
    state->num_heads = gpt->num_heads;
    state->channels = gpt->channels;
    state->num_parameters = (int64_t)gpt_num_parameters(gpt);
}

// The model's shape, of a state that run_state_check accepts.
static inline GptConfig run_state_shape(const RunState* state) {
    GptConfig gpt = {(int)state->max_seq_len, (int)state->vocab_size, (int)state->padded_vocab_size,
                     (int)state->num_layers, (int)state->num_heads, (int)state->channels};
    return gpt;
}

// 0 when `state` is one that a run can have written, else 1 with one line in why (WHY_BYTES) that names `path`.
static inline int run_state_check(const RunState* state, const char* path, char* why) {
    const int64_t counts[][3] = { // value, least, most
        {state->step, 0, INT_MAX},         {state->num_updates, 0, state->step},
        {state->num_ranks, 1, INT_MAX},    {state->window_tokens, 1, INT_MAX},
        {state->data_epoch, 0, INT_MAX},   {state->data_shard, 0, INT_MAX},
        {state->data_window, 0, INT_MAX},  {state->num_slots, 0, INT_MAX},
        {state->amax_history, 1, INT_MAX}, {state->skips_in_a_row, 0, INT_MAX},
    };
    const OutlierDetector* detectors[] = {&state->loss_outliers, &state->norm_outliers};
    if (state->version != RUN_STATE_VERSION) {
        return refuse(why, "'%s' is a checkpoint of version %lld, want 1 to %d", path, (long long)state->version,
                 RUN_STATE_VERSION);
    }
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        if (counts[i][0] < counts[i][1] || counts[i][0] > counts[i][2]) {
            return refuse(why, "'%s' is damaged: a counter of the run (number %zu) is %lld, want %lld to %lld",
                                     path, i, (long long)counts[i][0], (long long)counts[i][1], (long long)counts[i][2]);
        }
    }
    for (int i = 0; i < 2; i++) {
        const OutlierDetector* d = detectors[i];
        if (d->count < 0 || d->count > OUTLIER_WINDOW || d->next < 0 || d->next >= OUTLIER_WINDOW) {
            return refuse(why, "'%s' is damaged: %d values and place %d in a window of %d", path, d->count, d->next,
                     OUTLIER_WINDOW);
        }
    }
    if (state->amax_history > AMAX_HISTORY_MAX || state->slot_bytes != (int64_t)sizeof(ScaleSlot)) {
        return refuse(why, "'%s' has amax histories of %lld in slots of %lld bytes, want at most %d and %zu", path,
                 (long long)state->amax_history, (long long)state->slot_bytes, AMAX_HISTORY_MAX, sizeof(ScaleSlot));
    }
    if (!(state->grad_mu >= GRAD_MU_MIN && state->grad_mu <= GRAD_MU_MAX)) {
        return refuse(why, "'%s' is damaged: a factor of gradients of %g, want %g to %g", path, state->grad_mu, GRAD_MU_MIN,
                      GRAD_MU_MAX);
    }
    const int64_t* shape = &state->max_seq_len;
    for (int i = 0; i < 6; i++) {
        if (shape[i] < 0 || shape[i] > INT_MAX) {
            return refuse(why, "'%s' is damaged: a dimension of the model is %lld", path, (long long)shape[i]);
        }
    }
    GptConfig gpt = run_state_shape(state);
    if (gpt_refuse(&gpt, path, why, WHY_BYTES) != 0) { return 1; }
    int64_t slots = state->num_layers * 12; // and three of the FP8 head
    if (state->num_parameters != (int64_t)gpt_num_parameters(&gpt) ||
        (state->num_slots != slots && state->num_slots != slots + 3)) {
        return refuse(why, "'%s' announces %lld parameters and %lld FP8 slots, want %zu and %lld or %lld", path,
                                 (long long)state->num_parameters, (long long)state->num_slots, gpt_num_parameters(&gpt),
                                 (long long)slots, (long long)slots + 3);
    }
    return 0;
}

// A fingerprint of the loader's files: their names without folders, their number and their tokens (FNV-1a).
static inline int64_t run_data_fingerprint(const DataLoader* loader) {
    uint64_t hash = config_fnv1a(FNV_START, &loader->num_tokens, sizeof(loader->num_tokens));
    for (int i = 0; i < loader->num_shards; i++) {
        const char* slash = strrchr(loader->paths[i], '/');
        const char* name = slash != NULL ? slash + 1 : loader->paths[i];
        hash = config_fnv1a(hash, name, strlen(name) + 1);
    }
    return (int64_t)(hash >> 1);
}

// Where the data stand into `state`: `loader` gave its last batch from before `at`.
static inline void run_state_set_data(RunState* state, const DataLoader* loader, DataPosition at) {
    state->window_tokens = dataloader_window_tokens(&loader->options);
    state->data_epoch = (int64_t)at.epoch;
    state->data_shard = (int64_t)at.shard;
    state->data_window = (int64_t)at.window;
    state->data_fingerprint = run_data_fingerprint(loader);
}

typedef enum {
    DATA_SAME,      // the very next batch follows
    DATA_REORDERED, // other B, T, ranks or seed: as many tokens are left of the epoch, in another order
    DATA_OTHER      // other files: from their beginning
} DataContinuation;

// Put `loader` where the run of `state` left the data.
static inline DataContinuation run_state_seek(const RunState* state, DataLoader* loader) {
    DataPosition at = {(uint64_t)state->data_epoch, (uint64_t)state->data_shard, (uint64_t)state->data_window};
    if (state->data_fingerprint != run_data_fingerprint(loader) || at.shard >= (uint64_t)loader->num_shards) {
        dataloader_rewind(loader);
        return DATA_OTHER;
    }
    int64_t window_tokens = dataloader_window_tokens(&loader->options);
    int is_reseeded = loader->options.order == DATA_SHUFFLED && state->num_updates > 0 && // before that, none is known
                      (uint32_t)state->seed != loader->options.seed;
    at.window = 0;
    dataloader_seek(loader, at); // which shard it is depends on the order of shards: on the seed and the windows
    uint64_t there = (uint64_t)loader->windows[loader->shard_order[at.shard]];
    uint64_t taken = (uint64_t)state->data_window * (uint64_t)state->window_tokens / (uint64_t)window_tokens;
    at.window = taken < there ? taken : there;
    dataloader_seek(loader, at);
    if (window_tokens == state->window_tokens && loader->options.num_ranks == state->num_ranks && !is_reseeded &&
        at.window == (uint64_t)state->data_window) {
        return DATA_SAME;
    }
    return DATA_REORDERED;
}

#endif
