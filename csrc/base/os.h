/* The operating system, all of it: memory, threads, clock, shared libraries, fork.
 *
 * posix.c implements this header for Linux and other POSIX systems, windows.c for Windows. Nothing else in csrc/
 * includes a system header beyond the C library, so a port is one file. Every function may be called from any thread.
 */
#ifndef VIKING_BASE_OS_H
#define VIKING_BASE_OS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

/* ---- memory ---- */

size_t viking_os_page_bytes(void);

/* The machine's memory; 0 where the system does not tell. */
uint64_t viking_os_memory_bytes(void);

typedef struct viking_os_range {
    uintptr_t begin, end;
} viking_os_range;

/* The parts of this process's memory that are mapped from files, in order, neighbours as one: *out_ranges is allocated
 * with malloc, the caller frees. Devices' memory does not count. None where the system does not tell. */
viking_status viking_os_file_ranges(viking_os_range **out_ranges, size_t *out_count);

/* Map `bytes` (> 0) of zeroed, untouched, private memory, page aligned, with advice to use huge pages where the
 * system takes it. Release with viking_os_unmap and the same size. */
viking_status viking_os_map(size_t bytes, void **out);
void viking_os_unmap(void *address, size_t bytes);

/* Advise huge pages for the whole pages of a range, memory from elsewhere included: the first touch of fresh memory is
 * then several times faster. Nothing happens where the system takes no such advice or the range is below 4 MiB. */
void viking_os_prefer_huge_pages(void *address, size_t bytes);

/* Whether a forked child inherits the pages of a mapping. Memory that a device reads must not be inherited: the
 * child's copy-on-write would copy all of it. A child that touches memory it did not inherit is killed. */
viking_status viking_os_inherit(void *address, size_t bytes, bool inherit);

/* Give what the C library's allocator holds free back to the system, where that can be asked for. Blocks below its
 * mapping threshold (up to 32 MiB with glibc) stay in the process otherwise when they are freed. May take milliseconds. */
void viking_os_trim(void);

/* ---- processors and time ---- */

/* Processors this process may use (affinity and container limits count), at least 1. */
unsigned viking_os_processor_count(void);

/* Monotonic, in ns, from an arbitrary origin. */
uint64_t viking_os_clock_ns(void);
void viking_os_sleep_ns(uint64_t duration_ns);

/* ---- threads ---- */

typedef struct viking_thread viking_thread;
typedef struct viking_mutex viking_mutex;
typedef struct viking_condition viking_condition;

viking_status viking_thread_start(void (*body)(void *), void *argument, viking_thread **out);
void viking_thread_join(viking_thread *thread); /* waits for the body to return, then frees */

viking_status viking_mutex_open(viking_mutex **out);
void viking_mutex_close(viking_mutex *mutex); /* NULL is allowed */
void viking_mutex_lock(viking_mutex *mutex);
void viking_mutex_unlock(viking_mutex *mutex);

viking_status viking_condition_open(viking_condition **out);
void viking_condition_close(viking_condition *condition); /* NULL is allowed */
void viking_condition_wait(viking_condition *condition, viking_mutex *mutex);
void viking_condition_broadcast(viking_condition *condition);

/* An identity of the calling thread, for comparison only. */
uintptr_t viking_thread_identity(void);

/* ---- shared libraries ---- */

typedef struct viking_library viking_library;

/* Open `name` (a soname or a path). With `loaded_only`, succeed only where the process has it already. */
viking_status viking_library_open(const char *name, bool loaded_only, viking_library **out);
void viking_library_close(viking_library *library); /* NULL is allowed */

/* A symbol's address, or NULL. */
void *viking_library_symbol(viking_library *library, const char *symbol);

/* The file that the code or data at `address` was loaded from; `otherwise` where the system does not tell. */
void viking_library_path(const void *address, const char *otherwise, char *out, size_t capacity);

/* ---- fork ---- */

/* True in a child forked after the first call of this function in any ancestor. */
bool viking_os_forked(void);

#endif
