// The loader: order, windows, ranks, epochs, resuming, and every way in which a file can be wrong.
#include "dataloader.h"

#include "unit.h"

static char folder[64]; // temporary, removed at the end

static const char* at(const char* name) {
    static char path[8][160];
    static int turn;
    snprintf(path[turn = (turn + 1) % 8], 160, "%s/%s", folder, name);
    return path[turn];
}

// A shard of n tokens: token i is (i * 7919 + shard * 104729) mod 50257.
static void write_shard(const char* path, int shard, int n) {
    int32_t header[256] = {TOKEN_FILE_MAGIC, 1, n};
    FILE* f = fopen_or_die(path, "wb");
    fwrite_or_die(header, sizeof(header), f, path);
    for (int i = 0; i < n; i++) {
        uint16_t token = (uint16_t)(((int64_t)i * 7919 + (int64_t)shard * 104729) % 50257);
        fwrite_or_die(&token, 2, f, path);
    }
    fclose_or_die(f, path);
}

static void write_three_shards(void) {
    write_shard(at("s_0.bin"), 0, 1001);
    write_shard(at("s_1.bin"), 1, 640);
    write_shard(at("s_2.bin"), 2, 1403);
}

static DataOptions options(int rank, int num_ranks, DataOrder order) {
    DataOptions o = {2, 8, rank, num_ranks, 50257, order, 42};
    return o;
}

// FNV-1a over inputs and targets, as 32-bit values.
static uint64_t hash_batch(uint64_t hash, const DataLoader* loader) {
    for (int i = 0; i < loader->options.B * loader->options.T; i++) {
        hash = (hash ^ (uint64_t)loader->inputs[i]) * 0x100000001b3ull;
        hash = (hash ^ (uint64_t)loader->targets[i]) * 0x100000001b3ull;
    }
    return hash;
}

static void test_in_order(void) {
    DataLoader loader;
    dataloader_open(&loader, at("s_*.bin"), options(0, 1, DATA_IN_ORDER));
    expect(loader.num_tokens == 3044, "num_tokens = %lld", (long long)loader.num_tokens);
    expect(loader.num_batches == 62 + 39 + 87, "num_batches = %lld", (long long)loader.num_batches);
    for (int epoch = 0; epoch < 2; epoch++) {
        for (int shard = 0; shard < 3; shard++) {
            for (int w = 0; w < loader.windows[shard]; w++) {
                dataloader_next(&loader);
                for (int i = 0; i < 16; i++) {
                    int64_t k = 16 * w + i;
                    int want = (int)((k * 7919 + shard * 104729) % 50257);
                    int next = (int)(((k + 1) * 7919 + shard * 104729) % 50257);
                    expect(loader.inputs[i] == want && loader.targets[i] == next,
                           "epoch %d shard %d token %d: %d -> %d, want %d -> %d", epoch, shard, (int)k,
                           loader.inputs[i], loader.targets[i], want, next);
                }
            }
        }
    }
    dataloader_rewind(&loader);
    dataloader_next(&loader);
    expect(loader.inputs[1] == 7919, "after rewind: %d", loader.inputs[1]);
    dataloader_close(&loader);
}

// 640 tokens are 40 windows of 16, but the last one lacks its last target: one token more makes the difference.
static void test_last_target(void) {
    write_shard(at("t.bin"), 0, 640);
    DataLoader loader;
    dataloader_open(&loader, at("t.bin"), options(0, 1, DATA_IN_ORDER));
    expect(loader.num_batches == 39, "640 tokens: %lld windows, want 39", (long long)loader.num_batches);
    dataloader_close(&loader);
    write_shard(at("t.bin"), 0, 641);
    dataloader_open(&loader, at("t.bin"), options(0, 1, DATA_IN_ORDER));
    expect(loader.num_batches == 40, "641 tokens: %lld windows, want 40", (long long)loader.num_batches);
    dataloader_close(&loader);
}

// Each epoch gives every window of every shard once, in another order.
static void test_shuffled_covers_everything(void) {
    DataLoader loader;
    dataloader_open(&loader, at("s_*.bin"), options(0, 1, DATA_SHUFFLED));
    uint64_t before = 0;
    for (int epoch = 0; epoch < 3; epoch++) {
        char seen[3][88] = {{0}};
        uint64_t hash = 0;
        for (int64_t b = 0; b < loader.num_batches; b++) {
            dataloader_next(&loader);
            hash = hash_batch(hash, &loader);
            int shard = loader.shard_order[loader.at.shard], window = loader.window_order[loader.at.window - 1];
            int want = (int)((16ll * window * 7919 + shard * 104729ll) % 50257);
            expect(loader.inputs[0] == want, "first token %d, want %d", loader.inputs[0], want);
            seen[shard][window]++;
        }
        for (int shard = 0; shard < 3; shard++) {
            for (int w = 0; w < loader.windows[shard]; w++) {
                expect(seen[shard][w] == 1, "epoch %d: window %d of shard %d came %d times", epoch, w, shard,
                       seen[shard][w]);
            }
        }
        expect(hash != before, "epoch %d repeats the order of the one before", epoch);
        before = hash;
    }
    dataloader_close(&loader);
}

