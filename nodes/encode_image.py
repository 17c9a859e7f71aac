"""Encode Image 384px: pictures -> what the language model sees of them."""

from __future__ import annotations

from typing import Annotated, Any

from . import residency
from .annotations import Choice, Int, Output, Socket, node
from .sockets import A3B_IMAGES, A3B_MODEL, ModelHandle

PIXELS_PER_TOKEN = 32 * 32
PATCHES_PER_TOKEN = 4  # the vision tower works on patches; 2x2 of them become one token


@node(
    "A3BEncodeImage",
    "Encode Image 384px",
    category="A3B",
    search=("vision", "vlm", "image to text", "reference picture"),
)
def A3BEncodeImage(
    model: Annotated[ModelHandle, Socket(A3B_MODEL, tooltip="From Load A3B Model.")],
    image: Annotated[Any, Socket("IMAGE", tooltip="One picture or a whole batch. Transparency is put on white.")],
    size: Annotated[
        int,
        Int(
            64,
            2048,
            32,
            tooltip="Working size in pixels, a multiple of 32. With fit keep the picture has at most the area of size x size, "
            "with the others it becomes size x size. 384 x 384 costs 144 tokens, 768 x 768 costs 576.",
        ),
    ] = 384,
    fit: Annotated[
        str,
        Choice(
            ("keep", "letterbox", "crop", "stretch"),
            tooltip="keep: same proportions, area limited to size x size. letterbox: whole picture on a grey square. "
            "crop: middle square. stretch: squeezed to a square.",
        ),
    ] = "keep",
    images: Annotated[
        tuple | None,
        Socket(
            A3B_IMAGES,
            optional=True,
            tooltip="Pictures encoded before; the new ones are counted after them ([[IMG:1]] is the first of these).",
        ),
    ] = None,
) -> tuple[
    Annotated[tuple, Output(A3B_IMAGES, "images", "All pictures in order, for Build [[IMG]] Prompt.")],
    Annotated[int, Output("INT", "token_count", "Tokens that all pictures together take in the prompt.")],
]:
    """Turns pictures into features for the model. Chain several of these through "images" to mix sizes; use
    [[IMG]] or [[IMG:2]] in the prompt to say where each picture belongs."""
    engine = residency.open_engine(model)
    patches = PATCHES_PER_TOKEN * max(1, size * size // PIXELS_PER_TOKEN)
    with residency.loaded(model, max(engine.seeing_bytes, engine.working_bytes(patches))):
        encoded = engine.encode_image(image, size=size, fit=fit)
    everything = tuple(images or ()) + tuple(encoded)
    return everything, sum(item.n_tokens for item in everything)
