/* monitor.h: the heartbeat table of ranks that are processes, and the monitor that watches them.
 *
 * The first rank of each host forks the monitor before MPI starts. It reads the heartbeat table fifty times a second,
 * and ends the run if a rank was killed, or has shown no sign of life for longer than its limit: stopped, or stuck
 * where it cannot check a timeout itself, in MPI_Init or on a disk. Empty in a build without MPI.
 */
#ifndef MONITOR_H
#define MONITOR_H
#include "culprit.h" // defines: list_interfaces, say_network, say_unanswered_connections

#ifdef HAVE_MPI
// ---------------------------------------------------------------------------
// the monitor

/* Sends a signal to each rank of this host that is alive. */
static inline void monitor_signals(HeartbeatTable *table, int signal_number) {
    for (int i = 0; i < table->attached; i++) {
        Heartbeat *k = heartbeat_at(table, i);
        if (k->process && k->pid_space == process_space() && process_state(k) != PROCESS_DIED)
            kill(k->process, signal_number);
    }
}

/* What the monitor sees when it looks at all ranks of its host. */
typedef struct {
    int present, alive, died; // ranks in the table; that have not ended; that died unexpectedly
    Heartbeat *late;          // a rank without a sign of life beyond its limit, or NULL
    Heartbeat *stopped;       // a stopped one, or NULL
    double connecting;        // seconds for which a rank has been connecting; 0: none is
} MonitorView;

static inline void monitor_look_at(HeartbeatTable *table, Heartbeat *k, MonitorView *view, Sentence *t) {
    if (!__atomic_load_n(&k->process, __ATOMIC_ACQUIRE)) { // it is about to write its record
        view->alive++;
        return;
    }
    double now = seconds_now();
    ProcessState process = process_state(k);
    view->present++;
    if (__atomic_load_n(&k->state, __ATOMIC_ACQUIRE) == RANK_ENDED) return;
    if (process == PROCESS_STOPPED) view->stopped = k;
    if (process != PROCESS_DIED) {
        view->alive++;
        double grace = 0.5;
        if (process == PROCESS_RUNS && k->state == RANK_WAITING) // a waiting rank checks its own timeout
            grace = table->world > table->attached ? 2.8 + (double)ASKING_HOSTS : 2.5;
        if (k->phase == PHASE_CONNECT && k->lines.rank) // the host of rank 0 ends the run, the others if it does not
            grace += 5 + 0.3 * (double)min_i64(10, k->lines.rank);
        if (k->phase == PHASE_CONNECT && process == PROCESS_STOPPED) grace = 0; // its host is the first to say so
        int is_late = now - last_sign(k) > phase_limit(table, k->phase) + grace;
        if (k->phase == PHASE_CONNECT) view->connecting = fmax(view->connecting, now - last_sign(k));
        if (is_late && !view->late) view->late = k;
        return;
    }
    if (k->told_to_end || view->died++ >= 4) return;
    if (view->died > 1) say(t, ". Also ");
    say_rank(t, table, k, process, now);
    if (k->started[AXIS_FSDP]) say_last_collective(t, k, AXIS_FSDP);
}

/* The ranks of this host are still connecting after the time that they may take: prints what this host's network looks
 * like. Each host does so before the first of them ends the run. */
static inline void monitor_note_network(const HeartbeatTable *table) {
    char text[2048];
    Sentence t = {text, sizeof text - 1, 0};
    Interface list[MAX_INTERFACES];
    int count = list_interfaces(list);
    say(&t, "note: host %s has the network interfaces ", table->host);
    for (int i = 0; i < count; i++) {
        say(&t, "%s%s ", i ? ", " : "", list[i].name);
        say_network(&t, list[i].address, list[i].mask);
    }
    if (!count) say(&t, "none but the loopback");
    if (table->unanswered[0]) say(&t, "; nobody answered its connections from %s", table->unanswered);
    text[t.used++] = '\n';
    (void)!write(STDERR_FILENO, text, t.used); // the failure follows in any case
}

/* The ranks of this host did not find the others. */
static inline void monitor_say_unconnected(HeartbeatTable *table, const MonitorView *view, Sentence *t) {
    say(t, "the ranks of host %s, ", table->host);
    for (int i = 0; i < view->present; i++) say(t, "%s%d", i ? ", " : "", heartbeat_at(table, i)->lines.rank);
    say(t, ", are not connected to all others after %.6g s", table->start_timeout);
    if (view->stopped) {
        say(t, "; ");
        say_rank(t, table, view->stopped, PROCESS_STOPPED, seconds_now());
    } else if (table->expected > view->present)
        say(t, "; %d of this host's %d ranks never started this program", table->expected - view->present,
            table->expected);
    say(t, ". If the hosts have several networks, name the one that connects them, for example with --mca "
           "btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 after mpirun, or OMPI_MCA_btl_tcp_if_include=eth0 "
           "in the environment of srun; a firewall must let their ports through");
}

