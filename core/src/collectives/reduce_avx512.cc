#define HVD_KERNEL_TABLE kAvx512Kernels
#include "collectives/reduce_kernels.inc"
