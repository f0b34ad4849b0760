// Vocabulary files (lib/tokenizer.h), and encoding with what was read (lib/bpe.h).
//
//     input    1 byte of flags, then parts with an ASCII record separator (0x1e) between them
//     flags    0..3 what the parts are: 0 encoder.json, vocab.bpe; 1 a tiktoken file; 2 vocab.bpe, beside the small
//              vocabulary's encoder.json; 3 the lines of a tiktoken file after those of the single bytes
//              4 one more part is text to encode
#include "fuzz.h"

#include "bpe.h"
#include "small_vocabulary.h"

// What any vocabulary that was read must have.
static void vocabulary_check(const Tokenizer* t) {
    fuzz_want(t->vocab_size >= 257 && t->vocab_size <= 65536 && t->num_merges == t->vocab_size - 257,
              "%d tokens, %d merges", t->vocab_size, t->num_merges);
    size_t n, left, right;
    const char* end = tokenizer_decode(t, t->end_of_text, &n);
    fuzz_want(n == strlen(TOKENIZER_END_OF_TEXT) && memcmp(end, TOKENIZER_END_OF_TEXT, n) == 0, "end-of-text is %d",
              t->end_of_text);
    for (int i = 0; i < 256; i++) {
        const char* text = tokenizer_decode(t, t->byte_id[i], &n);
        fuzz_want(n == 1 && (uint8_t)text[0] == i, "byte %d has token %d", i, t->byte_id[i]);
    }
    uint8_t* made = (uint8_t*)calloc_or_die((size_t)t->vocab_size, 1);
    for (int m = 0; m < t->num_merges; m++) {
        const char* result = tokenizer_decode(t, t->merges[m].result, &n);
        const char* a = tokenizer_decode(t, t->merges[m].left, &left);
        const char* b = tokenizer_decode(t, t->merges[m].right, &right);
        fuzz_want(n == left + right && memcmp(result, a, left) == 0 && memcmp(result + left, b, right) == 0,
                  "merge %d: token %d is not %d and %d", m, t->merges[m].result, t->merges[m].left, t->merges[m].right);
        fuzz_want(!made[t->merges[m].result], "token %d is made by two merges", t->merges[m].result);
        made[t->merges[m].result] = 1;
    }
    free(made);
}

// Text to tokens and back is the identity.
static void vocabulary_encode(const Tokenizer* t, const uint8_t* text, size_t size) {
    Bpe bpe;
    BpeWorker worker;
    TokenBuffer out = {NULL, 0, 0};
    bpe_init(&bpe, t);
    bpe_worker_init(&worker, &bpe);
    bpe_encode(&worker, (const char*)text, size, &out);
    size_t at = 0;
    for (size_t i = 0; i < out.count; i++) {
        size_t n;
        const char* bytes = tokenizer_decode(t, out.ids[i], &n);
        fuzz_want(n <= size - at && memcmp(bytes, text + at, n) == 0, "token %zu is not the text at byte %zu", i, at);
        at += n;
    }
    fuzz_want(at == size, "tokens of %zu bytes, the text has %zu", at, size);
    free(out.ids);
    bpe_worker_free(&worker);
    bpe_free(&bpe);
}

static void vocabulary_run(const uint8_t* data, size_t size) {
    FuzzInput in = {data, size};
    int flags = fuzz_byte(&in), kind = flags & 3;
    char small[SMALL_FILE_BYTES];
    const char* path;
    if (kind == 0 || kind == 2) {
        FuzzInput encoder = {(const uint8_t*)small, kind == 2 ? small_encoder_json(small) : 0};
        if (kind == 0) { encoder = fuzz_part(&in); }
        FuzzInput merges = fuzz_part(&in);
        path = fuzz_write("encoder.json", encoder.bytes, encoder.size);
        fuzz_write("vocab.bpe", merges.bytes, merges.size);
    } else {
        FuzzInput lines = fuzz_part(&in);
        path = fuzz_write("small.tiktoken", small, kind == 3 ? small_tiktoken(small, 0) : 0);
        FILE* f = fopen_or_die(path, "ab");
        fwrite_or_die(lines.bytes, lines.size, f, path);
        fclose_or_die(f, path);
    }
    Tokenizer t;
    tokenizer_init(&t, path);
    fuzz.must_end = 1;
    vocabulary_check(&t);
    if (flags & 4) { vocabulary_encode(&t, in.bytes, in.size); }
    tokenizer_free(&t);
}

static void vocabulary_seeds(void) {
    static char file[2 * SMALL_FILE_BYTES + 256];
    const char* text = "abcabc the 12's  caf\xc3\xa9\xc3\xa9 \xe4\xb8\xad\r\n\n\xff\xc3 aaaaa";
    for (int kind = 0; kind < 4; kind++) {
        size_t n = 0;
        if (kind == 0) {
            n += small_encoder_json(file);
            file[n++] = FUZZ_RECORD_SEPARATOR[0];
        }
        if (kind == 0 || kind == 2) {
            n += small_vocab_bpe(file + n);
        } else {
            n += kind == 1 ? small_tiktoken(file, 0) : 0;
            n += small_tiktoken(file + n, 1);
        }
        uint8_t flags = (uint8_t)kind;
        fuzz_seed(FUZZ_TAKEN, &flags, 1, file, n);
        flags |= 4;
        file[n++] = FUZZ_RECORD_SEPARATOR[0];
        memcpy(file + n, text, strlen(text));
        fuzz_seed(FUZZ_TAKEN, &flags, 1, file, n + strlen(text));
    }
    size_t n = small_vocab_bpe(file); // a 0 byte ended the file, and what came after it was not looked at
    memcpy(file + n, "\0a c", 4);
    fuzz_seed(FUZZ_REFUSED, "\2", 1, file, n + 4);
    memcpy(file + n, "a \xe0\x84", 4); // ends inside a character
    fuzz_seed(FUZZ_REFUSED, "\2", 1, file, n + 4);
    file[n] = 0;
    char* the = strstr(file, "th e");
    memcpy(the, "a bc", 4); // "abc" again, and "the" not at all
    fuzz_seed(FUZZ_REFUSED, "\2", 1, file, n);
    static const char* encoders[] = {"{\"a\":65536}", "{\"a\":999999}", "{\"a\":99999999999999999999}", "{\"\\u01",
                                     "{\"\\"};
    for (size_t i = 0; i < sizeof(encoders) / sizeof(encoders[0]); i++) {
        fuzz_seed(FUZZ_REFUSED, "\0", 1, encoders[i], strlen(encoders[i]));
    }
}

FUZZ_TARGET(vocabulary)
