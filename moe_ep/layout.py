"""EP layouts: what is exchanged, between how many ranks, and how. Written as YAML, checked here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moe_ep.errors import LayoutError

MAX_TOP_K = 32
MAX_EXPERTS = 2048
FP8_BLOCK = 128
MAX_TIMEOUT_S = 7 * 24 * 3600.0

Backend = Literal["auto", "reference", "cuda", "nvshmem"]
BACKENDS: tuple[str, ...] = get_args(Backend)
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8_e4m3": 1}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelShape(_Section):
    """The shape of the MoE model."""

    hidden: int = Field(ge=1, description="columns of a token row")
    num_experts: int = Field(
        ge=1, le=MAX_EXPERTS, description="experts of one MoE layer, all ranks"
    )
    top_k: int = Field(ge=1, le=MAX_TOP_K, description="experts a token is sent to")
    num_moe_layers: int = Field(default=1, ge=1, description="for `moe-ep plan`")


class ParallelShape(_Section):
    """How experts are spread over ranks. The EP group has `expert * expert_tensor` ranks."""

    expert: int = Field(ge=1, description="expert-parallel size")
    expert_tensor: int = Field(default=1, ge=1, description="ranks that share one expert")
    ranks_per_host: int = Field(default=8, ge=1, description="ranks that share a host")

    @property
    def group_size(self) -> int:
        """Ranks of the EP group."""
        return self.expert * self.expert_tensor


class DispatchOptions(_Section):
    """How rows travel."""

    dtype: Literal["bf16", "fp16", "fp32", "fp64", "fp8_e4m3"] = Field(
        default="bf16", description="of the rows that travel"
    )
    scale: Literal["fp32", "power_of_two"] = Field(
        default="fp32", description=f"of fp8_e4m3, one per {FP8_BLOCK} columns"
    )
    row_alignment: int = Field(
        default=1, ge=1, le=4096, description="an expert's rows are padded with zeros to a multiple"
    )
    num_sms: int = Field(default=24, ge=1, le=1024, description="blocks of a kernel at most")
    mode: Literal["throughput", "low_latency"] = Field(
        default="throughput", description="low_latency allows two dispatches in flight"
    )
    exact_combine: bool = Field(default=False, description="sum in slot order, rounding once")
    capacity: int | None = Field(default=None, ge=1, description="static rows of a rank's result")


class InternodeOptions(_Section):
    """How rows travel between hosts (backend nvshmem). Variables that are set win."""

    transport: Literal["auto", "ibgda", "ibrc", "p2p"] = Field(
        default="auto",
        description="ibgda: the GPU sends; ibrc: a CPU thread; p2p: no network, one machine; auto: "
        "as NVSHMEM's variables say",
    )
    max_rdma_tokens: int = Field(
        default=2048,
        ge=1,
        le=65536,
        description="rows that an inbox for one remote host has room for "
        "(DEEP_EP_NUM_MAX_RDMA_TOKENS)",
    )
    ibgda_qp_depth: int | None = Field(
        default=None,
        ge=16,
        le=65536,
        description="messages in flight to one peer (NVSHMEM_QP_DEPTH, NVSHMEM_IBGDA_QP_DEPTH)",
    )
    ib_sl: int | None = Field(
        default=None, ge=0, le=15, description="service level of the fabric (NVSHMEM_IB_SL)"
    )


class Timeouts(_Section):
    """Bounds of every wait for a peer, in seconds."""

    first_s: float = Field(default=300.0, gt=0, le=MAX_TIMEOUT_S, description="the first operation")
    steady_s: float = Field(default=60.0, gt=0, le=MAX_TIMEOUT_S, description="every later one")


class EPLayout(_Section):
    """A validated, immutable description of one expert-parallel exchange.

    Made from keywords, each section as a mapping or an object of its class.

    Raises:
        LayoutError: an unknown key, a wrong value, or values that do not fit each other; the
            message gives the path of the key, its value, and what would be valid.
    """

    model: ModelShape
    parallel: ParallelShape
    tokens_per_rank: int | None = Field(
        default=None, ge=1, description="most tokens of one dispatch; null puts no limit"
    )
    dispatch: DispatchOptions = DispatchOptions()
    internode: InternodeOptions = InternodeOptions()
    backend: Backend = Field(
        default="auto", description="auto takes the fastest that runs here; logs which and why"
    )
    timeouts: Timeouts = Timeouts()

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise LayoutError(_explain(error)) from None

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> EPLayout:
        """As pydantic's, with its arguments, but raises LayoutError."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise LayoutError(_explain(error)) from None

    @model_validator(mode="after")
    def _check_together(self) -> EPLayout:
        model, parallel = self.model, self.parallel
        if model.num_experts % parallel.expert:
            fits = [n for n in range(1, model.num_experts + 1) if model.num_experts % n == 0]
            raise ValueError(
                f"parallel.expert: {parallel.expert} does not divide model.num_experts="
                f"{model.num_experts}; sizes that would fit: {', '.join(map(str, fits))}"
            )
        if model.top_k > model.num_experts:
            raise ValueError(
                f"model.top_k: {model.top_k} is more than model.num_experts={model.num_experts}"
            )
        if model.top_k * parallel.expert_tensor > MAX_TOP_K:
            raise ValueError(
                f"model.top_k * parallel.expert_tensor: {model.top_k * parallel.expert_tensor} "
                f"rows per token; at most {MAX_TOP_K} are supported"
            )
        if self.dispatch.dtype == "fp8_e4m3" and model.hidden % FP8_BLOCK:
            raise ValueError(
                f"model.hidden: {model.hidden}; dispatch.dtype fp8_e4m3 has one scale per "
                f"{FP8_BLOCK} columns, so hidden must be a multiple of {FP8_BLOCK}"
            )
        return self

    @property
    def num_local_experts(self) -> int:
        """Experts held by one EP rank (L)."""
        return self.model.num_experts // self.parallel.expert

    @classmethod
    def from_yaml(cls, path: str | Path) -> EPLayout:
        """Reads a layout file.

        Raises:
            LayoutError: no such file, not YAML, a key that stands twice, or not a valid layout; the
                message gives the path of the key, its value, and what would be valid.
        """
        try:
            return cls(**read_mapping(path, f"a layout is a mapping with the keys {_keys(cls)}"))
        except ValueError as error:
            raise LayoutError(f"{path}: {error}") from None

    def replace(self, /, **changes: Any) -> EPLayout:
        """A validated copy with `changes`, whose keys are dotted, as in "dispatch.dtype".

        Raises:
            LayoutError: no such section or key, or the changed layout is not valid.
        """
        data = self.model_dump()
        for dotted, value in changes.items():
            *sections, key = dotted.split(".")
            target = data
            for section in sections:
                if not isinstance(target.get(section), dict):
                    raise LayoutError(f"{dotted}: no section {section!r} in a layout")
                target = target[section]
            target[key] = value
        return EPLayout(**data)

    def differences(self, other: EPLayout) -> list[str]:
        """Keys on which this and the `other` layout differ, as "key: value here and there"."""
        mine, theirs = _flatten(self.model_dump()), _flatten(other.model_dump())
        return [f"{key}: {mine[key]} and {theirs[key]}" for key in mine if mine[key] != theirs[key]]


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML's own loaders take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        mapping = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)):
            if key.tag == "tag:yaml.org,2002:merge":  # several are merged
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise yaml.YAMLError(
                    f"line {line}: the key {key.value} stands in line {lines[key.value]} already"
                )
            lines[key.value] = line
        return mapping


