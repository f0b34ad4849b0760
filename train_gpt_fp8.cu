// train_gpt_fp8: pretrains GPT-2 / GPT-3 models with the whole transformer forward and backward pass in FP8.
//
// This file is the program, read top to bottom: the nouns (weights, activations, gradients), memory, forward, backward,
// update, evaluation, the loop, main. It holds no kernels: ops come from one of two floors that keep the same contract
// (lib/floor.h): the GPU floor (nvcc, the .cuh files) or the CPU floor (g++ -DCPU_FLOOR, plain C with the same FP8 and
// BF16 roundings). Everything in this file is the same on both.
//
//   B   sequences per micro-batch           C   channels                     V   vocabulary
//   T   tokens per sequence                 NH  attention heads              Vp  vocabulary, padded to 128
//   BT  tokens per micro-batch, rows        HS  head size, C / NH            L   transformer blocks
//
// The path of a batch:
//   tokens -> embedding -> { layernorm -> qkv -> attention -> proj -> + -> layernorm -> fc -> gelu -> fcproj -> + } x L
//          -> layernorm -> LM head -> classifier -> loss, and back through the same rooms -> gradients
//          -> (sum over ranks, behind the layers below) -> norm -> AdamW -> FP8 weights -> (to all ranks, in front of
//          the layers above)
//   beside it: every FP8 write raises its slot's amax -> (max over ranks) -> next step's scale

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// ground and bookkeeping: plain C
#include "lib/check.h"       // defines: check, *_or_die
#include "lib/clock.h"       // defines: seconds_now
#include "lib/fp8.h"         // defines: the FP8 codec, bf16_round
#include "lib/scaling.h"     // defines: ScaleSlot, ScaleRecipe, when a scale changes
#include "lib/rng.h"         // defines: the random numbers of initialisation and sampling
#include "lib/config.h"      // defines: GptConfig, TrainConfig, the flags
#include "lib/tensors.h"     // defines: ParameterTable: name, shape, init, decay, place of every parameter tensor
#include "lib/memory.h"      // defines: MemoryPlan
#include "lib/dataloader.h"  // defines: DataLoader: .bin shards -> (B, T) inputs and targets
#include "lib/tokenizer.h"   // defines: Tokenizer: ids -> text
#include "lib/sampler.h"     // defines: sample_token
#include "lib/schedule.h"    // defines: schedule_learning_rate
#include "lib/checkpoint.h"  // defines: llm.c model files
#include "lib/roofline.h"    // defines: the floor of a step in seconds
#include "lib/micro_batch.h" // defines: MicroBatch, what -b auto chooses
#include "lib/profile.h"     // defines: Profile: the time, bytes and FLOPs of every op
#include "lib/logger.h"      // defines: Logger: screen, main.log, metrics.jsonl
#include "lib/run_state.h"   // defines: RunState: where a run stands, as a checkpoint remembers it
#include "lib/snapshot.h"    // defines: the files and folders of a checkpoint
#include "lib/state_ranges.h" // defines: StateRanges: which parameters a rank keeps, and where
#include "lib/snapshot_writer.h" // defines: SnapshotWriter: writes them while training goes on
#include "lib/llmc_state.h"  // defines: llm.c's checkpoints, in and out
#include "lib/resume.h"      // defines: Resume: which checkpoint a run goes on from
#include "lib/stop.h"        // defines: stop_signal

// the floor of ops
#ifdef CPU_FLOOR
#include "lib/device_cpu.h" // defines: Device: threads and host memory
#include "lib/reference.h"  // defines: every op in plain C
#include "lib/comm_cpu.h"   // defines: Comm over MPI
#else
#include "lib/gpu.cuh"          // defines: Device: GPU, stream, cuBLASLt
#include "lib/embedding.cuh"    // defines: embedding_forward, embedding_backward
#include "lib/layernorm.cuh"    // defines: layernorm_forward (with the residual add), layernorm_backward
#include "lib/matmul.cuh"       // defines: matmul_forward, matmul_dgrad, matmul_wgrad
#include "lib/attention.cuh"    // defines: attention_forward, attention_backward
#include "lib/gelu.cuh"         // defines: gelu_forward, gelu_backward (with the fc bias)
#include "lib/quantize.cuh"     // defines: quantize_forward, quantize_backward, quantize_weight
#include "lib/classifier.cuh"   // defines: classifier
#include "lib/grad_norm.cuh"    // defines: loss_add, global_norm
#include "lib/adamw.cuh"        // defines: adamw_update, params_from_master
#include "lib/scale_update.cuh" // defines: scale_slots_gather, scale_slots_step
#include "lib/grad_reduce.cuh"  // defines: what ranks send each other, packed and unpacked
#include "lib/comm.cuh"         // defines: Comm over NCCL
#endif
#include "lib/exchange.h" // defines: Exchange: gradients and weights between ranks

// between files and arrays on the device: tokens, checkpoints
#include "lib/batch.h" // defines: Batch, BatchRing: micro-batches on their way to the device
#include "lib/save.h" // defines: Save: a checkpoint on its way to disk while training goes on
#include "lib/load.h" // defines: load_resumed, load_slots

// what leans on it
#include "lib/start_check.h" // defines: what ranks compare before they train

// ---------------------------------------------------------------------------------------------------------------------
// the nouns

// The four linear layers of a block; each owns three FP8 slots: its input, its weight, the gradient of its output.
typedef enum { LINEAR_QKV, LINEAR_PROJ, LINEAR_FC, LINEAR_FCPROJ, NUM_LINEARS } LinearName;
typedef enum { SLOT_OF_INPUT, SLOT_OF_WEIGHT, SLOT_OF_GRADIENT, SLOTS_PER_LINEAR } SlotName;

// Parameters as the forward and backward pass read them. Linear weights are FP8 (data and transposed) or BF16 (wide).
typedef struct {
    bf16* ln1w;                  // (C)
    bf16* ln1b;                  // (C)
    E4m3Tensor w[NUM_LINEARS];   // qkv (3C, C), proj (C, C), fc (4C, C), fcproj (C, 4C)
    bf16* bias[NUM_LINEARS];     // (3C), (C), (4C), (C)
    bf16* ln2w;                  // (C)
    bf16* ln2b;                  // (C)
} LayerWeights;

// FP32 gradient accumulators, the same shapes; views into one flat array in the order of the parameter table.
typedef struct {
    float* ln1w;
    float* ln1b;
    float* w[NUM_LINEARS];
    float* bias[NUM_LINEARS];
    float* ln2w;
    float* ln2b;
} LayerGrads;

// What the forward pass keeps for the backward pass. The row-major FP8 copy of a linear's input is read once, by the
// forward product, so all layers share it (Scratch.x_row); the transposed copy is what wgrad reads and what is kept.
typedef struct {
    bf16* in;                  // (BT, C) residual stream entering the block
    LayerNormStats ln1_stats;  // (BT)
    E4m3Tensor x[NUM_LINEARS]; // inputs: ln1 (BT, C), attention (BT, C), ln2 (BT, C), gelu (BT, 4C)
    bf16* qkv;                 // (BT, 3C)
    float* lse;                // (B, NH, T)
    bf16* mid;                 // (BT, C) residual stream between attention and MLP
    LayerNormStats ln2_stats;  // (BT)
    bf16* fc;                  // (BT, 4C) GELU's argument without the bias
} LayerActs;

// Gradients of the linears' outputs: dqkv (BT, 3C), dmid (BT, C), dfc (BT, 4C), dout (BT, C). All bytes are scratch
// that the layers share; what belongs to the layer is the slots. dmid and dout are the gradient of the residual stream.
typedef struct {
    E5m2Tensor dy[NUM_LINEARS];
} LayerActGrads;

// The LM head, a linear whose weight is the token embedding, and the final LayerNorm in front of it. Both go through
// the rows in chunks: all but the weight is scratch that the chunks share.
typedef struct {
    E4m3Tensor w;       // wte (Vp, C); wide always, the embedding reads it
    E4m3Tensor x;       // output of the final LayerNorm: FP8 (head_rows, C), BF16 a chunk of Scratch.lnf
    E5m2Tensor dlogits; // (head_rows, Vp); BF16 in place of the logits
} Head;

// Buffers with lifetimes shorter than a pass, shared by all layers.
typedef struct {
    e4m3* x_row;     // (BT, 4C) row-major FP8 input of the linear that runs next; both forms of the head's
    bf16* branch;    // (BT, C)  output of proj or fcproj, until the next LayerNorm adds it to the residual stream
    bf16* lnf;       // (BT, C)  output of the final LayerNorm, until the LM head's wgrad has read it;
    bf16* dln;       // (BT, C)    then: gradient of a LayerNorm's output (lnf's own first), or of attention's output
    bf16* logits;    // (head_rows, Vp) logits of a chunk of rows, then their gradient
    bf16* dresidual; // (BT, C)  gradient of the residual stream, all the way down
    bf16* dwide;     // (BT, 4C) gradient of gelu's output (and in BF16 of fc's), then of qkv
    e5m2* dy_row;    // (BT, 4C) FP8 gradient of the linear whose backward runs next; (head_rows, Vp) of the head
    e5m2* dy_col;    // (4C, BT) the same, transposed; (Vp, head_rows)
} Scratch;

typedef struct {
    Device* dev;
    Comm* comm;
    GptConfig config;
    const TrainConfig* train;
    ParameterTable table;
    ScaleRecipe recipe;
    MemoryPlan plan;
    void* memory; // the block that holds everything below
    int B, T;     // largest micro-batch
    int head_rows; // rows of logits that exist at one time

    Exchange exchange;

    float* master; // (num_parameters) FP32; with ZeRO-1 on several ranks this rank's shard of it (shards.h)
    float* m;      // first moment, the same elements
    float* v;      // second moment
    float* grads;  // (num_parameters) accumulated over micro-steps
    int accumulate; // do the matrices' gradients add to what is there? Not in the first micro-step: it overwrites

    bf16* params[NUM_TENSORS];  // all layers of every tensor that is not a linear weight
    LayerWeights* w;            // (L)
    LayerGrads* g;              // (L)
    LayerActs* a;               // (L)
    LayerActGrads* da;          // (L)
    Head head;
    ScaleSlot* slots;           // (L, NUM_LINEARS, SLOTS_PER_LINEAR), then the FP8 head's (SLOTS_PER_LINEAR)
    float* amaxes;              // (num_slots) for the max over ranks
    int num_slots;
    bf16* final_residual;       // (BT, C) what the final LayerNorm reads
    LayerNormStats lnf_stats;   // (BT)
    float* losses;              // (BT)
    Scratch scratch;
    Batch batch;                // on the device
    BatchRing batches;          // on the host, on their way there
    StepState* state;           // on the device
    void* workspace;
    size_t workspace_bytes;

    int layers_ready;      // blocks whose weights are here, not only this rank's slices; the LM head counts as one more
    int slots_warming;     // as of the last step: do producers have to measure first?
    int num_updates;       // AdamW's t
    AdamW rounding;        // seed, t, stochastic: how the BF16 parameters in memory were rounded
} Model;

