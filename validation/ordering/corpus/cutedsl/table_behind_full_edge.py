"""Near miss: the launch says that a full edge separates the table's writer."""

from prelude import Int32, cute


@cute.kernel
def table_behind_full_edge(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    slot = flag[block]
    cute.arch.griddepcontrol_wait()
    y[i] = x[slot * 128 + thread]


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, flag: cute.Tensor, n: Int32):
    table_behind_full_edge(x, w, y, flag, n).launch(grid=[8, 1, 1], block=[128, 1, 1], use_pdl=True)
