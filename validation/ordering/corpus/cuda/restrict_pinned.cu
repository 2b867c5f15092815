// const __restrict__ lets the compiler use nc loads; a stage in shared memory pins the wait and the activation rises above it.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) restrict_pinned(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y, int* flag, int n) {
  __shared__ float stage[256];
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
  stage[t] = w[i];
  __syncthreads();
  cudaGridDependencySynchronize();
  y[i] = x[i] + stage[t + 1];
}
