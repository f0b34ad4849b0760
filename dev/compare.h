// What tests and floors say to each other: neutral records of one op call and of one training session, random inputs,
// and rules for how far two results may be apart. Included once, at global scope; probe.h is the floor's side of it.
#ifndef COMPARE_H
#define COMPARE_H

#include "../lib/check.h"

#include <fcntl.h>
#include <math.h>
#include <stddef.h>
#include <unistd.h>

#include "../lib/fp8.h"
#include "../lib/rng.h"
#include "../lib/scaling.h"
#include "../lib/shards.h"
#include "host/unit.h"

typedef struct {
    const char* name;
    void (*run)(void);
} NamedTest;

// ---------------------------------------------------------------------------------------------------------------------
// memory of one test

// Blocks that are freed together at the end of a case.
typedef struct {
    void** block;
    int num_blocks, capacity;
} Arena;

static inline void* arena_bytes(Arena* arena, size_t bytes) {
    if (arena->num_blocks == arena->capacity) {
        arena->capacity = arena->capacity ? 2 * arena->capacity : 64;
        arena->block = (void**)realloc(arena->block, (size_t)arena->capacity * sizeof(void*));
        check(arena->block != NULL, "out of host memory in a test");
    }
    void* p = calloc_or_die(1, bytes);
    arena->block[arena->num_blocks++] = p;
    return p;
}

static inline float* arena_floats(Arena* arena, size_t n) {
    return (float*)arena_bytes(arena, n * sizeof(float));
}
static inline double* arena_doubles(Arena* arena, size_t n) {
    return (double*)arena_bytes(arena, n * sizeof(double));
}
static inline uint8_t* arena_codes(Arena* arena, size_t n) {
    return (uint8_t*)arena_bytes(arena, n);
}

static inline void arena_free(Arena* arena) {
    for (int i = 0; i < arena->num_blocks; i++) {
        free(arena->block[i]);
    }
    free(arena->block);
    memset(arena, 0, sizeof(*arena));
}

// What the program prints while a session opens is not the test's output. Returns what quiet_end wants.
static inline int quiet_begin(void) {
    fflush(stdout);
    int saved = dup(1), nowhere = open("/dev/null", O_WRONLY);
    if (nowhere >= 0) {
        dup2(nowhere, 1);
        close(nowhere);
    }
    return saved;
}

static inline void quiet_end(int saved) {
    fflush(stdout);
    dup2(saved, 1);
    close(saved);
}

// ---------------------------------------------------------------------------------------------------------------------
// random inputs: stream `stream` of the counter-based generator, so that an input depends on nothing but its name

// mean + deviation * N(0, 1)
static inline float* random_floats(Arena* arena, size_t n, double mean, double deviation, uint64_t stream) {
    float* x = arena_floats(arena, n);
    long long count = (long long)n;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) if (count > 1000000)
#endif
    for (long long i = 0; i < count; i++) {
        x[i] = (float)(mean + deviation * (double)rng_normal(20261121, stream, (uint64_t)i));
    }
    return x;
}

// The same, rounded to BF16.
static inline float* random_bf16(Arena* arena, size_t n, double mean, double deviation, uint64_t stream) {
    float* x = random_floats(arena, n, mean, deviation, stream);
    for (size_t i = 0; i < n; i++) {
        x[i] = bf16_round(x[i]);
    }
    return x;
}

// Uniform in [0, limit).
static inline int* random_ints(Arena* arena, size_t n, int limit, uint64_t stream) {
    int* x = (int*)arena_bytes(arena, n * sizeof(int));
    for (size_t i = 0; i < n; i++) {
        x[i] = (int)(philox(20261121, stream, i).word[0] % (uint32_t)limit);
    }
    return x;
}

