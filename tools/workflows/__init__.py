"""The example workflows: one description each, from which the canvas files (English, Chinese) and the API form are made."""
