/* json_lines.h: the documents of a file of JSON lines: a text in one field of the object on each line.
 *
 * A caller may rely on this: a document is valid UTF-8 without zero bytes. A line that has no such text ends the
 * program with an error that names the file and the line. Empty lines are skipped. */
#ifndef JSON_LINES_H
#define JSON_LINES_H
#include "../../lib/io/json.h"    // defines: cJSON_ParseWithOpts
#include "stream.h"               // defines: InputStream, stream_open, stream_read
#include "../shared/text_input.h" // defines: utf8_valid_length, json_has_zero_byte

typedef struct {
    InputStream stream;
    const char *field; // that holds the text
    uint64_t line;     // number of the last line, from 1
    uint64_t offset;   // bytes of the stream up to the end of that line
    uint32_t sum;      // CRC-32 of these bytes
    char *buffer;      // (room) bytes read and not yet handed out begin at `at` and end at `end`
    size_t at, end, room;
} JsonLines;

static inline void lines_open(JsonLines *l, const char *path, const char *field) {
    memset(l, 0, sizeof *l);
    l->field = field;
    stream_open(&l->stream, path);
}

static inline void lines_close(JsonLines *l) {
    stream_close(&l->stream);
    free(l->buffer);
    l->buffer = NULL;
}

/* Continues after line number `line`, which ends at byte `offset` of the stream. The bytes up to there must have the
 * checksum `sum`: standard input may differ from that of the interrupted run. */
static inline void lines_skip(JsonLines *l, uint64_t line, uint64_t offset, uint32_t sum) {
    char *buffer = (char *)checked_malloc(STREAM_BLOCK);
    size_t got = 1;
    l->line = line;
    for (; got && l->offset < offset; l->offset += got) {
        got = stream_read(&l->stream, buffer, (size_t)min_i64((int64_t)(offset - l->offset), STREAM_BLOCK));
        l->sum = (uint32_t)crc32(l->sum, (const Bytef *)buffer, (uInt)got);
    }
    if (l->offset < offset || l->sum != sum)
        user_error("the first %" PRIu64 " bytes of %s are not those that the interrupted run has read: give the same "
                   "input again, or remove the .state file next to the output to start over",
                   offset, input_name(&l->stream));
    free(buffer);
}

/* Returns the next line (*length bytes, then a zero byte), valid until the next call; NULL after the last line. */
static inline char *lines_next(JsonLines *l, size_t *length) {
    size_t searched = 0;
    for (;;) {
        char *start = l->buffer + l->at;
        size_t have = l->end - l->at;
        char *newline = have > searched ? (char *)memchr(start + searched, '\n', have - searched) : NULL;
        searched = have;
        if (newline) {
            *length = (size_t)(newline - start);
            break;
        }
        if (have) memmove(l->buffer, start, have);
        l->at = 0;
        l->end = have;
        if (l->room - have < STREAM_BLOCK + 1) {
            l->room = 2 * l->room + 2 * STREAM_BLOCK;
            l->buffer = (char *)checked_realloc(l->buffer, l->room);
        }
        size_t got = stream_read(&l->stream, l->buffer + have, l->room - have - 1);
        l->end += got;
        if (got) continue;
        if (!have) return NULL;
        *length = have; // the last line has no end
        break;
    }
    char *text = l->buffer + l->at;
    int has_end = l->at + *length < l->end;
    size_t whole = *length + (size_t)has_end;
    for (size_t done = 0; done < whole; done += STREAM_BLOCK) // zlib counts in 32 bits
        l->sum =
            (uint32_t)crc32(l->sum, (const Bytef *)text + done, (uInt)min_i64((int64_t)(whole - done), STREAM_BLOCK));
    text[*length] = 0;
    l->at += whole;
    l->offset += whole;
    l->line++;
    return text;
}

/* Refuses the current line; `found` says what is wrong with it. */
__attribute__((noreturn, format(printf, 2, 3))) static inline void line_refuse(const JsonLines *l, const char *found,
                                                                               ...) {
    char text[300];
    va_list args;
    va_start(args, found);
    vsnprintf(text, sizeof text, found, args);
    va_end(args);
    user_error("%s, line %" PRIu64 ": found %s, expected a JSON object with its text in \"%s\" (--field NAME names "
               "another field): correct or remove the line",
               input_name(&l->stream), l->line, text, l->field);
}

/* The text of the current line as a cJSON string. */
static inline const char *line_text(const JsonLines *l, const cJSON *json) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, l->field);
    char where[4200];
    if (!cJSON_IsObject(json)) line_refuse(l, "JSON that is not an object");
    snprintf(where, sizeof where, "%s, line %" PRIu64, input_name(&l->stream), l->line);
    json_refuse_duplicates(json, where);
    if (!item) line_refuse(l, "no field \"%s\"", l->field);
    if (!cJSON_IsString(item)) line_refuse(l, "a field \"%s\" that is not a string", l->field);
    return item->valuestring;
}

/* Stores the next document in *text, which has *room bytes and grows. Returns 0 when there is none. `*length` may be 0.
 */
static inline int lines_next_document(JsonLines *l, char **text, size_t *room, size_t *length) {
    size_t bytes = 0, blanks;
    char *line;
    do {
        line = lines_next(l, &bytes);
        if (!line) return 0;
        blanks = strspn(line, " \t\r");
    } while (blanks == bytes);
    size_t valid = utf8_valid_length(line, bytes);
    if (valid < bytes) line_refuse(l, "invalid UTF-8 at byte %zu of the line", valid);
    if (memchr(line, 0, bytes)) line_refuse(l, "a zero byte in the line");
    if (json_has_zero_byte(line)) line_refuse(l, "\\u0000 in a string, which is not text");
    const char *end = NULL;
    cJSON *json = cJSON_ParseWithOpts(line, &end, 1); // 1: nothing may follow on the line
    if (!json) line_refuse(l, "invalid JSON at byte %zu of the line", end ? (size_t)(end - line) : 0);
    const char *value = line_text(l, json);
    *length = strlen(value);
    if (*length > *room) {
        *room = *length + *length / 2;
        *text = (char *)checked_realloc(*text, *room);
    }
    memcpy(*text, value, *length);
    cJSON_Delete(json);
    return 1;
}

#endif
