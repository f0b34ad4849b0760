// Reads the checkpoint that a run goes on from (resume.h) into the arrays on the device: those of any number of ranks,
// sharded or not, into what this rank keeps. Every rank reads the files of all ranks once, in the order of the ranks,
// checks them and takes its part. The files: save.h.
#if (defined(CPU_FLOOR) && !defined(LOAD_H_CPU)) || (!defined(CPU_FLOOR) && !defined(LOAD_H_GPU))
#ifdef CPU_FLOOR
#define LOAD_H_CPU
#else
#define LOAD_H_GPU
#endif

#include "floor.h"
#include "resume.h"
#include "snapshot_writer.h"

#ifndef LOAD_PIECE
#define LOAD_PIECE ((size_t)16 << 20) // bytes read at a time
#endif
#define LOAD_MAX_RANGES (1 << 20)     // in one file

// A checkpoint whose shares have been read: which parameters lie where.
typedef struct {
    const char* folder;
    size_t num_parameters;
    int num_files;
    StateRanges* file; // (num_files) `at` counts the elements of the file's sections master, m, v
    StateRanges to;    // what this rank keeps, by `first`
    Device* dev;
    float* piece; // (LOAD_PIECE bytes) host memory
} Load;

// A range of a file, for the comparison of all.
typedef struct {
    size_t first, count;
    int file;
} LoadRange;

static inline void load_path(char* path, const Load* load, int file) {
    snprintf(path, SNAPSHOT_PATH, "%s/shard_%05d.bin", load->folder, file);
}

// Read the section "share" of `file`. 0, or 1 with the reason in why (WHY_BYTES).
static inline int load_share(Load* load, int file, StateRanges* ranges, char* why) {
    char path[SNAPSHOT_PATH];
    load_path(path, load, file);
    SnapshotIn in;
    if (snapshot_in_open(&in, path, why) != 0) { return 1; }
    int64_t bytes = snapshot_in_bytes(&in, "share");
    int bad = bytes > 16 * (int64_t)LOAD_MAX_RANGES || bytes % 16 > 0;
    if (bad) { refuse(why, "'%s' has a share of %lld bytes, want pairs of 8", path, (long long)bytes); }
    uint64_t* share = bad || bytes < 0 ? NULL : (uint64_t*)malloc_or_die((size_t)bytes);
    bad = bad || snapshot_in_whole(&in, "share", share, bytes < 0 ? 0 : (uint64_t)bytes, why);
    snapshot_in_close(&in);
    memset(ranges, 0, sizeof(*ranges));
    for (int64_t i = 0; !bad && i < bytes / 16; i++) {
        uint64_t first = share[2 * i], count = share[2 * i + 1], n = load->num_parameters;
        if (first > n || count > n - first || ranges->count > n - count) {
            bad = refuse(why, "'%s' holds %llu parameters from %llu on, want them out of %llu, each once", path,
                         (unsigned long long)count, (unsigned long long)first, (unsigned long long)n);
        } else {
            state_ranges_add(ranges, (size_t)first, (size_t)count, ranges->count);
        }
    }
    free(share);
    if (bad) { state_ranges_free(ranges); }
    return bad;
}

// For qsort: LoadRange by their first parameter.
static inline int load_range_compare(const void* a, const void* b) {
    size_t x = ((const LoadRange*)a)->first, y = ((const LoadRange*)b)->first;
    return (x > y) - (x < y);
}

