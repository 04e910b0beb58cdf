// NCCL between processes, each a rank with a GPU made of RAM of its own.
//
// Ranks are connected two by two, by Unix sockets that have no file: nothing is left of them, however a process ends.
// What a group of calls sends and receives makes progress together, on the stream that it was given to. As between GPUs
// of one host, nobody notices that a peer is gone: its messages do not come until the communicator is aborted.
#define _GNU_SOURCE
#define __CUDA_FP16_H__ // halves, which nccl.h has no need of in C, and which have a header of C++
#define __CUDA_BF16_H__
#include "device.h"
#include <errno.h>
#include <nccl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define TEXT_NBYTES 256
#define POLL_MS 10 // how often who waits looks whether the communicator was aborted

struct ncclComm {
    char name[96];
    int rank, size, device, num_splits, references;
    bool aborted;
    uint64_t given, done; // groups of calls
    int sockets[];        // by rank; -1: none, or gone
};
struct message {
    int peer;
    bool is_sent;
    char *at;
    size_t left;
};
enum operation { SEND, RECEIVE, ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL };
struct call {
    struct call *next;
    enum operation operation;
    const char *from;
    char *to;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root; // of a message the peer
    ncclComm_t comm;
    cudaStream_t stream;
    uint64_t number; // of its group
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static __thread int depth; // of groups
static __thread struct call *first, *last;
static __thread char last_error[TEXT_NBYTES];

static ncclResult_t refused(ncclResult_t why, const char *words) {
    snprintf(last_error, sizeof last_error, "%s", words);
    fprintf(stderr, "cuda_in_ram: NCCL: %s\n", words);
    return why;
}

static size_t size_of(ncclDataType_t type) {
    static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return SIZES[type];
}

// ---- messages

static void move(struct ncclComm *comm, struct message *message) {
    int peer = comm->sockets[message->peer];
    ssize_t moved = message->is_sent ? send(peer, message->at, message->left, MSG_NOSIGNAL | MSG_DONTWAIT)
                                     : recv(peer, message->at, message->left, MSG_DONTWAIT);
    if (moved > 0) {
        message->at += moved;
        message->left -= (size_t)moved;
    } else if (moved == 0 || (errno != EAGAIN && errno != EINTR)) {
        close(peer);
        comm->sockets[message->peer] = -1; // gone, and nobody is told
    }
}

// Let all messages make progress, those to and from one peer in their order; false: aborted.
static bool exchange(struct ncclComm *comm, struct message *messages, int num) {
    for (;;) {
        struct message *heads[2][comm->size];
        struct pollfd polled[comm->size];
        bool is_over = true;
        memset(heads, 0, sizeof heads);
        for (int peer = 0; peer < comm->size; peer++)
            polled[peer] = (struct pollfd){.fd = comm->sockets[peer]};
        for (struct message *one = messages; one < messages + num; one++)
            if (one->left && !heads[one->is_sent][one->peer]) {
                heads[one->is_sent][one->peer] = one;
                polled[one->peer].events |= one->is_sent ? POLLOUT : POLLIN;
                is_over = false;
            }
        for (int peer = 0; peer < comm->size; peer++)
            if (!polled[peer].events)
                polled[peer].fd = -1;
        if (is_over || __atomic_load_n(&comm->aborted, __ATOMIC_SEQ_CST))
            return is_over;
        if (poll(polled, (nfds_t)comm->size, POLL_MS) <= 0)
            continue;
        for (int peer = 0; peer < comm->size; peer++)
            for (int is_sent = 0; is_sent < 2; is_sent++)
                if (heads[is_sent][peer] && polled[peer].revents && comm->sockets[peer] >= 0)
                    move(comm, heads[is_sent][peer]);
    }
}

// ---- reductions, in the order of the ranks

static float of_bfloat(uint16_t value) {
    union { uint32_t bits; float number; } found = {(uint32_t)value << 16};
    return found.number;
}

static uint16_t to_bfloat(float value) {
    union { float number; uint32_t bits; } found = {value};
    if (value != value)
        return 0x7fc0;
    return (uint16_t)((found.bits + 0x7fff + (found.bits >> 16 & 1)) >> 16);
}

#define SAME(value) (value)
#define FOLD(kind, total_kind, load, store)                                                                            \
    for (size_t i = 0; i < count; i++) {                                                                               \
        total_kind total = (total_kind)load(((const kind *)terms)[i]);                                                 \
        for (int rank = 1; rank < num; rank++) {                                                                       \
            total_kind term = (total_kind)load(((const kind *)terms)[(size_t)rank * count + i]);                       \
            total = op == ncclMax    ? (term > total ? term : total)                                                   \
                    : op == ncclMin  ? (term < total ? term : total)                                                   \
                    : op == ncclProd ? total * term                                                                    \
                                     : total + term;                                                                   \
        }                                                                                                              \
        ((kind *)to)[i] = (kind)store(op == ncclAvg ? total / (total_kind)num : total);                                \
    }                                                                                                                  \
    break

static void fold(char *to, const char *terms, int num, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    switch (type) {
    case ncclInt8: FOLD(int8_t, int8_t, SAME, SAME);
    case ncclUint8: FOLD(uint8_t, uint8_t, SAME, SAME);
    case ncclInt32: FOLD(int32_t, int32_t, SAME, SAME);
    case ncclUint32: FOLD(uint32_t, uint32_t, SAME, SAME);
    case ncclInt64: FOLD(int64_t, int64_t, SAME, SAME);
    case ncclUint64: FOLD(uint64_t, uint64_t, SAME, SAME);
    case ncclFloat16: FOLD(_Float16, float, SAME, SAME);
    case ncclFloat32: FOLD(float, float, SAME, SAME);
    case ncclFloat64: FOLD(double, double, SAME, SAME);
    case ncclBfloat16: FOLD(uint16_t, float, of_bfloat, to_bfloat);
    default: break; // refused when it was called
    }
}

// ---- calls

static bool run_collective(const struct call *call) {
    struct ncclComm *comm = call->comm;
    int rank = comm->rank, size = comm->size;
    size_t nbytes = call->count * size_of(call->type);
    bool reduces = call->operation == ALL_REDUCE || call->operation == REDUCE || call->operation == REDUCE_SCATTER;
    bool sends_pieces = call->operation == REDUCE_SCATTER || call->operation == ALL_TO_ALL;
    bool has_root = call->operation == REDUCE || call->operation == BROADCAST, is_root = rank == call->root;
    bool sends = !has_root || is_root == (call->operation == BROADCAST);
    bool receives = !has_root || is_root == (call->operation == REDUCE);
    char *terms = reduces && receives ? malloc(nbytes * (size_t)size + 1) : NULL;
    char *into = terms ? terms : call->to;
    size_t step = call->operation == BROADCAST ? 0 : nbytes; // between what comes of one rank and of the next
    struct message messages[2 * size];
    int num = 0;
    for (int next = 1; next < size; next++) {
        int peer = (rank + next) % size;
        char *sent = (char *)call->from + (sends_pieces ? nbytes * (size_t)peer : 0);
        if (sends && (!has_root || call->operation == BROADCAST || peer == call->root))
            messages[num++] = (struct message){peer, true, sent, nbytes};
        if (receives && (!has_root || call->operation == REDUCE || peer == call->root))
            messages[num++] = (struct message){peer, false, into + step * (size_t)peer, nbytes};
    }
    const char *own = call->from + (sends_pieces ? nbytes * (size_t)rank : 0);
    if (receives && into + step * (size_t)rank != own && !(call->operation == BROADCAST && !is_root))
        memmove(into + step * (size_t)rank, own, nbytes);
    if (call->operation == BROADCAST && is_root && call->to != call->from)
        memmove(call->to, call->from, nbytes);
    bool is_done = exchange(comm, messages, num);
    if (terms && is_done)
        fold(call->to, terms, size, call->count, call->type, call->op);
    free(terms);
    return is_done;
}

static bool run_messages(const struct call *calls) {
    struct ncclComm *comm = calls->comm;
    int num = 0;
    for (const struct call *call = calls; call; call = call->next)
        num++;
    struct message *messages = calloc((size_t)num, sizeof *messages);
    const struct call *unpaired = calls; // of what this rank sends itself: where its next place may be
    num = 0;
    for (const struct call *call = calls; call; call = call->next) {
        if (call->operation > RECEIVE)
            continue;
        size_t nbytes = call->count * size_of(call->type);
        if (call->root != comm->rank) {
            char *at = call->operation == SEND ? (char *)call->from : call->to;
            messages[num++] = (struct message){call->root, call->operation == SEND, at, nbytes};
        } else if (call->operation == SEND) {
            while (unpaired && !(unpaired->operation == RECEIVE && unpaired->root == comm->rank))
                unpaired = unpaired->next;
            if (unpaired) {
                memmove(unpaired->to, call->from, nbytes);
                unpaired = unpaired->next;
            }
        }
    }
    bool is_done = exchange(comm, messages, num);
    free(messages);
    return is_done;
}

static void release(struct ncclComm *comm) { // under the lock
    if (--comm->references)
        return;
    for (int rank = 0; rank < comm->size; rank++)
        if (comm->sockets[rank] >= 0)
            close(comm->sockets[rank]);
    free(comm);
}

static void run_calls(void *argument) {
    struct call *calls = argument;
    struct ncclComm *comm = calls->comm;
    pthread_mutex_lock(&lock);
    while (comm->done < calls->number && !comm->aborted) // groups of one communicator run in the order of their calls
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    bool goes_on = !comm->aborted && run_messages(calls);
    for (struct call *call = calls, *next; call; call = next) {
        next = call->next;
        goes_on = goes_on && (call->operation <= RECEIVE || run_collective(call));
        free(call);
    }
    pthread_mutex_lock(&lock);
    comm->done++;
    release(comm);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void give_group(struct call *calls) {
    while (calls) { // what is of another communicator or stream is a group of its own
        struct call *rest = NULL, **end_of_rest = &rest, *own = NULL, **end = &own;
        for (struct call *call = calls, *next; call; call = next) {
            struct call ***at = call->comm == calls->comm && call->stream == calls->stream ? &end : &end_of_rest;
            next = call->next;
            call->next = NULL;
            **at = call;
            *at = &call->next;
        }
        pthread_mutex_lock(&lock);
        own->number = own->comm->given++;
        own->comm->references++;
        pthread_mutex_unlock(&lock);
        enqueue(own->stream, run_calls, own);
        calls = rest;
    }
}

static ncclResult_t call_it(struct call call) {
    if (!call.comm || call.root < 0 || call.root >= call.comm->size)
        return refused(ncclInvalidArgument, "no communicator, or no such rank");
    if (call.operation >= ALL_REDUCE && call.operation <= REDUCE_SCATTER &&
        (call.type > ncclBfloat16 || call.op > ncclAvg))
        return refused(ncclInvalidArgument, "a reduction that the GPU made of RAM does not know");
    if (broken())
        return refused(ncclUnhandledCudaError, "the device is broken");
    struct call *kept = malloc(sizeof *kept);
    *kept = call;
    *(first ? &last->next : &first) = kept;
    last = kept;
    depth++;
    return ncclGroupEnd();
}

EXPORT ncclResult_t ncclGroupStart(void) {
    depth++;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void) {
    if (--depth == 0 && first) {
        struct call *calls = first;
        first = last = NULL;
        give_group(calls);
    }
    return ncclSuccess;
}

EXPORT ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return call_it((struct call){.operation = SEND, .from = from, .count = count, .type = type, .root = peer,
                              .comm = comm, .stream = stream});
}

EXPORT ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return call_it((struct call){.operation = RECEIVE, .to = to, .count = count, .type = type, .root = peer,
                              .comm = comm, .stream = stream});
}

