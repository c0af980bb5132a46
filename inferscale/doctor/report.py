"""What a check says, and what all of them say together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from inferscale.errors import InferScaleError

Status = Literal["ok", "note", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. A "note" says how something is; a "fault" must be mended."""

    name: str
    status: Status
    detail: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was looked at, in order."""

    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """True if there is no fault; warnings are none."""
        return all(check.status != "fault" for check in self.checks)

    def form(self) -> dict[str, Any]:
        """For JSON."""
        return {"healthy": self.healthy, "checks": [asdict(check) for check in self.checks]}


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """The check's result; whatever it raises is its fault (a doctor must survive what it finds)."""
    try:
        return check()
    except InferScaleError as error:
        return Check(name, "fault", str(error), {"error": type(error).__name__})
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Check(name, "fault", text, {"error": type(error).__name__})
