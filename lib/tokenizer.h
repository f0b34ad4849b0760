// Vocabularies: what each token id stands for. Enough to turn ids into text (the trainer's samples, data/detokenize);
// the other direction needs PCRE2 and lives in bpe.h. Plain C11; leans on check.h only.
//
//   byte-level   ids 0..255 are the bytes, 256 is end-of-text. No file.
//   GPT-2        a folder with vocab.bpe and encoder.json (OpenAI's release), or one file gpt2.tiktoken.
//
// encoder.json is {"token": id, ...} and vocab.bpe one merge "left right" per line, best first. Their tokens are byte
// strings written as printable text: the 188 bytes 33..126, 161..172, 174..255 stand for themselves (as Latin-1), the
// other 68, in order, are U+0100..U+0143. gpt2.tiktoken has "base64(token bytes) id" per line, ids in order of merging;
// its merges are found again by merging each token's bytes with the merges before it.
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include "check.h"

#include <sys/stat.h>

#define TOKENIZER_END_OF_TEXT "<|endoftext|>"
#define TOKENIZER_MAX_FILE_BYTES (64 << 20) // GPT-2's are 1 MB; more is not a vocabulary
#ifndef TOKENIZER_GPT2_TIKTOKEN_IDS         // the fuzz targets read smaller ones
#define TOKENIZER_GPT2_TIKTOKEN_IDS 50256   // lines of gpt2.tiktoken; end-of-text comes after them
#endif

typedef struct {
    uint16_t left, right, result; // ids: left followed by right becomes result
} TokenMerge;

typedef struct {
    int vocab_size;     // number of ids
    int end_of_text;    // its id
    uint8_t* bytes;     // the bytes of all tokens
    uint32_t* start;    // (vocab_size) where in `bytes` a token's begin
    uint32_t* length;   // (vocab_size) how many it has, at least 1
    TokenMerge* merges; // (num_merges) best first; byte-level has none
    int num_merges;
    uint16_t byte_id[256]; // the token of each single byte
} Tokenizer;

// The bytes of token `id`, not terminated; *length says how many. End-of-text is its customary text. The bytes of one
// token need not be whole UTF-8 characters. Dies when the id is not in the vocabulary.
static inline const char* tokenizer_decode(const Tokenizer* t, int id, size_t* length) {
    check(id >= 0 && id < t->vocab_size, "token %d is not in the vocabulary of %d", id, t->vocab_size);
    *length = t->length[id];
    return (const char*)t->bytes + t->start[id];
}

static inline void tokenizer_free(Tokenizer* t) {
    free(t->bytes);
    free(t->start);
    free(t->length);
    free(t->merges);
    memset(t, 0, sizeof(*t));
}

// ---------------------------------------------------------------------------------------------------------------------
// building: tokens arrive in any order, under any id, and are looked up by their bytes

typedef struct {
    Tokenizer* t;
    const char* path; // for messages
    size_t bytes_used, bytes_capacity;
    int num_tokens; // added so far
    int32_t* slots; // (TOKENIZER_SLOTS) id by hash of its bytes, -1 = free
} TokenizerBuilder;

#ifndef TOKENIZER_FIRST_BYTES
#define TOKENIZER_FIRST_BYTES (1 << 19) // room for the bytes of all tokens; grows
#endif
#ifndef TOKENIZER_SLOTS
#define TOKENIZER_SLOTS 262144 // a power of two, 4 times the 65536 ids that 16 bits can have
#endif

static inline void tokenizer_build_begin(TokenizerBuilder* b, Tokenizer* t, const char* path) {
    memset(t, 0, sizeof(*t));
    memset(b, 0, sizeof(*b));
    b->t = t;
    b->path = path;
    b->bytes_capacity = TOKENIZER_FIRST_BYTES;
    t->bytes = (uint8_t*)malloc_or_die(b->bytes_capacity);
    t->start = (uint32_t*)calloc_or_die(65536, sizeof(uint32_t));
    t->length = (uint32_t*)calloc_or_die(65536, sizeof(uint32_t));
    b->slots = (int32_t*)malloc_or_die(TOKENIZER_SLOTS * sizeof(int32_t));
    memset(b->slots, 0xff, TOKENIZER_SLOTS * sizeof(int32_t));
    t->end_of_text = -1;
}

