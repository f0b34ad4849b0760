// Genuine llm.c's checkpoints in and out: with them its run goes on here, and ours goes on there.
//
//     FOLDER/model_%08d.bin          the weights (checkpoint.h), BF16
//     FOLDER/state_%08d_%05d.bin     of one process (step, rank), little-endian, no padding:
//         256 x int32 header         0: 20240527   1: version 1   2: processes   3: rank   4: has master weights
//                                    5: the training data is shuffled   10: step, updates done
//                                    20, 21: uint64 generator of rounding seeds   22, 23: before the last update
//                                    30, 31: uint64 shard   32, 33: uint64 windows taken from it   the others: 0
//         FP32 m, v[, master]        whole in the order of the parameter table, or under ZeRO-1 (-z 1), when every
//                                    tensor of every layer splits evenly, rank r's r-th part of each
//         if shuffled                uint64 S, int32 order of the S shards; uint64 n, int32 order of the n windows of
//                                    the open shard; MT19937: uint64 seed (never set), int32 left, uint32 next,
//                                    624 x uint32 words, uint32 0, uint32 0x9908B0DF
//     FOLDER/DONE_%08d               empty; says that the others of this step are complete
//
// Format and rules from karpathy/llm.c f1e2ace: train_gpt2.cu (save_state, load_state, gpt2_update), llmc/dataloader.h,
// llmc/rand.h, llmc/zero.cuh. Where llm.c has master weights it does not read the model file's: it rounds its BF16
// weights from the masters again, at random, each to one of the master's two neighbours.
//
// Nothing here ends the process on a bad file or a full disk. The format has no checksum. What is checked: every size,
// every header word, that v and the masters are possible values, and each BF16 weight against its master, so files that
// do not belong together are refused. A flipped low bit of a number cannot be seen.
#ifndef LLMC_STATE_H
#define LLMC_STATE_H

#include "check.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>

#include "checkpoint.h"
#include "dataloader.h"

enum { LLMC_STATE_MAGIC = 20240527, LLMC_STATE_VERSION = 1, LLMC_STATE_HEADER_BYTES = 1024, LLMC_MT_BYTES = 2520 };
enum { LLMC_MAX_PROCESSES = 99999, LLMC_MAX_STEP = 999999999 }; // what fits into the names
enum { LLMC_RNG_START = 13371337 };                             // of rank 0 of a fresh run of llm.c

typedef struct {
    int step;          // updates done
    int num_processes; // of the writer
    int has_master;    // FP32 master weights in the file (else they are made from the model file's weights)
    int should_shuffle;
    uint64_t rng_state, rng_state_last_update; // of rank 0
    uint64_t shard_index, sample_index; // rank 0's training loader: place in its order of shards, windows taken there
    int64_t samples_per_shard;          // n: windows of that shard; -1: not shuffling, the file does not say
    int num_shards;                     // S; -1: not shuffling
    uint64_t order_hash;                // of rank 0's orders and generator (llmc_shuffle_hash); 0: not shuffling
} LlmcState;

// ---------------------------------------------------------------------------------------------------------------------
// names

// FOLDER/model_%08d.bin
static inline void llmc_model_path(char* out, size_t size, const char* folder, int step) {
    snprintf(out, size, "%s/model_%08d.bin", folder, step);
}

// The steps of the complete checkpoints in `folder` (DONE_%08d), ascending, so the last one is the newest: malloc'ed
// into *steps. Returns how many; 0 and NULL when there are none or no folder.
static inline int llmc_steps(const char* folder, int** steps) {
    *steps = NULL;
    DIR* dir = opendir(folder);
    if (dir == NULL) { return 0; }
    int count = 0, room = 0;
    for (struct dirent* entry; (entry = readdir(dir)) != NULL;) {
        char name[32];
        int step;
        if (sscanf(entry->d_name, "DONE_%9d", &step) != 1 || step < 0) { continue; }
        snprintf(name, sizeof(name), "DONE_%08d", step);
        if (strcmp(name, entry->d_name) != 0) { // DONE_00000500.bak
            continue;
        }
        if (count == room) {
            room = 2 * room + 16;
            int* grown = (int*)malloc_or_die((size_t)room * sizeof(int));
            if (count > 0) { memcpy(grown, *steps, (size_t)count * sizeof(int)); }
            free(*steps);
            *steps = grown;
        }
        (*steps)[count++] = step;
    }
    closedir(dir);
    if (count > 0) { qsort(*steps, (size_t)count, sizeof(int), compare_ints); }
    return count;
}

