// lib/comm_cpu.h, ranks.h, watchdog.h: alone, then as 2, 3 and 4 ranks, which this program starts itself with mpirun.
// Every rank checks what it got; a rank's failures are printed by that rank and counted by rank 0.
// Then as runs in which something goes wrong (`test_comm fail WHAT RANK MARK`): a rank is killed, stops, fails, hangs.
#define CPU_FLOOR
#define COMM_PIECE 10007 // small, so that every collective is done in several pieces
#define COMM_MESSAGE 1000
#include "../../lib/device_cpu.h"

#include "../../lib/comm_cpu.h"

#include "unit.h"

#include <ctype.h>
#include <dirent.h>
#include <signal.h>

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
    size_t sizes[] = {0, 1, 2, 7, 1000, COMM_PIECE - 1, 5 * COMM_PIECE + 5};
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
    comm_host_min_max(comm, rank == 0 ? INT64_MIN : rank == 1 ? INT64_MAX : -rank, &min, &max);
    expect(min == INT64_MIN && max == (ranks > 1 ? INT64_MAX : INT64_MIN), "min %lld, max %lld", (long long)min,
           (long long)max);
    char own[24], all[64 * sizeof(own)];
    memset(own, 0, sizeof(own));
    snprintf(own, sizeof(own), "rank %d says %d", rank, rank * rank);
    comm_host_all_gather(comm, all, own, sizeof(own));
    for (int r = 0; r < ranks; r++) {
        char want[sizeof(own)];
        snprintf(want, sizeof(want), "rank %d says %d", r, r * r);
        expect(strcmp(all + (size_t)r * sizeof(own), want) == 0, "host all-gather, rank %d: '%s'", r,
               all + (size_t)r * sizeof(own));
    }
    expect(comm_local_rank(comm) >= 0 && comm_local_rank(comm) <= rank, "local rank %d of rank %d",
           comm_local_rank(comm), rank);
    comm_barrier(comm);
}

static unsigned char byte_of(int from, int to, size_t i) {
    uint32_t hash = (uint32_t)(i * 2654435761u) + (uint32_t)(from * 64 + to) * 0x85EBCA6Bu;
    return (unsigned char)((hash ^ (hash >> 13)) * 0x2C1B3C6Du >> 24);
}

static const size_t byte_sizes[] = {0, 1, 3, 255, 1000, 1001, 12345, 100003};
enum { NUM_BYTE_SIZES = 8 };

// Every block is one byte longer than n, to see whether somebody writes behind the end of it all.
static void test_all_to_all(void) {
    int rank = comm_rank(comm), ranks = comm_num_ranks(comm);
    for (int s = 0; s < NUM_BYTE_SIZES; s++) {
        size_t n = byte_sizes[s], total = n * (size_t)ranks;
        unsigned char* send = (unsigned char*)malloc_or_die(total + 1);
        unsigned char* recv = (unsigned char*)malloc_or_die(total + 1);
        for (size_t i = 0; i < total; i++) {
            send[i] = byte_of(rank, (int)(i / n), i % n);
            recv[i] = 0xEE;
        }
        recv[total] = 0xEE;
        comm_begin(comm, &device);
        comm_all_to_all(comm, &device, recv, send, n);
        comm_end(comm, &device);
        for (size_t i = 0; i < total; i++) {
            unsigned char want = byte_of((int)(i / n), rank, i % n);
            expect(recv[i] == want, "all-to-all of %zu: byte %zu of rank %zu is %d, want %d", n, i % n, i / n, recv[i],
                   want);
            expect(send[i] == byte_of(rank, (int)(i / n), i % n), "all-to-all of %zu changed its input", n);
        }
        expect(recv[total] == 0xEE, "all-to-all of %zu wrote behind its end", n);
        free(send);
        free(recv);
    }
}

