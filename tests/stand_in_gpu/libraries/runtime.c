/* libcudart.so: CUDA's runtime, on the functions of the stand-in driver. */
#define _GNU_SOURCE
#include "device.h"
#include "topology.h"

#include <dlfcn.h>
#include <driver_types.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <vector_types.h>

#define LEAST_EVENT_MILLISECONDS 0.01f /* no time at all would make speeds infinite */
#define LOWEST_STREAM_PRIORITY 0
#define HIGHEST_STREAM_PRIORITY (-5)

static __thread int last_error;

/* Keeps an error for cudaGetLastError, as the runtime does. */
static cudaError_t keep(int error) {
    if (error)
        last_error = error;
    return (cudaError_t)error;
}

/* ---- kernels --------------------------------------------------------------------------------------------- */

/* Compiled code registers its kernels when it is loaded, long before it may touch the device. */
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    (void)binary;
    return handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {
    (void)handle;
}

void __cudaUnregisterFatBinary(void **handle) {
    (void)handle;
}

void __cudaRegisterFunction(void) {
}

void __cudaRegisterVar(void) {
}

char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

static __thread struct {
    struct dim3 grid, block;
    size_t shared_bytes;
    void *stream;
} launch;

unsigned __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared_bytes, void *stream) {
    launch.grid = grid;
    launch.block = block;
    launch.shared_bytes = shared_bytes;
    launch.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared_bytes, void *stream) {
    *grid = launch.grid;
    *block = launch.block;
    *shared_bytes = launch.shared_bytes;
    *(void **)stream = launch.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(const void *kernel) {
    return keep(stand_in_launch(kernel));
}

cudaError_t cudaLaunchKernel(const void *kernel) {
    return keep(stand_in_launch(kernel));
}

cudaError_t cudaLaunchKernelExC(const void *config, const void *kernel) {
    (void)config;
    return keep(stand_in_launch(kernel));
}

cudaError_t cudaLaunchCooperativeKernel(const void *kernel) {
    return keep(stand_in_launch(kernel));
}

cudaError_t cudaLaunchHostFunc(void *stream, void (*function)(void *), void *argument) {
    (void)stream;
    int error = stand_in_touch_device();
    if (!error)
        function(argument);
    return keep(error);
}

/* The capability that the loaded code was compiled for: of torch's, the highest that the device can run. */
static int compiled_capability(int capability) {
    static const int compiled[] = {COMPILED_CAPABILITIES};
    int best = compiled[0];
    for (size_t i = 0; i < sizeof compiled / sizeof *compiled; i++)
        if (compiled[i] <= capability)
            best = compiled[i];
    return best;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    (void)function;
    struct stand_in_properties properties;
    int error = stand_in_properties(stand_in_current_device(), &properties);
    if (error)
        return keep(error);
    int capability = compiled_capability(properties.capability_major * 10 + properties.capability_minor);
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = capability;
    attributes->binaryVersion = capability;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size,
                                                                   size_t shared_bytes, unsigned flags) {
    (void)function, (void)size, (void)shared_bytes, (void)flags;
    *blocks = 8;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size,
                                                          size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, size, shared_bytes, 0);
}