// Do all files together hold every parameter exactly once? 0, or 1 with the reason in why.
static inline int load_check_ranges(const Load* load, char* why) {
    size_t num = 0, next = 0, n = load->num_parameters;
    for (int f = 0; f < load->num_files; f++) {
        num += (size_t)load->file[f].num;
    }
    LoadRange* all = (LoadRange*)malloc_or_die((num + 1) * sizeof(LoadRange));
    num = 0;
    for (int f = 0; f < load->num_files; f++) {
        for (int i = 0; i < load->file[f].num; i++) {
            LoadRange range = {load->file[f].range[i].first, load->file[f].range[i].count, f};
            all[num++] = range;
        }
    }
    qsort(all, num, sizeof(LoadRange), load_range_compare);
    LoadRange end = {n, 0, -1};
    all[num] = end;
    int bad = 0;
    for (size_t i = 0; !bad && i <= num; i++) {
        if (all[i].first < next) {
            size_t past = all[i].first + all[i].count < next ? all[i].first + all[i].count : next;
            bad = refuse(why, "'%s/shard_%05d.bin' holds parameters %zu to %zu, which shard_%05d.bin has, too: want "
                         "every one once", load->folder, all[i].file, all[i].first, past - 1, all[i - 1].file);
        } else if (all[i].first > next) {
            bad = refuse(why, "'%s' has no parameters %zu to %zu of %zu in its %d shard%s", load->folder, next,
                         all[i].first - 1, n, load->num_files, load->num_files == 1 ? "" : "s");
        }
        next = all[i].first + all[i].count;
    }
    free(all);
    return bad;
}

// Copy n elements of a file's array, those from element `at` of its section on, to where this rank keeps them.
static inline void load_scatter(const Load* load, const StateRanges* from, float* array, const float* values,
                                size_t at, size_t n) {
    for (int i = 0; i < from->num; i++) {
        StateRange part = state_range_at(from->range[i], at, at + n);
        size_t low = 0, high = part.count > 0 ? (size_t)load->to.num : 0; // the first kept range that ends behind it
        while (low < high) {
            size_t middle = (low + high) / 2;
            const StateRange* r = &load->to.range[middle];
            if (r->first + r->count > part.first) { high = middle; } else { low = middle + 1; }
        }
        for (size_t k = low; part.count > 0 && k < (size_t)load->to.num; k++) {
            const StateRange* r = &load->to.range[k];
            if (r->first >= part.first + part.count) { break; }
            size_t first = r->first > part.first ? r->first : part.first;
            size_t end = r->first + r->count < part.first + part.count ? r->first + r->count : part.first + part.count;
            device_copy_in(load->dev, array + r->at + (first - r->first),
                           values + (part.at - at) + (first - part.first), (end - first) * sizeof(float));
        }
    }
}

// Read the section `name` of a file, FP32 of the parameters `from`. 0, or 1 with the reason in why.
static inline int load_array(Load* load, SnapshotIn* in, const char* name, const StateRanges* from, float* array,
                             char* why) {
    if (snapshot_in_begin(in, name, from->count * sizeof(float), why) != 0) { return 1; }
    size_t most = LOAD_PIECE / sizeof(float);
    for (size_t done = 0; done < from->count; done += most) {
        size_t n = from->count - done < most ? from->count - done : most;
        if (snapshot_in_read(in, load->piece, n * sizeof(float), why) != 0) { return 1; }
        load_scatter(load, from, array, load->piece, done, n);
        device_sync(load->dev);
    }
    return snapshot_in_end(in, why);
}

// What a file says of model.bin, and if `looks`, whether model.bin is so. 0, or 1 with the reason in why.
static inline int load_check_model(const Load* load, SnapshotIn* in, const StateRanges* from, int looks, char* why) {
    SnapshotModelSlice slice; // model.bin is for others, but a checkpoint that is taken is whole
    if (snapshot_in_whole(in, "model", &slice, sizeof(slice), why) != 0) { return 1; }
    if (slice.first != (from->num > 0 ? from->range[0].first : 0) || slice.count != from->count) {
        return refuse(why, "'%s' speaks of %llu parameters from %llu on in model.bin, want its own share", in->path,
                      (unsigned long long)slice.count, (unsigned long long)slice.first);
    }
    if (!looks) { return 0; }
    char path[SNAPSHOT_PATH];
    snprintf(path, sizeof(path), "%s/model.bin", load->folder);
    SnapshotPart* parts = (SnapshotPart*)malloc_or_die((size_t)from->num * sizeof(SnapshotPart));
    for (int i = 0; i < from->num; i++) {
        parts[i].offset = MODEL_FILE_HEADER_BYTES + 2 * (uint64_t)from->range[i].first;
        parts[i].bytes = 2 * (uint64_t)from->range[i].count;
    }
    int bad = snapshot_check_parts(path, parts, (size_t)from->num, slice.hash, why) ||
              (slice.header_hash != 0 &&
               snapshot_check_range(path, 0, MODEL_FILE_HEADER_BYTES, slice.header_hash, why));
    free(parts);
    return bad;
}

