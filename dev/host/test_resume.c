// Where a run stands and where it goes on: which checkpoint is taken, what is refused, where the data continues.
#include "resume.h"

#include "unit.h"

static char folder[64]; // temporary, removed at the end

static const char* in_folder(const char* name) {
    static char paths[8][256];
    static int next;
    char* path = paths[next++ % 8];
    snprintf(path, 256, "%s/%s", folder, name);
    return path;
}

static void shell(const char* format, const char* a, const char* b) {
    char command[512];
    snprintf(command, sizeof(command), format, a, b);
    check(system(command) == 0, "'%s' failed", command);
}

static RunState a_state(int step) {
    RunState s;
    memset(&s, 0, sizeof(s));
    s.version = RUN_STATE_VERSION;
    s.step = s.num_updates = step;
    s.max_seq_len = 64, s.vocab_size = 257, s.padded_vocab_size = 384, s.num_layers = 2, s.num_heads = 2, s.channels = 64;
    GptConfig gpt = run_state_shape(&s);
    s.num_parameters = (int64_t)gpt_num_parameters(&gpt);
    s.num_slots = 24;
    s.num_ranks = 1;
    s.seed = 42;
    s.window_tokens = 512;
    s.slot_bytes = sizeof(ScaleSlot);
    s.amax_history = 1024;
    s.grad_mu = 1.0;
    return s;
}

// RUN/step_%08d/common.bin with `state`.
static void write_checkpoint(const char* run, int step, RunState state, const char* config) {
    size_t bytes = state.version == 1 ? (size_t)RUN_STATE_1_BYTES : sizeof(state);
    check(snapshot_begin(run, step) == 0, "snapshot_begin");
    char path[SNAPSHOT_PATH];
    snapshot_tmp_path(path, sizeof(path), run, step, "common.bin");
    SnapshotOut out;
    check(snapshot_out_open(&out, path, 0) == 0, "snapshot_out_open");
    snapshot_out_begin(&out, "run");
    snapshot_out_append(&out, &state, bytes);
    snapshot_out_end(&out);
    snapshot_out_begin(&out, "config");
    snapshot_out_append(&out, config, strlen(config));
    snapshot_out_end(&out);
    check(snapshot_out_close(&out) == 0 && snapshot_commit(run, step) == 0, "snapshot_commit");
}

static TrainConfig settings(const char* output_dir, const char* resume) {
    TrainConfig train;
    GptConfig gpt;
    char* argv[] = {"test", "-o", (char*)(uintptr_t)output_dir, "-y", (char*)(uintptr_t)resume};
    config_parse(&train, &gpt, 5, argv);
    return train;
}

static void find(void* pair) {
    const char** p = (const char**)pair;
    TrainConfig train = settings(p[0], p[1]);
    Resume resume;
    resume_find(&resume, &train, 1);
    resume_open(&resume);
}

static void refused(const char* output_dir, const char* resume, const char* error) {
    const char* pair[] = {output_dir, resume};
    expect_dies(find, pair, error);
}

static void test_find(void) {
    const char *run = in_folder("run"), *empty = in_folder("empty");
    Resume resume;
    TrainConfig train = settings(in_folder("not_there"), "1");
    resume_find(&resume, &train, 1);
    expect(resume.num_candidates == 0 && !resume_open(&resume), "-y 1 without a checkpoint is a fresh run");
    shell("mkdir %s", empty, "");
    train = settings(empty, "0");
    resume_find(&resume, &train, 1);
    expect(resume.num_candidates == 0, "a fresh run");
    write_checkpoint(run, 20, a_state(20), "precision=bf16\n");
    write_checkpoint(run, 100, a_state(100), "precision=fp8\n");
    shell("mkdir %s/step_00000120.tmp; touch %s/step_00000140", run, run);
    train = settings(run, "1");
    resume_find(&resume, &train, 1);
    expect(resume.num_candidates == 2 && resume.is_here && resume_open(&resume) && resume.step == 100, "the newest");
    expect(strcmp(resume.config, "precision=fp8\n") == 0 && resume.gpt.channels == 64 && !resume.candidates[0].is_llmc,
           "its head: %s", resume.config);
    resume_free(&resume);
    char path[300];
    snprintf(path, sizeof(path), "%s/step_00000020", run);
    train = settings(empty, path);
    resume_find(&resume, &train, 1);
    expect(resume.num_candidates == 1 && !resume.is_here && resume_open(&resume) && resume.step == 20, "a checkpoint's folder");
    resume_free(&resume);
    train = settings(empty, run);
    resume_find(&resume, &train, 1);
    expect(!resume.is_here && resume_open(&resume) && resume.step == 100, "the folder of a run");
    resume_free(&resume);
    train = settings(run, path);
    resume_find(&resume, &train, 1);
    expect(resume.is_here, "an older one of the same run");
    resume_free(&resume);
    refused(run, "0", "has checkpoints of another run, the newest of step 100");
    refused(run, empty, "no checkpoint in");
    refused(empty, in_folder("nowhere"), "No such file");
    refused("", "1", "wants --output-dir");
    refused(empty, "", "empty value");
    const char* other = in_folder("other");
    write_checkpoint(other, 5, a_state(5), "");
    refused(other, run, "has checkpoints of another run, the newest of step 5");
}

