// What ranks compare at start-up: facts as text, which of them differ, and in which words that is said.
#include "agree.h"

#include "unit.h"

// The text that some facts are written as; malloc'ed.
static char* text_of(void (*write)(FILE* out, const void* what), const void* what) {
    char* text = NULL;
    size_t size = 0;
    FILE* f = open_memstream(&text, &size);
    write(f, what);
    fclose(f);
    return text;
}

static void expect_differences(const char* const* texts, int num_ranks, const char* want_errors,
                               const char* want_warnings) {
    char *errors, *warnings;
    agree_differences(texts, num_ranks, &errors, &warnings);
    expect(strcmp(errors != NULL ? errors : "", want_errors) == 0, "errors:\n%s\nwant:\n%s",
           errors != NULL ? errors : "none", want_errors);
    expect(strcmp(warnings != NULL ? warnings : "", want_warnings) == 0, "warnings:\n%s\nwant:\n%s",
           warnings != NULL ? warnings : "none", want_warnings);
    expect((errors != NULL) == (want_errors[0] != 0) && (warnings != NULL) == (want_warnings[0] != 0),
           "a list without entries is NULL");
    free(errors);
    free(warnings);
}

static void write_odd(FILE* out, const void* what) {
    (void)what;
    agree_fact(out, "--prompt", "two\nlines=%d", 1);
    agree_fact(out, "version", "%s", "");
}

static void test_facts(void) {
    char* text = text_of(write_odd, NULL);
    expect(strcmp(text, "--prompt=two lines=1\nversion=\n") == 0, "got: %s", text);
    free(text);
}

static void test_hash(void) {
    const char* a = "version=1\n@host=one\n--seed=42\n?device=H200\n";
    expect(agree_hash(a) == agree_hash("version=1\n@host=two\n--seed=42\n?device=H200\n"), "the host counts");
    expect(agree_hash(a) == agree_hash("version=1\n--seed=42\n?device=H200\n@host=three\n"), "the host's line counts");
    expect(agree_hash(a) != agree_hash("version=1\n@host=one\n--seed=43\n?device=H200\n"), "a value does not count");
    expect(agree_hash(a) != agree_hash("version=1\n@host=one\n--seed=42\n?device=H100\n"), "the device does not count");
    expect(agree_hash(a) != agree_hash("version=1\n@host=one\n--seed=42\n"), "a missing line does not count");
    expect(agree_hash("a=1\nb=2\n") != agree_hash("a=1b=2\n"), "line ends do not count");
}

static void test_differences(void) {
    const char* same[] = {"a=1\nb=2\n?d=x\n", "a=1\nb=2\n?d=x\n"};
    expect_differences(same, 2, "", "");
    const char* three[] = {"--learning-rate=0.0003\ndata=5 tokens in 3 files\n",
                           "--learning-rate=0.0003\ndata=5 tokens in 3 files\n",
                           "--learning-rate=0.0006\ndata=4 tokens in 3 files\n"};
    expect_differences(three, 3, "--learning-rate is 0.0003 on rank 0 and 1 other, 0.0006 on rank 2; "
                                 "data: 5 tokens in 3 files on rank 0 and 1 other, 4 tokens in 3 files on rank 2", "");
    const char* zero[] = {"a=1\n", "a=2\n", "a=2\n", "a=2\n"};
    expect_differences(zero, 4, "a: 1 on rank 0, 2 on rank 1 and 2 others", "");
    const char* device[] = {"?device=H200\n", "?device=H100\n"};
    expect_differences(device, 2, "", "device: H200 on rank 0, H100 on rank 1");
    const char* prefix[] = {"--a=1\n--ab=2\n", "--a=1\n--ab=3\n"}; // a name that begins as another one
    expect_differences(prefix, 2, "--ab is 2 on rank 0, 3 on rank 1", "");
    const char* longer[] = {"--a=1\n", "--a=12\n"};
    expect_differences(longer, 2, "--a is 1 on rank 0, 12 on rank 1", "");
}

// Another version of the program may know other facts.
static void test_missing(void) {
    const char* texts[] = {"a=1\n", "a=1\nnew=2\n", "a=1\nnew=2\n"};
    expect_differences(texts, 3, "new: not known on rank 0, 2 on rank 1 and 1 other", "");
    const char* empty[] = {"--output-dir=\n", "--output-dir=runs/a\n"};
    expect_differences(empty, 2, "--output-dir is empty on rank 0, runs/a on rank 1", "");
}

static void test_many(void) {
    char texts[2][256] = {"", ""};
    for (int i = 0; i < 9; i++) {
        for (int r = 0; r < 2; r++) {
            snprintf(texts[r] + strlen(texts[r]), sizeof(texts[r]) - strlen(texts[r]), "f%d=%d\n", i, r);
        }
    }
    const char* both[] = {texts[0], texts[1]};
    expect_differences(both, 2, "f0: 0 on rank 0, 1 on rank 1; f1: 0 on rank 0, 1 on rank 1; f2: 0 on rank 0, 1 on rank 1; "
                                "f3: 0 on rank 0, 1 on rank 1; f4: 0 on rank 0, 1 on rank 1; f5: 0 on rank 0, 1 on rank 1; "
                                "and 3 more", "");
    const char* five[] = {"a=0\n", "a=1\n", "a=2\n", "a=3\n", "a=4\n"};
    expect_differences(five, 5, "a: 0 on rank 0, 1 on rank 1, 2 on rank 2, and more", "");
    char path[2][300] = {"i=", "i="};
    memset(path[0] + 2, 'x', 200);
    memset(path[1] + 2, 'x', 201);
    const char* paths[] = {path[0], path[1]};
    char *errors, *warnings;
    agree_differences(paths, 2, &errors, &warnings);
    expect(errors != NULL && strlen(errors) < 300 && strstr(errors, "xxx... on rank 0, xxx") != NULL, "%s", errors);
    free(errors);
}

