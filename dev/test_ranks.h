// Tests of the model on several ranks. Every rank is a process of this program; all run the same tests in one order:
//
//     mpirun -np 3 ./test_gpt_fp8_cpu ranks_      the CPU floor; CI does so on 2 and 3 ranks
//     mpirun -np 4 ./test_gpt_fp8 ranks_          both floors, a GPU per rank
//
// Only rank 0 prints. A test fails when it fails on any rank, whose lines rank 0 then prints, too. Without mpirun the
// tests are skipped. Included by test_gpt_fp8.cu, behind its models and thresholds.
#ifndef TEST_RANKS_H
#define TEST_RANKS_H

// ---------------------------------------------------------------------------------------------------------------------
// the ranks of this test program

typedef struct {
    int rank, num_ranks;
    int local_rank;  // among those of this host: the GPU
    FILE* lines;     // what the tests of this rank print; NULL on rank 0, which prints them itself
    const NamedTest* running;
} Team;

static Team team = {0, 1, 0, NULL, NULL};

static void team_check(int status) {
    check(status == MPI_SUCCESS, "test: MPI, rank %d of %d: error %d", team.rank, team.num_ranks, status);
}

// Join the ranks that mpirun started. Its variables are taken away: sessions are of one rank unless opened by
// open_rank.
static void team_join(int* argc, char*** argv) {
    static const char* const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS",
                                        "PMI_RANK", "PMIX_RANK"};
    if (ranks_launched() == 1) { return; }
    int level;
    MPI_Comm host;
    team_check(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &level));
    team_check(MPI_Comm_rank(MPI_COMM_WORLD, &team.rank));
    team_check(MPI_Comm_size(MPI_COMM_WORLD, &team.num_ranks));
    team_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, team.rank, MPI_INFO_NULL, &host));
    team_check(MPI_Comm_rank(host, &team.local_rank));
    team_check(MPI_Comm_free(&host));
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        unsetenv(names[i]);
    }
    if (team.rank == 0) { return; }
    team.lines = tmpfile();
    check(team.lines != NULL, "test: no temporary file: %s", strerror(errno));
    fflush(stdout);
    dup2(fileno(team.lines), 1);
}

static void team_leave(void) {
    int is_running = 0;
    team_check(MPI_Initialized(&is_running));
    if (is_running) { team_check(MPI_Finalize()); }
}

// The largest of the ranks' values.
static uint64_t team_max(uint64_t value) {
    if (team.num_ranks > 1) {
        team_check(MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD));
    }
    return value;
}

static int team_agrees(uint64_t value) {
    uint64_t most = team_max(value), least = ~team_max(~value);
    return most == least;
}

// The sum over ranks, in rank order on every rank.
static double team_sum(double value) {
    double all[64], sum = 0.0;
    check(team.num_ranks <= 64, "test: %d ranks, want at most 64", team.num_ranks);
    team_check(MPI_Allgather(&value, 1, MPI_DOUBLE, all, 1, MPI_DOUBLE, MPI_COMM_WORLD));
    for (int r = 0; r < team.num_ranks; r++) {
        sum += all[r];
    }
    return sum;
}

// Run the test on this rank, then make its failures those of rank 0.
static void team_body(void) {
    enum { TEXT = 4096 };
    static char text[TEXT], all[64 * TEXT];
    if (team.lines != NULL) {
        rewind(team.lines);
        check(ftruncate(fileno(team.lines), 0) == 0, "test: cannot empty a temporary file");
    }
    team.running->run();
    memset(text, 0, sizeof(text));
    if (team.lines != NULL && unit_state.failures_in_test > 0) {
        fflush(stdout);
        rewind(team.lines);
        text[fread(text, 1, TEXT - 1, team.lines)] = 0;
    }
    team_check(MPI_Gather(text, TEXT, MPI_CHAR, all, TEXT, MPI_CHAR, 0, MPI_COMM_WORLD));
    for (int r = 1; team.rank == 0 && r < team.num_ranks; r++) {
        if (all[r * TEXT] != 0) { printf("    rank %d:\n%s", r, all + r * TEXT); }
    }
    unit_state.failures_in_test = (int)team_max((uint64_t)unit_state.failures_in_test);
}

static void team_run(const NamedTest* test) {
    team.running = test;
    unit_run_named(test->name, team.num_ranks > 1 ? team_body : test->run);
}

