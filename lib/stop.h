// Stopping well: SIGTERM and SIGUSR1 ask for a stop, which the loop makes after the step that is running, with a
// checkpoint; a second signal ends the process at once. So does Ctrl-C in a run that writes checkpoints. Under mpirun
// SIGUSR1 reaches every rank; batch systems send either some time before they kill (Slurm: --signal=USR1@120).
#ifndef STOP_H
#define STOP_H

#include <signal.h>
#include <string.h>
#include <unistd.h>

// Exit status of a run that was stopped early and can be continued; EX_TEMPFAIL of sysexits.h, "try again later".
enum { EXIT_STOPPED = 75 };

static volatile sig_atomic_t stop_signal; // the first signal, 0: none yet

static inline void stop_handle(int number) {
    if (stop_signal != 0) { _exit(128 + number); }
    stop_signal = number;
}

// From here on the signals are noted instead of ending the process, SIGINT only if `interrupt`.
static inline void stop_listen(int interrupt) {
    const int numbers[] = {SIGTERM, SIGUSR1, SIGINT};
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_handler = stop_handle;
    action.sa_flags = SA_RESTART;
    for (int i = 0; i < 2 + (interrupt != 0); i++) {
        sigaction(numbers[i], &action, NULL);
    }
}

static inline const char* stop_signal_name(int number) {
    return number == SIGTERM ? "SIGTERM" : number == SIGINT ? "SIGINT" : number == SIGUSR1 ? "SIGUSR1" : "a signal";
}

#endif
