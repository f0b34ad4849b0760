// Genuine llm.c's checkpoints (lib/llmc_state.h): the training state beside a good model file, and folders of names.
//
//     input    2 bytes: flags, number of changed values; per changed value 2 bytes place and 4 bytes bits; 34 words,
//     the
//              front of the header (the rest is 0); then what follows the arrays (the data order)
//     flags    1 the run had two processes (ZeRO-1 shares), 2 the file of rank 1 is meant, not that of rank 0
//              4 the input is the whole file of rank 0;  8 names of a folder (0x1e between them) instead
#include "fuzz.h"

#include "llmc_state.h"

enum { LLMC_FUZZ_STEP = 7, LLMC_FUZZ_BATCHES = 5, LLMC_FUZZ_WORDS = 34, LLMC_FUZZ_PARAMETERS = 5376 };

static const GptConfig llmc_shape = {1, 1, 128, 1, 1, 16};
static float llmc_arrays[3][LLMC_FUZZ_PARAMETERS]; // m, v, master
static FuzzInput llmc_files[2][2];                 // as we write them, by processes - 1 and rank

static DataLoader llmc_loader(int rank, int num_ranks) {
    DataOptions options = {1, 8, rank, num_ranks, 65536, DATA_SHUFFLED, 42};
    DataLoader loader;
    dataloader_open(&loader, fuzz_path("data_?.bin"), options);
    return loader;
}

static FuzzInput llmc_load(const char* path) {
    size_t size = (size_t)file_size_or_die(path);
    uint8_t* bytes = (uint8_t*)malloc_or_die(size);
    FILE* f = fopen_or_die(path, "rb");
    fread_or_die(bytes, size, f, path);
    fclose_or_die(f, path);
    FuzzInput whole = {bytes, size};
    return whole;
}

// Data and good checkpoints of one and of two processes; made once.
static void llmc_prepare(void) {
    if (llmc_files[0][0].bytes != NULL) { return; }
    int running = fuzz.running;
    fuzz.running = 0;
    fuzz_want(gpt_num_parameters(&llmc_shape) == LLMC_FUZZ_PARAMETERS, "another number of parameters");
    for (int i = 0; i < LLMC_FUZZ_PARAMETERS; i++) {
        llmc_arrays[0][i] = 1e-3f * (float)(i % 101 - 50);
        llmc_arrays[1][i] = 1e-6f * (float)(i % 97);
        llmc_arrays[2][i] = 1e-2f * (float)(i % 89 - 44);
    }
    for (int shard = 0; shard < 2; shard++) {
        int32_t header[256] = {TOKEN_FILE_MAGIC, 1, 100};
        uint16_t tokens[100];
        for (int i = 0; i < 100; i++) {
            tokens[i] = (uint16_t)(100 * shard + i);
        }
        const char* path = fuzz_write(shard == 0 ? "data_0.bin" : "data_1.bin", header, sizeof(header));
        FILE* f = fopen_or_die(path, "ab");
        fwrite_or_die(tokens, sizeof(tokens), f, path);
        fclose_or_die(f, path);
    }
    char why[WHY_BYTES];
    for (int processes = 1; processes <= 2; processes++) {
        DataLoader loader = llmc_loader(0, processes);
        for (int i = 0; i < LLMC_FUZZ_BATCHES; i++) {
            dataloader_next(&loader);
        }
        fuzz_want(llmc_write(fuzz.folder, &llmc_shape, LLMC_FUZZ_STEP, llmc_arrays[2], llmc_arrays[0], llmc_arrays[1],
                             processes, &loader, &loader.at, 0, why) == 0,
                  "%s", why);
        dataloader_close(&loader);
        llmc_files[processes - 1][0] = llmc_load(fuzz_path("state_00000007_00000.bin"));
        llmc_files[processes - 1][1] =
            processes == 2 ? llmc_load(fuzz_path("state_00000007_00001.bin")) : llmc_files[0][0];
    }
    fuzz.running = running;
}

// Bytes of the arrays in a file with or without masters.
static size_t llmc_arrays_bytes(int processes, int has_master) {
    return sizeof(float) * LLMC_FUZZ_PARAMETERS / (size_t)processes * (size_t)(2 + has_master);
}

