// Checkpoints of a run that trains: every rank writes its part of weights and moments and its FP8 slots, beside
// training; when all have, rank 0 adds where the run stands and gives the folder its name (snapshot.h).
//
//     save_open       once the model has its memory
//     save_begin      after a step: what is on the device is copied, the rest goes on beside training
//     save_poll       after every step, on all ranks together: what has become of it
//     save_free       waits for the writer
//
// The sections of shard_%05d.bin, the container of one rank:
//
//     share            (num_ranges) pairs of u64, first and count: which parameters, by their number in the flat order
//     slots            (num_slots) ScaleSlot
//     master, m, v     FP32, of these parameters in the order of share, without padding
//     model            SnapshotModelSlice: the same parameters in model.bin
//
// common.bin: run_state.h. Nothing here ends the run: a checkpoint that cannot be written is given up with a warning.
#if (defined(CPU_FLOOR) && !defined(SAVE_H_CPU)) || (!defined(CPU_FLOOR) && !defined(SAVE_H_GPU))
#ifdef CPU_FLOOR
#define SAVE_H_CPU
#else
#define SAVE_H_GPU
#endif

#include "floor.h"
#include "logger.h"
#include "memory.h"
#include "run_state.h"
#include "snapshot_writer.h"

#ifndef SAVE_BUFFER
#define SAVE_BUFFER ((size_t)64 << 20) // bytes of a pinned buffer, at most
#endif

// A checkpoint on its way to disk.
typedef enum { SAVE_NONE, SAVE_WRITING, SAVE_COMMITTING } SavePhase;

typedef struct {
    // save_open
    Device* dev;
    Comm* comm;
    Logger* logger;
    const TrainConfig* train;
    StateRanges ranges; // what this rank saves of weights and moments
    // save_prepare
    SnapshotWriter* writer; // NULL: not yet
    void** buffers;         // (num_buffers) pinned
    int num_buffers;
    size_t buffer_bytes;
    // checkpoints so far
    int newest;     // step of the newest complete one of this run, -1: none yet
    int retry_at;   // step at which a failed one is tried again, -1: none
    double write_s; // what the last one took
    // the one under way
    SavePhase phase;
    int is_done; // this rank's part of the phase is
    SnapshotResult result;
    uint64_t bytes;          // of this rank's files
    double began_s, delay_s; // when it began; how long training waited for it
    RunState state;
    char* config;
} Save;

// The largest of the ranks' values.
static inline int64_t max_over_ranks(Comm* comm, int64_t value) {
    int64_t low, high;
    comm_host_min_max(comm, value, &low, &high);
    return high;
}

// Nothing saved yet. The pointers must outlive it; `ranges`, what this rank saves, is freed by save_free.
static inline void save_open(Save* c, Device* dev, Comm* comm, Logger* logger, const TrainConfig* train,
                             StateRanges ranges) {
    memset(c, 0, sizeof(*c));
    c->dev = dev;
    c->comm = comm;
    c->logger = logger;
    c->train = train;
    c->ranges = ranges;
    c->newest = c->retry_at = -1;
}

// Pinned memory for a whole checkpoint, so that training waits only for the copy to the host; if that is too much, for
// a part of it, and training waits for the disk, too.
static inline void save_prepare(Save* c) {
    if (c->writer != NULL) { return; }
    size_t limit = (size_t)((double)c->train->checkpoint_memory * (1 << 30));
    if (limit == 0) { limit = host_memory_available() / 2 / (size_t)comm_num_ranks(c->comm); }
    size_t array_bytes = state_ranges_span(&c->ranges) * sizeof(float);
    array_bytes = array_bytes > 0 ? array_bytes : sizeof(float);
    c->buffer_bytes = array_bytes < SAVE_BUFFER ? array_bytes : SAVE_BUFFER;
    size_t wanted = 3 * ((array_bytes + c->buffer_bytes - 1) / c->buffer_bytes);
    size_t allowed = limit / c->buffer_bytes < 2 ? 2 : limit / c->buffer_bytes;
    c->num_buffers = (int)(wanted < allowed ? wanted : allowed);
    c->buffers = (void**)malloc_or_die((size_t)c->num_buffers * sizeof(void*));
    double start = seconds_now();
    comm_set_busy(c->comm, 1); // a second for every few GB
    for (int i = 0; i < c->num_buffers; i++) {
        c->buffers[i] = pinned_malloc(c->dev, c->buffer_bytes);
    }
    comm_set_busy(c->comm, 0);
    c->writer = snapshot_writer_create(c->buffers, c->num_buffers, c->buffer_bytes, NULL, NULL);
    if (comm_rank(c->comm) == 0) {
        printf("checkpoints: %.3f GB of pinned host memory per rank, taken in %.1f s%s\n",
               1e-9 * (double)c->buffer_bytes * c->num_buffers, seconds_now() - start,
               wanted > allowed ? "; not enough for a whole one: training will wait for the disk" : "");
    }
}

