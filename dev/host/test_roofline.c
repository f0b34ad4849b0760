// Chips by name, FLOPs and bytes of a step against sums by hand, llm.c's MFU, and the measured CPU.
#include "roofline.h"

#include "unit.h"

static void setup(TrainConfig* train, GptConfig* gpt, const char* model, const char* precision, const char* more) {
    char* argv[] = {"test", "-e", (char*)(uintptr_t)model, "--precision", (char*)(uintptr_t)precision, "-b", "16", "-d",
                    "32768", "--dry-run", "--bf16-layers", (char*)(uintptr_t)more};
    config_parse(train, gpt, 12, argv);
    config_finish(train, gpt, 1, 0);
}

static void test_chip_table(void) {
    static const struct {
        const char* name;
        double fp8, bf16, bandwidth;
    } cases[] = {
        {"NVIDIA H100 80GB HBM3", 1979, 989, 3350},  {"NVIDIA H100 PCIe", 1513, 756, 2039},
        {"NVIDIA H100 NVL", 1671, 836, 3900},        {"NVIDIA H200", 1979, 989, 4800},
        {"NVIDIA H200 NVL", 1671, 836, 4800},        {"NVIDIA H800", 1979, 989, 3350},
        {"NVIDIA H800 PCIe", 1513, 756, 2039},       {"NVIDIA H20", 296, 148, 4000},
        {"NVIDIA GH200 480GB", 1979, 989, 4000},     {"NVIDIA GH200 144G HBM3e", 1979, 989, 4900},
        {"H200", 1979, 989, 4800},                   {"NVIDIA H20-3e", 296, 148, 4000},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Chip chip = chip_from_device(cases[i].name, 0, 0, 0);
        expect(chip.fp8_flops == cases[i].fp8 * 1e12 && chip.bf16_flops == cases[i].bf16 * 1e12 &&
               chip.bytes_per_s == cases[i].bandwidth * 1e9 && !chip.is_estimate,
               "%s: FP8 %g, BF16 %g, %g bytes/s", cases[i].name, chip.fp8_flops, chip.bf16_flops, chip.bytes_per_s);
        expect(strcmp(chip.name, cases[i].name) == 0, "%s is called %s", cases[i].name, chip.name);
    }
}

static void no_numbers(void* name) { chip_from_device((const char*)name, 0, 1.0, 1e12); }

static void test_unknown_chip(void) {
    Chip chip = chip_from_device("NVIDIA H2000 Something", 132, 1.83, 3.35e12); // neither H20 nor H200
    expect(chip.is_estimate, "an unknown chip must say so");
    expect(fabs(chip.bf16_flops / 989.4e12 - 1) < 0.001, "132 SMs at 1.83 GHz: %g, want the H100's 989.4e12",
           chip.bf16_flops);
    expect(chip.fp8_flops == 2 * chip.bf16_flops && chip.bytes_per_s == 3.35e12, "FP8 or bandwidth");
    expect_dies(no_numbers, (void*)(uintptr_t)"NVIDIA XYZ", "unknown chip 'NVIDIA XYZ', and the driver reports 0 SMs");
}

// FLOPs by hand: 3 products per linear, 24 C^2 per token, layer and pass; attention 7 T C; head 6 C Vp.
static void test_flops_of_a_step(void) {
    TrainConfig train;
    GptConfig gpt;
    Chip chip = chip_from_device("NVIDIA H200", 0, 0, 0);
    const char* precisions[] = {"fp8", "bf16", "fp32"};
    for (int p = 0; p < 3; p++) {
        setup(&train, &gpt, "d48", precisions[p], "0,0");
        expect(train.grad_accum_steps == 2, "grad_accum_steps");
        Roofline r = roofline_step(&chip, &gpt, &train);
        double tokens = 32768, L = 48, C = 1600, T = 1024, Vp = 50304;
        double want = tokens * (L * (72 * C * C + 7 * T * C) + 6 * C * Vp);
        expect(fabs(r.flops / want - 1) < 1e-12, "%s: %g FLOPs, want %g", precisions[p], r.flops, want);
        double fp8 = 0;
        for (int i = 0; i < r.num_ops; i++) {
            fp8 += r.ops[i].flops_fp8;
        }
        double want_fp8 = p == 0 ? tokens * L * 72 * C * C : 0;
        expect(fabs(fp8 - want_fp8) <= 1e-12 * want_fp8, "%s: %g FLOPs in FP8, want %g", precisions[p], fp8, want_fp8);
        double bound = fp8 / chip.fp8_flops + (r.flops - fp8) / chip.bf16_flops;
        double memory = r.bytes / chip.bytes_per_s;
        expect(r.seconds > bound && r.seconds > memory && r.seconds < bound + memory,
               "%s: %g s must lie between its bounds", precisions[p], r.seconds);
    }
}

