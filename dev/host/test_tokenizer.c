// Vocabularies, the GPT-2 encoder, token shards, data/tokenize and data/detokenize.
// The outside truth (30 vectors, a corpus with its tokens) is read from $SHARED_DATA or ../shared/data.
#define TESTING
#include "../../data/detokenize.c"
#include "../../data/tokenize.c"

#include "unit.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

static char folder[] = "/tmp/test_tokenizer_XXXXXX"; // all files of this test; removed at the end
static Tokenizer small; // a made-up vocabulary with 300 merges over "abc 'é", see make_small

typedef struct {
    char text[4400];
} Path;

static Path in_folder(const char* name) {
    Path p;
    snprintf(p.text, sizeof(p.text), "%s/%s", folder, name);
    return p;
}

// A file of the shared data; unit_skip and an empty path where it is not there.
static Path shared(const char* name) {
    Path p;
    const char* data = getenv("SHARED_DATA") ? getenv("SHARED_DATA") : "../shared/data";
    snprintf(p.text, sizeof(p.text), "%s/%s", data, name);
    if (access(p.text, R_OK) != 0 && !unit_state.skipped_in_test) {
        unit_skip("no shared data here (SHARED_DATA says where it is)");
    }
    p.text[0] = unit_state.skipped_in_test ? 0 : p.text[0];
    return p;
}

// expect_dies, but what the dying process did not free is no leak.
static void (*doomed)(void*);
static void call_doomed(void* arg) {
#ifdef __SANITIZE_ADDRESS__
    __lsan_disable();
#endif
    doomed(arg);
}

static void dies(void (*call)(void*), void* arg, const char* text) {
    doomed = call;
    expect_dies(call_doomed, arg, text);
}

static void write_file(const char* path, const void* data, size_t n) {
    FILE* f = fopen_or_die(path, "wb");
    fwrite_or_die(data, n, f, path);
    fclose_or_die(f, path);
}

static char* read_file(const char* path, size_t* n) {
    *n = (size_t)file_size_or_die(path);
    char* data = malloc_or_die(*n + 1);
    FILE* f = fopen_or_die(path, "rb");
    fread_or_die(data, *n, f, path);
    data[*n] = 0;
    fclose(f);
    return data;
}

static int same_files(const char* a, const char* b) {
    if (access(a, R_OK) != 0 || access(b, R_OK) != 0) { return 0; }
    size_t n, m;
    char *x = read_file(a, &n), *y = read_file(b, &m);
    int same = n == m && memcmp(x, y, n) == 0;
    free(x);
    free(y);
    return same;
}

static uint64_t random_state = 1;
static uint32_t random_below(uint32_t n) { // Knuth's 64-bit linear congruence; the high half is good enough for tests
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % n;
}

// ---------------------------------------------------------------------------------------------------------------------
// a small vocabulary, made up, so that most tests need no data

// Append the printable form of a byte in GPT-2's files.
static size_t print_byte(char* out, uint8_t byte) {
    for (uint32_t code = 33; code <= 323; code++) {
        if (tokenizer_byte_of_code_point(code) == byte) {
            if (code < 128) {
                out[0] = (char)code;
                return 1;
            }
            out[0] = (char)(0xc0 | code >> 6);
            out[1] = (char)(0x80 | (code & 0x3f));
            return 2;
        }
    }
    check(0, "byte %d has no printable form", byte);
}

// Write encoder.json and vocab.bpe of a tokenizer. Quotes and backslashes are escaped; every 5th letter comes as
// \u00XX.
static void write_vocabulary(const Tokenizer* t, const char* encoder_path, const char* merges_path) {
    FILE* f = fopen_or_die(encoder_path, "wb");
    for (int id = 0; id < t->vocab_size; id++) {
        fprintf(f, "%s\"", id == 0 ? "{" : ", ");
        for (uint32_t i = 0; i < t->length[id]; i++) {
            char c[2];
            uint8_t byte = t->bytes[t->start[id] + i];
            size_t n = print_byte(c, byte);
            if (byte == '"' || byte == '\\') {
                fprintf(f, "\\%c", byte);
            } else if (n == 1 && (id + i) % 5 == 0) {
                fprintf(f, "\\u00%02x", byte);
            } else {
                fwrite(c, 1, n, f);
            }
        }
        fprintf(f, "\": %d", id);
    }
    fprintf(f, "}\n");
    fclose(f);
    f = fopen_or_die(merges_path, "wb");
    fprintf(f, "#version: 0.2\n");
    for (int m = 0; m < t->num_merges; m++) {
        for (int side = 0; side < 2; side++) {
            int id = side ? t->merges[m].right : t->merges[m].left;
            for (uint32_t i = 0; i < t->length[id]; i++) {
                char c[2];
                size_t n = print_byte(c, t->bytes[t->start[id] + i]);
                fwrite(c, 1, n, f);
            }
            fputc(side ? '\n' : ' ', f);
        }
    }
    fclose(f);
}