static inline void save_free(Save* c) {
    state_ranges_free(&c->ranges);
    if (c->writer == NULL) { return; }
    snapshot_writer_free(c->writer);
    for (int i = 0; i < c->num_buffers; i++) {
        pinned_release(c->dev, c->buffers[i]);
    }
    free(c->buffers);
    free(c->config);
}

// Hand the ranges of an array to the writer, a buffer at a time as they are free. One copy fills a buffer, with the
// padding between ranges, which the writer leaves out: a copy of every range would cost a wait for every range.
static inline void save_array(Save* c, const char* name, const float* array, int is_master) {
    size_t most = c->buffer_bytes / sizeof(float);
    size_t at = c->ranges.num > 0 ? c->ranges.range[0].at : 0, end = at + state_ranges_span(&c->ranges);
    snapshot_writer_begin(c->writer, name);
    for (; at < end; at += most) {
        size_t n = end - at < most ? end - at : most;
        int buffer = snapshot_writer_take(c->writer);
        device_copy_out(c->dev, c->buffers[buffer], array + at, n * sizeof(float));
        snapshot_writer_append_array(c->writer, buffer, at, n, is_master);
    }
    snapshot_writer_end(c->writer);
}

// A checkpoint could not be written: it is gone, everything else is as it was.
static inline void save_give_up(Save* c, int error) {
    const TrainConfig* train = c->train;
    int step = (int)c->state.step, every = train->checkpoint_every;
    c->phase = SAVE_NONE;
    c->retry_at = every > 0 ? step + (every + 9) / 10 : -1;
    if (c->result.error != 0) {
        const char* path = c->result.path[0] != 0 ? c->result.path : train->output_dir; // save_commit names no file
        warning("rank %d: cannot write '%s': %s", train->rank, path, strerror(c->result.error));
    }
    if (comm_rank(c->comm) != 0) { return; }
    snapshot_abandon(train->output_dir, step);
    char before[64] = "there is none before it", next[64] = "";
    if (c->newest >= 0) { snprintf(before, sizeof(before), "that of step %d stays", c->newest); }
    if (every > 0) { snprintf(next, sizeof(next), ", the next try is at step %d", c->retry_at); }
    warning("THE CHECKPOINT OF STEP %d WAS NOT WRITTEN (%s); %s; training goes on%s", step, strerror(error), before,
            next);
}

// Rank 0, in the writer's thread: where the run stands, the folder's name, what is no longer to be kept. 0 or errno.
static inline int save_commit(void* save) {
    const Save* c = (const Save*)save;
    const char* run = c->train->output_dir;
    int step = (int)c->state.step;
    char path[SNAPSHOT_PATH], file[32];
    for (int rank = 0; rank < (int)c->state.num_ranks; rank++) {
        struct stat st;
        snprintf(file, sizeof(file), "shard_%05d.bin", rank);
        snapshot_tmp_path(path, sizeof(path), run, step, file);
        if (stat(path, &st) != 0) {
            int error = errno;
            warning("rank %d has written its share, but there is no '%s': want one folder that all ranks share", rank,
                    path);
            return error;
        }
    }
    SnapshotOut out;
    snapshot_tmp_path(path, sizeof(path), run, step, "common.bin");
    int error = snapshot_out_open(&out, path, 0);
    if (error == 0) {
        snapshot_out_begin(&out, "run");
        snapshot_out_append(&out, &c->state, sizeof(c->state));
        snapshot_out_end(&out);
        snapshot_out_begin(&out, "config");
        snapshot_out_append(&out, c->config, strlen(c->config));
        snapshot_out_end(&out);
        error = snapshot_out_close(&out);
    }
    if (error == 0) { snapshot_set_aside(run, c->newest, step); } // what does not move stays: the new one is worth more
    error = error != 0 ? error : snapshot_commit(run, step);
    if (error == 0) { snapshot_prune(run, c->train->keep, c->train->keep_every); }
    return error;
}

// All ranks have done their part, and the folder has its name.
static inline void save_complete(Save* c) {
    c->phase = SAVE_NONE;
    c->newest = (int)c->state.step;
    c->retry_at = -1;
    c->write_s = seconds_now() - c->began_s;
    double gb = 1e-9 * (double)c->bytes * comm_num_ranks(c->comm);
    logger_log_checkpoint(c->logger, c->newest, (uint64_t)(1e9 * gb), c->write_s, c->delay_s);
    if (comm_rank(c->comm) == 0) {
        printf("checkpoint step_%08d: %.3f GB in %.2f s (%.2f GB/s), training waited %.3f s\n", c->newest, gb,
               c->write_s, gb / c->write_s, c->delay_s);
        fflush(stdout);
    }
}

