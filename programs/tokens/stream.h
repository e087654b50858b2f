/* stream.h: the bytes of a file or of standard input, decompressed if the file's name ends with .gz or .zst.
 *
 * A caller may rely on this: concatenated gzip members and zstd frames are read one after the other, and a file that is
 * truncated or damaged ends the program with an error that names it. */
#ifndef STREAM_H
#define STREAM_H
#include "../../lib/io/input.h" // defines: input_open
#include <zlib.h>
#ifdef HAVE_ZSTD
#include <zstd.h>
#endif

enum { STREAM_BLOCK = 1 << 17 }; // compressed bytes that are read at a time

typedef enum { STREAM_PLAIN, STREAM_GZIP, STREAM_ZSTD } StreamFormat;
static const char *const stream_ends[] = {"", ".gz", ".zst"};

typedef struct {
    const char *path; // "-": standard input
    FILE *file;       // NULL: the stream is closed
    StreamFormat format;
    uint64_t at;       // bytes handed out so far
    uint64_t consumed; // bytes read from the file so far
    char *block;       // (STREAM_BLOCK) compressed bytes
    size_t block_at, block_end;
    int inside; // a gzip member or a zstd frame has begun and not ended
    z_stream gzip;
#ifdef HAVE_ZSTD
    ZSTD_DStream *zstd;
#endif
} InputStream;

/* In any case: A.JSONL and A.jsonl are of one kind. */
static inline int ends_with(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcasecmp(s + n - m, end);
}

/* Refuses compressed files of other kinds, which are no text. */
static inline void refuse_other_compression(const char *path) {
    static const char *const tools[][2] = {{".bz2", "bzip2"}, {".xz", "xz"}, {".gzip", "gzip"}, {".zip", "unzip"}};
    for (int i = 0; i < 4; i++)
        if (ends_with(path, tools[i][0]))
            user_error(
                "%s: the tools read text and JSON lines, and both from .gz and .zst: decompress it with %s first, "
                "or rename it if it is something else",
                path, tools[i][1]);
}

static inline StreamFormat stream_format(const char *path) {
    if (ends_with(path, stream_ends[STREAM_GZIP])) return STREAM_GZIP;
    return ends_with(path, stream_ends[STREAM_ZSTD]) ? STREAM_ZSTD : STREAM_PLAIN;
}

/* Whether the file's name, without .gz or .zst, ends with `end`. */
static inline int named_with(const char *path, const char *end) {
    char whole[16];
    snprintf(whole, sizeof whole, "%s%s", end, stream_ends[stream_format(path)]);
    return ends_with(path, whole);
}

/* The stream's name in messages. */
static inline const char *input_name(const InputStream *s) { return strcmp(s->path, "-") ? s->path : "standard input"; }

static inline void stream_open(InputStream *s, const char *path) {
    memset(s, 0, sizeof *s);
    s->path = path;
    s->format = stream_format(path);
    s->file = strcmp(path, "-") ? input_open(path, "a text file") : stdin;
    if (!s->file) user_error("%s cannot be opened: %s; expected a readable text file", path, strerror(errno));
    if (s->format == STREAM_PLAIN) return;
    s->block = (char *)checked_malloc(STREAM_BLOCK);
    if (s->format == STREAM_GZIP && inflateInit2(&s->gzip, 15 + 16) != Z_OK) // 16: a gzip header, no other
        run_failure("out of memory: %s cannot be decompressed", path);
#ifdef HAVE_ZSTD
    if (s->format == STREAM_ZSTD) s->zstd = ZSTD_createDStream();
    if (s->format == STREAM_ZSTD && !s->zstd) run_failure("out of memory: %s cannot be decompressed", path);
#else
    if (s->format == STREAM_ZSTD)
        user_error("%s cannot be read: these tools were built without zstd; install libzstd-dev and run make -C "
                   "dev/data again, or decompress the file first (zstd -d)",
                   path);
#endif
}

