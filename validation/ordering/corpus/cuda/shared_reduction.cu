// Near miss: a block reduction with barriers between wait and store.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) shared_reduction(const float* x, const float* w, float* y, int* flag, int n) {
  __shared__ float sums[4];
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
  float v = w[i];
  cudaGridDependencySynchronize();
  v *= x[i];
  for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(~0u, v, step);
  if (t % 32 == 0) sums[t / 32] = v;
  __syncthreads();
  if (t == 0) y[blockIdx.x] = sums[0] + sums[1] + sums[2] + sums[3];
}
