"""The model in plain PyTorch: the reference every faster kernel is checked against.

One sequence at a time (batch 1), activations as [tokens, channels]. Weights come as the dictionary of
`checkpoint.reader.load_weights`; nothing here knows about files, devices or sampling.
"""
