// What a run says while it goes: one line per step on the screen, and in the output folder
//
//     main.log       llm.c's format, so that its notebooks read it:
//                        s:12 trl:4.3760 lr:0.000060 norm:0.46      training step
//                        s:12 tel:4.3854                            validation
//                        s:12 eval:0.2951                           accuracy of an evaluation
//     metrics.jsonl  one JSON object per line: first {"type": "config", ...} with every setting, then
//                        {"type": "step", "step", "tokens", "loss", "grad_norm", "lr", "ms", "tokens_per_s",
//                         "roofline_fraction", "loss_z", "grad_norm_z", "skipped", "slots_warming"}, on several ranks
//                         also "comm_bytes" (that this rank put on the wire), "comm_ms", "comm_exposed_ms" (of that, what
//                         other work waited for) and "comm_gb_per_s" (nccl-tests' bus bandwidth)
//                        {"type": "val", "step", "tokens", "loss"} and {"type": "eval", "step", "accuracy"},
//                        {"type": "profile", "step", "profile": what profile_write_json writes},
//                        {"type": "checkpoint", "step", "bytes", "write_s", "gb_per_s", "delay_s"},
//                        {"type": "resume", "step", "from", "changes", "data", "config"};
//                        what is not finite or not known is null
//
// A run that is continued from a checkpoint continues its logs: lines of steps that will be done again move to
// main.log.cut and metrics.jsonl.cut, so that the log reads as if the run had never been interrupted.
//
// Only rank 0 writes. Every line goes to the file at once, so that a killed run has its log. Lines that cannot be written
// (a full disk) are kept in memory, with a warning, and written when there is room again; training goes on.
#ifndef LOGGER_H
#define LOGGER_H

#include "check.h"

#include <fcntl.h>
#include <math.h>
#include <unistd.h>

#include "config.h"
#include "files.h"
#include "profile.h"

// ---------------------------------------------------------------------------------------------------------------------
// outliers

enum { OUTLIER_WINDOW = 128 };

typedef struct {
    double window[OUTLIER_WINDOW]; // the last values, a ring
    int count;                     // values seen so far, up to OUTLIER_WINDOW
    int next;                      // where the next value goes
} OutlierDetector;

// Add `value` to the window and return its z-score, (value - mean) / deviation over the window with `value` in it, as
// llm.c's outlier_detector.h does: NaN until the window has been full once, 0 when all values are equal. A value that
// is not finite gives NaN and stays out of the window (in llm.c it would spoil every later score).
static inline double outlier_update(OutlierDetector* detector, double value) {
    if (!isfinite(value)) {
        return NAN;
    }
    int was_full = detector->count == OUTLIER_WINDOW;
    detector->window[detector->next] = value;
    detector->next = (detector->next + 1) % OUTLIER_WINDOW;
    if (!was_full) {
        detector->count++;
        return NAN;
    }
    // summed anew each time: 128 additions, and no drift and no negative variance from running sums
    double mean = 0.0, variance = 0.0;
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        mean += detector->window[i] / OUTLIER_WINDOW;
    }
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        variance += (detector->window[i] - mean) * (detector->window[i] - mean) / OUTLIER_WINDOW;
    }
    return variance > 0.0 ? (value - mean) / sqrt(variance) : 0.0;
}

// Skip the update of a step whose z-score is `z`? `threshold` 0 means never (-sl, -sg).
static inline int outlier_skips(double z, float threshold) { return threshold != 0.0f && z > (double)threshold; }

// ---------------------------------------------------------------------------------------------------------------------
// speed

typedef struct {
    double mean;   // exponential moving average of tokens per second, not yet bias-corrected
    int64_t steps; // calls so far
} RateMeter;

// Tokens per second after a step of `tokens` in `ms`, smoothed over about 20 steps (decay 0.95, bias-corrected as in
// Adam). The first call only warms up and returns the step's own rate: it holds start-up work.
static inline double rate_update(RateMeter* meter, int64_t tokens, double ms) {
    double rate = ms > 0.0 ? (double)tokens / ms * 1e3 : 0.0;
    if (meter->steps++ == 0) {
        return rate;
    }
    meter->mean = 0.95 * meter->mean + 0.05 * rate;
    return meter->mean / (1.0 - pow(0.95, (double)(meter->steps - 1)));
}

// ---------------------------------------------------------------------------------------------------------------------
// the log

