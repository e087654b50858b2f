/* option_table.h: a command line. A program has one table of its options, which parses, checks and explains them.
 *
 * A row holds an option's name, values, bounds, default and help, and which field of the program's struct stores it. A
 * caller may rely on: after options_set_defaults and option_read, every value is within its row's bounds, or 0 or NULL
 * if its option has no default and was not given. */
#ifndef OPTION_TABLE_H
#define OPTION_TABLE_H
#include "../../lib/device/base.h" // defines: user_error

typedef enum { OPT_GROUP, OPT_INT, OPT_REAL, OPT_CHOICE, OPT_TEXT, OPT_FLAG } OptionKind;

typedef struct {
    OptionKind kind;
    const char *name;           // without the dashes; OPT_GROUP: the heading in --help
    size_t offset;              // of the field in the program's struct of options
    double low, high;           // smallest and largest value of a number; a text: high 1 if it may be empty, low 1 if
                                // the option may stand alone, which gives the empty text
    size_t number, number_size; // the field for the N or X of a choice like muon:X; size 0: no choice has a number
    const char *values;         // lower case: the choices, separated by |; capitals: a placeholder for --help
    const char *fallback;       // default, as it would be typed; NULL: none
    const char *help; // NULL: a group, or a setting that is given as part of another option (muon:X)
} OptionRow;

// rows of a table, without the columns that their kind does not have; FIELD gives the offset of a field, SIZE its size
#define OPTION(kind, name, field, low, high, values, fallback, help)                                                   \
    { kind, name, FIELD(field), low, high, 0, 0, values, fallback, help }
#define INT(name, field, low, high, values, fallback, help)                                                            \
    OPTION(OPT_INT, name, field, low, high, values, fallback, help)
#define REAL(name, field, low, high, values, fallback, help)                                                           \
    OPTION(OPT_REAL, name, field, low, high, values, fallback, help)
#define CHOICE(name, field, values, fallback, help) OPTION(OPT_CHOICE, name, field, 0, 0, values, fallback, help)
#define CHOICE_OR_NUMBER(name, field, number, values, fallback, help)                                                  \
    { OPT_CHOICE, name, FIELD(field), 0, 0, FIELD(number), SIZE(number), values, fallback, help }
#define TEXT(name, field, values, fallback, help) OPTION(OPT_TEXT, name, field, 0, 0, values, fallback, help)
#define TEXT_OR_EMPTY(name, field, values, fallback, help) OPTION(OPT_TEXT, name, field, 0, 1, values, fallback, help)
#define TEXT_OR_ALONE(name, field, values, help) OPTION(OPT_TEXT, name, field, 1, 1, values, NULL, help)
#define FLAG(name, field, help) OPTION(OPT_FLAG, name, field, 0, 0, NULL, NULL, help)
#define GROUP(name)                                                                                                    \
    { OPT_GROUP, name, 0, 0, 0, 0, 0, NULL, NULL, NULL }

/* Which of the choices "a|b|c" the first `n` characters of `text` are, counted from 0; -1: none of them. */
static int choice_index(const char *text, size_t n, const char *choices) {
    for (int i = 0; *choices; i++) {
        size_t length = strcspn(choices, "|");
        if (length == n && !strncmp(text, choices, n)) return i;
        choices += length + (choices[length] == '|');
    }
    return -1;
}

/* The text of a choice. */
static void choice_text(char *text, size_t size, const char *choices, int index) {
    for (; index > 0; index--) choices = strchr(choices, '|') + 1;
    snprintf(text, size, "%.*s", (int)strcspn(choices, "|"), choices);
}

/* Reads the digits of a choice "word:N", a whole number of at most `size` bytes from 1 to 10^15, or of "word:X", a
 * number from 0 to below 1. Returns whether it is one. */
static int choice_number(const char *digits, int is_whole, size_t size, double *number) {
    char *end;
    if (!digits[0] || digits[strspn(digits, is_whole ? "0123456789" : "+-.0123456789eE")]) return 0;
    *number = strtod(digits, &end);
    double most = size == sizeof(int) ? INT32_MAX : 1e15;
    return !*end && (is_whole ? *number >= 1 && *number <= most : *number >= 0 && *number < 1);
}

/* Sets an option to a choice; in a choice like every:N or muon:X, N and X stand for any number. If the word alone is
 * a choice, too, it is the choice. Returns 0 if `value` is no choice. */
