// Ranks of the GPU floor: one process per GPU. MPI starts them and carries the NCCL id and a few host numbers
// (ranks.h); whatever lies in device memory goes over NCCL, on a stream of its own that overtakes dev->stream where
// both have work. One rank is a communicator of one: sums and maxima over it are what is already there, the others are
// copies, and neither MPI nor NCCL is started for it.
//
//     dev->stream   gradients ready |----- next layer's backward ------| (wait) sum
//                    comm_begin:    \                                  / comm_end: exposed is only (wait)
//     comm->stream                    |start  all-to-all      end|
//
// A pair of events around every collective, and around every wait of dev->stream, is what the statistics are made of.
// For the watchdog the stream writes each collective's number to host memory when it begins and when it is done: its
// thread calls nothing of CUDA, which could block it behind a main thread that is stuck inside a launch.
#ifndef COMM_CUH
#define COMM_CUH

#include "ranks.h" // before nccl.h and mpi.h: it says which part of MPI is wanted

#include <cudaTypedefs.h>
#include <mpi.h>
#include <nccl.h>

#include "agree.h"
#include "gpu.cuh"

static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 0), "NCCL 2.24 or newer is wanted: ncclFloat8e4m3");
static_assert((int)COMM_OPS == (int)RANKS_CONNECT, "ranks.h and floor.h disagree about the list of collectives");

enum { COMM_RING = 512 };     // collectives, or waits, in flight or not yet counted
enum { COMM_NUMBERS = 4096 }; // more than are ever queued

// A piece of a stream with an event in front of it and one behind it.
typedef struct {
    cudaEvent_t start, end;
    CommOp op;
    uint64_t bytes; // on the wire
} CommSpan;

// [tail, head) are recorded and not yet counted.
typedef struct {
    CommSpan spans[COMM_RING];
    uint64_t tail, head;
} CommRing;

struct Comm {
    Ranks ranks;
    ncclComm_t nccl;         // NULL before comm_connect, and when alone
    pthread_mutex_t mutex;   // of `nccl`, which the watchdog looks at
    cudaStream_t stream;     // collectives run here
    cudaEvent_t ready, done; // of comm_begin: dev->stream so far; of comm_end: the collectives so far
    PFN_cuStreamWriteValue32_v11070 write_value;
    volatile uint32_t* progress; // (2) pinned: number of the collective that has begun last, and that is done
    uint8_t ops[COMM_NUMBERS];   // CommOp of a collective, by its number modulo COMM_NUMBERS
    CommRing collectives, waits;
    CommStats stats;
};

