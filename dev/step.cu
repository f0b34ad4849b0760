// Time of whole training steps, with what surrounds the kernels turned on and off in turn, in one process:
//
//     make bench-step ARGS='-i tokens.bin -e d12 -b 64 -d 131072'
//
// takes the program's own flags, trains from random weights, and prints for every mode the median of the steps' times:
//
//     all on
//     ahead off   the next step's first batch is not made while the device is busy
//     early off   kernels are not launched before the one in front of them has ended
//
// Scales are declared warm after three steps, so that no measuring passes are timed. Modes take turns, a few steps
// each, because the chip's clock drifts. Losses of random weights on real tokens mean nothing and are not printed.
#define TESTING
#include "../train_gpt_fp8.cu"

enum { NUM_MODES = 3, STEPS_PER_TURN = 4, MAX_TURNS = 10, MAX_TIMES = STEPS_PER_TURN * MAX_TURNS };
static const struct {
    const char* name;
    int ahead, early;
} modes[NUM_MODES] = {{"all on", 1, 1}, {"ahead off", 0, 1}, {"early off", 1, 0}};
static const double ENOUGH_SECONDS = 4.0; // two turns of every mode, and more while they take less than that

static int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// Of about llm.c's deviations, from a table: billions of values must not take minutes.
static void random_start(Model* model) {
    enum { TABLE = 65536 };
    static float normals[TABLE];
    for (int i = 0; i < TABLE; i++) {
        normals[i] = 0.02f * rng_normal(1, 0, (uint64_t)i);
    }
    size_t N = model->table.num_parameters;
    float* values = (float*)calloc_or_die(N, sizeof(float));
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &model->table.tensor[t];
        size_t n = spec->layers * spec->n, padding = 0;
        if (t == TENSOR_WTE) { padding = (size_t)(spec->rows - (size_t)model->config.vocab_size) * spec->cols; }
#pragma omp parallel for
        for (size_t i = 0; i < n - padding; i++) {
            float normal = normals[(i * 2654435761u >> 8) % TABLE];
            values[spec->offset + i] = spec->init == INIT_ONE ? 1.0f : spec->init == INIT_ZERO ? 0.0f : normal;
        }
    }
    model_set_weights(model, values);
    free(values);
}

// What 16 steps of training would do: trust the scales that the steps so far have found.
static void end_warm_up(Model* model) {
    size_t bytes = (size_t)model->num_slots * sizeof(ScaleSlot);
    ScaleSlot* slots = (ScaleSlot*)malloc_or_die(bytes);
    device_copy_out(model->dev, slots, model->slots, bytes);
    for (int i = 0; i < model->num_slots; i++) {
        slots[i].warmup = 0;
    }
    device_copy_in(model->dev, model->slots, slots, bytes);
    device_sync(model->dev);
    model->slots_warming = 0;
    free(slots);
}

int main(int argc, char** argv) {
    TrainConfig train;
    GptConfig config;
    config_parse(&train, &config, argc, argv);
    Comm* comm = comm_create(&argc, &argv);
    DeviceOptions options = {comm_local_rank(comm), 0, 0, (AttentionKind)train.attention};
    Device* dev = device_create(options);
    comm_connect(comm, dev);
    set_matmul(dev, &train);
    config_finish(&train, &config, comm_num_ranks(comm), comm_rank(comm));
    check(train.batch_size != BATCH_AUTO, "bench-step times one micro-batch: want a number for -b");
    DataLoader loader;
    DataOptions data = {train.batch_size, train.seq_len, train.rank, train.num_ranks, config.vocab_size, DATA_IN_ORDER,
                        42};
    dataloader_open(&loader, train.train_data, data);
    Model model;
    FILE* out = stdout;
    model_create(&model, dev, comm, config, &train);
    random_start(&model);

    OutlierDetector loss_outliers = {}, norm_outliers = {};
    StepReport report;
    double times[NUM_MODES][MAX_TIMES];
    for (int k = 0; k < 3; k++) {
        train_step(&model, &loader, 1e-4f, 0, &loss_outliers, &norm_outliers, &report);
    }
    if (train.precision == PRECISION_FP8 && train.recipe == RECIPE_DELAYED) { end_warm_up(&model); }
    for (int k = 0; k < 3; k++) {
        train_step(&model, &loader, 1e-4f, 0, &loss_outliers, &norm_outliers, &report);
    }
    int turns = 0;
    double begin = seconds_now();
    for (; turns < MAX_TURNS && (turns < 2 || seconds_now() - begin < ENOUGH_SECONDS); turns++) {
        for (int mode = 0; mode < NUM_MODES; mode++) {
            dev->early_launch = modes[mode].early;
            for (int k = 0; k < STEPS_PER_TURN; k++) {
                double start = seconds_now();
                train_step(&model, &loader, 1e-4f, modes[mode].ahead, &loss_outliers, &norm_outliers, &report);
                times[mode][turns * STEPS_PER_TURN + k] = seconds_now() - start;
            }
        }
    }
    check(isfinite(report.loss) && !report.skipped, "loss %g: the steps that were timed made no update",
          (double)report.loss);
    for (int mode = 0; mode < NUM_MODES; mode++) {
        // NOTE: the first step of a turn still finds, or misses, what the mode before made ahead
        double kept[MAX_TIMES];
        int n = 0;
        for (int i = 0; i < turns * STEPS_PER_TURN; i++) {
            if (i % STEPS_PER_TURN > 0) { kept[n++] = times[mode][i]; }
        }
        qsort(kept, (size_t)n, sizeof(double), compare_doubles);
        double tokens = (double)train.total_batch_tokens, median = kept[n / 2];
        fprintf(out, "%-6s L %d C %d, B %d x %d of T %d | %-9s | %9.3f ms (%.3f to %.3f) | %8.0f "
                "tok/s\n", train.model, config.num_layers, config.channels, train.batch_size, train.grad_accum_steps,
                train.seq_len, modes[mode].name, 1e3 * median, 1e3 * kept[0],
                1e3 * kept[n - 1], tokens / median);
    }
    dataloader_close(&loader);
    model_free(&model);
    comm_free(comm);
    device_free(dev);
    return 0;
}
