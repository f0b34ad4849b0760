// The linear layers on cuBLASLt, in FP8 and BF16: y = x w^T + bias, dx = dy w, dw += dy^T x.
//
// cuBLASLt counts columns first, so a row-major (rows, cols) is its (cols x rows). Every product is D = A B with
//
//   role      D (m x n)       k      A                                  B
//   forward   y  (OC x rows)  C      w  (C x OC)^T                      x  (C x rows)
//   dgrad     dx (C x rows)   OC     w  (C x OC), FP8: (OC x C)^T       dy (OC x rows)
//   wgrad     dw (C x OC)     rows   x  (C x rows), FP8: (rows x C)^T   dy (OC x rows)^T, FP8: (rows x OC)
//
// FP8 on Hopper exists as A^T B only (TN: both operands with k contiguous), which is why E4m3Tensor and E5m2Tensor have
// a transposed form. A is always E4M3; B is E4M3 forward and E5M2 backward.
//
// Numerics: FP32 accumulation, one rounding to BF16 at the store (forward, dgrad), FP32 from wgrad. In FP8 the roles
// of matmul_set_fast_accum (forward) use the tensor cores' fast accumulation; the others add into full FP32 registers
// every few steps of k.
// Split-k algorithms are allowed only with FP32 partial sums in the workspace, added in fixed order: the same bits on
// every run.
//
// The plan of a shape (descriptors, layouts, algorithm) is made at its first product and kept. The algorithm is
// cuBLASLt's first suggestion, or with matmul_set_autotune the fastest of its suggestions, remembered in a file: a run
// that is continued, on a chip and library of the same name, then multiplies by the same algorithms and gives the same
// bits.
#ifndef MATMUL_CUH
#define MATMUL_CUH

#include "gpu.cuh"
#include "matmul_cache.h"

#define MATMUL_WORKSPACE_BYTES ((size_t)32 << 20) // what NVIDIA recommends for Hopper
#define MATMUL_CANDIDATES 8                       // suggestions asked of cuBLASLt for one shape
#define MATMUL_ALIGNMENT 16                       // bytes; what the tensor copy engine needs

typedef enum { MATMUL_FORWARD = 0, MATMUL_DGRAD = 1, MATMUL_WGRAD = 2 } MatmulRole;

typedef struct {
    MatmulRole role;
    int fp8;  // operands in FP8, else BF16
    int bias; // forward only: a BF16 bias is added before the rounding
    int rows, C, OC;
    int fast; // FP8 only: fast accumulation
} MatmulKey;

// One product: what to multiply and where to put it.
typedef struct {
    MatmulKey key;
    void* d;
    const void* a;
    const void* b;
    const float* a_descale; // device memory; NULL in BF16
    const float* b_descale;
    const bf16* bias;
    float beta; // D = A B + beta D
} MatmulCall;

// How to do the products of one key.
typedef struct {
    MatmulKey key;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    size_t workspace_bytes; // of algo
} MatmulShapePlan;

// All of a Device's plans; gpu.cuh holds it as a pointer it knows nothing about.
typedef struct {
    MatmulShapePlan* shapes; // (num_shapes)
    int num_shapes;
    int toggled_roles;   // FAST_ACCUM_* bits in which matmul_set_fast_accum differs from a new Device
    int autotune;        // 0: the first suggestion
    char* autotune_path; // NULL: what is timed is not remembered
    MatmulCache cache;   // what the file at autotune_path says
} MatmulPlans;

static_assert(sizeof(cublasLtMatmulAlgo_t) == MATMUL_ALGO_WORDS * sizeof(uint64_t), "the cache keeps whole algorithms");

// ---------------------------------------------------------------------------------------------------------------------
// plans

static inline MatmulPlans* matmul_plans(Device* dev) {
    if (dev->matmul_plans == NULL) {
        dev->matmul_plans = (decltype(dev->matmul_plans))calloc_or_die(1, sizeof(MatmulPlans));
    }
    return (MatmulPlans*)dev->matmul_plans;
}

