// llm.c's training state: round trips, shares of several processes forged byte by byte, llm.c's data order, its real
// checkpoint, and every way in which a file can be wrong.
#include "llmc_state.h"

#include "unit.h"

static char folder[64]; // temporary, removed at the end

static const char* at(const char* name) {
    static char path[8][160];
    static int turn;
    snprintf(path[turn = (turn + 1) % 8], 160, "%s/%s", folder, name);
    return path[turn];
}

static const GptConfig small = {3, 200, 256, 2, 2, 32}; // maxT 3, V 200, Vp 256, L 2, NH 2, C 32
static const GptConfig tiny = {1, 1, 128, 1, 1, 16};

static unsigned char* read_bytes(const char* path, size_t* size) {
    *size = (size_t)file_size_or_die(path);
    unsigned char* bytes = (unsigned char*)malloc_or_die(*size);
    FILE* f = fopen_or_die(path, "rb");
    fread_or_die(bytes, *size, f, path);
    fclose_or_die(f, path);
    return bytes;
}

static void write_bytes(const char* path, const void* bytes, size_t n) {
    FILE* f = fopen_or_die(path, "wb");
    fwrite_or_die(bytes, n, f, path);
    fclose_or_die(f, path);
}

// The flat arrays of a checkpoint: 0 master, 1 m, 2 v.
typedef struct {
    float* x[3];
} Arrays;

static float value_of(int array, size_t i) {
    float x = rng_normal(7, (uint64_t)array, i);
    return array == 2 ? x * x : x;
}

static Arrays some_arrays(const GptConfig* gpt) {
    Arrays arrays;
    size_t n = gpt_num_parameters(gpt);
    for (int a = 0; a < 3; a++) {
        arrays.x[a] = (float*)malloc_or_die(n * sizeof(float));
        for (size_t i = 0; i < n; i++) {
            arrays.x[a][i] = value_of(a, i);
        }
    }
    return arrays;
}

static void free_arrays(Arrays* arrays) {
    for (int a = 0; a < 3; a++) {
        free(arrays->x[a]);
    }
}

static int write_arrays(const char* to, const GptConfig* gpt, int step, const Arrays* arrays, int num_processes,
                        const DataLoader* loader, char* why) {
    DataPosition start = {0, 0, 0};
    return llmc_write(to, gpt, step, arrays->x[0], arrays->x[1], arrays->x[2], num_processes, loader,
                      loader != NULL ? &loader->at : &start, 0, why);
}

// Read what must be good.
static Arrays read_good(const char* model_path, GptConfig* gpt, LlmcState* state) {
    char why[WHY_BYTES] = "";
    Arrays got;
    check(llmc_read(model_path, gpt, state, &got.x[0], &got.x[1], &got.x[2], why) == 0, "%s", why);
    return got;
}

// Read what must be refused, with `text` in the one line that says why.
static void expect_refused(const char* model_path, const char* text) {
    GptConfig gpt;
    LlmcState state;
    float *master = NULL, *m = NULL, *v = NULL;
    char why[WHY_BYTES] = "";
    int status = llmc_read(model_path, &gpt, &state, &master, &m, &v, why);
    expect(status == 1, "'%s': status %d, wanted a refusal with '%s'", model_path, status, text);
    expect(strstr(why, text) != NULL && strchr(why, '\n') == NULL, "wanted '%s', got '%s'", text, why);
    expect(master == NULL && m == NULL && v == NULL, "arrays although it was refused: %s", why);
}

static void expect_equal(const float* got, const float* want, size_t n, const char* what) {
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&got[i], &want[i], sizeof(float)) != 0) {
            expect(0, "%s[%zu] = %g, want %g", what, i, (double)got[i], (double)want[i]);
            return;
        }
    }
}

static void write_shard(const char* path, int n) {
    int32_t header[256] = {TOKEN_FILE_MAGIC, 1, n};
    FILE* f = fopen_or_die(path, "wb");
    fwrite_or_die(header, sizeof(header), f, path);
    check(ftruncate(fileno(f), 1024 + 2 * (off_t)n) == 0, "ftruncate"); // tokens 0: only the order matters here
    fclose_or_die(f, path);
}

static DataOptions options(int rank, int num_ranks, DataOrder order, uint32_t seed) {
    DataOptions o = {2, 8, rank, num_ranks, 50257, order, seed};
    return o;
}

static DataLoader open_at(const char* pattern, DataOptions o, int batches) {
    DataLoader loader;
    dataloader_open(&loader, at(pattern), o);
    for (int b = 0; b < batches; b++) {
        dataloader_next(&loader);
    }
    return loader;
}

// ---------------------------------------------------------------------------------------------------------------------
// in and out

