"""A relaxed poll orders nothing behind it."""

from prelude import Int32, cute


@cute.kernel
def relaxed_poll_dsl(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    seen = cute.arch.load(flag.iterator, Int32, sem="relaxed", scope="sys")
    while seen == 0:
        seen = cute.arch.load(flag.iterator, Int32, sem="relaxed", scope="sys")
    y[i] = x[i]


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    relaxed_poll_dsl(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1])
