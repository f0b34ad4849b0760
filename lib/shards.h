// Who owns what on several ranks, and how gradients travel: the parameter table (tensors.h) cut into pieces, slices,
// buckets and chunks.
//
//     piece    one tensor of one layer: n elements, contiguous in the flat arrays from `offset`
//     slice    one rank's part of a piece, for any n and any number of ranks R:
//                  slice = ceil(n / R) rounded up to GRAD_BLOCK elements
//                  rank r owns elements [min(r * slice, n), min((r + 1) * slice, n)) of the piece
//              so the last ranks may have less, or nothing
//     bucket   pieces that are reduced in one exchange, in the order in which backward finishes them:
//                  bucket 0 .. L-1   layers L-1 .. 0, the 12 pieces of each
//                  bucket L          wte, wpe, lnfw, lnfb
//              the largest pieces first
//     chunk    one rank's slices of a bucket, one behind the other from `at`, each padded with zeros to `slice`:
//              every rank has the same number of elements, so exchanges are uniform
//     shard    one rank's chunks of all buckets: what it keeps of master weights and moments (ZeRO-1, Rajbhandari et
//              al. 2020, stage 1). The element of the flat arrays at offset + r * slice + i is element
//              bucket.shard_at + piece.at + i of rank r's shard
//
// Balance. Slices are whole blocks, so rank 0 owns at most GRAD_BLOCK elements per piece above the mean, and a shard is
// at most that much larger than the parameters divided by R: 0.10% for GPT-2 124M on 8 ranks, 0.012% for 1.5B on 4.
//
// On the wire (--grad-reduce fp8) a chunk of E elements is
//     E bytes             E4M3 codes
//     E / GRAD_BLOCK * 4  FP32 descales, one per block: x = code * descale
//     0 .. 124            zeros, to a multiple of GRAD_WIRE_ALIGNMENT
// Blocks of 256: a sum over 4 ranks is off by 2.6% (Euclidean) for normal gradients, 0.9% for heavy-tailed ones, and
// 0.5% of the latter become 0. Blocks of 128: 2.6%, 0.8%, 0.3%, for 1.5% more bytes; of 512: 2.6%, 1.1%, 0.7%; one
// scale per tensor: 2.7%, 2.4%, 7% (dev/host/test_grad_formats.c prints them).
#ifndef SHARDS_H
#define SHARDS_H

#include <stddef.h>
#include <stdint.h>

#include "check.h"
#include "fp8.h"
#include "tensors.h"

#define GRAD_BLOCK 256          // elements that share a descale; slices begin and end on blocks
#define GRAD_WIRE_ALIGNMENT 128 // bytes; of every rank's chunk in a send or receive buffer
#define BUCKET_PIECES 12        // most pieces of a bucket: the tensors of a layer

typedef struct {
    size_t offset; // of element 0 in the flat arrays
    size_t n;      // elements, a multiple of 16
    size_t slice;  // elements of a rank's slice, a multiple of GRAD_BLOCK
    size_t at;     // where the slice begins in a chunk, a multiple of GRAD_BLOCK
    int tensor;    // TensorName
    int layer;
} Piece;

// Plain data without pointers: GPU kernels take it as an argument.
typedef struct {
    int num_pieces;
    size_t chunk;               // elements of a chunk, a multiple of GRAD_BLOCK: the sum of the pieces' slices
    size_t shard_at;            // where the chunk begins in a shard
    Piece piece[BUCKET_PIECES]; // in the order of `at`, the largest first: chunk_block finds nearly all blocks at once
} Bucket;

typedef struct {
    int num_ranks, num_layers;
    int num_buckets;
    Bucket* bucket;       // (num_buckets), in the order of backward
    size_t shard;         // elements of a rank's shard
    size_t largest_chunk; // elements of the largest bucket's chunk
} Shards;

// Elements [begin, end) of a piece; empty when equal.
typedef struct {
    size_t begin, end;
} SliceRange;

// ---------------------------------------------------------------------------------------------------------------------
// cutting

