// data/make_corpus: same seed, same bytes; the grammar is unambiguous; the printed entropy is the entropy of the texts.
#define TESTING
#include "../../data/make_corpus.c"

#include "unit.h"

static CorpusGrammar grammar;

#define PINNED_TRAIN_HASH 0x4cc5e195d2cbb131u // of 1000 stories

// FNV-1a, 64 bits.
static uint64_t hash_of(const char* text, size_t n) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ (uint8_t)text[i]) * 1099511628211u;
    }
    return hash;
}

// The hash of the first `stories` stories of a stream.
static uint64_t hash_of_stories(uint64_t seed, uint64_t stream, int stories) {
    CorpusStory s = {.g = &grammar};
    for (int i = 0; i < stories; i++) {
        corpus_write_story(&s, seed, stream, (uint64_t)i);
    }
    uint64_t hash = hash_of(s.text, s.length);
    free(s.text);
    return hash;
}

// Pinned: a change of the grammar or of the random numbers changes everybody's default corpus, and must be meant.
static void test_same_bytes_everywhere(void) {
    uint64_t hash = hash_of_stories(1, CORPUS_TRAIN_STREAM, 1000);
    expect(hash == PINNED_TRAIN_HASH, "1000 stories of seed 1: hash 0x%016llx, want 0x%016llx",
           (unsigned long long)hash, (unsigned long long)PINNED_TRAIN_HASH);
    expect(hash_of_stories(1, CORPUS_VAL_STREAM, 1000) != hash, "the validation stories are the training stories");
    expect(hash_of_stories(2, CORPUS_TRAIN_STREAM, 1000) != hash, "seed 2 gives the stories of seed 1");
}

// A story depends on its number only, not on what was written before it.
static void test_stories_are_independent(void) {
    CorpusStory all = {.g = &grammar}, one = {.g = &grammar};
    for (uint64_t i = 0; i < 50; i++) {
        size_t begin = all.length;
        corpus_write_story(&all, 7, 0, i);
        one.length = 0;
        corpus_write_story(&one, 7, 0, i);
        expect(one.length == all.length - begin && memcmp(one.text, all.text + begin, one.length) == 0,
               "story %d written alone differs", (int)i);
    }
    free(all.text);
    free(one.text);
}

static void test_draws_are_uniform(void) {
    enum { N = 6, DRAWS = 600000 };
    int count[N] = {0};
    CorpusRandom r = corpus_random(3, 0, 0);
    for (int i = 0; i < DRAWS; i++) {
        count[corpus_draw(&r, N)]++;
    }
    for (int i = 0; i < N; i++) { // binomial: sigma = sqrt(n p (1 - p)) = 289
        expect(abs(count[i] - DRAWS / N) < 5 * 289, "value %d came %d times of %d, want %d +- 1445", i, count[i], DRAWS,
               DRAWS / N);
    }
    CorpusRandom big = corpus_random(3, 0, 1); // n > 2^31: almost half of the values are drawn again
    for (int i = 0; i < 1000; i++) {
        uint32_t value = corpus_draw(&big, 0x80000001u);
        expect(value <= 0x80000000u, "drew %u, want at most 2^31", value);
    }
}

// The mean of -ln p over many stories, p from the choices made while writing them, converges to the computed entropy,
// and so does the mean length. Five standard errors of the mean: one in 1.7 million correct programs would fail.
static void test_entropy(void) {
    enum { STORIES = 40000 };
    double sum = 0, sum2 = 0, bytes = 0, bytes2 = 0;
    CorpusStory s = {.g = &grammar};
    size_t shortest = 1 << 20, longest = 0;
    for (int i = 0; i < STORIES; i++) {
        s.length = 0;
        s.information = 0;
        corpus_write_story(&s, 11, 0, (uint64_t)i);
        double n = (double)s.length;
        sum += s.information;
        sum2 += s.information * s.information;
        bytes += n;
        bytes2 += n * n;
        shortest = s.length < shortest ? s.length : shortest;
        longest = s.length > longest ? s.length : longest;
    }
    free(s.text);
    double mean = sum / STORIES, error = sqrt((sum2 / STORIES - mean * mean) / STORIES);
    double mean_bytes = bytes / STORIES, bytes_error = sqrt((bytes2 / STORIES - mean_bytes * mean_bytes) / STORIES);
    const CorpusRule* story = &grammar.rules[0];
    expect(fabs(mean - story->entropy) < 5 * error, "mean of -ln p: %.4f nats, want %.4f +- %.4f", mean, story->entropy,
           5 * error);
    expect(fabs(mean_bytes - story->bytes) < 5 * bytes_error, "mean length: %.3f bytes, want %.3f +- %.3f", mean_bytes,
           story->bytes, 5 * bytes_error);
    expect(error / mean < 0.002 && bytes_error / mean_bytes < 0.002, "too few stories to say anything: %.4f, %.4f",
           error, bytes_error);
    expect(shortest >= 200 && longest <= 1600, "stories of %zu to %zu bytes, want 200 to 1600", shortest, longest);
}

