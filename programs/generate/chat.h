/* chat.h: --chat, a conversation in the terminal.
 *
 * Rank 0 reads the user's messages and prints the answers. The other ranks receive what it decides in ChatOrders:
 * tokens to compute, or that it still waits for the user, or that the conversation is over. Keys and values of the
 * whole conversation stay in the cache, so a message costs its own tokens alone. Ctrl-C stops an answer; a second one
 * before the next message, or the end of the input, leaves. */
#ifndef CHAT_H
#define CHAT_H
#include "../../lib/io/json.h"       // defines: json_write_line, valid_utf8
#include "../shared/chat_template.h" // defines: Chat, chat_begin, chat_message, chat_generation_prompt
#include "generate.h"                // defines: Generator, next_token, TextOutput, Generation
#include "../shared/text_input.h"    // defines: UTF8_BYTE_ORDER_MARK, with_room_for_one
#include <poll.h>
#include <signal.h>

enum {
    CHAT_ORDER_TOKENS = 61, // of a conversation that are computed at once
    CHAT_POSITIONS = 4096   // of a conversation, unless --seq or the model has another number
};

typedef struct {
    const char *role;
    char *content;
} ChatMessage;

/* On rank 0 alone. */
typedef struct {
    Chat tokens;           // of the whole conversation
    ChatMessage *messages; // (count)
    int count;
    size_t room;  // capacity of the list
    char *system; // the message that /system has set; NULL: the template's own
    char *input;  // (input_length, input_room) bytes that were read after the last message
    size_t input_length, input_room;
    int input_ended, lines; // lines: taken so far
    char *saved_as;         // the file of the last /save; NULL: none
    int is_terminal;        // the user types: a prompt is printed
    int cached;             // tokens of the conversation that are in the cache
    int64_t sampled;        // tokens so far, which number the random draws
} Conversation;

typedef enum { CHAT_WAIT, CHAT_COMPUTE, CHAT_LEAVE } ChatAction;

/* What rank 0 tells all ranks. CHAT_COMPUTE: computes ids (count) after `past` cached tokens. */
typedef struct {
    int32_t action, count, past, ids[CHAT_ORDER_TOKENS];
} ChatOrder;
static_assert(sizeof(ChatOrder) <= sizeof(StepReport), "orders are received where step reports are");

static volatile sig_atomic_t chat_interrupts; // since the last message

static void chat_interrupt(int number) {
    (void)number;
    chat_interrupts = chat_interrupts + 1;
}

static ChatOrder chat_tell(Trainer *trainer, ChatOrder order) {
    take_from_rank_0(trainer, "chat", &order, sizeof order);
    return order;
}

// ---------------------------------------------------------------------------
// the user's input

/* The next whole line of what was read, without its end, to be freed; NULL: there is none yet. */
static char *chat_take_line(Conversation *chat) {
    char *end = chat->input_length ? (char *)memchr(chat->input, '\n', chat->input_length) : NULL;
    if (!end && !(chat->input_ended && chat->input_length)) return NULL;
    size_t length = end ? (size_t)(end - chat->input) : chat->input_length, used = length + (end != NULL);
    char *line = strndup(chat->input, length);
    memmove(chat->input, chat->input + used, chat->input_length - used);
    chat->input_length -= used;
    length = strlen(line);
    int has_mark = !chat->lines++ && !strncmp(line, UTF8_BYTE_ORDER_MARK, 3);
    if (has_mark) {
        length -= 3;
        memmove(line, line + 3, length + 1);
    }
    if (length && line[length - 1] == '\r') line[length - 1] = 0;
    return line;
}

/* Reads what there is, after waiting for up to POLL_MS. Returns whether there was something. */
static int chat_read_some(Conversation *chat) {
    enum { POLL_MS = 200, READ_BYTES = 4096 };
    struct pollfd ready = {STDIN_FILENO, POLLIN, 0};
    if (poll(&ready, 1, POLL_MS) <= 0) return 0;
    if (chat->input_room < chat->input_length + READ_BYTES) {
        chat->input_room = 2 * chat->input_length + READ_BYTES;
        chat->input = (char *)grown(chat->input, chat->input_room);
    }
    ssize_t count = read(STDIN_FILENO, chat->input + chat->input_length, READ_BYTES);
    if (count > 0) chat->input_length += (size_t)count;
    else if (count == 0 || errno != EINTR) chat->input_ended = 1;
    return 1;
}

/* A line of the user, to be freed; NULL: the input has ended, or the user leaves. Meanwhile rank 0 tells the others
 * that it waits, because they would take its silence for a failure. */
