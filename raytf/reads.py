"""Which keys of a config a function may read, told from its code, as one that nothing reads is a mistake. Pure."""

from __future__ import annotations

import dis


def may_read(function, key: str, seen=None) -> bool:
    """Whether a function's code, or that of functions it calls by name, holds `key`, or hands the config on whole."""
    seen = seen if seen is not None else set()
    code = getattr(function, "__code__", None)
    if code is None:  # a callable object, a partial, a builtin: it may read anything
        return True
    if code in seen:
        return False
    seen.add(code)
    codes, held = [code], False
    while codes:
        current = codes.pop()
        held = held or any(key == constant for constant in current.co_consts if isinstance(constant, str))
        codes += [constant for constant in current.co_consts if hasattr(constant, "co_consts")]
    if held:
        return True
    called = [function.__globals__.get(name) for name in code.co_names]
    called += [cell.cell_contents for cell in function.__closure__ or () if cell.cell_contents is not function]
    return any(may_read(f, key, seen) for f in called if hasattr(f, "__code__")) or _unpacks(function)


def _unpacks(function) -> bool:
    """Whether a function passes its config on as keyword arguments, or goes through its items."""
    operations = {i.opname for i in dis.get_instructions(function)}
    return "CALL_FUNCTION_EX" in operations or bool({"items", "values", "keys"} & set(function.__code__.co_names))
