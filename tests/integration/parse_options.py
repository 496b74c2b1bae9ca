"""Parse and validate command lines with a Megatron's own parser, as its pretrain_gpt.py does when it starts.

Usage: python -m megatron_bfp parse_options.py FILE --data-impl bfp: FILE holds a list of lists of options in JSON, the
checkout is on PYTHONPATH. The plugin looks at --data-impl when it starts, as for a training script.
"""

import json
import sys

file_path, data_impl = sys.argv[1], sys.argv[3]
try:
    from megatron.training.arguments import parse_args, validate_args
except ImportError:  # Megatron-DeepSpeed
    from megatron.arguments import parse_args, validate_args

taken_off = (
    "--data-impl" not in sys.argv
)  # the plugin takes --data-impl mmap away from Megatron-LM, which does not know it
with open(file_path, encoding="utf-8") as file:
    command_lines = json.load(file)
for options in command_lines:
    if taken_off:
        index = options.index("--data-impl")
        del options[index : index + 2]
    sys.argv[1:] = options
    arguments = parse_args()
    validate_args(arguments, {"tokenizer_type": "GPT2BPETokenizer"})
    print("accepted", data_impl, arguments.seq_length, arguments.global_batch_size)