// ncclGetLastError knows more than the code does ("Duplicate GPU detected", the socket's error). When the reason is
// that another rank is gone, the watchdog knows more still.
#define nccl_check(comm, call)                                                                                         \
    do {                                                                                                               \
        ncclResult_t nccl_status_ = (call);                                                                            \
        if (nccl_status_ != ncclSuccess) { watchdog_explain((comm)->ranks.watchdog); }                                 \
        check(nccl_status_ == ncclSuccess, "NCCL, rank %d of %d: %s in %s. %s", (comm)->ranks.rank,                    \
              (comm)->ranks.num_ranks, ncclGetErrorString(nccl_status_), #call, ncclGetLastError((comm)->nccl));       \
    } while (0)

// The watchdog's look at the device.
static inline void comm_look(void* comm_, WatchLane* device, char* error, size_t error_bytes) {
    Comm* comm = (Comm*)comm_;
    pthread_mutex_lock(&comm->mutex);
    if (comm->nccl != NULL) {
        device->finished = comm->progress[1]; // read first: it is never ahead of the other
        device->begun = comm->progress[0];
        device->op = comm->ops[device->begun % COMM_NUMBERS];
        ncclResult_t status = ncclSuccess;
        if (ncclCommGetAsyncError(comm->nccl, &status) == ncclSuccess && status != ncclSuccess &&
            status != ncclInProgress) {
            snprintf(error, error_bytes, "NCCL: %s. %.200s", ncclGetErrorString(status), ncclGetLastError(comm->nccl));
        }
    } else {
        device->finished = device->begun;
    }
    pthread_mutex_unlock(&comm->mutex);
}

static inline void comm_abort(void* comm_) {
    Comm* comm = (Comm*)comm_;
    if (comm->nccl != NULL) { ncclCommAbort(comm->nccl); }
}

// A rank that ends with an error must not wait for its own collectives, as CUDA's exit handlers may: they wait for
// ranks that wait for this one. Registered behind CUDA's handlers, so it runs before them.
static Comm* comm_at_work; // between comm_connect and comm_free
static inline void comm_at_exit(int status, void* unused) {
    (void)unused;
    if (comm_at_work != NULL) {
        fflush(NULL);
        _exit(status);
    }
}

// Join the ranks that the launcher started; alone without one. Errors: MPI sees other processes than were started.
Comm* comm_create(int* argc, char*** argv) {
    Comm* comm = (Comm*)calloc_or_die(1, sizeof(Comm));
    pthread_mutex_init(&comm->mutex, NULL);
    comm->ranks = ranks_join(argc, argv, comm_look, comm_abort, comm);
    return comm;
}

// Connect the ranks' GPUs. Collective; the device must be the current one (device_create sets it).
void comm_connect(Comm* comm, Device* dev) {
    if (comm->ranks.num_ranks == 1) { return; }
    check(comm->nccl == NULL, "comm_connect: called twice");
    cuda_check(cudaSetDevice(dev->index));
    int least = 0, greatest = 0;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cuda_check(cudaStreamCreateWithPriority(&comm->stream, cudaStreamNonBlocking, greatest));
    cuda_check(cudaEventCreateWithFlags(&comm->ready, cudaEventDisableTiming));
    cuda_check(cudaEventCreateWithFlags(&comm->done, cudaEventDisableTiming));
    for (int i = 0; i < COMM_RING; i++) {
        cuda_check(cudaEventCreate(&comm->collectives.spans[i].start));
        cuda_check(cudaEventCreate(&comm->collectives.spans[i].end));
        cuda_check(cudaEventCreate(&comm->waits.spans[i].start));
        cuda_check(cudaEventCreate(&comm->waits.spans[i].end));
    }
    comm->progress = (volatile uint32_t*)pinned_malloc(dev, 2 * sizeof(uint32_t));
    comm->progress[0] = comm->progress[1] = 0;
    void* write_value = NULL; // of the driver, which the program is not linked with
    cudaDriverEntryPointQueryResult found;
    cuda_check(
        cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &write_value, 11070, cudaEnableDefault, &found));
    check(found == cudaDriverEntryPointSuccess && write_value != NULL, "the CUDA driver has no cuStreamWriteValue32");
    comm->write_value = (PFN_cuStreamWriteValue32_v11070)write_value;
    watchdog_enter(comm->ranks.watchdog, RANKS_CONNECT);
    ncclUniqueId id;
    ncclComm_t nccl = NULL;
    memset(&id, 0, sizeof(id));
    if (comm->ranks.rank == 0) { nccl_check(comm, ncclGetUniqueId(&id)); }
    mpi_check(&comm->ranks, MPI_Bcast(&id, (int)sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD));
    nccl_check(comm, ncclCommInitRank(&nccl, comm->ranks.num_ranks, id, comm->ranks.rank));
    watchdog_leave(comm->ranks.watchdog);
    pthread_mutex_lock(&comm->mutex);
    comm->nccl = nccl;
    pthread_mutex_unlock(&comm->mutex);
    comm_at_work = comm;
    on_exit(comm_at_exit, NULL);
}

// Collective: call it on every rank, with the device's work finished, before device_free.
void comm_free(Comm* comm) {
    if (comm->nccl != NULL) {
        cuda_check(cudaStreamSynchronize(comm->stream));
        ncclComm_t nccl = comm->nccl;
        watchdog_enter(comm->ranks.watchdog, RANKS_LEAVE);
        pthread_mutex_lock(&comm->mutex);
        comm->nccl = NULL; // the watchdog looks no more
        pthread_mutex_unlock(&comm->mutex);
        nccl_check(comm, ncclCommDestroy(nccl));
        watchdog_leave(comm->ranks.watchdog);
        for (int i = 0; i < COMM_RING; i++) {
            cuda_check(cudaEventDestroy(comm->collectives.spans[i].start));
            cuda_check(cudaEventDestroy(comm->collectives.spans[i].end));
            cuda_check(cudaEventDestroy(comm->waits.spans[i].start));
            cuda_check(cudaEventDestroy(comm->waits.spans[i].end));
        }
        pinned_release(NULL, (void*)comm->progress);
        cuda_check(cudaEventDestroy(comm->ready));
        cuda_check(cudaEventDestroy(comm->done));
        cuda_check(cudaStreamDestroy(comm->stream));
    }
    ranks_leave(&comm->ranks);
    comm_at_work = NULL;
    pthread_mutex_destroy(&comm->mutex);
    free(comm);
}

