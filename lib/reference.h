// Every op of the model on the CPU, forward and backward: the floor that `make cpu` trains on, and the truth that GPU
// kernels are compared with. The contract of each op (shapes, formats, what is accumulated) is its prototype in
// floor.h; here stand the formulas and the CPU's reasons.
//
//   numerics  FP32 arithmetic; a bf16 store rounds unless dev->fp32; FP8 goes through fp8.h. What is quantised is the
//             FP32 value where the op computes one, before any BF16 rounding of it.
//   sums      in blocks of fixed size, in fixed order: neither the number of threads nor its timing changes a bit.
//   speed     loops that gcc vectorises (-O3 -march=native -fopenmp; -fno-math-errno -fno-trapping-math help), one
//             packed, register-tiled matrix product under the linears and under attention.
//
// Whoever includes this inside a namespace (the GPU test does) includes what device_cpu.h names before it, outside.
#ifndef REFERENCE_H
#define REFERENCE_H

#include "device_cpu.h"
#include "grad_mu.h"

// ---------------------------------------------------------------------------------------------------------------------
// elementary functions, written so that loops over them vectorise

// e^x to 1e-7 relative for x in [-87, 88]; beyond, the value at the end (1.6e-38, 1.7e38). NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series (next term below 6e-9), 2^n by its exponent bits.
static inline float exp_f32(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f; // 1.5 * 2^23: n in the low bits of the mantissa
    float n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f; // exact: ln 2 in two parts, the first with few bits
    r = r + n * 2.12194440e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * bits_float((float_bits(shifted) + 127u) << 23);
}

// gelu(u) and its slope. 0.5 (1 + tanh(z)) = 1 / (1 + e^-2z) =: s, which keeps its digits for negative u, too.
//   gelu = u s        gelu' = s + 2 u s (1 - s) z'        z = sqrt(2/pi) (u + 0.044715 u^3)
// Beyond |u| = 30, where s is 0 or 1 already, h takes the place of u: u^3 cannot overflow.
static inline void gelu_and_slope(float u, float* gelu, float* slope) {
    const float c = 0.7978845608f; // sqrt(2/pi)
    float h = u < -30.0f ? -30.0f : u;
    h = h > 30.0f ? 30.0f : h;
    float z = c * (h + 0.044715f * h * h * h);
    float e = exp_f32(-2.0f * z);
    float s = 1.0f / (1.0f + e);
    *gelu = u * s;
    *slope = s + 2.0f * h * s * (e * s) * (c * (1.0f + 3.0f * 0.044715f * h * h));
}

#define SUM_BLOCK 1024 // longest run of plain FP32 additions (per SIMD lane, shorter still)

static inline float sum_of(const float* x, int n) {
    float total = 0.0f;
    for (int start = 0; start < n; start += SUM_BLOCK) {
        int end = n - start < SUM_BLOCK ? n : start + SUM_BLOCK;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int i = start; i < end; i++) {
            sum += x[i];
        }
        total += sum;
    }
    return total;
}

// Largest |x| that keeps NaN; see amax_raised.
static inline float amax_of(const float* x, int n) {
    uint32_t amax = 0;
#pragma omp simd reduction(max : amax)
    for (int i = 0; i < n; i++) {
        uint32_t bits = float_bits(x[i]) & 0x7FFFFFFFu;
        amax = bits > amax ? bits : amax;
    }
    return bits_float(amax);
}

// ---------------------------------------------------------------------------------------------------------------------
// producers: an op that makes a (rows, cols) tensor row by row, written in every form somebody needs

typedef enum { FORMAT_E4M3, FORMAT_E5M2 } Fp8Format;

// E4M3Tensor and E5M2Tensor, seen alike: on the CPU both hold bytes.
typedef struct {
    float* wide;         // (rows, cols) or NULL
    uint8_t* data;       // (rows, cols) or NULL
    uint8_t* transposed; // (cols, rows) or NULL
    ScaleSlot* slot;
    ScaleRecipe recipe;
    int measure_first, record;
    Fp8Format format;
} RowOutput;

static inline RowOutput row_output_e4m3(E4m3Tensor y) {
    RowOutput out = {y.wide, y.data, y.transposed, y.slot, y.recipe, y.measure_first, y.record, FORMAT_E4M3};
    return out;
}

static inline RowOutput row_output_e5m2(E5m2Tensor y) {
    RowOutput out = {y.wide, y.data, y.transposed, y.slot, y.recipe, y.measure_first, y.record, FORMAT_E5M2};
    return out;
}

// MEASURE computes the values and touches nothing else; WRITE also writes what the op keeps beside them.
typedef enum { PASS_MEASURE, PASS_WRITE } Pass;

// One row of an op: values (cols) = the FP32 results. In PASS_WRITE also `sums`, (num_sums, cols) row after row: add
// this row's contribution to each of the op's column sums.
typedef void (*RowFunction)(const void* op, int row, float* values, float* sums, Pass pass);

// A producer: the function, its arguments, and the column sums it makes.
typedef struct {
    const char* name; // for error lines
    RowFunction function;
    const void* op;
    int num_sums;
    float* sums[REDUCTION_SUMS]; // (cols) each, +=; NULL: not wanted
} Producer;

#define TILE_ROWS 32 // rows that are transposed together, and summed before they meet other rows

static inline void encode_row(uint8_t* codes, const float* values, int n, float scale, Fp8Format format) {
    if (format == FORMAT_E4M3) {
#pragma omp simd
        for (int i = 0; i < n; i++) {
            codes[i] = e4m3_from_float(values[i] * scale);
        }
    } else {
#pragma omp simd
        for (int i = 0; i < n; i++) {
            codes[i] = e5m2_from_float(values[i] * scale);
        }
    }
}

// Transpose 8 x 8 bytes: byte c of line[r] becomes byte r of line[c]. Swaps quadrants, then pairs, then single bytes.
static inline void transpose_8x8(uint64_t line[8]) {
    const uint64_t masks[3] = {0x00000000FFFFFFFFu, 0x0000FFFF0000FFFFu, 0x00FF00FF00FF00FFu};
    for (int stage = 0; stage < 3; stage++) {
        int distance = 4 >> stage, shift = 8 * distance;
        for (int i = 0; i < 8; i++) {
            if (i & distance) { continue; }
            uint64_t swapped = ((line[i] >> shift) ^ line[i + distance]) & masks[stage];
            line[i + distance] ^= swapped;
            line[i] ^= swapped << shift;
        }
    }
}

// transposed[c * rows + r] = tile[r * cols + c] for r < num_rows <= TILE_ROWS. Blocks of 8 x 8 in 64-bit registers:
// byte by byte, columns at a power-of-two distance evict each other from L1.
static inline void transpose_tile(uint8_t* transposed, const uint8_t* tile, int num_rows, int rows, int cols) {
    int whole_cols = cols / 8 * 8, whole_rows = num_rows / 8 * 8;
    for (int c = 0; c < whole_cols; c += 8) {
        for (int r = 0; r < whole_rows; r += 8) {
            uint64_t line[8]; // little-endian: byte c of a line is column c
            for (int i = 0; i < 8; i++) {
                memcpy(&line[i], tile + (size_t)(r + i) * cols + c, 8);
            }
            transpose_8x8(line);
            for (int i = 0; i < 8; i++) {
                memcpy(transposed + (size_t)(c + i) * rows + r, &line[i], 8);
            }
        }
    }
    for (int c = 0; c < cols; c++) {
        for (int r = c < whole_cols ? whole_rows : 0; r < num_rows; r++) {
            transposed[(size_t)c * rows + r] = tile[(size_t)r * cols + c];
        }
    }
}

static inline void add_to(float* to, const float* from, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        to[i] += from[i];
    }
}

// Rows per chunk of a two-stage sum: whole tiles, at most REDUCTION_CHUNKS chunks. A function of the shape alone.
static inline int chunk_rows_for(int rows) {
    int per_chunk = (rows + REDUCTION_CHUNKS - 1) / REDUCTION_CHUNKS;
    return (int)round_up((size_t)per_chunk, TILE_ROWS);
}

// Rows [start, end) of one chunk, tile by tile. Returns max |value|. chunk_sums: (num_sums, cols), written.
static inline float produce_chunk(Device* dev, RowOutput out, Producer producer, int start, int end, int rows, int cols,
                                  float scale, float* chunk_sums, Pass pass) {
    size_t num_sums = (size_t)producer.num_sums * (size_t)cols;
    size_t floats = round_up((size_t)cols, 16);
    char* scratch = (char*)cpu_scratch(dev, cpu_thread_index(),
                                       (floats + num_sums) * sizeof(float) + (size_t)TILE_ROWS * (size_t)cols);
    float* values = (float*)scratch;
    float* tile_sums = values + floats;
    uint8_t* tile_scratch = (uint8_t*)(tile_sums + num_sums);
    int fp8 = out.data != NULL || out.transposed != NULL;
    float amax = 0.0f;
    if (pass == PASS_WRITE && num_sums > 0) { memset(chunk_sums, 0, num_sums * sizeof(float)); }
    for (int tile_start = start; tile_start < end; tile_start += TILE_ROWS) {
        int tile_end = end - tile_start < TILE_ROWS ? end : tile_start + TILE_ROWS;
        uint8_t* tile = out.data != NULL ? out.data + (size_t)tile_start * cols : tile_scratch;
        memset(tile_sums, 0, num_sums * sizeof(float));
        for (int row = tile_start; row < tile_end; row++) {
            producer.function(producer.op, row, values, tile_sums, pass);
            if (fp8) { amax = amax_raised(amax, amax_of(values, cols)); }
            if (pass == PASS_MEASURE) { continue; }
            if (fp8) { encode_row(tile + (size_t)(row - tile_start) * cols, values, cols, scale, out.format); }
            if (out.wide != NULL) {
                float* wide = out.wide + (size_t)row * cols;
#pragma omp simd
                for (int c = 0; c < cols; c++) {
                    wide[c] = bf16_stored(dev, values[c]);
                }
            }
        }
        if (pass == PASS_MEASURE) { continue; }
        if (out.transposed != NULL) {
            transpose_tile(out.transposed + tile_start, tile, tile_end - tile_start, rows, cols);
        }
        add_to(chunk_sums, tile_sums, num_sums);
    }
    return amax;
}

