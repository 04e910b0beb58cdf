// The rest of the runtime: devices, errors, and launches of kernels that do nothing.
#define _GNU_SOURCE
#include "device.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread int device_of_thread;
static __thread cudaError_t last_error;
static cudaError_t sticky;
static long num_launches;

HIDDEN int current_device(void) { return device_of_thread; }

// ---- errors

HIDDEN cudaError_t failed(cudaError_t error) { return last_error = error; }
HIDDEN cudaError_t broken(void) { return sticky; }
HIDDEN void break_device(cudaError_t error) { sticky = error; }

// Let the device fail from now on, as after a kernel's fault; 0 mends it, which no real one does.
EXPORT void cuda_in_ram_break(int error) { sticky = last_error = (cudaError_t)error; }

EXPORT cudaError_t cudaPeekAtLastError(void) { return sticky ? sticky : last_error; }

EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t found = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return found;
}

static __thread enum cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
static long num_broken_captures;

HIDDEN bool breaks_capture(bool waits_for_all) {
    if (!settings.capturing || (capture_mode == cudaStreamCaptureModeRelaxed && !waits_for_all))
        return false;
    __atomic_add_fetch(&num_broken_captures, 1, __ATOMIC_SEQ_CST);
    return true;
}

// Calls so far that ended a graph's capture.
EXPORT long cuda_in_ram_broken_captures(void) { return num_broken_captures; }

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

static const struct {
    cudaError_t error;
    const char *name, *words;
} ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
};

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].error == error)
            return ERRORS[i].words;
    return "an error that the GPU made of RAM has no words for";
}

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].error == error)
            return ERRORS[i].name;
    return "cudaErrorUnknown";
}

// ---- devices

struct model {
    long capability;
    const char *name;
    int multiprocessors, threads, blocks, shared, shared_optin, l2, clock_khz, bus;
};
static const struct model MODELS[] = {
    {70, "Tesla V100-SXM2-32GB", 80, 2048, 32, 98304, 98304, 6291456, 877000, 4096},
    {75, "Tesla T4", 40, 1024, 16, 65536, 65536, 4194304, 5001000, 256},
    {80, "NVIDIA A100-SXM4-40GB", 108, 2048, 32, 167936, 166912, 41943040, 1215000, 5120},
    {86, "NVIDIA RTX A6000", 84, 1536, 16, 102400, 101376, 6291456, 8001000, 384},
    {89, "NVIDIA GeForce RTX 4090", 128, 1536, 24, 102400, 101376, 75497472, 10501000, 384},
    {90, "NVIDIA H100 80GB HBM3", 132, 2048, 32, 233472, 232448, 52428800, 2619000, 5120},
};

static const struct model *model(void) {
    for (size_t i = 0; i < sizeof MODELS / sizeof *MODELS; i++)
        if (MODELS[i].capability == settings.capability)
            return &MODELS[i];
    fprintf(stderr, "CUDA_IN_RAM: there is no device of capability %ld here\n", settings.capability);
    abort();
}

EXPORT const char *cuda_in_ram_name(void) { return model()->name; }

