// What the ranks exchange in a step: gradients behind the backward pass, the gradient norm, updated weights in front of
// the next forward pass. Written against floor.h, so it is the same on both floors; what lies where is shards.h.
//
//     backward of layer   L-1        L-2             L-3                          embedding
//     dev->stream         quantise   quantise, sum   quantise, sum  ...  quantise, sum | sum | norm, update
//     between ranks            [bucket 0    ] [bucket 1    ]  ...  [bucket L            ]
//
// A bucket's gradients are quantised (or packed) when its layer's backward pass is queued, travel while the layers
// below compute, and are summed when the next bucket is on its way. There are two buffers of each kind, so dev->stream
// waits for a bucket only where it took longer than a layer, and for the last. Without ZeRO-1 (--zero-stage 0) the sums
// travel a second time, one bucket later.
//
//     --grad-reduce   on the wire, bytes per gradient and rank pair     sum
//     fp8             E4M3, FP32 descale per 256: 1.016                 FP32, in rank order: same bits on every run
//     bf16            BF16: 2                                           NCCL's reduce-scatter (CPU: FP32, rounded once)
//     fp32            FP32: 4                                           NCCL's reduce-scatter
//     fp8-allreduce   E4M3, one scale per tensor and layer: 2           NCCL's all-reduce, rounds to E4M3 at every hop
//
// fp8-allreduce is FP8-LM's (Peng et al. 2023, section 2.1); it is there to be compared with.
#if (defined(CPU_FLOOR) && !defined(EXCHANGE_H_CPU)) || (!defined(CPU_FLOOR) && !defined(EXCHANGE_H_GPU))
#ifdef CPU_FLOOR
#define EXCHANGE_H_CPU
#else
#define EXCHANGE_H_GPU
#endif

#include "floor.h"

#include "config.h"
#include "grad_mu.h"
#include "memory.h"
#include "shards.h"

typedef struct {
    Device* dev;
    Comm* comm;
    int rank, num_ranks;
    GradReduce format;
    int is_sharded; // ZeRO-1 on several ranks: master weights and moments are this rank's shard, else flat arrays
    Shards shards;

    char* pool; // everything below but amaxes and norms, which are in use beside it
    size_t pool_bytes;
    void *send[2], *recv[2]; // of bucket b: [b % 2]
    void *sums[2], *all_sums[2]; // --zero-stage 0: (chunk) and (num_ranks, chunk) BF16, FP32 with --grad-reduce fp32
    float* amaxes;           // (num_buckets, BUCKET_PIECES) of fp8-allreduce
    RankNorm* norms;         // (num_ranks) all ranks' parts, and one: this rank's
    ParamPiece* param_pieces; // (num_param_pieces) in device memory: every tensor that is no linear's weight
    int num_param_pieces;
    size_t param_chunk;      // elements of a rank's slices of those

    int begun;    // buckets of this step whose gradients are on their way or there
    double mu;    // of fp8-allreduce
    unsigned long long* saturated; // of fp8-allreduce, in the step's state
} Exchange;

// ---------------------------------------------------------------------------------------------------------------------
// memory

static inline int exchange_is_parameter(const ParameterTable* table, int tensor) {
    return !table->tensor[tensor].is_linear;
}

// Bytes of send[i] and recv[i] for a chunk of E elements, and of an element of the sums that go to all.
static inline size_t exchange_send_bytes(const Exchange* x, size_t E) {
    size_t ranks = (size_t)x->num_ranks;
    switch (x->format) {
    case GRAD_REDUCE_BF16: return ranks * E * sizeof(bf16);
    case GRAD_REDUCE_FP32: return ranks * E * sizeof(float);
    case GRAD_REDUCE_FP8_ALLREDUCE: return ranks * E;
    default: return ranks * grad_wire_bytes(E);
    }
}

