"""Room beside the rows of a matrix, for a few more columns that a product reads with the others.

    x (N, F), the first columns of a buffer (N, F + room)

The kernel that computes x leaves the room, and says so by an attribute of the tensor, which modules
and autograd pass on unchanged. Whoever takes the room owns it: nobody else writes there.
"""

from collections.abc import Sequence

from torch import Tensor

NAME = "room_beside_rows"


def empty_with_room(shape: Sequence[int], room: int, like: Tensor) -> Tensor:
    """Return an uninitialised tensor of a shape (..., F), with room beside each row."""
    if not room:
        return like.new_empty(shape)
    return like.new_empty(*shape[:-1], shape[-1] + room)[..., : shape[-1]]


def leave_room(x: Tensor, room: int) -> None:
    """Say that x (..., F) has room beside its rows that nobody uses."""
    if room:
        setattr(x, NAME, room)


def take_room(x: Tensor) -> int:
    """Return the room that was left beside x, which nobody else gets then; 0 where none was."""
    if not hasattr(x, NAME):
        return 0
    room = vars(x).pop(NAME)
    # x.data may have been replaced since, by rows of another matrix
    return room if x.stride(-2) == x.shape[-1] + room else 0


def with_columns(x: Tensor, count: int) -> Tensor:
    """Return x (N, F) with some columns of the room beside it, (N, F + count)."""
    # .data: what is written there is not a change of x, which autograd would see
    return x.data.as_strided((len(x), x.shape[1] + count), x.stride())


def beside(x: Tensor, columns: Tensor) -> Tensor:
    """Write columns (N, C) into the room beside x (N, F); return both as one (N, F + C)."""
    both = with_columns(x, columns.shape[1])
    both[:, x.shape[1] :].copy_(columns)
    return both


def flat_rows(x: Tensor) -> Tensor:
    """Return x (..., F) as (N, F) with features side by side: a view where the rows allow it."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def with_room(x: Tensor, room: int) -> Tensor:
    """Return a copy of x (..., F) with room beside its rows; x itself where none is asked for."""
    return empty_with_room(x.shape, room, x).copy_(x) if room else x
