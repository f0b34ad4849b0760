// Smallest possible test harness: one process, one summary line "N passed, N failed, N skipped".
//
//     static void test_wrap(void) { expect(ring_at(9) == 1, "ring_at(9) = %d, want 1", ring_at(9)); }
//     int main(void) { unit_run(test_wrap); return unit_report(); }
//
// A test fails when any expect() in it fails; all its failures are printed. expect_dies() checks that a call ends the
// process with exactly one "error: ..." line that contains a text and a non-zero status (it runs in a forked child).
#ifndef UNIT_H
#define UNIT_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct {
    int passed, failed, skipped;
    int failures_in_test; // of the test now running
    int skipped_in_test;
} UnitState;

static UnitState unit_state;

// Report one failed expectation; at most 10 lines per test are printed.
__attribute__((format(printf, 3, 4))) static inline void unit_fail(const char* file, int line, const char* format,
                                                                   ...) {
    if (unit_state.failures_in_test++ < 10) {
        va_list args;
        va_start(args, format);
        printf("    %s:%d: ", file, line);
        vprintf(format, args);
        printf("\n");
        va_end(args);
    }
}

#define expect(condition, ...)                             \
    do {                                                   \
        if (!(condition)) {                                \
            unit_fail(__FILE__, __LINE__, __VA_ARGS__);    \
        }                                                  \
    } while (0)

// Call inside a test that cannot run here; the test counts as skipped, with the reason.
static inline void unit_skip(const char* reason) {
    printf("    skipped: %s\n", reason);
    unit_state.skipped_in_test = 1;
}

#define unit_run(test) unit_run_named(#test, test)

static inline void unit_run_named(const char* name, void (*test)(void)) {
    unit_state.failures_in_test = unit_state.skipped_in_test = 0;
    test();
    const char* verdict = unit_state.failures_in_test ? "FAILED" : unit_state.skipped_in_test ? "skipped" : "ok";
    unit_state.failed += unit_state.failures_in_test > 0;
    unit_state.skipped += unit_state.failures_in_test == 0 && unit_state.skipped_in_test;
    unit_state.passed += unit_state.failures_in_test == 0 && !unit_state.skipped_in_test;
    printf("%-8s %s\n", verdict, name);
    fflush(stdout);
}

// Run call(arg) in a child; expect one "error:" line on stderr that contains `text`, and a non-zero exit status.
static inline void expect_dies(void (*call)(void*), void* arg, const char* text) {
    int ends[2];
    fflush(stdout);
    fflush(stderr);
    if (pipe(ends) != 0) {
        expect(0, "pipe failed");
        return;
    }
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        dup2(ends[1], 1);
        close(ends[0]);
        close(ends[1]);
        call(arg);
        _exit(0); // the call came back: no error was raised
    }
    close(ends[1]);
    char output[4096];
    size_t length = 0;
    for (ssize_t n; length < sizeof(output) - 1 && (n = read(ends[0], output + length, sizeof(output) - 1 - length)) > 0;) {
        length += (size_t)n;
    }
    output[length] = 0;
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    const char* line = strstr(output, "error: ");
    expect(WIFEXITED(status) && WEXITSTATUS(status) != 0, "wanted a clean non-zero exit for '%s', got status %d: %s", text,
           status, output);
    expect(line != NULL && strstr(line, text) != NULL, "wanted an error line with '%s', got: %s", text, output);
    expect(line == NULL || strchr(line, '\n') == line + strlen(line) - 1, "wanted one error line, got: %s", output);
}

// Print the summary line; the exit status for main.
static inline int unit_report(void) {
    printf("%d passed, %d failed, %d skipped\n", unit_state.passed, unit_state.failed, unit_state.skipped);
    return unit_state.failed ? 1 : 0;
}

#endif