// The slot that holds the token with these bytes, or the free one where it belongs.
static inline int32_t* tokenizer_slot(const TokenizerBuilder* b, const uint8_t* bytes, size_t length) {
    uint32_t hash = 2166136261u; // FNV-1a
    for (size_t i = 0; i < length; i++) {
        hash = (hash ^ bytes[i]) * 16777619u;
    }
    for (uint32_t slot = hash ^ hash >> 15;; slot++) {
        int32_t* entry = &b->slots[slot & (TOKENIZER_SLOTS - 1)];
        if (*entry < 0 ||
            (b->t->length[*entry] == length && memcmp(b->t->bytes + b->t->start[*entry], bytes, length) == 0)) {
            return entry;
        }
    }
}

// Id of the token with these bytes; -1 when there is none.
static inline int tokenizer_find(const TokenizerBuilder* b, const uint8_t* bytes, size_t length) {
    return *tokenizer_slot(b, bytes, length);
}

// Add a token. Each id and each byte string may come once; ids fit 16 bits.
static inline void tokenizer_add(TokenizerBuilder* b, int64_t id, const uint8_t* bytes, size_t length) {
    Tokenizer* t = b->t;
    check(id >= 0 && id < 65536, "'%s': token id %lld, want 0 to 65535 (16-bit tokens)", b->path, (long long)id);
    check(length > 0, "'%s': token %lld is empty", b->path, (long long)id);
    check(t->length[id] == 0, "'%s': two tokens have id %lld", b->path, (long long)id);
    int32_t* slot = tokenizer_slot(b, bytes, length);
    check(*slot < 0, "'%s': tokens %d and %lld are the same text", b->path, *slot, (long long)id);
    if (b->bytes_used + length > b->bytes_capacity) {
        b->bytes_capacity = 2 * (b->bytes_used + length);
        t->bytes = (uint8_t*)realloc(t->bytes, b->bytes_capacity);
        check(t->bytes != NULL, "out of host memory: wanted %zu bytes", b->bytes_capacity);
    }
    memcpy(t->bytes + b->bytes_used, bytes, length);
    t->start[id] = (uint32_t)b->bytes_used;
    t->length[id] = (uint32_t)length;
    b->bytes_used += length;
    b->num_tokens++;
    *slot = (int32_t)id;
}

// After the last token: ids are 0..n-1 without a gap and every single byte has one.
static inline void tokenizer_build_end(TokenizerBuilder* b) {
    Tokenizer* t = b->t;
    t->vocab_size = b->num_tokens;
    for (int id = 0; id < t->vocab_size; id++) {
        check(t->length[id] > 0, "'%s': %d tokens, but none has id %d", b->path, t->vocab_size, id);
    }
    for (int i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)i;
        int id = tokenizer_find(b, &byte, 1);
        check(id >= 0, "'%s' is not a byte-level vocabulary: no token for byte %d among %d tokens (truncated?)",
              b->path, i, t->vocab_size);
        t->byte_id[i] = (uint16_t)id;
    }
}

// The byte-level vocabulary: no file, no merges.
static inline void tokenizer_init_byte(Tokenizer* t) {
    TokenizerBuilder b;
    tokenizer_build_begin(&b, t, "byte");
    for (int i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)i;
        tokenizer_add(&b, i, &byte, 1);
    }
    t->end_of_text = 256;
    tokenizer_add(&b, t->end_of_text, (const uint8_t*)TOKENIZER_END_OF_TEXT, strlen(TOKENIZER_END_OF_TEXT));
    tokenizer_build_end(&b);
    free(b.slots);
}