// The bytes of the design's table, per element of (B*T, C): 8, 10, 8, 16 forward and 24, 10, 10, 16 backward in FP8.
static void test_bytes_of_a_block(void) {
    Chip chip = chip_from_device("NVIDIA H200", 0, 0, 0);
    Roofline r;
    memset(&r, 0, sizeof(r));
    int fp8[4] = {1, 1, 1, 1};
    double rows = 4096, T = 1024, C = 512, RC = rows * C;
    roofline_add_block(&r, &chip, 1, fp8, rows, T, C, 2.0);
    static const struct {
        const char* name;
        double per_element;
    } ops[] = {{"residual + layernorm forward", 16}, {"attention forward", 10},        {"gelu forward", 16},
               {"gelu backward", 24},                {"layernorm backward (ln1)", 10}, {"layernorm backward (ln2)", 10},
               {"attention backward", 16}};
    for (size_t k = 0; k < sizeof(ops) / sizeof(ops[0]); k++) {
        int found = 0;
        for (int i = 0; i < r.num_ops; i++) {
            if (strcmp(r.ops[i].name, ops[k].name) == 0) {
                found = 1;
                expect(r.ops[i].bytes == ops[k].per_element * RC, "%s: %g bytes per element, want %g", ops[k].name,
                       r.ops[i].bytes / RC, ops[k].per_element);
            }
        }
        expect(found, "no op '%s'", ops[k].name);
    }
    // linear forward: x and w in 1 byte, y in 2
    double x = RC + RC + RC + 4 * RC, w = 12 * C * C, y = 3 * RC + RC + 4 * RC + RC, want = x + w + 2 * y;
    expect(r.ops[0].bytes == want, "%s: %g bytes, want %g", r.ops[0].name, r.ops[0].bytes, want);
}

static void test_orderings(void) {
    TrainConfig train;
    GptConfig gpt;
    Chip h200 = chip_from_device("NVIDIA H200", 0, 0, 0), h100 = chip_from_device("NVIDIA H100 80GB HBM3", 0, 0, 0);
    setup(&train, &gpt, "d48", "fp8", "0,0");
    double fp8 = roofline_step_seconds(&h200, &gpt, &train), slower_memory = roofline_step_seconds(&h100, &gpt, &train);
    setup(&train, &gpt, "d48", "fp8", "4,4");
    double mixed = roofline_step_seconds(&h200, &gpt, &train);
    setup(&train, &gpt, "d48", "bf16", "0,0");
    double bf16 = roofline_step_seconds(&h200, &gpt, &train);
    expect(fp8 < mixed && mixed < bf16, "FP8 %g, with 8 of 48 layers in BF16 %g, BF16 %g", fp8, mixed, bf16);
    expect(fabs((mixed - fp8) / (bf16 - fp8) - 8.0 / 48) < 0.01, "8 of 48 layers cost %g of the difference",
           (mixed - fp8) / (bf16 - fp8));
    expect(slower_memory > fp8, "less bandwidth must cost time");
    // the measured peers of one H200 stay below the roofline: llm.c BF16 51,975 tokens/s on d48
    expect(32768 / bf16 > 51975 && 32768 / bf16 < 4 * 51975, "BF16 roofline of d48: %g tokens/s", 32768 / bf16);
}

static void test_llmc_mfu(void) {
    GptConfig gpt;
    gpt_from_descriptor(&gpt, "d12");
    double per_token = 6.0 * 124475904 + 6.0 * 12 * 768 * 1024;
    expect(roofline_llmc_flops_per_token(&gpt, 1024) == per_token, "%g FLOPs per token, want %g",
           roofline_llmc_flops_per_token(&gpt, 1024), per_token);
    Chip chip = chip_from_device("NVIDIA H200", 0, 0, 0);
    double mfu = roofline_mfu(&chip, &gpt, 1024, 574093); // llm.c's measured rate
    expect(fabs(mfu - 0.466) < 0.001, "MFU = %g, want 0.466", mfu);
}

static void no_flops(void* unused) {
    (void)unused;
    chip_of_cpu(0, 1e9);
}

static void test_cpu(void) {
    Chip chip = chip_measured(2);
    expect(chip.bf16_flops > 1e8 && chip.bf16_flops < 1e14, "measured %g FLOP/s", chip.bf16_flops);
    expect(chip.bytes_per_s > 1e8 && chip.bytes_per_s < 1e13, "measured %g bytes/s", chip.bytes_per_s);
    expect(chip.is_estimate && chip.fp8_flops == chip.bf16_flops, "a CPU has one peak");
    expect_dies(no_flops, NULL, "want positive numbers");
}

static void test_print(void) {
    TrainConfig train;
    GptConfig gpt;
    setup(&train, &gpt, "d2", "fp8", "1,0");
    char* text = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&text, &size);
    Chip chip = chip_from_device("NVIDIA H200", 0, 0, 0);
    roofline_print(f, &chip, &gpt, &train);
    fclose(f);
    expect(strstr(text, "NVIDIA H200: FP8 1979.0, BF16 989.0 TFLOP/s, 4800 GB/s") != NULL, "%s", text);
    expect(strstr(text, "tokens/s per rank") != NULL, "%s", text);
    free(text);
}

int main(void) {
    unit_run(test_chip_table);
    unit_run(test_unknown_chip);
    unit_run(test_flops_of_a_step);
    unit_run(test_bytes_of_a_block);
    unit_run(test_orderings);
    unit_run(test_llmc_mfu);
    unit_run(test_cpu);
    unit_run(test_print);
    return unit_report();
}
