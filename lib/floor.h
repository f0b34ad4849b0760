// The contract of a floor of ops: the types and functions that train_gpt_fp8.cu is written against.
//
// Two floors keep it. The GPU floor is the .cuh files (one op per file, on top of gpu.cuh); the CPU floor (CPU_FLOOR
// defined) is device_cpu.h, reference.h and comm_cpu.h, plain C with the same FP8 and BF16 roundings. Both are compiled
// against these prototypes, so neither can drift. The test program holds both floors at once: it includes the CPU
// floor inside a namespace, which is why the guard below is one per floor.
//
// Conventions for all ops
//   order     context, outputs, inputs, weights, shapes. `d` prefix = gradient of. "+=" accumulates into what is there.
//   shapes    row-major, in elements. rows = B*T tokens, C channels, OC output channels of a linear layer.
//   numerics  arithmetic in FP32; one rounding (nearest even) where a value is stored as BF16; FP8 stores saturate.
//   streams   GPU ops are asynchronous on dev->stream and never synchronise with the host.
//   errors    a shape an op cannot take is one error line with the values (check), exit status 1.
//   bits      deterministic: same inputs, same bits. Sums have a fixed order; only max uses atomics.
#if (defined(CPU_FLOOR) && !defined(FLOOR_H_CPU)) || (!defined(CPU_FLOOR) && !defined(FLOOR_H_GPU))
#ifdef CPU_FLOOR
#define FLOOR_H_CPU
#else
#define FLOOR_H_GPU
#endif

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "profile.h"
#include "rng.h"
#include "scaling.h"
#include "shards.h"

// ---------------------------------------------------------------------------------------------------------------------
// types

#ifdef CPU_FLOOR
typedef float bf16; // holds a BF16 value in a float: every store rounds, except in --precision fp32 (the yardstick)
typedef uint8_t e4m3;
typedef uint8_t e5m2;
#else
typedef __nv_bfloat16 bf16;
typedef __nv_fp8_e4m3 e4m3;
typedef __nv_fp8_e5m2 e5m2;
#endif

typedef struct Device Device; // the machine the ops run on: GPU, stream, handles, workspace; or CPU threads

// One tensor (rows, cols) that linear layers read, in every form somebody needs. A producer writes each form whose
// pointer is not NULL: FP8 linears want data (forward or dgrad) and transposed (wgrad; cuBLASLt's FP8 GEMM on Hopper
// takes both operands with K contiguous); BF16 linears want wide.
//   FP8 bytes q = sat(x * slot->scale), x = q * slot->descale; the producer raises slot->amax to max |x| if `record`,
//   and if `measure_first` (some slot of the run is warming up) runs once before, only to set a warming slot's scale.
typedef struct {
    bf16* wide;       // (rows, cols) or NULL
    e4m3* data;       // (rows, cols) or NULL
    e4m3* transposed; // (cols, rows) or NULL
    ScaleSlot* slot;  // in device memory; NULL only when data and transposed are NULL
    ScaleRecipe recipe;
    int measure_first;
    int record;
} E4m3Tensor;

// The same for gradients.
typedef struct {
    bf16* wide;
    e5m2* data;
    e5m2* transposed;
    ScaleSlot* slot;
    ScaleRecipe recipe;
    int measure_first;
    int record;
} E5m2Tensor;

// Per-row statistics of a LayerNorm, kept for its backward pass.
typedef struct {
    float* mean; // (rows)
    float* rstd; // (rows), 1 / sqrt(variance + 1e-5)
} LayerNormStats;

// What is added to the residual stream in front of a LayerNorm: sum = in + (branch + bias).
typedef struct {
    bf16* sum;          // (rows, C) out; NULL when branch is NULL: then the LayerNorm reads `in` itself
    const bf16* in;     // (rows, C)
    const bf16* branch; // (rows, C) output of the previous linear without its bias; NULL: nothing is added
    const bf16* bias;   // (C) bias of that linear
} ResidualAdd;

