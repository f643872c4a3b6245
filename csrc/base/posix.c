/* os.h for Linux and, with what Linux adds left out, for other POSIX systems.
 *
 * Memory comes from mmap and not from malloc, because fork behaviour and huge pages are properties of whole pages:
 * advice given to a range that malloc shares with someone else would change that someone's memory too.
 */
#include "os.h"

#include <dlfcn.h>
#include <errno.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* Below this a huge page wastes more than it saves: a mapping ends in half a huge page on average. */
#define HUGE_PAGE_WORTH_BYTES ((size_t)4 << 20)

/* ---- memory ---- */

size_t viking_os_page_bytes(void)
{
    long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (size_t)bytes : 4096;
}

uint64_t viking_os_memory_bytes(void)
{
#ifdef _SC_PHYS_PAGES
    long pages = sysconf(_SC_PHYS_PAGES);
    return pages > 0 ? (uint64_t)pages * viking_os_page_bytes() : 0;
#else
    return 0;
#endif
}

#ifdef __linux__
/* A line of /proc/self/maps names a file, and not a device, whose memory may be a driver's own. */
static bool reads_file_range(const char *line, viking_os_range *out)
{
    unsigned long long begin = 0, end = 0, inode = 0;
    int path = 0;
    if (sscanf(line, "%llx-%llx %*s %*s %*s %llu %n", &begin, &end, &inode, &path) != 3 || inode == 0)
        return false;
    const char *name = line + path;
    *out = (viking_os_range){.begin = (uintptr_t)begin, .end = (uintptr_t)end};
    bool device = strncmp(name, "/dev/", 5) == 0 && strncmp(name, "/dev/shm/", 9) != 0;
    return name[0] == '/' && !device && strncmp(name, "/memfd:", 7) != 0;
}
#endif

viking_status viking_os_file_ranges(viking_os_range **out_ranges, size_t *out_count)
{
    *out_ranges = NULL;
    *out_count = 0;
#ifdef __linux__
    char line[512];
    size_t capacity = 0, count = 0;
    viking_os_range *ranges = NULL, range;
    bool fresh = true; /* this is the beginning of a line, and not the rest of one with a long name */
    FILE *file = fopen("/proc/self/maps", "re");
    if (!file)
        return VIKING_OK;
    while (fgets(line, sizeof line, file)) {
        bool begins = fresh;
        fresh = strchr(line, '\n') != NULL;
        if (!begins || !reads_file_range(line, &range))
            continue;
        if (count > 0 && ranges[count - 1].end == range.begin) {
            ranges[count - 1].end = range.end;
            continue;
        }
        if (count == capacity) {
            capacity = capacity == 0 ? 64 : 2 * capacity;
            viking_os_range *larger = realloc(ranges, capacity * sizeof *ranges);
            if (!larger) {
                free(ranges);
                fclose(file);
                return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for %zu ranges", capacity);
            }
            ranges = larger;
        }
        ranges[count++] = range;
    }
    fclose(file);
    *out_ranges = ranges;
    *out_count = count;
#endif
    return VIKING_OK;
}

viking_status viking_os_map(size_t bytes, void **out)
{
    *out = NULL;
    if (bytes == 0)
        return viking_status_fail(VIKING_ERROR_INVALID, "cannot map 0 bytes of host memory");
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY,
                                  "mapping %zu bytes of host memory failed: %s; close other programs or raise the "
                                  "memory limit of this process or container",
                                  bytes, strerror(errno));
    viking_os_prefer_huge_pages(address, bytes);
    *out = address;
    return VIKING_OK;
}

void viking_os_trim(void)
{
#ifdef __GLIBC__
    (void)malloc_trim(0);
#endif
}

void viking_os_unmap(void *address, size_t bytes)
{
    if (address)
        (void)munmap(address, bytes);
}

void viking_os_prefer_huge_pages(void *address, size_t bytes)
{
#ifdef MADV_HUGEPAGE
    if (bytes < HUGE_PAGE_WORTH_BYTES)
        return;
    uintptr_t page = viking_os_page_bytes();
    uintptr_t begin = ((uintptr_t)address + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)address + bytes) / page * page;
    /* A refusal (a kernel without huge pages) costs speed, not correctness. */
    (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)address;
    (void)bytes;
