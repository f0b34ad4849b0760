// The writer thread: what arrives late in few buffers is in the files, bit for bit; a failure costs the files and
// nothing else; ranks that share a model file make the one that checkpoint_write_model would have made.
#include "snapshot_writer.h"

#include <sys/resource.h>

#include "unit.h"

static char folder[64]; // temporary, removed at the end
static char why[WHY_BYTES];

enum { PATH_SIZE = 160, NUM_BUFFERS = 3, BUFFER_BYTES = 8192 };

static const char* at(const char* name) {
    static char path[8][PATH_SIZE];
    static int turn;
    snprintf(path[turn = (turn + 1) % 8], PATH_SIZE, "%s/%s", folder, name);
    return path[turn];
}

static int exists(const char* name) {
    struct stat st;
    return lstat(at(name), &st) == 0;
}

// A device that copies late: the data are in the buffer only when `wait` has returned.
typedef struct {
    char buffer[NUM_BUFFERS][BUFFER_BYTES];
    const char* from[NUM_BUFFERS]; // what is on its way into each buffer
    size_t bytes[NUM_BUFFERS];
    int microseconds; // of a copy
    int num_waits;
} Device;

static void device_wait(void* context, int i) {
    Device* device = (Device*)context;
    struct timespec pause = {0, device->microseconds * 1000L};
    nanosleep(&pause, NULL);
    memcpy(device->buffer[i], device->from[i], device->bytes[i]);
    device->num_waits++;
}

static SnapshotWriter* device_writer(Device* device, int microseconds) {
    memset(device, 0, sizeof(*device));
    device->microseconds = microseconds;
    void* buffers[NUM_BUFFERS];
    for (int i = 0; i < NUM_BUFFERS; i++) {
        buffers[i] = device->buffer[i];
    }
    return snapshot_writer_create(buffers, NUM_BUFFERS, BUFFER_BYTES, device_wait, device);
}

// Send `bytes` of `data` through the buffers, `piece` at a time; at >= 0: they are elements of an array of parameters
// from there on. Returns the number of pieces.
static int send_data(SnapshotWriter* w, Device* device, const void* data, size_t bytes, size_t piece, int64_t at) {
    int num_pieces = 0;
    for (size_t done = 0; done < bytes; num_pieces++) {
        size_t n = bytes - done < piece ? bytes - done : piece;
        int i = snapshot_writer_take(w);
        memset(device->buffer[i], 0xEE, BUFFER_BYTES); // the buffer is ours: what was in it has been written
        device->from[i] = (const char*)data + done;
        device->bytes[i] = n;
        if (at < 0) {
            snapshot_writer_append(w, i, n);
        } else {
            snapshot_writer_append_array(w, i, (size_t)at + done / sizeof(float), n / sizeof(float), 1);
        }
        done += n;
    }
    return num_pieces;
}

// Parameters [first, first + count) at [at, at + count), all that there is.
static void one_range(SnapshotWriter* w, size_t first, size_t count, size_t at) {
    StateRange range = {first, count, at};
    StateRanges ranges = {&range, 1, count};
    snapshot_writer_ranges(w, &ranges);
}

static void expect_section(const char* path, const char* name, const void* data, size_t bytes) {
    SnapshotIn in;
    if (snapshot_in_open(&in, path, why)) {
        expect(0, "%s", why);
        return;
    }
    void* found = malloc_or_die(bytes);
    int failed = snapshot_in_whole(&in, name, found, bytes, why);
    expect(!failed, "%s", why);
    expect(failed || memcmp(found, data, bytes) == 0, "'%s': section '%s' holds something else", path, name);
    free(found);
    snapshot_in_close(&in);
}

static unsigned char* some_bytes(size_t n, uint32_t seed) {
    unsigned char* bytes = (unsigned char*)malloc_or_die(n);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        bytes[i] = (unsigned char)(seed >> 24);
    }
    return bytes;
}

