"""Near miss: the same wait declared side-effecting."""

from prelude import Int32, asm, cute, dsl_user_op

@dsl_user_op
def wait(*, loc=None, ip=None):
    asm("griddepcontrol.wait;", "~{memory}", [], None, effects=True, loc=loc, ip=ip)


@cute.kernel
def effect_wait(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    scale = w[i]
    wait()
    y[i] = x[i] * scale


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    effect_wait(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
