// Text to llm.c token shards (lib/tokens.h), byte-level or GPT-2 BPE, on all cores.
//
//     data/tokenize --gpt2 VOCABULARY -o data/fineweb --val-docs 1000 --shard-tokens 100000000 part-*.txt
//     zcat big.txt.gz | data/tokenize --byte -o data/big --val-fraction 0.01 -
//
// One reader (the main thread) cuts the input into documents and collects them in batches, the workers encode batches,
// and the main thread writes them in the order they were read: the output does not depend on the number of threads.
// data/README.md describes the files.
#include "../lib/check.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "../lib/bpe.h"
#include "../lib/tokenizer.h"
#include "../lib/tokens.h"

#define TOKENIZE_SEPARATOR "\n" TOKENIZER_END_OF_TEXT "\n"
#define TOKENIZE_BATCH_BYTES (1 << 20)
#ifndef TOKENIZE_READ_BYTES
#define TOKENIZE_READ_BYTES (1 << 20)
#endif
#define TOKENIZE_MAX_THREADS 256
#define TOKENIZE_DEFAULT_SHARD 1000000000 // tokens: 2 GB

static const char* tokenize_usage =
    "data/tokenize (--byte | --gpt2 VOCABULARY) -o PREFIX [options] FILE... \n"
    "Writes llm.c token shards. FILE may be - for standard input.\n\n"
    "  --byte                    ids 0-255 are the bytes, 256 is end-of-text\n"
    "  --gpt2 VOCABULARY         folder with vocab.bpe and encoder.json, or the file gpt2.tiktoken\n"
    "  -o PREFIX                 PREFIX_train.bin, PREFIX_val.bin; PREFIX_train_000001.bin, ... when one shard is too\n"
    "                            small. A name that ends in .bin is taken as it is (one file, no validation split)\n"
    "  --val-docs N              the first N documents are validation data\n"
    "  --val-fraction F          one document in every 1/F is; of fewer than 1/F documents, the end of each one\n"
    "  --shard-tokens N          tokens per shard (default 1000000000)\n"
    "  --threads N               default: all cores\n"
    "  --document-separator STR  text between documents, \\n \\r \\t \\\\ allowed (default \\n<|endoftext|>\\n)\n";

typedef struct {
    const char* vocabulary; // "byte" or a path; NULL = not given
    const char* output;
    double val_fraction; // 0: no split by fraction
    int64_t val_docs;    // 0: no split by count
    int64_t shard_tokens;
    int num_threads;
    char* separator;
    size_t separator_length;
    char** inputs; // (num_inputs)
    int num_inputs;
} TokenizeOptions;

// ---------------------------------------------------------------------------------------------------------------------
// command line

static double tokenize_number(const char* flag, const char* text, double low, double high) {
    char* end;
    double value = strtod(text, &end);
    check(end != text && *end == 0 && value >= low && value <= high, "%s: '%s', want a number from %g to %g", flag,
          text, low, high);
    return value;
}

static int64_t tokenize_integer(const char* flag, const char* text, int64_t low, int64_t high) {
    char* end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    check(end != text && *end == 0 && errno == 0 && value >= low && value <= high,
          "%s: '%s', want a whole number from %lld to %lld", flag, text, (long long)low, (long long)high);
    return value;
}

// Resolve \n, \r, \t and \\ in a separator given on the command line. Caller frees.
static char* tokenize_unescape(const char* flag, const char* text) {
    char* out = malloc_or_die(strlen(text) + 1);
    size_t n = 0;
    for (const char* p = text; *p; p++) {
        char c = *p;
        if (c == '\\') {
            c = *++p;
            check(c == 'n' || c == 'r' || c == 't' || c == '\\',
                  "%s: '%s': after a backslash want n, r, t or another one", flag, text);
            c = c == 'n' ? '\n' : c == 'r' ? '\r' : c == 't' ? '\t' : '\\';
        }
        out[n++] = c;
    }
    out[n] = 0;
    check(n > 0, "%s: empty, want some text", flag);
    return out;
}

static int tokenize_is_file_name(const char* output) {
    size_t n = strlen(output);
    return n > 4 && strcmp(output + n - 4, ".bin") == 0;
}