static void test_round_trip(void) {
    Arrays arrays = some_arrays(&small);
    size_t n = gpt_num_parameters(&small);
    for (int processes = 1; processes <= 4; processes++) {
        for (int with_data = 0; with_data < 2; with_data++) {
            char to[160], why[WHY_BYTES] = "unset", path[256];
            snprintf(to, sizeof(to), "%s/trip_%d_%d", folder, processes, with_data); // made by llmc_write
            DataLoader loader;
            if (with_data) { loader = open_at("u_*.bin", options(0, processes, DATA_SHUFFLED, 42), 9); }
            int status = write_arrays(to, &small, 12, &arrays, processes, with_data ? &loader : NULL, why);
            if (with_data) { dataloader_close(&loader); }
            snprintf(path, sizeof(path), "%s/DONE_00000012", to);
            if (processes == 3) {
                expect(status == EINVAL && strstr(why, "for 3 processes") && strstr(why, "divides the 32 channels"),
                       "3 processes: status %d, '%s'", status, why);
                expect(access(path, F_OK) != 0, "3 processes: DONE although refused");
                continue;
            }
            expect(status == 0 && why[0] == 0, "%d processes: status %d, '%s'", processes, status, why);
            expect(access(path, F_OK) == 0 && file_size_or_die(path) == 0, "no empty DONE");
            size_t size, windows = with_data ? (size_t)(999 / (16 * processes)) : 0;
            for (int rank = 0; rank < processes; rank++) {
                snprintf(path, sizeof(path), "%s/state_00000012_%05d.bin", to, rank);
                size_t want = 1024 + 12 * n / (size_t)processes + (with_data ? 8 + 4 * 2 + 8 + 4 * windows + 2520 : 0);
                unsigned char* bytes = read_bytes(path, &size);
                expect(size == want, "%s: %zu bytes, want %zu", path, size, want);
                uint64_t rng;
                memcpy(&rng, bytes + 4 * 22, 8);
                expect(rng == 13371337 + (uint64_t)rank, "generator of rank %d: %llu", rank, (unsigned long long)rng);
                free(bytes);
            }
            GptConfig gpt;
            LlmcState state;
            llmc_model_path(path, sizeof(path), to, 12);
            Arrays got = read_good(path, &gpt, &state);
            expect(memcmp(&gpt, &small, sizeof(gpt)) == 0, "another shape came back");
            expect_equal(got.x[0], arrays.x[0], n, "master");
            expect_equal(got.x[1], arrays.x[1], n, "m");
            expect_equal(got.x[2], arrays.x[2], n, "v");
            expect(state.step == 12 && state.num_processes == processes && state.has_master == 1 &&
                       state.should_shuffle == with_data && state.num_shards == (with_data ? 2 : -1) &&
                       state.samples_per_shard == (with_data ? (int64_t)windows : -1) && state.shard_index == 0 &&
                       state.sample_index == (with_data ? 9 : 0),
                   "%d processes: another state came back", processes);
            expect(state.rng_state_last_update == 13371337 && state.rng_state != 13371337, "generator %llu, %llu",
                   (unsigned long long)state.rng_state, (unsigned long long)state.rng_state_last_update);
            free_arrays(&got);
            float* weights;
            checkpoint_read_model(path, &gpt, &weights);
            for (size_t i = 0; i < n; i++) {
                expect(weights[i] == bf16_round(arrays.x[0][i]), "weight %zu is not its master, rounded", i);
            }
            free(weights);
        }
    }
    free_arrays(&arrays);
}

// Files of the format page, made here without any function of llmc_state.h. `version` of the model file; `whole`: every
// process has all parameters (llm.c without -z 1).
static void forge(const char* prefix, const GptConfig* gpt, int step, int processes, int whole, int has_master,
                  int version) {
    char path[256];
    ParameterTable table = parameter_table(*gpt);
    size_t n = table.num_parameters;
    float* weights = (float*)malloc_or_die(n * sizeof(float));
    for (size_t i = 0; i < n; i++) { // every second BF16 weight is the neighbour farther from zero
        float master = value_of(0, i);
        uint32_t bits = float_bits(master) & 0xFFFF0000u;
        weights[i] = version == 3 ? master : bits_float(bits + (i % 2 && bits != float_bits(master) ? 0x10000u : 0));
    }
    snprintf(path, sizeof(path), "%s/%smodel_%08d.bin", folder, prefix, step);
    checkpoint_write_model(path, gpt, weights, version);
    free(weights);
    for (int rank = 0; rank < processes; rank++) {
        snprintf(path, sizeof(path), "%s/%sstate_%08d_%05d.bin", folder, prefix, step, rank);
        int32_t header[256] = {20240527, 1, processes, rank, has_master, 0};
        header[10] = step;
        header[20] = 77 + rank;
        header[22] = 55 + rank;
        header[30] = 3;
        header[32] = 1000;
        FILE* f = fopen_or_die(path, "wb");
        fwrite_or_die(header, 1024, f, path);
        static const int order[3] = {1, 2, 0}; // m, v, master in the file
        for (int a = 0; a < 2 + has_master; a++) {
            for (size_t i = 0; i < n; i++) { // goes by the parameter's own number: which rank has it?
                int t = 0;
                while (t + 1 < NUM_TENSORS && table.tensor[t + 1].offset <= i) {
                    t++;
                }
                size_t in_layer = (i - table.tensor[t].offset) % table.tensor[t].n;
                size_t owner = in_layer * (size_t)processes / table.tensor[t].n;
                if (whole || owner == (size_t)rank) {
                    float x = value_of(order[a], i);
                    fwrite_or_die(&x, 4, f, path);
                }
            }
        }
        fclose_or_die(f, path);
    }
}

static void test_forged(void) {
    static const struct {
        int processes, whole, has_master, version;
    } cases[] = {{1, 1, 1, 5}, {2, 0, 1, 5}, {4, 0, 1, 5}, {8, 0, 0, 5},
                 {2, 1, 1, 5}, {3, 1, 1, 5}, {1, 1, 1, 3}, {2, 0, 0, 3}};
    size_t n = gpt_num_parameters(&small);
    Arrays want = some_arrays(&small);
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        char prefix[32], path[160];
        snprintf(prefix, sizeof(prefix), "my_model_%zu_", c); // a prefix with "model_" in it
        forge(prefix, &small, 345, cases[c].processes, cases[c].whole, cases[c].has_master, cases[c].version);
        snprintf(path, sizeof(path), "%s/%smodel_00000345.bin", folder, prefix);
        GptConfig gpt;
        LlmcState state;
        Arrays got = read_good(path, &gpt, &state);
        expect(state.step == 345 && state.num_processes == cases[c].processes && state.rng_state == 77 &&
                   state.rng_state_last_update == 55 && state.shard_index == 3 && state.sample_index == 1000 &&
                   state.samples_per_shard == -1 && state.has_master == cases[c].has_master,
               "case %zu: another state", c);
        expect_equal(got.x[1], want.x[1], n, "m");
        expect_equal(got.x[2], want.x[2], n, "v");
        float* weights = got.x[0];
        if (!cases[c].has_master) { // then the masters are the weights
            checkpoint_read_model(path, &gpt, &weights);
            expect_equal(got.x[0], weights, n, "the weight");
            free(weights);
        } else {
            expect_equal(got.x[0], want.x[0], n, "master");
        }
        free_arrays(&got);
    }
    free_arrays(&want);
    // a share for three processes, who cannot share 32 channels
    forge("third_", &small, 345, 3, 1, 1, 5);
    check(truncate(at("third_state_00000345_00000.bin"), 1024 + 12 * (off_t)(n / 3)) == 0, "truncate");
    expect_refused(at("third_model_00000345.bin"), "is damaged or of another model");
}

