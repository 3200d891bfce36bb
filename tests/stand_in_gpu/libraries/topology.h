/* The GPUs and MIG instances that the settings describe, and their names. */
#ifndef STAND_IN_TOPOLOGY_H
#define STAND_IN_TOPOLOGY_H

#include "settings.h"

#define DEVICE_NAME "Stand-in GPU"
#define UUID_TEXT_BYTES 48

/* A GPU, or an instance of one. `instance` is -1 for a whole GPU. */
struct device {
    int gpu;
    int instance;
};

/* The device's index in the ledger. A GPU in MIG mode has none of its own: only its instances are used. */
int ledger_index(const struct settings *settings, struct device device);

/* Bytes of device memory, and how many of them the driver itself uses. */
size_t device_bytes(const struct settings *settings, struct device device);
size_t device_base_bytes(const struct settings *settings, struct device device);

/* Bytes in use by all processes and by the driver. For a GPU in MIG mode: of all its instances. */
size_t device_used_bytes(const struct settings *settings, struct device device);

void device_uuid(struct device device, uint8_t uuid[16]);
/* As NVML writes it: GPU-... or MIG-... */
void device_uuid_text(struct device device, char text[UUID_TEXT_BYTES]);

int device_pci_bus(struct device device);

/* Whether the device is lost to everybody, by an Xid. */
bool device_is_lost(const struct settings *settings, struct device device);

/* The devices that CUDA shows to this process, by CUDA_VISIBLE_DEVICES; returns how many. */
int visible_devices(const struct settings *settings, struct device *devices, int room);

#endif