static void test_all_gather(void) {
    int rank = comm_rank(comm), ranks = comm_num_ranks(comm);
    for (int s = 0; s < 2 * NUM_BYTE_SIZES; s++) {
        int in_place = s % 2;
        size_t n = byte_sizes[s / 2], total = n * (size_t)ranks;
        unsigned char* recv = (unsigned char*)malloc_or_die(total + 1);
        unsigned char* own = (unsigned char*)malloc_or_die(n + 1);
        unsigned char* send = in_place ? recv + n * (size_t)rank : own;
        memset(recv, 0xEE, total + 1);
        for (size_t i = 0; i < n; i++) {
            send[i] = byte_of(rank, 0, i);
        }
        comm_all_gather(comm, &device, recv, send, n);
        for (size_t i = 0; i < total; i++) {
            unsigned char want = byte_of((int)(i / n), 0, i % n);
            expect(recv[i] == want, "all-gather of %zu%s: byte %zu of rank %zu is %d, want %d", n,
                   in_place ? " in place" : "", i % n, i / n, recv[i], want);
        }
        expect(recv[total] == 0xEE, "all-gather of %zu wrote behind its end", n);
        free(recv);
        free(own);
    }
}

// Several at once, of unlike sizes, one of them empty: every one as if it were alone, and all together one collective.
static void test_all_gathers(void) {
    enum { GATHERS = 4 };
    static const size_t sizes[GATHERS] = {4097, 0, 16, 70001};
    int rank = comm_rank(comm), ranks = comm_num_ranks(comm);
    CommGather gathers[GATHERS];
    uint64_t bytes = 0;
    for (int g = 0; g < GATHERS; g++) {
        unsigned char* recv = (unsigned char*)malloc_or_die(sizes[g] * (size_t)ranks + 1);
        memset(recv, 0xEE, sizes[g] * (size_t)ranks + 1);
        for (size_t i = 0; i < sizes[g]; i++) {
            recv[(size_t)rank * sizes[g] + i] = byte_of(rank, g, i);
        }
        CommGather gather = {recv, recv + (size_t)rank * sizes[g], sizes[g]};
        gathers[g] = gather;
        bytes += (uint64_t)(ranks - 1) * sizes[g];
    }
    comm_take_stats(comm);
    comm_begin(comm, &device);
    comm_all_gathers(comm, &device, gathers, GATHERS);
    comm_end(comm, &device);
    CommStats stats = comm_take_stats(comm);
    expect(stats.bytes == bytes && stats.ops[COMM_ALL_GATHER].calls == (ranks > 1), "all-gathers: %llu bytes in %llu "
           "collectives, want %llu in %d", (unsigned long long)stats.bytes,
           (unsigned long long)stats.ops[COMM_ALL_GATHER].calls, (unsigned long long)bytes, ranks > 1);
    for (int g = 0; g < GATHERS; g++) {
        unsigned char* recv = (unsigned char*)gathers[g].recv;
        size_t n = sizes[g], total = n * (size_t)ranks;
        for (size_t i = 0; i < total; i++) {
            unsigned char want = byte_of((int)(i / n), g, i % n);
            expect(recv[i] == want, "all-gather %d of %d: byte %zu of rank %zu is %d, want %d", g, GATHERS, i % n, i / n,
                   recv[i], want);
        }
        expect(recv[total] == 0xEE, "all-gather %d of %d wrote behind its end", g, GATHERS);
        free(recv);
    }
}

// BF16 as the CPU floor holds it, in --precision fp32 not rounded. In place and not.
static void reduce_scatter_case(size_t n, int narrow, int in_place, int fp32) {
    int rank = comm_rank(comm), ranks = comm_num_ranks(comm);
    size_t total = n * (size_t)ranks;
    device.fp32 = fp32;
    float* send = (float*)malloc_or_die((total + 1) * sizeof(float));
    float* own = (float*)malloc_or_die((n + 1) * sizeof(float));
    float* recv = in_place ? send + n * (size_t)rank : own;
    for (size_t i = 0; i < total; i++) {
        float x = contribution(rank, i);
        send[i] = narrow ? bf16_stored(&device, x) : x;
    }
    own[n] = 42.0f;
    if (narrow) {
        comm_reduce_scatter_bf16(comm, &device, recv, send, n);
    } else {
        comm_reduce_scatter_fp32(comm, &device, recv, send, n);
    }
    for (size_t i = 0; i < n; i++) {
        float want = 0.0f;
        for (int r = 0; r < ranks; r++) {
            float x = contribution(r, n * (size_t)rank + i);
            x = narrow ? bf16_stored(&device, x) : x;
            want = r == 0 ? x : want + x;
        }
        want = narrow ? bf16_stored(&device, want) : want;
        expect(recv[i] == want, "reduce-scatter of %zu, bf16 %d, in place %d, fp32 %d: [%zu] is %.9g, want %.9g", n,
               narrow, in_place, fp32, i, (double)recv[i], (double)want);
    }
    expect(own[n] == 42.0f, "reduce-scatter of %zu wrote behind its end", n);
    device.fp32 = 0;
    free(send);
    free(own);
}

