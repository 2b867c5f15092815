// Near miss: a loop over weights before the wait, shared memory between.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) weight_loop_early(const float* x, const float* w, float* y, int* flag, int n) {
  __shared__ float stage[128];
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
  float sum = 0.f;
  for (int j = 0; j < n; ++j) sum += w[i + 4096 * j];
  stage[t] = sum;
  __syncthreads();
  cudaGridDependencySynchronize();
  y[i] = x[i] * stage[127 - t];
}
