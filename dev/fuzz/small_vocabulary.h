// A vocabulary of 256 bytes, end-of-text and 19 merges, as the three kinds of file that lib/tokenizer.h reads.
#ifndef SMALL_VOCABULARY_H
#define SMALL_VOCABULARY_H

#include "fuzz.h"

#include "tokenizer.h"

enum { SMALL_MERGES = 19, SMALL_FILE_BYTES = 8192 };

static const char* const small_merges[SMALL_MERGES][2] = {
    {"a", "b"},   {"ab", "c"},          {" ", "a"},     {"\xc3", "\xa9"}, {"\xc3\xa9", "\xc3\xa9"},
    {" ", " "},   {"\n", "\n"},         {"a", "a"},     {"aa", "aa"},     {"t", "h"},
    {"th", "e"},  {" ", "the"},         {"'", "s"},     {"1", "2"},       {"\xe4", "\xb8"},
    {"\r", "\n"}, {"\xe4\xb8", "\xad"}, {"abc", "abc"}, {"b", "c"},
};

// Append bytes in the printable alphabet of GPT-2's files; `json`: some of them escaped.
static inline size_t small_print(char* out, const char* bytes, size_t size, int json) {
    size_t n = 0;
    for (size_t i = 0; i < size; i++) {
        int code = 33;
        while (tokenizer_byte_of_code_point((uint32_t)code) != (uint8_t)bytes[i]) {
            code++;
        }
        if (json && (code == '"' || code == '\\' || code == '/')) { out[n++] = '\\'; }
        if (json && code % 7 == 3 && code < 128) { // any character may be written like this
            n += (size_t)sprintf(out + n, "\\u%04x", code);
            continue;
        }
        if (code < 128) {
            out[n++] = (char)code;
        } else {
            out[n++] = (char)(0xc0 | code >> 6);
            out[n++] = (char)(0x80 | (code & 0x3f));
        }
    }
    return n;
}

// encoder.json: byte b has id 255 - b, end-of-text 256, merge k makes 257 + k. Returns its size, at most
// SMALL_FILE_BYTES.
static inline size_t small_encoder_json(char* out) {
    size_t n = 0;
    out[n++] = '{';
    for (int id = 0; id < 257 + SMALL_MERGES; id++) {
        char token[64];
        size_t length = 1;
        token[0] = (char)(255 - id);
        if (id == 256) {
            length = strlen(strcpy(token, TOKENIZER_END_OF_TEXT));
        } else if (id > 256) {
            length =
                (size_t)snprintf(token, sizeof(token), "%s%s", small_merges[id - 257][0], small_merges[id - 257][1]);
        }
        out[n++] = '"';
        n += small_print(out + n, token, length, 1);
        n += (size_t)sprintf(out + n, "\":%d%s", id, id == 256 + SMALL_MERGES ? "}\n" : id % 8 == 0 ? ",\n" : ", ");
    }
    return n;
}

// vocab.bpe
static inline size_t small_vocab_bpe(char* out) {
    size_t n = (size_t)sprintf(out, "#version: 0.2\n");
    for (int m = 0; m < SMALL_MERGES; m++) {
        n += small_print(out + n, small_merges[m][0], strlen(small_merges[m][0]), 0);
        out[n++] = ' ';
        n += small_print(out + n, small_merges[m][1], strlen(small_merges[m][1]), 0);
        out[n++] = '\n';
    }
    return n;
}

// Lines of a tiktoken file: those of the single bytes (merges 0), or those of the merges.
static inline size_t small_tiktoken(char* out, int merges) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t n = 0;
    for (int i = 0; i < (merges ? SMALL_MERGES : 256); i++) {
        uint8_t token[64] = {(uint8_t)i};
        size_t length = 1;
        if (merges) {
            length = (size_t)snprintf((char*)token, sizeof(token), "%s%s", small_merges[i][0], small_merges[i][1]);
        }
        for (size_t at = 0; at < length; at += 3) {
            size_t left = length - at;
            uint32_t bits = (uint32_t)token[at] << 16 | (left > 1 ? (uint32_t)token[at + 1] << 8 : 0) |
                            (left > 2 ? (uint32_t)token[at + 2] : 0);
            out[n++] = digits[bits >> 18];
            out[n++] = digits[bits >> 12 & 63];
            out[n++] = left > 1 ? digits[bits >> 6 & 63] : '=';
            out[n++] = left > 2 ? digits[bits & 63] : '=';
        }
        n += (size_t)sprintf(out + n, " %d\n", i + (merges ? 256 : 0));
    }
    return n;
}

#endif