typedef struct {
    E5m2Tensor dx;         // out (rows, C): gradient of the residual stream below; wide always, FP8 for its linear
    float* dweight;        // (C) +=
    float* dbias;          // (C) +=
    float* dbranch_bias;   // (C) += column sums of dx: bias gradient of the linear below; NULL: none
    const bf16* dy;        // (rows, C) gradient of the LayerNorm's output
    const bf16* dresidual; // (rows, C) gradient arriving over the residual stream; may be dx.wide itself; NULL: none
    const bf16* x;         // (rows, C) what the LayerNorm read (the residual sum)
    LayerNormStats stats;
    const bf16* weight;    // (C)
    int rows, C;
} LayerNormBackward;

// Rows of a batch grouped by token, so that the embedding gradient is summed in a fixed order. Made on the host by
// token_index_build (dataloader side), uploaded to the device.
typedef struct {
    int* rows;         // (BT) row numbers b*T+t, grouped by token, ascending inside a group
    int* bucket_token; // (num_buckets) distinct tokens of the batch, ascending
    int* bucket_start; // (num_buckets + 1) where each group starts in rows
    int num_buckets;
} TokenIndex;

// What one optimizer step leaves for the host to read in one copy.
typedef struct {
    float loss;        // mean loss of the step: loss_add over its micro-steps
    float grad_norm;   // global L2 norm of all gradients, before clipping
    int skip;          // 1: loss or norm is not finite; adamw_update leaves everything as it is
    int slots_warming; // FP8 slots that want a measuring pass in the next step
    unsigned long long saturated; // sums of --grad-reduce fp8-allreduce that reached the largest E4M3 number
} StepState;

// What a rank tells the others about its share of a step: norm_of_slices makes it, norm_of_ranks reads all of them.
typedef struct {
    double squares; // sum of the squares of the gradients that the rank owns
    float loss;     // its share of the loss
    float unused;   // 0
} RankNorm;

typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float grad_clip; // gradients are multiplied by min(1, grad_clip / grad_norm); 0 = no clipping
    int t;           // 1-based count of applied updates, for bias correction
    int stochastic;  // param is the master rounded stochastically, else to nearest even
    uint64_t seed;   // of the stochastic rounding: element i of update t draws philox(seed, t, i / 4), word i % 4
} AdamW;

// One parameter tensor of one or more layers, as the optimizer sees it: (layers, n) contiguous.
typedef struct {
    float* master;      // FP32 weights
    float* m;           // FP32 first moment
    float* v;           // FP32 second moment
    const float* grad;  // FP32 gradient
    bf16* param;        // BF16 copy that the forward pass reads, or NULL (FP8 linear)
    ScaleSlot* slot;    // layer 0's slot when the forward pass reads FP8, else NULL: amax is raised to max |master|
    size_t slot_stride; // distance in slots from one layer's slot to the next
    int layers;
    size_t n;     // elements per layer, a multiple of 4
    size_t index; // of element 0 among all parameters, a multiple of 4: which random numbers round it
} ParamState;

// The BF16 copy of one piece, as it is gathered from the ranks that updated its slices (shards.h).
typedef struct {
    bf16* param;  // (n), aligned to 16 bytes
    size_t n;     // a multiple of 16
    size_t slice; // elements of a rank's slice, a multiple of GRAD_BLOCK
    size_t at;    // where the slice begins in a rank's chunk: the sum of the slices before it
} ParamPiece;

// ---------------------------------------------------------------------------------------------------------------------
// device: memory and time (gpu.cuh | device_cpu.h)

typedef enum { ATTENTION_AUTO = 0, ATTENTION_BUILTIN = 1, ATTENTION_CUDNN = 2 } AttentionKind;

typedef struct {
    int index;               // GPU: device ordinal (local rank). CPU: ignored
    int num_threads;         // CPU: OpenMP threads, 0 = all. GPU: ignored
    int fp32;                // CPU: --precision fp32, no BF16 rounding. The GPU floor refuses it
    AttentionKind attention; // GPU: which attention; AUTO: per pass and head size (attention.cuh)
} DeviceOptions;