def read_mapping(path: str | Path, expected: str) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Args:
        expected: the message where it holds something else.

    Raises:
        ValueError: it can't be read, is not YAML, has a key twice, or holds something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error}") from None
    try:
        data = yaml.load(text, _UniqueKeys)
    except RecursionError:
        raise ValueError("not valid YAML: nested too deep") from None
    except Exception as error:  # a value that is not of its tag is a KeyError, ValueError, ...
        raise ValueError(f"not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(expected)
    return {str(key): value for key, value in data.items()}


def _keys(section: type[BaseModel]) -> str:
    return ", ".join(section.model_fields)


def _flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _section_at(location: tuple[int | str, ...]) -> type[BaseModel]:
    section: type[BaseModel] = EPLayout
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        section = annotation
    return section


def _explain(error: ValidationError) -> str:
    """One line a problem: path of the key, the value, what would be valid."""
    lines = []
    for problem in error.errors():
        location = problem["loc"]
        path = ".".join(map(str, location))
        if problem["type"] == "extra_forbidden":
            known = _keys(_section_at(location[:-1]))
            lines.append(f"{path}: unknown key; known here: {known}")
        elif problem["type"] == "missing":
            lines.append(f"{path}: missing")
        elif problem["type"] == "value_error":
            lines.append(str(problem["ctx"]["error"]))
        else:
            lines.append(f"{path}: {problem['input']!r}: {problem['msg'].lower()}")
    return "; ".join(lines)
