/* chat_form.h: a conversation as the tokens that an instruction-tuned model was trained on.
 *
 * chat_message renders one whole message; chat_answer_begin what comes before the model's answer, and chat_answer_end
 * what comes after it. Text is encoded as plain text: the name of a special token in a message has no effect.
 */
#ifndef CHAT_FORM_H
#define CHAT_FORM_H
#include "../tokenizer.h" // defines: Tokenizer, tokenizer_encode, tokenizer_special, grown

/* A message is rendered as: open, the role, close (if any), before_content, the content, end, after_turn. */
typedef struct {
    const char *begin, *open, *close, *end; // names of special tokens; NULL: the template has none
    const char *before_content, *after_turn;
    const char *system; // the system message if the user gives none; NULL: there is none
} ChatForm;

static const ChatForm chat_forms[] = {
    {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "\n\n", "", NULL}, // Llama 3
    {NULL, "<|im_start|>", NULL, "<|im_end|>", "\n", "\n",
     "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}, // ChatML of SmolLM2-Instruct
};

typedef struct {
    const Tokenizer *t;
    int32_t *ids; // (count, room)
    size_t count, room;
} ChatTokens;

enum {
    CHAT_ORDER_TOKENS = 61, // of a conversation that are computed at once
    CHAT_POSITIONS = 4096   // of a conversation, unless --seq or the model has another number
};

/* The first form whose special tokens the tokenizer has. */
static const ChatForm *chat_form_find(const Tokenizer *t, const char *path) {
    for (int i = 0; i < (int)(sizeof chat_forms / sizeof *chat_forms); i++) {
        const ChatForm *form = &chat_forms[i];
        const char *const names[] = {form->begin, form->open, form->close, form->end};
        int missing = 0;
        for (int n = 0; n < 4; n++) missing += names[n] && tokenizer_special(t, names[n]) == NO_TOKEN;
        if (!missing) return form;
    }
    user_error("--chat: tokenizer %s does not have the special tokens of a chat template, expected "
               "<|start_header_id|>, <|end_header_id|>, <|eot_id|> (Llama 3) or <|im_start|>, <|im_end|> (ChatML): use "
               "an instruction-tuned model, or --generate PROMPT",
               path);
}

static void chat_token(ChatTokens *c, int32_t id) {
    c->ids = (int32_t *)with_room_for_one(c->ids, c->count, &c->room, sizeof *c->ids);
    c->ids[c->count++] = id;
}
static void chat_special_token(ChatTokens *c, const char *name) {
    if (name) chat_token(c, tokenizer_special(c->t, name));
}

/* Encodes both texts as one, because a token may contain bytes of both. */
static void chat_encode(ChatTokens *c, const char *head, const char *text) {
    size_t length = strlen(head) + strlen(text);
    char *whole = new_array(char, length + 1);
    strcat(strcpy(whole, head), text);
    c->count = tokenizer_encode(c->t, whole, length, &c->ids, &c->room, c->count);
    free(whole);
}

/* The beginning of a message up to its content, and the content. */
static void chat_message_begin(ChatTokens *c, const ChatForm *form, const char *role, const char *content) {
    char head[32];
    chat_special_token(c, form->open);
    if (form->close) {
        chat_encode(c, role, "");
        chat_special_token(c, form->close);
        chat_encode(c, form->before_content, content);
        return;
    }
    snprintf(head, sizeof head, "%s%s", role, form->before_content);
    chat_encode(c, head, content);
}

static void chat_message_end(ChatTokens *c, const ChatForm *form) {
    chat_special_token(c, form->end);
    chat_encode(c, form->after_turn, "");
}

static void chat_message(ChatTokens *c, const ChatForm *form, const char *role, const char *content) {
    chat_message_begin(c, form, role, content);
    chat_message_end(c, form);
}

/* What asks the model for an answer. */
static void chat_answer_begin(ChatTokens *c, const ChatForm *form) { chat_message_begin(c, form, "assistant", ""); }

/* After the tokens of an answer without the one that stopped it. */
static void chat_answer_end(ChatTokens *c, const ChatForm *form) { chat_message_end(c, form); }

#endif
