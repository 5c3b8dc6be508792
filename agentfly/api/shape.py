"""Finding one's way in a model by the names that YAML uses.

Guarantees:
1. A path leads to the field that validation would fill, or to None.
"""

import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from agentfly.api.base import ApiModel


def fields(model: type[ApiModel]) -> dict[str, FieldInfo]:
    """YAML name -> field."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def bare(annotation: Any) -> Any:
    """The annotation without `Annotated` and without `| None`."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (Union, types.UnionType):
            arms = [arm for arm in get_args(annotation) if arm is not type(None)]
            if len(arms) != 1:
                return annotation
            annotation = arms[0]
        else:
            return annotation


def model_of(annotation: Any) -> type[ApiModel] | None:
    """The model that the annotation holds directly, if it does."""
    inner = bare(annotation)
    return inner if isinstance(inner, type) and issubclass(inner, ApiModel) else None


def child(annotation: Any, part: str | int) -> Any:
    """The annotation one step below: a field, an item or a map's value. None where there is none."""
    model = model_of(annotation)
    if model is not None:
        info = fields(model).get(str(part))
        return None if info is None else info.annotation
    inner = bare(annotation)
    arguments = get_args(inner)
    if get_origin(inner) is tuple and isinstance(part, int):
        return arguments[0]
    if get_origin(inner) in (dict, Mapping) and isinstance(part, str):
        return arguments[1]
    return None


def below(annotation: Any, where: tuple[str | int, ...]) -> Any:
    """The annotation at a path, or None."""
    for part in where:
        annotation = child(annotation, part)
        if annotation is None:
            return None
    return annotation