/* Describes a rank that is late, and what may be the reason. */
static inline void monitor_say_late(HeartbeatTable *table, const MonitorView *view, Sentence *t) {
    Heartbeat *late = view->late;
    if (late->phase == PHASE_CONNECT) {
        monitor_say_unconnected(table, view, t);
        return;
    }
    double now = seconds_now(), limit = phase_limit(table, late->phase);
    say(t, "no sign of life for %.1f s in %s: ", now - last_sign(late), phases[late->phase].name);
    say_rank(t, table, late, process_state(late), now);
    if (view->stopped && view->stopped != late) {
        say(t, "; ");
        say_rank(t, table, view->stopped, PROCESS_STOPPED, now);
    } else if (late->state == RANK_WAITING && late != view->stopped && table->mesh.world) {
        WorldNews news = {&table->mesh, table, limit, 0, new_array(RankNews, table->mesh.world)};
        news_of_host(&news);
        say(t, "; ");
        say_culprits(t, &news, late->lines.rank, late->wait_line, late->wait_number);
        free(news.ranks);
    }
    say(t, ". The limit here is %.6g s (%d x --timeout)", limit, phases[late->phase].limit);
}

/* Looks at all ranks of this host, and ends them if one has died or is late. Returns how many have not ended. */
static inline int monitor_look(HeartbeatTable *table) {
    char text[4096] = "failure: ";
    Sentence t = {text, sizeof text - 1, strlen(text)}; // room for a line break
    MonitorView view = ZERO;
    int ranks = __atomic_load_n(&table->attached, __ATOMIC_ACQUIRE), none = 0;
    for (int i = 0; i < ranks; i++) monitor_look_at(table, heartbeat_at(table, i), &view, &t);
    if (view.connecting > 0.5) { // notes who does not answer now, since an attempt to connect ends after some seconds
        char unanswered[sizeof table->unanswered];
        Sentence connections = {unanswered, sizeof unanswered, 0};
        if (say_unanswered_connections(&connections)) memcpy(table->unanswered, unanswered, sizeof unanswered);
    }
    if (view.connecting > table->start_timeout && !table->network_noted) {
        table->network_noted = 1;
        monitor_note_network(table);
    }
    if (__atomic_load_n(&table->said, __ATOMIC_SEQ_CST) || (!view.died && !view.late)) return view.alive;
    if (view.died > 4) say(&t, ", and %d more", view.died - 4);
    if (view.died) say(&t, ".");
    if (!view.died) monitor_say_late(table, &view, &t);
    if (!__atomic_compare_exchange_n(&table->said, &none, 2, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return view.alive; // a rank of this host has reported a failure meanwhile
    text[t.used++] = '\n';
    (void)!write(STDERR_FILENO, text, t.used); // the ranks are ended in any case
    heartbeats_write_flights(table);
    monitor_signals(table, SIGTERM); // they exit with 2, and their launcher ends the other hosts
    monitor_signals(table, SIGCONT); // so that also stopped ones receive it
    return view.alive;
}

/* The monitor's process: runs until all ranks of its host have ended. */
__attribute__((noreturn)) static inline void monitor(HeartbeatTable *table) {
    static const int ignored[] = {SIGPIPE, SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2}; // it ends after its ranks
    double said_at = 0;
    int null = open("/dev/null", O_RDWR);
    setsid(); // the launcher signals the ranks' process groups
    for (int i = 0; i < (int)(sizeof ignored / sizeof *ignored); i++) signal(ignored[i], SIG_IGN);
    dup2(null, STDIN_FILENO);
    dup2(null, STDOUT_FILENO); // launchers wait until all processes have closed their pipes
    for (int fd = 3; fd < 256; fd++) close(fd);
    while (monitor_look(table)) {
        usleep(20000);
        if (!said_at && __atomic_load_n(&table->said, __ATOMIC_SEQ_CST)) said_at = seconds_now();
        if (said_at && seconds_now() - said_at > 2) monitor_signals(table, SIGKILL);
    }
    int ended = 1;
    for (int i = 0; i < table->attached; i++) ended &= heartbeat_at(table, i)->state == RANK_ENDED;
    if (!ended && table->said != 1) heartbeats_write_flights(table); // ended from outside: another host may have failed
    unlink(table->name); // in case start-up did not get as far as removing it
    _exit(0);
}

// ---------------------------------------------------------------------------
// a process joins the table of its host

/* A signal by which the launcher ends this process, perhaps because a failure was reported. */
static inline void end_on_signal(int number) {
    if (own_heartbeat.table->said) _exit(own_heartbeat.table->said);
    end_by_signal(number);
}

/* The name of the shared file: the same for all ranks of one launch on one host, and no other. */
static inline void heartbeats_file_name(char *name, size_t size) {
    // the addresses of the launcher's server cannot be guessed by other users
    static const char *const job[] = {
        "PMIX_NAMESPACE", "PMIX_SERVER_URI2", "PMIX_SERVER_URI41", "OMPI_MCA_ess_base_jobid",
        "SLURM_JOB_ID",   "SLURM_STEP_ID",    "PMI_JOBID"};
    uint64_t h = HASH_START;
    for (int i = 0; i < (int)(sizeof job / sizeof *job); i++) {
        const char *value = getenv(job[i]);
        if (value) h = hash_bytes(h, value, strlen(value) + 1);
    }
    if (h == HASH_START) h = (uint64_t)getppid(); // the launcher, if it gave the job no name
    snprintf(name, size, "%s/llama3-%d-%016" PRIx64, access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm", (int)getuid(),
             mix64(h));
}

__attribute__((noreturn)) static inline void sharing_failed(const char *name, int error) {
    user_error(
        "cannot create or open %s, which the ranks of this host share (%s): free space there, or remove it if it "
        "is not yours",
        name, strerror(error));
}

/* Opens the file of this host's table; whichever rank comes first creates it. Anybody may create files in /dev/shm, so
 * one that is there already must belong to this user, and be closed to all others. */
static inline int heartbeats_open_file(const char *name) {
    struct stat info;
    int fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 && errno == EEXIST) fd = open(name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &info)) sharing_failed(name, errno);
    if (!S_ISREG(info.st_mode) || info.st_uid != geteuid() || info.st_mode & 077 || info.st_nlink > 1)
        user_error("%s, which the ranks of this host share, was there already, and is not a file that only this user "
                   "can open: it belongs to user %d and has mode %o; remove it, or find out who created it",
                   name, (int)info.st_uid, (unsigned)info.st_mode);
    if (ftruncate(fd, (off_t)heartbeats_bytes(MAX_LOCAL_RANKS))) sharing_failed(name, errno);
    return fd;
}