static void test_more_data_than_buffers(void) {
    enum { N = 500001 };
    static Device device;
    SnapshotWriter* w = device_writer(&device, 300);
    unsigned char* data = some_bytes(N, 1);
    SnapshotResult result;
    expect(!snapshot_writer_is_busy(w) && snapshot_writer_poll(w, &result) == 0, "nothing to do yet");
    snapshot_writer_open(w, at("a.bin"), 1 << 20);
    one_range(w, 100, 9000 / sizeof(float), 5);
    expect(snapshot_writer_is_busy(w) && snapshot_writer_poll(w, &result) == 0, "busy, not finished");
    snapshot_writer_begin(w, "big");
    int num_pieces = send_data(w, &device, data, N, BUFFER_BYTES, -1);
    snapshot_writer_end(w);
    snapshot_writer_begin(w, "mixed");
    int local = 4711;
    snapshot_writer_append_copy(w, &local, sizeof(local));
    local = 0;                                                    // it was copied
    num_pieces += send_data(w, &device, data + 1, 9000, 1000, 5); // parameters, but no model file
    snapshot_writer_append_copy(w, data, 3);
    snapshot_writer_end(w);
    snapshot_writer_close(w);
    snapshot_writer_wait(w, &result);
    expect(result.error == 0, "%s: %s", result.path, strerror(result.error));
    expect(strcmp(result.path, at("a.bin")) == 0, "path '%s'", result.path);
    expect(result.bytes == (uint64_t)file_size_or_die(at("a.bin")), "%llu bytes, the file has %lld",
           (unsigned long long)result.bytes, (long long)file_size_or_die(at("a.bin")));
    expect(device.num_waits == num_pieces, "%d waits for %d buffers", device.num_waits, num_pieces);
    // 60 copies of 300 us that the caller cannot be ahead of by more than its buffers
    expect(result.blocked_s > 0.0 && result.blocked_s <= result.write_s, "blocked %g s, written in %g s",
           result.blocked_s, result.write_s);
    expect(!snapshot_writer_is_busy(w) && snapshot_writer_poll(w, &result) == 0, "the result comes once");
    expect_section(at("a.bin"), "big", data, N);
    unsigned char mixed[4 + 9000 + 3] = {0x67, 0x12};
    memcpy(mixed + 4, data + 1, 9000);
    memcpy(mixed + 9004, data, 3);
    expect_section(at("a.bin"), "mixed", mixed, sizeof(mixed));
    SnapshotIn in;
    expect(snapshot_in_open(&in, at("a.bin"), why) == 0 && snapshot_in_bytes(&in, "model") == -1, "a model section: %s",
           why);
    snapshot_in_close(&in);
    snapshot_writer_wait(w, &result);
    expect(result.error == 0 && result.bytes == 0 && result.path[0] == 0, "there is nothing to wait for");
    snapshot_writer_free(w);
    free(data);
}

static void test_several_in_a_row(void) {
    static Device device;
    SnapshotWriter* w = device_writer(&device, 10);
    for (int k = 0; k < 20; k++) {
        size_t n = 1 + 5000 * (size_t)k;
        unsigned char* data = some_bytes(n, (uint32_t)k);
        snapshot_writer_open(w, at("row.bin"), 0);
        snapshot_writer_begin(w, "data");
        send_data(w, &device, data, n, BUFFER_BYTES - 100 * (size_t)k, -1);
        snapshot_writer_end(w);
        snapshot_writer_close(w);
        SnapshotResult result;
        memset(&result, 0xEE, sizeof(result));
        while (!snapshot_writer_poll(w, &result)) { // as a training loop does
            expect(snapshot_writer_is_busy(w), "not busy and no result");
            struct timespec pause = {0, 100000};
            nanosleep(&pause, NULL);
        }
        expect(result.error == 0 && result.bytes == (uint64_t)file_size_or_die(at("row.bin")),
               "checkpoint %d: error %d", k, result.error);
        expect_section(at("row.bin"), "data", data, n);
        free(data);
    }
    snapshot_writer_free(w);
}

// ---------------------------------------------------------------------------------------------------------------------
// the model file

static const GptConfig small = {3, 200, 256, 2, 2, 32}; // maxT 3, V 200, Vp 256, L 2, NH 2, C 32

