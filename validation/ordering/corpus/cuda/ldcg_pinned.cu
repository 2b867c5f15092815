// Near miss: __ldcg instead of __ldg.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) ldcg_pinned(const float* x, const float* w, float* y, int* flag, int n) {
  __shared__ float stage[256];
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
  stage[t] = w[i];
  __syncthreads();
  cudaGridDependencySynchronize();
  y[i] = __ldcg(x + i) + stage[t + 1];
}
