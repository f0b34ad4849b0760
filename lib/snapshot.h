// Training checkpoints of this program: the container file, and the folder that is one checkpoint.
//
//     RUN/step_00000020/      a committed checkpoint: whole, and synced before it got this name
//         common.bin          container of rank 0: configuration, state of the run
//         shard_00000.bin ..  container of every rank: its part of the FP32 arrays, its FP8 slots
//         model.bin           the weights as an llm.c model file (checkpoint.h)
//     RUN/step_00000040.tmp/  a checkpoint that is being written or removed, or what a killed run left of one
//     RUN/latest              text, "step_00000020\n": the checkpoint that was committed last
//     RUN/step_00000030.old/  passed by a run that went back behind it: nobody's any more, never removed here
//     RUN/lock                empty; the run that writes into RUN holds an flock(2) on it
//
// A container, little-endian:
//
//     offset  0     char[8]  "GPTFP8CK"
//             8     u32      version, 1
//             12    u32      number of sections, at most 32
//             16    u64      bytes of the file
//             24    32 x {char name[16]; u64 offset, bytes, hash}: the sections, in order; unused entries are zero
//             4088  u64      hash of bytes 0 .. 4087
//             4096  the sections, each filled up with zeros to a multiple of 4096 bytes, nothing between or behind them
//
// Every hash is XXH3, 64 bits (xxHash). That of a section runs over its filling, too, so every byte of the file stands
// under one of them. The header is written last. A reader never ends the process: what is wrong with a file is one line
// for the caller, who may have an older checkpoint to fall back to.
#ifndef SNAPSHOT_H
#define SNAPSHOT_H

#include "check.h"
#include "files.h"

#include <assert.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#define XXH_INLINE_ALL // header only: nothing to link, nothing to find at run time
#ifdef __AVX512F__
#define XXH_VECTOR XXH_AVX2 // g++ 12 warns of AVX-512 intrinsics in its own headers; AVX2 hashes at memory speed, too
#endif
#include <xxhash.h>

#if XXH_VERSION_NUMBER < 800
#error "want xxHash 0.8 or newer: before that XXH3 gave other values"
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the structs below are written as they lie in memory: little-endian machines only"
#endif

enum { SNAPSHOT_MAX_SECTIONS = 32, SNAPSHOT_ALIGN = 4096 };
enum { SNAPSHOT_VERSION = 1, SNAPSHOT_PATH = 4096, SNAPSHOT_CHUNK = 1 << 20 };

static const char SNAPSHOT_MAGIC[9] = "GPTFP8CK";

// One entry of the table, as in the file.
typedef struct {
    char name[16]; // at most 15 characters, filled up with zeros
    uint64_t offset, bytes;
    uint64_t hash; // of the bytes and the filling behind them
} SnapshotSection;

// The header, as in the file.
typedef struct {
    char magic[8];
    uint32_t version, num_sections;
    uint64_t file_bytes;
    SnapshotSection section[SNAPSHOT_MAX_SECTIONS];
    unsigned char zeros[SNAPSHOT_ALIGN - 24 - SNAPSHOT_MAX_SECTIONS * 40 - 8];
    uint64_t hash;
} SnapshotHeader;

static_assert(sizeof(SnapshotHeader) == SNAPSHOT_ALIGN, "the header is written as it lies in memory");

// Bytes from the end of a section of `bytes` to the next multiple of SNAPSHOT_ALIGN.
static inline uint64_t snapshot_filling(uint64_t bytes) {
    return (SNAPSHOT_ALIGN - bytes % SNAPSHOT_ALIGN) % SNAPSHOT_ALIGN;
}

// How much of the `left` bytes to take at once.
static inline size_t snapshot_chunk(uint64_t left) {
    return left < (uint64_t)SNAPSHOT_CHUNK ? (size_t)left : (size_t)SNAPSHOT_CHUNK;
}

static inline uint64_t snapshot_header_hash(const SnapshotHeader* header) {
    return XXH3_64bits(header, offsetof(SnapshotHeader, hash));
}

static inline int snapshot_find(const SnapshotHeader* header, const char* name) {
    for (uint32_t i = 0; i < header->num_sections; i++) {
        if (strcmp(header->section[i].name, name) == 0) {
            return (int)i;
        }
    }
    return -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// writing a container

// Write all of `data` at `offset`. Returns 0 or errno.
static inline int snapshot_pwrite(int fd, const void* data, size_t bytes, uint64_t offset) {
    const char* from = (const char*)data;
    while (bytes > 0) {
        ssize_t put = pwrite(fd, from, bytes, (off_t)offset);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            return put < 0 ? errno : EIO;
        }
        from += put;
        bytes -= (size_t)put;
        offset += (uint64_t)put;
    }
    return 0;
}

