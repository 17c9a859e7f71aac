"""Text to token ids and back: byte-level BPE read from a checkpoint's own `tokenizer.json`.

The merges run in the `tokenizers` package. Added tokens (`<|im_end|>`, `<think>`, ...) are matched here instead, so that
one vocabulary in memory serves both readings of a text: template text, where a control literal is a control token, and
text typed by a user, where it never is.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable

from .errors import CheckpointError, UnsupportedFormatError

logger = logging.getLogger(__name__)

MAX_TOKENIZER_BYTES = 256 * 1024**2
MAX_CONFIG_BYTES = 16 * 1024**2
MAX_TOKEN_ID = 2**24


@dataclass(frozen=True)
class AddedToken:
    """One control token: its id, its literal, and whether decoding may hide it (`special`)."""

    id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    def pattern(self) -> str:
        literal = re.escape(self.content)
        if self.single_word:
            literal = rf"(?<!\w){literal}(?!\w)"
        return (r"\s*" if self.lstrip else "") + literal + (r"\s*" if self.rstrip else "")


class Tokenizer:
    """Byte-level BPE with control tokens; make one with `Tokenizer.from_folder`. Safe to share between threads."""

    def __init__(self, backend: Any, added: Iterable[AddedToken], source: str = "tokenizer.json") -> None:
        from tokenizers import Tokenizer as Backend

        self._backend = backend
        self._plain = Backend(backend.model)  # shares the model; knows no added token
        self._plain.normalizer, self._plain.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        self._bytes_of_char = _bytes_of_chars()
        self._added = {token.id: token for token in sorted(added, key=lambda token: token.id)}
        self._token_bytes: dict[int, bytes] = {}
        for token in self._added.values():
            if len(token.content) < 2:
                raise CheckpointError(
                    f"{source}: the added token {token.id} is {token.content!r}; a control token needs at least two "
                    "characters, otherwise typed text cannot be told from it."
                )
        # Longest first at each position, which is how the published tokenizer chooses between overlapping literals.
        ordered = sorted(self._added.values(), key=lambda token: -len(token.content))
        self._literal = re.compile("|".join(f"({token.pattern()})" for token in ordered) or r"(?!)")
        self._id_of_group = [token.id for token in ordered]
        highest = max([self._plain.get_vocab_size() - 1, *self._added])
        #: Number of real ids: every id from `size` up is padding of the model's vocabulary and must be masked.
        self.size: int = highest + 1
        #: Ids that decoding with `skip_special=True` leaves out.
        self.special_ids: frozenset[int] = frozenset(t.id for t in self._added.values() if t.special)
        #: Ids of all added tokens, also those not marked special (`<think>`).
        self.control_ids: frozenset[int] = frozenset(self._added)
        #: Literals of all added tokens, in id order.
        self.control_literals: tuple[str, ...] = tuple(token.content for token in self._added.values())

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read `tokenizer.json` (and added tokens that only `tokenizer_config.json` names) of a checkpoint folder.

        Raises CheckpointError where the file is missing or damaged, UnsupportedFormatError where it is not byte-level BPE.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist. The checkpoint folder needs the tokenizer.json of the original repository: "
                "copy it there or download the folder again."
            )
        text = read_text(path, MAX_TOKENIZER_BYTES)
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_str(text)
        except Exception as error:  # the package raises plain Exception for every kind of bad file
            raise CheckpointError(
                f"{path} ({len(text)} characters) cannot be read as a tokenizer: {str(error)[:200]}. "
                "Is the download incomplete? Fetch this file again."
            ) from error
        _require_byte_level(backend, path)
        backend.no_truncation()
        backend.no_padding()
        added = [
            AddedToken(number, token.content, token.special, token.lstrip, token.rstrip, token.single_word)
            for number, token in backend.get_added_tokens_decoder().items()
        ]
        added += _added_by_config(Path(folder) / "tokenizer_config.json", backend, added)
        return cls(backend, added, source=str(path))

    # ---- text to ids --------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of template text: every control literal in it becomes its control token."""
        ids: list[int] = []
        for piece in self.split(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self.encode_plain(piece))
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of foreign text: no id of an added token is ever produced, control literals become ordinary tokens.

        Lone surrogates (not encodable as UTF-8) are read as U+FFFD.
        """
        ids = self._plain.encode(without_surrogates(text), add_special_tokens=False).ids
        if self.control_ids.isdisjoint(ids):
            return ids
        # Reached only where a file lists a control literal in the BPE vocabulary itself with merges that build it.
        return [part for number in ids for part in self._take_apart(number)]

    def _take_apart(self, number: int) -> list[int]:
        if number not in self.control_ids:
            return [number]
        content = self._added[number].content
        middle = len(content) // 2
        return self.encode_plain(content[:middle]) + self.encode_plain(content[middle:])

    def split(self, text: str) -> list[str | int]:
        """Cut `text` at control literals: strings between them, ids for the literals; empty strings are left out."""
        pieces: list[str | int] = []
        end = 0
        for match in self._literal.finditer(text):
            if match.start() > end:
                pieces.append(text[end : match.start()])
            pieces.append(self._id_of_group[match.lastindex - 1])
            end = match.end()
        if end < len(text):
            pieces.append(text[end:])
        return pieces

    def break_literals(self, text: str, breaker: str) -> str:
        """Put the character `breaker` inside every control literal of `text`, so that none is left."""
        while self._literal.search(text):
            text = self._literal.sub(lambda match: _break(match[0], breaker), text)
        return text

    # ---- ids to text --------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`. Special tokens are left out with `skip_special`; unknown and padding ids give nothing.

        Bytes that are no valid UTF-8 become U+FFFD.
        """
        return b"".join(self.token_bytes(number, skip_special) for number in ids).decode("utf-8", errors="replace")

    def token_bytes(self, number: int, skip_special: bool = True) -> bytes:
        """The bytes one id stands for; a token may hold only a part of a character."""
        if skip_special and number in self.special_ids:
            return b""
        known = self._token_bytes.get(number)
        if known is None:
            known = self._token_bytes[number] = self._bytes_of(number)
        return known

    def _bytes_of(self, number: int) -> bytes:
        if number in self._added:
            return self._added[number].content.encode("utf-8")
        token = self._plain.id_to_token(number) if 0 <= number < self.size else None
        if token is None:
            return b""
        try:
            return bytes(self._bytes_of_char[char] for char in token)
        except KeyError:  # not spelled in the byte alphabet: the token is its own text
            return token.encode("utf-8")

    def stream(self, skip_special: bool = True) -> StreamDecoder:
        """A decoder for ids that arrive one at a time."""
        return StreamDecoder(self, skip_special)

    # ---- tables -------------------------------------------------------------------------------------------------

    def token_to_id(self, token: str) -> int | None:
        """Id of a control literal (`"</think>"`) or of a vocabulary entry in its byte-level spelling; None if absent."""
        for added in self._added.values():
            if added.content == token:
                return added.id
        return self._plain.token_to_id(token)

    def json_text(self) -> str:
        """The tokenizer as `tokenizer.json` text, as grammar libraries want it."""
        return self._backend.to_str()


