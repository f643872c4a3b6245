/* Result codes, and the sentence that goes with a failure.
 *
 * Every fallible function of the C code returns a viking_status. A failure leaves a sentence in the calling
 * thread: what was asked, what came back, what the user can do. Whoever reports the failure reads it with
 * viking_status_detail(); whoever passes the code on leaves it alone.
 */
#ifndef VIKING_BASE_STATUS_H
#define VIKING_BASE_STATUS_H

typedef enum viking_status {
    VIKING_BUSY = 1, /* nothing failed: try again after the next release by another thread */
    VIKING_OK = 0,
    VIKING_ERROR_INVALID = -1, /* an argument breaks the function's contract */
    VIKING_ERROR_STATE = -2, /* right arguments, wrong moment (closed, in use, after a fork) */
    VIKING_ERROR_NO_HOST_MEMORY = -3, /* host memory, pageable or pinned */
    VIKING_ERROR_NO_DEVICE_MEMORY = -4, /* device memory */
    VIKING_ERROR_BUDGET = -5, /* the weights do not fit in the budget; the detail names the smallest that works */
    VIKING_ERROR_UNSUPPORTED = -6, /* the platform refuses it (no CUDA, pinning not allowed) */
    VIKING_ERROR_DEVICE = -7, /* a call on the device failed */
    VIKING_ERROR_SYSTEM = -8 /* a call into the operating system failed */
} viking_status;

#if defined(__MINGW32__) && !defined(__clang__)
/* Plain `printf` means the formats of Windows' first C library there, which had no %zu. */
#define VIKING_PRINTF(format_at, arguments_at) __attribute__((format(gnu_printf, format_at, arguments_at)))
#elif defined(__GNUC__)
#define VIKING_PRINTF(format_at, arguments_at) __attribute__((format(printf, format_at, arguments_at)))
#else
#define VIKING_PRINTF(format_at, arguments_at)
#endif

/* Store the sentence for this thread and return `code`, so that `return viking_status_fail(...)` reads well.
 * Sentences longer than 511 bytes are cut. */
viking_status viking_status_fail(viking_status code, const char *format, ...) VIKING_PRINTF(2, 3);

/* The sentence of this thread's most recent failure; "" before the first. Valid until the next failure. */
const char *viking_status_detail(void);

/* "VIKING_ERROR_BUDGET" and the like; never NULL. */
const char *viking_status_name(viking_status status);

#endif
