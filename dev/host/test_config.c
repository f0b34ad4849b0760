// The command line: defaults, every flag under every name, llm.c's scripts, and every way to get it wrong.
#include "config.h"

#include "unit.h"

#include <unistd.h>

enum { MAX_WORDS = 96 };

typedef struct {
    char text[2048];
    char* argv[MAX_WORDS + 1];
    int argc;
} Line;

// Split at single spaces; ~ stands for a space inside a word, '' for an empty word.
static Line line_of(const char* text) {
    Line line;
    memset(&line, 0, sizeof(line));
    snprintf(line.text, sizeof(line.text), "test %s", text);
    return line;
}

static void split(Line* line) {
    line->argc = 0;
    for (char* word = strtok(line->text, " "); word != NULL; word = strtok(NULL, " ")) {
        check(line->argc < MAX_WORDS, "too many words in a test");
        line->argv[line->argc++] = strcmp(word, "''") == 0 ? word + 2 : word;
        for (char* c = word; *c; c++) {
            *c = *c == '~' ? ' ' : *c;
        }
    }
}

// The strings in `train` point into `line`, which must live as long.
static void parse(Line* line, TrainConfig* train, GptConfig* gpt) {
    split(line);
    config_parse(train, gpt, line->argc, line->argv);
}

static void parse_and_finish(void* text) {
    Line line = line_of((const char*)text);
    TrainConfig train;
    GptConfig gpt;
    parse(&line, &train, &gpt);
    if (config_model_is_file(&train)) {
        gpt_from_descriptor(&gpt, "d2");
    }
    config_finish(&train, &gpt, 1, 0);
}

static void parse_for_four_ranks(void* text) {
    Line line = line_of((const char*)text);
    TrainConfig train;
    GptConfig gpt;
    parse(&line, &train, &gpt);
    config_finish(&train, &gpt, 4, 2);
}

static void dies(const char* text, const char* error) { expect_dies(parse_and_finish, (void*)(uintptr_t)text, error); }

static void test_defaults_are_llmcs(void) {
    Line line = line_of("-i x");
    TrainConfig t;
    GptConfig g;
    parse(&line, &t, &g);
    expect(t.batch_size == 4 && t.seq_len == 1024 && t.total_batch_tokens == -1 && t.max_steps == -1, "batch");
    expect(t.learning_rate == 3e-4f && t.warmup_steps == 0 && t.final_lr_fraction == 1.0f && t.weight_decay == 0.0f &&
           t.lr_schedule == SCHEDULE_COSINE, "optimizer");
    expect(t.beta1 == 0.9f && t.beta2 == 0.95f && t.eps == 1e-8f && t.grad_clip == 1.0f, "adamw");
    expect(t.skip_loss_z == 0.0f && t.skip_grad_z == 0.0f, "outliers");
    expect(t.val_every == 20 && t.val_max_steps == 20 && t.sample_every == 20 && t.sample_length == 64, "evaluation");
    expect(t.overfit_single_batch == 0 && t.output_dir[0] == 0 && t.zero_stage == 1 && t.seed == 42, "run");
    expect(t.precision == PRECISION_FP8 && t.recipe == RECIPE_DELAYED && t.amax_history == 1024 &&
           t.amax_algo == 0 /* max */ && t.margin == 0 && t.headroom == 1.0f && t.max_skips == 10, "numerics");
    expect(t.fp8_lm_head == 0 && t.fast_accum == 1 /* forward */ && t.autotune == 1 && t.autotune_cache[0] == 0,
           "matrix products");
    expect(t.bf16_first_layers == 0 && t.bf16_last_layers == 0 && t.bf16_ops == 0 && t.attention == 0 /* auto */,
           "exceptions");
    config_finish(&t, &g, 8, 3);
    expect(t.total_batch_tokens == 4 * 1024 * 8 && t.grad_accum_steps == 1 && t.num_ranks == 8 && t.rank == 3,
           "finish");
    expect(g.num_layers == 12 && g.channels == 768 && g.vocab_size == 50257, "model");
}