static void test_steps(void) {
    check(mkdir(at("steps"), 0700) == 0, "mkdir");
    int* steps;
    expect(llmc_steps(at("steps"), &steps) == 0 && steps == NULL, "an empty folder has no steps");
    expect(llmc_steps(at("no/such/folder"), &steps) == 0 && steps == NULL, "no folder, no steps");
    static const char* const names[] = {"DONE_00000500",      "DONE_00000020",  "DONE_123456789",   "DONE_00001000",
                                        "DONE_00000700.tmp",  "DONE_0000080",   "DONE_-0000009",    "DONE_",
                                        "model_00000900.bin", "xDONE_00000600", "DONE_99999999999", "DONE_+0000007"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char path[160];
        snprintf(path, sizeof(path), "%s/steps/%s", folder, names[i]);
        write_bytes(path, "", 0);
    }
    int count = llmc_steps(at("steps"), &steps);
    expect(count == 4, "%d steps, want 4", count);
    static const int want[] = {20, 500, 1000, 123456789};
    for (int i = 0; i < count && i < 4; i++) {
        expect(steps[i] == want[i], "step %d, want %d", steps[i], want[i]);
    }
    free(steps);
    for (int i = 0; i < 40; i++) { // more than the list's first room
        char path[160];
        snprintf(path, sizeof(path), "%s/steps/DONE_%08d", folder, 2000 - i);
        write_bytes(path, "", 0);
    }
    count = llmc_steps(at("steps"), &steps);
    expect(count == 44 && steps[3] == 1961 && steps[42] == 2000, "%d steps", count);
    free(steps);
}

// ---------------------------------------------------------------------------------------------------------------------
// the data order

// FNV-1a of shard order, window order and MT19937 (without its seed field) that llm.c's own dataloader.h (commit
// f1e2ace) holds after so many batches of three shards of 1001, 640 and 1403 tokens, B = 2, T = 8; where it stands; one
// shard of a single window, which draws nothing, is last.
static void test_shuffle_section_is_llmcs(void) {
    static const struct {
        const char* pattern;
        int rank, num_ranks, batches, shard, window;
        uint64_t want;
    } cases[] = {
        {"s_*.bin", 0, 1, 0, 0, 0, 0x64e05f197eb2fe78ull},    {"s_*.bin", 0, 1, 62, 0, 62, 0x64e05f197eb2fe78ull},
        {"s_*.bin", 0, 1, 188, 2, 62, 0xecc5740c8732602aull}, {"s_*.bin", 0, 1, 189, 0, 1, 0xa3b0c827c555b671ull},
        {"s_*.bin", 0, 1, 600, 0, 36, 0xb4cd525ca5e197efull}, {"s_*.bin", 2, 3, 0, 0, 0, 0xb70b18ab6edb873full},
        {"s_*.bin", 2, 3, 20, 0, 20, 0xb70b18ab6edb873full},  {"s_*.bin", 2, 3, 62, 2, 13, 0xd2aad15ce02d1312ull},
        {"s_*.bin", 2, 3, 200, 0, 14, 0x2b7522865188ad8aull}, {"one.bin", 0, 1, 2, 0, 1, 0xb9cde73fce136685ull},
    };
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        DataLoader loader = open_at(cases[c].pattern, options(cases[c].rank, cases[c].num_ranks, DATA_SHUFFLED, 42), 0);
        DataLoader paper;
        char why[WHY_BYTES];
        expect(llmc_paper_loader(&paper, &loader, cases[c].rank, cases[c].num_ranks, why) == 0, "%s", why);
        uint64_t taken = llmc_play(&paper, (uint64_t)cases[c].batches, NULL);
        int is_one = strcmp(cases[c].pattern, "one.bin") == 0;
        expect(taken == (uint64_t)cases[c].batches && paper.at.shard == (uint64_t)cases[c].shard &&
                   paper.at.window == (uint64_t)cases[c].window && (!is_one || paper.at.epoch == 1),
               "case %zu: at shard %d, window %d", c, (int)paper.at.shard, (int)paper.at.window);
        size_t size;
        unsigned char* section = llmc_shuffle_section(&paper, &size);
        uint64_t hash = llmc_shuffle_hash(section, size);
        expect(hash == cases[c].want, "case %zu: hash %016llx, llm.c has %016llx", c, (unsigned long long)hash,
               (unsigned long long)cases[c].want);
        free(section);
        llmc_paper_free(&paper);
        dataloader_close(&loader);
    }
}

