// What several ranks compare before they train (agree.h says how): every rank gets here by its own command line, on its
// own host, with its own files. In the order in which it can be asked without doing what would go wrong otherwise:
//
//     check_started_alike    first of all: program, libraries, command line
//     check_own_device       when the devices are open, before NCCL sees them
//     check_prepared_alike   when everything has been read, before anything is written: model, weights, checkpoint, data
//     check_step_alike       after every step: what the ranks have made of it
//
// Each is collective. What differs is one error line of rank 0, and exit status 1 on all ranks. A floor of ops is included
// before this file.
#if (defined(CPU_FLOOR) && !defined(START_CHECK_H_CPU)) || (!defined(CPU_FLOOR) && !defined(START_CHECK_H_GPU))
#ifdef CPU_FLOOR
#define START_CHECK_H_CPU
#else
#define START_CHECK_H_GPU
#endif

#include "check.h"

#include "agree.h"
#include "dataloader.h"
#include "floor.h"
#include "resume.h"

// What a rank has prepared. NULL: there is none.
typedef struct {
    const TrainConfig* train;
    const GptConfig* gpt;
    const float* weights; // of the model file
    const Resume* resume; // open
    const DataLoader *train_data, *val_data;
    int num_steps, num_val_batches;
} Prepared;

// One error line for all ranks, said by rank 0.
CHECK_NORETURN static inline void start_fail(Comm* comm, const char* error) {
    if (comm_rank(comm) == 0) {
        fflush(stdout);
        fprintf(stderr, "error: %s\n", error);
    }
    comm_barrier(comm); // a launcher ends the others when the first one ends: not before it is said
    exit(EXIT_FAILURE);
}

// Compare this rank's facts with those of the others.
static inline void start_compare(Comm* comm, const char* facts) {
    int num_ranks = comm_num_ranks(comm);
    int64_t low, high;
    comm_host_min_max(comm, (int64_t)(agree_hash(facts) >> 1), &low, &high);
    if (low == high) { return; }
    comm_host_min_max(comm, (int64_t)strlen(facts) + 1, &low, &high);
    size_t bytes = (size_t)high;
    char* own = (char*)calloc_or_die(bytes, 1);
    char* all = (char*)malloc_or_die(bytes * (size_t)num_ranks);
    const char** texts = (const char**)malloc_or_die((size_t)num_ranks * sizeof(char*));
    memcpy(own, facts, strlen(facts));
    comm_host_all_gather(comm, all, own, bytes);
    for (int r = 0; r < num_ranks; r++) {
        texts[r] = all + (size_t)r * bytes;
    }
    char *errors, *warnings;
    agree_differences(texts, num_ranks, &errors, &warnings);
    if (warnings != NULL && comm_rank(comm) == 0) { warning("the ranks differ: %s", warnings); }
    if (errors != NULL) {
        size_t size = strlen(errors) + 32;
        char* line = (char*)malloc_or_die(size);
        snprintf(line, size, "the ranks differ: %s", errors);
        start_fail(comm, line);
    }
    free(warnings);
    free(texts);
    free(all);
    free(own);
}

// `version`: of this program.
static inline void check_started_alike(Comm* comm, const TrainConfig* train, const char* version) {
    if (comm_num_ranks(comm) == 1) { return; }
    char* facts = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&facts, &size);
    check(f != NULL, "out of host memory for what ranks compare");
    agree_host(f);
    agree_fact(f, "program version", "%s", version);
    comm_versions(f);
    agree_settings(f, train);
    fclose_or_die(f, "what ranks compare");
    start_compare(comm, facts);
    free(facts);
}

// Two ranks on one GPU would take its memory and its time from each other, where NCCL allows it at all.
static inline void check_own_device(Comm* comm, const Device* dev) {
    enum { BYTES = 64 };
    int num_ranks = comm_num_ranks(comm), first, second;
    if (num_ranks == 1) { return; }
    char own[BYTES], line[512];
    memset(own, 0, sizeof(own));
    device_identity(dev, own, sizeof(own));
    char* all = (char*)malloc_or_die((size_t)num_ranks * BYTES);
    comm_host_all_gather(comm, all, own, BYTES);
    if (agree_shared(all, BYTES, num_ranks, &first, &second)) {
        snprintf(line, sizeof(line), "ranks %d and %d have one GPU, that with UUID %.*s: want one GPU per rank; fewer "
                 "ranks (mpirun -np), or CUDA_VISIBLE_DEVICES or the launcher shows GPUs in another way to each rank",
                 first, second, BYTES, all + first * BYTES);
        start_fail(comm, line);
    }
    free(all);
}