// Every flag that has a value: --name value, --name=value and llm.c's letters store it, and config_get gives it back.
static void test_every_flag_every_name(void) {
    int count, tested = 0;
    const Flag* flags = config_flags(&count);
    for (const Flag* flag = flags; flag < flags + count; flag++) {
        if (flag->type == FLAG_HEADING || flag->type == FLAG_SWITCH || flag->type == FLAG_FIXED) {
            continue;
        }
        const char* value = flag->type == FLAG_STRING ? strcmp(flag->name, "model") ? "some-text" : "d24"
                          : flag->type == FLAG_CHOICE ? strrchr(flag->choices, '|') + 1
                          : flag->type == FLAG_SET ? strcmp(flag->name, "fast-accum") ? "qkv,fcproj" : "forward,wgrad"
                          : flag->type == FLAG_PAIR ? "2,1"
                          : flag->type == FLAG_FLOAT ? "0.5" : flag->max < 2 ? "1" : "3";
        value = strcmp(flag->name, "headroom") == 0 ? "1.5" : value;
        value = strcmp(flag->name, "num-heads") == 0 || strcmp(flag->name, "sample-top-k") == 0 ? "4" : value;
        value = strcmp(flag->name, "channels") == 0 ? "128" : value;
        for (int form = 0; form < 3; form++) {
            char text[256];
            if (form == 2 && flag->letters == NULL) {
                continue;
            }
            snprintf(text, sizeof(text), form == 0 ? "--%s %s" : form == 1 ? "--%s=%s" : "-%s %s",
                     form == 2 ? flag->letters : flag->name, value);
            Line line = line_of(text);
            TrainConfig train;
            GptConfig gpt;
            parse(&line, &train, &gpt);
            char got[256];
            config_get(&train, flag, got, sizeof(got));
            expect(strcmp(got, value) == 0, "'%s' stored '%s'", text, got);
            tested++;
        }
    }
    expect(tested > 100, "only %d forms tested", tested);
}

// The file of --autotune: the one that is named, else the user's folder for caches, which is made if it can be.
static void test_autotune_cache(void) {
    char path[512], folder[] = "/tmp/test_config_XXXXXX", want[512];
    check(mkdtemp(folder) != NULL, "cannot make '%s'", folder);
    TrainConfig train;
    GptConfig gpt;
    Line line = line_of("-i x");
    parse(&line, &train, &gpt);
    setenv("HOME", folder, 1);
    unsetenv("XDG_CACHE_HOME");
    snprintf(want, sizeof(want), "%s/.cache/train_gpt_fp8/matmul.txt", folder);
    expect(strcmp(config_autotune_cache(&train, path, sizeof(path)), want) == 0, "'%s', want '%s'", path, want);
    FILE* f = fopen(path, "w"); // the folder is there
    expect(f != NULL, "cannot write '%s'", path);
    if (f != NULL) { fclose(f); }
    unlink(path);
    char cache[512];
    snprintf(cache, sizeof(cache), "%s/cache", folder);
    setenv("XDG_CACHE_HOME", cache, 1);
    snprintf(want, sizeof(want), "%s/cache/train_gpt_fp8/matmul.txt", folder);
    expect(strcmp(config_autotune_cache(&train, path, sizeof(path)), want) == 0, "'%s', want '%s'", path, want);
    setenv("XDG_CACHE_HOME", "relative", 1); // to be ignored
    snprintf(want, sizeof(want), "%s/.cache/train_gpt_fp8/matmul.txt", folder);
    expect(strcmp(config_autotune_cache(&train, path, sizeof(path)), want) == 0, "'%s', want '%s'", path, want);
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    memset(path, 'a', sizeof(path)); // nothing behind the empty name is read
    expect(config_autotune_cache(&train, path, sizeof(path))[0] == 0, "'%s' without a home", path);
    Line named = line_of("-i x --autotune-cache no_such_folder/a.txt");
    parse(&named, &train, &gpt);
    expect(strcmp(config_autotune_cache(&train, path, sizeof(path)), "no_such_folder/a.txt") == 0, "'%s'", path);
    expect(access("no_such_folder", F_OK) != 0, "a folder was made for a file that the user named");
    const char* made[] = {"cache/train_gpt_fp8", "cache", ".cache/train_gpt_fp8", ".cache"};
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof(path), "%s/%s", folder, made[i]);
        expect(rmdir(path) == 0, "'%s' cannot be removed", path);
    }
    expect(rmdir(folder) == 0, "'%s' cannot be removed", folder);
}

