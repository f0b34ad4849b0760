// Ranks of the CPU floor, over MPI. Sums are done in rank order by one owner per element, so every rank gets the same
// bits on every run; MPI_Allreduce promises neither.
#ifndef COMM_CPU_H
#define COMM_CPU_H

#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX // OpenMPI's retired C++ interface: not wanted, and not free of warnings
#endif

#include <limits.h>
#include <mpi.h>
#include <stdint.h>
#include <stdlib.h>

#include "check.h"
#include "device_cpu.h"

struct Comm {
    int rank, num_ranks;
    int local_rank;
    int started_mpi; // by comm_create, to be finalised by comm_free
    float* received; // (COMM_PIECE + num_ranks) every rank's contribution to this rank's shard of a piece
    int* counts;     // (num_ranks) elements of each rank's shard
    int* offsets;    // (num_ranks) where the shards start in the piece
    int* slots;      // (num_ranks) where each rank's contribution lies in `received`
    int* wanted;     // (num_ranks) elements received from each rank: this rank's shard, from all
};

#define COMM_PIECE (1 << 22) // floats exchanged at a time: bounds `received` to 16 MiB and MPI's int counts

#define mpi_check(call)                                                                                                \
    do {                                                                                                               \
        int mpi_status_ = (call);                                                                                      \
        check(mpi_status_ == MPI_SUCCESS, "MPI: error %d in %s", mpi_status_, #call);                                  \
    } while (0)

// Number of processes that a launcher says it started; 1 when we were started by hand, -1 when it does not say. A run
// alone leaves MPI out: it saves MPI's start-up time and its opinion about the machine.
static inline int comm_launched(void) {
    const char* names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"};
    for (int i = 0; i < 4; i++) {
        const char* value = getenv(names[i]);
        if (value != NULL && atoi(value) > 0) { return atoi(value); }
    }
    return getenv("PMIX_RANK") != NULL || getenv("PMI_RANK") != NULL ? -1 : 1;
}

Comm* comm_create(int* argc, char*** argv) {
    cpu_spin_briefly(*argv); // the one call of the floor that is sure to be early enough
    Comm* comm = (Comm*)calloc_or_die(1, sizeof(Comm));
    comm->num_ranks = 1;
    int launched = comm_launched();
    if (launched == 1) { return comm; }
    int initialized = 0;
    mpi_check(MPI_Initialized(&initialized));
    if (!initialized) {
        mpi_check(MPI_Init(argc, argv));
        comm->started_mpi = 1;
    }
    mpi_check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    mpi_check(MPI_Comm_rank(MPI_COMM_WORLD, &comm->rank));
    mpi_check(MPI_Comm_size(MPI_COMM_WORLD, &comm->num_ranks));
    // srun without a PMI starts N strangers who would all write the same files
    check(comm->num_ranks > 1 || launched == -1,
          "the launcher started %d processes, but MPI joins only 1: use mpirun, or srun --mpi=pmix", launched);
    MPI_Comm host;
    mpi_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, comm->rank, MPI_INFO_NULL, &host));
    mpi_check(MPI_Comm_rank(host, &comm->local_rank));
    mpi_check(MPI_Comm_free(&host));
    comm->counts = (int*)calloc_or_die((size_t)comm->num_ranks * 4, sizeof(int));
    comm->offsets = comm->counts + comm->num_ranks;
    comm->slots = comm->counts + comm->num_ranks * 2;
    comm->wanted = comm->counts + comm->num_ranks * 3;
    return comm;
}

void comm_connect(Comm* comm, Device* dev) {
    (void)comm;
    (void)dev;
}

void comm_free(Comm* comm) {
    if (comm->started_mpi) { mpi_check(MPI_Finalize()); }
    free(comm->received);
    free(comm->counts);
    free(comm);
}

int comm_rank(const Comm* comm) { return comm->rank; }
int comm_local_rank(const Comm* comm) { return comm->local_rank; }
int comm_num_ranks(const Comm* comm) { return comm->num_ranks; }

// data (n) += over ranks, n <= COMM_PIECE: all-to-all of shards, sum in rank order by the shard's owner, all-gather.
static inline void comm_sum_piece(Comm* comm, float* data, int n) {
    int ranks = comm->num_ranks, shard = (n + ranks - 1) / ranks;
    for (int r = 0; r < ranks; r++) {
        int start = r * shard < n ? r * shard : n;
        comm->offsets[r] = start;
        comm->counts[r] = n - start < shard ? n - start : shard;
    }
    int own = comm->counts[comm->rank];
    for (int r = 0; r < ranks; r++) {
        comm->wanted[r] = own;
        comm->slots[r] = r * own;
    }
    mpi_check(MPI_Alltoallv(data, comm->counts, comm->offsets, MPI_FLOAT, comm->received, comm->wanted, comm->slots,
                            MPI_FLOAT, MPI_COMM_WORLD));
    float* sum = data + comm->offsets[comm->rank];
    for (int i = 0; i < own; i++) {
        sum[i] = comm->received[i];
    }
    for (int r = 1; r < ranks; r++) {
        const float* part = comm->received + comm->slots[r];
        for (int i = 0; i < own; i++) {
            sum[i] += part[i];
        }
    }
    mpi_check(MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, comm->counts, comm->offsets, MPI_FLOAT,
                             MPI_COMM_WORLD));
}

void comm_sum(Comm* comm, Device* dev, float* data, size_t n) {
    if (comm->num_ranks == 1) { return; }
    cost_sum_over_ranks(dev);
    if (comm->received == NULL) {
        comm->received = (float*)malloc_or_die(((size_t)COMM_PIECE + (size_t)comm->num_ranks) * sizeof(float));
    }
    for (size_t start = 0; start < n; start += COMM_PIECE) {
        comm_sum_piece(comm, data + start, (int)(n - start < COMM_PIECE ? n - start : COMM_PIECE));
    }
}

// NaN is the caller's business (scale_slots_gather turns it into Inf): MPI_MAX may drop it.
void comm_max(Comm* comm, Device* dev, float* data, size_t n) {
    if (comm->num_ranks == 1) { return; }
    cost_sum_over_ranks(dev);
    check(n <= INT_MAX, "comm_max: n = %zu, want at most %d", n, INT_MAX);
    mpi_check(MPI_Allreduce(MPI_IN_PLACE, data, (int)n, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD));
}

void comm_host_min_max(Comm* comm, int64_t value, int64_t* min, int64_t* max) {
    *min = *max = value;
    if (comm->num_ranks == 1) { return; }
    mpi_check(MPI_Allreduce(MPI_IN_PLACE, min, 1, MPI_INT64_T, MPI_MIN, MPI_COMM_WORLD));
    mpi_check(MPI_Allreduce(MPI_IN_PLACE, max, 1, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD));
}

void comm_barrier(Comm* comm) {
    if (comm->num_ranks == 1) { return; }
    mpi_check(MPI_Barrier(MPI_COMM_WORLD));
}

#endif
