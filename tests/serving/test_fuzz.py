"""Whatever a stranger sends is read or refused; nothing else is raised."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ensembles.errors import DataError
from hydra_ensembles.runtime.images import open_image
from hydra_ensembles.serving.limits import Refusal
from hydra_ensembles.serving.protocol_tensors import (
    TYPES,
    read_inputs,
    split_request,
    wanted_outputs,
)
from hydra_ensembles.serving.requests import from_base64, parse_json
from tests.serving.conftest import picture

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)
INPUT = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["text", "input_ids"]) | VALUES,
        "datatype": st.sampled_from([*TYPES, "BYTES"]) | VALUES,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | VALUES,
        "data": st.lists(st.integers(-300, 300), max_size=6) | VALUES,
        "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 9)}) | VALUES,
    },
)
REQUEST = st.fixed_dictionaries(
    {}, optional={"inputs": st.lists(INPUT | VALUES, max_size=3) | VALUES, "outputs": VALUES}
)


def outcome(read: Callable[[], Any]) -> Any:
    """Return what was read, or the refusal; whatever else is raised passes on."""
    try:
        return read()
    except (Refusal, DataError) as refusal:
        return refusal


@settings(max_examples=300, deadline=None)
@given(request=REQUEST, binary=st.binary(max_size=9))
def test_tensors_are_read_or_refused(request: dict[str, Any], binary: bytes) -> None:
    found = outcome(lambda: read_inputs(request, binary))
    if isinstance(found, Refusal):
        assert found.status in (400, 422) and str(found)
    else:
        assert all(isinstance(array, np.ndarray) and array.ndim for array in found.values())
    wanted = outcome(lambda: wanted_outputs(request, ["label", "novelty"]))
    assert isinstance(wanted, list) or wanted.status == 422


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=60), length=st.none() | st.text(max_size=4) | st.just("9"))
def test_bodies_are_read_or_refused(body: bytes, length: str | None) -> None:
    for read in (lambda: split_request(body, length), lambda: parse_json(body)):
        found = outcome(read)
        assert not isinstance(found, Refusal) or found.status in (400, 422)
    decoded = outcome(lambda: from_base64(body))
    assert isinstance(decoded, bytes) or decoded.status == 422


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_damaged_pictures_are_read_or_refused(kind: str) -> None:
    stream = io.BytesIO()
    picture(1, (40, 40)).convert("RGB").save(stream, kind)
    whole = stream.getvalue()
    draw = random.Random(0)
    for _ in range(60):
        content = bytearray(whole[: draw.randrange(1, len(whole) + 1)])
        for _ in range(draw.randrange(6)):
            content[draw.randrange(min(len(content), 64))] = draw.randrange(256)
        found = outcome(partial(open_image, bytes(content), most_pixels=10_000))
        assert isinstance(found, DataError) or found.width * found.height <= 10_000
