// Near miss: volatile poll, then __threadfence, then the payload.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) volatile_poll_with_fence(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
  while (*reinterpret_cast<volatile int*>(flag) == 0) {
  }
  __threadfence();
  y[i] = x[i];
}
