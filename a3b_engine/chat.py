"""From a prompt to token ids through the checkpoint's own chat template.

The rule that matters: a control token in the result was written by the template, never by a text inside it. Before
rendering, each control literal in a foreign text is broken by a sentinel (a noncharacter used nowhere in the input);
after rendering, control literals are looked for with the sentinels still in place, and what lies between is encoded as
plain text with the sentinels taken out.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Sequence

from .errors import CheckpointError, PromptError
from .prompt import Prompt, build_messages
from .tokenizer import MAX_CONFIG_BYTES, Tokenizer, read_json, read_text

if TYPE_CHECKING:
    from .config import ModelConfig

# Published templates have 4 to 60 thousand characters; compiling takes time in proportion.
MAX_TEMPLATE_CHARACTERS = 128 * 1024

# Unicode noncharacters first; a text that holds them all falls back to the private-use plane 15.
_SENTINELS = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))


@dataclass(frozen=True)
class ImageSpan:
    """`length` image tokens from `start` on stand for image `image_index` (0-based, order of the input list)."""

    start: int
    length: int
    image_index: int


@dataclass(frozen=True)
class Rendered:
    """text: the exact template string, one image placeholder a picture. token_ids: the same with placeholders expanded."""

    text: str
    token_ids: list[int]
    image_spans: list[ImageSpan]

    @property
    def opens_thinking(self) -> bool:
        """True where the answer starts inside a thinking block: it runs up to the first `</think>`."""
        return self.text.rstrip().endswith("<think>")


class ChatTemplate:
    """One compiled chat template. It comes with the checkpoint and is treated as hostile (see `sandbox`)."""

    def __init__(self, source: str, name: str = "chat template") -> None:
        """source: jinja2 text. name: the file it stands in, for messages. Raises CheckpointError if it does not compile."""
        from .sandbox import BoundedEnvironment

        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise CheckpointError(f"{name} has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are read.")
        self.source, self.name = source, name
        self._lock = threading.Lock()
        try:
            self._environment = BoundedEnvironment()
            self._template = self._environment.from_string(source)
        except Exception as error:  # a hostile text can fail in the lexer, the parser or Python's own compiler
            raise CheckpointError(
                f"{name} cannot be compiled: {_reason(error)}. Restore the published file."
            ) from error

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate:
        """Template of a checkpoint: `chat_template.jinja`, else `chat_template.json`, else in `tokenizer_config.json`.

        The JSON forms are a string, or a list of {"name", "template"} of which "default" is taken.
        """
        folder = Path(folder)
        path = folder / "chat_template.jinja"
        if path.is_file():
            return cls(read_text(path, 4 * MAX_TEMPLATE_CHARACTERS), str(path))
        for path in (folder / "chat_template.json", folder / "tokenizer_config.json"):
            if path.is_file():
                value = read_json(path, MAX_CONFIG_BYTES).get("chat_template")
                if value is not None:
                    return cls(_default_template(value, path), f"{path} (chat_template)")
        raise CheckpointError(
            f"{folder} has no chat template: chat_template.jinja, chat_template.json or a chat_template key in "
            "tokenizer_config.json. Copy it from the original repository."
        )

    def render(self, messages: Sequence[dict[str, Any]], *, enable_thinking: bool, **variables: Any) -> str:
        """The template's text for `messages`, with the opening of the assistant turn.

        Raises PromptError with the template's own words where it refuses the conversation, CheckpointError where it fails
        or exceeds its limits.
        """
        from .sandbox import RaisedByTemplate

        given = {"messages": list(messages), "add_generation_prompt": True, "enable_thinking": enable_thinking}
        with self._lock:
            self._environment.start(sum(map(len, texts_of(messages))))
            try:
                return self._environment.bounded(self._template.render(**given, **variables))
            except RaisedByTemplate as error:
                raise PromptError(f"{self.name} refuses this conversation: {error}") from error
            except Exception as error:
                raise CheckpointError(f"{self.name} failed: {_reason(error)}. Restore the published file.") from error


def render_chat(
    prompt: Prompt,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    config: ModelConfig,
    image_token_counts: Sequence[int],
    thinking: bool = False,
) -> Rendered:
    """Token ids of `prompt`, ready for the model.

    image_token_counts: tokens of each image of `prompt.images`. thinking: passed to the template as `enable_thinking`.
    Raises PromptError before any model work when markers, images and counts do not agree.
    """
    if len(image_token_counts) != len(prompt.images):
        raise PromptError(
            f"The prompt has {len(prompt.images)} images, but {len(image_token_counts)} token counts came."
        )
    messages = build_messages(prompt)
    sentinel = _free_sentinel(chain(texts_of(messages), (template.source,)))
    broken = _map_texts(messages, lambda text: tokenizer.break_literals(text, sentinel))
    rendered = template.render(broken, enable_thinking=thinking)

    placed = [item["index"] for turn in messages for item in _items(turn) if item["type"] == "image"]
    pieces = _join_plain(tokenizer.split(rendered), sentinel)
    n_places = pieces.count(config.image_token_id)
    if n_places != len(placed):
        raise CheckpointError(
            f"{template.name} wrote {n_places} image placeholders for {len(placed)} images. "
            "Use the chat template of the vision model's original repository."
        )
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for piece in pieces:
        if isinstance(piece, str):
            ids.extend(tokenizer.encode_plain(piece))
        elif piece == config.image_token_id:
            index = placed[len(spans)]
            spans.append(ImageSpan(len(ids), image_token_counts[index], index))
            ids.extend([piece] * image_token_counts[index])
        else:
            ids.append(piece)
    return Rendered(rendered.replace(sentinel, ""), ids, spans)


def texts_of(messages: Iterable[dict[str, Any]]) -> Iterable[str]:
    """Every foreign text in `messages`."""
    for turn in messages:
        for key in ("content", "reasoning_content"):
            if isinstance(turn.get(key), str):
                yield turn[key]
        yield from (item["text"] for item in _items(turn) if item["type"] == "text")


def _items(turn: dict[str, Any]) -> list[dict[str, Any]]:
    return turn["content"] if isinstance(turn["content"], list) else []


def _map_texts(messages: Sequence[dict[str, Any]], change: Any) -> list[dict[str, Any]]:
    """A copy of `messages` for the template: foreign texts changed, image items without our index."""
    result = []
    for turn in messages:
        turn = dict(turn)
        for key in ("content", "reasoning_content"):
            if isinstance(turn.get(key), str):
                turn[key] = change(turn[key])
        if isinstance(turn["content"], list):
            turn["content"] = [
                {"type": "text", "text": change(item["text"])} if item["type"] == "text" else {"type": "image"}
                for item in turn["content"]
            ]
        result.append(turn)
    return result


def _free_sentinel(texts: Iterable[str]) -> str:
    used = set().union(*map(set, texts))
    for code in chain(*_SENTINELS):
        if chr(code) not in used:
            return chr(code)
    raise PromptError("The texts use every noncharacter and private-use character of Unicode; remove some of them.")


def _join_plain(pieces: Sequence[str | int], sentinel: str) -> list[str | int]:
    """Take the sentinels out, now that control literals have been told from text."""
    return [piece.replace(sentinel, "") if isinstance(piece, str) else piece for piece in pieces]


def _default_template(value: Any, path: Path) -> str:
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if not isinstance(value, str):
        raise CheckpointError(f"{path}: chat_template must be a text or a list with a template named 'default'.")
    return value


def _reason(error: Exception) -> str:
    """One short line, since an error text may quote the hostile template."""
    text = " ".join(str(error).split())[:300]
    return text or type(error).__name__