static char *chat_read_line(Conversation *chat, Trainer *trainer) {
    const ChatOrder waiting = {CHAT_WAIT, 0, 0, {0}};
    double told = seconds_now(), interval = fmin(5, trainer->job->run.timeout / 4);
    int has_noted = 0;
    for (;;) {
        char *line = chat_take_line(chat);
        if (line || chat->input_ended || chat_interrupts > 1) return line;
        if (chat_interrupts && !has_noted) {
            fprintf(stderr, "\nnote: press Ctrl-C again, or Ctrl-D, to leave\n%s", chat->is_terminal ? "> " : "");
            has_noted = 1;
        }
        if (chat_read_some(chat) || seconds_now() - told < interval) continue;
        chat_tell(trainer, waiting);
        told = seconds_now();
    }
}

// ---------------------------------------------------------------------------
// the conversation

/* Adds a message to the conversation that /save writes, and frees its content with the conversation. */
static void chat_remember(Conversation *chat, const char *role, char *content) {
    ChatMessage message = {role, content};
    chat->messages =
        (ChatMessage *)with_room_for_one(chat->messages, (size_t)chat->count, &chat->room, sizeof *chat->messages);
    chat->messages[chat->count++] = message;
}

static void chat_forget(Conversation *chat) {
    for (int i = 0; i < chat->count; i++) free(chat->messages[i].content);
    chat->count = chat->cached = 0;
    chat->tokens.count = 0;
}

/* Begins a new conversation, with the system message if there is one. */
static void chat_reset(Conversation *chat) {
    const char *system = chat->system ? chat->system : chat->tokens.form->system;
    chat_forget(chat);
    chat_begin(&chat->tokens, chat->system ? "system" : "user");
    if (chat->system) chat_message(&chat->tokens, "system", system, strlen(system), 0);
    if (system) chat_remember(chat, "system", checked_strdup(system));
}

/* Writes the conversation as tokens_llama3 reads it. Only a file that this conversation was saved to is replaced. */
static void chat_save(Conversation *chat, const char *path) {
    cJSON *root = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(root, "messages");
    for (int i = 0; i < chat->count; i++) {
        cJSON *message = cJSON_CreateObject();
        cJSON_AddStringToObject(message, "role", chat->messages[i].role);
        cJSON_AddStringToObject(message, "content", chat->messages[i].content);
        cJSON_AddItemToArray(list, message);
    }
    int is_own = chat->saved_as && !strcmp(path, chat->saved_as);
    FILE *f = fopen(path, is_own ? "w" : "wx"); // wx: fails if there is such a file
    if (f && !is_own) {
        free(chat->saved_as);
        chat->saved_as = checked_strdup(path);
    }
    if (f) json_write_line(f, root);
    else cJSON_Delete(root);
    int failed = !f || ferror(f);
    if (f && fclose(f)) failed = 1;
    if (failed) fprintf(stderr, "note: %s cannot be written: %s; choose another name\n", path, strerror(errno));
    else fprintf(stderr, "note: %d messages saved in %s\n", chat->count, path);
}

/* Obeys a line that begins with a slash. */
static void chat_command(Conversation *chat, char *line) {
    size_t length = strcspn(line, " \t");
    char *rest = line + length + strspn(line + length, " \t");
    if (length == 6 && !strncmp(line, "/reset", 6)) {
        chat_reset(chat);
        fprintf(stderr, "note: the conversation begins again\n");
    } else if (length == 7 && !strncmp(line, "/system", 7)) {
        free(chat->system);
        chat->system = *rest ? valid_utf8(rest) : NULL;
        chat_reset(chat);
        const char *which = chat->tokens.form->system ? "the usual" : "no";
        fprintf(stderr, "note: the conversation begins again, with %s system message\n", *rest ? "this" : which);
    } else if (length == 5 && !strncmp(line, "/save", 5) && *rest) {
        chat_save(chat, rest);
    } else {
        fprintf(stderr,
                "note: %.*s is not a command; expected /reset, /system TEXT or /save FILE. A message may begin with a "
                "slash if a space is before it\n",
                (int)min_i64(32, (int64_t)strcspn(line, "\x1b")), line);
    }
}

// ---------------------------------------------------------------------------
// answers

/* Has all ranks compute the conversation's tokens from chat->cached on. Returns the logits of the next token. */
static const float *chat_compute(Conversation *chat, Generator *g) {
    const float *logits = NULL;
    while (chat->cached < (int)chat->tokens.count) {
        ChatOrder order = {CHAT_COMPUTE, 0, chat->cached, {0}};
        order.count = (int32_t)min_i64(CHAT_ORDER_TOKENS, (int64_t)chat->tokens.count - chat->cached);
        memcpy(order.ids, chat->tokens.ids + chat->cached, sizeof(int32_t) * (size_t)order.count);
        chat_tell(g->trainer, order);
        logits = next_token_logits(g->trainer, order.ids, order.count, order.past);
        chat->cached += order.count;
    }
    return logits;
}

