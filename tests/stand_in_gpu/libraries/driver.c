/* libcuda.so.1: contexts, memory, modules and launches. Kernels do nothing. */
#define _GNU_SOURCE
#include "device.h"
#include "ledger.h"
#include "settings.h"
#include "topology.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* Keeps cuda.h from renaming functions to their newest version (cuMemAlloc to cuMemAlloc_v2): both are defined here. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#define GRANULARITY (2 * MIB) /* in which the driver hands out device memory */
#define THREAD_CONTEXTS 32
#define REGISTERS_OF_A_KERNEL 32
#define BLOCKS_ON_A_MULTIPROCESSOR 8
#define FIRST_ADDRESS 0x100000000000 /* 16 TiB: Linux has nothing there on x86-64 and 64-bit Arm */
#define LAST_ADDRESS 0x7fffffffffff  /* of 47 bits, which every process has */
#define MOST_ATTEMPTS 1000

/* ---- state of this process ------------------------------------------------------------------------------- */

struct context {
    int ordinal;
    bool exists;
    bool has_modules;
    int sticky_error;
};

enum region_source {
    ALLOCATED,
    RESERVED,   /* addresses without memory of their own (cuMemAddressReserve) */
    REGISTERED, /* the program's own memory, pinned (cudaHostRegister) */
};

struct region {
    uintptr_t address;
    size_t bytes;
    size_t taken_bytes; /* in the ledger */
    enum memory_kind kind;
    int ordinal;
    enum region_source source;
    struct region *next;
};

static struct settings settings;
static struct device devices[LEDGER_DEVICES];
static int device_count;
static pid_t initialized_by;
static struct context contexts[LEDGER_DEVICES];
static struct region *regions;
static const void *loaded[1 << 14]; /* kernels that were launched: a hash set */
static uint64_t loaded_count;
static uint64_t launches;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread struct context *stack[THREAD_CONTEXTS];
static __thread int depth;

static size_t round_up(size_t bytes, size_t multiple) {
    return (bytes + multiple - 1) / multiple * multiple;
}

int stand_in_initialize(void) {
    if (initialized_by == getpid())
        return device_count ? CUDA_OK : CUDA_NO_DEVICE;
    if (initialized_by) {
        log_line("CUDA used in a child that was forked after cuInit");
        return CUDA_NOT_INITIALIZED;
    }
    pthread_mutex_lock(&mutex);
    if (!initialized_by) {
        settings = read_settings();
        device_count = visible_devices(&settings, devices, LEDGER_DEVICES);
        for (int i = 0; i < device_count; i++)
            contexts[i].ordinal = i;
        initialized_by = getpid();
        log_line("cuInit: %d devices", device_count);
    }
    pthread_mutex_unlock(&mutex);
    return device_count ? CUDA_OK : CUDA_NO_DEVICE;
}

int stand_in_device_count(void) {
    return device_count;
}

/* ---- contexts -------------------------------------------------------------------------------------------- */

static size_t capacity_bytes(int ordinal) {
    return device_bytes(&settings, devices[ordinal]) - device_base_bytes(&settings, devices[ordinal]);
}

static int index_of(int ordinal) {
    return ledger_index(&settings, devices[ordinal]);
}

static int create_context(int ordinal) {
    int error = stand_in_initialize();
    if (error)
        return error;
    if (ordinal < 0 || ordinal >= device_count)
        return CUDA_INVALID_DEVICE;
    struct context *context = &contexts[ordinal];
    if (context->exists)
        return CUDA_OK;
    if (settings.compute_mode == COMPUTE_MODE_PROHIBITED || device_is_lost(&settings, devices[ordinal]))
        return CUDA_DEVICES_UNAVAILABLE;
    pthread_mutex_lock(&mutex);
    enum ledger_result result = LEDGER_TAKEN;
    if (!context->exists) {
        bool alone = settings.compute_mode == COMPUTE_MODE_EXCLUSIVE;
        result = ledger_grow_context(index_of(ordinal), settings.context_bytes, capacity_bytes(ordinal), alone);
        context->exists = result == LEDGER_TAKEN;
    }
    pthread_mutex_unlock(&mutex);
    log_line("context on device %d: %s", ordinal,
             result == LEDGER_TAKEN ? "created" : result == LEDGER_FULL ? "out of memory" : "device busy");
    if (result == LEDGER_OCCUPIED)
        return CUDA_DEVICES_UNAVAILABLE;
    return result == LEDGER_FULL ? CUDA_OUT_OF_MEMORY : CUDA_OK;
}

