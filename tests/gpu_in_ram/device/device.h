// A GPU made of RAM: what the files of this library share.
//
// One library stands in for CUDA's driver, its runtime, cuBLAS and NCCL. Device memory is mapped RAM that is counted, streams
// are threads (or, when they are not to be late, nothing at all), and kernels do nothing: who wants arithmetic gives
// `cuda_in_ram_enqueue` a function to run in a kernel's place.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_DEVICES 8
#define NUM_ATTRIBUTES 200
#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORT __attribute__((visibility("default")))

// What a test chooses: `CUDA_IN_RAM="name=value,..."` in the environment, or `cuda_in_ram_configure` while it runs.
struct settings {
    long devices;       // how many
    long capability;    // 90 for 9.0
    long memory;        // bytes of each device
    long pinnable;      // bytes of host memory that may be registered or allocated as pinned
    long late;          // 0: streams are prompt; else a seed for random delays
    long late_us;       // the longest delay before a piece of work, in microseconds
    long fail_launch;   // so many launches from now on, one fails and leaves the device broken (sticky); 0: none
    long fail_malloc;   // so many allocations from now on, one says that memory is out; 0: none
    long fail_register; // so many registrations of host memory from now on, one is refused; 0: none
    long drop_wait;     // from so many waits for events on, the first with something to wait for is not made, and its
                        // event comes late; 0: none
    long register_us;   // how long to register and to unregister host memory takes, in microseconds
    long capturing;     // 1: some other thread captures a graph, so that what could not be captured is refused to all
                        // threads that do not say that they know (cudaStreamCaptureModeRelaxed), and ends the capture
    int attributes[NUM_ATTRIBUTES]; // `attribute.91=0`; -1: what such a device says
};
extern struct settings settings HIDDEN;

// True once, when a countdown of the settings ends.
HIDDEN bool falls_due(long *countdown);

// Errors. `failed` notes an error for cudaGetLastError; `broken` is the device's sticky one.
HIDDEN cudaError_t failed(cudaError_t error);
HIDDEN cudaError_t broken(void);
HIDDEN void break_device(cudaError_t error);
#define UNLESS_BROKEN                                                                                                  \
    if (broken())                                                                                                      \
    return failed(broken())

// Where another thread captures a graph: calls that could not be captured, and those that wait for all streams.
HIDDEN bool breaks_capture(bool waits_for_all);
#define UNLESS_CAPTURED(waits_for_all)                                                                                 \
    if (breaks_capture(waits_for_all))                                                                                 \
    return failed(cudaErrorStreamCaptureUnsupported)

// Devices.
HIDDEN int current_device(void);
HIDDEN int attribute_of(int attribute);

// Memory.
enum kind { UNKNOWN, PINNED, DEVICE };
HIDDEN enum kind kind_of(const void *address, int *device);
HIDDEN bool take(int device, size_t nbytes); // false: not so much is left
HIDDEN void give(int device, size_t nbytes);
HIDDEN size_t taken(int device);
HIDDEN void note_range(void *address, size_t nbytes, enum kind kind, int device);
HIDDEN size_t forget_range(void *address, enum kind kind); // its bytes, 0 if there is no such range

// Streams.
typedef void (*work_fn)(void *argument);
HIDDEN void enqueue(cudaStream_t stream, work_fn run, void *argument);
HIDDEN void wait_stream(cudaStream_t stream);
HIDDEN void wait_device(int device);
HIDDEN bool is_late(void);
HIDDEN void *let_python_run(void); // before a wait
HIDDEN void take_python_back(void *state);
