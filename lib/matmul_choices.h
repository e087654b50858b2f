/* matmul_choices.h: algorithms that were chosen for matmuls by measurement (--matmul-choices).
 *
 * In a dry run the list collects the matmuls of a step. On a GPU it holds an algorithm for each, measured or read from
 * a file (run/matmul_choices.h), and cuBLASLt's first proposal counts only for matmuls that are not in the list.
 */
#ifndef MATMUL_CHOICES_H
#define MATMUL_CHOICES_H
#include "ops_common.h" // defines: Matmul

/* What the choice of an algorithm depends on. All int64_t: two keys can be compared as bytes. */
typedef struct {
    Matmul matmul;
    int64_t aligned[3]; // the alignment of A, B, C in bytes, at most 256
} MatmulKey;

enum { ALGORITHM_BYTES = 64, MAX_MATMUL_CHOICES = 96 };

/* What an algorithm was chosen for, besides the matmul. */
typedef struct {
    char gpu[256];
    char version[32]; // of cuBLASLt
} MatmulLibrary;

typedef struct {
    MatmulKey key;
    int is_chosen;                      // 0: nothing has been measured, or every algorithm was refused
    int is_of_file;                     // the algorithm was read from a file
    int owner;                          // the rank, within tp and pp, that measures it
    uint8_t algorithm[ALGORITHM_BYTES]; // cublasLtMatmulAlgo_t
    double seconds;                     // that it took
    double first_seconds;               // that cuBLASLt's first proposal took; infinity: it was refused
} MatmulChoice;

typedef struct MatmulChoices {
    int count;
    MatmulChoice list[MAX_MATMUL_CHOICES];
} MatmulChoices;

static inline MatmulKey matmul_key(const Matmul *p, const void *a, const void *b, const void *c) {
    const uintptr_t at[3] = {(uintptr_t)a, (uintptr_t)b, (uintptr_t)c};
    MatmulKey key;
    key.matmul = *p;
    for (int i = 0; i < 3; i++) key.aligned[i] = (int64_t)((at[i] | 256) & (0 - (at[i] | 256))); // the lowest bit
    return key;
}

/* NULL: the list does not have it. */
static inline MatmulChoice *matmul_choice_find(MatmulChoices *choices, const MatmulKey *key) {
    for (int i = 0; i < choices->count; i++)
        if (!memcmp(&choices->list[i].key, key, sizeof *key)) return &choices->list[i];
    return NULL;
}

/* Adds a matmul without an algorithm, unless it is in the list already or the list is full. */
static inline void matmul_choice_add(MatmulChoices *choices, const MatmulKey *key) {
    if (choices->count == MAX_MATMUL_CHOICES || matmul_choice_find(choices, key)) return;
    MatmulChoice *added = &choices->list[choices->count++];
    memset(added, 0, sizeof *added);
    added->key = *key;
}

/* Bytes from the first to the last element of A (i = 0), B (1) or C (2). */
static inline int64_t matmul_operand_bytes(const Matmul *p, int i) {
    int64_t x = (int64_t)sizeof(floatX);
    if (i == 0) return x * ((p->M - 1) * p->a_row + (p->K - 1) * p->a_col + 1);
    if (i == 1) return x * ((p->K - 1) * p->b_row + (p->N - 1) * p->b_col + 1);
    return (p->c_float ? (int64_t)sizeof(float) : x) * ((p->M - 1) * p->c_row + p->N);
}

/* Where operand i of a measurement begins in its memory, with the key's alignment. i = 3: the bytes of all of them. */
static inline int64_t matmul_operand_at(const MatmulKey *key, int i) {
    int64_t at = 0;
    for (int k = 0; k < i; k++) at += round_up(matmul_operand_bytes(&key->matmul, k), 256) + 256;
    return at + (i < 3 ? key->aligned[i] % 256 : 0);
}

/* Bytes that the measurement of any matmul of the list needs. */
static inline size_t matmul_measure_bytes(const MatmulChoices *choices) {
    int64_t most = 0;
    for (int i = 0; i < choices->count; i++) most = max_i64(most, matmul_operand_at(&choices->list[i].key, 3));
    return (size_t)most;
}

#endif
