"""What generation hands back: the answer, its figures, and the events while it grows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "stop_string", "length", "cancelled"]


@dataclass(frozen=True)
class TokenEvent:
    """Called for every step. text: what became readable (may be empty inside a character); count of limit tokens are out."""

    text: str
    thinking: bool
    count: int
    limit: int


@dataclass(frozen=True)
class Usage:
    """Token counts. image_tokens and kept_tokens (left by an earlier run, not computed again) are part of prompt_tokens,
    thinking_tokens of completion_tokens."""

    prompt_tokens: int
    image_tokens: int
    completion_tokens: int
    thinking_tokens: int
    kept_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds, and decoded tokens a second after the first one."""

    prefill_seconds: float
    decode_seconds: float
    time_to_first_token: float
    tokens_per_second: float


@dataclass(frozen=True)
class Answer:
    """text without thinking, the thinking apart, and why it ended."""

    text: str
    thinking: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    ended_thinking: bool
    limited_by_context: bool = False  # the context left less room than max_new_tokens

    @property
    def status(self) -> str:
        """One sentence for the user."""
        usage = self.usage
        raise_limit = "The context is full: raise context on Load A3B Model, shorten the prompt" if self.limited_by_context else "Raise max_new_tokens"
        if self.finish_reason == "length" and not self.ended_thinking:
            return (
                f"token limit reached while thinking: all {usage.completion_tokens} tokens went into thinking and no answer was begun. "
                f"{raise_limit}, set a thinking budget, or switch thinking off."
            )
        if self.finish_reason == "length":
            spent = f", {usage.thinking_tokens} of them on thinking" if usage.thinking_tokens else ""
            return f"token limit reached: the answer was cut after {usage.completion_tokens} tokens{spent}. {raise_limit}."
        if self.finish_reason == "cancelled":
            return f"cancelled after {usage.completion_tokens} tokens."
        return f"complete: {usage.completion_tokens} tokens."

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "status": self.status}
