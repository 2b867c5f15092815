"""A flag polled by an ordinary load: hoisted, a self-branch is left."""

from prelude import Float32, Int32, cute


@cute.kernel
def plain_poll_dsl(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    seen = flag.iterator.load()
    while seen == 0:
        seen = flag.iterator.load()
    y[i] = w[i] * Float32(seen)


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    plain_poll_dsl(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1])
