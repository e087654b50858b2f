/* mesh.h: the mesh of ranks with named axes, from inside out tp, cp, pp, dp_shard, dp_replicate (the order of the Llama
 * 3 paper, section 3.3.2), the groups of ranks along each axis, what they exchange, and their hosts.
 *
 * A rank's coordinates and groups follow from its number by arithmetic. The sizes of the axes multiply to the number of
 * ranks; if not, mesh_open ends the run and shows the arithmetic.
 */
#ifndef MESH_H
#define MESH_H
#include "../device/base.h"

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
static const char *const axis_options[MESH_AXES] = {"tp", "cp", "pp", "dp-shard", "dp-replicate"};

typedef struct {
    int world;           // number of ranks
    int size[MESH_AXES]; // their product is world
} Mesh;

/* The distance in rank numbers between neighbors on an axis. */
static inline int mesh_stride(const Mesh *mesh, Axis axis) {
    int stride = 1;
    for (int a = 0; a < (int)axis; a++) stride *= mesh->size[a];
    return stride;
}

/* A rank's coordinate on an axis. */
static inline int mesh_coordinate(const Mesh *mesh, int rank, Axis axis) {
    return rank / mesh_stride(mesh, axis) % mesh->size[axis];
}

static inline int mesh_group_size(const Mesh *mesh, Axis axis) {
    if (axis == AXIS_WORLD) return mesh->world;
    if (axis == AXIS_FSDP) return mesh->size[AXIS_CP] * mesh->size[AXIS_DP_SHARD];
    return mesh->size[axis];
}

/* The group of a rank along an axis, as MPI_Comm_split wants it: *colour is the number of its first rank, and *key is
 * this rank's place in it. */
static inline void mesh_group(const Mesh *mesh, int rank, Axis axis, int *colour, int *key) {
    int cp = mesh_coordinate(mesh, rank, AXIS_CP), shard = mesh_coordinate(mesh, rank, AXIS_DP_SHARD);
    if (axis == AXIS_WORLD) {
        *colour = 0;
        *key = rank;
    } else if (axis == AXIS_FSDP) {
        *colour = rank - cp * mesh_stride(mesh, AXIS_CP) - shard * mesh_stride(mesh, AXIS_DP_SHARD);
        *key = shard * mesh->size[AXIS_CP] + cp;
    } else {
        *key = mesh_coordinate(mesh, rank, axis);
        *colour = rank - *key * mesh_stride(mesh, axis);
    }
}

/* The number in the world of member `i` of the group with that colour. */
static inline int mesh_group_member(const Mesh *mesh, int colour, Axis axis, int i) {
    int cp = mesh->size[AXIS_CP], stride = mesh_stride(mesh, AXIS_CP);
    if (axis == AXIS_WORLD) return i;
    if (axis == AXIS_FSDP) return colour + i % cp * stride + i / cp * mesh_stride(mesh, AXIS_DP_SHARD);
    return colour + i * mesh_stride(mesh, axis);
}

/* The number in the world of member `i` of the group that `rank` is in. */
static inline int mesh_member(const Mesh *mesh, int rank, Axis axis, int i) {
    int colour, key;
    mesh_group(mesh, rank, axis, &colour, &key);
    return mesh_group_member(mesh, colour, axis, i);
}

/* The number of data-parallel ranks, each with samples of its own; the ranks of tp, cp and pp share samples. */
static inline int mesh_data_ranks(const Mesh *mesh) {
    return mesh->size[AXIS_DP_SHARD] * mesh->size[AXIS_DP_REPLICATE];
}

/* Which data-parallel rank this is, in the sampler's order. */
static inline int mesh_data_rank(const Mesh *mesh, int rank) { return rank / mesh_stride(mesh, AXIS_DP_SHARD); }

/* Is this the first of the ranks that share samples? It counts them for all of these. */
static inline int mesh_counts_samples(const Mesh *mesh, int rank) { return !(rank % mesh_stride(mesh, AXIS_DP_SHARD)); }

// ---------------------------------------------------------------------------
// opening a mesh, and the error when it does not fit the ranks

typedef struct {
    int size[MESH_AXES];
    double distance; // from the sizes that were asked for
} MeshCandidate;

/* Tries all divisions of `left` ranks among `axis` and the axes after it, and keeps the `count` nearest to `asked`,
 * sorted by distance. The axes before dp_shard weigh more, because changing them changes how the model is split. */
static inline void mesh_candidates(MeshCandidate *nearest, int count, MeshCandidate *candidate, int axis, int left,
                                   const int *asked) {
    int is_last = axis == AXIS_DP_REPLICATE, weight = axis < AXIS_DP_SHARD ? 8 : 1;
    double distance = candidate->distance;
    for (int n = is_last ? left : 1; n <= left; n++) {
        if (left % n) continue;
        candidate->size[axis] = n;
        candidate->distance = distance + weight * fabs(log((double)n / asked[axis]));
        if (candidate->distance >= nearest[count - 1].distance) continue;
        if (!is_last) {
            mesh_candidates(nearest, count, candidate, axis + 1, left / n, asked);
            continue;
        }
        int place = count - 1; // the last of the list is dropped
        while (place > 0 && candidate->distance < nearest[place - 1].distance) place--;
        memmove(nearest + place + 1, nearest + place, sizeof *nearest * (size_t)(count - 1 - place));
        nearest[place] = *candidate;
    }
    candidate->distance = distance;
}

