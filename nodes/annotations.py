"""An annotated Python function -> a ComfyUI V1 node class.

    @node("A3BExample", "Example", category="A3B")
    def example(text: Annotated[str, Text(tooltip="What to say.")] = "hello",
                seed: Annotated[int, Int(0, 2**64 - 1, tooltip="...")] = 0,
                ) -> tuple[Annotated[str, Output("STRING", "text", "What came out.")]]:
        '''The docstring becomes the node's description.'''

Types, ranges, tooltips and defaults stand in the signature and nowhere else. The class carries only documented V1
names, so it registers on every ComfyUI since 2024; option keys a host does not know are ignored by it.
Order of the parameters = order of the widgets. Saved workflows store widget values by position: append only.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..a3b_engine.errors import ConfigError

_LONGEST_NUMBER = 40  # characters of a number that came as text


@dataclass(frozen=True, kw_only=True)
class Input(ABC):
    """Common part of all inputs. `optional` inputs may be missing from an API prompt; the Python default is used."""

    tooltip: str
    optional: bool = False
    advanced: bool = False

    @abstractmethod
    def type(self) -> Any:
        """The socket type, or the list of a combo."""

    def options(self) -> dict[str, Any]:
        return {}

    def read(self, value: Any) -> Any:
        """The value as the function wants it. Raises ValueError with what is expected.

        ComfyUI checks what was typed into a widget; what comes over a link from another pack, nobody has checked.
        """
        return value

    def spec(self, default: Any) -> tuple[Any, dict[str, Any]]:
        """The (type, options) pair of V1's INPUT_TYPES."""
        options = {"tooltip": self.tooltip, **self.options()}
        if default is not inspect.Parameter.empty and default is not None:
            options["default"] = default
        if self.advanced:
            options["advanced"] = True
        return self.type(), options


@dataclass(frozen=True)
class Int(Input):
    minimum: int
    maximum: int
    step: int = 1
    control: bool = False  # ComfyUI's "control after generate" for seeds

    def read(self, value: Any) -> int:
        return int(_number(value, self.minimum, self.maximum, whole=True))

    def type(self) -> str:
        return "INT"

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"min": self.minimum, "max": self.maximum, "step": self.step}
        if self.control:
            options["control_after_generate"] = True
        return options


@dataclass(frozen=True)
class Float(Input):
    minimum: float
    maximum: float
    step: float = 0.01

    def read(self, value: Any) -> float:
        return float(_number(value, self.minimum, self.maximum, whole=False))

    def type(self) -> str:
        return "FLOAT"

    def options(self) -> dict[str, Any]:
        return {"min": self.minimum, "max": self.maximum, "step": self.step, "round": self.step}


@dataclass(frozen=True)
class Text(Input):
    """A text widget. Dynamic prompts stay off: they would eat braces and comments of a prompt that holds JSON."""

    multiline: bool = True

    def read(self, value: Any) -> str:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise ValueError("a text is expected")
        # Half a surrogate pair is no text: no tokenizer and no file takes it.
        return value.encode("utf-8", "replace").decode("utf-8") if any("\ud800" <= c <= "\udfff" for c in value) else value

    def type(self) -> str:
        return "STRING"

    def options(self) -> dict[str, Any]:
        return {"multiline": self.multiline, "dynamicPrompts": False}


@dataclass(frozen=True)
class Flag(Input):
    on: str = "on"
    off: str = "off"

    def read(self, value: Any) -> bool:
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            return value.strip().lower() == "true"
        if value in (0, 1):
            return bool(value)
        raise ValueError("true or false is expected")

    def type(self) -> str:
        return "BOOLEAN"

    def options(self) -> dict[str, Any]:
        return {"label_on": self.on, "label_off": self.off}


class _OpenList(list):
    """Names in a drop-down, and unlisted ones that `also` accepts: core asks `value in names`, browsers get the names."""

    def __init__(self, names: Iterable[str], also: Callable[[str], bool]):
        super().__init__(names)
        self._also = also

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or isinstance(value, str) and self._also(value)


