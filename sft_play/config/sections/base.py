"""The base class of the config's sections, and the number types of their fields."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
# Limits of the libraries, and of rows that a plan can go through; messages name them if exceeded
MOST = 2**31 - 1  # torch counts tokens of packed rows in int32
MOST_ROWS = 2**20
MOST_SEED = 2**32 - 1  # numpy takes no larger one
PositiveInt = Annotated[int, Field(ge=1, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Epochs = Annotated[float, Field(gt=0, le=MOST_ROWS)]


class Section(BaseModel):
    """A section of the config: unknown keys are errors, values are checked and then frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    def changed(self, values: dict[str, Any]) -> Self:
        """Return a copy with other values at dotted names, which are not checked."""
        found = self
        for path, value in values.items():
            name, _, rest = path.partition(".")
            if rest:
                value = getattr(found, name).changed({rest: value})
            found = found.model_copy(update={name: value})
        return found