static int option_set_choice(void *options, const OptionRow *row, const char *value) {
    size_t word = strcspn(value, ":");
    char with_number[72];
    double number;
    int index = choice_index(value, strlen(value), row->values);
    void *field = (char *)options + row->number;
    if (row->number_size && !value[word] && strstr(row->values, ":N")) memset(field, 0, row->number_size);
    for (int is_whole = 0; is_whole < 2 && value[word]; is_whole++) {
        int n = snprintf(with_number, sizeof with_number, "%.*s:%c", (int)word, value, is_whole ? 'N' : 'X');
        int numbered = choice_index(with_number, (size_t)n, row->values);
        if (numbered < 0) continue;
        if (!choice_number(value + word + 1, is_whole, row->number_size, &number)) return 0;
        if (!is_whole) *(double *)field = number;
        else if (row->number_size == sizeof(int)) *(int *)field = (int)number;
        else *(int64_t *)field = (int64_t)number;
        index = choice_index(value, word, row->values);
        if (index < 0) index = numbered;
    }
    if (index >= 0) *(int *)((char *)options + row->offset) = index;
    return index >= 0;
}

/* Sets a flag, or checks and sets a value; NULL: it is missing. `called`: how errors name the option, "--lr" or its
 * place in a recipe. */
static void option_set(void *options, const OptionRow *row, const char *called, const char *value) {
    void *field = (char *)options + row->offset;
    if (row->kind == OPT_FLAG) {
        *(int *)field = 1;
        return;
    }
    int may_be_empty = row->kind == OPT_TEXT && row->high == 1;
    if (!value || (!may_be_empty && !value[0]))
        user_error("%s needs a value: expected %s %s", called, called, row->values);
    if (row->kind == OPT_TEXT) *(const char **)field = value;
    if (row->kind == OPT_CHOICE && !option_set_choice(options, row, value))
        user_error("%s %s: expected one of %s", called, value, row->values);
    if (row->kind != OPT_INT && row->kind != OPT_REAL) return;
    int takes_auto = strstr(row->values, "auto") != NULL, is_auto = takes_auto && !strcmp(value, "auto");
    char *end = NULL;
    double x = is_auto ? 0 : strtod(value, &end);
    int has_other_letters = value[strspn(value, "+-.0123456789eE")] != 0; // strtod also reads inf, nan and 0x10
    int is_number = !has_other_letters && end != value && end && !*end;
    int is_in_range = x >= row->low && x <= row->high && (row->kind != OPT_INT || x == floor(x));
    if (!is_auto && !(is_number && is_in_range))
        user_error("%s %s: expected a %snumber from %.10g to %.10g%s", called, value,
                   row->kind == OPT_INT ? "whole " : "", row->low, row->high, takes_auto ? ", or auto" : "");
    if (row->kind == OPT_INT) *(int *)field = (int)x;
    else *(double *)field = x;
}

static void options_set_defaults(void *options, const OptionRow *rows, int count) {
    for (int i = 0; i < count; i++)
        if (rows[i].fallback) option_set(options, &rows[i], rows[i].name, rows[i].fallback);
}

/* The name in the word "--name" or "--name=value"; "": it is no such word. */
static void option_name(char *name, size_t size, const char *word) {
    size_t length = strcspn(word, "=");
    name[0] = 0;
    if (!strncmp(word, "--", 2) && length - 2 < size) snprintf(name, size, "%.*s", (int)length - 2, word + 2);
}

/* The row of an option, by its name without dashes; NULL: there is none. */
static const OptionRow *option_row(const OptionRow *rows, int count, const char *name) {
    for (int i = 0; i < count; i++)
        if (rows[i].kind != OPT_GROUP && !strcmp(rows[i].name, name)) return &rows[i];
    return NULL;
}

/* Reads "--name value", "--name=value" or "--flag" at argv[*at] and returns its row; NULL: no option of the table.
 * Moves *at to the option's last word. Texts point into argv. */
static const OptionRow *option_read(void *options, const OptionRow *rows, int count, int argc, char **argv, int *at) {
    char name[64], called[72];
    const char *equals = strchr(argv[*at], '='), *value = equals ? equals + 1 : NULL;
    option_name(name, sizeof name, argv[*at]);
    const OptionRow *row = option_row(rows, count, name);
    if (!row || !row->help) return NULL;
    if (value && row->kind == OPT_FLAG) user_error("--%s takes no value: give --%s alone", name, name);
    int may_stand_alone = row->kind == OPT_TEXT && row->low == 1, has_next = *at + 1 < argc;
    if (may_stand_alone && !value && (!has_next || !strncmp(argv[*at + 1], "--", 2))) value = "";
    if (!value && row->kind != OPT_FLAG && has_next) value = argv[++*at];
    snprintf(called, sizeof called, "--%s", name);
    option_set(options, row, called, value);
    return row;
}

