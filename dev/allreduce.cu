// How fast gradients can be reduced over the ranks: the exchanges of --grad-reduce, in buckets as backward finishes
// them (one per layer, then the embeddings), at the sizes of three models. One process per GPU:
//
//     make build/bench/allreduce && mpirun -np 4 build/bench/allreduce [124M] [1.5B] [6.7B] [-fp32] ...
//
// names choose models, and names with a minus leave variants out; without a model all of them run. First it measures
// what everything is compared with, the rate of a large all-to-all. Then, per model and variant:
//
//     ms for all buckets (median, slowest rank), bytes per gradient element on the wire, GB/s that each rank sends,
//     share of the all-to-all rate, largest error against the FP64 sum in units of the sum's mean magnitude
//
// These are the exchanges alone. What a format needs beside them (quantise and sum in FP32 for fp8, pack and unpack for
// bf16) belongs into `Variant.run` of a variant of its own, timed in the same way; `fp8 exchange` sends what fp8 sends,
// E4M3 bytes with an FP32 scale per 256, and is checked byte for byte.
#include "../lib/comm.cuh"

#include "bench.cuh"

enum { REPEATS = 9, MAX_BUCKETS = 64, SCALE_BLOCK = 256, SAMPLES = 4096 };
#define REFERENCE_BYTES ((size_t)1 << 30) // of the all-to-all that measures the rate, over all ranks

typedef struct {
    const char* name;
    size_t layers, channels, positions;
} Size;

static const Size sizes[] = {{"124M", 12, 768, 1024}, {"1.5B", 48, 1600, 1024}, {"6.7B", 32, 4096, 2048}};
enum { VOCABULARY = 50304, NUM_SIZES = sizeof(sizes) / sizeof(sizes[0]) };

// A model's gradients in buckets. Every rank owns `chunk` elements of a bucket, the same number on every rank.
typedef struct {
    Bench bench;
    Comm* comm;
    size_t ranks, rank;
    size_t chunk[MAX_BUCKETS];
    int num_buckets;
    size_t parameters;
    size_t padded; // elements of all buckets, all ranks
    void *send, *recv;
    double all_to_all_rate; // bytes per second and rank
} Run;

typedef struct {
    const char* name;
    CommOp op;
    double bytes_per_element;
    int is_bf16;                                            // the send buffer holds BF16 values, else FP32
    void (*run)(const Run* run, int bucket, size_t before); // `before`: elements of the buckets before it
} Variant;

static void run_bf16(const Run* run, int bucket, size_t before) {
    bf16* recv = (bf16*)run->recv + before / run->ranks;
    comm_reduce_scatter_bf16(run->comm, run->bench.dev, recv, (const bf16*)run->send + before, run->chunk[bucket]);
}

static void run_fp32(const Run* run, int bucket, size_t before) {
    float* recv = (float*)run->recv + before / run->ranks;
    comm_reduce_scatter_fp32(run->comm, run->bench.dev, recv, (const float*)run->send + before, run->chunk[bucket]);
}

// Of n elements: E4M3 bytes, then their blocks' scales.
static size_t fp8_bytes(size_t n) {
    return n + n / SCALE_BLOCK * sizeof(float);
}

static void run_fp8_exchange(const Run* run, int bucket, size_t before) {
    size_t offset = fp8_bytes(before);
    comm_all_to_all(run->comm, run->bench.dev, (char*)run->recv + offset, (const char*)run->send + offset,
                    fp8_bytes(run->chunk[bucket]));
}

static const Variant variants[] = {
    {"fp32 reduce-scatter", COMM_REDUCE_SCATTER_FP32, 4.0, 0, run_fp32},
    {"bf16 reduce-scatter", COMM_REDUCE_SCATTER_BF16, 2.0, 1, run_bf16},
    {"fp8 exchange", COMM_ALL_TO_ALL, 1.0 + 4.0 / SCALE_BLOCK, 0, run_fp8_exchange},
};
enum { NUM_VARIANTS = sizeof(variants) / sizeof(variants[0]) };

static void add_bucket(Run* run, size_t n) {
    size_t chunk = ceil_div(ceil_div(n, run->ranks), SCALE_BLOCK) * SCALE_BLOCK;
    check(run->num_buckets < MAX_BUCKETS, "more than %d buckets", MAX_BUCKETS);
    run->chunk[run->num_buckets++] = chunk;
    run->parameters += n;
    run->padded += chunk * run->ranks;
}