// ---------------------------------------------------------------------------------------------------------------------
// reading files

// The whole file, with a 0 byte after its *length bytes. Caller frees.
static inline char* tokenizer_read_file(const char* path, size_t* length) {
    int64_t bytes = file_size_or_die(path);
    check(bytes > 0 && bytes <= TOKENIZER_MAX_FILE_BYTES, "'%s': %lld bytes, want a vocabulary of 1 to %d bytes", path,
          (long long)bytes, TOKENIZER_MAX_FILE_BYTES);
    FILE* f = fopen_or_die(path, "rb");
    char* text = (char*)malloc_or_die((size_t)bytes + 1);
    fread_or_die(text, (size_t)bytes, f, path);
    fclose_or_die(f, path);
    text[bytes] = 0; // where the readers of text stop: so there must be none before
    check(strlen(text) == (size_t)bytes, "'%s' is no text: byte %zu is 0", path, strlen(text));
    *length = (size_t)bytes;
    return text;
}

// The byte that GPT-2's files write as this code point; -1 for code points that stand for none.
static inline int tokenizer_byte_of_code_point(uint32_t c) {
    if ((c >= 33 && c <= 126) || (c >= 161 && c <= 172) || (c >= 174 && c <= 255)) { return (int)c; }
    if (c < 256 || c > 323) { return -1; }
    uint32_t k = c - 256; // the k-th of 0..32, 127..160, 173
    return (int)(k < 33 ? k : k < 67 ? 127 + (k - 33) : 173);
}

// Line of byte `at`, counted from 1, for messages.
static inline int tokenizer_line_of(const char* text, const char* at) {
    int line = 1;
    for (; text < at; text++) {
        line += *text == '\n';
    }
    return line;
}

// One UTF-8 code point of at most 3 bytes from *p; enough for the code points that GPT-2's files use. -1: malformed.
static inline int64_t tokenizer_read_utf8(const char** p) {
    const uint8_t* s = (const uint8_t*)*p;
    if (s[0] < 0x80) {
        *p += 1;
        return s[0];
    }
    if ((s[0] & 0xe0) == 0xc0 && (s[1] & 0xc0) == 0x80) {
        *p += 2;
        return (s[0] & 0x1f) << 6 | (s[1] & 0x3f);
    }
    if ((s[0] & 0xf0) == 0xe0 && (s[1] & 0xc0) == 0x80 && (s[2] & 0xc0) == 0x80) {
        *p += 3;
        return (s[0] & 0x0f) << 12 | (s[1] & 0x3f) << 6 | (s[2] & 0x3f);
    }
    return -1;
}

// One code point of a JSON string from *p, escapes resolved. -1: malformed. The text ends in a 0 byte, which is never
// part of a string, so that nothing reads past the end.
static inline int64_t tokenizer_read_json_char(const char** p) {
    if (**p != '\\') { return (uint8_t) * *p < 32 ? -1 : tokenizer_read_utf8(p); }
    char kind = (*p)[1];
    const char* names = "\"\"\\\\//b\bf\fn\nr\rt\t"; // pairs: letter after the backslash, what it means
    for (const char* n = names; *n; n += 2) {
        if (n[0] == kind) {
            *p += 2;
            return (uint8_t)n[1];
        }
    }
    if (kind != 'u') { return -1; }
    int64_t code = 0;
    for (int i = 2; i < 6; i++) {
        char c = (*p)[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) { return -1; }
        code = code << 4 | digit;
    }
    *p += 6;
    return code; // half of a surrogate pair stands for no byte and is refused by the caller
}

static inline const char* tokenizer_skip_space(const char* p) {
    while (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r') {
        p++;
    }
    return p;
}

