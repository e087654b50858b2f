/* encode.c: the token ids of whole files and the time that encoding took, for dev/pytorch/compare_tokenizer.py.
 * Usage: encode TOKENIZER FILE... For each file, which may contain any bytes, it writes to standard output: the seconds
 * (double), the number of ids (uint64), the ids (int32).
 */
#include "../../programs/tokens/corpus.h"

int main(int argc, char **argv) {
    output_prepare();
    if (argc < 3)
        user_error("encode was given %d arguments, expected a tokenizer.model and at least one file", argc - 1);
    Tokenizer *t = tokenizer_open(argv[1]);
    int32_t *ids = NULL;
    size_t capacity = 0;
    for (int i = 2; i < argc; i++) {
        size_t length;
        char *text = read_regular_file(argv[i], &length);
        if (!text) user_error("%s cannot be read: %s; expected a readable text file", argv[i], strerror(errno));
        double started = seconds_now();
        uint64_t count = tokenizer_encode(t, text, length, &ids, &capacity, 0);
        double seconds = seconds_now() - started;
        fwrite(&seconds, sizeof seconds, 1, stdout);
        fwrite(&count, sizeof count, 1, stdout);
        fwrite(ids, sizeof *ids, count, stdout);
        check_results();
        free(text);
    }
    finish_results();
    free(ids);
    tokenizer_close(t);
    return 0;
}