static void test_reduce_scatter(void) {
    size_t sizes[] = {0, 1, 7, 1000, COMM_PIECE / 2 + 1, 3 * COMM_PIECE + 5};
    for (int s = 0; s < 6; s++) {
        for (int way = 0; way < 8; way++) {
            reduce_scatter_case(sizes[s], way & 1, way & 2, way & 4);
        }
    }
}

// Codes of all kinds: sums that saturate, subnormal ones, NaN. In rank order, rounded after every addition.
static void test_all_reduce_e4m3(void) {
    size_t sizes[] = {0, 1, 7, 1000, COMM_PIECE, 3 * COMM_PIECE + 5};
    int rank = comm_rank(comm), ranks = comm_num_ranks(comm);
    size_t saturated = 0, rounded = 0;
    for (int s = 0; s < 6; s++) {
        size_t n = sizes[s];
        uint8_t* data = (uint8_t*)malloc_or_die(n + 1);
        for (size_t i = 0; i < n; i++) {
            data[i] = byte_of(rank, 0, i);
        }
        data[n] = 0xEE;
        comm_begin(comm, &device);
        comm_all_reduce_e4m3(comm, &device, data, n);
        comm_end(comm, &device);
        for (size_t i = 0; i < n; i++) {
            uint8_t want = byte_of(0, 0, i);
            for (int r = 1; r < ranks; r++) {
                float sum = float_from_e4m3(want) + float_from_e4m3(byte_of(r, 0, i));
                want = e4m3_from_float(sum);
                saturated += fabsf(sum) > 448.0f;
                rounded += !isnan(sum) && sum != float_from_e4m3(want);
            }
            expect(data[i] == want, "all-reduce of %zu: [%zu] is %02x, want %02x", n, i, data[i], want);
        }
        expect(data[n] == 0xEE, "all-reduce of %zu wrote behind its end", n);
        free(data);
    }
    expect(ranks == 1 || (saturated > 100 && rounded > 1000), "%zu sums saturate, %zu are rounded", saturated, rounded);
}

// Bytes on the wire, by the formulas of floor.h; times that are neither nothing nor more than there was.
static void test_stats(void) {
    uint64_t ranks = (uint64_t)comm_num_ranks(comm), others = ranks - 1;
    static float a[4 * 1200], b[4 * 1200];
    if (ranks > 4) { return; }
    comm_take_stats(comm);
    double start = watchdog_now();
    comm_all_to_all(comm, &device, b, a, 1001);
    comm_all_to_all(comm, &device, b, a, 0);
    comm_all_to_all(comm, &device, b, a, 64);
    comm_all_gather(comm, &device, b, a, 4097);
    comm_reduce_scatter_bf16(comm, &device, b, a, 1200);
    comm_reduce_scatter_fp32(comm, &device, b, a, 1200);
    comm_sum(comm, &device, a, 1200);
    comm_max(comm, &device, a, 12);
    static uint8_t codes[1200];
    comm_all_reduce_e4m3(comm, &device, codes, 1200);
    double passed = watchdog_now() - start;
    CommStats stats = comm_take_stats(comm);
    uint64_t want[COMM_OPS] = {
        2 * others * 4800 / ranks, 2 * others * 48 / ranks, others * 1065, others * 4097, others * 2400, others * 4800,
        2 * others * 1200 / ranks};
    uint64_t bytes = 0;
    double seconds = 0.0;
    for (int op = 0; op < COMM_OPS; op++) {
        uint64_t calls = ranks == 1 ? 0 : op == COMM_ALL_TO_ALL ? 2 : 1;
        expect(stats.ops[op].calls == calls && stats.ops[op].bytes == want[op],
               "%s: %llu calls, %llu bytes, want %llu, %llu", ranks_op_names[op],
               (unsigned long long)stats.ops[op].calls, (unsigned long long)stats.ops[op].bytes,
               (unsigned long long)calls, (unsigned long long)want[op]);
        bytes += want[op];
        seconds += stats.ops[op].seconds;
        expect(ranks == 1 || stats.ops[op].seconds > 0.0, "%s took no time", ranks_op_names[op]);
    }
    expect(stats.bytes == bytes, "%llu bytes in all, want %llu", (unsigned long long)stats.bytes,
           (unsigned long long)bytes);
    expect(fabs(stats.seconds - seconds) < 1e-9 && stats.exposed_s == stats.seconds && seconds <= passed,
           "%g s, exposed %g s, sum %g s, of %g s", stats.seconds, stats.exposed_s, seconds, passed);
    stats = comm_take_stats(comm);
    expect(stats.bytes == 0 && stats.seconds == 0.0, "taken stats are still there");
}