// encoder.json: {"token": id, ...} with tokens in GPT-2's printable alphabet.
static inline void tokenizer_read_encoder_json(TokenizerBuilder* b) {
    size_t length;
    char* text = tokenizer_read_file(b->path, &length);
    uint8_t* token = (uint8_t*)malloc_or_die(length);
    const char* p = tokenizer_skip_space(text);
    check(*p == '{', "'%s' is not an encoder.json: it starts with byte %d, want '{'", b->path, (uint8_t)*p);
    for (char separator = '{'; separator != '}';) {
        p = tokenizer_skip_space(p + 1);
        check(*p == '"', "'%s', line %d, byte %zu: want a token in quotes (truncated or not an encoder.json)", b->path,
              tokenizer_line_of(text, p), (size_t)(p - text));
        size_t n = 0;
        for (p++; *p != '"';) {
            const char* at = p;
            int64_t code = tokenizer_read_json_char(&p);
            int byte = code < 0 ? -1 : tokenizer_byte_of_code_point((uint32_t)code);
            check(byte >= 0, "'%s', line %d, byte %zu: a character that stands for no byte in GPT-2's vocabulary files",
                  b->path, tokenizer_line_of(text, at), (size_t)(at - text));
            token[n++] = (uint8_t)byte;
        }
        p = tokenizer_skip_space(p + 1);
        check(*p == ':', "'%s', line %d, byte %zu: want ':' after a token", b->path, tokenizer_line_of(text, p),
              (size_t)(p - text));
        p = tokenizer_skip_space(p + 1);
        check(*p >= '0' && *p <= '9', "'%s', line %d, byte %zu: want the id of a token", b->path,
              tokenizer_line_of(text, p), (size_t)(p - text));
        int64_t id = 0;
        for (; *p >= '0' && *p <= '9'; p++) {
            id = id < 1000000 ? id * 10 + (*p - '0') : id; // tokenizer_add refuses anything above 65535
        }
        tokenizer_add(b, id, token, n);
        p = tokenizer_skip_space(p);
        separator = *p;
        check(separator == ',' || separator == '}', "'%s', line %d, byte %zu: want ',' or '}' after an id (truncated?)",
              b->path, tokenizer_line_of(text, p), (size_t)(p - text));
    }
    p = tokenizer_skip_space(p + 1);
    check(p == text + length, "'%s', line %d: text after the closing '}'", b->path, tokenizer_line_of(text, p));
    b->t->end_of_text = tokenizer_find(b, (const uint8_t*)TOKENIZER_END_OF_TEXT, strlen(TOKENIZER_END_OF_TEXT));
    check(b->t->end_of_text >= 0, "'%s': no token " TOKENIZER_END_OF_TEXT " among %d", b->path, b->num_tokens);
    free(token);
    free(text);
}

// vocab.bpe: an optional "#version" line, then "left right" per line. Every token of more than one byte, except
// end-of-text, is made by exactly one merge: so a shortened file cannot pass.
static inline void tokenizer_read_merges(TokenizerBuilder* b, const char* path) {
    Tokenizer* t = b->t;
    size_t length;
    char* text = tokenizer_read_file(path, &length);
    uint8_t* token = (uint8_t*)malloc_or_die(length);
    uint8_t* made = (uint8_t*)calloc_or_die(65536, 1);
    t->merges = (TokenMerge*)malloc_or_die(65536 * sizeof(TokenMerge));
    const char* p = text;
    int line = 1;
    if (strncmp(p, "#version", 8) == 0) {
        for (; *p && *p != '\n'; p++) {}
        p += *p == '\n';
        line++;
    }
    for (; *p; line++) {
        size_t n = 0, left_length = 0;
        int spaces = 0;
        while (*p && *p != '\n' && *p != '\r') {
            if (*p == ' ') {
                left_length = n;
                spaces++;
                p++;
                continue;
            }
            int64_t code = tokenizer_read_utf8(&p);
            int byte = code < 0 ? -1 : tokenizer_byte_of_code_point((uint32_t)code);
            check(byte >= 0, "'%s', line %d: a character that stands for no byte in GPT-2's vocabulary files", path,
                  line);
            token[n++] = (uint8_t)byte;
        }
        p += *p == '\r';
        p += *p == '\n';
        check(spaces == 1 && left_length > 0 && left_length < n, "'%s', line %d: want 'left right', one space between",
              path, line);
        int left = tokenizer_find(b, token, left_length);
        int right = tokenizer_find(b, token + left_length, n - left_length);
        int result = tokenizer_find(b, token, n);
        check(left >= 0 && right >= 0 && result >= 0,
              "'%s', line %d: the merge uses a token that '%s' does not have "
              "(truncated, or files of two vocabularies)",
              path, line, b->path);
        check(result != t->end_of_text && !made[result], "'%s', line %d: token %d is made twice", path, line, result);
        made[result] = 1;
        t->merges[t->num_merges++] = (TokenMerge){(uint16_t)left, (uint16_t)right, (uint16_t)result};
    }
    check(t->num_merges == t->vocab_size - 257, "'%s': %d merges, want %d for the %d tokens of '%s' (truncated?)", path,
          t->num_merges, t->vocab_size - 257, t->vocab_size, b->path);
    free(made);
    free(token);
    free(text);
}