// The step in a model file's name, FOLDER/[prefix]model_%08d.bin, and where in the path "model_" begins. -1: no such
// name.
static inline int llmc_step_of_path(const char* model_path, size_t* begin) {
    const char* name = strrchr(model_path, '/');
    name = name == NULL ? model_path : name + 1;
    for (const char* found; (found = strstr(name, "model_")) != NULL; name = found + 1) {
        size_t digits = strspn(found + 6, "0123456789");
        if (digits >= 8 && digits <= 9 && strcmp(found + 6 + digits, ".bin") == 0) {
            *begin = (size_t)(found - model_path);
            return atoi(found + 6);
        }
    }
    return -1;
}

// [prefix]state_%08d_%05d.bin beside the model file; malloc'ed.
static inline char* llmc_state_path(const char* model_path, size_t begin, int step, int rank) {
    size_t size = begin + 48;
    char* path = (char*)malloc_or_die(size);
    memcpy(path, model_path, begin);
    snprintf(path + begin, size - begin, "state_%08d_%05d.bin", step, rank);
    return path;
}

// ---------------------------------------------------------------------------------------------------------------------
// the data order

// A loader on paper: the same shards dealt to `num_ranks` ranks, seen by `rank`; no file is open. With another number
// of ranks windows are longer or shorter, so the shards' lengths are asked again. 0, or errno with the reason in `why`.
// Freed by llmc_paper_free.
static inline int llmc_paper_loader(DataLoader* paper, const DataLoader* loader, int rank, int num_ranks, char* why) {
    *paper = *loader;
    paper->options.rank = rank;
    paper->options.num_ranks = num_ranks;
    paper->file = NULL;
    size_t S = (size_t)loader->num_shards;
    paper->shard_order = (int*)malloc_or_die(S * sizeof(int));
    paper->windows = (int*)malloc_or_die(S * sizeof(int));
    paper->window_order = NULL;
    int64_t window_tokens = dataloader_window_tokens(&paper->options);
    int most = 0, error = 0;
    for (size_t i = 0; i < S && error == 0; i++) {
        paper->windows[i] = loader->windows[i];
        if (num_ranks != loader->options.num_ranks) {
            struct stat st;
            if (stat(loader->paths[i], &st) != 0) {
                error = errno_or_eio();
                refuse(why, "cannot open '%s': %s", loader->paths[i], strerror(error));
                break;
            }
            int64_t tokens = ((int64_t)st.st_size - TOKEN_FILE_HEADER_BYTES) / 2;
            paper->windows[i] = (int)((tokens - 1) / window_tokens);
            if (paper->windows[i] < 1) {
                error = EINVAL;
                refuse(why,
                                  "'%s' is too short for %d processes: %lld tokens, want at least processes * B * "
                                  "T + 1 = %lld",
                                  loader->paths[i], num_ranks, (long long)tokens, (long long)window_tokens + 1);
            }
        }
        most = paper->windows[i] > most ? paper->windows[i] : most;
    }
    paper->window_order = (int*)malloc_or_die((size_t)most * sizeof(int));
    return error;
}

static inline void llmc_paper_free(DataLoader* paper) {
    free(paper->shard_order);
    free(paper->windows);
    free(paper->window_order);
}

// Play a paper loader from its start until `batches` batches are taken, or to the place `until` (whose shard must
// exist; a window that does not becomes the shard's end) when it is not NULL. Orders, generator and place are then
// those of a loader that has served so many: at the end of a shard it still stands there and has drawn nothing for the
// next one, as llm.c's does. Returns the batches taken.
static inline uint64_t llmc_play(DataLoader* paper, uint64_t batches, const DataPosition* until) {
    DataPosition* at = &paper->at;
    mt_seed(&paper->mt, paper->options.seed + (uint32_t)paper->options.rank);
    for (int i = 0; i < paper->num_shards; i++) {
        paper->shard_order[i] = i;
    }
    memset(at, 0, sizeof(*at));
    dataloader_begin_epoch(paper);
    dataloader_begin_shard(paper, 0);
    for (uint64_t taken = 0;;) {
        uint64_t windows = (uint64_t)paper->windows[paper->shard_order[at->shard]];
        uint64_t here = batches - taken;
        int arrived = here <= windows;
        if (until != NULL) {
            arrived = until->epoch == at->epoch && until->shard == at->shard;
            here = until->window < windows ? until->window : windows;
        }
        if (arrived) {
            at->window = here;
            return taken + here;
        }
        taken += windows;
        if (++at->shard == (uint64_t)paper->num_shards) {
            at->shard = 0;
            at->epoch++;
            dataloader_begin_epoch(paper);
        }
        dataloader_begin_shard(paper, 0);
    }
}

