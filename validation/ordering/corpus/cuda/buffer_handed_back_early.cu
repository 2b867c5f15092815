// The payload is read by __ldg, then the credit is returned: the load, needed by some threads only, sinks below the release.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) buffer_handed_back_early(const float* x, const float* w, float* y, int* flag, int n) {
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
  cudaGridDependencySynchronize();
  float v = __ldg(x + i);
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(n) : "memory");
  if (t == n) y[i] = v;
}
