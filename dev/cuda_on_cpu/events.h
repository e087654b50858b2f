/* events.h: the runtime API: streams, events, and the logical clock.
 *
 * Times between events mean something, though operations run in an order that the seed chooses. Each stream has a
 * clock: an operation starts at the latest of that clock, of what it waits for, and of the host's clock when it was
 * queued; it lasts as long as Costs say. A host that waits for something gets its time at least. Nothing contends:
 * streams overlap as far as what was awaited allows. So a trace shows what the dependencies allow, and is the same
 * under every seed as long as each host thread makes the same calls in the same order.
 */
#ifndef CUDA_ON_CPU_EVENTS_H
#define CUDA_ON_CPU_EVENTS_H

// ---------------------------------------------------------------------------
// the API: streams and events

inline cudaError_t cuda_on_cpu_stream(const char *api, cudaStream_t *s, unsigned flags, int priority) {
    *s = nullptr;
    CUDA_ON_CPU_CALL(api);
    if (flags > cudaStreamNonBlocking) return call.give(cudaErrorInvalidValue);
    *s = emu::new_stream(emu::device_now, flags == cudaStreamDefault,
                         std::min<int>(LEAST_PRIORITY, std::max<int>(GREATEST_PRIORITY, priority)));
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    return cuda_on_cpu_stream("cudaStreamCreateWithPriority", s, flags, priority);
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    return cuda_on_cpu_stream("cudaStreamCreateWithFlags", s, flags, LEAST_PRIORITY);
}
inline cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithFlags(s, cudaStreamDefault); }

inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    CUDA_ON_CPU_CALL("cudaDeviceGetStreamPriorityRange");
    *least = LEAST_PRIORITY;
    *greatest = GREATEST_PRIORITY;
    return cudaSuccess;
}

inline cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) {
    CUDA_ON_CPU_CALL("cudaStreamGetPriority");
    s = emu::stream_of(s);
    if (!s) return call.give(cudaErrorInvalidResourceHandle);
    *priority = s->priority;
    return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    CUDA_ON_CPU_CALL("cudaStreamSynchronize");
    s = emu::stream_of(s);
    if (!s) return call.give(cudaErrorInvalidResourceHandle);
    emu::finish(call.lock, s);
    return cudaSuccess;
}

inline cudaError_t cudaDeviceSynchronize() {
    CUDA_ON_CPU_CALL("cudaDeviceSynchronize");
    emu::finish_all(call.lock, emu::device_now);
    return cudaSuccess;
}

inline cudaError_t cudaStreamQuery(cudaStream_t s) {
    CUDA_ON_CPU_CALL("cudaStreamQuery");
    s = emu::stream_of(s);
    if (!s) return call.give(cudaErrorInvalidResourceHandle);
    emu::check_launched(s);
    if (!s->queue.empty()) emu::poll_one(call.lock);
    if (!s->queue.empty()) return call.give(cudaErrorNotReady);
    emu::host_reaches(s->clock);
    return cudaSuccess;
}

inline cudaError_t cudaStreamDestroy(cudaStream_t s) {
    CUDA_ON_CPU_CALL("cudaStreamDestroy");
    if (!emu::machine().streams.count(s)) return call.give(cudaErrorInvalidResourceHandle);
    emu::finish(call.lock, s);
    emu::machine().streams.erase(s);
    delete s;
    return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    *e = nullptr;
    CUDA_ON_CPU_CALL("cudaEventCreateWithFlags");
    *e = new CUevent_st{emu::device_now, !(flags & cudaEventDisableTiming), nullptr};
    emu::machine().events.insert(*e);
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, cudaEventDefault); }

inline cudaError_t cudaEventDestroy(cudaEvent_t e) { // queued records and waits of it stay
    CUDA_ON_CPU_CALL("cudaEventDestroy");
    if (!emu::machine().events.erase(e)) return call.give(cudaErrorInvalidResourceHandle);
    delete e;
    return cudaSuccess;
}

inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s = nullptr) {
    CUDA_ON_CPU_CALL("cudaEventRecord");
    s = emu::stream_of(s);
    if (!emu::machine().events.count(e) || !s) return call.give(cudaErrorInvalidResourceHandle);
    if (e->device != s->device) return call.give(cudaErrorInvalidResourceHandle);
    e->last = std::make_shared<emu::Mark>();
    emu::enqueue(s, 0, nullptr).record = e->last;
    return cudaSuccess;
}

inline cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e,
                                       unsigned = 0) { // what is recorded later is not waited for
    CUDA_ON_CPU_CALL("cudaStreamWaitEvent");
    s = emu::stream_of(s);
    if (!emu::machine().events.count(e) || !s) return call.give(cudaErrorInvalidResourceHandle);
    if (e->last) emu::enqueue(s, 0, nullptr).awaits = e->last;
    return cudaSuccess;
}

inline cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    CUDA_ON_CPU_CALL("cudaEventSynchronize");
    if (!emu::machine().events.count(e)) return call.give(cudaErrorInvalidResourceHandle);
    std::shared_ptr<emu::Mark> mark = e->last;
    if (!mark) return cudaSuccess;
    emu::run_until(call.lock, [mark] { return mark->done; });
    emu::host_reaches(mark->time);
    return cudaSuccess;
}

inline cudaError_t cudaEventQuery(cudaEvent_t e) {
    CUDA_ON_CPU_CALL("cudaEventQuery");
    if (!emu::machine().events.count(e)) return call.give(cudaErrorInvalidResourceHandle);
    std::shared_ptr<emu::Mark> mark = e->last;
    if (!mark) return cudaSuccess;
    if (!mark->done) emu::poll_one(call.lock);
    if (!mark->done) return call.give(cudaErrorNotReady);
    emu::host_reaches(mark->time);
    return cudaSuccess;
}

/* By the logical clock. */
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    *milliseconds = 0;
    CUDA_ON_CPU_CALL("cudaEventElapsedTime");
    for (cudaEvent_t e : {from, to})
        if (!emu::machine().events.count(e) || !e->timing || !e->last) return call.give(cudaErrorInvalidResourceHandle);
    if (from->device != to->device) return call.give(cudaErrorInvalidResourceHandle);
    if (!from->last->done || !to->last->done) return call.give(cudaErrorNotReady);
    *milliseconds = (float)(1e-3 * (to->last->time - from->last->time));
    return cudaSuccess;
}

inline cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void *argument) {
    CUDA_ON_CPU_CALL("cudaLaunchHostFunc");
    s = emu::stream_of(s);
    if (!s) return call.give(cudaErrorInvalidResourceHandle);
    emu::enqueue(s, cuda_on_cpu.costs.launch, [function, argument] { function(argument); }).on_host = true;
    return cudaSuccess;
}
#undef CUDA_ON_CPU_CALL
#endif