EXPORT ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                  ncclComm_t comm, cudaStream_t stream) {
    return call_it((struct call){.operation = ALL_REDUCE, .from = from, .to = to, .count = count, .type = type, .op = op,
                              .comm = comm, .stream = stream});
}

EXPORT ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                               ncclComm_t comm, cudaStream_t stream) {
    return call_it((struct call){.operation = REDUCE, .from = from, .to = to, .count = count, .type = type, .op = op,
                              .root = root, .comm = comm, .stream = stream});
}

EXPORT ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                      ncclComm_t comm, cudaStream_t stream) {
    return call_it((struct call){.operation = REDUCE_SCATTER, .from = from, .to = to, .count = count, .type = type,
                              .op = op, .comm = comm, .stream = stream});
}

EXPORT ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
    return call_it((struct call){.operation = ALL_GATHER, .from = from, .to = to, .count = count, .type = type,
                              .comm = comm, .stream = stream});
}

EXPORT ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    return call_it((struct call){.operation = BROADCAST, .from = from, .to = to, .count = count, .type = type,
                              .root = root, .comm = comm, .stream = stream});
}

EXPORT ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                              cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                                 cudaStream_t stream) {
    return call_it((struct call){.operation = ALL_TO_ALL, .from = from, .to = to, .count = count, .type = type,
                              .comm = comm, .stream = stream});
}