int stand_in_current_device(void) {
    return depth ? stack[depth - 1]->ordinal : 0;
}

int stand_in_use_device(int ordinal) {
    int error = create_context(ordinal);
    if (error)
        return error;
    depth = depth ? depth : 1;
    stack[depth - 1] = &contexts[ordinal];
    return CUDA_OK;
}

bool stand_in_has_context(int ordinal) {
    return ordinal >= 0 && ordinal < device_count && contexts[ordinal].exists;
}

static void make_sticky(int ordinal) {
    bool loses_device;
    contexts[ordinal].sticky_error = error_of_xid(settings.xid, &loses_device);
    log_line("Xid %d on device %d", settings.xid, ordinal);
    /* Where a file says so, the device is back as soon as the file is gone. */
    if (loses_device && !settings.xid_after.file)
        ledger_lose_device(index_of(ordinal), settings.xid);
}

int stand_in_sticky_error(void) {
    int ordinal = stand_in_current_device();
    struct context *context = &contexts[ordinal];
    if (!context->exists || context->sticky_error)
        return context->sticky_error;
    bool is_meant = settings.xid_gpu < 0 || settings.xid_gpu == devices[ordinal].gpu;
    if (is_meant && triggered(&settings.xid_after, launches))
        make_sticky(ordinal);
    return context->sticky_error;
}

int stand_in_touch_device(void) {
    int error = stand_in_use_device(stand_in_current_device());
    return error ? error : stand_in_sticky_error();
}

/* ---- memory ---------------------------------------------------------------------------------------------- */

static void remember(struct region region) {
    struct region *entry = malloc(sizeof *entry);
    *entry = region;
    pthread_mutex_lock(&mutex);
    entry->next = regions;
    regions = entry;
    pthread_mutex_unlock(&mutex);
}

static int take(size_t bytes, enum memory_kind kind, int ordinal) {
    enum ledger_result result = kind == MEMORY_PINNED
                                    ? ledger_pin(bytes, settings.pinned_limit_bytes)
                                    : ledger_allocate(index_of(ordinal), bytes, capacity_bytes(ordinal));
    if (result != LEDGER_TAKEN)
        log_line("out of memory: %zu bytes of %s memory", bytes, kind == MEMORY_PINNED ? "pinned" : "device");
    return result == LEDGER_TAKEN ? CUDA_OK : CUDA_OUT_OF_MEMORY;
}

static void give_back(size_t bytes, enum memory_kind kind, int ordinal) {
    if (kind == MEMORY_PINNED)
        ledger_unpin(bytes);
    else
        ledger_free(index_of(ordinal), bytes);
}

/* Addresses whose memory the kernel provides page by page, when they are first written to. They ascend, as those of a
   real driver do: of two free pieces of one size, torch's allocator takes the one with the lower address. */
