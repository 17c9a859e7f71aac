"""A custom node for test_comfyui_gpu.py: runs one of `checks.py` where the nodes of the pack run, in ComfyUI's own process.

Its report stands in the history and in the server's log, as one line of JSON behind A3B-REPORT.
"""

import json
import logging

log = logging.getLogger(__name__)


class A3BTestResidency:
    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"check": ("STRING", {}), "rounds": ("INT", {"default": 1})}}

    @classmethod
    def IS_CHANGED(cls, **_inputs):
        return float("nan")  # runs again whatever it was asked before

    def run(self, check, rounds):
        from .checks import CHECKS
        from .stage import Stage

        report = {"check": check, "failures": [], "facts": {}}
        try:
            stage = Stage()
            report |= {"failures": stage.failures, "facts": stage.facts}
            try:
                CHECKS[check](stage, rounds)
            finally:
                stage.close()
        except Exception as problem:
            report["failures"].append(f"{type(problem).__name__}: {problem}")
            log.exception("A3B-TRACE")
        log.info("A3B-REPORT %s", json.dumps(report))
        return {"ui": {"text": [json.dumps(report)]}}


NODE_CLASS_MAPPINGS = {"A3BTestResidency": A3BTestResidency}
