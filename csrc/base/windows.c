/* os.h for Windows 10 and later, 64 bits.
 *
 * Windows differs from POSIX in three ways that callers notice. Memory is charged against the commit limit when it is
 * mapped, not when it is touched, so a mapping fails early instead of the process being killed late. There is no fork,
 * hence nothing to inherit. A plain Sleep counts in ticks of up to 16 ms, so short sleeps need a timer of their own.
 *
 * Names of files and libraries are UTF-8 in Viking and UTF-16 here.
 */
#ifndef _WIN32_WINNT
#define _WIN32_WINNT 0x0A00
#endif
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif

#include "os.h"

#include <errno.h>
#include <malloc.h>
#include <process.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

/* Declared by SDKs from Windows 10 1803 on; older systems refuse the flag and get an ordinary timer. */
#ifndef CREATE_WAITABLE_TIMER_HIGH_RESOLUTION
#define CREATE_WAITABLE_TIMER_HIGH_RESOLUTION 0x00000002
#endif

/* Newer SDKs name it, and name the upper half of CpuRate MaxRate. */
#ifndef JOB_OBJECT_CPU_RATE_CONTROL_MIN_MAX_RATE
#define JOB_OBJECT_CPU_RATE_CONTROL_MIN_MAX_RATE 0x10
#endif

/* The longest path that the system accepts, in UTF-16 units, and what a unit can need in UTF-8. */
#define PATH_UNITS 32768
#define UTF8_BYTES_PER_UNIT 3

/* Even a high-resolution timer returns late by up to this much. */
#define TIMER_LATE_NS ((uint64_t)600000)

#define REASON_BYTES 256

/* ---- words ---- */

/* The system's sentence for an error, on one line and without its full stop. */
static const char *reason_of(DWORD code, char *out, size_t capacity)
{
    wchar_t wide[REASON_BYTES];
    DWORD units =
        FormatMessageW(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS | FORMAT_MESSAGE_MAX_WIDTH_MASK, NULL,
                       code, 0, wide, REASON_BYTES, NULL);
    while (units > 0 && (wide[units - 1] == L' ' || wide[units - 1] == L'.'))
        units--;
    int bytes = units > 0 ? WideCharToMultiByte(CP_UTF8, 0, wide, (int)units, out, (int)capacity - 1, NULL, NULL) : 0;
    if (bytes > 0)
        out[bytes] = '\0';
    else
        snprintf(out, capacity, "error %lu", (unsigned long)code);
    return out;
}

static viking_status no_memory_for(const char *what)
{
    return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory left for %s", what);
}

/* ---- memory ---- */

size_t viking_os_page_bytes(void)
{
    SYSTEM_INFO system;
    GetSystemInfo(&system);
    return system.dwPageSize;
}

uint64_t viking_os_memory_bytes(void)
{
    MEMORYSTATUSEX memory = {.dwLength = sizeof memory};
    return GlobalMemoryStatusEx(&memory) ? memory.ullTotalPhys : 0;
}

viking_status viking_os_file_ranges(viking_os_range **out_ranges, size_t *out_count)
{
    size_t capacity = 0, count = 0;
    viking_os_range *ranges = NULL;
    MEMORY_BASIC_INFORMATION part;
    for (const char *next = NULL; VirtualQuery(next, &part, sizeof part) == sizeof part; next += part.RegionSize) {
        next = part.BaseAddress;
        if (part.State != MEM_COMMIT || part.Type != MEM_MAPPED)
            continue;
        uintptr_t begin = (uintptr_t)part.BaseAddress;
        if (count > 0 && ranges[count - 1].end == begin) {
            ranges[count - 1].end += part.RegionSize;
            continue;
        }
        if (count == capacity) {
            capacity = capacity == 0 ? 64 : 2 * capacity;
            viking_os_range *larger = realloc(ranges, capacity * sizeof *ranges);
            if (!larger) {
                free(ranges);
                return no_memory_for("the list of mapped files");
            }
            ranges = larger;
        }
        ranges[count++] = (viking_os_range){.begin = begin, .end = begin + part.RegionSize};
    }
    *out_ranges = ranges;
    *out_count = count;
    return VIKING_OK;
}

viking_status viking_os_map(size_t bytes, void **out)
{
    *out = NULL;
    if (bytes == 0)
        return viking_status_fail(VIKING_ERROR_INVALID, "cannot map 0 bytes of host memory");
    void *address = VirtualAlloc(NULL, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (!address) {
        char reason[REASON_BYTES];
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY,
                                  "mapping %zu bytes of host memory failed: %s; close other programs or enlarge the "
                                  "page file",
                                  bytes, reason_of(GetLastError(), reason, sizeof reason));
    }
    *out = address;
    return VIKING_OK;
}

void viking_os_trim(void)
{
    (void)_heapmin();
}

void viking_os_unmap(void *address, size_t bytes)
{
    (void)bytes;
    if (address)
        (void)VirtualFree(address, 0, MEM_RELEASE);
}