// Look after the checkpoint under way, once a step and on all ranks together; `wait`: until it is complete or given up.
static inline void save_poll(Save* c, int wait) {
    while (c->phase != SAVE_NONE) {
        if (!c->is_done && wait) {
            comm_set_busy(c->comm, 1); // a disk may be slow
            snapshot_writer_wait(c->writer, &c->result);
            comm_set_busy(c->comm, 0);
            c->is_done = 1;
        }
        c->is_done = c->is_done || snapshot_writer_poll(c->writer, &c->result);
        if (max_over_ranks(c->comm, !c->is_done)) { return; }
        int error = (int)max_over_ranks(c->comm, c->result.error);
        if (error != 0) {
            save_give_up(c, error);
        } else if (c->phase == SAVE_WRITING) {
            c->phase = SAVE_COMMITTING;
            c->is_done = comm_rank(c->comm) != 0;
            c->bytes = c->result.bytes;
            if (!c->is_done) { snapshot_writer_call(c->writer, save_commit, c); }
        } else {
            save_complete(c);
        }
        if (!wait) { return; }
    }
}

// Is a checkpoint due after so many steps? is_last: the run ends with them.
static inline int save_is_due(const Save* c, int steps_done, int is_last) {
    int every = c->train->checkpoint_every;
    return (every > 0 && (steps_done % every == 0 || is_last)) || steps_done == c->retry_at;
}

// This rank's files of the checkpoint of c->state, begun in its folder: everything is copied to the host.
static inline void save_files(Save* c, const StateArrays* arrays, const ScaleSlot* slots) {
    const RunState* state = &c->state;
    const char* run = c->train->output_dir;
    int step = (int)state->step, rank = comm_rank(c->comm), num_ranges = c->ranges.num;
    size_t slot_bytes = (size_t)state->num_slots * sizeof(ScaleSlot);
    size_t share_bytes = 2 * (size_t)num_ranges * sizeof(uint64_t);
    char path[SNAPSHOT_PATH], file[32];
    snprintf(file, sizeof(file), "shard_%05d.bin", rank);
    snapshot_tmp_path(path, sizeof(path), run, step, file);
    snapshot_writer_open(c->writer, path, 3 * c->ranges.count * sizeof(float) + slot_bytes + share_bytes +
                         8 * SNAPSHOT_ALIGN);
    snapshot_writer_ranges(c->writer, &c->ranges);
    GptConfig gpt = run_state_shape(state);
    ModelFileHeader header = checkpoint_header(&gpt, MODEL_FILE_BF16);
    snapshot_tmp_path(path, sizeof(path), run, step, "model.bin");
    snapshot_writer_model(c->writer, path, rank == 0 ? &header : NULL,
                          MODEL_FILE_HEADER_BYTES + 2 * (uint64_t)state->num_parameters);
    uint64_t* share = (uint64_t*)malloc_or_die(share_bytes);
    for (int i = 0; i < num_ranges; i++) {
        share[2 * i] = c->ranges.range[i].first;
        share[2 * i + 1] = c->ranges.range[i].count;
    }
    snapshot_writer_begin(c->writer, "share");
    snapshot_writer_append_copy(c->writer, share, share_bytes);
    snapshot_writer_end(c->writer);
    free(share);
    ScaleSlot* on_host = (ScaleSlot*)malloc_or_die(slot_bytes);
    device_copy_out(c->dev, on_host, slots, slot_bytes);
    snapshot_writer_begin(c->writer, "slots");
    snapshot_writer_append_copy(c->writer, on_host, slot_bytes);
    snapshot_writer_end(c->writer);
    free(on_host);
    save_array(c, "master", arrays->master, 1);
    save_array(c, "m", arrays->m, 0);
    save_array(c, "v", arrays->v, 0);
    snapshot_writer_close(c->writer);
}

// Begin the checkpoint of `state`, on all ranks together: everything is copied to the host before this returns. One
// that is still being written is waited for. slots (state->num_slots) in device memory.
static inline void save_begin(Save* c, const StateArrays* arrays, const ScaleSlot* slots, const RunState* state) {
    double start = seconds_now();
    int step = (int)state->step;
    save_poll(c, 1);
    save_prepare(c);
    c->state = *state;
    free(c->config);
    c->config = config_to_text(c->train);
    c->began_s = seconds_now();
    memset(&c->result, 0, sizeof(c->result));
    snapshot_tmp_path(c->result.path, sizeof(c->result.path), c->train->output_dir, step, NULL);
    if (comm_rank(c->comm) == 0) { c->result.error = snapshot_begin(c->train->output_dir, step); }
    int error = (int)max_over_ranks(c->comm, c->result.error);
    if (error != 0) {
        save_give_up(c, error);
        return;
    }
    comm_set_busy(c->comm, 1);
    save_files(c, arrays, slots);
    comm_set_busy(c->comm, 0);
    c->phase = SAVE_WRITING;
    c->is_done = 0;
    c->delay_s = seconds_now() - start;
}

#endif
