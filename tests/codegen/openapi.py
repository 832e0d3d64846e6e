"""Whether a manifest is what a published API takes: by the classes generated from its schema."""

import importlib
import re
from collections.abc import Iterator
from typing import Any

from kubeflow.training import models as kubeflow
from kubernetes.client import models as kubernetes

SCALARS = {"str": str, "int": int, "bool": bool, "float": float}


def faults(data: Any, kind: str, place: str = "") -> Iterator[str]:
    """What of `data` is no value of `kind`, a type of the API such as "dict(str, V1Pod)"."""
    listed, mapped = re.fullmatch(r"list\[(.+)\]", kind), re.fullmatch(r"dict\(str, (.+)\)", kind)
    if kind in SCALARS:
        if not isinstance(data, SCALARS[kind]) or (kind == "int" and isinstance(data, bool)):
            yield f"{place} is no {kind}: {data!r}"
    elif listed:
        for number, item in enumerate(data):
            yield from faults(item, listed[1], f"{place}[{number}]")
    elif mapped:
        for key, item in data.items():
            # quantities may be numbers; the models have them as strings
            item = str(item) if mapped[1] == "str" and place.endswith("limits") else item
            yield from faults(item, mapped[1], f"{place}.{key}")
    else:
        yield from _object(data, kind, place)


def _object(data: Any, kind: str, place: str) -> Iterator[str]:
    """What of `data` is no object of the class `kind`."""
    found = getattr(kubeflow, kind, None) or getattr(kubernetes, kind)
    names = {shown: name for name, shown in found.attribute_map.items()}
    if not isinstance(data, dict):
        yield f"{place} is no object: {data!r}"
        return
    for key in data.keys() - names.keys():
        yield f"{place} has an unknown field {key!r}"
    for key in data.keys() & names.keys():
        yield from faults(data[key], found.openapi_types[names[key]], f"{place}.{key}")
    given = {names[key]: value for key, value in data.items() if key in names}
    try:
        _configured(found, given)
    except ValueError as error:  # a field that must be there is not
        yield f"{place}: {error}"


def _configured(found: Any, given: dict[str, Any]) -> Any:
    """An object of the class, whose setters refuse what is missing."""
    home = importlib.import_module(found.__module__.partition(".models")[0] + ".configuration")
    return found(**given, local_vars_configuration=home.Configuration())