// Claim `bytes` of disk for the file, so that a full disk shows now and not at the end. Returns 0, also where the file
// system cannot do it, or errno.
static inline int snapshot_reserve(int fd, uint64_t bytes) {
    while (fallocate(fd, 0, 0, (off_t)bytes) != 0) {
        if (errno == EOPNOTSUPP || errno == ENOSYS || errno == ENODEV) {
            return 0;
        }
        if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

typedef struct {
    int fd;
    int error; // errno of the first failure; nothing is done after it
    int in_section;
    char* path;
    uint64_t at; // bytes so far, header and fillings included
    XXH3_state_t* hash;
    SnapshotHeader header;
} SnapshotOut;

static inline void snapshot_out_free(SnapshotOut* out) {
    XXH3_freeState(out->hash);
    free(out->path);
    out->hash = NULL;
    out->path = NULL;
    out->fd = -1;
}

// Create the container file `path`, empty. expected_bytes > 0: claim that much disk first (what is too much of it is
// given back at the end). Returns 0, or errno: the file is then removed, and the calls below do nothing.
static inline int snapshot_out_open(SnapshotOut* out, const char* path, uint64_t expected_bytes) {
    memset(out, 0, sizeof(*out));
    out->path = strdup(path);
    out->hash = XXH3_createState();
    check(out->path != NULL && out->hash != NULL, "out of host memory for the name of '%s'", path);
    out->at = SNAPSHOT_ALIGN; // the header comes last
    memcpy(out->header.magic, SNAPSHOT_MAGIC, sizeof(out->header.magic));
    out->header.version = SNAPSHOT_VERSION;
    out->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (out->fd < 0) {
        out->error = errno;
    } else if (expected_bytes > 0) {
        out->error = snapshot_reserve(out->fd, expected_bytes);
        if (out->error != 0) {
            close(out->fd);
            unlink(path);
        }
    }
    if (out->error != 0) {
        snapshot_out_free(out);
    }
    return out->error;
}

// Begin the section `name`: 1 to 15 characters, another one than those before. EINVAL for anything else, for a section
// within a section and for one too many.
static inline void snapshot_out_begin(SnapshotOut* out, const char* name) {
    if (out->error != 0) {
        return;
    }
    size_t length = strlen(name);
    if (out->in_section || length == 0 || length >= sizeof(out->header.section[0].name) ||
        out->header.num_sections == SNAPSHOT_MAX_SECTIONS || snapshot_find(&out->header, name) >= 0) {
        out->error = EINVAL;
        return;
    }
    SnapshotSection* section = &out->header.section[out->header.num_sections++];
    memcpy(section->name, name, length);
    section->offset = out->at;
    out->in_section = 1;
    XXH3_64bits_reset(out->hash);
}

// Write the next `bytes` of the section. Hashed and written by the megabyte, while it is in the cache.
static inline void snapshot_out_append(SnapshotOut* out, const void* data, size_t bytes) {
    if (out->error == 0 && !out->in_section) {
        out->error = EINVAL;
    }
    for (size_t done = 0; out->error == 0 && done < bytes;) {
        const char* from = (const char*)data + done;
        size_t chunk = snapshot_chunk(bytes - done);
        XXH3_64bits_update(out->hash, from, chunk);
        out->error = snapshot_pwrite(out->fd, from, chunk, out->at);
        out->at += chunk;
        done += chunk;
    }
}

// End the section: fill it up, note length and hash.
static inline void snapshot_out_end(SnapshotOut* out) {
    static const char zeros[SNAPSHOT_ALIGN] = {0};
    if (out->error == 0 && !out->in_section) {
        out->error = EINVAL;
    }
    if (out->error != 0) {
        return;
    }
    SnapshotSection* section = &out->header.section[out->header.num_sections - 1];
    section->bytes = out->at - section->offset;
    snapshot_out_append(out, zeros, snapshot_filling(section->bytes));
    section->hash = XXH3_64bits_digest(out->hash);
    out->in_section = 0;
}

// Header, fsync, close. Returns 0, or errno of the first failure of all calls: the file is then removed.
static inline int snapshot_out_close(SnapshotOut* out) {
    if (out->fd < 0) {
        return out->error;
    }
    if (out->error == 0 && out->in_section) {
        out->error = EINVAL;
    }
    if (out->error == 0) {
        out->header.file_bytes = out->at;
        out->header.hash = snapshot_header_hash(&out->header);
        out->error = snapshot_pwrite(out->fd, &out->header, sizeof(out->header), 0);
    }
    if (out->error == 0 && (ftruncate(out->fd, (off_t)out->at) != 0 || fsync(out->fd) != 0)) {
        out->error = errno;
    }
    if (close(out->fd) != 0 && out->error == 0) {
        out->error = errno;
    }
    if (out->error != 0) {
        unlink(out->path);
    }
    snapshot_out_free(out);
    return out->error;
}

// ---------------------------------------------------------------------------------------------------------------------
// reading a container

typedef struct {
    int fd;
    int section; // the one that is being read; -1: none
    char* path;
    uint64_t done; // bytes of it already read
    XXH3_state_t* hash;
    SnapshotHeader header;
} SnapshotIn;

// Read exactly `bytes` at `offset`; `path` is for the line.
static inline int snapshot_pread(int fd, const char* path, void* to, size_t bytes, uint64_t offset, char* why) {
    char* at = (char*)to;
    while (bytes > 0) {
        ssize_t got = pread(fd, at, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return refuse(why, "cannot read '%s' at byte %llu: %s", path, (unsigned long long)offset,
                                strerror(errno));
        }
        if (got == 0) {
            return refuse(why, "'%s' ends at byte %llu, want %zu more", path, (unsigned long long)offset, bytes);
        }
        at += got;
        bytes -= (size_t)got;
        offset += (uint64_t)got;
    }
    return 0;
}

// Open a regular file for reading and tell its size. Returns the descriptor, or -1 with the line in why. (A pipe under
// the name is refused, not waited for.)
static inline int snapshot_open_file(const char* path, uint64_t* bytes, char* why) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) {
        refuse(why, "cannot open '%s': %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        refuse(why, "'%s' is not a regular file", path);
    } else {
        *bytes = (uint64_t)st.st_size;
        return fd;
    }
    if (fd >= 0) {
        close(fd);
    }
    return -1;
}

// A name of the table: characters that can be printed, then zeros only.
static inline int snapshot_name_is_sound(const char name[16]) {
    size_t length = 0;
    while (length < 16 && name[length] > ' ' && name[length] <= '~') {
        length++;
    }
    for (size_t i = length; i < 16; i++) {
        if (name[i] != 0) {
            return 0;
        }
    }
    return length > 0 && length < 16;
}

// Is the header h of the file `path`, which has `bytes`, what this program writes? Nothing in it is trusted.
static inline int snapshot_check_header(const SnapshotHeader* h, const char* path, uint64_t bytes, char* why) {
    if (memcmp(h->magic, SNAPSHOT_MAGIC, sizeof(h->magic)) != 0) {
        return refuse(why, "'%s' is no checkpoint file, or was never finished: it does not begin with %s", path,
                            SNAPSHOT_MAGIC);
    }
    if (h->version != SNAPSHOT_VERSION) {
        return refuse(why, "'%s' is a checkpoint file of version %u, want %d", path, h->version,
                            SNAPSHOT_VERSION);
    }
    uint64_t hash = snapshot_header_hash(h);
    if (hash != h->hash) {
        return refuse(why, "'%s' is damaged: hash of the header %016llx, want %016llx", path,
                            (unsigned long long)hash, (unsigned long long)h->hash);
    }
    if (bytes != h->file_bytes) {
        return refuse(why, "'%s' is damaged: %llu bytes, want the %llu that its header announces", path,
                            (unsigned long long)bytes, (unsigned long long)h->file_bytes);
    }
    if (h->num_sections > SNAPSHOT_MAX_SECTIONS) {
        return refuse(why, "'%s' is damaged: %u sections, want at most %d", path, h->num_sections,
                            SNAPSHOT_MAX_SECTIONS);
    }
    uint64_t end = SNAPSHOT_ALIGN; // of what is accounted for, a multiple of SNAPSHOT_ALIGN, never beyond `bytes`
    for (uint32_t i = 0; i < h->num_sections; i++) {
        const SnapshotSection* section = &h->section[i];
        if (!snapshot_name_is_sound(section->name)) {
            return refuse(why, "'%s' is damaged: section %u has no sound name", path, i);
        }
        if (snapshot_find(h, section->name) != (int)i) {
            return refuse(why, "'%s' is damaged: two sections '%s', want one", path, section->name);
        }
        if (section->offset != end) {
            return refuse(why, "'%s' is damaged: section '%s' begins at byte %llu, want %llu", path,
                                section->name, (unsigned long long)section->offset, (unsigned long long)end);
        }
        if (section->bytes > bytes - end || snapshot_filling(section->bytes) > bytes - end - section->bytes) {
            return refuse(why, "'%s' is damaged: section '%s' of %llu bytes at byte %llu, but the file has %llu",
                                path, section->name, (unsigned long long)section->bytes, (unsigned long long)end,
                                (unsigned long long)bytes);
        }
        end += section->bytes + snapshot_filling(section->bytes);
    }
    if (end != bytes) {
        return refuse(why, "'%s' is damaged: its sections end at byte %llu, the file at %llu", path,
                            (unsigned long long)end, (unsigned long long)bytes);
    }
    return 0;
}

static inline void snapshot_in_close(SnapshotIn* in) {
    if (in->fd >= 0) {
        close(in->fd);
    }
    XXH3_freeState(in->hash);
    free(in->path);
    memset(in, 0, sizeof(*in));
    in->fd = in->section = -1;
}

// Open the container file `path` and check its header, its table and its size; no section is read yet. Returns 0, or 1
// with one line in why (WHY_BYTES bytes): nothing is then left open.
static inline int snapshot_in_open(SnapshotIn* in, const char* path, char* why) {
    memset(in, 0, sizeof(*in));
    in->section = -1;
    uint64_t bytes = 0;
    in->fd = snapshot_open_file(path, &bytes, why);
    if (in->fd < 0) {
        return 1;
    }
    int failed;
    if (bytes < SNAPSHOT_ALIGN) {
        failed = refuse(why, "'%s' is no checkpoint file: %llu bytes, want a header of %d", path,
                              (unsigned long long)bytes, SNAPSHOT_ALIGN);
    } else {
        failed = snapshot_pread(in->fd, path, &in->header, sizeof(in->header), 0, why) ||
                 snapshot_check_header(&in->header, path, bytes, why);
    }
    if (failed) {
        snapshot_in_close(in);
        return 1;
    }
    in->path = strdup(path);
    in->hash = XXH3_createState();
    check(in->path != NULL && in->hash != NULL, "out of host memory for the name of '%s'", path);
    return 0;
}

// Bytes of the section `name`; -1: there is none.
static inline int64_t snapshot_in_bytes(const SnapshotIn* in, const char* name) {
    int i = snapshot_find(&in->header, name);
    return i < 0 ? -1 : (int64_t)in->header.section[i].bytes;
}

// Go to the front of the section `name`, which must have want_bytes.
static inline int snapshot_in_begin(SnapshotIn* in, const char* name, uint64_t want_bytes, char* why) {
    int i = snapshot_find(&in->header, name);
    in->section = -1;
    if (i < 0) {
        return refuse(why, "'%s' has no section '%s'", in->path ? in->path : "a file that is not open", name);
    }
    if (in->header.section[i].bytes != want_bytes) {
        return refuse(why, "'%s': section '%s' has %llu bytes, want %llu", in->path, name,
                            (unsigned long long)in->header.section[i].bytes, (unsigned long long)want_bytes);
    }
    in->section = i;
    in->done = 0;
    XXH3_64bits_reset(in->hash);
    return 0;
}

// The next `bytes` of the section. They are not to be believed before snapshot_in_end has said so.
static inline int snapshot_in_read(SnapshotIn* in, void* to, size_t bytes, char* why) {
    if (in->section < 0) {
        return refuse(why, "'%s': no section is open", in->path ? in->path : "a file that is not open");
    }
    const SnapshotSection* section = &in->header.section[in->section];
    if (bytes > section->bytes - in->done) {
        return refuse(why, "'%s': section '%s' has %llu bytes left, want %zu", in->path, section->name,
                            (unsigned long long)(section->bytes - in->done), bytes);
    }
    for (size_t read = 0; read < bytes;) {
        char* at = (char*)to + read;
        size_t chunk = snapshot_chunk(bytes - read);
        if (snapshot_pread(in->fd, in->path, at, chunk, section->offset + in->done, why)) {
            return 1;
        }
        XXH3_64bits_update(in->hash, at, chunk);
        in->done += chunk;
        read += chunk;
    }
    return 0;
}

// The section has been read to its end, and its hash is right.
static inline int snapshot_in_end(SnapshotIn* in, char* why) {
    if (in->section < 0) {
        return refuse(why, "'%s': no section is open", in->path ? in->path : "a file that is not open");
    }
    const SnapshotSection* section = &in->header.section[in->section];
    in->section = -1;
    if (in->done != section->bytes) {
        return refuse(why, "'%s': %llu bytes of section '%s' were read, want all %llu", in->path,
                            (unsigned long long)in->done, section->name, (unsigned long long)section->bytes);
    }
    unsigned char filling[SNAPSHOT_ALIGN];
    size_t bytes = (size_t)snapshot_filling(section->bytes);
    if (snapshot_pread(in->fd, in->path, filling, bytes, section->offset + section->bytes, why)) {
        return 1;
    }
    XXH3_64bits_update(in->hash, filling, bytes);
    uint64_t hash = XXH3_64bits_digest(in->hash);
    if (hash != section->hash) {
        return refuse(why, "'%s' is damaged: hash of section '%s' %016llx, want %016llx", in->path, section->name,
                            (unsigned long long)hash, (unsigned long long)section->hash);
    }
    return 0;
}

// The whole section `name` of exactly `bytes`, checked.
static inline int snapshot_in_whole(SnapshotIn* in, const char* name, void* to, uint64_t bytes, char* why) {
    return snapshot_in_begin(in, name, bytes, why) || snapshot_in_read(in, to, (size_t)bytes, why) ||
           snapshot_in_end(in, why);
}

// A part of a file.
typedef struct {
    uint64_t offset, bytes;
} SnapshotPart;

// Have these parts of the file `path`, one behind the other, this XXH3 hash? For what a rank has written of model.bin.
// Returns 0, or 1 with one line in why.
static inline int snapshot_check_parts(const char* path, const SnapshotPart* parts, size_t num_parts, uint64_t hash,
                                       char* why) {
    uint64_t file_bytes = 0, sum = 0;
    int fd = snapshot_open_file(path, &file_bytes, why);
    if (fd < 0) {
        return 1;
    }
    int failed = 0;
    void* buffer = malloc_or_die(SNAPSHOT_CHUNK);
    XXH3_state_t* state = XXH3_createState();
    check(state != NULL, "out of host memory for the hash of '%s'", path);
    XXH3_64bits_reset(state);
    for (size_t i = 0; !failed && i < num_parts; i++) {
        uint64_t offset = parts[i].offset, bytes = parts[i].bytes;
        if (offset > file_bytes || bytes > file_bytes - offset) {
            failed = refuse(why, "'%s' is damaged: %llu bytes, want %llu at byte %llu", path,
                            (unsigned long long)file_bytes, (unsigned long long)bytes, (unsigned long long)offset);
        }
        for (uint64_t done = 0; !failed && done < bytes;) {
            size_t chunk = snapshot_chunk(bytes - done);
            failed = snapshot_pread(fd, path, buffer, chunk, offset + done, why);
            if (!failed) {
                XXH3_64bits_update(state, buffer, chunk);
            }
            done += chunk;
        }
        sum += bytes;
    }
    uint64_t found = XXH3_64bits_digest(state);
    if (!failed && found != hash) {
        failed = refuse(why, "'%s' is damaged: hash of the %llu bytes in %zu part%s from byte %llu on %016llx, want "
                        "%016llx", path, (unsigned long long)sum, num_parts, num_parts == 1 ? "" : "s",
                        (unsigned long long)(num_parts > 0 ? parts[0].offset : 0), (unsigned long long)found,
                        (unsigned long long)hash);
    }
    XXH3_freeState(state);
    free(buffer);
    close(fd);
    return failed;
}

// The same for the `bytes` at `offset`.
static inline int snapshot_check_range(const char* path, uint64_t offset, uint64_t bytes, uint64_t hash, char* why) {
    SnapshotPart part = {offset, bytes};
    return snapshot_check_parts(path, &part, 1, hash, why);
}

// ---------------------------------------------------------------------------------------------------------------------
// folders

static inline void snapshot_join(char* out, size_t size, const char* run, int step, const char* suffix,
                                 const char* file) {
    check(step >= 0, "checkpoint of step %d, want 0 or more", step);
    int length = snprintf(out, size, "%s/step_%08d%s%s%s", run, step, suffix, file ? "/" : "", file ? file : "");
    check(length >= 0 && (size_t)length < size, "the name of the output folder is too long: '%s'", run);
}

// RUN/step_00000020/FILE of a committed checkpoint; file NULL: the folder.
static inline void snapshot_path(char* out, size_t size, const char* run, int step, const char* file) {
    snapshot_join(out, size, run, step, "", file);
}

// The same of one that is being written.
static inline void snapshot_tmp_path(char* out, size_t size, const char* run, int step, const char* file) {
    snapshot_join(out, size, run, step, ".tmp", file);
}

// The step in a folder's name, "step_%08d" and the suffix, written exactly so; -1 for any other name.
static inline int snapshot_step_of_name(const char* name, const char* suffix) {
    if (strncmp(name, "step_", 5) != 0) {
        return -1;
    }
    errno = 0;
    long step = strtol(name + 5, NULL, 10);
    char again[64];
    if (errno != 0 || step < 0 || step > INT32_MAX ||
        snprintf(again, sizeof(again), "step_%08d%s", (int)step, suffix) >= (int)sizeof(again)) {
        return -1;
    }
    return strcmp(name, again) == 0 ? (int)step : -1;
}

// A real folder: neither a file nor a link to a folder.
static inline int snapshot_is_folder(const char* path) {
    struct stat st;
    return lstat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

// Names that a checkpoint's folder may hold, and that are removed with it.
static inline int snapshot_is_own_file(const char* name) {
    size_t length = strlen(name);
    if (strcmp(name, "common.bin") == 0 || strcmp(name, "model.bin") == 0 ||
        (length > 4 && strcmp(name + length - 4, ".tmp") == 0)) {
        return 1;
    }
    if (strncmp(name, "shard_", 6) != 0) {
        return 0;
    }
    size_t digits = strspn(name + 6, "0123456789");
    return digits >= 5 && strcmp(name + 6 + digits, ".bin") == 0;
}

// Remove the folder `path` with the files that a checkpoint has. Never follows a link, never goes into a folder; what
// else lies there stays, and the folder with it. Returns 0 (also when there is no such folder) or errno.
static inline int snapshot_remove_folder(const char* path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        return errno == ENOENT ? 0 : errno;
    }
    DIR* folder = fdopendir(fd);
    if (folder == NULL) {
        int error = errno;
        close(fd);
        return error;
    }
    int removed;
    do { // again while something went: a list that shrinks while it is read may skip entries
        removed = 0;
        rewinddir(folder);
        for (struct dirent* entry; (entry = readdir(folder)) != NULL;) {
            removed += snapshot_is_own_file(entry->d_name) && unlinkat(fd, entry->d_name, 0) == 0;
        }
    } while (removed > 0);
    closedir(folder);
    return rmdir(path) == 0 ? 0 : errno;
}

// Steps of the folders RUN/step_%08d<suffix>, ascending, into *steps (allocated here, freed by the caller). Returns how
// many; 0 when RUN cannot be read.
static inline int snapshot_list(const char* run, const char* suffix, int** steps) {
    int count = 0, capacity = 0;
    *steps = NULL;
    DIR* folder = opendir(run);
    if (folder == NULL) {
        return 0;
    }
    for (struct dirent* entry; (entry = readdir(folder)) != NULL;) {
        int step = snapshot_step_of_name(entry->d_name, suffix);
        char path[SNAPSHOT_PATH];
        if (step < 0) {
            continue;
        }
        snapshot_join(path, sizeof(path), run, step, suffix, NULL);
        if (!snapshot_is_folder(path)) {
            continue;
        }
        if (count == capacity) {
            capacity = 2 * capacity + 16;
            *steps = (int*)realloc(*steps, (size_t)capacity * sizeof(int));
            check(*steps != NULL, "out of host memory for the list of checkpoints in '%s'", run);
        }
        (*steps)[count++] = step;
    }
    closedir(folder);
    if (count > 0) {
        qsort(*steps, (size_t)count, sizeof(int), compare_ints);
    }
    return count;
}

// Steps of the committed checkpoints in RUN, ascending, into *steps (allocated here, freed by the caller). Returns how
// many; 0 when there is no such folder.
static inline int snapshot_steps(const char* run, int** steps) { return snapshot_list(run, "", steps); }

// The step that RUN/latest names; -1 when there is no such file or it names none.
static inline int snapshot_latest(const char* run) {
    char path[SNAPSHOT_PATH], text[64] = {0};
    int length = snprintf(path, sizeof(path), "%s/latest", run);
    int fd = length >= 0 && length < (int)sizeof(path) ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd < 0) {
        return -1;
    }
    ssize_t got = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (got <= 0) {
        return -1;
    }
    text[strcspn(text, "\n")] = 0;
    return snapshot_step_of_name(text, "");
}

