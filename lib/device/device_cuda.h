/* device_cuda.h: an NVIDIA GPU as a device: errors, launches, memory, copies, streams, events, and the times of spans.
 * device_cpu.h has the same functions for a CPU. While other ranks depend on it, the host waits for the GPU by polling
 * (host_wait) and not inside a CUDA call, where no timeout runs.
 */
#ifndef DEVICE_CUDA_H
#define DEVICE_CUDA_H
#include "device_types.h"
#ifdef HAVE_NCCL
#include <nccl.h>
#endif

#define DEVICE_NAME "this GPU"
#define OFFLOAD_PLACE "in the host's memory"
#define OFFLOAD_HELP "in pinned memory of the host"
enum { OFFLOAD_IN_PLACE = 0 }; // each matmul would read its weights over the bus; copying them once is faster

// ---------------------------------------------------------------------------
// errors and launches

/* Errors of the machine or the installation that the user can fix. */
static const struct {
    cudaError_t error;
    const char *meaning;
} cuda_problems[] = {
    {cudaErrorNoKernelImageForDevice,
     "this program contains no kernel for this GPU: build it on this machine with make CUDA=1"},
    {cudaErrorSystemNotReady,
     "the GPUs are not ready. On a machine whose GPUs are connected by NVSwitch, the service nvidia-fabricmanager must "
     "run, in the version of the driver: start it with systemctl start nvidia-fabricmanager, and look for errors with "
     "systemctl status nvidia-fabricmanager"},
    {cudaErrorSystemDriverMismatch,
     "the driver in the kernel and its library libcuda.so have different versions. After an update of the driver, "
     "restart the machine; in a container, restart the container, so that it gets the host's library"},
    {cudaErrorCompatNotSupportedOnDevice,
     "libcuda.so is that of a cuda-compat package, which this GPU or its driver does not support: remove the package's "
     "directory (often /usr/local/cuda/compat) from LD_LIBRARY_PATH, and update the driver instead"},
    {cudaErrorDevicesUnavailable,
     "the GPU is not available, most likely because another process has it for itself (compute mode "
     "EXCLUSIVE_PROCESS): nvidia-smi lists the processes. Wait until that process ends, choose another GPU with "
     "CUDA_VISIBLE_DEVICES, or let processes share it with nvidia-smi -c DEFAULT"},
    {cudaErrorUnsupportedPtxVersion,
     "this program has no machine code for this GPU, and its PTX is newer than the driver: update the driver, or build "
     "with a CUDA toolkit that is not newer than the CUDA version that nvidia-smi prints"},
};

/* Text for an error: how much of the current GPU's memory is free. Other processes may use part of it. */
static inline const char *gpu_memory_text(void) {
    static __thread char text[160];
    size_t have = 0, total = 0;
    if (cudaMemGetInfo(&have, &total) != cudaSuccess) {
        cudaGetLastError(); // the caller reports another error
        return "how much memory is free is not known";
    }
    snprintf(text, sizeof text, "%.2f GB of the GPU's %.2f GB are free (nvidia-smi lists the processes that use it)",
             (double)have / 1e9, (double)total / 1e9);
    return text;
}

static inline void cuda_failed(cudaError_t error, const char *what) {
    for (size_t i = 0; i < sizeof cuda_problems / sizeof *cuda_problems; i++)
        if (error == cuda_problems[i].error) user_error("CUDA: %s: %s", what, cuda_problems[i].meaning);
    if (error == cudaErrorMemoryAllocation)
        user_error("CUDA: %s: out of memory: %s. End other processes, or use more ranks, a smaller --batch or --seq, "
                   "--recompute full, or a smaller model",
                   what, gpu_memory_text());
    run_failure("CUDA: %s failed, or something enqueued before it: %s (%s). Most errors of a kernel show up in a later "
                "call: to find the kernel, run again on one rank with CUDA_LAUNCH_BLOCKING=1, or run the same options "
                "with the build of make cuda-on-cpu, which names the place",
                what, cudaGetErrorString(error), cudaGetErrorName(error));
}

