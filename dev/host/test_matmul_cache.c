// The file of matmul algorithms: what was written is read back, and nothing damaged is believed.
#include "../../lib/matmul_cache.h"
#include "unit.h"

static char path[64]; // of the file under test; main fills it in

static MatmulCacheEntry make_entry(int seed) {
    MatmulCacheEntry entry;
    memset(&entry, 0, sizeof(entry));
    snprintf(entry.key, sizeof(entry.key), "NVIDIA H200, cuBLASLt 130100, dgrad e5m2, rows %d, C 768, OC 2304", 64 * seed);
    entry.microseconds = 12.5 * seed;
    for (int i = 0; i < MATMUL_ALGO_WORDS; i++) {
        entry.algo[i] = (uint64_t)seed * 0x9E3779B97F4A7C15u + (uint64_t)i;
    }
    return entry;
}

static void write_entries(int n) {
    MatmulCache cache = {NULL, 0};
    for (int i = 1; i <= n; i++) {
        MatmulCacheEntry entry = make_entry(i);
        matmul_cache_put(&cache, &entry);
    }
    expect(matmul_cache_save(&cache, path), "cannot save '%s'", path);
    matmul_cache_clear(&cache);
}

static size_t read_text(char* text, size_t size) {
    FILE* f = fopen_or_die(path, "r");
    size_t length = fread(text, 1, size, f);
    fclose(f);
    return length;
}

static void write_text(const char* text, size_t length) {
    FILE* f = fopen_or_die(path, "w");
    fwrite_or_die(text, length, f, path);
    fclose_or_die(f, path);
}

// Number of entries found in the file, with the warning it gives (empty: none) in `warning`.
static int load_count(char* warning, size_t size) {
    FILE* sink = tmpfile();
    check(sink != NULL, "no temporary file: %s", strerror(errno));
    fflush(stderr);
    int kept = dup(2);
    dup2(fileno(sink), 2);
    MatmulCache cache = {NULL, 0};
    matmul_cache_load(&cache, path);
    fflush(stderr);
    dup2(kept, 2);
    close(kept);
    rewind(sink);
    size_t length = fread(warning, 1, size - 1, sink);
    warning[length] = 0;
    fclose(sink);
    int count = cache.num_entries;
    matmul_cache_clear(&cache);
    return count;
}

static void test_round_trip(void) {
    write_entries(5);
    MatmulCache cache = {NULL, 0};
    matmul_cache_load(&cache, path);
    expect(cache.num_entries == 5, "%d entries, want 5", cache.num_entries);
    for (int i = 1; i <= 5; i++) {
        MatmulCacheEntry want = make_entry(i);
        const MatmulCacheEntry* got = matmul_cache_find(&cache, want.key);
        expect(got != NULL && memcmp(got->algo, want.algo, sizeof(want.algo)) == 0, "entry %d lost or changed", i);
        expect(got != NULL && got->microseconds == want.microseconds, "time of entry %d changed", i);
    }
    expect(matmul_cache_find(&cache, "another key") == NULL, "found what is not there");
    MatmulCacheEntry replaced = make_entry(3);
    replaced.algo[7] = 42;
    matmul_cache_put(&cache, &replaced);
    expect(cache.num_entries == 5, "replacing made %d entries, want 5", cache.num_entries);
    expect(matmul_cache_find(&cache, replaced.key)->algo[7] == 42, "entry was not replaced");
    matmul_cache_clear(&cache);
}

static void test_missing_file_is_empty(void) {
    char warning[1024];
    unlink(path);
    int count = load_count(warning, sizeof(warning));
    expect(count == 0 && warning[0] == 0, "%d entries and '%s', want none and no warning", count, warning);
}

