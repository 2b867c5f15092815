// Blocks with nothing to do return before the wait.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) idle_blocks_return(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
  if (blockIdx.x * 128 >= n) return;
  cudaGridDependencySynchronize();
  y[i] = x[i];
}
