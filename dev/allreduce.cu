// How fast gradients are reduced over the ranks, and how exactly: every --grad-reduce as training does it, in buckets
// as backward finishes them (shards.h), at the sizes of three models. One process per GPU:
//
//     make build/bench/allreduce && mpirun -np 4 build/bench/allreduce [124M] [1.5B] [6.7B] [-fp32] ...
//
// names choose models, names with a minus leave variants out; without a model all of them run. The last lines are the
// table in short.
//
//     fp32, bf16      pack, reduce-scatter, unpack the own slices
//     fp8             quantise (a descale per block of 256), all-to-all, sum in FP32 over the own slices
//     fp8-allreduce   amax of all buckets, one max over ranks, then quantise with shared scales, all-reduce, dequantise
//
// Every rank has gradients of its own, with heavy tails (products of three normal numbers), larger in some layers and
// tensors than in others. The sums are checked in sampled blocks: fp8 to the bit, the others within what their
// roundings can do; a wrong one is an error (exit status 1). Then the time of all buckets, the slowest rank's, medians
// of several:
//
//     ms         bucket k + 1 is prepared while bucket k travels, and bucket k is finished while bucket k + 1 travels
//     in turn    one bucket after another: what it takes when nothing overlaps
//     exchange   the collectives alone
//
// with the bytes that each rank sends per gradient element and the rate that ms makes of them, also as a share of a
// large all-to-all's, measured first. Errors are against the FP64 sum over ranks: Euclidean, relative, over all
// samples; and the largest in units of the root mean square of its block's sums. x bf16: how many times as fast as
// bf16.
#include "../lib/comm.cuh"
#include "../lib/grad_reduce.cuh"

#include "bench.cuh"

enum { REPEATS = 9, MAX_ROWS = 32, SAMPLES = 1500 };
#define REFERENCE_BYTES ((size_t)1 << 30) // of the all-to-all that measures the rate, over all ranks

typedef struct {
    const char* name;
    int layers, channels, positions;
} Size;

static const Size sizes[] = {{"124M", 12, 768, 1024}, {"1.5B", 48, 1600, 1024}, {"6.7B", 32, 4096, 2048}};
enum { VOCABULARY = 50304, NUM_SIZES = sizeof(sizes) / sizeof(sizes[0]) };

// One line of the table.
typedef struct {
    const char *size, *variant;
    double seconds, in_turn, exchange, bytes_per_element, rate, error, largest;
} Row;

typedef struct {
    Bench bench;
    Comm* comm;
    int ranks, rank;
    Shards shards;
    size_t parameters;
    float* grads;  // (parameters) of this rank
    void* send[2]; // of buckets by turns: (ranks, chunk) in the variant's format
    void* recv[2]; // what comes back
    float* amaxes; // (num_buckets, BUCKET_PIECES)
    unsigned long long* saturated;
    float mu;
    double all_to_all_rate; // bytes per second and rank
    Row rows[MAX_ROWS];
    int num_rows;
} Run;

// The steps of a variant, for bucket b.
typedef struct {
    const char* name;
    CommOp op;
    void (*begin)(const Run* run, int with_work); // before the first bucket; NULL: nothing
    void (*prepare)(const Run* run, int b);
    void (*exchange)(const Run* run, int b);
    void (*finish)(const Run* run, int b);
} Variant;

static void prepare_fp32(const Run* run, int b) {
    grad_pack_fp32(run->bench.dev, (float*)run->send[b % 2], run->grads, &run->shards.bucket[b], 0, run->ranks);
}
static void exchange_fp32(const Run* run, int b) {
    comm_reduce_scatter_fp32(run->comm, run->bench.dev, (float*)run->recv[b % 2], (const float*)run->send[b % 2],
                             run->shards.bucket[b].chunk);
}
static void finish_fp32(const Run* run, int b) {
    grad_unpack_fp32(run->bench.dev, run->grads, (const float*)run->recv[b % 2], &run->shards.bucket[b], run->rank, 1);
}

static void prepare_bf16(const Run* run, int b) {
    grad_pack_bf16(run->bench.dev, (bf16*)run->send[b % 2], run->grads, &run->shards.bucket[b], 0, run->ranks);
}
static void exchange_bf16(const Run* run, int b) {
    comm_reduce_scatter_bf16(run->comm, run->bench.dev, (bf16*)run->recv[b % 2], (const bf16*)run->send[b % 2],
                             run->shards.bucket[b].chunk);
}
static void finish_bf16(const Run* run, int b) {
    grad_unpack_bf16(run->bench.dev, run->grads, (const bf16*)run->recv[b % 2], &run->shards.bucket[b], run->rank, 1);
}