static inline void cuda_check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) cuda_failed(error, what);
}

/* The answer of cudaEventQuery or cudaStreamQuery. Not ready is no failure, but unless it is cleared, the check of the
 * next launch would find it. */
static inline int cuda_is_ready(cudaError_t state, const char *what) {
    if (state != cudaErrorNotReady) cuda_check(state, what);
    else cudaGetLastError();
    return state == cudaSuccess;
}

// ---------------------------------------------------------------------------
// the GPU

/* Settings that CUDA and NCCL read when they start; those of the user stay. `shares_work`: several ranks will
 * communicate. */
static inline void device_prepare_process(int shares_work) {
    // By default the streams share 8 hardware queues, and one that waits in a queue holds up those behind it.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    if (!shares_work) return;
    // Loading a kernel at its first launch may wait for the GPU (CUDA Programming Guide, Lazy Loading, Potential
    // Hazards), which then may be waiting for other ranks in NCCL. Asking for each kernel's attributes before would
    // load the program's own, but not those of cuBLASLt.
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    // A GPU has several communicators; without this, kernels of two of them can wait for each other in a deadlock.
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    // A switch has few slots for NVLink SHARP, and from NCCL 2.29 on a communicator that gets none fails.
    setenv("NCCL_NVLS_ENABLE", "0", 0);
}

static inline void device_prepare_threads(int threads) { (void)threads; }

/* Returns how many GPUs there are; ends the run if there is none, or no suitable driver. */
static inline int device_count(void) {
    int count = 0, driver = 0, runtime = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
    if (error == cudaErrorInsufficientDriver && !driver)
        user_error("no NVIDIA driver was found: install one, or use ./train_llama3, which runs on the CPU");
    if (error == cudaErrorInsufficientDriver || (driver && driver / 1000 < runtime / 1000))
        user_error("the NVIDIA driver supports CUDA %d.%d, but this program was built with CUDA %d.%d: install a newer "
                   "driver, or build with an older toolkit",
                   driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (error == cudaErrorNoDevice || (error == cudaSuccess && !count))
        user_error("no NVIDIA GPU is visible (CUDA_VISIBLE_DEVICES may hide some): use ./train_llama3, which runs on "
                   "the CPU");
    cuda_check(error, "looking for a GPU");
    cudaDeviceProp gpu;
    cuda_check(cudaGetDeviceProperties(&gpu, 0), "asking for the GPU's properties");
    const char *generation = gpu.major == 7 && gpu.minor == 5 ? "Turing, as a T4 has" : "older than Turing";
    if (gpu.major < 8)
        user_error("%s has compute capability %d.%d (%s), but 8.0 (Ampere) or newer is needed: use ./train_llama3, "
                   "which runs on the CPU",
                   gpu.name, gpu.major, gpu.minor, generation);
    return count;
}

/* How many GPUs there are; 0 if CUDA finds none. */
static inline int device_count_or_none(void) {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError(); // clears the error
    return 0;
}

/* The GPU of the `local`-th rank of this host. */
static inline int device_of(int local) { return local % device_count(); }

/* The name of a GPU's model, such as "NVIDIA H200"; a slice of a GPU is "NVIDIA H200 MIG 1g.18gb". */
static inline void device_model(int gpu, char *name, size_t size) {
    cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, gpu), "asking for the GPU's properties");
    snprintf(name, size, "%s", properties.name);
}

/* Bytes of the GPU's memory, all of it and what is free. */
static inline double device_memory_with_total(int gpu, double *total) {
    size_t have = 0, all = 0;
    cuda_check(cudaSetDevice(gpu), "choosing a GPU");
    cuda_check(cudaMemGetInfo(&have, &all), "asking for the GPU's memory");
    *total = (double)all;
    return (double)have;
}