// A rank that is late, but busy or in time, is waited for.
static void test_patience(void) {
    comm_set_timeout(comm, 1.0);
    if (comm_rank(comm) == comm_num_ranks(comm) - 1) {
        comm_set_busy(comm, 1);
        sleep(3);
        comm_barrier(comm);
        comm_set_busy(comm, 0);
    } else {
        comm_barrier(comm);
    }
    comm_set_timeout(comm, RANKS_TIMEOUT_S);
    comm_barrier(comm);
}

// ---------------------------------------------------------------------------------------------------------------------
// runs that fail

enum { TIMEOUT_S = 2, STEPS = 100000000 };

// What a rank of such a run does: steps of one all-gather, until in step 20 rank `victim` does `what`.
static int fail_as_rank(const char* what, int victim) {
    static char all[64 * 16];
    comm_set_timeout(comm, TIMEOUT_S);
    int last = strcmp(what, "pause") == 0 ? 40 : STEPS;
    for (int step = 0; step < last; step++) {
        if (step == 20 && comm_rank(comm) == victim) {
            if (strcmp(what, "kill") == 0) { kill(getpid(), SIGKILL); }
            if (strcmp(what, "stop") == 0) { kill(getpid(), SIGSTOP); }
            check(strcmp(what, "fail") != 0, "this rank fails");
            while (strcmp(what, "hang") == 0) {
                sleep(1);
            }
        }
        // 4 s in all, in which the others wait in the collective: there they are suspended
        if (strcmp(what, "pause") == 0 && comm_rank(comm) == victim) { usleep(100000); }
        comm_all_gather(comm, &device, all, all + 16 * comm_rank(comm), 16);
    }
    comm_free(comm);
    return 0;
}

// Processes that have `mark` in their command line and are this program; SIGSTOP and the like are sent to each.
static int find_marked(const char* mark, int number) {
    int found = 0;
    DIR* proc = opendir("/proc");
    check(proc != NULL, "cannot read /proc: %s", strerror(errno));
    for (struct dirent* entry = readdir(proc); entry != NULL; entry = readdir(proc)) {
        char path[512], line[4096];
        if (!isdigit((unsigned char)entry->d_name[0])) { continue; }
        snprintf(path, sizeof(path), "/proc/%s/cmdline", entry->d_name);
        FILE* f = fopen(path, "r");
        if (f == NULL) { continue; }
        size_t n = fread(line, 1, sizeof(line) - 1, f);
        fclose(f);
        line[n] = 0;
        if (n == 0 || strstr(line, "test_comm") == NULL) { continue; } // a rank: argument 0 is this program's path
        int is_marked = 0;
        for (const char* argument = line; argument < line + n; argument += strlen(argument) + 1) {
            is_marked |= strcmp(argument, mark) == 0;
        }
        if (is_marked) {
            found++;
            if (number != 0) { kill((pid_t)atoi(entry->d_name), number); }
        }
    }
    closedir(proc);
    return found;
}

static void own_path(char* path, size_t bytes) {
    ssize_t length = readlink("/proc/self/exe", path, bytes - 1);
    check(length > 0, "cannot find this program's own path: %s", strerror(errno));
    path[length] = 0;
}

typedef struct {
    int status; // of mpirun, 124: it had to be ended
    double seconds;
    char output[16384];
} Outcome;

