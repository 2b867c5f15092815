"""Device-side building blocks of the kernels: memory access by role, arithmetic, synchronisation and warp-level matrix products."""
