/* What POSIX systems add to the ground floor: memory that is not there before it is touched, huge pages, forks, sonames. */
#include "check.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/os.h"

/* ---- memory ---- */

static void a_mapping_is_untouched_memory(void)
{
    const size_t bytes = (size_t)2 << 20; /* below the size that asks for huge pages */
    void *address = NULL;
    CHECK_OK(viking_os_map(bytes, &address));
    size_t pages = bytes / viking_os_page_bytes();
    unsigned char *present = malloc(pages);
    CHECK(present);
    CHECK(mincore(address, bytes, present) == 0);
    for (size_t i = 0; i < pages; i++)
        CHECK((present[i] & 1) == 0);
    ((volatile char *)address)[3 * viking_os_page_bytes()] = 1;
    CHECK(mincore(address, bytes, present) == 0);
    CHECK(present[3] & 1);
    free(present);
    viking_os_unmap(address, bytes);
}

/* Whether the kernel has noted the wish for huge pages at `address`; -1 where it cannot say. */
static int wants_huge_pages(const void *address)
{
    FILE *file = fopen("/proc/self/smaps", "r");
    if (!file || access("/sys/kernel/mm/transparent_hugepage", F_OK) != 0) {
        if (file)
            fclose(file);
        return -1;
    }
    char line[512];
    bool inside = false;
    int result = -1;
    while (result < 0 && fgets(line, sizeof line, file)) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2)
            inside = begin <= (uintptr_t)address && (uintptr_t)address < end;
        else if (inside && strncmp(line, "VmFlags:", 8) == 0)
            result = strstr(line, " hg") != NULL;
    }
    fclose(file);
    return result;
}

static void huge_pages_are_asked_for_where_they_are_worth_it(void)
{
    void *large = NULL, *small = NULL;
    CHECK_OK(viking_os_map((size_t)16 << 20, &large));
    CHECK(wants_huge_pages(large) != 0);
    CHECK(wants_huge_pages((char *)large + ((size_t)16 << 20) - 1) != 0);
    CHECK_OK(viking_os_map((size_t)1 << 20, &small));
    CHECK(wants_huge_pages(small) != 1);
    viking_os_unmap(small, (size_t)1 << 20);
    viking_os_unmap(large, (size_t)16 << 20);

    /* Memory from elsewhere, not aligned to anything. */
    const size_t bytes = (size_t)64 << 20;
    char *foreign = malloc(bytes);
    CHECK(foreign);
    viking_os_prefer_huge_pages(foreign + 5, bytes - 5);
    CHECK(wants_huge_pages(foreign + bytes / 2) != 0);
    free(foreign);
}

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/* Pages of this process that are in memory. */
static long pages_in_memory(void)
{
    long total = 0;
    long present = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%ld %ld", &total, &present) == 2);
    fclose(file);
    return present;
}

static void freed_blocks_below_the_mapping_threshold_go_back(void)
{
    enum { BLOCKS = 256, BYTES = 64 << 10 };
    static void *blocks[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(BYTES);
        CHECK(blocks[i] != NULL);
        for (int k = 0; k < BYTES; k += 512)
            ((volatile char *)blocks[i])[k] = 1; /* a plain memset before a free is optimised away */
    }
    void *on_top = malloc(BYTES); /* keeps the C library from giving back what lies below */
    for (int i = 0; i < BLOCKS; i++)
        free(blocks[i]);
    long before = pages_in_memory();
    viking_os_trim();
    CHECK(on_top != NULL && (before - pages_in_memory()) * (long)viking_os_page_bytes() > BLOCKS * BYTES / 2);
    free(on_top);
}
#endif

/* How a forked child that reads `address` ends: its exit code, or minus the signal that killed it. */
static int read_in_child(volatile unsigned char *address)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        signal(SIGSEGV, SIG_DFL); /* a sanitizer would turn it into a report */
        signal(SIGBUS, SIG_DFL);
        _exit(*address);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* The child did not read `value`: it was killed, or, where a sanitizer maps memory of its own into the hole right after
 * the fork, read that. */