/* Opens this host's table. *index: this rank's place in it. */
static inline HeartbeatTable *heartbeats_attach(const char *name, int *index) {
    int fd = heartbeats_open_file(name);
    int error = reserve_file(fd, 0, sizeof(HeartbeatTable));
    if (error) sharing_failed(name, error);
    void *p = mmap(NULL, heartbeats_bytes(MAX_LOCAL_RANKS), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) sharing_failed(name, errno);
    HeartbeatTable *table = (HeartbeatTable *)p;
    int i = __atomic_fetch_add(&table->attached, 1, __ATOMIC_SEQ_CST);
    if (i >= MAX_LOCAL_RANKS) {
        __atomic_fetch_sub(&table->attached, 1, __ATOMIC_SEQ_CST);
        user_error("more than %d ranks were started on this host: start at most %d", MAX_LOCAL_RANKS, MAX_LOCAL_RANKS);
    }
    error = reserve_file(fd, (int64_t)heartbeats_bytes(i), sizeof(Heartbeat));
    if (error) sharing_failed(name, error);
    close(fd);
    *index = i;
    return table;
}

/* Adds this process to the table of its host; the first one starts the monitor. */
static inline void heartbeats_join(double timeout, double start_timeout, int rank, int world) {
    static const char *const local_size[] = {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"};
    char name[64];
    int i;
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before); // until the monitor exists, which removes the file if this process ends
    heartbeats_file_name(name, sizeof name);
    HeartbeatTable *table = heartbeats_attach(name, &i);
    Heartbeat *me = heartbeat_at(table, i);
    own_heartbeat.table = table;
    own_heartbeat.record = me;
    process_end.said = &table->said;
    process_end.last_words = heartbeats_last_words;
    if (i == 0) {
        table->world = world;
        table->timeout = timeout;
        table->start_timeout = start_timeout;
        gethostname(table->host, sizeof table->host - 1);
        snprintf(table->name, sizeof table->name, "%s", name);
        table->expected = number_in_environment(local_size, 2, 0);
    }
    heartbeat_init(me, rank);
    if (i == 0) {
        pid_t pid = fork();
        if (pid < 0) run_failure("could not start the monitor of this host's ranks (%s)", strerror(errno));
        if (pid == 0) {
            sigprocmask(SIG_SETMASK, &before, NULL);
            monitor(table);
        }
        own_heartbeat.monitor = pid;
    }
    static const int signals[] = {SIGTERM, SIGINT, SIGHUP};
    for (int k = 0; k < 3; k++) {
        struct sigaction now;
        sigaction(signals[k], NULL, &now);
        if (now.sa_handler == SIG_DFL) signal(signals[k], end_on_signal); // training handles SIGTERM itself
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
}
#endif

#endif