static inline size_t exchange_recv_bytes(const Exchange* x, size_t E) {
    switch (x->format) {
    case GRAD_REDUCE_BF16: return E * sizeof(bf16);
    case GRAD_REDUCE_FP32: return E * sizeof(float);
    case GRAD_REDUCE_FP8_ALLREDUCE: return 0; // in place
    default: return (size_t)x->num_ranks * grad_wire_bytes(E);
    }
}

static inline size_t exchange_sum_bytes(const Exchange* x, size_t E) {
    return E * (x->format == GRAD_REDUCE_FP32 ? sizeof(float) : sizeof(bf16));
}

// Do sums have to go to all ranks in a collective of their own?
static inline int exchange_spreads_sums(const Exchange* x) {
    return !x->is_sharded && x->format != GRAD_REDUCE_FP8_ALLREDUCE;
}

static inline size_t exchange_gradient_bytes(const Exchange* x) {
    size_t E = x->shards.largest_chunk;
    size_t bytes = memory_aligned(exchange_send_bytes(x, E)) + memory_aligned(exchange_recv_bytes(x, E));
    if (exchange_spreads_sums(x)) {
        size_t sums = exchange_sum_bytes(x, E);
        bytes += memory_aligned(sums) + memory_aligned((size_t)x->num_ranks * sums);
    }
    return 2 * bytes;
}

// Who owns what. `train` is finished (config_finish). exchange_free releases it.
static inline void exchange_create(Exchange* x, Device* dev, Comm* comm, const ParameterTable* table,
                                   const TrainConfig* train) {
    memset(x, 0, sizeof(*x));
    x->dev = dev;
    x->comm = comm;
    x->rank = comm_rank(comm);
    x->num_ranks = comm_num_ranks(comm);
    x->format = (GradReduce)train->grad_reduce;
    x->is_sharded = x->num_ranks > 1 && train->zero_stage == 1;
    x->shards = shards_create(table, x->num_ranks);
    x->mu = GRAD_MU_START;
    for (int b = 0; b < x->shards.num_buckets; b++) {
        const Bucket* bucket = &x->shards.bucket[b];
        for (int p = 0; p < bucket->num_pieces; p++) {
            if (!exchange_is_parameter(table, bucket->piece[p].tensor)) { continue; }
            x->num_param_pieces++;
            x->param_chunk += bucket->piece[p].slice;
        }
    }
}

static inline void exchange_free(Exchange* x) {
    shards_free(&x->shards);
}

// Plan the buffers: nothing on one rank.
static inline void exchange_plan(Exchange* x, MemoryPlan* plan) {
    if (x->num_ranks == 1) { return; }
    size_t params = ((size_t)x->num_ranks + 1) * memory_aligned(x->param_chunk * sizeof(bf16));
    size_t gradients = exchange_gradient_bytes(x);
    x->pool_bytes = params > gradients && x->is_sharded ? params : gradients;
    plan_add(plan, MEMORY_EXCHANGE, &x->pool, x->pool_bytes);
    plan_add(plan, MEMORY_EXCHANGE, &x->amaxes, (size_t)x->shards.num_buckets * BUCKET_PIECES * sizeof(float));
    plan_add(plan, MEMORY_EXCHANGE, &x->norms, ((size_t)x->num_ranks + 1) * sizeof(RankNorm));
    plan_add(plan, MEMORY_EXCHANGE, &x->param_pieces, (size_t)x->num_param_pieces * sizeof(ParamPiece));
}

static inline void* exchange_carve(char** next, size_t bytes) {
    void* at = *next;
    *next += memory_aligned(bytes);
    return at;
}

