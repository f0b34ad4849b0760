// lib/watchdog.h without MPI and without a GPU: the ranks are forked processes, their device is a few shared numbers.
// What test_comm.c cannot show: the device's lane, asynchronous errors, `abort`, a main thread that is kept from going
// on.
#include "../../lib/watchdog.h"

#include "unit.h"

#include <sys/mman.h>

enum { MAX_RANKS = 4, ALL_GATHER = 1, TIMEOUT_S = 2 };
static const char* const names[] = {"sum", "all-gather"};

// What the processes of a run share. A "device" collective of rank r has begun or finished as its numbers say.
typedef struct {
    WatchAddress address;
    volatile int has_address, aborted[MAX_RANKS];
    volatile uint64_t begun[MAX_RANKS], finished[MAX_RANKS];
    volatile uint64_t steps_after_abort[MAX_RANKS]; // main thread's, behind its rank's abort
    volatile int fails[MAX_RANKS];                  // the device's asynchronous error
    char output[MAX_RANKS][1024];
    int status[MAX_RANKS]; // exit status; 1000 + signal
    double seconds[MAX_RANKS];
} Shared;

static Shared* shared;

typedef struct {
    int rank;
    int hangs_in_abort;
} Rank;

static void look(void* context, WatchLane* device, char* error, size_t error_bytes) {
    int rank = ((Rank*)context)->rank;
    device->finished = shared->finished[rank];
    device->begun = shared->begun[rank];
    device->op = ALL_GATHER;
    if (shared->fails[rank]) { snprintf(error, error_bytes, "NCCL: connection closed by remote peer"); }
}

static void abort_device(void* context) {
    Rank* rank = (Rank*)context;
    shared->aborted[rank->rank] = 1;
    if (rank->hangs_in_abort) { sleep(1000); }
    usleep(300000);
}

static int has_strangers;
static void talk_as_strangers(void);

// Runs rank functions as processes and collects exit status, stderr and duration.
static void run_ranks(int ranks, void (*as_rank)(Watchdog*, Rank*), double timeout_s, int hangs_in_abort) {
    int outputs[MAX_RANKS];
    pid_t children[MAX_RANKS];
    memset(shared, 0, sizeof(*shared));
    fflush(stdout);
    for (int r = 0; r < ranks; r++) {
        int ends[2];
        check(pipe(ends) == 0, "pipe: %s", strerror(errno));
        children[r] = fork();
        if (children[r] == 0) {
            dup2(ends[1], 2);
            close(ends[0]);
            close(ends[1]);
            Rank rank = {r, hangs_in_abort};
            WatchOptions options = {r, ranks, timeout_s, names, look, abort_device, &rank};
            Watchdog* w = watchdog_create(options);
            if (r == 0) {
                shared->address = watchdog_listen(w);
                watchdog_start(w, &shared->address, 1);
                shared->has_address = 1;
            } else {
                while (!shared->has_address) {
                    usleep(1000);
                }
                if (has_strangers) { talk_as_strangers(); }
                watchdog_start(w, &shared->address, 1);
            }
            as_rank(w, &rank);
            watchdog_stop(w);
            _exit(0);
        }
        close(ends[1]);
        outputs[r] = ends[0];
    }
    double start = watchdog_now();
    for (int r = 0; r < ranks; r++) {
        size_t length = 0;
        for (ssize_t n;
             (n = read(outputs[r], shared->output[r] + length, sizeof(shared->output[r]) - 1 - length)) > 0;) {
            length += (size_t)n;
        }
        close(outputs[r]);
        int status = 0;
        waitpid(children[r], &status, 0);
        shared->status[r] = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
        shared->seconds[r] = watchdog_now() - start;
    }
}

// `text` in the one line that a rank has written; status 1 in time.
static void expect_says(int rank, const char* begin, const char* text, double at_most_s) {
    const char* said = shared->output[rank];
    expect(strncmp(said, begin, strlen(begin)) == 0 && strstr(said, text) != NULL,
           "rank %d said '%s', want '%s ... %s'", rank, said, begin, text);
    expect(strchr(said, '\n') != NULL && strchr(said, '\n')[1] == 0, "rank %d: want one line, got '%s'", rank, said);
    expect(shared->status[rank] == 1 && shared->seconds[rank] < at_most_s, "rank %d: status %d after %.1f s", rank,
           shared->status[rank], shared->seconds[rank]);
}

// The main thread of a rank: goes on for ever, as one does that looks at what a collective has left behind.
static void work_for_ever(const Rank* rank) {
    for (;;) {
        if (shared->aborted[rank->rank]) { shared->steps_after_abort[rank->rank]++; }
        usleep(1000);
    }
}