// One pass over all rows, chunks in parallel; returns max |value|. partials: (chunks, num_sums, cols).
static inline float produce_pass(Device* dev, RowOutput out, Producer producer, int rows, int cols, float scale,
                                 float* partials, Pass pass) {
    int chunk_rows = chunk_rows_for(rows), chunks = (rows + chunk_rows - 1) / chunk_rows;
    float amaxes[REDUCTION_CHUNKS];
#pragma omp parallel for schedule(static) num_threads(cpu_threads_for(dev, 1e-3 * rows * cols))
    for (int chunk = 0; chunk < chunks; chunk++) {
        int start = chunk * chunk_rows, end = rows - start < chunk_rows ? rows : start + chunk_rows;
        float* chunk_sums = partials == NULL ? NULL : partials + (size_t)chunk * producer.num_sums * cols;
        amaxes[chunk] = produce_chunk(dev, out, producer, start, end, rows, cols, scale, chunk_sums, pass);
    }
    float amax = 0.0f;
    for (int chunk = 0; chunk < chunks; chunk++) {
        amax = amax_raised(amax, amaxes[chunk]);
    }
    return amax;
}

// Run a producer: measure if asked, then write every form, the amax, the descale, and add up the column sums.
static inline void produce(Device* dev, RowOutput out, Producer producer, int rows, int cols) {
    check(rows > 0 && cols > 0, "%s: (rows, cols) = (%d, %d), want both positive", producer.name, rows, cols);
    int fp8 = out.data != NULL || out.transposed != NULL;
    check(!fp8 || out.slot != NULL, "%s: FP8 output without a scale slot", producer.name);
    size_t wanted = (size_t)producer.num_sums * REDUCTION_CHUNKS * (size_t)cols * sizeof(float);
    check(dev->workspace_bytes >= wanted, "%s: workspace has %zu bytes, want %zu (reduction_workspace_bytes)",
          producer.name, dev->workspace_bytes, wanted);
    float* partials = producer.num_sums > 0 ? (float*)dev->workspace : NULL;
    if (fp8 && out.measure_first) {
        out.slot->jit_amax = produce_pass(dev, out, producer, rows, cols, 0.0f, NULL, PASS_MEASURE);
        scale_slot_set_from_measured(out.slot, out.recipe);
    }
    float scale = fp8 ? out.slot->scale : 0.0f;
    float amax = produce_pass(dev, out, producer, rows, cols, scale, partials, PASS_WRITE);
    if (fp8) {
        out.slot->descale = 1.0f / scale;
        if (out.record) { out.slot->amax = amax_raised(out.slot->amax, amax); }
    }
    int chunk_rows = chunk_rows_for(rows), chunks = (rows + chunk_rows - 1) / chunk_rows;
    for (int s = 0; s < producer.num_sums; s++) {
        if (producer.sums[s] == NULL) { continue; }
        float* total = partials + (size_t)s * cols; // of chunk 0: the others join it, so dout is touched once
        for (int chunk = 1; chunk < chunks; chunk++) {
            add_to(total, partials + ((size_t)chunk * producer.num_sums + s) * cols, (size_t)cols);
        }
        add_to(producer.sums[s], total, (size_t)cols);
    }
}

static inline Producer producer_of(const char* name, RowFunction function, const void* op) {
    Producer producer = {name, function, op, 0, {NULL, NULL, NULL}};
    return producer;
}

// ---------------------------------------------------------------------------------------------------------------------
// matrix product

// One operand of C (M, N) = A (M, K) . B (K, N), seen as lines (rows of A, columns of B) along k:
// element k of line i is at i * line + k * step. Exactly one of the two forms is set.
typedef struct {
    const float* values;  // bf16 values, or
    const uint8_t* codes; // FP8 codes
    const float* table;   // (256) code -> value
    size_t line, step;    // one of them is 1
} Operand;

static inline Operand operand_values(const float* values, size_t line, size_t step) {
    Operand operand = {values, NULL, NULL, line, step};
    return operand;
}

static inline Operand operand_codes(const uint8_t* codes, const float* table, size_t line, size_t step) {
    Operand operand = {NULL, codes, table, line, step};
    return operand;
}

// Register tile TILE_M x TILE_N of the micro-kernel, in vectors of VECTOR floats: 16 of 32 AVX-512 or 12 of 16 AVX2
// registers hold sums. GNU vectors because gcc 12 keeps plain arrays in registers for some tile shapes only.
// One core of an EPYC 9004: 116 GFLOP/s (8 x 32, AVX-512), 106 (6 x 16, AVX2).
#ifdef __AVX512F__
#define VECTOR 16
#define TILE_M 8
#define TILE_N 32
#else
#define VECTOR 8
#define TILE_M 6
#define TILE_N 16
#endif
typedef float VectorF32 __attribute__((vector_size(VECTOR * 4), aligned(4), may_alias));

#define BLOCK_K 256  // k's summed in registers before they are added to C: bounds the FP32 chain, and B's panel to L1
#define BLOCK_N 1024 // columns whose B panels all threads share, over
#define PANEL_K 2048 // at most so many k's (8 MiB): packed at once, so that threads meet seldom
#define BLOCK_M 96   // most rows of one task; a multiple of both TILE_M

// Lines [i, i + n) along k [k0, k0 + count) into panels of `width` lines: panel[k * width + line]. The last panel is
// filled up with zeros. Panels follow each other at panel_stride floats.
static inline void pack_panels(float* panels, size_t panel_stride, Operand from, int width, int i, int n, int k0,
                               int count) {
    for (int first = 0; first < n; first += width, panels += panel_stride) {
        int lines = n - first < width ? n - first : width;
        size_t start = (size_t)(i + first) * from.line + (size_t)k0 * from.step;
        if (lines < width) { memset(panels, 0, (size_t)count * width * sizeof(float)); }
        if (from.line == 1) { // contiguous across the panel
            for (int k = 0; k < count; k++, start += from.step) {
                for (int l = 0; l < lines; l++) {
                    panels[k * width + l] = from.codes ? from.table[from.codes[start + l]] : from.values[start + l];
                }
            }
        } else { // contiguous along k: eight k's of every line at a time, so that the panel's rows stay in L1
            for (int block = 0; block < count; block += 8) {
                int ks = count - block < 8 ? count - block : 8;
                for (int l = 0; l < lines; l++) {
                    size_t at = start + (size_t)l * from.line + (size_t)block * from.step;
                    float* to = panels + (size_t)block * width + l;
                    for (int k = 0; k < ks; k++, at += from.step) {
                        to[k * width] = from.codes ? from.table[from.codes[at]] : from.values[at];
                    }
                }
            }
        }
    }
}

// sums (TILE_M, TILE_N) = panel a . panel b over `count` k's
static inline void micro_kernel(float* sums, const float* a, const float* b, int count) {
    VectorF32 acc[TILE_M][TILE_N / VECTOR];
    memset(acc, 0, sizeof(acc));
    for (int k = 0; k < count; k++) {
        VectorF32 bk[TILE_N / VECTOR];
        for (int j = 0; j < TILE_N / VECTOR; j++) {
            bk[j] = *(const VectorF32*)(b + k * TILE_N + j * VECTOR);
        }
        for (int i = 0; i < TILE_M; i++) {
            for (int j = 0; j < TILE_N / VECTOR; j++) {
                acc[i][j] += a[k * TILE_M + i] * bk[j];
            }
        }
    }
    memcpy(sums, acc, sizeof(acc));
}

// What happens to a block's sums: c = alpha * sums, plus c if `add`; then plus bias and rounded if `finish`.
typedef struct {
    float alpha;
    const float* bias; // (N) or NULL
    int add;
    int finish;
    int round; // to BF16, when finished
} Epilogue;

static inline void store_rows(float* c, size_t stride, const float* sums, int m, int n, const float* bias,
                              Epilogue epilogue) {
    for (int i = 0; i < m; i++, c += stride, sums += TILE_N) {
        float values[TILE_N];
        for (int j = 0; j < n; j++) {
            values[j] = epilogue.alpha * sums[j] + (epilogue.add ? c[j] : 0.0f);
        }
        for (int j = 0; epilogue.finish && bias != NULL && j < n; j++) {
            values[j] += bias[j];
        }
        for (int j = 0; j < n; j++) {
            c[j] = epilogue.finish && epilogue.round ? bf16_round(values[j]) : values[j];
        }
    }
}

static inline void store_tile(float* c, size_t stride, const float* sums, int m, int n, const float* bias,
                              Epilogue epilogue) {
    if (n == TILE_N) {
        store_rows(c, stride, sums, m, TILE_N, bias, epilogue); // a constant length: whole vectors
    } else {
        store_rows(c, stride, sums, m, n, bias, epilogue);
    }
}

