// lib/state_ranges.h, save.h, load.h: checkpoints of sharded and unsharded ranks of any number, on ranks of any other
// number. All ranks are played by this process: a Comm that speaks with nobody, a Device whose memory is the host's.
#define CPU_FLOOR
#define SAVE_BUFFER ((size_t)20000) // small, so that arrays take several buffers and pieces, ranges begin in one and
#define LOAD_PIECE ((size_t)8004)   // end in another
#include "load.h"
#include "save.h"
#include "snapshot_writer.h"

#include "unit.h"

enum { MAX_RANKS = 10 };

static char folder[64]; // temporary, removed at the end
static char why[WHY_BYTES];
static float checkpoint_gib = 1e-5f; // --checkpoint-memory: two buffers

// ---------------------------------------------------------------------------------------------------------------------
// the floor

struct Comm {
    int rank, num_ranks;
};
struct Device {
    int copies_out, copies_in;
};

static struct Device device;

int comm_rank(const Comm* comm) { return comm->rank; }
int comm_num_ranks(const Comm* comm) { return comm->num_ranks; }
void comm_set_busy(Comm* comm, int is_busy) { (void)comm, (void)is_busy; }
void comm_host_min_max(Comm* comm, int64_t value, int64_t* min, int64_t* max) {
    (void)comm;
    *min = *max = value;
}
void* pinned_malloc(Device* dev, size_t bytes) {
    (void)dev;
    return malloc_or_die(bytes);
}
void pinned_release(Device* dev, void* p) {
    (void)dev;
    free(p);
}
void device_copy_in(Device* dev, void* to_device, const void* from_host, size_t bytes) {
    memcpy(to_device, from_host, bytes);
    dev->copies_in++;
}
void device_copy_out(Device* dev, void* to_host, const void* from_device, size_t bytes) {
    memcpy(to_host, from_device, bytes);
    dev->copies_out++;
}
void device_sync(Device* dev) { (void)dev; }

// ---------------------------------------------------------------------------------------------------------------------
// models and ranks

// Odd widths: slices end within pieces, small pieces belong to rank 0 alone; of the tiny one ranks 8 and 9 of 10 own
// nothing.
static const GptConfig odd = {33, 300, 384, 3, 3, 48}, tiny = {1, 100, 128, 1, 1, 16};

// How a model lies on ranks.
typedef struct {
    int num_ranks, is_sharded;
} Layout;

static const Layout layouts[] = {{1, 0}, {2, 0}, {3, 0}, {4, 0}, {7, 0}, {1, 1}, {2, 1}, {3, 1}, {4, 1}, {7, 1}};
enum { NUM_LAYOUTS = sizeof(layouts) / sizeof(layouts[0]) };

static StateRanges ranges_of(const GptConfig* gpt, Layout layout, int rank, int to_save) {
    ParameterTable table = parameter_table(*gpt);
    if (!layout.is_sharded) {
        return to_save ? state_ranges_share(table.num_parameters, rank, layout.num_ranks)
                       : state_ranges_flat(table.num_parameters);
    }
    Shards shards = shards_create(&table, layout.num_ranks);
    StateRanges ranges = state_ranges_of_shard(&shards, rank);
    shards_free(&shards);
    return ranges;
}

// Elements of a rank's arrays.
static size_t array_elements(const GptConfig* gpt, Layout layout) {
    ParameterTable table = parameter_table(*gpt);
    if (!layout.is_sharded) { return table.num_parameters; }
    Shards shards = shards_create(&table, layout.num_ranks);
    size_t n = shards.shard;
    shards_free(&shards);
    return n;
}

// What array `which` (0 master, 1 m, 2 v) has for parameter i at a step; its bits are no parameter's of another place.
static float value_of(int which, size_t i, int step) {
    return (float)(i + 1) * (which == 0 ? 1.0f : which == 1 ? -0.5f : 0x1p-30f) + (float)step * 0x1p20f;
}

static const float nothing = -12345.678f; // in padding, and before anything is loaded

static StateArrays new_arrays(size_t n) {
    float* all = (float*)malloc_or_die(3 * n * sizeof(float));
    for (size_t i = 0; i < 3 * n; i++) {
        all[i] = nothing;
    }
    StateArrays arrays = {all, all + n, all + 2 * n};
    return arrays;
}

static float* array_of(const StateArrays* arrays, int which) {
    return which == 0 ? arrays->master : which == 1 ? arrays->m : arrays->v;
}

