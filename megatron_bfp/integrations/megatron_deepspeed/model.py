"""Document boundaries through Megatron-DeepSpeed's model, from the batch to attention and loss.

Everything that a micro-batch needs travels as one tensor in place of the attention mask, an argument of every forward
pass: int32 [b, L + 2], in each row a sample's ``cu_seqlens`` and the number of targets of the micro-batch.
Recomputation saves it with the other arguments and pipelines send it on with the hidden states, so a pass that runs
again later, or in another stage, has the boundaries of its own micro-batch. Attention turns it into what its kernel
needs.

The functions from ``broadcast_with_boundaries`` on take a function of Megatron-DeepSpeed, which their docstrings name
first, and return its replacement.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...attention.boundaries import Boundaries
from ...errors import IntegrationError
from .options import parsed_options

BATCH_KEYS = ["text", "cu_seqlens", "loss_mask"]

TINY = 1e-20
"""The loss mask's only entry if a micro-batch has no target, because Megatron-DeepSpeed divides by the mask's sum."""


class MicroBatch:
    """What the layers make of a micro-batch's boundaries, made once and not in every layer.

    Args:
        tensor: int32 [b, L + 2], see the module.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the same memory with the same content. ``self`` keeps that memory alive, so no tensor
        of another micro-batch can be in it."""
        return (
            tensor.data_ptr() == self.tensor.data_ptr()
            and tensor.shape == self.tensor.shape
            and tensor.device == self.tensor.device
            and tensor._version == self.version
        )

    @cached_property
    def joined(self) -> Boundaries:
        """The boundaries of all rows, joined. On a GPU the host waits once."""
        return Boundaries.of_rows(self.tensor[:, :-1])

    @cached_property
    def mask(self) -> Tensor:
        """bool [b, 1, L, L]: True where a query (third axis) must not see a key (fourth axis)."""
        return dense_mask(self.tensor[:, :-1])


def dense_mask(cu_seqlens: Tensor) -> Tensor:
    """Megatron-DeepSpeed's attention mask of a micro-batch.

    Args:
        cu_seqlens: int [b, L + 1].

    Returns:
        bool [b, 1, L, L]: True where attention is masked.
    """
    chunk = chunk_of_positions(cu_seqlens)
    same = chunk[:, :, None] == chunk[:, None, :]
    return ~same.tril_()[:, None]


def chunk_of_positions(cu_seqlens: Tensor) -> Tensor:
    """int64 [b, L]: which chunk of its row each position is in, counted from 1; padding counts as a chunk.

    Args:
        cu_seqlens: int [b, L + 1].
    """
    positions = torch.arange(cu_seqlens.shape[1] - 1, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.contiguous(), positions.expand(len(cu_seqlens), -1).contiguous(), right=True)


_latest: MicroBatch | None = None


def micro_batch_of(tensor: Any) -> MicroBatch:
    """The micro-batch whose boundaries came to a layer as its attention mask.

    Raises:
        IntegrationError: no boundaries came.
    """
    global _latest
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32 or tensor.dim() != 2:
        raise IntegrationError(
            "attention got no document boundaries: this script does not pass on the attention mask that "
            "get_ltor_masks_and_position_ids of megatron.utils returns"
        )
    latest = _latest
    if latest is None or not latest.is_of(tensor):
        latest = _latest = MicroBatch(tensor)
    return latest


class TokensAndLabels:
    """A batch's ``text`` with targets only, where the label of a document's last input is not the next input.

    Scripts take tokens and labels as slices of ``text``. This gives both slices, and refuses everything else.

    Args:
        text: int64 [b, L + 1], the tokens and one more.
        labels: int64 [b, L].
    """

    def __init__(self, text: Tensor, labels: Tensor) -> None:
        self._tokens, self._labels = text[:, :-1], labels

    def long(self) -> "TokensAndLabels":
        """This: its tensors are int64."""
        return self

    def __getitem__(self, index: Any) -> Tensor:
        """The tokens for ``[:, :-1]``, the labels for ``[:, 1:]``.

        Raises:
            IntegrationError: something else is asked for.
        """
        if index == (slice(None), slice(None, -1)):
            return self._tokens
        if index == (slice(None), slice(1, None)):
            return self._labels
        raise IntegrationError(
            "--targets-only: the script takes tokens and labels in another way than text[:, :-1] and text[:, 1:]"
        )

    def __getattr__(self, name: str) -> Any:
        raise IntegrationError(f"--targets-only: the script takes its tokens and labels by text.{name}")


class _Pending:
    """What ``broadcast_data`` received for the masks that are made next in the same ``get_batch``; taken once."""

    def __init__(self) -> None:
        self.received: tuple[Tensor, Tensor] | None = None

    def put(self, cu_seqlens: Tensor, loss_mask: Tensor) -> None:
        if self.received is not None:
            raise IntegrationError(
                "the script received a second batch before get_ltor_masks_and_position_ids was called for the first"
            )
        self.received = cu_seqlens, loss_mask

    def take(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        received, self.received = self.received, None
        if received is None or received[1].shape != shape:
            raise IntegrationError(
                "get_ltor_masks_and_position_ids was called for tokens that broadcast_data did not receive just before"
            )
        return received


_pending = _Pending()

readers: list[Callable[[Tensor], None]] = []
"""Called with the boundaries of each batch, int [b, L + 1]; for the check in the first training step."""


def broadcast_with_boundaries(broadcast_data: Callable) -> Callable:
    """``broadcast_data``: receive two more tensors with every batch."""

    def broadcast(keys: list[str], data: dict[str, Tensor] | None, datatype: torch.dtype) -> dict[str, Tensor]:
        if list(keys) != BATCH_KEYS[:1]:
            raise IntegrationError(f"--data-impl bfp is for GPT batches with the key 'text', the script wants {keys}")
        if data is not None and not set(BATCH_KEYS) <= data.keys():
            raise IntegrationError("the script makes its own samples instead of using build_train_valid_test_datasets")
        has_labels = parsed_options().targets_only if data is None else "labels" in data
        batch = broadcast_data([*BATCH_KEYS, "labels"] if has_labels else BATCH_KEYS, data, datatype)
        _pending.put(batch.pop("cu_seqlens"), batch.pop("loss_mask"))
        if has_labels:
            batch["text"] = TokensAndLabels(batch["text"], batch.pop("labels"))
        return batch

    return broadcast


def masks_from_boundaries(_: Callable) -> Callable:
    """``get_ltor_masks_and_position_ids``: make masks and positions from the boundaries of a batch, never from the
    values of its tokens."""

    def get_ltor_masks_and_position_ids(
        data: Tensor,
        eod_token: int,
        reset_position_ids: bool,
        reset_attention_mask: bool,
        eod_mask_loss: bool,
        skip_mask: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cu_seqlens, loss_mask = _pending.take(data.shape)
        for read in readers:
            read(cu_seqlens)
        loss_mask = loss_mask.float()
        if eod_mask_loss:
            loss_mask = loss_mask * (data != eod_token)
        targets = loss_mask.sum()
        loss_mask[0, 0] += TINY * (targets == 0)
        column = targets.to(torch.int32).expand(len(data), 1)
        boundaries = torch.cat([cu_seqlens.to(torch.int32), column], dim=1)
        return boundaries, loss_mask, _positions(cu_seqlens, reset_position_ids)

    return get_ltor_masks_and_position_ids


def _positions(cu_seqlens: Tensor, reset: bool) -> Tensor:
    """int64 [b, L]: 0 .. L - 1, or from 0 in every chunk."""
    rows, length = cu_seqlens.shape[0], cu_seqlens.shape[1] - 1
    positions = torch.arange(length, device=cu_seqlens.device).expand(rows, -1)
    if reset:
        positions = positions - cu_seqlens.gather(1, chunk_of_positions(cu_seqlens) - 1)
    return positions


_inside: ContextVar[MicroBatch | None] = ContextVar("micro-batch of the attention that is running", default=None)
"""FlashSelfAttention's forward, which DeepSpeed's sequence parallelism also calls, has no argument for boundaries."""


@contextmanager
def _attending(micro_batch: MicroBatch) -> Iterator[None]:
    token = _inside.set(micro_batch)
    try:
        yield
    finally:
        _inside.reset(token)


def attend_inside_documents(forward: Callable) -> Callable:
    """``ParallelAttention.forward``: take the boundaries that came as the mask, and give the kernel what it needs."""

    def attention_forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor,
        encoder_output: Any = None,
        inference_params: Any = None,
        rotary_pos_emb: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        micro_batch = micro_batch_of(attention_mask)
        if rotary_pos_emb is not None and not self.enable_ds_sequence_parallel:
            rotary_pos_emb = (rotary_pos_emb, rotary_pos_emb)  # one table for queries, one for keys
        mask = None if self.use_flash_attn else micro_batch.mask
        with _attending(micro_batch):
            return forward(self, hidden_states, mask, encoder_output, inference_params, rotary_pos_emb)

    return attention_forward


def rotate_by_table(_: Callable) -> Callable:
    """``apply_rotary_pos_emb``: rotate by the positions of the whole sequence.

    Megatron-DeepSpeed's RotaryEmbedding gives cosines and sines; its own function takes the cosines for the angles of
    queries and the sines for those of keys. Under DeepSpeed's sequence parallelism DeepSpeed rotates, by both.
    """

    def apply_rotary_pos_emb(t: Tensor, freqs: tuple[Tensor, Tensor]) -> Tensor:
        if isinstance(freqs, Tensor):
            raise IntegrationError("rotary positions came as a tensor, not as cosines and sines of each position")
        cosines, sines = (table[: t.shape[0]].to(t.dtype) for table in freqs)
        rotated, kept = t[..., : cosines.shape[-1]], t[..., cosines.shape[-1] :]
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * cosines + torch.cat((-second, first), dim=-1) * sines
        return torch.cat((rotated, kept), dim=-1)

    return apply_rotary_pos_emb


def keep_rotary_table(_: Callable) -> Callable:
    """``update_rotary_pos_emb``: keep the cosines and sines that a pipeline's layers rotate by. The original takes the
    pair for a tensor, and fails."""

    def update_rotary_pos_emb(seq_length: int) -> None:
        from megatron.model.rotary_pos_embedding import RotaryEmbedding

        args = parsed_options()
        head_size = args.hidden_size // args.num_attention_heads if args.kv_channels is None else args.kv_channels
        cosines, sines = RotaryEmbedding(int(head_size * args.rotary_percent), theta=args.rope_theta)(seq_length)
        args.rotary_pos_emb = cosines.to(args.params_dtype), sines.to(args.params_dtype)

    return update_rotary_pos_emb


def attend_with_varlen_kernel(_: Callable) -> Callable:
    """``FlashSelfAttention.forward``: flash-attn's varlen kernel, version 1 or 2, on the joined rows."""

    def flash_forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        micro_batch = _inside.get()
        rows, length = q.shape[:2]
        if micro_batch is None or micro_batch.joined.offsets[-1] != rows * length:
            raise IntegrationError("flash attention was called for other tokens than those whose boundaries came")
        boundaries = micro_batch.joined
        output = self.flash_attn_func(
            *(tensor.flatten(0, 1) for tensor in (q, k, v)),
            boundaries.cu_seqlens,
            boundaries.cu_seqlens,
            boundaries.max_seqlen,
            boundaries.max_seqlen,
            self.dropout_p if self.training else 0.0,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
        )
        return output.unflatten(0, (rows, length))

    return flash_forward


