"""Running a node of the pack by its id, as the editor would send it."""

from fake_comfy import load_pack, part

NODES = load_pack().NODE_CLASS_MAPPINGS
errors = part("a3b_engine.errors")


def run(node_id, **inputs):
    node = NODES[node_id]
    return getattr(node(), node.FUNCTION)(**inputs)


def widgets(node_id):
    """Defaults of the required widgets that have one: what the editor sends for an untouched node."""
    required = NODES[node_id].INPUT_TYPES()["required"]
    return {name: options["default"] for name, (_, options) in required.items() if "default" in options}


def parse(**inputs):
    return run("A3BParsePanels", **{**widgets("A3BParsePanels"), **inputs})
