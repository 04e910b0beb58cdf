// Streams, events and copies, in the order that CUDA promises and no better.
//
// A late stream is a thread that runs its pieces of work one after the other, each after a random delay. Work may have
// to wait for places in other streams: where cudaStreamWaitEvent says so, and between the legacy default stream and
// those streams of its device that were made to wait for it. Streams that are not late run everything at once.
#define _GNU_SOURCE
#include "device.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_STREAMS 320 // torch alone makes 192
#define DROPPED_WAIT_US 60000 // how much later than its due time comes what a dropped wait was for

struct place { // after so much of a stream's work
    int stream;
    uint64_t count;
};
struct work {
    struct work *next;
    work_fn run;
    void *argument;
    struct place *places; // what it waits for
    int num_places;
};
struct stream {
    bool used, ending, waits_for_legacy, has_thread;
    int device;
    unsigned seed;
    uint64_t given, done; // pieces of work
    useconds_t extra_us;  // before the next piece
    struct work *first, *last;
};
struct record { // one cudaEventRecord
    struct place place;
    struct timespec at;
    int references;
};
struct event {
    struct record *record; // NULL: never recorded
};

// 0 is nobody; 1..MAX_DEVICES are the devices' legacy default streams; then come others. A handle is an index as an
// aligned address, which torch asks for, and from a base on, so that it is none of CUDA's special ones.
static struct stream streams[MAX_STREAMS];
#define HANDLE_BASE 0x10000
#define HANDLE_ALIGNMENT 16
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static __thread int own_stream[MAX_DEVICES]; // the calling thread's per-thread default streams
static __thread bool is_stream_thread;
static struct { long waits, works; } counts;

HIDDEN bool is_late(void) { return settings.late != 0; }

// Python runs in streams' threads too (kernels that compute): who waits for a stream must not keep the interpreter.
HIDDEN void *let_python_run(void) {
    static int (*holds)(void);
    static void *(*save)(void);
    if (!save) {
        holds = dlsym(RTLD_DEFAULT, "PyGILState_Check");
        save = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    }
    return save && holds && holds() ? save() : NULL;
}

