// Every thread writes its part of the payload and the last one raises the flag with no fence.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) flag_without_fence(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
  y[i] = w[i];
  __syncthreads();
  if (threadIdx.x == 0) *reinterpret_cast<volatile int*>(flag) = 1;
}
