// Log files line by line, outlier scores against llm.c's formula, and folders and disks that do not cooperate.
#include "logger.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "unit.h"

static char folder[64]; // temporary, removed at the end

static void setup(TrainConfig* train, GptConfig* gpt, const char* output_dir) {
    char* argv[] = {"test", "-e", "d2", "--dry-run", "--prompt", "say \"x\"\\\n", "-o", (char*)(uintptr_t)output_dir};
    config_parse(train, gpt, 8, argv);
    config_finish(train, gpt, 1, 0);
}

static StepReport a_step(void) {
    StepReport report;
    memset(&report, 0, sizeof(report));
    report.step = 12;
    report.tokens = 1703936;
    report.loss = 4.37601234f;
    report.grad_norm = 0.4601f;
    report.learning_rate = 6e-4f;
    report.ms = 228.125;
    report.tokens_per_s = 574093.4;
    report.roofline_fraction = 0.612;
    report.loss_z = 0.12;
    report.grad_norm_z = NAN;
    report.slots_warming = 3;
    return report;
}

// What several ranks add.
static void set_comm(StepReport* report) {
    report->num_ranks = 4;
    report->comm_bytes = 5000000000;
    report->comm_ms = 12.345;
    report->comm_exposed_ms = 1.25;
}

static char* read_file(const char* name) {
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    size_t size = (size_t)file_size_or_die(path);
    char* text = (char*)calloc_or_die(size + 1, 1);
    FILE* f = fopen_or_die(path, "r");
    fread_or_die(text, size, f, path);
    fclose_or_die(f, path);
    return text;
}

static void expect_text(const char* got, const char* want) {
    expect(strcmp(got, want) == 0, "got:\n%s\nwant:\n%s", got, want);
}

static void test_files(void) {
    char path[128];
    snprintf(path, sizeof(path), "%s/a/b", folder); // two folders that do not exist yet
    TrainConfig train;
    GptConfig gpt;
    setup(&train, &gpt, path);
    for (int run = 0; run < 2; run++) { // the second run overwrites the first
        Logger logger;
        logger_open(&logger, &train, &gpt);
        StepReport report = a_step();
        logger_log_val(&logger, 0, 0, 10.99654f);
        logger_log_step(&logger, &report);
        report.step = 13;
        report.loss = NAN;
        report.grad_norm = INFINITY;
        report.skipped = 1;
        report.roofline_fraction = 0;
        logger_log_step(&logger, &report);
        logger_log_eval(&logger, 14, 0.29512f);
        Profile profile;
        memset(&profile, 0, sizeof(profile));
        profile.num_steps = 1;
        profile.wall_s = 0.5;
        logger_log_profile(&logger, 14, &profile);
        if (run == 0) { // before it is closed: every line is already in the file
            char* early = read_file("a/b/main.log");
            expect(strstr(early, "s:14 eval") != NULL, "not flushed: %s", early);
            free(early);
        }
        logger_close(&logger);
    }
    char* main_log = read_file("a/b/main.log");
    expect_text(main_log, "s:0 tel:10.9965\n"
                          "s:12 trl:4.3760 lr:0.000600 norm:0.46\n"
                          "s:13 trl:nan lr:0.000600 norm:inf\n"
                          "s:14 eval:0.2951\n");
    free(main_log);
    char* metrics = read_file("a/b/metrics.jsonl");
    char* second = strchr(metrics, '\n') + 1;
    expect(strncmp(metrics, "{\"type\": \"config\", \"config_hash\": \"", 35) == 0, "%s", metrics);
    expect(strstr(metrics, "\"prompt\": \"say \\\"x\\\"\\\\\\u000a\"") != NULL, "escapes: %s", metrics);
    expect(strstr(metrics, "\"num_layers\": 2, \"channels\": 64") != NULL, "shape: %s", metrics);
    expect(second[-2] == '}', "the first line must be one object");
    expect_text(second,
                "{\"type\": \"val\", \"step\": 0, \"tokens\": 0, \"loss\": 10.9965401}\n"
                "{\"type\": \"step\", \"step\": 12, \"tokens\": 1703936, \"loss\": 4.37601233, "
                "\"grad_norm\": 0.460099995, \"lr\": 0.000600000028, \"ms\": 228.125, \"tokens_per_s\": 574093.4, \"roofline_fraction\": 0.612, "
                "\"loss_z\": 0.12, \"grad_norm_z\": null, \"skipped\": 0, \"slots_warming\": 3}\n"
                "{\"type\": \"step\", \"step\": 13, \"tokens\": 1703936, \"loss\": null, \"grad_norm\": null, "
                "\"lr\": 0.000600000028, \"ms\": 228.125, \"tokens_per_s\": 574093.4, \"roofline_fraction\": null, "
                "\"loss_z\": 0.12, \"grad_norm_z\": null, \"skipped\": 1, \"slots_warming\": 3}\n"
                "{\"type\": \"eval\", \"step\": 14, \"accuracy\": 0.295120001}\n"
                "{\"type\": \"profile\", \"step\": 14, \"profile\": {\"steps\": 1, \"ms\": 500, \"host_wait_ms\": 0, "
                "\"gaps_ms\": 500, \"gaps_percent\": 100, \"ops\": []}}\n");
    free(metrics);
}

