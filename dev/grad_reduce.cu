// What several ranks send each other, made and taken apart on one GPU, without the sending: one layer's bucket and the
// last one (embeddings) of d12 on 8 ranks and d48 on 4, the fc weight's slice and its transpose, and an odd model.
//
// Then rank 0's part of the norm.
//
//     bench-grad_reduce
#include "../lib/grad_norm.cuh"
#include "../lib/grad_reduce.cuh"

#include "bench.cuh"

enum { SEED_GRADS = 1, SEED_PARAMS = 20, SEED_MASTER = 21, NUM_SAMPLES = 64 };
#define WEIGHT_SCALE 100.0f
#define SHARED_MU 0.25f

typedef struct {
    const char* name;
    int L, C, Vp, maxT, num_ranks;
} ExchangeSize;

static const ExchangeSize exchange_sizes[] = {
    {"d12", 12, 768, 50304, 1024, 8}, {"d48", 48, 1600, 50304, 1024, 4}, {"odd", 1, 208, 384, 17, 3}};

typedef struct {
    Bucket bucket;
    int num_ranks, rank;
    float* grads;      // (num_parameters) all layers: the pieces of a bucket lie far from each other
    uint8_t* send;     // (num_ranks, wire bytes)
    uint8_t* received; // (num_ranks, wire bytes)
    e4m3* codes;       // (num_ranks, chunk)
    float* amaxes;     // (num_pieces)
    unsigned long long* saturated;
    bf16* packed;      // (num_ranks, chunk)
    float* packed_f32; // (num_ranks, chunk)
    bf16* params;      // (num_parameters)
    ParamPiece* pieces;
    uint8_t *data, *transposed; // (OC, C), (C, OC)
    ScaleSlot* slot;
    float* master; // (OC, C)
    int OC, C;
    size_t slice;
    const Shards* shards;
    RankNorm* parts;  // (num_ranks)
    StepState* state; // (2): of norm_of_ranks, of global_norm
} Args;

static void run_quantize(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    grad_quantize(dev, a->send, a->grads, &a->bucket, a->num_ranks);
}
static void run_sum(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    grad_sum(dev, a->grads, a->received, &a->bucket, a->num_ranks, a->rank);
}
static void run_pack_bf16(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    grad_pack_bf16(dev, a->packed, a->grads, &a->bucket, 0, a->num_ranks);
}
static void run_unpack_bf16(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    grad_unpack_bf16(dev, a->grads, a->packed, &a->bucket, a->rank, 1);
}
static void run_pack_fp32(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    grad_pack_fp32(dev, a->packed_f32, a->grads, &a->bucket, 0, a->num_ranks);
}
static void run_unpack_fp32(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    grad_unpack_fp32(dev, a->grads, a->packed_f32, &a->bucket, a->rank, 1);
}
static void run_amax(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    grad_amax(dev, a->amaxes, a->grads, &a->bucket);
}
static void run_quantize_shared(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    grad_quantize_shared(dev, a->codes, a->grads, &a->bucket, a->amaxes, SHARED_MU, a->num_ranks);
}
static void run_dequantize_shared(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    grad_dequantize_shared(dev, a->grads, a->codes, &a->bucket, a->amaxes, SHARED_MU, a->num_ranks, a->saturated);
}
static void run_param_pack(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    param_pack(dev, a->packed, a->pieces, a->bucket.num_pieces, a->bucket.chunk, a->rank);
}
static void run_param_unpack(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    param_unpack(dev, a->pieces, a->packed, a->bucket.num_pieces, a->bucket.chunk, a->num_ranks);
}
static void run_slice(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    quantize_slice(dev, (e4m3*)a->data, a->slot, a->master, a->slice);
}
static void run_transpose(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    transpose_weight(dev, (e4m3*)a->transposed, (const e4m3*)a->data, a->OC, a->C);
}

static void run_norm(Device* dev, const void* args) {
    const Args* a = (const Args*)args;
    norm_of_slices(dev, a->parts + a->rank, a->state, a->grads, a->shards, a->rank);
}

static void fill_grads(Bench* b, const Args* a, size_t n, int seed) {
    bench_fill_float_kernel<<<2048, 256, 0, b->dev->stream>>>(a->grads, n, seed);
    cuda_check(cudaGetLastError());
}

