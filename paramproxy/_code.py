"""What a function's bytecode says about the names it uses.

Remembered by code object, since every call of a region asks again.
"""

from __future__ import annotations

import dis
import functools
import types


__all__ = ["assigned_names", "attribute_names", "global_names", "operation_at"]

_remembered = functools.lru_cache(maxsize=4096)


@_remembered
def assigned_names(code: types.CodeType) -> frozenset[str]:
    """The outer variables that this code, or a function inside it, assigns."""
    names = _arguments(code, ("STORE_DEREF", "DELETE_DEREF")) & set(code.co_freevars)
    return names.union(*(assigned_names(part) for part in _inner(code)))


@_remembered
def global_names(code: types.CodeType) -> frozenset[str]:
    """The global variables that this code, or a function inside it, reads."""
    names = _arguments(code, ("LOAD_GLOBAL", "LOAD_NAME"))
    return names.union(*(global_names(part) for part in _inner(code)))


def attribute_names(code: types.CodeType, owner: type) -> set[str]:
    """The attributes that a method names, and those that its owner's other methods do.

    Of the other methods only those that it names itself, and so on.
    """
    names: set[str] = set()
    waiting = [code]
    while waiting:
        for name in _own_names(waiting.pop()) - names:
            names.add(name)
            method = getattr(owner, name, None)
            if isinstance(method, types.FunctionType):
                waiting.append(method.__code__)
    return names


@_remembered
def _own_names(code: types.CodeType) -> frozenset[str]:
    return frozenset(code.co_names).union(*(_own_names(part) for part in _inner(code)))


@_remembered
def operation_at(code: types.CodeType, offset: int) -> str:
    """What Paddle calls the operator of the instruction there; empty if there is none."""
    step = next((s for s in dis.get_instructions(code) if s.offset == offset), None)
    if step is None:
        return ""
    symbol = step.argrepr.rstrip("=") if step.opname == "BINARY_OP" else ""
    return _SYMBOLS.get(symbol) or _OPCODES.get(step.opname.partition("_")[2], "")


_SYMBOLS = {
    "+": "add",
    "-": "subtract",
    "*": "multiply",
    "/": "divide",
    "//": "floor_divide",
    "%": "remainder",
    "@": "matmul",
    "**": "pow",
    "[]": "getitem",
}
# Of Python 3.10, `BINARY_` or `INPLACE_` before each, and of the unary ones.
_OPCODES = {
    "ADD": "add",
    "SUBTRACT": "subtract",
    "MULTIPLY": "multiply",
    "TRUE_DIVIDE": "divide",
    "FLOOR_DIVIDE": "floor_divide",
    "MODULO": "remainder",
    "MATRIX_MULTIPLY": "matmul",
    "POWER": "pow",
    "SUBSCR": "getitem",
    "NEGATIVE": "neg",
}


def _arguments(code: types.CodeType, operations: tuple[str, ...]) -> frozenset[str]:
    steps = dis.get_instructions(code)
    return frozenset(step.argval for step in steps if step.opname in operations)


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [const for const in code.co_consts if isinstance(const, types.CodeType)]
