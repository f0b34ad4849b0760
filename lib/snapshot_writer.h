// Writes checkpoints while training goes on: one thread per process that takes filled buffers, hashes them and writes
// them to the rank's container file (snapshot.h), and the FP32 parameters among them, rounded to BF16, to model.bin.
//
//     caller     open, ranges, model, { begin, { take, copy to the host, append }, end }, close  ... poll, once a step
//     thread                               wait for the copy, hash, write, free the buffer  ... fsync, result
//
// Everything the caller asks for goes through one queue in order. Only snapshot_writer_take can block: when all buffers
// are still being written. After a failure the thread goes on to free buffers, and does no more than that: a full disk
// costs this checkpoint, not the run. One thread hashes and writes: XXH3 runs at memory speed, and what it reads by the
// megabyte is in the cache when it is written.
#ifndef SNAPSHOT_WRITER_H
#define SNAPSHOT_WRITER_H

#include "check.h"

#include <pthread.h>
#include <signal.h>

#include "checkpoint.h"
#include "clock.h"
#include "snapshot.h"
#include "state_ranges.h"

// What became of a checkpoint's files of this process.
typedef struct {
    int error;                // errno of the first failure, 0: all is on disk. After a failure the files are removed
    char path[SNAPSHOT_PATH]; // the file that failed; the container when none did
    uint64_t bytes;           // written, container and model file
    double write_s;           // from the open to the last fsync
    double blocked_s;         // of that, how long snapshot_writer_take made the caller wait
} SnapshotResult;

// The section "model" of a container: what this rank has written of model.bin. Parameter i is at byte 1024 + 2 i.
typedef struct {
    uint64_t first, count; // the first parameter of the rank's first range, the number of those of all its ranges
    uint64_t hash;         // XXH3 of their bytes, in the order of the ranges
    uint64_t header_hash;  // XXH3 of the first 1024 bytes; 0: another rank has written them
} SnapshotModelSlice;

typedef enum {
    SNAPSHOT_JOB_OPEN,
    SNAPSHOT_JOB_MODEL,
    SNAPSHOT_JOB_BEGIN,
    SNAPSHOT_JOB_APPEND,
    SNAPSHOT_JOB_APPEND_COPY,
    SNAPSHOT_JOB_END,
    SNAPSHOT_JOB_CANCEL,
    SNAPSHOT_JOB_CLOSE,
    SNAPSHOT_JOB_CALL,
} SnapshotJobKind;

// Of a SNAPSHOT_JOB_CALL, in the job's data.
typedef struct {
    int (*work)(void* argument); // 0 or errno
    void* argument;
} SnapshotCall;

typedef struct SnapshotJob {
    struct SnapshotJob* next;
    SnapshotJobKind kind;
    char* name;          // path or section, copied
    void* data;          // copied
    size_t bytes;        // of data or of the buffer's content
    uint64_t file_bytes; // expected
    int buffer;
    int64_t at;   // the buffer holds one of the rank's arrays from here on; -1: it holds bytes
    int to_model; // and that is the parameters
} SnapshotJob;

typedef struct {
    // fixed
    void** buffers; // (num_buffers) of buffer_bytes each, the caller's
    int num_buffers;
    size_t buffer_bytes;
    void (*wait)(void* context, int buffer);
    void* context;
    pthread_t thread;
    // the caller's
    char* is_held;    // (num_buffers) taken and not yet appended
    int num_held;     //
    int is_busy;      // opened, and the result not yet handed out
    int is_closed;    // snapshot_writer_close was called
    int has_model;    //
    uint64_t model_bytes; // size of the model file
    StateRanges ranges;   // of the rank's arrays that are written; the thread reads them
    size_t past_ranges;   // the parameter behind the last of them
    size_t done_at;       // elements of the array that this section has, or that lie between its ranges
    int has_array;        // this section has any
    double opened, blocked_s; // when, by seconds_now; for how long
    // shared, under the mutex
    pthread_mutex_t mutex;
    pthread_cond_t job_came, buffer_came, result_came;
    SnapshotJob *first_job, *last_job;
    int* free_buffers; // (num_buffers) ring of those that are free
    int first_free, num_free;
    int has_result, must_stop;
    SnapshotResult result;
    // the thread's
    SnapshotOut out;
    int error; // first failure of this checkpoint
    char error_path[SNAPSHOT_PATH];
    uint64_t bytes;
    char out_path[SNAPSHOT_PATH], model_path[SNAPSHOT_PATH];
    int model_fd; // -1: none
    SnapshotModelSlice slice;
    XXH3_state_t* slice_hash;
    uint16_t* rounded; // (SNAPSHOT_CHUNK / 4) BF16
} SnapshotWriter;

