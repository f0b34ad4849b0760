// Token shards: the trainer's loader (lib/dataloader.h) and data/detokenize (lib/tokens.h).
//
//     input    8 bytes: flags, B, T, ranks and rank, vocabulary, position (epoch and shard, window x 2); then the shard
//     flags    1 shuffled, 2 two copies of the shard, 4 the header's count of tokens is made right, 8 detokenize
#include "fuzz.h"

#include "dataloader.h"

#ifndef TESTING
#define TESTING
#endif
#include "../../data/detokenize.c"

static void token_shard_batches(const char* pattern, const uint8_t* tokens, DataOptions options,
                                DataPosition position) {
    DataLoader loader;
    dataloader_open(&loader, pattern, options);
    int batch = options.B * options.T, in_order = options.order == DATA_IN_ORDER;
    int* kept = (int*)malloc_or_die((size_t)batch * sizeof(int));
    for (int step = 0; step < 12; step++) {
        DataPosition at = loader.at;
        dataloader_next(&loader);
        for (int i = 0; i < batch; i++) {
            fuzz_want(loader.inputs[i] < options.vocab_size && loader.targets[i] < options.vocab_size,
                      "token %d of a vocabulary of %d", loader.inputs[i], options.vocab_size);
            fuzz_want(i == 0 || loader.inputs[i] == loader.targets[i - 1], "targets are not the inputs, moved by one");
        }
        int windows = loader.windows[0];
        if (in_order && at.window < (uint64_t)windows) { // all shards are alike
            size_t first = (at.window * (size_t)options.num_ranks + (size_t)options.rank) * (size_t)batch;
            for (int i = 0; i < batch; i++) {
                uint16_t want;
                memcpy(&want, tokens + 2 * (first + (size_t)i), 2);
                fuzz_want(loader.inputs[i] == want, "window %llu, token %d: %d, want %d", (unsigned long long)at.window,
                          i, loader.inputs[i], want);
            }
        }
        if (step == 5) { // the same batch again, by its position
            memcpy(kept, loader.inputs, (size_t)batch * sizeof(int));
            dataloader_seek(&loader, at);
            dataloader_next(&loader);
            fuzz_want(memcmp(kept, loader.inputs, (size_t)batch * sizeof(int)) == 0,
                      "another batch after dataloader_seek");
        }
    }
    free(kept);
    dataloader_seek(&loader, position);
    dataloader_next(&loader);
    dataloader_close(&loader);
}

static void token_shard_detokenize(const char* path) {
    Tokenizer t;
    tokenizer_init_byte(&t);
    const char* out_path = fuzz_path("text");
    FILE* out = fopen_or_die(out_path, "wb");
    int in_document = 0;
    detokenize_shard(path, &t, out, out_path, "", 0, &in_document);
    fclose_or_die(out, out_path);
    FILE* f = fopen_or_die(path, "rb");
    fseek_or_die(f, TOKENS_HEADER_BYTES, path);
    int64_t want = 0;
    for (uint16_t token; fread(&token, sizeof(token), 1, f) == 1;) {
        want += token < 256;
    }
    fclose(f);
    fuzz_want(file_size_or_die(out_path) == want, "%lld bytes of text from %lld byte tokens",
              (long long)file_size_or_die(out_path), (long long)want);
    tokenizer_free(&t);
}

static void token_shard_run(const uint8_t* data, size_t size) {
    FuzzInput in = {data, size};
    int flags = fuzz_byte(&in);
    DataOptions options;
    options.B = 1 + fuzz_byte(&in) % 4;
    options.T = 1 + fuzz_byte(&in) % 16;
    int ranks = fuzz_byte(&in);
    options.num_ranks = 1 + ranks % 3;
    options.rank = ranks / 3 % options.num_ranks;
    static const int vocabularies[4] = {65536, 50257, 257, 1};
    options.vocab_size = vocabularies[fuzz_byte(&in) % 4];
    options.order = flags & 1 ? DATA_SHUFFLED : DATA_IN_ORDER;
    options.seed = 42;
    int place = fuzz_byte(&in);
    DataPosition position = {(uint64_t)(place / 4), (uint64_t)(place % 4), 0};
    position.window = (uint64_t)fuzz_byte(&in);
    position.window |= (uint64_t)fuzz_byte(&in) << (flags & 16 ? 56 : 8);

    const char* path = fuzz_write("shard_0.bin", in.bytes, in.size);
    if ((flags & 4) != 0 && in.size >= 1024) {
        int32_t count = (int32_t)((in.size - 1024) / 2);
        FILE* f = fopen_or_die(path, "r+b");
        fseek_or_die(f, 8, path);
        fwrite_or_die(&count, sizeof(count), f, path);
        fclose_or_die(f, path);
    }
    if (flags & 8) {
        token_shard_detokenize(path);
        return;
    }
    const char* second = fuzz_path("shard_1.bin");
    unlink(second);
    if (flags & 2) { fuzz_want(link(path, second) == 0, "cannot link '%s'", second); }
    token_shard_batches(fuzz_path("shard_?.bin"), in.bytes + 1024, options, position);
}

static void token_shard_seeds(void) {
    static const struct {
        int tokens, vocabulary;
        uint8_t options[8];
    } seeds[] = {
        {33, 257, {0, 1, 15, 0, 2, 0, 0, 0}},    // two windows of 2 x 16 tokens less one
        {200, 50257, {1, 1, 15, 0, 1, 8, 3, 0}}, // shuffled
        {200, 257, {3, 0, 9, 5, 2, 9, 2, 0}},    // two shards, rank 1 of 3
        {200, 257, {2, 0, 9, 1, 2, 9, 2, 0}},    {300, 257, {8, 0, 0, 0, 0, 0, 0, 0}}, // detokenize
        {1, 50257, {4, 0, 0, 0, 0, 0, 0, 0}},                                          // too short
        {0, 50257, {12, 0, 0, 0, 0, 0, 0, 0}},
    };
    for (size_t i = 0; i < sizeof(seeds) / sizeof(seeds[0]); i++) {
        TokenWriter w;
        const char* path = fuzz_path("seed.bin");
        token_writer_open(&w, path, seeds[i].vocabulary);
        for (int k = 0; k < seeds[i].tokens; k++) {
            uint16_t token = (uint16_t)(k * 7919 % seeds[i].vocabulary);
            token_writer_append(&w, &token, 1);
        }
        token_writer_finish(&w);
        token_writer_publish(&w, path);
        fuzz_seed_file(seeds[i].tokens > 1 ? FUZZ_TAKEN : FUZZ_EITHER, seeds[i].options, 8, path);
    }
}

FUZZ_TARGET(token_shard)
