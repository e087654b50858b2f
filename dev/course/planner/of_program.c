/* of_program.c: what the planner's page takes from the program when it is built.
 *   of_program vectors   the vectors of this machine's build, as options of the compiler; the work space of attention
 *                        depends on them, so that a planner for the browser is compiled with the same
 *   of_program page      JSON: the style of run.html and plan.html, the presets, and the tables of options
 */
#include "../../../lib/ops/cpu/tile.h"           // defines: PAIR; includes vectors.h: VL, MR
#include "../../../lib/io/json.h"                // defines: cJSON, json_write_line
#include "../../../programs/plan/plan_options.h" // defines: option_rows, plan_options

/* Adds options by name: what --help says of them. */
static void add_options(cJSON *options, const OptionRow *rows, int count) {
    for (int i = 0; i < count; i++) {
        const OptionRow *row = &rows[i];
        if (row->kind == OPT_GROUP || !row->help) continue;
        cJSON *option = cJSON_AddObjectToObject(options, row->name);
        cJSON_AddStringToObject(option, "help", row->help);
        if (row->values) cJSON_AddStringToObject(option, "values", row->values);
        if (row->fallback) cJSON_AddStringToObject(option, "fallback", row->fallback);
        if (row->kind == OPT_INT) cJSON_AddNumberToObject(option, "low", row->low);
        if (row->kind == OPT_INT) cJSON_AddNumberToObject(option, "high", row->high);
    }
}

extern const char run_html[]; // from the object that the Makefile makes of dev/pages

/* The text between <style> and </style> of run.html and plan.html. */
static char *page_style_text(void) {
    char *style = checked_strdup(strstr(run_html, "<style>") + strlen("<style>"));
    *strstr(style, "</style>") = 0;
    return style;
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "vectors")) {
        printf("-DPLANNED_VL=%d -DPLANNED_MR=%d -DPLANNED_PAIR=%d\n", VL, MR, PAIR);
        return 0;
    }
    if (argc != 2 || strcmp(argv[1], "page"))
        user_error("of_program was given '%s'; expected vectors or page", argc > 1 ? argv[1] : "");
    cJSON *root = cJSON_CreateObject(), *presets = cJSON_AddArrayToObject(root, "presets");
    char *style = page_style_text();
    cJSON_AddStringToObject(root, "style", style);
    cJSON_AddNumberToObject(root, "vector_floats", VL);
    for (int i = 0; i < LLAMA3_PRESETS; i++) cJSON_AddItemToArray(presets, cJSON_CreateString(llama3_presets[i].name));
    cJSON *options = cJSON_AddObjectToObject(root, "options");
    add_options(options, option_rows, OPTION_ROWS);
    add_options(options, plan_options, sizeof plan_options / sizeof *plan_options);
    json_write_line(stdout, root);
    free(style);
    return 0;
}
