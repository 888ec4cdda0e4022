"""Waivers: known failures that somebody answers for until a date."""

from __future__ import annotations

import datetime
import fnmatch
import tomllib
from collections.abc import Sequence
from pathlib import Path

import attrs

from halogen_core.errors import ConfigError

LONGEST_DAYS = 366


@attrs.frozen(kw_only=True)
class Waiver:
    """Failing cases that match `id` count as WAIVED until `expires`."""

    id: str
    """A case id, or a pattern with `*`."""
    reason: str
    link: str
    expires: datetime.date

    def covers(self, case_id: str) -> bool:
        return fnmatch.fnmatchcase(case_id, self.id)


def read_waivers(path: Path, today: datetime.date | None = None) -> tuple[Waiver, ...]:
    """Waivers of a TOML file of `[[waiver]]` tables.

    Raises `ConfigError` (HRT-6002) for one that lacks a reason, a link or an expiry within a year,
    or that has expired.
    """
    today = today or datetime.date.today()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"waivers `{path}` cannot be read: {exc}", code="HRT-6002") from exc
    return tuple(_waiver(entry, today) for entry in data.get("waiver", []))


def _waiver(entry: dict[str, object], today: datetime.date) -> Waiver:
    wanted = {"id", "reason", "link", "expires"}
    if set(entry) != wanted or not all(entry.values()):
        raise _refused(entry, f"needs exactly {', '.join(sorted(wanted))}, none of them empty")
    expires = entry["expires"]
    if not isinstance(expires, datetime.date):
        raise _refused(entry, "`expires` must be a TOML date such as 2030-01-31")
    if expires < today:
        raise _refused(entry, f"expired on {expires}")
    if (expires - today).days > LONGEST_DAYS:
        raise _refused(entry, f"`expires` is {expires}, more than a year from today")
    if "://" not in str(entry["link"]):
        raise _refused(entry, "`link` must be a URL")
    return Waiver(
        id=str(entry["id"]), reason=str(entry["reason"]), link=str(entry["link"]), expires=expires
    )


def _refused(entry: dict[str, object], why: str) -> ConfigError:
    return ConfigError(
        f"waiver for `{entry.get('id', '?')}` {why}",
        code="HRT-6002",
        fix="mend the backend, or renew the waiver with its reason",
    )


def covering(waivers: Sequence[Waiver], case_id: str) -> Waiver | None:
    """The first waiver for a case."""
    return next((w for w in waivers if w.covers(case_id)), None)
