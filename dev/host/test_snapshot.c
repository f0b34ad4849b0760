// Our own checkpoints: the container file against every truncation, every flipped bit and forged tables; the folders
// against every state that a killed run can leave.
#include "snapshot.h"

#include <math.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "unit.h"

static char folder[64];       // temporary, removed at the end
static char quick_folder[64]; // another one, in memory where there is such a place: fsync costs nothing there
static char why[WHY_BYTES];

static const char* at(const char* name) {
    static char path[8][160];
    static int turn;
    snprintf(path[turn = (turn + 1) % 8], 160, "%s/%s", folder, name);
    return path[turn];
}

enum { RUN_SIZE = 160 };

// An empty folder for one test; its name into run (RUN_SIZE).
static void fresh_run(char* run, const char* parent, const char* name) {
    snprintf(run, RUN_SIZE, "%s/%s", parent, name);
    check(mkdir(run, 0700) == 0, "cannot make '%s'", run);
}

static int exists(const char* run, const char* name) {
    char path[512];
    struct stat st;
    snprintf(path, sizeof(path), "%s/%s", run, name);
    return lstat(path, &st) == 0;
}

static void write_bytes(const char* path, const void* bytes, size_t n) {
    FILE* f = fopen_or_die(path, "wb");
    fwrite_or_die(bytes, n, f, path);
    fclose_or_die(f, path);
}

static unsigned char* read_bytes(const char* path, size_t* n) {
    *n = (size_t)file_size_or_die(path);
    unsigned char* bytes = (unsigned char*)malloc_or_die(*n);
    FILE* f = fopen_or_die(path, "rb");
    fread_or_die(bytes, *n, f, path);
    fclose_or_die(f, path);
    return bytes;
}

static unsigned char byte_of(size_t section, size_t i) { return (unsigned char)(7 * i + 31 * section + (i >> 8)); }

// Sections "s0", "s1", ... of these sizes, appended in pieces of `piece` bytes. Returns what snapshot_out_close says.
static int write_container(const char* path, const size_t* sizes, size_t n, size_t piece, uint64_t expected_bytes) {
    SnapshotOut out;
    snapshot_out_open(&out, path, expected_bytes);
    for (size_t s = 0; s < n; s++) {
        char name[24];
        snprintf(name, sizeof(name), "s%zu", s);
        snapshot_out_begin(&out, name);
        unsigned char* data = (unsigned char*)malloc_or_die(sizes[s]);
        for (size_t i = 0; i < sizes[s]; i++) {
            data[i] = byte_of(s, i);
        }
        for (size_t i = 0; i < sizes[s]; i += piece) {
            snapshot_out_append(&out, data + i, sizes[s] - i < piece ? sizes[s] - i : piece);
        }
        free(data);
        snapshot_out_end(&out);
    }
    return snapshot_out_close(&out);
}

// Open the container and read all its sections. Returns 0, or 1 with the reason in why.
static int read_container(const char* path) {
    SnapshotIn in;
    why[0] = 0;
    if (snapshot_in_open(&in, path, why)) {
        return 1;
    }
    int failed = 0;
    for (uint32_t s = 0; !failed && s < in.header.num_sections; s++) {
        const char* name = in.header.section[s].name;
        size_t bytes = in.header.section[s].bytes;
        void* data = malloc_or_die(bytes);
        failed = snapshot_in_whole(&in, name, data, bytes, why);
        free(data);
    }
    snapshot_in_close(&in);
    return failed;
}

// ---------------------------------------------------------------------------------------------------------------------
// the container

static void test_round_trip(void) {
    // lengths on both sides of the alignment and of the chunk; an empty section in the middle and at the end
    static const size_t sizes[] = {1, 0, 4095, 4096, 4097, 3 * SNAPSHOT_CHUNK + 5, 123, 0};
    enum { N = sizeof(sizes) / sizeof(sizes[0]) };
    static const size_t pieces[] = {SNAPSHOT_CHUNK * 8, 1000003, 4096};
    for (size_t p = 0; p < sizeof(pieces) / sizeof(pieces[0]); p++) {
        const char* path = at("round.bin");
        expect(write_container(path, sizes, N, pieces[p], p == 1 ? 64 << 20 : 0) == 0, "cannot write");
        uint64_t want_bytes = SNAPSHOT_ALIGN;
        for (size_t s = 0; s < N; s++) {
            want_bytes += (sizes[s] + 4095) / 4096 * 4096;
        }
        expect((uint64_t)file_size_or_die(path) == want_bytes,
               "file of %lld bytes, want %llu: what was reserved and not needed is to go",
               (long long)file_size_or_die(path), (unsigned long long)want_bytes);
        SnapshotIn in;
        expect(snapshot_in_open(&in, path, why) == 0, "%s", why);
        for (size_t k = 0; k < N; k++) {
            size_t s = N - 1 - k; // in another order than written
            char name[24];
            snprintf(name, sizeof(name), "s%zu", s);
            expect(snapshot_in_bytes(&in, name) == (int64_t)sizes[s], "section %zu: wrong length", s);
            unsigned char* data = (unsigned char*)malloc_or_die(sizes[s]);
            expect(snapshot_in_begin(&in, name, sizes[s], why) == 0, "%s", why);
            size_t half = sizes[s] / 3;
            expect(snapshot_in_read(&in, data, half, why) == 0, "%s", why);
            expect(snapshot_in_read(&in, data + half, sizes[s] - half, why) == 0, "%s", why);
            expect(snapshot_in_end(&in, why) == 0, "%s", why);
            size_t wrong = 0;
            for (size_t i = 0; i < sizes[s]; i++) {
                wrong += data[i] != byte_of(s, i);
            }
            expect(wrong == 0, "section %zu: %zu wrong bytes", s, wrong);
            free(data);
        }
        snapshot_in_close(&in);
    }
    expect(write_container(at("none.bin"), sizes, 0, 1, 0) == 0 && read_container(at("none.bin")) == 0,
           "a file without sections: %s", why);
}