void viking_os_prefer_huge_pages(void *address, size_t bytes)
{
    (void)address; /* large pages need a privilege that users do not have, and cannot be asked for later */
    (void)bytes;
}

viking_status viking_os_inherit(void *address, size_t bytes, bool inherit)
{
    (void)address;
    (void)bytes;
    (void)inherit;
    return VIKING_OK;
}

/* ---- processors and time ---- */

/* Whole processors' worth of time that a job (a container is one) leaves to this process; 0 where it sets no limit. */
static unsigned job_processors(unsigned machine_processors)
{
    JOBOBJECT_CPU_RATE_CONTROL_INFORMATION rate = {0};
    if (!QueryInformationJobObject(NULL, JobObjectCpuRateControlInformation, &rate, sizeof rate, NULL) ||
        !(rate.ControlFlags & JOB_OBJECT_CPU_RATE_CONTROL_ENABLE))
        return 0;
    uint64_t share = 0; /* of the whole machine, in 1/10000 */
    if (rate.ControlFlags & JOB_OBJECT_CPU_RATE_CONTROL_HARD_CAP)
        share = rate.CpuRate;
    else if (rate.ControlFlags & JOB_OBJECT_CPU_RATE_CONTROL_MIN_MAX_RATE)
        share = rate.CpuRate >> 16;
    return (unsigned)((share * machine_processors + 9999) / 10000);
}

unsigned viking_os_processor_count(void)
{
    unsigned machine = GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
    unsigned count = 0;
    /* The masks are 0 for a process that has spread over several groups of 64 processors: it may use them all. */
    DWORD_PTR mine = 0, all = 0;
    if (GetProcessAffinityMask(GetCurrentProcess(), &mine, &all))
        for (; mine != 0; mine &= mine - 1)
            count++;
    if (count == 0)
        count = machine > 0 ? machine : 1;
    unsigned limit = job_processors(machine);
    return limit != 0 && limit < count ? limit : count;
}

uint64_t viking_os_clock_ns(void)
{
    LARGE_INTEGER frequency, now;
    QueryPerformanceFrequency(&frequency); /* neither fails on Windows XP or later */
    QueryPerformanceCounter(&now);
    uint64_t per_second = (uint64_t)frequency.QuadPart, ticks = (uint64_t)now.QuadPart;
    return ticks / per_second * 1000000000u + ticks % per_second * 1000000000u / per_second;
}

/* Sleep for about `duration_ns`, in the finest units that this system has. */
static void sleep_coarsely(uint64_t duration_ns)
{
    HANDLE timer = CreateWaitableTimerExW(NULL, NULL, CREATE_WAITABLE_TIMER_HIGH_RESOLUTION, TIMER_ALL_ACCESS);
    if (!timer)
        timer = CreateWaitableTimerExW(NULL, NULL, 0, TIMER_ALL_ACCESS);
    LARGE_INTEGER due = {.QuadPart = -(LONGLONG)(duration_ns / 100)}; /* negative: from now on */
    if (timer && SetWaitableTimer(timer, &due, 0, NULL, NULL, FALSE))
        (void)WaitForSingleObject(timer, INFINITE);
    else
        Sleep((DWORD)(duration_ns / 1000000u));
    if (timer)
        CloseHandle(timer);
}

void viking_os_sleep_ns(uint64_t duration_ns)
{
    /* No single sleep of more than a day, so that nothing overflows. */
    const uint64_t longest_ns = (uint64_t)86400 * 1000000000u;
    uint64_t begin = viking_os_clock_ns(), passed = 0;
    while ((passed = viking_os_clock_ns() - begin) < duration_ns) {
        uint64_t left = duration_ns - passed;
        if (left > 2 * TIMER_LATE_NS)
            sleep_coarsely(left < longest_ns ? left - TIMER_LATE_NS : longest_ns);
        else
            (void)SwitchToThread(); /* the rest is shorter than any sleep here */
    }
}

/* ---- threads ---- */

struct viking_thread {
    HANDLE handle;
    void (*body)(void *);
    void *argument;
};

struct viking_mutex {
    SRWLOCK lock;
};

struct viking_condition {
    CONDITION_VARIABLE variable;
};

static unsigned __stdcall thread_main(void *opaque)
{
    viking_thread *thread = opaque;
    thread->body(thread->argument);
    return 0;
}

viking_status viking_thread_start(void (*body)(void *), void *argument, viking_thread **out)
{
    *out = NULL;
    viking_thread *thread = malloc(sizeof *thread);
    if (!thread)
        return no_memory_for("a thread");
    thread->body = body;
    thread->argument = argument;

    /* Not CreateThread, which leaves the C library's data of each thread behind. */
    uintptr_t handle = _beginthreadex(NULL, 0, thread_main, thread, 0, NULL);
    if (handle == 0) {
        int code = errno;
        free(thread);
        return viking_status_fail(VIKING_ERROR_SYSTEM, "starting a thread failed: %s", strerror(code));
    }
    thread->handle = (HANDLE)handle;
    *out = thread;
    return VIKING_OK;
}

