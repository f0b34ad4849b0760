// The text file in which matmul.cuh keeps the cuBLASLt algorithm it chose for each shape, so that two runs choose alike
// and give the same bits. Plain C: what is in the eight words of an algorithm is cuBLASLt's business.
//
//     train_gpt_fp8 matmul algorithms 1
//     <key> <tab> <microseconds when chosen> <tab> <8 words, hex> <tab> <checksum of all before, hex>
//     ...
//     end <number of entries>
//
// A key names everything the choice depends on: device, cuBLASLt version, role, types, shape. Entries of other devices
// and versions stay in the file. A file that is not exactly this is reported in one warning line and starts anew.
#ifndef MATMUL_CACHE_H
#define MATMUL_CACHE_H

#include <fcntl.h>
#include <inttypes.h>
#include <sys/file.h>
#include <unistd.h>

#include "check.h"

#define MATMUL_ALGO_WORDS 8
#define MATMUL_CACHE_HEADER "train_gpt_fp8 matmul algorithms 1"

typedef struct {
    char key[160];
    double microseconds; // of one product, when it was chosen: for whoever reads the file
    uint64_t algo[MATMUL_ALGO_WORDS];
} MatmulCacheEntry;

typedef struct {
    MatmulCacheEntry* entries; // (num_entries), in the order in which they were chosen
    int num_entries;
} MatmulCache;

static inline void matmul_cache_clear(MatmulCache* cache) {
    free(cache->entries);
    cache->entries = NULL;
    cache->num_entries = 0;
}

// The entry of `key`, or NULL.
static inline const MatmulCacheEntry* matmul_cache_find(const MatmulCache* cache, const char* key) {
    for (int i = 0; i < cache->num_entries; i++) {
        if (strcmp(cache->entries[i].key, key) == 0) { return &cache->entries[i]; }
    }
    return NULL;
}

// Add an entry, or replace the one with the same key.
static inline void matmul_cache_put(MatmulCache* cache, const MatmulCacheEntry* entry) {
    for (int i = 0; i < cache->num_entries; i++) {
        if (strcmp(cache->entries[i].key, entry->key) == 0) {
            cache->entries[i] = *entry;
            return;
        }
    }
    size_t bytes = (size_t)(cache->num_entries + 1) * sizeof(MatmulCacheEntry);
    MatmulCacheEntry* entries = (MatmulCacheEntry*)realloc(cache->entries, bytes);
    check(entries != NULL, "out of host memory: wanted %zu bytes", bytes);
    cache->entries = entries;
    cache->entries[cache->num_entries++] = *entry;
}

// FNV-1a, 64 bits (Fowler, Noll, Vo; RFC 9923): a flipped digit must not become another algorithm.
static inline uint64_t matmul_cache_checksum(const char* text, size_t length) {
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < length; i++) {
        hash = (hash ^ (uint8_t)text[i]) * 0x100000001B3u;
    }
    return hash;
}

// One line of the file, without its end; `line` has room for `size` characters.
static inline void matmul_cache_print_entry(char* line, size_t size, const MatmulCacheEntry* entry) {
    int length = snprintf(line, size, "%s\t%.2f\t", entry->key, entry->microseconds);
    for (int i = 0; i < MATMUL_ALGO_WORDS; i++) {
        length += snprintf(line + length, size - (size_t)length, "%016" PRIx64, entry->algo[i]);
    }
    snprintf(line + length, size - (size_t)length, "\t%016" PRIx64, matmul_cache_checksum(line, (size_t)length));
}

// Is `line` an entry? Then it is read. The test is that printing what was read gives the same line again.
static inline int matmul_cache_parse_entry(MatmulCacheEntry* entry, const char* line) {
    memset(entry, 0, sizeof(*entry));
    size_t key_length = strcspn(line, "\t");
    if (key_length == 0 || key_length >= sizeof(entry->key) || line[key_length] != '\t') { return 0; }
    memcpy(entry->key, line, key_length);
    char* end;
    entry->microseconds = strtod(line + key_length + 1, &end);
    if (*end != '\t' || !(entry->microseconds >= 0 && entry->microseconds < 1e12)) { return 0; } // 1e308 has 309 digits
    const char* digits = end + 1;
    if (strspn(digits, "0123456789abcdef") != 16 * MATMUL_ALGO_WORDS) { return 0; }
    for (int i = 0; i < MATMUL_ALGO_WORDS; i++) {
        char word[17] = {0};
        memcpy(word, digits + 16 * i, 16);
        entry->algo[i] = strtoull(word, NULL, 16);
    }
    char again[512];
    matmul_cache_print_entry(again, sizeof(again), entry);
    return strcmp(again, line) == 0;
}