// A run that went back to step 20 and wrote a new step 30 goes on from that, not from a step 40 of its former future.
static void test_went_back(void) {
    const char* run = in_folder("back");
    int steps[] = {10, 20, 40, 50, 30};
    for (int i = 0; i < 5; i++) {
        write_checkpoint(run, steps[i], a_state(steps[i]), "");
    }
    TrainConfig train = settings(run, "1");
    Resume resume;
    resume_find(&resume, &train, 1);
    int want[] = {30, 20, 10, 50, 40};
    expect(resume.num_candidates == 5, "%d candidates", resume.num_candidates);
    for (int i = 0; i < 5 && i < resume.num_candidates; i++) {
        expect(resume.candidates[i].step == want[i], "candidate %d is step %d, want %d", i, resume.candidates[i].step, want[i]);
    }
    resume_free(&resume);
}

// A damaged newest one costs the steps since the one before, not the run.
static void test_falls_back(void) {
    const char* run = in_folder("damaged");
    for (int step = 1; step <= 3; step++) {
        write_checkpoint(run, step, a_state(step), "a=b\n");
    }
    char path[SNAPSHOT_PATH];
    snapshot_path(path, sizeof(path), run, 3, "common.bin");
    check(truncate(path, 5000) == 0, "truncate");
    snapshot_path(path, sizeof(path), run, 2, "common.bin");
    FILE* f = fopen_or_die(path, "r+b");
    fseek_or_die(f, 4096 + 9, path); // inside `step`
    fputc(1, f);
    fclose_or_die(f, path);
    TrainConfig train = settings(run, "1");
    Resume resume;
    resume_find(&resume, &train, 0);
    expect(resume_open(&resume) && resume.step == 1 && resume.at == 2, "step %d", resume.step);
    resume_free(&resume);
    snapshot_path(path, sizeof(path), run, 1, "common.bin");
    check(unlink(path) == 0, "unlink");
    resume_find(&resume, &train, 0);
    pid_t child = fork();
    if (child == 0) {
        check(freopen("/dev/null", "w", stderr) != NULL, "no /dev/null");
        _exit(resume_open(&resume) ? 7 : 8);
    }
    int status;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILURE, "none is whole: status %d", status);
    resume_free(&resume);
}

// Values that no run writes are refused, however right the hash is.
static void test_impossible_states(void) {
    char why[WHY_BYTES];
    RunState good = a_state(3);
    expect(run_state_check(&good, "x", why) == 0, "%s", why);
    for (int what = 0; what < 23; what++) {
        RunState s = good;
        switch (what) {
        case 0: s.version = 3; break;
        case 1: s.step = -1; break;
        case 2: s.num_updates = 4; break;
        case 3: s.num_ranks = 0; break;
        case 4: s.window_tokens = 0; break;
        case 5: s.data_epoch = -1; break;
        case 6: s.data_window = (int64_t)1 << 40; break;
        case 7: s.num_slots = -1; break;
        case 8: s.amax_history = 0; break;
        case 9: s.amax_history = 1025; break;
        case 10: s.slot_bytes = 16; break;
        case 11: s.loss_outliers.count = 129; break;
        case 12: s.norm_outliers.next = 128; break;
        case 13: s.data_shard = -5; break;
        case 14: s.channels = 65; break;
        case 15: s.num_layers = (int64_t)1 << 33; break;
        case 16: s.vocab_size = 0; break;
        case 17: s.num_slots = 25; break;
        case 18: s.num_parameters++; break;
        case 19: s.version = 1; break; // is upgraded when it is read, see below
        case 20: s.grad_mu = 0.0; break;
        case 21: s.grad_mu = INFINITY; break;
        case 22: s.grad_mu = NAN; break;
        }
        why[0] = 0;
        expect(run_state_check(&s, "the file", why) == 1 && strstr(why, "the file") != NULL, "case %d: '%s'", what, why);
    }
}

