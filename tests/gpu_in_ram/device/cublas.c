// cuBLAS: handles, and products that are nothing. Its declarations come with no package that is needed here.
#include "device.h"
#include <stdlib.h>
#include <string.h>

static int make(void **handle) {
    *handle = calloc(1, 64);
    return 0;
}

static int destroy(void *handle) {
    free(handle);
    return 0;
}

EXPORT int cublasCreate_v2(void **handle) { return make(handle); }
EXPORT int cublasDestroy_v2(void *handle) { return destroy(handle); }
EXPORT int cublasLtMatmulDescCreate(void **handle) { return make(handle); } // the others say what it is for
EXPORT int cublasLtMatmulDescDestroy(void *handle) { return destroy(handle); }
EXPORT int cublasLtMatmulPreferenceCreate(void **handle) { return make(handle); }
EXPORT int cublasLtMatmulPreferenceDestroy(void *handle) { return destroy(handle); }
EXPORT int cublasLtMatrixLayoutDestroy(void *handle) { return destroy(handle); }
EXPORT int cublasLtMatrixLayoutCreate(void **handle) { return make(handle); }

EXPORT int cublasGetMathMode(void *handle, int *mode) { return (void)handle, *mode = 0; }
EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) { return (void)handle, *mode = 0; }
EXPORT size_t cublasLtGetVersion(void) { return 130100; }

// One algorithm, which works without a workspace.
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                          void *preference, int wanted, void *results, int *found) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted;
    memset(results, 0, 64);
    *found = 1;
    return 0;
}