static void *map_lazily(size_t bytes) {
    static _Atomic uintptr_t next = FIRST_ADDRESS;
    size_t rounded = round_up(bytes, GRANULARITY);
    if (rounded > LAST_ADDRESS - FIRST_ADDRESS)
        return NULL;
    for (int attempt = 0; attempt < MOST_ATTEMPTS; attempt++) {
        void *wanted = (void *)atomic_fetch_add(&next, rounded);
        void *start = mmap(wanted, rounded, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        if (start == wanted)
            return start;
        if (start != MAP_FAILED)
            munmap(start, rounded);
    }
    return NULL;
}

void *stand_in_allocate(size_t bytes, enum memory_kind kind, int *error) {
    if ((*error = stand_in_touch_device()))
        return NULL;
    int ordinal = stand_in_current_device();
    size_t taken_bytes = kind == MEMORY_DEVICE ? round_up(bytes, GRANULARITY) : bytes;
    if ((*error = take(taken_bytes, kind, ordinal)))
        return NULL;
    void *pointer = map_lazily(bytes);
    if (!pointer) {
        give_back(taken_bytes, kind, ordinal);
        *error = CUDA_OUT_OF_MEMORY;
        return NULL;
    }
    remember((struct region){(uintptr_t)pointer, bytes, taken_bytes, kind, ordinal, ALLOCATED, NULL});
    return pointer;
}

/* Takes the region that begins here out of the list; a region of 0 bytes where there is none. */
static struct region forget(const void *pointer, enum region_source source) {
    struct region found = {0};
    pthread_mutex_lock(&mutex);
    for (struct region **link = &regions; *link; link = &(*link)->next)
        if ((*link)->address == (uintptr_t)pointer && (*link)->source == source) {
            struct region *entry = *link;
            *link = entry->next;
            found = *entry;
            free(entry);
            break;
        }
    pthread_mutex_unlock(&mutex);
    return found;
}

int stand_in_free(void *pointer) {
    struct region region = forget(pointer, ALLOCATED);
    if (!region.bytes)
        return CUDA_INVALID_VALUE;
    munmap(pointer, round_up(region.bytes, GRANULARITY));
    give_back(region.taken_bytes, region.kind, region.ordinal);
    return stand_in_sticky_error();
}

int stand_in_register(void *pointer, size_t bytes) {
    int error = stand_in_touch_device();
    int ordinal = stand_in_current_device();
    if (!error)
        error = take(bytes, MEMORY_PINNED, ordinal);
    if (!error)
        remember((struct region){(uintptr_t)pointer, bytes, bytes, MEMORY_PINNED, ordinal, REGISTERED, NULL});
    return error;
}

int stand_in_unregister(void *pointer) {
    struct region region = forget(pointer, REGISTERED);
    if (!region.bytes)
        return CUDA_INVALID_VALUE;
    give_back(region.taken_bytes, MEMORY_PINNED, region.ordinal);
    return stand_in_sticky_error();
}

enum memory_kind stand_in_memory_kind(const void *pointer, int *ordinal) {
    enum memory_kind kind = MEMORY_UNKNOWN;
    uintptr_t address = (uintptr_t)pointer;
    pthread_mutex_lock(&mutex);
    for (struct region *region = regions; region; region = region->next)
        if (address >= region->address && address - region->address < region->bytes) {
            kind = region->kind;
            if (ordinal)
                *ordinal = region->ordinal;
            break;
        }
    pthread_mutex_unlock(&mutex);
    return kind;
}

int stand_in_memory_info(size_t *free_bytes, size_t *total_bytes) {
    int error = stand_in_touch_device();
    if (error)
        return error;
    struct device device = devices[stand_in_current_device()];
    size_t used = device_used_bytes(&settings, device);
    *total_bytes = device_bytes(&settings, device);
    *free_bytes = used > *total_bytes ? 0 : *total_bytes - used;
    return CUDA_OK;
}

int stand_in_copy(void *destination, const void *source, size_t bytes) {
    int error = stand_in_touch_device();
    if (error || !bytes)
        return error;
    bool to_device = stand_in_memory_kind(destination, NULL) == MEMORY_DEVICE;
    bool from_device = stand_in_memory_kind(source, NULL) == MEMORY_DEVICE;
    if (to_device && (from_device || bytes > settings.largest_copy_bytes))
        return CUDA_OK;
    memcpy(destination, source, bytes);
    return CUDA_OK;
}

/* ---- kernels --------------------------------------------------------------------------------------------- */

/* Whether this kernel is launched for the first time. A full table takes every other kernel for known. */
static bool is_new_kernel(const void *kernel) {
    const size_t slots = sizeof loaded / sizeof *loaded;
    size_t slot = ((uintptr_t)kernel >> 4) % slots;
    bool is_new = false;
    pthread_mutex_lock(&mutex);
    for (size_t tries = 0; tries < slots; tries++, slot = (slot + 1) % slots) {
        if (loaded[slot] == kernel)
            break;
        if (!loaded[slot]) {
            loaded[slot] = kernel;
            loaded_count++;
            is_new = true;
            break;
        }
    }
    pthread_mutex_unlock(&mutex);
    return is_new;
}

/* Memory outside the caching allocator that appears once enough different kernels have been loaded. */
static int load_modules(int ordinal) {
    struct context *context = &contexts[ordinal];
    if (context->has_modules || !settings.modules_bytes || !triggered(&settings.modules_after, loaded_count))
        return CUDA_OK;
    if (ledger_grow_context(index_of(ordinal), settings.modules_bytes, capacity_bytes(ordinal), false) != LEDGER_TAKEN)
        return CUDA_OUT_OF_MEMORY;
    context->has_modules = true;
    log_line("modules loaded on device %d", ordinal);
    return CUDA_OK;
}

int stand_in_launch(const void *kernel) {
    int error = stand_in_touch_device();
    if (error)
        return error;
    launches = ledger_count_launch();
    if (kernel)
        is_new_kernel(kernel);
    return load_modules(stand_in_current_device());
}

bool stand_in_hangs(void) {
    return triggered(&settings.hang_after, launches);
}

int stand_in_synchronize(void) {
    int error = stand_in_touch_device();
    if (error)
        return error;
    if (stand_in_hangs()) {
        log_line("hangs");
        for (;;)
            pause(); /* a signal may end the process, and nothing else the wait */
    }
    return CUDA_OK;
}

/* ---- what a device is ------------------------------------------------------------------------------------ */

int stand_in_properties(int ordinal, struct stand_in_properties *properties) {
    int error = stand_in_initialize();
    if (error)
        return error;
    if (ordinal < 0 || ordinal >= device_count)
        return CUDA_INVALID_DEVICE;
    properties->total_bytes = device_bytes(&settings, devices[ordinal]);
    properties->capability_major = settings.compute_capability / 10;
    properties->capability_minor = settings.compute_capability % 10;
    properties->pci_bus = device_pci_bus(devices[ordinal]);
    device_uuid(devices[ordinal], properties->uuid);
    return CUDA_OK;
}

/* The sizes are those of a large data-centre GPU; what depends on the capability follows it. */
int stand_in_attribute(int attribute, int ordinal) {
    bool is_hopper_or_later = settings.compute_capability >= 90;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
        return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
        return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
        return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
        return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        return 48 * 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        return (is_hopper_or_later ? 227 : 99) * 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        return 228 * 1024;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
        return 65536;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
        return 1980000;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return 132;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
        return settings.is_integrated;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        return settings.compute_mode;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        return device_pci_bus(devices[ordinal]);
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
        return 2619000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
        return 5120;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
        return 50 * (int)MIB;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
        return 32;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return settings.compute_capability / 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return settings.compute_capability % 10;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
        return 1;
    default:
        return 0;
    }
}

