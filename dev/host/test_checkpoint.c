// llm.c model files: round trips, real files of llm.c, fresh weights, and every way in which a file can be wrong.
#include "checkpoint.h"

#include "unit.h"

static char folder[64]; // temporary, removed at the end

static const char* at(const char* name) {
    static char path[8][160];
    static int turn;
    snprintf(path[turn = (turn + 1) % 8], 160, "%s/%s", folder, name);
    return path[turn];
}

static const GptConfig small = {3, 200, 256, 2, 2, 32}; // maxT 3, V 200, Vp 256, L 2, NH 2, C 32

static void test_bf16_conversion(void) {
    static const struct {
        uint32_t x;
        uint16_t want;
    } cases[] = {
        {0x00000000, 0x0000}, {0x80000000, 0x8000}, {0x3F800000, 0x3F80}, // 0, -0, 1
        {0x3F808000, 0x3F80},                                             // tie to even, down
        {0x3F818000, 0x3F82},                                             // tie to even, up
        {0x3F808001, 0x3F81}, {0x3F807FFF, 0x3F80},                       // next to a tie
        {0x7F7F8000, 0x7F80},                                             // largest floats round to infinity
        {0x7F7F7FFF, 0x7F7F}, {0x7F800000, 0x7F80}, {0xFF800000, 0xFF80}, // largest BF16, infinities
        {0x7F800001, 0x7FC0}, {0xFF800001, 0xFFC0}, {0x7FFFFFFF, 0x7FFF}, // NaNs stay NaNs
        {0x00008000, 0x0000}, {0x00018000, 0x0002}, {0x00000001, 0x0000}, // subnormals
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint16_t got = bf16_bits_from_float(bits_float(cases[i].x));
        expect(got == cases[i].want, "bf16(%08x) = %04x, want %04x", cases[i].x, got, cases[i].want);
    }
    for (uint32_t b = 0; b < 65536; b++) { // widening and rounding back is the identity (NaNs become quiet)
        uint16_t got = bf16_bits_from_float(float_from_bf16_bits((uint16_t)b));
        uint16_t want = (uint16_t)((b & 0x7FFF) > 0x7F80 ? b | 0x40 : b);
        expect(got == want, "code %04x comes back as %04x", b, got);
    }
}

static float* some_params(const GptConfig* gpt) {
    size_t n = gpt_num_parameters(gpt);
    float* params = (float*)malloc_or_die(n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        params[i] = rng_normal(5, 0, i);
    }
    return params;
}

static void test_round_trip(void) {
    float* params = some_params(&small);
    size_t n = gpt_num_parameters(&small);
    for (int version = 3; version <= 5; version += 2) {
        const char* path = at(version == 3 ? "m3.bin" : "m5.bin");
        checkpoint_write_model(path, &small, params, version);
        expect(file_size_or_die(path) == 1024 + (int64_t)n * (version == 3 ? 4 : 2), "version %d: wrong size", version);
        expect(access(at("m3.bin.tmp"), F_OK) != 0, "the temporary file is still there");
        GptConfig gpt;
        memset(&gpt, 0, sizeof(gpt));
        expect(checkpoint_read_config(&gpt, path) == version, "version");
        expect(memcmp(&gpt, &small, sizeof(gpt)) == 0, "version %d: another shape came back", version);
        float* back = NULL;
        checkpoint_read_model(path, &gpt, &back);
        for (size_t i = 0; i < n; i++) {
            float want = version == 3 ? params[i] : float_from_bf16_bits(bf16_bits_from_float(params[i]));
            expect(back[i] == want, "version %d: parameter %zu = %g, want %g", version, i, (double)back[i],
                   (double)want);
        }
        // written again, BF16 values give the same bytes
        checkpoint_write_model(at("again.bin"), &gpt, back, version);
        char command[512];
        snprintf(command, sizeof(command), "cmp -s %s %s", path, at("again.bin"));
        expect(system(command) == 0, "version %d: writing what was read gives another file", version);
        free(back);
    }
    free(params);
}

