"""Near miss: inline PTX with side effects and a clobber behind the pinned wait."""

from prelude import Float32, Int32, Int64, T, asm, cute, dsl_user_op

@dsl_user_op
def fetch(pointer, *, loc=None, ip=None):
    return Float32(asm("ld.global.f32 $0, [$1];", "=f,l,~{memory}", [Int64(pointer.toint(loc=loc, ip=ip))], T.f32(), effects=True, loc=loc, ip=ip))


@cute.kernel
def effect_load_pinned(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    stage = cute.arch.alloc_smem(Float32, 256, alignment=16)
    stage[thread] = w[i]
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()
    y[i] = fetch(x.iterator + i) + stage[thread + 1]


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    effect_load_pinned(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