// Bytes in reverse order as ids 0..255, end-of-text as 256, then 300 random merges.
static void make_small(void) {
    TokenizerBuilder b;
    tokenizer_build_begin(&b, &small, "small");
    for (int i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)(255 - i);
        tokenizer_add(&b, i, &byte, 1);
    }
    small.end_of_text = 256;
    tokenizer_add(&b, 256, (const uint8_t*)TOKENIZER_END_OF_TEXT, strlen(TOKENIZER_END_OF_TEXT));
    small.merges = malloc_or_die(300 * sizeof(TokenMerge));
    const char* letters = "abc '\xc3\xa9";
    while (small.num_merges < 300) {
        int parts[2];
        for (int side = 0; side < 2; side++) { // a letter, or an earlier merge
            uint32_t pick = random_below((uint32_t)(small.num_merges + 7) < 60 ? (uint32_t)(small.num_merges + 7) : 60);
            parts[side] = pick < 7 ? 255 - (uint8_t)letters[pick] : 257 + (int)random_below((uint32_t)small.num_merges);
        }
        uint8_t bytes[2048];
        size_t n = 0;
        for (int side = 0; side < 2; side++) {
            memcpy(bytes + n, small.bytes + small.start[parts[side]], small.length[parts[side]]);
            n += small.length[parts[side]];
        }
        if (n <= 24 && tokenizer_find(&b, bytes, n) < 0) {
            int id = 257 + small.num_merges;
            tokenizer_add(&b, id, bytes, n);
            small.merges[small.num_merges++] = (TokenMerge){(uint16_t)parts[0], (uint16_t)parts[1], (uint16_t)id};
        }
    }
    tokenizer_build_end(&b);
    free(b.slots);
    write_vocabulary(&small, in_folder("encoder.json").text, in_folder("vocab.bpe").text);
}

static int same_tokenizers(const Tokenizer* a, const Tokenizer* b) {
    int same = a->vocab_size == b->vocab_size && a->end_of_text == b->end_of_text && a->num_merges == b->num_merges &&
               memcmp(a->merges, b->merges, (size_t)a->num_merges * sizeof(TokenMerge)) == 0 &&
               memcmp(a->byte_id, b->byte_id, sizeof(a->byte_id)) == 0;
    for (int id = 0; same && id < a->vocab_size; id++) {
        size_t n, m;
        const char *x = tokenizer_decode(a, id, &n), *y = tokenizer_decode(b, id, &m);
        same = n == m && memcmp(x, y, n) == 0;
    }
    return same;
}

static void test_vocabulary_files(void) {
    Tokenizer t;
    const char* names[] = {"", "encoder.json", "vocab.bpe"}; // the folder, or one of its two files
    for (int i = 0; i < 3; i++) {
        tokenizer_init(&t, in_folder(names[i]).text);
        expect(same_tokenizers(&t, &small), "read by '%s': another vocabulary than was written", names[i]);
        tokenizer_free(&t);
    }
}

static void decode_id(void* t) {
    size_t n;
    tokenizer_decode(t, ((Tokenizer*)t)->vocab_size, &n);
}

static void test_byte_vocabulary(void) {
    Tokenizer t;
    tokenizer_init(&t, "byte");
    expect(t.vocab_size == 257 && t.end_of_text == 256 && t.num_merges == 0, "vocabulary of %d, end %d", t.vocab_size,
           t.end_of_text);
    for (int i = 0; i < 256; i++) {
        size_t n;
        const char* text = tokenizer_decode(&t, i, &n);
        expect(n == 1 && (uint8_t)text[0] == i && t.byte_id[i] == i, "id %d decodes to %zu bytes, %d", i, n, text[0]);
    }
    dies(decode_id, &t, "token 257 is not in the vocabulary of 257");
    tokenizer_free(&t);
}

static void init_folder(void* path) {
    Tokenizer t;
    tokenizer_init_gpt2(&t, path);
}

static void test_bad_vocabularies(void) {
    size_t n, m;
    char *encoder = read_file(in_folder("encoder.json").text, &n), *merges = read_file(in_folder("vocab.bpe").text, &m);
    Path dir = in_folder("bad"), bad_encoder = in_folder("bad/encoder.json"), bad_merges = in_folder("bad/vocab.bpe");
    check(mkdir(dir.text, 0700) == 0, "mkdir");
    write_file(bad_merges.text, merges, m);
    const struct {
        const char *content, *message;
    } encoders[] = {
        {"", "0 bytes, want a vocabulary"},
        {"hello", "is not an encoder.json: it starts with byte 104"},
        {"{", "want a token in quotes"},
        {"{}", "want a token in quotes"},
        {"{\"a\" 5}", "want ':' after a token"},
        {"{\"a\": x}", "want the id of a token"},
        {"{\"a\": -1}", "want the id of a token"},
        {"{\"a\": 1.5}", "want ',' or '}' after an id"},
        {"{\"a\": 99999999999999999999}", "want 0 to 65535"},
        {"{\"\": 1}", "token 1 is empty"},
        {"{\"a\": 1, \"b\": 1}", "two tokens have id 1"},
        {"{\"a\": 1, \"a\": 2}", "tokens 1 and 2 are the same text"},
        {"{\"a\": 1, ", "want a token in quotes"},
        {"{\"a\": 1", "want ',' or '}' after an id"},
        {"{\"a", "stands for no byte"},
        {"{\"a\\", "stands for no byte"},
        {"{\"a\\u00", "stands for no byte"},
        {"{\"\\ud83d\\ude00\": 1}", "stands for no byte"},
        {"{\"\xf0\x9f\x98\x80\": 1}", "stands for no byte"},
        {"{\"a b\": 1}", "stands for no byte"},
        {"{\"\xc4", "stands for no byte"},
        {"{\"a\": 0} x", "text after the closing '}'"},
        {"{\"a\": 0}", "no token <|endoftext|> among 1"},
        {"{\"<|endoftext|>\": 0}", "is not a byte-level vocabulary: no token for byte 0"},
        {"{\"<|endoftext|>\": 7}", "1 tokens, but none has id 0"},
    };
    for (size_t i = 0; i < sizeof(encoders) / sizeof(encoders[0]); i++) {
        write_file(bad_encoder.text, encoders[i].content, strlen(encoders[i].content));
        dies(init_folder, dir.text, encoders[i].message);
    }
    for (size_t cut = 0; cut < n - 1; cut += 101) { // cut off anywhere but in the last newline
        write_file(bad_encoder.text, encoder, cut);
        dies(init_folder, dir.text, "error: ");
    }
    write_file(bad_encoder.text, encoder, n);
    const struct {
        const char *content, *message;
    } lists[] = {
        {"", "0 bytes, want a vocabulary"},
        {"#version: 0.2\n", "0 merges, want 300"},
        {"a\n", "line 1: want 'left right'"},
        {"a b c\n", "line 1: want 'left right'"},
        {" ab\n", "line 1: want 'left right'"},
        {"#version: 0.2\n\n", "line 2: want 'left right'"},
        {"#version: 0.2\nx y\n", "line 2: the merge uses a token that"},
        {"\xff \xff\n", "line 1: a character that stands for no byte"},
    };
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        write_file(bad_merges.text, lists[i].content, strlen(lists[i].content));
        dies(init_folder, dir.text, lists[i].message);
    }
    for (size_t cut = 0; cut < m - 1; cut += 37) {
        write_file(bad_merges.text, merges, cut);
        dies(init_folder, dir.text, "error: ");
    }
    char* twice = malloc_or_die(2 * m);
    memcpy(twice, merges, m);
    memcpy(twice + m, merges + 14, m - 14);
    write_file(bad_merges.text, twice, 2 * m - 14);
    dies(init_folder, dir.text, "line 302: token 257 is made twice");
    unlink(bad_merges.text);
    dies(init_folder, dir.text, "cannot open '");
    unlink(bad_encoder.text);
    dies(init_folder, dir.text, "encoder.json': No such file");
    dies(init_folder, "/nowhere", "cannot open vocabulary '/nowhere': No such file");
    dies(init_folder, "/dev/null", "'/dev/null' is not a regular file");
    rmdir(dir.text);
    free(twice);
    free(encoder);
    free(merges);
}

