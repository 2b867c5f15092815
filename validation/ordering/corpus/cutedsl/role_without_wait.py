"""The first warp waits, the others read the scale factors without."""

from prelude import Float32, Int32, cute


@cute.kernel
def role_without_wait(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if thread < 32:
        cute.arch.griddepcontrol_wait()
        y[i] = x[i] * w[i]
    else:
        y[i] = x[i] + Float32(1.0)


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    role_without_wait(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