// Open the device. A missing or unsuitable GPU is one error line: what was found, what is needed, "make cpu".
Device* device_create(DeviceOptions options);
void device_free(Device* dev);
const char* device_name(const Device* dev);           // "NVIDIA H200", or the CPU's model name
const char* device_attention_name(const Device* dev); // "builtin", "cudnn 9.19.0 and builtin", ...
// A text that no other device of any host has; empty on the CPU floor, whose ranks may share one
void device_identity(const Device* dev, char* text, size_t size);
void device_memory(const Device* dev, size_t* free_bytes, size_t* total_bytes);
// Memory is 256-byte aligned; contents are undefined. Failing to get it is an error line with the sizes.
void* device_malloc(Device* dev, size_t bytes);
void device_release(Device* dev, void* p);
void* pinned_malloc(Device* dev, size_t bytes); // host memory for asynchronous copies
void pinned_release(Device* dev, void* p);
void device_zero(Device* dev, void* p, size_t bytes);
// Ordered on the stream; the host buffer must stay untouched until the next device_sync or device_copy_out.
void device_copy_in(Device* dev, void* to_device, const void* from_host, size_t bytes);
void device_copy_out(Device* dev, void* to_host, const void* from_device, size_t bytes); // returns when it is there
void device_sync(Device* dev); // waits for everything queued, reports any asynchronous error
// Scratch for ops, at least `bytes`; set once at start-up from the *_workspace_bytes functions. Ops check its size.
void device_set_workspace(Device* dev, void* p, size_t bytes);
// Scratch of every op that sums in two stages (layernorm_backward, gelu_backward, quantize_backward, loss_add,
// global_norm, embedding_backward) for rows of at most `cols` columns.
size_t reduction_workspace_bytes(Device* dev, int cols);
// Values as the floor stores them, to host floats and back (tests, sampling, checkpoints). Synchronous.
void bf16_to_host(Device* dev, float* to, const bf16* from, size_t n);
void bf16_from_host(Device* dev, bf16* to, const float* from, size_t n);

// Profiling: from begin to end every op is timed (GPU: events on the stream; CPU: the clock) and added to `profile`.
// begin wants nothing queued on the device; end waits for it. Ops call mark through op_cost.h: from here on the time
// belongs to profile->ops[op], -1: to nobody. profile_begin to _end is one step; the caller adds its duration.
void device_profile_begin(Device* dev, Profile* profile);
void device_profile_end(Device* dev);
Profile* device_profile(const Device* dev); // NULL: not profiling
void device_profile_mark(Device* dev, int op);

// ---------------------------------------------------------------------------------------------------------------------
// embedding.cuh: tokens -> residual stream

// out (B*T, C) = wte[token] + wpe[t].   tokens (B*T) int32 in [0, V); wte (Vp, C); wpe (maxT, C)
void embedding_forward(Device* dev, bf16* out, const int* tokens, const bf16* wte, const bf16* wpe, int B,
                                 int T, int C);
// dwte (Vp, C) FP32 += rows of dout grouped by token;   dwpe (maxT, C) FP32 += sum over b.   dout (B*T, C)
void embedding_backward(Device* dev, float* dwte, float* dwpe, const bf16* dout, TokenIndex index, int B,
                                  int T, int C);

// ---------------------------------------------------------------------------------------------------------------------
// layernorm.cuh: residual add + LayerNorm (Ba et al. 2016), eps 1e-5

// add.sum = BF16(add.in + (add.branch + add.bias)) if there is a branch;  x = that sum (as stored), or add.in
// y = (x - mean) * rstd * weight + bias, in every form of y;  stats (rows) are written.  weight, bias (C)
void layernorm_forward(Device* dev, E4m3Tensor y, LayerNormStats stats, ResidualAdd add, const bf16* weight,
                                 const bf16* bias, int rows, int C);
// dx = dresidual + LayerNorm'(dy) at x;  see LayerNormBackward. dbranch_bias sums dx as stored in BF16.
void layernorm_backward(Device* dev, LayerNormBackward args);

// ---------------------------------------------------------------------------------------------------------------------
// matmul.cuh: the linear layers, y = x w^T + bias, w (OC, C) as in torch.nn.Linear.
// FP8 when w.data is not NULL (then every operand's FP8 form is read), else BF16. FP32 accumulation; in FP8 fast
// accumulation in the roles of matmul_set_fast_accum. C, OC and, in FP8, rows must be multiples of 16.