@dataclass(frozen=True)
class Choice(Input):
    """A drop-down list; a callable is asked each time ComfyUI reads the node's definition.

    `also` says which unlisted names ComfyUI lets pass. Unlike VALIDATE_INPUTS, a name that is refused here is reported
    for this widget alone: core reports a node's own validation once for each input that it names.
    """

    choices: Sequence[str] | Callable[[], Sequence[str]]
    also: Callable[[str], bool] | None = None

    def read(self, value: Any) -> str:
        if callable(self.choices):  # the node itself knows which other spellings it takes
            if not isinstance(value, str):
                raise ValueError("one of the names in the list is expected")
        elif value not in tuple(self.choices):
            raise ValueError(f"one of {', '.join(self.choices)} is expected")
        return value

    def type(self) -> list[str]:
        names = self.choices() if callable(self.choices) else self.choices
        return list(names) if self.also is None else _OpenList(names, self.also)


@dataclass(frozen=True)
class Socket(Input):
    kind: str

    def type(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Hidden:
    """A value that ComfyUI passes unseen: "PROMPT", "EXTRA_PNGINFO" or "UNIQUE_ID" (the last ends cache sharing)."""

    kind: str


@dataclass(frozen=True)
class Output:
    kind: str
    name: str
    tooltip: str
    is_list: bool = False  # one item per downstream run


def _number(value: Any, minimum: float, maximum: float, *, whole: bool) -> float | int:
    """A finite number within its limits from a number or its text."""
    kind = "a whole number" if whole else "a number"
    expected = ValueError(f"{kind} from {minimum:g} to {maximum} is expected")
    if isinstance(value, str) and len(value) <= _LONGEST_NUMBER:
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                raise expected from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise expected
    if whole and value != int(value) or not minimum <= value <= maximum:
        raise expected
    return value


def _checked(name: str, marker: Input | Hidden, value: Any, default: Any, wanted: Any) -> Any:
    """An input's value, or its default where a saved workflow holds a blank. Raises ConfigError naming the input.

    wanted: the annotated type; what a socket of our own carries has to be of it.
    """
    if isinstance(marker, Socket) and wanted is not Any and not isinstance(value, wanted):
        raise ConfigError(f"{name}: {type(value).__name__} came over the link, but {marker.kind} is expected. Connect it anew")
    if isinstance(marker, Hidden):
        return value
    blank = value is None or isinstance(value, str) and not value.strip() and not isinstance(marker, Text)
    if blank and default is not inspect.Parameter.empty:
        return default
    try:
        return marker.read(value)
    except ValueError as problem:
        raise ConfigError(f"{name}: {repr(value)[:60]} was found, but {problem}") from None


class Shown(tuple):
    """The output values of a node that also shows text; `/history` of the API holds only what is shown."""

    text: str

    def __new__(cls, values: Iterable, text: str) -> Shown:
        shown = super().__new__(cls, values)
        shown.text = text
        return shown


def _as_declared(hint: Any) -> Any:
    """Python 3.10 makes the annotation of a parameter whose default is None optional: Annotated[...] | None."""
    if get_origin(hint) is Union and len(inner := [each for each in get_args(hint) if each is not type(None)]) == 1 and hasattr(inner[0], "__metadata__"):
        return inner[0]
    return hint


def _marker(hint: Any, kinds: tuple, where: str) -> Any:
    found = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, kinds)]
    if len(found) != 1:
        raise TypeError(f"{where} needs exactly one of {', '.join(kind.__name__ for kind in kinds)} in its Annotated[...]")
    return found[0]


