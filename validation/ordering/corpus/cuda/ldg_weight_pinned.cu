// Near miss: __ldg rises above the wait, and reads a weight.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) ldg_weight_pinned(const float* x, const float* w, float* y, int* flag, int n) {
  __shared__ float stage[256];
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
  stage[t] = w[i];
  __syncthreads();
  cudaGridDependencySynchronize();
  y[i] = x[i] * __ldg(w + 4096 + i) + stage[t + 1];
}
