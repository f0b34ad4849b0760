// What a run takes over beside its arrays: the head of a checkpoint (lib/run_state.h, lib/resume.h), FP8 slots
// (lib/scaling.h), settings (lib/config.h), logs that are cut (lib/logger.h). Damage does not get here, a hash is in
// the way; what gets here is a file of another version, or a forged one.
//
//     input    1 byte kind
//     kind 0   a byte n % 16, then n changes of 10 bytes to a good RunState: 2 place, 8 value; then the settings' text
//          1   a byte n % 16, then n changes of 6 bytes to a good ScaleSlot: 2 place, 4 value
//          2   4 bytes step, then a log
//          3   4 bytes place of a bit of the checkpoint's file that is flipped, then as 0
#include "fuzz.h"

#include "resume.h"

static RunState run_state_good(const DataLoader* loader) {
    RunState state;
    memset(&state, 0, sizeof(state));
    state.version = RUN_STATE_VERSION;
    state.step = 20;
    state.num_updates = 19;
    state.tokens = 20 * 16;
    state.seed = 42;
    state.max_seq_len = 8;
    state.vocab_size = 200;
    state.padded_vocab_size = 256;
    state.num_layers = 1;
    state.num_heads = 1;
    state.channels = 16;
    state.num_ranks = 1;
    state.window_tokens = dataloader_window_tokens(&loader->options);
    state.data_shard = 1;
    state.data_window = 3;
    state.data_fingerprint = run_data_fingerprint(loader);
    GptConfig shape = run_state_shape(&state);
    state.num_parameters = (int64_t)gpt_num_parameters(&shape);
    state.num_slots = 12;
    state.slot_bytes = (int64_t)sizeof(ScaleSlot);
    state.amax_history = 16;
    state.headroom = 1.0;
    state.grad_mu = 1.0;
    return state;
}

// Apply the changes at the front of the input, each of `width` bytes, to `bytes` (size).
static void run_state_change(FuzzInput* in, void* bytes, size_t size, size_t width) {
    for (int n = fuzz_byte(in) % 16; n > 0; n--) {
        size_t place = (size_t)fuzz_byte(in);
        place = (place | (size_t)fuzz_byte(in) << 8) * 4 % (size - width + 1);
        for (size_t i = 0; i < width; i++) {
            ((uint8_t*)bytes)[place + i] = (uint8_t)fuzz_byte(in);
        }
    }
}

static void run_state_head(FuzzInput in, int is_damaged) {
    uint32_t bit = is_damaged ? fuzz_word(&in) : 0;
    int32_t header[256] = {TOKEN_FILE_MAGIC, 1, 100};
    uint8_t file[1024 + 200] = {0};
    memcpy(file, header, sizeof(header));
    fuzz_write("data_0.bin", file, sizeof(file));
    fuzz_write("data_1.bin", file, sizeof(file));
    DataOptions options = {1, 8, 0, 1, 65536, DATA_SHUFFLED, 42};
    DataLoader loader;
    dataloader_open(&loader, fuzz_path("data_?.bin"), options);
    RunState state = run_state_good(&loader);
    run_state_change(&in, &state, sizeof(state), 8);
    size_t bytes = state.version == 1 ? (size_t)RUN_STATE_1_BYTES : sizeof(state);

    SnapshotOut out;
    fuzz_want(snapshot_out_open(&out, fuzz_path("common.bin"), 0) == 0, "cannot write common.bin");
    snapshot_out_begin(&out, "run");
    snapshot_out_append(&out, &state, bytes);
    snapshot_out_end(&out);
    snapshot_out_begin(&out, "config");
    snapshot_out_append(&out, in.bytes, in.size);
    snapshot_out_end(&out);
    fuzz_want(snapshot_out_close(&out) == 0, "cannot write common.bin");

    if (is_damaged) {
        const char* path = fuzz_path("common.bin");
        uint32_t place = bit / 8 % (uint32_t)file_size_or_die(path);
        FILE* f = fopen_or_die(path, "r+b");
        fseek_or_die(f, place, path);
        int byte = fgetc(f);
        fseek_or_die(f, place, path);
        fputc(byte ^ 1 << bit % 8, f);
        fclose_or_die(f, path);
    }

    Resume resume;
    memset(&resume, 0, sizeof(resume));
    char why[WHY_BYTES] = "";
    if (resume_read_head(&resume, fuzz.folder, why) != 0) {
        dataloader_close(&loader);
        fuzz_refused(why);
        return;
    }
    fuzz_want(!is_damaged, "bit %u was flipped and nothing said", bit);
    fuzz_want(resume.state.version == RUN_STATE_VERSION && resume.state.grad_mu > 0.0, "version %lld, a factor of %g",
              (long long)resume.state.version, resume.state.grad_mu);
    fuzz_want(gpt_refuse(&resume.gpt, "", why, sizeof(why)) == 0 && resume.step >= 0, "step %d: %s", resume.step, why);
    TrainConfig train;
    GptConfig gpt;
    char program[] = "program", flag[] = "-i", value[] = "x.bin", *arguments[] = {program, flag, value};
    config_parse(&train, &gpt, 3, arguments);
    for (size_t size = 1; size <= 4096; size = 16 * size) {
        char changes[4096];
        memset(changes, 'x', sizeof(changes));
        config_changes(&train, resume.config, changes, size);
        size_t untouched = size;
        while (untouched < sizeof(changes) && changes[untouched] == 'x') {
            untouched++;
        }
        fuzz_want(strnlen(changes, size) < size && untouched == sizeof(changes),
                  "the list of changes is longer than its %zu bytes", size);
    }
    for (int i = 0; i < 2 * OUTLIER_WINDOW; i++) {
        outlier_update(&resume.state.loss_outliers, (double)i);
        outlier_update(&resume.state.norm_outliers, 1.0);
    }
    if (resume.state.data_epoch < 1000) { // a later one is replayed, too, and takes its time
        DataContinuation goes_on = run_state_seek(&resume.state, &loader);
        fuzz_want(goes_on == DATA_SAME || goes_on == DATA_REORDERED || loader.at.window == 0,
                  "other files from the middle");
        dataloader_next(&loader);
    }
    dataloader_close(&loader);
    resume_free(&resume);
}

