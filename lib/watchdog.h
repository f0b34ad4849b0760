// Notices that a rank is missing. Collectives wait for ever: NCCL's kernels and MPI's loops do not see that a peer was
// killed, was stopped or hangs. So every rank of a run has one thread that keeps a TCP connection to rank 0's:
//
//     a rank was killed or failed    the kernel closes its socket: rank 0 knows at once, wherever it was
//     a rank is stopped, a host down its beats stop; noticed when a collective exceeds the timeout
//     a rank hangs or is late        its beats say which collective it has begun last; noticed in the same way
//     a rank is busy                 its beats say so (watchdog_busy): then the others wait on, and as long as the
//                                    timeout after that, in which it catches up
//
// Rank 0 judges, since it hears everybody; its verdict goes to all ranks, each prints it as one error line that names
// the rank itself, the collective it is in and the rank that is missing, ends what it can (`abort`) and exits with
// status 1. Sockets of our own, because they still work when a rank is dead: MPI's answer to that is undefined, a
// second thread inside MPI needs MPI_THREAD_MULTIPLE, which not every transport has, and shared memory ends at the
// host. A rank that cannot reach rank 0 warns and has its own timeout left, without names.
//
// Time is counted only while the thread runs: a job that is suspended as a whole (Slurm, Ctrl-Z) goes on afterwards.
// A lane is a place where a rank may wait: the host, inside a call; the device, where a call has only queued the work.
// Collectives have one number, the same on every rank, since all ranks call the same ones in the same order.
#ifndef WATCHDOG_H
#define WATCHDOG_H

#include "check.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { WATCH_HOST, WATCH_DEVICE, WATCH_LANES };
enum { WATCH_MAX_ADDRESSES = 16, WATCH_TEXT = 320 };
#define WATCH_TICK_S 0.25     // how often the thread looks, and a rank's beats
#define WATCH_GRACE_S 1.0     // after a rank has gone: time for the others to fail for the same reason, in their words
#define WATCH_CONNECT_MS 3000 // to wait for an address of rank 0
#define WATCH_ASK_S 1.0       // a rank that was told to wait on asks again, and how long it waits for that answer
#define WATCH_ABORT_S 5       // `abort` may take, before the process ends without it
#define WATCH_PARK_SIGNAL (SIGRTMIN + 5)

// Where a rank is in a lane. In a collective while begun > finished.
typedef struct {
    uint64_t begun;    // number of the latest collective that has begun, 0: none
    uint64_t finished; // this one and all before it are done
    int32_t op;        // of `begun`: index into the names
    int32_t padding;
} WatchLane;

// How to find rank 0's thread; made there and carried to the others by the caller (MPI).
typedef struct {
    uint64_t secret;
    uint32_t addresses[WATCH_MAX_ADDRESSES]; // IPv4, network byte order, [0] for ranks of the same host
    uint32_t num_addresses;
    uint32_t port; // network byte order
} WatchAddress;

typedef struct {
    int rank, num_ranks;
    double timeout_s;         // of one collective; 0: none, then only dead ranks are noticed
    const char* const* names; // of the collectives
    // Called by the thread a few times a second: the device's lane; an asynchronous error goes to `error`, which is
    // empty otherwise. NULL: there is no such lane.
    void (*look)(void* context, WatchLane* device, char* error, size_t error_bytes);
    void (*abort)(void* context); // after the error line, before the exit; NULL: nothing
    void* context;
} WatchOptions;

typedef enum { WATCH_HELLO = 1, WATCH_WELCOME, WATCH_BEAT, WATCH_ASK, WATCH_VERDICT, WATCH_BYE } WatchKind;

// All that travels. Both ends are the same program.
typedef struct {
    uint32_t kind;
    int32_t rank;
    uint64_t secret;
    uint64_t number; // ASK: the collective that does not finish, 0: an error in `text`
    int32_t lane;    // ASK
    int32_t is_busy; // BEAT
    WatchLane lanes[WATCH_LANES];
    char text[WATCH_TEXT]; // HELLO: host and process
} WatchMessage;

