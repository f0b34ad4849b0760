// What this chip could do at best: FLOPs and bytes of every op of a training step, and the time below which no program
// that does these ops one after another can stay:
//
//     roofline(step) = sum over ops of max(FLOPs / peak of the op's format, bytes / memory bandwidth)
//
// The program divides it by the measured time and shows the share on every step line. The ops and their bytes are those
// of the table in the design (what each op must read and write once; the weights of a small op and statistics per row
// are left out). Useful FLOPs only: causal attention counts half the square. Communication is not in it.
//
// llm.c's MFU is here too, for comparison: (6 N + 6 L C T) FLOPs per token over the chip's BF16 peak, whatever the
// precision, with attention counted in full.
#ifndef ROOFLINE_H
#define ROOFLINE_H

#include "check.h"

#include <ctype.h>
#include <math.h>

#include "clock.h"
#include "config.h"

// ---------------------------------------------------------------------------------------------------------------------
// chips

typedef struct {
    char name[256]; // as long as CUDA makes them
    double fp8_flops;   // dense tensor-core peak, FLOP/s (2 per multiply-add)
    double bf16_flops;  //
    double bytes_per_s; // memory bandwidth
    int is_estimate;    // 1: not in the table; derived from clocks and widths, or measured
} Chip;

// The data sheets' dense peaks (NVIDIA H100, H200, GH200 data sheets; H800 and H20 as published for those markets), in
// TFLOP/s and GB/s. The first row whose words occur in the device name, in order, is the chip, so longer names stand
// first. The chip's real ceiling is lower: under matrix load its clock falls with the power limit.
static inline int chip_from_table(Chip* chip, const char* device_name) {
    static const struct {
        const char* words;
        const char* more; // NULL, or a second word
        double fp8, bf16, bandwidth;
    } chips[] = {
        {"GH200", "HBM3e", 1979, 989, 4900}, {"GH200", "144G", 1979, 989, 4900}, {"GH200", NULL, 1979, 989, 4000},
        {"H200", "NVL", 1671, 836, 4800},    {"H200", NULL, 1979, 989, 4800},    {"H100", "NVL", 1671, 836, 3900},
        {"H100", "PCIe", 1513, 756, 2039},   {"H100", NULL, 1979, 989, 3350},    {"H800", "PCIe", 1513, 756, 2039},
        {"H800", NULL, 1979, 989, 3350},     {"H20", NULL, 296, 148, 4000},
    };
    for (size_t i = 0; i < sizeof(chips) / sizeof(chips[0]); i++) {
        const char* at = strstr(device_name, chips[i].words);
        size_t length = strlen(chips[i].words);
        // a whole word: "H20" is not in "H200", "H200" not in "GH200"
        if (at == NULL || isalnum((unsigned char)at[length]) || (at > device_name && isalnum((unsigned char)at[-1]))) {
            continue;
        }
        if (chips[i].more != NULL && strstr(device_name, chips[i].more) == NULL) {
            continue;
        }
        memset(chip, 0, sizeof(*chip));
        snprintf(chip->name, sizeof(chip->name), "%s", device_name);
        chip->fp8_flops = chips[i].fp8 * 1e12;
        chip->bf16_flops = chips[i].bf16 * 1e12;
        chip->bytes_per_s = chips[i].bandwidth * 1e9;
        return 1;
    }
    return 0;
}

// The peaks of a GPU by its device name. One that is not in the table is taken for a Hopper part and estimated from
// what the driver reports: 4,096 dense BF16 FLOPs and twice as many FP8 per SM and clock (the H100's 989 TFLOP/s over
// 132 SMs at 1.83 GHz), and the memory's own bandwidth. num_sms, sm_ghz, bytes_per_s must be positive then.
static inline Chip chip_from_device(const char* device_name, int num_sms, double sm_ghz, double bytes_per_s) {
    Chip chip;
    if (chip_from_table(&chip, device_name)) {
        return chip;
    }
    check(num_sms > 0 && sm_ghz > 0 && bytes_per_s > 0,
          "unknown chip '%s', and the driver reports %d SMs at %g GHz with %g bytes/s, want positive numbers",
          device_name, num_sms, sm_ghz, bytes_per_s);
    memset(&chip, 0, sizeof(chip));
    snprintf(chip.name, sizeof(chip.name), "%s", device_name);
    chip.bf16_flops = 4096.0 * num_sms * sm_ghz * 1e9;
    chip.fp8_flops = 2.0 * chip.bf16_flops;
    chip.bytes_per_s = bytes_per_s;
    chip.is_estimate = 1;
    return chip;
}