static inline void transpose_codes(uint8_t* to, const uint8_t* from, size_t rows, size_t cols) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < cols; c++) {
            to[c * rows + r] = from[r * cols + c];
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// one call of one op, on any floor

typedef enum {
    OP_EMBEDDING_FORWARD,
    OP_EMBEDDING_BACKWARD,
    OP_LAYERNORM_FORWARD,
    OP_LAYERNORM_BACKWARD,
    OP_MATMUL_FORWARD,
    OP_MATMUL_DGRAD,
    OP_MATMUL_WGRAD,
    OP_ATTENTION_FORWARD,
    OP_ATTENTION_BACKWARD,
    OP_GELU_FORWARD,
    OP_GELU_BACKWARD,
    OP_QUANTIZE_FORWARD,
    OP_QUANTIZE_BACKWARD,
    OP_QUANTIZE_WEIGHT,
    OP_CLASSIFIER,
    OP_LOSS_ADD,
    OP_GLOBAL_NORM,
    OP_NORM_OF_SLICES,
    OP_NORM_OF_RANKS,
    OP_ADAMW_UPDATE,
    OP_PARAMS_FROM_MASTER,
    OP_SCALE_SLOTS_GATHER,
    OP_SCALE_SLOTS_STEP,
    OP_BF16_ROUND_TRIP,
    OP_GRAD_QUANTIZE,
    OP_GRAD_SUM,
    OP_GRAD_PACK_BF16,
    OP_GRAD_PACK_FP32,
    OP_GRAD_UNPACK_BF16,
    OP_GRAD_UNPACK_FP32,
    OP_GRAD_AMAX,
    OP_GRAD_QUANTIZE_SHARED,
    OP_GRAD_DEQUANTIZE_SHARED,
    OP_PARAM_PACK,
    OP_PARAM_UNPACK,
    OP_QUANTIZE_SLICE,
    OP_TRANSPOSE_WEIGHT
} OpName;

typedef enum {
    ARG_BF16, // float on the host, the floor's bf16 on the device
    ARG_F32,
    ARG_I32,
    ARG_CODES, // FP8
    ARG_SLOTS, // ScaleSlot
    ARG_STATE, // StepState: loss, grad_norm (float), skip, slots_warming (int), saturated (64 bits)
    ARG_NORMS  // RankNorm, 16 bytes: squares (double), loss, unused (float)
} ArgType;

typedef enum {
    ARG_IN,
    ARG_OUT,  // filled with 0xFF bytes (NaN in every format) before the call, read back after it
    ARG_INOUT // uploaded before, read back after
} ArgRole;

typedef struct {
    const char* name;
    ArgType type;
    ArgRole role;
    void* host; // n elements
    size_t n;
    const char* alias; // name of the argument in whose memory this one lies; NULL: memory of its own
} Arg;

// The words of ARG_STATE on the host.
typedef struct {
    float loss, grad_norm;
    int skip, slots_warming;
    unsigned long long saturated;
} HostState;

// The words of ARG_NORMS.
typedef struct {
    double squares;
    float loss, unused;
} HostNorm;

enum { MAX_ARGS = 20 };

// An argument that is not in the list is NULL in the call: that is how forms are left out.
typedef struct {
    OpName op;
    Arg arg[MAX_ARGS];
    int num_args;
    int rows, cols, B, T, C, OC, NH, HS, V, Vp; // as far as the op has them
    int layers, num_slots, num_buckets, with_gradient, accumulate;
    size_t n, slot_stride;
    float factor; // dloss of classifier, factor of loss_add, mu of the shared scales
    float lr, beta1, beta2, eps, weight_decay, grad_clip;
    int t, stochastic;
    uint64_t seed;
    size_t index;
    const Shards* shards; // of norm_of_slices
    const Bucket* bucket; // of the ops between ranks; params: the pieces lie at their offsets in it
    int num_ranks, rank; // of grad_pack and grad_unpack: how many, and the first
    ScaleRecipe recipe;
    int measure_first, record;
    char broken[128]; // after the call: what was written outside its buffer; "" when nothing was
} OpCall;

static inline size_t arg_element_bytes(ArgType type) {
    switch (type) {
    case ARG_CODES:
        return 1;
    case ARG_SLOTS:
        return sizeof(ScaleSlot);
    case ARG_STATE:
        return sizeof(HostState);
    case ARG_NORMS:
        return sizeof(HostNorm);
    default:
        return 4;
    }
}

static inline OpCall op_call(OpName op) {
    OpCall call;
    memset(&call, 0, sizeof(call));
    call.op = op;
    ScaleRecipe recipe = {16, AMAX_MAX, 0, 1.0f};
    call.recipe = recipe;
    return call;
}

static inline void arg_add(OpCall* call, const char* name, ArgType type, ArgRole role, const void* host, size_t n) {
    check(call->num_args < MAX_ARGS, "test: too many arguments");
    Arg arg = {name, type, role, (void*)host, n, NULL};
    call->arg[call->num_args++] = arg;
}

static inline Arg* arg_find(const OpCall* call, const char* name) {
    for (int i = 0; i < call->num_args; i++) {
        if (strcmp(call->arg[i].name, name) == 0) { return (Arg*)&call->arg[i]; }
    }
    return NULL;
}

static inline float* arg_floats(const OpCall* call, const char* name) {
    return (float*)arg_find(call, name)->host;
}
static inline uint8_t* arg_codes(const OpCall* call, const char* name) {
    return (uint8_t*)arg_find(call, name)->host;
}
static inline ScaleSlot* arg_slot(const OpCall* call, const char* name) {
    return (ScaleSlot*)arg_find(call, name)->host;
}

// The same call with its own copies of everything that it writes.
static inline OpCall op_call_copy(Arena* arena, const OpCall* call) {
    OpCall copy = *call;
    for (int i = 0; i < copy.num_args; i++) {
        Arg* arg = &copy.arg[i];
        if (arg->role == ARG_IN) { continue; }
        size_t bytes = arg->n * arg_element_bytes(arg->type);
        arg->host = arena_bytes(arena, bytes);
        memcpy(arg->host, call->arg[i].host, bytes);
    }
    return copy;
}

// ---------------------------------------------------------------------------------------------------------------------
// a training session, on any floor

typedef struct {
    float loss, grad_norm;
    int skipped;       // what train_step says: 0 no, 1 not finite
    int slots_warming; // after the step
} HostStep;

// A floor as the tests see it: one instance per floor, made by probe.h. Sessions are opened from a line of the
// program's own flags; tokens become a shard that the program's loader reads in order; weights are in llm.c's order
// (parameter_table) and as many as the flags' model has.
typedef struct {
    const char* name;
    void* (*device_open)(int num_threads, int attention); // AttentionKind
    void (*device_close)(void* device);
    const char* (*attention_name)(const void* device);
    void (*op)(void* device, OpCall* call); // uploads, calls, reads back, looks at the guard zones

    void* (*open)(const char* flags, const float* weights, const int* tokens, int num_tokens, int num_threads);
    void (*close)(void* session);
    HostStep (*step)(void* session, float learning_rate);
    float (*validate)(void* session, int num_batches);
    void (*forward)(void* session, float* logits,
                    float* losses);             // the first batch; logits (BT, V), losses (BT), or NULL
    void (*grads)(void* session, float* grads); // (num_parameters) of the last step
    void (*weights)(void* session, float* master, float* m, float* v); // (num_parameters) each, or NULL
    int (*slots)(void* session, ScaleSlot* slots);                     // returns num_slots; slots may be NULL
    void (*set_weights)(void* session, const float* weights);          // as after loading: moments zero
    // element i of the BF16 copy of tensor `tensor` (no linear weight) that the passes read; returns what it was
    float (*poke)(void* session, int tensor, size_t i, float value);
    void (*launch_early)(void* session, int on); // see launch in gpu.cuh; the CPU has nothing to launch
    int (*save)(void* session, const char* folder); // a training checkpoint; 1: it is complete
    int (*load)(void* session, const char* folder); // go on from the newest there; returns its step

    // On several ranks (test_ranks.h). Sessions of num_ranks ranks, 1 or all that were started; the GPU is `device`.
    // All of these but poke, param, weight and the hashes are collective, and so are step, forward, validate and
    // weights, which fills rank 0's arrays only.
    void* (*open_rank)(const char* flags, const float* weights, const int* tokens, int num_tokens, int num_ranks,
                       int device);
    void (*local_grads)(void* session, float* grads); // (num_parameters) of this rank's next micro-batch
    void (*reduce)(void* session, float* grads); // (num_parameters) this rank's -> what the exchange leaves in them
    HostState (*norm)(void* session, const float* grads, float loss); // of this rank's share of the loss
    void (*set_state)(void* session, const float* master, const float* m, const float* v); // (num_parameters) each
    void (*settle)(void* session);                            // every weight that travels arrives
    uint64_t (*state_hash)(void* session);                    // of this rank's master, m and v
    uint64_t (*weights_hash)(void* session);                  // of all that the passes read of the weights
    void (*param)(void* session, int tensor, float* values);  // the BF16 copy, all layers, of no linear's weight
    // Block `layer`'s linear (or the FP8 head, layer L): 1 and its codes, or 0 and its BF16 copy
    int (*weight)(void* session, int layer, int linear, uint8_t* data, uint8_t* transposed, float* wide);
} Floor;

// ---------------------------------------------------------------------------------------------------------------------
// distances

// |a - want| / |want| (Euclidean norms, in FP64). NaN anywhere gives NaN, which no threshold accepts.
static inline double relative_distance(const float* a, const float* want, size_t n) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)a[i] - (double)want[i];
        difference += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    return norm > 0.0 ? sqrt(difference / norm) : difference > 0.0 ? INFINITY : sqrt(difference);
}