typedef enum { WATCH_AWAY, WATCH_CONNECTED, WATCH_LEFT, WATCH_LOST } WatchState;

// What rank 0 knows of a rank; of rank 0, what the others know.
typedef struct {
    WatchState state;
    int fd;                // -1: none
    double heard, lost_at; // on the thread's clock
    double busy_at;        // when it was busy last, < 0: never
    WatchLane lanes[WATCH_LANES];
    char name[WATCH_TEXT]; // "rank 2 (host, process 1234)"
    WatchMessage in;       // the part of a message that is here
    size_t in_bytes;
} WatchPeer;

typedef struct {
    WatchOptions options;
    pthread_t thread, main_thread;
    pthread_mutex_t mutex; // of the next lines
    WatchLane host;
    double timeout_s;
    int num_busy; // reasons to be late
    int must_stop;
    // the thread's
    int wake[2];            // a pipe that ends its sleep
    int listener;           // rank 0: -1 otherwise
    uint64_t secret;        // of the run
    WatchPeer* peers;       // rank 0: (num_ranks); others: (1), rank 0
    int* strangers;         // rank 0: (num_ranks) connections that have not said who they are, -1: free
    struct pollfd* polled;  // (2 * num_ranks + 2)
    double clock_s, last_s; // its clock; the system's, last time
    WatchLane lanes[WATCH_LANES];
    uint64_t watched[WATCH_LANES]; // number of the collective whose time runs
    double since[WATCH_LANES];     // since when
    double error_at, asked_at;     // < 0: no error, nothing asked
    char error[WATCH_TEXT];
} Watchdog;

// snprintf for which a text that is cut is no mistake.
__attribute__((format(printf, 3, 4))) static inline int watchdog_text(char* text, size_t bytes, const char* format,
                                                                      ...) {
    va_list args;
    va_start(args, format);
    int length = vsnprintf(text, bytes, format, args);
    va_end(args);
    return length;
}

static inline double watchdog_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline void watchdog_park(int number) {
    (void)number;
    for (;;) {
        pause();
    }
}

static inline void* watchdog_abort_thread(void* w_) {
    Watchdog* w = (Watchdog*)w_;
    w->options.abort(w->options.context);
    return NULL;
}

// "in all-gather (collective 17)", of this rank's or a peer's lanes.
static inline void watchdog_where(const Watchdog* w, const WatchLane* lanes, char* text, size_t bytes) {
    for (int i = WATCH_LANES - 1; i >= 0; i--) {
        if (lanes[i].begun > lanes[i].finished) {
            watchdog_text(text, bytes, "in %s (collective %llu)", w->options.names[lanes[i].op],
                          (unsigned long long)lanes[i].begun);
            return;
        }
    }
    watchdog_text(text, bytes, "after collective %llu", (unsigned long long)lanes[WATCH_HOST].finished);
}

// Whole message or nothing; what does not fit into the socket's buffer is dropped, a broken connection is seen by read.
static inline void watchdog_send(const Watchdog* w, int fd, WatchKind kind, const char* text) {
    WatchMessage m;
    memset(&m, 0, sizeof(m));
    m.kind = (uint32_t)kind;
    m.rank = w->options.rank;
    m.secret = w->secret;
    memcpy(m.lanes, w->lanes, sizeof(m.lanes));
    watchdog_text(m.text, sizeof(m.text), "%s", text);
    if (fd >= 0) { (void)!send(fd, &m, sizeof(m), MSG_DONTWAIT | MSG_NOSIGNAL); }
}