static void test_bad_tiktoken(void) {
    const struct {
        const char *content, *message;
    } cases[] = {
        {"IQ== 0\n", "1 tokens, want GPT-2's 50256 (truncated?)"},
        {"IQ==\n", "line 1: want 'base64 id'"},
        {"IQ== 0\nIg== x\n", "line 2: want 'base64 id'"},
        {"IQ== 0\nIg== 1 2\n", "line 2: text after the id"},
        {"IQ== 0\nIg== 0\n", "two tokens have id 0"},
        {"IQ== 0\nIQ== 1\n", "tokens 0 and 1 are the same text"},
        {"IQ== 70000\n", "token id 70000, want 0 to 65535"},
        {"I 0\n", "want 'base64 id'"},
        {"\n", "want 'base64 id'"},
    };
    Path p = in_folder("bad.tiktoken");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        write_file(p.text, cases[i].content, strlen(cases[i].content));
        dies(init_folder, p.text, cases[i].message);
    }
    unlink(p.text);
}

// ---------------------------------------------------------------------------------------------------------------------
// the encoder

// Tokens of a piece by the definition: look at all pairs, merge the best (leftmost), start over.
static size_t naive_merge(const Tokenizer* t, const uint8_t* piece, size_t n, uint16_t* out) {
    for (size_t i = 0; i < n; i++) {
        out[i] = t->byte_id[piece[i]];
    }
    for (;;) {
        int best = t->num_merges;
        size_t best_at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            for (int m = 0; m < best; m++) {
                if (t->merges[m].left == out[i] && t->merges[m].right == out[i + 1]) {
                    best = m;
                    best_at = i;
                }
            }
        }
        if (best == t->num_merges) { return n; }
        out[best_at] = t->merges[best].result;
        memmove(out + best_at + 1, out + best_at + 2, (n - best_at - 2) * sizeof(out[0]));
        n--;
    }
}

static void test_merging(void) {
    Bpe bpe;
    BpeWorker w;
    bpe_init(&bpe, &small);
    bpe_worker_init(&w, &bpe);
    TokenBuffer out = {0};
    for (int trial = 0; trial < 3000; trial++) {
        uint8_t piece[64];
        uint16_t want[64];
        size_t n = 1 + random_below(trial % 10 == 0 ? 60 : 18);
        for (size_t i = 0; i < n; i++) {
            piece[i] = (uint8_t)("abc '\xc3\xa9"
                                 "ab")[random_below(trial % 3 == 0 ? 3 : 9)];
        }
        size_t num_want = naive_merge(&small, piece, n, want);
        for (int again = 0; again < 2; again++) { // the second time from the cache
            out.count = 0;
            bpe_encode_piece(&w, piece, n, piece + (again ? sizeof(piece) : n), &out);
            expect(out.count == num_want && memcmp(out.ids, want, num_want * 2) == 0, "'%.*s': %zu tokens, want %zu",
                   (int)n, (char*)piece, out.count, num_want);
        }
    }
    free(out.ids);
    bpe_worker_free(&w);
    bpe_free(&bpe);
}