// Everything a rank keeps has the values of `step` (-1: nothing is loaded), and the padding is untouched.
static void expect_arrays(const GptConfig* gpt, Layout layout, int rank, const StateArrays* arrays, int step,
                          const char* what) {
    StateRanges keeps = ranges_of(gpt, layout, rank, 0);
    size_t n = array_elements(gpt, layout);
    float* want = (float*)malloc_or_die(n * sizeof(float));
    for (int which = 0; which < 3; which++) {
        for (size_t i = 0; i < n; i++) {
            want[i] = nothing;
        }
        for (int k = 0; k < keeps.num && step >= 0; k++) {
            for (size_t i = 0; i < keeps.range[k].count; i++) {
                want[keeps.range[k].at + i] = value_of(which, keeps.range[k].first + i, step);
            }
        }
        const float* found = array_of(arrays, which);
        for (size_t i = 0; i < n; i++) {
            if (memcmp(&found[i], &want[i], sizeof(float)) != 0) {
                expect(0, "%s: rank %d of %d, sharded %d: array %d has %.9g at %zu, want %.9g", what, rank,
                       layout.num_ranks, layout.is_sharded, which, (double)found[i], i, (double)want[i]);
                break;
            }
        }
    }
    free(want);
    state_ranges_free(&keeps);
}

static RunState state_of(const GptConfig* gpt, Layout layout, int step) {
    RunState s;
    memset(&s, 0, sizeof(s));
    s.version = RUN_STATE_VERSION;
    s.step = s.num_updates = step;
    run_state_set_shape(&s, gpt);
    s.num_slots = 12 * gpt->num_layers;
    s.num_ranks = layout.num_ranks;
    s.window_tokens = 512;
    s.slot_bytes = sizeof(ScaleSlot);
    s.amax_history = 16;
    s.grad_mu = 1.0;
    return s;
}

static TrainConfig settings(const char* output_dir, const char* resume) {
    TrainConfig train;
    GptConfig gpt;
    char* argv[] = {"test", "-o", (char*)(uintptr_t)output_dir, "-y", (char*)(uintptr_t)resume};
    config_parse(&train, &gpt, 5, argv);
    train.checkpoint_memory = checkpoint_gib;
    return train;
}

static const char* in_folder(const char* name) {
    static char paths[8][256];
    static int next;
    char* path = paths[next++ % 8];
    snprintf(path, 256, "%s/%s", folder, name);
    return path;
}

// Slots that tell the rank.
static void fill_slots(ScaleSlot* slots, int num_slots, int rank) {
    for (int i = 0; i < num_slots; i++) {
        scale_slot_init(&slots[i], 448.0f, SLOT_DELAYED);
        slots[i].scale = 1.0f + (float)rank;
    }
}

// The checkpoint of `step` in RUN, as the ranks of a run write it.
static void write_checkpoint(const char* run, const GptConfig* gpt, Layout layout, int step) {
    TrainConfig train = settings(run, "0");
    Save saves[MAX_RANKS];
    Comm comms[MAX_RANKS];
    Logger logger;
    memset(&logger, 0, sizeof(logger));
    fflush(stdout);
    int quiet = open("/dev/null", O_WRONLY), screen = dup(1);
    dup2(quiet, 1);
    for (int r = 0; r < layout.num_ranks; r++) {
        size_t n = array_elements(gpt, layout);
        StateArrays arrays = new_arrays(n);
        StateRanges keeps = ranges_of(gpt, layout, r, 0);
        for (int which = 0; which < 3; which++) {
            for (int k = 0; k < keeps.num; k++) {
                for (size_t i = 0; i < keeps.range[k].count; i++) {
                    array_of(&arrays, which)[keeps.range[k].at + i] = value_of(which, keeps.range[k].first + i, step);
                }
            }
        }
        state_ranges_free(&keeps);
        RunState state = state_of(gpt, layout, step);
        ScaleSlot* slots = (ScaleSlot*)malloc_or_die((size_t)state.num_slots * sizeof(ScaleSlot));
        fill_slots(slots, (int)state.num_slots, r);
        comms[r].rank = r;
        comms[r].num_ranks = layout.num_ranks;
        save_open(&saves[r], &device, &comms[r], &logger, &train, ranges_of(gpt, layout, r, 1));
        saves[r].newest = snapshot_latest(run); // it goes on from there
        device.copies_out = 0;
        size_t span = state_ranges_span(&saves[r].ranges) * sizeof(float);
        save_begin(&saves[r], &arrays, slots, &state);
        int most = 1 + 3 * (int)((span + SAVE_BUFFER - 1) / SAVE_BUFFER);
        expect(device.copies_out <= most, "rank %d: %d copies from the device, want at most %d", r, device.copies_out,
               most);
        free(arrays.master); // it was copied
        free(slots);
    }
    for (int r = layout.num_ranks - 1; r >= 0; r--) { // rank 0 wants the files of all
        save_poll(&saves[r], 1);
        expect(saves[r].newest == step, "rank %d: no checkpoint of step %d", r, step);
        save_free(&saves[r]);
    }
    fflush(stdout);
    dup2(screen, 1);
    close(screen);
    close(quiet);
}

