// The file of matmul algorithms (lib/matmul_cache.h).
//
//     input    1 byte of flags, then the file
//     flags    1 the checksum at the end of each line is made right
#include "fuzz.h"

#include "matmul_cache.h"

// Copy text to out (twice its size), each line's last 16 hex digits replaced by the checksum of what is before them.
static size_t matmul_cache_repair(char* out, const char* text, size_t size) {
    size_t n = 0;
    while (size > 0) {
        const char* newline = (const char*)memchr(text, '\n', size);
        size_t line = newline != NULL ? (size_t)(newline - text) : size, taken = line + (newline != NULL);
        memcpy(out + n, text, taken);
        if (line > 17 && text[line - 17] == '\t') {
            char digits[17];
            snprintf(digits, sizeof(digits), "%016" PRIx64, matmul_cache_checksum(text, line - 17));
            memcpy(out + n + line - 16, digits, 16);
        }
        n += taken;
        text += taken;
        size -= taken;
    }
    return n;
}

static void matmul_cache_run(const uint8_t* data, size_t size) {
    FuzzInput in = {data, size};
    int flags = fuzz_byte(&in);
    const uint8_t* file = in.bytes;
    char* repaired = (char*)malloc_or_die(in.size + 1);
    if (flags & 1) {
        in.size = matmul_cache_repair(repaired, (const char*)in.bytes, in.size);
        file = (const uint8_t*)repaired;
    }
    const char* path = fuzz_write("algorithms.txt", file, in.size);
    MatmulCache cache = {NULL, 0};
    matmul_cache_load(&cache, path);
    if (fuzz.message[0] != 0) {
        fuzz_check_message(fuzz.message);
        fuzz_want(cache.num_entries == 0, "%d entries of a damaged file were believed", cache.num_entries);
    } else { // what is believed is exactly what we would have written
        const char* again = fuzz_path("again.txt");
        fuzz_want(matmul_cache_save(&cache, again), "cannot save");
        int64_t bytes = file_size_or_die(again);
        char* text = (char*)malloc_or_die((size_t)bytes);
        FILE* f = fopen_or_die(again, "rb");
        fread_or_die(text, (size_t)bytes, f, again);
        fclose(f);
        fuzz_want((size_t)bytes == in.size && memcmp(text, file, in.size) == 0,
                  "%zu bytes were believed that save would not have written", in.size);
        free(text);
    }
    matmul_cache_clear(&cache);
    free(repaired);
}

static void matmul_cache_seeds(void) {
    const char* path = fuzz_path("seed.txt");
    for (int n = 0; n <= 3; n++) {
        MatmulCache cache = {NULL, 0};
        for (int i = 0; i < n; i++) {
            MatmulCacheEntry entry;
            memset(&entry, 0, sizeof(entry));
            snprintf(entry.key, sizeof(entry.key), "NVIDIA H200, cuBLASLt 130100, dgrad e5m2, rows %d, C 768", 64 * i);
            entry.microseconds = 12.5 * i;
            for (int k = 0; k < MATMUL_ALGO_WORDS; k++) {
                entry.algo[k] = (uint64_t)(i + 1) * 0x9E3779B97F4A7C15u + (uint64_t)k;
            }
            matmul_cache_put(&cache, &entry);
        }
        fuzz_want(matmul_cache_save(&cache, path), "cannot save '%s'", path);
        matmul_cache_clear(&cache);
        fuzz_seed_file(FUZZ_TAKEN, "\1", 1, path);
    }
    // What fuzzing has found: a time whose digits, with the longest key, ran over the line that is printed for
    // comparison; one key twice; numbers behind "end" that atoi takes.
    static char text[4096];
    const char* words = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
                        "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    int n = snprintf(text, sizeof(text), "%s\n%0159d\t1e308\t%s\t%016d\nend 1\n", MATMUL_CACHE_HEADER, 0, words, 0);
    fuzz_seed(FUZZ_TAKEN, "\1", 1, text, (size_t)n);
    n = snprintf(text, sizeof(text), "%s\nk\t1.00\t%s\t%016d\nk\t1.00\t%s\t%016d\nend 1\n", MATMUL_CACHE_HEADER, words,
                 0, words, 0);
    fuzz_seed(FUZZ_TAKEN, "\1", 1, text, (size_t)n);
    n = snprintf(text, sizeof(text), "%s\nend  0x\n", MATMUL_CACHE_HEADER);
    fuzz_seed(FUZZ_TAKEN, "\1", 1, text, (size_t)n);
}

FUZZ_TARGET(matmul_cache)
