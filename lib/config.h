// Every setting of a run on one page: GptConfig (the model's shape), TrainConfig (everything else), and ONE table of
// flags from which the defaults, the parser, --help, the start-up banner and the log header come. To add a setting, add
// a member to TrainConfig and a row to config_flags(); nothing else.
//
// One- and two-letter flags mean what they mean in llm.c, so that its command lines work; each has a long name too.
// A flag of llm.c that this version does not support is in the table all the same, with the values whose meaning is met
// without it (FLAG_FIXED): those are accepted, any other is refused by name. Nothing is ignored.
//
//     TrainConfig train; GptConfig gpt;
//     config_parse(&train, &gpt, argc, argv);              // --help prints and exits 0; bad input: one line, exit 1
//     if (config_model_is_file(&train)) { checkpoint_read_config(&gpt, train.model); }
//     config_finish(&train, &gpt, num_ranks, rank);        // what can be checked only when both are known
//     config_print(stdout, &train, &gpt);
#ifndef CONFIG_H
#define CONFIG_H

#include "check.h"

#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <sys/stat.h>

// ---------------------------------------------------------------------------------------------------------------------
// the settings

// The shape of a GPT-2/GPT-3 model. Head size HS = channels / num_heads.
typedef struct {
    int max_seq_len;       // rows of the position table, maxT: 1024 for GPT-2, 2048 for GPT-3
    int vocab_size;        // V, e.g. 50257; ids 0..V-1 occur
    int padded_vocab_size; // Vp, V rounded up to a multiple of 128; rows V..Vp-1 of wte are zero and stay zero
    int num_layers;        // L
    int num_heads;         // NH
    int channels;          // C
} GptConfig;

// The enums count in the order of the `choices` column of their row in the flag table.
typedef enum { PRECISION_FP8, PRECISION_BF16, PRECISION_FP32 } Precision;
typedef enum { RECIPE_DELAYED, RECIPE_CURRENT } Recipe;
typedef enum { SAVE_BF16, SAVE_FP32 } SaveDtype;
typedef enum { PARAM_ROUNDING_STOCHASTIC, PARAM_ROUNDING_NEAREST } ParamRounding;
typedef enum {
    GRAD_REDUCE_AUTO, // until config_finish: the format of --precision
    GRAD_REDUCE_FP8,
    GRAD_REDUCE_BF16,
    GRAD_REDUCE_FP32,
    GRAD_REDUCE_FP8_ALLREDUCE
} GradReduce;
typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } ScheduleKind;

// Bits of TrainConfig.bf16_ops, in the order of the row's choices.
enum { BF16_OP_QKV = 1, BF16_OP_PROJ = 2, BF16_OP_FC = 4, BF16_OP_FCPROJ = 8 };

enum {
    BATCH_AUTO = 0,                 // -b auto (micro_batch.h)
    CONFIG_MAX_BATCH = 65536,       // B
    CONFIG_MAX_MICRO_TOKENS = 1 << 26 // B * T
};

// Everything else. Strings point into argv or at literals and are never NULL; "" means "not given".
typedef struct {
    // data and output
    const char* train_data; // glob pattern of the training shards
    const char* val_data;   // glob pattern of the validation shards; "": no validation
    const char* model;      // descriptor (d12, gpt2:d12, gpt3:c768) or an llm.c model file
    const char* output_dir; // main.log and metrics.jsonl go here; "": no log files
    const char* save_model; // llm.c model file written after the last step; "": none
    int save_dtype;         // SaveDtype
    // model shape, over the descriptor's; 0 = as the descriptor says
    int num_layers, channels, num_heads, max_seq_len, vocab_size;
    // batch
    int batch_size;             // B: sequences per rank and micro-step; BATCH_AUTO until the program has chosen
    int seq_len;                // T: tokens per sequence
    int64_t total_batch_tokens; // tokens per optimizer step over all ranks; -1 until config_finish: B * T * ranks
    int max_steps;              // optimizer steps; -1: one epoch of the training data
    int overfit_single_batch;   // 1: every step sees the first batch of the VALIDATION data, as in llm.c
    // optimizer
    int lr_schedule;         // ScheduleKind
    float learning_rate;     // the peak
    int warmup_steps;        // linear warm-up
    float final_lr_fraction; // of the peak, at the end of training
    float weight_decay;      // on matrices only
    float beta1, beta2, eps; // AdamW
    float grad_clip;         // global gradient norm above which gradients are scaled down; 0: never
    float skip_loss_z;       // skip the update when the loss lies more than this many sigmas high; 0: never
    float skip_grad_z;       // the same for the gradient norm
    int max_skips;           // stop after this many skipped non-finite steps in a row
    int64_t seed;            // of the initial weights, the data order and sampling, 0..2^32-1
    // numerics
    int precision;                           // Precision
    int recipe;                              // Recipe
    int amax_history;                        // past amaxes a slot remembers, 1..1024
    int amax_algo;                           // AmaxAlgo (scaling.h)
    int margin;                              // scales leave 2^margin of room
    float headroom;                          // scales leave this factor of room, >= 1
    int bf16_first_layers, bf16_last_layers; // so many blocks at either end compute their linears in BF16
    int bf16_ops;                            // BF16_OP_* bits: these linears stay in BF16 in every block
    int fp8_lm_head;                         // 1: the LM head computes in FP8, too
    int fast_accum;                          // FAST_ACCUM_* bits (floor.h)
    int autotune;                            // 1: matrix products by the fastest algorithm, timed once per shape
    const char* autotune_cache;              // file that remembers those; "": config_autotune_cache's default
    int param_rounding;                   // ParamRounding
    int attention;                           // AttentionKind (floor.h)
    // evaluation and samples
    int val_every;            // validate every N steps and at the end; 0: never
    int val_max_steps;        // batches per validation; -1: all
    int sample_every;         // generate text every N steps and at the end; 0: never
    int sample_length;        // tokens to generate
    float sample_temperature; // 0: always the likeliest token
    int sample_top_k;         // sample among the k likeliest; 0: among all
    const char* prompt;       // text to continue; "": start from end-of-text
    const char* tokenizer;    // "byte", or a vocabulary folder or file; "": samples are printed as ids
    float floor_loss;         // best reachable loss, shown as a line in log and plot; 0: unknown
    // checkpoints
    int checkpoint_every;      // a training checkpoint every N steps and at the end; 0: only when stopped early
    int keep, keep_every;      // the newest N stay (0: all), and every step that is a multiple of N (0: none)
    const char* resume;        // "0": no; "1": the newest valid one in output_dir; else where it is
    float max_minutes;         // stop in time, with a checkpoint; 0: never
    float checkpoint_memory;   // GiB of pinned host memory; 0: as much as a checkpoint needs, within limits
    const char* export_llmc;   // folder for an llm.c checkpoint of the last step; "": none
    int export_llmc_processes; // llm.c processes that are to continue it
    // run
    int log_every;     // a line on the screen every N steps; the log files get every step
    int profile;       // steps whose time is split up by op, once scales are warm; 0: none
    int threads;       // CPU build; 0: all cores
    int dry_run;       // 1: print settings and memory plan and stop
    int zero_stage;    // llm.c's -z; 1: optimizer state is sharded (ZeRO-1), which on one rank is the same as 0
    int grad_reduce;   // GradReduce
    float comm_timeout; // seconds after which a collective has failed; 0: never
    int num_processes; // llm.c's -pn; 0: as many as mpirun started
    int process_rank;  // llm.c's -pr; -1: as mpirun says
    int gpus_per_node; // llm.c's -pg; without effect under mpirun, there as here
    int shape_given; // set by config_parse, no flag: the command line says something about the model's shape
    // derived by config_finish, no flags
    int num_ranks, rank;
    int grad_accum_steps; // micro-steps per optimizer step: total_batch_tokens / (B * T * num_ranks)
} TrainConfig;

typedef enum {
    FLAG_HEADING, // a title in --help, no flag
    FLAG_INT,     // int, min..max; 0 is written as the word in `choices`, if there is one
    FLAG_INT64,   // int64_t, min..max
    FLAG_FLOAT,   // float, finite, min..max
    FLAG_STRING,  // const char*, kept as given
    FLAG_CHOICE,  // int: index of the value in `choices`
    FLAG_SET,     // int: one bit per value of `choices` in a comma-separated list, or "none"
    FLAG_PAIR,    // int[2]: "first,last", each min..max
    FLAG_SWITCH,  // int: 1 when present; takes no value
    FLAG_FIXED,   // a flag of llm.c without a setting here: only the values in `choices` are accepted
} FlagType;