/* Bytes of the host's memory that can be pinned. The system would grant more than it has, and then kill processes. */
static inline double pinned_memory(void) {
    long long kilobytes = 0;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f) && sscanf(line, "MemAvailable: %lld", &kilobytes) != 1) {}
    if (f) fclose(f);
    return fmin(kilobytes ? 1024.0 * (double)kilobytes : INFINITY, container_limits().memory);
}

// ---------------------------------------------------------------------------
// memory

/* NCCL reads and writes memory in place only if it allocated it itself. */
static inline int nccl_allocates(const Device *dev, MemCategory category) {
    return dev->by_nccl && category == MEM_COMM;
}

static inline cudaError_t gpu_alloc(const Device *dev, MemCategory category, void **p, size_t bytes) {
    if (!nccl_allocates(dev, category)) return cudaMalloc(p, bytes);
#ifdef HAVE_NCCL
    ncclResult_t result = ncclMemAlloc(p, bytes);
    if (result == ncclSuccess) return cudaSuccess;
    if (result != ncclUnhandledCudaError)
        run_failure("NCCL could not allocate %.2f GB for collectives: %s. NCCL_DEBUG=INFO gives details",
                    (double)bytes / 1e9, ncclGetErrorString(result));
#endif
    return cudaErrorMemoryAllocation; // the only CUDA error that NCCL meets
}

/* Host memory could not be pinned, or the GPU has too little memory: says how much was needed. */
__attribute__((noreturn)) static inline void memory_missing(const Device *dev, MemCategory category, size_t bytes,
                                                            size_t rank_needs) {
    cudaGetLastError(); // clears the error that is reported here
    if (dev->arenas[category].offloaded)
        user_error("could not pin %.2f GB of the host's memory for %s: --offload needs that much on each rank; use "
                   "more hosts, or fewer ranks on each",
                   (double)bytes / 1e9, mem_category_names[category]);
    if (category == MEM_HOST)
        user_error("could not pin %.2f GB of the host's memory: use fewer ranks on a host, or a smaller --batch or "
                   "--seq",
                   (double)bytes / 1e9);
    user_error("could not allocate %.2f GB for %s: a rank needs %.2f GB, and %s. End other processes, or use a smaller "
               "--batch or --seq, --recompute full, more GPUs, or a smaller model; --plan shows how much memory each "
               "kind of buffer takes",
               (double)bytes / 1e9, mem_category_names[category], (double)rank_needs / 1e9, gpu_memory_text());
}

/* Memory for an arena, set to zero. Offloaded arenas are pinned memory of the host, which kernels can reach. */
static inline void *memory_open(Device *dev, MemCategory category, size_t bytes, size_t rank_needs, const char *out,
                                int rank) {
    (void)out;
    (void)rank;
    void *p = NULL;
    int offloaded = dev->arenas[category].offloaded, on_host = category == MEM_HOST || offloaded;
    cudaError_t error;
    if (on_host) error = cudaHostAlloc(&p, bytes, offloaded ? cudaHostAllocMapped : cudaHostAllocDefault);
    else error = gpu_alloc(dev, category, &p, bytes);
    if (error == cudaErrorMemoryAllocation) memory_missing(dev, category, bytes, rank_needs);
    cuda_check(error, "allocating memory");
    if (on_host) memset(p, 0, bytes);
    else cuda_check(cudaMemsetAsync(p, 0, bytes, dev->on.stream), "clearing memory");
    return p;
}

static inline void memory_close(Device *dev, MemCategory category, Arena *a) {
    if (category == MEM_HOST || a->offloaded) cudaFreeHost(a->base);
    else if (!nccl_allocates(dev, category)) cudaFree(a->base);
#ifdef HAVE_NCCL
    else ncclMemFree(a->base);
#endif
}

// ---------------------------------------------------------------------------
// the times of spans, from events that their streams record