static Outcome* run_failing(int ranks, int recovery, const char* what, int victim) {
    static int runs;
    static Outcome outcome;
    char path[1024], rank[2048], command[4096], mark[64], line[1024];
    own_path(path, sizeof(path));
    snprintf(mark, sizeof(mark), "mark_%ld_%d", (long)getpid(), runs++);
    snprintf(rank, sizeof(rank), "'%s' fail %s %d %s", path, what, victim, mark);
    // with recovery enabled mpirun drops the exit status of a rank: a shell around it prints it
    snprintf(command, sizeof(command), "timeout -k 1 30 mpirun --allow-run-as-root --oversubscribe -n %d %s%s%s 2>&1",
             ranks, recovery ? "--enable-recovery sh -c \"" : "", rank, recovery ? "; echo status \\$?\"" : "");
    double start = watchdog_now();
    FILE* f = popen(command, "r");
    check(f != NULL, "cannot run mpirun: %s", strerror(errno));
    if (strcmp(what, "pause") == 0) { // all of them, for longer than a collective may take
        sleep(2);
        expect(find_marked(mark, SIGSTOP) >= ranks, "cannot find the ranks to suspend them");
        sleep(2 * TIMEOUT_S);
        find_marked(mark, SIGCONT);
    }
    outcome.output[0] = 0;
    while (fgets(line, sizeof(line), f)) {
        strncat(outcome.output, line, sizeof(outcome.output) - strlen(outcome.output) - 1);
    }
    int status = pclose(f);
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
    outcome.seconds = watchdog_now() - start;
    for (int i = 0; i < 40 && find_marked(mark, 0) > 0; i++) { // mpirun may end a moment before the ranks it has killed
        usleep(50000);
    }
    int left = find_marked(mark, SIGKILL);
    expect(left == 0, "%s of rank %d of %d: %d processes were left behind", what, victim, ranks, left);
    return &outcome;
}

static int count_lines(const char* text, const char* line) {
    int count = 0;
    for (const char* at = strstr(text, line); at != NULL; at = strstr(at + 1, line)) {
        count++;
    }
    return count;
}

// Every survivor says it, in one line, in time. Without recovery mpirun ends the others when the first has.
static void expect_named(int ranks, int recovery, const char* what, int victim, const char* how) {
    Outcome* o = run_failing(ranks, recovery, what, victim);
    int named = 0, want = recovery ? ranks - 1 : 1;
    for (int r = 0; r < ranks; r++) {
        char begin[128], name[64];
        snprintf(begin, sizeof(begin), "error: rank %d of %d, in all-gather (collective 21): ", r, ranks);
        snprintf(name, sizeof(name), "rank %d (", victim);
        const char* line = strstr(o->output, begin);
        if (line == NULL || r == victim) { continue; }
        char text[1024];
        snprintf(text, sizeof(text), "%.*s", (int)strcspn(line, "\n"), line);
        const char* missing = strstr(text + strlen(begin), name);
        named += missing != NULL && strstr(missing, how) != NULL;
    }
    expect(named >= want, "%s of rank %d of %d: %d ranks named it ('%s'), want %d:\n%s", what, victim, ranks, named,
           how, want, o->output);
    expect(recovery ? count_lines(o->output, "status 1\n") >= ranks - 1 : o->status != 0 && o->status != 124,
           "%s of rank %d of %d: status %d:\n%s", what, victim, ranks, o->status, o->output);
    expect(o->seconds < TIMEOUT_S + 8, "%s of rank %d of %d took %.1f s:\n%s", what, victim, ranks, o->seconds,
           o->output);
}

// This program again, under mpirun. Leak checking is off: OpenMPI itself leaves memory behind.
static void run_ranks(int num_ranks) {
    char path[1024], command[2048];
    own_path(path, sizeof(path));
    snprintf(command, sizeof(command), "timeout -k 1 120 mpirun --allow-run-as-root --oversubscribe -n %d '%s' 2>&1",
             num_ranks, path);
    FILE* f = popen(command, "r");
    check(f != NULL, "cannot run mpirun: %s", strerror(errno));
    char line[1024], output[8192] = "";
    while (fgets(line, sizeof(line), f)) {
        strncat(output, line, sizeof(output) - strlen(output) - 1);
    }
    int status = pclose(f);
    char summary[64];
    snprintf(summary, sizeof(summary), "%d ranks: 9 passed, 0 failed", num_ranks);
    expect(status == 0 && strstr(output, summary) != NULL, "mpirun -n %d: status %d, wanted '%s', got:\n%s", num_ranks,
           status, summary, output);
}

