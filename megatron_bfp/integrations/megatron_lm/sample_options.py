"""Options of Megatron-LM that say where samples come from, which of them are read, and what they are made of: rows of
``option_table``."""

from ..option_table import NotNeeded, Refused, Row, Source, Works

_DATA = "tests/integration/test_real_megatron_lm_data.py::"
_OPTIONS = "tests/integration/test_real_megatron_lm_options.py::"

OF_SAMPLES: tuple[Row, ...] = (
    Works(
        options=(
            "--per-split-data-args-path",
            "--full-validation",
            "--multiple-validation-sets",
            "--dataloader-fast-cache-load",
            "--dataloader-defer-npy-index-mmap",
        ),
        shown_by=(_DATA + "test_options_of_data_keep_their_meaning",),
    ),
    Works(
        options=("--data-args-path", "--num-dataset-builder-threads"),
        shown_by=(_DATA + "test_2500_corpora_are_ready_in_30_seconds",),
    ),
    Works(
        options=("--no-mmap-bin-files",),
        how="for file systems that cannot map files",
        shown_by=(
            "tests/indexed_dataset/test_memory_maps.py::test_fault_B10_a_refused_map_of_the_bin_names_the_file_and_the_option",
            _OPTIONS + "test_losses_stay_the_same",
        ),
    ),
    Works(
        options=("--iterations-to-skip",),
        how="their samples count as read",
        shown_by=(_OPTIONS + "test_iterations_that_are_skipped_take_their_samples",),
    ),
    Works(
        options=("--eod-mask-loss",),
        shown_by=("tests/integration/test_real_megatron_lm.py::test_the_first_loss_is_that_of_the_chunks_alone",),
    ),
    NotNeeded(
        options=("--reset-attention-mask",),
        why="attention always stays inside documents",
        shown_by=(_OPTIONS + "test_losses_stay_the_same",),
    ),
)
"""In the order of the documentation."""

OF_OTHER_SAMPLES: tuple[Row, ...] = (
    Refused(
        options=("--fim-data",),
        why="it rearranges samples after they were packed, cuts what became too long and pads what became too short",
        instead="give --fim-rate without it",
        shown_by=(Source("megatron.training.datasets.fim_dataset:GPTFIMDataset", "sample = sample[:sample_len]"),),
    ),
    Refused(
        options=("--fim-split-sample", "--fim-fragment-rate", "--fim-no-prefix"),
        why="packing rearranges documents as wholes, by tokens",
        instead="leave it out",
        shown_by=(
            Source(
                "megatron.training.datasets.fim_dataset:GPTFIMDataset",
                "fragment_breaks = np.argwhere(sequence == self.fim_split_sample)",
            ),
        ),
    ),
    Refused(
        options=("--sft",),
        why="its samples are conversations, packed by its own dataset",
        shown_by=(
            Source(
                "megatron.training.datasets.sft_dataset:SFTDataset",
                "split_conversations = self._split_conversations(merged_conversations)",
            ),
        ),
    ),
    Refused(
        options=("--perform-rl-step",),
        why="it makes its own samples",
        shown_by=(
            Source("megatron.training.training:train", "train_data_iterator = rl_utils.get_grpo_data_iterator("),
        ),
    ),
    Refused(
        options=("--mock-data",),
        why="there are no documents to pack",
        instead="give --data-path in its place",
        shown_by=(
            Source(
                "megatron.core.datasets.gpt_dataset:MockGPTDataset", "return MockGPTLowLevelDataset(config.tokenizer)"
            ),
        ),
    ),
)
"""Samples that are not documents of the dataset, as they are."""
