// Where the time of a step goes (--profile N): calls, time, bytes and FLOPs per op, summed over the profiled steps, and
// how far each op is from what the chip could do at best (roofline.h).
//
//     Profile profile;
//     profile_open(&profile, chip);
//     profile_name_linears(&profile, &config);             // matrix products are called by their layer from here on
//     ... each step: device_profile_begin(dev, &profile); the step; device_profile_end(dev); profile.wall_s += ...
//     profile_print(stdout, &profile);
//
// The ops declare their bytes and FLOPs in op_cost.h; a floor's device_profile_mark measures the time from one op's
// mark to the next. What of a step's time belongs to no op is its gaps.
#ifndef PROFILE_H
#define PROFILE_H

#include "check.h"

#include "roofline.h"
#include "scaling.h"

enum { PROFILE_OPS = 64, PROFILE_LINEARS = 8, PROFILE_NAME = 32 };

typedef struct {
    char name[PROFILE_NAME];
    int64_t calls;
    double seconds;
    double bytes, flops;  // declared
    double floor_seconds; // sum over the calls of max(FLOPs / peak of the format, bytes / memory bandwidth)
} ProfileOp;

typedef struct {
    Chip chip;
    ProfileOp ops[PROFILE_OPS]; // all sums over num_steps steps
    int num_ops;
    struct {
        const char* name;
        int C, OC;
    } linears[PROFILE_LINEARS];
    int num_linears;
    int num_steps;
    double wall_s; // duration of those steps
    double wait_s; // of it, how long the host stood waiting for the device: 0 where they are the same
} Profile;

static inline void profile_open(Profile* profile, Chip chip) {
    memset(profile, 0, sizeof(*profile));
    profile->chip = chip;
}

// Call the matrix products of a linear layer with C inputs and OC outputs "<name> forward", "<name> dgrad", "<name>
// wgrad". `name` is kept, not copied. Of layers with the same shape the first one gives the name.
static inline void profile_name_linear(Profile* profile, const char* name, int C, int OC) {
    check(profile->num_linears < PROFILE_LINEARS, "profile_name_linear: no room for '%s'", name);
    profile->linears[profile->num_linears].name = name;
    profile->linears[profile->num_linears].C = C;
    profile->linears[profile->num_linears++].OC = OC;
}

// The names of all linear layers of a model.
static inline void profile_name_linears(Profile* profile, const GptConfig* config) {
    int C = config->channels;
    profile_name_linear(profile, "qkv", C, 3 * C);
    profile_name_linear(profile, "proj", C, C);
    profile_name_linear(profile, "fc", C, 4 * C);
    profile_name_linear(profile, "fcproj", 4 * C, C);
    profile_name_linear(profile, "head", C, config->padded_vocab_size);
}

// How many steps --profile leaves out at the start of a process: those that plan products or, in FP8, whose producers
// run a measuring pass first because scales are still warming up.
static inline int profile_skipped_steps(const TrainConfig* train) {
    return train->precision == PRECISION_FP8 ? AMAX_WARMUP + 1 : 3;
}

// The name given to that shape, or "matmul".
static inline const char* profile_linear_name(const Profile* profile, int C, int OC) {
    for (int i = 0; i < profile->num_linears; i++) {
        if (profile->linears[i].C == C && profile->linears[i].OC == OC) { return profile->linears[i].name; }
    }
    return "matmul";
}

// Count one call of op `name` with its bytes and FLOPs; fp8: the FLOPs are of FP8 operands, else of BF16. Returns the
// op's index in profile->ops. An op without bytes and FLOPs has no roofline.
static inline int profile_count(Profile* profile, const char* name, double bytes, double flops, int fp8) {
    int i = 0;
    while (i < profile->num_ops && strcmp(profile->ops[i].name, name) != 0) {
        i++;
    }
    ProfileOp* op = &profile->ops[i];
    if (i == profile->num_ops) {
        check(i < PROFILE_OPS, "profile_count: no room for '%s'", name);
        check(strlen(name) < PROFILE_NAME, "profile_count: '%s' is longer than %d", name, PROFILE_NAME - 1);
        snprintf(op->name, sizeof(op->name), "%s", name);
        profile->num_ops++;
    }
    double peak = fp8 ? profile->chip.fp8_flops : profile->chip.bf16_flops;
    op->calls++;
    op->bytes += bytes;
    op->flops += flops;
    op->floor_seconds += fmax(flops / peak, bytes / profile->chip.bytes_per_s);
    return i;
}

