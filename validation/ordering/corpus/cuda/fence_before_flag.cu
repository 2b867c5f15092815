// Near miss: payload, fence, barrier, fence, flag.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) fence_before_flag(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
  y[i] = w[i];
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    *reinterpret_cast<volatile int*>(flag) = 1;
  }
}