static TokenizeOptions tokenize_parse(int argc, char** argv) {
    TokenizeOptions o = {.shard_tokens = TOKENIZE_DEFAULT_SHARD};
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    o.num_threads = cores < 1 ? 1 : cores > TOKENIZE_MAX_THREADS ? TOKENIZE_MAX_THREADS : (int)cores;
    const char* separator = NULL;
    o.inputs = calloc_or_die((size_t)argc, sizeof(char*));
    for (int i = 1; i < argc; i++) {
        const char* flag = argv[i];
        if (flag[0] != '-' || flag[1] == 0) {
            o.inputs[o.num_inputs++] = argv[i];
            continue;
        }
        if (strcmp(flag, "--byte") == 0) {
            check(o.vocabulary == NULL, "--byte: a vocabulary was given already, want one");
            o.vocabulary = "byte";
            continue;
        }
        int known = strcmp(flag, "--gpt2") == 0 || strcmp(flag, "-o") == 0 || strcmp(flag, "--val-fraction") == 0 ||
                    strcmp(flag, "--val-docs") == 0 || strcmp(flag, "--shard-tokens") == 0 ||
                    strcmp(flag, "--threads") == 0 || strcmp(flag, "--document-separator") == 0;
        check(known, "unknown flag '%s' (see data/tokenize --help)", flag);
        check(i + 1 < argc, "%s: no value given", flag);
        const char* value = argv[++i];
        if (strcmp(flag, "--gpt2") == 0) {
            check(o.vocabulary == NULL, "--gpt2: a vocabulary was given already, want one");
            check(strcmp(value, "byte") != 0, "--gpt2: 'byte' is no vocabulary; want --byte, or ./byte for a path");
            o.vocabulary = value;
        } else if (strcmp(flag, "-o") == 0) {
            o.output = value;
        } else if (strcmp(flag, "--val-fraction") == 0) {
            o.val_fraction = tokenize_number(flag, value, 1e-6, 0.5);
        } else if (strcmp(flag, "--val-docs") == 0) {
            o.val_docs = tokenize_integer(flag, value, 1, INT64_MAX);
        } else if (strcmp(flag, "--shard-tokens") == 0) {
            o.shard_tokens = tokenize_integer(flag, value, 1, TOKENS_MAX_PER_SHARD);
        } else if (strcmp(flag, "--threads") == 0) {
            o.num_threads = (int)tokenize_integer(flag, value, 1, TOKENIZE_MAX_THREADS);
        } else {
            separator = value;
        }
    }
    check(o.vocabulary != NULL, "no vocabulary: want --byte or --gpt2 VOCABULARY (see data/tokenize --help)");
    check(o.output != NULL && o.output[0] != 0, "no output: want -o PREFIX (see data/tokenize --help)");
    check(o.num_inputs > 0, "no input: want text files, or - for standard input (see data/tokenize --help)");
    check(o.val_docs == 0 || o.val_fraction == 0, "--val-docs and --val-fraction: want one of them");
    check(!tokenize_is_file_name(o.output) || (o.val_docs == 0 && o.val_fraction == 0),
          "-o %s: one file, but a validation split makes two: want a prefix without .bin", o.output);
    o.separator = tokenize_unescape("--document-separator", separator ? separator : TOKENIZE_SEPARATOR);
    o.separator_length = strlen(o.separator);
    return o;
}

// ---------------------------------------------------------------------------------------------------------------------
// reading: a document ends at the separator or at the end of its file

typedef struct {
    const TokenizeOptions* o;
    int next_input; // index of the next file to open
    int fd;         // -1: none open
    const char* path;
    char* buffer; // (capacity) bytes [begin, end) are read and not yet given out
    size_t begin, end, capacity;
    size_t searched;                    // no separator starts in [begin, searched)
    int64_t bytes_read, bytes_expected; // over all inputs; expected is 0 when some input is not a regular file
} TokenizeReader;