static const TensorName linear_weight_tensor[NUM_LINEARS] = {TENSOR_QKVW, TENSOR_PROJW, TENSOR_FCW, TENSOR_FCPROJW};
static const TensorName linear_bias_tensor[NUM_LINEARS] = {TENSOR_QKVB, TENSOR_PROJB, TENSOR_FCB, TENSOR_FCPROJB};

// Columns of the linear's input: y (rows, OC) = x (rows, IC) w (OC, IC)^T + bias.
static int linear_inputs(const Model* model, LinearName k) {
    return (k == LINEAR_FCPROJ ? 4 : 1) * model->config.channels;
}

// Does linear k of layer l compute in FP8? (--precision, --bf16-layers, --bf16-ops)
static int linear_is_fp8(const Model* model, int l, LinearName k) {
    return config_linear_is_fp8(model->train, &model->config, l, 1 << k); // BF16_OP_* bits: in the order of LinearName
}

// How much one token's loss counts in the loss of a step: gradients are of dloss * sum of losses.
static float loss_weight(const Model* model) {
    return 1.0f / ((float)(model->B * model->T) * (float)model->train->grad_accum_steps *
                   (float)comm_num_ranks(model->comm));
}

// Slots of layer l's linear k; the FP8 head's stand where linear 0 of one more layer would.
static ScaleSlot* slot_of(const Model* model, int l, LinearName k, SlotName s) {
    return model->slots + ((size_t)l * NUM_LINEARS + k) * SLOTS_PER_LINEAR + s;
}

// Parameters of which this rank has master weights and moments, padding included.
static size_t state_elements(const Model* model) {
    return model->exchange.is_sharded ? model->exchange.shards.shard : model->table.num_parameters;
}

// Which parameters those are; to_save: what a checkpoint takes of them from this rank.
static StateRanges state_ranges(const Model* model, int to_save) {
    int rank = comm_rank(model->comm), ranks = comm_num_ranks(model->comm);
    size_t n = model->table.num_parameters;
    if (model->exchange.is_sharded) { return state_ranges_of_shard(&model->exchange.shards, rank); }
    return to_save ? state_ranges_share(n, rank, ranks) : state_ranges_flat(n);
}

// ---------------------------------------------------------------------------------------------------------------------
// memory: every buffer is planned, the plan is shown and compared with the machine, then one block is allocated

// Elements that a weight of n, gathered in place from slices, takes: those of the last ranks may reach beyond it.
static size_t gathered_elements(const Model* model, size_t n) {
    size_t ranks = (size_t)model->exchange.num_ranks;
    return model->exchange.is_sharded ? ranks * slice_elements(n, (int)ranks) : n;
}

static void plan_parameters(Model* model) {
    MemoryPlan* plan = &model->plan;
    const ParameterTable* table = &model->table;
    size_t n_bytes = state_elements(model) * sizeof(float);
    plan_add(plan, MEMORY_MASTER, &model->master, n_bytes);
    plan_add(plan, MEMORY_MOMENTS, &model->m, n_bytes);
    plan_add(plan, MEMORY_MOMENTS, &model->v, n_bytes);
    plan_add(plan, MEMORY_GRADIENTS, &model->grads, table->num_parameters * sizeof(float));
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &table->tensor[t];
        if (!spec->is_linear) {
            plan_add(plan, MEMORY_PARAMETERS, &model->params[t], spec->layers * spec->n * sizeof(bf16));
        }
    }
    for (int l = 0; l < model->config.num_layers; l++) {
        for (int k = 0; k < NUM_LINEARS; k++) {
            E4m3Tensor* w = &model->w[l].w[k];
            size_t n = table->tensor[linear_weight_tensor[k]].n;
            if (linear_is_fp8(model, l, (LinearName)k)) {
                plan_add(plan, MEMORY_PARAMETERS, &w->data, gathered_elements(model, n) * sizeof(e4m3));
                plan_add(plan, MEMORY_PARAMETERS, &w->transposed, n * sizeof(e4m3));
            } else {
                plan_add(plan, MEMORY_PARAMETERS, &w->wide, gathered_elements(model, n) * sizeof(bf16));
            }
        }
    }
    if (model->train->fp8_lm_head) {
        size_t n = table->tensor[TENSOR_WTE].n;
        plan_add(plan, MEMORY_PARAMETERS, &model->head.w.data, gathered_elements(model, n) * sizeof(e4m3));
        plan_add(plan, MEMORY_PARAMETERS, &model->head.w.transposed, n * sizeof(e4m3));
    }
    plan_add(plan, MEMORY_PARAMETERS, &model->slots, (size_t)model->num_slots * sizeof(ScaleSlot));
    plan_add(plan, MEMORY_PARAMETERS, &model->amaxes, (size_t)model->num_slots * sizeof(float));
    plan_add(plan, MEMORY_PARAMETERS, &model->state, sizeof(StepState));
    exchange_plan(&model->exchange, plan);
}

static void plan_activations(Model* model) {
    MemoryPlan* plan = &model->plan;
    size_t BT = (size_t)model->B * model->T, C = (size_t)model->config.channels;
    for (int l = 0; l < model->config.num_layers; l++) {
        LayerActs* a = &model->a[l];
        plan_add(plan, MEMORY_ACTIVATIONS, &a->in, BT * C * sizeof(bf16));
        plan_add(plan, MEMORY_ACTIVATIONS, &a->mid, BT * C * sizeof(bf16));
        plan_add(plan, MEMORY_ACTIVATIONS, &a->qkv, BT * 3 * C * sizeof(bf16));
        plan_add(plan, MEMORY_ACTIVATIONS, &a->fc, BT * 4 * C * sizeof(bf16));
        plan_add(plan, MEMORY_ACTIVATIONS, &a->lse, (size_t)model->config.num_heads * BT * sizeof(float));
        plan_add(plan, MEMORY_ACTIVATIONS, &a->ln1_stats.mean, BT * sizeof(float));
        plan_add(plan, MEMORY_ACTIVATIONS, &a->ln1_stats.rstd, BT * sizeof(float));
        plan_add(plan, MEMORY_ACTIVATIONS, &a->ln2_stats.mean, BT * sizeof(float));
        plan_add(plan, MEMORY_ACTIVATIONS, &a->ln2_stats.rstd, BT * sizeof(float));
        for (int k = 0; k < NUM_LINEARS; k++) {
            size_t n = BT * (size_t)linear_inputs(model, (LinearName)k);
            int is_fp8 = linear_is_fp8(model, l, (LinearName)k);
            if (is_fp8) { plan_add(plan, MEMORY_ACTIVATIONS, &a->x[k].transposed, n * sizeof(e4m3)); }
            if (!is_fp8 || k == LINEAR_PROJ) { // attention's backward pass reads its output in BF16
                plan_add(plan, MEMORY_ACTIVATIONS, &a->x[k].wide, n * sizeof(bf16));
            }
        }
    }
    plan_add(plan, MEMORY_ACTIVATIONS, &model->final_residual, BT * C * sizeof(bf16));
    plan_add(plan, MEMORY_ACTIVATIONS, &model->lnf_stats.mean, BT * sizeof(float));
    plan_add(plan, MEMORY_ACTIVATIONS, &model->lnf_stats.rstd, BT * sizeof(float));
    plan_add(plan, MEMORY_ACTIVATIONS, &model->losses, BT * sizeof(float));
    plan_add(plan, MEMORY_ACTIVATIONS, &model->batch.tokens, batch_bytes(BT));
}

static void plan_scratch(Model* model) {
    MemoryPlan* plan = &model->plan;
    Scratch* s = &model->scratch;
    size_t BT = (size_t)model->B * model->T, C = (size_t)model->config.channels;
    plan_add(plan, MEMORY_SCRATCH, &s->branch, BT * C * sizeof(bf16));
    plan_add(plan, MEMORY_SCRATCH, &s->lnf, BT * C * sizeof(bf16));
    plan_add(plan, MEMORY_SCRATCH, &s->dresidual, BT * C * sizeof(bf16));
    plan_add(plan, MEMORY_SCRATCH, &s->dwide, BT * 4 * C * sizeof(bf16));
    plan_add(plan, MEMORY_SCRATCH, &s->logits,
             (size_t)model->head_rows * model->config.padded_vocab_size * sizeof(bf16));
    if (model->train->precision == PRECISION_FP8) {
        size_t dy = BT * 4 * C, dlogits = (size_t)model->head_rows * model->config.padded_vocab_size;
        if (model->train->fp8_lm_head && dlogits > dy) { dy = dlogits; }
        plan_add(plan, MEMORY_SCRATCH, &s->x_row, BT * 4 * C * sizeof(e4m3));
        plan_add(plan, MEMORY_SCRATCH, &s->dy_row, dy * sizeof(e5m2));
        plan_add(plan, MEMORY_SCRATCH, &s->dy_col, dy * sizeof(e5m2));
    }
    plan_add(plan, MEMORY_WORKSPACE, &model->workspace, model->workspace_bytes);
}

// Plan everything for a micro-batch of B sequences. workspace_bytes is what the ops asked for.
static void plan_model(Model* model, int B) {
    memset(&model->plan, 0, sizeof(model->plan));
    model->B = B;
    int64_t rows = (int64_t)B * model->T;
    model->head_rows = (int)(rows < 16384 ? rows : 16384); // 1.6 GB of logits at V = 50257: enough to fill the GPU
    plan_parameters(model);
    plan_activations(model);
    plan_scratch(model);
}

// Refuse a plan that does not fit, with the numbers and the largest micro-batch that would.
static void check_plan_fits(Model* model) {
    size_t free_bytes, total_bytes, wanted = plan_bytes(&model->plan);
    device_memory(model->dev, &free_bytes, &total_bytes);
    if (wanted <= free_bytes) { return; }
    int asked = model->B, fits = asked;
    do {
        plan_free(&model->plan);
        fits--;
        plan_model(model, fits > 0 ? fits : 1);
    } while (fits > 0 && plan_bytes(&model->plan) > free_bytes);
    double GB = 1.0 / (1 << 30);
    check(fits == 0, "does not fit: -b %d wants %.2f GiB, %s has %.2f GiB free; -b %d fits with %.2f GiB", asked,
          (double)wanted * GB, device_name(model->dev), (double)free_bytes * GB, fits,
          (double)plan_bytes(&model->plan) * GB);
    check(0, "does not fit: -b %d wants %.2f GiB, %s has %.2f GiB free; even -b 1 wants %.2f GiB, %.2f GiB of it for "
          "weights and optimizer: a smaller model (-e) or sequence (-t) is needed", asked, (double)wanted * GB,
          device_name(model->dev), (double)free_bytes * GB, (double)plan_bytes(&model->plan) * GB,
          (double)(model->plan.category_bytes[MEMORY_PARAMETERS] + model->plan.category_bytes[MEMORY_MASTER] +
                   model->plan.category_bytes[MEMORY_MOMENTS] + model->plan.category_bytes[MEMORY_GRADIENTS]) * GB);
}

