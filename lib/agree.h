// Do all ranks run the same thing? Ranks that were started otherwise call other collectives, wait for ever, or train
// something that nobody asked for. So at start-up every rank writes down what it is about to do, one fact a line:
//
//     name=value     must be the same on every rank, as "--learning-rate=0.0006" or "program version=1a2b3c4"
//     ?name=value    worth a warning when it differs: "?device=NVIDIA H200"
//     @host=name     where the rank runs: not compared, names the rank in messages when there are several hosts
//
// Hashes of these texts are compared first, which is all that happens in a run that was started well; where they differ
// every rank gets everybody's text (comm_host_all_gather), and agree_differences finds the facts that differ:
//
//     the ranks differ: --learning-rate is 0.0003 on rank 0 and 2 others, 0.0006 on rank 2
//
// Plain C without ranks: who exchanges the texts is the caller.
#ifndef AGREE_H
#define AGREE_H

#include "check.h"

#include <unistd.h>

#include "config.h"

enum { AGREE_SHOWN = 6, AGREE_VALUES = 3, AGREE_VALUE_BYTES = 96, AGREE_NAME_BYTES = 96 };

// Write one fact. What would end the line inside of the value becomes a space.
__attribute__((format(printf, 3, 4))) static inline void agree_fact(FILE* out, const char* name, const char* format,
                                                                    ...) {
    char value[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(value, sizeof(value), format, args);
    va_end(args);
    for (char* c = value; *c; c++) {
        if (*c == '\n') { *c = ' '; }
    }
    fprintf(out, "%s=%s\n", name, value);
}

// Where this rank runs.
static inline void agree_host(FILE* out) {
    char host[65] = "?";
    gethostname(host, sizeof(host) - 1);
    agree_fact(out, "@host", "%s", host);
}

// The flags that may have another value on another rank: what a host has of its own, and what llm.c's scripts give
// every process. All others must not, those that only show or save something included: ranks that validate, save or
// stop at other steps wait for each other.
static inline int agree_may_differ(const char* flag) {
    static const char* const own[] = {"process-rank", "gpus-per-node", "threads", "autotune-cache",
                                      "checkpoint-memory"};
    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++) {
        if (strcmp(flag, own[i]) == 0) { return 1; }
    }
    return 0;
}

// Write every flag as it was given or is by default, so that nothing has to be read or computed before.
static inline void agree_settings(FILE* out, const TrainConfig* train) {
    int count;
    const Flag* flags = config_flags(&count);
    char text[512], name[AGREE_NAME_BYTES];
    for (const Flag* flag = flags; flag < flags + count; flag++) {
        if (flag->type == FLAG_HEADING || flag->type == FLAG_FIXED || agree_may_differ(flag->name)) { continue; }
        snprintf(name, sizeof(name), "--%s", flag->name);
        agree_fact(out, name, "%s", flag->type == FLAG_STRING ? *(const char* const*)((const char*)train + flag->offset)
                                                              : config_get(train, flag, text, sizeof(text)));
    }
}

// Write the model's shape, with the micro-batch that was chosen.
static inline void agree_model(FILE* out, const TrainConfig* train, const GptConfig* gpt) {
    agree_fact(out, "model", "%d layers, %d channels, %d heads, %d positions, a vocabulary of %d", gpt->num_layers,
               gpt->channels, gpt->num_heads, gpt->max_seq_len, gpt->vocab_size);
    agree_fact(out, "batch", "-b %d, %d micro-steps, %lld tokens per step", train->batch_size, train->grad_accum_steps,
               (long long)train->total_batch_tokens);
}

// The next line that is compared, from `line` on; NULL: there is none.
static inline const char* agree_line(const char* line) {
    while (*line == '@') {
        line += strcspn(line, "\n");
        line += *line == '\n';
    }
    return *line != 0 ? line : NULL;
}

static inline const char* agree_next(const char* line) {
    line += strcspn(line, "\n");
    return agree_line(line + (*line == '\n'));
}

// FNV-1a of the lines that are compared.
static inline uint64_t agree_hash(const char* text) {
    uint64_t hash = FNV_START;
    for (const char* line = agree_line(text); line != NULL; line = agree_next(line)) {
        hash = config_fnv1a(hash, line, strcspn(line, "\n") + 1);
    }
    return hash;
}

// Value of the fact whose line begins with `name` (length n, without the =): its length goes to *bytes. NULL: no such.
static inline const char* agree_value(const char* text, const char* name, size_t n, size_t* bytes) {
    for (const char* line = text; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        if (strncmp(line, name, n) == 0 && line[n] == '=') {
            *bytes = strcspn(line + n + 1, "\n");
            return line + n + 1;
        }
    }
    *bytes = 0;
    return NULL;
}

static inline int agree_same_value(const char* a, size_t a_bytes, const char* b, size_t b_bytes) {
    if (a == NULL || b == NULL) { return a == b; }
    return a_bytes == b_bytes && memcmp(a, b, a_bytes) == 0;
}

