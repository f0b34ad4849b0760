// The parameter table against llm.c's file layout, the memory plan, and the token index.
#include "../../lib/memory.h"
#include "../../lib/tensors.h"
#include "../../lib/token_index.h"
#include "unit.h"

static GptConfig shape(int maxT, int V, int L, int NH, int C) {
    GptConfig g;
    memset(&g, 0, sizeof(g));
    g.max_seq_len = maxT;
    g.vocab_size = V;
    g.padded_vocab_size = (V + 127) / 128 * 128;
    g.num_layers = L;
    g.num_heads = NH;
    g.channels = C;
    return g;
}

// llm.c's formula: Vp*C + maxT*C + L*(12*C*C + 13*C) + 2*C; 124,475,904 is what it prints for GPT-2 124M.
static void test_number_of_parameters(void) {
    ParameterTable gpt2 = parameter_table(shape(1024, 50257, 12, 12, 768));
    expect(gpt2.num_parameters == 124475904, "124M: %zu", gpt2.num_parameters);
    GptConfig shapes[] = {shape(64, 300, 2, 2, 128), shape(1024, 50257, 48, 25, 1600), shape(17, 1, 1, 1, 16)};
    for (int i = 0; i < 3; i++) {
        size_t Vp = (size_t)shapes[i].padded_vocab_size, maxT = (size_t)shapes[i].max_seq_len;
        size_t L = (size_t)shapes[i].num_layers, C = (size_t)shapes[i].channels;
        size_t want = Vp * C + maxT * C + L * (12 * C * C + 13 * C) + 2 * C;
        size_t got = parameter_table(shapes[i]).num_parameters;
        expect(got == want, "shape %d: %zu, want %zu", i, got, want);
    }
}

// The tensors follow each other without gaps, in llm.c's order.
static void test_order_and_offsets(void) {
    const char* names[NUM_TENSORS] = {"wte",  "wpe",  "ln1w", "ln1b", "qkvw",    "qkvb",    "attprojw", "attprojb",
                                      "ln2w", "ln2b", "fcw",  "fcb",  "fcprojw", "fcprojb", "lnfw",     "lnfb"};
    ParameterTable table = parameter_table(shape(64, 300, 3, 2, 96));
    size_t offset = 0;
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &table.tensor[t];
        expect(strcmp(spec->name, names[t]) == 0, "tensor %d is %s, want %s", t, spec->name, names[t]);
        expect(spec->offset == offset, "%s starts at %zu, want %zu", spec->name, spec->offset, offset);
        expect(spec->n == spec->rows * spec->cols, "%s: n = %zu", spec->name, spec->n);
        offset += (size_t)spec->layers * spec->n;
    }
    expect(offset == table.num_parameters, "%zu parameters, want %zu", table.num_parameters, offset);
}

// Decay on matrices only; exactly the four linears of a block are linears; who starts as what (GPT-2 paper, llm.c).
static void test_properties(void) {
    ParameterTable table = parameter_table(shape(64, 300, 3, 2, 96));
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &table.tensor[t];
        int is_matrix = spec->rows > 1;
        int per_layer = t != TENSOR_WTE && t != TENSOR_WPE && t != TENSOR_LNFW && t != TENSOR_LNFB;
        int is_linear = t == TENSOR_QKVW || t == TENSOR_PROJW || t == TENSOR_FCW || t == TENSOR_FCPROJW;
        size_t length = strlen(spec->name);
        int is_layernorm_weight = strncmp(spec->name, "ln", 2) == 0 && spec->name[length - 1] == 'w';
        TensorInit init = t == TENSOR_PROJW || t == TENSOR_FCPROJW ? INIT_NORMAL_RESIDUAL
                          : is_matrix                              ? INIT_NORMAL
                          : is_layernorm_weight                    ? INIT_ONE
                                                                   : INIT_ZERO;
        expect(spec->decay == is_matrix, "%s: decay %d", spec->name, spec->decay);
        expect(spec->layers == (per_layer ? 3 : 1), "%s: layers %d", spec->name, spec->layers);
        expect(spec->is_linear == is_linear, "%s: is_linear %d", spec->name, spec->is_linear);
        expect(spec->init == init, "%s: init %d, want %d", spec->name, (int)spec->init, (int)init);
    }
    const TensorSpec* fcproj = &table.tensor[TENSOR_FCPROJW];
    const TensorSpec* qkv = &table.tensor[TENSOR_QKVW];
    expect(fcproj->rows == 96 && fcproj->cols == 384, "fcprojw is (C, 4C): (%zu, %zu)", fcproj->rows, fcproj->cols);
    expect(qkv->rows == 288 && qkv->cols == 96, "qkvw is (3C, C): (%zu, %zu)", qkv->rows, qkv->cols);
    expect(table.tensor[TENSOR_WTE].rows == 384, "wte has Vp rows: %zu", table.tensor[TENSOR_WTE].rows);
}