// ---- communicators

static struct sockaddr_un address_of(const char *name, int rank, socklen_t *nbytes) {
    struct sockaddr_un found = {.sun_family = AF_UNIX}; // begins with a zero: it has no file
    int length = snprintf(found.sun_path + 1, sizeof found.sun_path - 1, "%s.%d", name, rank);
    *nbytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
    return found;
}

struct hello {
    int rank, device;
};

static bool whole(ssize_t moved, size_t wanted) { return moved == (ssize_t)wanted; }

// Connect to all others, who do the same; NULL: two ranks have one GPU, or a rank ended meanwhile.
static struct ncclComm *meet(const char *name, int rank, int size, char *why) {
    struct ncclComm *comm = calloc(1, sizeof *comm + (size_t)size * sizeof(int));
    *comm = (struct ncclComm){.rank = rank, .size = size, .device = current_device(), .references = 1};
    snprintf(comm->name, sizeof comm->name, "%s", name);
    memset(comm->sockets, -1, (size_t)size * sizeof(int));
    struct hello own = {rank, comm->device}, other;
    bool is_good = true;
    socklen_t nbytes;
    struct sockaddr_un address = address_of(name, rank, &nbytes);
    int listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    is_good = !bind(listening, (struct sockaddr *)&address, nbytes) && !listen(listening, size);
    for (int peer = 0; is_good && peer < size; peer++) {
        if (peer == rank)
            continue;
        int found;
        if (peer < rank) {
            found = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
            address = address_of(name, peer, &nbytes);
            while (connect(found, (struct sockaddr *)&address, nbytes))
                usleep(1000); // not there yet
        } else
            found = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
        is_good = whole(send(found, &own, sizeof own, MSG_NOSIGNAL), sizeof own) &&
                  whole(recv(found, &other, sizeof other, MSG_WAITALL), sizeof other);
        if (is_good && other.device == own.device)
            is_good = false, snprintf(why, TEXT_NBYTES, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d",
                                      rank, other.rank, own.device);
        comm->sockets[is_good ? other.rank : peer] = found;
    }
    close(listening);
    if (is_good)
        return comm;
    release(comm);
    return NULL;
}

