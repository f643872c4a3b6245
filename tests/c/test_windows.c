/* What Windows adds to the ground floor: affinity, short sleeps, libraries with names in any script, no fork.
 * Built and run by `make -C csrc windows-test`. */
#include "check.h"

#include <string.h>
#include <windows.h>

#include "base/os.h"

/* ---- memory ---- */

static void what_is_unmapped_is_given_back(void)
{
    const size_t bytes = (size_t)16 << 20;
    void *address = NULL;
    CHECK_OK(viking_os_map(bytes, &address));
    memset(address, 1, bytes);
    MEMORY_BASIC_INFORMATION place;
    CHECK(VirtualQuery((char *)address + bytes - 1, &place, sizeof place) == sizeof place);
    CHECK(place.State == MEM_COMMIT && place.Protect == PAGE_READWRITE);
    viking_os_unmap(address, bytes);
    CHECK(VirtualQuery(address, &place, sizeof place) == sizeof place);
    CHECK(place.State == MEM_FREE);
    viking_os_unmap(NULL, bytes);
}

static void advice_and_inheritance_change_nothing(void)
{
    const size_t bytes = (size_t)8 << 20;
    void *address = NULL;
    CHECK_OK(viking_os_map(bytes, &address));
    memset(address, 7, bytes);
    viking_os_prefer_huge_pages((char *)address + 5, bytes - 5);
    CHECK_OK(viking_os_inherit(address, bytes, false));
    CHECK_OK(viking_os_inherit(address, bytes, true));
    for (size_t at = 0; at < bytes; at++)
        CHECK(((const char *)address)[at] == 7);
    viking_os_unmap(address, bytes);
    CHECK(!viking_os_forked());
}

static void the_machine_has_at_least_the_memory_that_is_free(void)
{
    MEMORYSTATUSEX memory = {.dwLength = sizeof memory};
    CHECK(GlobalMemoryStatusEx(&memory));
    CHECK(viking_os_memory_bytes() > memory.ullAvailPhys);
}

/* ---- processors and time ---- */

static void affinity_limits_the_processors(void)
{
    DWORD_PTR mine = 0, all = 0;
    CHECK(GetProcessAffinityMask(GetCurrentProcess(), &mine, &all));
    unsigned before = viking_os_processor_count();
    CHECK(before >= 1 && before <= GetActiveProcessorCount(ALL_PROCESSOR_GROUPS));
    CHECK(SetProcessAffinityMask(GetCurrentProcess(), mine & (~mine + 1))); /* its lowest processor alone */
    CHECK(viking_os_processor_count() == 1);
    CHECK(SetProcessAffinityMask(GetCurrentProcess(), mine));
    CHECK(viking_os_processor_count() == before);
}

static void a_short_sleep_is_short_and_never_too_short(void)
{
    const uint64_t durations_ns[] = {0, 1, 100000, 900000, 1500000, 3000000};
    for (size_t i = 0; i < sizeof durations_ns / sizeof *durations_ns; i++) {
        uint64_t shortest_ns = UINT64_MAX; /* of many: the machine may be busy */
        for (int round = 0; round < 50; round++) {
            uint64_t begin = viking_os_clock_ns();
            viking_os_sleep_ns(durations_ns[i]);
            uint64_t passed_ns = viking_os_clock_ns() - begin;
            CHECK(passed_ns >= durations_ns[i]);
            if (passed_ns < shortest_ns)
                shortest_ns = passed_ns;
        }
        CHECK(shortest_ns < durations_ns[i] + 1000000);
    }
}

static void the_clock_goes_on_from_one_second_to_the_next(void)
{
    uint64_t begin = viking_os_clock_ns();
    Sleep(1100);
    CHECK(viking_os_clock_ns() - begin >= 1050000000); /* a Sleep may end a tick early */
}

/* ---- shared libraries ---- */

