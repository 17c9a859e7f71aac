"""Grammar-constrained decoding: which tokens may come next so that the answer fits a JSON schema or regular expression.

Built on `llguidance`. Its tokenizer is fed from our own tables, with every control token (also `<think>`, which files do
not mark special) declared special: a grammar then never allows one inside the text, and forced text that spells a control
literal is forced as ordinary tokens.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import Any, Iterable

import torch

from .errors import GrammarError
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_SCHEMA_CHARACTERS = 1024**2
MAX_PATTERN_CHARACTERS = 64 * 1024

# One fixed spelling of the space between JSON parts: free whitespace lets a model pad for ever, and fixed separators are
# forced tokens, which cost no decode step. A schema may override this with its own "x-guidance" key.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


# Tokens that hold nothing but these many ordinary characters of a JSON string: a mask is put together from such sets where
# it can be. The library's own start at 10 characters, so that near the end of a bounded string nothing would fit.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHARACTER}{{1,{most}}}" for most in (1, 2, 4, 10, 30)), f"{_CHARACTER}+"]


class GrammarCompiler:
    """Compiles schemas and patterns for one tokenizer. The token tables are built on first use, about a second."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """vocab_size: width of the logits (padded). eos_token_ids: ids that end an answer."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._tables: Any = None

    def json_schema(self, schema: dict[str, Any] | str) -> Matcher:
        """A matcher for answers that are JSON under `schema` (an object, or its JSON text).

        Keys come in the order of the schema, parts are separated by ", " and ": ". Raises GrammarError in one sentence.
        """
        from llguidance import LLMatcher

        text = _schema_text(schema)
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)
        except ValueError as error:
            raise GrammarError(f"The JSON schema cannot be used: {_first_lines(str(error))}.") from error
        return self._matcher(grammar, "JSON schema")

    def regex(self, pattern: str) -> Matcher:
        """A matcher for answers that `pattern` matches as a whole (Rust regex syntax: no look-around, no back-references).

        Raises GrammarError in one sentence.
        """
        from llguidance import LLMatcher

        if not isinstance(pattern, str):
            raise GrammarError(f"The regular expression must be a text, found {type(pattern).__name__}.")
        if len(pattern) > MAX_PATTERN_CHARACTERS:
            raise GrammarError(
                f"The regular expression has {len(pattern)} characters; at most {MAX_PATTERN_CHARACTERS} are accepted."
            )
        try:
            grammar = LLMatcher.grammar_from_regex(pattern)
        except UnicodeEncodeError as error:
            raise GrammarError(
                f"The regular expression holds a character that is not valid Unicode: {error}."
            ) from error
        return self._matcher(grammar, "regular expression")

    def _matcher(self, grammar: str, kind: str) -> Matcher:
        from llguidance import LLMatcher, LLParserLimits

        # log_level 0: the library otherwise prints parser warnings to the console by itself.
        inner = LLMatcher(self._token_tables(), grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if inner.is_error():
            raise GrammarError(f"The {kind} cannot be used: {_first_lines(inner.get_error())}.")
        for warning in inner.get_grammar_warnings():
            logger.warning("%s: %s", kind, ascii(warning)[:300])
        matcher = Matcher(inner, self._vocab_size, self._eos, kind)
        matcher.bitmask()  # finds an unsatisfiable grammar now instead of at the first token
        return matcher

    def _token_tables(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._tables is None:
                self._check_end_tokens()
                wrapper = TokenizerWrapper(_TokenTables(self._tokenizer, self._vocab_size, self._eos[0]))
                self._tables = LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=list(self._eos), slices=_SLICES)
            return self._tables

    def _check_end_tokens(self) -> None:
        real = min(self._vocab_size, self._tokenizer.size)
        if not self._eos or not all(0 <= number < real for number in self._eos):
            raise GrammarError(
                f"The end tokens {list(self._eos)} are not among the {real} tokens of this tokenizer. "
                "Check eos_token_id in config.json and generation_config.json."
            )


class Matcher:
    """Follows one answer, token by token."""

    def __init__(self, inner: Any, vocab_size: int, eos_token_ids: tuple[int, ...], kind: str) -> None:
        self._inner = inner
        self._eos = eos_token_ids
        self._kind = kind
        self._ended = False
        self._mask = torch.zeros((vocab_size + 31) // 32, dtype=torch.int32)

    def bitmask(self) -> torch.Tensor:
        """Allowed next tokens as int32 [ceil(vocab / 32)] on the CPU; bit i of word w is token 32 * w + i.

        The buffer is reused by the next call. End tokens are allowed exactly where the answer may end. Raises GrammarError
        when no token can follow.
        """
        self._inner.unsafe_compute_mask_ptr(self._mask.data_ptr(), self._mask.numel() * self._mask.element_size())
        self._check()
        if not self._mask.any():
            raise GrammarError(f"No token can continue the answer under this {self._kind}; loosen it.")
        return self._mask

    def accept(self, number: int) -> None:
        """Move on by one token; GrammarError if the grammar does not allow it here."""
        if self._ended or (number in self._eos and not self.is_accepting()):
            state = "has ended" if self._ended else "is not complete"
            raise GrammarError(f"Token {number} is not allowed here: the answer {state}.")
        if number in self._eos:
            self._ended = True
            return
        if not self._inner.consume_token(number):
            raise GrammarError(
                f"Token {number} does not fit the {self._kind}: {_first_lines(self._inner.get_error())}."
            )

    def forced_tokens(self) -> list[int]:
        """Tokens the grammar leaves no choice about, in order; not yet accepted. Feed them in one go."""
        if self.is_stopped():
            return []
        forced = list(self._inner.compute_ff_tokens())
        self._check()
        return forced

    def is_accepting(self) -> bool:
        """True where the text so far is a complete answer."""
        return self._ended or (not self._inner.is_error() and self._inner.is_accepting())

    def is_stopped(self) -> bool:
        """True once nothing but an end token may follow, or an end token was accepted."""
        return self._ended or self._inner.is_stopped()

    def _check(self) -> None:
        if self._inner.is_error():
            raise GrammarError(f"The {self._kind} leads nowhere: {_first_lines(self._inner.get_error())}.")


class _TokenTables:
    """What llguidance asks of a tokenizer: the bytes of each id, the special ids, and text to ids."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(number, skip_special=False) for number in range(vocab_size)]
        self.special_token_ids = sorted(number for number in tokenizer.control_ids if number < vocab_size)
        self._encode = tokenizer.encode_plain

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    logits: float [V] on any device. bitmask: int32 [ceil(V / 32)]; tokens beyond it are forbidden.
    """
    words = bitmask.to(logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, None] >> shifts) & 1).bool().reshape(-1)[: logits.shape[-1]]
    logits[: allowed.shape[0]].masked_fill_(~allowed, float("-inf"))
    logits[allowed.shape[0] :].fill_(float("-inf"))


def _schema_text(schema: Any) -> str:
    """The schema as JSON text; GrammarError in plain words for anything else."""
    try:
        if isinstance(schema, str):
            _check_length(schema)
            schema = json.loads(schema)
        if not isinstance(schema, dict):
            raise GrammarError(
                f'The JSON schema must be an object like {{"type": "object"}}, found JSON {type(schema).__name__}.'
            )
        text = json.dumps(schema, ensure_ascii=True)
    except json.JSONDecodeError as error:
        raise GrammarError(
            f"The JSON schema is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"The JSON schema cannot be written as JSON: {_first_lines(str(error))}.") from error
    _check_length(text)
    return text


def _check_length(schema: str) -> None:
    if len(schema) > MAX_SCHEMA_CHARACTERS:
        raise GrammarError(
            f"The JSON schema has {len(schema)} characters; at most {MAX_SCHEMA_CHARACTERS} are accepted."
        )


def _first_lines(message: str) -> str:
    """llguidance's message on one line, without the parser state it may append."""
    head = message.split("<state>")[0]
    return " ".join(head.split())[:300].rstrip(". ") or "no reason given"
