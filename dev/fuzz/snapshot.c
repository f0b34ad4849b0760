// Our own checkpoints (lib/snapshot.h): containers, and folders full of foreign names.
//
//     input    1 byte of flags, then a container; or with 16 the text of RUN/latest and names (0x1e between them)
//     flags    1 the container is told briefly: header and used table entries, one after the other, then what follows
//     the
//              header, which is filled up with zeros to a multiple of 4096 bytes
//              2 the hashes of sections that lie inside the file are made right, 4 that of the header
//              8 the file's length in the header is made right
#include "fuzz.h"

#include "snapshot.h"

enum { SNAPSHOT_FUZZ_BYTES = 1 << 17 };

static uint8_t snapshot_file[SNAPSHOT_FUZZ_BYTES];

// Lay the file of the input out in snapshot_file; its size.
static size_t snapshot_lay_out(FuzzInput in, int brief) {
    if (!brief) {
        size_t size = in.size < SNAPSHOT_FUZZ_BYTES ? in.size : SNAPSHOT_FUZZ_BYTES;
        memcpy(snapshot_file, in.bytes, size);
        return size;
    }
    memset(snapshot_file, 0, sizeof(snapshot_file));
    size_t head = in.size < 24 ? in.size : 24;
    memcpy(snapshot_file, in.bytes, head);
    SnapshotHeader header;
    memcpy(&header, snapshot_file, sizeof(header));
    size_t entries = header.num_sections <= SNAPSHOT_MAX_SECTIONS ? header.num_sections : SNAPSHOT_MAX_SECTIONS;
    size_t table = entries * sizeof(SnapshotSection);
    table = table < in.size - head ? table : in.size - head;
    memcpy(snapshot_file + head, in.bytes + head, table);
    size_t rest = in.size - head - table, most = SNAPSHOT_FUZZ_BYTES - SNAPSHOT_ALIGN;
    rest = rest < most ? rest : most;
    memcpy(snapshot_file + SNAPSHOT_ALIGN, in.bytes + head + table, rest);
    return SNAPSHOT_ALIGN + (rest + SNAPSHOT_ALIGN - 1) / SNAPSHOT_ALIGN * SNAPSHOT_ALIGN;
}

static void snapshot_repair(size_t size, int flags) {
    SnapshotHeader header;
    if (size < sizeof(header)) { return; }
    memcpy(&header, snapshot_file, sizeof(header));
    for (uint32_t i = 0; (flags & 2) != 0 && i < header.num_sections && i < SNAPSHOT_MAX_SECTIONS; i++) {
        SnapshotSection* section = &header.section[i];
        if (section->offset <= size && section->bytes <= size - section->offset &&
            snapshot_filling(section->bytes) <= size - section->offset - section->bytes) {
            section->hash = XXH3_64bits(snapshot_file + section->offset,
                                        (size_t)(section->bytes + snapshot_filling(section->bytes)));
        }
    }
    header.file_bytes = flags & 8 ? size : header.file_bytes;
    header.hash = flags & 4 ? snapshot_header_hash(&header) : header.hash;
    memcpy(snapshot_file, &header, sizeof(header));
}

// Read all sections in pieces of `piece`. 0, or 1 with why.
static int snapshot_read_all(SnapshotIn* in, size_t size, size_t piece, char* why) {
    for (uint32_t i = 0; i < in->header.num_sections; i++) {
        const SnapshotSection section = in->header.section[i];
        int64_t bytes = snapshot_in_bytes(in, section.name);
        fuzz_want(bytes >= 0 && (uint64_t)bytes <= size, "a section of %lld bytes in a file of %zu", (long long)bytes,
                  size);
        char* data = (char*)malloc_or_die((size_t)bytes);
        int failed = snapshot_in_begin(in, section.name, (uint64_t)bytes, why);
        for (size_t at = 0; !failed && at < (size_t)bytes; at += piece) {
            size_t n = piece < (size_t)bytes - at ? piece : (size_t)bytes - at;
            failed = snapshot_in_read(in, data + at, n, why);
        }
        failed = failed || snapshot_in_end(in, why);
        fuzz_want(failed || memcmp(data, snapshot_file + section.offset, (size_t)bytes) == 0,
                  "section '%s': other bytes than in the file", section.name);
        free(data);
        if (failed) { return 1; }
    }
    return 0;
}

// What was read, written again, is the same file.
static void snapshot_write_again(const SnapshotIn* in, size_t size) {
    SnapshotOut out;
    const char* path = fuzz_path("again.bin");
    fuzz_want(snapshot_out_open(&out, path, 0) == 0, "cannot write '%s'", path);
    for (uint32_t i = 0; i < in->header.num_sections; i++) {
        snapshot_out_begin(&out, in->header.section[i].name);
        snapshot_out_append(&out, snapshot_file + in->header.section[i].offset, (size_t)in->header.section[i].bytes);
        snapshot_out_end(&out);
    }
    int error = snapshot_out_close(&out);
    fuzz_want(error == 0, "cannot write '%s': %s", path, strerror(error));
    static uint8_t again[SNAPSHOT_FUZZ_BYTES];
    FILE* f = fopen_or_die(path, "rb");
    size_t n = fread(again, 1, sizeof(again), f);
    fclose(f);
    fuzz_want(n == size && memcmp(again, snapshot_file, size) == 0,
              "a file was believed that is not as it was written");
}