static bool is_missing(int end, int value)
{
#if defined(__SANITIZE_THREAD__)
    return end != value;
#else
    (void)value;
    return end == -SIGSEGV;
#endif
}

static void a_child_does_not_have_what_it_must_not_inherit(void)
{
    size_t bytes = 3 * viking_os_page_bytes();
    void *address = NULL;
    CHECK_OK(viking_os_map(bytes, &address));
    volatile unsigned char *cells = address;
    cells[0] = 42;
    cells[bytes - 1] = 43;
    CHECK(read_in_child(cells) == 42);

    CHECK_OK(viking_os_inherit(address, bytes, false));
    CHECK(is_missing(read_in_child(cells), 42));
    CHECK(is_missing(read_in_child(cells + bytes - 1), 43));
    CHECK(cells[0] == 42); /* the parent keeps it */

    CHECK_OK(viking_os_inherit(address, bytes, true));
    CHECK(read_in_child(cells) == 42);
    CHECK(read_in_child(cells + bytes - 1) == 43);
    viking_os_unmap(address, bytes);
}

static void inheritance_of_an_unaligned_address_is_refused(void)
{
    void *address = NULL;
    CHECK_OK(viking_os_map(4096, &address));
    CHECK(viking_os_inherit((char *)address + 1, 16, false) == VIKING_ERROR_INVALID);
    viking_os_unmap(address, 4096);
}

/* ---- processors ---- */

static void at_least_one_processor_and_no_more_than_there_are(void)
{
    unsigned count = viking_os_processor_count();
    CHECK(count >= 1);
    CHECK((long)count <= sysconf(_SC_NPROCESSORS_CONF));
}

/* ---- shared libraries ---- */

static void a_loaded_library_is_found_and_an_absent_one_is_named(void)
{
    viking_library *library = NULL;
    CHECK_OK(viking_library_open("libc.so.6", true, &library));
    CHECK(viking_library_symbol(library, "getpid"));
    CHECK(viking_library_symbol(library, "viking_no_such_symbol") == NULL);
    viking_library_close(library);
    viking_library_close(NULL);

    CHECK(viking_library_open("libviking-is-not-here.so.9", false, &library) == VIKING_ERROR_UNSUPPORTED);
    CHECK(library == NULL);
    CHECK(strstr(viking_status_detail(), "libviking-is-not-here.so.9"));
}

static void loaded_only_does_not_load(void)
{
    const char *name = "libanl.so.1"; /* part of the C library, used by nobody here */
    viking_library *library = NULL;
    CHECK(viking_library_open(name, true, &library) == VIKING_ERROR_UNSUPPORTED);
    CHECK(strstr(viking_status_detail(), "is not loaded"));
    CHECK_OK(viking_library_open(name, false, &library));
    viking_library *again = NULL;
    CHECK_OK(viking_library_open(name, true, &again));
    viking_library_close(again);
    viking_library_close(library);
}

/* ---- fork ---- */

static void a_child_knows_that_it_was_forked(void)
{
    CHECK(!viking_os_forked());
    CHECK(!viking_os_forked());
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        _exit(viking_os_forked() ? 7 : 8);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    CHECK(!viking_os_forked());
}

int main(void)
{
    RUN(a_mapping_is_untouched_memory);
    RUN(huge_pages_are_asked_for_where_they_are_worth_it);
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    RUN(freed_blocks_below_the_mapping_threshold_go_back);
#endif
    RUN(a_child_does_not_have_what_it_must_not_inherit);
    RUN(inheritance_of_an_unaligned_address_is_refused);
    RUN(at_least_one_processor_and_no_more_than_there_are);
    RUN(a_loaded_library_is_found_and_an_absent_one_is_named);
    RUN(loaded_only_does_not_load);
    RUN(a_child_knows_that_it_was_forked);
    return 0;
}