typedef enum {
    FLAG_OF_RUN,  // the numbers of the run depend on it: goes into config_hash
    FLAG_OF_VIEW, // only what is shown, saved or how fast
} FlagScope;

typedef struct {
    const char* name;    // long name, without --
    const char* letters; // llm.c's name without -, alternatives separated by |; NULL: none
    FlagType type;
    FlagScope scope;
    size_t offset;         // of the member in TrainConfig
    const char* preset;    // the default, read by the parser like a value of the user
    double min, max;       // numbers only
    const char* choices;   // separated by |
    const char* value_doc; // what stands for the value in --help
    const char* help;
} Flag;

#define FLAG_AT(member) offsetof(TrainConfig, member)

// The table. The order is the order of --help and of the banner.
// name, llm.c's letters, type, scope, member, default, min, max, choices, value in --help, help
static inline const Flag* config_flags(int* count) {
    static const Flag table[] = {
        {NULL, NULL, FLAG_HEADING, FLAG_OF_VIEW, 0, NULL, 0, 0, NULL, NULL, "Data and output"},
        {"train-data", "i", FLAG_STRING, FLAG_OF_RUN, FLAG_AT(train_data), "", 0, 0, NULL, "GLOB",
         "training shards (llm.c's .bin files)"},
        {"val-data", "j", FLAG_STRING, FLAG_OF_VIEW, FLAG_AT(val_data), "", 0, 0, NULL, "GLOB",
         "validation shards; none: no validation"},
        {"output-dir", "o", FLAG_STRING, FLAG_OF_VIEW, FLAG_AT(output_dir), "", 0, 0, NULL, "DIR",
         "where main.log and metrics.jsonl go; none: no log files"},
        {"save-model", NULL, FLAG_STRING, FLAG_OF_VIEW, FLAG_AT(save_model), "", 0, 0, NULL, "FILE",
         "write the trained model as an llm.c model file at the end"},
        {"save-dtype", NULL, FLAG_CHOICE, FLAG_OF_VIEW, FLAG_AT(save_dtype), "bf16", 0, 0, "bf16|fp32", "KIND",
         "of that file: llm.c's version 5, or version 3 with all bits of the master weights"},

        {NULL, NULL, FLAG_HEADING, FLAG_OF_VIEW, 0, NULL, 0, 0, NULL, NULL, "Model"},
        {"model", "e", FLAG_STRING, FLAG_OF_RUN, FLAG_AT(model), "d12", 0, 0, NULL, "MODEL",
         "d2 d4 d6 d12 d24 d36 d48 d60 d72 d84, gpt3:c384 to gpt3:c12288, or an llm.c model file (.bin)"},
        {"num-layers", NULL, FLAG_INT, FLAG_OF_VIEW, FLAG_AT(num_layers), "0", 0, 1024, NULL, "N",
         "transformer blocks L, over the descriptor's; 0: as the descriptor says, here and in the next four"},
        {"channels", NULL, FLAG_INT, FLAG_OF_VIEW, FLAG_AT(channels), "0", 0, 65536, NULL, "N", "channels C"},
        {"num-heads", NULL, FLAG_INT, FLAG_OF_VIEW, FLAG_AT(num_heads), "0", 0, 8192, NULL, "N",
         "attention heads NH; with --channels alone: C / 64"},
        {"max-seq-len", NULL, FLAG_INT, FLAG_OF_VIEW, FLAG_AT(max_seq_len), "0", 0, 1048576, NULL, "N",
         "rows of the position table"},
        {"vocab-size", NULL, FLAG_INT, FLAG_OF_VIEW, FLAG_AT(vocab_size), "0", 0, 65536, NULL, "N",
         "vocabulary V, padded to a multiple of 128"},

        {NULL, NULL, FLAG_HEADING, FLAG_OF_VIEW, 0, NULL, 0, 0, NULL, NULL, "Batch"},
        {"batch-size", "b", FLAG_INT, FLAG_OF_RUN, FLAG_AT(batch_size), "4", 1, CONFIG_MAX_BATCH, "auto", "N|auto",
         "sequences per GPU and micro-step, B; auto: the fastest that fits into memory (wants -d)"},
        {"seq-len", "t", FLAG_INT, FLAG_OF_RUN, FLAG_AT(seq_len), "1024", 1, 1048576, NULL, "N",
         "tokens per sequence, T"},
        {"total-batch-tokens", "d", FLAG_INT64, FLAG_OF_RUN, FLAG_AT(total_batch_tokens), "-1", -1, 1e12, NULL, "N",
         "tokens per optimizer step over all GPUs; -1: B * T * GPUs, no gradient accumulation"},
        {"max-steps", "x", FLAG_INT, FLAG_OF_RUN, FLAG_AT(max_steps), "-1", -1, 2e9, NULL, "N",
         "optimizer steps; -1: one epoch"},
        {"overfit-single-batch", "a", FLAG_INT, FLAG_OF_RUN, FLAG_AT(overfit_single_batch), "0", 0, 1, NULL, "0|1",
         "train on the first batch of the validation data only"},

        {NULL, NULL, FLAG_HEADING, FLAG_OF_VIEW, 0, NULL, 0, 0, NULL, NULL, "Optimizer"},
        {"lr-schedule", "k", FLAG_CHOICE, FLAG_OF_RUN, FLAG_AT(lr_schedule), "cosine", 0, 0,
         "cosine|linear|constant|wsd", "KIND", "learning rate after the warm-up"},
        {"learning-rate", "l", FLAG_FLOAT, FLAG_OF_RUN, FLAG_AT(learning_rate), "3e-4", 0, 1e3, NULL, "F",
         "peak learning rate"},
        {"warmup-steps", "u", FLAG_INT, FLAG_OF_RUN, FLAG_AT(warmup_steps), "0", 0, 2e9, NULL, "N",
         "steps of linear warm-up"},
        {"final-lr-fraction", "q", FLAG_FLOAT, FLAG_OF_RUN, FLAG_AT(final_lr_fraction), "1", 0, 1, NULL, "F",
         "share of the peak learning rate that is left at the end; 1: no decay"},
        {"weight-decay", "c", FLAG_FLOAT, FLAG_OF_RUN, FLAG_AT(weight_decay), "0", 0, 1e3, NULL, "F",
         "decoupled weight decay of the matrices"},
        {"beta1", NULL, FLAG_FLOAT, FLAG_OF_RUN, FLAG_AT(beta1), "0.9", 0, 0.999999, NULL, "F", "AdamW, first moment"},
        {"beta2", NULL, FLAG_FLOAT, FLAG_OF_RUN, FLAG_AT(beta2), "0.95", 0, 0.999999, NULL, "F",
         "AdamW, second moment"},
        {"eps", NULL, FLAG_FLOAT, FLAG_OF_RUN, FLAG_AT(eps), "1e-8", 1e-30, 1, NULL, "F", "AdamW, epsilon"},
        {"grad-clip", NULL, FLAG_FLOAT, FLAG_OF_RUN, FLAG_AT(grad_clip), "1", 0, 1e9, NULL, "F",
         "clip the global gradient norm here; 0: never"},
        {"skip-loss-z", "sl", FLAG_FLOAT, FLAG_OF_RUN, FLAG_AT(skip_loss_z), "0", 0, 1e9, NULL, "F",
         "skip updates whose loss is so many sigmas above the last 128; 0: never"},
        {"skip-grad-z", "sg", FLAG_FLOAT, FLAG_OF_RUN, FLAG_AT(skip_grad_z), "0", 0, 1e9, NULL, "F",
         "the same for the gradient norm"},
        {"max-skips", NULL, FLAG_INT, FLAG_OF_RUN, FLAG_AT(max_skips), "10", 1, 1e6, NULL, "N",
         "stop after so many steps in a row that were not finite"},
        {"seed", NULL, FLAG_INT64, FLAG_OF_RUN, FLAG_AT(seed), "42", 0, 4294967295.0, NULL, "N",
         "of initial weights, data order and samples; 42 is llm.c's"},

        {NULL, NULL, FLAG_HEADING, FLAG_OF_VIEW, 0, NULL, 0, 0, NULL, NULL, "Numerics"},
        {"precision", NULL, FLAG_CHOICE, FLAG_OF_RUN, FLAG_AT(precision), "fp8", 0, 0, "fp8|bf16|fp32", "KIND",
         "of the linear layers; fp32 is for the CPU build"},
        {"recipe", NULL, FLAG_CHOICE, FLAG_OF_RUN, FLAG_AT(recipe), "delayed", 0, 0, "delayed|current", "KIND",
         "FP8 scales from past steps, or from the tensor itself"},
        {"amax-history", NULL, FLAG_INT, FLAG_OF_RUN, FLAG_AT(amax_history), "1024", 1, 1024, NULL, "N",
         "past amaxes that delayed scaling looks at"},
        {"amax-algo", NULL, FLAG_CHOICE, FLAG_OF_RUN, FLAG_AT(amax_algo), "max", 0, 0, "max|most_recent", "KIND",
         "which of them counts"},
        {"margin", NULL, FLAG_INT, FLAG_OF_RUN, FLAG_AT(margin), "0", 0, 30, NULL, "N", "leave 2^N of room in FP8"},
        {"headroom", NULL, FLAG_FLOAT, FLAG_OF_RUN, FLAG_AT(headroom), "1", 1, 1e6, NULL, "F",
         "leave a factor F of room in FP8, for growth between two steps"},
        {"bf16-layers", NULL, FLAG_PAIR, FLAG_OF_RUN, FLAG_AT(bf16_first_layers), "0,0", 0, 1024, NULL, "F,L",
         "keep the linears of the first F and the last L blocks in BF16"},
        {"bf16-ops", NULL, FLAG_SET, FLAG_OF_RUN, FLAG_AT(bf16_ops), "none", 0, 0, "qkv|proj|fc|fcproj", "LIST",
         "keep these linears of every block in BF16, e.g. qkv,fcproj"},
        {"fp8-lm-head", NULL, FLAG_INT, FLAG_OF_RUN, FLAG_AT(fp8_lm_head), "0", 0, 1, NULL, "0|1",
         "the LM head (logits, their gradients) in FP8, too"},
        {"fast-accum", NULL, FLAG_SET, FLAG_OF_RUN, FLAG_AT(fast_accum), "forward", 0, 0, "forward|dgrad|wgrad", "LIST",
         "FP8 products that may add with 14 bits instead of FP32's 23: faster; none: all add in FP32"},
        {"autotune", NULL, FLAG_CHOICE, FLAG_OF_RUN, FLAG_AT(autotune), "on", 0, 0, "off|on", "KIND",
         "on: time the algorithms of every matrix product once and keep the fastest; off: the library's first choice"},
        {"autotune-cache", NULL, FLAG_STRING, FLAG_OF_VIEW, FLAG_AT(autotune_cache), "", 0, 0, NULL, "FILE",
         "remembers them, so that runs repeat; not given: train_gpt_fp8/matmul.txt in $XDG_CACHE_HOME or ~/.cache"},
        {"param-rounding", NULL, FLAG_CHOICE, FLAG_OF_RUN, FLAG_AT(param_rounding), "stochastic", 0, 0,
         "stochastic|nearest", "KIND", "how BF16 parameters are made from the FP32 master weights; llm.c: stochastic"},
        {"attention", NULL, FLAG_CHOICE, FLAG_OF_RUN, FLAG_AT(attention), "auto", 0, 0, "auto|builtin|cudnn", "KIND",
         "auto: by pass and head size, builtin where it is the faster one"},
        {"tf32", "f", FLAG_FIXED, FLAG_OF_VIEW, 0, NULL, 0, 0, "0|1", "0|1",
         "TF32 in FP32 matrix products, which this program has none of on a GPU: either value means the same"},
        {"master-weights", "w", FLAG_FIXED, FLAG_OF_VIEW, 0, NULL, 0, 0, "1", "1",
         "FP32 master weights, which are always kept"},
        {"gelu-fusion", "ge", FLAG_FIXED, FLAG_OF_VIEW, 0, NULL, 0, 0, "0|-1", "0",
         "GELU inside the matrix product; here it has its own kernel that also writes FP8"},

        {NULL, NULL, FLAG_HEADING, FLAG_OF_VIEW, 0, NULL, 0, 0, NULL, NULL, "Evaluation and samples"},
        {"val-every", "v", FLAG_INT, FLAG_OF_VIEW, FLAG_AT(val_every), "20", 0, 2e9, NULL, "N",
         "validation loss every N steps and at the end; 0: never"},
        {"val-max-steps", "m", FLAG_INT, FLAG_OF_VIEW, FLAG_AT(val_max_steps), "20", -1, 2e9, NULL, "N",
         "batches per validation; -1: all"},
        {"sample-every", "s", FLAG_INT, FLAG_OF_VIEW, FLAG_AT(sample_every), "20", 0, 2e9, NULL, "N",
         "text sample every N steps and at the end; 0: never"},
        {"sample-length", "g", FLAG_INT, FLAG_OF_VIEW, FLAG_AT(sample_length), "64", 1, 1048576, NULL, "N",
         "tokens per sample"},
        {"sample-temperature", NULL, FLAG_FLOAT, FLAG_OF_VIEW, FLAG_AT(sample_temperature), "1", 0, 100, NULL, "F",
         "below 1: less varied; 0: always the likeliest token"},
        {"sample-top-k", NULL, FLAG_INT, FLAG_OF_VIEW, FLAG_AT(sample_top_k), "0", 0, 65536, NULL, "N",
         "sample among the N likeliest tokens; 0: among all"},
        {"prompt", NULL, FLAG_STRING, FLAG_OF_VIEW, FLAG_AT(prompt), "", 0, 0, NULL, "TEXT",
         "text that samples continue; none: end-of-text"},
        {"tokenizer", NULL, FLAG_STRING, FLAG_OF_VIEW, FLAG_AT(tokenizer), "", 0, 0, NULL, "byte|PATH",
         "how samples become text: byte, or a GPT-2 vocabulary folder or file; none: ids are printed"},
        {"floor-loss", NULL, FLAG_FLOAT, FLAG_OF_VIEW, FLAG_AT(floor_loss), "0", 0, 100, NULL, "F",
         "best reachable loss, shown as a line in log and plot; 0: unknown"},
        {"hellaswag", "h", FLAG_FIXED, FLAG_OF_VIEW, 0, NULL, 0, 0, "0", "0", "HellaSwag accuracy"},

        {NULL, NULL, FLAG_HEADING, FLAG_OF_VIEW, 0, NULL, 0, 0, NULL, NULL, "Run"},
        {"log-every", NULL, FLAG_INT, FLAG_OF_VIEW, FLAG_AT(log_every), "1", 1, 2e9, NULL, "N",
         "a line on the screen every N steps; the files in -o get every step"},
        {"profile", NULL, FLAG_INT, FLAG_OF_VIEW, FLAG_AT(profile), "0", 0, 2e9, NULL, "N",
         "time every op of N steps, from step 18 in FP8 (scales are warm), else 4, and print a table; 0: off"},
        {"threads", NULL, FLAG_INT, FLAG_OF_VIEW, FLAG_AT(threads), "0", 0, 4096, NULL, "N",
         "threads of the CPU build; 0: all cores"},
        {"dry-run", NULL, FLAG_SWITCH, FLAG_OF_VIEW, FLAG_AT(dry_run), "0", 0, 1, NULL, NULL,
         "print settings and memory plan, then stop"},
        {"log-gpu-every", "lg", FLAG_FIXED, FLAG_OF_VIEW, 0, NULL, 0, 0, "-1|0", "-1",
         "GPU clocks and temperature every N steps"},

        {NULL, NULL, FLAG_HEADING, FLAG_OF_VIEW, 0, NULL, 0, 0, NULL, NULL, "Checkpoints"},
        {"checkpoint-every", "n", FLAG_INT, FLAG_OF_VIEW, FLAG_AT(checkpoint_every), "0", 0, 2e9, NULL, "N",
         "checkpoint to -o every N steps and at the end; 0: only when the run is stopped early"},
        {"keep", "nk", FLAG_INT, FLAG_OF_VIEW, FLAG_AT(keep), "0", 0, 2e9, NULL, "N",
         "keep the newest N checkpoints; 0: all"},
        {"keep-every", "nm", FLAG_INT, FLAG_OF_VIEW, FLAG_AT(keep_every), "0", 0, 2e9, NULL, "N",
         "also keep those whose step is a multiple of N; 0: none"},
        {"resume", "y", FLAG_STRING, FLAG_OF_VIEW, FLAG_AT(resume), "0", 0, 0, NULL, "0|1|PATH",
         "1: go on from the newest whole checkpoint in -o; PATH: from that checkpoint, run, or llm.c model file"},
        {"max-minutes", NULL, FLAG_FLOAT, FLAG_OF_VIEW, FLAG_AT(max_minutes), "0", 0, 1e7, NULL, "F",
         "stop before F minutes are over, with a checkpoint and exit status 75; 0: never"},
        {"checkpoint-memory", NULL, FLAG_FLOAT, FLAG_OF_VIEW, FLAG_AT(checkpoint_memory), "0", 0, 1e6, NULL, "GIB",
         "pinned host memory per rank for checkpoints; 0: for a whole one, if half of what is free is enough"},
        {"export-llmc", NULL, FLAG_STRING, FLAG_OF_VIEW, FLAG_AT(export_llmc), "", 0, 0, NULL, "DIR",
         "write the last step as an llm.c checkpoint, which llm.c continues with -y 1 -o DIR"},
        {"export-llmc-processes", NULL, FLAG_INT, FLAG_OF_VIEW, FLAG_AT(export_llmc_processes), "1", 1, 65536, NULL,
         "N", "for so many llm.c processes; above 1: with -z 1"},

        {NULL, NULL, FLAG_HEADING, FLAG_OF_VIEW, 0, NULL, 0, 0, NULL, NULL, "Memory"},
        {"recompute", "r", FLAG_FIXED, FLAG_OF_VIEW, 0, NULL, 0, 0, "0", "0",
         "recomputing activations in the backward pass to save memory"},

        {NULL, NULL, FLAG_HEADING, FLAG_OF_VIEW, 0, NULL, 0, 0, NULL, NULL, "Several GPUs (mpirun, one process each)"},
        {"zero-stage", "z", FLAG_INT, FLAG_OF_RUN, FLAG_AT(zero_stage), "1", 0, 3, NULL, "N",
         "1: optimizer state sharded over the GPUs (ZeRO-1); 0: every GPU has all of it"},
        {"grad-reduce", NULL, FLAG_CHOICE, FLAG_OF_RUN, FLAG_AT(grad_reduce), "auto", 0, 0,
         "auto|fp8|bf16|fp32|fp8-allreduce", "KIND",
         "gradients between GPUs. fp8: E4M3, a scale per 256, summed in FP32; auto: the format of --precision"},
        {"comm-timeout", NULL, FLAG_FLOAT, FLAG_OF_VIEW, FLAG_AT(comm_timeout), "45", 0, 1e6, NULL, "SECONDS",
         "a collective that takes longer ends the run, naming the missing rank; 0: only dead ranks do"},
        {"num-processes", "pn", FLAG_INT, FLAG_OF_VIEW, FLAG_AT(num_processes), "0", 0, 65536, NULL, "N",
         "processes that mpirun must have started; 0: any number"},
        {"process-rank", "pr", FLAG_INT, FLAG_OF_VIEW, FLAG_AT(process_rank), "-1", -1, 65535, NULL, "N",
         "rank that mpirun must have given; -1: any"},
        {"gpus-per-node", "pg", FLAG_INT, FLAG_OF_VIEW, FLAG_AT(gpus_per_node), "8", 1, 1024, NULL, "N",
         "without effect under mpirun, as in llm.c"},
        {"init-method", "pi|pm", FLAG_FIXED, FLAG_OF_VIEW, 0, NULL, 0, 0, "mpi", "mpi",
         "how processes find each other; here always mpirun"},
        {"server-ip", "ps", FLAG_FIXED, FLAG_OF_VIEW, 0, NULL, 0, 0, "", "\"\"", "the server of -pi tcp"},
        {"fs-path", "pf|pp", FLAG_FIXED, FLAG_OF_VIEW, 0, NULL, 0, 0, "", "\"\"", "the shared folder of -pi fs"},
    };
    *count = (int)(sizeof(table) / sizeof(table[0]));
    return table;
}