/* Room for one more element in a list of `count` elements that grows. */
static inline void *list_room(void *list, int count, int *max, size_t size) {
    if (count < *max) return list;
    *max = *max ? 2 * *max : 256;
    return checked_realloc(list, size * (size_t)*max);
}

/* Records the time at which the current stream comes here. */
static inline void record_time(Device *dev, DeviceEvent *event) {
    if (dev->rec.num_spare) *event = dev->rec.spare_events[--dev->rec.num_spare];
    else cuda_check(cudaEventCreateWithFlags(event, cudaEventDefault), "creating an event");
    cuda_check(cudaEventRecord(*event, dev->on.stream), "recording an event");
}

static inline void event_reuse(Device *dev, DeviceEvent event) {
    dev->rec.spare_events =
        (DeviceEvent *)list_room(dev->rec.spare_events, dev->rec.num_spare, &dev->rec.max_spare, sizeof(DeviceEvent));
    dev->rec.spare_events[dev->rec.num_spare++] = event;
}

/* Adds a span whose end is recorded; its time is known once the GPU is there. */
static inline void span_add_open(Device *dev, const OpenSpan *o) {
    dev->rec.open_spans = (OpenSpan *)list_room(dev->rec.open_spans, dev->rec.num_open, &dev->rec.max_open, sizeof *o);
    dev->rec.open_spans[dev->rec.num_open++] = *o;
}

/* Seconds by the host's clock at which the GPU reached an event. */
static inline double event_seconds(Device *dev, DeviceEvent event) {
    float milliseconds;
    cuda_check(cudaEventElapsedTime(&milliseconds, dev->rec.zero, event), "asking for an event's time");
    return dev->rec.zero_seconds + 1e-3 * milliseconds;
}

/* Gives spans that the GPU has finished their times. */
static inline void spans_settle(Device *dev) {
    int kept = 0;
    for (int i = 0; i < dev->rec.num_open; i++) {
        OpenSpan o = dev->rec.open_spans[i];
        if (!cuda_is_ready(cudaEventQuery(o.ended), "asking for an event")) {
            dev->rec.open_spans[kept++] = o;
            continue;
        }
        double start = event_seconds(dev, o.span.begun), end = event_seconds(dev, o.ended);
        dev->rec.settled++;
        if (dev->rec.events && o.span.event >= 0 && o.span.event < dev->rec.max_events) {
            dev->rec.events[o.span.event].start = start;
            dev->rec.events[o.span.event].end = end;
        }
        if (o.seconds) *o.seconds += end - start;
        if (o.line >= 0 && dev->rec.comm_finished) dev->rec.comm_finished(dev->poll_arg, o.line, o.number, start, end);
        event_reuse(dev, o.span.begun);
        event_reuse(dev, o.ended);
    }
    dev->rec.num_open = kept;
}

/* How many spans have ended, and in *running the first collective that has begun and not ended, or NULL. */
static inline int64_t device_settled(Device *dev, const OpenSpan **running) {
    spans_settle(dev);
    *running = NULL;
    for (int i = dev->rec.num_open - 1; i >= 0; i--)
        if (dev->rec.open_spans[i].line >= 0 &&
            cuda_is_ready(cudaEventQuery(dev->rec.open_spans[i].span.begun), "asking for an event"))
            *running = &dev->rec.open_spans[i];
    return dev->rec.settled;
}

/* Forgets the timeline's entries from number `event` on. */
static inline void timeline_truncate(Device *dev, int64_t event) {
    dev->rec.num_events = event;
    for (int i = 0; i < dev->rec.num_open; i++)
        if (dev->rec.open_spans[i].span.event >= event) dev->rec.open_spans[i].span.event = -1;
}

/* Moves the zero of GPU times forward now and then, when no span is open: CUDA gives times as a float of milliseconds,
 * which is exact to a microsecond only for short times. */
