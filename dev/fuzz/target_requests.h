/* target_requests.h: the requests of --score and --choices.
 * Input: s (--score) or c (--choices), then the file.
 */
#ifndef TARGET_REQUESTS_H
#define TARGET_REQUESTS_H
#include "chat_tokenizer.h"

enum { FUZZ_SEQ = 24, FUZZ_BATCH = 3 };

static void check_requests(const Requests *r, const Tokenizer *t) {
    int64_t covered = 0, sum = 0;
    for (int64_t i = 0; i < r->count; i++) {
        const ScoreRequest *q = &r->requests[i];
        EXPECT(q->scored >= 1 && q->tokens > q->scored && q->tokens <= FUZZ_SEQ + 1, "request %d has %d of %d tokens",
               (int)i, q->scored, q->tokens);
        EXPECT(q->first >= 0 && (size_t)(q->first + q->tokens) <= r->num_ids, "request %d ends after %zu ids", (int)i,
               r->num_ids);
        for (int n = 0; n < q->tokens; n++)
            EXPECT(r->ids[q->first + n] >= 0 && r->ids[q->first + n] < t->vocab_size, "id %d", r->ids[q->first + n]);
    }
    for (int64_t b = 0; b < r->num_batches; b++) {
        const ScoreBatch *batch = &r->batches[b];
        EXPECT(batch->first == covered && batch->rows >= 1 && batch->rows * batch->T <= FUZZ_BATCH * FUZZ_SEQ,
               "batch %d has %d rows of %d tokens", (int)b, batch->rows, batch->T);
        for (int row = 0; row < batch->rows; row++) {
            const ScoreRequest *q = &r->requests[r->order[covered + row]];
            EXPECT(q->tokens - 1 <= batch->T, "%d tokens in a row of %d", q->tokens - 1, batch->T);
            sum += r->order[covered + row];
        }
        covered += batch->rows;
    }
    EXPECT(covered == r->count && sum == r->count * (r->count - 1) / 2, "%d of %d requests are in a batch",
           (int)covered, (int)r->count);
}

static void fuzz_requests(Bytes in) {
    Requests r;
    int choices = next_byte(&in) == 'c';
    const Tokenizer *t = chat_tokenizer(1);
    requests_read(&r, give("requests.jsonl", in.at, in.left), choices, t, NULL, t->vocab_size);
    requests_cut(&r, FUZZ_SEQ);
    requests_make_batches(&r, FUZZ_BATCH, FUZZ_SEQ, 0);
    held.taken = 1;
    check_requests(&r, t);
    requests_close(&r);
}

static const char *const request_words[] = {"{\"id\":1,\"context\":\"a\",\"continuation\":\" b\"}\n",
                                            "{\"context_ids\":[1,2],\"continuation_ids\":[3]}\n",
                                            "{\"context\":\"a\",\"endings\":[\"b\",\"c\"],\"label\":0}\n",
                                            "\"ctx\":\"\"",
                                            "\"label\":\"1\"",
                                            "\"id\":{\"a\":[null]}",
                                            "\\u0020",
                                            "\\u0000",
                                            "\\ud83d\\ude00",
                                            NULL};

#endif