static void test_table_is_sound(void) {
    int count;
    const Flag* flags = config_flags(&count);
    for (int i = 0; i < count; i++) {
        expect(flags[i].help != NULL && flags[i].help[0] != 0, "row %d has no help", i);
        if (flags[i].type == FLAG_HEADING) {
            continue;
        }
        expect(flags[i].type == FLAG_SWITCH || flags[i].value_doc != NULL, "--%s: no value in help", flags[i].name);
        for (int k = 0; k < i; k++) {
            if (flags[k].type == FLAG_HEADING) {
                continue;
            }
            expect(strcmp(flags[i].name, flags[k].name) != 0, "--%s stands twice", flags[i].name);
            expect(flags[i].letters == NULL || flags[k].letters == NULL || strcmp(flags[i].letters, flags[k].letters),
                   "-%s stands twice", flags[i].letters);
            expect(flags[i].offset != flags[k].offset || flags[i].type == FLAG_FIXED || flags[k].type == FLAG_FIXED,
                   "--%s and --%s share a member", flags[i].name, flags[k].name);
        }
    }
}

// Every flag of llm.c's parser is known, and so are the two that only its usage text has.
static void test_knows_all_llmc_flags(void) {
    const char* letters[] = {"i", "j", "e", "o", "n", "y", "b", "t", "d", "l", "lg", "u", "q", "c", "x", "v", "m",
                             "s", "ge", "g", "a", "f", "w", "z", "r", "h", "k", "pi", "pf", "ps", "pn", "pr", "pg",
                             "sl", "sg", "nk", "nm", "pm", "pp"};
    for (size_t i = 0; i < sizeof(letters) / sizeof(letters[0]); i++) {
        char argument[8];
        snprintf(argument, sizeof(argument), "-%s", letters[i]);
        expect(config_find_flag(argument) != NULL, "%s", argument);
    }
}

// The command lines of the shared data's README, of llm.c's README, and llm.c's scripts without checkpoints.
static void test_llmc_command_lines(void) {
    Line line = line_of("-i train.bin -j val.bin -o log -e d12 -b 64 -t 1024 -d 131072 -x 1200 -l 0.0006 -u 100 -q 0.1 "
                        "-c 0.1 -v 100 -m 7 -s 20000 -g 144 -h 0 -r 0 -z 1 -n 0 -y 0 -k cosine -f 1 -w 1 -ge 0 -a 0 "
                        "-sl 0 -sg 0 -lg -1 -nk 0 -nm 0 -pi mpi");
    TrainConfig t;
    GptConfig g;
    parse(&line, &t, &g);
    config_finish(&t, &g, 1, 0);
    expect(t.batch_size == 64 && t.total_batch_tokens == 131072 && t.grad_accum_steps == 2 && t.max_steps == 1200,
           "-d");
    expect(t.learning_rate == 0.0006f && t.warmup_steps == 100 && t.final_lr_fraction == 0.1f &&
           t.weight_decay == 0.1f, "optimizer");
    expect(t.val_every == 100 && t.val_max_steps == 7 && t.sample_every == 20000 && t.sample_length == 144, "eval");
    Line overfit = line_of("-i a -j b -a 1 -v 200 -s 200 -g 144 -b 4 -t 64 -d 256 -l 1e-4 -sl 3.5 -sg 4 -x 10 -k wsd");
    parse(&overfit, &t, &g);
    config_finish(&t, &g, 1, 0);
    expect(t.overfit_single_batch == 1 && t.skip_loss_z == 3.5f && t.skip_grad_z == 4.0f &&
           t.lr_schedule == SCHEDULE_WSD, "overfit line");
}

