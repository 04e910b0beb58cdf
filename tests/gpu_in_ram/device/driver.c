// The driver: what torch, Triton and chunkc ask of it beside the runtime, and modules whose kernels do nothing.
#define _GNU_SOURCE
#include "device.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

HIDDEN cudaError_t launch(void);
EXPORT const char *cuda_in_ram_name(void);

static long context;

EXPORT CUresult cuInit(unsigned flags) { return (void)flags, CUDA_SUCCESS; }

EXPORT CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }

EXPORT CUresult cuDeviceGetCount(int *num) { return *num = (int)settings.devices, CUDA_SUCCESS; }

EXPORT CUresult cuDeviceGet(CUdevice *device, int index) {
    *device = index;
    return index < settings.devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGetName(char *text, int nbytes, CUdevice device) {
    (void)device;
    snprintf(text, (size_t)nbytes, "%s", cuda_in_ram_name());
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice device) {
    (void)device;
    return *nbytes = (size_t)settings.memory, CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    return *value = attribute_of((int)attribute), CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *found) { return *found = (CUcontext)&context, CUDA_SUCCESS; }

EXPORT CUresult cuCtxGetDevice(CUdevice *device) { return *device = current_device(), CUDA_SUCCESS; }

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext pushed) { return (void)pushed, CUDA_SUCCESS; }

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *popped) { return cuCtxGetCurrent(popped); }

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return (void)device, CUDA_SUCCESS; }

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) {
    (void)device;
    return cuCtxGetCurrent(found);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    (void)device;
    return *flags = 0, *active = 1, CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    return (CUresult)cudaStreamCreateWithFlags(stream, flags);
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    return (CUresult)cudaThreadExchangeStreamCaptureMode((enum cudaStreamCaptureMode *)mode);
}

// NVRTC asks for tables of the driver's own, which nobody documents, and does without.
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *which) {
    (void)which;
    return *table = NULL, CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **words) {
    return *words = cudaGetErrorString((cudaError_t)error), CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **name) {
    return *name = cudaGetErrorName((cudaError_t)error), CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    struct cudaPointerAttributes found;
    cudaPointerGetAttributes(&found, (void *)address);
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)value = (CUdeviceptr)found.devicePointer;
    else if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT)
        *(CUcontext *)value = found.type == cudaMemoryTypeUnregistered ? NULL : (CUcontext)&context;
    else
        return CUDA_ERROR_NOT_SUPPORTED;
    return found.devicePointer ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// ---- modules

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    (void)image;
    return *module = calloc(1, 8), CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, path); }

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned num, CUjit_option *options,
                                   void **values) {
    (void)num, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}

EXPORT CUresult cuModuleUnload(CUmodule module) { return free(module), CUDA_SUCCESS; }

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    (void)name;
    return *function = (CUfunction)module, CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    (void)function;
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
             : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                  : 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *num, CUfunction function, int threads, size_t shared) {
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(num, function, threads, shared, 0);
}

EXPORT CUresult cuOccupancyMaxActiveClusters(int *num, CUfunction function, const CUlaunchConfig *config) {
    (void)function, (void)config;
    return *num = 1, CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra) {
    (void)function, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz;
    (void)shared, (void)stream, (void)arguments, (void)extra;
    return (CUresult)launch();
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    (void)config, (void)function, (void)arguments, (void)extra;
    return (CUresult)launch();
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **found, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *result) {
    (void)version, (void)flags;
    *found = dlsym(RTLD_DEFAULT, name);
    if (result)
        *result = *found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
