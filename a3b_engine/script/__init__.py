"""The comic script: its fields, the grammar that asks for it, the parser that reads it, and the panel lists.

Import from the modules: `schema`, `grammar`, `presets`, `parse`, `panels`.
"""