// Write after so many batches on every rank, read, ask: the place must be that of the loader that served them, for each
// rank, and nothing but that very place, data and seed may agree.
static void test_data_position(void) {
    Arrays arrays = some_arrays(&tiny);
    static const int batches[] = {0, 1, 20, 21, 61, 62, 63, 125, 126, 188, 189, 400};
    for (size_t c = 0; c < sizeof(batches) / sizeof(batches[0]); c++) {
        for (int variant = 0; variant < 6; variant++) { // 1 rank, 2 ranks (rank 0 and 1 write); shuffled or not
            int num_ranks = variant % 3 == 0 ? 1 : 2, writer = variant % 3 == 2, b = batches[c];
            DataOrder order = variant < 3 ? DATA_SHUFFLED : DATA_IN_ORDER;
            DataLoader loader = open_at("s_*.bin", options(writer, num_ranks, order, 42), b);
            char why[WHY_BYTES] = "", path[160];
            int status = write_arrays(at("position"), &tiny, 7, &arrays, num_ranks, &loader, why);
            expect(status == 0, "%s", why);
            dataloader_close(&loader);
            GptConfig gpt;
            LlmcState state;
            llmc_model_path(path, sizeof(path), at("position"), 7);
            Arrays got = read_good(path, &gpt, &state);
            free_arrays(&got);
            DataPosition place;
            for (int rank = 0; rank < num_ranks; rank++) {
                loader = open_at("s_*.bin", options(rank, num_ranks, order, 42), b);
                memset(&place, 0xFF, sizeof(place));
                int agrees = llmc_data_position(&state, &loader, b, &place);
                expect(agrees == 1, "variant %d, %d batches, rank %d: does not agree", variant, b, rank);
                expect(memcmp(&place, &loader.at, sizeof(place)) == 0, "variant %d, %d batches, rank %d: another place",
                       variant, b, rank);
                expect(llmc_data_position(&state, &loader, b + 1, &place) == 0, "one batch more agrees");
                expect(llmc_data_position(&state, &loader, b - 1, &place) == 0, "one batch less agrees");
                dataloader_close(&loader);
            }
            static const char* const what[] = {"another seed", "another number of ranks", "another order",
                                               "other files"};
            for (int other = 0; other < 4; other++) {
                DataOptions o = options(0, num_ranks + (other == 1), order, other == 0 ? 43 : 42);
                o.order = other != 2 ? order : order == DATA_SHUFFLED ? DATA_IN_ORDER : DATA_SHUFFLED;
                loader = open_at(other == 3 ? "t_*.bin" : "s_*.bin", o, 0);
                // unshuffled, a seed means nothing, and other files look alike as long as the second shard lasts
                int may_agree = order == DATA_IN_ORDER && (other == 0 || (other == 3 && b <= 101));
                expect(may_agree || llmc_data_position(&state, &loader, b, &place) == 0,
                       "variant %d, %d batches: %s agrees", variant, b, what[other]);
                dataloader_close(&loader);
            }
        }
    }
    free_arrays(&arrays);
}

// One rank's 50 batches are 800 tokens: 12 windows of four processes, each in its own order.
static void test_other_number_of_processes(void) {
    Arrays arrays = some_arrays(&small);
    DataLoader loader = open_at("s_*.bin", options(0, 1, DATA_SHUFFLED, 42), 50);
    char why[WHY_BYTES], path[160];
    expect(write_arrays(at("four"), &small, 50, &arrays, 4, &loader, why) == 0, "%s", why);
    dataloader_close(&loader);
    for (int rank = 0; rank < 4; rank++) {
        loader = open_at("s_*.bin", options(rank, 4, DATA_SHUFFLED, 42), 12);
        snprintf(path, sizeof(path), "%s/four/state_00000050_%05d.bin", folder, rank);
        size_t size, section_bytes;
        unsigned char* bytes = read_bytes(path, &size);
        uint64_t place[2];
        memcpy(place, bytes + 4 * 30, 16);
        expect(place[0] == loader.at.shard && place[1] == loader.at.window, "rank %d: shard %d, window %d", rank,
               (int)place[0], (int)place[1]);
        unsigned char* section = llmc_shuffle_section(&loader, &section_bytes);
        expect(size > section_bytes && memcmp(bytes + size - section_bytes, section, section_bytes) == 0,
               "rank %d: not the order of rank %d of 4", rank, rank);
        free(section);
        free(bytes);
        dataloader_close(&loader);
    }
    loader = open_at("one.bin", options(0, 1, DATA_SHUFFLED, 42), 1);
    expect(write_arrays(at("four"), &small, 51, &arrays, 2, &loader, why) == EINVAL && strstr(why, "too short for 2") &&
               access(at("four/DONE_00000051"), F_OK) != 0,
           "17 tokens do not go round: '%s'", why);
    DataPosition nowhere[] = {{0, 1, 0}, {0, 0, 2}, {1ull << 40, 0, 0}};
    for (int i = 0; i < 3; i++) {
        expect(llmc_write(at("four"), &small, 51, arrays.x[0], arrays.x[1], arrays.x[2], 1, &loader, &nowhere[i], 0,
                          why) == EINVAL &&
                   strstr(why, "does not fit the 1 shards"),
               "place %d: '%s'", i, why);
    }
    dataloader_close(&loader);
    free_arrays(&arrays);
}

// Shards of unequal length: llm.c continues only in one that is as long as its first; the caller is told.
static void test_llmcs_own_limit(void) {
    Arrays arrays = some_arrays(&tiny);
    int told = 0, silent = 0;
    for (int b = 0; b < 188; b += 10) {
        DataLoader loader = open_at("s_*.bin", options(0, 1, DATA_SHUFFLED, 42), b), first;
        char why[WHY_BYTES];
        expect(write_arrays(at("limit"), &tiny, 1, &arrays, 1, &loader, why) == 0, "%s", why);
        first = open_at("s_*.bin", options(0, 1, DATA_SHUFFLED, 42), 0);
        int fits = loader.windows[loader.shard_order[loader.at.shard]] == first.windows[first.shard_order[0]];
        expect(fits == (why[0] == 0), "%d batches: '%s'", b, why);
        expect(fits || strstr(why, "differ in length"), "%d batches: '%s'", b, why);
        told += !fits;
        silent += fits;
        dataloader_close(&first);
        dataloader_close(&loader);
    }
    expect(told > 0 && silent > 0, "%d told, %d not: this tests nothing", told, silent);
    free_arrays(&arrays);
}