// The ASCII splitter against PCRE2, on strings made to be awkward: every piece, at every place where one starts.
static void test_ascii_splitting(void) {
    Bpe bpe;
    BpeWorker w;
    bpe_init(&bpe, &small);
    bpe_worker_init(&w, &bpe);
    const char* parts[] = {
        "'",    "s",        "'s",       "'re",          "'ll", "'LL", "l",  "a",  "Zz", " ",    "  ",
        "\n",   "\t",       "\r\n",     "\v",           "7",   "42",  ".",  "!?", "_",  "\x01", "\x1c",
        "\x7f", "\xc3\xa9", "\xc2\xa0", "\xe2\x80\x94", "'d",  "'ve", "'m", "'t"};
    int decided = 0, pieces = 0;
    for (int trial = 0; trial < 20000; trial++) {
        char text[128];
        size_t n = 0;
        for (int k = 1 + (int)random_below(12); k > 0; k--) {
            const char* part = parts[random_below(sizeof(parts) / sizeof(parts[0]))];
            memcpy(text + n, part, strlen(part));
            n += strlen(part);
        }
        for (size_t at = 0; at < n;) {
            const uint8_t* s = (const uint8_t*)text + at;
            size_t want = bpe_pcre_piece(&w, s, n - at), found = bpe_ascii_piece(s, n - at);
            expect(found == 0 || found == want, "'%.*s': piece of %zu bytes, PCRE2 says %zu", (int)(n - at),
                   (const char*)s, found, want);
            decided += found > 0;
            pieces++;
            at += want;
        }
    }
    expect(decided > pieces / 2, "the table decided %d of %d pieces", decided, pieces);
    // spaces that are no spaces, and the other way round: by Unicode, not by PCRE2's own \s
    const struct {
        const char* text;
        size_t want;
    } cases[] = {
        {" \xe1\xa0\x8ex", 4},             // U+180E is no white space: " ?[^\s\p{L}\p{N}]+"
        {"\xc2\x85\xc2\x85x", 2},          // U+0085 is: two of them before a word leave one
        {"\xe3\x80\x80\xe3\x80\x80x", 3},  // U+3000 too
        {"\xe2\x80\x8bx", 3},              // U+200B is not
        {"\xc2\xbdx", 2},                  // a vulgar fraction is a number, x is not
        {" \xe6\x97\xa5\xe6\x9c\xac!", 7}, // letters of any script
        {"e\xcc\x81x", 1},                 // a combining accent is neither letter nor number: it ends the word
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t found = bpe_pcre_piece(&w, (const uint8_t*)cases[i].text, strlen(cases[i].text));
        expect(found == cases[i].want, "case %zu: a piece of %zu bytes, want %zu", i, found, cases[i].want);
    }
    bpe_worker_free(&w);
    bpe_free(&bpe);
}

