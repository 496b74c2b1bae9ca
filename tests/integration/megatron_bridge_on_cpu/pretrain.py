import sys
import on_cpu
from recipe import small_recipe
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron_bfp.integrations.megatron_bridge import BFPDatasetProvider

cfg = small_recipe(sys.argv[1:])
cfg.dataset = BFPDatasetProvider.of(cfg.dataset)
pretrain(cfg, forward_step)
