// The ground of the CPU floor: the Device (threads, scratch, workspace, decode tables) and its memory, which is the
// host's. Ops of reference.h lean on this file.
//
// Whoever includes this inside a namespace (the GPU test does) includes <math.h>, <unistd.h>, <omp.h> if OpenMP is on,
// check.h, scaling.h, roofline.h and profile.h before it, outside.
#ifndef DEVICE_CPU_H
#define DEVICE_CPU_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

struct Device; // inside a namespace: its own, although floor.h says `struct Device` where a global one is in sight
struct Comm;

#include "check.h"
#include "floor.h"
#include "op_cost.h"
#include "roofline.h"

#ifndef _OPENMP
#pragma GCC diagnostic ignored "-Wunknown-pragmas" // without OpenMP the same lines run on one thread
#endif

// Memory that grows on demand and is kept: one per thread and one shared, so that ops allocate nothing once warm.
typedef struct {
    char* memory;
    size_t bytes;
    char padding[48]; // one cache line each: threads write their own
} CpuScratch;

struct Device {
    int num_threads;
    int fp32;        // 1: bf16 stores do not round (--precision fp32)
    void* workspace; // scratch of the two-stage sums; see device_set_workspace
    size_t workspace_bytes;
    CpuScratch* scratch;    // (num_threads + 1); the last is shared by all threads of an op
    float e4m3_values[256]; // code -> value
    float e5m2_values[256];
    char name[128];
    Profile* profile; // NULL: not profiling
    int profile_op;   // what has been running since profile_start, -1: nobody's op
    double profile_start;
};

#define CPU_ALIGNMENT 256
#define REDUCTION_CHUNKS 64 // first stage of a two-stage sum: at most this many partial sums per column
#define REDUCTION_SUMS 3    // column sums one op makes at most (layernorm_backward)

static inline size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

