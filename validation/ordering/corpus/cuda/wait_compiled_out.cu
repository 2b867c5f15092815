// The wait stands inside an architecture check and is absent from the Hopper build.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) wait_compiled_out(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
  #if __CUDA_ARCH__ >= 1000
  cudaGridDependencySynchronize();
  #endif
  y[i] = x[i] * w[i];
}