// Every single-character change and every truncation is noticed: one warning line, nothing taken over.
static void test_damage(void) {
    static char text[8192], damaged[8192];
    char warning[1024];
    write_entries(3);
    size_t length = read_text(text, sizeof(text));
    expect(load_count(warning, sizeof(warning)) == 3 && warning[0] == 0, "the undamaged file gave '%s'", warning);
    for (size_t i = 0; i < length; i++) {
        memcpy(damaged, text, length);
        damaged[i] = text[i] == '7' ? '8' : '7';
        write_text(damaged, length);
        int count = load_count(warning, sizeof(warning));
        expect(count == 0, "character %zu changed: %d entries believed", i, count);
        char* end = strchr(warning, '\n');
        expect(strncmp(warning, "warning: ", 9) == 0 && end != NULL && end[1] == 0, "character %zu: '%s'", i, warning);
    }
    for (size_t i = 0; i < length; i += 7) {
        write_text(text, i);
        expect(load_count(warning, sizeof(warning)) == 0 && warning[0] != 0, "cut at %zu of %zu: believed", i, length);
    }
    memset(damaged, 'x', sizeof(damaged)); // no line end anywhere
    write_text(damaged, sizeof(damaged));
    expect(load_count(warning, sizeof(warning)) == 0 && warning[0] != 0, "8 KiB of x were believed");
    unlink(path);
}

// Whole lines with right checksums, which save would not have written: a time of 309 digits (with a long key more than
// the line has room for), one key twice, other ends.
static void test_forged(void) {
    static char text[2048], line[512];
    char warning[1024], key[160];
    MatmulCacheEntry entry = make_entry(1);
    for (int kind = 0; kind < 4; kind++) {
        memset(key, 'k', sizeof(key));
        key[kind == 0 ? 159 : 10] = 0;
        size_t length = (size_t)snprintf(text, sizeof(text), "%s\n", MATMUL_CACHE_HEADER);
        for (int i = 0; i < (kind == 1 ? 2 : 1); i++) {
            int n = snprintf(line, sizeof(line), "%s\t%s\t", key, kind == 0 ? "1e308" : "12.50");
            for (int k = 0; k < MATMUL_ALGO_WORDS; k++) {
                n += snprintf(line + n, sizeof(line) - (size_t)n, "%016" PRIx64, entry.algo[k]);
            }
            uint64_t checksum = matmul_cache_checksum(line, (size_t)n);
            length += (size_t)snprintf(text + length, sizeof(text) - length, "%s\t%016" PRIx64 "\n", line, checksum);
        }
        length += (size_t)snprintf(text + length, sizeof(text) - length, "end %s\n", kind == 2 ? "01" : "1");
        write_text(text, length);
        int count = load_count(warning, sizeof(warning)), want = kind == 3;
        expect(count == want, "kind %d: %d entries believed, want %d", kind, count, want);
        expect((warning[0] == 0) == want, "kind %d: warning '%s'", kind, warning);
    }
    unlink(path);
}

// A cache is no reason to end a run: the caller is told, and errno says why.
static void test_unwritable_place(void) {
    MatmulCache cache = {NULL, 0};
    errno = 0;
    expect(matmul_cache_save(&cache, "no_such_folder/algorithms.txt") == 0 && errno == ENOENT, "saved; errno %d",
           errno);
    errno = 0;
    expect(matmul_cache_lock("no_such_folder/algorithms.txt") == -1 && errno == ENOENT, "locked; errno %d", errno);
    expect(matmul_cache_save(&cache, "/dev/full/algorithms.txt") == 0, "saved below a file");
}

// A second process waits until the first has left, and then reads what the first wrote.
static void test_lock_excludes(void) {
    char warning[1024], name[256];
    unlink(path);
    int lock = matmul_cache_lock(path);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        close(lock); // the inherited copy holds the parent's lock as well
        int inner = matmul_cache_lock(path);
        int count = load_count(warning, sizeof(warning));
        matmul_cache_unlock(inner);
        _exit(count);
    }
    usleep(50000); // time for a child that does not wait to find no file
    write_entries(4);
    matmul_cache_unlock(lock);
    int status = 0;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 4, "the second process saw %d entries, want 4",
           WEXITSTATUS(status));
    unlink(path);
    snprintf(name, sizeof(name), "%s.lock", path);
    unlink(name);
}

int main(void) {
    snprintf(path, sizeof(path), "/tmp/test_matmul_cache.%d", (int)getpid());
    unit_run(test_round_trip);
    unit_run(test_missing_file_is_empty);
    unit_run(test_damage);
    unit_run(test_forged);
    unit_run(test_unwritable_place);
    unit_run(test_lock_excludes);
    return unit_report();
}