static void llmc_names(FuzzInput in) {
    char folder[FUZZ_PATH];
    snprintf(folder, sizeof(folder), "%s", fuzz_path("names"));
    fuzz_remove_tree(folder);
    mkdir(folder, 0700);
    for (int i = 0; i < 16 && in.size > 0; i++) {
        FuzzInput name = fuzz_part(&in);
        char text[256] = "names/";
        size_t n = strlen(text);
        for (size_t k = 0; k < name.size && k < 200; k++) {
            text[n++] = (char)(name.bytes[k] == '/' || name.bytes[k] == 0 ? '_' : name.bytes[k]);
        }
        if (name.size > 0) { close(open(fuzz_path(text), O_WRONLY | O_CREAT, 0600)); }
    }
    int* steps;
    int count = llmc_steps(folder, &steps);
    for (int i = 0; i < count; i++) {
        char name[64];
        snprintf(name, sizeof(name), "names/DONE_%08d", steps[i]);
        fuzz_want(access(fuzz_path(name), F_OK) == 0 && (i == 0 || steps[i] > steps[i - 1]),
                  "step %d, which is not there", steps[i]);
    }
    free(steps);
}

static void llmc_state_run(const uint8_t* data, size_t size) {
    llmc_prepare();
    FuzzInput in = {data, size};
    int flags = fuzz_byte(&in), processes = 1 + (flags & 1), rank = processes == 2 && (flags & 2) != 0;
    if (flags & 8) {
        llmc_names(in);
        return;
    }
    static const char* names[2] = {"state_00000007_00000.bin", "state_00000007_00001.bin"};
    for (int r = 0; r < 2; r++) {
        fuzz_write(names[r], llmc_files[processes - 1][r].bytes, llmc_files[processes - 1][r].size);
    }
    int edits = 0, has_master = 1;
    if (flags & 4) {
        fuzz_write(names[0], in.bytes, in.size);
    } else {
        static uint8_t file[1 << 18];
        edits = fuzz_byte(&in) % 8;
        uint8_t changes[8][6];
        for (int i = 0; i < edits; i++) {
            for (int k = 0; k < 6; k++) {
                changes[i][k] = (uint8_t)fuzz_byte(&in);
            }
        }
        int32_t header[256] = {0};
        for (int i = 0; i < LLMC_FUZZ_WORDS; i++) {
            header[i] = (int32_t)fuzz_word(&in);
        }
        has_master = header[4] & 1;
        size_t arrays = llmc_arrays_bytes(processes, has_master);
        size_t rest =
            in.size < sizeof(file) - sizeof(header) - arrays ? in.size : sizeof(file) - sizeof(header) - arrays;
        memcpy(file, header, sizeof(header));
        memcpy(file + 1024, llmc_files[processes - 1][rank].bytes + 1024, arrays);
        for (int i = 0; i < edits; i++) {
            size_t place = (size_t)(changes[i][0] | changes[i][1] << 8) % (arrays / 4);
            memcpy(file + 1024 + 4 * place, changes[i] + 2, 4);
        }
        memcpy(file + 1024 + arrays, in.bytes, rest);
        fuzz_write(names[rank], file, 1024 + arrays + rest);
    }

    GptConfig shape;
    LlmcState state;
    float *master, *m, *v;
    char why[WHY_BYTES] = "";
    if (llmc_read(fuzz_path("model_00000007.bin"), &shape, &state, &master, &m, &v, why) != 0) {
        fuzz_refused(why);
        return;
    }
    fuzz.must_end = 1;
    fuzz_want(memcmp(&shape, &llmc_shape, sizeof(shape)) == 0 && state.step == LLMC_FUZZ_STEP, "step %d", state.step);
    int changed = 0;
    for (int i = 0; i < LLMC_FUZZ_PARAMETERS; i++) {
        fuzz_want(isfinite(m[i]) && isfinite(v[i]) && v[i] >= 0.0f && isfinite(master[i]),
                  "element %d: m %g, v %g, w %g", i, (double)m[i], (double)v[i], (double)master[i]);
        float weight = float_from_bf16_bits(bf16_bits_from_float(llmc_arrays[2][i])); // the model file's
        float want = has_master && state.has_master ? llmc_arrays[2][i] : weight;
        changed += m[i] != llmc_arrays[0][i] || v[i] != llmc_arrays[1][i] || master[i] != want;
        fuzz_want(fabsf(master[i] - weight) <= 0.01f * fabsf(weight), "element %d: master %g for the weight %g", i,
                  (double)master[i], (double)weight);
    }
    fuzz_want((flags & 4) != 0 || changed <= edits, "%d values differ from the file's after %d changes", changed,
              edits);
    free(master);
    free(m);
    free(v);
    // a position that is said to be llm.c's is one that our loader can go to
    for (int r = 0; r < processes; r++) {
        DataLoader loader = llmc_loader(r, processes);
        DataPosition at;
        int agrees = llmc_data_position(&state, &loader, LLMC_FUZZ_BATCHES, &at);
        fuzz_want(!agrees || (at.shard == state.shard_index && at.window == state.sample_index),
                  "window %llu of shard %llu is not that of the file", (unsigned long long)at.window,
                  (unsigned long long)at.shard);
        dataloader_seek(&loader, at);
        dataloader_close(&loader);
    }
}

