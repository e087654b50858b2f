/* mesh.h: the mesh of named axes: from inside out tp, cp, pp, dp_shard, dp_replicate (Llama 3 paper, section 3.3.2).
 *
 * Owns: which rank is where, and who is in a group with whom. A caller may rely on: all of it is arithmetic on a rank's
 * number; sizes multiply to the number of ranks, or the run is refused with the arithmetic.
 */
#ifndef MESH_H
#define MESH_H
#include "base.h"

typedef enum {
    AXIS_TP,
    AXIS_CP,
    AXIS_PP,
    AXIS_DP_SHARD,
    AXIS_DP_REPLICATE,
    MESH_AXES,
    AXIS_FSDP = MESH_AXES, // dp_shard × cp: the ranks over which parameters are sharded
    AXIS_WORLD,
    AXES
} Axis;
static const char *const axis_names[AXES] = {"tp", "cp", "pp", "dp_shard", "dp_replicate", "fsdp", "world"};

typedef struct {
    int world;           // number of ranks
    int size[MESH_AXES]; // their product is world
} Mesh;

static inline int mesh_coordinate(const Mesh *m, int rank, Axis axis) {
    for (int a = 0; a < (int)axis; a++) rank /= m->size[a];
    return rank % m->size[axis];
}

static inline int mesh_stride(const Mesh *m, Axis axis) {
    int stride = 1;
    for (int a = 0; a < (int)axis; a++) stride *= m->size[a];
    return stride;
}

static int mesh_group_size(const Mesh *m, Axis axis) {
    if (axis == AXIS_WORLD) return m->world;
    if (axis == AXIS_FSDP) return m->size[AXIS_CP] * m->size[AXIS_DP_SHARD];
    return m->size[axis];
}

/* A group is named by its colour, the rank with coordinate 0 on the group's axes; members are ordered by `key`. */
static void mesh_group(const Mesh *m, int rank, Axis axis, int *colour, int *key) {
    int cp = mesh_coordinate(m, rank, AXIS_CP), shard = mesh_coordinate(m, rank, AXIS_DP_SHARD);
    if (axis == AXIS_WORLD) *colour = 0, *key = rank;
    else if (axis == AXIS_FSDP) {
        *colour = rank - cp * mesh_stride(m, AXIS_CP) - shard * mesh_stride(m, AXIS_DP_SHARD);
        *key = shard * m->size[AXIS_CP] + cp;
    } else {
        *key = mesh_coordinate(m, rank, axis);
        *colour = rank - *key * mesh_stride(m, axis);
    }
}

/* The rank in the world of member `i` of a group; and of the group that `rank` is in. */
static inline int mesh_group_member(const Mesh *m, int colour, Axis axis, int i) {
    int cp = m->size[AXIS_CP];
    if (axis == AXIS_WORLD) return i;
    if (axis == AXIS_FSDP) return colour + i % cp * mesh_stride(m, AXIS_CP) + i / cp * mesh_stride(m, AXIS_DP_SHARD);
    return colour + i * mesh_stride(m, axis);
}
static inline int mesh_member(const Mesh *m, int rank, Axis axis, int i) {
    int colour, key;
    mesh_group(m, rank, axis, &colour, &key);
    return mesh_group_member(m, colour, axis, i);
}

/* The most places, of so many ranks each, that a group of the axis is on, where ranks stand in the order of their
 * numbers. */
static inline int group_spans(const Mesh *m, Axis axis, int ranks_each) {
    int most = 0;
    for (int r = 0; r < m->world; r++) {
        int colour, key, spans = 1;
        mesh_group(m, r, axis, &colour, &key);
        if (colour != r) continue;
        for (int i = 1; i < mesh_group_size(m, axis); i++)
            spans += mesh_group_member(m, r, axis, i) / ranks_each != mesh_group_member(m, r, axis, i - 1) / ranks_each;
        most = spans > most ? spans : most;
    }
    return most;
}

/* Are two ranks in one group of the axis? */
static int mesh_together(const Mesh *m, int a, int b, Axis axis) {
    int colour[2], key;
    mesh_group(m, a, axis, &colour[0], &key);
    mesh_group(m, b, axis, &colour[1], &key);
    return colour[0] == colour[1];
}