// The file is what the head comment of snapshot.h says, byte for byte (one section, 8192 bytes): a later version must
// still read it.
static void test_layout(void) {
    SnapshotOut out;
    snapshot_out_open(&out, at("layout.bin"), 0);
    snapshot_out_begin(&out, "abc");
    snapshot_out_append(&out, "hello", 5);
    snapshot_out_end(&out);
    expect(snapshot_out_close(&out) == 0, "cannot write");
    size_t n;
    unsigned char* file = read_bytes(at("layout.bin"), &n);
    // clang-format off
    static const unsigned char head[] = {
        'G', 'P', 'T', 'F', 'P', '8', 'C', 'K', 1, 0, 0, 0, 1, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0,
        'a', 'b', 'c', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0,
    };
    // clang-format on
    expect(n == 8192, "%zu bytes, want 8192", n);
    expect(memcmp(file, head, sizeof(head)) == 0, "header or table are not as documented");
    expect(memcmp(file + 4096, "hello", 6) == 0, "the section does not begin at byte 4096");
    uint64_t hash, want = XXH3_64bits(file + 4096, 4096);
    memcpy(&hash, file + 56, 8);
    expect(hash == want, "hash of the section %016llx, want %016llx", (unsigned long long)hash,
           (unsigned long long)want);
    memcpy(&hash, file + 4088, 8);
    want = XXH3_64bits(file, 4088);
    expect(hash == want, "hash of the header %016llx, want %016llx", (unsigned long long)hash,
           (unsigned long long)want);
    // XXH3_64bits of nothing, from xxHash's own description: the hash is that function and no other
    expect(XXH3_64bits("", 0) == 0x2D06800538D394C2u, "XXH3 of nothing is %016llx",
           (unsigned long long)XXH3_64bits("", 0));
    free(file);
}

static const size_t small_sizes[] = {100, 0, 4100};

static void test_truncated(void) {
    check(write_container(at("small.bin"), small_sizes, 3, 4096, 0) == 0, "cannot write");
    size_t n;
    unsigned char* file = read_bytes(at("small.bin"), &n);
    expect(n == 4 * 4096, "%zu bytes, want 16384", n);
    const char* path = at("cut.bin");
    write_bytes(path, file, n);
    for (size_t k = n; k-- > 0;) {
        check(truncate(path, (off_t)k) == 0, "truncate");
        expect(read_container(path) == 1, "cut to %zu of %zu bytes and not noticed", k, n);
        expect(strstr(why, path) != NULL && strchr(why, '\n') == NULL, "wanted one line with the file's name: %s", why);
    }
    expect(strstr(why, "0 bytes, want a header") != NULL, "an empty file: %s", why);
    file = (unsigned char*)realloc(file, n + 4096);
    memset(file + n, 0, 4096);
    for (size_t more = 1; more <= 4096; more += 4095) {
        write_bytes(path, file, n + more);
        expect(read_container(path) == 1 && strstr(why, "want the 16384") != NULL, "%zu bytes too many: %s", more, why);
    }
    free(file);
}

static void test_flipped_bits(void) {
    size_t n;
    unsigned char* file = read_bytes(at("small.bin"), &n);
    const char* path = at("flipped.bin");
    write_bytes(path, file, n);
    expect(read_container(path) == 0, "%s", why);
    int fd = open(path, O_WRONLY);
    check(fd >= 0, "cannot open '%s'", path);
    size_t missed = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char flipped = file[i] ^ (unsigned char)(1u << (i % 8));
        check(pwrite(fd, &flipped, 1, (off_t)i) == 1, "pwrite");
        missed += read_container(path) == 0;
        check(pwrite(fd, &file[i], 1, (off_t)i) == 1, "pwrite");
    }
    expect(missed == 0, "%zu of %zu flipped bits were not noticed", missed, n);
    expect(read_container(path) == 0, "the mended file is refused: %s", why);
    close(fd);
    free(file);
}

static void test_wrong_questions(void) {
    SnapshotIn in;
    unsigned char data[5000];
    check(snapshot_in_open(&in, at("small.bin"), why) == 0, "%s", why);
    expect(snapshot_in_bytes(&in, "s9") == -1 && snapshot_in_bytes(&in, "s0") == 100, "lengths");
    expect(snapshot_in_begin(&in, "s9", 1, why) == 1 && strstr(why, "has no section 's9'"), "%s", why);
    expect(snapshot_in_begin(&in, "s0", 101, why) == 1 && strstr(why, "has 100 bytes, want 101"), "%s", why);
    expect(snapshot_in_read(&in, data, 1, why) == 1 && strstr(why, "no section is open"), "%s", why);
    expect(snapshot_in_end(&in, why) == 1 && strstr(why, "no section is open"), "%s", why);
    expect(snapshot_in_begin(&in, "s2", 4100, why) == 0 && snapshot_in_read(&in, data, 4000, why) == 0, "%s", why);
    expect(snapshot_in_read(&in, data, 101, why) == 1 && strstr(why, "has 100 bytes left, want 101"), "%s", why);
    expect(snapshot_in_end(&in, why) == 1 && strstr(why, "4000 bytes of section 's2' were read, want all 4100"), "%s",
           why);
    expect(snapshot_in_whole(&in, "s2", data, 4100, why) == 0, "it can be read again: %s", why);
    snapshot_in_close(&in);
    snapshot_in_close(&in); // twice is harmless
    expect(snapshot_in_open(&in, at("no such file"), why) == 1 && strstr(why, "No such file"), "%s", why);
    expect(snapshot_in_bytes(&in, "s0") == -1 && snapshot_in_begin(&in, "s0", 100, why) == 1,
           "a file that is not open");
    expect(snapshot_in_open(&in, folder, why) == 1 && strstr(why, "not a regular file"), "%s", why);
    check(mkfifo(at("pipe"), 0600) == 0, "mkfifo");
    expect(snapshot_in_open(&in, at("pipe"), why) == 1 && strstr(why, "not a regular file"), "%s", why);

    // cut while it is open
    check(write_container(at("cut.bin"), small_sizes, 3, 4096, 0) == 0, "cannot write");
    check(snapshot_in_open(&in, at("cut.bin"), why) == 0, "%s", why);
    check(truncate(at("cut.bin"), 9000) == 0, "truncate");
    expect(snapshot_in_whole(&in, "s2", data, 4100, why) == 1 && strstr(why, "ends at byte 9000"), "%s", why);
    snapshot_in_close(&in);
}

