/* What the driver library offers to the runtime and to cuBLAS, beyond CUDA's own functions.
 *
 * Results are CUDA's error codes, which are the same numbers in the driver (CUresult) and the runtime (cudaError_t).
 */
#ifndef STAND_IN_DEVICE_H
#define STAND_IN_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CUDA_OK = 0,
    CUDA_INVALID_VALUE = 1,
    CUDA_OUT_OF_MEMORY = 2,
    CUDA_NOT_INITIALIZED = 3,
    CUDA_DEVICES_UNAVAILABLE = 46,
    CUDA_NO_DEVICE = 100,
    CUDA_INVALID_DEVICE = 101,
    CUDA_INVALID_CONTEXT = 201,
    CUDA_NOT_FOUND = 500,
    CUDA_NOT_READY = 600,
    CUDA_NOT_SUPPORTED = 801,
};

enum memory_kind { MEMORY_UNKNOWN = 0, MEMORY_DEVICE = 1, MEMORY_PINNED = 2 };

/* Initialises CUDA in this process, once; fails in a child that was forked from a process that had done so. */
int stand_in_initialize(void);
int stand_in_device_count(void);

/* The device of this thread's current context, or 0 where it has none. */
int stand_in_current_device(void);
/* Makes the device's context, creating it if need be, this thread's. */
int stand_in_use_device(int ordinal);
/* Creates the current device's context if need be. Every call that touches the device begins with this. */
int stand_in_touch_device(void);
bool stand_in_has_context(int ordinal);
/* The error that every later call returns, once an Xid has come; else 0. */
int stand_in_sticky_error(void);

/* Device memory (of the current device) and pinned memory; NULL with *error set. */
void *stand_in_allocate(size_t bytes, enum memory_kind kind, int *error);
int stand_in_free(void *pointer);
/* Pins memory that the program has already. */
int stand_in_register(void *pointer, size_t bytes);
int stand_in_unregister(void *pointer);
/* What a pointer points into; `ordinal` may be NULL. */
enum memory_kind stand_in_memory_kind(const void *pointer, int *ordinal);
int stand_in_memory_info(size_t *free_bytes, size_t *total_bytes);
/* Copies what is small enough between host and device. Copies within a device do nothing: kernels compute nothing. */
int stand_in_copy(void *destination, const void *source, size_t bytes);

/* A kernel is launched; NULL for one of a library. Loads it at its first launch. */
int stand_in_launch(const void *kernel);
/* Waits for the device; for ever, if it hangs. */
int stand_in_synchronize(void);
bool stand_in_hangs(void);

struct stand_in_properties {
    size_t total_bytes;
    int capability_major, capability_minor;
    int pci_bus;
    uint8_t uuid[16];
};
int stand_in_properties(int ordinal, struct stand_in_properties *properties);
int stand_in_attribute(int attribute, int ordinal);

/* Logs the name of a function that the stand-in does not offer; called by generated functions. */
int stand_in_log_unsupported(const char *name);

const char *stand_in_error_name(int error);
const char *stand_in_error_text(int error);

#endif