// A machine whose peaks were measured or given; every format runs at `flops`.
static inline Chip chip_of_cpu(double flops, double bytes_per_s) {
    check(flops > 0 && bytes_per_s > 0, "chip_of_cpu: %g FLOP/s, %g bytes/s, want positive numbers", flops,
          bytes_per_s);
    Chip chip;
    memset(&chip, 0, sizeof(chip));
    snprintf(chip.name, sizeof(chip.name), "CPU");
    chip.fp8_flops = chip.bf16_flops = flops;
    chip.bytes_per_s = bytes_per_s;
    chip.is_estimate = 1;
    return chip;
}

#ifndef __CUDACC__ // GNU vectors, which nvcc's front end does not take; the GPU program has no use for them

// FLOP/s of one core in FP32 multiply-adds held in registers, as this compiler and these flags build them. About 20 ms.
static inline double roofline_measure_core_flops(void) {
    typedef float Lanes __attribute__((vector_size(64)));
    enum { CHAINS = 8, ROUNDS = 20000 }; // enough independent chains to cover the latency of an FMA
    Lanes sum[CHAINS], factor, term;
    for (int i = 0; i < 16; i++) {
        factor[i] = 0.999f;
        term[i] = 0.001f * (float)i;
    }
    for (int c = 0; c < CHAINS; c++) {
        sum[c] = term;
    }
    double best = 0.0, begin = seconds_now();
    while (seconds_now() - begin < 0.02) { // the fastest of many short runs: the others were interrupted
        double start = seconds_now();
        for (int round = 0; round < ROUNDS; round++) {
            for (int c = 0; c < CHAINS; c++) {
                sum[c] = sum[c] * factor + term;
            }
        }
        double flops = 2.0 * 16 * CHAINS * ROUNDS / (seconds_now() - start);
        best = flops > best ? flops : best;
        volatile float sink = sum[0][0] + sum[1][1] + sum[2][2] + sum[3][3] + sum[4][4] + sum[5][5] + sum[6][6] +
                              sum[7][7]; // the results are wanted
        (void)sink;
    }
    return best;
}

// Bytes/s of copying memory that no cache holds, read and write counted, on one core. About 60 ms.
static inline double roofline_measure_bandwidth(void) {
    const size_t bytes = 96u << 20;
    char* from = (char*)malloc_or_die(bytes);
    char* to = (char*)malloc_or_die(bytes);
    memset(from, 1, bytes);
    memset(to, 2, bytes); // pages must exist before the clock runs
    double best = 0.0;
    for (int run = 0; run < 3; run++) {
        from[run] = (char)run;
        double start = seconds_now();
        memcpy(to, from, bytes);
        double rate = 2.0 * (double)bytes / (seconds_now() - start);
        volatile char sink = to[bytes / 2];
        (void)sink;
        best = rate > best ? rate : best;
    }
    free(from);
    free(to);
    return best;
}

