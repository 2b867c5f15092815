"""The grid wait itself is written as PTX free of side effects and is deleted."""

from prelude import Int32, asm, cute, dsl_user_op

@dsl_user_op
def wait(*, loc=None, ip=None):
    asm("griddepcontrol.wait;", "", [], None, effects=False, loc=loc, ip=ip)


@cute.kernel
def pure_wait(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    scale = w[i]
    wait()
    y[i] = x[i] * scale


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    pure_wait(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
