/* libcublas.so: handles, and one product that is really computed.
 *
 * build.py generates all the other routines; each is a launch that computes nothing.
 */
#include "device.h"

#include <stdlib.h>

enum { CUBLAS_SUCCESS = 0, CUBLAS_ALLOCATION_FAILED = 3, CUBLAS_EXECUTION_FAILED = 13 };

struct handle {
    int math_mode;
};

static int status_of(int cuda_error) {
    if (cuda_error == CUDA_OUT_OF_MEMORY)
        return CUBLAS_ALLOCATION_FAILED;
    return cuda_error ? CUBLAS_EXECUTION_FAILED : CUBLAS_SUCCESS;
}

/* The kernel behind the routine `name`; called by every generated function. */
int stand_in_blas_routine(const char *name) {
    return status_of(stand_in_launch(name));
}

/* A handle of its own for each call: PyTorch keeps a workspace for each pair of handle and stream. */
int cublasCreate_v2(struct handle **handle) {
    int error = stand_in_touch_device();
    *handle = error ? NULL : calloc(1, sizeof **handle);
    return status_of(error);
}

int cublasDestroy_v2(struct handle *handle) {
    free(handle);
    return CUBLAS_SUCCESS;
}

int cublasGetMathMode(struct handle *handle, int *mode) {
    *mode = handle->math_mode;
    return CUBLAS_SUCCESS;
}

int cublasSetMathMode(struct handle *handle, int mode) {
    handle->math_mode = mode;
    return CUBLAS_SUCCESS;
}

int cublasGetPointerMode_v2(struct handle *handle, int *mode) {
    (void)handle;
    *mode = 0; /* scalars are on the host */
    return CUBLAS_SUCCESS;
}

int cublasSetPointerMode_v2(struct handle *handle, int mode) {
    (void)handle, (void)mode;
    return CUBLAS_SUCCESS;
}

int cublasSetStream_v2(struct handle *handle, void *stream) {
    (void)handle, (void)stream;
    return CUBLAS_SUCCESS;
}

int cublasSetWorkspace_v2(struct handle *handle, void *workspace, size_t bytes) {
    (void)handle, (void)workspace, (void)bytes;
    return CUBLAS_SUCCESS;
}

/* autotune asks for the sum of some squares to tell whether a device still works, before it blames a configuration. */
int cublasDdot_v2(struct handle *handle, int n, const double *x, int step_x, const double *y, int step_y,
                  double *result) {
    (void)handle;
    int error = stand_in_launch("cublasDdot_v2");
    if (error)
        return status_of(error);
    double sum = 0;
    for (long i = 0; i < n; i++)
        sum += x[i * step_x] * y[i * step_y];
    *result = sum;
    return CUBLAS_SUCCESS;
}
