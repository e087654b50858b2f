/* style.c: checks rules of style that need a look at C's tokens, and phrases in comments and messages.
 *
 *   style [--count] FILE…      prints `FILE:LINE: RULE: what was found` for each violation; --count prints one line a
 *                              file instead: its tokens without comments, and the words of its comments
 *   PHRASES=FILE               banned phrases: an extended regular expression and, after a tab, what to say instead
 *
 * It is no parser: it follows brackets and statements, which is enough for this project's formatting.
 * style.sh decides which files to check, and which rules fail the test.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_COLUMNS = 120, MAX_LINES = 60, MAX_PARAMETERS = 8, MAX_DEPTH = 200, MAX_PHRASES = 200, MAX_IFS = 20 };

typedef enum { WORD, NUMBER, STRING, PUNCTUATION, DIRECTIVE } TokenKind;

typedef struct {
    TokenKind kind;
    int line;
    const char *text; // not terminated
    int length;
} Token;

typedef struct {
    const char *path;
    char *text;
    Token *tokens;
    int num_tokens, room, comment_words;
} Source;

static struct {
    regex_t pattern;
    char *text, *instead;
} phrases[MAX_PHRASES];
static int num_phrases;
static int counts; // --count: directives are split into tokens, too

static void report(const Source *s, int line, const char *rule, const char *what, int length) {
    printf("%s:%d: %s: %.*s\n", s->path, line, rule, length, what);
}

// ---------------------------------------------------------------------------
// phrases and lines

static void phrases_open(const char *path) {
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[1000];
    if (!file) return;
    while (fgets(line, sizeof line, file) && num_phrases < MAX_PHRASES) {
        line[strcspn(line, "\n")] = 0;
        if (!*line || *line == '#') continue;
        char *tab = strchr(line, '\t');
        if (tab) *tab = 0;
        if (regcomp(&phrases[num_phrases].pattern, line, REG_EXTENDED)) {
            fprintf(stderr, "error: %s: not a regular expression: %s\n", path, line);
            exit(1);
        }
        phrases[num_phrases].text = strdup(line);
        phrases[num_phrases++].instead = strdup(tab ? tab + 1 : "");
    }
    fclose(file);
}

/* Looks for banned phrases in `length` bytes of text that start in `line`. */
static void phrases_check(const Source *s, const char *text, int length, int line) {
    char *copy = strndup(text, (size_t)length);
    for (char *row = copy, *next; row; row = next, line++) {
        next = strchr(row, '\n');
        if (next) *next++ = 0;
        for (int i = 0; i < num_phrases; i++) {
            regmatch_t match;
            if (regexec(&phrases[i].pattern, row, 1, &match, 0)) continue;
            char what[300];
            int found = (int)(match.rm_eo - match.rm_so);
            snprintf(what, sizeof what, "'%.*s'%s%s", found, row + match.rm_so, *phrases[i].instead ? "; say: " : "",
                     phrases[i].instead);
            report(s, line, "phrase", what, 300);
        }
    }
    free(copy);
}

static void columns_check(const Source *s) {
    int line = 1, columns = 0;
    for (const char *c = s->text; *c; c++) {
        if (*c == '\n') {
            char what[40];
            snprintf(what, sizeof what, "%d, at most %d", columns, MAX_COLUMNS);
            if (columns > MAX_COLUMNS) report(s, line, "columns", what, 40);
            line++;
            columns = 0;
        } else if (*c == '\t') {
            columns = columns / 8 * 8 + 8; // a tab fills up to the next column of 8
        } else if (((unsigned char)*c & 0xc0) != 0x80) columns++; // not inside a UTF-8 character
    }
}

// ---------------------------------------------------------------------------
// tokens

static void add_token(Source *s, TokenKind kind, const char *text, const char *end, int line) {
    if (s->num_tokens == s->room) {
        s->room = s->room ? 2 * s->room : 4096;
        s->tokens = realloc(s->tokens, sizeof *s->tokens * (size_t)s->room);
    }
    s->tokens[s->num_tokens++] = (Token){kind, line, text, (int)(end - text)};
}

static int count_lines(const char *begin, const char *end) {
    int lines = 0;
    for (const char *c = begin; c < end; c++) lines += *c == '\n';
    return lines;
}

