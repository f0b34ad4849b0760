// Batches of tokens from llm.c's .bin shards, in llm.c's order.
//
//     file     256 x int32 header {20240520, 1, number of tokens, 0...}, then the tokens as uint16, little-endian
//     window   num_ranks * B * T consecutive tokens of one shard; rank r takes tokens r*B*T .. (r+1)*B*T of it, and
//              one more for the last target. The rest of a shard that fills no window is not used.
//     order    DATA_IN_ORDER: shards by name, windows from the front. DATA_SHUFFLED: each epoch shuffles the shards,
//              and the windows of a shard when it is opened, with MT19937 seeded by seed + rank. With seed 42 that is
//              the order of llm.c. Every rank walks all windows once per epoch, in an order of its own.
//
// The position is three numbers: what was drawn before it follows from the seed, so a resumed loader continues with the
// very next batch (dataloader_seek replays the shuffles).
#ifndef DATALOADER_H
#define DATALOADER_H

#include "check.h"

#include <glob.h>

#include "rng.h"

typedef enum { DATA_IN_ORDER, DATA_SHUFFLED } DataOrder;

typedef struct {
    int B, T;            // sequences and tokens per sequence of one batch of this rank
    int rank, num_ranks; // whose batches
    int vocab_size;      // V: a token >= V in a file is an error
    DataOrder order;
    uint32_t seed; // of the shuffles
} DataOptions;

typedef struct {
    uint64_t epoch;  // passes over all shards completed
    uint64_t shard;  // place in this epoch's order of the shards
    uint64_t window; // windows already taken from that shard
} DataPosition;

typedef struct {
    DataOptions options;
    char** paths; // (num_shards) sorted by name
    int* windows; // (num_shards) whole windows of each
    int num_shards;
    int64_t num_tokens;  // of all shards, what an epoch is in llm.c's count of steps
    int64_t num_batches; // windows of all shards: batches until the data repeats
    // where we are
    DataPosition at;
    Mt19937 mt;
    int* shard_order;  // (num_shards) this epoch's
    int* window_order; // (windows of the open shard)
    FILE* file;        // the open shard, shard_order[at.shard]
    // the batch
    uint16_t* buffer; // (B*T + 1) as in the file
    int* inputs;      // (B, T)
    int* targets;     // (B, T), the inputs moved by one
} DataLoader;

enum { TOKEN_FILE_MAGIC = 20240520, TOKEN_FILE_HEADER_BYTES = 1024 };

// Check header and size of the shard at `path`; return its number of tokens.
static inline int64_t dataloader_check_shard(const char* path) {
    int64_t size = file_size_or_die(path);
    check(size >= TOKEN_FILE_HEADER_BYTES, "'%s' is no token file: %lld bytes, want a header of %d", path,
          (long long)size, TOKEN_FILE_HEADER_BYTES);
    FILE* f = fopen_or_die(path, "rb");
    int32_t header[256];
    fread_or_die(header, sizeof(header), f, path);
    fclose_or_die(f, path);
    check(header[0] != 20240801, "'%s' has 32-bit tokens (llm.c's Llama-3 shards), want GPT-2 tokens of 16 bits", path);
    check(header[0] == TOKEN_FILE_MAGIC, "'%s' is no token file: first word %d, want %d (make one with data/tokenize)",
          path, header[0], TOKEN_FILE_MAGIC);
    check(header[1] == 1, "'%s' is a token file of version %d, want 1", path, header[1]);
    check(header[2] > 0, "'%s' announces %d tokens, want at least 1", path, header[2]);
    int64_t want = TOKEN_FILE_HEADER_BYTES + (int64_t)header[2] * 2;
    check(size == want, "'%s' is damaged: %lld bytes, want %lld for the %d tokens that its header announces", path,
          (long long)size, (long long)want, header[2]);
    return header[2];
}

// Tokens of one window, all ranks.
static inline int64_t dataloader_window_tokens(const DataOptions* o) {
    return (int64_t)o->num_ranks * o->B * o->T;
}

// x (n) = 0, 1, ..., n-1, shuffled when the loader shuffles.
static inline void dataloader_fill_order(DataLoader* loader, int* x, int n) {
    for (int i = 0; i < n; i++) {
        x[i] = i;
    }
    if (loader->options.order == DATA_SHUFFLED) {
        mt_shuffle(&loader->mt, x, n);
    }
}

// Begin the shard at the loader's place in the shard order: its window order, and its file when `open`.
static inline void dataloader_begin_shard(DataLoader* loader, int open) {
    int shard = loader->shard_order[loader->at.shard];
    dataloader_fill_order(loader, loader->window_order, loader->windows[shard]);
    if (loader->file != NULL) {
        fclose(loader->file);
        loader->file = NULL;
    }
    if (open) {
        loader->file = fopen_or_die(loader->paths[shard], "rb");
    }
}

// Shuffle the shards of a new epoch. They are shuffled from their order in the epoch before, not from their names, as
// in llm.c.
static inline void dataloader_begin_epoch(DataLoader* loader) {
    if (loader->options.order == DATA_SHUFFLED) {
        mt_shuffle(&loader->mt, loader->shard_order, loader->num_shards);
    }
}

