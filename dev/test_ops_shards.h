// Tests of what several ranks send each other: slices of gradients, parameters and weights. Everything but the error of
// a sum is exact. What is expected is computed here from the definitions at the top of shards.h, piece by piece and
// rank by rank, not with its functions.
#ifndef TEST_OPS_SHARDS_H
#define TEST_OPS_SHARDS_H

#include "test_ops_tools.h"

namespace ops {

// A model of which buckets are made: pieces from 16 elements, fewer than a block, to many blocks.
typedef struct {
    int maxT, Vp, L, C;
    int big; // only in thorough tests
} ShardCase;

static const ShardCase shard_cases[] = {
    {17, 384, 2, 48, 0}, {5, 128, 1, 16, 0}, {64, 128, 2, 112, 0}, {1024, 1024, 2, 768, 1}};
enum { NUM_SHARD_CASES = sizeof(shard_cases) / sizeof(shard_cases[0]) };
static const int shard_ranks[] = {1, 2, 3, 4, 7, 8};
enum { NUM_SHARD_RANKS = sizeof(shard_ranks) / sizeof(shard_ranks[0]) };

typedef void (*BucketTest)(Arena* arena, const char* what, const Bucket* bucket, size_t num_parameters, int num_ranks);

// test(...) for the first and the last bucket of every case and number of ranks; the big case on 4, where a test checks
// every byte on the host for seconds.
static void for_each_bucket(BucketTest test) {
    for (int i = 0; i < NUM_SHARD_CASES; i++) {
        ShardCase c = shard_cases[i];
        if (c.big && !op_floors.thorough) { continue; }
        GptConfig config;
        memset(&config, 0, sizeof(config));
        config.max_seq_len = c.maxT, config.padded_vocab_size = c.Vp, config.num_layers = c.L, config.channels = c.C;
        ParameterTable table = parameter_table(config);
        for (int k = 0; k < NUM_SHARD_RANKS; k++) {
            if (c.big && shard_ranks[k] != 4) { continue; }
            Shards shards = shards_create(&table, shard_ranks[k]);
            for (int b = 0; b < shards.num_buckets; b += shards.num_buckets - 1) {
                Arena arena = {};
                char what[96];
                snprintf(what, sizeof(what), "C %d, bucket %d, %d ranks", c.C, b, shard_ranks[k]);
                test(&arena, what, &shards.bucket[b], table.num_parameters, shard_ranks[k]);
                arena_free(&arena);
            }
            shards_free(&shards);
        }
    }
}

// Place of element i of rank's slice of a piece in the flat arrays; -1: there is no such element.
static long long slice_place(const Piece* piece, int rank, size_t i) {
    size_t at = (size_t)rank * piece->slice + i;
    return at < piece->n ? (long long)(piece->offset + at) : -1;
}

// Gradients of one step: every 37 elements another magnitude; zeros, NaN, infinities, numbers near the ends of FP32.
static float* assorted_grads(Arena* arena, size_t n, const Bucket* bucket) {
    float* grads = random_floats(arena, n, 0, 1e-3, 31);
    for (size_t i = 0; i < n; i++) {
        grads[i] *= ldexpf(1.0f, (int)(i / 37 % 19) - 9);
    }
    const Piece* weight = &bucket->piece[0];
    for (int p = 1; p < bucket->num_pieces; p++) { // the largest piece gets what is special
        if (bucket->piece[p].n > weight->n) { weight = &bucket->piece[p]; }
    }
    float* x = grads + weight->offset;
    size_t blocks = weight->n / GRAD_BLOCK;
    for (size_t b = 0; b < blocks; b++) {
        for (size_t i = b * GRAD_BLOCK; i < (b + 1) * GRAD_BLOCK; i++) {
            if (b % 11 == 1) { x[i] = i % 2 ? -0.0f : 0.0f; }
            if (b % 11 == 3) { x[i] *= 1e-36f; } // subnormal, some of them 0
            if (b % 11 == 5) { x[i] *= 1e36f; }
        }
        if (b % 11 == 6) { x[b * GRAD_BLOCK + 200] = NAN; }
        if (b % 11 == 7) { x[b * GRAD_BLOCK + 255] = -INFINITY; }
        if (b % 11 == 8) { x[b * GRAD_BLOCK] = INFINITY; }
        if (b % 11 == 9) { x[b * GRAD_BLOCK + 100] = 3.4e38f; }
        if (b % 11 == 10) { x[b * GRAD_BLOCK + 127] = 1e-45f; }
    }
    grads[weight->offset + weight->n - 1] = blocks % 2 ? NAN : 1.0f; // the last, maybe of a short block
    return grads;
}

// The bytes that the contract wants of one block: codes of x (GRAD_BLOCK), and the descale.
static float expected_block(uint8_t* codes, const float* x) {
    float amax = 0.0f;
    int finite = 1;
    for (int i = 0; i < GRAD_BLOCK; i++) {
        finite = finite && isfinite(x[i]);
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    }
    memset(codes, 0, GRAD_BLOCK);
    if (!finite) { return bits_float(0x7FC00000u); }
    if (amax == 0.0f) { return 0.0f; }
    int tiny = 448.0f / amax > 0x1p126f;
    for (int i = 0; i < GRAD_BLOCK; i++) {
        codes[i] = e4m3_from_float(x[i] * (tiny ? 0x1p126f : 448.0f / amax));
    }
    return tiny ? 0x1p-126f : amax / 448.0f;
}

// Both floors' `name` against want, byte for byte.
static void expect_bytes(const char* what, const OpOutcome* outcome, const char* name, const void* want, size_t bytes) {
    const OpCall* calls[2] = {&outcome->reference, &outcome->subject};
    for (int k = 0; k < 2; k++) {
        const uint8_t* got = (const uint8_t*)arg_find(calls[k], name)->host;
        for (size_t i = 0; i < bytes; i++) {
            expect(got[i] == ((const uint8_t*)want)[i], "%s: byte %zu of %zu of %s, floor %d, is %02x, want %02x", what,
                   i, bytes, name, k, got[i], ((const uint8_t*)want)[i]);
        }
    }
}

// Both floors' floats `name` against want, bit for bit (any NaN is NaN).
static void expect_floats(const char* what, const OpOutcome* outcome, const char* name, const float* want, size_t n) {
    const OpCall* calls[2] = {&outcome->reference, &outcome->subject};
    for (int k = 0; k < 2; k++) {
        const float* got = arg_floats(calls[k], name);
        for (size_t i = 0; i < n; i++) {
            expect(same_float(got[i], want[i]), "%s: %s[%zu], floor %d, is %a, want %a", what, name, i, k,
                   (double)got[i], (double)want[i]);
        }
    }
}

// To the ranks that are tested: some of many.
static int rank_step(int num_ranks) {
    return num_ranks > 2 ? num_ranks / 2 : 1;
}

static void* poisoned(Arena* arena, size_t bytes) {
    void* p = arena_bytes(arena, bytes);
    memset(p, 0xFF, bytes);
    return p;
}

static OpCall exchange_call(OpName op, const Bucket* bucket, int num_ranks, int rank) {
    OpCall call = op_call(op);
    call.bucket = bucket, call.num_ranks = num_ranks, call.rank = rank;
    return call;
}

static void grad_quantize_case(Arena* arena, const char* what, const Bucket* bucket, size_t n, int num_ranks) {
    float* grads = assorted_grads(arena, n, bucket);
    size_t E = bucket->chunk, wire = (E + E / 64 + 127) / 128 * 128, bytes = wire * (size_t)num_ranks;
    expect(wire == grad_wire_bytes(E), "%s: a chunk has %zu bytes, want %zu", what, grad_wire_bytes(E), wire);
    uint8_t* want = arena_codes(arena, bytes); // zeros
    for (int rank = 0; rank < num_ranks; rank++) {
        uint8_t* chunk = want + (size_t)rank * wire;
        for (int p = 0; p < bucket->num_pieces; p++) {
            const Piece* piece = &bucket->piece[p];
            for (size_t start = 0; start < piece->slice; start += GRAD_BLOCK) {
                float x[GRAD_BLOCK];
                for (int i = 0; i < GRAD_BLOCK; i++) {
                    long long place = slice_place(piece, rank, start + (size_t)i);
                    x[i] = place >= 0 ? grads[place] : 0.0f;
                }
                float descale = expected_block(chunk + piece->at + start, x);
                memcpy(chunk + E + (piece->at + start) / GRAD_BLOCK * 4, &descale, 4);
            }
        }
    }
    OpCall call = exchange_call(OP_GRAD_QUANTIZE, bucket, num_ranks, 0);
    arg_add(&call, "send", ARG_CODES, ARG_INOUT, poisoned(arena, bytes), bytes); // 0xFF may be a byte of a descale
    arg_add(&call, "grads", ARG_F32, ARG_IN, grads, n);
    Rule rules[] = {rule_exact("send")};
    OpOutcome outcome = run_case(arena, what, &call, rules, 1);
    expect_bytes(what, &outcome, "send", want, bytes);
}

static void ops_grad_quantize(void) {
    if (op_test_skipped()) { return; }
    for_each_bucket(grad_quantize_case);
}

// Chunks as they come from all ranks: any code, descales of every kind.
static uint8_t* assorted_chunks(Arena* arena, const Bucket* bucket, int num_ranks) {
    size_t E = bucket->chunk, wire = grad_wire_bytes(E);
    uint8_t* received = (uint8_t*)poisoned(arena, wire * (size_t)num_ranks); // what is behind the descales is not read
    for (size_t r = 0; r < (size_t)num_ranks; r++) {
        for (size_t i = 0; i < E; i += 4) {
            uint32_t random = philox(20261121, 40 + r, i).word[0];
            if (i % 4096) { random &= random >> 1 | 0xBFBFBFBFu; } // NaN codes are rare
            memcpy(received + r * wire + i, &random, 4);
        }
        for (size_t b = 0; b < E / GRAD_BLOCK; b++) {
            float descale = rng_uniform(20261121, 50 + r, b) * 1e-4f;
            size_t kind = (b * 5 + r) % 64;
            if (kind == 1) { descale = NAN; }
            if (kind == 2) { descale = 0.0f; }
            if (kind == 3) { descale = 0x1p-126f; }
            if (kind == 4) { descale = 7.5e35f; } // sums overflow
            memcpy(received + r * wire + E + 4 * b, &descale, 4);
        }
    }
    return received;
}

static void grad_sum_case(Arena* arena, const char* what, const Bucket* bucket, size_t n, int num_ranks) {
    uint8_t* received = assorted_chunks(arena, bucket, num_ranks);
    size_t E = bucket->chunk, wire = grad_wire_bytes(E);
    for (int rank = 0; rank < num_ranks; rank += rank_step(num_ranks)) {
        float* grads = random_floats(arena, n, 0, 1, 32); // of this rank alone: replaced where it owns
        float* want = arena_floats(arena, n);
        memcpy(want, grads, n * sizeof(float));
        for (int p = 0; p < bucket->num_pieces; p++) {
            const Piece* piece = &bucket->piece[p];
            for (size_t i = 0; i < piece->slice; i++) {
                long long place = slice_place(piece, rank, i);
                if (place < 0) { continue; }
                float sum = 0.0f;
                for (size_t r = 0; r < (size_t)num_ranks; r++) {
                    float descale;
                    memcpy(&descale, received + r * wire + E + (piece->at + i) / GRAD_BLOCK * 4, 4);
                    sum = fmaf(float_from_e4m3(received[r * wire + piece->at + i]), descale, sum);
                }
                want[place] = sum;
            }
        }
        OpCall call = exchange_call(OP_GRAD_SUM, bucket, num_ranks, rank);
        arg_add(&call, "grads", ARG_F32, ARG_INOUT, grads, n);
        arg_add(&call, "received", ARG_CODES, ARG_IN, received, wire * (size_t)num_ranks);
        Rule rules[] = {rule_exact("grads")};
        OpOutcome outcome = run_case(arena, what, &call, rules, 1);
        expect_floats(what, &outcome, "grads", want, n);
    }
}

static void ops_grad_sum(void) {
    if (op_test_skipped()) { return; }
    for_each_bucket(grad_sum_case);
}

// Ranges of ranks whose chunks are packed or unpacked: all of them, some one, some several.
static int rank_ranges(int first[3], int count[3], int num_ranks) {
    first[0] = 0, count[0] = num_ranks;
    first[1] = num_ranks / 2, count[1] = 1;
    first[2] = 1, count[2] = num_ranks - 1;
    return num_ranks == 1 ? 1 : 3;
}

static void grad_pack_case(Arena* arena, const char* what, const Bucket* bucket, size_t n, int num_ranks) {
    float* grads = assorted_grads(arena, n, bucket);
    int first[3], ranks[3], num_ranges = rank_ranges(first, ranks, num_ranks);
    for (int k = 0; k < 2 * num_ranges; k++) {
        int in_bf16 = k % 2, range = k / 2;
        size_t count = bucket->chunk * (size_t)ranks[range];
        float* want = arena_floats(arena, count);
        for (int r = 0; r < ranks[range]; r++) {
            for (int p = 0; p < bucket->num_pieces; p++) {
                const Piece* piece = &bucket->piece[p];
                for (size_t i = 0; i < piece->slice; i++) {
                    long long place = slice_place(piece, first[range] + r, i);
                    float x = place >= 0 ? grads[place] : 0.0f;
                    want[(size_t)r * bucket->chunk + piece->at + i] = in_bf16 ? bf16_round(x) : x;
                }
            }
        }
        OpCall call =
            exchange_call(in_bf16 ? OP_GRAD_PACK_BF16 : OP_GRAD_PACK_FP32, bucket, ranks[range], first[range]);
        arg_add(&call, "packed", in_bf16 ? ARG_BF16 : ARG_F32, ARG_OUT, arena_floats(arena, count), count);
        arg_add(&call, "grads", ARG_F32, ARG_IN, grads, n);
        Rule rules[] = {rule_exact("packed")};
        OpOutcome outcome = run_case(arena, what, &call, rules, 1);
        expect_floats(what, &outcome, "packed", want, count);
    }
}

static void ops_grad_pack(void) {
    if (op_test_skipped()) { return; }
    for_each_bucket(grad_pack_case);
}

static void grad_unpack_case(Arena* arena, const char* what, const Bucket* bucket, size_t n, int num_ranks) {
    float* chunks = random_bf16(arena, bucket->chunk * (size_t)num_ranks, 0, 1, 33);
    int first[3], ranks[3], num_ranges = rank_ranges(first, ranks, num_ranks);
    for (int k = 0; k < 2 * num_ranges; k++) {
        int in_bf16 = k % 2, range = k / 2;
        float *grads = random_floats(arena, n, 0, 1, 32), *want = arena_floats(arena, n);
        memcpy(want, grads, n * sizeof(float));
        for (int r = 0; r < ranks[range]; r++) {
            for (int p = 0; p < bucket->num_pieces; p++) {
                const Piece* piece = &bucket->piece[p];
                for (size_t i = 0; i < piece->slice; i++) {
                    long long place = slice_place(piece, first[range] + r, i);
                    if (place >= 0) { want[place] = chunks[(size_t)r * bucket->chunk + piece->at + i]; }
                }
            }
        }
        OpCall call =
            exchange_call(in_bf16 ? OP_GRAD_UNPACK_BF16 : OP_GRAD_UNPACK_FP32, bucket, ranks[range], first[range]);
        arg_add(&call, "grads", ARG_F32, ARG_INOUT, grads, n);
        arg_add(&call, "chunks", in_bf16 ? ARG_BF16 : ARG_F32, ARG_IN, chunks, bucket->chunk * (size_t)ranks[range]);
        Rule rules[] = {rule_exact("grads")};
        OpOutcome outcome = run_case(arena, what, &call, rules, 1);
        expect_floats(what, &outcome, "grads", want, n);
    }
}

static void ops_grad_unpack(void) {
    if (op_test_skipped()) { return; }
    for_each_bucket(grad_unpack_case);
}

// ---------------------------------------------------------------------------------------------------------------------
// scales that all ranks share

// Healthy gradients, then with what is not finite in some pieces; the largest element first, last and in the middle.
static void grad_amax_case(Arena* arena, const char* what, const Bucket* bucket, size_t n, int num_ranks) {
    if (num_ranks > 2) { return; } // the pieces are the same
    for (int damage = 0; damage < 2; damage++) {
        float *grads = random_floats(arena, n, 0, 1e-3, 31), *want = arena_floats(arena, BUCKET_PIECES);
        for (int p = 0; p < bucket->num_pieces; p++) {
            const Piece* piece = &bucket->piece[p];
            float* x = grads + piece->offset;
            x[p % 3 == 0 ? 0 : p % 3 == 1 ? piece->n - 1 : piece->n / 2] = p % 2 ? -7.0f : 9.0f;
            if (p % 4 == 3) { memset(x, 0, piece->n * sizeof(float)); }
            if (damage && p % 5 == 0) { x[piece->n - 1] = NAN; }
            if (damage && p % 5 == 2) { x[piece->n / 3] = -INFINITY; }
            if (damage && p % 5 == 1) { x[piece->n / 3] = -3.4e38f; }
            for (size_t i = 0; i < piece->n; i++) {
                float magnitude = isfinite(x[i]) ? fabsf(x[i]) : INFINITY;
                want[p] = magnitude > want[p] ? magnitude : want[p];
            }
        }
        OpCall call = exchange_call(OP_GRAD_AMAX, bucket, num_ranks, 0);
        size_t count = (size_t)bucket->num_pieces;
        arg_add(&call, "amaxes", ARG_F32, ARG_OUT, arena_floats(arena, count), count);
        arg_add(&call, "grads", ARG_F32, ARG_IN, grads, n);
        Rule rules[] = {rule_exact("amaxes")};
        OpOutcome outcome = run_case(arena, what, &call, rules, 1);
        expect_floats(what, &outcome, "amaxes", want, count);
    }
}

static void ops_grad_amax(void) {
    if (op_test_skipped()) { return; }
    for_each_bucket(grad_amax_case);
}

// Shared amaxes of every kind, as other ranks may have them: below the gradients, too, so that codes saturate.
static float* assorted_amaxes(Arena* arena, const Bucket* bucket) {
    static const float kinds[] = {2e-3f, 1.0f, 0.0f, INFINITY, 1e-41f, 3.4e38f, 4e-6f};
    float* amaxes = arena_floats(arena, (size_t)bucket->num_pieces);
    for (int p = 0; p < bucket->num_pieces; p++) {
        amaxes[p] = kinds[p % 7];
    }
    return amaxes;
}

// scale and descale of a piece by the contract; scale 0: all codes are 0
static void expected_shared_scale(float amax, float mu, float* scale, float* descale) {
    *scale = 448.0f * mu / amax;
    *scale = *scale > 0x1p126f ? 0x1p126f : *scale < 0x1p-126f ? 0x1p-126f : *scale;
    *descale = 1.0f / *scale;
    if (!isfinite(amax) || amax == 0.0f) { *scale = 0.0f, *descale = amax == 0.0f ? 0.0f : NAN; }
}

static const float shared_mus[] = {1.0f, 0.37f, 0x1p-20f};

static void grad_quantize_shared_case(Arena* arena, const char* what, const Bucket* bucket, size_t n, int num_ranks) {
    float *grads = assorted_grads(arena, n, bucket), *amaxes = assorted_amaxes(arena, bucket);
    size_t E = bucket->chunk, bytes = E * (size_t)num_ranks;
    for (int m = 0; m < 3; m++) {
        uint8_t* want = arena_codes(arena, bytes);
        for (int rank = 0; rank < num_ranks; rank++) {
            for (int p = 0; p < bucket->num_pieces; p++) {
                const Piece* piece = &bucket->piece[p];
                float scale, descale;
                expected_shared_scale(amaxes[p], shared_mus[m], &scale, &descale);
                for (size_t i = 0; i < piece->slice; i++) {
                    long long place = slice_place(piece, rank, i);
                    uint8_t code = place >= 0 && scale > 0.0f ? e4m3_from_float(grads[place] * scale) : 0;
                    want[(size_t)rank * E + piece->at + i] = code;
                }
            }
        }
        OpCall call = exchange_call(OP_GRAD_QUANTIZE_SHARED, bucket, num_ranks, 0);
        call.factor = shared_mus[m];
        arg_add(&call, "codes", ARG_CODES, ARG_OUT, arena_codes(arena, bytes), bytes);
        arg_add(&call, "grads", ARG_F32, ARG_IN, grads, n);
        arg_add(&call, "amaxes", ARG_F32, ARG_IN, amaxes, (size_t)bucket->num_pieces);
        Rule rules[] = {rule_exact("codes")};
        OpOutcome outcome = run_case(arena, what, &call, rules, 1);
        expect_bytes(what, &outcome, "codes", want, bytes);
    }
}

static void ops_grad_quantize_shared(void) {
    if (op_test_skipped()) { return; }
    for_each_bucket(grad_quantize_shared_case);
}

// Any code, in the padding, too; one in 16 is +-448.
static void grad_dequantize_shared_case(Arena* arena, const char* what, const Bucket* bucket, size_t n, int num_ranks) {
    size_t E = bucket->chunk, bytes = E * (size_t)num_ranks;
    float* amaxes = assorted_amaxes(arena, bucket);
    uint8_t* codes = arena_codes(arena, bytes);
    for (size_t i = 0; i < bytes; i++) {
        uint32_t random = philox(20261121, 62, i).word[0];
        codes[i] = (uint8_t)(random % 16 ? random >> 8 : 0x7Eu | (random >> 8 & 0x80u));
    }
    for (int m = 0; m < 3; m++) {
        float *grads = random_floats(arena, n, 0, 1, 32), *want = arena_floats(arena, n);
        memcpy(want, grads, n * sizeof(float));
        unsigned long long before = 5, count = before;
        for (int rank = 0; rank < num_ranks; rank++) {
            for (int p = 0; p < bucket->num_pieces; p++) {
                const Piece* piece = &bucket->piece[p];
                float scale, descale;
                expected_shared_scale(amaxes[p], shared_mus[m], &scale, &descale);
                for (size_t i = 0; i < piece->slice; i++) {
                    long long place = slice_place(piece, rank, i);
                    uint8_t code = codes[(size_t)rank * E + piece->at + i];
                    if (place < 0) { continue; }
                    want[place] = float_from_e4m3(code) * descale;
                    count += (code & 0x7F) == 0x7E;
                }
            }
        }
        OpCall call = exchange_call(OP_GRAD_DEQUANTIZE_SHARED, bucket, num_ranks, 0);
        call.factor = shared_mus[m];
        arg_add(&call, "grads", ARG_F32, ARG_INOUT, grads, n);
        arg_add(&call, "codes", ARG_CODES, ARG_IN, codes, bytes);
        arg_add(&call, "amaxes", ARG_F32, ARG_IN, amaxes, (size_t)bucket->num_pieces);
        arg_add(&call, "saturated", ARG_CODES, ARG_INOUT, &before, sizeof(before));
        Rule rules[] = {rule_exact("grads"), rule_exact("saturated")};
        OpOutcome outcome = run_case(arena, what, &call, rules, 2);
        expect_floats(what, &outcome, "grads", want, n);
        expect_bytes(what, &outcome, "saturated", &count, sizeof(count));
    }
}

static void ops_grad_dequantize_shared(void) {
    if (op_test_skipped()) { return; }
    for_each_bucket(grad_dequantize_shared_case);
}

// ---------------------------------------------------------------------------------------------------------------------
// the norm over ranks

static HostState* state_with_loss(Arena* arena, float loss) {
    HostState* state = (HostState*)arena_bytes(arena, sizeof(HostState));
    state->loss = loss, state->grad_norm = -1.0f, state->skip = -3, state->slots_warming = -5, state->saturated = 7;
    return state;
}

// One rank's part against FP64 over its slices, on both floors; returns the sum of the squares.
static double norm_part_case(Arena* arena, const char* what, const Shards* shards, float* grads, size_t n, int rank) {
    double squares = 0.0;
    size_t owned = 0;
    for (int b = 0; b < shards->num_buckets; b++) {
        for (int p = 0; p < shards->bucket[b].num_pieces; p++) {
            const Piece* piece = &shards->bucket[b].piece[p];
            for (size_t i = 0; i < piece->slice; i++) {
                long long place = slice_place(piece, rank, i);
                if (place < 0) { continue; }
                squares += (double)grads[place] * (double)grads[place];
                owned++;
            }
        }
    }
    OpCall call = op_call(OP_NORM_OF_SLICES);
    call.shards = shards, call.rank = rank, call.C = 4096;
    arg_add(&call, "part", ARG_NORMS, ARG_OUT, arena_bytes(arena, sizeof(HostNorm)), 1);
    arg_add(&call, "state", ARG_STATE, ARG_IN, state_with_loss(arena, 2.5f), 1);
    arg_add(&call, "grads", ARG_F32, ARG_IN, grads, n);
    Rule rules[] = {rule_ignore("part")};
    OpOutcome outcome = run_case(arena, what, &call, rules, 1);
    const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
    for (int k = 0; k < 2; k++) {
        const HostNorm* part = (const HostNorm*)arg_find(calls[k], "part")->host;
        int is_right = isfinite(squares) ? fabs(part->squares - squares) <= sum_factor((double)owned) * squares
                                         : !isfinite(part->squares);
        expect(is_right, "%s, floor %d: squares %.12g, want %.12g", what, k, part->squares, squares);
        expect(part->loss == 2.5f && part->unused == 0.0f, "%s, floor %d: loss %g, unused %g, want 2.5, 0", what, k,
               (double)part->loss, (double)part->unused);
    }
    return squares;
}

// Every element belongs to one rank's part. Behind it: an element that is not finite makes its owner's part not finite.
static void ops_norm_of_slices(void) {
    if (op_test_skipped()) { return; }
    for (int i = 0; i < NUM_SHARD_CASES; i++) {
        ShardCase c = shard_cases[i];
        if (c.big && !op_floors.thorough) { continue; }
        GptConfig config;
        memset(&config, 0, sizeof(config));
        config.max_seq_len = c.maxT, config.padded_vocab_size = c.Vp, config.num_layers = c.L, config.channels = c.C;
        ParameterTable table = parameter_table(config);
        size_t n = table.num_parameters;
        for (int k = 0; k < NUM_SHARD_RANKS; k++) {
            Arena arena = {};
            Shards shards = shards_create(&table, shard_ranks[k]);
            float* grads = random_floats(&arena, n, 0, 1e-3, 36);
            char what[96];
            double whole = 0.0, parts = 0.0;
            for (size_t e = 0; e < n; e++) {
                whole += (double)grads[e] * (double)grads[e];
            }
            for (int rank = 0; rank < shards.num_ranks; rank++) {
                snprintf(what, sizeof(what), "C %d, %d ranks, rank %d", c.C, shards.num_ranks, rank);
                parts += norm_part_case(&arena, what, &shards, grads, n, rank);
            }
            expect(fabs(parts - whole) <= 1e-12 * whole, "C %d, %d ranks: parts add up to %.12g, want %.12g", c.C,
                   shards.num_ranks, parts, whole);
            const Piece* piece = &shards.bucket[0].piece[0]; // rank 0 has its first element, another its last
            grads[piece->offset] = -INFINITY;
            grads[piece->offset + piece->n - 1] = NAN;
            norm_part_case(&arena, "damaged", &shards, grads, n, 0);
            norm_part_case(&arena, "damaged", &shards, grads, n, (int)((piece->n - 1) / piece->slice));
            shards_free(&shards);
            arena_free(&arena);
        }
    }
}

// In rank order and FP64, on both floors to the bit; the values are such that another order gives another sum.
static void ops_norm_of_ranks(void) {
    if (op_test_skipped()) { return; }
    int counts[] = {1, 2, 3, 8, 70};
    for (int i = 0; i < 5; i++) {
        // 1: NaN squares, 2: Inf squares, 3: NaN loss, 4: Inf loss, 5: finite squares of an infinite norm; of one rank
        for (int damage = 0; damage < 6; damage++) {
            Arena arena = {};
            int ranks = counts[i], sick = ranks / 2;
            HostNorm* parts = (HostNorm*)arena_bytes(&arena, (size_t)ranks * sizeof(HostNorm));
            double loss = 0.0, squares = 0.0;
            for (int r = 0; r < ranks; r++) {
                double random = (double)rng_uniform(20261121, 61, (uint64_t)r);
                parts[r].squares = ldexp(0.1 + random, r % 3 == 1 ? 60 : 0);
                parts[r].loss = ldexpf((float)random, r % 2 ? 30 : -30);
            }
            if (damage == 1) { parts[sick].squares = NAN; }
            if (damage == 2) { parts[sick].squares = INFINITY; }
            if (damage == 3) { parts[sick].loss = NAN; }
            if (damage == 4) { parts[sick].loss = -INFINITY; }
            if (damage == 5) { parts[sick].squares = 1e80; }
            for (int r = 0; r < ranks; r++) {
                loss += (double)parts[r].loss;
                squares += parts[r].squares;
            }
            OpCall call = op_call(OP_NORM_OF_RANKS);
            call.num_ranks = ranks;
            arg_add(&call, "state", ARG_STATE, ARG_INOUT, state_with_loss(&arena, 7.0f), 1);
            arg_add(&call, "parts", ARG_NORMS, ARG_IN, parts, (size_t)ranks);
            Rule rules[] = {rule_ignore("state")};
            OpOutcome outcome = run_case(&arena, "norm_of_ranks", &call, rules, 1);
            const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
            for (int k = 0; k < 2; k++) {
                const HostState* state = (const HostState*)arg_find(calls[k], "state")->host;
                expect(same_float(state->loss, (float)loss) && same_float(state->grad_norm, (float)sqrt(squares)),
                       "%d ranks, damage %d, floor %d: loss %a, norm %a, want %a, %a", ranks, damage, k,
                       (double)state->loss, (double)state->grad_norm, (double)(float)loss,
                       (double)(float)sqrt(squares));
                expect(state->skip == (damage != 0) && state->slots_warming == -5 && state->saturated == 7,
                       "%d ranks, damage %d, floor %d: skip %d, warming %d, saturated %llu", ranks, damage, k,
                       state->skip, state->slots_warming, state->saturated);
            }
            arena_free(&arena);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// parameters and weights

// Every rank packs its slices, and what all ranks packed is unpacked into parameters that were other ones.
static void param_pack_case(Arena* arena, const char* what, const Bucket* bucket, size_t n, int num_ranks) {
    float *params = random_bf16(arena, n, 0, 1, 34), *other = random_bf16(arena, n, 0, 1, 35);
    size_t E = bucket->chunk;
    float *gathered = arena_floats(arena, E * (size_t)num_ranks), *want = arena_floats(arena, n);
    memcpy(want, other, n * sizeof(float));
    for (int rank = 0; rank < num_ranks; rank++) {
        float* packed = gathered + (size_t)rank * E;
        for (int p = 0; p < bucket->num_pieces; p++) {
            const Piece* piece = &bucket->piece[p];
            for (size_t i = 0; i < piece->slice; i++) {
                long long place = slice_place(piece, rank, i);
                packed[piece->at + i] = place >= 0 ? params[place] : 0.0f;
                if (place >= 0) { want[place] = params[place]; }
            }
        }
        OpCall call = exchange_call(OP_PARAM_PACK, bucket, num_ranks, rank);
        arg_add(&call, "packed", ARG_BF16, ARG_OUT, arena_floats(arena, E), E);
        arg_add(&call, "params", ARG_BF16, ARG_IN, params, n);
        Rule rules[] = {rule_exact("packed")};
        OpOutcome outcome = run_case(arena, what, &call, rules, 1);
        expect_floats(what, &outcome, "packed", packed, E);
    }
    OpCall call = exchange_call(OP_PARAM_UNPACK, bucket, num_ranks, 0);
    arg_add(&call, "params", ARG_BF16, ARG_INOUT, other, n);
    arg_add(&call, "gathered", ARG_BF16, ARG_IN, gathered, E * (size_t)num_ranks);
    Rule rules[] = {rule_exact("params")};
    OpOutcome outcome = run_case(arena, what, &call, rules, 1);
    expect_floats(what, &outcome, "params", want, n);
}

static void ops_param_pack(void) {
    if (op_test_skipped()) { return; }
    for_each_bucket(param_pack_case);
}

// Slices of a weight, one by one, have the codes that quantize_weight gives the whole. An empty slice has a descale.
static void ops_quantize_slice(void) {
    if (op_test_skipped()) { return; }
    int shapes[][2] = {{16, 16}, {48, 80}, {288, 96}, {2304, 768}};
    for (int i = 0; i < (op_floors.thorough ? 4 : 3); i++) {
        Arena arena = {};
        int OC = shapes[i][0], C = shapes[i][1];
        size_t n = (size_t)OC * C, slice = slice_elements(n, 3);
        float* master = random_floats(&arena, n, 0, 0.02, 1);
        master[n - 1] = NAN;
        ScaleSlot* slot = (ScaleSlot*)arena_bytes(&arena, sizeof(ScaleSlot));
        scale_slot_init(slot, E4M3_MAX, SLOT_WEIGHT);
        slot->scale = 5000.0f; // saturates some
        slot->descale = 7.0f;  // of the codes before
        slot->amax = 0.25f;    // of the next update: not touched
        OpCall whole = op_call(OP_QUANTIZE_WEIGHT);
        whole.OC = OC, whole.C = C;
        arg_add(&whole, "master", ARG_F32, ARG_IN, master, n);
        arg_add(&whole, "data", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
        arg_add(&whole, "slot", ARG_SLOTS, ARG_INOUT, slot, 1);
        Rule rules[] = {rule_exact("data"), rule_exact("slot")};
        OpOutcome want = run_case(&arena, "quantize_weight", &whole, rules, 2);
        for (int rank = 0; rank < 4; rank++) { // nothing is left for the last
            size_t begin = (size_t)rank * slice < n ? (size_t)rank * slice : n;
            size_t count = n - begin < slice ? n - begin : slice;
            char what[96];
            snprintf(what, sizeof(what), "OC %d, C %d, slice %d of %zu", OC, C, rank, count);
            OpCall call = op_call(OP_QUANTIZE_SLICE);
            call.n = count;
            arg_add(&call, "master", ARG_F32, ARG_IN, master + begin, count);
            arg_add(&call, "data", ARG_CODES, ARG_OUT, arena_codes(&arena, count), count);
            arg_add(&call, "slot", ARG_SLOTS, ARG_INOUT, slot, 1);
            OpOutcome outcome = run_case(&arena, what, &call, rules, 2);
            expect_bytes(what, &outcome, "data", arg_codes(&want.subject, "data") + begin, count);
            const OpCall* calls[2] = {&outcome.reference, &outcome.subject};
            for (int k = 0; k < 2; k++) {
                ScaleSlot expected = *slot;
                expected.descale = 1.0f / 5000.0f;
                expect(same_slots(arg_slot(calls[k], "slot"), &expected, 1), "%s: the slot is not as it was, with %g",
                       what, (double)expected.descale);
            }
        }
        arena_free(&arena);
    }
}

static void ops_transpose_weight(void) {
    if (op_test_skipped()) { return; }
    int shapes[][2] = {{16, 16}, {48, 80}, {128, 128}, {144, 272}, {16, 4096}, {2304, 768}, {1600, 6400}};
    for (int i = 0; i < 7; i++) {
        int OC = shapes[i][0], C = shapes[i][1];
        if (!op_floors.thorough && OC * C > 100000) { continue; }
        Arena arena = {};
        size_t n = (size_t)OC * C;
        uint8_t *data = arena_codes(&arena, n), *want = arena_codes(&arena, n);
        for (size_t k = 0; k < n; k++) {
            data[k] = (uint8_t)(philox(20261121, 60, k).word[0] % 255); // 0xFF is poison
        }
        transpose_codes(want, data, (size_t)OC, (size_t)C);
        OpCall call = op_call(OP_TRANSPOSE_WEIGHT);
        call.OC = OC, call.C = C;
        arg_add(&call, "transposed", ARG_CODES, ARG_OUT, arena_codes(&arena, n), n);
        arg_add(&call, "data", ARG_CODES, ARG_IN, data, n);
        char what[96];
        snprintf(what, sizeof(what), "OC %d, C %d", OC, C);
        Rule rules[] = {rule_exact("transposed")};
        OpOutcome outcome = run_case(&arena, what, &call, rules, 1);
        expect_bytes(what, &outcome, "transposed", want, n);
        arena_free(&arena);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the error of a sum over ranks, against FP64

// What `op` makes of the buffers on the floor under test; broken guards are an error.
static void run_subject(const char* what, OpCall* call) {
    op_floors.subject->op(op_floors.subject_device, call);
    expect(call->broken[0] == 0, "%s: %s", what, call->broken);
}

// Reduced gradients of the bucket in FP8, whole: every rank quantises, chunk k of all goes to rank k, which adds up.
static void reduce_fp8(Arena* arena, const char* what, float* sum, float* const* grads, const Bucket* bucket, size_t n,
                       int num_ranks) {
    size_t wire = grad_wire_bytes(bucket->chunk), bytes = wire * (size_t)num_ranks;
    uint8_t* sent = arena_codes(arena, bytes * (size_t)num_ranks);
    uint8_t* received = arena_codes(arena, bytes);
    for (int r = 0; r < num_ranks; r++) {
        OpCall call = exchange_call(OP_GRAD_QUANTIZE, bucket, num_ranks, 0);
        arg_add(&call, "send", ARG_CODES, ARG_OUT, sent + (size_t)r * bytes, bytes);
        arg_add(&call, "grads", ARG_F32, ARG_IN, grads[r], n);
        run_subject(what, &call);
    }
    for (int rank = 0; rank < num_ranks; rank++) {
        for (int r = 0; r < num_ranks; r++) {
            memcpy(received + (size_t)r * wire, sent + (size_t)r * bytes + (size_t)rank * wire, wire);
        }
        OpCall call = exchange_call(OP_GRAD_SUM, bucket, num_ranks, rank);
        arg_add(&call, "grads", ARG_F32, ARG_INOUT, sum, n);
        arg_add(&call, "received", ARG_CODES, ARG_IN, received, bytes);
        run_subject(what, &call);
    }
}

// The same in BF16 or FP32: packed, added up in FP32 in rank order, rounded once, unpacked.
static void reduce_packed(Arena* arena, const char* what, float* sum, float* const* grads, const Bucket* bucket,
                          size_t n, int num_ranks, int in_bf16) {
    size_t E = bucket->chunk, count = E * (size_t)num_ranks;
    float *packed = arena_floats(arena, count), *total = arena_floats(arena, count);
    ArgType type = in_bf16 ? ARG_BF16 : ARG_F32;
    for (int r = 0; r < num_ranks; r++) {
        OpCall call = exchange_call(in_bf16 ? OP_GRAD_PACK_BF16 : OP_GRAD_PACK_FP32, bucket, num_ranks, 0);
        arg_add(&call, "packed", type, ARG_OUT, packed, count);
        arg_add(&call, "grads", ARG_F32, ARG_IN, grads[r], n);
        run_subject(what, &call);
        for (size_t i = 0; i < count; i++) {
            total[i] += packed[i];
        }
    }
    for (size_t i = 0; in_bf16 && i < count; i++) {
        total[i] = bf16_round(total[i]);
    }
    for (int rank = 0; rank < num_ranks; rank++) {
        OpCall call = exchange_call(in_bf16 ? OP_GRAD_UNPACK_BF16 : OP_GRAD_UNPACK_FP32, bucket, 1, rank);
        arg_add(&call, "grads", ARG_F32, ARG_INOUT, sum, n);
        arg_add(&call, "chunks", type, ARG_IN, total + (size_t)rank * E, E);
        run_subject(what, &call);
    }
}

// With scales that all ranks share, added up code by code in E4M3, in rank order. mu = 1 / ranks: nothing saturates.
static void reduce_shared(Arena* arena, const char* what, float* sum, float* const* grads, const Bucket* bucket,
                          size_t n, int num_ranks) {
    size_t bytes = bucket->chunk * (size_t)num_ranks, num_pieces = (size_t)bucket->num_pieces;
    float *amaxes = arena_floats(arena, num_pieces), *own = arena_floats(arena, num_pieces);
    uint8_t *codes = arena_codes(arena, bytes), *total = arena_codes(arena, bytes);
    unsigned long long saturated = 0;
    float mu = 1.0f / (float)num_ranks;
    for (int r = 0; r < num_ranks; r++) {
        OpCall call = exchange_call(OP_GRAD_AMAX, bucket, num_ranks, 0);
        arg_add(&call, "amaxes", ARG_F32, ARG_OUT, own, num_pieces);
        arg_add(&call, "grads", ARG_F32, ARG_IN, grads[r], n);
        run_subject(what, &call);
        for (size_t p = 0; p < num_pieces; p++) {
            amaxes[p] = own[p] > amaxes[p] ? own[p] : amaxes[p];
        }
    }
    for (int r = 0; r < num_ranks; r++) {
        OpCall call = exchange_call(OP_GRAD_QUANTIZE_SHARED, bucket, num_ranks, 0);
        call.factor = mu;
        arg_add(&call, "codes", ARG_CODES, ARG_OUT, codes, bytes);
        arg_add(&call, "grads", ARG_F32, ARG_IN, grads[r], n);
        arg_add(&call, "amaxes", ARG_F32, ARG_IN, amaxes, num_pieces);
        run_subject(what, &call);
        for (size_t i = 0; i < bytes; i++) {
            total[i] = r == 0 ? codes[i] : e4m3_from_float(float_from_e4m3(total[i]) + float_from_e4m3(codes[i]));
        }
    }
    OpCall call = exchange_call(OP_GRAD_DEQUANTIZE_SHARED, bucket, num_ranks, 0);
    call.factor = mu;
    arg_add(&call, "grads", ARG_F32, ARG_INOUT, sum, n);
    arg_add(&call, "codes", ARG_CODES, ARG_IN, total, bytes);
    arg_add(&call, "amaxes", ARG_F32, ARG_IN, amaxes, num_pieces);
    arg_add(&call, "saturated", ARG_CODES, ARG_INOUT, &saturated, sizeof(saturated));
    run_subject(what, &call);
}

// Thresholds. E4M3 rounds a contribution by at most half an ulp: 2^-4 of it, or, among the subnormals, 2^-10 of the
// descale, which is at most amax of the tensor / 448. BF16: 2^-8 of the contribution, and of the sum once more. The
// FP32 sum: 2^-24 of the magnitudes per addition. Over many elements: an error is about uniform within half an ulp, and
// those of different ranks and elements are independent, so that in the Euclidean norm fp8 is off by at most 2^-4 /
// sqrt(3) = 3.6% of the sum of independent gradients; less than a quarter of that would be no FP8. fp8-allreduce rounds
// R - 1 partial sums, too: elementwise at most (1 + 2^-4)^R - 1 of the magnitudes, and R times 2^-10 of the descale,
// amax R / 448; in the norm the k-th partial sum has k / R of the squares, so that it is off by at most
// sqrt(1 + 2 / R + ... + R / R) times as much as fp8.
static void grad_error_case(int num_ranks, int heavy_tailed) {
    Arena arena = {};
    GptConfig config;
    memset(&config, 0, sizeof(config));
    config.max_seq_len = 16, config.padded_vocab_size = 128, config.num_layers = 1, config.channels = 80;
    ParameterTable table = parameter_table(config);
    Shards shards = shards_create(&table, num_ranks);
    size_t n = table.num_parameters;
    float* grads[8];
    double *want = arena_doubles(&arena, n), *magnitude = arena_doubles(&arena, n);
    double amax = 0.0;
    for (int r = 0; r < num_ranks; r++) {
        grads[r] = random_floats(&arena, n, 0, 1e-4, 70 + (uint64_t)r);
        for (size_t i = 0; i < n; i++) {
            if (heavy_tailed) { grads[r][i] *= expf(2.0f * rng_normal(20261121, 80 + (uint64_t)r, i)); }
            want[i] += (double)grads[r][i];
            magnitude[i] += fabs((double)grads[r][i]);
        }
        amax = fmax(amax, largest_of(grads[r], n));
    }
    const char* formats[4] = {"fp8", "bf16", "fp32", "fp8-allreduce"};
    double R = num_ranks, hops = sqrt(1.0 + (R * (R + 1.0) / 2.0 - 1.0) / R);
    double least[4] = {0x1p-4 / 4.0 / sqrt(3.0), 0x1p-8 / 4.0 / sqrt(3.0), -1.0, 0x1p-4 / 4.0 / sqrt(3.0)};
    double most[4] = {0x1p-4 / sqrt(3.0), 0x1p-7, num_ranks * 0x1p-24, 0x1p-4 / sqrt(3.0) * hops};
    for (int f = 0; f < 4; f++) {
        char what[96];
        snprintf(what, sizeof(what), "%s, %d ranks, %s", formats[f], num_ranks,
                 heavy_tailed ? "heavy tails" : "normal");
        float* sum = (float*)poisoned(&arena, n * sizeof(float));
        for (int b = 0; b < shards.num_buckets; b++) {
            if (f == 0) { reduce_fp8(&arena, what, sum, grads, &shards.bucket[b], n, num_ranks); }
            if (f == 1 || f == 2) { reduce_packed(&arena, what, sum, grads, &shards.bucket[b], n, num_ranks, f == 1); }
            if (f == 3) { reduce_shared(&arena, what, sum, grads, &shards.bucket[b], n, num_ranks); }
        }
        for (size_t i = 0; i < n; i++) { // NaN, which an element of no slice would be, fails
            double allowed = num_ranks * 0x1p-24 * magnitude[i];
            if (f == 0) { allowed += (0x1p-4 + 0x1p-20) * magnitude[i] + num_ranks * 0x1p-10 * amax / 448.0; }
            if (f == 1) { allowed += 0x1p-8 * magnitude[i] + (0x1p-8 + 0x1p-16) * magnitude[i]; }
            if (f == 3) {
                double each = pow(1.0 + 0x1p-4 + 0x1p-20, R) - 1.0, smallest = 0x1p-10 * amax * R / 448.0;
                allowed += each * magnitude[i] + R * (1.0 + each) * smallest;
            }
            expect(fabs((double)sum[i] - want[i]) <= allowed, "%s: sum[%zu] = %.9g, want %.9g +- %.3g", what, i,
                   (double)sum[i], want[i], allowed);
        }
        double error = relative_distance_f64(sum, want, n);
        expect(error >= least[f] && error <= most[f], "%s: relative error %.3g, want %.3g to %.3g", what, error,
               least[f], most[f]);
    }
    shards_free(&shards);
    arena_free(&arena);
}

static void ops_grad_reduce_error(void) {
    if (op_test_skipped()) { return; }
    for (int num_ranks = 2; num_ranks <= 8; num_ranks *= 2) {
        grad_error_case(num_ranks, 0);
        grad_error_case(num_ranks, 1);
    }
}

} // namespace ops

#endif
