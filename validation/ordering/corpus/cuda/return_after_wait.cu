// Near miss: idle blocks return after the wait.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) return_after_wait(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
  cudaGridDependencySynchronize();
  if (blockIdx.x * 128 >= n) return;
  y[i] = x[i];
}
