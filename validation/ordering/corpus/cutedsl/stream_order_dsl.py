"""Near miss: no wait, ordinary launch."""

from prelude import Int32, cute


@cute.kernel
def stream_order_dsl(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    y[i] = x[i] * w[i]


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    stream_order_dsl(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1])