// y (rows, OC) BF16 = x (rows, C) . w^T + bias (OC; NULL: none)
void matmul_forward(Device* dev, bf16* y, E4m3Tensor x, E4m3Tensor w, const bf16* bias, int rows, int C,
                              int OC);
// dx (rows, C) BF16 = dy (rows, OC) . w                              FP8: dy.data, w.transposed
void matmul_dgrad(Device* dev, bf16* dx, E5m2Tensor dy, E4m3Tensor w, int rows, int C, int OC);
// dw (OC, C) FP32 += dy^T . x                                        FP8 when x.transposed: dy.transposed, x.transposed
// accumulate 0: dw = dy^T . x, the same values as added to zeros; what dw held before is not read
void matmul_wgrad(Device* dev, float* dw, E5m2Tensor dy, E4m3Tensor x, int accumulate, int rows, int C, int OC);
size_t matmul_workspace_bytes(void);
// FP8 products of these roles (bits) may use the tensor cores' fast accumulation from here on: 14 bits of accumulator
// instead of 23. A new Device has FAST_ACCUM_FORWARD. CPU: no effect, its sums are FP32. Sums of more terms than
// FAST_ACCUM_MAX_K are never fast: the LM head's dgrad adds one target's -1 and 50,000 probabilities, most of which are
// below 2^-13 of it and would vanish.
enum { FAST_ACCUM_MAX_K = 16384 };
enum { FAST_ACCUM_FORWARD = 1, FAST_ACCUM_DGRAD = 2, FAST_ACCUM_WGRAD = 4 };
void matmul_set_fast_accum(Device* dev, int roles);
// From here on, time the library's algorithms at the first product of each shape, keep the fastest, and remember it in
// the text file `cache_path`, where the next run finds it: the same choice, the same bits. NULL: the library's first
// suggestion. A file that cannot be used is one warning: then choices last as long as the Device.
void matmul_set_autotune(Device* dev, const char* cache_path);
int matmul_can_autotune(void); // CPU: 0, there is nothing to choose

// ---------------------------------------------------------------------------------------------------------------------
// attention.cuh: causal attention, softmax(q k^T / sqrt(HS)) v, never storing (T, T). FlashAttention-2 (Dao 2023).

// out (B*T, C) in every form of it; wide always, and the FP8 forms are those of quantize_forward to the bit
// lse (B, NH, T) FP32 = log of the softmax denominator (natural log, of scaled scores)
// qkv (B*T, 3C) BF16: per token Q then K then V, each (NH, HS), C = NH*HS. HS a multiple of 16, at most 128; any T
void attention_forward(Device* dev, E4m3Tensor out, float* lse, const bf16* qkv, int B, int T, int NH, int HS);
// dqkv (B*T, 3C): the FP8 forms if it has any (then wide is scratch for the op, undefined after it), else wide, which
// is never NULL; codes are made of values rounded to BF16.  dbias (3C) FP32 += column sums of those; NULL: not wanted
// dout, out (B*T, C)
void attention_backward(Device* dev, E5m2Tensor dqkv, float* dbias, const bf16* dout, const bf16* out, const float* lse,
                                  const bf16* qkv, int B, int T, int NH, int HS);
// of both passes, with what quantize_backward needs for dqkv
size_t attention_workspace_bytes(Device* dev, int B, int T, int NH, int HS);

// ---------------------------------------------------------------------------------------------------------------------
// gelu.cuh: tanh GELU with the bias of the fc linear, gelu(u) = 0.5 u (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3)))

// y (rows, C) = gelu(x + bias) in every form of y.   x (rows, C) fc output without bias; bias (C)
void gelu_forward(Device* dev, E4m3Tensor y, const bf16* x, const bf16* bias, int rows, int C);
// dx (rows, C) = dy * gelu'(x + bias) in every form of dx (wide may be dy itself)
// dbias (C) FP32 += column sums of dx before any rounding
void gelu_backward(Device* dev, E5m2Tensor dx, float* dbias, const bf16* dy, const bf16* x, const bf16* bias,
                             int rows, int C);

// ---------------------------------------------------------------------------------------------------------------------
// quantize.cuh: BF16 or FP32 -> FP8 where no fused producer exists

