// llm.c's token shard, the `.bin` file that data/tokenize writes and lib/dataloader.h reads. Plain C11.
//
//     int32 header[256]   [0] 20240520   [1] version 1   [2] number of tokens   [3] entries of the vocabulary   rest 0
//     uint16 tokens[]     one stream; every document starts with the end-of-text token. All little-endian
//
// [3] is ours and optional: 0, which is what llm.c writes, says nothing (and is written for GPT-2's 50257, so that
// those shards are byte for byte llm.c's); byte-level shards say 257. llm.c ignores it.
#ifndef TOKENS_H
#define TOKENS_H

#include "check.h"

#include <limits.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "token shards are little-endian and are read and written in place"
#endif

#define TOKENS_MAGIC 20240520
#define TOKENS_VERSION 1
#define TOKENS_HEADER_INTS 256
#define TOKENS_HEADER_BYTES (TOKENS_HEADER_INTS * 4)
#define TOKENS_MAX_PER_SHARD ((int64_t)INT32_MAX) // the count is an int32

#define TOKENS_GPT2_VOCAB 50257 // what [3] == 0 stands for, in shards made by llm.c's scripts
#define TOKENS_BYTE_VOCAB 257   // ids 0..255 are bytes, 256 is end-of-text

// Number of tokens of the shard with this header (256 int32, as read) in a file of file_bytes bytes.
// Dies with one line when magic, version, count or file size do not fit together; `path` is for the message.
static inline int64_t tokens_check_header(const int32_t* header, int64_t file_bytes, const char* path) {
    check(header[0] == TOKENS_MAGIC, "'%s' is not a token shard: magic %d, want %d (make one with data/tokenize)", path,
          header[0], TOKENS_MAGIC);
    check(header[1] == TOKENS_VERSION, "'%s': token shard of version %d, want %d (16-bit tokens)", path, header[1],
          TOKENS_VERSION);
    check(header[2] >= 0, "'%s': corrupt header: %d tokens", path, header[2]);
    check(header[3] >= 0 && header[3] <= 65536, "'%s': corrupt header: vocabulary of %d, want 0 to 65536", path,
          header[3]);
    int64_t want = TOKENS_HEADER_BYTES + 2 * (int64_t)header[2];
    check(file_bytes == want, "'%s' is truncated or corrupt: %lld bytes, want %lld for %d tokens", path,
          (long long)file_bytes, (long long)want, header[2]);
    return header[2];
}

// Open a shard and check its header; the file stands at the first token. *num_tokens and *vocab_size ([3], 0 when the
// shard does not say) are set. Dies with one line on anything that is not a whole shard.
static inline FILE* tokens_open_shard(const char* path, int64_t* num_tokens, int* vocab_size) {
    int32_t header[TOKENS_HEADER_INTS];
    int64_t file_bytes = file_size_or_die(path);
    check(file_bytes >= TOKENS_HEADER_BYTES,
          "'%s' is not a token shard: %lld bytes, want at least the %d of its header", path, (long long)file_bytes,
          TOKENS_HEADER_BYTES);
    FILE* f = fopen_or_die(path, "rb");
    fread_or_die(header, sizeof(header), f, path);
    *num_tokens = tokens_check_header(header, file_bytes, path);
    *vocab_size = header[3];
    return f;
}

// A shard being written. It lies under `<path>.tmp` until token_writer_publish, so that no reader ever sees half of
// one.
typedef struct {
    FILE* file;
    char* tmp_path;
    int64_t num_tokens;
    int vocab_size; // entries of the vocabulary; TOKENS_GPT2_VOCAB is stored as 0
} TokenWriter;

// Start `<path>.tmp` with room for the header.
static inline void token_writer_open(TokenWriter* w, const char* path, int vocab_size) {
    size_t length = strlen(path) + sizeof(".tmp");
    w->tmp_path = (char*)malloc_or_die(length);
    snprintf(w->tmp_path, length, "%s.tmp", path);
    w->file = fopen_or_die(w->tmp_path, "wb");
    w->num_tokens = 0;
    w->vocab_size = vocab_size;
    int32_t header[TOKENS_HEADER_INTS] = {0};
    fwrite_or_die(header, sizeof(header), w->file, w->tmp_path);
}

// Append n tokens; more than TOKENS_MAX_PER_SHARD in all is an error.
static inline void token_writer_append(TokenWriter* w, const uint16_t* tokens, size_t n) {
    check((int64_t)n <= TOKENS_MAX_PER_SHARD - w->num_tokens, "'%s': more than %lld tokens in one shard", w->tmp_path,
          (long long)TOKENS_MAX_PER_SHARD);
    fwrite_or_die(tokens, n * sizeof(uint16_t), w->file, w->tmp_path);
    w->num_tokens += (int64_t)n;
}

// Write the header now that the count is known, and bring everything to the disk. The file keeps its .tmp name.
static inline void token_writer_finish(TokenWriter* w) {
    int32_t header[TOKENS_HEADER_INTS] = {TOKENS_MAGIC, TOKENS_VERSION, (int32_t)w->num_tokens,
                                          w->vocab_size == TOKENS_GPT2_VOCAB ? 0 : w->vocab_size};
    fseek_or_die(w->file, 0, w->tmp_path);
    fwrite_or_die(header, sizeof(header), w->file, w->tmp_path);
    check(fflush(w->file) == 0 && fsync(fileno(w->file)) == 0, "cannot finish writing '%s': %s", w->tmp_path,
          strerror(errno));
    fclose_or_die(w->file, w->tmp_path);
    w->file = NULL;
}

// Give a finished shard its name.
static inline void token_writer_publish(TokenWriter* w, const char* path) {
    check(rename(w->tmp_path, path) == 0, "cannot rename '%s' to '%s': %s", w->tmp_path, path, strerror(errno));
    free(w->tmp_path);
    w->tmp_path = NULL;
}

#endif