static inline const char* matmul_role_name(MatmulKey key) {
    static const char* const names[2][3] = {{"forward bf16", "dgrad bf16", "wgrad bf16"},
                                            {"forward e4m3", "dgrad e5m2", "wgrad e5m2"}};
    return names[key.fp8 != 0][key.role];
}

static inline void matmul_set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                              const void* value, size_t bytes) {
    cublas_check(cublasLtMatmulDescSetAttribute(operation, attribute, value, bytes));
}

// A column-major matrix (rows x cols) without gaps. `transposed` says which way it is stored, as op() will read it.
static inline cublasLtMatrixLayout_t matmul_layout(cudaDataType_t type, int rows, int cols, cublasOperation_t op) {
    cublasLtMatrixLayout_t layout;
    uint64_t stored_rows = (uint64_t)(op == CUBLAS_OP_N ? rows : cols);
    uint64_t stored_cols = (uint64_t)(op == CUBLAS_OP_N ? cols : rows);
    cublas_check(cublasLtMatrixLayoutCreate(&layout, type, stored_rows, stored_cols, (int64_t)stored_rows));
    return layout;
}

// Operation and layouts of a key; see the table at the top.
static inline void matmul_describe(MatmulShapePlan* plan) {
    MatmulKey key = plan->key;
    int m = key.role == MATMUL_FORWARD ? key.OC : key.C;
    int n = key.role == MATMUL_WGRAD ? key.OC : key.rows;
    int k = key.role == MATMUL_FORWARD ? key.C : key.role == MATMUL_DGRAD ? key.OC : key.rows;
    cublasOperation_t op_a = key.fp8 || key.role == MATMUL_FORWARD ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t op_b = !key.fp8 && key.role == MATMUL_WGRAD ? CUBLAS_OP_T : CUBLAS_OP_N;
    cudaDataType_t type_a = key.fp8 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
    cudaDataType_t type_b = !key.fp8 ? CUDA_R_16BF : key.role == MATMUL_FORWARD ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
    cudaDataType_t type_d = key.role == MATMUL_WGRAD ? CUDA_R_32F : CUDA_R_16BF;
    plan->a = matmul_layout(type_a, m, k, op_a);
    plan->b = matmul_layout(type_b, k, n, op_b);
    plan->d = matmul_layout(type_d, m, n, CUBLAS_OP_N);

    cublas_check(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    matmul_set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof(op_a));
    matmul_set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof(op_b));
    if (key.fp8) {
        int8_t fast = (int8_t)key.fast;
        matmul_set(plan->operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof(fast));
    }
    if (key.bias) {
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        cudaDataType_t bias_type = CUDA_R_16BF;
        matmul_set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
        matmul_set(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type, sizeof(bias_type));
    }
}

// The pointers that live in the operation and not in the arguments of cublasLtMatmul: they change with every call.
static inline void matmul_point(const MatmulShapePlan* plan, const MatmulCall* call) {
    if (call->key.fp8) {
        matmul_set(plan->operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &call->a_descale, sizeof(call->a_descale));
        matmul_set(plan->operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &call->b_descale, sizeof(call->b_descale));
    }
    if (call->key.bias) {
        matmul_set(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &call->bias, sizeof(call->bias));
    }
}

// Queue D = A B + beta D with the given algorithm, into `d`.
static inline cublasStatus_t matmul_launch(Device* dev, const MatmulShapePlan* plan, const MatmulCall* call, void* d,
                                           const cublasLtMatmulAlgo_t* algo, size_t workspace_bytes) {
    float alpha = 1.0f;
    return cublasLtMatmul(dev->cublaslt, plan->operation, &alpha, call->a, plan->a, call->b, plan->b, &call->beta, d,
                          plan->d, d, plan->d, algo, dev->workspace, workspace_bytes, dev->stream);
}

