/* layout.h: the groups of ranks as the communicators themselves report them, for the banner and layout.json.
 *
 * A mesh that was flattened by mistake computes the same losses; only the members of its groups show it. Groups are
 * given by leaders: (world, AXES) the lowest rank of the group that each rank belongs to on each axis.
 */
#ifndef LAYOUT_H
#define LAYOUT_H
#include "../../lib/comm/comm.h" // defines: Comm, all_gather_now, run_hosts, host_of_rank
#include "../../lib/io/json.h"   // defines: json_add_integer, json_write_line

/* The leaders of all groups. All ranks call it; the caller frees the result. */
static int *layout_read_back(Comm *comm) {
    int mine[AXES], *leaders = new_array(int, AXES * comm->mesh.world);
    for (int a = 0; a < AXES; a++) mine[a] = comm->hosts->group_member(comm, &comm->groups[a], 0);
    all_gather_now(comm, AXIS_WORLD, "layout", mine, leaders, sizeof mine);
    return leaders;
}

/* How many groups of an axis have members on several hosts, so that their traffic crosses the network. */
static int groups_across_hosts(const Mesh *mesh, const int *leaders, int axis, const int *hosts) {
    int count = 0;
    char *crosses = new_array(char, mesh->world);
    for (int r = 0; r < mesh->world; r++) {
        int leader = leaders[r * AXES + axis];
        if (hosts[r] == hosts[leader] || crosses[leader]) continue;
        crosses[leader] = 1;
        count++;
    }
    free(crosses);
    return count;
}

/* Prints the members of the group that `first` leads, "0-3", "0-6 by 2" or "0+3+4". */
static void group_print(FILE *f, const Mesh *mesh, const int *leaders, int axis, int first) {
    int members = 0, last = first, step = 0, is_even = 1;
    for (int r = first; r < mesh->world; r++) {
        if (leaders[r * AXES + axis] != first) continue;
        if (members == 1) step = r - first;
        is_even &= members < 2 || r - last == step;
        last = r;
        members++;
    }
    if (is_even && step == 1) fprintf(f, "%d-%d", first, last);
    else if (is_even && members > 2) fprintf(f, "%d-%d by %d", first, last, step);
    else
        for (int r = first; r <= last; r++)
            if (leaders[r * AXES + axis] == first) fprintf(f, r > first ? "+%d" : "%d", r);
    if (members != mesh_group_size(mesh, (Axis)axis)) fprintf(f, " (%d members)", members);
}

enum { LAYOUT_SHOWN = 32 }; // groups or hosts in a line of the banner

/* Prints "hosts: n1 (ranks 0-1), n2 (ranks 2-3)". */
static void hosts_print(FILE *f) {
    fprintf(f, "hosts: ");
    for (int i = 0; i < run_hosts.count && i < LAYOUT_SHOWN; i++) {
        const RunHost *host = &run_hosts.hosts[i];
        int first = host->first_rank, is_consecutive = 1;
        for (int r = first; r < first + host->ranks && is_consecutive; r++)
            is_consecutive = run_hosts.of_rank[r] == i; // `first` is the lowest, so r stays below the world
        fprintf(f, "%s%s ", i ? ", " : "", host->name);
        if (host->ranks == 1) fprintf(f, "(rank %d)", first);
        else if (is_consecutive) fprintf(f, "(ranks %d-%d)", first, first + host->ranks - 1);
        else fprintf(f, "(%d ranks, the first is %d)", host->ranks, first);
    }
    fprintf(f, "%s\n", run_hosts.count > LAYOUT_SHOWN ? ", … (layout.json lists all)" : "");
}

/* Prints "fsdp: 2 groups of 4: 0-3, 4-7; each within a host", a line for every axis with groups of several ranks. */
static void layout_print(const Mesh *mesh, const int *leaders, FILE *f) {
    int several_hosts = run_hosts.count > 1;
    if (several_hosts) hosts_print(f);
    for (int a = 0; a < AXES; a++) {
        int size = mesh_group_size(mesh, (Axis)a), printed = 0;
        if (size == 1 || a == AXIS_WORLD) continue;
        fprintf(f, "%s: %d group%s of %d: ", axis_names[a], mesh->world / size, mesh->world > size ? "s" : "", size);
        for (int first = 0; first < mesh->world && printed < LAYOUT_SHOWN; first++) {
            if (leaders[first * AXES + a] != first) continue;
            if (printed++) fprintf(f, ", ");
            group_print(f, mesh, leaders, a, first);
        }
        if (printed < mesh->world / size) fprintf(f, ", … (layout.json lists all)");
        int across = several_hosts ? groups_across_hosts(mesh, leaders, a, run_hosts.of_rank) : 0;
        if (across) fprintf(f, "; %d of them across hosts", across);
        if (across && a == AXIS_FSDP && run_hosts.hosts[0].ranks % size == 0)
            fprintf(f, ", although each would fit within one: number the ranks host by host (mpirun --map-by slot)");
        if (several_hosts && !across) fprintf(f, "; each within a host");
        fprintf(f, "\n");
    }
}

/* "world":8,"mesh":{"tp":1,…} */
static inline void json_add_mesh(cJSON *root, const Mesh *mesh) {
    json_add_integer(root, "world", mesh->world);
    cJSON *sizes = cJSON_AddObjectToObject(root, "mesh");
    for (int a = 0; a < MESH_AXES; a++) json_add_integer(sizes, axis_names[a], mesh->size[a]);
}

/* "groups":{"fsdp":[[0,1,…],…],…} */
static inline void json_add_groups(cJSON *root, const Mesh *mesh, const int *leaders) {
    cJSON *groups = cJSON_AddObjectToObject(root, "groups");
    for (int axis = 0; axis < AXES; axis++) {
        cJSON *list = cJSON_AddArrayToObject(groups, axis_names[axis]);
        cJSON **members = new_array(cJSON *, mesh->world); // (world) the group that each rank leads, or NULL
        for (int r = 0; r < mesh->world; r++) {
            cJSON **group = &members[leaders[r * AXES + axis]];
            if (!*group) {
                *group = cJSON_CreateArray();
                cJSON_AddItemToArray(list, *group);
            }
            cJSON_AddItemToArray(*group, cJSON_CreateNumber(r));
        }
        free(members);
    }
}

static void layout_write(FILE *f, const Mesh *mesh, const int *leaders) {
    cJSON *root = cJSON_CreateObject();
    json_add_mesh(root, mesh);
    json_add_groups(root, mesh, leaders);
    cJSON *hosts = cJSON_AddArrayToObject(root, "hosts"); // the host of each rank
    for (int r = 0; r < mesh->world && run_hosts.count; r++)
        cJSON_AddItemToArray(hosts, cJSON_CreateString(host_of_rank(r)->name));
    json_write_line(f, root);
}

#endif