// Are all ranks on one host?
static inline int agree_is_one_host(const char* const* texts, int num_ranks) {
    size_t first_bytes, bytes;
    const char* first = agree_value(texts[0], "@host", 5, &first_bytes);
    for (int r = 1; r < num_ranks; r++) {
        const char* host = agree_value(texts[r], "@host", 5, &bytes);
        if (!agree_same_value(first, first_bytes, host, bytes)) { return 0; }
    }
    return 1;
}

// "NAME is VALUE on rank 0 and 2 others, VALUE on rank 2": who has what of the fact `name` (length n).
static inline void agree_describe(FILE* out, const char* const* texts, int num_ranks, const char* name, size_t n) {
    int one_host = agree_is_one_host(texts, num_ranks), num_values = 0;
    const char* shown = name + (*name == '?');
    fprintf(out, "%.*s%s", (int)(n - (size_t)(shown - name)), shown, strncmp(shown, "--", 2) == 0 ? " is" : ":");
    for (int r = 0; r < num_ranks; r++) {
        size_t bytes, other_bytes;
        const char* value = agree_value(texts[r], name, n, &bytes);
        int is_new = 1, others = 0;
        for (int k = 0; k < num_ranks; k++) {
            const char* other = agree_value(texts[k], name, n, &other_bytes);
            int is_same = agree_same_value(value, bytes, other, other_bytes);
            if (is_same && k < r) { is_new = 0; }
            if (is_same && k > r) { others++; }
        }
        if (!is_new) { continue; }
        if (num_values++ == AGREE_VALUES) {
            fprintf(out, ", and more");
            break;
        }
        if (value == NULL) {
            fprintf(out, "%s not known", num_values > 1 ? "," : "");
        } else {
            int cut = bytes > AGREE_VALUE_BYTES;
            fprintf(out, "%s %s%.*s%s", num_values > 1 ? "," : "", bytes == 0 ? "empty" : "",
                    cut ? AGREE_VALUE_BYTES : (int)bytes, value, cut ? "..." : "");
        }
        size_t host_bytes;
        const char* host = agree_value(texts[r], "@host", 5, &host_bytes);
        fprintf(out, " on rank %d", r);
        if (!one_host && host != NULL) { fprintf(out, " (%.*s)", (int)host_bytes, host); }
        if (others > 0) { fprintf(out, " and %d other%s", others, others == 1 ? "" : "s"); }
    }
}

// What differs between the ranks' texts: facts that must be the same go to `errors`, the ? ones to `warnings`, the first
// AGREE_SHOWN of each. Both malloc'ed, NULL when there is nothing; free them. The same answer on every rank.
static inline void agree_differences(const char* const* texts, int num_ranks, char** errors, char** warnings) {
    char** out[2] = {errors, warnings};
    for (int kind = 0; kind < 2; kind++) {
        char* found = NULL;
        size_t size = 0;
        FILE* f = open_memstream(&found, &size);
        check(f != NULL, "out of host memory for a list of differences");
        int count = 0;
        for (int r = 0; r < num_ranks; r++) {
            for (const char* line = agree_line(texts[r]); line != NULL; line = agree_next(line)) {
                size_t n = strcspn(line, "=\n"), bytes, other_bytes;
                if ((*line == '?') != kind) { continue; }
                const char* value = agree_value(texts[r], line, n, &bytes);
                int is_known = 0, differs = 0;
                for (int k = 0; k < num_ranks && !is_known; k++) {
                    const char* other = agree_value(texts[k], line, n, &other_bytes);
                    is_known = k < r && other != NULL; // then it was looked at with that rank
                    differs |= !agree_same_value(value, bytes, other, other_bytes);
                }
                if (is_known || !differs || count++ >= AGREE_SHOWN) { continue; }
                fprintf(f, "%s", count > 1 ? "; " : "");
                agree_describe(f, texts, num_ranks, line, n);
            }
        }
        if (count > AGREE_SHOWN) { fprintf(f, "; and %d more", count - AGREE_SHOWN); }
        fclose_or_die(f, "a list of differences");
        if (count == 0) {
            free(found);
            found = NULL;
        }
        *out[kind] = found;
    }
}

// Two ranks with the same, non-empty text in ids (num_ranks, bytes); 0: there are none.
static inline int agree_shared(const char* ids, size_t bytes, int num_ranks, int* first, int* second) {
    for (int a = 0; a < num_ranks; a++) {
        for (int b = a + 1; b < num_ranks; b++) {
            const char *id = ids + (size_t)a * bytes, *other = ids + (size_t)b * bytes;
            if (id[0] != 0 && strncmp(id, other, bytes) == 0) {
                *first = a;
                *second = b;
                return 1;
            }
        }
    }
    return 0;
}

#endif