static void test_model_file(void) {
    size_t n = gpt_num_parameters(&small);
    float* params = (float*)malloc_or_die(n * sizeof(float));
    static const uint32_t special[] = {0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0x80000000, 0x3F808000,
                                       0x3F818000, 0x7F7F8000, 0x00008000, 0x00000001, 0x3F808001, 0x3F807FFF};
    for (size_t i = 0; i < n; i++) {
        params[i] = i % 37 < 12 ? bits_float(special[i % 37]) : rng_normal(3, 0, i);
    }
    checkpoint_write_model(at("want.bin"), &small, params, MODEL_FILE_BF16);
    char header[MODEL_FILE_HEADER_BYTES];
    FILE* f = fopen_or_die(at("want.bin"), "rb");
    fread_or_die(header, sizeof(header), f, "want.bin");
    fclose(f);
    uint64_t file_bytes = (uint64_t)file_size_or_die(at("want.bin"));

    // three ranks at once: the first has one range, which ends in the middle of a buffer; the others have the rest by
    // turns, backwards, with padding of unlike lengths in their arrays; the one in the middle has the header
    enum { RANKS = 3 };
    static Device device[RANKS];
    StateRanges ranges[RANKS];
    float *array[RANKS], *values[RANKS]; // with the padding and without
    memset(ranges, 0, sizeof(ranges));
    state_ranges_add(&ranges[0], 0, 777, 0);
    for (size_t end = n, i = 0; end > 777; i++) {
        size_t first = end > 777 + 1499 + 97 * i ? end - 1499 - 97 * i : 777;
        StateRanges* own = &ranges[1 + i % 2];
        size_t at = own->num > 0 ? own->range[own->num - 1].at + own->range[own->num - 1].count + 31 * i % 256 : 7;
        state_ranges_add(own, first, end - first, at);
        end = first;
    }
    SnapshotWriter* w[RANKS];
    for (int r = 0; r < RANKS; r++) {
        StateRange last = ranges[r].range[ranges[r].num - 1];
        expect(r == 0 || ranges[r].num > 3, "rank %d has %d ranges: too few for a test", r, ranges[r].num);
        array[r] = (float*)malloc_or_die((last.at + last.count) * sizeof(float));
        values[r] = (float*)malloc_or_die(ranges[r].count * sizeof(float));
        memset(array[r], 0xEE, (last.at + last.count) * sizeof(float));
        size_t done = 0;
        for (int i = 0; i < ranges[r].num; i++) {
            StateRange range = ranges[r].range[i];
            memcpy(array[r] + range.at, params + range.first, range.count * sizeof(float));
            memcpy(values[r] + done, params + range.first, range.count * sizeof(float));
            done += range.count;
        }
        char name[32];
        snprintf(name, sizeof(name), "shard_%05d.bin", r);
        w[r] = device_writer(&device[r], 50);
        snapshot_writer_open(w[r], at(name), 0);
        snapshot_writer_ranges(w[r], &ranges[r]);
        snapshot_writer_model(w[r], at("model.bin"), r == 1 ? header : NULL, file_bytes);
        snapshot_writer_begin(w[r], "before");
        snapshot_writer_append_copy(w[r], "x", 1);
        snapshot_writer_end(w[r]);
        snapshot_writer_begin(w[r], "master");
    }
    for (int r = 0; r < RANKS; r++) { // pieces end within ranges and within padding
        size_t from = ranges[r].range[0].at, count = state_ranges_span(&ranges[r]);
        send_data(w[r], &device[r], array[r] + from, count * sizeof(float), r == 2 ? BUFFER_BYTES : 4 * 599,
                  (int64_t)from);
    }
    for (int r = 0; r < RANKS; r++) {
        snapshot_writer_end(w[r]);
        snapshot_writer_begin(w[r], "m"); // FP32, but not parameters
        send_data(w[r], &device[r], params, 40000, BUFFER_BYTES, -1);
        snapshot_writer_end(w[r]);
        snapshot_writer_close(w[r]);
    }
    char command[512];
    for (int r = 0; r < RANKS; r++) {
        char name[32];
        snprintf(name, sizeof(name), "shard_%05d.bin", r);
        SnapshotResult result;
        snapshot_writer_wait(w[r], &result);
        snapshot_writer_free(w[r]);
        uint64_t want_bytes = (uint64_t)file_size_or_die(at(name)) + 2 * ranges[r].count + (r == 1 ? 1024 : 0);
        expect(result.error == 0 && result.bytes == want_bytes, "rank %d: error %d, %llu bytes, want %llu", r,
               result.error, (unsigned long long)result.bytes, (unsigned long long)want_bytes);
        expect_section(at(name), "master", values[r], ranges[r].count * sizeof(float));
        expect_section(at(name), "m", params, 40000);
        SnapshotIn in;
        SnapshotModelSlice slice;
        check(snapshot_in_open(&in, at(name), why) == 0, "%s", why);
        check(snapshot_in_whole(&in, "model", &slice, sizeof(slice), why) == 0, "%s", why);
        snapshot_in_close(&in);
        expect(slice.first == ranges[r].range[0].first && slice.count == ranges[r].count,
               "rank %d: %llu parameters, the first is %llu", r, (unsigned long long)slice.count,
               (unsigned long long)slice.first);
        size_t num = (size_t)ranges[r].num;
        SnapshotPart* parts = (SnapshotPart*)malloc_or_die(num * sizeof(SnapshotPart));
        for (size_t i = 0; i < num; i++) {
            parts[i].offset = 1024 + 2 * ranges[r].range[i].first;
            parts[i].bytes = 2 * ranges[r].range[i].count;
        }
        expect(snapshot_check_parts(at("model.bin"), parts, num, slice.hash, why) == 0, "%s", why);
        expect(snapshot_check_parts(at("want.bin"), parts, num, slice.hash, why) == 0, "%s", why);
        expect(num == 1 || snapshot_check_parts(at("want.bin"), parts, num - 1, slice.hash, why) == 1, "one too few");
        SnapshotPart part = parts[0];
        parts[0] = parts[num - 1];
        parts[num - 1] = part;
        expect(num == 1 || snapshot_check_parts(at("want.bin"), parts, num, slice.hash, why) == 1, "in another order");
        expect(slice.header_hash == (r == 1 ? XXH3_64bits(header, sizeof(header)) : 0), "rank %d: hash of the header",
               r);
        free(parts);
        free(array[r]);
        free(values[r]);
        state_ranges_free(&ranges[r]);
    }
    snprintf(command, sizeof(command), "cmp %s %s", at("model.bin"), at("want.bin"));
    expect(system(command) == 0, "the model file is not the one that checkpoint_write_model makes");
    free(params);
}

