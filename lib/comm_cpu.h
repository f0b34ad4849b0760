// Ranks of the CPU floor, over MPI. Sums are done in rank order by one owner per element, so every rank gets the same
// bits on every run; MPI_Allreduce promises neither. A collective is blocking and is done when it returns; the watchdog
// (watchdog.h) ends this process when that never comes to pass.
#ifndef COMM_CPU_H
#define COMM_CPU_H

#include <assert.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>

#include "ranks.h" // before mpi.h: it says which part of MPI is wanted

#include <mpi.h>

#include "agree.h"
#include "check.h"
#include "device_cpu.h"

static_assert((int)COMM_OPS == (int)RANKS_CONNECT, "ranks.h and floor.h disagree about the list of collectives");

struct Comm {
    Ranks ranks;
    CommStats stats;
    CommOp op; // that is running
    uint64_t op_bytes;
    double op_start;
    float* received; // (COMM_PIECE + num_ranks) every rank's contribution to this rank's shard of a piece
    float* sum;      // (COMM_PIECE) of a piece
    uint16_t* sent;  // (COMM_PIECE) BF16 of a piece on its way out
    int* counts;     // (num_ranks) elements of each rank's shard
    int* offsets;    // (num_ranks) where the shards start in the piece
    int* slots;      // (num_ranks) where each rank's contribution lies in `received`
    int* wanted;     // (num_ranks) elements received from each rank: this rank's shard, from all
};

#ifndef COMM_PIECE
#define COMM_PIECE (1 << 22) // floats exchanged at a time: bounds `received` to 16 MiB and MPI's int counts
#endif
#ifndef COMM_MESSAGE
#define COMM_MESSAGE ((size_t)1 << 30) // bytes of one message: MPI counts in int
#endif

Comm* comm_create(int* argc, char*** argv) {
    cpu_spin_briefly(*argv); // the one call of the floor that is sure to be early enough
    Comm* comm = (Comm*)calloc_or_die(1, sizeof(Comm));
    comm->ranks = ranks_join(argc, argv, NULL, NULL, NULL);
    size_t ranks = (size_t)comm->ranks.num_ranks;
    if (ranks == 1) { return comm; }
    comm->received = (float*)malloc_or_die((COMM_PIECE + ranks) * sizeof(float));
    comm->sum = (float*)malloc_or_die(COMM_PIECE * sizeof(float));
    comm->sent = (uint16_t*)malloc_or_die(COMM_PIECE * sizeof(uint16_t));
    comm->counts = (int*)calloc_or_die(ranks * 4, sizeof(int));
    comm->offsets = comm->counts + ranks;
    comm->slots = comm->counts + ranks * 2;
    comm->wanted = comm->counts + ranks * 3;
    return comm;
}

void comm_connect(Comm* comm, Device* dev) {
    (void)comm;
    (void)dev;
}