// Claim the folder RUN for this process until it ends, however it ends: two that write into one folder remove each
// other's unfinished checkpoints and move each other's logs away. One that was killed may take a while to vanish, so
// another owner is waited for, `seconds` at most. Returns a descriptor to be kept open; -1 with errno: EWOULDBLOCK,
// another process has RUN; else the folder is not there, or it or its file system has no locks.
static inline int snapshot_lock(const char* run, int seconds) {
    char path[SNAPSHOT_PATH];
    int length = snprintf(path, sizeof(path), "%s/lock", run);
    if (length < 0 || length >= (int)sizeof(path)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666); // for writing: NFS locks nothing else
    for (int tries = 0; fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0; tries++) {
        if (errno != EINTR && (errno != EWOULDBLOCK || tries >= 10 * seconds)) {
            int error = errno;
            close(fd);
            errno = error;
            return -1;
        }
        usleep(100000);
    }
    return fd;
}

// Let RUN/latest name the checkpoint of `step`: written aside, synced, renamed. Returns 0 or errno.
static inline int snapshot_set_latest(const char* run, int step) {
    char path[SNAPSHOT_PATH], aside[SNAPSHOT_PATH], text[64];
    int length = snprintf(path, sizeof(path), "%s/latest", run);
    int length_aside = snprintf(aside, sizeof(aside), "%s/latest.tmp", run);
    if (length < 0 || length_aside < 0 || length_aside >= (int)sizeof(aside)) {
        return ENAMETOOLONG;
    }
    int fd = open(aside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        return errno;
    }
    int bytes = snprintf(text, sizeof(text), "step_%08d\n", step);
    int error = snapshot_pwrite(fd, text, (size_t)bytes, 0);
    if (error == 0 && fsync(fd) != 0) {
        error = errno;
    }
    if (close(fd) != 0 && error == 0) {
        error = errno;
    }
    if (error == 0 && rename(aside, path) != 0) {
        error = errno;
    }
    if (error != 0) {
        unlink(aside);
        return error;
    }
    return sync_folder(run);
}