// cuBLASLt's suggestions, its favourite first. Returns how many there are; none is an error.
static inline int matmul_candidates(Device* dev, const MatmulShapePlan* plan, cublasLtMatmulHeuristicResult_t* found) {
    cublasLtMatmulPreference_t preference;
    size_t workspace_bytes = MATMUL_WORKSPACE_BYTES; // not what the Device happens to have: that must not change bits
    uint32_t split_k = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; // partial sums in BF16 would be a second rounding
    uint32_t alignment = MATMUL_ALIGNMENT;
    cublas_check(cublasLtMatmulPreferenceCreate(&preference));
    struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        const void* value;
        size_t bytes;
    } settings[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof(workspace_bytes)},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &split_k, sizeof(split_k)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment, sizeof(alignment)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment, sizeof(alignment)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment, sizeof(alignment)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment, sizeof(alignment)},
    };
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        cublas_check(cublasLtMatmulPreferenceSetAttribute(preference, settings[i].attribute, settings[i].value,
                                                          settings[i].bytes));
    }
    int returned = 0, usable = 0;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(dev->cublaslt, plan->operation, plan->a, plan->b, plan->d, plan->d, preference,
                                       MATMUL_CANDIDATES, found, &returned);
    cublas_check(cublasLtMatmulPreferenceDestroy(preference));
    for (int i = 0; i < returned; i++) {
        if (found[i].state == CUBLAS_STATUS_SUCCESS) { found[usable++] = found[i]; }
    }
    MatmulKey key = plan->key;
    check(status == CUBLAS_STATUS_SUCCESS && usable > 0,
          "cuBLASLt %zu has no algorithm on %s for %s with rows, C, OC = %d, %d, %d: %s", cublasLtGetVersion(),
          dev->properties.name, matmul_role_name(key), key.rows, key.C, key.OC, cublasLtGetStatusString(status));
    return usable;
}

// ---------------------------------------------------------------------------------------------------------------------
// autotuning: time the suggestions once per shape, and remember the winner in a file

// Microseconds of one product with each candidate: the median of some rounds, candidates taking turns inside a round so
// that all of them see the chip in the same state of heat and power. A candidate that fails gets infinity.
// Products go to `d`: their own output where beta is 0 (the real product comes afterwards), else scratch.
static inline void matmul_time_candidates(Device* dev, const MatmulShapePlan* plan, const MatmulCall* call, void* d,
                                          const cublasLtMatmulHeuristicResult_t* candidates, int n,
                                          float* microseconds) {
    enum { ROUNDS = 7 };
    float times[MATMUL_CANDIDATES][ROUNDS];
    cudaEvent_t start, stop;
    cuda_check(cudaEventCreate(&start));
    cuda_check(cudaEventCreate(&stop));
    int repeats = 1;
    for (int round = -1; round < ROUNDS; round++) { // round -1 warms up and finds how often to repeat
        float fastest = INFINITY;
        for (int i = 0; i < n; i++) {
            cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
            float ms = 0.0f;
            if (round < 0) { // the first launch of a kernel also loads it
                status = matmul_launch(dev, plan, call, d, &candidates[i].algo, candidates[i].workspaceSize);
            }
            cuda_check(cudaEventRecord(start, dev->stream));
            for (int j = 0; j < repeats && status == CUBLAS_STATUS_SUCCESS; j++) {
                status = matmul_launch(dev, plan, call, d, &candidates[i].algo, candidates[i].workspaceSize);
            }
            cuda_check(cudaEventRecord(stop, dev->stream));
            cuda_check(cudaEventSynchronize(stop));
            cuda_check(cudaEventElapsedTime(&ms, start, stop));
            float us = status == CUBLAS_STATUS_SUCCESS ? 1000.0f * ms / (float)repeats : INFINITY;
            fastest = fminf(fastest, us);
            if (round >= 0) { times[i][round] = us; }
        }
        if (round < 0) { repeats = (int)fminf(fmaxf(1.0f, 500.0f / fastest), 50.0f); } // about half a millisecond
    }
    for (int i = 0; i < n; i++) {
        for (int a = 1; a < ROUNDS; a++) { // insertion sort
            for (int b = a; b > 0 && times[i][b] < times[i][b - 1]; b--) {
                float t = times[i][b];
                times[i][b] = times[i][b - 1];
                times[i][b - 1] = t;
            }
        }
        microseconds[i] = times[i][ROUNDS / 2];
    }
    cuda_check(cudaEventDestroy(start));
    cuda_check(cudaEventDestroy(stop));
}