static inline int cpu_thread_index(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// Threads for work that takes one thread so many microseconds: one or all. Results never depend on it; small ops on a
// busy machine do, where threads that wait for each other wait for a time slice. Nothing between, because libgomp ends
// and restarts its threads whenever the number changes between two numbers above one.
static inline int cpu_threads_for(const Device* dev, double microseconds) {
    return microseconds < 20.0 + dev->num_threads ? 1 : dev->num_threads;
}

// First thing in main: start this program again with GOMP_SPINCOUNT set, unless it or OMP_WAIT_POLICY is.
// libgomp's threads spin for milliseconds where they wait for each other, and read how long from the environment only,
// before main. On a machine with anything else to do a spinning thread takes the time slice of the one it waits for: a
// training step on 2 cores with one busy neighbour took 1,864 ms with 300,000 spins (the default), 684 ms with 2,000.
static inline void cpu_spin_briefly(char** argv) {
    if (getenv("GOMP_SPINCOUNT") == NULL && getenv("OMP_WAIT_POLICY") == NULL) {
        setenv("GOMP_SPINCOUNT", "2000", 1);
        char path[4096]; // of this program: started through /proc/self/exe it would be called "exe" in ps
        ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
        path[length > 0 ? length : 0] = 0;
        execv(path, argv); // comes back only when it fails: then it is slower, no more
    }
}

// At least `bytes` of scratch, aligned; contents undefined. `slot` is the caller's thread index, or dev->num_threads
// for the shared one, which is asked for outside parallel regions only.
static inline void* cpu_scratch(Device* dev, int slot, size_t bytes) {
    CpuScratch* scratch = &dev->scratch[slot];
    if (scratch->bytes < bytes) {
        free(scratch->memory);
        scratch->bytes = round_up(bytes + bytes / 4, CPU_ALIGNMENT);
        scratch->memory = (char*)aligned_alloc(CPU_ALIGNMENT, scratch->bytes);
        check(scratch->memory != NULL, "out of memory: wanted %zu bytes of scratch for a CPU op", scratch->bytes);
    }
    return scratch->memory;
}

// Value of "key   : 123 kB" in bytes, or of the line after "key" as text; how /proc/meminfo and /proc/cpuinfo read.
// Returns 0 when there is no such file or key.
static inline int cpu_proc_value(const char* path, const char* key, char* value, size_t value_bytes) {
    FILE* f = fopen(path, "r");
    if (f == NULL) { return 0; }
    char line[512];
    int found = 0;
    while (!found && fgets(line, sizeof(line), f)) {
        const char* colon = strchr(line, ':');
        if (colon != NULL && strncmp(line, key, strlen(key)) == 0) {
            colon += 1 + strspn(colon + 1, " \t");
            snprintf(value, value_bytes, "%.*s", (int)strcspn(colon, "\n"), colon);
            found = 1;
        }
    }
    fclose(f);
    return found;
}

// First number in a file, e.g. a cgroup limit; `missing` when there is no file or no number ("max").
static inline size_t cpu_file_number(const char* path, size_t missing) {
    FILE* f = fopen(path, "r");
    if (f == NULL) { return missing; }
    unsigned long long number = 0;
    int got = fscanf(f, "%llu", &number);
    fclose(f);
    return got == 1 ? (size_t)number : missing;
}

// Open the CPU. num_threads 0 = as many as OpenMP gives us (OMP_NUM_THREADS, else the cores this process may use).
Device* device_create(DeviceOptions options) {
    check(options.num_threads >= 0, "threads: %d, want 0 (all) or more", options.num_threads);
    check(options.attention != ATTENTION_CUDNN, "attention cudnn needs a GPU; the CPU build has its builtin one");
    Device* dev = (Device*)calloc_or_die(1, sizeof(Device));
#ifdef _OPENMP
    dev->num_threads = options.num_threads > 0 ? options.num_threads : omp_get_max_threads();
#else
    dev->num_threads = 1;
#endif
    dev->fp32 = options.fp32;
    dev->scratch = (CpuScratch*)calloc_or_die((size_t)dev->num_threads + 1, sizeof(CpuScratch));
    for (int code = 0; code < 256; code++) {
        dev->e4m3_values[code] = float_from_e4m3((uint8_t)code);
        dev->e5m2_values[code] = float_from_e5m2((uint8_t)code);
    }
    if (!cpu_proc_value("/proc/cpuinfo", "model name", dev->name, sizeof(dev->name))) {
        snprintf(dev->name, sizeof(dev->name), "CPU");
    }
    return dev;
}

void device_free(Device* dev) {
    for (int i = 0; i <= dev->num_threads; i++) {
        free(dev->scratch[i].memory);
    }
    free(dev->scratch);
    free(dev);
}

const char* device_name(const Device* dev) { return dev->name; }

void device_identity(const Device* dev, char* text, size_t size) {
    (void)dev;
    snprintf(text, size, "%s", "");
}

#ifndef __CUDACC__ // the test program, which holds both floors, measures no CPU
// The peaks of the cores that this Device uses, measured in about a tenth of a second.
static inline Chip device_chip(const Device* dev) { return chip_measured(dev->num_threads); }
#endif

// For choices that must be the same in every run and on every rank: about one core of today, FP32 and DRAM.
static inline Chip device_nominal_chip(const Device* dev) {
    (void)dev;
    return chip_of_cpu(1e11, 1e10);
}

const char* device_attention_name(const Device* dev) {
    (void)dev;
    return "builtin";
}

// What the kernel says is available, and no more than the container (cgroup v2) allows. 0 and 0 where nobody says.
void device_memory(const Device* dev, size_t* free_bytes, size_t* total_bytes) {
    (void)dev;
    char total_kb[64] = "0", free_kb[64] = "0";
    cpu_proc_value("/proc/meminfo", "MemTotal", total_kb, sizeof(total_kb));
    cpu_proc_value("/proc/meminfo", "MemAvailable", free_kb, sizeof(free_kb));
    *total_bytes = (size_t)strtoull(total_kb, NULL, 10) * 1024;
    *free_bytes = (size_t)strtoull(free_kb, NULL, 10) * 1024;
    size_t limit = cpu_file_number("/sys/fs/cgroup/memory.max", SIZE_MAX);
    size_t used = cpu_file_number("/sys/fs/cgroup/memory.current", 0);
    size_t left = limit > used ? limit - used : 0;
    *total_bytes = limit < *total_bytes ? limit : *total_bytes;
    *free_bytes = left < *free_bytes ? left : *free_bytes;
}

// Linux hands out more memory than there is, so what cannot fit is refused here instead of being killed later.
void* device_malloc(Device* dev, size_t bytes) {
    size_t free_bytes, total_bytes;
    device_memory(dev, &free_bytes, &total_bytes);
    void* p = NULL;
    if (total_bytes == 0 || bytes <= total_bytes) {
        p = aligned_alloc(CPU_ALIGNMENT, round_up(bytes ? bytes : 1, CPU_ALIGNMENT));
    }
    check(p != NULL, "out of memory: wanted %zu MiB, the machine has %zu MiB, %zu MiB of them free", bytes >> 20,
          total_bytes >> 20, free_bytes >> 20);
    return p;
}

void device_release(Device* dev, void* p) {
    (void)dev;
    free(p);
}

void* pinned_malloc(Device* dev, size_t bytes) { return device_malloc(dev, bytes); }
void pinned_release(Device* dev, void* p) { device_release(dev, p); }

void device_zero(Device* dev, void* p, size_t bytes) {
    cost_zero(dev, bytes);
    memset(p, 0, bytes);
}

void device_copy_in(Device* dev, void* to_device, const void* from_host, size_t bytes) {
    cost_copy_in(dev);
    memcpy(to_device, from_host, bytes);
}

void device_copy_out(Device* dev, void* to_host, const void* from_device, size_t bytes) {
    cost_copy_out(dev);
    memcpy(to_host, from_device, bytes);
    cost_nobody(dev);
}

void device_sync(Device* dev) { (void)dev; }

void device_profile_begin(Device* dev, Profile* profile) {
    dev->profile = profile;
    dev->profile_op = -1;
}

Profile* device_profile(const Device* dev) { return dev->profile; }

void device_profile_mark(Device* dev, int op) {
    double now = seconds_now();
    if (dev->profile_op >= 0) { dev->profile->ops[dev->profile_op].seconds += now - dev->profile_start; }
    dev->profile_op = op;
    dev->profile_start = now;
}

void device_profile_end(Device* dev) {
    device_profile_mark(dev, -1);
    dev->profile = NULL;
}

void device_set_workspace(Device* dev, void* p, size_t bytes) {
    dev->workspace = p;
    dev->workspace_bytes = bytes;
}

size_t reduction_workspace_bytes(Device* dev, int cols) {
    (void)dev;
    return (size_t)REDUCTION_SUMS * REDUCTION_CHUNKS * (size_t)cols * sizeof(float);
}

// The value a bf16 store keeps.
static inline float bf16_stored(const Device* dev, float x) { return dev->fp32 ? x : bf16_round(x); }

void bf16_to_host(Device* dev, float* to, const bf16* from, size_t n) {
    (void)dev;
    memcpy(to, from, n * sizeof(float));
}

void bf16_from_host(Device* dev, bf16* to, const float* from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        to[i] = bf16_stored(dev, from[i]);
    }
}

#endif
