/* text_output.h: prints the text of tokens as they come.
 *
 * A token may end within a character. A caller may rely on: only whole UTF-8 characters are written, each as soon as it
 * is complete, and invalid bytes as soon as they are known to be invalid. In a terminal, control characters of
 * the text have no effect: U+241B stands for an escape, U+FFFD for other bytes that are no text. A file receives the
 * bytes unchanged.
 */
#ifndef TEXT_OUTPUT_H
#define TEXT_OUTPUT_H
#include "../../tokenizer.h" // defines: Tokenizer, tokenizer_decode

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

/* The bytes of the character that begins with `lead`; 0 if none does. */
static int utf8_length(uint8_t lead) {
    if (lead < 0x80) return 1;
    if (lead < 0xC2) return 0; // a later byte of a character, or an overlong form
    if (lead < 0xE0) return 2;
    if (lead < 0xF0) return 3;
    return lead < 0xF5 ? 4 : 0;
}

/* Can these bytes (count >= 1) be the beginning of a character, or a whole one? */
static int utf8_may_continue(const char *bytes, int count) {
    uint8_t lead = (uint8_t)bytes[0], second = count > 1 ? (uint8_t)bytes[1] : 0;
    if (count > utf8_length(lead)) return 0;
    for (int i = 1; i < count; i++)
        if (((uint8_t)bytes[i] & 0xC0) != 0x80) return 0;
    if (count == 1) return 1;
    int is_overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
    int is_surrogate = lead == 0xED && second >= 0xA0, is_beyond = lead == 0xF4 && second >= 0x90; // of U+10FFFF
    return !is_overlong && !is_surrogate && !is_beyond;
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
    int length = utf8_length((uint8_t)out->pending[0]);
    if (out->count < length) return;
    text_output_character(out, out->pending, out->count, length > 0);
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