int stand_in_log_unsupported(const char *name) {
    log_line("not supported: %s", name);
    return CUDA_NOT_SUPPORTED;
}

/* ---- CUDA's own functions -------------------------------------------------------------------------------- */

CUresult cuInit(unsigned flags) {
    (void)flags;
    return stand_in_initialize();
}

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION_SHOWN;
    return CUDA_OK;
}

CUresult cuDeviceGetCount(int *count) {
    int error = stand_in_initialize();
    *count = device_count;
    return error == CUDA_NO_DEVICE ? CUDA_OK : error;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    struct stand_in_properties properties;
    *device = ordinal;
    return stand_in_properties(ordinal, &properties);
}

CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
    (void)device;
    snprintf(name, (size_t)room, "%s", DEVICE_NAME);
    return CUDA_OK;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    struct stand_in_properties properties;
    int error = stand_in_properties(device, &properties);
    if (!error)
        *bytes = properties.total_bytes;
    return error;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    struct stand_in_properties properties;
    int error = stand_in_properties(device, &properties);
    if (!error)
        memcpy(uuid->bytes, properties.uuid, 16);
    return error;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    struct stand_in_properties properties;
    int error = stand_in_properties(device, &properties);
    if (!error)
        *value = stand_in_attribute(attribute, device);
    return error;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    int error = create_context(device);
    *context = error ? NULL : (CUcontext)&contexts[device];
    return error;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = stand_in_has_context(device);
    return CUDA_OK;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    int error = stand_in_initialize();
    *context = depth ? (CUcontext)stack[depth - 1] : NULL;
    return error;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if (!context) {
        depth = 0;
        return CUDA_OK;
    }
    depth = depth ? depth : 1;
    stack[depth - 1] = (struct context *)context;
    return CUDA_OK;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (!context || depth == THREAD_CONTEXTS)
        return CUDA_INVALID_CONTEXT;
    stack[depth++] = (struct context *)context;
    return CUDA_OK;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!depth)
        return CUDA_INVALID_CONTEXT;
    depth--;
    if (context)
        *context = (CUcontext)stack[depth];
    return CUDA_OK;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = stand_in_current_device();
    return depth ? CUDA_OK : CUDA_INVALID_CONTEXT;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    (void)limit;
    *value = 0;
    return CUDA_OK;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    (void)limit;
    (void)value;
    return CUDA_OK;
}