// Seconds of one pass over all buckets: the slowest rank's, by events on the stream that waits for them.
static double pass(const Run* run, const Variant* variant) {
    Device* dev = run->bench.dev;
    cudaEvent_t start, stop;
    cuda_check(cudaEventCreate(&start));
    cuda_check(cudaEventCreate(&stop));
    device_sync(dev);
    comm_barrier(run->comm);
    cuda_check(cudaEventRecord(start, dev->stream));
    comm_begin(run->comm, dev);
    size_t before = 0;
    for (int b = 0; b < run->num_buckets; b++) {
        variant->run(run, b, before);
        before += run->chunk[b] * run->ranks;
    }
    comm_end(run->comm, dev);
    cuda_check(cudaEventRecord(stop, dev->stream));
    device_sync(dev);
    float ms = 0.0f;
    cuda_check(cudaEventElapsedTime(&ms, start, stop));
    cuda_check(cudaEventDestroy(start));
    cuda_check(cudaEventDestroy(stop));
    int64_t least = 0, most = 0;
    comm_host_min_max(run->comm, (int64_t)(ms * 1e6), &least, &most);
    return 1e-9 * (double)most;
}

// Median seconds, after two passes in which NCCL connects.
static double time_passes(const Run* run, const Variant* variant) {
    float seconds[REPEATS];
    for (int i = -2; i < REPEATS; i++) {
        double s = pass(run, variant);
        if (i >= 0) { seconds[i] = (float)s; }
    }
    qsort(seconds, REPEATS, sizeof(float), bench_compare_floats);
    return seconds[REPEATS / 2];
}

// Element i of rank r's send buffer.
static double sent_value(const Variant* variant, size_t r, size_t i) {
    return variant->is_bf16 ? bench_bf16_value((int)r + 1, i) : bench_value((int)r + 1, i);
}

// Largest error of samples of what was received; the summands have mean magnitude 0.8. A bound of every summation
// order is one rounding per addition, of a partial sum.
static double check_sums(Run* run, const Variant* variant) {
    double worst = 0.0, ulp = variant->is_bf16 ? 0x1p-8 : 0x1p-23;
    size_t before = 0;
    for (int b = 0; b < run->num_buckets; b++) {
        size_t chunk = run->chunk[b];
        for (int s = 0; s < SAMPLES / run->num_buckets; s++) {
            size_t i = s == 0 ? chunk - 1 : (size_t)s * 2654435761u % chunk, at = before / run->ranks + i;
            double want = 0.0, magnitude = 0.0;
            for (size_t r = 0; r < run->ranks; r++) {
                double x = sent_value(variant, r, before + run->rank * chunk + i);
                want += x;
                magnitude += fabs(x);
            }
            float got;
            if (variant->is_bf16) {
                bf16_to_host(run->bench.dev, &got, (const bf16*)run->recv + at, 1);
            } else {
                device_copy_out(run->bench.dev, &got, (const float*)run->recv + at, sizeof(got));
            }
            double error = fabs(got - want);
            bench_expect(&run->bench, error <= (double)run->ranks * ulp * magnitude,
                         "%s, bucket %d: [%zu] is %g, want %g", variant->name, b, i, (double)got, want);
            worst = fmax(worst, error / (0.8 * sqrt((double)run->ranks)));
        }
        before += chunk * run->ranks;
    }
    return worst;
}

// The bytes that arrived, by samples of four: they are the bits of the senders' floats.
static void check_exchange(Run* run) {
    size_t before = 0;
    for (int b = 0; b < run->num_buckets; b++) {
        size_t bytes = fp8_bytes(run->chunk[b]), offset = fp8_bytes(before);
        for (int s = 0; s < SAMPLES / run->num_buckets; s++) {
            size_t r = (size_t)s % run->ranks, word = (size_t)s * 2654435761u % (bytes / 4);
            float want = bench_value((int)r + 1, (offset + run->rank * bytes) / 4 + word), got;
            device_copy_out(run->bench.dev, &got, (const char*)run->recv + offset + r * bytes + 4 * word, sizeof(got));
            bench_expect(&run->bench, memcmp(&got, &want, sizeof(got)) == 0,
                         "exchange, bucket %d: word %zu of rank %zu is %g, want %g", b, word, r, (double)got,
                         (double)want);
        }
        before += run->chunk[b] * run->ranks;
    }
}

