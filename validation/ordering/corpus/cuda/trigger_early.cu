// Near miss: dependents are released at once; they wait for completion before they touch anything.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) trigger_early(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
  cudaTriggerProgrammaticLaunchCompletion();
  float scale = w[i];
  cudaGridDependencySynchronize();
  y[i] = x[i] * scale;
}
