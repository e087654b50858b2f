/* chat_tokenizer.h: the tokenizer with which conversations and requests are read. */
#ifndef CHAT_TOKENIZER_H
#define CHAT_TOKENIZER_H

/* A tokenizer with a token for each byte and, if `with_header`, the special tokens of ChatML. It is opened once. */
static const Tokenizer *chat_tokenizer(int with_header) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    static Tokenizer *opened[2];
    int counted = running;
    if (opened[with_header]) return opened[with_header];
    running = 0; // what is allocated here stays
    char *file = (char *)checked_malloc(1 << 14), *at = file;
    if (with_header)
        at += sprintf(at, "byte-level-bpe 1\ntokens 258\nmissing 0\nbos -\neos <|im_end|>\neot <|im_end|>\nsplit %s\n",
                      llama3_split);
    for (int i = 0; i < 256; i++) at += sprintf(at, "%c%c== %d\n", digits[i >> 2], digits[(i & 3) << 4], i);
    if (with_header) at += sprintf(at, "special <|im_start|> 256\nspecial <|im_end|> 257\n");
    opened[with_header] = tokenizer_open(give("chat.model", file, (size_t)(at - file)));
    free(file);
    running = counted;
    return opened[with_header];
}

#endif