static inline void clock_move(Device *dev) {
    if (dev->rec.num_open || !dev->rec.zero || seconds_now() - dev->rec.zero_seconds < 10) return;
    DeviceEvent next;
    record_time(dev, &next);
    cuda_check(cudaEventSynchronize(next), "waiting for an event");
    dev->rec.zero_seconds = event_seconds(dev, next);
    event_reuse(dev, dev->rec.zero);
    dev->rec.zero = next;
}

// ---------------------------------------------------------------------------
// streams and events, in PyTorch's words

/* Creates a stream, or in a dry run notes that the run needs it. Streams on which other ranks wait have higher
 * priority. */
static inline void stream_open(Device *dev, StreamKind stream) {
    int least, most;
    dev->streams_used |= 1u << stream;
    if (dev->dry_run) return;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &most), "asking for the priorities of streams");
    cuda_check(cudaStreamCreateWithPriority(&dev->streams[stream], cudaStreamNonBlocking,
                                            stream == STREAM_COMPUTE ? least : most),
               "creating a stream");
}

/* Ops and copies go to stream `to` from here on. Returns the stream that was current. */
static inline StreamKind device_set_stream(Device *dev, StreamKind to) {
    StreamKind before = dev->current_stream;
    if (!(dev->streams_used >> to & 1)) stream_open(dev, to); // not used in the dry run
    dev->current_stream = to;
    dev->on.stream = dev->streams[to];
    return before;
}

/* The host waits until the GPU has reached `event`, or with NULL the end of the current stream. It checks the timeout
 * meanwhile (dev->watch): if a rank is lost, a collective, and so its stream, may never end. */
static inline void host_wait(Device *dev, DeviceEvent event) {
    if (!dev->watch) {
        cuda_check(event ? cudaEventSynchronize(event) : cudaStreamSynchronize(dev->on.stream), "waiting for the GPU");
        return;
    }
    double start = seconds_now(), looked = start;
    for (int spins = 0;; spins++) {
        cudaError_t state = event ? cudaEventQuery(event) : cudaStreamQuery(dev->on.stream);
        if (cuda_is_ready(state, "waiting for the GPU")) break;
        if (spins > 2000) usleep(20);
        double now = seconds_now();
        if (now - looked < 0.05) continue;
        looked = now;
        dev->watch(dev->poll_arg, now - start);
    }
    if (looked > start) dev->watch(dev->poll_arg, 0); // the wait is over
}

/* The host waits for the current stream. */
static inline void device_synchronize(Device *dev) {
    if (dev->dry_run) return;
    host_wait(dev, NULL);
    spans_settle(dev);
    clock_move(dev);
}

/* Records how far the current stream has come. The event is created when *event is NULL. Also streams of other ranks in
 * this process may wait for it. */
static inline void device_record_event(Device *dev, DeviceEvent *event) {
    if (dev->dry_run) return;
    if (!*event) cuda_check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an event");
    cuda_check(cudaEventRecord(*event, dev->on.stream), "recording an event");
}

/* The current stream waits for an event; one that was never recorded (NULL) has happened. */
static inline void device_wait_event(Device *dev, DeviceEvent event) {
    if (!dev->dry_run && event) cuda_check(cudaStreamWaitEvent(dev->on.stream, event, 0), "waiting for an event");
}

/* The host waits for an event. */
static inline void device_synchronize_event(DeviceEvent event) {
    if (event) cuda_check(cudaEventSynchronize(event), "waiting for an event");
}

static inline void device_destroy_event(DeviceEvent event) {
    if (event) cudaEventDestroy(event);
}

/* Keeps the host at most a few phases ahead of its GPU. A full queue, of about 1,000 entries, would hold the host in
 * the call that enqueues, where no timeout runs, and with it the other ranks of this process. */