def _input_types(markers: dict[str, Input | Hidden], defaults: dict[str, Any]) -> dict[str, dict]:
    groups: dict[str, dict] = {"required": {}, "optional": {}, "hidden": {}}
    for name, marker in markers.items():
        if isinstance(marker, Hidden):
            groups["hidden"][name] = marker.kind
        else:
            groups["optional" if marker.optional else "required"][name] = marker.spec(defaults[name])
    return {group: entries for group, entries in groups.items() if entries or group == "required"}


def _check_order(where: str, markers: dict[str, Input | Hidden], defaults: dict[str, Any]) -> None:
    """ComfyUI lists required inputs first: a signature in any other order would hide the real widget order."""
    groups = [2 if isinstance(marker, Hidden) else int(marker.optional) for marker in markers.values()]
    if groups != sorted(groups):
        raise TypeError(f"{where}: required inputs come first, then optional, then hidden ones")
    for name, marker in markers.items():
        if isinstance(marker, Input) and marker.optional and defaults[name] is inspect.Parameter.empty:
            raise TypeError(f"{where}: optional input {name} needs a default")


def node(
    node_id: str,
    title: str,
    *,
    category: str,
    output_node: bool = False,
    validate: Callable[..., bool | str] | None = None,
    fingerprint: Callable[..., Any] | None = None,
    search: Sequence[str] = (),
) -> Callable[[Callable], type]:
    """Class decorator for functions; see the module's head.

    `validate` gets the inputs it names (core's own checks are off for those) and returns True or an error sentence;
    `fingerprint` gets the inputs it names (links as None) and returns a value that changes when the node has to run again.
    """

    def build(function: Callable) -> type:
        hints = {name: _as_declared(hint) for name, hint in get_type_hints(function, include_extras=True).items()}
        outputs = [_marker(hint, (Output,), f"{node_id}: output {i}") for i, hint in enumerate(get_args(hints["return"]))]
        parameters = inspect.signature(function).parameters
        markers = {name: _marker(hints[name], (Input, Hidden), f"{node_id}.{name}") for name in parameters}
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        kinds = {name: hints[name].__origin__ for name in parameters}
        _check_order(node_id, markers, defaults)

        def execute(self, **inputs: Any) -> tuple | dict:
            values = function(**{name: _checked(name, markers[name], value, defaults[name], kinds[name]) for name, value in inputs.items()})
            if len(values) != len(outputs):
                raise TypeError(f"{node_id} declares {len(outputs)} outputs and returned {len(values)}")
            return {"ui": {"text": (values.text,)}, "result": tuple(values)} if isinstance(values, Shown) else values

        members: dict[str, Any] = {
            "NODE_ID": node_id,
            "TITLE": title,
            "INPUT_TYPES": classmethod(lambda cls: _input_types(markers, defaults)),
            "RETURN_TYPES": tuple(output.kind for output in outputs),
            "RETURN_NAMES": tuple(output.name for output in outputs),
            "OUTPUT_TOOLTIPS": tuple(output.tooltip for output in outputs),
            "OUTPUT_IS_LIST": tuple(output.is_list for output in outputs),
            "OUTPUT_NODE": output_node,
            "FUNCTION": "execute",
            "CATEGORY": category,
            "DESCRIPTION": inspect.cleandoc(function.__doc__ or ""),
            "SEARCH_ALIASES": list(search),
            "execute": execute,
            "MARKERS": markers,  # for the pack's own tools: what each input is, without asking the host for choices
            "DEFAULTS": defaults,
            "__doc__": function.__doc__,
            "__module__": function.__module__,
        }
        if validate is not None:
            members["VALIDATE_INPUTS"] = staticmethod(validate)
        if fingerprint is not None:
            asked = inspect.signature(fingerprint).parameters.values()
            wanted = {parameter.name: None if parameter.default is parameter.empty else parameter.default for parameter in asked}
            # ComfyUI passes every input that the prompt has; one left out of an API prompt is no link.
            members["IS_CHANGED"] = staticmethod(lambda **inputs: fingerprint(*(inputs.get(name, absent) for name, absent in wanted.items())))
        return type(node_id, (), members)

    return build
