"""What every section of a recipe is made of: checked, unchanging data, and numbers as people write them. No torch."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Name = Annotated[str, Field(min_length=1)]  # a hub id, a folder, a file, or a name that we ship


class Section(BaseModel):
    """A recipe section: unknown keys are errors, values are checked, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _scientific_whole_numbers(cls, data: Any) -> Any:
        """``steps: 1e3`` is a string to PyYAML and, unlike for a number with a fraction, to pydantic too."""
        if not isinstance(data, dict):
            return data
        whole = {name for name, field in cls.model_fields.items() if field.annotation in (int, int | None)}
        return {key: read_numbers(value) if key in whole else value for key, value in data.items()}


def read_numbers(value: Any) -> Any:
    """`value` with the strings that mean a number in scientific notation (``"1e-4"``) read as numbers, at any depth.

    PyYAML wants a dot and a sign (``1.0e-4``); a typed field coerces such a string, a free mapping needs this.
    """
    if isinstance(value, dict):
        return {key: read_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [read_numbers(item) for item in value]
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value):
        return float(value)
    return value


FreeMapping = Annotated[dict[str, Any], BeforeValidator(read_numbers)]