// ---------------------------------------------------------------------------------------------------------------------
// failures

// One checkpoint of `bytes`; with_model: half as much to a model file. Returns its result.
static SnapshotResult one_checkpoint(SnapshotWriter* w, Device* device, const char* path, const char* model_path,
                                     const void* data, size_t bytes) {
    static const char header[MODEL_FILE_HEADER_BYTES] = {1};
    snapshot_writer_open(w, path, 0);
    one_range(w, 0, bytes / sizeof(float), 0);
    if (model_path != NULL) {
        snapshot_writer_model(w, model_path, header, MODEL_FILE_HEADER_BYTES + bytes / 2);
    }
    snapshot_writer_begin(w, "data");
    send_data(w, device, data, bytes, BUFFER_BYTES, 0);
    snapshot_writer_append_copy(w, "tail", 4);
    snapshot_writer_end(w);
    snapshot_writer_close(w);
    SnapshotResult result;
    snapshot_writer_wait(w, &result);
    return result;
}

// In a child: no file may be longer than 50,000 bytes. Neither SIGXFSZ nor anything else ends the process, since the
// thread takes no signals; the next checkpoint, a smaller one, is fine.
static void test_full_disk(void) {
    enum { N = 200000 };
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        static Device device;
        unsigned char* data = some_bytes(N, 9);
        struct rlimit limit = {50000, 50000};
        check(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
        SnapshotWriter* w = device_writer(&device, 0);
        unit_state.failures_in_test = 0;
        SnapshotResult result = one_checkpoint(w, &device, at("full.bin"), NULL, data, N);
        expect(result.error == EFBIG && strcmp(result.path, at("full.bin")) == 0, "error %d, '%s'", result.error,
               result.path);
        expect(!exists("full.bin"), "the container stays");
        expect(device.num_waits == N / BUFFER_BYTES + 1, "after the failure buffers are waited for, too: %d",
               device.num_waits);
        result = one_checkpoint(w, &device, at("full.bin"), at("full_model.bin"), data, N); // reserving the model fails
        expect(result.error == EFBIG && strcmp(result.path, at("full_model.bin")) == 0, "error %d, '%s'", result.error,
               result.path);
        expect(!exists("full.bin") && !exists("full_model.bin"), "the files stay");
        result = one_checkpoint(w, &device, at("full.bin"), at("full_model.bin"), data, 60000); // the container fails
        expect(result.error == EFBIG && strcmp(result.path, at("full.bin")) == 0, "error %d, '%s'", result.error,
               result.path);
        expect(!exists("full.bin") && !exists("full_model.bin"), "the files stay");
        result = one_checkpoint(w, &device, at("full.bin"), at("full_model.bin"), data, 20000);
        expect(result.error == 0 && exists("full.bin") && exists("full_model.bin"), "after failures: error %d",
               result.error);
        snapshot_writer_free(w);
        free(data);
        fflush(stdout);
        _exit(unit_state.failures_in_test);
    }
    int status = 0;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", (unsigned)status);
}