static void test_parameter_count(void) {
    static const struct {
        const char* name;
        size_t want;
    } cases[] = {{"d2", 3385088}, {"d4", 7363328}, {"d6", 30357504}, {"d12", 124475904}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        GptConfig gpt;
        gpt_from_descriptor(&gpt, cases[i].name);
        expect(gpt_num_parameters(&gpt) == cases[i].want, "%s: %zu parameters, want %zu", cases[i].name,
               gpt_num_parameters(&gpt), cases[i].want);
        expect(parameter_table(gpt).num_parameters == cases[i].want, "%s: the parameter table disagrees",
               cases[i].name);
    }
}

// The order of the draws is llm.c's: checked bit for bit against its own loop when this was written (d2, d6, commit
// f1e2ace); the values below are from that run. Other C libraries may round logf, cosf, sinf otherwise, hence 1e-7.
static void test_init(void) {
    GptConfig gpt;
    gpt_from_descriptor(&gpt, "d2");
    ParameterTable table = parameter_table(gpt);
    float* params = (float*)malloc_or_die(table.num_parameters * sizeof(float));
    checkpoint_init_model(params, &gpt, 42);
    static const struct {
        TensorName tensor;
        size_t index;
        double want;
    } values[] = {
        {TENSOR_WTE, 0, 0.0385382995},
        {TENSOR_WTE, 3216447, -0.0116667971},
        {TENSOR_WPE, 0, -0.0140077723},
        {TENSOR_QKVW, 0, 0.0380095914},
        {TENSOR_PROJW, 1, 0.00785291847},
        {TENSOR_FCW, 12345, -0.00135263812},
        {TENSOR_FCPROJW, 0, 0.00507872878},
        {TENSOR_QKVW, 12288, 0.0244055521},
        {TENSOR_FCPROJW, 32767, 0.0209307373},
    };
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        double got = (double)params[table.tensor[values[i].tensor].offset + values[i].index];
        expect(fabs(got - values[i].want) < 1e-7, "%s[%zu] = %.9g, want %.9g", table.tensor[values[i].tensor].name,
               values[i].index, got, values[i].want);
    }
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &table.tensor[t];
        size_t n = spec->n * (size_t)spec->layers, drawn = t == TENSOR_WTE ? 50257u * 64 : n;
        double squares = 0;
        for (size_t i = 0; i < drawn; i++) {
            squares += (double)params[spec->offset + i] * (double)params[spec->offset + i];
        }
        double want = spec->init == INIT_ONE ? 1 : spec->init == INIT_ZERO ? 0
                    : spec->init == INIT_NORMAL ? 0.02 : 0.02 / sqrt(4.0);
        double rms = sqrt(squares / (double)drawn); // of n normals: within 5 / sqrt(2n) of the deviation
        expect(fabs(rms - want) <= want * 5 / sqrt(2.0 * (double)drawn), "%s: rms %g, want %g", spec->name, rms, want);
        for (size_t i = drawn; i < n; i++) {
            expect(params[spec->offset + i] == 0.0f, "padding row of wte is not zero");
        }
    }
    free(params);
}

// ---------------------------------------------------------------------------------------------------------------------
// hostile files

static void read_model(void* path) {
    GptConfig gpt;
    float* params;
    checkpoint_read_model((const char*)path, &gpt, &params);
}

static void write_bytes(const char* path, const void* bytes, size_t n) {
    FILE* f = fopen_or_die(path, "wb");
    fwrite_or_die(bytes, n, f, path);
    fclose_or_die(f, path);
}

// A whole version 5 file of the small model in memory, one byte longer than it should be.
static unsigned char* small_file(size_t* size) {
    float* params = some_params(&small);
    checkpoint_write_model(at("whole.bin"), &small, params, 5);
    free(params);
    *size = (size_t)file_size_or_die(at("whole.bin"));
    unsigned char* bytes = (unsigned char*)calloc_or_die(*size + 1, 1);
    FILE* f = fopen_or_die(at("whole.bin"), "rb");
    fread_or_die(bytes, *size, f, "whole.bin");
    fclose_or_die(f, "whole.bin");
    return bytes;
}