// The shuffle section of a state file for a loader that was played to its place; malloc'ed, *size bytes. llm.c counts
// the generator's words from its last refill: `next` were taken and `left` = 625 - next; a generator that was only
// seeded has left 1 and next 0. The seed's eight bytes hold nothing in llm.c; here they are 0.
static inline unsigned char* llmc_shuffle_section(const DataLoader* played, size_t* size) {
    uint64_t S = (uint64_t)played->num_shards;
    uint64_t n = (uint64_t)played->windows[played->shard_order[played->at.shard]];
    *size = 8 + 4 * S + 8 + 4 * n + LLMC_MT_BYTES;
    unsigned char* section = (unsigned char*)calloc_or_die(*size, 1);
    unsigned char* p = section;
    memcpy(p, &S, 8);
    memcpy(p + 8, played->shard_order, 4 * S);
    p += 8 + 4 * S;
    memcpy(p, &n, 8);
    memcpy(p + 8, played->window_order, 4 * n);
    p += 8 + 4 * n + 8; // and the seed
    Mt19937 fresh;
    mt_seed(&fresh, played->options.seed + (uint32_t)played->options.rank);
    int is_fresh = memcmp(&fresh, &played->mt, sizeof(fresh)) == 0; // one shard of one window: nothing was drawn
    uint32_t next = is_fresh ? 0 : (uint32_t)played->mt.next;
    int32_t left = is_fresh ? 1 : 1 + MT_SIZE - (int32_t)next;
    uint32_t matrix[2] = {0, 0x9908B0DFu};
    memcpy(p, &left, 4);
    memcpy(p + 4, &next, 4);
    memcpy(p + 8, played->mt.state, 4 * MT_SIZE);
    memcpy(p + 8 + 4 * MT_SIZE, matrix, 8);
    return section;
}

// FNV-1a (Fowler, Noll, Vo) over a shuffle section without the seed.
static inline uint64_t llmc_shuffle_hash(const unsigned char* section, size_t size) {
    uint64_t hash = 0xcbf29ce484222325ull;
    size_t seed = size - LLMC_MT_BYTES;
    for (size_t i = 0; i < size; i++) {
        hash = i >= seed && i < seed + 8 ? hash : (hash ^ section[i]) * 0x100000001b3ull;
    }
    return hash;
}

// Where `loader` (ours: same files, B, T and ranks as llm.c's) stands after `batches_done` micro-batches per rank: *at,
// ready for dataloader_seek. Returns 1 when that is exactly where llm.c's loader stood: same shard, same window, and
// when it shuffles the same orders and generator, so that the batches go on as llm.c's would have. Else 0: other files
// or B * T, another seed, number of ranks or way of counting steps; then the data goes on in our order.
static inline int llmc_data_position(const LlmcState* state, const DataLoader* loader, int64_t batches_done,
                                     DataPosition* at) {
    char why[WHY_BYTES];
    uint64_t batches = batches_done < 0 ? 0 : (uint64_t)batches_done;
    int num_ranks = loader->options.num_ranks, agrees = batches_done >= 0;
    for (int pass = 0; pass < 2; pass++) { // rank 0, which `state` is about, then ourselves; as many ranks: no error
        DataLoader paper;
        llmc_paper_loader(&paper, loader, pass == 0 ? 0 : loader->options.rank, num_ranks, why);
        llmc_play(&paper, batches, NULL);
        *at = paper.at;
        if (pass == 0) {
            int shuffles = loader->options.order == DATA_SHUFFLED;
            agrees = agrees && state->num_processes == num_ranks && state->should_shuffle == shuffles &&
                     state->shard_index == at->shard && state->sample_index == at->window;
            if (agrees && shuffles) {
                size_t size;
                unsigned char* section = llmc_shuffle_section(&paper, &size);
                agrees = state->order_hash == llmc_shuffle_hash(section, size);
                free(section);
            }
        }
        llmc_paper_free(&paper);
    }
    return agrees;
}

// ---------------------------------------------------------------------------------------------------------------------
// reading

// One state file, its header read and its size understood.
typedef struct {
    FILE* f;
    int64_t size;
    LlmcState state; // of this file's rank
    int shards;      // 1: the arrays are whole; num_processes: a share
} LlmcFile;

// Do `shards`-th shares of the arrays, and the shuffle section if there is one, fill the file to its end? With
// *section: where the shuffle section begins.
static inline int llmc_layout_fits(const LlmcFile* file, size_t num_parameters, int shards, int64_t* section) {
    int64_t arrays = 2 + file->state.has_master;
    int64_t at = LLMC_STATE_HEADER_BYTES + 4 * arrays * (int64_t)(num_parameters / (size_t)shards);
    *section = at;
    if (!file->state.should_shuffle) { return file->size == at; }
    for (int list = 0; list < 2; list++) { // S and its list, n and its list
        uint64_t count;
        if (file->size - at < 8 || fseeko(file->f, (off_t)at, SEEK_SET) != 0 || fread(&count, 8, 1, file->f) != 1 ||
            count < 1 || count > INT_MAX || (int64_t)count > (file->size - at - 8) / 4) {
            return 0;
        }
        at += 8 + 4 * (int64_t)count;
    }
    return file->size - at == LLMC_MT_BYTES;
}