// A rank that has little to write, and not the header, gives the file its whole size all the same.
static void test_model_file_size(void) {
    enum { N = 40000 };
    static Device device;
    SnapshotWriter* w = device_writer(&device, 0);
    unsigned char* data = some_bytes(N, 10);
    SnapshotResult result;
    snapshot_writer_open(w, at("b.bin"), 0);
    one_range(w, 0, N / sizeof(float), 0);
    snapshot_writer_model(w, at("b_model.bin"), NULL, 300000);
    snapshot_writer_begin(w, "master");
    send_data(w, &device, data, N, BUFFER_BYTES, 0);
    snapshot_writer_end(w);
    snapshot_writer_close(w);
    snapshot_writer_wait(w, &result);
    expect(result.error == 0 && file_size_or_die(at("b_model.bin")) == 300000, "error %d, %lld bytes, want 300000",
           result.error, (long long)file_size_or_die(at("b_model.bin")));
    snapshot_writer_free(w);
    free(data);
}

static void test_errors(void) {
    enum { N = 200000 };
    static Device device;
    SnapshotWriter* w = device_writer(&device, 0);
    unsigned char* data = some_bytes(N, 9);
    SnapshotResult result = one_checkpoint(w, &device, at("no/such/a.bin"), at("m.bin"), data, N);
    expect(result.error == ENOENT && strcmp(result.path, at("no/such/a.bin")) == 0, "error %d, '%s'", result.error,
           result.path);
    expect(!exists("m.bin"), "a model file without its checkpoint");
    result = one_checkpoint(w, &device, at("a2.bin"), at("no/such/m.bin"), data, N);
    expect(result.error == ENOENT && strcmp(result.path, at("no/such/m.bin")) == 0, "error %d, '%s'", result.error,
           result.path);
    expect(!exists("a2.bin"), "a checkpoint without its model file");
    snapshot_writer_open(w, at("a3.bin"), 0);
    snapshot_writer_begin(w, "twice");
    snapshot_writer_end(w);
    snapshot_writer_begin(w, "twice");
    send_data(w, &device, data, N, BUFFER_BYTES, -1);
    snapshot_writer_end(w);
    snapshot_writer_close(w);
    snapshot_writer_wait(w, &result);
    expect(result.error == EINVAL && !exists("a3.bin"), "one section twice: error %d", result.error);
    // not closed: nothing of it stays
    snapshot_writer_open(w, at("a4.bin"), 0);
    one_range(w, 0, N / sizeof(float), 0);
    snapshot_writer_model(w, at("m4.bin"), NULL, 1024 + N / 2);
    snapshot_writer_begin(w, "data");
    send_data(w, &device, data, N, BUFFER_BYTES, 0);
    snapshot_writer_end(w);
    snapshot_writer_free(w);
    expect(!exists("a4.bin") && !exists("m4.bin"), "the files of a checkpoint that was not closed stay");
    snapshot_writer_free(NULL);
    // closed: freeing waits for it
    w = device_writer(&device, 500);
    snapshot_writer_open(w, at("a5.bin"), 0);
    snapshot_writer_begin(w, "data");
    send_data(w, &device, data, N, BUFFER_BYTES, -1);
    snapshot_writer_end(w);
    snapshot_writer_close(w);
    snapshot_writer_free(w);
    expect_section(at("a5.bin"), "data", data, N);
    if (access("/dev/full", W_OK) != 0) {
        unit_skip("no /dev/full to play a full disk");
    } else {
        w = device_writer(&device, 0);
        check(symlink("/dev/full", at("full_link.bin")) == 0, "symlink");
        result = one_checkpoint(w, &device, at("a6.bin"), at("full_link.bin"), data, N);
        expect(result.error == ENOSPC && strcmp(result.path, at("full_link.bin")) == 0, "error %d, '%s'", result.error,
               result.path);
        expect(!exists("a6.bin") && !exists("full_link.bin"), "the files stay");
        snapshot_writer_free(w);
    }
    free(data);
}

