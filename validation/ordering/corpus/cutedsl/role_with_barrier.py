"""Near miss: the first warp waits, a CTA barrier hands it over."""

from prelude import Int32, cute


@cute.kernel
def role_with_barrier(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if thread < 32:
        cute.arch.griddepcontrol_wait()
    cute.arch.sync_threads()
    y[i] = x[i] * w[i]


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    role_with_barrier(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