CUresult cuCtxSynchronize(void) {
    return stand_in_synchronize();
}

CUresult cuStreamSynchronize(CUstream stream) {
    (void)stream;
    return stand_in_synchronize();
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
    (void)stream;
    int error = stand_in_touch_device();
    *context = error ? NULL : (CUcontext)stack[depth - 1];
    return error;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = stand_in_error_text(error);
    return CUDA_OK;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = stand_in_error_name(error);
    return CUDA_OK;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    int error;
    *pointer = (CUdeviceptr)stand_in_allocate(bytes, MEMORY_DEVICE, &error);
    return error;
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
    return stand_in_free((void *)pointer);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    return stand_in_memory_info(free_bytes, total_bytes);
}

CUresult cuMemsetD32Async(CUdeviceptr pointer, unsigned value, size_t count, CUstream stream) {
    (void)pointer;
    (void)value;
    (void)count;
    (void)stream;
    return stand_in_touch_device();
}

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr pointer, cuuint32_t value, unsigned flags) {
    (void)stream;
    (void)pointer;
    (void)value;
    (void)flags;
    return stand_in_touch_device();
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    int ordinal = 0;
    enum memory_kind kind = stand_in_memory_kind((void *)pointer, &ordinal);
    if (kind == MEMORY_UNKNOWN)
        return CUDA_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)value = pointer;
    else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)value = kind == MEMORY_DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        *(int *)value = ordinal;
    else if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT)
        *(CUcontext *)value = (CUcontext)&contexts[ordinal];
    else
        *(int *)value = 0;
    return CUDA_OK;
}

/* Virtual memory: expandable segments reserve addresses once, and then map memory into them. */

struct physical_memory {
    size_t bytes;
    int ordinal;
};

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    (void)properties;
    (void)option;
    *bytes = GRANULARITY;
    return CUDA_OK;
}

