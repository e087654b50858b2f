/* encode.h: --encode FILE prints the token ids of a text, one per line; --decode FILE prints the text of such ids. */
#ifndef ENCODE_H
#define ENCODE_H
#include "../../lib/io/input.h"       // defines: refuse_endless
#include "../../lib/io/output.h"      // defines: check_results
#include "../shared/tokenizer_json.h" // defines: tokenizer_open, tokenizer_encode, print_token

/* Prints the text of ids written as decimal numbers. All ids are checked before the first is printed. */
static void decode_ids(const Tokenizer *t, const char *path, const char *text, size_t length) {
    static const char separators[] = " \t\r\n";
    for (int print = 0; print < 2; print++) {
        const char *at = text + strspn(text, separators);
        while (at < text + length) {
            char *end;
            long id = strtol(at, &end, 10);
            if (end == at || !strchr(separators, *end))
                user_error("%s: found '%.*s', expected token ids, one per line", path,
                           (int)min_i64(20, (int64_t)strcspn(at, separators)), at);
            if (id < 0 || id >= t->vocab_size)
                user_error("%s: id %ld is outside the tokenizer's 0 to %d", path, id, t->vocab_size - 1);
            if (print) print_token(t, (int32_t)id, stdout);
            check_results();
            at = end + strspn(end, separators);
        }
    }
}

/* Prints the ids of the text in `encode` or, if it is NULL, the text of the ids in `decode`. `file`: the tokenizer. */
static void encode_or_decode(const char *file, const char *encode, const char *decode) {
    const char *path = encode ? encode : decode;
    Tokenizer *t = tokenizer_open(file);
    size_t length, capacity = 0;
    int32_t *ids = NULL;
    struct stat info;
    if (!stat(path, &info)) refuse_endless(path, &info, encode ? "a file of text" : "a file of token ids");
    char *text = read_file(path, &length);
    if (!text) user_error("cannot read %s: %s", path, strerror(errno));
    size_t count = encode ? tokenizer_encode(t, text, length, &ids, &capacity, 0) : 0;
    for (size_t i = 0; i < count; i++) {
        printf("%d\n", ids[i]);
        check_results();
    }
    if (decode) decode_ids(t, path, text, length);
    free(ids);
    free(text);
    tokenizer_close(t);
}

#endif