def embed_and_pass_on(forward: Callable) -> Callable:
    """``EmbeddingPipe.forward``, a pipeline's first layer: hand the boundaries to the layers behind it."""

    def embedding_forward(self: Any, inputs: tuple[Tensor, ...], **keywords: Any) -> tuple[Tensor, Tensor]:
        return forward(self, inputs, **keywords), inputs[2]

    return embedding_forward


def pass_on_until_the_last_layer(num_layers: Callable[[], int]) -> Callable[[Callable], Callable]:
    """``ParallelTransformerLayerPipe.forward``: hand the boundaries on behind the hidden states. The original does so
    too, but not if it also gets the loss of experts; and what follows the last layer does not expect boundaries.

    Args:
        num_layers: returns the number of transformer layers of the whole model.
    """

    def make(forward: Callable) -> Callable:
        def layer_forward(self: Any, inputs: tuple[Tensor, ...], **keywords: Any) -> Tensor | tuple[Tensor, ...]:
            boundaries = inputs[1] if isinstance(inputs, tuple) and len(inputs) > 1 else None
            micro_batch_of(boundaries)
            outputs = forward(self, inputs, **keywords)
            hidden_states, *moe_loss = (tensor for tensor in outputs if tensor is not boundaries)
            if self.layer_number + 1 < num_layers():
                return hidden_states, boundaries, *moe_loss
            return (hidden_states, *moe_loss) if moe_loss else hidden_states

        return layer_forward

    return make


def no_loss_without_targets(forward: Callable) -> Callable:
    """``GPTModel.forward``: losses of 0 for a micro-batch without any target, whose loss mask is made up."""

    def model_forward(
        self: Any,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        retriever_input_ids: Any = None,
        retriever_position_ids: Any = None,
        retriever_attn_mask: Any = None,
        labels: Tensor | None = None,
        tokentype_ids: Any = None,
        inference_params: Any = None,
        curriculum_seqlen: Any = None,
    ) -> tuple[Tensor, Any]:
        output, *others = forward(
            self,
            input_ids,
            position_ids,
            attention_mask,
            retriever_input_ids,
            retriever_position_ids,
            retriever_attn_mask,
            labels,
            tokentype_ids,
            inference_params,
            curriculum_seqlen,
        )
        if self.post_process and labels is not None:
            output = output * (attention_mask[0, -1] > 0)
        return output, *others

    return model_forward


def no_pipeline_loss_without_targets(cross_entropy: Callable) -> Callable:
    """``CrossEntropy``, a pipeline's loss: 0 for a micro-batch without any target."""

    def cross_entropy_of_targets(output: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(output, labels) * (labels[1].sum() >= 1)

    return cross_entropy_of_targets
