// The fuzz targets (dev/fuzz) without a fuzzer: their seeds, every truncation of the small ones, single flipped bits,
// and some thousand seeded edits. What counts as a failure stands in fuzz.h; it ends this program with the sanitizer's
// report or with a line "FINDING ...". The long runs are those of dev/fuzz/run.sh.
#define FUZZ_REPLAY
#include "../fuzz/llmc_state.c"
#include "../fuzz/load.c"
#include "../fuzz/matmul_cache.c"
#include "../fuzz/model_file.c"
#include "../fuzz/run_state.c"
#include "../fuzz/snapshot.c"
#include "../fuzz/text.c" // data/tokenize.c
#include "../fuzz/token_shard.c"
#include "../fuzz/vocabulary.c"

#include "unit.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

enum { REPLAY_MAX_BYTES = 1 << 16, REPLAY_EDITS = 2000 };

static uint64_t random_state;
static uint32_t random_below(uint32_t n) { // Knuth's 64-bit linear congruence, as in test_tokenizer.c
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % n;
}

static uint8_t input[REPLAY_MAX_BYTES];
static int ended, refused; // inputs of the target that now runs

static int run_one(const FuzzTarget* target, const uint8_t* bytes, size_t size) {
    uint8_t* exact = (uint8_t*)malloc_or_die(size); // so that a byte read past the end is seen
    memcpy(exact, bytes, size);
    int came_back = fuzz_once(target->run, exact, size);
    free(exact);
    ended += came_back;
    refused += !came_back;
    return came_back;
}

// One change to the `size` bytes of `input`; the new size. Values that lengths and counts go wrong at are likelier.
static size_t edit(size_t size) {
    static const uint32_t words[] = {0,          1,     0x7fffffff, 0x80000000, 0xffffffff,
                                     0x7ffffffe, 65536, 0x01000000, 255,        1024};
    if (size == 0) {
        input[0] = (uint8_t)random_below(256);
        return 1;
    }
    uint32_t near_front = random_below(2) ? (uint32_t)size : (uint32_t)(size < 64 ? size : 64);
    uint32_t at = random_below(near_front), n = 1 + random_below(16);
    n = n < size - at ? n : (uint32_t)(size - at);
    switch (random_below(8)) {
    case 0:
        input[at] ^= (uint8_t)(1 << random_below(8));
        break;
    case 1:
        input[at] = (uint8_t)random_below(256);
        break;
    case 2:
        input[at] = (uint8_t) "0123456789\n\r\t\"\\{}:, <|\x1e=-#e"[random_below(26)];
        break;
    case 3: { // another 32-bit number: one of those above, or one next to what is there
        uint32_t word = 0;
        size_t width = size - at < 4 ? size - at : 4;
        memcpy(&word, input + at, width);
        word = random_below(2) ? words[random_below(10)] : word + random_below(5) - 2;
        memcpy(input + at, &word, width);
        break;
    }
    case 4: // take some bytes away
        memmove(input + at, input + at + n, size - at - n);
        return size - n;
    case 5: // say some bytes twice
        if (size + n <= REPLAY_MAX_BYTES) {
            memmove(input + at + n, input + at, size - at);
            return size + n;
        }
        break;
    case 6: { // copy some bytes to elsewhere
        uint32_t to = random_below((uint32_t)(size - n + 1));
        memmove(input + to, input + at, n);
        break;
    }
    default: { // part of another seed
        const FuzzSeed* other = &fuzz.seeds[random_below((uint32_t)fuzz.num_seeds)];
        uint32_t from = random_below((uint32_t)other->size);
        n = 1 + random_below(200);
        n = n < other->size - from ? n : (uint32_t)(other->size - from);
        n = n < size - at ? n : (uint32_t)(size - at);
        memcpy(input + at, other->bytes + from, n);
    }
    }
    return size;
}

static void replay(const FuzzTarget* target) {
    target->seeds();
    ended = refused = 0;
    for (int i = 0; i < fuzz.num_seeds; i++) {
        const FuzzSeed* seed = &fuzz.seeds[i];
        int came_back = run_one(target, seed->bytes, seed->size);
        expect(came_back || seed->outcome != FUZZ_TAKEN, "%s: seed %d is refused: %s", target->name, i, fuzz.message);
        expect(!came_back || seed->outcome != FUZZ_REFUSED, "%s: seed %d is not refused", target->name, i);
    }
    for (int i = 0; i < fuzz.num_seeds; i += 1 + fuzz.num_seeds / 20) {
        const FuzzSeed* seed = &fuzz.seeds[i];
        size_t step = 1 + seed->size / 150; // every truncation of the small ones
        for (size_t n = 0; n < seed->size; n += n < 64 || n + 64 > seed->size ? 1 : step) {
            run_one(target, seed->bytes, n);
        }
        memcpy(input, seed->bytes, seed->size);
        size_t bits = 8 * (seed->size < 64 ? seed->size : 64); // of the front, where headers are
        for (size_t bit = 0; bit < bits; bit++) {
            input[bit / 8] ^= (uint8_t)(1 << bit % 8);
            run_one(target, input, seed->size);
            input[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
    }
    random_state = 42;
    for (int i = 0; i < REPLAY_EDITS; i++) {
        const FuzzSeed* seed = &fuzz.seeds[i % fuzz.num_seeds];
        memcpy(input, seed->bytes, seed->size);
        size_t size = seed->size;
        for (uint32_t edits = 1 + random_below(6); edits > 0; edits--) {
            size = edit(size);
        }
        run_one(target, input, size);
    }
    expect(ended > fuzz.num_seeds / 2, "%s: only %d inputs came to their end", target->name, ended);
    printf("         %s: %d seeds, %d inputs, %d refused\n", target->name, fuzz.num_seeds, ended + refused, refused);
    fuzz_free_seeds();
}

static void test_llmc_state(void) {
    replay(&llmc_state_target);
}
static void test_load(void) {
    replay(&load_target);
}
static void test_matmul_cache(void) {
    replay(&matmul_cache_target);
}
static void test_model_file(void) {
    replay(&model_file_target);
}
static void test_run_state(void) {
    replay(&run_state_target);
}
static void test_snapshot(void) {
    replay(&snapshot_target);
}
static void test_text(void) {
    replay(&text_target);
}
static void test_token_shard(void) {
    replay(&token_shard_target);
}
static void test_vocabulary(void) {
    replay(&vocabulary_target);
}

int main(void) {
    fuzz_set_up();
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_set_death_callback(fuzz_keep_input);
#endif
    unit_run(test_llmc_state);
    unit_run(test_load);
    unit_run(test_matmul_cache);
    unit_run(test_model_file);
    unit_run(test_run_state);
    unit_run(test_snapshot);
    unit_run(test_text);
    unit_run(test_token_shard);
    unit_run(test_vocabulary);
    return unit_report();
}