// ---------------------------------------------------------------------------------------------------------------------
// hostile files

// A good checkpoint of the tiny model, step 5, whose loader is inside the second shard; its state file in memory.
static unsigned char* good_checkpoint(const char* name, int processes, size_t* size) {
    char path[160], why[WHY_BYTES];
    Arrays arrays = some_arrays(&tiny);
    DataLoader loader = open_at("s_*.bin", options(0, processes, DATA_SHUFFLED, 42), 70);
    check(write_arrays(at(name), &tiny, 5, &arrays, processes, &loader, why) == 0, "%s", why);
    dataloader_close(&loader);
    free_arrays(&arrays);
    snprintf(path, sizeof(path), "%s/%s/state_00000005_00000.bin", folder, name);
    return read_bytes(path, size);
}

static void put(const char* path, size_t where, const void* bytes, size_t n) {
    FILE* f = fopen_or_die(path, "r+b");
    fseek_or_die(f, (int64_t)where, path);
    fwrite_or_die(bytes, n, f, path);
    fclose_or_die(f, path);
}

static void test_truncated(void) {
    size_t size;
    unsigned char* bytes = good_checkpoint("cut", 1, &size);
    char model[160], state[160];
    snprintf(state, sizeof(state), "%s/cut/state_00000005_00000.bin", folder);
    llmc_model_path(model, sizeof(model), at("cut"), 5);
    check(truncate(state, (off_t)size + 1) == 0, "truncate");
    expect_refused(model, "is damaged or of another model");
    for (size_t n = size; n-- > 0;) { // every length
        check(truncate(state, (off_t)n) == 0, "truncate");
        expect_refused(model, n < 1024 ? "no llm.c state file" : "is damaged or of another model");
    }
    write_bytes(state, bytes, size);
    int64_t model_size = file_size_or_die(model);
    for (int64_t n = model_size; n-- > 0;) {
        check(truncate(model, (off_t)n) == 0, "truncate");
        expect_refused(model, n < 1024 ? "no llm.c model file" : "is damaged");
    }
    free(bytes);
}

// Every bit of the header: refused, or of a field that any value fits (the generator; a place in the same shard), and
// then neither weights nor the answer about the data are wrong.
static void test_flipped_header(void) {
    size_t size;
    unsigned char* bytes = good_checkpoint("flip", 1, &size);
    char model[160], state_path[160];
    snprintf(state_path, sizeof(state_path), "%s/flip/state_00000005_00000.bin", folder);
    llmc_model_path(model, sizeof(model), at("flip"), 5);
    DataLoader loader = open_at("s_*.bin", options(0, 1, DATA_SHUFFLED, 42), 70);
    DataPosition place;
    int accepted = 0;
    for (int bit = 0; bit < 8192; bit++) {
        int word = bit / 32;
        unsigned char flipped = bytes[bit / 8] ^ (unsigned char)(1 << bit % 8);
        put(state_path, (size_t)bit / 8, &flipped, 1);
        GptConfig gpt;
        LlmcState state;
        Arrays got;
        char why[WHY_BYTES] = "";
        if (llmc_read(model, &gpt, &state, &got.x[0], &got.x[1], &got.x[2], why) == 0) {
            accepted++;
            expect(word >= 20 && word <= 33, "bit %d of word %d: accepted", bit % 32, word);
            expect(word < 30 || llmc_data_position(&state, &loader, 70, &place) == 0,
                   "bit %d of word %d: the data agrees", bit % 32, word);
            free_arrays(&got);
        } else {
            expect(strstr(why, "state_00000005_0000") != NULL, "the line names no file: %s", why);
            expect(word < 20 || word > 23, "a generator of any value is good: %s", why);
        }
        put(state_path, (size_t)bit / 8, &bytes[bit / 8], 1);
    }
    expect(accepted >= 128 && accepted <= 128 + 14, "%d flips accepted", accepted); // 128 of the generator, few places
    dataloader_close(&loader);
    free(bytes);
}

static void test_bad_header(void) {
    static const struct {
        int word, value;
        const char* error;
    } cases[] = {
        {0, 20240326, "no llm.c state file: first word 20240326, want 20240527"},
        {1, 2, "version 2, want 1"},
        {2, 0, "rank 0 of 0"},
        {2, -1, "rank 0 of -1"},
        {2, INT_MAX, "rank 0 of 2147483647"},
        {2, 2, "state_00000005_00001.bin"}, // a whole state of one of two processes: where is the other?
        {2, 99999, "state_00000005_00001.bin"},
        {3, 1, "the state of rank 1 of 1, want rank 0"},
        {4, 0, "is damaged or of another model"},
        {4, 2, "use_master_weights 2"},
        {5, 0, "is damaged or of another model"},
        {5, -1, "should_shuffle -1"},
        {6, 1, "word 6 of its header is 1, want 0"},
        {10, 4, "says step 4, want 5"},
        {30, 3, "from shard 3, there are 3 shards"},
        {31, -1, "there are 3 shards"},
        {32, 1000, "1000 windows taken"},
        {33, INT_MIN, "windows taken"},
        {255, 1, "word 255"},
    };
    size_t size;
    unsigned char* bytes = good_checkpoint("bad", 1, &size);
    char model[160], state[160];
    snprintf(state, sizeof(state), "%s/bad/state_00000005_00000.bin", folder);
    llmc_model_path(model, sizeof(model), at("bad"), 5);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        put(state, 4 * (size_t)cases[i].word, &cases[i].value, 4);
        expect_refused(model, cases[i].error);
        write_bytes(state, bytes, size);
    }
    free(bytes);
}

