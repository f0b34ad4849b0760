// Text to GPT-2 tokens: split as GPT-2 does, then byte-pair merges. Plain C11; needs PCRE2 (-lpcre2-8) and tokenizer.h.
//
// 1. Split. GPT-2's pattern cuts the text into pieces; no token crosses a cut:
//        's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//    Pieces of ASCII only are found by a table; a piece that touches any other character goes to PCRE2 (JIT).
//    Bytes that are not UTF-8 end the text before them and are pieces of their own, so every input survives a round
//    trip.
// 2. Merge. A piece starts as single bytes; the pair with the best merge (leftmost on ties) is joined until none is
// left.
//    Linked list + heap: O(n log n) for n bytes, so a word of a megabyte is no trap. Short pieces are remembered.
#ifndef BPE_H
#define BPE_H

#include "tokenizer.h"

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>

// \s is spelled out as Unicode's White_Space (control characters + \p{Z}): PCRE2's own \s also has U+180E.
#define BPE_SPACE "\\t-\\r\\x{85}\\p{Z}"
#define BPE_GPT2_PATTERN                                                                                               \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" BPE_SPACE "\\p{L}\\p{N}]+|[" BPE_SPACE "]+(?![^" BPE_SPACE      \
    "])|[" BPE_SPACE "]+"

#define BPE_NO_MERGE UINT32_MAX
#ifndef BPE_CACHE_ENTRIES
#define BPE_CACHE_ENTRIES 131072 // of 32 bytes: 4 MB per thread; 65536 cost 10% on 200 MB of English, 262144 won 5%
#endif
#define BPE_CACHE_PIECE_BYTES 16 // longer pieces are rare
#define BPE_CACHE_TOKENS 7

typedef struct {
    uint32_t pair;  // left id << 16 | right id
    uint32_t merge; // index of the merge = its priority; BPE_NO_MERGE = free slot
} BpePair;

// What all threads share, read-only.
typedef struct {
    const Tokenizer* t;
    BpePair* pairs; // (pair_mask + 1) open addressing
    uint32_t pair_mask;
    pcre2_code* pattern;
    int has_jit; // 0: this PCRE2 has none for this machine; the interpreter gives the same pieces, slower
} Bpe;

typedef struct {
    uint16_t* ids; // (capacity)
    size_t count, capacity;
} TokenBuffer;

typedef struct {
    uint64_t piece[2]; // its bytes, zero-padded
    uint8_t length;    // 0 = free entry
    uint8_t count;     // tokens
    uint16_t ids[BPE_CACHE_TOKENS];
} BpeCacheEntry;

// One per thread.
typedef struct {
    const Bpe* bpe;
    pcre2_match_data* match;
    pcre2_match_context* match_context;
    pcre2_jit_stack* jit_stack;
    BpeCacheEntry* cache; // (BPE_CACHE_ENTRIES)
    // linked list of the piece being merged, and the heap of its possible merges
    uint32_t *id, *next, *prev, *merge; // (piece_capacity) merge: of this part with the next one, BPE_NO_MERGE = none
    uint64_t* heap;                     // (3 * piece_capacity) merge << 32 | position: best merge first, leftmost first
    size_t heap_count, piece_capacity;
} BpeWorker;

// Room for `more` further ids.
static inline void token_buffer_reserve(TokenBuffer* b, size_t more) {
    if (b->count + more > b->capacity) {
        b->capacity = 2 * (b->count + more) + 1024;
        b->ids = (uint16_t*)realloc(b->ids, b->capacity * sizeof(uint16_t));
        check(b->ids != NULL, "out of host memory: wanted %zu bytes", b->capacity * sizeof(uint16_t));
    }
}

static inline uint32_t bpe_pair_hash(uint32_t pair) {
    pair *= 0x9e3779b1u;
    return pair ^ pair >> 15;
}

// The merge of left and right; BPE_NO_MERGE when there is none.
static inline uint32_t bpe_find_merge(const Bpe* bpe, uint32_t left, uint32_t right) {
    uint32_t pair = left << 16 | right;
    for (uint32_t slot = bpe_pair_hash(pair);; slot++) {
        const BpePair* p = &bpe->pairs[slot & bpe->pair_mask];
        if (p->pair == pair || p->merge == BPE_NO_MERGE) { return p->merge; }
    }
}