static inline void device_pace(Device *dev) {
    if (dev->dry_run) return;
    DeviceEvent *event = &dev->phases[dev->num_phases % 4];
    if (dev->num_phases++ >= 4) {
        host_wait(dev, *event);
        dev->rec.settled++;
    }
    device_record_event(dev, event);
}

/* Makes the GPU this thread's, creates the streams that the run uses and starts its clock. */
static inline void device_attach(Device *dev) {
    cuda_check(cudaSetDevice(dev->gpu), "choosing a GPU");
    dev->streams_used |= 1u << STREAM_COMPUTE;
    for (int i = 0; i < STREAMS; i++)
        if (dev->streams_used >> i & 1) stream_open(dev, (StreamKind)i);
    dev->on.stream = dev->streams[STREAM_COMPUTE];
    cuda_check(cudaDeviceGetAttribute(&dev->on.multiprocessors, cudaDevAttrMultiProcessorCount, dev->gpu),
               "asking for the number of multiprocessors");
    cuda_check(cudaDeviceGetAttribute(&dev->on.shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev->gpu),
               "asking for the size of shared memory");
    record_time(dev, &dev->rec.zero);
    cuda_check(cudaEventSynchronize(dev->rec.zero), "waiting for an event");
    dev->rec.zero_seconds = seconds_now();
}

static inline void device_detach(Device *dev) {
    for (int i = 0; i < STREAMS; i++) {
        if (!dev->streams[i]) continue;
        device_destroy_event(dev->order[i]);
        cudaStreamDestroy(dev->streams[i]);
    }
    for (int i = 0; i < 4; i++) device_destroy_event(dev->phases[i]);
    for (int i = 0; i < dev->rec.num_open; i++) {
        cudaEventDestroy(dev->rec.open_spans[i].span.begun);
        cudaEventDestroy(dev->rec.open_spans[i].ended);
    }
    for (int i = 0; i < dev->rec.num_spare; i++) cudaEventDestroy(dev->rec.spare_events[i]);
    device_destroy_event(dev->rec.zero);
    free(dev->rec.open_spans);
    free(dev->rec.spare_events);
}

// ---------------------------------------------------------------------------
// copies, on the current stream; in a dry run they do nothing

/* With `wait`, the host waits before and after: a copy of memory that is not pinned blocks inside the call, where no
 * timeout runs. */
static inline void copy_bytes(Device *dev, void *to, const void *from, size_t bytes, int wait) {
    if (dev->dry_run || !bytes) return;
    if (wait) device_synchronize(dev);
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, dev->on.stream), "a copy");
    if (wait) device_synchronize(dev);
}

/* `rows` rows of `bytes` bytes, whose starts are a stride apart; strides in bytes. */
static inline void device_copy_rows(Device *dev, void *to, size_t to_stride, const void *from, size_t from_stride,
                                    size_t bytes, int rows) {
    if (dev->dry_run) return;
    cuda_check(cudaMemcpy2DAsync(to, to_stride, from, from_stride, bytes, (size_t)rows, cudaMemcpyDeviceToDevice,
                                 dev->on.stream),
               "a copy of rows");
}

static inline void device_zero(Device *dev, void *p, size_t bytes) {
    if (!dev->dry_run && bytes) cuda_check(cudaMemsetAsync(p, 0, bytes, dev->on.stream), "clearing memory");
}

/* Fetches an offloaded buffer before ops use it. Returns where they find it: in `near`, or in its home. */
static inline void *offload_fetch(Device *dev, MemCategory category, void *home, void *near, size_t bytes) {
    if (!dev->arenas[category].offloaded) return home;
    copy_bytes(dev, near, home, bytes, 0);
    return near;
}

/* Stores an offloaded buffer after ops have used it, if they have `written` it. */
static inline void offload_store(Device *dev, MemCategory category, void *home, const void *near, size_t bytes,
                                 int written) {
    if (dev->arenas[category].offloaded && written) copy_bytes(dev, home, near, bytes, 0);
}

#endif