int comm_rank(const Comm* comm) {
    return comm->ranks.rank;
}
int comm_local_rank(const Comm* comm) {
    return comm->ranks.local_rank;
}
int comm_num_ranks(const Comm* comm) {
    return comm->ranks.num_ranks;
}

void comm_set_timeout(Comm* comm, double seconds) {
    if (comm->ranks.watchdog != NULL) { watchdog_set_timeout(comm->ranks.watchdog, seconds); }
}

void comm_set_busy(Comm* comm, int is_busy) {
    if (comm->ranks.watchdog != NULL) { watchdog_busy(comm->ranks.watchdog, is_busy); }
}

// ---------------------------------------------------------------------------------------------------------------------
// statistics

// Count what is finished, in order, and free its spans.
static inline void comm_count(Comm* comm) {
    CommRing* rings[] = {&comm->collectives, &comm->waits};
    for (int i = 0; i < 2; i++) {
        CommRing* ring = rings[i];
        uint64_t tail = ring->tail;
        for (; tail < ring->head; tail++) {
            const CommSpan* span = &ring->spans[tail % COMM_RING];
            cudaError_t status = cudaEventQuery(span->end);
            if (status == cudaErrorNotReady) { break; }
            cuda_check(status);
            float ms = 0.0f;
            cuda_check(cudaEventElapsedTime(&ms, span->start, span->end));
            if (i == 1) {
                comm->stats.exposed_s += 1e-3 * ms;
                continue;
            }
            CommOpStats* op = &comm->stats.ops[span->op];
            op->calls++;
            op->bytes += span->bytes;
            op->seconds += 1e-3 * ms;
            comm->stats.bytes += span->bytes;
            comm->stats.seconds += 1e-3 * ms;
        }
        ring->tail = tail;
    }
}

// A span begins on the stream. When the ring is full: wait until its oldest is finished.
static inline CommSpan* comm_span_begin(Comm* comm, CommRing* ring, cudaStream_t stream) {
    if (ring->head - ring->tail == COMM_RING) {
        cuda_check(cudaEventSynchronize(ring->spans[ring->tail % COMM_RING].end));
        comm_count(comm);
    }
    CommSpan* span = &ring->spans[ring->head % COMM_RING];
    cuda_check(cudaEventRecord(span->start, stream));
    return span;
}

static inline void comm_span_end(CommRing* ring, cudaStream_t stream) {
    cuda_check(cudaEventRecord(ring->spans[ring->head % COMM_RING].end, stream));
    ring->head++;
}

CommStats comm_take_stats(Comm* comm) {
    comm_count(comm);
    CommStats stats = comm->stats;
    memset(&comm->stats, 0, sizeof(comm->stats));
    return stats;
}

// ---------------------------------------------------------------------------------------------------------------------
// collectives

void comm_begin(Comm* comm, Device* dev) {
    if (comm->ranks.num_ranks == 1) { return; }
    check(comm->nccl != NULL, "rank %d of %d: a collective before comm_connect", comm->ranks.rank,
          comm->ranks.num_ranks);
    cuda_check(cudaEventRecord(comm->ready, dev->stream));
    cuda_check(cudaStreamWaitEvent(comm->stream, comm->ready, 0));
}

void comm_end(Comm* comm, Device* dev) {
    if (comm->ranks.num_ranks == 1) { return; }
    cost_sum_over_ranks(dev); // what the wait takes
    cuda_check(cudaEventRecord(comm->done, comm->stream));
    comm_span_begin(comm, &comm->waits, dev->stream);
    cuda_check(cudaStreamWaitEvent(dev->stream, comm->done, 0));
    comm_span_end(&comm->waits, dev->stream);
}

// comm->progress[i] = number, when the stream comes to it.
static inline void comm_progress(Comm* comm, int i, uint64_t number) {
    CUresult status = comm->write_value((CUstream)comm->stream, (CUdeviceptr)(uintptr_t)(comm->progress + i),
                                        (cuuint32_t)number, CU_STREAM_WRITE_VALUE_DEFAULT);
    check(status == CUDA_SUCCESS, "CUDA: error %d in cuStreamWriteValue32", (int)status);
}