void viking_thread_join(viking_thread *thread)
{
    if (!thread)
        return;
    (void)WaitForSingleObject(thread->handle, INFINITE);
    CloseHandle(thread->handle);
    free(thread);
}

/* The system keeps nothing for a lock or a condition variable, so closing one is freeing it. */

viking_status viking_mutex_open(viking_mutex **out)
{
    viking_mutex *mutex = *out = malloc(sizeof *mutex);
    if (!mutex)
        return no_memory_for("a mutex");
    InitializeSRWLock(&mutex->lock);
    return VIKING_OK;
}

void viking_mutex_close(viking_mutex *mutex)
{
    free(mutex);
}

void viking_mutex_lock(viking_mutex *mutex)
{
    AcquireSRWLockExclusive(&mutex->lock);
}

void viking_mutex_unlock(viking_mutex *mutex)
{
    ReleaseSRWLockExclusive(&mutex->lock);
}

viking_status viking_condition_open(viking_condition **out)
{
    viking_condition *condition = *out = malloc(sizeof *condition);
    if (!condition)
        return no_memory_for("a condition variable");
    InitializeConditionVariable(&condition->variable);
    return VIKING_OK;
}

void viking_condition_close(viking_condition *condition)
{
    free(condition);
}

void viking_condition_wait(viking_condition *condition, viking_mutex *mutex)
{
    (void)SleepConditionVariableSRW(&condition->variable, &mutex->lock, INFINITE, 0);
}

void viking_condition_broadcast(viking_condition *condition)
{
    WakeAllConditionVariable(&condition->variable);
}

uintptr_t viking_thread_identity(void)
{
    return GetCurrentThreadId();
}

/* ---- shared libraries ---- */

/* `name` in UTF-16, made absolute if it is a path and not a bare name; NULL with GetLastError() on failure. The caller
 * frees it. */
static wchar_t *wide_name(const char *name)
{
    bool path = strpbrk(name, "\\/:") != NULL;
    wchar_t *wide = malloc(sizeof *wide * 2 * PATH_UNITS), *full = wide ? wide + PATH_UNITS : NULL;
    if (!wide) {
        SetLastError(ERROR_NOT_ENOUGH_MEMORY);
        return NULL;
    }
    if (MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, name, -1, wide, PATH_UNITS) == 0)
        goto fail;
    if (path) {
        DWORD units = GetFullPathNameW(wide, PATH_UNITS, full, NULL);
        if (units == 0 || units >= PATH_UNITS)
            goto fail;
        memcpy(wide, full, (units + 1) * sizeof *wide);
    }
    return wide;
fail:;
    DWORD code = GetLastError();
    free(wide);
    SetLastError(code);
    return NULL;
}

viking_status viking_library_open(const char *name, bool loaded_only, viking_library **out)
{
    *out = NULL;
    HMODULE module = NULL;
    wchar_t *wide = wide_name(name);
    if (wide && loaded_only) {
        if (!GetModuleHandleExW(0, wide, &module)) /* counts a reference, as LoadLibrary does */
            module = NULL;
    } else if (wide) {
        /* Never from the current directory or from PATH, where anyone may have put a file of that name: a bare name
         * comes from the program, from System32 or from what os.add_dll_directory has named. */
        DWORD flags = LOAD_LIBRARY_SEARCH_DEFAULT_DIRS;
        if (strpbrk(name, "\\/:"))
            flags |= LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR;
        module = LoadLibraryExW(wide, NULL, flags);
    }
    DWORD code = GetLastError();
    free(wide);
    if (!module) {
        char reason[REASON_BYTES];
        return viking_status_fail(VIKING_ERROR_UNSUPPORTED, "the shared library '%s' %s: %s", name,
                                  loaded_only ? "is not loaded" : "cannot be opened",
                                  reason_of(code, reason, sizeof reason));
    }
    *out = (viking_library *)module;
    return VIKING_OK;
}

void viking_library_close(viking_library *library)
{
    if (library)
        FreeLibrary((HMODULE)library);
}

void *viking_library_symbol(viking_library *library, const char *symbol)
{
    FARPROC function = GetProcAddress((HMODULE)library, symbol);
    void *address = NULL;
    memcpy(&address, &function, sizeof address); /* ISO C has no conversion between the two */
    return address;
}

void viking_library_path(const void *address, const char *otherwise, char *out, size_t capacity)
{
    HMODULE module = NULL;
    DWORD units = 0;
    wchar_t *wide = malloc(PATH_UNITS * (sizeof *wide + UTF8_BYTES_PER_UNIT));
    char *path = wide ? (char *)(wide + PATH_UNITS) : NULL;
    if (wide &&
        GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                           address, &module))
        units = GetModuleFileNameW(module, wide, PATH_UNITS);
    bool known = units > 0 && units < PATH_UNITS &&
                 WideCharToMultiByte(CP_UTF8, 0, wide, -1, path, PATH_UNITS * UTF8_BYTES_PER_UNIT, NULL, NULL) > 0;
    snprintf(out, capacity, "%s", known ? path : otherwise);
    free(wide);
}

/* ---- fork ---- */

bool viking_os_forked(void)
{
    return false;
}