// Hosts are named when there are several.
static void test_hosts(void) {
    const char* one[] = {"@host=n1\na=1\n", "@host=n1\na=2\n"};
    expect_differences(one, 2, "a: 1 on rank 0, 2 on rank 1", "");
    const char* two[] = {"@host=n1\na=1\n", "@host=n1\na=1\n", "@host=n2\na=2\n"};
    expect_differences(two, 3, "a: 1 on rank 0 (n1) and 1 other, 2 on rank 2 (n2)", "");
    const char* hosts_only[] = {"@host=n1\na=1\n", "@host=n2\na=1\n"};
    expect_differences(hosts_only, 2, "", "");
}

static void write_settings(FILE* out, const void* train) { agree_settings(out, (const TrainConfig*)train); }

// One flag at a time has another value on rank 1.
static void test_settings(void) {
    static const struct {
        const char *flag, *value, *want;
    } cases[] = {
        {"-l", "0.0006", "--learning-rate is 0.0003 on rank 0, 0.0006 on rank 1"},
        {"-v", "10", "--val-every is 20 on rank 0, 10 on rank 1"},
        {"-m", "3", "--val-max-steps is 20 on rank 0, 3 on rank 1"},
        {"-n", "10", "--checkpoint-every is 0 on rank 0, 10 on rank 1"},
        {"-nk", "2", "--keep is 0 on rank 0, 2 on rank 1"},
        {"-s", "0", "--sample-every is 20 on rank 0, 0 on rank 1"},
        {"-o", "runs/b", "--output-dir is runs/a on rank 0, runs/b on rank 1"},
        {"-x", "100", "--max-steps is -1 on rank 0, 100 on rank 1"},
        {"-y", "1", "--resume is 0 on rank 0, 1 on rank 1"},
        {"-i", "b", "--train-data is a on rank 0, b on rank 1"},
        {"-b", "auto", "--batch-size is 4 on rank 0, auto on rank 1"},
        {"--comm-timeout", "3", "--comm-timeout is 45 on rank 0, 3 on rank 1"},
        {"--max-minutes", "5", "--max-minutes is 0 on rank 0, 5 on rank 1"},
        {"--grad-reduce", "fp32", "--grad-reduce is auto on rank 0, fp32 on rank 1"},
        {"--profile", "5", "--profile is 0 on rank 0, 5 on rank 1"},
        {"--threads", "3", ""},
        {"--checkpoint-memory", "2", ""},
        {"--autotune-cache", "x", ""},
        {"-pr", "1", ""},
    };
    char* first[] = {"test", "-i", "a", "-o", "runs/a"};
    TrainConfig train;
    GptConfig gpt;
    config_parse(&train, &gpt, 5, first);
    char* own = text_of(write_settings, &train);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char* other[] = {"test", "-i", "a", "-o", "runs/a", (char*)(uintptr_t)cases[i].flag,
                         (char*)(uintptr_t)cases[i].value};
        config_parse(&train, &gpt, 7, other);
        char* text = text_of(write_settings, &train);
        const char* both[] = {own, text};
        expect_differences(both, 2, cases[i].want, "");
        expect((agree_hash(own) == agree_hash(text)) == (cases[i].want[0] == 0), "%s: the hash", cases[i].flag);
        free(text);
    }
    free(own);
}

static void write_model(FILE* out, const void* train) {
    GptConfig gpt;
    TrainConfig chosen = *(const TrainConfig*)train;
    memset(&gpt, 0, sizeof(gpt));
    gpt.channels = 64;
    gpt.num_layers = 2;
    agree_model(out, &chosen, &gpt);
}

static void test_model(void) {
    TrainConfig train;
    memset(&train, 0, sizeof(train));
    train.batch_size = 4, train.grad_accum_steps = 2, train.total_batch_tokens = 512;
    char* text = text_of(write_model, &train);
    expect(strcmp(text, "model=2 layers, 64 channels, 0 heads, 0 positions, a vocabulary of 0\n"
                        "batch=-b 4, 2 micro-steps, 512 tokens per step\n") == 0, "got: %s", text);
    free(text);
}

static void test_shared(void) {
    const char ids[4][8] = {"gpu a", "gpu b", "gpu c", "gpu b"}, none[2][8] = {"", ""};
    int first = -1, second = -1;
    expect(agree_shared(ids[0], 8, 4, &first, &second) && first == 1 && second == 3, "%d and %d", first, second);
    expect(!agree_shared(ids[0], 8, 3, &first, &second), "%d and %d", first, second);
    expect(!agree_shared(none[0], 8, 2, &first, &second), "devices without a name");
}

int main(void) {
    unit_run(test_facts);
    unit_run(test_hash);
    unit_run(test_differences);
    unit_run(test_missing);
    unit_run(test_many);
    unit_run(test_hosts);
    unit_run(test_settings);
    unit_run(test_model);
    unit_run(test_shared);
    return unit_report();
}
