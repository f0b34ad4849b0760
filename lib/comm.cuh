// Ranks of the GPU floor: one process per GPU. MPI starts them and carries the NCCL id and a few host numbers; whatever
// lies in device memory goes over NCCL, on dev->stream. One rank is a communicator of one: sums and maxima over it are
// what is already there, and neither MPI nor NCCL is started for it.
#ifndef COMM_CUH
#define COMM_CUH

// Only MPI's C functions: its old C++ classes do not compile without warnings.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>
#include <nccl.h>

#include "gpu.cuh"

struct Comm {
    int rank, num_ranks;
    int local_rank;  // among the ranks of this host
    int started_mpi; // by comm_create, to be finalised by comm_free
    ncclComm_t nccl; // NULL before comm_connect, and when alone
};

// ncclGetLastError knows more than the code does ("Duplicate GPU detected", the socket's error).
#define nccl_check(comm, call)                                                                              \
    do {                                                                                                    \
        ncclResult_t nccl_status_ = (call);                                                                 \
        check(nccl_status_ == ncclSuccess, "NCCL, rank %d of %d: %s in %s. %s", (comm)->rank,                \
              (comm)->num_ranks, ncclGetErrorString(nccl_status_), #call, ncclGetLastError((comm)->nccl));   \
    } while (0)

#define comm_mpi_check(call)                                                          \
    do {                                                                              \
        int mpi_status_ = (call);                                                     \
        check(mpi_status_ == MPI_SUCCESS, "MPI: error %d in %s", mpi_status_, #call); \
    } while (0)

// Number of processes that a launcher says it started; 0 when it does not say, 1 when there is no launcher. Slurm's
// variables are also in the shell of an allocation: only those of a job step, which srun starts, mean ranks.
static inline int comm_launched_processes(void) {
    static const char* const counts[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        const char* value = getenv(counts[i]);
        if (value != NULL && atoi(value) > 0) { return atoi(value); }
    }
    return getenv("PMI_RANK") != NULL || getenv("PMIX_RANK") != NULL ? 0 : 1;
}

// Join the ranks that the launcher started; alone without one. Errors: MPI sees other processes than were started.
Comm* comm_create(int* argc, char*** argv) {
    Comm* comm = (Comm*)calloc_or_die(1, sizeof(Comm));
    comm->num_ranks = 1;
    int launched = comm_launched_processes();
    if (launched == 1) { return comm; }
    int initialized = 0;
    comm_mpi_check(MPI_Initialized(&initialized));
    if (!initialized) {
        comm_mpi_check(MPI_Init(argc, argv));
        comm->started_mpi = 1;
    }
    comm_mpi_check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    comm_mpi_check(MPI_Comm_rank(MPI_COMM_WORLD, &comm->rank));
    comm_mpi_check(MPI_Comm_size(MPI_COMM_WORLD, &comm->num_ranks));
    // srun without a PMI that this MPI knows: many runs of one rank that all write the same files
    check(comm->num_ranks > 1 || launched == 0,
          "the launcher started %d processes, but MPI joins only 1: use mpirun, or srun --mpi=pmix", launched);
    MPI_Comm host;
    comm_mpi_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, comm->rank, MPI_INFO_NULL, &host));
    comm_mpi_check(MPI_Comm_rank(host, &comm->local_rank));
    comm_mpi_check(MPI_Comm_free(&host));
    return comm;
}

// Connect the ranks' GPUs. Collective; the device must be the current one (device_create sets it).
void comm_connect(Comm* comm, Device* dev) {
    if (comm->num_ranks == 1) { return; }
    check(comm->nccl == NULL, "comm_connect: called twice");
    cuda_check(cudaSetDevice(dev->index));
    ncclUniqueId id;
    memset(&id, 0, sizeof(id));
    if (comm->rank == 0) { nccl_check(comm, ncclGetUniqueId(&id)); }
    comm_mpi_check(MPI_Bcast(&id, (int)sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD));
    nccl_check(comm, ncclCommInitRank(&comm->nccl, comm->num_ranks, id, comm->rank));
}

// Collective: call it on every rank, with the device's work finished, before device_free.
void comm_free(Comm* comm) {
    if (comm->nccl != NULL) { nccl_check(comm, ncclCommDestroy(comm->nccl)); }
    if (comm->started_mpi) { comm_mpi_check(MPI_Finalize()); }
    free(comm);
}

int comm_rank(const Comm* comm) { return comm->rank; }
int comm_local_rank(const Comm* comm) { return comm->local_rank; }
int comm_num_ranks(const Comm* comm) { return comm->num_ranks; }

static inline void comm_reduce(Comm* comm, Device* dev, float* data, size_t n, ncclRedOp_t op) {
    if (comm->num_ranks == 1) { return; }
    cost_sum_over_ranks(dev);
    check(comm->nccl != NULL, "rank %d of %d: a reduction before comm_connect", comm->rank, comm->num_ranks);
    nccl_check(comm, ncclAllReduce(data, data, n, ncclFloat32, op, comm->nccl, dev->stream));
}

// data (n) FP32 in device memory = sum over ranks, in place, the same bits on every rank. Asynchronous on the stream.
// NOTE: NCCL picks the order of the sum by size and topology: the same on every run of one set-up, not across set-ups.
void comm_sum(Comm* comm, Device* dev, float* data, size_t n) { comm_reduce(comm, dev, data, n, ncclSum); }

// data (n) FP32 in device memory = maximum over ranks, in place. NCCL drops NaN: scale_slots_gather makes it Inf.
void comm_max(Comm* comm, Device* dev, float* data, size_t n) { comm_reduce(comm, dev, data, n, ncclMax); }

// Smallest and largest of the ranks' host values.
void comm_host_min_max(Comm* comm, int64_t value, int64_t* min, int64_t* max) {
    *min = *max = value;
    if (comm->num_ranks == 1) { return; }
    comm_mpi_check(MPI_Allreduce(&value, min, 1, MPI_INT64_T, MPI_MIN, MPI_COMM_WORLD));
    comm_mpi_check(MPI_Allreduce(&value, max, 1, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD));
}

// Returns when every rank has called it. Says nothing about work queued on the devices.
void comm_barrier(Comm* comm) {
    if (comm->num_ranks == 1) { return; }
    comm_mpi_check(MPI_Barrier(MPI_COMM_WORLD));
}

#endif