static inline size_t slice_elements(size_t n, int num_ranks) {
    size_t ranks = (size_t)num_ranks, share = (n + ranks - 1) / ranks;
    return (share + GRAD_BLOCK - 1) / GRAD_BLOCK * GRAD_BLOCK;
}

// What `rank` owns of a piece.
static inline SliceRange piece_owned(const Piece* piece, int rank) {
    size_t begin = (size_t)rank * piece->slice, end = begin + piece->slice;
    SliceRange range = {begin < piece->n ? begin : piece->n, end < piece->n ? end : piece->n};
    return range;
}

// Add a piece behind those that are not smaller.
static inline void bucket_add(Bucket* bucket, const TensorSpec* spec, int tensor, int layer, int num_ranks) {
    check(bucket->num_pieces < BUCKET_PIECES, "shards: more than %d pieces in a bucket", BUCKET_PIECES);
    size_t offset = spec->offset + (size_t)layer * spec->n, slice = slice_elements(spec->n, num_ranks);
    Piece piece = {offset, spec->n, slice, 0, tensor, layer};
    int p = bucket->num_pieces++;
    for (; p > 0 && bucket->piece[p - 1].n < piece.n; p--) {
        bucket->piece[p] = bucket->piece[p - 1];
    }
    bucket->piece[p] = piece;
}

// The table cut for num_ranks ranks. shards_free releases it. Errors: a tensor that is no multiple of 16 elements.
static inline Shards shards_create(const ParameterTable* table, int num_ranks) {
    check(num_ranks >= 1, "shards: %d ranks, want 1 or more", num_ranks);
    for (int t = 0; t < NUM_TENSORS; t++) {
        check(table->tensor[t].n % 16 == 0, "shards: %s has %zu elements per layer, want a multiple of 16",
              table->tensor[t].name, table->tensor[t].n);
    }
    int L = table->tensor[TENSOR_QKVW].layers;
    Shards shards = {num_ranks, L, L + 1, NULL, 0, 0};
    shards.bucket = (Bucket*)calloc_or_die((size_t)shards.num_buckets, sizeof(Bucket));
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &table->tensor[t];
        int outside = t == TENSOR_WTE || t == TENSOR_WPE || t == TENSOR_LNFW || t == TENSOR_LNFB; // of the blocks
        for (int l = 0; l < spec->layers; l++) {
            bucket_add(&shards.bucket[outside ? L : L - 1 - l], spec, t, l, num_ranks);
        }
    }
    for (int b = 0; b < shards.num_buckets; b++) {
        Bucket* bucket = &shards.bucket[b];
        for (int p = 0; p < bucket->num_pieces; p++) {
            bucket->piece[p].at = bucket->chunk;
            bucket->chunk += bucket->piece[p].slice;
        }
        bucket->shard_at = shards.shard;
        shards.shard += bucket->chunk;
        if (bucket->chunk > shards.largest_chunk) { shards.largest_chunk = bucket->chunk; }
    }
    return shards;
}

static inline void shards_free(Shards* shards) {
    free(shards->bucket);
    memset(shards, 0, sizeof(*shards));
}

// ---------------------------------------------------------------------------------------------------------------------
// looking up

// The bucket of a layer's tensors, or of those outside the blocks.
static inline const Bucket* shards_bucket(const Shards* shards, int tensor, int layer) {
    int outside = tensor == TENSOR_WTE || tensor == TENSOR_WPE || tensor == TENSOR_LNFW || tensor == TENSOR_LNFB;
    check(layer >= 0 && layer < (outside ? 1 : shards->num_layers), "shards: no layer %d of tensor %d", layer, tensor);
    return &shards->bucket[outside ? shards->num_layers : shards->num_layers - 1 - layer];
}

// The piece of one tensor of one layer; in a shard its slice begins at shards_bucket()->shard_at + piece->at.
static inline const Piece* shards_piece(const Shards* shards, int tensor, int layer) {
    const Bucket* bucket = shards_bucket(shards, tensor, layer);
    for (int p = 0; p < bucket->num_pieces; p++) {
        if (bucket->piece[p].tensor == tensor) { return &bucket->piece[p]; }
    }
    check(0, "shards: no tensor %d", tensor);
    return NULL;
}