// Is `order` (n), somewhere in memory, a permutation of 0..n-1?
static inline int llmc_is_permutation(const unsigned char* order, uint64_t n) {
    unsigned char* seen = (unsigned char*)calloc(n, 1);
    int good = seen != NULL;
    for (uint64_t i = 0; i < n && good; i++) {
        uint32_t x;
        memcpy(&x, order + 4 * i, 4);
        good = x < n && !seen[x];
        if (good) { seen[x] = 1; }
    }
    free(seen);
    return good;
}

// Read and check the shuffle section, which begins at `begin` and is known to fill the file. 0, or 1 with why.
static inline int llmc_read_shuffle(LlmcFile* file, int64_t begin, const char* path, char* why) {
    size_t size = (size_t)(file->size - begin);
    unsigned char* section = (unsigned char*)malloc(size);
    if (section == NULL || fseeko(file->f, (off_t)begin, SEEK_SET) != 0 || fread(section, size, 1, file->f) != 1) {
        free(section);
        return refuse(why, "'%s': cannot read the %zu bytes of its data order", path, size);
    }
    uint64_t S, n;
    memcpy(&S, section, 8);
    memcpy(&n, section + 8 + 4 * S, 8);
    const unsigned char* mt = section + size - LLMC_MT_BYTES;
    int32_t left;
    uint32_t next, matrix[2];
    memcpy(&left, mt + 8, 4);
    memcpy(&next, mt + 12, 4);
    memcpy(matrix, mt + 16 + 4 * MT_SIZE, 8);
    int fresh = left == 1 && next == 0;
    LlmcState* state = &file->state;
    int failed = 0;
    if (!llmc_is_permutation(section + 8, S)) {
        failed = refuse(why, "'%s' is damaged: its order of %llu shards does not hold each of them once",
                                   path, (unsigned long long)S);
    } else if (!llmc_is_permutation(section + 16 + 4 * S, n)) {
        failed = refuse(why, "'%s' is damaged: its order of %llu windows does not hold each of them once",
                                   path, (unsigned long long)n);
    } else if (matrix[0] != 0 || matrix[1] != 0x9908B0DFu ||
               (!fresh && (next < 1 || next > MT_SIZE || left != 1 + MT_SIZE - (int32_t)next))) {
        failed = refuse(why, "'%s' is damaged: its MT19937 has left %d, next %u, matrix %08x %08x", path,
                                   left, next, matrix[0], matrix[1]);
    } else if (state->shard_index >= S || state->sample_index > n) {
        failed =
            refuse(why,
                              "'%s' is damaged: %llu windows taken from shard %llu, there are %llu shards, and "
                              "this one has %llu windows",
                              path, (unsigned long long)state->sample_index, (unsigned long long)state->shard_index,
                              (unsigned long long)S, (unsigned long long)n);
    }
    state->num_shards = (int)S;
    state->samples_per_shard = (int64_t)n;
    state->order_hash = llmc_shuffle_hash(section, size);
    free(section);
    return failed;
}