// A sampled place: block `block` of rank's chunk.
typedef struct {
    int rank;
    size_t block;
    ChunkBlock at;
} Sample;

static Sample sample_of(const Args* a, int s, int rank) {
    size_t num_blocks = a->bucket.chunk / GRAD_BLOCK;
    Sample sample = {
        rank >= 0 ? rank : s % a->num_ranks, s < 2 ? s * (num_blocks - 1) : s * 2654435761u % num_blocks, {}};
    sample.at = chunk_block(&a->bucket, sample.block, sample.rank);
    return sample;
}

// The codes and the descale that a block of gradients of `seed` should have.
static float expected_codes(uint8_t codes[GRAD_BLOCK], ChunkBlock at, int seed) {
    float x[GRAD_BLOCK] = {}, amax = 0.0f;
    for (int i = 0; i < at.count; i++) {
        x[i] = bench_value(seed, at.offset + i);
        amax = fmaxf(amax, fabsf(x[i]));
    }
    for (int i = 0; i < GRAD_BLOCK; i++) {
        codes[i] = amax > 0.0f ? e4m3_from_float(x[i] * (E4M3_MAX / amax)) : 0;
    }
    return amax / E4M3_MAX;
}

static void check_quantized(Bench* b, const Args* a) {
    size_t wire = grad_wire_bytes(a->bucket.chunk);
    for (int s = 0; s < NUM_SAMPLES; s++) {
        Sample at = sample_of(a, s, -1);
        uint8_t want[GRAD_BLOCK], got[GRAD_BLOCK];
        float descale, want_descale = expected_codes(want, at.at, SEED_GRADS);
        const uint8_t* chunk = a->send + at.rank * wire;
        device_copy_out(b->dev, got, chunk + at.block * GRAD_BLOCK, GRAD_BLOCK);
        device_copy_out(b->dev, &descale, chunk + a->bucket.chunk + at.block * sizeof(float), sizeof(float));
        bench_expect(b, memcmp(got, want, GRAD_BLOCK) == 0, "grad_quantize: codes of block %zu, rank %d", at.block,
                     at.rank);
        bench_expect(b, descale == want_descale, "grad_quantize: descale of block %zu, rank %d is %g, want %g",
                     at.block, at.rank, descale, want_descale);
    }
}

// The own chunk from every rank, which has gradients of a seed of its own; then the sum.
static void check_sum(Bench* b, const Args* a, size_t n) {
    size_t wire = grad_wire_bytes(a->bucket.chunk);
    for (int r = 0; r < a->num_ranks; r++) {
        fill_grads(b, a, n, SEED_GRADS + r);
        run_quantize(b->dev, a);
        cuda_check(cudaMemcpyAsync(a->received + r * wire, a->send + a->rank * wire, wire, cudaMemcpyDeviceToDevice,
                                   b->dev->stream));
    }
    run_sum(b->dev, a);
    for (int s = 0; s < NUM_SAMPLES; s++) {
        Sample at = sample_of(a, s, a->rank);
        float want[GRAD_BLOCK] = {}, got[GRAD_BLOCK];
        for (int r = 0; r < a->num_ranks; r++) {
            uint8_t codes[GRAD_BLOCK];
            float descale = expected_codes(codes, at.at, SEED_GRADS + r);
            for (int i = 0; i < GRAD_BLOCK; i++) {
                want[i] = fmaf(float_from_e4m3(codes[i]), descale, want[i]);
            }
        }
        if (at.at.count == 0) { continue; }
        device_copy_out(b->dev, got, a->grads + at.at.offset, at.at.count * sizeof(float));
        bench_expect(b, memcmp(got, want, at.at.count * sizeof(float)) == 0, "grad_sum: block %zu: %g, want %g",
                     at.block, got[0], want[0]);
    }
}

