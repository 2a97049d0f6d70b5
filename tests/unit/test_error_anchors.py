"""Every error says where docs/troubleshooting.md tells more, and it does tell."""

import pickle
import re
from pathlib import Path

import pytest

import moe_ep
from moe_ep import LayoutError, MoEEPError, PeerError, PeerTimeoutError
from moe_ep.integrations.deepspeed.config import ConfigError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"


def all_errors(base: type[MoEEPError] = MoEEPError) -> list[type[MoEEPError]]:
    return [kind for sub in base.__subclasses__() for kind in (sub, *all_errors(sub))]


def test_all_public_errors_are_walked() -> None:
    public = {getattr(moe_ep, name) for name in moe_ep.__all__ if name.endswith("Error")}
    assert public - {MoEEPError} | {ConfigError} <= set(all_errors())


@pytest.mark.parametrize("kind", all_errors())
def test_anchor_exists_and_is_printed(kind: type[MoEEPError]) -> None:
    assert "anchor" in vars(kind), "each class has a section of its own"
    text = PAGE.read_text()
    at = text.index(f'<a id="{kind.anchor}"></a>\n## ')
    heading = text[at:].splitlines()[1]
    assert kind.__name__ in heading, heading
    message = str(kind("rank 2: 5 is over the limit of 4"))
    assert message.startswith("rank 2: 5 is over the limit of 4")
    assert message.endswith(f" [docs/troubleshooting.md#{kind.anchor}]")
    assert str(pickle.loads(pickle.dumps(kind("words")))) == str(kind("words"))


def test_a_quoted_error_is_not_told_twice() -> None:
    inner = LayoutError("model.hidden: 0")
    assert str(LayoutError(f"my.yaml: {inner}")).count("docs/") == 1
    quoting = str(PeerError(f"rank 0: rank 1 gave bad input: LayoutError: {inner}"))
    assert quoting.endswith("#layout]") and quoting.count("docs/") == 1


def test_a_time_out_is_still_an_os_error() -> None:
    error = PeerTimeoutError("rank 0 waited")
    assert isinstance(error, TimeoutError) and error.args == ("rank 0 waited",)


def test_links_within_the_page() -> None:
    text = PAGE.read_text()
    anchors = set(re.findall(r'<a id="([a-z-]+)"></a>', text))
    assert set(re.findall(r"\(#([a-z-]+)\)", text)) <= anchors
    table = text[: text.index("<a id=")]
    assert set(re.findall(r"\(#([a-z-]+)\)", table)) == anchors
