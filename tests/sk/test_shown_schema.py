"""The schema of a call's parameters for a person: of the live function, with what Semantic Kernel's schema drops."""

import json
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from semantic_kernel.functions import KernelFunctionFromMethod, kernel_function

from planner_ext.sk.functions.toolset import tool_of


class Address(BaseModel):
    """Where somebody lives."""

    street: str
    zip: Annotated[int, Field(ge=1)] = 1


class Post:
    @kernel_function(description="Sends a parcel.")
    async def send(
        self,
        weight: Annotated[int, Field(ge=1, le=30), "In kilograms."],
        to: Annotated[Address, "Where to."],
        speed: Literal["slow", "fast"] = "slow",
        on: date | None = None,
        note: Annotated[str, "A line."] = "",
    ) -> str:
        return f"{weight}{to}{speed}{on}{note}"


def schema_of(method: Any) -> dict[str, Any]:
    return json.loads(tool_of(KernelFunctionFromMethod(method, "post")).schema)


def test_constraints_choices_dates_and_models_are_in_the_schema() -> None:
    """One that Semantic Kernel cannot write as JSON does not lose the others."""
    schema = schema_of(Post().send)
    own = schema["properties"]
    assert schema["description"] == "Sends a parcel."
    assert schema["required"] == ["weight", "to"]
    assert own["weight"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 30,
        "description": "In kilograms.",
    }
    assert own["speed"]["enum"] == ["slow", "fast"]
    assert own["speed"]["default"] == "slow"
    assert {"type": "string", "format": "date"} in own["on"]["anyOf"]
    assert own["note"] == {"type": "string", "description": "A line.", "default": ""}
    address = own["to"]
    assert address["description"] == "Where to."
    assert address["properties"]["zip"]["minimum"] == 1
    assert address["required"] == ["street"]
    assert "$ref" not in json.dumps(schema)
