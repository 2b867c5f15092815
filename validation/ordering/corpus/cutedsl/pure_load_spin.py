"""The bug class itself: the payload load is declared free of side effects and is lifted above the acquire poll."""

from prelude import Float32, Int32, Int64, T, asm, cute, cutlass, dsl_user_op

@dsl_user_op
def fetch(pointer, *, loc=None, ip=None):
    return Float32(asm("ld.global.f32 $0, [$1];", "=f,l", [Int64(pointer.toint(loc=loc, ip=ip))], T.f32(), effects=False, loc=loc, ip=ip))


@cute.kernel
def pure_load_spin(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    total = Float32(0.0)
    for j in cutlass.range(n, unroll=1):
        seen = cute.arch.load(flag.iterator, Int32, sem="acquire", scope="gpu")
        while seen == 0:
            seen = cute.arch.load(flag.iterator, Int32, sem="acquire", scope="gpu")
        total = total + fetch(x.iterator + i)
    y[i] = total


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    pure_load_spin(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1])
