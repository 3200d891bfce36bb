#define _GNU_SOURCE
#include "settings.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Xids of NVIDIA's catalogue, and what a CUDA program sees of them. */
static const struct {
    int xid;
    int cuda_error;
    bool loses_device;
} XIDS[] = {
    {13, 719, false}, /* graphics engine exception: a kernel's own fault */
    {31, 700, false}, /* memory page fault: a kernel's own fault */
    {48, 214, true},  /* double-bit error in memory */
    {74, 220, true},  /* NVLink error */
    {79, 999, true},  /* the GPU has fallen off the bus */
    {94, 214, false}, /* contained memory error: only the process that met it is ended */
    {95, 214, true},  /* uncontained memory error */
};

static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? (size_t)strtoull(text, NULL, 10) : otherwise;
}

static struct trigger read_trigger(const char *name) {
    const char *text = getenv(name);
    struct trigger none = {NULL, 0};
    if (!text || !*text)
        return none;
    if (strspn(text, "0123456789") == strlen(text))
        return (struct trigger){NULL, strtoull(text, NULL, 10)};
    return (struct trigger){strdup(text), 0};
}

static enum compute_mode read_compute_mode(void) {
    const char *text = getenv("STAND_IN_COMPUTE_MODE");
    if (text && !strcmp(text, "exclusive"))
        return COMPUTE_MODE_EXCLUSIVE;
    if (text && !strcmp(text, "prohibited"))
        return COMPUTE_MODE_PROHIBITED;
    return COMPUTE_MODE_DEFAULT;
}

struct settings read_settings(void) {
    size_t pinned_mib = number("STAND_IN_PINNED_MIB", SIZE_MAX);
    struct settings settings = {
        .gpus = (int)number("STAND_IN_GPUS", 1),
        .mig_instances = (int)number("STAND_IN_MIG", 0),
        .compute_capability = (int)number("STAND_IN_CC", 89),
        .compute_mode = read_compute_mode(),
        .has_nvml = !number("STAND_IN_NO_NVML", 0),
        .is_integrated = number("STAND_IN_INTEGRATED", 0),
        .gpu_bytes = number("STAND_IN_GPU_MIB", 81920) * MIB,
        .base_bytes = number("STAND_IN_BASE_MIB", 600) * MIB,
        .context_bytes = number("STAND_IN_CONTEXT_MIB", 480) * MIB,
        .pinned_limit_bytes = pinned_mib == SIZE_MAX ? SIZE_MAX : pinned_mib * MIB,
        .largest_copy_bytes = number("STAND_IN_COPY_MIB", 64) * MIB,
        .modules_bytes = number("STAND_IN_MODULES_MIB", 0) * MIB,
        .modules_after = read_trigger("STAND_IN_MODULES_AFTER"),
        .hang_after = read_trigger("STAND_IN_HANG_AFTER"),
        .xid_after = read_trigger("STAND_IN_XID_AFTER"),
        .xid = (int)number("STAND_IN_XID", 79),
        .xid_gpu = (int)number("STAND_IN_XID_GPU", (size_t)-1),
    };
    if (!settings.modules_after.file && !settings.modules_after.count)
        settings.modules_after.count = 1;
    return settings;
}

const char *ledger_folder(void) {
    static char otherwise[64];
    const char *folder = getenv("STAND_IN_LEDGER");
    if (folder && *folder)
        return folder;
    snprintf(otherwise, sizeof otherwise, "/dev/shm/stand-in-gpu-%d", (int)getuid());
    return otherwise;
}

bool file_triggered(const struct trigger *trigger) {
    return trigger->file && access(trigger->file, F_OK) == 0;
}

bool triggered(const struct trigger *trigger, uint64_t events) {
    return file_triggered(trigger) || (trigger->count && events >= trigger->count);
}

int error_of_xid(int xid, bool *loses_device) {
    for (size_t i = 0; i < sizeof XIDS / sizeof *XIDS; i++)
        if (XIDS[i].xid == xid) {
            *loses_device = XIDS[i].loses_device;
            return XIDS[i].cuda_error;
        }
    *loses_device = false;
    return xid; /* not in the table: taken as CUDA's own error code, such as 719 */
}

void log_line(const char *format, ...) {
    const char *file = getenv("STAND_IN_LOG");
    if (!file || !*file)
        return;
    char line[512];
    int length = snprintf(line, sizeof line, "%d ", (int)getpid());
    va_list arguments;
    va_start(arguments, format);
    length += vsnprintf(line + length, sizeof line - (size_t)length - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2)
        length = (int)sizeof line - 2;
    line[length++] = '\n';
    /* One write to a file opened for appending: lines of several processes do not mix. */
    int descriptor = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (descriptor < 0)
        return;
    if (write(descriptor, line, (size_t)length) < 0) { /* the log is a convenience */
    }
    close(descriptor);
}
