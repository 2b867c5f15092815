// Near miss: slots and counts are read after the wait.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) counts_after_wait(const float* x, const float* w, float* y, int* flag, int n) {
  int t = threadIdx.x;
  float scale = w[t];
  cudaGridDependencySynchronize();
  int slot = flag[blockIdx.x], accepted = flag[4096 + blockIdx.x];
  y[blockIdx.x * 128 + t] = x[(slot * 8 + accepted) * 128 + t] * scale;
}
