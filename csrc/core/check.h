/* The independent judge of a plan: it knows the rules and none of the reasoning that made the plan. */
#ifndef VIKING_CORE_CHECK_H
#define VIKING_CORE_CHECK_H

#include "plan.h"

/* Play several periods and fail with INVALID, naming the use and the weight, where
 *  - a span leaves the slab or is misaligned, or two weights that are in use at the same moment intersect;
 *  - a use begins without its bytes: not there, overwritten since, or fetched after it;
 *  - a fetch may start before the release of a use whose bytes it overwrites (with fetches running in list order,
 *    each as early as its gate and its predecessors allow). */
viking_status viking_check(const viking_map *map, const viking_plan *plan, const viking_trace *trace);

#endif