// Value of a base64 digit; -1 for anything else.
static inline int tokenizer_base64_digit(char c) {
    return c >= 'A' && c <= 'Z'   ? c - 'A'
           : c >= 'a' && c <= 'z' ? c - 'a' + 26
           : c >= '0' && c <= '9' ? c - '0' + 52
           : c == '+'             ? 62
           : c == '/'             ? 63
                                  : -1;
}

// The two tokens that merging makes token `id` from: its bytes, merged by all tokens with a lower id, best first.
static inline TokenMerge tokenizer_recover_merge(const TokenizerBuilder* b, int id) {
    const Tokenizer* t = b->t;
    const uint8_t* bytes = t->bytes + t->start[id];
    uint32_t cut[258], n = t->length[id]; // part k is bytes[cut[k], cut[k+1])
    check(n <= 257, "'%s': token %d has %u bytes, want at most 257", b->path, id, n);
    for (uint32_t k = 0; k <= n; k++) {
        cut[k] = k;
    }
    for (;;) {
        int best = id;
        uint32_t best_at = 0;
        for (uint32_t k = 0; k + 2 <= n; k++) {
            int candidate = tokenizer_find(b, bytes + cut[k], cut[k + 2] - cut[k]);
            if (candidate >= 0 && candidate < best) {
                best = candidate;
                best_at = k;
            }
        }
        if (best == id) { break; }
        memmove(cut + best_at + 1, cut + best_at + 2, (n - best_at - 1) * sizeof(cut[0]));
        n--;
    }
    check(n == 2, "'%s': token %d is no merge of two earlier tokens (corrupt?)", b->path, id);
    int left = tokenizer_find(b, bytes, cut[1]), right = tokenizer_find(b, bytes + cut[1], cut[2] - cut[1]);
    return (TokenMerge){(uint16_t)left, (uint16_t)right, (uint16_t)id};
}

// gpt2.tiktoken: "base64 id" per line; end-of-text gets the id after the last.
static inline void tokenizer_read_tiktoken(TokenizerBuilder* b) {
    Tokenizer* t = b->t;
    size_t length;
    char* text = tokenizer_read_file(b->path, &length);
    uint8_t* token = (uint8_t*)malloc_or_die(length);
    int line = 1;
    for (const char* p = text; *p; line++) {
        uint32_t bits = 0;
        int num_bits = 0;
        size_t n = 0;
        for (int digit; (digit = tokenizer_base64_digit(*p)) >= 0; p++) {
            bits = bits << 6 | (uint32_t)digit;
            num_bits += 6;
            if (num_bits >= 8) {
                num_bits -= 8;
                token[n++] = (uint8_t)(bits >> num_bits);
            }
        }
        for (; *p == '='; p++) {}
        check(n > 0 && p[0] == ' ' && p[1] >= '0' && p[1] <= '9',
              "'%s', line %d: want 'base64 id', a line of gpt2.tiktoken", b->path, line);
        int64_t id = 0;
        for (p++; *p >= '0' && *p <= '9'; p++) {
            id = id < 1000000 ? id * 10 + (*p - '0') : id;
        }
        p += *p == '\r';
        check(*p == '\n' || *p == 0, "'%s', line %d: text after the id", b->path, line);
        p += *p == '\n';
        tokenizer_add(b, id, token, n);
    }
    free(token);
    free(text);
    check(b->num_tokens == TOKENIZER_GPT2_TIKTOKEN_IDS, "'%s': %d tokens, want GPT-2's %d (truncated?)", b->path,
          b->num_tokens, TOKENIZER_GPT2_TIKTOKEN_IDS);
    t->end_of_text = b->num_tokens;
    tokenizer_add(b, t->end_of_text, (const uint8_t*)TOKENIZER_END_OF_TEXT, strlen(TOKENIZER_END_OF_TEXT));
}

