"""What the service takes at most, and how it refuses the rest: in plain words."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import HydraError


class Refusal(HydraError):
    """A request that is not answered, with its HTTP status.

    | status | why |
    |---:|---|
    | 400 | not JSON, or a request that is cut off |
    | 401 | no valid token |
    | 404 | no such model or page |
    | 408 | the client was too slow |
    | 413 | too large: body, image, text, or number of rows |
    | 415 | a content type that is not read |
    | 422 | read, but not an input of this model |
    | 429 | the queue is full: try again a little later |
    | 431 | headers too large |
    | 503 | no answer in time, too many large inputs at once, or the service is stopping |
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What the service takes at most.

    Attributes:
        headers: Bytes of a request's path and headers.
        body: Bytes of a request's body.
        bodies: Bytes of the bodies of all requests under way.
        pixels: Pixels of all images of a request, before they are decoded.
        decoding: Pixels that are decoded at one time, over all requests; about 8 bytes each.
        text: Characters of one text.
        rows: Inputs of one request.
        batch: Inputs that the model answers together.
        wait: Seconds that the first input of a batch waits for others.
        queue: Inputs that wait for the model.
        requests: Requests at one time, those that are still being read included.
        read_seconds: For a client to send its request.
        answer_seconds: From a whole request to its answer.
    """

    headers: int = 64 * 2**10
    body: int = 16 * 2**20
    bodies: int = 256 * 2**20
    pixels: int = 40_000_000
    decoding: int = 80_000_000
    text: int = 20_000
    rows: int = 256
    batch: int = 32
    wait: float = 0.002
    queue: int = 1024
    requests: int = 512
    read_seconds: float = 10.0
    answer_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name == "wait" else 1e-9
            if not getattr(self, field.name) >= least:
                raise ValueError(
                    f"The limit {field.name} is {getattr(self, field.name)}: expected a positive "
                    "number."
                )