// A collective begins, of so many bytes on the wire; returns its number. The call itself may block, when NCCL first
// connects two ranks: it is in the host's lane, too.
static inline uint64_t comm_op_begin(Comm* comm, CommOp op, uint64_t bytes) {
    check(comm->nccl != NULL, "rank %d of %d: a collective before comm_connect", comm->ranks.rank,
          comm->ranks.num_ranks);
    CommSpan* span = comm_span_begin(comm, &comm->collectives, comm->stream);
    span->op = op;
    span->bytes = bytes;
    uint64_t number = watchdog_enter(comm->ranks.watchdog, (int)op);
    comm->ops[number % COMM_NUMBERS] = (uint8_t)op;
    comm_progress(comm, 0, number);
    return number;
}

static inline void comm_op_end(Comm* comm, uint64_t number) {
    comm_progress(comm, 1, number);
    comm_span_end(&comm->collectives, comm->stream);
    watchdog_leave(comm->ranks.watchdog);
}

static inline void comm_copy(Device* dev, void* recv, const void* send, size_t bytes) {
    if (recv != send) { cuda_check(cudaMemcpyAsync(recv, send, bytes, cudaMemcpyDeviceToDevice, dev->stream)); }
}

// Pairs of send and receive in one group, which NCCL runs at once: ncclAlltoAll is younger (2.28) and does the same.
void comm_all_to_all(Comm* comm, Device* dev, void* recv, const void* send, size_t bytes_per_rank) {
    int ranks = comm->ranks.num_ranks;
    if (bytes_per_rank == 0) { return; }
    if (ranks == 1) {
        comm_copy(dev, recv, send, bytes_per_rank);
        return;
    }
    check(recv != send, "comm_all_to_all: in place, want two buffers");
    uint64_t number = comm_op_begin(comm, COMM_ALL_TO_ALL, (uint64_t)(ranks - 1) * bytes_per_rank);
    nccl_check(comm, ncclGroupStart());
    for (int r = 0; r < ranks; r++) {
        const char* out = (const char*)send + (size_t)r * bytes_per_rank;
        char* in = (char*)recv + (size_t)r * bytes_per_rank;
        nccl_check(comm, ncclSend(out, bytes_per_rank, ncclUint8, r, comm->nccl, comm->stream));
        nccl_check(comm, ncclRecv(in, bytes_per_rank, ncclUint8, r, comm->nccl, comm->stream));
    }
    nccl_check(comm, ncclGroupEnd());
    comm_op_end(comm, number);
}

void comm_all_gathers(Comm* comm, Device* dev, const CommGather* gathers, int n) {
    int ranks = comm->ranks.num_ranks;
    uint64_t bytes = 0;
    for (int i = 0; i < n; i++) {
        const CommGather* g = &gathers[i];
        if (ranks == 1) { comm_copy(dev, g->recv, g->send, g->bytes_per_rank); }
        bytes += g->bytes_per_rank;
    }
    if (ranks == 1 || bytes == 0) { return; }
    uint64_t number = comm_op_begin(comm, COMM_ALL_GATHER, (uint64_t)(ranks - 1) * bytes);
    nccl_check(comm, ncclGroupStart());
    for (int i = 0; i < n; i++) {
        const CommGather* g = &gathers[i];
        if (g->bytes_per_rank == 0) { continue; }
        nccl_check(comm, ncclAllGather(g->send, g->recv, g->bytes_per_rank, ncclUint8, comm->nccl, comm->stream));
    }
    nccl_check(comm, ncclGroupEnd());
    comm_op_end(comm, number);
}

void comm_all_gather(Comm* comm, Device* dev, void* recv, const void* send, size_t bytes_per_rank) {
    CommGather gather = {recv, send, bytes_per_rank};
    comm_all_gathers(comm, dev, &gather, 1);
}

static inline void comm_reduce_scatter(Comm* comm, Device* dev, void* recv, const void* send, size_t n_per_rank,
                                       CommOp op, ncclDataType_t type, size_t width) {
    int ranks = comm->ranks.num_ranks;
    if (n_per_rank == 0) { return; }
    if (ranks == 1) {
        comm_copy(dev, recv, send, n_per_rank * width);
        return;
    }
    uint64_t number = comm_op_begin(comm, op, (uint64_t)(ranks - 1) * n_per_rank * width);
    nccl_check(comm, ncclReduceScatter(send, recv, n_per_rank, type, ncclSum, comm->nccl, comm->stream));
    comm_op_end(comm, number);
}