static void tokenize_reader_init(TokenizeReader* r, const TokenizeOptions* o) {
    *r = (TokenizeReader){.o = o, .fd = -1, .capacity = 2 * TOKENIZE_READ_BYTES};
    r->buffer = malloc_or_die(r->capacity);
    for (int i = 0; i < o->num_inputs; i++) { // a missing file is found now, not in an hour
        struct stat st;
        int is_stdin = strcmp(o->inputs[i], "-") == 0;
        check((is_stdin ? fstat(0, &st) : stat(o->inputs[i], &st)) == 0, "cannot open '%s': %s", o->inputs[i],
              strerror(errno));
        check(!S_ISDIR(st.st_mode), "'%s' is a folder, want a text file", o->inputs[i]);
        check(is_stdin || access(o->inputs[i], R_OK) == 0, "cannot open '%s' for reading: %s", o->inputs[i],
              strerror(errno));
        int64_t size = S_ISREG(st.st_mode) ? (int64_t)st.st_size : -1;
        r->bytes_expected = size < 0 || r->bytes_expected < 0 ? -1 : r->bytes_expected + size;
    }
    r->bytes_expected = r->bytes_expected < 0 ? 0 : r->bytes_expected;
}

// Read more of the open file behind what is there; returns 0 at its end.
static int tokenize_fill(TokenizeReader* r) {
    if (r->capacity - r->end < TOKENIZE_READ_BYTES) {
        memmove(r->buffer, r->buffer + r->begin, r->end - r->begin);
        r->searched -= r->begin;
        r->end -= r->begin;
        r->begin = 0;
        if (r->capacity - r->end < TOKENIZE_READ_BYTES) {
            r->capacity *= 2;
            r->buffer = realloc(r->buffer, r->capacity);
            check(r->buffer != NULL, "out of host memory: wanted %zu bytes for one document of '%s'", r->capacity,
                  r->path);
        }
    }
    ssize_t got;
    do {
        got = read(r->fd, r->buffer + r->end, TOKENIZE_READ_BYTES);
    } while (got < 0 && errno == EINTR);
    check(got >= 0, "cannot read '%s': %s", r->path, strerror(errno));
    r->end += (size_t)got;
    r->bytes_read += got;
    return got > 0;
}