// Rank 2 has queued its collective, but its device does not come to it.
static void late_device(Watchdog* w, Rank* rank) {
    watchdog_enter(w, ALL_GATHER);
    watchdog_leave(w);
    shared->begun[rank->rank] = rank->rank == 2 ? 0 : 1;
    work_for_ever(rank);
}

static void test_late_device(void) {
    run_ranks(4, late_device, TIMEOUT_S, 0);
    for (int r = 0; r < 4; r++) {
        char begin[128];
        snprintf(begin, sizeof(begin), "error: rank %d of 4, %s: not done in 2 s: rank 2 (", r,
                 r == 2 ? "after collective 1" : "in all-gather (collective 1)");
        expect_says(r, begin, "has called it but its device has not come to it; it is after collective 1",
                    TIMEOUT_S + 3);
        expect(shared->aborted[r] && shared->steps_after_abort[r] == 0,
               "rank %d: aborted %d, and its main thread made %d more steps", r, shared->aborted[r],
               (int)shared->steps_after_abort[r]);
    }
}

// All ranks are in the collective, and it does not finish.
static void stuck(Watchdog* w, Rank* rank) {
    watchdog_enter(w, ALL_GATHER);
    watchdog_leave(w);
    shared->begun[rank->rank] = 1;
    work_for_ever(rank);
}

static void test_all_stuck(void) {
    run_ranks(3, stuck, TIMEOUT_S, 0);
    for (int r = 0; r < 3; r++) {
        char begin[128];
        snprintf(begin, sizeof(begin), "error: rank %d of 3, in all-gather (collective 1): not done in 2 s: ", r);
        expect_says(r, begin, "every rank has begun it", TIMEOUT_S + 3);
    }
}

static void test_abort_hangs(void) {
    run_ranks(2, stuck, TIMEOUT_S, 1);
    for (int r = 0; r < 2; r++) {
        expect_says(r, "error: rank ", "every rank has begun it", TIMEOUT_S + WATCH_ABORT_S + 3);
        expect(shared->aborted[r], "rank %d did not abort", r);
    }
}

// An asynchronous error of rank 1 alone; then together with the end of rank 2, which is the reason.
static void device_fails(Watchdog* w, Rank* rank) {
    watchdog_enter(w, ALL_GATHER);
    watchdog_leave(w);
    shared->begun[rank->rank] = 1;
    shared->fails[rank->rank] = rank->rank == 1;
    work_for_ever(rank);
}

static void device_fails_for_a_reason(Watchdog* w, Rank* rank) {
    if (rank->rank == 2) {
        usleep(500000);
        _exit(3);
    }
    device_fails(w, rank);
}

static void test_asynchronous_error(void) {
    run_ranks(3, device_fails, 60.0, 0);
    for (int r = 0; r < 3; r++) {
        expect_says(r, "error: rank ", ": NCCL: connection closed by remote peer\n", 4.0);
    }
    run_ranks(3, device_fails_for_a_reason, 60.0, 0);
    for (int r = 0; r < 2; r++) {
        expect_says(r, "error: rank ", ": rank 2 (", 4.0);
        expect_says(r, "error: rank ", " has ended, last heard of ", 4.0);
    }
    expect(shared->status[2] == 3 && shared->output[2][0] == 0, "rank 2: status %d, '%s'", shared->status[2],
           shared->output[2]);
}

// A device that is slow but moves is nobody's fault, and ranks may leave one after the other.
static void slow_device(Watchdog* w, Rank* rank) {
    for (int i = 1; i <= 4; i++) {
        watchdog_enter(w, ALL_GATHER);
        watchdog_leave(w);
        shared->begun[rank->rank] = (uint64_t)i;
        usleep(700000);
        shared->finished[rank->rank] = (uint64_t)i;
    }
    usleep((useconds_t)rank->rank * 700000);
}

static void leave_in_reverse(Watchdog* w, Rank* rank) {
    (void)w;
    usleep((useconds_t)(2 - rank->rank) * 700000);
}

static void test_no_false_alarm(void) {
    for (int i = 0; i < 2; i++) {
        run_ranks(3, i == 0 ? slow_device : leave_in_reverse, 1.2, 0);
        for (int r = 0; r < 3; r++) {
            expect(shared->status[r] == 0 && shared->output[r][0] == 0, "rank %d of a healthy run: status %d, '%s'", r,
                   shared->status[r], shared->output[r]);
        }
    }
}