// ---------------------------------------------------------------------------------------------------------------------
// tests

// The list of a shard: every slice that is not empty, in the order in which it lies there.
static void test_ranges_of_shards(void) {
    const GptConfig* models[] = {&odd, &tiny};
    for (int g = 0; g < 2; g++) {
        ParameterTable table = parameter_table(*models[g]);
        for (int R = 1; R <= MAX_RANKS; R++) {
            Shards shards = shards_create(&table, R);
            size_t sum = 0;
            for (int r = 0; r < R; r++) {
                StateRanges ranges = state_ranges_of_shard(&shards, r);
                size_t *owner = (size_t*)calloc_or_die(shards.shard, sizeof(size_t)), end = 0; // parameter + 1
                for (int b = 0; b < shards.num_buckets; b++) {
                    for (size_t block = 0; block < shards.bucket[b].chunk / GRAD_BLOCK; block++) {
                        ChunkBlock found = chunk_block(&shards.bucket[b], block, r);
                        for (int i = 0; i < found.count; i++) {
                            owner[shards.bucket[b].shard_at + block * GRAD_BLOCK + (size_t)i] =
                                found.offset + (size_t)i + 1;
                        }
                    }
                }
                for (int k = 0; k < ranges.num; k++) {
                    StateRange range = ranges.range[k];
                    expect(range.count > 0 && range.at >= end, "range %d of rank %d of %d: %zu at %zu", k, r, R,
                           range.count, range.at);
                    end = range.at + range.count;
                    for (size_t i = 0; i < range.count; i++) {
                        size_t want = owner[range.at + i] - 1;
                        owner[range.at + i] = 0;
                        expect(range.first + i == want, "rank %d of %d: parameter %zu at %zu, want %zu", r, R,
                               range.first + i, range.at + i, want);
                    }
                }
                for (size_t i = 0; i < shards.shard; i++) {
                    expect(owner[i] == 0, "rank %d of %d: parameter %zu is in no range", r, R, owner[i] - 1);
                }
                expect(ranges.count == shards_owned(&shards, r), "rank %d of %d: %zu parameters", r, R, ranges.count);
                expect(ranges.num <= 12 * models[g]->num_layers + 4 && state_ranges_span(&ranges) <= shards.shard,
                       "rank %d of %d: %d ranges", r, R, ranges.num);
                sum += ranges.count;
                state_ranges_free(&ranges);
                free(owner);
            }
            expect(sum == table.num_parameters, "%d ranks own %zu of %zu", R, sum, table.num_parameters);
            shards_free(&shards);
        }
    }
}

// Shares of the flat order: one behind the other, as even as can be.
static void test_shares(void) {
    size_t sizes[] = {1, 6, 7, 1000003};
    for (int s = 0; s < 4; s++) {
        for (int R = 1; R <= MAX_RANKS; R++) {
            size_t next = 0;
            for (int r = 0; r < R; r++) {
                StateRanges ranges = state_ranges_share(sizes[s], r, R);
                size_t least = sizes[s] / (size_t)R;
                expect(ranges.num == (ranges.count > 0) && (ranges.count == least || ranges.count == least + 1),
                       "%zu on %d ranks: %zu", sizes[s], R, ranges.count);
                expect(ranges.num == 0 || (ranges.range[0].first == next && ranges.range[0].at == next),
                       "rank %d of %d: from %zu on", r, R, ranges.range[0].first);
                next += ranges.count;
                state_ranges_free(&ranges);
            }
            expect(next == sizes[s], "%zu of %zu", next, sizes[s]);
        }
    }
}

