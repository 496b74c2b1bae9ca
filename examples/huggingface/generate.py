"""Continue a text with an exported model.

python examples/huggingface/generate.py MODEL "The river" --max-new-tokens 50
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_bfp.console import say


def generate(folder: str, prompt: str, max_new_tokens: int, temperature: float) -> str:
    """A text and its continuation.

    Args:
        folder: of a model that transformers loads.
        temperature: 0 takes the likeliest token each time.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling)
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Print what the model writes."""
    parser = argparse.ArgumentParser(description="Continue a text with an exported model.")
    parser.add_argument("model", metavar="MODEL", help="folder of the model")
    parser.add_argument("prompt", metavar="TEXT", help="the text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=50, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: no sampling (the default)")
    options = parser.parse_args(argv)
    say(generate(options.model, options.prompt, options.max_new_tokens, options.temperature))


if __name__ == "__main__":
    main()
