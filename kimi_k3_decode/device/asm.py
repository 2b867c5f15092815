"""One door for inline PTX. Every call states whether it touches memory; nothing here is ever declared free of side effects.

Why: inline PTX declared free of side effects may be merged, hoisted above a wait or deleted by the compiler. Arithmetic that must not be
pinned goes through the compiler's own operations instead (device/math.py).
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

LETTERS = {Float32: "f", Int32: "r", Uint32: "r", Int64: "l"}


def _types() -> dict[Any, Any]:
    return {Float32: T.f32(), Int32: T.i32(), Uint32: T.i32(), Int64: T.i64()}


@dsl_user_op
def emit(code: str, outputs: tuple[Any, ...], operands: tuple[Any, ...], *, memory: bool, loc: Any = None, ip: Any = None) -> Any:
    """Emit one PTX statement with side effects.

    `outputs` are DSL scalar types, `operands` DSL scalars; `$0..` number outputs first. `memory` adds the clobber: true for everything
    that reads or writes memory or orders accesses. Returns None, one scalar or a tuple of scalars.
    """
    constraints = [f"={LETTERS[kind]}" for kind in outputs] + [LETTERS[type(operand)] for operand in operands]
    if memory:
        constraints.append("~{memory}")
    kinds = _types()
    result_types = [kinds[kind] for kind in outputs]
    result = None
    if len(outputs) == 1:
        result = result_types[0]
    elif outputs:
        result = llvm.StructType.get_literal(result_types)
    value = llvm.inline_asm(
        result,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        code,
        ",".join(constraints),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not outputs:
        return None
    if len(outputs) == 1:
        return outputs[0](value)
    return tuple(
        kind(llvm.extractvalue(t, value, [i], loc=loc, ip=ip)) for i, (kind, t) in enumerate(zip(outputs, result_types, strict=True))
    )