// A header that is wrong, with the hash that makes it look right.
static void expect_forged(void (*forge)(SnapshotHeader*), const char* what) {
    size_t n;
    unsigned char* file = read_bytes(at("small.bin"), &n);
    SnapshotHeader header;
    memcpy(&header, file, sizeof(header));
    forge(&header);
    header.hash = snapshot_header_hash(&header);
    memcpy(file, &header, sizeof(header));
    write_bytes(at("forged.bin"), file, header.file_bytes < n ? (size_t)header.file_bytes : n);
    SnapshotIn in;
    int failed = snapshot_in_open(&in, at("forged.bin"), why);
    expect(failed == 1 && strstr(why, what) != NULL, "wanted a complaint about '%s', got: %s", what,
           failed ? why : "nothing");
    if (!failed) {
        snapshot_in_close(&in);
    }
    free(file);
}

static void forge_duplicate(SnapshotHeader* h) { memcpy(h->section[2].name, h->section[0].name, 16); }
static void forge_overlap(SnapshotHeader* h) { h->section[2].offset = h->section[0].offset; }
static void forge_gap(SnapshotHeader* h) { h->section[1].offset = h->section[2].offset += 4096; }
static void forge_into_header(SnapshotHeader* h) { h->section[0].offset = 0; }
static void forge_huge(SnapshotHeader* h) { h->section[0].bytes = UINT64_MAX; }
static void forge_huge_filling(SnapshotHeader* h) { h->section[0].bytes = UINT64_MAX - 4096 - 8191; }
static void forge_too_long(SnapshotHeader* h) { h->section[2].bytes = 8193; }
static void forge_no_filling(SnapshotHeader* h) { h->file_bytes = 16383; }
static void forge_shorter(SnapshotHeader* h) { h->section[2].bytes = 4096; }
static void forge_fewer(SnapshotHeader* h) { h->num_sections = 2; }
static void forge_many(SnapshotHeader* h) { h->num_sections = 33; }
static void forge_very_many(SnapshotHeader* h) { h->num_sections = UINT32_MAX; }
static void forge_no_name(SnapshotHeader* h) { memset(h->section[1].name, 0, 16); }
static void forge_long_name(SnapshotHeader* h) { memset(h->section[1].name, 'x', 16); }
static void forge_name_tail(SnapshotHeader* h) { h->section[1].name[9] = 'x'; }
static void forge_control_name(SnapshotHeader* h) { h->section[1].name[1] = '\n'; }
static void forge_size(SnapshotHeader* h) { h->file_bytes += 4096; }
static void forge_version(SnapshotHeader* h) { h->version = 2; }
static void forge_magic(SnapshotHeader* h) { h->magic[7] = '!'; }

static void test_forged(void) {
    expect_forged(forge_duplicate, "two sections 's0'");
    expect_forged(forge_overlap, "section 's2' begins at byte 4096, want 8192");
    expect_forged(forge_gap, "section 's1' begins at byte 12288, want 8192");
    expect_forged(forge_into_header, "section 's0' begins at byte 0, want 4096");
    expect_forged(forge_huge, "section 's0' of 18446744073709551615 bytes");
    expect_forged(forge_huge_filling, "section 's0' of 18446744073709539328 bytes");
    expect_forged(forge_too_long, "section 's2' of 8193 bytes");
    expect_forged(forge_no_filling, "section 's2' of 4100 bytes at byte 8192, but the file has 16383");
    expect_forged(forge_shorter, "its sections end at byte 12288");
    expect_forged(forge_fewer, "its sections end at byte 8192");
    expect_forged(forge_many, "33 sections");
    expect_forged(forge_very_many, "4294967295 sections");
    expect_forged(forge_no_name, "no sound name");
    expect_forged(forge_long_name, "no sound name");
    expect_forged(forge_name_tail, "no sound name");
    expect_forged(forge_control_name, "no sound name");
    expect_forged(forge_size, "16384 bytes, want the 20480");
    expect_forged(forge_version, "version 2, want 1");
    expect_forged(forge_magic, "no checkpoint file");
}

// Sections that cannot be: the writer says EINVAL, and leaves no file.
static void test_wrong_sections(void) {
    static const char* const names[] = {"", "sixteen letters!", "twice"};
    for (int i = 0; i < 7; i++) {
        SnapshotOut out;
        expect(snapshot_out_open(&out, at("bad.bin"), 0) == 0, "open");
        snapshot_out_begin(&out, "twice");
        if (i < 3) {
            snapshot_out_end(&out);
            snapshot_out_begin(&out, names[i]);
            snapshot_out_end(&out);
        } else if (i == 3) { // one within another
            snapshot_out_begin(&out, "inner");
            snapshot_out_end(&out);
        } else if (i == 4) { // more bytes after the end
            snapshot_out_end(&out);
            snapshot_out_append(&out, "x", 1);
        } else if (i == 5) { // one too many
            snapshot_out_end(&out);
            for (int k = 0; k < SNAPSHOT_MAX_SECTIONS; k++) {
                char name[16];
                snprintf(name, sizeof(name), "n%d", k);
                snapshot_out_begin(&out, name);
                snapshot_out_end(&out);
            }
        } // i == 6: never ended
        expect(snapshot_out_close(&out) == EINVAL, "case %d: wanted EINVAL", i);
        expect(!exists(folder, "bad.bin"), "case %d: the file stays", i);
    }
    size_t sizes[SNAPSHOT_MAX_SECTIONS];
    for (int k = 0; k < SNAPSHOT_MAX_SECTIONS; k++) {
        sizes[k] = (size_t)k;
    }
    expect(write_container(at("many.bin"), sizes, SNAPSHOT_MAX_SECTIONS, 100, 0) == 0 &&
               read_container(at("many.bin")) == 0,
           "%d sections: %s", SNAPSHOT_MAX_SECTIONS, why);
}

