/* libnvidia-ml.so.1: what the driver's monitor says of the GPUs, without a CUDA context and for all processes.
 *
 * It sees every GPU: CUDA_VISIBLE_DEVICES is nothing to it.
 */
#define _GNU_SOURCE
#include "ledger.h"
#include "settings.h"
#include "topology.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NVML_SUCCESS = 0,
    NVML_UNINITIALIZED = 1,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_DRIVER_NOT_LOADED = 9,
    NVML_GPU_IS_LOST = 15,
};

#define DRIVER_VERSION_SHOWN "580.00.00"
#define MOST_MIG_INSTANCES 7
#define USERS 64

static struct settings settings;
static bool is_initialized;
static struct device gpus[LEDGER_DEVICES];
static struct device instances[LEDGER_DEVICES];

/* ---- the library ------------------------------------------------------------------------------------------- */

int nvmlInit_v2(void) {
    settings = read_settings();
    if (!settings.has_nvml)
        return NVML_DRIVER_NOT_LOADED;
    for (int gpu = 0; gpu < settings.gpus; gpu++) {
        gpus[gpu] = (struct device){gpu, -1};
        for (int i = 0; i < settings.mig_instances; i++)
            instances[gpu * settings.mig_instances + i] = (struct device){gpu, i};
    }
    is_initialized = true;
    return NVML_SUCCESS;
}

int nvmlInit(void) {
    return nvmlInit_v2();
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return nvmlInit_v2();
}

int nvmlShutdown(void) {
    return is_initialized ? NVML_SUCCESS : NVML_UNINITIALIZED;
}

const char *nvmlErrorString(int error) {
    switch (error) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_UNINITIALIZED:
        return "Uninitialized";
    case NVML_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_NOT_FOUND:
        return "Not Found";
    case NVML_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_GPU_IS_LOST:
        return "GPU is lost";
    default:
        return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned room) {
    snprintf(text, room, "%s", DRIVER_VERSION_SHOWN);
    return is_initialized ? NVML_SUCCESS : NVML_UNINITIALIZED;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = CUDA_VERSION_SHOWN;
    return NVML_SUCCESS;
}

/* ---- devices ----------------------------------------------------------------------------------------------- */

static int error_of(struct device device) {
    if (!is_initialized)
        return NVML_UNINITIALIZED;
    return device_is_lost(&settings, device) ? NVML_GPU_IS_LOST : NVML_SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)settings.gpus;
    return is_initialized ? NVML_SUCCESS : NVML_UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **handle) {
    if (index >= (unsigned)settings.gpus)
        return NVML_INVALID_ARGUMENT;
    *handle = &gpus[index];
    return error_of(**handle);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, struct device **handle) {
    unsigned domain, bus;
    if (sscanf(id, "%x:%x:", &domain, &bus) != 2)
        return NVML_INVALID_ARGUMENT;
    for (int gpu = 0; gpu < settings.gpus; gpu++)
        if (device_pci_bus(gpus[gpu]) == (int)bus) {
            *handle = &gpus[gpu];
            return error_of(**handle);
        }
    return NVML_NOT_FOUND;
}

/* With MIG, the UUID that CUDA reports is an instance's, which NVML knows as MIG-... and not as GPU-... */
int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **handle) {
    struct device *known[2 * LEDGER_DEVICES];
    int count = 0;
    for (int gpu = 0; gpu < settings.gpus; gpu++)
        known[count++] = &gpus[gpu];
    for (int i = 0; i < settings.gpus * settings.mig_instances; i++)
        known[count++] = &instances[i];
    for (int i = 0; i < count; i++) {
        char text[UUID_TEXT_BYTES];
        device_uuid_text(*known[i], text);
        if (!strcmp(text, uuid)) {
            *handle = known[i];
            return error_of(**handle);
        }
    }
    return NVML_NOT_FOUND;
}

int nvmlDeviceGetUUID(struct device *device, char *text, unsigned room) {
    char uuid[UUID_TEXT_BYTES];
    device_uuid_text(*device, uuid);
    snprintf(text, room, "%s", uuid);
    return error_of(*device);
}

int nvmlDeviceGetName(struct device *device, char *text, unsigned room) {
    snprintf(text, room, "%s", DEVICE_NAME);
    return error_of(*device);
}

int nvmlDeviceGetIndex(struct device *device, unsigned *index) {
    *index = (unsigned)device->gpu;
    return error_of(*device);
}

int nvmlDeviceGetMinorNumber(struct device *device, unsigned *number) {
    *number = (unsigned)device->gpu;
    return device->instance < 0 ? error_of(*device) : NVML_NOT_SUPPORTED;
}