/* A choice as it would be typed, with its number. */
static void choice_as_text(const void *options, const OptionRow *row, char *value, size_t size) {
    const void *number = (const char *)options + row->number;
    choice_text(value, size, row->values, *(const int *)((const char *)options + row->offset));
    char *colon = strstr(value, ":N");
    if (colon && row->number_size == sizeof(int64_t))
        snprintf(colon, size - (size_t)(colon - value), ":%" PRId64, *(const int64_t *)number);
}

/* An option's value as it would be typed; flags: "on" or "off". Returns whether config.txt lists it. */
static int option_as_text(const void *options, const OptionRow *row, char *value, size_t size) {
    const void *field = (const char *)options + row->offset;
    const char *text = row->kind == OPT_TEXT ? *(const char *const *)field : NULL;
    int is_on = row->kind == OPT_FLAG && *(const int *)field;
    value[0] = 0;
    if (row->kind == OPT_INT) snprintf(value, size, "%d", *(const int *)field);
    if (row->kind == OPT_REAL) snprintf(value, size, "%.9g", *(const double *)field);
    if (row->kind == OPT_CHOICE) choice_as_text(options, row, value, size);
    if (row->kind == OPT_FLAG) snprintf(value, size, is_on ? "on" : "off");
    if (text) snprintf(value, size, "%s", text);
    return row->kind == OPT_INT || row->kind == OPT_REAL || row->kind == OPT_CHOICE || is_on || text;
}

/* Prints the words of `text` from `indent` on; the cursor is at `column`. Lines break before column 112. */
static void print_wrapped(const char *text, int column, int indent) {
    for (const char *word = text; *word;) {
        int n = (int)strcspn(word, " ");
        int is_first = word == text;
        if (is_first ? column >= indent : column + 1 + n > 111) {
            printf("\n");
            column = 0;
        }
        int space = column < indent ? indent - column : 1;
        column += printf("%*s%.*s", space, "", n, word);
        word += n + (word[n] == ' ');
    }
    printf("\n");
}

/* Is the option `name` one of those that `takes` has between commas? NULL: every option is. */
static int option_listed(const char *takes, const char *name) {
    char listed[72];
    snprintf(listed, sizeof listed, ",%s,", name);
    return !takes || strstr(takes, listed) != NULL;
}

/* Prints what each option of a group means, or of every group: `group` "all". Returns how many it has printed. */
static int options_explain(const OptionRow *rows, int count, const char *takes, const char *group) {
    enum { INDENT = 36 };
    const OptionRow *heading = NULL;
    int explained = 0, is_in_group = 0;
    for (const OptionRow *row = rows; row < rows + count; row++) {
        if (row->kind == OPT_GROUP) {
            heading = row;
            is_in_group = !strcmp(group, row->name);
        }
        if (!row->help || !option_listed(takes, row->name)) continue;
        if (!is_in_group && strcmp(group, "all")) continue;
        if (heading) printf("%s\n", heading->name);
        heading = NULL;
        explained++;
        char help[1024];
        int used = snprintf(help, sizeof help, "%s", row->help);
        if (row->fallback) snprintf(help + used, sizeof help - (size_t)used, " (%s)", row->fallback);
        int column = printf("  --%s %s", row->name, row->values ? row->values : "");
        print_wrapped(help, column, INDENT);
    }
    return explained;
}

/* Prints the options by name, with their values, a group to a paragraph. */
static void options_list(const OptionRow *rows, int count, const char *takes) {
    enum { INDENT = 12 };
    const char *heading = "";
    int column = 0;
    for (const OptionRow *row = rows; row < rows + count; row++) {
        char option[128];
        if (row->kind == OPT_GROUP) heading = row->name;
        if (!row->help || !option_listed(takes, row->name)) continue;
        int n = snprintf(option, sizeof option, "--%s%s%s", row->name, row->values ? " " : "",
                         row->values ? row->values : "");
        if (column && (heading[0] || column + 2 + n > 111)) {
            printf("\n");
            column = 0;
        }
        column += printf("%*s%s", column ? 2 : -INDENT, column ? "" : heading, option);
        heading = "";
    }
    if (column) printf("\n");
}

/* Writes a word of a command line, in quotes if the shell would change it. */
static void write_shell_word(FILE *f, const char *word) {
    static const char safe[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:,=+@%";
    if (word[0] && !word[strspn(word, safe)]) {
        fputs(word, f);
        return;
    }
    fputc('\'', f);
    for (; *word; word++) {
        if (*word == '\'') fputs("'\\''", f);
        else fputc(*word, f);
    }
    fputc('\'', f);
}

#endif