// A state of version 1 ends before the factor of gradients; no other version does, and version 1 has nothing behind it.
static void test_version_1(void) {
    const char* run = in_folder("version_1");
    RunState s = a_state(7);
    s.version = 1;
    s.norm_outliers.next = 3;
    s.grad_mu = 0.25; // not written
    write_checkpoint(run, 7, s, "a=b\n");
    Resume resume;
    TrainConfig train = settings(run, "1");
    resume_find(&resume, &train, 1);
    expect(resume_open(&resume) && resume.step == 7 && resume.state.version == RUN_STATE_VERSION &&
           resume.state.grad_mu == 1.0 && resume.state.norm_outliers.next == 3, "step %d, version %lld, factor %g",
           resume.step, (long long)resume.state.version, resume.state.grad_mu);
    resume_free(&resume);
    s = a_state(8);
    s.grad_mu = 0.125;
    write_checkpoint(run, 8, s, "");
    resume_find(&resume, &train, 1);
    expect(resume_open(&resume) && resume.step == 8 && resume.state.grad_mu == 0.125, "step %d, factor %g", resume.step,
           resume.state.grad_mu);
    resume_free(&resume);
    for (int version = 0; version <= 3; version++) {
        for (int is_short = 0; is_short < 2; is_short++) {
            RunState read = a_state(9);
            char why[WHY_BYTES];
            read.version = version;
            read.grad_mu = is_short ? 0.0 : 1.0;
            run_state_upgrade(&read, is_short ? (size_t)RUN_STATE_1_BYTES : sizeof(read));
            int good = is_short ? version == 1 : version == RUN_STATE_VERSION;
            expect(run_state_check(&read, "x", why) == !good, "version %d, %s: %s", version, is_short ? "short" : "long",
                   good ? why : "not refused");
        }
    }
}

static void write_tokens(const char* path, int num_tokens) {
    FILE* f = fopen_or_die(path, "wb");
    int32_t header[256] = {TOKEN_FILE_MAGIC, 1, num_tokens};
    fwrite_or_die(header, sizeof(header), f, path);
    for (int i = 0; i < num_tokens; i++) {
        uint16_t token = (uint16_t)(i % 251);
        fwrite_or_die(&token, sizeof(token), f, path);
    }
    fclose_or_die(f, path);
}

// After any number of batches: the same geometry takes the very next one; another keeps its place by tokens; other files
// are read from their beginning.
static void test_data(void) {
    write_tokens(in_folder("data_a.bin"), 4000);
    write_tokens(in_folder("data_b.bin"), 7000);
    char pattern[300];
    snprintf(pattern, sizeof(pattern), "%s/data_?.bin", folder);
    DataOptions options = {4, 32, 0, 1, 257, DATA_SHUFFLED, 42};
    for (int batches = 0; batches < 200; batches += 7) {
        DataLoader loader, again;
        dataloader_open(&loader, pattern, options);
        for (int i = 0; i < batches; i++) {
            dataloader_next(&loader);
        }
        RunState s = a_state(batches);
        s.window_tokens = dataloader_window_tokens(&options);
        s.data_epoch = (int64_t)loader.at.epoch, s.data_shard = (int64_t)loader.at.shard;
        s.data_window = (int64_t)loader.at.window;
        s.data_fingerprint = run_data_fingerprint(&loader);
        dataloader_open(&again, pattern, options);
        expect(run_state_seek(&s, &again) == DATA_SAME, "batch %d", batches);
        dataloader_next(&loader);
        dataloader_next(&again);
        expect(memcmp(loader.inputs, again.inputs, 4 * 32 * sizeof(int)) == 0, "batch %d differs", batches);
        dataloader_close(&again);
        DataOptions dealt = options; // the same windows, dealt to two ranks
        dealt.B /= 2;
        dealt.num_ranks = 2;
        dataloader_open(&again, pattern, dealt);
        expect(run_state_seek(&s, &again) == DATA_REORDERED && again.at.window == loader.at.window - 1, "batch %d", batches);
        dataloader_close(&again);
        DataOptions reseeded = options;
        reseeded.seed = 43;
        dataloader_open(&again, pattern, reseeded);
        expect(run_state_seek(&s, &again) == (batches > 0 ? DATA_REORDERED : DATA_SAME), "another seed, batch %d", batches);
        dataloader_close(&again);
        DataOptions wide = options;
        wide.B = 7;
        dataloader_open(&again, pattern, wide);
        expect(run_state_seek(&s, &again) == DATA_REORDERED, "batch %d", batches);
        int64_t taken = (int64_t)again.at.window * 7 * 32, want = s.data_window * 4 * 32;
        int64_t windows = again.windows[again.shard_order[again.at.shard]];
        expect(again.at.epoch == (uint64_t)s.data_epoch && again.at.shard == (uint64_t)s.data_shard &&
               ((taken <= want && taken > want - 7 * 32) || ((int64_t)again.at.window == windows && taken < want)),
               "batch %d: %lld tokens of the shard are taken, want %lld", batches, (long long)taken, (long long)want);
        dataloader_next(&again);
        dataloader_close(&again);
        s.data_fingerprint++;
        dataloader_open(&again, pattern, options);
        expect(run_state_seek(&s, &again) == DATA_OTHER && again.at.epoch == 0 && again.at.window == 0, "other files");
        dataloader_close(&again);
        dataloader_close(&loader);
    }
}

int main(void) {
    snprintf(folder, sizeof(folder), "/tmp/test_resume_XXXXXX");
    check(mkdtemp(folder) != NULL, "cannot make a temporary folder");
    unit_run(test_find);
    unit_run(test_falls_back);
    unit_run(test_went_back);
    unit_run(test_impossible_states);
    unit_run(test_version_1);
    unit_run(test_data);
    shell("rm -rf %s%s", folder, "");
    return unit_report();
}