static ncclResult_t make(ncclComm_t *found, const char *name, int rank, int size) {
    if (size > 1 && !is_late()) // the host would wait where a GPU does
        return refused(ncclInvalidUsage, "streams must be threads: start the process with late=SEED (and late_us=0)");
    void *python = let_python_run();
    char why[TEXT_NBYTES] = "";
    *found = meet(name, rank, size, why);
    take_python_back(python);
    if (*found)
        return ncclSuccess;
    return *why ? refused(ncclInvalidUsage, why) : refused(ncclSystemError, "a rank ended");
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    unsigned char random[16];
    if (getrandom(random, sizeof random, 0) != sizeof random)
        return ncclSystemError;
    memset(id, 0, sizeof *id);
    strcpy(id->internal, "cuda_in_ram.");
    for (size_t i = 0; i < sizeof random; i++)
        sprintf(id->internal + strlen(id->internal), "%02x", random[i]);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    return make(comm, id.internal, rank, size);
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank,
                                           ncclConfig_t *config) {
    (void)config;
    return make(comm, id.internal, rank, size);
}

EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int num_ids, ncclUniqueId *ids,
                                             ncclConfig_t *config) {
    (void)num_ids, (void)config;
    return make(comm, ids->internal, rank, size);
}

EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) { // until all that it was given is over
    void *python = let_python_run();
    pthread_mutex_lock(&lock);
    while (comm->done < comm->given && !comm->aborted)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    take_python_back(python);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    ncclCommFinalize(comm);
    pthread_mutex_lock(&lock);
    release(comm);
    pthread_mutex_unlock(&lock);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) { // what waits for a peer ends as it is
    pthread_mutex_lock(&lock);
    __atomic_store_n(&comm->aborted, true, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&changed);
    release(comm);
    pthread_mutex_unlock(&lock);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    (void)comm;
    *error = ncclSuccess; // a peer that is gone is none
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { return *count = comm->size, ncclSuccess; }

EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { return *rank = comm->rank, ncclSuccess; }

EXPORT ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }

EXPORT const char *ncclGetErrorString(ncclResult_t result) {
    static const char *WORDS[] = {"no error",         "unhandled cuda error", "unhandled system error",
                                  "internal error",   "invalid argument",     "invalid usage",
                                  "remote process exited or there was a network error", "in progress"};
    return result < ncclNumResults ? WORDS[result] : "unknown result code";
}

EXPORT const char *ncclGetLastError(ncclComm_t comm) { return (void)comm, last_error; }

static ncclResult_t of_cuda(cudaError_t error) { return error ? ncclUnhandledCudaError : ncclSuccess; }

EXPORT ncclResult_t ncclMemAlloc(void **address, size_t nbytes) { return of_cuda(cudaMalloc(address, nbytes)); }

EXPORT ncclResult_t ncclMemFree(void *address) { return of_cuda(cudaFree(address)); }