void comm_free(Comm* comm) {
    ranks_leave(&comm->ranks);
    free(comm->received);
    free(comm->sum);
    free(comm->sent);
    free(comm->counts);
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

void comm_begin(Comm* comm, Device* dev) {
    (void)comm;
    (void)dev;
}

void comm_end(Comm* comm, Device* dev) {
    (void)comm;
    (void)dev;
}

// A collective begins, of so many bytes on the wire.
static inline void comm_op_begin(Comm* comm, Device* dev, CommOp op, uint64_t bytes) {
    cost_sum_over_ranks(dev);
    comm->op = op;
    comm->op_bytes = bytes;
    comm->op_start = watchdog_now();
    watchdog_enter(comm->ranks.watchdog, (int)op);
}

static inline void comm_op_end(Comm* comm) {
    watchdog_leave(comm->ranks.watchdog);
    double seconds = watchdog_now() - comm->op_start;
    CommOpStats* stats = &comm->stats.ops[comm->op];
    stats->calls++;
    stats->bytes += comm->op_bytes;
    stats->seconds += seconds;
    comm->stats.bytes += comm->op_bytes;
    comm->stats.seconds += seconds;
    comm->stats.exposed_s += seconds;
}

CommStats comm_take_stats(Comm* comm) {
    CommStats stats = comm->stats;
    memset(&comm->stats, 0, sizeof(comm->stats));
    return stats;
}

// Send `out` to rank `to` and receive `in` from rank `from`, `bytes` each.
static inline void comm_swap(Comm* comm, void* in, int from, const void* out, int to, size_t bytes) {
    for (size_t start = 0; start < bytes; start += COMM_MESSAGE) {
        int count = (int)(bytes - start < COMM_MESSAGE ? bytes - start : COMM_MESSAGE);
        mpi_check(&comm->ranks, MPI_Sendrecv((const char*)out + start, count, MPI_BYTE, to, 0, (char*)in + start, count,
                                             MPI_BYTE, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    }
}

void comm_all_to_all(Comm* comm, Device* dev, void* recv, const void* send, size_t bytes_per_rank) {
    size_t rank = (size_t)comm->ranks.rank, ranks = (size_t)comm->ranks.num_ranks, n = bytes_per_rank;
    if (n == 0) { return; }
    check(recv != send || ranks == 1, "comm_all_to_all: in place, want two buffers");
    if (recv != send) { memcpy((char*)recv + rank * n, (const char*)send + rank * n, n); }
    if (ranks == 1) { return; }
    comm_op_begin(comm, dev, COMM_ALL_TO_ALL, (ranks - 1) * n);
    for (size_t k = 1; k < ranks; k++) {
        size_t to = (rank + k) % ranks, from = (rank + ranks - k) % ranks;
        comm_swap(comm, (char*)recv + from * n, (int)from, (const char*)send + to * n, (int)to, n);
    }
    comm_op_end(comm);
}

void comm_all_gathers(Comm* comm, Device* dev, const CommGather* gathers, int n) {
    size_t rank = (size_t)comm->ranks.rank, ranks = (size_t)comm->ranks.num_ranks, bytes = 0;
    for (int i = 0; i < n; i++) {
        const CommGather* g = &gathers[i];
        char* own = (char*)g->recv + rank * g->bytes_per_rank;
        if (own != (const char*)g->send) { memcpy(own, g->send, g->bytes_per_rank); }
        bytes += g->bytes_per_rank;
    }
    if (ranks == 1 || bytes == 0) { return; }
    comm_op_begin(comm, dev, COMM_ALL_GATHER, (ranks - 1) * bytes);
    for (int i = 0; i < n; i++) {
        char* recv = (char*)gathers[i].recv;
        size_t each = gathers[i].bytes_per_rank;
        for (size_t k = 1; k < ranks; k++) {
            size_t to = (rank + k) % ranks, from = (rank + ranks - k) % ranks;
            comm_swap(comm, recv + from * each, (int)from, recv + rank * each, (int)to, each);
        }
    }
    comm_op_end(comm);
}

void comm_all_gather(Comm* comm, Device* dev, void* recv, const void* send, size_t bytes_per_rank) {
    CommGather gather = {recv, send, bytes_per_rank};
    comm_all_gathers(comm, dev, &gather, 1);
}

// The bits of a float that holds a BF16 value, and back.
static inline uint16_t comm_bf16_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

static inline float comm_bf16_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof(x));
    return x;
}

// Both reduce-scatters; `narrow`: the values are BF16, travel in two bytes and the sum is rounded to BF16.
static inline void comm_reduce_scatter(Comm* comm, float* recv, const float* send, size_t n, int narrow) {
    size_t rank = (size_t)comm->ranks.rank, ranks = (size_t)comm->ranks.num_ranks, piece = COMM_PIECE / ranks;
    size_t width = narrow ? sizeof(uint16_t) : sizeof(float);
    for (size_t start = 0; start < n; start += piece) {
        size_t count = n - start < piece ? n - start : piece;
        for (size_t k = 1; k < ranks; k++) {
            size_t to = (rank + k) % ranks, from = (rank + ranks - k) % ranks;
            const float* out = send + to * n + start;
            for (size_t i = 0; narrow && i < count; i++) {
                comm->sent[i] = comm_bf16_bits(out[i]);
            }
            comm_swap(comm, (char*)comm->received + from * piece * width, (int)from, narrow ? (void*)comm->sent : out,
                      (int)to, count * width);
        }
        for (size_t r = 0; r < ranks; r++) {
            const float* own = send + rank * n + start;
            const float* wide = r == rank ? own : comm->received + r * piece;
            const uint16_t* two_bytes = (const uint16_t*)comm->received + r * piece;
            for (size_t i = 0; i < count; i++) {
                float x = narrow && r != rank ? comm_bf16_float(two_bytes[i]) : wide[i];
                comm->sum[i] = r == 0 ? x : comm->sum[i] + x;
            }
        }
        for (size_t i = 0; i < count; i++) {
            recv[start + i] = narrow ? bf16_round(comm->sum[i]) : comm->sum[i];
        }
    }
}

// --precision fp32 keeps FP32 values in bf16, and so does its wire.
void comm_reduce_scatter_bf16(Comm* comm, Device* dev, bf16* recv, const bf16* send, size_t n_per_rank) {
    uint64_t sent = (uint64_t)(comm->ranks.num_ranks - 1) * n_per_rank * (dev->fp32 ? sizeof(float) : sizeof(uint16_t));
    if (n_per_rank == 0) { return; }
    if (comm->ranks.num_ranks == 1) {
        if (recv != send) { memcpy(recv, send, n_per_rank * sizeof(bf16)); }
        return;
    }
    comm_op_begin(comm, dev, COMM_REDUCE_SCATTER_BF16, sent);
    comm_reduce_scatter(comm, recv, send, n_per_rank, !dev->fp32);
    comm_op_end(comm);
}

void comm_reduce_scatter_fp32(Comm* comm, Device* dev, float* recv, const float* send, size_t n_per_rank) {
    if (n_per_rank == 0) { return; }
    if (comm->ranks.num_ranks == 1) {
        if (recv != send) { memcpy(recv, send, n_per_rank * sizeof(float)); }
        return;
    }
    comm_op_begin(comm, dev, COMM_REDUCE_SCATTER_FP32,
                  (uint64_t)(comm->ranks.num_ranks - 1) * n_per_rank * sizeof(float));
    comm_reduce_scatter(comm, recv, send, n_per_rank, 0);
    comm_op_end(comm);
}

// Cut n elements into a shard per rank: counts and offsets of all, where the contributions to the own one come to lie.
// Returns how many elements that has.
static inline int comm_cut(Comm* comm, int n) {
    int ranks = comm->ranks.num_ranks, shard = (n + ranks - 1) / ranks;
    for (int r = 0; r < ranks; r++) {
        int start = r * shard < n ? r * shard : n;
        comm->offsets[r] = start;
        comm->counts[r] = n - start < shard ? n - start : shard;
    }
    int own = comm->counts[comm->ranks.rank];
    for (int r = 0; r < ranks; r++) {
        comm->wanted[r] = own;
        comm->slots[r] = r * own;
    }
    return own;
}

// data (n) += over ranks, n <= COMM_PIECE: all-to-all of shards, sum in rank order by the shard's owner, all-gather.
static inline void comm_sum_piece(Comm* comm, float* data, int n) {
    int own = comm_cut(comm, n);
    mpi_check(&comm->ranks, MPI_Alltoallv(data, comm->counts, comm->offsets, MPI_FLOAT, comm->received, comm->wanted,
                                          comm->slots, MPI_FLOAT, MPI_COMM_WORLD));
    float* sum = data + comm->offsets[comm->ranks.rank];
    for (int i = 0; i < own; i++) {
        sum[i] = comm->received[i];
    }
    for (int r = 1; r < comm->ranks.num_ranks; r++) {
        const float* part = comm->received + comm->slots[r];
        for (int i = 0; i < own; i++) {
            sum[i] += part[i];
        }
    }
    mpi_check(&comm->ranks, MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, comm->counts, comm->offsets,
                                           MPI_FLOAT, MPI_COMM_WORLD));
}

