"""A pure load of an activation in a loop whose head waits: not lifted by this compiler, only the lint sees the danger. With n = 0
nobody waits."""

from prelude import Float32, Int32, Int64, T, asm, cute, cutlass, dsl_user_op

@dsl_user_op
def fetch(pointer, *, loc=None, ip=None):
    return Float32(asm("ld.global.f32 $0, [$1];", "=f,l", [Int64(pointer.toint(loc=loc, ip=ip))], T.f32(), effects=False, loc=loc, ip=ip))


@cute.kernel
def pure_load_loop(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    total = Float32(0.0)
    for j in cutlass.range(n, unroll=1):
        cute.arch.griddepcontrol_wait()
        total = total + fetch(x.iterator + i)
    y[i] = total


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    pure_load_loop(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