/* Generates, prints and remembers the answer to the conversation so far. */
static void chat_answer(Conversation *chat, Generator *g) {
    const Generation *asked = generation_of(g->trainer);
    const Tokenizer *t = asked->text.tokenizer;
    char *text = NULL;
    size_t length;
    FILE *copy = text_stream_open(&text, &length);
    TextOutput out = text_output_open();
    int room = asked->job.purpose.cached_positions - (int)chat->tokens.count - 8; // what ends a turn fits, too
    int most = program_given(&asked->program, "max-tokens") ? (int)min_i64(asked->opt.max_tokens, room) : room,
        count = 0;
    const float *logits = chat_compute(chat, g);
    while (count < most && !chat_interrupts) {
        int32_t id = next_token(g, &asked->prompts.defaults.sampling, logits, chat->sampled++);
        if (is_stop_token(&asked->stop_tokens, t, id, 0)) break;
        print_token(t, id, copy);
        text_output_token(&out, t, id);
        flush_results();
        chat_token(&chat->tokens, id, 1);
        count++;
        if (count < most) logits = chat_compute(chat, g);
    }
    text_output_end(&out);
    printf("\n");
    flush_results();
    if (count == most && count == room) fprintf(stderr, "note: the conversation is full; /reset begins a new one\n");
    chat_turn_end(&chat->tokens, 1);
    text_stream_close(copy);
    chat_remember(chat, "assistant", valid_utf8(text));
    free(text);
}

/* A message of the user and the answer to it, if both fit. */
static void chat_user_message(Conversation *chat, Generator *g, const char *line) {
    enum { LEAST_ANSWER = 16 };
    size_t before = chat->tokens.count;
    int positions = g->trainer->job->purpose.cached_positions;
    char *content = valid_utf8(line);
    chat_message(&chat->tokens, "user", content, strlen(content), 0);
    chat_generation_prompt(&chat->tokens);
    if (chat->tokens.count + LEAST_ANSWER > (size_t)positions) {
        fprintf(stderr,
                "note: the conversation would have %zu tokens with this message, and there is room for %d: shorten "
                "it, begin a new conversation with /reset, or start with a larger --seq\n",
                chat->tokens.count, positions);
        chat->tokens.count = before;
        free(content);
        return;
    }
    chat_remember(chat, "user", content);
    chat_answer(chat, g);
}

// ---------------------------------------------------------------------------
// the ranks

static void chat_on_rank_0(Generator *g) {
    const Generation *asked = generation_of(g->trainer);
    struct sigaction action = ZERO, before;
    Conversation chat = ZERO;
    chat_open(&chat.tokens, asked->text.tokenizer, asked->chat_template);
    chat.is_terminal = isatty(STDIN_FILENO);
    action.sa_handler = chat_interrupt; // without SA_RESTART: it ends the wait for input
    action.sa_flags = SA_ONSTACK;
    sigaction(SIGINT, &action, &before);
    chat_reset(&chat);
    if (chat.is_terminal) fprintf(stderr, "note: /reset, /system TEXT, /save FILE; Ctrl-D leaves\n");
    for (;;) {
        if (chat.is_terminal) fprintf(stderr, "> ");
        char *line = chat_read_line(&chat, g->trainer);
        if (!line) break;
        chat_interrupts = 0;
        if (*line == '/') chat_command(&chat, line);
        else if (*line) chat_user_message(&chat, g, line);
        free(line);
    }
    if (chat.is_terminal) fprintf(stderr, "\n");
    const ChatOrder leave = {CHAT_LEAVE, 0, 0, {0}};
    chat_tell(g->trainer, leave);
    sigaction(SIGINT, &before, NULL);
    free(chat.system);
    free(chat.saved_as);
    chat_forget(&chat);
    free(chat.messages);
    chat_close(&chat.tokens);
    free(chat.input);
}

static void chat_on_other_ranks(Generator *g) {
    const ChatOrder nothing = ZERO;
    for (;;) {
        ChatOrder order = chat_tell(g->trainer, nothing);
        if (order.action == CHAT_LEAVE) return;
        if (order.action == CHAT_COMPUTE) next_token_logits(g->trainer, order.ids, order.count, order.past);
    }
}

static void converse(Trainer *trainer) {
    if (trainer->parallel.dev.dry_run) {
        int longest = trainer->job->run.seq;
        generator_dry_run(trainer, longest, trainer->job->purpose.cached_positions - longest);
        return;
    }
    Generator g = generator_open(trainer);
    if (trainer->parallel.rank == 0) chat_on_rank_0(&g);
    else chat_on_other_ranks(&g);
    free(g.scratch);
}

#endif
