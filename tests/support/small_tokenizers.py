"""Small tokenizers of the three kinds that language models have; their tokens begin and end anywhere in a text."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ["<eos>", "<|user|>"]
TEXTS = [
    "Question: 1+2?\nAnswer: é 3\n\nQuestion: ü\n\n",
    "a\n\nb  c\n\n\nd. Question:Question: 日本語。日本。\n",
    "Ans\nwer: don't. Stop!  Stop !\n \nQuestion 漢字 :",
]


def byte_level() -> PreTrainedTokenizerBase:
    """The tokenizer of GPT-2, Llama 3 and Qwen: tokens are bytes, so a character can be split over several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _wrapped(tokenizer)


def sentencepiece() -> PreTrainedTokenizerBase:
    """The tokenizer of Llama 2 and Mistral: spaces are in the tokens, the first is dropped, unknown text is bytes."""
    pieces = ["▁", "▁Question", "Question", "Q", "uestion", ":", "▁:", "a", "▁a", "n", "s", "w", "er", "▁Stop", "!"]
    pieces += ["é", "▁▁", ".", "▁.", "日", "。", "don", "'t", "t", "o", "1", "▁1", "Ans", ":▁"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    return _wrapped(tokenizer)


def word_pieces() -> PreTrainedTokenizerBase:
    """The tokenizer of BERT: spaces are put between tokens, and removed again before punctuation."""
    pieces = ["Question", "Que", "##stion", ":", "##:", "a", "##a", ".", "!", "do", "n", "'"]
    pieces += ["##t", "n't", "Stop", "1", "é"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, "[UNK]", *pieces])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return _wrapped(tokenizer, clean_up_tokenization_spaces=True)


def _wrapped(tokenizer: Tokenizer, **options: bool) -> PreTrainedTokenizerBase:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", **options)


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "word_pieces": word_pieces,
}

# Stop strings that a response of each tokenizer can have, of characters that its tokens split too.
STOPS = {
    "byte_level": ["\n\n", "Question:", "é", "日", "漢", " Q", "n ", "d"],
    "sentencepiece": ["Question:", "é", "日", " Q", "n ", "\n", "a"],
    "word_pieces": ["Stop!", "don't", "é", "a 1", "Question do"],
}