// The shuffle section: counts as large as can be, orders that are none, a generator that is none.
static void test_bad_shuffle(void) {
    size_t size;
    unsigned char* bytes = good_checkpoint("shuffle", 1, &size);
    char model[160], path[160];
    snprintf(path, sizeof(path), "%s/shuffle/state_00000005_00000.bin", folder);
    llmc_model_path(model, sizeof(model), at("shuffle"), 5);
    size_t S = 1024 + 12 * gpt_num_parameters(&tiny), n = S + 8 + 12, mt = size - 2520;
    static const uint64_t counts[] = {0,          1,          2,          4,          1ull << 31,
                                      1ull << 32, 1ull << 61, 1ull << 62, UINT64_MAX, UINT64_MAX / 4};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        put(path, S, &counts[i], 8);
        expect_refused(model, "is damaged");
        put(path, S, bytes + S, 8);
        put(path, n, &counts[i], 8);
        expect_refused(model, "is damaged");
        put(path, n, bytes + n, 8);
    }
    static const int entries[] = {-1, 3, INT_MAX, INT_MIN};
    for (size_t i = 0; i < 4; i++) {
        put(path, S + 8, &entries[i], 4);
        expect_refused(model, "order of 3 shards");
        put(path, S + 8, bytes + S + 8, 4);
        int entry = entries[i] == 3 ? 1000 : entries[i];
        put(path, n + 8, &entry, 4);
        expect_refused(model, "windows does not hold each");
        put(path, n + 8, bytes + n + 8, 4);
    }
    put(path, n + 8, bytes + n + 12, 4); // twice the same
    expect_refused(model, "windows does not hold each");
    put(path, n + 8, bytes + n + 8, 4);
    static const struct {
        size_t where;
        int value;
    } generators[] = {{8, 0}, {8, 625}, {8, INT_MIN}, {12, 625}, {12, -1}, {12, 0}, {2512, 1}, {2516, 0}};
    for (size_t i = 0; i < sizeof(generators) / sizeof(generators[0]); i++) {
        put(path, mt + generators[i].where, &generators[i].value, 4);
        expect_refused(model, "MT19937");
        put(path, mt + generators[i].where, bytes + mt + generators[i].where, 4);
    }
    uint64_t none = 0; // a shard without windows, and no lists after it: all lengths are right
    unsigned char* empty = (unsigned char*)malloc_or_die(size);
    memcpy(empty, bytes, n);
    memcpy(empty + n, &none, 8);
    memcpy(empty + n + 8, bytes + mt, 2520);
    memset(empty + 4 * 30, 0, 16);
    write_bytes(path, empty, n + 8 + 2520);
    expect_refused(model, "is damaged or of another model");
    free(empty);
    write_bytes(path, bytes, size);
    // any words are a generator, but only these are llm.c's at this place
    GptConfig gpt;
    LlmcState state;
    DataPosition place;
    DataLoader loader = open_at("s_*.bin", options(0, 1, DATA_SHUFFLED, 42), 70);
    for (int flip = 0; flip < 2; flip++) {
        unsigned char word = bytes[mt + 16 + 4 * 600] ^ (unsigned char)flip;
        put(path, mt + 16 + 4 * 600, &word, 1);
        Arrays got = read_good(model, &gpt, &state);
        free_arrays(&got);
        expect(llmc_data_position(&state, &loader, 70, &place) == !flip, "generator %s: agrees %d",
               flip ? "changed" : "as it was", flip);
    }
    dataloader_close(&loader);
    free(bytes);
}

static void test_bad_values(void) {
    size_t size;
    unsigned char* bytes = good_checkpoint("values", 1, &size);
    char model[160], path[160];
    snprintf(path, sizeof(path), "%s/values/state_00000005_00000.bin", folder);
    llmc_model_path(model, sizeof(model), at("values"), 5);
    ParameterTable table = parameter_table(tiny);
    size_t n = table.num_parameters, qkvw = table.tensor[TENSOR_QKVW].offset + 77;
    const float bad[] = {NAN, INFINITY, -INFINITY, -1e-30f};
    for (int i = 0; i < 4; i++) {
        for (size_t a = 0; a < 3; a++) { // m, v, master
            size_t where = 1024 + 4 * (a * n + qkvw);
            put(path, where, &bad[i], 4);
            if (i < 3 || a == 1) {
                static const char* const what[] = {"m of qkvw, layer 0, element 77", "v of qkvw, layer 0, element 77",
                                                   "the master of qkvw, layer 0, element 77"};
                expect_refused(model, what[a]);
            } else if (a == 2) {
                expect_refused(model, "1 of 5376 weights are no rounding of their master, the first: qkvw, layer 0");
            }
            put(path, where, bytes + where, 4);
        }
    }
    // each bit of a master that moves it by more than a neighbour, each bit of a weight but the last
    size_t master = 1024 + 4 * (2 * n + qkvw), weight = 1024 + 2 * qkvw;
    size_t model_size;
    unsigned char* weights = read_bytes(model, &model_size);
    for (int bit = 17; bit < 32; bit++) {
        unsigned char flipped = bytes[master + (size_t)bit / 8] ^ (unsigned char)(1 << bit % 8);
        put(path, master + (size_t)bit / 8, &flipped, 1);
        expect_refused(model, bit < 30 ? "no rounding of their master" : "master");
        put(path, master + (size_t)bit / 8, bytes + master + (size_t)bit / 8, 1);
        size_t byte = weight + (size_t)(bit - 16) / 8;
        flipped = weights[byte] ^ (unsigned char)(1 << bit % 8);
        put(model, byte, &flipped, 1);
        expect_refused(model, "no rounding of their master");
        put(model, byte, weights + byte, 1);
    }
    free(weights);
    // a master that is a BF16 number has one rounding only
    float one = 1.0f, next = 1.0078125f;
    uint16_t one_bits = 0x3F80, next_bits = 0x3F81;
    put(path, master, &one, 4);
    put(model, weight, &one_bits, 2);
    GptConfig gpt;
    LlmcState state;
    Arrays got = read_good(model, &gpt, &state);
    expect(got.x[0][qkvw] == one, "master %g", (double)got.x[0][qkvw]);
    free_arrays(&got);
    put(model, weight, &next_bits, 2);
    expect_refused(model, "(master 1)");
    put(path, master, &next, 4);
    got = read_good(model, &gpt, &state);
    free_arrays(&got);
    // without masters a weight must be a number
    forge("w0_", &tiny, 1, 1, 1, 0, 5);
    uint16_t not_a_number = 0x7FC0;
    put(at("w0_model_00000001.bin"), weight, &not_a_number, 2);
    expect_refused(at("w0_model_00000001.bin"), "the weight of qkvw, layer 0, element 77 is nan");
    free(bytes);
}