// Two rules worked out by hand from their rows.
static void test_entropy_by_hand(void) {
    // "loved": weights 5, 3, 2 of texts of 18, 18, 15 bytes
    int rule = corpus_find_rule(&grammar, "loved", 5);
    double h = -(0.5 * log(0.5) + 0.3 * log(0.3) + 0.2 * log(0.2)), bytes = 0.5 * 18 + 0.3 * 18 + 0.2 * 15;
    expect(fabs(grammar.rules[rule].entropy - h) < 1e-12, "loved: %.6f nats, want %.6f", grammar.rules[rule].entropy,
           h);
    expect(fabs(grammar.rules[rule].bytes - bytes) < 1e-12, "loved: %.6f bytes, want %.6f", grammar.rules[rule].bytes,
           bytes);
    // "drink": "warm milk" (4), "hot soup" (3), one of 12 foods + "s with honey" (2)
    rule = corpus_find_rule(&grammar, "drink", 5);
    double p[3] = {4.0 / 9, 3.0 / 9, 2.0 / 9};
    h = -(p[0] * log(p[0]) + p[1] * log(p[1]) + p[2] * log(p[2])) + p[2] * log(12);
    double food = (5 + 4 + 4 + 6 + 6 + 3 + 4 + 3 + 6 + 5 + 3 + 3) / 12.0;
    bytes = p[0] * 9 + p[1] * 8 + p[2] * (food + 12);
    expect(fabs(grammar.rules[rule].entropy - h) < 1e-12, "drink: %.6f nats, want %.6f", grammar.rules[rule].entropy,
           h);
    expect(fabs(grammar.rules[rule].bytes - bytes) < 1e-12, "drink: %.6f bytes, want %.6f", grammar.rules[rule].bytes,
           bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// a parser that knows nothing of prefixes: it tries every alternative and every word at every place, to the end

typedef struct Rest { // what is still to be read: a row from some item on, then the rest of the caller
    const CorpusItem* item;
    const struct Rest* next;
} Rest;

typedef struct {
    const char* text;
    size_t length;
    int word[CORPUS_NUM_SLOTS];
    double information; // of the derivation being tried
    int derivations;    // whole ones found
    double found;       // information of the last one found
} Parse;

static void parse(Parse* p, size_t at, Rest rest) {
    const CorpusItem* item = rest.item;
    if (item->kind == ITEM_END) {
        if (rest.next != NULL) {
            parse(p, at, *rest.next);
        } else if (at == p->length) {
            p->derivations++;
            p->found = p->information;
        }
        return;
    }
    double before = p->information;
    Rest next = {item + 1, rest.next};
    if (item->kind == ITEM_TEXT) {
        if (p->length - at >= (size_t)item->length && memcmp(p->text + at, item->text, (size_t)item->length) == 0) {
            parse(p, at + (size_t)item->length, next);
        }
        return;
    }
    if (item->kind == ITEM_RULE) {
        const CorpusRule* r = &grammar.rules[item->rule];
        for (int row = r->first_row; row < r->first_row + r->num_rows; row++) {
            p->information = before - log(corpus_rows[row].weight / (double)r->total_weight);
            parse(p, at, (Rest){&grammar.items[grammar.row_items[row]], &next});
        }
        p->information = before;
        return;
    }
    int old = p->word[item->slot], list = grammar.slot_list[item->slot];
    if (item->kind == ITEM_SET) {
        p->word[item->slot] = p->word[item->source];
        parse(p, at, next);
        p->word[item->slot] = old;
        return;
    }
    int first = item->kind == ITEM_SHOW ? old : 0, end = item->kind == ITEM_SHOW ? old + 1 : grammar.list_size[list];
    for (int w = first; w < end; w++) {
        char word[64];
        size_t n = (size_t)corpus_print_word(word, list, w, item->form);
        int allowed = p->length - at >= n && memcmp(p->text + at, word, n) == 0;
        for (int i = 0; i < item->num_excluded; i++) {
            allowed = allowed && w != p->word[item->excluded[i]];
        }
        if (allowed) {
            p->word[item->slot] = w;
            p->information =
                before + (item->kind == ITEM_CHOOSE ? log(grammar.list_size[list] - item->num_excluded) : 0);
            parse(p, at + n, next);
        }
    }
    p->word[item->slot] = old;
    p->information = before;
}

static void test_one_derivation(void) {
    const CorpusItem start[2] = {{.kind = ITEM_RULE, .rule = 0}, {.kind = ITEM_END}};
    CorpusStory s = {.g = &grammar};
    for (int i = 0; i < 3000; i++) {
        s.length = 0;
        s.information = 0;
        corpus_write_story(&s, 5, 1, (uint64_t)i);
        Parse p = {.text = s.text, .length = s.length};
        memset(p.word, 0xff, sizeof(p.word));
        parse(&p, 0, (Rest){start, NULL});
        expect(p.derivations == 1, "story %d has %d derivations, want 1: %.*s", i, p.derivations, (int)s.length,
               s.text);
        expect(fabs(p.found - s.information) < 1e-9, "story %d: -ln p = %.9f by parsing, %.9f by writing", i, p.found,
               s.information);
    }
    Parse p = {.text = s.text, .length = s.length - 1}; // and a broken story has none
    memset(p.word, 0xff, sizeof(p.word));
    parse(&p, 0, (Rest){start, NULL});
    expect(p.derivations == 0, "a story without its last byte has %d derivations", p.derivations);
    free(s.text);
}

// The proof itself can fail: two equal alternatives, and one that is the beginning of another.
static void check_damaged(void* damaged) {
    corpus_check_grammar(damaged);
}
static void compute_damaged(void* damaged) {
    corpus_compute_means(damaged, 0);
}

static void test_check_finds_ambiguity(void) {
    corpus_check_grammar(&grammar);
    CorpusGrammar* g = malloc_or_die(sizeof(*g));
    int rule = corpus_find_rule(&grammar, "weather", 7), row = grammar.rules[rule].first_row;
    *g = grammar;
    g->row_items[row + 1] = g->row_items[row];
    expect_dies(check_damaged, g, "rule 'weather' cannot tell its alternatives 1 and 2");
    *g = grammar;
    g->items[g->row_items[row]].length = 1;
    g->items[g->row_items[row + 1]].text = "sunny days";
    g->items[g->row_items[row + 1]].length = 10;
    expect_dies(check_damaged, g, "rule 'weather' cannot tell its alternatives 1 and 2");
    *g = grammar;
    int solos = grammar.rules[corpus_find_rule(&grammar, "solos", 5)].first_row;
    g->items[g->row_items[solos] + 1].text = " "; // "[solo] " against "[solo] [solo]\n"
    expect_dies(check_damaged, g, "rule 'solos' cannot tell its alternatives 1 and 2");
    *g = grammar;
    g->items[g->row_items[row]] = (CorpusItem){.kind = ITEM_RULE, .rule = 0};
    for (int i = 0; i < g->num_rules; i++) {
        g->rules[i].state = 0;
    }
    expect_dies(compute_damaged, g, "uses itself");
    free(g);
}

// ---------------------------------------------------------------------------------------------------------------------
// the program

static char folder[] = "/tmp/test_corpus_XXXXXX";

typedef struct {
    char* argv[16];
} Call;

static void call_main(void* arg) {
    char** argv = ((Call*)arg)->argv;
    int argc = 0;
    while (argv[argc] != NULL) {
        argc++;
    }
    corpus_main(argc, argv);
}

static char* read_text(const char* path, size_t* n) {
    *n = (size_t)file_size_or_die(path);
    char* text = malloc_or_die(*n);
    FILE* f = fopen_or_die(path, "rb");
    fread_or_die(text, *n, f, path);
    fclose(f);
    return text;
}

static void test_files(void) {
    char train[64], val[64];
    snprintf(train, sizeof(train), "%s/train.txt", folder);
    snprintf(val, sizeof(val), "%s/val.txt", folder);
    Call call = {
        {"make_corpus", "--bytes", "100000", "--seed", "1", "-o", train, "--val-bytes", "5000", "--val-output", val}};
    fflush(stdout);
    int saved = dup(1);
    check(freopen("/dev/null", "w", stdout) != NULL, "cannot silence stdout");
    call_main(&call);
    fflush(stdout);
    dup2(saved, 1);
    close(saved);
    size_t n, val_n;
    char *text = read_text(train, &n), *val_text = read_text(val, &val_n);
    expect(n >= 100000 && n < 102000 && val_n >= 5000 && val_n < 7000, "sizes %zu and %zu", n, val_n);
    size_t separator = strlen(CORPUS_SEPARATOR);
    expect(memcmp(text + n - separator, CORPUS_SEPARATOR, separator) == 0, "the file does not end in a separator");
    CorpusStory s = {.g = &grammar};
    corpus_write_story(&s, 1, CORPUS_TRAIN_STREAM, 0);
    corpus_append(&s, CORPUS_SEPARATOR, separator);
    corpus_write_story(&s, 1, CORPUS_TRAIN_STREAM, 1);
    expect(memcmp(text, s.text, s.length) == 0, "the file does not start with stories 0 and 1");
    expect(memmem(text, n, val_text, 200) == NULL, "the first validation story is in the training text");
    free(s.text);
    free(text);
    free(val_text);
    unlink(train);
    unlink(val);
}

static void test_bad_flags(void) {
    struct {
        Call call;
        const char* message;
    } cases[] = {
        {{{"make_corpus"}}, "nothing to write"},
        {{{"make_corpus", "--bytes", "10"}}, "nothing to write"},
        {{{"make_corpus", "--bytes"}}, "--bytes: no value"},
        {{{"make_corpus", "--bytes", "-5", "-o", "x"}}, "--bytes: '-5'"},
        {{{"make_corpus", "--bytes", "1e6", "-o", "x"}}, "--bytes: '1e6'"},
        {{{"make_corpus", "--bytes", "0", "-o", "x"}}, "--bytes: '0'"},
        {{{"make_corpus", "--bytes", "99999999999999999999", "-o", "x"}}, "--bytes: '9999"},
        {{{"make_corpus", "--bytes", "10", "-o", "x", "--seed", ""}}, "--seed: ''"},
        {{{"make_corpus", "--bytes", "10", "-o", "x", "--val-bytes", "5"}}, "want both or none"},
        {{{"make_corpus", "--bytes", "10", "-o", "x", "--val-bytes", "5", "--val-output", "x"}}, "are both 'x'"},
        {{{"make_corpus", "--bytes", "10", "-o", "/nowhere/at/all"}}, "cannot open '/nowhere/at/all.tmp' for writing"},
        {{{"make_corpus", "--print-entropy", "--seed", "1"}}, "--print-entropy: 2 more"},
        {{{"make_corpus", "--frob"}}, "unknown argument '--frob'"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        expect_dies(call_main, &cases[i].call, cases[i].message);
    }
}

int main(void) {
    corpus_compile(&grammar);
    corpus_compute_means(&grammar, 0);
    check(mkdtemp(folder) != NULL, "cannot make a folder '%s': %s", folder, strerror(errno));
    unit_run(test_same_bytes_everywhere);
    unit_run(test_stories_are_independent);
    unit_run(test_draws_are_uniform);
    unit_run(test_entropy);
    unit_run(test_entropy_by_hand);
    unit_run(test_one_derivation);
    unit_run(test_check_finds_ambiguity);
    unit_run(test_files);
    unit_run(test_bad_flags);
    rmdir(folder);
    return unit_report();
}