// Load the checkpoint of `step` in RUN on all ranks of `layout`.
static void load_on(const char* run, const GptConfig* gpt, Layout saved, Layout layout, int step, const char* what) {
    char path[SNAPSHOT_PATH];
    snapshot_path(path, sizeof(path), run, step, NULL);
    RunState state = state_of(gpt, saved, step);
    ScaleSlot* slots = (ScaleSlot*)malloc_or_die((size_t)state.num_slots * sizeof(ScaleSlot));
    for (int r = 0; r < layout.num_ranks; r++) {
        StateArrays arrays = new_arrays(array_elements(gpt, layout));
        StateRanges keeps = ranges_of(gpt, layout, r, 0);
        int bad = load_checkpoint(&device, r, &state, path, &arrays, &keeps, slots, why);
        expect(!bad, "%s: rank %d of %d, sharded %d: %s", what, r, layout.num_ranks, layout.is_sharded, why);
        expect_arrays(gpt, layout, r, &arrays, bad ? -1 : step, what);
        float rank = 1.0f + (float)(r < saved.num_ranks ? r : 0);
        expect(bad || slots[state.num_slots - 1].scale == rank, "%s: slots of rank %g, want %g", what,
               (double)slots[state.num_slots - 1].scale - 1.0, (double)rank - 1.0);
        free(arrays.master);
        state_ranges_free(&keeps);
    }
    free(slots);
}

// Every layout's checkpoint on every layout; model.bin is the same file from all.
static void test_all_combinations(void) {
    size_t n = gpt_num_parameters(&odd);
    float* params = (float*)malloc_or_die(n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        params[i] = value_of(0, i, 5);
    }
    checkpoint_write_model(in_folder("want.bin"), &odd, params, MODEL_FILE_BF16);
    for (int from = 0; from < NUM_LAYOUTS; from++) {
        char run[256], what[64], command[700];
        snprintf(what, sizeof(what), "%d_ranks_sharded_%d", layouts[from].num_ranks, layouts[from].is_sharded);
        snprintf(run, sizeof(run), "%s", in_folder(what));
        write_checkpoint(run, &odd, layouts[from], 5);
        snprintf(command, sizeof(command), "cmp %s/step_00000005/model.bin %s", run, in_folder("want.bin"));
        expect(system(command) == 0, "%s: model.bin is not what checkpoint_write_model makes", what);
        for (int to = 0; to < NUM_LAYOUTS; to++) {
            load_on(run, &odd, layouts[from], layouts[to], 5, what);
        }
    }
    free(params);
}

// Ranks that own nothing have files, too; plenty of buffers.
static void test_empty_ranks(void) {
    Layout ten = {10, 1}, one = {1, 0};
    StateRanges last = ranges_of(&tiny, ten, 9, 1);
    expect(last.num == 0 && last.count == 0, "rank 9 owns %zu parameters: not the case that is meant", last.count);
    checkpoint_gib = 1.0f;
    write_checkpoint(in_folder("tiny"), &tiny, ten, 3);
    checkpoint_gib = 1e-5f;
    load_on(in_folder("tiny"), &tiny, ten, one, 3, "10 to 1");
    load_on(in_folder("tiny"), &tiny, ten, ten, 3, "10 to 10");
}

// A file of two pairs, as forged checkpoints have them.
typedef struct {
    uint64_t pair[2][2];
} Pairs;

// A checkpoint of the tiny model in which two files have these shares; the rest of them is as it should be.
static void forge(const char* path, const Pairs* pairs, int num_bytes) {
    check(mkdir(path, 0777) == 0 || errno == EEXIST, "mkdir");
    for (int f = 0; f < 2; f++) {
        char file[300];
        SnapshotOut out;
        snprintf(file, sizeof(file), "%s/shard_%05d.bin", path, f);
        check(snapshot_out_open(&out, file, 0) == 0, "snapshot_out_open");
        snapshot_out_begin(&out, "share");
        snapshot_out_append(&out, pairs[f].pair, (size_t)num_bytes);
        snapshot_out_end(&out);
        for (int which = 0; which < 3; which++) {
            snapshot_out_begin(&out, which == 0 ? "master" : which == 1 ? "m" : "v");
            for (int k = 0; k < 2; k++) {
                for (uint64_t i = 0; i < pairs[f].pair[k][1] && i < 1 << 20; i++) {
                    float value = value_of(which, (size_t)(pairs[f].pair[k][0] + i), 1);
                    snapshot_out_append(&out, &value, sizeof(value));
                }
            }
            snapshot_out_end(&out);
        }
        SnapshotModelSlice slice = {pairs[f].pair[0][0], pairs[f].pair[0][1] + pairs[f].pair[1][1], 0, 0};
        snapshot_out_begin(&out, "model");
        snapshot_out_append(&out, &slice, sizeof(slice));
        snapshot_out_end(&out);
        check(snapshot_out_close(&out) == 0, "snapshot_out_close");
    }
}

