"""Errors meant for the person at the keyboard.

Every message says what was wrong (file, key or widget), what was found, and what to do about it.
A traceback of any other type is a bug of this pack.
"""


class A3BError(Exception):
    """Base of every error this pack raises on purpose."""


class ConfigError(A3BError):
    """A `config.json` key is missing or has a value the engine cannot run."""


class CheckpointError(A3BError):
    """A checkpoint folder is incomplete, damaged or does not match its configuration."""


class UnsupportedFormatError(CheckpointError):
    """The checkpoint is whole, but stored in a format this engine does not read."""


class PromptError(A3BError):
    """A prompt cannot be rendered: image markers, counts, length, empty text."""


class ImageError(A3BError):
    """A picture has a shape or size that cannot be encoded."""


class SamplingError(A3BError):
    """A sampling parameter is out of its range."""


class GrammarError(A3BError):
    """A JSON schema or regular expression cannot constrain generation."""


class ScriptError(A3BError):
    """An answer could not be read as a comic script and the user chose to stop."""


class MemoryBudgetError(A3BError):
    """The model does not fit the memory it may use."""


class NotLoadedError(A3BError):
    """Weights are not on the device; call `Engine.load_weights` first."""