// The next document; it stays valid until the next call. Returns 0 after the last.
static int tokenize_next_document(TokenizeReader* r, const char** document, size_t* length) {
    const TokenizeOptions* o = r->o;
    for (;;) {
        if (r->fd < 0) {
            if (r->next_input == o->num_inputs) { return 0; }
            r->path = o->inputs[r->next_input++];
            r->fd = strcmp(r->path, "-") == 0 ? dup(0) : open(r->path, O_RDONLY);
            check(r->fd >= 0, "cannot open '%s' for reading: %s", r->path, strerror(errno));
            r->begin = r->end = r->searched = 0;
        }
        char* hit = memmem(r->buffer + r->searched, r->end - r->searched, o->separator, o->separator_length);
        *document = r->buffer + r->begin;
        if (hit != NULL) {
            *length = (size_t)(hit - *document);
            r->begin = r->searched = (size_t)(hit - r->buffer) + o->separator_length;
            return 1;
        }
        size_t unread = r->end - r->begin; // a separator may have begun in the last bytes
        r->searched = unread < o->separator_length ? r->begin : r->end - (o->separator_length - 1);
        if (tokenize_fill(r)) { continue; }
        close(r->fd);
        r->fd = -1;
        *document = r->buffer + r->begin; // the last one, without a separator after it
        *length = r->end - r->begin;
        size_t trimmed = o->separator_length; // a last separator whose final newline is missing counts
        while (trimmed > 0 && o->separator[trimmed - 1] == '\n') {
            trimmed--;
        }
        if (trimmed > 0 && *length >= trimmed && memcmp(*document + *length - trimmed, o->separator, trimmed) == 0) {
            *length -= trimmed;
            return 1;
        }
        if (*length > 0) { return 1; }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// batches: documents in, tokens out

enum { SPLIT_TRAIN, SPLIT_VAL, NUM_SPLITS };

typedef struct {
    char* text; // all documents, one after the other
    size_t text_used, text_capacity;
    size_t* ends;    // (num_documents) where each ends in `text`
    uint8_t* splits; // (num_documents) SPLIT_TRAIN or SPLIT_VAL
    int num_documents, document_capacity;
    TokenBuffer tokens[NUM_SPLITS];
    int done; // encoded, ready to be written
} TokenizeBatch;

static void tokenize_batch_add(TokenizeBatch* b, const char* text, size_t n, int split) {
    if (b->text_used + n > b->text_capacity) {
        b->text_capacity = b->text_used + n + TOKENIZE_BATCH_BYTES;
        b->text = realloc(b->text, b->text_capacity);
        check(b->text != NULL, "out of host memory: wanted %zu bytes", b->text_capacity);
    }
    if (b->num_documents == b->document_capacity) {
        b->document_capacity = 2 * b->document_capacity + 256;
        b->ends = realloc(b->ends, (size_t)b->document_capacity * sizeof(b->ends[0]));
        b->splits = realloc(b->splits, (size_t)b->document_capacity);
        check(b->ends != NULL && b->splits != NULL, "out of host memory: %d documents", b->document_capacity);
    }
    if (n > 0) { memcpy(b->text + b->text_used, text, n); }
    b->text_used += n;
    b->ends[b->num_documents] = b->text_used;
    b->splits[b->num_documents++] = (uint8_t)split;
}

static void tokenize_batch_clear(TokenizeBatch* b) {
    b->text_used = 0;
    b->num_documents = 0;
    b->done = 0;
    b->tokens[SPLIT_TRAIN].count = b->tokens[SPLIT_VAL].count = 0;
}

static void tokenize_batch_free(TokenizeBatch* b) {
    free(b->text);
    free(b->ends);
    free(b->splits);
    free(b->tokens[SPLIT_TRAIN].ids);
    free(b->tokens[SPLIT_VAL].ids);
}

// Encode all documents of a batch, each behind an end-of-text token. worker NULL: byte-level.
static void tokenize_batch_encode(TokenizeBatch* b, const Tokenizer* t, BpeWorker* worker) {
    size_t begin = 0;
    for (int d = 0; d < b->num_documents; d++) {
        size_t n = b->ends[d] - begin;
        TokenBuffer* out = &b->tokens[b->splits[d]];
        token_buffer_reserve(out, 1);
        out->ids[out->count++] = (uint16_t)t->end_of_text;
        if (worker != NULL && n > 0) {
            bpe_encode(worker, b->text + begin, n, out);
        } else {
            token_buffer_reserve(out, n);
            for (size_t i = 0; i < n; i++) {
                out->ids[out->count++] = (uint8_t)b->text[begin + i];
            }
        }
        begin += n;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// writing: a split is one shard or a row of them, named when all is written

typedef struct {
    const TokenizeOptions* o;
    const char* name; // "train" or "val"
    int vocab_size;
    TokenWriter* shards; // (num_shards) the last one is open
    int num_shards;
    int64_t num_tokens, num_documents;
} TokenizeSplit;

// PREFIX_train_000001.bin, or PREFIX_train.bin for shard 0 = the only one. Caller frees.
static char* tokenize_shard_path(const TokenizeSplit* s, int shard) {
    size_t size = strlen(s->o->output) + 64;
    char* path = malloc_or_die(size);
    if (tokenize_is_file_name(s->o->output)) {
        snprintf(path, size, "%s", s->o->output);
    } else if (shard == 0) {
        snprintf(path, size, "%s_%s.bin", s->o->output, s->name);
    } else {
        snprintf(path, size, "%s_%s_%06d.bin", s->o->output, s->name, shard);
    }
    return path;
}

// Files of an earlier run that a pattern like PREFIX_train*.bin would pick up beside ours are refused before any work.
static void tokenize_refuse_old_shards(const TokenizeSplit* s) {
    char* path = tokenize_shard_path(s, 1);
    check(tokenize_is_file_name(path) && (tokenize_is_file_name(s->o->output) || access(path, F_OK) != 0),
          "'%s' is there from an earlier run: remove its shards or choose another -o", path);
    free(path);
}

static void tokenize_split_append(TokenizeSplit* s, const TokenBuffer* tokens) {
    for (size_t at = 0; at < tokens->count;) {
        TokenWriter* w = s->num_shards > 0 ? &s->shards[s->num_shards - 1] : NULL;
        if (w == NULL || w->num_tokens == s->o->shard_tokens) {
            check(w == NULL || !tokenize_is_file_name(s->o->output),
                  "-o %s: more than %lld tokens do not fit one shard: want "
                  "a prefix without .bin, or a larger --shard-tokens",
                  s->o->output, (long long)s->o->shard_tokens);
            if (w != NULL) { token_writer_finish(w); }
            s->shards = realloc(s->shards, ((size_t)s->num_shards + 1) * sizeof(TokenWriter));
            check(s->shards != NULL, "out of host memory: %d shards", s->num_shards + 1);
            char* path = tokenize_shard_path(s, s->num_shards + 1);
            w = &s->shards[s->num_shards++];
            token_writer_open(w, path, s->vocab_size);
            free(path);
        }
        size_t room = (size_t)(s->o->shard_tokens - w->num_tokens), n = tokens->count - at;
        n = n < room ? n : room;
        token_writer_append(w, tokens->ids + at, n);
        s->num_tokens += (int64_t)n;
        at += n;
    }
}

// Name all shards of a split; returns the pattern that finds them. Caller frees.
static char* tokenize_split_publish(TokenizeSplit* s) {
    char* single = tokenize_shard_path(s, 0);
    token_writer_finish(&s->shards[s->num_shards - 1]);
    for (int i = 0; i < s->num_shards; i++) {
        char* path = s->num_shards == 1 ? tokenize_shard_path(s, 0) : tokenize_shard_path(s, i + 1);
        token_writer_publish(&s->shards[i], path);
        free(path);
    }
    free(s->shards);
    if (s->num_shards == 1) { return single; }
    unlink(single); // of an earlier, smaller run: it is replaced by these shards
    size_t n = strlen(single) + 16;
    char* pattern = malloc_or_die(n);
    snprintf(pattern, n, "%.*s_*.bin", (int)(strlen(single) - 4), single);
    free(single);
    return pattern;
}

// ---------------------------------------------------------------------------------------------------------------------
// the pipeline: a ring of batches between the main thread and the workers

typedef struct {
    const TokenizeOptions* o;
    const Tokenizer* t;
    const Bpe* bpe; // NULL: byte-level
    TokenizeBatch* ring;
    int ring_size;
    int64_t filled, taken, written; // batches so far: written <= taken <= filled <= written + ring_size
    int stop;
    pthread_mutex_t lock;
    pthread_cond_t has_work, has_result;
    pthread_t threads[TOKENIZE_MAX_THREADS];
    TokenizeSplit splits[NUM_SPLITS];
    TokenizeReader reader;
    double start_time, next_progress;
} Tokenize;

static double tokenize_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void* tokenize_worker(void* arg) {
    Tokenize* z = arg;
    BpeWorker worker;
    if (z->bpe != NULL) { bpe_worker_init(&worker, z->bpe); }
    pthread_mutex_lock(&z->lock);
    for (;;) {
        while (z->taken == z->filled && !z->stop) {
            pthread_cond_wait(&z->has_work, &z->lock);
        }
        if (z->taken == z->filled) { break; }
        TokenizeBatch* b = &z->ring[z->taken++ % z->ring_size];
        pthread_mutex_unlock(&z->lock);
        tokenize_batch_encode(b, z->t, z->bpe != NULL ? &worker : NULL);
        pthread_mutex_lock(&z->lock);
        b->done = 1;
        pthread_cond_signal(&z->has_result);
    }
    pthread_mutex_unlock(&z->lock);
    if (z->bpe != NULL) { bpe_worker_free(&worker); }
    return NULL;
}

static void tokenize_show_progress(Tokenize* z) {
    double now = tokenize_seconds();
    if (!isatty(2) || now < z->next_progress) { return; }
    z->next_progress = now + 0.1;
    int64_t tokens = z->splits[SPLIT_TRAIN].num_tokens + z->splits[SPLIT_VAL].num_tokens;
    double mb = 1e-6 * (double)z->reader.bytes_read, seconds = now - z->start_time;
    if (z->reader.bytes_expected > 0) {
        int percent = (int)(100.0 * (double)z->reader.bytes_read / (double)z->reader.bytes_expected);
        int filled = percent > 100 ? 30 : percent * 30 / 100;
        fprintf(stderr, "\r[%.*s%.*s] %3d%%  ", filled, "##############################", 30 - filled,
                "..............................", percent);
    } else {
        fprintf(stderr, "\r");
    }
    fprintf(stderr, "%.1f MB, %.1f M tokens, %.1f MB/s ", mb, 1e-6 * (double)tokens, mb / seconds);
    fflush(stderr);
}

// Write the oldest batch, waiting until it is encoded.
static void tokenize_write_oldest(Tokenize* z) {
    TokenizeBatch* b = &z->ring[z->written % z->ring_size];
    pthread_mutex_lock(&z->lock);
    while (!b->done) {
        pthread_cond_wait(&z->has_result, &z->lock);
    }
    pthread_mutex_unlock(&z->lock);
    for (int s = 0; s < NUM_SPLITS; s++) {
        tokenize_split_append(&z->splits[s], &b->tokens[s]);
    }
    for (int d = 0; d < b->num_documents; d++) {
        z->splits[b->splits[d]].num_documents++;
    }
    tokenize_batch_clear(b);
    z->written++;
    tokenize_show_progress(z);
}

// Hand the batch being filled to the workers, and make sure that the next one is free.
static void tokenize_submit(Tokenize* z) {
    pthread_mutex_lock(&z->lock);
    z->filled++;
    pthread_cond_signal(&z->has_work);
    pthread_mutex_unlock(&z->lock);
    if (z->filled - z->written == z->ring_size) { tokenize_write_oldest(z); }
}

// Put a document into the batch being filled.
static void tokenize_add(Tokenize* z, const char* text, size_t n, int split) {
    TokenizeBatch* b = &z->ring[z->filled % z->ring_size];
    tokenize_batch_add(b, text, n, split);
    if (b->text_used >= TOKENIZE_BATCH_BYTES || b->num_documents >= TOKENIZE_BATCH_BYTES / 64) { tokenize_submit(z); }
}

// Which split the document with this number (from 0) belongs to.
static int tokenize_split_of(const TokenizeOptions* o, int64_t index) {
    if (o->val_fraction > 0) { // every document at which floor(count * fraction) grows: evenly spread, exact share
        return floor((double)(index + 1) * o->val_fraction) > floor((double)index * o->val_fraction);
    }
    return index < o->val_docs ? SPLIT_VAL : SPLIT_TRAIN;
}

// Add the beginning of a document to the training data and its last val_fraction, from the next line on (or, in one
// long line, from the next character on), to the validation data.
static void tokenize_add_cut(Tokenize* z, const char* text, size_t n) {
    size_t cut = (size_t)((double)n * (1.0 - z->o->val_fraction));
    char* newline = cut < n ? memchr(text + cut, '\n', n - cut) : NULL;
    if (newline != NULL && newline + 1 < text + n) { cut = (size_t)(newline + 1 - text); }
    while (cut < n && ((uint8_t)text[cut] & 0xc0) == 0x80) {
        cut++;
    }
    tokenize_add(z, text, cut, SPLIT_TRAIN);
    if (cut < n) { tokenize_add(z, text + cut, n - cut, SPLIT_VAL); }
}

// Read all documents and send them to their splits. A fraction of few documents cannot be taken in whole documents, so
// the first 1/F are held back until it is known whether there are that many.
static void tokenize_read_all(Tokenize* z) {
    const char* text;
    size_t n;
    int64_t index = 0;
    TokenizeBatch held = {0};
    int64_t enough = z->o->val_fraction > 0 ? (int64_t)ceil(1.0 / z->o->val_fraction) : 0;
    int more = 1;
    while (held.num_documents < enough && (more = tokenize_next_document(&z->reader, &text, &n))) {
        tokenize_batch_add(&held, text, n, SPLIT_TRAIN);
    }
    for (size_t begin = 0; index < held.num_documents; index++) {
        n = held.ends[index] - begin;
        if (held.num_documents < enough) {
            tokenize_add_cut(z, held.text + begin, n);
        } else {
            tokenize_add(z, held.text + begin, n, tokenize_split_of(z->o, index));
        }
        begin += n;
    }
    tokenize_batch_free(&held);
    for (; more && tokenize_next_document(&z->reader, &text, &n); index++) {
        tokenize_add(z, text, n, tokenize_split_of(z->o, index));
    }
    if (z->ring[z->filled % z->ring_size].num_documents > 0) { tokenize_submit(z); }
    while (z->written < z->filled) {
        tokenize_write_oldest(z);
    }
}

static void tokenize_start(Tokenize* z) {
    z->ring_size = 2 * z->o->num_threads + 2;
    z->ring = calloc_or_die((size_t)z->ring_size, sizeof(TokenizeBatch));
    pthread_mutex_init(&z->lock, NULL);
    pthread_cond_init(&z->has_work, NULL);
    pthread_cond_init(&z->has_result, NULL);
    for (int i = 0; i < z->o->num_threads; i++) {
        int rc = pthread_create(&z->threads[i], NULL, tokenize_worker, z);
        check(rc == 0, "cannot start thread %d of %d: %s", i + 1, z->o->num_threads, strerror(rc));
    }
}

static void tokenize_stop(Tokenize* z) {
    pthread_mutex_lock(&z->lock);
    z->stop = 1;
    pthread_cond_broadcast(&z->has_work);
    pthread_mutex_unlock(&z->lock);
    for (int i = 0; i < z->o->num_threads; i++) {
        pthread_join(z->threads[i], NULL);
    }
    for (int i = 0; i < z->ring_size; i++) {
        tokenize_batch_free(&z->ring[i]);
    }
    free(z->ring);
    free(z->reader.buffer);
}

// The whole program; the tests call it, too.
static int tokenize_main(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            printf("%s", tokenize_usage);
            return 0;
        }
    }
    TokenizeOptions o = tokenize_parse(argc, argv);
    Tokenize* z = calloc_or_die(1, sizeof(Tokenize));
    Tokenizer t;
    Bpe bpe;
    tokenizer_init(&t, o.vocabulary);
    int is_byte = strcmp(o.vocabulary, "byte") == 0;
    if (!is_byte) { bpe_init(&bpe, &t); }
    z->o = &o;
    z->t = &t;
    z->bpe = is_byte ? NULL : &bpe;
    for (int s = 0; s < NUM_SPLITS; s++) {
        z->splits[s] = (TokenizeSplit){.o = &o, .name = s == SPLIT_TRAIN ? "train" : "val", .vocab_size = t.vocab_size};
        tokenize_refuse_old_shards(&z->splits[s]);
    }
    tokenize_reader_init(&z->reader, &o);
    z->start_time = tokenize_seconds();
    tokenize_start(z);
    tokenize_read_all(z);

    TokenizeSplit *train = &z->splits[SPLIT_TRAIN], *val = &z->splits[SPLIT_VAL];
    int64_t tokens = train->num_tokens + val->num_tokens;
    check(tokens > 0, "no text in the input: no document, nothing written");
    check(train->num_tokens > 0,
          "all %lld documents went to the validation data: want more documents or a smaller split",
          (long long)val->num_documents);
    int wants_val = o.val_docs > 0 || o.val_fraction > 0;
    check(!wants_val || val->num_tokens > 0, "no validation data came out of %lld documents: want a larger split",
          (long long)train->num_documents);
    double seconds = tokenize_seconds() - z->start_time;
    fprintf(stderr, "%s", isatty(2) ? "\r\033[K" : "");
    printf(
        "%s: %.2f MB to %lld tokens (%.3f bytes per token), vocabulary %d, in %.3f s: %.1f MB/s, %.2f M tokens/s, %d "
        "threads\n",
        is_byte ? "byte-level" : "BPE", 1e-6 * (double)z->reader.bytes_read, (long long)tokens,
        (double)z->reader.bytes_read / (double)tokens, t.vocab_size, seconds,
        1e-6 * (double)z->reader.bytes_read / seconds, 1e-6 * (double)tokens / seconds, o.num_threads);
    for (int s = 0; s < NUM_SPLITS; s++) {
        if (z->splits[s].num_tokens > 0) {
            int num_shards = z->splits[s].num_shards;
            char* pattern = tokenize_split_publish(&z->splits[s]);
            printf("%s: %lld documents, %lld tokens, %d shard%s\n", pattern, (long long)z->splits[s].num_documents,
                   (long long)z->splits[s].num_tokens, num_shards, num_shards == 1 ? "" : "s");
            free(pattern);
        }
    }
    tokenize_stop(z);
    if (!is_byte) { bpe_free(&bpe); }
    tokenizer_free(&t);
    free(o.separator);
    free(o.inputs);
    free(z);
    return 0;
}

#ifndef TESTING // test_tokenizer.c includes this file
int main(int argc, char** argv) {
    return tokenize_main(argc, argv);
}
#endif
