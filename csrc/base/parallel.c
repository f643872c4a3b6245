/* Memory-bound work split over threads.
 *
 * Threads are started for each call and not kept in a pool: a call moves megabytes (milliseconds) and a start costs
 * tens of microseconds, whereas a pool would have to survive forks, interpreter exit and unloading. Every thread gets
 * one contiguous range, so each page is first touched by one thread and the prefetcher sees one stream per thread.
 */
#include "parallel.h"

#include <stdint.h>
#include <string.h>

#include "os.h"

#define MOST_THREADS 64
#define DEFAULT_MOST_THREADS 8u

/* Less than this per thread is done before another thread has started. */
#define COPY_GRAIN_BYTES ((size_t)1 << 20)

typedef struct share {
    void (*body)(void *context, size_t begin, size_t end);
    void *context;
    size_t begin;
    size_t end;
} share;

static void run_share(void *opaque)
{
    const share *mine = opaque;
    mine->body(mine->context, mine->begin, mine->end);
}

static size_t thread_count(size_t grains, unsigned threads)
{
    size_t wanted = threads;
    if (wanted == 0) {
        unsigned processors = viking_os_processor_count();
        wanted = processors < DEFAULT_MOST_THREADS ? processors : DEFAULT_MOST_THREADS;
    }
    if (wanted > MOST_THREADS)
        wanted = MOST_THREADS;
    return wanted < grains ? wanted : grains;
}

void viking_parallel_for(size_t count, size_t grain, unsigned threads,
                         void (*body)(void *context, size_t begin, size_t end), void *context)
{
    if (count == 0)
        return;
    if (grain == 0)
        grain = 1;
    size_t grains = count / grain + (count % grain != 0);
    size_t shares = grains == 1 || threads == 1 ? 1 : thread_count(grains, threads);
    if (shares == 1) {
        body(context, 0, count);
        return;
    }

    share work[MOST_THREADS];
    viking_thread *running[MOST_THREADS] = {NULL};
    size_t each = grains / shares, longer = grains % shares; /* the first `longer` shares have one grain more */
    size_t begin = 0;
    for (size_t i = 0; i < shares; i++) {
        size_t take = each + (i < longer);
        size_t end = i + 1 == shares ? count : begin + take * grain;
        work[i] = (share){.body = body, .context = context, .begin = begin, .end = end};
        begin = end;
    }

    /* The caller's own share is the first; what no thread could be started for is done here afterwards. */
    for (size_t i = 1; i < shares; i++)
        (void)viking_thread_start(run_share, &work[i], &running[i]);
    run_share(&work[0]);
    for (size_t i = 1; i < shares; i++)
        if (running[i])
            viking_thread_join(running[i]);
        else
            run_share(&work[i]);
}

typedef struct copy_job {
    char *destination;
    const char *source;
} copy_job;

static void copy_range(void *context, size_t begin, size_t end)
{
    const copy_job *job = context;
    memcpy(job->destination + begin, job->source + begin, end - begin);
}

void viking_parallel_copy(void *destination, const void *source, size_t bytes, unsigned threads)
{
    copy_job job = {.destination = destination, .source = source};
    viking_parallel_for(bytes, COPY_GRAIN_BYTES, threads, copy_range, &job);
}
