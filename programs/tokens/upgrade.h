/* upgrade.h: brings token files of version 1 to version 2.
 *
 * Version 2 also says which token ends documents, which one begins them, and how many bytes of text the targets have.
 * A caller may rely on: tokens, targets and the first 64 bytes of the header but for the version stay, so that runs on
 * the file go on; the file is replaced by a rename when all of the new one is on disk. */
#ifndef UPGRADE_H
#define UPGRADE_H
#include "../shared/chat_template.h" // defines: ChatTemplate, chat_template_beside, chat_template_of_jinja
#include "corpus.h"                  // defines: TokenFileHeader, TokenWriter, output_open, tokenizer_files_write
#include "tokens_options.h"          // defines: TokensOptions

/* Opens the file, whatever its window and vocabulary. */
static TokenFile upgrade_open(const char *path) {
    TokenFileHeader h = ZERO;
    struct stat info;
    int fd = open_regular_file(path, &info), window = 1;
    if (fd >= 0) {
        if (read_bytes_at(fd, &h, TOKEN_FILE_FIRST_BYTES, 0) == TOKEN_FILE_FIRST_BYTES)
            window = (int)(h.flags >> TOKEN_FILE_WINDOW_SHIFT);
        close(fd);
    }
    return token_file_open(path, window, INT32_MAX);
}

/* Refuses a tokenizer that the file was not made with. */
static void upgrade_check_tokenizer(const TokenFile *f, const Tokenizer *t, const char *tokenizer) {
    uint8_t known[MOST_FINGERPRINTS][32];
    int count = tokenizer_fingerprints(t, known);
    if (!token_file_lacks_tokenizer(f) && !fingerprint_is_among(f->header.tokenizer, known, count))
        user_error("%s was tokenized with a different tokenizer than %s: give the right one with --tokenizer", f->path,
                   tokenizer);
}

/* Conversations that end with the token that also ends each message cannot be told apart. */
static void upgrade_check_ends(const TokenFile *f, const Tokenizer *t, const char *tokenizer) {
    char source[4096];
    if (!(f->header.flags & TOKEN_FILE_MASKED)) return;
    char *jinja = chat_template_beside(tokenizer, source, 1);
    const ChatTemplate *form = jinja ? chat_template_of_jinja(jinja) : chat_template_of_tokens(t);
    free(jinja);
    if (form && tokenizer_special(t, form->end) == t->eos)
        user_error("%s: in its tokenizer %s %s ends each message as well as the conversation, so that conversations "
                   "cannot be told apart: make the file again with tokens_llama3 --conversations",
                   f->path, tokenizer, form->end);
}

/* The header of the new file, but for the bytes of the targets' text. */
static TokenFileHeader upgrade_header(const TokenFile *f, const Tokenizer *t) {
    uint8_t known[MOST_FINGERPRINTS][32];
    char first[4] = {0};
    TokenFileHeader h = f->header;
    h.version = TOKEN_FILE_VERSION;
    h.document_end = t->eos;
    int has_first = h.count && read_bytes_at(f->fd, first, h.width, TOKEN_FILE_FIRST_BYTES) == (int64_t)h.width;
    h.front = has_first && (int32_t)token_at(first, 0, (int)h.width) == t->front ? t->front : NO_ID;
    int count = token_file_lacks_tokenizer(f) ? 0 : tokenizer_fingerprints(t, known);
    for (int i = 0; i < count; i++)
        if (memcmp(known[i], h.tokenizer, 32) && h.num_fingerprints < HEADER_FINGERPRINTS)
            memcpy(h.fingerprints[h.num_fingerprints++], known[i], 32);
    return h;
}

/* Copies the tokens and, behind them, the byte of each. Returns the bytes of the text of all targets. */
static uint64_t upgrade_copy(const TokenFile *f, const Tokenizer *t, FILE *out) {
    enum { BLOCK = 1 << 16 };
    int64_t count = (int64_t)f->header.count, n;
    int width = (int)f->header.width, masked = f->header.flags & TOKEN_FILE_MASKED;
    uint64_t bytes = 0;
    char *raw = (char *)checked_malloc(5 * BLOCK);
    for (int pass = 0; pass < (masked ? 2 : 1); pass++)
        for (int64_t at = 0; at < count; at += n) {
            n = min_i64(BLOCK, count - at);
            if (!token_file_read(f, at, n, raw)) user_error("%s cannot be read: %s", f->path, strerror(errno));
            char *mask = masked ? raw + n * width : NULL;
            for (int64_t i = 0; i < n; i++) {
                int32_t id = (int32_t)token_at(raw, i, width);
                int is_target = at + i > 0 && (!mask || mask[i]);
                if (mask) mask[i] = (char)((mask[i] ? TOKEN_IS_TARGET : 0) | (id == t->eos ? TOKEN_ENDS_DOCUMENT : 0));
                if (pass == 0 && is_target && id < t->vocab_size && !is_special_token(t, id))
                    bytes += token_length(t, id);
            }
            if (pass) fwrite(mask, 1, (size_t)n, out);
            else fwrite(raw, (size_t)width, (size_t)n, out);
        }
    free(raw);
    return bytes;
}

/* `tokenizer`: its file; NULL: the one next to the token file. */
static void upgrade_file(const char *path, const char *tokenizer) {
    char beside[4096];
    TokenFile f = upgrade_open(path);
    if (f.header.version > 1) {
        printf("%s has version %u already\n", path, f.header.version);
        close(f.fd);
        free(f.path);
        return;
    }
    if (!tokenizer && !tokenizer_find_beside(beside, sizeof beside, path))
        user_error("--upgrade needs the tokenizer of %s, and there is no tokenizer.model or tokenizer.json next to it: "
                   "give it with --tokenizer FILE",
                   path);
    if (!tokenizer) tokenizer = beside;
    Tokenizer *t = tokenizer_open(tokenizer);
    upgrade_check_tokenizer(&f, t, tokenizer);
    upgrade_check_ends(&f, t, tokenizer);
    TokenFileHeader h = upgrade_header(&f, t);
    FILE *out = output_open(path, 0);
    fwrite(&h, sizeof h, 1, out);
    h.target_bytes = upgrade_copy(&f, t, out);
    rewind(out);
    fwrite(&h, sizeof h, 1, out);
    output_close(out, path);
    printf("%s has version %d now: %" PRIu64 " tokens, %" PRIu64 " bytes of text in its targets\n", path,
           (int)TOKEN_FILE_VERSION, h.count, h.target_bytes);
    tokenizer_files_write(path, tokenizer, t);
    tokenizer_close(t);
    close(f.fd);
    free(f.path);
}

#endif