// Parameters that `rank` owns, without padding.
static inline size_t shards_owned(const Shards* shards, int rank) {
    size_t owned = 0;
    for (int b = 0; b < shards->num_buckets; b++) {
        for (int p = 0; p < shards->bucket[b].num_pieces; p++) {
            SliceRange range = piece_owned(&shards->bucket[b].piece[p], rank);
            owned += range.end - range.begin;
        }
    }
    return owned;
}

// The largest rank's parameters over the mean: 1 is perfect balance. Bytes of state are proportional to it.
static inline double shards_balance(const Shards* shards) {
    size_t largest = 0, sum = 0;
    for (int rank = 0; rank < shards->num_ranks; rank++) {
        size_t owned = shards_owned(shards, rank);
        largest = owned > largest ? owned : largest;
        sum += owned;
    }
    return (double)largest * shards->num_ranks / (double)sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// walking over chunks, on host and GPU

// A block of a rank's chunk.
typedef struct {
    size_t offset; // of its first element in the flat arrays
    int count;     // elements that exist, 0 .. GRAD_BLOCK, a multiple of 16; behind them the chunk has zeros
} ChunkBlock;

// The piece that block `block` of a chunk is part of: a block is of one piece.
HOST_DEVICE static inline int chunk_piece(const Bucket* bucket, size_t block) {
    int p = 0;
    while (p + 1 < bucket->num_pieces && block * GRAD_BLOCK >= bucket->piece[p + 1].at) {
        p++;
    }
    return p;
}

// Block `block` (0 .. chunk / GRAD_BLOCK - 1) of rank's chunk.
HOST_DEVICE static inline ChunkBlock chunk_block(const Bucket* bucket, size_t block, int rank) {
    size_t at = block * GRAD_BLOCK;
    const Piece* piece = &bucket->piece[chunk_piece(bucket, block)];
    size_t first = (size_t)rank * piece->slice + (at - piece->at); // in the piece; a slice is whole blocks
    size_t left = first < piece->n ? piece->n - first : 0;
    ChunkBlock found = {piece->offset + first, (int)(left < GRAD_BLOCK ? left : GRAD_BLOCK)};
    return found;
}

// Bytes of a chunk of `elements` on the wire, and how many of them are codes and descales.
HOST_DEVICE static inline size_t grad_payload_bytes(size_t elements) {
    return elements + elements / GRAD_BLOCK * sizeof(float);
}
HOST_DEVICE static inline size_t grad_wire_bytes(size_t elements) {
    return (grad_payload_bytes(elements) + GRAD_WIRE_ALIGNMENT - 1) / GRAD_WIRE_ALIGNMENT * GRAD_WIRE_ALIGNMENT;
}

// How a block is written: code = e4m3(x * scale), x = code * descale.
typedef struct {
    float scale, descale;
    int has_codes; // 0: all codes are 0
} GradBlockScale;

// From the block's max |x|, NaN if it has one (amax_raised).
//   0              codes 0, descale 0
//   NaN or Inf     codes 0, descale NaN: every element of the block becomes NaN, so that no rank misses it
//   other          descale = amax / 448, the largest element becomes 448; scale is at most 2^126: it and its inverse
//                  are normal numbers
HOST_DEVICE static inline GradBlockScale grad_block_scale(float amax) {
    const float most = bits_float(0x7E800000u); // 2^126
    GradBlockScale s = {0.0f, 0.0f, 0};
    if (amax == 0.0f) { return s; }
    if ((float_bits(amax) & 0x7F800000u) == 0x7F800000u) {
        s.descale = bits_float(0x7FC00000u);
        return s;
    }
    s.scale = E4M3_MAX / amax;
    s.descale = amax / E4M3_MAX;
    s.has_codes = 1;
    if (s.scale > most) {
        s.scale = most;
        s.descale = 1.0f / most;
    }
    return s;
}

#endif
