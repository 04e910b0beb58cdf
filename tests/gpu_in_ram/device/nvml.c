// NVIDIA's management library, as far as torch's allocator and chunkc ask it. It is not told who uses which memory.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

#define NOT_SUPPORTED 3

static long setting(const char *name) {
    long (*ask)(const char *) = (long (*)(const char *))dlsym(RTLD_DEFAULT, "cuda_in_ram_setting");
    return ask ? ask(name) : 0;
}

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return (void)flags, 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error ? "not supported by the GPU made of RAM" : "success"; }

int nvmlDeviceGetCount_v2(unsigned *num) { return *num = (unsigned)setting("devices"), 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, size_t *device) { return *device = index + 1, 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, size_t *device) { return (void)uuid, *device = 1, 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, size_t *device) {
    unsigned number = 1;
    sscanf(bus, "%*x:%x", &number);
    return *device = number, 0;
}

int nvmlDeviceGetName(size_t device, char *text, unsigned nbytes) {
    const char *(*name)(void) = (const char *(*)(void))dlsym(RTLD_DEFAULT, "cuda_in_ram_name");
    (void)device;
    return snprintf(text, nbytes, "%s", name ? name() : "none"), 0;
}

int nvmlDeviceGetMemoryInfo(size_t device, unsigned long long *total_free_used) {
    (void)device;
    total_free_used[0] = total_free_used[1] = (unsigned long long)setting("memory");
    return total_free_used[2] = 0, 0;
}

#define NOBODY(name)                                                                                                   \
    int name(size_t device, unsigned *num, void *found) { return (void)device, (void)found, *num = 0, 0; }
NOBODY(nvmlDeviceGetComputeRunningProcesses)
NOBODY(nvmlDeviceGetComputeRunningProcesses_v2)
NOBODY(nvmlDeviceGetComputeRunningProcesses_v3)

int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned nbytes) { return snprintf(text, nbytes, "580.00"), 0; }

#define REFUSED(name)                                                                                                  \
    int name(void) { return NOT_SUPPORTED; }
REFUSED(nvmlDeviceGetNvLinkRemoteDeviceType)
REFUSED(nvmlDeviceGetNvLinkRemotePciInfo_v2)

// No fabric: what the caller's zeros say (nvmlGpuFabricInfo_t: state NOT_SUPPORTED is 0).
int nvmlDeviceGetGpuFabricInfoV(size_t device, void *info) { return (void)device, (void)info, 0; }