// The plan is placed. params[t]: all layers of tensor t in BF16, of the tensors that are no linear's weight.
// saturated: in device memory, zero at the start of every step.
static inline void exchange_place(Exchange* x, const ParameterTable* table, bf16* const* params,
                                  unsigned long long* saturated) {
    if (x->num_ranks == 1) { return; }
    size_t E = x->shards.largest_chunk, ranks = (size_t)x->num_ranks;
    char* next = x->pool;
    for (int i = 0; i < 2; i++) {
        x->send[i] = exchange_carve(&next, exchange_send_bytes(x, E));
        x->recv[i] = exchange_carve(&next, exchange_recv_bytes(x, E));
        if (!exchange_spreads_sums(x)) { continue; }
        x->sums[i] = exchange_carve(&next, exchange_sum_bytes(x, E));
        x->all_sums[i] = exchange_carve(&next, ranks * exchange_sum_bytes(x, E));
    }
    x->saturated = saturated;
    ParamPiece* pieces = (ParamPiece*)malloc_or_die((size_t)x->num_param_pieces * sizeof(ParamPiece));
    size_t at = 0;
    int count = 0;
    for (int b = 0; b < x->shards.num_buckets; b++) {
        const Bucket* bucket = &x->shards.bucket[b];
        for (int p = 0; p < bucket->num_pieces; p++) {
            const Piece* piece = &bucket->piece[p];
            if (!exchange_is_parameter(table, piece->tensor)) { continue; }
            ParamPiece mine = {params[piece->tensor] + (size_t)piece->layer * piece->n, piece->n, piece->slice, at};
            pieces[count++] = mine;
            at += piece->slice;
        }
    }
    device_copy_in(x->dev, x->param_pieces, pieces, (size_t)count * sizeof(ParamPiece));
    device_sync(x->dev);
    free(pieces);
}

// ---------------------------------------------------------------------------------------------------------------------
// gradients

// What bucket b sends, from the local gradients.
static inline void exchange_pack(Exchange* x, int b, const float* grads) {
    const Bucket* bucket = &x->shards.bucket[b];
    void* send = x->send[b % 2];
    float* amaxes = x->amaxes + (size_t)b * BUCKET_PIECES;
    switch (x->format) {
    case GRAD_REDUCE_BF16: grad_pack_bf16(x->dev, (bf16*)send, grads, bucket, 0, x->num_ranks); break;
    case GRAD_REDUCE_FP32: grad_pack_fp32(x->dev, (float*)send, grads, bucket, 0, x->num_ranks); break;
    case GRAD_REDUCE_FP8_ALLREDUCE:
        grad_amax(x->dev, amaxes, grads, bucket);
        comm_max(x->comm, x->dev, amaxes, (size_t)bucket->num_pieces);
        grad_quantize_shared(x->dev, (e4m3*)send, grads, bucket, amaxes, (float)x->mu, x->num_ranks);
        break;
    default: grad_quantize(x->dev, (uint8_t*)send, grads, bucket, x->num_ranks); break;
    }
}

static inline void exchange_send(Exchange* x, int b) {
    size_t E = x->shards.bucket[b].chunk;
    void *send = x->send[b % 2], *recv = x->recv[b % 2];
    switch (x->format) {
    case GRAD_REDUCE_BF16: comm_reduce_scatter_bf16(x->comm, x->dev, (bf16*)recv, (const bf16*)send, E); break;
    case GRAD_REDUCE_FP32: comm_reduce_scatter_fp32(x->comm, x->dev, (float*)recv, (const float*)send, E); break;
    case GRAD_REDUCE_FP8_ALLREDUCE:
        comm_all_reduce_e4m3(x->comm, x->dev, (e4m3*)send, (size_t)x->num_ranks * E);
        break;
    default: comm_all_to_all(x->comm, x->dev, recv, send, grad_wire_bytes(E)); break;
    }
}

