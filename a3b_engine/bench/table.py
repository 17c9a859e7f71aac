"""The report as a table for people."""

from __future__ import annotations

from typing import Any, Iterator

from .routing import MODEL

NAME_WIDTH = 60
COUNTS = frozenset({"experts", "experts_on_device", "experts_pinned", "experts_on_disk"})  # of experts: the others of `Engine.memory` are bytes


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
    if "from_parked_s" in load:
        yield "weights off the device, and back from RAM after", f"{load['unload_s']} s, {load['from_parked_s']} s"
    host = "" if report["host_copy_gb_per_s"] is None else f"; from pinned RAM {report['host_copy_gb_per_s']} GB/s"
    yield "copy rate of the device", f"{report['copy_gb_per_s']} GB/s{host}"
    yield from _residency(report)
    for row in report["decode"]:
        rate = f"{row['gb_per_s']} GB/s, {row['share_of_copy']:.0%} of the copy rate"
        routing = "" if row["routing"] == MODEL else f", {row['routing']} routing"
        yield f"decode, {row['prompt_tokens']} tokens of context{routing}", f"{row['tokens_per_s']} tokens/s ({rate})"
        if row["experts"]:
            yield "", fetched_line(row["experts"])
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
    yield "held in that run", ", ".join(f"{name} {nbytes / 1e9:.3f} GB" for name, nbytes in memory["tiers"].items() if name not in COUNTS)


def _residency(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    cap, experts = report["cap"], report["experts"]
    if cap["cap_gb"] is None:
        return
    yield "experts on the device", experts_line(experts)
    yield f"held at most under the cap of {cap['cap_gb']} GB", cap_line(cap)


def experts_line(experts: dict[str, Any]) -> str:
    """Where they are."""
    elsewhere = f"{experts['in_pinned_ram']} in pinned RAM, {experts['on_disk']} only on disk"
    return f"{experts['on_device']} of {experts['of']} ({experts['share']:.0%}); {elsewhere}"


def fetched_line(found: dict[str, Any]) -> str:
    """Which experts were found on the device, and how fast the others came."""
    expected = "" if found["expected_hit_rate"] is None else f" (an LRU should find {found['expected_hit_rate']:.1%})"
    share = "" if found["share_of_host_copy"] is None else f", {found['share_of_host_copy']:.0%} of the copy rate from RAM"
    return f"{found['hit_rate']:.1%} found{expected}, {found['fetched_per_token']} experts fetched a token: {found['fetched_gb_per_s']} GB/s{share}"


def cap_line(cap: dict[str, Any]) -> str:
    """What torch's allocator held at most, and whether it stayed below the cap."""
    if cap["peak_reserved_gb"] is None:
        return "not counted on this device"
    kept = "" if cap["cap_kept"] is None else ", cap kept" if cap["cap_kept"] else ", CAP EXCEEDED"
    return f"{cap['peak_allocated_gb']} GB, {cap['peak_reserved_gb']} GB reserved{kept}; {cap['outside_allocator_gb']} GB outside the allocator"


def goals_table(report: dict[str, Any]) -> str:
    """The report of `table6`: goals beside what was measured, then each run."""
    machine, rate = report["machine"], report["host_copy_gb_per_s"]
    lines = [f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, driver {machine['driver']}, {machine['date']}; {report['seconds']} s in all"]
    lines += [f"copies from pinned RAM: {'not counted here' if rate is None else f'{rate} GB/s'}", ""]
    goals = report["goals"]
    width = max(len(goal["row"]) for goal in goals)
    lines.append(f"{'':<{width}} {'':<5}  {'must':>7}  {'aim':>7}  {'measured':>9}")
    for goal in goals:
        measured = "-" if goal["measured"] is None else f"{goal['measured']:g}"
        lines.append(f"{goal['row']:<{width}} {goal['unit']:<5}  {goal['must']:>7g}  {goal['aim']:>7g}  {measured:>9}  {goal['reached']}")
    for name, run in report["runs"].items():
        lines += ["", f"{name}:", *(f"  {line}" for line in _run_lines(run))]
    if report["log"]:
        lines += ["", "said by the engine:", *(f"  {line}" for line in report["log"])]
    return "\n".join(lines)


def _run_lines(run: dict[str, Any]) -> Iterator[str]:
    if "error" in run:
        yield f"failed: {run['error']}"
        return
    if "warm_s" in run:
        yield f"first {run['first_s']} s, from the page cache {run['warm_s']} s ({run['warm_gb_per_s']} GB/s)"
        return
    came = f"made in {run['made_s']} s" if "made_s" in run else f"from parked RAM in {run['from_parked_s']} s"
    yield f"{run['form']}, {run['weights_gb']} GB of weights {came}; experts: {experts_line(run['experts'])}"
    cap = run["cap"]
    yield f"held at most{'' if cap['cap_gb'] is None else ' under the cap of ' + str(cap['cap_gb']) + ' GB'}: {cap_line(cap)}"
    if "peak" in run:
        peak = run["peak"]
        yield f"{peak['tokens']} tokens with a picture: at most {peak['allocated_gb']} GB, {peak['reserved_gb']} GB reserved"
    if "prefill" in run:
        yield f"prefill, {run['prefill']['prompt_tokens']} tokens: {run['prefill']['tokens_per_s']} tokens/s"
    for row in run["decode"].values():
        yield f"decode, {row['prompt_tokens']} tokens of context, routing {row['routing']}: {row['tokens_per_s']} tokens/s"
        if row["experts"]:
            yield f"  {fetched_line(row['experts'])}"