// Read GPT-2's vocabulary: a folder with vocab.bpe and encoder.json (or either of the two files), else a tiktoken file.
// Any other vocabulary in encoder.json's format works too, as long as its ids fit 16 bits.
static inline void tokenizer_init_gpt2(Tokenizer* t, const char* path) {
    struct stat st;
    check(stat(path, &st) == 0, "cannot open vocabulary '%s': %s", path, strerror(errno));
    char folder[4096];
    check(snprintf(folder, sizeof(folder), "%s", path) < (int)sizeof(folder) - 16, "vocabulary path too long: '%s'",
          path);
    char* name = strrchr(folder, '/') ? strrchr(folder, '/') + 1 : folder;
    int is_one_of_two = strcmp(name, "vocab.bpe") == 0 || strcmp(name, "encoder.json") == 0;
    if (is_one_of_two) { snprintf(name, 3, "%s", name == folder ? "." : ""); }
    TokenizerBuilder b;
    if (!S_ISDIR(st.st_mode) && !is_one_of_two) {
        tokenizer_build_begin(&b, t, path);
        tokenizer_read_tiktoken(&b);
        tokenizer_build_end(&b);
        t->merges = (TokenMerge*)malloc_or_die(65536 * sizeof(TokenMerge));
        for (int id = 0; id < t->vocab_size; id++) {
            if (id != t->end_of_text && t->length[id] > 1) {
                t->merges[t->num_merges++] = tokenizer_recover_merge(&b, id);
            }
        }
    } else {
        char encoder_path[4160], merges_path[4160];
        snprintf(encoder_path, sizeof(encoder_path), "%s/encoder.json", folder);
        snprintf(merges_path, sizeof(merges_path), "%s/vocab.bpe", folder);
        tokenizer_build_begin(&b, t, encoder_path);
        tokenizer_read_encoder_json(&b);
        tokenizer_build_end(&b);
        tokenizer_read_merges(&b, merges_path);
    }
    free(b.slots);
}

// The vocabulary that a user names: "byte", or a path for tokenizer_init_gpt2.
static inline void tokenizer_init(Tokenizer* t, const char* name_or_path) {
    if (strcmp(name_or_path, "byte") == 0) {
        tokenizer_init_byte(t);
    } else {
        tokenizer_init_gpt2(t, name_or_path);
    }
}

// Print token `id` as text, or as a number when there is no vocabulary (tokenizer NULL).
static inline void tokenizer_print(FILE* out, const Tokenizer* tokenizer, int id) {
    if (tokenizer == NULL || id >= tokenizer->vocab_size) {
        fprintf(out, "%d ", id);
        return;
    }
    size_t length;
    const char* bytes = tokenizer_decode(tokenizer, id, &length);
    for (size_t i = 0; i < length; i++) { // control characters would garble the terminal
        unsigned char byte = (unsigned char)bytes[i];
        fputc(byte >= 32 || byte == '\n' || byte == '\t' ? byte : '.', out);
    }
}

#endif
