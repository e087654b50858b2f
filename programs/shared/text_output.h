/* text_output.h: prints the text of tokens as they come.
 *
 * A token may end within a character. A caller may rely on: only whole UTF-8 characters are written, each as soon as it
 * is complete, and invalid bytes as soon as they are known to be invalid. In a terminal, control characters of
 * the text have no effect: U+241B stands for an escape, U+FFFD for other bytes that are no text. A file receives the
 * bytes unchanged. */
#ifndef TEXT_OUTPUT_H
#define TEXT_OUTPUT_H
#include "../../tokenizer.h" // defines: Tokenizer, tokenizer_decode; includes base.h: utf8_character_length

typedef struct {
    FILE *file;
    int only_valid;  // bytes that are no character become U+FFFD
    int no_controls; // and control characters become visible ones
    char pending[4]; // (count) the beginning of a character
    int count;
} TextOutput;

/* Output of results: to a terminal, or to a file or a program. */
static TextOutput text_output_open(void) {
    int is_terminal = isatty(STDOUT_FILENO);
    TextOutput out = {stdout, is_terminal, is_terminal, {0}, 0};
    return out;
}

/* Can these bytes (count >= 2) be the beginning of a character, or a whole one? */
static int utf8_may_continue(const char *bytes, int count) {
    uint8_t filled[4] = {0x80, 0x80, 0x80, 0x80}; // the bytes that are still to come may have this value
    memcpy(filled, bytes, (size_t)count);
    return utf8_character_length(filled, sizeof filled) >= (size_t)count;
}

/* Writes one character, or a single byte that is none. */
static void text_output_character(const TextOutput *out, const char *bytes, int count, int is_valid) {
    uint8_t first = (uint8_t)bytes[0];
    int is_line_or_tab = first == '\n' || first == '\t';
    if (out->only_valid && !is_valid) fputs("\xEF\xBF\xBD", out->file);
    else if (!out->no_controls || is_line_or_tab) fwrite(bytes, 1, (size_t)count, out->file);
    else if (first < 0x20) fprintf(out->file, "\xE2\x90%c", 0x80 + first); // U+2400 + first: its control picture
    else if (first == 0x7F) fputs("\xE2\x90\xA1", out->file);
    else if (first == 0xC2 && (uint8_t)bytes[1] < 0xA0) fputs("\xEF\xBF\xBD", out->file); // the controls of ISO 6429
    else fwrite(bytes, 1, (size_t)count, out->file);
}

/* Writes the character in `pending` if it is complete, or its one byte if that begins none. */
static void text_output_complete(TextOutput *out) {
    uint8_t lead = (uint8_t)out->pending[0];
    int is_valid = utf8_character_length((const uint8_t *)out->pending, (size_t)out->count) > 0;
    if (lead >= 0xC2 && lead < 0xF5 && !is_valid) return; // the rest of the character may come
    text_output_character(out, out->pending, out->count, is_valid);
    out->count = 0;
}

/* Writes pending bytes as invalid ones: the rest of their character will not come. */
static void text_output_end(TextOutput *out) {
    for (int i = 0; i < out->count; i++) text_output_character(out, &out->pending[i], 1, 0);
    out->count = 0;
}

static void text_output_bytes(TextOutput *out, const char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        out->pending[out->count] = bytes[i];
        if (out->count && !utf8_may_continue(out->pending, out->count + 1)) {
            text_output_end(out);
            out->pending[0] = bytes[i];
        }
        out->count++;
        text_output_complete(out);
    }
}

static void text_output_token(TextOutput *out, const Tokenizer *t, int32_t id) {
    const char *bytes;
    size_t count = tokenizer_decode(t, id, &bytes);
    text_output_bytes(out, bytes, count);
}

#endif
