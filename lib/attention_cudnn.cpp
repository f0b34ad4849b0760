// Causal attention by cuDNN through cudnn-frontend's graph API (header-only, MIT): the one optional translation unit.
//
// The graphs read Q, K and V where they lie in qkv (B, T, 3, NH, HS), by strides, and write dQ, dK and dV the same way:
// no copies. Input and output BF16, arithmetic FP32, scores scaled by 1/sqrt(HS), lse = log of the softmax denominator.
//
// This file is C++ because its neighbour is: shared_ptr and exceptions stay inside it.
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention_cudnn.h"

// The frontend opens libcudart.so by itself, although this program has a CUDA runtime linked in: that would be a second
// one, missing on machines that have only a driver, and an exception where toolkits 12 and 13 are both installed. So
// while its headers are read, dlopen and dlsym are ours, and give it the functions of the runtime that is here.
static const char own_runtime[] = "the CUDA runtime of this program";

static void* dlopen_for_frontend(const char* name, int mode) {
    char own_name[32];
    snprintf(own_name, sizeof(own_name), "libcudart.so.%d", CUDART_VERSION / 1000);
    if (strcmp(name, own_name) == 0) { return (void*)own_runtime; }
    if (strncmp(name, "libcudart.so", 12) == 0) { return NULL; }
    return dlopen(name, mode);
}

static void* dlsym_for_frontend(void* library, const char* name) {
    if (library != (void*)own_runtime) { return dlsym(library, name); }
    const struct {
        const char* name;
        void* function;
    } functions[] = {
        {"cudaGetDevice", (void*)cudaGetDevice},
        {"cudaGetDeviceProperties", (void*)cudaGetDeviceProperties},
        {"cudaGetErrorString", (void*)cudaGetErrorString},
        {"cudaMemsetAsync", (void*)cudaMemsetAsync},
        {"cudaMemcpyAsync", (void*)cudaMemcpyAsync},
        {"cudaPointerGetAttributes", (void*)cudaPointerGetAttributes},
        {"cudaStreamIsCapturing", (void*)cudaStreamIsCapturing},
        {"cudaStreamSynchronize", (void*)cudaStreamSynchronize},
        {"cudaDeviceSynchronize", (void*)cudaDeviceSynchronize},
        {"cudaMalloc", (void*)(cudaError_t(*)(void**, size_t))cudaMalloc},
        {"cudaFree", (void*)cudaFree},
    };
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        if (strcmp(functions[i].name, name) == 0) { return functions[i].function; }
    }
    return NULL; // the frontend says which symbol it misses
}

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#define dlopen dlopen_for_frontend
#define dlsym dlsym_for_frontend
#include <cudnn_frontend.h>
#undef dlopen
#undef dlsym

namespace fe = cudnn_frontend;

// The frontend wants the library's handle under this name. Written once, by cudnn_attention_open.
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

// Names of the tensors of a graph, for the table of addresses at execution.
enum { ID_Q = 1, ID_K, ID_V, ID_OUT, ID_LSE, ID_DOUT, ID_DQ, ID_DK, ID_DV };

typedef struct {
    CudnnAttentionShape shape;
    std::shared_ptr<fe::graph::Graph> forward, backward;
    size_t forward_bytes, workspace_bytes; // workspace of the forward pass, of the larger of the two
    int supported;
    std::string reason; // why not
} CudnnAttentionPlan;

struct CudnnAttention {
    cudnnHandle_t handle;
    int deterministic;
    char version[32];
    std::vector<CudnnAttentionPlan> plans;
};

// ---------------------------------------------------------------------------------------------------------------------
// graphs

// (B, NH, T, HS) as cuDNN counts, in a row-major (B, T, heads_per_token, HS); that is 3 NH in qkv and NH in out.
static fe::graph::Tensor_attributes tensor_of(const char* name, int id, CudnnAttentionShape s, int heads_per_token) {
    int64_t token = (int64_t)heads_per_token * s.HS;
    return fe::graph::Tensor_attributes()
        .set_name(name)
        .set_uid(id)
        .set_dim({s.B, s.NH, s.T, s.HS})
        .set_stride({s.T * token, s.HS, token, 1});
}