// Everything that is known about one training step.
typedef struct {
    int step;                 // counted from 0
    int64_t tokens;           // trained on so far, this step included
    float loss, grad_norm;    // mean loss over the step; global norm before clipping
    float learning_rate;      //
    double ms;                // duration of the step
    double tokens_per_s;      // smoothed, rate_update
    double roofline_fraction; // time of the roofline over time taken; 0: not known
    double loss_z, grad_norm_z; // outlier_update; NaN: not known yet
    int skipped;              // 1: the update was not made
    int slots_warming;        // FP8 slots whose scale does not come from their history yet
    int num_ranks;            // 1: nothing is said of communication
    uint64_t comm_bytes;      // this rank's on the wire, by its collectives of this step
    double comm_ms, comm_exposed_ms; // what they took; what the step's other work had to wait for them
} StepReport;

// Communication of several steps.
typedef struct {
    int steps;
    uint64_t bytes;
    double ms, exposed_ms;
} CommTotal;

static inline void comm_total_add(CommTotal* total, const StepReport* report) {
    total->steps++;
    total->bytes += report->comm_bytes;
    total->ms += report->comm_ms;
    total->exposed_ms += report->comm_exposed_ms;
}

typedef struct {
    FILE* file; // what is printed here waits in memory for logger_flush; NULL: no log
    char* text; // (size) of what waits
    size_t size;
    char* path;
    int fd;
    off_t end;   // of the last line that is whole
    int waiting; // lines that could not be written so far
} LogFile;

typedef struct {
    LogFile main_log, metrics;
} Logger;

static inline char* logger_path(const char* folder, const char* name) {
    size_t size = strlen(folder) + strlen(name) + 2;
    char* path = (char*)malloc_or_die(size);
    snprintf(path, size, "%s/%s", folder, name);
    return path;
}

// Bring what waits to the file, all of it or nothing; a warning, once, when that fails.
static inline void logger_flush(LogFile* log) {
    fflush(log->file);
    size_t done = 0;
    ssize_t put = 1;
    while (done < log->size && put > 0) {
        put = pwrite(log->fd, log->text + done, log->size - done, log->end + (off_t)done);
        done += put > 0 ? (size_t)put : 0;
    }
    if (done == log->size) {
        if (log->waiting > 0) { warning("'%s' is written again, no line is lost", log->path); }
        log->end += (off_t)done;
        log->waiting = 0;
        rewind(log->file);
        return;
    }
    if (log->waiting++ == 0) {
        warning("CANNOT WRITE '%s': %s; its lines wait in memory until there is room, training goes on", log->path,
                put < 0 ? strerror(errno) : "no room");
    }
    put = ftruncate(log->fd, log->end); // nothing that is half there; if this fails too, it is written over later
}

// Open DIR/NAME, to be written anew or, with `keep`, behind what is there.
static inline void logger_open_file(LogFile* log, const char* folder, const char* name, int keep) {
    log->path = logger_path(folder, name);
    log->fd = open(log->path, O_WRONLY | O_CREAT | O_CLOEXEC | (keep ? 0 : O_TRUNC), 0666);
    check(log->fd >= 0, "cannot open '%s' for writing: %s", log->path, strerror(errno));
    log->end = keep ? lseek(log->fd, 0, SEEK_END) : 0;
    log->file = open_memstream(&log->text, &log->size);
    check(log->file != NULL, "out of host memory for '%s'", log->path);
    log->waiting = 0;
}

static inline void logger_open_files(Logger* logger, const TrainConfig* train, int keep) {
    int error = make_folders(train->output_dir);
    check(error == 0, "cannot make the output folder '%s': %s", train->output_dir,
          error == ENOTDIR ? "something on this path is a file" : strerror(error));
    logger_open_file(&logger->main_log, train->output_dir, "main.log", keep);
    logger_open_file(&logger->metrics, train->output_dir, "metrics.jsonl", keep);
}

// Start the log files of this run in train->output_dir, which is made when it does not exist; logs of an earlier run
// there are overwritten, as in llm.c. Without --output-dir, and on every rank but 0, nothing is opened and the calls
// below do nothing.
static inline void logger_open(Logger* logger, const TrainConfig* train, const GptConfig* gpt) {
    memset(logger, 0, sizeof(*logger));
    if (train->output_dir[0] == 0 || train->rank != 0) {
        return;
    }
    logger_open_files(logger, train, 0);
    fprintf(logger->metrics.file, "{\"type\": \"config\", \"config_hash\": \"%016llx\", \"config\": ",
            (unsigned long long)config_hash(train, gpt));
    config_write_json(logger->metrics.file, train, gpt);
    fprintf(logger->metrics.file, "}\n");
    logger_flush(&logger->metrics);
}

