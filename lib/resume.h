// Where a run goes on: finds the checkpoints that --resume (-y) means, newest first, and reads what is known of one
// before the model exists: its shape and where the run stood. The weights come later, when there is a place for them
// (load.h); whatever turns out to be damaged, the one before is tried.
//
//     Resume resume;
//     resume_find(&resume, &train);           // errors: nothing to resume from in PATH; a run would be overwritten
//     while (resume_open(&resume)) {          // heads: gpt, step, state or llmc
//         ... load; if that went well: break
//         resume_reject(&resume, why);        // says so, goes on to the one before
//     }
#ifndef RESUME_H
#define RESUME_H

#include "check.h"

#include <limits.h>

#include "llmc_state.h"
#include "run_state.h"
#include "snapshot.h"

typedef struct {
    char* path;  // a checkpoint folder of ours, or an llm.c model file with its states beside it
    int is_llmc;
    int step; // by its name, -1: the name says none
} ResumeCandidate;

typedef struct {
    ResumeCandidate* candidates; // newest first
    int num_candidates;
    int at;      // the one that is tried
    int is_here; // it lies in --output-dir, whose logs go on
    int speaks;  // this rank reports what is wrong with checkpoints
    // of candidates[at], when resume_open has returned 1
    GptConfig gpt;
    int step;       // steps done
    RunState state; // ours
    char* config;   // ours, config_to_text; NULL: llm.c's
    LlmcState llmc; // llm.c's, with the whole of its arrays
    float *master, *m, *v;
} Resume;

static inline void resume_add(Resume* resume, const char* path, int is_llmc, int step) {
    size_t n = (size_t)resume->num_candidates;
    ResumeCandidate* grown = (ResumeCandidate*)malloc_or_die((n + 1) * sizeof(ResumeCandidate));
    if (n > 0) { memcpy(grown, resume->candidates, n * sizeof(ResumeCandidate)); }
    free(resume->candidates);
    resume->candidates = grown;
    ResumeCandidate* added = &grown[resume->num_candidates++];
    added->path = (char*)malloc_or_die(strlen(path) + 1);
    strcpy(added->path, path);
    added->is_llmc = is_llmc;
    added->step = step;
}

// The checkpoints in the folder of a run, newest first; of one step ours before llm.c's. Ours of a higher step than the
// one that was written last (RUN/latest) come after all others: the run went back behind them and was continued from
// there.
static inline void resume_add_run(Resume* resume, const char* run) {
    int *ours = NULL, *theirs = NULL, num_ours = snapshot_steps(run, &ours), num_theirs = llmc_steps(run, &theirs);
    int latest = snapshot_latest(run), i = num_ours - 1, k = num_theirs - 1;
    char path[SNAPSHOT_PATH];
    while (latest >= 0 && i >= 0 && ours[i] > latest) {
        i--;
    }
    int beyond = i;
    while (i >= 0 || k >= 0) {
        if (i >= 0 && (k < 0 || ours[i] >= theirs[k])) {
            snapshot_path(path, sizeof(path), run, ours[i], NULL);
            resume_add(resume, path, 0, ours[i--]);
        } else {
            llmc_model_path(path, sizeof(path), run, theirs[k]);
            resume_add(resume, path, 1, theirs[k--]);
        }
    }
    for (i = num_ours - 1; i > beyond; i--) {
        snapshot_path(path, sizeof(path), run, ours[i], NULL);
        resume_add(resume, path, 0, ours[i]);
    }
    free(ours);
    free(theirs);
}

// Is `path` (a checkpoint folder or model file) inside the folder `run`?
static inline int resume_is_inside(const char* path, const char* run) {
    char* of_path = realpath(path, NULL);
    char* of_run = realpath(run, NULL);
    size_t length = of_run != NULL ? strlen(of_run) : 0;
    int inside = of_path != NULL && of_run != NULL && strncmp(of_path, of_run, length) == 0 && of_path[length] == '/' &&
                 strchr(of_path + length + 1, '/') == NULL;
    free(of_path);
    free(of_run);
    return inside;
}

// Fill *resume with what train->resume means: no candidates for "0", or for "1" when --output-dir has none. Errors: a
// PATH without a checkpoint; a run that would write into a folder with checkpoints that it does not continue.
static inline void resume_find(Resume* resume, const TrainConfig* train, int speaks) {
    memset(resume, 0, sizeof(*resume));
    resume->speaks = speaks;
    const char* where = train->resume;
    int is_here = strcmp(where, "1") == 0, is_fresh = strcmp(where, "0") == 0;
    check(where[0] != 0, "--resume (-y): found an empty value, want 0, 1 or a path");
    check(!is_here || train->output_dir[0] != 0,
          "--resume (-y) 1 wants --output-dir (-o): that is where checkpoints are");
    if (!is_fresh) {
        char common[SNAPSHOT_PATH];
        struct stat st;
        snprintf(common, sizeof(common), "%s/common.bin", where);
        if (is_here) {
            resume_add_run(resume, train->output_dir);
        } else if (stat(where, &st) != 0) {
            check(0, "--resume (-y): cannot open '%s': %s; want 0, 1, a checkpoint folder, the folder of a run, or an "
                  "llm.c model file", where, strerror(errno));
        } else if (S_ISREG(st.st_mode)) {
            resume_add(resume, where, 1, -1);
        } else if (snapshot_step_of_name(strrchr(where, '/') != NULL ? strrchr(where, '/') + 1 : where, "") >= 0 ||
                   stat(common, &st) == 0) {
            resume_add(resume, where, 0, -1);
        } else {
            resume_add_run(resume, where);
        }
        check(is_here || resume->num_candidates > 0, "--resume (-y): no checkpoint in '%s', want step_%%08d folders, or "
              "llm.c's model, state and DONE files", where);
    }
    resume->is_here = resume->num_candidates > 0 && resume_is_inside(resume->candidates[0].path, train->output_dir);
    int* steps = NULL;
    int there = train->output_dir[0] != 0 && !train->dry_run ? snapshot_steps(train->output_dir, &steps) : 0;
    check(there == 0 || resume->is_here, "'%s' has checkpoints of another run, the newest of step %d: go on with it (-y 1), "
          "or take another folder (-o), or remove them", train->output_dir, steps[there - 1]);
    free(steps);
}

