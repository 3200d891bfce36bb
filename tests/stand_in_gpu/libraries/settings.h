/* The stand-in's settings, read from environment variables. README.md describes each of them. */
#ifndef STAND_IN_SETTINGS_H
#define STAND_IN_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MIB ((size_t)1 << 20)

/* Something that happens after a number of events, or as soon as a file exists. */
struct trigger {
    const char *file;   /* NULL where a number is given */
    uint64_t count;     /* 0 where it never happens */
};

enum compute_mode { COMPUTE_MODE_DEFAULT = 0, COMPUTE_MODE_PROHIBITED = 2, COMPUTE_MODE_EXCLUSIVE = 3 };

struct settings {
    int gpus;                    /* STAND_IN_GPUS */
    int mig_instances;           /* STAND_IN_MIG: instances on each GPU; 0 without MIG */
    int compute_capability;      /* STAND_IN_CC: 89 is 8.9 */
    enum compute_mode compute_mode;
    bool is_integrated;
    bool has_nvml;
    size_t gpu_bytes;            /* of a whole GPU */
    size_t base_bytes;           /* what the driver itself uses of a GPU */
    size_t context_bytes;
    size_t pinned_limit_bytes;   /* SIZE_MAX where nothing limits it */
    size_t largest_copy_bytes;   /* larger copies to the device are left out */
    size_t modules_bytes;        /* the context grows by this, once a process and device */
    struct trigger modules_after;
    struct trigger hang_after;
    struct trigger xid_after;
    int xid;
    int xid_gpu;                 /* -1: every GPU */
};

struct settings read_settings(void);

/* The folder of the ledger and of everything else that the processes of one machine share. */
const char *ledger_folder(void);

/* Whether the trigger's file exists; false for a trigger that counts. */
bool file_triggered(const struct trigger *trigger);

/* Whether a trigger fires at the `events`-th event, or because its file exists. */
bool triggered(const struct trigger *trigger, uint64_t events);

/* What an Xid means for CUDA: the error code, and whether the whole device is lost and not only the process. */
int error_of_xid(int xid, bool *loses_device);

/* Appends a line with this process's number to the file STAND_IN_LOG. */
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