static void test_utf8_validation(void) {
    const struct {
        const char* text;
        size_t n, valid;
    } cases[] = {
        {"abcdefghij", 10, 10},
        {"\xc3\xa9", 2, 2},
        {"\xc3", 1, 0},
        {"\xc0\x80", 2, 0},
        {"\xc1\xbf", 2, 0},
        {"\xe0\x9f\xbf", 3, 0},
        {"\xe0\xa0\x80", 3, 3},
        {"\xed\xa0\x80", 3, 0},
        {"\xed\x9f\xbf", 3, 3},
        {"\xf0\x8f\xbf\xbf", 4, 0},
        {"\xf0\x90\x80\x80", 4, 4},
        {"\xf4\x8f\xbf\xbf", 4, 4},
        {"\xf4\x90\x80\x80", 4, 0},
        {"\xf5\x80\x80\x80", 4, 0},
        {"ab\x80", 3, 2},
        {"\xe2\x82", 2, 0},
        {"\xe2\x28\xa1", 3, 0},
        {"abcdefgh\xff", 9, 8},
        {"", 0, 0},
        {"\xf0\x9f\x98", 3, 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t valid = bpe_valid_utf8_prefix((const uint8_t*)cases[i].text, cases[i].n);
        expect(valid == cases[i].valid, "case %zu: %zu valid bytes, want %zu", i, valid, cases[i].valid);
    }
}

// Encode, decode, compare. Heap memory of the exact size: the sanitizer sees a byte too far.
static void round_trip(BpeWorker* w, const Tokenizer* t, const char* text, size_t n, const char* what) {
    char* copy = malloc_or_die(n);
    memcpy(copy, text, n);
    TokenBuffer out = {0};
    bpe_encode(w, copy, n, &out);
    char* back = malloc_or_die(n);
    size_t used = 0;
    int overflow = 0;
    for (size_t i = 0; i < out.count && !overflow; i++) {
        size_t length;
        const char* bytes = tokenizer_decode(t, out.ids[i], &length);
        overflow = used + length > n;
        memcpy(back + used, bytes, overflow ? 0 : length);
        used += length;
    }
    expect(!overflow && used == n && memcmp(back, text, n) == 0, "%s: %zu bytes came back as %zu", what, n, used);
    free(copy);
    free(back);
    free(out.ids);
}

static void test_round_trips_with(const Tokenizer* t) {
    enum { BIG = 300000 };
    Bpe bpe;
    BpeWorker w;
    bpe_init(&bpe, t);
    bpe_worker_init(&w, &bpe);
    char* text = malloc_or_die(BIG);
    round_trip(&w, t, "", 0, "no text");
    for (int trial = 0; trial < 2000; trial++) {
        size_t n = random_below(200);
        for (size_t i = 0; i < n; i++) {
            text[i] = trial % 2 ? (char)random_below(256) : "a \n\xc3\xa9\xe2\x80\x94'1\xff"[random_below(11)];
        }
        round_trip(&w, t, text, n, "random bytes");
    }
    const char* fillers[] = {"a", " ", "\n", "ab", "a ", "\xc3\xa9", "\xe3\x80\x80", "\xff", "!", "1", " \n", "'s"};
    for (size_t f = 0; f < sizeof(fillers) / sizeof(fillers[0]); f++) {
        size_t length = strlen(fillers[f]);
        for (size_t i = 0; i < BIG; i++) {
            text[i] = fillers[f][i % length];
        }
        round_trip(&w, t, text, BIG, "one piece, over and over");
    }
    for (size_t i = 0; i < BIG; i++) {
        text[i] = (char)('a' + random_below(26));
    }
    round_trip(&w, t, text, BIG, "a word of 300,000 letters");
    for (size_t i = 0; i < BIG; i++) {
        text[i] = (char)random_below(256);
    }
    round_trip(&w, t, text, BIG, "300,000 random bytes");
    free(text);
    bpe_worker_free(&w);
    bpe_free(&bpe);
}

static void test_round_trips(void) {
    test_round_trips_with(&small);
}

// ---------------------------------------------------------------------------------------------------------------------
// the outside truth

// One JSON string from *p, which stands at its opening quote, as UTF-8. Returns its length.
static size_t read_json_string(const char** p, char* out) {
    size_t n = 0;
    for (*p += 1; **p != '"';) {
        if (**p != '\\') {
            out[n++] = *(*p)++;
            continue;
        }
        int64_t code = tokenizer_read_json_char(p);
        check(code >= 0 && code < 128, "test vectors: an escape this test does not read");
        out[n++] = (char)code;
    }
    *p += 1;
    return n;
}

static void test_vectors_with(const Tokenizer* t, const char* vectors) {
    Bpe bpe;
    BpeWorker w;
    bpe_init(&bpe, t);
    bpe_worker_init(&w, &bpe);
    size_t size;
    char* lines = read_file(vectors, &size);
    int count = 0;
    for (const char* p = lines; (p = strstr(p, "{\"text\":")) != NULL; count++) {
        char text[2048];
        p += strlen("{\"text\":");
        size_t n = read_json_string(&p, text);
        p = strchr(p, '[') + 1;
        TokenBuffer out = {0};
        bpe_encode(&w, text, n, &out);
        size_t i = 0;
        for (; *p != ']'; i++) {
            char* end;
            long want = strtol(p, &end, 10);
            expect(i < out.count && out.ids[i] == want, "vector %d, token %zu: %d, want %ld", count, i,
                   i < out.count ? out.ids[i] : -1, want);
            p = end + (*end == ',');
        }
        expect(i == out.count, "vector %d: %zu tokens, want %zu", count, out.count, i);
        free(out.ids);
    }
    expect(count == 30, "%d test vectors, want 30", count);
    free(lines);
    bpe_worker_free(&w);
    bpe_free(&bpe);
}

// Write gpt2.tiktoken from a GPT-2 vocabulary, as OpenAI's file is: base64 and rank, in the order of ranks.
static void write_tiktoken(const Tokenizer* t, const char* path) {
    const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    FILE* f = fopen_or_die(path, "wb");
    for (int id = 0; id < t->end_of_text; id++) {
        const uint8_t* s = t->bytes + t->start[id];
        for (uint32_t i = 0; i < t->length[id]; i += 3) {
            uint32_t left = t->length[id] - i;
            uint32_t bits = (uint32_t)s[i] << 16 | (left > 1 ? (uint32_t)s[i + 1] << 8 : 0) | (left > 2 ? s[i + 2] : 0);
            fprintf(f, "%c%c%c%c", digits[bits >> 18], digits[bits >> 12 & 63], left > 1 ? digits[bits >> 6 & 63] : '=',
                    left > 2 ? digits[bits & 63] : '=');
        }
        fprintf(f, " %d\n", id);
    }
    fclose(f);
}

static void test_gpt2(void) {
    Path vocabulary = shared("tokenizer"), vectors = shared("tokenizer/test_vectors.jsonl");
    if (!vocabulary.text[0] || !vectors.text[0]) { return; }
    Tokenizer t, from_tiktoken;
    tokenizer_init(&t, vocabulary.text);
    expect(t.vocab_size == 50257 && t.end_of_text == 50256 && t.num_merges == 50000, "%d tokens, end %d, %d merges",
           t.vocab_size, t.end_of_text, t.num_merges);
    test_vectors_with(&t, vectors.text);
    test_round_trips_with(&t);
    Path tiktoken = in_folder("gpt2.tiktoken");
    write_tiktoken(&t, tiktoken.text);
    tokenizer_init(&from_tiktoken, tiktoken.text);
    expect(same_tokenizers(&t, &from_tiktoken),
           "gpt2.tiktoken gives another vocabulary than vocab.bpe and encoder.json");
    test_vectors_with(&from_tiktoken, vectors.text);
    tokenizer_free(&from_tiktoken);
    size_t n;
    char* text = read_file(tiktoken.text, &n);
    text[n / 2] = text[n / 2] == 'A'
                      ? 'B'
                      : 'A'; // one wrong letter in the middle: the token is no merge any more, or is there twice
    write_file(tiktoken.text, text, n);
    dies(init_folder, tiktoken.text, tiktoken.text);
    write_file(tiktoken.text, text, n / 2);
    dies(init_folder, tiktoken.text, tiktoken.text);
    free(text);
    unlink(tiktoken.text);
    tokenizer_free(&t);
}

// ---------------------------------------------------------------------------------------------------------------------
// the programs

typedef struct {
    char* argv[24];
} Call;

static int count_args(char** argv) {
    int argc = 0;
    while (argv[argc] != NULL) {
        argc++;
    }
    return argc;
}

static void call_tokenize(void* call) {
    tokenize_main(count_args(((Call*)call)->argv), ((Call*)call)->argv);
}
static void call_detokenize(void* call) {
    detokenize_main(count_args(((Call*)call)->argv), ((Call*)call)->argv);
}

// Run a program in a child whose standard output goes to `output` and whose input comes from `input` (NULL: neither).
static void run(void (*program)(void*), Call call, const char* input, const char* output) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if ((input != NULL && freopen(input, "rb", stdin) == NULL) ||
            freopen(output ? output : "/dev/null", "wb", stdout) == NULL) {
            _exit(99);
        }
        program(&call);
        exit(0); // with the leak check
    }
    int status;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s failed with status %d", call.argv[0], status);
}