// Make RUN, with its parents, and in it the empty folder for the checkpoint of `step`; what a killed run left of that
// is removed first (files that are not a checkpoint's stay in it). Returns 0 or errno.
static inline int snapshot_begin(const char* run, int step) {
    char tmp[SNAPSHOT_PATH];
    snapshot_tmp_path(tmp, sizeof(tmp), run, step, NULL);
    int error = make_folders(run);
    if (error == 0) {
        error = snapshot_remove_folder(tmp);
    }
    if (error == ENOTEMPTY || error == EEXIST) {
        return 0;
    }
    return error != 0 || mkdir(tmp, 0777) == 0 ? error : errno;
}

// For file systems that cannot exchange two names: move the committed checkpoint of `step` aside, then the new one into
// place. Killed between the two, there is none under the name until snapshot_sweep moves the old one back. 0 or errno.
static inline int snapshot_replace(const char* run, int step) {
    char tmp[SNAPSHOT_PATH], path[SNAPSHOT_PATH], aside[SNAPSHOT_PATH];
    snapshot_tmp_path(tmp, sizeof(tmp), run, step, NULL);
    snapshot_path(path, sizeof(path), run, step, NULL);
    snapshot_join(aside, sizeof(aside), run, step, ".old.tmp", NULL);
    int error = snapshot_remove_folder(aside);
    if (error == 0 && rename(path, aside) != 0) {
        error = errno;
    }
    if (error == 0 && rename(tmp, path) != 0) {
        error = errno;
        if (rename(aside, path) != 0) {
            return errno;
        }
    }
    if (error == 0) {
        error = sync_folder(run);
    }
    if (error == 0) {
        snapshot_remove_folder(aside); // what stays of it, snapshot_sweep removes
    }
    return error;
}