// Rank 1, and a run without -o: no files, and no call fails.
static void test_inactive(void) {
    TrainConfig train;
    GptConfig gpt;
    for (int which = 0; which < 2; which++) {
        char path[128];
        snprintf(path, sizeof(path), "%s/none", folder);
        setup(&train, &gpt, which ? path : "");
        train.rank = which;
        Logger logger;
        logger_open(&logger, &train, &gpt);
        StepReport report = a_step();
        logger_log_step(&logger, &report);
        logger_log_val(&logger, 1, 1, 1.0f);
        logger_log_eval(&logger, 1, 1.0f);
        Profile profile;
        memset(&profile, 0, sizeof(profile));
        logger_log_profile(&logger, 1, &profile);
        logger_close(&logger);
        expect(access(path, F_OK) != 0, "a folder was made");
    }
}

// llm.c writes the same lines: its own d12 log, parsed and written again, keeps its bytes.
static void test_real_log(void) {
    const char* data = getenv("SHARED_DATA") ? getenv("SHARED_DATA") : "../shared/data";
    char path[512], line[256], log_path[128];
    snprintf(path, sizeof(path), "%s/llmc/d12_main.log", data);
    FILE* f = fopen(path, "r");
    if (f == NULL) {
        unit_skip("no llmc/d12_main.log in $SHARED_DATA or ../shared/data");
        return;
    }
    TrainConfig train;
    GptConfig gpt;
    snprintf(log_path, sizeof(log_path), "%s/again", folder);
    setup(&train, &gpt, log_path);
    Logger logger;
    logger_open(&logger, &train, &gpt);
    while (fgets(line, sizeof(line), f) != NULL) {
        StepReport report = a_step();
        float loss;
        int step;
        if (sscanf(line, "s:%d trl:%f lr:%f norm:%f", &report.step, &report.loss, &report.learning_rate,
                   &report.grad_norm) == 4) {
            logger_log_step(&logger, &report);
        } else if (sscanf(line, "s:%d tel:%f", &step, &loss) == 2) {
            logger_log_val(&logger, step, 0, loss);
        } else {
            expect(0, "not understood: %s", line);
        }
    }
    fclose(f);
    logger_close(&logger);
    char command[1024];
    snprintf(command, sizeof(command), "cmp %s %s/again/main.log", path, folder);
    expect(system(command) == 0, "the log written again differs");
}

// ---------------------------------------------------------------------------------------------------------------------
// outliers and speed

