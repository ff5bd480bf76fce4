#define HVD_KERNEL_TABLE kAvx2Kernels
#include "collectives/reduce_kernels.inc"