static void test_mixed_up(void) {
    size_t size;
    free(good_checkpoint("mixed", 2, &size));
    char command[640];
    const char* model = at("mixed/model_00000005.bin");
    GptConfig gpt;
    LlmcState state;
    Arrays got = read_good(model, &gpt, &state);
    free_arrays(&got);
    char one[160];
    snprintf(one, sizeof(one), "%s/mixed/state_00000005_00001.bin", folder);
    unsigned char* bytes = read_bytes(one, &size);
    check(rename(one, at("away")) == 0, "rename");
    expect_refused(model, "cannot open");
    expect_refused(model, "state_00000005_00001.bin");
    write_bytes(one, bytes, size);
    int zero = 0;
    put(one, 12, &zero, 4); // the same share twice
    expect_refused(model, "the state of rank 0 of 2, want rank 1");
    write_bytes(one, bytes, size);
    forge("whole_", &tiny, 5, 2, 1, 1, 5); // one rank's share, the other's whole state
    snprintf(command, sizeof(command), "cp %s/whole_state_00000005_00001.bin %s", folder, one);
    check(system(command) == 0, "cp");
    expect_refused(model, "is of another run than that of rank 0: 2 processes, whole");
    forge("w0_", &tiny, 5, 2, 0, 0, 5);
    snprintf(command, sizeof(command), "cp %s/w0_state_00000005_00001.bin %s", folder, one);
    check(system(command) == 0, "cp");
    expect_refused(model, "without masters");
    write_bytes(one, bytes, size);
    free(bytes);
    // another model's weights, another model's shape
    float* weights = (float*)malloc_or_die(gpt_num_parameters(&tiny) * sizeof(float));
    for (size_t i = 0; i < gpt_num_parameters(&tiny); i++) {
        weights[i] = value_of(1, i);
    }
    checkpoint_write_model(model, &tiny, weights, 5);
    free(weights);
    expect_refused(model, "do not belong together");
    Arrays arrays = some_arrays(&small);
    checkpoint_write_model(model, &small, arrays.x[0], 5);
    free_arrays(&arrays);
    expect_refused(model, "is damaged or of another model");
    // names
    expect_refused(at("gpt2_124M_bf16.bin"), "is not named like a checkpoint of llm.c");
    expect_refused(at("model_5.bin"), "is not named like");
    expect_refused(at("model_00000005.bin.gz"), "is not named like");
    expect_refused(at("mixed/model_00000006.bin"), "cannot open");
    check(mkdir(at("model_00000009.bin"), 0700) == 0, "mkdir");
    expect_refused(at("model_00000009.bin"), "not a regular file");
    forge("only_", &tiny, 3, 1, 1, 1, 5);
    check(remove(at("only_state_00000003_00000.bin")) == 0, "remove");
    expect_refused(at("only_model_00000003.bin"), "only_state_00000003_00000.bin': No such file");
    check(mkfifo(at("only_state_00000003_00000.bin"), 0600) == 0, "mkfifo"); // must not wait for a writer
    expect_refused(at("only_model_00000003.bin"), "not a regular file");
}

// ---------------------------------------------------------------------------------------------------------------------
// writing fails: a status and a line, no DONE, what was there stays

static void test_bad_targets(void) {
    Arrays arrays = some_arrays(&tiny);
    char why[WHY_BYTES];
    expect(write_arrays(at("no/such/folder"), &tiny, 1, &arrays, 1, NULL, why) == ENOENT && strstr(why, "no/such"),
           "%s", why);
    write_bytes(at("file"), "", 0);
    expect(write_arrays(at("file"), &tiny, 1, &arrays, 1, NULL, why) == ENOTDIR && strstr(why, "file/"), "%s", why);
    expect(write_arrays(at("target"), &tiny, -1, &arrays, 1, NULL, why) == EINVAL && strstr(why, "step -1"), "%s", why);
    expect(write_arrays(at("target"), &tiny, 1, &arrays, 0, NULL, why) == EINVAL && strstr(why, "0 processes"), "%s",
           why);
    expect(write_arrays(at("target"), &tiny, 1, &arrays, 2, NULL, why) == 0, "%s", why);
    check(mkdir(at("target/state_00000002_00001.bin"), 0700) == 0, "mkdir");
    expect(write_arrays(at("target"), &tiny, 2, &arrays, 2, NULL, why) == EISDIR &&
               strstr(why, "cannot move into place") && strstr(why, "state_00000002_00001.bin"),
           "%s", why);
    expect(access(at("target/state_00000002_00001.bin.tmp"), F_OK) != 0, "a temporary file stays");
    expect(access(at("target/DONE_00000002"), F_OK) != 0, "DONE although a state is missing");
    if (access("/dev/full", W_OK) != 0) {
        unit_skip("no /dev/full to play a full disk");
    } else {
        static const char* const files[] = {"target/model_00000003.bin", "target/state_00000003_00000.bin"};
        for (int i = 0; i < 2; i++) {
            char temporary[200];
            snprintf(temporary, sizeof(temporary), "%s.tmp", at(files[i]));
            check(symlink("/dev/full", temporary) == 0, "symlink");
            write_bytes(at("target/DONE_00000003"), "", 0); // of an export before, whose files are being replaced
            expect(write_arrays(at("target"), &tiny, 3, &arrays, 1, NULL, why) == ENOSPC &&
                       strstr(why, "No space left") && strstr(why, files[i]),
                   "%s", why);
            expect(access(at(files[i]), F_OK) != 0 && access(temporary, F_OK) != 0, "%s is there", files[i]);
            expect(access(at("target/DONE_00000003"), F_OK) != 0, "DONE although the disk was full");
        }
    }
    int* steps;
    expect(llmc_steps(at("target"), &steps) == 1 && steps[0] == 1, "the checkpoint before is gone");
    free(steps);
    GptConfig gpt;
    LlmcState state;
    Arrays got = read_good(at("target/model_00000001.bin"), &gpt, &state);
    free_arrays(&got);
    free_arrays(&arrays);
}

