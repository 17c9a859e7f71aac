"""Custom nodes for the tests: one shows, as JSON, every item of the lists it receives; two stand in for an image model."""

import json

import torch


class AnyType(str):
    """A socket type that takes a link from every other."""

    def __ne__(self, _other):
        return False


class A3BTestWitness:
    SLOTS = 24
    RETURN_TYPES = ()
    FUNCTION = "show"
    OUTPUT_NODE = True
    INPUT_IS_LIST = True
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}, "optional": {f"value_{slot}": (AnyType("*"),) for slot in range(cls.SLOTS)}}

    def show(self, **values):
        return {"ui": {"text": [json.dumps({name: list(items) for name, items in values.items()})]}}


class TextEncoder:
    """What CLIP Text Encode of either age asks of a CLIP. The conditioning is the text itself."""

    def tokenize(self, text):
        return text

    def encode_from_tokens(self, tokens, return_pooled=False):
        return (tokens, None) if return_pooled else tokens

    def encode_from_tokens_scheduled(self, tokens):
        return [[tokens, {}]]


class PixelDecoder:
    """What VAE Decode asks of a VAE: grey pixels, eight a latent cell."""

    def decode(self, samples):
        batch, _, rows, columns = samples.shape
        return torch.full((batch, rows * 8, columns * 8, 3), 0.5)


class A3BTestImageModel:
    """In the place of Load Checkpoint."""

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"ckpt_name": ("STRING", {})}}

    def load(self, ckpt_name):
        return ckpt_name, TextEncoder(), PixelDecoder()


class A3BTestSampler:
    """In the place of KSampler, with its inputs: draws nothing, and shows what it was asked to draw, once a run."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "sample"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        sockets = {"model": "MODEL", "positive": "CONDITIONING", "negative": "CONDITIONING", "latent_image": "LATENT"}
        widgets = {"seed": "INT", "steps": "INT", "cfg": "FLOAT", "sampler_name": "STRING", "scheduler": "STRING", "denoise": "FLOAT"}
        return {"required": {name: (kind,) for name, kind in {**sockets, **widgets}.items()}}

    def sample(self, model, positive, negative, latent_image, seed, **_numbers):
        batch, _, rows, columns = latent_image["samples"].shape
        asked = {"model": model, "prompt": positive[0][0], "negative": negative[0][0], "seed": seed, "batch": batch}
        asked |= {"width": columns * 8, "height": rows * 8}
        return {"ui": {"text": [json.dumps(asked)]}, "result": (latent_image,)}


NODE_CLASS_MAPPINGS = {node.__name__: node for node in (A3BTestWitness, A3BTestImageModel, A3BTestSampler)}
