/* DLPack's memory layout and C exchange API, version 1.3, in our own words.
 *
 * Declared here and not included from a package, because the wheel is built without torch. tests/c/assert_dlpack.c
 * proves every size, offset and value against the header that torch ships. Only what Viking uses has a name.
 */
#ifndef VIKING_PYTHON_DLPACK_H
#define VIKING_PYTHON_DLPACK_H

#include <stdint.h>

#define VIKING_DLPACK_MAJOR 1u
#define VIKING_DLPACK_MINOR 3u

/* The attribute of a type that holds the capsule, and the names of the capsules. */
#define VIKING_DLPACK_EXCHANGE_ATTRIBUTE "__dlpack_c_exchange_api__"
#define VIKING_DLPACK_EXCHANGE_CAPSULE "dlpack_exchange_api"
#define VIKING_DLPACK_CAPSULE "dltensor"
#define VIKING_DLPACK_CAPSULE_USED "used_dltensor"
#define VIKING_DLPACK_CAPSULE_VERSIONED "dltensor_versioned"
#define VIKING_DLPACK_CAPSULE_VERSIONED_USED "used_dltensor_versioned"

enum { VIKING_DLPACK_CPU = 1, VIKING_DLPACK_CUDA = 2, VIKING_DLPACK_CUDA_HOST = 3, VIKING_DLPACK_ROCM = 10 };

enum {
    VIKING_DLPACK_INT = 0,
    VIKING_DLPACK_UINT = 1,
    VIKING_DLPACK_FLOAT = 2,
    VIKING_DLPACK_OPAQUE = 3,
    VIKING_DLPACK_BFLOAT = 4,
    VIKING_DLPACK_COMPLEX = 5,
    VIKING_DLPACK_BOOL = 6,
    VIKING_DLPACK_FLOAT8_E4M3FN = 10,
    VIKING_DLPACK_FLOAT8_E4M3FNUZ = 11,
    VIKING_DLPACK_FLOAT8_E5M2 = 12,
    VIKING_DLPACK_FLOAT8_E5M2FNUZ = 13,
    VIKING_DLPACK_FLOAT8_E8M0FNU = 14,
    VIKING_DLPACK_FLOAT4_E2M1FN = 17
};

typedef struct viking_dlpack_version {
    uint32_t major;
    uint32_t minor;
} viking_dlpack_version;

typedef struct viking_dlpack_tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
    int64_t *shape; /* may be NULL for ndim 0 */
    int64_t *strides; /* in elements; before 1.2, NULL means contiguous */
    uint64_t byte_offset;
} viking_dlpack_tensor;

/* What a capsule named "dltensor" holds. */
typedef struct viking_dlpack_managed {
    viking_dlpack_tensor tensor;
    void *context;
    void (*deleter)(struct viking_dlpack_managed *self); /* may be NULL */
} viking_dlpack_managed;

/* Of a managed tensor's flags: the producer made a copy, which lives as long as the managed tensor. */
#define VIKING_DLPACK_FLAG_COPIED UINT64_C(2)

/* What a capsule named "dltensor_versioned" holds. Of an unknown major version only the deleter may be used. */
typedef struct viking_dlpack_managed_versioned {
    viking_dlpack_version version;
    void *context;
    void (*deleter)(struct viking_dlpack_managed_versioned *self); /* may be NULL */
    uint64_t flags;
    viking_dlpack_tensor tensor;
} viking_dlpack_managed_versioned;

typedef struct viking_dlpack_exchange_header {
    viking_dlpack_version version;
    struct viking_dlpack_exchange_header *previous; /* an older table, or NULL */
} viking_dlpack_exchange_header;

/* The table behind a type's exchange capsule; static for the process. The functions return 0, or -1 with a Python
 * exception set, and need the GIL. None of them synchronises a stream. */
typedef struct viking_dlpack_exchange {
    viking_dlpack_exchange_header header;
    int (*allocate)(viking_dlpack_tensor *prototype, viking_dlpack_managed_versioned **out, void *error_context,
                    void (*set_error)(void *error_context, const char *kind, const char *message));
    int (*export_managed)(void *object, viking_dlpack_managed_versioned **out);
    int (*import_managed)(viking_dlpack_managed_versioned *tensor, void **out_object); /* steals the tensor */
    /* Non-owning: valid until control returns to Python. NULL where the producer does not have it. */
    int (*borrow)(void *object, viking_dlpack_tensor *out);
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out_stream);
} viking_dlpack_exchange;

#endif