static void test_full_disk(void) {
    static const size_t sizes[] = {10, 100000, 10};
    SnapshotOut out;
    expect(snapshot_out_open(&out, at("no/such/folder.bin"), 0) == ENOENT, "open in a folder that is not there");
    expect(snapshot_out_close(&out) == ENOENT, "the first failure is kept");
    // A limit on the size of files plays the full disk: in a child, which cannot get rid of it again.
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGXFSZ, SIG_IGN);
        struct rlimit limit = {50000, 50000};
        check(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
        int wrong = write_container(at("full.bin"), sizes, 3, 4096, 0) != EFBIG;   // in the middle of a section
        wrong |= (exists(folder, "full.bin") != 0) << 1;                           // removed
        wrong |= (snapshot_out_open(&out, at("full.bin"), 1 << 20) != EFBIG) << 2; // beforehand
        wrong |= (exists(folder, "full.bin") != 0) << 3;                           //
        wrong |= (write_container(at("full.bin"), sizes, 1, 4096, 0) != 0) << 4;   // what fits is written
        wrong |= (read_container(at("full.bin")) != 0) << 5;
        _exit(wrong);
    }
    int status = 0;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a limit on the file's size: status %x", (unsigned)status);
    if (access("/dev/full", W_OK) != 0) {
        unit_skip("no /dev/full to play a full disk");
        return;
    }
    check(symlink("/dev/full", at("link.bin")) == 0, "symlink");
    expect(write_container(at("link.bin"), sizes, 3, 4096, 0) == ENOSPC, "wanted ENOSPC from /dev/full");
    expect(!exists(folder, "link.bin"), "the file that could not be written stays");
}

static void test_check_range(void) {
    const char* path = at("range.bin");
    size_t n = 3 * SNAPSHOT_CHUNK + 77;
    unsigned char* data = (unsigned char*)malloc_or_die(n);
    for (size_t i = 0; i < n; i++) {
        data[i] = byte_of(1, i);
    }
    write_bytes(path, data, n);
    expect(snapshot_check_range(path, 0, n, XXH3_64bits(data, n), why) == 0, "%s", why);
    expect(snapshot_check_range(path, 1024, n - 1024, XXH3_64bits(data + 1024, n - 1024), why) == 0, "%s", why);
    expect(snapshot_check_range(path, n, 0, XXH3_64bits(data, 0), why) == 0, "%s", why);
    expect(snapshot_check_range(path, 0, n - 1, XXH3_64bits(data, n), why) == 1 && strstr(why, "damaged: hash"), "%s",
           why);
    expect(snapshot_check_range(path, 1, n, 0, why) == 1 && strstr(why, "damaged: 3145805 bytes"), "%s", why);
    expect(snapshot_check_range(path, UINT64_MAX, 2, 0, why) == 1, "an offset that is none");
    expect(snapshot_check_range(at("nothing"), 0, 1, 0, why) == 1 && strstr(why, "cannot open"), "%s", why);
    free(data);
}

// ---------------------------------------------------------------------------------------------------------------------
// folders

// Write a checkpoint of `step` with three files whose content is `content`, up to but not including the commit.
static void write_checkpoint(const char* run, int step, int content) {
    static const char* const names[] = {"common.bin", "shard_00000.bin", "model.bin"};
    check(snapshot_begin(run, step) == 0, "snapshot_begin: %s", strerror(errno));
    for (int i = 0; i < 3; i++) {
        char path[512];
        snapshot_tmp_path(path, sizeof(path), run, step, names[i]);
        SnapshotOut out;
        snapshot_out_open(&out, path, 0);
        snapshot_out_begin(&out, "content");
        snapshot_out_append(&out, &content, sizeof(content));
        snapshot_out_end(&out);
        check(snapshot_out_close(&out) == 0, "cannot write '%s'", path);
    }
}

static void commit_checkpoint(const char* run, int step, int content) {
    write_checkpoint(run, step, content);
    int error = snapshot_commit(run, step);
    expect(error == 0, "snapshot_commit of step %d: %s", step, strerror(error));
}

// The content of the checkpoint of `step` when all its files are there, whole and of one kind; -1 when not.
static int content_of(const char* run, int step) {
    static const char* const names[] = {"common.bin", "shard_00000.bin", "model.bin"};
    int content[3];
    for (int i = 0; i < 3; i++) {
        char path[512];
        snapshot_path(path, sizeof(path), run, step, names[i]);
        SnapshotIn in;
        if (snapshot_in_open(&in, path, why)) {
            return -1;
        }
        int failed = snapshot_in_whole(&in, "content", &content[i], sizeof(content[i]), why);
        snapshot_in_close(&in);
        if (failed) {
            return -1;
        }
    }
    return content[0] == content[1] && content[1] == content[2] ? content[0] : -1;
}

// The committed steps as text: "20 40 ".
static const char* steps_of(const char* run) {
    static char text[512];
    int* steps;
    int count = snapshot_steps(run, &steps);
    size_t length = 0;
    text[0] = 0;
    for (int i = 0; i < count; i++) {
        length += (size_t)snprintf(text + length, sizeof(text) - length, "%d ", steps[i]);
    }
    free(steps);
    return text;
}

