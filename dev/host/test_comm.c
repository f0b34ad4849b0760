// lib/comm_cpu.h: alone, then as 2 and as 5 ranks, which this program starts itself with mpirun.
// Every rank checks what it got; a rank's failures are printed by that rank and counted by rank 0.
#define CPU_FLOOR
#include "../../lib/device_cpu.h"

#include "../../lib/comm_cpu.h"

#include "unit.h"

static Comm* comm;
static struct Device device; // sums of ranks use nothing of it

// What rank r contributes: values whose FP32 sum depends on the order of the ranks.
static float contribution(int rank, size_t i) {
    uint32_t hash = (uint32_t)(i * 2654435761u) ^ ((uint32_t)rank * 0x9E3779B9u);
    hash = (hash ^ (hash >> 15)) * 0x2C1B3C6Du;
    return ((float)(hash >> 8) / 8388608.0f - 1.0f) * (rank % 2 ? 1e4f : 1e-3f);
}

static void sum_case(size_t n) {
    int ranks = comm_num_ranks(comm);
    float* data = (float*)malloc_or_die((n + 1) * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        data[i] = contribution(comm_rank(comm), i);
    }
    data[n] = 42.0f;
    comm_sum(comm, &device, data, n);
    for (size_t i = 0; i < n; i++) {
        float want = contribution(0, i);
        for (int r = 1; r < ranks; r++) {
            want += contribution(r, i);
        }
        expect(data[i] == want, "sum of %zu: [%zu] is %.9g, want %.9g in rank order", n, i, (double)data[i],
               (double)want);
    }
    expect(data[n] == 42.0f, "sum of %zu wrote behind its end", n);
    free(data);
}

static void test_sum(void) {
    size_t sizes[] = {0, 1, 2, 7, 1000, COMM_PIECE - 1, COMM_PIECE + 5};
    for (int i = 0; i < 7; i++) {
        sum_case(sizes[i]);
    }
}

static void test_max_and_host(void) {
    int rank = comm_rank(comm), ranks = comm_num_ranks(comm);
    float amaxes[3] = {(float)rank, (float)-rank, rank == ranks - 1 ? INFINITY : 1.0f};
    comm_max(comm, &device, amaxes, 3);
    expect(amaxes[0] == (float)(ranks - 1) && amaxes[1] == 0.0f && amaxes[2] == INFINITY, "max: %g %g %g",
           (double)amaxes[0], (double)amaxes[1], (double)amaxes[2]);
    int64_t min = 0, max = 0;
    comm_host_min_max(comm, ((int64_t)1 << 40) + rank, &min, &max);
    expect(min == (int64_t)1 << 40 && max == ((int64_t)1 << 40) + ranks - 1, "min %lld, max %lld", (long long)min,
           (long long)max);
    expect(comm_local_rank(comm) >= 0 && comm_local_rank(comm) <= rank, "local rank %d of rank %d",
           comm_local_rank(comm), rank);
    comm_barrier(comm);
}

// This program again, under mpirun. Leak checking is off: OpenMPI itself leaves memory behind.
static void run_ranks(int num_ranks) {
    char path[1024], command[2048];
    ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
    check(length > 0, "cannot find this program's own path: %s", strerror(errno));
    path[length] = 0;
    snprintf(command, sizeof(command), "mpirun --allow-run-as-root --oversubscribe -n %d '%s' 2>&1", num_ranks, path);
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
    setenv("OMP_NUM_THREADS", "1", 1);
    FILE* f = popen(command, "r");
    check(f != NULL, "cannot run mpirun: %s", strerror(errno));
    char line[1024], output[8192] = "";
    while (fgets(line, sizeof(line), f)) {
        strncat(output, line, sizeof(output) - strlen(output) - 1);
    }
    int status = pclose(f);
    char summary[64];
    snprintf(summary, sizeof(summary), "%d ranks: 2 passed, 0 failed", num_ranks);
    expect(status == 0 && strstr(output, summary) != NULL, "mpirun -n %d: status %d, wanted '%s', got:\n%s", num_ranks,
           status, summary, output);
}

static void test_ranks(void) {
    if (system("mpirun --version > /dev/null 2>&1") != 0) {
        unit_skip("no mpirun");
        return;
    }
    run_ranks(2);
    run_ranks(5);
}

int main(int argc, char** argv) {
    comm = comm_create(&argc, &argv);
    const char* launched = getenv("OMPI_COMM_WORLD_SIZE");
    int rank = comm_rank(comm), num_ranks = comm_num_ranks(comm), want = launched ? atoi(launched) : 1;
    check(num_ranks == want, "%d ranks, want %d", num_ranks, want);
    unit_run(test_sum);
    unit_run(test_max_and_host);
    if (launched == NULL) {
        unit_run(test_ranks);
        comm_free(comm);
        return unit_report();
    }
    float failed = (float)unit_state.failed;
    comm_sum(comm, &device, &failed, 1);
    if (rank == 0) { printf("%d ranks: %d passed, %d failed\n", num_ranks, unit_state.passed, (int)failed); }
    comm_free(comm);
    return failed > 0.0f;
}