// ---------------------------------------------------------------------------------------------------------------------
// llm.c's own checkpoint of its d2 run

static void test_real_checkpoint(void) {
    const char* data = getenv("SHARED_DATA") ? getenv("SHARED_DATA") : "../shared/data";
    char path[512], state_path[512];
    snprintf(path, sizeof(path), "%s/llmc/d2_model_00000500.bin", data);
    snprintf(state_path, sizeof(state_path), "%s/llmc/d2_state_00000500_00000.bin", data);
    if (access(path, R_OK) != 0 || access(state_path, R_OK) != 0) {
        unit_skip("no llmc/d2_model_00000500.bin with its state in $SHARED_DATA or ../shared/data");
        return;
    }
    GptConfig gpt;
    LlmcState state;
    Arrays got = read_good(path, &gpt, &state);
    size_t n = gpt_num_parameters(&gpt);
    expect(gpt.num_layers == 2 && gpt.channels == 64 && n == 3385088, "another shape");
    expect(state.step == 500 && state.num_processes == 1 && state.has_master && state.should_shuffle &&
               state.num_shards == 1 && state.samples_per_shard == 1359 && state.shard_index == 0 &&
               state.sample_index == 500,
           "another state");
    // one batch of 32 * 1024 tokens per step, from a file as long as the corpus (only its length counts here)
    write_shard(at("corpus.bin"), 44562450);
    DataLoader loader;
    DataOptions o = {32, 1024, 0, 1, 50257, DATA_SHUFFLED, 42};
    dataloader_open(&loader, at("corpus.bin"), o);
    DataPosition place, want = {0, 0, 500};
    expect(llmc_data_position(&state, &loader, 500, &place) == 1, "our data order after 500 batches is not llm.c's");
    expect(memcmp(&place, &want, sizeof(want)) == 0, "another place");
    expect(llmc_data_position(&state, &loader, 499, &place) == 0, "one batch too early agrees");
    // Written again: every byte, but for the field that llm.c never sets. (The model file's weights are rounded to
    // nearest, llm.c's at random.)
    char why[WHY_BYTES];
    int status = llmc_write(at("again"), &gpt, 500, got.x[0], got.x[1], got.x[2], 1, &loader, &want,
                            state.rng_state_last_update, why);
    expect(status == 0 && why[0] == 0, "%s", why);
    size_t size, size_again;
    unsigned char *bytes = read_bytes(state_path, &size),
                  *again = read_bytes(at("again/state_00000500_00000.bin"), &size_again);
    expect(size == size_again, "%zu bytes, want %zu", size_again, size);
    size_t seed = size - 2520, differ = 0;
    for (size_t i = 0; i < size && size == size_again; i++) {
        differ += bytes[i] != again[i] && (i < seed || i >= seed + 8);
    }
    expect(differ == 0, "%zu bytes differ from llm.c's", differ);
    free(bytes);
    free(again);
    bytes = read_bytes(path, &size);
    again = read_bytes(at("again/model_00000500.bin"), &size_again);
    expect(size == size_again && memcmp(bytes, again, 1024) == 0, "another model header");
    free(bytes);
    free(again);
    // four processes and back
    status = llmc_write(at("again"), &gpt, 501, got.x[0], got.x[1], got.x[2], 4, NULL, NULL, 0, why);
    expect(status == 0, "%s", why);
    Arrays joined = read_good(at("again/model_00000501.bin"), &gpt, &state);
    for (int a = 0; a < 3; a++) {
        expect_equal(joined.x[a], got.x[a], n, "of four");
    }
    free_arrays(&joined);
    free_arrays(&got);
    dataloader_close(&loader);
}

int main(void) {
    snprintf(folder, sizeof(folder), "/tmp/test_llmc_state_XXXXXX");
    check(mkdtemp(folder) != NULL, "cannot make a temporary folder");
    write_shard(at("s_0.bin"), 1001);
    write_shard(at("s_1.bin"), 640);
    write_shard(at("s_2.bin"), 1403);
    write_shard(at("t_0.bin"), 1001);
    write_shard(at("t_1.bin"), 1403);
    write_shard(at("u_0.bin"), 1000);
    write_shard(at("u_1.bin"), 1000);
    write_shard(at("one.bin"), 17);
    unit_run(test_round_trip);
    unit_run(test_forged);
    unit_run(test_steps);
    unit_run(test_shuffle_section_is_llmcs);
    unit_run(test_data_position);
    unit_run(test_other_number_of_processes);
    unit_run(test_llmcs_own_limit);
    unit_run(test_truncated);
    unit_run(test_flipped_header);
    unit_run(test_bad_header);
    unit_run(test_bad_shuffle);
    unit_run(test_bad_values);
    unit_run(test_mixed_up);
    unit_run(test_bad_targets);
    unit_run(test_real_checkpoint);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command) != 0 || unit_report();
}