static inline void stream_close(InputStream *s) {
    if (!s->file) return;
    if (s->file != stdin) fclose(s->file);
    if (s->format == STREAM_GZIP) inflateEnd(&s->gzip);
#ifdef HAVE_ZSTD
    ZSTD_freeDStream(s->zstd);
#endif
    free(s->block);
    memset(s, 0, sizeof *s);
}

__attribute__((noreturn)) static inline void stream_damaged(const InputStream *s, const char *reason) {
    user_error("%s is damaged after %" PRIu64 " decompressed bytes: %s; expected a whole file that %s compressed: copy "
               "it again",
               s->path, s->at, reason, s->format == STREAM_GZIP ? "gzip" : "zstd");
}

/* Decompresses from the block to `to`, which has room for n bytes. Returns how many bytes it wrote. */
static inline size_t stream_inflate(InputStream *s, char *to, size_t n) {
    s->gzip.next_in = (Bytef *)s->block + s->block_at;
    s->gzip.avail_in = (uInt)(s->block_end - s->block_at);
    s->gzip.next_out = (Bytef *)to;
    s->gzip.avail_out = (uInt)min_i64((int64_t)n, STREAM_BLOCK);
    size_t room = s->gzip.avail_out;
    int code = inflate(&s->gzip, Z_NO_FLUSH);
    if (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR) // Z_BUF_ERROR: there was nothing to do
        stream_damaged(s, s->gzip.msg ? s->gzip.msg : "it is not gzip");
    size_t made = room - s->gzip.avail_out, used = s->block_end - s->block_at - s->gzip.avail_in;
    if (made || used) s->inside = code != Z_STREAM_END;
    s->block_at += used;
    if (code == Z_STREAM_END) inflateReset(&s->gzip);
    return made;
}

static inline size_t stream_unzstd(InputStream *s, char *to, size_t n) {
#ifdef HAVE_ZSTD
    ZSTD_inBuffer in = {s->block, s->block_end, s->block_at};
    ZSTD_outBuffer out = {to, n, 0};
    size_t code = ZSTD_decompressStream(s->zstd, &out, &in);
    if (ZSTD_isError(code)) stream_damaged(s, ZSTD_getErrorName(code));
    if (out.pos || in.pos > s->block_at) s->inside = code != 0;
    s->block_at = in.pos;
    return out.pos;
#else
    (void)to;
    (void)n;
    run_failure("%s was opened without zstd", s->path); // stream_open refuses it
#endif
}

/* Reads more compressed bytes. Returns 0 at the end of the file. */
static inline int stream_refill(InputStream *s) {
    s->block_at = 0;
    s->block_end = fread(s->block, 1, STREAM_BLOCK, s->file);
    s->consumed += s->block_end;
    return s->block_end > 0;
}

static inline size_t stream_decompress(InputStream *s, char *to, size_t n) {
    size_t got = 0;
    while (got < n) {
        size_t before = s->block_at;
        size_t made =
            s->format == STREAM_GZIP ? stream_inflate(s, to + got, n - got) : stream_unzstd(s, to + got, n - got);
        got += made;
        s->at += made;
        int has_stalled = !made && s->block_at == before;
        if (has_stalled && s->block_at < s->block_end) stream_damaged(s, "it makes no progress");
        if (has_stalled && !stream_refill(s)) break;
    }
    if (got < n && (s->inside || !s->consumed) && !ferror(s->file)) stream_damaged(s, "the file ends too early");
    return got;
}

/* Reads up to n bytes; fewer only at the end. */
static inline size_t stream_read(InputStream *s, char *to, size_t n) {
    size_t got = 0;
    if (s->format != STREAM_PLAIN) got = stream_decompress(s, to, n);
    else {
        got = fread(to, 1, n, s->file);
        s->at += got;
        s->consumed += got;
    }
    if (got < n && ferror(s->file))
        user_error("%s cannot be read: %s; expected a readable text file", s->path, strerror(errno));
    return got;
}

#endif