static void prepare_fp8(const Run* run, int b) {
    grad_quantize(run->bench.dev, (uint8_t*)run->send[b % 2], run->grads, &run->shards.bucket[b], run->ranks);
}
static void exchange_fp8(const Run* run, int b) {
    comm_all_to_all(run->comm, run->bench.dev, run->recv[b % 2], run->send[b % 2],
                    grad_wire_bytes(run->shards.bucket[b].chunk));
}
static void finish_fp8(const Run* run, int b) {
    grad_sum(run->bench.dev, run->grads, (const uint8_t*)run->recv[b % 2], &run->shards.bucket[b], run->ranks,
             run->rank);
}

static void begin_shared(const Run* run, int with_work) {
    for (int b = 0; with_work && b < run->shards.num_buckets; b++) {
        grad_amax(run->bench.dev, run->amaxes + b * BUCKET_PIECES, run->grads, &run->shards.bucket[b]);
    }
    comm_max(run->comm, run->bench.dev, run->amaxes, (size_t)run->shards.num_buckets * BUCKET_PIECES);
}
static void prepare_shared(const Run* run, int b) {
    grad_quantize_shared(run->bench.dev, (e4m3*)run->send[b % 2], run->grads, &run->shards.bucket[b],
                         run->amaxes + b * BUCKET_PIECES, run->mu, run->ranks);
}
static void exchange_shared(const Run* run, int b) {
    comm_all_reduce_e4m3(run->comm, run->bench.dev, (e4m3*)run->send[b % 2],
                         run->shards.bucket[b].chunk * (size_t)run->ranks);
}
static void finish_shared(const Run* run, int b) {
    grad_dequantize_shared(run->bench.dev, run->grads, (const e4m3*)run->send[b % 2], &run->shards.bucket[b],
                           run->amaxes + b * BUCKET_PIECES, run->mu, run->ranks, run->saturated);
}

static const Variant variants[] = {
    {"fp32", COMM_REDUCE_SCATTER_FP32, NULL, prepare_fp32, exchange_fp32, finish_fp32},
    {"bf16", COMM_REDUCE_SCATTER_BF16, NULL, prepare_bf16, exchange_bf16, finish_bf16},
    {"fp8", COMM_ALL_TO_ALL, NULL, prepare_fp8, exchange_fp8, finish_fp8},
    {"fp8-allreduce", COMM_ALL_REDUCE_E4M3, begin_shared, prepare_shared, exchange_shared, finish_shared},
};
enum { NUM_VARIANTS = sizeof(variants) / sizeof(variants[0]) };

// ---------------------------------------------------------------------------------------------------------------------
// gradients

// Element i of the flat arrays of a rank; products only, so host and device have the same bits.
HOST_DEVICE static inline float gradient(int rank, size_t i, float magnitude) {
    float a = bench_value(2 * rank + 1, i), b = bench_value(2 * rank + 2, i);
    return a * b * b * magnitude;
}

// Of a piece: a power of two.
static float magnitude_of(const Piece* piece) {
    return ldexpf(1.0f, -8 - piece->layer % 6 - 2 * (piece->tensor % 3));
}

__global__ void fill_kernel(float* grads, size_t first, size_t n, int rank, float magnitude) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) {
        grads[first + i] = gradient(rank, first + i, magnitude);
    }
}