static void test_outliers(void) {
    OutlierDetector detector;
    memset(&detector, 0, sizeof(detector));
    double value[400];
    for (int i = 0; i < 400; i++) {
        value[i] = 3.0 + sin(i * 12.9898) * (i == 300 ? 50 : 1);
        double z = outlier_update(&detector, value[i]);
        if (i < OUTLIER_WINDOW) {
            expect(isnan(z), "value %d: a score of %g before the window is full", i, z);
            continue;
        }
        double sum = 0, squares = 0; // llm.c's formula over the last 128 values
        for (int k = i - OUTLIER_WINDOW + 1; k <= i; k++) {
            sum += value[k];
            squares += value[k] * value[k];
        }
        double mean = sum / OUTLIER_WINDOW, want = (value[i] - mean) / sqrt(squares / OUTLIER_WINDOW - mean * mean);
        expect(fabs(z - want) < 1e-6, "value %d: z = %g, want %g", i, z, want);
    }
    expect(isnan(outlier_update(&detector, NAN)) && isnan(outlier_update(&detector, INFINITY)), "not finite: no score");
    expect(isfinite(outlier_update(&detector, 3.0)), "a NaN before must not spoil this score");
    memset(&detector, 0, sizeof(detector));
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        outlier_update(&detector, 0.1);
    }
    double z = outlier_update(&detector, 0.1);
    expect(z == 0.0 || fabs(z) < 2, "equal values: z = %g", z); // 0.1 is not exact: its mean may differ in the last bit
    memset(&detector, 0, sizeof(detector));
    for (int i = 0; i <= OUTLIER_WINDOW; i++) {
        z = outlier_update(&detector, 2.0);
    }
    expect(z == 0.0, "equal values: z = %g, want 0", z);
    expect(outlier_skips(3.5, 3.0f) && !outlier_skips(2.5, 3.0f) && !outlier_skips(9.0, 0.0f) &&
           !outlier_skips(NAN, 3.0f) && !outlier_skips(-9.0, 3.0f), "outlier_skips");
}

static void test_rate(void) {
    RateMeter meter;
    memset(&meter, 0, sizeof(meter));
    expect(rate_update(&meter, 1000, 100.0) == 10000.0, "first step");
    for (int i = 0; i < 50; i++) { // a constant rate is itself from the second step on: the bias is corrected
        double rate = rate_update(&meter, 1000, 10.0);
        expect(fabs(rate - 100000.0) < 1e-6, "step %d: %g", i, rate);
    }
    double rate = rate_update(&meter, 1000, 5.0);
    expect(rate > 100000.0 && rate < 120000.0, "one fast step moves the mean a little: %g", rate);
    expect(rate_update(&meter, 1000, 0.0) >= 0.0, "a step of no time must not divide by zero");
}

static void test_screen_line(void) {
    char* text = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&text, &size);
    StepReport report = a_step();
    logger_print_step(f, &report, 1200);
    report.slots_warming = 0;
    report.skipped = 1;
    report.roofline_fraction = 0;
    report.loss_z = -1.5;
    logger_print_step(f, &report, 20);
    report.skipped = 0;
    set_comm(&report);
    logger_print_step(f, &report, 20);
    fclose(f);
    expect_text(text, "step   13/1200 | loss 4.376012 (+0.12z) | norm 0.4601 | lr 6.00e-04 | 228.12 ms | 574093 tok/s"
                      " | 61.2% roofline | 3 scales warming up\n"
                      "step 13/20 | loss 4.376012 (-1.50z) | norm 0.4601 | lr 6.00e-04 | 228.12 ms | 574093 tok/s | "
                      "SKIPPED\n"
                      "step 13/20 | loss 4.376012 (-1.50z) | norm 0.4601 | lr 6.00e-04 | 228.12 ms | 574093 tok/s | "
                      "comm 12.3 ms, 1.2 exposed\n");
    free(text);
}

// The line at the end of a run: 4 ranks, 1,000,000 parameters, 3 steps of which the first is not timed.
static void test_comm_line(void) {
    CommTotal all, timed;
    memset(&all, 0, sizeof(all));
    memset(&timed, 0, sizeof(timed));
    StepReport report = a_step();
    for (int step = 0; step < 3; step++) {
        set_comm(&report);
        report.comm_bytes = 1512000 + (uint64_t)step * 1000;
        report.comm_ms = step == 0 ? 1000.0 : 10.0 * step;
        report.comm_exposed_ms = step == 0 ? 1000.0 : 1.0 + step;
        comm_total_add(&all, &report);
        if (step > 0) { comm_total_add(&timed, &report); }
    }
    char* text = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&text, &size);
    logger_print_comm(f, &all, &timed, 1000000, 1); // one rank: nothing to say
    logger_print_comm(f, &all, &timed, 1000000, 4);
    memset(&timed, 0, sizeof(timed));
    logger_print_comm(f, &all, &timed, 1000000, 2);
    memset(&all, 0, sizeof(all));
    logger_print_comm(f, &all, &timed, 1000000, 2); // no steps
    fclose(f);
    // 4 (R - 1) / R = 3, 6 (R - 1) / R = 4.5; 3,027,000 bytes in 30 ms
    expect_text(text, "communication: 1.513 wire bytes per parameter, step and rank: 0.504 of BF16 gradients and weights "
                      "(3.000), 0.336 of FP32 and BF16 (4.500); 15.00 ms per step, 2.50 exposed, 0.101 GB/s\n"
                      "communication: 1.513 wire bytes per parameter, step and rank: 0.756 of BF16 gradients and weights "
                      "(2.000), 0.504 of FP32 and BF16 (3.000)\n");
    free(text);
}