static void test_corpus_exactly(void) {
    Path vocabulary = shared("tokenizer"), text_xz = shared("corpus/val.txt.xz"),
         tokens_xz = shared("corpus/gpt2_val.bin.xz");
    if (!vocabulary.text[0] || !text_xz.text[0] || !tokens_xz.text[0]) { return; }
    Path text = in_folder("val.txt"), want = in_folder("want.bin"), found = in_folder("found.bin"),
         back = in_folder("back.txt");
    char command[4 * sizeof(Path) + 64];
    snprintf(command, sizeof(command), "xz -dc '%s' > '%s' && xz -dc '%s' > '%s'", text_xz.text, text.text,
             tokens_xz.text, want.text);
    if (system(command) != 0) {
        unit_skip("no xz to unpack the shared data with");
        return;
    }
    char* threads[] = {"1", "2", "7"};
    for (int i = 0; i < 3; i++) {
        run(call_tokenize,
            (Call){{"tokenize", "--gpt2", vocabulary.text, "-o", found.text, "--threads", threads[i], text.text}}, NULL,
            NULL);
        expect(same_files(found.text, want.text), "val.txt: not the tokens of gpt2_val.bin with %s threads",
               threads[i]);
        unlink(found.text);
    }
    run(call_tokenize, (Call){{"tokenize", "--gpt2", vocabulary.text, "-o", found.text, "-"}}, text.text, NULL);
    expect(same_files(found.text, want.text), "val.txt on standard input: not the tokens of gpt2_val.bin");
    run(call_detokenize, (Call){{"detokenize", "--gpt2", vocabulary.text, found.text}}, NULL, back.text);
    expect(same_files(back.text, text.text), "gpt2_val.bin: not the text of val.txt");
    unlink(text.text);
    unlink(want.text);
    unlink(found.text);
    unlink(back.text);
}

// The tokens of a shard, as text: "E" for end-of-text, the byte otherwise. Dies unless it is a byte-level shard.
static char* shard_as_text(const char* path) {
    int64_t n;
    int vocab_size;
    FILE* f = tokens_open_shard(path, &n, &vocab_size);
    check(vocab_size == TOKENS_BYTE_VOCAB, "'%s': vocabulary %d, want 257", path, vocab_size);
    char* text = malloc_or_die((size_t)n + 1);
    for (int64_t i = 0; i < n; i++) {
        uint16_t token;
        fread_or_die(&token, 2, f, path);
        text[i] = token == 256 ? 'E' : (char)token;
    }
    text[n] = 0;
    fclose(f);
    return text;
}

static void expect_shard(const char* name, const char* want) {
    Path p = in_folder(name);
    expect(access(p.text, F_OK) == 0, "no '%s'", name);
    if (access(p.text, F_OK) == 0) {
        char* found = shard_as_text(p.text);
        expect(strcmp(found, want) == 0, "%s: '%s', want '%s'", name, found, want);
        free(found);
        unlink(p.text);
    }
}

static void test_documents_and_splits(void) {
    Path in = in_folder("in.txt"), in2 = in_folder("in2.txt"), out = in_folder("out"), one = in_folder("one.bin");
#define TEXT(s) write_file(in.text, s, sizeof(s) - 1)
    TEXT("one\n<|endoftext|>\ntwo\n\n<|endoftext|>\n\n<|endoftext|>\nfour");
    run(call_tokenize, (Call){{"tokenize", "--byte", "-o", one.text, in.text}}, NULL, NULL);
    expect_shard("one.bin", "EoneEtwo\nEEfour"); // the third document is empty
    run(call_tokenize, (Call){{"tokenize", "--byte", "-o", out.text, "--val-docs", "1", in.text}}, NULL, NULL);
    expect_shard("out_val.bin", "Eone");
    expect_shard("out_train.bin", "Etwo\nEEfour");
    run(call_tokenize, (Call){{"tokenize", "--byte", "-o", out.text, "--val-fraction", "0.25", in.text}}, NULL, NULL);
    expect_shard("out_val.bin", "Efour"); // the last of every four
    expect_shard("out_train.bin", "EoneEtwo\nE");
    // the end of a file ends a document, with or without (part of) a separator
    TEXT("a<|endoftext|>b\n<|endoftext|>");
    write_file(in2.text, "c\n<|endoftext|>\n", 16);
    run(call_tokenize, (Call){{"tokenize", "--byte", "-o", one.text, in.text, in2.text, in.text}}, NULL, NULL);
    expect_shard("one.bin", "Ea<|endoftext|>bEcEa<|endoftext|>b");
    // another separator; two of them with nothing between
    TEXT("x%%y%%%%z%%");
    run(call_tokenize, (Call){{"tokenize", "--byte", "-o", one.text, "--document-separator", "%%", in.text}}, NULL,
        NULL);
    expect_shard("one.bin", "ExEyEEz");
    TEXT("p\n\nq\nr\n\n");
    run(call_tokenize, (Call){{"tokenize", "--byte", "-o", one.text, "--document-separator", "\\n\\n", in.text}}, NULL,
        NULL);
    expect_shard("one.bin", "EpEq\nr");
    // too few documents for the fraction: the end of each, from a line on, or from a character on
    TEXT("line 1\nline 2\nline 3\nline 4\n");
    run(call_tokenize, (Call){{"tokenize", "--byte", "-o", out.text, "--val-fraction", "0.3", in.text}}, NULL, NULL);
    expect_shard("out_train.bin", "Eline 1\nline 2\nline 3\n");
    expect_shard("out_val.bin", "Eline 4\n");
    TEXT("1234567\xc3\xa9"
         "9"); // 80% of its 10 bytes ends inside a character: it stays whole
    run(call_tokenize, (Call){{"tokenize", "--byte", "-o", out.text, "--val-fraction", "0.2", in.text}}, NULL, NULL);
    expect_shard("out_train.bin", "E1234567\xc3\xa9");
    expect_shard("out_val.bin", "E9");
#undef TEXT
    unlink(in.text);
    unlink(in2.text);
}

