// What every op must move and multiply: the bytes it has to read and write once and the FLOPs of its matrix products,
// declared to the profile of --profile (profile.h). The first line of every op, on both floors, is its line from here:
//
//     cost_gelu_forward(dev, y, rows, C);
//
// It marks the op's beginning; the time from one mark to the next is the op's. Without a profile it is one branch.
// Scratch, second passes over the same data (measuring passes too) and vectors of C elements are left out, so these are
// the bytes of a perfect kernel. Useful FLOPs only: causal attention counts half the square.
#if (defined(CPU_FLOOR) && !defined(OP_COST_H_CPU)) || (!defined(CPU_FLOOR) && !defined(OP_COST_H_GPU))
#ifdef CPU_FLOOR
#define OP_COST_H_CPU
#else
#define OP_COST_H_GPU
#endif

#include "floor.h"
#include "profile.h"

static inline void cost_mark(Device* dev, const char* op, double bytes, double flops, int fp8) {
    Profile* profile = device_profile(dev);
    if (profile != NULL) { device_profile_mark(dev, profile_count(profile, op, bytes, flops, fp8)); }
}

// From here to the next mark the time is nobody's: the host does something else.
static inline void cost_nobody(Device* dev) {
    if (device_profile(dev) != NULL) { device_profile_mark(dev, -1); }
}

// Bytes per element of all forms that are there.
static inline double cost_forms_e4m3(E4m3Tensor x) {
    return (x.wide != NULL ? sizeof(bf16) : 0.0) + (x.data != NULL) + (x.transposed != NULL);
}
static inline double cost_forms_e5m2(E5m2Tensor x) {
    return (x.wide != NULL ? sizeof(bf16) : 0.0) + (x.data != NULL) + (x.transposed != NULL);
}

static inline void cost_zero(Device* dev, size_t bytes) { cost_mark(dev, "zero", (double)bytes, 0.0, 0); }
static inline void cost_copy_in(Device* dev) { cost_mark(dev, "copy to the device", 0.0, 0.0, 0); }
static inline void cost_copy_out(Device* dev) { cost_mark(dev, "copy to the host", 0.0, 0.0, 0); }

static inline void cost_embedding_forward(Device* dev, int B, int T, int C) {
    cost_mark(dev, "embedding forward", sizeof(bf16) * (2.0 * B * T * C + (double)T * C), 0.0, 0);
}
static inline void cost_embedding_backward(Device* dev, int num_buckets, int B, int T, int C) {
    cost_mark(dev, "embedding backward", ((double)B * T * sizeof(bf16) + 8.0 * num_buckets + 8.0 * T) * C, 0.0, 0);
}

static inline void cost_layernorm_forward(Device* dev, E4m3Tensor y, ResidualAdd add, int rows, int C) {
    double each = cost_forms_e4m3(y) + (add.branch != NULL ? 3.0 : 1.0) * sizeof(bf16);
    cost_mark(dev, "layernorm forward", each * rows * C + 8.0 * rows, 0.0, 0);
}
static inline void cost_layernorm_backward(Device* dev, E5m2Tensor dx, const bf16* dresidual, int rows, int C) {
    double each = cost_forms_e5m2(dx) + (dresidual != NULL ? 3.0 : 2.0) * sizeof(bf16);
    cost_mark(dev, "layernorm backward", each * rows * C + 8.0 * rows, 0.0, 0);
}

// role: "forward", "dgrad" or "wgrad". The operands have 1 or sizeof(bf16) bytes, wgrad's product 4, the others' are
// bf16
static inline void cost_matmul(Device* dev, const char* role, int fp8, double bytes_out, int rows, int C, int OC) {
    const Profile* profile = device_profile(dev);
    if (profile == NULL) { return; }
    char name[PROFILE_NAME];
    snprintf(name, sizeof(name), "%s %s", profile_linear_name(profile, C, OC), role);
    double x = (double)rows * C, w = (double)OC * C, y = (double)rows * OC, width = fp8 ? 1.0 : sizeof(bf16);
    double in = role[0] == 'f' ? x + w : role[0] == 'd' ? y + w : x + y;
    cost_mark(dev, name, width * in + bytes_out, 2.0 * x * OC, fp8);
}
static inline void cost_matmul_forward(Device* dev, int fp8, int rows, int C, int OC) {
    cost_matmul(dev, "forward", fp8, (double)sizeof(bf16) * rows * OC, rows, C, OC);
}
static inline void cost_matmul_dgrad(Device* dev, int fp8, int rows, int C, int OC) {
    cost_matmul(dev, "dgrad", fp8, (double)sizeof(bf16) * rows * C, rows, C, OC);
}
static inline void cost_matmul_wgrad(Device* dev, int fp8, int accumulate, int rows, int C, int OC) {
    cost_matmul(dev, "wgrad", fp8, (accumulate ? 8.0 : 4.0) * C * OC, rows, C, OC);
}