// ---------------------------------------------------------------------------------------------------------------------
// the model's shape

// Parameters of the whole model in llm.c's layout, the padding rows of wte included:
// Vp*C + maxT*C + L*(12*C*C + 13*C) + 2*C. Elements.
static inline size_t gpt_num_parameters(const GptConfig* gpt) {
    size_t C = (size_t)gpt->channels, L = (size_t)gpt->num_layers;
    return ((size_t)gpt->padded_vocab_size + (size_t)gpt->max_seq_len) * C + L * (12 * C * C + 13 * C) + 2 * C;
}

// Are both the same shape?
static inline int gpt_equal(const GptConfig* a, const GptConfig* b) {
    return a->max_seq_len == b->max_seq_len && a->vocab_size == b->vocab_size &&
           a->padded_vocab_size == b->padded_vocab_size && a->num_layers == b->num_layers &&
           a->num_heads == b->num_heads && a->channels == b->channels;
}

// V rounded up to a multiple of 128.
static inline int gpt_pad_vocab(int vocab_size) { return (vocab_size + 127) / 128 * 128; }

// Is the shape one that the ops can run? 0, or 1 with one line in why (size); `origin` is where it comes from, for the
// line. Ranges are far above any real model and keep every product of a checked shape in range of int64.
static inline int gpt_refuse(const GptConfig* gpt, const char* origin, char* why, size_t size) {
    int C = gpt->channels, NH = gpt->num_heads, V = gpt->vocab_size;
    int length = 0;
    if (gpt->num_layers < 1 || gpt->num_layers > 1024) {
        length = snprintf(why, size, "%s: %d layers, want 1 to 1024", origin, gpt->num_layers);
    } else if (C < 16 || C > 65536 || C % 16 != 0) {
        length = snprintf(why, size, "%s: %d channels, want a multiple of 16 up to 65536 (FP8 matrix products need it)",
                          origin, C);
    } else if (NH < 1 || C % NH != 0) {
        length = snprintf(why, size, "%s: %d channels do not divide into %d heads", origin, C, NH);
    } else if (C / NH % 8 != 0 || C / NH > 256) {
        length = snprintf(why, size, "%s: head size %d (%d channels / %d heads), want a multiple of 8 up to 256", origin,
                          C / NH, C, NH);
    } else if (gpt->max_seq_len < 1 || gpt->max_seq_len > 1048576) {
        length = snprintf(why, size, "%s: max_seq_len %d, want 1 to 1048576", origin, gpt->max_seq_len);
    } else if (V < 1 || V > 65536) {
        length = snprintf(why, size, "%s: vocabulary of %d, want 1 to 65536 (16-bit tokens)", origin, V);
    } else if (gpt->padded_vocab_size != gpt_pad_vocab(V)) {
        length = snprintf(why, size, "%s: padded vocabulary of %d, want %d for %d tokens", origin, gpt->padded_vocab_size,
                          gpt_pad_vocab(V), V);
    }
    return length != 0;
}