static void test_paths(void) {
    char path[64];
    snapshot_path(path, sizeof(path), "runs/a", 20, "common.bin");
    expect(strcmp(path, "runs/a/step_00000020/common.bin") == 0, "%s", path);
    snapshot_path(path, sizeof(path), "runs/a", 0, NULL);
    expect(strcmp(path, "runs/a/step_00000000") == 0, "%s", path);
    snapshot_tmp_path(path, sizeof(path), "runs/a", 123456789, "model.bin");
    expect(strcmp(path, "runs/a/step_123456789.tmp/model.bin") == 0, "%s", path);
    snapshot_tmp_path(path, sizeof(path), "runs/a", 7, NULL);
    expect(strcmp(path, "runs/a/step_00000007.tmp") == 0, "%s", path);
}

static void test_commit(void) {
    char run[256], path[512];
    snprintf(run, sizeof(run), "%s/commit/deep/run", folder); // snapshot_begin makes the parents
    int* steps;
    expect(snapshot_steps(run, &steps) == 0 && steps == NULL, "a run that is not there has no checkpoints");
    expect(snapshot_latest(run) == -1, "and no latest one");
    write_checkpoint(run, 40, 1);
    expect(snapshot_steps(run, &steps) == 0 && snapshot_latest(run) == -1, "not committed yet");
    free(steps);
    expect(snapshot_commit(run, 40) == 0, "commit");
    expect(content_of(run, 40) == 1 && !exists(run, "step_00000040.tmp"), "the folder has moved: %s", why);
    expect(snapshot_latest(run) == 40, "latest is %d, want 40", snapshot_latest(run));
    size_t n;
    snprintf(path, sizeof(path), "%s/latest", run);
    unsigned char* text = read_bytes(path, &n);
    expect(n == 14 && memcmp(text, "step_00000040\n", 14) == 0, "latest holds '%.*s'", (int)n, (char*)text);
    free(text);
    commit_checkpoint(run, 100000000, 2); // nine digits
    commit_checkpoint(run, 5, 3);
    expect(strcmp(steps_of(run), "5 40 100000000 ") == 0, "steps: %s", steps_of(run));
    expect(snapshot_latest(run) == 5, "latest is the one committed last, not the highest");
    // over an existing one
    commit_checkpoint(run, 40, 4);
    expect(content_of(run, 40) == 4 && !exists(run, "step_00000040.tmp"), "the new one took the old one's place: %s",
           why);
    expect(strcmp(steps_of(run), "5 40 100000000 ") == 0 && snapshot_latest(run) == 40, "steps: %s", steps_of(run));
    // the same where two names cannot be exchanged
    write_checkpoint(run, 40, 5);
    expect(snapshot_replace(run, 40) == 0, "replace");
    expect(content_of(run, 40) == 5 && !exists(run, "step_00000040.tmp") && !exists(run, "step_00000040.old.tmp"), "%s",
           why);
    // failures
    expect(snapshot_replace(run, 40) == ENOENT && content_of(run, 40) == 5, "the old one is back in its place: %s",
           why);
    expect(snapshot_commit(run, 60) == ENOENT, "commit of what was never begun");
    write_checkpoint(run, 60, 6);
    snapshot_path(path, sizeof(path), run, 60, NULL);
    write_bytes(path, "x", 1);
    expect(snapshot_commit(run, 60) == ENOTDIR, "commit over a file");
    expect(exists(run, "step_00000060.tmp") && snapshot_latest(run) == 40,
           "a failed commit leaves everything as it was");
    snapshot_abandon(run, 60);
    expect(!exists(run, "step_00000060.tmp") && exists(run, "step_00000060"), "abandoned");
    write_bytes(at("afile"), "x", 1);
    expect(snapshot_begin(at("afile"), 1) == ENOTDIR && snapshot_begin(at("afile/below"), 1) == ENOTDIR,
           "RUN is a file");
    check(mkdir(at("elsewhere"), 0700) == 0, "mkdir");
    write_bytes(at("elsewhere/model.bin"), "mine", 4);
    check(symlink(at("elsewhere"), at("commit/deep/run/step_00000070.tmp")) == 0, "symlink");
    expect(snapshot_begin(run, 70) != 0, "the folder's name is a link");
    snapshot_abandon(run, 70);
    expect(exists(folder, "elsewhere/model.bin"), "a link was followed");
}

// What a killed run left of the same step: its files do not get into the new checkpoint. Other people's files stay.
static void test_leftover(void) {
    char run[RUN_SIZE];
    fresh_run(run, folder, "leftover");
    write_checkpoint(run, 10, 1);
    write_bytes(at("leftover/step_00000010.tmp/shard_00007.bin"), "old", 3);
    expect(snapshot_begin(run, 10) == 0, "begin over a leftover");
    expect(exists(run, "step_00000010.tmp") && !exists(run, "step_00000010.tmp/shard_00007.bin") &&
               !exists(run, "step_00000010.tmp/common.bin"),
           "old files are still there");
    check(mkdir(at("leftover/step_00000010.tmp/model.bin"), 0700) == 0, "mkdir");
    write_bytes(at("leftover/step_00000010.tmp/model.bin/common.bin"), "deep", 4);
    write_bytes(at("leftover/step_00000010.tmp/notes.txt"), "mine", 4);
    write_bytes(at("leftover/precious.bin"), "mine", 4);
    check(symlink("../precious.bin", at("leftover/step_00000010.tmp/shard_00001.bin")) == 0, "symlink");
    expect(snapshot_begin(run, 10) == 0, "begin over a leftover with other files");
    expect(exists(run, "step_00000010.tmp/notes.txt") && exists(run, "step_00000010.tmp/model.bin/common.bin"),
           "a file that is no checkpoint's was removed");
    expect(!exists(run, "step_00000010.tmp/shard_00001.bin") && exists(run, "precious.bin"), "a link was followed");
}