// Gradients of SEED_GRADS packed and unpacked again are what they were, rounded or not.
static void check_packed(Bench* b, const Args* a, size_t n, int in_bf16) {
    fill_grads(b, a, n, SEED_GRADS);
    (in_bf16 ? run_pack_bf16 : run_pack_fp32)(b->dev, a);
    Args own = *a; // the own chunk is what comes back
    own.packed += a->rank * a->bucket.chunk;
    own.packed_f32 += a->rank * a->bucket.chunk;
    bench_poison(b, a->grads, n * sizeof(float));
    (in_bf16 ? run_unpack_bf16 : run_unpack_fp32)(b->dev, &own);
    for (int s = 0; s < NUM_SAMPLES; s++) {
        Sample at = sample_of(a, s, a->rank);
        float got[GRAD_BLOCK];
        if (at.at.count == 0) { continue; }
        device_copy_out(b->dev, got, a->grads + at.at.offset, at.at.count * sizeof(float));
        for (int i = 0; i < at.at.count; i++) {
            float x = bench_value(SEED_GRADS, at.at.offset + i);
            bench_expect_near(b, "grad_unpack", at.at.offset + i, got[i], in_bf16 ? bf16_round(x) : x, 0.0, 0.0);
        }
    }
}

// Gradients to codes with shared scales and back; amaxes of the pieces that the host can look through.
static void check_shared(Bench* b, const Args* a, size_t n) {
    fill_grads(b, a, n, SEED_GRADS);
    device_zero(b->dev, a->saturated, sizeof(unsigned long long));
    run_amax(b->dev, a);
    run_quantize_shared(b->dev, a);
    bench_poison(b, a->grads, n * sizeof(float));
    run_dequantize_shared(b->dev, a);
    float amaxes[BUCKET_PIECES];
    unsigned long long saturated = 0;
    device_copy_out(b->dev, amaxes, a->amaxes, a->bucket.num_pieces * sizeof(float));
    device_copy_out(b->dev, &saturated, a->saturated, sizeof(saturated));
    bench_expect(b, saturated == 0, "grad_dequantize_shared: %llu elements are saturated, want 0", saturated);
    for (int p = 0; p < a->bucket.num_pieces; p++) {
        const Piece* piece = &a->bucket.piece[p];
        float want = 0.0f;
        if (piece->n > 3000000) { continue; }
        for (size_t i = 0; i < piece->n; i++) {
            want = fmaxf(want, fabsf(bench_value(SEED_GRADS, piece->offset + i)));
        }
        bench_expect(b, amaxes[p] == want, "grad_amax: of piece %d is %g, want %g", p, amaxes[p], want);
    }
    for (int s = 0; s < NUM_SAMPLES; s++) {
        Sample at = sample_of(a, s, -1);
        GradBlockScale scale = grad_shared_scale(amaxes[chunk_piece(&a->bucket, at.block)], SHARED_MU);
        float got[GRAD_BLOCK];
        if (at.at.count == 0) { continue; }
        device_copy_out(b->dev, got, a->grads + at.at.offset, at.at.count * sizeof(float));
        for (int i = 0; i < at.at.count; i++) {
            uint8_t code = e4m3_from_float(bench_value(SEED_GRADS, at.at.offset + i) * scale.scale);
            bench_expect_near(b, "grad_dequantize_shared", at.at.offset + i, got[i],
                              float_from_e4m3(code) * scale.descale, 0.0, 0.0);
        }
    }
}

static void check_params(Bench* b, const Args* a, size_t n) {
    Args rank = *a;
    for (rank.rank = 0; rank.rank < a->num_ranks; rank.rank++) {
        rank.packed = a->packed + rank.rank * a->bucket.chunk;
        run_param_pack(b->dev, &rank);
    }
    bench_poison(b, a->params, n * sizeof(bf16));
    run_param_unpack(b->dev, a);
    for (int s = 0; s < NUM_SAMPLES; s++) {
        Sample at = sample_of(a, s, -1);
        float got[GRAD_BLOCK];
        if (at.at.count == 0) { continue; }
        bf16_to_host(b->dev, got, a->params + at.at.offset, at.at.count);
        for (int i = 0; i < at.at.count; i++) {
            bench_expect_near(b, "param_unpack", at.at.offset + i, got[i],
                              bench_bf16_value(SEED_PARAMS, at.at.offset + i), 0.0, 0.0);
        }
    }
}