static void snapshot_container(FuzzInput in, int flags) {
    char why[WHY_BYTES] = "", again[WHY_BYTES] = "";
    size_t size = snapshot_lay_out(in, flags & 1);
    snapshot_repair(size, flags);
    const char* path = fuzz_write("container.bin", snapshot_file, size);
    SnapshotIn file;
    int failed = snapshot_in_open(&file, path, why);
    if (!failed) {
        failed = snapshot_read_all(&file, size, 1 + (size_t)(in.size % 5000), why);
        if (!failed && (flags & 6) == 0) { snapshot_write_again(&file, size); }
        uint64_t offset = in.size > 0 ? (uint64_t)in.bytes[in.size - 1] * 64 : 0, hash = XXH3_64bits(NULL, 0);
        uint64_t bytes = file.header.section[0].bytes; // hostile
        if (offset <= size && bytes <= size - offset) {
            hash = XXH3_64bits(snapshot_file + offset, (size_t)bytes);
            fuzz_want(snapshot_check_range(path, offset, bytes, hash, again) == 0, "%s", again);
        }
        fuzz_want(snapshot_check_range(path, offset, bytes, hash ^ 1, again) == 1, "a wrong hash was believed");
        fuzz_check_message(again);
        snapshot_in_close(&file);
    }
    if (failed) { fuzz_refused(why); }
}

// The path of a name in the run's folder RUN; without slashes.
static const char* snapshot_entry(FuzzInput name) {
    char text[256];
    size_t n = (size_t)snprintf(text, sizeof(text), "RUN/");
    for (size_t i = 1; i < name.size && i < 200; i++) {
        text[n++] = (char)(name.bytes[i] == '/' || name.bytes[i] == 0 ? '_' : name.bytes[i]);
    }
    text[n] = 0;
    return fuzz_path(text);
}

// A file `in_folder` in `folder`.
static void snapshot_put(const char* folder, const char* in_folder) {
    char path[FUZZ_PATH + 32];
    snprintf(path, sizeof(path), "%s/%s", folder, in_folder);
    int f = open(path, O_WRONLY | O_CREAT, 0600);
    if (f >= 0) { close(f); }
}

// Names in RUN: d folder, c checkpoint, f file, l link to a folder outside, s checkpoint with a link to a file outside,
// k folder with a file that is none of ours.
static void snapshot_folder(FuzzInput in) {
    char run[FUZZ_PATH], outside[FUZZ_PATH], kept[FUZZ_PATH + 16], path[FUZZ_PATH + 32];
    snprintf(run, sizeof(run), "%s", fuzz_path("RUN"));
    snprintf(outside, sizeof(outside), "%s", fuzz_path("outside"));
    snprintf(kept, sizeof(kept), "%s/common.bin", outside);
    fuzz_remove_tree(run);
    mkdir(run, 0700);
    mkdir(outside, 0700);
    snapshot_put(outside, "common.bin");
    FuzzInput latest = fuzz_part(&in);
    if (latest.size > 0) { fuzz_write("RUN/latest", latest.bytes, latest.size); }
    char foreign[8][FUZZ_PATH + 16];
    int num_foreign = 0;
    for (int i = 0; i < 8 && in.size > 0; i++) {
        FuzzInput name = fuzz_part(&in);
        const char* entry = snapshot_entry(name);
        int kind = name.size > 1 ? name.bytes[0] : 0;
        if (kind == 'f') {
            snapshot_put(run, entry + strlen(run) + 1);
        } else if (kind == 'l') {
            (void)!symlink(outside, entry);
        } else if (kind != 0 && mkdir(entry, 0700) == 0 && kind != 'd') {
            snapshot_put(entry, kind == 'k' ? "notes.txt" : "shard_00000.bin");
            snprintf(path, sizeof(path), "%s/common.bin", entry);
            if (kind == 's') { (void)!symlink(kept, path); }
            if (kind == 'k') { snprintf(foreign[num_foreign++], sizeof(foreign[0]), "%s/notes.txt", entry); }
        }
    }
    int *steps, before = snapshot_steps(run, &steps), newest = before > 0 ? steps[before - 1] : -1;
    for (int i = 0; i < before; i++) {
        snapshot_path(path, sizeof(path), run, steps[i], NULL);
        fuzz_want(access(path, F_OK) == 0 && (i == 0 || steps[i] > steps[i - 1]), "step %d of %d: %d", i, before,
                  steps[i]);
    }
    free(steps);
    snapshot_sweep(run);
    int swept = snapshot_steps(run, &steps);
    free(steps);
    fuzz_want(swept >= before, "%d checkpoints before, %d after sweeping", before, swept);
    if (before > 0) {
        snapshot_path(path, sizeof(path), run, newest, NULL);
        fuzz_want(access(path, F_OK) == 0, "the newest checkpoint was swept away");
    }
    snapshot_prune(run, 2, 10);
    int left = snapshot_steps(run, &steps);
    fuzz_want(left >= (swept < 2 ? swept : 2) && left <= swept, "%d checkpoints, %d after pruning to 2", swept, left);
    free(steps);
    fuzz_want(access(kept, F_OK) == 0, "a file outside was removed through a link");
    for (int i = 0; i < num_foreign; i++) { // moved with its folder when that was pruned
        char* slash = strrchr(foreign[i], '/');
        snprintf(path, sizeof(path), "%.*s.tmp%s", (int)(slash - foreign[i]), foreign[i], slash);
        fuzz_want(access(foreign[i], F_OK) == 0 || access(path, F_OK) == 0 || strstr(foreign[i], ".old.tmp") != NULL,
                  "'%s', which is not ours, was removed", foreign[i]);
    }
    // a checkpoint can be written whatever lies there
    int step = snapshot_latest(run);
    step = step >= 0 ? step : 7;
    int error = snapshot_begin(run, step);
    if (error == 0) {
        error = snapshot_commit(run, step);
        fuzz_want(error != 0 || snapshot_latest(run) == step, "latest is %d, want %d", snapshot_latest(run), step);
    }
}