static void bench_variant(Run* run, const Size* size, const Variant* variant) {
    Device* dev = run->bench.dev;
    size_t send_bytes = (size_t)((double)run->padded * variant->bytes_per_element);
    size_t recv_bytes = variant->op == COMM_ALL_TO_ALL ? send_bytes : send_bytes / run->ranks;
    run->send = device_malloc(dev, send_bytes);
    run->recv = bench_poisoned(&run->bench, recv_bytes);
    if (variant->is_bf16) {
        bench_fill_bf16_kernel<<<2048, 256, 0, dev->stream>>>((bf16*)run->send, run->padded, (int)run->rank + 1);
    } else {
        bench_fill_float_kernel<<<2048, 256, 0, dev->stream>>>((float*)run->send, send_bytes / 4, (int)run->rank + 1);
    }
    cuda_check(cudaGetLastError());
    comm_take_stats(run->comm);
    double seconds = time_passes(run, variant), error = 0.0;
    CommStats stats = comm_take_stats(run->comm);
    double passes = REPEATS + 2, sent = (double)stats.ops[variant->op].bytes / passes;
    double want = (double)send_bytes * (double)(run->ranks - 1) / (double)run->ranks;
    bench_expect(&run->bench, sent == want && stats.bytes == stats.ops[variant->op].bytes,
                 "%s: %.0f bytes were counted for a pass, want %.0f", variant->name, sent, want);
    if (variant->op == COMM_ALL_TO_ALL) {
        check_exchange(run);
    } else {
        error = check_sums(run, variant);
    }
    if (run->rank == 0) {
        double rate = sent / seconds;
        printf("%-6s %-22s %9.3f ms  %5.3f bytes/element  %7.1f GB/s  %5.1f%% of all-to-all  error %.2g\n", size->name,
               variant->name, 1e3 * seconds, sent / (double)run->parameters, 1e-9 * rate,
               100.0 * rate / run->all_to_all_rate, error);
        fflush(stdout);
    }
    device_release(dev, run->send);
    device_release(dev, run->recv);
}

// What one rank sends per second in a large all-to-all; the best of several, since it is a ceiling.
static void measure_all_to_all(Run* run) {
    Run one = *run;
    size_t elements = REFERENCE_BYTES / fp8_bytes(SCALE_BLOCK) * SCALE_BLOCK;
    one.num_buckets = 0;
    one.padded = 0;
    add_bucket(&one, elements);
    one.send = bench_poisoned(&one.bench, fp8_bytes(one.padded));
    one.recv = bench_poisoned(&one.bench, fp8_bytes(one.padded));
    double best = 1e9;
    for (int i = 0; i < REPEATS + 2; i++) {
        best = fmin(best, pass(&one, &variants[NUM_VARIANTS - 1]));
    }
    run->all_to_all_rate = (double)(fp8_bytes(one.chunk[0]) * (run->ranks - 1)) / best;
    if (run->rank == 0) {
        printf("%zu ranks, %s: all-to-all of %zu MiB per rank: %.3f ms, %.1f GB/s sent by each\n", run->ranks,
               device_name(run->bench.dev), fp8_bytes(one.padded) >> 20, 1e3 * best, 1e-9 * run->all_to_all_rate);
        fflush(stdout);
    }
    device_release(run->bench.dev, one.send);
    device_release(run->bench.dev, one.recv);
}

static void check_names(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        int is_known = argv[i][0] == '-';
        for (int m = 0; m < NUM_SIZES; m++) {
            is_known |= strcmp(argv[i], sizes[m].name) == 0;
        }
        check(is_known, "no model '%s': want 124M, 1.5B, 6.7B, or -VARIANT", argv[i]);
    }
}

// 1: a model is wanted when it is named or none is; a variant when no "-name" is the beginning of its name.
static int is_wanted(int argc, char** argv, const char* name, int is_variant) {
    int names_models = 0;
    for (int i = 1; i < argc; i++) {
        if (is_variant && argv[i][0] == '-' && strncmp(name, argv[i] + 1, strlen(argv[i] + 1)) == 0) { return 0; }
        if (!is_variant && strcmp(argv[i], name) == 0) { return 1; }
        names_models |= argv[i][0] != '-';
    }
    return is_variant || !names_models;
}

int main(int argc, char** argv) {
    Run run = {};
    run.comm = comm_create(&argc, &argv);
    run.rank = (size_t)comm_rank(run.comm);
    run.ranks = (size_t)comm_num_ranks(run.comm);
    check_names(argc, argv);
    check(run.ranks > 1, "one rank has nothing to reduce: mpirun -np 2 %s (or more), one GPU for each", argv[0]);
    run.bench.dev = device_create(DeviceOptions{comm_local_rank(run.comm), 0, 0, ATTENTION_AUTO});
    comm_connect(run.comm, run.bench.dev);
    measure_all_to_all(&run);
    for (int m = 0; m < NUM_SIZES; m++) {
        const Size* size = &sizes[m];
        if (!is_wanted(argc, argv, size->name, 0)) { continue; }
        size_t C = size->channels;
        run.num_buckets = 0;
        run.parameters = run.padded = 0;
        for (size_t l = 0; l < size->layers; l++) {
            add_bucket(&run, 12 * C * C + 13 * C);
        }
        add_bucket(&run, (VOCABULARY + size->positions + 2) * C);
        for (int v = 0; v < NUM_VARIANTS; v++) {
            if (is_wanted(argc, argv, variants[v].name, 1)) { bench_variant(&run, size, &variants[v]); }
        }
    }
    int64_t least = 0, failures = 0;
    comm_host_min_max(run.comm, run.bench.failures, &least, &failures);
    if (run.rank == 0) {
        printf("%d values checked per rank, at most %lld wrong on a rank\n", run.bench.checks, (long long)failures);
    }
    comm_free(run.comm);
    device_free(run.bench.dev);
    return failures > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
