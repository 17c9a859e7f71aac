"""A custom node for the tests: shows, as JSON, every item of the lists it receives."""

import json


class AnyType(str):
    """A socket type that takes a link from every other."""

    def __ne__(self, _other):
        return False


class A3BTestWitness:
    SLOTS = 16
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


NODE_CLASS_MAPPINGS = {"A3BTestWitness": A3BTestWitness}
