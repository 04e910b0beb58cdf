// Memory: ranges of RAM that are pinned or the device's, and how much of each device is taken.
#define _GNU_SOURCE
#include "device.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULE (2UL << 20)    // the driver maps virtual memory in such pages
#define MALLOC_GRANULE 512UL

struct range {
    char *begin;
    size_t nbytes;
    enum kind kind;
    int device;
};
static struct range *ranges; // sorted by address; they do not overlap
static size_t num_ranges, room;
static size_t used[MAX_DEVICES], pinned;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t after(const void *address) { // how many ranges begin at or before it
    size_t low = 0, high = num_ranges;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].begin <= (const char *)address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

HIDDEN void note_range(void *address, size_t nbytes, enum kind kind, int device) {
    pthread_mutex_lock(&lock);
    if (num_ranges == room)
        ranges = realloc(ranges, (room = room ? 2 * room : 1024) * sizeof *ranges);
    size_t at = after(address);
    memmove(ranges + at + 1, ranges + at, (num_ranges - at) * sizeof *ranges);
    ranges[at] = (struct range){address, nbytes, kind, device};
    num_ranges++;
    pthread_mutex_unlock(&lock);
}

HIDDEN size_t forget_range(void *address, enum kind kind) {
    size_t nbytes = 0;
    pthread_mutex_lock(&lock);
    size_t at = after(address);
    if (at && ranges[at - 1].begin == address && ranges[at - 1].kind == kind) {
        nbytes = ranges[at - 1].nbytes;
        memmove(ranges + at - 1, ranges + at, (num_ranges - at) * sizeof *ranges);
        num_ranges--;
    }
    pthread_mutex_unlock(&lock);
    return nbytes;
}

static bool overlaps(const void *address, size_t nbytes) {
    pthread_mutex_lock(&lock);
    size_t at = after((const char *)address + nbytes - 1);
    bool found = at && ranges[at - 1].begin + ranges[at - 1].nbytes > (const char *)address;
    pthread_mutex_unlock(&lock);
    return found;
}

HIDDEN enum kind kind_of(const void *address, int *device) {
    enum kind kind = UNKNOWN;
    pthread_mutex_lock(&lock);
    size_t at = after(address);
    if (at && (const char *)address < ranges[at - 1].begin + ranges[at - 1].nbytes) {
        kind = ranges[at - 1].kind;
        if (device)
            *device = ranges[at - 1].device;
    }
    pthread_mutex_unlock(&lock);
    return kind;
}

HIDDEN bool take(int device, size_t nbytes) {
    if (falls_due(&settings.fail_malloc))
        return false;
    pthread_mutex_lock(&lock);
    bool fits = used[device] + nbytes <= (size_t)settings.memory;
    if (fits)
        used[device] += nbytes;
    pthread_mutex_unlock(&lock);
    return fits;
}

HIDDEN void give(int device, size_t nbytes) {
    pthread_mutex_lock(&lock);
    used[device] -= nbytes;
    pthread_mutex_unlock(&lock);
}

HIDDEN size_t taken(int device) { return __atomic_load_n(&used[device], __ATOMIC_SEQ_CST); }

static void *map(size_t nbytes, int protection, void *at) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
    return mmap(at, nbytes, protection, flags, -1, 0);
}

static bool pin(void *address, size_t nbytes, int device) {
    pthread_mutex_lock(&lock);
    bool fits = pinned + nbytes <= (size_t)settings.pinnable;
    if (fits)
        pinned += nbytes;
    pthread_mutex_unlock(&lock);
    if (fits)
        note_range(address, nbytes, PINNED, device);
    return fits;
}

static size_t unpin(void *address) {
    size_t nbytes = forget_range(address, PINNED);
    pthread_mutex_lock(&lock);
    pinned -= nbytes;
    pthread_mutex_unlock(&lock);
    return nbytes;
}

// ---- the runtime's

