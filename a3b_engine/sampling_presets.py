"""Named sampling numbers: the presets of the Generate node; the command line writes scripts with the first."""

from __future__ import annotations

CUSTOM = "custom"

# (temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty, repetition_penalty)
FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)

SCRIPT = "script"
PRESETS: dict[str, tuple] = {
    # Cool and without a presence penalty: JSON repeats its keys and quotes by nature.
    SCRIPT: (0.4, 0.95, 20, 0.05, 0.0, 0.0, 1.0),
    # The two recommendations of the published model card.
    "free (thinking)": (1.0, 0.95, 20, 0.0, 1.5, 0.0, 1.0),
    "free (instruct)": (0.7, 0.8, 20, 0.0, 1.5, 0.0, 1.0),
}

PRESET_NAMES = (*PRESETS, CUSTOM)


def chosen_numbers(preset: str, widgets: dict[str, float]) -> dict[str, float]:
    """The numbers that count: the preset's, or the widgets' when `preset` is "custom"."""
    return widgets if preset == CUSTOM else dict(zip(FIELDS, PRESETS[preset]))


def preset_table() -> str:
    """One line a preset, for the tooltip."""
    rows = (", ".join(f"{field} {value:g}" for field, value in zip(FIELDS, numbers)) for numbers in PRESETS.values())
    return "; ".join(f"{name}: {row}" for name, row in zip(PRESETS, rows))
