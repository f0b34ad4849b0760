// Memory is planned before anything is allocated: every buffer is a line of a MemoryPlan (category, where its address
// goes, bytes). The plan can be summed, printed, compared with what the device has, and only then given addresses.
//
//     plan_add(&plan, MEMORY_ACTIVATIONS, &acts->qkv, BT * 3 * C * sizeof(bf16));
//     plan_bytes(&plan);  plan_print(&plan, stdout);
//     plan_place(&plan, base);       // base: one block of plan_bytes bytes, 256-byte aligned
#ifndef MEMORY_H
#define MEMORY_H

#include "check.h"

typedef enum {
    MEMORY_PARAMETERS,  // weights as the forward and backward pass read them, FP8 slots
    MEMORY_MASTER,      // FP32 master weights
    MEMORY_MOMENTS,     // Adam's m and v
    MEMORY_GRADIENTS,   // FP32 gradient accumulators
    MEMORY_ACTIVATIONS, // kept from forward to backward, per layer
    MEMORY_SCRATCH,     // shared by all layers
    MEMORY_WORKSPACE,   // scratch inside single ops
    MEMORY_EXCHANGE,    // what the ranks send each other
    NUM_MEMORY_CATEGORIES
} MemoryCategory;

typedef struct {
    MemoryCategory category;
    void* address; // of the pointer that receives the buffer's address
    size_t bytes;
} MemoryItem;

typedef struct {
    MemoryItem* items;
    size_t num_items, capacity;
    size_t category_bytes[NUM_MEMORY_CATEGORIES];
} MemoryPlan;

#define MEMORY_ALIGNMENT ((size_t)256)

static inline size_t memory_aligned(size_t bytes) {
    return (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
}

// One buffer of `bytes` bytes. `address` is the address of the pointer that will hold it (any pointer type); that
// pointer must stay where it is until plan_place.
static inline void plan_add(MemoryPlan* plan, MemoryCategory category, void* address, size_t bytes) {
    if (plan->num_items == plan->capacity) {
        plan->capacity = plan->capacity ? 2 * plan->capacity : 256;
        plan->items = (MemoryItem*)realloc(plan->items, plan->capacity * sizeof(MemoryItem));
        check(plan->items != NULL, "out of host memory for a memory plan of %zu buffers", plan->capacity);
    }
    MemoryItem item = {category, address, memory_aligned(bytes)};
    plan->items[plan->num_items++] = item;
    plan->category_bytes[category] += item.bytes;
}

static inline size_t plan_bytes(const MemoryPlan* plan) {
    size_t bytes = 0;
    for (int c = 0; c < NUM_MEMORY_CATEGORIES; c++) {
        bytes += plan->category_bytes[c];
    }
    return bytes;
}

// Give every buffer its address inside the block at `base`, which has plan_bytes(plan) bytes.
static inline void plan_place(const MemoryPlan* plan, void* base) {
    char* next = (char*)base;
    for (size_t i = 0; i < plan->num_items; i++) {
        memcpy(plan->items[i].address, &next, sizeof(next)); // the pointer's type is not known here
        next += plan->items[i].bytes;
    }
}

static inline void plan_free(MemoryPlan* plan) {
    free(plan->items);
    memset(plan, 0, sizeof(*plan));
}

// One line per category and the sum, in MiB.
static inline void plan_print(const MemoryPlan* plan, FILE* out) {
    const char* names[NUM_MEMORY_CATEGORIES] = {"weights", "master weights", "Adam moments", "gradients",
                                                "activations", "scratch", "workspace",
                                                "between ranks"};
    for (int c = 0; c < NUM_MEMORY_CATEGORIES; c++) {
        fprintf(out, "| memory: %-15s | %14.1f MiB |\n", names[c], (double)plan->category_bytes[c] / (1 << 20));
    }
    fprintf(out, "| memory: %-15s | %14.1f MiB |\n", "sum", (double)plan_bytes(plan) / (1 << 20));
}

// Number behind `key` in a file of the kernel ("MemAvailable:", "inactive_file ", or "" for a file of one number), in
// bytes; -1 when there is none.
static inline int64_t memory_read_number(const char* path, const char* key) {
    FILE* f = fopen(path, "r");
    char line[256];
    int64_t value = -1;
    while (f != NULL && value < 0 && fgets(line, sizeof(line), f) != NULL) {
        long long number;
        if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%lld", &number) == 1) {
            value = number * (strstr(line, " kB") != NULL ? 1024 : 1);
        }
    }
    if (f != NULL) { fclose(f); }
    return value;
}

// The least memory that the control group `group` ("/a/b") or one above it in the hierarchy mounted at `mount` has
// left, its file cache counted as free; `least` when that is less. In a container the groups above its own are not there.
static inline int64_t memory_left_in_groups(const char* mount, const char* group, int version, int64_t least) {
    const char* limit_file = version == 2 ? "memory.max" : "memory.limit_in_bytes";
    const char* used_file = version == 2 ? "memory.current" : "memory.usage_in_bytes";
    const char* cache_key = version == 2 ? "inactive_file " : "total_inactive_file ";
    char path[1024];
    for (size_t length = strlen(group);;) {
        int chars = (int)length;
        snprintf(path, sizeof(path), "%s%.*s/%s", mount, chars, group, limit_file);
        int64_t limit = memory_read_number(path, ""); // "max": no limit; in version 1 a number beyond all memory
        snprintf(path, sizeof(path), "%s%.*s/%s", mount, chars, group, used_file);
        int64_t used = memory_read_number(path, "");
        snprintf(path, sizeof(path), "%s%.*s/memory.stat", mount, chars, group);
        int64_t cache = memory_read_number(path, cache_key);
        if (limit >= 0 && used >= 0) {
            int64_t left = limit - used + (cache > 0 ? cache : 0);
            left = left > 0 ? left : 0;
            least = left < least ? left : least;
        }
        if (length == 0) { return least; }
        do {
            length--;
        } while (length > 0 && group[length] != '/');
    }
}

// Bytes of host memory that can still be taken: what the kernel calls available, or what is left of the limit of a
// control group (of a container, of a batch system's job). `root` is "" but in tests.
static inline size_t host_memory_available_in(const char* root) {
    char path[512], line[1024];
    snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    int64_t available = memory_read_number(path, "MemAvailable:");
    if (available < 0) { available = (int64_t)4 << 30; }
    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    FILE* f = fopen(path, "r");
    while (f != NULL && fgets(line, sizeof(line), f) != NULL) { // NUMBER:CONTROLLERS:GROUP; version 2 is "0::GROUP"
        line[strcspn(line, "\n")] = 0;
        char* controllers = strchr(line, ':');
        char* group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (group == NULL) { continue; }
        *group++ = 0;
        int version = strncmp(line, "0:", 2) == 0 && controllers[1] == 0 ? 2 : 1;
        if (version == 1 && strcmp(controllers + 1, "memory") != 0) { continue; }
        snprintf(path, sizeof(path), "%s/sys/fs/cgroup%s", root, version == 2 ? "" : "/memory");
        available = memory_left_in_groups(path, strcmp(group, "/") == 0 ? "" : group, version, available);
    }
    if (f != NULL) { fclose(f); }
    return (size_t)available;
}

static inline size_t host_memory_available(void) { return host_memory_available_in(""); }

#endif