// c (m, n) from packed panels over `count` k's; B's panel stays in L1 while A's pass by.
static inline void multiply_panels(float* c, size_t stride, const float* a, size_t a_stride, const float* b,
                                   size_t b_stride, int m, int n, int count, Epilogue epilogue) {
    float sums[TILE_M * TILE_N];
    for (int j = 0; j < n; j += TILE_N) {
        const float* b_panel = b + (size_t)(j / TILE_N) * b_stride;
        for (int i = 0; i < m; i += TILE_M) {
            micro_kernel(sums, a + (size_t)(i / TILE_M) * a_stride, b_panel, count);
            store_tile(c + (size_t)i * stride + j, stride, sums, m - i < TILE_M ? m - i : TILE_M,
                       n - j < TILE_N ? n - j : TILE_N, epilogue.bias ? epilogue.bias + j : NULL, epilogue);
        }
    }
}

typedef struct {
    float* c; // (M, N)
    Operand a, b;
    int M, N, K;
    Epilogue epilogue;
} Product;

// Rows [i, i + m), columns [j, j + n) of a product over k's [k, k + panel_k), whose B panels are packed.
static inline void product_task(Device* dev, const Product* p, const float* b_panels, int i, int m, int j, int k,
                                int panel_k) {
    float* a_panels = (float*)cpu_scratch(dev, cpu_thread_index(), (size_t)BLOCK_M * BLOCK_K * sizeof(float));
    int n = p->N - j < BLOCK_N ? p->N - j : BLOCK_N;
    for (int block = 0; block < panel_k; block += BLOCK_K) {
        int count = panel_k - block < BLOCK_K ? panel_k - block : BLOCK_K;
        Epilogue step = p->epilogue;
        step.bias = step.bias ? step.bias + j : NULL;
        step.add = step.add || k + block > 0;
        step.finish = k + block + count == p->K;
        pack_panels(a_panels, (size_t)TILE_M * count, p->a, TILE_M, i, m, k + block, count);
        multiply_panels(p->c + (size_t)i * p->N + j, (size_t)p->N, a_panels, (size_t)TILE_M * count,
                        b_panels + (size_t)block * TILE_N, (size_t)TILE_N * panel_k, m, n, count, step);
    }
}

