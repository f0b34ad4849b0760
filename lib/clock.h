// The one clock of durations.
#ifndef CLOCK_H
#define CLOCK_H

#include <time.h>

// Seconds since some fixed moment; never set back.
static inline double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
