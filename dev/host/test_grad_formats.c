// How far a gradient summed over ranks is from the FP64 sum, by wire format: E4M3 in blocks of 128, 256 and 512
// elements and with one scale per tensor, BF16 and FP32. Prints the table of 4 ranks; the row of 256 is what
// grad_quantize and grad_sum of the CPU floor make, to the bit, the other blocks are the same lines with another size.
#define CPU_FLOOR
#include "../../lib/reference.h"
#include "../../lib/rng.h"
#include "unit.h"

enum { N = 1 << 17, MAX_RANKS = 8 };

typedef enum { NORMAL, HEAVY_TAILED, ROWS_OF_MANY_SIZES, NUM_KINDS } Kind;
static const char* const kind_names[NUM_KINDS] = {"normal", "heavy tails", "rows of many sizes"};

// Element i of rank r's gradient. Heavy tails: a normal number times e^(2 normal), kurtosis 3 e^16. Rows: every 1,000
// elements another magnitude, e^(3 normal), the same on all ranks, as the rows of an embedding have.
static float gradient(Kind kind, int r, size_t i) {
    float x = 1e-4f * rng_normal(7, (uint64_t)r, i);
    if (kind == HEAVY_TAILED) { x *= expf(2.0f * rng_normal(7, 100 + (uint64_t)r, i)); }
    if (kind == ROWS_OF_MANY_SIZES) { x *= expf(3.0f * rng_normal(7, 200, i / 1000)); }
    return x;
}

static float* grads_of(Kind kind, int r) {
    float* grads = (float*)malloc_or_die(N * sizeof(float));
    for (size_t i = 0; i < N; i++) {
        grads[i] = gradient(kind, r, i);
    }
    return grads;
}

// sum += grads in E4M3 with a descale per `block` elements. Returns the largest descale; *lost counts the elements that
// became 0 without being it.
static float add_fp8(float* sum, size_t* lost, const float* grads, size_t block) {
    float largest = 0.0f;
    for (size_t start = 0; start < N; start += block) {
        GradBlockScale s = grad_block_scale(amax_of(grads + start, (int)block));
        for (size_t i = start; i < start + block; i++) {
            float value = float_from_e4m3(e4m3_from_float(grads[i] * s.scale));
            sum[i] = fmaf(value, s.descale, sum[i]);
            *lost += value == 0.0f && grads[i] != 0.0f;
        }
        largest = s.descale > largest ? s.descale : largest;
    }
    return largest;
}

typedef struct {
    double relative; // |sum - want| / |want|, Euclidean
    double worst;    // of all elements: |sum - want| over what the format allows it
    double lost;     // share of the contributions that became 0
} SumError;

static SumError error_of(const float* sum, const double* want, const double* allowed) {
    double difference = 0.0, norm = 0.0;
    SumError error = {0.0, 0.0, 0.0};
    for (size_t i = 0; i < N; i++) {
        double d = fabs((double)sum[i] - want[i]);
        difference += d * d;
        norm += want[i] * want[i];
        error.worst = fmax(error.worst, isnan(d) ? INFINITY : d / allowed[i]);
    }
    error.relative = sqrt(difference / norm);
    return error;
}

// What a sum over ranks may be off by, element by element. E4M3 rounds by half an ulp: 2^-4 of the value, or 2^-10 of
// the descale among the subnormals; BF16 by 2^-8; each FP32 addition by 2^-24 of the magnitudes.
static void allow(double* allowed, const double* magnitude, int num_ranks, double relative, double absolute) {
    for (size_t i = 0; i < N; i++) {
        allowed[i] =
            (relative * (1.0 + 0x1p-10) + num_ranks * 0x1p-24) * magnitude[i] + num_ranks * absolute + 0x1p-140;
    }
}

static void check_format(const char* format, Kind kind, int num_ranks, SumError error, double most) {
    if (num_ranks == 4) {
        printf("    %-18s %-18s relative error %.2e, worst element %.2f of its bound, %.5f%% lost\n", kind_names[kind],
               format, error.relative, error.worst, 100.0 * error.lost);
    }
    expect(error.worst <= 1.0, "%s, %s, %d ranks: an element is off by %.2f times its bound", format, kind_names[kind],
           num_ranks, error.worst);
    expect(error.relative <= most && error.relative > 0.0, "%s, %s, %d ranks: relative error %.3g, want at most %.3g",
           format, kind_names[kind], num_ranks, error.relative, most);
}

