#define _GNU_SOURCE
#include "topology.h"

#include "ledger.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_PCI_BUS 1

int ledger_index(const struct settings *settings, struct device device) {
    return device.instance < 0 ? device.gpu : device.gpu * settings->mig_instances + device.instance;
}

size_t device_bytes(const struct settings *settings, struct device device) {
    return device.instance < 0 ? settings->gpu_bytes : settings->gpu_bytes / (size_t)settings->mig_instances;
}

size_t device_base_bytes(const struct settings *settings, struct device device) {
    return device.instance < 0 ? settings->base_bytes : settings->base_bytes / (size_t)settings->mig_instances;
}

size_t device_used_bytes(const struct settings *settings, struct device device) {
    if (device.instance >= 0 || !settings->mig_instances)
        return device_base_bytes(settings, device) + ledger_used_bytes(ledger_index(settings, device));
    size_t used = settings->base_bytes;
    for (int i = 0; i < settings->mig_instances; i++)
        used += ledger_used_bytes(ledger_index(settings, (struct device){device.gpu, i}));
    return used;
}

/* Looks random enough not to be taken for anything else: nothing may depend on parts of it. */
void device_uuid(struct device device, uint8_t uuid[16]) {
    static const uint8_t pattern[16] = {0x57, 0xa2, 0xd1, 0x4e, 0x60, 0x3f, 0x4c, 0x81,
                                        0x9b, 0x05, 0xe7, 0x22, 0x30, 0xbc, 0x00, 0x00};
    memcpy(uuid, pattern, 16);
    uuid[14] = (uint8_t)(device.instance + 1);
    uuid[15] = (uint8_t)device.gpu;
}

void device_uuid_text(struct device device, char text[UUID_TEXT_BYTES]) {
    uint8_t uuid[16];
    device_uuid(device, uuid);
    int length = snprintf(text, UUID_TEXT_BYTES, "%s", device.instance < 0 ? "GPU-" : "MIG-");
    for (int i = 0; i < 16; i++) {
        bool begins_group = i == 4 || i == 6 || i == 8 || i == 10;
        length += snprintf(text + length, (size_t)(UUID_TEXT_BYTES - length), begins_group ? "-%02x" : "%02x", uuid[i]);
    }
}

int device_pci_bus(struct device device) {
    return FIRST_PCI_BUS + device.gpu;
}

bool device_is_lost(const struct settings *settings, struct device device) {
    bool loses_device;
    error_of_xid(settings->xid, &loses_device);
    bool is_meant = settings->xid_gpu < 0 || settings->xid_gpu == device.gpu;
    if (loses_device && is_meant && file_triggered(&settings->xid_after))
        return true;
    struct device lost = {device.gpu, settings->mig_instances && device.instance < 0 ? 0 : device.instance};
    return ledger_has_lost_device(ledger_index(settings, lost));
}

/* The device that one entry of CUDA_VISIBLE_DEVICES means; false for none. A UUID may be given by its beginning. */
static bool named_device(const struct settings *settings, const char *name, struct device *found) {
    if (!strncmp(name, "GPU-", 4) || !strncmp(name, "MIG-", 4)) {
        bool wants_instance = name[0] == 'M';
        int instances = wants_instance ? settings->mig_instances : 1;
        int matches = 0;
        for (int gpu = 0; gpu < settings->gpus; gpu++)
            for (int i = 0; i < instances; i++) {
                char text[UUID_TEXT_BYTES];
                struct device device = {gpu, wants_instance ? i : -1};
                device_uuid_text(device, text);
                if (strncmp(text, name, strlen(name)))
                    continue;
                *found = device;
                matches++;
            }
        return matches == 1;
    }
    char *end;
    long ordinal = strtol(name, &end, 10);
    *found = (struct device){(int)ordinal, -1};
    return end != name && ordinal >= 0 && ordinal < settings->gpus;
}

int visible_devices(const struct settings *settings, struct device *devices, int room) {
    const char *variable = getenv("CUDA_VISIBLE_DEVICES");
    int count = 0;
    if (!variable) {
        for (; count < settings->gpus && count < room; count++)
            devices[count] = (struct device){count, -1};
    } else {
        char names[1024], *rest, *name;
        snprintf(names, sizeof names, "%s", variable);
        for (name = strtok_r(names, ",", &rest); name && count < room; name = strtok_r(NULL, ",", &rest)) {
            struct device found;
            name += strspn(name, " ");
            if (!named_device(settings, name, &found))
                break; /* as the driver: what comes before counts, what comes after does not */
            for (int i = 0; i < count; i++)
                if (devices[i].gpu == found.gpu && devices[i].instance == found.instance)
                    return 0; /* as the driver: a device named twice makes none visible */
            devices[count++] = found;
        }
    }
    if (!settings->mig_instances)
        return count;
    /* A process uses one instance only: the one that it names, or the first of the GPU. */
    if (count && devices[0].instance < 0)
        devices[0].instance = 0;
    return count ? 1 : 0;
}