static void test_shards(void) {
    Path in = in_folder("in.txt"), out = in_folder("out"), back = in_folder("back.txt"), one = in_folder("one.bin");
    Path shards[3] = {in_folder("out_train_000001.bin"), in_folder("out_train_000002.bin"),
                      in_folder("out_train_000003.bin")};
    const char* text = "abc\n<|endoftext|>\ndefgh\n<|endoftext|>\n";
    write_file(in.text, text, strlen(text));
    write_file(in_folder("out_train.bin").text, "old", 3);
    Call call = {{"tokenize", "--byte", "-o", out.text, "--shard-tokens", "4", in.text}};
    run(call_tokenize, call, NULL, NULL);
    expect(access(in_folder("out_train.bin").text, F_OK) != 0, "the old single shard was left beside the new ones");
    dies(call_tokenize, &call, "is there from an earlier run");
    run(call_detokenize, (Call){{"detokenize", shards[0].text, shards[1].text, shards[2].text}}, NULL, back.text);
    write_file(in.text, text, strlen(text));
    expect(same_files(in.text, back.text), "three shards do not give the text back");
    expect_shard("out_train_000001.bin", "Eabc");
    expect_shard("out_train_000002.bin", "Edef");
    expect_shard("out_train_000003.bin", "gh");
    Call one_file = {{"tokenize", "--byte", "-o", one.text, "--shard-tokens", "4", in.text}};
    dies(call_tokenize, &one_file, "more than 4 tokens do not fit one shard");
    unlink(in_folder("one.bin.tmp").text);
    unlink(in.text);
    unlink(back.text);
}

// Many documents of random bytes and sizes, over the edges of the read buffer and of batches, with any number of
// threads.
static void test_random_documents(void) {
    Path in = in_folder("in.txt"), out = in_folder("one.bin"), back = in_folder("back.txt");
    Path vocabulary = in_folder("");
    FILE* f = fopen_or_die(in.text, "wb");
    for (int d = 0; d < 400; d++) {
        size_t n = random_below(d % 40 == 0 ? 400000 : 9000);
        for (size_t i = 0; i < n; i++) {
            fputc("abc '\xc3\xa9\n\xff xyz<|"[random_below(16)], f);
        }
        fputs("\n<|endoftext|>\n", f);
    }
    fclose(f);
    char* threads[] = {"1", "3"};
    for (int i = 0; i < 2; i++) {
        run(call_tokenize,
            (Call){{"tokenize", "--gpt2", vocabulary.text, "-o", out.text, "--threads", threads[i], in.text}}, NULL,
            NULL);
        run(call_detokenize, (Call){{"detokenize", "--gpt2", vocabulary.text, "-o", back.text, out.text}}, NULL, NULL);
        expect(same_files(in.text, back.text), "400 documents did not come back with %s threads", threads[i]);
    }
    unlink(in.text);
    unlink(out.text);
    unlink(back.text);
}

static void test_bad_shards(void) {
    Path p = in_folder("bad.bin");
    Call call = {{"detokenize", "--byte", p.text}}, unknown = {{"detokenize", p.text}};
    struct {
        int32_t header[TOKENS_HEADER_INTS];
        uint16_t tokens[4];
    } shard = {.header = {TOKENS_MAGIC, TOKENS_VERSION, 4, 257}, .tokens = {256, 'a', 'b', 257}};
    write_file(p.text, &shard, sizeof(shard));
    dies(call_detokenize, &call, "token 3 is 257, want less than the vocabulary's 257");
    write_file(p.text, &shard, sizeof(shard) - 1);
    dies(call_detokenize, &call, "is truncated or corrupt: 1031 bytes, want 1032 for 4 tokens");
    write_file(p.text, &shard, 1000);
    dies(call_detokenize, &call, "is not a token shard: 1000 bytes, want at least the 1024");
    write_file(p.text, "", 0);
    dies(call_detokenize, &call, "is not a token shard: 0 bytes");
    shard.header[2] = -1;
    write_file(p.text, &shard, sizeof(shard));
    dies(call_detokenize, &call, "corrupt header: -1 tokens");
    shard.header[2] = 1000;
    write_file(p.text, &shard, sizeof(shard));
    dies(call_detokenize, &call, "1032 bytes, want 3024 for 1000 tokens");
    shard.header[2] = 4;
    shard.header[3] = 1 << 20;
    write_file(p.text, &shard, sizeof(shard));
    dies(call_detokenize, &call, "vocabulary of 1048576");
    shard.header[3] = 300;
    write_file(p.text, &shard, sizeof(shard));
    dies(call_detokenize, &call, "a vocabulary of 300, but the one given has 257");
    dies(call_detokenize, &unknown, "is not byte-level: want --gpt2");
    shard.header[1] = 7;
    write_file(p.text, &shard, sizeof(shard));
    dies(call_detokenize, &call, "token shard of version 7, want 1");
    shard.header[0] = 20240326;
    write_file(p.text, &shard, sizeof(shard));
    dies(call_detokenize, &call, "magic 20240326, want 20240520");
    unlink(p.text);
    dies(call_detokenize, &call, "cannot open '");
}