// Commit the checkpoint whose files lie, each synced, in the folder of snapshot_begin: rename the folder, then let
// RUN/latest name it. One of the same step that is there already (a run that went back to an older one) is replaced in
// one rename and then removed. Returns 0 or errno; at every moment the old or the new one is there. After a failure the
// new one has no name again, so that what was announced is what is there.
static inline int snapshot_commit(const char* run, int step) {
    char tmp[SNAPSHOT_PATH], path[SNAPSHOT_PATH];
    snapshot_tmp_path(tmp, sizeof(tmp), run, step, NULL);
    snapshot_path(path, sizeof(path), run, step, NULL);
    int error = sync_folder(tmp);
    if (error != 0) {
        return error;
    }
    unsigned flags = 0; // of the rename that was done; RENAME_EXCHANGE: tmp is the old one now
    if (rename(tmp, path) != 0) {
        error = errno;
        if (error == ENOTEMPTY || error == EEXIST) {
            flags = RENAME_EXCHANGE;
            error = renameat2(AT_FDCWD, tmp, AT_FDCWD, path, flags) == 0 ? 0 : errno;
            if (error == EINVAL || error == ENOSYS || error == EOPNOTSUPP) {
                error = snapshot_replace(run, step);
                return error != 0 ? error : snapshot_set_latest(run, step);
            }
        }
        if (error != 0) {
            return error;
        }
    }
    error = sync_folder(run);
    if (error == 0) {
        error = snapshot_set_latest(run, step);
    }
    if (error == 0) {
        snapshot_remove_folder(tmp); // the old one, after an exchange
    } else if (flags == RENAME_EXCHANGE) {
        renameat2(AT_FDCWD, path, AT_FDCWD, tmp, flags);
    } else {
        rename(path, tmp);
    }
    return error;
}

