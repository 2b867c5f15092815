"""Near miss: the weight is read before the wait, the activation after."""

from prelude import Int32, cute


@cute.kernel
def weight_before_wait(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    scale = w[i]
    cute.arch.griddepcontrol_wait()
    y[i] = x[i] * scale


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    weight_before_wait(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