void comm_reduce_scatter_bf16(Comm* comm, Device* dev, bf16* recv, const bf16* send, size_t n_per_rank) {
    comm_reduce_scatter(comm, dev, recv, send, n_per_rank, COMM_REDUCE_SCATTER_BF16, ncclBfloat16, sizeof(bf16));
}

void comm_reduce_scatter_fp32(Comm* comm, Device* dev, float* recv, const float* send, size_t n_per_rank) {
    comm_reduce_scatter(comm, dev, recv, send, n_per_rank, COMM_REDUCE_SCATTER_FP32, ncclFloat32, sizeof(float));
}

void comm_all_reduce_e4m3(Comm* comm, Device* dev, e4m3* data, size_t n) {
    uint64_t ranks = (uint64_t)comm->ranks.num_ranks;
    (void)dev;
    if (ranks == 1 || n == 0) { return; }
    int version = 0;
    nccl_check(comm, ncclGetVersion(&version));
    check(version >= NCCL_VERSION(2, 24, 0), "sums of FP8 want NCCL 2.24 or newer, found %d.%d.%d", version / 10000,
          version / 100 % 100, version % 100);
    uint64_t number = comm_op_begin(comm, COMM_ALL_REDUCE_E4M3, 2 * (ranks - 1) * n / ranks);
    nccl_check(comm, ncclAllReduce(data, data, n, ncclFloat8e4m3, ncclSum, comm->nccl, comm->stream));
    comm_op_end(comm, number);
}

static inline void comm_all_reduce(Comm* comm, Device* dev, float* data, size_t n, CommOp op, ncclRedOp_t reduction) {
    uint64_t ranks = (uint64_t)comm->ranks.num_ranks;
    if (ranks == 1 || n == 0) { return; }
    comm_begin(comm, dev);
    uint64_t number = comm_op_begin(comm, op, 2 * (ranks - 1) * n * sizeof(float) / ranks);
    nccl_check(comm, ncclAllReduce(data, data, n, ncclFloat32, reduction, comm->nccl, comm->stream));
    comm_op_end(comm, number);
    comm_end(comm, dev);
}

// data (n) FP32 in device memory = sum over ranks, in place, the same bits on every rank. Asynchronous on the stream.
// NOTE: NCCL picks the order of the sum by size and topology: the same on every run of one set-up, not across set-ups.
void comm_sum(Comm* comm, Device* dev, float* data, size_t n) {
    comm_all_reduce(comm, dev, data, n, COMM_SUM, ncclSum);
}

// data (n) FP32 in device memory = maximum over ranks, in place. NCCL drops NaN: scale_slots_gather makes it Inf.
void comm_max(Comm* comm, Device* dev, float* data, size_t n) {
    comm_all_reduce(comm, dev, data, n, COMM_MAX, ncclMax);
}

void comm_host_min_max(Comm* comm, int64_t value, int64_t* min, int64_t* max) {
    ranks_min_max(&comm->ranks, value, min, max);
}

void comm_host_all_gather(Comm* comm, void* all, const void* own, size_t bytes) {
    ranks_all_gather(&comm->ranks, all, own, bytes);
}

// A driver that is another one on another host is nothing unusual, and works.
void comm_versions(FILE* out) {
    char mpi[256];
    int nccl = 0, runtime = 0, driver = 0;
    ranks_mpi_version(mpi, sizeof(mpi));
    ncclGetVersion(&nccl);
    cudaRuntimeGetVersion(&runtime);
    cudaDriverGetVersion(&driver); // 0: there is none, which device_create says better
    agree_fact(out, "MPI", "%s", mpi);
    agree_fact(out, "NCCL", "%d.%d.%d", nccl / 10000, nccl / 100 % 100, nccl % 100);
    agree_fact(out, "CUDA", "%d.%d", runtime / 1000, runtime / 10 % 100);
    agree_fact(out, "cuBLASLt", "%zu", cublasLtGetVersion());
    agree_fact(out, "?driver for CUDA", "%d.%d", driver / 1000, driver / 10 % 100);
}

// Says nothing about work queued on the devices.
void comm_barrier(Comm* comm) {
    ranks_barrier(&comm->ranks);
}

#endif
