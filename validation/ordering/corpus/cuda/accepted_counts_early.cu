// Accepted counts and slots are read before the wait to compute addresses.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) accepted_counts_early(const float* x, const float* w, float* y, int* flag, int n) {
  int t = threadIdx.x;
  int slot = flag[blockIdx.x], accepted = flag[4096 + blockIdx.x];
  cudaGridDependencySynchronize();
  y[blockIdx.x * 128 + t] = x[(slot * 8 + accepted) * 128 + t];
}
