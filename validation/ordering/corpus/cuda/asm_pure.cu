// Plain asm is a pure function to NVVM: where one branch waits in the middle, the load may be lifted above it.
#include <cuda_runtime.h>
static __device__ __forceinline__ float fetch(const float* p) {
  float v;
  asm("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
extern "C" __global__ void __launch_bounds__(128) asm_pure(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
  float sum = 0.f;
  int j = 0;
  #pragma unroll 1
  do {
    cudaGridDependencySynchronize();
    sum += fetch(x + i) * w[i + j];
  } while (++j < n);
  y[i] = sum;
}
