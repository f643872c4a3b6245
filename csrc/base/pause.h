/* Waits that end on time. */
#ifndef VIKING_BASE_PAUSE_H
#define VIKING_BASE_PAUSE_H

#include <stdint.h>

/* Return at this moment of viking_os_clock_ns, or at once if it is over. A sleep returns late by some 60 us, so the end
 * of the wait is spun. */
void viking_pause_until(uint64_t deadline_ns);

#endif
