/* test_hosts.h: what check_hosts measures and concludes, as far as one host can show it. dev/test/hosts.sh runs it on
 * several hosts. */
#ifdef HAVE_MPI
/* In the rounds of a tournament each pair of hosts must meet exactly once, and both partners must agree. */
static void test_tournament(void) {
    enum { MOST = 33 };
    int wrong = 0, pairs = 0;
    for (int count = 2; count <= MOST; count++) {
        int met[MOST][MOST] = ZERO;
        for (int round = 0; round < count - 1 + count % 2; round++)
            for (int host = 0; host < count; host++) {
                int partner = partner_in_round(host, round, count);
                if (partner < 0) continue;
                wrong += partner == host || partner_in_round(partner, round, count) != host;
                met[host][partner]++;
            }
        for (int a = 0; a < count; a++)
            for (int b = 0; b < a; b++) {
                wrong += met[a][b] != 1 || met[b][a] != 1;
                pairs++;
            }
    }
    CHECK("every pair of 2 to 33 hosts is measured once, by both of its hosts", wrong == 0, "%d of %d pairs wrong",
          wrong, pairs);
}
#endif

static Interface interface_of(const char *name, const char *address, const char *mask) {
    Interface i = ZERO;
    snprintf(i.name, sizeof i.name, "%s", name);
    inet_pton(AF_INET, address, &i.address);
    inet_pton(AF_INET, mask, &i.mask);
    return i;
}

/* Two "hosts" on the loopback network, where 127.0.0.x are addresses of this machine. */
static void test_networks(void) {
    Listener listener = ZERO;
    HostNetwork own = ZERO, other = ZERO, impostor, deaf;
    const HostNetwork *others[3] = {&other, &impostor, &deaf};
    uint8_t states[3][MAX_INTERFACES];
    own.count = 3;
    own.interfaces[0] = interface_of("lo", "127.0.0.1", "255.0.0.0");
    own.interfaces[1] = interface_of("docker0", "172.17.0.1", "255.255.0.0");
    own.interfaces[2] = interface_of("eth9", "10.1.2.3", "255.255.255.0");
    other = own;
    other.interfaces[0] = interface_of("lo", "127.0.0.2", "255.0.0.0");
    other.interfaces[2] = interface_of("eth9", "10.1.3.3", "255.255.255.0");
    other.id = 7;
    other.port = listener_open(&listener, other.id);
    impostor = deaf = other;
    impostor.id = 8; // another process answers at its address
    deaf.port = htons(1);
    try_networks(&own, others, 3, states);
    listener_close(&listener);
    CHECK("a network counts as connecting two hosts only if the right host answers",
          states[0][0] == CONNECTS && states[1][0] == NOT_CONNECTED && states[2][0] == NOT_CONNECTED,
          "right host %d, another one %d, none %d", states[0][0], states[1][0], states[2][0]);
    CHECK("two hosts with one address on a network, and networks that only one host has, are told apart",
          states[0][1] == SAME_ADDRESS && states[0][2] == NOT_SHARED && states[0][3] == NOT_SHARED, "%d %d %d",
          states[0][1], states[0][2], states[0][3]);
    const Interface *eth9 = &own.interfaces[2];
    CHECK("a list of interfaces holds names and networks, which may be larger than the interface's own",
          names_interface("ib0,eth9", eth9) && names_interface("10.1.2.0/24", eth9) &&
              names_interface("10.0.0.0/8", eth9) && !names_interface("eth90,10.2.0.0/16", eth9),
          "eth9 10.1.2.3/24");
}

/* check_hosts compares the communication of a step with and without hybrid sharding by these times. */
static void test_step_communication(void) {
    AxisRate axes[2] = ZERO;
    axes[0].axis = AXIS_FSDP;
    axes[0].ranks = 4;
    axes[1].axis = AXIS_DP_REPLICATE;
    axes[1].ranks = 2;
    for (int a = 0; a < 2; a++) {
        axes[a].sizes = 1;
        axes[a].bytes[0] = 1e6;
        for (int c = ALL_GATHER; c <= REDUCE_SCATTER; c++) axes[a].seconds[c][0] = a ? 1 : 1e-3; // 1 MB/s, 1 GB/s
    }
    double parameters = 4e6, within = 3e6 * (2 * sizeof(floatX) + sizeof(float)) / 1e9;
    double between = 0.5e6 * 2 * sizeof(float) / 1e6, found = step_communication(axes, 2, parameters);
    CHECK("the communication of a step: weights twice, gradients once, and shards of gradients between replicas",
          fabs(found / (within + between) - 1) < 1e-12, "%.6g s, expected %.6g s", found, within + between);
    CHECK("without replicas only FSDP communicates", fabs(step_communication(axes, 1, parameters) / within - 1) < 1e-12,
          "%.6g s, expected %.6g s", step_communication(axes, 1, parameters), within);
}

static void test_check_hosts(void) {
#ifdef HAVE_MPI
    test_tournament();
#endif
    test_networks();
    test_step_communication();
}