int nvmlDeviceGetCudaComputeCapability(struct device *device, int *major, int *minor) {
    *major = settings.compute_capability / 10;
    *minor = settings.compute_capability % 10;
    return error_of(*device);
}

int nvmlDeviceGetComputeMode(struct device *device, int *mode) {
    *mode = settings.compute_mode;
    return error_of(*device);
}

struct pci_info { /* nvmlPciInfo_t */
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
};

int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci_info *info) {
    int bus = device_pci_bus(*device);
    memset(info, 0, sizeof *info);
    info->bus = (unsigned)bus;
    snprintf(info->legacy_id, sizeof info->legacy_id, "0000:%02X:00.0", bus);
    snprintf(info->id, sizeof info->id, "00000000:%02X:00.0", bus);
    return error_of(*device);
}

int nvmlDeviceGetUtilizationRates(struct device *device, unsigned *rates) {
    if (device->instance >= 0 || settings.mig_instances)
        return NVML_NOT_SUPPORTED; /* as with every GPU in MIG mode */
    rates[0] = rates[1] = 0;
    return error_of(*device);
}

/* ---- memory and who uses it -------------------------------------------------------------------------------- */

int nvmlDeviceGetMemoryInfo(struct device *device, unsigned long long *info) {
    size_t total = device_bytes(&settings, *device);
    size_t used = device_used_bytes(&settings, *device);
    info[0] = total;
    info[1] = used > total ? 0 : total - used;
    info[2] = used;
    return error_of(*device);
}

struct memory_info_v2 { /* nvmlMemory_v2_t */
    unsigned version;
    unsigned long long total, reserved, free, used;
};

/* This version counts what the driver itself uses apart. */
int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_info_v2 *info) {
    size_t used = device_used_bytes(&settings, *device);
    info->total = device_bytes(&settings, *device);
    info->reserved = device_base_bytes(&settings, *device);
    info->used = used - info->reserved;
    info->free = used > info->total ? 0 : info->total - used;
    return error_of(*device);
}

struct process_v1 { /* nvmlProcessInfo_v1_t */
    unsigned pid;
    unsigned long long used_bytes;
};

struct process_v2 { /* nvmlProcessInfo_v2_t */
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};

#define NO_INSTANCE 0xFFFFFFFFu

/* The users of a GPU in MIG mode are those of its instances. */
static int users_of(struct device device, int *pids, size_t *used_bytes) {
    if (device.instance >= 0 || !settings.mig_instances)
        return ledger_users(ledger_index(&settings, device), USERS, pids, used_bytes);
    int users = 0;
    for (int i = 0; i < settings.mig_instances; i++) {
        int index = ledger_index(&settings, (struct device){device.gpu, i});
        users += ledger_users(index, USERS - users, pids + users, used_bytes + users);
    }
    return users;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned *count, struct process_v2 *processes) {
    int pids[USERS];
    size_t used_bytes[USERS];
    int users = users_of(*device, pids, used_bytes);
    unsigned room = *count;
    *count = (unsigned)users;
    if (room < (unsigned)users)
        return NVML_INSUFFICIENT_SIZE;
    for (int i = 0; i < users; i++)
        processes[i] = (struct process_v2){(unsigned)pids[i], used_bytes[i], NO_INSTANCE, NO_INSTANCE};
    return error_of(*device);
}

int nvmlDeviceGetComputeRunningProcesses_v2(struct device *device, unsigned *count, struct process_v2 *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}

int nvmlDeviceGetComputeRunningProcesses(struct device *device, unsigned *count, struct process_v1 *processes) {
    int pids[USERS];
    size_t used_bytes[USERS];
    int users = users_of(*device, pids, used_bytes);
    unsigned room = *count;
    *count = (unsigned)users;
    if (room < (unsigned)users)
        return NVML_INSUFFICIENT_SIZE;
    for (int i = 0; i < users; i++)
        processes[i] = (struct process_v1){(unsigned)pids[i], used_bytes[i]};
    return error_of(*device);
}

/* ---- MIG --------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending) {
    if (device->instance >= 0)
        return NVML_INVALID_ARGUMENT;
    *current = *pending = settings.mig_instances ? 1 : 0;
    return error_of(*device);
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *count) {
    *count = settings.mig_instances ? MOST_MIG_INSTANCES : 0;
    return error_of(*device);
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned index, struct device **handle) {
    if (index >= (unsigned)settings.mig_instances)
        return NVML_NOT_FOUND;
    *handle = &instances[device->gpu * settings.mig_instances + (int)index];
    return error_of(**handle);
}

int nvmlDeviceIsMigDeviceHandle(struct device *device, unsigned *is_instance) {
    *is_instance = device->instance >= 0;
    return error_of(*device);
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct device *device, struct device **handle) {
    *handle = &gpus[device->gpu];
    return error_of(*device);
}