// The driver's and the runtime's attributes have the same numbers.
HIDDEN int attribute_of(int attribute) {
    const struct model *found = model();
    if (attribute >= 0 && attribute < NUM_ATTRIBUTES && settings.attributes[attribute] >= 0)
        return settings.attributes[attribute];
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
        return 1024;
    case cudaDevAttrMaxBlockDimZ:
        return 64;
    case cudaDevAttrMaxGridDimX:
        return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
        return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        return 49152;
    case cudaDevAttrWarpSize:
        return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
        return 65536;
    case cudaDevAttrMultiProcessorCount:
        return found->multiprocessors;
    case cudaDevAttrMemoryClockRate:
        return found->clock_khz;
    case cudaDevAttrGlobalMemoryBusWidth:
        return found->bus;
    case cudaDevAttrL2CacheSize:
        return found->l2;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        return found->threads;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
        return found->blocks;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        return found->shared;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        return found->shared_optin;
    case cudaDevAttrComputeCapabilityMajor:
        return (int)(settings.capability / 10);
    case cudaDevAttrComputeCapabilityMinor:
        return (int)(settings.capability % 10);
    case cudaDevAttrAsyncEngineCount:
        return 3;
    case cudaDevAttrTextureAlignment:
        return 512;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        return 1;
    default:
        return 0; // such as pageable memory access: the attribute says whether there is HMM
    }
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= settings.devices)
        return failed(cudaErrorInvalidDevice);
    *value = attribute_of(attribute);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    if (device < 0 || device >= settings.devices)
        return failed(cudaErrorInvalidDevice);
    memset(found, 0, sizeof *found);
    strcpy(found->name, model()->name);
    found->uuid.bytes[0] = (char)(device + 1);
    found->totalGlobalMem = (size_t)settings.memory;
    found->sharedMemPerBlock = (size_t)attribute_of(cudaDevAttrMaxSharedMemoryPerBlock);
    found->sharedMemPerBlockOptin = (size_t)attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    found->sharedMemPerMultiprocessor = (size_t)attribute_of(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->warpSize = 32;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->major = attribute_of(cudaDevAttrComputeCapabilityMajor);
    found->minor = attribute_of(cudaDevAttrComputeCapabilityMinor);
    found->multiProcessorCount = attribute_of(cudaDevAttrMultiProcessorCount);
    found->maxThreadsPerMultiProcessor = attribute_of(cudaDevAttrMaxThreadsPerMultiProcessor);
    found->maxBlocksPerMultiProcessor = attribute_of(cudaDevAttrMaxBlocksPerMultiprocessor);
    found->l2CacheSize = attribute_of(cudaDevAttrL2CacheSize);
    found->memoryBusWidth = attribute_of(cudaDevAttrGlobalMemoryBusWidth);
    found->asyncEngineCount = attribute_of(cudaDevAttrAsyncEngineCount);
    found->textureAlignment = 512;
    found->unifiedAddressing = found->concurrentKernels = found->managedMemory = found->canMapHostMemory = 1;
    found->pageableMemoryAccess = attribute_of(cudaDevAttrPageableMemoryAccess);
    found->hostRegisterSupported = attribute_of(cudaDevAttrHostRegisterSupported);
    found->canUseHostPointerForRegisteredMem = attribute_of(cudaDevAttrCanUseHostPointerForRegisteredMem);
    found->pciBusID = device + 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceCount(int *num) {
    *num = (int)settings.devices;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int *device) {
    *device = device_of_thread;
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= settings.devices)
        return failed(cudaErrorInvalidDevice);
    device_of_thread = device;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int nbytes, int device) {
    snprintf(text, (size_t)nbytes, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = 0;
    return cudaSuccess;
}

// ---- kernels

HIDDEN cudaError_t launch(void) {
    UNLESS_BROKEN;
    __atomic_add_fetch(&num_launches, 1, __ATOMIC_SEQ_CST);
    if (falls_due(&settings.fail_launch))
        break_device(cudaErrorLaunchFailure); // as after a fault: found at the next call that looks
    return cudaSuccess;
}

EXPORT long cuda_in_ram_launches(void) { return num_launches; }

EXPORT cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
    (void)kernel, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
    return launch();
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
    (void)kernel, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
    return launch();
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    (void)config, (void)kernel, (void)arguments;
    return launch();
}

EXPORT void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    (void)binary;
    return &handle;
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    (void)kernel;
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    int compiled_for = settings.capability == 89 ? 86 : (int)settings.capability; // PyTorch has no code for 8.9
    found->binaryVersion = found->ptxVersion = compiled_for;
    found->maxDynamicSharedSizeBytes = attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *num, const void *kernel, int threads,
                                                                          size_t shared, unsigned flags) {
    (void)kernel, (void)shared, (void)flags;
    int fit = threads ? attribute_of(cudaDevAttrMaxThreadsPerMultiProcessor) / threads : 1;
    *num = fit < 1 ? 1 : fit;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char room[1 << 16];
    (void)symbol;
    *address = room;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result) {
    (void)version, (void)flags;
    *found = dlsym(RTLD_DEFAULT, name);
    if (result)
        *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
