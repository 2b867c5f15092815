// Near miss: one thread waits, __syncthreads hands the wait to the block.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) handover_by_syncthreads(const float* x, const float* w, float* y, int* flag, int n) {
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
  float scale = w[i];
  if (t == 0) cudaGridDependencySynchronize();
  __syncthreads();
  y[i] = x[i] * scale;
}
