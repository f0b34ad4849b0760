// What the ranks of both floors share: joining through MPI, the few host numbers that MPI carries, the watchdog that
// names a missing rank, and the list of collectives. Used by comm.cuh and comm_cpu.h. Only the main thread calls MPI.
#ifndef RANKS_H
#define RANKS_H

// Only MPI's C functions: its old C++ classes do not compile without warnings.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif

#include "check.h"

#include <limits.h>
#include <mpi.h>

#include "watchdog.h"

#define RANKS_TIMEOUT_S 45.0 // of a collective, unless comm_set_timeout says otherwise

// Those of the host alone, behind the device's of floor.h (CommOp).
enum { RANKS_CONNECT = 7, RANKS_MIN_MAX, RANKS_GATHER, RANKS_BARRIER, RANKS_LEAVE };
static const char* const ranks_op_names[] = {"sum",
                                             "max",
                                             "all-to-all",
                                             "all-gather",
                                             "reduce-scatter bf16",
                                             "reduce-scatter fp32",
                                             "all-reduce fp8",
                                             "connect",
                                             "host min and max",
                                             "host all-gather",
                                             "barrier",
                                             "end of the run"};

typedef struct {
    int rank, num_ranks;
    int local_rank;     // among the ranks of this host
    int started_mpi;    // by ranks_join, to be finalised by ranks_leave
    Watchdog* watchdog; // NULL: alone
} Ranks;

// A rank that is gone makes MPI fail in its own words, if at all: the watchdog's are better, so it has its time first.
#define mpi_check(ranks, call)                                                                                         \
    do {                                                                                                               \
        int mpi_status_ = (call);                                                                                      \
        if (mpi_status_ != MPI_SUCCESS) { watchdog_explain((ranks)->watchdog); }                                       \
        check(mpi_status_ == MPI_SUCCESS, "MPI, rank %d of %d: error %d in %s", (ranks)->rank, (ranks)->num_ranks,     \
              mpi_status_, #call);                                                                                     \
    } while (0)

// Number of processes that a launcher says it started; 0 when it does not say, 1 when there is no launcher: then MPI is
// left out, with its start-up time and its opinion about the machine. Slurm's variables are also in the shell of an
// allocation: only those of a job step, which srun starts, mean ranks.
static inline int ranks_launched(void) {
    static const char* const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const char* value = getenv(names[i]);
        if (value != NULL && atoi(value) > 0) { return atoi(value); }
    }
    return getenv("PMI_RANK") != NULL || getenv("PMIX_RANK") != NULL ? 0 : 1;
}

// Join the ranks that the launcher started; alone without one. `look`, `abort`: see WatchOptions.
// Errors: MPI sees other processes than were started.
static inline Ranks ranks_join(int* argc, char*** argv,
                               void (*look)(void* context, WatchLane* device, char* error, size_t error_bytes),
                               void (*abort)(void* context), void* context) {
    Ranks ranks;
    memset(&ranks, 0, sizeof(ranks));
    ranks.num_ranks = 1;
    int launched = ranks_launched(), initialized = 0, level = 0;
    if (launched == 1) { return ranks; }
    mpi_check(&ranks, MPI_Initialized(&initialized));
    if (!initialized) {
        mpi_check(&ranks, MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &level));
        ranks.started_mpi = 1;
    }
    mpi_check(&ranks, MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    mpi_check(&ranks, MPI_Comm_rank(MPI_COMM_WORLD, &ranks.rank));
    mpi_check(&ranks, MPI_Comm_size(MPI_COMM_WORLD, &ranks.num_ranks));
    // srun without a PMI that this MPI knows: many runs of one rank that all write the same files
    check(ranks.num_ranks > 1 || launched == 0,
          "the launcher started %d processes, but MPI joins only 1: use mpirun, or srun --mpi=pmix", launched);
    MPI_Comm host;
    int first = ranks.rank; // smallest rank of this host
    mpi_check(&ranks, MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, ranks.rank, MPI_INFO_NULL, &host));
    mpi_check(&ranks, MPI_Comm_rank(host, &ranks.local_rank));
    mpi_check(&ranks, MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, host));
    mpi_check(&ranks, MPI_Comm_free(&host));
    if (ranks.num_ranks == 1) { return ranks; }

    WatchOptions options = {ranks.rank, ranks.num_ranks, RANKS_TIMEOUT_S, ranks_op_names, look, abort, context};
    WatchAddress address;
    memset(&address, 0, sizeof(address));
    Watchdog* watchdog = watchdog_create(options);
    if (ranks.rank == 0) {
        address = watchdog_listen(watchdog);
        watchdog_start(watchdog, &address, 1);
    }
    mpi_check(&ranks, MPI_Bcast(&address, (int)sizeof(address), MPI_BYTE, 0, MPI_COMM_WORLD));
    if (ranks.rank != 0) { watchdog_start(watchdog, &address, first == 0); }
    ranks.watchdog = watchdog;
    return ranks;
}

// Collective.
static inline void ranks_leave(Ranks* ranks) {
    if (ranks->watchdog != NULL) { watchdog_enter(ranks->watchdog, RANKS_LEAVE); }
    if (ranks->started_mpi) { mpi_check(ranks, MPI_Finalize()); }
    if (ranks->watchdog != NULL) { watchdog_leave(ranks->watchdog); }
    watchdog_stop(ranks->watchdog);
    ranks->watchdog = NULL;
}

// Smallest and largest of the ranks' values, in one exchange: ~ turns the order of int64_t round.
static inline void ranks_min_max(Ranks* ranks, int64_t value, int64_t* min, int64_t* max) {
    *min = *max = value;
    if (ranks->num_ranks == 1) { return; }
    int64_t both[2] = {value, ~value};
    watchdog_enter(ranks->watchdog, RANKS_MIN_MAX);
    mpi_check(ranks, MPI_Allreduce(MPI_IN_PLACE, both, 2, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD));
    watchdog_leave(ranks->watchdog);
    *max = both[0];
    *min = ~both[1];
}

// all (num_ranks, bytes) = every rank's own (bytes), at most 2 GiB in all.
static inline void ranks_all_gather(Ranks* ranks, void* all, const void* own, size_t bytes) {
    if (ranks->num_ranks == 1) {
        memcpy(all, own, bytes);
        return;
    }
    check(bytes <= (size_t)INT_MAX / (size_t)ranks->num_ranks, "a host all-gather of %zu bytes on %d ranks, want at "
          "most %d in all", bytes, ranks->num_ranks, INT_MAX);
    watchdog_enter(ranks->watchdog, RANKS_GATHER);
    mpi_check(ranks, MPI_Allgather(own, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD));
    watchdog_leave(ranks->watchdog);
}

// "Open MPI v4.1.4", for messages.
static inline void ranks_mpi_version(char* text, size_t size) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(version, &length);
    snprintf(text, size, "%.*s", (int)strcspn(version, ",\n"), version);
}

// Returns when every rank has called it.
static inline void ranks_barrier(Ranks* ranks) {
    if (ranks->num_ranks == 1) { return; }
    watchdog_enter(ranks->watchdog, RANKS_BARRIER);
    mpi_check(ranks, MPI_Barrier(MPI_COMM_WORLD));
    watchdog_leave(ranks->watchdog);
}

#endif