// Tell the others, say it, end. Written with write(2): the main thread may hold stdio's locks for ever.
CHECK_NORETURN static inline void watchdog_fail(Watchdog* w, const char* verdict) {
    int num_peers = w->options.rank == 0 ? w->options.num_ranks : 1;
    for (int i = 0; i < num_peers; i++) {
        watchdog_send(w, w->peers[i].fd, WATCH_VERDICT, verdict);
    }
    char where[128], line[2 * WATCH_TEXT];
    watchdog_where(w, w->lanes, where, sizeof(where));
    int length = watchdog_text(line, sizeof(line), "error: rank %d of %d, %s: %s\n", w->options.rank,
                               w->options.num_ranks, where, verdict);
    if (length >= (int)sizeof(line)) {
        length = (int)sizeof(line) - 1;
        line[length - 1] = '\n';
    }
    if (ftrylockfile(stdout) == 0) {
        fflush(stdout);
        funlockfile(stdout);
    }
    (void)!write(STDERR_FILENO, line, (size_t)length);
    if (w->options.abort != NULL) {
        // Nobody may use what an aborted collective leaves behind: the main thread stays where it is.
        pthread_t helper;
        struct timespec until;
        pthread_kill(w->main_thread, WATCH_PARK_SIGNAL);
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += WATCH_ABORT_S;
        if (pthread_create(&helper, NULL, watchdog_abort_thread, w) == 0) {
            pthread_timedjoin_np(helper, NULL, &until);
        }
    }
    _exit(EXIT_FAILURE);
}

// Rank 0's judgement of the collective `number` that does not finish in `lane`; number 0: of `error` (empty when a rank
// was lost). Returns 0 when only ranks are missing that are busy, or were until now; otherwise `text` names the rank
// that is missing, the surest reason first.
static inline int watchdog_judge(Watchdog* w, int lane, uint64_t number, const char* error, char* text, size_t bytes) {
    enum { DEAD, SILENT, GONE, LATE, AWAY, REASONS };
    int first[REASONS], count[REASONS], num_busy = 0;
    memset(count, 0, sizeof(count));
    double timeout_s = w->options.timeout_s, silence_s = timeout_s > 0.0 && timeout_s < 10.0 ? timeout_s / 2 : 5.0;
    for (int r = 0; r < w->options.num_ranks; r++) {
        const WatchPeer* p = &w->peers[r];
        int reason = REASONS;
        if (p->state == WATCH_LOST) {
            reason = DEAD;
        } else if (p->state == WATCH_CONNECTED && r != 0 && w->clock_s - p->heard > silence_s) {
            reason = SILENT;
        } else if (number > 0 && p->lanes[lane].begun < number) {
            reason = p->state == WATCH_LEFT ? GONE : p->state == WATCH_AWAY ? AWAY : LATE;
            if (reason == LATE && p->busy_at >= 0.0 && w->clock_s - p->busy_at < timeout_s) {
                reason = REASONS;
                num_busy++;
            }
        }
        if (reason < REASONS && count[reason]++ == 0) { first[reason] = r; }
    }
    int reason = 0;
    while (reason < REASONS && count[reason] == 0) {
        reason++;
    }
    if (reason == REASONS && num_busy > 0) { return 0; }
    char missing[WATCH_TEXT], where[128], others[64] = "";
    const WatchPeer* p = reason < REASONS ? &w->peers[first[reason]] : NULL;
    if (p == NULL) {
        watchdog_text(missing, sizeof(missing), "every rank has begun it");
    } else {
        watchdog_where(w, p->lanes, where, sizeof(where));
        if (count[reason] > 1) { watchdog_text(others, sizeof(others), " (so are %d others)", count[reason] - 1); }
        if (reason == DEAD) {
            watchdog_text(missing, sizeof(missing), "%.180s has ended, last heard of %s%s", p->name, where, others);
        } else if (reason == SILENT) {
            watchdog_text(missing, sizeof(missing), "%.180s gives no sign of life for %.1f s, last heard of %s%s",
                          p->name, w->clock_s - p->heard, where, others);
        } else if (reason == LATE) {
            const char* how = p->lanes[WATCH_HOST].begun < number ? "is alive but has not called it"
                                                                  : "has called it but its device has not come to it";
            watchdog_text(missing, sizeof(missing), "%.180s %s; it is %s%s", p->name, how, where, others);
        } else {
            watchdog_text(missing, sizeof(missing), "%.180s %s%s", p->name,
                          reason == GONE ? "has left the run" : "was never heard of", others);
        }
    }
    if (number == 0 && p == NULL) {
        watchdog_text(text, bytes, "%s", error);
    } else if (number == 0) {
        watchdog_text(text, bytes, "%s%s%.60s", missing, error[0] != 0 ? ": " : "", error);
    } else {
        watchdog_text(text, bytes, "not done in %g s: %s", w->options.timeout_s, missing);
    }
    return 1;
}

