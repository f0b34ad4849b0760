// Who owns what on several ranks (shards.h): every parameter once, chunks of equal size, a shard that maps back onto
// the flat arrays, balance, bytes on the wire, the scale of a block.
#include "../../lib/shards.h"
#include "unit.h"

static ParameterTable table_of(int maxT, int V, int L, int C) {
    GptConfig g;
    memset(&g, 0, sizeof(g));
    g.max_seq_len = maxT;
    g.padded_vocab_size = (V + 127) / 128 * 128;
    g.num_layers = L;
    g.channels = C;
    return parameter_table(g);
}

// Odd widths, one layer, pieces far smaller than a block, more ranks than blocks.
static const int shapes[][4] = {
    {17, 1, 1, 16}, {64, 300, 3, 48}, {33, 300, 2, 80}, {64, 500, 1, 208}, {128, 300, 5, 96}};
enum { NUM_SHAPES = sizeof(shapes) / sizeof(shapes[0]), MAX_RANKS = 9 };

// Together the ranks own every parameter exactly once; what lies in a shard is where the header says.
static void test_every_parameter_once(void) {
    for (int s = 0; s < NUM_SHAPES; s++) {
        ParameterTable table = table_of(shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3]);
        for (int R = 1; R <= MAX_RANKS; R++) {
            Shards shards = shards_create(&table, R);
            uint8_t* owners = (uint8_t*)calloc_or_die(table.num_parameters, 1);
            size_t owned = 0;
            for (int r = 0; r < R; r++) {
                uint8_t* in_shard = (uint8_t*)calloc_or_die(shards.shard, 1);
                for (int b = 0; b < shards.num_buckets; b++) {
                    const Bucket* bucket = &shards.bucket[b];
                    for (int p = 0; p < bucket->num_pieces; p++) {
                        const Piece* piece = &bucket->piece[p];
                        SliceRange range = piece_owned(piece, r);
                        expect(range.end >= range.begin && range.end <= piece->n &&
                                   range.end - range.begin <= piece->slice,
                               "shape %d, %d ranks: [%zu, %zu) of %zu", s, R, range.begin, range.end, piece->n);
                        for (size_t i = range.begin; i < range.end; i++) {
                            owners[piece->offset + i]++;
                            in_shard[bucket->shard_at + piece->at + i - range.begin]++;
                        }
                    }
                }
                size_t used = 0;
                for (size_t i = 0; i < shards.shard; i++) {
                    expect(in_shard[i] <= 1, "shape %d, %d ranks: two parameters at %zu of shard %d", s, R, i, r);
                    used += in_shard[i];
                }
                expect(used == shards_owned(&shards, r), "shape %d, rank %d of %d owns %zu, says %zu", s, r, R, used,
                       shards_owned(&shards, r));
                owned += used;
                free(in_shard);
            }
            for (size_t i = 0; i < table.num_parameters; i++) {
                expect(owners[i] == 1, "shape %d, %d ranks: parameter %zu has %d owners", s, R, i, owners[i]);
            }
            expect(owned == table.num_parameters, "shape %d, %d ranks: %zu of %zu parameters owned", s, R, owned,
                   table.num_parameters);
            free(owners);
            shards_free(&shards);
        }
    }
}

