"""The activation is prefetched into L2 before the wait."""

from prelude import Int32, Int64, asm, cute, dsl_user_op

@dsl_user_op
def prefetch(pointer, *, loc=None, ip=None):
    asm("prefetch.global.L2 [$0];", "l,~{memory}", [Int64(pointer.toint(loc=loc, ip=ip))], None, effects=True, loc=loc, ip=ip)


@cute.kernel
def prefetch_input_dsl(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    prefetch(x.iterator + i)
    cute.arch.griddepcontrol_wait()
    y[i] = x[i]


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    prefetch_input_dsl(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
