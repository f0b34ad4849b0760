// The one way to fail: check(condition, "what: found, wanted") prints one line to stderr and exits with status 1.
// Also the file and memory calls that cannot be allowed to fail silently. Plain C11; leans on nothing.
#ifndef CHECK_H
#define CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE // fseeko and 64-bit offsets under -std=c11; the Makefile sets it too
#endif

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#ifdef __cplusplus
#define CHECK_NORETURN [[noreturn]]
#else
#define CHECK_NORETURN _Noreturn
#endif

// Print "error: <message>  [file:line]" as one line on stderr and exit with status 1.
__attribute__((format(printf, 3, 4))) CHECK_NORETURN static inline void check_failed(const char* file, int line,
                                                                                     const char* format, ...) {
    char message[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
#ifdef CHECK_FAILED // the fuzz targets (dev/fuzz) go on after a refused file; must not return
    CHECK_FAILED(message);
#endif
    const char* name = strrchr(file, '/');
    fflush(stdout);
    fprintf(stderr, "error: %s  [%s:%d]\n", message, name ? name + 1 : file, line);
    exit(EXIT_FAILURE);
}

// check(cond, "gelu_forward: n = %zu, want a multiple of 8", n): the message says what was found and what was wanted.
#define check(condition, ...)                                 \
    do {                                                      \
        if (!(condition)) {                                   \
            check_failed(__FILE__, __LINE__, __VA_ARGS__);    \
        }                                                     \
    } while (0)

// Print "warning: <message>" as one line of its own on stderr, behind what stdout still holds.
__attribute__((format(printf, 1, 2))) static inline void warning(const char* format, ...) {
    char message[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    fflush(stdout);
    fprintf(stderr, "warning: %s\n", message);
}

// malloc of `bytes` (at least 1), never NULL.
static inline void* malloc_or_die(size_t bytes) {
    void* p = malloc(bytes ? bytes : 1);
    check(p != NULL, "out of host memory: wanted %zu bytes", bytes);
    return p;
}

// calloc of `count` elements of `size` bytes, never NULL.
static inline void* calloc_or_die(size_t count, size_t size) {
    void* p = calloc(count ? count : 1, size ? size : 1);
    check(p != NULL, "out of host memory: wanted %zu x %zu bytes", count, size);
    return p;
}

// fopen; the error line names the path and the system's reason.
static inline FILE* fopen_or_die(const char* path, const char* mode) {
    FILE* f = fopen(path, mode);
    check(f != NULL, "cannot open '%s' for %s: %s", path, mode[0] == 'r' ? "reading" : "writing", strerror(errno));
    return f;
}

// Read exactly `bytes`; a short file is an error that says how much was there. `path` is for the message.
static inline void fread_or_die(void* out, size_t bytes, FILE* f, const char* path) {
    size_t got = fread(out, 1, bytes, f);
    check(got == bytes, "'%s' is truncated or unreadable: wanted %zu more bytes, found %zu", path, bytes, got);
}

// Write exactly `bytes`; a full disk is an error.
static inline void fwrite_or_die(const void* data, size_t bytes, FILE* f, const char* path) {
    size_t put = fwrite(data, 1, bytes, f);
    check(put == bytes, "cannot write '%s': wrote %zu of %zu bytes: %s", path, put, bytes, strerror(errno));
}

// Seek to `offset` bytes from the start of the file.
static inline void fseek_or_die(FILE* f, int64_t offset, const char* path) {
    check(fseeko(f, (off_t)offset, SEEK_SET) == 0, "cannot seek to byte %lld of '%s': %s", (long long)offset, path,
          strerror(errno));
}

// fclose; an error that shows only on the last flush (full disk) is an error here.
static inline void fclose_or_die(FILE* f, const char* path) {
    check(fclose(f) == 0, "cannot finish writing '%s': %s", path, strerror(errno));
}

// Size of a regular file in bytes.
static inline int64_t file_size_or_die(const char* path) {
    struct stat st;
    check(stat(path, &st) == 0, "cannot open '%s': %s", path, strerror(errno));
    check(S_ISREG(st.st_mode), "'%s' is not a regular file", path);
    return (int64_t)st.st_size;
}

#endif
