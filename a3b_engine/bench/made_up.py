"""A whole model without a file: configuration, random weights, synthetic tokenizer, a minimal chat template."""

from __future__ import annotations

from ..chat import ChatTemplate
from ..image import ImageProcessorConfig
from ..parts import EngineParts
from .packed import STORED
from .shape import ModelShape, model_config
from .vocabulary import synthetic_tokenizer
from .weights import RandomWeights

# Turns as the published template writes them, the thinking block closed at once unless it is asked for.
TEMPLATE = """\
{%- for message in messages -%}
  {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
  {%- if message.content is string -%}
    {{- message.content -}}
  {%- else -%}
    {%- for part in message.content -%}
      {{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' -}}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n<think>\\n' -}}
{%- if not enable_thinking -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
"""


def made_up_parts(shape: ModelShape, seed: int = 0, experts: str = STORED) -> EngineParts:
    """Parts of a model of that shape, its routed experts kept as `RandomWeights` says; nothing is made on a device before
    `Engine.load_weights`."""
    config = model_config(shape)
    return EngineParts(
        name=f"random weights, {shape.layers} layers",
        identity=f"benchmark|{shape}|{seed}|{experts}",
        config=config,
        weights=RandomWeights(config, seed, experts),
        tokenizer=synthetic_tokenizer(shape),
        template=ChatTemplate(TEMPLATE, "the template of the benchmark"),
        processor=ImageProcessorConfig(),
    )
