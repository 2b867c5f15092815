"""Strict JSON for the suite's types: what is written reads back equal, NaN and infinities included, and no other program chokes on it.

Python's `json` writes a bare `NaN`, which is not JSON. Here a non-finite float becomes `{"$float": "nan" | "inf" | "-inf"}`. Every other
float is written with the shortest digits that read back to the same bits.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from validation.core.types import HarnessError

_FLOAT_TAG = "$float"
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def plain(value: Any, where: str = "value") -> Any:
    """Turn `value` into what JSON can hold: mappings with text keys, lists, text, bool, int, finite float or the tagged non-finite form.

    Tuples become lists; NumPy and torch scalars become Python numbers. Anything else is a HarnessError that names the place.
    """
    if value is None or isinstance(value, (bool, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return plain(value.value, where)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), f"{where}.{f.name}") for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return _plain_float(float(value))
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return plain(value.item(), where)
    raise HarnessError(f"{where}: got a {type(value).__name__}, needs a JSON value; convert it before it is recorded")


def _key(key: Any, where: str) -> str:
    if isinstance(key, enum.Enum):
        key = key.value
    if not isinstance(key, str):
        raise HarnessError(f"{where}: got the key {key!r}, needs text keys; convert it before it is recorded")
    if key == _FLOAT_TAG:
        raise HarnessError(f"{where}: got the key {key!r}, needs any other; it marks non-finite numbers")
    return key


def _plain_float(value: float) -> Any:
    if math.isfinite(value):
        return value
    return {_FLOAT_TAG: "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")}


def _restore_object(value: dict[str, Any]) -> Any:
    """The inverse of `plain` at one JSON object: a tagged float becomes a float again."""
    if _FLOAT_TAG not in value:
        return value
    text = value[_FLOAT_TAG]
    if len(value) != 1 or text not in _NON_FINITE:
        raise ValueError(f"{_FLOAT_TAG} holds {value!r}, needs one of {sorted(_NON_FINITE)}")
    return _NON_FINITE[text]


def dumps(value: Any, *, sort_keys: bool = False, indent: int | None = None) -> str:
    """Canonical text of any of the suite's types: ASCII, no spaces, no bare NaN."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=True, sort_keys=sort_keys, separators=separators, indent=indent)


def loads(text: str | bytes) -> Any:
    """Parse strict JSON (a bare NaN is an error) and restore tagged floats. Raises HarnessError."""
    try:
        return _STRICT.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, TypeError, RecursionError) as error:
        raise HarnessError(f"JSON: got {_shorten(text)}, needs strict JSON; {error}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"the bare constant {name} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, object_hook=_restore_object)


def _shorten(text: str | bytes) -> str:
    return repr(text if len(text) <= 60 else text[:60]) + ("" if len(text) <= 60 else "...")


def decode(kind: Any, value: Any, where: str = "value") -> Any:
    """Build `kind` (a dataclass of this suite, or any annotation used in one) from a restored JSON value. Raises HarnessError."""
    return _decoder(kind)(value, where)


Where = str | tuple[Any, str]  # a place in words, or (the place around it, what is added): joined only when an error needs it
Decoder = Callable[[Any, Any], Any]


def _place(where: Where) -> str:
    return where if isinstance(where, str) else _place(where[0]) + where[1]


@functools.cache
def _decoder(kind: Any) -> Decoder:
    """One function per annotation, made once: a run can hold many thousand records."""
    if kind is Any:
        return lambda value, where: value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass_decoder(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum_decoder(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = _decoder(next(a for a in arguments if a is not type(None)))
        return lambda value, where: None if value is None else inner(value, where)
    if origin is tuple:
        return _tuple_decoder(arguments[0])
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_decoder(arguments[1])
    return _scalar_decoder(kind)


def _enum_decoder(kind: type[enum.Enum]) -> Decoder:
    def read(value: Any, where: Where) -> Any:
        try:
            return kind(value)
        except ValueError as error:
            raise HarnessError(f"{_place(where)}: got {value!r}, needs one of {[item.value for item in kind]}") from error

    return read


def _tuple_decoder(item_kind: Any) -> Decoder:
    item_decoder = _decoder(item_kind)

    def read(value: Any, where: Where) -> Any:
        _expect(value, list, where)
        return tuple(item_decoder(item, where) for item in value)

    return read


def _mapping_decoder(item_kind: Any) -> Decoder:
    if item_kind is Any:
        return _scalar_decoder(dict)
    item_decoder = _decoder(item_kind)

    def read(value: Any, where: Where) -> Any:
        _expect(value, dict, where)
        return {key: item_decoder(item, where) for key, item in value.items()}

    return read


def _scalar_decoder(kind: type) -> Decoder:
    def read(value: Any, where: Where) -> Any:
        if kind is float and type(value) is int:
            return float(value)
        _expect(value, kind, where)
        return value

    return read


def _dataclass_decoder(kind: Any) -> Decoder:
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    places = {name: f".{name}" for name in names}
    # A run can hold a hundred thousand records: a field whose JSON type is exactly its own needs no call.
    exact = {name: hints[name] if hints[name] in (str, int, float, bool) else None for name in names}
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    decoders = {name: _decoder(hints[name]) for name in names}

    def read(value: Any, where: Where) -> Any:
        if type(value) is not dict or not required <= value.keys() <= decoders.keys():
            _expect(value, dict, where)
            unknown, missing = sorted(value.keys() - decoders.keys()), sorted(required - value.keys())
            raise HarnessError(f"{_place(where)}: got unknown fields {unknown} and lacks {missing}, needs the fields of {kind.__name__}")
        fields = {name: item if type(item) is exact[name] else decoders[name](item, (where, places[name])) for name, item in value.items()}
        return kind(**fields)

    return read


def _expect(value: Any, kind: type, where: Where) -> None:
    if type(value) is not kind:  # JSON gives exact types; bool must not pass for int
        raise HarnessError(f"{_place(where)}: got {type(value).__name__} {_shorten(str(value))}, needs {kind.__name__}")