/* Prints "tp 8 x cp 16 x …", or without names "8 x 16 x …". Returns its length. */
static inline size_t mesh_print(char *text, size_t size, const int *ranks, int names) {
    size_t used = 0;
    for (int a = 0; a < MESH_AXES && used < size; a++)
        used += (size_t)snprintf(text + used, size - used, "%s%s%s%d", a ? " x " : "", names ? axis_options[a] : "",
                                 names ? " " : "", ranks[a]);
    return used;
}

/* Ends the run, because the axes' sizes multiply to `product`, which is not the number of ranks. Shows the nearest
 * meshes that fit. */
__attribute__((noreturn)) static inline void mesh_refuse(const Mesh *mesh, double product, int planned) {
    enum { SHOWN = 4 };
    char given[160], fitting[256];
    MeshCandidate nearest[SHOWN], none = ZERO;
    size_t used = 0;
    for (int i = 0; i < SHOWN; i++) nearest[i].distance = INFINITY;
    mesh_candidates(nearest, SHOWN, &none, 0, mesh->world, mesh->size);
    for (int i = 0; i < SHOWN && isfinite(nearest[i].distance); i++) {
        if (i) used += (size_t)snprintf(fitting + used, sizeof fitting - used, ", ");
        used += mesh_print(fitting + used, sizeof fitting - used, nearest[i].size, 0);
    }
    mesh_print(given, sizeof given, mesh->size, 1);
    const char *are_started = mesh->world == 1 ? "was started" : "were started";
    user_error("%s = %.0f ranks, but %d %s: %s %.0f ranks, or choose tp x cp x pp x dp-shard x dp-replicate = %s",
               given, product, mesh->world, planned ? "are planned" : are_started, planned ? "plan" : "start", product,
               fitting);
}

/* The mesh of `world` ranks with the sizes `asked`. One of them may be 0: it gets the ranks that the others leave.
 * `planned`: for a plan, so that no ranks were started. */
static inline Mesh mesh_open(int world, const int asked[MESH_AXES], int planned) {
    Mesh mesh = {world, {1, 1, 1, 1, 1}};
    double product = 1;
    int open = -1;
    for (int a = 0; a < MESH_AXES; a++) {
        mesh.size[a] = asked[a];
        if (asked[a]) product *= asked[a];
        else if (open >= 0)
            user_error("--%s auto and --%s auto: only one of them follows from the others, the other must be a number",
                       axis_options[open], axis_options[a]);
        else open = a;
    }
    if (open >= 0) {
        mesh.size[open] = (int)fmax(1, floor(world / product));
        product *= mesh.size[open];
    }
    if (product == world) return mesh;
    mesh_refuse(&mesh, product, planned);
}

// ---------------------------------------------------------------------------
// what the ranks of a group exchange

/* A reduce-scatter delivers the parts of all members side by side, as an all-to-all does, and the caller adds them in
 * its own order. A send and a receive are the two ends of a message. */
typedef enum { ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE, COLLECTIVES } Collective;
static const char *const collective_names[COLLECTIVES] = {"all_gather", "reduce_scatter", "all_to_all", "send",
                                                          "receive"};

typedef struct {
    int64_t calls;
    int64_t bytes; // that one rank receives from other ranks; of sends, bytes that it sends
} Traffic;

// ---------------------------------------------------------------------------
// which host each rank of the run is on, so that every message about a rank can name its host

typedef struct {
    char name[64];
    int first_rank; // the lowest rank on this host
    int ranks;      // how many of the run's ranks are on it
    uint64_t id;    // unique for each host of the run
} RunHost;

/* A mutable global like process_end: there is one for each process, and it is filled once, when the processes of a run
 * have found each other (comm_open.h). Ranks that are threads of one process have one host, and no table of ranks. */
static struct {
    int count;      // hosts, in the order of their first ranks; 0: not known yet
    RunHost *hosts; // (count)
    int *of_rank;   // (ranks of the run) index into `hosts`; NULL: all ranks are threads of one process
} run_hosts;

/* The host of a rank. */
static inline const RunHost *host_of_rank(int rank) {
    return &run_hosts.hosts[run_hosts.of_rank ? run_hosts.of_rank[rank] : 0];
}

/* The ranks of the run are threads of this process. */
static inline void run_hosts_of_threads(int ranks) {
    free(run_hosts.of_rank);
    run_hosts.of_rank = NULL;
    run_hosts.hosts[0].ranks = ranks;
}

/* "rank 2 on host n2"; "rank 2" if all ranks are on one host. Valid until the eighth next call by the same thread. */
static inline const char *rank_name(int rank) {
    static __thread char names[8][96];
    static __thread int next;
    char *name = names[next];
    next = (next + 1) % 8;
    int used = snprintf(name, sizeof names[0], "rank %d", rank);
    if (run_hosts.count > 1)
        snprintf(name + used, sizeof names[0] - (size_t)used, " on host %s", host_of_rank(rank)->name);
    return name;
}

#endif
