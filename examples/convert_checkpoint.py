"""Convert a checkpoint into DeepSpeed's universal form: ``trainer/checkpoints/universal.py``. The trainer runs this.

python examples/convert_checkpoint.py --input_folder CKPT/iter_0001000 --output_folder CKPT/iter_0001000_universal
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.checkpoints.universal import main

if __name__ == "__main__":
    main()