static int count_words(const char *begin, const char *end) {
    int words = 0, inside = 0;
    for (const char *c = begin; c < end; c++) {
        int letter = isalnum((unsigned char)*c) || (*c & 0x80) || (inside && (*c == '_' || *c == '\'' || *c == '-'));
        words += letter && !inside;
        inside = letter;
    }
    return words;
}

static const char *skip_string(const char *c) {
    char quote = *c++;
    while (*c && *c != quote && *c != '\n') c += *c == '\\' && c[1] ? 2 : 1;
    return *c == quote ? c + 1 : c;
}

static const char *skip_comment(const char *c) {
    if (c[1] == '/') return c + strcspn(c, "\n");
    const char *end = strstr(c + 2, "*/");
    return end ? end + 2 : c + strlen(c);
}

/* Returns where a preprocessor directive ends: at the end of its line, later if a backslash continues the line, or
 * where a comment begins that ends the line. */
static const char *skip_directive(const char *c) {
    while (*c && *c != '\n' && !(*c == '/' && c[1] == '/')) {
        if (*c == '/' && c[1] == '*') c = skip_comment(c);
        else c += *c == '\\' && c[1] == '\n' ? 2 : 1;
    }
    return c;
}

static int punctuation_length(const char *c) {
    static const char *const longer[] = {"<<<", ">>>", "<<=", ">>=", "...", "->", "++", "--", "<<",
                                         ">>",  "<=",  ">=",  "==",  "!=",  "&&", "||", "+=", "-=",
                                         "*=",  "/=",  "%=",  "&=",  "|=",  "^=", "::"};
    for (size_t i = 0; i < sizeof longer / sizeof *longer; i++)
        if (!strncmp(c, longer[i], strlen(longer[i]))) return (int)strlen(longer[i]);
    return 1;
}

static const char *skip_word(const char *c) {
    while (isalnum((unsigned char)*c) || *c == '_') c++;
    return c;
}

static const char *skip_number(const char *c) {
    while (isalnum((unsigned char)*c) || *c == '.' || *c == '_' || (*c == '\'' && isalnum((unsigned char)c[1])) ||
           ((*c == '+' || *c == '-') && strchr("eEpP", c[-1])))
        c++;
    return c;
}

static void tokenize(Source *s) {
    int line = 1, line_start = 1;
    for (const char *c = s->text, *end; *c; c = end) {
        end = c + 1;
        if (*c == '\n') {
            line++;
            line_start = 1;
            continue;
        }
        if (isspace((unsigned char)*c)) continue;
        if (*c == '/' && (c[1] == '/' || c[1] == '*')) {
            end = skip_comment(c);
            s->comment_words += count_words(c, end);
            phrases_check(s, c, (int)(end - c), line);
        } else if (*c == '#' && line_start && !counts) {
            end = skip_directive(c);
            add_token(s, DIRECTIVE, c, end, line);
        } else if (*c == '"' || *c == '\'') {
            end = skip_string(c);
            add_token(s, STRING, c, end, line);
            phrases_check(s, c, (int)(end - c), line);
        } else if (isdigit((unsigned char)*c)) {
            end = skip_number(c);
            add_token(s, NUMBER, c, end, line);
        } else if (isalpha((unsigned char)*c) || *c == '_') {
            end = skip_word(c);
            add_token(s, WORD, c, end, line);
        } else {
            end = c + punctuation_length(c);
            add_token(s, PUNCTUATION, c, end, line);
        }
        line += count_lines(c, end);
        line_start = 0;
    }
}

// ---------------------------------------------------------------------------
// brackets and statements

typedef enum { STATEMENTS, TYPE_BODY, INITIALIZER, FOR_HEADER, CONDITION, CALL, GROUP, INDEX } LevelKind;

typedef struct {
    LevelKind kind;
    int open;      // the token that opened it; -1: the file
    int statement; // the first token of the present statement; -1: none yet
    int commas, ternary;
} Level;

typedef struct {
    Level levels[MAX_DEPTH];
    int depth;
    int function, parameters; // while a function's body is open: the first token of its definition, else -1
    int function_depth;
} Parser;