#endif
}

viking_status viking_os_inherit(void *address, size_t bytes, bool inherit)
{
#if defined(MADV_DONTFORK) && defined(MADV_DOFORK)
    if (madvise(address, bytes, inherit ? MADV_DOFORK : MADV_DONTFORK) == 0)
        return VIKING_OK;
    int code = errno;
    return viking_status_fail(code == EINVAL ? VIKING_ERROR_INVALID : VIKING_ERROR_SYSTEM,
                              "madvise(%p, %zu, %s) failed: %s", address, bytes,
                              inherit ? "MADV_DOFORK" : "MADV_DONTFORK", strerror(code));
#else
    (void)address;
    (void)bytes;
    if (inherit)
        return VIKING_OK; /* what fork does anyway */
    return viking_status_fail(VIKING_ERROR_UNSUPPORTED, "this system cannot keep memory from a forked child");
#endif
}

/* ---- processors and time ---- */

#ifdef __linux__
/* Whole processors that cgroup v2 lets this process use, at least 1; 0 where there is no limit. Inside a container
 * the file at the root of the mount is the container's own. */
static unsigned container_processors(void)
{
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (!file)
        return 0;
    unsigned long long quota = 0, period = 0;
    int read = fscanf(file, "%llu %llu", &quota, &period); /* "max 100000" reads as no number */
    fclose(file);
    if (read != 2 || quota == 0 || period == 0)
        return 0;
    unsigned long long processors = (quota + period - 1) / period;
    return processors < 1 ? 1 : processors > 65536 ? 65536 : (unsigned)processors;
}

static unsigned affine_processors(void)
{
    /* The kernel refuses a set that is smaller than its own, so grow it. */
    for (int capacity = 1024; capacity <= 1 << 16; capacity *= 2) {
        cpu_set_t *set = CPU_ALLOC((size_t)capacity);
        if (!set)
            return 0;
        size_t bytes = CPU_ALLOC_SIZE((size_t)capacity);
        int result = sched_getaffinity(0, bytes, set);
        int code = errno;
        int count = result == 0 ? CPU_COUNT_S(bytes, set) : 0;
        CPU_FREE(set);
        if (result == 0)
            return (unsigned)count;
        if (code != EINVAL)
            return 0;
    }
    return 0;
}
#endif

unsigned viking_os_processor_count(void)
{
    unsigned count = 0;
#ifdef __linux__
    count = affine_processors();
#endif
    if (count == 0) {
        long online = sysconf(_SC_NPROCESSORS_ONLN);
        count = online > 0 ? (unsigned)online : 1;
    }
#ifdef __linux__
    unsigned limit = container_processors();
    if (limit != 0 && limit < count)
        count = limit;
#endif
    return count;
}

