// Two pure asm loads of the same word around the wait become one, the earlier.
#include <cuda_runtime.h>
static __device__ __forceinline__ float fetch(const float* p) {
  float v;
  asm("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
extern "C" __global__ void __launch_bounds__(128) asm_pure_merged(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
  float hint = fetch(x + i);
  cudaGridDependencySynchronize();
  y[i] = fetch(x + i) + (hint > 0.f ? 1.f : 0.f);
}
