// Near miss: pure asm, and it reads a weight.
#include <cuda_runtime.h>
static __device__ __forceinline__ float fetch(const float* p) {
  float v;
  asm("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
extern "C" __global__ void __launch_bounds__(128) asm_pure_weight(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
  float sum = 0.f;
  int j = 0;
  #pragma unroll 1
  do {
    cudaGridDependencySynchronize();
    sum += fetch(w + i) * x[i + j];
  } while (++j < n);
  y[i] = sum;
}