static int has_mpirun(void) {
    static int is_there = -1;
    if (is_there < 0) {
        is_there = system("mpirun --version > /dev/null 2>&1") == 0;
        setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
        setenv("OMP_NUM_THREADS", "1", 1);
    }
    if (!is_there) { unit_skip("no mpirun"); }
    return is_there;
}

static void test_ranks(void) {
    for (int ranks = 2; ranks <= 4 && has_mpirun(); ranks++) {
        run_ranks(ranks);
    }
}

// mpirun ends a job of which a process has died, before anybody else can speak, and says which rank it was. With
// recovery enabled it leaves the others alone, as srun does: then it is the watchdog that notices.
static void test_rank_dies(void) {
    if (!has_mpirun()) { return; }
    Outcome* o = run_failing(3, 0, "kill", 1);
    expect(o->status != 0 && o->status != 124 && strstr(o->output, "process rank 1 ") != NULL && o->seconds < 10.0,
           "kill of rank 1: status %d, %.1f s:\n%s", o->status, o->seconds, o->output);
    expect_named(3, 1, "kill", 1, "has ended, ");
    expect_named(4, 1, "kill", 0, "has ended, ");
}

static void test_rank_fails(void) {
    if (!has_mpirun()) { return; }
    Outcome* o = run_failing(3, 0, "fail", 2);
    expect(o->status == 1 && strstr(o->output, "error: this rank fails") != NULL && o->seconds < 10.0,
           "failure of rank 2: status %d, %.1f s:\n%s", o->status, o->seconds, o->output);
    expect_named(3, 1, "fail", 2, "has ended, ");
}

static void test_rank_stops(void) {
    if (!has_mpirun()) { return; }
    expect_named(3, 0, "stop", 2, "gives no sign of life for ");
    expect_named(2, 0, "stop", 1, "gives no sign of life for ");
    expect_named(2, 0, "stop", 0, "gives no sign of life for ");
}

static void test_rank_hangs(void) {
    if (!has_mpirun()) { return; }
    expect_named(4, 1, "hang", 2, "is alive but has not called it; it is after collective 20");
    expect_named(2, 0, "hang", 0, "is alive but has not called it; it is after collective 20");
}

static void test_suspended_job(void) {
    if (!has_mpirun()) { return; }
    Outcome* o = run_failing(3, 0, "pause", 0);
    expect(o->status == 0 && strstr(o->output, "error") == NULL, "a suspended job: status %d, %.1f s:\n%s", o->status,
           o->seconds, o->output);
}

int main(int argc, char** argv) {
    comm = comm_create(&argc, &argv);
    if (argc > 3 && strcmp(argv[1], "fail") == 0) { return fail_as_rank(argv[2], atoi(argv[3])); }
    const char* launched = getenv("OMPI_COMM_WORLD_SIZE");
    int rank = comm_rank(comm), num_ranks = comm_num_ranks(comm), want = launched ? atoi(launched) : 1;
    check(num_ranks == want, "%d ranks, want %d", num_ranks, want);
    unit_run(test_sum);
    unit_run(test_max_and_host);
    unit_run(test_all_to_all);
    unit_run(test_all_gather);
    unit_run(test_all_gathers);
    unit_run(test_reduce_scatter);
    unit_run(test_all_reduce_e4m3);
    unit_run(test_stats);
    if (launched == NULL) {
        unit_run(test_ranks);
        unit_run(test_rank_dies);
        unit_run(test_rank_fails);
        unit_run(test_rank_stops);
        unit_run(test_rank_hangs);
        unit_run(test_suspended_job);
        comm_free(comm);
        return unit_report();
    }
    unit_run(test_patience);
    float failed = (float)unit_state.failed;
    comm_sum(comm, &device, &failed, 1);
    if (rank == 0) { printf("%d ranks: %d passed, %d failed\n", num_ranks, unit_state.passed, (int)failed); }
    comm_free(comm);
    return failed > 0.0f;
}