static fe::graph::Tensor_attributes lse_of(CudnnAttentionShape s) {
    return fe::graph::Tensor_attributes()
        .set_name("lse")
        .set_uid(ID_LSE)
        .set_dim({s.B, s.NH, s.T, 1})
        .set_stride({(int64_t)s.NH * s.T, s.T, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
}

// Say of an output tensor, which the graph made itself, which one it is and how it lies.
static void place_output(const std::shared_ptr<fe::graph::Tensor_attributes>& output,
                         const fe::graph::Tensor_attributes& as) {
    output->set_output(true).set_uid(as.get_uid()).set_dim(as.get_dim()).set_stride(as.get_stride());
}

static std::shared_ptr<fe::graph::Graph> new_graph(void) {
    auto graph = std::make_shared<fe::graph::Graph>();
    graph->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    return graph;
}

static std::shared_ptr<fe::graph::Graph> forward_graph(CudnnAttentionShape s) {
    auto graph = new_graph();
    auto options = fe::graph::SDPA_attributes()
                       .set_name("attention")
                       .set_generate_stats(true)
                       .set_attn_scale(1.0f / sqrtf((float)s.HS))
                       .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT) // causal: token t sees 0..t
                       .set_diagonal_band_right_bound(0);
    auto [out, lse] = graph->sdpa(graph->tensor(tensor_of("q", ID_Q, s, 3 * s.NH)),
                                  graph->tensor(tensor_of("k", ID_K, s, 3 * s.NH)),
                                  graph->tensor(tensor_of("v", ID_V, s, 3 * s.NH)), options);
    place_output(out, tensor_of("out", ID_OUT, s, s.NH));
    place_output(lse, lse_of(s));
    lse->set_data_type(fe::DataType_t::FLOAT);
    return graph;
}

static std::shared_ptr<fe::graph::Graph> backward_graph(CudnnAttentionShape s, int deterministic) {
    auto graph = new_graph();
    auto options = fe::graph::SDPA_backward_attributes()
                       .set_name("attention_backward")
                       .set_attn_scale(1.0f / sqrtf((float)s.HS))
                       .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                       .set_diagonal_band_right_bound(0)
                       .set_deterministic_algorithm(deterministic != 0);
    auto [dq, dk, dv] = graph->sdpa_backward(
        graph->tensor(tensor_of("q", ID_Q, s, 3 * s.NH)), graph->tensor(tensor_of("k", ID_K, s, 3 * s.NH)),
        graph->tensor(tensor_of("v", ID_V, s, 3 * s.NH)), graph->tensor(tensor_of("out", ID_OUT, s, s.NH)),
        graph->tensor(tensor_of("dout", ID_DOUT, s, s.NH)), graph->tensor(lse_of(s)), options);
    place_output(dq, tensor_of("dq", ID_DQ, s, 3 * s.NH));
    place_output(dk, tensor_of("dk", ID_DK, s, 3 * s.NH));
    place_output(dv, tensor_of("dv", ID_DV, s, 3 * s.NH));
    return graph;
}

// Compile a graph. On failure `reason` says why, and 0 comes back. The first plan that cuDNN's heuristics name and that
// builds is taken: the same one on every run.
static int build_graph(CudnnAttention* cudnn, fe::graph::Graph* graph, const char* name, size_t* workspace_bytes,
                       std::string* reason) {
    int64_t bytes = 0;
    fe::error_t error = graph->build(cudnn->handle, {fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK},
                                     fe::BuildPlanPolicy_t::HEURISTICS_CHOICE, false);
    if (error.is_good()) { error = graph->get_workspace_size(bytes); }
    if (error.is_good()) {
        *workspace_bytes = (size_t)bytes;
        return 1;
    }
    *reason = std::string(name) + ": " + error.get_message();
    for (char& c : *reason) { // one line
        c = c == '\n' ? ' ' : c;
    }
    return 0;
}

static CudnnAttentionPlan* find_plan(CudnnAttention* cudnn, CudnnAttentionShape shape) {
    for (CudnnAttentionPlan& plan : cudnn->plans) {
        if (memcmp(&plan.shape, &shape, sizeof(shape)) == 0) { return &plan; }
    }
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// the library

static void* open_library_in(const char* folder) {
    if (folder == NULL || folder[0] == 0) { return NULL; }
    return dlopen((std::string(folder) + "/libcudnn.so.9").c_str(), RTLD_NOW | RTLD_LOCAL);
}

// $CUDNN_LIBRARY_PATH, then where the loader looks, then beside the headers of the build (cuDNN from a Python package).
static void* open_library(char* reason, size_t reason_bytes) {
    void* library = open_library_in(getenv("CUDNN_LIBRARY_PATH"));
    if (library == NULL) { library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL); }
    if (library == NULL) {
        const char* error = dlerror();
        snprintf(reason, reason_bytes, "libcudnn.so.9 cannot be opened: %s", error ? error : "no reason given");
        library = open_library_in(CUDNN_BUILD_LIBRARY_DIR);
    }
    return library;
}

CudnnAttention* cudnn_attention_open(char* reason, size_t reason_bytes) {
    void* library = open_library(reason, reason_bytes);
    if (library == NULL) { return NULL; }
    fe::cudnn_dlhandle = library;
    try { // the frontend throws where the library lacks a symbol
        size_t version = fe::detail::get_backend_version();
        if (version < 90000) {
            snprintf(reason, reason_bytes, "found cuDNN version %zu, want 9.0 (90000) or newer", version);
            return NULL;
        }
        cudnnHandle_t handle;
        cudnnStatus_t status = fe::detail::create_handle(&handle);
        if (status != CUDNN_STATUS_SUCCESS) {
            snprintf(reason, reason_bytes, "cuDNN %s: cudnnCreate: %s",
                     fe::detail::get_backend_version_string().c_str(), fe::detail::get_error_string(status));
            return NULL;
        }
        CudnnAttention* cudnn = new CudnnAttention();
        cudnn->handle = handle;
        cudnn->deterministic = 1;
        snprintf(cudnn->version, sizeof(cudnn->version), "%s", fe::detail::get_backend_version_string().c_str());
        return cudnn;
    } catch (const std::exception& e) {
        snprintf(reason, reason_bytes, "cuDNN: %s", e.what());
        return NULL;
    }
}

void cudnn_attention_close(CudnnAttention* cudnn) {
    if (cudnn == NULL) { return; }
    cudnn->plans.clear();
    fe::detail::destroy_handle(cudnn->handle); // the library stays open: the frontend keeps addresses in it
    delete cudnn;
}

const char* cudnn_attention_version(const CudnnAttention* cudnn) { return cudnn->version; }

void cudnn_attention_set_deterministic(CudnnAttention* cudnn, int deterministic) {
    cudnn->plans.clear();
    cudnn->deterministic = deterministic;
}

int cudnn_attention_plan(CudnnAttention* cudnn, CudnnAttentionShape shape, size_t* workspace_bytes, char* reason,
                         size_t reason_bytes) {
    CudnnAttentionPlan* plan = find_plan(cudnn, shape);
    if (plan == NULL) {
        CudnnAttentionPlan made = {};
        size_t forward_bytes = 0, backward_bytes = 0;
        made.shape = shape;
        try {
            made.forward = forward_graph(shape);
            made.supported = build_graph(cudnn, made.forward.get(), "forward", &forward_bytes, &made.reason);
            if (made.supported) {
                made.backward = backward_graph(shape, cudnn->deterministic);
                made.supported = build_graph(cudnn, made.backward.get(), "backward", &backward_bytes, &made.reason);
            }
        } catch (const std::exception& e) {
            made.supported = 0;
            made.reason = e.what();
        }
        made.forward_bytes = forward_bytes;
        made.workspace_bytes = forward_bytes > backward_bytes ? forward_bytes : backward_bytes;
        cudnn->plans.push_back(made);
        plan = &cudnn->plans.back();
    }
    *workspace_bytes = plan->supported ? plan->workspace_bytes : 0;
    if (!plan->supported) { snprintf(reason, reason_bytes, "%s", plan->reason.c_str()); }
    return plan->supported;
}

// ---------------------------------------------------------------------------------------------------------------------
// execution

static void execute(CudnnAttention* cudnn, cudaStream_t stream, void* workspace, fe::graph::Graph* graph,
                    std::unordered_map<int64_t, void*>* addresses, const char* name) {
    try {
        cudnnStatus_t status = fe::detail::set_stream(cudnn->handle, stream);
        check(status == CUDNN_STATUS_SUCCESS, "cuDNN: cudnnSetStream: %s", fe::detail::get_error_string(status));
        fe::error_t error = graph->execute(cudnn->handle, *addresses, workspace);
        check(error.is_good(), "cuDNN: attention %s: %s", name, error.get_message().c_str());
    } catch (const std::exception& e) { check(0, "cuDNN: attention %s: %s", name, e.what()); }
}

// Address of Q, K or V (which = 0, 1, 2) of the first token.
static void* part_of(const void* qkv, int which, CudnnAttentionShape s) {
    return (char*)qkv + (size_t)which * (size_t)s.NH * (size_t)s.HS * 2; // 2 bytes: BF16
}

static CudnnAttentionPlan* planned(CudnnAttention* cudnn, CudnnAttentionShape s) {
    CudnnAttentionPlan* plan = find_plan(cudnn, s);
    check(plan != NULL && plan->supported, "cuDNN: attention B, T, NH, HS = %d, %d, %d, %d was not planned", s.B, s.T,
          s.NH, s.HS);
    return plan;
}

size_t cudnn_attention_forward_bytes(CudnnAttention* cudnn, CudnnAttentionShape shape) {
    return planned(cudnn, shape)->forward_bytes;
}

void cudnn_attention_forward(CudnnAttention* cudnn, cudaStream_t stream, void* workspace, void* out, float* lse,
                             const void* qkv, CudnnAttentionShape shape) {
    CudnnAttentionPlan* plan = planned(cudnn, shape);
    std::unordered_map<int64_t, void*> addresses = {{ID_Q, part_of(qkv, 0, shape)},
                                                    {ID_K, part_of(qkv, 1, shape)},
                                                    {ID_V, part_of(qkv, 2, shape)},
                                                    {ID_OUT, out},
                                                    {ID_LSE, lse}};
    execute(cudnn, stream, workspace, plan->forward.get(), &addresses, "forward");
}

void cudnn_attention_backward(CudnnAttention* cudnn, cudaStream_t stream, void* workspace,
                              CudnnAttentionGradients tensors, CudnnAttentionShape shape) {
    CudnnAttentionPlan* plan = planned(cudnn, shape);
    std::unordered_map<int64_t, void*> addresses = {{ID_Q, part_of(tensors.qkv, 0, shape)},
                                                    {ID_K, part_of(tensors.qkv, 1, shape)},
                                                    {ID_V, part_of(tensors.qkv, 2, shape)},
                                                    {ID_OUT, (void*)tensors.out},
                                                    {ID_DOUT, (void*)tensors.dout},
                                                    {ID_LSE, (void*)tensors.lse},
                                                    {ID_DQ, part_of(tensors.dqkv, 0, shape)},
                                                    {ID_DK, part_of(tensors.dqkv, 1, shape)},
                                                    {ID_DV, part_of(tensors.dqkv, 2, shape)}};
    execute(cudnn, stream, workspace, plan->backward.get(), &addresses, "backward");
}