// y.data, y.transposed from y.wide (rows, cols); nothing to do when both are NULL
void quantize_forward(Device* dev, E4m3Tensor y, int rows, int cols);
// dy.data, dy.transposed from dy.wide, and dbias (cols) FP32 += column sums of dy.wide
void quantize_backward(Device* dev, E5m2Tensor dy, float* dbias, int rows, int cols);
// w.data (OC, C) and w.transposed (C, OC) from the FP32 master weights with the slot's scale; writes descale
void quantize_weight(Device* dev, E4m3Tensor w, const float* master, int OC, int C);

// ---------------------------------------------------------------------------------------------------------------------
// classifier.cuh: softmax cross-entropy over the first V of Vp columns

// losses (rows) FP32 = -log softmax(logits)[target];  targets (rows) int32 in [0, V)
// with_gradient: (softmax - onehot) * dloss, padding columns 0, either
//   BF16  in place of the logits (rows, Vp): dlogits.wide is `logits`, the other forms are NULL
//   FP8   dlogits.data and, if there is one, dlogits.transposed, straight from FP32: wide is NULL. The slot is never
//         measured or raised: no |dlogits| is above dloss, so its scale is known (SLOT_STATIC). rows a multiple of 16.
//         The logits stay
// Otherwise dlogits is not looked at, and the logits stay.
void classifier(Device* dev, E5m2Tensor dlogits, float* losses, bf16* logits, const int* targets, float dloss,
                int with_gradient, int rows, int V, int Vp);
// state->loss += factor * sum of losses (n), in fixed order
void loss_add(Device* dev, StepState* state, const float* losses, float factor, size_t n);

// ---------------------------------------------------------------------------------------------------------------------
// grad_norm.cuh, adamw.cuh, scale_update.cuh: the end of a step

// state->grad_norm = sqrt(sum of grads^2) in fixed order; state->skip = 1 if it or state->loss is not finite, else 0
void global_norm(Device* dev, StepState* state, const float* grads, size_t n);
// The same over ranks that own slices, in two steps with an all-gather of RankNorm between them.
// part->squares = sum of grads^2 over the rank's slices of all buckets, in fixed order; part->loss = state->loss
// grads (num_parameters) FP32; shards is read on the host
void norm_of_slices(Device* dev, RankNorm* part, const StepState* state, const float* grads, const Shards* shards,
                    int rank);
// state->loss = sum of the parts' (num_ranks), state->grad_norm = sqrt(sum of their squares), added up in rank order in
// FP64 and rounded once; state->skip = 1 if one of them is not finite, else 0. The same parts, the same bits everywhere
void norm_of_ranks(Device* dev, StepState* state, const RankNorm* parts, int num_ranks);
// AdamW (Loshchilov & Hutter 2019, decoupled decay) on p; does nothing when state->skip. Writes param and raises slots.
void adamw_update(Device* dev, ParamState p, AdamW adamw, const StepState* state);
// param and slots from the master weights, without an update: after initialisation or loading. With adamw.stochastic
// param gets the bits that update adamw.t left there (of adamw only stochastic, seed and t are read)
void params_from_master(Device* dev, ParamState p, AdamW adamw);
// amax of all slots into a flat array (num_slots), NaN as +Inf (NCCL's max drops NaN), ready to be max-reduced
void scale_slots_gather(Device* dev, float* amaxes, const ScaleSlot* slots, int num_slots);
// scale_slot_step for every slot; state->slots_warming = how many want a measuring pass next
void scale_slots_step(Device* dev, ScaleSlot* slots, const float* amaxes, int num_slots, ScaleRecipe recipe,
                                StepState* state);

// ---------------------------------------------------------------------------------------------------------------------
// grad_reduce.cuh: what several ranks send each other, in pieces, slices and chunks (shards.h). Nothing is sent here.
// Buffers that are sent or received are aligned to 128 bytes, others to 16. A bucket is read on the host.