// Files whose shares do not make one model are refused before anything is copied, with a line that says what is wrong.
static void test_shares_that_do_not_fit(void) {
    uint64_t n = gpt_num_parameters(&tiny);
    Layout two = {2, 0}, one = {1, 0};
    const struct {
        Pairs files[2];
        int bytes;
        const char* text;
    } cases[] = {
        {{{{{0, 100}, {300, n - 300}}}, {{{200, 100}, {100, 100}}}}, 32, NULL},
        {{{{{0, 100}, {300, n - 300}}}, {{{200, 100}, {101, 99}}}}, 32, "no parameters 100 to 100 of"},
        {{{{{0, 100}, {300, n - 301}}}, {{{200, 100}, {100, 100}}}}, 32, "in its 2 shards"},
        {{{{{1, 99}, {300, n - 300}}}, {{{200, 100}, {100, 100}}}}, 32, "no parameters 0 to 0 of"},
        {{{{{0, 100}, {300, n - 300}}}, {{{200, 101}, {100, 100}}}}, 32, "parameters 300 to 300, which shard_0000"},
        {{{{{0, 100}, {300, n - 300}}}, {{{200, 100}, {0, 200}}}}, 32, "holds parameters 0 to 99, which shard_0000"},
        {{{{{0, 300}, {300, n - 300}}}, {{{200, 100}, {0, 0}}}}, 32, "shard_00001.bin' holds parameters 200 to 299"},
        {{{{{0, 100}, {300, n - 299}}}, {{{200, 100}, {100, 100}}}}, 32, "shard_00000.bin' holds"},
        {{{{{0, 100}, {300, n - 300}}}, {{{200, 100}, {UINT64_MAX, 2}}}}, 32, "00001.bin' holds 2 parameters from"},
        {{{{{0, 100}, {300, n - 300}}}, {{{200, 100}, {2, UINT64_MAX}}}}, 32, "want them out of"},
        {{{{{0, 100}, {300, n - 300}}}, {{{0, n}, {0, n}}}}, 32, "each once"},
        {{{{{0, 100}, {300, n - 300}}}, {{{200, 100}, {100, 100}}}}, 24, "a share of 24 bytes"},
        {{{{{0, 100}, {300, n - 300}}}, {{{200, 100}, {100, 100}}}}, 0, "no parameters 0 to"},
    };
    RunState state = state_of(&tiny, two, 1);
    ScaleSlot* slots = (ScaleSlot*)malloc_or_die((size_t)state.num_slots * sizeof(ScaleSlot));
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        StateArrays arrays = new_arrays(array_elements(&tiny, one));
        StateRanges keeps = ranges_of(&tiny, one, 0, 0);
        forge(in_folder("forged"), cases[i].files, cases[i].bytes);
        why[0] = 0;
        device.copies_in = 0;
        // rank 1 of two, who does not look at model.bin; there are no slots, which come last
        int bad = load_checkpoint(&device, 1, &state, in_folder("forged"), &arrays, &keeps, slots, why);
        const char* text = cases[i].text != NULL ? cases[i].text : "no section 'slots'";
        expect(bad && strstr(why, text) != NULL && strstr(why, "forged") != NULL, "case %zu: '%s', want '%s'", i, why,
               text);
        expect((device.copies_in > 0) == (cases[i].text == NULL), "case %zu: %d copies", i, device.copies_in);
        expect_arrays(&tiny, one, 0, &arrays, cases[i].text == NULL ? 1 : -1, "forged");
        free(arrays.master);
        state_ranges_free(&keeps);
    }
    char path[300];
    snprintf(path, sizeof(path), "%s/shard_00001.bin", in_folder("forged"));
    check(unlink(path) == 0, "unlink");
    StateArrays arrays = new_arrays(array_elements(&tiny, one));
    StateRanges keeps = ranges_of(&tiny, one, 0, 0);
    expect(load_checkpoint(&device, 0, &state, in_folder("forged"), &arrays, &keeps, slots, why) &&
           strstr(why, "shard_00001.bin") != NULL, "a missing file: '%s'", why);
    free(arrays.master);
    state_ranges_free(&keeps);
    free(slots);
}

