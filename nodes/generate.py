"""Generate: run the model on a prompt."""

from __future__ import annotations

import json
import logging
from typing import Annotated

from ..a3b_engine.prompt import Prompt
from ..a3b_engine.sampling import SamplingParams
from ..a3b_engine.sampling_presets import CUSTOM, PRESET_NAMES, SCRIPT, chosen_numbers, preset_table
from ..a3b_engine.script.grammar import MAX_GRAMMAR_PANELS, MAX_GRAMMAR_ROUNDS
from ..a3b_engine.script.instructions import with_choices
from . import host, residency
from .annotations import Choice, Flag, Float, Int, Output, Shown, Socket, Text, node
from .answer_format import BY_PRESET, FORMATS, SHORT_SCRIPT, chosen_format, constraint, stop_texts
from .memory_advice import held
from .sockets import A3B_MODEL, A3B_PROMPT, ModelHandle

log = logging.getLogger(__name__)

ONLY_CUSTOM = f' Counts only when preset is "{CUSTOM}".'


@node("A3BGenerate", "Generate", category="A3B", output_node=True, search=("llm", "text generation", "chat", "comic script"))
def A3BGenerate(
    model: Annotated[ModelHandle, Socket(A3B_MODEL, tooltip="From Load A3B Model.")],
    prompt: Annotated[Prompt, Socket(A3B_PROMPT, tooltip="From Build [[IMG]] Prompt.")],
    preset: Annotated[
        str,
        Choice(
            PRESET_NAMES,
            tooltip=f"Sampling numbers. {preset_table()}. {CUSTOM}: the seven widgets below. "
            "With any other choice the preset's numbers win over those widgets.",
        ),
    ] = SCRIPT,
    max_new_tokens: Annotated[
        int, Int(1, 32768, tooltip="Most tokens to write, thinking included. A four-panel script takes about 1500.")
    ] = 4096,
    temperature: Annotated[
        float, Float(0.0, 2.0, 0.01, advanced=True, tooltip="0: always the likeliest token. Higher: more varied." + ONLY_CUSTOM)
    ] = 0.7,
    top_p: Annotated[
        float, Float(0.0, 1.0, 0.01, advanced=True, tooltip="Keep the likeliest tokens up to this total probability." + ONLY_CUSTOM)
    ] = 0.8,
    top_k: Annotated[
        int, Int(0, 1000, advanced=True, tooltip="Keep this many of the likeliest tokens; 0: no limit." + ONLY_CUSTOM)
    ] = 20,
    min_p: Annotated[
        float,
        Float(0.0, 1.0, 0.01, advanced=True, tooltip="Drop tokens less likely than this part of the best one." + ONLY_CUSTOM),
    ] = 0.0,
    presence_penalty: Annotated[
        float,
        Float(-2.0, 2.0, 0.01, advanced=True, tooltip="Lowers every token that was written already, once." + ONLY_CUSTOM),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        Float(-2.0, 2.0, 0.01, advanced=True, tooltip="Lowers a token for each time it was written." + ONLY_CUSTOM),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        Float(0.5, 2.0, 0.01, advanced=True, tooltip="Divides the score of tokens seen in prompt and answer; 1: off." + ONLY_CUSTOM),
    ] = 1.0,
    seed: Annotated[
        int,
        Int(
            0,
            2**64 - 1,
            control=True,
            tooltip="Same seed, same inputs: same answer, whatever else ran on the device (its own random generator).",
        ),
    ] = 0,
    thinking: Annotated[
        bool, Flag(tooltip="Let the model reason before it answers. The reasoning goes to its own output, never into the text.")
    ] = False,
    thinking_budget: Annotated[
        int, Int(0, 32768, tooltip="Close the reasoning after this many tokens so that an answer follows. 0: no limit of its own.")
    ] = 1024,
    format: Annotated[
        str,
        Choice(
            FORMATS,
            tooltip="text: free. comic script: JSON with exactly the panels below; the short one has fewer fields and takes a "
            "quarter of the time. JSON schema / regex: your own, from the widgets below. All but text are enforced on every "
            f"token. {BY_PRESET}: comic script for a comic preset of Build, text for all else.",
        ),
    ] = BY_PRESET,
    panels: Annotated[
        int, Int(1, MAX_GRAMMAR_PANELS, tooltip="Number of panels. Counts only when format is a comic script.")
    ] = 4,
    rounds: Annotated[
        int,
        Int(
            0,
            MAX_GRAMMAR_ROUNDS,
            tooltip="Dialogue lines in the whole script, shared out among the panels. Counts only when format is a comic script.",
        ),
    ] = 4,
    schema: Annotated[str, Text(optional=True, tooltip='A JSON schema. Counts only when format is "JSON schema".')] = "",
    regex: Annotated[
        str, Text(optional=True, multiline=False, tooltip='A regular expression for the whole answer. Counts only when format is "regex".')
    ] = "",
    stop: Annotated[
        str,
        Text(optional=True, tooltip=r"Texts that end the answer and are left out of it, one a line; \n stands for a line feed, \t for a tab."),
    ] = "",
) -> tuple[
    Annotated[str, Output("STRING", "text", "The answer, without any reasoning.")],
    Annotated[str, Output("STRING", "thinking", "The reasoning; empty when thinking is off.")],
    Annotated[str, Output("STRING", "stats", "JSON: why it ended, token counts, times, seed, sampling numbers, and what was where in memory when the answer was done.")],
]:
    """Writes the answer. Cancel stops within a token; the model stays loaded for the next run.

    Numbers of the preset win over the sampling widgets unless preset is "custom"."""
    widgets = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
    }
    numbers = chosen_numbers(preset, widgets)
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop=stop_texts(stop),
        thinking_budget=thinking_budget or None,
        **numbers,
    )
    kind = chosen_format(format, prompt)
    rules = constraint(kind, panels, rounds, schema, regex)
    prompt = with_choices(prompt, panels, rounds, short=kind == SHORT_SCRIPT)

    # Rendering needs no weights: a bad prompt fails here, before anything else has to leave the device.
    engine = residency.open_engine(model)
    prompt_tokens = len(engine.render(prompt, thinking=thinking).token_ids)
    working = engine.working_bytes(min(prompt_tokens + max_new_tokens, model.context))
    with residency.loaded(model, working):
        progress = host.TokenProgress(max_new_tokens)
        answer = engine.generate(
            prompt, sampling, thinking=thinking, on_token=progress, cancel=host.check_interrupt, **rules
        )
        memory = held(engine)
    progress.finish(answer.text)
    log.info("A3B: %s %.1f tokens/s", answer.status, answer.timings.tokens_per_second)
    return Shown((answer.text, answer.thinking, _stats(answer, engine.name, numbers, memory)), answer.text or answer.status)


def _stats(answer, model_name: str, numbers: dict[str, float], memory: dict) -> str:
    facts = {key: value for key, value in answer.to_dict().items() if key not in ("text", "thinking")}
    return json.dumps({"model": model_name, **facts, "sampling": numbers, "memory": memory}, ensure_ascii=False, indent=1)