/* Ranks that train on samples of their own; those of other axes share them. Which one of them a rank is, in the
 * sampler's order. */
static inline int mesh_data_ranks(const Mesh *m) { return m->size[AXIS_DP_SHARD] * m->size[AXIS_DP_REPLICATE]; }
static inline int mesh_data_rank(const Mesh *m, int rank) { return rank / mesh_stride(m, AXIS_DP_SHARD); }

/* The first of those that share samples: what they have in common, it alone tells. */
static inline int mesh_tells_samples(const Mesh *m, int rank) { return rank % mesh_stride(m, AXIS_DP_SHARD) == 0; }

typedef struct {
    int size[MESH_AXES];
    double away;
} NearMesh;

/* Goes through all layouts of `left` ranks over axes from `axis` on; keeps the `count` that are nearest to what was
 * asked for. */
static void meshes_near(NearMesh *nearest, int count, NearMesh *m, int axis, int left, const int *asked) {
    for (int n = 1; n <= left; n++) {
        double away = m->away;
        if (left % n || (axis == AXIS_DP_REPLICATE && n != left)) continue;
        m->size[axis] = n, m->away += fabs(log((double)n / asked[axis])) *
                                      (axis < AXIS_DP_SHARD ? 8 : 1); // what splits the model is changed last
        int place = count;
        while (axis == AXIS_DP_REPLICATE && place > 0 && m->away < nearest[place - 1].away) place--;
        if (axis < AXIS_DP_REPLICATE && m->away < nearest[count - 1].away)
            meshes_near(nearest, count, m, axis + 1, left / n, asked);
        if (place < count) {
            memmove(nearest + place + 1, nearest + place, sizeof *nearest * (size_t)(count - 1 - place));
            nearest[place] = *m;
        }
        m->away = away;
    }
}

/* "tp 8 x cp 16 x …", or without names "8 x 16 x …". */
static size_t mesh_print(char *text, size_t size, const int *ranks, int names) {
    static const char *const options[] = {"tp", "cp", "pp", "dp-shard", "dp-replicate"};
    size_t used = 0;
    for (int a = 0; a < MESH_AXES && used < size; a++)
        used += (size_t)snprintf(text + used, size - used, "%s%s%s%d", a ? " x " : "", names ? options[a] : "",
                                 names ? " " : "", ranks[a]);
    return used;
}

/* `asked`: ranks of each axis; 0, of one at most: as many as the others leave. Refused where they do not make up the
 * world. `planned`: of which nobody was started. */
static Mesh mesh_open(int world, const int asked[MESH_AXES], int planned) {
    Mesh m = {world, {1, 1, 1, 1, 1}};
    double product = 1;
    int open = -1;
    for (int a = 0; a < MESH_AXES; a++) {
        m.size[a] = asked[a];
        if (asked[a]) product *= asked[a];
        else if (open >= 0)
            user_error("--%s auto and --%s auto: only one of them follows from the others, the other must be a number",
                       open == AXIS_DP_SHARD ? "dp-shard" : axis_names[open],
                       a == AXIS_DP_REPLICATE ? "dp-replicate" : axis_names[a]);
        else open = a;
    }
    if (open >= 0) m.size[open] = (int)fmax(1, floor(world / product)), product *= m.size[open];
    if (product == world) return m;
    enum { LISTED = 4 };
    char said[160], fits[256];
    NearMesh nearest[LISTED], none = ZERO;
    size_t used = 0;
    for (int i = 0; i < LISTED; i++) nearest[i].away = INFINITY;
    meshes_near(nearest, LISTED, &none, 0, world, m.size);
    for (int i = 0; i < LISTED && isfinite(nearest[i].away); i++) {
        if (i) used += (size_t)snprintf(fits + used, sizeof fits - used, ", ");
        used += mesh_print(fits + used, sizeof fits - used, nearest[i].size, 0);
    }
    mesh_print(said, sizeof said, m.size, 1);
    user_error("%s = %.0f ranks, but %d %s: %s %.0f ranks, or choose tp x cp x pp x dp-shard x dp-replicate = %s", said,
               product, world,
               planned      ? "are planned"
               : world == 1 ? "was started"
                            : "were started",
               planned ? "plan" : "start", product, fits);
}

#endif
