"""Small tokenizers of the usual kinds, made in a moment, each with its library called as Megatron-LM calls it."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from helpers.datasets import DATA
from helpers.texts import code_files

TEXTS = [
    "the river",
    "def write(self, path):\n    return path  # to the river\n",
    "Two  spaces,\ttabs and\n\nlines; 12345 numbers.",
    "é 日本語 \U0001f600 ﬁ",
    "x" * 300,
    "a",
]
SPACE = "\u2581"
SOURCES = code_files()


@dataclass
class Kind:
    """A tokenizer on disk.

    Attributes:
        ours, theirs: options of our tool and of Megatron's, ``--append-eod`` aside.
        library: token ids of a text, by the library as Megatron calls it.
        eod: the id that ``--append-eod`` appends.
        config: its folder's ``tokenizer_config.json``.
    """

    name: str
    ours: list[str]
    theirs: list[str]
    library: Callable[[str], list[int]]
    eod: int
    config: dict = field(default_factory=dict)

    def document(self, text):
        """What a document is with ``--append-eod``: never two EODs at its end."""
        ids = self.library(text)
        return [*(ids[:-1] if ids[-1] == self.eod else ids), self.eod]


def byte_level(folder, name, special, template=None, config=None, ordinary=()):
    """As GPT-2's, Llama 3's, Qwen's."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(SOURCES[:6], trainer)
    library.add_tokens(list(ordinary))
    if template:
        ids = [(token, library.token_to_id(token)) for token in special]
        library.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=template, special_tokens=ids),
            ]
        )
    return save(folder, name, library, {"tokenizer_class": "PreTrainedTokenizerFast"} | (config or {}))


def marked_spaces(folder, name, config, normalizer, pre_tokenizer=None):
    """As Llama 2's and Gemma's: characters that are no token are bytes, and the post-processor adds a BOS."""
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    special = ["<unk>", config["bos_token"], config["eos_token"]]
    library.train_from_iterator(
        SOURCES[:6],
        trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False),
    )
    description = json.loads(library.to_str())
    vocabulary = description["model"]["vocab"]
    bytes_at = [f"<0x{byte:02X}>" for byte in range(256)]
    described = {token: number + (256 if number > 2 else 0) for token, number in vocabulary.items()}
    described |= {token: number + 3 for number, token in enumerate(bytes_at)}
    description["model"] |= {"vocab": described, "byte_fallback": True, "fuse_unk": True}
    description["pre_tokenizer"] = None
    library = tokenizers.Tokenizer.from_str(json.dumps(description))
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    library.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    library.post_processor = processors.TemplateProcessing(single=f"{special[1]} $A", special_tokens=[(special[1], 1)])
    return save(folder, name, library, config)


def save(folder, name, library, config):
    """A folder as model repositories have it."""
    path = folder / name
    path.mkdir()
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    eos = config.get("eos_token") or config["sep_token"]
    options = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(path)]
    call = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    return Kind(name, options, options, lambda text: call.encode(text).ids, call.token_to_id(eos), config)


def pairs(folder, name, post_processor, config):
    """As RoBERTa's and BERT's: tokens before and after a text."""
    kind = byte_level(folder, name, ["<s>", "</s>"], config=config)
    path = folder / name / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    library.post_processor = post_processor
    library.save(str(path))
    call = tokenizers.Tokenizer.from_file(str(path))
    kind.library = lambda text: call.encode(text).ids
    return kind


def of_fault(folder):
    """The one that people sent."""
    library = tokenizers.Tokenizer.from_file(str(DATA / "bos_tokenizer.json"))
    return save(folder, "fault", library, {"eos_token": "<eod>", "tokenizer_class": "PreTrainedTokenizerFast"})


def sentencepiece(folder, name, *options, add_bos=False, tokenizer_type="SentencePieceTokenizer", **training):
    """Megatron's tool calls ``encode_as_ids``, which adds nothing; ``--append-bos`` is the library's ``add_bos``."""
    import sentencepiece as library

    path = str(folder / f"{name}.model")
    lines = [line for text in SOURCES for line in text.splitlines()]
    defaults = {"vocab_size": 500, "model_type": "bpe", "byte_fallback": True}
    with open(path, "wb") as file:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, minloglevel=2, **(defaults | training)
        )
    processor = library.SentencePieceProcessor()
    processor.Load(path)
    common = ["--tokenizer-type", tokenizer_type, "--tokenizer-model", path]
    return Kind(
        name,
        [*common, *options],
        common,
        lambda text: processor.encode(text, add_bos=add_bos) if add_bos else processor.encode_as_ids(text),
        processor.eos_id(),
    )


