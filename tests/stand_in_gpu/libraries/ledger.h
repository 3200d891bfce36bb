/* Which process uses how many bytes on which device: the memory of a driver, shared by all processes.
 *
 * The ledger is a file that every process maps. A process that has ended holds nothing any more, however it ended:
 * entries of processes that no longer live are not counted. tests/stand_in_gpu/ledger.py reads the same layout.
 */
#ifndef STAND_IN_LEDGER_H
#define STAND_IN_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LEDGER_DEVICES 16 /* GPUs, or all MIG instances of all GPUs */
#define LEDGER_PROCESSES 512

struct ledger_process {
    int64_t pid; /* 0: this entry is free */
    uint64_t started; /* the kernel's clock ticks since it booted: tells a number that is used again */
    uint64_t launches;
    uint64_t pinned_bytes;
    uint64_t allocated_bytes[LEDGER_DEVICES];
    uint64_t context_bytes[LEDGER_DEVICES]; /* with the modules loaded into it; 0 without a context */
};

struct ledger {
    uint64_t lost_by_xid[LEDGER_DEVICES];
    struct ledger_process processes[LEDGER_PROCESSES];
};

enum ledger_result { LEDGER_TAKEN, LEDGER_FULL, LEDGER_OCCUPIED };

/* Takes bytes for allocations of this process, if no more than `capacity_bytes` are then in use. */
enum ledger_result ledger_allocate(int device, size_t bytes, size_t capacity_bytes);
void ledger_free(int device, size_t bytes);

/* The same for a context or its growth. With `alone`, LEDGER_OCCUPIED if another process has a context there. */
enum ledger_result ledger_grow_context(int device, size_t bytes, size_t capacity_bytes, bool alone);

/* Pinned memory of all processes together. */
enum ledger_result ledger_pin(size_t bytes, size_t limit_bytes);
void ledger_unpin(size_t bytes);

/* Bytes that all live processes use on a device, contexts included. */
size_t ledger_used_bytes(int device);

/* The live processes with a context on a device; returns how many there are, and writes at most `room` of them. */
int ledger_users(int device, int room, int *pids, size_t *used_bytes);

/* Counts a kernel launch of this process and returns their number. */
uint64_t ledger_count_launch(void);

void ledger_lose_device(int device, int xid);
bool ledger_has_lost_device(int device);

#endif