static void fill_gradients(const Run* run) {
    for (int b = 0; b < run->shards.num_buckets; b++) {
        for (int p = 0; p < run->shards.bucket[b].num_pieces; p++) {
            const Piece* piece = &run->shards.bucket[b].piece[p];
            fill_kernel<<<1024, 256, 0, run->bench.dev->stream>>>(run->grads, piece->offset, piece->n, run->rank,
                                                                  magnitude_of(piece));
            cuda_check(cudaGetLastError());
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the order of the work

typedef enum { OVERLAPPED, IN_TURN, EXCHANGE_ALONE } Order;

// Queues everything for all buckets. Buffers: bucket b + 2 uses those of b, whose finish comes before its prepare.
static void reduce_all(const Run* run, const Variant* variant, Order order) {
    Device* dev = run->bench.dev;
    int n = run->shards.num_buckets;
    if (variant->begin != NULL) { variant->begin(run, order != EXCHANGE_ALONE); }
    if (order == OVERLAPPED) {
        variant->prepare(run, 0);
        comm_begin(run->comm, dev);
        variant->exchange(run, 0);
        for (int b = 0; b < n; b++) {
            if (b + 1 < n) { variant->prepare(run, b + 1); }
            comm_end(run->comm, dev);
            if (b + 1 < n) {
                comm_begin(run->comm, dev);
                variant->exchange(run, b + 1);
            }
            variant->finish(run, b);
        }
        return;
    }
    if (order == EXCHANGE_ALONE) { comm_begin(run->comm, dev); }
    for (int b = 0; b < n; b++) {
        if (order == IN_TURN) {
            variant->prepare(run, b);
            comm_begin(run->comm, dev);
        }
        variant->exchange(run, b);
        if (order == IN_TURN) {
            comm_end(run->comm, dev);
            variant->finish(run, b);
        }
    }
    if (order == EXCHANGE_ALONE) { comm_end(run->comm, dev); }
}

// Seconds of the slowest rank, by events on the device's stream; all ranks begin together.
typedef struct {
    cudaEvent_t start, stop;
} Stopwatch;

static Stopwatch stopwatch_start(const Run* run) {
    Stopwatch watch;
    cuda_check(cudaEventCreate(&watch.start));
    cuda_check(cudaEventCreate(&watch.stop));
    device_sync(run->bench.dev);
    comm_barrier(run->comm);
    cuda_check(cudaEventRecord(watch.start, run->bench.dev->stream));
    return watch;
}

static double stopwatch_stop(const Run* run, Stopwatch watch) {
    float ms = 0.0f;
    cuda_check(cudaEventRecord(watch.stop, run->bench.dev->stream));
    device_sync(run->bench.dev);
    cuda_check(cudaEventElapsedTime(&ms, watch.start, watch.stop));
    cuda_check(cudaEventDestroy(watch.start));
    cuda_check(cudaEventDestroy(watch.stop));
    int64_t least = 0, most = 0;
    comm_host_min_max(run->comm, (int64_t)(ms * 1e6), &least, &most);
    return 1e-9 * (double)most;
}

// Median seconds, after one pass to warm up. What the passes add up does not matter: they take as long for any values.
static double time_order(const Run* run, const Variant* variant, Order order) {
    float seconds[REPEATS];
    for (int i = -1; i < REPEATS; i++) {
        Stopwatch watch = stopwatch_start(run);
        reduce_all(run, variant, order);
        double s = stopwatch_stop(run, watch);
        if (i >= 0) { seconds[i] = (float)s; }
    }
    qsort(seconds, REPEATS, sizeof(float), bench_compare_floats);
    return seconds[REPEATS / 2];
}

// ---------------------------------------------------------------------------------------------------------------------
// checks

// A sampled block of a rank's chunk: what it should have become.
typedef struct {
    ChunkBlock at;
    int piece;
    double sum[GRAD_BLOCK];       // over ranks
    double magnitude[GRAD_BLOCK]; // sum of |g| over ranks
    float fp8[GRAD_BLOCK];        // what codes with a descale per block add up to
} Expected;

static void expect_block(Expected* e, const Run* run, const Bucket* bucket, size_t block, int owner) {
    memset(e, 0, sizeof(*e));
    e->at = chunk_block(bucket, block, owner);
    e->piece = chunk_piece(bucket, block);
    float magnitude = magnitude_of(&bucket->piece[e->piece]), x[GRAD_BLOCK];
    for (int r = 0; r < run->ranks; r++) {
        float amax = 0.0f;
        for (int i = 0; i < e->at.count; i++) {
            x[i] = gradient(r, e->at.offset + (size_t)i, magnitude);
            amax = fmaxf(amax, fabsf(x[i]));
            e->sum[i] += (double)x[i];
            e->magnitude[i] += fabs((double)x[i]);
        }
        GradBlockScale s = grad_block_scale(amax);
        for (int i = 0; i < e->at.count; i++) {
            e->fp8[i] = fmaf(float_from_e4m3(e4m3_from_float(x[i] * s.scale)), s.descale, e->fp8[i]);
        }
    }
}

// What element i of the block may be off by. Half an ulp is 2^-24 of an FP32 value, 2^-8 of a BF16 value, 2^-4 of an
// E4M3 value or 2^-10 of its descale; contributions are rounded once and, but in fp8, partial sums after every
// addition.
static double allowed_error(const Run* run, const Variant* variant, const Expected* e, int i, float descale) {
    double R = run->ranks;
    if (variant->op == COMM_REDUCE_SCATTER_FP32) { return R * 0x1p-24 * e->magnitude[i]; }
    if (variant->op == COMM_REDUCE_SCATTER_BF16) { return (pow(1.0 + 0x1p-8, R) - 1.0) * e->magnitude[i]; }
    double each = pow(1.0 + 0x1p-4 + 0x1p-10, R) - 1.0; // 2^-10: NCCL adds in FP16, rounds to E4M3 then
    return each * e->magnitude[i] + R * (1.0 + each) * 0x1p-10 * (double)descale;
}

// Sampled blocks of the own slices, or of all where every rank has all sums; sets the row's errors, of the worst rank.
static void check_sums(Run* run, const Variant* variant, Row* row) {
    Device* dev = run->bench.dev;
    int is_shared = variant->op == COMM_ALL_REDUCE_E4M3;
    double squares = 0.0, errors = 0.0, largest = 0.0;
    for (int b = 0; b < run->shards.num_buckets; b++) {
        const Bucket* bucket = &run->shards.bucket[b];
        size_t blocks = bucket->chunk / GRAD_BLOCK, samples = SAMPLES / (size_t)run->shards.num_buckets;
        float amaxes[BUCKET_PIECES];
        device_copy_out(dev, amaxes, run->amaxes + b * BUCKET_PIECES, sizeof(amaxes));
        for (size_t s = 0; s < samples; s++) {
            Expected e;
            float got[GRAD_BLOCK], descale = 0.0f;
            int owner = is_shared ? (int)s % run->ranks : run->rank;
            expect_block(&e, run, bucket, s == 0 ? blocks - 1 : s * 2654435761u % blocks, owner);
            if (e.at.count == 0) { continue; }
            if (is_shared) { descale = grad_shared_scale(amaxes[e.piece], run->mu).descale; }
            device_copy_out(dev, got, run->grads + e.at.offset, (size_t)e.at.count * sizeof(float));
            double block_squares = 0.0, worst = 0.0;
            for (int i = 0; i < e.at.count; i++) {
                double error = fabs((double)got[i] - e.sum[i]);
                int is_right = variant->op == COMM_ALL_TO_ALL ? got[i] == e.fp8[i]
                                                              : error <= allowed_error(run, variant, &e, i, descale);
                bench_expect(&run->bench, is_right,
                             "%s %s, rank %d, bucket %d: [%zu] is %.9g, want %.9g (exactly %.9g)", row->size,
                             variant->name, run->rank, b, e.at.offset + (size_t)i, (double)got[i],
                             variant->op == COMM_ALL_TO_ALL ? (double)e.fp8[i] : e.sum[i], e.sum[i]);
                block_squares += e.sum[i] * e.sum[i];
                errors += error * error;
                worst = fmax(worst, error);
            }
            squares += block_squares;
            largest = fmax(largest, worst / sqrt(block_squares / e.at.count));
        }
    }
    int64_t least = 0, most = 0;
    comm_host_min_max(run->comm, (int64_t)(1e15 * sqrt(errors / squares)), &least, &most);
    row->error = 1e-15 * (double)most;
    comm_host_min_max(run->comm, (int64_t)(1e12 * largest), &least, &most);
    row->largest = 1e-12 * (double)most;
}

// Bytes on the wire of one pass, by the definition of the collective.
static double wire_bytes(const Run* run, const Variant* variant) {
    double chunks = 0.0, wire = 0.0, R = run->ranks;
    for (int b = 0; b < run->shards.num_buckets; b++) {
        chunks += (double)run->shards.bucket[b].chunk;
        wire += (double)grad_wire_bytes(run->shards.bucket[b].chunk);
    }
    switch (variant->op) {
    case COMM_REDUCE_SCATTER_FP32:
        return (R - 1.0) * 4.0 * chunks;
    case COMM_REDUCE_SCATTER_BF16:
        return (R - 1.0) * 2.0 * chunks;
    case COMM_ALL_TO_ALL:
        return (R - 1.0) * wire;
    default:
        return 2.0 * (R - 1.0) * chunks;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// rows

static void print_row(const Run* run, const Row* row) {
    if (run->num_rows == 0) {
        printf("%-6s %-14s %9s %9s %9s %10s %8s %13s %9s %9s\n", "model", "--grad-reduce", "ms", "in turn", "exchange",
               "bytes each", "GB/s", "of all-to-all", "error", "largest");
    }
    printf("%-6s %-14s %9.3f %9.3f %9.3f %10.4f %8.1f %12.1f%% %9.2e %9.2e\n", row->size, row->variant,
           1e3 * row->seconds, 1e3 * row->in_turn, 1e3 * row->exchange, row->bytes_per_element, 1e-9 * row->rate,
           100.0 * row->rate / run->all_to_all_rate, row->error, row->largest);
    fflush(stdout);
}

static void print_table(const Run* run) {
    printf("\n%-6s %-14s %9s %8s %9s\n", "model", "--grad-reduce", "ms", "x bf16", "error");
    for (int i = 0; i < run->num_rows; i++) {
        const Row* row = &run->rows[i];
        char times[32] = "-"; // without bf16 there is nothing to compare with
        for (int k = 0; k < run->num_rows; k++) {
            const Row* other = &run->rows[k];
            if (other->size == row->size && strcmp(other->variant, "bf16") == 0) {
                snprintf(times, sizeof(times), "%.2f", other->seconds / row->seconds);
            }
        }
        printf("%-6s %-14s %9.3f %8s %9.2e\n", row->size, row->variant, 1e3 * row->seconds, times, row->error);
    }
}

static void bench_variant(Run* run, const Size* size, const Variant* variant) {
    Device* dev = run->bench.dev;
    check(run->num_rows < MAX_ROWS, "more than %d rows", MAX_ROWS);
    Row row = {};
    row.size = size->name, row.variant = variant->name;
    fill_gradients(run);
    device_zero(dev, run->saturated, sizeof(unsigned long long));
    for (int i = 0; i < 2; i++) {
        bench_poison(&run->bench, run->send[i], 4 * run->shards.largest_chunk * (size_t)run->ranks);
        bench_poison(&run->bench, run->recv[i], 4 * run->shards.largest_chunk * (size_t)run->ranks);
    }
    device_sync(dev);
    comm_take_stats(run->comm);
    reduce_all(run, variant, OVERLAPPED);
    device_sync(dev);
    double sent = (double)comm_take_stats(run->comm).ops[variant->op].bytes, want = wire_bytes(run, variant);
    bench_expect(&run->bench, fabs(sent - want) <= run->shards.num_buckets, "%s: %.0f bytes were counted, want %.0f",
                 variant->name, sent, want); // a rounding of 1 byte per collective
    check_sums(run, variant, &row);
    unsigned long long saturated = 0;
    device_copy_out(dev, &saturated, run->saturated, sizeof(saturated));
    bench_expect(&run->bench, (double)saturated <= GRAD_MU_SHARE * (double)run->parameters,
                 "%s: %llu elements are saturated", variant->name, saturated);
    row.seconds = time_order(run, variant, OVERLAPPED);
    row.in_turn = time_order(run, variant, IN_TURN);
    row.exchange = time_order(run, variant, EXCHANGE_ALONE);
    row.bytes_per_element = sent / (double)run->parameters;
    row.rate = sent / row.seconds;
    if (run->rank == 0) { print_row(run, &row); }
    run->rows[run->num_rows++] = row;
}

static void check_names(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        int is_known = 0;
        for (int m = 0; m < NUM_SIZES; m++) {
            is_known |= strcmp(argv[i], sizes[m].name) == 0;
        }
        for (int v = 0; v < NUM_VARIANTS; v++) {
            is_known |= argv[i][0] == '-' && strcmp(argv[i] + 1, variants[v].name) == 0;
        }
        check(is_known, "what is '%s'? Want 124M, 1.5B, 6.7B, -fp32, -bf16, -fp8, -fp8-allreduce", argv[i]);
    }
}

// 1: a model is wanted when it is named or none is.
static int wants_size(int argc, char** argv, const Size* size) {
    int names_models = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], size->name) == 0) { return 1; }
        names_models |= argv[i][0] != '-';
    }
    return !names_models;
}