static void test_names(void) {
    static const char* const own[] = {"common.bin", "model.bin", "shard_00000.bin", "shard_123456.bin",
                                      "model.bin.tmp"};
    static const char* const others[] = {
        "notes.txt", "shard_1.bin", "shard_00000.bin.bak", "shard_0000x.bin", ".",
        "..",        ".tmp",        "commonXbin",          "shard_",          "model.bin2"};
    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++) {
        expect(snapshot_is_own_file(own[i]), "'%s' is a checkpoint's", own[i]);
    }
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        expect(!snapshot_is_own_file(others[i]), "'%s' is no checkpoint's", others[i]);
    }
    // folders and files that look like checkpoints and are none
    static const char* const folders[] = {"step_1",
                                          "step_abc",
                                          "step_",
                                          "step_00000020x",
                                          "step_000000020",
                                          "step_-0000001",
                                          "step_00000030.tmp",
                                          "step_99999999999",
                                          "Step_00000040",
                                          "xstep_00000040"};
    char run[RUN_SIZE];
    fresh_run(run, folder, "names");
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        char path[512];
        snprintf(path, sizeof(path), "%s/%s", run, folders[i]);
        check(mkdir(path, 0700) == 0, "mkdir '%s'", path);
    }
    write_bytes(at("names/step_00000050"), "a file", 6);
    check(symlink("step_00000030.tmp", at("names/step_00000060")) == 0, "symlink");
    expect(strcmp(steps_of(run), "") == 0, "no checkpoint is there, found: %s", steps_of(run));
    commit_checkpoint(run, 20, 1);
    expect(strcmp(steps_of(run), "20 ") == 0, "one checkpoint is there, found: %s", steps_of(run));
    static const char* const lines[] = {"", "\n", "step_20\n", "20\n", "step_00000020/../x\n", "step_00000020 \n"};
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        write_bytes(at("names/latest"), lines[i], strlen(lines[i]));
        expect(snapshot_latest(run) == -1, "latest is '%s' and names step %d", lines[i], snapshot_latest(run));
    }
    write_bytes(at("names/latest"), "step_00000020", 13); // as by hand, without the end of the line
    expect(snapshot_latest(run) == 20, "latest is %d, want 20", snapshot_latest(run));
}

static void test_prune(void) {
    char run[RUN_SIZE];
    fresh_run(run, folder, "prune");
    for (int step = 10; step <= 80; step += 10) {
        commit_checkpoint(run, step, step);
    }
    snapshot_prune(run, 0, 0);
    expect(strcmp(steps_of(run), "10 20 30 40 50 60 70 80 ") == 0, "keep 0 keeps all: %s", steps_of(run));
    snapshot_prune(run, 20, 0);
    expect(strcmp(steps_of(run), "10 20 30 40 50 60 70 80 ") == 0, "fewer than keep: %s", steps_of(run));
    write_checkpoint(run, 90, 90); // being written: must not be touched
    write_bytes(at("prune/step_00000020/notes.txt"), "mine", 4);
    snapshot_prune(run, 3, 40);
    expect(strcmp(steps_of(run), "40 60 70 80 ") == 0, "the newest 3 and multiples of 40: %s", steps_of(run));
    for (int step = 60; step <= 80; step += 10) {
        expect(content_of(run, step) == step, "step %d: %s", step, why);
    }
    expect(!exists(run, "step_00000010.tmp") && exists(run, "step_00000020.tmp/notes.txt"), "a removed one's files");
    expect(snapshot_commit(run, 90) == 0 && content_of(run, 90) == 90, "the one in work: %s", why);
    // the run goes back to 60: what it had reached beyond does not count, and does not cost it its new checkpoints
    commit_checkpoint(run, 65, 65);
    snapshot_prune(run, 1, 0);
    expect(strcmp(steps_of(run), "65 70 80 90 ") == 0, "after going back: %s", steps_of(run));
    commit_checkpoint(run, 90, 91);
    snapshot_prune(run, 2, 0);
    expect(strcmp(steps_of(run), "80 90 ") == 0 && content_of(run, 90) == 91, "having caught up: %s", steps_of(run));
    check(unlink(at("prune/latest")) == 0, "unlink");
    snapshot_prune(run, 1, 0);
    expect(strcmp(steps_of(run), "90 ") == 0, "without latest: %s", steps_of(run));
}

// A commit that fails at its last step, `latest`, leaves what was there before it.
static void test_commit_undone(void) {
    char run[RUN_SIZE];
    fresh_run(run, folder, "undone");
    commit_checkpoint(run, 10, 10);
    check(mkdir(at("undone/latest.tmp"), 0700) == 0, "mkdir");
    write_checkpoint(run, 20, 20);
    expect(snapshot_commit(run, 20) == EISDIR, "latest cannot be written");
    expect(strcmp(steps_of(run), "10 ") == 0 && snapshot_latest(run) == 10, "a new step: %s", steps_of(run));
    snapshot_abandon(run, 20);
    expect(!exists(run, "step_00000020.tmp"), "it is not removed");
    write_checkpoint(run, 10, 11);
    expect(snapshot_commit(run, 10) == EISDIR && content_of(run, 10) == 10, "an old step: %s", why);
    check(rmdir(at("undone/latest.tmp")) == 0, "rmdir");
    expect(snapshot_commit(run, 10) == 0 && content_of(run, 10) == 11, "in the end: %s", why);
}

static void test_set_aside(void) {
    char run[RUN_SIZE];
    fresh_run(run, folder, "aside");
    for (int step = 10; step <= 60; step += 10) {
        commit_checkpoint(run, step, step);
    }
    // the run went back to 20, with a checkpoint every 25 steps
    expect(snapshot_set_aside(run, 20, 45) == 0 && strcmp(steps_of(run), "10 20 50 60 ") == 0, "%s", steps_of(run));
    expect(exists(run, "step_00000030.old/model.bin") && exists(run, "step_00000040.old/model.bin"), "they are lost");
    commit_checkpoint(run, 45, 45);
    snapshot_sweep(run);
    expect(exists(run, "step_00000040.old/model.bin"), "swept away");
    // and again; of one step only the last is kept
    commit_checkpoint(run, 40, 41);
    expect(snapshot_set_aside(run, 20, 45) == 0 && strcmp(steps_of(run), "10 20 45 50 60 ") == 0, "%s", steps_of(run));
    expect(exists(run, "step_00000040.old/model.bin") && !exists(run, "step_00000040"), "a second one of a step");
    write_bytes(at("aside/step_00000040.old/notes.txt"), "mine", 4);
    commit_checkpoint(run, 40, 42);
    expect(snapshot_set_aside(run, 20, 45) != 0 && content_of(run, 40) == 42, "over something that is not ours");
    expect(snapshot_set_aside(run, -1, 20) == 0 && strcmp(steps_of(run), "20 40 45 50 60 ") == 0, "%s", steps_of(run));
    expect(snapshot_set_aside(at("no such run"), 1, 5) == 0, "no such run");
}

