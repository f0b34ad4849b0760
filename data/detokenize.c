// Token shards (lib/tokens.h) back to text, on standard output or into a file.
//
//     data/detokenize --gpt2 VOCABULARY data/fineweb_val.bin | less
//
// Every document is followed by the separator, so that data/tokenize makes the same tokens of the text again. Several
// shards are read as one stream: a document may go on in the next shard.
#include "../lib/check.h"

#include "../lib/tokenizer.h"
#include "../lib/tokens.h"

#define DETOKENIZE_SEPARATOR "\n" TOKENIZER_END_OF_TEXT "\n"
#define DETOKENIZE_TOKENS 65536 // read at a time

static const char* detokenize_usage =
    "data/detokenize [--byte | --gpt2 VOCABULARY] [-o FILE] [--document-separator STR] SHARD...\n"
    "Writes the text of llm.c token shards, in the order given, to standard output.\n\n"
    "  --byte                    byte-level shards; shards made by data/tokenize --byte are known without it\n"
    "  --gpt2 VOCABULARY         folder with vocab.bpe and encoder.json, or the file gpt2.tiktoken\n"
    "  -o FILE                   write here instead\n"
    "  --document-separator STR  written after every document, \\n \\r \\t \\\\ allowed (default "
    "\\n<|endoftext|>\\n)\n";

typedef struct {
    const char* vocabulary; // NULL: the shards must say that they are byte-level
    const char* output;     // NULL: standard output
    const char* separator;  // as given, escapes and all
    char** shards;          // (num_shards)
    int num_shards;
} DetokenizeOptions;

static DetokenizeOptions detokenize_parse(int argc, char** argv) {
    DetokenizeOptions o = {.separator = NULL};
    o.shards = calloc_or_die((size_t)argc, sizeof(char*));
    for (int i = 1; i < argc; i++) {
        const char* flag = argv[i];
        const char** value = strcmp(flag, "--gpt2") == 0                 ? &o.vocabulary
                             : strcmp(flag, "-o") == 0                   ? &o.output
                             : strcmp(flag, "--document-separator") == 0 ? &o.separator
                                                                         : NULL;
        if (strcmp(flag, "--byte") == 0) {
            o.vocabulary = "byte";
        } else if (value != NULL) {
            check(i + 1 < argc, "%s: no value given", flag);
            *value = argv[++i];
        } else {
            check(flag[0] != '-', "unknown flag '%s' (see data/detokenize --help)", flag);
            o.shards[o.num_shards++] = argv[i];
        }
    }
    check(o.num_shards > 0, "no input: want token shards (see data/detokenize --help)");
    return o;
}

// Write `text` with \n, \r, \t and \\ resolved into `out` (as long as `text`); returns its length.
static size_t detokenize_unescape(char* out, const char* text) {
    size_t n = 0;
    for (const char* p = text; *p; p++) {
        char c = *p;
        if (c == '\\') {
            c = *++p;
            check(c == 'n' || c == 'r' || c == 't' || c == '\\',
                  "--document-separator: '%s': after a backslash want n, r, t "
                  "or another one",
                  text);
            c = c == 'n' ? '\n' : c == 'r' ? '\r' : c == 't' ? '\t' : '\\';
        }
        out[n++] = c;
    }
    return n;
}

// The text of one shard to `out`; *in_document says whether a document is open, before and after.
static void detokenize_shard(const char* path, const Tokenizer* t, FILE* out, const char* out_name,
                             const char* separator, size_t separator_length, int* in_document) {
    int64_t num_tokens;
    int vocab_size;
    FILE* f = tokens_open_shard(path, &num_tokens, &vocab_size);
    check(vocab_size == 0 || vocab_size == t->vocab_size,
          "'%s': tokens of a vocabulary of %d, but the one given has %d", path, vocab_size, t->vocab_size);
    uint16_t* tokens = malloc_or_die(DETOKENIZE_TOKENS * sizeof(uint16_t));
    for (int64_t at = 0; at < num_tokens; at += DETOKENIZE_TOKENS) {
        int64_t n = num_tokens - at < DETOKENIZE_TOKENS ? num_tokens - at : DETOKENIZE_TOKENS;
        fread_or_die(tokens, (size_t)n * sizeof(uint16_t), f, path);
        for (int64_t i = 0; i < n; i++) {
            int id = tokens[i];
            check(id < t->vocab_size, "'%s': token %lld is %d, want less than the vocabulary's %d", path,
                  (long long)(at + i), id, t->vocab_size);
            if (id == t->end_of_text) {
                if (*in_document) { fwrite_or_die(separator, separator_length, out, out_name); }
            } else {
                size_t length;
                const char* text = tokenizer_decode(t, id, &length);
                fwrite_or_die(text, length, out, out_name);
            }
            *in_document = 1;
        }
    }
    free(tokens);
    fclose(f);
}

// The whole program; the tests call it, too.
static int detokenize_main(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            printf("%s", detokenize_usage);
            return 0;
        }
    }
    DetokenizeOptions o = detokenize_parse(argc, argv);
    if (o.vocabulary == NULL) {
        int64_t num_tokens;
        int vocab_size;
        fclose(tokens_open_shard(o.shards[0], &num_tokens, &vocab_size));
        check(vocab_size == TOKENS_BYTE_VOCAB, "'%s' is not byte-level: want --gpt2 VOCABULARY", o.shards[0]);
        o.vocabulary = "byte";
    }
    Tokenizer t;
    tokenizer_init(&t, o.vocabulary);
    char* separator = malloc_or_die(o.separator ? strlen(o.separator) + 1 : sizeof(DETOKENIZE_SEPARATOR));
    size_t separator_length = detokenize_unescape(separator, o.separator ? o.separator : DETOKENIZE_SEPARATOR);
    const char* out_name = o.output ? o.output : "standard output";
    size_t tmp_size = strlen(out_name) + sizeof(".tmp");
    char* tmp_name = malloc_or_die(tmp_size);
    snprintf(tmp_name, tmp_size, "%s.tmp", out_name);
    FILE* out = o.output ? fopen_or_die(tmp_name, "wb") : stdout;
    int in_document = 0;
    for (int i = 0; i < o.num_shards; i++) {
        detokenize_shard(o.shards[i], &t, out, out_name, separator, separator_length, &in_document);
    }
    if (in_document) { fwrite_or_die(separator, separator_length, out, out_name); }
    if (o.output != NULL) {
        fclose_or_die(out, tmp_name);
        check(rename(tmp_name, o.output) == 0, "cannot rename '%s' to '%s': %s", tmp_name, o.output, strerror(errno));
    } else {
        check(fflush(out) == 0, "cannot finish writing standard output: %s", strerror(errno));
    }
    free(tmp_name);
    free(separator);
    free(o.shards);
    tokenizer_free(&t);
    return 0;
}

#ifndef TESTING // test_tokenizer.c includes this file
int main(int argc, char** argv) {
    return detokenize_main(argc, argv);
}
#endif
