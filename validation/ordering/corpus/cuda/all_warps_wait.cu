// Near miss: every warp role waits for itself.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) all_warps_wait(const float* x, const float* w, float* y, int* flag, int n) {
  int t = threadIdx.x;
  if (t < 32) {
    cudaGridDependencySynchronize();
    y[t] = x[t] * w[t];
  } else {
    float scale = w[t];
    cudaGridDependencySynchronize();
    y[t] = x[4096 + t] * scale;
  }
}