// The same, with an end: one error line.
static inline void gpt_check(const GptConfig* gpt, const char* origin) {
    char why[1024];
    check(gpt_refuse(gpt, origin, why, sizeof(why)) == 0, "%s", why);
}

// Is -e a file (ends in .bin, as in llm.c, or names a path) rather than a descriptor?
static inline int config_model_is_file(const TrainConfig* train) {
    size_t n = strlen(train->model);
    return (n >= 4 && strcmp(train->model + n - 4, ".bin") == 0) || strchr(train->model, '/') != NULL;
}

// Fill `gpt` from a descriptor: dX or gpt2:dX (X layers), gpt3:cX (X channels). Sizes are llm.c's, d2 and d4 are ours.
// llm.c also lists gpt3:c5140, the width that the GPT-3 paper prints for 13B; it does not divide into heads of 128, and
// 5120 is what everyone runs.
static inline void gpt_from_descriptor(GptConfig* gpt, const char* descriptor) {
    static const struct {
        const char* name;
        int num_layers, channels, num_heads, max_seq_len;
    } models[] = {
        {"d2", 2, 64, 1, 1024},           {"d4", 4, 128, 2, 1024},          {"d6", 6, 384, 6, 1024},
        {"d12", 12, 768, 12, 1024},       {"d24", 24, 1024, 16, 1024},      {"d36", 36, 1280, 20, 1024},
        {"d48", 48, 1600, 25, 1024},      {"d60", 60, 1920, 30, 1024},      {"d72", 72, 2880, 30, 1024},
        {"d84", 84, 3456, 36, 1024},      {"gpt3:c384", 6, 384, 6, 2048},   {"gpt3:c768", 12, 768, 12, 2048},
        {"gpt3:c1024", 24, 1024, 16, 2048}, {"gpt3:c1536", 24, 1536, 16, 2048}, {"gpt3:c2048", 24, 2048, 16, 2048},
        {"gpt3:c2560", 32, 2560, 32, 2048}, {"gpt3:c4096", 32, 4096, 32, 2048}, {"gpt3:c5120", 40, 5120, 40, 2048},
        {"gpt3:c12288", 96, 12288, 96, 2048},
    };
    const char* name = strncmp(descriptor, "gpt2:d", 6) == 0 ? descriptor + 5 : descriptor;
    check(strcmp(name, "gpt3:c5140") != 0, "model 'gpt3:c5140': 5140 channels do not divide into heads of 128, "
          "want gpt3:c5120");
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        if (strcmp(name, models[i].name) == 0) {
            gpt->num_layers = models[i].num_layers;
            gpt->channels = models[i].channels;
            gpt->num_heads = models[i].num_heads;
            gpt->max_seq_len = models[i].max_seq_len;
            gpt->vocab_size = 50257;
            gpt->padded_vocab_size = gpt_pad_vocab(50257);
            return;
        }
    }
    check(0, "unknown model '%s', want d2 d4 d6 d12 d24 d36 d48 d60 d72 d84, gpt3:c384 c768 c1024 c1536 c2048 c2560 "
          "c4096 c5120 c12288, or an llm.c model file ending in .bin", descriptor);
}

