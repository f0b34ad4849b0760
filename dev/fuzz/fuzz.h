// What all fuzz targets share. A target is one file of this folder: it hands hostile bytes to one reader of lib/ or
// data/ and looks at what comes of it. It is used twice:
//
//     make fuzz, dev/fuzz/run.sh       by libFuzzer (clang), with address and undefined-behaviour sanitizers
//     dev/host/test_fuzz_replay.c      by gcc in `make test`: the seeds and a few thousand edits of them (FUZZ_REPLAY)
//
//     static void NAME_run(const uint8_t* data, size_t size)   read it as the file(s); fuzz_want() what must then hold
//     static void NAME_seeds(void)                             fuzz_seed() whole files, made by our own writers
//     FUZZ_TARGET(NAME)
//
// A finding is a sanitizer's report, a wrong answer (fuzz_want), a hang, and also: more than FUZZ_MEMORY bytes at once,
// or memory, a file or a descriptor that a reader keeps although it came back. A failed check() is none: it refuses the
// file, which ends the run (longjmp), and what the reader had by then is given back here, so that a run can follow
// millions of others. For that the calls below are replaced in everything that is included after this header.
#ifndef FUZZ_H
#define FUZZ_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wunused-function" // targets include whole programs and use a part of them

#define FUZZ_MEMORY ((size_t)64 << 20) // bytes that a reader may hold for an input of a few kilobytes
#define FUZZ_DESCRIPTORS 64            // those above are not looked at
#define FUZZ_PATH 640                  // bytes of a path in the folder of the run

enum { FUZZ_TAKEN, FUZZ_REFUSED, FUZZ_EITHER }; // what the reader must do with a seed

typedef struct {
    uint8_t* bytes;
    size_t size;
    int outcome; // FUZZ_TAKEN ...
} FuzzSeed;

typedef struct {
    int running;
    int returned; // the reader came back and said why it refuses (fuzz_refused)
    int must_end; // set by the target: from here on no check may fail
    jmp_buf refused;
    char message[1024]; // of the check that failed, or the last warning
    // what the run holds
    void* blocks[4096];
    size_t block_bytes[4096];
    int num_blocks;
    size_t bytes;
    FILE* files[16];
    DIR* folders[16];
    int has_glob;
    glob_t found;
    uint8_t was_open[FUZZ_DESCRIPTORS]; // before the first run
    int lowest_free;                    // descriptor, before the run
    // the input, kept for the report
    const uint8_t* data;
    size_t size;
    char folder[256]; // the files of the run; on a file system in memory where there is one
    FuzzSeed* seeds;
    int num_seeds;
} Fuzz;

static Fuzz fuzz;

static inline int fuzz_remove_one(const char* path, const struct stat* st, int type, struct FTW* place) {
    (void)st, (void)type, (void)place;
    return remove(path);
}

