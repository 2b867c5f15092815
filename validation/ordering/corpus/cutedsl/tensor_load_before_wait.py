"""The activation is read before the wait in the source."""

from prelude import Int32, cute


@cute.kernel
def tensor_load_before_wait(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    value = x[i]
    cute.arch.griddepcontrol_wait()
    y[i] = value


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    tensor_load_before_wait(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