// Can the tests on several ranks run on this floor (NULL: the GPU's, and why not)? All ranks get the same answer.
static int team_can_use(const Floor* floor) {
    if (team.num_ranks == 1) {
        unit_skip("one rank: mpirun -np 2 and the name of this program with ranks_ behind it");
        return 0;
    }
    const char* why = floor == NULL ? gpu_missing : NULL;
#ifdef __CUDACC__
    int count = 0;
    if (floor != NULL && floor == gpu && (cudaGetDeviceCount(&count) != cudaSuccess || team.local_rank >= count)) {
        why = "fewer GPUs than ranks";
    }
#endif
    if (team_max(why != NULL) == 0) { return 1; }
    unit_skip(why != NULL ? why : "another rank has no usable GPU");
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// the model: sizes that ranks do not divide, tensors of less than a block per rank and of no elements for the last one

static const SmallModel ranks_model = {
    "--attention builtin --num-layers 3 --channels 48 --num-heads 3 --vocab-size 381 --max-seq-len 29 --batch-size 2 "
    "--seq-len 24",
    {29, 381, 384, 3, 3, 48},
    2,
    24};
enum { RANKS_LAYERS = 3, RANKS_WINDOWS = 3, RANKS_STEPS = 10 };

// How gradients travel.
typedef struct {
    const char* flag;
    GradReduce format;
} RankFormat;

static const RankFormat ranks_fp8 = {"fp8", GRAD_REDUCE_FP8}, ranks_bf16 = {"bf16", GRAD_REDUCE_BF16},
                        ranks_fp32 = {"fp32", GRAD_REDUCE_FP32},
                        ranks_allreduce = {"fp8-allreduce", GRAD_REDUCE_FP8_ALLREDUCE};

// Session of the model on num_ranks ranks, which take steps of `tokens_per_step` tokens, the same ones whatever their
// number: RANKS_WINDOWS steps of data, over and over.
static void* ranks_open(Arena* arena, const Floor* floor, const char* flags_of_run, int num_ranks,
                        int tokens_per_step) {
    const SmallModel* s = &ranks_model;
    int num_tokens = RANKS_WINDOWS * tokens_per_step + 1;
    char flags[768];
    snprintf(flags, sizeof(flags), "%s --weight-decay 0.1 --total-batch-tokens %d %s", s->shape, tokens_per_step,
             flags_of_run);
    return floor->open_rank(flags, random_weights(arena, &s->config, 1),
                            random_ints(arena, (size_t)num_tokens, s->config.vocab_size, 77), num_tokens, num_ranks,
                            team.local_rank);
}

// Tokens of a step in which every rank makes so many micro-steps.
static int ranks_tokens(int micro_steps) {
    return ranks_model.B * ranks_model.T * team.num_ranks * micro_steps;
}

// Elements of a rank's slice of a piece of n: by the definition at the top of shards.h.
static size_t ranks_slice(size_t n) {
    size_t share = (n + (size_t)team.num_ranks - 1) / (size_t)team.num_ranks;
    return (share + 255) / 256 * 256;
}

static int ranks_owner(size_t n, size_t i) {
    return (int)(i / ranks_slice(n));
}

// visit(offset, n, context) for every piece: one tensor of one layer.
static void for_each_piece(void (*visit)(size_t offset, size_t n, void* context), void* context) {
    ParameterTable table = parameter_table(ranks_model.config);
    for (int t = 0; t < NUM_TENSORS; t++) {
        for (int l = 0; l < table.tensor[t].layers; l++) {
            visit(table.tensor[t].offset + (size_t)l * table.tensor[t].n, table.tensor[t].n, context);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// gradients after the exchange against the FP64 sum of what the ranks had before
//
// Every element has its own bound, from the roundings that its format makes; x_r is what rank r has.
//   fp8   the code of x_r is off by at most half the distance of E4M3 codes around it, h8(|x_r| s_r) / s_r, with s_r =
//         448 / amax of its block of 256 on that rank: h8(v) is 2^-10 below 2^-6, else 2^(floor(log2 v) - 4). Products
//         and sums of FP32 add (R + 3) 2^-24 of the sum of magnitudes. --zero-stage 0 rounds the sum once more, to
//         BF16: half the distance of BF16 values around it
//   bf16  half a BF16 distance around each x_r, and around each of R - 1 partial sums, none above the sum of magnitudes
//         (the CPU rounds only the last one, but adds in FP32)
//   fp32  R - 1 additions, off by 2^-24 of a partial sum each
//   fp8-allreduce  as fp8, but s is 448 / amax of the whole piece over all ranks (mu is 1 at the start), and R - 1
//         partial sums are rounded to E4M3, too: h8 of their sum of magnitudes, at most that of 448. Where the sum of
//         magnitudes is above 448, it may saturate: by as much as it is above. All slices are sums, with ZeRO-1, too

typedef struct {
    RankFormat format;
    int zero_stage;
    const float* all;   // (num_ranks, N) before the exchange
    const float* local; // (N) of this rank
    const float* got;   // (N) after it
    size_t N;
    double worst;       // largest share of its bound that an element takes
    double difference, norm; // sums of squares
} RankSums;

static double half_e4m3(double v) {
    return v < 0x1p-6 ? 0x1p-10 : ldexp(1.0, ilogb(v) - 4);
}

static double half_bf16(double x) {
    return 0.5 * bf16_ulp(x);
}

// The bound of element i; amax (num_ranks): of its block on every rank; fp8-allreduce: of its piece on all.
static double ranks_sum_bound(const RankSums* sums, size_t i, double truth, const double* amax) {
    int R = team.num_ranks;
    double magnitude = 0.0, bound = 0.0, codes;
    int is_fp8 = sums->format.format == GRAD_REDUCE_FP8 || sums->format.format == GRAD_REDUCE_FP8_ALLREDUCE;
    for (int r = 0; r < R; r++) {
        double x = fabs((double)sums->all[(size_t)r * sums->N + i]);
        magnitude += x;
        if (is_fp8 && amax[r] > 0.0) {
            bound += half_e4m3(x * 448.0 / amax[r]) * amax[r] / 448.0;
        } else if (sums->format.format == GRAD_REDUCE_BF16) {
            bound += half_bf16(x);
        }
    }
    switch (sums->format.format) {
    case GRAD_REDUCE_FP8:
        bound += (R + 3) * 0x1p-24 * (magnitude + bound);
        return bound + (sums->zero_stage == 0 ? half_bf16(fabs(truth) + bound) : 0.0);
    case GRAD_REDUCE_BF16:
        return bound + (R - 1) * (half_bf16(magnitude + bound) + 0x1p-24 * magnitude);
    case GRAD_REDUCE_FP8_ALLREDUCE:
        if (amax[0] == 0.0) { return 0.0; }
        codes = (magnitude + bound) * 448.0 / amax[0];
        codes = (R - 1) * half_e4m3(fmin(codes, 448.0)) + fmax(codes - 448.0, 0.0);
        return bound + codes * amax[0] / 448.0 + 4 * 0x1p-24 * (magnitude + bound);
    default:
        return (R - 1) * 0x1p-24 * magnitude;
    }
}

static void ranks_check_sums(size_t offset, size_t n, void* context) {
    RankSums* sums = (RankSums*)context;
    int is_allreduce = sums->format.format == GRAD_REDUCE_FP8_ALLREDUCE;
    double amax[64], largest = 0.0;
    for (int r = 0; r < team.num_ranks; r++) {
        largest = fmax(largest, largest_of(sums->all + (size_t)r * sums->N + offset, n));
    }
    for (size_t begin = 0; begin < n; begin += 256) {
        size_t end = begin + 256 < n ? begin + 256 : n;
        for (int r = 0; r < team.num_ranks; r++) {
            const float* block = sums->all + (size_t)r * sums->N + offset + begin;
            amax[r] = is_allreduce ? largest : largest_of(block, end - begin);
        }
        int is_mine = ranks_owner(n, begin) == team.rank;
        for (size_t i = offset + begin; i < offset + end; i++) {
            double truth = 0.0;
            if (!is_mine && sums->zero_stage == 1 && !is_allreduce) { // another rank's business
                expect(float_bits(sums->got[i]) == float_bits(sums->local[i]),
                       "gradient %zu, of another rank's slice, was %a and became %a", i, (double)sums->local[i],
                       (double)sums->got[i]);
                continue;
            }
            for (int r = 0; r < team.num_ranks; r++) {
                truth += (double)sums->all[(size_t)r * sums->N + i];
            }
            double bound = ranks_sum_bound(sums, i, truth, amax), off = fabs((double)sums->got[i] - truth);
            expect(off <= bound, "gradient %zu (%zu of %zu of its tensor) is %.9g, want %.9g +- %.3g", i, i - offset, n,
                   (double)sums->got[i], truth, bound);
            if (bound > 0.0) { sums->worst = fmax(sums->worst, off / bound); }
            sums->difference += off * off;
            sums->norm += truth * truth;
        }
    }
}

// What backward passes do not make: blocks of zeros on some ranks and on all, sums that cancel, 50 orders of magnitude.
static void ranks_craft(float* grads, size_t n) {
    for (size_t i = 0; i < n; i++) {
        size_t block = i / 256;
        uint64_t stream = (uint64_t)(block % 11 == 8 ? 500 : 501 + team.rank);
        double x = 1e-3 * (double)rng_normal(20261121, stream, i);
        x = ldexp(x, (int)((i / 37 + (size_t)team.rank) % 19) - 9);
        if (block % 7 == (size_t)team.rank || block % 11 == 3) { x = i % 2 ? -0.0 : 0.0; }
        if (block % 11 == 5) { x *= 1e-25; }
        if (block % 11 == 6) { x *= 1e25; }
        if (block % 11 == 8 && team.rank % 2) { x = -x; }
        grads[i] = (float)x;
    }
}

// Gradients that are not finite, on the last rank alone and in rank 0's slices: their owner's sums, or with
// --zero-stage 0 and fp8-allreduce everybody's, are not finite either, so that the norm is not. Other pieces keep clear
// of it.
static void ranks_damaged_gradient(const Floor* floor, void* session, float* grads, int everywhere) {
    ParameterTable table = parameter_table(ranks_model.config);
    const TensorName damaged[] = {TENSOR_WPE, TENSOR_LN2B, TENSOR_FCW};
    const float values[] = {NAN, -INFINITY, INFINITY};
    ranks_craft(grads, table.num_parameters);
    for (int i = 0; i < 3 && team.rank == team.num_ranks - 1; i++) {
        grads[table.tensor[damaged[i]].offset + 5] = values[i];
    }
    floor->reduce(session, grads);
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &table.tensor[t];
        int is_damaged = t == damaged[0] || t == damaged[1] || t == damaged[2];
        if (is_damaged && (team.rank == 0 || everywhere)) {
            expect(!isfinite(grads[spec->offset + 5]), "%s: a gradient that is not finite on rank %d became %g",
                   spec->name, team.num_ranks - 1, (double)grads[spec->offset + 5]);
        }
        for (size_t k = is_damaged ? spec->n : 0; k < (size_t)spec->layers * spec->n; k++) {
            expect(isfinite(grads[spec->offset + k]), "%s: gradient %zu became %g", spec->name, k,
                   (double)grads[spec->offset + k]);
        }
    }
}

// Which kind of tensor loses what: Euclidean errors of the sums, relative. all (num_ranks, N), got (N).
static void ranks_print_errors(const float* all, const float* got, size_t N) {
    static const char* const names[] = {"matrices", "wte", "wpe", "layernorm", "biases"};
    enum { KINDS = 5 };
    double differences[KINDS] = {0.0}, norms[KINDS] = {0.0};
    ParameterTable table = parameter_table(ranks_model.config);
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &table.tensor[t];
        int is_layernorm = strncmp(spec->name, "ln", 2) == 0;
        int kind = spec->is_linear ? 0 : t == TENSOR_WTE ? 1 : t == TENSOR_WPE ? 2 : is_layernorm ? 3 : 4;
        for (size_t i = spec->offset; i < spec->offset + (size_t)spec->layers * spec->n; i++) {
            double truth = 0.0;
            for (int r = 0; r < team.num_ranks; r++) {
                truth += (double)all[(size_t)r * N + i];
            }
            differences[kind] += ((double)got[i] - truth) * ((double)got[i] - truth);
            norms[kind] += truth * truth;
        }
    }
    printf("      of a backward pass:");
    for (int kind = 0; kind < KINDS; kind++) {
        printf(" %s %.2g%s", names[kind], sqrt(differences[kind] / norms[kind]), kind + 1 < KINDS ? "," : "\n");
    }
}

static void ranks_gradients_on(const Floor* floor, RankFormat format) {
    if (!team_can_use(floor)) { return; }
    size_t N = parameter_table(ranks_model.config).num_parameters;
    for (int zero_stage = 1; zero_stage >= 0; zero_stage--) {
        Arena arena = {};
        char flags[128];
        snprintf(flags, sizeof(flags), "--precision fp8 --grad-reduce %s --zero-stage %d", format.flag, zero_stage);
        void* session = ranks_open(&arena, floor, flags, team.num_ranks, ranks_tokens(1));
        float *local = arena_floats(&arena, N), *got = arena_floats(&arena, N), *again = arena_floats(&arena, N);
        float* all = arena_floats(&arena, N * (size_t)team.num_ranks);
        for (int crafted = 0; crafted < 2; crafted++) {
            if (crafted) {
                ranks_craft(local, N);
            } else {
                floor->local_grads(session, local);
            }
            team_check(MPI_Allgather(local, (int)N, MPI_FLOAT, all, (int)N, MPI_FLOAT, MPI_COMM_WORLD));
            expect(memcmp(all, all + N, N * sizeof(float)) != 0, "the ranks have the same gradients");
            memcpy(got, local, N * sizeof(float));
            floor->reduce(session, got);
            RankSums sums = {format, zero_stage, all, local, got, N, 0.0, 0.0, 0.0};
            for_each_piece(ranks_check_sums, &sums);
            expect(sums.worst > 0.25, "the bounds are loose: no element takes more than %.2f of its own", sums.worst);
            double off = team_sum(sums.difference), norm = team_sum(sums.norm);
            if (team.rank == 0 && !crafted && zero_stage == 0) { ranks_print_errors(all, got, N); }
            if (team.rank == 0) {
                printf("    %s, --zero-stage %d, %s: up to %.0f%% of the bound; %.2g off all in all\n", format.flag,
                       zero_stage, crafted ? "crafted gradients" : "a backward pass's", 100.0 * sums.worst,
                       sqrt(off / norm));
            }
            if (zero_stage == 0 || format.format == GRAD_REDUCE_FP8_ALLREDUCE) {
                expect(team_agrees(config_fnv1a(0xcbf29ce484222325ull, got, N * sizeof(float))),
                       "the ranks have other sums");
            }
            memcpy(again, local, N * sizeof(float));
            floor->reduce(session, again);
            expect(format.format != GRAD_REDUCE_FP8 || memcmp(got, again, N * sizeof(float)) == 0,
                   "the second time the sums are others");
        }
        ranks_damaged_gradient(floor, session, local, !zero_stage || format.format == GRAD_REDUCE_FP8_ALLREDUCE);
        floor->close(session);
        arena_free(&arena);
    }
}

static void ranks_gradients_fp8_cpu(void) { ranks_gradients_on(cpu_floor, ranks_fp8); }
static void ranks_gradients_bf16_cpu(void) { ranks_gradients_on(cpu_floor, ranks_bf16); }
static void ranks_gradients_fp32_cpu(void) { ranks_gradients_on(cpu_floor, ranks_fp32); }
static void ranks_gradients_fp8_allreduce_cpu(void) { ranks_gradients_on(cpu_floor, ranks_allreduce); }
static void ranks_gradients_fp8_gpu(void) { ranks_gradients_on(gpu, ranks_fp8); }
static void ranks_gradients_bf16_gpu(void) { ranks_gradients_on(gpu, ranks_bf16); }
static void ranks_gradients_fp32_gpu(void) { ranks_gradients_on(gpu, ranks_fp32); }
static void ranks_gradients_fp8_allreduce_gpu(void) { ranks_gradients_on(gpu, ranks_allreduce); }

// ---------------------------------------------------------------------------------------------------------------------
// the norm

typedef struct {
    float* grads; // (N)
    int is_sharded;
    double squares; // of what this rank has to count
} RankSquares;

// Gradients of this rank's slices, and a thousand times larger ones in those of others, which nobody may count.
static void ranks_fill_slices(size_t offset, size_t n, void* context) {
    RankSquares* s = (RankSquares*)context;
    for (size_t i = 0; i < n; i++) {
        int is_mine = !s->is_sharded || ranks_owner(n, i) == team.rank;
        double x = (double)rng_normal(20261121, s->is_sharded ? 601 + (uint64_t)team.rank : 600, offset + i);
        s->grads[offset + i] = (float)(is_mine ? 1e-3 * x : x);
        if (is_mine) { s->squares += (double)s->grads[offset + i] * (double)s->grads[offset + i]; }
    }
}

static void ranks_norm_on(const Floor* floor) {
    if (!team_can_use(floor)) { return; }
    ParameterTable table = parameter_table(ranks_model.config);
    size_t N = table.num_parameters, wte = table.tensor[TENSOR_WTE].n;
    for (int zero_stage = 1; zero_stage >= 0; zero_stage--) {
        Arena arena = {};
        char flags[64];
        snprintf(flags, sizeof(flags), "--precision fp8 --zero-stage %d", zero_stage);
        void* session = ranks_open(&arena, floor, flags, team.num_ranks, ranks_tokens(1));
        RankSquares own = {arena_floats(&arena, N), zero_stage, 0.0};
        for_each_piece(ranks_fill_slices, &own);
        float loss = 1.5f + 0.37f * (float)team.rank;
        double norm = sqrt(zero_stage ? team_sum(own.squares) : own.squares), sum = team_sum((double)loss);
        // 0: sound; 1, 2: the last rank alone has a NaN in its own slice, or in rank 0's, which it does not count;
        // 3: in its loss. Without slices every rank counts all gradients, and they are the same everywhere
        for (int damage = 0; damage < 4; damage++) {
            size_t place = damage == 1 ? (size_t)(team.num_ranks - 1) * ranks_slice(wte) : 5;
            float good = own.grads[place];
            int is_last = team.rank == team.num_ranks - 1;
            if (damage == 1 || damage == 2) { own.grads[place] = is_last || !zero_stage ? NAN : good; }
            HostState state = floor->norm(session, own.grads, damage == 3 && is_last ? NAN : loss);
            own.grads[place] = good;
            int is_sound = damage == 0 || (damage == 2 && zero_stage == 1);
            expect(state.skip == !is_sound, "zero stage %d, damage %d: skip is %d", zero_stage, damage, state.skip);
            expect(team_agrees((uint64_t)float_bits(state.loss) << 32 | float_bits(state.grad_norm)),
                   "zero stage %d, damage %d: the ranks have other norms, this one %a, loss %a", zero_stage, damage,
                   (double)state.grad_norm, (double)state.loss);
            if (!is_sound) {
                expect(!isfinite(state.loss) || !isfinite(state.grad_norm),
                       "zero stage %d, damage %d: norm %g, loss %g", zero_stage, damage, (double)state.grad_norm,
                       (double)state.loss);
                continue;
            }
            // blocks are summed in FP32 at least, then in FP64: (16 + 2 sqrt(N)) 2^-24 of the squares is generous;
            // the loss is rounded once from FP64 with slices, without them R - 1 times
            double off = fabs((double)state.grad_norm / norm - 1.0), allowed = (16.0 + 2.0 * sqrt((double)N)) * 0x1p-24;
            double loss_allowed = (zero_stage ? 1 : team.num_ranks - 1) * 0x1p-24 * sum;
            expect(off <= allowed, "zero stage %d, damage %d: norm %.9g, want %.9g", zero_stage, damage,
                   (double)state.grad_norm, norm);
            expect(fabs((double)state.loss - sum) <= loss_allowed, "zero stage %d: loss %.9g, want %.9g", zero_stage,
                   (double)state.loss, sum);
        }
        floor->close(session);
        arena_free(&arena);
    }
}

static void ranks_norm_cpu(void) { ranks_norm_on(cpu_floor); }
static void ranks_norm_gpu(void) { ranks_norm_on(gpu); }

// ---------------------------------------------------------------------------------------------------------------------
// damage on one rank

// The last rank alone reads a NaN. Nobody's step counts and nobody's weights or moments move; with the damage repaired,
// the next step counts.
//   tensor, i   of the BF16 copy; heals: the rank does not own it, so with ZeRO-1 it gets a good one after the step
static void ranks_nan_case(const Floor* floor, const char* flags, int is_sharded, int tensor, size_t i, int heals) {
    Arena arena = {};
    void* session = ranks_open(&arena, floor, flags, team.num_ranks, ranks_tokens(1));
    HostStep step = {};
    for (int k = 0; k < 2; k++) {
        step = floor->step(session, 1e-3f);
        expect(step.skipped == 0 && isfinite(step.loss), "%s: step %d: skipped %d, loss %g", flags, k, step.skipped,
               (double)step.loss);
    }
    floor->settle(session);
    uint64_t before = floor->state_hash(session), weights = floor->weights_hash(session);
    expect(team_agrees(weights), "%s: the ranks read other weights", flags);
    float good = floor->poke(session, tensor, i, NAN);
    if (team.rank != team.num_ranks - 1) { floor->poke(session, tensor, i, good); }
    HostStep skipped = floor->step(session, 1e-3f);
    expect(skipped.skipped == 1 && !isfinite(skipped.loss), "%s: a NaN on rank %d: skipped %d, loss %g", flags,
           team.num_ranks - 1, skipped.skipped, (double)skipped.loss);
    expect(team_agrees((uint64_t)(unsigned)skipped.slots_warming), "%s: %d slots warming, elsewhere others", flags,
           skipped.slots_warming);
    expect(floor->state_hash(session) == before, "%s: a skipped step moved weights or moments", flags);
    floor->settle(session);
    if (is_sharded && heals) {
        float healed = floor->poke(session, tensor, i, good);
        expect(float_bits(healed) == float_bits(good), "%s: rank %d's copy is %g, its owner has %g", flags, team.rank,
               (double)healed, (double)good);
    }
    floor->poke(session, tensor, i, good);
    expect(floor->weights_hash(session) == weights, "%s: a skipped step changed what the passes read", flags);
    HostStep next = floor->step(session, 1e-3f);
    // these tokens have been trained on before, those of `step` had not
    expect(next.skipped == 0 && isfinite(next.grad_norm) && next.loss < step.loss + 0.05f,
           "%s: after the damage: skipped %d, loss %g, was %g", flags, next.skipped, (double)next.loss,
           (double)step.loss);
    floor->settle(session);
    expect(floor->state_hash(session) != before, "%s: the step after the damage moved nothing", flags);
    expect(team_agrees(floor->weights_hash(session)), "%s: after the damage the ranks read other weights", flags);
    floor->close(session);
    arena_free(&arena);
}

static void ranks_nan_on(const Floor* floor) {
    const RankFormat formats[] = {ranks_fp8, ranks_bf16, ranks_fp32, ranks_allreduce};
    const char* precisions[] = {"fp8", "bf16"};
    if (!team_can_use(floor)) { return; }
    size_t C = (size_t)ranks_model.config.channels, wte = parameter_table(ranks_model.config).tensor[TENSOR_WTE].n;
    size_t last = (size_t)(ranks_model.config.vocab_size - 1) * C + 5; // of a row that every LM head reads
    int owner = ranks_owner(wte, last);
    for (int i = 0; i < 16; i++) {
        int is_sharded = i % 2;
        char flags[128];
        snprintf(flags, sizeof(flags), "--grad-reduce %s --precision %s --zero-stage %d", formats[i / 4].flag,
                 precisions[i / 2 % 2], is_sharded);
        ranks_nan_case(floor, flags, is_sharded, TENSOR_LN1W, C + 5, 1); // rank 0's: less than a block
        if (is_sharded) { ranks_nan_case(floor, flags, 1, TENSOR_WTE, last, owner != team.num_ranks - 1); }
    }
}

static void ranks_nan_on_one_rank_cpu(void) { ranks_nan_on(cpu_floor); }
static void ranks_nan_on_one_rank_gpu(void) { ranks_nan_on(gpu); }

// ---------------------------------------------------------------------------------------------------------------------
// the state's way to rank 0 and back

static void ranks_collect_on(const Floor* floor) {
    const char* formats[] = {"fp8", "bf16", "fp32", "fp8-allreduce"}; // the buffers are of other sizes
    if (!team_can_use(floor)) { return; }
    size_t N = parameter_table(ranks_model.config).num_parameters;
    for (int i = 0; i < 8; i++) {
        Arena arena = {};
        char flags[128];
        snprintf(flags, sizeof(flags), "--precision fp8 --grad-reduce %s --zero-stage %d", formats[i / 2], i % 2);
        void* session = ranks_open(&arena, floor, flags, team.num_ranks, ranks_tokens(1));
        float *sent[3], *got[3];
        for (int k = 0; k < 3; k++) {
            sent[k] = random_floats(&arena, N, 0, 1, 700 + (uint64_t)k);
            got[k] = arena_floats(&arena, N);
        }
        floor->set_state(session, sent[0], sent[1], sent[2]);
        floor->weights(session, got[0], got[1], got[2]);
        for (int k = 0; k < 3 && team.rank == 0; k++) {
            for (size_t e = 0; e < N; e++) {
                expect(float_bits(got[k][e]) == float_bits(sent[k][e]), "%s: element %zu of array %d came back as %g, "
                       "want %g", flags, e, k, (double)got[k][e], (double)sent[k][e]);
            }
        }
        floor->close(session);
        arena_free(&arena);
    }
}

static void ranks_collect_cpu(void) { ranks_collect_on(cpu_floor); }
static void ranks_collect_gpu(void) { ranks_collect_on(gpu); }

// ---------------------------------------------------------------------------------------------------------------------
// several ranks against one
//
// One rank makes the same steps, the ranks' micro-batches one after the other. Micro-batches are the same on both sides
// and scales that warm up are measured on each, so in the first step both compute the same losses and gradients, and
// only their sums differ: by FP32's roundings, and by those of --grad-reduce. From then on roundings that fall on
// another side make two runs of one truth of them, as the GPU and the CPU floor are (above): the same thresholds, with
// the error that the reduction adds to a gradient, travel_error, added in squares.

typedef struct {
    const char* flags;
    Precision precision;
    GradReduce format; // what --grad-reduce is then
} RankVariant;

typedef struct {
    HostStep step[RANKS_STEPS];
    float* params;    // (N) BF16 copies after the first step, at their places; linears' weights: zeros
    float* first;     // (N) master weights after the first step, on rank 0
    float *master, *m, *v; // (N) at the end, on rank 0
} RankTrace;

// The length of the error that the way to the sum adds to a gradient, relative to the gradient's. Of fp8-allreduce: a
// sum that saturates keeps 1/R of itself at least.
static double travel_error(const RankVariant* variant) {
    double R = (double)team.num_ranks;
    return variant->format == GRAD_REDUCE_FP32             ? FP32_LIMIT
           : variant->format == GRAD_REDUCE_BF16           ? format_error(7) * sqrt(R + 1.0)
           : variant->format == GRAD_REDUCE_FP8_ALLREDUCE ? 1.0 - 1.0 / R
                                                           : format_error(3);
}

// What rank 0 has of the BF16 copies: master rounded to nearest even, or to one of its neighbours.
static void expect_copies(const char* what, const char* name, const float* copies, const float* master, size_t n,
                          Precision precision) {
    int to_nearest = strstr(what, "nearest") != NULL;
    for (size_t i = 0; i < n; i++) {
        double off = fabs((double)copies[i] - (double)master[i]);
        int is_neighbour = off < bf16_ulp((double)master[i]) && bf16_round(copies[i]) == copies[i];
        int is_right = precision == PRECISION_FP32 ? off == 0.0
                       : to_nearest                ? copies[i] == bf16_round(master[i])
                                                   : is_neighbour;
        expect(is_right, "%s: element %zu of %s is %.9g, its master weight %.9g", what, i, name, (double)copies[i],
               (double)master[i]);
    }
}

// FP8 weights: the codes of the master weights with the scale that their own amax asks for, in both orders.
static void expect_codes(const char* what, const char* name, const uint8_t* data, const uint8_t* transposed,
                         const ScaleSlot* slot, const float* master, size_t rows, size_t cols) {
    float scale = E4M3_MAX / (float)largest_of(master, rows * cols);
    expect(slot->scale == scale && slot->descale == 1.0f / scale, "%s: %s has scale %g and descale %g, want %g and its "
           "inverse", what, name, (double)slot->scale, (double)slot->descale, (double)scale);
    for (size_t i = 0; i < rows * cols; i++) {
        size_t there = i % cols * rows + i / cols;
        uint8_t want = e4m3_from_float(master[i] * scale);
        expect(data[i] == want && transposed[there] == want,
               "%s: element %zu of %s has code %02x and, transposed, %02x, want %02x", what, i, name, data[i],
               transposed[there], want);
    }
}

// Everything that the passes read: the same on all ranks, and on rank 0 what the collected master weights make of it.
static void expect_weights(const char* what, const Floor* floor, void* session, Precision precision) {
    Arena arena = {};
    const GptConfig* config = &ranks_model.config;
    ParameterTable table = parameter_table(*config);
    size_t N = table.num_parameters;
    float *master = arena_floats(&arena, N), *values = arena_floats(&arena, N);
    uint8_t *data = arena_codes(&arena, N), *transposed = arena_codes(&arena, N);
    floor->settle(session);
    expect(team_agrees(floor->weights_hash(session)), "%s: the ranks read other weights", what);
    floor->weights(session, master, NULL, NULL);
    int num_slots = floor->slots(session, NULL);
    ScaleSlot* slots = (ScaleSlot*)arena_bytes(&arena, (size_t)num_slots * sizeof(ScaleSlot));
    floor->slots(session, slots);
    for (int t = 0; t < NUM_TENSORS && team.rank == 0; t++) {
        const TensorSpec* spec = &table.tensor[t];
        if (spec->is_linear) { continue; }
        floor->param(session, t, values);
        expect_copies(what, spec->name, values, master + spec->offset, (size_t)spec->layers * spec->n, precision);
    }
    const TensorName linears[] = {TENSOR_QKVW, TENSOR_PROJW, TENSOR_FCW, TENSOR_FCPROJW};
    int blocks = RANKS_LAYERS + has_fp8_head(what);
    for (int i = 0; i < 4 * blocks && team.rank == 0; i++) {
        int l = i / 4, k = i % 4, is_head = l == RANKS_LAYERS;
        if (is_head && k > 0) { continue; }
        const TensorSpec* spec = &table.tensor[is_head ? TENSOR_WTE : linears[k]];
        const float* weights = master + spec->offset + (is_head ? 0 : (size_t)l * spec->n);
        char name[64];
        snprintf(name, sizeof(name), "%s of layer %d", spec->name, l);
        if (floor->weight(session, l, k, data, transposed, values)) {
            expect_codes(what, name, data, transposed, &slots[i * 3 + 1], weights, spec->rows, spec->cols);
        } else {
            expect_copies(what, name, values, weights, spec->n, precision);
        }
    }
    arena_free(&arena);
}

// Ten steps of num_ranks ranks: all, or this one alone.
static RankTrace ranks_trace(Arena* arena, const Floor* floor, const RankVariant* variant, int num_ranks,
                             int tokens_per_step, int zero_stage) {
    ParameterTable table = parameter_table(ranks_model.config);
    size_t N = table.num_parameters;
    RankTrace t = {};
    char flags[256];
    snprintf(flags, sizeof(flags), "%s --zero-stage %d", variant->flags, zero_stage);
    t.params = arena_floats(arena, N), t.first = arena_floats(arena, N);
    t.master = arena_floats(arena, N), t.m = arena_floats(arena, N), t.v = arena_floats(arena, N);
    void* session = ranks_open(arena, floor, flags, num_ranks, tokens_per_step);
    for (int k = 0; k < RANKS_STEPS; k++) {
        t.step[k] = floor->step(session, 1e-3f);
        if (num_ranks > 1) {
            expect(team_agrees((uint64_t)float_bits(t.step[k].loss) << 32 | float_bits(t.step[k].grad_norm)),
                   "%s: step %d: the ranks report other losses and norms, this one %g, %g", flags, k,
                   (double)t.step[k].loss, (double)t.step[k].grad_norm);
            if (k == 0 || k == RANKS_STEPS - 1) { expect_weights(flags, floor, session, variant->precision); }
        }
        if (k == 0) { floor->weights(session, t.first, NULL, NULL); } // which waits for all weights
        for (int i = 0; i < NUM_TENSORS && k == 0; i++) {
            if (!table.tensor[i].is_linear) { floor->param(session, i, t.params + table.tensor[i].offset); }
        }
    }
    floor->weights(session, t.master, t.m, t.v);
    floor->close(session);
    return t;
}

// Key biases have no gradient (softmax does not see what is added to all scores of a row): only noise, which Adam makes
// moves of. They are taken out of comparisons.
static void without_key_biases(float* values) {
    const TensorSpec spec = parameter_table(ranks_model.config).tensor[TENSOR_QKVB];
    for (int l = 0; l < spec.layers; l++) {
        memset(values + spec.offset + (size_t)l * spec.n + spec.n / 3, 0, spec.n / 3 * sizeof(float));
    }
}

// Losses and norms of R ranks against one's, on rank 0.
static void expect_near_one_rank(const char* what, const RankTrace* got, const RankTrace* want,
                                 const RankVariant* variant, int tokens) {
    ErrorModel e = error_model(RANKS_LAYERS, variant->precision, has_fp8_head(variant->flags));
    int is_fp32 = variant->precision == PRECISION_FP32;
    double travel = travel_error(variant);
    double g = sqrt(2.0 * pow(fmax(e.bottom, e.layer[0]), 2) + travel * travel), z = sqrt(2.0) * e.logits * 1.5;
    for (int k = 0; k < RANKS_STEPS; k++) {
        const HostStep *a = &got->step[k], *b = &want->step[k];
        double drop = fabs((double)want->step[0].loss - (double)b->loss);
        double moved = fabs((double)b->grad_norm / (double)want->step[0].grad_norm - 1.0);
        double loss = 3.0 * z / sqrt(tokens) + 0.5 * z * z + g * drop;
        double norm = 3.0 * g / sqrt(tokens) + 0.5 * g * g + g * moved;
        if (k == 0) { loss = 32.0 * 0x1p-24 * (double)b->loss, norm = travel; } // sums of a few micro-steps
        if (is_fp32) { loss = FP32_LIMIT * (double)b->loss, norm = FP32_LIMIT; }
        double off = fabs((double)a->loss - (double)b->loss);
        expect(off <= loss, "%s: step %d: loss %.7f, one rank has %.7f +- %.3g", what, k, (double)a->loss,
               (double)b->loss, loss);
        off = fabs((double)a->grad_norm / (double)b->grad_norm - 1.0);
        expect(off <= norm, "%s: step %d: norm %.7f, one rank has %.7f, %.3g off, want %.3g", what, k,
               (double)a->grad_norm, (double)b->grad_norm, off, norm);
        expect(a->skipped == 0 && b->skipped == 0 && a->slots_warming == b->slots_warming,
               "%s: step %d: skipped %d, %d slots warming; one rank %d, %d", what, k, a->skipped, a->slots_warming,
               b->skipped, b->slots_warming);
    }
    expect(want->step[RANKS_STEPS - 1].loss < want->step[0].loss - 0.2f, "%s: one rank's loss goes from %g to %g only",
           what, (double)want->step[0].loss, (double)want->step[RANKS_STEPS - 1].loss);
}

// Weights of R ranks against one's, on rank 0. Returns the share of the first limit that is used.
//   after the first step, whose gradients differ by their way to the sum alone: Adam moves a weight by lr in the
//   direction of its gradient; a gradient that is off by e has the wrong direction in a share e / pi of its elements,
//   by twice the move (see expect_near_weights); fp8 makes at most 1% of them zero
//   the BF16 copies then, when FP32's roundings are all the difference: another copy only where those cross what its
//   random number asks for, one in 2^16 / 32
//   after all steps: as two runs of one truth
static double expect_weights_near_one_rank(Arena* arena, const char* what, RankTrace* got, RankTrace* want,
                                           const RankVariant* variant) {
    size_t N = parameter_table(ranks_model.config).num_parameters, differing = 0;
    float* start = random_weights(arena, &ranks_model.config, 1);
    float* all[] = {got->params, want->params, got->first, want->first, got->master, want->master, start};
    double off = 0.0, moved = 0.0, e = travel_error(variant);
    for (int i = 0; i < 7; i++) {
        without_key_biases(all[i]);
    }
    for (size_t i = 0; i < N; i++) {
        differing += float_bits(got->params[i]) != float_bits(want->params[i]);
        off += pow((double)got->first[i] - (double)want->first[i], 2);
        moved += pow((double)want->first[i] - (double)start[i], 2);
    }
    double allowed = sqrt(4.0 * e / 3.14159265 + (variant->format == GRAD_REDUCE_FP8 ? 0.01 : 0.0));
    double share = sqrt(off / moved) / allowed;
    expect(share <= 1.0, "%s: after one step the weights are %.3g of their movement off, want %.3g", what,
           share * allowed, allowed);
    expect(variant->format != GRAD_REDUCE_FP32 || variant->precision == PRECISION_FP32 ||
               (double)differing <= (double)N / 2048.0,
           "%s: after one step %zu of %zu BF16 copies are others than one rank's", what, differing, N);
    Trace a = {}, b = {};
    a.master = got->master, b.master = want->master;
    expect_near_weights(what, &a, &b, start, &ranks_model, variant->precision, sqrt(2.0));
    return share;
}

static void ranks_steps_on(const Floor* floor, const RankVariant* variants, int num_variants) {
    if (!team_can_use(floor)) { return; }
    for (int i = 0; i < 2 * num_variants; i++) {
        const RankVariant* variant = &variants[i / 2];
        int accum = 1 + i % 2, tokens = ranks_tokens(accum);
        Arena arena = {};
        RankTrace one = {};
        if (team.rank == 0) { one = ranks_trace(&arena, floor, variant, 1, tokens, 1); }
        team_check(MPI_Barrier(MPI_COMM_WORLD));
        for (int zero_stage = 1; zero_stage >= 0; zero_stage--) {
            char what[192];
            snprintf(what, sizeof(what), "%s, zero stage %d, %d micro-steps", variant->flags, zero_stage, accum);
            RankTrace t = ranks_trace(&arena, floor, variant, team.num_ranks, tokens, zero_stage);
            if (team.rank != 0) { continue; }
            expect_near_one_rank(what, &t, &one, variant, tokens);
            double weights = expect_weights_near_one_rank(&arena, what, &t, &one, variant);
            if (accum == 1) {
                printf("    %s: losses after %d steps %.6f, one rank %.6f; weights after the first step %.0f%% of "
                       "the allowed error\n", what,
                       (int)RANKS_STEPS, (double)t.step[RANKS_STEPS - 1].loss, (double)one.step[RANKS_STEPS - 1].loss,
                       100.0 * weights);
            }
        }
        arena_free(&arena);
    }
}

static const RankVariant ranks_steps_fp32[] = {{"--precision fp32", PRECISION_FP32, GRAD_REDUCE_FP32}};
static const RankVariant ranks_steps_bf16[] = {
    {"--precision bf16 --param-rounding nearest", PRECISION_BF16, GRAD_REDUCE_BF16},
    {"--precision bf16 --grad-reduce fp32", PRECISION_BF16, GRAD_REDUCE_FP32}};
static const RankVariant ranks_steps_fp8[] = {
    {"--precision fp8", PRECISION_FP8, GRAD_REDUCE_FP8},
    {"--precision fp8 --fp8-lm-head 1", PRECISION_FP8, GRAD_REDUCE_FP8},
    {"--precision fp8 --grad-reduce fp8-allreduce", PRECISION_FP8, GRAD_REDUCE_FP8_ALLREDUCE},
    {"--precision fp8 --bf16-layers 1,0 --grad-reduce fp32", PRECISION_FP8, GRAD_REDUCE_FP32}};

static void ranks_steps_fp32_cpu(void) { ranks_steps_on(cpu_floor, ranks_steps_fp32, 1); }
static void ranks_steps_bf16_cpu(void) { ranks_steps_on(cpu_floor, ranks_steps_bf16, 2); }
static void ranks_steps_fp8_cpu(void) { ranks_steps_on(cpu_floor, ranks_steps_fp8, 4); }
static void ranks_steps_bf16_gpu(void) { ranks_steps_on(gpu, ranks_steps_bf16, 2); }
static void ranks_steps_fp8_gpu(void) { ranks_steps_on(gpu, ranks_steps_fp8, 4); }

// ---------------------------------------------------------------------------------------------------------------------

static const NamedTest rank_tests[] = {
    {"ranks_gradients_fp8_cpu", ranks_gradients_fp8_cpu},
    {"ranks_gradients_bf16_cpu", ranks_gradients_bf16_cpu},
    {"ranks_gradients_fp32_cpu", ranks_gradients_fp32_cpu},
    {"ranks_gradients_fp8_allreduce_cpu", ranks_gradients_fp8_allreduce_cpu},
    {"ranks_norm_cpu", ranks_norm_cpu},
    {"ranks_nan_on_one_rank_cpu", ranks_nan_on_one_rank_cpu},
    {"ranks_collect_cpu", ranks_collect_cpu},
    {"ranks_steps_fp32_cpu", ranks_steps_fp32_cpu},
    {"ranks_steps_bf16_cpu", ranks_steps_bf16_cpu},
    {"ranks_steps_fp8_cpu", ranks_steps_fp8_cpu},
    {"ranks_gradients_fp8_gpu", ranks_gradients_fp8_gpu},
    {"ranks_gradients_bf16_gpu", ranks_gradients_bf16_gpu},
    {"ranks_gradients_fp32_gpu", ranks_gradients_fp32_gpu},
    {"ranks_gradients_fp8_allreduce_gpu", ranks_gradients_fp8_allreduce_gpu},
    {"ranks_norm_gpu", ranks_norm_gpu},
    {"ranks_nan_on_one_rank_gpu", ranks_nan_on_one_rank_gpu},
    {"ranks_collect_gpu", ranks_collect_gpu},
    {"ranks_steps_bf16_gpu", ranks_steps_bf16_gpu},
    {"ranks_steps_fp8_gpu", ranks_steps_fp8_gpu},
};
enum { NUM_RANK_TESTS = sizeof(rank_tests) / sizeof(rank_tests[0]) };

#endif
