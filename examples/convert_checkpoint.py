"""Convert a checkpoint into DeepSpeed's universal form: ``trainer/convert.py``. The trainer runs it where it must.

python examples/convert_checkpoint.py --input_folder CKPT/iter_0001000 --output_folder CKPT/iter_0001000_universal
"""

from trainer.convert import main

if __name__ == "__main__":
    main()
