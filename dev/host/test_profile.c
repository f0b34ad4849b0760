// The profile's sums against numbers made by hand, its table and its JSON, and the CPU floor's marks.
#define CPU_FLOOR
#include "../../lib/device_cpu.h"

#include "../../lib/profile.h"

#include "unit.h"

// 1,000 FLOP/s in BF16, 2,000 in FP8, 100 bytes/s.
static Chip a_chip(void) {
    Chip chip;
    memset(&chip, 0, sizeof(chip));
    snprintf(chip.name, sizeof(chip.name), "chip");
    chip.bf16_flops = 1000.0;
    chip.fp8_flops = 2000.0;
    chip.bytes_per_s = 100.0;
    return chip;
}

// Two steps of 10 s: "a" for 2 + 2 s, "b" for 12 s, "c" for no time; 4 s are nobody's.
static Profile a_profile(void) {
    Profile profile;
    profile_open(&profile, a_chip());
    int a = profile_count(&profile, "a", 100.0, 0.0, 0);      // 1 s of bytes
    int b = profile_count(&profile, "b", 100.0, 12000.0, 1);  // 6 s of FP8 FLOPs
    int again = profile_count(&profile, "a", 0.0, 500.0, 0);  // 0.5 s of BF16 FLOPs
    int c = profile_count(&profile, "c", 0.0, 0.0, 0);
    expect(a == 0 && b == 1 && again == 0 && c == 2 && profile.num_ops == 3, "indices %d %d %d %d", a, b, again, c);
    profile.ops[a].seconds = 4.0;
    profile.ops[b].seconds = 12.0;
    profile.num_steps = 2;
    profile.wall_s = 20.0;
    profile.wait_s = 5.0;
    return profile;
}

static void test_sums(void) {
    Profile profile = a_profile();
    const ProfileOp *a = &profile.ops[0], *b = &profile.ops[1];
    expect(a->calls == 2 && a->bytes == 100.0 && a->flops == 500.0 && a->floor_seconds == 1.5, "a: %lld calls, %g B, "
           "%g FLOP, floor %g s", (long long)a->calls, a->bytes, a->flops, a->floor_seconds);
    expect(b->calls == 1 && b->floor_seconds == 6.0, "b: floor %g s", b->floor_seconds);
    expect(profile_roofline_percent(a) == 37.5 && profile_roofline_percent(b) == 50.0 &&
           profile_roofline_percent(&profile.ops[2]) == 0.0, "roofline percents");
    expect(profile_gaps(&profile) == 2.0, "gaps %g, want 2", profile_gaps(&profile));
}

static void test_names(void) {
    Profile profile;
    profile_open(&profile, a_chip());
    expect(strcmp(profile_linear_name(&profile, 16, 64), "matmul") == 0, "a shape without a name");
    profile_name_linear(&profile, "fc", 16, 64);
    profile_name_linear(&profile, "fcproj", 64, 16);
    profile_name_linear(&profile, "head", 16, 64);
    expect(strcmp(profile_linear_name(&profile, 16, 64), "fc") == 0, "the first of two with one shape");
    expect(strcmp(profile_linear_name(&profile, 64, 16), "fcproj") == 0, "C and OC must not be mixed up");
    expect(strcmp(profile_linear_name(&profile, 64, 64), "matmul") == 0, "a shape without a name");
}

// A model of 32 channels and 100 ids, padded to 128.
static void test_names_of_a_model(void) {
    Profile profile;
    profile_open(&profile, a_chip());
    GptConfig config = {64, 100, 128, 2, 2, 32};
    profile_name_linears(&profile, &config);
    const struct {
        int C, OC;
        const char* name;
    } want[] = {{32, 96, "qkv"}, {32, 32, "proj"}, {32, 128, "fc"}, {128, 32, "fcproj"}, {32, 100, "matmul"}};
    for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++) {
        const char* found = profile_linear_name(&profile, want[i].C, want[i].OC);
        expect(strcmp(found, want[i].name) == 0, "%d to %d is '%s', want '%s'", want[i].C, want[i].OC, found,
               want[i].name);
    }
    config.padded_vocab_size = 256;
    profile_open(&profile, a_chip());
    profile_name_linears(&profile, &config);
    expect(strcmp(profile_linear_name(&profile, 32, 256), "head") == 0, "the LM head has the padded vocabulary");
}

// In FP8 every scale has to be a stored one.
static void test_skipped_steps(void) {
    TrainConfig train;
    memset(&train, 0, sizeof(train));
    train.precision = PRECISION_BF16;
    expect(profile_skipped_steps(&train) == 3, "BF16: %d steps, want 3", profile_skipped_steps(&train));
    train.precision = PRECISION_FP8;
    expect(profile_skipped_steps(&train) > AMAX_WARMUP, "FP8: %d steps, scales warm up in %d",
           profile_skipped_steps(&train), AMAX_WARMUP);
}

