// Learning rates against llm.c's own, bit for bit, and against its log of a real run.
#include "schedule.h"

#include "unit.h"

static TrainConfig settings(int kind, int warmup, float fraction) {
    TrainConfig train;
    memset(&train, 0, sizeof(train));
    train.lr_schedule = kind;
    train.learning_rate = 6e-4f;
    train.warmup_steps = warmup;
    train.final_lr_fraction = fraction;
    return train;
}

// Printed by llm.c's schedulers.h (commit f1e2ace) for peak 6e-4, 100 warm-up steps of 1,200, final fraction 0.1.
static void test_matches_llmc(void) {
    static const int steps[] = {0, 57, 99, 100, 101, 500, 959, 960, 961, 1100, 1199};
    static const float want[4][11] = {
        {6.00000021e-06f, 0.000348000001f, 0.000600000028f, 0.000600000028f, 0.000599998923f, 0.00044216204f,
         0.000121470788f, 0.000120981756f, 0.000120494486f, 7.09368833e-05f, 6.00010972e-05f},
        {6.00000021e-06f, 0.000348000001f, 0.000600000028f, 0.000600000028f, 0.000599509105f, 0.000403636368f,
         0.000178309099f, 0.000177818176f, 0.000177327252f, 0.000109090877f, 6.04909146e-05f},
        {0.000600000028f, 0.000600000028f, 0.000600000028f, 0.000600000028f, 0.000600000028f, 0.000600000028f,
         0.000600000028f, 0.000600000028f, 0.000600000028f, 0.000600000028f, 0.000600000028f},
        {6.00000021e-06f, 0.000348000001f, 0.000600000028f, 0.000600000028f, 0.000600000028f, 0.000600000028f,
         0.000600000028f, 0.000600000028f, 0.000565143186f, 0.000187568221f, 6.11261785e-05f},
    };
    for (int kind = 0; kind < 4; kind++) {
        TrainConfig train = settings(kind, 100, 0.1f);
        for (int i = 0; i < 11; i++) {
            float got = schedule_learning_rate(&train, 1200, steps[i]);
            expect(got == want[kind][i], "kind %d step %d: %.9g, llm.c has %.9g", kind, steps[i], (double)got,
                   (double)want[kind][i]);
        }
    }
}

// Between 0 and the peak, never up after the warm-up, and at its ends where it should be, for many shapes of run.
static void test_shape(void) {
    for (int kind = 0; kind < 4; kind++) {
        for (int warmup = 0; warmup <= 50; warmup += 25) {
            for (int num_steps = 1; num_steps < 400; num_steps = num_steps * 3 + 1) {
                TrainConfig train = settings(kind, warmup, 0.25f);
                float before = train.learning_rate;
                for (int step = 0; step <= num_steps + 5; step++) {
                    float lr = schedule_learning_rate(&train, num_steps, step);
                    expect(lr > 0 && lr <= train.learning_rate, "kind %d warmup %d of %d, step %d: %g", kind, warmup,
                           num_steps, step, (double)lr);
                    expect(step < warmup || lr <= before || step == 0, "kind %d: step %d rises", kind, step);
                    before = lr;
                }
                if (kind != SCHEDULE_CONSTANT && warmup < num_steps) {
                    float end = schedule_learning_rate(&train, num_steps, num_steps);
                    expect(fabsf(end - 1.5e-4f) < 1e-10f, "kind %d ends at %g, want 1.5e-4", kind, (double)end);
                }
            }
        }
    }
}

static void test_no_decay(void) {
    TrainConfig train = settings(SCHEDULE_COSINE, 0, 1.0f);
    for (int step = 0; step < 100; step++) {
        expect(schedule_learning_rate(&train, 100, step) == 6e-4f, "step %d decays", step);
    }
}

static void unknown_kind(void* unused) {
    (void)unused;
    TrainConfig train = settings(17, 0, 1.0f);
    schedule_learning_rate(&train, 10, 5);
}

static void test_unknown_kind(void) { expect_dies(unknown_kind, NULL, "unknown schedule 17"); }

// Every learning rate in llm.c's log of its d12 run: -x 1200 -l 0.0006 -u 100 -q 0.1, cosine.
static void test_real_log(void) {
    char path[512], line[256];
    const char* data = getenv("SHARED_DATA") ? getenv("SHARED_DATA") : "../shared/data";
    snprintf(path, sizeof(path), "%s/llmc/d12_main.log", data);
    FILE* f = fopen(path, "r");
    if (f == NULL) {
        unit_skip("no llmc/d12_main.log in $SHARED_DATA or ../shared/data");
        return;
    }
    TrainConfig train = settings(SCHEDULE_COSINE, 100, 0.1f);
    int count = 0;
    while (fgets(line, sizeof(line), f) != NULL) {
        int step;
        char want[32], got[32];
        float loss;
        if (sscanf(line, "s:%d trl:%f lr:%31s", &step, &loss, want) == 3) {
            snprintf(got, sizeof(got), "%.6f", (double)schedule_learning_rate(&train, 1200, step));
            expect(strcmp(got, want) == 0, "step %d: %s, the log has %s", step, got, want);
            count++;
        }
    }
    fclose(f);
    expect(count == 1200, "%d steps in the log, want 1200", count);
}

int main(void) {
    unit_run(test_matches_llmc);
    unit_run(test_shape);
    unit_run(test_no_decay);
    unit_run(test_unknown_kind);
    unit_run(test_real_log);
    return unit_report();
}