// Hashes of the first 600 batches (over three epochs) that llm.c's own dataloader.h (commit f1e2ace) gives for these
// shards, B = 2, T = 8, seed 42 + rank.
static void test_order_is_llmcs(void) {
    static const struct {
        int rank, num_ranks;
        DataOrder order;
        uint64_t want;
    } cases[] = {
        {0, 1, DATA_IN_ORDER, 0x406e290bed2e05e4ull},
        {0, 1, DATA_SHUFFLED, 0xa5f59f6baaf58b94ull},
        {0, 3, DATA_SHUFFLED, 0x34017d5fcdb72d19ull},
        {2, 3, DATA_SHUFFLED, 0xddc0ecbf86c80413ull},
        {2, 3, DATA_IN_ORDER, 0xaea3ea2dbeddd995ull},
    };
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        DataLoader loader;
        dataloader_open(&loader, at("s_*.bin"), options(cases[c].rank, cases[c].num_ranks, cases[c].order));
        uint64_t hash = 0xcbf29ce484222325ull;
        for (int b = 0; b < 600; b++) {
            dataloader_next(&loader);
            hash = hash_batch(hash, &loader);
        }
        expect(hash == cases[c].want, "case %d: hash %016llx, llm.c has %016llx", (int)c, (unsigned long long)hash,
               (unsigned long long)cases[c].want);
        dataloader_close(&loader);
    }
}

// Saved after k batches and continued by a fresh loader: the same batches as without the break, for every k over more
// than two epochs, also at the very end of a shard and of an epoch.
static void test_resume(void) {
    for (int order = 0; order < 2; order++) {
        enum { BATCHES = 420 };
        uint64_t hash[BATCHES];
        DataPosition position[BATCHES];
        DataLoader loader;
        dataloader_open(&loader, at("s_*.bin"), options(0, 1, (DataOrder)order));
        for (int b = 0; b < BATCHES; b++) {
            position[b] = loader.at; // in front of batch b
            dataloader_next(&loader);
            hash[b] = hash_batch(0, &loader);
        }
        dataloader_close(&loader);
        DataLoader resumed;
        dataloader_open(&resumed, at("s_*.bin"), options(0, 1, (DataOrder)order));
        for (int b = 0; b + 3 < BATCHES; b++) {
            dataloader_seek(&resumed, position[b]);
            for (int k = 0; k < 3; k++) {
                dataloader_next(&resumed);
                uint64_t got = hash_batch(0, &resumed);
                expect(got == hash[b + k], "order %d: resumed in front of batch %d, batch %d differs", order, b, b + k);
            }
        }
        dataloader_close(&resumed);
    }
}

