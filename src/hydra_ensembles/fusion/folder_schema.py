"""The format of an ensemble's folder: its files, and the fields of its config.

Everything is checked before a module is built, so that a wrong field is refused here by name and
does not cause a crash or a wrong answer later.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from .._records import check_seal, check_version, inside, read_json
from ..data.transforms import ImageTransform
from ..errors import FormatError, HydraError
from ..heads.head_mask import HeadMask
from ..heads.stream_plan import Plan
from ..hosts.attention import FORMS, UNUSED
from ..hosts.probes import Pooling
from ..prediction_sets import Sets
from ..tasks import MultiClass, Task, as_task
from ..uncertainty import Policy, as_calibrator, scores
from .linear_readout import LinearReadout, Readouts

FORMAT = "hydra-ensembles"
FORMAT_VERSION = (2, 0)
CONFIG, WEIGHTS = "config.json", "model.safetensors"
NOVELTY, CARD = "novelty.safetensors", "README.md"
DIGEST = "config_sha256"
"""Where the config keeps the digest of everything else in it."""

ADVICE = "Save or download the folder again."
PARTS = (
    r"norm1|norm2|query_norm|key_norm|output_bias|mlp\.\d+(\.\w+)*"
    r"|after_attention\.\d+|after_mlp\.\d+"
)
"""Parts of a block that may have one copy per stream, as a regular expression."""

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0)]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Temperature = Annotated[float, Meta(ge=1e-4, le=1e4)]
Mask = Annotated[list[list[Annotated[int, Meta(ge=0, le=1)]]], Meta(min_length=1)]


class LayerRecord(Struct, frozen=True):
    """One branched block of a plan (see `LayerPlan`)."""

    layer: Count
    parents: list[Count]
    members: list[Count]
    heads: Annotated[list[list[Count]], Meta(min_length=1)]
    shared: bool
    readout_only: bool


class PlanRecord(Struct, frozen=True):
    """What `Plan.to_dict` returns."""

    trunk: Count
    trunk_heads: list[list[Count]]
    layers: list[LayerRecord]
    ends: list[Count]
    streams: list[Count]


class ReadoutRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """Which tokens the classifier reads (see `Readout`)."""

    tokens: Annotated[int, Meta(ge=1, le=64)] | None
    folds: bool
    why: str
    end_of_text: bool


class CutRecord(Struct, frozen=True):
    """The heads of one stream that the host engine keeps, and those of them that are on."""

    there: list[int]
    on: list[int]


class Switches(Struct, frozen=True):
    """The options of `fuse`, and what loading must know of the engine."""

    share_trunk: bool = True
    share_branch: bool = True
    readout_only: bool = True
    average: str = "mlp"
    engine: Literal["fused", "host"] = "fused"
    form: Annotated[str, Meta(pattern=r"\A(|(tuple|list) \d)\Z")] = ""
    rotary: str | list[str] = FORMS[0]
    biased: bool = False
    by_layer: bool = False
    keeps_heads: bool = False
    folds: bool | None = None
    cuts: list[list[CutRecord]] | None = None

    def __post_init__(self) -> None:
        forms = self.rotary if isinstance(self.rotary, list) else [self.rotary]
        if not set(forms) <= {*FORMS, UNUSED}:
            raise ValueError(f"rotary is {self.rotary!r:.60}, expected some of {(*FORMS, UNUSED)}")
        if self.engine == "host" and (self.folds is None or self.cuts is None):
            raise ValueError("the host engine needs folds and cuts")


class HostRecord(Struct, frozen=True):
    """What every description of a host has; the library decides about the rest."""

    library: str
    name: str = msgspec.field(name="class")
    buffers: dict[str, Dtype] = {}


class ProcessorRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """What is recorded of an image processor, beside its own file."""

    processor: Literal["preprocessor_config.json"]
    exif_orientation: bool


class ReadoutsRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """Linear readouts (see `Readouts`): where their features are, and their sizes."""

    second: str
    pooling: tuple[Count, Count] | None
    classes: Annotated[int, Meta(ge=1)]
    features: Annotated[int, Meta(ge=1)]
    members: Count
    student: bool

    @classmethod
    def of(cls, readouts: Readouts) -> ReadoutsRecord:
        """Describe the readouts of an ensemble."""
        members, student, pooling = readouts.members, readouts.student, readouts.pooling
        one = members or student
        assert one is not None
        _, classes, features = one.weight.shape
        return cls(
            second=readouts.second,
            pooling=None if pooling is None else (pooling.own, pooling.start),
            classes=classes,
            features=features,
            members=0 if members is None else len(members.weight),
            student=student is not None,
        )

    def empty(self) -> Readouts:
        """Return readouts of these sizes; their weights are filled in later."""
        shape = self.classes, self.features
        return Readouts(
            self.second,
            members=LinearReadout(self.members, *shape) if self.members else None,
            student=LinearReadout(1, *shape) if self.student else None,
            pooling=None if self.pooling is None else Pooling(*self.pooling),
        )


class Structure(Struct, frozen=True):
    """How a host becomes the ensemble: everything that decides its modules and their shapes."""

    family: str
    blocks_path: str
    masks: Annotated[list[Mask], Meta(min_length=1)]
    plan: PlanRecord
    copies: dict[str, Annotated[int, Meta(ge=1)]]
    readout: ReadoutRecord
    merged: list[str]
    switches: dict[str, Any]
    aliases: dict[str, str]
    readouts: ReadoutsRecord | None = None

    def stream_plan(self) -> Plan:
        """Return the plan with its masks."""
        masks = [HeadMask(rows) for rows in self.masks]
        return Plan.from_dict(msgspec.to_builtins(self.plan), masks)


class Config(Structure, frozen=True, kw_only=True):
    """The content of `config.json`."""

    format: Literal["hydra-ensembles"]
    format_version: tuple[Count, Count]
    libraries: dict[str, str]
    host: dict[str, Any]
    mode: Literal["fused", "loop"]
    temperature: Temperature | None
    member_temperatures: list[Temperature] | None
    score: str
    labels: dict[str, str] | None
    policy: dict[str, Any] | None
    image_transform: dict[str, Any] | None
    dtype: Dtype
    sha256: Sha256
    files: dict[str, Sha256]
    record: dict[str, Any]
    novelty: dict[str, Any] | None
    config_sha256: Sha256
    task: dict[str, Any] | None = None
    sets: dict[str, Any] | None = None
    calibrator: dict[str, Any] | None = None


def read_config(folder: Path) -> Config:
    """Read and check the config of a saved ensemble."""
    path = inside(folder, CONFIG)
    if not path.is_file():
        raise FormatError(
            f"No {CONFIG} in {folder}: expected a folder written by save_pretrained()."
        )
    content = read_json(path, "the config of a Hydra ensemble", ADVICE)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        kind = content.get("model_type") if isinstance(content, dict) else type(content).__name__
        raise FormatError(
            f"{path} is not the config of a Hydra ensemble (found {kind or 'another format'!r}). "
            "A host model is loaded with its own library and fused with hydra_ensembles.fuse()."
        )
    major, minor = check_version(content.get("format_version"), FORMAT_VERSION, path)
    if major < FORMAT_VERSION[0]:
        raise FormatError(
            f"{path} has format {major}.{minor}, older than {FORMAT_VERSION[0]}.0 which this "
            "library reads. Build or fuse the ensemble again (its masks in this file still fit: "
            "HeadMask(rows)), or load it with the version of hydra-ensembles that saved it."
        )
    change = "To change a setting, load the original, set it in Python and call save_pretrained()."
    check_seal(content, path, f"Copy or download it again. {change}", DIGEST)
    unknown = content.keys() - set(Config.__struct_fields__)
    if unknown:
        warnings.warn(
            f"{path} has keys that this version does not know and leaves alone: "
            f"{', '.join(sorted(unknown))}.",
            stacklevel=4,
        )
    return check_config(content, str(path))


def check_config(content: Mapping[str, Any], where: str) -> Config:
    """Return a config; raise for the first field that is invalid, alone or beside the others."""
    config = _convert(content, Config, where)
    _convert(config.host, HostRecord, where, "host")
    switches = _convert(config.switches, Switches, where, "switches")
    if config.image_transform is not None and "processor" in config.image_transform:
        _convert(config.image_transform, ProcessorRecord, where, "image_transform")
    try:
        problem = _value_problem(config)
        if problem is None:
            plan = config.stream_plan()
            problem = _plan_problem(plan, config.readout, hosted=switches.engine == "host")
            problem = problem or _cut_problem(switches.cuts, plan)
            problem = problem or _copy_problem(config.copies, plan)
            problem = problem or _readouts_problem(config.readouts, plan)
    except HydraError as error:  # an unknown score, or a mask without a head
        problem = str(error).rstrip(".")
    if problem is not None:
        raise FormatError(f"{where}: {problem}. {ADVICE}")
    return config


def _convert(content: Any, kind: type[T], where: str, field: str = "") -> T:
    """Read plain data as a struct; errors name the field, what was found and what was expected."""
    try:
        return msgspec.convert(content, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        expected, _, place = str(error).partition(" - at ")
    steps = re.findall(r"\.(\w+)|\[(\d+)\]", place)
    for key, index in steps:
        content = content[key] if key else content[int(index)]
    if expected.startswith("Invalid enum"):
        choices = get_args(get_type_hints(kind)[steps[-1][0]])
        expected = f"expected one of {', '.join(map(str, choices))}"
    name = field + place.replace("`", "").replace("$", "").replace("key in ", "a key of ")
    found = f"{name.strip('.')} is {content!r:.60}: " if name else ""
    raise FormatError(f"{where}: {found}{expected[0].lower()}{expected[1:]}. {ADVICE}")


# --- fields that have the right types: each returns what is wrong with their values, or None ---


def _value_problem(config: Config) -> str | None:
    """Check what single fields say, and those that belong together."""
    if problem := _task_problem(config.task) or _calibrator_problem(config.calibrator):
        return problem
    (scores if config.task is None else as_task(config.task).scores)[config.score]
    labels, policy, transform = config.labels, config.policy, config.image_transform
    if labels is not None and set(labels) != {str(n) for n in range(len(labels) or 1)}:
        return f"labels is {labels!r:.60}, expected the classes from 0 on"
    for name in config.files:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name, re.ASCII):
            return f"files has {name!r:.60}, expected the name of a file in the folder"
    if transform is not None and "processor" not in transform:
        whole = transform | {"exif_orientation": transform.get("exif_orientation", False)}
        if problem := _part_problem("image_transform", ImageTransform.from_dict, whole):
            return problem
    if len({tuple(map(len, rows)) for rows in config.masks}) > 1:
        return "masks differ in their numbers of heads"
    temperatures, members = config.member_temperatures, len(config.masks)
    if temperatures is not None and len(temperatures) != members:
        return f"there are {len(temperatures)} member_temperatures for {members} members"
    if (config.novelty is None) != (NOVELTY not in config.files):
        return f"novelty and the file {NOVELTY} belong together, but one is missing"
    if config.sets is not None:
        if problem := _part_problem("sets", Sets.from_dict, config.sets):
            return problem
        task = MultiClass() if config.task is None else as_task(config.task)
        if config.sets["method"] not in task.sets:
            return f"the sets are made by {config.sets['method']!r}, which {task.title} has not"
        if any(novelty for *_, novelty in config.sets["scale"]) and config.novelty is None:
            return "the sets read novelty, but there are no statistics of known data"
    if policy is None:
        return None
    if problem := _part_problem("policy", Policy.from_dict, policy):
        return problem
    if policy["score"] != config.score:
        return f"the policy is about {policy['score']!r}, the score is {config.score!r}"
    if policy["alarm"] is not None and config.novelty is None:
        return "the policy has an alarm, but there are no statistics of known data"
    return None


def _task_problem(described: dict[str, Any] | None) -> str | None:
    """Check a task by its own reader; None, as older folders have it, is one class per input."""
    try:
        whole = described is None or described == plain_task(as_task(described))
    except (HydraError, TypeError, ValueError, KeyError) as error:
        return f"task is {described!r:.60}: {error}".rstrip(".")
    return None if whole else f"task is {described!r:.60}, expected all of its options"


def _calibrator_problem(described: dict[str, Any] | None) -> str | None:
    """Check a calibrator by its own reader."""
    try:
        found = as_calibrator(described)
    except (HydraError, TypeError, ValueError, KeyError, AttributeError) as error:
        return f"calibrator is {described!r:.60}: {error}".rstrip(".")
    whole = found is None or found.to_dict() == described
    return None if whole else f"calibrator is {described!r:.60}, expected its own fields"


def plain_task(task: Task) -> dict[str, Any]:
    """Return a task as JSON holds it."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in task.to_dict().items()}


