"""How the rows of one optimizer step are cut into micro-batches. Pure: no torch, no I/O."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """One optimizer step: `batch_size` x `world_size` x `grad_accum` rows.

    Packed rows share sequences, so the same rows take fewer and smaller micro-batches.

    >>> step = Layout(batch_size=4, grad_accum=8, world_size=1, max_seq_len=2048)
    >>> step.rows_per_step, step.micro_batches, step.sequences
    (32, 8, 4)
    >>> packed = step.packed(fullest_step=9)  # 2 micro-batches of 4 hold 8 sequences, 3 of 3 hold 9
    >>> packed.rows_per_step, packed.micro_batches, packed.sequences
    (32, 3, 3)
    """

    batch_size: int  # rows of a micro-batch on one rank
    grad_accum: int  # micro-batches of a rank and step, before packing
    world_size: int
    max_seq_len: int  # tokens
    checkpointed_layers: int = 0  # the first ones of the model, recomputed in the backward pass
    fullest_step: int | None = None  # sequences of the fullest packed step; None: not packed
    in_one_row: bool = False  # the packed documents of a micro-batch, without a row's padding
    pair_cost: float = 0.0  # of attention between two tokens, in what else a token costs
    waits_each_micro_batch: bool = False  # ranks for each other; else once a step, as under DDP

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step on all ranks: the effective batch."""
        return self.batch_size * self.grad_accum * self.world_size

    @property
    def is_packed(self) -> bool:
        return self.fullest_step is not None

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank and step: packed, as few as hold the fullest step."""
        if self.fullest_step is None:
            return self.grad_accum
        return -(-self.fullest_step // (self.batch_size * self.world_size))

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch at most: packed, as few as that many micro-batches allow."""
        if self.fullest_step is None:
            return self.batch_size
        return -(-self.fullest_step // (self.micro_batches * self.world_size))

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch at most."""
        return self.sequences * self.max_seq_len

    @property
    def mean_tokens(self) -> float:
        """Tokens of a micro-batch, averaged over those of the fullest step."""
        if self.fullest_step is None:
            return self.tokens
        return self.fullest_step * self.max_seq_len / (self.micro_batches * self.world_size)

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier micro-batches are held while the next one is computed."""
        return self.micro_batches > 1

    def packed(self, fullest_step: int) -> "Layout":
        """Return the layout that packs the same rows into at most `fullest_step` sequences."""
        return replace(self, fullest_step=fullest_step)

    def unpacked(self) -> "Layout":
        """Return the layout in which each row is a sequence."""
        return replace(self, fullest_step=None)