// send (num_ranks, grad_wire_bytes(chunk)) = this rank's gradients of the bucket, one chunk per rank: E4M3 codes, then
// an FP32 descale per block of GRAD_BLOCK (grad_block_scale); padding is zero.   grads (num_parameters) FP32
void grad_quantize(Device* dev, uint8_t* send, const float* grads, const Bucket* bucket, int num_ranks);
// The rank's own slices of grads (num_parameters) = sum over r of code * descale of received (num_ranks,
// grad_wire_bytes(chunk)), in rank order, by fmaf: one rounding per rank. The rest of grads stays.
void grad_sum(Device* dev, float* grads, const uint8_t* received, const Bucket* bucket, int num_ranks, int rank);
// packed (num_ranks, chunk) = slices of ranks first_rank .. first_rank + num_ranks - 1 of this rank's gradients of the
// bucket, in BF16 (rounded to nearest even, with --precision fp32, too) or FP32; padding is zero. A reduce-scatter
// takes all ranks' chunks, the all-gather of the sums the own one
void grad_pack_bf16(Device* dev, bf16* packed, const float* grads, const Bucket* bucket, int first_rank, int num_ranks);
void grad_pack_fp32(Device* dev, float* packed, const float* grads, const Bucket* bucket, int first_rank,
                    int num_ranks);
// Those ranks' slices of grads = chunks (num_ranks, chunk). The rest of grads stays
void grad_unpack_bf16(Device* dev, float* grads, const bf16* chunks, const Bucket* bucket, int first_rank,
                      int num_ranks);
void grad_unpack_fp32(Device* dev, float* grads, const float* chunks, const Bucket* bucket, int first_rank,
                      int num_ranks);
// --grad-reduce fp8-allreduce, with one scale per piece for all ranks (grad_mu.h):
// amaxes (num_pieces) = max |g| of this rank's gradients in each piece of the bucket; +Inf where one is not finite
void grad_amax(Device* dev, float* amaxes, const float* grads, const Bucket* bucket);
// codes (num_ranks, chunk) E4M3 = sat(g * scale) of all ranks' slices of this rank's gradients, padding zero.
// amaxes (num_pieces): of all ranks (comm_max), in device memory; scale = grad_shared_scale(amax, mu)
void grad_quantize_shared(Device* dev, e4m3* codes, const float* grads, const Bucket* bucket, const float* amaxes,
                          float mu, int num_ranks);
// All pieces of the bucket of grads = code * descale, of the summed codes (num_ranks, chunk)
// *saturated (device memory) += number of elements whose code is +-448
void grad_dequantize_shared(Device* dev, float* grads, const e4m3* codes, const Bucket* bucket, const float* amaxes,
                            float mu, int num_ranks, unsigned long long* saturated);
// packed (chunk) = the rank's slices of the pieces, padding zero.   pieces (num_pieces) in device memory; chunk = the
// sum of their slices
void param_pack(Device* dev, bf16* packed, const ParamPiece* pieces, int num_pieces, size_t chunk, int rank);
// All ranks' slices of the pieces = gathered (num_ranks, chunk)
void param_unpack(Device* dev, const ParamPiece* pieces, const bf16* gathered, int num_pieces, size_t chunk,
                  int num_ranks);
// data (n) E4M3 = sat(master * slot->scale), the codes that quantize_weight writes for these elements; writes
// slot->descale. n a multiple of 16, or 0: then only the descale is written, since the other ranks' codes want it, too
void quantize_slice(Device* dev, e4m3* data, ScaleSlot* slot, const float* master, size_t n);
// transposed (C, OC) = data (OC, C), both multiples of 16
void transpose_weight(Device* dev, e4m3* transposed, const e4m3* data, int OC, int C);

// ---------------------------------------------------------------------------------------------------------------------
// comm.cuh | comm_cpu.h: ranks. One rank is a communicator of one.

typedef struct Comm Comm;

// Collectives on device memory. Bytes on the wire: what this rank sends at least, R ranks (all-to-all, all-gather,
// reduce-scatter of n bytes per rank: (R - 1) n; sum, max and all-reduce of n bytes: 2 (R - 1) / R n); bytes / time is
// what nccl-tests calls bus bandwidth.
typedef enum {
    COMM_SUM,
    COMM_MAX,
    COMM_ALL_TO_ALL,
    COMM_ALL_GATHER,
    COMM_REDUCE_SCATTER_BF16,
    COMM_REDUCE_SCATTER_FP32,
    COMM_ALL_REDUCE_E4M3,
    COMM_OPS
} CommOp;