class StreamDecoder:
    """Turns ids into text as they come, holding back the bytes of an unfinished character.

    All pieces of `push` plus the last one of `flush` equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, number: int) -> str:
        """Text that is complete once this id is known; empty while a character is still open."""
        return self._decoder.decode(self._tokenizer.token_bytes(number, self._skip_special))

    def flush(self) -> str:
        """What is left at the end: empty, or U+FFFD for a character that never got its last bytes."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def without_surrogates(text: str) -> str:
    """`text` with UTF-16 surrogate pairs joined and lone surrogates replaced by U+FFFD (JSON can carry both)."""
    if text.isascii() or not re.search("[\ud800-\udfff]", text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_text(path: Path, limit: int) -> str:
    """A whole UTF-8 file of at most `limit` bytes; CheckpointError with the reason otherwise."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path} has {size} bytes; at most {limit} are read. Is it the right file?")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Fetch this file again.") from error


def read_json(path: Path, limit: int) -> dict:
    """A JSON object from a file, CheckpointError otherwise."""
    try:
        value = json.loads(read_text(path, limit))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}. Fetch this file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; an object is expected.")
    return value


def _break(literal: str, breaker: str) -> str:
    # The match may begin with whitespace (lstrip tokens); the break must stand inside the literal proper.
    start = len(literal) - len(literal.lstrip())
    return literal[: start + 1] + breaker + literal[start + 1 :]


def _bytes_of_chars() -> dict[str, int]:
    """The byte alphabet of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    table, spare = {}, 256
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            table[chr(byte)] = byte
        else:
            table[chr(spare)] = byte
            spare += 1
    return table


def _require_byte_level(backend: Any, path: Path) -> None:
    model, decoder = type(backend.model).__name__, type(backend.decoder).__name__
    if model != "BPE" or decoder != "ByteLevel":
        raise UnsupportedFormatError(
            f"{path} holds a {model} tokenizer with decoder {decoder}; Qwen3.5 and Qwen3.6 use byte-level BPE. "
            "Take the tokenizer.json of the original repository."
        )


def _added_by_config(path: Path, backend: Any, known: list[AddedToken]) -> list[AddedToken]:
    """Added tokens that stand only in `tokenizer_config.json` (some converters drop them from `tokenizer.json`)."""
    if not path.is_file():
        return []
    entries = read_json(path, MAX_CONFIG_BYTES).get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder must be an object of id to token, found {type(entries)}.")
    ids, literals, found = {t.id for t in known}, {t.content for t in known}, []
    for key, entry in entries.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        usable = isinstance(content, str) and content and without_surrogates(content) == content
        if not (key.isdecimal() and len(key) <= 8 and int(key) < MAX_TOKEN_ID and usable):
            raise CheckpointError(f"{path}: added_tokens_decoder has the broken entry {key!r}. Fetch this file again.")
        if int(key) in ids or content in literals:
            continue
        if int(key) < backend.get_vocab_size(with_added_tokens=False):
            logger.warning("tokenizer_config.json names token %s as added, but the vocabulary uses that id", key)
            continue
        flags = (bool(entry.get(name, False)) for name in ("special", "lstrip", "rstrip", "single_word"))
        found.append(AddedToken(int(key), content, *flags))
        ids.add(int(key))
        literals.add(content)
    return found
