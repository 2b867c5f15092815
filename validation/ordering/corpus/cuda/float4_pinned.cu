// Near miss: 128-bit coherent loads behind a pinned wait.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) float4_pinned(const float* x, const float* w, float* y, int* flag, int n) {
  __shared__ float stage[256];
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
  stage[t] = w[i];
  __syncthreads();
  cudaGridDependencySynchronize();
  float4 v = reinterpret_cast<const float4*>(x)[i];
  y[i] = v.x + v.y + v.z + v.w + stage[t + 1];
}