// Remove a folder with all that is in it; links are removed, not followed.
static inline void fuzz_remove_tree(const char* path) {
    nftw(path, fuzz_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static inline void fuzz_remove_folder(void) {
    fuzz_remove_tree(fuzz.folder);
}

// The end after a finding: keep the input, and nothing else. libFuzzer and run.sh do that themselves.
static inline void fuzz_keep_input(void) {
#ifdef FUZZ_REPLAY
    fuzz_remove_folder();
    const char* path = "build/fuzz_finding";
    FILE* f = fuzz.running ? fopen(path, "wb") : NULL;
    if (f != NULL) {
        fwrite(fuzz.data, 1, fuzz.size, f);
        fclose(f);
        fprintf(stderr, "the input is kept in %s (make fuzz && build/fuzz/<target> %s)\n", path, path);
    }
#endif
}

__attribute__((format(printf, 3, 4))) _Noreturn static inline void fuzz_finding(const char* file, int line,
                                                                                const char* format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "FINDING %s:%d: ", file, line);
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    fuzz_keep_input();
    abort();
}

// What must hold for every input. Otherwise: a finding.
#define fuzz_want(condition, ...)                                                                                      \
    do {                                                                                                               \
        if (!(condition)) { fuzz_finding(__FILE__, __LINE__, __VA_ARGS__); }                                           \
    } while (0)

// ---------------------------------------------------------------------------------------------------------------------
// memory and files of a run, so that they can be counted and given back

static inline void fuzz_hold(void* p, size_t bytes) {
    if (!fuzz.running || p == NULL) { return; }
    fuzz_want(fuzz.num_blocks < (int)(sizeof(fuzz.blocks) / sizeof(fuzz.blocks[0])), "%d blocks of memory at once",
              fuzz.num_blocks);
    fuzz.blocks[fuzz.num_blocks] = p;
    fuzz.block_bytes[fuzz.num_blocks++] = bytes;
    fuzz.bytes += bytes;
}

static inline void fuzz_let_go(void* p) {
    for (int i = fuzz.num_blocks - 1; p != NULL && i >= 0; i--) {
        if (fuzz.blocks[i] == p) {
            fuzz.bytes -= fuzz.block_bytes[i];
            fuzz.blocks[i] = fuzz.blocks[--fuzz.num_blocks];
            fuzz.block_bytes[i] = fuzz.block_bytes[fuzz.num_blocks];
            return;
        }
    }
}

static inline void fuzz_ask(size_t bytes) {
    fuzz_want(!fuzz.running || (bytes <= FUZZ_MEMORY && fuzz.bytes <= FUZZ_MEMORY - bytes),
              "an input of %zu bytes made the reader ask for %zu bytes on top of %zu", fuzz.size, bytes, fuzz.bytes);
}

static inline void* fuzz_malloc(size_t bytes) {
    fuzz_ask(bytes);
    void* p = malloc(bytes);
    fuzz_hold(p, bytes);
    return p;
}

static inline void* fuzz_calloc(size_t count, size_t size) {
    fuzz_want(size == 0 || count <= SIZE_MAX / size, "calloc(%zu, %zu) overflows", count, size);
    fuzz_ask(count * size);
    void* p = calloc(count, size);
    fuzz_hold(p, count * size);
    return p;
}

static inline void* fuzz_realloc(void* old, size_t bytes) {
    fuzz_ask(bytes);
    fuzz_let_go(old);
    void* p = realloc(old, bytes);
    fuzz_hold(p, bytes);
    return p;
}

static inline void fuzz_free(void* p) {
    fuzz_let_go(p);
    free(p);
}

// The place of `p` in a table of 16, or of a free entry (p NULL).
static inline int fuzz_place(void* const* table, const void* p) {
    for (int i = 0; i < 16; i++) {
        if (table[i] == p) { return i; }
    }
    return -1;
}

static inline void fuzz_note(void** table, void* p) {
    int i = fuzz.running && p != NULL ? fuzz_place(table, NULL) : -1;
    fuzz_want(i >= 0 || !fuzz.running || p == NULL, "more than 16 open files or folders");
    if (i >= 0) { table[i] = p; }
}

static inline void fuzz_forget(void** table, const void* p) {
    int i = p != NULL ? fuzz_place(table, p) : -1;
    if (i >= 0) { table[i] = NULL; }
}

static inline FILE* fuzz_fopen(const char* path, const char* mode) {
    FILE* f = fopen(path, mode);
    fuzz_note((void**)fuzz.files, f);
    return f;
}

static inline FILE* fuzz_fdopen(int descriptor, const char* mode) {
    FILE* f = fdopen(descriptor, mode);
    fuzz_note((void**)fuzz.files, f);
    return f;
}

static inline int fuzz_fclose(FILE* f) {
    fuzz_forget((void**)fuzz.files, f);
    return fclose(f);
}

static inline DIR* fuzz_opendir(const char* path) {
    DIR* d = opendir(path);
    fuzz_note((void**)fuzz.folders, d);
    return d;
}

static inline int fuzz_closedir(DIR* d) {
    fuzz_forget((void**)fuzz.folders, d);
    return closedir(d);
}

static inline int fuzz_glob(const char* pattern, int flags, int (*on_error)(const char*, int), glob_t* found) {
    int status = glob(pattern, flags, on_error, found);
    fuzz.has_glob = fuzz.running && status == 0;
    fuzz.found = *found;
    return status;
}

static inline void fuzz_globfree(glob_t* found) {
    fuzz.has_glob = 0;
    globfree(found);
}

// Warnings are kept, not printed: there would be thousands per second.
__attribute__((format(printf, 2, 3))) static inline int fuzz_fprintf(FILE* f, const char* format, ...) {
    va_list args;
    va_start(args, format);
    int n = f == stderr && fuzz.running ? vsnprintf(fuzz.message, sizeof(fuzz.message), format, args)
                                        : vfprintf(f, format, args);
    va_end(args);
    return n;
}

// A message is one line of text, whatever bytes were in the file. Called with every error line and warning.
static inline void fuzz_check_message(const char* message) {
    fuzz_want(message[0] != 0, "refused without a word");
    for (const char* c = message; *c; c++) {
        int last_newline = *c == '\n' && c[1] == 0; // of a warning
        fuzz_want(last_newline || (unsigned char)*c >= 32, "byte %d in the message '%s'", (unsigned char)*c, message);
    }
}

// What a failed check does here (check.h).
_Noreturn static inline void fuzz_refuse(const char* message) {
    if (!fuzz.running) { // while seeds are made
        fprintf(stderr, "error: %s\n", message);
        abort();
    }
    fuzz_want(!fuzz.must_end, "refused: %s", message);
    snprintf(fuzz.message, sizeof(fuzz.message), "%s", message);
    longjmp(fuzz.refused, 1);
}

// To be called for a reader that does not end the process but returns with its reason. It must have cleaned up.
static inline void fuzz_refused(const char* why) {
    fuzz_check_message(why);
    snprintf(fuzz.message, sizeof(fuzz.message), "%s", why);
    fuzz.returned = 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// a run

static inline void fuzz_set_up(void) {
    const char* memory = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    const char* place = getenv("TMPDIR") ? getenv("TMPDIR") : memory;
    snprintf(fuzz.folder, sizeof(fuzz.folder), "%.200s/fuzz_XXXXXX", place);
    if (mkdtemp(fuzz.folder) == NULL) {
        fprintf(stderr, "cannot make the folder '%s'\n", fuzz.folder);
        abort();
    }
    atexit(fuzz_remove_folder);
    for (int i = 0; i < FUZZ_DESCRIPTORS; i++) {
        fuzz.was_open[i] = fcntl(i, F_GETFD) >= 0;
    }
}

// Path of the file `name` in the folder of the run. 8 are remembered.
static inline const char* fuzz_path(const char* name) {
    static char paths[8][FUZZ_PATH];
    static int turn;
    turn = (turn + 1) % 8;
    snprintf(paths[turn], sizeof(paths[turn]), "%s/%s", fuzz.folder, name);
    return paths[turn];
}

// Write a file into the folder of the run; its path.
static inline const char* fuzz_write(const char* name, const void* bytes, size_t size) {
    const char* path = fuzz_path(name);
    int f = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    fuzz_want(f >= 0 && write(f, bytes, size) == (ssize_t)size, "cannot write '%s': %s", path, strerror(errno));
    close(f);
    return path;
}

// The descriptor that the next open file gets.
static inline int fuzz_lowest_free(void) {
    int descriptor = dup(0);
    if (descriptor < 0) { // no standard input
        return 0;
    }
    close(descriptor);
    return descriptor;
}

// Give back what the run holds; `refused`: the reader had no chance to.
static inline void fuzz_clean_up(int refused) {
    for (int i = 0; i < 16; i++) {
        fuzz_want(refused || (fuzz.files[i] == NULL && fuzz.folders[i] == NULL), "the reader left a file open");
        if (fuzz.files[i] != NULL) { fclose(fuzz.files[i]); }
        if (fuzz.folders[i] != NULL) { closedir(fuzz.folders[i]); }
        fuzz.files[i] = NULL;
        fuzz.folders[i] = NULL;
    }
    int all_closed = fuzz_lowest_free() == fuzz.lowest_free;
    for (int i = 0; i < FUZZ_DESCRIPTORS && !all_closed; i++) {
        if (!fuzz.was_open[i] && fcntl(i, F_GETFD) >= 0) {
            fuzz_want(refused, "the reader left descriptor %d open", i);
            close(i);
        }
    }
    fuzz_want(refused || (fuzz.num_blocks == 0 && !fuzz.has_glob), "the reader kept %d blocks of memory, %zu bytes",
              fuzz.num_blocks, fuzz.bytes);
    if (fuzz.has_glob) { globfree(&fuzz.found); }
    for (int i = 0; i < fuzz.num_blocks; i++) {
        free(fuzz.blocks[i]);
    }
    fuzz.num_blocks = fuzz.has_glob = 0;
    fuzz.bytes = 0;
}

// One input. Returns 1 when the target came to its end, 0 when a check refused the input.
static inline int fuzz_once(void (*run)(const uint8_t*, size_t), const uint8_t* data, size_t size) {
    fuzz.lowest_free = fuzz_lowest_free();
    fuzz.data = data;
    fuzz.size = size;
    fuzz.message[0] = 0;
    fuzz.must_end = fuzz.returned = 0;
    fuzz.running = 1;
    volatile int ended = 0;
    if (setjmp(fuzz.refused) == 0) {
        run(data, size);
        ended = 1;
    } else {
        fuzz_check_message(fuzz.message);
    }
    fuzz_clean_up(!ended);
    fuzz.running = 0;
    return ended && !fuzz.returned;
}

// ---------------------------------------------------------------------------------------------------------------------
// inputs

// The first bytes of an input say how the target reads the rest: shapes, modes, repairs. Past the end: 0.
typedef struct {
    const uint8_t* bytes;
    size_t size;
} FuzzInput;

static inline int fuzz_byte(FuzzInput* in) {
    if (in->size == 0) { return 0; }
    in->size--;
    return *in->bytes++;
}

static inline uint32_t fuzz_word(FuzzInput* in) {
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) {
        word |= (uint32_t)fuzz_byte(in) << 8 * i;
    }
    return word;
}

// Text inputs of several files: up to the next ASCII record separator, which is taken away.
#define FUZZ_RECORD_SEPARATOR "\x1e"
static inline FuzzInput fuzz_part(FuzzInput* in) {
    const uint8_t* end = in->size > 0 ? (const uint8_t*)memchr(in->bytes, FUZZ_RECORD_SEPARATOR[0], in->size) : NULL;
    FuzzInput part = {in->bytes, end != NULL ? (size_t)(end - in->bytes) : in->size};
    size_t taken = part.size + (end != NULL);
    in->bytes += taken;
    in->size -= taken;
    return part;
}

// Add a seed: `options`, then the bytes of a file. Taken: the target comes to its end.
static inline void fuzz_seed(int outcome, const void* options, size_t num_options, const void* bytes, size_t size) {
    fuzz.seeds = (FuzzSeed*)realloc(fuzz.seeds, (size_t)(fuzz.num_seeds + 1) * sizeof(FuzzSeed));
    FuzzSeed* seed = &fuzz.seeds[fuzz.num_seeds++];
    seed->bytes = (uint8_t*)malloc(num_options + size + 1);
    seed->size = num_options + size;
    seed->outcome = outcome;
    memcpy(seed->bytes, options, num_options);
    memcpy(seed->bytes + num_options, bytes, size);
}

// The same with the bytes of a file of the run's folder.
static inline void fuzz_seed_file(int outcome, const void* options, size_t num_options, const char* path) {
    static uint8_t bytes[1 << 20];
    FILE* f = fopen(path, "rb");
    size_t n = f != NULL ? fread(bytes, 1, sizeof(bytes), f) : 0;
    fuzz_want(n > 0 && n < sizeof(bytes), "no seed in '%s'", path);
    fclose(f);
    fuzz_seed(outcome, options, num_options, bytes, n);
}

static inline void fuzz_free_seeds(void) {
    for (int i = 0; i < fuzz.num_seeds; i++) {
        free(fuzz.seeds[i].bytes);
    }
    free(fuzz.seeds);
    fuzz.seeds = NULL;
    fuzz.num_seeds = 0;
}

typedef struct {
    const char* name;
    void (*run)(const uint8_t* data, size_t size);
    void (*seeds)(void);
} FuzzTarget;

#ifdef FUZZ_REPLAY
#define FUZZ_TARGET(NAME) static const FuzzTarget NAME##_target = {#NAME, NAME##_run, NAME##_seeds};
#else
// libFuzzer's two entries. `NAME --seeds=FOLDER` writes the seeds and ends.
#define FUZZ_TARGET(NAME)                                                                                              \
    int LLVMFuzzerInitialize(int* argc, char*** argv);                                                                 \
    int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);                                                      \
    int LLVMFuzzerInitialize(int* argc, char*** argv) {                                                                \
        fuzz_set_up();                                                                                                 \
        for (int i = 1; i < *argc; i++) {                                                                              \
            if (strncmp((*argv)[i], "--seeds=", 8) == 0) {                                                             \
                NAME##_seeds();                                                                                        \
                fuzz_write_seeds((*argv)[i] + 8);                                                                      \
                exit(0);                                                                                               \
            }                                                                                                          \
        }                                                                                                              \
        return 0;                                                                                                      \
    }                                                                                                                  \
    int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {                                                     \
        fuzz_once(NAME##_run, data, size);                                                                             \
        return 0;                                                                                                      \
    }

static inline void fuzz_write_seeds(const char* folder) {
    for (int i = 0; i < fuzz.num_seeds; i++) {
        char path[512];
        snprintf(path, sizeof(path), "%s/seed_%03d", folder, i);
        FILE* f = fopen(path, "wb");
        fuzz_want(f != NULL && fwrite(fuzz.seeds[i].bytes, 1, fuzz.seeds[i].size, f) == fuzz.seeds[i].size,
                  "cannot write '%s'", path);
        fclose(f);
    }
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// from here on, the readers' calls are counted

#define malloc(bytes) fuzz_malloc(bytes)
#define calloc(count, size) fuzz_calloc(count, size)
#define realloc(p, bytes) fuzz_realloc(p, bytes)
#define free(p) fuzz_free(p)
#define fopen(path, mode) fuzz_fopen(path, mode)
#define fdopen(descriptor, mode) fuzz_fdopen(descriptor, mode)
#define fclose(f) fuzz_fclose(f)
#define opendir(path) fuzz_opendir(path)
#define closedir(d) fuzz_closedir(d)
#define glob(pattern, flags, on_error, found) fuzz_glob(pattern, flags, on_error, found)
#define globfree(found) fuzz_globfree(found)
#define fprintf(f, ...) fuzz_fprintf(f, __VA_ARGS__)

#define CHECK_FAILED(message) fuzz_refuse(message)

// Small, so that small inputs reach what is behind them, and runs are short.
#define TOKENIZER_FIRST_BYTES 64
#define TOKENIZER_SLOTS 16384           // more than an input has tokens: of at least 5 bytes each in encoder.json
#define TOKENIZER_GPT2_TIKTOKEN_IDS 275 // what small_vocabulary.h has
#define BPE_CACHE_ENTRIES 64
#define TOKENIZE_READ_BYTES 16

#endif
