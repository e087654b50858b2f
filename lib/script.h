/* script.h: what a rank asks of others, in its order.
 *
 * Owns: a rank's script: its exchanges, each with a line where it starts and one where the rank waits for it. A dry run
 * writes one for every rank of a plan, which replay.h plays against each other; a run writes the same, line by line,
 * where it is told to. Included by comm.h, which writes the lines.
 */
#ifndef SCRIPT_H
#define SCRIPT_H

typedef struct {    // texts, each once
    char **text;    // (count, room for size / 2)
    uint64_t *hash; // (count, room for size / 2)
    int32_t *place; // (size) which text + 1, by its hash; 0: none
    int count, size;
} Names;

typedef struct {         // an exchange starts, or this rank waits for one
    double computed;     // seconds of arithmetic before it, by a dry run's clock
    int64_t count;       // elements of a member's part
    int32_t what, phase; // names: of what is exchanged; of what the rank is at
    int32_t peer;        // of a message: the member at the other end
    uint8_t waits, slot; // an exchange has a slot from its start until it is waited for
    uint8_t collective, axis, dtype;
} ScriptLine;

typedef struct {
    ScriptLine *lines; // (count, room)
    int64_t count, room;
    Names *names;
    uint64_t taken;                    // slots
    double computed, rest;             // seconds of arithmetic up to the last line; and behind it
    const char *phase_name, *phase_of; // what `phase` is the name of
    int32_t phase;
} Script;

static int32_t name_number(Names *n, const char *text) {
    uint64_t h = hash_bytes(HASH_START, text, strlen(text));
    if (n->count * 2 >= n->size) { // half full: twice the places
        n->size = n->size ? 2 * n->size : 256;
        n->text = (char **)realloc(n->text, sizeof(char *) * (size_t)n->size / 2);
        n->hash = (uint64_t *)realloc(n->hash, sizeof(uint64_t) * (size_t)n->size / 2);
        free(n->place);
        n->place = (int32_t *)checked_malloc(sizeof(int32_t) * (size_t)n->size);
        if (!n->text || !n->hash) run_failure("out of memory");
        for (int i = 0; i < n->count; i++) {
            int at = (int)(n->hash[i] % (uint64_t)n->size);
            while (n->place[at]) at = (at + 1) % n->size;
            n->place[at] = i + 1;
        }
    }
    int at = (int)(h % (uint64_t)n->size);
    for (; n->place[at]; at = (at + 1) % n->size)
        if (n->hash[n->place[at] - 1] == h && !strcmp(n->text[n->place[at] - 1], text)) return n->place[at] - 1;
    n->text[n->count] = strdup(text), n->hash[n->count] = h;
    n->place[at] = ++n->count;
    return n->count - 1;
}

static void names_close(Names *n) {
    for (int i = 0; i < n->count; i++) free(n->text[i]);
    free(n->text), free(n->hash), free(n->place);
    memset(n, 0, sizeof *n);
}

/* Begins anew, with the room that it has. */
static void script_begin(Script *s, Names *names) {
    s->count = 0, s->taken = 0, s->computed = 0;
    s->names = names;
    s->phase_name = s->phase_of = NULL, s->phase = -1;
}

static void script_add(Script *s, const ScriptLine *line) {
    if (s->count == s->room) {
        s->room = s->room ? 2 * s->room : 1024;
        s->lines = (ScriptLine *)realloc(s->lines, sizeof *line * (size_t)s->room);
        if (!s->lines) run_failure("out of memory");
    }
    s->lines[s->count++] = *line;
}

#endif