static int is(const Source *s, int i, const char *text) {
    return i >= 0 && i < s->num_tokens && s->tokens[i].length == (int)strlen(text) &&
           !memcmp(s->tokens[i].text, text, strlen(text));
}

static int is_one_of(const Source *s, int i, const char *const *texts) {
    for (; *texts; texts++)
        if (is(s, i, *texts)) return 1;
    return 0;
}

static int has_kind(const Source *s, int i, TokenKind kind) {
    return i >= 0 && i < s->num_tokens && s->tokens[i].kind == kind;
}

static int is_control(const Source *s, int i) {
    static const char *const words[] = {"if", "while", "switch", "for", NULL};
    return is_one_of(s, i, words);
}

static int is_assignment(const Source *s, int i) {
    static const char *const signs[] = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=", NULL};
    return has_kind(s, i, PUNCTUATION) && is_one_of(s, i, signs);
}

/* Is the statement that begins at token `i` a declaration? `Type name`, `Type *name`, or it begins with a keyword. */
static int is_declaration(const Source *s, int i) {
    static const char *const words[] = {"static", "const", "extern",   "typedef", "struct", "union",     "enum",
                                        "int",    "float", "double",   "char",    "void",   "unsigned",  "long",
                                        "signed", "short", "volatile", "auto",    "inline", "constexpr", "template",
                                        "using",  "class", "alignas",  NULL};
    static const char *const expressions[] = {"return", "goto", "case", "delete", "throw", NULL};
    if (is_one_of(s, i, words)) return 1;
    if (!has_kind(s, i, WORD) || is_one_of(s, i, expressions)) return 0;
    while (is(s, i + 1, "::")) i += 2;
    int next = i + 1;
    if (is(s, next, "<")) return 1; // a template's type: comparisons are no statements
    while (is(s, next, "*") || is(s, next, "&") || is(s, next, "const")) next++;
    return has_kind(s, next, WORD);
}

static LevelKind kind_of_parenthesis(const Source *s, int i) {
    static const char *const before_group[] = {"return", "case", "sizeof", "else", "do", NULL};
    if (is(s, i - 1, "for")) return FOR_HEADER;
    if (is_control(s, i - 1)) return CONDITION;
    if (is_one_of(s, i - 1, before_group)) return GROUP;
    if (has_kind(s, i - 1, WORD) || is(s, i - 1, ")") || is(s, i - 1, "]") || is(s, i - 1, ">")) return CALL;
    if (is(s, i - 1, ">>>")) return CALL;
    return GROUP;
}

/* An index, or what a C++ lambda captures. */
static LevelKind kind_of_square_bracket(const Source *s, int i) {
    int index = has_kind(s, i - 1, WORD) || is(s, i - 1, ")") || is(s, i - 1, "]");
    return index && !is(s, i - 1, "return") ? INDEX : INITIALIZER;
}

static LevelKind kind_of_brace(const Source *s, const Parser *p, int closed_parenthesis_open, int i) {
    const Level *now = &p->levels[p->depth];
    static const char *const types[] = {"struct", "union", "class", NULL};
    if (is(s, i - 1, "=") || (is(s, now->statement, "return") && now->statement < i)) return INITIALIZER;
    if (is(s, i - 1, ")")) {
        int before = closed_parenthesis_open - 1; // `name (…) {` and `if (…) {` are blocks, `(Type){` is a literal
        int block = has_kind(s, before, WORD) || is(s, before, "]") || is(s, before, ")") || is(s, before, ">");
        return block && !is(s, before, "return") && !is(s, before, "sizeof") ? STATEMENTS : INITIALIZER;
    }
    if (now->kind != STATEMENTS && now->kind != TYPE_BODY) return INITIALIZER;
    for (int k = now->statement; k >= 0 && k < i; k++) {
        if (is(s, k, "=")) return INITIALIZER;
        if (is(s, k, "enum")) return INITIALIZER;
        if (is_one_of(s, k, types)) return TYPE_BODY;
    }
    return is(s, i - 1, "]") ? INITIALIZER : STATEMENTS;
}