// Index of the fastest candidate for this very call, and its time. cuBLASLt's own order decides between candidates that
// are within 1%. -1 when there is no memory to try them in.
static inline int matmul_fastest(Device* dev, const MatmulShapePlan* plan, const MatmulCall* call,
                                 const cublasLtMatmulHeuristicResult_t* candidates, int n, float* best_us) {
    void* d = call->d;
    if (call->beta != 0.0f) { // trying must not add to what is being accumulated
        size_t bytes = (size_t)call->key.C * (size_t)call->key.OC * sizeof(float);
        cudaError_t status = cudaMalloc(&d, bytes);
        if (status == cudaErrorMemoryAllocation) {
            cudaGetLastError(); // it is handled
            fprintf(stderr, "warning: no memory (%zu bytes) to time %s with rows, C, OC = %d, %d, %d: not autotuned\n",
                    bytes, matmul_role_name(call->key), call->key.rows, call->key.C, call->key.OC);
            return -1;
        }
        cuda_check(status);
        cuda_check(cudaMemsetAsync(d, 0, bytes, dev->stream));
    }
    float microseconds[MATMUL_CANDIDATES];
    matmul_time_candidates(dev, plan, call, d, candidates, n, microseconds);
    if (d != call->d) { cuda_check(cudaFree(d)); }
    float fastest = INFINITY;
    for (int i = 0; i < n; i++) {
        fastest = fminf(fastest, microseconds[i]);
    }
    check(fastest < INFINITY, "cuBLASLt: none of %d algorithms for %s with rows, C, OC = %d, %d, %d runs", n,
          matmul_role_name(call->key), call->key.rows, call->key.C, call->key.OC);
    int best = 0;
    while (!(microseconds[best] <= 1.01f * fastest)) {
        best++;
    }
    *best_us = microseconds[best];
    return best;
}

// Take the remembered algorithm of `name` if this cuBLASLt still accepts it.
static inline int matmul_use_remembered(Device* dev, MatmulShapePlan* plan, const char* name) {
    const MatmulCacheEntry* entry = matmul_cache_find(&matmul_plans(dev)->cache, name);
    if (entry == NULL) { return 0; }
    cublasLtMatmulHeuristicResult_t result;
    memcpy(&plan->algo, entry->algo, sizeof(plan->algo));
    cublasStatus_t status = cublasLtMatmulAlgoCheck(dev->cublaslt, plan->operation, plan->a, plan->b, plan->d, plan->d,
                                                    &plan->algo, &result);
    if (status != CUBLAS_STATUS_SUCCESS || result.state != CUBLAS_STATUS_SUCCESS ||
        result.workspaceSize > MATMUL_WORKSPACE_BYTES) {
        return 0;
    }
    plan->workspace_bytes = result.workspaceSize;
    return 1;
}

// The file cannot be written: say so once, and go on without it.
static inline void matmul_forget_path(MatmulPlans* plans) {
    const char* path = plans->autotune_path;
    const char* why = path[0] != 0 ? strerror(errno) : "neither XDG_CACHE_HOME nor HOME is set";
    fprintf(stderr,
            "warning: cannot write '%s' (%s): the algorithms of matrix products are timed anew in every run, and a run "
            "that is continued may differ in its last bits (--autotune-cache FILE)\n", path, why);
    free(plans->autotune_path);
    plans->autotune_path = NULL;
}