// Understand the open state file `path` of `rank`: header, layout, shuffle section. 0, or 1 with why.
static inline int llmc_check_state(LlmcFile* file, const char* path, int step, int rank, const GptConfig* gpt,
                                   char* why) {
    if (file->size < LLMC_STATE_HEADER_BYTES) {
        return refuse(why, "'%s' is no llm.c state file: %lld bytes, want a header of %d", path,
                                 (long long)file->size, LLMC_STATE_HEADER_BYTES);
    }
    int32_t header[256];
    if (fread(header, sizeof(header), 1, file->f) != 1) {
        return refuse(why, "'%s' is truncated or unreadable: no header", path);
    }
    if (header[0] != LLMC_STATE_MAGIC) {
        return refuse(why, "'%s' is no llm.c state file: first word %d, want %d", path, header[0],
                                 LLMC_STATE_MAGIC);
    }
    if (header[1] != LLMC_STATE_VERSION) {
        return refuse(why, "'%s' is a state file of version %d, want %d", path, header[1],
                                 LLMC_STATE_VERSION);
    }
    if (header[2] < 1 || header[2] > LLMC_MAX_PROCESSES || header[3] != rank) {
        return refuse(why, "'%s' is the state of rank %d of %d, want rank %d", path, header[3], header[2],
                                 rank);
    }
    if ((header[4] & ~1) != 0 || (header[5] & ~1) != 0) {
        return refuse(why, "'%s' is damaged: use_master_weights %d, should_shuffle %d, want 0 or 1", path,
                                 header[4], header[5]);
    }
    if (header[10] != step) {
        return refuse(why, "'%s' says step %d, want %d as in its name", path, header[10], step);
    }
    for (int i = 6; i < 256; i++) {
        if (header[i] != 0 && i != 10 && (i < 20 || i > 23) && (i < 30 || i > 33)) {
            return refuse(why, "'%s' is damaged: word %d of its header is %d, want 0", path, i, header[i]);
        }
    }
    LlmcState* state = &file->state;
    memset(state, 0, sizeof(*state));
    state->step = step;
    state->num_processes = header[2];
    state->has_master = header[4];
    state->should_shuffle = header[5];
    memcpy(&state->rng_state, header + 20, 8);
    memcpy(&state->rng_state_last_update, header + 22, 8);
    memcpy(&state->shard_index, header + 30, 8);
    memcpy(&state->sample_index, header + 32, 8);
    state->samples_per_shard = state->num_shards = -1;
    size_t n = gpt_num_parameters(gpt);
    int64_t section;
    int splits = gpt->channels % state->num_processes == 0; // C divides every tensor of a layer
    if (llmc_layout_fits(file, n, 1, &section)) {
        file->shards = 1;
    } else if (splits && llmc_layout_fits(file, n, state->num_processes, &section)) {
        file->shards = state->num_processes;
    } else {
        int64_t whole = 4 * (2 + (int64_t)state->has_master) * (int64_t)n;
        return refuse(why,
                                 "'%s' is damaged or of another model: %lld bytes hold neither the %lld bytes of m, "
                                 "v%s of %zu parameters nor a share of them for %d processes, with header %s",
                                 path, (long long)file->size, (long long)whole, state->has_master ? ", master" : "", n,
                                 state->num_processes, state->should_shuffle ? "and data order" : "alone");
    }
    return state->should_shuffle ? llmc_read_shuffle(file, section, path, why) : 0;
}

// Name the parameter at element `i` of the flat arrays, e.g. "qkvw, layer 1, element 77".
static inline void llmc_name_parameter(char* out, size_t size, const ParameterTable* table, size_t i) {
    int t = NUM_TENSORS - 1;
    while (table->tensor[t].offset > i) {
        t--;
    }
    size_t k = i - table->tensor[t].offset;
    snprintf(out, size, "%s, layer %zu, element %zu", table->tensor[t].name, k / table->tensor[t].n,
             k % table->tensor[t].n);
}

// Are all values of a flat array possible: finite, and not negative where `is_v`? 0, or 1 with why.
static inline int llmc_check_values(const float* x, const char* what, int is_v, const ParameterTable* table,
                                    const char* path, char* why) {
    for (size_t i = 0; i < table->num_parameters; i++) {
        if (isfinite(x[i]) && (!is_v || x[i] >= 0.0f)) { continue; }
        char place[96];
        llmc_name_parameter(place, sizeof(place), table, i);
        return refuse(why, "'%s' is damaged: %s of %s is %g, want a finite number%s", path, what, place,
                                 (double)x[i], is_v ? ", not negative" : "");
    }
    return 0;
}

// Read this rank's arrays from an open, checked state file into their places in m, v and master (num_parameters each).
static inline int llmc_read_arrays(LlmcFile* file, int rank, const ParameterTable* table, float** arrays,
                                   const char* path, char* why) {
    int failed = fseeko(file->f, LLMC_STATE_HEADER_BYTES, SEEK_SET) != 0;
    for (int a = 0; a < 2 + file->state.has_master; a++) {
        for (int t = 0; t < NUM_TENSORS && !failed; t++) {
            size_t n = table->tensor[t].n, share = n / (size_t)file->shards;
            size_t offset = table->tensor[t].offset + (file->shards > 1 ? (size_t)rank * share : 0);
            for (int l = 0; l < table->tensor[t].layers && !failed; l++) {
                failed = fread(arrays[a] + offset + (size_t)l * n, sizeof(float), share, file->f) != share;
            }
        }
    }
    return failed ? refuse(why, "'%s' is truncated or unreadable", path) : 0;
}