// One rank's file: what this rank keeps of its arrays and, if slots is not NULL, its slots (state->num_slots); looks:
// its part of model.bin is checked. 0, or 1 with the reason in why.
static inline int load_file(Load* load, const RunState* state, int file, const StateArrays* arrays, ScaleSlot* slots,
                            int looks, char* why) {
    char path[SNAPSHOT_PATH];
    load_path(path, load, file);
    const StateRanges* from = &load->file[file];
    SnapshotIn in;
    if (snapshot_in_open(&in, path, why) != 0) { return 1; }
    int bad = load_array(load, &in, "master", from, arrays->master, why) ||
              load_array(load, &in, "m", from, arrays->m, why) || load_array(load, &in, "v", from, arrays->v, why) ||
              load_check_model(load, &in, from, looks, why);
    if (!bad && slots != NULL) {
        bad = snapshot_in_whole(&in, "slots", slots, (uint64_t)state->num_slots * sizeof(ScaleSlot), why);
        for (int i = 0; !bad && i < state->num_slots; i++) {
            if (!scale_slot_is_sound(&slots[i], (int)state->amax_history)) {
                bad = refuse(why, "'%s': FP8 slot %d is impossible", path, i);
            }
        }
    }
    snapshot_in_close(&in);
    return bad;
}

// The shares of all files, which must fit together; nothing is copied yet. 0, or 1 with the reason in why.
static inline int load_open(Load* load, const RunState* state, char* why) {
    char path[SNAPSHOT_PATH];
    struct stat st;
    off_t want = (off_t)(MODEL_FILE_HEADER_BYTES + 2 * load->num_parameters);
    snprintf(path, sizeof(path), "%s/model.bin", load->folder);
    if (stat(path, &st) == 0 && st.st_size != want) {
        return refuse(why, "'%s' has %lld bytes, want %lld", path, (long long)st.st_size, (long long)want);
    }
    for (int f = 0; f < (int)state->num_ranks; f++) {
        StateRanges ranges;
        if (load_share(load, f, &ranges, why) != 0) { return 1; }
        load->file = (StateRanges*)realloc(load->file, (size_t)(f + 1) * sizeof(StateRanges));
        check(load->file != NULL, "out of host memory for the shares of %d ranks", f + 1);
        load->file[load->num_files++] = ranges;
    }
    return load_check_ranges(load, why);
}

// Read everything of our checkpoint `folder` that lies on the device: `ranges` of weights and moments into `arrays`,
// and the FP8 slots of the rank of the same number, or of rank 0, into slots (state->num_slots, host). 0, or 1 with the
// reason in why. Ranks check different parts, so one may fail where another does not: nothing here waits for others.
static inline int load_checkpoint(Device* dev, int rank, const RunState* state, const char* folder,
                                  const StateArrays* arrays, const StateRanges* ranges, ScaleSlot* slots, char* why) {
    Load load;
    memset(&load, 0, sizeof(load));
    load.folder = folder;
    load.num_parameters = (size_t)state->num_parameters;
    load.dev = dev;
    load.piece = (float*)malloc_or_die(LOAD_PIECE);
    load.to = state_ranges_copy(ranges);
    if (load.to.num > 0) { qsort(load.to.range, (size_t)load.to.num, sizeof(StateRange), state_range_compare); }
    int bad = load_open(&load, state, why), slots_of = rank < state->num_ranks ? rank : 0;
    for (int f = 0; !bad && f < load.num_files; f++) {
        bad = load_file(&load, state, f, arrays, f == slots_of ? slots : NULL, rank == 0, why);
    }
    for (int f = 0; f < load.num_files; f++) {
        state_ranges_free(&load.file[f]);
    }
    free(load.file);
    state_ranges_free(&load.to);
    free(load.piece);
    return bad;
}