// The same for E4M3 codes, every partial sum rounded.
static inline void comm_sum_piece_e4m3(Comm* comm, uint8_t* data, int n) {
    int own = comm_cut(comm, n);
    uint8_t *received = (uint8_t*)comm->received, *sum = data + comm->offsets[comm->ranks.rank];
    mpi_check(&comm->ranks, MPI_Alltoallv(data, comm->counts, comm->offsets, MPI_BYTE, received, comm->wanted,
                                          comm->slots, MPI_BYTE, MPI_COMM_WORLD));
    memcpy(sum, received, (size_t)own);
    for (int r = 1; r < comm->ranks.num_ranks; r++) {
        const uint8_t* part = received + comm->slots[r];
        for (int i = 0; i < own; i++) {
            sum[i] = e4m3_from_float(float_from_e4m3(sum[i]) + float_from_e4m3(part[i]));
        }
    }
    mpi_check(&comm->ranks, MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, comm->counts, comm->offsets,
                                           MPI_BYTE, MPI_COMM_WORLD));
}

// A sum or maximum of so many bytes: every element goes to its owner, and comes back.
static inline uint64_t comm_sum_bytes(const Comm* comm, size_t bytes) {
    return 2 * (uint64_t)(comm->ranks.num_ranks - 1) * bytes / (uint64_t)comm->ranks.num_ranks;
}

