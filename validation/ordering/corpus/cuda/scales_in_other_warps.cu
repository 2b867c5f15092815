// The first warp waits before it loads the tile, the others read the scale factors at once.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) scales_in_other_warps(const float* x, const float* w, float* y, int* flag, int n) {
  int t = threadIdx.x;
  if (t < 32) {
    cudaGridDependencySynchronize();
    y[t] = x[t] * w[t];
  } else {
    y[t] = x[4096 + t] + 1.f;
  }
}