// Buffers are 256-byte aligned, in order, do not overlap, and end where the plan says; many of them, so the list grows.
static void test_memory_plan(void) {
    enum { N = 1000 };
    static float* address[N];
    static size_t bytes[N];
    MemoryPlan plan;
    memset(&plan, 0, sizeof(plan));
    for (int i = 0; i < N; i++) {
        bytes[i] = (size_t)(i % 9 == 0 ? 0 : 1 + (i * 7919) % 5000);
        plan_add(&plan, (MemoryCategory)(i % NUM_MEMORY_CATEGORIES), &address[i], bytes[i]);
    }
    size_t total = plan_bytes(&plan), sum = 0;
    for (int c = 0; c < NUM_MEMORY_CATEGORIES; c++) {
        sum += plan.category_bytes[c];
    }
    expect(total == sum, "sum of categories %zu, total %zu", sum, total);
    char* block = (char*)aligned_alloc(256, total);
    plan_place(&plan, block);
    char* end = block;
    for (int i = 0; i < N; i++) {
        char* start = (char*)address[i];
        expect((start - block) % 256 == 0, "buffer %d is at byte %zd", i, (ssize_t)(start - block));
        expect(start >= end && start - end < 256, "buffer %d overlaps or wastes: %zd after the end", i,
               (ssize_t)(start - end));
        memset(start, i & 0xFF, bytes[i]); // AddressSanitizer sees the end of the block
        end = start + bytes[i];
    }
    expect(end <= block + total && block + total - end < 256, "the plan ends at its last buffer");
    free(block);
    plan_free(&plan);
    expect(plan_bytes(&plan) == 0 && plan.num_items == 0, "a freed plan is empty");
}

// Every row appears once, in the group of its token; tokens ascend, rows ascend inside a group.
static void check_index(TokenCounter* counter, const int* tokens, int n) {
    int* rows = (int*)malloc_or_die((size_t)n * sizeof(int));
    int* bucket_token = (int*)malloc_or_die((size_t)n * sizeof(int));
    int* bucket_start = (int*)malloc_or_die(((size_t)n + 1) * sizeof(int));
    int num_buckets = token_index_build(counter, rows, bucket_token, bucket_start, tokens, n);
    int covered = 0;
    for (int b = 0; b < num_buckets; b++) {
        expect(b == 0 || bucket_token[b] > bucket_token[b - 1], "bucket %d: tokens ascend", b);
        expect(bucket_start[b] == covered && bucket_start[b + 1] > covered, "bucket %d is empty or leaves a gap", b);
        for (int i = bucket_start[b]; i < bucket_start[b + 1]; i++) {
            expect(tokens[rows[i]] == bucket_token[b], "row %d has token %d, not %d", rows[i], tokens[rows[i]],
                   bucket_token[b]);
            expect(i == bucket_start[b] || rows[i] > rows[i - 1], "rows ascend inside a bucket");
        }
        covered = bucket_start[b + 1];
    }
    expect(covered == n && bucket_start[num_buckets] == n, "%d of %d rows covered", covered, n);
    free(rows);
    free(bucket_token);
    free(bucket_start);
}