static void check_weight(Bench* b, const Args* a) {
    size_t n = (size_t)a->OC * a->C, wrong = 0, differing = 0;
    uint8_t *data = (uint8_t*)malloc_or_die(n), *transposed = (uint8_t*)malloc_or_die(n);
    device_copy_out(b->dev, data, a->data, n);
    device_copy_out(b->dev, transposed, a->transposed, n);
    for (size_t i = 0; i < n; i++) {
        wrong += i < a->slice && data[i] != e4m3_from_float(bench_value(SEED_MASTER, i) * WEIGHT_SCALE);
        differing += data[i] != transposed[i % a->C * a->OC + i / a->C];
    }
    bench_expect(b, wrong == 0, "quantize_slice: %zu codes are wrong", wrong);
    bench_expect(b, differing == 0, "transpose_weight: %zu codes differ between the two layouts", differing);
    free(data);
    free(transposed);
}

// Buffers for one bucket; its checks, then its times.
static void bench_bucket(Bench* b, const char* size, const Bucket* bucket, size_t n, int num_ranks) {
    Args a = {};
    size_t wire = grad_wire_bytes(bucket->chunk), count = bucket->chunk * num_ranks;
    a.bucket = *bucket, a.num_ranks = num_ranks, a.rank = num_ranks / 2;
    a.grads = bench_float(b, n, SEED_GRADS);
    a.send = (uint8_t*)bench_poisoned(b, wire * num_ranks);
    a.received = (uint8_t*)bench_poisoned(b, wire * num_ranks);
    a.codes = (e4m3*)bench_poisoned(b, count);
    a.amaxes = (float*)bench_poisoned(b, BUCKET_PIECES * sizeof(float));
    a.saturated = (unsigned long long*)device_malloc(b->dev, sizeof(unsigned long long));
    a.packed = (bf16*)bench_poisoned(b, count * sizeof(bf16));
    a.packed_f32 = (float*)bench_poisoned(b, count * sizeof(float));
    a.params = bench_bf16(b, n, SEED_PARAMS);
    ParamPiece pieces[BUCKET_PIECES];
    double elements = 0.0, own = 0.0; // that exist: of the bucket, and of the rank's slices
    for (int p = 0; p < bucket->num_pieces; p++) {
        const Piece* piece = &bucket->piece[p];
        pieces[p] = ParamPiece{a.params + piece->offset, piece->n, piece->slice, piece->at};
        SliceRange range = piece_owned(piece, a.rank);
        elements += (double)piece->n;
        own += (double)(range.end - range.begin);
    }
    a.pieces = (ParamPiece*)device_malloc(b->dev, sizeof(pieces));
    device_copy_in(b->dev, a.pieces, pieces, bucket->num_pieces * sizeof(ParamPiece));
    device_sync(b->dev);
    run_quantize(b->dev, &a);
    check_quantized(b, &a);
    check_sum(b, &a, n);
    check_packed(b, &a, n, 1);
    check_packed(b, &a, n, 0);
    check_shared(b, &a, n);
    check_params(b, &a, n);
    fill_grads(b, &a, n, SEED_GRADS);
    double sent = (double)(wire * num_ranks);
    bench_report(b, "grad_quantize", size, run_quantize, &a, 4.0 * elements + sent);
    bench_report(b, "grad_sum", size, run_sum, &a, sent + 4.0 * own);
    bench_report(b, "grad_pack_bf16", size, run_pack_bf16, &a, 6.0 * elements);
    bench_report(b, "grad_unpack_bf16", size, run_unpack_bf16, &a, 6.0 * own);
    bench_report(b, "grad_pack_fp32", size, run_pack_fp32, &a, 8.0 * elements);
    bench_report(b, "grad_unpack_fp32", size, run_unpack_fp32, &a, 8.0 * own);
    bench_report(b, "grad_amax", size, run_amax, &a, 4.0 * elements);
    bench_report(b, "grad_quantize_shared", size, run_quantize_shared, &a, 5.0 * elements);
    bench_report(b, "grad_dequantize_shared", size, run_dequantize_shared, &a, 5.0 * elements);
    bench_report(b, "param_pack", size, run_param_pack, &a, 4.0 * own);
    bench_report(b, "param_unpack", size, run_param_unpack, &a, 4.0 * elements);
    void* pointers[] = {a.grads,     a.send,   a.received,   a.codes,  a.amaxes,
                        a.saturated, a.packed, a.packed_f32, a.params, a.pieces};
    for (size_t i = 0; i < sizeof(pointers) / sizeof(pointers[0]); i++) {
        device_release(b->dev, pointers[i]);
    }
}

