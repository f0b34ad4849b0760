// llm.c model files (lib/checkpoint.h).
//
//     input    1 byte of flags, then the file
//     flags    1 the file is cut or filled up with zeros to the size that its header announces, up to 4 MB
#include "fuzz.h"

#include "checkpoint.h"

static void model_file_run(const uint8_t* data, size_t size) {
    FuzzInput in = {data, size};
    int flags = fuzz_byte(&in);
    const char* path = fuzz_write("model.bin", in.bytes, in.size);
    int32_t header[8];
    if ((flags & 1) != 0 && in.size >= sizeof(header)) {
        memcpy(header, in.bytes, sizeof(header));
        double T = header[2], L = header[4], C = header[6], Vp = header[7];
        double bytes = 1024 + (Vp * C + T * C + L * (12 * C * C + 13 * C) + 2 * C) * (header[1] == 5 ? 2 : 4);
        if (bytes >= 1024 && bytes <= 4 << 20) {
            fuzz_want(truncate(path, (off_t)bytes) == 0, "cannot set the size of '%s'", path);
        }
    }
    GptConfig shape, shape_only;
    float* params;
    char why[WHY_BYTES] = "";
    if (checkpoint_try_read_model(path, &shape, &params, why) != 0) {
        fuzz_refused(why);
        return;
    }
    fuzz.must_end = 1;
    int version = checkpoint_read_config(&shape_only, path);
    fuzz_want(memcmp(&shape, &shape_only, sizeof(shape)) == 0, "two readers, two shapes");
    int32_t words[6] = {shape.max_seq_len, shape.vocab_size, shape.num_layers,
                        shape.num_heads,   shape.channels,   shape.padded_vocab_size};
    fuzz_want(memcmp(words, in.bytes + 8, sizeof(words)) == 0, "another shape than the header's");
    // every parameter is the file's
    size_t n = gpt_num_parameters(&shape), width = version == MODEL_FILE_BF16 ? 2 : 4;
    for (size_t i = 0; i < n; i++) {
        uint32_t want = 0, got;
        size_t at = 1024 + i * width;
        if (at + width <= in.size) { // else it was filled up with zeros
            memcpy((char*)&want + 4 - width, in.bytes + at, width);
        } else if (at < in.size) {
            memcpy((char*)&want + 4 - width, in.bytes + at, in.size - at);
        }
        memcpy(&got, params + i, 4);
        fuzz_want(got == want, "parameter %zu has bits %08x, want %08x", i, got, want);
    }
    free(params);
}

static void model_file_seeds(void) {
    static const GptConfig shapes[] = {{1, 1, 128, 1, 1, 16}, {3, 130, 256, 2, 2, 16}};
    for (int i = 0; i < 2; i++) {
        float* params = (float*)malloc_or_die(gpt_num_parameters(&shapes[i]) * sizeof(float));
        checkpoint_init_model(params, &shapes[i], 42);
        for (int version = MODEL_FILE_FP32; version <= MODEL_FILE_BF16; version += 2) {
            const char* path = fuzz_path("seed.bin");
            checkpoint_write_model(path, &shapes[i], params, version);
            fuzz_seed_file(FUZZ_TAKEN, "\0", 1, path);
            static uint8_t header[1024]; // the header alone, to be filled up: cheap to change
            FILE* f = fopen_or_die(path, "rb");
            fread_or_die(header, sizeof(header), f, path);
            fclose_or_die(f, path);
            fuzz_seed(FUZZ_TAKEN, "\1", 1, header, sizeof(header));
        }
        free(params);
    }
}

FUZZ_TARGET(model_file)