// Rank `late_rank` is busy for most of the timeout, and then has a step to make up for that the others have made.
static int late_rank, comes_back;
static void busy_device(Watchdog* w, Rank* rank) {
    if (rank->rank == late_rank) {
        watchdog_busy(w, 1);
        usleep(1700000);
        watchdog_busy(w, 0);
        usleep(1300000);
        if (!comes_back) { work_for_ever(rank); }
    }
    watchdog_enter(w, ALL_GATHER);
    watchdog_leave(w);
    shared->begun[rank->rank] = 1;
    for (int r = 0; r < 3; r++) {
        while (shared->begun[r] == 0) {
            usleep(1000);
        }
    }
    shared->finished[rank->rank] = 1;
}

static void test_busy_before(void) {
    comes_back = 1;
    for (late_rank = 0; late_rank < 2; late_rank++) {
        run_ranks(3, busy_device, TIMEOUT_S, 0);
        for (int r = 0; r < 3; r++) {
            expect(shared->status[r] == 0 && shared->output[r][0] == 0, "rank %d, busy was %d: status %d, '%s'", r,
                   late_rank, shared->status[r], shared->output[r]);
        }
    }
}

// It does not come back: it has the timeout from when it was busy last, and no more.
static void test_hangs_behind_busy(void) {
    comes_back = 0;
    for (late_rank = 0; late_rank < 2; late_rank++) {
        run_ranks(3, busy_device, TIMEOUT_S, 0);
        char text[64];
        snprintf(text, sizeof(text), "not done in 2 s: rank %d (", late_rank);
        for (int r = 0; r < 3; r++) {
            expect_says(r, "error: rank ", text, 1.7 + TIMEOUT_S + WATCH_ASK_S + 2.0);
            expect(shared->seconds[r] > 1.7 + TIMEOUT_S, "rank %d: after %.1f s", r, shared->seconds[r]);
        }
    }
}

// No timeout: a rank that dies is noticed all the same.
static void dies_without_timeout(Watchdog* w, Rank* rank) {
    (void)w;
    if (rank->rank == 1) { kill(getpid(), SIGKILL); }
    work_for_ever(rank);
}

static void test_no_timeout(void) {
    run_ranks(2, dies_without_timeout, 0.0, 0);
    expect_says(0, "error: rank 0 of 2, after collective 0: rank 1 ", " has ended", 4.0);
}

// Somebody else talks to rank 0's port, before rank 1 does: what he says counts for nothing.
static void talk_as_strangers(void) {
    struct sockaddr_in to;
    memset(&to, 0, sizeof(to));
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = (in_port_t)shared->address.port;
    for (int i = 0; i < 3; i++) {
        WatchMessage m;
        memset(&m, 0, sizeof(m));
        m.kind = i == 0 ? (uint32_t)WATCH_VERDICT : (uint32_t)WATCH_HELLO;
        m.rank = i == 2 ? 0x7FFFFFFF : 1;
        m.secret = i == 1 ? ~shared->address.secret : shared->address.secret;
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        struct timeval patience = {3, 0};
        char byte;
        check(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) == 0, "%s", strerror(errno));
        check(connect(fd, (struct sockaddr*)&to, sizeof(to)) == 0, "connect: %s", strerror(errno));
        check(send(fd, &m, sizeof(m), MSG_NOSIGNAL) == (ssize_t)sizeof(m), "send: %s", strerror(errno));
        check(recv(fd, &byte, 1, 0) == 0, "stranger %d was not shown the door", i);
        close(fd);
    }
}

static void meet_strangers(Watchdog* w, Rank* rank) {
    (void)w;
    (void)rank;
    usleep(600000);
}

static void test_strangers(void) {
    has_strangers = 1;
    run_ranks(2, meet_strangers, TIMEOUT_S, 0);
    has_strangers = 0;
    for (int r = 0; r < 2; r++) {
        expect(shared->status[r] == 0 && shared->output[r][0] == 0, "rank %d: status %d, '%s'", r, shared->status[r],
               shared->output[r]);
    }
}

int main(void) {
    shared = (Shared*)mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(shared != MAP_FAILED, "mmap: %s", strerror(errno));
    unit_run(test_late_device);
    unit_run(test_all_stuck);
    unit_run(test_abort_hangs);
    unit_run(test_asynchronous_error);
    unit_run(test_no_false_alarm);
    unit_run(test_busy_before);
    unit_run(test_hangs_behind_busy);
    unit_run(test_no_timeout);
    unit_run(test_strangers);
    return unit_report();
}