// Does the line of a log speak of step `step` or a later one, which a run continued there will write again? What came of
// checkpoints and resumes at `step` itself stays; so does a line that names no step. A last line without its end (the
// process was killed while writing it) goes.
static inline int logger_is_cut(const char* line, int step) {
    const char* at = strncmp(line, "s:", 2) == 0 ? line + 2 : strstr(line, "\"step\": ");
    if (strchr(line, '\n') == NULL) { return 1; }
    if (at == NULL || strstr(line, "{\"type\": \"config\"") == line) { return 0; }
    long long of = atoll(*at == '"' ? at + strlen("\"step\": ") : at);
    int is_event = strstr(line, "{\"type\": \"checkpoint\"") == line || strstr(line, "{\"type\": \"resume\"") == line;
    return is_event ? of > step : of >= step;
}

// Take the lines that logger_is_cut names out of the file at `path` and append them to PATH.cut; where there is no room
// for those, a warning says so. What stands before the first of them is not touched: on a full disk this needs no room.
static inline void logger_cut(const char* path, int step) {
    FILE* from = fopen(path, "r+");
    if (from == NULL) {
        check(errno == ENOENT, "cannot open '%s': %s", path, strerror(errno));
        return;
    }
    char *line = NULL, *kept = NULL, *cut = NULL;
    size_t size = 0, kept_bytes = 0, cut_bytes = 0;
    FILE *keep = open_memstream(&kept, &kept_bytes), *away = open_memstream(&cut, &cut_bytes);
    check(keep != NULL && away != NULL, "out of host memory for '%s'", path);
    off_t first_cut = -1;
    for (off_t at = 0; getline(&line, &size, from) != -1; at = ftello(from)) {
        int is_cut = logger_is_cut(line, step);
        if (is_cut && first_cut < 0) { first_cut = at; }
        if (first_cut >= 0) { fputs(line, is_cut ? away : keep); }
        if (is_cut && strchr(line, '\n') == NULL) { fputc('\n', away); }
    }
    check(!ferror(from), "cannot read '%s': %s", path, strerror(errno));
    fclose(keep);
    fclose(away);
    if (first_cut >= 0) {
        size_t length = strlen(path);
        char* cut_path = (char*)malloc_or_die(length + 5);
        snprintf(cut_path, length + 5, "%s.cut", path);
        FILE* to = fopen(cut_path, "a");
        int put = to != NULL && fwrite(cut, 1, cut_bytes, to) == cut_bytes;
        if (to != NULL && fclose(to) != 0) { put = 0; }
        if (!put) {
            warning("cannot write '%s': %s; lines of steps that are done again are lost", cut_path, strerror(errno));
        }
        free(cut_path);
        fseeko(from, first_cut, SEEK_SET);
        check(ftruncate(fileno(from), first_cut) == 0 && fwrite(kept, 1, kept_bytes, from) == kept_bytes &&
              fflush(from) == 0, "cannot rewrite '%s': %s", path, strerror(errno));
    }
    fclose(from);
    free(line);
    free(kept);
    free(cut);
}

// Go on with the log files in train->output_dir at step `step`, as the head of this file says. Ranks and missing folder
// as in logger_open.
static inline void logger_continue(Logger* logger, const TrainConfig* train, int step) {
    memset(logger, 0, sizeof(*logger));
    if (train->output_dir[0] == 0 || train->rank != 0) {
        return;
    }
    char* paths[] = {logger_path(train->output_dir, "main.log"), logger_path(train->output_dir, "metrics.jsonl")};
    for (int i = 0; i < 2; i++) {
        logger_cut(paths[i], step);
        free(paths[i]);
    }
    logger_open_files(logger, train, 1);
}

// The run goes on at step `step` from the checkpoint `from`, with what `changes` says set otherwise (config_changes) and
// the data where `data` says.
static inline void logger_log_resume(Logger* logger, const TrainConfig* train, const GptConfig* gpt, int step,
                                     const char* from, const char* changes, const char* data) {
    if (logger->main_log.file == NULL) {
        return;
    }
    fprintf(logger->metrics.file, "{\"type\": \"resume\", \"step\": %d, \"from\": ", step);
    config_write_json_string(logger->metrics.file, from);
    fprintf(logger->metrics.file, ", \"changes\": ");
    config_write_json_string(logger->metrics.file, changes);
    fprintf(logger->metrics.file, ", \"data\": ");
    config_write_json_string(logger->metrics.file, data);
    fprintf(logger->metrics.file, ", \"config_hash\": \"%016llx\", \"config\": ",
            (unsigned long long)config_hash(train, gpt));
    config_write_json(logger->metrics.file, train, gpt);
    fprintf(logger->metrics.file, "}\n");
    logger_flush(&logger->metrics);
}

