"""An invariant load of an activation behind a pinned wait."""

from prelude import Float32, Int32, T, cute, dsl_user_op, llvm

@dsl_user_op
def constant(pointer, *, loc=None, ip=None):
    return Float32(llvm.load(T.f32(), pointer.to_llvm_ptr(loc=loc, ip=ip), invariant=True, alignment=4, loc=loc, ip=ip))


@cute.kernel
def invariant_pinned(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    stage = cute.arch.alloc_smem(Float32, 256, alignment=16)
    stage[thread] = w[i]
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()
    y[i] = constant(x.iterator + i) + stage[thread + 1]


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    invariant_pinned(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