// Build the merge table and compile the pattern. `t` must outlive the Bpe. Dies when a merge is listed twice.
static inline void bpe_init(Bpe* bpe, const Tokenizer* t) {
    bpe->t = t;
    uint32_t slots = 1024;
    while (slots < 2 * (uint32_t)t->num_merges) {
        slots *= 2;
    }
    bpe->pair_mask = slots - 1;
    bpe->pairs = (BpePair*)malloc_or_die(slots * sizeof(BpePair));
    for (uint32_t i = 0; i < slots; i++) {
        bpe->pairs[i].pair = 0;
        bpe->pairs[i].merge = BPE_NO_MERGE;
    }
    for (int m = 0; m < t->num_merges; m++) {
        uint32_t left = t->merges[m].left, right = t->merges[m].right;
        check(bpe_find_merge(bpe, left, right) == BPE_NO_MERGE,
              "vocabulary: merge %d, of tokens %u and %u, is there twice", m, left, right);
        uint32_t slot = bpe_pair_hash(left << 16 | right);
        while (bpe->pairs[slot & bpe->pair_mask].merge != BPE_NO_MERGE) {
            slot++;
        }
        bpe->pairs[slot & bpe->pair_mask] = (BpePair){left << 16 | right, (uint32_t)m};
    }
    int error;
    PCRE2_SIZE error_at;
    bpe->pattern = pcre2_compile((PCRE2_SPTR)BPE_GPT2_PATTERN, PCRE2_ZERO_TERMINATED,
                                 PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &error_at, NULL);
    check(bpe->pattern != NULL,
          "this PCRE2 cannot compile GPT-2's pattern (error %d at %zu): want one built with Unicode", error,
          (size_t)error_at);
    bpe->has_jit = pcre2_jit_compile(bpe->pattern, PCRE2_JIT_COMPLETE) == 0;
}

static inline void bpe_free(Bpe* bpe) {
    pcre2_code_free(bpe->pattern);
    free(bpe->pairs);
    memset(bpe, 0, sizeof(*bpe));
}

static inline void bpe_worker_init(BpeWorker* w, const Bpe* bpe) {
    memset(w, 0, sizeof(*w));
    w->bpe = bpe;
    w->match = pcre2_match_data_create(1, NULL);
    w->match_context = pcre2_match_context_create(NULL);
    check(w->match != NULL && w->match_context != NULL, "out of host memory: PCRE2 contexts");
    if (bpe->has_jit) {
        w->jit_stack = pcre2_jit_stack_create(32 << 10, 16 << 20, NULL);
        check(w->jit_stack != NULL, "out of host memory: PCRE2 JIT stack");
        pcre2_jit_stack_assign(w->match_context, NULL, w->jit_stack);
    }
    pcre2_set_match_limit(w->match_context, UINT32_MAX); // a long run of spaces is no attack here
    w->cache = (BpeCacheEntry*)calloc_or_die(BPE_CACHE_ENTRIES, sizeof(BpeCacheEntry));
}

static inline void bpe_worker_free(BpeWorker* w) {
    pcre2_match_data_free(w->match);
    pcre2_match_context_free(w->match_context);
    pcre2_jit_stack_free(w->jit_stack);
    free(w->cache);
    free(w->id);
    free(w->next);
    free(w->prev);
    free(w->merge);
    free(w->heap);
    memset(w, 0, sizeof(*w));
}

// ---------------------------------------------------------------------------------------------------------------------
// merging one piece

static inline void bpe_heap_push(BpeWorker* w, uint64_t value) {
    size_t i = w->heap_count++;
    for (; i > 0 && w->heap[(i - 1) / 2] > value; i = (i - 1) / 2) {
        w->heap[i] = w->heap[(i - 1) / 2];
    }
    w->heap[i] = value;
}

static inline uint64_t bpe_heap_pop(BpeWorker* w) {
    uint64_t top = w->heap[0], last = w->heap[--w->heap_count];
    size_t i = 0;
    for (size_t child = 1; child < w->heap_count; child = 2 * i + 1) {
        child += child + 1 < w->heap_count && w->heap[child + 1] < w->heap[child];
        if (w->heap[child] >= last) { break; }
        w->heap[i] = w->heap[child];
        i = child;
    }
    w->heap[i] = last;
    return top;
}

static inline void bpe_reserve_piece(BpeWorker* w, size_t n) {
    check(n < UINT32_MAX, "a word of %zu bytes without a space, want less than 4 GiB", n);
    if (n > w->piece_capacity) {
        w->piece_capacity = n < 4096 ? 4096 : n + n / 2;
        uint32_t** arrays[4] = {&w->id, &w->next, &w->prev, &w->merge};
        for (int i = 0; i < 4; i++) {
            free(*arrays[i]);
            *arrays[i] = (uint32_t*)malloc_or_die(w->piece_capacity * sizeof(uint32_t));
        }
        free(w->heap);
        w->heap = (uint64_t*)malloc_or_die(3 * w->piece_capacity * sizeof(uint64_t));
    }
}