static inline double relative_distance_f64(const float* a, const double* want, size_t n) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)a[i] - want[i];
        difference += d * d;
        norm += want[i] * want[i];
    }
    return norm > 0.0 ? sqrt(difference / norm) : difference > 0.0 ? INFINITY : sqrt(difference);
}

static inline double largest_of(const float* x, size_t n) {
    double largest = 0.0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)x[i]));
    }
    return largest;
}

// Distance between neighbouring BF16 values at |x|: 2^(exponent - 7).
static inline double bf16_ulp(double x) {
    int exponent;
    frexp(x, &exponent);
    return ldexp(1.0, (exponent < -125 ? -125 : exponent) - 8);
}

// FP8 codes on a line: neighbours differ by one, +0 and -0 coincide.
static inline int code_position(uint8_t code) {
    return code & 0x80 ? -(int)(code & 0x7F) : (int)(code & 0x7F);
}

// ---------------------------------------------------------------------------------------------------------------------
// rules: how far an output of one floor may be from the other's

typedef enum {
    RULE_EXACT, // bit for bit (BF16 and FP32: also the sign of zero; all NaNs are one)
    RULE_BF16,  // at most one BF16 ulp + `absolute` apart, and at most `share` of the elements differ at all
    RULE_CODES, // at most one FP8 code apart, and at most `share` of the elements differ at all
    RULE_F32,   // |difference| <= relative * |want| + absolute + factor * magnitude[i]
    RULE_SLOT,  // scale, descale and amax within `relative`; the rest exact, jit_amax ignored (scratch of the op)
    RULE_IGNORE // the test looks at it itself
} RuleKind;

