/* inputs.h: an input, byte by byte or as text. Included after the program. */
#ifndef FUZZ_INPUTS_H
#define FUZZ_INPUTS_H
#include <ftw.h>

typedef struct {
    const uint8_t *at;
    size_t left;
} Bytes; // what is left of an input

static int next_byte(Bytes *b) {
    if (!b->left) return 0;
    b->left--;
    return *b->at++;
}

/* The bytes up to the first zero; what follows it is left. */
static Bytes up_to_zero(Bytes *b) {
    Bytes head = {b->at, strnlen((const char *)b->at, b->left)};
    size_t taken = head.left + (head.left < b->left);
    b->at += taken;
    b->left -= taken;
    return head;
}

static char *text_of(Bytes b) {
    char *text = (char *)checked_malloc(b.left + 1);
    if (b.left) memcpy(text, b.at, b.left);
    return text;
}

typedef struct {
    const char *name;
    void (*run)(Bytes in);
    size_t longest;           // of its inputs, bytes
    int as_text;              // how many of eight changes are those of a text
    int json;                 // where in an input JSON begins; -1: there is none
    const char *const *words; // what it understands, for the engine to put together; ends with NULL
} Target;

#endif