// What is not supported is refused by its name, with the value; what means the same is taken.
static void test_unsupported_is_refused(void) {
    static const char* refused[][2] = {
        {"-h 1", "--hellaswag (-h): the value '1'"},
        {"-w 0", "--master-weights (-w): the value '0'"},
        {"-r 1", "--recompute (-r): the value '1'"},
        {"-r 2", "--recompute (-r): the value '2'"},
        {"-ge 1", "--gelu-fusion (-ge): the value '1'"},
        {"-lg 10", "--log-gpu-every (-lg): the value '10'"},
        {"-pi tcp", "--init-method (-pi): the value 'tcp'"},
        {"-pm fs", "--init-method (-pi): the value 'fs'"},
        {"-ps 10.0.0.1", "--server-ip (-ps): the value '10.0.0.1'"},
        {"-pf /x", "--fs-path (-pf): the value '/x'"},
        {"-f 2", "--tf32 (-f): the value '2'"},
        {"-z 2", "--zero-stage (-z): the value '2'"},
        {"-z 4", "--zero-stage (-z): 4 is out of range"},
        {"-pn 2", "--num-processes (-pn): 2 processes, but mpirun started 1"},
        {"-pr 1", "--process-rank (-pr): rank 1, but mpirun says 0"},
    };
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        char text[128];
        snprintf(text, sizeof(text), "-i x %s", refused[i][0]);
        dies(text, refused[i][1]);
    }
    Line line = line_of("-i x -ge -1 -f 0 -pm mpi -ps '' -pp '' -pn 4 -pr 2 -pg 8 -lg 0");
    TrainConfig t;
    GptConfig g;
    parse(&line, &t, &g);
    config_finish(&t, &g, 4, 2);
    // gradients travel in the precision of the run, unless --grad-reduce says otherwise
    static const struct { const char* line; GradReduce want; } wires[] = {
        {"-i x", GRAD_REDUCE_FP8}, {"-i x --precision bf16", GRAD_REDUCE_BF16},
        {"-i x --precision fp32", GRAD_REDUCE_FP32}, {"-i x --precision bf16 --grad-reduce fp8", GRAD_REDUCE_FP8},
        {"-i x --grad-reduce fp8-allreduce -z 0", GRAD_REDUCE_FP8_ALLREDUCE}};
    for (size_t i = 0; i < sizeof(wires) / sizeof(wires[0]); i++) {
        Line wire = line_of(wires[i].line);
        parse(&wire, &t, &g);
        config_finish(&t, &g, 4, 2);
        expect(t.grad_reduce == (int)wires[i].want, "'%s': --grad-reduce %d", wires[i].line, t.grad_reduce);
    }
}

