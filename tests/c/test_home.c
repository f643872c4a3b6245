/* Homes: whole pages of their own, filled by several threads, pinned and unpinned alone. */
#include "check.h"

#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/host.h"
#include "base/os.h"
#include "core/home.h"

static void a_home_is_zeroed_whole_pages(void)
{
    size_t page = viking_os_page_bytes();
    viking_home *home = NULL;
    CHECK_OK(viking_home_open(page + 1, &home));
    CHECK(home->bytes == page + 1 && (uintptr_t)home->address % page == 0);
    for (size_t i = 0; i < 2 * page; i++) /* the rounding up is there, too */
        CHECK(((unsigned char *)home->address)[i] == 0);
    CHECK(viking_home_locked_bytes(home) == 0);
    viking_home_close(home);
    viking_home_close(NULL);
}

static void a_home_of_nothing_is_refused(void)
{
    viking_home *home = NULL;
    CHECK(viking_home_open(0, &home) == VIKING_ERROR_INVALID && home == NULL);
    CHECK(viking_home_open(SIZE_MAX / 2, &home) == VIKING_ERROR_NO_HOST_MEMORY && home == NULL);
}

static void filling_copies_any_part(void)
{
    enum { BYTES = 3000001 };
    viking_home *home = NULL;
    unsigned char *source = malloc(BYTES);
    CHECK(source != NULL);
    for (size_t i = 0; i < BYTES; i++)
        source[i] = (unsigned char)(i * 31 + i / 251);
    CHECK_OK(viking_home_open(BYTES, &home));
    CHECK_OK(viking_home_fill(home, 0, source, BYTES));
    CHECK(memcmp(home->address, source, BYTES) == 0);
    CHECK_OK(viking_home_fill(home, 1000, source, 7));
    CHECK(memcmp((char *)home->address + 1000, source, 7) == 0 && memcmp(home->address, source, 1000) == 0);
    CHECK(memcmp((char *)home->address + 1007, source + 1007, BYTES - 1007) == 0);
    CHECK_OK(viking_home_fill(home, BYTES, source, 0));
    CHECK(viking_home_fill(home, BYTES, source, 1) == VIKING_ERROR_INVALID);
    CHECK(viking_home_fill(home, BYTES + 1, source, 0) == VIKING_ERROR_INVALID);
    CHECK(viking_home_fill(home, 1, source, SIZE_MAX) == VIKING_ERROR_INVALID);
    viking_home_close(home);
    free(source);
}

static void pinning_twice_is_pinning_once(void)
{
    size_t page = viking_os_page_bytes();
    viking_backend *backend = NULL;
    viking_home *home = NULL;
    CHECK_OK(viking_host_open(NULL, &backend));
    CHECK_OK(viking_home_open(page / 2, &home));
    CHECK_OK(viking_home_unpin(home));
    CHECK_OK(viking_home_pin(home, backend));
    CHECK_OK(viking_home_pin(home, backend));
    CHECK(viking_host_pinned_bytes(backend) == page && viking_home_locked_bytes(home) == page);
    CHECK_OK(viking_home_unpin(home));
    CHECK_OK(viking_home_unpin(home));
    CHECK(viking_host_pinned_bytes(backend) == 0 && viking_home_locked_bytes(home) == 0);
    CHECK_OK(viking_home_pin(home, backend));
    viking_home_close(home); /* unpins */
    CHECK(viking_host_pinned_bytes(backend) == 0);
    backend->operations->close(backend);
}

static void a_refused_pin_leaves_it_pageable(void)
{
    size_t page = viking_os_page_bytes();
    viking_backend *backend = NULL;
    viking_home *home = NULL;
    CHECK_OK(viking_host_open(&(viking_host_options){.pin_limit_bytes = page}, &backend));
    CHECK_OK(viking_home_open(2 * page, &home));
    CHECK(viking_home_pin(home, backend) == VIKING_ERROR_NO_HOST_MEMORY);
    CHECK(home->pinned_by == NULL && viking_home_locked_bytes(home) == 0);
    CHECK_OK(viking_home_retire(home));
    viking_home_close(home);
    backend->operations->close(backend);
}

static int exit_code_of_child(void (*body)(viking_home *), viking_home *home)
{
    int code = -1;
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        body(home);
        _exit(0);
    }
    CHECK(waitpid(child, &code, 0) == child);
    return WIFEXITED(code) ? WEXITSTATUS(code) : 128 + WTERMSIG(code);
}

static void read_five(viking_home *home)
{
    _exit(*(volatile unsigned char *)home->address == 5 ? 0 : 1);
}

static void close_it(viking_home *home)
{
    viking_home_close(home);
}

static void a_child_inherits_a_home_only_once_it_is_retired(void)
{
    viking_home *home = NULL;
    viking_os_forked(); /* from here on a fork is noticed, as with an engine */
    CHECK_OK(viking_home_open(100, &home));
    *(unsigned char *)home->address = 5;
    CHECK(exit_code_of_child(close_it, home) == 0);
    CHECK(*(unsigned char *)home->address == 5);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) /* a signal that they report in their own way */
    CHECK(exit_code_of_child(read_five, home) != 0);
#endif
    CHECK_OK(viking_home_retire(home));
    CHECK(exit_code_of_child(read_five, home) == 0);
    viking_home_close(home);
}

int main(void)
{
    RUN(a_home_is_zeroed_whole_pages);
    RUN(a_home_of_nothing_is_refused);
    RUN(filling_copies_any_part);
    RUN(pinning_twice_is_pinning_once);
    RUN(a_refused_pin_leaves_it_pageable);
    RUN(a_child_inherits_a_home_only_once_it_is_retired);
    return 0;
}