typedef struct {
    const char* name;
    RuleKind kind;
    double absolute, relative, share, factor;
    const double* magnitude;
} Rule;

// Slot by slot, without the bytes of padding behind the ring.
static inline int same_slots(const ScaleSlot* a, const ScaleSlot* b, int n) {
    for (int i = 0; i < n; i++) {
        if (memcmp(&a[i], &b[i], offsetof(ScaleSlot, history) + sizeof(a->history)) != 0) { return 0; }
    }
    return 1;
}

static inline int same_float(float a, float b) {
    return (isnan(a) && isnan(b)) || float_bits(a) == float_bits(b);
}

static inline void compare_exact(const char* what, const Arg* got, const Arg* want) {
    size_t size = arg_element_bytes(got->type);
    const char *a = (const char*)got->host, *b = (const char*)want->host;
    for (size_t i = 0; i < got->n; i++) {
        int is_float = got->type == ARG_BF16 || got->type == ARG_F32;
        if (is_float) {
            float x = ((const float*)got->host)[i], y = ((const float*)want->host)[i];
            expect(same_float(x, y), "%s: %s[%zu] = %a, want exactly %a", what, got->name, i, (double)x, (double)y);
        } else if (got->type == ARG_SLOTS) {
            expect(same_slots((const ScaleSlot*)got->host + i, (const ScaleSlot*)want->host + i, 1),
                   "%s: %s[%zu] differs", what, got->name, i);
        } else {
            expect(memcmp(a + i * size, b + i * size, size) == 0, "%s: %s[%zu]: other bits", what, got->name, i);
        }
    }
}

