"""The character tokenizer of nano-K3: the id of a printable ASCII character is its code, the first ids are special.

0 `<pad>`, 1 `<bos>`, 2 `<eos>`, 3 `<mask>` (the drafter's), 4 `<unk>`, 10 newline, 32..126 printable ASCII; the rest is unused.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, processors

from kimi_k3_decode.config import NANO

PAD, BOS, EOS, MASK, UNK = 0, 1, 2, 3, 4
SPECIAL = {PAD: "<pad>", BOS: "<bos>", EOS: "<eos>", MASK: "<mask>", UNK: "<unk>"}
CHARACTERS = (10, *range(32, 127))


def build_tokenizer() -> Tokenizer:
    """A `tokenizers` object with `NANO.vocab_size` entries; `encode` puts `<bos>` first, `decode` skips special tokens."""
    vocab = {}
    for index in range(NANO.vocab_size):
        vocab[SPECIAL.get(index) or (chr(index) if index in CHARACTERS else f"<unused{index}>")] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=SPECIAL[UNK]))
    tokenizer.add_special_tokens([SPECIAL[i] for i in sorted(SPECIAL)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def save_tokenizer(path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    build_tokenizer().save(str(temporary))
    os.replace(temporary, path)


def encode(text: str) -> np.ndarray:
    """Ids of a text without `<bos>`, uint8; the fast path of training, equal to the tokenizer's (tested)."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    return np.where((codes == 10) | ((codes >= 32) & (codes < 127)), codes, UNK).astype(np.uint8)
