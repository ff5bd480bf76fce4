#define HVD_KERNEL_TABLE kBaselineKernels
#include "collectives/reduce_kernels.inc"