// `, "name": value` with `digits` significant digits; null when it is not finite.
static inline void logger_json_number(FILE* f, const char* name, double value, int digits) {
    if (isfinite(value)) {
        fprintf(f, ", \"%s\": %.*g", name, digits, value);
    } else {
        fprintf(f, ", \"%s\": null", name);
    }
}

static inline void logger_log_step(Logger* logger, const StepReport* report) {
    if (logger->main_log.file == NULL) {
        return;
    }
    fprintf(logger->main_log.file, "s:%d trl:%.4f lr:%.6f norm:%.2f\n", report->step, (double)report->loss,
            (double)report->learning_rate, (double)report->grad_norm);
    logger_flush(&logger->main_log);
    FILE* f = logger->metrics.file;
    fprintf(f, "{\"type\": \"step\", \"step\": %d, \"tokens\": %lld", report->step, (long long)report->tokens);
    logger_json_number(f, "loss", (double)report->loss, 9); // nine digits bring a float back to the bit
    logger_json_number(f, "grad_norm", (double)report->grad_norm, 9);
    logger_json_number(f, "lr", (double)report->learning_rate, 9);
    logger_json_number(f, "ms", report->ms, 6);
    logger_json_number(f, "tokens_per_s", report->tokens_per_s, 8);
    logger_json_number(f, "roofline_fraction", report->roofline_fraction > 0.0 ? report->roofline_fraction : NAN, 4);
    logger_json_number(f, "loss_z", report->loss_z, 4);
    logger_json_number(f, "grad_norm_z", report->grad_norm_z, 4);
    fprintf(f, ", \"skipped\": %d, \"slots_warming\": %d", report->skipped, report->slots_warming);
    if (report->num_ranks > 1) {
        double ms = report->comm_ms;
        fprintf(f, ", \"comm_bytes\": %llu", (unsigned long long)report->comm_bytes);
        logger_json_number(f, "comm_ms", ms, 6);
        logger_json_number(f, "comm_exposed_ms", report->comm_exposed_ms, 6);
        logger_json_number(f, "comm_gb_per_s", ms > 0.0 ? 1e-6 * (double)report->comm_bytes / ms : NAN, 4);
    }
    fprintf(f, "}\n");
    logger_flush(&logger->metrics);
}

// Validation loss after `step` updates, with `tokens` trained on so far.
static inline void logger_log_val(Logger* logger, int step, int64_t tokens, float loss) {
    if (logger->main_log.file == NULL) {
        return;
    }
    fprintf(logger->main_log.file, "s:%d tel:%.4f\n", step, (double)loss);
    logger_flush(&logger->main_log);
    fprintf(logger->metrics.file, "{\"type\": \"val\", \"step\": %d, \"tokens\": %lld", step, (long long)tokens);
    logger_json_number(logger->metrics.file, "loss", (double)loss, 9);
    fprintf(logger->metrics.file, "}\n");
    logger_flush(&logger->metrics);
}

// Accuracy (0 to 1) of an evaluation after `step` updates.
static inline void logger_log_eval(Logger* logger, int step, float accuracy) {
    if (logger->main_log.file == NULL) {
        return;
    }
    fprintf(logger->main_log.file, "s:%d eval:%.4f\n", step, (double)accuracy);
    logger_flush(&logger->main_log);
    fprintf(logger->metrics.file, "{\"type\": \"eval\", \"step\": %d", step);
    logger_json_number(logger->metrics.file, "accuracy", (double)accuracy, 9);
    fprintf(logger->metrics.file, "}\n");
    logger_flush(&logger->metrics);
}

// A checkpoint of `bytes` after `step` updates is complete: written in write_s seconds; training waited for delay_s.
static inline void logger_log_checkpoint(Logger* logger, int step, uint64_t bytes, double write_s, double delay_s) {
    if (logger->main_log.file == NULL) {
        return;
    }
    fprintf(logger->metrics.file, "{\"type\": \"checkpoint\", \"step\": %d, \"bytes\": %llu", step,
            (unsigned long long)bytes);
    logger_json_number(logger->metrics.file, "write_s", write_s, 4);
    logger_json_number(logger->metrics.file, "gb_per_s", write_s > 0.0 ? 1e-9 * (double)bytes / write_s : NAN, 4);
    logger_json_number(logger->metrics.file, "delay_s", delay_s, 4);
    fprintf(logger->metrics.file, "}\n");
    logger_flush(&logger->metrics);
}