// Before the checkpoint of step `to` of a run that has none newer than `from` (-1: none at all) is committed: those
// between are of a run that was given up for the one of `from`, or are damaged. Nobody may go back to them once
// `latest` is beyond them, and --keep must not count them, so they get another name: RUN/step_%08d.old, which is left
// to the user (one that has that name already is removed). Returns 0 or errno.
static inline int snapshot_set_aside(const char* run, int from, int to) {
    int* steps;
    int count = snapshot_steps(run, &steps), error = 0;
    for (int i = 0; error == 0 && i < count; i++) {
        if (steps[i] <= from || steps[i] >= to) {
            continue;
        }
        char path[SNAPSHOT_PATH], old[SNAPSHOT_PATH];
        snapshot_path(path, sizeof(path), run, steps[i], NULL);
        snapshot_join(old, sizeof(old), run, steps[i], ".old", NULL);
        error = snapshot_remove_folder(old);
        if (error == 0 && rename(path, old) != 0) {
            error = errno;
        }
    }
    free(steps);
    return error;
}

// Give up the checkpoint of `step` that is being written.
static inline void snapshot_abandon(const char* run, int step) {
    char tmp[SNAPSHOT_PATH];
    snapshot_tmp_path(tmp, sizeof(tmp), run, step, NULL);
    snapshot_remove_folder(tmp);
}