static void llmc_state_seeds(void) {
    llmc_prepare();
    static uint8_t seed[1 << 14];
    for (int processes = 1; processes <= 2; processes++) {
        for (int kind = 0; kind < 2 * processes; kind++) { // with and without masters, of each rank
            int rank = kind / 2, has_master = kind % 2;
            FuzzInput file = llmc_files[processes - 1][rank];
            size_t n = 0, arrays = llmc_arrays_bytes(processes, 1);
            seed[n++] = (uint8_t)(processes - 1 + 2 * rank);
            seed[n++] = (uint8_t)kind; // so many changed values: to what they were
            for (int i = 0; i < kind; i++) {
                seed[n++] = (uint8_t)(i * 50);
                seed[n++] = 1;
                memcpy(seed + n, file.bytes + 1024 + 4 * (size_t)(256 + i * 50), 4);
                n += 4;
            }
            size_t words = n;
            memcpy(seed + n, file.bytes, 4 * LLMC_FUZZ_WORDS);
            n += 4 * LLMC_FUZZ_WORDS;
            seed[words + 16] = (uint8_t)has_master;
            memcpy(seed + n, file.bytes + 1024 + arrays, file.size - 1024 - arrays);
            n += file.size - 1024 - arrays;
            fuzz_seed(processes == 1 || has_master ? FUZZ_TAKEN : FUZZ_REFUSED, seed, n, "", 0);
        }
    }
    // a shard number one beyond the last, in the last seed of all (rank 1 of two, with masters)
    size_t arrays = llmc_arrays_bytes(2, 1), n = fuzz.seeds[fuzz.num_seeds - 1].size;
    size_t section = n - (llmc_files[1][1].size - 1024 - arrays);
    seed[section + 8] = 2;
    fuzz_seed(FUZZ_REFUSED, seed, n, "", 0);
    // a value that cannot be: of m, of v, of a master, and of a master that another weight belongs to
    static const struct {
        int place;
        uint32_t bits;
    } values[] = {{5, 0x7fc00000}, {5376 + 5, 0xb5800000}, {2 * 5376 + 5, 0xff800000}, {2 * 5376 + 5, 0x3f800000}};
    for (int i = 0; i < 4; i++) {
        FuzzInput file = llmc_files[0][0];
        size_t rest = file.size - 1024 - llmc_arrays_bytes(1, 1);
        uint8_t front[8] = {0, 1, (uint8_t)values[i].place, (uint8_t)(values[i].place >> 8)};
        memcpy(front + 4, &values[i].bits, 4);
        memcpy(seed, file.bytes, 4 * LLMC_FUZZ_WORDS);
        memcpy(seed + 4 * LLMC_FUZZ_WORDS, file.bytes + file.size - rest, rest);
        fuzz_seed(FUZZ_REFUSED, front, sizeof(front), seed, 4 * LLMC_FUZZ_WORDS + rest);
    }
    fuzz_seed(FUZZ_REFUSED, "\4", 1, llmc_files[0][0].bytes, 2000);
    const char* folder = "\10"
                         "DONE_00000007\x1e"
                         "DONE_00000007.bak\x1e"
                         "DONE_7\x1e"
                         "DONE_-0000001\x1e"
                         "DONE_999999999\x1e"
                         "DONE_9999999999\x1e"
                         "model_00000007.bin\x1e"
                         "DONE_00000003";
    fuzz_seed(FUZZ_TAKEN, folder, strlen(folder), "", 0);
}

FUZZ_TARGET(llmc_state)