// Fork a process that locks the run, says so, and lives until it is killed. 0: it could not lock it.
static pid_t lock_elsewhere(const char* run, int seconds) {
    int says[2];
    check(pipe(says) == 0, "pipe");
    pid_t pid = fork();
    check(pid >= 0, "fork");
    if (pid == 0) {
        char has = snapshot_lock(run, seconds) >= 0;
        if (write(says[1], &has, 1) != 1 || !has) { _exit(1); }
        for (;;) {
            pause();
        }
    }
    char has = 0;
    check(read(says[0], &has, 1) == 1, "read");
    close(says[0]);
    close(says[1]);
    if (!has) { waitpid(pid, NULL, 0); }
    return has ? pid : 0;
}

static void test_lock(void) {
    char run[RUN_SIZE];
    expect(snapshot_lock(at("no such run"), 0) == -1 && errno == ENOENT, "no such run: %s", strerror(errno));
    fresh_run(run, folder, "lock");
    pid_t other = lock_elsewhere(run, 0);
    expect(other > 0, "a run that nobody has");
    double start = (double)time(NULL);
    expect(snapshot_lock(run, 1) == -1 && errno == EWOULDBLOCK, "another process has it: %s", strerror(errno));
    expect((double)time(NULL) - start < 20.0, "waited for ever");
    check(other > 0 && kill(other, SIGKILL) == 0 && waitpid(other, NULL, 0) == other, "kill");
    int lock = snapshot_lock(run, 1);
    expect(lock >= 0, "its owner was killed: %s", strerror(errno));
    expect(lock_elsewhere(run, 0) == 0, "two have it");
    close(lock);
    other = lock_elsewhere(run, 0);
    expect(other > 0, "given back");
    check(other > 0 && kill(other, SIGKILL) == 0 && waitpid(other, NULL, 0) == other, "kill");
}

static void test_sweep(void) {
    char run[RUN_SIZE];
    fresh_run(run, folder, "sweep");
    commit_checkpoint(run, 10, 10);
    commit_checkpoint(run, 20, 20);
    write_checkpoint(run, 20, 21);
    write_checkpoint(run, 30, 30);
    write_bytes(at("sweep/model.bin"), "mine", 4);
    write_bytes(at("sweep/other.tmp"), "mine", 4);
    check(mkdir(at("sweep/step_abc.tmp"), 0700) == 0 && mkdir(at("sweep/step_40.tmp"), 0700) == 0, "mkdir");
    check(mkdir(at("outside"), 0700) == 0 && symlink("../outside", at("sweep/step_00000050.tmp")) == 0, "symlink");
    write_bytes(at("outside/model.bin"), "mine", 4);
    // killed between the two renames of snapshot_replace, and after them
    check(rename(at("sweep/step_00000010"), at("sweep/step_00000010.old.tmp")) == 0, "rename");
    write_checkpoint(run, 60, 60);
    check(rename(at("sweep/step_00000060.tmp"), at("sweep/step_00000020.old.tmp")) == 0, "rename");
    snapshot_sweep(run);
    expect(strcmp(steps_of(run), "10 20 ") == 0, "steps: %s", steps_of(run));
    expect(content_of(run, 10) == 10 && content_of(run, 20) == 20, "the committed ones are whole: %s", why);
    expect(!exists(run, "step_00000020.tmp") && !exists(run, "step_00000030.tmp") &&
               !exists(run, "step_00000020.old.tmp") && !exists(run, "step_00000010.old.tmp"),
           "leftovers stay");
    expect(exists(run, "model.bin") && exists(run, "other.tmp") && exists(run, "step_abc.tmp") &&
               exists(run, "step_40.tmp") && exists(run, "step_00000050.tmp") && exists(folder, "outside/model.bin"),
           "something else was swept away");
    snapshot_sweep(at("no such run"));
}

// Commit the checkpoint of `step` that has been written; with_replace: over an older one as on a file system that
// cannot exchange two names.
static int commit_written(const char* run, int step, int with_replace) {
    char path[512];
    snapshot_path(path, sizeof(path), run, step, NULL);
    if (with_replace && snapshot_is_folder(path)) {
        int error = snapshot_replace(run, step);
        return error != 0 ? error : snapshot_set_latest(run, step);
    }
    return snapshot_commit(run, step);
}

// After a kill: every checkpoint is whole, and the one that `latest` names holds at least `announced`. Where names
// cannot be exchanged it may lie aside until the sweep.
static void check_after_kill(const char* run, int announced, int with_replace, int kill_number) {
    for (int swept = 0; swept < 2; swept++) {
        int *steps, *leftovers;
        int count = snapshot_steps(run, &steps), num_leftovers = snapshot_list(run, ".tmp", &leftovers);
        for (int i = 0; i < count; i++) {
            expect(content_of(run, steps[i]) >= 0, "kill %d: step %d is not whole: %s", kill_number, steps[i], why);
        }
        expect(!swept || num_leftovers == 0, "kill %d: %d folders are left after the sweep", kill_number,
               num_leftovers);
        int latest = snapshot_latest(run);
        expect(latest >= 0 || !exists(run, "latest"), "kill %d: latest names nothing", kill_number);
        if (latest >= 0 && (swept || !with_replace)) {
            expect(content_of(run, latest) >= announced, "kill %d: latest, step %d, holds %x, want at least %x",
                   kill_number, latest, (unsigned)content_of(run, latest), (unsigned)announced);
        }
        free(steps);
        free(leftovers);
        snapshot_sweep(run);
    }
}