// ---------------------------------------------------------------------------------------------------------------------
// the thread

// Note a failure of `path`; the first one counts, and nothing more is written to either file.
static inline void snapshot_writer_fail(SnapshotWriter* w, int error, const char* path) {
    if (error != 0 && w->error == 0) {
        w->error = error;
        w->out.error = error;
        snprintf(w->error_path, sizeof(w->error_path), "%s", path);
    }
}

static inline void snapshot_writer_do_open(SnapshotWriter* w, const SnapshotJob* job) {
    w->error = 0;
    w->bytes = 0;
    snprintf(w->out_path, sizeof(w->out_path), "%s", job->name);
    snapshot_writer_fail(w, snapshot_out_open(&w->out, job->name, job->file_bytes), job->name);
}

// Ranks write one model file together: nobody cuts off what another one has written, and each gives it its whole size
// before it writes. NFS clients write whole pages, with zeros for what they do not know, where a page lies behind the end
// of the file as they know it: over what another host has put into the same page.
static inline void snapshot_writer_do_model(SnapshotWriter* w, const SnapshotJob* job) {
    snprintf(w->model_path, sizeof(w->model_path), "%s", job->name);
    memset(&w->slice, 0, sizeof(w->slice));
    XXH3_64bits_reset(w->slice_hash);
    if (w->error != 0) {
        return;
    }
    int error = 0;
    w->model_fd = open(job->name, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (w->model_fd < 0 || (ftruncate(w->model_fd, (off_t)job->file_bytes) != 0 && errno != EINVAL)) {
        error = errno; // EINVAL: no file that has a size
    } else if (job->data != NULL) {
        error = snapshot_reserve(w->model_fd, job->file_bytes);
        if (error == 0) {
            error = snapshot_pwrite(w->model_fd, job->data, job->bytes, 0);
        }
        w->slice.header_hash = XXH3_64bits(job->data, job->bytes);
        w->bytes += job->bytes;
    }
    snapshot_writer_fail(w, error, w->model_path);
}

// Hash and write a piece of the open section.
static inline void snapshot_writer_put(SnapshotWriter* w, const void* data, size_t bytes) {
    snapshot_out_append(&w->out, data, bytes);
    snapshot_writer_fail(w, w->out.error, w->out_path);
}

// Round the n <= SNAPSHOT_CHUNK / 4 FP32 parameters from number `first` on to BF16 and put them into the model file.
static inline void snapshot_writer_put_model(SnapshotWriter* w, const float* params, size_t first, size_t n) {
    uint16_t* rounded = w->rounded;
    for (size_t i = 0; i < n; i++) {
        rounded[i] = bf16_bits_from_float(params[i]); // no branch is left of it: vector code
    }
    XXH3_64bits_update(w->slice_hash, rounded, n * sizeof(uint16_t));
    uint64_t at = MODEL_FILE_HEADER_BYTES + first * sizeof(uint16_t);
    snapshot_writer_fail(w, snapshot_pwrite(w->model_fd, rounded, n * sizeof(uint16_t), at), w->model_path);
    if (w->slice.count == 0) {
        w->slice.first = first;
    }
    w->slice.count += n;
    w->bytes += n * sizeof(uint16_t);
}

// `values` of a range, to the section and, if they are the parameters themselves, to the model file.
static inline void snapshot_writer_put_range(SnapshotWriter* w, const float* values, StateRange range, int to_model) {
    for (size_t done = 0; w->error == 0 && done < range.count;) {
        size_t n = snapshot_chunk((range.count - done) * sizeof(float)) / sizeof(float);
        snapshot_writer_put(w, values + done, n * sizeof(float));
        if (to_model && w->model_fd >= 0 && w->error == 0) {
            snapshot_writer_put_model(w, values + done, range.first + done, n);
        }
        done += n;
    }
}

static inline void snapshot_writer_do_append(SnapshotWriter* w, const SnapshotJob* job) {
    // after a failure, too: the device may still be writing to it
    if (w->wait != NULL) { w->wait(w->context, job->buffer); }
    if (w->error != 0) {
        return;
    }
    if (job->at < 0) {
        snapshot_writer_put(w, w->buffers[job->buffer], job->bytes);
        return;
    }
    const float* values = (const float*)w->buffers[job->buffer];
    size_t at = (size_t)job->at, end = at + job->bytes / sizeof(float);
    for (int i = 0; i < w->ranges.num; i++) {
        StateRange part = state_range_at(w->ranges.range[i], at, end);
        if (part.count > 0) { snapshot_writer_put_range(w, values + (part.at - at), part, job->to_model); }
    }
}

// Finish both files, or remove them.
static inline void snapshot_writer_do_close(SnapshotWriter* w) {
    if (w->model_fd >= 0) {
        if (w->error == 0) {
            w->slice.hash = XXH3_64bits_digest(w->slice_hash);
            snapshot_out_begin(&w->out, "model");
            snapshot_writer_put(w, &w->slice, sizeof(w->slice));
            snapshot_out_end(&w->out);
        }
        if (w->error == 0 && fsync(w->model_fd) != 0) {
            snapshot_writer_fail(w, errno, w->model_path);
        }
        if (close(w->model_fd) != 0) {
            snapshot_writer_fail(w, errno, w->model_path);
        }
    }
    w->bytes += w->out.at;
    snapshot_writer_fail(w, snapshot_out_close(&w->out), w->out_path);
    if (w->model_fd >= 0 && w->error != 0) {
        unlink(w->model_path);
    }
    w->model_fd = -1;
}

static inline void snapshot_writer_do_call(SnapshotWriter* w, const SnapshotJob* job) {
    const SnapshotCall* call = (const SnapshotCall*)job->data;
    w->error = w->out.error = 0;
    w->out_path[0] = 0;
    w->bytes = 0;
    snapshot_writer_fail(w, call->work(call->argument), "");
}

static inline void snapshot_writer_do(SnapshotWriter* w, const SnapshotJob* job) {
    switch (job->kind) {
    case SNAPSHOT_JOB_OPEN: snapshot_writer_do_open(w, job); break;
    case SNAPSHOT_JOB_MODEL: snapshot_writer_do_model(w, job); break;
    case SNAPSHOT_JOB_BEGIN: snapshot_out_begin(&w->out, job->name); break;
    case SNAPSHOT_JOB_APPEND: snapshot_writer_do_append(w, job); break;
    case SNAPSHOT_JOB_APPEND_COPY: snapshot_writer_put(w, job->data, job->bytes); break;
    case SNAPSHOT_JOB_END: snapshot_out_end(&w->out); break;
    case SNAPSHOT_JOB_CANCEL: snapshot_writer_fail(w, ECANCELED, w->out_path); break;
    case SNAPSHOT_JOB_CLOSE: snapshot_writer_do_close(w); break;
    case SNAPSHOT_JOB_CALL: snapshot_writer_do_call(w, job); break;
    }
    snapshot_writer_fail(w, w->out.error, w->out_path);
}

static inline void* snapshot_writer_thread(void* writer) {
    SnapshotWriter* w = (SnapshotWriter*)writer;
    pthread_mutex_lock(&w->mutex);
    for (;;) {
        SnapshotJob* job = w->first_job;
        if (job == NULL) {
            if (w->must_stop) {
                break;
            }
            pthread_cond_wait(&w->job_came, &w->mutex);
            continue;
        }
        w->first_job = job->next;
        pthread_mutex_unlock(&w->mutex);
        snapshot_writer_do(w, job);
        pthread_mutex_lock(&w->mutex);
        if (job->kind == SNAPSHOT_JOB_APPEND) {
            w->free_buffers[(w->first_free + w->num_free++) % w->num_buffers] = job->buffer;
            pthread_cond_signal(&w->buffer_came);
        } else if (job->kind == SNAPSHOT_JOB_CLOSE || job->kind == SNAPSHOT_JOB_CALL) {
            w->result.error = w->error;
            memcpy(w->result.path, w->error != 0 ? w->error_path : w->out_path, sizeof(w->result.path));
            w->result.bytes = w->bytes;
            w->result.write_s = seconds_now() - w->opened;
            w->has_result = 1;
            pthread_cond_signal(&w->result_came);
        }
        free(job->name);
        free(job->data);
        free(job);
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// the caller's side: one thread only

// Start the writer's thread. buffers: num_buffers blocks of buffer_bytes (a multiple of 4) that the caller owns, pinned
// where a device copies into them. wait(context, i) returns when buffer i holds its data (a device event); it is called
// from the writer's thread only, which runs no signal handler. NULL: a buffer holds its data when it is handed over.
static inline SnapshotWriter* snapshot_writer_create(void** buffers, int num_buffers, size_t buffer_bytes,
                                                     void (*wait)(void* context, int buffer), void* context) {
    check(num_buffers > 0 && buffer_bytes > 0 && buffer_bytes % sizeof(float) == 0,
          "snapshot_writer_create: %d buffers of %zu bytes, want at least one and a multiple of 4 bytes", num_buffers,
          buffer_bytes);
    SnapshotWriter* w = (SnapshotWriter*)calloc_or_die(1, sizeof(SnapshotWriter));
    w->buffers = (void**)malloc_or_die((size_t)num_buffers * sizeof(void*));
    memcpy(w->buffers, buffers, (size_t)num_buffers * sizeof(void*));
    w->num_buffers = num_buffers;
    w->buffer_bytes = buffer_bytes;
    w->wait = wait;
    w->context = context;
    w->is_held = (char*)calloc_or_die((size_t)num_buffers, 1);
    w->free_buffers = (int*)malloc_or_die((size_t)num_buffers * sizeof(int));
    for (int i = 0; i < num_buffers; i++) {
        w->free_buffers[i] = i;
    }
    w->num_free = num_buffers;
    w->rounded = (uint16_t*)malloc_or_die(SNAPSHOT_CHUNK / sizeof(float) * sizeof(uint16_t));
    w->slice_hash = XXH3_createState();
    check(w->slice_hash != NULL, "out of host memory for the checkpoint writer");
    w->out.fd = w->model_fd = -1;
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->job_came, NULL);
    pthread_cond_init(&w->buffer_came, NULL);
    pthread_cond_init(&w->result_came, NULL);
    // The thread inherits this mask. What a fault raises stays: no handler could be meant for another thread.
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&w->thread, NULL, snapshot_writer_thread, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    check(error == 0, "cannot start the checkpoint writer's thread: %s", strerror(error));
    return w;
}

// A new job at the end of the queue: name and data (bytes) are copied.
static inline void snapshot_writer_push(SnapshotWriter* w, SnapshotJobKind kind, const char* name, const void* data,
                                        size_t bytes, uint64_t file_bytes, int buffer, int64_t at, int to_model) {
    check(w->is_busy && !w->is_closed, "the checkpoint writer was given work while no checkpoint is open");
    SnapshotJob* job = (SnapshotJob*)calloc_or_die(1, sizeof(SnapshotJob));
    job->kind = kind;
    if (name != NULL) {
        check(strlen(name) < SNAPSHOT_PATH, "name of %zu bytes for a checkpoint, want less than %d: '%.80s..'",
              strlen(name), SNAPSHOT_PATH, name);
        job->name = strdup(name);
        check(job->name != NULL, "out of host memory for the name '%s'", name);
    }
    if (data != NULL) {
        job->data = malloc_or_die(bytes);
        memcpy(job->data, data, bytes);
    }
    job->bytes = bytes;
    job->file_bytes = file_bytes;
    job->buffer = buffer;
    job->at = at;
    job->to_model = to_model;
    pthread_mutex_lock(&w->mutex);
    if (w->first_job == NULL) {
        w->first_job = job;
    } else {
        w->last_job->next = job;
    }
    w->last_job = job;
    pthread_cond_signal(&w->job_came);
    pthread_mutex_unlock(&w->mutex);
}

// Begin a checkpoint: its container file, of about expected_bytes (snapshot_out_open). The one before must have been
// collected with snapshot_writer_poll or snapshot_writer_wait.
static inline void snapshot_writer_open(SnapshotWriter* w, const char* path, uint64_t expected_bytes) {
    check(!w->is_busy, "a second checkpoint, '%s', was begun before the result of the first was asked for", path);
    w->is_busy = 1;
    w->is_closed = w->has_model = 0;
    w->blocked_s = 0.0;
    w->opened = seconds_now();
    state_ranges_free(&w->ranges);
    snapshot_writer_push(w, SNAPSHOT_JOB_OPEN, path, NULL, 0, expected_bytes, -1, -1, 0);
}

// Which ranges of the rank's arrays this checkpoint holds (copied). Once, before the first of them is appended.
static inline void snapshot_writer_ranges(SnapshotWriter* w, const StateRanges* ranges) {
    check(w->is_busy && !w->is_closed && w->ranges.num == 0,
          "ranges of a checkpoint's arrays were told to its writer, want them once, after it was opened");
    w->ranges = state_ranges_copy(ranges);
    w->past_ranges = 0;
    for (int i = 0; i < ranges->num; i++) {
        size_t past = ranges->range[i].first + ranges->range[i].count;
        w->past_ranges = past > w->past_ranges ? past : w->past_ranges;
    }
}

// Write an llm.c BF16 model file of file_bytes, too: `header` its 1024 bytes, or NULL when another rank writes them.
static inline void snapshot_writer_model(SnapshotWriter* w, const char* path, const void* header, uint64_t file_bytes) {
    w->has_model = 1;
    w->model_bytes = file_bytes;
    snapshot_writer_push(w, SNAPSHOT_JOB_MODEL, path, header, header != NULL ? MODEL_FILE_HEADER_BYTES : 0, file_bytes,
                         -1, -1, 0);
}

// Begin the section `name` (snapshot_out_begin).
static inline void snapshot_writer_begin(SnapshotWriter* w, const char* section) {
    w->done_at = 0;
    w->has_array = 0;
    snapshot_writer_push(w, SNAPSHOT_JOB_BEGIN, section, NULL, 0, 0, -1, -1, 0);
}

// The index of a free buffer, which is the caller's until it is appended. Waits when none is free.
static inline int snapshot_writer_take(SnapshotWriter* w) {
    check(w->num_held < w->num_buffers, "all %d buffers of the checkpoint writer are taken and none was handed back",
          w->num_buffers);
    pthread_mutex_lock(&w->mutex);
    if (w->num_free == 0) {
        double started = seconds_now();
        while (w->num_free == 0) {
            pthread_cond_wait(&w->buffer_came, &w->mutex);
        }
        w->blocked_s += seconds_now() - started;
    }
    int buffer = w->free_buffers[w->first_free];
    w->first_free = (w->first_free + 1) % w->num_buffers;
    w->num_free--;
    pthread_mutex_unlock(&w->mutex);
    w->is_held[buffer] = 1;
    w->num_held++;
    return buffer;
}

static inline void snapshot_writer_hand_over(SnapshotWriter* w, int buffer, size_t bytes, int64_t at, int to_model) {
    check(buffer >= 0 && buffer < w->num_buffers && w->is_held[buffer],
          "buffer %d was appended to a checkpoint, want one that snapshot_writer_take has given", buffer);
    check(bytes <= w->buffer_bytes, "%zu bytes were appended to a checkpoint, want at most the buffer's %zu", bytes,
          w->buffer_bytes);
    w->is_held[buffer] = 0;
    w->num_held--;
    snapshot_writer_push(w, SNAPSHOT_JOB_APPEND, NULL, NULL, bytes, 0, buffer, at, to_model);
}

// Hand over a buffer whose first `bytes` are (or, once `wait` returns, will be) the section's next.
static inline void snapshot_writer_append(SnapshotWriter* w, int buffer, size_t bytes) {
    snapshot_writer_hand_over(w, buffer, bytes, -1, 0);
}

// Hand over a buffer that holds (or will hold) elements [at, at + count) of one of the rank's FP32 arrays. Those in its
// ranges are the section's next, what lies between is left out; in ascending order, and all of them before the
// section's end. to_model: they are the parameters, which go to the model file as well, each to its place, rounded to
// nearest even. Without a model file that means nothing.
static inline void snapshot_writer_append_array(SnapshotWriter* w, int buffer, size_t at, size_t count, int to_model) {
    check(at >= w->done_at && state_ranges_count_at(&w->ranges, w->done_at, at) == 0,
          "elements of a checkpoint's array from %zu on, want them from %zu on", at, w->done_at);
    check(!to_model || !w->has_model || MODEL_FILE_HEADER_BYTES + 2 * (uint64_t)w->past_ranges <= w->model_bytes,
          "parameters up to %zu for a model file of %llu bytes", w->past_ranges, (unsigned long long)w->model_bytes);
    w->done_at = at + count;
    w->has_array = 1;
    snapshot_writer_hand_over(w, buffer, count * sizeof(float), (int64_t)at, to_model);
}

// Append a few bytes, which are copied.
static inline void snapshot_writer_append_copy(SnapshotWriter* w, const void* data, size_t bytes) {
    snapshot_writer_push(w, SNAPSHOT_JOB_APPEND_COPY, NULL, data, bytes, 0, -1, -1, 0);
}

static inline void snapshot_writer_end(SnapshotWriter* w) {
    size_t missing = w->has_array ? state_ranges_count_at(&w->ranges, w->done_at, SIZE_MAX) : 0;
    check(missing == 0, "a section of a checkpoint ends %zu elements before its array does", missing);
    snapshot_writer_push(w, SNAPSHOT_JOB_END, NULL, NULL, 0, 0, -1, -1, 0);
}

// The checkpoint is complete. With a model file the container gets one more section, "model" (SnapshotModelSlice).
static inline void snapshot_writer_close(SnapshotWriter* w) {
    snapshot_writer_push(w, SNAPSHOT_JOB_CLOSE, NULL, NULL, 0, 0, -1, -1, 0);
    w->is_closed = 1;
}

// Run work(argument) in the writer's thread; its result (0 or errno) comes like that of a checkpoint, which must have
// been collected before.
static inline void snapshot_writer_call(SnapshotWriter* w, int (*work)(void* argument), void* argument) {
    check(!w->is_busy, "the checkpoint writer was given a call before the result of a checkpoint was asked for");
    SnapshotCall call = {work, argument};
    w->is_busy = 1;
    w->is_closed = 0;
    w->blocked_s = 0.0;
    w->opened = seconds_now();
    snapshot_writer_push(w, SNAPSHOT_JOB_CALL, NULL, &call, sizeof(call), 0, -1, -1, 0);
    w->is_closed = 1;
}

// Has a checkpoint been begun whose result nobody has seen yet?
static inline int snapshot_writer_is_busy(const SnapshotWriter* w) { return w->is_busy; }

static inline int snapshot_writer_collect(SnapshotWriter* w, SnapshotResult* result, int must_wait) {
    if (!w->is_busy) {
        return 0;
    }
    pthread_mutex_lock(&w->mutex);
    while (must_wait && !w->has_result) {
        pthread_cond_wait(&w->result_came, &w->mutex);
    }
    int has_result = w->has_result;
    if (has_result) {
        *result = w->result;
        w->has_result = 0;
    }
    pthread_mutex_unlock(&w->mutex);
    if (has_result) {
        result->blocked_s = w->blocked_s;
        w->is_busy = 0;
    }
    return has_result;
}

// 1, once, with the result when a checkpoint is finished, well or not; 0 while it is being written or there is none.
static inline int snapshot_writer_poll(SnapshotWriter* w, SnapshotResult* result) {
    return snapshot_writer_collect(w, result, 0);
}

// Wait for the result of the checkpoint that was closed; all zeros when there is none.
static inline void snapshot_writer_wait(SnapshotWriter* w, SnapshotResult* result) {
    check(!w->is_busy || w->is_closed, "the result of a checkpoint was waited for that is not closed yet");
    memset(result, 0, sizeof(*result));
    snapshot_writer_collect(w, result, 1);
}

// Finish what was closed, remove the files of what was not, end the thread. The buffers are the caller's.
static inline void snapshot_writer_free(SnapshotWriter* w) {
    if (w == NULL) {
        return;
    }
    if (w->is_busy && !w->is_closed) {
        snapshot_writer_push(w, SNAPSHOT_JOB_CANCEL, NULL, NULL, 0, 0, -1, -1, 0);
        snapshot_writer_close(w);
    }
    pthread_mutex_lock(&w->mutex);
    w->must_stop = 1;
    pthread_cond_signal(&w->job_came);
    pthread_mutex_unlock(&w->mutex);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->job_came);
    pthread_cond_destroy(&w->buffer_came);
    pthread_cond_destroy(&w->result_came);
    pthread_mutex_destroy(&w->mutex);
    XXH3_freeState(w->slice_hash);
    state_ranges_free(&w->ranges);
    free(w->rounded);
    free(w->free_buffers);
    free(w->is_held);
    free(w->buffers);
    free(w);
}

#endif