// The algorithm of a new plan, with autotuning: from the file, or timed now and put there.
static inline void matmul_autotune(Device* dev, MatmulShapePlan* plan, const MatmulCall* call) {
    MatmulPlans* plans = matmul_plans(dev);
    MatmulKey key = plan->key;
    MatmulCacheEntry entry;
    memset(&entry, 0, sizeof(entry));
    snprintf(entry.key, sizeof(entry.key), "%.64s, cuBLASLt %zu, %s%s%s, rows %d, C %d, OC %d", dev->properties.name,
             cublasLtGetVersion(), matmul_role_name(key), key.fast ? " fast" : "", key.bias ? " + bias" : "", key.rows,
             key.C, key.OC);
    if (matmul_use_remembered(dev, plan, entry.key)) { return; }

    cudaStreamCaptureStatus capturing;
    cuda_check(cudaStreamIsCapturing(dev->stream, &capturing));
    check(capturing == cudaStreamCaptureStatusNone,
          "%s with rows, C, OC = %d, %d, %d first met inside a graph capture: run each shape once before capturing",
          matmul_role_name(key), key.rows, key.C, key.OC);
    int lock = -1;
    if (plans->autotune_path != NULL) {
        lock = matmul_cache_lock(plans->autotune_path);
        if (lock >= 0) {
            matmul_cache_load(&plans->cache, plans->autotune_path); // another rank may have been here first
        } else {
            matmul_forget_path(plans); // while errno says why
        }
    }
    if (!matmul_use_remembered(dev, plan, entry.key)) {
        if (matmul_cache_find(&plans->cache, entry.key) != NULL) {
            fprintf(stderr, "warning: cuBLASLt does not accept the remembered algorithm for '%s': it is chosen anew\n",
                    entry.key);
        }
        cublasLtMatmulHeuristicResult_t candidates[MATMUL_CANDIDATES];
        float microseconds = 0.0f;
        int n = matmul_candidates(dev, plan, candidates);
        int best = matmul_fastest(dev, plan, call, candidates, n, &microseconds);
        int chosen = best < 0 ? 0 : best;
        plan->algo = candidates[chosen].algo;
        plan->workspace_bytes = candidates[chosen].workspaceSize;
        if (best >= 0) {
            entry.microseconds = microseconds;
            memcpy(entry.algo, &plan->algo, sizeof(entry.algo));
            matmul_cache_put(&plans->cache, &entry);
            if (lock >= 0 && !matmul_cache_save(&plans->cache, plans->autotune_path)) { matmul_forget_path(plans); }
        }
    }
    matmul_cache_unlock(lock);
}

// ---------------------------------------------------------------------------------------------------------------------
// doing a product

// The plan of call->key; made if this is the first call with it. The pointer is valid until the next plan is made.
static inline MatmulShapePlan* matmul_find_plan(Device* dev, const MatmulCall* call) {
    MatmulPlans* plans = matmul_plans(dev);
    for (int i = 0; i < plans->num_shapes; i++) {
        MatmulShapePlan* plan = &plans->shapes[i];
        if (memcmp(&plan->key, &call->key, sizeof(MatmulKey)) == 0) { // seven ints, no padding
            matmul_point(plan, call);
            return plan;
        }
    }
    MatmulShapePlan plan = {};
    plan.key = call->key;
    matmul_describe(&plan);
    matmul_point(&plan, call); // cuBLASLt's suggestions depend on which pointers there are
    if (plans->autotune) {
        matmul_autotune(dev, &plan, call);
    } else {
        cublasLtMatmulHeuristicResult_t candidates[MATMUL_CANDIDATES];
        matmul_candidates(dev, &plan, candidates);
        plan.algo = candidates[0].algo;
        plan.workspace_bytes = candidates[0].workspaceSize;
    }
    size_t bytes = (size_t)(plans->num_shapes + 1) * sizeof(MatmulShapePlan);
    MatmulShapePlan* shapes = (MatmulShapePlan*)realloc(plans->shapes, bytes);
    check(shapes != NULL, "out of host memory: wanted %zu bytes", bytes);
    plans->shapes = shapes;
    plans->shapes[plans->num_shapes++] = plan;
    return &plans->shapes[plans->num_shapes - 1];
}

// Where the factor lies that turns a tensor's bytes into values: an address in device memory, nothing is read here.
static inline const float* matmul_descale(int fp8, const ScaleSlot* slot) {
    check(!fp8 || slot != NULL, "matmul: an FP8 operand without a slot");
    return fp8 ? &slot->descale : NULL;
}

