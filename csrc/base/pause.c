#include "pause.h"

#include "os.h"

#define SPIN_NS 70000u

void viking_pause_until(uint64_t deadline_ns)
{
    uint64_t now = viking_os_clock_ns();
    if (deadline_ns > now + SPIN_NS)
        viking_os_sleep_ns(deadline_ns - now - SPIN_NS);
    while (viking_os_clock_ns() < deadline_ns) {
    }
}