// Buckets in the order of backward, chunks without gaps, slices of whole blocks and no larger than they must be.
static void test_layout(void) {
    for (int s = 0; s < NUM_SHAPES; s++) {
        ParameterTable table = table_of(shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3]);
        int L = shapes[s][2];
        for (int R = 1; R <= MAX_RANKS; R++) {
            Shards shards = shards_create(&table, R);
            size_t shard = 0, largest = 0;
            expect(shards.num_buckets == L + 1, "%d buckets, want %d", shards.num_buckets, L + 1);
            for (int b = 0; b < shards.num_buckets; b++) {
                const Bucket* bucket = &shards.bucket[b];
                size_t at = 0;
                expect(bucket->num_pieces == (b < L ? 12 : 4), "bucket %d: %d pieces", b, bucket->num_pieces);
                expect(bucket->shard_at == shard, "bucket %d is at %zu of the shard, want %zu", b, bucket->shard_at,
                       shard);
                for (int p = 0; p < bucket->num_pieces; p++) {
                    const Piece* piece = &bucket->piece[p];
                    const TensorSpec* spec = &table.tensor[piece->tensor];
                    expect(p == 0 || piece->n <= bucket->piece[p - 1].n, "bucket %d: %s behind a smaller one", b,
                           spec->name);
                    expect(piece->layer == (b < L ? L - 1 - b : 0), "bucket %d: layer %d", b, piece->layer);
                    expect(piece->n == spec->n && piece->offset == spec->offset + (size_t)piece->layer * spec->n,
                           "bucket %d, %s: (offset, n) = (%zu, %zu)", b, spec->name, piece->offset, piece->n);
                    expect(piece->at == at, "bucket %d, %s is at %zu of the chunk, want %zu", b, spec->name, piece->at,
                           at);
                    expect(piece->slice % 256 == 0 && piece->slice * (size_t)R >= piece->n &&
                               (piece->slice - 256) * (size_t)R < piece->n,
                           "%s: slices of %zu for %zu elements on %d ranks", spec->name, piece->slice, piece->n, R);
                    expect(shards_piece(&shards, piece->tensor, piece->layer) == piece &&
                               shards_bucket(&shards, piece->tensor, piece->layer) == bucket,
                           "%s of layer %d is not found where it is", spec->name, piece->layer);
                    at += piece->slice;
                }
                expect(bucket->chunk == at, "bucket %d: a chunk of %zu, want %zu", b, bucket->chunk, at);
                shard += at;
                largest = at > largest ? at : largest;
            }
            expect(shards.shard == shard && shards.largest_chunk == largest,
                   "shard %zu of %zu, largest chunk %zu of %zu", shards.shard, shard, shards.largest_chunk, largest);
            shards_free(&shards);
        }
    }
}

// The blocks of all chunks walk over every parameter once, and say what they hold.
static void test_blocks(void) {
    for (int s = 0; s < NUM_SHAPES; s++) {
        ParameterTable table = table_of(shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3]);
        for (int R = 1; R <= MAX_RANKS; R++) {
            Shards shards = shards_create(&table, R);
            uint8_t* seen = (uint8_t*)calloc_or_die(table.num_parameters, 1);
            for (int b = 0; b < shards.num_buckets; b++) {
                const Bucket* bucket = &shards.bucket[b];
                for (size_t i = 0; i < bucket->chunk / GRAD_BLOCK * (size_t)R; i++) {
                    size_t block = i % (bucket->chunk / GRAD_BLOCK);
                    int rank = (int)(i / (bucket->chunk / GRAD_BLOCK));
                    ChunkBlock found = chunk_block(bucket, block, rank);
                    expect(found.count >= 0 && found.count <= GRAD_BLOCK && found.count % 16 == 0,
                           "bucket %d, block %zu of rank %d: %d elements", b, block, rank, found.count);
                    const Piece* piece = NULL; // by looking at all of them
                    for (int p = 0; p < bucket->num_pieces; p++) {
                        size_t at = bucket->piece[p].at;
                        if (block * 256 >= at && block * 256 < at + bucket->piece[p].slice) {
                            piece = &bucket->piece[p];
                        }
                    }
                    SliceRange range = piece_owned(piece, rank);
                    for (int k = 0; k < GRAD_BLOCK; k++) {
                        size_t in_piece = range.begin + (block * 256 - piece->at) + (size_t)k;
                        int exists = in_piece < range.end;
                        expect(exists == (k < found.count), "bucket %d, block %zu of rank %d: element %d", b, block,
                               rank, k);
                        if (!exists || k >= found.count) { continue; }
                        expect(found.offset + (size_t)k == piece->offset + in_piece,
                               "bucket %d, block %zu of rank %d begins at %zu", b, block, rank, found.offset);
                        seen[found.offset + (size_t)k]++;
                    }
                }
            }
            for (size_t i = 0; i < table.num_parameters; i++) {
                expect(seen[i] == 1, "shape %d, %d ranks: parameter %zu is in %d blocks", s, R, i, seen[i]);
            }
            free(seen);
            shards_free(&shards);
        }
    }
}