static void test_truncated(void) {
    size_t size;
    unsigned char* bytes = small_file(&size);
    for (size_t n = 0; n <= size + 1; n++) {
        int near_an_edge = n < 40 || (n > 1000 && n < 1030) || n + 8 > size;
        if (n == size || (!near_an_edge && n % 509 != 0)) {
            continue;
        }
        write_bytes(at("cut.bin"), bytes, n);
        expect_dies(read_model, (void*)(uintptr_t)at("cut.bin"), n < 1024 ? "no llm.c model file" : "is damaged");
    }
    free(bytes);
    expect_dies(read_model, (void*)(uintptr_t)at("absent.bin"), "cannot open");
    expect_dies(read_model, folder, "not a regular file");
}

static void test_bad_header(void) {
    size_t size;
    unsigned char* bytes = small_file(&size);
    static const struct {
        int word, value;
        const char* error;
    } cases[] = {
        {0, 20240520, "no llm.c model file: first word 20240520, want 20240326"},
        {0, 0, "no llm.c model file"},
        {1, 4, "version 4, want 5 (BF16) or 3 (FP32)"},
        {1, 0, "version 0"},
        {1, 3, "is damaged"}, // half as long as FP32 would be
        {2, 0, "max_seq_len 0"},
        {2, -1, "max_seq_len -1"},
        {2, 4, "is damaged"},
        {2, INT_MAX, "max_seq_len 2147483647"},
        {3, 0, "vocabulary of 0"},
        {3, -5, "vocabulary of -5"},
        {3, 257, "padded vocabulary of 256, want 384"},
        {3, INT_MAX, "vocabulary of 2147483647"},
        {4, 0, "0 layers"},
        {4, INT_MIN, "-2147483648 layers"},
        {4, 3, "is damaged"},
        {4, 1024, "is damaged"},
        {5, 0, "do not divide into 0 heads"},
        {5, -1, "do not divide into -1 heads"}, // 32 % -1 == 0, but there is no head
        {5, 3, "32 channels do not divide into 3 heads"},
        {5, 8, "head size 4"},
        {6, 0, "0 channels"},
        {6, -32, "-32 channels"},
        {6, 40, "40 channels, want a multiple of 16"},
        {6, 64, "is damaged"},
        {6, 65536, "head size 32768"},
        {7, 200, "padded vocabulary of 200, want 256"},
        {7, 0, "padded vocabulary of 0"},
        {7, INT_MAX, "padded vocabulary of 2147483647"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        unsigned char* copy = (unsigned char*)malloc_or_die(size);
        memcpy(copy, bytes, size);
        memcpy(copy + 4 * cases[i].word, &cases[i].value, 4);
        write_bytes(at("bad.bin"), copy, size);
        expect_dies(read_model, (void*)(uintptr_t)at("bad.bin"), cases[i].error);
        free(copy);
    }
    // every single bit of the words that fix the size: refused, or a shape that has this very size
    for (int word = 0; word < 8; word++) {
        for (int bit = 0; bit < 32; bit++) {
            int must_die = word != 3 && word != 5; // another V of the same Vp, another NH: valid shapes, same size
            if (must_die) {
                bytes[4 * word + bit / 8] ^= (unsigned char)(1 << bit % 8);
                write_bytes(at("bad.bin"), bytes, size);
                expect_dies(read_model, (void*)(uintptr_t)at("bad.bin"), "bad.bin");
                bytes[4 * word + bit / 8] ^= (unsigned char)(1 << bit % 8);
            }
        }
    }
    free(bytes);
}

static void write_to(void* path) {
    float* params = some_params(&small);
    checkpoint_write_model((const char*)path, &small, params, 5);
}

static void write_version_4(void* path) {
    float* params = some_params(&small);
    checkpoint_write_model((const char*)path, &small, params, 4);
}

static void ask_for(void* path) { checkpoint_check_writable((const char*)path); }

static void test_bad_targets(void) {
    checkpoint_check_writable(at("fine.bin"));
    expect(access(at("fine.bin"), F_OK) != 0 && access(at("fine.bin.tmp"), F_OK) != 0, "asking leaves a file behind");
    expect_dies(ask_for, (void*)(uintptr_t)at("no/such/folder/m.bin"), "cannot open");
    expect_dies(ask_for, folder, "it exists and is no regular file");
    expect_dies(write_to, (void*)(uintptr_t)at("no/such/folder/m.bin"), "cannot open");
    expect_dies(write_version_4, (void*)(uintptr_t)at("m4.bin"), "version 4, want 3 or 5");
    check(mkdir(at("taken"), 0700) == 0, "mkdir");
    expect_dies(write_to, (void*)(uintptr_t)at("taken"), "cannot move into place");
    expect(access(at("taken.tmp"), F_OK) != 0, "a temporary file stays behind when the name is taken by a folder");
    if (access("/dev/full", W_OK) != 0) {
        unit_skip("no /dev/full to play a full disk");
        return;
    }
    check(symlink("/dev/full", at("full.bin.tmp")) == 0, "symlink");
    expect_dies(write_to, (void*)(uintptr_t)at("full.bin"), "No space left");
    expect(access(at("full.bin"), F_OK) != 0, "a file that could not be written must not appear");
}

// llm.c's own files: shape, and the padding rows of wte, which are exactly zero.
static void test_real_files(void) {
    const char* data = getenv("SHARED_DATA") ? getenv("SHARED_DATA") : "../shared/data";
    static const struct {
        const char* name;
        int num_layers, channels;
    } files[] = {{"llmc/d2_model_00000500.bin", 2, 64}, {"llmc/d4_model_00001000.bin", 4, 128}};
    for (int i = 0; i < 2; i++) {
        char path[512];
        snprintf(path, sizeof(path), "%s/%s", data, files[i].name);
        if (access(path, R_OK) != 0) {
            unit_skip("no llmc/d2_model_00000500.bin in $SHARED_DATA or ../shared/data");
            return;
        }
        GptConfig gpt;
        float* params;
        checkpoint_read_model(path, &gpt, &params);
        expect(gpt.num_layers == files[i].num_layers && gpt.channels == files[i].channels && gpt.vocab_size == 50257 &&
               gpt.max_seq_len == 1024, "%s: wrong shape", path);
        ParameterTable table = parameter_table(gpt);
        size_t C = (size_t)gpt.channels;
        for (size_t k = 50257 * C; k < 50304 * C; k++) {
            expect(params[k] == 0.0f, "padding row of wte: element %zu = %g", k, (double)params[k]);
        }
        for (int t = 0; t < NUM_TENSORS; t++) { // a wrong offset would put biases where LayerNorm weights are
            const TensorSpec* spec = &table.tensor[t];
            double sum = 0;
            for (size_t k = 0; k < spec->n; k++) {
                sum += (double)params[spec->offset + k];
            }
            double mean = sum / (double)spec->n;
            expect(spec->init == INIT_ONE ? mean > 0.5 && mean < 3 : fabs(mean) < 0.3, "%s: mean %g", spec->name, mean);
        }
        checkpoint_write_model(at("copy.bin"), &gpt, params, MODEL_FILE_BF16);
        char command[1024];
        snprintf(command, sizeof(command), "cmp -s %s %s", path, at("copy.bin"));
        expect(system(command) == 0, "%s: reading and writing changes the bytes", path);
        free(params);
    }
}

int main(void) {
    snprintf(folder, sizeof(folder), "/tmp/test_checkpoint_XXXXXX");
    check(mkdtemp(folder) != NULL, "cannot make a temporary folder");
    unit_run(test_bf16_conversion);
    unit_run(test_round_trip);
    unit_run(test_parameter_count);
    unit_run(test_init);
    unit_run(test_truncated);
    unit_run(test_bad_header);
    unit_run(test_bad_targets);
    unit_run(test_real_files);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command) != 0 || unit_report();
}
