// -b auto: candidates, their predicted times, and the choice among those that fit.
#include "micro_batch.h"

#include "unit.h"

static MicroBatch candidates[MAX_MICRO_BATCHES];

// The candidates of a command line on `num_ranks` H200s, 1 GiB plus 1 GiB per sequence each.
static int candidates_of(const char* model, const char* T, const char* d, const char* precision, int num_ranks) {
    const char* words[] = {"test", "-i", "x", "-b", "auto", "-e", model, "-t", T, "-d", d, "--precision", precision};
    char* argv[16];
    for (int i = 0; i < 13; i++) {
        argv[i] = (char*)(uintptr_t)words[i];
    }
    TrainConfig train;
    GptConfig gpt;
    config_parse(&train, &gpt, 13, argv);
    expect(train.batch_size == BATCH_AUTO, "-b auto is %d", train.batch_size);
    config_finish(&train, &gpt, num_ranks, 0);
    Chip chip = chip_from_device("NVIDIA H200", 0, 0, 0);
    int n = micro_batch_candidates(candidates, &chip, &gpt, &train);
    for (int i = 0; i < n; i++) {
        candidates[i].bytes = (size_t)(1 + candidates[i].B) << 30;
    }
    return n;
}

static void expect_candidates(int n, const int* want, int num_wanted, int64_t sequences) {
    expect(n == num_wanted, "%d candidates, want %d", n, num_wanted);
    for (int i = 0; i < n && i < num_wanted; i++) {
        expect(candidates[i].B == want[i], "candidate %d is %d, want %d", i, candidates[i].B, want[i]);
        expect((int64_t)candidates[i].B * candidates[i].micro_steps == sequences, "%d x %d sequences, want %lld",
               candidates[i].B, candidates[i].micro_steps, (long long)sequences);
    }
}

static void test_candidates(void) {
    const int powers[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}, divisors[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 48};
    const int even[] = {2, 4, 6, 10, 12, 20, 30, 60}, all[] = {1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60};
    expect_candidates(candidates_of("d12", "1024", "524288", "fp8", 1), powers, 10, 512);
    expect_candidates(candidates_of("d12", "1024", "524288", "fp8", 8), powers, 7, 64);
    expect_candidates(candidates_of("gpt3:c2048", "2048", "98304", "bf16", 1), divisors, 10, 48);
    expect_candidates(candidates_of("d12", "8", "480", "fp8", 1), even, 8, 60); // B * T a multiple of 16
    expect_candidates(candidates_of("d12", "8", "480", "bf16", 1), all, 12, 60);
    expect(candidates_of("d12", "8", "24", "fp8", 1) == 0, "3 x 8 tokens cannot be split for FP8");
    // 2^26 tokens of a micro-step, 65,536 sequences
    int n = candidates_of("d12", "1024", "1073741824", "fp8", 1);
    expect(n == 17 && candidates[n - 1].B == 65536, "%d candidates, up to %d", n, candidates[n - 1].B);
    n = candidates_of("d12", "4096", "1073741824", "fp8", 1);
    expect(n == 15 && candidates[n - 1].B == 16384, "%d candidates, up to %d", n, candidates[n - 1].B);
}

// A larger micro-batch is faster, and by how much: only what each micro-step repeats. By hand for d12 in BF16: weights
// read twice and gradients read and written (2 + 2 + 8 bytes) of 85 M linear and 39 M head parameters, and launches.
static void test_seconds(void) {
    int n = candidates_of("d12", "1024", "524288", "bf16", 1);
    for (int i = 1; i < n; i++) {
        double saved = candidates[i - 1].seconds - candidates[i].seconds;
        int fewer = candidates[i - 1].micro_steps - candidates[i].micro_steps;
        double weights = 12.0 * (12.0 * 12 * 768 * 768 + 50304.0 * 768);
        double want = fewer * (weights / 4.8e12 / MICRO_BATCH_EFFICIENCY + (24 * 12 + 12) * MICRO_BATCH_OP_SECONDS);
        expect(fabs(saved / want - 1.0) < 0.01, "B = %d saves %g s, want %g", candidates[i].B, saved, want);
    }
}

static void test_choice(void) {
    int n = candidates_of("d12", "1024", "524288", "fp8", 1);
    expect(micro_batch_choose(candidates, n, (size_t)1 << 30) == -1, "nothing fits into 1 GiB");
    expect(micro_batch_choose(candidates, n, (size_t)2 << 30) == 0, "B = 1 fits into 2 GiB, exactly");
    expect(micro_batch_choose(candidates, n, ((size_t)3 << 30) - 1) == 0, "B = 2 does not fit into less than 3 GiB");
    expect(micro_batch_choose(candidates, n, (size_t)3 << 30) == 1, "B = 2 fits into 3 GiB");
    for (size_t GiB = 2; GiB < 1000; GiB++) { // the definition
        int i = micro_batch_choose(candidates, n, GiB << 30), largest = 0;
        while (largest + 1 < n && candidates[largest + 1].bytes <= GiB << 30) {
            largest++;
        }
        double fastest = candidates[largest].seconds;
        expect(i >= 0 && i <= largest && candidates[i].seconds <= 1.01 * fastest, "%zu GiB: B = %d takes %.3fx", GiB,
               candidates[i].B, candidates[i].seconds / fastest);
        expect(i == 0 || candidates[i - 1].seconds > 1.01 * fastest, "%zu GiB: B = %d would do, too", GiB,
               candidates[i - 1].B);
    }
    // a library's workspace makes the middle one larger than the rest: it alone drops out
    int i = micro_batch_choose(candidates, n, (size_t)20 << 30);
    candidates[i].bytes = (size_t)21 << 30;
    int other = micro_batch_choose(candidates, n, (size_t)20 << 30);
    expect(other >= 0 && other != i, "%d was chosen again", candidates[i].B);
}

static void test_print(void) {
    int n = candidates_of("d12", "1024", "524288", "fp8", 1);
    const struct {
        size_t GiB;
        const char* text;
    } cases[] = {{1, "-b auto: nothing fits into 1.00 GiB; trying the smallest, -b 1 with 2.00 GiB"},
                 {3, "-b auto: -b 2, 256 micro-steps, 3.00 of 3.00 GiB; the largest that fits"},
                 {900, "would fit, too, and should be only 0."}};
    for (int i = 0; i < 3; i++) {
        char* text = NULL;
        size_t size = 0;
        FILE* f = open_memstream(&text, &size);
        micro_batch_print(f, candidates, n, micro_batch_choose(candidates, n, cases[i].GiB << 30), cases[i].GiB << 30);
        fclose(f);
        expect(strstr(text, cases[i].text) != NULL, "%zu GiB: %s", cases[i].GiB, text);
        expect(strchr(text, '\n') == text + size - 1, "want one line: %s", text);
        free(text);
    }
    n = candidates_of("d12", "1024", "1024", "fp8", 1);
    char* text = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&text, &size);
    micro_batch_print(f, candidates, n, 0, (size_t)100 << 30);
    micro_batch_print_all(f, candidates, n, (size_t)1 << 30);
    fclose(f);
    expect(strstr(text, "the largest that -d allows") != NULL && strstr(text, "does not fit") != NULL, "%s", text);
    free(text);
}

int main(void) {
    unit_run(test_candidates);
    unit_run(test_seconds);
    unit_run(test_choice);
    unit_run(test_print);
    return unit_report();
}
