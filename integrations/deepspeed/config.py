"""The "moe_ep" section of a DeepSpeed JSON."""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_ep import env
from moe_ep.errors import LayoutError, MoEEPError
from moe_ep.layout import MAX_TIMEOUT_S, Backend, EPLayout

SECTION = "moe_ep"


class ConfigError(MoEEPError, ValueError):
    """The "moe_ep" section of a DeepSpeed config is invalid; the message has the key's path."""

    anchor = "deepspeed-config"


class TimeoutOptions(BaseModel):
    """Bounds of every wait for a peer, in seconds; they replace the layout's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    first_s: float | None = Field(
        default=None, gt=0, le=MAX_TIMEOUT_S, description="the first operation"
    )
    steady_s: float | None = Field(
        default=None, gt=0, le=MAX_TIMEOUT_S, description="every later one"
    )


class MoEEPConfig(BaseModel):
    """What a DeepSpeed JSON has under "moe_ep".

    Attributes:
        enabled: false leaves DeepSpeed as it is.
        layout: path of an EP layout file (YAML), relative to the working directory; it must agree
            with the model. None: the file named by MOE_EP_LAYOUT, or else what the model says.
        backend: replaces the layout's backend.
        tokens_per_rank: most tokens a rank passes to one exchange; replaces the layout's.
        timeouts: replace the layout's.
        statistics_every: global steps between two records of what dispatch and combine did, among
            the events of DeepSpeed's monitors; 0 collects none. See docs/operating.md.
        exact_clipping: in fp32 without ZeRO, clip by the norm of all gradients, every expert
            counted once; see `clipping`. Off, because it changes the losses of a run that clips.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    enabled: bool = False
    layout: str | None = None
    backend: Backend | None = None
    tokens_per_rank: int | None = Field(default=None, ge=1)
    timeouts: TimeoutOptions = TimeoutOptions()
    statistics_every: int = Field(default=0, ge=0)
    exact_clipping: bool = False

    @classmethod
    def parse(cls, section: Any) -> MoEEPConfig:
        """Checks a section.

        Raises:
            ConfigError: unknown key or wrong value; the message has its path from the top.
        """
        if not isinstance(section, dict):
            raise ConfigError(f"{SECTION}: {section!r} must be an object, as in {_EXAMPLE}")
        try:
            return cls.model_validate(section)
        except ValidationError as error:
            raise ConfigError("; ".join(map(_explain, error.errors()))) from None

    def named_layout(self) -> EPLayout | None:
        """The layout file named here or in the environment.

        Raises:
            LayoutError: it can't be read or is invalid.
        """
        path = self.layout or env.layout_path()
        if path is None:
            return None
        where = f"{SECTION}.layout" if self.layout else env.LAYOUT
        try:
            return EPLayout.from_yaml(path)
        except LayoutError as error:
            raise LayoutError(f"{where}: {error}") from None

    def changes(self) -> dict[str, Any]:
        """What the section replaces in a layout, as arguments of `EPLayout.replace`."""
        values = {
            "backend": self.backend,
            "tokens_per_rank": self.tokens_per_rank,
            "timeouts.first_s": self.timeouts.first_s,
            "timeouts.steady_s": self.timeouts.steady_s,
        }
        return {key: value for key, value in values.items() if value is not None}


_EXAMPLE = f'{{"{SECTION}": {{"enabled": true}}}}'


def read_config(config: Any, config_params: Any, args: Any) -> dict[str, Any]:
    """The DeepSpeed config that `deepspeed.initialize` will use for these arguments.

    Returns:
        Its content; empty where there is none or it can't be read, which DeepSpeed itself reports.
    """
    chosen = config if config is not None else config_params
    for attribute in ("deepspeed_config", "deepscale_config"):
        if chosen is None:
            chosen = getattr(args, attribute, None)
    if isinstance(chosen, dict):
        return chosen
    if not isinstance(chosen, (str, Path)):
        return {}
    try:
        if Path(chosen).exists():
            return _loads(Path(chosen).read_text())
        return _loads(base64.urlsafe_b64decode(str(chosen)).decode())
    except (OSError, ValueError, binascii.Error):
        return {}


def _loads(text: str) -> dict[str, Any]:
    try:
        import hjson  # DeepSpeed's own reader: comments and trailing commas are allowed
    except ImportError:
        loads = json.loads
    else:
        loads = hjson.loads
    data = loads(text)
    return data if isinstance(data, dict) else {}


def _explain(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    path = ".".join([SECTION, *location])
    if problem["type"] == "extra_forbidden":
        model = TimeoutOptions if location[:-1] == ["timeouts"] else MoEEPConfig
        return f"{path}: unknown key; known here: {', '.join(model.model_fields)}"
    return f"{path}: {problem['input']!r}: {problem['msg'].lower()}"
