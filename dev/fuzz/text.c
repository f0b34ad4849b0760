// Text: data/tokenize's reader of documents and its encoders, which must take any bytes at all.
//
//     input    1 byte of flags; with separator 3: the separator as on the command line and a record separator (0x1e);
//              then up to 4 files with record separators between them
//     flags    0..3 the separator: 0 the default, 1 "\n\n", 2 "ab", 3 in the input;  4 GPT-2's way instead of bytes
#include "fuzz.h"

#ifndef TESTING
#define TESTING
#endif
#include "../../data/tokenize.c"
#include "small_vocabulary.h"

static Tokenizer text_vocabularies[2]; // byte-level, the small one
static Bpe text_bpe;
static BpeWorker text_worker;

// Made once: what it takes belongs to no run.
static void text_prepare(void) {
    if (text_worker.bpe != NULL) { return; }
    int running = fuzz.running;
    fuzz.running = 0;
    char file[SMALL_FILE_BYTES];
    const char* path = fuzz_write("encoder.json", file, small_encoder_json(file));
    fuzz_write("vocab.bpe", file, small_vocab_bpe(file));
    tokenizer_init_byte(&text_vocabularies[0]);
    tokenizer_init(&text_vocabularies[1], path);
    bpe_init(&text_bpe, &text_vocabularies[1]);
    bpe_worker_init(&text_worker, &text_bpe);
    bpe_reserve_piece(&text_worker, 1 << 20);
    fuzz.running = running;
}

// The documents of one whole file, straight from data/README.md's rules. Returns how many were added.
static int text_expect(FuzzInput* documents, int room, FuzzInput file, const char* separator, size_t length) {
    int count = 0;
    for (;;) {
        const uint8_t* end = (const uint8_t*)memmem(file.bytes, file.size, separator, length);
        fuzz_want(count < room, "no room for the documents");
        if (end == NULL) { break; }
        documents[count].bytes = file.bytes;
        documents[count++].size = (size_t)(end - file.bytes);
        file.size -= (size_t)(end - file.bytes) + length;
        file.bytes = end + length;
    }
    size_t trimmed = length; // the last newline of a file may be missing
    while (trimmed > 0 && separator[trimmed - 1] == '\n') {
        trimmed--;
    }
    int ends = trimmed > 0 && file.size >= trimmed && memcmp(file.bytes + file.size - trimmed, separator, trimmed) == 0;
    file.size -= ends ? trimmed : 0;
    if (ends || file.size > 0) { documents[count++] = file; }
    return count;
}

static void text_run(const uint8_t* data, size_t size) {
    text_prepare();
    FuzzInput in = {data, size};
    int flags = fuzz_byte(&in);
    TokenizeOptions o;
    memset(&o, 0, sizeof(o));
    static const char* separators[4] = {TOKENIZE_SEPARATOR, "\n\n", "ab", NULL};
    char given[256] = {0};
    if ((flags & 3) == 3) {
        FuzzInput part = fuzz_part(&in);
        for (size_t i = 0; i < part.size && i < 255; i++) { // from a command line, which error lines may repeat
            given[i] = (char)(part.bytes[i] < 32 ? ' ' : part.bytes[i]);
        }
    }
    o.separator = tokenize_unescape("--document-separator", (flags & 3) == 3 ? given : separators[flags & 3]);
    o.separator_length = strlen(o.separator);
    fuzz.must_end = 1; // text is never refused

    char* inputs[4];
    o.inputs = inputs;
    size_t room = size + 8;
    FuzzInput* documents = (FuzzInput*)malloc_or_die(room * sizeof(FuzzInput));
    int num_documents = 0;
    static const char* names[4] = {"text_0", "text_1", "text_2", "text_3"};
    do {
        FuzzInput file = fuzz_part(&in);
        inputs[o.num_inputs] = (char*)(uintptr_t)fuzz_write(names[o.num_inputs], file.bytes, file.size);
        o.num_inputs++;
        num_documents +=
            text_expect(documents + num_documents, (int)room - num_documents, file, o.separator, o.separator_length);
    } while (o.num_inputs < 4 && in.size > 0);

    TokenizeReader reader;
    TokenizeBatch batch;
    memset(&batch, 0, sizeof(batch));
    tokenize_reader_init(&reader, &o);
    const char* document;
    size_t length;
    int count = 0;
    while (tokenize_next_document(&reader, &document, &length)) {
        fuzz_want(count < num_documents && length == documents[count].size &&
                      memcmp(document, documents[count].bytes, length) == 0,
                  "document %d of %d: another text than in the file", count, num_documents);
        tokenize_batch_add(&batch, document, length, SPLIT_TRAIN);
        count++;
    }
    fuzz_want(count == num_documents, "%d documents, want %d", count, num_documents);

    int is_bpe = (flags & 4) != 0;
    const Tokenizer* t = &text_vocabularies[is_bpe];
    memset(text_worker.cache, 0, BPE_CACHE_ENTRIES * sizeof(BpeCacheEntry)); // every run alike
    tokenize_batch_encode(&batch, t, is_bpe ? &text_worker : NULL);
    const TokenBuffer* tokens = &batch.tokens[SPLIT_TRAIN];
    int at = -1;
    size_t place = 0;
    for (size_t i = 0; i < tokens->count; i++) {
        if (tokens->ids[i] == t->end_of_text) {
            fuzz_want(at < 0 || place == documents[at].size, "document %d ends at byte %zu of %zu", at, place,
                      documents[at].size);
            at++;
            place = 0;
            continue;
        }
        size_t n;
        const char* bytes = tokenizer_decode(t, tokens->ids[i], &n);
        fuzz_want(at >= 0 && at < num_documents && n <= documents[at].size - place &&
                      memcmp(bytes, documents[at].bytes + place, n) == 0,
                  "token %zu is not the text of document %d at byte %zu", i, at, place);
        place += n;
    }
    fuzz_want(at == num_documents - 1 && (at < 0 || place == documents[at].size), "tokens of %d documents, want %d",
              at + 1, num_documents);
    tokenize_batch_free(&batch);
    free(reader.buffer);
    free(documents);
    free(o.separator);
}

static void text_seeds(void) {
    static const char* seeds[] = {
        "\0one document",
        "\0a\n<|endoftext|>\nb\n<|endoftext|>\n\x1e"
        "c\n<|endoftext|>",
        "\4the abcabc's  12 caf\xc3\xa9\xc3\xa9\n<|endoftext|>\n \xe4\xb8\xad\r\n\n\n aaaaa",
        "\5"
        "first\n\nsecond\xff\xfe\xc3\n\n\n\n\x1e\x1e  third\n\n",
        "\6"
        "ababcabaab aab",
        "\7\\n--\\t\x1e"
        "a\n--\tb\n--c\n-\n--\t",
        "\4<|endoftext|> <|endoftext|>\n<|endoftext|>\n\n<|endoftext|>",
        "\4\xf0\x9f\x98\x80\xef\xbf\xbf\xed\xa0\x80\xc2\xa0 \xe2\x80\x83x  \xe1\xa0\x8e",
    };
    for (size_t i = 0; i < sizeof(seeds) / sizeof(seeds[0]); i++) {
        fuzz_seed(FUZZ_TAKEN, seeds[i], 1, seeds[i] + 1, strlen(seeds[i] + 1));
    }
}

FUZZ_TARGET(text)