// Views of one layer: everything that is an address inside a larger buffer, and who shares scratch.
static void wire_layer(Model* model, int l) {
    LayerWeights* w = &model->w[l];
    LayerGrads* g = &model->g[l];
    Scratch* s = &model->scratch;
    size_t C = (size_t)model->config.channels;
    const TensorSpec* spec = model->table.tensor;
    float* grads = model->grads;
    w->ln1w = model->params[TENSOR_LN1W] + l * C;
    w->ln1b = model->params[TENSOR_LN1B] + l * C;
    w->ln2w = model->params[TENSOR_LN2W] + l * C;
    w->ln2b = model->params[TENSOR_LN2B] + l * C;
    g->ln1w = grads + spec[TENSOR_LN1W].offset + l * C;
    g->ln1b = grads + spec[TENSOR_LN1B].offset + l * C;
    g->ln2w = grads + spec[TENSOR_LN2W].offset + l * C;
    g->ln2b = grads + spec[TENSOR_LN2B].offset + l * C;
    for (int k = 0; k < NUM_LINEARS; k++) {
        const TensorSpec* weight = &spec[linear_weight_tensor[k]];
        const TensorSpec* bias = &spec[linear_bias_tensor[k]];
        E4m3Tensor* x = &model->a[l].x[k];
        E5m2Tensor* dy = &model->da[l].dy[k];
        w->bias[k] = model->params[linear_bias_tensor[k]] + l * bias->n;
        g->w[k] = grads + weight->offset + l * weight->n;
        g->bias[k] = grads + bias->offset + l * bias->n;
        // the residual gradients and dqkv exist in BF16 in any case; dfc only where fc itself computes in BF16
        dy->wide = k == LINEAR_QKV ? s->dwide : k == LINEAR_FC ? NULL : s->dresidual;
        if (linear_is_fp8(model, l, (LinearName)k)) {
            x->data = s->x_row;
            dy->data = s->dy_row;
            dy->transposed = s->dy_col;
            x->slot = slot_of(model, l, (LinearName)k, SLOT_OF_INPUT);
            w->w[k].slot = slot_of(model, l, (LinearName)k, SLOT_OF_WEIGHT);
            dy->slot = slot_of(model, l, (LinearName)k, SLOT_OF_GRADIENT);
        } else if (k == LINEAR_FC) {
            dy->wide = s->dwide; // in place of gelu's gradient
        }
        x->recipe = w->w[k].recipe = dy->recipe = model->recipe;
    }
}

static void wire_head(Model* model) {
    Head* head = &model->head;
    Scratch* s = &model->scratch;
    head->w.wide = model->params[TENSOR_WTE];
    head->w.recipe = head->x.recipe = head->dlogits.recipe = model->recipe;
    if (!model->train->fp8_lm_head) {
        head->x.wide = s->lnf;
        head->dlogits.wide = s->logits;
        return;
    }
    head->x.data = s->x_row;
    head->x.transposed = s->x_row + (size_t)model->head_rows * model->config.channels;
    head->dlogits.data = s->dy_row;
    head->dlogits.transposed = s->dy_col;
    head->x.slot = slot_of(model, model->config.num_layers, (LinearName)0, SLOT_OF_INPUT);
    head->w.slot = slot_of(model, model->config.num_layers, (LinearName)0, SLOT_OF_WEIGHT);
    head->dlogits.slot = slot_of(model, model->config.num_layers, (LinearName)0, SLOT_OF_GRADIENT);
}

// How FP8 producers behave from here on: measure before they write, and record amaxes for the next step's scales.
static void set_scaling(Model* model, int measure_first, int record) {
    for (int l = 0; l < model->config.num_layers; l++) {
        for (int k = 0; k < NUM_LINEARS; k++) {
            model->a[l].x[k].measure_first = model->da[l].dy[k].measure_first = measure_first;
            model->a[l].x[k].record = model->da[l].dy[k].record = record;
        }
    }
    model->head.x.measure_first = measure_first;
    model->head.x.record = record;
}

static void init_slots(Model* model) {
    ScaleSlot* slots = (ScaleSlot*)calloc_or_die((size_t)model->num_slots, sizeof(ScaleSlot));
    SlotPolicy activations = model->train->recipe == RECIPE_CURRENT ? SLOT_JUST_IN_TIME : SLOT_DELAYED;
    for (int l = 0; l < model->config.num_layers; l++) {
        for (int k = 0; k < NUM_LINEARS; k++) {
            ScaleSlot* slot = slots + ((size_t)l * NUM_LINEARS + k) * SLOTS_PER_LINEAR;
            int is_fp8 = linear_is_fp8(model, l, (LinearName)k);
            scale_slot_init(slot + SLOT_OF_INPUT, E4M3_MAX, is_fp8 ? activations : SLOT_UNUSED);
            scale_slot_init(slot + SLOT_OF_WEIGHT, E4M3_MAX, is_fp8 ? SLOT_WEIGHT : SLOT_UNUSED);
            scale_slot_init(slot + SLOT_OF_GRADIENT, E5M2_MAX, is_fp8 ? activations : SLOT_UNUSED);
        }
    }
    if (model->train->fp8_lm_head) {
        ScaleSlot* slot = slots + (size_t)model->config.num_layers * NUM_LINEARS * SLOTS_PER_LINEAR;
        scale_slot_init(slot + SLOT_OF_INPUT, E4M3_MAX, activations);
        scale_slot_init(slot + SLOT_OF_WEIGHT, E4M3_MAX, SLOT_WEIGHT);
        scale_slot_init(slot + SLOT_OF_GRADIENT, E5M2_MAX, SLOT_STATIC);
        // |dlogits| = |p - y| dloss <= dloss: 1 becomes 2^15 (the largest is 1.75 * 2^15), so p keeps all bits of E5M2
        // down to 2^-14 / 2^15 = 2^-29 and some down to 2^-31; below 2^-32 it is 0. Uniform over 50,257 it is 2^-15.6.
        slot[SLOT_OF_GRADIENT].scale = 0x1p15f / loss_weight(model);
    }
    device_copy_in(model->dev, model->slots, slots, (size_t)model->num_slots * sizeof(ScaleSlot));
    device_sync(model->dev);
    free(slots);
    model->slots_warming = model->train->precision == PRECISION_FP8;
}

// A model without memory: enough to plan it.
static void model_outline(Model* model, Device* dev, Comm* comm, GptConfig config, const TrainConfig* train) {
    memset(model, 0, sizeof(*model));
    model->dev = dev;
    model->comm = comm;
    model->config = config;
    model->train = train;
    model->table = parameter_table(config);
    exchange_create(&model->exchange, dev, comm, &model->table, train);
    ScaleRecipe recipe = {train->amax_history, (AmaxAlgo)train->amax_algo, train->margin, train->headroom};
    model->recipe = recipe;
    int L = config.num_layers;
    model->num_slots = (L * NUM_LINEARS + train->fp8_lm_head) * SLOTS_PER_LINEAR;
    model->w = (LayerWeights*)calloc_or_die((size_t)L, sizeof(LayerWeights));
    model->g = (LayerGrads*)calloc_or_die((size_t)L, sizeof(LayerGrads));
    model->a = (LayerActs*)calloc_or_die((size_t)L, sizeof(LayerActs));
    model->da = (LayerActGrads*)calloc_or_die((size_t)L, sizeof(LayerActGrads));
    model->T = train->seq_len;
    size_t matmul = matmul_workspace_bytes(), reduction = reduction_workspace_bytes(dev, 4 * config.channels);
    model->workspace_bytes = reduction > matmul ? reduction : matmul;
}

// Attention's part of the workspace. A library may make its plans here, which takes a moment.
static void add_attention_workspace(Model* model, int B) {
    int NH = model->config.num_heads, HS = model->config.channels / NH;
    size_t attention = attention_workspace_bytes(model->dev, B, model->T, NH, HS);
    model->workspace_bytes = attention > model->workspace_bytes ? attention : model->workspace_bytes;
}

// Everything but the values of the weights: plan, check, allocate, wire. Prints the plan on rank 0.
// dev and comm are open; dry_run stops before anything is allocated.
static void model_create(Model* model, Device* dev, Comm* comm, GptConfig config, const TrainConfig* train) {
    model_outline(model, dev, comm, config, train);
    int L = config.num_layers;
    add_attention_workspace(model, train->batch_size);
    plan_model(model, train->batch_size);
    if (comm_rank(comm) == 0) { plan_print(&model->plan, stdout); }
    check_plan_fits(model);
    if (train->dry_run) { return; }

    model->memory = device_malloc(dev, plan_bytes(&model->plan));
    plan_place(&model->plan, model->memory);
    device_set_workspace(dev, model->workspace, model->workspace_bytes);
    model->scratch.dln = model->scratch.lnf; // the LM head's dgrad comes after its wgrad, chunk by chunk
    model->batch = batch_at(model->batch.tokens, (size_t)model->B * model->T);
    for (int l = 0; l < L; l++) {
        wire_layer(model, l);
    }
    wire_head(model);
    exchange_place(&model->exchange, &model->table, model->params, &model->state->saturated);
    init_slots(model);
    model->batches = batch_ring_create(dev, model->B * model->T, train->grad_accum_steps, config.vocab_size,
                                       train->overfit_single_batch);
}

static void model_free(Model* model) {
    if (model->memory != NULL) {
        device_release(model->dev, model->memory);
        batch_ring_free(&model->batches);
    }
    plan_free(&model->plan);
    exchange_free(&model->exchange);
    free(model->w);
    free(model->g);
    free(model->a);
    free(model->da);
}