static void test_bad_lines(void) {
    static const char* bad[][2] = {
        {"x", "unexpected argument 'x'"},
        {"-", "unexpected argument '-'"},
        {"--", "unknown flag '--'"},
        {"-i a.bin b.bin", "unexpected argument 'b.bin'"}, // a glob that the shell expanded
        {"--bacth-size 4", "unknown flag '--bacth-size', did you mean --batch-size?"},
        {"--batch_size=4", "did you mean --batch-size?"},
        {"-precision bf16", "did you mean --precision?"},
        {"--learningrate 1", "did you mean --learning-rate?"},
        {"--nothing-like-it 1", "unknown flag '--nothing-like-it', --help lists all"},
        {"-Z 1", "unknown flag '-Z', --help lists all"},
        {"-bb 1", "unknown flag '-bb'"},
        {"--b 1", "unknown flag '--b'"},
        {"-b", "flag '-b' needs a value"},
        {"--headroom", "flag '--headroom' needs a value"},
        {"-b x", "--batch-size (-b): 'x' is not an integer, want N|auto from 1 to 65536"},
        {"-b Auto", "--batch-size (-b): 'Auto' is not an integer"},
        {"-i x -b auto", "--batch-size (-b) auto wants --total-batch-tokens (-d)"},
        {"-i x -b auto -d -1", "--batch-size (-b) auto wants --total-batch-tokens (-d)"},
        {"-i x -b auto -d 1536",
         "--total-batch-tokens (-d): 1536 is not a multiple of T * GPUs = 1024 * 1 = 1024; nearest: 1024"},
        {"-b 4x", "'4x' is not an integer"},
        {"-b 4.0", "'4.0' is not an integer"},
        {"-b ''", "'' is not an integer"},
        {"-b ~4", "' 4' is not an integer"},
        {"-b 99999999999999999999", "is not an integer"},
        {"-b 0", "--batch-size (-b): 0 is out of range, want 1 to 65536 or auto"},
        {"-b -4", "-4 is out of range"},
        {"-l x", "--learning-rate (-l): 'x' is not a number"},
        {"-l 1e-4x", "'1e-4x' is not a number"},
        {"-l nan", "'nan' is not a number"},
        {"-l inf", "'inf' is not a number"},
        {"-l -1", "--learning-rate (-l): -1 is out of range"},
        {"-l ''", "'' is not a number"},
        {"-q 1.5", "--final-lr-fraction (-q): 1.5 is out of range, want 0 to 1"},
        {"--beta2 1", "--beta2: 1 is out of range"},
        {"--eps 0", "--eps: 0 is out of range"},
        {"--headroom 0.5", "--headroom: 0.5 is out of range, want 1"},
        {"--amax-history 1025", "--amax-history: 1025 is out of range, want 1 to 1024"},
        {"--seed 4294967296", "--seed: 4294967296 is out of range"},
        {"--seed -1", "--seed: -1 is out of range"},
        {"--precision fp16", "--precision: unknown 'fp16', want one of fp8|bf16|fp32"},
        {"--precision FP8", "unknown 'FP8'"},
        {"--precision fp8|bf16", "unknown 'fp8|bf16'"},
        {"-k cos", "--lr-schedule (-k): unknown 'cos', want one of cosine|linear|constant|wsd"},
        {"--attention=flash", "--attention: unknown 'flash'"},
        {"--bf16-ops qkv,lm", "--bf16-ops: unknown 'lm' in 'qkv,lm'"},
        {"--bf16-ops qkv,", "--bf16-ops: unknown '' in 'qkv,'"},
        {"--bf16-ops none,qkv", "--bf16-ops: unknown 'none'"},
        {"--bf16-layers 2", "--bf16-layers: '2' is not a pair"},
        {"--bf16-layers 2,", "is not an integer"},
        {"--bf16-layers ,2", "is not an integer"},
        {"--bf16-layers 1,2,3", "is not an integer"},
        {"--bf16-layers 7,6", "--bf16-layers 7,6: more than the model's 12 layers"},
        {"--dry-run=1", "--dry-run takes no value"},
        {"-a 2", "--overfit-single-batch (-a): 2 is out of range"},
        {"-a 1", "--overfit-single-batch (-a) trains on a validation batch: give --val-data (-j)"},
        {"-m 0", "--val-max-steps (-m): 0 batches"},
        {"-d 0", "--total-batch-tokens (-d): 0 tokens"},
        {"-d 5000", "5000 is not a multiple of B * T * GPUs = 4 * 1024 * 1 = 4096; nearest: 4096"},
        {"-d 100", "nearest: 4096"},
        {"-b 4 -t 1024 -d 12289", "nearest: 12288"},
        {"-e d13", "unknown model 'd13', want d2 d4 d6 d12"},
        {"-e d", "unknown model 'd'"},
        {"-e d012", "unknown model 'd012'"},
        {"-e ''", "unknown model ''"},
        {"-e gpt3:c5140", "want gpt3:c5120"},
        {"-e gpt4:c1", "unknown model 'gpt4:c1'"},
        {"-e m.bin --num-layers 2", "is a model file and has its own shape"},
        {"--channels 100", "--channels 100 is not a multiple of 64, so --num-heads is needed too"},
        {"--channels 72 --num-heads 9", "72 channels, want a multiple of 16"},
        {"--channels 96 --num-heads 5", "96 channels do not divide into 5 heads"},
        {"--channels 64 --num-heads 16", "head size 4 (64 channels / 16 heads), want a multiple of 8"},
        {"--channels 1024 --num-heads 2", "head size 512"},
        {"--max-seq-len 512 -t 1024", "--seq-len (-t): T = 1024 is longer than the model's max_seq_len 512"},
        {"-e m.bin -t 2048", "T = 2048 is longer than the model's max_seq_len 1024"},
        {"--vocab-size 65537", "--vocab-size: 65537 is out of range"},
        {"-b 65536 -t 1048576", "tokens per micro-step, want at most"},
        {"-b 2 -t 24 --precision bf16 --fp8-lm-head 1", "--fp8-lm-head 1 needs --precision fp8"},
        {"-b 1 -t 24", "B * T = 1 * 24 = 24, want a multiple of 16 with --precision fp8"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char text[256];
        snprintf(text, sizeof(text), "-i x %s", bad[i][0]);
        dies(text, bad[i][1]);
    }
    dies("-b 4", "no training data: give --train-data (-i)");
    expect_dies(parse_for_four_ranks, (void*)(uintptr_t)"-i x -d 8192",
                "8192 is not a multiple of B * T * GPUs = 4 * 1024 * 4 = 16384; nearest: 16384");
}

// Sizes and parameter counts of the descriptors; d12 to d84 and gpt3:* as llm.c's tables have them.
static void test_descriptors(void) {
    static const struct {
        const char* name;
        int L, C, NH, maxT;
    } cases[] = {
        {"d2", 2, 64, 1, 1024},       {"d4", 4, 128, 2, 1024},      {"d6", 6, 384, 6, 1024},
        {"d12", 12, 768, 12, 1024},   {"gpt2:d12", 12, 768, 12, 1024}, {"d24", 24, 1024, 16, 1024},
        {"d36", 36, 1280, 20, 1024},  {"d48", 48, 1600, 25, 1024},  {"d60", 60, 1920, 30, 1024},
        {"d72", 72, 2880, 30, 1024},  {"d84", 84, 3456, 36, 1024},  {"gpt3:c384", 6, 384, 6, 2048},
        {"gpt3:c768", 12, 768, 12, 2048}, {"gpt3:c1024", 24, 1024, 16, 2048}, {"gpt3:c1536", 24, 1536, 16, 2048},
        {"gpt3:c2048", 24, 2048, 16, 2048}, {"gpt3:c2560", 32, 2560, 32, 2048}, {"gpt3:c4096", 32, 4096, 32, 2048},
        {"gpt3:c5120", 40, 5120, 40, 2048}, {"gpt3:c12288", 96, 12288, 96, 2048},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        GptConfig g;
        gpt_from_descriptor(&g, cases[i].name);
        gpt_check(&g, cases[i].name);
        expect(g.num_layers == cases[i].L && g.channels == cases[i].C && g.num_heads == cases[i].NH &&
               g.max_seq_len == cases[i].maxT && g.vocab_size == 50257 && g.padded_vocab_size == 50304,
               "%s", cases[i].name);
    }
    GptConfig g;
    gpt_from_descriptor(&g, "d12");
    expect(gpt_num_parameters(&g) == 124475904, "d12: %zu parameters", gpt_num_parameters(&g));
    gpt_from_descriptor(&g, "gpt3:c12288"); // 174.6 billion: more than 32 bits hold
    expect(gpt_num_parameters(&g) == 174604836864ull, "gpt3:c12288: %zu parameters", gpt_num_parameters(&g));
}

static void test_shape_flags(void) {
    TrainConfig t;
    GptConfig g;
    Line line = line_of("-i x --num-layers 3 --channels 192 --max-seq-len 256 --vocab-size 257 -t 128");
    parse(&line, &t, &g);
    expect(g.num_layers == 3 && g.channels == 192 && g.num_heads == 3 && g.max_seq_len == 256 && g.vocab_size == 257 &&
           g.padded_vocab_size == 384, "shape from flags");
    Line heads = line_of("-i x -e d6 --channels 96 --num-heads 4 -t 2048");
    parse(&heads, &t, &g);
    expect(g.num_layers == 6 && g.channels == 96 && g.num_heads == 4 && g.max_seq_len == 2048, "T lengthens maxT");
    Line file = line_of("-i x -e some/model.bin");
    parse(&file, &t, &g);
    expect(config_model_is_file(&t) && g.num_layers == 0, "a file leaves the shape to its reader");
    Line twice = line_of("-i x -b 4 -b 8");
    parse(&twice, &t, &g);
    expect(t.batch_size == 8, "of a flag given twice the last counts");
    Line fp32 = line_of("-i x -b 1 -t 24 --precision fp32"); // the multiple of 16 is FP8's
    parse(&fp32, &t, &g);
    config_finish(&t, &g, 1, 0);
    Line mixed = line_of("-i x -e d6 --bf16-layers 1,2 --bf16-ops proj,fc");
    parse(&mixed, &t, &g);
    int fp8 = 0;
    for (int l = 0; l < 6; l++) {
        for (int op = BF16_OP_QKV; op <= BF16_OP_FCPROJ; op *= 2) {
            int want = l >= 1 && l < 4 && (op == BF16_OP_QKV || op == BF16_OP_FCPROJ);
            fp8 += config_linear_is_fp8(&t, &g, l, op);
            expect(config_linear_is_fp8(&t, &g, l, op) == want, "layer %d op %d", l, op);
        }
    }
    expect(fp8 == 6, "%d linears in FP8", fp8);
}

// What the run depends on changes the hash, what is only seen does not.
static void test_hash(void) {
    const char* lines[] = {"-i x", "-i x -o log -v 7 -s 9 -g 3 --threads 2 --log-every 5 --prompt a --floor-loss 1 "
                                   "--profile 2 --autotune-cache a.txt",
                           "-i y", "-i x -l 1e-3", "-i x -e d24", "-i x --seed 43", "-i x --bf16-ops fc", "-i x -b 8",
                           "-i x --fp8-lm-head 1", "-i x --fast-accum none", "-i x --autotune off",
                           "-i x --bf16-layers 0,1", "-i x --bf16-layers 1,0", "-i x --precision bf16", "-i x -u 1"};
    enum { NUM_LINES = sizeof(lines) / sizeof(lines[0]) };
    uint64_t hash[NUM_LINES];
    for (int i = 0; i < NUM_LINES; i++) {
        Line line = line_of(lines[i]);
        TrainConfig t;
        GptConfig g;
        parse(&line, &t, &g);
        config_finish(&t, &g, 1, 0);
        hash[i] = config_hash(&t, &g);
        for (int k = 0; k < i; k++) {
            expect((hash[i] == hash[k]) == (i == 1), "'%s' and '%s'", lines[i], lines[k]);
        }
    }
}

static char* printed(int what, const char* text) {
    char* out = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&out, &size);
    Line line = line_of(text);
    TrainConfig t;
    GptConfig g;
    parse(&line, &t, &g);
    config_finish(&t, &g, 1, 0);
    if (what == 0) {
        config_usage(f);
    } else if (what == 1) {
        config_print(f, &t, &g);
    } else {
        config_write_json(f, &t, &g);
    }
    fclose(f);
    return out;
}

