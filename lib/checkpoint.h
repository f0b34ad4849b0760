// llm.c model files, and fresh weights as llm.c draws them: where a model's parameters come from and go to.
//
//     file     256 x int32 header: 20240326, version, maxT, V, L, NH, C, Vp, zeros; then all parameters in the order of
//              the parameter table (tensors.h), version 3 as FP32, version 5 as BF16; little-endian, nothing between
//     here     one flat FP32 array (num_parameters) in that order
//
// Written to PATH.tmp, synced and renamed, so that PATH is always a whole file or absent. On reading magic, version,
// shape and exact size are checked before anything is allocated. Every function that can fail comes in two: `try`
// leaves one line in why (WHY_BYTES bytes) and returns, the other ends the process with that line.
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "check.h"

#include <math.h>
#include <unistd.h>

#include "config.h"
#include "files.h"
#include "fp8.h"
#include "rng.h"
#include "tensors.h"

enum { MODEL_FILE_MAGIC = 20240326, MODEL_FILE_FP32 = 3, MODEL_FILE_BF16 = 5, MODEL_FILE_HEADER_BYTES = 1024 };

// float -> BF16 bits, nearest even; a NaN stays one (its quiet bit is set, so that cutting cannot make it infinite).
static inline uint16_t bf16_bits_from_float(float x) {
    uint32_t bits = float_bits(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return (uint16_t)(bits >> 16 | 0x40u);
    }
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// BF16 bits -> float, exact.
static inline float float_from_bf16_bits(uint16_t bits) { return bits_float((uint32_t)bits << 16); }

// Open a regular file for reading and say how long it is. NULL, with the reason in `why`, when there is none.
static inline FILE* checkpoint_open(const char* path, int64_t* size, char* why) {
    struct stat st;
    if (stat(path, &st) != 0) {
        refuse(why, "cannot open '%s': %s", path, strerror(errno));
        return NULL;
    }
    if (!S_ISREG(st.st_mode)) { // asked first: opening a pipe would wait for its writer
        refuse(why, "'%s' is not a regular file", path);
        return NULL;
    }
    FILE* f = fopen(path, "rb");
    if (f == NULL) {
        refuse(why, "cannot open '%s' for reading: %s", path, strerror(errno));
    }
    *size = (int64_t)st.st_size;
    return f;
}

// Check header and size of the open model file `f` of `size` bytes: shape and version (3 or 5) are returned, `f` stands
// at the first parameter. 0, or 1 and the reason in `why`.
static inline int checkpoint_check_header(FILE* f, int64_t size, const char* path, GptConfig* gpt, int* version,
                                          char* why) {
    if (size < MODEL_FILE_HEADER_BYTES) {
        return refuse(why, "'%s' is no llm.c model file: %lld bytes, want a header of %d", path,
                                 (long long)size, MODEL_FILE_HEADER_BYTES);
    }
    int32_t header[256];
    if (fread(header, sizeof(header), 1, f) != 1) {
        return refuse(why, "'%s' is truncated or unreadable: no header", path);
    }
    if (header[0] != MODEL_FILE_MAGIC) {
        return refuse(why, "'%s' is no llm.c model file: first word %d, want %d", path, header[0],
                                 MODEL_FILE_MAGIC);
    }
    if (header[1] != MODEL_FILE_FP32 && header[1] != MODEL_FILE_BF16) {
        return refuse(why, "'%s' is a model file of version %d, want 5 (BF16) or 3 (FP32)", path, header[1]);
    }
    GptConfig found = {header[2], header[3], header[7], header[4], header[5], header[6]};
    if (gpt_refuse(&found, path, why, WHY_BYTES) != 0) { // also bounds the products below
        return 1;
    }
    int64_t num_parameters = (int64_t)gpt_num_parameters(&found);
    int64_t want = MODEL_FILE_HEADER_BYTES + num_parameters * (header[1] == MODEL_FILE_BF16 ? 2 : 4);
    if (size != want) {
        return refuse(why, "'%s' is damaged: %lld bytes, want %lld for the %lld parameters that its header "
                                 "announces", path, (long long)size, (long long)want, (long long)num_parameters);
    }
    *gpt = found;
    *version = header[1];
    return 0;
}

// Open the model file at `path` and check header and size: shape and version (3 or 5) are returned, the file stands at
// its first parameter. NULL, with the reason in `why`, when anything is wrong.
static inline FILE* checkpoint_open_model(const char* path, GptConfig* gpt, int* version, char* why) {
    int64_t size;
    FILE* f = checkpoint_open(path, &size, why);
    if (f != NULL && checkpoint_check_header(f, size, path, gpt, version, why) != 0) {
        fclose(f);
        f = NULL;
    }
    return f;
}

// Read the next n parameters of a model file, widened to FP32. 0, or 1 when the file ends or cannot be read.
static inline int checkpoint_read_parameters(FILE* f, int version, float* out, size_t n) {
    if (version == MODEL_FILE_FP32) {
        return fread(out, sizeof(float), n, f) != n;
    }
    // The bytes are read into the upper half of `out` and widened from its front. Value i is read at 2n + 2i and
    // written to 4i..4i+3, never over what is still to be read: 4i + 4 <= 2n + 2(i + 1) for every i < n.
    unsigned char* half = (unsigned char*)out + 2 * n;
    if (fread(half, 2, n, f) != n) {
        return 1;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t bits;
        memcpy(&bits, half + 2 * i, sizeof(bits));
        out[i] = float_from_bf16_bits(bits);
    }
    return 0;
}

// Read the model file at `path`: its shape into *gpt and its parameters, widened to FP32, into *params (num_parameters,
// allocated here, freed by the caller). 0, or 1 with the reason in `why` (WHY_BYTES); nothing is allocated then.
static inline int checkpoint_try_read_model(const char* path, GptConfig* gpt, float** params, char* why) {
    int version = 0;
    FILE* f = checkpoint_open_model(path, gpt, &version, why);
    if (f == NULL) {
        return 1;
    }
    size_t n = gpt_num_parameters(gpt);
    float* out = (float*)malloc(n * sizeof(float));
    int failed = 0;
    if (out == NULL) {
        failed = refuse(why, "out of host memory: '%s' wants %zu bytes", path, n * sizeof(float));
    } else if (checkpoint_read_parameters(f, version, out, n) != 0) {
        failed = refuse(why, "'%s' is truncated or unreadable: wanted %zu parameters", path, n);
    }
    fclose(f);
    if (failed) {
        free(out);
        return 1;
    }
    *params = out;
    return 0;
}

// Read and check the header of the model file at `path` and its size. Returns the version (3 or 5).
static inline int checkpoint_read_config(GptConfig* gpt, const char* path) {
    char why[WHY_BYTES];
    int version = 0;
    FILE* f = checkpoint_open_model(path, gpt, &version, why);
    check(f != NULL, "%s", why);
    fclose(f);
    return version;
}

// checkpoint_try_read_model, or one error line and the end.
static inline void checkpoint_read_model(const char* path, GptConfig* gpt, float** params) {
    char why[WHY_BYTES];
    check(checkpoint_try_read_model(path, gpt, params, why) == 0, "%s", why);
}

// Begin the file that will be `path`: PATH.tmp, open for writing, its name in *temporary (freed by checkpoint_finish).
// NULL on failure: *error is the errno, the reason is in `why`.
static inline FILE* checkpoint_begin(const char* path, char** temporary, int* error, char* why) {
    size_t length = strlen(path);
    char* name = (char*)malloc_or_die(length + 5);
    memcpy(name, path, length);
    memcpy(name + length, ".tmp", 5);
    FILE* f = fopen(name, "wb");
    if (f == NULL) {
        *error = errno_or_eio();
        refuse(why, "cannot open '%s' for writing: %s", name, strerror(*error));
        free(name);
        return NULL;
    }
    *temporary = name;
    return f;
}

// End what checkpoint_begin began. `error` is that of writing, 0 if all went well: then the file is flushed, synced,
// closed and renamed to `path`. Returns the errno of what failed, with the reason in `why`, and leaves no file behind.
static inline int checkpoint_finish(FILE* f, char* temporary, const char* path, int error, char* why) {
    errno = 0;
    if (error == 0 && (fflush(f) != 0 || fsync(fileno(f)) != 0)) {
        error = errno_or_eio();
    }
    if (fclose(f) != 0 && error == 0) {
        error = errno_or_eio();
    }
    const char* what = "write";
    if (error == 0 && rename(temporary, path) != 0) {
        error = errno_or_eio();
        what = "move into place";
    }
    if (error != 0) {
        remove(temporary);
        refuse(why, "cannot %s '%s': %s", what, temporary, strerror(error));
    }
    free(temporary);
    return error;
}

// The first 1024 bytes of a model file.
typedef struct {
    int32_t word[256];
} ModelFileHeader;

static inline ModelFileHeader checkpoint_header(const GptConfig* gpt, int version) {
    ModelFileHeader header = {{MODEL_FILE_MAGIC, version,        gpt->max_seq_len, gpt->vocab_size,
                               gpt->num_layers,  gpt->num_heads, gpt->channels,    gpt->padded_vocab_size}};
    return header;
}

// Write header and parameters to the open `f`. Returns 0, or the errno of what failed.
static inline int checkpoint_write_payload(FILE* f, const GptConfig* gpt, const float* params, int version) {
    ModelFileHeader header = checkpoint_header(gpt, version);
    errno = 0;
    if (fwrite(&header, sizeof(header), 1, f) != 1) {
        return errno_or_eio();
    }
    uint16_t buffer[1 << 15];
    const size_t chunk = sizeof(buffer) / sizeof(buffer[0]);
    size_t n = gpt_num_parameters(gpt);
    for (size_t done = 0; done < n; done += chunk) {
        size_t count = n - done < chunk ? n - done : chunk;
        size_t put;
        if (version == MODEL_FILE_BF16) {
            for (size_t i = 0; i < count; i++) {
                buffer[i] = bf16_bits_from_float(params[done + i]);
            }
            put = fwrite(buffer, sizeof(uint16_t), count, f);
        } else {
            put = fwrite(params + done, sizeof(float), count, f);
        }
        if (put != count) {
            return errno_or_eio();
        }
    }
    return 0;
}

// End with one error line unless checkpoint_write_model could write to `path`: to be asked before a long training run,
// not after it. Leaves nothing behind.
static inline void checkpoint_check_writable(const char* path) {
    struct stat st;
    check(stat(path, &st) != 0 || S_ISREG(st.st_mode), "cannot write '%s': it exists and is no regular file", path);
    size_t size = strlen(path) + 5;
    char* temporary = (char*)malloc_or_die(size);
    snprintf(temporary, size, "%s.tmp", path);
    fclose_or_die(fopen_or_die(temporary, "wb"), temporary);
    remove(temporary);
    free(temporary);
}

// Write params (num_parameters) FP32 as an llm.c model file: version MODEL_FILE_BF16 rounds to nearest even,
// MODEL_FILE_FP32 keeps the bits. `path` appears only when the whole file is on disk. 0, or the errno of what failed
// and the reason in `why` (WHY_BYTES).
static inline int checkpoint_try_write_model(const char* path, const GptConfig* gpt, const float* params, int version,
                                             char* why) {
    check(version == MODEL_FILE_BF16 || version == MODEL_FILE_FP32, "checkpoint_write_model: version %d, want 3 or 5",
          version);
    if (gpt_refuse(gpt, path, why, WHY_BYTES) != 0) {
        return EINVAL;
    }
    int error;
    char* temporary;
    FILE* f = checkpoint_begin(path, &temporary, &error, why);
    if (f == NULL) {
        return error;
    }
    return checkpoint_finish(f, temporary, path, checkpoint_write_payload(f, gpt, params, version), why);
}

// checkpoint_try_write_model, or one error line and the end.
static inline void checkpoint_write_model(const char* path, const GptConfig* gpt, const float* params, int version) {
    char why[WHY_BYTES];
    check(checkpoint_try_write_model(path, gpt, params, version, why) == 0, "%s", why);
}

// Fill params (num_parameters) with llm.c's initial weights (gpt_build_from_descriptor; seed 42 there): MT19937 draws
// the normals block by block in the order in which PyTorch would build the model: wte (V rows; the padding is zero),
// wpe, then qkvw, attprojw, fcw and fcprojw of block 0, of block 1, ... LayerNorm weights 1, everything else 0.
// The two projections into the residual stream have deviation 0.02 / sqrt(2L) (GPT-2 paper, section 2.3). llm.c's BF16
// build rounds these values to BF16, and its masters start from the rounded ones.
static inline void checkpoint_init_model(float* params, const GptConfig* gpt, uint32_t seed) {
    ParameterTable table = parameter_table(*gpt);
    memset(params, 0, table.num_parameters * sizeof(float));
    float residual_scale = 1.0f / sqrtf(2.0f * (float)gpt->num_layers);
    Mt19937 mt;
    mt_seed(&mt, seed);
    for (int l = 0; l < gpt->num_layers; l++) {
        for (int t = 0; t < NUM_TENSORS; t++) {
            const TensorSpec* spec = &table.tensor[t];
            if (l >= spec->layers) {
                continue; // wte, wpe and the last LayerNorm exist once
            }
            float* x = params + spec->offset + (size_t)l * spec->n;
            if (spec->init == INIT_ONE) {
                for (size_t i = 0; i < spec->n; i++) {
                    x[i] = 1.0f;
                }
            } else if (spec->init != INIT_ZERO) {
                size_t rows = t == TENSOR_WTE ? (size_t)gpt->vocab_size : spec->rows;
                float deviation = spec->init == INIT_NORMAL_RESIDUAL ? 0.02f * residual_scale : 0.02f;
                mt_normal(&mt, x, rows * spec->cols, 0.0f, deviation);
            }
        }
    }
}

#endif