// Note that part `i` can now be merged with the one after it (or cannot).
static inline void bpe_update_pair(BpeWorker* w, uint32_t i, uint32_t n) {
    w->merge[i] = w->next[i] < n ? bpe_find_merge(w->bpe, w->id[i], w->id[w->next[i]]) : BPE_NO_MERGE;
    if (w->merge[i] != BPE_NO_MERGE) { bpe_heap_push(w, (uint64_t)w->merge[i] << 32 | i); }
}

// Tokens of a piece of n >= 1 bytes, appended to `out`. Part i is the one that starts at byte i. An entry of the heap
// is stale when its part was swallowed or has another neighbour by now: then merge[i] differs from it.
static inline void bpe_merge_piece(BpeWorker* w, const uint8_t* piece, size_t length, TokenBuffer* out) {
    bpe_reserve_piece(w, length);
    uint32_t n = (uint32_t)length;
    w->heap_count = 0;
    for (uint32_t i = 0; i < n; i++) {
        w->id[i] = w->bpe->t->byte_id[piece[i]];
        w->next[i] = i + 1;
        w->prev[i] = i - 1; // of the first: never read
    }
    for (uint32_t i = 0; i < n; i++) {
        bpe_update_pair(w, i, n);
    }
    while (w->heap_count > 0) {
        uint64_t top = bpe_heap_pop(w);
        uint32_t i = (uint32_t)top, merge = (uint32_t)(top >> 32);
        if (w->merge[i] != merge) { continue; }
        uint32_t swallowed = w->next[i];
        w->id[i] = w->bpe->t->merges[merge].result;
        w->merge[swallowed] = BPE_NO_MERGE;
        w->next[i] = w->next[swallowed];
        if (w->next[i] < n) { w->prev[w->next[i]] = i; }
        bpe_update_pair(w, i, n);
        if (i > 0) { bpe_update_pair(w, w->prev[i], n); }
    }
    token_buffer_reserve(out, length);
    for (uint32_t i = 0; i < n; i = w->next[i]) {
        out->ids[out->count++] = (uint16_t)w->id[i];
    }
}

// The same through the cache. `text_end` is where reading must stop (the piece may be followed by more text).
static inline void bpe_encode_piece(BpeWorker* w, const uint8_t* piece, size_t length, const uint8_t* text_end,
                                    TokenBuffer* out) {
    if (length > BPE_CACHE_PIECE_BYTES) {
        bpe_merge_piece(w, piece, length, out);
        return;
    }
    uint64_t bytes[2] = {0, 0};
    if (text_end - piece >= BPE_CACHE_PIECE_BYTES) { // one wide load and a mask instead of a copy of unknown length
        memcpy(bytes, piece, BPE_CACHE_PIECE_BYTES);
        bytes[0] &= length >= 8 ? UINT64_MAX : ((uint64_t)1 << 8 * length) - 1;
        bytes[1] &= length >= 16 ? UINT64_MAX : length <= 8 ? 0 : ((uint64_t)1 << 8 * (length - 8)) - 1;
    } else {
        memcpy(bytes, piece, length);
    }
    uint64_t hash = (bytes[0] ^ bytes[1] * 0x9e3779b97f4a7c15u ^ length) * 0xd6e8feb86659fd93u;
    BpeCacheEntry* entry = &w->cache[(hash ^ hash >> 32) % BPE_CACHE_ENTRIES];
    if (entry->length != length || entry->piece[0] != bytes[0] || entry->piece[1] != bytes[1]) {
        size_t first = out->count;
        bpe_merge_piece(w, piece, length, out);
        size_t count = out->count - first;
        if (count <= BPE_CACHE_TOKENS) {
            memcpy(entry->piece, bytes, sizeof(bytes));
            entry->length = (uint8_t)length;
            entry->count = (uint8_t)count;
            memcpy(entry->ids, out->ids + first, count * sizeof(uint16_t));
        }
        return;
    }
    token_buffer_reserve(out, BPE_CACHE_TOKENS);
    memcpy(out->ids + out->count, entry->ids, sizeof(entry->ids)); // all seven: cheaper than counting
    out->count += entry->count;
}

// ---------------------------------------------------------------------------------------------------------------------
// splitting