// A signal to the process finds no thread but the main one: it stays pending while that one does not take it.
static void test_signals(void) {
    static Device device;
    SnapshotWriter* w = device_writer(&device, 0);
    sigset_t one, before, pending;
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    sigaddset(&one, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &one, &before);
    kill(getpid(), SIGUSR1); // taken by another thread either of them would end this test
    kill(getpid(), SIGTERM);
    SnapshotResult result = one_checkpoint(w, &device, at("signal.bin"), NULL, "data", 4);
    expect(result.error == 0, "error %d", result.error);
    sigpending(&pending);
    expect(sigismember(&pending, SIGUSR1) && sigismember(&pending, SIGTERM),
           "a signal was taken by the writer's thread");
    int got;
    while (sigpending(&pending) == 0 && (sigismember(&pending, SIGUSR1) || sigismember(&pending, SIGTERM))) {
        sigwait(&one, &got);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    snapshot_writer_free(w);
}

static void misuse(void* which) {
    static Device device;
    SnapshotWriter* w = device_writer(&device, 0);
    switch ((int)(intptr_t)which) {
    case 0:
        snapshot_writer_begin(w, "early");
        break;
    case 1:
        snapshot_writer_open(w, at("x.bin"), 0);
        snapshot_writer_open(w, at("y.bin"), 0);
        break;
    case 2:
        snapshot_writer_open(w, at("x.bin"), 0);
        snapshot_writer_append(w, 0, 4);
        break;
    case 3:
        for (int i = 0; i <= NUM_BUFFERS; i++) {
            snapshot_writer_take(w);
        }
        break;
    default: {
        int what = (int)(intptr_t)which;
        size_t model_bytes = 1024 + 2 * (what == 8 ? 3009 : 3010); // ranges end at parameter 3010
        StateRange range[] = {{10, 2000, 0}, {2010, 1000, 2100}};
        StateRanges ranges = {range, 2, 3000};
        snapshot_writer_open(w, at("x.bin"), 0);
        snapshot_writer_ranges(w, &ranges);
        if (what == 9) { snapshot_writer_ranges(w, &ranges); }
        snapshot_writer_model(w, at("z.bin"), NULL, model_bytes);
        snapshot_writer_begin(w, "master");
        for (int i = 0; i < NUM_BUFFERS; i++) {
            device.from[i] = device.buffer[i];
        }
        int first = snapshot_writer_take(w), second = snapshot_writer_take(w);
        snapshot_writer_append_array(w, first, 0, what == 4 ? BUFFER_BYTES / 4 + 1 : what == 7 ? 1999 : 2048, 1);
        size_t at_second = what == 6 ? 2047 : what == 10 ? 2101 : 2100;
        if (what != 5) { snapshot_writer_append_array(w, second, at_second, 1000, 1); }
        snapshot_writer_end(w);
        break;
    }
    }
}

static void test_misuse(void) {
    static const char* const what[] = {"no checkpoint is open",     "before the result of the first",
                                       "want one that",             "all 3 buffers",
                                       "at most the buffer's 8192", "ends 1000 elements before",
                                       "from 2047 on",              "from 2100 on, want them from 1999 on",
                                       "parameters up to 3010",     "want them once",
                                       "from 2101 on"};
    for (size_t i = 0; i < sizeof(what) / sizeof(what[0]); i++) {
        expect_dies(misuse, (void*)(intptr_t)i, what[i]);
    }
}

// What the writer's thread was asked to do, and where it ran.
typedef struct {
    int answer, calls;
    pthread_t thread;
} Errand;

static int run_errand(void* errand) {
    Errand* e = (Errand*)errand;
    e->calls++;
    e->thread = pthread_self();
    return e->answer;
}

// A call runs once, in the other thread, between checkpoints; its errno is the result, and no failure outlives it.
static void test_call(void) {
    Device device;
    SnapshotWriter* w = device_writer(&device, 10);
    SnapshotResult result;
    int answers[] = {0, ENOSPC, 0};
    for (int i = 0; i < 3; i++) {
        Errand errand;
        memset(&errand, 0, sizeof(errand));
        errand.answer = answers[i];
        snapshot_writer_call(w, run_errand, &errand);
        snapshot_writer_wait(w, &result);
        expect(errand.calls == 1 && !pthread_equal(errand.thread, pthread_self()), "call %d ran %d times", i, errand.calls);
        expect(result.error == answers[i], "call %d: error %d", i, result.error);
        snapshot_writer_open(w, at("between.bin"), 0);
        snapshot_writer_close(w);
        snapshot_writer_wait(w, &result);
        expect(result.error == 0, "the checkpoint behind call %d: error %d", i, result.error);
    }
    snapshot_writer_free(w);
}

// Without `wait` a buffer is full when it is handed over.
static void test_no_wait(void) {
    char buffer[BUFFER_BYTES];
    void* buffers[] = {buffer};
    SnapshotWriter* w = snapshot_writer_create(buffers, 1, BUFFER_BYTES, NULL, NULL);
    snapshot_writer_open(w, at("no_wait.bin"), 0);
    snapshot_writer_begin(w, "x");
    for (int i = 0; i < 5; i++) {
        memset(buffers[snapshot_writer_take(w)], 'a' + i, 1000);
        snapshot_writer_append(w, 0, 1000);
    }
    snapshot_writer_end(w);
    snapshot_writer_close(w);
    SnapshotResult result;
    snapshot_writer_wait(w, &result);
    char want[5000];
    for (int i = 0; i < 5; i++) {
        memset(want + 1000 * i, 'a' + i, 1000);
    }
    expect(result.error == 0, "error %d", result.error);
    expect_section(at("no_wait.bin"), "x", want, sizeof(want));
    snapshot_writer_free(w);
}

// A buffer of several of the pieces in which the thread hashes and writes.
static void test_large_buffer(void) {
    static const GptConfig wide = {8, 6000, 6016, 1, 2, 96};
    size_t n = gpt_num_parameters(&wide);
    float* params = (float*)malloc_or_die(n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        params[i] = (float)i + 1.0f;
    }
    checkpoint_write_model(at("wide_want.bin"), &wide, params, MODEL_FILE_BF16);
    ModelFileHeader header = checkpoint_header(&wide, MODEL_FILE_BF16);
    void* buffers[] = {malloc_or_die(n * sizeof(float))};
    memcpy(buffers[0], params, n * sizeof(float));
    SnapshotWriter* w = snapshot_writer_create(buffers, 1, n * sizeof(float), NULL, NULL);
    StateRange range[] = {{0, 10, 0}, {10, n - 10, 10}};
    StateRanges ranges = {range, 2, n};
    expect(2 * SNAPSHOT_CHUNK < n * sizeof(float), "%zu parameters are too few for a test", n);
    snapshot_writer_open(w, at("wide.bin"), 0);
    snapshot_writer_ranges(w, &ranges);
    snapshot_writer_model(w, at("wide_model.bin"), &header, (uint64_t)file_size_or_die(at("wide_want.bin")));
    snapshot_writer_begin(w, "master");
    snapshot_writer_append_array(w, snapshot_writer_take(w), 0, n, 1);
    snapshot_writer_end(w);
    snapshot_writer_close(w);
    SnapshotResult result;
    snapshot_writer_wait(w, &result);
    expect(result.error == 0, "error %d", result.error);
    expect_section(at("wide.bin"), "master", params, n * sizeof(float));
    char command[512];
    snprintf(command, sizeof(command), "cmp %s %s", at("wide_model.bin"), at("wide_want.bin"));
    expect(system(command) == 0, "the model file is not the one that checkpoint_write_model makes");
    snapshot_writer_free(w);
    free(buffers[0]);
    free(params);
}

int main(void) {
    snprintf(folder, sizeof(folder), "/tmp/test_snapshot_writer_XXXXXX");
    check(mkdtemp(folder) != NULL, "cannot make a temporary folder");
    unit_run(test_more_data_than_buffers);
    unit_run(test_several_in_a_row);
    unit_run(test_model_file);
    unit_run(test_full_disk);
    unit_run(test_model_file_size);
    unit_run(test_errors);
    unit_run(test_signals);
    unit_run(test_misuse);
    unit_run(test_call);
    unit_run(test_no_wait);
    unit_run(test_large_buffer);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command) != 0 || unit_report();
}