static inline void compare_floats(const char* what, const Arg* got, const Arg* want, const Rule* rule) {
    const float *a = (const float*)got->host, *b = (const float*)want->host;
    size_t differing = 0;
    for (size_t i = 0; i < got->n; i++) {
        if (same_float(a[i], b[i])) { continue; }
        double x = (double)a[i], y = (double)b[i];
        double allowed = rule->kind == RULE_BF16
                             ? bf16_ulp(fmax(fabs(x), fabs(y))) + rule->absolute
                             : rule->relative * fabs(y) + rule->absolute +
                                   (rule->magnitude != NULL ? rule->factor * rule->magnitude[i] : 0.0);
        differing++;
        expect(fabs(x - y) <= allowed, "%s: %s[%zu] = %.9g, want %.9g +- %.3g", what, got->name, i, x, y, allowed);
    }
    // two elements may always differ: a share of a handful says nothing
    expect(rule->kind != RULE_BF16 || (double)differing <= rule->share * (double)got->n + 2.0,
           "%s: %s: %zu of %zu elements differ, want at most a share of %g", what, got->name, differing, got->n,
           rule->share);
}

static inline void compare_codes(const char* what, const Arg* got, const Arg* want, const Rule* rule) {
    const uint8_t *a = (const uint8_t*)got->host, *b = (const uint8_t*)want->host;
    size_t differing = 0;
    for (size_t i = 0; i < got->n; i++) {
        differing += a[i] != b[i];
        expect(abs(code_position(a[i]) - code_position(b[i])) <= 1, "%s: %s[%zu] = code %02x, want %02x or a neighbour",
               what, got->name, i, a[i], b[i]);
    }
    expect((double)differing <= rule->share * (double)got->n + 2.0,
           "%s: %s: %zu of %zu codes differ, want at most a share of %g", what, got->name, differing, got->n,
           rule->share);
}

static inline int close_to(float a, float b, double relative) {
    return same_float(a, b) || fabs((double)a - (double)b) <= relative * fabs((double)b);
}

static inline void compare_slots(const char* what, const Arg* got, const Arg* want, const Rule* rule) {
    for (size_t i = 0; i < got->n; i++) {
        ScaleSlot a = ((const ScaleSlot*)got->host)[i], b = ((const ScaleSlot*)want->host)[i];
        expect(close_to(a.scale, b.scale, rule->relative), "%s: %s[%zu].scale = %.9g, want %.9g", what, got->name, i,
               (double)a.scale, (double)b.scale);
        expect(close_to(a.descale, b.descale, rule->relative), "%s: %s[%zu].descale = %.9g, want %.9g", what, got->name,
               i, (double)a.descale, (double)b.descale);
        expect(close_to(a.amax, b.amax, rule->relative), "%s: %s[%zu].amax = %.9g, want %.9g", what, got->name, i,
               (double)a.amax, (double)b.amax);
        a.scale = b.scale, a.descale = b.descale, a.amax = b.amax, a.jit_amax = b.jit_amax;
        expect(same_slots(&a, &b, 1), "%s: %s[%zu]: ring, policy or counters differ", what, got->name, i);
    }
}

static inline void compare_arg(const char* what, const Arg* got, const Arg* want, const Rule* rule) {
    switch (rule->kind) {
    case RULE_EXACT:
        compare_exact(what, got, want);
        break;
    case RULE_BF16:
    case RULE_F32:
        compare_floats(what, got, want, rule);
        break;
    case RULE_CODES:
        compare_codes(what, got, want, rule);
        break;
    case RULE_SLOT:
        compare_slots(what, got, want, rule);
        break;
    case RULE_IGNORE:
        break;
    }
}

// Poison left behind: a 0xFF byte in FP8 (the codec writes NaN as 0x7F only), or the NaN with all bits set.
static inline void expect_no_poison(const char* what, const OpCall* call) {
    for (int i = 0; i < call->num_args; i++) {
        const Arg* arg = &call->arg[i];
        if (arg->role != ARG_OUT || arg->type == ARG_SLOTS || arg->type == ARG_STATE || arg->type == ARG_NORMS) {
            continue;
        }
        for (size_t k = 0; k < arg->n; k++) {
            int poisoned = arg->type == ARG_CODES ? ((const uint8_t*)arg->host)[k] == 0xFF
                                                  : ((const uint32_t*)arg->host)[k] >= 0xFFFF0000u;
            expect(!poisoned, "%s: %s[%zu] was not written", what, arg->name, k);
        }
    }
}

#endif