// The peaks of `threads` cores of this machine, measured in about a tenth of a second. One core's copy is taken for the
// memory bandwidth of all: few cores saturate it, and the CPU floor is bound by arithmetic.
static inline Chip chip_measured(int threads) {
    return chip_of_cpu(roofline_measure_core_flops() * threads, roofline_measure_bandwidth());
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// the ops of a training step

typedef struct {
    const char* name;
    double flops_fp8, flops_bf16; // per optimizer step, all layers and micro-steps; in the format that multiplies
    double bytes;                 //
    double seconds;               // max(FLOPs / peak, bytes / bandwidth) of each call, summed over the calls
} RooflineOp;

typedef struct {
    RooflineOp ops[24];
    int num_ops;
    double flops, bytes, seconds; // of the whole step
} Roofline;

// Add `count` calls of an op with `flops` and `bytes` each to the row `name`.
static inline void roofline_add(Roofline* r, const Chip* chip, const char* name, double count, int is_fp8, double flops,
                                double bytes) {
    int i = 0;
    while (i < r->num_ops && strcmp(r->ops[i].name, name) != 0) {
        i++;
    }
    RooflineOp* op = &r->ops[i];
    if (i == r->num_ops) {
        check(r->num_ops < (int)(sizeof(r->ops) / sizeof(r->ops[0])), "roofline_add: no room for '%s'", name);
        memset(op, 0, sizeof(*op));
        op->name = name;
        r->num_ops++;
    }
    double seconds = count * fmax(flops / (is_fp8 ? chip->fp8_flops : chip->bf16_flops), bytes / chip->bytes_per_s);
    *(is_fp8 ? &op->flops_fp8 : &op->flops_bf16) += count * flops;
    op->bytes += count * bytes;
    op->seconds += seconds;
    r->flops += count * flops;
    r->bytes += count * bytes;
    r->seconds += seconds;
}

// One linear layer with K inputs and N outputs per row, `count` calls: y = x w^T, dx = dy w, dw += dy^T x.
// x, w and dy in the layer's format (`width` bytes; dy too), y and dx stored wide (BF16: 2 bytes, FP32: 4), dw read and
// written in FP32.
static inline void roofline_add_linear(Roofline* r, const Chip* chip, double count, int is_fp8, double rows, double K,
                                       double N, double wide) {
    double width = is_fp8 ? 1.0 : wide, flops = 2.0 * rows * K * N;
    roofline_add(r, chip, "linear forward", count, is_fp8, flops, width * (rows * K + K * N) + wide * rows * N);
    roofline_add(r, chip, "linear dgrad", count, is_fp8, flops, width * (rows * N + K * N) + wide * rows * K);
    roofline_add(r, chip, "linear wgrad", count, is_fp8, flops, width * (rows * N + rows * K) + 8.0 * K * N);
}

// The ops of one block's forward and backward pass, `count` times (micro-steps).
//   fp8    one flag per linear: qkv, proj, fc, fcproj. What feeds an FP8 linear is written twice in 1 byte (row-major
//          and transposed), what feeds a BF16 one once in 2 bytes: the same bytes
//   wide   bytes of a value outside the FP8 linears: 2, or 4 in FP32
static inline void roofline_add_block(Roofline* r, const Chip* chip, double count, const int fp8[4], double rows,
                                      double T, double C, double wide) {
    double unit = rows * C * wide; // bytes of one pass over a (B*T, C) tensor
    roofline_add_linear(r, chip, count, fp8[0], rows, C, 3 * C, wide);
    roofline_add_linear(r, chip, count, fp8[1], rows, C, C, wide);
    roofline_add_linear(r, chip, count, fp8[2], rows, C, 4 * C, wide);
    roofline_add_linear(r, chip, count, fp8[3], rows, 4 * C, C, wide);
    // residual 1 + branch 1 in, residual 1 + normalised 1 out, twice per block
    roofline_add(r, chip, "residual + layernorm forward", 2 * count, 0, 0.0, 4 * unit);
    // dy 1 + x 1 + dresidual 1 in, dresidual 1 out, which in FP8 is also written twice in 1 byte for the linear below
    roofline_add(r, chip, "layernorm backward (ln2)", count, 0, 0.0, (fp8[1] ? 5 : 4) * unit);
    roofline_add(r, chip, "layernorm backward (ln1)", count, 0, 0.0, (fp8[3] ? 5 : 4) * unit);
    // QK^T and PV, the causal half: 2 * (2 * rows * T * C) / 2. In: qkv 3. Out: 1, and once more for an FP8 projection
    roofline_add(r, chip, "attention forward", count, 0, 2.0 * rows * T * C, (fp8[1] ? 5 : 4) * unit);
    // five products instead of two. In: qkv 3, out 1, dout 1. Out: dqkv 3
    roofline_add(r, chip, "attention backward", count, 0, 5.0 * rows * T * C, 8 * unit);
    roofline_add(r, chip, "gelu forward", count, 0, 0.0, 8 * unit);   // in 4, out 4
    roofline_add(r, chip, "gelu backward", count, 0, 0.0, 12 * unit); // dy 4, x 4 in, dx 4 out
}

// All ops of one optimizer step of this rank: grad_accum_steps micro-steps of (B, T), then the update.
// train->grad_accum_steps must be set (config_finish).
static inline Roofline roofline_step(const Chip* chip, const GptConfig* gpt, const TrainConfig* train) {
    Roofline r;
    memset(&r, 0, sizeof(r));
    double T = train->seq_len, rows = (double)train->batch_size * T, C = gpt->channels, Vp = gpt->padded_vocab_size;
    double M = train->grad_accum_steps, N = (double)gpt_num_parameters(gpt);
    double wide = train->precision == PRECISION_FP32 ? 4.0 : 2.0, unit = rows * C * wide;
    roofline_add(&r, chip, "embedding forward", M, 0, 0.0, 2 * unit);
    for (int l = 0; l < gpt->num_layers; l++) {
        int fp8[4];
        for (int i = 0; i < 4; i++) {
            fp8[i] = config_linear_is_fp8(train, gpt, l, 1 << i);
        }
        roofline_add_block(&r, chip, M, fp8, rows, T, C, wide);
    }
    roofline_add(&r, chip, "residual + layernorm forward", M, 0, 0.0, 4 * unit); // the last LayerNorm
    roofline_add(&r, chip, "layernorm backward (last)", M, 0, 0.0, 3 * unit);
    // LM head: logits = x wte^T. The loss turns logits into their gradients, in place or (FP8) twice in 1 byte
    int fp8_head = train->fp8_lm_head;
    double logits = wide * rows * Vp, head = 2.0 * rows * C * Vp, width = fp8_head ? 1.0 : wide;
    roofline_add(&r, chip, "lm head", M, fp8_head, head, width * (rows * C + Vp * C) + logits);
    roofline_add(&r, chip, "cross-entropy", M, 0, 0.0, 2 * logits);
    roofline_add(&r, chip, "lm head dgrad", M, fp8_head, head, width * (rows * Vp + Vp * C) + unit);
    roofline_add(&r, chip, "lm head wgrad", M, fp8_head, head, width * (rows * Vp + rows * C) + 8.0 * Vp * C);
    roofline_add(&r, chip, "embedding backward", M, 0, 0.0, unit + 8.0 * rows * C);
    // per parameter that this rank updates: gradient read for the norm 4 and again 4, master 8, moments 16; per parameter:
    // weight of the next step
    double updated = train->zero_stage == 1 && train->num_ranks > 1 ? N / train->num_ranks : N;
    roofline_add(&r, chip, "gradient norm + adamw", 1, 0, 0.0, (4 + 4 + 8 + 16) * updated + wide * N);
    return r;
}

// Seconds of one optimizer step at the roofline.
static inline double roofline_step_seconds(const Chip* chip, const GptConfig* gpt, const TrainConfig* train) {
    return roofline_step(chip, gpt, train).seconds;
}

// llm.c's model FLOPs per token, 6 N + 6 L C T (gpt2_estimate_mfu; Kaplan et al., arXiv:2001.08361, section 2.1).
static inline double roofline_llmc_flops_per_token(const GptConfig* gpt, int T) {
    return 6.0 * (double)gpt_num_parameters(gpt) + 6.0 * gpt->num_layers * (double)gpt->channels * T;
}

// llm.c's model FLOPs utilisation: a share of the BF16 peak, 0 to about 1 (FP8 may pass 1).
static inline double roofline_mfu(const Chip* chip, const GptConfig* gpt, int T, double tokens_per_s) {
    return roofline_llmc_flops_per_token(gpt, T) * tokens_per_s / chip->bf16_flops;
}

// The table of ops, and what the whole step could be at best.
static inline void roofline_print(FILE* out, const Chip* chip, const GptConfig* gpt, const TrainConfig* train) {
    Roofline r = roofline_step(chip, gpt, train);
    fprintf(out, "roofline of one step on %s%s: FP8 %.1f, BF16 %.1f TFLOP/s, %.0f GB/s\n", chip->name,
            chip->is_estimate ? " (estimated: not in the table of chips)" : "", chip->fp8_flops / 1e12,
            chip->bf16_flops / 1e12, chip->bytes_per_s / 1e9);
    for (int i = 0; i < r.num_ops; i++) {
        const RooflineOp* op = &r.ops[i];
        fprintf(out, "  %-28s %12.3f GFLOP %10.3f GB %10.3f ms %5.1f%%\n", op->name,
                (op->flops_fp8 + op->flops_bf16) / 1e9, op->bytes / 1e9, op->seconds * 1e3,
                100 * op->seconds / r.seconds);
    }
    double tokens = (double)train->batch_size * train->seq_len * train->grad_accum_steps;
    fprintf(out, "  %-28s %12.3f GFLOP %10.3f GB %10.3f ms = %.0f tokens/s per rank\n", "sum", r.flops / 1e9,
            r.bytes / 1e9, r.seconds * 1e3, tokens / r.seconds);
}

#endif