// Ranks split each window: in file order, rank 0, 1, 2 of one step are one piece of the file.
static void test_ranks(void) {
    DataLoader rank[3];
    for (int r = 0; r < 3; r++) {
        dataloader_open(&rank[r], at("s_*.bin"), options(r, 3, DATA_IN_ORDER));
    }
    for (int step = 0; step < 25; step++) { // over the end of the first shard, which has 20 windows
        for (int r = 0; r < 3; r++) {
            dataloader_next(&rank[r]);
        }
        for (int r = 1; r < 3; r++) {
            expect(rank[r].inputs[0] == rank[r - 1].targets[15], "step %d: rank %d does not continue rank %d", step, r,
                   r - 1);
        }
    }
    for (int r = 0; r < 3; r++) {
        dataloader_close(&rank[r]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// hostile files

static void open_pattern(void* pattern) {
    DataLoader loader;
    dataloader_open(&loader, (const char*)pattern, options(0, 1, DATA_SHUFFLED));
    for (int b = 0; b < 200; b++) {
        dataloader_next(&loader);
    }
}

static void write_bytes(const char* path, const void* bytes, size_t n) {
    FILE* f = fopen_or_die(path, "wb");
    fwrite_or_die(bytes, n, f, path);
    fclose_or_die(f, path);
}

static void test_bad_files(void) {
    expect_dies(open_pattern, (void*)(uintptr_t)at("nothing_*.bin"), "no token files match");
    expect_dies(open_pattern, folder, "is not a regular file");
    write_shard(at("short.bin"), 0, 16);
    expect_dies(open_pattern, (void*)(uintptr_t)at("short.bin"),
                "too short: 16 tokens, want at least ranks * B * T + 1 = 17");
    static const struct {
        int word, value;
        const char* error;
    } headers[] = {
        {0, 0, "no token file: first word 0, want 20240520"},
        {0, 20240326, "no token file: first word 20240326"}, // a model file
        {0, 20240801, "32-bit tokens"},
        {1, 2, "version 2, want 1"},
        {1, 0, "version 0, want 1"},
        {2, 0, "announces 0 tokens"},
        {2, -1, "announces -1 tokens"},
        {2, 39, "damaged: 1104 bytes, want 1102 for the 39 tokens"},
        {2, 41, "damaged: 1104 bytes, want 1106 for the 41 tokens"},
        {2, 2147483647, "damaged"},
    };
    for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
        unsigned char bytes[1024 + 80] = {0};
        int32_t* words = (int32_t*)(void*)bytes;
        words[0] = TOKEN_FILE_MAGIC;
        words[1] = 1;
        words[2] = 40;
        words[headers[i].word] = headers[i].value;
        write_bytes(at("bad.bin"), bytes, sizeof(bytes));
        expect_dies(open_pattern, (void*)(uintptr_t)at("bad.bin"), headers[i].error);
    }
}

// Cut at every length, and one byte too long.
static void test_truncated(void) {
    unsigned char bytes[1024 + 80 + 1] = {0};
    int32_t* words = (int32_t*)(void*)bytes;
    words[0] = TOKEN_FILE_MAGIC;
    words[1] = 1;
    words[2] = 40;
    for (size_t n = 0; n <= sizeof(bytes); n += n < 1000 ? 50 : 1) {
        if (n == 1024 + 80) {
            continue; // whole
        }
        write_bytes(at("cut.bin"), bytes, n);
        expect_dies(open_pattern, (void*)(uintptr_t)at("cut.bin"), n < 1024 ? "no token file" : "damaged");
    }
    write_bytes(at("cut.bin"), bytes, 1024 + 80);
    DataLoader loader;
    dataloader_open(&loader, at("cut.bin"), options(0, 1, DATA_IN_ORDER));
    dataloader_next(&loader);
    dataloader_close(&loader);
}

static void test_token_outside_vocabulary(void) {
    unsigned char bytes[1024 + 80] = {0};
    int32_t* words = (int32_t*)(void*)bytes;
    words[0] = TOKEN_FILE_MAGIC;
    words[1] = 1;
    words[2] = 40;
    bytes[1024 + 2 * 20] = 0x51; // 50257 = 0xC451, the first id that GPT-2 does not have
    bytes[1024 + 2 * 20 + 1] = 0xC4;
    write_bytes(at("token.bin"), bytes, sizeof(bytes));
    expect_dies(open_pattern, (void*)(uintptr_t)at("token.bin"),
                "token 50257 at byte 1064 is outside the vocabulary of 50257");
}

// A file that shrinks under the run.
static void shrink_then_read(void* path) {
    DataLoader loader;
    dataloader_open(&loader, (const char*)path, options(0, 1, DATA_IN_ORDER));
    check(truncate((const char*)path, 1024) == 0, "truncate failed");
    dataloader_next(&loader);
}

static void seek_past_the_end(void* which) {
    DataLoader loader;
    dataloader_open(&loader, at("s_*.bin"), options(0, 1, DATA_SHUFFLED));
    DataPosition shard = {0, 3, 0}, window = {1, 0, 5000}, epoch = {1ull << 40, 0, 0};
    dataloader_seek(&loader, *(int*)which == 0 ? shard : *(int*)which == 1 ? window : epoch);
}

static void test_bad_uses(void) {
    write_shard(at("shrink.bin"), 0, 100);
    expect_dies(shrink_then_read, (void*)(uintptr_t)at("shrink.bin"), "is truncated or unreadable");
    for (int which = 0; which < 3; which++) {
        expect_dies(seek_past_the_end, &which, "data position");
    }
}

// The validation file that llm.c's logs are about: 480,062 tokens, the first one end-of-text.
static void test_real_data(void) {
    const char* data = getenv("SHARED_DATA") ? getenv("SHARED_DATA") : "../shared/data";
    char command[512];
    snprintf(command, sizeof(command), "xz -dc %s/corpus/gpt2_val.bin.xz > %s 2> /dev/null", data, at("val.bin"));
    if (system(command) != 0) {
        unit_skip("no corpus/gpt2_val.bin.xz in $SHARED_DATA or ../shared/data (or no xz)");
        return;
    }
    DataLoader loader;
    DataOptions o = {32, 1024, 0, 1, 50257, DATA_IN_ORDER, 42};
    dataloader_open(&loader, at("val.bin"), o);
    expect(loader.num_tokens == 480062 && loader.num_batches == 14, "%lld tokens, %lld batches",
           (long long)loader.num_tokens, (long long)loader.num_batches);
    for (int b = 0; b < 15; b++) {
        dataloader_next(&loader);
        expect((loader.inputs[0] == 50256) == (b == 0 || b == 14), "batch %d begins with %d", b, loader.inputs[0]);
    }
    dataloader_close(&loader);
}

int main(void) {
    snprintf(folder, sizeof(folder), "/tmp/test_dataloader_XXXXXX");
    check(mkdtemp(folder) != NULL, "cannot make a temporary folder");
    write_three_shards();
    unit_run(test_in_order);
    unit_run(test_last_target);
    unit_run(test_shuffled_covers_everything);
    unit_run(test_order_is_llmcs);
    unit_run(test_resume);
    unit_run(test_ranks);
    unit_run(test_bad_files);
    unit_run(test_truncated);
    unit_run(test_token_outside_vocabulary);
    unit_run(test_bad_uses);
    unit_run(test_real_data);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command) != 0 || unit_report();
}