// 1: a variant is wanted unless "-name" says otherwise.
static int wants_variant(int argc, char** argv, const Variant* variant) {
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-' && strcmp(argv[i] + 1, variant->name) == 0) { return 0; }
    }
    return 1;
}

// All variants of a model.
static void bench_size(Run* run, const Size* size, int argc, char** argv) {
    Device* dev = run->bench.dev;
    GptConfig config = {};
    config.max_seq_len = size->positions, config.padded_vocab_size = VOCABULARY;
    config.num_layers = size->layers, config.channels = size->channels;
    ParameterTable table = parameter_table(config);
    run->shards = shards_create(&table, run->ranks);
    run->parameters = table.num_parameters;
    run->grads = (float*)device_malloc(dev, run->parameters * sizeof(float));
    size_t amaxes = (size_t)run->shards.num_buckets * BUCKET_PIECES * sizeof(float);
    run->amaxes = (float*)device_malloc(dev, amaxes);
    device_zero(dev, run->amaxes, amaxes); // the last bucket has fewer pieces
    run->saturated = (unsigned long long*)device_malloc(dev, sizeof(unsigned long long));
    for (int i = 0; i < 2; i++) {
        run->send[i] = device_malloc(dev, 4 * run->shards.largest_chunk * (size_t)run->ranks);
        run->recv[i] = device_malloc(dev, 4 * run->shards.largest_chunk * (size_t)run->ranks);
    }
    for (int v = 0; v < NUM_VARIANTS; v++) {
        if (wants_variant(argc, argv, &variants[v])) { bench_variant(run, size, &variants[v]); }
    }
    void* pointers[] = {run->grads,   run->amaxes,  run->saturated, run->send[0],
                        run->send[1], run->recv[0], run->recv[1]};
    for (size_t i = 0; i < sizeof(pointers) / sizeof(pointers[0]); i++) {
        device_release(dev, pointers[i]);
    }
    shards_free(&run->shards);
}

