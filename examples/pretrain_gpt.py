"""Pre-train a GPT model with megatron-core and DeepSpeed on best-fit packed documents; the trainer is ``trainer/``.

deepspeed examples/pretrain_gpt.py --data-impl bfp --data-path PREFIX --tokenizer-model tokenizer.json ...
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.arguments import parse_arguments
from trainer.process import check_command_line

if __name__ == "__main__":
    check_command_line(parse_arguments, "pretrain_gpt")  # answered before torch is imported, which takes seconds
    from trainer.training import start

    start()
