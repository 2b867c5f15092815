"""Near miss: an ordinary tensor access behind the pinned wait."""

from prelude import Float32, Int32, cute


@cute.kernel
def tensor_load_pinned(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    stage = cute.arch.alloc_smem(Float32, 256, alignment=16)
    stage[thread] = w[i]
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()
    y[i] = x[i] + stage[thread + 1]


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    tensor_load_pinned(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