// Read the file into an empty cache. A missing file is an empty cache; one that is corrupt or cannot be read, too,
// after one warning line.
static inline void matmul_cache_load(MatmulCache* cache, const char* path) {
    matmul_cache_clear(cache);
    FILE* f = fopen(path, "r");
    if (f == NULL) {
        if (errno != ENOENT) { fprintf(stderr, "warning: cannot read '%s': %s\n", path, strerror(errno)); }
        return;
    }
    char line[512];
    const char* fault = NULL;
    int line_number = 0, ended = 0;
    while (fault == NULL && fgets(line, sizeof(line), f) != NULL) {
        line_number++;
        size_t length = strlen(line);
        MatmulCacheEntry entry;
        int whole = length > 0 && line[length - 1] == '\n';
        if (whole) { line[length - 1] = 0; }
        if (!whole || ended) {
            fault = ended ? "text after the end" : "an incomplete line";
        } else if (line_number == 1) {
            fault = strcmp(line, MATMUL_CACHE_HEADER) == 0 ? NULL : "another header";
        } else if (strncmp(line, "end ", 4) == 0) {
            char want[32];
            snprintf(want, sizeof(want), "end %d", cache->num_entries);
            ended = 1;
            fault = strcmp(line, want) == 0 ? NULL : "another number of entries";
        } else if (matmul_cache_parse_entry(&entry, line)) {
            fault = matmul_cache_find(cache, entry.key) == NULL ? NULL : "a second entry for one product";
            matmul_cache_put(cache, &entry);
        } else {
            fault = "a damaged entry";
        }
    }
    if (fault == NULL && !ended) { fault = "no end"; }
    fclose(f);
    if (fault != NULL) {
        fprintf(stderr, "warning: '%s' is not a list of matmul algorithms (line %d: %s): it is made anew\n", path,
                line_number, fault);
        matmul_cache_clear(cache);
    }
}

// Write the file: to a temporary name first, so that a reader never sees half of it. Returns 0, with errno, if it
// cannot be written (no such folder, a full disk): what was there is there still.
static inline int matmul_cache_save(const MatmulCache* cache, const char* path) {
    char temporary[1024], line[512];
    int length = snprintf(temporary, sizeof(temporary), "%s.tmp", path);
    check(length < (int)sizeof(temporary), "file name '%s' is too long", path);
    FILE* f = fopen(temporary, "w");
    if (f == NULL) { return 0; }
    fprintf(f, "%s\n", MATMUL_CACHE_HEADER);
    for (int i = 0; i < cache->num_entries; i++) {
        matmul_cache_print_entry(line, sizeof(line), &cache->entries[i]);
        fprintf(f, "%s\n", line);
    }
    fprintf(f, "end %d\n", cache->num_entries);
    int written = !ferror(f);
    return fclose(f) == 0 && written && rename(temporary, path) == 0;
}

// Enter and leave the section in which one process at a time chooses algorithms for `path`: the ranks of a run share
// the file, and must all take what the first of them chose. Uses a file of its own, because `path` gets renamed over.
// Returns -1, with errno, if that cannot be made or locked.
static inline int matmul_cache_lock(const char* path) {
    char name[1024];
    int length = snprintf(name, sizeof(name), "%s.lock", path);
    check(length < (int)sizeof(name), "file name '%s' is too long", path);
    int lock = open(name, O_CREAT | O_RDWR | O_CLOEXEC, 0666);
    if (lock >= 0 && flock(lock, LOCK_EX) != 0) {
        close(lock);
        return -1;
    }
    return lock;
}

static inline void matmul_cache_unlock(int lock) {
    if (lock >= 0) { close(lock); }
}

#endif
