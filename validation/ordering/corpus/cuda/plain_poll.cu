// A flag polled by a plain load: hoisted out of the loop on Hopper, deleted with its loop on Blackwell.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) plain_poll(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
  while (flag[0] == 0) {
  }
  y[i] = w[i];
}