// ---------------------------------------------------------------------------------------------------------------------
// values: text -> member and back

// Index of `value` (length n) among `choices` ("a|b|c"), or -1.
static inline int config_choice(const char* choices, const char* value, size_t n) {
    for (int i = 0;; i++) {
        size_t length = strcspn(choices, "|");
        if (length == n && strncmp(choices, value, n) == 0) {
            return i;
        }
        if (choices[length] == 0) {
            return -1;
        }
        choices += length + 1;
    }
}

// "--batch-size (-b)", for messages. Returns `out`.
static inline const char* config_flag_title(const Flag* flag, char* out, size_t size) {
    if (flag->letters != NULL) {
        snprintf(out, size, "--%s (-%.*s)", flag->name, (int)strcspn(flag->letters, "|"), flag->letters);
    } else {
        snprintf(out, size, "--%s", flag->name);
    }
    return out;
}

// The whole of `text` (up to `end`) as an integer within the flag's range, else one error line.
static inline int64_t config_parse_integer(const Flag* flag, const char* text, const char* end, const char* title) {
    char* stop = NULL;
    errno = 0;
    long long value = strtoll(text, &stop, 10);
    check(stop == end && end > text && !isspace((unsigned char)*text) && errno == 0,
          "%s: '%s' is not an integer, want %s from %.0f to %.0f", title, text, flag->value_doc, flag->min, flag->max);
    check((double)value >= flag->min && (double)value <= flag->max, "%s: %lld is out of range, want %.0f to %.0f%s%s",
          title, value, flag->min, flag->max, flag->choices != NULL ? " or " : "",
          flag->choices != NULL ? flag->choices : "");
    return value;
}

// The whole of `text` as a finite number within the flag's range, else one error line.
static inline float config_parse_float(const Flag* flag, const char* text, const char* title) {
    char* stop = NULL;
    double value = strtod(text, &stop);
    check(*text != 0 && *stop == 0 && !isspace((unsigned char)*text) && isfinite(value),
          "%s: '%s' is not a number, want %g to %g", title, text, flag->min, flag->max);
    check(value >= flag->min && value <= flag->max, "%s: %s is out of range, want %g to %g", title, text, flag->min,
          flag->max);
    return (float)value;
}

// A comma-separated list of choices, or "none", as bits.
static inline int config_parse_set(const Flag* flag, const char* text, const char* title) {
    if (strcmp(text, "none") == 0) {
        return 0;
    }
    int bits = 0;
    for (const char* at = text;;) {
        size_t length = strcspn(at, ",");
        int i = config_choice(flag->choices, at, length);
        check(i >= 0, "%s: unknown '%.*s' in '%s', want a comma-separated list of %s, or none", title, (int)length, at,
              text, flag->choices);
        bits |= 1 << i;
        if (at[length] == 0) {
            return bits;
        }
        at += length + 1;
    }
}

// Store `text` as the flag's value in `train`, or end with one error line that names the flag.
static inline void config_set(TrainConfig* train, const Flag* flag, const char* text) {
    char title[64];
    config_flag_title(flag, title, sizeof(title));
    char* member = (char*)train + flag->offset;
    switch (flag->type) {
    case FLAG_INT:
        if (flag->choices != NULL && strcmp(text, flag->choices) == 0) {
            *(int*)member = 0;
        } else {
            *(int*)member = (int)config_parse_integer(flag, text, text + strlen(text), title);
        }
        break;
    case FLAG_INT64: *(int64_t*)member = config_parse_integer(flag, text, text + strlen(text), title); break;
    case FLAG_FLOAT: *(float*)member = config_parse_float(flag, text, title); break;
    case FLAG_STRING: *(const char**)member = text; break;
    case FLAG_SET: *(int*)member = config_parse_set(flag, text, title); break;
    case FLAG_SWITCH: *(int*)member = strcmp(text, "1") == 0; break;
    case FLAG_CHOICE: {
        int i = config_choice(flag->choices, text, strlen(text));
        check(i >= 0, "%s: unknown '%s', want one of %s", title, text, flag->choices);
        *(int*)member = i;
        break;
    }
    case FLAG_PAIR: {
        const char* comma = strchr(text, ',');
        check(comma != NULL, "%s: '%s' is not a pair, want two integers as in 1,1", title, text);
        ((int*)member)[0] = (int)config_parse_integer(flag, text, comma, title);
        ((int*)member)[1] = (int)config_parse_integer(flag, comma + 1, text + strlen(text), title);
        break;
    }
    case FLAG_FIXED:
        check(config_choice(flag->choices, text, strlen(text)) >= 0,
              "%s: the value '%s' of this llm.c flag is not supported by this version (%s); want %s", title, text,
              flag->help, flag->choices[0] ? flag->choices : "no such flag");
        break;
    case FLAG_HEADING: break;
    }
}