// The files of a loader, in their order.
static inline void start_data_fact(FILE* out, const char* name, const DataLoader* loader) {
    if (loader == NULL) {
        agree_fact(out, name, "none");
        return;
    }
    uint64_t hash = config_fnv1a(FNV_START, loader->windows, (size_t)loader->num_shards * sizeof(int));
    for (int i = 0; i < loader->num_shards; i++) {
        const char* slash = strrchr(loader->paths[i], '/');
        const char* file = slash != NULL ? slash + 1 : loader->paths[i];
        hash = config_fnv1a(hash, file, strlen(file) + 1);
    }
    agree_fact(out, name, "%lld tokens in %d file%s, names and sizes %08x", (long long)loader->num_tokens,
               loader->num_shards, loader->num_shards == 1 ? "" : "s", (unsigned)(hash ^ hash >> 32));
}

static inline void check_prepared_alike(Comm* comm, const Device* dev, const Prepared* p) {
    if (comm_num_ranks(comm) == 1) { return; }
    char* facts = NULL;
    size_t size = 0, weight_bytes = gpt_num_parameters(p->gpt) * sizeof(float);
    FILE* f = open_memstream(&facts, &size);
    check(f != NULL, "out of host memory for what ranks compare");
    agree_host(f);
    agree_fact(f, "?device", "%s", device_name(dev));
    agree_fact(f, "attention", "%s", device_attention_name(dev));
    agree_model(f, p->train, p->gpt);
    if (p->weights != NULL) {
        agree_fact(f, "weights of the model file (-e)", "%016llx",
                   (unsigned long long)XXH3_64bits(p->weights, weight_bytes));
    }
    if (p->resume == NULL) {
        agree_fact(f, "checkpoint", "none");
    } else if (p->resume->config != NULL) {
        agree_fact(f, "checkpoint", "step %d, %016llx", p->resume->step,
                   (unsigned long long)XXH3_64bits(&p->resume->state, sizeof(p->resume->state)));
    } else {
        agree_fact(f, "checkpoint", "step %d of llm.c, weights %016llx", p->resume->step,
                   (unsigned long long)XXH3_64bits(p->resume->master, weight_bytes));
    }
    start_data_fact(f, "training data (-i)", p->train_data);
    start_data_fact(f, "validation data (-j)", p->val_data);
    agree_fact(f, "steps", "%d", p->num_steps);
    agree_fact(f, "batches per validation", "%d", p->num_val_batches);
    fclose_or_die(f, "what ranks compare");
    start_compare(comm, facts);
    free(facts);
}

// All ranks must have come to the same loss and norm, which decide whether the step counts and how far it goes; to the
// bit, since all add up the same numbers in the same order. On the CPU and in debug builds (make DEBUG=1) the scales of
// the slots (num_slots, in device memory), too; those that warm up every rank measures for itself.
static inline void check_step_alike(Comm* comm, Device* dev, const StepState* state, const ScaleSlot* slots,
                                    int num_slots) {
    if (comm_num_ranks(comm) == 1) { return; }
    const float made[] = {state->loss, state->grad_norm};
    int64_t low, high;
    comm_host_min_max(comm, (int64_t)(config_fnv1a(FNV_START, made, sizeof(made)) >> 1), &low, &high);
    check(low == high, "rank %d has loss %.9g and gradient norm %.9g, another rank has others: its memory or the wires "
          "between them cannot be trusted; go on from the last checkpoint", comm_rank(comm), (double)made[0],
          (double)made[1]);
#if defined(CPU_FLOOR) || defined(DEBUG)
    size_t bytes = (size_t)num_slots * sizeof(ScaleSlot);
    ScaleSlot* on_host = (ScaleSlot*)malloc_or_die(bytes + 1);
    uint64_t hash = FNV_START;
    device_copy_out(dev, on_host, slots, bytes);
    for (int i = 0; i < num_slots; i++) {
        if (!scale_slot_is_warming(&on_host[i])) { hash = config_fnv1a(hash, &on_host[i].scale, sizeof(float)); }
    }
    free(on_host);
    comm_host_min_max(comm, (int64_t)(hash >> 1), &low, &high);
    check(low == high, "rank %d: its FP8 scales differ from another rank's", comm_rank(comm));
#else
    (void)dev, (void)slots, (void)num_slots;
#endif
}

#endif
