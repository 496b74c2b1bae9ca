"""Python imports this at start-up when its folder is on PYTHONPATH: it lets Megatron-LM run where there is no GPU.

Only the ranks that a launcher started are changed (they have RANK), and nothing of the part under test: devices named
cuda become the CPU, and what asks the CUDA runtime a question gets an answer that changes no number. Modules of
Megatron-LM that need a GPU, or a package that does, are changed when they are imported.
"""

import os

if "RANK" in os.environ:
    import cuda_on_cpu
    import layers_on_cpu

    cuda_on_cpu.install()
    layers_on_cpu.install()