// Write the value that `flag` has in `train` as text that config_set would read back to the same bits. Returns `out`.
static inline const char* config_get(const TrainConfig* train, const Flag* flag, char* out, size_t size) {
    const char* member = (const char*)train + flag->offset;
    out[0] = 0;
    switch (flag->type) {
    case FLAG_INT:
    case FLAG_SWITCH:
        if (flag->choices != NULL && *(const int*)member == 0) {
            snprintf(out, size, "%s", flag->choices);
        } else {
            snprintf(out, size, "%d", *(const int*)member);
        }
        break;
    case FLAG_INT64: snprintf(out, size, "%lld", (long long)*(const int64_t*)member); break;
    case FLAG_STRING: snprintf(out, size, "%s", *(const char* const*)member); break;
    case FLAG_PAIR: snprintf(out, size, "%d,%d", ((const int*)member)[0], ((const int*)member)[1]); break;
    case FLAG_FLOAT: { // as few digits as tell this float from its neighbours
        float value = *(const float*)member;
        for (int digits = 1; digits <= 9; digits++) {
            snprintf(out, size, "%.*g", digits, (double)value);
            if (strtof(out, NULL) == value) {
                break;
            }
        }
        break;
    }
    case FLAG_CHOICE:
    case FLAG_SET: {
        int value = *(const int*)member, i = 0;
        size_t used = 0;
        for (const char* at = flag->choices; *at; i++) {
            size_t length = strcspn(at, "|");
            if (flag->type == FLAG_CHOICE ? i == value : value >> i & 1) {
                used += (size_t)snprintf(out + used, size - used, "%s%.*s", used ? "," : "", (int)length, at);
            }
            at += length + (at[length] != 0);
        }
        if (used == 0) {
            snprintf(out, size, "none");
        }
        break;
    }
    case FLAG_FIXED:
    case FLAG_HEADING: break;
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// the command line

// Print --help: every row of the table, by heading.
static inline void config_usage(FILE* out) {
    fprintf(out, "train_gpt_fp8: pretrain GPT-2/GPT-3 models in FP8\n\n"
                 "  train_gpt_fp8 -i 'data/train_*.bin' -j 'data/val_*.bin' -e d12 -b 64 -t 1024 -d 524288 -o log\n\n"
                 "One- and two-letter flags are llm.c's. --name value and --name=value are both understood.\n");
    int count;
    const Flag* flags = config_flags(&count);
    for (const Flag* flag = flags; flag < flags + count; flag++) {
        if (flag->type == FLAG_HEADING) {
            fprintf(out, "\n%s\n", flag->help);
            continue;
        }
        char left[96], letters[16] = "";
        if (flag->letters != NULL) {
            snprintf(letters, sizeof(letters), "-%.*s,", (int)strcspn(flag->letters, "|"), flag->letters);
        }
        const char* value = flag->type == FLAG_CHOICE ? flag->choices : flag->value_doc ? flag->value_doc : "";
        snprintf(left, sizeof(left), "  %-4s --%s %s", letters, flag->name, value);
        fprintf(out, "%-42s %s", left, flag->help);
        if (flag->type == FLAG_FIXED) {
            fprintf(out, " (only %s)\n", flag->choices[0] ? flag->choices : "\"\"");
        } else if (flag->preset[0] && flag->type != FLAG_SWITCH) {
            fprintf(out, " (%s)\n", flag->preset);
        } else {
            fprintf(out, "\n");
        }
    }
    fprintf(out, "\n       --help                              this page\n"
                 "       --version                           the program's version\n");
}

// Edit distance of two words (insert, delete, replace; Levenshtein), for "did you mean". Words of up to 63 characters.
static inline int config_edit_distance(const char* a, const char* b) {
    int row[64];
    int n = (int)strlen(b);
    if (n > 63 || strlen(a) > 63) {
        return 99;
    }
    for (int j = 0; j <= n; j++) {
        row[j] = j;
    }
    for (int i = 0; a[i]; i++) {
        int diagonal = row[0];
        row[0] = i + 1;
        for (int j = 1; j <= n; j++) {
            int best = diagonal + (a[i] != b[j - 1]);
            best = best < row[j] + 1 ? best : row[j] + 1;
            best = best < row[j - 1] + 1 ? best : row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[n];
}

// The row that `argument` (-b, --batch-size, --batch-size=8) names; ends with one line that suggests the nearest name.
static inline const Flag* config_find_flag(const char* argument) {
    int count;
    const Flag* flags = config_flags(&count);
    check(argument[0] == '-' && argument[1] != 0, "unexpected argument '%s', want a flag such as -b 8 or "
          "--batch-size 8; --help lists them (a GLOB must stand in quotes)", argument);
    int is_long = argument[1] == '-';
    const char* word = argument + 1 + is_long;
    size_t length = is_long ? strcspn(word, "=") : strlen(word);
    const Flag* nearest = NULL;
    int nearest_distance = 4; // further than three edits is not a misspelling
    for (const Flag* flag = flags; flag < flags + count; flag++) {
        if (flag->type == FLAG_HEADING) {
            continue;
        }
        if (is_long ? strlen(flag->name) == length && strncmp(flag->name, word, length) == 0
                    : flag->letters != NULL && config_choice(flag->letters, word, length) >= 0) {
            return flag;
        }
        char plain[64];
        snprintf(plain, sizeof(plain), "%.*s", (int)(length < 63 ? length : 63), word);
        int distance = length < 3 ? 99 : config_edit_distance(plain, flag->name);
        if (distance < nearest_distance) {
            nearest = flag;
            nearest_distance = distance;
        }
    }
    check(nearest == NULL, "unknown flag '%s', did you mean --%s? (--help lists all)", argument, nearest->name);
    check(0, "unknown flag '%s', --help lists all", argument);
    return NULL;
}

// Fill `gpt` from the descriptor and what --num-layers and the others say over it. Of a model built from scratch the
// position table follows a longer --seq-len, unless --max-seq-len was given.
static inline void config_build_shape(const TrainConfig* train, GptConfig* gpt) {
    gpt_from_descriptor(gpt, train->model);
    if (train->num_layers) {
        gpt->num_layers = train->num_layers;
    }
    if (train->channels) {
        gpt->channels = train->channels;
        check(train->num_heads != 0 || train->channels % 64 == 0,
              "--channels %d is not a multiple of 64, so --num-heads is needed too", train->channels);
        gpt->num_heads = train->channels / 64;
    }
    if (train->num_heads) {
        gpt->num_heads = train->num_heads;
    }
    if (train->vocab_size) {
        gpt->vocab_size = train->vocab_size;
        gpt->padded_vocab_size = gpt_pad_vocab(train->vocab_size);
    }
    if (train->max_seq_len) {
        gpt->max_seq_len = train->max_seq_len;
    } else if (train->seq_len > gpt->max_seq_len) {
        gpt->max_seq_len = train->seq_len;
    }
    gpt_check(gpt, "model");
}

// Read the command line over the table's defaults. `gpt` is filled from the descriptor, or zeroed when -e is a file
// (config_model_is_file): the caller reads it from there. --help prints config_usage and exits with 0; anything that is
// not understood, out of range or not supported is one error line and exit status 1. Of a flag given twice the last
// value counts, as in llm.c.
static inline void config_parse(TrainConfig* train, GptConfig* gpt, int argc, char** argv) {
    memset(train, 0, sizeof(*train));
    memset(gpt, 0, sizeof(*gpt));
    int count;
    const Flag* flags = config_flags(&count);
    for (const Flag* flag = flags; flag < flags + count; flag++) {
        if (flag->preset != NULL) {
            config_set(train, flag, flag->preset);
        }
    }
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-help") == 0) {
            config_usage(stdout);
            exit(EXIT_SUCCESS);
        }
        const Flag* flag = config_find_flag(argv[i]);
        const char* equals = argv[i][1] == '-' ? strchr(argv[i], '=') : NULL;
        int is_shape = flag->offset == FLAG_AT(model) ||
                       (flag->offset >= FLAG_AT(num_layers) && flag->offset <= FLAG_AT(vocab_size));
        train->shape_given |= is_shape && flag->type != FLAG_FIXED;
        if (flag->type == FLAG_SWITCH) {
            check(equals == NULL, "--%s takes no value, found '%s'", flag->name, argv[i]);
            config_set(train, flag, "1");
        } else if (equals != NULL) {
            config_set(train, flag, equals + 1);
        } else {
            check(i + 1 < argc, "flag '%s' needs a value: %s (for all flags: --help)", argv[i], flag->help);
            config_set(train, flag, argv[++i]);
        }
    }
    check(train->val_max_steps != 0, "--val-max-steps (-m): 0 batches, want 1 or more, or -1 for all (no validation at "
          "all is --val-every 0)");
    check(train->total_batch_tokens != 0, "--total-batch-tokens (-d): 0 tokens, want -1 or more than 0");
    if (!config_model_is_file(train)) {
        config_build_shape(train, gpt);
    } else {
        check(!train->num_layers && !train->channels && !train->num_heads && !train->max_seq_len && !train->vocab_size,
              "-e '%s' is a model file and has its own shape: --num-layers, --channels, --num-heads, --max-seq-len and "
              "--vocab-size cannot change it", train->model);
    }
}

// Check what needs the whole picture (the model, also one that was read from a file, and the ranks that mpirun started)
// and set total_batch_tokens, grad_accum_steps, num_ranks and rank. When it does not fit: one error line, with the
// numbers. With -b auto what depends on B is left out: call again when it is chosen.
static inline void config_finish(TrainConfig* train, const GptConfig* gpt, int num_ranks, int rank) {
    gpt_check(gpt, train->model);
    int is_auto = train->batch_size == BATCH_AUTO;
    int64_t B = is_auto ? 1 : train->batch_size, T = train->seq_len;
    check(T <= gpt->max_seq_len, "--seq-len (-t): T = %lld is longer than the model's max_seq_len %d", (long long)T,
          gpt->max_seq_len);
    check(B * T <= CONFIG_MAX_MICRO_TOKENS,
          "B * T = %lld * %lld = %lld tokens per micro-step, want at most %d (smaller -b, larger -d)", (long long)B,
          (long long)T, (long long)(B * T), CONFIG_MAX_MICRO_TOKENS);
    check(is_auto || train->precision != PRECISION_FP8 || B * T % 16 == 0,
          "B * T = %lld * %lld = %lld, want a multiple of 16 with --precision fp8", (long long)B, (long long)T,
          (long long)(B * T));
    check(train->num_processes == 0 || train->num_processes == num_ranks,
          "--num-processes (-pn): %d processes, but mpirun started %d", train->num_processes, num_ranks);
    check(train->process_rank == -1 || train->process_rank == rank,
          "--process-rank (-pr): rank %d, but mpirun says %d", train->process_rank, rank);
    check(train->zero_stage <= 1, "--zero-stage (-z): the value '%d' of this llm.c flag is not supported; want 0 or 1",
          train->zero_stage);
    if (train->grad_reduce == GRAD_REDUCE_AUTO) {
        train->grad_reduce = train->precision == PRECISION_FP8    ? GRAD_REDUCE_FP8
                             : train->precision == PRECISION_BF16 ? GRAD_REDUCE_BF16
                                                                  : GRAD_REDUCE_FP32;
    }
    check(!train->fp8_lm_head || train->precision == PRECISION_FP8, "--fp8-lm-head 1 needs --precision fp8");
    int first = train->bf16_first_layers, last = train->bf16_last_layers, L = gpt->num_layers;
    check(first + last <= L, "--bf16-layers %d,%d: more than the model's %d layers", first, last, L);
    int64_t micro_tokens = B * T * num_ranks;
    check(!is_auto || train->total_batch_tokens != -1, "--batch-size (-b) auto wants --total-batch-tokens (-d): how "
          "many tokens make a step is part of the recipe, only how they are split is chosen");
    if (train->total_batch_tokens == -1) {
        train->total_batch_tokens = micro_tokens;
    }
    int64_t total = train->total_batch_tokens;
    int64_t nearest = total < micro_tokens ? micro_tokens : total / micro_tokens * micro_tokens;
    check(!is_auto || total % micro_tokens == 0, "--total-batch-tokens (-d): %lld is not a multiple of T * GPUs = "
          "%lld * %d = %lld; nearest: %lld", (long long)total, (long long)T, num_ranks, (long long)micro_tokens,
          (long long)nearest);
    check(total % micro_tokens == 0, "--total-batch-tokens (-d): %lld is not a multiple of B * T * GPUs = "
          "%lld * %lld * %d = %lld; nearest: %lld", (long long)total, (long long)B, (long long)T, num_ranks,
          (long long)micro_tokens, (long long)nearest);
    check(is_auto || total / micro_tokens <= INT_MAX, "--total-batch-tokens (-d): %lld micro-steps are too many",
          (long long)(total / micro_tokens));
    check(!train->overfit_single_batch || train->val_data[0] != 0,
          "--overfit-single-batch (-a) trains on a validation batch: give --val-data (-j)");
    check(train->train_data[0] != 0 || train->overfit_single_batch || train->max_steps == 0 || train->dry_run,
          "no training data: give --train-data (-i) 'GLOB'");
    int resumes_here = strcmp(train->resume, "1") == 0, wants_folder = train->checkpoint_every > 0 || resumes_here;
    check((!wants_folder && train->max_minutes == 0.0f) || train->output_dir[0] != 0,
          "%s wants --output-dir (-o): that is where checkpoints are", train->checkpoint_every > 0 ?
          "--checkpoint-every (-n)" : resumes_here ? "--resume (-y) 1" : "--max-minutes");
    train->grad_accum_steps = (int)(total / micro_tokens);
    train->num_ranks = num_ranks;
    train->rank = rank;
}

// Does the linear `op` (a BF16_OP_* bit) of block `layer` compute in FP8?
static inline int config_linear_is_fp8(const TrainConfig* train, const GptConfig* gpt, int layer, int op) {
    int at_an_end = layer < train->bf16_first_layers || layer >= gpt->num_layers - train->bf16_last_layers;
    return train->precision == PRECISION_FP8 && !at_an_end && (train->bf16_ops & op) == 0;
}

// Where the choices of --autotune are remembered: what --autotune-cache says, else train_gpt_fp8/matmul.txt in the
// user's folder for caches (XDG Base Directory Specification), which is made. Returns `path`; "" when there is no such
// folder.
static inline const char* config_autotune_cache(const TrainConfig* train, char* path, size_t size) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int length;
    if (train->autotune_cache[0] != 0) {
        length = snprintf(path, size, "%s", train->autotune_cache);
    } else if (cache != NULL && cache[0] == '/') { // the specification: a relative path is to be ignored
        length = snprintf(path, size, "%s/train_gpt_fp8/matmul.txt", cache);
    } else if (home != NULL && home[0] != 0) {
        length = snprintf(path, size, "%s/.cache/train_gpt_fp8/matmul.txt", home);
    } else {
        length = 0;
        path[0] = 0;
    }
    check(length < (int)size, "--autotune-cache: the file name is longer than %zu characters", size);
    int make = length > 0 && train->autotune_cache[0] == 0;
    for (char* slash = path; make && (slash = strchr(slash + 1, '/')) != NULL;) {
        *slash = 0;
        mkdir(path, 0777); // one that exists, or cannot be made, shows when the file is opened
        *slash = '/';
    }
    return path;
}

// ---------------------------------------------------------------------------------------------------------------------
// showing the settings

// Print all settings as a table; a * marks what differs from the default. The model's shape and what follows from the
// batch settings come last. Call after config_finish.
static inline void config_print(FILE* out, const TrainConfig* train, const GptConfig* gpt) {
    const char* rule = "+-------------------------+------------------------------------------------------+\n";
    int count;
    const Flag* flags = config_flags(&count);
    char value[512];
    for (const Flag* flag = flags; flag < flags + count; flag++) {
        if (flag->type == FLAG_HEADING) {
            const Flag* next = flag + 1; // no empty sections: a heading shows when a setting follows
            while (next < flags + count && next->type == FLAG_FIXED) {
                next++;
            }
            if (next < flags + count && next->type != FLAG_HEADING) {
                fprintf(out, "%s| %-23s | %-52s |\n%s", rule, flag->help, "", rule);
            }
        } else if (flag->type != FLAG_FIXED) {
            config_get(train, flag, value, sizeof(value));
            TrainConfig preset = *train;
            config_set(&preset, flag, flag->preset);
            char usual[512];
            int changed = strcmp(value, config_get(&preset, flag, usual, sizeof(usual))) != 0;
            fprintf(out, "| %-21s %s | %-52s |\n", flag->name, changed ? "*" : " ", value[0] ? value : "-");
        }
    }
    fprintf(out, "%s", rule);
    fprintf(out, "| %-23s | %-52d |\n| %-23s | %-52d |\n| %-23s | %-52d |\n", "layers L", gpt->num_layers, "channels C",
            gpt->channels, "heads NH", gpt->num_heads);
    fprintf(out, "| %-23s | %-52d |\n| %-23s | %-52d |\n| %-23s | %-52d |\n", "positions maxT", gpt->max_seq_len,
            "vocabulary V", gpt->vocab_size, "padded vocabulary Vp", gpt->padded_vocab_size);
    fprintf(out, "| %-23s | %-52zu |\n| %-23s | %-52d |\n| %-23s | %-52d |\n%s", "parameters", gpt_num_parameters(gpt),
            "GPUs (ranks)", train->num_ranks, "micro-steps per step", train->grad_accum_steps, rule);
    if (train->seq_len < gpt->max_seq_len) {
        fprintf(out, "note: T = %d is shorter than max_seq_len %d: the last %d positions stay untrained\n",
                train->seq_len, gpt->max_seq_len, gpt->max_seq_len - train->seq_len);
    }
    if (train->lr_schedule == SCHEDULE_CONSTANT && train->warmup_steps > 0) {
        fprintf(out, "note: --lr-schedule constant has no warm-up, as in llm.c: --warmup-steps does nothing\n");
    }
}

// All settings as text, "name=value" lines in the order of the table (a newline inside a value becomes a space): what a
// checkpoint remembers of them. malloc'ed.
static inline char* config_to_text(const TrainConfig* train) {
    int count;
    const Flag* flags = config_flags(&count);
    char* text = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&text, &size);
    check(f != NULL, "out of host memory for the settings");
    for (const Flag* flag = flags; flag < flags + count; flag++) {
        if (flag->type == FLAG_HEADING || flag->type == FLAG_FIXED) {
            continue;
        }
        char value[512];
        fprintf(f, "%s=", flag->name);
        for (const char* c = flag->type == FLAG_STRING ? *(const char* const*)((const char*)train + flag->offset)
                                                       : config_get(train, flag, value, sizeof(value)); *c; c++) {
            fputc(*c == '\n' ? ' ' : *c, f);
        }
        fputc('\n', f);
    }
    fclose_or_die(f, "the settings");
    return text;
}