// Every row reaches help, banner and log; changed values are marked.
static void test_printed(void) {
    const char* line = "-i x -e d2 -t 512 --prompt a~\"b\"\\\xC3\xA4\xFF\t --headroom 1.25 -k constant -u 9";
    char* usage = printed(0, line);
    char* banner = printed(1, line);
    char* json = printed(2, line);
    int count;
    const Flag* flags = config_flags(&count);
    for (const Flag* flag = flags; flag < flags + count; flag++) {
        if (flag->type == FLAG_HEADING) {
            continue;
        }
        char name[64];
        snprintf(name, sizeof(name), "--%s ", flag->name);
        expect(strstr(usage, name) != NULL && strstr(usage, flag->help) != NULL, "--help lacks %s", name);
        if (flag->type != FLAG_FIXED) {
            snprintf(name, sizeof(name), "| %s ", flag->name);
            expect(strstr(banner, name) != NULL, "the banner lacks %s", flag->name);
            snprintf(name, sizeof(name), "\"%s\": ", flag->name);
            for (char* c = name; *c; c++) {
                *c = *c == '-' ? '_' : *c;
            }
            expect(strstr(json, name) != NULL, "the JSON lacks %s", name);
        }
    }
    expect(strstr(banner, "| headroom              * | 1.25 ") != NULL, "headroom is not marked:\n%s", banner);
    expect(strstr(banner, "| margin                  | 0 ") != NULL, "margin is marked");
    expect(strstr(banner, "T = 512 is shorter than max_seq_len 1024") != NULL, "no note about T");
    expect(strstr(banner, "--warmup-steps does nothing") != NULL, "no note about the warm-up");
    expect(strstr(json, "\"prompt\": \"a \\\"b\\\"\\\\\xC3\xA4\\ufffd\\u0009\"") != NULL, "escapes: %s", json);
    expect(strstr(json, "\"headroom\": 1.25, ") != NULL && strstr(json, "\"learning_rate\": 0.0003, ") != NULL,
           "floats");
    for (int column = 0, i = 0; usage[i]; i++) {
        column = usage[i] == '\n' ? 0 : column + 1;
        expect(column <= 160, "a line of --help is longer than 160 columns");
    }
    free(usage);
    free(banner);
    free(json);
}

