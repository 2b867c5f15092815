"""A pure load before the wait (a hint) and one after it become one, the early one."""

from prelude import Float32, Int32, Int64, T, asm, cute, dsl_user_op

@dsl_user_op
def fetch(pointer, *, loc=None, ip=None):
    return Float32(asm("ld.global.f32 $0, [$1];", "=f,l", [Int64(pointer.toint(loc=loc, ip=ip))], T.f32(), effects=False, loc=loc, ip=ip))


@cute.kernel
def pure_load_merged(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    hint = fetch(x.iterator + i)
    cute.arch.griddepcontrol_wait()
    y[i] = fetch(x.iterator + i) + (hint * Float32(0.5))


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    pure_load_merged(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