// Length of the longest prefix of text[0..n) that is well-formed UTF-8 (no overlong forms, no surrogates, at most
// U+10FFFF).
static inline size_t bpe_valid_utf8_prefix(const uint8_t* s, size_t n) {
    size_t i = 0;
    while (i < n) {
        uint64_t word;
        if (n - i >= 8 && (memcpy(&word, s + i, 8), (word & 0x8080808080808080u) == 0)) {
            i += 8;
            continue;
        }
        uint8_t c = s[i];
        if (c < 0x80) {
            i++;
            continue;
        }
        size_t more = c >= 0xc2 && c <= 0xdf ? 1 : (c & 0xf0) == 0xe0 ? 2 : c >= 0xf0 && c <= 0xf4 ? 3 : 0;
        if (more == 0 || n - i <= more) { break; }
        uint8_t low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80; // of the second byte
        uint8_t high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
        if (s[i + 1] < low || s[i + 1] > high || (more > 1 && (s[i + 2] & 0xc0) != 0x80) ||
            (more > 2 && (s[i + 3] & 0xc0) != 0x80)) {
            break;
        }
        i += more + 1;
    }
    return i;
}

enum { BPE_OTHER, BPE_LETTER, BPE_DIGIT, BPE_WHITE, BPE_NOT_ASCII };

static inline int bpe_class(uint8_t c) { // the ASCII part of \p{L}, \p{N}, \s
    if (c >= 0x80) { return BPE_NOT_ASCII; }
    if ((uint8_t)((c | 0x20) - 'a') < 26) { return BPE_LETTER; }
    if (c <= ' ') { return c == ' ' || (c >= '\t' && c <= '\r') ? BPE_WHITE : BPE_OTHER; }
    return (uint8_t)(c - '0') < 10 ? BPE_DIGIT : BPE_OTHER;
}

// Length of the piece that text[0..n), n >= 1, starts with, when that can be told from ASCII alone; else 0.
static inline size_t bpe_ascii_piece(const uint8_t* s, size_t n) {
    if (s[0] == '\'' && n >= 2) {
        uint8_t a = s[1], b = n >= 3 ? s[2] : 0;
        if (a == 's' || a == 't' || a == 'm' || a == 'd') { return 2; }
        if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) { return 3; }
    }
    size_t i = 0;
    int kind = bpe_class(s[0]);
    if (s[0] == ' ' && n >= 2 && bpe_class(s[1]) != BPE_WHITE) { // the optional space before a word
        kind = bpe_class(s[1]);
        i = 1;
    }
    if (kind == BPE_NOT_ASCII) { return 0; }
    while (i < n && bpe_class(s[i]) == kind) {
        i++;
    }
    if (i < n && s[i] >= 0x80) { // may belong to this piece or not: PCRE2 knows
        return 0;
    }
    // White space before a word leaves its last character to the word: as its " ?", or as a piece of its own.
    return kind == BPE_WHITE && i < n && i > 1 ? i - 1 : i;
}

// Length of the piece that text[0..n), well-formed UTF-8 with n >= 1, starts with, by PCRE2.
static inline size_t bpe_pcre_piece(BpeWorker* w, const uint8_t* s, size_t n) {
    const Bpe* bpe = w->bpe;
    int rc = bpe->has_jit ? pcre2_jit_match(bpe->pattern, s, n, 0, PCRE2_NO_UTF_CHECK, w->match, w->match_context)
                          : pcre2_match(bpe->pattern, s, n, 0, PCRE2_NO_UTF_CHECK, w->match, w->match_context);
    PCRE2_SIZE* ends = pcre2_get_ovector_pointer(w->match);
    check(rc >= 0 && ends[0] == 0 && ends[1] > 0, "PCRE2 failed to split the text: error %d", rc);
    return ends[1];
}

// Append the tokens of text[0..n) to `out`. Any bytes are allowed. No token is special: "<|endoftext|>" in the text is
// text.
static inline void bpe_encode(BpeWorker* w, const char* text, size_t n, TokenBuffer* out) {
    const uint8_t* s = (const uint8_t*)text;
    const uint8_t* end = s + n;
    while (s < end) {
        const uint8_t* valid_end = s + bpe_valid_utf8_prefix(s, (size_t)(end - s));
        while (s < valid_end) {
            size_t length = bpe_ascii_piece(s, (size_t)(valid_end - s));
            if (length == 0) { length = bpe_pcre_piece(w, s, (size_t)(valid_end - s)); }
            bpe_encode_piece(w, s, length, end, out);
            s += length;
        }
        const uint8_t* bad = s; // then the bytes up to the next well-formed character
        while (s < end && bpe_valid_utf8_prefix(s, (size_t)(end - s) < 4 ? (size_t)(end - s) : 4) == 0) {
            s++;
        }
        if (s > bad) { bpe_encode_piece(w, bad, (size_t)(s - bad), end, out); }
    }
}

#endif