static void a_loaded_library_is_found_and_an_absent_one_is_named(void)
{
    viking_library *library = NULL;
    CHECK_OK(viking_library_open("kernel32.dll", true, &library));
    CHECK(viking_library_symbol(library, "GetCurrentProcessId"));
    CHECK(viking_library_symbol(library, "viking_no_such_symbol") == NULL);
    viking_library_close(library);
    viking_library_close(NULL);

    CHECK(viking_library_open("viking-is-not-here.dll", false, &library) == VIKING_ERROR_UNSUPPORTED);
    CHECK(library == NULL);
    CHECK(strstr(viking_status_detail(), "'viking-is-not-here.dll' cannot be opened: "));
    CHECK(viking_library_open("broken \xff.dll", false, &library) == VIKING_ERROR_UNSUPPORTED);
    CHECK(library == NULL);
}

static void loaded_only_does_not_load(void)
{
    const char *name = "version.dll"; /* part of the system, used by nobody here */
    viking_library *library = NULL;
    CHECK(viking_library_open(name, true, &library) == VIKING_ERROR_UNSUPPORTED);
    CHECK(strstr(viking_status_detail(), "is not loaded"));
    CHECK_OK(viking_library_open(name, false, &library));
    viking_library *again = NULL;
    CHECK_OK(viking_library_open(name, true, &again));
    viking_library_close(library);
    CHECK(GetModuleHandleA(name)); /* `again` still holds it */
    viking_library_close(again);
    CHECK(!GetModuleHandleA(name));
}

static void a_library_with_a_name_in_any_script_opens_by_its_path(void)
{
    wchar_t source[MAX_PATH], folder[MAX_PATH], wide[2 * MAX_PATH];
    char path[512], found[512];
    CHECK(GetSystemDirectoryW(source, MAX_PATH - 16) > 0 && GetTempPathW(MAX_PATH, folder) > 0);
    wcscat(source, L"\\version.dll");
    _snwprintf(wide, 2 * MAX_PATH, L"%lsviking-%lu-\u00fc\u6f22.dll", folder, (unsigned long)GetCurrentProcessId());
    CHECK(CopyFileW(source, wide, FALSE));
    CHECK(WideCharToMultiByte(CP_UTF8, 0, wide, -1, path, sizeof path, NULL, NULL) > 0);

    viking_library *library = NULL;
    CHECK_OK(viking_library_open(path, false, &library));
    void *symbol = viking_library_symbol(library, "GetFileVersionInfoW");
    CHECK(symbol);
    viking_library_path(symbol, "unknown", found, sizeof found);
    CHECK(strstr(found, "-\xc3\xbc\xe6\xbc\xa2.dll"));
    viking_library_close(library);
    CHECK(DeleteFileW(wide)); /* refused while it is loaded */

    int here = 0;
    viking_library_path(&here, "unknown", found, sizeof found);
    CHECK(strcmp(found, "unknown") == 0);
}

static void a_bare_name_is_not_looked_for_in_the_current_directory(void)
{
    wchar_t source[MAX_PATH], wide[64];
    char name[64];
    CHECK(GetSystemDirectoryW(source, MAX_PATH - 16) > 0);
    wcscat(source, L"\\version.dll");
    _snwprintf(wide, 64, L"viking-%lu.dll", (unsigned long)GetCurrentProcessId());
    snprintf(name, sizeof name, "%ls", wide);
    wchar_t folder[MAX_PATH], before[MAX_PATH];
    CHECK(GetCurrentDirectoryW(MAX_PATH, before) > 0 && GetTempPathW(MAX_PATH, folder) > 0);
    CHECK(SetCurrentDirectoryW(folder) && CopyFileW(source, wide, FALSE));

    viking_library *library = NULL;
    viking_status status = viking_library_open(name, false, &library);
    viking_library_close(library);
    CHECK(DeleteFileW(wide) && SetCurrentDirectoryW(before));
    CHECK(status == VIKING_ERROR_UNSUPPORTED);
}

int main(void)
{
    RUN(what_is_unmapped_is_given_back);
    RUN(advice_and_inheritance_change_nothing);
    RUN(the_machine_has_at_least_the_memory_that_is_free);
    RUN(affinity_limits_the_processors);
    RUN(a_short_sleep_is_short_and_never_too_short);
    RUN(the_clock_goes_on_from_one_second_to_the_next);
    RUN(a_loaded_library_is_found_and_an_absent_one_is_named);
    RUN(loaded_only_does_not_load);
    RUN(a_library_with_a_name_in_any_script_opens_by_its_path);
    RUN(a_bare_name_is_not_looked_for_in_the_current_directory);
    return 0;
}