// c = alpha a . b (+ c if epilogue.add) + bias, rounded if epilogue.round. Partial sums over BLOCK_K k's are FP32 and
// meet in c, whose storage is FP32 for bf16 values, too.
static inline void matrix_product(Device* dev, const Product* p) {
    int num_threads = cpu_threads_for(dev, 2e-5 * p->M * p->N * p->K);
    int rows_per_task = (int)round_up((size_t)(p->M + 4 * num_threads - 1) / (4 * (size_t)num_threads), TILE_M);
    rows_per_task = rows_per_task < BLOCK_M ? rows_per_task : BLOCK_M;
    size_t panel_cols = round_up((size_t)(p->N < BLOCK_N ? p->N : BLOCK_N), TILE_N);
    size_t panel_floats = panel_cols * (size_t)(p->K < PANEL_K ? p->K : PANEL_K);
    float* b_panels = (float*)cpu_scratch(dev, dev->num_threads, panel_floats * sizeof(float));
#pragma omp parallel num_threads(num_threads)
    for (int j = 0; j < p->N; j += BLOCK_N) {
        int n = p->N - j < BLOCK_N ? p->N - j : BLOCK_N;
        for (int k = 0; k < p->K; k += PANEL_K) {
            int panel_k = p->K - k < PANEL_K ? p->K - k : PANEL_K;
#pragma omp for schedule(static)
            for (int col = 0; col < n; col += TILE_N) {
                pack_panels(b_panels + (size_t)col * panel_k, 0, p->b, TILE_N, j + col,
                            n - col < TILE_N ? n - col : TILE_N, k, panel_k);
            }
#pragma omp for schedule(dynamic)
            for (int i = 0; i < p->M; i += rows_per_task) {
                int m = p->M - i < rows_per_task ? p->M - i : rows_per_task;
                product_task(dev, p, b_panels, i, m, j, k, panel_k);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// embedding

void embedding_forward(Device* dev, bf16* out, const int* tokens, const bf16* wte, const bf16* wpe, int B, int T,
                       int C) {
    cost_embedding_forward(dev, B, T, C);
#pragma omp parallel for schedule(static) num_threads(cpu_threads_for(dev, 2e-4 * B * T * C))
    for (int row = 0; row < B * T; row++) {
        const float* token = wte + (size_t)tokens[row] * C;
        const float* position = wpe + (size_t)(row % T) * C;
        float* to = out + (size_t)row * C;
#pragma omp simd
        for (int c = 0; c < C; c++) {
            to[c] = bf16_stored(dev, token[c] + position[c]);
        }
    }
}

// to (C) += sum over i < n of rows[i], where row i is from + at(i) * C; TILE_ROWS at a time, so that the sum over a
// frequent token is not one long chain. `index` (n) or NULL: then row i is first + i * step. sum: scratch (C)
static inline void sum_rows(float* to, const float* from, const int* index, int first, int step, int n, int C,
                            float* sum) {
    for (int start = 0; start < n; start += TILE_ROWS) {
        int end = n - start < TILE_ROWS ? n : start + TILE_ROWS;
        memset(sum, 0, (size_t)C * sizeof(float));
        for (int i = start; i < end; i++) {
            add_to(sum, from + (size_t)(index ? index[i] : first + i * step) * C, (size_t)C);
        }
        add_to(to, sum, (size_t)C);
    }
}

void embedding_backward(Device* dev, float* dwte, float* dwpe, const bf16* dout, TokenIndex index, int B, int T,
                        int C) {
    cost_embedding_backward(dev, index.num_buckets, B, T, C);
#pragma omp parallel num_threads(cpu_threads_for(dev, 5e-4 * B * T * C))
    {
        float* sum = (float*)cpu_scratch(dev, cpu_thread_index(), (size_t)C * sizeof(float));
#pragma omp for schedule(dynamic, 8)
        for (int bucket = 0; bucket < index.num_buckets; bucket++) {
            int start = index.bucket_start[bucket], n = index.bucket_start[bucket + 1] - start;
            sum_rows(dwte + (size_t)index.bucket_token[bucket] * C, dout, index.rows + start, 0, 0, n, C, sum);
        }
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) {
            sum_rows(dwpe + (size_t)t * C, dout, NULL, t, T, B, C, sum);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// layernorm

#define LAYERNORM_EPS 1e-5f

typedef struct {
    const Device* dev;
    LayerNormStats stats;
    ResidualAdd add;
    const float* weight;
    const float* bias;
    int C;
} LayerNormForwardOp;

static inline void layernorm_forward_row(const void* op_, int row, float* values, float* sums, Pass pass) {
    const LayerNormForwardOp* op = (const LayerNormForwardOp*)op_;
    (void)sums;
    int C = op->C;
    const float* x = op->add.in + (size_t)row * C;
    if (op->add.branch != NULL) {
        const float* branch = op->add.branch + (size_t)row * C;
        const float* bias = op->add.bias;
#pragma omp simd
        for (int c = 0; c < C; c++) {
            values[c] = bf16_stored(op->dev, x[c] + (branch[c] + bias[c]));
        }
        if (pass == PASS_WRITE) { memcpy(op->add.sum + (size_t)row * C, values, (size_t)C * sizeof(float)); }
        x = values; // read below before it is overwritten, element by element
    }
    float mean = sum_of(x, C) / (float)C;
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int c = 0; c < C; c++) {
        squares += (x[c] - mean) * (x[c] - mean);
    }
    float rstd = 1.0f / sqrtf(squares / (float)C + LAYERNORM_EPS);
    const float* weight = op->weight;
    const float* bias = op->bias;
#pragma omp simd
    for (int c = 0; c < C; c++) {
        values[c] = (x[c] - mean) * rstd * weight[c] + bias[c];
    }
    if (pass == PASS_WRITE) {
        op->stats.mean[row] = mean;
        op->stats.rstd[row] = rstd;
    }
}

void layernorm_forward(Device* dev, E4m3Tensor y, LayerNormStats stats, ResidualAdd add, const bf16* weight,
                       const bf16* bias, int rows, int C) {
    cost_layernorm_forward(dev, y, add, rows, C);
    check(add.branch == NULL || (add.sum != NULL && add.bias != NULL),
          "layernorm_forward: a branch needs sum and bias");
    LayerNormForwardOp op = {dev, stats, add, weight, bias, C};
    produce(dev, row_output_e4m3(y), producer_of("layernorm_forward", layernorm_forward_row, &op), rows, C);
}

typedef struct {
    const Device* dev;
    LayerNormBackward args;
} LayerNormBackwardOp;

// With n = (x - mean) rstd and g = weight dy:  dx = dresidual + rstd (g - mean(g) - n mean(g n))
// sums: dweight += dy n, dbias += dy, dbranch_bias += dx as stored
static inline void layernorm_backward_row(const void* op_, int row, float* values, float* sums, Pass pass) {
    const LayerNormBackwardOp* op = (const LayerNormBackwardOp*)op_;
    const LayerNormBackward* args = &op->args;
    int C = args->C;
    const float* x = args->x + (size_t)row * C;
    const float* dy = args->dy + (size_t)row * C;
    const float* weight = args->weight;
    float mean = args->stats.mean[row], rstd = args->stats.rstd[row];
    float sum_g = 0.0f, sum_gn = 0.0f;
#pragma omp simd reduction(+ : sum_g, sum_gn)
    for (int c = 0; c < C; c++) {
        float g = weight[c] * dy[c];
        sum_g += g;
        sum_gn += g * ((x[c] - mean) * rstd);
    }
    float mean_g = sum_g / (float)C, mean_gn = sum_gn / (float)C;
#pragma omp simd
    for (int c = 0; c < C; c++) {
        float n = (x[c] - mean) * rstd;
        values[c] = rstd * (weight[c] * dy[c] - mean_g - n * mean_gn);
    }
    if (args->dresidual != NULL) { add_to(values, args->dresidual + (size_t)row * C, (size_t)C); }
    if (pass == PASS_MEASURE) { return; }
    float* dweight = sums;
    float* dbias = sums + C;
    float* dbranch_bias = sums + 2 * C;
#pragma omp simd
    for (int c = 0; c < C; c++) {
        dweight[c] += dy[c] * ((x[c] - mean) * rstd);
        dbias[c] += dy[c];
        dbranch_bias[c] += bf16_stored(op->dev, values[c]);
    }
}

void layernorm_backward(Device* dev, LayerNormBackward args) {
    cost_layernorm_backward(dev, args.dx, args.dresidual, args.rows, args.C);
    LayerNormBackwardOp op = {dev, args};
    Producer producer = {
        "layernorm_backward", layernorm_backward_row, &op, 3, {args.dweight, args.dbias, args.dbranch_bias}};
    produce(dev, row_output_e5m2(args.dx), producer, args.rows, args.C);
}

// ---------------------------------------------------------------------------------------------------------------------
// linear layers

static inline void check_matmul(const char* name, int rows, int C, int OC, int fp8) {
    check(rows > 0 && C > 0 && OC > 0 && C % 16 == 0 && OC % 16 == 0 && (!fp8 || rows % 16 == 0),
          "%s: (rows, C, OC) = (%d, %d, %d), want C, OC%s multiples of 16", name, rows, C, OC, fp8 ? " and rows" : "");
}

void matmul_forward(Device* dev, bf16* y, E4m3Tensor x, E4m3Tensor w, const bf16* bias, int rows, int C, int OC) {
    int fp8 = w.data != NULL;
    check_matmul("matmul_forward", rows, C, OC, fp8);
    cost_matmul_forward(dev, fp8, rows, C, OC);
    check(fp8 ? x.data != NULL : x.wide != NULL && w.wide != NULL, "matmul_forward: an operand lacks its %s form",
          fp8 ? "FP8" : "BF16");
    size_t K = (size_t)C;
    Epilogue epilogue = {1.0f, bias, 0, 0, !dev->fp32};
    Operand a, b;
    if (fp8) {
        a = operand_codes(x.data, dev->e4m3_values, K, 1);
        b = operand_codes(w.data, dev->e4m3_values, K, 1);
        epilogue.alpha = x.slot->descale * w.slot->descale;
    } else {
        a = operand_values(x.wide, K, 1);
        b = operand_values(w.wide, K, 1);
    }
    Product product = {y, a, b, rows, OC, C, epilogue};
    matrix_product(dev, &product);
}

void matmul_dgrad(Device* dev, bf16* dx, E5m2Tensor dy, E4m3Tensor w, int rows, int C, int OC) {
    int fp8 = w.data != NULL;
    check_matmul("matmul_dgrad", rows, C, OC, fp8);
    cost_matmul_dgrad(dev, fp8, rows, C, OC);
    check(fp8 ? dy.data != NULL && w.transposed != NULL : dy.wide != NULL && w.wide != NULL,
          "matmul_dgrad: an operand lacks its %s form", fp8 ? "FP8" : "BF16");
    size_t K = (size_t)OC;
    Epilogue epilogue = {1.0f, NULL, 0, 0, !dev->fp32};
    Operand a, b;
    if (fp8) {
        a = operand_codes(dy.data, dev->e5m2_values, K, 1);
        b = operand_codes(w.transposed, dev->e4m3_values, K, 1);
        epilogue.alpha = dy.slot->descale * w.slot->descale;
    } else {
        a = operand_values(dy.wide, K, 1);
        b = operand_values(w.wide, 1, (size_t)C);
    }
    Product product = {dx, a, b, rows, C, OC, epilogue};
    matrix_product(dev, &product);
}

void matmul_wgrad(Device* dev, float* dw, E5m2Tensor dy, E4m3Tensor x, int accumulate, int rows, int C, int OC) {
    int fp8 = x.transposed != NULL;
    check_matmul("matmul_wgrad", rows, C, OC, fp8);
    cost_matmul_wgrad(dev, fp8, accumulate, rows, C, OC);
    check(fp8 ? dy.transposed != NULL : dy.wide != NULL && x.wide != NULL, "matmul_wgrad: an operand lacks its %s form",
          fp8 ? "FP8" : "BF16");
    size_t K = (size_t)rows;
    Epilogue epilogue = {1.0f, NULL, accumulate, 0, 0};
    Operand a, b;
    if (fp8) {
        a = operand_codes(dy.transposed, dev->e5m2_values, K, 1);
        b = operand_codes(x.transposed, dev->e4m3_values, K, 1);
        epilogue.alpha = dy.slot->descale * x.slot->descale;
    } else {
        a = operand_values(dy.wide, 1, (size_t)OC);
        b = operand_values(x.wide, 1, (size_t)C);
    }
    Product product = {dw, a, b, OC, C, rows, epilogue};
    matrix_product(dev, &product);
}

size_t matmul_workspace_bytes(void) { return 0; }

void matmul_set_fast_accum(Device* dev, int roles) { (void)dev, (void)roles; }

void matmul_set_autotune(Device* dev, const char* cache_path) { (void)dev, (void)cache_path; }
int matmul_can_autotune(void) { return 0; }

// ---------------------------------------------------------------------------------------------------------------------
// attention: one (batch, head) per task, ATTENTION_ROWS queries at a time against all keys before them, so that a
// strip (ATTENTION_ROWS, T) of scores exists, never (T, T)

#define ATTENTION_ROWS 48 // a multiple of both TILE_M

// The tensors of one head, each (T, HS) with a stride between tokens.
typedef struct {
    const float *q, *k, *v; // stride 3C
    int T, HS;
    size_t stride; // 3C
    float scale;   // 1 / sqrt(HS)
} AttentionHead;

static inline AttentionHead attention_head(const float* qkv, int head, int T, int NH, int HS) {
    size_t C = (size_t)NH * HS;
    const float* q = qkv + (size_t)(head / NH) * T * 3 * C + (size_t)(head % NH) * HS;
    AttentionHead h = {q, q + C, q + 2 * C, T, HS, 3 * C, 1.0f / sqrtf((float)HS)};
    return h;
}

static inline void check_attention(const char* name, int B, int T, int NH, int HS) {
    check(B > 0 && T > 0 && NH > 0 && HS > 0 && HS % 16 == 0 && HS <= 128,
          "%s: (B, T, NH, HS) = (%d, %d, %d, %d), want HS a multiple of 16, at most 128", name, B, T, NH, HS);
}

// c (m, n) = alpha a . b (+ c if add) over `count` k's, BLOCK_K at a time; both packed over k's of their own strides
static inline void multiply_packed(float* c, size_t stride, const float* a, size_t a_stride, const float* b,
                                   size_t b_stride, int m, int n, int count, float alpha, int add) {
    for (int k = 0; k < count; k += BLOCK_K) {
        Epilogue epilogue = {alpha, NULL, add || k > 0, 0, 0};
        multiply_panels(c, stride, a + (size_t)k * TILE_M, a_stride, b + (size_t)k * TILE_N, b_stride, m, n,
                        count - k < BLOCK_K ? count - k : BLOCK_K, epilogue);
    }
}

// Floats of `lines` lines along k packed into panels of `width`.
static inline size_t packed_floats(int lines, int width, int k) { return round_up((size_t)lines, (size_t)width) * k; }

// Take n floats off the front of scratch.
static inline float* take_floats(float** scratch, size_t n) {
    float* p = *scratch;
    *scratch += round_up(n, 16);
    return p;
}

static inline void attention_forward_head(Device* dev, float* out, float* lse, AttentionHead h, size_t C) {
    int T = h.T, HS = h.HS;
    size_t width = round_up((size_t)T, TILE_N); // of the strip of scores
    size_t keys_floats = packed_floats(T, TILE_N, HS), values_floats = packed_floats(HS, TILE_N, T);
    size_t rows_floats = packed_floats(ATTENTION_ROWS, TILE_M, HS > T ? HS : T);
    size_t floats = keys_floats + values_floats + rows_floats + ATTENTION_ROWS * (width + (size_t)HS) + 5 * 16;
    float* scratch = (float*)cpu_scratch(dev, cpu_thread_index(), floats * sizeof(float));
    float* keys = take_floats(&scratch, keys_floats);     // k as B of q . k^T
    float* values = take_floats(&scratch, values_floats); // v as B of p . v
    float* packed = take_floats(&scratch, rows_floats);   // q, then p, as A
    float* scores = take_floats(&scratch, ATTENTION_ROWS * width);
    float* rows_out = take_floats(&scratch, (size_t)ATTENTION_ROWS * HS);
    size_t keys_stride = (size_t)TILE_N * HS, values_stride = (size_t)TILE_N * T;
    pack_panels(keys, keys_stride, operand_values(h.k, h.stride, 1), TILE_N, 0, T, 0, HS);
    pack_panels(values, values_stride, operand_values(h.v, 1, h.stride), TILE_N, 0, HS, 0, T);
    for (int t = 0; t < T; t += ATTENTION_ROWS) {
        int m = T - t < ATTENTION_ROWS ? T - t : ATTENTION_ROWS, num_keys = t + m;
        pack_panels(packed, (size_t)TILE_M * HS, operand_values(h.q, h.stride, 1), TILE_M, t, m, 0, HS);
        multiply_packed(scores, width, packed, (size_t)TILE_M * HS, keys, keys_stride, m, num_keys, HS, h.scale, 0);
        float denominators[ATTENTION_ROWS];
        for (int i = 0; i < m; i++) {
            float* row = scores + i * width;
            int seen = t + i + 1; // a query sees itself and what is before it
            float largest = row[0];
#pragma omp simd reduction(max : largest)
            for (int k = 1; k < seen; k++) {
                largest = row[k] > largest ? row[k] : largest;
            }
#pragma omp simd
            for (int k = 0; k < seen; k++) {
                row[k] = exp_f32(row[k] - largest);
            }
            for (int k = seen; k < num_keys; k++) {
                row[k] = 0.0f;
            }
            denominators[i] = sum_of(row, seen);
            lse[t + i] = largest + logf(denominators[i]);
        }
        pack_panels(packed, (size_t)TILE_M * num_keys, operand_values(scores, width, 1), TILE_M, 0, m, 0, num_keys);
        multiply_packed(rows_out, (size_t)HS, packed, (size_t)TILE_M * num_keys, values, values_stride, m, HS, num_keys,
                        1.0f, 0);
        for (int i = 0; i < m; i++) {
            for (int s = 0; s < HS; s++) {
                out[(size_t)(t + i) * C + s] = bf16_stored(dev, rows_out[i * HS + s] / denominators[i]);
            }
        }
    }
}

void attention_forward(Device* dev, E4m3Tensor out, float* lse, const bf16* qkv, int B, int T, int NH, int HS) {
    E4m3Tensor wide = {out.wide, NULL, NULL, NULL, out.recipe, 0, 0};
    cost_attention_forward(dev, wide, B, T, NH, HS);
    check_attention("attention_forward", B, T, NH, HS);
    size_t C = (size_t)NH * HS;
#pragma omp parallel for schedule(dynamic) num_threads(cpu_threads_for(dev, 4e-5 * B * T * T * C))
    for (int head = 0; head < B * NH; head++) {
        float* head_out = out.wide + (size_t)(head / NH) * T * C + (size_t)(head % NH) * HS;
        attention_forward_head(dev, head_out, lse + (size_t)head * T, attention_head(qkv, head, T, NH, HS), C);
    }
    quantize_forward(dev, out, B * T, (int)C);
}

// With P = exp(scale q k^T - lse) and D = sum over HS of dout * out:
//   dv = P^T dout      dS = P * (dout v^T - D) * scale      dq = dS k      dk = dS^T q
static inline void attention_backward_head(Device* dev, float* dqkv, const float* dout, const float* out,
                                           const float* lse, AttentionHead h, size_t C) {
    int T = h.T, HS = h.HS;
    size_t width = round_up((size_t)T, TILE_N);
    size_t keys_floats = packed_floats(T, TILE_N, HS), across_floats = packed_floats(HS, TILE_N, T);
    size_t left_floats = packed_floats(ATTENTION_ROWS, TILE_M, HS > T ? HS : T);
    left_floats += packed_floats(T, TILE_M, ATTENTION_ROWS);
    size_t rows_floats = packed_floats(HS, TILE_N, ATTENTION_ROWS);
    size_t floats = 2 * keys_floats + across_floats + left_floats + rows_floats + 2 * (size_t)T * HS +
                    ATTENTION_ROWS * (2 * width + (size_t)HS) + 10 * 16;
    float* scratch = (float*)cpu_scratch(dev, cpu_thread_index(), floats * sizeof(float));
    float* keys = take_floats(&scratch, keys_floats);          // k as B of q . k^T
    float* values = take_floats(&scratch, keys_floats);        // v as B of dout . v^T
    float* keys_across = take_floats(&scratch, across_floats); // k as B of dS . k
    float* left = take_floats(&scratch, left_floats);          // whatever is A of a product
    float* right = take_floats(&scratch, rows_floats);         // q or dout of these queries as B
    float* dk = take_floats(&scratch, (size_t)T * HS);         // FP32 sums over all queries
    float* dv = take_floats(&scratch, (size_t)T * HS);
    float* p = take_floats(&scratch, ATTENTION_ROWS * width);
    float* ds = take_floats(&scratch, ATTENTION_ROWS * width);
    float* dq = take_floats(&scratch, (size_t)ATTENTION_ROWS * HS);
    size_t keys_stride = (size_t)TILE_N * HS, across_stride = (size_t)TILE_N * T, left_stride = (size_t)TILE_M * HS;
    pack_panels(keys, keys_stride, operand_values(h.k, h.stride, 1), TILE_N, 0, T, 0, HS);
    pack_panels(values, keys_stride, operand_values(h.v, h.stride, 1), TILE_N, 0, T, 0, HS);
    pack_panels(keys_across, across_stride, operand_values(h.k, 1, h.stride), TILE_N, 0, HS, 0, T);
    memset(dk, 0, (size_t)T * HS * sizeof(float));
    memset(dv, 0, (size_t)T * HS * sizeof(float));
    for (int t = 0; t < T; t += ATTENTION_ROWS) {
        int m = T - t < ATTENTION_ROWS ? T - t : ATTENTION_ROWS, num_keys = t + m;
        size_t right_stride = (size_t)TILE_N * m, across_left = (size_t)TILE_M * m,
               wide_left = (size_t)TILE_M * num_keys;
        // P and dP
        pack_panels(left, left_stride, operand_values(h.q, h.stride, 1), TILE_M, t, m, 0, HS);
        multiply_packed(p, width, left, left_stride, keys, keys_stride, m, num_keys, HS, h.scale, 0);
        pack_panels(left, left_stride, operand_values(dout, C, 1), TILE_M, t, m, 0, HS);
        multiply_packed(ds, width, left, left_stride, values, keys_stride, m, num_keys, HS, 1.0f, 0);
        // P and dS, zero where a query does not see
        for (int i = 0; i < m; i++) {
            float* p_row = p + i * width;
            float* ds_row = ds + i * width;
            const float* dout_row = dout + (size_t)(t + i) * C;
            const float* out_row = out + (size_t)(t + i) * C;
            float d = 0.0f, row_lse = lse[t + i], scale = h.scale;
            int seen = t + i + 1;
#pragma omp simd reduction(+ : d)
            for (int s = 0; s < HS; s++) {
                d += dout_row[s] * out_row[s];
            }
#pragma omp simd
            for (int k = 0; k < seen; k++) {
                p_row[k] = exp_f32(p_row[k] - row_lse);
                ds_row[k] = p_row[k] * (ds_row[k] - d) * scale;
            }
            for (int k = seen; k < num_keys; k++) {
                p_row[k] = ds_row[k] = 0.0f;
            }
        }
        // dv += P^T dout
        pack_panels(left, across_left, operand_values(p, 1, width), TILE_M, 0, num_keys, 0, m);
        pack_panels(right, right_stride, operand_values(dout + (size_t)t * C, 1, C), TILE_N, 0, HS, 0, m);
        multiply_packed(dv, (size_t)HS, left, across_left, right, right_stride, num_keys, HS, m, 1.0f, 1);
        // dk += dS^T q
        pack_panels(left, across_left, operand_values(ds, 1, width), TILE_M, 0, num_keys, 0, m);
        pack_panels(right, right_stride, operand_values(h.q + (size_t)t * h.stride, 1, h.stride), TILE_N, 0, HS, 0, m);
        multiply_packed(dk, (size_t)HS, left, across_left, right, right_stride, num_keys, HS, m, 1.0f, 1);
        // dq = dS k
        pack_panels(left, wide_left, operand_values(ds, width, 1), TILE_M, 0, m, 0, num_keys);
        multiply_packed(dq, (size_t)HS, left, wide_left, keys_across, across_stride, m, HS, num_keys, 1.0f, 0);
        for (int i = 0; i < m; i++) {
            for (int s = 0; s < HS; s++) {
                dqkv[(size_t)(t + i) * 3 * C + s] = bf16_stored(dev, dq[i * HS + s]);
            }
        }
    }
    for (int t = 0; t < T; t++) {
        for (int s = 0; s < HS; s++) {
            dqkv[(size_t)t * 3 * C + C + s] = bf16_stored(dev, dk[t * HS + s]);
            dqkv[(size_t)t * 3 * C + 2 * C + s] = bf16_stored(dev, dv[t * HS + s]);
        }
    }
}

void attention_backward(Device* dev, E5m2Tensor dqkv, float* dbias, const bf16* dout, const bf16* out, const float* lse,
                        const bf16* qkv, int B, int T, int NH, int HS) {
    E5m2Tensor wide = {dqkv.wide, NULL, NULL, NULL, dqkv.recipe, 0, 0};
    cost_attention_backward(dev, wide, B, T, NH, HS);
    check_attention("attention_backward", B, T, NH, HS);
    check(dqkv.wide != NULL, "attention_backward: no BF16 form of dqkv, want it at least as scratch");
    size_t C = (size_t)NH * HS;
#pragma omp parallel for schedule(dynamic) num_threads(cpu_threads_for(dev, 1e-4 * B * T * T * C))
    for (int head = 0; head < B * NH; head++) {
        size_t at = (size_t)(head / NH) * T * C, column = (size_t)(head % NH) * HS;
        attention_backward_head(dev, dqkv.wide + 3 * at + column, dout + at + column, out + at + column,
                                lse + (size_t)head * T, attention_head(qkv, head, T, NH, HS), C);
    }
    if (dqkv.data != NULL || dqkv.transposed != NULL || dbias != NULL) {
        quantize_backward(dev, dqkv, dbias, B * T, (int)(3 * C));
    }
}

size_t attention_workspace_bytes(Device* dev, int B, int T, int NH, int HS) {
    (void)B, (void)T;
    return reduction_workspace_bytes(dev, 3 * NH * HS); // quantize_backward's, for dqkv
}

// ---------------------------------------------------------------------------------------------------------------------
// gelu

typedef struct {
    const float* dy; // (rows, C) backward only
    const float* x;  // (rows, C)
    const float* bias;
    int C;
} GeluOp;

static inline void gelu_forward_row(const void* op_, int row, float* values, float* sums, Pass pass) {
    const GeluOp* op = (const GeluOp*)op_;
    (void)sums, (void)pass;
    int C = op->C;
    const float* x = op->x + (size_t)row * C;
    const float* bias = op->bias;
#pragma omp simd
    for (int c = 0; c < C; c++) {
        float gelu, slope;
        gelu_and_slope(x[c] + bias[c], &gelu, &slope);
        values[c] = gelu;
    }
}

void gelu_forward(Device* dev, E4m3Tensor y, const bf16* x, const bf16* bias, int rows, int C) {
    cost_gelu_forward(dev, y, rows, C);
    GeluOp op = {NULL, x, bias, C};
    produce(dev, row_output_e4m3(y), producer_of("gelu_forward", gelu_forward_row, &op), rows, C);
}

static inline void gelu_backward_row(const void* op_, int row, float* values, float* sums, Pass pass) {
    const GeluOp* op = (const GeluOp*)op_;
    int C = op->C;
    const float* x = op->x + (size_t)row * C;
    const float* dy = op->dy + (size_t)row * C;
    const float* bias = op->bias;
#pragma omp simd
    for (int c = 0; c < C; c++) {
        float gelu, slope;
        gelu_and_slope(x[c] + bias[c], &gelu, &slope);
        values[c] = dy[c] * slope;
    }
    if (pass == PASS_WRITE) { add_to(sums, values, (size_t)C); }
}

void gelu_backward(Device* dev, E5m2Tensor dx, float* dbias, const bf16* dy, const bf16* x, const bf16* bias, int rows,
                   int C) {
    cost_gelu_backward(dev, dx, rows, C);
    GeluOp op = {dy, x, bias, C};
    Producer producer = {"gelu_backward", gelu_backward_row, &op, 1, {dbias, NULL, NULL}};
    produce(dev, row_output_e5m2(dx), producer, rows, C);
}

// ---------------------------------------------------------------------------------------------------------------------
// quantize

typedef struct {
    const float* values; // (rows, cols)
    int cols;
} QuantizeOp;

static inline void quantize_row(const void* op_, int row, float* values, float* sums, Pass pass) {
    const QuantizeOp* op = (const QuantizeOp*)op_;
    (void)sums, (void)pass;
    memcpy(values, op->values + (size_t)row * op->cols, (size_t)op->cols * sizeof(float));
}

static inline void quantize_and_sum_row(const void* op_, int row, float* values, float* sums, Pass pass) {
    quantize_row(op_, row, values, sums, pass);
    if (pass == PASS_WRITE) { add_to(sums, values, (size_t)((const QuantizeOp*)op_)->cols); }
}

void quantize_forward(Device* dev, E4m3Tensor y, int rows, int cols) {
    if (y.data == NULL && y.transposed == NULL) { return; }
    cost_quantize_forward(dev, y, rows, cols);
    QuantizeOp op = {y.wide, cols};
    y.wide = NULL; // an input here
    produce(dev, row_output_e4m3(y), producer_of("quantize_forward", quantize_row, &op), rows, cols);
}

void quantize_backward(Device* dev, E5m2Tensor dy, float* dbias, int rows, int cols) {
    cost_quantize_backward(dev, dy, rows, cols);
    QuantizeOp op = {dy.wide, cols};
    dy.wide = NULL; // an input here
    Producer producer = {"quantize_backward", quantize_and_sum_row, &op, 1, {dbias, NULL, NULL}};
    produce(dev, row_output_e5m2(dy), producer, rows, cols);
}

// A weight's slot is measured by the optimizer (adamw_update, params_from_master), never here.
void quantize_weight(Device* dev, E4m3Tensor w, const float* master, int OC, int C) {
    cost_quantize_weight(dev, w, OC, C);
    QuantizeOp op = {master, C};
    w.wide = NULL;
    w.measure_first = w.record = 0;
    produce(dev, row_output_e4m3(w), producer_of("quantize_weight", quantize_row, &op), OC, C);
}

// ---------------------------------------------------------------------------------------------------------------------
// classifier

// One row: returns -log softmax(logits)[target], and, unless gradient is NULL, writes gradient (Vp) =
// (softmax - onehot) * dloss, not rounded. gradient may be logits.
static inline float classifier_row(float* gradient, const float* logits, int target, float dloss, int V, int Vp) {
    float largest = logits[0];
#pragma omp simd reduction(max : largest)
    for (int v = 1; v < V; v++) {
        largest = logits[v] > largest ? logits[v] : largest;
    }
    float sum = 0.0f;
    for (int start = 0; start < V; start += SUM_BLOCK) {
        int end = V - start < SUM_BLOCK ? V : start + SUM_BLOCK;
        float block = 0.0f;
#pragma omp simd reduction(+ : block)
        for (int v = start; v < end; v++) {
            block += exp_f32(logits[v] - largest);
        }
        sum += block;
    }
    float loss = logf(sum) + largest - logits[target];
    if (gradient != NULL) {
        float target_probability = exp_f32(logits[target] - largest) / sum, factor = dloss / sum;
#pragma omp simd
        for (int v = 0; v < V; v++) {
            gradient[v] = exp_f32(logits[v] - largest) * factor;
        }
        gradient[target] = (target_probability - 1.0f) * dloss;
        memset(gradient + V, 0, (size_t)(Vp - V) * sizeof(float));
    }
    return loss;
}

// The classifier as a producer of FP8.
typedef struct {
    float* losses;
    const float* logits;
    const int* targets;
    float dloss;
    int V, Vp;
} ClassifierOp;

static inline void classifier_fp8_row(const void* op_, int row, float* values, float* sums, Pass pass) {
    const ClassifierOp* op = (const ClassifierOp*)op_;
    (void)sums, (void)pass;
    const float* logits = op->logits + (size_t)row * op->Vp;
    op->losses[row] = classifier_row(values, logits, op->targets[row], op->dloss, op->V, op->Vp);
}

void classifier(Device* dev, E5m2Tensor dlogits, float* losses, bf16* logits, const int* targets, float dloss,
                int with_gradient, int rows, int V, int Vp) {
    cost_classifier(dev, with_gradient, rows, Vp);
    check(V > 0 && V <= Vp, "classifier: (V, Vp) = (%d, %d), want 0 < V <= Vp", V, Vp);
    if (with_gradient && (dlogits.data != NULL || dlogits.transposed != NULL)) {
        check(dlogits.wide == NULL, "classifier: dlogits in FP8 and BF16, want one of them");
        check(dlogits.data != NULL, "classifier: dlogits in FP8 without the row-major form");
        dlogits.measure_first = dlogits.record = 0;
        ClassifierOp op = {losses, logits, targets, dloss, V, Vp};
        produce(dev, row_output_e5m2(dlogits), producer_of("classifier", classifier_fp8_row, &op), rows, Vp);
        return;
    }
    check(!with_gradient || dlogits.wide == logits,
          "classifier: dlogits in BF16 replace the logits, found another place");
#pragma omp parallel for schedule(static) num_threads(cpu_threads_for(dev, 1e-3 * rows * Vp))
    for (int row = 0; row < rows; row++) {
        float* line = logits + (size_t)row * Vp;
        losses[row] = classifier_row(with_gradient ? line : NULL, line, targets[row], dloss, V, Vp);
        for (int v = 0; with_gradient && v < V; v++) {
            line[v] = bf16_stored(dev, line[v]);
        }
    }
}

void loss_add(Device* dev, StepState* state, const float* losses, float factor, size_t n) {
    cost_loss_add(dev, n);
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) {
        sum += losses[i];
    }
    state->loss += (float)(factor * sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// the end of a step

#define NORM_CHUNKS 1024

// Sum of the squares of x (n); its order depends on n alone.
static inline double sum_of_squares(const Device* dev, const float* x, size_t n) {
    double sums[NORM_CHUNKS];
    size_t chunk = (n + NORM_CHUNKS - 1) / NORM_CHUNKS;
#pragma omp parallel for schedule(static) num_threads(cpu_threads_for(dev, 1e-4 * n))
    for (int c = 0; c < NORM_CHUNKS; c++) {
        size_t start = c * chunk < n ? c * chunk : n, end = n - start < chunk ? n : start + chunk;
        double sum = 0.0; // squares of FP32 gradients neither overflow nor vanish in FP64
#pragma omp simd reduction(+ : sum)
        for (size_t i = start; i < end; i++) {
            sum += (double)x[i] * (double)x[i];
        }
        sums[c] = sum;
    }
    double sum = 0.0;
    for (int c = 0; c < NORM_CHUNKS; c++) {
        sum += sums[c];
    }
    return sum;
}

static inline void set_norm(StepState* state, double squares) {
    state->grad_norm = (float)sqrt(squares);
    state->skip = !is_finite_bits(state->grad_norm) || !is_finite_bits(state->loss);
}

void global_norm(Device* dev, StepState* state, const float* grads, size_t n) {
    cost_global_norm(dev, n);
    set_norm(state, sum_of_squares(dev, grads, n));
}

static inline void check_ranks(const char* name, int num_ranks, int rank) {
    check(num_ranks >= 1 && rank >= 0 && rank < num_ranks, "%s: rank %d of %d, want 0 <= rank < ranks", name, rank,
          num_ranks);
}

void norm_of_slices(Device* dev, RankNorm* part, const StepState* state, const float* grads, const Shards* shards,
                    int rank) {
    cost_norm_of_slices(dev, shards);
    check_ranks("norm_of_slices", shards->num_ranks, rank);
    RankNorm own = {0.0, state->loss, 0.0f};
    for (int b = 0; b < shards->num_buckets; b++) {
        for (int p = 0; p < shards->bucket[b].num_pieces; p++) {
            const Piece* piece = &shards->bucket[b].piece[p];
            SliceRange range = piece_owned(piece, rank);
            own.squares += sum_of_squares(dev, grads + piece->offset + range.begin, range.end - range.begin);
        }
    }
    *part = own;
}

void norm_of_ranks(Device* dev, StepState* state, const RankNorm* parts, int num_ranks) {
    cost_norm_of_ranks(dev, num_ranks);
    check_ranks("norm_of_ranks", num_ranks, 0);
    double loss = 0.0, squares = 0.0;
    for (int r = 0; r < num_ranks; r++) {
        loss += (double)parts[r].loss;
        squares += parts[r].squares;
    }
    state->loss = (float)loss;
    set_norm(state, squares);
}

// Elements of one layer that are updated, or copied, by one task.
#define PARAM_CHUNK 16384

// One chunk of one AdamW update: m, v, master in place; returns max |master|.
//   m = b1 m + (1 - b1) g     v = b2 v + (1 - b2) g^2     w -= lr (m / c1 / (sqrt(v / c2) + eps) + decay w)
static inline float adamw_chunk(ParamState p, size_t start, size_t n, AdamW adamw, float grad_factor, float c1,
                                float c2) {
    float* master = p.master + start;
    float* m = p.m + start;
    float* v = p.v + start;
    const float* grad = p.grad + start;
    float step = adamw.lr / c1, decay = adamw.lr * adamw.weight_decay, inverse_c2 = 1.0f / c2;
    float beta1 = adamw.beta1, beta2 = adamw.beta2, eps = adamw.eps;
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = grad[i] * grad_factor;
        m[i] = beta1 * m[i] + (1.0f - beta1) * g;
        v[i] = beta2 * v[i] + (1.0f - beta2) * g * g;
        master[i] -= step * m[i] / (sqrtf(v[i] * inverse_c2) + eps) + decay * master[i];
    }
    return amax_of(master, (int)n);
}

typedef struct {
    AdamW adamw;
    float grad_factor;
    float c1, c2; // 1 - beta^t
    int update;   // 0: only what the forward pass reads is made
} ParamUpdate;

// param = master rounded stochastically, with the random numbers that floor.h says. start and n are multiples of 4.
static inline void params_round_stochastic(ParamState p, size_t start, size_t n, AdamW adamw) {
    uint64_t first = (p.index + start) / 4;
#pragma omp simd
    for (size_t group = 0; group < n / 4; group++) {
        Philox4 random = philox(adamw.seed, (uint64_t)adamw.t, first + group);
        for (int k = 0; k < 4; k++) {
            size_t i = start + 4 * group + (size_t)k;
            p.param[i] = bf16_round_stochastic(p.master[i], random.word[k]);
        }
    }
}

// Over all layers: update if asked, write param, raise each layer's slot. Chunks in parallel.
static inline void params_update(Device* dev, ParamState p, ParamUpdate u) {
    check(p.n % 4 == 0 && p.index % 4 == 0, "parameters: n = %zu, index = %zu, want multiples of 4", p.n, p.index);
    size_t chunks_per_layer = (p.n + PARAM_CHUNK - 1) / PARAM_CHUNK;
    size_t num_chunks = chunks_per_layer * (size_t)p.layers;
    float* amaxes = (float*)cpu_scratch(dev, dev->num_threads, (num_chunks + 1) * sizeof(float));
#pragma omp parallel for schedule(static) num_threads(cpu_threads_for(dev, 1e-3 * num_chunks * PARAM_CHUNK))
    for (size_t chunk = 0; chunk < num_chunks; chunk++) {
        size_t in_layer = chunk % chunks_per_layer * PARAM_CHUNK;
        size_t start = chunk / chunks_per_layer * p.n + in_layer;
        size_t n = p.n - in_layer < PARAM_CHUNK ? p.n - in_layer : PARAM_CHUNK;
        amaxes[chunk] =
            u.update ? adamw_chunk(p, start, n, u.adamw, u.grad_factor, u.c1, u.c2) : amax_of(p.master + start, (int)n);
        if (p.param != NULL && u.adamw.stochastic && !dev->fp32) {
            params_round_stochastic(p, start, n, u.adamw);
        } else if (p.param != NULL) {
#pragma omp simd
            for (size_t i = start; i < start + n; i++) {
                p.param[i] = bf16_stored(dev, p.master[i]);
            }
        }
    }
    for (size_t chunk = 0; p.slot != NULL && chunk < num_chunks; chunk++) {
        ScaleSlot* slot = p.slot + chunk / chunks_per_layer * p.slot_stride;
        slot->amax = amax_raised(slot->amax, amaxes[chunk]);
    }
}

void adamw_update(Device* dev, ParamState p, AdamW adamw, const StepState* state) {
    cost_adamw_update(dev, p);
    check(adamw.t >= 1, "adamw_update: t = %d, want 1 or more", adamw.t);
    if (state->skip) { return; }
    ParamUpdate update = {adamw, 1.0f, 0.0f, 0.0f, 1};
    if (adamw.grad_clip > 0.0f && state->grad_norm > adamw.grad_clip) {
        update.grad_factor = adamw.grad_clip / state->grad_norm;
    }
    update.c1 = (float)(1.0 - pow((double)adamw.beta1, adamw.t)); // FP64: beta2^t is close to 1 for long
    update.c2 = (float)(1.0 - pow((double)adamw.beta2, adamw.t));
    params_update(dev, p, update);
}

void params_from_master(Device* dev, ParamState p, AdamW adamw) {
    ParamUpdate update = {adamw, 1.0f, 1.0f, 1.0f, 0};
    params_update(dev, p, update);
}

void scale_slots_gather(Device* dev, float* amaxes, const ScaleSlot* slots, int num_slots) {
    cost_scale_slots(dev, num_slots);
    for (int i = 0; i < num_slots; i++) {
        amaxes[i] = isnan(slots[i].amax) ? INFINITY : slots[i].amax;
    }
}

void scale_slots_step(Device* dev, ScaleSlot* slots, const float* amaxes, int num_slots, ScaleRecipe recipe,
                      StepState* state) {
    cost_scale_slots(dev, num_slots);
    state->slots_warming = 0;
    for (int i = 0; i < num_slots; i++) {
        scale_slot_step(&slots[i], amaxes[i], recipe);
        state->slots_warming += scale_slot_is_warming(&slots[i]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// what several ranks send each other: blocks of chunks in parallel (chunk_block of shards.h says where they lie)

#define BLOCK_BYTES 2048.0 // that a block of any of these ops moves, about: for cpu_threads_for, at 10 GB/s

static inline int threads_for_blocks(const Device* dev, size_t num_blocks) {
    return cpu_threads_for(dev, 1e-4 * BLOCK_BYTES * (double)num_blocks);
}

static inline float grad_quantize_block(uint8_t* codes, const float* x, int count) {
    GradBlockScale s = grad_block_scale(amax_of(x, count));
    int coded = s.has_codes ? count : 0;
    encode_row(codes, x, coded, s.scale, FORMAT_E4M3);
    memset(codes + coded, 0, (size_t)(GRAD_BLOCK - coded));
    return s.descale;
}

void grad_quantize(Device* dev, uint8_t* send, const float* grads, const Bucket* bucket, int num_ranks) {
    cost_grad_exchange(dev, "grad quantize", bucket, 5.0, num_ranks);
    check_ranks("grad_quantize", num_ranks, 0);
    size_t blocks = bucket->chunk / GRAD_BLOCK, bytes = grad_wire_bytes(bucket->chunk);
    size_t payload = grad_payload_bytes(bucket->chunk), num_blocks = blocks * (size_t)num_ranks;
#pragma omp parallel for schedule(static) num_threads(threads_for_blocks(dev, num_blocks))
    for (size_t i = 0; i < num_blocks; i++) {
        size_t rank = i / blocks, block = i % blocks;
        ChunkBlock from = chunk_block(bucket, block, (int)rank);
        uint8_t* chunk = send + rank * bytes;
        float descale = grad_quantize_block(chunk + block * GRAD_BLOCK, grads + from.offset, from.count);
        memcpy(chunk + bucket->chunk + block * sizeof(float), &descale, sizeof(float));
        if (block == 0) { memset(chunk + payload, 0, bytes - payload); }
    }
}

// fmaf: with the multiplication rounded by itself, the compiler would decide the bits.
void grad_sum(Device* dev, float* grads, const uint8_t* received, const Bucket* bucket, int num_ranks, int rank) {
    cost_grad_exchange(dev, "grad sum", bucket, 4.0 + num_ranks, 1);
    check_ranks("grad_sum", num_ranks, rank);
    size_t blocks = bucket->chunk / GRAD_BLOCK, bytes = grad_wire_bytes(bucket->chunk);
#pragma omp parallel for schedule(static) num_threads(threads_for_blocks(dev, blocks * (size_t)num_ranks))
    for (size_t block = 0; block < blocks; block++) {
        ChunkBlock to = chunk_block(bucket, block, rank);
        float* sum = grads + to.offset;
        for (int r = 0; r < num_ranks; r++) {
            const uint8_t* chunk = received + (size_t)r * bytes;
            const uint8_t* codes = chunk + block * GRAD_BLOCK;
            float descale;
            memcpy(&descale, chunk + bucket->chunk + block * sizeof(float), sizeof(float));
#pragma omp simd
            for (int i = 0; i < to.count; i++) {
                sum[i] = fmaf(float_from_e4m3(codes[i]), descale, r == 0 ? 0.0f : sum[i]);
            }
        }
    }
}

static inline void grad_pack(Device* dev, float* packed, const float* grads, const Bucket* bucket, int first_rank,
                             int num_ranks, int round) {
    size_t blocks = bucket->chunk / GRAD_BLOCK, num_blocks = blocks * (size_t)num_ranks;
#pragma omp parallel for schedule(static) num_threads(threads_for_blocks(dev, num_blocks))
    for (size_t i = 0; i < num_blocks; i++) {
        ChunkBlock from = chunk_block(bucket, i % blocks, first_rank + (int)(i / blocks));
        for (int k = 0; k < GRAD_BLOCK; k++) {
            float x = k < from.count ? grads[from.offset + (size_t)k] : 0.0f;
            packed[i * GRAD_BLOCK + (size_t)k] = round ? bf16_round(x) : x;
        }
    }
}

static inline void grad_unpack(Device* dev, float* grads, const float* chunks, const Bucket* bucket, int first_rank,
                               int num_ranks) {
    size_t blocks = bucket->chunk / GRAD_BLOCK, num_blocks = blocks * (size_t)num_ranks;
#pragma omp parallel for schedule(static) num_threads(threads_for_blocks(dev, num_blocks))
    for (size_t i = 0; i < num_blocks; i++) {
        ChunkBlock to = chunk_block(bucket, i % blocks, first_rank + (int)(i / blocks));
        if (to.count > 0) { memcpy(grads + to.offset, chunks + i * GRAD_BLOCK, (size_t)to.count * sizeof(float)); }
    }
}

void grad_pack_bf16(Device* dev, bf16* packed, const float* grads, const Bucket* bucket, int first_rank,
                    int num_ranks) {
    cost_grad_exchange(dev, "grad pack", bucket, 4.0 + sizeof(bf16), num_ranks);
    check_ranks("grad_pack_bf16", num_ranks, 0);
    grad_pack(dev, packed, grads, bucket, first_rank, num_ranks, 1);
}

void grad_pack_fp32(Device* dev, float* packed, const float* grads, const Bucket* bucket, int first_rank,
                    int num_ranks) {
    cost_grad_exchange(dev, "grad pack", bucket, 8.0, num_ranks);
    check_ranks("grad_pack_fp32", num_ranks, 0);
    grad_pack(dev, packed, grads, bucket, first_rank, num_ranks, 0);
}

void grad_unpack_bf16(Device* dev, float* grads, const bf16* chunks, const Bucket* bucket, int first_rank,
                      int num_ranks) {
    cost_grad_exchange(dev, "grad unpack", bucket, 4.0 + sizeof(bf16), num_ranks);
    check_ranks("grad_unpack_bf16", num_ranks, 0);
    grad_unpack(dev, grads, chunks, bucket, first_rank, num_ranks);
}

void grad_unpack_fp32(Device* dev, float* grads, const float* chunks, const Bucket* bucket, int first_rank,
                      int num_ranks) {
    cost_grad_exchange(dev, "grad unpack", bucket, 8.0, num_ranks);
    check_ranks("grad_unpack_fp32", num_ranks, 0);
    grad_unpack(dev, grads, chunks, bucket, first_rank, num_ranks);
}

void grad_amax(Device* dev, float* amaxes, const float* grads, const Bucket* bucket) {
    cost_grad_amax(dev, bucket);
    for (int p = 0; p < bucket->num_pieces; p++) {
        const Piece* piece = &bucket->piece[p];
        size_t num_blocks = (piece->n + GRAD_BLOCK - 1) / GRAD_BLOCK;
        uint32_t most = 0; // bits of |x| in the order of magnitudes, NaN above all
#pragma omp parallel for schedule(static) reduction(max : most) num_threads(threads_for_blocks(dev, num_blocks))
        for (size_t block = 0; block < num_blocks; block++) {
            size_t start = block * GRAD_BLOCK, left = piece->n - start;
            float amax = amax_of(grads + piece->offset + start, (int)(left < GRAD_BLOCK ? left : GRAD_BLOCK));
            uint32_t bits = float_bits(amax) & 0x7FFFFFFFu;
            most = bits > most ? bits : most;
        }
        amaxes[p] = most < 0x7F800000u ? bits_float(most) : INFINITY;
    }
}

void grad_quantize_shared(Device* dev, e4m3* codes, const float* grads, const Bucket* bucket, const float* amaxes,
                          float mu, int num_ranks) {
    cost_grad_exchange(dev, "grad quantize", bucket, 5.0, num_ranks);
    check_ranks("grad_quantize_shared", num_ranks, 0);
    size_t blocks = bucket->chunk / GRAD_BLOCK, num_blocks = blocks * (size_t)num_ranks;
#pragma omp parallel for schedule(static) num_threads(threads_for_blocks(dev, num_blocks))
    for (size_t i = 0; i < num_blocks; i++) {
        ChunkBlock from = chunk_block(bucket, i % blocks, (int)(i / blocks));
        GradBlockScale s = grad_shared_scale(amaxes[chunk_piece(bucket, i % blocks)], mu);
        int coded = s.has_codes ? from.count : 0;
        encode_row(codes + i * GRAD_BLOCK, grads + from.offset, coded, s.scale, FORMAT_E4M3);
        memset(codes + i * GRAD_BLOCK + coded, 0, (size_t)(GRAD_BLOCK - coded));
    }
}

void grad_dequantize_shared(Device* dev, float* grads, const e4m3* codes, const Bucket* bucket, const float* amaxes,
                            float mu, int num_ranks, unsigned long long* saturated) {
    cost_grad_exchange(dev, "grad dequantize", bucket, 5.0, num_ranks);
    check_ranks("grad_dequantize_shared", num_ranks, 0);
    size_t blocks = bucket->chunk / GRAD_BLOCK, num_blocks = blocks * (size_t)num_ranks;
    unsigned long long count = 0;
#pragma omp parallel for schedule(static) reduction(+ : count) num_threads(threads_for_blocks(dev, num_blocks))
    for (size_t i = 0; i < num_blocks; i++) {
        ChunkBlock to = chunk_block(bucket, i % blocks, (int)(i / blocks));
        float descale = grad_shared_scale(amaxes[chunk_piece(bucket, i % blocks)], mu).descale;
        const e4m3* from = codes + i * GRAD_BLOCK;
        for (int k = 0; k < to.count; k++) {
            grads[to.offset + (size_t)k] = float_from_e4m3(from[k]) * descale;
            count += (from[k] & 0x7Fu) == 0x7Eu;
        }
    }
    *saturated += count;
}

// [begin, end) of the piece that belongs to the rank.
static inline SliceRange param_owned(const ParamPiece* piece, int rank) {
    Piece cut = {0, piece->n, piece->slice, piece->at, 0, 0};
    return piece_owned(&cut, rank);
}

void param_pack(Device* dev, bf16* packed, const ParamPiece* pieces, int num_pieces, size_t chunk, int rank) {
    cost_param_pack(dev, chunk);
    for (int p = 0; p < num_pieces; p++) {
        SliceRange own = param_owned(&pieces[p], rank);
        size_t count = own.end - own.begin;
        bf16* to = packed + pieces[p].at;
        memcpy(to, pieces[p].param + own.begin, count * sizeof(bf16));
        memset(to + count, 0, (pieces[p].slice - count) * sizeof(bf16));
    }
}

void param_unpack(Device* dev, const ParamPiece* pieces, const bf16* gathered, int num_pieces, size_t chunk,
                  int num_ranks) {
    cost_param_unpack(dev, chunk, num_ranks);
    for (int rank = 0; rank < num_ranks; rank++) {
        for (int p = 0; p < num_pieces; p++) {
            SliceRange own = param_owned(&pieces[p], rank);
            const bf16* from = gathered + (size_t)rank * chunk + pieces[p].at;
            memcpy(pieces[p].param + own.begin, from, (own.end - own.begin) * sizeof(bf16));
        }
    }
}

void quantize_slice(Device* dev, e4m3* data, ScaleSlot* slot, const float* master, size_t n) {
    cost_quantize_slice(dev, n);
    check(n % 16 == 0, "quantize_slice: n = %zu, want a multiple of 16", n);
    size_t blocks = (n + GRAD_BLOCK - 1) / GRAD_BLOCK;
    float scale = slot->scale;
#pragma omp parallel for schedule(static) num_threads(threads_for_blocks(dev, blocks))
    for (size_t block = 0; block < blocks; block++) {
        size_t start = block * GRAD_BLOCK, left = n - start;
        encode_row(data + start, master + start, (int)(left < GRAD_BLOCK ? left : GRAD_BLOCK), scale, FORMAT_E4M3);
    }
    slot->descale = 1.0f / scale;
}

void transpose_weight(Device* dev, e4m3* transposed, const e4m3* data, int OC, int C) {
    cost_transpose_weight(dev, OC, C);
    check(OC > 0 && C > 0 && OC % 16 == 0 && C % 16 == 0,
          "transpose_weight: (OC, C) = (%d, %d), want positive multiples of 16", OC, C);
#pragma omp parallel for schedule(static) num_threads(cpu_threads_for(dev, 2e-4 * OC * C))
    for (int row = 0; row < OC; row += TILE_ROWS) {
        int rows = OC - row < TILE_ROWS ? OC - row : TILE_ROWS;
        transpose_tile(transposed + row, data + (size_t)row * C, rows, OC, C);
    }
}

#endif
