// __ldg of an activation in a loop whose head waits.
#include <cuda_runtime.h>
static __device__ __forceinline__ float stage(int j) {
  return static_cast<float>(j & 7);
}
extern "C" __global__ void __launch_bounds__(128) ldg_loop(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
  float sum = w[i];
  int j = 0;
  #pragma unroll 1
  do {
    cudaGridDependencySynchronize();
    sum += __ldg(x + i) * stage(j);
  } while (++j < n);
  y[i] = sum;
}
