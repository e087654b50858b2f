/* json.h: helpers for writing JSON files with cJSON: whole numbers with all their digits, and the mesh. */
#ifndef JSON_H
#define JSON_H
#include "../lib/mesh.h"
#include <cjson/cJSON.h>

/* cJSON itself writes numbers above 10^15 with an exponent. */
static inline void json_add_integer(cJSON *object, const char *key, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, value);
    cJSON_AddRawToObject(object, key, text);
}
static inline void json_add_flops(cJSON *object, const char *key, double flops) {
    char text[400];
    snprintf(text, sizeof text, "%.0f", flops);
    cJSON_AddRawToObject(object, key, text);
}

/* A number in a printf format; null if it is not finite, since JSON has neither infinity nor NaN. */
static inline cJSON *json_real(const char *format, double value) {
    char text[64];
    if (!isfinite(value)) return cJSON_CreateNull();
    snprintf(text, sizeof text, format, value);
    return cJSON_CreateRaw(text);
}

/* Writes `root` as one line and deletes it. */
static inline void json_write_line(FILE *f, cJSON *root) {
    char *text = cJSON_PrintUnformatted(root);
    if (!text) run_failure("out of memory while writing JSON");
    fprintf(f, "%s\n", text);
    free(text);
    cJSON_Delete(root);
}

/* "world":8,"mesh":{"tp":1,…} */
static inline void json_add_mesh(cJSON *root, const Mesh *m) {
    json_add_integer(root, "world", m->world);
    cJSON *mesh = cJSON_AddObjectToObject(root, "mesh");
    for (int a = 0; a < MESH_AXES; a++) json_add_integer(mesh, axis_names[a], m->size[a]);
}

/* The members of the group that `first` leads, in rank order; ranks with the same leader are in one group. */
static inline cJSON *json_group(const Mesh *m, const int *leaders, int axis, int first, char *listed) {
    cJSON *members = cJSON_CreateArray();
    int missing = mesh_group_size(m, (Axis)axis);
    for (int r = first; r < m->world && missing > 0; r++) {
        if (leaders[r * AXES + axis] != leaders[first * AXES + axis]) continue;
        cJSON_AddItemToArray(members, cJSON_CreateNumber(r));
        listed[r] = 1;
        missing--;
    }
    return members;
}

/* "groups":{"fsdp":[[0,1,…],…],…}. leaders: (world, AXES) the first rank of each rank's group on each axis. */
static inline void json_add_groups(cJSON *root, const Mesh *m, const int *leaders) {
    cJSON *groups = cJSON_AddObjectToObject(root, "groups");
    for (int axis = 0; axis < AXES; axis++) {
        cJSON *list = cJSON_AddArrayToObject(groups, axis_names[axis]);
        char *listed = (char *)checked_malloc((size_t)m->world);
        for (int first = 0; first < m->world; first++)
            if (!listed[first]) cJSON_AddItemToArray(list, json_group(m, leaders, axis, first, listed));
        free(listed);
    }
}

#endif