// What a rank keeps of an array (num_parameters) that lies on the host in the flat order.
static inline void load_from_host(Device* dev, float* array, const StateRanges* ranges, const float* values) {
    for (int i = 0; i < ranges->num; i++) {
        StateRange r = ranges->range[i];
        device_copy_in(dev, array + r.at, values + r.first, r.count * sizeof(float));
    }
    device_sync(dev);
}

// All ranks have found the same to resume from: `found` is what resume_open has said.
static inline void check_same_checkpoint(Comm* comm, const Resume* resume, int found) {
    int64_t step = found ? resume->step : -1, low, high;
    comm_host_min_max(comm, step, &low, &high);
    check(low == high, "the ranks see different checkpoints: step %lld here, %lld to %lld elsewhere (-1: none); want "
          "one folder that all share", (long long)step, (long long)low, (long long)high);
}

// Weights and moments of the checkpoint that `resume` has opened, or of one before it when it turns out to be damaged,
// on all ranks from the same; `resume` is then at that one. Returns its FP8 slots (resume->state.num_slots, freed by
// the caller), NULL for one of llm.c's.
static inline ScaleSlot* load_resumed(Device* dev, Comm* comm, Resume* resume, const GptConfig* gpt,
                                      const StateArrays* arrays, const StateRanges* ranges) {
    int rank = comm_rank(comm);
    for (;;) {
        char why[WHY_BYTES] = "another rank could not read it";
        const char* path = resume->candidates[resume->at].path;
        check(gpt_equal(&resume->gpt, gpt), "'%s' holds another model than the newer checkpoints", path);
        int is_ours = resume->config != NULL, bad = 0;
        ScaleSlot* slots = NULL;
        comm_set_busy(comm, 1); // a disk may be slow
        if (is_ours) {
            slots = (ScaleSlot*)malloc_or_die((size_t)resume->state.num_slots * sizeof(ScaleSlot));
            bad = load_checkpoint(dev, rank, &resume->state, path, arrays, ranges, slots, why);
        } else {
            load_from_host(dev, arrays->master, ranges, resume->master);
            load_from_host(dev, arrays->m, ranges, resume->m);
            load_from_host(dev, arrays->v, ranges, resume->v);
        }
        comm_set_busy(comm, 0);
        int64_t low, is_bad, is_known;
        comm_host_min_max(comm, bad, &low, &is_bad);
        if (!is_bad) { return slots; }
        free(slots);
        comm_host_min_max(comm, rank == 0 && bad, &low, &is_known);
        if (bad && !is_known) { warning("rank %d: %s", rank, why); } // rank 0 did not see it
        resume_reject(resume, why);
        comm_set_busy(comm, 1);
        int found = resume_open(resume);
        comm_set_busy(comm, 0);
        check_same_checkpoint(comm, resume, found);
    }
}

// The FP8 slots of this run, as they were just initialised, take over what the saved ones know. slots (num_slots) in
// device memory, saved (state->num_slots) on the host.
static inline void load_slots(Device* dev, ScaleSlot* slots, int num_slots, ScaleRecipe recipe, const RunState* state,
                              const ScaleSlot* saved) {
    ScaleRecipe saved_recipe = {(int)state->amax_history, (AmaxAlgo)state->amax_algo, (int)state->margin,
                                (float)state->headroom};
    size_t bytes = (size_t)num_slots * sizeof(ScaleSlot);
    ScaleSlot* on_host = (ScaleSlot*)malloc_or_die(bytes);
    device_copy_out(dev, on_host, slots, bytes);
    for (int i = 0; i < num_slots && i < state->num_slots; i++) { // the FP8 head's stand behind all others
        scale_slot_continue(&on_host[i], &saved[i], saved_recipe, recipe);
    }
    device_copy_in(dev, slots, on_host, bytes);
    device_sync(dev);
    free(on_host);
}

#endif