// The step's record on several ranks.
static void test_comm_record(void) {
    char path[128];
    snprintf(path, sizeof(path), "%s/comm", folder);
    TrainConfig train;
    GptConfig gpt;
    setup(&train, &gpt, path);
    Logger logger;
    logger_open(&logger, &train, &gpt);
    StepReport report = a_step();
    set_comm(&report);
    logger_log_step(&logger, &report);
    report.comm_bytes = 0;
    report.comm_ms = report.comm_exposed_ms = 0.0;
    logger_log_step(&logger, &report);
    logger_close(&logger);
    char* metrics = read_file("comm/metrics.jsonl");
    expect(strstr(metrics, "\"slots_warming\": 3, \"comm_bytes\": 5000000000, \"comm_ms\": 12.345, "
                           "\"comm_exposed_ms\": 1.25, \"comm_gb_per_s\": 405}\n") != NULL, "%s", metrics);
    expect(strstr(metrics, "\"comm_bytes\": 0, \"comm_ms\": 0, \"comm_exposed_ms\": 0, \"comm_gb_per_s\": null}\n") !=
           NULL, "%s", metrics);
    free(metrics);
    char* main_log = read_file("comm/main.log");
    expect_text(main_log, "s:12 trl:4.3760 lr:0.000600 norm:0.46\n"
                          "s:12 trl:4.3760 lr:0.000600 norm:0.46\n");
    free(main_log);
}

// ---------------------------------------------------------------------------------------------------------------------
// folders and disks

static void open_in(void* path) {
    TrainConfig train;
    GptConfig gpt;
    setup(&train, &gpt, (const char*)path);
    Logger logger;
    logger_open(&logger, &train, &gpt);
    StepReport report = a_step();
    logger_log_step(&logger, &report);
}

static void test_bad_folders(void) {
    char file[128], below[160];
    snprintf(file, sizeof(file), "%s/file", folder);
    fclose_or_die(fopen_or_die(file, "w"), file);
    expect_dies(open_in, file, "is a file");
    snprintf(below, sizeof(below), "%s/below", file);
    expect_dies(open_in, below, "is a file");
    expect_dies(open_in, (void*)(uintptr_t)"/proc/no/such", "cannot make the output folder");
}

static void write_file(const char* name, const char* text) {
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE* f = fopen_or_die(path, "w");
    fwrite_or_die(text, strlen(text), f, path);
    fclose_or_die(f, path);
}

