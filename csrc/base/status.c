/* Result codes and the sentence of the latest failure.
 *
 * The sentence lives in a fixed buffer of each thread: a failure must be reportable when no memory is left, and two
 * threads that fail at once must not mix their words.
 */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>

#if defined(_MSC_VER) && !defined(__clang__)
#define THREAD_LOCAL __declspec(thread) /* that compiler knew it long before it knew C11's word */
#else
#define THREAD_LOCAL _Thread_local
#endif

#define DETAIL_BYTES 512

static THREAD_LOCAL char detail[DETAIL_BYTES];

viking_status viking_status_fail(viking_status code, const char *format, ...)
{
    /* Formatted aside first: the arguments may quote the sentence of an earlier failure. */
    char sentence[DETAIL_BYTES];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    if (length < 0)
        sentence[0] = '\0';
    snprintf(detail, sizeof detail, "%s", sentence);
    return code;
}

const char *viking_status_detail(void)
{
    return detail;
}

const char *viking_status_name(viking_status status)
{
    switch (status) {
    case VIKING_BUSY:
        return "VIKING_BUSY";
    case VIKING_OK:
        return "VIKING_OK";
    case VIKING_ERROR_INVALID:
        return "VIKING_ERROR_INVALID";
    case VIKING_ERROR_STATE:
        return "VIKING_ERROR_STATE";
    case VIKING_ERROR_NO_HOST_MEMORY:
        return "VIKING_ERROR_NO_HOST_MEMORY";
    case VIKING_ERROR_NO_DEVICE_MEMORY:
        return "VIKING_ERROR_NO_DEVICE_MEMORY";
    case VIKING_ERROR_BUDGET:
        return "VIKING_ERROR_BUDGET";
    case VIKING_ERROR_UNSUPPORTED:
        return "VIKING_ERROR_UNSUPPORTED";
    case VIKING_ERROR_DEVICE:
        return "VIKING_ERROR_DEVICE";
    case VIKING_ERROR_SYSTEM:
        return "VIKING_ERROR_SYSTEM";
    }
    return "VIKING_ERROR_UNKNOWN";
}