// What one rank sends per second in a large all-to-all; the best of several, since it is a ceiling.
static void measure_all_to_all(Run* run) {
    Device* dev = run->bench.dev;
    size_t ranks = (size_t)run->ranks, bytes = REFERENCE_BYTES / ranks;
    void *send = bench_poisoned(&run->bench, bytes * ranks), *recv = bench_poisoned(&run->bench, bytes * ranks);
    double best = 1e9;
    for (int i = 0; i < REPEATS + 2; i++) {
        Stopwatch watch = stopwatch_start(run);
        comm_begin(run->comm, dev);
        comm_all_to_all(run->comm, dev, recv, send, bytes);
        comm_end(run->comm, dev);
        best = fmin(best, stopwatch_stop(run, watch));
    }
    run->all_to_all_rate = (double)(bytes * (ranks - 1)) / best;
    if (run->rank == 0) {
        printf("%d ranks, %s: all-to-all of %zu MiB per rank: %.3f ms, %.1f GB/s sent by each\n", run->ranks,
               device_name(dev), bytes * ranks >> 20, 1e3 * best, 1e-9 * run->all_to_all_rate);
        fflush(stdout);
    }
    device_release(dev, send);
    device_release(dev, recv);
}

int main(int argc, char** argv) {
    Run run = {};
    run.comm = comm_create(&argc, &argv);
    run.rank = comm_rank(run.comm);
    run.ranks = comm_num_ranks(run.comm);
    check_names(argc, argv);
    check(run.ranks > 1, "one rank has nothing to reduce: mpirun -np 2 %s (or more), one GPU for each", argv[0]);
    run.mu = 1.0f / (float)run.ranks; // no sum saturates
    run.bench.dev = device_create(DeviceOptions{comm_local_rank(run.comm), 0, 0, ATTENTION_AUTO});
    comm_connect(run.comm, run.bench.dev);
    measure_all_to_all(&run);
    for (int m = 0; m < NUM_SIZES; m++) {
        if (wants_size(argc, argv, &sizes[m])) { bench_size(&run, &sizes[m], argc, argv); }
    }
    int64_t least = 0, failures = 0;
    comm_host_min_max(run.comm, run.bench.failures, &least, &failures);
    if (run.rank == 0) {
        print_table(&run);
        printf("%d values checked per rank, at most %lld wrong on a rank\n", run.bench.checks, (long long)failures);
    }
    comm_free(run.comm);
    device_free(run.bench.dev);
    return failures > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