/* ---- devices --------------------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count) {
    int error = stand_in_initialize();
    *count = error ? 0 : stand_in_device_count();
    return keep(error);
}

cudaError_t cudaGetDevice(int *device) {
    int error = stand_in_initialize();
    *device = stand_in_current_device();
    return keep(error);
}

cudaError_t cudaSetDevice(int device) {
    return keep(stand_in_use_device(device));
}

cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device) {
    struct stand_in_properties properties;
    int error = stand_in_properties(device, &properties);
    if (!error)
        *value = stand_in_attribute(attribute, device); /* the runtime's numbers are the driver's */
    return keep(error);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    struct stand_in_properties known;
    int error = stand_in_properties(device, &known);
    if (error)
        return keep(error);
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, DEVICE_NAME);
    memcpy(properties->uuid.bytes, known.uuid, 16);
    properties->totalGlobalMem = known.total_bytes;
    properties->major = known.capability_major;
    properties->minor = known.capability_minor;
    properties->pciBusID = known.pci_bus;
    properties->maxThreadsPerBlock = stand_in_attribute(cudaDevAttrMaxThreadsPerBlock, device);
    properties->maxThreadsDim[0] = stand_in_attribute(cudaDevAttrMaxBlockDimX, device);
    properties->maxThreadsDim[1] = stand_in_attribute(cudaDevAttrMaxBlockDimY, device);
    properties->maxThreadsDim[2] = stand_in_attribute(cudaDevAttrMaxBlockDimZ, device);
    properties->maxGridSize[0] = stand_in_attribute(cudaDevAttrMaxGridDimX, device);
    properties->maxGridSize[1] = stand_in_attribute(cudaDevAttrMaxGridDimY, device);
    properties->maxGridSize[2] = stand_in_attribute(cudaDevAttrMaxGridDimZ, device);
    properties->sharedMemPerBlock = (size_t)stand_in_attribute(cudaDevAttrMaxSharedMemoryPerBlock, device);
    properties->sharedMemPerBlockOptin = (size_t)stand_in_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    properties->sharedMemPerMultiprocessor =
        (size_t)stand_in_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    properties->warpSize = stand_in_attribute(cudaDevAttrWarpSize, device);
    properties->regsPerBlock = stand_in_attribute(cudaDevAttrMaxRegistersPerBlock, device);
    properties->regsPerMultiprocessor = stand_in_attribute(cudaDevAttrMaxRegistersPerMultiprocessor, device);
    properties->multiProcessorCount = stand_in_attribute(cudaDevAttrMultiProcessorCount, device);
    properties->integrated = stand_in_attribute(cudaDevAttrIntegrated, device);
    properties->l2CacheSize = stand_in_attribute(cudaDevAttrL2CacheSize, device);
    properties->memoryBusWidth = stand_in_attribute(cudaDevAttrGlobalMemoryBusWidth, device);
    properties->maxThreadsPerMultiProcessor = stand_in_attribute(cudaDevAttrMaxThreadsPerMultiProcessor, device);
    properties->maxBlocksPerMultiProcessor = stand_in_attribute(cudaDevAttrMaxBlocksPerMultiprocessor, device);
    properties->totalConstMem = 64 * 1024;
    properties->textureAlignment = 512;
    properties->unifiedAddressing = 1;
    properties->cooperativeLaunch = 1;
    return cudaSuccess;
}

/* The name under CUDA 12. */
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *properties, int device) {
    return cudaGetDeviceProperties(properties, device);
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int device) {
    struct stand_in_properties properties;
    int error = stand_in_properties(device, &properties);
    if (!error)
        snprintf(text, (size_t)room, "0000:%02x:00.0", properties.pci_bus);
    return keep(error);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) {
    if (lowest)
        *lowest = LOWEST_STREAM_PRIORITY;
    if (highest)
        *highest = HIGHEST_STREAM_PRIORITY;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    (void)peer, (void)flags;
    return keep(cudaErrorNotSupported);
}

cudaError_t cudaDeviceSynchronize(void) {
    return keep(stand_in_synchronize());
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION_SHOWN;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDA_VERSION_SHOWN;
    return cudaSuccess;
}

cudaError_t cudaProfilerStart(void) {
    return cudaSuccess;
}

cudaError_t cudaProfilerStop(void) {
    return cudaSuccess;
}

/* ---- errors ---------------------------------------------------------------------------------------------- */

cudaError_t cudaPeekAtLastError(void) {
    int sticky = stand_in_sticky_error();
    return (cudaError_t)(sticky ? sticky : last_error);
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = cudaPeekAtLastError();
    last_error = 0; /* a sticky error stays */
    return error;
}

const char *cudaGetErrorName(cudaError_t error) {
    return stand_in_error_name(error);
}

const char *cudaGetErrorString(cudaError_t error) {
    return stand_in_error_text(error);
}

/* ---- memory ---------------------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    int error;
    *pointer = stand_in_allocate(bytes, MEMORY_DEVICE, &error);
    return keep(error);
}

cudaError_t cudaFree(void *pointer) {
    /* Of nothing: the usual way to create the context. */
    return keep(pointer ? stand_in_free(pointer) : stand_in_touch_device());
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    int error;
    *pointer = stand_in_allocate(bytes, MEMORY_PINNED, &error);
    return keep(error);
}

/* Managed memory is on the device only while kernels use it, and none does. */
cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned flags) {
    return cudaHostAlloc(pointer, bytes, flags);
}

#if CUDART_VERSION >= 13000
cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t bytes, struct cudaMemLocation where,
                                 unsigned flags, cudaStream_t stream) {
    (void)pointer, (void)bytes, (void)where, (void)flags, (void)stream;
    return keep(0);
}
#else
cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t bytes, int device,
                                 cudaStream_t stream) {
    (void)pointer, (void)bytes, (void)device, (void)stream;
    return keep(0);
}
#endif

cudaError_t cudaFreeHost(void *pointer) {
    return keep(stand_in_free(pointer));
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    (void)flags;
    return keep(stand_in_register(pointer, bytes));
}