// May an FP8 product of this role with sums of K terms accumulate fast?
static inline int matmul_is_fast(Device* dev, MatmulRole role, int fp8, int K) {
    static_assert(FAST_ACCUM_FORWARD == 1 << MATMUL_FORWARD && FAST_ACCUM_DGRAD == 1 << MATMUL_DGRAD &&
                  FAST_ACCUM_WGRAD == 1 << MATMUL_WGRAD, "one bit per role");
    int roles = FAST_ACCUM_FORWARD ^ matmul_plans(dev)->toggled_roles;
    return fp8 && (roles >> role & 1) && K <= FAST_ACCUM_MAX_K;
}

static inline void matmul_run(Device* dev, const MatmulCall* call) {
    MatmulKey key = call->key;
    const char* role = matmul_role_name(key);
    int rows_fit = key.rows > 0 && (!key.fp8 || key.rows % 16 == 0);
    check(rows_fit && key.C > 0 && key.C % 16 == 0 && key.OC > 0 && key.OC % 16 == 0,
          "matmul %s: rows, C, OC = %d, %d, %d, want multiples of 16 (rows: in FP8)", role, key.rows, key.C, key.OC);
    check(call->a != NULL && call->b != NULL && call->d != NULL,
          "matmul %s, rows, C, OC = %d, %d, %d: an operand lacks the form that is needed (%p, %p -> %p)", role,
          key.rows, key.C, key.OC, call->a, call->b, call->d);
    uintptr_t addresses = (uintptr_t)call->a | (uintptr_t)call->b | (uintptr_t)call->d | (uintptr_t)call->bias;
    check(addresses % MATMUL_ALIGNMENT == 0,
          "matmul %s: operands at %p, %p, %p, bias at %p, want multiples of %d bytes", role, call->a, call->b, call->d,
          (const void*)call->bias, MATMUL_ALIGNMENT);
    check(dev->workspace_bytes >= MATMUL_WORKSPACE_BYTES, "matmul %s: workspace of %zu bytes, want %zu", role,
          dev->workspace_bytes, MATMUL_WORKSPACE_BYTES);
    MatmulShapePlan* plan = matmul_find_plan(dev, call);
    cublasStatus_t status = matmul_launch(dev, plan, call, call->d, &plan->algo, plan->workspace_bytes);
    check(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: matmul %s, rows, C, OC = %d, %d, %d: %s", role, key.rows, key.C,
          key.OC, cublasLtGetStatusString(status));
}

// ---------------------------------------------------------------------------------------------------------------------
// the floor's functions (contract and errors: floor.h)

// y (rows, OC) BF16 = x (rows, C) . w^T + bias (OC).   FP8: x.data, w.data
//   2 rows C OC flops: d12's fc at B,T = 64,1024 is 309 GFLOP, 156 us at 1,979 dense FP8 TFLOP/s
// NOTE: in FP8 a bias costs 30% at C = 768 (122.6 -> 159 us on an H200, 2026-11-21): better added by who reads y.
void matmul_forward(Device* dev, bf16* y, E4m3Tensor x, E4m3Tensor w, const bf16* bias, int rows, int C, int OC) {
    int fp8 = w.data != NULL;
    cost_matmul_forward(dev, fp8, rows, C, OC);
    MatmulCall call = {};
    call.key = {MATMUL_FORWARD, fp8, bias != NULL, rows, C, OC, matmul_is_fast(dev, MATMUL_FORWARD, fp8, C)};
    call.d = y;
    call.a = fp8 ? (const void*)w.data : w.wide;
    call.b = fp8 ? (const void*)x.data : x.wide;
    call.a_descale = matmul_descale(fp8, w.slot);
    call.b_descale = matmul_descale(fp8, x.slot);
    call.bias = bias;
    matmul_run(dev, &call);
}