/* A function's name: the word before the parenthesis that its body follows. */
static void function_end(const Source *s, Parser *p, int i) {
    int first = p->function, name = first;
    char what[200];
    for (int k = first, depth = 0; k < i && !(depth == 0 && is(s, k, "{")); k++) {
        if (is(s, k, "(") && depth == 0) name = k - 1;
        depth += is(s, k, "(");
        depth -= is(s, k, ")");
    }
    int lines = s->tokens[i].line - s->tokens[first].line + 1;
    snprintf(what, sizeof what, "%.*s has %d lines, at most %d", s->tokens[name].length, s->tokens[name].text, lines,
             MAX_LINES);
    if (lines > MAX_LINES) report(s, s->tokens[first].line, "function-lines", what, 200);
    snprintf(what, sizeof what, "%.*s has %d parameters, at most %d", s->tokens[name].length, s->tokens[name].text,
             p->parameters, MAX_PARAMETERS);
    if (p->parameters > MAX_PARAMETERS) report(s, s->tokens[first].line, "parameters", what, 200);
    p->function = -1;
}

static void push(Parser *p, LevelKind kind, int i) {
    if (p->depth + 1 < MAX_DEPTH) p->depth++;
    p->levels[p->depth] = (Level){kind, i, -1, 0, 0};
}

static int last_closed_open; // the token that opened the parenthesis closed last
static int last_closed_commas;

static void open_bracket(const Source *s, Parser *p, int i) {
    if (is(s, i, "(")) push(p, kind_of_parenthesis(s, i), i);
    else if (is(s, i, "[")) push(p, kind_of_square_bracket(s, i), i);
    else {
        LevelKind kind = kind_of_brace(s, p, last_closed_open, i);
        Level *now = &p->levels[p->depth];
        int starts_function = kind == STATEMENTS && p->function < 0 && is(s, i - 1, ")") && now->statement >= 0;
        if (starts_function) {
            int empty =
                last_closed_open + 1 == i - 1 || (is(s, last_closed_open + 1, "void") && last_closed_open + 2 == i - 1);
            p->function = now->statement;
            p->function_depth = p->depth;
            p->parameters = empty ? 0 : last_closed_commas + 1;
        }
        push(p, kind, i);
    }
}

static void close_bracket(const Source *s, Parser *p, int i) {
    Level closed = p->levels[p->depth];
    if (p->depth > 0) p->depth--;
    Level *now = &p->levels[p->depth];
    if (is(s, i, ")")) {
        last_closed_open = closed.open;
        last_closed_commas = closed.commas;
        if (closed.kind == FOR_HEADER || closed.kind == CONDITION) now->statement = -1;
        if (closed.kind == GROUP) now->ternary += closed.ternary > 0 && now->ternary > 0;
    }
    if (!is(s, i, "}")) return;
    if (p->function >= 0 && p->depth == p->function_depth) function_end(s, p, i);
    if (closed.kind == STATEMENTS) now->statement = -1;
}

/* One statement a line; `case 1: …; break;` and the end of a block may share it. */
static void statement_start(const Source *s, Level *now, int i) {
    now->statement = i;
    now->ternary = 0;
    if (now->kind == STATEMENTS && is(s, i - 1, ";") && s->tokens[i - 1].line == s->tokens[i].line &&
        !is(s, i, "break"))
        report(s, s->tokens[i].line, "two-statements", "another statement on the same line", 200);
}

/* The comma of name<a, b>: only words and numbers back to the bracket. */
static int is_template_argument(const Source *s, int i) {
    while (has_kind(s, i - 1, WORD) || has_kind(s, i - 1, NUMBER) || is(s, i - 1, ",") || is(s, i - 1, "*")) i--;
    return is(s, i - 1, "<") && has_kind(s, i - 2, WORD);
}

static void statement_end(Level *now) {
    now->statement = -1;
    now->ternary = 0;
}