// Killed before each of the system calls of a commit and the pruning after it, one after another.
static void test_killed_at_every_call(void) {
    for (int with_replace = 0; with_replace < 2; with_replace++) {
        char run[RUN_SIZE];
        fresh_run(run, quick_folder, with_replace ? "calls_replace" : "calls");
        int num_calls = 0, is_over = 0;
        for (int kill_at = 1; !is_over && kill_at < 1000; kill_at++) {
            for (int step = 10; step <= 30; step += 10) { // the run has been at 30, and gone on from 20
                if (content_of(run, step) != 1) {
                    commit_checkpoint(run, step, 1);
                }
            }
            check(snapshot_set_latest(run, 20) == 0, "latest");
            write_checkpoint(run, 30, 2);
            fflush(stdout);
            pid_t child = fork();
            if (child == 0) {
                if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) {
                    _exit(7);
                }
                raise(SIGSTOP);
                int error = commit_written(run, 30, with_replace);
                snapshot_prune(run, 1, 0);
                _exit(error != 0 ? 8 : 0);
            }
            int status;
            waitpid(child, &status, 0);
            if (WIFEXITED(status) && WEXITSTATUS(status) == 7) {
                unit_skip("this machine allows no ptrace");
                return;
            }
            for (num_calls = 0; WIFSTOPPED(status) && num_calls < 2 * kill_at - 1; num_calls++) {
                ptrace(PTRACE_SYSCALL, child, NULL, NULL); // stops before a call and behind it
                waitpid(child, &status, 0);
            }
            is_over = WIFEXITED(status);
            expect(!is_over || WEXITSTATUS(status) == 0, "the commit ended with status %d", WEXITSTATUS(status));
            if (!is_over) {
                kill(child, SIGKILL);
                waitpid(child, &status, 0);
            }
            check_after_kill(run, 1, with_replace, kill_at);
            expect(content_of(run, 30) >= 1, "kill %d: step 30, which was there, is gone: %s", kill_at, why);
        }
        expect(is_over && num_calls > 60, "%d system calls seen, want all of a commit and a prune", num_calls / 2);
        expect(snapshot_latest(run) == 30 && content_of(run, 30) == 2 && strcmp(steps_of(run), "30 ") == 0,
               "not killed at last: steps %s", steps_of(run));
    }
}

// A run that does nothing but commit, over old steps and new ones, killed at random moments.
static void test_killed(void) {
    char run[RUN_SIZE];
    fresh_run(run, quick_folder, "killed");
    int announced = 0;    // content of the checkpoint that was announced last
    double took_s = 5e-3; // one checkpoint, on this disk
    uint32_t random = 12345;
    for (int seed = 1; seed <= 40; seed++) {
        int ends[2];
        check(pipe(ends) == 0, "pipe");
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            close(ends[0]);
            for (int i = 1;; i++) {
                int step = 10 * (1 + (3 * i + seed) % 7), content = (seed << 16) + i;
                write_checkpoint(run, step, content);
                int error = commit_written(run, step, seed % 2);
                check(error == 0, "commit of step %d: %s", step, strerror(error));
                check(write(ends[1], &content, sizeof(content)) == (ssize_t)sizeof(content), "announce");
                snapshot_prune(run, 2, 0);
            }
        }
        close(ends[1]);
        struct timespec start, now, pause;
        clock_gettime(CLOCK_MONOTONIC, &start);
        int num_announced = 0, content;
        for (; num_announced < seed % 4 && read(ends[0], &content, sizeof(content)) == (ssize_t)sizeof(content);) {
            announced = content;
            num_announced++;
        }
        expect(num_announced == seed % 4, "the child ended by itself");
        if (num_announced > 0) {
            clock_gettime(CLOCK_MONOTONIC, &now);
            took_s =
                ((double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec)) / num_announced;
        }
        random = random * 1664525u + 1013904223u;
        double pause_s = fmin(0.9, took_s) * (double)(random >> 8) / (1 << 24);
        pause.tv_sec = 0;
        pause.tv_nsec = (long)(1e9 * pause_s);
        nanosleep(&pause, NULL);
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        expect(WIFSIGNALED(status), "the child ended by itself, status %x", (unsigned)status);
        while (read(ends[0], &content, sizeof(content)) == (ssize_t)sizeof(content)) {
            announced = content;
        }
        close(ends[0]);
        check_after_kill(run, announced, seed % 2, seed);
    }
}

int main(void) {
    snprintf(folder, sizeof(folder), "/tmp/test_snapshot_XXXXXX");
    snprintf(quick_folder, sizeof(quick_folder), "%s/test_snapshot_XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    check(mkdtemp(folder) != NULL && mkdtemp(quick_folder) != NULL, "cannot make a temporary folder");
    unit_run(test_round_trip);
    unit_run(test_layout);
    unit_run(test_truncated);
    unit_run(test_flipped_bits);
    unit_run(test_wrong_questions);
    unit_run(test_forged);
    unit_run(test_wrong_sections);
    unit_run(test_full_disk);
    unit_run(test_check_range);
    unit_run(test_paths);
    unit_run(test_commit);
    unit_run(test_leftover);
    unit_run(test_names);
    unit_run(test_prune);
    unit_run(test_commit_undone);
    unit_run(test_set_aside);
    unit_run(test_lock);
    unit_run(test_sweep);
    unit_run(test_killed_at_every_call);
    unit_run(test_killed);
    char command[160];
    snprintf(command, sizeof(command), "rm -rf %s %s", folder, quick_folder);
    return system(command) != 0 || unit_report();
}