// qkv in, out in the forms that are written here; two products of the causal half
static inline void cost_attention_forward(Device* dev, E4m3Tensor out, int B, int T, int NH, int HS) {
    double rows = (double)B * T, C = (double)NH * HS, bytes = sizeof(bf16) * 3.0 + cost_forms_e4m3(out);
    cost_mark(dev, "attention forward", bytes * rows * C + 4.0 * rows * NH, 2.0 * rows * T * C, 0);
}
// qkv, out, dout in, dqkv out in FP8 or else BF16; five products
static inline void cost_attention_backward(Device* dev, E5m2Tensor dqkv, int B, int T, int NH, int HS) {
    double rows = (double)B * T, C = (double)NH * HS, codes = (dqkv.data != NULL) + (dqkv.transposed != NULL);
    double out = codes > 0.0 ? codes : sizeof(bf16);
    cost_mark(dev, "attention backward", (sizeof(bf16) * 5.0 + 3.0 * out) * rows * C + 4.0 * rows * NH,
              5.0 * rows * T * C, 0);
}

static inline void cost_gelu_forward(Device* dev, E4m3Tensor y, int rows, int C) {
    cost_mark(dev, "gelu forward", (sizeof(bf16) + cost_forms_e4m3(y)) * rows * C, 0.0, 0);
}
static inline void cost_gelu_backward(Device* dev, E5m2Tensor dx, int rows, int C) {
    cost_mark(dev, "gelu backward", (2.0 * sizeof(bf16) + cost_forms_e5m2(dx)) * rows * C, 0.0, 0);
}

// wide is read, the other forms are written: the sum over all forms. In BF16 quantize_backward only sums columns
static inline void cost_quantize_forward(Device* dev, E4m3Tensor y, int rows, int cols) {
    cost_mark(dev, "quantize forward", cost_forms_e4m3(y) * rows * cols, 0.0, 0);
}
static inline void cost_quantize_backward(Device* dev, E5m2Tensor dy, int rows, int cols) {
    cost_mark(dev, "quantize backward", cost_forms_e5m2(dy) * rows * cols, 0.0, 0);
}
static inline void cost_quantize_weight(Device* dev, E4m3Tensor w, int OC, int C) {
    cost_mark(dev, "quantize weight", (4.0 + (w.data != NULL) + (w.transposed != NULL)) * OC * C, 0.0, 0);
}

static inline void cost_classifier(Device* dev, int with_gradient, int rows, int Vp) {
    cost_mark(dev, "classifier", (with_gradient ? 2.0 : 1.0) * sizeof(bf16) * rows * Vp, 0.0, 0);
}
static inline void cost_loss_add(Device* dev, size_t n) { cost_mark(dev, "loss add", 4.0 * (double)n, 0.0, 0); }
static inline void cost_global_norm(Device* dev, size_t n) { cost_mark(dev, "global norm", 4.0 * (double)n, 0.0, 0); }
static inline void cost_norm_of_slices(Device* dev, const Shards* shards) {
    cost_mark(dev, "norm of slices", 4.0 * (double)shards->shard, 0.0, 0);
}
static inline void cost_norm_of_ranks(Device* dev, int num_ranks) {
    cost_mark(dev, "norm of ranks", (double)sizeof(RankNorm) * num_ranks, 0.0, 0);
}

// gradient in; master and both moments in and out; param out
static inline void cost_adamw_update(Device* dev, ParamState p) {
    double each = 28.0 + (p.param != NULL ? sizeof(bf16) : 0.0);
    cost_mark(dev, "adamw", each * p.layers * (double)p.n, 0.0, 0);
}
static inline void cost_scale_slots(Device* dev, int num_slots) {
    cost_mark(dev, "scale slots", (double)sizeof(ScaleSlot) * num_slots, 0.0, 0);
}

// FP32 and the bytes on the wire, each once; one rank's slices, or all ranks'
static inline void cost_grad_exchange(Device* dev, const char* op, const Bucket* bucket, double bytes_each,
                                      int num_ranks) {
    cost_mark(dev, op, bytes_each * (double)bucket->chunk * num_ranks, 0.0, 0);
}
static inline void cost_grad_amax(Device* dev, const Bucket* bucket) {
    double elements = 0.0;
    for (int p = 0; p < bucket->num_pieces; p++) {
        elements += (double)bucket->piece[p].n;
    }
    cost_mark(dev, "grad amax", 4.0 * elements, 0.0, 0);
}
static inline void cost_param_pack(Device* dev, size_t chunk) {
    cost_mark(dev, "param pack", 2.0 * sizeof(bf16) * (double)chunk, 0.0, 0);
}
static inline void cost_param_unpack(Device* dev, size_t chunk, int num_ranks) {
    cost_mark(dev, "param unpack", 2.0 * sizeof(bf16) * (double)chunk * num_ranks, 0.0, 0);
}
static inline void cost_quantize_slice(Device* dev, size_t n) {
    cost_mark(dev, "quantize slice", 5.0 * (double)n, 0.0, 0);
}
static inline void cost_transpose_weight(Device* dev, int OC, int C) {
    cost_mark(dev, "transpose weight", 2.0 * OC * C, 0.0, 0);
}
static inline void cost_sum_over_ranks(Device* dev) { cost_mark(dev, "sum or max over ranks", 0.0, 0.0, 0); }

#endif