// Errors of contributions are independent and about uniform within half an ulp: 2^-4 / sqrt(3) = 3.6% in the Euclidean
// norm, whatever the number of ranks, where their gradients are independent, too. With one scale per tensor, most of a
// tensor of rows of many sizes is below the smallest E4M3 number: its worst case is the bound of the elements.
static void test_errors(void) {
    float* sum = (float*)malloc_or_die(N * sizeof(float));
    double* want = (double*)malloc_or_die(3 * N * sizeof(double));
    double *magnitude = want + N, *allowed = want + 2 * N;
    for (int k = 0; k < NUM_KINDS * 3; k++) {
        Kind kind = (Kind)(k / 3);
        int num_ranks = 2 << k % 3;
        float* grads[MAX_RANKS];
        memset(want, 0, 2 * N * sizeof(double));
        for (int r = 0; r < num_ranks; r++) {
            grads[r] = grads_of(kind, r);
            for (size_t i = 0; i < N; i++) {
                want[i] += (double)grads[r][i];
                magnitude[i] += fabs((double)grads[r][i]);
            }
        }
        const size_t blocks[4] = {128, 256, 512, N};
        const char* const names[4] = {"fp8, blocks of 128", "fp8, blocks of 256", "fp8, blocks of 512",
                                      "fp8, per tensor"};
        double lost_of[4];
        for (int b = 0; b < 4; b++) {
            float descale = 0.0f;
            size_t lost = 0;
            memset(sum, 0, N * sizeof(float));
            for (int r = 0; r < num_ranks; r++) {
                float largest = add_fp8(sum, &lost, grads[r], blocks[b]);
                descale = largest > descale ? largest : descale;
            }
            allow(allowed, magnitude, num_ranks, 0x1p-4, 0x1p-10 * (double)descale);
            SumError error = error_of(sum, want, allowed);
            error.lost = lost_of[b] = (double)lost / ((double)N * num_ranks);
            check_format(names[b], kind, num_ranks, error, 0x1p-4 / sqrt(3.0));
        }
        expect(lost_of[0] <= lost_of[1] && lost_of[1] <= lost_of[2] && lost_of[2] <= lost_of[3],
               "%s, %d ranks: lost %g, %g, %g in blocks, %g per tensor", kind_names[kind], num_ranks, lost_of[0],
               lost_of[1], lost_of[2], lost_of[3]);
        memset(sum, 0, N * sizeof(float)); // contributions in BF16, summed in FP32, rounded once: the CPU floor's
        for (int r = 0; r < num_ranks; r++) {
            for (size_t i = 0; i < N; i++) {
                sum[i] += bf16_round(grads[r][i]);
            }
        }
        for (size_t i = 0; i < N; i++) {
            sum[i] = bf16_round(sum[i]);
        }
        allow(allowed, magnitude, num_ranks, 0x1p-8 + 0x1p-8, 0.0);
        check_format("bf16, rounded once", kind, num_ranks, error_of(sum, want, allowed), 0x1p-7);
        memset(sum, 0, N * sizeof(float)); // around a ring, rounded at every hop
        for (int r = 0; r < num_ranks; r++) {
            for (size_t i = 0; i < N; i++) {
                sum[i] = bf16_round(sum[i] + bf16_round(grads[r][i]));
            }
        }
        allow(allowed, magnitude, num_ranks, (num_ranks + 1) * 0x1p-8, 0.0);
        check_format("bf16, at every hop", kind, num_ranks, error_of(sum, want, allowed), num_ranks * 0x1p-8);
        memset(sum, 0, N * sizeof(float));
        for (int r = 0; r < num_ranks; r++) {
            for (size_t i = 0; i < N; i++) {
                sum[i] += grads[r][i];
            }
        }
        allow(allowed, magnitude, num_ranks, 0.0, 0.0);
        check_format("fp32", kind, num_ranks, error_of(sum, want, allowed), num_ranks * 0x1p-24);
        for (int r = 0; r < num_ranks; r++) {
            free(grads[r]);
        }
    }
    free(sum);
    free(want);
}

// The blocks of 256 above are the ops of the floor, with chunks sent from every rank to every rank.
static void test_ops_make_the_same(void) {
    DeviceOptions options;
    memset(&options, 0, sizeof(options));
    options.num_threads = 2;
    Device* dev = device_create(options);
    for (int num_ranks = 1; num_ranks <= MAX_RANKS; num_ranks += num_ranks) {
        Bucket bucket; // one piece of N elements
        memset(&bucket, 0, sizeof(bucket));
        Piece piece = {0, N, slice_elements(N, num_ranks), 0, 0, 0};
        bucket.num_pieces = 1, bucket.piece[0] = piece, bucket.chunk = piece.slice;
        size_t wire = grad_wire_bytes(bucket.chunk), bytes = wire * (size_t)num_ranks;
        size_t lost = 0;
        float* want = (float*)calloc_or_die(N, sizeof(float));
        float* sum = (float*)malloc_or_die(N * sizeof(float));
        uint8_t* sent = (uint8_t*)aligned_alloc(256, bytes * (size_t)num_ranks);
        uint8_t* received = (uint8_t*)aligned_alloc(256, bytes);
        check(sent != NULL && received != NULL, "out of memory in a test");
        for (int r = 0; r < num_ranks; r++) {
            float* grads = grads_of(HEAVY_TAILED, r);
            add_fp8(want, &lost, grads, GRAD_BLOCK);
            grad_quantize(dev, sent + (size_t)r * bytes, grads, &bucket, num_ranks);
            free(grads);
        }
        for (int rank = 0; rank < num_ranks; rank++) {
            for (int r = 0; r < num_ranks; r++) {
                memcpy(received + (size_t)r * wire, sent + (size_t)r * bytes + (size_t)rank * wire, wire);
            }
            grad_sum(dev, sum, received, &bucket, num_ranks, rank);
        }
        for (size_t i = 0; i < N; i++) {
            expect(float_bits(sum[i]) == float_bits(want[i]), "%d ranks: sum[%zu] = %a, want %a", num_ranks, i,
                   (double)sum[i], (double)want[i]);
        }
        free(want);
        free(sum);
        free(sent);
        free(received);
    }
    device_free(dev);
}

int main(void) {
    unit_run(test_errors);
    unit_run(test_ops_make_the_same);
    return unit_report();
}
