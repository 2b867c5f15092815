// Near miss: no qualifier, so a coherent load: it stays behind the pinned wait.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) coherent_pinned(const float* x, const float* w, float* y, int* flag, int n) {
  __shared__ float stage[256];
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
  stage[t] = w[i];
  __syncthreads();
  cudaGridDependencySynchronize();
  y[i] = x[i] + stage[t + 1];
}