void comm_all_reduce_e4m3(Comm* comm, Device* dev, e4m3* data, size_t n) {
    if (comm->ranks.num_ranks == 1 || n == 0) { return; }
    comm_op_begin(comm, dev, COMM_ALL_REDUCE_E4M3, comm_sum_bytes(comm, n));
    for (size_t start = 0; start < n; start += COMM_PIECE) {
        comm_sum_piece_e4m3(comm, data + start, (int)(n - start < COMM_PIECE ? n - start : COMM_PIECE));
    }
    comm_op_end(comm);
}

void comm_sum(Comm* comm, Device* dev, float* data, size_t n) {
    if (comm->ranks.num_ranks == 1 || n == 0) { return; }
    comm_op_begin(comm, dev, COMM_SUM, comm_sum_bytes(comm, n * sizeof(float)));
    for (size_t start = 0; start < n; start += COMM_PIECE) {
        comm_sum_piece(comm, data + start, (int)(n - start < COMM_PIECE ? n - start : COMM_PIECE));
    }
    comm_op_end(comm);
}

// NaN is the caller's business (scale_slots_gather turns it into Inf): MPI_MAX may drop it.
void comm_max(Comm* comm, Device* dev, float* data, size_t n) {
    if (comm->ranks.num_ranks == 1 || n == 0) { return; }
    check(n <= INT_MAX, "comm_max: n = %zu, want at most %d", n, INT_MAX);
    comm_op_begin(comm, dev, COMM_MAX, comm_sum_bytes(comm, n * sizeof(float)));
    mpi_check(&comm->ranks, MPI_Allreduce(MPI_IN_PLACE, data, (int)n, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD));
    comm_op_end(comm);
}

void comm_host_min_max(Comm* comm, int64_t value, int64_t* min, int64_t* max) {
    ranks_min_max(&comm->ranks, value, min, max);
}

void comm_host_all_gather(Comm* comm, void* all, const void* own, size_t bytes) {
    ranks_all_gather(&comm->ranks, all, own, bytes);
}

void comm_versions(FILE* out) {
    char mpi[256];
    ranks_mpi_version(mpi, sizeof(mpi));
    agree_fact(out, "MPI", "%s", mpi);
}

void comm_barrier(Comm* comm) {
    ranks_barrier(&comm->ranks);
}

#endif
