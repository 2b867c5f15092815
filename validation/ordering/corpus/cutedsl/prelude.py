"""What every CuTe DSL case shares: an inline-PTX helper that spells its memory effect, fake arguments, and the launch."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.cutlass_dsl import T, dsl_user_op

__all__ = ["Float32", "Int32", "Int64", "T", "arguments", "asm", "cute", "cutlass", "dsl_user_op", "llvm"]


def asm(code, constraints, operands, result, *, effects, loc, ip):
    """One inline PTX statement. `effects` False tells the compiler that it neither reads nor writes memory."""
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    return llvm.inline_asm(
        result, values, code, constraints, has_side_effects=effects, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )


def arguments():
    """x, w, y as 4096 floats, 64 flags, n = 1: static layouts, so each tensor is one pointer in the parameter block."""
    tensors = [make_fake_compact_tensor(Float32, (4096,), stride_order=(0,)) for _ in range(3)]
    return [*tensors, make_fake_compact_tensor(Int32, (64,), stride_order=(0,)), Int32(1)]