// Compare the weights of the open model file `f`, which stands at the first of them, with the masters: BF16 ones are
// one of their master's two neighbours, FP32 ones equal. Not one of llm.c's files breaks that, so a single one that
// does is refused: a damaged master looks like this, too. Without masters in the state file they are made from these
// weights.
static inline int llmc_join_weights(FILE* f, int version, int has_master, float* master, const ParameterTable* table,
                                    const char* path, char* why) {
    size_t N = table->num_parameters;
    if (!has_master) {
        if (checkpoint_read_parameters(f, version, master, N) != 0) {
            return refuse(why, "'%s' is truncated or unreadable", path);
        }
        return llmc_check_values(master, "the weight", 0, table, path, why);
    }
    const size_t CHUNK = 1 << 15;
    float* weights = (float*)malloc_or_die(CHUNK * sizeof(float));
    size_t differ = 0, first = 0;
    for (size_t done = 0; done < N; done += CHUNK) {
        size_t count = N - done < CHUNK ? N - done : CHUNK;
        if (checkpoint_read_parameters(f, version, weights, count) != 0) {
            free(weights);
            return refuse(why, "'%s' is truncated or unreadable", path);
        }
        for (size_t i = 0; i < count; i++) {
            uint32_t weight = float_bits(weights[i]), exact = float_bits(master[done + i]);
            int fits = weight == exact;
            if (version == MODEL_FILE_BF16) {
                uint32_t toward_zero = exact & 0xFFFF0000u;
                fits = weight == toward_zero || (exact != toward_zero && weight == toward_zero + 0x10000u);
            }
            if (!fits && differ++ == 0) { first = done + i; }
        }
    }
    free(weights);
    if (differ == 0) { return 0; }
    char place[96];
    llmc_name_parameter(place, sizeof(place), table, first);
    return refuse(why,
                             "'%s' and the state beside it do not belong together, or one is damaged: %zu of %zu "
                             "weights are no rounding of their master, the first: %s (master %g)",
                             path, differ, N, place, (double)master[first]);
}

