/* pack.h: writes conversations to a token file in windows of a fixed number of tokens, without cutting any that fits.
 *
 * Best fit decreasing (Johnson et al. 1974; for training, Ding et al. 2024, "Fewer Truncations Improve Language
 * Modeling"): the longest conversation comes first, and each goes to the window with the least room for it. A
 * conversation longer than a window begins one and continues in the next ones. The room that is left is filled with
 * end-of-text tokens, which are no targets; --doc-mask makes each a document of its own. About a million tokens are in
 * memory and placed at a time. The file depends on the conversations and their order alone. */
#ifndef PACK_H
#define PACK_H
#include "corpus.h"               // defines: TokenWriter
#include "../shared/text_input.h" // defines: with_room_for_one

enum { PACK_TOKENS = 1 << 20, PACK_WINDOWS = 64 }; // a batch has so many tokens, or windows if those are more
enum { NO_INDEX = -1 };

typedef struct {
    size_t first, count; // its tokens in Packer.ids
    int64_t next;        // index of the next conversation in the same window, or NO_INDEX
} PackedConversation;

/* A window, or the consecutive windows of a conversation that is longer. */
typedef struct {
    int64_t first, last; // indices of its conversations
    int64_t room;        // free tokens at its end
    int64_t next;        // index of another window with the same room, or NO_INDEX
} PackedWindow;

typedef struct {
    TokenWriter *w;
    int64_t T; // tokens of a window
    size_t count, ids_room;
    int32_t *ids;  // (count) tokens of the conversations that are not yet written
    uint8_t *mask; // (count) 1: a target
    size_t num_waiting, waiting_room;
    PackedConversation *waiting; // (num_waiting) these conversations
    size_t num_windows, windows_room;
    PackedWindow *windows;      // (num_windows) the windows that they are placed in
    int64_t *with_room;         // (T) the first window with so many free tokens, or NO_INDEX
    uint64_t *has_room;         // (T bits) which of these lists are not empty
    int64_t conversations, cut; // so far: conversations; those of more than T tokens
    int64_t padding;            // so far: tokens that belong to no conversation
} Packer;

static inline void packer_open(Packer *p, TokenWriter *w, int64_t T) {
    memset(p, 0, sizeof *p);
    p->w = w;
    p->T = T;
    p->with_room = new_array(int64_t, T);
    p->has_room = new_array(uint64_t, T / 64 + 1);
    for (int64_t room = 0; room < T; room++) p->with_room[room] = NO_INDEX;
}

// ---------------------------------------------------------------------------
// windows by their room

static inline void list_window(Packer *p, int64_t window) {
    int64_t room = p->windows[window].room;
    p->windows[window].next = p->with_room[room];
    p->with_room[room] = window;
    p->has_room[room / 64] |= UINT64_C(1) << room % 64;
}

/* Takes the window with the least room for n tokens off its list. NO_INDEX: there is none. */
static inline int64_t take_window(Packer *p, int64_t n) {
    int64_t word = n / 64;
    uint64_t fits = p->has_room[word] & (~UINT64_C(0) << n % 64);
    while (!fits && word < p->T / 64) {
        word++;
        fits = p->has_room[word];
    }
    if (!fits) return NO_INDEX;
    int64_t room = 64 * word + __builtin_ctzll(fits), window = p->with_room[room];
    p->with_room[room] = p->windows[window].next;
    if (p->with_room[room] == NO_INDEX) p->has_room[word] &= ~(UINT64_C(1) << room % 64);
    return window;
}

// ---------------------------------------------------------------------------
// placing and writing

static inline int longer_first(const void *a, const void *b) {
    const PackedConversation *x = (const PackedConversation *)a, *y = (const PackedConversation *)b;
    if (x->count != y->count) return x->count > y->count ? -1 : 1;
    return x->first < y->first ? -1 : 1;
}

/* Adds a conversation to the window with the least room for it, or to a new one. */
static inline void place_conversation(Packer *p, int64_t index) {
    int64_t n = (int64_t)p->waiting[index].count;
    int64_t window = NO_INDEX;
    if (n < p->T) window = take_window(p, n);
    if (window == NO_INDEX) {
        PackedWindow fresh = {index, index, round_up(n, p->T), NO_INDEX};
        p->windows = (PackedWindow *)with_room_for_one(p->windows, p->num_windows, &p->windows_room, sizeof fresh);
        window = (int64_t)p->num_windows++;
        p->windows[window] = fresh;
    } else {
        p->waiting[p->windows[window].last].next = index;
        p->windows[window].last = index;
    }
    p->windows[window].room -= n;
    list_window(p, window);
}

static inline void write_padding(Packer *p, int64_t count) {
    const uint8_t byte = TOKEN_ENDS_DOCUMENT; // and no target
    int32_t id = p->w->t->eos;
    writer_narrow(p->w, &id, 1);
    for (int64_t i = 0; i < count; i++) writer_write(p->w, &id, &byte, 1);
    p->padding += count;
}

/* Places the conversations that wait, and writes their windows. */
static inline void packer_flush(Packer *p) {
    if (!p->num_waiting) return;
    qsort(p->waiting, p->num_waiting, sizeof *p->waiting, longer_first);
    for (size_t i = 0; i < p->num_waiting; i++) place_conversation(p, (int64_t)i);
    for (size_t i = 0; i < p->num_windows; i++) {
        const PackedWindow *window = &p->windows[i];
        for (int64_t c = window->first; c != NO_INDEX; c = p->waiting[c].next) {
            const PackedConversation *x = &p->waiting[c];
            writer_narrow(p->w, p->ids + x->first, x->count);
            writer_write(p->w, p->ids + x->first, p->mask + x->first, x->count);
        }
        write_padding(p, window->room);
        p->with_room[window->room] = NO_INDEX;
        p->has_room[window->room / 64] = 0;
    }
    p->count = p->num_waiting = p->num_windows = 0;
}

/* Adds a conversation of n tokens, the last of which is its end-of-text token. */
static inline void packer_add(Packer *p, const int32_t *ids, const uint8_t *mask, size_t n) {
    if (p->count + n > (size_t)max_i64(PACK_TOKENS, PACK_WINDOWS * p->T)) packer_flush(p);
    PackedConversation x = {p->count, n, NO_INDEX};
    p->waiting = (PackedConversation *)with_room_for_one(p->waiting, p->num_waiting, &p->waiting_room, sizeof x);
    p->waiting[p->num_waiting++] = x;
    if (p->count + n > p->ids_room) {
        p->ids_room = p->count + n + (p->count + n) / 2;
        p->ids = (int32_t *)checked_realloc(p->ids, p->ids_room * sizeof *p->ids);
        p->mask = (uint8_t *)checked_realloc(p->mask, p->ids_room);
    }
    memcpy(p->ids + p->count, ids, n * sizeof *ids);
    memcpy(p->mask + p->count, mask, n);
    p->count += n;
    p->conversations++;
    p->cut += (int64_t)n > p->T;
}

/* Writes what waits, and one more token, which is the last target of the last window. */
static inline void packer_finish(Packer *p) {
    packer_flush(p);
    write_padding(p, 1);
}

static inline void packer_close(Packer *p) {
    free(p->ids);
    free(p->mask);
    free(p->waiting);
    free(p->windows);
    free(p->with_room);
    free(p->has_room);
}
#endif
