/* test_hard_places.h: the limits of containers, a heartbeat file that another program has put there, and the stack on
 * which signals are handled. */

/* Writes a file of a fake hierarchy of control groups under the scratch directory. */
static void group_write(const char *group, const char *name, const char *text) {
    char path[1024];
    snprintf(path, sizeof path, "%s", scratch_path(group));
    make_directories(path);
    snprintf(path + strlen(path), sizeof path - strlen(path), "/%s", name);
    test_write(path, text, strlen(text));
}

/* The limits by these contents of /proc/self/cgroup and /proc/self/mountinfo; %s stands for the scratch directory. */
static ContainerLimits limits_by(const char *groups, const char *mounts) {
    char text[2048], paths[2][512];
    snprintf(paths[0], sizeof paths[0], "%s", scratch_path("cgroup"));
    snprintf(paths[1], sizeof paths[1], "%s", scratch_path("mountinfo"));
    test_write(paths[0], groups, strlen(groups));
    snprintf(text, sizeof text, mounts, scratch_dir, scratch_dir);
    test_write(paths[1], text, strlen(text));
    return container_limits_of(paths[0], paths[1]);
}

static void test_container_limits(void) {
    group_write("groups2", "memory.max", "max\n");
    group_write("groups2/a", "cpu.max", "150000 100000\n");
    group_write("groups2/a", "memory.max", "1000000\n");
    group_write("groups2/a", "memory.stat", "anon 400000\nfile 300000\n");
    group_write("groups2/a/b", "cpu.max", "max 100000\n");
    group_write("groups2/a/b", "memory.max", "900000\n");
    const char *mount2 = "31 23 0:28 / %s/groups2 rw - cgroup2 cgroup2 rw\n";
    ContainerLimits l = limits_by("0::/a/b\n", mount2);
    CHECK("control groups of version 2: the limits of a group hold for those below it",
          l.cpus == 1.5 && l.memory == 6e5, "%g CPUs, %g bytes free", l.cpus, l.memory);
    l = limits_by("0::/\n", mount2);
    CHECK("control groups of version 2: \"max\" is no limit", isinf(l.cpus) && isinf(l.memory), "%g CPUs, %g bytes",
          l.cpus, l.memory);
    l = limits_by("0::/host/pod/a\n", "31 23 0:28 /host/pod %s/groups2 rw - cgroup2 cgroup2 rw\n");
    CHECK("a container that sees only its own part of the hierarchy finds its limits there", l.cpus == 1.5, "%g CPUs",
          l.cpus);
    group_write("cpu1/box", "cpu.cfs_quota_us", "50000\n");
    group_write("cpu1/box", "cpu.cfs_period_us", "100000\n");
    group_write("memory1/box", "memory.limit_in_bytes", "2000000\n");
    group_write("memory1/box", "memory.stat", "cache 5\ntotal_cache 7\ntotal_rss 500000\n");
    l = limits_by("4:memory:/box\n2:cpu,cpuacct:/box\n",
                  "33 31 0:30 / %s/cpu1 rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
                  "35 31 0:32 / %s/memory1 rw,relatime - cgroup cgroup rw,memory\n");
    CHECK("control groups of version 1: quota, period and memory limit", l.cpus == 0.5 && l.memory == 1.5e6,
          "%g CPUs, %g bytes free", l.cpus, l.memory);
    group_write("cpu1/box", "cpu.cfs_quota_us", "-1\n");
    l = limits_by("2:cpu,cpuacct:/box\n", "33 31 0:30 / %s/cpu1 rw,relatime - cgroup cgroup rw,cpu,cpuacct\n");
    CHECK("control groups of version 1: a quota of -1 is no limit", isinf(l.cpus), "%g CPUs", l.cpus);
    l = limits_by("", "");
    CHECK("without control groups there is no limit", isinf(l.cpus) && isinf(l.memory), "%g CPUs", l.cpus);
}

#ifdef HAVE_MPI
static void open_heartbeats(void *path) { close(heartbeats_open_file((const char *)path)); }

static void test_heartbeat_file(void) {
    char path[512], other[512], said[SAID];
    snprintf(path, sizeof path, "%s", scratch_path("heartbeats"));
    snprintf(other, sizeof other, "%s", scratch_path("heartbeats-of-others"));
    int code = child_says(open_heartbeats, path, said, sizeof said);
    struct stat info;
    int found = stat(path, &info);
    CHECK("the heartbeat file is created for this user alone, and its other ranks may open it",
          code == 0 && !found && (info.st_mode & 0777) == 0600 &&
              child_says(open_heartbeats, path, said, sizeof said) == 0,
          "code %d, mode %o", code, found ? 0 : (unsigned)(info.st_mode & 0777));
    chmod(path, 0666);
    expect_user_error("a heartbeat file that others may write to is refused", open_heartbeats, path, "has mode 100666");
    chmod(path, 0600);
    if (link(path, other)) run_failure("cannot create a link for a test");
    expect_user_error("a heartbeat file with another name is refused", open_heartbeats, path, "was there already");
    unlink(other);
    unlink(path);
    if (symlink("elsewhere", path)) run_failure("cannot create a link for a test");
    expect_user_error("a symbolic link in place of the heartbeat file is refused", open_heartbeats, path,
                      "cannot create or open");
    unlink(path);
    if (mkfifo(path, 0600)) run_failure("cannot create a FIFO for a test");
    expect_user_error("a FIFO in place of the heartbeat file is refused", open_heartbeats, path, "was there already");
    unlink(path);
    if (geteuid()) return; // only root can give files away
    test_write(path, "", 0);
    if (chmod(path, 0600) || chown(path, 65534, 65534)) run_failure("cannot give a test file away");
    expect_user_error("a heartbeat file of another user is refused", open_heartbeats, path, "belongs to user 65534");
    unlink(path);
}
#endif

/* Prints + for each signal whose handler takes another stack, and for each thread that is ready for that; else -. */
static void install_signals(void *unused) {
    static const int signals[] = {SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGHUP};
    (void)unused;
    signals_install(0);
    for (int i = 0; i < 5; i++) {
        struct sigaction now;
        sigaction(signals[i], NULL, &now);
        printf("%c", now.sa_handler == SIG_IGN || now.sa_flags & SA_ONSTACK ? '+' : '-');
    }
#ifndef USE_CUDA
    int ready = 0;
    device_prepare_threads(2);
#pragma omp parallel num_threads(2) reduction(+ : ready)
    {
        stack_t stack;
        sigset_t blocked;
        sigaltstack(NULL, &stack);
        pthread_sigmask(SIG_BLOCK, NULL, &blocked);
        ready += !(stack.ss_flags & SS_DISABLE) || sigismember(&blocked, SIGUSR1);
    }
    printf(" %d", ready);
#endif
    fflush(stdout);
}

/* oneDNN's matmuls let the stack pointer point into the heap for a while, where no handler of a signal may write. */
static void test_signal_stacks(void) {
    char said[SAID] = "";
    int code = child_says(install_signals, NULL, said, sizeof said);
    CHECK("handlers of signals never run on the stack of a thread that computes",
          !code && !strcmp(said, CUDA_BUILD ? "+++++" : "+++++ 2"), "code %d: %s", code, said);
}

static void test_hard_places(void) {
    test_container_limits();
    test_signal_stacks();
#ifdef HAVE_MPI
    test_heartbeat_file();
#endif
}
