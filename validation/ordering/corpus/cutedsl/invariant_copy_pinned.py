"""A copy atom declared invariant reads the activation behind a pinned wait."""

from prelude import Float32, Int32, cute


@cute.kernel
def invariant_copy_pinned(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    stage = cute.arch.alloc_smem(Float32, 256, alignment=16)
    stage[thread] = w[i]
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), Float32, num_bits_per_copy=32, invariant=True)
    source = cute.make_tensor(x.iterator + i, cute.make_layout(1))
    taken = cute.make_rmem_tensor(1, Float32)
    cute.copy(atom, source, taken)
    y[i] = taken[0] + stage[thread + 1]


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    invariant_copy_pinned(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
