/* mutate.h: how inputs are changed, for both engines. Sometimes as the engine changes bytes; else as somebody would who
 * knows a text when he sees one: its numbers, its words, and the items between its separators; what was JSON stays
 * JSON. So what comes is not refused at its first byte, and gets to where the arithmetic is.
 */
#ifndef MUTATE_H
#define MUTATE_H

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most); // the engine's own

static uint64_t random_state;
static uint64_t below(uint64_t n) {
    random_state += 0x9E3779B97F4A7C15ull;
    return mix64(random_state) % n;
}

static const char *random_word(void) {
    uint64_t words = 0;
    while (target->words[words]) words++;
    return target->words[below(words)];
}

typedef struct {
    uint8_t *bytes;
    size_t size, most;
} Text;

/* Puts n bytes, which may lie in the text itself, in the place of `old` bytes at `at`, where there is room. */
static void text_replace(Text *t, size_t at, size_t old, const uint8_t *bytes, size_t n) {
    uint8_t copy[1 << 12];
    if (n > sizeof copy || t->size - old + n > t->most) return;
    for (size_t i = 0; i < n; i++) copy[i] = bytes[i];
    memmove(t->bytes + at + n, t->bytes + at + old, t->size - at - old);
    for (size_t i = 0; i < n; i++) t->bytes[at + i] = copy[i];
    t->size += n - old;
}

static int in_number(uint8_t c) { return (c >= '0' && c <= '9') || c == '-' || c == '.'; }
static int in_word(uint8_t c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || in_number(c) || c == '_' || c == '"';
}
static int in_item(uint8_t c) {
    return c != ',' && c != '\n' && c != 0 && c != '{' && c != '}' && c != '[' && c != ']';
}

/* The next run of such bytes after a random place; its length is 0 if there is none. */
static size_t find_run(const Text *t, int (*in)(uint8_t), size_t *at) {
    size_t end;
    for (*at = below(t->size + 1); *at < t->size && !in(t->bytes[*at]);) ++*at;
    while (*at > 0 && *at < t->size && in(t->bytes[*at - 1])) --*at;
    for (end = *at; end < t->size && in(t->bytes[end]);) end++;
    return end - *at;
}

static void change_number(Text *t) {
    static const char *const numbers[] = {"0",
                                          "1",
                                          "2",
                                          "3",
                                          "4",
                                          "8",
                                          "16",
                                          "64",
                                          "256",
                                          "65535",
                                          "65536",
                                          "1048576",
                                          "16777216",
                                          "268435456",
                                          "1073741824",
                                          "2147483647",
                                          "2147483648",
                                          "4294967296",
                                          "9007199254740993",
                                          "9223372036854775807",
                                          "18446744073709551616",
                                          "-1",
                                          "0.5",
                                          "1e-6",
                                          "1e12",
                                          "1e15",
                                          "1e300",
                                          "1e999",
                                          "1e-999",
                                          "nan"};
    size_t at, n = find_run(t, in_number, &at);
    char text[32] = "";
    if (!n) return;
    memcpy(text, t->bytes + at, n < 20 ? n : 20);
    long long x = atoll(text);
    switch (below(6)) {
    case 0: x = (long long)((unsigned long long)x + 1); break;
    case 1: x = (long long)((unsigned long long)x - 1); break;
    case 2: x = (long long)((unsigned long long)x * 2); break;
    case 3: x /= 2; break;
    case 4: x = (long long)below(20); break;
    case 5: x = 1ll << below(40); break;
    }
    snprintf(text, sizeof text, "%lld", x);
    const char *number = below(5) ? text : numbers[below(sizeof numbers / sizeof numbers[0])];
    text_replace(t, at, n, (const uint8_t *)number, strlen(number));
}

static void change_word(Text *t) {
    size_t at, from, n = find_run(t, in_word, &at), other = find_run(t, in_word, &from);
    const char *word = random_word();
    if (below(3)) text_replace(t, at, n, (const uint8_t *)word, strlen(word));
    else if (n && other) text_replace(t, at, n, t->bytes + from, other);
}

/* An item and the separator before it: erased, doubled, put in another's place; or a word as a new item. */
static void change_item(Text *t) {
    size_t at, to, n = find_run(t, in_item, &at), room = find_run(t, in_item, &to);
    const char *word = random_word();
    if (!n) return;
    uint8_t separator = at ? t->bytes[at - 1] : '\n';
    switch (below(5)) {
    case 0:
        if (at) text_replace(t, at - 1, n + 1, NULL, 0);
        break;
    case 1:
        if (at) text_replace(t, to + room, 0, t->bytes + at - 1, n + 1);
        break;
    case 2: text_replace(t, to, room, t->bytes + at, n); break;
    case 3: text_replace(t, at, n, (const uint8_t *)word, strlen(word)); break;
    case 4:
        text_replace(t, at, 0, separator == '\n' || !separator ? &separator : (const uint8_t *)",", 1);
        text_replace(t, at, 0, (const uint8_t *)word, strlen(word));
    }
}

static int is_json(const Text *t) {
    if (target->json < 0 || t->size <= (size_t)target->json) return 0;
    Bytes rest = {t->bytes + target->json, t->size - (size_t)target->json}, text = up_to_zero(&rest);
    cJSON *json = cJSON_ParseWithLength((const char *)text.at, text.left);
    cJSON_Delete(json);
    return json != NULL;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    static uint8_t before[1 << 12];
    Text t = {data, size, most};
    random_state = seed;
    if (below(8) >= (uint64_t)target->as_text || size > sizeof before) return LLVMFuzzerMutate(data, size, most);
    int json = is_json(&t);
    for (uint64_t changes = 1 + below(3); changes; changes--) {
        size_t size_before = t.size;
        memcpy(before, t.bytes, t.size);
        switch (below(3)) {
        case 0: change_number(&t); break;
        case 1: change_word(&t); break;
        case 2: change_item(&t); break;
        }
        if (json && !is_json(&t)) {
            t.size = size_before;
            memcpy(t.bytes, before, t.size);
        }
    }
    return t.size ? t.size : LLVMFuzzerMutate(data, size, most); // libFuzzer wants a byte
}

#endif