// Seconds per step that belong to no op.
static inline double profile_gaps(const Profile* profile) {
    double seconds = profile->wall_s;
    for (int i = 0; i < profile->num_ops; i++) {
        seconds -= profile->ops[i].seconds;
    }
    return seconds / profile->num_steps;
}

// Indices of the ops, longest first.
static inline void profile_sort(const Profile* profile, int order[PROFILE_OPS]) {
    for (int i = 0; i < profile->num_ops; i++) {
        int at = i;
        for (; at > 0 && profile->ops[order[at - 1]].seconds < profile->ops[i].seconds; at--) {
            order[at] = order[at - 1];
        }
        order[at] = i;
    }
}

// The share of its roofline that an op reached, in percent; 0 when it declared neither bytes nor FLOPs.
static inline double profile_roofline_percent(const ProfileOp* op) {
    return op->seconds > 0.0 ? 100.0 * op->floor_seconds / op->seconds : 0.0;
}

// The table, per optimizer step, longest op first:
//     op                     calls         ms       %      GB/s   TFLOP/s  % of roofline
//     fc wgrad                  96     12.345    12.3      1234     876.5           44.3
//     gaps                             0.123     0.1
static inline void profile_print(FILE* out, const Profile* profile) {
    if (profile->num_steps == 0) { return; }
    int order[PROFILE_OPS];
    double n = profile->num_steps, wall = profile->wall_s / n, gaps = profile_gaps(profile);
    profile_sort(profile, order);
    fprintf(out, "profile of %d steps on %s: %.2f ms per step, the host waits %.2f ms of it for the device\n",
            profile->num_steps, profile->chip.name, 1e3 * wall, 1e3 * profile->wait_s / n);
    fprintf(out, "%-26s %8s %10s %6s %9s %9s %14s\n", "op", "calls", "ms", "%", "GB/s", "TFLOP/s", "% of roofline");
    for (int i = 0; i < profile->num_ops; i++) {
        const ProfileOp* op = &profile->ops[order[i]];
        double s = op->seconds > 0.0 ? op->seconds : INFINITY;
        fprintf(out, "%-26s %8g %10.3f %6.2f %9.0f %9.1f %14.1f\n", op->name, (double)op->calls / n,
                1e3 * op->seconds / n, 100.0 * op->seconds / profile->wall_s, op->bytes / s / 1e9, op->flops / s / 1e12,
                profile_roofline_percent(op));
    }
    fprintf(out, "%-26s %8s %10.3f %6.2f\n", "gaps", "", 1e3 * gaps, 100.0 * gaps / wall);
    fflush(out);
}

// The same numbers as one JSON object, without a line end:
//     {"steps", "ms", "host_wait_ms", "gaps_ms", "gaps_percent", "ops": [{"op", "calls", "ms", "percent", "gb_per_s",
//      "tflops", "roofline_percent"}]}
static inline void profile_write_json(FILE* out, const Profile* profile) {
    int order[PROFILE_OPS];
    double n = profile->num_steps, gaps = profile_gaps(profile);
    profile_sort(profile, order);
    fprintf(out, "{\"steps\": %d, \"ms\": %.6g, \"host_wait_ms\": %.6g, \"gaps_ms\": %.6g, \"gaps_percent\": %.6g, "
            "\"ops\": [", profile->num_steps, 1e3 * profile->wall_s / n, 1e3 * profile->wait_s / n, 1e3 * gaps,
            100.0 * gaps * n / profile->wall_s);
    for (int i = 0; i < profile->num_ops; i++) {
        const ProfileOp* op = &profile->ops[order[i]];
        double s = op->seconds > 0.0 ? op->seconds : INFINITY;
        fprintf(out, "%s{\"op\": \"%s\", \"calls\": %g, \"ms\": %.6g, \"percent\": %.6g, \"gb_per_s\": %.6g, "
                "\"tflops\": %.6g, \"roofline_percent\": %.6g}", i > 0 ? ", " : "", op->name, (double)op->calls / n,
                1e3 * op->seconds / n, 100.0 * op->seconds / profile->wall_s, op->bytes / s / 1e9, op->flops / s / 1e12,
                profile_roofline_percent(op));
    }
    fprintf(out, "]}");
}

#endif
