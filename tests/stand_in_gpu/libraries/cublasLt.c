/* libcublasLt.so: descriptions of products, and one way to compute each. */
#include "device.h"

#include <stdlib.h>

enum { CUBLAS_SUCCESS = 0, CUBLAS_EXECUTION_FAILED = 13 };

#define VERSION_SHOWN 130100

size_t cublasLtGetVersion(void) {
    return VERSION_SHOWN;
}

int cublasLtMatmul(void) {
    return stand_in_launch("cublasLtMatmul") ? CUBLAS_EXECUTION_FAILED : CUBLAS_SUCCESS;
}

/* The one result is left as the caller has made it: an algorithm that needs no workspace. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted, (void)results;
    *found = 1;
    return CUBLAS_SUCCESS;
}

static int create(void **description) {
    *description = malloc(16);
    return CUBLAS_SUCCESS;
}

static int destroy(void *description) {
    free(description);
    return CUBLAS_SUCCESS;
}

int cublasLtMatmulDescCreate(void **description) {
    return create(description);
}

int cublasLtMatmulDescDestroy(void *description) {
    return destroy(description);
}

int cublasLtMatmulDescSetAttribute(void) {
    return CUBLAS_SUCCESS;
}

int cublasLtMatmulPreferenceCreate(void **description) {
    return create(description);
}

int cublasLtMatmulPreferenceDestroy(void *description) {
    return destroy(description);
}

int cublasLtMatmulPreferenceSetAttribute(void) {
    return CUBLAS_SUCCESS;
}

int cublasLtMatrixLayoutCreate(void **description) {
    return create(description);
}

int cublasLtMatrixLayoutDestroy(void *description) {
    return destroy(description);
}

int cublasLtMatrixLayoutSetAttribute(void) {
    return CUBLAS_SUCCESS;
}