// dx (rows, C) BF16 = dy (rows, OC) . w   FP8: dy.data, w.transposed
void matmul_dgrad(Device* dev, bf16* dx, E5m2Tensor dy, E4m3Tensor w, int rows, int C, int OC) {
    int fp8 = w.data != NULL || w.transposed != NULL;
    cost_matmul_dgrad(dev, fp8, rows, C, OC);
    MatmulCall call = {};
    call.key = {MATMUL_DGRAD, fp8, 0, rows, C, OC, matmul_is_fast(dev, MATMUL_DGRAD, fp8, OC)};
    call.d = dx;
    call.a = fp8 ? (const void*)w.transposed : w.wide;
    call.b = fp8 ? (const void*)dy.data : dy.wide;
    call.a_descale = matmul_descale(fp8, w.slot);
    call.b_descale = matmul_descale(fp8, dy.slot);
    matmul_run(dev, &call);
}

// dw (OC, C) FP32 += dy^T . x   FP8 when x.transposed: dy.transposed, x.transposed
// accumulate 0: dw = dy^T . x, by the same algorithm: a first micro-step has the values of 0 + dy^T . x
void matmul_wgrad(Device* dev, float* dw, E5m2Tensor dy, E4m3Tensor x, int accumulate, int rows, int C, int OC) {
    int fp8 = x.transposed != NULL;
    cost_matmul_wgrad(dev, fp8, accumulate, rows, C, OC);
    MatmulCall call = {};
    call.key = {MATMUL_WGRAD, fp8, 0, rows, C, OC, matmul_is_fast(dev, MATMUL_WGRAD, fp8, rows)};
    call.d = dw;
    call.a = fp8 ? (const void*)x.transposed : x.wide;
    call.b = fp8 ? (const void*)dy.transposed : dy.wide;
    call.a_descale = matmul_descale(fp8, x.slot);
    call.b_descale = matmul_descale(fp8, dy.slot);
    call.beta = accumulate ? 1.0f : 0.0f;
    matmul_run(dev, &call);
}

size_t matmul_workspace_bytes(void) { return MATMUL_WORKSPACE_BYTES; }

// Forget all plans, the autotuning and the accumulation modes. Called by device_free.
void matmul_release(Device* dev) {
    if (dev->matmul_plans == NULL) { return; }
    MatmulPlans* plans = matmul_plans(dev);
    for (int i = 0; i < plans->num_shapes; i++) {
        MatmulShapePlan* plan = &plans->shapes[i];
        cublas_check(cublasLtMatmulDescDestroy(plan->operation));
        cublas_check(cublasLtMatrixLayoutDestroy(plan->a));
        cublas_check(cublasLtMatrixLayoutDestroy(plan->b));
        cublas_check(cublasLtMatrixLayoutDestroy(plan->d));
    }
    matmul_cache_clear(&plans->cache);
    free(plans->autotune_path);
    free(plans->shapes);
    free(plans);
    dev->matmul_plans = NULL;
}

void matmul_set_fast_accum(Device* dev, int roles) { matmul_plans(dev)->toggled_roles = FAST_ACCUM_FORWARD ^ roles; }

int matmul_can_autotune(void) { return 1; }

// Plans made before are dropped. Ranks may share the file: the first to meet a shape chooses, the others wait and read.
// NOTE: the first product of a shape then synchronises with the host, and for wgrad allocates another dw for a moment.
void matmul_set_autotune(Device* dev, const char* cache_path) {
    int toggled_roles = matmul_plans(dev)->toggled_roles;
    matmul_release(dev);
    MatmulPlans* plans = matmul_plans(dev);
    plans->toggled_roles = toggled_roles;
    if (cache_path == NULL) { return; }
    plans->autotune = 1;
    plans->autotune_path = (char*)malloc_or_die(strlen(cache_path) + 1);
    strcpy(plans->autotune_path, cache_path);
    errno = ENOENT;
    // what is wrong with the path shows now and not in the first step
    int lock = cache_path[0] != 0 ? matmul_cache_lock(cache_path) : -1;
    if (lock >= 0) { matmul_cache_load(&plans->cache, cache_path); }
    // a corrupt file was reported once: do not find it again
    if (lock < 0 || !matmul_cache_save(&plans->cache, cache_path)) { matmul_forget_path(plans); }
    matmul_cache_unlock(lock);
}

#endif
