// asm volatile with a memory clobber does not help: the freedom to move is in the nc opcode.
#include <cuda_runtime.h>
static __device__ __forceinline__ float fetch(const float* p) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
extern "C" __global__ void __launch_bounds__(128) asm_nc_volatile_clobber(const float* x, const float* w, float* y, int* flag, int n) {
  __shared__ float stage[256];
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
  stage[t] = w[i];
  __syncthreads();
  cudaGridDependencySynchronize();
  y[i] = fetch(x + i) + stage[t + 1];
}