static void too_long(void* profile) {
    profile_count((Profile*)profile, "a name that has thirty-two letters", 0.0, 0.0, 0);
}

static void too_many(void* profile) {
    for (int i = 0; i < PROFILE_OPS + 1; i++) {
        char name[16];
        snprintf(name, sizeof(name), "op %d", i);
        profile_count((Profile*)profile, name, 0.0, 0.0, 0);
    }
}

static void test_limits(void) {
    Profile profile;
    profile_open(&profile, a_chip());
    expect_dies(too_long, &profile, "is longer than 31");
    expect_dies(too_many, &profile, "no room for 'op 64'");
}

static void test_output(void) {
    Profile profile = a_profile();
    for (int json = 0; json < 2; json++) {
        char* text = NULL;
        size_t size = 0;
        FILE* f = open_memstream(&text, &size);
        json ? profile_write_json(f, &profile) : profile_print(f, &profile);
        fclose(f);
        const char* want =
            json ? "{\"steps\": 2, \"ms\": 10000, \"host_wait_ms\": 2500, \"gaps_ms\": 2000, \"gaps_percent\": 20, "
                   "\"ops\": [{\"op\": \"b\", \"calls\": 0.5, \"ms\": 6000, \"percent\": 60, "
                   "\"gb_per_s\": 8.33333e-09, \"tflops\": 1e-09, \"roofline_percent\": 50}, "
                   "{\"op\": \"a\", \"calls\": 1, \"ms\": 2000, \"percent\": 20, \"gb_per_s\": 2.5e-08, "
                   "\"tflops\": 1.25e-10, \"roofline_percent\": 37.5}, "
                   "{\"op\": \"c\", \"calls\": 0.5, \"ms\": 0, \"percent\": 0, \"gb_per_s\": 0, "
                   "\"tflops\": 0, \"roofline_percent\": 0}]}"
                 : "profile of 2 steps on chip: 10000.00 ms per step, the host waits 2500.00 ms of it for the device\n"
                   "op                            calls         ms      %      GB/s   TFLOP/s  % of roofline\n"
                   "b                               0.5   6000.000  60.00         0       0.0           50.0\n"
                   "a                                 1   2000.000  20.00         0       0.0           37.5\n"
                   "c                               0.5      0.000   0.00         0       0.0            0.0\n"
                   "gaps                                  2000.000  20.00\n";
        expect(strcmp(text, want) == 0, "got:\n%s\nwant:\n%s", text, want);
        free(text);
    }
    profile.num_steps = 0; // nothing was profiled: nothing is printed, and nothing divided
    char* text = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&text, &size);
    profile_print(f, &profile);
    fclose(f);
    expect(size == 0, "printed: %s", text);
    free(text);
}

static void wait_ms(double ms) {
    double end = seconds_now() + 1e-3 * ms;
    while (seconds_now() < end) {
    }
}

// The time between two marks is the first one's; nobody's is nobody's; without a profile marks do nothing.
static void test_marks(void) {
    struct Device device;
    memset(&device, 0, sizeof(device));
    Profile profile;
    profile_open(&profile, a_chip());
    cost_zero(&device, 4);
    device_profile_begin(&device, &profile);
    double start = seconds_now();
    wait_ms(2.0); // in front of the first mark
    cost_zero(&device, 100);
    wait_ms(5.0);
    cost_loss_add(&device, 3);
    wait_ms(1.0);
    cost_nobody(&device);
    wait_ms(2.0);
    cost_zero(&device, 100);
    wait_ms(5.0);
    device_profile_end(&device);
    double all = seconds_now() - start;
    cost_zero(&device, 4);
    expect(device_profile(&device) == NULL && profile.num_ops == 2, "%d ops", profile.num_ops);
    const ProfileOp *zero = &profile.ops[0], *loss_add = &profile.ops[1];
    expect(zero->calls == 2 && zero->bytes == 200.0 && loss_add->bytes == 12.0, "%lld calls, %g and %g bytes",
           (long long)zero->calls, zero->bytes, loss_add->bytes);
    expect(zero->seconds >= 10e-3 && loss_add->seconds >= 1e-3, "%g s, %g s", zero->seconds, loss_add->seconds);
    expect(all - zero->seconds - loss_add->seconds >= 4e-3, "the gaps went to somebody: %g s of %g s",
           zero->seconds + loss_add->seconds, all);
}

int main(void) {
    unit_run(test_sums);
    unit_run(test_names);
    unit_run(test_names_of_a_model);
    unit_run(test_skipped_steps);
    unit_run(test_limits);
    unit_run(test_output);
    unit_run(test_marks);
    return unit_report();
}