static void test_bad_flags(void) {
    Path in = in_folder("in.txt"), out = in_folder("out"), bin = in_folder("one.bin");
    write_file(in.text, "", 0);
    struct {
        Call call;
        const char* message;
    } cases[] = {
        {{{"tokenize"}}, "no vocabulary"},
        {{{"tokenize", "--byte"}}, "no output"},
        {{{"tokenize", "--byte", "-o", out.text}}, "no input"},
        {{{"tokenize", "--byte", "-o"}}, "-o: no value"},
        {{{"tokenize", "--byte", "--gpt2", "x"}}, "a vocabulary was given already"},
        {{{"tokenize", "--gpt2", "byte"}}, "'byte' is no vocabulary"},
        {{{"tokenize", "--frob"}}, "unknown flag '--frob'"},
        {{{"tokenize", "--byte", "-o", out.text, in.text}}, "no text in the input"},
        {{{"tokenize", "--byte", "-o", out.text, "/nowhere.txt"}}, "cannot open '/nowhere.txt'"},
        {{{"tokenize", "--byte", "-o", out.text, folder}}, "is a folder, want a text file"},
        {{{"tokenize", "--gpt2", "/nowhere", "-o", out.text, in.text}}, "cannot open vocabulary '/nowhere'"},
        {{{"tokenize", "--byte", "-o", out.text, "--threads", "0", in.text}}, "--threads: '0'"},
        {{{"tokenize", "--byte", "-o", out.text, "--threads", "2x", in.text}}, "--threads: '2x'"},
        {{{"tokenize", "--byte", "-o", out.text, "--shard-tokens", "3000000000", in.text}},
         "--shard-tokens: '3000000000'"},
        {{{"tokenize", "--byte", "-o", out.text, "--val-fraction", "0.9", in.text}}, "--val-fraction: '0.9'"},
        {{{"tokenize", "--byte", "-o", out.text, "--val-fraction", "nan", in.text}}, "--val-fraction: 'nan'"},
        {{{"tokenize", "--byte", "-o", out.text, "--val-docs", "-1", in.text}}, "--val-docs: '-1'"},
        {{{"tokenize", "--byte", "-o", out.text, "--val-docs", "1", "--val-fraction", "0.1", in.text}},
         "want one of them"},
        {{{"tokenize", "--byte", "-o", bin.text, "--val-docs", "1", in.text}}, "want a prefix without .bin"},
        {{{"tokenize", "--byte", "-o", out.text, "--document-separator", "", in.text}}, "--document-separator: empty"},
        {{{"tokenize", "--byte", "-o", out.text, "--document-separator", "\\x", in.text}}, "after a backslash"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        dies(call_tokenize, &cases[i].call, cases[i].message);
    }
    write_file(in.text, "a\n<|endoftext|>\nb", 17);
    Call all_val = {{"tokenize", "--byte", "-o", out.text, "--val-docs", "2", in.text}};
    dies(call_tokenize, &all_val, "all 2 documents went to the validation data");
    unlink(in_folder("out_val_000001.bin.tmp").text);
    Call nowhere = {{"tokenize", "--byte", "-o", "/nowhere/at/all", in.text}};
    dies(call_tokenize, &nowhere, "cannot open '/nowhere/at/all_train_000001.bin.tmp' for writing");
    struct {
        Call call;
        const char* message;
    } others[] = {
        {{{"detokenize"}}, "no input"},
        {{{"detokenize", "--gpt2"}}, "--gpt2: no value"},
        {{{"detokenize", "--frob"}}, "unknown flag '--frob'"},
    };
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        dies(call_detokenize, &others[i].call, others[i].message);
    }
    unlink(in.text);
}

int main(void) {
    check(mkdtemp(folder) != NULL, "cannot make a folder '%s': %s", folder, strerror(errno));
    make_small();
    unit_run(test_byte_vocabulary);
    unit_run(test_vocabulary_files);
    unit_run(test_bad_vocabularies);
    unit_run(test_bad_tiktoken);
    unit_run(test_merging);
    unit_run(test_ascii_splitting);
    unit_run(test_utf8_validation);
    unit_run(test_round_trips);
    unit_run(test_gpt2);
    unit_run(test_corpus_exactly);
    unit_run(test_documents_and_splits);
    unit_run(test_shards);
    unit_run(test_random_documents);
    unit_run(test_bad_shards);
    unit_run(test_bad_flags);
    tokenizer_free(&small);
    unlink(in_folder("encoder.json").text);
    unlink(in_folder("vocab.bpe").text);
    check(rmdir(folder) == 0, "the tests left files in '%s'", folder);
    return unit_report();
}
