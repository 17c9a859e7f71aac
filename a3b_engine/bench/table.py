"""The report as a table for people."""

from __future__ import annotations

from typing import Any, Iterator

NAME_WIDTH = 60


def table(report: dict[str, Any]) -> str:
    """Lines of text: one figure a line, then the kernels of a step and of a prefill."""
    rows = [*_head(report), ("", ""), *_figures(report)]
    width = max(len(label) for label, _ in rows)
    lines = [f"{label:<{width}}  {value}".rstrip() for label, value in rows]
    for name, title in (("decode_step", "one decode step"), ("prefill", "prefill of the prompt")):
        profile = (report["profile"] or {}).get(name)
        if profile:
            # Kernels that are started early overlap the one before, and their sum may exceed the time that passed.
            lines += ["", f"{title}: {profile['us']:.0f} us of kernels in {profile['launches']:.0f} launches"]
            lines += [f"  {row['us']:10.1f} us  {row['count']:8.1f} x  {row['name'][:NAME_WIDTH]}" for row in profile["top"]]
    return "\n".join(lines)


def _head(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    machine, model = report["machine"], report["model"]
    yield "device", f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, driver {machine['driver']}, {machine['date']}"
    yield "model", f"{model['name']}, {model['format']}, {model['dtype']}, {model['weights_gb']:.2f} GB of weights"
    kernels = report["kernels"]
    yield "compiled kernels", "possible here" if kernels["target"] else "not possible here: the plain path runs"
    for line in kernels["log"]:
        yield "", line
    share = ((report["profile"] or {}).get("decode_step") or {}).get("share_of_own_kernels")
    if share is not None:
        yield "share of a step in this pack's kernels", f"{share:.0%}"


def _figures(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    load, memory = report["load"], report["memory"]
    yield "weights on the device after", f"{load['weights_s']} s ({load['gb_per_s']} GB/s); first answer after {load['first_answer_s']} s more"
    yield "copy rate of the device", f"{report['copy_gb_per_s']} GB/s"
    for row in report["decode"]:
        rate = f"{row['gb_per_s']} GB/s, {row['share_of_copy']:.0%} of the copy rate"
        yield f"decode, {row['prompt_tokens']} tokens of context", f"{row['tokens_per_s']} tokens/s ({rate})"
    grammar = report["grammar"]
    if grammar:
        share = "" if grammar["share_of_free"] is None else f", {grammar['share_of_free']:.0%} of {grammar['free_tokens_per_s']} without"
        yield "decode under the comic script's grammar", f"{grammar['tokens_per_s']} tokens/s{share}"
    for row in report["prefill"]:
        yield f"prefill, {row['prompt_tokens']} tokens", f"{row['tokens_per_s']} tokens/s, first token after {row['first_token_ms']} ms"
    first = report["first_token"]
    if first["picture"]:
        yield f"first token, new picture and text ({first['picture']['prompt_tokens']} tokens)", f"{first['picture']['ms']} ms ({first['picture']['encode_ms']} ms of it vision)"
    length = first["unseen"]["prompt_tokens"]
    yield f"first token, all new ({length} tokens)", f"{first['unseen']['ms']} ms"
    for name, what in (("text_changed", "the last text"), ("seed_changed", "the seed")):
        yield f"first token, only {what} changed", f"{first[name]['ms']} ms ({first[name]['kept_tokens']} tokens kept)"
    if memory["peak_above_weights_gb"] is not None:
        peak = f"{memory['peak_above_weights_gb']} GB ({memory['reserved_above_weights_gb']} GB reserved)"
        yield f"peak above weights, {memory['context']} tokens of context", peak
    yield "held in that run", ", ".join(f"{name} {nbytes / 1e9:.3f} GB" for name, nbytes in memory["tiers"].items())