// The fc weight: the first rank's slice quantised, the whole transposed.
static void bench_weight(Bench* b, const char* size, int C, int num_ranks) {
    Args a = {};
    a.OC = 4 * C, a.C = C;
    size_t n = (size_t)a.OC * C;
    Piece piece = {0, n, slice_elements(n, num_ranks), 0, 0, 0};
    a.slice = piece_owned(&piece, 0).end;
    a.master = bench_float(b, n, SEED_MASTER);
    a.data = (uint8_t*)bench_poisoned(b, n);
    a.transposed = (uint8_t*)bench_poisoned(b, n);
    a.slot = (ScaleSlot*)device_malloc(b->dev, sizeof(ScaleSlot));
    ScaleSlot slot;
    scale_slot_init(&slot, E4M3_MAX, SLOT_WEIGHT);
    slot.scale = WEIGHT_SCALE;
    device_copy_in(b->dev, a.slot, &slot, sizeof(slot));
    device_sync(b->dev);
    run_slice(b->dev, &a);
    run_transpose(b->dev, &a);
    check_weight(b, &a);
    bench_report(b, "quantize_slice", size, run_slice, &a, 5.0 * (double)a.slice);
    bench_report(b, "transpose_weight", size, run_transpose, &a, 2.0 * (double)n);
    void* pointers[] = {a.master, a.data, a.transposed, a.slot};
    for (size_t i = 0; i < sizeof(pointers) / sizeof(pointers[0]); i++) {
        device_release(b->dev, pointers[i]);
    }
}

// Rank 0's part of the norm; all ranks' parts together against the norm of the whole.
static void bench_norm(Bench* b, const char* size, const Shards* shards, size_t n) {
    Args a = {};
    a.shards = shards;
    a.grads = bench_float(b, n, SEED_GRADS);
    a.parts = (RankNorm*)bench_poisoned(b, (size_t)shards->num_ranks * sizeof(RankNorm));
    a.state = (StepState*)device_malloc(b->dev, 2 * sizeof(StepState));
    device_zero(b->dev, a.state, 2 * sizeof(StepState));
    for (a.rank = shards->num_ranks - 1; a.rank > 0; a.rank--) {
        run_norm(b->dev, &a);
    }
    run_norm(b->dev, &a);
    norm_of_ranks(b->dev, a.state, a.parts, shards->num_ranks);
    global_norm(b->dev, a.state + 1, a.grads, n);
    StepState state[2];
    device_copy_out(b->dev, state, a.state, sizeof(state));
    bench_expect_near(b, "norm_of_ranks", 0, state[0].grad_norm, state[1].grad_norm, 0x1p-20, 0.0);
    bench_expect(b, state[0].skip == 0, "norm_of_ranks: skip %d, want 0", state[0].skip);
    bench_report(b, "norm_of_slices", size, run_norm, &a, 4.0 * (double)shards_owned(shards, 0));
    void* pointers[] = {a.grads, a.parts, a.state};
    for (size_t i = 0; i < sizeof(pointers) / sizeof(pointers[0]); i++) {
        device_release(b->dev, pointers[i]);
    }
}

int main(void) {
    Bench b = bench_create(1024);
    for (size_t i = 0; i < sizeof(exchange_sizes) / sizeof(exchange_sizes[0]); i++) {
        ExchangeSize e = exchange_sizes[i];
        GptConfig config = {};
        config.max_seq_len = e.maxT, config.padded_vocab_size = e.Vp, config.num_layers = e.L, config.channels = e.C;
        ParameterTable table = parameter_table(config);
        Shards shards = shards_create(&table, e.num_ranks);
        char size[64];
        snprintf(size, sizeof(size), "%s layer, %d ranks", e.name, e.num_ranks);
        bench_bucket(&b, size, &shards.bucket[e.L / 2], table.num_parameters, e.num_ranks);
        snprintf(size, sizeof(size), "%s wte, %d ranks", e.name, e.num_ranks);
        bench_bucket(&b, size, &shards.bucket[e.L], table.num_parameters, e.num_ranks);
        snprintf(size, sizeof(size), "%s fc, %d ranks", e.name, e.num_ranks);
        bench_weight(&b, size, e.C, e.num_ranks);
        snprintf(size, sizeof(size), "%s, %d ranks", e.name, e.num_ranks);
        bench_norm(&b, size, &shards, table.num_parameters);
        shards_free(&shards);
    }
    return bench_finish(&b);
}