static void run_state_slot(FuzzInput in) {
    ScaleRecipe saved_recipe = {16, AMAX_MAX, 0, 1.0f};
    ScaleSlot saved;
    scale_slot_init(&saved, 448.0f, SLOT_DELAYED);
    for (int i = 0; i < 5; i++) {
        scale_slot_step(&saved, 1.0f + (float)i, saved_recipe);
    }
    run_state_change(&in, &saved, sizeof(saved), 4);
    if (!scale_slot_is_sound(&saved, saved_recipe.history)) {
        fuzz_refused("not sound");
        return;
    }
    for (int kind = 0; kind < 8; kind++) {
        ScaleRecipe recipe = {kind & 1   ? 16
                              : kind & 2 ? 1
                                         : AMAX_HISTORY_MAX,
                              kind & 2 ? AMAX_MAX : AMAX_MOST_RECENT, 0, kind & 4 ? 2.0f : 1.0f};
        ScaleSlot slot;
        scale_slot_init(&slot, 448.0f, kind & 4 ? SLOT_WEIGHT : SLOT_DELAYED);
        scale_slot_continue(&slot, &saved, saved_recipe, recipe);
        for (int i = 0; i < 3; i++) {
            scale_slot_step(&slot, 2.0f, recipe);
            fuzz_want(
                isfinite(slot.scale) && slot.scale > 0.0f && slot.count <= recipe.history && slot.head < recipe.history,
                "scale %g, %d entries, place %d of %d", (double)slot.scale, slot.count, slot.head, recipe.history);
        }
    }
}

static size_t run_state_read(const char* path, char* text, size_t size) {
    FILE* f = fopen(path, "rb");
    size_t n = f != NULL ? fread(text, 1, size, f) : 0;
    if (f != NULL) { fclose(f); }
    return n;
}

// What stays and what goes is together what was there; once cut, nothing more is.
static void run_state_log(FuzzInput in) {
    static char kept[1 << 16], cut[1 << 16], again[1 << 16];
    int step = (int)(fuzz_word(&in) & 0x7fffffff);
    in.size = in.size < sizeof(kept) / 2 ? in.size : sizeof(kept) / 2;
    unlink(fuzz_path("main.log.cut"));
    const char* path = fuzz_write("main.log", in.bytes, in.size);
    logger_cut(path, step);
    size_t num_kept = run_state_read(path, kept, sizeof(kept));
    size_t num_cut = run_state_read(fuzz_path("main.log.cut"), cut, sizeof(cut));
    int is_text = in.size == 0 || memchr(in.bytes, 0, in.size) == NULL;
    int unfinished = in.size > 0 && in.bytes[in.size - 1] != '\n'; // gets its newline where it is kept
    fuzz_want(!is_text || num_kept + num_cut == in.size + (size_t)unfinished, "a log of %zu bytes: %zu kept, %zu cut",
              in.size, num_kept, num_cut);
    logger_cut(path, step);
    size_t num_again = run_state_read(path, again, sizeof(again));
    fuzz_want(num_again == num_kept && memcmp(kept, again, num_kept) == 0, "cut twice: %zu bytes, then %zu", num_kept,
              num_again);
}