static void snapshot_run(const uint8_t* data, size_t size) {
    FuzzInput in = {data, size};
    int flags = fuzz_byte(&in);
    if (flags & 16) {
        snapshot_folder(in);
    } else {
        snapshot_container(in, flags);
    }
}

static void snapshot_seeds(void) {
    static const struct {
        int num;
        int bytes[4];
    } files[] = {{0, {0}}, {1, {100}}, {3, {0, 4096, 5}}, {4, {4097, 1, 12287, 40}}};
    static uint8_t whole[1 << 16], brief[1 << 16];
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        SnapshotOut out;
        const char* path = fuzz_path("seed.bin");
        static char payload[16384];
        static const char* names[4] = {"config", "master", "slots", "position"};
        fuzz_want(snapshot_out_open(&out, path, 0) == 0, "cannot write '%s'", path);
        for (int s = 0; s < files[i].num; s++) {
            for (int k = 0; k < files[i].bytes[s]; k++) {
                payload[k] = (char)(k * 31 + s);
            }
            snapshot_out_begin(&out, names[s]);
            snapshot_out_append(&out, payload, (size_t)files[i].bytes[s]);
            snapshot_out_end(&out);
        }
        fuzz_want(snapshot_out_close(&out) == 0, "cannot write '%s'", path);
        fuzz_seed_file(FUZZ_TAKEN, "\0", 1, path);
        FILE* f = fopen_or_die(path, "rb");
        size_t n = fread(whole, 1, sizeof(whole), f);
        fclose(f);
        size_t head = 24 + 40 * (size_t)files[i].num, used = n - SNAPSHOT_ALIGN;
        memcpy(brief, whole, head);
        memcpy(brief + head, whole + SNAPSHOT_ALIGN, used);
        while (used > 0 && brief[head + used - 1] == 0 && (used - 1) % SNAPSHOT_ALIGN != 0) { // filled up by the target
            used--;
        }
        fuzz_seed(FUZZ_TAKEN, "\17", 1, brief, head + used);
    }
    // two sections whose lengths come out right only because their sum wraps around 64 bits
    SnapshotHeader header;
    memset(&header, 0, sizeof(header));
    memcpy(header.magic, SNAPSHOT_MAGIC, sizeof(header.magic));
    header.version = SNAPSHOT_VERSION;
    header.num_sections = 2;
    header.section[0].name[0] = header.section[1].name[1] = header.section[1].name[0] = 'x';
    header.section[0].offset = SNAPSHOT_ALIGN;
    header.section[0].bytes = (uint64_t)0 - SNAPSHOT_ALIGN;
    header.section[1].bytes = 2 * SNAPSHOT_ALIGN;
    memcpy(brief, &header, 24 + 2 * sizeof(SnapshotSection));
    fuzz_seed(FUZZ_REFUSED, "\17", 1, brief, 24 + 2 * sizeof(SnapshotSection) + SNAPSHOT_ALIGN);
    static const char* runs[] = {
        "step_00000020\n\x1e"
        "cstep_00000010\x1e"
        "cstep_00000020\x1e"
        "cstep_00000030.tmp\x1e"
        "cstep_00000005.old.tmp",
        "step_99999999999\x1e"
        "dstep_1\x1e"
        "cstep_-0000001\x1e"
        "lstep_00000040.tmp\x1e"
        "lstep_00000041\x1e"
        "fstep_00000007",
        "\x1e"
        "sstep_00000001\x1e"
        "sstep_00000002.tmp\x1e"
        "kstep_00000003\x1e"
        "kstep_00000004.tmp\x1e"
        "cstep_2147483647",
        "../outside\x1e"
        "flatest.tmp\x1e"
        "cstep_00000002\x1e"
        "cstep_00000003\x1e"
        "cstep_00000004\x1e"
        "dlatest",
    };
    for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]); i++) {
        fuzz_seed(FUZZ_TAKEN, "\20", 1, runs[i], strlen(runs[i]));
    }
}

FUZZ_TARGET(snapshot)