// What the numbers of a run depend on and `text` (of config_to_text) has otherwise, as "precision bf16 -> fp8, ..." into
// out (size): a FLAG_OF_RUN row that is new since then counts as its default was. Returns how many differ.
static inline int config_changes(const TrainConfig* train, const char* text, char* out, size_t size) {
    int count, changes = 0;
    size_t used = 0;
    const Flag* flags = config_flags(&count);
    out[0] = 0;
    for (const Flag* flag = flags; flag < flags + count; flag++) {
        if (flag->type == FLAG_HEADING || flag->type == FLAG_FIXED || flag->scope != FLAG_OF_RUN) {
            continue;
        }
        const char* was = flag->preset;
        size_t was_length = strlen(was), name_length = strlen(flag->name);
        for (const char* line = text; *line; line += strcspn(line, "\n"), line += *line == '\n') {
            if (strncmp(line, flag->name, name_length) == 0 && line[name_length] == '=') {
                was = line + name_length + 1;
                was_length = strcspn(was, "\n");
            }
        }
        char value[512];
        const char* is = flag->type == FLAG_STRING ? *(const char* const*)((const char*)train + flag->offset)
                                                   : config_get(train, flag, value, sizeof(value));
        if (strlen(is) != was_length || strncmp(is, was, was_length) != 0) {
            int length = snprintf(out + used, size - used, "%s%s %.*s -> %s", changes > 0 ? ", " : "", flag->name,
                                  (int)was_length, was, is);
            used = used + (size_t)length < size ? used + (size_t)length : size - 1;
            changes++;
        }
    }
    return changes;
}