cudaError_t cudaHostUnregister(void *pointer) {
    return keep(stand_in_unregister(pointer));
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    return keep(stand_in_memory_info(free_bytes, total_bytes));
}

cudaError_t cudaMemcpyAsync(void *destination, const void *source, size_t bytes, int kind, void *stream) {
    (void)kind, (void)stream;
    return keep(stand_in_copy(destination, source, bytes));
}

cudaError_t cudaMemcpy(void *destination, const void *source, size_t bytes, int kind) {
    cudaError_t error = cudaMemcpyAsync(destination, source, bytes, kind, NULL);
    return error ? error : keep(stand_in_synchronize());
}

cudaError_t cudaMemset(void *pointer, int value, size_t bytes) {
    (void)pointer, (void)value, (void)bytes;
    return keep(stand_in_touch_device());
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, void *stream) {
    (void)stream;
    return cudaMemset(pointer, value, bytes);
}

cudaError_t cudaMemcpy2DAsync(void) {
    return keep(stand_in_touch_device());
}

cudaError_t cudaMemcpyPeerAsync(void) {
    return keep(stand_in_touch_device());
}

cudaError_t cudaMemcpyToSymbol(void) {
    return keep(stand_in_touch_device());
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    (void)symbol;
    return cudaMalloc(pointer, 4096);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    int device = 0;
    enum memory_kind kind = stand_in_memory_kind(pointer, &device);
    memset(attributes, 0, sizeof *attributes);
    attributes->device = device;
    attributes->type = cudaMemoryTypeUnregistered;
    if (kind == MEMORY_DEVICE) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = (void *)pointer;
    }
    if (kind == MEMORY_PINNED) {
        attributes->type = cudaMemoryTypeHost;
        attributes->devicePointer = attributes->hostPointer = (void *)pointer;
    }
    return cudaSuccess;
}

/* ---- streams and events: all work is done at once, so a stream is nothing and an event a time -------------- */

cudaError_t cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)flags, (void)priority;
    int error = stand_in_touch_device();
    *stream = error ? NULL : malloc(16);
    return keep(error);
}

cudaError_t cudaStreamCreate(void **stream) {
    return cudaStreamCreateWithPriority(stream, 0, LOWEST_STREAM_PRIORITY);
}

cudaError_t cudaStreamDestroy(void *stream) {
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(void *stream, int *priority) {
    (void)stream;
    *priority = LOWEST_STREAM_PRIORITY;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(void *stream) {
    (void)stream;
    int error = stand_in_touch_device();
    return keep(!error && stand_in_hangs() ? CUDA_NOT_READY : error);
}

cudaError_t cudaStreamSynchronize(void *stream) {
    (void)stream;
    return keep(stand_in_synchronize());
}

cudaError_t cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)stream, (void)event, (void)flags;
    return keep(stand_in_touch_device());
}

cudaError_t cudaStreamIsCapturing(void *stream, int *status) {
    (void)stream;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

/* What else it could tell is defined only while a stream is being captured. */
cudaError_t cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) {
    if (id)
        *id = 0;
    return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id) {
    return cudaStreamGetCaptureInfo(stream, status, id);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) {
    (void)mode;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(void **event, unsigned flags) {
    (void)flags;
    int error = stand_in_touch_device();
    *event = error ? NULL : calloc(1, sizeof(struct timespec));
    return keep(error);
}

cudaError_t cudaEventCreate(void **event) {
    return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(void *event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(void *event, void *stream) {
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, event);
    return keep(stand_in_touch_device());
}

cudaError_t cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    (void)flags;
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(void *event) {
    return cudaStreamQuery(event);
}

cudaError_t cudaEventSynchronize(void *event) {
    (void)event;
    return keep(stand_in_synchronize());
}

cudaError_t cudaEventElapsedTime(float *milliseconds, void *start, void *end) {
    const struct timespec *from = start, *to = end;
    double elapsed = (double)(to->tv_sec - from->tv_sec) * 1e3 + (double)(to->tv_nsec - from->tv_nsec) * 1e-6;
    *milliseconds = elapsed < LEAST_EVENT_MILLISECONDS ? LEAST_EVENT_MILLISECONDS : (float)elapsed;
    return cudaSuccess;
}

/* ---- the driver's own functions ---------------------------------------------------------------------------- */

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *result) {
    (void)flags;
    char newest[256];
    snprintf(newest, sizeof newest, "%s_v2", name);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *function = dlsym(driver, newest);
    if (!*function)
        *function = dlsym(driver, name);
    if (result)
        *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, int *result) {
    (void)version;
    return cudaGetDriverEntryPoint(name, function, flags, result);
}
