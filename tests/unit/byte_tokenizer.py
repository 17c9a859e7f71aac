"""A toy tokenizer for grammar tests: one token a byte, and an end token."""

END = 256


class ByteVocabulary:
    """What llguidance asks of a tokenizer."""

    eos_token_id = END
    bos_token_id = unk_token_id = None
    tokens = [bytes([value]) for value in range(256)] + [b"<end>"]
    special_token_ids = [END]

    def __call__(self, text):
        return list(text.encode("utf-8") if isinstance(text, str) else text)


def byte_tokenizer():
    """An `llguidance.LLTokenizer` over the 256 bytes."""
    import llguidance

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteVocabulary()), n_vocab=257, eos_token=END)