// Length of the valid UTF-8 sequence that starts at `text`, or 0.
static inline int config_utf8_length(const unsigned char* text) {
    int n = text[0] < 0x80 ? 1 : text[0] >= 0xC2 && text[0] < 0xE0 ? 2 : (text[0] & 0xF0) == 0xE0 ? 3
          : text[0] >= 0xF0 && text[0] < 0xF5 ? 4 : 0;
    for (int i = 1; i < n; i++) {
        if ((text[i] & 0xC0) != 0x80) { // also the closing zero
            return 0;
        }
    }
    int overlong = (text[0] == 0xE0 && text[1] < 0xA0) || (text[0] == 0xF0 && text[1] < 0x90);
    int outside = (text[0] == 0xED && text[1] >= 0xA0) || (text[0] == 0xF4 && text[1] >= 0x90);
    return overlong || outside ? 0 : n;
}

// Write `text` as a JSON string with its quotes; bytes that are not UTF-8 become U+FFFD, so that the line stays valid.
static inline void config_write_json_string(FILE* out, const char* text) {
    fputc('"', out);
    for (const unsigned char* at = (const unsigned char*)text; *at;) {
        int n = config_utf8_length(at);
        if (n == 0) {
            fputs("\\ufffd", out);
            at++;
        } else if (*at == '"' || *at == '\\') {
            fprintf(out, "\\%c", *at++);
        } else if (*at < 0x20) {
            fprintf(out, "\\u%04x", *at++);
        } else {
            fwrite(at, 1, (size_t)n, out);
            at += n;
        }
    }
    fputc('"', out);
}

// Write all settings and the model's shape as the members of one JSON object, braces included, no newline. Names are
// the long flags with _ for -; numbers are numbers, the rest are strings. Call after config_finish.
static inline void config_write_json(FILE* out, const TrainConfig* train, const GptConfig* gpt) {
    int count;
    const Flag* flags = config_flags(&count);
    char value[4096];
    fprintf(out, "{");
    for (const Flag* flag = flags; flag < flags + count; flag++) {
        // the shape flags are 0 when not given; the model's real shape follows below under the same names
        int is_shape = flag->offset >= FLAG_AT(num_layers) && flag->offset <= FLAG_AT(vocab_size);
        if (flag->type == FLAG_HEADING || flag->type == FLAG_FIXED || is_shape) {
            continue;
        }
        fprintf(out, "\"");
        for (const char* c = flag->name; *c; c++) {
            fputc(*c == '-' ? '_' : *c, out);
        }
        fprintf(out, "\": ");
        if (flag->type == FLAG_STRING) { // of any length
            config_write_json_string(out, *(const char* const*)((const char*)train + flag->offset));
        } else if (flag->type == FLAG_CHOICE || flag->type == FLAG_SET || flag->type == FLAG_PAIR) {
            config_write_json_string(out, config_get(train, flag, value, sizeof(value)));
        } else {
            fprintf(out, "%s", config_get(train, flag, value, sizeof(value)));
        }
        fprintf(out, ", ");
    }
    fprintf(out, "\"num_layers\": %d, \"channels\": %d, \"num_heads\": %d, \"max_seq_len\": %d, \"vocab_size\": %d, "
            "\"padded_vocab_size\": %d, \"num_parameters\": %zu, \"num_ranks\": %d, \"grad_accum_steps\": %d}",
            gpt->num_layers, gpt->channels, gpt->num_heads, gpt->max_seq_len, gpt->vocab_size, gpt->padded_vocab_size,
            gpt_num_parameters(gpt), train->num_ranks, train->grad_accum_steps);
}

#define FNV_START 0xcbf29ce484222325ull

// FNV-1a (64 bits) over `bytes` of data, continuing from `hash`, which begins as FNV_START.
// http://www.isthe.com/chongo/tech/comp/fnv/
static inline uint64_t config_fnv1a(uint64_t hash, const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ ((const unsigned char*)data)[i]) * 0x100000001b3ull;
    }
    return hash;
}

// A fingerprint of everything that the numbers of a run depend on (the model's shape, the ranks and the FLAG_OF_RUN
// rows), so that a training state is not continued under other settings unnoticed. Call after config_finish.
static inline uint64_t config_hash(const TrainConfig* train, const GptConfig* gpt) {
    const int shape[] = {gpt->max_seq_len, gpt->vocab_size, gpt->padded_vocab_size, gpt->num_layers,
                         gpt->num_heads,   gpt->channels,   train->num_ranks};
    uint64_t hash = config_fnv1a(FNV_START, shape, sizeof(shape));
    int count;
    const Flag* flags = config_flags(&count);
    for (const Flag* flag = flags; flag < flags + count; flag++) {
        if (flag->type == FLAG_HEADING || flag->scope != FLAG_OF_RUN) {
            continue;
        }
        char text[512];
        const char* value = flag->type == FLAG_STRING ? *(const char* const*)((const char*)train + flag->offset)
                                                      : config_get(train, flag, text, sizeof(text));
        hash = config_fnv1a(hash, flag->name, strlen(flag->name) + 1);
        hash = config_fnv1a(hash, value, strlen(value) + 1);
    }
    return hash;
}

#endif