def tiktoken(folder, in_megatrons_form):
    """Megatron's JSON, with its special tokens first, or a ``.tiktoken`` file."""
    import tiktoken as library

    source = tokenizers.Tokenizer.from_file(str(folder / "byte-level" / "tokenizer.json"))
    alphabet = {character: byte for byte, character in enumerate(_byte_characters())}
    tokens = [bytes(alphabet[character] for character in source.id_to_token(number)) for number in range(1, 500)]
    single = [bytes([byte]) for byte in range(256)]
    tokens = [*single, *(token for token in tokens if len(token) > 1)]
    from megatron_bfp.tokenizers.tiktoken import MEGATRON_SPECIAL_TOKENS, PATTERNS

    common = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model"]
    if in_megatrons_form:
        path = folder / "vocab.json"
        path.write_text(
            json.dumps(
                [
                    {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
                    for rank, token in enumerate(tokens)
                ]
            )
        )
        names = [*MEGATRON_SPECIAL_TOKENS, *(f"<SPECIAL_{number}>" for number in range(7, 20))]
        special = {name: number for number, name in enumerate(names)}
        ranks = {token: rank + 20 for rank, token in enumerate(tokens)}
        size = str(20 + len(tokens))
        options = [*common, str(path), "--tiktoken-num-special-tokens", "20", "--vocab-size", size]
        pattern, eod = "v2", 2
    else:
        path = folder / "small.tiktoken"
        lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
        path.write_text("".join(lines))
        special, ranks = {"<|endoftext|>": len(tokens)}, {token: rank for rank, token in enumerate(tokens)}
        options = [*common, str(path), "--tiktoken-pattern", "cl100k_base"]
        options += ["--tiktoken-special-tokens", "<|endoftext|>"]
        pattern, eod = "cl100k_base", len(tokens)
    call = library.Encoding("x", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=special)
    name = "tiktoken in Megatron's form" if in_megatrons_form else "tiktoken"
    theirs = options if in_megatrons_form else []
    return Kind(name, options, theirs, lambda text: call.encode(text, allowed_special="all"), eod)


def _byte_characters():
    from megatron_bfp.tokenizers.huggingface import byte_level_alphabet

    characters = {byte[0]: character for character, byte in byte_level_alphabet().items()}
    return [characters[byte] for byte in range(256)]


def make_zoo(folder):
    """All of them, below a folder."""
    llama = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    end = {"eos_token": "<|end|>"}
    return [
        byte_level(folder, "byte-level", ["<|end|>"], config=end | {"tokenizer_class": "GPT2Tokenizer"}),
        byte_level(
            folder, "byte-level with BOS", ["<|begin|>", "<|end|>"], "<|begin|> $A", end | {"bos_token": "<|begin|>"}
        ),
        byte_level(folder, "BOS is EOS", ["<|end|>"], "<|end|> $A", end | {"bos_token": "<|end|>"}),
        byte_level(folder, "two tokens before", ["<a>", "<b>", "<|end|>"], "<a> <b> $A", end),
        byte_level(folder, "ordinary added tokens", ["<|end|>"], config=end, ordinary=["self", "river"]),
        of_fault(folder),
        marked_spaces(
            folder, "Llama", {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}, llama
        ),
        marked_spaces(
            folder,
            "Gemma",
            {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>"},
            normalizers.Replace(" ", SPACE),
            pre_tokenizers.Split(" ", "merged_with_previous"),
        ),
        pairs(
            folder,
            "RoBERTa",
            processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=False, add_prefix_space=False),
            {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"},
        ),
        pairs(
            folder,
            "BERT",
            processors.BertProcessing(("</s>", 1), ("<s>", 0)),
            {"cls_token": "<s>", "sep_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"},
        ),
        sentencepiece(folder, "SentencePiece"),
        sentencepiece(folder, "SentencePiece unigram", model_type="unigram", byte_fallback=False),
        sentencepiece(folder, "SentencePiece with add_bos", "--append-bos", add_bos=True),
        sentencepiece(folder, "Llama 2", tokenizer_type="Llama2Tokenizer"),
        sentencepiece(folder, "GPTSentencePieceTokenizer", tokenizer_type="GPTSentencePieceTokenizer"),
        tiktoken(folder, in_megatrons_form=True),
        tiktoken(folder, in_megatrons_form=False),
    ]