// No rank has more than a block per piece above the mean, and the shard (with its padding) no more than that either.
// The numbers of the head comment, too.
static void test_balance(void) {
    for (int s = 0; s < NUM_SHAPES + 2; s++) {
        ParameterTable table = s < NUM_SHAPES    ? table_of(shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3])
                               : s == NUM_SHAPES ? table_of(1024, 50257, 12, 768)
                                                 : table_of(1024, 50257, 48, 1600);
        int L = table.tensor[TENSOR_QKVW].layers;
        for (int R = 1; R <= MAX_RANKS; R++) {
            Shards shards = shards_create(&table, R);
            double mean = (double)table.num_parameters / R, above = 256.0 * (12.0 * L + 4.0);
            double balance = shards_balance(&shards);
            expect(balance >= 1.0 && balance <= 1.0 + above / mean,
                   "shape %d, %d ranks: balance %.5f, want at most %.5f", s, R, balance, 1.0 + above / mean);
            expect((double)shards.shard >= mean && (double)shards.shard <= mean + above,
                   "shape %d, %d ranks: a shard of %zu, want %.0f at most", s, R, shards.shard, mean + above);
            if (R == 1) { expect(balance == 1.0, "one rank owns all: %.9f", balance); }
            double state = (double)shards.shard / mean - 1.0;
            if (s == NUM_SHAPES && R == 8) {
                expect(balance < 1.002 && state < 0.002, "124M, 8 ranks: balance %.6f, padding %.6f", balance, state);
            }
            if (s == NUM_SHAPES + 1 && R == 4) {
                expect(balance < 1.0002 && state < 0.0002, "1.5B, 4 ranks: %.6f, %.6f", balance, state);
            }
            shards_free(&shards);
        }
    }
}

// A chunk on the wire: codes, descales, padding to 128 bytes.
static void test_wire_bytes(void) {
    size_t elements[] = {256, 512, 8192, 7680256, 1000192};
    for (int i = 0; i < 5; i++) {
        size_t E = elements[i], payload = grad_payload_bytes(E), bytes = grad_wire_bytes(E);
        expect(payload == E + E / 64, "%zu elements: %zu bytes, want %zu", E, payload, E + E / 64);
        expect(bytes % 128 == 0 && bytes >= payload && bytes < payload + 128, "%zu elements: %zu bytes on the wire", E,
               bytes);
    }
}

// A block comes back within half an ulp of E4M3: 2^-4 of a value, or 2^-10 of the descale among the subnormals.
static void test_block_scale(void) {
    float amaxes[] = {1.0f, 448.0f, 3e-5f, 0x1.fffffep127f, 1e38f, 0x1p-126f, 1e-40f, 0x1p-149f, 5.2e-36f, 5.3e-36f};
    for (int i = 0; i < 10; i++) {
        float amax = amaxes[i];
        GradBlockScale s = grad_block_scale(amax);
        expect(s.has_codes && isnormal(s.scale) && isnormal(s.descale), "amax %g: scale %g, descale %g", (double)amax,
               (double)s.scale, (double)s.descale);
        for (int k = 0; k <= 1000; k++) {
            float x = amax * (float)(k - 500) / 500.0f;
            double back = (double)float_from_e4m3(e4m3_from_float(x * s.scale)) * (double)s.descale;
            double allowed = fmax((0x1p-4 + 0x1p-20) * fabs((double)x), (0x1p-10 + 0x1p-24) * (double)s.descale);
            expect(fabs(back - (double)x) <= allowed, "amax %g: %g came back as %g", (double)amax, (double)x, back);
        }
        uint8_t top = e4m3_from_float(amax * s.scale);
        expect(top == 0x7E || amax < 5.3e-36f, "amax %g has code %02x, want 7e", (double)amax, top);
    }
    GradBlockScale zero = grad_block_scale(0.0f);
    expect(!zero.has_codes && zero.descale == 0.0f, "zeros: descale %g", (double)zero.descale);
    float lost[] = {NAN, INFINITY, bits_float(0x7FFFFFFFu)};
    for (int i = 0; i < 3; i++) {
        GradBlockScale s = grad_block_scale(lost[i]);
        expect(!s.has_codes && float_bits(s.descale) == 0x7FC00000u, "amax %g: descale %g", (double)lost[i],
               (double)s.descale);
    }
}

static void no_ranks(void* table) {
    Shards shards = shards_create((const ParameterTable*)table, 0);
    shards_free(&shards);
}

static void odd_tensor(void* table) {
    Shards shards = shards_create((const ParameterTable*)table, 2);
    shards_free(&shards);
}

static void test_errors(void) {
    ParameterTable good = table_of(64, 300, 3, 48), odd = table_of(64, 300, 3, 40);
    expect_dies(no_ranks, &good, "0 ranks, want 1 or more");
    expect_dies(odd_tensor, &odd, "ln1w has 40 elements per layer, want a multiple of 16");
}

int main(void) {
    unit_run(test_every_parameter_once);
    unit_run(test_layout);
    unit_run(test_blocks);
    unit_run(test_balance);
    unit_run(test_wire_bytes);
    unit_run(test_block_scale);
    unit_run(test_errors);
    return unit_report();
}
