/* target_cluster.h: cluster files.
 * Input: a byte that chooses the layout and the transport, then the file.
 */
#ifndef TARGET_CLUSTER_H
#define TARGET_CLUSTER_H

static void check_collective(const CollectiveRate *rate, int axis, int collective) {
    static const double sizes[] = {0, 1, 1000, 1e6, 1e9, 1e15};
    EXPECT(rate->points >= 0 && rate->points <= MAX_POINTS, "%d points were taken", rate->points);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        double seconds = collective_seconds(rate, sizes[i]);
        EXPECT(seconds >= 0, "axis %d, collective %d: %g bytes take %g s", axis, collective, sizes[i], seconds);
    }
}

static void check_cluster(const Cluster *c, const Mesh *mesh) {
    EXPECT(c->name[0] && c->rates.count >= RATED_OPS && c->rates.memory > 0 && c->memory >= 0 && c->peak > 0,
           "%d rates, memory %g, peak %g were taken", c->rates.count, c->rates.memory, c->peak);
    EXPECT(c->ranks_per_host >= 1 && c->ranks_per_host <= mesh->world && c->hosts_per_rack >= 0 && c->storage >= 0,
           "%d ranks per host, %d hosts per rack, storage %g were taken", c->ranks_per_host, c->hosts_per_rack,
           c->storage);
    for (int i = 0; i < c->rates.count; i++)
        EXPECT(c->rates.ops[i].rate > 0 && c->rates.ops[i].intensity > 0 && isfinite(c->rates.ops[i].intensity),
               "op %d: rate %g, intensity %g", i, c->rates.ops[i].rate, c->rates.ops[i].intensity);
    for (int a = 0; a < AXES; a++)
        for (int o = 0; o < COLLECTIVES && mesh_group_size(mesh, (Axis)a) > 1; o++)
            check_collective(&c->collectives[a][o], a, o);
}

static void fuzz_cluster(Bytes in) {
    static const Mesh layouts[4] = {
        {1, {1, 1, 1, 1, 1}}, {2, {1, 1, 1, 2, 1}}, {8, {2, 1, 2, 2, 1}}, {64, {4, 2, 1, 4, 2}}};
    Cluster c;
    int kind = next_byte(&in);
    const char *path = give("cluster.json", in.at, in.left);
    const Mesh *mesh = &layouts[kind % 4];
    int sums = kind >> 5 & 1;
    cluster_open(&c, path, mesh, kind >> 2 & 1, kind >> 3 & 1 ? "threads" : "auto", sums);
    held.taken = 1;
    check_cluster(&c, mesh);
    cluster_close(&c);
}

static const char *const cluster_words[] = {
    "\"name\":\"a\"",
    "\"rates_of\":\"host\"",
    "\"rates_of\":\"device\"",
    "\"cores_per_host\":8",
    "\"ranks_per_host\":4",
    "\"hosts_per_rack\":2",
    "\"memory_bytes_per_s\":1e9",
    "\"memory_bytes_per_host\":1e9",
    "\"storage_bytes_per_s\":1e9",
    "\"peak_flops_per_s\":{\"fp32\":1e12}",
    "{\"dtype\":\"fp32\",\"op\":\"linear_forward\",\"M\":8,\"N\":8,\"K\":8,\"flops_per_s\":1e9}",
    "\"op\":\"linear_backward_weight\"",
    "\"op\":\"attention_forward\"",
    "\"dtype\":\"bf16\"",
    "\"flops_per_s\":1e9",
    "\"links\":{\"within_host\":{\"latency_s\":0,\"bytes_per_s\":1e9}}",
    "\"between_hosts\":{\"latency_s\":1e-6,\"bytes_per_s\":1e8}",
    "{\"transport\":\"threads\",\"ranks\":2,\"hosts\":1,\"op\":\"all_gather\",\"latency_s\":1,\"bytes_per_s\":1}",
    "\"op\":\"reduce_scatter\"",
    "\"measured_bytes\":[256,1024]",
    "\"measured_s\":[1e-6,2e-6]",
    NULL};

#endif