// What a rank that is not 0 can say without rank 0.
static inline void watchdog_judge_alone(const Watchdog* w, char* text, size_t bytes) {
    const WatchPeer* hub = &w->peers[0];
    char missing[WATCH_TEXT];
    if (hub->state == WATCH_CONNECTED) {
        watchdog_text(missing, sizeof(missing), "%.180s gives no sign of life for %.1f s", hub->name,
                      w->clock_s - hub->heard);
    } else {
        watchdog_text(missing, sizeof(missing), "which rank is missing is not known, rank 0 %s",
                      hub->state == WATCH_LEFT ? "has left the run" : "cannot be reached");
    }
    if (w->error_at >= 0.0) {
        watchdog_text(text, bytes, "%.200s (%.100s)", w->error, missing);
    } else {
        watchdog_text(text, bytes, "not done in %g s: %s", w->options.timeout_s, missing);
    }
}

static inline void watchdog_drop(WatchPeer* p, WatchState state, double now) {
    close(p->fd);
    p->fd = -1;
    p->state = state;
    p->lost_at = now;
}

// A lane that is late is late again in a moment.
static inline void watchdog_wait_on(Watchdog* w, int lane) {
    double since = w->clock_s - w->options.timeout_s + WATCH_ASK_S;
    if (w->since[lane] < since) { w->since[lane] = since; }
}

// A whole message from p.
static inline void watchdog_receive(Watchdog* w, WatchPeer* p, const WatchMessage* m) {
    char text[WATCH_TEXT];
    p->heard = w->clock_s;
    memcpy(p->lanes, m->lanes, sizeof(p->lanes));
    if (m->kind == WATCH_BEAT) {
        if (m->is_busy) { p->busy_at = w->clock_s; }
        if (w->options.rank == 0) { watchdog_send(w, p->fd, WATCH_BEAT, ""); }
    } else if (m->kind == WATCH_ASK && w->options.rank == 0) {
        int lane = m->lane == WATCH_DEVICE ? WATCH_DEVICE : WATCH_HOST;
        if (watchdog_judge(w, lane, m->number, m->text, text, sizeof(text))) { watchdog_fail(w, text); }
        watchdog_send(w, p->fd, WATCH_ASK, ""); // wait on
    } else if (m->kind == WATCH_ASK) {
        for (int i = 0; i < WATCH_LANES; i++) {
            watchdog_wait_on(w, i);
        }
        w->asked_at = -1.0;
    } else if (m->kind == WATCH_VERDICT) {
        watchdog_fail(w, m->text);
    } else if (m->kind == WATCH_BYE) {
        watchdog_drop(p, WATCH_LEFT, w->clock_s);
    }
}

// Everything that p's socket holds; its end without a BYE is the end of p.
static inline void watchdog_read(Watchdog* w, WatchPeer* p) {
    while (p->fd >= 0) {
        ssize_t n = recv(p->fd, (char*)&p->in + p->in_bytes, sizeof(p->in) - p->in_bytes, MSG_DONTWAIT);
        if (n > 0) {
            p->in_bytes += (size_t)n;
            if (p->in_bytes == sizeof(p->in)) {
                p->in_bytes = 0;
                p->in.text[WATCH_TEXT - 1] = 0;
                watchdog_receive(w, p, &p->in);
            }
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
            return;
        } else {
            watchdog_drop(p, WATCH_LOST, w->clock_s);
        }
    }
}