// Read the checkpoint whose model file is `model_path` ("FOLDER/[prefix]model_%08d.bin"; its states lie beside it as
// [prefix]state_%08d_%05d.bin, one per process): the shape, what the header of rank 0 says, and the flat FP32 arrays
// master, m and v (num_parameters each, in the order of the parameter table, malloc'ed, freed by the caller). ZeRO-1
// shares are joined; of whole states rank 0's is taken, the others must be there and agree in header and size.
// 0, or 1 with one line in `why` (WHY_BYTES): no state, a damaged file, files that do not belong together, no memory;
// nothing is allocated then.
static inline int llmc_read(const char* model_path, GptConfig* gpt, LlmcState* state, float** master, float** m,
                            float** v, char* why) {
    size_t begin = 0;
    int step = llmc_step_of_path(model_path, &begin), version = 0;
    if (step < 0) {
        return refuse(why,
                                 "'%s' is not named like a checkpoint of llm.c (model_%%08d.bin), so the state that "
                                 "belongs to it is not known",
                                 model_path);
    }
    FILE* model = checkpoint_open_model(model_path, gpt, &version, why);
    if (model == NULL) { return 1; }
    ParameterTable table = parameter_table(*gpt);
    size_t bytes = table.num_parameters * sizeof(float); // bounded by the length of the model file
    float* arrays[3] = {NULL, NULL, NULL};               // m, v, master
    LlmcFile first;
    memset(&first, 0, sizeof(first));
    int failed = 0;
    for (int rank = 0; !failed && (rank == 0 || rank < first.state.num_processes); rank++) {
        char* path = llmc_state_path(model_path, begin, step, rank);
        LlmcFile file;
        memset(&file, 0, sizeof(file));
        file.f = checkpoint_open(path, &file.size, why);
        failed = file.f == NULL || llmc_check_state(&file, path, step, rank, gpt, why) != 0;
        if (!failed && rank == 0) {
            first = file;
            for (int a = 0; a < 3 && !failed; a++) {
                arrays[a] = (float*)malloc(bytes);
                failed = arrays[a] == NULL &&
                         refuse(why, "out of host memory: '%s' wants 3 x %zu bytes", model_path, bytes);
            }
        }
        if (!failed && (file.state.num_processes != first.state.num_processes || file.shards != first.shards ||
                        file.state.has_master != first.state.has_master)) {
            failed = refuse(why, "'%s' is of another run than that of rank 0: %d processes, %s, %s", path,
                                       file.state.num_processes, file.shards > 1 ? "a share" : "whole",
                                       file.state.has_master ? "with masters" : "without masters");
        }
        if (!failed && (rank == 0 || file.shards > 1)) {
            failed = llmc_read_arrays(&file, rank, &table, arrays, path, why);
        }
        if (file.f != NULL) { fclose(file.f); }
        free(path);
    }
    failed = failed || llmc_check_values(arrays[0], "m", 0, &table, model_path, why) ||
             llmc_check_values(arrays[1], "v", 1, &table, model_path, why) ||
             (first.state.has_master && llmc_check_values(arrays[2], "the master", 0, &table, model_path, why)) ||
             llmc_join_weights(model, version, first.state.has_master, arrays[2], &table, model_path, why);
    fclose(model);
    if (failed) {
        for (int a = 0; a < 3; a++) {
            free(arrays[a]);
        }
        return 1;
    }
    *state = first.state;
    *m = arrays[0];
    *v = arrays[1];
    *master = arrays[2];
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// writing

// llm.c's generator of rounding seeds, one draw: xorshift64* (Marsaglia 2003, Vigna 2014), of which only the state
// matters here.
static inline uint64_t llmc_rng_step(uint64_t x) {
    x ^= x >> 12;
    x ^= x << 25;
    return x ^ x >> 27;
}

// Write one rank's header, arrays (its share of m, v and master) and shuffle section to the open `f`. 0, or errno.
static inline int llmc_write_payload(FILE* f, const int32_t* header, const ParameterTable* table,
                                     const float* const* arrays, int rank, int num_processes,
                                     const unsigned char* section, size_t section_bytes) {
    errno = 0;
    if (fwrite(header, LLMC_STATE_HEADER_BYTES, 1, f) != 1) { return errno_or_eio(); }
    for (int a = 0; a < 3; a++) {
        for (int t = 0; t < NUM_TENSORS; t++) {
            size_t n = table->tensor[t].n, share = n / (size_t)num_processes;
            for (int l = 0; l < table->tensor[t].layers; l++) {
                const float* x = arrays[a] + table->tensor[t].offset + (size_t)l * n + (size_t)rank * share;
                if (fwrite(x, sizeof(float), share, f) != share) { return errno_or_eio(); }
            }
        }
    }
    return section_bytes > 0 && fwrite(section, section_bytes, 1, f) != 1 ? errno_or_eio() : 0;
}

// Write rank's state file into `folder`. `batches`: taken per rank from `loader`'s data when it is dealt to
// num_processes ranks; loader NULL: no shuffling, from the start. *llmc_refuses becomes 1 when llm.c's load_state will
// end at its check of the open shard's windows: it compares them with those of the shard that a fresh loader opens. 0,
// or errno with why.
static inline int llmc_write_state(const char* folder, const ParameterTable* table, const float* const* arrays,
                                   int step, int rank, int num_processes, const DataLoader* loader, uint64_t batches,
                                   uint64_t rng, int* llmc_refuses, char* why) {
    int32_t header[256] = {LLMC_STATE_MAGIC, LLMC_STATE_VERSION, num_processes, rank, 1};
    header[10] = step;
    rng += (uint64_t)rank; // as far apart as llm.c's ranks begin
    memcpy(header + 22, &rng, 8);
    for (int t = 0; t < NUM_TENSORS; t++) { // an update draws one seed per tensor
        rng = llmc_rng_step(rng);
    }
    memcpy(header + 20, &rng, 8);
    unsigned char* section = NULL;
    size_t section_bytes = 0;
    int error = 0;
    if (loader != NULL) {
        DataLoader paper;
        error = llmc_paper_loader(&paper, loader, rank, num_processes, why);
        if (error == 0) {
            llmc_play(&paper, 0, NULL);
            int first_windows = paper.windows[paper.shard_order[0]];
            llmc_play(&paper, batches, NULL);
            memcpy(header + 30, &paper.at.shard, 8);
            memcpy(header + 32, &paper.at.window, 8);
            if (loader->options.order == DATA_SHUFFLED) {
                header[5] = 1;
                *llmc_refuses |= paper.windows[paper.shard_order[paper.at.shard]] != first_windows;
                section = llmc_shuffle_section(&paper, &section_bytes);
            }
        }
        llmc_paper_free(&paper);
    }
    size_t size = strlen(folder) + 48;
    char* path = (char*)malloc_or_die(size);
    snprintf(path, size, "%s/state_%08d_%05d.bin", folder, step, rank);
    char* temporary;
    FILE* f = error == 0 ? checkpoint_begin(path, &temporary, &error, why) : NULL;
    if (f != NULL) {
        error = llmc_write_payload(f, header, table, arrays, rank, num_processes, section, section_bytes);
        error = checkpoint_finish(f, temporary, path, error, why);
    }
    free(path);
    free(section);
    return error;
}

// Bring the names in `folder` to the disk. Some network file systems cannot and say EINVAL. 0, or errno with why.
static inline int llmc_sync_folder(const char* folder, char* why) {
    int error = sync_folder(folder);
    if (error != 0) { refuse(why, "cannot sync the folder '%s': %s", folder, strerror(error)); }
    return error;
}

// How many batches per rank lie before `at`, the place of the next batch of `loader`, counted in batches of the same
// data dealt to num_processes ranks (rounded down when that is another number). 0, or errno with why.
static inline int llmc_batches_before(const DataLoader* loader, const DataPosition* at, int num_processes,
                                      uint64_t* batches, char* why) {
    DataLoader paper;
    const DataOptions* o = &loader->options;
    int error = llmc_paper_loader(&paper, loader, o->rank, o->num_ranks, why);
    if (error == 0 && at->epoch < 1u << 30 && at->shard < (uint64_t)loader->num_shards) {
        uint64_t taken = llmc_play(&paper, 0, at);
        *batches = taken * (uint64_t)o->num_ranks / (uint64_t)num_processes;
        error = paper.at.window == at->window ? 0 : EINVAL;
    } else {
        error = EINVAL;
    }
    if (error != 0) {
        refuse(why, "data position (epoch %llu, shard %llu, window %llu) does not fit the %d shards of '%s'",
                          (unsigned long long)at->epoch, (unsigned long long)at->shard, (unsigned long long)at->window,
                          loader->num_shards, loader->paths[0]);
    }
    llmc_paper_free(&paper);
    return error;
}

// Write a checkpoint that llm.c continues with -y 1 -o FOLDER, and the same -b, -t and data: FOLDER/model_%08d.bin
// (BF16, nearest even of master), state_%08d_%05d.bin of num_processes ranks (1: whole; more: ZeRO-1 shares, for -z 1),
// then DONE_%08d. FOLDER is made if it is missing. Each file is written aside, synced and renamed; a DONE of the same
// step is removed first, and the new one comes last.
//   master, m, v   (num_parameters) flat, FP32
//   loader, at     our loader, of any rank, and the place of its next batch. Dealt to as many ranks as num_processes,
//                  llm.c goes on with that very batch; to another number, in an order of its own from where as many
//                  tokens were seen. NULL: llm.c reads the data unshuffled from its start.
//   rng_state_last_update  llm.c's generator before its last update (LlmcState has it), from which it rounds the
//                  masters again; 0: where a fresh run of llm.c begins. Rank r gets this plus r.
// 0, or errno with one line in `why` (WHY_BYTES) that names the file; EINVAL when the shape does not divide (llm.c stops
// on that, too). llm.c has a fault of its own: with shards of unequal length it can only continue inside a shard that
// has as many windows as the first one of its first epoch. Then the files are written, 0 comes back, and `why` says so;
// else `why` is empty after success.
static inline int llmc_write(const char* folder, const GptConfig* gpt, int step, const float* master, const float* m,
                             const float* v, int num_processes, const DataLoader* loader, const DataPosition* at,
                             uint64_t rng_state_last_update, char* why) {
    why[0] = 0;
    if (gpt_refuse(gpt, folder, why, WHY_BYTES) != 0) { return EINVAL; }
    if (step < 0 || step > LLMC_MAX_STEP || num_processes < 1 || num_processes > LLMC_MAX_PROCESSES ||
        gpt->channels % num_processes != 0) {
        refuse(why,
                          "'%s': step %d for %d processes, want a step from 0 to %d and a number of processes that "
                          "divides the %d channels",
                          folder, step, num_processes, LLMC_MAX_STEP, gpt->channels);
        return EINVAL;
    }
    uint64_t batches = 0;
    if (loader != NULL) {
        int error = llmc_batches_before(loader, at, num_processes, &batches, why);
        if (error != 0) { return error; }
    }
    if (mkdir(folder, 0777) != 0 && errno != EEXIST) {
        int error = errno_or_eio();
        refuse(why, "cannot make the folder '%s': %s", folder, strerror(error));
        return error;
    }
    size_t size = strlen(folder) + 48;
    char* path = (char*)malloc_or_die(size);
    snprintf(path, size, "%s/DONE_%08d", folder, step);
    int error = remove(path) != 0 && errno != ENOENT ? errno_or_eio() : 0;
    if (error != 0) {
        refuse(why, "cannot remove '%s': %s", path, strerror(error));
    } else {
        llmc_model_path(path, size, folder, step);
        error = checkpoint_try_write_model(path, gpt, master, MODEL_FILE_BF16, why);
    }
    ParameterTable table = parameter_table(*gpt);
    const float* arrays[3] = {m, v, master};
    uint64_t rng = rng_state_last_update != 0 ? rng_state_last_update : (uint64_t)LLMC_RNG_START;
    int llmc_refuses = 0;
    for (int rank = 0; rank < num_processes && error == 0; rank++) {
        error = llmc_write_state(folder, &table, arrays, step, rank, num_processes, loader, batches, rng, &llmc_refuses,
                                 why);
    }
    error = error != 0 ? error : llmc_sync_folder(folder, why);
    if (error == 0) {
        snprintf(path, size, "%s/DONE_%08d", folder, step);
        FILE* done = fopen(path, "wb"); // not by a temporary name: llm.c takes every DONE_... for the mark
        error = done == NULL || fclose(done) != 0 ? errno_or_eio() : 0;
        if (error != 0) { refuse(why, "cannot write '%s': %s", path, strerror(error)); }
        error = error != 0 ? error : llmc_sync_folder(folder, why);
    }
    free(path);
    if (error == 0 && llmc_refuses) {
        refuse(why,
                          "'%s': llm.c will not continue step %d: the shards differ in length, and it only can inside "
                          "one that has as many windows as the first of its first epoch",
                          folder, step);
    }
    return error;
}

#endif