// The profile of the steps up to `step`.
static inline void logger_log_profile(Logger* logger, int step, const Profile* profile) {
    if (logger->main_log.file == NULL) {
        return;
    }
    fprintf(logger->metrics.file, "{\"type\": \"profile\", \"step\": %d, \"profile\": ", step);
    profile_write_json(logger->metrics.file, profile);
    fprintf(logger->metrics.file, "}\n");
    logger_flush(&logger->metrics);
}

// Close the files.
static inline void logger_close(Logger* logger) {
    LogFile* logs[] = {&logger->main_log, &logger->metrics};
    for (int i = 0; i < 2; i++) {
        LogFile* log = logs[i];
        if (log->file == NULL) { continue; }
        if (log->waiting > 0) { logger_flush(log); }
        if (log->waiting > 0) { warning("'%s' lacks its last %d lines", log->path, log->waiting); }
        close(log->fd);
        fclose(log->file);
        free(log->text);
        free(log->path);
    }
    memset(logger, 0, sizeof(*logger));
}

// " (+1.23z)", or nothing while there is no score yet.
static inline const char* logger_z_text(double z, char* out, size_t size) {
    out[0] = 0;
    if (isfinite(z)) {
        snprintf(out, size, " (%+.2fz)", z);
    }
    return out;
}

// The step's line on the screen, of a run of num_steps steps:
//     step   12/1200 | loss 4.376012 (+0.12z) | norm 0.4601 (-0.30z) | lr 6.00e-04 | 228.13 ms | 574093 tok/s
//     and, as far as there is something to say,
//     | 61.2% roofline | comm 12.3 ms, 1.2 exposed | 12 scales warming up | SKIPPED
static inline void logger_print_step(FILE* out, const StepReport* report, int num_steps) {
    char loss_z[32], norm_z[32];
    int width = snprintf(NULL, 0, "%d", num_steps);
    fprintf(out, "step %*d/%d | loss %8.6f%s | norm %6.4f%s | lr %.2e | %.2f ms | %.0f tok/s", width, report->step + 1,
            num_steps, (double)report->loss, logger_z_text(report->loss_z, loss_z, sizeof(loss_z)),
            (double)report->grad_norm, logger_z_text(report->grad_norm_z, norm_z, sizeof(norm_z)),
            (double)report->learning_rate, report->ms, report->tokens_per_s);
    if (report->roofline_fraction > 0.0) {
        fprintf(out, " | %.1f%% roofline", 100.0 * report->roofline_fraction);
    }
    if (report->num_ranks > 1) {
        fprintf(out, " | comm %.1f ms, %.1f exposed", report->comm_ms, report->comm_exposed_ms);
    }
    if (report->slots_warming > 0) {
        fprintf(out, " | %d scales warming up", report->slots_warming);
    }
    fprintf(out, "%s\n", report->skipped ? " | SKIPPED" : "");
    fflush(out);
}

// At the end of a run on R ranks: what one of them sent per parameter and step, against two ways that are usual: BF16
// gradients and BF16 weights (a reduce-scatter and an all-gather, each (R - 1) / R of the parameters), and FP32
// gradients and BF16 weights. bytes and steps from the first step on; `ms` and exposed_ms are those of the steps after
// it (timed), which holds start-up work.
static inline void logger_print_comm(FILE* out, const CommTotal* all, const CommTotal* timed, size_t num_parameters,
                                     int num_ranks) {
    if (num_ranks == 1 || all->steps == 0) { return; }
    double sent = (double)all->bytes / ((double)num_parameters * all->steps), part = (num_ranks - 1.0) / num_ranks;
    fprintf(out, "communication: %.3f wire bytes per parameter, step and rank: %.3f of BF16 gradients and weights (%.3f), "
            "%.3f of FP32 and BF16 (%.3f)", sent, sent / (4.0 * part), 4.0 * part, sent / (6.0 * part), 6.0 * part);
    if (timed->steps > 0) {
        fprintf(out, "; %.2f ms per step, %.2f exposed", timed->ms / timed->steps, timed->exposed_ms / timed->steps);
    }
    if (timed->ms > 0.0) { fprintf(out, ", %.3g GB/s", 1e-6 * (double)timed->bytes / timed->ms); }
    fprintf(out, "\n");
    fflush(out);
}

#endif