static void *change_mapping(void *address, size_t bytes, int protection) {
    return mmap(address, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (address ? MAP_FIXED : 0), -1,
                0);
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr address,
                             unsigned long long flags) {
    (void)alignment;
    (void)address;
    (void)flags;
    int error = stand_in_touch_device();
    if (error)
        return error;
    void *reserved = change_mapping(NULL, bytes, PROT_NONE);
    if (reserved == MAP_FAILED)
        return CUDA_OUT_OF_MEMORY;
    remember((struct region){(uintptr_t)reserved, bytes, 0, MEMORY_DEVICE, stand_in_current_device(), RESERVED, NULL});
    *pointer = (CUdeviceptr)reserved;
    return CUDA_OK;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
    struct region region = forget((void *)pointer, RESERVED);
    if (!region.bytes)
        return CUDA_INVALID_VALUE;
    munmap((void *)pointer, bytes);
    return CUDA_OK;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    (void)flags;
    int ordinal = properties->location.id;
    int error = create_context(ordinal);
    if (!error)
        error = contexts[ordinal].sticky_error;
    if (!error)
        error = take(bytes, MEMORY_DEVICE, ordinal);
    if (error)
        return error;
    struct physical_memory *memory = malloc(sizeof *memory);
    *memory = (struct physical_memory){bytes, ordinal};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)memory;
    return CUDA_OK;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct physical_memory *memory = (struct physical_memory *)(uintptr_t)handle;
    give_back(memory->bytes, MEMORY_DEVICE, memory->ordinal);
    free(memory);
    return CUDA_OK;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    (void)offset;
    (void)handle;
    (void)flags;
    bool is_mapped = change_mapping((void *)pointer, bytes, PROT_READ | PROT_WRITE) != MAP_FAILED;
    return is_mapped ? CUDA_OK : CUDA_OUT_OF_MEMORY;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    return change_mapping((void *)pointer, bytes, PROT_NONE) != MAP_FAILED ? CUDA_OK : CUDA_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    (void)pointer;
    (void)bytes;
    (void)access;
    (void)count;
    return CUDA_OK;
}

/* Modules and functions are addresses that nothing is behind. */

static int new_object(void **object) {
    int error = stand_in_touch_device();
    *object = error ? NULL : malloc(16);
    return error;
}

CUresult cuModuleLoad(CUmodule *module, const char *file) {
    (void)file;
    return new_object((void **)module);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    (void)image;
    return new_object((void **)module);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
    (void)image;
    (void)count;
    (void)options;
    (void)values;
    return new_object((void **)module);
}

CUresult cuModuleUnload(CUmodule module) {
    free(module);
    return CUDA_OK;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    (void)module;
    (void)name;
    return new_object((void **)function);
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *bytes, CUmodule module, const char *name) {
    (void)module;
    (void)name;
    if (bytes)
        *bytes = 0;
    *pointer = 0;
    return CUDA_NOT_FOUND;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options, void **values, unsigned count,
                           CUlibraryOption *library_options, void **library_values, unsigned library_count) {
    (void)code;
    (void)options;
    (void)values;
    (void)count;
    (void)library_options;
    (void)library_values;
    (void)library_count;
    return new_object((void **)library);
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    (void)library;
    (void)name;
    return new_object((void **)kernel);
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    *function = (CUfunction)kernel;
    return CUDA_OK;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    (void)function;
    *value = 0;
    if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS)
        *value = REGISTERS_OF_A_KERNEL;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        *value = 1024;
    return CUDA_OK;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    (void)function;
    (void)attribute;
    (void)value;
    return CUDA_OK;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
    (void)function;
    (void)config;
    return CUDA_OK;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters,
                        void **extra) {
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared_bytes, (void)stream, (void)parameters, (void)extra;
    return stand_in_launch(function);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    (void)config, (void)parameters, (void)extra;
    return stand_in_launch(function);
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                   CUstream stream, void **parameters) {
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared_bytes, (void)stream, (void)parameters;
    return stand_in_launch(function);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared_bytes) {
    (void)function, (void)size, (void)shared_bytes;
    *blocks = BLOCKS_ON_A_MULTIPROCESSOR;
    return CUDA_OK;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    (void)function, (void)config;
    *clusters = BLOCKS_ON_A_MULTIPROCESSOR;
    return CUDA_OK;
}

/* Private tables between NVIDIA's own libraries: what asks for them does without, or does not start (cuDNN). */
CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    (void)id;
    *table = NULL;
    return CUDA_NOT_SUPPORTED;
}

static CUresult not_supported(void) {
    return CUDA_NOT_SUPPORTED;
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *result) {
    (void)version, (void)flags;
    char newest[256];
    snprintf(newest, sizeof newest, "%s_v2", name);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(library, newest);
    if (!*function)
        *function = dlsym(library, name);
    if (!*function) {
        log_line("unknown driver function %s", name);
        *function = (void *)not_supported;
    }
    if (result)
        *result = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_OK;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