def _part_problem(
    name: str,
    read: Callable[[dict[str, Any]], Policy | Sets | ImageTransform],
    value: dict[str, Any],
) -> str | None:
    """Check a part by its own reader, which must not fill in defaults: they may change."""
    try:
        whole = read(value).to_dict() == value
    except (HydraError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        return f"{name} is {value!r:.60}: {error}".rstrip(".")
    return None if whole else f"{name} is {value!r:.60}, expected all of its fields"


def _plan_problem(plan: Plan, readout: ReadoutRecord, *, hosted: bool) -> str | None:
    """Say where a plan contradicts itself or its masks; follow every member through it."""
    masks, members, depth = plan.masks, plan.members, len(plan.masks[0])
    if plan.depth != depth or len(plan.trunk_heads) != plan.trunk:
        return f"the plan has {plan.depth} layers, the masks have {depth}"
    for layer, trunk in enumerate(plan.trunk_heads):
        if any(list(trunk) != mask.indices(layer) for mask in masks):
            return f"the plan's trunk keeps other heads in layer {layer} than the masks"
    streams = 1
    for place, layer_plan in enumerate(plan.layers, start=plan.trunk):
        name = f"layer {place} of the plan"
        parents, heads, firsts = layer_plan.parents, layer_plan.heads, layer_plan.members
        if layer_plan.layer != place:
            return f"{name} says that it is layer {layer_plan.layer}"
        if not len(parents) == len(heads) == len(firsts) or set(parents) != set(range(streams)):
            return f"{name} does not take the {streams} streams of the layer before"
        if any(len(set(row)) != len(row) for row in heads):
            return f"{name} has a stream with the same head twice"
        distinct = {head for row in heads for head in row}
        if not hosted and distinct != set(range(len(distinct))):
            return f"{name} numbers its distinct heads with gaps"
        if any(first >= members for first in firsts):
            return f"{name} names a member beyond the {members}"
        if layer_plan.readout_only and place != depth - 1:
            return f"{name} is not the last, but runs for the readout only"
        streams = len(parents)
    reads = readout.tokens is not None or readout.end_of_text
    if plan.layers and plan.layers[-1].readout_only and not reads:
        return "the plan's last layer runs for the readout only, but all tokens are read"
    if any(end >= streams for end in plan.ends) or set(plan.streams) != set(range(len(plan.ends))):
        return "the plan's ends and streams name streams that are not there"
    if len(plan.streams) != members:
        return f"the plan has {len(plan.streams)} members, but there are {members} masks"
    for member, mask in enumerate(masks):
        for layer_plan in plan.layers:
            planned = len(layer_plan.heads[plan.stream_of(layer_plan.layer, member)])
            kept = mask.kept[layer_plan.layer]
            if planned != kept:
                name = f"member {member} in layer {layer_plan.layer}"
                return f"{name} has {kept} heads by its mask, {planned} by the plan"
    return None


def _cut_problem(cuts: list[list[CutRecord]] | None, plan: Plan) -> str | None:
    """Say where the cuts of the host's own blocks do not fit the plan."""
    kept = [(heads,) for heads in plan.trunk_heads] + [layer.heads for layer in plan.layers]
    if cuts is None:
        return None
    if [len(row) for row in cuts] != [len(streams) for streams in kept]:
        return "switches.cuts does not have one cut for each layer and stream"
    for layer, (row, streams) in enumerate(zip(cuts, kept, strict=True)):
        for cut, heads in zip(row, streams, strict=True):
            in_order = cut.there == sorted(set(cut.there))
            if not in_order or not set(cut.on) <= set(cut.there) or len(cut.on) != len(heads):
                return f"a cut of layer {layer} keeps {cut.on!r:.60} of {cut.there!r:.60}"
    return None


def _copy_problem(copies: dict[str, int], plan: Plan) -> str | None:
    """Say where the numbers of copies do not fit the plan."""
    allowed = {str(layer.layer): {1, layer.streams, layer.inputs} for layer in plan.layers}
    allowed["classifier"] = {1, len(plan.ends)}
    for name, count in copies.items():
        place = name.partition(".")[0]
        if not re.fullmatch(rf"\d+\.({PARTS})|classifier\.[\w.]+", name):
            return f"copies has {name!r:.60}, expected a part of a block or classifier"
        if place not in allowed:
            return f"copies name layer {place}, which is not branched"
        if count not in allowed[place]:
            return f"{name} has {count} copies, expected one of {sorted(allowed[place])}"
    return None


def _readouts_problem(readouts: ReadoutsRecord | None, plan: Plan) -> str | None:
    """Say where linear readouts do not fit the plan."""
    if readouts is None:
        return None
    if not readouts.members and not readouts.student:
        return "readouts has neither members nor a student"
    if readouts.members not in (0, plan.members):
        return f"readouts has {readouts.members} members, but there are {plan.members} masks"
    if not plan.layers or plan.layers[-1].layer != plan.depth - 1:
        return "readouts needs a plan whose last layer is branched"
    return None