static void expression_token(const Source *s, Parser *p, int i) {
    Level *now = &p->levels[p->depth];
    int line = s->tokens[i].line;
    if (is(s, now->open - 2, "__attribute__")) return;                         // __attribute__((a, b))
    if (is(s, now->open + 2, "<") && has_kind(s, now->open + 1, WORD)) return; // (template<a, b>)
    if (is(s, i, ",")) {
        int statement = now->kind == STATEMENTS && p->function >= 0 && !is_declaration(s, now->statement);
        if (is(s, i + 1, "...") || is_template_argument(s, i)) return;
        now->commas++;
        now->ternary = 0;
        if (statement || now->kind == CONDITION || now->kind == GROUP || now->kind == INDEX)
            report(s, line, "comma", "a comma operator outside a for header", 200);
    }
    int declares = now->kind == CONDITION && is_declaration(s, now->open + 1); // C++: if (Type x = …)
    int holds_expression = now->kind == CONDITION || now->kind == CALL || now->kind == GROUP || now->kind == INDEX;
    if (is_assignment(s, i) && holds_expression && !declares && p->function >= 0)
        report(s, line, "assignment", "in a condition, an argument or an expression", 200);
    if (is(s, i, "?")) {
        const Level *outer = p->depth && now->kind == GROUP ? &p->levels[p->depth - 1] : now;
        if (now->ternary || outer->ternary) report(s, line, "ternary", "inside another one", 200);
        now->ternary++;
    }
}

static void check_structure(const Source *s) {
    static Parser parser, saved[MAX_IFS];
    Parser *p = &parser;
    int ifs = 0;
    *p = (Parser){.function = -1};
    p->levels[0] = (Level){STATEMENTS, -1, -1, 0, 0};
    for (int i = 0; i < s->num_tokens; i++) {
        const Token *t = &s->tokens[i];
        if (t->kind == DIRECTIVE) { // each branch of a condition starts with the same brackets open
            const char *word = t->text + 1 + strspn(t->text + 1, " ");
            if (!strncmp(word, "if", 2) && ifs < MAX_IFS) saved[ifs++] = *p;
            else if (!strncmp(word, "el", 2) && ifs) *p = saved[ifs - 1];
            else if (!strncmp(word, "endif", 5) && ifs) ifs--;
            continue;
        }
        Level *now = &p->levels[p->depth];
        int holds_statements = now->kind == STATEMENTS || now->kind == TYPE_BODY;
        if (holds_statements && now->statement < 0 && !is(s, i, "}") && !is(s, i, ";")) statement_start(s, now, i);
        if (is(s, i, "(") || is(s, i, "[") || is(s, i, "{")) open_bracket(s, p, i);
        else if (is(s, i, ")") || is(s, i, "]") || is(s, i, "}")) close_bracket(s, p, i);
        else if (is(s, i, ";")) statement_end(now);
        else if (is(s, i, "else") || is(s, i, "do")) now->statement = -1;
        else if (is(s, i, ":") && holds_statements && !now->ternary) now->statement = -1;
        else expression_token(s, p, i);
    }
}

// ---------------------------------------------------------------------------

static char *read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    size_t size = 0, room = 1 << 16, n;
    char *text = malloc(room + 1);
    if (!file) {
        fprintf(stderr, "error: cannot read %s\n", path);
        exit(1);
    }
    do {
        n = fread(text + size, 1, room - size, file);
        size += n;
        if (size == room) {
            room *= 2;
            text = realloc(text, room + 1);
        }
    } while (n > 0);
    fclose(file);
    text[size] = 0;
    return text;
}

static int ends_with(const char *text, const char *end) {
    size_t a = strlen(text), b = strlen(end);
    return a >= b && !strcmp(text + a - b, end);
}

int main(int argc, char **argv) {
    counts = argc > 1 && !strcmp(argv[1], "--count");
    if (!counts) phrases_open(getenv("PHRASES"));
    for (int i = 1 + counts; i < argc; i++) {
        Source s = {.path = argv[i], .text = read_file(argv[i])};
        int is_c = ends_with(argv[i], ".h") || ends_with(argv[i], ".c") || ends_with(argv[i], ".cu") ||
                   ends_with(argv[i], ".cuh");
        if (is_c) tokenize(&s);
        else phrases_check(&s, s.text, (int)strlen(s.text), 1);
        if (counts) {
            printf("%s %d %d\n", s.path, s.num_tokens, s.comment_words);
        } else {
            if (!ends_with(argv[i], ".md")) columns_check(&s);
            if (is_c) check_structure(&s);
        }
        free(s.tokens);
        free(s.text);
    }
    return 0;
}