// Remove all committed checkpoints but the newest `keep` (0: keep all) and those of steps divisible by keep_every (0:
// none more). Each loses its name before its first file, so that a kill never leaves half of one under the name. Steps
// beyond RUN/latest are of a run that was given up for an older checkpoint: they are neither counted nor removed, or
// they would cost the new run its own. (When it comes to them: snapshot_set_aside.)
static inline void snapshot_prune(const char* run, int keep, int keep_every) {
    if (keep <= 0) {
        return;
    }
    int* steps;
    int count = snapshot_steps(run, &steps);
    int latest = snapshot_latest(run);
    while (latest >= 0 && count > 0 && steps[count - 1] > latest) {
        count--;
    }
    for (int i = 0; i < count - keep; i++) {
        if (keep_every > 0 && steps[i] % keep_every == 0) {
            continue;
        }
        char path[SNAPSHOT_PATH], tmp[SNAPSHOT_PATH];
        snapshot_path(path, sizeof(path), run, steps[i], NULL);
        snapshot_tmp_path(tmp, sizeof(tmp), run, steps[i], NULL);
        snapshot_remove_folder(tmp);
        if (rename(path, tmp) == 0 && sync_folder(run) == 0) {
            snapshot_remove_folder(tmp);
        }
    }
    free(steps);
}

// Remove what killed runs left: the folders step_*.tmp, and nothing else. Not while a checkpoint is being written.
static inline void snapshot_sweep(const char* run) {
    int* steps;
    int count = snapshot_list(run, ".old.tmp", &steps);
    for (int i = 0; i < count; i++) { // of snapshot_replace; if it is the only one of its step, it is the checkpoint
        char path[SNAPSHOT_PATH], aside[SNAPSHOT_PATH];
        snapshot_path(path, sizeof(path), run, steps[i], NULL);
        snapshot_join(aside, sizeof(aside), run, steps[i], ".old.tmp", NULL);
        if (snapshot_is_folder(path)) {
            snapshot_remove_folder(aside);
        } else if (rename(aside, path) == 0) {
            sync_folder(run);
        }
    }
    free(steps);
    count = snapshot_list(run, ".tmp", &steps);
    for (int i = 0; i < count; i++) {
        snapshot_abandon(run, steps[i]);
    }
    free(steps);
}

#endif