uint64_t viking_os_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void viking_os_sleep_ns(uint64_t duration_ns)
{
    struct timespec left = {.tv_sec = (time_t)(duration_ns / 1000000000u),
                            .tv_nsec = (long)(duration_ns % 1000000000u)};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

/* ---- threads ---- */

struct viking_thread {
    pthread_t handle;
    void (*body)(void *);
    void *argument;
};

struct viking_mutex {
    pthread_mutex_t handle;
};

struct viking_condition {
    pthread_cond_t handle;
};

static void *thread_main(void *opaque)
{
    viking_thread *thread = opaque;
    thread->body(thread->argument);
    return NULL;
}

viking_status viking_thread_start(void (*body)(void *), void *argument, viking_thread **out)
{
    *out = NULL;
    viking_thread *thread = malloc(sizeof *thread);
    if (!thread)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory left to start a thread");
    thread->body = body;
    thread->argument = argument;

    int code = pthread_create(&thread->handle, NULL, thread_main, thread);
    if (code != 0) {
        free(thread);
        return viking_status_fail(VIKING_ERROR_SYSTEM, "starting a thread failed: %s", strerror(code));
    }
    *out = thread;
    return VIKING_OK;
}

void viking_thread_join(viking_thread *thread)
{
    if (!thread)
        return;
    pthread_join(thread->handle, NULL);
    free(thread);
}

viking_status viking_mutex_open(viking_mutex **out)
{
    *out = NULL;
    viking_mutex *mutex = malloc(sizeof *mutex);
    if (!mutex)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory left for a mutex");
    int code = pthread_mutex_init(&mutex->handle, NULL);
    if (code != 0) {
        free(mutex);
        return viking_status_fail(VIKING_ERROR_SYSTEM, "creating a mutex failed: %s", strerror(code));
    }
    *out = mutex;
    return VIKING_OK;
}

void viking_mutex_close(viking_mutex *mutex)
{
    if (!mutex)
        return;
    pthread_mutex_destroy(&mutex->handle);
    free(mutex);
}

void viking_mutex_lock(viking_mutex *mutex)
{
    pthread_mutex_lock(&mutex->handle);
}

void viking_mutex_unlock(viking_mutex *mutex)
{
    pthread_mutex_unlock(&mutex->handle);
}

viking_status viking_condition_open(viking_condition **out)
{
    *out = NULL;
    viking_condition *condition = malloc(sizeof *condition);
    if (!condition)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory left for a condition variable");
    int code = pthread_cond_init(&condition->handle, NULL);
    if (code != 0) {
        free(condition);
        return viking_status_fail(VIKING_ERROR_SYSTEM, "creating a condition variable failed: %s", strerror(code));
    }
    *out = condition;
    return VIKING_OK;
}

void viking_condition_close(viking_condition *condition)
{
    if (!condition)
        return;
    pthread_cond_destroy(&condition->handle);
    free(condition);
}

void viking_condition_wait(viking_condition *condition, viking_mutex *mutex)
{
    pthread_cond_wait(&condition->handle, &mutex->handle);
}

void viking_condition_broadcast(viking_condition *condition)
{
    pthread_cond_broadcast(&condition->handle);
}

uintptr_t viking_thread_identity(void)
{
    /* The address of a variable of the thread: pthread_t need not be an integer. */
    static _Thread_local char here;
    return (uintptr_t)&here;
}

/* ---- shared libraries ---- */

viking_status viking_library_open(const char *name, bool loaded_only, viking_library **out)
{
    *out = NULL;
    int flags = RTLD_NOW | RTLD_LOCAL;
#ifdef RTLD_NOLOAD
    if (loaded_only)
        flags |= RTLD_NOLOAD;
#else
    if (loaded_only)
        return viking_status_fail(VIKING_ERROR_UNSUPPORTED, "this system cannot tell whether '%s' is loaded", name);
#endif
    void *handle = dlopen(name, flags);
    if (!handle) {
        const char *reason = dlerror(); /* NULL where RTLD_NOLOAD just did not find it */
        return viking_status_fail(VIKING_ERROR_UNSUPPORTED, "the shared library '%s' %s: %s", name,
                                  loaded_only ? "is not loaded" : "cannot be opened", reason ? reason : "not found");
    }
    *out = handle;
    return VIKING_OK;
}

void viking_library_close(viking_library *library)
{
    if (library)
        dlclose(library);
}

void *viking_library_symbol(viking_library *library, const char *symbol)
{
    return dlsym(library, symbol);
}

void viking_library_path(const void *address, const char *otherwise, char *out, size_t capacity)
{
    Dl_info place = {0};
    bool known = dladdr(address, &place) != 0 && place.dli_fname;
    snprintf(out, capacity, "%s", known ? place.dli_fname : otherwise);
}

/* ---- fork ---- */

static atomic_bool forked;
static pthread_once_t fork_watch_once = PTHREAD_ONCE_INIT;

static void note_fork(void)
{
    atomic_store_explicit(&forked, true, memory_order_relaxed);
}

static void watch_forks(void)
{
    /* Fails only without memory; then a fork goes unnoticed, as it would have without asking. */
    (void)pthread_atfork(NULL, NULL, note_fork);
}

bool viking_os_forked(void)
{
    pthread_once(&fork_watch_once, watch_forks);
    return atomic_load_explicit(&forked, memory_order_relaxed);
}