HIDDEN void take_python_back(void *state) {
    if (state)
        ((void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"))(state);
}

static bool is_done(struct place place) { return streams[place.stream].done >= place.count; }

static void *run_stream(void *argument) {
    struct stream *stream = argument;
    is_stream_thread = true;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct work *work = stream->first;
        if (!work) {
            if (stream->ending)
                break;
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        useconds_t delay_us = stream->extra_us;
        stream->extra_us = 0;
        if (rand_r(&stream->seed) % 3 == 0)
            delay_us += rand_r(&stream->seed) % (settings.late_us + 1);
        if (delay_us) {
            pthread_mutex_unlock(&lock);
            usleep(delay_us);
            pthread_mutex_lock(&lock);
        }
        for (int i = 0; i < work->num_places; i++)
            while (!is_done(work->places[i]))
                pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
        if (work->run)
            work->run(work->argument);
        pthread_mutex_lock(&lock);
        stream->first = work->next;
        if (!stream->first)
            stream->last = NULL;
        stream->done++;
        pthread_cond_broadcast(&changed);
        free(work->places);
        free(work);
    }
    stream->used = false;
    pthread_mutex_unlock(&lock);
    return NULL;
}

static int new_stream(int device, bool waits_for_legacy) { // under the lock
    for (int i = MAX_DEVICES + 1; i < MAX_STREAMS; i++)
        if (!streams[i].used) {
            uint64_t done = streams[i].done; // events of the stream that was here before stay done
            streams[i] = (struct stream){.used = true, .waits_for_legacy = waits_for_legacy, .device = device,
                                         .seed = (unsigned)settings.late * 7919 + i, .given = done, .done = done};
            return i;
        }
    fprintf(stderr, "cuda_in_ram: more than %d streams\n", MAX_STREAMS);
    abort();
}

static int index_of(cudaStream_t handle) { // under the lock
    int device = current_device();
    uintptr_t number = (uintptr_t)handle;
    if (handle == NULL || handle == cudaStreamLegacy) {
        streams[device + 1].used = true;
        streams[device + 1].device = device;
        return device + 1;
    }
    if (handle == cudaStreamPerThread) {
        if (!own_stream[device])
            own_stream[device] = new_stream(device, true);
        return own_stream[device];
    }
    int found = (int)((number - HANDLE_BASE) / HANDLE_ALIGNMENT);
    if (number % HANDLE_ALIGNMENT || found <= MAX_DEVICES || found >= MAX_STREAMS || !streams[found].used) {
        fprintf(stderr, "cuda_in_ram: %p is no stream\n", (void *)handle);
        abort();
    }
    return found;
}

static void give_work(int index, work_fn run, void *argument, const struct place *after) { // under the lock
    struct stream *stream = &streams[index];
    struct work *work = calloc(1, sizeof *work);
    *work = (struct work){.run = run, .argument = argument, .places = calloc(MAX_STREAMS + 1, sizeof(struct place))};
    if (after)
        work->places[work->num_places++] = *after;
    int legacy = stream->device + 1;
    for (int i = 1; i < MAX_STREAMS; i++) { // the legacy stream and its blocking ones wait for each other
        bool related = index == legacy ? streams[i].waits_for_legacy && streams[i].device == stream->device
                                       : stream->waits_for_legacy && i == legacy;
        if (i != index && related && streams[i].done < streams[i].given)
            work->places[work->num_places++] = (struct place){i, streams[i].given};
    }
    work->places = realloc(work->places, (work->num_places + 1) * sizeof *work->places);
    if (stream->last)
        stream->last->next = work;
    else
        stream->first = work;
    stream->last = work;
    stream->given++;
    counts.works++;
    if (!stream->has_thread) {
        pthread_t thread;
        stream->has_thread = true;
        pthread_create(&thread, NULL, run_stream, stream);
        pthread_detach(thread);
    }
    pthread_cond_broadcast(&changed);
}

HIDDEN void enqueue(cudaStream_t handle, work_fn run, void *argument) {
    if (!is_late()) {
        if (run)
            run(argument);
        return;
    }
    pthread_mutex_lock(&lock);
    give_work(index_of(handle), run, argument, NULL);
    pthread_mutex_unlock(&lock);
}

// Run `run(argument)` in a kernel's place.
EXPORT void cuda_in_ram_enqueue(cudaStream_t handle, work_fn run, void *argument) { enqueue(handle, run, argument); }

// Pieces of work given to streams, and waits for events that had not come, so far.
EXPORT long cuda_in_ram_count(const char *name) { return strcmp(name, "waits") ? counts.works : counts.waits; }

static void wait_place(struct place place) {
    pthread_mutex_lock(&lock);
    bool done = is_done(place);
    pthread_mutex_unlock(&lock);
    if (done)
        return;
    void *python = let_python_run();
    pthread_mutex_lock(&lock);
    while (!is_done(place))
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    take_python_back(python);
}

HIDDEN void wait_stream(cudaStream_t handle) {
    if (!is_late())
        return;
    pthread_mutex_lock(&lock);
    int index = index_of(handle);
    struct place end = {index, streams[index].given};
    pthread_mutex_unlock(&lock);
    wait_place(end);
}

HIDDEN void wait_device(int device) {
    for (int i = 1; is_late() && i < MAX_STREAMS; i++) {
        pthread_mutex_lock(&lock);
        struct place end = {i, streams[i].given};
        bool wanted = streams[i].used && streams[i].device == device;
        pthread_mutex_unlock(&lock);
        if (wanted)
            wait_place(end);
    }
}

// ---- streams

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    (void)priority;
    UNLESS_BROKEN;
    pthread_mutex_lock(&lock);
    int index = new_stream(current_device(), !(flags & cudaStreamNonBlocking));
    *handle = (cudaStream_t)(uintptr_t)(HANDLE_BASE + HANDLE_ALIGNMENT * index);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) { // what it was given still runs
    pthread_mutex_lock(&lock);
    struct stream *stream = &streams[index_of(handle)];
    stream->ending = true;
    stream->used = stream->has_thread;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    UNLESS_BROKEN;
    wait_stream(handle);
    UNLESS_BROKEN;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
    UNLESS_BROKEN;
    UNLESS_CAPTURED(true);
    wait_device(current_device());
    UNLESS_BROKEN;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
    UNLESS_BROKEN;
    pthread_mutex_lock(&lock);
    struct stream *stream = &streams[index_of(handle)];
    bool done = stream->done == stream->given;
    pthread_mutex_unlock(&lock);
    return done ? cudaSuccess : cudaErrorNotReady;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    (void)handle;
    *priority = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    (void)handle;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *num) {
    (void)id, (void)graph, (void)nodes, (void)edges, (void)num;
    return cudaStreamIsCapturing(handle, status);
}

struct call {
    cudaHostFn_t run;
    cudaStreamCallback_t run_with_status;
    cudaStream_t stream;
    void *argument;
};

static void run_call(void *argument) {
    struct call *call = argument;
    if (call->run)
        call->run(call->argument);
    else
        call->run_with_status(call->stream, cudaSuccess, call->argument);
    free(call);
}

static cudaError_t enqueue_call(struct call call) {
    UNLESS_BROKEN;
    struct call *kept = malloc(sizeof *kept);
    *kept = call;
    enqueue(call.stream, run_call, kept);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void *argument) {
    return enqueue_call((struct call){.run = run, .stream = stream, .argument = argument});
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t run, void *argument, unsigned flags) {
    (void)flags;
    return enqueue_call((struct call){.run_with_status = run, .stream = stream, .argument = argument});
}

// ---- events

static void drop(struct record *record) { // under the lock
    if (record && --record->references == 0)
        free(record);
}

static void stamp(void *argument) {
    struct record *record = argument;
    pthread_mutex_lock(&lock);
    clock_gettime(CLOCK_MONOTONIC, &record->at);
    drop(record);
    pthread_mutex_unlock(&lock);
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
    (void)flags;
    UNLESS_BROKEN;
    *handle = (cudaEvent_t)calloc(1, sizeof(struct event));
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    pthread_mutex_lock(&lock);
    drop(((struct event *)handle)->record);
    pthread_mutex_unlock(&lock);
    free(handle);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
    (void)flags;
    UNLESS_BROKEN;
    struct event *event = (struct event *)handle;
    struct record *record = calloc(1, sizeof *record);
    record->references = 2; // the event's, the stream's
    pthread_mutex_lock(&lock);
    drop(event->record);
    event->record = record;
    if (is_late()) {
        int index = index_of(stream);
        give_work(index, stamp, record, NULL);
        record->place = (struct place){index, streams[index].given};
        pthread_mutex_unlock(&lock);
    } else {
        pthread_mutex_unlock(&lock);
        stamp(record);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

static bool place_of(cudaEvent_t handle, struct place *place) { // false: it has come, or was never recorded
    pthread_mutex_lock(&lock);
    struct record *record = ((struct event *)handle)->record;
    bool pending = record && !is_done(record->place);
    if (pending)
        *place = record->place;
    pthread_mutex_unlock(&lock);
    return pending;
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    UNLESS_BROKEN;
    UNLESS_CAPTURED(false);
    struct place place;
    return place_of(event, &place) ? cudaErrorNotReady : cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    UNLESS_BROKEN;
    struct place place;
    if (place_of(event, &place))
        wait_place(place);
    UNLESS_BROKEN;
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    UNLESS_BROKEN;
    struct place place;
    struct record *first = ((struct event *)begin)->record, *second = ((struct event *)end)->record;
    if (!first || !second)
        return failed(cudaErrorInvalidResourceHandle);
    if (place_of(begin, &place) || place_of(end, &place))
        return cudaErrorNotReady;
    *milliseconds = (float)((double)(second->at.tv_sec - first->at.tv_sec) * 1e3 +
                            (double)(second->at.tv_nsec - first->at.tv_nsec) / 1e6);
    return cudaSuccess;
}

// A wait is for what the event was recorded for last; for an event that never was, it is none.
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    (void)flags;
    UNLESS_BROKEN;
    if (!is_late())
        return cudaSuccess;
    pthread_mutex_lock(&lock);
    int index = index_of(handle);
    struct record *record = ((struct event *)event)->record;
    // Whether the event has come by now is chance: waits are counted all the same, but for those within a stream.
    if (record && record->place.stream && record->place.stream != index) {
        counts.waits++;
        bool is_due = falls_due(&settings.drop_wait);
        if (is_due && is_done(record->place))
            settings.drop_wait = 1; // nothing to wait for: the next one then
        else if (is_due)
            streams[record->place.stream].extra_us += DROPPED_WAIT_US;
        else if (!is_done(record->place))
            give_work(index, NULL, NULL, &record->place);
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

// ---- copies

struct copy {
    char *to;
    const char *from;
    size_t to_pitch, from_pitch, width, height;
    char *staged; // a copy of pageable memory, freed when it is done
    int value;    // to fill with, where there is nothing to copy from
};

static void run_copy(void *argument) {
    struct copy *copy = argument;
    for (size_t row = 0; row < copy->height; row++)
        if (copy->from)
            memmove(copy->to + row * copy->to_pitch, copy->from + row * copy->from_pitch, copy->width);
        else
            memset(copy->to + row * copy->to_pitch, copy->value, copy->width);
    free(copy->staged);
    free(copy);
}

// Whether the device can use an address: its own memory; host memory that is registered, where it has one address for
// both; pageable memory, where the driver gives it to the device.
static bool is_for_device(const void *address) {
    switch (kind_of(address, NULL)) {
    case DEVICE:
        return true;
    case PINNED:
        return attribute_of(cudaDevAttrCanUseHostPointerForRegisteredMem);
    default:
        return attribute_of(cudaDevAttrPageableMemoryAccess);
    }
}

static bool is_for_host(const void *address) { return kind_of(address, NULL) != DEVICE; }

// CUDA leaves undefined what a copy does whose addresses are not of its kind; this device refuses it. Registered host
// memory has one address for both sides, so it may be named as either.
static cudaError_t check_direction(const void *to, const void *from, enum cudaMemcpyKind kind) {
    bool matches;
    switch (kind) {
    case cudaMemcpyHostToHost:
        matches = is_for_host(from) && is_for_host(to);
        break;
    case cudaMemcpyHostToDevice:
        matches = is_for_host(from) && is_for_device(to);
        break;
    case cudaMemcpyDeviceToHost:
        matches = is_for_device(from) && is_for_host(to);
        break;
    case cudaMemcpyDeviceToDevice:
        matches = is_for_device(from) && is_for_device(to);
        break;
    case cudaMemcpyDefault:
        return cudaSuccess;
    default:
        return failed(cudaErrorInvalidMemcpyDirection);
    }
    return matches ? cudaSuccess : failed(cudaErrorInvalidValue);
}

// Pageable memory: read at the call, or written before the call returns.
static cudaError_t enqueue_copy(struct copy copy, cudaStream_t stream, bool blocks) {
    UNLESS_BROKEN;
    bool from_pageable = copy.from && kind_of(copy.from, NULL) == UNKNOWN;
    bool to_pageable = kind_of(copy.to, NULL) == UNKNOWN;
    if (from_pageable && to_pageable && copy.from)
        blocks = true;
    else if (from_pageable && is_late()) {
        copy.staged = malloc(copy.from_pitch * copy.height + copy.width);
        memcpy(copy.staged, copy.from, copy.height ? copy.from_pitch * (copy.height - 1) + copy.width : 0);
        copy.from = copy.staged;
    }
    struct copy *kept = malloc(sizeof *kept);
    *kept = copy;
    enqueue(stream, run_copy, kept);
    if (blocks || to_pageable)
        wait_stream(stream);
    return cudaSuccess;
}

static cudaError_t copy_rows(struct copy copy, enum cudaMemcpyKind kind, cudaStream_t stream, bool blocks) {
    UNLESS_BROKEN;
    if (!copy.width || !copy.height)
        return cudaSuccess;
    cudaError_t error = check_direction(copy.to, copy.from, kind);
    return error ? error : enqueue_copy(copy, stream, blocks);
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    return copy_rows((struct copy){.to = to, .from = from, .width = nbytes, .height = 1}, kind, stream, false);
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind) {
    return copy_rows((struct copy){.to = to, .from = from, .width = nbytes, .height = 1}, kind, NULL, true);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t nbytes,
                                       cudaStream_t stream) {
    (void)to_device, (void)from_device;
    return cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDefault, stream);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    struct copy copy = {
        .to = to, .from = from, .to_pitch = to_pitch, .from_pitch = from_pitch, .width = width, .height = height};
    return copy_rows(copy, kind, stream, false);
}

EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t nbytes, cudaStream_t stream) {
    UNLESS_BROKEN;
    if (nbytes && !is_for_device(to))
        return failed(cudaErrorInvalidValue);
    return enqueue_copy((struct copy){.to = to, .value = value, .width = nbytes, .height = 1}, stream, false);
}

EXPORT cudaError_t cudaMemset(void *to, int value, size_t nbytes) { return cudaMemsetAsync(to, value, nbytes, NULL); }