// Rank 0: a connection that has not introduced itself. A rank sends its HELLO in one piece, with the run's secret.
static inline void watchdog_meet(Watchdog* w, int* stranger) {
    WatchMessage m;
    ssize_t n = recv(*stranger, &m, sizeof(m), MSG_DONTWAIT | MSG_PEEK);
    if (n > 0 && n < (ssize_t)sizeof(m)) { return; } // the rest is on its way
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) { return; }
    int fd = *stranger;
    *stranger = -1;
    if (n != (ssize_t)sizeof(m) || recv(fd, &m, sizeof(m), MSG_DONTWAIT) != n || m.kind != WATCH_HELLO ||
        m.secret != w->secret || m.rank <= 0 || m.rank >= w->options.num_ranks ||
        w->peers[m.rank].state != WATCH_AWAY) {
        close(fd);
        return;
    }
    WatchPeer* p = &w->peers[m.rank];
    m.text[WATCH_TEXT - 1] = 0;
    watchdog_text(p->name, sizeof(p->name), "%s", m.text);
    p->state = WATCH_CONNECTED;
    p->fd = fd;
    p->heard = w->clock_s;
    memcpy(p->lanes, m.lanes, sizeof(p->lanes));
    watchdog_send(w, fd, WATCH_WELCOME, w->peers[0].name);
}