static void help_wanted(void* unused) {
    (void)unused;
    char* argv[] = {(char*)(uintptr_t)"test", (char*)(uintptr_t)"-b", (char*)(uintptr_t)"0",
                    (char*)(uintptr_t)"--help"};
    TrainConfig t;
    GptConfig g;
    config_parse(&t, &g, 2, argv + 2); // argv[2] is the program's name, --help its only argument
}

static void test_help_exits_with_zero(void) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        check(freopen("/dev/null", "w", stdout) != NULL, "freopen");
        help_wanted(NULL);
        _exit(7); // came back
    }
    int status = 0;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "--help: status %d", status);
}

// Floats are shown with the fewest digits that read back to the same bits.
static void test_float_text(void) {
    int count;
    const Flag* flags = config_flags(&count);
    const Flag* flag = config_find_flag("-l");
    expect(flag >= flags && flag < flags + count, "-l");
    static const char* values[] = {"0.0006", "0.1", "3.1415927", "1e-08", "0", "1", "0.333333343"};
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        TrainConfig t;
        memset(&t, 0, sizeof(t));
        config_set(&t, flag, values[i]);
        char out[64];
        config_get(&t, flag, out, sizeof(out));
        expect(strtof(out, NULL) == strtof(values[i], NULL) && strlen(out) <= strlen(values[i]), "%s became %s",
               values[i], out);
    }
}