// Write `text` to the file FOLDER/NAME, with the folders that it needs.
static void write_text(const char* folder, const char* name, const char* text) {
    char path[512];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    for (char* slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE* f = fopen_or_die(path, "w");
    fwrite_or_die(text, strlen(text), f, path);
    fclose_or_die(f, path);
}

static void test_host_memory(void) {
    char root[] = "/tmp/test_memory_XXXXXX", command[64];
    check(mkdtemp(root) != NULL, "cannot make a temporary folder");
    expect(host_memory_available_in(root) == (size_t)4 << 30, "nothing is known: %zu", host_memory_available_in(root));
    write_text(root, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n");
    expect(host_memory_available_in(root) == 8192000, "available: %zu", host_memory_available_in(root));
    // a job of a batch system, version 2: its own group has no limit, the one above it has; of its use 700 is cache
    write_text(root, "proc/self/cgroup", "0::/slurm/job_7/step_0\n");
    write_text(root, "sys/fs/cgroup/slurm/job_7/step_0/memory.max", "max\n");
    write_text(root, "sys/fs/cgroup/slurm/job_7/step_0/memory.current", "3000\n");
    write_text(root, "sys/fs/cgroup/slurm/job_7/memory.max", "5000\n");
    write_text(root, "sys/fs/cgroup/slurm/job_7/memory.current", "4000\n");
    write_text(root, "sys/fs/cgroup/slurm/job_7/memory.stat", "anon 1\ninactive_file 700\n");
    expect(host_memory_available_in(root) == 1700, "version 2, below the root: %zu", host_memory_available_in(root));
    write_text(root, "sys/fs/cgroup/slurm/job_7/memory.current", "6000\n");
    expect(host_memory_available_in(root) == 0, "used beyond the limit: %zu", host_memory_available_in(root));
    // a container: its group is the root of what it sees, whatever its path says
    write_text(root, "sys/fs/cgroup/memory.max", "900\n");
    write_text(root, "sys/fs/cgroup/memory.current", "100\n");
    write_text(root, "proc/self/cgroup", "0::/\n");
    expect(host_memory_available_in(root) == 800, "version 2, the root: %zu", host_memory_available_in(root));
    // version 1
    write_text(root, "proc/self/cgroup", "5:cpu:/\n4:memory:/docker/abc\n0::/none\n");
    write_text(root, "sys/fs/cgroup/memory.max", "max\n");
    write_text(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "6000\n");
    write_text(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "5500\n");
    write_text(root, "sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 30\n");
    expect(host_memory_available_in(root) == 530, "version 1: %zu", host_memory_available_in(root));
    write_text(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    expect(host_memory_available_in(root) == 8192000, "version 1, no limit: %zu", host_memory_available_in(root));
    snprintf(command, sizeof(command), "rm -r %s", root);
    check(system(command) == 0, "cannot remove '%s'", root);
}

static void test_token_index(void) {
    enum { V = 50257, N = 4096 };
    static int tokens[N];
    TokenCounter counter = token_counter_create(V);
    uint32_t x = 1;
    for (int spread = 1; spread <= V; spread = spread * 7 + 1) { // from one token to nearly all distinct
        for (int i = 0; i < N; i++) {
            x = x * 1664525u + 1013904223u;
            tokens[i] = (int)((x >> 8) % (uint32_t)spread);
        }
        check_index(&counter, tokens, N);
    }
    tokens[0] = V - 1; // the last id, and one row
    check_index(&counter, tokens, 1);
    for (int i = 0; i < N; i++) {
        tokens[i] = V - 1 - i;
    }
    check_index(&counter, tokens, N);
    token_counter_free(&counter);
}

int main(void) {
    unit_run(test_number_of_parameters);
    unit_run(test_order_and_offsets);
    unit_run(test_properties);
    unit_run(test_memory_plan);
    unit_run(test_host_memory);
    unit_run(test_token_index);
    return unit_report();
}