// Bucket b is here: this rank's slices of grads become sums over all ranks (fp8-allreduce: all slices).
static inline void exchange_sum(Exchange* x, int b, float* grads) {
    const Bucket* bucket = &x->shards.bucket[b];
    const void *send = x->send[b % 2], *recv = x->recv[b % 2];
    switch (x->format) {
    case GRAD_REDUCE_BF16: grad_unpack_bf16(x->dev, grads, (const bf16*)recv, bucket, x->rank, 1); break;
    case GRAD_REDUCE_FP32: grad_unpack_fp32(x->dev, grads, (const float*)recv, bucket, x->rank, 1); break;
    case GRAD_REDUCE_FP8_ALLREDUCE:
        grad_dequantize_shared(x->dev, grads, (const e4m3*)send, bucket, x->amaxes + (size_t)b * BUCKET_PIECES,
                               (float)x->mu, x->num_ranks, x->saturated);
        break;
    default: grad_sum(x->dev, grads, (const uint8_t*)recv, bucket, x->num_ranks, x->rank); break;
    }
    if (!exchange_spreads_sums(x)) { return; }
    if (x->format == GRAD_REDUCE_FP32) {
        grad_pack_fp32(x->dev, (float*)x->sums[b % 2], grads, bucket, x->rank, 1);
    } else {
        grad_pack_bf16(x->dev, (bf16*)x->sums[b % 2], grads, bucket, x->rank, 1);
    }
}

// The sums of bucket b to all ranks.
static inline void exchange_send_sums(Exchange* x, int b) {
    comm_all_gather(x->comm, x->dev, x->all_sums[b % 2], x->sums[b % 2],
                    exchange_sum_bytes(x, x->shards.bucket[b].chunk));
}

static inline void exchange_take_sums(Exchange* x, int b, float* grads) {
    const Bucket* bucket = &x->shards.bucket[b];
    if (x->format == GRAD_REDUCE_FP32) {
        grad_unpack_fp32(x->dev, grads, (const float*)x->all_sums[b % 2], bucket, 0, x->num_ranks);
    } else {
        grad_unpack_bf16(x->dev, grads, (const bf16*)x->all_sums[b % 2], bucket, 0, x->num_ranks);
    }
}

// One more turn of the pipeline: bucket b begins to travel (unless all have), b - 1 is summed, the sums of b - 2 go to
// all, those of b - 3 arrive.
static inline void exchange_turn(Exchange* x, int b, float* grads) {
    int last = x->shards.num_buckets - 1, spreads = exchange_spreads_sums(x);
    if (b <= last) { exchange_pack(x, b, grads); }
    comm_end(x->comm, x->dev); // b - 1, and the sums of b - 3
    comm_begin(x->comm, x->dev);
    if (b <= last) { exchange_send(x, b); }
    if (spreads && b >= 2 && b - 2 <= last) { exchange_send_sums(x, b - 2); }
    if (spreads && b >= 3 && b - 3 <= last) { exchange_take_sums(x, b - 3, grads); }
    if (b >= 1 && b - 1 <= last) { exchange_sum(x, b - 1, grads); }
}

// The gradients of the next bucket (shards.h: the order of backward) are complete on this rank, in the last micro-step.
// grads (num_parameters) FP32. After exchange_finish this rank's slices hold the sum over ranks; without ZeRO-1 all do.
static inline void exchange_bucket(Exchange* x, float* grads) {
    if (x->num_ranks == 1) { return; }
    exchange_turn(x, x->begun++, grads);
}

static inline void exchange_finish(Exchange* x, float* grads) {
    if (x->num_ranks == 1) { return; }
    int buckets = x->shards.num_buckets;
    check(x->begun == buckets, "exchange: %d of %d buckets", x->begun, buckets);
    for (int b = buckets; b < buckets + (exchange_spreads_sums(x) ? 3 : 1); b++) {
        exchange_turn(x, b, grads);
    }
    x->begun = 0;
}

// The loss and gradient norm of the step, over all ranks and on all ranks the same bits; skip when one is not finite.
static inline void exchange_norm(Exchange* x, StepState* state, const float* grads, size_t num_parameters) {
    if (!x->is_sharded) {
        comm_sum(x->comm, x->dev, &state->loss, 1);
        global_norm(x->dev, state, grads, num_parameters);
        return;
    }
    RankNorm* mine = x->norms + x->num_ranks;
    norm_of_slices(x->dev, mine, state, grads, &x->shards, x->rank);
    comm_begin(x->comm, x->dev);
    comm_all_gather(x->comm, x->dev, x->norms, mine, sizeof(RankNorm));
    comm_end(x->comm, x->dev);
    norm_of_ranks(x->dev, state, x->norms, x->num_ranks);
}