// Go to `position`: the next dataloader_next gives the batch that followed it. O(windows before it), no reading.
static inline void dataloader_seek(DataLoader* loader, DataPosition position) {
    check(position.shard < (uint64_t)loader->num_shards && position.epoch < 1u << 30,
          "data position (epoch %llu, shard %llu) does not fit the %d shards of '%s'",
          (unsigned long long)position.epoch, (unsigned long long)position.shard, loader->num_shards,
          loader->paths[0]);
    mt_seed(&loader->mt, loader->options.seed + (uint32_t)loader->options.rank);
    for (int i = 0; i < loader->num_shards; i++) {
        loader->shard_order[i] = i;
    }
    // without shuffling no epoch differs from the first, so there is nothing to replay
    uint64_t first = loader->options.order == DATA_SHUFFLED ? 0 : position.epoch;
    for (uint64_t epoch = first; epoch <= position.epoch; epoch++) {
        dataloader_begin_epoch(loader);
        uint64_t last = epoch == position.epoch ? position.shard : (uint64_t)loader->num_shards - 1;
        for (loader->at.shard = 0; loader->at.shard <= last; loader->at.shard++) {
            dataloader_begin_shard(loader, epoch == position.epoch && loader->at.shard == last);
        }
    }
    int num_windows = loader->windows[loader->shard_order[position.shard]];
    check(position.window <= (uint64_t)num_windows, "data position (window %llu) does not fit the %d windows of '%s'",
          (unsigned long long)position.window, num_windows, loader->paths[loader->shard_order[position.shard]]);
    loader->at = position;
}

// Start over with the order of the first epoch (validation always sees the same batches).
static inline void dataloader_rewind(DataLoader* loader) {
    DataPosition start = {0, 0, 0};
    dataloader_seek(loader, start);
}

// Open all shards that match `pattern` (glob(7)); each must be valid and hold at least one window and one more token.
static inline void dataloader_open(DataLoader* loader, const char* pattern, DataOptions options) {
    memset(loader, 0, sizeof(*loader));
    loader->options = options;
    glob_t found;
    int status = glob(pattern, 0, NULL, &found);
    check(status == 0, "no token files match '%s'%s", pattern,
          status == GLOB_NOMATCH ? "" : status == GLOB_NOSPACE ? ": out of memory" : ": folder unreadable");
    loader->num_shards = (int)found.gl_pathc;
    size_t n = found.gl_pathc;
    loader->paths = (char**)malloc_or_die(n * sizeof(char*));
    loader->windows = (int*)malloc_or_die(n * sizeof(int));
    loader->shard_order = (int*)malloc_or_die(n * sizeof(int));
    int64_t window_tokens = dataloader_window_tokens(&options);
    int most_windows = 0;
    for (int i = 0; i < loader->num_shards; i++) {
        const char* path = found.gl_pathv[i];
        loader->paths[i] = (char*)malloc_or_die(strlen(path) + 1);
        strcpy(loader->paths[i], path);
        int64_t tokens = dataloader_check_shard(path);
        check(tokens > window_tokens, "'%s' is too short: %lld tokens, want at least ranks * B * T + 1 = %lld", path,
              (long long)tokens, (long long)window_tokens + 1);
        loader->windows[i] = (int)((tokens - 1) / window_tokens); // the last target needs one token more
        loader->num_tokens += tokens;
        loader->num_batches += loader->windows[i];
        most_windows = loader->windows[i] > most_windows ? loader->windows[i] : most_windows;
    }
    globfree(&found);
    size_t batch = (size_t)options.B * (size_t)options.T;
    loader->window_order = (int*)malloc_or_die((size_t)most_windows * sizeof(int));
    loader->buffer = (uint16_t*)malloc_or_die((batch + 1) * sizeof(uint16_t));
    loader->inputs = (int*)malloc_or_die(batch * sizeof(int));
    loader->targets = (int*)malloc_or_die(batch * sizeof(int));
    dataloader_rewind(loader);
}

// Fill inputs and targets with this rank's next batch; after the last shard a new epoch begins. A token outside the
// vocabulary is an error that names file and place.
static inline void dataloader_next(DataLoader* loader) {
    DataPosition* at = &loader->at;
    int shard = loader->shard_order[at->shard];
    if (at->window == (uint64_t)loader->windows[shard]) {
        at->window = 0;
        at->shard++;
        if (at->shard == (uint64_t)loader->num_shards) {
            at->shard = 0;
            at->epoch++;
            dataloader_begin_epoch(loader);
        }
        dataloader_begin_shard(loader, 1);
        shard = loader->shard_order[at->shard];
    }
    const DataOptions* o = &loader->options;
    const char* path = loader->paths[shard];
    int64_t batch = (int64_t)o->B * o->T;
    int64_t first = loader->window_order[at->window] * dataloader_window_tokens(o) + o->rank * batch;
    int64_t offset = TOKEN_FILE_HEADER_BYTES + 2 * first;
    fseek_or_die(loader->file, offset, path);
    fread_or_die(loader->buffer, (size_t)(batch + 1) * sizeof(uint16_t), loader->file, path);
    for (int64_t i = 0; i <= batch; i++) {
        check(loader->buffer[i] < o->vocab_size, "'%s': token %d at byte %lld is outside the vocabulary of %d", path,
              loader->buffer[i], (long long)(offset + 2 * i), o->vocab_size);
    }
    for (int64_t i = 0; i < batch; i++) {
        loader->inputs[i] = loader->buffer[i];
        loader->targets[i] = loader->buffer[i + 1];
    }
    at->window++;
}

// Close the file and free all memory.
static inline void dataloader_close(DataLoader* loader) {
    if (loader->file != NULL) {
        fclose(loader->file);
    }
    for (int i = 0; i < loader->num_shards; i++) {
        free(loader->paths[i]);
    }
    free(loader->paths);
    free(loader->windows);
    free(loader->shard_order);
    free(loader->window_order);
    free(loader->buffer);
    free(loader->inputs);
    free(loader->targets);
    memset(loader, 0, sizeof(*loader));
}

#endif