EXPORT cudaError_t cudaMalloc(void **address, size_t nbytes) {
    UNLESS_BROKEN;
    UNLESS_CAPTURED(false);
    size_t rounded = (nbytes + MALLOC_GRANULE - 1) / MALLOC_GRANULE * MALLOC_GRANULE;
    *address = NULL;
    if (!nbytes)
        return cudaSuccess;
    if (!take(current_device(), rounded))
        return failed(cudaErrorMemoryAllocation);
    *address = map(rounded, PROT_READ | PROT_WRITE, NULL);
    note_range(*address, rounded, DEVICE, current_device());
    return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void *address) {
    UNLESS_BROKEN;
    UNLESS_CAPTURED(false);
    if (!address)
        return cudaSuccess;
    int device = 0;
    if (kind_of(address, &device) != DEVICE)
        return failed(cudaErrorInvalidValue);
    wait_device(device);
    size_t nbytes = forget_range(address, DEVICE);
    give(device, nbytes);
    munmap(address, nbytes);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMallocAsync(void **address, size_t nbytes, cudaStream_t stream) {
    (void)stream; // nobody else can have the memory before
    return cudaMalloc(address, nbytes);
}

static void free_now(void *address) {
    int device = 0;
    kind_of(address, &device);
    size_t nbytes = forget_range(address, DEVICE);
    give(device, nbytes);
    munmap(address, nbytes);
}

EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
    UNLESS_BROKEN;
    if (kind_of(address, NULL) != DEVICE)
        return failed(cudaErrorInvalidValue);
    enqueue(stream, free_now, address);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free_nbytes, size_t *total_nbytes) {
    UNLESS_BROKEN;
    *total_nbytes = (size_t)settings.memory;
    *free_nbytes = *total_nbytes - taken(current_device());
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t nbytes, unsigned flags) {
    (void)flags;
    UNLESS_BROKEN;
    UNLESS_CAPTURED(false);
    if (posix_memalign(address, 4096, nbytes ? nbytes : 1))
        return failed(cudaErrorMemoryAllocation);
    if (pin(*address, nbytes, current_device()))
        return cudaSuccess;
    free(*address);
    *address = NULL;
    return failed(cudaErrorMemoryAllocation);
}

EXPORT cudaError_t cudaMallocHost(void **address, size_t nbytes) { return cudaHostAlloc(address, nbytes, 0); }

EXPORT cudaError_t cudaFreeHost(void *address) {
    UNLESS_CAPTURED(false);
    if (address) {
        wait_device(current_device());
        unpin(address);
        free(address);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void *address, size_t nbytes, unsigned flags) {
    (void)flags;
    UNLESS_BROKEN;
    UNLESS_CAPTURED(false);
    if (falls_due(&settings.fail_register))
        return failed(cudaErrorMemoryAllocation);
    if (!nbytes)
        return failed(cudaErrorInvalidValue);
    if (overlaps(address, nbytes))
        return failed(cudaErrorHostMemoryAlreadyRegistered);
    usleep((useconds_t)settings.register_us);
    return pin(address, nbytes, current_device()) ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

// CUDA does not say that this waits for copies, so it does not.
EXPORT cudaError_t cudaHostUnregister(void *address) {
    UNLESS_BROKEN;
    UNLESS_CAPTURED(false);
    usleep((useconds_t)settings.register_us);
    return unpin(address) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

EXPORT cudaError_t cudaHostGetDevicePointer(void **found, void *address, unsigned flags) {
    (void)flags;
    UNLESS_BROKEN;
    // Where the device has an address of its own for that memory, nothing is mapped there: its use is a fault.
    *found = (char *)address + (attribute_of(cudaDevAttrCanUseHostPointerForRegisteredMem) ? 0 : 1L << 46);
    return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    memset(found, 0, sizeof *found);
    int device = -2; // cudaInvalidDeviceId
    enum kind kind = kind_of(address, &device);
    found->type = kind == DEVICE   ? cudaMemoryTypeDevice
                  : kind == PINNED ? cudaMemoryTypeHost
                                   : cudaMemoryTypeUnregistered;
    found->device = device;
    if (kind != UNKNOWN)
        found->devicePointer = (void *)address;
    if (kind == PINNED) {
        found->hostPointer = (void *)address;
        cudaHostGetDevicePointer(&found->devicePointer, (void *)address, 0);
    }
    return cudaSuccess;
}

// ---- the driver's virtual memory, on which expandable segments stand. A handle is its bytes and its device.

EXPORT CUresult cuMemGetAllocationGranularity(size_t *nbytes, const CUmemAllocationProp *wanted,
                                              CUmemAllocationGranularity_flags flags) {
    (void)wanted, (void)flags;
    *nbytes = GRANULE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes, size_t alignment, CUdeviceptr at,
                                    unsigned long long flags) {
    (void)alignment, (void)at, (void)flags;
    char *found = map(nbytes + GRANULE, PROT_NONE, NULL);
    *address = ((CUdeviceptr)found + GRANULE - 1) / GRANULE * GRANULE;
    return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
    munmap((void *)address, nbytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *wanted,
                            unsigned long long flags) {
    (void)flags;
    if (!take(wanted->location.id, nbytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = nbytes | (unsigned long long)wanted->location.id; // bytes are multiples of the granule
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    give((int)(handle % GRANULE), handle / GRANULE * GRANULE);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    (void)offset, (void)flags;
    if (map(nbytes, PROT_READ | PROT_WRITE, (void *)address) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    note_range((void *)address, nbytes, DEVICE, (int)(handle % GRANULE));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *access, size_t num) {
    (void)address, (void)nbytes, (void)access, (void)num;
    return CUDA_SUCCESS;
}

// Does not wait for work that uses the memory: who unmaps does.
EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
    for (size_t done = 0, part; done < nbytes; done += part)
        if (!(part = forget_range((char *)address + done, DEVICE)))
            return CUDA_ERROR_INVALID_VALUE;
    return map(nbytes, PROT_NONE, (void *)address) == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