static void run_state_run(const uint8_t* data, size_t size) {
    FuzzInput in = {data, size};
    int kind = fuzz_byte(&in) % 4;
    if (kind == 0 || kind == 3) {
        run_state_head(in, kind == 3);
    } else if (kind == 1) {
        run_state_slot(in);
    } else {
        run_state_log(in);
    }
}

static void run_state_seeds(void) {
    TrainConfig train;
    GptConfig gpt;
    char program[] = "program", flag[] = "-i", value[] = "y.bin", *arguments[] = {program, flag, value};
    config_parse(&train, &gpt, 3, arguments);
    char* text = config_to_text(&train);
    fuzz_seed(FUZZ_TAKEN, "\0\0", 2, text, strlen(text));
    free(text);
    const char* other = "precision=bf16\nlearning-rate=1\nseed=\nprecision=fp32\nno such flag=1\n=\n\n";
    fuzz_seed(FUZZ_TAKEN, "\0\0", 2, other, strlen(other));
    for (size_t place = 0; place < offsetof(RunState, loss_outliers); place += 8) { // every number, and a hostile value
        static const int64_t values[] = {-1, 0, 1, INT32_MAX, INT64_MAX, INT64_MIN};
        for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
            uint8_t change[12] = {0, 1, (uint8_t)(place / 4), 0};
            memcpy(change + 4, &values[i], 8);
            fuzz_seed(FUZZ_EITHER, change, sizeof(change), "seed=7\n", 7);
        }
    }
    for (int i = 0; i < 2; i++) { // full windows, and a place behind the last
        size_t place = i == 0 ? offsetof(RunState, loss_outliers.count) : offsetof(RunState, norm_outliers.count);
        int32_t counts[2] = {OUTLIER_WINDOW, OUTLIER_WINDOW - 1};
        uint8_t change[12] = {0, 1, (uint8_t)(place / 4), (uint8_t)(place / 4 >> 8)};
        memcpy(change + 4, counts, 8);
        fuzz_seed(FUZZ_TAKEN, change, sizeof(change), "", 0);
        counts[1]++;
        memcpy(change + 4, counts, 8);
        fuzz_seed(FUZZ_REFUSED, change, sizeof(change), "", 0);
    }
    uint8_t version[12] = {0, 1, 0, 0, 1}; // version 1, as long as it was
    fuzz_seed(FUZZ_TAKEN, version, sizeof(version), "", 0);
    static const double factors[] = {0.5, NAN, INFINITY, 0.0, -1.0};
    for (size_t i = 0; i < sizeof(factors) / sizeof(factors[0]); i++) {
        uint8_t change[12] = {0, 1, (uint8_t)(RUN_STATE_1_BYTES / 4), (uint8_t)(RUN_STATE_1_BYTES / 4 >> 8)};
        memcpy(change + 4, &factors[i], 8);
        fuzz_seed(i == 0 ? FUZZ_TAKEN : FUZZ_REFUSED, change, sizeof(change), "", 0);
    }
    for (uint32_t place = 0; place < 3 * 4096; place += 97) { // header, run and config, 4,096 bytes each
        uint32_t bit = place * 8 + place % 8;
        uint8_t change[6] = {3, (uint8_t)bit, (uint8_t)(bit >> 8), (uint8_t)(bit >> 16), 0, 0};
        fuzz_seed(FUZZ_REFUSED, change, sizeof(change), "seed=7\n", 7);
    }
    fuzz_seed(FUZZ_TAKEN, "\1\0", 2, "", 0);
    for (int place = 5; place < 9; place++) { // policy, warmup, count, head
        uint8_t change[8] = {1, 1, (uint8_t)place, 0, 100, 0, 0, 0};
        fuzz_seed(FUZZ_REFUSED, change, sizeof(change), "", 0);
        change[4] = 2;
        fuzz_seed(FUZZ_TAKEN, change, sizeof(change), "", 0);
    }
    const char* logs[] = {"s:0 trl:5.5\ns:10 tel:4.1\ns:10 trl:4\ns:11 trl:3.",
                          "{\"type\": \"config\", \"step\": 99}\n{\"type\": \"train\", \"step\": 12, \"loss\": 3}\n"
                          "{\"type\": \"checkpoint\", \"step\": 10}\n{\"step\": 99999999999999999999}\n\n"};
    for (int i = 0; i < 2; i++) {
        fuzz_seed(FUZZ_TAKEN, "\2\12\0\0\0", 5, logs[i], strlen(logs[i]));
    }
}

FUZZ_TARGET(run_state)
