#define _GNU_SOURCE
#include "ledger.h"

#include "settings.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct ledger *ledger;
static struct ledger_process *own; /* NULL until this process has taken something */
static int descriptor = -1;
static pid_t opened_by;
static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER;

static void fail(const char *what) {
    fprintf(stderr, "stand-in GPU: %s %s: %s\n", what, ledger_folder(), strerror(errno));
    abort();
}

/* A forked child maps the file anew: a lock of flock() belongs to the open file, which it would share. */
static void open_ledger(void) {
    if (ledger && opened_by == getpid())
        return;
    if (ledger) {
        munmap(ledger, sizeof *ledger);
        close(descriptor);
    }
    char file[4096];
    mkdir(ledger_folder(), 0777);
    snprintf(file, sizeof file, "%s/ledger", ledger_folder());
    descriptor = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor < 0 || ftruncate(descriptor, sizeof *ledger) != 0)
        fail("no ledger in");
    ledger = mmap(NULL, sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (ledger == MAP_FAILED)
        fail("no memory for the ledger in");
    own = NULL;
    opened_by = getpid();
}

static void lock(void) {
    pthread_mutex_lock(&threads);
    open_ledger();
    while (flock(descriptor, LOCK_EX) != 0)
        if (errno != EINTR)
            fail("cannot lock the ledger in");
}

static void unlock(void) {
    flock(descriptor, LOCK_UN);
    pthread_mutex_unlock(&threads);
}

/* When a process started, in clock ticks; 0 if it has ended. A zombie has: the driver frees its memory before that. */
static uint64_t start_of(pid_t pid) {
    char file[64], text[1024];
    snprintf(file, sizeof file, "/proc/%d/stat", (int)pid);
    int stat = open(file, O_RDONLY | O_CLOEXEC);
    if (stat < 0)
        return 0;
    ssize_t length = read(stat, text, sizeof text - 1);
    close(stat);
    if (length <= 0)
        return 0;
    text[length] = 0;
    char *after_name = strrchr(text, ')'); /* the name itself may hold spaces and brackets */
    char state;
    unsigned long long started;
    if (!after_name || sscanf(after_name + 1,
                              " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                              &state, &started) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : started;
}

static bool lives(const struct ledger_process *process) {
    return process->pid && (process == own || start_of((pid_t)process->pid) == process->started);
}

static struct ledger_process *own_entry(void) {
    if (own)
        return own;
    for (int i = 0; i < LEDGER_PROCESSES && !own; i++)
        if (!lives(&ledger->processes[i]))
            own = &ledger->processes[i];
    if (!own) {
        errno = ENOSPC;
        fail("too many processes in the ledger of");
    }
    memset(own, 0, sizeof *own);
    own->pid = getpid();
    own->started = start_of(getpid());
    return own;
}

static size_t used_bytes(int device) {
    size_t used = 0;
    for (int i = 0; i < LEDGER_PROCESSES; i++) {
        const struct ledger_process *process = &ledger->processes[i];
        size_t bytes = process->allocated_bytes[device] + process->context_bytes[device];
        if (bytes && lives(process))
            used += bytes;
    }
    return used;
}

enum ledger_result ledger_allocate(int device, size_t bytes, size_t capacity_bytes) {
    lock();
    bool fits = used_bytes(device) + bytes <= capacity_bytes;
    if (fits)
        own_entry()->allocated_bytes[device] += bytes;
    unlock();
    return fits ? LEDGER_TAKEN : LEDGER_FULL;
}

void ledger_free(int device, size_t bytes) {
    lock();
    own_entry()->allocated_bytes[device] -= bytes;
    unlock();
}

enum ledger_result ledger_grow_context(int device, size_t bytes, size_t capacity_bytes, bool alone) {
    enum ledger_result result = LEDGER_TAKEN;
    lock();
    own_entry();
    for (int i = 0; alone && i < LEDGER_PROCESSES; i++) {
        const struct ledger_process *process = &ledger->processes[i];
        if (process != own && process->context_bytes[device] && lives(process))
            result = LEDGER_OCCUPIED;
    }
    if (result == LEDGER_TAKEN && used_bytes(device) + bytes > capacity_bytes)
        result = LEDGER_FULL;
    if (result == LEDGER_TAKEN)
        own->context_bytes[device] += bytes;
    unlock();
    return result;
}

enum ledger_result ledger_pin(size_t bytes, size_t limit_bytes) {
    lock();
    size_t pinned = 0;
    own_entry();
    for (int i = 0; i < LEDGER_PROCESSES; i++)
        if (ledger->processes[i].pinned_bytes && lives(&ledger->processes[i]))
            pinned += ledger->processes[i].pinned_bytes;
    bool fits = pinned <= limit_bytes && bytes <= limit_bytes - pinned;
    if (fits)
        own->pinned_bytes += bytes;
    unlock();
    return fits ? LEDGER_TAKEN : LEDGER_FULL;
}

void ledger_unpin(size_t bytes) {
    lock();
    own_entry()->pinned_bytes -= bytes;
    unlock();
}

size_t ledger_used_bytes(int device) {
    lock();
    size_t used = used_bytes(device);
    unlock();
    return used;
}

int ledger_users(int device, int room, int *pids, size_t *bytes) {
    int users = 0;
    lock();
    for (int i = 0; i < LEDGER_PROCESSES; i++) {
        const struct ledger_process *process = &ledger->processes[i];
        if (!process->context_bytes[device] || !lives(process))
            continue;
        if (users < room) {
            pids[users] = (int)process->pid;
            bytes[users] = process->allocated_bytes[device] + process->context_bytes[device];
        }
        users++;
    }
    unlock();
    return users;
}

uint64_t ledger_count_launch(void) {
    if (!own || opened_by != getpid()) {
        lock();
        own_entry();
        unlock();
    }
    return __atomic_add_fetch(&own->launches, 1, __ATOMIC_RELAXED);
}

void ledger_lose_device(int device, int xid) {
    lock();
    ledger->lost_by_xid[device] = (uint64_t)xid;
    unlock();
}

bool ledger_has_lost_device(int device) {
    lock();
    bool lost = ledger->lost_by_xid[device] != 0;
    unlock();
    return lost;
}