// A run that goes on at step 2 writes on behind what was before step 2; the rest is kept aside, nothing twice.
static void test_continue(void) {
    char path[128];
    snprintf(path, sizeof(path), "%s/on", folder);
    check(mkdir(path, 0700) == 0, "mkdir");
    write_file("on/main.log", "s:0 tel:5.0000\ns:0 trl:5.0000 lr:0.000100 norm:1.00\ns:1 trl:4.0000 lr:0.000100 norm:1.00\n"
                              "s:2 tel:3.5000\ns:2 trl:3.0000 lr:0.000100 norm:1.00\ns:10 eval:0.3000\ns:3 trl:2.");
    write_file("on/metrics.jsonl", "{\"type\": \"config\", \"config\": {\"step\": 9}}\n{\"type\": \"step\", \"step\": 1, \"loss\": 4}\n"
                                   "{\"type\": \"val\", \"step\": 2, \"loss\": 3.5}\n{\"type\": \"checkpoint\", \"step\": 2}\n"
                                   "{\"type\": \"checkpoint\", \"step\": 4}\n{\"type\": \"resume\", \"step\": 1}\n");
    TrainConfig train;
    GptConfig gpt;
    for (int again = 0; again < 2; again++) { // the second time there is nothing of step 2 and later
        setup(&train, &gpt, path);
        Logger logger;
        logger_continue(&logger, &train, 2);
        logger_log_resume(&logger, &train, &gpt, 2, "here \"x\"", "precision bf16 -> fp8", "on");
        logger_close(&logger);
    }
    setup(&train, &gpt, path);
    Logger logger;
    logger_continue(&logger, &train, 2);
    logger_log_val(&logger, 2, 100, 3.5f);
    logger_log_checkpoint(&logger, 2, 2000000000, 4.0, 0.5);
    logger_close(&logger);
    char* log = read_file("on/main.log");
    char* cut = read_file("on/main.log.cut");
    expect_text(log, "s:0 tel:5.0000\ns:0 trl:5.0000 lr:0.000100 norm:1.00\ns:1 trl:4.0000 lr:0.000100 norm:1.00\n"
                     "s:2 tel:3.5000\n");
    expect_text(cut, "s:2 tel:3.5000\ns:2 trl:3.0000 lr:0.000100 norm:1.00\ns:10 eval:0.3000\ns:3 trl:2.\n");
    char* metrics = read_file("on/metrics.jsonl");
    char* metrics_cut = read_file("on/metrics.jsonl.cut");
    const char* want = "{\"type\": \"config\", \"config\": {\"step\": 9}}\n{\"type\": \"step\", \"step\": 1, \"loss\": 4}\n"
                       "{\"type\": \"checkpoint\", \"step\": 2}\n{\"type\": \"resume\", \"step\": 1}\n"
                       "{\"type\": \"resume\", \"step\": 2, \"from\": \"here \\\"x\\\"\", \"changes\": \"precision bf16 -> fp8\", "
                       "\"data\": \"on\", ";
    expect(strncmp(metrics, want, strlen(want)) == 0, "metrics:\n%s\nwant:\n%s", metrics, want);
    expect(strstr(metrics, "\n{\"type\": \"val\", \"step\": 2, \"tokens\": 100, \"loss\": 3.5}\n{\"type\": \"checkpoint\", "
                  "\"step\": 2, \"bytes\": 2000000000, \"write_s\": 4, \"gb_per_s\": 0.5, \"delay_s\": 0.5}\n") != NULL,
           "metrics:\n%s", metrics);
    expect_text(metrics_cut, "{\"type\": \"val\", \"step\": 2, \"loss\": 3.5}\n{\"type\": \"checkpoint\", \"step\": 4}\n");
    free(log);
    free(cut);
    free(metrics);
    free(metrics_cut);
}

// A disk that is full for a while costs nothing but a warning: the lines of that while come later.
static void test_full_for_a_while(void) {
    TrainConfig train;
    GptConfig gpt;
    char path[128];
    snprintf(path, sizeof(path), "%s/while", folder);
    setup(&train, &gpt, path);
    pid_t child = fork(); // the limit cannot be taken back by everyone
    if (child == 0) {
        Logger logger;
        logger_open(&logger, &train, &gpt);
        check(freopen("/dev/null", "w", stderr) != NULL, "no /dev/null");
        signal(SIGXFSZ, SIG_IGN);
        for (int i = 0; i < 30; i++) {
            struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
            if (i >= 10 && i < 20) { limit.rlim_cur = (rlim_t)logger.main_log.end + 5; } // room for a part of a line
            setrlimit(RLIMIT_FSIZE, &limit);
            logger_log_val(&logger, i, i, (float)i);
            struct stat st;
            check(stat(logger.main_log.path, &st) == 0, "stat");
            if (st.st_size != logger.main_log.end) { _exit(77); } // a part of a line is in the file
        }
        int waiting = logger.main_log.waiting;
        logger_close(&logger);
        _exit(waiting);
    }
    int status = 0;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %d", status);
    char* log = read_file("while/main.log");
    char want[1024] = "";
    for (int i = 0; i < 30; i++) {
        char line[64];
        snprintf(line, sizeof(line), "s:%d tel:%.4f\n", i, (double)i);
        strcat(want, line);
    }
    expect_text(log, want);
    free(log);
}

int main(void) {
    snprintf(folder, sizeof(folder), "/tmp/test_logger_XXXXXX");
    check(mkdtemp(folder) != NULL, "cannot make a temporary folder");
    unit_run(test_files);
    unit_run(test_inactive);
    unit_run(test_real_log);
    unit_run(test_outliers);
    unit_run(test_rate);
    unit_run(test_screen_line);
    unit_run(test_comm_line);
    unit_run(test_comm_record);
    unit_run(test_bad_folders);
    unit_run(test_continue);
    unit_run(test_full_for_a_while);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command) != 0 || unit_report();
}