static inline void watchdog_accept(Watchdog* w) {
    int fd = accept4(w->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    for (int i = 0; fd >= 0 && i < w->options.num_ranks; i++) {
        if (w->strangers[i] < 0) {
            w->strangers[i] = fd;
            return;
        }
    }
    if (fd >= 0) { close(fd); }
}

// Sleep until a socket has something or a tick is over, and serve the sockets.
static inline void watchdog_serve(Watchdog* w) {
    int num_peers = w->options.rank == 0 ? w->options.num_ranks : 1, n = 0;
    w->polled[n++].fd = w->wake[0];
    w->polled[n++].fd = w->listener;
    for (int i = 0; i < num_peers; i++) {
        w->polled[n++].fd = w->peers[i].fd;
    }
    for (int i = 0; w->options.rank == 0 && i < num_peers; i++) {
        w->polled[n++].fd = w->strangers[i];
    }
    for (int i = 0; i < n; i++) {
        w->polled[i].events = POLLIN;
        w->polled[i].revents = 0;
    }
    poll(w->polled, (nfds_t)n, (int)(WATCH_TICK_S * 1e3));
    // a thread that was not running for long was stopped: that time is nobody's fault
    double now = watchdog_now(), passed = now - w->last_s;
    w->last_s = now;
    w->clock_s += passed < 4 * WATCH_TICK_S ? passed : 4 * WATCH_TICK_S;
    if (w->polled[1].revents != 0) { watchdog_accept(w); }
    for (int i = 0; i < num_peers; i++) {
        if (w->peers[i].fd >= 0) { watchdog_read(w, &w->peers[i]); }
        if (w->options.rank == 0 && w->strangers[i] >= 0) { watchdog_meet(w, &w->strangers[i]); }
    }
}

// This rank's own state; what to do when a collective takes too long, or a rank was lost.
static inline void watchdog_watch(Watchdog* w) {
    char text[WATCH_TEXT];
    pthread_mutex_lock(&w->mutex);
    w->lanes[WATCH_HOST] = w->host;
    w->options.timeout_s = w->timeout_s;
    if (w->options.rank == 0 && w->num_busy > 0) { w->peers[0].busy_at = w->clock_s; }
    pthread_mutex_unlock(&w->mutex);
    if (w->options.look != NULL && w->error_at < 0.0) {
        w->error[0] = 0;
        w->options.look(w->options.context, &w->lanes[WATCH_DEVICE], w->error, sizeof(w->error));
        if (w->error[0] != 0) { w->error_at = w->clock_s; }
    }
    if (w->options.rank == 0) {
        memcpy(w->peers[0].lanes, w->lanes, sizeof(w->lanes));
        for (int r = 1; r < w->options.num_ranks; r++) {
            if (w->peers[r].state == WATCH_LOST && w->clock_s - w->peers[r].lost_at > WATCH_GRACE_S) {
                watchdog_judge(w, WATCH_HOST, 0, "", text, sizeof(text));
                watchdog_fail(w, text);
            }
        }
    } else if (w->peers[0].state == WATCH_LOST && w->clock_s - w->peers[0].lost_at > WATCH_GRACE_S) {
        char where[128];
        watchdog_where(w, w->peers[0].lanes, where, sizeof(where));
        watchdog_text(text, sizeof(text), "%.180s has ended, last heard of %s", w->peers[0].name, where);
        watchdog_fail(w, text);
    }
    int late = -1; // lane
    for (int i = 0; i < WATCH_LANES; i++) {
        const WatchLane* lane = &w->lanes[i];
        uint64_t number = lane->begun > lane->finished ? lane->begun : 0;
        if (number != w->watched[i]) {
            w->watched[i] = number;
            w->since[i] = w->clock_s;
        }
        if (number > 0 && w->options.timeout_s > 0.0 && w->clock_s - w->since[i] > w->options.timeout_s) { late = i; }
    }
    int has_error = w->error_at >= 0.0 && w->clock_s - w->error_at > WATCH_GRACE_S; // the dead have been buried by then
    if (late < 0 && !has_error) {
        w->asked_at = -1.0;
        return;
    }
    uint64_t number = has_error ? 0 : w->lanes[late].begun;
    if (w->options.rank == 0) {
        if (watchdog_judge(w, late, number, w->error, text, sizeof(text))) { watchdog_fail(w, text); }
        watchdog_wait_on(w, late); // somebody is busy, or was until now
    } else if (w->peers[0].fd < 0 || (w->asked_at >= 0.0 && w->clock_s - w->asked_at > WATCH_ASK_S)) {
        watchdog_judge_alone(w, text, sizeof(text));
        watchdog_fail(w, text);
    } else if (w->asked_at < 0.0) {
        WatchMessage ask;
        memset(&ask, 0, sizeof(ask));
        ask.kind = WATCH_ASK;
        ask.rank = w->options.rank;
        ask.lane = late < 0 ? WATCH_HOST : late;
        ask.number = number;
        memcpy(ask.lanes, w->lanes, sizeof(ask.lanes));
        watchdog_text(ask.text, sizeof(ask.text), "%s", w->error);
        (void)!send(w->peers[0].fd, &ask, sizeof(ask), MSG_DONTWAIT | MSG_NOSIGNAL);
        w->asked_at = w->clock_s;
    }
}

static inline void* watchdog_thread(void* w_) {
    Watchdog* w = (Watchdog*)w_;
    int must_stop = 0, num_peers = w->options.rank == 0 ? w->options.num_ranks : 1;
    double next_beat = 0.0;
    while (!must_stop) {
        watchdog_serve(w);
        watchdog_watch(w);
        pthread_mutex_lock(&w->mutex);
        must_stop = w->must_stop;
        WatchMessage beat;
        memset(&beat, 0, sizeof(beat));
        beat.kind = WATCH_BEAT;
        beat.rank = w->options.rank;
        beat.is_busy = w->num_busy > 0;
        pthread_mutex_unlock(&w->mutex);
        if (w->options.rank != 0 && w->clock_s >= next_beat && w->peers[0].fd >= 0) {
            memcpy(beat.lanes, w->lanes, sizeof(beat.lanes));
            (void)!send(w->peers[0].fd, &beat, sizeof(beat), MSG_DONTWAIT | MSG_NOSIGNAL);
            next_beat = w->clock_s + WATCH_TICK_S;
        }
    }
    for (int i = 0; i < num_peers; i++) {
        watchdog_send(w, w->peers[i].fd, WATCH_BYE, "");
    }
    return NULL;
}

// The watchdog of a rank, not yet watching. `options` is copied; what it points to must stay.
static inline Watchdog* watchdog_create(WatchOptions options) {
    Watchdog* w = (Watchdog*)calloc_or_die(1, sizeof(Watchdog));
    int num_peers = options.rank == 0 ? options.num_ranks : 1;
    w->options = options;
    w->timeout_s = options.timeout_s;
    w->main_thread = pthread_self();
    w->error_at = w->asked_at = -1.0;
    w->listener = -1;
    pthread_mutex_init(&w->mutex, NULL);
    w->peers = (WatchPeer*)calloc_or_die((size_t)num_peers, sizeof(WatchPeer));
    w->strangers = (int*)calloc_or_die((size_t)num_peers, sizeof(int));
    w->polled = (struct pollfd*)calloc_or_die((size_t)num_peers * 2 + 2, sizeof(struct pollfd));
    for (int i = 0; i < num_peers; i++) {
        w->peers[i].fd = w->strangers[i] = -1;
        w->peers[i].busy_at = -1.0;
        watchdog_text(w->peers[i].name, sizeof(w->peers[i].name), "rank %d", i);
    }
    check(pipe2(w->wake, O_CLOEXEC) == 0, "cannot make a pipe: %s", strerror(errno));
    return w;
}

// Name of this rank for the others: rank, host and process.
static inline void watchdog_name(const Watchdog* w, char* text, size_t bytes) {
    char host[65] = "?";
    gethostname(host, sizeof(host) - 1);
    watchdog_text(text, bytes, "rank %d (%s, process %ld)", w->options.rank, host, (long)getpid());
}

// Rank 0, before the others start: where they find it.
static inline WatchAddress watchdog_listen(Watchdog* w) {
    WatchAddress address;
    memset(&address, 0, sizeof(address));
    if (getrandom(&address.secret, sizeof(address.secret), 0) != (ssize_t)sizeof(address.secret)) {
        address.secret = (uint64_t)(watchdog_now() * 1e9) ^ (uint64_t)getpid();
    }
    w->secret = address.secret;
    struct sockaddr_in any;
    socklen_t length = sizeof(any);
    memset(&any, 0, sizeof(any));
    any.sin_family = AF_INET;
    w->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (w->listener < 0 || bind(w->listener, (struct sockaddr*)&any, sizeof(any)) != 0 ||
        listen(w->listener, w->options.num_ranks + 16) != 0 ||
        getsockname(w->listener, (struct sockaddr*)&any, &length) != 0) {
        warning("rank 0 cannot listen for the other ranks (%s): a rank that is missing will not be named",
                strerror(errno));
        return address;
    }
    address.port = any.sin_port;
    address.addresses[address.num_addresses++] = htonl(INADDR_LOOPBACK);
    struct ifaddrs* interfaces = NULL;
    if (getifaddrs(&interfaces) == 0) {
        for (struct ifaddrs* i = interfaces; i != NULL && address.num_addresses < WATCH_MAX_ADDRESSES;
             i = i->ifa_next) {
            if (i->ifa_addr == NULL || i->ifa_addr->sa_family != AF_INET || (i->ifa_flags & IFF_LOOPBACK) != 0 ||
                (i->ifa_flags & IFF_UP) == 0) {
                continue;
            }
            struct sockaddr_in in;
            memcpy(&in, i->ifa_addr, sizeof(in));
            address.addresses[address.num_addresses++] = in.sin_addr.s_addr;
        }
        freeifaddrs(interfaces);
    }
    return address;
}

// A connection to rank 0 at one address, introduced and welcomed; -1: it is not there.
static inline int watchdog_connect(Watchdog* w, uint32_t ip, uint32_t port) {
    struct sockaddr_in to;
    memset(&to, 0, sizeof(to));
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = ip;
    to.sin_port = (in_port_t)port;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0, on = 1;
    if (fd < 0) { return -1; }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    struct pollfd polled = {fd, POLLOUT, 0};
    socklen_t length = sizeof(error);
    WatchMessage welcome;
    size_t got = 0;
    if (connect(fd, (struct sockaddr*)&to, sizeof(to)) != 0 && errno != EINPROGRESS) {
        close(fd);
        return -1;
    }
    if (poll(&polled, 1, WATCH_CONNECT_MS) == 1 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 &&
        error == 0) {
        char name[WATCH_TEXT];
        watchdog_name(w, name, sizeof(name));
        watchdog_send(w, fd, WATCH_HELLO, name);
        polled.events = POLLIN;
        while (got < sizeof(welcome) && poll(&polled, 1, WATCH_CONNECT_MS) == 1) {
            ssize_t n = recv(fd, (char*)&welcome + got, sizeof(welcome) - got, 0);
            if (n <= 0) { break; }
            got += (size_t)n;
        }
    }
    if (got < sizeof(welcome) || welcome.kind != WATCH_WELCOME || welcome.secret != w->secret) {
        close(fd);
        return -1;
    }
    welcome.text[WATCH_TEXT - 1] = 0;
    watchdog_text(w->peers[0].name, sizeof(w->peers[0].name), "%s", welcome.text);
    return fd;
}

// Watch from here on. Rank 0 starts first: `address` is what its watchdog_listen gave. `same_host`: as rank 0.
static inline void watchdog_start(Watchdog* w, const WatchAddress* address, int same_host) {
    WatchPeer* hub = &w->peers[0];
    w->secret = address->secret;
    if (w->options.rank == 0) {
        watchdog_name(w, hub->name, sizeof(hub->name));
        hub->state = WATCH_CONNECTED;
    } else {
        for (uint32_t i = same_host ? 0 : 1; i < address->num_addresses && hub->fd < 0; i++) {
            hub->fd = watchdog_connect(w, address->addresses[i], address->port);
        }
        hub->state = hub->fd >= 0 ? WATCH_CONNECTED : WATCH_AWAY;
        if (hub->fd < 0 && address->num_addresses > 0) {
            warning("rank %d cannot connect to rank 0 (TCP port %d): when a rank is missing, it will not know which",
                    w->options.rank, (int)ntohs((uint16_t)address->port));
        }
    }
    struct sigaction park;
    memset(&park, 0, sizeof(park));
    park.sa_handler = watchdog_park;
    sigaction(WATCH_PARK_SIGNAL, &park, NULL);
    w->last_s = watchdog_now();
    sigset_t all, before; // the program's signals are for its main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(&w->thread, NULL, watchdog_thread, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    check(status == 0, "cannot start a thread: %s", strerror(status));
}

// The collective `op` begins and ends in the host's lane. Returns its number.
static inline uint64_t watchdog_enter(Watchdog* w, int op) {
    pthread_mutex_lock(&w->mutex);
    uint64_t number = ++w->host.begun;
    w->host.op = op;
    pthread_mutex_unlock(&w->mutex);
    return number;
}

static inline void watchdog_leave(Watchdog* w) {
    pthread_mutex_lock(&w->mutex);
    w->host.finished = w->host.begun;
    pthread_mutex_unlock(&w->mutex);
}

// 1: this rank is about to be late for a good reason; the others wait on, as long as it lives. 0: not any more, and it
// has the timeout to catch up. Pairs may lie inside each other.
static inline void watchdog_busy(Watchdog* w, int is_busy) {
    pthread_mutex_lock(&w->mutex);
    w->num_busy += is_busy ? 1 : -1;
    pthread_mutex_unlock(&w->mutex);
}

static inline void watchdog_set_timeout(Watchdog* w, double seconds) {
    pthread_mutex_lock(&w->mutex);
    w->timeout_s = seconds;
    pthread_mutex_unlock(&w->mutex);
}

// A collective came back with an error. Perhaps a rank is gone: then the thread ends this process with its name.
static inline void watchdog_explain(const Watchdog* w) {
    double until = watchdog_now() + WATCH_GRACE_S + 2.0;
    while (w != NULL && watchdog_now() < until) {
        usleep(10000);
    }
}

// This rank has done its part: whatever becomes of the others is not watched any more.
static inline void watchdog_stop(Watchdog* w) {
    if (w == NULL) { return; }
    pthread_mutex_lock(&w->mutex);
    w->must_stop = 1;
    pthread_mutex_unlock(&w->mutex);
    (void)!write(w->wake[1], "", 1);
    pthread_join(w->thread, NULL);
    int num_peers = w->options.rank == 0 ? w->options.num_ranks : 1;
    for (int i = 0; i < num_peers; i++) {
        if (w->peers[i].fd >= 0) { close(w->peers[i].fd); }
        if (w->strangers[i] >= 0) { close(w->strangers[i]); }
    }
    if (w->listener >= 0) { close(w->listener); }
    close(w->wake[0]);
    close(w->wake[1]);
    pthread_mutex_destroy(&w->mutex);
    free(w->peers);
    free(w->strangers);
    free(w->polled);
    free(w);
}

#endif