static void test_checkpoint_flags(void) {
    Line line = line_of("-i a -o log -n 5000 -nk 5 -nm 20000 -y 1 --max-minutes 55.5 --export-llmc out");
    TrainConfig t;
    GptConfig g;
    parse(&line, &t, &g);
    config_finish(&t, &g, 1, 0);
    expect(t.checkpoint_every == 5000 && t.keep == 5 && t.keep_every == 20000 && strcmp(t.resume, "1") == 0 &&
           t.max_minutes == 55.5f && strcmp(t.export_llmc, "out") == 0 && t.export_llmc_processes == 1, "values");
    expect(!t.shape_given, "nothing was said about the shape");
    Line shaped = line_of("-i a --num-layers=3");
    parse(&shaped, &t, &g);
    expect(t.shape_given, "--num-layers says something about the shape");
    dies("-i a -n 10", "--checkpoint-every (-n) wants --output-dir (-o)");
    dies("-i a -y 1", "--resume (-y) 1 wants --output-dir (-o)");
    dies("-i a --max-minutes 5", "--max-minutes wants --output-dir (-o)");
    dies("-i a -o log -n -1", "--checkpoint-every (-n): -1 is out of range");
}

// What a checkpoint remembers of the settings, and what it says has changed.
static void test_changes(void) {
    Line line = line_of("-i some~data -e d2 --precision bf16 -l 0.0006 --bf16-layers 1,0 -o one");
    Line same = line_of("-i some~data -e d2 --precision bf16 -l 6e-4 --bf16-layers 1,0 -o two -v 7 -n 10");
    Line other = line_of("-i some~data -e d2 --precision fp8 -l 0.001 -b 8 -o two");
    TrainConfig t;
    GptConfig g;
    parse(&line, &t, &g);
    char* text = config_to_text(&t);
    char changes[512];
    expect(strstr(text, "precision=bf16\n") != NULL && strstr(text, "train-data=some data\n") != NULL &&
           strstr(text, "bf16-layers=1,0\n") != NULL && strstr(text, "checkpoint-every=0\n") != NULL, "text:\n%s", text);
    expect(config_changes(&t, text, changes, sizeof(changes)) == 0 && changes[0] == 0, "the same: %s", changes);
    parse(&same, &t, &g);
    expect(config_changes(&t, text, changes, sizeof(changes)) == 0, "what does not change the numbers: %s", changes);
    parse(&other, &t, &g);
    int count = config_changes(&t, text, changes, sizeof(changes));
    expect(count == 4 && strcmp(changes, "batch-size 4 -> 8, learning-rate 0.0006 -> 0.001, precision bf16 -> fp8, "
                                "bf16-layers 1,0 -> 0,0") == 0, "%d: %s", count, changes);
    expect(config_changes(&t, text, changes, 24) == 4 && strlen(changes) < 24, "cut short: %s", changes);
    expect(config_changes(&t, "", changes, sizeof(changes)) == 5, "an empty text has the defaults: %s", changes);
    free(text);
    char* lines = config_to_text(&t); // a newline in a value cannot forge another setting
    t.train_data = "a\nprecision=fp32";
    char* forged = config_to_text(&t);
    expect(strstr(forged, "\nprecision=fp32") == NULL && strstr(forged, "train-data=a precision=fp32\n") != NULL, "%s",
           forged);
    free(lines);
    free(forged);
}

int main(void) {
    unit_run(test_defaults_are_llmcs);
    unit_run(test_every_flag_every_name);
    unit_run(test_autotune_cache);
    unit_run(test_table_is_sound);
    unit_run(test_knows_all_llmc_flags);
    unit_run(test_llmc_command_lines);
    unit_run(test_unsupported_is_refused);
    unit_run(test_checkpoint_flags);
    unit_run(test_changes);
    unit_run(test_bad_lines);
    unit_run(test_descriptors);
    unit_run(test_shape_flags);
    unit_run(test_hash);
    unit_run(test_printed);
    unit_run(test_help_exits_with_zero);
    unit_run(test_float_text);
    return unit_report();
}