// -b auto: set train->batch_size (see micro_batch.h), and say so on rank 0. All ranks choose the same.
static void choose_batch_size(TrainConfig* train, Device* dev, Comm* comm, GptConfig config) {
    MicroBatch candidates[MAX_MICRO_BATCHES];
    Chip chip = device_nominal_chip(dev);
    int n = micro_batch_candidates(candidates, &chip, &config, train);
    check(n > 0, "--batch-size (-b) auto: no B makes B * T * GPUs = B * %d * %d divide the %lld tokens of a step (-d) "
          "and, with --precision fp8, B * T a multiple of 16", train->seq_len, train->num_ranks,
          (long long)train->total_batch_tokens);
    size_t free_bytes, total_bytes;
    int64_t least, most;
    device_memory(dev, &free_bytes, &total_bytes);
    comm_host_min_max(comm, (int64_t)free_bytes, &least, &most);
    free_bytes = (size_t)least / 32 * 31; // libraries load code and make plans later
    Model model;
    model_outline(&model, dev, comm, config, train);
    for (int i = 0; i < n; i++) {
        plan_model(&model, candidates[i].B);
        candidates[i].bytes = plan_bytes(&model.plan);
        plan_free(&model.plan);
    }
    // attention's workspace comes last: asking for it makes plans, better of what is chosen only
    int chosen = -1, settled = 0;
    while (!settled && (chosen = micro_batch_choose(candidates, n, free_bytes)) >= 0) {
        size_t workspace = model.workspace_bytes;
        add_attention_workspace(&model, candidates[chosen].B);
        plan_model(&model, candidates[chosen].B);
        candidates[chosen].bytes = plan_bytes(&model.plan);
        plan_free(&model.plan);
        model.workspace_bytes = workspace;
        settled = candidates[chosen].bytes <= free_bytes;
    }
    model_free(&model);
    comm_host_min_max(comm, chosen, &least, &most); // ranks with other GPUs may wish for another
    chosen = (int)least;
    train->batch_size = candidates[chosen < 0 ? 0 : chosen].B; // none fits: model_create tries, and has the numbers
    if (comm_rank(comm) != 0) { return; }
    if (train->dry_run) { micro_batch_print_all(stdout, candidates, n, free_bytes); }
    micro_batch_print(stdout, candidates, n, chosen, free_bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// weights: the FP32 master copy is the model; what the passes read is made from it once per step

// The optimizer's view of layer l of tensor t. Linear weights go layer by layer, each with its own slot or BF16 copy.
static ParamState param_state(Model* model, TensorName t, int l, bf16* param, ScaleSlot* slot, size_t n) {
    size_t offset = model->table.tensor[t].offset + (size_t)l * model->table.tensor[t].n;
    ParamState p = {model->master + offset, model->m + offset, model->v + offset, model->grads + offset,
                    param, slot, 0, 1, n, offset};
    return p;
}

// Call visit(model, p, decay, context) for every parameter tensor of a model that is not sharded.
static void for_each_tensor(Model* model, void (*visit)(Model*, ParamState, int, void*), void* context) {
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &model->table.tensor[t];
        if (!spec->is_linear) {
            size_t n = spec->layers * spec->n;
            ScaleSlot* slot = t == TENSOR_WTE ? model->head.w.slot : NULL; // the one tensor that is read in both forms
            visit(model, param_state(model, (TensorName)t, 0, model->params[t], slot, n), spec->decay, context);
        }
    }
    for (int l = 0; l < model->config.num_layers; l++) {
        for (int k = 0; k < NUM_LINEARS; k++) {
            const E4m3Tensor* w = &model->w[l].w[k];
            TensorName t = linear_weight_tensor[k];
            ParamState p = param_state(model, t, l, w->wide, w->slot, model->table.tensor[t].n);
            visit(model, p, model->table.tensor[t].decay, context);
        }
    }
}

// The forms of a piece that the passes read. A tensor that is no linear's weight has only wide, and slot if it is wte.
static E4m3Tensor piece_weight(const Model* model, const Piece* piece) {
    for (int k = 0; k < NUM_LINEARS; k++) {
        if (piece->tensor == (int)linear_weight_tensor[k]) { return model->w[piece->layer].w[k]; }
    }
    if (piece->tensor == TENSOR_WTE) { return model->head.w; }
    E4m3Tensor w = {model->params[piece->tensor] + (size_t)piece->layer * piece->n, NULL, NULL, NULL, model->recipe, 0,
                    0};
    return w;
}

// The same for this rank's slice of every piece of a sharded model.
static void for_each_slice(Model* model, void (*visit)(Model*, ParamState, int, void*), void* context) {
    const Exchange* x = &model->exchange;
    for (int b = 0; b < x->shards.num_buckets; b++) {
        const Bucket* bucket = &x->shards.bucket[b];
        for (int i = 0; i < bucket->num_pieces; i++) {
            const Piece* piece = &bucket->piece[i];
            SliceRange own = piece_owned(piece, x->rank);
            if (own.begin == own.end) { continue; }
            E4m3Tensor w = piece_weight(model, piece);
            size_t at = exchange_shard_at(bucket, piece), offset = piece->offset + own.begin;
            ParamState p = {model->master + at, model->m + at, model->v + at, model->grads + offset,
                            w.wide == NULL ? NULL : w.wide + own.begin, w.slot, 0, 1, own.end - own.begin, offset};
            visit(model, p, model->table.tensor[piece->tensor].decay, context);
        }
    }
}

static void for_each_parameter(Model* model, void (*visit)(Model*, ParamState, int, void*), void* context) {
    if (model->exchange.is_sharded) {
        for_each_slice(model, visit, context);
    } else {
        for_each_tensor(model, visit, context);
    }
}

static void visit_from_master(Model* model, ParamState p, int decay, void* context) {
    (void)decay, (void)context;
    params_from_master(model->dev, p, model->rounding);
}

static void visit_update(Model* model, ParamState p, int decay, void* context) {
    AdamW adamw = *(const AdamW*)context;
    if (!decay) { adamw.weight_decay = 0.0f; }
    adamw_update(model->dev, p, adamw, model->state);
}

// The FP8 weights with their transposes, from the master weights and the slots' scales.
static void quantize_weights(Model* model) {
    Device* dev = model->dev;
    for (int l = 0; l < model->config.num_layers; l++) {
        for (int k = 0; k < NUM_LINEARS; k++) {
            if (!linear_is_fp8(model, l, (LinearName)k)) { continue; }
            const TensorSpec* spec = &model->table.tensor[linear_weight_tensor[k]];
            const float* master = model->master + spec->offset + (size_t)l * spec->n;
            quantize_weight(dev, model->w[l].w[k], master, (int)spec->rows, (int)spec->cols);
        }
    }
    if (model->train->fp8_lm_head) {
        const TensorSpec* spec = &model->table.tensor[TENSOR_WTE];
        quantize_weight(dev, model->head.w, model->master + spec->offset, (int)spec->rows, (int)spec->cols);
    }
}

// This rank's slices of the FP8 weights, where all ranks' are gathered.
static void quantize_slices(Model* model) {
    const Exchange* x = &model->exchange;
    for (int b = 0; b < x->shards.num_buckets; b++) {
        const Bucket* bucket = &x->shards.bucket[b];
        for (int i = 0; i < bucket->num_pieces; i++) {
            const Piece* piece = &bucket->piece[i];
            E4m3Tensor w = piece_weight(model, piece);
            if (w.data == NULL) { continue; }
            SliceRange own = piece_owned(piece, x->rank);
            quantize_slice(model->dev, w.data + own.begin, w.slot, model->master + exchange_shard_at(bucket, piece),
                           own.end - own.begin);
        }
    }
}

// All ranks' slices of what block l reads of the linears, or (l == L) of the FP8 head's weight. Between comm_begin and
// comm_end; with block 0's go the BF16 parameters of all blocks.
static void gather_weights(Model* model, int l) {
    Exchange* x = &model->exchange;
    CommGather gathers[NUM_LINEARS + 1];
    int n = 0;
    if (l == 0) { gathers[n++] = exchange_params_gather(x); }
    if (l == model->config.num_layers && model->head.w.data != NULL) {
        size_t slice = slice_elements(model->table.tensor[TENSOR_WTE].n, x->num_ranks);
        gathers[n++] = exchange_gather_of(x, model->head.w.data, slice * sizeof(e4m3));
    }
    for (int k = 0; k < NUM_LINEARS && l < model->config.num_layers; k++) {
        const E4m3Tensor* w = &model->w[l].w[k];
        size_t slice = slice_elements(model->table.tensor[linear_weight_tensor[k]].n, x->num_ranks);
        gathers[n++] = w->data != NULL ? exchange_gather_of(x, w->data, slice * sizeof(e4m3))
                                       : exchange_gather_of(x, w->wide, slice * sizeof(bf16));
    }
    comm_all_gathers(model->comm, model->dev, gathers, n);
}

// They are here: what every rank makes of them itself.
static void finish_weights(Model* model, int l) {
    Device* dev = model->dev;
    if (l == 0) { exchange_params_unpack(&model->exchange); }
    if (l == model->config.num_layers) {
        const TensorSpec* spec = &model->table.tensor[TENSOR_WTE];
        const E4m3Tensor* w = &model->head.w;
        if (w->data != NULL) { transpose_weight(dev, w->transposed, w->data, (int)spec->rows, (int)spec->cols); }
        return;
    }
    for (int k = 0; k < NUM_LINEARS; k++) {
        const TensorSpec* spec = &model->table.tensor[linear_weight_tensor[k]];
        const E4m3Tensor* w = &model->w[l].w[k];
        if (w->data != NULL) { transpose_weight(dev, w->transposed, w->data, (int)spec->rows, (int)spec->cols); }
    }
}

// Wait for the weights of blocks up to l (L: of all), each time starting the next block's on their way: they travel
// while this one computes. Collective in the step that follows an update; else there is nothing to do.
static void want_weights(Model* model, int l) {
    int L = model->config.num_layers;
    while (model->layers_ready <= l) {
        int ready = model->layers_ready++;
        comm_end(model->comm, model->dev);
        if (ready < L) {
            comm_begin(model->comm, model->dev);
            gather_weights(model, ready + 1);
        }
        finish_weights(model, ready);
    }
}

// Every rank has updated its slices: the first blocks' are sent, those of the others when they are wanted.
static void send_weights(Model* model) {
    exchange_params_pack(&model->exchange);
    comm_begin(model->comm, model->dev);
    gather_weights(model, 0);
    model->layers_ready = 0;
}

// From updated master weights and recorded amaxes: the next scales of all slots (weights included, from the amax just
// measured), and the weights that the passes read.
static void update_scales_and_weights(Model* model) {
    Device* dev = model->dev;
    int is_sharded = model->exchange.is_sharded;
    if (model->train->precision == PRECISION_FP8) {
        scale_slots_gather(dev, model->amaxes, model->slots, model->num_slots);
        comm_max(model->comm, dev, model->amaxes, (size_t)model->num_slots);
        scale_slots_step(dev, model->slots, model->amaxes, model->num_slots, model->recipe, model->state);
        if (is_sharded) {
            quantize_slices(model);
        } else {
            quantize_weights(model);
        }
    }
    model->layers_ready = model->config.num_layers + 1;
    if (is_sharded) { send_weights(model); }
}

static StepState read_state(Model* model) {
    StepState state;
    device_copy_out(model->dev, &state, model->state, sizeof(state));
    return state;
}

// Everything that the passes read of the master weights, after num_updates updates the last of which rounded as
// `rounding` says. Slots of activations and gradients stay as they are: their amaxes are 0, which says nothing.
static void model_take_master(Model* model, int num_updates, AdamW rounding) {
    model->num_updates = num_updates;
    model->rounding = rounding;
    device_zero(model->dev, model->state, sizeof(StepState));
    for_each_parameter(model, visit_from_master, NULL);
    update_scales_and_weights(model);
    model->slots_warming = read_state(model).slots_warming;
}

// Take `values` (num_parameters, llm.c's order) as the weights; moments zero, no update done yet.
static void model_set_weights(Model* model, const float* values) {
    size_t n_bytes = state_elements(model) * sizeof(float);
    AdamW nearest;
    memset(&nearest, 0, sizeof(nearest));
    StateRanges ranges = state_ranges(model, 0);
    load_from_host(model->dev, model->master, &ranges, values);
    state_ranges_free(&ranges);
    device_zero(model->dev, model->m, n_bytes);
    device_zero(model->dev, model->v, n_bytes);
    model_take_master(model, 0, nearest);
}

// ---------------------------------------------------------------------------------------------------------------------
// forward

// tokens (BT) on the device -> the residual stream in front of the final LayerNorm, its last addition (mid + branch)
// still to be made. Writes everything the backward pass reads of the blocks.
static void gpt_forward(Model* model, const int* tokens, int B, int T) {
    Device* dev = model->dev;
    Scratch* s = &model->scratch;
    int C = model->config.channels, NH = model->config.num_heads, L = model->config.num_layers, BT = B * T;
    want_weights(model, 0);
    embedding_forward(dev, model->a[0].in, tokens, model->params[TENSOR_WTE], model->params[TENSOR_WPE], B, T, C);
    for (int l = 0; l < L; l++) {
        const LayerWeights* w = &model->w[l];
        const LayerActs* a = &model->a[l];
        want_weights(model, l);
        // what enters the block: the embedding, or the block below's mid + fcproj
        ResidualAdd enter = {NULL, a->in, NULL, NULL};
        if (l > 0) {
            ResidualAdd below = {a->in, model->a[l - 1].mid, s->branch, model->w[l - 1].bias[LINEAR_FCPROJ]};
            enter = below;
        }
        // attention:  mid = in + proj(attention(qkv(ln1(in))))
        layernorm_forward(dev, a->x[LINEAR_QKV], a->ln1_stats, enter, w->ln1w, w->ln1b, BT, C);
        matmul_forward(dev, a->qkv, a->x[LINEAR_QKV], w->w[LINEAR_QKV], w->bias[LINEAR_QKV], BT, C, 3 * C);
        attention_forward(dev, a->x[LINEAR_PROJ], a->lse, a->qkv, B, T, NH, C / NH);
        matmul_forward(dev, s->branch, a->x[LINEAR_PROJ], w->w[LINEAR_PROJ], NULL, BT, C, C);
        // mlp:        out = mid + fcproj(gelu(fc(ln2(mid))));  biases of proj, fc, fcproj are added by who reads next
        ResidualAdd middle = {a->mid, a->in, s->branch, w->bias[LINEAR_PROJ]};
        layernorm_forward(dev, a->x[LINEAR_FC], a->ln2_stats, middle, w->ln2w, w->ln2b, BT, C);
        matmul_forward(dev, a->fc, a->x[LINEAR_FC], w->w[LINEAR_FC], NULL, BT, C, 4 * C);
        gelu_forward(dev, a->x[LINEAR_FCPROJ], a->fc, w->bias[LINEAR_FC], BT, 4 * C);
        matmul_forward(dev, s->branch, a->x[LINEAR_FCPROJ], w->w[LINEAR_FCPROJ], NULL, BT, 4 * C, C);
    }
}

// The final LayerNorm of rows [row, row + rows): what the LM head reads next. While its slot warms up, each call has
// its own scale, so in FP8 the products with x come before the next call.
static E4m3Tensor head_input(Model* model, int row, int rows) {
    int C = model->config.channels, L = model->config.num_layers;
    size_t at = (size_t)row * C;
    want_weights(model, L);
    E4m3Tensor x = model->head.x;
    if (x.wide != NULL) { x.wide += at; }
    ResidualAdd leave = {model->final_residual + at, model->a[L - 1].mid + at, model->scratch.branch + at,
                         model->w[L - 1].bias[LINEAR_FCPROJ]};
    LayerNormStats stats = {model->lnf_stats.mean + row, model->lnf_stats.rstd + row};
    layernorm_forward(model->dev, x, stats, leave, model->params[TENSOR_LNFW], model->params[TENSOR_LNFB], rows, C);
    return x;
}

// Final LayerNorm, LM head and loss of all rows, a chunk of logits at a time: losses (BT) from what gpt_forward left
// and targets (BT) on the device. with_gradient: also dwte += (or =, see accumulate) and dln = dlnf, both of dloss *
// sum of losses.
static void gpt_loss(Model* model, const int* targets, float dloss, int with_gradient, int BT) {
    Device* dev = model->dev;
    Scratch* s = &model->scratch;
    int C = model->config.channels, V = model->config.vocab_size, Vp = model->config.padded_vocab_size;
    const Head* head = &model->head;
    for (int row = 0; row < BT; row += model->head_rows) {
        int rows = BT - row < model->head_rows ? BT - row : model->head_rows;
        E4m3Tensor x = head_input(model, row, rows);
        matmul_forward(dev, s->logits, x, head->w, NULL, rows, C, Vp);
        classifier(dev, head->dlogits, model->losses + row, s->logits, targets + row, dloss, with_gradient, rows, V,
                   Vp);
        if (with_gradient) {
            float* dwte = model->grads + model->table.tensor[TENSOR_WTE].offset;
            matmul_wgrad(dev, dwte, head->dlogits, x, model->accumulate || row > 0, rows, C, Vp);
            matmul_dgrad(dev, s->dln + (size_t)row * C, head->dlogits, head->w, rows, C, Vp);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// backward

// dln holds dlnf. Adds to every gradient but the LM head's; those of the linears it overwrites unless
// model->accumulate. Inside, "dy" of a linear is written by the op above it. last_micro_step: the gradients of a layer
// are complete when its turn is over, and the ranks reduce them while the layers below compute.
static void gpt_backward(Model* model, TokenIndex index, int last_micro_step, int B, int T) {
    Device* dev = model->dev;
    Scratch* s = &model->scratch;
    int C = model->config.channels, NH = model->config.num_heads, L = model->config.num_layers, BT = B * T;
    int accumulate = model->accumulate;
    float* grads = model->grads;
    const TensorSpec* spec = model->table.tensor;
    LayerNormBackward last = {model->da[L - 1].dy[LINEAR_FCPROJ], grads + spec[TENSOR_LNFW].offset,
                              grads + spec[TENSOR_LNFB].offset, model->g[L - 1].bias[LINEAR_FCPROJ], s->dln, NULL,
                              model->final_residual, model->lnf_stats, model->params[TENSOR_LNFW], BT, C};
    layernorm_backward(dev, last);
    for (int l = L - 1; l >= 0; l--) {
        const LayerWeights* w = &model->w[l];
        const LayerGrads* g = &model->g[l];
        const LayerActs* a = &model->a[l];
        const E5m2Tensor* dy = model->da[l].dy;
        // mlp
        matmul_wgrad(dev, g->w[LINEAR_FCPROJ], dy[LINEAR_FCPROJ], a->x[LINEAR_FCPROJ], accumulate, BT, 4 * C, C);
        matmul_dgrad(dev, s->dwide, dy[LINEAR_FCPROJ], w->w[LINEAR_FCPROJ], BT, 4 * C, C);
        gelu_backward(dev, dy[LINEAR_FC], g->bias[LINEAR_FC], s->dwide, a->fc, w->bias[LINEAR_FC], BT, 4 * C);
        matmul_wgrad(dev, g->w[LINEAR_FC], dy[LINEAR_FC], a->x[LINEAR_FC], accumulate, BT, C, 4 * C);
        matmul_dgrad(dev, s->dln, dy[LINEAR_FC], w->w[LINEAR_FC], BT, C, 4 * C);
        LayerNormBackward middle = {dy[LINEAR_PROJ], g->ln2w, g->ln2b, g->bias[LINEAR_PROJ], s->dln, s->dresidual,
                                    a->mid, a->ln2_stats, w->ln2w, BT, C};
        layernorm_backward(dev, middle);
        // attention
        matmul_wgrad(dev, g->w[LINEAR_PROJ], dy[LINEAR_PROJ], a->x[LINEAR_PROJ], accumulate, BT, C, C);
        matmul_dgrad(dev, s->dln, dy[LINEAR_PROJ], w->w[LINEAR_PROJ], BT, C, C);
        attention_backward(dev, dy[LINEAR_QKV], g->bias[LINEAR_QKV], s->dln, a->x[LINEAR_PROJ].wide, a->lse, a->qkv, B,
                           T, NH, C / NH);
        matmul_wgrad(dev, g->w[LINEAR_QKV], dy[LINEAR_QKV], a->x[LINEAR_QKV], accumulate, BT, C, 3 * C);
        matmul_dgrad(dev, s->dln, dy[LINEAR_QKV], w->w[LINEAR_QKV], BT, C, 3 * C);
        // what leaves the block downwards: into the block below's fcproj, or into the embedding
        E5m2Tensor embedding = {s->dresidual, NULL, NULL, NULL, model->recipe, 0, 0};
        LayerNormBackward enter = {l > 0 ? model->da[l - 1].dy[LINEAR_FCPROJ] : embedding, g->ln1w, g->ln1b,
                                   l > 0 ? model->g[l - 1].bias[LINEAR_FCPROJ] : NULL, s->dln, s->dresidual,
                                   a->in, a->ln1_stats, w->ln1w, BT, C};
        layernorm_backward(dev, enter);
        if (last_micro_step) { exchange_bucket(&model->exchange, grads); }
    }
    embedding_backward(dev, grads + spec[TENSOR_WTE].offset, grads + spec[TENSOR_WPE].offset, s->dresidual, index, B, T,
                       C);
    if (last_micro_step) {
        exchange_bucket(&model->exchange, grads);
        exchange_finish(&model->exchange, grads);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// one optimizer step

// Zeros for the gradients that every micro-step adds to. Those of the matrices and of the embedding, nearly all, are
// overwritten by the first micro-step instead: 4 bytes per parameter less to write, and 4 less to read.
static void zero_small_gradients(Model* model) {
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &model->table.tensor[t];
        if (spec->is_linear || t == TENSOR_WTE) { continue; }
        device_zero(model->dev, model->grads + spec->offset, spec->layers * spec->n * sizeof(float));
    }
}

// Gradients of the mean loss over grad_accum_steps micro-batches of all ranks, into model->grads (with ZeRO-1 into this
// rank's slices of it); loss and norm into the state.
static void accumulate_gradients(Model* model, DataLoader* loader) {
    Device* dev = model->dev;
    int B = model->B, T = model->T, BT = B * T, accum = model->train->grad_accum_steps;
    float dloss = loss_weight(model);
    zero_small_gradients(model);
    device_zero(dev, model->state, sizeof(StepState));
    set_scaling(model, model->slots_warming > 0, 1);
    for (int i = 0; i < accum; i++) {
        model->accumulate = i > 0;
        TokenIndex index = batch_ring_next(&model->batches, &model->batch, loader, i == 0);
        gpt_forward(model, model->batch.tokens, B, T);
        gpt_loss(model, model->batch.targets, dloss, 1, BT);
        loss_add(dev, model->state, model->losses, dloss, (size_t)BT);
        gpt_backward(model, index, i + 1 == accum, B, T);
    }
    exchange_norm(&model->exchange, model->state, model->grads, model->table.num_parameters);
}

// AdamW's next step at this learning rate.
static AdamW next_update(const Model* model, float learning_rate) {
    const TrainConfig* t = model->train;
    AdamW adamw = {learning_rate, t->beta1, t->beta2, t->eps, t->weight_decay, t->grad_clip, model->num_updates + 1,
                   t->param_rounding == PARAM_ROUNDING_STOCHASTIC, (uint64_t)t->seed};
    return adamw;
}

// The update, from gradients that are already there. apply = 0 leaves the weights (an outlier that the caller skips).
static void update(Model* model, AdamW adamw, int apply) {
    if (apply) { for_each_parameter(model, visit_update, &adamw); }
    update_scales_and_weights(model);
}

typedef enum { STEP_APPLIED, STEP_NOT_FINITE, STEP_OUTLIER } StepVerdict;

// One whole optimizer step at `learning_rate`. Fills the report's loss, norm, z-scores, skipped and slots_warming.
// A step whose loss or norm is not finite leaves the weights as they were, to the bit; so does an outlier (-sl, -sg).
// another_follows: while the device is busy, the next step's first batch is taken from the loader.
static StepVerdict train_step(Model* model, DataLoader* loader, float learning_rate, int another_follows,
                              OutlierDetector* loss_outliers, OutlierDetector* norm_outliers, StepReport* report) {
    const TrainConfig* t = model->train;
    int may_skip = t->skip_loss_z > 0.0f || t->skip_grad_z > 0.0f;
    int outlier = 0;
    accumulate_gradients(model, loader);
    if (may_skip) { // only then does the host wait before the update
        StepState state = read_state(model);
        report->loss_z = outlier_update(loss_outliers, state.loss);
        report->grad_norm_z = outlier_update(norm_outliers, state.grad_norm);
        outlier = outlier_skips(report->loss_z, t->skip_loss_z) || outlier_skips(report->grad_norm_z, t->skip_grad_z);
    }
    AdamW adamw = next_update(model, learning_rate);
    update(model, adamw, !outlier);
    if (another_follows) { batch_ring_ahead(&model->batches, loader); }
    StepState state = read_state(model);
    if (!may_skip) {
        report->loss_z = outlier_update(loss_outliers, state.loss);
        report->grad_norm_z = outlier_update(norm_outliers, state.grad_norm);
    }
    check_step_alike(model->comm, model->dev, &state, model->slots, model->num_slots);
    exchange_step_mu(&model->exchange, &state, model->table.num_parameters);
    report->loss = state.loss;
    report->grad_norm = state.grad_norm;
    report->slots_warming = model->slots_warming = state.slots_warming;
    report->skipped = state.skip || outlier;
    if (!report->skipped) {
        model->num_updates = adamw.t;
        model->rounding = adamw;
    }
    return state.skip ? STEP_NOT_FINITE : outlier ? STEP_OUTLIER : STEP_APPLIED;
}

// ---------------------------------------------------------------------------------------------------------------------
// evaluation: forward only, amaxes not recorded, so that looking at a run does not change it

// Mean loss over the first num_batches batches of the loader, over all ranks.
static float validate(Model* model, DataLoader* loader, int num_batches) {
    int BT = model->B * model->T;
    float factor = 1.0f / ((float)BT * (float)comm_num_ranks(model->comm));
    double sum = 0.0;
    set_scaling(model, model->slots_warming > 0, 0);
    dataloader_rewind(loader);
    for (int i = 0; i < num_batches; i++) {
        batch_ring_look(&model->batches, &model->batch, loader);
        device_zero(model->dev, model->state, sizeof(StepState));
        gpt_forward(model, model->batch.tokens, model->B, model->T);
        gpt_loss(model, model->batch.targets, 0.0f, 0, BT);
        loss_add(model->dev, model->state, model->losses, factor, (size_t)BT);
        comm_sum(model->comm, model->dev, &model->state->loss, 1);
        sum += read_state(model).loss;
    }
    return (float)(sum / num_batches);
}

#define SAMPLE_STREAM 1 // of the counter-based generator: text samples

// The longest text that one pass can see. FP8 products take multiples of 16 rows.
static int sample_capacity(const Model* model) {
    int BT = model->B * model->T, longest = model->config.max_seq_len, capacity = BT < longest ? BT : longest;
    return model->train->precision == PRECISION_FP8 ? capacity / 16 * 16 : capacity;
}

// The next token after tokens (t of them), drawn with temperature and top-k from the model's distribution.
// logits: host scratch (V). draw: which random number of the sample stream.
static int sample_next(Model* model, const int* tokens, int t, float* logits, uint64_t draw) {
    const TrainConfig* train = model->train;
    int C = model->config.channels, V = model->config.vocab_size, Vp = model->config.padded_vocab_size;
    // a multiple of 64 rows, so that shapes repeat (plans are cached per shape) and FP8 products can take them
    int capacity = sample_capacity(model);
    int T = (t + 63) / 64 * 64 < capacity ? (t + 63) / 64 * 64 : capacity;
    // causal: what comes after t cannot be seen
    batch_ring_look_at_text(&model->batches, &model->batch, tokens, t, T);
    gpt_forward(model, model->batch.tokens, 1, T);
    int rows = train->fp8_lm_head ? 16 : 1, row = (t - 1) / rows * rows; // FP8 products take multiples of 16 rows
    E4m3Tensor last = head_input(model, row, rows);
    matmul_forward(model->dev, model->scratch.logits, last, model->head.w, NULL, rows, C, Vp);
    bf16_to_host(model->dev, logits, model->scratch.logits + (size_t)(t - 1 - row) * Vp, (size_t)V);
    return sample_token(logits, V, train->sample_temperature, train->sample_top_k,
                        rng_uniform((uint64_t)train->seed, SAMPLE_STREAM, draw));
}

// Print a continuation of the prompt. Same model, same seed: same text.
static void generate(Model* model, const Tokenizer* tokenizer) {
    const TrainConfig* train = model->train;
    int capacity = sample_capacity(model);
    if (capacity == 0) { return; } // max_seq_len below 16
    int* tokens = (int*)malloc_or_die((size_t)capacity * sizeof(int));
    float* logits = (float*)malloc_or_die((size_t)model->config.vocab_size * sizeof(float));
    int end_of_text = tokenizer != NULL ? tokenizer->end_of_text : model->config.vocab_size - 1;
    set_scaling(model, model->slots_warming > 0, 0);
    int t = 0;
    tokens[t++] = end_of_text < model->config.vocab_size ? end_of_text : 0;
    for (const char* p = train->prompt; *p != 0 && t < capacity; p++) {
        tokens[t++] = (unsigned char)*p; // a prompt implies the byte-level vocabulary, see main
    }
    printf("--- sample ---\n%s", train->prompt);
    for (int i = 0; i < train->sample_length && t < capacity; i++) {
        tokens[t] = sample_next(model, tokens, t, logits, (uint64_t)i);
        tokenizer_print(stdout, tokenizer, tokens[t++]);
    }
    printf("\n--------------\n");
    fflush(stdout);
    free(tokens);
    free(logits);
}

// ---------------------------------------------------------------------------------------------------------------------
// the model's values: from random numbers, from a file, to a file

// The weights that the run starts from: of the model file (which *values already holds), or llm.c's initialisation.
static void start_weights(Model* model, float* values) {
    if (values == NULL) {
        values = (float*)malloc_or_die(model->table.num_parameters * sizeof(float));
        checkpoint_init_model(values, &model->config, (uint32_t)model->train->seed);
        long long n = (long long)model->table.num_parameters;
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
        for (long long i = 0; i < n; i++) {
            values[i] = bf16_round(values[i]); // llm.c's masters start from BF16 weights
        }
    }
    model_set_weights(model, values);
    free(values);
}

// All of master, m or v on the host of rank 0, to be freed there; NULL on the others. Collective.
static float* collect_state(Model* model, const float* array) {
    size_t n = model->table.num_parameters;
    float* values = comm_rank(model->comm) == 0 ? (float*)malloc_or_die(n * sizeof(float)) : NULL;
    want_weights(model, model->config.num_layers); // they pass through the same buffers
    exchange_collect(&model->exchange, values, array, n);
    return values;
}

// Write the master weights as an llm.c model file (--save-model, --save-dtype). Collective.
static void save_model(Model* model, const char* path) {
    float* values = collect_state(model, model->master);
    if (values == NULL) { return; }
    checkpoint_write_model(path, &model->config, values,
                           model->train->save_dtype == SAVE_FP32 ? MODEL_FILE_FP32 : MODEL_FILE_BF16);
    free(values);
    printf("wrote %s\n", path);
}

// ---------------------------------------------------------------------------------------------------------------------
// the loop

// Everything main holds beside the model.
typedef struct {
    DataLoader train_loader, val_loader;
    int has_train, has_val;
    Tokenizer tokenizer;
    int has_tokenizer;
    Logger logger;
    double started_s;    // seconds_now at the start of the program
    int num_steps;       // optimizer steps, those before a resume included
    int first_step;      // steps done before this process
    int steps_done;      // those included
    int64_t first_tokens; // trained on in those before this process
    uint64_t llmc_rng;   // llm.c's generator before its last update, while we have made none; 0: we have
    int num_val_batches; // per validation
    double step_floor_s; // what the roofline allows for a step, seconds
    OutlierDetector loss_outliers, norm_outliers;
    int skips_in_a_row;  // steps that were not finite
    Save save;
    Profile profile;     // --profile
    CommStats comm_before; // of the last step's weights, when something was looked at in between
} Run;

static void open_data(Run* run, const TrainConfig* train, const GptConfig* config) {
    DataOptions options = {train->batch_size, train->seq_len, train->rank, train->num_ranks, config->vocab_size,
                           DATA_SHUFFLED, (uint32_t)train->seed};
    if (train->overfit_single_batch) { options.order = DATA_IN_ORDER; }
    run->num_steps = train->max_steps;
    // a run that only exports what it resumes wants the data's order, not the data
    run->has_train = run->num_steps != 0 || (train->export_llmc[0] != 0 && train->train_data[0] != 0);
    if (run->has_train) {
        const char* pattern = train->overfit_single_batch ? train->val_data : train->train_data;
        dataloader_open(&run->train_loader, pattern, options);
        int64_t epoch = run->train_loader.num_tokens / train->total_batch_tokens;
        if (run->num_steps == -1) {
            check(epoch > 0, "one epoch of '%s' is %lld tokens, less than one step of %lld: want more data, a smaller -d, "
                  "or a number of steps (-x)", pattern, (long long)run->train_loader.num_tokens,
                  (long long)train->total_batch_tokens);
            run->num_steps = (int)epoch;
        }
    }
    run->has_val = train->val_data[0] != 0 && train->val_every > 0;
    if (run->has_val) {
        options.order = DATA_IN_ORDER;
        dataloader_open(&run->val_loader, train->val_data, options);
        run->num_val_batches = train->val_max_steps == -1 ? (int)run->val_loader.num_batches : train->val_max_steps;
    }
}

// Tokens trained on in the first `steps` steps. (The run may have had another batch before it was resumed.)
static int64_t tokens_after(const Run* run, const TrainConfig* train, int steps) {
    return run->first_tokens + (int64_t)(steps - run->first_step) * train->total_batch_tokens;
}

// Is this step one of every N, or the last? (0: never)
static int is_due(int step, int every, int last_step) { return every > 0 && (step % every == 0 || last_step); }

// ---------------------------------------------------------------------------------------------------------------------
// checkpoints (lib/save.h, lib/load.h): what of the run and the model goes into them, and what follows from one

static RunState run_state_now(const Run* run, const Model* model, int steps_done) {
    RunState s;
    memset(&s, 0, sizeof(s));
    s.version = RUN_STATE_VERSION;
    s.step = steps_done;
    s.num_updates = model->num_updates;
    s.tokens = tokens_after(run, model->train, steps_done);
    s.seed = (int64_t)model->rounding.seed;
    s.stochastic = model->rounding.stochastic;
    run_state_set_shape(&s, &model->config);
    s.num_ranks = comm_num_ranks(model->comm);
    run_state_set_data(&s, &run->train_loader, batch_ring_position(&model->batches, &run->train_loader));
    s.num_slots = model->num_slots;
    s.slot_bytes = sizeof(ScaleSlot);
    s.amax_history = model->recipe.history, s.amax_algo = model->recipe.algo, s.margin = model->recipe.margin;
    s.headroom = (double)model->recipe.headroom;
    s.skips_in_a_row = run->skips_in_a_row;
    s.loss_outliers = run->loss_outliers;
    s.norm_outliers = run->norm_outliers;
    s.grad_mu = model->exchange.mu;
    return s;
}

// Begin the checkpoint after `steps_done` steps, as save_begin does.
static void begin_checkpoint(Run* run, Model* model, int steps_done) {
    StateArrays arrays = {model->master, model->m, model->v};
    RunState state = run_state_now(run, model, steps_done);
    save_begin(&run->save, &arrays, model->slots, &state);
}

// What follows from the weights and moments that all ranks have just read. slots: of our checkpoint, NULL: llm.c's have
// none, they warm up.
static void take_checkpoint(Model* model, const Resume* resume, const ScaleSlot* slots) {
    const RunState* state = &resume->state;
    AdamW rounding = next_update(model, 0.0f);
    rounding.t = resume->step;
    init_slots(model);
    if (slots != NULL) {
        load_slots(model->dev, model->slots, model->num_slots, model->recipe, state, slots);
        rounding.t = (int)state->num_updates;
        rounding.seed = (uint64_t)state->seed;
        rounding.stochastic = state->stochastic && state->num_updates > 0;
        model->exchange.mu = state->grad_mu;
    }
    model_take_master(model, rounding.t, rounding);
}

// Go on from the checkpoint that `resume` has opened, or from one before it when it turns out to be damaged, on all
// ranks from the same.
static void resume_run(Run* run, Model* model, Resume* resume) {
    const TrainConfig* train = model->train;
    double start = seconds_now();
    StateArrays arrays = {model->master, model->m, model->v};
    StateRanges ranges = state_ranges(model, 0);
    ScaleSlot* slots = load_resumed(model->dev, model->comm, resume, &model->config, &arrays, &ranges);
    take_checkpoint(model, resume, slots);
    state_ranges_free(&ranges);
    free(slots);
    const char* path = resume->candidates[resume->at].path;
    char changes[4096] = "";
    if (resume->config != NULL) {
        config_changes(train, resume->config, changes, sizeof(changes));
        run->first_tokens = resume->state.tokens;
        run->loss_outliers = resume->state.loss_outliers;
        run->norm_outliers = resume->state.norm_outliers;
        run->skips_in_a_row = (int)resume->state.skips_in_a_row;
    } else {
        run->llmc_rng = resume->llmc.rng_state_last_update;
        run->first_tokens = (int64_t)resume->step * train->total_batch_tokens;
    }
    run->save.newest = resume->is_here ? resume->step : -1;
    run->first_step = run->steps_done = resume->step;
    const char* data = resume_data(resume, run->has_train ? &run->train_loader : NULL, train);
    if (comm_rank(model->comm) == 0) {
        printf("resumed at step %d from %s%s in %.1f s\n  data: %s\n", resume->step, path,
               resume->config == NULL ? " (llm.c)" : "", seconds_now() - start, data);
        if (changes[0] != 0) { printf("  switched: %s\n", changes); }
        if (model->slots_warming > 0) { printf("  FP8 scales that have to warm up: %d\n", model->slots_warming); }
        fflush(stdout);
    }
    if (resume->is_here) {
        logger_continue(&run->logger, train, resume->step);
    } else {
        logger_open(&run->logger, train, &model->config);
    }
    logger_log_resume(&run->logger, train, &model->config, resume->step, path, changes, data);
}

// Validation and text samples that are due before step `step` trains (or after the last one).
static void look_at_model(Run* run, Model* model, int step, int last_step) {
    const TrainConfig* train = model->train;
    int is_first_rank = comm_rank(model->comm) == 0;
    if (run->has_val && is_due(step, train->val_every, last_step)) {
        want_weights(model, model->config.num_layers); // the last step's, which the next one reports
        device_sync(model->dev);
        run->comm_before = comm_take_stats(model->comm);
        float loss = validate(model, &run->val_loader, run->num_val_batches);
        comm_take_stats(model->comm); // nobody's
        logger_log_val(&run->logger, step, tokens_after(run, train, step), loss);
        if (is_first_rank) {
            printf("val loss %.6f", loss);
            if (train->floor_loss > 0.0f) { printf(" (floor %.6f)", train->floor_loss); }
            printf("\n");
            fflush(stdout);
        }
    }
    int samples = step > 0 && is_due(step, train->sample_every, last_step);
    if (samples) { want_weights(model, model->config.num_layers); } // of all ranks, since only one goes on
    if (is_first_rank && samples) {
        comm_set_busy(model->comm, 1);
        generate(model, run->has_tokenizer ? &run->tokenizer : NULL);
        comm_set_busy(model->comm, 0);
    }
}

// Why the run has to stop before the next step, which takes about next_s with what is to be looked at before it, the
// same answer on every rank: a signal's number, -1: the time would be over, 0: it has not to.
static int reason_to_stop(const Run* run, const Model* model, double next_s) {
    const TrainConfig* train = model->train;
    double then_s = seconds_now() - run->started_s + 1.5 * next_s + run->save.write_s;
    int is_over = train->max_minutes > 0.0f && then_s > 60.0 * (double)train->max_minutes;
    int64_t reason = max_over_ranks(model->comm, stop_signal != 0 ? stop_signal + 1 : is_over);
    return reason > 1 ? (int)reason - 1 : -(int)reason;
}

// The checkpoint of the step that this process ends with: it is waited for, and tried once more when it fails. Is it
// complete?
static int save_last(Run* run, Model* model, int steps_done) {
    for (int tries = 0; tries < 2 && run->save.newest != steps_done; tries++) {
        if (run->save.phase == SAVE_NONE || run->save.state.step != steps_done) {
            begin_checkpoint(run, model, steps_done);
        }
        save_poll(&run->save, 1);
    }
    return run->save.newest == steps_done;
}

// The last words of a run that stops before its end: its checkpoint. Returns the exit status.
static int stop_early(Run* run, Model* model, int steps_done, int reason) {
    int is_saved = model->train->output_dir[0] != 0 && save_last(run, model, steps_done);
    if (comm_rank(model->comm) == 0) {
        const char* why = reason > 0 ? stop_signal_name(reason) : "--max-minutes";
        if (is_saved) {
            printf("stopped by %s after step %d of %d; --resume (-y) 1 goes on\n", why, steps_done, run->num_steps);
        } else {
            fflush(stdout);
            fprintf(stderr, "error: stopped by %s after step %d of %d, without a checkpoint of it\n", why, steps_done,
                    run->num_steps);
        }
    }
    return is_saved ? EXIT_STOPPED : EXIT_FAILURE;
}

// What was communicated since the last step was reported: its weights, and this step's gradients.
static void report_comm(Run* run, StepReport* report, Comm* comm) {
    CommStats stats = comm_take_stats(comm), before = run->comm_before;
    report->num_ranks = comm_num_ranks(comm);
    report->comm_bytes = before.bytes + stats.bytes;
    report->comm_ms = 1e3 * (before.seconds + stats.seconds);
    report->comm_exposed_ms = 1e3 * (before.exposed_s + stats.exposed_s);
    memset(&run->comm_before, 0, sizeof(run->comm_before));
}

// Train from run->first_step to run->num_steps. Returns the exit status: 0, EXIT_STOPPED, or 1 when too many steps in a
// row were not finite.
static int train_loop(Run* run, Model* model) {
    const TrainConfig* train = model->train;
    int is_first_rank = comm_rank(model->comm) == 0;
    RateMeter meter;
    memset(&meter, 0, sizeof(meter));
    double total_s = 0.0, longest_look_s = 0.0;
    CommTotal comm_all, comm_timed; // from the first step on; from the second, without its start-up work
    memset(&comm_all, 0, sizeof(comm_all));
    memset(&comm_timed, 0, sizeof(comm_timed));
    int end = run->num_steps > run->first_step ? run->num_steps : run->first_step;
    comm_take_stats(model->comm); // of the start
    for (int step = run->first_step; step <= end; step++) {
        int last_step = step == end;
        double look_start = seconds_now();
        look_at_model(run, model, step, last_step);
        longest_look_s = fmax(longest_look_s, seconds_now() - look_start);
        if (last_step) { break; }

        StepReport report;
        memset(&report, 0, sizeof(report));
        report.step = step;
        report.tokens = tokens_after(run, train, step + 1);
        report.learning_rate = schedule_learning_rate(train, run->num_steps, step);
        int profiled = step >= run->first_step + profile_skipped_steps(train) &&
                       run->profile.num_steps < train->profile;
        if (profiled) { device_profile_begin(model->dev, &run->profile); }
        double start = seconds_now();
        StepVerdict verdict = train_step(model, &run->train_loader, report.learning_rate, step + 1 < run->num_steps,
                                         &run->loss_outliers, &run->norm_outliers, &report);
        double elapsed = seconds_now() - start;
        if (step == run->first_step) { comm_set_busy(model->comm, 0); } // main has set it
        report_comm(run, &report, model->comm);
        comm_total_add(&comm_all, &report);
        if (step > run->first_step) { comm_total_add(&comm_timed, &report); }
        if (profiled) {
            device_profile_end(model->dev);
            run->profile.wall_s += elapsed;
            run->profile.num_steps++;
        }
        if (step > run->first_step) { total_s += elapsed; } // the first step holds start-up work
        report.ms = 1e3 * elapsed;
        report.tokens_per_s = rate_update(&meter, train->total_batch_tokens, report.ms);
        report.roofline_fraction = run->step_floor_s / elapsed;
        logger_log_step(&run->logger, &report);
        if (is_first_rank && (step % train->log_every == 0 || step + 1 == run->num_steps || report.skipped)) {
            logger_print_step(stdout, &report, run->num_steps);
        }
        if (profiled && (run->profile.num_steps == train->profile || step + 1 == run->num_steps)) {
            logger_log_profile(&run->logger, step, &run->profile);
            if (is_first_rank) { profile_print(stdout, &run->profile); }
        }
        run->steps_done = step + 1;
        run->llmc_rng = 0;
        run->skips_in_a_row = verdict == STEP_NOT_FINITE ? run->skips_in_a_row + 1 : 0;
        if (run->skips_in_a_row >= train->max_skips) {
            if (is_first_rank) {
                fprintf(stderr, "error: stopped at step %d: %d steps in a row had a loss or gradient norm that is not "
                        "finite (loss %g, norm %g), --max-skips allows fewer; the weights are those of the last good "
                        "step\n", step + 1, run->skips_in_a_row, (double)report.loss, (double)report.grad_norm);
            }
            run->skips_in_a_row = 0; // whoever goes on from here has as many again
            comm_set_busy(model->comm, 1);
            if (train->output_dir[0] != 0) { save_last(run, model, step + 1); }
            return EXIT_FAILURE;
        }
        save_poll(&run->save, 0);
        if (save_is_due(&run->save, step + 1, step + 1 == run->num_steps)) {
            comm_set_busy(model->comm, 1); // disks may be slow, on one rank more than on others
            begin_checkpoint(run, model, step + 1);
            comm_set_busy(model->comm, 0);
        }
        int looks = is_due(step + 1, train->val_every, 0) || is_due(step + 1, train->sample_every, 0);
        int reason = reason_to_stop(run, model, elapsed + (looks ? longest_look_s : 0.0));
        if (reason != 0 && step + 1 < run->num_steps) {
            comm_set_busy(model->comm, 1);
            return stop_early(run, model, step + 1, reason);
        }
    }
    comm_set_busy(model->comm, 1); // to the end of the run: what rank 0 writes alone is waited for
    save_poll(&run->save, 1);
    int is_saved = train->checkpoint_every == 0 || end == run->first_step || save_last(run, model, end);
    if (is_first_rank && !is_saved) {
        fflush(stdout);
        fprintf(stderr, "error: the run is over, but there is no checkpoint of its last step %d%s\n", end,
                run->save.newest < 0 ? "" : "; the newest one stays");
    }
    if (is_first_rank && train->profile > 0 && run->profile.num_steps == 0) {
        printf("no profile: %d steps, --profile looks at step %d and those after it\n", run->num_steps,
               profile_skipped_steps(train) + 1);
    }
    int timed = end - run->first_step - 1;
    if (is_first_rank && timed > 0) {
        printf("mean of steps %d to %d: %.2f ms, %.0f tok/s\n", run->first_step + 2, end, 1e3 * total_s / timed,
               (double)train->total_batch_tokens * timed / total_s);
    }
    if (is_first_rank) {
        logger_print_comm(stdout, &comm_all, &comm_timed, model->table.num_parameters, comm_num_ranks(model->comm));
    }
    return is_saved ? EXIT_SUCCESS : EXIT_FAILURE;
}

// llm.c's files of the last step (--export-llmc).
static void export_llmc(Run* run, Model* model, int steps_done) {
    const TrainConfig* train = model->train;
    const float* on_device[] = {model->master, model->m, model->v};
    float* arrays[3];
    for (int i = 0; i < 3; i++) {
        arrays[i] = collect_state(model, on_device[i]);
    }
    if (comm_rank(model->comm) != 0) { return; }
    char why[WHY_BYTES];
    DataPosition at = run->has_train ? batch_ring_position(&model->batches, &run->train_loader) : DataPosition();
    int error = llmc_write(train->export_llmc, &model->config, steps_done, arrays[0], arrays[1], arrays[2],
                           train->export_llmc_processes, run->has_train ? &run->train_loader : NULL, &at,
                           run->llmc_rng, why);
    check(error == 0, "--export-llmc: %s", why);
    printf("exported step %d for %d llm.c process%s to %s%s%s\n", steps_done, train->export_llmc_processes,
           train->export_llmc_processes == 1 ? "" : "es", train->export_llmc, why[0] != 0 ? "; note: " : "", why);
    for (int i = 0; i < 3; i++) {
        free(arrays[i]);
    }
}

// How matrix products are done: --fast-accum and --autotune.
static void set_matmul(Device* dev, const TrainConfig* train) {
    char path[1024];
    matmul_set_fast_accum(dev, train->fast_accum);
    int autotune = train->autotune && matmul_can_autotune();
    matmul_set_autotune(dev, autotune ? config_autotune_cache(train, path, sizeof(path)) : NULL);
}

#ifndef TESTING
extern "C" const char program_version[]; // build/version.c

int main(int argc, char** argv) {
    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        printf("train_gpt_fp8 %s\n", program_version);
        return EXIT_SUCCESS;
    }
    Run run;
    memset(&run, 0, sizeof(run));
    run.started_s = seconds_now();
    TrainConfig train;
    GptConfig config;
    config_parse(&train, &config, argc, argv);
    Comm* comm = comm_create(&argc, &argv);
    int rank = comm_rank(comm);
    comm_set_timeout(comm, (double)train.comm_timeout);
    comm_set_busy(comm, 1); // files are read, products timed, perhaps on one rank only: until the first step is done
    check_started_alike(comm, &train, program_version);
    DeviceOptions options = {comm_local_rank(comm), train.threads, train.precision == PRECISION_FP32,
                             (AttentionKind)train.attention};
    Device* dev = device_create(options);
    check_own_device(comm, dev);
    comm_connect(comm, dev);
    if (!train.dry_run) { set_matmul(dev, &train); }

    int writes = rank == 0 && train.output_dir[0] != 0 && !train.dry_run;
    int lock = writes ? lock_output(&train) : -1;
    if (writes) { snapshot_sweep(train.output_dir); }
    comm_barrier(comm);
    Resume resume;
    resume_find(&resume, &train, rank == 0);
    int resumes = resume_open(&resume);
    check_same_checkpoint(comm, &resume, resumes);
    float* weights = NULL; // from a model file; NULL: initialised
    if (resumes) {
        check(!train.shape_given || config_model_is_file(&train) || gpt_equal(&config, &resume.gpt),
              "'%s' holds a model of %d layers, %d channels, %d heads, %d positions and a vocabulary of %d, but the "
              "command line (-e) says %d, %d, %d, %d and %d", resume.candidates[resume.at].path, resume.gpt.num_layers,
              resume.gpt.channels, resume.gpt.num_heads, resume.gpt.max_seq_len, resume.gpt.vocab_size, config.num_layers,
              config.channels, config.num_heads, config.max_seq_len, config.vocab_size);
        config = resume.gpt;
    } else if (config_model_is_file(&train)) {
        checkpoint_read_model(train.model, &config, &weights);
    }
    config_finish(&train, &config, comm_num_ranks(comm), rank);
    if (train.batch_size == BATCH_AUTO) {
        choose_batch_size(&train, dev, comm, config);
        config_finish(&train, &config, comm_num_ranks(comm), rank);
    }
    check(train.prompt[0] == 0 || strcmp(train.tokenizer, "byte") == 0,
          "--prompt needs --tokenizer byte, found '%s'", train.tokenizer);

    run.has_tokenizer = train.tokenizer[0] != 0;
    if (run.has_tokenizer) { tokenizer_init(&run.tokenizer, train.tokenizer); }
    if (!train.dry_run) { // everything that can be wrong with files, before the GPU's memory is touched
        open_data(&run, &train, &config);
    }
    Prepared prepared = {&train, &config, weights, resumes ? &resume : NULL, run.has_train ? &run.train_loader : NULL,
                         run.has_val ? &run.val_loader : NULL, run.num_steps, run.num_val_batches};
    check_prepared_alike(comm, dev, &prepared);
    if (!train.dry_run) {
        if (!resumes) { logger_open(&run.logger, &train, &config); }
        if (rank == 0 && train.save_model[0] != 0) { checkpoint_check_writable(train.save_model); }
    }
    if (rank == 0) {
        config_print(stdout, &train, &config);
        printf("| %-23s | %-52s |\n| %-23s | %-52s |\n| %-23s | %-52s |\n", "device", device_name(dev), "attention",
               device_attention_name(dev), "program version", program_version);
    }
    Chip chip = device_chip(dev);
    run.step_floor_s = roofline_step_seconds(&chip, &config, &train);
    profile_open(&run.profile, chip);
    profile_name_linears(&run.profile, &config);
    Model model;
    model_create(&model, dev, comm, config, &train);
    int status = EXIT_SUCCESS;
    if (train.dry_run) {
        if (rank == 0) { roofline_print(stdout, &chip, &config, &train); }
    } else {
        save_open(&run.save, dev, comm, &run.logger, &train, state_ranges(&model, 1));
        if (resumes) {
            resume_run(&run, &model, &resume);
            resume_free(&resume); // 12 bytes per parameter and rank, if it was llm.c's
        } else {
            if (strcmp(train.resume, "1") == 0 && rank == 0) {
                printf("no checkpoint in '%s' yet: a fresh run\n", train.output_dir);
            }
            start_weights(&model, weights);
        }
        if (train.checkpoint_every > 0) { save_prepare(&run.save); }
        if (writes && lock < 0) { lock = lock_output(&train); } // the folder is new
        if (train.output_dir[0] != 0) { stop_listen(train.checkpoint_every > 0); }
        status = train_loop(&run, &model);
        if (train.save_model[0] != 0 && status == EXIT_SUCCESS) { save_model(&model, train.save_model); }
        save_free(&run.save); // the export wants host memory, too
        if (train.export_llmc[0] != 0 && status == EXIT_SUCCESS) { export_llmc(&run, &model, run.steps_done); }
        want_weights(&model, config.num_layers); // nothing travels when the memory goes
        device_sync(dev);
        logger_close(&run.logger);
        if (lock >= 0) { close(lock); }
        if (run.has_train) { dataloader_close(&run.train_loader); }
        if (run.has_val) { dataloader_close(&run.val_loader); }
    }
    resume_free(&resume);
    if (run.has_tokenizer) { tokenizer_free(&run.tokenizer); }
    model_free(&model);
    comm_free(comm);
    device_free(dev);
    return status;
}
#endif
