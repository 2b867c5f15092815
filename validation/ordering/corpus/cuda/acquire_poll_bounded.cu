// Near miss: acquire poll with a bound that traps, then the payload.
#include <cuda_runtime.h>
extern "C" __global__ void __launch_bounds__(128) acquire_poll_bounded(const float* x, const float* w, float* y, int* flag, int n) {
  int i = blockIdx.x * 128 + threadIdx.x, seen = 0;
  for (int tries = 0; seen == 0; ++tries) {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    if (tries > 1000000) __trap();
  }
  y[i] = x[i];
}