typedef struct {
    uint64_t calls, bytes; // of one kind of collective: calls, bytes on the wire
    double seconds;        // from its begin on this rank to its end: includes waiting for the others
} CommOpStats;

typedef struct {
    CommOpStats ops[COMM_OPS];
    uint64_t bytes;   // all ops
    double seconds;   // all ops
    double exposed_s; // of that, what dev->stream waited for (comm_end); CPU: everything
} CommStats;

// Joins the ranks that mpirun (or srun) started; alone when started by hand. Call before device_create.
Comm* comm_create(int* argc, char*** argv);
void comm_connect(Comm* comm, Device* dev); // GPU: NCCL over the ranks' devices
void comm_free(Comm* comm);
int comm_rank(const Comm* comm);
int comm_local_rank(const Comm* comm); // rank among those on this host: picks the GPU
int comm_num_ranks(const Comm* comm);

// When a rank dies, or a collective is not done in time, every other rank prints one error line that names the missing
// rank and the collective, and exits with status 1 (watchdog.h). 0: only dead ranks are noticed. A rank that is busy is
// waited for as long as it lives: say so around work of the host that may take long.
void comm_set_timeout(Comm* comm, double seconds);
void comm_set_busy(Comm* comm, int is_busy);

// Between comm_begin and comm_end, any number of collectives. GPU: they run on a stream of their own, beside
// dev->stream. comm_begin: what follows on it waits for what is queued on dev->stream now. comm_end: what is queued on
// dev->stream from now on waits for the collectives so far. CPU: a collective is done when it returns.
void comm_begin(Comm* comm, Device* dev);
void comm_end(Comm* comm, Device* dev);
// recv[r] (bytes_per_rank) = what rank r has in send[this rank]; both (num_ranks, bytes_per_rank), not in place
void comm_all_to_all(Comm* comm, Device* dev, void* recv, const void* send, size_t bytes_per_rank);
// recv (num_ranks, bytes_per_rank) = every rank's send (bytes_per_rank); in place when send is this rank's part of recv
void comm_all_gather(Comm* comm, Device* dev, void* recv, const void* send, size_t bytes_per_rank);
// n of them at once, as one collective: small ones do not wait for each other
typedef struct {
    void* recv;
    const void* send;
    size_t bytes_per_rank;
} CommGather;
void comm_all_gathers(Comm* comm, Device* dev, const CommGather* gathers, int n);
// recv (n_per_rank) = sum over ranks of their send[this rank]; send (num_ranks, n_per_rank), not changed except in
// place, when recv is this rank's part of it. GPU: NCCL's order and roundings. CPU: FP32 in rank order, rounded once
void comm_reduce_scatter_bf16(Comm* comm, Device* dev, bf16* recv, const bf16* send, size_t n_per_rank);
void comm_reduce_scatter_fp32(Comm* comm, Device* dev, float* recv, const float* send, size_t n_per_rank);
// data (n) = sum over ranks, in place, the same bits on every rank; every partial sum is rounded to E4M3 and saturates.
// GPU: NCCL's order, 2.24 or newer. CPU: rank order
void comm_all_reduce_e4m3(Comm* comm, Device* dev, e4m3* data, size_t n);

// These contain their own begin and end. Device memory, in place, over all ranks.
void comm_sum(Comm* comm, Device* dev, float* data, size_t n);
void comm_max(Comm* comm, Device* dev, float* data, size_t n);

// What was communicated since the last call and is finished: call it when the step is (device_sync).
CommStats comm_take_stats(Comm* comm);

void comm_host_min_max(Comm* comm, int64_t value, int64_t* min, int64_t* max); // host values
// all (num_ranks, bytes) = every rank's own (bytes), in host memory: for small things at start-up
void comm_host_all_gather(Comm* comm, void* all, const void* own, size_t bytes);
// The versions of what ranks have in common, a fact each (agree.h): MPI, and on a GPU NCCL, CUDA, cuBLASLt, the driver
void comm_versions(FILE* out);
void comm_barrier(Comm* comm);

#endif