// --output-dir is this process's alone while the descriptor returned is open. -1: no folder yet, or no locks there.
static inline int lock_output(const TrainConfig* train) {
    int lock = snapshot_lock(train->output_dir, 20);
    const char* run = train->output_dir;
    check(lock >= 0 || errno != EWOULDBLOCK, "another process is writing to '%s': want it to end first, or another "
          "folder (-o); to look at its checkpoints meanwhile: --resume '%s' -o ''; if its machine is dead and a "
          "network's disk does not know it yet, remove '%s/lock'", run, run, run);
    return lock;
}

// The head of our checkpoint. 0, or 1 with the reason in why (WHY_BYTES).
static inline int resume_read_head(Resume* resume, const char* folder, char* why) {
    char path[SNAPSHOT_PATH];
    snprintf(path, sizeof(path), "%s/common.bin", folder);
    SnapshotIn in;
    if (snapshot_in_open(&in, path, why) != 0) { return 1; }
    RunState state;
    memset(&state, 0, sizeof(state));
    int64_t length = snapshot_in_bytes(&in, "config");
    size_t bytes = snapshot_in_bytes(&in, "run") == RUN_STATE_1_BYTES ? (size_t)RUN_STATE_1_BYTES : sizeof(state);
    int bad = snapshot_in_whole(&in, "run", &state, bytes, why);
    if (!bad) {
        run_state_upgrade(&state, bytes);
        bad = run_state_check(&state, path, why);
    }
    if (!bad && (length < 0 || length > 1 << 20)) {
        bad = refuse(why, "'%s' has settings of %lld bytes, want 0 to %d", path, (long long)length, 1 << 20);
    }
    char* config = bad ? NULL : (char*)calloc_or_die((size_t)length + 1, 1);
    bad = bad || snapshot_in_whole(&in, "config", config, (uint64_t)length, why);
    snapshot_in_close(&in);
    if (bad) {
        free(config);
        return 1;
    }
    resume->state = state;
    resume->config = config;
    resume->step = (int)state.step;
    resume->gpt = run_state_shape(&state);
    return 0;
}

static inline void resume_release(Resume* resume) {
    free(resume->config);
    free(resume->master);
    free(resume->m);
    free(resume->v);
    resume->config = NULL;
    resume->master = resume->m = resume->v = NULL;
}

// The candidate at hand is no good: say why, and take the one before.
static inline void resume_reject(Resume* resume, const char* why) {
    int is_last = resume->at + 1 == resume->num_candidates;
    if (resume->speaks) {
        warning("cannot go on from '%s': %s%s", resume->candidates[resume->at].path, why,
                is_last ? "" : "; trying the one before it");
    }
    resume_release(resume);
    resume->at++;
}

// Read the head of the candidate at hand, or of the first one after it that has a sound head. 1: gpt, step and the rest
// are filled; 0: there are no candidates. When there were some and none is left: one error line.
static inline int resume_open(Resume* resume) {
    if (resume->num_candidates == 0) { return 0; }
    while (resume->at < resume->num_candidates) {
        const ResumeCandidate* candidate = &resume->candidates[resume->at];
        char why[WHY_BYTES] = "";
        int bad = candidate->is_llmc ? llmc_read(candidate->path, &resume->gpt, &resume->llmc, &resume->master,
                                                 &resume->m, &resume->v, why)
                                     : resume_read_head(resume, candidate->path, why);
        if (!bad) {
            if (candidate->is_llmc) { resume->step = resume->llmc.step; }
            return 1;
        }
        resume_reject(resume, why);
    }
    check(0, "no checkpoint that is whole: %d tried, the last is '%s'", resume->num_candidates,
          resume->candidates[resume->num_candidates - 1].path);
    return 0;
}

// Put `loader` (NULL: none) where the data go on, and say where that is; the string is static.
static inline const char* resume_data(const Resume* resume, DataLoader* loader, const TrainConfig* train) {
    if (loader == NULL) { return "no training data"; }
    if (resume->config == NULL) {
        DataPosition at;
        int exact = llmc_data_position(&resume->llmc, loader, (int64_t)resume->step * train->grad_accum_steps, &at);
        dataloader_seek(loader, at);
        return exact ? "the next batch is the one that llm.c would have taken"
                     : "not in llm.c's order: other files, batch, ranks or seed; as many batches are taken as done";
    }
    switch (run_state_seek(&resume->state, loader)) {
    case DATA_SAME: return "the next batch follows the last one";
    case DATA_REORDERED: return "another micro-batch, number of ranks or seed: the epoch goes on in another order, "
                                "some of it comes twice and some not";
    default:
        if (train->rank == 0) {
            warning("the training data are other files than before (-i): they are read from their beginning");
        }
        return "other files than before: from their beginning";
    }
}

static inline void resume_free(Resume* resume) {
    resume_release(resume);
    for (int i = 0; i < resume->num_candidates; i++) {
        free(resume->candidates[i].path);
    }
    free(resume->candidates);
    memset(resume, 0, sizeof(*resume));
}

#endif