static void flip(const char* path, int64_t offset) {
    FILE* f = fopen_or_die(path, "r+b");
    fseek_or_die(f, offset, path);
    int byte = fgetc(f);
    fseek_or_die(f, offset, path);
    fputc(byte ^ 4, f);
    fclose_or_die(f, path);
}

// The newest checkpoint is damaged in any of its files: the one before is loaded.
static void test_falls_back(void) {
    Layout three = {3, 1}, two = {2, 1};
    const char* run = in_folder("fall_back");
    const char* files[] = {"model.bin", "shard_00002.bin", "shard_00000.bin", "shard_00001.bin"};
    char path[SNAPSHOT_PATH];
    for (int i = 0; i < 4; i++) {
        write_checkpoint(run, &odd, three, 10);
        write_checkpoint(run, &odd, three, 20);
        TrainConfig train = settings(run, "1");
        Resume resume;
        resume_find(&resume, &train, 0);
        check(resume_open(&resume) && resume.step == 20, "no checkpoint of step 20");
        snapshot_path(path, sizeof(path), run, 20, files[i]);
        flip(path, (int64_t)file_size_or_die(path) / 2 + 1);
        for (int r = 0; r < 2; r++) {
            if (i == 0 && r > 0) { continue; } // rank 0 alone looks at model.bin
            Comm comm = {r, 2};
            StateArrays arrays = new_arrays(array_elements(&odd, two));
            StateRanges keeps = ranges_of(&odd, two, r, 0);
            Resume again;
            resume_find(&again, &train, 0);
            check(resume_open(&again), "no checkpoint");
            int error_stream = dup(2), quiet = open("/dev/null", O_WRONLY);
            dup2(quiet, 2); // a rank other than 0 warns
            ScaleSlot* slots = load_resumed(&device, &comm, &again, &odd, &arrays, &keeps);
            dup2(error_stream, 2);
            close(error_stream);
            close(quiet);
            expect(again.step == 10 && slots != NULL && slots[0].scale == 1.0f + (float)r, "%s: step %d", files[i],
                   again.step);
            expect_arrays(&odd, two, r, &arrays, 10, files[i]);
            free(slots);
            free(arrays.master);
            state_ranges_free(&keeps);
            resume_free(&again);
        }
        resume_free(&resume);
        char command[300];
        snprintf(command, sizeof(command), "rm -rf %s", run);
        check(system(command) == 0, "rm");
    }
}

// Arrays in the flat order on the host (llm.c's checkpoints) reach every rank's ranges.
static void test_from_host(void) {
    size_t n = gpt_num_parameters(&odd);
    float* values[3];
    for (int which = 0; which < 3; which++) {
        values[which] = (float*)malloc_or_die(n * sizeof(float));
        for (size_t i = 0; i < n; i++) {
            values[which][i] = value_of(which, i, 8);
        }
    }
    for (int l = 0; l < NUM_LAYOUTS; l++) {
        for (int r = 0; r < layouts[l].num_ranks; r++) {
            Comm comm = {r, layouts[l].num_ranks};
            StateArrays arrays = new_arrays(array_elements(&odd, layouts[l]));
            StateRanges keeps = ranges_of(&odd, layouts[l], r, 0);
            ResumeCandidate candidate = {(char*)(uintptr_t)"model_00000008.bin", 1, 8};
            Resume resume;
            memset(&resume, 0, sizeof(resume));
            resume.candidates = &candidate;
            resume.num_candidates = 1;
            resume.gpt = odd;
            resume.step = 8;
            resume.master = values[0];
            resume.m = values[1];
            resume.v = values[2];
            expect(load_resumed(&device, &comm, &resume, &odd, &arrays, &keeps) == NULL, "llm.c has no slots");
            expect_arrays(&odd, layouts[l], r, &arrays, 8, "llm.c's");
            free(arrays.master);
            state_ranges_free(&keeps);
        }
    }
    for (int which = 0; which < 3; which++) {
        free(values[which]);
    }
}

int main(void) {
    snprintf(folder, sizeof(folder), "/tmp/test_save_load_XXXXXX");
    check(mkdtemp(folder) != NULL, "cannot make a temporary folder");
    unit_run(test_ranges_of_shards);
    unit_run(test_shares);
    unit_run(test_all_combinations);
    unit_run(test_empty_ranks);
    unit_run(test_shares_that_do_not_fit);
    unit_run(test_falls_back);
    unit_run(test_from_host);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command) != 0 || unit_report();
}