// The step is over, `state` is what it left.
static inline void exchange_step_mu(Exchange* x, const StepState* state, size_t num_parameters) {
    if (x->num_ranks == 1 || x->format != GRAD_REDUCE_FP8_ALLREDUCE) { return; }
    x->mu = grad_mu_next(x->mu, state->saturated, num_parameters, state->skip);
}

// ---------------------------------------------------------------------------------------------------------------------
// weights

// Where this rank's slice of a piece lies in its shard.
static inline size_t exchange_shard_at(const Bucket* bucket, const Piece* piece) {
    return bucket->shard_at + piece->at;
}

// `data` (num_ranks, slice_bytes) holds this rank's slice, and is to get all.
static inline CommGather exchange_gather_of(const Exchange* x, void* data, size_t slice_bytes) {
    CommGather gather = {data, (char*)data + (size_t)x->rank * slice_bytes, slice_bytes};
    return gather;
}

// The BF16 parameters that every rank has updated its slices of (embeddings, LayerNorms, biases), to all: pack before
// comm_begin, gather between it and comm_end, unpack after.
static inline void exchange_params_pack(Exchange* x) {
    param_pack(x->dev, (bf16*)x->pool, x->param_pieces, x->num_param_pieces, x->param_chunk, x->rank);
}

static inline bf16* exchange_params_gathered(Exchange* x) {
    return (bf16*)(x->pool + memory_aligned(x->param_chunk * sizeof(bf16)));
}

static inline CommGather exchange_params_gather(Exchange* x) {
    CommGather gather = {exchange_params_gathered(x), x->pool, x->param_chunk * sizeof(bf16)};
    return gather;
}

static inline void exchange_params_unpack(Exchange* x) {
    param_unpack(x->dev, x->param_pieces, exchange_params_gathered(x), x->num_param_pieces, x->param_chunk,
                 x->num_ranks);
}

// values (num_parameters) on the host of rank 0, in flat order = the array of which every rank has its shard (or, not
// sharded, all). Collective; other ranks pass NULL.
static inline void exchange_collect(Exchange* x, float* values, const float* array, size_t num_parameters) {
    if (!x->is_sharded) {
        if (values != NULL) { device_copy_out(x->dev, values, array, num_parameters * sizeof(float)); }
        return;
    }
    size_t ranks = (size_t)x->num_ranks, most = x->pool_bytes / sizeof(float) / ranks / GRAD_BLOCK * GRAD_BLOCK;
    float* host = values != NULL ? (float*)malloc_or_die(x->pool_bytes) : NULL;
    for (int b = 0; b < x->shards.num_buckets; b++) {
        const Bucket* bucket = &x->shards.bucket[b];
        for (size_t start = 0; start < bucket->chunk; start += most) {
            size_t count = bucket->chunk - start < most ? bucket->chunk - start : most;
            comm_begin(x->comm, x->dev);
            comm_all_gather(x->comm, x->dev, x->pool, array + bucket->shard_at + start, count * sizeof(float));
            comm_end(x->comm, x->dev);
            if (values == NULL) { continue; }
            device_copy_out(x->dev, host, x->pool, ranks * count * sizeof(float));
            for (size_t i = 0; i < ranks * count; i += GRAD_BLOCK) {
                ChunkBlock to = chunk_block(bucket, (start + i % count) / GRAD_BLOCK, (int)(i / count));
                memcpy(values + to.offset, host + i, (size_t)to.count * sizeof(float));
            }
        }
    }
    device_sync(x->dev);
    free(host);
}

#endif
