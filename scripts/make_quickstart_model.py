"""Make the small model that the `quickstart` recipe starts from.

In: a seed. Out: a Hugging Face folder with a character-level tokenizer and a Llama-type model that has read random arithmetic expressions
and so writes well-formed answers to countdown puzzles, but finds the target only sometimes. It has never been shown how to search for a
solution, and never any numbers of the held-out puzzles.
"""

import argparse
import random
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from brorl.prompts import CountdownPuzzle, countdown_puzzles, split_countdown

CHARACTERS = "0123456789+-*/() >:"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: one token a character, `<bos>` before every text."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def build_model(vocab_size: int, hidden: int, layers: int, heads: int, kv_heads: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=hidden * 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
        initializer_range=0.05,
    ))


def random_expression(numbers, rng):
    """Random expression over all numbers in random order; returns text, (p, q)."""
    items = [(str(n), n, 1, 9) for n in numbers]
    while len(items) > 1:
        i = rng.randrange(len(items)); a = items.pop(i)
        j = rng.randrange(len(items)); b = items.pop(j)
        op = rng.choice("+-*/")
        (s, p, q, pr), (t, r, u, ps) = a, b
        level = 1 if op in "+-" else 2
        if pr < level: s = f"({s})"
        if ps < level or (ps == level and op in "-/"): t = f"({t})"
        if op == "+": v = (p * u + r * q, q * u)
        elif op == "-": v = (p * u - r * q, q * u)
        elif op == "*": v = (p * r, q * u)
        else:
            if r == 0: return None
            v = (p * u, q * r)
        items.append((f"{s}{op}{t}", v[0], v[1], level))
    return items[0][0], items[0][1], items[0][2]
